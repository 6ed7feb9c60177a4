#include "mxopt/quant/writeback_host.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <vector>

#include "mxopt/quant/block_host.h"

namespace mxopt::host {

namespace {

/// Widest tile. A tile is one band of 32 rows x up to this many columns, starts at a multiple of 32 columns
/// and so holds whole blocks of both planes: no two tiles write the same scale.
constexpr std::int64_t kTileCols = 1024;
/// Bytes of a scale array that one thread clears or copies at a time.
constexpr std::int64_t kChunkBytes = 1 << 20;

/// Calls body(i) for i in [0, count), on several threads where there are some.
template <class Body>
void parallel_for(std::int64_t count, const Body& body) {
#if defined(_OPENMP)
#pragma omp parallel for schedule(static) if (count > 1)
#endif
  for (std::int64_t i = 0; i < count; ++i) body(i);
}

/// Calls body(begin, bytes) for the chunks of [0, bytes).
template <class Body>
void for_each_chunk(std::int64_t bytes, const Body& body) {
  parallel_for((bytes + kChunkBytes - 1) / kChunkBytes, [&](std::int64_t chunk) {
    const std::int64_t begin = chunk * kChunkBytes;
    body(begin, static_cast<std::size_t>(std::min(kChunkBytes, bytes - begin)));
  });
}

/// Columns [c_begin, c_end) of one band; both ends are multiples of 32.
struct Tile {
  std::int64_t band;
  std::int64_t c_begin;
  std::int64_t c_end;

  std::int64_t cols() const { return c_end - c_begin; }
  std::int64_t row_begin() const { return band * kBlockElems; }
  std::int64_t row_end() const { return row_begin() + kBlockElems; }
};

/// Columns [c_begin + lo, c_begin + hi) of one row of a tile; nothing when lo >= hi.
struct RowPiece {
  std::int64_t lo;
  std::int64_t hi;

  bool empty() const { return lo >= hi; }
  std::int64_t elems() const { return hi - lo; }
  /// Where the first block that the piece touches begins.
  std::int64_t first_block() const { return lo / kBlockElems * kBlockElems; }
};

/// The flat range [begin, end) of a matrix, cut in tiles.
class TileGrid {
 public:
  TileGrid(std::int64_t cols, std::int64_t begin, std::int64_t end) : cols_(cols), begin_(begin), end_(end) {
    if (begin == end) return;
    const std::int64_t first_row = begin / cols;
    const std::int64_t last_row = (end - 1) / cols;
    first_band_ = first_row / kBlockElems;
    const bool one_row = first_row == last_row;
    first_across_ = one_row ? begin % cols / kTileCols : 0;
    across_ = (one_row ? (end - 1) % cols : cols - 1) / kTileCols + 1 - first_across_;
    tiles_ = (last_row / kBlockElems + 1 - first_band_) * across_;
  }

  std::int64_t cols() const { return cols_; }
  std::int64_t tiles() const { return tiles_; }

  Tile tile(std::int64_t index) const {
    const std::int64_t c_begin = (first_across_ + index % across_) * kTileCols;
    return {first_band_ + index / across_, c_begin, std::min(c_begin + kTileCols, cols_)};
  }

  /// The columns of `row` that lie both in the tile and in the range.
  [[gnu::always_inline]] RowPiece piece(const Tile& tile, std::int64_t row) const {
    const std::int64_t origin = row * cols_ + tile.c_begin;
    return {std::max<std::int64_t>(begin_ - origin, 0), std::min(end_ - origin, tile.cols())};
  }

 private:
  std::int64_t cols_;
  std::int64_t begin_;
  std::int64_t end_;
  std::int64_t first_band_ = 0;
  std::int64_t first_across_ = 0;
  std::int64_t across_ = 0;
  std::int64_t tiles_ = 0;
};

/// One weight of the batch, and where its tiles and scales sit in the batch.
struct Entry {
  Mxfp8Shard shard;
  TileGrid grid;
  std::int64_t first_tile;
  std::int64_t row_scales;  // offsets into the packed scales
  std::int64_t column_scales;

  /// Bytes of the planes: [0] is element `row_origin` / `column_origin` of the matrix.
  std::uint8_t* row_out() const {
    return shard.row_fragment != nullptr ? shard.row_fragment : shard.weight.row_data;
  }
  std::int64_t row_origin() const { return shard.row_fragment != nullptr ? shard.start : 0; }
  std::uint8_t* column_out() const {
    return shard.column_fragment != nullptr ? shard.column_fragment : shard.weight.column_data;
  }
  std::int64_t column_origin() const { return shard.column_fragment != nullptr ? shard.start : 0; }

  std::int64_t row_scale(std::int64_t row, std::int64_t block) const {
    return row_scales + row_scale_offset(row, block, shard.weight.cols, shard.weight.scale_layout);
  }
  std::int64_t column_scale(std::int64_t band, std::int64_t c) const {
    return column_scales +
           column_scale_offset(band, c, shard.weight.rows, shard.weight.cols, shard.weight.scale_layout);
  }
};

std::vector<Entry> entries_of(std::span<const Mxfp8Shard> batch) {
  std::vector<Entry> entries;
  entries.reserve(batch.size());
  std::int64_t tiles = 0;
  std::int64_t scale_bytes = 0;
  for (const Mxfp8Shard& shard : batch) {
    const MxView& weight = shard.weight;
    Entry entry{shard, TileGrid(weight.cols, shard.start, shard.start + shard.master.elems), tiles, 0, 0};
    entry.shard.name = {};  // the caller's, and read no more
    tiles += entry.grid.tiles();
    entry.row_scales = scale_bytes;
    if (weight.has_row()) scale_bytes += row_scale_bytes(weight.rows, weight.cols);
    entry.column_scales = scale_bytes;
    if (weight.has_column()) scale_bytes += column_scale_bytes(weight.rows, weight.cols);
    entries.push_back(entry);
  }
  return entries;
}

/// Calls body(entry, tile) for every tile of the batch.
template <class Body>
void for_each_tile(const std::vector<Entry>& entries, const Body& body) {
  if (entries.empty()) return;
  parallel_for(entries.back().first_tile + entries.back().grid.tiles(), [&](std::int64_t index) {
    const auto after =
        std::upper_bound(entries.begin(), entries.end(), index,
                         [](std::int64_t i, const Entry& entry) { return i < entry.first_tile; });
    const Entry& entry = *(after - 1);
    body(entry, entry.grid.tile(index - entry.first_tile));
  });
}

[[gnu::always_inline]] inline void load(const float* in, float* w, std::int64_t n) {
  round_to_bf16(in, w, n);
}
[[gnu::always_inline]] inline void load(const Bf16* in, float* w, std::int64_t n) {
  widen_bf16(in, w, n);
}

/// Starts to read masters of the next row, so that memory works while this row is computed: the rows of a
/// tile are too short, and too far from one another, for the processor to foresee them.
template <class Master>
[[gnu::always_inline]] inline void prefetch_row(const Entry& entry, const Tile& tile, std::int64_t row) {
  constexpr std::int64_t kLineElems = 64 / static_cast<std::int64_t>(sizeof(Master));
  const RowPiece piece = entry.grid.piece(tile, row);
  const auto* master = static_cast<const Master*>(entry.shard.master.data);
  const std::int64_t begin = row * entry.grid.cols() + tile.c_begin + piece.lo - entry.shard.start;
  for (std::int64_t i = 0; i < piece.elems(); i += kLineElems) __builtin_prefetch(master + begin + i);
}

/// w[lo, hi) := owned values of a row, rounded to BF16; 0 in the rest of the blocks that lo and hi cut.
template <class Master>
[[gnu::always_inline]] inline void load_row(const Entry& entry, const Tile& tile, std::int64_t row,
                                            RowPiece piece, float* w) {
  const std::int64_t flat = row * entry.grid.cols() + tile.c_begin + piece.lo;
  const auto* master = static_cast<const Master*>(entry.shard.master.data);
  if (row + 1 < tile.row_end()) prefetch_row<Master>(entry, tile, row + 1);
  load(master + (flat - entry.shard.start), w + piece.lo, piece.elems());
  std::fill(w + piece.first_block(), w + piece.lo, 0.0f);
  std::fill(w + piece.hi, w + round_up(piece.hi, kBlockElems), 0.0f);
}

template <class Master>
[[gnu::always_inline]] inline void amax_tile(const Entry& entry, const Tile& tile, std::uint8_t* packed) {
  const bool has_row = entry.shard.weight.has_row();
  const bool has_column = entry.shard.weight.has_column();
  alignas(64) float w[kTileCols];
  alignas(64) std::uint32_t column_amax[kTileCols];
  if (has_column) std::fill(column_amax, column_amax + tile.cols(), 0u);

  for (std::int64_t row = tile.row_begin(); row < tile.row_end(); ++row) {
    const RowPiece piece = entry.grid.piece(tile, row);
    if (piece.empty()) continue;
    load_row<Master>(entry, tile, row, piece, w);
    if (has_row) {
      for (std::int64_t c = piece.first_block(); c < piece.hi; c += kBlockElems) {
        packed[entry.row_scale(row, (tile.c_begin + c) / kBlockElems)] =
            static_cast<std::uint8_t>(e8m0_from_amax_bits(block_amax_bits(w + c)));
      }
    }
    if (has_column) column_amax_bits(column_amax + piece.lo, w + piece.lo, piece.elems());
  }

  if (has_column) {
    alignas(64) std::uint8_t codes[kTileCols];
    for (std::int64_t j = 0; j < tile.cols(); ++j) {
      codes[j] = static_cast<std::uint8_t>(e8m0_from_amax_bits(column_amax[j]));
    }
    for (std::int64_t j = 0; j < tile.cols(); ++j)
      packed[entry.column_scale(tile.band, tile.c_begin + j)] = codes[j];
  }
}

/// Returns how many owned values of the tile are not finite.
template <class Master>
[[gnu::always_inline]] inline std::int64_t cast_tile(const Entry& entry, const Tile& tile,
                                                     const std::uint8_t* packed) {
  const bool has_row = entry.shard.weight.has_row();
  const bool has_column = entry.shard.weight.has_column();
  alignas(64) float w[kTileCols];
  alignas(64) float row_reciprocals[kTileCols];
  alignas(64) float column_reciprocals[kTileCols];
  if (has_column) {
    alignas(64) std::uint8_t codes[kTileCols];
    for (std::int64_t j = 0; j < tile.cols(); ++j)
      codes[j] = packed[entry.column_scale(tile.band, tile.c_begin + j)];
    for (std::int64_t j = 0; j < tile.cols(); ++j) column_reciprocals[j] = e8m0_reciprocal(codes[j]);
  }

  std::int64_t nonfinite = 0;
  for (std::int64_t row = tile.row_begin(); row < tile.row_end(); ++row) {
    const RowPiece piece = entry.grid.piece(tile, row);
    if (piece.empty()) continue;
    load_row<Master>(entry, tile, row, piece, w);
    nonfinite += count_nonfinite(w + piece.lo, piece.elems());
    const std::int64_t flat = row * entry.grid.cols() + tile.c_begin + piece.lo;
    if (has_row) {
      // One reciprocal per element, as in the column plane: then a block that the shard cuts is nothing
      // special.
      for (std::int64_t c = piece.first_block(); c < piece.hi; c += kBlockElems) {
        const std::uint8_t code = packed[entry.row_scale(row, (tile.c_begin + c) / kBlockElems)];
        std::fill_n(row_reciprocals + c, kBlockElems, e8m0_reciprocal(code));
      }
      encode_columns(w + piece.lo, row_reciprocals + piece.lo, entry.row_out() + (flat - entry.row_origin()),
                     piece.elems());
    }
    if (has_column) {
      encode_columns(w + piece.lo, column_reciprocals + piece.lo,
                     entry.column_out() + (flat - entry.column_origin()), piece.elems());
    }
  }
  return nonfinite;
}

/// What dequantize() reads and writes; out[0] is element `begin`.
struct DequantizeArgs {
  const MxView* weight;
  Plane plane;
  std::int64_t begin;
  TypedSpan out;
};

[[gnu::always_inline]] inline void store(const float* values, float* out, std::int64_t n) {
  std::copy(values, values + n, out);
}
[[gnu::always_inline]] inline void store(const float* values, Bf16* out, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) out[i] = fp32_to_bf16(values[i]);
}

template <class Out>
[[gnu::always_inline]] inline void dequantize_tile(const DequantizeArgs& args, const TileGrid& grid,
                                                   const Tile& tile) {
  const MxView& weight = *args.weight;
  const bool is_row = args.plane == Plane::kRow;
  const std::uint8_t* data = is_row ? weight.row_data : weight.column_data;
  alignas(64) float scales[kTileCols];
  alignas(64) float values[kTileCols];
  if (!is_row) {
    for (std::int64_t j = 0; j < tile.cols(); ++j) {
      scales[j] = e8m0_value(weight.column_scales[column_scale_offset(
          tile.band, tile.c_begin + j, weight.rows, weight.cols, weight.scale_layout)]);
    }
  }
  for (std::int64_t row = tile.row_begin(); row < tile.row_end(); ++row) {
    const RowPiece piece = grid.piece(tile, row);
    if (piece.empty()) continue;
    for (std::int64_t c = piece.first_block(); is_row && c < piece.hi; c += kBlockElems) {
      const std::int64_t at =
          row_scale_offset(row, (tile.c_begin + c) / kBlockElems, weight.cols, weight.scale_layout);
      std::fill(scales + c, scales + c + kBlockElems, e8m0_value(weight.row_scales[at]));
    }
    const std::int64_t flat = row * weight.cols + tile.c_begin + piece.lo;
    decode(data + flat, scales + piece.lo, values, piece.elems());
    store(values, static_cast<Out*>(args.out.data) + (flat - args.begin), piece.elems());
  }
}

// One tile per call, so that the choice of the instruction set costs nothing.

MXOPT_HOST_CLONES void amax_tile_fp32(const Entry& entry, const Tile& tile, std::uint8_t* packed) {
  amax_tile<float>(entry, tile, packed);
}
MXOPT_HOST_CLONES void amax_tile_bf16(const Entry& entry, const Tile& tile, std::uint8_t* packed) {
  amax_tile<Bf16>(entry, tile, packed);
}
MXOPT_HOST_CLONES std::int64_t cast_tile_fp32(const Entry& entry, const Tile& tile,
                                              const std::uint8_t* packed) {
  return cast_tile<float>(entry, tile, packed);
}
MXOPT_HOST_CLONES std::int64_t cast_tile_bf16(const Entry& entry, const Tile& tile,
                                              const std::uint8_t* packed) {
  return cast_tile<Bf16>(entry, tile, packed);
}
MXOPT_HOST_CLONES void dequantize_tile_fp32(const DequantizeArgs& args, const TileGrid& grid,
                                            const Tile& tile) {
  dequantize_tile<float>(args, grid, tile);
}
MXOPT_HOST_CLONES void dequantize_tile_bf16(const DequantizeArgs& args, const TileGrid& grid,
                                            const Tile& tile) {
  dequantize_tile<Bf16>(args, grid, tile);
}

/// A caller may pass the weights' own scale arena as the packed scales; then there is nothing to copy.
void copy_scales(const std::uint8_t* from, std::uint8_t* to, std::int64_t bytes) {
  if (from == to) return;
  for_each_chunk(bytes, [&](std::int64_t begin, std::size_t n) { std::memcpy(to + begin, from + begin, n); });
}

class HostBatch final : public Mxfp8Batch::State {
 public:
  explicit HostBatch(std::span<const Mxfp8Shard> shards)
      : entries_(entries_of(shards)), packed_bytes_(packed_scale_bytes(shards)) {}

  void partial_amax(std::uint8_t* packed, StreamRef) const override {
    for_each_chunk(packed_bytes_,
                   [&](std::int64_t begin, std::size_t n) { std::memset(packed + begin, 0, n); });
    for_each_tile(entries_, [&](const Entry& entry, const Tile& tile) {
      if (entry.shard.master.dtype == DType::kFp32) {
        amax_tile_fp32(entry, tile, packed);
      } else {
        amax_tile_bf16(entry, tile, packed);
      }
    });
  }

  void partial_cast(const std::uint8_t* packed, std::int64_t* nonfinite, StreamRef) const override {
    for (const Entry& entry : entries_) {
      const MxView& weight = entry.shard.weight;
      if (weight.has_row()) {
        copy_scales(packed + entry.row_scales, weight.row_scales, row_scale_bytes(weight.rows, weight.cols));
      }
      if (weight.has_column()) {
        copy_scales(packed + entry.column_scales, weight.column_scales,
                    column_scale_bytes(weight.rows, weight.cols));
      }
    }
    std::atomic<std::int64_t> count = 0;
    for_each_tile(entries_, [&](const Entry& entry, const Tile& tile) {
      const std::int64_t in_tile = entry.shard.master.dtype == DType::kFp32
                                       ? cast_tile_fp32(entry, tile, packed)
                                       : cast_tile_bf16(entry, tile, packed);
      if (in_tile != 0) count.fetch_add(in_tile, std::memory_order_relaxed);
    });
    if (nonfinite != nullptr) *nonfinite += count.load();
  }

 private:
  std::vector<Entry> entries_;
  std::int64_t packed_bytes_;
};

}  // namespace

std::unique_ptr<Mxfp8Batch::State> prepare(std::span<const Mxfp8Shard> shards) {
  return std::make_unique<HostBatch>(shards);
}

void dequantize(const MxView& weight, Plane plane, std::int64_t begin, TypedSpan out) {
  const DequantizeArgs args{&weight, plane, begin, out};
  const TileGrid grid(weight.cols, begin, begin + out.elems);
  parallel_for(grid.tiles(), [&](std::int64_t index) {
    if (out.dtype == DType::kFp32) {
      dequantize_tile_fp32(args, grid, grid.tile(index));
    } else {
      dequantize_tile_bf16(args, grid, grid.tile(index));
    }
  });
}

}  // namespace mxopt::host
