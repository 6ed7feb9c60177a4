// Random numbers from keys: equal keys give equal numbers, whatever was drawn before, on every rank.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <numbers>
#include <string_view>
#include <vector>

#include "mxopt/params/layout.h"

namespace train_gpt {

/// 64 well-mixed bits of (seed, stream, index).
constexpr std::uint64_t random_bits(std::uint64_t seed, std::uint64_t stream, std::uint64_t index) {
  const auto mix = [](std::uint64_t x) {
    x += 0x9E3779B97F4A7C15U;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9U;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBU;
    return x ^ (x >> 31);
  };
  return mix(mix(mix(seed) ^ stream) ^ index);
}

/// In (0, 1).
constexpr double random_unit(std::uint64_t seed, std::uint64_t stream, std::uint64_t index) {
  return (static_cast<double>(random_bits(seed, stream, index) >> 11) + 0.5) * 0x1p-53;
}

/// values := count numbers of a normal distribution around 0 (Box-Muller), keyed by (seed, name, index).
inline void fill_normal(std::vector<float>& values, std::size_t count, std::uint64_t seed,
                        std::string_view name, double standard_deviation) {
  const std::uint64_t stream = mxopt::hash64(name);
  values.resize(count);
  for (std::size_t i = 0; i < count; ++i) {
    const double radius = std::sqrt(-2.0 * std::log(random_unit(seed, stream, 2 * i)));
    const double angle = 2.0 * std::numbers::pi * random_unit(seed, stream, 2 * i + 1);
    values[i] = static_cast<float>(standard_deviation * radius * std::cos(angle));
  }
}

}  // namespace train_gpt
