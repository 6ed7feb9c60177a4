#include "mxopt/optimizer/grad_kernels_host.h"

#include <algorithm>
#include <utility>

#include "mxopt/collectives/rank_sum.h"
#include "mxopt/quant/block_host.h"

namespace mxopt::host {

namespace {

/// What a thread looks at in one go. No result depends on it.
constexpr std::int64_t kChunkElems = 8192;

MXOPT_HOST_CLONES bool has_nonfinite(const void* grad, DType dtype, std::int64_t begin, std::int64_t n) {
  if (dtype == DType::kFp32) return count_nonfinite(static_cast<const float*>(grad) + begin, n) != 0;
  const Bf16* const values = static_cast<const Bf16*>(grad) + begin;
  std::uint32_t count = 0;
  for (std::int64_t i = 0; i < n; ++i) count += (values[i].bits & 0x7F80u) == 0x7F80u ? 1u : 0u;
  return count != 0;
}

class HostGradKernels final : public GradKernels {
 public:
  explicit HostGradKernels(GradTables tables) : tables_(std::move(tables)) {}

  void find_nonfinite(int bucket, StreamRef) override {
    for (const GradRow& row : tables_.buckets[static_cast<std::size_t>(bucket)]) {
      const std::int64_t chunks = (row.elems + kChunkElems - 1) / kChunkElems;
      int found = 0;
#pragma omp parallel for schedule(static) reduction(| : found)
      for (std::int64_t chunk = 0; chunk < chunks; ++chunk) {
        const std::int64_t begin = chunk * kChunkElems;
        const std::int64_t n = std::min(kChunkElems, row.elems - begin);
        found |= has_nonfinite(row.grad, tables_.dtype, begin, n) ? 1 : 0;
      }
      *row.status = static_cast<std::uint8_t>(found);
    }
  }

  void sum_in_rank_order(TypedSpan to, ConstTypedSpan pieces, ReduceOp op, StreamRef) override {
    std::vector<const void*> starts;
    for (int rank = 0; rank < checked_pieces(to, pieces, op); ++rank) {
      starts.push_back(pieces.byte_data() + rank * to.bytes());
    }
    if (to.elems > 0) reduce_in_rank_order(to.data, starts, to.elems, to.dtype, op);
  }

 private:
  GradTables tables_;
};

}  // namespace

std::unique_ptr<GradKernels> make_grad_kernels(GradTables tables) {
  return std::make_unique<HostGradKernels>(std::move(tables));
}

}  // namespace mxopt::host
