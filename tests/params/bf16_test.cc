#include "mxopt/params/bf16.h"

#include <cmath>
#include <cstdint>
#include <limits>

#include <gtest/gtest.h>

namespace mxopt {
namespace {

constexpr std::uint32_t kBf16Values = 1u << 16;

Bf16 bf16_of(std::uint32_t bits) {
  return Bf16{static_cast<std::uint16_t>(bits)};
}

TEST(Bf16, EveryValueSurvivesTheWayToFp32AndBack) {
  for (std::uint32_t bits = 0; bits < kBf16Values; ++bits) {
    const float value = bf16_to_fp32(bf16_of(bits));
    if (std::isnan(value)) {
      ASSERT_EQ(fp32_to_bf16(value).bits, 0x7FC0u) << std::hex << bits;
    } else {
      ASSERT_EQ(fp32_to_bf16(value).bits, bits) << std::hex << bits;
      ASSERT_EQ(float_to_bits(bf16_rne(value)), bits << 16) << std::hex << bits;
    }
  }
}

// Between two BF16 neighbours only the low half of the FP32 bits decides, by its relation to 0x8000.
TEST(Bf16, EveryIntervalRoundsToNearestAndTiesGoToEven) {
  for (std::uint32_t high = 0; high < kBf16Values; ++high) {
    if ((high & 0x7FFFu) >= 0x7F80u) continue;
    const std::uint32_t even = high + (high & 1u);
    ASSERT_EQ(bf16_rne_bits(high << 16), high);
    ASSERT_EQ(bf16_rne_bits(high << 16 | 0x0001u), high);
    ASSERT_EQ(bf16_rne_bits(high << 16 | 0x7FFFu), high);
    ASSERT_EQ(bf16_rne_bits(high << 16 | 0x8000u), even);
    ASSERT_EQ(bf16_rne_bits(high << 16 | 0x8001u), high + 1);
    ASSERT_EQ(bf16_rne_bits(high << 16 | 0xFFFFu), high + 1);
  }
}

TEST(Bf16, LargestFp32RoundsToInfinity) {
  EXPECT_EQ(float_to_bits(bf16_rne(std::numeric_limits<float>::max())), 0x7F800000u);
  EXPECT_EQ(float_to_bits(bf16_rne(std::numeric_limits<float>::lowest())), 0xFF800000u);
  EXPECT_EQ(float_to_bits(bf16_rne(bits_to_float(0x7F7F7FFFu))), 0x7F7F0000u);
}

TEST(Bf16, SpecialValuesKeepTheirMeaning) {
  EXPECT_EQ(bf16_rne_bits(0x7F800000u), 0x7F80u);
  EXPECT_EQ(bf16_rne_bits(0xFF800000u), 0xFF80u);
  EXPECT_EQ(bf16_rne_bits(0x80000000u), 0x8000u);
  EXPECT_EQ(bf16_rne_bits(0x00000001u), 0x0000u);
  EXPECT_EQ(bf16_rne_bits(0x80000001u), 0x8000u);
  // A NaN whose payload sits in the low half only, one whose payload would carry over, and a negative one.
  EXPECT_EQ(bf16_rne_bits(0x7F800001u), 0x7FC0u);
  EXPECT_EQ(bf16_rne_bits(0x7FFFFFFFu), 0x7FC0u);
  EXPECT_EQ(bf16_rne_bits(0xFFFFFFFFu), 0x7FC0u);
}

}  // namespace
}  // namespace mxopt
