// The E4M3 data byte: sign, 4 exponent bits (bias 7), 3 mantissa bits; no infinity, NaN is 0x7F.
// The rule is numerics contract section 1, steps 6 and 7.
#pragma once

#include <cstdint>

#include "mxopt/params/bf16.h"
#include "mxopt/params/host_device.h"

namespace mxopt {

/// Nearest E4M3 of `value`, ties to even, saturating at +-448; NaN gives 0x7F; a zero keeps its sign.
MXOPT_HD std::uint32_t e4m3_from_fp32(float value) {
  const std::uint32_t bits = float_to_bits(value);
  const std::uint32_t sign = bits & 0x80000000u;
  const std::uint32_t magnitude = bits & 0x7FFFFFFFu;
  // Saturation before rounding is exact: 448 is the largest value, and all above rounds or saturates to it.
  const std::uint32_t clamped = magnitude > 0x43E00000u ? 0x43E00000u : magnitude;
  // Why: the code is built in bits 31..24, where the sign is, and shifted down at the very end. So a vector
  // loop narrows one value per element to bytes, not sign, code and NaN mask each. Normal results, |x| >=
  // 2^-6: keep 3 mantissa bits, to nearest even, and move the exponent bias from 127 to 7.
  const std::uint32_t normal = (clamped + (0x7FFFFu - (120u << 23)) + ((clamped >> 20) & 1u)) << 4;
  // Subnormal results are multiples of 2^-9: the FP32 addition of 2^14 rounds to one, and the lowest byte of
  // the sum counts them.
  const std::uint32_t subnormal = float_to_bits(bits_to_float(clamped) + 16384.0f) << 24;
  const std::uint32_t code = clamped < 0x3C800000u ? subnormal : normal;
  return (magnitude > 0x7F800000u ? 0x7F000000u : code | sign) >> 24;
}

/// Value of an E4M3 byte; 0x7F and 0xFF are NaN.
MXOPT_HD float e4m3_value(std::uint32_t code) {
  const std::uint32_t sign = (code & 0x80u) << 24;
  const std::uint32_t magnitude = code & 0x7Fu;
  const std::uint32_t normal = (magnitude << 20) + (120u << 23);
  const std::uint32_t subnormal = float_to_bits(static_cast<float>(magnitude) * 0.001953125f);
  const std::uint32_t bits = magnitude < 8u ? subnormal : normal;
  return bits_to_float(magnitude == 0x7Fu ? 0x7FC00000u : bits | sign);
}

}  // namespace mxopt
