// A hint for the compiler about pointers from tables.
#pragma once

namespace mxopt::cuda {

/// Says that a pointer from a table is one to device memory, for which there are shorter instructions.
template <class T>
__device__ __forceinline__ T* global(T* pointer) {
  __builtin_assume(__isGlobal(pointer));
  return pointer;
}

}  // namespace mxopt::cuda
