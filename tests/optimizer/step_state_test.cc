#include "mxopt/optimizer/step_state.h"

#include <cmath>
#include <initializer_list>

#include <gtest/gtest.h>

namespace mxopt {
namespace {

constexpr GroupConstants kConstants[] = {{{0.9, 0.95}, 1e-8}, {{0.75, 0.5}, 1e-6}};
constexpr float kWeightDecay[] = {0.1f, 0.2f, 0.3f, 0.5f, 0.0f, 0.7f};  // as kLr
constexpr float kLr[] = {1e-3f, 2e-3f, 3e-3f, 5e-3f, 6e-3f, 7e-3f};     // 2 groups x steps 4, 5, 6

/// One step of two ranks that agree, with two groups; the sum of squares is 4.
struct Step {
  Step() {
    statistics.square_sum[9] = 4LL << 10;  // bit 298
    options.max_norm = 1;
    options.hash = -77;
    options.world_size = 2;
    options.groups = 2;
    table = {kConstants, kWeightDecay, kLr, 4, 3};
    state.taken = 4;
    state.calls = 6;
    sign({4, 4});
  }

  /// The sum over ranks that have taken these numbers of steps.
  void sign(std::initializer_list<std::int64_t> taken) {
    std::uint64_t sum = 0;
    for (const std::int64_t steps : taken) {
      sum += static_cast<std::uint64_t>(agreement_hash(options.hash, steps));
    }
    options.world_size = static_cast<int>(taken.size());
    statistics.options_hash = static_cast<std::int64_t>(sum);
  }

  StepMemory memory() {
    return {statistics, of_ranks, tokens_of_ranks, {norm_sums, norm_limits, norms, separate_norms},
            &state,     &outcome, scalars,         &tokens,
            table};
  }
  void run() {
    const StepPart part = {memory(), options};
    advance(&part, 1);
  }

  StepStatistics statistics;
  StepOptions options;
  GroupTable table;
  StepState state;
  AdamScalars scalars[2];
  StepOutcome outcome;
  std::int64_t of_ranks[3] = {};
  std::int64_t tokens_of_ranks[3] = {};
  NormSum norm_sums[1];
  double norm_limits[1] = {0};
  NormOutcome norms[1];
  int separate_norms = 0;
  std::int64_t tokens = 0;
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
    EXPECT_EQ(s.grad_factor, static_cast<float>(1 / (2 + 1e-6)));
    EXPECT_TRUE(s.decoupled);
  }
  EXPECT_EQ(step.scalars[0].bc1, static_cast<float>(1 - 0.9 * (0.9 * 0.9) * (0.9 * 0.9)));
  EXPECT_EQ(step.scalars[0].beta2, 0.95f);
  EXPECT_EQ(step.scalars[0].omb2, static_cast<float>(1 - 0.95));
  EXPECT_EQ(step.scalars[0].eps, 1e-8f);
  EXPECT_EQ(step.scalars[1].beta1, 0.75f);
  EXPECT_EQ(step.scalars[1].omb1, 0.25f);
  EXPECT_EQ(step.scalars[1].bc1, 1 - 0.2373046875f);
  EXPECT_EQ(step.scalars[1].bc2, 1 - 0.03125f);
  EXPECT_EQ(step.scalars[1].eps, 1e-6f);
  EXPECT_EQ(step.scalars[0].lr, 2e-3f);
  EXPECT_EQ(step.scalars[1].lr, 6e-3f);
  EXPECT_EQ(step.scalars[0].weight_decay, 0.2f);
  EXPECT_EQ(step.scalars[1].weight_decay, 0.0f);
}

TEST(StepState, GradientsAreDividedByTheTokensOfAllRanksWhereThatIsAskedFor) {
  for (const std::int64_t tokens : {0, 1, 8}) {
    for (const bool divides : {false, true}) {
      Step step;
      step.statistics.tokens = tokens;
      step.options.divides_by_tokens = divides;
      step.options.max_norm = 0;
      step.state.loss_scale = {512, 2, 0};
      step.run();
      const double divisor = 512.0 * (divides && tokens == 8 ? 8 : 1);
      EXPECT_EQ(step.outcome.tokens, tokens);
      EXPECT_EQ(step.outcome.grad_norm, 2 / divisor);
      EXPECT_EQ(step.outcome.are_tokens_missing, divides && tokens == 0);
      EXPECT_EQ(step.outcome.taken, !step.outcome.are_tokens_missing);
      if (step.outcome.taken) {
        EXPECT_EQ(step.scalars[0].grad_factor, static_cast<float>(1 / divisor));
      }
      EXPECT_EQ(step.outcome.loss_scale, 512);
    }
  }
}

TEST(StepState, ModelParallelRanksThatCountTokensCountAlike) {
  Step step;
  step.options.model_parallel_ranks = 3;
  step.options.divides_by_tokens = true;
  step.options.max_norm = 0;
  step.tokens_of_ranks[0] = step.tokens_of_ranks[2] = 8;  // the one between them has added 0
  step.run();
  EXPECT_TRUE(step.outcome.taken);
  EXPECT_EQ(step.outcome.tokens, 8);
  EXPECT_EQ(step.outcome.grad_norm, 2 / (step.outcome.loss_scale * 8));

  Step other;
  other.options.model_parallel_ranks = 3;
  other.options.divides_by_tokens = true;
  other.tokens_of_ranks[0] = 8;
  other.tokens_of_ranks[1] = 9;
  other.run();
  EXPECT_TRUE(other.outcome.options_differ);
  EXPECT_FALSE(other.outcome.taken);
}

TEST(StepState, StepsBehindTheTableHaveTheLastRateAndWeightDecay) {
  Step step;
  step.state.taken = 5;
  for (int i = 0; i < 3; ++i) {
    step.sign({step.state.taken, step.state.taken});
    step.run();
    EXPECT_EQ(step.scalars[0].lr, 3e-3f);
    EXPECT_EQ(step.scalars[1].lr, 7e-3f);
    EXPECT_EQ(step.scalars[0].weight_decay, 0.3f);
    EXPECT_EQ(step.scalars[1].weight_decay, 0.7f);
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

TEST(StepState, AStepSkippedForItsNormIsACleanOneForTheLossScale) {
  Step step;
  step.options.skip_norm = 1;  // the norm is 2 / 1024
  step.options.loss_scale_kind = LossScaleKind::kDynamic;
  step.options.growth_interval = 10;
  step.state.loss_scale = {1024, 1, 9};
  Step above = step;
  above.options.skip_norm = 0x1p-10;
  step.run();
  EXPECT_TRUE(step.outcome.taken);
  above.run();
  EXPECT_FALSE(above.outcome.taken);
  EXPECT_EQ(above.outcome.skip_reason, SkipReason::kGradNorm);
  EXPECT_EQ(above.outcome.grad_norm, 2.0 / 1024);
  EXPECT_EQ(above.state.consecutive_skips, 1);
  EXPECT_EQ(above.state.taken, 4);
  EXPECT_EQ(above.state.loss_scale.scale, 2048);
}

TEST(StepState, GroupsHaveTheFactorOfTheirNorm) {
  Step step;
  step.separate_norms = 1;
  add_to_sum(step.norm_sums[0].square_sum, 16);
  step.norm_limits[0] = 0.5;
  const GroupConstants constants[] = {{{0.9, 0.95}, 1e-8, 1}, {{0.75, 0.5}, 1e-6, 0}};
  step.table.constants = constants;
  step.run();
  EXPECT_EQ(step.scalars[0].grad_factor, static_cast<float>(0.5 / (4 + 1e-6)));
  EXPECT_EQ(step.scalars[1].grad_factor, static_cast<float>(1 / (2 + 1e-6)));
  EXPECT_EQ(step.outcome.grad_norm, 2);
  EXPECT_EQ(step.norms[0].grad_norm, 4);
}

TEST(StepState, TheFirstModelParallelRankWithANonFiniteGradientIsTold) {
  for (const int first : {0, 1, 2}) {
    Step step;
    step.options.model_parallel_ranks = 3;
    step.statistics.nonfinite_runs = 5;
    for (int rank = first; rank < 3; ++rank) step.of_ranks[rank] = 2;
    step.run();
    EXPECT_EQ(step.outcome.nonfinite_rank, first);
    EXPECT_EQ(step.outcome.skip_reason, SkipReason::kNonFiniteGradient);
  }
  Step fine;
  fine.options.model_parallel_ranks = 3;
  fine.run();
  EXPECT_EQ(fine.outcome.nonfinite_rank, -1);
}

TEST(StepState, RanksThatWereToldDifferentThingsChangeNothing) {
  // The counts of the last case have the sum of equal ones.
  const std::initializer_list<std::int64_t> cases[] = {{4, 5}, {5, 5}, {4, 3, 5}};
  for (const auto& taken : cases) {
    Step step;
    step.sign(taken);
    step.run();
    EXPECT_TRUE(step.outcome.options_differ);
    EXPECT_FALSE(step.outcome.taken);
    EXPECT_EQ(step.state.taken, 4);
    EXPECT_EQ(step.state.calls, 6);
    EXPECT_EQ(step.scalars[0].beta1, 0);
  }
  Step step;
  step.options.hash = 78;
  step.run();
  EXPECT_TRUE(step.outcome.options_differ);
}

TEST(StepState, AStepBehindATableThatGoesOnElsewhereIsNotTaken) {
  Step step;
  step.table.is_last_kept = false;
  step.state.taken = 6;
  step.sign({6, 6});
  step.run();
  EXPECT_TRUE(step.outcome.is_step_missing);
  EXPECT_FALSE(step.outcome.taken);
  EXPECT_EQ(step.state.taken, 6);
  EXPECT_EQ(step.state.calls, 6);
}

}  // namespace
}  // namespace mxopt
