#include "mxopt/optimizer/schedule.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>

namespace mxopt {

namespace {

/// From 1 at `progress` 0 to 0 at 1.
double decay_share(DecayShape shape, double progress) {
  switch (shape) {
    case DecayShape::kLinear:
      return 1.0 - progress;
    case DecayShape::kCosine:
      return 0.5 * (1.0 + std::cos(std::numbers::pi * progress));
    case DecayShape::kExponential:
      return 2.0 * std::exp2(-progress) - 1.0;
    case DecayShape::kMinusSqrt:
      return 1.0 - std::sqrt(progress);
  }
  return 0.0;
}

/// Of a schedule that ends at decay_steps.
DecayShape decay_shape(const ScheduleConfig& schedule) {
  if (schedule.kind == ScheduleKind::kWsd) return schedule.wsd_decay_shape;
  return schedule.kind == ScheduleKind::kLinear ? DecayShape::kLinear : DecayShape::kCosine;
}

}  // namespace

double scheduled_lr(const ScheduleConfig& schedule, LrRange range, std::int64_t step) {
  const double peak = range.peak;
  if (step < schedule.warmup_steps) {
    return peak * static_cast<double>(step) / static_cast<double>(schedule.warmup_steps);
  }
  const double floor = std::min(range.floor, peak);
  if (schedule.kind == ScheduleKind::kInverseSqrt) {
    const auto from = static_cast<double>(std::max<std::int64_t>(schedule.warmup_steps, 1));
    return std::max(floor, peak * std::sqrt(from / static_cast<double>(step)));
  }
  if (!ends_at_decay_steps(schedule.kind)) return peak;
  if (step >= schedule.decay_steps) return floor;
  const std::int64_t begin = schedule.kind == ScheduleKind::kWsd
                                 ? schedule.decay_steps - schedule.wsd_decay_steps
                                 : schedule.warmup_steps;
  if (step <= begin) return peak;
  const double progress =
      static_cast<double>(step - begin) / static_cast<double>(schedule.decay_steps - begin);
  return floor + (peak - floor) * decay_share(decay_shape(schedule), progress);
}

std::int64_t last_lr_change(const ScheduleConfig& schedule) {
  if (schedule.kind == ScheduleKind::kInverseSqrt) return std::numeric_limits<std::int64_t>::max();
  const std::int64_t decay = ends_at_decay_steps(schedule.kind) ? schedule.decay_steps : 0;
  return std::max({std::int64_t{1}, schedule.warmup_steps, decay});
}

double scheduled_weight_decay(const ScheduleConfig& schedule, WeightDecayRange range, std::int64_t step) {
  if (schedule.weight_decay_kind == WeightDecayKind::kConstant) return range.start;
  if (step >= schedule.decay_steps) return range.end;
  const double progress = static_cast<double>(step) / static_cast<double>(schedule.decay_steps);
  const double share = schedule.weight_decay_kind == WeightDecayKind::kLinear
                           ? progress
                           : 0.5 * (1.0 - std::cos(std::numbers::pi * progress));
  return range.start + (range.end - range.start) * share;
}

std::int64_t last_weight_decay_change(const ScheduleConfig& schedule) {
  if (schedule.weight_decay_kind == WeightDecayKind::kConstant) return 1;
  return std::max<std::int64_t>(1, schedule.decay_steps);
}

}  // namespace mxopt
