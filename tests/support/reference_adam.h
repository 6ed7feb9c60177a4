// The slow, obvious Adam that tests compare with: whole params, no ranks; shares no code with the library.
//
// Two versions: FP64, for error bounds; FP32, which follows numerics contract section 3 line by line, for
// bits.
#pragma once

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

namespace mxopt::reference {

struct AdamSettings {
  double beta1 = 0.9;
  double beta2 = 0.95;
  double eps = 1e-8;
  double lr = 3e-4;
  double weight_decay = 0.1;
  double grad_factor = 1;  // for the FP32 version, an FP32 number
  bool decoupled = true;   // AdamW
};

template <class Real>
struct AdamState {
  std::vector<Real> p, m, v;
  explicit AdamState(std::vector<Real> masters) : p(std::move(masters)), m(p.size()), v(p.size()) {}
};

/// Step number t, counted from 1, on the state of one param.
void adam_step(AdamState<double>& state, std::span<const float> grad, const AdamSettings& settings,
               std::int64_t t);
void adam_step(AdamState<float>& state, std::span<const float> grad, const AdamSettings& settings,
               std::int64_t t);

/// Euclidean norm in extended precision.
double norm(std::span<const std::vector<float>> grads);

/// min(1, max_norm / (norm + 1e-6)); max_norm 0: 1.
double clip_factor(double norm, double max_norm);

}  // namespace mxopt::reference
