#include <algorithm>
#include <cstring>
#include <limits>
#include <vector>

#include "mxopt/optimizer/run_sum_cuda.cuh"
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

template <bool kUpdate, class Grad>
__global__ void __launch_bounds__(kThreads, 3) write_kernel(Pass pass, const AdamScalars* groups) {
  const Tile tile = pass.tiles[blockIdx.x];
  const SegmentRow& segment = pass.segments[tile.segment];
  wait_for_former_launches();
  if (is_skipped(pass.outcome)) return;
  if ((tile.flags & kWhole) != 0) {
    write_tile<kUpdate, Grad, true>(tile, segment, groups);
  } else {
    write_tile<kUpdate, Grad, false>(tile, segment, groups);
  }
}

/// Column bytes of one tile of a cut band, with the reduced scales.
__global__ void __launch_bounds__(kThreads) cast_kernel(Pass pass) {
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
  const std::uint32_t codes = load_column_codes(segment.planes, tile.band, tile.column + lane.column);
  write_column_bytes(segment.planes, lane, w, codes);
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
  const std::int64_t stride = static_cast<std::int64_t>(gridDim.x) * kThreads;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
       i < memory.statistics.elems; i += stride) {
    message[i] = i == hash_at ? agreement_hash(options_hash, memory.state->taken) : 0;
  }
}

__global__ void decide_kernel(StepMemory memory, StepOptions options) {
  release_next_launch();
  wait_for_former_launches();
  advance(memory, options);
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
        grad_tiles_(grad_tiling(tables.segments).all, device, allocator_, setup.ref()),
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

  void grad_stats(const StatisticsMemory& statistics, StreamRef stream) override {
    const std::int64_t tiles = grad_tiles_.size();
    const Pass pass = {segments_.data(), grad_tiles_.data(), nullptr};
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
  void launch(std::int64_t blocks, int threads, StreamRef stream, void (*kernel)(Params...),
              const Args&... args) {
    if (blocks != 0) ++launches_;
    cuda::launch(device_.index, stream, blocks, threads, true, kernel, args...);
  }

  Device device_;
  std::shared_ptr<Allocator> allocator_;
  DType grad_dtype_;
  DeviceTable<SegmentRow> segments_;
  TileTable write_tiles_, cut_tiles_;
  DeviceTable<Tile> grad_tiles_;
  bool has_one_norm_;
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