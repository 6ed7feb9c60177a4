// A step in a CUDA graph.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include "support/captured_scenario.h"
#include "support/devices.h"
#include "support/optimizer_fixture.h"
#include "support/thrown_message.h"

namespace mxopt {
namespace {

constexpr Device kCuda{DeviceKind::kCuda, 0};

TEST(CapturedStep, ReplaysGiveTheFactsOfTheHost) {
  MXOPT_SKIP_WITHOUT(kCuda);
  for (const Config& config : {test::mixed_config(), test::norms_config()}) {
    test::Scenario scenario = test::for_replays({});
    scenario.config = config;
    scenario.config.schedule.kind = ScheduleKind::kLinear;
    scenario.config.schedule.decay_steps = 12;
    std::int64_t taken = 0;
    const test::Facts expected =
        test::run_world(1, scenario, [&](const test::StepContext& now) { taken = now.record.step; });
    const Stream stream(kCuda);
    SelfCommunicator comm(kCuda), side;
    DistributedAdam opt(scenario.specs, scenario.config, comm, kCuda);
    EXPECT_TRUE(test::same_facts(
        expected, test::run_captured_scenario(opt, side, scenario, 0, 1, {kCuda, stream.ref()})));
    EXPECT_EQ(opt.steps_taken(), taken);
    EXPECT_EQ(taken == 17, config.optimizer.skip_norm == 0);
  }
}

TEST(CapturedStep, WhatIsNotSentYetIsRefused) {
  MXOPT_SKIP_WITHOUT(kCuda);
  const Stream stream(kCuda);
  const auto native = static_cast<cudaStream_t>(stream.ref().native());
  SelfCommunicator comm(kCuda);
  const std::vector<ParamSpec> specs{test::spec("a", {64, 64})};
  DistributedAdam opt(specs, Config(), comm, kCuda);
  test::set_all_initial(opt, specs, 0, stream.ref());
  opt.publish(stream.ref());
  opt.step(stream.ref());
  opt.set_lr("*", 1e-3);
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  ASSERT_EQ(cudaStreamBeginCapture(native, cudaStreamCaptureModeThreadLocal), cudaSuccess);
  EXPECT_TRUE(test::contains(test::thrown_message<ContractError>([&] { opt.step(stream.ref()); }),
                             "changed hyper-parameters were not sent to the device yet"));
  cudaGraph_t captured = nullptr;
  ASSERT_EQ(cudaStreamEndCapture(native, &captured), cudaSuccess);
  EXPECT_EQ(cudaGraphDestroy(captured), cudaSuccess);
  EXPECT_TRUE(opt.step(stream.ref())->taken);
}

}  // namespace
}  // namespace mxopt
