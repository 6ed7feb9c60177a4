#include "mxopt/params/memory.h"

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>
#include <utility>

#if MXOPT_WITH_CUDA
#include "mxopt/params/memory_cuda.h"
#endif

namespace mxopt {

namespace {

class HostAllocator final : public Allocator {
 public:
  void* allocate(std::int64_t bytes, std::int64_t alignment_bytes) override {
    const std::int64_t whole = (bytes + alignment_bytes - 1) / alignment_bytes * alignment_bytes;
    void* data =
        std::aligned_alloc(static_cast<std::size_t>(alignment_bytes), static_cast<std::size_t>(whole));
    if (data == nullptr) throw std::bad_alloc();
    return data;
  }
  void deallocate(void* data, std::int64_t) noexcept override { std::free(data); }
};

[[noreturn]] void refuse(Device device) {
  if (device.kind == DeviceKind::kCuda) {
    throw ConfigError(
        "parallel.device: cuda was asked for, but this build has no CUDA backend (MXOPT_WITH_CUDA=ON at "
        "configuration switches it on); allowed: host");
  }
  throw ConfigError("unknown device kind");
}

}  // namespace

int device_count(DeviceKind kind) {
  if (kind == DeviceKind::kHost) return 1;
#if MXOPT_WITH_CUDA
  if (kind == DeviceKind::kCuda) return cuda::device_count();
#endif
  return 0;
}

std::shared_ptr<Allocator> default_allocator(Device device) {
  if (device.kind == DeviceKind::kHost) return std::make_shared<HostAllocator>();
#if MXOPT_WITH_CUDA
  if (device.kind == DeviceKind::kCuda) return cuda::make_allocator(device.index);
#endif
  refuse(device);
}

std::shared_ptr<Allocator> pinned_allocator(Device device) {
  if (device.kind == DeviceKind::kHost) return std::make_shared<HostAllocator>();
#if MXOPT_WITH_CUDA
  if (device.kind == DeviceKind::kCuda) return cuda::make_pinned_allocator(device.index);
#endif
  refuse(device);
}

void fill_zero(void* data, std::int64_t bytes, Device device, [[maybe_unused]] StreamRef stream) {
  if (bytes == 0) return;
#if MXOPT_WITH_CUDA
  if (device.kind == DeviceKind::kCuda) return cuda::fill_zero(data, bytes, device.index, stream);
#endif
  if (device.kind != DeviceKind::kHost) refuse(device);
  std::memset(data, 0, static_cast<std::size_t>(bytes));
}

void copy_bytes(void* to, const void* from, std::int64_t bytes, Device device,
                [[maybe_unused]] StreamRef stream) {
  if (bytes == 0) return;
#if MXOPT_WITH_CUDA
  if (device.kind == DeviceKind::kCuda) return cuda::copy_bytes(to, from, bytes, device.index, stream);
#endif
  if (device.kind != DeviceKind::kHost) refuse(device);
  std::memcpy(to, from, static_cast<std::size_t>(bytes));
}

void synchronize(Device device, [[maybe_unused]] StreamRef stream) {
#if MXOPT_WITH_CUDA
  if (device.kind == DeviceKind::kCuda) return cuda::synchronize(device.index, stream);
#endif
  if (device.kind != DeviceKind::kHost) refuse(device);
}

bool is_capturing(Device device, [[maybe_unused]] StreamRef stream) {
#if MXOPT_WITH_CUDA
  if (device.kind == DeviceKind::kCuda) return cuda::is_capturing(device.index, stream);
#endif
  if (device.kind != DeviceKind::kHost) refuse(device);
  return false;
}

Stream::Stream(Device device) {
  if (device.kind == DeviceKind::kHost) return;
#if MXOPT_WITH_CUDA
  if (device.kind == DeviceKind::kCuda) {
    native_ = cuda::make_stream(device.index);
    return;
  }
#endif
  refuse(device);
}

Event::Event(Device device) {
  if (device.kind == DeviceKind::kHost) return;
#if MXOPT_WITH_CUDA
  if (device.kind == DeviceKind::kCuda) {
    state_ = cuda::make_event(device.index);
    return;
  }
#endif
  refuse(device);
}

namespace {

/// Zeroes memory that no stream knows yet.
void fill_zero_now(void* data, std::int64_t bytes, Device device) {
#if MXOPT_WITH_CUDA
  if (device.kind == DeviceKind::kCuda) return cuda::fill_zero_now(data, bytes, device.index);
#endif
  fill_zero(data, bytes, device, StreamRef());
}

}  // namespace

Buffer::Buffer(std::int64_t bytes, Device device, std::shared_ptr<Allocator> allocator)
    : bytes_(bytes), device_(device), allocator_(std::move(allocator)) {
  MXOPT_CHECK_GE(bytes, 0);
  if (bytes == 0) return;
  MXOPT_CHECK(allocator_ != nullptr, "a buffer of " << bytes << " bytes needs an allocator");
  void* data = allocator_->allocate(bytes, kAlignmentBytes);
  try {
    MXOPT_CHECK(
        data != nullptr && reinterpret_cast<std::uintptr_t>(data) % kAlignmentBytes == 0,
        "the allocator returned " << data << " for " << bytes << " bytes aligned to " << kAlignmentBytes);
    fill_zero_now(data, bytes, device_);
  } catch (...) {
    allocator_->deallocate(data, bytes);
    throw;
  }
  data_ = static_cast<std::uint8_t*>(data);
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
