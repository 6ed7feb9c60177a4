#include "mxopt/params/dtype.h"

#include <array>
#include <type_traits>
#include <vector>

#include <gtest/gtest.h>

#include "support/thrown_message.h"

namespace mxopt {
namespace {

using test::contains;
using test::thrown_message;

static_assert(dtype_bytes(DType::kFp32) == sizeof(float));
static_assert(dtype_bytes(DType::kBf16) == sizeof(Bf16));
static_assert(dtype_bytes(DType::kUint8) == 1);
static_assert(dtype_bytes(DType::kInt64) == 8);
static_assert(dtype_of<const float>() == DType::kFp32);
static_assert(dtype_of<Bf16>() == DType::kBf16);
static_assert(dtype_of<std::uint8_t>() == DType::kUint8);
static_assert(dtype_of<const std::int64_t>() == DType::kInt64);

// Constness can be added, never removed.
static_assert(std::is_constructible_v<ConstTypedSpan, TypedSpan>);
static_assert(!std::is_constructible_v<TypedSpan, ConstTypedSpan>);
static_assert(!std::is_constructible_v<TypedSpan, std::span<const float>>);
static_assert(std::is_constructible_v<ConstTypedSpan, std::span<const float>>);

TEST(DType, HasOneNameEach) {
  EXPECT_EQ(dtype_name(DType::kFp32), "fp32");
  EXPECT_EQ(dtype_name(DType::kBf16), "bf16");
  EXPECT_EQ(dtype_name(DType::kUint8), "uint8");
  EXPECT_EQ(dtype_name(DType::kInt64), "int64");
}

TEST(TypedSpan, KeepsPointerTypeAndCount) {
  std::vector<float> values(5, 1.0f);
  const TypedSpan span = std::span(values);
  EXPECT_EQ(span.data, values.data());
  EXPECT_EQ(span.dtype, DType::kFp32);
  EXPECT_EQ(span.elems, 5);
  EXPECT_EQ(span.bytes(), 20);
  EXPECT_EQ(span.as<float>().data(), values.data());
  EXPECT_EQ(span.as<float>().size(), 5u);
}

TEST(TypedSpan, RefusesAnotherElementTypeByName) {
  std::array<Bf16, 4> values{};
  const ConstTypedSpan span = std::span<const Bf16>(values);
  const std::string text = thrown_message<ContractError>([&] { (void)span.as<float>(); });
  EXPECT_TRUE(contains(text, "span holds bf16, asked for as fp32"));
}

TEST(TypedSpan, SubSpanCountsElementsAndChecksItsEnds) {
  std::array<std::int64_t, 4> values{};
  const TypedSpan span = std::span<std::int64_t>(values);
  EXPECT_EQ(span.sub(1, 3).data, values.data() + 1);
  EXPECT_EQ(span.sub(1, 3).elems, 3);
  EXPECT_EQ(span.sub(4, 0).elems, 0);
  for (const auto& [begin, count] : {std::pair{-1, 1}, {0, -1}, {5, 0}, {2, 3}}) {
    const std::string text = thrown_message<ContractError>([&] { (void)span.sub(begin, count); });
    EXPECT_TRUE(contains(text, "sub span [" + std::to_string(begin) + ", " + std::to_string(begin) + " + " +
                                   std::to_string(count) + ") of 4 elements"));
  }
}

TEST(TypedSpan, EmptySpanHasNoPointerAndSubSpansOfNothing) {
  const TypedSpan span;
  EXPECT_EQ(span.bytes(), 0);
  EXPECT_EQ(span.sub(0, 0).data, nullptr);
  EXPECT_TRUE(span.as<std::uint8_t>().empty());
}

TEST(TypedSpan, CountsBytesBeyond32Bits) {
  const ConstTypedSpan span(nullptr, DType::kInt64, std::int64_t{1} << 32);
  EXPECT_EQ(span.bytes(), std::int64_t{1} << 35);
}

}  // namespace
}  // namespace mxopt
