#include <algorithm>
#include <cstdint>
#include <vector>

#include "mxopt/optimizer/grad_kernels_cuda.h"
#include "mxopt/params/bf16.h"
#include "mxopt/params/launch_cuda.cuh"

namespace mxopt::cuda {

namespace {

constexpr int kThreads = 256;
constexpr std::int64_t kPieceElems = 16384;

/// A part of one gradient, for one block of threads.
struct Piece {
  const void* grad = nullptr;
  std::uint8_t* status = nullptr;
  std::int64_t elems = 0;
};

__device__ bool is_nonfinite(float x) {
  return (__float_as_uint(x) & 0x7F800000u) == 0x7F800000u;
}
__device__ bool is_nonfinite(Bf16 x) {
  return (x.bits & 0x7F80u) == 0x7F80u;
}
/// Whether one of the elements in a word is not finite.
template <class Grad>
__device__ bool has_nonfinite(std::uint32_t word) {
  const bool is_high_nonfinite = (word & 0x7F800000u) == 0x7F800000u;
  return is_high_nonfinite || (sizeof(Grad) == sizeof(Bf16) && (word & 0x7F80u) == 0x7F80u);
}

template <class Grad>
__global__ void __launch_bounds__(kThreads) find_nonfinite_kernel(const Piece* pieces) {
  constexpr std::int64_t kVector = sizeof(uint4) / sizeof(Grad);
  const Piece piece = pieces[blockIdx.x];
  release_next_launch();
  wait_for_former_launches();
  const Grad* const grad = static_cast<const Grad*>(piece.grad);
  const uint4* const vectors = static_cast<const uint4*>(piece.grad);
  const std::int64_t count = piece.elems / kVector;
  bool found = false;
  for (std::int64_t i = threadIdx.x; i < count; i += kThreads) {
    const uint4 words = vectors[i];
    found = found || has_nonfinite<Grad>(words.x) || has_nonfinite<Grad>(words.y) ||
            has_nonfinite<Grad>(words.z) || has_nonfinite<Grad>(words.w);
  }
  for (std::int64_t i = count * kVector + threadIdx.x; i < piece.elems; i += kThreads) {
    found = found || is_nonfinite(grad[i]);
  }
  if (found) *piece.status = 1;  // several threads may, all with the same value
}

/// A vector of 16 bytes as FP32 numbers, and back with one rounding.
template <class T>
struct Vector;

template <>
struct Vector<float> {
  static constexpr int kElems = 4;
  static __device__ void load(const float* from, float* x) {
    const float4 v = *reinterpret_cast<const float4*>(from);
    x[0] = v.x;
    x[1] = v.y;
    x[2] = v.z;
    x[3] = v.w;
  }
  static __device__ void store(float* to, const float* x) {
    *reinterpret_cast<float4*>(to) = make_float4(x[0], x[1], x[2], x[3]);
  }
};

template <>
struct Vector<Bf16> {
  static constexpr int kElems = 8;
  static __device__ void load(const Bf16* from, float* x) {
    const uint4 v = *reinterpret_cast<const uint4*>(from);
    const std::uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      x[2 * i] = __uint_as_float(words[i] << 16);
      x[2 * i + 1] = __uint_as_float(words[i] & 0xFFFF0000u);
    }
  }
  static __device__ void store(Bf16* to, const float* x) {
    std::uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const std::uint32_t low = fp32_to_bf16(x[2 * i]).bits;
      const std::uint32_t high = fp32_to_bf16(x[2 * i + 1]).bits;
      words[i] = low | high << 16;
    }
    *reinterpret_cast<uint4*>(to) = make_uint4(words[0], words[1], words[2], words[3]);
  }
};

template <class T>
__global__ void __launch_bounds__(kThreads)
    sum_kernel(T* to, const T* pieces, std::int64_t elems, int ranks, bool averages) {
  using V = Vector<T>;
  release_next_launch();
  wait_for_former_launches();
  const std::int64_t stride = static_cast<std::int64_t>(gridDim.x) * kThreads * V::kElems;
  const auto divisor = static_cast<float>(ranks);
  for (std::int64_t at = (static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x) * V::kElems;
       at < elems; at += stride) {
    float sum[V::kElems], next[V::kElems];
    V::load(pieces + at, sum);
    for (int rank = 1; rank < ranks; ++rank) {
      V::load(pieces + rank * elems + at, next);
#pragma unroll
      for (int i = 0; i < V::kElems; ++i) sum[i] = __fadd_rn(sum[i], next[i]);
    }
    if (averages) {
#pragma unroll
      for (int i = 0; i < V::kElems; ++i) sum[i] = __fdiv_rn(sum[i], divisor);
    }
    V::store(to + at, sum);
  }
}

class CudaGradKernels final : public GradKernels {
 public:
  CudaGradKernels(const GradTables& tables, Device device, const std::shared_ptr<Allocator>& allocator)
      : device_(device), dtype_(tables.dtype) {
    std::vector<Piece> pieces;
    for (const std::vector<GradRow>& rows : tables.buckets) {
      Range range;
      range.first_piece = static_cast<std::int64_t>(pieces.size());
      if (!rows.empty()) range.status = rows.front().status;
      range.rows = static_cast<std::int64_t>(rows.size());
      for (const GradRow& row : rows) {
        const auto* const begin = static_cast<const std::uint8_t*>(row.grad);
        for (std::int64_t at = 0; at < row.elems; at += kPieceElems) {
          pieces.push_back(
              {begin + at * dtype_bytes(dtype_), row.status, std::min(kPieceElems, row.elems - at)});
        }
      }
      range.pieces = static_cast<std::int64_t>(pieces.size()) - range.first_piece;
      buckets_.push_back(range);
    }
    pieces_ = Buffer(static_cast<std::int64_t>(pieces.size() * sizeof(Piece)), device, allocator);
    const Stream setup(device);
    mxopt::copy_bytes(pieces_.data(), pieces.data(), pieces_.bytes(), device, setup.ref());
    synchronize(device, setup.ref());
    const DeviceGuard guard(device_.index);
    MXOPT_CUDA_CHECK(cudaDeviceGetAttribute(&processors_, cudaDevAttrMultiProcessorCount, device_.index));
  }

  void find_nonfinite(int bucket, StreamRef stream) override {
    const Range& range = buckets_[static_cast<std::size_t>(bucket)];
    if (range.rows == 0) return;
    mxopt::fill_zero(range.status, range.rows, device_, stream);
    const Piece* const first = reinterpret_cast<const Piece*>(pieces_.data()) + range.first_piece;
    if (dtype_ == DType::kFp32) {
      cuda::launch(device_.index, stream, range.pieces, kThreads, true, find_nonfinite_kernel<float>, first);
    } else {
      cuda::launch(device_.index, stream, range.pieces, kThreads, true, find_nonfinite_kernel<Bf16>, first);
    }
  }

  void sum_in_rank_order(TypedSpan to, ConstTypedSpan pieces, ReduceOp op, StreamRef stream) override {
    const int ranks = checked_pieces(to, pieces, op);
    const bool averages = op == ReduceOp::kAvg;
    const std::int64_t vectors = to.bytes() / static_cast<std::int64_t>(sizeof(uint4));
    const std::int64_t blocks = std::min<std::int64_t>((vectors + kThreads - 1) / kThreads,
                                                       static_cast<std::int64_t>(processors_) * 8);
    if (to.dtype == DType::kFp32) {
      cuda::launch(device_.index, stream, blocks, kThreads, true, sum_kernel<float>,
                   static_cast<float*>(to.data), static_cast<const float*>(pieces.data), to.elems, ranks,
                   averages);
    } else {
      cuda::launch(device_.index, stream, blocks, kThreads, true, sum_kernel<Bf16>,
                   static_cast<Bf16*>(to.data), static_cast<const Bf16*>(pieces.data), to.elems, ranks,
                   averages);
    }
  }

 private:
  /// A bucket's part of the table.
  struct Range {
    std::int64_t first_piece = 0, pieces = 0;
    std::uint8_t* status = nullptr;
    std::int64_t rows = 0;
  };

  Device device_;
  DType dtype_;
  std::vector<Range> buckets_;
  Buffer pieces_;
  int processors_ = 0;
};

}  // namespace

std::unique_ptr<GradKernels> make_grad_kernels(const GradTables& tables, Device device,
                                               std::shared_ptr<Allocator> allocator) {
  return std::make_unique<CudaGradKernels>(tables, device, allocator);
}

}  // namespace mxopt::cuda
