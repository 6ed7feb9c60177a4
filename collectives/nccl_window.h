// NCCL's symmetric windows: which memory they take, where the peers' memory is then, and how fast copies are.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "mxopt/collectives/communicator.h"
#include "mxopt/params/memory.h"

struct ncclComm;
struct ncclWindow_vidmem;

namespace mxopt::cuda {

/// Memory of ncclMemAlloc().
std::shared_ptr<Allocator> make_window_allocator(int device);

/// Why the communicator can not make a window of this buffer; empty when it can. To be asked first on all
/// ranks: NCCL's own refusal is the end of the communicator.
std::string window_problem(const Buffer& buffer, ncclComm* comm, int ranks);

/// Whether the buffer is an allocation like those of ncclMemAlloc(), from its begin.
bool is_window_memory(const Buffer& buffer);

/// The NCCL calls, with NCCL's codes. Collective; may go on in the background.
int register_window(ncclComm* comm, const Buffer& buffer, ncclWindow_vidmem** window);
int deregister_window(ncclComm* comm, ncclWindow_vidmem* window);

/// Whether NCCL has made a window, and not the handle of an ordinary registration.
bool is_window(const ncclWindow_vidmem* window);

/// Where the buffers of all ranks are, as seen from here. For a group in one NVLink domain. The host waits.
std::vector<std::uint8_t*> window_bases(ncclWindow_vidmem* window, int ranks, int device);

/// Copies bytes, a multiple of 16, with stores from the device's threads; on the stream.
void store_bytes(void* to, const void* from, std::int64_t bytes, int device, StreamRef stream);

}  // namespace mxopt::cuda
