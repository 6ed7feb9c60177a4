// How the kernels of every layer are launched: each may begin before the kernel in front of it in its stream
// is done. Its first instructions and the reading of tables that never change then cost no time.
//
// Rule for a kernel: release_next_launch() and wait_for_former_launches() at its start, on every path; before
// the wait it reads nothing but tables, and writes nothing. What earlier kernels wrote is read with ordinary
// loads and not through the non-coherent path, which a compiler may move in front of the wait.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <type_traits>

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

/// The same; nothing that is read with the help of `pointer` can be moved in front of it.
template <class T>
__device__ __forceinline__ void wait_for_former_launches(T*& pointer) {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" : "+l"(pointer) : : "memory");
#endif
}

/// Says that a pointer from a table is one to device memory, for which there are shorter instructions.
template <class T>
__device__ __forceinline__ T* global(T* pointer) {
  __builtin_assume(__isGlobal(pointer));
  return pointer;
}

/// Whether the code that a device runs of this program has the two instructions above: of the architectures
/// that it was compiled for, the device takes the newest that it can run.
inline bool can_overlap_launches(int device) {
  constexpr int kCompiled[] = {__CUDA_ARCH_LIST__};
  int major = 0;
  int minor = 0;
  MXOPT_CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
  MXOPT_CUDA_CHECK(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device));
  const int runs = 100 * major + 10 * minor;
  int newest = 0;
  for (const int compiled : kCompiled) newest = compiled <= runs ? std::max(newest, compiled) : newest;
  return newest >= 900;
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
  config.numAttrs = overlap && can_overlap_launches(device) ? 1 : 0;
  MXOPT_CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, args...));
}

}  // namespace mxopt::cuda
