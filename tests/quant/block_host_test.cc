#include "mxopt/quant/block_host.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <ostream>
#include <random>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "support/block_functions.h"
#include "support/compare.h"
#include "support/reference_mxfp8.h"

namespace mxopt {
namespace {

using test::bits_equal;
using test::BlockFunctions;

struct Level {
  std::string name;
  BlockFunctions (*functions)();
  bool (*runs_here)();
  friend void PrintTo(const Level& level, std::ostream* out) { *out << level.name; }
};

std::vector<Level> levels() {
  std::vector<Level> all{{"Baseline", test::block_functions_baseline, [] { return true; }}};
#if defined(MXOPT_TEST_X86_LEVELS)
  all.push_back({"V3", test::block_functions_v3, [] { return __builtin_cpu_supports("x86-64-v3") != 0; }});
  all.push_back({"V4", test::block_functions_v4, [] { return __builtin_cpu_supports("x86-64-v4") != 0; }});
#endif
  return all;
}

/// Each loop in each instruction set against the reference, so that all sets give the same bits.
class BlockHost : public ::testing::TestWithParam<Level> {
 protected:
  void SetUp() override {
    if (!GetParam().runs_here())
      GTEST_SKIP() << "this processor has no " << GetParam().name << " instructions";
    functions_ = GetParam().functions();
  }
  BlockFunctions functions_{};
};
INSTANTIATE_TEST_SUITE_P(Levels, BlockHost, ::testing::ValuesIn(levels()),
                         [](const auto& level) { return level.param.name; });

/// `n` values, half of them of ordinary size, the others any bits at all.
std::vector<float> random_values(std::uint64_t seed, std::int64_t n) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values;
  for (std::int64_t i = 0; i < n; ++i) {
    const std::uint64_t draw = random();
    values.push_back(draw % 2 == 0 ? normal(random) : bits_to_float(static_cast<std::uint32_t>(draw >> 32)));
  }
  return values;
}

/// All BF16 values as FP32.
std::vector<float> all_bf16() {
  std::vector<float> values;
  for (std::uint32_t bits = 0; bits < 1u << 16; ++bits) values.push_back(bits_to_float(bits << 16));
  return values;
}

std::uint32_t magnitude(float value) {
  return float_to_bits(value) & 0x7FFFFFFFu;
}

constexpr std::int64_t kLongest = 100;
constexpr std::uint8_t kPreset = 0xEE;

TEST_P(BlockHost, RoundsRunsOfEveryLength) {
  const std::vector<float> in = random_values(1, kLongest + 3);
  for (std::int64_t n = 0; n <= kLongest; ++n) {
    std::vector<float> expected(kLongest + 3, 7.0f);
    for (std::int64_t i = 0; i < n; ++i)
      expected[static_cast<std::size_t>(i)] = reference::bf16(in[static_cast<std::size_t>(i + 3)]);
    std::vector<float> got(kLongest + 3, 7.0f);
    functions_.round_to_bf16(in.data() + 3, got.data(), n);
    ASSERT_TRUE(bits_equal(expected, got)) << n;
  }
}

TEST_P(BlockHost, RoundsEveryBf16NeighbourhoodAsTheReference) {
  for (const std::uint32_t low : {0x0000u, 0x0001u, 0x7FFFu, 0x8000u, 0x8001u, 0xFFFFu}) {
    std::vector<float> in = all_bf16();
    for (float& value : in) value = bits_to_float(float_to_bits(value) | low);
    std::vector<float> expected;
    for (const float value : in) expected.push_back(reference::bf16(value));
    std::vector<float> got(in.size());
    functions_.round_to_bf16(in.data(), got.data(), static_cast<std::int64_t>(in.size()));
    ASSERT_TRUE(bits_equal(expected, got)) << low;
  }
}

TEST_P(BlockHost, WidensEveryBf16) {
  std::vector<Bf16> in;
  for (std::uint32_t bits = 0; bits < 1u << 16; ++bits) in.push_back(Bf16{static_cast<std::uint16_t>(bits)});
  std::vector<float> got(in.size());
  functions_.widen_bf16(in.data(), got.data(), static_cast<std::int64_t>(in.size()));
  EXPECT_TRUE(bits_equal(all_bf16(), got));
}

TEST_P(BlockHost, BlockMaximumIsThatOfTheBits) {
  for (std::uint64_t seed = 0; seed < 200; ++seed) {
    const std::vector<float> w = random_values(seed, 32);
    std::uint32_t expected = 0;
    for (const float value : w) expected = std::max(expected, magnitude(value));
    ASSERT_EQ(functions_.block_amax_bits(w.data()), expected) << seed;
  }
}

TEST_P(BlockHost, BlockMaximumIsFoundAtEveryPosition) {
  for (std::size_t i = 0; i < 32; ++i) {
    for (const std::uint32_t bits : {0xBF800000u, 0x7F800000u, 0xFFC00000u, 0x00000001u}) {
      std::vector<float> w(32, -0.0f);
      w[i] = bits_to_float(bits);
      ASSERT_EQ(functions_.block_amax_bits(w.data()), bits & 0x7FFFFFFFu) << i;
    }
  }
}

TEST_P(BlockHost, ColumnMaximaOfEveryLength) {
  const std::vector<float> w = random_values(2, kLongest + 1);
  const std::vector<float> before = random_values(3, kLongest + 1);
  for (std::int64_t n = 0; n <= kLongest; ++n) {
    std::vector<std::uint32_t> expected;
    for (const float value : before) expected.push_back(magnitude(value));
    std::vector<std::uint32_t> got = expected;
    for (std::size_t j = 0; j < static_cast<std::size_t>(n); ++j)
      expected[j] = std::max(expected[j], magnitude(w[j + 1]));
    functions_.column_amax_bits(got.data(), w.data() + 1, n);
    ASSERT_TRUE(bits_equal(expected, got)) << n;
  }
}

TEST_P(BlockHost, EncodesEveryBf16WithEveryScale) {
  const std::vector<float> w = all_bf16();
  std::vector<std::uint8_t> expected(w.size());
  std::vector<std::uint8_t> got(w.size());
  for (std::uint32_t code = 0; code < 256; code += code < 250 ? 10 : 1) {
    const float reciprocal = e8m0_reciprocal(code);
    for (std::size_t i = 0; i < w.size(); ++i) {
      expected[i] = reference::e4m3_code(static_cast<double>(w[i]) /
                                         reference::e8m0_value(static_cast<std::uint8_t>(code)));
    }
    for (std::size_t i = 0; i < w.size(); i += 32)
      functions_.encode_block(w.data() + i, reciprocal, got.data() + i);
    ASSERT_TRUE(bits_equal(expected, got)) << code;
    std::fill(got.begin(), got.end(), kPreset);
    const std::vector<float> reciprocals(w.size(), reciprocal);
    functions_.encode_columns(w.data(), reciprocals.data(), got.data(), static_cast<std::int64_t>(w.size()));
    ASSERT_TRUE(bits_equal(expected, got)) << code;
  }
}

TEST_P(BlockHost, EncodesAndDecodesColumnsOfEveryLength) {
  std::vector<float> w = random_values(4, kLongest + 1);
  for (float& value : w) value = reference::bf16(value);
  std::mt19937 random(5);
  std::vector<std::uint8_t> codes;
  for (const float value : w) {
    static_cast<void>(value);
    codes.push_back(static_cast<std::uint8_t>(random() % 5 == 0 ? random() : 100 + random() % 50));
  }
  for (std::int64_t n = 0; n <= kLongest; ++n) {
    std::vector<std::uint8_t> expected(kLongest + 1, kPreset);
    std::vector<float> reciprocals;
    std::vector<float> scales;
    for (const std::uint8_t code : codes) {
      reciprocals.push_back(e8m0_reciprocal(code));
      scales.push_back(e8m0_value(code));
    }
    for (std::size_t j = 0; j < static_cast<std::size_t>(n); ++j) {
      expected[j] = reference::e4m3_code(static_cast<double>(w[j + 1]) / reference::e8m0_value(codes[j + 1]));
    }
    std::vector<std::uint8_t> got(kLongest + 1, kPreset);
    functions_.encode_columns(w.data() + 1, reciprocals.data() + 1, got.data(), n);
    ASSERT_TRUE(bits_equal(expected, got)) << n;

    std::vector<float> expected_values(kLongest + 1, 7.0f);
    for (std::size_t j = 0; j < static_cast<std::size_t>(n); ++j) {
      const double value = reference::e4m3_value(got[j]) * reference::e8m0_value(codes[j + 1]);
      expected_values[j] = std::isnan(value) ? NAN : static_cast<float>(value);
    }
    std::vector<float> values(kLongest + 1, 7.0f);
    functions_.decode(got.data(), scales.data() + 1, values.data(), n);
    for (std::size_t j = 0; j < values.size(); ++j) {
      if (std::isnan(expected_values[j])) {
        ASSERT_TRUE(std::isnan(values[j])) << j;
      } else {
        ASSERT_EQ(float_to_bits(expected_values[j]), float_to_bits(values[j])) << j;
      }
    }
  }
}

TEST_P(BlockHost, DecodesEveryByteWithEveryScale) {
  std::vector<std::uint8_t> bytes(256);
  for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::uint8_t>(i);
  std::vector<float> values(256);
  for (std::uint32_t code = 0; code < 255; ++code) {
    functions_.decode(bytes.data(), std::vector<float>(256, e8m0_value(code)).data(), values.data(), 256);
    for (std::size_t i = 0; i < bytes.size(); ++i) {
      const double expected =
          reference::e4m3_value(bytes[i]) * reference::e8m0_value(static_cast<std::uint8_t>(code));
      if (std::isnan(expected)) {
        ASSERT_TRUE(std::isnan(values[i]));
      } else {
        ASSERT_EQ(float_to_bits(values[i]), float_to_bits(static_cast<float>(expected))) << i << " " << code;
      }
    }
  }
}

TEST_P(BlockHost, CountsWhatIsNotFinite) {
  std::vector<float> w = random_values(6, kLongest);
  w[0] = INFINITY;
  w[7] = -INFINITY;
  w[31] = NAN;
  std::int64_t expected = 0;
  for (std::int64_t n = 0; n <= kLongest; ++n) {
    ASSERT_EQ(functions_.count_nonfinite(w.data(), n), expected) << n;
    if (n < kLongest) expected += std::isfinite(w[static_cast<std::size_t>(n)]) ? 0 : 1;
  }
  EXPECT_EQ(functions_.count_nonfinite(all_bf16().data(), 1 << 16), 2 * 128);
}

}  // namespace
}  // namespace mxopt
