// Direct gather between GPUs over NCCL windows: a thread and a GPU for each of two ranks.
#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include "support/captured_scenario.h"
#include "support/faulty_communicator.h"
#include "support/optimizer_fixture.h"
#include "support/thrown_message.h"

#include "mxopt/collectives/nccl_communicator.h"

namespace mxopt {
namespace {

using test::Facts;
using test::same_facts;
using test::Scenario;
using test::spec;

constexpr int kRanks = 2;
// Of a param that a shard boundary cuts in the middle of a band.
constexpr std::int64_t kRows = 129 * 32;
constexpr std::int64_t kCols = 2080;

/// What one rank has.
struct Rank {
  Communicator& host;
  Communicator& nccl;
  Device device;
  int number() const { return host.rank(); }
};

class DirectGather : public ::testing::Test {
 protected:
  void SetUp() override {
    int gpus = 0;
    if (cudaGetDeviceCount(&gpus) != cudaSuccess || gpus < kRanks) {
      GTEST_SKIP() << "needs " << kRanks << " GPUs, there are " << gpus;
    }
  }

  static void on_ranks(const std::function<void(const Rank&)>& body, double timeout_s = 60) {
    test::run_ranks(
        kRanks,
        [&](Communicator& host) {
          const Device device{DeviceKind::kCuda, host.rank()};
          ASSERT_EQ(cudaSetDevice(device.index), cudaSuccess);
          const auto nccl = NcclCommunicator::create(host, device, timeout_s);
          body({host, *nccl, device});
        },
        120);
  }

  /// The facts of both ranks, each of them over what `wrap` makes of its communicator.
  static std::vector<Facts> run(
      const Scenario& scenario,
      const std::function<std::unique_ptr<Communicator>(Communicator&)>& wrap = {}) {
    std::vector<Facts> facts(kRanks);
    on_ranks([&](const Rank& rank) {
      const std::unique_ptr<Communicator> wrapped = wrap ? wrap(rank.nccl) : nullptr;
      facts[static_cast<std::size_t>(rank.number())] = test::run_scenario(
          rank.host, scenario, {}, rank.device, wrapped != nullptr ? wrapped.get() : &rank.nccl);
    });
    return facts;
  }

  static void expect_facts(const Facts& expected, const std::vector<Facts>& actual) {
    for (const Facts& of_rank : actual) EXPECT_TRUE(same_facts(expected, of_rank));
  }
};

/// Keeps a stream busy for some milliseconds.
__global__ void spin_kernel(long long cycles) {
  const long long begin = clock64();
  while (clock64() - begin < cycles) {
  }
}
void spin(StreamRef stream, long long cycles = 8'000'000) {
  spin_kernel<<<1, 1, 0, static_cast<cudaStream_t>(stream.native())>>>(cycles);
  ASSERT_EQ(cudaGetLastError(), cudaSuccess);
}

Facts on_one_host_rank(const Scenario& scenario) {
  SelfCommunicator self;
  return test::run_scenario(self, scenario);
}

TEST_F(DirectGather, TwentyStepsGiveTheFactsOfOneRankOnTheHost) {
  for (const test::NamedScenario& named : test::invariance_scenarios()) {
    if (named.scenario.config.parallel.gather_format == GatherFormat::kBf16) continue;
    const Facts expected = on_one_host_rank(named.scenario);
    for (const std::int64_t bucket_elems : {0, 3000}) {
      for (const GatherChoice gather :
           {GatherChoice::kDirect, GatherChoice::kCollective, GatherChoice::kAuto}) {
        SCOPED_TRACE(named.name);
        Scenario other = named.scenario;
        other.config.optimizer.bucket_elems = bucket_elems;
        other.config.parallel.gather = gather;
        expect_facts(expected, run(other));
      }
    }
  }
}

TEST_F(DirectGather, TwoHundredStepsOfRandomListsGiveEqualBits) {
  for (std::uint64_t seed = 0; seed < 5; ++seed) {
    SCOPED_TRACE(seed);
    Scenario scenario;
    scenario.specs = test::random_specs(seed);
    scenario.config.optimizer.groups.clear();
    scenario.config.optimizer.bucket_elems = seed % 2 == 0 ? 0 : 6000;
    scenario.config.optimizer.grad_dtype = seed % 2 == 0 ? DType::kFp32 : DType::kBf16;
    scenario.config.precision.scale_layout = seed % 3 == 0 ? ScaleLayout::kGemm : ScaleLayout::kCompact;
    scenario.with_changes = false;
    scenario.steps = 200;
    scenario.digest_after = {-1, 6, 50, 111, 199};
    const Facts expected = on_one_host_rank(scenario);
    for (const GatherChoice gather : {GatherChoice::kDirect, GatherChoice::kCollective}) {
      scenario.config.parallel.gather = gather;
      expect_facts(expected, run(scenario));
    }
  }
}

TEST_F(DirectGather, ThousandStepsWithALateRankGiveEqualBits) {
  Scenario scenario;
  scenario.config.parallel.gather = GatherChoice::kDirect;
  scenario.with_changes = false;
  scenario.steps = 1000;
  scenario.digest_after = {9, 99, 500, 999};
  const Facts expected = on_one_host_rank(scenario);
  expect_facts(expected, run(scenario, [](Communicator& nccl) {
                 auto calls = std::make_shared<std::int64_t>(0);
                 // Now and then late before a call: the first 500 steps rank 0, then rank 1.
                 return std::make_unique<test::FaultyCommunicator>(
                     nccl, std::vector<test::Fault>{}, [&nccl, calls](const test::ObservedCall&) {
                       const std::uint64_t bits = test::mix(11, 0, (*calls)++);
                       const bool is_mine = (*calls / 5000) % 2 == nccl.rank();
                       if (is_mine && bits % 16 == 0) {
                         std::this_thread::sleep_for(std::chrono::microseconds(bits / 16 % 10'000));
                       }
                     });
               }));
}

TEST_F(DirectGather, ReplaysOfACapturedStepGiveTheFactsOfOneRankOnTheHost) {
  Scenario scenario = test::for_replays({});
  const Facts expected = on_one_host_rank(scenario);
  scenario.config.parallel.gather = GatherChoice::kDirect;
  on_ranks([&](const Rank& rank) {
    const auto side = rank.host.split(0, rank.number());
    const Stream stream(rank.device);
    DistributedAdam opt(scenario.specs, scenario.config, rank.nccl, rank.device);
    EXPECT_TRUE(same_facts(expected, test::run_captured_scenario(opt, *side, scenario, rank.number(), kRanks,
                                                                 {rank.device, stream.ref()})));
  });
}

/// All bytes of the planes of param "a".
class Snapshot {
 public:
  Snapshot(const DistributedAdam& opt, Device device) : device_(device) {
    const MxView planes = opt.param("a").planes;
    const ParamLayout& param = opt.layout().param(0);
    pieces_ = {{planes.row_data, planes.elems()},
               {planes.row_scales, param.row_scales_bytes},
               {planes.column_data, planes.elems()},
               {planes.column_scales, param.column_scales_bytes}};
    std::int64_t bytes = 0;
    for (const auto& [data, size] : pieces_) bytes += size;
    copy_ = Buffer(bytes, device, default_allocator(device));
  }
  void take(StreamRef stream) {
    std::uint8_t* to = copy_.data();
    for (const auto& [data, size] : pieces_) {
      copy_bytes(to, data, size, device_, stream);
      to += size;
    }
  }
  std::vector<std::uint8_t> read(StreamRef stream) const {
    std::vector<std::uint8_t> bytes(static_cast<std::size_t>(copy_.bytes()));
    copy_bytes(bytes.data(), copy_.data(), copy_.bytes(), device_, stream);
    synchronize(device_, stream);
    return bytes;
  }

 private:
  Device device_;
  std::vector<std::pair<std::uint8_t*, std::int64_t>> pieces_;
  Buffer copy_;
};

/// Rank 1 reads the planes late in every step, and rank 0 hurries into the next one. What rank 1 has read
/// must be what it read when there was nothing to hurry.
///
/// read_late  enqueues, on rank 1, a late reading into the snapshot; may use the streams as a trainer would.
void expect_old_planes(
    const Rank& rank, bool is_publish,
    const std::function<void(DistributedAdam&, Snapshot&, StreamRef stepping, StreamRef side)>& read_late) {
  const std::vector<ParamSpec> specs{spec("a", {kRows, kCols}, ParamFormat::kMxfp8, Storage::kBoth)};
  Config config;
  config.parallel.gather = GatherChoice::kDirect;
  const Stream stepping(rank.device), side(rank.device);
  DistributedAdam opt(specs, config, rank.nccl, rank.device);
  ASSERT_GT(opt.construction().cut.cut_bands, 0);
  test::set_all_initial(opt, specs, 0, stepping.ref());
  opt.publish(stepping.ref());
  Snapshot early(opt, rank.device), late(opt, rank.device);
  for (int step = 0; step < 6; ++step) {
    opt.wait_param("a", Plane::kRow, stepping.ref());
    opt.wait_param("a", Plane::kColumn, stepping.ref());
    early.take(stepping.ref());
    const std::vector<std::uint8_t> expected = early.read(stepping.ref());
    if (is_publish) {
      const auto master = test::HostView(rank.device, stepping.ref(), opt.owned("a").master);
      for (float& value : master.span().as<float>()) value *= 0.5f;
      master.store();
    } else {
      test::HostView grad(rank.device, stepping.ref(), opt.grad("a").data);
      test::write_values(grad.span(), test::grad_values("a", kRows * kCols, step));
      grad.store();
    }
    rank.host.barrier();
    if (rank.number() == 1) read_late(opt, late, stepping.ref(), side.ref());
    if (is_publish) {
      opt.publish(stepping.ref());
    } else {
      ASSERT_TRUE(opt.step(stepping.ref())->taken);
    }
    if (rank.number() == 1) {
      synchronize(rank.device, side.ref());
      EXPECT_EQ(late.read(stepping.ref()), expected) << "step " << step;
    }
    opt.wait_param("a", Plane::kColumn, stepping.ref());
    early.take(stepping.ref());
    EXPECT_NE(early.read(stepping.ref()), expected) << "the weights did not change";
  }
}

void read_on_the_side(DistributedAdam& opt, Snapshot& late, StreamRef, StreamRef side) {
  opt.wait_param("a", Plane::kRow, side);
  opt.wait_param("a", Plane::kColumn, side);
  spin(side);
  late.take(side);
  opt.done_reading(side);
}

TEST_F(DirectGather, APeerWaitsForAReaderOnASideStream) {
  on_ranks([](const Rank& rank) { expect_old_planes(rank, false, read_on_the_side); });
}

TEST_F(DirectGather, APublishWaitsForAPeerThatEvaluates) {
  on_ranks([](const Rank& rank) { expect_old_planes(rank, true, read_on_the_side); });
}

// The gradient of the weights is ready before the column plane is read for the gradient of the inputs.
TEST_F(DirectGather, APeerWaitsForAColumnPlaneThatIsReadBehindGradReady) {
  on_ranks([](const Rank& rank) {
    expect_old_planes(rank, false, [](DistributedAdam& opt, Snapshot& late, StreamRef stepping, StreamRef) {
      opt.grad_ready("a", stepping);
      spin(stepping);
      late.take(stepping);
    });
  });
}

TEST_F(DirectGather, ASkippedStepStoresNothingAnywhere) {
  on_ranks([](const Rank& rank) {
    const std::vector<ParamSpec> specs{spec("a", {kRows, kCols}, ParamFormat::kMxfp8, Storage::kBoth)};
    Config config;
    config.parallel.gather = GatherChoice::kDirect;
    const Stream stream(rank.device);
    DistributedAdam opt(specs, config, rank.nccl, rank.device);
    ASSERT_GT(opt.construction().cut.cut_bands, 0);
    test::set_all_initial(opt, specs, 0, stream.ref());
    opt.publish(stream.ref());
    // All is poisoned, with other bytes on each rank: what a skipped step stores would show.
    const MxView planes = opt.param("a").planes;
    const ParamLayout& param = opt.layout().param(0);
    for (const auto& [data, bytes] : {std::pair{planes.row_data, planes.elems()},
                                      {planes.column_data, planes.elems()},
                                      {planes.row_scales, param.row_scales_bytes},
                                      {planes.column_scales, param.column_scales_bytes}}) {
      ASSERT_EQ(cudaMemsetAsync(data, 0xE0 + rank.number(), static_cast<std::size_t>(bytes),
                                static_cast<cudaStream_t>(stream.ref().native())),
                cudaSuccess);
    }
    Snapshot before(opt, rank.device), after(opt, rank.device);
    before.take(stream.ref());
    const float bad[] = {std::numeric_limits<float>::quiet_NaN()};
    if (rank.number() == 1) copy_bytes(opt.grad("a").data.data, bad, 4, rank.device, stream.ref());
    synchronize(rank.device, stream.ref());
    rank.host.barrier();
    EXPECT_FALSE(opt.step(stream.ref())->taken);
    opt.wait_param("a", Plane::kColumn, stream.ref());
    rank.host.barrier();
    after.take(stream.ref());
    EXPECT_EQ(before.read(stream.ref()), after.read(stream.ref()));
  });
}

TEST_F(DirectGather, AutoSaysWhatItMeasured) {
  on_ranks([](const Rank& rank) {
    const DistributedAdam opt(test::mixed_specs(), Config(), rank.nccl, rank.device);
    const std::string& text = opt.construction().gather;
    EXPECT_NE(text.find("(an update takes "), std::string::npos) << text;
    EXPECT_NE(text.find("storing to 1 peer takes "), std::string::npos) << text;
  });
}

TEST_F(DirectGather, MemoryOfACallersAllocatorIsGatheredCollectivelyOnAllRanks) {
  on_ranks([](const Rank& rank) {
    // Rank 1 alone brings its own memory.
    const auto allocator = rank.number() == 1 ? default_allocator(rank.device) : nullptr;
    Config config;
    {
      const DistributedAdam opt(test::mixed_specs(), config, rank.nccl, rank.device, allocator);
      EXPECT_EQ(opt.construction().gather,
                "collective (rank 1: the allocator's memory is not that of ncclMemAlloc())");
    }
    config.parallel.gather = GatherChoice::kDirect;
    EXPECT_NE(test::thrown_message<ConfigError>([&] {
                DistributedAdam(test::mixed_specs(), config, rank.nccl, rank.device, allocator);
              }).find("rank 1: the allocator's memory"),
              std::string::npos);
    // A caller's allocator that gives such memory is as good as ours.
    const DistributedAdam direct(test::mixed_specs(), config, rank.nccl, rank.device,
                                 rank.nccl.window_allocator());
    EXPECT_EQ(direct.construction().gather, "direct (as configured)");
  });
}

TEST_F(DirectGather, WindowsComeAndGoWithTheirOptimizers) {
  on_ranks([](const Rank& rank) {
    Scenario scenario;
    scenario.config.parallel.gather = GatherChoice::kDirect;
    scenario.steps = 2;
    scenario.digest_after = {1};
    std::vector<Facts> facts;
    for (int i = 0; i < 10; ++i) {
      facts.push_back(test::run_scenario(rank.host, scenario, {}, rank.device, &rank.nccl));
      EXPECT_TRUE(same_facts(facts.front(), facts.back()));
    }
    // Two at the same time, each with a window of its own.
    DistributedAdam first(scenario.specs, scenario.config, rank.nccl, rank.device);
    facts.push_back(test::run_scenario(rank.host, scenario, {}, rank.device, &rank.nccl));
    EXPECT_TRUE(same_facts(facts.front(), facts.back()));
  });
}

TEST_F(DirectGather, ARankThatStopsComingIsAnErrorAtTheDeadline) {
  on_ranks(
      [](const Rank& rank) {
        Scenario scenario;
        scenario.config.parallel.gather = GatherChoice::kDirect;
        {
          const Stream stream(rank.device);
          DistributedAdam opt(scenario.specs, scenario.config, rank.nccl, rank.device);
          test::set_all_initial(opt, scenario.specs, rank.number(), stream.ref());
          opt.publish(stream.ref());
          test::feed(opt, scenario, 0, rank.number(), kRanks, {rank.device, stream.ref()});
          EXPECT_TRUE(opt.step(stream.ref())->taken);
          if (rank.number() == 0) {
            const auto begin = std::chrono::steady_clock::now();
            EXPECT_THROW(opt.step(stream.ref())->taken, PeerError);
            EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(20));
          }
        }
        rank.host.barrier();
      },
      8);
}

}  // namespace
}  // namespace mxopt
