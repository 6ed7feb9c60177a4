// Element types, and spans whose element type is known only at run time.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <type_traits>

#include "mxopt/params/check.h"

namespace mxopt {

enum class DType { kFp32, kBf16, kUint8, kInt64 };

/// The bits of a BF16 number; a type of its own, so that spans of it are not spans of integers.
struct Bf16 {
  std::uint16_t bits = 0;
  friend bool operator==(Bf16, Bf16) = default;
};

constexpr std::int64_t dtype_bytes(DType dtype) {
  switch (dtype) {
    case DType::kFp32:
      return 4;
    case DType::kBf16:
      return 2;
    case DType::kUint8:
      return 1;
    case DType::kInt64:
      return 8;
  }
  return 0;
}

constexpr std::string_view dtype_name(DType dtype) {
  switch (dtype) {
    case DType::kFp32:
      return "fp32";
    case DType::kBf16:
      return "bf16";
    case DType::kUint8:
      return "uint8";
    case DType::kInt64:
      return "int64";
  }
  return "?";
}

template <class T>
constexpr DType dtype_of() {
  using U = std::remove_const_t<T>;
  static_assert(std::is_same_v<U, float> || std::is_same_v<U, Bf16> || std::is_same_v<U, std::uint8_t> ||
                    std::is_same_v<U, std::int64_t>,
                "element type must be float, Bf16, uint8_t or int64_t");
  if constexpr (std::is_same_v<U, float>)
    return DType::kFp32;
  else if constexpr (std::is_same_v<U, Bf16>)
    return DType::kBf16;
  else if constexpr (std::is_same_v<U, std::uint8_t>)
    return DType::kUint8;
  else
    return DType::kInt64;
}

/// `elems` packed elements of `dtype` at `data`; does not own them.
template <bool kConst>
struct BasicTypedSpan {
  using Pointer = std::conditional_t<kConst, const void*, void*>;
  using BytePointer = std::conditional_t<kConst, const std::uint8_t*, std::uint8_t*>;

  Pointer data = nullptr;
  DType dtype = DType::kUint8;
  std::int64_t elems = 0;

  BasicTypedSpan() = default;
  BasicTypedSpan(Pointer data_, DType dtype_, std::int64_t elems_)
      : data(data_), dtype(dtype_), elems(elems_) {}
  // Both convert without a cast, as std::span does.
  template <class T>
  // NOLINTNEXTLINE(google-explicit-constructor)
  requires(kConst || !std::is_const_v<T>) BasicTypedSpan(std::span<T> span)
      : data(span.data()), dtype(dtype_of<T>()), elems(static_cast<std::int64_t>(span.size())) {}
  template <bool kOther>
  // NOLINTNEXTLINE(google-explicit-constructor)
  requires(kConst && !kOther) BasicTypedSpan(const BasicTypedSpan<kOther>& other)
      : data(other.data), dtype(other.dtype), elems(other.elems) {}

  std::int64_t bytes() const { return elems * dtype_bytes(dtype); }
  BytePointer byte_data() const { return static_cast<BytePointer>(data); }

  /// The same memory as a typed span; ContractError when the element type is another one.
  template <class T>
  std::span<std::conditional_t<kConst, const T, T>> as() const {
    MXOPT_CHECK(dtype == dtype_of<T>(),
                "span holds " << dtype_name(dtype) << ", asked for as " << dtype_name(dtype_of<T>()));
    return {static_cast<std::conditional_t<kConst, const T, T>*>(data), static_cast<std::size_t>(elems)};
  }

  /// Elements [begin, begin + count).
  BasicTypedSpan sub(std::int64_t begin, std::int64_t count) const {
    MXOPT_CHECK(begin >= 0 && count >= 0 && begin <= elems && count <= elems - begin,
                "sub span [" << begin << ", " << begin << " + " << count << ") of " << elems << " elements");
    return {data == nullptr ? nullptr : byte_data() + begin * dtype_bytes(dtype), dtype, count};
  }
};

using TypedSpan = BasicTypedSpan<false>;
using ConstTypedSpan = BasicTypedSpan<true>;

}  // namespace mxopt
