// What one CTA does with one tile: Adam, and everything that is written from the new masters.
#pragma once

#include <cstdint>

#include "mxopt/optimizer/adam_cuda.cuh"
#include "mxopt/optimizer/tile_cuda.cuh"
#include "mxopt/quant/block_cuda.cuh"

namespace mxopt::cuda {

/// Lines whose state a lane loads before it computes. More hide more latency, but need more registers.
inline constexpr int kLinesAtOnce = 2;

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

/// store4() here and in the memory of the peers.
template <bool kShared, class Element>
__device__ __forceinline__ void store_values(Element* to, const float (&values)[kLaneElems], int count,
                                             const Peers<kShared>& peers) {
  store4(to, values, count);
  if constexpr (kShared) {
    for (int peer = 0; peer < peers.count; ++peer) {
      store4(reinterpret_cast<Element*>(reinterpret_cast<std::uint8_t*>(to) + peers.distance[peer]), values,
             count);
    }
  }
}

/// bf16 or fp32 values of line i of a plain param; false when one of them is not finite.
template <bool kShared, class Lane>
__device__ __forceinline__ bool write_values(const SegmentRow& segment, const Lane& lane, int i,
                                             const float (&w)[kLaneElems], const Peers<kShared>& peers) {
  bool is_finite = true;
  if (segment.values_dtype == DType::kFp32) {
    store_values<kShared>(static_cast<float*>(segment.values) + lane.offset(i), w, lane.owned(i), peers);
    for (const float value : w) is_finite = is_finite && isfinite(value);
  } else {
    store_values<kShared>(static_cast<Bf16*>(segment.values) + lane.offset(i), w, lane.owned(i), peers);
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
template <bool kShared, class Lane>
__device__ __forceinline__ bool write_row_blocks(const MxView& planes, const Tile& tile, const Lane& lane,
                                                 const LanePairs& w, const Peers<kShared>& peers) {
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
    store<kShared>(reinterpret_cast<std::uint32_t*>(planes.row_data + lane.offset(i)),
                   encode_row(w.pairs[i][0], w.pairs[i][1], e8m0_reciprocal(code)), peers, peers.count);
    if (lane.column % kBlockElems != 0) continue;
    longlong2 block;
    if ((tile.flags & kBand) != 0) {
      block.x = std::int64_t{tile.band} * kBlockElems + lane.line + i;
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
template <bool kShared, class Lane>
__device__ __forceinline__ void write_column_bytes(const MxView& planes, const Lane& lane, const LanePairs& w,
                                                   std::uint32_t codes, const Peers<kShared>& peers) {
  float factor[kLaneElems];
#pragma unroll
  for (int j = 0; j < kLaneElems; ++j) factor[j] = e8m0_reciprocal(codes >> (8 * j) & 0xFFu);
#pragma unroll
  for (int i = 0; i < kLaneLines; ++i) {
    if (lane.owned(i) == 0) continue;
    store<kShared>(reinterpret_cast<std::uint32_t*>(planes.column_data + lane.offset(i)),
                   encode4(first_value(w.pairs[i][0]) * factor[0], second_value(w.pairs[i][0]) * factor[1],
                           first_value(w.pairs[i][1]) * factor[2], second_value(w.pairs[i][1]) * factor[3]),
                   peers, peers.column_count);
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
template <bool kUpdate, class Grad, bool kShared, bool kIsWhole>
__device__ __forceinline__ void write_tile(const Tile& tile, const SegmentRow& segment,
                                           const AdamScalars* groups, std::uint8_t* staged_codes,
                                           const Peers<kShared>& peers) {
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
      if (is_plain) is_finite = write_values<kShared>(segment, lane, first + k, lines[k], peers) && is_finite;
      w.pairs[first + k][0] = round_to_bf16(lines[k][0], lines[k][1]);
      w.pairs[first + k][1] = round_to_bf16(lines[k][2], lines[k][3]);
    }
  }
  if (!is_plain) {
    const MxView planes = global(segment.planes);
    is_finite = write_row_blocks<kShared>(planes, tile, lane, w, peers);
    if ((tile.flags & kBand) != 0) {
      const std::uint32_t codes = column_codes(w);
      const bool is_cut = (tile.flags & kCut) != 0;
      if (!is_cut) write_column_bytes<kShared>(planes, lane, w, codes, peers);
      if (threadIdx.x < 32 && lane.is_in_width) {
        if (is_cut && staged_codes != nullptr) {
          *reinterpret_cast<std::uint32_t*>(staged_codes + tile.codes + lane.column) = codes;
        } else {
          store_column_codes(planes, tile.band, tile.column + lane.column, codes);
        }
      }
    }
  }
  if (!is_finite) mark(segment, kStatusNonFiniteMaster);
}

}  // namespace mxopt::cuda
