// Do all ranks hold the same text? Used before anything depends on it.
#pragma once

#include <span>

#include "mxopt/collectives/communicator.h"
#include "mxopt/params/layout.h"

namespace mxopt {

/// Collective: compares the fields over ranks. Every rank passes the same field names in the same order.
/// Throws ContractError on every rank when a field differs, naming the field, the ranks that differ from rank
/// 0, and the first line on which they do.
void require_agreement(Communicator& comm, std::span<const LayoutField> fields);

}  // namespace mxopt
