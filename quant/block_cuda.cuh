// Device functions on pairs of BF16 numbers: rounding, maxima over blocks, encoding.
//
// A pair is 32 bits, the first number in the low half. Magnitudes (sign bits clear) are compared as unsigned
// integers, so a NaN is larger than everything else and is never lost. Every function gives the bits of its
// host twin in block_host.h; a NaN may have another payload on the way, which no byte that is written depends
// on.
#pragma once

#include <cstdint>

#include <cuda_bf16.h>
#include <cuda_fp8.h>

#include "mxopt/params/bf16.h"
#include "mxopt/quant/e4m3.h"
#include "mxopt/quant/e8m0.h"

namespace mxopt::cuda {

using Bf16Pair = std::uint32_t;

__device__ __forceinline__ Bf16Pair round_to_bf16(float first, float second) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(first, second);
  return *reinterpret_cast<const Bf16Pair*>(&pair);
}
__device__ __forceinline__ float first_value(Bf16Pair pair) {
  return bits_to_float(pair << 16);
}
__device__ __forceinline__ float second_value(Bf16Pair pair) {
  return bits_to_float(pair & 0xFFFF0000u);
}

__device__ __forceinline__ Bf16Pair magnitudes(Bf16Pair pair) {
  return pair & 0x7FFF7FFFu;
}
/// The larger magnitude of each half.
__device__ __forceinline__ Bf16Pair larger(Bf16Pair a, Bf16Pair b) {
  return __vmaxu2(a, b);
}
/// {largest magnitude of a, largest magnitude of b}.
__device__ __forceinline__ Bf16Pair fold(Bf16Pair a, Bf16Pair b) {
  return __vmaxu2(__byte_perm(a, b, 0x5410), __byte_perm(a, b, 0x7632));
}
/// The largest magnitudes over each group of `kLanes` neighbouring lanes of a warp, a power of two. All 32
/// lanes call.
template <int kLanes>
__device__ __forceinline__ Bf16Pair largest_of_lanes(Bf16Pair pair) {
#pragma unroll
  for (int distance = 1; distance < kLanes; distance *= 2) {
    pair = larger(pair, __shfl_xor_sync(0xFFFFFFFFu, pair, distance));
  }
  return pair;
}

/// Maxima over the rows of a block, spread over the lanes that share it. pairs[i] holds this lane's largest
/// magnitudes of rows 2 i and 2 i + 1 of eight rows. Of the `kLanes` neighbouring lanes of one block, lane k
/// gets the maxima of 8 / kLanes rows, from row k * 8 / kLanes on: with 4 lanes a pair, with 8 lanes one
/// number in the low 16 bits. All 32 lanes call.
///
/// Why: each exchange halves what a lane is in charge of, so 4 shuffles do what 12 do when every lane ends
/// with everything.
template <int kLanes>
__device__ __forceinline__ std::uint32_t largest_of_rows(const Bf16Pair (&pairs)[4], unsigned lane) {
  static_assert(kLanes == 4 || kLanes == 8);
  constexpr int kFar = kLanes / 2;
  constexpr int kNear = kLanes / 4;
  const bool far = (lane & kFar) != 0;
  const bool near = (lane & kNear) != 0;
  const Bf16Pair first =
      larger(far ? pairs[2] : pairs[0], __shfl_xor_sync(0xFFFFFFFFu, far ? pairs[0] : pairs[2], kFar));
  const Bf16Pair second =
      larger(far ? pairs[3] : pairs[1], __shfl_xor_sync(0xFFFFFFFFu, far ? pairs[1] : pairs[3], kFar));
  Bf16Pair mine = larger(near ? second : first, __shfl_xor_sync(0xFFFFFFFFu, near ? first : second, kNear));
  if constexpr (kLanes == 8) {
    mine = larger(mine, __shfl_xor_sync(0xFFFFFFFFu, mine, 1));
    mine = (lane & 1) != 0 ? mine >> 16 : mine & 0xFFFFu;
  }
  return mine;
}

/// Whether a magnitude, in the low 16 bits, is infinite or NaN.
__device__ __forceinline__ bool is_nonfinite(std::uint32_t magnitude) {
  return magnitude >= 0x7F80u;
}
/// Code of the block whose largest magnitude is the low 16 bits.
__device__ __forceinline__ std::uint32_t code_of(std::uint32_t magnitude) {
  return e8m0_from_amax_bits(magnitude << 16);
}

/// E4M3 bytes of four values, the first in the lowest byte.
__device__ __forceinline__ std::uint32_t encode4(float a, float b, float c, float d) {
#if __CUDA_ARCH__ >= 890
  const std::uint32_t low = __nv_cvt_float2_to_fp8x2(make_float2(a, b), __NV_SATFINITE, __NV_E4M3);
  const std::uint32_t high = __nv_cvt_float2_to_fp8x2(make_float2(c, d), __NV_SATFINITE, __NV_E4M3);
  return low | high << 16;
#else
  return e4m3_from_fp32(a) | e4m3_from_fp32(b) << 8 | e4m3_from_fp32(c) << 16 | e4m3_from_fp32(d) << 24;
#endif
}
/// The same for two pairs, multiplied by one factor: a piece of a row block.
__device__ __forceinline__ std::uint32_t encode_row(Bf16Pair a, Bf16Pair b, float factor) {
  return encode4(first_value(a) * factor, second_value(a) * factor, first_value(b) * factor,
                 second_value(b) * factor);
}

/// The same with a factor for each value: a piece of one row of four column blocks.
__device__ __forceinline__ std::uint32_t encode_columns(Bf16Pair a, Bf16Pair b, const float* factors) {
  return encode4(first_value(a) * factors[0], second_value(a) * factors[1], first_value(b) * factors[2],
                 second_value(b) * factors[3]);
}

/// Bytes [shift, shift + 16) of the 32 bytes of `low` and then `high`; shift < 16.
__device__ __forceinline__ uint4 bytes_from(uint4 low, uint4 high, std::uint32_t shift) {
  std::uint32_t word[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
  for (int i = 0; i < 6; ++i) word[i] = (shift & 8u) != 0 ? word[i + 2] : word[i];
#pragma unroll
  for (int i = 0; i < 5; ++i) word[i] = (shift & 4u) != 0 ? word[i + 1] : word[i];
  const std::uint32_t bits = 8 * (shift & 3u);
  return make_uint4(__funnelshift_r(word[0], word[1], bits), __funnelshift_r(word[1], word[2], bits),
                    __funnelshift_r(word[2], word[3], bits), __funnelshift_r(word[3], word[4], bits));
}

}  // namespace mxopt::cuda
