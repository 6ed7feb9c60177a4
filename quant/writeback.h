// Batches of MXFP8 writes at any offset: partial maxima, partial casts, and the way back.
//
// One batch is one call per phase, whatever the number of weights; on CUDA that is one launch. Work is
// proportional to the shards, not to the matrices. Calls on different memory may run on different threads;
// one call may itself use several.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string_view>

#include "mxopt/params/dtype.h"
#include "mxopt/params/memory.h"
#include "mxopt/params/param_spec.h"
#include "mxopt/quant/mxfp8.h"

namespace mxopt {

/// One weight of a batch and the part of it that this rank owns.
struct Mxfp8Shard {
  std::string_view name;  // for errors
  MxView weight;          // whole planes and scales, this rank's copy
  ConstTypedSpan master;  // fp32 or bf16 values of the flat range [start, start + master.elems); may be empty
  std::int64_t start = 0;  // any offset, inside a 32-block included
  // Where the owned bytes go instead of weight.row_data / weight.column_data: [master.elems] bytes each. The
  // plane in `weight` still says that the plane exists, and is then not written.
  std::uint8_t* row_fragment = nullptr;
  std::uint8_t* column_fragment = nullptr;
};

/// Bytes of the packed scales of a batch: the padded scale arrays of every plane that exists, weight after
/// weight, row before column, in the weight's own scale layout. The same on every rank that passes the same
/// weights.
std::int64_t packed_scale_bytes(std::span<const Mxfp8Shard> batch);

/// A batch that is checked and laid out once, for any number of calls. Movable; goes only after the work that
/// it has enqueued. What the shards point to is borrowed; the list and the names are read by the constructor
/// alone.
class Mxfp8Batch {
 public:
  /// What a device implements.
  class State {
   public:
    virtual ~State() = default;
    virtual void partial_amax(std::uint8_t* packed, StreamRef stream) const = 0;
    /// nonfinite may be null.
    virtual void partial_cast(const std::uint8_t* packed, std::int64_t* nonfinite,
                              StreamRef stream) const = 0;
  };

  /// A batch of the host without weights.
  Mxfp8Batch() = default;
  /// Memory  on CUDA a table from `allocator` (null: the library's own), which grows with the number of
  ///         weights, and by one byte in some thousand with the scales; the host waits until it is written.
  /// Throws  ContractError naming the weight when its planes, scales, shape or range do not fit, or when a
  ///         weight occurs twice; ConfigError when the device's backend is not built in.
  Mxfp8Batch(std::span<const Mxfp8Shard> shards, Device device,
             std::shared_ptr<Allocator> allocator = nullptr);

  std::int64_t packed_scale_bytes() const { return packed_scale_bytes_; }

  /// packed := E8M0 codes of the owned parts of all blocks, 0 elsewhere. A MAX over ranks then gives the
  /// final scales.
  ///
  /// packed  [packed_scale_bytes()] uint8, device of `stream`; overwritten.
  /// Order   enqueued on `stream`.
  /// Memory  no allocation, and on CUDA no wait of the host.
  /// Throws  ContractError when packed has another size.
  void partial_amax(std::span<std::uint8_t> packed, StreamRef stream) const;

  /// Copies the reduced scales into the weights' scale arrays and casts the owned ranges into the planes (or
  /// fragments). Order and Memory as for partial_amax.
  ///
  /// packed      as partial_amax gave it, after a MAX over all ranks that own parts of these weights. Where a
  ///             plane's packed scales already are its scale array (a scale arena in the order of the batch),
  ///             nothing is copied; otherwise the two must not overlap.
  /// nonfinite   [1] int64, device of `stream`, or empty: the count of owned masters that are NaN or infinite
  ///             after the rounding to BF16 is added to it.
  /// Throws      ContractError when packed has another size, or nonfinite more than one counter.
  void partial_cast(std::span<const std::uint8_t> packed, std::span<std::int64_t> nonfinite,
                    StreamRef stream) const;

 private:
  std::int64_t packed_scale_bytes_ = 0;
  std::unique_ptr<State> state_;
};

/// Mxfp8Batch(batch, device).partial_amax(packed, stream), for a single use. On CUDA the table is memory of
/// the stream (cudaMallocAsync), so that nothing waits for the launch; not for a stream that is being
/// captured. Throws as both do, before anything is written.
void partial_amax(std::span<const Mxfp8Shard> batch, std::span<std::uint8_t> packed, Device device,
                  StreamRef stream);

/// Likewise Mxfp8Batch(batch, device).partial_cast(packed, nonfinite, stream).
void partial_cast(std::span<const Mxfp8Shard> batch, std::span<const std::uint8_t> packed,
                  std::span<std::int64_t> nonfinite, Device device, StreamRef stream);

/// out[i] := value of element begin + i of one plane; out is fp32 or bf16 (exact: an MXFP8 value fits BF16,
/// but for the lowest scale codes, where it is rounded).
/// Throws ContractError when the plane does not exist or the range does not fit.
void dequantize(const MxView& weight, Plane plane, std::int64_t begin, TypedSpan out, Device device,
                StreamRef stream);

}  // namespace mxopt
