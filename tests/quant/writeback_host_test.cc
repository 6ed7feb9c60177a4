// What only the host backend has: threads, and its tiles.
#include "mxopt/quant/writeback_host.h"

#include <cstdint>
#include <random>
#include <vector>

#include <gtest/gtest.h>

#if defined(_OPENMP)
#include <omp.h>
#endif

#include "support/compare.h"
#include "support/reference_mxfp8.h"

#include "mxopt/params/bf16.h"

namespace mxopt {
namespace {

using test::bits_equal;

struct Outputs {
  std::vector<std::uint8_t> packed;
  std::vector<std::uint8_t> planes;
  std::vector<std::uint8_t> scales;
  std::vector<std::int64_t> nonfinite = {0};
  std::vector<float> dequantized;
};

std::vector<float> random_master(std::int64_t elems, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> master(static_cast<std::size_t>(elems));
  for (float& value : master) {
    value = random() % 1000 == 0 ? bits_to_float(0x7F800000u | static_cast<std::uint32_t>(random() % 2))
                                 : normal(random);
  }
  return master;
}

constexpr std::int64_t kWeights = 5;
constexpr std::int64_t kRows = 96;
constexpr std::int64_t kCols = 3104;  // four tiles across, the last one narrow

/// Both phases and the way back over five weights of one size, each with a shard at an odd offset.
Outputs run(const std::vector<float>& master) {
  const std::int64_t elems = kRows * kCols;
  Outputs out;
  out.planes.assign(static_cast<std::size_t>(2 * kWeights * elems), 0xEE);
  std::vector<Mxfp8Shard> batch;
  for (std::int64_t i = 0; i < kWeights; ++i) {
    Mxfp8Shard shard;
    shard.name = "w";
    std::uint8_t* planes = out.planes.data() + 2 * i * elems;
    shard.weight = {kRows, kCols, planes, planes, planes + elems, planes};  // scales are set below
    shard.start = 17 * i;
    shard.master =
        ConstTypedSpan(std::span<const float>(master)).sub(shard.start, elems - 33 * i - shard.start);
    batch.push_back(shard);
  }
  const auto scale_bytes = static_cast<std::size_t>(packed_scale_bytes(batch));
  out.packed.assign(scale_bytes, 0xFF);
  out.scales.assign(scale_bytes, 0xFF);
  std::uint8_t* scales = out.scales.data();
  for (Mxfp8Shard& shard : batch) {
    shard.weight.row_scales = scales;
    scales += row_scale_bytes(kRows, kCols);
    shard.weight.column_scales = scales;
    scales += column_scale_bytes(kRows, kCols);
  }
  const auto prepared = host::prepare(batch);
  prepared->partial_amax(out.packed.data(), StreamRef());
  prepared->partial_cast(out.packed.data(), out.nonfinite.data(), StreamRef());
  out.dequantized.assign(static_cast<std::size_t>(elems), 0.0f);
  host::dequantize(batch[0].weight, Plane::kColumn, 0, std::span<float>(out.dequantized));
  return out;
}

TEST(WritebackHost, ResultsDoNotDependOnTheNumberOfThreads) {
#if defined(_OPENMP)
  const std::vector<float> master = random_master(kRows * kCols, 1);
  const int before = omp_get_max_threads();
  omp_set_num_threads(1);
  const Outputs expected = run(master);
  EXPECT_GT(expected.nonfinite[0], 0);
  for (const int threads : {2, 3, 5}) {
    omp_set_num_threads(threads);
    const Outputs got = run(master);
    EXPECT_TRUE(bits_equal(expected.packed, got.packed)) << threads;
    EXPECT_TRUE(bits_equal(expected.planes, got.planes)) << threads;
    EXPECT_TRUE(bits_equal(expected.scales, got.scales)) << threads;
    EXPECT_TRUE(bits_equal(expected.nonfinite, got.nonfinite)) << threads;
    EXPECT_TRUE(bits_equal(expected.dequantized, got.dequantized)) << threads;
  }
  omp_set_num_threads(before);
#else
  GTEST_SKIP() << "built without OpenMP: there is one thread";
#endif
}

TEST(WritebackHost, WideMatrixEqualsTheReferenceInEveryTile) {
  const std::vector<float> master = random_master(kRows * kCols, 2);
  const reference::Mxfp8 expected = reference::quantize(master, kRows, kCols, false);
  const Outputs got = run(master);
  const auto elems = static_cast<std::size_t>(kRows * kCols);
  EXPECT_TRUE(bits_equal(expected.row_data, std::span(got.planes).first(elems)));
  EXPECT_TRUE(bits_equal(expected.column_data, std::span(got.planes).subspan(elems, elems)));
  const auto row_bytes = static_cast<std::size_t>(row_scale_bytes(kRows, kCols));
  EXPECT_TRUE(bits_equal(expected.row_scales, std::span(got.scales).first(row_bytes)));
  EXPECT_TRUE(bits_equal(expected.column_scales,
                         std::span(got.scales).subspan(row_bytes, expected.column_scales.size())));
}

TEST(WritebackHost, ThousandsOfSmallWeightsAreOneBatch) {
  constexpr std::int64_t kCount = 3000;
  const std::vector<float> master = random_master(32 * 32, 3);
  const reference::Mxfp8 expected = reference::quantize(master, 32, 32, false);
  std::vector<std::uint8_t> planes(kCount * 1024);
  std::vector<std::uint8_t> scales(kCount * 512, 0xFF);
  std::vector<Mxfp8Shard> batch;
  for (std::int64_t i = 0; i < kCount; ++i) {
    Mxfp8Shard shard;
    shard.name = "w";
    shard.weight = {32, 32, planes.data() + 1024 * i, scales.data() + 512 * i, nullptr, nullptr};
    // Every third shard is empty.
    if (i % 3 != 0) shard.master = std::span<const float>(master);
    batch.push_back(shard);
  }
  std::vector<std::uint8_t> packed(kCount * 512, 0xFF);
  const auto prepared = host::prepare(batch);
  prepared->partial_amax(packed.data(), StreamRef());
  prepared->partial_cast(packed.data(), nullptr, StreamRef());
  const std::vector<std::uint8_t> zeros(1024, 0);
  for (std::size_t i = 0; i < kCount; ++i) {
    const bool empty = i % 3 == 0;
    ASSERT_TRUE(bits_equal(empty ? zeros : expected.row_data, std::span(planes).subspan(1024 * i, 1024)))
        << i;
    ASSERT_TRUE(bits_equal(empty ? std::vector<std::uint8_t>(512, 0) : expected.row_scales,
                           std::span(scales).subspan(512 * i, 512)))
        << i;
  }
}

}  // namespace
}  // namespace mxopt
