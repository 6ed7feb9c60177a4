// The host twin of writeback.h. Arguments are checked there; results do not depend on the number of threads.
#pragma once

#include <cstdint>
#include <span>

#include "mxopt/params/dtype.h"
#include "mxopt/params/param_spec.h"
#include "mxopt/quant/writeback.h"

namespace mxopt::host {

void partial_amax(std::span<const Mxfp8Shard> batch, std::span<std::uint8_t> packed);

void partial_cast(std::span<const Mxfp8Shard> batch, std::span<const std::uint8_t> packed,
                  std::span<std::int64_t> nonfinite);

void dequantize(const MxView& weight, Plane plane, std::int64_t begin, TypedSpan out);

}  // namespace mxopt::host
