// Faults that other libraries of this kind had, as properties of this one. Those that a unit test covers are
// not repeated here.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "support/optimizer_fixture.h"
#include "support/reference_adam.h"
#include "support/thrown_message.h"

#include "mxopt/collectives/traced_communicator.h"

namespace mxopt {
namespace {

using test::bits_equal;
using test::contains;
using test::Facts;
using test::run_ranks;
using test::run_world;
using test::same_facts;
using test::Scenario;
using test::set_all_initial;
using test::spec;
using test::thrown_message;

const float kNan = std::numeric_limits<float>::quiet_NaN();

void fill_grad(DistributedAdam& opt, const std::string& name, float value) {
  const TypedSpan grad = opt.grad(name).data;
  test::write_values(grad, std::vector<float>(static_cast<std::size_t>(grad.elems), value));
}

/// The masters of one param in a run of one process.
std::vector<float> whole_master(DistributedAdam& opt, Communicator& side, const std::string& name) {
  const OwnedSlice slice = opt.owned(name);
  const std::int64_t elems = opt.layout().param(opt.layout().find(name)).elems();
  return test::whole_state(side, elems, slice.param_begin, slice.master);
}

/// No weight decay, no clipping, a learning rate that is exact, and updates that are its sign.
Config sign_config() {
  Config config;
  config.optimizer.lr = 0.125;
  config.optimizer.betas = {0, 0};
  config.optimizer.eps = 0;
  config.optimizer.weight_decay = 0;
  config.optimizer.clip_grad = 0;
  return config;
}

// ---------------------------------------------------------------------------------------------------------
// Numbers and layout
// ---------------------------------------------------------------------------------------------------------

TEST(KnownFaults, ScalePaddingIsZeroAfterEveryStepWhateverWasThere) {
  const std::vector<ParamSpec> specs = {spec("a", {32, 96})};
  for (const int size : {1, 2, 3}) {
    for (const bool gemm : {false, true}) {
      run_ranks(size, [&](Communicator& comm) {
        Config config;
        config.precision.scale_layout = gemm ? ScaleLayout::kGemm : ScaleLayout::kCompact;
        const auto side = comm.split(0, comm.rank());
        DistributedAdam opt(specs, config, comm);
        set_all_initial(opt, specs);
        opt.publish();
        opt.wait_param("a");
        const MxView planes = opt.wait_param("a", Plane::kColumn).planes;
        const ParamLayout& layout = opt.layout().param(0);
        std::fill_n(planes.row_scales, layout.row_scales_bytes, std::uint8_t{0xFF});
        std::fill_n(planes.column_scales, layout.column_scales_bytes, std::uint8_t{0xFF});
        fill_grad(opt, "a", 0.5f);
        opt.step();
        test::expect_oracle_bytes(opt, *side, gemm);
        test::state_facts(opt, *side, "");
      });
    }
  }
}

TEST(KnownFaults, RowOnlyParamsHoldNoColumnBytes) {
  SelfCommunicator comm;
  const std::vector<ParamSpec> specs = {spec("a", {64, 64}, ParamFormat::kMxfp8, Storage::kRow)};
  Config config;
  DistributedAdam opt(specs, config, comm);
  const ByteCounts& bytes = opt.construction().bytes;
  EXPECT_EQ(bytes.row_plane, 4096);
  EXPECT_EQ(bytes.column_plane, 0);
  EXPECT_EQ(bytes.scales, 128 * 4);  // 64 x 2 scales, padded to 128 x 4
  EXPECT_EQ(opt.param("a").planes.column_data, nullptr);
  EXPECT_EQ(opt.param("a").planes.column_scales, nullptr);
  set_all_initial(opt, specs);
  opt.publish();
  for (int step = 0; step < 2; ++step) EXPECT_TRUE(opt.step()->taken);
  test::expect_oracle_bytes(opt, comm, false);
}

TEST(KnownFaults, OddShapesAreKeptInBf16OrRefusedAtConstruction) {
  std::vector<ParamSpec> specs = {spec("a", {48, 64}), spec("b", {33, 32}, {}, Storage::kRow),
                                  spec("c", {64, 40}), spec("d", {1, 32}), spec("bias", {100})};
  SelfCommunicator comm;
  const auto side = comm.split(0, 0);
  DistributedAdam opt(specs, Config(), comm);
  EXPECT_EQ(opt.construction().fallbacks.size(), 5u);
  set_all_initial(opt, specs);
  opt.publish();
  for (int step = 0; step < 3; ++step) {
    for (const ParamSpec& s : specs) fill_grad(opt, s.name, 0.25f);
    EXPECT_TRUE(opt.step()->taken);
  }
  test::expect_oracle_bytes(opt, *side, false);

  Config strict;
  strict.precision.fallback = Fallback::kError;
  const std::string text = thrown_message<ConfigError>([&] { DistributedAdam(specs, strict, comm); });
  for (const char* shape : {"48x64", "33x32", "64x40", "1x32", "1x100"}) {
    EXPECT_TRUE(
        contains(text, "matrix view " + std::string(shape) + " is not a multiple of 32 in both dims"));
  }
}

TEST(KnownFaults, EveryPointerIsAlignedAfterOddParams) {
  const std::vector<ParamSpec> specs = {spec("bias.0", {33}), spec("w.0", {64, 64}), spec("bias.1", {1}),
                                        spec("w.1", {32, 32}),
                                        spec("w.2", {32, 96}, ParamFormat::kMxfp8, Storage::kRow)};
  for (const int size : {1, 2, 3, 7}) {
    run_ranks(size, [&](Communicator& comm) {
      DistributedAdam opt(specs, Config(), comm);
      for (const ParamSpec& s : specs) {
        const ParamView view = opt.param(s.name);
        const OwnedSlice slice = opt.owned(s.name);
        for (const void* pointer :
             {static_cast<const void*>(view.planes.row_data),
              static_cast<const void*>(view.planes.row_scales),
              static_cast<const void*>(view.planes.column_data),
              static_cast<const void*>(view.planes.column_scales), static_cast<const void*>(view.values.data),
              static_cast<const void*>(opt.grad(s.name).data.data),
              static_cast<const void*>(slice.master.data()), static_cast<const void*>(slice.exp_avg.data()),
              static_cast<const void*>(slice.exp_avg_sq.data())}) {
          EXPECT_EQ(reinterpret_cast<std::uintptr_t>(pointer) % 128, 0u) << s.name << ", W " << size;
        }
      }
    });
  }
}

// ---------------------------------------------------------------------------------------------------------
// Sharding, gather and buffer life
// ---------------------------------------------------------------------------------------------------------

TEST(KnownFaults, TensOfThousandsOfTinyParamsAreOneStepEach) {
  std::vector<ParamSpec> specs;
  for (int i = 0; i < 21'000; ++i) specs.push_back(spec("p" + std::to_string(i), {1}, ParamFormat::kFp32));
  specs.push_back(spec("matrix", {32, 32}));
  for (const int size : {1, 4}) {
    run_ranks(size, [&](Communicator& comm) {
      DistributedAdam opt(specs, sign_config(), comm);
      const std::vector<float> ones(1024, 1.0f);
      for (const ParamSpec& s : specs) {
        opt.set_initial(s.name, std::span(ones).first(s.name == "matrix" ? 1024 : 1));
      }
      opt.publish();
      for (const ParamSpec& s : specs) fill_grad(opt, s.name, 1.0f);
      const StepReport report = opt.step();
      EXPECT_EQ(report->grad_norm, std::sqrt(22'024.0));
      EXPECT_LE(report->launches, 3);
      std::int64_t wrong = 0;
      for (const ParamSpec& s : specs) {
        const ParamView view = opt.wait_param(s.name);
        if (s.name != "matrix") wrong += view.values.as<float>()[0] == 0.875f ? 0 : 1;
      }
      EXPECT_EQ(wrong, 0);
    });
  }
}

TEST(KnownFaults, RanksThatOwnOnlyPaddingDoEverythingTheOthersDo) {
  std::vector<ParamSpec> specs = {spec("matrix", {32, 32}), spec("bias", {5}), spec("empty", {0, 64})};
  std::vector<std::vector<std::string>> signatures(8);
  std::vector<std::int64_t> owned(8);
  run_ranks(8, [&](Communicator& comm) {
    TracedCommunicator traced(comm);
    traced.record_signatures();
    Config config;
    config.optimizer.clip_grad = 0.5;
    const auto side = comm.split(0, comm.rank());
    DistributedAdam opt(specs, config, traced);
    set_all_initial(opt, specs);
    opt.publish();
    const auto at = static_cast<std::size_t>(comm.rank());
    for (const ParamSpec& s : specs) owned[at] += static_cast<std::int64_t>(opt.owned(s.name).master.size());
    for (int step = 0; step < 3; ++step) {
      for (const ParamSpec& s : specs) {
        fill_grad(opt, s.name, step == 1 && comm.rank() == 7 && s.name == "bias" ? kNan : 1.0f);
        opt.grad_ready(s.name);
      }
      const StepReport report = opt.step();
      EXPECT_EQ(report->taken, step != 1);
      if (step != 1) {
        EXPECT_EQ(report->grad_norm, std::sqrt(1029.0));
        EXPECT_LT(report->clip_factor, 1);
      }
    }
    test::expect_oracle_bytes(opt, *side, false);
    test::state_facts(opt, *side, "");
    signatures[at] = traced.signatures();
  });
  // Of a small bucket every rank owns 128 elements, used or not.
  EXPECT_EQ(owned, std::vector<std::int64_t>({133, 128, 128, 128, 128, 128, 128, 128}));
  for (const auto& other : signatures) EXPECT_EQ(other, signatures[0]);
}

TEST(KnownFaults, ARankWithNothingAtAllJoinsThePackedMaximumWithTheSameTypeAndCount) {
  for (const ParamFormat format : {ParamFormat::kMxfp8, ParamFormat::kBf16, ParamFormat::kFp32}) {
    // The params are so small that ranks 1 to 3 own padding only.
    const std::vector<ParamSpec> specs = {
        spec("a", {5}, format == ParamFormat::kMxfp8 ? ParamFormat::kBf16 : format),
        spec("b", {32, format == ParamFormat::kMxfp8 ? 32 : 2}, format)};
    std::vector<std::vector<std::string>> scales(4);
    run_ranks(4, [&](Communicator& comm) {
      TracedCommunicator traced(comm);
      traced.record_signatures();
      DistributedAdam opt(specs, Config(), traced);
      set_all_initial(opt, specs);
      opt.publish();
      opt.step();
      for (const std::string& signature : traced.signatures()) {
        if (contains(signature, "scales)"))
          scales[static_cast<std::size_t>(comm.rank())].push_back(signature);
      }
    });
    ASSERT_EQ(scales[0].size(), 2u);
    EXPECT_TRUE(contains(scales[0][1], "all_reduce(max, uint8 x "));
    for (const auto& other : scales) EXPECT_EQ(other, scales[0]);
  }
}

TEST(KnownFaults, TwoOptimizersDoNotTouchEachOther) {
  Scenario dense, expert;
  dense.specs = {spec("dense.w", {64, 96}), spec("dense.b", {7})};
  expert.specs = {spec("expert.w", {96, 64}), spec("expert.b", {300}, ParamFormat::kFp32)};
  for (Scenario* s : {&dense, &expert}) {
    s->config.optimizer.groups.clear();
    s->with_changes = s->with_skips = false;
    s->steps = 4;
    s->digest_after = {3};
  }
  const Facts dense_alone = run_world(1, dense);
  const Facts expert_alone = run_world(1, expert);
  const auto states = [](const Facts& facts) {
    Facts result;
    for (const test::Fact& fact : facts) {
      if (fact.label.starts_with("after step 3: ")) result.push_back(fact);
    }
    return result;
  };
  for (const bool dense_first : {false, true}) {
    run_ranks(2, [&](Communicator& comm) {
      const auto other = comm.split(0, comm.rank());
      const auto side = comm.split(0, comm.rank());
      DistributedAdam a(dense.specs, dense.config, comm), b(expert.specs, expert.config, *other);
      set_all_initial(a, dense.specs);
      set_all_initial(b, expert.specs);
      (dense_first ? a : b).publish();
      (dense_first ? b : a).publish();
      for (int step = 0; step < 4; ++step) {
        test::feed(a, dense, step, comm.rank(), 2);
        test::feed(b, expert, step, comm.rank(), 2);
        (dense_first ? a : b).step();
        (dense_first ? b : a).step();
        b.publish();
        a.publish();
      }
      EXPECT_TRUE(same_facts(states(dense_alone), test::state_facts(a, *side, "after step 3: ")));
      EXPECT_TRUE(same_facts(states(expert_alone), test::state_facts(b, *side, "after step 3: ")));
    });
  }
}

TEST(KnownFaults, BucketsMayBeWaitedForInAnyOrderOrNotAtAll) {
  const std::vector<ParamSpec> specs = {spec("a", {32, 32}), spec("b", {32, 64}), spec("c", {64, 64})};
  Config config;
  config.optimizer.bucket_elems = 128;
  run_ranks(3, [&](Communicator& comm) {
    const auto side = comm.split(0, comm.rank());
    DistributedAdam opt(specs, config, comm);
    ASSERT_EQ(opt.layout().buckets().size(), 3u);
    set_all_initial(opt, specs);
    opt.publish();
    for (int step = 0; step < 3; ++step) {
      for (const ParamSpec& s : specs) fill_grad(opt, s.name, 1.0f);
      opt.step();
      for (const char* name : {"c", "a"}) {
        const std::vector<float> master = whole_master(opt, *side, name);
        const ParamView view = opt.wait_param(name);
        opt.require_current(name, view, Plane::kRow);
        const reference::Mxfp8 expected =
            reference::quantize(master, view.planes.rows, view.planes.cols, false);
        EXPECT_TRUE(bits_equal(expected.row_data, std::span(view.planes.row_data, expected.row_data.size())));
      }
    }
    test::expect_oracle_bytes(opt, *side, false);  // "b" was never waited for and is not lost
  });
}

TEST(KnownFaults, TheMeanOverRanksIsTakenOnceAlsoWithMicroBatches) {
  for (const DType dtype : {DType::kFp32, DType::kBf16}) {
    for (const int micro_batches : {1, 2}) {
      run_ranks(4, [&](Communicator& comm) {
        Config config = sign_config();
        config.optimizer.grad_dtype = dtype;
        const std::vector<ParamSpec> specs = {spec("a", {64, 64})};
        DistributedAdam opt(specs, config, comm);
        set_all_initial(opt, specs);
        opt.publish();
        for (int micro = 0; micro < micro_batches; ++micro) {
          opt.begin_backward(micro == micro_batches - 1);
          test::add_values(opt.grad("a").data, std::vector<float>(4096, 1.0f),
                           static_cast<float>(comm.rank() + 1));
          opt.grad_ready("a");
        }
        const StepReport report = opt.step();
        const double reduced = micro_batches == 1 ? 2.5 : 5;  // a mean over ranks, a sum over micro-batches
        EXPECT_EQ(report->grad_norm, 64 * reduced);
        for (const float m : opt.owned("a").exp_avg) ASSERT_EQ(m, static_cast<float>(reduced));
        for (const float value : test::read_values(opt.grad("a").data)) ASSERT_EQ(value, 0.0f);
      });
    }
  }
}

TEST(KnownFaults, BucketLengthsNeedNotDivideByTheWorldSize) {
  Scenario scenario;
  scenario.specs = {spec("a", {1000}, ParamFormat::kFp32), spec("b", {1001}, ParamFormat::kBf16),
                    spec("c", {1}), spec("d", {32, 32})};
  scenario.config.optimizer.groups.clear();
  scenario.config.optimizer.bucket_elems = 128;
  scenario.with_changes = scenario.with_skips = false;
  scenario.steps = 5;
  scenario.digest_after = {-1, 4};
  const Facts expected = run_world(1, scenario);
  for (const int size : {3, 5, 6, 7}) EXPECT_TRUE(same_facts(expected, run_world(size, scenario))) << size;
}

TEST(KnownFaults, ATiedParamIsOneMasterOneUpdateAndOneTermOfTheNorm) {
  for (const int size : {1, 2, 3}) {
    run_ranks(size, [&](Communicator& comm) {
      std::vector<ParamSpec> specs = {spec("embed", {25, 32}, ParamFormat::kFp32), spec("body", {32, 32}),
                                      spec("head", {25, 32}, ParamFormat::kFp32)};
      specs[2].tied_to = "embed";
      Config config = sign_config();
      const auto side = comm.split(0, comm.rank());
      DistributedAdam opt(specs, config, comm);
      set_all_initial(opt, specs);
      opt.publish();
      const std::vector<float> before = whole_master(opt, *side, "embed");
      test::add_values(opt.grad("head").data, std::vector<float>(800, 1.0f), 0.75f);
      opt.grad_ready("head");
      test::add_values(opt.grad("embed").data, std::vector<float>(800, 1.0f), 0.25f);
      opt.grad_ready("embed");
      const StepReport report = opt.step();
      EXPECT_EQ(report->grad_norm, std::sqrt(800.0));
      const std::vector<float> after = whole_master(opt, *side, "head");
      for (std::size_t i = 0; i < after.size(); ++i) ASSERT_EQ(after[i], std::fma(-0.125f, 1.0f, before[i]));
    });
  }
}

TEST(KnownFaults, TheSameNameTwiceIsRefused) {
  SelfCommunicator comm;
  EXPECT_TRUE(contains(thrown_message<ConfigError>([&] {
                         DistributedAdam({spec("a", {32}), spec("a", {32})}, Config(), comm);
                       }),
                       "param 'a' is registered twice; to share storage, use another name and tied_to"));
}

TEST(KnownFaults, FrozenParamsKeepTheirBytesAndLaterChangesReachAllRanks) {
  std::vector<ParamSpec> specs = {spec("first", {64, 64}), spec("middle", {64, 64}), spec("last", {7})};
  specs[1].frozen = true;
  Config config;
  config.optimizer.clip_grad = 0;
  config.optimizer.weight_decay = 0.1;
  const std::int64_t elems[] = {4096, 4096, 7};
  run_ranks(2, [&](Communicator& comm) {
    const auto side = comm.split(0, comm.rank());
    DistributedAdam opt(specs, config, comm);
    set_all_initial(opt, specs);
    opt.publish();
    const ByteCounts& bytes = opt.construction().bytes;
    EXPECT_EQ(bytes.exp_avg, bytes.master - 4096 / 2 * 4) << "the frozen param has moments";
    EXPECT_TRUE(opt.owned("middle").exp_avg.empty());
    const auto middle = [&] {
      Facts facts;
      for (const test::Fact& fact : test::state_facts(opt, *side, "")) {
        if (fact.label.starts_with("middle")) facts.push_back(fact);
      }
      return facts;
    };
    const Facts before = middle();
    reference::AdamState<float> expected(test::initial_values("first", 4096));
    reference::AdamSettings settings;
    for (std::int64_t t = 1; t <= 6; ++t) {
      if (t == 6) {
        opt.set_lr("default", 10 * config.optimizer.lr);
        opt.set_betas(0.5, config.optimizer.betas[1]);
        settings.lr = 10 * config.optimizer.lr;
        settings.beta1 = 0.5;
      }
      for (int i : {0, 2}) {
        test::write_values(
            opt.grad(specs[static_cast<std::size_t>(i)].name).data,
            test::grad_values(specs[static_cast<std::size_t>(i)].name, elems[i], static_cast<int>(t)));
      }
      EXPECT_TRUE(opt.step()->taken);
      reference::adam_step(expected, test::grad_values("first", 4096, static_cast<int>(t)), settings, t);
    }
    EXPECT_TRUE(same_facts(before, middle()));
    EXPECT_TRUE(bits_equal(expected.p, whole_master(opt, *side, "first")));
  });
}

TEST(KnownFaults, GradientViewsArePacked) {
  SelfCommunicator comm;
  DistributedAdam opt({spec("a", {64, 64}), spec("b", {3, 5, 7})}, Config(), comm);
  EXPECT_EQ(opt.grad("a").data.elems, 64 * 64);
  EXPECT_EQ(opt.grad("a").shape, std::vector<std::int64_t>({64, 64}));
  EXPECT_EQ(opt.grad("b").data.elems, 105);
}

// ---------------------------------------------------------------------------------------------------------
// Norm, clipping, loss scale, step count
// ---------------------------------------------------------------------------------------------------------

TEST(KnownFaults, TheNormCountsEveryElementOnce) {
  for (const int size : {1, 2, 3, 4, 8}) {
    for (const std::int64_t bucket_elems : {0, 128, 512}) {
      for (const DType dtype : {DType::kFp32, DType::kBf16}) {
        run_ranks(size, [&](Communicator& comm) {
          const std::vector<ParamSpec> specs = {spec("a", {1000}), spec("b", {24}, ParamFormat::kFp32)};
          Config config;
          config.optimizer.bucket_elems = bucket_elems;
          config.optimizer.grad_dtype = dtype;
          DistributedAdam opt(specs, config, comm);
          set_all_initial(opt, specs);
          opt.publish();
          for (const ParamSpec& s : specs) fill_grad(opt, s.name, 1.0f);
          EXPECT_EQ(opt.step()->grad_norm, 32.0) << "W " << size << ", bucket limit " << bucket_elems;
        });
      }
    }
  }
}

TEST(KnownFaults, PaddingHasNoInfluence) {
  for (const GatherFormat format : {GatherFormat::kQuantized, GatherFormat::kBf16}) {
    Scenario scenario;
    scenario.specs.push_back(spec("odd", {1001}, ParamFormat::kFp32));
    scenario.config.parallel.gather_format = format;
    scenario.config.optimizer.bucket_elems = 1000;
    const Facts expected = run_world(3, scenario);
    scenario.nan_padding = true;
    EXPECT_TRUE(same_facts(expected, run_world(3, scenario)));
  }
}

TEST(KnownFaults, SkipsAreCountedReportedAndLimited) {
  run_ranks(2, [](Communicator& comm) {
    const std::vector<ParamSpec> specs = {spec("good", {32, 32}), spec("bad", {64})};
    Config config = sign_config();
    config.optimizer.max_consecutive_skips = 5;
    config.optimizer.loss_scale = {LossScaleKind::kDynamic, 4, 2, 10, 1};
    const auto side = comm.split(0, comm.rank());
    DistributedAdam opt(specs, config, comm);
    set_all_initial(opt, specs);
    opt.publish();
    for (int call = 1; call <= 6; ++call) {
      if (comm.rank() == 1) fill_grad(opt, "bad", kNan);
      if (call >= 5) {
        EXPECT_TRUE(contains(thrown_message<ContractError>([&] { opt.step(); }),
                             "step: " + std::to_string(call) + " steps in a row were skipped"));
        continue;
      }
      const StepReport report = opt.step();
      EXPECT_FALSE(report->taken);
      EXPECT_TRUE(std::isnan(report->grad_norm));
      EXPECT_EQ(report->consecutive_skips, call);
      EXPECT_EQ(report->nonfinite_gradient_params.front(), "bad");
      EXPECT_GE(report->next_loss_scale, 2);
    }
    EXPECT_EQ(opt.loss_scale()[0], 2);
    EXPECT_EQ(opt.steps_taken(), 0);
    // The next good step is corrected as the first one.
    const std::vector<float> before = whole_master(opt, *side, "bad");
    fill_grad(opt, "bad", 6.0f);
    const StepReport report = opt.step();
    EXPECT_TRUE(report->taken);
    EXPECT_EQ(report->step, 1);
    EXPECT_EQ(report->skipped_total, 6);
    const std::vector<float> after = whole_master(opt, *side, "bad");
    for (std::size_t i = 0; i < after.size(); ++i) ASSERT_EQ(after[i], std::fma(-0.125f, 1.0f, before[i]));
  });
}

TEST(KnownFaults, ABadGradientIsForgottenAfterItsStep) {
  for (const GradMode mode : {GradMode::kAccumulate, GradMode::kOverwrite}) {
    std::vector<ParamSpec> specs = {spec("a", {64, 32}), spec("b", {9})};
    for (ParamSpec& s : specs) s.grad_mode = mode;
    const auto run = [&](bool with_bad_step, int size) {
      Facts facts;
      run_ranks(size, [&](Communicator& comm) {
        const auto side = comm.split(0, comm.rank());
        DistributedAdam opt(specs, Config(), comm);
        set_all_initial(opt, specs);
        opt.publish();
        for (int step = with_bad_step ? 0 : 1; step < 2; ++step) {
          for (const ParamSpec& s : specs) {
            if (mode == GradMode::kAccumulate) {
              const std::vector<float> one(static_cast<std::size_t>(opt.grad(s.name).data.elems), 1.0f);
              test::add_values(opt.grad(s.name).data, one, step == 0 ? kNan : 1.0f);
            } else {
              fill_grad(opt, s.name, step == 0 ? kNan : 1.0f);
            }
            opt.grad_ready(s.name);
          }
          EXPECT_EQ(opt.step()->taken, step == 1);
        }
        const Facts mine = test::state_facts(opt, *side, "");
        if (comm.rank() == 0) facts = mine;
      });
      return facts;
    };
    EXPECT_TRUE(same_facts(run(false, 1), run(true, 1)));
    EXPECT_TRUE(same_facts(run(false, 1), run(true, 3)));
  }
}

TEST(KnownFaults, AParamWithoutAGradientHasAZeroGradientAndTheOneCounter) {
  run_ranks(2, [](Communicator& comm) {
    const std::vector<ParamSpec> specs = {spec("always", {64}, ParamFormat::kFp32),
                                          spec("rarely", {64}, ParamFormat::kFp32)};
    Config config;
    config.optimizer.clip_grad = 0;
    config.optimizer.groups = {{"rarely", "", 2, 1}};
    const auto side = comm.split(0, comm.rank());
    DistributedAdam opt(specs, config, comm);
    set_all_initial(opt, specs);
    opt.publish();
    reference::AdamState<float> expected(test::initial_values("rarely", 64));
    reference::AdamSettings settings;
    settings.lr = 2 * config.optimizer.lr;
    for (std::int64_t t = 1; t <= 5; ++t) {
      const bool has_gradient = t != 2 && t != 3;
      fill_grad(opt, "always", 1.0f);
      if (has_gradient) fill_grad(opt, "rarely", 0.5f);
      EXPECT_EQ(opt.step()->step, t);
      reference::adam_step(expected, std::vector<float>(64, has_gradient ? 0.5f : 0.0f), settings, t);
    }
    EXPECT_TRUE(bits_equal(expected.p, whole_master(opt, *side, "rarely")));
  });
}

TEST(KnownFaults, TheStepCounterHas64Bits) {
  SelfCommunicator comm;
  const std::vector<ParamSpec> specs = {spec("a", {32, 32})};
  DistributedAdam opt(specs, Config(), comm);
  set_all_initial(opt, specs);
  opt.publish();
  for (const std::int64_t start : {std::int64_t{1} << 24, (std::int64_t{1} << 40) + 1}) {
    opt.set_steps_taken(start);
    const StepReport report = opt.step();
    EXPECT_EQ(report->step, start + 1);
    EXPECT_EQ(opt.steps_taken(), start + 1);
    for (const float master : opt.owned("a").master) ASSERT_TRUE(std::isfinite(master));
  }
}

TEST(KnownFaults, TheFirstStepMovesByTheLearningRateForEveryBeta2AndLength) {
  for (const double beta2 : {0.9, 0.999, 0.99999}) {
    for (const std::int64_t elems : {1, 7, 8, 15, 16, 17, 1023}) {
      SelfCommunicator comm;
      Config config = sign_config();
      config.optimizer.betas = {0.9, beta2};
      const std::vector<ParamSpec> specs = {spec("a", {elems}, ParamFormat::kFp32)};
      DistributedAdam opt(specs, config, comm);
      opt.set_initial("a", std::span<const float>(std::vector<float>(static_cast<std::size_t>(elems), 0.0f)));
      opt.publish();
      fill_grad(opt, "a", 3.0f);
      opt.step();
      for (const float master : opt.owned("a").master) ASSERT_NEAR(master / -0.125f, 1, 1e-6) << beta2;
    }
  }
}

TEST(KnownFaults, ARankWithoutAnyGradientCallsWhatTheOthersCall) {
  std::vector<std::vector<std::string>> signatures(4);
  run_ranks(4, [&](Communicator& comm) {
    TracedCommunicator traced(comm);
    traced.record_signatures();
    const std::vector<ParamSpec> specs = {spec("a", {64, 64}), spec("b", {128 * 4}, ParamFormat::kFp32)};
    Config config;
    config.optimizer.bucket_elems = 128;
    DistributedAdam opt(specs, config, traced);
    set_all_initial(opt, specs);
    opt.publish();
    if (comm.rank() != 2) {
      opt.begin_backward();
      for (const ParamSpec& s : specs) {
        fill_grad(opt, s.name, 4.0f);
        opt.grad_ready(s.name);
      }
    }
    const StepReport report = opt.step();
    EXPECT_TRUE(report->taken);
    EXPECT_EQ(report->grad_norm, 3 * std::sqrt(4096.0 + 512.0));  // the absent gradients are zero
    signatures[static_cast<std::size_t>(comm.rank())] = traced.signatures();
  });
  for (const auto& other : signatures) EXPECT_EQ(other, signatures[0]);
}

}  // namespace
}  // namespace mxopt
