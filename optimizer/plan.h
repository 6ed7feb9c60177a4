// The plan of an optimizer: what follows from params, configuration and world size, agreed on by all ranks.
#pragma once

#include <string>
#include <vector>

#include "mxopt/optimizer/config.h"
#include "mxopt/optimizer/parallel_groups.h"
#include "mxopt/optimizer/param_groups.h"
#include "mxopt/params/layout.h"
#include "mxopt/params/memory.h"
#include "mxopt/params/param_spec.h"

namespace mxopt {

struct Plan {
  Layout layout;
  ParamGroups groups;
  std::vector<int> norm_of;  // [params] index into groups.norms; -1: another model-parallel rank counts it
};

/// Collective over the data-parallel and the model-parallel group: makes the plan on every rank, or throws on
/// every rank of both where it fails on one. What ranks of a data-parallel group disagree on, they alone hear
/// of. Replicas are not asked, see require_equal_replicas().
/// Throws  ConfigError when the list or the configuration is bad; ContractError when ranks disagree, one
/// whose own list
///         is bad while the others' are good included.
Plan make_agreed_plan(std::vector<ParamSpec> specs, const Config& config, const ParallelGroups& ranks,
                      Device device);

/// Collective over the replicas: throws on all of them when plan or configuration are not equal, or when one
/// has a problem.
/// plan  null where there is a problem.
void require_equal_replicas(Communicator& replicas, const Plan* plan, const Config& config,
                            const ParallelGroups& ranks, const std::string& problem);

}  // namespace mxopt
