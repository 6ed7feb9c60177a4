// The CUDA twin of step_kernels.h, which picks it.
#pragma once

#include <memory>

#include "mxopt/optimizer/step_kernels.h"

namespace mxopt::cuda {

std::unique_ptr<StepKernels> make_step_kernels(StepTables tables, Device device,
                                               std::shared_ptr<Allocator> allocator);

}  // namespace mxopt::cuda
