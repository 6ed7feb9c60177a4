// The loss scale as a state machine, driven only by the reduced non-finite flag.
#pragma once

#include <cstdint>

#include "mxopt/optimizer/config.h"
#include "mxopt/params/host_device.h"

namespace mxopt {

/// A dynamic scale does not grow beyond this.
inline constexpr double kLargestLossScale = 0x1p127;

struct LossScaleState {
  double scale = 1;  // always an FP32 number: the trainer multiplies by it in FP32
  std::int64_t hysteresis_left = 0;
  std::int64_t clean_steps = 0;
};

inline LossScaleState initial_loss_scale(const LossScaleConfig& config) {
  const double initial = static_cast<double>(static_cast<float>(config.initial));
  return {config.kind == LossScaleKind::kNone ? 1.0 : initial, config.hysteresis, 0};
}

/// The state after a step: dynamic scales halve after `hysteresis` overflows, not below `min`, and double
/// after `growth_interval` clean steps, which also restores the hysteresis.
MXOPT_HD LossScaleState next_loss_scale(LossScaleState state, bool overflow, LossScaleKind kind, double min,
                                        std::int64_t growth_interval, std::int64_t hysteresis) {
  if (kind != LossScaleKind::kDynamic) return state;
  if (overflow) {
    state.clean_steps = 0;
    if (--state.hysteresis_left <= 0) {
      const double least = static_cast<double>(static_cast<float>(min));
      state.scale = state.scale * 0.5 > least ? state.scale * 0.5 : least;
      state.hysteresis_left = 0;
    }
    return state;
  }
  if (++state.clean_steps >= growth_interval) {
    state.clean_steps = 0;
    state.hysteresis_left = hysteresis;
    state.scale = state.scale < kLargestLossScale ? state.scale * 2 : state.scale;
  }
  return state;
}

}  // namespace mxopt
