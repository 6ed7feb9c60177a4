// Collective calls on host memory over any transport, for control messages: complete when they return.
//
// Where the transport works on device memory, the bytes go through a device buffer that is made for the call.
#pragma once

#include "mxopt/collectives/communicator.h"

namespace mxopt {

/// In place; see Communicator::all_reduce.
void all_reduce_on_host(Communicator& comm, TypedSpan buffer, ReduceOp op, Traffic traffic);
/// See Communicator::all_gather.
void all_gather_on_host(Communicator& comm, TypedSpan output, ConstTypedSpan shard, Traffic traffic);
/// See Communicator::broadcast.
void broadcast_on_host(Communicator& comm, TypedSpan buffer, int root, Traffic traffic);

}  // namespace mxopt
