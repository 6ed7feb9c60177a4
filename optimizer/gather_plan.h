// Which planes the update stores into the other ranks' memory itself, and which an all-gather brings.
//
// The rule is that of cost. Stores to the peers leave over the link while the update goes on, so they are
// free as long as the link needs no longer than the update:
//   (W - 1) * bytes of the planes that a rank owns / link rate  <=  bytes of its update / copy rate
// Beyond that they would make the update longer, where an all-gather can hide behind the forward pass. Row
// planes, with scales and plain params, are weighed first, since the forward needs them first.
#pragma once

#include <cstdint>
#include <string>

#include "mxopt/collectives/communicator.h"
#include "mxopt/optimizer/config.h"
#include "mxopt/params/layout.h"

namespace mxopt {

struct GatherPlan {
  bool is_row_direct = false;     // row planes, scales, bf16 and fp32 params
  bool is_column_direct = false;  // column planes; only with the former
  std::string reason;             // why, for the construction report

  /// "direct (...)", "row planes direct, column planes collective (...)", "collective (...)".
  std::string text() const;
};

/// What one rank moves in a step; a mean over ranks.
struct GatherCosts {
  std::int64_t world_size = 1;
  double update_bytes = 0;  // read and written by the update
  double row_bytes = 0;     // of row planes, scales and plain params that it owns
  double column_bytes = 0;  // of column planes that it owns
};

GatherCosts gather_costs(const Layout& layout, DType grad_dtype);

/// What kAuto chooses.
GatherPlan cheaper_gather(const GatherCosts& costs, const CopyRates& rates);

/// Collective: the plan before a window is open, equal on all ranks.
GatherPlan plan_gather(const Layout& layout, const Config& config, Communicator& comm);

/// Where the window could not be opened: all-gathers. Throws ConfigError where the configuration asks for
/// direct stores.
GatherPlan without_window(GatherChoice choice, const std::string& reason);

}  // namespace mxopt
