// A step in a CUDA graph.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include "support/devices.h"
#include "support/optimizer_fixture.h"
#include "support/thrown_message.h"

namespace mxopt {
namespace {

using test::run_world;
using test::same_facts;
using test::Scenario;

constexpr Device kCuda{DeviceKind::kCuda, 0};

TEST(CapturedStep, ReplaysGiveTheFactsOfTheHost) {
  MXOPT_SKIP_WITHOUT(kCuda);
  Scenario scenario;
  scenario.with_changes = false;
  // A graph has no calls of grad_ready in it, so a buffer to be overwritten would count as without a
  // gradient.
  for (ParamSpec& spec : scenario.specs) spec.grad_mode = GradMode::kAccumulate;
  scenario.config.schedule.kind = ScheduleKind::kLinear;
  scenario.config.schedule.decay_steps = 12;
  const test::Facts expected = run_world(1, scenario);

  const Stream stream(kCuda);
  const test::Place place{kCuda, stream.ref()};
  const auto native = static_cast<cudaStream_t>(stream.ref().native());
  SelfCommunicator comm(kCuda), side;
  DistributedAdam opt(scenario.specs, scenario.config, comm, kCuda);
  test::set_all_initial(opt, scenario.specs, 0, place.stream);
  opt.publish(place.stream);
  test::Facts facts = test::state_facts(opt, side, "after step -1: ", place), records;
  cudaGraphExec_t graph = nullptr;
  for (int step = 0; step < scenario.steps; ++step) {
    if (step == 1) {
      ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
      cudaGraph_t captured = nullptr;
      ASSERT_EQ(cudaStreamBeginCapture(native, cudaStreamCaptureModeThreadLocal), cudaSuccess);
      const StepReport report = opt.step(place.stream);
      ASSERT_EQ(cudaStreamEndCapture(native, &captured), cudaSuccess);
      EXPECT_EQ(test::thrown_message<ContractError>([&] { *report; }),
                "a captured step has no report of its own; after a replay, read last_report()");
      ASSERT_EQ(cudaGraphInstantiate(&graph, captured, 0), cudaSuccess);
      ASSERT_EQ(cudaGraphDestroy(captured), cudaSuccess);
    }
    test::feed(opt, scenario, step, 0, 1, place, false);
    if (graph == nullptr) {
      opt.step(place.stream);
    } else {
      ASSERT_EQ(cudaGraphLaunch(graph, native), cudaSuccess);
    }
    test::add_record_facts(records, *opt.last_report(place.stream), "step " + std::to_string(step) + ": ");
    if (std::ranges::find(scenario.digest_after, step) != scenario.digest_after.end()) {
      std::ranges::move(test::state_facts(opt, side, "after step " + std::to_string(step) + ": ", place),
                        std::back_inserter(facts));
    }
  }
  EXPECT_EQ(cudaGraphExecDestroy(graph), cudaSuccess);
  EXPECT_EQ(opt.steps_taken(), 17);
  std::ranges::move(records, std::back_inserter(facts));
  EXPECT_TRUE(same_facts(expected, facts));
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
