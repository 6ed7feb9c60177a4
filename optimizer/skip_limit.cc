#include "mxopt/optimizer/skip_limit.h"

#include <cstdint>
#include <sstream>
#include <string>

#include "mxopt/params/check.h"

namespace mxopt {

namespace {

/// Why the step of a record was skipped.
std::string skip_cause(const StepRecord& record, double skip_norm) {
  std::ostringstream cause;
  if (record.skip_reason == SkipReason::kNonFiniteGradient) {
    cause << "a non-finite gradient";
    // A publish() since then has cleared the status bytes.
    if (!record.nonfinite_gradient_params.empty()) {
      cause << " of param '" << record.nonfinite_gradient_params.front() << "'";
    } else if (record.nonfinite_gradient_rank >= 0) {
      cause << " on rank " << record.nonfinite_gradient_rank << " of the model-parallel group";
    }
    return cause.str();
  }
  double norm = record.grad_norm;
  std::string name;
  for (const NormRecord& separate : record.norm_groups) {
    if (norm > skip_norm) break;
    norm = separate.grad_norm;
    name = separate.name;
  }
  cause << "a gradient norm of " << norm << (name.empty() ? "" : " in norm_group '" + name + "'")
        << ", above optimizer.skip_norm, " << skip_norm;
  return cause.str();
}

}  // namespace

void require_few_skips(const StepRecord& record, const OptimizerConfig& config) {
  const std::int64_t limit = config.max_consecutive_skips;
  if (limit == 0 || record.consecutive_skips < limit) return;
  throw ContractError("step: " + std::to_string(record.consecutive_skips) +
                      " steps in a row were skipped (optimizer.max_consecutive_skips is " +
                      std::to_string(limit) + "); the last one because of " +
                      skip_cause(record, config.skip_norm));
}

}  // namespace mxopt
