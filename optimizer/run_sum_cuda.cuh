// Sums of squares of gradients on a device, in the one tree of numerics section 4.
#pragma once

#include <cstdint>
#include <type_traits>

#include "mxopt/optimizer/exact_sum.h"
#include "mxopt/quant/block_cuda.cuh"

namespace mxopt::cuda {

/// Runs of gradients that a warp adds up at a time, two lanes for each in the end.
inline constexpr int kWarpRuns = 16;

/// Two neighbouring gradients, of which `elems` are there.
__device__ __forceinline__ float2 load_pair(const float* from, std::int64_t elems) {
  if (elems > 1) return *reinterpret_cast<const float2*>(from);
  return {elems > 0 ? from[0] : 0.0f, 0.0f};
}
__device__ __forceinline__ float2 load_pair(const Bf16* from, std::int64_t elems) {
  Bf16Pair pair = 0;
  if (elems > 1) {
    pair = *reinterpret_cast<const Bf16Pair*>(from);
  } else if (elems > 0) {
    pair = from[0].bits;
  }
  return {first_value(pair), second_value(pair)};
}

__device__ __forceinline__ double square(float value) {
  return static_cast<double>(value) * static_cast<double>(value);
}

/// Sums of the squares of kWarpRuns runs of 128, each in the tree of numerics section 4: lane l has elements
/// 2 l and 2 l + 1 of both halves of a run, so that the tree's first level is within the lane. At each
/// further level, i and i + 32, then i and i + 16, a lane gives half of its sums away and keeps the other
/// half, until it has one of one run: lanes 2 r and 2 r + 1 end with the sum of run r.
template <int kWidth>
__device__ __forceinline__ void sum_over_lanes(double (&sums)[2 * kWarpRuns]) {
  const bool is_upper = (threadIdx.x & kWidth) != 0;
#pragma unroll
  for (int i = 0; i < kWidth; ++i) {
    const double given = is_upper ? sums[i] : sums[i + kWidth];
    const double kept = is_upper ? sums[i + kWidth] : sums[i];
    sums[i] = kept + __shfl_xor_sync(0xFFFFFFFFu, given, kWidth);
  }
  if constexpr (kWidth > 1) sum_over_lanes<kWidth / 2>(sums);
}
template <class Grad>
__device__ __forceinline__ double sum_of_runs(const Grad* first, std::int64_t elems) {
  const int at = static_cast<int>(threadIdx.x % 32) * 2;
  const auto add = [&](auto is_whole, double(&sums)[2 * kWarpRuns]) {
#pragma unroll
    for (int run = 0; run < kWarpRuns; ++run) {
      constexpr std::int64_t kHalf = kSumRunElems / 2;
      const Grad* const from = first + run * kSumRunElems + at;
      const std::int64_t left = decltype(is_whole)::value ? kSumRunElems : elems - run * kSumRunElems - at;
      const float2 low = load_pair(from, left);
      const float2 high = load_pair(from + kHalf, left - kHalf);
      sums[2 * run] = square(low.x) + square(high.x);
      sums[2 * run + 1] = square(low.y) + square(high.y);
    }
  };
  double sums[2 * kWarpRuns];
  if (elems >= kWarpRuns * kSumRunElems) {
    add(std::true_type(), sums);
  } else {
    add(std::false_type(), sums);
  }
  sum_over_lanes<kWarpRuns>(sums);
  return sums[0] + __shfl_xor_sync(0xFFFFFFFFu, sums[0], 1);
}

}  // namespace mxopt::cuda
