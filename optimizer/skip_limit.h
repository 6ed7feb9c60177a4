// When a trainer must hear that steps are skipped.
#pragma once

#include "mxopt/optimizer/config.h"
#include "mxopt/optimizer/step_report.h"

namespace mxopt {

/// Throws ContractError that names the cause when the step of the record is the last one of
/// optimizer.max_consecutive_skips in a row.
void require_few_skips(const StepRecord& record, const OptimizerConfig& config);

}  // namespace mxopt
