#include "mxopt/optimizer/step_decision.h"

#include <cmath>
#include <vector>

#include <gtest/gtest.h>

namespace mxopt {
namespace {

StepStatistics statistics_of(double square_sum) {
  StepStatistics statistics;
  add_to_sum(statistics.square_sum, square_sum);
  return statistics;
}

TEST(StepDecision, MessageIsTheWholeStruct) {
  EXPECT_EQ(kStatisticsElems, kSumLimbs + 4);
}

TEST(StepDecision, NormsOfSquareNumbersAreExact) {
  for (std::int64_t root = 0; root <= 100'000; root += 7) {
    StepStatistics statistics = statistics_of(static_cast<double>(root * root));
    const StepDecision decision = decide(statistics, 1, 0);
    EXPECT_TRUE(decision.take);
    EXPECT_EQ(decision.grad_norm, static_cast<double>(root));
  }
}

TEST(StepDecision, NormIsUnscaledBeforeItIsClipped) {
  StepStatistics statistics = statistics_of(4096.0 * 4096.0 * 9.0);
  const StepDecision decision = decide(statistics, 4096, 1.5);
  EXPECT_EQ(decision.grad_norm, 3.0);
  EXPECT_EQ(decision.clip_factor, static_cast<float>(1.5 / (3.0 + 1e-6)));
  EXPECT_EQ(decision.grad_factor, static_cast<float>(1.5 / (3.0 + 1e-6) / 4096));
}

TEST(StepDecision, ClippingNeverEnlarges) {
  for (const double norm : {0.0, 0.5, 1.0}) {
    StepStatistics statistics = statistics_of(norm * norm);
    const StepDecision decision = decide(statistics, 1, 1.0001);
    EXPECT_EQ(decision.clip_factor, 1) << norm;
    EXPECT_EQ(decision.grad_factor, 1) << norm;
  }
}

TEST(StepDecision, ZeroSwitchesClippingOff) {
  StepStatistics statistics = statistics_of(1e60);
  EXPECT_EQ(decide(statistics, 1, 0).clip_factor, 1);
}

TEST(StepDecision, ANormOfManyHugeGradientsIsFinite) {
  const double square = 3.4e38 * 3.4e38;
  StepStatistics statistics;
  for (int i = 0; i < 1000; ++i) add_to_sum(statistics.square_sum, square);
  const StepDecision decision = decide(statistics, 1, 1);
  EXPECT_TRUE(decision.take);
  EXPECT_NEAR(decision.grad_norm / (3.4e38 * std::sqrt(1000.0)), 1, 1e-15);
  EXPECT_GT(decision.clip_factor, 0);
}

TEST(StepDecision, ANonFiniteGradientSkipsAndMultipliesIntoNothing) {
  StepStatistics statistics = statistics_of(4);
  statistics.nonfinite_runs = 1;
  const StepDecision decision = decide(statistics, 1024, 1);
  EXPECT_FALSE(decision.take);
  EXPECT_TRUE(std::isnan(decision.grad_norm));
  EXPECT_EQ(decision.clip_factor, 1);
  EXPECT_EQ(decision.grad_factor, 1);
}

TEST(StepDecision, ANormAboveItsLimitSkipsAndIsTold) {
  for (const double norm : {0.0, 7.999, 8.0, 8.001, 1e30}) {
    StepStatistics statistics = statistics_of(norm * norm);
    const StepDecision decision = decide(statistics, 1, 1, 8);
    EXPECT_EQ(decision.take, norm <= 8) << norm;
    EXPECT_EQ(decision.skip_reason, norm <= 8 ? SkipReason::kNone : SkipReason::kGradNorm) << norm;
    EXPECT_DOUBLE_EQ(decision.grad_norm, norm);
    EXPECT_EQ(decision.clip_factor < 1, decision.take && norm > 1) << norm;
  }
  StepStatistics scaled = statistics_of(16 * 16);
  EXPECT_TRUE(decide(scaled, 4, 0, 8).take) << "the limit is one of unscaled norms";
  StepStatistics bad = statistics_of(1e30);
  bad.nonfinite_runs = 1;
  EXPECT_EQ(decide(bad, 1, 1, 8).skip_reason, SkipReason::kNonFiniteGradient);
}

/// Two separate norms: 3 with the limit 1.5, 5 with none.
struct Separate {
  Separate() {
    add_to_sum(sums[0].square_sum, 9);
    add_to_sum(sums[1].square_sum, 25);
  }
  SeparateNorms norms() { return {sums, max_norms, outcomes, 2}; }
  NormSum sums[2];
  double max_norms[2] = {1.5, 0};
  NormOutcome outcomes[2];
};

TEST(StepDecision, SeparateNormsHaveFactorsOfTheirOwn) {
  Separate separate;
  StepStatistics statistics = statistics_of(4);
  const StepDecision decision = decide(statistics, 0.5, 8, 0, separate.norms());
  EXPECT_TRUE(decision.take);
  EXPECT_EQ(decision.grad_norm, 4);
  EXPECT_EQ(decision.clip_factor, 1);
  EXPECT_EQ(decision.grad_factor, 2);
  EXPECT_EQ(separate.outcomes[0].grad_norm, 6);
  EXPECT_EQ(separate.outcomes[0].clip_factor, static_cast<float>(1.5 / (6 + 1e-6)));
  EXPECT_EQ(separate.outcomes[0].grad_factor, static_cast<float>(1.5 / (6 + 1e-6) / 0.5));
  EXPECT_EQ(separate.outcomes[1].grad_norm, 10);
  EXPECT_EQ(separate.outcomes[1].clip_factor, 1);
  EXPECT_EQ(separate.outcomes[1].grad_factor, 2);
}

TEST(StepDecision, ASeparateNormAboveTheLimitSkipsToo) {
  Separate separate;
  StepStatistics statistics = statistics_of(4);
  const StepDecision decision = decide(statistics, 1, 1, 4, separate.norms());
  EXPECT_EQ(decision.skip_reason, SkipReason::kGradNorm);
  EXPECT_EQ(decision.clip_factor, 1);
  EXPECT_EQ(separate.outcomes[0].clip_factor, 1);
  EXPECT_EQ(separate.outcomes[0].grad_norm, 3);
  EXPECT_EQ(separate.outcomes[1].grad_norm, 5);
}

TEST(StepDecision, ANonFiniteGradientLeavesNoNorm) {
  Separate separate;
  StepStatistics statistics = statistics_of(4);
  statistics.nonfinite_runs = 1;
  EXPECT_FALSE(decide(statistics, 1, 1, 4, separate.norms()).take);
  for (const NormOutcome& norm : separate.outcomes) {
    EXPECT_TRUE(std::isnan(norm.grad_norm));
    EXPECT_EQ(norm.clip_factor, 1);
    EXPECT_EQ(norm.grad_factor, 1);
  }
}

TEST(StepDecision, SumsOfRanksNeedNotBeNormalised) {
  // Four ranks, each with normalised limbs, added limb by limb.
  StepStatistics one = statistics_of(3.75e9);
  normalize_sum(one.square_sum);
  StepStatistics four;
  for (std::size_t k = 0; k < kSumLimbs; ++k) four.square_sum[k] = 4 * one.square_sum[k];
  EXPECT_EQ(decide(four, 1, 0).grad_norm, std::sqrt(4 * 3.75e9));
}

}  // namespace
}  // namespace mxopt
