#include "mxopt/optimizer/step_kernels.h"

#include <gtest/gtest.h>

#include "support/devices.h"
#include "support/thrown_message.h"

#include "mxopt/params/check.h"

namespace mxopt {
namespace {

TEST(StepKernels, HostIsAlwaysBuiltIn) {
  EXPECT_NE(StepKernels::make({}, Device()), nullptr);
}

TEST(StepKernels, ADeviceWithoutABackendIsRefused) {
  if (test::has_backend(DeviceKind::kCuda)) GTEST_SKIP() << "this build has the CUDA backend";
  EXPECT_EQ(test::thrown_message<ConfigError>([] {
              StepKernels::make({}, Device{DeviceKind::kCuda, 0});
            }),
            "parallel.device: cuda was asked for, but this build has no CUDA backend (MXOPT_WITH_CUDA=ON at "
            "configuration switches it on); allowed: host");
}

TEST(StepKernels, EveryPassIsACountedLaunchAlsoWithoutWork) {
  const auto kernels = StepKernels::make({}, Device());
  StepStatistics statistics;
  kernels->grad_stats(statistics, StreamRef());
  kernels->fused_update({}, nullptr, StreamRef());
  kernels->cast_cut_bands(false, nullptr, StreamRef());
  EXPECT_EQ(kernels->take_launches(), 3);
  EXPECT_EQ(kernels->take_launches(), 0);
  kernels->writeback(StreamRef());
  kernels->cast_cut_bands(true, nullptr, StreamRef());
  EXPECT_EQ(kernels->take_launches(), 4);
}

}  // namespace
}  // namespace mxopt
