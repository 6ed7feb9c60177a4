#include <sstream>

#include <cuda.h>
#include <cuda_runtime.h>
#include <nccl.h>

#include "mxopt/collectives/nccl_window.h"
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 28, 0)
#include <nccl_device.h>
#define MXOPT_NCCL_HAS_WINDOWS 1
#else
#define MXOPT_NCCL_HAS_WINDOWS 0
#endif

#include "mxopt/collectives/nccl_preflight.h"
#include "mxopt/params/cuda_handles.h"
#include "mxopt/params/launch_cuda.cuh"

namespace mxopt::cuda {

namespace {

class WindowAllocator final : public Allocator {
 public:
  explicit WindowAllocator(int device) : device_(device) {}

  void* allocate(std::int64_t bytes, std::int64_t) override {
    const DeviceGuard guard(device_);
    void* data = nullptr;
    const ncclResult_t result = ncclMemAlloc(&data, static_cast<std::size_t>(bytes));
    if (result == ncclSuccess) return data;
    std::ostringstream text;
    text << "ncclMemAlloc(" << bytes << " bytes, device " << device_ << ") failed: code " << result << ", "
         << ncclGetErrorString(result);
    throw BackendError(text.str());
  }
  void deallocate(void* data, std::int64_t) noexcept override {
    int former = 0;
    cudaGetDevice(&former);
    cudaSetDevice(device_);
    cudaDeviceSynchronize();  // unmapping does not wait for kernels
    ncclMemFree(data);
    cudaSetDevice(former);
  }

 private:
  int device_;
};

/// A function of the driver, which is there wherever the runtime can use a device; null where it is too old.
template <class Function>
Function driver_function(const char* name) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found{};
  MXOPT_CUDA_CHECK(cudaGetDriverEntryPointByVersion(name, &function, 11000, cudaEnableDefault, &found));
  return found == cudaDriverEntryPointSuccess ? reinterpret_cast<Function>(function) : nullptr;
}

#if MXOPT_NCCL_HAS_WINDOWS
__global__ void bases_kernel(ncclWindow_t window, int ranks, std::uint8_t** bases) {
  for (int rank = static_cast<int>(threadIdx.x); rank < ranks; rank += static_cast<int>(blockDim.x)) {
    bases[rank] = static_cast<std::uint8_t*>(ncclGetPeerPointer(window, 0, rank));
  }
}
#endif

__global__ void store_kernel(uint4* to, const uint4* from, std::int64_t count) {
  const std::int64_t stride = static_cast<std::int64_t>(gridDim.x) * blockDim.x;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count;
       i += stride) {
    to[i] = from[i];
  }
}

}  // namespace

std::shared_ptr<Allocator> make_window_allocator(int device) {
  return std::make_shared<WindowAllocator>(device);
}

std::string window_problem(const Buffer& buffer, [[maybe_unused]] ncclComm* comm,
                           [[maybe_unused]] int ranks) {
  int library_version = 0;
  ncclGetVersion(&library_version);
  std::string problem = nccl_window_problem(NCCL_VERSION_CODE, library_version);
  if (!problem.empty()) return problem;
#if MXOPT_NCCL_HAS_WINDOWS
  const int domain_ranks = ncclTeamLsa(comm).nRanks;
  if (domain_ranks != ranks) return nccl_domain_problem(domain_ranks, ranks);
#endif
  if (buffer.bytes() == 0 || is_window_memory(buffer)) return "";
  return "the allocator's memory is not that of ncclMemAlloc()";
}

bool is_window_memory(const Buffer& buffer) {
  using Handle = CUmemGenericAllocationHandle;
  const auto retain = driver_function<CUresult (*)(Handle*, void*)>("cuMemRetainAllocationHandle");
  const auto release = driver_function<CUresult (*)(Handle)>("cuMemRelease");
  const auto properties_of =
      driver_function<CUresult (*)(CUmemAllocationProp*, Handle)>("cuMemGetAllocationPropertiesFromHandle");
  const auto range_of =
      driver_function<CUresult (*)(CUdeviceptr*, std::size_t*, CUdeviceptr)>("cuMemGetAddressRange");
  if (retain == nullptr || release == nullptr || properties_of == nullptr || range_of == nullptr)
    return false;
  // One allocation of the driver's virtual memory management, with a handle that other ranks can import.
  Handle first{}, last{};
  if (retain(&first, buffer.data()) != CUDA_SUCCESS) return false;
  CUmemAllocationProp properties{};
  bool is_good = properties_of(&properties, first) == CUDA_SUCCESS &&
                 properties.requestedHandleTypes != CU_MEM_HANDLE_TYPE_NONE;
  if (retain(&last, buffer.data() + buffer.bytes() - 1) == CUDA_SUCCESS) {
    is_good = is_good && first == last;
    release(last);
  } else {
    is_good = false;
  }
  release(first);
  // From its begin: NCCL takes a buffer's place in its allocation to be the same on all ranks.
  CUdeviceptr base = 0;
  std::size_t bytes = 0;
  const auto address = static_cast<CUdeviceptr>(reinterpret_cast<std::uintptr_t>(buffer.data()));
  return is_good && range_of(&base, &bytes, address) == CUDA_SUCCESS && base == address;
}

int register_window([[maybe_unused]] ncclComm* comm, [[maybe_unused]] const Buffer& buffer,
                    [[maybe_unused]] ncclWindow_vidmem** window) {
#if MXOPT_NCCL_HAS_WINDOWS
  return ncclCommWindowRegister(comm, buffer.data(), static_cast<std::size_t>(buffer.bytes()), window,
                                NCCL_WIN_COLL_SYMMETRIC);
#else
  return ncclInvalidUsage;
#endif
}

int deregister_window([[maybe_unused]] ncclComm* comm, [[maybe_unused]] ncclWindow_vidmem* window) {
#if MXOPT_NCCL_HAS_WINDOWS
  return ncclCommWindowDeregister(comm, window);
#else
  return ncclInvalidUsage;
#endif
}

bool is_window(const ncclWindow_vidmem* window) {
  cudaPointerAttributes attributes{};
  const bool is_known = window != nullptr && cudaPointerGetAttributes(&attributes, window) == cudaSuccess;
  cudaGetLastError();  // of an address that CUDA does not know
  return is_known && attributes.type == cudaMemoryTypeDevice;
}

std::vector<std::uint8_t*> window_bases([[maybe_unused]] ncclWindow_vidmem* window, int ranks,
                                        [[maybe_unused]] int device) {
  std::vector<std::uint8_t*> bases(static_cast<std::size_t>(ranks), nullptr);
#if MXOPT_NCCL_HAS_WINDOWS
  const Device place{DeviceKind::kCuda, device};
  const Stream stream(place);
  const auto bytes = static_cast<std::int64_t>(bases.size() * sizeof(bases[0]));
  const Buffer on_device(bytes, place, default_allocator(place));
  launch(device, stream.ref(), 1, 128, false, bases_kernel, window, ranks,
         reinterpret_cast<std::uint8_t**>(on_device.data()));
  mxopt::copy_bytes(bases.data(), on_device.data(), bytes, place, stream.ref());
  mxopt::synchronize(place, stream.ref());
#endif
  return bases;
}

void store_bytes(void* to, const void* from, std::int64_t bytes, int device, StreamRef stream) {
  constexpr std::int64_t kBlocks = 1056;  // enough to fill any link and any device's memory
  launch(device, stream, kBlocks, 256, false, store_kernel, static_cast<uint4*>(to),
         static_cast<const uint4*>(from), bytes / static_cast<std::int64_t>(sizeof(uint4)));
}

}  // namespace mxopt::cuda
