// Tiles of 32 lines x 128 elements, the pieces of work of the step's CUDA passes, and what a lane has of one.
#pragma once

#include <cstdint>
#include <type_traits>

#include "mxopt/optimizer/step_kernels.h"
#include "mxopt/params/global_pointer.cuh"

namespace mxopt::cuda {

inline constexpr int kThreads = 256;
inline constexpr int kWarps = kThreads / 32;
/// A tile is 32 lines of up to 128 elements: a lane has 4 neighbouring elements (16 bytes of FP32 state) of 4
/// lines.
inline constexpr int kTileLines = 32;
inline constexpr int kTileWidth = 128;
inline constexpr int kTileElems = kTileLines * kTileWidth;
inline constexpr int kLaneLines = kTileLines / kWarps;
inline constexpr int kLaneElems = 4;
/// Elements between lines up to which offsets inside of a tile are 32 bits.
inline constexpr std::int64_t kLongestStride = 1 << 24;

enum TileFlags : std::int32_t {
  kBand = 1,   // of a param with a column plane
  kCut = 2,    // of a band that the segment does not own as a whole
  kWhole = 4,  // all its lines are owned, and short is its stride
};

/// For params with a column plane a tile is 32 rows x up to 128 columns of one band; else 4096 elements in a
/// row, as lines of 128. So both are walked in the same way: line l begins at begin + l * stride.
struct Tile {
  std::int64_t begin = 0;             // of the first element, in the param
  std::int64_t codes = -1;            // kCut: where the codes of its columns are staged; -1: nowhere
  std::int32_t band = 0, column = 0;  // kBand: where the tile is
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
  std::uint8_t* staged_codes = nullptr;  // of cut bands; null: their codes are in the scale arrays
};

/// In the place of PeerStores where there are no peers: the code has then no trace of them.
struct NoPeers {
  static constexpr std::int32_t count = 0;
  static constexpr std::int32_t column_count = 0;
};
template <bool kShared>
using Peers = std::conditional_t<kShared, PeerStores, NoPeers>;

/// Stores to `to`, and kShared: to its counterpart in the memory of the first `count` peers.
///
/// An ordinary store is enough: what a kernel stored is in the peer's memory when the kernel is over, and a
/// peer reads it only behind a reduction that this rank enters after the kernel.
template <bool kShared, class Word>
__device__ __forceinline__ void store(Word* to, const Word& value, const Peers<kShared>& peers, int count) {
  *to = value;
  if constexpr (kShared) {
    for (int peer = 0; peer < count; ++peer) {
      *reinterpret_cast<Word*>(reinterpret_cast<std::uint8_t*>(to) + peers.distance[peer]) = value;
    }
  }
}

__device__ __forceinline__ bool is_skipped(const StepOutcome* outcome) {
  return outcome != nullptr && !outcome->taken;
}

/// Several lanes may mark the same param, with the same value.
__device__ __forceinline__ void mark(const SegmentRow& segment, ParamStatus status) {
  *static_cast<volatile std::uint8_t*>(segment.status) = status;
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

}  // namespace mxopt::cuda
