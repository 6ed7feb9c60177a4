// The host's passes of a step.
#pragma once

#include <memory>

#include "mxopt/optimizer/step_kernels.h"

namespace mxopt::host {

std::unique_ptr<StepKernels> make_step_kernels(StepTables tables);

}  // namespace mxopt::host
