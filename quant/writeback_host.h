// The host twin of writeback.h. Arguments are checked there; results do not depend on the number of threads.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "mxopt/params/dtype.h"
#include "mxopt/params/param_spec.h"
#include "mxopt/quant/writeback.h"

namespace mxopt::host {

std::unique_ptr<Mxfp8Batch::State> prepare(std::span<const Mxfp8Shard> shards);

void dequantize(const MxView& weight, Plane plane, std::int64_t begin, TypedSpan out);

}  // namespace mxopt::host
