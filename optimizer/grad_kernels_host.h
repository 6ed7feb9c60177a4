// The host's part of grad_kernels.h, which picks it.
#pragma once

#include <memory>

#include "mxopt/optimizer/grad_kernels.h"

namespace mxopt::host {

std::unique_ptr<GradKernels> make_grad_kernels(GradTables tables);

}  // namespace mxopt::host
