// The loss scale as a state machine, driven only by the reduced non-finite flag.
#pragma once

#include <cstdint>

#include "mxopt/optimizer/config.h"
#include "mxopt/params/host_device.h"

namespace mxopt {

struct LossScaleState {
  double scale = 1;
  std::int64_t hysteresis_left = 0;
  std::int64_t clean_steps = 0;
};

inline LossScaleState initial_loss_scale(const LossScaleConfig& config) {
  return {config.kind == LossScaleKind::kNone ? 1.0 : config.initial, config.hysteresis, 0};
}

/// The state after a step: dynamic scales halve after `hysteresis` overflows, not below `min`, and double
/// after `growth_interval` clean steps, which also restores the hysteresis.
MXOPT_HD LossScaleState next_loss_scale(LossScaleState state, bool overflow, LossScaleKind kind, double min,
                                        std::int64_t growth_interval, std::int64_t hysteresis) {
  if (kind != LossScaleKind::kDynamic) return state;
  if (overflow) {
    state.clean_steps = 0;
    if (--state.hysteresis_left <= 0) {
      state.scale = state.scale * 0.5 > min ? state.scale * 0.5 : min;
      state.hysteresis_left = 0;
    }
    return state;
  }
  if (++state.clean_steps >= growth_interval) {
    state.clean_steps = 0;
    state.hysteresis_left = hysteresis;
    state.scale *= 2;
  }
  return state;
}

}  // namespace mxopt
