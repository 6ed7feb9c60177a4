#include "mxopt/optimizer/checkpoint/crc32c.h"

#include <cstddef>
#include <random>
#include <string_view>
#include <vector>

#include <gtest/gtest.h>

namespace mxopt {
namespace {

std::span<const std::byte> bytes_of(std::string_view text) {
  return std::as_bytes(std::span(text));
}

TEST(Crc32c, HasTheKnownValues) {
  EXPECT_EQ(crc32c({}), 0U);
  EXPECT_EQ(crc32c_table({}), 0U);
  EXPECT_EQ(crc32c(bytes_of("123456789")), 0xE3069283U);
  EXPECT_EQ(crc32c_table(bytes_of("123456789")), 0xE3069283U);
  const std::vector<std::byte> zeros(32);  // RFC 3720, B.4
  EXPECT_EQ(crc32c(zeros), 0x8A9136AAU);
  EXPECT_EQ(crc32c_table(zeros), 0x8A9136AAU);
}

TEST(Crc32c, InstructionAndTableAreEqualForEveryLengthAndCut) {
  std::mt19937 random(1);  // NOLINT: the same numbers every time
  std::vector<std::byte> bytes(300);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
  for (std::size_t length = 0; length <= bytes.size(); ++length) {
    const std::span all = std::span(bytes).first(length);
    const std::uint32_t expected = crc32c_table(all);
    ASSERT_EQ(crc32c(all), expected) << length;
    const std::size_t cut = random() % (length + 1);
    ASSERT_EQ(crc32c(all.subspan(cut), crc32c(all.first(cut))), expected) << length << " at " << cut;
    ASSERT_EQ(crc32c_table(all.subspan(cut), crc32c_table(all.first(cut))), expected)
        << length << " at " << cut;
  }
}

TEST(Crc32c, EveryBitMatters) {
  std::vector<std::byte> bytes(64);
  const std::uint32_t without = crc32c(bytes);
  for (std::size_t bit = 0; bit < bytes.size() * 8; ++bit) {
    bytes[bit / 8] ^= static_cast<std::byte>(1U << (bit % 8));
    EXPECT_NE(crc32c(bytes), without) << bit;
    bytes[bit / 8] ^= static_cast<std::byte>(1U << (bit % 8));
  }
}

}  // namespace
}  // namespace mxopt
