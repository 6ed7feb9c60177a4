#include "train_gpt/phase_timer.h"

#include <chrono>
#include <thread>

#include <gtest/gtest.h>

namespace train_gpt {
namespace {

TEST(PhaseTimer, SumsThePhasesOfTheHostAndStartsAgain) {
  const auto pause = [] { std::this_thread::sleep_for(std::chrono::milliseconds(5)); };
  PhaseTimer timer(mxopt::Device{});
  const auto begin = std::chrono::steady_clock::now();
  for (int i = 0; i < 2; ++i) {
    timer.begin(Phase::kForward);
    pause();
    timer.begin(Phase::kBackward);
    pause();
    timer.end();
    pause();
  }
  const PhaseTimer::Times times = timer.take();
  const std::chrono::duration<double, std::milli> all = std::chrono::steady_clock::now() - begin;
  EXPECT_GE(times.forward_ms, 10);
  EXPECT_GE(times.backward_ms, 10);
  EXPECT_EQ(times.optimizer_ms, 0);
  // The pauses between are in no phase.
  EXPECT_LE(times.forward_ms + times.backward_ms, all.count() - 10);

  timer.begin(Phase::kOptimizer);
  pause();
  const PhaseTimer::Times next = timer.take();
  EXPECT_EQ(next.forward_ms, 0);
  EXPECT_GE(next.optimizer_ms, 5);
}

}  // namespace
}  // namespace train_gpt
