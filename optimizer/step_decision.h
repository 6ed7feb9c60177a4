// Take or skip, the norms and the clip factors, from reduced statistics only: every rank comes to the same
// decision.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

#include "mxopt/optimizer/exact_sum.h"
#include "mxopt/optimizer/step_report.h"
#include "mxopt/params/host_device.h"

namespace mxopt {

/// The head of the one small message of a step, int64 each, summed over ranks.
struct StepStatistics {
  std::int64_t square_sum[kSumLimbs] = {};  // of the owned gradients in the common norm, normalised
  std::int64_t nonfinite_runs = 0;          // pieces of owned gradients with a NaN or infinity
  std::int64_t zero_grads = 0;              // where they are counted
  std::int64_t options_hash = 0;            // of hyper-parameters and taken steps; the same on every rank
  std::int64_t tokens = 0;                  // that the gradients are sums over, where they are divided by it
};
inline constexpr std::int64_t kStatisticsElems = sizeof(StepStatistics) / sizeof(std::int64_t);

/// What one norm became.
struct NormOutcome {
  double grad_norm = 0;  // unscaled; NaN when a gradient of the step is not finite
  float clip_factor = 1;
  float grad_factor = 1;  // clip / divisor, what the update multiplies gradients by
};

/// Sum of squares of the gradients of one separate norm.
struct NormSum {
  std::int64_t square_sum[kSumLimbs] = {};
};

/// Norms beside the common one, each with a clip factor of its own.
struct SeparateNorms {
  NormSum* sums = nullptr;            // [count]
  const double* max_norms = nullptr;  // [count]
  NormOutcome* outcomes = nullptr;    // [count]
  int count = 0;
};

/// The outcome is that of the common norm.
struct StepDecision : NormOutcome {
  bool take = false;
  SkipReason skip_reason = SkipReason::kNone;
};

/// The Euclidean norm of unscaled gradients; `square_sum` ends normalised.
MXOPT_HD double unscaled_norm(std::int64_t* square_sum, double divisor) {
  normalize_sum(square_sum);
  return std::sqrt(sum_value(square_sum)) / divisor;
}

/// clip = min(1, max_norm / (norm + 1e-6)); max_norm 0 switches clipping off. FP64 throughout, rounded once
/// at the end.
MXOPT_HD void clip(NormOutcome& norm, double divisor, double max_norm) {
  const double ratio = max_norm > 0 ? max_norm / (norm.grad_norm + 1e-6) : 1.0;
  const double factor = ratio < 1.0 ? ratio : 1.0;
  norm.clip_factor = static_cast<float>(factor);
  norm.grad_factor = static_cast<float>(factor / divisor);
}

/// divisor    of the reduced gradients: the loss scale, times the tokens where gradients are divided by them.
/// skip_norm  the step is skipped when any norm is above it; 0: never.
MXOPT_HD StepDecision decide(StepStatistics& reduced, double divisor, double max_norm, double skip_norm = 0,
                             const SeparateNorms& separate = {}) {
  StepDecision decision;
  const bool is_finite = reduced.nonfinite_runs == 0;
  const double none = std::numeric_limits<double>::quiet_NaN();
  decision.grad_norm = is_finite ? unscaled_norm(reduced.square_sum, divisor) : none;
  bool is_above = skip_norm > 0 && decision.grad_norm > skip_norm;
  for (int i = 0; i < separate.count; ++i) {
    NormOutcome& norm = separate.outcomes[i];
    norm = NormOutcome();
    norm.grad_norm = is_finite ? unscaled_norm(separate.sums[i].square_sum, divisor) : none;
    is_above = is_above || (skip_norm > 0 && norm.grad_norm > skip_norm);
  }
  if (!is_finite) {
    decision.skip_reason = SkipReason::kNonFiniteGradient;
  } else if (is_above) {
    decision.skip_reason = SkipReason::kGradNorm;
  }
  decision.take = decision.skip_reason == SkipReason::kNone;
  if (!decision.take) return decision;
  clip(decision, divisor, max_norm);
  for (int i = 0; i < separate.count; ++i) {
    clip(separate.outcomes[i], divisor, separate.max_norms[i]);
  }
  return decision;
}

}  // namespace mxopt
