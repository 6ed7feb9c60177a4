// The CUDA twin of writeback.h. Arguments are checked there; every byte equals the host's.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "mxopt/params/dtype.h"
#include "mxopt/params/memory.h"
#include "mxopt/params/param_spec.h"
#include "mxopt/quant/writeback.h"

namespace mxopt::cuda {

/// Builds the batch's table in device memory and waits until it is there.
std::unique_ptr<Mxfp8Batch::State> prepare(std::span<const Mxfp8Shard> shards, Device device,
                                           std::shared_ptr<Allocator> allocator);

/// One phase of a batch with a table that lives on the stream, from before the launch until after it.
void partial_amax_once(std::span<const Mxfp8Shard> shards, std::uint8_t* packed, Device device,
                       StreamRef stream);
void partial_cast_once(std::span<const Mxfp8Shard> shards, const std::uint8_t* packed,
                       std::int64_t* nonfinite, Device device, StreamRef stream);

/// out.elems > 0.
void dequantize(const MxView& weight, Plane plane, std::int64_t begin, TypedSpan out, Device device,
                StreamRef stream);

}  // namespace mxopt::cuda
