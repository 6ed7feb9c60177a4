#include "mxopt/quant/e4m3.h"

#include <cmath>
#include <cstdint>
#include <limits>
#include <random>

#include <gtest/gtest.h>

#include "support/reference_mxfp8.h"

namespace mxopt {
namespace {

constexpr std::uint32_t kInfinityBits = 0x7F800000u;
constexpr std::uint32_t kSignBit = 0x80000000u;

std::uint32_t above(float value) {
  return float_to_bits(std::nextafterf(value, 1e30f));
}

TEST(E4m3, ValueOfEveryCode) {
  for (std::uint32_t code = 0; code < 256; ++code) {
    const double expected = reference::e4m3_value(static_cast<std::uint8_t>(code));
    if (std::isnan(expected)) {
      ASSERT_TRUE(std::isnan(e4m3_value(code))) << code;
    } else {
      ASSERT_EQ(e4m3_value(code), expected) << code;
      ASSERT_EQ(std::signbit(e4m3_value(code)), code >= 0x80u) << code;
    }
  }
}

TEST(E4m3, EveryCodeSurvivesTheWayToFp32AndBack) {
  for (std::uint32_t code = 0; code < 256; ++code) {
    ASSERT_EQ(e4m3_from_fp32(e4m3_value(code)), (code & 0x7Fu) == 0x7Fu ? 0x7Fu : code);
  }
}

TEST(E4m3, EveryBf16ValueGivesTheNearestCode) {
  for (std::uint32_t bits = 0; bits < 1u << 16; ++bits) {
    const float value = bits_to_float(bits << 16);
    ASSERT_EQ(e4m3_from_fp32(value), reference::e4m3_code(value)) << std::hex << bits;
  }
}

TEST(E4m3, RandomFp32ValuesGiveTheNearestCode) {
  std::mt19937 random(2);
  for (int trial = 0; trial < 2'000'000; ++trial) {
    // Exponents from 2^-12 to 2^10, where codes differ; any mantissa, any sign.
    const auto exponent = static_cast<std::uint32_t>(115 + random() % 23);
    const float value = bits_to_float((static_cast<std::uint32_t>(random()) & 0x807FFFFFu) | exponent << 23);
    ASSERT_EQ(e4m3_from_fp32(value), reference::e4m3_code(value)) << std::hex << float_to_bits(value);
  }
}

TEST(E4m3, KnownValues) {
  EXPECT_EQ(e4m3_from_fp32(1.0f), 0x38u);
  EXPECT_EQ(e4m3_from_fp32(256.0f), 0x78u);
  EXPECT_EQ(e4m3_from_fp32(448.0f), 0x7Eu);
  EXPECT_EQ(e4m3_from_fp32(-448.0f), 0xFEu);
  EXPECT_EQ(e4m3_from_fp32(449.0f), 0x7Eu);
  EXPECT_EQ(e4m3_from_fp32(std::numeric_limits<float>::infinity()), 0x7Eu);
  EXPECT_EQ(e4m3_from_fp32(-std::numeric_limits<float>::infinity()), 0xFEu);
  EXPECT_EQ(e4m3_from_fp32(0.0f), 0x00u);
  EXPECT_EQ(e4m3_from_fp32(-0.0f), 0x80u);
  const float half_smallest = std::ldexp(1.0f, -10);
  EXPECT_EQ(e4m3_from_fp32(half_smallest), 0x00u);
  EXPECT_EQ(e4m3_from_fp32(-half_smallest), 0x80u);
  EXPECT_EQ(e4m3_from_fp32(bits_to_float(above(half_smallest))), 0x01u);
  EXPECT_EQ(e4m3_from_fp32(std::numeric_limits<float>::denorm_min()), 0x00u);
  for (const std::uint32_t nan : {0x7FC00000u, 0x7F800001u, 0xFFC00000u, 0xFFFFFFFFu}) {
    EXPECT_EQ(e4m3_from_fp32(bits_to_float(nan)), 0x7Fu);
  }
}

/// Bits of the largest positive FP32 value that rounds to `code`.
std::uint32_t last_bits_of(std::uint32_t code) {
  if (code == 0x7E) return kInfinityBits;
  // The middle of two E4M3 neighbours is an FP32 number; it belongs to the even code.
  const double middle = 0.5 * (reference::e4m3_value(static_cast<std::uint8_t>(code)) +
                               reference::e4m3_value(static_cast<std::uint8_t>(code + 1)));
  const std::uint32_t bits = float_to_bits(static_cast<float>(middle));
  return code % 2 == 0 ? bits : bits - 1;
}

/// How many of the inputs [first, last], with that sign, do not give `code`.
std::int64_t count_other(std::uint32_t first, std::uint32_t last, std::uint32_t sign, std::uint32_t code) {
  const std::int64_t inputs = static_cast<std::int64_t>(last) - first + 1;
  std::int64_t other = 0;
#if defined(_OPENMP)
#pragma omp parallel for schedule(static) reduction(+ : other) if (inputs > 1 << 20)
#endif
  for (std::int64_t i = 0; i < inputs; ++i) {
    const std::uint32_t bits = (first + static_cast<std::uint32_t>(i)) | sign;
    other += e4m3_from_fp32(bits_to_float(bits)) == code ? 0 : 1;
  }
  return other;
}

TEST(ExhaustiveE4m3, AllFp32InputsGiveTheNearestCode) {
  std::int64_t inputs = 0;
  std::uint32_t first = 0;
  for (std::uint32_t code = 0; code <= 0x7E; ++code) {
    const std::uint32_t last = last_bits_of(code);
    ASSERT_EQ(count_other(first, last, 0, code), 0) << "code " << code;
    ASSERT_EQ(count_other(first, last, kSignBit, code | 0x80u), 0) << "code " << (code | 0x80u);
    inputs += 2 * (static_cast<std::int64_t>(last) - first + 1);
    first = last + 1;
  }
  ASSERT_EQ(count_other(first, 0x7FFFFFFFu, 0, 0x7F), 0) << "NaN";
  ASSERT_EQ(count_other(first, 0x7FFFFFFFu, kSignBit, 0x7F), 0) << "negative NaN";
  inputs += 2 * (0x80000000ll - first);
  EXPECT_EQ(inputs, 1ll << 32);
}

}  // namespace
}  // namespace mxopt
