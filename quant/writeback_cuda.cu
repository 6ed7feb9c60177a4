#include <algorithm>
#include <cstddef>
#include <cstring>
#include <limits>
#include <utility>
#include <vector>

#include <cuda_runtime.h>

#include "mxopt/params/global_pointer.cuh"
#include "mxopt/params/launch_cuda.cuh"
#include "mxopt/quant/block_cuda.cuh"
#include "mxopt/quant/mxfp8.h"
#include "mxopt/quant/writeback_cuda.h"

namespace mxopt::cuda {

namespace {

// A tile is one band of 32 rows x what a warp reads of one row with 16 bytes a lane: 128 columns of fp32 or
// 256 of bf16. It is the work of one thread block: 4 warps of 8 rows each. Tiles start at multiples of 128
// columns and so hold whole blocks of both planes: no two tiles write the same scale.
constexpr int kWarps = 4;
constexpr int kThreads = 32 * kWarps;
constexpr int kWarpRows = 8;
static_assert(kWarps * kWarpRows == kBlockElems);
constexpr int kVectorBytes = 16;
/// Blocks of threads that a multiprocessor must have room for: 64 registers a thread, and more bytes in
/// flight than the memory needs to be busy.
constexpr int kAmaxBlocks = 8;
constexpr int kCastBlocks = 6;
/// Bytes of a scale array that one block of threads clears or copies.
constexpr std::int64_t kPieceBytes = 16 << 10;
constexpr int kPieceVectors = static_cast<int>(kPieceBytes) / (kVectorBytes * kThreads);
constexpr std::int64_t kMaxGrid = std::numeric_limits<std::int32_t>::max();

/// How a lane holds one row of a tile.
template <class Master>
struct Lanes {
  static constexpr int kElems = kVectorBytes / static_cast<int>(sizeof(Master));
  static constexpr int kPairs = kElems / 2;
  static constexpr int kTileCols = 32 * kElems;
  static constexpr int kOfBlock = static_cast<int>(kBlockElems) / kElems;  // lanes that share a row block
  static constexpr int kRowCodes = kWarpRows / kOfBlock;  // codes of row blocks that a lane is in charge of
};
constexpr int kMaxTilePairs = Lanes<Bf16>::kTileCols / 2;

/// Planes of an entry, and its master type: what kernels are specialised for.
enum EntryKind : std::uint32_t {
  kRowFp32,
  kColumnFp32,
  kBothFp32,
  kRowBf16,
  kColumnBf16,
  kBothBf16,
};

/// One weight of the batch that owns elements, as the kernels need it. Addresses of element 0 may lie outside
/// of any memory, since a master or a fragment begins at the shard's first element.
struct alignas(16) Entry {
  std::uintptr_t master;  // address of element 0, rounded down to 16 bytes
  std::uintptr_t row_out;
  std::uintptr_t column_out;
  std::int64_t cols;
  std::int64_t begin;  // owned elements [begin, end)
  std::int64_t end;
  std::int64_t row_scales;  // offsets into the packed scales
  std::int64_t column_scales;
  std::int32_t first_tile;
  std::int32_t first_band;
  std::int32_t tiles_across;
  std::int32_t row_scale_tiles;     // gemm layout: 512-byte tiles of the array across; compact: 0
  std::int32_t column_scale_tiles;  // likewise
  std::uint32_t master_shift;       // the bytes that were rounded off `master`
  std::uint32_t kind;               // EntryKind
  std::uint32_t vector_stores;      // 1: a lane's bytes of a row may be stored at once
};

/// Bytes of the packed scales that no tile writes: [offset, offset + bytes).
struct ZeroPiece {
  std::int64_t offset;
  std::int64_t bytes;
};
/// Packed scales that belong into a weight's scale array.
struct CopyPiece {
  std::int64_t offset;
  std::int64_t bytes;
  std::uint8_t* to;
};

/// The table of a batch: counts, and pointers to arrays of the device.
struct Table {
  std::int32_t entries = 0;
  std::int32_t tiles = 0;
  std::int32_t zeros = 0;
  std::int32_t copies = 0;
  const std::int32_t* first_tiles = nullptr;  // [entries]
  const Entry* entry = nullptr;
  const ZeroPiece* zero = nullptr;
  const CopyPiece* copy = nullptr;
};

struct AmaxArgs {
  Table table;
  std::uint8_t* packed;
};

struct CastArgs {
  Table table;
  const std::uint8_t* packed;
  std::int64_t* nonfinite;  // may be null
};

// Device: where a thread is.

/// The entry that a tile belongs to: the last one that begins at it or before it. Each warp looks at 32
/// places at a time, so that one step finds it among 32 entries and three among 32,768. All 32 lanes call.
__device__ __forceinline__ int entry_of_tile(const Table& table, int tile, unsigned lane) {
  int first = 0;
  int count = table.entries;
  while (count > 1) {
    const int step = (count + 31) / 32;
    const int probe = static_cast<int>(lane) * step;
    const bool reached = probe < count && __ldg(table.first_tiles + first + probe) <= tile;
    const int last = __popc(__ballot_sync(0xFFFFFFFFu, reached)) - 1;
    first += last * step;
    count = min(step, count - last * step);
  }
  return first;
}

/// The entry that a tile belongs to. All threads of the block call.
__device__ __forceinline__ void load_entry(const Table& table, int tile, Entry& entry) {
  constexpr int kWords = static_cast<int>(sizeof(Entry) / sizeof(std::uint32_t));
  static_assert(sizeof(Entry) % sizeof(std::uint32_t) == 0 && kWords <= kThreads);
  const Entry* from = table.entry + entry_of_tile(table, tile, threadIdx.x % 32);
  if (threadIdx.x < kWords) {
    reinterpret_cast<std::uint32_t*>(&entry)[threadIdx.x] =
        __ldg(reinterpret_cast<const std::uint32_t*>(from) + threadIdx.x);
  }
  __syncthreads();
}

/// Where a thread works: the rows [row, row + 8) of its warp, and the columns [col, col + kElems) of its
/// lane.
struct Place {
  unsigned lane;
  int warp;
  std::int64_t band;
  std::int64_t tile_col;
  std::int64_t row;
  std::int64_t col;
  std::int64_t flat;  // element (row, col)
  std::int64_t padded_cols;
  bool active;  // the columns are inside the matrix
  bool whole;   // all of the tile that is inside the matrix is owned
  bool roomy;   // and so are the runs before its first element and after its last one
};

template <class Master>
__device__ __forceinline__ Place place_of(const Entry& entry, int tile) {
  constexpr int kTileCols = Lanes<Master>::kTileCols;
  const unsigned index = static_cast<unsigned>(tile - entry.first_tile);
  const unsigned across = static_cast<unsigned>(entry.tiles_across);
  Place place;
  place.lane = threadIdx.x % 32;
  place.warp = static_cast<int>(threadIdx.x / 32);
  place.band = entry.first_band + static_cast<std::int64_t>(index / across);
  place.tile_col = static_cast<std::int64_t>(index % across) * kTileCols;
  place.row = place.band * kBlockElems + place.warp * kWarpRows;
  place.col = place.tile_col + place.lane * Lanes<Master>::kElems;
  place.flat = place.row * entry.cols + place.col;
  place.padded_cols = round_up(entry.cols, 128);
  place.active = place.col < entry.cols;
  const std::int64_t first = place.band * kBlockElems * entry.cols + place.tile_col;
  const std::int64_t cols_inside = min(std::int64_t{kTileCols}, entry.cols - place.tile_col);
  const std::int64_t end = first + (kBlockElems - 1) * entry.cols + cols_inside;
  place.whole = first >= entry.begin && end <= entry.end;
  place.roomy = first - Lanes<Master>::kElems >= entry.begin && end + Lanes<Master>::kElems <= entry.end;
  return place;
}

/// Elements [lo, hi) of a lane's run of one row are owned.
struct Owned {
  short lo;
  short hi;
};

template <class Master>
__device__ __forceinline__ Owned owned_part(const Entry& entry, const Place& place, std::int64_t flat) {
  constexpr std::int64_t kElems = Lanes<Master>::kElems;
  const std::int64_t lo = min(max(entry.begin - flat, std::int64_t{0}), kElems);
  const std::int64_t hi = min(max(entry.end - flat, std::int64_t{0}), kElems);
  return {static_cast<short>(lo), static_cast<short>(place.active ? hi : 0)};
}

/// A place in a scale array, and how far it is to the scale of the next row (of a row block) or column (of a
/// column block) inside the same 32.
struct ScalePlace {
  std::int64_t offset;
  std::int64_t pitch;
};

__device__ __forceinline__ ScalePlace row_scale_place(const Entry& entry, std::int64_t row,
                                                      std::int64_t block) {
  if (entry.row_scale_tiles == 0) {
    const std::int64_t stride = row_scale_stride(entry.cols);
    return {entry.row_scales + row * stride + block, stride};
  }
  return {entry.row_scales + gemm_scale_offset(row, block, entry.row_scale_tiles), 16};
}

__device__ __forceinline__ ScalePlace column_scale_place(const Entry& entry, std::int64_t band,
                                                         std::int64_t col) {
  if (entry.column_scale_tiles == 0) {
    return {entry.column_scales + band * column_scale_stride(entry.cols) + col, 1};
  }
  return {entry.column_scales + gemm_scale_offset(col, band, entry.column_scale_tiles), 16};
}

// Device: reading masters.

// Loads from global memory: from an address alone the compiler would make generic ones. They may be moved
// freely, but not in front of the wait for former launches: their addresses come from shared memory.

__device__ __forceinline__ uint4 load_vector(std::uintptr_t address) {
  uint4 vector;
  asm("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
      : "=r"(vector.x), "=r"(vector.y), "=r"(vector.z), "=r"(vector.w)
      : "l"(address));
  return vector;
}

/// One element as it is in memory, in the low bits.
template <class Master>
__device__ __forceinline__ std::uint32_t load_element(std::uintptr_t address) {
  if constexpr (sizeof(Master) == 4) {
    std::uint32_t bits;
    asm("ld.global.u32 %0, [%1];" : "=r"(bits) : "l"(address));
    return bits;
  } else {
    std::uint16_t bits;
    asm("ld.global.u16 %0, [%1];" : "=h"(bits) : "l"(address));
    return bits;
  }
}

/// The owned elements of a lane's run, one by one; 0 for the others.
template <class Master>
__device__ __forceinline__ uint4 load_owned(std::uintptr_t address, Owned owned) {
  constexpr int kPerWord = 4 / static_cast<int>(sizeof(Master));
  uint4 vector = make_uint4(0, 0, 0, 0);
#pragma unroll 1
  for (int j = owned.lo; j < owned.hi; ++j) {
    const std::uint32_t bits = load_element<Master>(address + j * sizeof(Master)) << (16 * (j % kPerWord));
    const int word = j / kPerWord;
    vector.x |= word == 0 ? bits : 0;
    vector.y |= word == 1 ? bits : 0;
    vector.z |= word == 2 ? bits : 0;
    vector.w |= word == 3 ? bits : 0;
  }
  return vector;
}

/// How the masters of a tile are read.
enum class Reading {
  kAligned,  // whole tile, masters at multiples of 16 bytes
  kShifted,  // roomy tile, masters at any multiple of their size
  kEdge,     // anything else
};

/// The 16 bytes that begin `shift` bytes after the start of `low`, a multiple of the size of a master.
template <class Master>
__device__ __forceinline__ uint4 shifted(uint4 low, uint4 high, std::uint32_t shift) {
  return bytes_from(low, high, sizeof(Master) == 4 ? shift & ~3u : shift);
}

/// The vector of another lane. All 32 lanes call.
__device__ __forceinline__ uint4 from_lane(uint4 vector, unsigned lane) {
  constexpr unsigned kAll = 0xFFFFFFFFu;
  return make_uint4(__shfl_sync(kAll, vector.x, lane), __shfl_sync(kAll, vector.y, lane),
                    __shfl_sync(kAll, vector.z, lane), __shfl_sync(kAll, vector.w, lane));
}

/// The last lane of a tile that has columns inside the matrix.
template <class Master>
__device__ __forceinline__ int last_lane(const Entry& entry, const Place& place) {
  const std::int64_t cols = min(std::int64_t{Lanes<Master>::kTileCols}, entry.cols - place.tile_col);
  return static_cast<int>(cols) / Lanes<Master>::kElems - 1;
}

/// Calls consume(group, i, vector, owned) for the lane's run of each row in order, row group + i of the warp;
/// group is a multiple of 4, i known to the compiler, and elements that are not owned are 0. The loads of a
/// tile are issued before prepare() and the first use.
///
/// Why: rows are a multiple of 64 bytes apart, so masters that do not start at a multiple of 16 bytes are off
/// by the same number of bytes everywhere. Then a lane loads the aligned vector that its run begins in, and
/// gets the one behind it from its neighbour. For the last lane, lane i has loaded that of row i. Only where
/// those vectors reach outside of the shard are elements loaded one by one.
template <class Master, Reading kReading, class Prepare, class Consume>
__device__ __forceinline__ void for_each_row(const Entry& entry, const Place& place, const Prepare& prepare,
                                             const Consume& consume) {
  constexpr int kElems = Lanes<Master>::kElems;
  constexpr int kGroupRows = kWarpRows / 2;
  const std::uintptr_t address = entry.master + place.flat * sizeof(Master);
  const std::uintptr_t pitch = entry.cols * sizeof(Master);
  const std::uint32_t shift = entry.master_shift;
  const uint4 none = make_uint4(0, 0, 0, 0);
  if constexpr (kReading != Reading::kEdge) {
    const Owned owned{0, static_cast<short>(place.active ? kElems : 0)};
    if constexpr (kReading == Reading::kAligned) {
      uint4 rows[kWarpRows];
#pragma unroll
      for (int i = 0; i < kWarpRows; ++i) rows[i] = place.active ? load_vector(address + i * pitch) : none;
      prepare();
#pragma unroll
      for (int i = 0; i < kWarpRows; ++i) consume(0, i, rows[i], owned);
    } else {
      const int last = last_lane<Master>(entry, place);
      const std::uintptr_t behind_last =
          address + (last + 1 - static_cast<int>(place.lane)) * kVectorBytes + place.lane * pitch;
      const uint4 behind = place.lane < kWarpRows ? load_vector(behind_last) : none;
      uint4 low[kWarpRows];
#pragma unroll
      for (int i = 0; i < kWarpRows; ++i) low[i] = place.active ? load_vector(address + i * pitch) : none;
      prepare();
#pragma unroll
      for (int i = 0; i < kWarpRows; ++i) {
        const uint4 next = from_lane(low[i], min(place.lane + 1, 31u));  // 0 behind the last lane
        const uint4 end = from_lane(behind, i);
        const uint4 high = static_cast<int>(place.lane) == last ? end : next;
        consume(0, i, shifted<Master>(low[i], high, shift), owned);
      }
    }
  } else {
    prepare();
#pragma unroll 1
    for (int group = 0; group < kWarpRows; group += kGroupRows) {
      uint4 low[kGroupRows];
      uint4 high[kGroupRows];
      Owned owned[kGroupRows];
      bool vector[kGroupRows];
#pragma unroll
      for (int i = 0; i < kGroupRows; ++i) {
        const std::int64_t flat = place.flat + (group + i) * entry.cols;
        const std::uintptr_t from = address + (group + i) * pitch;
        owned[i] = owned_part<Master>(entry, place, flat);
        const bool all = owned[i].lo == 0 && owned[i].hi == kElems;
        const bool room = flat - kElems >= entry.begin && flat + 2 * kElems <= entry.end;
        vector[i] = all && (room || shift == 0);
        low[i] = vector[i] ? load_vector(from) : none;
        high[i] = vector[i] && shift != 0 ? load_vector(from + kVectorBytes) : none;
      }
#pragma unroll
      for (int i = 0; i < kGroupRows; ++i) {
        uint4 run = shifted<Master>(low[i], high[i], shift);
        if (!vector[i] && owned[i].lo < owned[i].hi) {
          run = load_owned<Master>(address + (group + i) * pitch + shift, owned[i]);
        }
        consume(group, i, run, owned[i]);
      }
    }
  }
}

template <class Master>
__device__ __forceinline__ void to_pairs(uint4 vector, Bf16Pair (&pairs)[Lanes<Master>::kPairs]) {
  if constexpr (sizeof(Master) == 4) {
    pairs[0] = round_to_bf16(bits_to_float(vector.x), bits_to_float(vector.y));
    pairs[1] = round_to_bf16(bits_to_float(vector.z), bits_to_float(vector.w));
  } else {
    pairs[0] = vector.x;
    pairs[1] = vector.y;
    pairs[2] = vector.z;
    pairs[3] = vector.w;
  }
}

// Device: partial maxima.

/// Largest magnitudes of the columns of each warp, two columns a word.
using ColumnMaxima = Bf16Pair[kWarps][kMaxTilePairs];

template <class Master, bool kRow, bool kColumn>
struct AmaxOfTile {
  using L = Lanes<Master>;
  const Entry& entry;
  const Place& place;
  std::uint8_t* packed;
  ColumnMaxima& columns;

  template <Reading kReading>
  __device__ __forceinline__ void run() const {
    Bf16Pair column[L::kPairs] = {};
    Bf16Pair rows[kWarpRows / 2] = {};
    Bf16Pair even = 0;
    for_each_row<Master, kReading>(
        entry, place, [] {},
        [&](int, int i, uint4 vector, Owned) {
          Bf16Pair pairs[L::kPairs];
          to_pairs<Master>(vector, pairs);
          Bf16Pair row = 0;
#pragma unroll
          for (int k = 0; k < L::kPairs; ++k) {
            const Bf16Pair magnitude = magnitudes(pairs[k]);
            if (kColumn) column[k] = larger(column[k], magnitude);
            row = k == 0 ? magnitude : larger(row, magnitude);
          }
          if (i % 2 == 0) {
            even = row;
          } else {
            // Moved up one place, so that no index depends on a loop.
            rows[0] = rows[1];
            rows[1] = rows[2];
            rows[2] = rows[3];
            rows[3] = fold(even, row);
          }
        });
    if constexpr (kRow) store_rows(largest_of_rows<L::kOfBlock>(rows, place.lane));
    if constexpr (kColumn) {
#pragma unroll
      for (int k = 0; k < L::kPairs; ++k) columns[place.warp][place.lane * L::kPairs + k] = column[k];
      __syncthreads();
      store_columns();
    }
  }

  __device__ __forceinline__ void store_rows(std::uint32_t mine) const {
    if (place.col >= place.padded_cols) return;
    const std::int64_t row = place.row + place.lane % L::kOfBlock * L::kRowCodes;
    const ScalePlace to = row_scale_place(entry, row, place.col / kBlockElems);
#pragma unroll
    for (int k = 0; k < L::kRowCodes; ++k) {
      packed[to.offset + k * to.pitch] =
          static_cast<std::uint8_t>(code_of(k == 0 ? mine & 0xFFFFu : mine >> 16));
    }
  }

  __device__ __forceinline__ void store_columns() const {
    const int pair = static_cast<int>(threadIdx.x);
    const std::int64_t col = place.tile_col + 2 * pair;
    if (pair >= L::kTileCols / 2 || col >= place.padded_cols) return;
    Bf16Pair largest = columns[0][pair];
#pragma unroll
    for (int w = 1; w < kWarps; ++w) largest = larger(largest, columns[w][pair]);
    const ScalePlace to = column_scale_place(entry, place.band, col);
    packed[to.offset] = static_cast<std::uint8_t>(code_of(largest & 0xFFFFu));
    packed[to.offset + to.pitch] = static_cast<std::uint8_t>(code_of(largest >> 16));
  }
};

/// A function of its own: the few tiles at the ends of a shard shall cost the others no registers.
template <class Master, bool kRow, bool kColumn>
__device__ __noinline__ void amax_edge_tile(const Entry& entry, int tile, std::uint8_t* packed,
                                            ColumnMaxima* columns) {
  const Place place = place_of<Master>(entry, tile);
  AmaxOfTile<Master, kRow, kColumn>{entry, place, packed, *columns}.template run<Reading::kEdge>();
}

template <class Master, bool kRow, bool kColumn>
__device__ __forceinline__ void amax_tile(const Entry& entry, int tile, std::uint8_t* packed,
                                          ColumnMaxima& columns) {
  const Place place = place_of<Master>(entry, tile);
  const AmaxOfTile<Master, kRow, kColumn> work{entry, place, packed, columns};
  if (place.whole && entry.master_shift == 0) {
    work.template run<Reading::kAligned>();
  } else if (place.roomy) {
    work.template run<Reading::kShifted>();
  } else {
    amax_edge_tile<Master, kRow, kColumn>(entry, tile, packed, &columns);
  }
}

__device__ __forceinline__ void clear_piece(std::uint8_t* to, std::int64_t bytes) {
  if ((reinterpret_cast<std::uintptr_t>(to) | bytes) % kVectorBytes == 0) {
    for (std::int64_t i = threadIdx.x; i < bytes / kVectorBytes; i += kThreads) {
      reinterpret_cast<uint4*>(to)[i] = make_uint4(0, 0, 0, 0);
    }
  } else {
    for (std::int64_t i = threadIdx.x; i < bytes; i += kThreads) to[i] = 0;
  }
}

/// One tile or one piece to clear per block of threads; together they write each packed byte once.
__global__ __launch_bounds__(kThreads,
                             kAmaxBlocks) void partial_amax_kernel(const __grid_constant__ AmaxArgs args) {
  __shared__ Entry entry;
  __shared__ ColumnMaxima columns;
  release_next_launch();
  const int item = static_cast<int>(blockIdx.x);
  if (item >= args.table.tiles) {
    const ZeroPiece piece = args.table.zero[item - args.table.tiles];
    wait_for_former_launches();
    clear_piece(args.packed + piece.offset, piece.bytes);
    return;
  }
  load_entry(args.table, item, entry);
  wait_for_former_launches();
  switch (entry.kind) {
    case kRowFp32:
      return amax_tile<float, true, false>(entry, item, args.packed, columns);
    case kColumnFp32:
      return amax_tile<float, false, true>(entry, item, args.packed, columns);
    case kBothFp32:
      return amax_tile<float, true, true>(entry, item, args.packed, columns);
    case kRowBf16:
      return amax_tile<Bf16, true, false>(entry, item, args.packed, columns);
    case kColumnBf16:
      return amax_tile<Bf16, false, true>(entry, item, args.packed, columns);
    case kBothBf16:
      return amax_tile<Bf16, true, true>(entry, item, args.packed, columns);
  }
}

// Device: partial casts.

// Stores to global memory, like the loads. No kernel reads what it stores here, so the order of stores and of
// loads of scales is free.

__device__ __forceinline__ void store_global(std::uintptr_t address, std::uint32_t word) {
  asm volatile("st.global.u32 [%0], %1;" ::"l"(address), "r"(word));
}
__device__ __forceinline__ void store_global(std::uintptr_t address, std::uint32_t first,
                                             std::uint32_t second) {
  asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(address), "r"(first), "r"(second));
}
__device__ __forceinline__ void store_global_byte(std::uintptr_t address, std::uint32_t byte) {
  asm volatile("st.global.u8 [%0], %1;" ::"l"(address), "r"(byte));
}

/// Stores a lane's bytes of one row: at once where all are owned and the address allows it.
template <bool kAtOnce, int kWords>
__device__ __forceinline__ void store_run(std::uintptr_t address, const std::uint32_t (&words)[kWords],
                                          bool address_fits, Owned owned) {
  if (owned.lo == 0 && owned.hi == 4 * kWords && (kAtOnce || address_fits)) {
    if constexpr (kWords == 1) {
      store_global(address, words[0]);
    } else {
      store_global(address, words[0], words[1]);
    }
  } else if constexpr (!kAtOnce) {
#pragma unroll 1
    for (int j = owned.lo; j < owned.hi; ++j) {
      const std::uint32_t word = j < 4 ? words[0] : words[kWords - 1];
      store_global_byte(address + j, word >> (8 * (j % 4)));
    }
  }
}

/// A lane's runs of the warp's rows, for a call that is hardly ever made: the address of the first element,
/// how many elements it is from there to the next row, and which of them are owned, counted from there.
struct Runs {
  std::uintptr_t master;
  std::int64_t pitch;
  std::int64_t begin;
  std::int64_t end;
};

/// Adds the number of owned values of a warp that are not finite; reads the masters again.
template <class Master>
__device__ __noinline__ void count_nonfinite(Runs runs, std::int64_t* counter) {
  constexpr int kElems = Lanes<Master>::kElems;
  std::uint32_t count = 0;
#pragma unroll 1
  for (int i = 0; i < kWarpRows * kElems; ++i) {
    const std::int64_t at = i / kElems * runs.pitch + i % kElems;
    if (at < runs.begin || at >= runs.end) continue;
    std::uint32_t bits = load_element<Master>(runs.master + at * sizeof(Master));
    if constexpr (sizeof(Master) == 4) bits = bf16_rne_bits(bits);
    if (is_nonfinite(bits & 0x7FFFu)) ++count;
  }
  count = __reduce_add_sync(0xFFFFFFFFu, count);
  if (threadIdx.x % 32 == 0) {
    // Two's complement: an unsigned addition is the signed one.
    atomicAdd(reinterpret_cast<unsigned long long*>(counter), static_cast<unsigned long long>(count));
  }
}

template <class Master, bool kRow, bool kColumn, Reading kReading>
__device__ __forceinline__ void cast_rows(const Entry& entry, const Place& place, const std::uint8_t* packed,
                                          std::int64_t* nonfinite) {
  using L = Lanes<Master>;
  std::uint32_t row_codes[L::kRowCodes] = {};
  std::uint32_t column_codes[L::kElems] = {};
  if (place.active) {
    if constexpr (kRow) {
      const std::int64_t row = place.row + place.lane % L::kOfBlock * L::kRowCodes;
      const ScalePlace from = row_scale_place(entry, row, place.col / kBlockElems);
#pragma unroll
      for (int k = 0; k < L::kRowCodes; ++k) row_codes[k] = *global(packed + from.offset + k * from.pitch);
    }
    if constexpr (kColumn) {
      const ScalePlace from = column_scale_place(entry, place.band, place.col);
#pragma unroll
      for (int k = 0; k < L::kElems; ++k) column_codes[k] = *global(packed + from.offset + k * from.pitch);
    }
  }

  float row_factors[L::kRowCodes];
  float column_factors[L::kElems];
  Bf16Pair largest = 0;
  for_each_row<Master, kReading>(
      entry, place,
      [&] {
#pragma unroll
        for (int k = 0; k < L::kRowCodes; ++k) row_factors[k] = e8m0_reciprocal(row_codes[k]);
#pragma unroll
        for (int k = 0; k < L::kElems; ++k) column_factors[k] = e8m0_reciprocal(column_codes[k]);
      },
      [&](int group, int i, uint4 vector, Owned owned) {
        Bf16Pair pairs[L::kPairs];
        to_pairs<Master>(vector, pairs);
#pragma unroll
        for (int k = 0; k < L::kPairs; ++k) largest = larger(largest, magnitudes(pairs[k]));
        constexpr bool kAtOnce = kReading == Reading::kAligned;
        const bool address_fits = entry.vector_stores != 0;
        const std::int64_t flat = place.flat + (group + i) * entry.cols;
        std::uint32_t words[L::kElems / 4];
        if constexpr (kRow) {
          // The lane of this block that has the code of row i.
          const unsigned source = place.lane / L::kOfBlock * L::kOfBlock + (group + i) / L::kRowCodes;
          const float factor = __shfl_sync(0xFFFFFFFFu, row_factors[i % L::kRowCodes], source);
#pragma unroll
          for (int k = 0; k < L::kElems / 4; ++k)
            words[k] = encode_row(pairs[2 * k], pairs[2 * k + 1], factor);
          store_run<kAtOnce>(entry.row_out + flat, words, address_fits, owned);
        }
        if constexpr (kColumn) {
#pragma unroll
          for (int k = 0; k < L::kElems / 4; ++k) {
            words[k] = encode_columns(pairs[2 * k], pairs[2 * k + 1], column_factors + 4 * k);
          }
          store_run<kAtOnce>(entry.column_out + flat, words, address_fits, owned);
        }
      });

  const bool some = is_nonfinite(largest & 0xFFFFu) || is_nonfinite(largest >> 16);
  if (nonfinite != nullptr && __any_sync(0xFFFFFFFFu, some)) {
    const std::int64_t end = place.active ? entry.end - place.flat : 0;
    count_nonfinite<Master>({entry.master + entry.master_shift + place.flat * sizeof(Master), entry.cols,
                             entry.begin - place.flat, end},
                            nonfinite);
  }
}

template <class Master, bool kRow, bool kColumn>
__device__ __noinline__ void cast_edge_tile(const Entry& entry, int tile, const std::uint8_t* packed,
                                            std::int64_t* nonfinite) {
  const Place place = place_of<Master>(entry, tile);
  cast_rows<Master, kRow, kColumn, Reading::kEdge>(entry, place, packed, nonfinite);
}

template <class Master, bool kRow, bool kColumn>
__device__ __forceinline__ void cast_tile(const Entry& entry, int tile, const std::uint8_t* packed,
                                          std::int64_t* nonfinite) {
  const Place place = place_of<Master>(entry, tile);
  if (place.whole && entry.master_shift == 0 && entry.vector_stores != 0) {
    cast_rows<Master, kRow, kColumn, Reading::kAligned>(entry, place, packed, nonfinite);
  } else if (place.roomy) {
    cast_rows<Master, kRow, kColumn, Reading::kShifted>(entry, place, packed, nonfinite);
  } else {
    cast_edge_tile<Master, kRow, kColumn>(entry, tile, packed, nonfinite);
  }
}

__device__ __forceinline__ void copy_piece(const std::uint8_t* from, std::uint8_t* to, std::int64_t bytes) {
  if (from == to) return;
  if ((reinterpret_cast<std::uintptr_t>(from) | reinterpret_cast<std::uintptr_t>(to) | bytes) %
          kVectorBytes ==
      0) {
    const int count = static_cast<int>(bytes) / kVectorBytes;
    uint4 vectors[kPieceVectors];  // all on their way before the first is stored
#pragma unroll
    for (int k = 0; k < kPieceVectors; ++k) {
      const int i = static_cast<int>(threadIdx.x) + k * kThreads;
      if (i < count) vectors[k] = global(reinterpret_cast<const uint4*>(from))[i];
    }
#pragma unroll
    for (int k = 0; k < kPieceVectors; ++k) {
      const int i = static_cast<int>(threadIdx.x) + k * kThreads;
      if (i < count) global(reinterpret_cast<uint4*>(to))[i] = vectors[k];
    }
  } else {
    for (std::int64_t i = threadIdx.x; i < bytes; i += kThreads) to[i] = from[i];
  }
}

/// One tile or one piece of a scale array to copy per block of threads.
__global__ __launch_bounds__(kThreads,
                             kCastBlocks) void partial_cast_kernel(const __grid_constant__ CastArgs args) {
  __shared__ Entry entry;
  const int item = static_cast<int>(blockIdx.x);
  if (item >= args.table.tiles) {
    const CopyPiece piece = args.table.copy[item - args.table.tiles];
    wait_for_former_launches();
    copy_piece(args.packed + piece.offset, piece.to, piece.bytes);
    return;
  }
  load_entry(args.table, item, entry);
  wait_for_former_launches();
  switch (entry.kind) {
    case kRowFp32:
      return cast_tile<float, true, false>(entry, item, args.packed, args.nonfinite);
    case kColumnFp32:
      return cast_tile<float, false, true>(entry, item, args.packed, args.nonfinite);
    case kBothFp32:
      return cast_tile<float, true, true>(entry, item, args.packed, args.nonfinite);
    case kRowBf16:
      return cast_tile<Bf16, true, false>(entry, item, args.packed, args.nonfinite);
    case kColumnBf16:
      return cast_tile<Bf16, false, true>(entry, item, args.packed, args.nonfinite);
    case kBothBf16:
      return cast_tile<Bf16, true, true>(entry, item, args.packed, args.nonfinite);
  }
}

// Device: the way back.

struct DequantizeArgs {
  const std::uint8_t* data;
  const std::uint8_t* scales;
  void* out;  // [0] is element `begin`
  std::int64_t begin;
  std::int64_t end;
  std::int64_t rows;
  std::int64_t cols;
  ScaleLayout layout;
  bool row_plane;
  bool bf16;
};

/// Elements per thread: 8 neighbours of one row, in one row block.
constexpr int kDequantizeElems = 8;

__global__ __launch_bounds__(kThreads) void dequantize_kernel(const __grid_constant__ DequantizeArgs args) {
  wait_for_former_launches();
  const std::int64_t thread = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const std::int64_t flat = (args.begin / kDequantizeElems + thread) * kDequantizeElems;
  if (flat >= args.end) return;
  const std::int64_t row = flat / args.cols;
  const std::int64_t col = flat - row * args.cols;
  float row_scale = 0;
  if (args.row_plane) {
    row_scale = e8m0_value(args.scales[row_scale_offset(row, col / kBlockElems, args.cols, args.layout)]);
  }
  for (int j = 0; j < kDequantizeElems; ++j) {
    if (flat + j < args.begin || flat + j >= args.end) continue;
    float scale = row_scale;
    if (!args.row_plane) {
      scale = e8m0_value(
          args.scales[column_scale_offset(row / kBlockElems, col + j, args.rows, args.cols, args.layout)]);
    }
    float value = e4m3_value(args.data[flat + j]) * scale;
    // The device's product of a NaN has another payload than the host's.
    if (value != value) value = bits_to_float(0x7FC00000u);
    const std::int64_t to = flat + j - args.begin;
    if (args.bf16) {
      static_cast<std::uint16_t*>(args.out)[to] =
          static_cast<std::uint16_t>(bf16_rne_bits(float_to_bits(value)));
    } else {
      static_cast<float*>(args.out)[to] = value;
    }
  }
}

// Host: the table.

class TableBuilder {
 public:
  explicit TableBuilder(std::span<const Mxfp8Shard> shards) {
    for (const Mxfp8Shard& shard : shards) add(shard);
    MXOPT_CHECK_LE(tiles_ + static_cast<std::int64_t>(std::max(zeros_.size(), copies_.size())), kMaxGrid);
  }

  /// Size of the arrays one after the other, each at a multiple of 16 bytes.
  std::int64_t bytes() const {
    return padded_bytes(entries_) + padded_bytes(zeros_) + padded_bytes(copies_) + padded_bytes(first_tiles_);
  }

  /// The arrays for an address of the device.
  std::vector<std::uint8_t> content() const {
    std::vector<std::uint8_t> all;
    all.reserve(static_cast<std::size_t>(bytes()));
    append(&all, entries_);
    append(&all, zeros_);
    append(&all, copies_);
    append(&all, first_tiles_);
    return all;
  }

  Table at(const std::uint8_t* data) const {
    Table table;
    table.entries = static_cast<std::int32_t>(entries_.size());
    table.tiles = static_cast<std::int32_t>(tiles_);
    table.zeros = static_cast<std::int32_t>(zeros_.size());
    table.copies = static_cast<std::int32_t>(copies_.size());
    table.entry = reinterpret_cast<const Entry*>(data);
    data += padded_bytes(entries_);
    table.zero = reinterpret_cast<const ZeroPiece*>(data);
    data += padded_bytes(zeros_);
    table.copy = reinterpret_cast<const CopyPiece*>(data);
    data += padded_bytes(copies_);
    table.first_tiles = reinterpret_cast<const std::int32_t*>(data);
    return table;
  }

 private:
  template <class T>
  static std::int64_t padded_bytes(const std::vector<T>& values) {
    return round_up(static_cast<std::int64_t>(values.size() * sizeof(T)), 16);
  }
  template <class T>
  static void append(std::vector<std::uint8_t>* all, const std::vector<T>& values) {
    const std::size_t at = all->size();
    all->resize(at + static_cast<std::size_t>(padded_bytes(values)));
    if (!values.empty()) std::memcpy(all->data() + at, values.data(), values.size() * sizeof(T));
  }

  void add(const Mxfp8Shard& shard) {
    const MxView& weight = shard.weight;
    const std::int64_t row_scales = packed_bytes_;
    const std::int64_t row_bytes = weight.has_row() ? row_scale_bytes(weight.rows, weight.cols) : 0;
    const std::int64_t column_scales = row_scales + row_bytes;
    const std::int64_t column_bytes = weight.has_column() ? column_scale_bytes(weight.rows, weight.cols) : 0;
    packed_bytes_ = column_scales + column_bytes;
    copy(row_scales, row_bytes, weight.row_scales);
    copy(column_scales, column_bytes, weight.column_scales);
    if (shard.master.elems == 0) {
      clear(row_scales, row_bytes + column_bytes);
      return;
    }

    const bool gemm = weight.scale_layout == ScaleLayout::kGemm;
    const bool fp32 = shard.master.dtype == DType::kFp32;
    const std::int64_t elem_bytes = dtype_bytes(shard.master.dtype);
    const std::int64_t tile_cols = fp32 ? Lanes<float>::kTileCols : Lanes<Bf16>::kTileCols;
    const std::int64_t run_elems = kVectorBytes / elem_bytes;
    const std::int64_t end = shard.start + shard.master.elems;
    // In the gemm layout the scales of four bands are interleaved: tiles cover all four, and write zeros
    // where nothing is owned. All other scales are cleared.
    const std::int64_t group_bands = gemm ? 4 : 1;
    const std::int64_t first_group = shard.start / weight.cols / kBlockElems / group_bands;
    const std::int64_t end_group = (end - 1) / weight.cols / kBlockElems / group_bands + 1;
    const std::int64_t tiles_across = (weight.cols + tile_cols - 1) / tile_cols;

    const std::int64_t row_group_bytes = group_bands * kBlockElems * row_scale_stride(weight.cols);
    if (weight.has_row()) {
      clear(row_scales, first_group * row_group_bytes);
      clear(row_scales + end_group * row_group_bytes, row_bytes - end_group * row_group_bytes);
    }
    const std::int64_t column_tiles = round_up(weight.rows / kBlockElems, 4) / 4;
    if (weight.has_column() && gemm) {
      for (std::int64_t at = column_scales; at < packed_bytes_; at += 512 * column_tiles) {
        clear(at, 512 * first_group);
        clear(at + 512 * end_group, 512 * (column_tiles - end_group));
      }
    } else if (weight.has_column()) {
      const std::int64_t stride = column_scale_stride(weight.cols);
      clear(column_scales, first_group * stride);
      clear(column_scales + end_group * stride, column_bytes - end_group * stride);
    }

    const std::uintptr_t master = reinterpret_cast<std::uintptr_t>(shard.master.data) -
                                  static_cast<std::uintptr_t>(shard.start * elem_bytes);
    Entry entry{};
    entry.master = master / kVectorBytes * kVectorBytes;
    entry.master_shift = static_cast<std::uint32_t>(master % kVectorBytes);
    entry.row_out = out_address(shard.row_fragment, weight.row_data, shard.start);
    entry.column_out = out_address(shard.column_fragment, weight.column_data, shard.start);
    entry.cols = weight.cols;
    entry.begin = shard.start;
    entry.end = end;
    entry.row_scales = row_scales;
    entry.column_scales = column_scales;
    entry.first_tile = static_cast<std::int32_t>(std::min(tiles_, kMaxGrid));  // too many are refused below
    entry.first_band = static_cast<std::int32_t>(first_group * group_bands);
    entry.tiles_across = static_cast<std::int32_t>(tiles_across);
    entry.row_scale_tiles = gemm ? static_cast<std::int32_t>(row_scale_stride(weight.cols) / 4) : 0;
    entry.column_scale_tiles = gemm ? static_cast<std::int32_t>(column_tiles) : 0;
    const std::uint32_t planes = !weight.has_column() ? kRowFp32
                                 : !weight.has_row()  ? kColumnFp32
                                                      : kBothFp32;
    entry.kind = planes + (fp32 ? 0u : std::uint32_t{kRowBf16});
    const bool row_fits = !weight.has_row() || entry.row_out % static_cast<std::uintptr_t>(run_elems) == 0;
    const bool column_fits =
        !weight.has_column() || entry.column_out % static_cast<std::uintptr_t>(run_elems) == 0;
    entry.vector_stores = row_fits && column_fits ? 1 : 0;
    entries_.push_back(entry);
    first_tiles_.push_back(entry.first_tile);
    tiles_ += (end_group - first_group) * group_bands * tiles_across;
  }

  /// Where element 0 of the plane would be in the fragment or is in the plane.
  static std::uintptr_t out_address(const std::uint8_t* fragment, const std::uint8_t* plane,
                                    std::int64_t start) {
    return fragment != nullptr
               ? reinterpret_cast<std::uintptr_t>(fragment) - static_cast<std::uintptr_t>(start)
               : reinterpret_cast<std::uintptr_t>(plane);
  }

  /// Adds [offset, offset + bytes) to what is cleared, in order, joined with what is next to it.
  void clear(std::int64_t offset, std::int64_t bytes) {
    while (bytes > 0) {
      const bool joins = !zeros_.empty() && zeros_.back().offset + zeros_.back().bytes == offset &&
                         zeros_.back().bytes < kPieceBytes;
      if (!joins) zeros_.push_back({offset, 0});
      const std::int64_t taken = std::min(bytes, kPieceBytes - zeros_.back().bytes);
      zeros_.back().bytes += taken;
      offset += taken;
      bytes -= taken;
    }
  }

  void copy(std::int64_t offset, std::int64_t bytes, std::uint8_t* to) {
    while (bytes > 0) {
      const bool joins = !copies_.empty() && copies_.back().to + copies_.back().bytes == to &&
                         copies_.back().bytes < kPieceBytes;
      if (!joins) copies_.push_back({offset, 0, to});
      const std::int64_t taken = std::min(bytes, kPieceBytes - copies_.back().bytes);
      copies_.back().bytes += taken;
      offset += taken;
      to += taken;
      bytes -= taken;
    }
  }

  std::int64_t packed_bytes_ = 0;
  std::int64_t tiles_ = 0;
  std::vector<std::int32_t> first_tiles_;
  std::vector<Entry> entries_;
  std::vector<ZeroPiece> zeros_;
  std::vector<CopyPiece> copies_;
};

/// `constant`: the table was there before anything that the stream still has to do.
void launch_amax(const Table& table, bool constant, std::uint8_t* packed, Device device, StreamRef stream) {
  const AmaxArgs args = {table, packed};
  launch(device.index, stream, std::int64_t{table.tiles} + table.zeros, kThreads, constant,
         partial_amax_kernel, args);
}

void launch_cast(const Table& table, bool constant, const std::uint8_t* packed, std::int64_t* nonfinite,
                 Device device, StreamRef stream) {
  const CastArgs args = {table, packed, nonfinite};
  launch(device.index, stream, std::int64_t{table.tiles} + table.copies, kThreads, constant,
         partial_cast_kernel, args);
}

class CudaBatch final : public Mxfp8Batch::State {
 public:
  CudaBatch(const TableBuilder& builder, Device device, std::shared_ptr<Allocator> allocator)
      : memory_(builder.bytes(), device, std::move(allocator)), table_(builder.at(memory_.data())) {
    const Stream stream(device);
    const std::vector<std::uint8_t> content = builder.content();
    copy_bytes(memory_.data(), content.data(), memory_.bytes(), device, stream.ref());
    synchronize(device, stream.ref());
  }

  void partial_amax(std::uint8_t* packed, StreamRef stream) const override {
    launch_amax(table_, true, packed, memory_.device(), stream);
  }

  void partial_cast(const std::uint8_t* packed, std::int64_t* nonfinite, StreamRef stream) const override {
    launch_cast(table_, true, packed, nonfinite, memory_.device(), stream);
  }

 private:
  Buffer memory_;
  Table table_;
};

/// A table in memory of a stream: there for what is enqueued until it goes.
class StreamTable {
 public:
  StreamTable(const TableBuilder& builder, StreamRef stream) : stream_(stream) {
    const std::vector<std::uint8_t> content = builder.content();
    if (content.empty()) return;
    MXOPT_CUDA_CHECK(cudaMallocAsync(&data_, content.size(), native(stream)));
    // A copy from pageable memory returns when the runtime has taken the content over.
    const cudaError_t error =
        cudaMemcpyAsync(data_, content.data(), content.size(), cudaMemcpyHostToDevice, native(stream));
    if (error != cudaSuccess) {
      cudaFreeAsync(data_, native(stream));
      fail_call(error, "cudaMemcpyAsync(table of a batch)");
    }
    table_ = builder.at(static_cast<const std::uint8_t*>(data_));
  }
  /// An error here is one of earlier work, which whoever waits for that work sees too.
  ~StreamTable() {
    if (data_ != nullptr) cudaFreeAsync(data_, native(stream_));
  }
  StreamTable(const StreamTable&) = delete;
  StreamTable& operator=(const StreamTable&) = delete;

  const Table& table() const { return table_; }

 private:
  StreamRef stream_;
  void* data_ = nullptr;
  Table table_;
};

}  // namespace

std::unique_ptr<Mxfp8Batch::State> prepare(std::span<const Mxfp8Shard> shards, Device device,
                                           std::shared_ptr<Allocator> allocator) {
  if (allocator == nullptr) allocator = default_allocator(device);
  return std::make_unique<CudaBatch>(TableBuilder(shards), device, std::move(allocator));
}

void partial_amax_once(std::span<const Mxfp8Shard> shards, std::uint8_t* packed, Device device,
                       StreamRef stream) {
  const DeviceGuard guard(device.index);
  const StreamTable memory(TableBuilder(shards), stream);
  launch_amax(memory.table(), false, packed, device, stream);
}

void partial_cast_once(std::span<const Mxfp8Shard> shards, const std::uint8_t* packed,
                       std::int64_t* nonfinite, Device device, StreamRef stream) {
  const DeviceGuard guard(device.index);
  const StreamTable memory(TableBuilder(shards), stream);
  launch_cast(memory.table(), false, packed, nonfinite, device, stream);
}

void dequantize(const MxView& weight, Plane plane, std::int64_t begin, TypedSpan out, Device device,
                StreamRef stream) {
  DequantizeArgs args{};
  args.row_plane = plane == Plane::kRow;
  args.data = args.row_plane ? weight.row_data : weight.column_data;
  args.scales = args.row_plane ? weight.row_scales : weight.column_scales;
  args.out = out.data;
  args.begin = begin;
  args.end = begin + out.elems;
  args.rows = weight.rows;
  args.cols = weight.cols;
  args.layout = weight.scale_layout;
  args.bf16 = out.dtype == DType::kBf16;
  const std::int64_t threads = (args.end - 1) / kDequantizeElems - args.begin / kDequantizeElems + 1;
  launch(device.index, stream, (threads + kThreads - 1) / kThreads, kThreads, true, dequantize_kernel, args);
}

}  // namespace mxopt::cuda
