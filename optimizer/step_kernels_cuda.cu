#include <algorithm>
#include <cstring>
#include <limits>
#include <vector>

#include "mxopt/optimizer/run_sum_cuda.cuh"
#include "mxopt/optimizer/scale_chunks.h"
#include "mxopt/optimizer/step_kernels_cuda.h"
#include "mxopt/optimizer/write_tile_cuda.cuh"
#include "mxopt/params/launch_cuda.cuh"

namespace mxopt::cuda {

namespace {

__device__ void add_atomically(std::int64_t& sum, std::int64_t value) {
  if (value != 0) {
    atomicAdd(reinterpret_cast<unsigned long long*>(&sum), static_cast<unsigned long long>(value));
  }
}

template <bool kUpdate, class Grad, bool kShared>
__global__ void __launch_bounds__(kThreads, 3)
    write_kernel(Pass pass, const AdamScalars* groups, const __grid_constant__ Peers<kShared> peers) {
  const Tile tile = pass.tiles[blockIdx.x];
  const SegmentRow& segment = pass.segments[tile.segment];
  wait_for_former_launches();
  if (is_skipped(pass.outcome)) return;
  if ((tile.flags & kWhole) != 0) {
    write_tile<kUpdate, Grad, kShared, true>(tile, segment, groups, pass.staged_codes, peers);
  } else {
    write_tile<kUpdate, Grad, kShared, false>(tile, segment, groups, pass.staged_codes, peers);
  }
}

/// Column bytes of one tile of a cut band, with the reduced scales.
template <bool kShared>
__global__ void __launch_bounds__(kThreads)
    cast_kernel(Pass pass, const __grid_constant__ Peers<kShared> peers) {
  const Tile tile = pass.tiles[blockIdx.x];
  const SegmentRow& segment = pass.segments[tile.segment];
  wait_for_former_launches();
  if (is_skipped(pass.outcome)) return;
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
  const std::uint32_t codes =
      pass.staged_codes != nullptr
          ? *reinterpret_cast<const std::uint32_t*>(pass.staged_codes + tile.codes + lane.column)
          : load_column_codes(segment.planes, tile.band, tile.column + lane.column);
  write_column_bytes<kShared>(segment.planes, lane, w, codes, peers);
}

/// The owned scales of one chunk, to the peers; neighbouring threads have neighbouring words.
__global__ void __launch_bounds__(kThreads)
    share_kernel(const SegmentRow* segments, const ScaleChunk* chunks, const StepOutcome* outcome,
                 const __grid_constant__ PeerStores peers) {
  const ScaleChunk chunk = chunks[blockIdx.x];
  const SegmentRow& segment = segments[chunk.segment];
  wait_for_former_launches();
  if (is_skipped(outcome)) return;
  std::uint8_t* const scales = chunk.is_column ? segment.planes.column_scales : segment.planes.row_scales;
  for (int at = static_cast<int>(threadIdx.x) * 4; at < chunk.bytes; at += kThreads * 4) {
    const std::uint32_t owned = owned_scales(segment, chunk.is_column, chunk.begin + at);
    if (owned == 0) continue;
    std::uint8_t* const from = scales + chunk.begin + at;
    const std::uint32_t word = *reinterpret_cast<const std::uint32_t*>(from);
    for (int peer = 0; peer < peers.count; ++peer) {
      std::uint8_t* const to = from + peers.distance[peer];
      if (owned == 0xF) {
        *reinterpret_cast<std::uint32_t*>(to) = word;
        continue;
      }
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        if ((owned >> k & 1) != 0) to[k] = static_cast<std::uint8_t>(word >> (8 * k));
      }
    }
  }
}

/// Staged codes of one cut band, to its place in the scale array of this rank.
__global__ void __launch_bounds__(kThreads)
    spread_kernel(const CutBandRow* bands, const std::uint8_t* staged_codes, const StepOutcome* outcome) {
  const CutBandRow& band = bands[blockIdx.x];
  wait_for_former_launches();
  if (is_skipped(outcome)) return;
  for (std::int64_t c = std::int64_t{threadIdx.x} * 4; c < band.planes.cols; c += kThreads * 4) {
    store_column_codes(band.planes, band.band, c,
                       *reinterpret_cast<const std::uint32_t*>(staged_codes + band.codes + c));
  }
}

/// Sums of squares; a warp takes the 32 runs of a tile. The limbs of each thread are a column of shared
/// memory: no conflicts, no atomics.
template <class Grad>
__global__ void __launch_bounds__(kThreads)
    grad_stats_kernel(Pass pass, std::int64_t tiles, StatisticsMemory statistics) {
  __shared__ std::int64_t limbs[kSumLimbs][kThreads];
  __shared__ std::int64_t total[kSumLimbs];
  __shared__ int nonfinite_runs;
  release_next_launch();
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread % 32;
#pragma unroll
  for (int k = 0; k < kSumLimbs; ++k) limbs[k][thread] = 0;
  if (thread == 0) nonfinite_runs = 0;
  __syncthreads();
  wait_for_former_launches();

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
    add_atomically(statistics.step->nonfinite_runs, nonfinite_runs);
    if (statistics.nonfinite_runs_of_rank != nullptr) {
      add_atomically(*statistics.nonfinite_runs_of_rank, nonfinite_runs);
    }
  }
  __syncthreads();
  if (thread < kSumLimbs) add_atomically(statistics.step->square_sum[thread], total[thread]);
}

/// Limbs of the threads of a CTA, each a column, and of its warps.
struct WarpSums {
  std::int64_t limbs[kSumLimbs][kThreads];
  std::int64_t totals[kWarps][kSumLimbs];
};

/// Adds what the threads of this warp hold to `to` and `also`, where they are not null, and empties it.
__device__ void flush_warp(WarpSums& sums, std::int64_t* to, std::int64_t* also) {
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread % 32;
  std::int64_t* const total = sums.totals[thread / 32];
  for (int k = 0; k < kSumLimbs; ++k) {
    std::int64_t sum = sums.limbs[k][thread];
    sums.limbs[k][thread] = 0;
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
      sum += __shfl_xor_sync(0xFFFFFFFFu, static_cast<long long>(sum), distance);
    }
    if (lane == 0) total[k] = sum;
  }
  if (lane == 0) normalize_sum(total);
  __syncwarp();
  if (lane < kSumLimbs && to != nullptr) add_atomically(to[lane], total[lane]);
  if (lane < kSumLimbs && also != nullptr) add_atomically(also[lane], total[lane]);
  __syncwarp();
}

/// Sum over the lanes of a warp, in all of them.
__device__ std::int64_t warp_sum(std::int64_t value) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    value += __shfl_xor_sync(0xFFFFFFFFu, static_cast<long long>(value), distance);
  }
  return value;
}

/// Adds the squares of a tile's values; `elems` are there of this tile and those that follow it. Returns how
/// many runs are not finite of those that this lane has the sum of.
template <class Value>
__device__ int add_tile(WarpSums& sums, const Value* values, std::int64_t elems) {
  const int thread = static_cast<int>(threadIdx.x);
  int nonfinite_runs = 0;
#pragma unroll 1
  for (int run = 0; run < kTileElems / kSumRunElems; run += kWarpRuns) {
    const double sum = sum_of_runs(values + run * kSumRunElems, elems - run * kSumRunElems);
    if (thread % 2 != 0) continue;
    if (isfinite(sum)) {
      add_to_sum(&sums.limbs[0][thread], sum, kThreads);
    } else {
      ++nonfinite_runs;
    }
  }
  return nonfinite_runs;
}

template <class Grad>
__device__ int count_zeros(const Grad* grad, std::int64_t elems) {
  int zeros = 0;
  const std::int64_t count = elems < kTileElems ? elems : kTileElems;
  for (std::int64_t i = threadIdx.x % 32; i < count; i += 32) {
    zeros += load_pair(grad + i, 1).x == 0 ? 1 : 0;
  }
  return zeros;
}

/// grad_stats_kernel where squares go to several places or more than them is wanted: a warp takes tiles that
/// follow each other, and keeps its sums while they belong together.
template <class Grad>
__global__ void __launch_bounds__(kThreads)
    detailed_stats_kernel(Pass pass, std::int64_t tiles, StatisticsMemory statistics) {
  __shared__ WarpSums sums;
  release_next_launch();
  const int thread = static_cast<int>(threadIdx.x);
  const bool is_first_lane = thread % 32 == 0;
#pragma unroll
  for (int k = 0; k < kSumLimbs; ++k) sums.limbs[k][thread] = 0;
  wait_for_former_launches();

  const std::int64_t warps = static_cast<std::int64_t>(gridDim.x) * kWarps;
  const std::int64_t share = (tiles + warps - 1) / warps;
  const std::int64_t first = (static_cast<std::int64_t>(blockIdx.x) * kWarps + thread / 32) * share;
  const std::int64_t last = first + share < tiles ? first + share : tiles;
  const bool by_param = statistics.params != nullptr;

  // Walks the tiles: add(segment, begin, elems) returns its non-finite runs, end(segment, runs) comes after
  // the last tile of those that belong together.
  const auto walk = [&](const auto& add, const auto& end) {
    const SegmentRow* open = nullptr;
    int nonfinite_runs = 0;
    for (std::int64_t t = first; t < last; ++t) {
      const Tile tile = pass.tiles[t];
      const SegmentRow* const segment = pass.segments + tile.segment;
      if (open != nullptr && (open->norm != segment->norm || (by_param && open->param != segment->param))) {
        end(*open, warp_sum(nonfinite_runs));
        nonfinite_runs = 0;
      }
      open = segment;
      const std::int64_t begin = tile.begin - segment->param_begin;
      nonfinite_runs += add(*segment, begin, segment->elems - begin);
    }
    if (open != nullptr) end(*open, warp_sum(nonfinite_runs));
  };

  std::int64_t zeros = 0;
  walk(
      [&](const SegmentRow& segment, std::int64_t begin, std::int64_t elems) {
        const Grad* const grad = global(static_cast<const Grad*>(segment.grad) + begin);
        const int nonfinite_runs = add_tile(sums, grad, elems);
        if (nonfinite_runs != 0) mark(segment, kStatusNonFiniteGradient);
        if (statistics.counts_zeros && segment.norm >= 0) zeros += count_zeros(grad, elems);
        return nonfinite_runs;
      },
      [&](const SegmentRow& segment, std::int64_t nonfinite_runs) {
        ParamSums* const param = by_param ? statistics.params + segment.param : nullptr;
        flush_warp(sums, statistics.squares_of(segment.norm),
                   param != nullptr ? param->grad.square_sum : nullptr);
        if (!is_first_lane) return;
        add_atomically(statistics.step->nonfinite_runs, nonfinite_runs);
        if (statistics.nonfinite_runs_of_rank != nullptr) {
          add_atomically(*statistics.nonfinite_runs_of_rank, nonfinite_runs);
        }
        if (param != nullptr) add_atomically(param->nonfinite_grad_runs, nonfinite_runs);
      });
  zeros = warp_sum(zeros);
  if (is_first_lane) add_atomically(statistics.step->zero_grads, zeros);
  if (!by_param) return;
  walk(
      [&](const SegmentRow& segment, std::int64_t begin, std::int64_t elems) {
        return add_tile(sums, global(static_cast<const float*>(segment.master) + begin), elems);
      },
      [&](const SegmentRow& segment, std::int64_t nonfinite_runs) {
        ParamSums& param = statistics.params[segment.param];
        flush_warp(sums, param.master.square_sum, nullptr);
        if (is_first_lane) add_atomically(param.nonfinite_master_runs, nonfinite_runs);
      });
}

/// Zeroes the message, but for what is for agreement between ranks.
__global__ void __launch_bounds__(kThreads)
    open_statistics_kernel(StepMemory memory, std::int64_t options_hash) {
  release_next_launch();
  wait_for_former_launches();
  std::int64_t* const message = reinterpret_cast<std::int64_t*>(memory.statistics.step);
  const std::int64_t hash_at = &memory.statistics.step->options_hash - message;
  const std::int64_t tokens_at = memory.statistics.tokens - message;
  const std::int64_t stride = static_cast<std::int64_t>(gridDim.x) * kThreads;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
       i < memory.statistics.elems; i += stride) {
    message[i] = i == hash_at     ? agreement_hash(options_hash, memory.state->taken)
                 : i == tokens_at ? *memory.tokens
                                  : 0;
    if (i == tokens_at) *memory.tokens = 0;
  }
}

__global__ void add_tokens_kernel(std::int64_t* sum, std::int64_t count, const std::int64_t* counter) {
  release_next_launch();
  wait_for_former_launches();
  *sum += count + (counter != nullptr ? *counter : 0);
}

template <int kParts>
struct PartsOf {
  StepPart part[kParts];
  int count;
};

template <int kParts>
__global__ void decide_kernel(PartsOf<kParts> parts) {
  release_next_launch();
  wait_for_former_launches();
  advance(parts.part, parts.count);
}

__global__ void __launch_bounds__(kThreads)
    clear_kernel(uint4* to, std::int64_t count, const StepOutcome* outcome) {
  release_next_launch();
  wait_for_former_launches();
  if (is_skipped(outcome)) return;
  const std::int64_t stride = static_cast<std::int64_t>(gridDim.x) * kThreads;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < count;
       i += stride) {
    to[i] = make_uint4(0, 0, 0, 0);
  }
}

__global__ void __launch_bounds__(kThreads) widen_kernel(float* to, const Bf16* from, std::int64_t count) {
  release_next_launch();
  wait_for_former_launches();
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
  const StepTables& tables;
  std::vector<Tile> all, cut;
  std::vector<ScaleChunk> scales;  // where there are peers

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
    const std::int64_t most = std::max(cols, segment.planes.rows / kBlockElems);
    MXOPT_CHECK_LE(most, std::numeric_limits<std::int32_t>::max());
    const std::int64_t first_band = segment.param_begin / band_elems;
    for (std::int64_t band = first_band; band * band_elems < end; ++band) {
      const bool is_cut = band * band_elems < segment.param_begin || (band + 1) * band_elems > end;
      for (std::int64_t column = 0; column < cols; column += kTileWidth) {
        const std::int64_t width = std::min<std::int64_t>(kTileWidth, cols - column);
        Tile tile;
        tile.begin = band * band_elems + column;
        tile.band = static_cast<std::int32_t>(band);
        tile.column = static_cast<std::int32_t>(column);
        if (is_cut && tables.staged_codes != nullptr) {
          tile.codes = tables.codes_at(static_cast<std::size_t>(index), band == first_band) + column;
        }
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
Tiling write_tiling(const StepTables& tables, bool frozen) {
  Tiling tiling{tables, {}, {}, {}};
  for (std::size_t s = 0; s < tables.segments.size(); ++s) {
    const SegmentRow& segment = tables.segments[s];
    if (is_frozen(segment) != frozen) continue;
    if (segment.planes.column_data == nullptr) {
      tiling.add_lines(static_cast<std::int32_t>(s), segment);
    } else {
      tiling.add_bands(static_cast<std::int32_t>(s), segment);
    }
    if (tables.peers.count > 0) add_scale_chunks(static_cast<std::int32_t>(s), segment, tiling.scales);
  }
  return tiling;
}

Tiling grad_tiling(const StepTables& tables) {
  Tiling tiling{tables, {}, {}, {}};
  for (std::size_t s = 0; s < tables.segments.size(); ++s) {
    if (!is_frozen(tables.segments[s])) tiling.add_lines(static_cast<std::int32_t>(s), tables.segments[s]);
  }
  return tiling;
}

/// Rows of trainable params, and behind them those of frozen ones: a pass over all is one launch too.
template <class Row>
struct ScopedTable {
  ScopedTable(const std::vector<Row>& trainable, const std::vector<Row>& frozen, Device device,
              const std::shared_ptr<Allocator>& allocator, StreamRef stream)
      : trainable_rows(static_cast<std::int64_t>(trainable.size())),
        table(joined(trainable, frozen), device, allocator, stream) {}

  std::int64_t count(bool frozen_too) const { return frozen_too ? table.size() : trainable_rows; }

  std::int64_t trainable_rows;
  DeviceTable<Row> table;

 private:
  static std::vector<Row> joined(std::vector<Row> first, const std::vector<Row>& second) {
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
        peers_(tables.peers),
        staged_codes_(tables.staged_codes),
        trainable_cut_bands_(tables.trainable_cut_bands),
        segments_(tables.segments, device, allocator_, setup.ref()),
        write_tiles_(trainable.all, frozen.all, device, allocator_, setup.ref()),
        cut_tiles_(trainable.cut, frozen.cut, device, allocator_, setup.ref()),
        scale_chunks_(trainable.scales, frozen.scales, device, allocator_, setup.ref()),
        cut_bands_(tables.cut_bands, device, allocator_, setup.ref()),
        grad_tiles_(grad_tiling(tables).all, device, allocator_, setup.ref()),
        has_one_norm_(std::ranges::all_of(tables.segments, [](const auto& row) { return row.norm == 0; })) {
    synchronize(device, setup.ref());
    MXOPT_CHECK_LE(write_tiles_.count(true), std::numeric_limits<std::int32_t>::max());  // CTAs of a launch
    const DeviceGuard guard(device_.index);
    MXOPT_CUDA_CHECK(cudaDeviceGetAttribute(&processors_, cudaDevAttrMultiProcessorCount, device_.index));
  }

  void open_statistics(const StepMemory& memory, std::int64_t options_hash, StreamRef stream) override {
    launch(few_blocks((memory.statistics.elems + kThreads - 1) / kThreads), kThreads, stream,
           open_statistics_kernel, memory, options_hash);
  }

  void add_tokens(std::int64_t* sum, std::int64_t count, const std::int64_t* counter,
                  StreamRef stream) override {
    launch(1, 1, stream, add_tokens_kernel, sum, count, counter);
  }

  void grad_stats(const StatisticsMemory& statistics, StreamRef stream) override {
    const std::int64_t tiles = grad_tiles_.size();
    const Pass pass = {segments_.data(), grad_tiles_.data(), nullptr, nullptr};
    const std::int64_t blocks = few_blocks((tiles + kWarps - 1) / kWarps);
    const bool is_plain = has_one_norm_ && statistics.params == nullptr && !statistics.counts_zeros;
    if (grad_dtype_ == DType::kFp32) {
      launch(blocks, kThreads, stream, is_plain ? grad_stats_kernel<float> : detailed_stats_kernel<float>,
             pass, tiles, statistics);
    } else {
      launch(blocks, kThreads, stream, is_plain ? grad_stats_kernel<Bf16> : detailed_stats_kernel<Bf16>, pass,
             tiles, statistics);
    }
  }

  void decide(std::span<const StepPart> parts, StreamRef stream) override {
    // Why two: nearly every step is of one optimizer, and the arguments of the most are 8 times as large.
    if (parts.size() == 1) return decide_as<1>(parts, stream);
    decide_as<kMostParts>(parts, stream);
  }

  void clear(std::span<std::uint8_t> bytes, const StepOutcome* outcome, StreamRef stream) override {
    const auto count = static_cast<std::int64_t>(bytes.size() / sizeof(uint4));
    launch(few_blocks((count + kThreads - 1) / kThreads), kThreads, stream, clear_kernel,
           reinterpret_cast<uint4*>(bytes.data()), count, outcome);
  }

  void fused_update(std::span<const AdamScalars> groups, const StepOutcome* outcome,
                    StreamRef stream) override {
    if (grad_dtype_ == DType::kFp32) {
      write<true, float>(groups.data(), false, outcome, stream);
    } else {
      write<true, Bf16>(groups.data(), false, outcome, stream);
    }
  }

  void writeback(StreamRef stream) override { write<false, float>(nullptr, true, nullptr, stream); }

  void share_scales(bool frozen_too, const StepOutcome* outcome, StreamRef stream) override {
    launch(scale_chunks_.count(frozen_too), kThreads, stream, share_kernel, segments_.data(),
           scale_chunks_.table.data(), outcome, peers_);
  }

  void spread_cut_codes(bool frozen_too, const StepOutcome* outcome, StreamRef stream) override {
    launch(frozen_too ? cut_bands_.size() : trainable_cut_bands_, kThreads, stream, spread_kernel,
           cut_bands_.data(), static_cast<const std::uint8_t*>(staged_codes_), outcome);
  }

  void cast_cut_bands(bool frozen_too, const StepOutcome* outcome, StreamRef stream) override {
    const std::int64_t tiles = cut_tiles_.count(frozen_too);
    const Pass pass = pass_of(cut_tiles_, outcome);
    if (peers_.count > 0) {
      launch(tiles, kThreads, stream, cast_kernel<true>, pass, peers_);
    } else {
      launch(tiles, kThreads, stream, cast_kernel<false>, pass, NoPeers());
    }
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
  Pass pass_of(const ScopedTable<Tile>& tiles, const StepOutcome* outcome) const {
    return {segments_.data(), tiles.table.data(), outcome, staged_codes_};
  }

  template <bool kUpdate, class Grad>
  void write(const AdamScalars* groups, bool frozen_too, const StepOutcome* outcome, StreamRef stream) {
    const std::int64_t tiles = write_tiles_.count(frozen_too);
    const Pass pass = pass_of(write_tiles_, outcome);
    if (peers_.count > 0) {
      launch(tiles, kThreads, stream, write_kernel<kUpdate, Grad, true>, pass, groups, peers_);
    } else {
      launch(tiles, kThreads, stream, write_kernel<kUpdate, Grad, false>, pass, groups, NoPeers());
    }
  }

  template <int kParts>
  void decide_as(std::span<const StepPart> parts, StreamRef stream) {
    PartsOf<kParts> arguments = {};
    std::ranges::copy(parts, arguments.part);
    arguments.count = static_cast<int>(parts.size());
    launch(1, 1, stream, decide_kernel<kParts>, arguments);
  }

  /// A grid that fills the device once.
  std::int64_t few_blocks(std::int64_t wanted) const {
    return std::min<std::int64_t>(wanted, static_cast<std::int64_t>(processors_) * 6);
  }

  template <class... Params, class... Args>
  void launch(std::int64_t blocks, int threads, StreamRef stream, void (*kernel)(Params...),
              const Args&... args) {
    if (blocks != 0) ++launches_;
    cuda::launch(device_.index, stream, blocks, threads, true, kernel, args...);
  }

  Device device_;
  std::shared_ptr<Allocator> allocator_;
  DType grad_dtype_;
  PeerStores peers_;
  std::uint8_t* staged_codes_;
  std::int64_t trainable_cut_bands_;
  DeviceTable<SegmentRow> segments_;
  ScopedTable<Tile> write_tiles_, cut_tiles_;
  ScopedTable<ScaleChunk> scale_chunks_;
  DeviceTable<CutBandRow> cut_bands_;
  DeviceTable<Tile> grad_tiles_;
  bool has_one_norm_;
  int processors_ = 0;
};

}  // namespace

std::unique_ptr<StepKernels> make_step_kernels(StepTables tables, Device device,
                                               std::shared_ptr<Allocator> allocator) {
  const Stream setup(device);
  return std::make_unique<CudaStepKernels>(tables, write_tiling(tables, false), write_tiling(tables, true),
                                           device, std::move(allocator), setup);
}

}  // namespace mxopt::cuda