// The E4M3 conversion against the one of the CUDA toolkit's host headers.
#include <cstdint>

#include <cuda_fp8.h>
#include <gtest/gtest.h>

#include "mxopt/quant/e4m3.h"

namespace mxopt {
namespace {

std::uint32_t toolkit_code(float value) {
  return __nv_cvt_float_to_fp8(value, __NV_SATFINITE, __NV_E4M3);
}

TEST(ExhaustiveE4m3Cuda, AllFp32InputsGiveTheToolkitsCode) {
  std::int64_t differing = 0;
#if defined(_OPENMP)
#pragma omp parallel for reduction(+ : differing)
#endif
  for (std::int64_t high = 0; high < 1 << 16; ++high) {
    for (std::int64_t low = 0; low < 1 << 16; ++low) {
      const float value = bits_to_float(static_cast<std::uint32_t>(high << 16 | low));
      differing += e4m3_from_fp32(value) == toolkit_code(value) ? 0 : 1;
    }
  }
  EXPECT_EQ(differing, 0);
}

}  // namespace
}  // namespace mxopt
