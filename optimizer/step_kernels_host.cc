#include "mxopt/optimizer/step_kernels_host.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <utility>

#include "mxopt/optimizer/exact_sum.h"
#include "mxopt/optimizer/scale_chunks.h"
#include "mxopt/quant/block_host.h"

namespace mxopt::host {

namespace {

// Sizes of the pieces of work that threads share. No result depends on them.
constexpr std::int64_t kTileCols = 256;
constexpr std::int64_t kChunkElems = 8192;
constexpr std::int64_t kRunElems = 512;

/// A piece of one segment. For params with a column plane: columns [begin, end) of one 32-row band, as far as
/// the segment owns them; else the elements [begin, end) of the segment.
struct Tile {
  std::int32_t segment = 0;
  bool cut = false;        // the segment does not own the whole band
  std::int64_t band = -1;  // -1: a run of elements
  std::int64_t begin = 0;
  std::int64_t end = 0;
  std::int64_t codes = -1;  // cut: where the codes of its columns are staged; -1: nowhere
};

/// What was written here, to its counterpart in the memory of the first `count` peers.
[[gnu::always_inline]] inline void share(const void* written, std::int64_t bytes, const PeerStores& peers,
                                         int count) {
  auto* const at = static_cast<std::uint8_t*>(const_cast<void*>(written));
  for (int peer = 0; peer < count; ++peer) {
    std::memcpy(at + peers.distance[peer], at, static_cast<std::size_t>(bytes));
  }
}

/// Scratch of one tile; lives on the stack of the thread that works on it.
struct Scratch {
  alignas(64) float w[kBlockElems * kTileCols];
  alignas(64) std::uint32_t amax[kTileCols];
  alignas(64) float reciprocals[kTileCols];
  alignas(64) float grad[kRunElems];
};

/// The elements of row `row` of a tile that its segment owns, as offsets in the tile's columns; empty when
/// first >= last.
struct RowPiece {
  std::int64_t first = 0, last = 0;
  std::int64_t offset = 0;  // of `first` in the param
};

[[gnu::always_inline]] inline RowPiece row_piece(const Tile& tile, const SegmentRow& segment,
                                                 std::int64_t row) {
  const std::int64_t line = (tile.band * kBlockElems + row) * segment.planes.cols;
  const std::int64_t first = std::max(line + tile.begin, segment.param_begin);
  const std::int64_t last = std::min(line + tile.end, segment.param_begin + segment.elems);
  return {first - line - tile.begin, last - line - tile.begin, first};
}

/// Adam on `n` elements of a segment; w := the new masters.
[[gnu::always_inline]] inline void update_run(const SegmentRow& segment, DType grad_dtype,
                                              std::int64_t offset, std::int64_t n, const AdamScalars& scalars,
                                              float* __restrict scratch, float* __restrict w) {
  float* __restrict p = segment.master + offset;
  float* __restrict m = segment.exp_avg + offset;
  float* __restrict v = segment.exp_avg_sq + offset;
  const float* __restrict g = static_cast<const float*>(segment.grad) + offset;
  if (grad_dtype == DType::kBf16) {
    widen_bf16(static_cast<const Bf16*>(segment.grad) + offset, scratch, n);
    g = scratch;
  }
  const AdamScalars s = scalars;
  for (std::int64_t i = 0; i < n; ++i) {
    const AdamElement now = adam_update({p[i], m[i], v[i]}, g[i], s);
    p[i] = w[i] = now.p;
    m[i] = now.m;
    v[i] = now.v;
  }
}

/// w := the masters of `n` elements, updated first when scalars are given.
[[gnu::always_inline]] inline void load_run(const SegmentRow& segment, DType grad_dtype, std::int64_t offset,
                                            std::int64_t n, const AdamScalars* scalars, float* scratch,
                                            float* w) {
  if (scalars == nullptr) {
    std::memcpy(w, segment.master + offset, static_cast<std::size_t>(n) * sizeof(float));
    return;
  }
  for (std::int64_t begin = 0; begin < n; begin += kRunElems) {
    update_run(segment, grad_dtype, offset + begin, std::min(kRunElems, n - begin), *scalars, scratch,
               w + begin);
  }
}

/// Rounds w to BF16 in place, writes its row blocks; `offset` is that of w[0] in the param, n a multiple
/// of 32.
[[gnu::always_inline]] inline std::int64_t write_row_blocks(const MxView& planes, std::int64_t offset,
                                                            std::int64_t n, float* w,
                                                            const PeerStores& peers) {
  for (std::int64_t i = 0; i < n; ++i) w[i] = bf16_rne(w[i]);
  std::int64_t row = offset / planes.cols;
  std::int64_t block = offset % planes.cols / kBlockElems;
  const std::int64_t row_blocks = planes.cols / kBlockElems;
  for (std::int64_t i = 0; i < n; i += kBlockElems) {
    const std::uint32_t code = e8m0_from_amax_bits(block_amax_bits(w + i));
    planes.row_scales[row_scale_offset(row, block, planes.cols, planes.scale_layout)] =
        static_cast<std::uint8_t>(code);
    encode_block(w + i, e8m0_reciprocal(code), planes.row_data + offset + i);
    if (++block == row_blocks) {
      block = 0;
      ++row;
    }
  }
  share(planes.row_data + offset, n, peers, peers.count);
  return count_nonfinite(w, n);
}

[[gnu::always_inline]] inline std::int64_t write_values(const SegmentRow& segment, std::int64_t offset,
                                                        std::int64_t n, const float* w,
                                                        const PeerStores& peers) {
  const std::int64_t at = segment.param_begin + offset;
  if (segment.values_dtype == DType::kFp32) {
    float* const out = static_cast<float*>(segment.values) + at;
    std::memcpy(out, w, static_cast<std::size_t>(n) * sizeof(float));
    share(out, n * static_cast<std::int64_t>(sizeof(float)), peers, peers.count);
    return count_nonfinite(w, n);
  }
  Bf16* __restrict out = static_cast<Bf16*>(segment.values) + at;
  std::uint32_t bad = 0;
  for (std::int64_t i = 0; i < n; ++i) {
    const std::uint32_t bits = bf16_rne_bits(float_to_bits(w[i]));
    out[i].bits = static_cast<std::uint16_t>(bits);
    bad += (bits & 0x7F80u) == 0x7F80u ? 1u : 0u;
  }
  share(out, n * static_cast<std::int64_t>(sizeof(Bf16)), peers, peers.count);
  return bad;
}

/// Final codes and bytes of the tile's columns, all of whose elements are in w.
[[gnu::always_inline]] inline void write_column_blocks(const Tile& tile, const MxView& planes,
                                                       Scratch& scratch, const PeerStores& peers) {
  const std::int64_t n = tile.end - tile.begin;
  for (std::int64_t j = 0; j < n; ++j) {
    const std::uint32_t code = e8m0_from_amax_bits(scratch.amax[j]);
    scratch.amax[j] = code;
    scratch.reciprocals[j] = e8m0_reciprocal(code);
  }
  for (std::int64_t row = 0; row < kBlockElems; ++row) {
    std::uint8_t* const out = planes.column_data + (tile.band * kBlockElems + row) * planes.cols + tile.begin;
    encode_columns(scratch.w + row * kTileCols, scratch.reciprocals, out, n);
    share(out, n, peers, peers.column_count);
  }
}

[[gnu::always_inline]] inline void store_column_codes(const Tile& tile, const MxView& planes,
                                                      const std::uint32_t* codes) {
  for (std::int64_t j = 0; j < tile.end - tile.begin; ++j) {
    planes.column_scales[column_scale_offset(tile.band, tile.begin + j, planes.rows, planes.cols,
                                             planes.scale_layout)] = static_cast<std::uint8_t>(codes[j]);
  }
}

/// One tile of the fused update, or of the writeback alone when scalars are null. Returns the non-finite
/// masters.
MXOPT_HOST_CLONES std::int64_t write_tile(const Tile& tile, const SegmentRow& segment,
                                          const StepTables& tables, const AdamScalars* scalars) {
  const DType grad_dtype = tables.grad_dtype;
  const PeerStores& peers = tables.peers;
  Scratch scratch;
  const MxView& planes = segment.planes;
  if (tile.band < 0) {
    const std::int64_t n = tile.end - tile.begin;
    load_run(segment, grad_dtype, tile.begin, n, scalars, scratch.grad, scratch.w);
    return planes.rows == 0 ? write_values(segment, tile.begin, n, scratch.w, peers)
                            : write_row_blocks(planes, segment.param_begin + tile.begin, n, scratch.w, peers);
  }
  std::int64_t bad = 0;
  std::fill_n(scratch.amax, tile.end - tile.begin, 0u);
  for (std::int64_t row = 0; row < kBlockElems; ++row) {
    const RowPiece piece = row_piece(tile, segment, row);
    if (piece.first >= piece.last) continue;
    const std::int64_t n = piece.last - piece.first;
    float* w = scratch.w + row * kTileCols + piece.first;
    load_run(segment, grad_dtype, piece.offset - segment.param_begin, n, scalars, scratch.grad, w);
    bad += write_row_blocks(planes, piece.offset, n, w, peers);
    column_amax_bits(scratch.amax + piece.first, w, n);
  }
  if (!tile.cut) {
    write_column_blocks(tile, planes, scratch, peers);
    store_column_codes(tile, planes, scratch.amax);
    return bad;
  }
  for (std::int64_t j = 0; j < tile.end - tile.begin; ++j)
    scratch.amax[j] = e8m0_from_amax_bits(scratch.amax[j]);
  if (tables.staged_codes == nullptr) {
    store_column_codes(tile, planes, scratch.amax);
  } else {
    for (std::int64_t j = 0; j < tile.end - tile.begin; ++j) {
      tables.staged_codes[tile.codes + j] = static_cast<std::uint8_t>(scratch.amax[j]);
    }
  }
  return bad;
}

/// Column bytes of the owned part of a cut band.
MXOPT_HOST_CLONES void cast_tile(const Tile& tile, const SegmentRow& segment, const StepTables& tables) {
  Scratch scratch;
  const MxView& planes = segment.planes;
  for (std::int64_t j = 0; j < tile.end - tile.begin; ++j) {
    const std::uint8_t code =
        tables.staged_codes != nullptr
            ? tables.staged_codes[tile.codes + j]
            : planes.column_scales[column_scale_offset(tile.band, tile.begin + j, planes.rows, planes.cols,
                                                       planes.scale_layout)];
    scratch.reciprocals[j] = e8m0_reciprocal(code);
  }
  for (std::int64_t row = 0; row < kBlockElems; ++row) {
    const RowPiece piece = row_piece(tile, segment, row);
    if (piece.first >= piece.last) continue;
    const std::int64_t n = piece.last - piece.first;
    round_to_bf16(segment.master + (piece.offset - segment.param_begin), scratch.w, n);
    encode_columns(scratch.w, scratch.reciprocals + piece.first, planes.column_data + piece.offset, n);
    share(planes.column_data + piece.offset, n, tables.peers, tables.peers.column_count);
  }
}

/// The owned scales of one chunk, to the peers.
void share_chunk(const ScaleChunk& chunk, const SegmentRow& segment, const PeerStores& peers) {
  std::uint8_t* const scales = chunk.is_column ? segment.planes.column_scales : segment.planes.row_scales;
  for (std::int64_t at = chunk.begin; at < chunk.begin + chunk.bytes; at += 4) {
    const std::uint32_t owned = owned_scales(segment, chunk.is_column, at);
    for (std::int64_t k = 0; k < 4; ++k) {
      if ((owned >> k & 1u) != 0) share(scales + at + k, 1, peers, peers.count);
    }
  }
}

/// Staged codes of a cut band, to the scale array of this rank.
void spread_codes(const CutBandRow& row, const std::uint8_t* staged_codes) {
  const MxView& planes = row.planes;
  for (std::int64_t c = 0; c < planes.cols; ++c) {
    planes.column_scales[column_scale_offset(row.band, c, planes.rows, planes.cols, planes.scale_layout)] =
        staged_codes[row.codes + c];
  }
}

/// Adds the squares of `n` gradients to the limbs; false when one of them is not finite.
MXOPT_HOST_CLONES bool add_squares(const void* grad, DType grad_dtype, std::int64_t offset, std::int64_t n,
                                   std::int64_t* limbs) {
  bool finite = true;
  alignas(64) float g[kSumRunElems];
  alignas(64) double squares[kSumRunElems];
  for (std::int64_t begin = 0; begin < n; begin += kSumRunElems) {
    const std::int64_t count = std::min(kSumRunElems, n - begin);
    if (count < kSumRunElems) std::fill_n(g, kSumRunElems, 0.0f);
    if (grad_dtype == DType::kBf16) {
      widen_bf16(static_cast<const Bf16*>(grad) + offset + begin, g, count);
    } else {
      std::memcpy(g, static_cast<const float*>(grad) + offset + begin,
                  static_cast<std::size_t>(count) * sizeof(float));
    }
    if (count_nonfinite(g, kSumRunElems) != 0) {
      finite = false;
      continue;
    }
    for (std::int64_t i = 0; i < kSumRunElems; ++i)
      squares[i] = static_cast<double>(g[i]) * static_cast<double>(g[i]);
    add_to_sum(limbs, sum_run(squares));
  }
  return finite;
}

std::int64_t count_zeros(const void* grad, DType grad_dtype, std::int64_t offset, std::int64_t n) {
  std::int64_t zeros = 0;
  if (grad_dtype == DType::kFp32) {
    const float* const g = static_cast<const float*>(grad) + offset;
    for (std::int64_t i = 0; i < n; ++i) zeros += g[i] == 0 ? 1 : 0;
  } else {
    const Bf16* const g = static_cast<const Bf16*>(grad) + offset;
    for (std::int64_t i = 0; i < n; ++i) zeros += (g[i].bits & 0x7FFFu) == 0 ? 1 : 0;
  }
  return zeros;
}

/// One thread's share of the statistics: its sums are kept while the runs belong together, and then added to
/// what the threads share.
class ThreadStatistics {
 public:
  explicit ThreadStatistics(const StatisticsMemory& shared) : shared_(shared) {}

  /// The runs that follow are of this segment.
  void begin(const SegmentRow& segment) {
    if (segment_ != nullptr &&
        (segment_->norm != segment.norm || (shared_.params != nullptr && segment_->param != segment.param))) {
      flush();
    }
    segment_ = &segment;
  }

  /// Returns whether all gradients are finite.
  bool add(const Tile& run, DType grad_dtype) {
    const std::int64_t n = run.end - run.begin;
    const bool is_finite = add_squares(segment_->grad, grad_dtype, run.begin, n, grad_.data());
    normalize_sum(grad_.data());
    if (!is_finite) ++nonfinite_grad_runs_;
    if (shared_.counts_zeros && segment_->norm >= 0) {
      zeros_ += count_zeros(segment_->grad, grad_dtype, run.begin, n);
    }
    if (shared_.params == nullptr) return is_finite;
    if (!add_squares(segment_->master, DType::kFp32, run.begin, n, master_.data())) ++nonfinite_master_runs_;
    normalize_sum(master_.data());
    return is_finite;
  }

  void flush() {
    if (segment_ == nullptr) return;
    if (segment_->norm >= 0) add_sum(shared_.squares_of(segment_->norm), grad_);
    add_number(shared_.step->nonfinite_runs, nonfinite_grad_runs_);
    add_number(shared_.step->zero_grads, zeros_);
    if (shared_.nonfinite_runs_of_rank != nullptr) {
      add_number(*shared_.nonfinite_runs_of_rank, nonfinite_grad_runs_);
    }
    if (shared_.params != nullptr) {
      ParamSums& param = shared_.params[segment_->param];
      add_sum(param.grad.square_sum, grad_);
      add_sum(param.master.square_sum, master_);
      add_number(param.nonfinite_grad_runs, nonfinite_grad_runs_);
      add_number(param.nonfinite_master_runs, nonfinite_master_runs_);
    }
    grad_ = master_ = {};
    nonfinite_grad_runs_ = nonfinite_master_runs_ = zeros_ = 0;
  }

 private:
  static void add_number(std::int64_t& to, std::int64_t number) {
    if (number != 0) std::atomic_ref(to).fetch_add(number, std::memory_order_relaxed);
  }
  static void add_sum(std::int64_t* to, const ExactSum& sum) {
    for (std::size_t k = 0; k < sum.size(); ++k) add_number(to[k], sum[k]);
  }

  const StatisticsMemory& shared_;
  const SegmentRow* segment_ = nullptr;
  ExactSum grad_ = {}, master_ = {};
  std::int64_t nonfinite_grad_runs_ = 0, nonfinite_master_runs_ = 0, zeros_ = 0;
};

class HostStepKernels final : public StepKernels {
 public:
  explicit HostStepKernels(StepTables tables) : tables_(std::move(tables)) {
    for (std::size_t s = 0; s < tables_.segments.size(); ++s) {
      const SegmentRow& segment = tables_.segments[s];
      const bool frozen = segment.exp_avg == nullptr;
      std::vector<Tile>& tiles = frozen ? frozen_tiles_ : tiles_;
      if (segment.planes.column_data == nullptr) {
        add_runs(static_cast<std::int32_t>(s), tiles);
      } else {
        add_bands(static_cast<std::int32_t>(s), tiles, frozen ? frozen_cut_tiles_ : cut_tiles_);
      }
      if (!frozen) add_runs(static_cast<std::int32_t>(s), runs_);
      if (tables_.peers.count > 0) {
        add_scale_chunks(static_cast<std::int32_t>(s), segment, frozen ? frozen_chunks_ : chunks_);
      }
    }
  }

  void grad_stats(const StatisticsMemory& statistics, StreamRef) override {
    ++launches_;
    const auto count = static_cast<std::int64_t>(runs_.size());
#pragma omp parallel
    {
      ThreadStatistics mine(statistics);
#pragma omp for schedule(static)
      for (std::int64_t i = 0; i < count; ++i) {
        const Tile& run = runs_[static_cast<std::size_t>(i)];
        const SegmentRow& segment = tables_.segments[static_cast<std::size_t>(run.segment)];
        mine.begin(segment);
        if (!mine.add(run, tables_.grad_dtype)) mark(segment, kStatusNonFiniteGradient);
      }
      mine.flush();
    }
    // So that sums over ranks fit.
    normalize_sum(statistics.step->square_sum);
    for (const SegmentRow& segment : tables_.segments) {
      if (segment.norm > 0) normalize_sum(statistics.squares_of(segment.norm));
      if (statistics.params == nullptr) continue;
      normalize_sum(statistics.params[segment.param].grad.square_sum);
      normalize_sum(statistics.params[segment.param].master.square_sum);
    }
  }

  void open_statistics(const StepMemory& memory, std::int64_t options_hash, StreamRef) override {
    const StatisticsMemory& statistics = memory.statistics;
    std::memset(static_cast<void*>(statistics.step), 0,
                static_cast<std::size_t>(statistics.elems) * sizeof(std::int64_t));
    statistics.step->options_hash = agreement_hash(options_hash, memory.state->taken);
    *statistics.tokens = std::exchange(*memory.tokens, 0);
  }

  void add_tokens(std::int64_t* sum, std::int64_t count, const std::int64_t* counter, StreamRef) override {
    *sum += count + (counter != nullptr ? *counter : 0);
  }

  void decide(std::span<const StepPart> parts, StreamRef) override {
    advance(parts.data(), static_cast<int>(parts.size()));
  }

  void clear(std::span<std::uint8_t> bytes, const StepOutcome* outcome, StreamRef) override {
    if (takes(outcome) && !bytes.empty()) std::memset(bytes.data(), 0, bytes.size());
  }

  void fused_update(std::span<const AdamScalars> groups, const StepOutcome* outcome, StreamRef) override {
    if (takes(outcome)) write(tiles_, groups);
  }

  void writeback(StreamRef) override {
    write(tiles_, {});
    write(frozen_tiles_, {});
  }

  void share_scales(bool frozen_too, const StepOutcome* outcome, StreamRef) override {
    if (!takes(outcome)) return;
    share(chunks_);
    if (frozen_too) share(frozen_chunks_);
  }

  void spread_cut_codes(bool frozen_too, const StepOutcome* outcome, StreamRef) override {
    const std::size_t count =
        frozen_too ? tables_.cut_bands.size() : static_cast<std::size_t>(tables_.trainable_cut_bands);
    if (!takes(outcome) || count == 0) return;
    ++launches_;
    for (std::size_t i = 0; i < count; ++i) spread_codes(tables_.cut_bands[i], tables_.staged_codes);
  }

  void cast_cut_bands(bool frozen_too, const StepOutcome* outcome, StreamRef) override {
    if (!takes(outcome)) return;
    cast(cut_tiles_);
    if (frozen_too) cast(frozen_cut_tiles_);
  }

  void load_master(float* master, ConstTypedSpan values, StreamRef) override {
    if (values.dtype == DType::kBf16) {
      widen_bf16(values.as<Bf16>().data(), master, values.elems);
    } else {
      std::ranges::copy(values.as<float>(), master);
    }
  }

 private:
  static bool takes(const StepOutcome* outcome) {
    return outcome == nullptr || outcome->taken;
  }

  void add_runs(std::int32_t s, std::vector<Tile>& tiles) const {
    const std::int64_t elems = tables_.segments[static_cast<std::size_t>(s)].elems;
    for (std::int64_t begin = 0; begin < elems; begin += kChunkElems) {
      tiles.push_back({s, false, -1, begin, std::min(begin + kChunkElems, elems), -1});
    }
  }

  void add_bands(std::int32_t s, std::vector<Tile>& tiles, std::vector<Tile>& cut_tiles) const {
    const SegmentRow& segment = tables_.segments[static_cast<std::size_t>(s)];
    const std::int64_t cols = segment.planes.cols;
    const std::int64_t band_elems = kBlockElems * cols;
    const std::int64_t end = segment.param_begin + segment.elems;
    const std::int64_t first_band = segment.param_begin / band_elems;
    for (std::int64_t band = first_band; band * band_elems < end; ++band) {
      const bool cut = band * band_elems < segment.param_begin || (band + 1) * band_elems > end;
      const std::int64_t codes =
          cut ? tables_.codes_at(static_cast<std::size_t>(s), band == first_band) : std::int64_t{-1};
      for (std::int64_t begin = 0; begin < cols; begin += kTileCols) {
        const Tile tile = {
            s, cut, band, begin, std::min(begin + kTileCols, cols), codes < 0 ? codes : codes + begin};
        tiles.push_back(tile);
        if (cut) cut_tiles.push_back(tile);
      }
    }
  }

  void write(const std::vector<Tile>& tiles, std::span<const AdamScalars> groups) {
    ++launches_;
    const auto count = static_cast<std::int64_t>(tiles.size());
#pragma omp parallel for schedule(static)
    for (std::int64_t i = 0; i < count; ++i) {
      const Tile& tile = tiles[static_cast<std::size_t>(i)];
      const SegmentRow& segment = tables_.segments[static_cast<std::size_t>(tile.segment)];
      const AdamScalars* scalars =
          groups.empty() ? nullptr : &groups[static_cast<std::size_t>(segment.group)];
      if (write_tile(tile, segment, tables_, scalars) != 0) mark(segment, kStatusNonFiniteMaster);
    }
  }

  void cast(const std::vector<Tile>& tiles) {
    ++launches_;
    const auto count = static_cast<std::int64_t>(tiles.size());
#pragma omp parallel for schedule(static)
    for (std::int64_t i = 0; i < count; ++i) {
      const Tile& tile = tiles[static_cast<std::size_t>(i)];
      cast_tile(tile, tables_.segments[static_cast<std::size_t>(tile.segment)], tables_);
    }
  }

  void share(const std::vector<ScaleChunk>& chunks) {
    if (chunks.empty()) return;
    ++launches_;
    const auto count = static_cast<std::int64_t>(chunks.size());
#pragma omp parallel for schedule(static)
    for (std::int64_t i = 0; i < count; ++i) {
      const ScaleChunk& chunk = chunks[static_cast<std::size_t>(i)];
      share_chunk(chunk, tables_.segments[static_cast<std::size_t>(chunk.segment)], tables_.peers);
    }
  }

  /// Several threads may mark the same param, with the same value.
  static void mark(const SegmentRow& segment, ParamStatus status) {
    std::atomic_ref<std::uint8_t>(*segment.status).store(status, std::memory_order_relaxed);
  }

  StepTables tables_;
  std::vector<Tile> tiles_, frozen_tiles_;
  std::vector<Tile> cut_tiles_, frozen_cut_tiles_;
  std::vector<ScaleChunk> chunks_, frozen_chunks_;
  std::vector<Tile> runs_;  // of the gradients; their starts are multiples of 128 in the param
};

}  // namespace

std::unique_ptr<StepKernels> make_step_kernels(StepTables tables) {
  return std::make_unique<HostStepKernels>(std::move(tables));
}

}  // namespace mxopt::host
