// Bit equality of two runs of values, with the first difference in the failure text.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <iomanip>
#include <ostream>
#include <span>
#include <sstream>
#include <type_traits>

#include <gtest/gtest.h>

namespace mxopt::test {

/// Prints the bytes of `value` as one hexadecimal number, and floating-point values as such too.
template <class T>
void print_bits(std::ostream& out, const T& value) {
  std::uint64_t bits = 0;
  static_assert(sizeof(T) <= sizeof(bits));
  std::memcpy(&bits, &value, sizeof(T));
  const auto flags = out.flags();
  out << "0x" << std::hex << std::setw(2 * static_cast<int>(sizeof(T))) << std::setfill('0') << bits
      << std::setfill(' ');
  out.flags(flags);
  if constexpr (std::is_floating_point_v<T>) out << " (" << value << ")";
}

/// True when both runs have the same length and the same bytes. Use: EXPECT_TRUE(bits_equal(expected,
/// actual)).
template <class Expected, class Actual>
::testing::AssertionResult bits_equal(const Expected& expected_run, const Actual& actual_run) {
  const std::span expected(expected_run);
  const std::span actual(actual_run);
  using T = std::remove_const_t<typename decltype(expected)::element_type>;
  static_assert(std::is_same_v<T, std::remove_const_t<typename decltype(actual)::element_type>>);
  if (expected.size() != actual.size()) {
    return ::testing::AssertionFailure()
           << "expected " << expected.size() << " values, got " << actual.size();
  }
  if (expected.empty() || std::memcmp(expected.data(), actual.data(), expected.size_bytes()) == 0) {
    return ::testing::AssertionSuccess();
  }
  std::size_t first = expected.size();
  std::size_t differing = 0;
  for (std::size_t i = 0; i < expected.size(); ++i) {
    if (std::memcmp(&expected[i], &actual[i], sizeof(T)) == 0) continue;
    if (differing == 0) first = i;
    ++differing;
  }
  std::ostringstream text;
  text << differing << " of " << expected.size() << " values differ, first at index " << first
       << ": expected ";
  print_bits(text, expected[first]);
  text << ", got ";
  print_bits(text, actual[first]);
  return ::testing::AssertionFailure() << text.str();
}

}  // namespace mxopt::test
