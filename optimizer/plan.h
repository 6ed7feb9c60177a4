// The plan of an optimizer: what follows from params, configuration and world size, agreed on by all ranks.
#pragma once

#include <vector>

#include "mxopt/collectives/communicator.h"
#include "mxopt/optimizer/config.h"
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

/// Collective: makes the plan on every rank, or throws on every rank.
/// model_parallel  see DistributedAdam; null: none. What fails on one of its ranks fails on all ranks of both
///                 groups; what ranks of `comm` disagree on, they alone hear of.
/// Throws  ConfigError when the list or the configuration is bad; ContractError when ranks disagree, one
/// whose own list
///         is bad while the others' are good included.
Plan make_agreed_plan(std::vector<ParamSpec> specs, const Config& config, Communicator& comm, Device device,
                      Communicator* model_parallel = nullptr);

}  // namespace mxopt
