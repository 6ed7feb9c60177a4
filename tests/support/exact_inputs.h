// Inputs of reductions whose results are exact, whatever the order of the sum.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "mxopt/params/bf16.h"
#include "mxopt/params/dtype.h"

namespace mxopt::test {

/// A well mixed 64-bit number of the three.
inline std::uint64_t mix(std::uint64_t seed, int rank, std::int64_t element) {
  std::uint64_t x = seed * 0x9E3779B97F4A7C15u + static_cast<std::uint64_t>(rank + 1) * 0xD1B54A32D192ED03u +
                    static_cast<std::uint64_t>(element) * 0x8CB92BA72F3D8DD7u;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

/// fp32 and bf16: integers in [-15, 16], exact in sums of up to 16 ranks. int64: 48 random bits. uint8: any
/// byte.
template <class T>
T exact_input(std::uint64_t seed, int rank, std::int64_t element) {
  const std::uint64_t bits = mix(seed, rank, element);
  const auto small = static_cast<float>(static_cast<int>(bits % 32) - 15);
  if constexpr (std::is_same_v<T, float>) {
    return small;
  } else if constexpr (std::is_same_v<T, Bf16>) {
    return fp32_to_bf16(small);
  } else if constexpr (std::is_same_v<T, std::int64_t>) {
    return static_cast<std::int64_t>(bits >> 16) - (std::int64_t{1} << 47);
  } else {
    return static_cast<T>(bits & 0xFF);
  }
}

/// The sum (uint8: the maximum) of the ranks' inputs.
template <class T>
T exact_result(std::uint64_t seed, int size, std::int64_t element) {
  if constexpr (std::is_same_v<T, Bf16>) {
    float sum = 0;
    for (int rank = 0; rank < size; ++rank) sum += bf16_to_fp32(exact_input<Bf16>(seed, rank, element));
    return fp32_to_bf16(sum);
  } else {
    T result = 0;
    for (int rank = 0; rank < size; ++rank) {
      const T next = exact_input<T>(seed, rank, element);
      result = std::is_same_v<T, std::uint8_t> ? std::max(result, next) : static_cast<T>(result + next);
    }
    return result;
  }
}

}  // namespace mxopt::test
