#include "mxopt/optimizer/scale_chunks.h"

#include <algorithm>

namespace mxopt {

namespace {

/// Bytes [begin, end) of an array, in pieces.
void add_range(std::int32_t index, bool is_column, std::int64_t begin, std::int64_t end,
               std::vector<ScaleChunk>& chunks) {
  for (; begin < end; begin += ScaleChunk::kMostBytes) {
    ScaleChunk chunk;
    chunk.segment = index;
    chunk.bytes = static_cast<std::int32_t>(std::min(end - begin, ScaleChunk::kMostBytes));
    chunk.begin = begin;
    chunk.is_column = is_column;
    chunks.push_back(chunk);
  }
}

constexpr std::int64_t kTileBytes = 512;  // of the swizzled order: 128 x 4 scales

}  // namespace

void add_scale_chunks(std::int32_t index, const SegmentRow& segment, std::vector<ScaleChunk>& chunks) {
  const MxView& planes = segment.planes;
  if (segment.elems == 0 || planes.elems() == 0) return;
  const std::int64_t cols = planes.cols;
  const bool is_gemm = planes.scale_layout == ScaleLayout::kGemm;
  const std::int64_t begin = segment.param_begin;
  const std::int64_t end = begin + segment.elems;
  if (is_gemm) {
    const std::int64_t line_bytes = row_scale_stride(cols) / 4 * kTileBytes;  // of 128 rows
    add_range(index, false, begin / cols / 128 * line_bytes, ((end - 1) / cols / 128 + 1) * line_bytes,
              chunks);
  } else {
    const auto offset = [&](std::int64_t at) {
      return row_scale_offset(at / cols, at % cols / kBlockElems, cols, planes.scale_layout);
    };
    add_range(index, false, offset(begin) / 4 * 4, offset(end - 1) / 4 * 4 + 4, chunks);
  }
  if (planes.column_data == nullptr) return;
  const std::int64_t first = (begin + kBlockElems * cols - 1) / (kBlockElems * cols);
  const std::int64_t last = end / (kBlockElems * cols);  // behind the last complete band
  if (first >= last) return;
  if (is_gemm) {
    const std::int64_t tiles = round_up(planes.rows / kBlockElems, 4) / 4;
    for (std::int64_t line = 0; line < column_scale_stride(cols) / 128; ++line) {
      add_range(index, true, (line * tiles + first / 4) * kTileBytes,
                (line * tiles + (last - 1) / 4 + 1) * kTileBytes, chunks);
    }
  } else {
    add_range(index, true, first * column_scale_stride(cols), last * column_scale_stride(cols), chunks);
  }
}

}  // namespace mxopt
