// The one reduction of W equal pieces, in rank order, that every host transport uses.
#pragma once

#include <cstdint>
#include <span>

#include "mxopt/collectives/communicator.h"
#include "mxopt/params/dtype.h"

namespace mxopt {

/// to[i] = reduction over r of pieces[r][i], pieces in rank order.
///
/// fp32, bf16: ((p0 + p1) + p2) + ... in fp32; kAvg then divides by the number of pieces; rounded once to the
/// type. int64 wraps. uint8 kMax is the unsigned maximum.
/// `to` may be exactly one of the pieces, else it must not overlap them.
void reduce_in_rank_order(void* to, std::span<const void* const> pieces, std::int64_t elems, DType dtype,
                          ReduceOp op);

}  // namespace mxopt
