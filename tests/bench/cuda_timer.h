// Timing on a CUDA device: events around each run, and the ceiling of a large copy.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include <cuda_runtime.h>

#include "bench/table.h"

#include "mxopt/params/memory.h"

namespace mxopt::bench {

inline void check_cuda(cudaError_t error) {
  if (error != cudaSuccess) throw std::runtime_error(cudaGetErrorString(error));
}

/// Times of body() on `stream`, each between two events; three runs to warm up.
template <class Body>
Times measure_on_device(int repeats, StreamRef stream, const Body& body) {
  const auto native = static_cast<cudaStream_t>(stream.native());
  for (int i = 0; i < 3; ++i) body();
  std::vector<cudaEvent_t> events(2 * static_cast<std::size_t>(repeats));
  for (cudaEvent_t& event : events) check_cuda(cudaEventCreate(&event));
  for (std::size_t i = 0; i < events.size(); i += 2) {
    check_cuda(cudaEventRecord(events[i], native));
    body();
    check_cuda(cudaEventRecord(events[i + 1], native));
  }
  check_cuda(cudaStreamSynchronize(native));
  std::vector<double> samples_ms;
  for (std::size_t i = 0; i < events.size(); i += 2) {
    float ms = 0;
    check_cuda(cudaEventElapsedTime(&ms, events[i], events[i + 1]));
    samples_ms.push_back(static_cast<double>(ms));
  }
  for (cudaEvent_t event : events) check_cuda(cudaEventDestroy(event));
  return statistics(std::move(samples_ms));
}

/// TB/s, read and written, of a copy of 2 GiB on the device.
inline double copy_tb_per_s(Device device, StreamRef stream) {
  constexpr std::int64_t kBytes = std::int64_t{1} << 31;
  const auto allocator = default_allocator(device);
  const Buffer from(kBytes, device, allocator), to(kBytes, device, allocator);
  const Times times =
      measure_on_device(15, stream, [&] { copy_bytes(to.data(), from.data(), kBytes, device, stream); });
  return gb_per_s(2 * kBytes, times.p50_ms) / 1000;
}

}  // namespace mxopt::bench
