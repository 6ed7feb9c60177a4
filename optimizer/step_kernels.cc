#include "mxopt/optimizer/step_kernels.h"

#include "mxopt/optimizer/step_kernels_host.h"
#if MXOPT_WITH_CUDA
#include "mxopt/optimizer/step_kernels_cuda.h"
#endif

namespace mxopt {

std::unique_ptr<StepKernels> StepKernels::make(StepTables tables, Device device,
                                               [[maybe_unused]] std::shared_ptr<Allocator> allocator) {
  if (device.kind == DeviceKind::kHost) return host::make_step_kernels(std::move(tables));
#if MXOPT_WITH_CUDA
  if (device.kind == DeviceKind::kCuda) {
    if (allocator == nullptr) allocator = default_allocator(device);
    return cuda::make_step_kernels(std::move(tables), device, std::move(allocator));
  }
#endif
  throw ConfigError(
      "parallel.device: cuda was asked for, but this build has no CUDA backend (MXOPT_WITH_CUDA=ON at "
      "configuration switches it on); allowed: host");
}

}  // namespace mxopt
