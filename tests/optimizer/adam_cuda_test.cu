// The short quotients, roots and updates of adam_cuda.cuh give the bits of IEEE division, root and of
// adam_update().
#include <cstdint>

#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include "support/devices.h"

#include "mxopt/optimizer/adam_cuda.cuh"

namespace mxopt {
namespace {

constexpr Device kCuda{DeviceKind::kCuda, 0};

/// A different 32-bit number for each (seed, i).
__device__ std::uint32_t mix(std::uint64_t seed, std::int64_t i) {
  std::uint64_t x = seed * 0x9E3779B97F4A7C15u + static_cast<std::uint64_t>(i);
  x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
  x = (x ^ x >> 27) * 0x94D049BB133111EBu;
  return static_cast<std::uint32_t>((x ^ x >> 31) >> 16);
}

/// A number with random mantissa and an exponent from `low` to `high`.
__device__ float ordinary(std::uint32_t bits, int low, int high) {
  const std::uint32_t exponent =
      static_cast<std::uint32_t>(127 + low) + (bits >> 23) % static_cast<std::uint32_t>(high - low + 1);
  return bits_to_float(exponent << 23 | (bits & 0x7FFFFFu));
}

__device__ bool same(float a, float b) {
  return float_to_bits(a) == float_to_bits(b) || (isnan(a) && isnan(b));
}

/// How many of [0, count) fail, each tried by `test(i)`.
template <class Test>
__global__ void count_kernel(Test test, std::int64_t count, unsigned long long* failures) {
  const std::int64_t stride = static_cast<std::int64_t>(gridDim.x) * blockDim.x;
  unsigned long long mine = 0;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count;
       i += stride) {
    mine += test(i) ? 0 : 1;
  }
  if (mine != 0) atomicAdd(failures, mine);
}

class AdamCuda : public ::testing::Test {
 protected:
  void SetUp() override { MXOPT_SKIP_WITHOUT(kCuda); }

  template <class Test>
  static std::int64_t failures_of(const Test& test, std::int64_t count) {
    const Buffer memory(sizeof(unsigned long long), kCuda, default_allocator(kCuda));
    count_kernel<<<1024, 256>>>(test, count, reinterpret_cast<unsigned long long*>(memory.data()));
    EXPECT_EQ(cudaGetLastError(), cudaSuccess);
    std::int64_t failures = -1;
    copy_bytes(&failures, memory.data(), sizeof(failures), kCuda, StreamRef());
    synchronize(kCuda, StreamRef());
    return failures;
  }
};

struct RootIsRight {
  __device__ bool operator()(std::int64_t i) const {
    const float x = bits_to_float(static_cast<std::uint32_t>(i));
    if (!(x >= 0x1p-90f && x < 0x1p80f)) return true;
    return same(cuda::sqrt_ordinary(x), __fsqrt_rn(x));
  }
};

TEST_F(AdamCuda, RootsOfAllOrdinaryNumbersAreRight) {
  EXPECT_EQ(failures_of(RootIsRight{}, std::int64_t{1} << 32), 0);
}

/// All mantissas over divisors between 2^-20 and 1, as bias corrections are.
struct QuotientByConstantIsRight {
  __device__ bool operator()(std::int64_t i) const {
    const auto mantissa = static_cast<std::uint32_t>(i & 0x7FFFFF);
    const auto which = static_cast<std::uint32_t>(i >> 23);
    const float b = which == 0 ? 1.0f : ordinary(mix(11, which), -20, -1);
    const float a = bits_to_float((which % 2 == 0 ? 127u : 127u - 60u) << 23 | mantissa);
    return same(cuda::divide_ordinary(a, b, 1.0f / b), a / b) &&
           same(cuda::divide_ordinary(-a, b, 1.0f / b), -a / b);
  }
};

TEST_F(AdamCuda, QuotientsByAConstantAreRightForAllMantissas) {
  EXPECT_EQ(failures_of(QuotientByConstantIsRight{}, std::int64_t{512} << 23), 0);
}

struct QuotientIsRight {
  __device__ bool operator()(std::int64_t i) const {
    const float a = ordinary(mix(1, i), -60, 79);
    const float b = ordinary(mix(2, i), -45, 41);
    return same(cuda::divide_ordinary(a, b), a / b);
  }
};

TEST_F(AdamCuda, QuotientsOfRandomOrdinaryNumbersAreRight) {
  EXPECT_EQ(failures_of(QuotientIsRight{}, std::int64_t{1} << 32), 0);
}

enum class Numbers {
  kAnyBits,
  kOfTraining,  // ordinary ones
  kFading,      // what is left where gradients are 0: moments down to subnormal numbers and 0
};

struct UpdateIsRight {
  AdamScalars scalars;
  Numbers numbers;

  __device__ float number(std::int64_t seed, std::int64_t i, int low, int high) const {
    const std::uint32_t bits = mix(static_cast<std::uint64_t>(seed), i);
    if (numbers == Numbers::kAnyBits) return bits_to_float(bits);
    if (numbers == Numbers::kFading) {
      // From the smallest subnormal numbers up to 2^high; a quarter of them is 0.
      const std::uint32_t exponent = (bits >> 20) % static_cast<std::uint32_t>(128 + high);
      const std::uint32_t magnitude =
          (exponent << 23 | (bits & 0x7FFFFFu)) >> (exponent == 0 ? bits % 23 : 0);
      return bits_to_float(bits << 31 | ((bits >> 18 & 3u) != 0 ? magnitude : 0));
    }
    const float sign = (bits & 0x100u) != 0 ? -1.0f : 1.0f;
    return bits % 97 == 0 ? sign * 0.0f : sign * ordinary(bits, low, high);
  }

  __device__ bool operator()(std::int64_t i) const {
    float p[4], m[4], v[4], g[4];
    AdamElement expected[4];
    for (int k = 0; k < 4; ++k) {
      const std::int64_t at = 4 * i + k;
      p[k] = number(3, at, -20, 3);
      m[k] = numbers == Numbers::kFading ? number(4, at, 0, -40) : number(4, at, -70, 10);
      v[k] = fabsf(number(5, at, -126, 10));
      g[k] = numbers == Numbers::kFading ? number(6, at, 0, -60) : number(6, at, -60, 10);
      expected[k] = adam_update({p[k], m[k], v[k]}, g[k], scalars);
    }
    const cuda::AdamConstants constants(&scalars);
    cuda::adam_update4(p, m, v, g, constants);
    bool right = true;
    for (int k = 0; k < 4; ++k) {
      right = right && same(p[k], expected[k].p) && same(m[k], expected[k].m) && same(v[k], expected[k].v);
    }
    return right;
  }
};

TEST_F(AdamCuda, UpdatesOfFourAreThoseOfOne) {
  AdamScalars scalars;
  scalars.beta1 = 0.9f;
  scalars.beta2 = 0.95f;
  scalars.omb1 = static_cast<float>(1 - 0.9);
  scalars.omb2 = static_cast<float>(1 - 0.95);
  scalars.lr = 3e-4f;
  scalars.weight_decay = 0.1f;
  scalars.grad_factor = 0.37f;
  for (const Numbers numbers : {Numbers::kAnyBits, Numbers::kOfTraining, Numbers::kFading}) {
    for (const bool decoupled : {true, false}) {
      for (const float bc : {0.1f, 1.0f, 1e-7f}) {  // the last one is not ordinary
        for (const float eps : {1e-8f, 0.0f}) {
          scalars.decoupled = decoupled;
          scalars.bc1 = bc;
          scalars.bc2 = bc == 1.0f ? 1.0f : bc / 2;
          scalars.eps = eps;
          EXPECT_EQ(failures_of(UpdateIsRight{scalars, numbers}, std::int64_t{1} << 24), 0)
              << "decoupled " << decoupled << ", bc1 " << bc << ", eps " << eps << ", numbers "
              << static_cast<int>(numbers);
        }
      }
    }
  }
}

}  // namespace
}  // namespace mxopt
