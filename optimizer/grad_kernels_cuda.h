// The CUDA twin of grad_kernels.h, which picks it.
#pragma once

#include <memory>

#include "mxopt/optimizer/grad_kernels.h"

namespace mxopt::cuda {

std::unique_ptr<GradKernels> make_grad_kernels(const GradTables& tables, Device device,
                                               std::shared_ptr<Allocator> allocator);

}  // namespace mxopt::cuda
