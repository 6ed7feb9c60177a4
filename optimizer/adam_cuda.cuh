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
                     scalars.bc2 <= 1.0f && scalars.eps >= 0.0f && scalars.eps <= 1.0f) {}

  const AdamScalars* memory = nullptr;
  AdamScalars scalars;
  float reciprocal1 = 1, reciprocal2 = 1;
  bool are_ordinary = false;
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
/// The root of an ordinary number. That it is right for all of them rests on the device's approximation; a
/// test tries all.
__device__ __forceinline__ float sqrt_ordinary(float a) {
  float r;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(a));
  const float root = a * r;
  return __fmaf_rn(__fmaf_rn(-root, root, a), 0.5f * r, root);
}

/// Bits of |m| from 2^-60 to below 2^60, and of v from 2^-90 to below 2^60. Then with the limits of
/// AdamConstants every quotient lies between 2^-101 and 2^126, and every remainder is exact.
__device__ __forceinline__ bool is_ordinary_m(float m) {
  constexpr std::uint32_t kLow = (127u - 60u) << 23;
  constexpr std::uint32_t kHigh = (127u + 60u) << 23;
  return (float_to_bits(m) & 0x7FFFFFFFu) - kLow < kHigh - kLow;
}
__device__ __forceinline__ bool is_ordinary_v(float v) {
  constexpr std::uint32_t kLow = (127u - 90u) << 23;
  constexpr std::uint32_t kHigh = (127u + 60u) << 23;
  return float_to_bits(v) - kLow < kHigh - kLow;
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
  return a == 0 ? a : is_tiny ? root * 0x1p-32f : root;
}

/// One element; out of line: it is long, and seldom taken. The plain formula where numbers are not small.
/// Arguments are those of AdamConstants, one by one: a reference would put all of it into memory.
static __device__ __noinline__ AdamElement adam_update_any(AdamElement old, float grad,
                                                           const AdamScalars* memory, float reciprocal1,
                                                           float reciprocal2, bool are_ordinary) {
  const AdamScalars& s = *memory;
  const float scaled = grad * s.grad_factor;
  const float g = s.decoupled ? scaled : __fmaf_rn(s.weight_decay, old.p, scaled);
  const float m = __fmaf_rn(s.omb1, g, s.beta1 * old.m);
  const float v = __fmaf_rn(s.omb2 * g, g, s.beta2 * old.v);
  if (!are_ordinary || !is_small(fabsf(m)) || !is_small(v)) return adam_update(old, grad, s);
  const float divisor = sqrt_small(divide_small(v, s.bc2, reciprocal2)) + s.eps;
  if (divisor == 0) return adam_update(old, grad, s);
  const float ratio =
      divide_small(divide_small(m, s.bc1, reciprocal1), divisor, reciprocal_ordinary(divisor));
  const float u = s.decoupled ? __fmaf_rn(s.weight_decay, old.p, ratio) : ratio;
  return {__fmaf_rn(-s.lr, u, old.p), m, v};
}

/// p, m, v := adam_update() of four elements.
__device__ __forceinline__ void adam_update4(float (&p)[4], float (&m)[4], float (&v)[4],
                                             const float (&grad)[4], const AdamConstants& constants) {
  const AdamScalars& s = constants.scalars;
  float new_m[4], new_v[4];
  bool are_ordinary = constants.are_ordinary;
  bool are_zero = constants.are_ordinary && s.eps > 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float scaled = grad[i] * s.grad_factor;
    const float g = s.decoupled ? scaled : __fmaf_rn(s.weight_decay, p[i], scaled);
    new_m[i] = __fmaf_rn(s.omb1, g, s.beta1 * m[i]);
    new_v[i] = __fmaf_rn(s.omb2 * g, g, s.beta2 * v[i]);
    are_ordinary = are_ordinary && is_ordinary_m(new_m[i]) && is_ordinary_v(new_v[i]);
    are_zero = are_zero && new_m[i] == 0 && float_to_bits(new_v[i]) == 0;
  }
  if (are_ordinary) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float root = sqrt_ordinary(divide_ordinary(new_v[i], s.bc2, constants.reciprocal2));
      const float ratio =
          divide_ordinary(divide_ordinary(new_m[i], s.bc1, constants.reciprocal1), root + s.eps);
      const float u = s.decoupled ? __fmaf_rn(s.weight_decay, p[i], ratio) : ratio;
      p[i] = __fmaf_rn(-s.lr, u, p[i]);
      m[i] = new_m[i];
      v[i] = new_v[i];
    }
    return;
  }
  if (are_zero) {  // as rows of an embedding that no gradient has reached yet
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float u = s.decoupled ? __fmaf_rn(s.weight_decay, p[i], new_m[i]) : new_m[i];
      p[i] = __fmaf_rn(-s.lr, u, p[i]);
      m[i] = new_m[i];
      v[i] = 0;
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const AdamElement now =
        adam_update_any({p[i], m[i], v[i]}, grad[i], constants.memory, constants.reciprocal1,
                        constants.reciprocal2, constants.are_ordinary);
    p[i] = now.p;
    m[i] = now.m;
    v[i] = now.v;
  }
}

}  // namespace mxopt::cuda
