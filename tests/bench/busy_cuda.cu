#include <cstdint>

#include "bench/busy_cuda.h"

#include "mxopt/params/cuda_handles.h"

namespace mxopt::bench {

namespace {

__device__ std::uint64_t device_ns() {
  std::uint64_t ns = 0;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns));
  return ns;
}

__global__ void busy_kernel(std::uint64_t ns) {
  const std::uint64_t begin = device_ns();
  while (device_ns() - begin < ns) {
  }
}

}  // namespace

void keep_busy(double us, StreamRef stream) {
  busy_kernel<<<1, 1, 0, cuda::native(stream)>>>(static_cast<std::uint64_t>(us * 1000));
  MXOPT_CUDA_CHECK(cudaGetLastError());
}

}  // namespace mxopt::bench
