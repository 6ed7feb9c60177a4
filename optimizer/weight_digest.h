// Do all ranks hold the same weights?
#pragma once

#include "mxopt/optimizer/distributed_adam.h"
#include "mxopt/optimizer/parallel_groups.h"
#include "mxopt/params/memory.h"

namespace mxopt {

/// Collective over all groups: compares, over data-parallel ranks and replicas, planes, scales and values of
/// all params by their checksums. Throws ContractError on every rank, naming the first param that differs and
/// the ranks. Reads all weights through host memory: not for every step.
void require_equal_weights(DistributedAdam& optimizer, const ParallelGroups& groups, StreamRef stream = {});

}  // namespace mxopt
