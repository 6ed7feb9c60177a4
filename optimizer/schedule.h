// Learning rate and weight decay as functions of the taken steps.
//
// With t the taken step, counted from 1, w = warmup_steps, d = decay_steps, k = wsd_decay_steps, and peak and
// floor f <= peak of a group:
//
//   t < w         peak * t / w
//   constant      peak
//   linear        f + (peak - f) * (1 - r),                r = (t - w) / (d - w)
//   cosine        f + (peak - f) * (1 + cos(pi r)) / 2,    the same r
//   inverse_sqrt  max(f, peak * sqrt(max(w, 1) / t))
//   wsd           peak up to t = d - k, then f + (peak - f) * s(r), r = (t - (d - k)) / k; s(r) is
//     linear      1 - r
//     cosine      (1 + cos(pi r)) / 2
//     exponential 2 * 0.5^r - 1
//     minus_sqrt  1 - sqrt(r)
//
// linear, cosine and wsd are at f from t = d on. A floor above the peak counts as the peak.
//
// The weight decay goes from its start a to its end b over the same d steps, warm-up included:
//
//   constant      a
//   linear        a + (b - a) * q,                         q = min(t / d, 1)
//   cosine        a + (b - a) * (1 - cos(pi q)) / 2,       the same q
//
// Sources: inverse_sqrt: Vaswani et al., "Attention Is All You Need" (2017), 5.3, scaled to its peak; cosine:
// Loshchilov and Hutter, "SGDR" (2017), one period; wsd: Hu et al., "MiniCPM" (2024); minus_sqrt: Haegele et
// al., "Scaling Laws and Compute-Optimal Training Beyond Fixed Training Durations" (2024). The exponential
// tail halves 1 + s over its length, so that it ends at 0.
#pragma once

#include <cstdint>

#include "mxopt/optimizer/config.h"

namespace mxopt {

/// Whether rates of this kind fall until decay_steps and stay.
constexpr bool ends_at_decay_steps(ScheduleKind kind) {
  return kind != ScheduleKind::kConstant && kind != ScheduleKind::kInverseSqrt;
}

/// The learning rates between which a group's schedule runs.
struct LrRange {
  double peak = 0;
  double floor = 0;
};

/// Rate of taken step `step`, counted from 1.
double scheduled_lr(const ScheduleConfig& schedule, LrRange range, std::int64_t step);

/// The first step, at least 1, from which on the rate stays the same; the largest number where it never does.
std::int64_t last_lr_change(const ScheduleConfig& schedule);

struct WeightDecayRange {
  double start = 0;
  double end = 0;
};

/// Weight decay of taken step `step`, counted from 1.
double scheduled_weight_decay(const ScheduleConfig& schedule, WeightDecayRange range, std::int64_t step);

/// The first step, at least 1, from which on the weight decay stays the same.
std::int64_t last_weight_decay_change(const ScheduleConfig& schedule);

}  // namespace mxopt
