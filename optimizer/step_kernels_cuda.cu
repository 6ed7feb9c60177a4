#include <algorithm>
#include <cstring>
#include <limits>
#include <type_traits>
#include <vector>

#include "mxopt/optimizer/adam_cuda.cuh"
#include "mxopt/optimizer/step_kernels_cuda.h"
#include "mxopt/params/cuda_handles.h"
#include "mxopt/quant/block_cuda.cuh"

namespace mxopt::cuda {

namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
/// A tile is 32 lines of up to 128 elements: a lane has 4 neighbouring elements (16 bytes of FP32 state) of 4
/// lines.
constexpr int kTileLines = 32;
constexpr int kTileWidth = 128;
constexpr int kTileElems = kTileLines * kTileWidth;
constexpr int kLaneLines = kTileLines / kWarps;
constexpr int kLaneElems = 4;
/// Lines whose state a lane loads before it computes. More hide more latency, but need more registers.
constexpr int kLinesAtOnce = 2;
/// Elements between lines up to which offsets inside of a tile are 32 bits.
constexpr std::int64_t kLongestStride = 1 << 24;
/// Runs of gradients that a warp adds up at a time, two lanes for each in the end.
constexpr int kWarpRuns = 16;

enum TileFlags : std::int32_t {
  kBand = 1,   // of a param with a column plane
  kCut = 2,    // of a band that the segment does not own as a whole
  kWhole = 4,  // all its lines are owned, and short is its stride
};

/// For params with a column plane a tile is 32 rows x up to 128 columns of one band; else 4096 elements in a
/// row, as lines of 128. So both are walked in the same way: line l begins at begin + l * stride.
struct Tile {
  std::int64_t begin = 0;             // of the first element, in the param
  std::int64_t band = 0, column = 0;  // kBand: where the tile is
  std::int32_t segment = 0;           // in the table
  std::int16_t flags = 0;
  std::int16_t width = kTileWidth;  // elements of a line
};
static_assert(sizeof(Tile) == 32);

/// What a kernel needs of the tables.
struct Pass {
  const SegmentRow* segments = nullptr;
  const Tile* tiles = nullptr;
  const StepOutcome* outcome = nullptr;  // null: always do it
};

__device__ bool is_skipped(const StepOutcome* outcome) {
  return outcome != nullptr && !outcome->taken;
}

/// Several lanes may mark the same param, with the same value.
__device__ void mark(const SegmentRow& segment, ParamStatus status) {
  *static_cast<volatile std::uint8_t*>(segment.status) = status;
}

__device__ void add_atomically(std::int64_t& sum, std::int64_t value) {
  if (value != 0) {
    atomicAdd(reinterpret_cast<unsigned long long*>(&sum), static_cast<unsigned long long>(value));
  }
}

/// The elements of one lane: offsets in the param. kIsWhole: of a whole tile, where little has to be asked.
template <bool kIsWhole>
struct LaneTile {
  __device__ LaneTile(const Tile& tile, const SegmentRow& segment)
      : stride(static_cast<Stride>((tile.flags & kBand) != 0 ? segment.planes.cols : kTileWidth)),
        column(static_cast<int>(threadIdx.x % 32) * kLaneElems),
        line(static_cast<int>(threadIdx.x / 32) * kLaneLines),
        begin(tile.begin + static_cast<std::int64_t>(line) * stride + column),
        is_in_width(column < tile.width),
        owned_begin(segment.param_begin),
        owned_end(segment.param_begin + segment.elems) {}

  __device__ std::int64_t offset(int i) const { return begin + i * stride; }
  /// How many of the 4 elements of line i the segment owns: all or none, but for the last ones of a plain
  /// param.
  __device__ int owned(int i) const {
    if constexpr (kIsWhole) return is_in_width ? kLaneElems : 0;
    const std::int64_t at = offset(i);
    if (!is_in_width || at < owned_begin || at >= owned_end) return 0;
    return owned_end - at < kLaneElems ? static_cast<int>(owned_end - at) : kLaneElems;
  }

  /// Short in a whole tile, so that an address is one multiplication and addition away from the first.
  using Stride = std::conditional_t<kIsWhole, std::int32_t, std::int64_t>;

  Stride stride;
  int column;  // of the first of the 4 elements, in the tile
  int line;    // the first of the lane's 4 lines, in the tile
  std::int64_t begin;
  bool is_in_width;
  std::int64_t owned_begin, owned_end;
};

/// Says that a pointer from a table is one to device memory, for which there are shorter instructions.
template <class T>
__device__ __forceinline__ T* global(T* pointer) {
  __builtin_assume(__isGlobal(pointer));
  return pointer;
}

/// Four elements as they are in memory; those that are not there are 0.
__device__ __forceinline__ float4 load_raw(const float* from, int count) {
  float4 raw = {0, 0, 0, 0};
  if (count == kLaneElems) {
    raw = *reinterpret_cast<const float4*>(from);
  } else {
    if (count > 0) raw.x = from[0];
    if (count > 1) raw.y = from[1];
    if (count > 2) raw.z = from[2];
  }
  return raw;
}
__device__ __forceinline__ uint2 load_raw(const Bf16* from, int count) {
  uint2 raw = {0, 0};
  if (count == kLaneElems) {
    raw = *reinterpret_cast<const uint2*>(from);
  } else {
    if (count > 0) raw.x = from[0].bits;
    if (count > 1) raw.x |= static_cast<std::uint32_t>(from[1].bits) << 16;
    if (count > 2) raw.y = from[2].bits;
  }
  return raw;
}
__device__ __forceinline__ void unpack(float4 raw, float (&values)[kLaneElems]) {
  values[0] = raw.x;
  values[1] = raw.y;
  values[2] = raw.z;
  values[3] = raw.w;
}
__device__ __forceinline__ void unpack(uint2 raw, float (&values)[kLaneElems]) {
  values[0] = first_value(raw.x);
  values[1] = second_value(raw.x);
  values[2] = first_value(raw.y);
  values[3] = second_value(raw.y);
}

__device__ __forceinline__ void store4(float* to, const float (&values)[kLaneElems], int count) {
  if (count == kLaneElems) {
    *reinterpret_cast<float4*>(to) = make_float4(values[0], values[1], values[2], values[3]);
    return;
  }
  if (count > 0) to[0] = values[0];
  if (count > 1) to[1] = values[1];
  if (count > 2) to[2] = values[2];
}
/// Rounded to BF16, a NaN to the canonical one.
__device__ __forceinline__ void store4(Bf16* to, const float (&values)[kLaneElems], int count) {
  std::uint32_t bits[kLaneElems];
#pragma unroll
  for (int k = 0; k < kLaneElems; ++k) bits[k] = bf16_rne_bits(float_to_bits(values[k]));
  if (count == kLaneElems) {
    *reinterpret_cast<uint2*>(to) = make_uint2(bits[0] | bits[1] << 16, bits[2] | bits[3] << 16);
    return;
  }
  if (count > 0) to[0].bits = static_cast<std::uint16_t>(bits[0]);
  if (count > 1) to[1].bits = static_cast<std::uint16_t>(bits[1]);
  if (count > 2) to[2].bits = static_cast<std::uint16_t>(bits[2]);
}

/// Where the state of a lane's first element is; a copy of pointers that stores could seem to change.
struct StateAt {
  __device__ StateAt(const SegmentRow& segment, std::int64_t at, int grad_bytes)
      : master(global(segment.master + at)),
        exp_avg(global(segment.exp_avg + at)),
        exp_avg_sq(global(segment.exp_avg_sq + at)),
        grad(global(static_cast<const std::uint8_t*>(segment.grad) + at * grad_bytes)) {}

  float* master;
  float* exp_avg;
  float* exp_avg_sq;
  const void* grad;
};

/// Adam on kLinesAtOnce of the lane's lines, from line `first` on; w := the new masters, 0 where nothing is
/// owned.
template <class Grad, class Lane>
__device__ __forceinline__ void update_lines(const StateAt& state, const Lane& lane,
                                             const AdamConstants& constants, int first,
                                             float (&w)[kLinesAtOnce][kLaneElems]) {
  using RawGrad = decltype(load_raw(static_cast<const Grad*>(nullptr), 0));
  float4 p_raw[kLinesAtOnce], m_raw[kLinesAtOnce], v_raw[kLinesAtOnce];
  RawGrad g_raw[kLinesAtOnce];
#pragma unroll
  for (int k = 0; k < kLinesAtOnce; ++k) {
    const auto at = (first + k) * lane.stride;
    const int owned = lane.owned(first + k);
    p_raw[k] = load_raw(state.master + at, owned);
    m_raw[k] = load_raw(state.exp_avg + at, owned);
    v_raw[k] = load_raw(state.exp_avg_sq + at, owned);
    if (owned == 0) m_raw[k] = v_raw[k] = make_float4(1, 1, 1, 1);  // ordinary numbers: the short formula
    g_raw[k] = load_raw(static_cast<const Grad*>(state.grad) + at, owned);
  }
#pragma unroll
  for (int k = 0; k < kLinesAtOnce; ++k) {
    const auto at = (first + k) * lane.stride;
    const int owned = lane.owned(first + k);
    float m[kLaneElems], v[kLaneElems], g[kLaneElems];
    unpack(p_raw[k], w[k]);
    unpack(m_raw[k], m);
    unpack(v_raw[k], v);
    unpack(g_raw[k], g);
    adam_update4(w[k], m, v, g, constants);
    store4(state.master + at, w[k], owned);
    store4(state.exp_avg + at, m, owned);
    store4(state.exp_avg_sq + at, v, owned);
    // What is not owned takes no part in maxima, whatever the formula made of it.
#pragma unroll
    for (int j = 0; j < kLaneElems; ++j) w[k][j] = j < owned ? w[k][j] : 0.0f;
  }
}

/// bf16 or fp32 values of line i of a plain param; false when one of them is not finite.
template <class Lane>
__device__ __forceinline__ bool write_values(const SegmentRow& segment, const Lane& lane, int i,
                                             const float (&w)[kLaneElems]) {
  bool is_finite = true;
  if (segment.values_dtype == DType::kFp32) {
    store4(static_cast<float*>(segment.values) + lane.offset(i), w, lane.owned(i));
    for (const float value : w) is_finite = is_finite && isfinite(value);
  } else {
    store4(static_cast<Bf16*>(segment.values) + lane.offset(i), w, lane.owned(i));
    for (const float value : w) is_finite = is_finite && isfinite(bf16_rne(value));
  }
  return is_finite;
}

__device__ __forceinline__ MxView global(MxView planes) {
  planes.row_data = global(planes.row_data);
  planes.row_scales = global(planes.row_scales);
  planes.column_data = global(planes.column_data);
  planes.column_scales = global(planes.column_scales);
  return planes;
}

/// w in BF16, as pairs: [line][elements 0 and 1, 2 and 3].
struct LanePairs {
  Bf16Pair pairs[kLaneLines][2];
};

/// {row, block in the row} of the row block that begins at `offset`.
__device__ __forceinline__ longlong2 row_block_at(std::int64_t offset, std::int64_t cols) {
  if (((offset | cols) >> 32) == 0) {  // the division of short numbers is several times faster
    const auto low = static_cast<std::uint32_t>(offset);
    const std::uint32_t row = low / static_cast<std::uint32_t>(cols);
    return {row, (low - row * static_cast<std::uint32_t>(cols)) / static_cast<std::uint32_t>(kBlockElems)};
  }
  const std::int64_t row = offset / cols;
  return {row, (offset - row * cols) / kBlockElems};
}

/// Row bytes and row scales of the lane's lines; false when a value is not finite. Eight neighbouring lanes
/// hold a row block.
template <class Lane>
__device__ __forceinline__ bool write_row_blocks(const MxView& planes, const Tile& tile, const Lane& lane,
                                                 const LanePairs& w) {
  // Two lines in one register: half the shuffles.
  Bf16Pair amax[kLaneLines / 2];
#pragma unroll
  for (int i = 0; i < kLaneLines; i += 2) {
    const Bf16Pair even = larger(magnitudes(w.pairs[i][0]), magnitudes(w.pairs[i][1]));
    const Bf16Pair odd = larger(magnitudes(w.pairs[i + 1][0]), magnitudes(w.pairs[i + 1][1]));
    amax[i / 2] = largest_of_lanes<8>(fold(even, odd));
  }
  bool is_finite = true;
#pragma unroll
  for (int i = 0; i < kLaneLines; ++i) {
    const std::uint32_t magnitude = i % 2 == 0 ? amax[i / 2] & 0xFFFFu : amax[i / 2] >> 16;
    const std::uint32_t code = code_of(magnitude);
    is_finite = is_finite && !is_nonfinite(magnitude);
    if (lane.owned(i) == 0) continue;
    *reinterpret_cast<std::uint32_t*>(planes.row_data + lane.offset(i)) =
        encode_row(w.pairs[i][0], w.pairs[i][1], e8m0_reciprocal(code));
    if (lane.column % kBlockElems != 0) continue;
    longlong2 block;
    if ((tile.flags & kBand) != 0) {
      block.x = tile.band * kBlockElems + lane.line + i;
      block.y = (tile.column + lane.column) / kBlockElems;
    } else {
      block = row_block_at(lane.offset(i), planes.cols);
    }
    planes.row_scales[row_scale_offset(block.x, block.y, planes.cols, planes.scale_layout)] =
        static_cast<std::uint8_t>(code);
  }
  return is_finite;
}

/// Four neighbouring column scales, from column c on; the lowest byte is the first.
__device__ __forceinline__ void store_column_codes(const MxView& planes, std::int64_t band, std::int64_t c,
                                                   std::uint32_t codes) {
  if (planes.scale_layout == ScaleLayout::kCompact) {
    *reinterpret_cast<std::uint32_t*>(planes.column_scales + band * column_scale_stride(planes.cols) + c) =
        codes;
    return;
  }
#pragma unroll
  for (int j = 0; j < kLaneElems; ++j) {
    planes.column_scales[gemm_scale_offset(c + j, band, round_up(planes.rows / kBlockElems, 4) / 4)] =
        static_cast<std::uint8_t>(codes >> (8 * j));
  }
}
__device__ __forceinline__ std::uint32_t load_column_codes(const MxView& planes, std::int64_t band,
                                                           std::int64_t c) {
  if (planes.scale_layout == ScaleLayout::kCompact) {
    return *reinterpret_cast<const std::uint32_t*>(planes.column_scales +
                                                   band * column_scale_stride(planes.cols) + c);
  }
  std::uint32_t codes = 0;
#pragma unroll
  for (int j = 0; j < kLaneElems; ++j) {
    codes |=
        static_cast<std::uint32_t>(
            planes.column_scales[gemm_scale_offset(c + j, band, round_up(planes.rows / kBlockElems, 4) / 4)])
        << (8 * j);
  }
  return codes;
}

/// Column bytes of the lane's elements, with the codes of its four columns.
template <class Lane>
__device__ __forceinline__ void write_column_bytes(const MxView& planes, const Lane& lane, const LanePairs& w,
                                                   std::uint32_t codes) {
  float factor[kLaneElems];
#pragma unroll
  for (int j = 0; j < kLaneElems; ++j) factor[j] = e8m0_reciprocal(codes >> (8 * j) & 0xFFu);
#pragma unroll
  for (int i = 0; i < kLaneLines; ++i) {
    if (lane.owned(i) == 0) continue;
    *reinterpret_cast<std::uint32_t*>(planes.column_data + lane.offset(i)) =
        encode4(first_value(w.pairs[i][0]) * factor[0], second_value(w.pairs[i][0]) * factor[1],
                first_value(w.pairs[i][1]) * factor[2], second_value(w.pairs[i][1]) * factor[3]);
  }
}

/// The codes of the lane's four columns, from all lines of the tile that the segment owns. All threads call.
__device__ __forceinline__ std::uint32_t column_codes(const LanePairs& w) {
  __shared__ uint2 partial[kWarps][32];
  const int warp = static_cast<int>(threadIdx.x / 32);
  const int lane = static_cast<int>(threadIdx.x % 32);
  Bf16Pair first = 0;
  Bf16Pair second = 0;
#pragma unroll
  for (int i = 0; i < kLaneLines; ++i) {
    first = larger(first, magnitudes(w.pairs[i][0]));
    second = larger(second, magnitudes(w.pairs[i][1]));
  }
  partial[warp][lane] = make_uint2(first, second);
  __syncthreads();
#pragma unroll
  for (int other = 0; other < kWarps; ++other) {
    const uint2 theirs = partial[other][lane];
    first = larger(first, theirs.x);
    second = larger(second, theirs.y);
  }
  return code_of(first & 0xFFFFu) | code_of(first >> 16) << 8 | code_of(second & 0xFFFFu) << 16 |
         code_of(second >> 16) << 24;
}

/// One tile: Adam (kUpdate) and everything that is written from the new masters. One read and one write of
/// each state array.
template <bool kUpdate, class Grad, bool kIsWhole>
__device__ __forceinline__ void write_tile(const Tile& tile, const SegmentRow& segment,
                                           const AdamScalars* groups) {
  const LaneTile<kIsWhole> lane(tile, segment);
  const StateAt state(segment, lane.begin - lane.owned_begin, static_cast<int>(sizeof(Grad)));
  const AdamConstants constants = kUpdate ? AdamConstants(groups + segment.group) : AdamConstants();
  const bool is_plain = segment.planes.rows == 0;
  bool is_finite = true;
  LanePairs w;
#pragma unroll
  for (int first = 0; first < kLaneLines; first += kLinesAtOnce) {
    float lines[kLinesAtOnce][kLaneElems];
    if constexpr (kUpdate) {
      update_lines<Grad>(state, lane, constants, first, lines);
    } else {
#pragma unroll
      for (int k = 0; k < kLinesAtOnce; ++k) {
        unpack(load_raw(state.master + (first + k) * lane.stride, lane.owned(first + k)), lines[k]);
      }
    }
#pragma unroll
    for (int k = 0; k < kLinesAtOnce; ++k) {
      if (is_plain) is_finite = write_values(segment, lane, first + k, lines[k]) && is_finite;
      w.pairs[first + k][0] = round_to_bf16(lines[k][0], lines[k][1]);
      w.pairs[first + k][1] = round_to_bf16(lines[k][2], lines[k][3]);
    }
  }
  if (!is_plain) {
    const MxView planes = global(segment.planes);
    is_finite = write_row_blocks(planes, tile, lane, w);
    if ((tile.flags & kBand) != 0) {
      const std::uint32_t codes = column_codes(w);
      if ((tile.flags & kCut) == 0) write_column_bytes(planes, lane, w, codes);
      if (threadIdx.x < 32 && lane.is_in_width) {
        store_column_codes(planes, tile.band, tile.column + lane.column, codes);
      }
    }
  }
  if (!is_finite) mark(segment, kStatusNonFiniteMaster);
}

template <bool kUpdate, class Grad>
__global__ void __launch_bounds__(kThreads, 3) write_kernel(Pass pass, const AdamScalars* groups) {
  if (is_skipped(pass.outcome)) return;
  const Tile tile = pass.tiles[blockIdx.x];
  const SegmentRow& segment = pass.segments[tile.segment];
  if ((tile.flags & kWhole) != 0) {
    write_tile<kUpdate, Grad, true>(tile, segment, groups);
  } else {
    write_tile<kUpdate, Grad, false>(tile, segment, groups);
  }
}

/// Column bytes of one tile of a cut band, with the reduced scales.
__global__ void __launch_bounds__(kThreads) cast_kernel(Pass pass) {
  if (is_skipped(pass.outcome)) return;
  const Tile tile = pass.tiles[blockIdx.x];
  const SegmentRow& segment = pass.segments[tile.segment];
  const LaneTile<false> lane(tile, segment);
  if (!lane.is_in_width) return;
  LanePairs w;
#pragma unroll
  for (int i = 0; i < kLaneLines; ++i) {
    float line[kLaneElems];
    unpack(load_raw(segment.master + (lane.offset(i) - lane.owned_begin), lane.owned(i)), line);
    w.pairs[i][0] = round_to_bf16(line[0], line[1]);
    w.pairs[i][1] = round_to_bf16(line[2], line[3]);
  }
  const std::uint32_t codes = load_column_codes(segment.planes, tile.band, tile.column + lane.column);
  write_column_bytes(segment.planes, lane, w, codes);
}

/// Two neighbouring gradients, of which `elems` are there.
__device__ __forceinline__ float2 load_pair(const float* from, std::int64_t elems) {
  if (elems > 1) return *reinterpret_cast<const float2*>(from);
  return {elems > 0 ? from[0] : 0.0f, 0.0f};
}
__device__ __forceinline__ float2 load_pair(const Bf16* from, std::int64_t elems) {
  Bf16Pair pair = 0;
  if (elems > 1) {
    pair = *reinterpret_cast<const Bf16Pair*>(from);
  } else if (elems > 0) {
    pair = from[0].bits;
  }
  return {first_value(pair), second_value(pair)};
}

__device__ __forceinline__ double square(float value) {
  return static_cast<double>(value) * static_cast<double>(value);
}

/// Sums of the squares of kWarpRuns runs of 128, each in the tree of numerics section 4: lane l has elements
/// 2 l and 2 l + 1 of both halves of a run, so that the tree's first level is within the lane. At each
/// further level, i and i + 32, then i and i + 16, a lane gives half of its sums away and keeps the other
/// half, until it has one of one run: lanes 2 r and 2 r + 1 end with the sum of run r.
template <int kWidth>
__device__ __forceinline__ void sum_over_lanes(double (&sums)[2 * kWarpRuns]) {
  const bool is_upper = (threadIdx.x & kWidth) != 0;
#pragma unroll
  for (int i = 0; i < kWidth; ++i) {
    const double given = is_upper ? sums[i] : sums[i + kWidth];
    const double kept = is_upper ? sums[i + kWidth] : sums[i];
    sums[i] = kept + __shfl_xor_sync(0xFFFFFFFFu, given, kWidth);
  }
  if constexpr (kWidth > 1) sum_over_lanes<kWidth / 2>(sums);
}
template <class Grad>
__device__ __forceinline__ double sum_of_runs(const Grad* first, std::int64_t elems) {
  const int at = static_cast<int>(threadIdx.x % 32) * 2;
  const auto add = [&](auto is_whole, double(&sums)[2 * kWarpRuns]) {
#pragma unroll
    for (int run = 0; run < kWarpRuns; ++run) {
      constexpr std::int64_t kHalf = kSumRunElems / 2;
      const Grad* const from = first + run * kSumRunElems + at;
      const std::int64_t left = decltype(is_whole)::value ? kSumRunElems : elems - run * kSumRunElems - at;
      const float2 low = load_pair(from, left);
      const float2 high = load_pair(from + kHalf, left - kHalf);
      sums[2 * run] = square(low.x) + square(high.x);
      sums[2 * run + 1] = square(low.y) + square(high.y);
    }
  };
  double sums[2 * kWarpRuns];
  if (elems >= kWarpRuns * kSumRunElems) {
    add(std::true_type(), sums);
  } else {
    add(std::false_type(), sums);
  }
  sum_over_lanes<kWarpRuns>(sums);
  return sums[0] + __shfl_xor_sync(0xFFFFFFFFu, sums[0], 1);
}

/// Sums of squares; a warp takes the 32 runs of a tile. The limbs of each thread are a column of shared
/// memory: no conflicts, no atomics.
template <class Grad>
__global__ void __launch_bounds__(kThreads)
    grad_stats_kernel(Pass pass, std::int64_t tiles, StepStatistics* statistics) {
  __shared__ std::int64_t limbs[kSumLimbs][kThreads];
  __shared__ std::int64_t total[kSumLimbs];
  __shared__ int nonfinite_runs;
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread % 32;
#pragma unroll
  for (int k = 0; k < kSumLimbs; ++k) limbs[k][thread] = 0;
  if (thread == 0) nonfinite_runs = 0;
  __syncthreads();

  const std::int64_t warps = static_cast<std::int64_t>(gridDim.x) * kWarps;
  for (std::int64_t t = static_cast<std::int64_t>(blockIdx.x) * kWarps + thread / 32; t < tiles; t += warps) {
    const Tile tile = pass.tiles[t];
    const SegmentRow& segment = pass.segments[tile.segment];
    const std::int64_t begin = tile.begin - segment.param_begin;
    const Grad* grad = global(static_cast<const Grad*>(segment.grad) + begin);
    const std::int64_t elems = segment.elems - begin;  // of this tile and those that follow it

#pragma unroll 1
    for (int run = 0; run < kTileElems / kSumRunElems; run += kWarpRuns) {
      const double sum = sum_of_runs(grad + run * kSumRunElems, elems - run * kSumRunElems);
      if (!isfinite(sum)) {
        mark(segment, kStatusNonFiniteGradient);
        atomicAdd(&nonfinite_runs, 1);
      } else if (lane % 2 == 0) {
        add_to_sum(&limbs[0][thread], sum, kThreads);
      }
    }
  }
  __syncthreads();

  for (int k = thread / 32; k < kSumLimbs; k += kWarps) {
    std::int64_t sum = 0;
    for (int column = lane; column < kThreads; column += 32) sum += limbs[k][column];
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
      sum += __shfl_xor_sync(0xFFFFFFFFu, static_cast<long long>(sum), distance);
    }
    if (lane == 0) total[k] = sum;
  }
  __syncthreads();
  if (thread == 0) {
    // So that sums over all CTAs and ranks fit.
    normalize_sum(total);
    add_atomically(statistics->nonfinite_runs, nonfinite_runs);
  }
  __syncthreads();
  if (thread < kSumLimbs) add_atomically(statistics->square_sum[thread], total[thread]);
}

__global__ void open_statistics_kernel(StepMemory memory, std::int64_t options_hash) {
  StepStatistics& statistics = *memory.statistics;
  for (int k = 0; k < kSumLimbs; ++k) statistics.square_sum[k] = 0;
  statistics.nonfinite_runs = 0;
  statistics.options_hash = agreement_hash(options_hash, memory.state->taken);
}

__global__ void decide_kernel(StepMemory memory, StepOptions options) {
  advance(*memory.statistics, options, memory.table, *memory.state, memory.scalars, *memory.outcome);
}

__global__ void __launch_bounds__(kThreads)
    clear_kernel(uint4* to, std::int64_t count, const StepOutcome* outcome) {
  if (is_skipped(outcome)) return;
  const std::int64_t stride = static_cast<std::int64_t>(gridDim.x) * kThreads;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < count;
       i += stride) {
    to[i] = make_uint4(0, 0, 0, 0);
  }
}

__global__ void __launch_bounds__(kThreads) widen_kernel(float* to, const Bf16* from, std::int64_t count) {
  const std::int64_t stride = static_cast<std::int64_t>(gridDim.x) * kThreads;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < count;
       i += stride) {
    to[i] = bf16_to_fp32(from[i]);
  }
}

/// A table in device memory, written once.
template <class Row>
class DeviceTable {
 public:
  DeviceTable(const std::vector<Row>& rows, Device device, const std::shared_ptr<Allocator>& allocator,
              StreamRef stream)
      : size_(static_cast<std::int64_t>(rows.size())),
        buffer_(size_ * static_cast<std::int64_t>(sizeof(Row)), device, allocator) {
    mxopt::copy_bytes(buffer_.data(), rows.data(), buffer_.bytes(), device, stream);
  }
  const Row* data() const { return reinterpret_cast<const Row*>(buffer_.data()); }
  std::int64_t size() const { return size_; }

 private:
  std::int64_t size_;
  Buffer buffer_;
};

/// The tiles of the segments, and which of them belong to cut bands.
struct Tiling {
  std::vector<Tile> all, cut;

  /// As 4096 elements in a row each.
  void add_lines(std::int32_t index, const SegmentRow& segment) {
    for (std::int64_t begin = 0; begin < segment.elems; begin += kTileElems) {
      Tile tile;
      tile.begin = segment.param_begin + begin;
      tile.segment = index;
      tile.flags = static_cast<std::int16_t>(segment.elems - begin >= kTileElems ? kWhole : 0);
      all.push_back(tile);
    }
  }

  void add_bands(std::int32_t index, const SegmentRow& segment) {
    const std::int64_t cols = segment.planes.cols;
    const std::int64_t band_elems = kBlockElems * cols;
    const std::int64_t end = segment.param_begin + segment.elems;
    for (std::int64_t band = segment.param_begin / band_elems; band * band_elems < end; ++band) {
      const bool is_cut = band * band_elems < segment.param_begin || (band + 1) * band_elems > end;
      for (std::int64_t column = 0; column < cols; column += kTileWidth) {
        const std::int64_t width = std::min<std::int64_t>(kTileWidth, cols - column);
        Tile tile;
        tile.begin = band * band_elems + column;
        tile.band = band;
        tile.column = column;
        tile.segment = index;
        tile.flags = static_cast<std::int16_t>(is_cut                   ? kBand | kCut
                                               : cols <= kLongestStride ? kBand | kWhole
                                                                        : kBand);
        tile.width = static_cast<std::int16_t>(width);
        all.push_back(tile);
        if (is_cut) cut.push_back(tile);
      }
    }
  }
};

bool is_frozen(const SegmentRow& segment) {
  return segment.exp_avg == nullptr;
}

/// Of the segments that a step changes, or of the frozen ones.
Tiling write_tiling(const std::vector<SegmentRow>& segments, bool frozen) {
  Tiling tiling;
  for (std::size_t s = 0; s < segments.size(); ++s) {
    const SegmentRow& segment = segments[s];
    if (is_frozen(segment) != frozen) continue;
    if (segment.planes.column_data == nullptr) {
      tiling.add_lines(static_cast<std::int32_t>(s), segment);
    } else {
      tiling.add_bands(static_cast<std::int32_t>(s), segment);
    }
  }
  return tiling;
}

Tiling grad_tiling(const std::vector<SegmentRow>& segments) {
  Tiling tiling;
  for (std::size_t s = 0; s < segments.size(); ++s) {
    if (!is_frozen(segments[s])) tiling.add_lines(static_cast<std::int32_t>(s), segments[s]);
  }
  return tiling;
}

/// Trainable tiles, and behind them the frozen ones: a pass over all is one launch too.
struct TileTable {
  TileTable(const std::vector<Tile>& trainable, const std::vector<Tile>& frozen, Device device,
            const std::shared_ptr<Allocator>& allocator, StreamRef stream)
      : trainable_tiles(static_cast<std::int64_t>(trainable.size())),
        table(joined(trainable, frozen), device, allocator, stream) {}

  std::int64_t count(bool frozen_too) const { return frozen_too ? table.size() : trainable_tiles; }

  std::int64_t trainable_tiles;
  DeviceTable<Tile> table;

 private:
  static std::vector<Tile> joined(std::vector<Tile> first, const std::vector<Tile>& second) {
    first.insert(first.end(), second.begin(), second.end());
    return first;
  }
};

class CudaStepKernels final : public StepKernels {
 public:
  CudaStepKernels(const StepTables& tables, const Tiling& trainable, const Tiling& frozen, Device device,
                  std::shared_ptr<Allocator> allocator, const Stream& setup)
      : device_(device),
        allocator_(std::move(allocator)),
        grad_dtype_(tables.grad_dtype),
        segments_(tables.segments, device, allocator_, setup.ref()),
        write_tiles_(trainable.all, frozen.all, device, allocator_, setup.ref()),
        cut_tiles_(trainable.cut, frozen.cut, device, allocator_, setup.ref()),
        grad_tiles_(grad_tiling(tables.segments).all, device, allocator_, setup.ref()) {
    synchronize(device, setup.ref());
    MXOPT_CHECK_LE(write_tiles_.count(true), std::numeric_limits<std::int32_t>::max());  // CTAs of a launch
    const DeviceGuard guard(device_.index);
    MXOPT_CUDA_CHECK(cudaDeviceGetAttribute(&processors_, cudaDevAttrMultiProcessorCount, device_.index));
  }

  void open_statistics(const StepMemory& memory, std::int64_t options_hash, StreamRef stream) override {
    launch(1, 1, stream, open_statistics_kernel, memory, options_hash);
  }

  void grad_stats(StepStatistics& statistics, StreamRef stream) override {
    const std::int64_t tiles = grad_tiles_.size();
    const Pass pass = {segments_.data(), grad_tiles_.data(), nullptr};
    const std::int64_t blocks = few_blocks((tiles + kWarps - 1) / kWarps);
    if (grad_dtype_ == DType::kFp32) {
      launch(blocks, kThreads, stream, grad_stats_kernel<float>, pass, tiles, &statistics);
    } else {
      launch(blocks, kThreads, stream, grad_stats_kernel<Bf16>, pass, tiles, &statistics);
    }
  }

  void decide(const StepMemory& memory, const StepOptions& options, StreamRef stream) override {
    launch(1, 1, stream, decide_kernel, memory, options);
  }

  void clear(std::span<std::uint8_t> bytes, const StepOutcome* outcome, StreamRef stream) override {
    const auto count = static_cast<std::int64_t>(bytes.size() / sizeof(uint4));
    launch(few_blocks((count + kThreads - 1) / kThreads), kThreads, stream, clear_kernel,
           reinterpret_cast<uint4*>(bytes.data()), count, outcome);
  }

  void fused_update(std::span<const AdamScalars> groups, const StepOutcome* outcome,
                    StreamRef stream) override {
    const Pass pass = {segments_.data(), write_tiles_.table.data(), outcome};
    const std::int64_t tiles = write_tiles_.count(false);
    if (grad_dtype_ == DType::kFp32) {
      launch(tiles, kThreads, stream, write_kernel<true, float>, pass, groups.data());
    } else {
      launch(tiles, kThreads, stream, write_kernel<true, Bf16>, pass, groups.data());
    }
  }

  void writeback(StreamRef stream) override {
    const Pass pass = {segments_.data(), write_tiles_.table.data(), nullptr};
    launch(write_tiles_.count(true), kThreads, stream, write_kernel<false, float>, pass,
           static_cast<const AdamScalars*>(nullptr));
  }

  void cast_cut_bands(bool frozen_too, const StepOutcome* outcome, StreamRef stream) override {
    const Pass pass = {segments_.data(), cut_tiles_.table.data(), outcome};
    launch(cut_tiles_.count(frozen_too), kThreads, stream, cast_kernel, pass);
  }

  void load_master(float* master, ConstTypedSpan values, StreamRef stream) override {
    if (values.elems == 0) return;
    if (values.dtype == DType::kFp32) {
      mxopt::copy_bytes(master, values.data, values.bytes(), device_, stream);
      return;
    }
    // The values may be memory of the host, which a kernel can not read.
    const Buffer copy(values.bytes(), device_, allocator_);
    mxopt::copy_bytes(copy.data(), values.data, values.bytes(), device_, stream);
    launch(few_blocks((values.elems + kThreads - 1) / kThreads), kThreads, stream, widen_kernel, master,
           reinterpret_cast<const Bf16*>(copy.data()), values.elems);
    synchronize(device_, stream);
  }

 private:
  /// A grid that fills the device once.
  std::int64_t few_blocks(std::int64_t wanted) const {
    return std::min<std::int64_t>(wanted, static_cast<std::int64_t>(processors_) * 6);
  }

  template <class... Params, class... Args>
  void launch(std::int64_t blocks, int threads, StreamRef stream, void (*kernel)(Params...), Args... args) {
    if (blocks == 0) return;
    ++launches_;
    const DeviceGuard guard(device_.index);
    kernel<<<static_cast<unsigned>(blocks), static_cast<unsigned>(threads), 0, native(stream)>>>(args...);
    MXOPT_CUDA_CHECK(cudaGetLastError());
  }

  Device device_;
  std::shared_ptr<Allocator> allocator_;
  DType grad_dtype_;
  DeviceTable<SegmentRow> segments_;
  TileTable write_tiles_, cut_tiles_;
  DeviceTable<Tile> grad_tiles_;
  int processors_ = 0;
};

}  // namespace

std::unique_ptr<StepKernels> make_step_kernels(StepTables tables, Device device,
                                               std::shared_ptr<Allocator> allocator) {
  const Stream setup(device);
  return std::make_unique<CudaStepKernels>(tables, write_tiling(tables.segments, false),
                                           write_tiling(tables.segments, true), device, std::move(allocator),
                                           setup);
}

}  // namespace mxopt::cuda
