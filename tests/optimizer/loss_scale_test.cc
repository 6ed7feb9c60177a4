#include "mxopt/optimizer/loss_scale.h"

#include <gtest/gtest.h>

namespace mxopt {
namespace {

LossScaleConfig dynamic_config() {
  return {LossScaleKind::kDynamic, 1024, 16, 3, 2};
}

LossScaleState advance(LossScaleState state, const LossScaleConfig& c, bool overflow) {
  return next_loss_scale(state, overflow, c.kind, c.min, c.growth_interval, c.hysteresis);
}

TEST(LossScale, WithoutScalingItIsOne) {
  LossScaleConfig config;
  LossScaleState state = initial_loss_scale(config);
  EXPECT_EQ(state.scale, 1);
  for (int i = 0; i < 5000; ++i) state = advance(state, config, i % 2 == 0);
  EXPECT_EQ(state.scale, 1);
}

TEST(LossScale, StaticScaleNeverChanges) {
  LossScaleConfig config = dynamic_config();
  config.kind = LossScaleKind::kStatic;
  LossScaleState state = initial_loss_scale(config);
  for (int i = 0; i < 50; ++i) state = advance(state, config, i % 3 == 0);
  EXPECT_EQ(state.scale, 1024);
}

TEST(LossScale, HalvesAfterHysteresisAndThenAtEveryOverflow) {
  const LossScaleConfig config = dynamic_config();
  LossScaleState state = initial_loss_scale(config);
  state = advance(state, config, true);
  EXPECT_EQ(state.scale, 1024);
  state = advance(state, config, true);
  EXPECT_EQ(state.scale, 512);
  state = advance(state, config, true);
  EXPECT_EQ(state.scale, 256);
}

TEST(LossScale, ACleanStepAloneDoesNotRestoreTheHysteresis) {
  const LossScaleConfig config = dynamic_config();
  LossScaleState state = initial_loss_scale(config);
  state = advance(state, config, true);
  state = advance(state, config, false);
  state = advance(state, config, true);
  EXPECT_EQ(state.scale, 512);
}

TEST(LossScale, GrowthDoublesAndRestoresTheHysteresis) {
  const LossScaleConfig config = dynamic_config();
  LossScaleState state = initial_loss_scale(config);
  state = advance(advance(state, config, true), config, true);
  EXPECT_EQ(state.scale, 512);
  for (int i = 0; i < 3; ++i) state = advance(state, config, false);
  EXPECT_EQ(state.scale, 1024);
  state = advance(state, config, true);
  EXPECT_EQ(state.scale, 1024);
  state = advance(state, config, true);
  EXPECT_EQ(state.scale, 512);
}

TEST(LossScale, AnOverflowRestartsTheCountOfCleanSteps) {
  const LossScaleConfig config = dynamic_config();
  LossScaleState state = initial_loss_scale(config);
  state = advance(advance(state, config, false), config, false);
  state = advance(state, config, true);
  state = advance(advance(state, config, false), config, false);
  EXPECT_EQ(state.scale, 1024);
  EXPECT_EQ(advance(state, config, false).scale, 2048);
}

TEST(LossScale, NeverFallsBelowItsMinimum) {
  LossScaleConfig config = dynamic_config();
  config.min = 3;
  LossScaleState state = initial_loss_scale(config);
  for (int i = 0; i < 5000; ++i) {
    state = advance(state, config, true);
    ASSERT_GE(state.scale, 3);
  }
  EXPECT_EQ(state.scale, 3);
}

}  // namespace
}  // namespace mxopt
