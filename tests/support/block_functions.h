// The loops of block_host.h compiled for one instruction set each, to compare them with one another.
#pragma once

#include <cstdint>

#include "mxopt/params/dtype.h"

namespace mxopt::test {

struct BlockFunctions {
  void (*round_to_bf16)(const float* in, float* w, std::int64_t n);
  void (*widen_bf16)(const Bf16* in, float* w, std::int64_t n);
  std::uint32_t (*block_amax_bits)(const float* w);
  void (*column_amax_bits)(std::uint32_t* amax, const float* w, std::int64_t n);
  void (*encode_block)(const float* w, float reciprocal, std::uint8_t* out);
  void (*encode_columns)(const float* w, const float* reciprocals, std::uint8_t* out, std::int64_t n);
  void (*decode)(const std::uint8_t* codes, const float* scales, float* out, std::int64_t n);
  std::int64_t (*count_nonfinite)(const float* w, std::int64_t n);
};

BlockFunctions block_functions_baseline();
#if defined(MXOPT_TEST_X86_LEVELS)
BlockFunctions block_functions_v3();
BlockFunctions block_functions_v4();
#endif

}  // namespace mxopt::test
