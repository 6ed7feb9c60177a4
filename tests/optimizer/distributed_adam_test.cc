#include "mxopt/optimizer/distributed_adam.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "support/faulty_communicator.h"
#include "support/optimizer_fixture.h"
#include "support/reference_adam.h"
#include "support/thrown_message.h"

#include "mxopt/collectives/traced_communicator.h"

namespace mxopt {
namespace {

using test::bits_equal;
using test::contains;
using test::Fault;
using test::FaultKind;
using test::FaultyCommunicator;
using test::run_ranks;
using test::run_world;
using test::same_facts;
using test::Scenario;
using test::spec;
using test::StepContext;
using test::thrown_message;

/// One rank with everything set and published.
struct Published {
  explicit Published(Communicator& comm, Scenario scenario_ = {})
      : scenario(std::move(scenario_)), opt(scenario.specs, scenario.config, comm) {
    test::set_all_initial(opt, scenario.specs, comm.rank());
    opt.publish();
  }
  Scenario scenario;
  DistributedAdam opt;
};

template <class Call>
std::string contract_message(const Call& call) {
  return thrown_message<ContractError>(call);
}

// ---------------------------------------------------------------------------------------------------------
// Arithmetic
// ---------------------------------------------------------------------------------------------------------

/// Runs a scenario of constant hyper-parameters beside the literal reference, and compares bits after it.
void compare_with_reference(int size, AdamKind kind, DType grad_dtype, GatherFormat format) {
  Scenario scenario;
  scenario.with_changes = false;
  scenario.config.optimizer.kind = kind;
  scenario.config.optimizer.grad_dtype = grad_dtype;
  scenario.config.optimizer.bucket_elems = 9000;
  scenario.config.parallel.gather_format = format;
  scenario.config.schedule = {};
  scenario.digest_after = {};

  struct Expected {
    ParamSpec spec;
    reference::AdamState<float> state;
    reference::AdamSettings settings;
  };
  std::vector<std::vector<Expected>> of_rank(static_cast<std::size_t>(size));
  const OptimizerConfig& config = scenario.config.optimizer;
  const auto make_expected = [&](const DistributedAdam& opt) {
    std::vector<Expected> all;
    for (const ParamSpec& s : scenario.specs) {
      if (!s.tied_to.empty()) continue;
      reference::AdamSettings settings;
      settings.beta1 = config.betas[0];
      settings.beta2 = config.betas[1];
      settings.eps = config.eps;
      settings.decoupled = kind == AdamKind::kAdamW;
      const bool is_norm = s.name.starts_with("norm."), is_mlp = s.name.starts_with("mlp.");
      settings.lr = config.lr * (is_norm ? 2.0 : is_mlp ? 0.5 : 1.0);
      settings.weight_decay = config.weight_decay * (is_norm ? 0.0 : is_mlp ? 3.0 : 1.0);
      if (s.name == "attn.bias") settings.weight_decay = 0;  // one dimension, in the default group
      const std::int64_t elems = opt.layout().param(opt.layout().find(s.name)).elems();
      all.push_back({s, reference::AdamState<float>(test::initial_values(s.name, elems)), settings});
    }
    return all;
  };

  int clipped = 0;
  std::int64_t taken = 0;
  run_world(size, scenario, [&](const StepContext& now) {
    std::vector<Expected>& expected = of_rank[static_cast<std::size_t>(now.side.rank())];
    if (expected.empty()) expected = make_expected(now.opt);
    const bool should_skip = now.step == 4 || now.step == 5 || now.step == 12;
    ASSERT_EQ(now.record.taken, !should_skip) << "step " << now.step;
    if (!now.record.taken) return;

    std::vector<std::vector<float>> grads;
    for (const Expected& e : expected) {
      const auto elems = static_cast<std::int64_t>(e.state.p.size());
      grads.push_back(test::reduced_grad(e.spec, elems, now.step));
    }
    const double norm = reference::norm(grads);
    EXPECT_NEAR(now.record.grad_norm / norm, 1, 1e-14) << "step " << now.step;
    const double clip = reference::clip_factor(norm, config.clip_grad);
    EXPECT_NEAR(static_cast<double>(now.record.clip_factor) / clip, 1, 0x1p-23) << "step " << now.step;
    if (now.side.rank() == 0) {
      clipped += now.record.clip_factor < 1 ? 1 : 0;
      taken = now.record.step;
    }
    for (std::size_t i = 0; i < expected.size(); ++i) {
      Expected& e = expected[i];
      if (e.spec.frozen) continue;
      // The library multiplies scaled gradients by clip / scale; the scale is a power of two.
      e.settings.grad_factor = static_cast<double>(now.record.clip_factor);
      reference::adam_step(e.state, grads[i], e.settings, now.record.step);
    }
    if (now.step != 0 && now.step != scenario.steps - 1) return;
    for (const Expected& e : expected) {
      SCOPED_TRACE(e.spec.name + " after step " + std::to_string(now.step));
      const OwnedSlice slice = now.opt.owned(e.spec.name);
      const auto elems = static_cast<std::int64_t>(e.state.p.size());
      const auto whole = [&](std::span<const float> part) {
        return test::whole_state(now.side, elems, slice.param_begin, part);
      };
      EXPECT_TRUE(bits_equal(e.state.p, whole(slice.master)));
      EXPECT_TRUE(bits_equal(e.state.m, whole(slice.exp_avg)));
      EXPECT_TRUE(bits_equal(e.state.v, whole(slice.exp_avg_sq)));
    }
    test::expect_oracle_bytes(now.opt, now.side, false);
  });
  EXPECT_EQ(taken, 17);
  EXPECT_GT(clipped, 0) << "clipping was never active";
  EXPECT_LT(clipped, 17) << "clipping was always active";
}

TEST(DistributedAdam, TwentyStepsAreTheLiteralReferenceAndTheOracleQuantisation) {
  for (const int size : {1, 3}) {
    for (const AdamKind kind : {AdamKind::kAdamW, AdamKind::kAdam}) {
      for (const DType dtype : {DType::kFp32, DType::kBf16}) {
        SCOPED_TRACE("W " + std::to_string(size) + ", " + std::string(dtype_name(dtype)));
        compare_with_reference(size, kind, dtype, GatherFormat::kQuantized);
      }
    }
    compare_with_reference(size, AdamKind::kAdamW, DType::kFp32, GatherFormat::kBf16);
  }
}

/// What controls_config() means for one param in taken step t, by its formulas.
reference::AdamSettings controlled_settings(const std::string& name, AdamKind kind, double t) {
  reference::AdamSettings settings;
  settings.decoupled = kind == AdamKind::kAdamW;
  double peak = 3e-3, floor = 1e-4;
  const double pi = std::acos(-1.0);
  const double share = 0.5 * (1 - std::cos(pi * (t / 16)));
  const auto decay = [&](double factor) {
    const double start = 0.1 * factor, end = 0.4 * factor;
    return t >= 16 ? end : start + (end - start) * share;
  };
  settings.weight_decay = decay(1);
  if (name.starts_with("norm.")) {
    settings.weight_decay = decay(0.5);
    settings.beta1 = 0.7;
    settings.beta2 = 0.9;
    settings.eps = 0.01;
  } else if (name.starts_with("mlp.")) {
    peak *= 0.5;
    settings.weight_decay = decay(3);
  } else if (name == "embed.weight") {
    peak = 1e-3;
    floor = 4e-4;
    settings.weight_decay = 0.02;
    settings.beta1 = 0.5;
    settings.beta2 = 0.99;
  } else if (name == "attn.bias") {
    peak *= 2;
    settings.weight_decay = 0;
    settings.eps = 1e-5;
  }
  if (t < 3) {
    settings.lr = peak * t / 3;
  } else if (t <= 8) {
    settings.lr = peak;
  } else if (t < 16) {
    settings.lr = floor + (peak - floor) * (1 - std::sqrt((t - 8) / 8));
  } else {
    settings.lr = floor;
  }
  return settings;
}

void compare_controls_with_reference(int size, AdamKind kind) {
  Scenario scenario;
  scenario.with_changes = false;
  scenario.config = test::controls_config();
  scenario.config.optimizer.kind = kind;
  scenario.config.optimizer.bucket_elems = 9000;
  scenario.digest_after = {};
  struct Expected {
    ParamSpec spec;
    reference::AdamState<float> bits;
    reference::AdamState<double> exact;
  };
  std::vector<std::vector<Expected>> of_rank(static_cast<std::size_t>(size));
  std::atomic<std::int64_t> taken = 0;
  run_world(size, scenario, [&](const StepContext& now) {
    std::vector<Expected>& expected = of_rank[static_cast<std::size_t>(now.side.rank())];
    if (expected.empty()) {
      for (const ParamSpec& s : scenario.specs) {
        if (!s.tied_to.empty() || s.frozen) continue;
        const std::int64_t elems = now.opt.layout().param(now.opt.layout().find(s.name)).elems();
        const std::vector<float> values = test::initial_values(s.name, elems);
        expected.push_back({s, reference::AdamState<float>(values),
                            reference::AdamState<double>({values.begin(), values.end()})});
      }
    }
    if (!now.record.taken) return;
    taken = now.record.step;
    for (Expected& e : expected) {
      const auto elems = static_cast<std::int64_t>(e.bits.p.size());
      const std::vector<float> grad = test::reduced_grad(e.spec, elems, now.step);
      reference::AdamSettings settings =
          controlled_settings(e.spec.name, kind, static_cast<double>(now.record.step));
      settings.grad_factor = static_cast<double>(now.record.clip_factor);
      reference::adam_step(e.bits, grad, settings, now.record.step);
      reference::adam_step(e.exact, grad, settings, now.record.step);
    }
    if (now.step % 4 != 3) return;
    for (const Expected& e : expected) {
      SCOPED_TRACE(e.spec.name + " after step " + std::to_string(now.step));
      const OwnedSlice slice = now.opt.owned(e.spec.name);
      const std::vector<float> master = test::whole_state(
          now.side, static_cast<std::int64_t>(e.bits.p.size()), slice.param_begin, slice.master);
      EXPECT_TRUE(bits_equal(e.bits.p, master));
      // A step rounds p (below 4) to 24 bits and u (below 10) to about 20: 2^-23 + lr * 10 * 2^-20, 17 times.
      for (std::size_t i = 0; i < master.size(); ++i) {
        ASSERT_NEAR(static_cast<double>(master[i]), e.exact.p[i], 17 * (0x1p-23 + 6e-3 * 10 * 0x1p-20)) << i;
      }
    }
  });
  EXPECT_EQ(taken, 17);
}

TEST(DistributedAdam, GroupsAndSchedulesAreTheReference) {
  for (const int size : {1, 3}) {
    for (const AdamKind kind : {AdamKind::kAdamW, AdamKind::kAdam}) {
      SCOPED_TRACE("W " + std::to_string(size));
      compare_controls_with_reference(size, kind);
    }
  }
}

TEST(DistributedAdam, WeightDecayThatIsSetEndsItsSchedule) {
  SelfCommunicator comm;
  Config config;
  config.optimizer.lr = 0.5;
  config.optimizer.weight_decay = 0;
  config.schedule.decay_steps = 4;
  config.schedule.weight_decay_kind = WeightDecayKind::kLinear;
  config.schedule.end_weight_decay = 1;
  DistributedAdam opt({spec("a", {32, 32})}, config, comm);
  opt.set_initial("a", std::span<const float>(std::vector<float>(1024, 1)));
  opt.publish();
  const auto step = [&] {
    opt.step();  // of zero gradients: the master is multiplied by 1 - lr * weight decay
    return opt.owned("a").master[0];
  };
  EXPECT_EQ(step(), 0.875f);
  EXPECT_EQ(step(), 0.875f * 0.75f);
  opt.set_weight_decay("default", 0.25);
  EXPECT_EQ(step(), 0.875f * 0.75f * 0.875f);
  EXPECT_EQ(step(), 0.875f * 0.75f * 0.875f * 0.875f);
}

TEST(DistributedAdam, ExtremeGradientsAreClippedNotLost) {
  for (const float value : {1e38f, 1e-45f}) {
    run_ranks(2, [&](Communicator& comm) {
      Config config;
      DistributedAdam opt({spec("a", {64, 64})}, config, comm);
      test::set_all_initial(opt, std::vector<ParamSpec>{spec("a", {64, 64})});
      opt.publish();
      test::write_values(opt.grad("a").data, std::vector<float>(4096, value));
      const StepReport report = opt.step();
      EXPECT_TRUE(report->taken);
      EXPECT_NEAR(report->grad_norm / (64 * static_cast<double>(value)), 1, 1e-14);
      for (const float master : opt.owned("a").master) ASSERT_TRUE(std::isfinite(master));
    });
  }
}

// ---------------------------------------------------------------------------------------------------------
// Initial values and publish
// ---------------------------------------------------------------------------------------------------------

TEST(DistributedAdam, InitialValuesAreTakenFromHighPrecisionOfEitherType) {
  run_ranks(3, [](Communicator& comm) {
    const std::vector<ParamSpec> specs = {spec("a", {64, 96}), spec("b", {300}, ParamFormat::kFp32)};
    DistributedAdam opt(specs, Config(), comm);
    const std::vector<float> a = test::initial_values("a", 64 * 96), b = test::initial_values("b", 300);
    std::vector<Bf16> b_bf16;
    for (const float value : b) b_bf16.push_back(fp32_to_bf16(value));
    opt.set_initial("a", std::span<const float>(a));
    opt.set_initial("b", std::span<const Bf16>(b_bf16));
    const OwnedSlice slice = opt.owned("a");
    for (std::size_t i = 0; i < slice.master.size(); ++i) {
      ASSERT_EQ(slice.master[i], a[static_cast<std::size_t>(slice.param_begin) + i]);
    }
    const OwnedSlice b_slice = opt.owned("b");
    for (std::size_t i = 0; i < b_slice.master.size(); ++i) {
      ASSERT_EQ(b_slice.master[i], bf16_to_fp32(b_bf16[static_cast<std::size_t>(b_slice.param_begin) + i]));
    }
  });
}

TEST(DistributedAdam, ATiedNameSetsTheSharedStorage) {
  SelfCommunicator comm;
  std::vector<ParamSpec> specs = {spec("a", {32, 32}), spec("b", {32, 32})};
  specs[1].tied_to = "a";
  DistributedAdam opt(specs, Config(), comm);
  const std::vector<float> values = test::initial_values("b", 1024);
  opt.set_initial("b", std::span<const float>(values));
  opt.publish();
  EXPECT_TRUE(bits_equal(values, opt.owned("a").master));
  EXPECT_EQ(opt.owned("b").master.data(), opt.owned("a").master.data());
  EXPECT_EQ(opt.param("b").planes.row_data, opt.param("a").planes.row_data);
  EXPECT_EQ(opt.param("b").planes.column_scales, opt.param("a").planes.column_scales);
  EXPECT_EQ(opt.grad("b").data.data, opt.grad("a").data.data);
}

TEST(DistributedAdam, PublishNamesTheParamsWithNonFiniteMastersOnEveryRank) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  run_ranks(3, [&](Communicator& comm) {
    DistributedAdam opt({spec("a", {64, 64}), spec("b", {32, 32}), spec("c", {32, 32})}, Config(), comm);
    std::vector<float> values(4096, 1.0f);
    opt.set_initial("b", std::span<const float>(values).first(1024));
    opt.set_initial("c", std::span<const float>(values).first(1024));
    values[4095] = 3.4e38f;  // beyond the BF16 range
    opt.set_initial("a", std::span<const float>(values));
    EXPECT_EQ(opt.publish(), std::vector<std::string>{"a"});
    values[0] = kInf;
    opt.set_initial("c", std::span<const float>(values).first(1024));
    EXPECT_EQ(opt.publish(), (std::vector<std::string>{"a", "c"}));
    values[0] = values[4095] = 1.0f;
    opt.set_initial("a", std::span<const float>(values));
    opt.set_initial("c", std::span<const float>(values).first(1024));
    EXPECT_TRUE(opt.publish().empty());
  });
}

TEST(DistributedAdam, InitialValuesThatDoNotFitAreRefused) {
  SelfCommunicator comm;
  DistributedAdam opt({spec("attn.qkv", {32, 32})}, Config(), comm);
  const std::vector<float> values(1025);
  const std::vector<std::int64_t> integers(1024);
  const std::span<const float> all(values);
  EXPECT_TRUE(contains(contract_message([&] { opt.set_initial("attn.qkv", all); }),
                       "set_initial: param 'attn.qkv' has 1024 elements, got 1025"));
  EXPECT_TRUE(contains(
      contract_message([&] { opt.set_initial("attn.qkv", std::span<const std::int64_t>(integers)); }),
      "set_initial: param 'attn.qkv' got int64; allowed: fp32, bf16"));
  for (const std::int64_t begin : {std::int64_t{-1}, std::int64_t{1}, std::int64_t{1025},
                                   std::numeric_limits<std::int64_t>::max() - 5}) {
    EXPECT_TRUE(contains(contract_message([&] { opt.set_initial("attn.qkv", begin, all.first(1024)); }),
                         "set_initial: param 'attn.qkv' has 1024 elements, got [" + std::to_string(begin)))
        << begin;
  }
  EXPECT_TRUE(contains(
      contract_message([&] { opt.set_initial("attn.qkv", ConstTypedSpan(nullptr, DType::kFp32, 1024)); }),
      "set_initial: param 'attn.qkv' got 1024 elements at a null pointer"));
  EXPECT_TRUE(contains(contract_message([&] { opt.set_initial("attn.qvk", all); }),
                       "unknown param 'attn.qvk'; 1 params are registered, the nearest name is 'attn.qkv'"));
}

TEST(DistributedAdam, PublishNamesUnsetParamsOnAllRanks) {
  std::vector<std::string> texts(3);
  run_ranks(3, [&](Communicator& comm) {
    const std::vector<ParamSpec> specs = {spec("a", {64, 96}), spec("b", {5}), spec("c", {64, 64})};
    DistributedAdam opt(specs, Config(), comm);
    const std::vector<float> values = test::initial_values("x", 64 * 96);
    const std::span<const float> all(values);
    opt.set_initial("a", all);
    opt.set_initial("c", 0, all.first(64 * 64 - 1));  // the last element is missing
    texts[static_cast<std::size_t>(comm.rank())] = contract_message([&] { opt.publish(); });
    opt.set_initial("c", 64 * 64 - 1, all.first(1));
    opt.set_initial("b", all.first(5));
    opt.publish();
  });
  for (const std::string& text : texts) EXPECT_EQ(text, "publish: 2 params have no initial value: 'b', 'c'");
}

TEST(DistributedAdam, AStepBeforePublishIsRefused) {
  SelfCommunicator self;
  TracedCommunicator traced(self);
  DistributedAdam opt({spec("a", {32, 32})}, Config(), traced);
  traced.reset();
  EXPECT_TRUE(
      contains(contract_message([&] { opt.step(); }),
               "step: no weight was published yet; call set_initial() for every param, then publish(); "
               "without an initial value: 'a'"));
  EXPECT_EQ(traced.total().operations, 0);
}

TEST(DistributedAdam, PublishIsIdempotentAndAStepAfterItIsTheSame) {
  for (const GatherFormat format : {GatherFormat::kQuantized, GatherFormat::kBf16}) {
    run_ranks(3, [&](Communicator& comm) {
      Scenario scenario;
      scenario.config.parallel.gather_format = format;
      const auto side = comm.split(0, comm.rank());
      Published rank(comm, scenario);
      const test::Facts first = test::state_facts(rank.opt, *side, "");
      for (int i = 0; i < 3; ++i) {
        rank.opt.publish();
        ASSERT_TRUE(same_facts(first, test::state_facts(rank.opt, *side, "")));
      }
      test::feed(rank.opt, scenario, 0, comm.rank(), comm.size());
      rank.opt.step();
      const test::Facts stepped = test::state_facts(rank.opt, *side, "");
      ASSERT_FALSE(same_facts(first, stepped));
      rank.opt.publish();
      ASSERT_TRUE(same_facts(stepped, test::state_facts(rank.opt, *side, "")));
    });
  }
}

// ---------------------------------------------------------------------------------------------------------
// Views
// ---------------------------------------------------------------------------------------------------------

TEST(DistributedAdam, OwnedSlicesTileEveryParamOnce) {
  for (const int size : {1, 2, 3, 7}) {
    std::map<std::string, std::vector<int>> owners;
    const std::vector<ParamSpec> specs = test::mixed_specs();
    std::mutex mutex;
    run_ranks(size, [&](Communicator& comm) {
      DistributedAdam opt(specs, Config(), comm);
      for (const ParamLayout& param : opt.layout().params()) {
        if (param.tied_to >= 0) continue;
        const OwnedSlice slice = opt.owned(param.name);
        EXPECT_EQ(slice.exp_avg.size(), param.family.frozen ? 0 : slice.master.size());
        EXPECT_EQ(slice.exp_avg_sq.size(), slice.exp_avg.size());
        const std::lock_guard lock(mutex);
        std::vector<int>& count = owners[param.name];
        count.resize(static_cast<std::size_t>(param.elems()));
        for (std::size_t i = 0; i < slice.master.size(); ++i) {
          ++count.at(static_cast<std::size_t>(slice.param_begin) + i);
        }
      }
    });
    for (const auto& [name, count] : owners) {
      EXPECT_TRUE(std::ranges::all_of(count, [](int c) { return c == 1; })) << name << ", W " << size;
    }
  }
}

TEST(DistributedAdam, ViewsSayWhatTheyAre) {
  SelfCommunicator comm;
  Published rank(comm);
  const ParamView row = rank.opt.wait_param("attn.out");
  EXPECT_EQ(row.format, ParamFormat::kMxfp8);
  EXPECT_EQ(row.shape, std::vector<std::int64_t>({32, 64}));
  EXPECT_EQ(row.planes.column_data, nullptr);
  EXPECT_EQ(row.values.elems, 0);
  const ParamView bias = rank.opt.wait_param("attn.bias");
  EXPECT_EQ(bias.format, ParamFormat::kBf16);
  EXPECT_EQ(bias.values.dtype, DType::kBf16);
  EXPECT_EQ(bias.values.elems, 5);
  EXPECT_EQ(rank.opt.wait_param("norm.0").values.dtype, DType::kFp32);
  const ParamView up = rank.opt.wait_param("mlp.up");
  EXPECT_EQ(up.planes.rows, 96);
  EXPECT_EQ(up.planes.cols, 160);
  EXPECT_EQ(rank.opt.param("empty").planes.elems(), 0);
  EXPECT_EQ(rank.opt.grad("empty").data.elems, 0);
  EXPECT_EQ(rank.opt.grad("norm.1").mode, GradMode::kOverwrite);
  EXPECT_EQ(rank.opt.grad("norm.0").mode, GradMode::kAccumulate);
}

TEST(DistributedAdam, UnknownNamesAreRefusedWithTheNearestOne) {
  SelfCommunicator comm;
  Published rank(comm);
  DistributedAdam& opt = rank.opt;
  const std::string expected =
      "unknown param 'attn.qvk'; 15 params are registered, the nearest name is 'attn.qkv'";
  EXPECT_EQ(contract_message([&] { opt.grad("attn.qvk"); }), expected);
  EXPECT_EQ(contract_message([&] { opt.param("attn.qvk"); }), expected);
  EXPECT_EQ(contract_message([&] { opt.owned("attn.qvk"); }), expected);
  EXPECT_EQ(contract_message([&] { opt.grad_ready("attn.qvk"); }), expected);
  EXPECT_EQ(contract_message([&] { opt.wait_param("attn.qvk"); }), expected);
  EXPECT_EQ(contract_message([&] { opt.require_current("attn.qvk", {}, Plane::kRow); }), expected);
  EXPECT_TRUE(comm.health().ok) << "a caller's mistake ended the group";
}

TEST(DistributedAdam, FrozenParamsHaveNoGradientAndAbsentPlanesCanNotBeWaitedFor) {
  SelfCommunicator comm;
  Published rank(comm);
  DistributedAdam& opt = rank.opt;
  EXPECT_TRUE(contains(contract_message([&] { opt.grad("frozen.table"); }),
                       "grad: param 'frozen.table' is frozen and has no gradient"));
  EXPECT_TRUE(contains(contract_message([&] { opt.grad_ready("frozen.table"); }),
                       "grad_ready: param 'frozen.table' is frozen and has no gradient"));
  EXPECT_TRUE(contains(contract_message([&] { opt.wait_param("attn.out", Plane::kColumn); }),
                       "wait_param: param 'attn.out' (mxfp8, storage row) has no column plane; "
                       "precision.storage: both would store one"));
  EXPECT_TRUE(contains(contract_message([&] { opt.wait_param("norm.0", Plane::kColumn); }),
                       "wait_param: param 'norm.0' (fp32"));
  EXPECT_TRUE(comm.health().ok);
}

TEST(DistributedAdam, AReadyParamIsNotReadyAgain) {
  SelfCommunicator comm;
  Published rank(comm);
  DistributedAdam& opt = rank.opt;
  opt.begin_backward();
  opt.grad_ready("norm.2");
  EXPECT_TRUE(contains(contract_message([&] { opt.grad_ready("norm.2"); }),
                       "grad_ready: param 'norm.2' was ready already in this micro-batch"));
  opt.begin_backward(false);
  opt.grad_ready("norm.2");
  EXPECT_TRUE(opt.step()->taken);
  opt.grad_ready("norm.2");  // of the next step
}

TEST(DistributedAdam, BackwardAfterGradientsWereSentIsRefused) {
  SelfCommunicator comm;
  DistributedAdam opt({spec("a", {32, 32})}, Config(), comm);
  test::set_all_initial(opt, std::vector<ParamSpec>{spec("a", {32, 32})});
  opt.publish();
  opt.begin_backward();
  opt.grad_ready("a");
  EXPECT_TRUE(contains(contract_message([&] { opt.begin_backward(); }),
                       "begin_backward after gradients of this step were sent: call step() first, and pass "
                       "last_micro_batch = true only for the last micro-batch of a step"));
  opt.step();
  opt.begin_backward();
}

TEST(DistributedAdam, AViewIsCurrentUntilTheNextPublish) {
  run_ranks(2, [](Communicator& comm) {
    Published rank(comm);
    DistributedAdam& opt = rank.opt;
    const ParamView unwaited = opt.param("attn.qkv");
    EXPECT_TRUE(
        contains(contract_message([&] { opt.require_current("attn.qkv", unwaited, Plane::kRow); }),
                 "the row plane of param 'attn.qkv' was read at version 0, but version 1 is current: call "
                 "wait_param first"));
    const ParamView row = opt.wait_param("attn.qkv");
    opt.require_current("attn.qkv", row, Plane::kRow);
    EXPECT_TRUE(contains(contract_message([&] { opt.require_current("attn.qkv", row, Plane::kColumn); }),
                         "the column plane of param 'attn.qkv' was read at version 0"));
    const ParamView both = opt.wait_param("attn.qkv", Plane::kColumn);
    opt.require_current("attn.qkv", both, Plane::kRow);
    opt.require_current("attn.qkv", both, Plane::kColumn);
    opt.step();
    EXPECT_TRUE(contains(contract_message([&] { opt.require_current("attn.qkv", both, Plane::kRow); }),
                         "was read at version 1, but version 2 is current"));
    opt.require_current("attn.qkv", opt.wait_param("attn.qkv"), Plane::kRow);
    opt.done_reading();
  });
}

// ---------------------------------------------------------------------------------------------------------
// Hyper-parameters
// ---------------------------------------------------------------------------------------------------------

TEST(DistributedAdam, HyperParametersOutOfRangeAreRefused) {
  SelfCommunicator comm;
  Published rank(comm);
  DistributedAdam& opt = rank.opt;
  EXPECT_EQ(std::vector<std::string>(opt.groups().begin(), opt.groups().end()),
            std::vector<std::string>({"default", "norms", "mlp"}));
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const double inf = std::numeric_limits<double>::infinity();
  for (const double bad : {-1.0, nan, inf}) {
    EXPECT_TRUE(
        contains(contract_message([&] { opt.set_lr("mlp", bad); }), "for group 'mlp'; allowed: >= 0"));
    EXPECT_TRUE(
        contains(contract_message([&] { opt.set_weight_decay("*", bad); }), "for group '*'; allowed: >= 0"));
    EXPECT_TRUE(contains(contract_message([&] { opt.set_betas(0.9, bad); }), "allowed: 0 <= beta < 1"));
    EXPECT_TRUE(contains(contract_message([&] { opt.set_betas(bad, 0.9); }), "allowed: 0 <= beta < 1"));
  }
  EXPECT_TRUE(contains(contract_message([&] { opt.set_betas(0.5, 1.0); }),
                       "set_betas: 1 for group '*'; allowed: 0 <= beta < 1"));
  EXPECT_TRUE(contains(contract_message([&] { opt.set_betas("mlp", 1.0, 0.5); }),
                       "set_betas: 1 for group 'mlp'; allowed: 0 <= beta < 1"));
  EXPECT_TRUE(contains(contract_message([&] { opt.set_lr("mpl", 1); }),
                       "unknown param group 'mpl'; groups are: default, norms, mlp"));
  EXPECT_TRUE(contains(contract_message([&] { opt.set_steps_taken(-1); }),
                       "set_steps_taken: -1; allowed is 0 or more"));
  opt.set_lr("mlp", 0);
  opt.set_betas(0, 0);
}

TEST(DistributedAdam, WeightDecayOfAGroupWithoutAnyIsRefused) {
  SelfCommunicator comm;
  Config config;
  config.optimizer.groups = {{.match = "*.bias", .name = "biases"}};
  const std::vector<ParamSpec> specs = {spec("a.bias", {5}), spec("a.weight", {32, 32})};
  DistributedAdam opt(specs, config, comm);
  EXPECT_TRUE(
      contains(contract_message([&] { opt.set_weight_decay("biases", 0.1); }),
               "set_weight_decay: the params of group 'biases' have one dimension and no weight decay; "
               "allowed with optimizer.decay_1d, or weight_decay or weight_decay_mult in the group"));
  opt.set_weight_decay("*", 0.1);
  config.optimizer.decay_1d = true;
  DistributedAdam decaying(specs, config, comm);
  decaying.set_weight_decay("biases", 0.1);
}

TEST(DistributedAdam, ParamsOfOneDimensionDecayOnlyWhereItIsSaid) {
  const std::vector<ParamSpec> specs = {
      spec("plain.bias", {64}, ParamFormat::kFp32), spec("plain.weight", {32, 32}),
      spec("fast.bias", {64}, ParamFormat::kFp32), spec("told.bias", {64}, ParamFormat::kFp32),
      spec("scaled.bias", {64}, ParamFormat::kFp32)};
  for (const bool decay_1d : {false, true}) {
    run_ranks(2, [&](Communicator& comm) {
      Config config;
      config.optimizer.lr = 0.5;
      config.optimizer.weight_decay = 0.5;
      config.optimizer.decay_1d = decay_1d;
      config.optimizer.groups = {{.match = "fast.*", .name = "", .lr_mult = 2},
                                 {.match = "told.*", .name = "", .weight_decay = 0.25},
                                 {.match = "scaled.*", .name = "", .weight_decay_mult = 0.5}};
      DistributedAdam opt(specs, config, comm);
      for (const ParamSpec& s : specs) {
        const std::int64_t elems = opt.layout().param(opt.layout().find(s.name)).elems();
        opt.set_initial(s.name,
                        std::span<const float>(std::vector<float>(static_cast<std::size_t>(elems), 1)));
      }
      opt.publish();
      opt.step();  // of zero gradients: what is left is 1 - lr * weight decay
      const std::map<std::string, float> expected = {{"plain.bias", decay_1d ? 0.75f : 1.0f},
                                                     {"plain.weight", 0.75f},
                                                     {"fast.bias", decay_1d ? 0.5f : 1.0f},
                                                     {"told.bias", 0.875f},
                                                     {"scaled.bias", 0.875f}};
      for (const auto& [name, value] : expected) {
        for (const float master : opt.owned(name).master) ASSERT_EQ(master, value) << name;
      }
    });
  }
}

TEST(DistributedAdam, DifferentHyperParametersAreAnErrorOnAllRanksThatCanBeMended) {
  const std::vector<std::pair<std::string, std::function<void(DistributedAdam&)>>> changes = {
      {"rank 1 has 'group 'mlp' lr ", [](DistributedAdam& opt) { opt.set_lr("mlp", 0.125); }},
      {"rank 1 has 'group 'default' weight_decay ",
       [](DistributedAdam& opt) { opt.set_weight_decay("default", 0.5); }},
      {"rank 1 has 'group 'default' betas ", [](DistributedAdam& opt) { opt.set_betas(0.5, 0.5); }},
      {"rank 1 has 'group 'mlp' betas ", [](DistributedAdam& opt) { opt.set_betas("mlp", 0.5, 0.5); }},
      {"rank 1 has 'steps_taken 7' where rank 0 has 'steps_taken 0'",
       [](DistributedAdam& opt) { opt.set_steps_taken(7); }}};
  for (const auto& [part, change] : changes) {
    for (const int size : {2, 3}) {
      std::vector<std::string> texts(static_cast<std::size_t>(size));
      run_ranks(size, [&](Communicator& comm) {
        const auto side = comm.split(0, comm.rank());
        Published rank(comm);
        const test::Facts before = test::state_facts(rank.opt, *side, "");
        if (comm.rank() == 1) change(rank.opt);
        test::feed(rank.opt, rank.scenario, 0, comm.rank(), size);
        texts[static_cast<std::size_t>(comm.rank())] = contract_message([&] { rank.opt.step(); });
        EXPECT_TRUE(same_facts(before, test::state_facts(rank.opt, *side, "")));
        if (comm.rank() != 1) change(rank.opt);
        EXPECT_TRUE(rank.opt.step()->taken);
        test::state_facts(rank.opt, *side, "");
      });
      for (const std::string& text : texts) {
        EXPECT_TRUE(contains(text, "ranks disagree:\n  hyper-parameters of the next step: " + part));
      }
    }
  }
}

TEST(DistributedAdam, TheLossScaleIsAStableScalarThatFollowsTheSteps) {
  SelfCommunicator comm;
  Scenario scenario;
  scenario.config.optimizer.loss_scale = {LossScaleKind::kDynamic, 1024, 1, 2, 1};
  Published rank(comm, scenario);
  const float* const scale = rank.opt.loss_scale().data();
  EXPECT_EQ(*scale, 1024);
  EXPECT_EQ(rank.opt.step()->next_loss_scale, 1024);
  EXPECT_EQ(rank.opt.step()->next_loss_scale, 2048);
  EXPECT_EQ(*scale, 2048);
  const float bad[] = {std::numeric_limits<float>::infinity()};
  test::write_values(rank.opt.grad("norm.0").data.sub(0, 1), bad);
  const StepReport report = rank.opt.step();
  EXPECT_FALSE(report->taken);
  EXPECT_EQ(report->loss_scale, 2048);
  EXPECT_EQ(report->next_loss_scale, 1024);
  EXPECT_EQ(*scale, 1024);
}

TEST(DistributedAdam, ReportsAreCompleteOnEveryPath) {
  SelfCommunicator comm;
  Published rank(comm);
  const StepReport report = rank.opt.step();
  EXPECT_TRUE(report->taken);
  EXPECT_EQ(skip_reason_name(report->skip_reason), "none");
  EXPECT_EQ(report->grad_norm, 0);
  EXPECT_EQ(report->clip_factor, 1);
  EXPECT_EQ(report->step, 1);
  EXPECT_EQ(report->calls, 1);
  EXPECT_EQ(report->lr, 1e-3);
  EXPECT_GT(report->launches, 0);
  const float bad[] = {std::numeric_limits<float>::quiet_NaN()};
  test::write_values(rank.opt.grad("stack").data.sub(5, 1), bad);
  test::write_values(rank.opt.grad("norm.0").data.sub(5, 1), bad);
  const StepReport skipped = rank.opt.step();
  EXPECT_FALSE(skipped->taken);
  EXPECT_EQ(skip_reason_name(skipped->skip_reason), "non-finite gradient");
  EXPECT_EQ(skipped->step, 1);
  EXPECT_EQ(skipped->calls, 2);
  EXPECT_EQ(skipped->skipped_total, 1);
  EXPECT_EQ(skipped->nonfinite_gradient_params, std::vector<std::string>({"norm.0", "stack"}));
  EXPECT_EQ(rank.opt.steps_taken(), 1);
  EXPECT_EQ(rank.opt.step()->consecutive_skips, 0);
}

TEST(DistributedAdam, AMasterThatLeavesTheRangeIsReportedByNameOnAllRanks) {
  for (const GatherFormat format : {GatherFormat::kQuantized, GatherFormat::kBf16}) {
    run_ranks(3, [&](Communicator& comm) {
      Scenario scenario;
      scenario.config.parallel.gather_format = format;
      Published rank(comm, scenario);
      const OwnedSlice slice = rank.opt.owned("stack");
      if (!slice.master.empty() && slice.param_begin == 0) slice.master[3] = 3.4e38f;
      const OwnedSlice norm = rank.opt.owned("norm.0");
      if (!norm.master.empty()) norm.master[0] = std::numeric_limits<float>::quiet_NaN();
      const StepReport report = rank.opt.step();
      EXPECT_TRUE(report->taken);
      EXPECT_EQ(report->nonfinite_master_params, std::vector<std::string>({"norm.0", "stack"}));
    });
  }
}

TEST(DistributedAdam, TooManySkipsInARowAreAnErrorOnAllRanks) {
  std::vector<std::string> texts(3);
  run_ranks(3, [&](Communicator& comm) {
    Scenario scenario;
    scenario.config.optimizer.max_consecutive_skips = 3;
    Published rank(comm, scenario);
    for (int call = 1; call <= 3; ++call) {
      if (comm.rank() == 1) {
        const float bad[] = {std::numeric_limits<float>::quiet_NaN()};
        test::write_values(rank.opt.grad("attn.qkv").data.sub(77, 1), bad);
      }
      if (call < 3) {
        EXPECT_EQ(rank.opt.step()->consecutive_skips, call);
        continue;
      }
      texts[static_cast<std::size_t>(comm.rank())] = contract_message([&] { rank.opt.step(); });
    }
    EXPECT_TRUE(rank.opt.step()->taken) << "the trainer may go on";
  });
  for (const std::string& text : texts) {
    EXPECT_EQ(
        text,
        "step: 3 steps in a row were skipped (optimizer.max_consecutive_skips is 3); the last one because "
        "of a non-finite gradient of param 'attn.qkv'");
  }
}

// ---------------------------------------------------------------------------------------------------------
// Calls of all ranks
// ---------------------------------------------------------------------------------------------------------

TEST(DistributedAdam, AllRanksMakeTheSameCallsWhateverTheirBackwardPassDoes) {
  for (const GatherFormat format : {GatherFormat::kQuantized, GatherFormat::kBf16}) {
    std::vector<std::vector<std::string>> signatures(3);
    run_ranks(3, [&](Communicator& comm) {
      TracedCommunicator traced(comm);
      traced.record_signatures();
      Scenario scenario;
      scenario.config.optimizer.bucket_elems = 5000;
      scenario.config.parallel.gather_format = format;
      Published rank(traced, scenario);
      for (int step = 0; step < 8; ++step) {
        DistributedAdam& opt = rank.opt;
        switch (comm.rank()) {
          case 0:
            test::feed(opt, scenario, step, 0, 3);
            break;
          case 1:  // other order, one param unused
            for (const ParamSpec& s : scenario.specs) {
              if (!s.frozen && s.name != "stack") opt.grad_ready(s.name);
            }
            break;
          default:  // nothing at all, and sometimes a bad value
            if (step % 3 == 2) {
              const float bad[] = {std::numeric_limits<float>::quiet_NaN()};
              test::write_values(opt.grad("mlp.up").data.sub(0, 1), bad);
            }
        }
        const StepReport report = opt.step();
        EXPECT_EQ(report->taken, step % 3 != 2) << step;
      }
      signatures[static_cast<std::size_t>(comm.rank())] = traced.signatures();
    });
    EXPECT_EQ(signatures[1], signatures[0]);
    EXPECT_EQ(signatures[2], signatures[0]);
  }
}

TEST(DistributedAdam, NoParamsAndOnlyFrozenParamsAreOrdinary) {
  std::vector<ParamSpec> frozen = {spec("a", {64, 64}), spec("b", {5})};
  for (ParamSpec& s : frozen) s.frozen = true;
  for (const std::vector<ParamSpec>& specs : {std::vector<ParamSpec>(), frozen}) {
    for (const int size : {1, 3}) {
      for (const GatherFormat format : {GatherFormat::kQuantized, GatherFormat::kBf16}) {
        run_ranks(size, [&](Communicator& comm) {
          TracedCommunicator traced(comm);
          Scenario scenario;
          scenario.specs = specs;
          scenario.config.optimizer.groups.clear();
          scenario.config.parallel.gather_format = format;
          Published rank(traced, scenario);
          traced.reset();
          const StepReport report = rank.opt.step();
          EXPECT_TRUE(report->taken);
          EXPECT_EQ(report->grad_norm, 0);
          EXPECT_EQ(traced.counts(Traffic::kScales).operations, 1);
          EXPECT_EQ(traced.counts(Traffic::kPlanes).operations, 0);
        });
      }
    }
  }
}

TEST(DistributedAdam, ASlowRankChangesNothing) {
  Scenario scenario;
  scenario.steps = 3;
  scenario.digest_after = {2};
  const test::Facts expected = run_world(1, scenario);
  for (const Traffic traffic :
       {Traffic::kGradient, Traffic::kStatistics, Traffic::kScales, Traffic::kPlanes}) {
    run_ranks(3, [&](Communicator& comm) {
      std::vector<Fault> faults;
      if (comm.rank() == 1) {
        for (std::int64_t nth = 1; nth < 4; ++nth) faults.push_back({FaultKind::kDelay, traffic, nth, 20});
      }
      FaultyCommunicator slow(comm, faults);
      EXPECT_TRUE(same_facts(expected, test::run_scenario(slow, scenario)));
    });
  }
}

TEST(DistributedAdam, AFailureInsideAStepIsAPeerErrorOnAllRanksWithinTheDeadline) {
  for (const FaultKind kind : {FaultKind::kThrow, FaultKind::kFailWait, FaultKind::kBadAlloc}) {
    for (const Traffic traffic :
         {Traffic::kGradient, Traffic::kStatistics, Traffic::kPlanes, Traffic::kPlain, Traffic::kScales}) {
      SCOPED_TRACE("fault " + std::to_string(static_cast<int>(kind)) + ", " +
                   std::string(traffic_name(traffic)));
      const auto begin = std::chrono::steady_clock::now();
      std::vector<std::string> outcome(3);
      run_ranks(
          3,
          [&](Communicator& comm) {
            std::string& mine = outcome[static_cast<std::size_t>(comm.rank())];
            FaultyCommunicator faulty(comm);
            try {
              Published rank(faulty);
              if (comm.rank() == 1) faulty.arm({kind, traffic, 1, 0});
              for (int step = 0; step < 3; ++step) {
                test::feed(rank.opt, rank.scenario, step, comm.rank(), 3);
                rank.opt.step();
                for (const ParamSpec& s : rank.scenario.specs) rank.opt.wait_param(s.name);
              }
              mine = "nothing was thrown";
            } catch (const PeerError&) {
              mine = "PeerError";
            } catch (const std::bad_alloc&) {
              mine = "bad_alloc";
            } catch (const std::exception& error) {
              mine = error.what();
            }
          },
          20);
      EXPECT_EQ(outcome[0], "PeerError");
      EXPECT_EQ(outcome[1], kind == FaultKind::kBadAlloc ? "bad_alloc" : "PeerError");
      EXPECT_EQ(outcome[2], "PeerError");
      EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(10));
    }
  }
}

TEST(DistributedAdam, ARankThatNeverComesIsNamedByTheOthers) {
  std::vector<int> culprits(3, -7);
  std::atomic<int> failed = 0;
  run_ranks(
      3,
      [&](Communicator& comm) {
        Published rank(comm);
        if (comm.rank() == 2) {
          for (int i = 0; i < 1000 && failed < 2; ++i) {
            std::this_thread::sleep_for(std::chrono::milliseconds(10));
          }
          return;
        }
        try {
          rank.opt.step();
        } catch (const PeerError& error) {
          culprits[static_cast<std::size_t>(comm.rank())] = error.failure().culprit_rank;
          ++failed;
        }
      },
      1.5);
  EXPECT_EQ(culprits[0], 2);
  EXPECT_EQ(culprits[1], 2);
}

TEST(DistributedAdam, CorruptedPlanesShowAsADifferenceBetweenRanks) {
  bool seen = false;
  try {
    run_ranks(2, [&](Communicator& comm) {
      FaultyCommunicator faulty(comm);
      const auto side = comm.split(0, comm.rank());
      Published rank(faulty);
      if (comm.rank() == 1) faulty.arm({FaultKind::kCorrupt, Traffic::kPlanes, 0, 0});
      rank.opt.step();
      test::state_facts(rank.opt, *side, "");
    });
  } catch (const std::runtime_error& error) {
    seen = std::string(error.what()).find("differs between ranks") != std::string::npos;
  }
  EXPECT_TRUE(seen);
}

// ---------------------------------------------------------------------------------------------------------
// Life and death
// ---------------------------------------------------------------------------------------------------------

/// Memory that is overwritten when it is given back, and freed only with the allocator.
class PoisoningAllocator final : public Allocator {
 public:
  ~PoisoningAllocator() override {
    for (void* data : blocks_) std::free(data);
  }
  void* allocate(std::int64_t bytes, std::int64_t alignment_bytes) override {
    if (--left_ < 0) throw std::bad_alloc();
    const std::int64_t whole = (bytes + alignment_bytes - 1) / alignment_bytes * alignment_bytes;
    void* const data =
        std::aligned_alloc(static_cast<std::size_t>(alignment_bytes), static_cast<std::size_t>(whole));
    blocks_.push_back(data);
    return data;
  }
  void deallocate(void* data, std::int64_t bytes) noexcept override {
    std::memset(data, 0xEE, static_cast<std::size_t>(bytes));
  }
  /// The allocation after `count` more fails.
  void fail_after(int count) { left_ = count; }

 private:
  std::vector<void*> blocks_;
  int left_ = 1 << 20;
};

TEST(DistributedAdam, MemoryIsKeptUntilTheGathersInFlightAreComplete) {
  Scenario scenario;
  scenario.with_skips = false;
  test::Facts expected;
  {
    SelfCommunicator self;
    Published rank(self, scenario);
    test::feed(rank.opt, scenario, 0, 0, 1);
    rank.opt.step();
    for (const test::Fact& fact : test::state_facts(rank.opt, self, "")) {
      if (fact.label.ends_with("data")) expected.push_back(fact);
    }
  }
  run_ranks(2, [&](Communicator& comm) {
    const auto poisoning = std::make_shared<PoisoningAllocator>();
    FaultyCommunicator faulty(comm);
    auto opt =
        std::make_unique<DistributedAdam>(scenario.specs, scenario.config, faulty, Device(), poisoning);
    test::set_all_initial(*opt, scenario.specs);
    opt->publish();
    test::feed(*opt, scenario, 0, comm.rank(), 2);
    if (comm.rank() == 1) {
      // The column gathers, which are the last planes of the step, come late.
      for (std::int64_t nth = 0; nth < 12; ++nth) faulty.arm({FaultKind::kDelay, Traffic::kPlanes, nth, 15});
    }
    opt->step();
    if (comm.rank() == 0) {
      opt.reset();
    } else {
      SelfCommunicator alone;  // digests of this rank's planes
      test::Facts held;
      for (const test::Fact& fact : test::state_facts(*opt, alone, "")) {
        if (fact.label.ends_with("data")) held.push_back(fact);
      }
      EXPECT_TRUE(same_facts(expected, held));
    }
    comm.barrier();
  });
}

TEST(DistributedAdam, MemoryIsKeptUntilTheGradientsInFlightAreReduced) {
  run_ranks(2, [&](Communicator& comm) {
    const auto poisoning = std::make_shared<PoisoningAllocator>();
    const std::vector<ParamSpec> specs = {spec("a", {4096}, ParamFormat::kFp32)};
    auto opt = std::make_unique<DistributedAdam>(specs, Config(), comm, Device(), poisoning);
    if (comm.rank() == 1) std::this_thread::sleep_for(std::chrono::milliseconds(100));
    const TypedSpan grad = opt->grad("a").data;
    test::write_values(grad, std::vector<float>(4096, 1.0f));
    opt->grad_ready("a");
    if (comm.rank() == 0) opt.reset();
    comm.barrier();
    if (comm.rank() == 1) {
      for (const float value : test::read_values(grad.sub(2048, 2048))) ASSERT_EQ(value, 1.0f);
    }
    comm.barrier();
  });
}

TEST(DistributedAdam, ARankThatCanNotAllocateIsAnErrorOnAllRanks) {
  std::vector<std::string> texts(3);
  run_ranks(3, [&](Communicator& comm) {
    const auto allocator = std::make_shared<PoisoningAllocator>();
    if (comm.rank() == 1) allocator->fail_after(3);
    const Scenario scenario;
    texts[static_cast<std::size_t>(comm.rank())] = contract_message(
        [&] { DistributedAdam opt(scenario.specs, scenario.config, comm, Device(), allocator); });
  });
  for (const std::string& text : texts) {
    EXPECT_EQ(text,
              "ranks disagree:\n  construction: rank 1 has 'std::bad_alloc' where rank 0 has '(nothing)'");
  }
}

TEST(DistributedAdam, AStepLeavesTheViewsOfFrozenParamsCurrent) {
  for (const GatherFormat format : {GatherFormat::kQuantized, GatherFormat::kBf16}) {
    run_ranks(3, [&](Communicator& comm) {
      ParamSpec frozen = spec("frozen", {64, 64});
      frozen.frozen = true;
      const std::vector<ParamSpec> specs = {frozen, spec("free", {64, 64})};
      Config config;
      config.parallel.gather_format = format;
      DistributedAdam opt(specs, config, comm);
      test::set_all_initial(opt, specs);
      opt.publish();
      const auto views_of = [&](const char* name) {
        opt.wait_param(name, Plane::kRow);
        return opt.wait_param(name, Plane::kColumn);
      };
      const ParamView kept = views_of("frozen"), old = views_of("free");
      opt.step();
      for (const Plane plane : {Plane::kRow, Plane::kColumn}) {
        EXPECT_NO_THROW(opt.require_current("frozen", kept, plane));
        EXPECT_THROW(opt.require_current("free", old, plane), ContractError);
      }
      opt.publish();
      EXPECT_THROW(opt.require_current("frozen", kept, Plane::kRow), ContractError);
    });
  }
}

}  // namespace
}  // namespace mxopt
