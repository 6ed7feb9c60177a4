// BF16 as a number: conversions from and to FP32. Here and not in quant/, since collectives/ sums BF16 too.
#pragma once

#include <bit>
#include <cstdint>

#include "mxopt/params/dtype.h"
#include "mxopt/params/host_device.h"

namespace mxopt {

MXOPT_HD float bits_to_float(std::uint32_t bits) {
#if defined(__CUDA_ARCH__)
  return __uint_as_float(bits);
#else
  return std::bit_cast<float>(bits);
#endif
}

MXOPT_HD std::uint32_t float_to_bits(float value) {
#if defined(__CUDA_ARCH__)
  return __float_as_uint(value);
#else
  return std::bit_cast<std::uint32_t>(value);
#endif
}

MXOPT_HD float bf16_to_fp32(Bf16 value) {
  return bits_to_float(static_cast<std::uint32_t>(value.bits) << 16);
}

/// Bits of `value` rounded to BF16, to nearest even; beyond the range: infinity; NaN: 0x7FC0.
MXOPT_HD std::uint32_t bf16_rne_bits(std::uint32_t fp32_bits) {
  const std::uint32_t rounded = (fp32_bits + 0x7FFFu + ((fp32_bits >> 16) & 1u)) >> 16;
  return (fp32_bits & 0x7FFFFFFFu) > 0x7F800000u ? 0x7FC0u : rounded;
}

MXOPT_HD Bf16 fp32_to_bf16(float value) {
  return Bf16{static_cast<std::uint16_t>(bf16_rne_bits(float_to_bits(value)))};
}

/// `value` rounded to BF16 and back.
MXOPT_HD float bf16_rne(float value) {
  return bits_to_float(bf16_rne_bits(float_to_bits(value)) << 16);
}

}  // namespace mxopt
