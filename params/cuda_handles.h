// What the CUDA files of every layer share: the check of runtime calls, the device guard, queries during a
// capture, owning handles.
//
// Handles are move-only, belong to the device they were made on, and are used by one thread at a time.
#pragma once

#include <source_location>
#include <utility>

#include <cuda_runtime.h>

#include "mxopt/params/memory.h"

namespace mxopt::cuda {

/// Throws BackendError with the call, the code and CUDA's text for it.
[[noreturn]] void fail_call(cudaError_t error, const char* call,
                            std::source_location where = std::source_location::current());

/// MXOPT_CUDA_CHECK(cudaX(...)): throws BackendError when the call did not succeed.
#define MXOPT_CUDA_CHECK(call)                      \
  do {                                              \
    const cudaError_t mxopt_error = (call);         \
    if (mxopt_error != cudaSuccess) [[unlikely]]    \
      ::mxopt::cuda::fail_call(mxopt_error, #call); \
  } while (false)

/// Makes a device current, and the former one again when the guard goes.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device);
  ~DeviceGuard();
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int former_ = -1;  // -1: nothing to restore
};

/// Lets this thread ask for events of other streams while it captures one; CUDA would end the capture
/// otherwise.
class RelaxedCapture {
 public:
  RelaxedCapture() { MXOPT_CUDA_CHECK(cudaThreadExchangeStreamCaptureMode(&mode_)); }
  ~RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

inline cudaStream_t native(StreamRef stream) {
  return static_cast<cudaStream_t>(stream.native());
}

/// An owned handle of the runtime. Traits has Handle, create() and destroy(Handle).
template <class Traits>
class UniqueHandle {
 public:
  using Handle = typename Traits::Handle;

  explicit UniqueHandle(int device) : device_(device) {
    const DeviceGuard guard(device);
    handle_ = Traits::create();
  }
  ~UniqueHandle() { reset(); }
  UniqueHandle(UniqueHandle&& other) noexcept
      : device_(other.device_), handle_(std::exchange(other.handle_, nullptr)) {}
  UniqueHandle& operator=(UniqueHandle&& other) noexcept {
    if (this != &other) {
      reset();
      device_ = other.device_;
      handle_ = std::exchange(other.handle_, nullptr);
    }
    return *this;
  }

  Handle get() const { return handle_; }
  int device() const { return device_; }

 private:
  void reset() noexcept {
    // An error here is one of earlier work, which whoever waits for that work sees too.
    if (handle_ != nullptr) Traits::destroy(std::exchange(handle_, nullptr));
  }

  int device_;
  Handle handle_ = nullptr;
};

struct EventTraits {
  using Handle = cudaEvent_t;
  static Handle create() {
    Handle event = nullptr;
    MXOPT_CUDA_CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    return event;
  }
  static void destroy(Handle event) noexcept { cudaEventDestroy(event); }
};
using UniqueEvent = UniqueHandle<EventTraits>;

struct StreamTraits {
  using Handle = cudaStream_t;
  static Handle create() {
    Handle stream = nullptr;
    MXOPT_CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    return stream;
  }
  static void destroy(Handle stream) noexcept { cudaStreamDestroy(stream); }
};
using UniqueStream = UniqueHandle<StreamTraits>;

}  // namespace mxopt::cuda
