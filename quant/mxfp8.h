// The MXFP8 matrix: its planes, and where a block's scale sits.
#pragma once

#include <cstdint>
#include <string_view>

#include "mxopt/params/block_geometry.h"
#include "mxopt/params/host_device.h"

namespace mxopt {

/// Order of the scale bytes inside their array. kCompact: row-major. kGemm: the swizzled order of
/// block-scaled GEMMs.
enum class ScaleLayout { kCompact, kGemm };

/// Offset of scale (i, j) in the swizzled order; i counts along the non-block axis, j counts blocks, and the
/// array is `tiles` tiles of 128 x 4 scales wide in j.
MXOPT_HD std::int64_t gemm_scale_offset(std::int64_t i, std::int64_t j, std::int64_t tiles) {
  return (i / 128 * tiles + j / 4) * 512 + (i % 32) * 16 + (i % 128 / 32) * 4 + j % 4;
}

/// Offset of the scale of row block (r, c / 32).
MXOPT_HD std::int64_t row_scale_offset(std::int64_t r, std::int64_t block, std::int64_t cols,
                                       ScaleLayout layout) {
  return layout == ScaleLayout::kCompact ? r * row_scale_stride(cols) + block
                                         : gemm_scale_offset(r, block, row_scale_stride(cols) / 4);
}

/// Offset of the scale of column block (r / 32, c).
MXOPT_HD std::int64_t column_scale_offset(std::int64_t band, std::int64_t c, std::int64_t rows,
                                          std::int64_t cols, ScaleLayout layout) {
  return layout == ScaleLayout::kCompact ? band * column_scale_stride(cols) + c
                                         : gemm_scale_offset(c, band, round_up(rows / kBlockElems, 4) / 4);
}

/// A [rows, cols] matrix in MXFP8; does not own its memory. An absent plane has null data and null scales.
/// row     data uint8 [rows, cols] row-major, scale of (r, c) is that of block (r, c / 32)
/// column  data uint8 [rows, cols] row-major (not transposed), scale of (r, c) is that of block (r / 32, c)
/// rows and cols are multiples of 32 (or the matrix is empty). Padding scales are 0.
struct MxView {
  std::int64_t rows = 0;
  std::int64_t cols = 0;
  std::uint8_t* row_data = nullptr;
  std::uint8_t* row_scales = nullptr;
  std::uint8_t* column_data = nullptr;
  std::uint8_t* column_scales = nullptr;
  ScaleLayout scale_layout = ScaleLayout::kCompact;

  std::int64_t elems() const { return rows * cols; }
  bool has_row() const { return row_data != nullptr && elems() > 0; }
  bool has_column() const { return column_data != nullptr && elems() > 0; }
};

}  // namespace mxopt
