// Windows need several GPUs; what can be asked without them is asked in nccl_preflight_test.cc, and windows
// at work are in nccl_communicator_test.cc and tests/optimizer/direct_gather_cuda_test.cu.
#include "mxopt/collectives/nccl_window.h"

#include <cstdint>
#include <vector>

#include <gtest/gtest.h>

#include "support/devices.h"

namespace mxopt {
namespace {

constexpr Device kGpu{DeviceKind::kCuda, 0};

TEST(NcclWindow, MemoryOfItsAllocatorIsZeroedAndCanBeCopied) {
  MXOPT_SKIP_WITHOUT(kGpu);
  constexpr std::int64_t kBytes = 1'000'000;
  const Stream stream(kGpu);
  const Buffer from(kBytes, kGpu, cuda::make_window_allocator(0));
  const Buffer to(kBytes, kGpu, cuda::make_window_allocator(0));
  std::vector<std::uint8_t> values(kBytes), back(kBytes);
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<std::uint8_t>(i * 7);
  copy_bytes(from.data(), values.data(), kBytes, kGpu, stream.ref());
  copy_bytes(back.data(), to.data(), kBytes, kGpu, stream.ref());
  synchronize(kGpu, stream.ref());
  EXPECT_EQ(back, std::vector<std::uint8_t>(kBytes, 0));
  cuda::store_bytes(to.data(), from.data(), kBytes, 0, stream.ref());
  copy_bytes(back.data(), to.data(), kBytes, kGpu, stream.ref());
  synchronize(kGpu, stream.ref());
  EXPECT_EQ(back, values);
}

TEST(NcclWindow, AnOrdinaryAddressIsNoWindow) {
  MXOPT_SKIP_WITHOUT(kGpu);
  int on_the_host = 0;
  EXPECT_FALSE(cuda::is_window(nullptr));
  EXPECT_FALSE(cuda::is_window(reinterpret_cast<const ncclWindow_vidmem*>(&on_the_host)));
}

}  // namespace
}  // namespace mxopt
