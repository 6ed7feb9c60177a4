#include "mxopt/quant/writeback.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include <gtest/gtest.h>

#include "support/compare.h"
#include "support/devices.h"
#include "support/guarded_bytes.h"
#include "support/reference_mxfp8.h"
#include "support/thrown_message.h"

#include "mxopt/params/bf16.h"

namespace mxopt {
namespace {

using test::bits_equal;
using test::contains;
using test::GuardedBytes;
using test::thrown_message;

constexpr std::uint8_t kDataPreset = 0xEE;
constexpr std::uint8_t kScalePreset = 0xFF;

template <class T>
std::span<const std::uint8_t> bytes_of(const std::vector<T>& values) {
  return {reinterpret_cast<const std::uint8_t*>(values.data()), values.size() * sizeof(T)};
}

std::uint32_t crc32(std::span<const std::uint8_t> bytes) {
  std::uint32_t crc = 0xFFFFFFFFu;
  for (const std::uint8_t byte : bytes) {
    crc ^= byte;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1u) != 0 ? 0xEDB88320u : 0u);
  }
  return ~crc;
}

/// A weight as the test declares it, the same on all ranks, with what the oracle expects of it.
struct Weight {
  std::string name;
  std::int64_t rows = 0;
  std::int64_t cols = 0;
  Storage storage = Storage::kBoth;
  ScaleLayout layout = ScaleLayout::kCompact;
  DType master_dtype = DType::kFp32;
  std::vector<float> master;  // values of the whole matrix; BF16 values when master_dtype is bf16
  reference::Mxfp8 expected;

  bool gemm() const { return layout == ScaleLayout::kGemm; }
  std::int64_t elems() const { return rows * cols; }
  bool has_row() const { return storage != Storage::kColumn && elems() > 0; }
  bool has_column() const { return storage != Storage::kRow && elems() > 0; }
  void compute_expected() {
    if (master_dtype == DType::kBf16) {
      for (float& value : master) value = reference::bf16(value);
    }
    expected = reference::quantize(master, rows, cols, gemm());
  }
};

struct Range {
  std::int64_t begin = 0;
  std::int64_t end = 0;
};

/// One rank's copy of a weight, and its shard.
struct RankWeight {
  GuardedBytes row_data;
  GuardedBytes row_scales;
  GuardedBytes column_data;
  GuardedBytes column_scales;
  GuardedBytes master;
  std::optional<GuardedBytes> row_fragment;
  std::optional<GuardedBytes> column_fragment;
  Range owned;
  Mxfp8Shard shard;

  RankWeight(const Weight& weight, Range range, bool fragments, Device device)
      : row_data(device, weight.has_row() ? weight.elems() : 0, kDataPreset),
        row_scales(device, weight.has_row() ? row_scale_bytes(weight.rows, weight.cols) : 0, kScalePreset),
        column_data(device, weight.has_column() ? weight.elems() : 0, kDataPreset),
        column_scales(device, weight.has_column() ? column_scale_bytes(weight.rows, weight.cols) : 0,
                      kScalePreset),
        master(device, master_bytes(weight, range)),
        owned(range) {
    shard.name = weight.name;
    shard.weight = {weight.rows, weight.cols, nullptr, nullptr, nullptr, nullptr, weight.layout};
    if (weight.storage != Storage::kColumn) {
      shard.weight.row_data = row_data.data();
      shard.weight.row_scales = row_scales.data();
    }
    if (weight.storage != Storage::kRow) {
      shard.weight.column_data = column_data.data();
      shard.weight.column_scales = column_scales.data();
    }
    shard.master = {master.data(), weight.master_dtype, range.end - range.begin};
    shard.start = range.begin;
    if (fragments && weight.has_row()) {
      row_fragment.emplace(device, range.end - range.begin, kDataPreset);
      shard.row_fragment = row_fragment->data();
    }
    if (fragments && weight.has_column()) {
      column_fragment.emplace(device, range.end - range.begin, kDataPreset);
      shard.column_fragment = column_fragment->data();
    }
  }

  static std::vector<std::uint8_t> master_bytes(const Weight& weight, Range range) {
    std::vector<std::uint8_t> bytes;
    for (std::int64_t i = range.begin; i < range.end; ++i) {
      const std::uint32_t bits = float_to_bits(weight.master[static_cast<std::size_t>(i)]);
      if (weight.master_dtype == DType::kFp32)
        bytes.insert(bytes.end(), {std::uint8_t(bits), std::uint8_t(bits >> 8)});
      bytes.insert(bytes.end(), {std::uint8_t(bits >> 16), std::uint8_t(bits >> 24)});
    }
    return bytes;
  }
};

std::vector<Mxfp8Shard> shards_of(const std::vector<std::unique_ptr<RankWeight>>& weights) {
  std::vector<Mxfp8Shard> batch;
  for (const auto& weight : weights) batch.push_back(weight->shard);
  return batch;
}

/// Packed scales as the oracle sees them; `range` gives the part of each weight that counts.
template <class RangeOf>
std::vector<std::uint8_t> expected_packed(const std::vector<Weight>& weights, const RangeOf& range_of) {
  std::vector<std::uint8_t> packed;
  for (std::size_t i = 0; i < weights.size(); ++i) {
    const Weight& weight = weights[i];
    const Range range = range_of(i);
    const reference::Mxfp8 scales = reference::shard_scales(weight.master, weight.rows, weight.cols,
                                                            weight.gemm(), range.begin, range.end);
    if (weight.has_row()) packed.insert(packed.end(), scales.row_scales.begin(), scales.row_scales.end());
    if (weight.has_column())
      packed.insert(packed.end(), scales.column_scales.begin(), scales.column_scales.end());
  }
  return packed;
}

/// What a plane must hold after a cast of `range`: expected bytes there, the preset elsewhere.
std::vector<std::uint8_t> expected_plane(const std::vector<std::uint8_t>& whole, Range range) {
  std::vector<std::uint8_t> plane(whole.size(), kDataPreset);
  std::copy(whole.begin() + range.begin, whole.begin() + range.end, plane.begin() + range.begin);
  return plane;
}

std::vector<std::uint8_t> part(const std::vector<std::uint8_t>& whole, Range range) {
  return {whole.begin() + range.begin, whole.begin() + range.end};
}

void check_plane(const std::vector<std::uint8_t>& expected, Range owned, const GuardedBytes& plane,
                 const std::optional<GuardedBytes>& fragment) {
  if (fragment) {
    EXPECT_TRUE(bits_equal(part(expected, owned), fragment->read()));
    EXPECT_TRUE(bits_equal(std::vector<std::uint8_t>(expected.size(), kDataPreset), plane.read()));
  } else {
    EXPECT_TRUE(bits_equal(expected_plane(expected, owned), plane.read()));
  }
}

/// Runs both phases on `ranges[rank][weight]` and compares everything that may and may not have changed.
void run_and_check(const std::vector<Weight>& weights, const std::vector<std::vector<Range>>& ranges,
                   const std::vector<bool>& fragments, Device device) {
  std::vector<std::vector<std::unique_ptr<RankWeight>>> ranks;
  std::vector<std::uint8_t> reduced = expected_packed(weights, [](std::size_t) { return Range{}; });
  for (const std::vector<Range>& rank_ranges : ranges) {
    std::vector<std::unique_ptr<RankWeight>> rank;
    for (std::size_t i = 0; i < weights.size(); ++i) {
      rank.push_back(std::make_unique<RankWeight>(weights[i], rank_ranges[i], fragments[i], device));
    }
    const std::vector<Mxfp8Shard> batch = shards_of(rank);
    const GuardedBytes packed(device, packed_scale_bytes(batch), kScalePreset);
    partial_amax(batch, packed.span(), device, StreamRef());
    const std::vector<std::uint8_t> got = packed.read();
    ASSERT_TRUE(bits_equal(expected_packed(weights, [&](std::size_t i) { return rank_ranges[i]; }), got));
    for (std::size_t i = 0; i < got.size(); ++i) reduced[i] = std::max(reduced[i], got[i]);
    ranks.push_back(std::move(rank));
  }
  for (const auto& rank : ranks) {
    const std::vector<Mxfp8Shard> batch = shards_of(rank);
    const GuardedBytes packed(device, reduced);
    const GuardedBytes counter(device, bytes_of(std::vector<std::int64_t>{1000}));
    partial_cast(batch, packed.span(), {reinterpret_cast<std::int64_t*>(counter.data()), 1}, device,
                 StreamRef());
    EXPECT_TRUE(bits_equal(reduced, packed.read()));
    std::int64_t nonfinite = 1000;
    for (std::size_t i = 0; i < weights.size(); ++i) {
      SCOPED_TRACE("weight " + weights[i].name);
      const Weight& weight = weights[i];
      const RankWeight& got = *rank[i];
      if (weight.has_row()) {
        check_plane(weight.expected.row_data, got.owned, got.row_data, got.row_fragment);
        EXPECT_TRUE(bits_equal(weight.expected.row_scales, got.row_scales.read()));
      }
      if (weight.has_column()) {
        check_plane(weight.expected.column_data, got.owned, got.column_data, got.column_fragment);
        EXPECT_TRUE(bits_equal(weight.expected.column_scales, got.column_scales.read()));
      }
      nonfinite +=
          reference::count_nonfinite(std::span(weight.master)
                                         .subspan(static_cast<std::size_t>(got.owned.begin),
                                                  static_cast<std::size_t>(got.owned.end - got.owned.begin)));
    }
    EXPECT_TRUE(bits_equal(bytes_of(std::vector<std::int64_t>{nonfinite}), counter.read()));
  }
}

class Random {
 public:
  explicit Random(std::uint64_t seed) : engine_(seed) {}
  /// Uniform in [low, high].
  std::int64_t integer(std::int64_t low, std::int64_t high) {
    return std::uniform_int_distribution<std::int64_t>(low, high)(engine_);
  }
  bool chance(double probability) { return std::bernoulli_distribution(probability)(engine_); }
  float normal() { return std::normal_distribution<float>()(engine_); }
  std::uint32_t bits() { return static_cast<std::uint32_t>(engine_()); }

 private:
  std::mt19937_64 engine_;
};

/// Values of one kind per matrix: plain, of all magnitudes, with NaN and infinity, tiny, or any bits at all.
std::vector<float> random_master(Random& random, std::int64_t elems) {
  std::vector<float> master(static_cast<std::size_t>(elems));
  const std::int64_t kind = random.integer(0, 4);
  for (float& value : master) {
    value = random.normal();
    if (kind == 1) value = std::ldexp(value, static_cast<int>(random.integer(-140, 126)));
    if (kind == 2 && random.chance(0.002)) {
      constexpr std::array<std::uint32_t, 5> kSpecial = {0x7F800000u, 0xFF800000u, 0x7FC00000u, 0xFF800001u,
                                                         0x7F7FFFFFu};
      value = bits_to_float(kSpecial[static_cast<std::size_t>(random.integer(0, 4))]);
    }
    if (kind == 3) value = random.chance(0.9) ? std::copysign(0.0f, value) : std::ldexp(value, -130);
    if (kind == 4) value = bits_to_float(random.bits());
  }
  return master;
}

std::vector<Weight> random_weights(Random& random, std::int64_t max_elems) {
  std::vector<Weight> weights;
  std::int64_t elems = 0;
  const std::int64_t count = random.integer(1, 6);
  for (std::int64_t i = 0; i < count; ++i) {
    Weight weight;
    weight.name = "w" + std::to_string(i);
    weight.rows = 32 * random.integer(random.chance(0.1) ? 0 : 1, random.chance(0.2) ? 12 : 4);
    weight.cols = 32 * random.integer(1, random.chance(0.2) ? 70 : 6);
    elems += weight.elems();
    if (elems > max_elems) break;
    weight.storage = std::array{Storage::kRow, Storage::kBoth,
                                Storage::kColumn}[static_cast<std::size_t>(random.integer(0, 2))];
    weight.layout = random.chance(0.5) ? ScaleLayout::kCompact : ScaleLayout::kGemm;
    weight.master_dtype = random.chance(0.5) ? DType::kFp32 : DType::kBf16;
    weight.master = random_master(random, weight.elems());
    weight.compute_expected();
    weights.push_back(std::move(weight));
  }
  return weights;
}

/// Cuts [0, elems) into one range per rank, at any element; ranges may be empty, and some ranks own more than
/// their cut.
std::vector<Range> random_ranges(Random& random, std::int64_t elems, int world_size) {
  std::vector<std::int64_t> cuts{0, elems};
  for (int r = 1; r < world_size; ++r) cuts.push_back(random.integer(0, elems));
  if (random.chance(0.2)) cuts[cuts.size() - 1] = cuts[cuts.size() / 2];
  std::sort(cuts.begin(), cuts.end());
  cuts.front() = 0;
  cuts.back() = elems;
  std::vector<Range> ranges;
  for (int r = 0; r < world_size; ++r) {
    Range range{cuts[static_cast<std::size_t>(r)], cuts[static_cast<std::size_t>(r) + 1]};
    if (random.chance(0.1)) range = {0, elems};
    if (random.chance(0.1)) range.begin = random.integer(0, range.begin);
    ranges.push_back(range);
  }
  return ranges;
}

/// Every device kind that this build has; skipped where the device is not there.
class Writeback : public ::testing::TestWithParam<DeviceKind> {
 protected:
  void SetUp() override { MXOPT_SKIP_WITHOUT(device()); }
  Device device() const { return {GetParam(), 0}; }
};
INSTANTIATE_TEST_SUITE_P(Devices, Writeback, ::testing::ValuesIn(test::built_device_kinds()),
                         [](const auto& kind) { return test::device_kind_name(kind.param); });

Weight make_weight(std::string name, std::int64_t rows, std::int64_t cols, std::vector<float> master,
                   Storage storage = Storage::kBoth) {
  Weight weight;
  weight.name = std::move(name);
  weight.rows = rows;
  weight.cols = cols;
  weight.storage = storage;
  weight.master = std::move(master);
  weight.compute_expected();
  return weight;
}

/// The contract's example: 64 x 64, w[r][c] = (r + 1) * 2^((c mod 8) - 4).
std::vector<float> p1_master() {
  std::vector<float> master;
  for (int r = 0; r < 64; ++r) {
    for (int c = 0; c < 64; ++c) master.push_back(std::ldexp(static_cast<float>(r + 1), c % 8 - 4));
  }
  return master;
}

TEST_P(Writeback, RandomBatchesEqualTheReferenceForEveryWorldSize) {
  for (const int world_size : {1, 2, 3, 4, 7}) {
    for (std::uint64_t trial = 0; trial < 24; ++trial) {
      const std::uint64_t seed = 1000 * static_cast<std::uint64_t>(world_size) + trial;
      SCOPED_TRACE("seed " + std::to_string(seed));
      Random random(seed);
      const std::vector<Weight> weights = random_weights(random, 60'000);
      std::vector<std::vector<Range>> ranges(static_cast<std::size_t>(world_size));
      std::vector<bool> fragments;
      for (const Weight& weight : weights) {
        const std::vector<Range> per_rank = random_ranges(random, weight.elems(), world_size);
        for (std::size_t r = 0; r < ranges.size(); ++r) ranges[r].push_back(per_rank[r]);
        fragments.push_back(random.chance(0.25));
      }
      run_and_check(weights, ranges, fragments, device());
      if (HasFailure()) return;
    }
  }
}

TEST_P(Writeback, EveryCutOfASmallMatrixEqualsTheReference) {
  Random random(7);
  const std::vector<Weight> weights{make_weight("w", 64, 32, random_master(random, 64 * 32))};
  for (std::int64_t cut = 0; cut <= weights[0].elems(); cut += 13) {
    SCOPED_TRACE("cut " + std::to_string(cut));
    run_and_check(weights, {{{0, cut}}, {{cut, weights[0].elems()}}}, {false}, device());
    if (HasFailure()) return;
  }
}

TEST_P(Writeback, ShortShardsOfAWideMatrixEqualTheReference) {
  Random random(8);
  const std::int64_t cols = 2336;  // three tiles, the last one narrow
  const std::vector<Weight> weights{make_weight("wide", 64, cols, random_master(random, 64 * cols))};
  const std::int64_t elems = weights[0].elems();
  for (const auto& [begin, end] : std::vector<std::array<std::int64_t, 2>>{{1023, 1025},
                                                                           {2330, 2340},
                                                                           {5, 6},
                                                                           {31 * cols + 17, 32 * cols + 17},
                                                                           {cols - 1, 3 * cols + 1},
                                                                           {elems - 1, elems},
                                                                           {1024, 2048}}) {
    SCOPED_TRACE("range " + std::to_string(begin) + " to " + std::to_string(end));
    run_and_check(weights, {{{begin, end}}, {{0, elems}}}, {false}, device());
  }
}

TEST_P(Writeback, MatrixP1HasThePublishedChecksums) {
  const std::vector<Weight> weights{make_weight("p1", 64, 64, p1_master())};
  RankWeight rank(weights[0], {0, 64 * 64}, false, device());
  const std::vector<Mxfp8Shard> batch{rank.shard};
  const GuardedBytes packed(device(), packed_scale_bytes(batch), kScalePreset);
  partial_amax(batch, packed.span(), device(), StreamRef());
  partial_cast(batch, packed.span(), {}, device(), StreamRef());

  std::vector<std::uint8_t> row_scales;
  const std::vector<std::uint8_t> padded_row_scales = rank.row_scales.read();
  for (std::int64_t r = 0; r < 64; ++r) {
    for (std::int64_t b = 0; b < 2; ++b)
      row_scales.push_back(padded_row_scales[static_cast<std::size_t>(r * 4 + b)]);
  }
  std::vector<std::uint8_t> column_scales;
  const std::vector<std::uint8_t> padded_column_scales = rank.column_scales.read();
  for (std::int64_t band = 0; band < 2; ++band) {
    for (std::int64_t c = 0; c < 64; ++c) {
      column_scales.push_back(padded_column_scales[static_cast<std::size_t>(band * 128 + c)]);
    }
  }
  EXPECT_EQ(crc32(rank.row_data.read()), 0xB55C3F77u);
  EXPECT_EQ(crc32(row_scales), 0xFC9CA3F6u);
  EXPECT_EQ(crc32(rank.column_data.read()), 0x2385C26Au);
  EXPECT_EQ(crc32(column_scales), 0x278218C5u);
}

TEST_P(Writeback, StorageDecidesWhichPlanesAreWritten) {
  for (const Storage storage : {Storage::kRow, Storage::kColumn, Storage::kBoth}) {
    SCOPED_TRACE(storage_name(storage));
    const std::vector<Weight> weights{make_weight("p1", 64, 64, p1_master(), storage)};
    const RankWeight probe(weights[0], {0, 64 * 64}, false, device());
    EXPECT_EQ(packed_scale_bytes(std::span(&probe.shard, 1)), storage == Storage::kBoth ? 1024 : 512);
    run_and_check(weights, {{{0, 64 * 64}}}, {false}, device());
  }
}

TEST_P(Writeback, KnownBlocks) {
  struct Case {
    float value;
    std::uint8_t scale;
    std::uint8_t data;
  };
  for (const Case& known :
       {Case{1.0f, 119, 0x78}, Case{1024.0f, 129, 0x78}, Case{448.0f, 127, 0x7E}, Case{450.0f, 128, 0x76},
        Case{0.0f, 0, 0x00}, Case{-0.0f, 0, 0x80}, Case{std::numeric_limits<float>::infinity(), 0xFE, 0x7E},
        Case{std::numeric_limits<float>::quiet_NaN(), 0xFF, 0x7F}}) {
    SCOPED_TRACE(known.value);
    RankWeight rank(make_weight("w", 32, 32, std::vector<float>(1024, known.value)), {0, 1024}, false,
                    device());
    const GuardedBytes packed(device(), 1024, kScalePreset);
    partial_amax(std::span(&rank.shard, 1), packed.span(), device(), StreamRef());
    partial_cast(std::span(&rank.shard, 1), packed.span(), {}, device(), StreamRef());
    EXPECT_EQ(rank.row_scales.read()[0], known.scale);
    EXPECT_EQ(rank.column_scales.read()[0], known.scale);
    EXPECT_TRUE(bits_equal(std::vector<std::uint8_t>(1024, known.data), rank.row_data.read()));
    EXPECT_TRUE(bits_equal(std::vector<std::uint8_t>(1024, known.data), rank.column_data.read()));
  }
}

TEST_P(Writeback, TopValuesOfABlockAreNotSaturated) {
  std::vector<float> master(32 * 32, 1.0f);
  master[0] = 959.5632f;
  master[1] = 957.0f;
  RankWeight rank(make_weight("w", 32, 32, master, Storage::kRow), {0, 1024}, false, device());
  const GuardedBytes packed(device(), 512, kScalePreset);
  partial_amax(std::span(&rank.shard, 1), packed.span(), device(), StreamRef());
  partial_cast(std::span(&rank.shard, 1), packed.span(), {}, device(), StreamRef());
  EXPECT_EQ(rank.row_scales.read()[0], 129);
  const GuardedBytes values(device(), 2 * 4, 0);
  dequantize(rank.shard.weight, Plane::kRow, 0, {values.data(), DType::kFp32, 2}, device(), StreamRef());
  EXPECT_TRUE(bits_equal(bytes_of(std::vector<float>{960.0f, 960.0f}), values.read()));
}

TEST_P(Writeback, ScalePaddingIsZeroWhateverItWasBefore) {
  // 32 x 96: three active row scales in a 128 x 4 array, preset to 0xFF by the rank.
  Random random(9);
  const std::vector<Weight> weights{make_weight("w", 32, 96, random_master(random, 32 * 96))};
  const std::int64_t elems = weights[0].elems();
  for (const std::int64_t world_size : {1, 2, 3}) {
    std::vector<std::vector<Range>> ranges;
    for (std::int64_t r = 0; r < world_size; ++r) {
      ranges.push_back({{r * elems / world_size, (r + 1) * elems / world_size}});
    }
    run_and_check(weights, ranges, {false}, device());
  }
  std::int64_t padding = 0;
  for (std::size_t i = 0; i < 512; ++i) {
    if (i / 4 < 32 && i % 4 < 3) continue;
    ASSERT_EQ(weights[0].expected.row_scales[i], 0);
    ++padding;
  }
  EXPECT_EQ(padding, 512 - 96);
}

TEST_P(Writeback, BlocksWithNanOrInfinityAreVisibleOnEveryRank) {
  std::vector<float> master(64 * 64, 1.0f);
  master[5] = std::numeric_limits<float>::quiet_NaN();
  master[64 * 40 + 50] = -std::numeric_limits<float>::infinity();
  master[64 * 63 + 63] = std::numeric_limits<float>::max();  // infinite after the rounding to BF16
  const std::vector<Weight> weights{make_weight("w", 64, 64, master)};
  EXPECT_EQ(reference::count_nonfinite(master), 3);
  EXPECT_EQ(weights[0].expected.row_scales[0], 0xFF);
  EXPECT_EQ(weights[0].expected.row_scales[40 * 4 + 1], 0xFE);
  run_and_check(weights, {{{0, 3}}, {{3, 7}}, {{7, 64 * 64}}}, {false}, device());
}

TEST_P(Writeback, PackedScalesMayBeTheScaleArenaItself) {
  Random random(10);
  Weight weight = make_weight("w", 64, 160, random_master(random, 64 * 160));
  RankWeight rank(weight, {0, weight.elems()}, false, device());
  const std::int64_t row_bytes = row_scale_bytes(64, 160);
  const GuardedBytes arena(device(), packed_scale_bytes(std::span(&rank.shard, 1)), kScalePreset);
  rank.shard.weight.row_scales = arena.data();
  rank.shard.weight.column_scales = arena.data() + row_bytes;
  partial_amax(std::span(&rank.shard, 1), arena.span(), device(), StreamRef());
  partial_cast(std::span(&rank.shard, 1), arena.span(), {}, device(), StreamRef());
  std::vector<std::uint8_t> expected = weight.expected.row_scales;
  expected.insert(expected.end(), weight.expected.column_scales.begin(), weight.expected.column_scales.end());
  EXPECT_TRUE(bits_equal(expected, arena.read()));
  EXPECT_TRUE(bits_equal(weight.expected.row_data, rank.row_data.read()));
  EXPECT_TRUE(bits_equal(weight.expected.column_data, rank.column_data.read()));
}

TEST_P(Writeback, GemmScalesAreAPermutationOfCompactScales) {
  Random random(11);
  Weight compact = make_weight("w", 160, 288, random_master(random, 160 * 288));
  Weight gemm = compact;
  gemm.layout = ScaleLayout::kGemm;
  gemm.compute_expected();
  RankWeight compact_rank(compact, {0, compact.elems()}, false, device());
  RankWeight gemm_rank(gemm, {0, gemm.elems()}, false, device());
  for (RankWeight* rank : {&compact_rank, &gemm_rank}) {
    const GuardedBytes packed(device(), packed_scale_bytes(std::span(&rank->shard, 1)), kScalePreset);
    partial_amax(std::span(&rank->shard, 1), packed.span(), device(), StreamRef());
    partial_cast(std::span(&rank->shard, 1), packed.span(), {}, device(), StreamRef());
  }
  EXPECT_TRUE(bits_equal(compact_rank.row_data.read(), gemm_rank.row_data.read()));
  EXPECT_TRUE(bits_equal(compact_rank.column_data.read(), gemm_rank.column_data.read()));
  const std::vector<std::uint8_t> rows = compact_rank.row_scales.read();
  const std::vector<std::uint8_t> gemm_rows = gemm_rank.row_scales.read();
  for (std::int64_t r = 0; r < 160; ++r) {
    for (std::int64_t b = 0; b < 288 / 32; ++b) {
      ASSERT_EQ(rows[static_cast<std::size_t>(row_scale_offset(r, b, 288, ScaleLayout::kCompact))],
                gemm_rows[static_cast<std::size_t>(row_scale_offset(r, b, 288, ScaleLayout::kGemm))]);
    }
  }
  const std::vector<std::uint8_t> columns = compact_rank.column_scales.read();
  const std::vector<std::uint8_t> gemm_columns = gemm_rank.column_scales.read();
  for (std::int64_t band = 0; band < 160 / 32; ++band) {
    for (std::int64_t c = 0; c < 288; ++c) {
      ASSERT_EQ(
          columns[static_cast<std::size_t>(column_scale_offset(band, c, 160, 288, ScaleLayout::kCompact))],
          gemm_columns[static_cast<std::size_t>(column_scale_offset(band, c, 160, 288, ScaleLayout::kGemm))]);
    }
  }
}

TEST_P(Writeback, APreparedBatchServesAnyNumberOfCalls) {
  Random random(12);
  std::vector<Weight> weights{make_weight("w0", 64, 96, random_master(random, 64 * 96)),
                              make_weight("w1", 32, 320, random_master(random, 32 * 320), Storage::kRow)};
  std::vector<std::unique_ptr<RankWeight>> rank;
  for (const Weight& weight : weights) {
    rank.push_back(std::make_unique<RankWeight>(weight, Range{0, weight.elems()}, false, device()));
  }
  std::vector<Mxfp8Shard> shards = shards_of(rank);
  const std::int64_t bytes = packed_scale_bytes(shards);
  Mxfp8Batch first(shards, device());
  Mxfp8Batch batch = std::move(first);
  EXPECT_EQ(batch.packed_scale_bytes(), bytes);
  // Neither the list nor the names are needed any more.
  shards.clear();
  const Stream stream(device());
  const GuardedBytes packed(device(), bytes, kScalePreset);
  const GuardedBytes counter(device(), bytes_of(std::vector<std::int64_t>{0}));
  for (int call = 0; call < 3; ++call) {
    batch.partial_amax(packed.span(), stream.ref());
    batch.partial_cast(packed.span(), {reinterpret_cast<std::int64_t*>(counter.data()), 1}, stream.ref());
  }
  synchronize(device(), stream.ref());
  std::int64_t nonfinite = 0;
  for (std::size_t i = 0; i < weights.size(); ++i) {
    nonfinite += 3 * reference::count_nonfinite(weights[i].master);
    EXPECT_TRUE(bits_equal(weights[i].expected.row_data, rank[i]->row_data.read()));
    EXPECT_TRUE(bits_equal(weights[i].expected.row_scales, rank[i]->row_scales.read()));
  }
  EXPECT_TRUE(bits_equal(weights[0].expected.column_data, rank[0]->column_data.read()));
  EXPECT_TRUE(bits_equal(weights[0].expected.column_scales, rank[0]->column_scales.read()));
  EXPECT_TRUE(bits_equal(bytes_of(std::vector<std::int64_t>{nonfinite}), counter.read()));
}

TEST(Mxfp8Batch, HasNoWeightsByDefault) {
  const Mxfp8Batch batch;
  EXPECT_EQ(batch.packed_scale_bytes(), 0);
  batch.partial_amax({}, StreamRef());
  batch.partial_cast({}, {}, StreamRef());
}

TEST_P(Writeback, EmptyBatchesShardsAndMatricesAreOrdinary) {
  partial_amax({}, {}, device(), StreamRef());
  partial_cast({}, {}, {}, device(), StreamRef());
  // An empty view with pointers has no planes, and two of them are not the same plane.
  const GuardedBytes byte(device(), 1, kDataPreset);
  Mxfp8Shard shard;
  shard.name = "empty";
  shard.weight = {0, 33, byte.data(), nullptr, byte.data(), nullptr};
  const std::vector<Mxfp8Shard> batch{shard, shard};
  EXPECT_EQ(packed_scale_bytes(batch), 0);
  partial_amax(batch, {}, device(), StreamRef());
  partial_cast(batch, {}, {}, device(), StreamRef());
  dequantize(shard.weight, Plane::kRow, 0, {nullptr, DType::kFp32, 0}, device(), StreamRef());
  EXPECT_EQ(byte.read()[0], kDataPreset);
}

TEST_P(Writeback, ScalesOfAnAbsentPlaneAreIgnored) {
  const std::vector<float> master(32 * 32, 1.0f);
  RankWeight rank(make_weight("w", 32, 32, master, Storage::kRow), {0, 1024}, false, device());
  const GuardedBytes stray(device(), 512, kScalePreset);
  rank.shard.weight.column_scales = stray.data();
  const GuardedBytes packed(device(), 512, kScalePreset);
  partial_amax(std::span(&rank.shard, 1), packed.span(), device(), StreamRef());
  partial_cast(std::span(&rank.shard, 1), packed.span(), {}, device(), StreamRef());
  EXPECT_TRUE(bits_equal(std::vector<std::uint8_t>(512, kScalePreset), stray.read()));
}

TEST_P(Writeback, DequantizeGivesTheReferenceValues) {
  for (std::uint64_t seed = 0; seed < 30; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Random random(seed);
    std::vector<Weight> weights = random_weights(random, 30'000);
    if (weights.empty() || weights[0].elems() == 0) continue;
    Weight& weight = weights[0];
    weight.storage = Storage::kBoth;
    const GuardedBytes row_data(device(), weight.expected.row_data);
    const GuardedBytes row_scales(device(), weight.expected.row_scales);
    const GuardedBytes column_data(device(), weight.expected.column_data);
    const GuardedBytes column_scales(device(), weight.expected.column_scales);
    const MxView view{weight.rows,        weight.cols,          row_data.data(), row_scales.data(),
                      column_data.data(), column_scales.data(), weight.layout};
    const std::int64_t begin = random.integer(0, weight.elems());
    const std::int64_t count = random.integer(0, weight.elems() - begin);
    for (const Plane plane : {Plane::kRow, Plane::kColumn}) {
      std::vector<float> expected;
      std::vector<Bf16> expected_bf16;
      for (std::int64_t i = begin; i < begin + count; ++i) {
        const auto value = static_cast<float>(reference::dequantize(
            weight.expected, plane == Plane::kRow, weight.gemm(), i / weight.cols, i % weight.cols));
        expected.push_back(std::isnan(value) ? bits_to_float(0x7FC00000u) : value);
        const std::uint32_t bits = std::isnan(value) ? 0x7FC00000u : float_to_bits(reference::bf16(value));
        expected_bf16.push_back(Bf16{static_cast<std::uint16_t>(bits >> 16)});
      }
      const GuardedBytes fp32(device(), count * 4, kDataPreset);
      dequantize(view, plane, begin, {fp32.data(), DType::kFp32, count}, device(), StreamRef());
      EXPECT_TRUE(bits_equal(bytes_of(expected), fp32.read()));
      const GuardedBytes bf16(device(), count * 2, kDataPreset);
      dequantize(view, plane, begin, {bf16.data(), DType::kBf16, count}, device(), StreamRef());
      EXPECT_TRUE(bits_equal(bytes_of(expected_bf16), bf16.read()));
    }
  }
}

TEST_P(Writeback, CodeZeroDequantizesToASubnormal) {
  const GuardedBytes data(device(), 1024, 0x38);
  const GuardedBytes scales(device(), 512, 0);
  const MxView view{32, 32, data.data(), scales.data(), nullptr, nullptr};
  const GuardedBytes values(device(), 1024 * 4, 0);
  dequantize(view, Plane::kRow, 0, {values.data(), DType::kFp32, 1024}, device(), StreamRef());
  EXPECT_TRUE(bits_equal(bytes_of(std::vector<float>(1024, std::ldexp(1.0f, -127))), values.read()));
}

/// A valid batch of one weight that each test of a message breaks in one place.
class WritebackErrors : public ::testing::Test {
 protected:
  std::string amax_error() {
    const std::string amax = thrown_message<ContractError>(
        [&] { partial_amax(batch_, std::span(packed_).first(packed_bytes_), Device(), StreamRef()); });
    const std::string cast = thrown_message<ContractError>(
        [&] { partial_cast(batch_, std::span(packed_).first(packed_bytes_), {}, Device(), StreamRef()); });
    EXPECT_EQ(amax, cast);
    // Nothing is written before all checks have passed.
    EXPECT_TRUE(bits_equal(std::vector<std::uint8_t>(packed_.size(), kScalePreset), packed_));
    EXPECT_TRUE(bits_equal(std::vector<std::uint8_t>(bytes_.size(), kDataPreset), bytes_));
    return amax;
  }
  std::uint8_t* plane(std::size_t index) { return bytes_.data() + 8192 * index; }

  std::vector<std::uint8_t> packed_ = std::vector<std::uint8_t>(4096, kScalePreset);
  std::size_t packed_bytes_ = 1024;
  std::vector<std::uint8_t> bytes_ = std::vector<std::uint8_t>(8 * 8192, kDataPreset);
  std::vector<float> master_ = std::vector<float>(64 * 64, 1.0f);
  MxView view_{64, 64, plane(0), plane(1), plane(2), plane(3)};
  std::vector<Mxfp8Shard> batch_{{"qkv", view_, std::span<const float>(master_), 0, nullptr, nullptr}};
};

TEST_F(WritebackErrors, ShapeThatDoesNotFitBlocks) {
  for (const auto& [rows, cols, text] :
       std::vector<std::tuple<std::int64_t, std::int64_t, std::string>>{{48, 64, "48 x 64"},
                                                                        {33, 32, "33 x 32"},
                                                                        {64, 40, "64 x 40"},
                                                                        {1, 32, "1 x 32"},
                                                                        {1, 100, "1 x 100"}}) {
    batch_[0].weight.rows = rows;
    batch_[0].weight.cols = cols;
    EXPECT_TRUE(contains(amax_error(), "weight 'qkv' is " + text +
                                           ": rows and columns of an MXFP8 weight must be multiples of 32"));
  }
}

TEST_F(WritebackErrors, ShapeThatIsNone) {
  batch_[0].weight.rows = -32;
  EXPECT_TRUE(contains(amax_error(), "weight 'qkv' is -32 x 64, which is no shape"));
  batch_[0].weight.rows = 1ll << 40;
  batch_[0].weight.cols = 1ll << 40;
  EXPECT_TRUE(contains(amax_error(), "weight 'qkv' is 1099511627776 x 1099511627776, which is no shape"));
}

TEST_F(WritebackErrors, PlaneWithoutScales) {
  batch_[0].weight.row_scales = nullptr;
  EXPECT_TRUE(contains(amax_error(), "weight 'qkv' has a row plane but no row scales"));
  batch_[0].weight = view_;
  batch_[0].weight.column_scales = nullptr;
  EXPECT_TRUE(contains(amax_error(), "weight 'qkv' has a column plane but no column scales"));
}

TEST_F(WritebackErrors, NoPlaneAtAll) {
  batch_[0].weight.row_data = nullptr;
  batch_[0].weight.column_data = nullptr;
  EXPECT_TRUE(contains(amax_error(), "weight 'qkv' has neither a row plane nor a column plane"));
}

TEST_F(WritebackErrors, RangeOutsideTheWeight) {
  batch_[0].start = 1;
  EXPECT_TRUE(contains(amax_error(), "weight 'qkv' has 4096 elements, its shard is [1, 1 + 4096)"));
  batch_[0].start = -1;
  EXPECT_TRUE(contains(amax_error(), "weight 'qkv' has 4096 elements, its shard is [-1, -1 + 4096)"));
  batch_[0].start = std::numeric_limits<std::int64_t>::max();
  EXPECT_TRUE(contains(amax_error(), "weight 'qkv' has 4096 elements, its shard is [9223372036854775807"));
  batch_[0].start = 0;
  batch_[0].master.elems = -1;
  EXPECT_TRUE(contains(amax_error(), "weight 'qkv' has 4096 elements, its shard is [0, 0 + -1)"));
}

TEST_F(WritebackErrors, MasterOfAnotherTypeOrWithoutMemory) {
  batch_[0].master.dtype = DType::kInt64;
  EXPECT_TRUE(contains(amax_error(), "master of weight 'qkv' is int64; allowed are fp32 and bf16"));
  batch_[0].master = ConstTypedSpan(nullptr, DType::kFp32, 4096);
  EXPECT_TRUE(contains(amax_error(), "master of weight 'qkv' has 4096 elements but no memory"));
}

TEST_F(WritebackErrors, FragmentOfAnAbsentPlane) {
  batch_[0].weight.row_data = nullptr;
  batch_[0].row_fragment = plane(4);
  EXPECT_TRUE(contains(amax_error(), "weight 'qkv' has a row fragment but no row plane"));
  batch_[0].weight = view_;
  batch_[0].weight.column_data = nullptr;
  batch_[0].row_fragment = nullptr;
  batch_[0].column_fragment = plane(4);
  EXPECT_TRUE(contains(amax_error(), "weight 'qkv' has a column fragment but no column plane"));
}

TEST_F(WritebackErrors, WeightThatOccursTwice) {
  packed_bytes_ = 2048;
  batch_.push_back(batch_[0]);
  batch_[1].name = "tied_head";
  batch_[1].weight.row_data = plane(4);
  const std::string message = amax_error();
  EXPECT_TRUE(contains(message, "'qkv'"));
  EXPECT_TRUE(contains(message, "'tied_head'"));
  EXPECT_TRUE(contains(message, "of a batch have the same plane; a weight may occur once"));
}

TEST_F(WritebackErrors, PackedScalesOfAnotherSize) {
  packed_bytes_ = 1000;
  EXPECT_TRUE(contains(amax_error(), "packed scales have 1000 bytes, the batch needs 1024"));
}

TEST_F(WritebackErrors, MoreThanOneCounter) {
  std::vector<std::int64_t> counters(2);
  EXPECT_TRUE(contains(thrown_message<ContractError>([&] {
                         partial_cast(batch_, std::span(packed_).first(1024), counters, Device(),
                                      StreamRef());
                       }),
                       "nonfinite is one counter or empty, not 2 counters"));
}

TEST_F(WritebackErrors, OfAPreparedBatch) {
  std::vector<std::int64_t> counters(2);
  const Mxfp8Batch batch(batch_, Device());
  const std::string size = "packed scales have 1000 bytes, the batch needs 1024";
  const auto packed = [&](std::size_t bytes) { return std::span(packed_).first(bytes); };
  EXPECT_TRUE(
      contains(thrown_message<ContractError>([&] { batch.partial_amax(packed(1000), StreamRef()); }), size));
  EXPECT_TRUE(contains(
      thrown_message<ContractError>([&] { batch.partial_cast(packed(1000), {}, StreamRef()); }), size));
  EXPECT_TRUE(contains(
      thrown_message<ContractError>([&] { batch.partial_cast(packed(1024), counters, StreamRef()); }),
      "nonfinite is one counter or empty, not 2 counters"));
  batch_[0].weight.rows = 48;
  EXPECT_TRUE(contains(thrown_message<ContractError>([&] { Mxfp8Batch(batch_, Device()); }),
                       "weight 'qkv' is 48 x 64: rows and columns"));
}

TEST_F(WritebackErrors, RangeOrPlaneToDequantize) {
  std::vector<float> out(64);
  const auto message = [&](const MxView& view, Plane plane, std::int64_t begin, TypedSpan span) {
    return thrown_message<ContractError>(
        [&] { dequantize(view, plane, begin, span, Device(), StreamRef()); });
  };
  EXPECT_TRUE(contains(message(view_, Plane::kRow, 4090, std::span<float>(out)),
                       "the weight has 4096 elements, the range to dequantize is [4090, 4090 + 64)"));
  EXPECT_TRUE(contains(message(view_, Plane::kRow, 0, TypedSpan(out.data(), DType::kUint8, 64)),
                       "dequantized values are fp32 or bf16, not uint8"));
  EXPECT_TRUE(contains(message(view_, Plane::kRow, 0, TypedSpan(nullptr, DType::kFp32, 64)),
                       "the output of 64 elements has no memory"));
  MxView view = view_;
  view.column_data = nullptr;
  EXPECT_TRUE(contains(message(view, Plane::kColumn, 0, std::span<float>(out)),
                       "the weight to dequantize has no column plane"));
  view = view_;
  view.rows = 33;
  EXPECT_TRUE(contains(message(view, Plane::kRow, 0, std::span<float>(out)),
                       "the weight is 33 x 64: rows and columns of an MXFP8 weight must be multiples of 32"));
}

TEST_F(WritebackErrors, DeviceWithoutABackend) {
  const Device unknown{static_cast<DeviceKind>(77), 0};
  const std::string text = "unknown device kind";
  EXPECT_TRUE(
      contains(thrown_message<ConfigError>([&] { partial_amax({}, {}, unknown, StreamRef()); }), text));
  EXPECT_TRUE(
      contains(thrown_message<ConfigError>([&] { partial_cast({}, {}, {}, unknown, StreamRef()); }), text));
  std::vector<float> out(1);
  EXPECT_TRUE(contains(thrown_message<ConfigError>([&] {
                         dequantize(view_, Plane::kRow, 0, std::span<float>(out), unknown, StreamRef());
                       }),
                       text));
}

TEST_F(WritebackErrors, CudaWithoutItsBackend) {
  if (test::has_backend(DeviceKind::kCuda)) GTEST_SKIP() << "this build has the CUDA backend";
  const std::string text =
      "MXFP8 writeback on a cuda device was asked for, but this build has no CUDA backend "
      "(MXOPT_WITH_CUDA=ON at configuration switches it on); allowed: host";
  const Device cuda{DeviceKind::kCuda, 0};
  std::vector<float> out(1);
  EXPECT_EQ(thrown_message<ConfigError>([&] { partial_amax({}, {}, cuda, StreamRef()); }), text);
  EXPECT_EQ(thrown_message<ConfigError>([&] { partial_cast({}, {}, {}, cuda, StreamRef()); }), text);
  EXPECT_EQ(thrown_message<ConfigError>([&] { Mxfp8Batch({}, cuda); }), text);
  EXPECT_EQ(thrown_message<ConfigError>(
                [&] { dequantize(view_, Plane::kRow, 0, std::span<float>(out), cuda, StreamRef()); }),
            text);
}

}  // namespace
}  // namespace mxopt
