#include "mxopt/optimizer/scale_chunks.h"

#include <cstdint>
#include <vector>

#include <gtest/gtest.h>

#include "support/optimizer_fixture.h"

namespace mxopt {
namespace {

/// How often each byte of the plane's scale array is said to be owned, over all segments.
std::vector<int> owners(const std::vector<SegmentRow>& segments, bool is_column, std::int64_t bytes) {
  std::vector<int> count(static_cast<std::size_t>(bytes), 0);
  std::vector<ScaleChunk> chunks;
  for (std::size_t s = 0; s < segments.size(); ++s) {
    add_scale_chunks(static_cast<std::int32_t>(s), segments[s], chunks);
  }
  for (const ScaleChunk& chunk : chunks) {
    EXPECT_GT(chunk.bytes, 0);
    EXPECT_LE(chunk.bytes, ScaleChunk::kMostBytes);
    EXPECT_EQ(chunk.bytes % 4, 0);
    EXPECT_EQ(chunk.begin % 4, 0);
    if (chunk.is_column != is_column) continue;
    EXPECT_LE(chunk.begin + chunk.bytes, bytes);
    for (std::int64_t at = chunk.begin; at < chunk.begin + chunk.bytes; at += 4) {
      const std::uint32_t owned =
          owned_scales(segments[static_cast<std::size_t>(chunk.segment)], is_column, at);
      for (std::int64_t k = 0; k < 4; ++k) count[static_cast<std::size_t>(at + k)] += owned >> k & 1u;
    }
  }
  return count;
}

TEST(ScaleChunks, TellEveryCompleteBlockOnceAndNothingElse) {
  struct Shape {
    std::int64_t rows, cols;
  };
  const Shape shapes[] = {{32, 32}, {64, 96}, {96, 160}, {256, 32}, {32, 352}, {320, 416}, {160, 8192}};
  std::uint8_t planes_memory = 0;
  for (const ScaleLayout scale_layout : {ScaleLayout::kCompact, ScaleLayout::kGemm}) {
    for (const Shape shape : shapes) {
      for (const int parts : {1, 2, 3, 7}) {
        SCOPED_TRACE(testing::Message() << shape.rows << "x" << shape.cols << ", " << parts << " parts, "
                                        << (scale_layout == ScaleLayout::kGemm ? "gemm" : "compact"));
        const std::int64_t elems = shape.rows * shape.cols;
        std::vector<SegmentRow> segments;
        std::vector<std::int64_t> cuts = {0};
        for (int part = 1; part < parts; ++part) cuts.push_back(elems * part / parts / 128 * 128);
        cuts.push_back(elems);
        for (std::size_t part = 0; part + 1 < cuts.size(); ++part) {
          SegmentRow segment;
          segment.param_begin = cuts[part];
          segment.elems = cuts[part + 1] - cuts[part];
          segment.planes.rows = shape.rows;
          segment.planes.cols = shape.cols;
          segment.planes.row_data = segment.planes.column_data = &planes_memory;
          segment.planes.scale_layout = scale_layout;
          segments.push_back(segment);
        }
        // From the definition: which block lies in one segment as a whole.
        std::vector<int> row(static_cast<std::size_t>(row_scale_bytes(shape.rows, shape.cols)), 0);
        for (std::int64_t r = 0; r < shape.rows; ++r) {
          for (std::int64_t j = 0; j < shape.cols / 32; ++j) {
            row[static_cast<std::size_t>(row_scale_offset(r, j, shape.cols, scale_layout))] = 1;
          }
        }
        std::vector<int> column(static_cast<std::size_t>(column_scale_bytes(shape.rows, shape.cols)), 0);
        for (std::int64_t band = 0; band < shape.rows / 32; ++band) {
          bool is_whole = false;
          for (const SegmentRow& segment : segments) {
            is_whole = is_whole || (segment.param_begin <= band * 32 * shape.cols &&
                                    (band + 1) * 32 * shape.cols <= segment.param_begin + segment.elems);
          }
          for (std::int64_t c = 0; is_whole && c < shape.cols; ++c) {
            column[static_cast<std::size_t>(
                column_scale_offset(band, c, shape.rows, shape.cols, scale_layout))] = 1;
          }
        }
        EXPECT_EQ(owners(segments, false, static_cast<std::int64_t>(row.size())), row);
        EXPECT_EQ(owners(segments, true, static_cast<std::int64_t>(column.size())), column);
      }
    }
  }
}

TEST(ScaleChunks, TheirNumberGoesWithWhatTheSegmentOwns) {
  std::uint8_t planes_memory = 0;
  SegmentRow segment;
  segment.planes.rows = 32 * 1024;
  segment.planes.cols = 4096;
  segment.planes.row_data = segment.planes.column_data = &planes_memory;
  for (const ScaleLayout scale_layout : {ScaleLayout::kCompact, ScaleLayout::kGemm}) {
    segment.planes.scale_layout = scale_layout;
    segment.param_begin = 64 * 4096;
    segment.elems = 64 * 4096;  // two bands
    std::vector<ScaleChunk> chunks;
    add_scale_chunks(0, segment, chunks);
    std::int64_t bytes = 0;
    for (const ScaleChunk& chunk : chunks) bytes += chunk.bytes;
    EXPECT_LE(bytes, 2 * 128 * 4096 / 32 + 4 * 4096);  // whole tiles of the swizzled order
  }
}

TEST(ScaleChunks, ThereAreNoneOfPlainAndEmptyParams) {
  SegmentRow segment;
  segment.elems = 100;
  std::vector<ScaleChunk> chunks;
  add_scale_chunks(0, segment, chunks);
  segment.elems = 0;
  segment.planes.rows = segment.planes.cols = 32;
  add_scale_chunks(0, segment, chunks);
  EXPECT_TRUE(chunks.empty());
}

}  // namespace
}  // namespace mxopt
