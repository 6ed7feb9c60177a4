// The promises of the library that one process can keep or break: each is a test, with ranks as threads.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "support/faulty_communicator.h"
#include "support/optimizer_fixture.h"

#include "mxopt/collectives/traced_communicator.h"

namespace mxopt {
namespace {

using test::Facts;
using test::FaultyCommunicator;
using test::invariance_scenarios;
using test::ObservedCall;
using test::run_ranks;
using test::run_world;
using test::same_facts;
using test::Scenario;
using test::spec;
using test::StepContext;

const int kWorldSizes[] = {1, 2, 3, 4, 7};

/// The same facts for every world size, with buckets of this limit.
void expect_equal_bits(std::int64_t bucket_elems) {
  for (const auto& [name, scenario] : invariance_scenarios()) {
    const Facts expected = run_world(1, scenario);
    for (const int size : kWorldSizes) {
      SCOPED_TRACE(std::string(name) + ", W " + std::to_string(size));
      Scenario other = scenario;
      other.config.optimizer.bucket_elems = bucket_elems;
      EXPECT_TRUE(same_facts(expected, run_world(size, other)));
    }
  }
}

TEST(Promises, EqualReducedGradientsGiveEqualBitsForEveryWorldSize) {
  expect_equal_bits(0);
}

TEST(Promises, EqualReducedGradientsGiveEqualBitsInBucketsOfOneParam) {
  expect_equal_bits(128);
}

TEST(Promises, EqualReducedGradientsGiveEqualBitsInBucketsOfSomeParams) {
  expect_equal_bits(1000);
}

TEST(Promises, EqualReducedGradientsGiveEqualBitsForEveryNumberOfThreads) {
  for (const auto& [name, scenario] : invariance_scenarios()) {
    const Facts expected = run_world(1, scenario);
    for (const int threads : {2, 5}) {
      for (const int size : {1, 3}) {
        SCOPED_TRACE(std::string(name) + ", W " + std::to_string(size) + ", threads " +
                     std::to_string(threads));
        Scenario other = scenario;
        other.threads = threads;
        EXPECT_TRUE(same_facts(expected, run_world(size, other)));
      }
    }
  }
}

TEST(Promises, QuantizedAndBf16GatherGiveTheSameBytes) {
  for (const ScaleLayout scale_layout : {ScaleLayout::kCompact, ScaleLayout::kGemm}) {
    Scenario scenario;
    scenario.config.precision.scale_layout = scale_layout;
    const Facts expected = run_world(1, scenario);
    scenario.config.parallel.gather_format = GatherFormat::kBf16;
    for (const int size : kWorldSizes) {
      EXPECT_TRUE(same_facts(expected, run_world(size, scenario))) << "W " << size;
    }
  }
}

void expect_direct_bits(std::int64_t bucket_elems) {
  for (const auto& [name, scenario] : invariance_scenarios()) {
    if (scenario.config.parallel.gather_format == GatherFormat::kBf16) continue;
    const Facts expected = run_world(1, scenario);
    for (const int size : kWorldSizes) {
      SCOPED_TRACE(std::string(name) + ", W " + std::to_string(size));
      Scenario direct = scenario;
      direct.config.parallel.gather = GatherChoice::kDirect;
      direct.config.optimizer.bucket_elems = bucket_elems;
      EXPECT_TRUE(same_facts(expected, run_world(size, direct)));
    }
  }
}

TEST(Promises, DirectAndCollectiveGatherGiveTheSameBits) {
  expect_direct_bits(0);
}

TEST(Promises, DirectAndCollectiveGatherGiveTheSameBitsInSmallBuckets) {
  expect_direct_bits(1000);
}

TEST(Promises, DirectGatherOfRandomListsWithLateRanksGivesTheBitsOfOneRank) {
  for (std::uint64_t seed = 0; seed < 6; ++seed) {
    Scenario scenario;
    scenario.specs = test::random_specs(seed);
    scenario.config.optimizer.bucket_elems = seed % 2 == 0 ? 0 : 5000;
    scenario.config.optimizer.groups.clear();
    scenario.config.precision.scale_layout = seed % 3 == 0 ? ScaleLayout::kGemm : ScaleLayout::kCompact;
    scenario.with_changes = false;
    const Facts expected = run_world(1, scenario);
    scenario.config.parallel.gather = GatherChoice::kDirect;
    for (const int size : {2, 3, 5}) {
      SCOPED_TRACE("seed " + std::to_string(seed) + ", W " + std::to_string(size));
      std::vector<Facts> facts(static_cast<std::size_t>(size));
      run_ranks(size, [&](Communicator& comm) {
        std::int64_t calls = 0;
        // Every rank is late before calls of its own choice.
        FaultyCommunicator late(comm, {}, [&](const ObservedCall&) {
          const std::uint64_t bits = test::mix(seed, comm.rank(), calls++);
          if (bits % 8 == 0) std::this_thread::sleep_for(std::chrono::microseconds(bits / 8 % 2000));
        });
        facts[static_cast<std::size_t>(comm.rank())] = test::run_scenario(late, scenario);
      });
      for (const Facts& of_rank : facts) EXPECT_TRUE(same_facts(expected, of_rank));
    }
  }
}

TEST(Promises, DirectRowsWithCollectiveColumnsGiveTheSameBits) {
  for (const auto& [name, scenario] : invariance_scenarios()) {
    if (scenario.config.parallel.gather_format == GatherFormat::kBf16) continue;
    SCOPED_TRACE(name);
    const Facts expected = run_world(1, scenario);
    for (const int size : {2, 3, 7}) {
      std::vector<Facts> facts(static_cast<std::size_t>(size));
      run_ranks(size, [&](Communicator& comm) {
        FaultyCommunicator slow_link(comm);
        // Row bytes just fit beside an update of about 30 bytes an element.
        slow_link.set_copy_rates({1.5 / 30 * (size - 1), 1, ""});
        facts[static_cast<std::size_t>(comm.rank())] =
            test::run_scenario(slow_link, scenario, [&](const StepContext& now) {
              ASSERT_EQ(
                  now.opt.construction().gather.rfind("row planes direct, column planes collective (", 0), 0u)
                  << now.opt.construction().gather;
            });
      });
      for (const Facts& of_rank : facts) EXPECT_TRUE(same_facts(expected, of_rank)) << "W " << size;
    }
  }
}

// Rank 1 reads its planes slowly while the other ranks hurry into the next step or publish.
TEST(Promises, DirectStoresWaitForAPeerThatStillReads) {
  for (const bool is_publish : {false, true}) {
    test::run_ranks(3, [&](Communicator& comm) {
      Scenario scenario;
      scenario.specs = {spec("a", {224, 416}, ParamFormat::kMxfp8, Storage::kBoth),
                        spec("b", {1000}, ParamFormat::kBf16)};
      scenario.config.optimizer.groups.clear();
      scenario.config.parallel.gather = GatherChoice::kDirect;
      DistributedAdam opt(scenario.specs, scenario.config, comm);
      ASSERT_GT(opt.construction().cut.cut_bands, 0);
      test::set_all_initial(opt, scenario.specs, comm.rank());
      opt.publish();
      const auto held = [&] {
        const MxView planes = opt.wait_param("a", Plane::kColumn).planes;
        const ParamLayout& param = opt.layout().param(0);
        const TypedSpan values = opt.wait_param("b").values;
        std::vector<std::uint8_t> bytes(planes.row_data, planes.row_data + planes.elems());
        bytes.insert(bytes.end(), planes.row_scales, planes.row_scales + param.row_scales_bytes);
        bytes.insert(bytes.end(), planes.column_data, planes.column_data + planes.elems());
        bytes.insert(bytes.end(), planes.column_scales, planes.column_scales + param.column_scales_bytes);
        bytes.insert(bytes.end(), values.byte_data(), values.byte_data() + values.bytes());
        return bytes;
      };
      for (int step = 0; step < 3; ++step) {
        if (!is_publish) test::feed(opt, scenario, step, comm.rank(), comm.size());
        if (is_publish) {
          for (const char* name : {"a", "b"}) {
            for (float& value : opt.owned(name).master) value *= 0.5f;
          }
        }
        const std::vector<std::uint8_t> before = held();
        if (comm.rank() == 1) {
          std::this_thread::sleep_for(std::chrono::milliseconds(30));
          EXPECT_EQ(held(), before);
        }
        if (is_publish) {
          opt.publish();
        } else {
          ASSERT_TRUE(opt.step()->taken);
        }
        EXPECT_NE(held(), before);
      }
    });
  }
}

TEST(Promises, DirectGatherSendsNoPlanesAndReducesTheCodesOfCutBandsOnly) {
  test::run_ranks(3, [](Communicator& comm) {
    TracedCommunicator traced(comm);
    Scenario scenario;
    scenario.config.parallel.gather = GatherChoice::kDirect;
    DistributedAdam opt(scenario.specs, scenario.config, traced);
    test::set_all_initial(opt, scenario.specs, comm.rank());
    opt.publish();
    test::feed(opt, scenario, 0, comm.rank(), comm.size());
    traced.reset();
    ASSERT_TRUE(opt.step()->taken);
    for (const Traffic none : {Traffic::kPlanes, Traffic::kPlain, Traffic::kHighPrecision}) {
      EXPECT_EQ(traced.counts(none).operations, 0) << traffic_name(none);
    }
    EXPECT_EQ(traced.counts(Traffic::kScales).operations, 1);
    std::int64_t codes = 0;
    std::set<std::pair<int, std::int64_t>> bands;
    for (int rank = 0; rank < comm.size(); ++rank) {
      for (const CutBand& cut : opt.layout().cut_bands(rank)) {
        const ParamLayout& param = opt.layout().param(cut.param);
        if (!param.family.frozen && bands.emplace(cut.param, cut.band).second) codes += param.cols;
      }
    }
    EXPECT_GT(codes, 0);
    EXPECT_EQ(traced.counts(Traffic::kScales).bytes, 128 + codes);
    EXPECT_EQ(traced.counts(Traffic::kControl).operations, 1);  // behind the cut bands
    EXPECT_EQ(traced.counts(Traffic::kControl).bytes, 1);
  });
}

TEST(Promises, DirectGatherWithoutCutBandsNeedsNoClosingReduction) {
  test::run_ranks(2, [](Communicator& comm) {
    TracedCommunicator traced(comm);
    Scenario scenario;
    scenario.specs = {spec("a", {128, 64}, ParamFormat::kMxfp8, Storage::kBoth)};
    scenario.config.optimizer.groups.clear();
    scenario.config.parallel.gather = GatherChoice::kDirect;
    DistributedAdam opt(scenario.specs, scenario.config, traced);
    test::set_all_initial(opt, scenario.specs, comm.rank());
    opt.publish();
    traced.reset();
    ASSERT_TRUE(opt.step()->taken);
    EXPECT_EQ(traced.counts(Traffic::kScales).operations, 1);
    EXPECT_GE(traced.counts(Traffic::kScales).bytes, 1);
    EXPECT_EQ(traced.counts(Traffic::kControl).operations, 0);
  });
}

TEST(Promises, GatheredBytesAreASingleProcessQuantisationOfTheWholeMasters) {
  for (const int size : kWorldSizes) {
    for (const GatherFormat format : {GatherFormat::kQuantized, GatherFormat::kBf16}) {
      for (const bool gemm : {false, true}) {
        SCOPED_TRACE("W " + std::to_string(size) + (gemm ? ", gemm" : ", compact") +
                     (format == GatherFormat::kBf16 ? ", bf16 gather" : ", quantized gather"));
        Scenario scenario;
        scenario.config.optimizer.bucket_elems = 20'000;
        scenario.config.precision.scale_layout = gemm ? ScaleLayout::kGemm : ScaleLayout::kCompact;
        scenario.config.parallel.gather_format = format;
        scenario.steps = 6;
        run_world(size, scenario, [&](const StepContext& now) {
          if (now.step == 0 || now.step == 5) test::expect_oracle_bytes(now.opt, now.side, gemm);
        });
      }
    }
  }
}

/// Many params of one format, or all families.
std::vector<ParamSpec> some_params(int count, std::optional<ParamFormat> format) {
  std::vector<ParamSpec> specs;
  for (int i = 0; i < count; ++i) {
    const ParamFormat formats[] = {ParamFormat::kMxfp8, ParamFormat::kBf16, ParamFormat::kFp32};
    specs.push_back(spec("p" + std::to_string(i), {32, 32}, format.value_or(formats[i % 3]),
                         i % 2 == 0 ? Storage::kBoth : Storage::kRow));
  }
  return specs;
}

TEST(Promises, OnePackedMaxPerStepAndNoHighPrecisionBytes) {
  for (const int size : {1, 3}) {
    for (const int count : {1, 100}) {
      for (const std::optional<ParamFormat> format :
           {std::optional<ParamFormat>(), std::optional(ParamFormat::kMxfp8),
            std::optional(ParamFormat::kBf16), std::optional(ParamFormat::kFp32)}) {
        Scenario scenario;
        scenario.specs = some_params(count, format);
        scenario.config.optimizer.groups.clear();
        scenario.config.optimizer.bucket_elems = 5000;
        run_ranks(size, [&](Communicator& comm) {
          TracedCommunicator traced(comm);
          DistributedAdam opt(scenario.specs, scenario.config, traced);
          test::set_all_initial(opt, scenario.specs);
          opt.publish();
          std::int64_t plane_bytes = 0, plain_bytes = 0;
          for (const Bucket& bucket : opt.layout().buckets()) {
            if (bucket.family.format == ParamFormat::kMxfp8) {
              plane_bytes += bucket.elems * (bucket.family.has_column() ? 2 : 1);
            } else {
              plain_bytes += bucket.elems * (bucket.family.format == ParamFormat::kBf16 ? 2 : 4);
            }
          }
          for (int step = 0; step < 3; ++step) {
            test::feed(opt, scenario, step, comm.rank(), size);
            traced.reset();
            const StepReport report = opt.step();
            EXPECT_EQ(traced.counts(Traffic::kScales).operations, 1);
            EXPECT_EQ(traced.counts(Traffic::kScales, "all_reduce").operations, 1);
            EXPECT_GE(traced.counts(Traffic::kScales).bytes, 1);
            EXPECT_EQ(traced.counts(Traffic::kStatistics).operations, 1);
            EXPECT_EQ(traced.counts(Traffic::kHighPrecision).operations, 0);
            EXPECT_EQ(traced.counts(Traffic::kHighPrecision).bytes, 0);
            EXPECT_EQ(traced.counts(Traffic::kControl).operations, 0);
            EXPECT_EQ(traced.counts(Traffic::kPlanes).bytes, plane_bytes);
            EXPECT_EQ(traced.counts(Traffic::kPlain).bytes, plain_bytes);
          }
        });
      }
    }
  }
}

TEST(Promises, TheBf16GatherIsCountedAsHighPrecision) {
  SelfCommunicator self;
  TracedCommunicator traced(self);
  Scenario scenario;
  scenario.config.parallel.gather_format = GatherFormat::kBf16;
  DistributedAdam opt(scenario.specs, scenario.config, traced);
  test::set_all_initial(opt, scenario.specs);
  opt.publish();
  traced.reset();
  opt.step();
  EXPECT_GT(traced.counts(Traffic::kHighPrecision).bytes, 0);
  EXPECT_EQ(traced.counts(Traffic::kPlanes).operations, 0);
  EXPECT_EQ(traced.counts(Traffic::kScales).operations, 1);
}

/// Every pointer that the optimizer has given out.
std::vector<const void*> all_pointers(DistributedAdam& opt) {
  std::vector<const void*> pointers = {opt.loss_scale().data()};
  for (const ParamLayout& param : opt.layout().params()) {
    const ParamView view = opt.param(param.name);
    pointers.insert(pointers.end(), {view.planes.row_data, view.planes.row_scales, view.planes.column_data,
                                     view.planes.column_scales, view.values.data});
    if (!param.family.frozen) pointers.push_back(opt.grad(param.name).data.data);
    const OwnedSlice slice = opt.owned(param.name);
    pointers.insert(pointers.end(), {slice.master.data(), slice.exp_avg.data(), slice.exp_avg_sq.data()});
  }
  return pointers;
}

TEST(Promises, PointersNeverMove) {
  for (const auto& [name, scenario] : invariance_scenarios()) {
    SCOPED_TRACE(name);
    std::vector<std::vector<const void*>> first(3);
    run_world(3, scenario, [&](const StepContext& now) {
      std::vector<const void*>& before = first[static_cast<std::size_t>(now.side.rank())];
      if (before.empty()) before = all_pointers(now.opt);
      EXPECT_EQ(all_pointers(now.opt), before) << "step " << now.step;
    });
  }
}

/// One bad value on one rank after another, each in another param; nothing but the counters may change.
void expect_common_skips(Communicator& comm, DType grad_dtype, GatherFormat format) {
  const float bad_values[] = {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(),
                              -std::numeric_limits<float>::infinity()};
  const char* const names[] = {"mlp.odd", "head.weight", "norm.1"};
  const char* const reported[] = {"mlp.odd", "embed.weight", "norm.1"};
  Scenario scenario;
  scenario.config.optimizer.grad_dtype = grad_dtype;
  scenario.config.parallel.gather_format = format;
  scenario.with_skips = false;
  const auto side = comm.split(0, comm.rank());
  DistributedAdam opt(scenario.specs, scenario.config, comm);
  test::set_all_initial(opt, scenario.specs);
  opt.publish();
  test::feed(opt, scenario, 0, comm.rank(), comm.size());
  ASSERT_TRUE(opt.step()->taken);
  const Facts before = test::state_facts(opt, *side, "");
  for (int round = 0; round < std::max(3, comm.size()); ++round) {
    const int kind = round % 3;
    opt.begin_backward();
    if (comm.rank() == round % comm.size()) {
      const float bad[] = {bad_values[kind]};
      const TypedSpan grad = opt.grad(names[kind]).data;
      test::write_values(grad.sub(grad.elems / 2, 1), bad);
      opt.grad_ready(names[kind]);
    }
    const StepReport report = opt.step();
    EXPECT_FALSE(report->taken);
    EXPECT_EQ(report->skip_reason, SkipReason::kNonFiniteGradient);
    EXPECT_EQ(report->nonfinite_gradient_params, std::vector<std::string>({reported[kind]}));
    EXPECT_TRUE(std::isnan(report->grad_norm));
    EXPECT_EQ(report->step, 1);
    EXPECT_EQ(report->skipped_total, round + 1);
    EXPECT_TRUE(same_facts(before, test::state_facts(opt, *side, "")));
  }
  test::feed(opt, scenario, 1, comm.rank(), comm.size());
  EXPECT_TRUE(opt.step()->taken);
  EXPECT_FALSE(same_facts(before, test::state_facts(opt, *side, "")));
}

TEST(Promises, AllRanksTakeAStepOrAllSkipIt) {
  for (const int size : kWorldSizes) {
    for (const DType dtype : {DType::kFp32, DType::kBf16}) {
      for (const GatherFormat format : {GatherFormat::kQuantized, GatherFormat::kBf16}) {
        run_ranks(size, [&](Communicator& comm) { expect_common_skips(comm, dtype, format); });
      }
    }
  }
}

TEST(Promises, BytesOutsideTheOwnedRangeAreWrittenOnlyByTheGather) {
  for (const int size : kWorldSizes) {
    run_ranks(size, [&](Communicator& comm) {
      struct Whole {
        std::int64_t bytes = 0;
        int gathers = 0;
      };
      std::map<std::uint8_t*, Whole> wholes;
      bool checking = false;
      constexpr std::uint8_t kUnwritten = 0xEE;
      const auto outside = [&](std::uint8_t* data, std::int64_t bytes, const auto& visit) {
        const std::int64_t shard = bytes / comm.size();
        for (std::int64_t i = 0; i < bytes; ++i) {
          if (i / std::max<std::int64_t>(shard, 1) != comm.rank()) visit(data[i]);
        }
      };
      FaultyCommunicator observed(comm, {}, [&](const ObservedCall& call) {
        if (call.operation != "all_gather" || call.traffic == Traffic::kControl) return;
        Whole& whole = wholes[call.whole.byte_data()];
        whole.bytes = call.whole.bytes();
        ++whole.gathers;
        if (!checking) return;
        std::int64_t written = 0;
        outside(call.whole.byte_data(), whole.bytes,
                [&](std::uint8_t byte) { written += byte == kUnwritten ? 0 : 1; });
        EXPECT_EQ(written, 0) << "rank " << comm.rank() << " of " << comm.size();
      });
      Scenario scenario;
      scenario.with_skips = false;
      scenario.config.optimizer.bucket_elems = 10'000;
      const auto side = comm.split(0, comm.rank());
      DistributedAdam opt(scenario.specs, scenario.config, observed);
      test::set_all_initial(opt, scenario.specs);
      opt.publish();
      wholes.clear();
      opt.step();  // from now on `wholes` is what a step gathers
      for (int step = 0; step < 2; ++step) {
        test::feed(opt, scenario, step, comm.rank(), size);
        test::state_facts(opt, *side, "");  // joins every gather
        for (auto& [data, whole] : wholes) {
          whole.gathers = 0;
          outside(data, whole.bytes, [&](std::uint8_t& byte) { byte = kUnwritten; });
        }
        checking = true;
        opt.step();
        checking = false;
        int gathered = 0;
        for (const auto& [data, whole] : wholes) gathered += whole.gathers;
        EXPECT_GT(gathered, 0);
        test::state_facts(opt, *side, "");  // and now all ranks hold the same bytes
      }
    });
  }
}

/// Launches of one step.
int launches(int size, const std::vector<ParamSpec>& specs, const Config& config) {
  int result = 0;
  run_ranks(size, [&](Communicator& comm) {
    DistributedAdam opt(specs, config, comm);
    test::set_all_initial(opt, specs);
    opt.publish();
    const StepReport report = opt.step();
    EXPECT_TRUE(report->taken);
    if (comm.rank() == 0) result = report->launches;
  });
  return result;
}

TEST(Promises, LaunchesDoNotGrowWithTheNumberOfParams) {
  for (const int size : {1, 3}) {
    Config config;
    config.optimizer.bucket_elems = 10'000;
    const int few = launches(size, some_params(28, {}), config);
    EXPECT_GT(few, 0);
    EXPECT_EQ(launches(size, some_params(2800, {}), config), few) << "W " << size;
  }
}

}  // namespace
}  // namespace mxopt
