// Windows need several GPUs: at work they are in nccl_communicator_test.cc and in
// tests/optimizer/direct_gather_cuda_test.cu. What can be asked without them is asked here and in
// nccl_preflight_test.cc.
#include "mxopt/collectives/nccl_window.h"

#include <cstdint>
#include <memory>
#include <utility>
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

/// Gives memory `skip` bytes into that of another allocator.
class Skipping final : public Allocator {
 public:
  Skipping(std::shared_ptr<Allocator> inner, std::int64_t skip) : inner_(std::move(inner)), skip_(skip) {}
  void* allocate(std::int64_t bytes, std::int64_t alignment_bytes) override {
    return static_cast<std::uint8_t*>(inner_->allocate(bytes + skip_, alignment_bytes)) + skip_;
  }
  void deallocate(void* data, std::int64_t bytes) noexcept override {
    inner_->deallocate(static_cast<std::uint8_t*>(data) - skip_, bytes + skip_);
  }

 private:
  std::shared_ptr<Allocator> inner_;
  std::int64_t skip_;
};

TEST(NcclWindow, MemoryIsGoodFromTheBeginOfAnAllocationOfNccl) {
  MXOPT_SKIP_WITHOUT(kGpu);
  constexpr std::int64_t kBytes = 5 << 20;
  const auto nccl = cuda::make_window_allocator(0);
  EXPECT_TRUE(cuda::is_window_memory(Buffer(kBytes, kGpu, nccl)));
  EXPECT_FALSE(cuda::is_window_memory(Buffer(kBytes, kGpu, std::make_shared<Skipping>(nccl, 4096))));
  EXPECT_FALSE(cuda::is_window_memory(Buffer(kBytes, kGpu, default_allocator(kGpu))));
}

TEST(NcclWindow, AnOrdinaryAddressIsNoWindow) {
  MXOPT_SKIP_WITHOUT(kGpu);
  int on_the_host = 0;
  EXPECT_FALSE(cuda::is_window(nullptr));
  EXPECT_FALSE(cuda::is_window(reinterpret_cast<const ncclWindow_vidmem*>(&on_the_host)));
}

}  // namespace
}  // namespace mxopt
