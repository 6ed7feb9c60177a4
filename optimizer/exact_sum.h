// Exact sum of non-negative doubles: 18 limbs of 32 bits, bit 0 worth 2^-298.
//
// Every FP64 sum of at most 128 squares of FP32 numbers is a multiple of 2^-298 and below 2^264, so it fits
// without a rounding, and integer addition is exact in any order: the result does not depend on threads,
// ranks or buckets.
#pragma once

#include <array>
#include <bit>
#include <cmath>
#include <cstdint>

#include "mxopt/params/host_device.h"

namespace mxopt {

inline constexpr int kSumLimbs = 18;
inline constexpr int kSumLowestBit = -298;

/// Elements whose squares are summed in FP64 before they go into the limbs, counted from a param's start.
inline constexpr std::int64_t kSumRunElems = 128;

/// limbs[k] counts units of 2^(32 k - 298). Between normalisations a limb may hold up to 2^31 additions.
using ExactSum = std::array<std::int64_t, kSumLimbs>;

/// Adds a finite, non-negative multiple of 2^-298. Limb k is limbs[k * stride].
MXOPT_HD void add_to_sum(std::int64_t* limbs, double value, int stride = 1) {
#if defined(__CUDA_ARCH__)
  const std::uint64_t bits = static_cast<std::uint64_t>(__double_as_longlong(value));
#else
  const std::uint64_t bits = std::bit_cast<std::uint64_t>(value);
#endif
  if (bits == 0) return;
  // value = mantissa * 2^(exponent - 1075); a multiple of 2^-298 is never subnormal.
  const std::uint64_t mantissa = (bits & 0xFFFFFFFFFFFFFu) | 0x10000000000000u;
  const int position = static_cast<int>(bits >> 52) - 1075 - kSumLowestBit;
  // A negative position only has zero bits below bit 0.
  const std::uint64_t whole = position < 0 ? mantissa >> -position : mantissa;
  const int place = position < 0 ? 0 : position;
  const int limb = place / 32;
  const int shift = place % 32;
  const std::uint64_t low = (whole & 0xFFFFFFFFu) << shift;
  const std::uint64_t high = (whole >> 32) << shift;
  std::int64_t* const lowest = limbs + limb * stride;
  *lowest += static_cast<std::int64_t>(low & 0xFFFFFFFFu);
  if (limb + 1 < kSumLimbs) lowest[stride] += static_cast<std::int64_t>((low >> 32) + (high & 0xFFFFFFFFu));
  if (limb + 2 < kSumLimbs) lowest[2 * stride] += static_cast<std::int64_t>(high >> 32);
}

/// Brings every limb but the last below 2^32.
MXOPT_HD void normalize_sum(std::int64_t* limbs) {
  for (int k = 0; k + 1 < kSumLimbs; ++k) {
    limbs[k + 1] += limbs[k] >> 32;
    limbs[k] &= 0xFFFFFFFF;
  }
}

/// The sum as a double, for normalised limbs.
MXOPT_HD double sum_value(const std::int64_t* limbs) {
  double value = 0;
  for (int k = kSumLimbs - 1; k >= 0; --k) {
    value += std::ldexp(static_cast<double>(limbs[k]), 32 * k + kSumLowestBit);
  }
  return value;
}

/// FP64 sum of 128 squares in one fixed tree; `squares` is overwritten.
MXOPT_HD double sum_run(double* squares) {
  for (int width = static_cast<int>(kSumRunElems) / 2; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) squares[i] += squares[i + width];
  }
  return squares[0];
}

}  // namespace mxopt
