// The CUDA twin of memory.h; memory.cc picks it.
#pragma once

#include <cstdint>
#include <memory>

#include "mxopt/params/memory.h"

namespace mxopt::cuda {

/// 0 when there is none, or no driver.
int device_count();
/// Throws ConfigError when there is no such device.
std::shared_ptr<Allocator> make_allocator(int device);
std::shared_ptr<Allocator> make_pinned_allocator(int device);

void fill_zero(void* data, std::int64_t bytes, int device, StreamRef stream);
/// `to` and `from` may be memory of the host or of the device.
void copy_bytes(void* to, const void* from, std::int64_t bytes, int device, StreamRef stream);
/// Host waits until everything enqueued on the stream is done.
void synchronize(int device, StreamRef stream);
bool is_capturing(int device, StreamRef stream);

/// Zeroes memory with a stream of its own and waits: for memory that no stream knows yet.
void fill_zero_now(void* data, std::int64_t bytes, int device);

/// A cudaStream_t that is destroyed with its last owner.
std::shared_ptr<void> make_stream(int device);
std::unique_ptr<Event::State> make_event(int device);

}  // namespace mxopt::cuda
