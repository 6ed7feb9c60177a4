// Collective calls on host memory over any transport, for control messages: complete when they return.
//
// Where the transport works on device memory, the bytes go through a device buffer that is made for the call.
#pragma once

#include <string>

#include "mxopt/collectives/communicator.h"

namespace mxopt {

/// In place; see Communicator::all_reduce.
void all_reduce_on_host(Communicator& comm, TypedSpan buffer, ReduceOp op, Traffic traffic);
/// See Communicator::all_gather.
void all_gather_on_host(Communicator& comm, TypedSpan output, ConstTypedSpan shard, Traffic traffic);
/// See Communicator::broadcast.
void broadcast_on_host(Communicator& comm, TypedSpan buffer, int root, Traffic traffic);

/// The window of ranks that share one address space.
PeerWindow exchange_addresses(Communicator& comm, const Buffer& buffer);

/// Collective: the first rank's problem that is not empty, as "rank 1: ..." on all ranks; else empty. Texts
/// are cut at 400 bytes.
std::string first_problem(Communicator& comm, const std::string& mine);

}  // namespace mxopt
