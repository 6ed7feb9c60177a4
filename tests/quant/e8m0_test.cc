#include "mxopt/quant/e8m0.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <random>

#include <gtest/gtest.h>

#include "support/reference_mxfp8.h"

namespace mxopt {
namespace {

constexpr std::uint32_t kInfinityBits = 0x7F800000u;

std::uint32_t code_of(double amax) {
  return e8m0_from_amax_bits(float_to_bits(static_cast<float>(amax)));
}

TEST(E8m0, ValueOfEveryCode) {
  for (int code = 0; code < 255; ++code) {
    ASSERT_EQ(e8m0_value(static_cast<std::uint32_t>(code)), std::ldexp(1.0, code - 127)) << code;
  }
  EXPECT_EQ(float_to_bits(e8m0_value(0)), 0x00400000u);
  EXPECT_EQ(float_to_bits(e8m0_value(1)), 0x00800000u);
  EXPECT_EQ(float_to_bits(e8m0_value(127)), 0x3F800000u);
  EXPECT_EQ(float_to_bits(e8m0_value(254)), 0x7F000000u);
  EXPECT_TRUE(std::isnan(e8m0_value(255)));
}

TEST(E8m0, ReciprocalOfEveryCode) {
  for (int code = 0; code < 255; ++code) {
    ASSERT_EQ(e8m0_reciprocal(static_cast<std::uint32_t>(code)), std::ldexp(1.0, 127 - code)) << code;
  }
  EXPECT_EQ(float_to_bits(e8m0_reciprocal(0)), 0x7F000000u);
  EXPECT_EQ(float_to_bits(e8m0_reciprocal(254)), 0x00400000u);
  EXPECT_TRUE(std::isnan(e8m0_reciprocal(255)));
}

TEST(E8m0, EveryBf16AmaxGetsTheSmallestScaleThatHoldsIt) {
  for (std::uint32_t bits = 0; bits < kInfinityBits; bits += 0x10000u) {
    ASSERT_EQ(e8m0_from_amax_bits(bits), reference::e8m0_code(bits_to_float(bits))) << std::hex << bits;
  }
}

TEST(E8m0, IsMonotoneOverAllBf16Amaxes) {
  std::uint32_t previous = 0;
  for (std::uint32_t bits = 0; bits <= 0x7FFF0000u; bits += 0x10000u) {
    const std::uint32_t code = e8m0_from_amax_bits(bits);
    ASSERT_GE(code, previous) << std::hex << bits;
    previous = code;
  }
  EXPECT_EQ(previous, 0xFFu);
}

TEST(E8m0, MaximumOfCodesIsTheCodeOfTheMaximum) {
  std::mt19937 random(1);
  for (int trial = 0; trial < 1'000'000; ++trial) {
    const auto a = static_cast<std::uint32_t>(random() & 0x7FFFu) << 16;
    const auto b = static_cast<std::uint32_t>(random() & 0x7FFFu) << 16;
    ASSERT_EQ(std::max(e8m0_from_amax_bits(a), e8m0_from_amax_bits(b)), e8m0_from_amax_bits(std::max(a, b)))
        << std::hex << a << " and " << b;
  }
}

TEST(E8m0, CodesOfTheQuotientFollowTheContractsTable) {
  EXPECT_EQ(e8m0_from_quotient_bits(0), 0u);
  EXPECT_EQ(e8m0_from_quotient_bits(1), 0u);
  EXPECT_EQ(e8m0_from_quotient_bits(0x00400000u), 0u);
  EXPECT_EQ(e8m0_from_quotient_bits(0x00400001u), 1u);
  EXPECT_EQ(e8m0_from_quotient_bits(0x007FFFFFu), 1u);
  EXPECT_EQ(e8m0_from_quotient_bits(0x00800000u), 1u);
  EXPECT_EQ(e8m0_from_quotient_bits(0x00800001u), 2u);
  for (std::uint32_t exponent = 1; exponent < 254; ++exponent) {
    ASSERT_EQ(e8m0_from_quotient_bits(exponent << 23), exponent);
    ASSERT_EQ(e8m0_from_quotient_bits(exponent << 23 | 1u), exponent + 1);
    ASSERT_EQ(e8m0_from_quotient_bits(exponent << 23 | 0x7FFFFFu), exponent + 1);
  }
  EXPECT_EQ(e8m0_from_quotient_bits(254u << 23), 0xFEu);
  EXPECT_EQ(e8m0_from_quotient_bits(254u << 23 | 0x7FFFFFu), 0xFEu);
  EXPECT_EQ(e8m0_from_quotient_bits(kInfinityBits), 0xFEu);
  EXPECT_EQ(e8m0_from_quotient_bits(kInfinityBits + 1), 0xFFu);
  EXPECT_EQ(e8m0_from_quotient_bits(0x7FFFFFFFu), 0xFFu);
}

TEST(E8m0, KnownAmaxes) {
  EXPECT_EQ(code_of(0.0), 0u);
  EXPECT_EQ(code_of(1.0), 119u);
  EXPECT_EQ(code_of(1024.0), 129u);
  EXPECT_EQ(code_of(bf16_rne(959.5632f)), 129u);
  EXPECT_EQ(code_of(std::nextafterf(448.0f, 500.0f)), 128u);
  // 448 * 2^k is held by 2^k exactly, whatever the rounding of 1/448; the next BF16 up is not.
  for (int k = -126; k <= 119; ++k) {
    ASSERT_EQ(code_of(std::ldexp(448.0, k)), static_cast<std::uint32_t>(127 + k)) << k;
    ASSERT_EQ(code_of(std::ldexp(450.0, k)), static_cast<std::uint32_t>(128 + k)) << k;
  }
}

TEST(E8m0, InfinityAndNanAreVisible) {
  EXPECT_EQ(e8m0_from_amax_bits(kInfinityBits), 0xFEu);
  for (std::uint32_t bits = kInfinityBits + 1; bits <= 0x7FFFFFFFu; bits += 0x7FFFu) {
    ASSERT_EQ(e8m0_from_amax_bits(bits), 0xFFu) << std::hex << bits;
  }
}

TEST(E8m0, SubnormalAmaxIsNotFlushed) {
  // The smallest BF16 amax with a code above 0 lies above 448 * 2^-127.
  EXPECT_EQ(code_of(std::ldexp(448.0, -127)), 0u);
  EXPECT_EQ(code_of(std::ldexp(450.0, -127)), 1u);
  EXPECT_EQ(code_of(std::ldexp(1.0, -133)), 0u);
}

}  // namespace
}  // namespace mxopt
