#include "mxopt/optimizer/grad_kernels.h"

#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "support/compare.h"
#include "support/devices.h"
#include "support/exact_inputs.h"
#include "support/host_view.h"
#include "support/thrown_message.h"

#include "mxopt/params/bf16.h"
#include "mxopt/params/check.h"

namespace mxopt {
namespace {

using test::contains;
using test::HostView;
using test::thrown_message;

class GradKernelsOf : public ::testing::TestWithParam<DeviceKind> {
 protected:
  void SetUp() override { MXOPT_SKIP_WITHOUT(device()); }
  Device device() const { return {GetParam(), 0}; }
};
INSTANTIATE_TEST_SUITE_P(Devices, GradKernelsOf, ::testing::ValuesIn(test::built_device_kinds()),
                         [](const auto& kind) { return test::device_kind_name(kind.param); });

/// Gradients of some sizes in two buckets, all zero, each at a multiple of 128 elements; status bytes that
/// are wrong.
struct Gradients {
  Gradients(DType dtype, Device device)
      : place(device),
        memory(6 * kRoom * dtype_bytes(dtype), device, default_allocator(device)),
        status(6, device, default_allocator(device)) {
    GradTables tables;
    tables.dtype = dtype;
    tables.buckets.resize(3);
    for (int p = 0; p < 6; ++p) {
      grads.push_back(TypedSpan(memory.data(), dtype, 6 * kRoom).sub(p * kRoom, kElems[p]));
      tables.buckets[p < 4 ? 0 : 2].push_back({grads.back().data, kElems[p], status.data() + p});
    }
    fill_status(7);
    kernels = GradKernels::make(std::move(tables), device);
  }

  void fill_status(std::uint8_t value) const {
    const HostView view(place, StreamRef(), TypedSpan(status.data(), DType::kUint8, 6));
    for (std::uint8_t& byte : view.span().as<std::uint8_t>()) byte = value;
    view.store();
  }
  void set(int p, std::int64_t at, float value) const {
    const HostView view(place, StreamRef(), grads[static_cast<std::size_t>(p)].sub(at, 1));
    if (view.span().dtype == DType::kFp32) {
      view.span().as<float>()[0] = value;
    } else {
      view.span().as<Bf16>()[0] = fp32_to_bf16(value);
    }
    view.store();
  }
  std::vector<int> statuses() const {
    const HostView view(place, StreamRef(), TypedSpan(status.data(), DType::kUint8, 6));
    const std::span<const std::uint8_t> bytes = view.span().as<std::uint8_t>();
    return {bytes.begin(), bytes.end()};
  }

  static constexpr std::int64_t kRoom = 40'064;
  static constexpr std::int64_t kElems[] = {1, 40'003, 16'384, 0, 17, 8};
  Device place;
  Buffer memory, status;
  std::vector<TypedSpan> grads;
  std::unique_ptr<GradKernels> kernels;
};

TEST_P(GradKernelsOf, FindEveryKindOfNonFiniteValueAtEveryPlace) {
  const float bad_values[] = {
      std::numeric_limits<float>::quiet_NaN(), -std::numeric_limits<float>::quiet_NaN(),
      std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity()};
  for (const DType dtype : {DType::kFp32, DType::kBf16}) {
    const Gradients g(dtype, device());
    g.set(1, 77, std::numeric_limits<float>::max() / 2);
    g.set(1, 78, -std::numeric_limits<float>::denorm_min());
    int kind = 0;
    for (const std::int64_t at : {0, 1, 7, 8, 8191, 8192, 16'383, 16'384, 39'999, 40'000, 40'002}) {
      g.set(1, at, bad_values[kind++ % 4]);
      g.kernels->find_nonfinite(0, StreamRef());
      EXPECT_EQ(g.statuses(), (std::vector<int>{0, 1, 0, 0, 7, 7})) << "element " << at;
      g.set(1, at, 1);
      g.kernels->find_nonfinite(0, StreamRef());
      EXPECT_EQ(g.statuses(), (std::vector<int>{0, 0, 0, 0, 7, 7})) << "element " << at;
    }
  }
}

TEST_P(GradKernelsOf, TellTheParamsAndBucketsApart) {
  for (const DType dtype : {DType::kFp32, DType::kBf16}) {
    const Gradients g(dtype, device());
    g.set(0, 0, std::numeric_limits<float>::infinity());
    g.set(2, 16'383, std::numeric_limits<float>::quiet_NaN());
    g.set(5, 7, std::numeric_limits<float>::quiet_NaN());
    g.kernels->find_nonfinite(2, StreamRef());
    EXPECT_EQ(g.statuses(), (std::vector<int>{7, 7, 7, 7, 0, 1}));
    g.kernels->find_nonfinite(1, StreamRef());  // nothing is in it
    g.kernels->find_nonfinite(0, StreamRef());
    EXPECT_EQ(g.statuses(), (std::vector<int>{1, 0, 1, 0, 0, 1}));
  }
}

/// Values of many magnitudes, whose sums depend on the order, with some that are not finite.
float piece_value(int rank, std::int64_t i) {
  const std::uint64_t bits = test::mix(5, rank, i);
  if (i % 97 == 3 && rank == 1) return std::numeric_limits<float>::infinity();
  if (i % 89 == 5 && rank == 0) return -std::numeric_limits<float>::infinity();
  return std::ldexp(static_cast<float>(static_cast<int>(bits % 4095) - 2047),
                    static_cast<int>(bits >> 58) - 40);
}

/// Which NaN an FP32 sum gives is the processor's choice.
float one_nan(float value) {
  return std::isnan(value) ? std::numeric_limits<float>::quiet_NaN() : value;
}

TEST_P(GradKernelsOf, SumInRankOrderWithOneRounding) {
  const auto kernels = GradKernels::make({}, device());
  for (const DType dtype : {DType::kFp32, DType::kBf16}) {
    for (const int ranks : {1, 2, 3, 4, 7, 8}) {
      for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kAvg}) {
        for (const std::int64_t elems : {0, 8, 128, 2048, 5000}) {
          const std::int64_t bytes = elems * dtype_bytes(dtype);
          const Buffer memory(bytes * (ranks + 1), device(), default_allocator(device()));
          const TypedSpan to(memory.data(), dtype, elems);
          const TypedSpan pieces(memory.data() + bytes, dtype, elems * ranks);
          std::vector<float> expected;
          {
            const HostView view(device(), StreamRef(), pieces);
            for (std::int64_t i = 0; i < elems; ++i) {
              float sum = 0;
              for (int rank = 0; rank < ranks; ++rank) {
                float value = piece_value(rank, i);
                const auto at = static_cast<std::size_t>(rank * elems + i);
                if (dtype == DType::kFp32) {
                  view.span().as<float>()[at] = value;
                } else {
                  view.span().as<Bf16>()[at] = fp32_to_bf16(value);
                  value = bf16_to_fp32(view.span().as<Bf16>()[at]);
                }
                sum = rank == 0 ? value : sum + value;
              }
              if (op == ReduceOp::kAvg) sum /= static_cast<float>(ranks);
              expected.push_back(one_nan(dtype == DType::kFp32 ? sum : bf16_rne(sum)));
            }
            view.store();
          }
          kernels->sum_in_rank_order(to, pieces, op, StreamRef());
          const HostView view(device(), StreamRef(), to);
          std::vector<float> actual;
          for (std::int64_t i = 0; i < elems; ++i) {
            const auto at = static_cast<std::size_t>(i);
            actual.push_back(one_nan(dtype == DType::kFp32 ? view.span().as<float>()[at]
                                                           : bf16_to_fp32(view.span().as<Bf16>()[at])));
          }
          EXPECT_TRUE(test::bits_equal(expected, actual)) << ranks << " ranks, " << elems << " elements";
        }
      }
    }
  }
}

TEST_P(GradKernelsOf, PiecesThatDoNotFitAreRefused) {
  const auto kernels = GradKernels::make({}, device());
  const Buffer memory(1024, device(), default_allocator(device()));
  const auto message = [&](DType to_type, std::int64_t to_elems, DType type, std::int64_t elems,
                           ReduceOp op) {
    return thrown_message<ContractError>([&] {
      kernels->sum_in_rank_order({memory.data(), to_type, to_elems}, {memory.data() + 512, type, elems}, op,
                                 StreamRef());
    });
  };
  const DType fp32 = DType::kFp32;
  EXPECT_TRUE(contains(message(fp32, 8, DType::kBf16, 16, ReduceOp::kSum),
                       "sum_in_rank_order: pieces of bf16 into fp32"));
  EXPECT_TRUE(contains(message(DType::kInt64, 8, DType::kInt64, 16, ReduceOp::kSum),
                       "sum_in_rank_order: sum of int64; allowed are sum and avg of fp32 and bf16"));
  EXPECT_TRUE(contains(message(fp32, 8, fp32, 16, ReduceOp::kMax),
                       "sum_in_rank_order: max of fp32; allowed are sum and avg of fp32 and bf16"));
  EXPECT_TRUE(contains(message(fp32, 12, fp32, 24, ReduceOp::kSum),
                       "sum_in_rank_order: 12 elements; allowed are multiples of 8"));
  EXPECT_TRUE(contains(message(fp32, 8, fp32, 20, ReduceOp::kSum),
                       "sum_in_rank_order: 20 elements of pieces are not a piece of 8 for each rank"));
}

TEST(GradKernels, ADeviceWithoutABackendIsRefused) {
  if (test::has_backend(DeviceKind::kCuda)) GTEST_SKIP() << "this build has the CUDA backend";
  EXPECT_TRUE(contains(thrown_message<ConfigError>([] {
                         GradKernels::make({}, Device{DeviceKind::kCuda, 0});
                       }),
                       "parallel.device: cuda was asked for, but this build has no CUDA backend"));
}

}  // namespace
}  // namespace mxopt
