#include "mxopt/optimizer/step_kernels_host.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "support/compare.h"
#include "support/optimizer_fixture.h"
#include "support/reference_adam.h"
#include "support/reference_mxfp8.h"

#include "mxopt/optimizer/exact_sum.h"

namespace mxopt {
namespace {

using test::bits_equal;
using test::set_kernel_threads;

constexpr std::uint8_t kUnwritten = 0xEE;

AdamScalars first_step_scalars(bool decoupled = true) {
  AdamScalars s;
  s.beta1 = 0.9f;
  s.beta2 = 0.95f;
  s.omb1 = static_cast<float>(1 - 0.9);
  s.omb2 = static_cast<float>(1 - 0.95);
  s.bc1 = static_cast<float>(1 - 0.9);
  s.bc2 = static_cast<float>(1 - 0.95);
  s.eps = 1e-8f;
  s.lr = 3e-3f;
  s.weight_decay = 0.1f;
  s.grad_factor = 0.75f;
  s.decoupled = decoupled;
  return s;
}

reference::AdamSettings first_step_settings(bool decoupled = true) {
  reference::AdamSettings settings;
  settings.lr = 3e-3;
  settings.grad_factor = 0.75;
  settings.decoupled = decoupled;
  return settings;
}

/// One param in whole planes, of which the given ranges are owned: one segment each.
struct Param {
  Param(std::int64_t rows_, std::int64_t cols_, bool has_column, bool gemm = false,
        DType dtype = DType::kFp32)
      : rows(rows_),
        cols(cols_),
        grad_dtype(dtype),
        master(test::initial_values("param", rows_ * cols_)),
        exp_avg(master.size()),
        exp_avg_sq(master.size()),
        grad(test::grad_values("param", rows_ * cols_, 1)),
        grad_bf16(master.size()),
        row(master.size(), kUnwritten),
        column(master.size(), kUnwritten),
        row_scales(static_cast<std::size_t>(row_scale_bytes(rows_, cols_)), 0),
        column_scales(static_cast<std::size_t>(column_scale_bytes(rows_, cols_)), 0),
        status(1, 0) {
    planes = {rows,
              cols,
              row.data(),
              row_scales.data(),
              nullptr,
              nullptr,
              gemm ? ScaleLayout::kGemm : ScaleLayout::kCompact};
    if (has_column) {
      planes.column_data = column.data();
      planes.column_scales = column_scales.data();
    }
    for (std::size_t i = 0; i < grad.size(); ++i) grad_bf16[i] = fp32_to_bf16(grad[i]);
  }

  SegmentRow segment(std::int64_t begin, std::int64_t end) {
    SegmentRow s;
    s.elems = end - begin;
    s.param_begin = begin;
    s.planes = planes;
    s.master = master.data() + begin;
    s.exp_avg = exp_avg.data() + begin;
    s.exp_avg_sq = exp_avg_sq.data() + begin;
    s.grad = grad_dtype == DType::kFp32 ? static_cast<const void*>(grad.data() + begin)
                                        : static_cast<const void*>(grad_bf16.data() + begin);
    s.status = status.data();
    return s;
  }

  std::unique_ptr<StepKernels> kernels(std::int64_t begin, std::int64_t end) {
    return host::make_step_kernels({{segment(begin, end)}, grad_dtype});
  }

  std::int64_t rows, cols;
  DType grad_dtype;
  std::vector<float> master, exp_avg, exp_avg_sq, grad;
  std::vector<Bf16> grad_bf16;
  std::vector<std::uint8_t> row, column, row_scales, column_scales, status;
  MxView planes;
};

struct Shape {
  std::int64_t rows, cols;
};
const Shape kShapes[] = {{32, 32}, {64, 96}, {32, 352}, {160, 32}, {96, 288}, {256, 64}};

TEST(StepKernelsHost, FusedUpdateIsTheReferenceUpdateAndTheOracleQuantisation) {
  set_kernel_threads(1);
  for (const Shape shape : kShapes) {
    for (const bool has_column : {false, true}) {
      for (const bool gemm : {false, true}) {
        for (const DType dtype : {DType::kFp32, DType::kBf16}) {
          SCOPED_TRACE(std::to_string(shape.rows) + "x" + std::to_string(shape.cols) + " column " +
                       std::to_string(has_column) + " gemm " + std::to_string(gemm) + ' ' +
                       std::string(dtype_name(dtype)));
          const bool decoupled = gemm;
          Param param(shape.rows, shape.cols, has_column, gemm, dtype);
          reference::AdamState<float> expected(param.master);
          reference::adam_step(expected, param.grad, first_step_settings(decoupled), 1);
          const auto kernels = param.kernels(0, shape.rows * shape.cols);
          const AdamScalars scalars[] = {first_step_scalars(decoupled)};
          kernels->fused_update(scalars, nullptr, StreamRef());
          kernels->cast_cut_bands(false, nullptr, StreamRef());
          EXPECT_TRUE(bits_equal(expected.p, param.master));
          EXPECT_TRUE(bits_equal(expected.m, param.exp_avg));
          EXPECT_TRUE(bits_equal(expected.v, param.exp_avg_sq));
          const reference::Mxfp8 bytes = reference::quantize(expected.p, shape.rows, shape.cols, gemm);
          EXPECT_TRUE(bits_equal(bytes.row_data, param.row));
          EXPECT_TRUE(bits_equal(bytes.row_scales, param.row_scales));
          if (has_column) {
            EXPECT_TRUE(bits_equal(bytes.column_data, param.column));
            EXPECT_TRUE(bits_equal(bytes.column_scales, param.column_scales));
          } else {
            EXPECT_TRUE(std::ranges::all_of(param.column, [](auto byte) { return byte == kUnwritten; }));
          }
        }
      }
    }
  }
}

TEST(StepKernelsHost, ShardsTogetherGiveTheBytesOfTheWholeAtEveryCut) {
  set_kernel_threads(1);
  for (const Shape shape : kShapes) {
    const std::int64_t elems = shape.rows * shape.cols;
    for (const bool gemm : {false, true}) {
      const std::vector<float> start = test::initial_values("param", elems);
      const reference::Mxfp8 expected = reference::quantize(start, shape.rows, shape.cols, gemm);
      for (std::int64_t cut = 128; cut < elems; cut += 128 * (1 + elems / 2048)) {
        SCOPED_TRACE(std::to_string(shape.rows) + "x" + std::to_string(shape.cols) + " cut at " +
                     std::to_string(cut));
        Param low(shape.rows, shape.cols, true, gemm), high(shape.rows, shape.cols, true, gemm);
        const auto low_kernels = low.kernels(0, cut);
        const auto high_kernels = high.kernels(cut, elems);
        low_kernels->writeback(StreamRef());
        high_kernels->writeback(StreamRef());

        const reference::Mxfp8 low_scales =
            reference::shard_scales(start, shape.rows, shape.cols, gemm, 0, cut);
        EXPECT_TRUE(bits_equal(low_scales.row_scales, low.row_scales));
        EXPECT_TRUE(bits_equal(low_scales.column_scales, low.column_scales));

        for (std::size_t i = 0; i < low.row_scales.size(); ++i) {
          low.row_scales[i] = high.row_scales[i] = std::max(low.row_scales[i], high.row_scales[i]);
        }
        for (std::size_t i = 0; i < low.column_scales.size(); ++i) {
          low.column_scales[i] = high.column_scales[i] =
              std::max(low.column_scales[i], high.column_scales[i]);
        }
        low_kernels->cast_cut_bands(true, nullptr, StreamRef());
        high_kernels->cast_cut_bands(true, nullptr, StreamRef());

        // Each shard wrote its own range and nothing else.
        for (std::int64_t i = 0; i < elems; ++i) {
          const auto at = static_cast<std::size_t>(i);
          const Param& owner = i < cut ? low : high;
          const Param& other = i < cut ? high : low;
          ASSERT_EQ(owner.row[at], expected.row_data[at]) << i;
          ASSERT_EQ(owner.column[at], expected.column_data[at]) << i;
          ASSERT_EQ(other.row[at], kUnwritten) << i;
          ASSERT_EQ(other.column[at], kUnwritten) << i;
        }
        EXPECT_TRUE(bits_equal(expected.row_scales, low.row_scales));
        EXPECT_TRUE(bits_equal(expected.column_scales, low.column_scales));
      }
    }
  }
}

TEST(StepKernelsHost, AShardInsideOneBandCastsOnlyItsPiece) {
  Param param(32, 352, true);
  const reference::Mxfp8 expected = reference::quantize(param.master, 32, 352, false);
  const auto kernels = param.kernels(1280, 1408);
  kernels->writeback(StreamRef());
  param.column_scales = expected.column_scales;  // as the MAX over all ranks gives it
  kernels->cast_cut_bands(true, nullptr, StreamRef());
  for (std::int64_t i = 0; i < 32 * 352; ++i) {
    const auto at = static_cast<std::size_t>(i);
    const bool owned = i >= 1280 && i < 1408;
    ASSERT_EQ(param.column[at], owned ? expected.column_data[at] : kUnwritten) << i;
    ASSERT_EQ(param.row[at], owned ? expected.row_data[at] : kUnwritten) << i;
  }
}

TEST(StepKernelsHost, ValuesOfEveryLengthAreTheReferenceToTheLastElement) {
  set_kernel_threads(1);
  for (const std::int64_t elems : {1, 7, 8, 15, 16, 17, 31, 32, 33, 127, 128, 129, 511, 512, 513, 1023}) {
    for (const DType values_dtype : {DType::kFp32, DType::kBf16}) {
      for (const bool decoupled : {true, false}) {
        SCOPED_TRACE(std::to_string(elems) + ' ' + std::string(dtype_name(values_dtype)));
        Param param(1, elems, false);
        std::vector<float> fp32(param.master.size() + 1, 77.0f);
        std::vector<Bf16> bf16(param.master.size() + 1, fp32_to_bf16(77.0f));
        SegmentRow segment = param.segment(0, elems);
        segment.planes = {};
        segment.values_dtype = values_dtype;
        segment.values = values_dtype == DType::kFp32 ? static_cast<void*>(fp32.data()) : bf16.data();
        const auto kernels = host::make_step_kernels({{segment}, DType::kFp32});
        reference::AdamState<float> expected(param.master);
        reference::adam_step(expected, param.grad, first_step_settings(decoupled), 1);
        const AdamScalars scalars[] = {first_step_scalars(decoupled)};
        kernels->fused_update(scalars, nullptr, StreamRef());
        EXPECT_TRUE(bits_equal(expected.p, param.master));
        EXPECT_TRUE(bits_equal(expected.m, param.exp_avg));
        EXPECT_TRUE(bits_equal(expected.v, param.exp_avg_sq));
        for (std::size_t i = 0; i < expected.p.size(); ++i) {
          const float value = values_dtype == DType::kFp32 ? fp32[i] : bf16_to_fp32(bf16[i]);
          const float wanted = values_dtype == DType::kFp32 ? expected.p[i] : reference::bf16(expected.p[i]);
          ASSERT_EQ(std::memcmp(&value, &wanted, sizeof(value)), 0) << i;
        }
        EXPECT_EQ(values_dtype == DType::kFp32 ? fp32.back() : bf16_to_fp32(bf16.back()), 77.0f);
      }
    }
  }
}

/// Bytes and state after an update, as one digest; `extra` more segments share the work.
std::uint64_t digest_with_threads(int threads) {
  set_kernel_threads(threads);
  std::vector<std::unique_ptr<Param>> params;
  StepTables tables;
  for (const Shape shape : kShapes) {
    params.push_back(std::make_unique<Param>(shape.rows, shape.cols, shape.rows % 64 == 0));
    tables.segments.push_back(params.back()->segment(0, shape.rows * shape.cols));
  }
  const auto kernels = host::make_step_kernels(tables);
  const AdamScalars scalars[] = {first_step_scalars()};
  StepStatistics statistics;
  kernels->grad_stats(statistics, StreamRef());
  kernels->fused_update(scalars, nullptr, StreamRef());
  kernels->cast_cut_bands(false, nullptr, StreamRef());
  std::uint64_t digest = test::digest_bytes(&statistics, sizeof(statistics));
  for (const auto& param : params) {
    digest = test::digest_bytes(param->master.data(), param->master.size() * 4, digest);
    digest = test::digest_bytes(param->exp_avg_sq.data(), param->exp_avg_sq.size() * 4, digest);
    digest = test::digest_bytes(param->row.data(), param->row.size(), digest);
    digest = test::digest_bytes(param->column.data(), param->column.size(), digest);
    digest = test::digest_bytes(param->column_scales.data(), param->column_scales.size(), digest);
  }
  set_kernel_threads(1);
  return digest;
}

TEST(StepKernelsHost, ResultsDoNotDependOnTheNumberOfThreads) {
  const std::uint64_t expected = digest_with_threads(1);
  for (const int threads : {2, 3, 5}) EXPECT_EQ(digest_with_threads(threads), expected) << threads;
}

TEST(StepKernelsHost, EverySegmentUsesTheScalarsOfItsGroup) {
  Param slow(32, 32, true), fast(32, 32, true);
  SegmentRow slow_segment = slow.segment(0, 1024), fast_segment = fast.segment(0, 1024);
  fast_segment.group = 1;
  const auto kernels = host::make_step_kernels({{slow_segment, fast_segment}, DType::kFp32});
  AdamScalars scalars[] = {first_step_scalars(), first_step_scalars()};
  scalars[0].lr = 0;
  const std::vector<float> start = slow.master;
  kernels->fused_update(scalars, nullptr, StreamRef());
  EXPECT_EQ(start, slow.master);  // as numbers: a zero may lose its sign
  EXPECT_NE(start, fast.master);
}

TEST(StepKernelsHost, FrozenParamsAreWrittenBackButNeverUpdated) {
  Param param(32, 64, true);
  SegmentRow segment = param.segment(0, 2048);
  segment.exp_avg = segment.exp_avg_sq = nullptr;
  segment.grad = nullptr;
  const auto kernels = host::make_step_kernels({{segment}, DType::kFp32});
  const std::vector<float> start = param.master;
  const AdamScalars scalars[] = {first_step_scalars()};
  StepStatistics statistics;
  kernels->grad_stats(statistics, StreamRef());
  kernels->fused_update(scalars, nullptr, StreamRef());
  kernels->cast_cut_bands(false, nullptr, StreamRef());
  EXPECT_TRUE(bits_equal(start, param.master));
  EXPECT_TRUE(std::ranges::all_of(param.row, [](auto byte) { return byte == kUnwritten; }));
  EXPECT_EQ(decide(statistics, 1, 0).grad_norm, 0);
  kernels->writeback(StreamRef());
  kernels->cast_cut_bands(true, nullptr, StreamRef());
  const reference::Mxfp8 expected = reference::quantize(start, 32, 64, false);
  EXPECT_TRUE(bits_equal(expected.row_data, param.row));
  EXPECT_TRUE(bits_equal(expected.column_data, param.column));
}

/// Norm of one param that holds `grad`.
StepStatistics statistics_of(Param& param) {
  const auto kernels = param.kernels(0, param.rows * param.cols);
  StepStatistics statistics;
  statistics.options_hash = 5;
  kernels->grad_stats(statistics, StreamRef());
  EXPECT_EQ(statistics.options_hash, 5);
  return statistics;
}

TEST(StepKernelsHost, NormsOfOnesAreExactSquareRoots) {
  for (const std::int64_t elems : {1, 2, 100, 127, 128, 129, 1000, 1024, 8192, 8193, 20'000}) {
    Param param(1, elems, false);
    std::ranges::fill(param.grad, -1.0f);
    StepStatistics statistics = statistics_of(param);
    EXPECT_EQ(decide(statistics, 1, 0).grad_norm, std::sqrt(static_cast<double>(elems))) << elems;
  }
}

TEST(StepKernelsHost, LargestAndSmallestGradientsNeitherOverflowNorVanish) {
  for (const float value : {1e38f, std::numeric_limits<float>::max(), 1e-45f, 1.2e-38f}) {
    Param param(1, 10'000, false);
    std::ranges::fill(param.grad, value);
    StepStatistics statistics = statistics_of(param);
    const StepDecision decision = decide(statistics, 1, 0);
    EXPECT_TRUE(decision.take);
    EXPECT_NEAR(decision.grad_norm / (static_cast<double>(value) * 100), 1, 1e-14) << value;
  }
}

TEST(StepKernelsHost, EveryNonFiniteGradientIsSeenAtEveryPlace) {
  const float bad_values[] = {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(),
                              -std::numeric_limits<float>::infinity()};
  for (const DType dtype : {DType::kFp32, DType::kBf16}) {
    for (std::int64_t at = 0; at < 1023; at += 31) {
      Param param(1, 1023, false, false, dtype);
      const float bad = bad_values[at % 3];
      param.grad[static_cast<std::size_t>(at)] = bad;
      param.grad_bf16[static_cast<std::size_t>(at)] = fp32_to_bf16(bad);
      const StepStatistics statistics = statistics_of(param);
      EXPECT_EQ(statistics.nonfinite_runs, 1) << at;
      EXPECT_EQ(param.status[0], kStatusNonFiniteGradient) << at;
    }
    Param fine(1, 1023, false, false, dtype);
    EXPECT_EQ(statistics_of(fine).nonfinite_runs, 0);
    EXPECT_EQ(fine.status[0], kStatusFine);
  }
}

TEST(StepKernelsHost, WhatLiesBehindASegmentIsNotRead) {
  Param param(1, 200, false);
  std::ranges::fill(param.grad, 1.0f);
  std::fill(param.grad.begin() + 100, param.grad.end(), std::numeric_limits<float>::quiet_NaN());
  const auto kernels = param.kernels(0, 100);
  StepStatistics statistics;
  kernels->grad_stats(statistics, StreamRef());
  EXPECT_EQ(statistics.nonfinite_runs, 0);
  EXPECT_EQ(decide(statistics, 1, 0).grad_norm, 10);
}

/// Everything that statistics can have, of segments in three places: the common norm, none, and separate
/// ones.
struct Details {
  explicit Details(int threads) {
    set_kernel_threads(threads);
    std::vector<std::unique_ptr<Param>> params;
    StepTables tables;
    const std::int64_t elems[] = {20'000, 64, 1, 9001, 128, 30'000};
    const int norms[] = {0, 2, -1, 1, 0, 2};
    for (std::size_t i = 0; i < std::size(elems); ++i) {
      params.push_back(std::make_unique<Param>(1, elems[i], false));
      if (i == 4) params[i]->grad[7] = params[i]->master[9] = std::numeric_limits<float>::infinity();
      SegmentRow row = params[i]->segment(0, elems[i]);
      row.norm = norms[i];
      row.param = static_cast<int>(i);
      tables.segments.push_back(row);
    }
    head.counts_zeros = true;
    head.norms = sums;
    head.params = of_params;
    head.nonfinite_runs_of_rank = &of_rank;
    host::make_step_kernels(tables)->grad_stats(head, StreamRef());
    set_kernel_threads(1);
    std::vector<std::vector<float>> common, second;
    for (std::size_t i = 0; i < params.size(); ++i) {
      SCOPED_TRACE("param " + std::to_string(i));
      const std::vector<float>& grad = params[i]->grad;
      if (norms[i] >= 0) zeros += std::ranges::count(grad, 0.0f);
      if (norms[i] == 2) second.push_back(grad);
      if (norms[i] == 0) common.push_back(grad);
      EXPECT_EQ(of_params[i].nonfinite_grad_runs, i == 4 ? 1 : 0);
      EXPECT_EQ(of_params[i].nonfinite_master_runs, i == 4 ? 1 : 0);
      if (i == 4) continue;
      EXPECT_DOUBLE_EQ(std::sqrt(sum_value(of_params[i].grad.square_sum)), reference::norm({{grad}}));
      EXPECT_NEAR(
          std::sqrt(sum_value(of_params[i].master.square_sum)) / reference::norm({{params[i]->master}}), 1,
          1e-14);
    }
    EXPECT_EQ(statistics.zero_grads, zeros);
    EXPECT_EQ(statistics.nonfinite_runs, 1);
    EXPECT_EQ(of_rank, 1);
    common.pop_back();  // one run of 128, which is not finite
    EXPECT_DOUBLE_EQ(std::sqrt(sum_value(statistics.square_sum)), reference::norm(common));
    EXPECT_DOUBLE_EQ(std::sqrt(sum_value(sums[0].square_sum)), reference::norm({{params[3]->grad}}));
    EXPECT_DOUBLE_EQ(std::sqrt(sum_value(sums[1].square_sum)), reference::norm(second));
  }
  std::uint64_t digest() const {
    return test::digest_bytes(
        of_params, sizeof(of_params),
        test::digest_bytes(sums, sizeof(sums), test::digest_bytes(&statistics, sizeof(statistics))));
  }

  StepStatistics statistics;
  StatisticsMemory head = statistics;
  NormSum sums[2];
  ParamSums of_params[6];
  std::int64_t of_rank = 0, zeros = 0;
};

TEST(StepKernelsHost, EverySegmentIsInItsNormAndInTheSumsOfItsParam) {
  const Details one(1);
  EXPECT_GT(one.zeros, 0);
  for (const int threads : {2, 3, 5}) EXPECT_EQ(Details(threads).digest(), one.digest()) << threads;
}

TEST(StepKernelsHost, NonFiniteMastersAreMarked) {
  // 3.4e38 is a finite fp32 that BF16 rounds to infinity.
  for (const float bad :
       {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(), 3.4e38f}) {
    for (const bool has_column : {false, true}) {
      Param param(32, 64, has_column);
      param.master[777] = bad;
      const auto kernels = param.kernels(0, 2048);
      kernels->writeback(StreamRef());
      EXPECT_EQ(param.status[0], kStatusNonFiniteMaster);
      const reference::Mxfp8 expected = reference::quantize(param.master, 32, 64, false);
      EXPECT_TRUE(bits_equal(expected.row_data, param.row));
      EXPECT_TRUE(bits_equal(expected.row_scales, param.row_scales));
      if (!has_column) continue;
      EXPECT_TRUE(bits_equal(expected.column_data, param.column));
      EXPECT_TRUE(bits_equal(expected.column_scales, param.column_scales));
    }
  }
}

}  // namespace
}  // namespace mxopt
