// The Adam update of four elements on a device: the bits of adam_update(), with fewer instructions.
//
// A correctly rounded quotient of ordinary numbers needs no test of its operands: an approximation q of a / b
// is improved by q + (a - b q) / b, where a - b q is exact (Markstein, "Computation of elementary functions
// on the IBM RISC System/6000 processor", 1990). Two of the three divisors are the same for all elements, so
// that their reciprocals are known. Four elements at a time are tested for being ordinary; where one is not,
// all four take the plain formula.
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
__device__ __forceinline__ float divide_ordinary(float a, float b) {
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(b));
  r = __fmaf_rn(__fmaf_rn(-b, r, 1.0f), r, r);
  return divide_ordinary(a, b, r);
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

/// The plain formula, out of line: it is long, and seldom taken.
static __device__ __noinline__ AdamElement adam_update_any(AdamElement old, float grad,
                                                           const AdamScalars* scalars) {
  return adam_update(old, grad, *scalars);
}

/// p, m, v := adam_update() of four elements.
__device__ __forceinline__ void adam_update4(float (&p)[4], float (&m)[4], float (&v)[4],
                                             const float (&grad)[4], const AdamConstants& constants) {
  const AdamScalars& s = constants.scalars;
  float new_m[4], new_v[4];
  bool are_ordinary = constants.are_ordinary;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float scaled = grad[i] * s.grad_factor;
    const float g = s.decoupled ? scaled : __fmaf_rn(s.weight_decay, p[i], scaled);
    new_m[i] = __fmaf_rn(s.omb1, g, s.beta1 * m[i]);
    new_v[i] = __fmaf_rn(s.omb2 * g, g, s.beta2 * v[i]);
    are_ordinary = are_ordinary && is_ordinary_m(new_m[i]) && is_ordinary_v(new_v[i]);
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
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const AdamElement now = adam_update_any({p[i], m[i], v[i]}, grad[i], constants.memory);
    p[i] = now.p;
    m[i] = now.m;
    v[i] = now.v;
  }
}

}  // namespace mxopt::cuda
