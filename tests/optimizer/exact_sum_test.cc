#include "mxopt/optimizer/exact_sum.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

#include <gtest/gtest.h>

namespace mxopt {
namespace {

ExactSum sum_of(const std::vector<double>& values) {
  ExactSum sum = {};
  for (const double value : values) add_to_sum(sum.data(), value);
  normalize_sum(sum.data());
  return sum;
}

double value_of(const std::vector<double>& values) {
  const ExactSum sum = sum_of(values);
  return sum_value(sum.data());
}

TEST(ExactSum, HoldsEveryPowerOfTwoOfItsRange) {
  for (int exponent = kSumLowestBit; exponent <= 264; ++exponent) {
    EXPECT_EQ(value_of({std::ldexp(1.0, exponent)}), std::ldexp(1.0, exponent)) << exponent;
  }
}

TEST(ExactSum, HoldsFullMantissasAtEveryPosition) {
  for (int exponent = kSumLowestBit; exponent + 53 <= 264; ++exponent) {
    const double value = std::ldexp(9007199254740991.0, exponent);
    EXPECT_EQ(value_of({value}), value) << exponent;
  }
}

TEST(ExactSum, SmallestAndLargestRunsOfSquaresFit) {
  const double tiny = std::numeric_limits<float>::denorm_min();
  const double huge = std::numeric_limits<float>::max();
  EXPECT_EQ(value_of({tiny * tiny}), 0x1p-298);
  EXPECT_EQ(value_of({tiny * tiny, tiny * tiny, tiny * tiny}), 3 * 0x1p-298);
  EXPECT_EQ(value_of({128 * huge * huge}), 128 * huge * huge);
}

TEST(ExactSum, SmallValuesDoNotVanishBesideLargeOnes) {
  const double huge = std::ldexp(1.0, 260);
  ExactSum sum = sum_of({huge, 0x1p-298, huge});
  sum[static_cast<std::size_t>((260 + 298) / 32)] -= std::int64_t{1} << ((261 + 298) % 32);
  EXPECT_EQ(sum_value(sum.data()), 0x1p-298);
}

TEST(ExactSum, DoesNotDependOnOrderOrGrouping) {
  std::mt19937_64 random(7);
  std::vector<double> values;
  for (int i = 0; i < 4000; ++i) {
    const auto g = static_cast<float>(std::ldexp(1.0 + static_cast<double>(random() % 8388608) / 8388608,
                                                 static_cast<int>(random() % 270) - 145));
    values.push_back(static_cast<double>(g) * static_cast<double>(g));
  }
  const ExactSum whole = sum_of(values);
  for (int trial = 0; trial < 20; ++trial) {
    std::ranges::shuffle(values, random);
    ExactSum total = {};
    for (std::size_t begin = 0; begin < values.size();) {
      const std::size_t end = std::min(values.size(), begin + 1 + random() % 900);
      const ExactSum part = sum_of({values.begin() + static_cast<std::ptrdiff_t>(begin),
                                    values.begin() + static_cast<std::ptrdiff_t>(end)});
      for (std::size_t k = 0; k < total.size(); ++k) total[k] += part[k];
      begin = end;
    }
    normalize_sum(total.data());
    EXPECT_EQ(total, whole);
  }
}

TEST(ExactSum, AgreesWithIntegerArithmetic) {
  std::mt19937_64 random(8);
  std::vector<double> values;
  std::uint64_t expected = 0;
  for (int i = 0; i < 100'000; ++i) {
    const std::uint64_t value = random() >> 24;
    expected += value;
    values.push_back(static_cast<double>(value));
  }
  EXPECT_EQ(value_of(values), static_cast<double>(expected));
}

TEST(ExactSum, AMillionAdditionsFitBetweenNormalisations) {
  ExactSum sum = {};
  const double value = 4294967295.0 + 0x1p-20;
  for (int i = 0; i < 1 << 20; ++i) add_to_sum(sum.data(), value);
  normalize_sum(sum.data());
  EXPECT_EQ(sum_value(sum.data()), std::ldexp(value, 20));
}

TEST(ExactSum, RunIsOneFixedTree) {
  std::vector<double> squares(static_cast<std::size_t>(kSumRunElems));
  std::iota(squares.begin(), squares.end(), 1.0);
  EXPECT_EQ(sum_run(squares.data()), 128.0 * 129.0 / 2);
  // 2^53 + 1 - 2^53 shows the order: element i is added to element i + 64 first.
  std::vector<double> order(static_cast<std::size_t>(kSumRunElems), 0.0);
  order[0] = 0x1p53;
  order[1] = 1;
  order[65] = 1;
  EXPECT_EQ(sum_run(order.data()), 0x1p53 + 2);
}

TEST(ExactSum, ZeroAddsNothing) {
  EXPECT_EQ(sum_of({0.0, 0.0}), ExactSum{});
}

}  // namespace
}  // namespace mxopt
