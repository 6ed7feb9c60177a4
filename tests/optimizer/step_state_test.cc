#include "mxopt/optimizer/step_state.h"

#include <cmath>

#include <gtest/gtest.h>

namespace mxopt {
namespace {

constexpr float kWeightDecay[] = {0.1f, 0.0f};
constexpr float kLr[] = {1e-3f, 2e-3f, 3e-3f, 5e-3f, 6e-3f, 7e-3f};  // 2 groups x steps 4, 5, 6

/// One step of two ranks that agree, with two groups; the sum of squares is 4.
struct Step {
  Step() {
    statistics.square_sum[9] = 4LL << 10;  // bit 298
    options.betas[0] = 0.9;
    options.betas[1] = 0.95;
    options.eps = 1e-8;
    options.max_norm = 1;
    options.hash = -77;
    options.world_size = 2;
    options.groups = 2;
    statistics.options_hash = 2 * options.hash;
    table = {kWeightDecay, kLr, 4, 3};
    state.taken = 4;
    state.calls = 6;
    statistics.steps_taken = 8;
  }

  void run() { advance(statistics, options, table, state, scalars, outcome); }

  StepStatistics statistics;
  StepOptions options;
  GroupTable table;
  StepState state;
  AdamScalars scalars[2];
  StepOutcome outcome;
};

TEST(StepState, ATakenStepSetsTheScalarsOfEveryGroup) {
  Step step;
  step.run();
  EXPECT_TRUE(step.outcome.taken);
  EXPECT_EQ(step.outcome.grad_norm, 2);
  EXPECT_EQ(step.state.taken, 5);
  EXPECT_EQ(step.outcome.after.taken, 5);
  EXPECT_EQ(step.state.calls, 7);
  for (const AdamScalars& s : step.scalars) {
    EXPECT_EQ(s.bc1, static_cast<float>(1 - 0.9 * (0.9 * 0.9) * (0.9 * 0.9)));
    EXPECT_EQ(s.omb2, static_cast<float>(1 - 0.95));
    EXPECT_EQ(s.grad_factor, static_cast<float>(1 / (2 + 1e-6)));
    EXPECT_TRUE(s.decoupled);
  }
  EXPECT_EQ(step.scalars[0].lr, 2e-3f);
  EXPECT_EQ(step.scalars[1].lr, 6e-3f);
  EXPECT_EQ(step.scalars[0].weight_decay, 0.1f);
  EXPECT_EQ(step.scalars[1].weight_decay, 0.0f);
}

TEST(StepState, StepsBehindTheTableHaveTheLastRate) {
  Step step;
  step.state.taken = 5;
  step.statistics.steps_taken = 10;
  for (int i = 0; i < 3; ++i) {
    StepStatistics statistics = step.statistics;
    statistics.steps_taken = 2 * step.state.taken;
    advance(statistics, step.options, step.table, step.state, step.scalars, step.outcome);
    EXPECT_EQ(step.scalars[0].lr, 3e-3f);
    EXPECT_EQ(step.scalars[1].lr, 7e-3f);
  }
  EXPECT_EQ(step.state.taken, 8);
}

TEST(StepState, ASkippedStepCountsButLeavesTheScalars) {
  Step step;
  step.statistics.nonfinite_runs = 1;
  step.scalars[0].lr = 123;
  step.options.loss_scale_kind = LossScaleKind::kDynamic;
  step.state.loss_scale = {1024, 1, 9};
  step.run();
  EXPECT_FALSE(step.outcome.taken);
  EXPECT_FALSE(step.outcome.options_differ);
  EXPECT_TRUE(std::isnan(step.outcome.grad_norm));
  EXPECT_EQ(step.state.taken, 4);
  EXPECT_EQ(step.state.calls, 7);
  EXPECT_EQ(step.state.consecutive_skips, 1);
  EXPECT_EQ(step.state.skipped_total, 1);
  EXPECT_EQ(step.scalars[0].lr, 123);
  EXPECT_EQ(step.outcome.loss_scale, 1024);
  EXPECT_EQ(step.state.loss_factor, 512);
}

TEST(StepState, RanksThatWereToldDifferentThingsChangeNothing) {
  for (const bool is_hash : {true, false}) {
    Step step;
    (is_hash ? step.statistics.options_hash : step.statistics.steps_taken) += 1;
    step.run();
    EXPECT_TRUE(step.outcome.options_differ);
    EXPECT_FALSE(step.outcome.taken);
    EXPECT_EQ(step.state.taken, 4);
    EXPECT_EQ(step.state.calls, 6);
    EXPECT_EQ(step.scalars[0].beta1, 0);
  }
}

}  // namespace
}  // namespace mxopt
