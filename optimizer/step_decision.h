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
  // From here on, what ranks that own the same shard have of their own:
  std::int64_t options_hash = 0;  // of hyper-parameters and taken steps; the same on every rank
  std::int64_t tokens = 0;        // that the gradients are sums over, where they are divided by it
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

/// Reduced statistics of gradients that have one divisor.
struct ReducedPart {
  StepStatistics* statistics = nullptr;
  double divisor = 1;  // of the gradients: loss scale, tokens and ranks, as far as they were not divided yet
  SeparateNorms separate = {};
};

/// The common norm of all parts. The sums of those with the first one's divisor are added as integers, so it
/// does not matter whether params are in one part or in several.
MXOPT_HD double common_norm(const ReducedPart* parts, int count) {
  std::int64_t* const sum = parts[0].statistics->square_sum;
  double others = 0;
  for (int p = 1; p < count; ++p) {
    std::int64_t* const part = parts[p].statistics->square_sum;
    normalize_sum(part);
    const double ratio = parts[0].divisor / parts[p].divisor;
    if (ratio != 1) {
      others += ratio * ratio * sum_value(part);
      continue;
    }
    for (int k = 0; k < kSumLimbs; ++k) sum[k] += part[k];
  }
  normalize_sum(sum);
  return std::sqrt(sum_value(sum) + others) / parts[0].divisor;
}

/// One decision over all parts; the first one's sum of squares ends as that of all with its divisor. Its
/// grad_factor is the first part's: clip() makes that of another from the norm and its divisor.
/// max_norm   of the common norm.
/// skip_norm  the step is skipped when any norm is above it; 0: never.
MXOPT_HD StepDecision decide(const ReducedPart* parts, int count, double max_norm, double skip_norm) {
  StepDecision decision;
  bool is_finite = true;
  for (int p = 0; p < count; ++p) is_finite = is_finite && parts[p].statistics->nonfinite_runs == 0;
  const double none = std::numeric_limits<double>::quiet_NaN();
  decision.grad_norm = is_finite ? common_norm(parts, count) : none;
  bool is_above = skip_norm > 0 && decision.grad_norm > skip_norm;
  for (int p = 0; p < count; ++p) {
    const SeparateNorms& separate = parts[p].separate;
    for (int i = 0; i < separate.count; ++i) {
      NormOutcome& norm = separate.outcomes[i];
      norm = NormOutcome();
      norm.grad_norm = is_finite ? unscaled_norm(separate.sums[i].square_sum, parts[p].divisor) : none;
      is_above = is_above || (skip_norm > 0 && norm.grad_norm > skip_norm);
    }
  }
  if (!is_finite) {
    decision.skip_reason = SkipReason::kNonFiniteGradient;
  } else if (is_above) {
    decision.skip_reason = SkipReason::kGradNorm;
  }
  decision.take = decision.skip_reason == SkipReason::kNone;
  if (!decision.take) return decision;
  clip(decision, parts[0].divisor, max_norm);
  for (int p = 0; p < count; ++p) {
    const SeparateNorms& separate = parts[p].separate;
    for (int i = 0; i < separate.count; ++i) {
      clip(separate.outcomes[i], parts[p].divisor, separate.max_norms[i]);
    }
  }
  return decision;
}

/// The same for one part.
MXOPT_HD StepDecision decide(StepStatistics& reduced, double divisor, double max_norm, double skip_norm = 0,
                             const SeparateNorms& separate = {}) {
  const ReducedPart part = {&reduced, divisor, separate};
  return decide(&part, 1, max_norm, skip_norm);
}

}  // namespace mxopt
