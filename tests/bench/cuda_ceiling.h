// The ceiling that benchmarks on a CUDA device are measured against: a large copy on it.
#pragma once

#include <cstdint>

#include "bench/cuda_timer.h"
#include "bench/table.h"

#include "mxopt/params/memory.h"

namespace mxopt::bench {

inline constexpr std::int64_t kCeilingBytes = std::int64_t{1} << 31;

/// Of a copy of kCeilingBytes on the device.
inline Times measure_ceiling(Device device, StreamRef stream) {
  const auto allocator = default_allocator(device);
  const Buffer from(kCeilingBytes, device, allocator), to(kCeilingBytes, device, allocator);
  return measure_on_device(15, stream,
                           [&](int) { copy_bytes(to.data(), from.data(), kCeilingBytes, device, stream); });
}

}  // namespace mxopt::bench
