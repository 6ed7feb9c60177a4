#include "mxopt/optimizer/schedule.h"

#include <gtest/gtest.h>

namespace mxopt {
namespace {

ScheduleConfig schedule(ScheduleKind kind, std::int64_t warmup, std::int64_t decay, double min_lr) {
  return {kind, warmup, decay, min_lr};
}

TEST(Schedule, ConstantWithoutWarmupIsThePeak) {
  const ScheduleConfig s = schedule(ScheduleKind::kConstant, 0, 0, 0);
  for (const std::int64_t step : {1, 2, 1'000'000}) EXPECT_EQ(scheduled_lr(s, 0.5, step), 0.5);
}

TEST(Schedule, WarmupRisesFromTheFirstStepToThePeak) {
  for (const ScheduleKind kind : {ScheduleKind::kConstant, ScheduleKind::kLinear, ScheduleKind::kCosine}) {
    const ScheduleConfig s = schedule(kind, 4, 100, 0);
    EXPECT_EQ(scheduled_lr(s, 0.5, 1), 0.125);
    EXPECT_EQ(scheduled_lr(s, 0.5, 2), 0.25);
    EXPECT_EQ(scheduled_lr(s, 0.5, 3), 0.375);
    EXPECT_EQ(scheduled_lr(s, 0.5, 4), 0.5);
  }
}

TEST(Schedule, LinearFallsInEqualSteps) {
  const ScheduleConfig s = schedule(ScheduleKind::kLinear, 2, 10, 0.25);
  EXPECT_EQ(scheduled_lr(s, 1.25, 2), 1.25);
  for (std::int64_t step = 3; step <= 10; ++step) {
    EXPECT_DOUBLE_EQ(scheduled_lr(s, 1.25, step), 1.25 - static_cast<double>(step - 2) / 8.0) << step;
  }
}

TEST(Schedule, CosineIsHalfwayInTheMiddle) {
  const ScheduleConfig s = schedule(ScheduleKind::kCosine, 10, 30, 0.1);
  EXPECT_DOUBLE_EQ(scheduled_lr(s, 1.1, 20), 0.6);
  double last = scheduled_lr(s, 1.1, 10);
  for (std::int64_t step = 11; step <= 30; ++step) {
    const double now = scheduled_lr(s, 1.1, step);
    EXPECT_LT(now, last) << step;
    last = now;
  }
}

TEST(Schedule, TheFloorIsReachedAtDecayStepsAndKept) {
  for (const ScheduleKind kind : {ScheduleKind::kLinear, ScheduleKind::kCosine}) {
    const ScheduleConfig s = schedule(kind, 3, 20, 0.01);
    EXPECT_GT(scheduled_lr(s, 1, 19), 0.01);
    EXPECT_EQ(scheduled_lr(s, 1, 20), 0.01);
    EXPECT_EQ(scheduled_lr(s, 1, std::int64_t{1} << 40), 0.01);
  }
}

TEST(Schedule, APeakBelowTheFloorStaysWhereItIs) {
  const ScheduleConfig s = schedule(ScheduleKind::kCosine, 0, 20, 0.01);
  for (const std::int64_t step : {1, 10, 20, 21}) EXPECT_EQ(scheduled_lr(s, 0.002, step), 0.002);
}

TEST(Schedule, WarmupAsLongAsTheDecayEndsAtTheFloor) {
  const ScheduleConfig s = schedule(ScheduleKind::kLinear, 5, 5, 0.01);
  EXPECT_EQ(scheduled_lr(s, 1, 4), 0.8);
  EXPECT_EQ(scheduled_lr(s, 1, 5), 0.01);
}

}  // namespace
}  // namespace mxopt
