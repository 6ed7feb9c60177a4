// MXOPT_HD marks an inline function that host and device code both use.
#pragma once

#if defined(__CUDACC__)
#define MXOPT_HD __host__ __device__ __forceinline__
#else
#define MXOPT_HD [[gnu::always_inline]] inline
#endif
