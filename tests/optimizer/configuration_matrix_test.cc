// Every combination of device, storage, gradient type, reduction, loss scale, overlap, accumulation and world
// size trains five steps to the bits of an Adam over the whole batch on one array; none is refused.
#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "support/devices.h"
#include "support/optimizer_fixture.h"
#include "support/reference_adam.h"

namespace mxopt {
namespace {

using test::Facts;
using test::HostView;
using test::Place;
using test::run_ranks;
using test::spec;

constexpr int kSteps = 5;
constexpr int kBadStep = 2;  // with a dynamic loss scale, one rank has an infinity in it
constexpr int kSamples = 6;  // of a step, spread over ranks and micro-batches
constexpr std::int64_t kTokensOfSample = 11;

struct Weights {
  const char* name = "";
  ParamFormat format = ParamFormat::kMxfp8;
  StorageChoice storage = StorageChoice::kAuto;
};

struct Case {
  Weights weights;
  DType grad_dtype = DType::kFp32;
  GradReduce reduce = GradReduce::kAverage;
  LossScaleKind loss_scale = LossScaleKind::kNone;
  bool overlaps = false;  // grad_ready() in the backward pass, or all reductions in step()
  int micro_batches = 1;
  int size = 1;

  std::string text() const {
    const char* const reduces[] = {"average", "sum", "tokens"};
    const char* const scales[] = {"no", "static", "dynamic"};
    return std::string(weights.name) + ", gradients " + std::string(dtype_name(grad_dtype)) + " " +
           reduces[static_cast<int>(reduce)] + ", " + scales[static_cast<int>(loss_scale)] + " loss scale, " +
           (overlaps ? "overlap, " : "no overlap, ") + std::to_string(micro_batches) + " micro-batches, W " +
           std::to_string(size);
  }
};

/// Matrices, one that is kept in bf16 where MXFP8 is asked for, and a vector, which does not decay.
std::vector<ParamSpec> matrix_specs() {
  return {spec("square", {32, 64}), spec("bias", {40}), spec("odd", {9, 37}), spec("wide", {32, 96})};
}

Config config_of(const Case& c, Device device) {
  Config config;
  config.optimizer.grad_dtype = c.grad_dtype;
  config.optimizer.grad_reduce = c.reduce;
  config.optimizer.bucket_elems = 2100;
  config.optimizer.loss_scale = {c.loss_scale, 1024, 1, 2, 1};
  config.precision.weights = c.weights.format;
  config.precision.storage = c.weights.storage;
  // Not a dimension of its own: on a device the cases with accumulation exchange.
  if (device.kind != DeviceKind::kHost && c.micro_batches > 1) {
    config.parallel.grad_reduction = GradReduction::kExchange;
  }
  return config;
}

/// Small integers, whose sums are exact in bf16 too.
std::vector<float> sample_grad(const std::string& name, std::int64_t elems, int step, int sample) {
  std::vector<float> values;
  const std::uint64_t seed = test::name_seed(name) + 101 * static_cast<std::uint64_t>(step);
  for (std::int64_t i = 0; i < elems; ++i) {
    values.push_back(static_cast<float>(static_cast<int>(test::mix(seed, sample, i) % 17) - 8));
  }
  return values;
}

/// What a case should come to.
struct Expected {
  std::map<std::string, std::vector<float>> masters;
  std::vector<double> norms;  // of the taken steps
  double loss_scale = 1;
};

Expected train_on_one_array(const Case& c) {
  std::map<std::string, reference::AdamState<float>> states;
  for (const ParamSpec& s : matrix_specs()) {
    std::int64_t elems = 1;
    for (const std::int64_t extent : s.shape) elems *= extent;
    states.emplace(s.name, reference::AdamState<float>(test::initial_values(s.name, elems)));
  }
  const bool has_bad_step = c.loss_scale == LossScaleKind::kDynamic;
  Expected expected;
  std::int64_t taken = 0;
  for (int step = 0; step < kSteps; ++step) {
    if (has_bad_step && step == kBadStep) continue;
    std::vector<std::vector<float>> grads;
    for (const auto& [name, state] : states) {
      std::vector<float> sum(state.p.size(), 0.0f);
      for (int sample = 0; sample < kSamples; ++sample) {
        const std::vector<float> values =
            sample_grad(name, static_cast<std::int64_t>(sum.size()), step, sample);
        for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += values[i];
      }
      if (c.reduce == GradReduce::kAverage) {
        for (float& value : sum) {
          value /= static_cast<float>(c.size);
          if (c.grad_dtype == DType::kBf16) value = reference::bf16(value);
        }
      }
      grads.push_back(sum);
    }
    const double tokens =
        c.reduce == GradReduce::kTokens ? static_cast<double>(kSamples * kTokensOfSample) : 1.0;
    const double norm = reference::norm(grads) / tokens;
    expected.norms.push_back(norm);
    ++taken;
    std::size_t at = 0;
    for (auto& [name, state] : states) {
      reference::AdamSettings settings;
      settings.weight_decay = name == "bias" ? 0 : 0.1;
      settings.grad_factor =
          static_cast<double>(static_cast<float>(reference::clip_factor(norm, 1.0) / tokens));
      reference::adam_step(state, grads[at++], settings, taken);
    }
  }
  for (const auto& [name, state] : states) expected.masters[name] = state.p;
  // Dynamic: doubled after steps 0 and 1, halved after step 2, doubled after steps 3 and 4.
  expected.loss_scale = has_bad_step ? 2048 : c.loss_scale == LossScaleKind::kStatic ? 1024 : 1;
  return expected;
}

/// One backward pass of one rank.
void feed(DistributedAdam& opt, const Case& c, int step, int rank, Place place) {
  const float scale = test::loss_scale_of(opt, place);
  const std::vector<ParamSpec> specs = matrix_specs();
  for (const ParamSpec& s : specs) opt.wait_param(s.name, Plane::kRow, place.stream);
  for (int micro = 0; micro < c.micro_batches; ++micro) {
    const bool last = micro + 1 == c.micro_batches;
    opt.begin_backward(last);
    for (std::size_t p = specs.size(); p-- > 0;) {
      const std::string& name = specs[p].name;
      const HostView grad(place.device, place.stream, opt.grad(name).data);
      for (int sample = 0; sample < kSamples; ++sample) {
        if (sample % c.size != rank || sample / c.size % c.micro_batches != micro) continue;
        test::add_values(grad.span(), sample_grad(name, grad.span().elems, step, sample), scale);
      }
      if (c.loss_scale == LossScaleKind::kDynamic && step == kBadStep && last && name == "square" &&
          rank == c.size - 1) {
        const float bad[] = {std::numeric_limits<float>::infinity()};
        test::write_values(grad.span().sub(17, 1), bad);
      }
      grad.store();
      if (c.overlaps) opt.grad_ready(name, place.stream);
    }
  }
  if (c.reduce == GradReduce::kTokens) {
    opt.add_tokens(kTokensOfSample * (kSamples / c.size), place.stream);
  }
}

/// Trains on all ranks and compares with `expected`; what rank 0 holds in the end.
Facts train(const Case& c, const Expected& expected, Device device) {
  Facts facts;
  run_ranks(c.size, [&](Communicator& group) {
    const auto side = group.split(0, group.rank());
    const Stream stream(device);
    const Place place{device, stream.ref()};
    test::DeviceOverHost staged(group, device);
    SelfCommunicator alone(device);
    Communicator& device_comm = c.size == 1 ? static_cast<Communicator&>(alone) : staged;
    const bool is_host = device.kind == DeviceKind::kHost;
    DistributedAdam opt(matrix_specs(), config_of(c, device), is_host ? group : device_comm, device);
    test::set_all_initial(opt, matrix_specs(), group.rank(), place.stream);
    opt.publish(place.stream);
    std::size_t taken = 0;
    double loss_scale = 0;
    for (int step = 0; step < kSteps; ++step) {
      feed(opt, c, step, group.rank(), place);
      const StepReport report = opt.step(place.stream);
      const bool is_bad = c.loss_scale == LossScaleKind::kDynamic && step == kBadStep;
      EXPECT_EQ(report->taken, !is_bad) << "step " << step;
      EXPECT_EQ(report->tokens, c.reduce == GradReduce::kTokens ? kSamples * kTokensOfSample : 0);
      if (!is_bad && taken < expected.norms.size()) {
        EXPECT_DOUBLE_EQ(report->grad_norm, expected.norms[taken++]) << "step " << step;
      }
      loss_scale = report->next_loss_scale;
    }
    EXPECT_EQ(loss_scale, expected.loss_scale);
    for (const auto& [name, values] : expected.masters) {
      const OwnedSlice slice = opt.owned(name);
      const HostView master(place.device, place.stream, slice.master);
      EXPECT_TRUE(test::bits_equal(values, test::whole_state(*side, static_cast<std::int64_t>(values.size()),
                                                             slice.param_begin, master.span().as<float>())))
          << name;
    }
    if (is_host) test::expect_oracle_bytes(opt, *side, false);
    Facts mine = test::state_facts(opt, *side, "", place);
    if (group.rank() == 0) facts = std::move(mine);
  });
  return facts;
}

class ConfigurationMatrix : public ::testing::TestWithParam<DeviceKind> {
 protected:
  void SetUp() override { MXOPT_SKIP_WITHOUT(device()); }
  Device device() const { return {GetParam(), 0}; }
  void train_every_combination(const Weights& weights) const;
};
INSTANTIATE_TEST_SUITE_P(Devices, ConfigurationMatrix, ::testing::ValuesIn(test::built_device_kinds()),
                         [](const auto& kind) { return test::device_kind_name(kind.param); });

void ConfigurationMatrix::train_every_combination(const Weights& weights) const {
  int cases = 0;
  for (const DType grad_dtype : {DType::kFp32, DType::kBf16}) {
    for (const GradReduce reduce : {GradReduce::kAverage, GradReduce::kSum, GradReduce::kTokens}) {
      for (const LossScaleKind loss_scale :
           {LossScaleKind::kNone, LossScaleKind::kStatic, LossScaleKind::kDynamic}) {
        for (const int size : {1, 2, 3}) {
          const Case first{weights, grad_dtype, reduce, loss_scale, false, 1, size};
          const Expected expected = train_on_one_array(first);
          std::optional<Facts> facts;  // planes, scales and moments: the same, whatever comes now
          for (const bool overlaps : {false, true}) {
            for (const int micro_batches : {1, 3}) {
              Case c = first;
              c.overlaps = overlaps;
              c.micro_batches = micro_batches;
              SCOPED_TRACE(c.text());
              Facts now = train(c, expected, device());
              if (!facts.has_value()) {
                facts = device().kind == DeviceKind::kHost ? now : train(first, expected, Device());
              }
              EXPECT_TRUE(test::same_facts(*facts, now));
              ++cases;
              if (HasFailure()) return;  // the first one is enough
            }
          }
        }
      }
    }
  }
  EXPECT_EQ(cases, 2 * 3 * 3 * 3 * 2 * 2);
}

// Each trains to the bits of its reference.
TEST_P(ConfigurationMatrix, EveryCombinationWithRowPlanesTrains) {
  train_every_combination({"mxfp8 row", ParamFormat::kMxfp8, StorageChoice::kRow});
}
TEST_P(ConfigurationMatrix, EveryCombinationWithBothPlanesTrains) {
  train_every_combination({"mxfp8 both", ParamFormat::kMxfp8, StorageChoice::kBoth});
}
TEST_P(ConfigurationMatrix, EveryCombinationWithBf16WeightsTrains) {
  train_every_combination({"bf16", ParamFormat::kBf16, StorageChoice::kAuto});
}
TEST_P(ConfigurationMatrix, EveryCombinationWithFp32WeightsTrains) {
  train_every_combination({"fp32", ParamFormat::kFp32, StorageChoice::kAuto});
}

}  // namespace
}  // namespace mxopt
