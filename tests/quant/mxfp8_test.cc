#include "mxopt/quant/mxfp8.h"

#include <cstdint>
#include <set>

#include <gtest/gtest.h>

namespace mxopt {
namespace {

TEST(Mxfp8, ScaleArraysArePaddedTo128By4) {
  EXPECT_EQ(row_scale_bytes(32, 32), 128 * 4);
  EXPECT_EQ(row_scale_bytes(32, 96), 128 * 4);
  EXPECT_EQ(row_scale_bytes(160, 160), 256 * 8);
  EXPECT_EQ(row_scale_stride(160), 8);
  EXPECT_EQ(column_scale_bytes(32, 96), 4 * 128);
  EXPECT_EQ(column_scale_bytes(160, 160), 8 * 256);
  EXPECT_EQ(column_scale_stride(160), 256);
  EXPECT_EQ(row_scale_bytes(0, 64), 0);
  EXPECT_EQ(column_scale_bytes(64, 0), 0);
}

TEST(Mxfp8, BytesAndOffsetsPassTwoToThe31) {
  const std::int64_t rows = 1 << 20;
  const std::int64_t cols = 1 << 20;
  EXPECT_EQ(row_scale_bytes(rows, cols), 1ll << 35);
  EXPECT_EQ(column_scale_bytes(rows, cols), 1ll << 35);
  EXPECT_EQ(row_scale_offset(rows - 1, cols / 32 - 1, cols, ScaleLayout::kCompact), (1ll << 35) - 1);
  EXPECT_EQ(row_scale_offset(rows - 1, cols / 32 - 1, cols, ScaleLayout::kGemm), (1ll << 35) - 1);
  EXPECT_EQ(column_scale_offset(rows / 32 - 1, cols - 1, rows, cols, ScaleLayout::kGemm), (1ll << 35) - 1);
  EXPECT_EQ((MxView{rows, cols}.elems()), 1ll << 40);
}

TEST(Mxfp8, CompactScalesAreRowMajor) {
  EXPECT_EQ(row_scale_offset(3, 2, 160, ScaleLayout::kCompact), 3 * 8 + 2);
  EXPECT_EQ(column_scale_offset(3, 7, 160, 160, ScaleLayout::kCompact), 3 * 256 + 7);
}

TEST(Mxfp8, GemmScalesGoByTilesOf512Bytes) {
  EXPECT_EQ(gemm_scale_offset(0, 0, 2), 0);
  EXPECT_EQ(gemm_scale_offset(0, 1, 2), 1);
  EXPECT_EQ(gemm_scale_offset(1, 0, 2), 16);
  EXPECT_EQ(gemm_scale_offset(32, 0, 2), 4);
  EXPECT_EQ(gemm_scale_offset(127, 3, 2), 511);
  EXPECT_EQ(gemm_scale_offset(0, 4, 2), 512);
  EXPECT_EQ(gemm_scale_offset(128, 0, 2), 1024);
  // 160 columns: 5 blocks across, two tiles; 160 rows: the same for the column plane, whose i axis is the
  // column.
  EXPECT_EQ(row_scale_offset(33, 4, 160, ScaleLayout::kGemm), 512 + 16 + 4);
  EXPECT_EQ(column_scale_offset(4, 33, 160, 160, ScaleLayout::kGemm), 512 + 16 + 4);
}

TEST(Mxfp8, EveryLayoutGivesEachScaleItsOwnByteInsideTheArray) {
  for (const ScaleLayout layout : {ScaleLayout::kCompact, ScaleLayout::kGemm}) {
    for (const std::int64_t rows : {32, 96, 128, 160, 288}) {
      for (const std::int64_t cols : {32, 96, 128, 160, 288}) {
        std::set<std::int64_t> row_offsets;
        for (std::int64_t r = 0; r < rows; ++r) {
          for (std::int64_t b = 0; b < cols / 32; ++b)
            row_offsets.insert(row_scale_offset(r, b, cols, layout));
        }
        ASSERT_EQ(static_cast<std::int64_t>(row_offsets.size()), rows * cols / 32);
        ASSERT_GE(*row_offsets.begin(), 0);
        ASSERT_LT(*row_offsets.rbegin(), row_scale_bytes(rows, cols));
        std::set<std::int64_t> column_offsets;
        for (std::int64_t band = 0; band < rows / 32; ++band) {
          for (std::int64_t c = 0; c < cols; ++c) {
            column_offsets.insert(column_scale_offset(band, c, rows, cols, layout));
          }
        }
        ASSERT_EQ(static_cast<std::int64_t>(column_offsets.size()), rows * cols / 32);
        ASSERT_GE(*column_offsets.begin(), 0);
        ASSERT_LT(*column_offsets.rbegin(), column_scale_bytes(rows, cols));
      }
    }
  }
}

TEST(Mxfp8, EmptyViewWithAPointerHasNoPlane) {
  std::uint8_t byte = 0;
  const MxView empty{0, 64, &byte, &byte, &byte, &byte};
  EXPECT_FALSE(empty.has_row());
  EXPECT_FALSE(empty.has_column());
  const MxView row_only{32, 32, &byte, &byte, nullptr, nullptr};
  EXPECT_TRUE(row_only.has_row());
  EXPECT_FALSE(row_only.has_column());
}

}  // namespace
}  // namespace mxopt
