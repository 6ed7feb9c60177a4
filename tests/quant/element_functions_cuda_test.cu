// The element functions give the same bits on the device as on the host.
#include <cstdint>
#include <string>
#include <vector>

#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include "mxopt/params/bf16.h"
#include "mxopt/quant/block_cuda.cuh"
#include "mxopt/quant/e4m3.h"
#include "mxopt/quant/e8m0.h"

namespace mxopt {
namespace {

/// Each takes 32 bits and gives 32 bits.
enum class Function {
  kBf16,
  kBf16Value,
  kE8m0FromAmax,
  kE8m0FromQuotient,
  kE8m0Value,
  kE8m0Reciprocal,
  kE4m3,
  kE4m3Value
};

MXOPT_HD std::uint32_t apply(Function function, std::uint32_t x) {
  switch (function) {
    case Function::kBf16:
      return bf16_rne_bits(x);
    case Function::kBf16Value:
      return float_to_bits(bf16_to_fp32(Bf16{static_cast<std::uint16_t>(x)}));
    case Function::kE8m0FromAmax:
      return e8m0_from_amax_bits(x);
    case Function::kE8m0FromQuotient:
      return e8m0_from_quotient_bits(x);
    case Function::kE8m0Value:
      return float_to_bits(e8m0_value(x));
    case Function::kE8m0Reciprocal:
      return float_to_bits(e8m0_reciprocal(x));
    case Function::kE4m3:
      return e4m3_from_fp32(bits_to_float(x));
    case Function::kE4m3Value:
      return float_to_bits(e4m3_value(x));
  }
  return 0;
}

__global__ void apply_kernel(Function function, const std::uint32_t* in, std::uint32_t* out, std::int64_t n) {
  const std::int64_t stride = static_cast<std::int64_t>(gridDim.x) * blockDim.x;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < n;
       i += stride) {
    out[i] = apply(function, in[i]);
  }
}

class ElementFunctionsCuda : public ::testing::Test {
 protected:
  void SetUp() override {
    int devices = 0;
    const cudaError_t status = cudaGetDeviceCount(&devices);
    if (status != cudaSuccess || devices == 0) {
      GTEST_SKIP() << "no CUDA device: "
                   << (status == cudaSuccess ? "count is 0" : cudaGetErrorString(status));
    }
  }

  void expect_equal(Function function, const std::vector<std::uint32_t>& in) {
    const std::size_t bytes = in.size() * sizeof(std::uint32_t);
    std::uint32_t* device_in = nullptr;
    std::uint32_t* device_out = nullptr;
    ASSERT_EQ(cudaMalloc(&device_in, bytes), cudaSuccess);
    ASSERT_EQ(cudaMalloc(&device_out, bytes), cudaSuccess);
    ASSERT_EQ(cudaMemcpy(device_in, in.data(), bytes, cudaMemcpyHostToDevice), cudaSuccess);
    apply_kernel<<<256, 256>>>(function, device_in, device_out, static_cast<std::int64_t>(in.size()));
    ASSERT_EQ(cudaGetLastError(), cudaSuccess);
    std::vector<std::uint32_t> out(in.size());
    ASSERT_EQ(cudaMemcpy(out.data(), device_out, bytes, cudaMemcpyDeviceToHost), cudaSuccess);
    ASSERT_EQ(cudaFree(device_in), cudaSuccess);
    ASSERT_EQ(cudaFree(device_out), cudaSuccess);
    std::int64_t differing = 0;
    std::size_t first = 0;
    for (std::size_t i = in.size(); i-- > 0;) {
      if (out[i] == apply(function, in[i])) continue;
      first = i;
      ++differing;
    }
    EXPECT_EQ(differing, 0) << "first at input 0x" << std::hex << in[first] << ": host 0x"
                            << apply(function, in[first]) << ", device 0x" << out[first];
  }
};

std::vector<std::uint32_t> all_below(std::uint32_t end) {
  std::vector<std::uint32_t> values;
  for (std::uint32_t x = 0; x < end; ++x) values.push_back(x);
  return values;
}

std::vector<std::uint32_t> all_bf16() {
  std::vector<std::uint32_t> values = all_below(1u << 16);
  for (std::uint32_t& x : values) x <<= 16;
  return values;
}

/// FP32 bits with a stride that is coprime to all powers of two: every exponent and many mantissas.
std::vector<std::uint32_t> sampled_fp32() {
  std::vector<std::uint32_t> values;
  for (std::uint64_t x = 0; x < 1ull << 32; x += 257) values.push_back(static_cast<std::uint32_t>(x));
  return values;
}

std::vector<std::uint32_t> without_sign(std::vector<std::uint32_t> values) {
  for (std::uint32_t& x : values) x &= 0x7FFFFFFFu;
  return values;
}

TEST_F(ElementFunctionsCuda, Bf16) {
  expect_equal(Function::kBf16Value, all_below(1u << 16));
  expect_equal(Function::kBf16, all_bf16());
  expect_equal(Function::kBf16, sampled_fp32());
}

TEST_F(ElementFunctionsCuda, E8m0) {
  expect_equal(Function::kE8m0Value, all_below(256));
  expect_equal(Function::kE8m0Reciprocal, all_below(256));
  expect_equal(Function::kE8m0FromAmax, without_sign(all_bf16()));
  expect_equal(Function::kE8m0FromAmax, without_sign(sampled_fp32()));
  expect_equal(Function::kE8m0FromQuotient, without_sign(sampled_fp32()));
}

TEST_F(ElementFunctionsCuda, E4m3) {
  expect_equal(Function::kE4m3Value, all_below(256));
  expect_equal(Function::kE4m3, all_bf16());
  expect_equal(Function::kE4m3, sampled_fp32());
}

// The functions on BF16 pairs, against the element functions on the device, for every input there is.

struct Wrong {
  unsigned long long count;
  unsigned long long first;  // the smallest input with another result
};

__device__ void expect(bool right, std::uint32_t input, Wrong* wrong) {
  if (right) return;
  atomicAdd(&wrong->count, 1ull);
  atomicMin(&wrong->first, static_cast<unsigned long long>(input));
}

/// Every input is in each of the four places once; beside it are others, so that no place leaks into the
/// next.
__global__ void encode_kernel(Wrong* wrong) {
  const std::uint32_t x = blockIdx.x * blockDim.x + threadIdx.x;
  const std::uint32_t inputs[4] = {x, ~x, x * 0x9E3779B1u, x ^ 0x40000000u};
  float values[4];
  for (int k = 0; k < 4; ++k) values[k] = bits_to_float(inputs[k]);
  for (int turn = 0; turn < 4; ++turn) {
    const std::uint32_t bytes =
        cuda::encode4(values[turn], values[(turn + 1) % 4], values[(turn + 2) % 4], values[(turn + 3) % 4]);
    for (int k = 0; k < 4; ++k) {
      const std::uint32_t expected = e4m3_from_fp32(values[(turn + k) % 4]);
      expect((bytes >> (8 * k) & 0xFFu) == expected, inputs[(turn + k) % 4], wrong);
    }
  }
}

__device__ bool same_bf16(std::uint32_t bits, std::uint32_t expected) {
  return bits == expected || ((bits & 0x7FFFu) > 0x7F80u && (expected & 0x7FFFu) > 0x7F80u);
}

__global__ void round_kernel(Wrong* wrong) {
  const std::uint32_t x = blockIdx.x * blockDim.x + threadIdx.x;
  const std::uint32_t pair = cuda::round_to_bf16(bits_to_float(x), bits_to_float(~x));
  expect(same_bf16(pair & 0xFFFFu, bf16_rne_bits(x)), x, wrong);
  expect(same_bf16(pair >> 16, bf16_rne_bits(~x)), ~x, wrong);
}

/// Codes and non-finite marks of all magnitudes, and what pairs are made of.
__global__ void pair_kernel(Wrong* wrong) {
  const std::uint32_t x = blockIdx.x * blockDim.x + threadIdx.x;
  const std::uint32_t low = x & 0xFFFFu;
  const std::uint32_t high = x >> 16;
  expect(float_to_bits(cuda::first_value(x)) == low << 16, x, wrong);
  expect(float_to_bits(cuda::second_value(x)) == high << 16, x, wrong);
  const std::uint32_t magnitudes = cuda::magnitudes(x);
  expect(magnitudes == ((low & 0x7FFFu) | (high & 0x7FFFu) << 16), x, wrong);
  const std::uint32_t largest = max(low & 0x7FFFu, high & 0x7FFFu);
  expect(cuda::fold(magnitudes, 0x00010002u) == (largest | 0x00020000u), x, wrong);
  expect(cuda::larger(magnitudes, 0x3F803F81u) ==
             (max(low & 0x7FFFu, 0x3F81u) | max(high & 0x7FFFu, 0x3F80u) << 16),
         x, wrong);
  expect(cuda::code_of(largest) == e8m0_from_amax_bits(largest << 16), x, wrong);
  expect(cuda::is_nonfinite(largest) == (largest >= 0x7F80u), x, wrong);
}

class PairFunctionsCuda : public ElementFunctionsCuda {
 protected:
  void expect_none_wrong(void (*kernel)(Wrong*)) {
    Wrong* device_wrong = nullptr;
    Wrong wrong{0, ~0ull};
    ASSERT_EQ(cudaMalloc(&device_wrong, sizeof(Wrong)), cudaSuccess);
    ASSERT_EQ(cudaMemcpy(device_wrong, &wrong, sizeof(Wrong), cudaMemcpyHostToDevice), cudaSuccess);
    kernel<<<1u << 24, 256>>>(device_wrong);  // 2^32 threads
    ASSERT_EQ(cudaGetLastError(), cudaSuccess);
    ASSERT_EQ(cudaMemcpy(&wrong, device_wrong, sizeof(Wrong), cudaMemcpyDeviceToHost), cudaSuccess);
    ASSERT_EQ(cudaFree(device_wrong), cudaSuccess);
    EXPECT_EQ(wrong.count, 0u) << "first at input 0x" << std::hex << wrong.first;
  }
};

TEST_F(PairFunctionsCuda, EncodeGivesTheBytesOfTheElementFunctionForEveryInput) {
  expect_none_wrong(encode_kernel);
}

TEST_F(PairFunctionsCuda, RoundingGivesTheBitsOfTheElementFunctionForEveryInput) {
  expect_none_wrong(round_kernel);
}

TEST_F(PairFunctionsCuda, MagnitudesFoldsAndCodesAreRightForEveryPair) {
  expect_none_wrong(pair_kernel);
}

}  // namespace
}  // namespace mxopt
