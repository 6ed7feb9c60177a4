#include "mxopt/optimizer/schedule.h"

#include <cmath>
#include <limits>

#include <gtest/gtest.h>

namespace mxopt {
namespace {

ScheduleConfig schedule(ScheduleKind kind, std::int64_t warmup, std::int64_t decay, double min_lr) {
  ScheduleConfig result;
  result.kind = kind;
  result.warmup_steps = warmup;
  result.decay_steps = decay;
  result.min_lr = min_lr;
  return result;
}

ScheduleConfig wsd(DecayShape shape, std::int64_t warmup, std::int64_t decay, std::int64_t tail,
                   double min_lr) {
  ScheduleConfig result = schedule(ScheduleKind::kWsd, warmup, decay, min_lr);
  result.wsd_decay_steps = tail;
  result.wsd_decay_shape = shape;
  return result;
}

double lr_at(const ScheduleConfig& schedule, double peak, std::int64_t step) {
  return scheduled_lr(schedule, {peak, schedule.min_lr}, step);
}

constexpr ScheduleKind kKinds[] = {ScheduleKind::kConstant, ScheduleKind::kLinear, ScheduleKind::kCosine,
                                   ScheduleKind::kInverseSqrt, ScheduleKind::kWsd};
constexpr DecayShape kShapes[] = {DecayShape::kLinear, DecayShape::kCosine, DecayShape::kExponential,
                                  DecayShape::kMinusSqrt};

TEST(Schedule, ConstantWithoutWarmupIsThePeak) {
  const ScheduleConfig s = schedule(ScheduleKind::kConstant, 0, 0, 0);
  for (const std::int64_t step : {1, 2, 1'000'000}) EXPECT_EQ(lr_at(s, 0.5, step), 0.5);
}

TEST(Schedule, WarmupRisesFromTheFirstStepToThePeak) {
  for (const ScheduleKind kind : kKinds) {
    ScheduleConfig s = schedule(kind, 4, 100, 0);
    if (kind == ScheduleKind::kWsd) s.wsd_decay_steps = 96;  // no stable part
    EXPECT_EQ(lr_at(s, 0.5, 1), 0.125);
    EXPECT_EQ(lr_at(s, 0.5, 2), 0.25);
    EXPECT_EQ(lr_at(s, 0.5, 3), 0.375);
    EXPECT_EQ(lr_at(s, 0.5, 4), 0.5);
  }
}

TEST(Schedule, LinearFallsInEqualSteps) {
  const ScheduleConfig s = schedule(ScheduleKind::kLinear, 2, 10, 0.25);
  EXPECT_EQ(lr_at(s, 1.25, 2), 1.25);
  for (std::int64_t step = 3; step <= 10; ++step) {
    EXPECT_DOUBLE_EQ(lr_at(s, 1.25, step), 1.25 - static_cast<double>(step - 2) / 8.0) << step;
  }
}

TEST(Schedule, CosineIsHalfwayInTheMiddle) {
  const ScheduleConfig s = schedule(ScheduleKind::kCosine, 10, 30, 0.1);
  EXPECT_DOUBLE_EQ(lr_at(s, 1.1, 20), 0.6);
  double last = lr_at(s, 1.1, 10);
  for (std::int64_t step = 11; step <= 30; ++step) {
    const double now = lr_at(s, 1.1, step);
    EXPECT_LT(now, last) << step;
    last = now;
  }
}

TEST(Schedule, TheFloorIsReachedAtDecayStepsAndKept) {
  for (const ScheduleKind kind : {ScheduleKind::kLinear, ScheduleKind::kCosine}) {
    const ScheduleConfig s = schedule(kind, 3, 20, 0.01);
    EXPECT_GT(lr_at(s, 1, 19), 0.01);
    EXPECT_EQ(lr_at(s, 1, 20), 0.01);
    EXPECT_EQ(lr_at(s, 1, std::int64_t{1} << 40), 0.01);
  }
}

TEST(Schedule, APeakBelowTheFloorStaysWhereItIs) {
  const ScheduleConfig s = schedule(ScheduleKind::kCosine, 0, 20, 0.01);
  for (const std::int64_t step : {1, 10, 20, 21}) EXPECT_EQ(lr_at(s, 0.002, step), 0.002);
}

TEST(Schedule, EachGroupHasItsOwnFloor) {
  for (const ScheduleKind kind : {ScheduleKind::kLinear, ScheduleKind::kCosine}) {
    const ScheduleConfig s = schedule(kind, 0, 20, 0.25);
    EXPECT_EQ(scheduled_lr(s, {1, 0.125}, 20), 0.125);
    EXPECT_EQ(scheduled_lr(s, {2, 0.5}, 20), 0.5);
    EXPECT_DOUBLE_EQ(scheduled_lr(s, {2, 0.5}, 10), 1.25);
  }
}

TEST(Schedule, WarmupAsLongAsTheDecayEndsAtTheFloor) {
  const ScheduleConfig s = schedule(ScheduleKind::kLinear, 5, 5, 0.01);
  EXPECT_EQ(lr_at(s, 1, 4), 0.8);
  EXPECT_EQ(lr_at(s, 1, 5), 0.01);
}

TEST(Schedule, InverseSqrtHalvesWhenTheStepsAreFourfoldAndStopsAtTheFloor) {
  const ScheduleConfig s = schedule(ScheduleKind::kInverseSqrt, 16, 0, 0.125);
  EXPECT_EQ(lr_at(s, 1, 8), 0.5);
  EXPECT_EQ(lr_at(s, 1, 16), 1);
  EXPECT_EQ(lr_at(s, 1, 25), 0.8);
  EXPECT_EQ(lr_at(s, 1, 64), 0.5);
  EXPECT_EQ(lr_at(s, 1, 256), 0.25);
  EXPECT_GT(lr_at(s, 1, 1023), 0.125);
  EXPECT_EQ(lr_at(s, 1, 1024), 0.125);
  EXPECT_EQ(lr_at(s, 1, std::int64_t{1} << 40), 0.125);
  const ScheduleConfig without_warmup = schedule(ScheduleKind::kInverseSqrt, 0, 0, 0);
  EXPECT_EQ(lr_at(without_warmup, 1, 1), 1);
  EXPECT_EQ(lr_at(without_warmup, 1, 4), 0.5);
}

TEST(Schedule, WsdIsStableUntilItsTail) {
  for (const DecayShape shape : kShapes) {
    const ScheduleConfig s = wsd(shape, 10, 100, 20, 0.25);
    for (const std::int64_t step : {10, 11, 50, 80}) EXPECT_EQ(lr_at(s, 1.25, step), 1.25) << step;
    double last = 1.25;
    for (std::int64_t step = 81; step <= 100; ++step) {
      const double now = lr_at(s, 1.25, step);
      EXPECT_LT(now, last) << step;
      last = now;
    }
    EXPECT_EQ(last, 0.25);
    EXPECT_EQ(lr_at(s, 1.25, 101), 0.25);
  }
}

TEST(Schedule, TheTailHasTheShapeOfItsFormula) {
  const auto in_quarters = [](DecayShape shape, std::int64_t quarter) {
    return lr_at(wsd(shape, 0, 100, 40, 1), 3, 60 + 10 * quarter);
  };
  EXPECT_DOUBLE_EQ(in_quarters(DecayShape::kLinear, 1), 1 + 2 * 0.75);
  EXPECT_DOUBLE_EQ(in_quarters(DecayShape::kLinear, 2), 2);
  EXPECT_DOUBLE_EQ(in_quarters(DecayShape::kCosine, 1), 1 + (1 + std::sqrt(0.5)));
  EXPECT_DOUBLE_EQ(in_quarters(DecayShape::kCosine, 2), 2);
  EXPECT_DOUBLE_EQ(in_quarters(DecayShape::kExponential, 1), 1 + 2 * (2 / std::sqrt(std::sqrt(2.0)) - 1));
  EXPECT_DOUBLE_EQ(in_quarters(DecayShape::kExponential, 2), 1 + 2 * (std::sqrt(2.0) - 1));
  EXPECT_DOUBLE_EQ(in_quarters(DecayShape::kMinusSqrt, 1), 2);
  EXPECT_DOUBLE_EQ(in_quarters(DecayShape::kMinusSqrt, 2), 1 + 2 * (1 - std::sqrt(0.5)));
}

TEST(Schedule, TheLastChangeIsTheFirstStepOfTheFinalRate) {
  const std::int64_t never = std::numeric_limits<std::int64_t>::max();
  EXPECT_EQ(last_lr_change(schedule(ScheduleKind::kConstant, 0, 100, 0)), 1);
  EXPECT_EQ(last_lr_change(schedule(ScheduleKind::kConstant, 7, 0, 0)), 7);
  EXPECT_EQ(last_lr_change(schedule(ScheduleKind::kLinear, 7, 100, 0)), 100);
  EXPECT_EQ(last_lr_change(schedule(ScheduleKind::kCosine, 7, 100, 0)), 100);
  EXPECT_EQ(last_lr_change(schedule(ScheduleKind::kInverseSqrt, 7, 100, 0)), never);
  for (const DecayShape shape : kShapes) {
    const ScheduleConfig s = wsd(shape, 7, 100, 13, 0.01);
    EXPECT_EQ(last_lr_change(s), 100);
    EXPECT_NE(lr_at(s, 1, 99), lr_at(s, 1, 100));
  }
}

TEST(Schedule, WeightDecayGoesFromItsStartToItsEnd) {
  ScheduleConfig s = schedule(ScheduleKind::kConstant, 5, 20, 0);
  const WeightDecayRange range = {0.25, 1.25};
  for (const std::int64_t step : {1, 10, 20, 100}) EXPECT_EQ(scheduled_weight_decay(s, range, step), 0.25);
  EXPECT_EQ(last_weight_decay_change(s), 1);
  for (const WeightDecayKind kind : {WeightDecayKind::kLinear, WeightDecayKind::kCosine}) {
    s.weight_decay_kind = kind;
    EXPECT_EQ(last_weight_decay_change(s), 20);
    double last = range.start;
    for (std::int64_t step = 1; step <= 20; ++step) {
      const double now = scheduled_weight_decay(s, range, step);
      EXPECT_GT(now, last) << step;
      last = now;
    }
    EXPECT_EQ(last, 1.25);
    EXPECT_EQ(scheduled_weight_decay(s, range, std::int64_t{1} << 40), 1.25);
    EXPECT_DOUBLE_EQ(scheduled_weight_decay(s, range, 10), 0.75);
    EXPECT_DOUBLE_EQ(scheduled_weight_decay(s, {1.25, 0.25}, 10), 0.75);
    EXPECT_EQ(scheduled_weight_decay(s, {0.3, 0.3}, 7), 0.3);
  }
  s.weight_decay_kind = WeightDecayKind::kLinear;
  EXPECT_DOUBLE_EQ(scheduled_weight_decay(s, range, 5), 0.5);
  s.weight_decay_kind = WeightDecayKind::kCosine;
  EXPECT_DOUBLE_EQ(scheduled_weight_decay(s, range, 5), 0.25 + 0.5 * (1 - std::sqrt(0.5)));
}

}  // namespace
}  // namespace mxopt
