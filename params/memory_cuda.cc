#include "mxopt/params/memory_cuda.h"

#include <sstream>
#include <string>

#include "mxopt/params/cuda_handles.h"

namespace mxopt::cuda {

namespace {

class CudaAllocator final : public Allocator {
 public:
  explicit CudaAllocator(int device) : device_(device) {}

  void* allocate(std::int64_t bytes, std::int64_t alignment_bytes) override {
    MXOPT_CHECK_LE(alignment_bytes, Buffer::kAlignmentBytes);  // what cudaMalloc promises
    const DeviceGuard guard(device_);
    void* data = nullptr;
    const cudaError_t error = cudaMalloc(&data, static_cast<std::size_t>(bytes));
    if (error != cudaSuccess) {
      std::ostringstream call;
      call << "cudaMalloc(" << bytes << " bytes, device " << device_ << ")";
      fail_call(error, call.str().c_str());
    }
    return data;
  }
  void deallocate(void* data, std::int64_t) noexcept override { cudaFree(data); }

 private:
  int device_;
};

class PinnedAllocator final : public Allocator {
 public:
  explicit PinnedAllocator(int device) : device_(device) {}

  void* allocate(std::int64_t bytes, std::int64_t) override {
    const DeviceGuard guard(device_);
    void* data = nullptr;
    MXOPT_CUDA_CHECK(cudaHostAlloc(&data, static_cast<std::size_t>(bytes), cudaHostAllocPortable));
    return data;
  }
  void deallocate(void* data, std::int64_t) noexcept override { cudaFreeHost(data); }

 private:
  int device_;
};

class CudaEvent final : public Event::State {
 public:
  explicit CudaEvent(int device) : event_(device) {}

  void record(StreamRef stream) override {
    const DeviceGuard guard(event_.device());
    MXOPT_CUDA_CHECK(cudaEventRecord(event_.get(), native(stream)));
  }
  void join(StreamRef stream) const override {
    const DeviceGuard guard(event_.device());
    MXOPT_CUDA_CHECK(cudaStreamWaitEvent(native(stream), event_.get(), 0));
  }
  bool passed() const override {
    const RelaxedCapture relaxed;
    const cudaError_t state = cudaEventQuery(event_.get());
    if (state == cudaErrorNotReady) return false;
    MXOPT_CUDA_CHECK(state);
    return true;
  }
  void wait() const override {
    const RelaxedCapture relaxed;
    MXOPT_CUDA_CHECK(cudaEventSynchronize(event_.get()));
  }

 private:
  UniqueEvent event_;
};

}  // namespace

void fail_call(cudaError_t error, const char* call, std::source_location where) {
  cudaGetLastError();  // the failure is reported here: the next launch should not find it
  std::ostringstream text;
  text << call << " failed: " << cudaGetErrorName(error) << " (" << static_cast<int>(error)
       << "): " << cudaGetErrorString(error) << " [" << where.file_name() << ':' << where.line() << ']';
  throw BackendError(text.str());
}

DeviceGuard::DeviceGuard(int device) {
  int current = -1;
  MXOPT_CUDA_CHECK(cudaGetDevice(&current));
  if (current == device) return;
  MXOPT_CUDA_CHECK(cudaSetDevice(device));
  former_ = current;
}

DeviceGuard::~DeviceGuard() {
  if (former_ >= 0) cudaSetDevice(former_);
}

int device_count() {
  int count = 0;
  if (cudaGetDeviceCount(&count) == cudaSuccess) return count;
  cudaGetLastError();
  return 0;
}

std::shared_ptr<Allocator> make_allocator(int device) {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess) {
    cudaGetLastError();
    throw ConfigError("parallel.device: cuda was asked for, but no CUDA device can be used here: " +
                      std::string(cudaGetErrorString(error)) + "; allowed: host");
  }
  if (device < 0 || device >= count) {
    throw ConfigError("CUDA device " + std::to_string(device) + " was asked for; this process sees " +
                      std::to_string(count) + " of them, counted from 0");
  }
  return std::make_shared<CudaAllocator>(device);
}

std::shared_ptr<Allocator> make_pinned_allocator(int device) {
  return std::make_shared<PinnedAllocator>(device);
}

void fill_zero(void* data, std::int64_t bytes, int device, StreamRef stream) {
  const DeviceGuard guard(device);
  MXOPT_CUDA_CHECK(cudaMemsetAsync(data, 0, static_cast<std::size_t>(bytes), native(stream)));
}

void copy_bytes(void* to, const void* from, std::int64_t bytes, int device, StreamRef stream) {
  const DeviceGuard guard(device);
  MXOPT_CUDA_CHECK(
      cudaMemcpyAsync(to, from, static_cast<std::size_t>(bytes), cudaMemcpyDefault, native(stream)));
}

void synchronize(int device, StreamRef stream) {
  const DeviceGuard guard(device);
  MXOPT_CUDA_CHECK(cudaStreamSynchronize(native(stream)));
}

bool is_capturing(int device, StreamRef stream) {
  const DeviceGuard guard(device);
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  MXOPT_CUDA_CHECK(cudaStreamIsCapturing(native(stream), &status));
  return status != cudaStreamCaptureStatusNone;
}

void fill_zero_now(void* data, std::int64_t bytes, int device) {
  const UniqueStream stream(device);
  fill_zero(data, bytes, device, StreamRef(stream.get()));
  synchronize(device, StreamRef(stream.get()));
}

std::shared_ptr<void> make_stream(int device) {
  const auto stream = std::make_shared<UniqueStream>(device);
  return {stream, stream->get()};
}

std::unique_ptr<Event::State> make_event(int device) {
  return std::make_unique<CudaEvent>(device);
}

}  // namespace mxopt::cuda
