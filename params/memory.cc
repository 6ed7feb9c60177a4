#include "mxopt/params/memory.h"

#include <cstring>
#include <new>
#include <utility>

namespace mxopt {

namespace {

class HostAllocator final : public Allocator {
 public:
  void* allocate(std::int64_t bytes, std::int64_t alignment_bytes) override {
    return ::operator new(static_cast<std::size_t>(bytes), std::align_val_t(static_cast<std::size_t>(alignment_bytes)));
  }
  void deallocate(void* data, std::int64_t) noexcept override {
    ::operator delete(data, std::align_val_t(static_cast<std::size_t>(Buffer::kAlignmentBytes)));
  }
};

[[noreturn]] void refuse(Device device) {
  if (device.kind == DeviceKind::kCuda) {
    throw ConfigError("parallel.device: cuda was asked for, but this build has no CUDA backend; allowed: host");
  }
  throw ConfigError("unknown device kind");
}

}  // namespace

std::shared_ptr<Allocator> default_allocator(Device device) {
  if (device.kind == DeviceKind::kHost) return std::make_shared<HostAllocator>();
  refuse(device);
}

void fill_zero(void* data, std::int64_t bytes, Device device, StreamRef) {
  if (bytes == 0) return;
  if (device.kind != DeviceKind::kHost) refuse(device);
  std::memset(data, 0, static_cast<std::size_t>(bytes));
}

void copy_bytes(void* to, const void* from, std::int64_t bytes, Device device, StreamRef) {
  if (bytes == 0) return;
  if (device.kind != DeviceKind::kHost) refuse(device);
  std::memcpy(to, from, static_cast<std::size_t>(bytes));
}

Buffer::Buffer(std::int64_t bytes, Device device, std::shared_ptr<Allocator> allocator)
    : bytes_(bytes), device_(device), allocator_(std::move(allocator)) {
  MXOPT_CHECK_GE(bytes, 0);
  if (bytes == 0) return;
  data_ = static_cast<std::uint8_t*>(allocator_->allocate(bytes, kAlignmentBytes));
  fill_zero(data_, bytes, device_, StreamRef());
}

Buffer::~Buffer() {
  if (data_ != nullptr) allocator_->deallocate(data_, bytes_);
}

Buffer::Buffer(Buffer&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)),
      bytes_(std::exchange(other.bytes_, 0)),
      device_(other.device_),
      allocator_(std::move(other.allocator_)) {}

Buffer& Buffer::operator=(Buffer&& other) noexcept {
  if (this != &other) {
    if (data_ != nullptr) allocator_->deallocate(data_, bytes_);
    data_ = std::exchange(other.data_, nullptr);
    bytes_ = std::exchange(other.bytes_, 0);
    device_ = other.device_;
    allocator_ = std::move(other.allocator_);
  }
  return *this;
}

}  // namespace mxopt
