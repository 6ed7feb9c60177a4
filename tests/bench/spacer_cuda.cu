#include "bench/spacer_cuda.h"

#include "mxopt/params/cuda_handles.h"

namespace mxopt::bench {

namespace {

__global__ void spacer_kernel() {}

}  // namespace

void launch_spacer(StreamRef stream) {
  spacer_kernel<<<1, 32, 0, cuda::native(stream)>>>();
  MXOPT_CUDA_CHECK(cudaGetLastError());
}

}  // namespace mxopt::bench
