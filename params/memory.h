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

/// Devices of the kind that this process can use; 0 where the backend is not built in. The host is one.
int device_count(DeviceKind kind);

/// A stream of a device, borrowed from the caller: on the host there is one, and work is done at the call; on
/// CUDA it holds a cudaStream_t, and the default value is the device's legacy default stream, used only where
/// a caller passes it.
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

/// Host memory that copies from and to `device` reach without a stop of the host.
std::shared_ptr<Allocator> pinned_allocator(Device device);

/// An owning, move-only, zero-initialised run of bytes whose address never changes.
class Buffer {
 public:
  static constexpr std::int64_t kAlignmentBytes = 256;

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

/// Copies between non-overlapping ranges, in stream order; each may be memory of the device or of the host. A
/// copy from or to pageable host memory may wait for the stream.
void copy_bytes(void* to, const void* from, std::int64_t bytes, Device device, StreamRef stream);

/// Host waits until everything enqueued on the stream is done.
void synchronize(Device device, StreamRef stream);

/// Whether what is enqueued on the stream is being captured in a CUDA graph.
bool is_capturing(Device device, StreamRef stream);

/// A stream of the library's own, which never waits for the default stream. On the host: the host's stream.
class Stream {
 public:
  explicit Stream(Device device);
  StreamRef ref() const { return StreamRef(native_.get()); }

 private:
  std::shared_ptr<void> native_;
};

/// A point in a stream that other streams and the host can wait for. On the host it is passed when it is
/// recorded. Movable; before the first record() it counts as passed.
class Event {
 public:
  /// What a device implements.
  class State {
   public:
    virtual ~State() = default;
    virtual void record(StreamRef stream) = 0;
    virtual void join(StreamRef stream) const = 0;
    virtual bool passed() const = 0;
    virtual void wait() const = 0;
  };

  /// An event of the host.
  Event() = default;
  explicit Event(Device device);

  void record(StreamRef stream) {
    if (state_ != nullptr) state_->record(stream);
  }
  /// Later work of `stream` waits for the point.
  void join(StreamRef stream) const {
    if (state_ != nullptr) state_->join(stream);
  }
  bool passed() const { return state_ == nullptr || state_->passed(); }
  /// The host waits for the point.
  void wait() const {
    if (state_ != nullptr) state_->wait();
  }

 private:
  std::unique_ptr<State> state_;
};

}  // namespace mxopt
