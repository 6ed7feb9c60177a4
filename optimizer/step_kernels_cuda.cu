#include <algorithm>
#include <cstring>
#include <limits>
#include <vector>

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
/// Runs of gradients that a warp adds up at a time, one for each lane in the end.
constexpr int kWarpRuns = 32;

enum TileFlags : std::int32_t { kBand = 1, kCut = 2 };

/// For params with a column plane a tile is 32 rows x up to 128 columns of one band; else 4096 elements in a
/// row, as lines of 128. So both are walked in the same way: line l begins at begin + l * stride.
struct Tile {
  std::int64_t begin = 0;    // of the first element, in the param
  std::int32_t segment = 0;  // in the table
  std::int16_t flags = 0;
  std::int16_t width = kTileWidth;  // elements of a line
};
static_assert(sizeof(Tile) == 16);

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

/// The elements of one lane: offsets in the param.
struct LaneTile {
  __device__ LaneTile(const Tile& tile, const SegmentRow& segment)
      : stride((tile.flags & kBand) != 0 ? segment.planes.cols : kTileWidth),
        column(static_cast<int>(threadIdx.x % 32) * kLaneElems),
        line(static_cast<int>(threadIdx.x / 32) * kLaneLines),
        begin(tile.begin + line * stride + column),
        is_in_width(column < tile.width),
        owned_begin(segment.param_begin),
        owned_end(segment.param_begin + segment.elems) {}

  __device__ std::int64_t offset(int i) const { return begin + i * stride; }
  /// How many of the 4 elements of line i the segment owns: all or none, but for the last ones of a plain
  /// param.
  __device__ int owned(int i) const {
    const std::int64_t at = offset(i);
    if (!is_in_width || at < owned_begin || at >= owned_end) return 0;
    return owned_end - at < kLaneElems ? static_cast<int>(owned_end - at) : kLaneElems;
  }

  std::int64_t stride;
  int column;  // of the first of the 4 elements, in the tile
  int line;    // the first of the lane's 4 lines, in the tile
  std::int64_t begin;
  bool is_in_width;
  std::int64_t owned_begin, owned_end;
};

__device__ __forceinline__ float4 load4(const float* from, int count) {
  if (count == kLaneElems) return *reinterpret_cast<const float4*>(from);
  float4 value = {0, 0, 0, 0};
  if (count > 0) value.x = from[0];
  if (count > 1) value.y = from[1];
  if (count > 2) value.z = from[2];
  return value;
}
__device__ __forceinline__ float4 load4(const Bf16* from, int count) {
  if (count == kLaneElems) {
    const uint2 pairs = *reinterpret_cast<const uint2*>(from);
    return {first_value(pairs.x), second_value(pairs.x), first_value(pairs.y), second_value(pairs.y)};
  }
  float4 value = {0, 0, 0, 0};
  if (count > 0) value.x = bf16_to_fp32(from[0]);
  if (count > 1) value.y = bf16_to_fp32(from[1]);
  if (count > 2) value.z = bf16_to_fp32(from[2]);
  return value;
}
__device__ __forceinline__ void store4(float* to, const float4& value, int count) {
  if (count == kLaneElems) {
    *reinterpret_cast<float4*>(to) = value;
    return;
  }
  if (count > 0) to[0] = value.x;
  if (count > 1) to[1] = value.y;
  if (count > 2) to[2] = value.z;
}
/// Rounded to BF16, a NaN to the canonical one.
__device__ __forceinline__ void store4(Bf16* to, const float4& value, int count) {
  const Bf16 first = fp32_to_bf16(value.x);
  const Bf16 second = fp32_to_bf16(value.y);
  const Bf16 third = fp32_to_bf16(value.z);
  const Bf16 fourth = fp32_to_bf16(value.w);
  if (count == kLaneElems) {
    *reinterpret_cast<uint2*>(to) = make_uint2(first.bits | static_cast<std::uint32_t>(second.bits) << 16,
                                               third.bits | static_cast<std::uint32_t>(fourth.bits) << 16);
    return;
  }
  if (count > 0) to[0] = first;
  if (count > 1) to[1] = second;
  if (count > 2) to[2] = third;
}

/// Adam on kLinesAtOnce of the lane's lines, from line `first` on; w := the new masters, 0 where nothing is
/// owned.
template <class Grad>
__device__ __forceinline__ void update_lines(const SegmentRow& segment, const LaneTile& lane,
                                             const AdamScalars& scalars, int first, float4* w) {
  float4 m[kLinesAtOnce], v[kLinesAtOnce], g[kLinesAtOnce];
#pragma unroll
  for (int k = 0; k < kLinesAtOnce; ++k) {
    const std::int64_t at = lane.offset(first + k) - lane.owned_begin;
    const int owned = lane.owned(first + k);
    w[k] = load4(segment.master + at, owned);
    m[k] = load4(segment.exp_avg + at, owned);
    v[k] = load4(segment.exp_avg_sq + at, owned);
    g[k] = load4(static_cast<const Grad*>(segment.grad) + at, owned);
  }
#pragma unroll
  for (int k = 0; k < kLinesAtOnce; ++k) {
    const std::int64_t at = lane.offset(first + k) - lane.owned_begin;
    const int owned = lane.owned(first + k);
    const auto update = [&](float& p, float& first_moment, float& second_moment, float grad) {
      const AdamElement now = adam_update({p, first_moment, second_moment}, grad, scalars);
      p = now.p;
      first_moment = now.m;
      second_moment = now.v;
    };
    update(w[k].x, m[k].x, v[k].x, g[k].x);
    update(w[k].y, m[k].y, v[k].y, g[k].y);
    update(w[k].z, m[k].z, v[k].z, g[k].z);
    update(w[k].w, m[k].w, v[k].w, g[k].w);
    store4(segment.master + at, w[k], owned);
    store4(segment.exp_avg + at, m[k], owned);
    store4(segment.exp_avg_sq + at, v[k], owned);
    // What is not owned takes no part in maxima, whatever the formula made of it.
    if (owned < 1) w[k].x = 0;
    if (owned < 2) w[k].y = 0;
    if (owned < 3) w[k].z = 0;
    if (owned < 4) w[k].w = 0;
  }
}

/// The masters of the lane's elements, updated first when kUpdate; 0 where the segment owns nothing.
template <bool kUpdate, class Grad>
__device__ __forceinline__ void load_masters(const SegmentRow& segment, const LaneTile& lane,
                                             const AdamScalars* groups, float4 (&w)[kLaneLines]) {
  if constexpr (kUpdate) {
    const AdamScalars scalars = groups[segment.group];
#pragma unroll
    for (int first = 0; first < kLaneLines; first += kLinesAtOnce) {
      update_lines<Grad>(segment, lane, scalars, first, w + first);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kLaneLines; ++i) {
      w[i] = load4(segment.master + (lane.offset(i) - lane.owned_begin), lane.owned(i));
    }
  }
}

/// bf16 or fp32 values of a plain param.
__device__ __forceinline__ void write_values(const SegmentRow& segment, const LaneTile& lane,
                                             const float4 (&w)[kLaneLines]) {
  bool finite = true;
#pragma unroll
  for (int i = 0; i < kLaneLines; ++i) {
    const int owned = lane.owned(i);
    if (segment.values_dtype == DType::kFp32) {
      store4(static_cast<float*>(segment.values) + lane.offset(i), w[i], owned);
      for (float value : {w[i].x, w[i].y, w[i].z, w[i].w}) finite = finite && isfinite(value);
    } else {
      store4(static_cast<Bf16*>(segment.values) + lane.offset(i), w[i], owned);
      for (float value : {w[i].x, w[i].y, w[i].z, w[i].w}) finite = finite && isfinite(bf16_rne(value));
    }
  }
  if (!finite) mark(segment, kStatusNonFiniteMaster);
}

/// w in BF16, as pairs: [line][elements 0 and 1, 2 and 3].
struct LanePairs {
  Bf16Pair pairs[kLaneLines][2];
};

/// Row bytes and row scales of the lane's lines. Eight neighbouring lanes hold a row block.
__device__ __forceinline__ void write_row_blocks(const SegmentRow& segment, const LaneTile& lane,
                                                 const LanePairs& w) {
  const MxView& planes = segment.planes;
  // Two lines in one register: half the shuffles.
  Bf16Pair amax[kLaneLines / 2];
#pragma unroll
  for (int i = 0; i < kLaneLines; i += 2) {
    const Bf16Pair even = larger(magnitudes(w.pairs[i][0]), magnitudes(w.pairs[i][1]));
    const Bf16Pair odd = larger(magnitudes(w.pairs[i + 1][0]), magnitudes(w.pairs[i + 1][1]));
    amax[i / 2] = largest_of_lanes<8>(fold(even, odd));
  }
  bool finite = true;
#pragma unroll
  for (int i = 0; i < kLaneLines; ++i) {
    const std::uint32_t magnitude = i % 2 == 0 ? amax[i / 2] & 0xFFFFu : amax[i / 2] >> 16;
    const std::uint32_t code = code_of(magnitude);
    finite = finite && !is_nonfinite(magnitude);
    if (lane.owned(i) == 0) continue;
    const std::int64_t at = lane.offset(i);
    *reinterpret_cast<std::uint32_t*>(planes.row_data + at) =
        encode_row(w.pairs[i][0], w.pairs[i][1], e8m0_reciprocal(code));
    if (lane.column % kBlockElems != 0) continue;
    const std::int64_t row = at / planes.cols;
    const std::int64_t block = (at - row * planes.cols) / kBlockElems;
    planes.row_scales[row_scale_offset(row, block, planes.cols, planes.scale_layout)] =
        static_cast<std::uint8_t>(code);
  }
  if (!finite) mark(segment, kStatusNonFiniteMaster);
}

/// Four neighbouring column scales, from `column` of the tile on; the lowest byte is the first.
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
__device__ __forceinline__ void write_column_bytes(const MxView& planes, const LaneTile& lane,
                                                   const LanePairs& w, std::uint32_t codes) {
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

__device__ __forceinline__ LanePairs to_bf16(const float4 (&w)[kLaneLines]) {
  LanePairs result;
#pragma unroll
  for (int i = 0; i < kLaneLines; ++i) {
    result.pairs[i][0] = round_to_bf16(w[i].x, w[i].y);
    result.pairs[i][1] = round_to_bf16(w[i].z, w[i].w);
  }
  return result;
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
template <bool kUpdate, class Grad>
__global__ void __launch_bounds__(kThreads) write_kernel(Pass pass, const AdamScalars* groups) {
  if (is_skipped(pass.outcome)) return;
  const Tile tile = pass.tiles[blockIdx.x];
  const SegmentRow& segment = pass.segments[tile.segment];
  const MxView& planes = segment.planes;
  const LaneTile lane(tile, segment);

  float4 masters[kLaneLines];
  load_masters<kUpdate, Grad>(segment, lane, groups, masters);
  if (planes.rows == 0) {
    write_values(segment, lane, masters);
    return;
  }
  const LanePairs w = to_bf16(masters);
  write_row_blocks(segment, lane, w);
  if ((tile.flags & kBand) == 0) return;

  const std::uint32_t codes = column_codes(w);
  if ((tile.flags & kCut) == 0) write_column_bytes(planes, lane, w, codes);
  if (threadIdx.x < 32 && lane.is_in_width) {
    const std::int64_t row = tile.begin / planes.cols;
    store_column_codes(planes, row / kBlockElems, tile.begin - row * planes.cols + lane.column, codes);
  }
}

/// Column bytes of one tile of a cut band, with the reduced scales.
__global__ void __launch_bounds__(kThreads) cast_kernel(Pass pass) {
  if (is_skipped(pass.outcome)) return;
  const Tile tile = pass.tiles[blockIdx.x];
  const SegmentRow& segment = pass.segments[tile.segment];
  const LaneTile lane(tile, segment);
  if (!lane.is_in_width) return;
  float4 masters[kLaneLines];
  load_masters<false, float>(segment, lane, nullptr, masters);
  const std::int64_t row = tile.begin / segment.planes.cols;
  const std::uint32_t codes = load_column_codes(segment.planes, row / kBlockElems,
                                                tile.begin - row * segment.planes.cols + lane.column);
  write_column_bytes(segment.planes, lane, to_bf16(masters), codes);
}

/// The lane's part of the sum of one run: elements lane, lane + 32, lane + 64 and lane + 96 of it.
template <class Grad>
__device__ __forceinline__ double squares_of_lane(const Grad* run, std::int64_t elems) {
  double squares[4];
#pragma unroll
  for (int part = 0; part < 4; ++part) {
    const int at = part * 32 + static_cast<int>(threadIdx.x % 32);
    float value = 0;
    if (at < elems) {
      if constexpr (sizeof(Grad) == sizeof(float)) {
        value = run[at];
      } else {
        value = bf16_to_fp32(run[at]);
      }
    }
    squares[part] = static_cast<double>(value) * static_cast<double>(value);
  }
  // The tree of numerics section 4 adds elements i and i + 64 first, then i and i + 32.
  return (squares[0] + squares[2]) + (squares[1] + squares[3]);
}

/// The rest of the tree, for 32 runs at once: i and i + 16, then i and i + 8, and so on. At each level a lane
/// gives half of its runs away and keeps the other half, so that in the end sums[0] of lane r is the sum of
/// run r.
template <int kWidth>
__device__ __forceinline__ void sum_over_lanes(double (&sums)[kWarpRuns]) {
  const bool is_upper = (threadIdx.x & kWidth) != 0;
#pragma unroll
  for (int i = 0; i < kWidth; ++i) {
    const double given = is_upper ? sums[i] : sums[i + kWidth];
    const double kept = is_upper ? sums[i + kWidth] : sums[i];
    sums[i] = kept + __shfl_xor_sync(0xFFFFFFFFu, given, kWidth);
  }
  if constexpr (kWidth > 1) sum_over_lanes<kWidth / 2>(sums);
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
    const Grad* grad = static_cast<const Grad*>(segment.grad) + begin;
    const std::int64_t elems = segment.elems - begin;  // of this tile and those that follow it

    double sums[kWarpRuns];
#pragma unroll
    for (int run = 0; run < kWarpRuns; ++run) {
      const std::int64_t first = run * kSumRunElems;
      sums[run] = squares_of_lane(grad + first, elems - first);
    }
    sum_over_lanes<kWarpRuns / 2>(sums);
    if (isfinite(sums[0])) {
      add_to_sum(&limbs[0][thread], sums[0], kThreads);
    } else {
      mark(segment, kStatusNonFiniteGradient);
      atomicAdd(&nonfinite_runs, 1);
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
  statistics.options_hash = options_hash;
  statistics.steps_taken = memory.state->taken;
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
      all.push_back({segment.param_begin + begin, index, 0, kTileWidth});
    }
  }

  void add_bands(std::int32_t index, const SegmentRow& segment) {
    const std::int64_t cols = segment.planes.cols;
    const std::int64_t band_elems = kBlockElems * cols;
    const std::int64_t end = segment.param_begin + segment.elems;
    for (std::int64_t band = segment.param_begin / band_elems; band * band_elems < end; ++band) {
      const bool is_cut = band * band_elems < segment.param_begin || (band + 1) * band_elems > end;
      for (std::int64_t column = 0; column < cols; column += kTileWidth) {
        const Tile tile = {band * band_elems + column, index,
                           static_cast<std::int16_t>(is_cut ? kBand | kCut : kBand),
                           static_cast<std::int16_t>(std::min<std::int64_t>(kTileWidth, cols - column))};
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
    const DeviceGuard guard(device_.index);
    // The values may be memory of the host, which a kernel can not read.
    void* copy = nullptr;
    MXOPT_CUDA_CHECK(cudaMallocAsync(&copy, static_cast<std::size_t>(values.bytes()), native(stream)));
    mxopt::copy_bytes(copy, values.data, values.bytes(), device_, stream);
    launch(few_blocks((values.elems + kThreads - 1) / kThreads), kThreads, stream, widen_kernel, master,
           static_cast<const Bf16*>(copy), values.elems);
    MXOPT_CUDA_CHECK(cudaFreeAsync(copy, native(stream)));
  }

 private:
  /// A grid that fills the device once.
  std::int64_t few_blocks(std::int64_t wanted) const {
    return std::min<std::int64_t>(wanted, static_cast<std::int64_t>(processors_) * 6);
  }

  template <class... Params, class... Args>
  void launch(std::int64_t blocks, int threads, StreamRef stream, void (*kernel)(Params...), Args... args) {
    if (blocks == 0) return;
    MXOPT_CHECK_LE(blocks, std::numeric_limits<std::int32_t>::max());
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
