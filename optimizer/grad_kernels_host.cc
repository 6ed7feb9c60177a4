#include "mxopt/optimizer/grad_kernels_host.h"

#include <algorithm>
#include <atomic>
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

/// A part of one gradient.
struct Chunk {
  const GradRow* row = nullptr;
  std::int64_t begin = 0;
  std::int64_t elems = 0;
};

class HostGradKernels final : public GradKernels {
 public:
  explicit HostGradKernels(GradTables tables) : tables_(std::move(tables)), chunks_(tables_.buckets.size()) {
    for (std::size_t b = 0; b < chunks_.size(); ++b) {
      for (const GradRow& row : tables_.buckets[b]) {
        for (std::int64_t begin = 0; begin < row.elems; begin += kChunkElems) {
          chunks_[b].push_back({&row, begin, std::min(kChunkElems, row.elems - begin)});
        }
      }
    }
  }

  void find_nonfinite(int bucket, StreamRef) override {
    const std::vector<Chunk>& chunks = chunks_[static_cast<std::size_t>(bucket)];
    for (const GradRow& row : tables_.buckets[static_cast<std::size_t>(bucket)]) *row.status = 0;
    const auto count = static_cast<std::int64_t>(chunks.size());
#pragma omp parallel for schedule(static)
    for (std::int64_t i = 0; i < count; ++i) {
      const Chunk& chunk = chunks[static_cast<std::size_t>(i)];
      if (!has_nonfinite(chunk.row->grad, tables_.dtype, chunk.begin, chunk.elems)) continue;
      // Several threads may, all with the same value.
      std::atomic_ref<std::uint8_t>(*chunk.row->status).store(1, std::memory_order_relaxed);
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
  const GradTables tables_;
  std::vector<std::vector<Chunk>> chunks_;  // [buckets]
};

}  // namespace

std::unique_ptr<GradKernels> make_grad_kernels(GradTables tables) {
  return std::make_unique<HostGradKernels>(std::move(tables));
}

}  // namespace mxopt::host
