// Norms, clipping and skips of whole models: over data-parallel and model-parallel ranks, with copies,
// separate norms and everything that reports can have. Oracle: the model in one process, see Oracle.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "support/device_over_host.h"
#include "support/devices.h"
#include "support/host_view.h"
#include "support/optimizer_fixture.h"
#include "support/reference_adam.h"
#include "support/thrown_message.h"

#include "mxopt/collectives/traced_communicator.h"

namespace mxopt {
namespace {

using test::bits_equal;
using test::contains;
using test::HostView;
using test::Place;
using test::run_ranks;
using test::spec;
using test::thrown_message;

const float kNan = std::numeric_limits<float>::quiet_NaN();

/// data x model ranks: rank d of the data-parallel group of part m.
struct Grid {
  int data = 1, model = 1;
};

struct GridRank {
  Communicator& data;  // as the optimizer uses it, like the next one
  Communicator& model;
  Communicator& side;  // of the data-parallel group, for the test
  Place place;
};

void run_grid(Grid grid, Device device, const std::function<void(const GridRank&)>& body) {
  run_ranks(grid.data * grid.model, [&](Communicator& all) {
    const int part = all.rank() / grid.data;
    const auto data = all.split(part, all.rank());
    const auto model = all.split(all.rank() % grid.data, all.rank());
    const auto side = all.split(part, all.rank());
    const Stream stream(device);
    const Place place{device, stream.ref()};
    if (device.kind == DeviceKind::kHost) return body({*data, *model, *side, place});
    test::DeviceOverHost device_data(*data, device), device_model(*model, device);
    body({device_data, device_model, *side, place});
  });
}

void write_grad(DistributedAdam& opt, const std::string& name, std::span<const float> values, float factor,
                Place place) {
  const HostView grad(place.device, place.stream, opt.grad(name).data);
  test::write_values(grad.span(), values, factor);
  grad.store();
}

void fill_grad(DistributedAdam& opt, const std::string& name, float value, Place place) {
  const auto elems = static_cast<std::size_t>(opt.grad(name).data.elems);
  write_grad(opt, name, std::vector<float>(elems, value), 1, place);
}

std::vector<float> whole_master(DistributedAdam& opt, const std::string& name, const GridRank& rank) {
  const OwnedSlice slice = opt.owned(name);
  const HostView master(rank.place.device, rank.place.stream, TypedSpan(slice.master));
  const std::int64_t elems = opt.layout().param(opt.layout().find(name)).elems();
  return test::whole_state(rank.side, elems, slice.param_begin, master.span().as<float>());
}

/// A param of the model that is on one model-parallel rank, or on all of them.
struct ModelParam {
  ParamSpec spec;
  int part = 0;  // on rank part % M; -1: on all
  bool is_on(int rank, int ranks) const { return part < 0 || part % ranks == rank; }
  bool has_gradient() const { return !spec.frozen && spec.tied_to.empty(); }
  bool is_head() const { return spec.name.find("head") != std::string::npos; }
};

std::vector<ModelParam> model_params() {
  std::vector<ModelParam> model = {
      {spec("embed", {96, 64}, ParamFormat::kMxfp8, Storage::kBoth), 0},
      {spec("head.w", {64, 96}, ParamFormat::kMxfp8, Storage::kBoth), 1},
      {spec("head.b", {33}, ParamFormat::kFp32), 2},
      {spec("mlp", {3, 32, 160}, ParamFormat::kMxfp8, Storage::kRow), 3},
      {spec("copy.norm", {24}, ParamFormat::kFp32), -1},
      {spec("stack", {160, 96}, ParamFormat::kMxfp8, Storage::kBoth), 4},
      {spec("bias", {5}), 5},
      {spec("big", {9001}, ParamFormat::kBf16), 1},
      {spec("copy.head", {64}), -1},
      {spec("frozen", {64, 32}, ParamFormat::kMxfp8, Storage::kRow), 0},
      {spec("embed.out", {96, 64}, ParamFormat::kMxfp8, Storage::kBoth), 0},
  };
  for (ModelParam& param : model) {
    if (param.part < 0) param.spec.duplicate_key = "all:" + param.spec.name;
    param.spec.frozen = param.spec.name == "frozen";
    if (param.spec.name == "embed.out") param.spec.tied_to = "embed";
  }
  return model;
}

Config model_config(DType grad_dtype) {
  Config config;
  OptimizerConfig& optimizer = config.optimizer;
  optimizer.lr = 3e-3;
  optimizer.decay_1d = true;
  optimizer.grad_dtype = grad_dtype;
  optimizer.clip_grad = 4;
  optimizer.skip_norm = 40;
  optimizer.param_norms = true;
  optimizer.count_zeros = true;
  optimizer.bucket_elems = 7000;
  optimizer.loss_scale = {LossScaleKind::kDynamic, 4096, 1, 3, 1};
  GroupConfig heads;
  heads.match = "head.*";
  heads.norm_group = "heads";
  heads.clip_grad = 0.5;
  optimizer.groups = {heads, heads};
  optimizer.groups[1].match = "*.head";
  return config;
}

constexpr int kSteps = 8;
constexpr const char* kBadParam = "stack";

/// The gradient of a step after the reduction, without the loss scale: that of step 2 has a NaN, that of step
/// 4 is too large, that of step 5 is too large in the heads.
std::vector<float> model_grad(const ModelParam& param, std::int64_t elems, int step) {
  std::vector<float> grad = test::grad_values(param.spec.name, elems, step);
  const float factor = step == 4 ? 64.0f : step == 5 && param.is_head() ? 512.0f : 1.0f;
  for (float& value : grad) value *= factor;
  if (step == 2 && param.spec.name == kBadParam) grad.back() = kNan;
  return grad;
}

/// The norm of gradients whose squares have an exact FP64 sum, correctly rounded.
double exact_norm(const std::vector<float>& values) {
  double sum = 0;
  for (const float value : values) sum += static_cast<double>(value) * static_cast<double>(value);
  return std::sqrt(sum);
}

/// The model in one process: plain FP64 sums, which are exact for these gradients, and the literal Adam.
class Oracle {
 public:
  explicit Oracle(const Config& config) : config_(config.optimizer) {
    for (const ModelParam& param : model_params()) {
      std::int64_t elems = 1;
      for (const std::int64_t dim : param.spec.shape) elems *= dim;
      params_.push_back(
          {param, reference::AdamState<float>(test::initial_values(param.spec.name, elems)), {}, 0, 0});
    }
  }

  struct Param {
    ModelParam model;
    reference::AdamState<float> state;
    std::vector<float> grad;
    double grad_norm = 0, weight_norm = 0;
  };
  std::span<const Param> params() const { return params_; }

  void step(int step) {
    std::vector<float> common, heads;
    zeros = 0;
    for (Param& p : params_) {
      const auto elems = static_cast<std::int64_t>(p.state.p.size());
      if (!p.model.has_gradient()) continue;
      p.grad = model_grad(p.model, elems, step);
      p.grad_norm = exact_norm(p.grad);
      p.weight_norm = reference::norm(std::vector<std::vector<float>>{p.state.p});
      zeros += std::ranges::count(p.grad, 0.0f);
      std::vector<float>& to = p.model.is_head() ? heads : common;
      to.insert(to.end(), p.grad.begin(), p.grad.end());
    }
    norm = exact_norm(common);
    heads_norm = exact_norm(heads);
    reason = SkipReason::kNone;
    if (norm > config_.skip_norm || heads_norm > config_.skip_norm) reason = SkipReason::kGradNorm;
    if (std::isnan(norm)) reason = SkipReason::kNonFiniteGradient;
    clip = heads_clip = 1;
    loss_scale = next_loss_scale;
    // Halved after the overflow of step 2, doubled after three clean steps, for which skips 4 and 5 count.
    next_loss_scale = step < 2 ? 4096 : step < 5 ? 2048 : 4096;
    if (reason != SkipReason::kNone) return;
    ++taken;
    clip = static_cast<float>(reference::clip_factor(norm, config_.clip_grad));
    heads_clip = static_cast<float>(reference::clip_factor(heads_norm, 0.5));
    for (Param& p : params_) {
      if (!p.model.has_gradient()) continue;
      reference::AdamSettings settings;
      settings.lr = config_.lr;
      // Scaled gradients are multiplied by clip / scale, and the scale is a power of two.
      settings.grad_factor = static_cast<double>(p.model.is_head() ? heads_clip : clip);
      reference::adam_step(p.state, p.grad, settings, taken);
    }
  }

  SkipReason reason = SkipReason::kNone;
  double norm = 0, heads_norm = 0;
  float clip = 1, heads_clip = 1;
  std::int64_t zeros = 0, taken = 0;
  double loss_scale = 0, next_loss_scale = 4096;

 private:
  OptimizerConfig config_;
  std::vector<Param> params_;
};

void expect_same_number(double expected, double actual, const char* what) {
  if (std::isnan(expected)) {
    EXPECT_TRUE(std::isnan(actual)) << what << ' ' << actual;
  } else {
    EXPECT_EQ(expected, actual) << what;
  }
}

void expect_record(const Oracle& expected, const StepRecord& record, Grid grid, int model_rank,
                   bool has_model, bool with_details) {
  EXPECT_EQ(record.taken, expected.reason == SkipReason::kNone);
  EXPECT_EQ(skip_reason_name(record.skip_reason), skip_reason_name(expected.reason));
  EXPECT_EQ(record.step, expected.taken);
  const bool is_bad = expected.reason == SkipReason::kNonFiniteGradient;
  expect_same_number(expected.norm, record.grad_norm, "norm");
  EXPECT_EQ(record.clip_factor, expected.clip);
  ASSERT_EQ(record.norm_groups.size(), 1U);
  EXPECT_EQ(record.norm_groups[0].name, "heads");
  expect_same_number(is_bad ? std::nan("") : expected.heads_norm, record.norm_groups[0].grad_norm, "heads");
  EXPECT_EQ(record.norm_groups[0].clip_factor, expected.heads_clip);
  EXPECT_EQ(record.zero_grads, with_details ? expected.zeros : -1);
  EXPECT_EQ(record.loss_scale, expected.loss_scale);
  EXPECT_EQ(record.next_loss_scale, expected.next_loss_scale);

  std::vector<std::string> bad_params;
  int bad_rank = -1;
  auto reported = record.param_norms.begin();
  for (const Oracle::Param& param : expected.params()) {
    const ModelParam& model = param.model;
    if (is_bad && model.spec.name == kBadParam) bad_rank = model.part % grid.model;
    if (!model.has_gradient() || !model.is_on(model_rank, grid.model)) continue;
    if (is_bad && model.spec.name == kBadParam) bad_params.push_back(kBadParam);
    if (!with_details) continue;
    ASSERT_NE(reported, record.param_norms.end());
    EXPECT_EQ(reported->name, model.spec.name);
    expect_same_number(param.grad_norm, reported->grad_norm, model.spec.name.c_str());
    EXPECT_NEAR(reported->weight_norm / param.weight_norm, 1, 1e-14) << model.spec.name;
    ++reported;
  }
  EXPECT_EQ(reported, record.param_norms.end());
  EXPECT_EQ(record.nonfinite_gradient_params, bad_params);
  EXPECT_EQ(record.nonfinite_gradient_rank, has_model ? bad_rank : -1);
}

void compare_grid(Grid grid, Device device, DType grad_dtype, bool with_details = true) {
  Config config = model_config(grad_dtype);
  config.optimizer.param_norms = config.optimizer.count_zeros = with_details;
  run_grid(grid, device, [&](const GridRank& rank) {
    const int model_rank = rank.model.rank();
    const bool has_model = grid.model > 1 || grid.data == 2;
    std::vector<ParamSpec> specs;
    for (const ModelParam& param : model_params()) {
      if (param.is_on(model_rank, grid.model)) specs.push_back(param.spec);
    }
    DistributedAdam opt(specs, config, {rank.data, has_model ? &rank.model : nullptr}, device);
    test::set_all_initial(opt, specs, rank.data.rank(), rank.place.stream);
    opt.publish(rank.place.stream);
    Oracle oracle(config);
    for (int step = 0; step < kSteps; ++step) {
      SCOPED_TRACE("step " + std::to_string(step));
      oracle.step(step);
      const float scale = test::loss_scale_of(opt, rank.place);
      for (const Oracle::Param& param : oracle.params()) {
        if (!param.model.has_gradient() || !param.model.is_on(model_rank, grid.model)) continue;
        std::vector<float> grad = param.grad;
        // One rank's NaN is one of all.
        if (rank.data.rank() != step % grid.data && std::isnan(grad.back())) grad.back() = 1;
        write_grad(opt, param.model.spec.name, grad, scale, rank.place);
      }
      const StepReport report = opt.step(rank.place.stream);
      expect_record(oracle, *report, grid, model_rank, has_model, with_details);
    }
    EXPECT_EQ(oracle.taken, kSteps - 3);
    for (const Oracle::Param& param : oracle.params()) {
      if (!param.model.is_on(model_rank, grid.model) || !param.model.spec.tied_to.empty()) continue;
      SCOPED_TRACE(param.model.spec.name);
      EXPECT_TRUE(bits_equal(param.state.p, whole_master(opt, param.model.spec.name, rank)));
    }
  });
}

class NormsOf : public ::testing::TestWithParam<DeviceKind> {
 protected:
  void SetUp() override { MXOPT_SKIP_WITHOUT(device()); }
  Device device() const { return {GetParam(), 0}; }
};
INSTANTIATE_TEST_SUITE_P(Devices, NormsOf, ::testing::ValuesIn(test::built_device_kinds()),
                         [](const auto& kind) { return test::device_kind_name(kind.param); });

TEST_P(NormsOf, WholeModelsAreThoseOfTheReferenceForEveryGrid) {
  for (const Grid grid : {Grid{1, 1}, Grid{2, 1}, Grid{3, 1}, Grid{4, 1}, Grid{7, 1}, Grid{1, 2}, Grid{1, 3},
                          Grid{1, 7}, Grid{2, 2}, Grid{3, 2}, Grid{2, 3}}) {
    SCOPED_TRACE(std::to_string(grid.data) + " x " + std::to_string(grid.model));
    compare_grid(grid, device(), DType::kFp32);
  }
  compare_grid({2, 2}, device(), DType::kBf16);
  for (const Grid grid : {Grid{1, 1}, Grid{3, 2}}) compare_grid(grid, device(), DType::kFp32, false);
}

TEST_P(NormsOf, CopiesOnModelParallelRanksCountOnce) {
  for (const Grid grid : {Grid{1, 1}, Grid{1, 2}, Grid{2, 2}, Grid{3, 1}, Grid{1, 4}, Grid{2, 4}}) {
    run_grid(grid, device(), [&](const GridRank& rank) {
      // 1000 elements that the model-parallel ranks share, and 24 that all of them have.
      std::vector<ParamSpec> specs = {spec("part", {1000 / grid.model}),
                                      spec("copy." + std::to_string(rank.model.rank()), {24})};
      specs[1].duplicate_key = "copy";
      Config config;
      config.optimizer.count_zeros = true;
      DistributedAdam opt(specs, config, {rank.data, &rank.model}, device());
      test::set_all_initial(opt, specs, 0, rank.place.stream);
      opt.publish(rank.place.stream);
      for (const ParamSpec& s : specs) fill_grad(opt, s.name, 1, rank.place);
      const StepReport ones = opt.step(rank.place.stream);
      EXPECT_EQ(ones->grad_norm, 32) << grid.data << " x " << grid.model;
      EXPECT_EQ(ones->zero_grads, 0);
      // The gradients were zeroed after their reduction.
      const StepReport zeros = opt.step(rank.place.stream);
      EXPECT_EQ(zeros->grad_norm, 0);
      EXPECT_EQ(zeros->zero_grads, 1024) << grid.data << " x " << grid.model;
      // A copy that is not counted is looked at all the same.
      if (rank.model.rank() == grid.model - 1) fill_grad(opt, specs[1].name, kNan, rank.place);
      const StepReport bad = opt.step(rank.place.stream);
      EXPECT_FALSE(bad->taken);
      EXPECT_EQ(bad->nonfinite_gradient_rank, grid.model - 1);
    });
  }
}

TEST_P(NormsOf, OffByDefaultReportsHaveNothingOfThem) {
  run_grid({1, 1}, device(), [&](const GridRank& rank) {
    const std::vector<ParamSpec> specs = {spec("a", {64})};
    DistributedAdam opt(specs, Config(), rank.data, device());
    test::set_all_initial(opt, specs, 0, rank.place.stream);
    opt.publish(rank.place.stream);
    fill_grad(opt, "a", 1e30f, rank.place);
    const StepReport report = opt.step(rank.place.stream);
    EXPECT_TRUE(report->taken) << "no limit on the norm";
    EXPECT_EQ(report->zero_grads, -1);
    EXPECT_TRUE(report->param_norms.empty());
    EXPECT_TRUE(report->norm_groups.empty());
    EXPECT_EQ(report->nonfinite_gradient_rank, -1);
  });
}

TEST_P(NormsOf, AllOfThemAreOneMessageOfEachGroupAndNoMoreLaunches) {
  std::vector<int> launches;
  for (const bool with_all : {false, true}) {
    run_grid({2, 2}, device(), [&](const GridRank& rank) {
      TracedCommunicator data(rank.data), model(rank.model);
      std::vector<ParamSpec> specs;
      for (const ModelParam& param : model_params()) specs.push_back(param.spec);
      Config config;
      if (with_all) config = model_config(DType::kFp32);
      config.optimizer.bucket_elems = 7000;
      DistributedAdam opt(specs, config, {data, with_all ? &model : nullptr}, device());
      test::set_all_initial(opt, specs, 0, rank.place.stream);
      opt.publish(rank.place.stream);
      for (int step = 0; step < 2; ++step) {
        data.reset();
        model.reset();
        const StepReport report = opt.step(rank.place.stream);
        EXPECT_EQ(data.counts(Traffic::kStatistics).operations, 1);
        EXPECT_EQ(model.counts(Traffic::kStatistics).operations, with_all ? 1 : 0);
        EXPECT_EQ(data.counts(Traffic::kControl).operations + model.counts(Traffic::kControl).operations, 0);
        if (data.rank() + model.rank() + step == 0) launches.push_back(report->launches);
      }
      if (!with_all) return;
      // The head of 21 numbers, 2 of the ranks, 18 of the heads' norm, and 38 of each of 11 params.
      EXPECT_EQ(model.counts(Traffic::kStatistics).bytes, (22 + 2 * 2 + 18) * 8);
      EXPECT_EQ(data.counts(Traffic::kStatistics).bytes, (22 + 2 * 2 + 18 + 11 * 38) * 8);
    });
  }
  ASSERT_EQ(launches.size(), 2U);
  EXPECT_EQ(launches[0], launches[1]);
}

/// What the error of the second skip in a row says on every rank of a grid of 1 x 2, by rank.
std::vector<std::string> limit_messages(Device device, float value, const std::string& name) {
  std::vector<std::string> texts(2);
  run_grid({1, 2}, device, [&](const GridRank& rank) {
    const std::vector<ParamSpec> specs = {spec("a", {64}), spec("b", {100}), spec("head.x", {16})};
    Config config = model_config(DType::kFp32);
    config.optimizer.groups.pop_back();
    config.optimizer.max_consecutive_skips = 2;
    config.optimizer.loss_scale = {};
    DistributedAdam opt(specs, config, {rank.data, &rank.model}, device);
    test::set_all_initial(opt, specs, 0, rank.place.stream);
    opt.publish(rank.place.stream);
    const auto step = [&] {
      if (rank.model.rank() == 1) fill_grad(opt, name, value, rank.place);
      return opt.step(rank.place.stream);
    };
    EXPECT_EQ(step()->consecutive_skips, 1);
    texts[static_cast<std::size_t>(rank.model.rank())] = thrown_message<ContractError>([&] { *step(); });
    EXPECT_TRUE(opt.step(rank.place.stream)->taken) << "the trainer may go on";
  });
  return texts;
}

TEST_P(NormsOf, TheLimitOnSkipsNamesTheCause) {
  const std::string start =
      "step: 2 steps in a row were skipped (optimizer.max_consecutive_skips is 2); the last one because of ";
  const std::vector<std::string> bad = limit_messages(device(), kNan, "b");
  EXPECT_EQ(bad[1], start + "a non-finite gradient of param 'b'");
  EXPECT_EQ(bad[0], start + "a non-finite gradient on rank 1 of the model-parallel group");
  for (const std::string& text : limit_messages(device(), 5, "b")) {
    EXPECT_EQ(text, start + "a gradient norm of 50, above optimizer.skip_norm, 40");
  }
  for (const std::string& text : limit_messages(device(), 12, "head.x")) {
    EXPECT_EQ(text, start + "a gradient norm of 48 in norm_group 'heads', above optimizer.skip_norm, 40");
  }
}

TEST_P(NormsOf, OtherHyperParametersOfAModelParallelRankAreAnErrorOnAllRanks) {
  std::mutex mutex;
  std::vector<std::string> texts;
  run_grid({2, 2}, device(), [&](const GridRank& rank) {
    const std::vector<ParamSpec> specs = {spec("a", {64})};
    DistributedAdam opt(specs, Config(), {rank.data, &rank.model}, device());
    test::set_all_initial(opt, specs, 0, rank.place.stream);
    opt.publish(rank.place.stream);
    if (rank.model.rank() == 1) opt.set_lr("*", 0.5);
    const std::string text = thrown_message<ContractError>([&] { *opt.step(rank.place.stream); });
    {
      const std::lock_guard lock(mutex);
      texts.push_back(text);
    }
    opt.set_lr("*", 0.5);
    EXPECT_TRUE(opt.step(rank.place.stream)->taken) << "it can be mended";
  });
  ASSERT_EQ(texts.size(), 4U);
  int with_other_values = 0;
  for (const std::string& text : texts) {
    EXPECT_TRUE(contains(text, "different hyper-parameters") ||
                contains(text, "hyper-parameters of the next step"))
        << text;
    with_other_values += contains(text, "lr 0x1p-1") ? 1 : 0;
  }
  // A device finds out after the messages, and tells a rank of its own values.
  EXPECT_EQ(with_other_values, device().kind == DeviceKind::kHost ? 4 : 2);
}

// Without it, the tests of equal bits that use the scenario would show little.
TEST(Norms, TheScenarioSkipsForItsNormsAndClipsEachInSomeSteps) {
  test::Scenario scenario;
  scenario.config = test::norms_config();
  int bad = 0, above = 0, taken = 0, common = 0, small = 0, attention = 0;
  std::int64_t zeros = 0;
  test::run_world(1, scenario, [&](const test::StepContext& now) {
    const StepRecord& record = now.record;
    bad += record.skip_reason == SkipReason::kNonFiniteGradient ? 1 : 0;
    above += record.skip_reason == SkipReason::kGradNorm ? 1 : 0;
    taken += record.taken ? 1 : 0;
    common += record.clip_factor < 1 ? 1 : 0;
    ASSERT_EQ(record.norm_groups.size(), 2U);
    small += record.norm_groups[0].clip_factor < 1 ? 1 : 0;
    attention += record.norm_groups[1].clip_factor < 1 ? 1 : 0;
    zeros += record.zero_grads;
    EXPECT_EQ(record.param_norms.size(), 12U);
  });
  EXPECT_EQ(bad, 3);
  EXPECT_GT(above, 0);
  EXPECT_GT(taken, 8);
  EXPECT_GT(zeros, 0);
  for (const int clipped : {common, small, attention}) {
    EXPECT_GT(clipped, 0);
    EXPECT_LT(clipped, taken);
  }
}

// ---------------------------------------------------------------------------------------------------------
// Construction
// ---------------------------------------------------------------------------------------------------------

struct Input {
  std::vector<ParamSpec> specs = {spec("a", {32, 32}), spec("b", {5})};
  Config config;
};

/// What each rank of a grid of 2 x 2 reads when `change` was applied to the input of some.
std::vector<std::string> construction_messages(
    const std::function<void(Input&, int data, int model)>& change) {
  std::vector<std::string> texts(4);
  run_grid({2, 2}, Device(), [&](const GridRank& rank) {
    Input input;
    change(input, rank.data.rank(), rank.model.rank());
    std::string& text = texts[static_cast<std::size_t>(2 * rank.model.rank() + rank.data.rank())];
    try {
      const DistributedAdam opt(input.specs, input.config, {rank.data, &rank.model});
    } catch (const ConfigError& error) {
      text = error.what();
    } catch (const ContractError& error) {
      text = error.what();
    }
  });
  return texts;
}

void expect_on_all(const std::vector<std::string>& texts, const std::string& part) {
  for (const std::string& text : texts) EXPECT_TRUE(contains(text, part)) << text;
}

TEST(NormsAtConstruction, ABadListOfOneRankIsAnErrorOnAllRanksOfBothGroups) {
  const auto texts = construction_messages([](Input& input, int data, int model) {
    if (data == 1 && model == 0) input.specs[1].name = "a";
  });
  expect_on_all(texts, "param 'a' is registered twice");
}

TEST(NormsAtConstruction, ListsThatDifferWithinOneDataParallelGroupAreAnErrorOnAllRanks) {
  const auto texts = construction_messages([](Input& input, int data, int model) {
    if (data == 1 && model == 1) input.specs[1].shape = {6};
  });
  for (const std::string& text : texts) EXPECT_FALSE(text.empty());
  EXPECT_TRUE(contains(texts[2], "params: rank 1 has 'b 6 bf16' where rank 0 has 'b 5 bf16'")) << texts[2];
  EXPECT_TRUE(contains(texts[0], "construction: rank 1 has")) << texts[0];
}

TEST(NormsAtConstruction, PartsOfAModelMayHaveOtherParamsButNotOtherConfigurations) {
  expect_on_all(construction_messages([](Input& input, int, int model) {
                  if (model == 1) input.specs[1].shape = {600};
                }),
                "");
  for (const std::string& text : construction_messages([](Input&input, int, int model) {
         if (model == 1) input.specs[1].shape = {600};
       })) {
    EXPECT_EQ(text, "");
  }
  const auto texts = construction_messages([](Input& input, int, int model) {
    if (model == 1) input.config.optimizer.skip_norm = 7;
  });
  expect_on_all(texts, "configuration: rank 1 has '  skip_norm: 7' where rank 0 has '  skip_norm: 0'");
}

TEST(NormsAtConstruction, APatternMatchesAParamOfSomeRank) {
  const auto with_pattern = [](const std::string& pattern) {
    return [pattern](Input& input, int, int model) {
      input.specs[1].name = model == 0 ? "first" : "last";
      input.config.optimizer.groups.resize(1);
      input.config.optimizer.groups[0].match = pattern;
    };
  };
  for (const std::string& text : construction_messages(with_pattern("last"))) EXPECT_EQ(text, "");
  expect_on_all(
      construction_messages(with_pattern("lost")),
      "optimizer.groups[0].match: the pattern of group 'lost' matches no param of any model-parallel rank");
}

TEST(NormsAtConstruction, AGroupDecaysWhereAParamOfItDecaysOnSomeRank) {
  run_grid({1, 3}, Device(), [&](const GridRank& rank) {
    // Group "x" has a bias, a matrix, or nothing; group "y" has a bias or nothing.
    std::vector<ParamSpec> specs = {spec("other", {32, 32})};
    if (rank.model.rank() == 0) specs.push_back(spec("x", {5}));
    if (rank.model.rank() == 1) specs.push_back(spec("x", {32, 32}));
    if (rank.model.rank() == 2) specs.push_back(spec("y", {5}));
    Config config;
    config.optimizer.groups.resize(2);
    config.optimizer.groups[0].match = "x";
    config.optimizer.groups[1].match = "y";
    DistributedAdam opt(specs, config, {rank.data, &rank.model});
    EXPECT_NO_THROW(opt.set_weight_decay("x", 0.5));
    EXPECT_TRUE(contains(thrown_message<ContractError>([&] { opt.set_weight_decay("y", 0.5); }),
                         "the params of group 'y' have one dimension and no weight decay"));
  });
}

TEST(NormsAtConstruction, CopiesHaveOneShape) {
  const auto texts = construction_messages([](Input& input, int, int model) {
    input.specs[1].duplicate_key = "bias";
    if (model == 1) input.specs[1].shape = {6};
  });
  EXPECT_TRUE(contains(texts[0],
                       "param 'b' (shape 5): other model-parallel ranks have its duplicate_key 'bias' at "
                       "another shape"))
      << texts[0];
  for (const std::string& text : texts) EXPECT_TRUE(contains(text, "shape")) << text;
}

TEST(NormsAtConstruction, ADataParallelGroupIsOnePartOfTheModel) {
  // Ranks 0 and 1 as one data-parallel group, but at different places of the model.
  std::vector<std::string> texts(2);
  run_ranks(2, [&](Communicator& all) {
    const auto data = all.split(0, all.rank());
    const auto model = all.split(0, all.rank());
    Input input;
    texts[static_cast<std::size_t>(all.rank())] = thrown_message<ContractError>([&] {
      DistributedAdam(input.specs, input.config, {*data, model.get()});
    });
  });
  expect_on_all(texts, "data_parallel: rank 1 has 'rank 1 of 2' where rank 0 has 'rank 0 of 2'");
}

TEST(NormsAtConstruction, AModelParallelCommunicatorOfAnotherMemoryIsRefused) {
  SelfCommunicator data, model(Device{DeviceKind::kCuda, 0});
  Input input;
  EXPECT_EQ(
      thrown_message<ConfigError>([&] {
        DistributedAdam(input.specs, input.config, {data, &model});
      }),
      "the model-parallel communicator (self, rank 0 of 1) does not move bytes of the optimizer's device");
}

}  // namespace
}  // namespace mxopt
