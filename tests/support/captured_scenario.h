// A scenario whose steps from the second on are replays of one captured step.
#pragma once

#include <algorithm>
#include <iterator>
#include <string>

#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include "support/optimizer_fixture.h"
#include "support/thrown_message.h"

namespace mxopt::test {

/// The scenario without what a graph can not hold: changes between steps and, as there are no calls of
/// grad_ready in it, buffers to be overwritten, which would count as without a gradient.
inline Scenario for_replays(Scenario scenario) {
  scenario.with_changes = false;
  for (ParamSpec& spec : scenario.specs) spec.grad_mode = GradMode::kAccumulate;
  return scenario;
}

/// The facts of run_scenario(). `side`: for messages of the test.
inline Facts run_captured_scenario(DistributedAdam& opt, Communicator& side, const Scenario& scenario,
                                   int rank, int size, Place place) {
  const auto native = static_cast<cudaStream_t>(place.stream.native());
  set_all_initial(opt, scenario.specs, rank, place.stream);
  opt.publish(place.stream);
  Facts facts = state_facts(opt, side, "after step -1: ", place), records;
  cudaGraphExec_t graph = nullptr;
  for (int step = 0; step < scenario.steps; ++step) {
    if (step == 1) {
      EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
      cudaGraph_t captured = nullptr;
      EXPECT_EQ(cudaStreamBeginCapture(native, cudaStreamCaptureModeThreadLocal), cudaSuccess);
      const StepReport report = opt.step(place.stream);
      EXPECT_EQ(cudaStreamEndCapture(native, &captured), cudaSuccess);
      EXPECT_EQ(thrown_message<ContractError>([&] { *report; }),
                "a captured step has no report of its own; after a replay, read last_report()");
      EXPECT_EQ(cudaGraphInstantiate(&graph, captured, 0), cudaSuccess);
      EXPECT_EQ(cudaGraphDestroy(captured), cudaSuccess);
    }
    feed(opt, scenario, step, rank, size, place, false);
    if (graph == nullptr) {
      opt.step(place.stream);
    } else {
      EXPECT_EQ(cudaGraphLaunch(graph, native), cudaSuccess);
    }
    add_record_facts(records, *opt.last_report(place.stream), "step " + std::to_string(step) + ": ");
    if (std::ranges::find(scenario.digest_after, step) != scenario.digest_after.end()) {
      std::ranges::move(state_facts(opt, side, "after step " + std::to_string(step) + ": ", place),
                        std::back_inserter(facts));
    }
  }
  EXPECT_EQ(cudaGraphExecDestroy(graph), cudaSuccess);
  std::ranges::move(records, std::back_inserter(facts));
  return facts;
}

}  // namespace mxopt::test
