// Memory of a device between two guards, to see writes outside of it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include <gtest/gtest.h>

#include "mxopt/params/memory.h"

namespace mxopt::test {

/// Bytes of a device with known content. read() also checks that the guards on both sides are as they were.
class GuardedBytes {
 public:
  GuardedBytes(Device device, std::span<const std::uint8_t> content)
      : size_(static_cast<std::int64_t>(content.size())),
        memory_(size_ + 2 * kGuardBytes, device, default_allocator(device)) {
    std::vector<std::uint8_t> all(static_cast<std::size_t>(memory_.bytes()), kGuard);
    std::copy(content.begin(), content.end(), all.begin() + kGuardBytes);
    copy(memory_.data(), all.data());
  }
  GuardedBytes(Device device, std::int64_t bytes, std::uint8_t preset)
      : GuardedBytes(device, std::vector<std::uint8_t>(static_cast<std::size_t>(bytes), preset)) {}

  std::uint8_t* data() const { return memory_.data() + kGuardBytes; }
  std::span<std::uint8_t> span() const { return {data(), static_cast<std::size_t>(size_)}; }

  /// The content, copied to the host.
  std::vector<std::uint8_t> read() const {
    std::vector<std::uint8_t> all(static_cast<std::size_t>(memory_.bytes()));
    copy(all.data(), memory_.data());
    const auto is_guard = [](std::uint8_t byte) { return byte == kGuard; };
    EXPECT_TRUE(std::all_of(all.begin(), all.begin() + kGuardBytes, is_guard))
        << "bytes in front were written";
    EXPECT_TRUE(std::all_of(all.end() - kGuardBytes, all.end(), is_guard)) << "bytes behind were written";
    return {all.begin() + kGuardBytes, all.end() - kGuardBytes};
  }

 private:
  static constexpr std::int64_t kGuardBytes = 64;
  static constexpr std::uint8_t kGuard = 0xA5;

  void copy(std::uint8_t* to, const std::uint8_t* from) const {
    copy_bytes(to, from, memory_.bytes(), memory_.device(), StreamRef());
    synchronize(memory_.device(), StreamRef());
  }

  std::int64_t size_;
  Buffer memory_;
};

}  // namespace mxopt::test
