#include "mxopt/collectives/rank_sum.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "mxopt/params/bf16.h"
#include "mxopt/params/check.h"

namespace mxopt {

namespace {

// Why: the running sums of one block stay in the first-level cache while the pieces stream by.
constexpr std::int64_t kPieceElems = 2048;

float widen(float x) {
  return x;
}
float widen(Bf16 x) {
  return bf16_to_fp32(x);
}
void round_to(float* to, float x) {
  *to = x;
}
void round_to(Bf16* to, float x) {
  *to = fp32_to_bf16(x);
}

template <class T>
void sum_floats(T* to, std::span<const void* const> pieces, std::int64_t elems, ReduceOp op) {
  alignas(64) std::array<float, kPieceElems> sum;
  const auto ranks = static_cast<float>(pieces.size());
  for (std::int64_t begin = 0; begin < elems; begin += kPieceElems) {
    const auto count = static_cast<std::size_t>(std::min(kPieceElems, elems - begin));
    const T* first = static_cast<const T*>(pieces[0]) + begin;
    for (std::size_t i = 0; i < count; ++i) sum[i] = widen(first[i]);
    for (const void* piece : pieces.subspan(1)) {
      const T* next = static_cast<const T*>(piece) + begin;
      for (std::size_t i = 0; i < count; ++i) sum[i] += widen(next[i]);
    }
    if (op == ReduceOp::kAvg) {
      for (std::size_t i = 0; i < count; ++i) sum[i] /= ranks;
    }
    for (std::size_t i = 0; i < count; ++i) round_to(to + begin + i, sum[i]);
  }
}

/// The same with an accumulator of the element's own type, for the operations that never round.
template <class T, class Combine>
void combine_integers(T* to, std::span<const void* const> pieces, std::int64_t elems, Combine combine) {
  alignas(64) std::array<T, kPieceElems> result;
  for (std::int64_t begin = 0; begin < elems; begin += kPieceElems) {
    const auto count = static_cast<std::size_t>(std::min(kPieceElems, elems - begin));
    std::copy_n(static_cast<const T*>(pieces[0]) + begin, count, result.begin());
    for (const void* piece : pieces.subspan(1)) {
      const T* next = static_cast<const T*>(piece) + begin;
      for (std::size_t i = 0; i < count; ++i) result[i] = combine(result[i], next[i]);
    }
    std::copy_n(result.begin(), count, to + begin);
  }
}

}  // namespace

void reduce_in_rank_order(void* to, std::span<const void* const> pieces, std::int64_t elems, DType dtype,
                          ReduceOp op) {
  MXOPT_CHECK(!pieces.empty(), "a reduction of no pieces");
  if (elems == 0) return;
  if (pieces.size() == 1 && dtype != DType::kBf16) {  // bf16 goes on: its rounding makes NaN canonical
    if (to != pieces[0]) std::memcpy(to, pieces[0], static_cast<std::size_t>(elems * dtype_bytes(dtype)));
    return;
  }
  switch (dtype) {
    case DType::kFp32:
      return sum_floats(static_cast<float*>(to), pieces, elems, op);
    case DType::kBf16:
      return sum_floats(static_cast<Bf16*>(to), pieces, elems, op);
    case DType::kInt64:
      return combine_integers(static_cast<std::uint64_t*>(to), pieces, elems,
                              [](std::uint64_t a, std::uint64_t b) { return a + b; });
    case DType::kUint8:
      return combine_integers(static_cast<std::uint8_t*>(to), pieces, elems,
                              [](std::uint8_t a, std::uint8_t b) { return std::max(a, b); });
  }
}

}  // namespace mxopt
