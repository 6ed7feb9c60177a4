// Take or skip, the norm and the clip factor, from reduced statistics only: every rank comes to the same
// decision.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

#include "mxopt/optimizer/exact_sum.h"
#include "mxopt/params/host_device.h"

namespace mxopt {

/// The one small message of a step, int64 each, summed over ranks.
struct StepStatistics {
  std::int64_t square_sum[kSumLimbs] = {};  // of the owned gradients, normalised
  std::int64_t nonfinite_runs = 0;          // pieces of owned gradients with a NaN or infinity
  std::int64_t options_hash = 0;            // of hyper-parameters and taken steps; the same on every rank
  std::int64_t tokens = 0;                  // that the gradients are sums over, where they are divided by it
};
inline constexpr std::int64_t kStatisticsElems = sizeof(StepStatistics) / sizeof(std::int64_t);

struct StepDecision {
  bool take = false;
  double grad_norm = 0;  // unscaled; NaN when not finite
  float clip_factor = 1;
  float grad_factor = 1;  // clip / divisor, what the update multiplies gradients by
};

/// clip = min(1, max_norm / (norm + 1e-6)); max_norm 0 switches clipping off. FP64 throughout, rounded once
/// at the end.
/// divisor  of the reduced gradients: the loss scale, times the tokens where gradients are divided by them.
MXOPT_HD StepDecision decide(StepStatistics& reduced, double divisor, double max_norm) {
  StepDecision decision;
  decision.take = reduced.nonfinite_runs == 0;
  if (!decision.take) {
    decision.grad_norm = std::numeric_limits<double>::quiet_NaN();
    return decision;
  }
  normalize_sum(reduced.square_sum);
  decision.grad_norm = std::sqrt(sum_value(reduced.square_sum)) / divisor;
  const double ratio = max_norm > 0 ? max_norm / (decision.grad_norm + 1e-6) : 1.0;
  const double clip = ratio < 1.0 ? ratio : 1.0;
  decision.clip_factor = static_cast<float>(clip);
  decision.grad_factor = static_cast<float>(clip / divisor);
  return decision;
}

}  // namespace mxopt
