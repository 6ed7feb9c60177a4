#include "support/reference_mxfp8.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>

namespace mxopt::reference {

namespace {

float float_of(std::uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

std::uint32_t bits_of(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

/// The finite magnitudes in increasing order; the index is the code.
std::array<double, 127> e4m3_magnitudes() {
  std::array<double, 127> values{};
  for (int code = 0; code < 127; ++code) {
    const int exponent = code / 8;
    const int mantissa = code % 8;
    values[static_cast<std::size_t>(code)] =
        exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 7 - 3);
  }
  return values;
}

const std::array<double, 127> kMagnitudes = e4m3_magnitudes();

/// The largest amax that each scale 2^(code - 127) holds.
std::array<double, 254> held_amaxes() {
  std::array<double, 254> values{};
  for (int code = 0; code < 254; ++code)
    values[static_cast<std::size_t>(code)] = std::ldexp(448.0, code - 127);
  return values;
}

const std::array<double, 254> kHeldAmaxes = held_amaxes();

std::int64_t at_least(std::int64_t value, std::int64_t multiple) {
  while (value % multiple != 0) ++value;
  return value;
}

/// The scales of one plane before padding: `outer` x `blocks`, blocks along the axis that blocks run along.
struct Scales {
  std::int64_t outer;
  std::int64_t blocks;
  std::vector<std::uint8_t> codes;  // [outer][blocks]
};

/// Byte p of the swizzled array belongs to scale (i, j).
void swizzled_position(std::int64_t p, std::int64_t tiles_across, std::int64_t* i, std::int64_t* j) {
  const std::int64_t tile = p / 512;
  const std::int64_t byte = p % 512;
  *i = tile / tiles_across * 128 + byte % 16 / 4 * 32 + byte / 16;
  *j = tile % tiles_across * 4 + byte % 4;
}

std::vector<std::uint8_t> padded(const Scales& scales, bool gemm_layout, bool row_plane) {
  const std::int64_t outer = at_least(scales.outer, 128);
  const std::int64_t blocks = at_least(scales.blocks, 4);
  std::vector<std::uint8_t> bytes(static_cast<std::size_t>(outer * blocks), 0);
  for (std::int64_t p = 0; p < outer * blocks; ++p) {
    std::int64_t i = row_plane ? p / blocks : p % outer;
    std::int64_t j = row_plane ? p % blocks : p / outer;
    if (gemm_layout) swizzled_position(p, blocks / 4, &i, &j);
    if (i < scales.outer && j < scales.blocks) {
      bytes[static_cast<std::size_t>(p)] = scales.codes[static_cast<std::size_t>(i * scales.blocks + j)];
    }
  }
  return bytes;
}

/// The larger magnitude, where NaN is larger than everything.
double larger(double a, double b) {
  if (std::isnan(a) || std::isnan(b)) return std::numeric_limits<double>::quiet_NaN();
  return std::max(std::fabs(a), std::fabs(b));
}

Scales plane_scales(std::span<const float> master, std::int64_t rows, std::int64_t cols, bool row_plane,
                    std::int64_t begin, std::int64_t end) {
  Scales scales{row_plane ? rows : cols, (row_plane ? cols : rows) / 32, {}};
  for (std::int64_t i = 0; i < scales.outer; ++i) {
    for (std::int64_t j = 0; j < scales.blocks; ++j) {
      double amax = 0;
      for (std::int64_t k = 32 * j; k < 32 * j + 32; ++k) {
        const std::int64_t flat = row_plane ? i * cols + k : k * cols + i;
        if (flat >= begin && flat < end) amax = larger(amax, bf16(master[static_cast<std::size_t>(flat)]));
      }
      scales.codes.push_back(e8m0_code(amax));
    }
  }
  return scales;
}

std::vector<std::uint8_t> plane_data(std::span<const float> master, std::int64_t rows, std::int64_t cols,
                                     bool row_plane, const Scales& scales) {
  std::vector<std::uint8_t> data;
  for (std::int64_t r = 0; r < rows; ++r) {
    for (std::int64_t c = 0; c < cols; ++c) {
      const std::int64_t scale = row_plane ? r * scales.blocks + c / 32 : c * scales.blocks + r / 32;
      const double w = bf16(master[static_cast<std::size_t>(r * cols + c)]);
      data.push_back(e4m3_code(w / e8m0_value(scales.codes[static_cast<std::size_t>(scale)])));
    }
  }
  return data;
}

}  // namespace

float bf16(float value) {
  if (std::isnan(value)) return float_of(0x7FC00000u);
  if (std::isinf(value)) return value;
  const std::uint32_t sign = bits_of(value) & 0x80000000u;
  const double magnitude = std::fabs(static_cast<double>(value));
  // The two BF16 neighbours; beyond the largest one, infinity stands for 2^128.
  const std::uint32_t below = bits_of(value) & 0x7FFF0000u;
  const std::uint32_t above = below + 0x00010000u;
  const double below_value = float_of(below);
  const double above_value = above == 0x7F800000u ? std::ldexp(1.0, 128) : float_of(above);
  const double to_below = magnitude - below_value;
  const double to_above = above_value - magnitude;
  const bool below_is_even = (below >> 16) % 2 == 0;
  const bool take_below = to_below < to_above || (to_below == to_above && below_is_even);
  return float_of((take_below ? below : above) | sign);
}

std::uint8_t e8m0_code(double amax) {
  if (std::isnan(amax)) return 0xFF;
  // The first scale that holds amax; beyond all of them: 0xFE.
  return static_cast<std::uint8_t>(std::lower_bound(kHeldAmaxes.begin(), kHeldAmaxes.end(), amax) -
                                   kHeldAmaxes.begin());
}

double e8m0_value(std::uint8_t code) {
  return code == 0xFF ? std::numeric_limits<double>::quiet_NaN() : std::ldexp(1.0, code - 127);
}

std::uint8_t e4m3_code(double value) {
  if (std::isnan(value)) return 0x7F;
  const int sign = std::signbit(value) ? 0x80 : 0;
  const double magnitude = std::fabs(value);
  if (magnitude >= 448.0) return static_cast<std::uint8_t>(0x7E | sign);
  // kMagnitudes[upper - 1] <= magnitude < kMagnitudes[upper]
  const auto upper = static_cast<int>(std::upper_bound(kMagnitudes.begin(), kMagnitudes.end(), magnitude) -
                                      kMagnitudes.begin());
  const double to_lower = magnitude - kMagnitudes[static_cast<std::size_t>(upper - 1)];
  const double to_upper = kMagnitudes[static_cast<std::size_t>(upper)] - magnitude;
  const bool take_upper = to_upper < to_lower || (to_upper == to_lower && upper % 2 == 0);
  return static_cast<std::uint8_t>((take_upper ? upper : upper - 1) | sign);
}

double e4m3_value(std::uint8_t code) {
  const std::size_t magnitude = code & 0x7Fu;
  if (magnitude == 0x7F) return std::numeric_limits<double>::quiet_NaN();
  return (code & 0x80u) != 0 ? -kMagnitudes[magnitude] : kMagnitudes[magnitude];
}

Mxfp8 quantize(std::span<const float> master, std::int64_t rows, std::int64_t cols, bool gemm_layout) {
  Mxfp8 result{rows, cols, {}, {}, {}, {}};
  const Scales row = plane_scales(master, rows, cols, true, 0, rows * cols);
  const Scales column = plane_scales(master, rows, cols, false, 0, rows * cols);
  result.row_data = plane_data(master, rows, cols, true, row);
  result.row_scales = padded(row, gemm_layout, true);
  result.column_data = plane_data(master, rows, cols, false, column);
  result.column_scales = padded(column, gemm_layout, false);
  return result;
}

Mxfp8 shard_scales(std::span<const float> master, std::int64_t rows, std::int64_t cols, bool gemm_layout,
                   std::int64_t begin, std::int64_t end) {
  Mxfp8 result{rows, cols, {}, {}, {}, {}};
  result.row_scales = padded(plane_scales(master, rows, cols, true, begin, end), gemm_layout, true);
  result.column_scales = padded(plane_scales(master, rows, cols, false, begin, end), gemm_layout, false);
  return result;
}

double dequantize(const Mxfp8& matrix, bool row_plane, bool gemm_layout, std::int64_t r, std::int64_t c) {
  const std::int64_t want_i = row_plane ? r : c;
  const std::int64_t want_j = row_plane ? c / 32 : r / 32;
  const std::int64_t blocks = at_least((row_plane ? matrix.cols : matrix.rows) / 32, 4);
  const std::int64_t outer = at_least(row_plane ? matrix.rows : matrix.cols, 128);
  std::int64_t p = row_plane ? want_i * blocks + want_j : want_j * outer + want_i;
  if (gemm_layout) {
    std::int64_t i = -1;
    std::int64_t j = -1;
    for (p = 0;; ++p) {
      swizzled_position(p, blocks / 4, &i, &j);
      if (i == want_i && j == want_j) break;
    }
  }
  const std::vector<std::uint8_t>& scales = row_plane ? matrix.row_scales : matrix.column_scales;
  const std::vector<std::uint8_t>& data = row_plane ? matrix.row_data : matrix.column_data;
  return e4m3_value(data[static_cast<std::size_t>(r * matrix.cols + c)]) *
         e8m0_value(scales[static_cast<std::size_t>(p)]);
}

std::int64_t count_nonfinite(std::span<const float> master) {
  return std::count_if(master.begin(), master.end(), [](float value) { return !std::isfinite(bf16(value)); });
}

}  // namespace mxopt::reference
