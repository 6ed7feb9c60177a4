#include "mxopt/optimizer/initial_coverage.h"

#include <algorithm>
#include <random>
#include <vector>

#include <gtest/gtest.h>

namespace mxopt {
namespace {

TEST(InitialCoverage, EmptyRangesAreAlwaysCovered) {
  const InitialCoverage nothing;
  EXPECT_TRUE(nothing.covers(5, 5));
  EXPECT_FALSE(nothing.covers(5, 6));
}

TEST(InitialCoverage, TouchingRangesAreOne) {
  InitialCoverage coverage;
  coverage.add(10, 20);
  coverage.add(0, 5);
  EXPECT_FALSE(coverage.covers(0, 20));
  coverage.add(5, 10);
  EXPECT_TRUE(coverage.covers(0, 20));
  EXPECT_FALSE(coverage.covers(0, 21));
}

TEST(InitialCoverage, AgreesWithABitmap) {
  std::mt19937 random(3);
  for (int trial = 0; trial < 200; ++trial) {
    InitialCoverage coverage;
    std::vector<char> bitmap(64, 0);
    for (int i = 0; i < 12; ++i) {
      const auto begin = static_cast<std::int64_t>(random() % 65);
      const auto end = std::min<std::int64_t>(64, begin + static_cast<std::int64_t>(random() % 12));
      coverage.add(begin, end);
      for (std::int64_t at = begin; at < end; ++at) bitmap[static_cast<std::size_t>(at)] = 1;
      for (int probe = 0; probe < 20; ++probe) {
        const auto first = static_cast<std::ptrdiff_t>(random() % 64);
        const auto last = first + static_cast<std::ptrdiff_t>(random() % static_cast<unsigned>(65 - first));
        const bool expected =
            std::all_of(bitmap.begin() + first, bitmap.begin() + last, [](char bit) { return bit != 0; });
        ASSERT_EQ(coverage.covers(first, last), expected) << trial << ": [" << first << ", " << last << ")";
      }
    }
  }
}

}  // namespace
}  // namespace mxopt
