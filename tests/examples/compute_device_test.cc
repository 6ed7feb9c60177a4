#include "train_gpt/compute_device.h"

#include <string>

#include <c10/core/impl/VirtualGuardImpl.h>
#include <gtest/gtest.h>

#include "support/devices.h"
#include "support/thrown_message.h"

#include "mxopt/params/check.h"

namespace train_gpt {
namespace {

struct Given {
  explicit Given(mxopt::DeviceChoice choice) {
    mxopt::describe(schema, config);
    config.parallel.device = choice;
  }
  mxopt::Device on(int node_rank) const { return compute_device(config.parallel, schema, node_rank); }

  mxopt::Config config;
  mxopt::ConfigSchema schema;
};

TEST(ComputeDevice, HostIsTheHostOnEveryRank) {
  EXPECT_EQ(Given(mxopt::DeviceChoice::kHost).on(3), mxopt::Device{});
  EXPECT_TRUE(tensor_device(mxopt::Device{}).is_cpu());
}

TEST(ComputeDevice, AutoIsTheHostWithoutAGpuOrCudaTensors) {
  if (has_cuda_tensors() && mxopt::device_count(mxopt::DeviceKind::kCuda) > 0) GTEST_SKIP() << "there is one";
  EXPECT_EQ(Given(mxopt::DeviceChoice::kAuto).on(0), mxopt::Device{});
}

TEST(ComputeDevice, CudaThatCanNotBeHadIsAnErrorThatNamesTheKey) {
  const std::string reason = mxopt::test::why_not_usable({mxopt::DeviceKind::kCuda, 0});
  if (reason.empty()) GTEST_SKIP() << "there is a GPU";
  const Given given(mxopt::DeviceChoice::kCuda);
  EXPECT_EQ(mxopt::test::thrown_message<mxopt::ConfigError>([&] { given.on(0); }),
            given.schema.origin("parallel.device") + ": " + reason);
}

TEST(ComputeDeviceCuda, RanksTakeTheGpusInTurn) {
  MXOPT_SKIP_WITHOUT((mxopt::Device{mxopt::DeviceKind::kCuda, 0}));
  const int devices = mxopt::device_count(mxopt::DeviceKind::kCuda);
  for (int rank = 0; rank <= devices; ++rank) {
    const mxopt::Device expected{mxopt::DeviceKind::kCuda, rank % devices};
    EXPECT_EQ(Given(mxopt::DeviceChoice::kCuda).on(rank), expected);
    const auto choice = has_cuda_tensors() ? mxopt::DeviceChoice::kAuto : mxopt::DeviceChoice::kCuda;
    EXPECT_EQ(Given(choice).on(rank), expected);
  }
}

TEST(ComputeDeviceCuda, TheUsedGpuIsTheCurrentOne) {
  const mxopt::Device first{mxopt::DeviceKind::kCuda, 0};
  MXOPT_SKIP_WITHOUT(first);
  if (!has_cuda_tensors()) GTEST_SKIP() << "this libtorch has no CUDA";
  const mxopt::Device last{mxopt::DeviceKind::kCuda, mxopt::device_count(mxopt::DeviceKind::kCuda) - 1};
  for (const mxopt::Device device : {last, first}) {
    use_device(device);
    EXPECT_EQ(c10::impl::VirtualGuardImpl(c10::DeviceType::CUDA).getDevice(), tensor_device(device));
  }
  use_device(mxopt::Device{});
}

TEST(ComputeDeviceCuda, TensorsComputeOnTheLegacyDefaultStream) {
  const mxopt::Device cuda{mxopt::DeviceKind::kCuda, 0};
  MXOPT_SKIP_WITHOUT(cuda);
  if (!has_cuda_tensors()) GTEST_SKIP() << "this libtorch has no CUDA";
  EXPECT_EQ(tensor_device(cuda).str(), "cuda:0");
  EXPECT_EQ(tensor_stream(cuda).native(), nullptr);
}

}  // namespace
}  // namespace train_gpt
