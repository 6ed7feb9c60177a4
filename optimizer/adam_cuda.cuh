// The Adam update of four elements on a device: the bits of adam_update(), with fewer instructions.
//
// A correctly rounded quotient of ordinary numbers needs no test of its operands: an approximation q of a / b
// is improved by q + (a - b q) / b, where a - b q is exact (Markstein, "Computation of elementary functions
// on the IBM RISC System/6000 processor", 1990). Two of the three divisors are the same for all elements, so
// that their reciprocals are known. Four elements at a time are tested for being ordinary. Where one is not,
// as where gradients are 0 for so long that the first moment is subnormal, all four are computed one by one.
#pragma once

#include <cstdint>

#include "mxopt/optimizer/adam_math.h"
#include "mxopt/params/bf16.h"

namespace mxopt::cuda {

/// The scalars of a group with the reciprocals of its divisors.
struct AdamConstants {
  AdamConstants() = default;
  __device__ explicit AdamConstants(const AdamScalars* from)
      : memory(from),
        scalars(*from),
        reciprocal1(1.0f / scalars.bc1),
        reciprocal2(1.0f / scalars.bc2),
        are_ordinary(scalars.bc1 >= 0x1p-20f && scalars.bc1 <= 1.0f && scalars.bc2 >= 0x1p-20f &&
                     scalars.bc2 <= 1.0f && scalars.eps >= 0.0f && scalars.eps <= 1.0f),
        has_eps(are_ordinary && scalars.eps >= 0x1p-40f) {}

  const AdamScalars* memory = nullptr;
  AdamScalars scalars;
  float reciprocal1 = 1, reciprocal2 = 1;
  bool are_ordinary = false;
  bool has_eps = false;  // and a divisor is not 0, nor very small, where v is 0
};

/// a / b, where r is the correctly rounded 1 / b, or nearly so, and nothing overflows or is subnormal.
__device__ __forceinline__ float divide_ordinary(float a, float b, float r) {
  float q = a * r;
  q = __fmaf_rn(__fmaf_rn(-b, q, a), r, q);
  return __fmaf_rn(__fmaf_rn(-b, q, a), r, q);
}
__device__ __forceinline__ float reciprocal_ordinary(float b) {
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(b));
  return __fmaf_rn(__fmaf_rn(-b, r, 1.0f), r, r);
}
__device__ __forceinline__ float divide_ordinary(float a, float b) {
  return divide_ordinary(a, b, reciprocal_ordinary(b));
}
/// The root of an ordinary number or of 0. That it is right for all of them rests on the device's
/// approximation; a test tries all.
__device__ __forceinline__ float sqrt_ordinary(float a) {
  float r;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(fmaxf(a, 0x1p-100f)));  // finite for 0 too
  const float root = a * r;
  return __fmaf_rn(__fmaf_rn(-root, root, a), 0.5f * r, root);
}

/// +0, or |m| from 2^-60 to below 2^60; 0, or v from 2^-90 to below 2^60. Then with the limits of
/// AdamConstants every quotient is 0 or lies between 2^-101 and 2^126, and every remainder is exact. The
/// quotients of -0 would be +0.
__device__ __forceinline__ bool is_ordinary_m(float m) {
  constexpr std::uint32_t kLow = (127u - 60u) << 23;
  constexpr std::uint32_t kHigh = (127u + 60u) << 23;
  const std::uint32_t bits = float_to_bits(m);
  return (bits & 0x7FFFFFFFu) - kLow < kHigh - kLow || bits == 0;
}
__device__ __forceinline__ bool is_ordinary_v(float v, bool has_eps) {
  constexpr std::uint32_t kLow = (127u - 90u) << 23;
  constexpr std::uint32_t kHigh = (127u + 60u) << 23;
  const std::uint32_t bits = float_to_bits(v);
  return bits - kLow < kHigh - kLow || (bits == 0 && has_eps);
}

/// Bits of |m| and v up to below 2^60, 0 and subnormal numbers among them.
__device__ __forceinline__ bool is_small(float number) {
  return float_to_bits(number) < (127u + 60u) << 23;
}

/// a / b for any finite a, where r is 1 / b with an error of up to 2^-21 of it, and 2^-80 < b < 2^80. The
/// quotient of two numbers of 24 bits is exactly between two neighbouring numbers or at least 2^-49 of it
/// away from there; in FP64 it is improved to an error of 2^-52, and to none where it has few bits.
__device__ __forceinline__ float divide_small(float a, float b, float r) {
  const double numerator = static_cast<double>(a);
  const double divisor = static_cast<double>(b);
  const double reciprocal = static_cast<double>(r);
  double q = numerator * reciprocal;
  q = __fma_rn(__fma_rn(-divisor, q, numerator), reciprocal, q);
  q = __fma_rn(__fma_rn(-divisor, q, numerator), reciprocal, q);
  return a == 0 ? a : __double2float_rn(q);  // q has lost the sign of a zero
}
/// The root of any a from 0 to 2^80.
__device__ __forceinline__ float sqrt_small(float a) {
  const bool is_tiny = a < 0x1p-60f;
  const float root = sqrt_ordinary(is_tiny ? a * 0x1p64f : a);
  return is_tiny ? root * 0x1p-32f : root;
}

// The last factor of an update where numbers are not ordinary, out of line: long, and seldom taken.

static __device__ __noinline__ float ratio_any(float m, float v, const AdamScalars* scalars) {
  return adam_ratio(m, v, *scalars);
}
/// Of small numbers, and with an eps.
static __device__ __noinline__ float ratio_small(float m, float v, const AdamScalars* scalars,
                                                 float reciprocal1, float reciprocal2) {
  const float root = sqrt_small(divide_small(v, scalars->bc2, reciprocal2));
  const float divisor = root + scalars->eps;
  return divide_small(divide_small(m, scalars->bc1, reciprocal1), divisor, reciprocal_ordinary(divisor));
}

/// p, m, v := adam_update() of four elements.
__device__ __forceinline__ void adam_update4(float (&p)[4], float (&m)[4], float (&v)[4],
                                             const float (&grad)[4], const AdamConstants& constants) {
  const AdamScalars& s = constants.scalars;
  bool are_ordinary = constants.are_ordinary;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float scaled = grad[i] * s.grad_factor;
    const float g = s.decoupled ? scaled : __fmaf_rn(s.weight_decay, p[i], scaled);
    m[i] = __fmaf_rn(s.omb1, g, s.beta1 * m[i]);
    v[i] = __fmaf_rn(s.omb2 * g, g, s.beta2 * v[i]);
    are_ordinary = are_ordinary && is_ordinary_m(m[i]) && is_ordinary_v(v[i], constants.has_eps);
  }
  float ratio[4];
  if (are_ordinary) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float root = sqrt_ordinary(divide_ordinary(v[i], s.bc2, constants.reciprocal2));
      ratio[i] = divide_ordinary(divide_ordinary(m[i], s.bc1, constants.reciprocal1), root + s.eps);
    }
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      ratio[i] = constants.has_eps && is_small(fabsf(m[i])) && is_small(v[i])
                     ? ratio_small(m[i], v[i], constants.memory, constants.reciprocal1, constants.reciprocal2)
                     : ratio_any(m[i], v[i], constants.memory);
    }
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float u = s.decoupled ? __fmaf_rn(s.weight_decay, p[i], ratio[i]) : ratio[i];
    p[i] = __fmaf_rn(-s.lr, u, p[i]);
  }
}

}  // namespace mxopt::cuda
