// The Adam update of ONE element, and the few numbers a step needs for it.
//
//   g  = grad * grad_factor          L2 Adam: g = g + wd * p
//   m' = beta1 * m + (1 - beta1) * g
//   v' = beta2 * v + (1 - beta2) * g * g
//   u  = (m' / bc1) / (sqrt(v' / bc2) + eps)      AdamW: u = u + wd * p
//   p' = p - lr * u                  bc1 = 1 - beta1^t, bc2 = 1 - beta2^t, t = taken steps, this one included
//
// Each fma() below is one rounding and nothing else is contracted, so host and device give the same bits.
// Source: Kingma and Ba, "Adam" (2015), and Loshchilov and Hutter, "Decoupled Weight Decay Regularization"
// (2019).
#pragma once

#include <cmath>
#include <cstdint>

#include "mxopt/params/host_device.h"

namespace mxopt {

/// Scalars of one step and param group, in FP32.
struct AdamScalars {
  float beta1 = 0, beta2 = 0;
  float omb1 = 1, omb2 = 1;  // 1 - beta, from the double betas
  float bc1 = 1, bc2 = 1;
  float eps = 0;
  float lr = 0;
  float weight_decay = 0;
  float grad_factor = 1;
  bool decoupled = true;  // AdamW; false: L2 Adam
};

struct AdamElement {
  float p, m, v;
};

/// (m' / bc1) / (sqrt(v' / bc2) + eps).
MXOPT_HD float adam_ratio(float m, float v, const AdamScalars& s) {
  return (m / s.bc1) / (std::sqrt(v / s.bc2) + s.eps);
}

MXOPT_HD AdamElement adam_update(AdamElement old, float grad, const AdamScalars& s) {
  const float scaled = grad * s.grad_factor;
  const float g = s.decoupled ? scaled : std::fma(s.weight_decay, old.p, scaled);
  const float m = std::fma(s.omb1, g, s.beta1 * old.m);
  const float v = std::fma(s.omb2 * g, g, s.beta2 * old.v);
  const float ratio = adam_ratio(m, v, s);
  const float u = s.decoupled ? std::fma(s.weight_decay, old.p, ratio) : ratio;
  const float p = std::fma(-s.lr, u, old.p);
  return {p, m, v};
}

/// base^exponent by binary exponentiation, the same on host and device; exponent >= 0.
MXOPT_HD double integer_power(double base, std::int64_t exponent) {
  double result = 1;
  for (; exponent > 0; exponent >>= 1) {
    if ((exponent & 1) != 0) result *= base;
    base *= base;
  }
  return result;
}

}  // namespace mxopt
