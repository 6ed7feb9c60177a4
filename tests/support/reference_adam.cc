#include "support/reference_adam.h"

#include <cmath>
#include <cstddef>

namespace mxopt::reference {

namespace {

/// base^t by repeated squaring, in double.
double power(double base, std::int64_t t) {
  if (t == 0) return 1;
  double result = 1;
  while (t != 0) {
    if (t % 2 != 0) result = result * base;
    base = base * base;
    t = t / 2;
  }
  return result;
}

}  // namespace

void adam_step(AdamState<double>& state, std::span<const float> grad, const AdamSettings& settings,
               std::int64_t t) {
  const double bc1 = 1 - std::pow(settings.beta1, static_cast<double>(t));
  const double bc2 = 1 - std::pow(settings.beta2, static_cast<double>(t));
  for (std::size_t i = 0; i < state.p.size(); ++i) {
    double g = static_cast<double>(grad[i]) * settings.grad_factor;
    if (!settings.decoupled) g += settings.weight_decay * state.p[i];
    state.m[i] = settings.beta1 * state.m[i] + (1 - settings.beta1) * g;
    state.v[i] = settings.beta2 * state.v[i] + (1 - settings.beta2) * g * g;
    double u = (state.m[i] / bc1) / (std::sqrt(state.v[i] / bc2) + settings.eps);
    if (settings.decoupled) u += settings.weight_decay * state.p[i];
    state.p[i] -= settings.lr * u;
  }
}

void adam_step(AdamState<float>& state, std::span<const float> grad, const AdamSettings& settings,
               std::int64_t t) {
  const auto beta1 = static_cast<float>(settings.beta1);
  const auto beta2 = static_cast<float>(settings.beta2);
  const auto omb1 = static_cast<float>(1 - settings.beta1);
  const auto omb2 = static_cast<float>(1 - settings.beta2);
  const auto bc1 = static_cast<float>(1 - power(settings.beta1, t));
  const auto bc2 = static_cast<float>(1 - power(settings.beta2, t));
  const auto eps = static_cast<float>(settings.eps);
  const auto lr = static_cast<float>(settings.lr);
  const auto wd = static_cast<float>(settings.weight_decay);
  const auto grad_factor = static_cast<float>(settings.grad_factor);
  for (std::size_t i = 0; i < state.p.size(); ++i) {
    // volatile: each line is rounded to FP32 by itself, whatever the compiler's flags are.
    volatile float g = grad[i] * grad_factor;
    if (!settings.decoupled) g = std::fma(wd, state.p[i], g);
    volatile float decayed_m = beta1 * state.m[i];
    volatile float m = std::fma(omb1, g, decayed_m);
    volatile float decayed_v = beta2 * state.v[i];
    volatile float scaled_g = omb2 * g;
    volatile float v = std::fma(scaled_g, g, decayed_v);
    volatile float m_hat = m / bc1;
    volatile float v_hat = v / bc2;
    volatile float root = std::sqrt(v_hat);
    volatile float denominator = root + eps;
    volatile float u = m_hat / denominator;
    if (settings.decoupled) u = std::fma(wd, state.p[i], u);
    state.p[i] = std::fma(-lr, u, state.p[i]);
    state.m[i] = m;
    state.v[i] = v;
  }
}

double norm(std::span<const std::vector<float>> grads) {
  long double sum = 0;
  for (const std::vector<float>& grad : grads) {
    for (const float g : grad) sum += static_cast<long double>(g) * static_cast<long double>(g);
  }
  return static_cast<double>(std::sqrt(sum));
}

double clip_factor(double norm, double max_norm) {
  const double ratio = max_norm > 0 ? max_norm / (norm + 1e-6) : 1;
  return ratio < 1 ? ratio : 1;
}

}  // namespace mxopt::reference
