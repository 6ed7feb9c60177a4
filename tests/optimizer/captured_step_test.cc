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
    scenario.config.optimizer.check_grads = true;
    const Stream stream(kCuda);
    SelfCommunicator comm(kCuda), side;
    DistributedAdam opt(scenario.specs, scenario.config, comm, kCuda);
    EXPECT_TRUE(test::same_facts(
        expected, test::run_captured_scenario(opt, side, scenario, 0, 1, {kCuda, stream.ref()})));
    EXPECT_EQ(opt.steps_taken(), taken);
    EXPECT_EQ(taken == 17, config.optimizer.skip_norm == 0);
  }
}

TEST(CapturedStep, ReplaysDivideByTheTokensThatAreCountedWhenTheyRun) {
  MXOPT_SKIP_WITHOUT(kCuda);
  const Stream stream(kCuda);
  const auto native = static_cast<cudaStream_t>(stream.ref().native());
  SelfCommunicator comm(kCuda);
  const std::vector<ParamSpec> specs{test::spec("a", {64, 64})};
  Config config;
  config.optimizer.grad_reduce = GradReduce::kTokens;
  DistributedAdam opt(specs, config, comm, kCuda);
  test::set_all_initial(opt, specs, 0, stream.ref());
  opt.publish(stream.ref());
  const Buffer memory(8, kCuda, default_allocator(kCuda));
  const std::span<const std::int64_t> counter = memory.as<std::int64_t>();
  const auto count = [&](std::int64_t tokens) {
    copy_bytes(memory.data(), &tokens, 8, kCuda, stream.ref());
    synchronize(kCuda, stream.ref());
  };
  count(5);
  opt.add_tokens(counter, stream.ref());
  EXPECT_EQ(opt.step(stream.ref())->tokens, 5);
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  ASSERT_EQ(cudaStreamBeginCapture(native, cudaStreamCaptureModeThreadLocal), cudaSuccess);
  opt.add_tokens(counter, stream.ref());
  opt.step(stream.ref());
  cudaGraph_t captured = nullptr;
  ASSERT_EQ(cudaStreamEndCapture(native, &captured), cudaSuccess);
  cudaGraphExec_t graph = nullptr;
  ASSERT_EQ(cudaGraphInstantiate(&graph, captured, 0), cudaSuccess);
  EXPECT_EQ(cudaGraphDestroy(captured), cudaSuccess);
  for (const std::int64_t tokens : {std::int64_t{7}, std::int64_t{1} << 40, std::int64_t{0}}) {
    count(tokens);
    EXPECT_EQ(cudaGraphLaunch(graph, native), cudaSuccess);
    EXPECT_EQ(opt.last_report(stream.ref())->tokens, tokens);
  }
  EXPECT_EQ(cudaGraphExecDestroy(graph), cudaSuccess);
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
