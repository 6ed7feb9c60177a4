// How the kernels of every layer are launched: each may begin before the kernel in front of it in its stream
// is done. Its first instructions and the reading of tables that never change then cost no time.
//
// Rule for a kernel: wait_for_former_launches() at its start, on every path; before the wait it reads nothing
// but tables, and writes nothing. What earlier kernels wrote is read with ordinary loads and not through the
// non-coherent path, which a compiler may move in front of the wait.
// release_next_launch() is not in kernels that write weights: a kernel of the caller may load weights before
// its own wait, as if they never changed.
#pragma once

#include <cstdint>
#include <limits>
#include <map>
#include <mutex>
#include <type_traits>
#include <utility>

#include <cuda_runtime.h>

#include "mxopt/params/cuda_handles.h"

namespace mxopt::cuda {

/// Lets the next kernel of the stream be launched as soon as every block of this one has begun.
__device__ __forceinline__ void release_next_launch() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

/// Returns when all earlier kernels of the stream are done and what they wrote can be read.
__device__ __forceinline__ void wait_for_former_launches() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/// Whether the code of a kernel that a device runs has the two instructions above. It is that of another
/// architecture where the driver compiles it for the device.
inline bool can_overlap_launches(const void* kernel, int device) {
  static std::mutex mutex;
  static std::map<std::pair<const void*, int>, bool> known;
  const std::lock_guard lock(mutex);
  const auto [at, is_new] = known.try_emplace({kernel, device}, false);
  if (is_new) {
    cudaFuncAttributes attributes{};
    MXOPT_CUDA_CHECK(cudaFuncGetAttributes(&attributes, kernel));
    at->second = attributes.ptxVersion >= 90;
  }
  return at->second;
}

/// Launches `blocks` blocks of `threads` threads; none: nothing is done. `overlap`: as said above; without,
/// the kernel begins when everything before it is done.
template <class... Params>
void launch(int device, StreamRef stream, std::int64_t blocks, int threads, bool overlap,
            void (*kernel)(Params...), const std::type_identity_t<Params>&... args) {
  if (blocks == 0) return;
  MXOPT_CHECK_LE(blocks, std::numeric_limits<std::int32_t>::max());
  const DeviceGuard guard(device);
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.stream = native(stream);
  config.attrs = &early;
  config.numAttrs = overlap && can_overlap_launches(reinterpret_cast<const void*>(kernel), device) ? 1 : 0;
  MXOPT_CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, args...));
}

}  // namespace mxopt::cuda
