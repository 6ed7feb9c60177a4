// The optimizer on a CUDA device against the one on the host: the same facts, bit for bit.
//
// Several ranks share one device here; their bytes go through host memory. What NCCL carries is tested with
// it.
#include <gtest/gtest.h>

#include "support/devices.h"
#include "support/optimizer_fixture.h"

namespace mxopt {
namespace {

using test::run_world;
using test::same_facts;
using test::Scenario;
using test::spec;

constexpr Device kCuda{DeviceKind::kCuda, 0};

class CudaTwin : public ::testing::Test {
 protected:
  void SetUp() override { MXOPT_SKIP_WITHOUT(kCuda); }
};

TEST_F(CudaTwin, TwentyStepsGiveTheFactsOfTheHostForEveryWorldSize) {
  for (const test::NamedScenario& named : test::invariance_scenarios()) {
    const test::Facts expected = run_world(1, named.scenario);
    for (const int size : {1, 2, 3, 7}) {
      SCOPED_TRACE(std::string(named.name) + ", W " + std::to_string(size));
      EXPECT_TRUE(same_facts(expected, run_world(size, named.scenario, {}, kCuda)));
    }
  }
}

TEST_F(CudaTwin, DirectStoresBetweenRanksGiveTheFactsOfTheHost) {
  for (const test::NamedScenario& named : test::invariance_scenarios()) {
    if (named.scenario.config.parallel.gather_format == GatherFormat::kBf16) continue;
    const test::Facts expected = run_world(1, named.scenario);
    Scenario direct = named.scenario;
    direct.config.parallel.gather = GatherChoice::kDirect;
    for (const int size : {1, 2, 3, 7}) {
      for (const std::int64_t bucket_elems : {0, 3000}) {
        SCOPED_TRACE(std::string(named.name) + ", W " + std::to_string(size));
        direct.config.optimizer.bucket_elems = bucket_elems;
        EXPECT_TRUE(same_facts(expected, run_world(size, direct, {}, kCuda)));
      }
    }
  }
}

TEST_F(CudaTwin, SmallBucketsAndNanInPaddingChangeNothing) {
  Scenario scenario;
  const test::Facts expected = run_world(1, scenario);
  scenario.config.optimizer.bucket_elems = 3000;
  scenario.nan_padding = true;
  for (const int size : {1, 2, 4}) {
    EXPECT_TRUE(same_facts(expected, run_world(size, scenario, {}, kCuda))) << "W " << size;
  }
}

TEST_F(CudaTwin, ExchangedAndCheckedGradientsGiveTheFactsOfTheHost) {
  for (test::NamedScenario named : test::invariance_scenarios()) {
    const test::Facts expected = run_world(1, named.scenario);
    named.scenario.config.optimizer.check_grads = true;
    named.scenario.config.parallel.grad_reduction = GradReduction::kExchange;
    for (const int size : {1, 2, 3, 7}) {
      SCOPED_TRACE(std::string(named.name) + ", W " + std::to_string(size));
      EXPECT_TRUE(same_facts(expected, run_world(size, named.scenario, {}, kCuda)));
    }
  }
}

/// A few steps of one list of params, on the host with one rank against the device with several.
void expect_twin(std::vector<ParamSpec> specs, std::initializer_list<int> sizes, DType grad_dtype) {
  Scenario scenario;
  scenario.specs = std::move(specs);
  scenario.config = Config();
  scenario.config.optimizer.grad_dtype = grad_dtype;
  scenario.steps = 2;
  scenario.with_changes = false;
  scenario.digest_after = {-1, 1};
  scenario.threads = 8;
  const test::Facts expected = run_world(1, scenario);
  for (const int size : sizes) {
    EXPECT_TRUE(same_facts(expected, run_world(size, scenario, {}, kCuda))) << "W " << size;
  }
}

TEST_F(CudaTwin, VeryTallAndVeryWideParams) {
  expect_twin({spec("tall", {131'072, 32}, ParamFormat::kMxfp8, Storage::kBoth),
               spec("wide", {32, 131'072}, ParamFormat::kMxfp8, Storage::kBoth),
               spec("wide.row", {64, 65'568}, ParamFormat::kMxfp8, Storage::kRow)},
              {1, 3}, DType::kFp32);
}

TEST_F(CudaTwin, ManyTinyParams) {
  std::vector<ParamSpec> specs;
  for (int i = 0; i < 21'000; ++i) {
    const std::string name = "p" + std::to_string(i);
    switch (i % 4) {
      case 0:
        specs.push_back(spec(name, {1 + i % 9}, ParamFormat::kBf16));
        break;
      case 1:
        specs.push_back(spec(name, {1 + i % 7}, ParamFormat::kFp32));
        break;
      case 2:
        specs.push_back(spec(name, {32, 32}, ParamFormat::kMxfp8, Storage::kRow));
        break;
      default:
        specs.push_back(spec(name, {32, 32}, ParamFormat::kMxfp8, Storage::kBoth));
    }
  }
  expect_twin(std::move(specs), {1, 2}, DType::kBf16);
}

// More tiles than the warps of a device: a warp has several of one param, or of several ones.
TEST_F(CudaTwin, StatisticsOfManyTilesAreThoseOfTheHost) {
  for (const DType grad_dtype : {DType::kFp32, DType::kBf16}) {
    Scenario scenario;
    scenario.specs = {spec("a", {11'000'003}), spec("b", {64}), spec("c.x", {9'000'000}),
                      spec("c.y", {100'000}), spec("d", {24'000'001})};
    for (int i = 0; i < 3000; ++i) scenario.specs.push_back(spec("e" + std::to_string(i), {1 + i % 200}));
    scenario.config = Config();
    OptimizerConfig& optimizer = scenario.config.optimizer;
    optimizer.grad_dtype = grad_dtype;
    optimizer.groups.resize(2);
    optimizer.groups[0].match = "c.*";
    optimizer.groups[0].norm_group = "first";
    optimizer.groups[1].match = "e*7";
    optimizer.groups[1].norm_group = "second";
    scenario.steps = 1;
    scenario.with_changes = false;
    scenario.digest_after = {0};
    scenario.threads = 8;
    for (const bool with_details : {false, true}) {
      optimizer.param_norms = optimizer.count_zeros = with_details;
      EXPECT_TRUE(same_facts(run_world(1, scenario), run_world(1, scenario, {}, kCuda)));
    }
  }
}

// Kernels of a step may begin while the one in front of them still runs.
TEST_F(CudaTwin, StepsBackToBackWithoutAWaitGiveTheStateOfTheHost) {
  Scenario scenario;
  scenario.config.schedule.decay_steps = 300;
  const auto run = [&](Device device) {
    const Stream stream(device);
    const test::Place place{device, stream.ref()};
    SelfCommunicator comm(device), side;
    DistributedAdam opt(scenario.specs, scenario.config, comm, device);
    test::set_all_initial(opt, scenario.specs, 0, place.stream);
    opt.publish(place.stream);
    test::feed(opt, scenario, 0, 0, 1, place);
    // Without a new gradient: the moments go on moving the masters.
    for (int step = 0; step < 200; ++step) opt.step(place.stream);
    test::Facts facts = test::state_facts(opt, side, "", place);
    test::add_record_facts(facts, *opt.last_report(place.stream), "");
    return facts;
  };
  const test::Facts expected = run(Device());
  for (int i = 0; i < 5; ++i) EXPECT_TRUE(same_facts(expected, run(kCuda)));
}

}  // namespace
}  // namespace mxopt
