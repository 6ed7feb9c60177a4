#include "mxopt/optimizer/schedule.h"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace mxopt {

double scheduled_lr(const ScheduleConfig& schedule, double peak, std::int64_t step) {
  if (step < schedule.warmup_steps) {
    return peak * static_cast<double>(step) / static_cast<double>(schedule.warmup_steps);
  }
  if (schedule.kind == ScheduleKind::kConstant) return peak;
  const double floor = std::min(schedule.min_lr, peak);
  const std::int64_t span = schedule.decay_steps - schedule.warmup_steps;
  if (step >= schedule.decay_steps || span <= 0) return floor;
  const double progress = static_cast<double>(step - schedule.warmup_steps) / static_cast<double>(span);
  const double share = schedule.kind == ScheduleKind::kLinear
                           ? 1.0 - progress
                           : 0.5 * (1.0 + std::cos(std::numbers::pi * progress));
  return floor + (peak - floor) * share;
}

std::int64_t last_lr_change(const ScheduleConfig& schedule) {
  const bool decays = schedule.kind != ScheduleKind::kConstant;
  return std::max({std::int64_t{1}, schedule.warmup_steps, decays ? schedule.decay_steps : 0});
}

}  // namespace mxopt
