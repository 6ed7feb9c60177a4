// The slow, obvious MXFP8 quantization that tests compare with; shares no code with the library.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace mxopt::reference {

/// `value` rounded to BF16 (to nearest even; beyond the range: infinity; NaN: 0x7FC0).
float bf16(float value);

/// E8M0 code of a block's maximum: the smallest k >= -127 with amax <= 448 * 2^k, plus 127.
/// Infinity gives 0xFE, NaN 0xFF.
std::uint8_t e8m0_code(double amax);

/// 2^(code - 127); NaN for 0xFF.
double e8m0_value(std::uint8_t code);

/// Nearest of the 256 E4M3 values, ties to the even code, saturating at +-448; NaN gives 0x7F.
std::uint8_t e4m3_code(double value);

/// Value of an E4M3 byte; NaN for 0x7F and 0xFF.
double e4m3_value(std::uint8_t code);

/// A [rows, cols] matrix in MXFP8, both planes.
/// row_data, column_data      [rows * cols], row-major
/// row_scales, column_scales  padded to 128 x 4 tiles, compact or swizzled; padding 0
struct Mxfp8 {
  std::int64_t rows = 0;
  std::int64_t cols = 0;
  std::vector<std::uint8_t> row_data;
  std::vector<std::uint8_t> row_scales;
  std::vector<std::uint8_t> column_data;
  std::vector<std::uint8_t> column_scales;
};

/// Quantizes a whole matrix. rows and cols are multiples of 32.
Mxfp8 quantize(std::span<const float> master, std::int64_t rows, std::int64_t cols, bool gemm_layout);

/// Scales of a matrix of which only the flat range [begin, end) counts; blocks without such an element have
/// code 0. The data of the result is empty.
Mxfp8 shard_scales(std::span<const float> master, std::int64_t rows, std::int64_t cols, bool gemm_layout,
                   std::int64_t begin, std::int64_t end);

/// Value of element (r, c) of the row plane or of the column plane.
double dequantize(const Mxfp8& matrix, bool row_plane, bool gemm_layout, std::int64_t r, std::int64_t c);

/// How many values of `master` are NaN or infinite after the rounding to BF16.
std::int64_t count_nonfinite(std::span<const float> master);

}  // namespace mxopt::reference
