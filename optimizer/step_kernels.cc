#include "mxopt/optimizer/step_kernels.h"

#include "mxopt/optimizer/grad_kernels_host.h"
#include "mxopt/optimizer/step_kernels_host.h"
#if MXOPT_WITH_CUDA
#include "mxopt/optimizer/grad_kernels_cuda.h"
#include "mxopt/optimizer/step_kernels_cuda.h"
#endif

namespace mxopt {

namespace {

[[noreturn]] void fail_missing_backend() {
  throw ConfigError(
      "parallel.device: cuda was asked for, but this build has no CUDA backend (MXOPT_WITH_CUDA=ON at "
      "configuration switches it on); allowed: host");
}

}  // namespace

std::unique_ptr<StepKernels> StepKernels::make(StepTables tables, Device device,
                                               [[maybe_unused]] std::shared_ptr<Allocator> allocator) {
  if (device.kind == DeviceKind::kHost) return host::make_step_kernels(std::move(tables));
#if MXOPT_WITH_CUDA
  if (device.kind == DeviceKind::kCuda) {
    if (allocator == nullptr) allocator = default_allocator(device);
    return cuda::make_step_kernels(std::move(tables), device, std::move(allocator));
  }
#endif
  fail_missing_backend();
}

std::unique_ptr<GradKernels> GradKernels::make(GradTables tables, Device device,
                                               [[maybe_unused]] std::shared_ptr<Allocator> allocator) {
  if (device.kind == DeviceKind::kHost) return host::make_grad_kernels(std::move(tables));
#if MXOPT_WITH_CUDA
  if (device.kind == DeviceKind::kCuda) {
    if (allocator == nullptr) allocator = default_allocator(device);
    return cuda::make_grad_kernels(tables, device, std::move(allocator));
  }
#endif
  fail_missing_backend();
}

int GradKernels::checked_pieces(TypedSpan to, ConstTypedSpan pieces, ReduceOp op) {
  MXOPT_CHECK(to.dtype == pieces.dtype, "sum_in_rank_order: pieces of " << dtype_name(pieces.dtype)
                                                                        << " into " << dtype_name(to.dtype));
  MXOPT_CHECK((to.dtype == DType::kFp32 || to.dtype == DType::kBf16) && op != ReduceOp::kMax,
              "sum_in_rank_order: " << op_name(op) << " of " << dtype_name(to.dtype)
                                    << "; allowed are sum and avg of fp32 and bf16");
  MXOPT_CHECK(to.elems % 8 == 0,
              "sum_in_rank_order: " << to.elems << " elements; allowed are multiples of 8");
  MXOPT_CHECK(to.elems == 0 ? pieces.elems == 0 : pieces.elems >= to.elems && pieces.elems % to.elems == 0,
              "sum_in_rank_order: " << pieces.elems << " elements of pieces are not a piece of " << to.elems
                                    << " for each rank");
  return to.elems == 0 ? 0 : static_cast<int>(pieces.elems / to.elems);
}

}  // namespace mxopt
