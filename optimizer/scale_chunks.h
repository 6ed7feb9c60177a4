// The scales that a rank owns, in the order of the scale arrays: for storing them to the peers in whole
// words.
#pragma once

#include <cstdint>
#include <vector>

#include "mxopt/optimizer/step_kernels.h"
#include "mxopt/params/host_device.h"

namespace mxopt {

/// Neighbouring bytes of a scale array, at least one of them of a block that the segment owns.
struct ScaleChunk {
  static constexpr std::int64_t kMostBytes = 4096;

  std::int32_t segment = 0;
  std::int32_t bytes = 0;  // a multiple of 4
  std::int64_t begin = 0;  // in the array of the plane; a multiple of 4
  bool is_column = false;
};

/// All chunks of the segment with this index. Their number goes with what the segment owns.
void add_scale_chunks(std::int32_t index, const SegmentRow& segment, std::vector<ScaleChunk>& chunks);

/// {value / by, value % by}; the division of short numbers is several times faster on a device.
struct Quotient {
  MXOPT_HD Quotient(std::int64_t value, std::int64_t by) {
    if (((value | by) >> 32) == 0) {
      const auto low = static_cast<std::uint32_t>(value);
      whole = low / static_cast<std::uint32_t>(by);
      rest = low - static_cast<std::uint32_t>(whole) * static_cast<std::uint32_t>(by);
    } else {
      whole = value / by;
      rest = value - whole * by;
    }
  }
  std::int64_t whole, rest;
};

/// Whether the segment owns all of row block (row, j). Row blocks are never cut.
MXOPT_HD bool owns_row_block(const SegmentRow& segment, std::int64_t row, std::int64_t j) {
  const std::int64_t at = row * segment.planes.cols + j * kBlockElems;
  return row < segment.planes.rows && j < segment.planes.cols / kBlockElems && at >= segment.param_begin &&
         at < segment.param_begin + segment.elems;
}

/// Whether the segment owns all of column block (band, c).
MXOPT_HD bool owns_column_block(const SegmentRow& segment, std::int64_t band, std::int64_t c) {
  const std::int64_t elems = kBlockElems * segment.planes.cols;
  return c < segment.planes.cols && (band + 1) * kBlockElems <= segment.planes.rows &&
         band * elems >= segment.param_begin && (band + 1) * elems <= segment.param_begin + segment.elems;
}

/// Bit k: byte at + k of the plane's scale array is the scale of a block that the segment owns as a whole.
/// `at` is a multiple of 4.
MXOPT_HD std::uint32_t owned_scales(const SegmentRow& segment, bool is_column, std::int64_t at) {
  const MxView& planes = segment.planes;
  std::uint32_t owned = 0;
  if (planes.scale_layout == ScaleLayout::kGemm) {
    const std::int64_t tiles =
        (is_column ? round_up(planes.rows / kBlockElems, 4) : row_scale_stride(planes.cols)) / 4;
    const Quotient tile(at / 512, tiles);
    const std::int64_t in_tile = at % 512;
    const std::int64_t i = tile.whole * 128 + in_tile % 16 / 4 * 32 + in_tile / 16;
    for (std::int64_t k = 0; k < 4; ++k) {
      const std::int64_t j = tile.rest * 4 + k;
      owned |= (is_column ? owns_column_block(segment, j, i) : owns_row_block(segment, i, j)) ? 1u << k : 0u;
    }
    return owned;
  }
  const Quotient line(at, is_column ? column_scale_stride(planes.cols) : row_scale_stride(planes.cols));
  for (std::int64_t k = 0; k < 4; ++k) {
    const std::int64_t j = line.rest + k;
    owned |= (is_column ? owns_column_block(segment, line.whole, j) : owns_row_block(segment, line.whole, j))
                 ? 1u << k
                 : 0u;
  }
  return owned;
}

}  // namespace mxopt
