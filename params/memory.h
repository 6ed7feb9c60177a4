// Where bytes live: devices, streams, allocators and the one owning buffer type.
//
// Objects here are not synchronised; a Buffer belongs to one thread at a time.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "mxopt/params/check.h"

namespace mxopt {

enum class DeviceKind { kHost, kCuda };

struct Device {
  DeviceKind kind = DeviceKind::kHost;
  int index = 0;
  friend bool operator==(Device, Device) = default;
};

/// A stream of a device, borrowed from the caller. The default value is the host's: work is done at the call.
class StreamRef {
 public:
  StreamRef() = default;
  explicit StreamRef(void* native) : native_(native) {}
  void* native() const { return native_; }

 private:
  void* native_ = nullptr;
};

/// Source of device memory. allocate() throws on failure; deallocate() gets the same size back.
class Allocator {
 public:
  virtual ~Allocator() = default;
  virtual void* allocate(std::int64_t bytes, std::int64_t alignment_bytes) = 0;
  virtual void deallocate(void* data, std::int64_t bytes) noexcept = 0;
};

/// The library's own allocator for a device. Throws ConfigError when the device's backend is not built in.
std::shared_ptr<Allocator> default_allocator(Device device);

/// An owning, move-only, zero-initialised run of bytes whose address never changes.
class Buffer {
 public:
  static constexpr std::int64_t kAlignmentBytes = 4096;

  Buffer() = default;
  Buffer(std::int64_t bytes, Device device, std::shared_ptr<Allocator> allocator);
  ~Buffer();
  Buffer(Buffer&& other) noexcept;
  Buffer& operator=(Buffer&& other) noexcept;

  std::uint8_t* data() const { return data_; }
  std::int64_t bytes() const { return bytes_; }
  Device device() const { return device_; }

  /// The first bytes() / sizeof(T) elements.
  template <class T>
  std::span<T> as() const {
    return {reinterpret_cast<T*>(data_), static_cast<std::size_t>(bytes_) / sizeof(T)};
  }

 private:
  std::uint8_t* data_ = nullptr;
  std::int64_t bytes_ = 0;
  Device device_;
  std::shared_ptr<Allocator> allocator_;
};

/// Sets bytes to zero, in stream order.
void fill_zero(void* data, std::int64_t bytes, Device device, StreamRef stream);

/// Copies between non-overlapping ranges of one device, in stream order.
void copy_bytes(void* to, const void* from, std::int64_t bytes, Device device, StreamRef stream);

}  // namespace mxopt
