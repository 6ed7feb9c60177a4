// Host loops over one run or block of values: rounding, maxima, encoding, decoding.
//
// Everything here is inlined into its caller, so that a caller marked MXOPT_HOST_CLONES gets these loops in
// each instruction set. No instruction set changes a bit of the result. Pointers of one call do not overlap.
#pragma once

#include <cstdint>

#include "mxopt/params/bf16.h"
#include "mxopt/quant/e4m3.h"
#include "mxopt/quant/e8m0.h"
#include "mxopt/quant/mxfp8.h"

/// Marks a function to be compiled for several x86 levels, the best of which is chosen when the program is
/// loaded. The outlined body of an OpenMP region is not cloned: mark what the region calls, not what contains
/// the region.
#if defined(__GNUC__) && !defined(__clang__) && defined(__x86_64__) && defined(__gnu_linux__) && \
    !defined(MXOPT_NO_HOST_CLONES)
#define MXOPT_HOST_CLONES __attribute__((target_clones("default", "arch=x86-64-v3", "arch=x86-64-v4")))
#else
#define MXOPT_HOST_CLONES
#endif

namespace mxopt::host {

/// w[i] := in[i] rounded to BF16.
[[gnu::always_inline]] inline void round_to_bf16(const float* __restrict in, float* __restrict w,
                                                 std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) w[i] = bf16_rne(in[i]);
}

/// w[i] := in[i], exactly.
[[gnu::always_inline]] inline void widen_bf16(const Bf16* __restrict in, float* __restrict w,
                                              std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) w[i] = bf16_to_fp32(in[i]);
}

/// The largest of the bits of |w[0..32)|, as an unsigned integer: a NaN is larger than everything else.
[[gnu::always_inline]] inline std::uint32_t block_amax_bits(const float* w) {
  std::uint32_t amax = 0;
  for (std::int64_t i = 0; i < kBlockElems; ++i) {
    const std::uint32_t magnitude = float_to_bits(w[i]) & 0x7FFFFFFFu;
    amax = magnitude > amax ? magnitude : amax;
  }
  return amax;
}

/// amax[j] := max(amax[j], bits of |w[j]|), as unsigned integers.
[[gnu::always_inline]] inline void column_amax_bits(std::uint32_t* __restrict amax, const float* __restrict w,
                                                    std::int64_t n) {
  for (std::int64_t j = 0; j < n; ++j) {
    const std::uint32_t magnitude = float_to_bits(w[j]) & 0x7FFFFFFFu;
    amax[j] = magnitude > amax[j] ? magnitude : amax[j];
  }
}

/// out[i] := E4M3 of w[i] * reciprocal, for the 32 values of a row block.
[[gnu::always_inline]] inline void encode_block(const float* __restrict w, float reciprocal,
                                                std::uint8_t* __restrict out) {
  for (std::int64_t i = 0; i < kBlockElems; ++i) {
    out[i] = static_cast<std::uint8_t>(e4m3_from_fp32(w[i] * reciprocal));
  }
}

/// out[j] := E4M3 of w[j] * reciprocals[j]: a piece of one row, each element with the scale of its column
/// block.
[[gnu::always_inline]] inline void encode_columns(const float* __restrict w,
                                                  const float* __restrict reciprocals,
                                                  std::uint8_t* __restrict out, std::int64_t n) {
  for (std::int64_t j = 0; j < n; ++j) {
    out[j] = static_cast<std::uint8_t>(e4m3_from_fp32(w[j] * reciprocals[j]));
  }
}

/// out[j] := value of codes[j] * scales[j].
[[gnu::always_inline]] inline void decode(const std::uint8_t* __restrict codes,
                                          const float* __restrict scales, float* __restrict out,
                                          std::int64_t n) {
  for (std::int64_t j = 0; j < n; ++j) out[j] = e4m3_value(codes[j]) * scales[j];
}

/// How many of w[0..n) are NaN or infinite; n < 2^31.
[[gnu::always_inline]] inline std::int64_t count_nonfinite(const float* w, std::int64_t n) {
  std::uint32_t count = 0;
  for (std::int64_t i = 0; i < n; ++i) count += (float_to_bits(w[i]) & 0x7F800000u) == 0x7F800000u ? 1u : 0u;
  return count;
}

}  // namespace mxopt::host
