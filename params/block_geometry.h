// Sizes of MXFP8 blocks and of the scale arrays of a [rows, cols] matrix, in scale bytes.
#pragma once

#include <cstdint>

#include "mxopt/params/host_device.h"

namespace mxopt {

/// Elements that share one E8M0 scale.
inline constexpr std::int64_t kBlockElems = 32;

MXOPT_HD std::int64_t round_up(std::int64_t value, std::int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

/// Scale array of the row plane: [roundup(rows, 128), roundup(cols / 32, 4)].
MXOPT_HD std::int64_t row_scale_stride(std::int64_t cols) {
  return round_up(cols / kBlockElems, 4);
}
MXOPT_HD std::int64_t row_scale_bytes(std::int64_t rows, std::int64_t cols) {
  return round_up(rows, 128) * row_scale_stride(cols);
}
/// Scale array of the column plane: [roundup(rows / 32, 4), roundup(cols, 128)].
MXOPT_HD std::int64_t column_scale_stride(std::int64_t cols) {
  return round_up(cols, 128);
}
MXOPT_HD std::int64_t column_scale_bytes(std::int64_t rows, std::int64_t cols) {
  return round_up(rows / kBlockElems, 4) * column_scale_stride(cols);
}

}  // namespace mxopt
