// What a rank does itself with whole gradients around their exchange: the look for NaN and infinity before,
// and the sum in rank order behind.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "mxopt/collectives/communicator.h"
#include "mxopt/params/dtype.h"
#include "mxopt/params/memory.h"

namespace mxopt {

/// The gradient of one param, all of it, and the byte that says what is in it.
struct GradRow {
  const void* grad = nullptr;
  std::int64_t elems = 0;
  std::uint8_t* status = nullptr;
};

struct GradTables {
  std::vector<std::vector<GradRow>> buckets;  // the status bytes of a bucket follow one another
  DType dtype = DType::kFp32;
};

/// Pointers in the tables stay valid for the object's life; nothing is allocated after construction.
class GradKernels {
 public:
  virtual ~GradKernels() = default;

  /// allocator  of the tables on a device; null: the default one.
  /// Throws ConfigError when the device's backend is not built in.
  static std::unique_ptr<GradKernels> make(GradTables tables, Device device,
                                           std::shared_ptr<Allocator> allocator = nullptr);

  /// The status bytes of the bucket's params := 1 where the gradient holds a NaN or an infinity, else 0.
  virtual void find_nonfinite(int bucket, StreamRef stream) = 0;

  /// to[i] := the reduction of pieces[r * to.elems + i] over the ranks r, in rank order, with the bits of
  /// reduce_in_rank_order(). kSum and kAvg of fp32 and bf16.
  ///
  /// to      a multiple of 8 elements, aligned to 16 bytes; outside of the pieces.
  /// pieces  a multiple of to.elems: one piece for each rank.
  virtual void sum_in_rank_order(TypedSpan to, ConstTypedSpan pieces, ReduceOp op, StreamRef stream) = 0;

 protected:
  /// The number of pieces. Throws ContractError for what does not fit.
  static int checked_pieces(TypedSpan to, ConstTypedSpan pieces, ReduceOp op);
};

}  // namespace mxopt
