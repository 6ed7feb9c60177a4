#include "mxopt/optimizer/step_kernels.h"

#include "mxopt/optimizer/step_kernels_host.h"

namespace mxopt {

std::unique_ptr<StepKernels> StepKernels::make(StepTables tables, Device device) {
  if (device.kind == DeviceKind::kHost) return host::make_step_kernels(std::move(tables));
  throw ConfigError("parallel.device: cuda was asked for, but this build has no CUDA backend; allowed: host");
}

}  // namespace mxopt
