// The E8M0 block scale: code of a block's maximum, value of a code, and the factor that a block is multiplied
// by. The rule is numerics contract section 1, steps 3 to 5 and 7.
#pragma once

#include <cstdint>

#include "mxopt/params/bf16.h"
#include "mxopt/params/host_device.h"

namespace mxopt {

inline constexpr std::uint8_t kE8m0Nan = 0xFF;

/// Code of p = amax / 448, rounded up: the smallest power of two that is at least p; NaN gives 0xFF.
MXOPT_HD std::uint32_t e8m0_from_quotient_bits(std::uint32_t bits) {
  const std::uint32_t exponent = bits >> 23;
  const std::uint32_t mantissa = bits & 0x7FFFFFu;
  // A subnormal p rounds up to 2^-127 (code 0) or, above that, to 2^-126 (code 1).
  const std::uint32_t threshold = exponent == 0 ? 0x400000u : 0u;
  std::uint32_t code = exponent + (mantissa > threshold ? 1u : 0u);
  code = code > 0xFEu ? 0xFEu : code;
  return bits > 0x7F800000u ? static_cast<std::uint32_t>(kE8m0Nan) : code;
}

/// Code of a block whose largest |w| has these FP32 bits (sign bit clear; NaN bits are the largest of all).
/// p = amax * fp32(1/448); subnormals are kept.
MXOPT_HD std::uint32_t e8m0_from_amax_bits(std::uint32_t amax_bits) {
  return e8m0_from_quotient_bits(float_to_bits(bits_to_float(amax_bits) * bits_to_float(0x3B124925u)) &
                                 0x7FFFFFFFu);
}

/// 2^(code - 127); code 0 is 2^-127, code 0xFF is NaN.
MXOPT_HD float e8m0_value(std::uint32_t code) {
  const std::uint32_t bits = code == 0 ? 0x00400000u : code << 23;
  return bits_to_float(code == 0xFFu ? 0x7FC00000u : bits);
}

/// 2^(127 - code), what data is multiplied by before it is encoded; code 0xFE is 2^-127, code 0xFF is NaN.
MXOPT_HD float e8m0_reciprocal(std::uint32_t code) {
  const std::uint32_t bits = code == 0xFEu ? 0x00400000u : (254u - code) << 23;
  return bits_to_float(code == 0xFFu ? 0x7FC00000u : bits);
}

}  // namespace mxopt
