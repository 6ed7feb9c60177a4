// The element functions give the same bits on the device as on the host.
#include <cstdint>
#include <string>
#include <vector>

#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include "mxopt/params/bf16.h"
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

}  // namespace
}  // namespace mxopt
