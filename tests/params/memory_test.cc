#include "mxopt/params/memory.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <type_traits>
#include <vector>

#include <gtest/gtest.h>

#include "support/devices.h"
#include "support/guarded_bytes.h"
#include "support/thrown_message.h"

namespace mxopt {
namespace {

using test::contains;
using test::GuardedBytes;
using test::has_backend;
using test::thrown_message;
using test::why_not_usable;

static_assert(!std::is_copy_constructible_v<Buffer>);
static_assert(!std::is_copy_assignable_v<Buffer>);
static_assert(std::is_nothrow_move_constructible_v<Buffer>);
static_assert(std::is_nothrow_move_assignable_v<Buffer>);

constexpr Device kHostDevice{DeviceKind::kHost, 0};
constexpr Device kCudaDevice{DeviceKind::kCuda, 0};

/// Hands out memory full of 0xEE and notes every call.
class NotingAllocator final : public Allocator {
 public:
  struct Call {
    void* data;
    std::int64_t bytes;
  };

  void* allocate(std::int64_t bytes, std::int64_t alignment_bytes) override {
    alignment = alignment_bytes;
    const auto align = static_cast<std::size_t>(alignment_bytes);
    const auto size = static_cast<std::size_t>(bytes);
    void* data = std::aligned_alloc(align, (size + align - 1) / align * align);
    std::memset(data, 0xEE, size);
    allocated.push_back({data, bytes});
    return data;
  }
  void deallocate(void* data, std::int64_t bytes) noexcept override {
    freed.push_back({data, bytes});
    std::free(data);
  }

  std::int64_t alignment = 0;
  std::vector<Call> allocated, freed;
};

/// Returns an address that breaks the contract.
class BrokenAllocator final : public Allocator {
 public:
  explicit BrokenAllocator(std::uintptr_t address) : address_(address) {}
  void* allocate(std::int64_t, std::int64_t) override { return reinterpret_cast<void*>(address_); }
  void deallocate(void*, std::int64_t) noexcept override { ++freed; }
  int freed = 0;

 private:
  std::uintptr_t address_;
};

TEST(Buffer, IsZeroedAndAligned) {
  for (std::int64_t bytes : {1, 4095, 4096, 4097, 1 << 20}) {
    const Buffer buffer(bytes, kHostDevice, default_allocator(kHostDevice));
    EXPECT_EQ(buffer.bytes(), bytes);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(buffer.data()) % Buffer::kAlignmentBytes, 0u);
    EXPECT_TRUE(std::ranges::all_of(buffer.as<std::uint8_t>(), [](std::uint8_t byte) { return byte == 0; }));
  }
}

TEST(Buffer, ZeroBytesNeedNoAllocator) {
  const Buffer buffer(0, kHostDevice, nullptr);
  EXPECT_EQ(buffer.data(), nullptr);
  EXPECT_EQ(buffer.bytes(), 0);
  EXPECT_TRUE(buffer.as<float>().empty());
}

TEST(Buffer, GivesTheSameBytesBackToACallersAllocator) {
  const auto allocator = std::make_shared<NotingAllocator>();
  {
    const Buffer buffer(1000, kHostDevice, allocator);
    EXPECT_EQ(allocator->alignment, Buffer::kAlignmentBytes);
    EXPECT_TRUE(std::ranges::all_of(buffer.as<std::uint8_t>(), [](std::uint8_t byte) { return byte == 0; }));
    EXPECT_TRUE(allocator->freed.empty());
  }
  ASSERT_EQ(allocator->allocated.size(), 1u);
  ASSERT_EQ(allocator->freed.size(), 1u);
  EXPECT_EQ(allocator->allocated[0].bytes, 1000);
  EXPECT_EQ(allocator->freed[0].bytes, 1000);
  EXPECT_EQ(allocator->freed[0].data, allocator->allocated[0].data);
}

TEST(Buffer, MovingKeepsTheAddressAndFreesOnce) {
  const auto allocator = std::make_shared<NotingAllocator>();
  {
    Buffer first(64, kHostDevice, allocator);
    const void* address = first.data();
    Buffer second(std::move(first));
    EXPECT_EQ(second.data(), address);
    EXPECT_EQ(first.data(), nullptr);  // NOLINT(bugprone-use-after-move): the moved-from state is documented
    EXPECT_EQ(first.bytes(), 0);
    Buffer third(128, kHostDevice, allocator);
    third = std::move(second);
    EXPECT_EQ(third.data(), address);
    EXPECT_EQ(third.bytes(), 64);
    EXPECT_EQ(allocator->freed.size(), 1u);  // what third had held
    EXPECT_EQ(allocator->freed[0].bytes, 128);
    Buffer& same = third;
    third = std::move(same);
    EXPECT_EQ(third.data(), address);
  }
  EXPECT_EQ(allocator->freed.size(), 2u);
}

TEST(Buffer, RefusesBadRequestsAndBrokenAllocators) {
  EXPECT_TRUE(
      contains(thrown_message<ContractError>([] { Buffer(-1, kHostDevice, default_allocator(kHostDevice)); }),
               "-1 against 0 [bytes >= 0 is false"));
  EXPECT_TRUE(contains(thrown_message<ContractError>([] { Buffer(8, kHostDevice, nullptr); }),
                       "a buffer of 8 bytes needs an allocator"));
  for (std::uintptr_t address : {std::uintptr_t{0}, std::uintptr_t{4096 + 64}}) {
    const auto broken = std::make_shared<BrokenAllocator>(address);
    const std::string text = thrown_message<ContractError>([&] { Buffer(8, kHostDevice, broken); });
    EXPECT_TRUE(contains(text, "the allocator returned "));
    EXPECT_TRUE(contains(text, " for 8 bytes aligned to 256"));
    EXPECT_EQ(broken->freed, 1);
  }
}

class MemoryOf : public ::testing::TestWithParam<DeviceKind> {
 protected:
  void SetUp() override { MXOPT_SKIP_WITHOUT(device()); }
  Device device() const { return {GetParam(), 0}; }
};
INSTANTIATE_TEST_SUITE_P(Devices, MemoryOf, ::testing::ValuesIn(test::built_device_kinds()),
                         [](const auto& kind) { return test::device_kind_name(kind.param); });

TEST_P(MemoryOf, FillsAndCopiesExactly) {
  std::vector<std::uint8_t> content(100);
  std::iota(content.begin(), content.end(), std::uint8_t{1});
  const GuardedBytes from(device(), content);
  const GuardedBytes to(device(), 100, 0xEE);
  copy_bytes(to.data() + 10, from.data(), 50, device(), StreamRef());
  fill_zero(to.data() + 20, 5, device(), StreamRef());
  const std::vector<std::uint8_t> found = to.read();
  for (std::size_t i = 0; i < found.size(); ++i) {
    const bool copied = i >= 10 && i < 60;
    const bool zeroed = i >= 20 && i < 25;
    EXPECT_EQ(found[i], zeroed ? 0 : copied ? content[i - 10] : 0xEE) << "byte " << i;
  }
}

TEST_P(MemoryOf, BuffersAreZeroAndAligned) {
  for (const std::int64_t bytes : {std::int64_t{1}, std::int64_t{255}, std::int64_t{1} << 20}) {
    const Buffer buffer(bytes, device(), default_allocator(device()));
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(buffer.data()) % Buffer::kAlignmentBytes, 0u);
    std::vector<std::uint8_t> found(static_cast<std::size_t>(bytes), 0xEE);
    copy_bytes(found.data(), buffer.data(), bytes, device(), StreamRef());
    synchronize(device(), StreamRef());
    EXPECT_TRUE(std::ranges::all_of(found, [](std::uint8_t byte) { return byte == 0; }));
  }
}

TEST_P(MemoryOf, EventsArePassedAfterTheirWork) {
  const Buffer buffer(1 << 20, device(), default_allocator(device()));
  Event event(device());
  EXPECT_TRUE(event.passed());
  fill_zero(buffer.data(), buffer.bytes(), device(), StreamRef());
  event.record(StreamRef());
  event.join(StreamRef());
  event.wait();
  EXPECT_TRUE(event.passed());
  Event moved = std::move(event);
  EXPECT_TRUE(moved.passed());
}

TEST(Memory, ZeroBytesTouchNothing) {
  EXPECT_NO_THROW(fill_zero(nullptr, 0, kHostDevice, StreamRef()));
  EXPECT_NO_THROW(copy_bytes(nullptr, nullptr, 0, kHostDevice, StreamRef()));
}

TEST(Memory, AMissingBackendNamesTheOptionToSwitchOn) {
  if (has_backend(DeviceKind::kCuda)) GTEST_SKIP() << "this build has the CUDA backend";
  const std::string expected =
      "parallel.device: cuda was asked for, but this build has no CUDA backend (MXOPT_WITH_CUDA=ON at "
      "configuration switches it on); allowed: host";
  std::uint8_t byte = 0;
  const auto allocator = std::make_shared<NotingAllocator>();
  const std::vector<std::string> texts = {
      thrown_message<ConfigError>([] { default_allocator(kCudaDevice); }),
      thrown_message<ConfigError>([&] { fill_zero(&byte, 1, kCudaDevice, StreamRef()); }),
      thrown_message<ConfigError>([&] { copy_bytes(&byte, &byte, 1, kCudaDevice, StreamRef()); }),
      thrown_message<ConfigError>([&] { synchronize(kCudaDevice, StreamRef()); }),
      thrown_message<ConfigError>([&] { Event event(kCudaDevice); }),
      thrown_message<ConfigError>([&] { Buffer(8, kCudaDevice, allocator); })};
  for (const std::string& text : texts) EXPECT_EQ(text, expected);
  EXPECT_EQ(allocator->freed.size(), allocator->allocated.size());
}

TEST(Memory, WithoutADeviceTheReasonIsGiven) {
  if (!has_backend(DeviceKind::kCuda)) GTEST_SKIP() << "this build has no CUDA backend";
  if (!why_not_usable(kCudaDevice).empty()) {
    EXPECT_TRUE(contains(thrown_message<ConfigError>([] { default_allocator(kCudaDevice); }),
                         "parallel.device: cuda was asked for, but no CUDA device can be used here: "));
    GTEST_SKIP() << why_not_usable(kCudaDevice);
  }
  EXPECT_TRUE(contains(thrown_message<ConfigError>([] {
                         default_allocator({DeviceKind::kCuda, 1000});
                       }),
                       "CUDA device 1000 was asked for; this process sees "));
}

TEST(Memory, AnUnknownDeviceKindIsRefused) {
  const Device unknown{static_cast<DeviceKind>(17), 0};
  EXPECT_EQ(thrown_message<ConfigError>([&] { default_allocator(unknown); }), "unknown device kind");
}

}  // namespace
}  // namespace mxopt
