#include "mxopt/params/layout.h"

#include <algorithm>
#include <chrono>
#include <map>
#include <numeric>
#include <random>
#include <set>
#include <vector>

#include <gtest/gtest.h>

#include "support/thrown_message.h"

namespace mxopt {
namespace {

using test::contains;
using test::thrown_message;

ParamSpec spec(std::string name, std::vector<std::int64_t> shape, ParamFormat format = ParamFormat::kMxfp8,
               Storage storage = Storage::kBoth) {
  ParamSpec result;
  result.name = std::move(name);
  result.shape = std::move(shape);
  result.format = format;
  result.storage = storage;
  return result;
}

ParamSpec tied(std::string name, std::string target, std::vector<std::int64_t> shape) {
  ParamSpec result = spec(std::move(name), std::move(shape));
  result.tied_to = std::move(target);
  return result;
}

LayoutOptions options_for(std::int64_t world_size, std::int64_t bucket_elems = 0) {
  LayoutOptions options;
  options.world_size = world_size;
  options.bucket_elems = bucket_elems;
  return options;
}

int count_of_buckets(const Layout& layout) {
  return static_cast<int>(layout.buckets().size());
}

// ----
// Random lists

/// A list with every family, odd sizes, zero sizes, ties and frozen params.
std::vector<ParamSpec> random_specs(std::mt19937_64& random) {
  const auto upto = [&](std::int64_t limit) {
    return static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(limit + 1));
  };
  std::vector<ParamSpec> specs;
  const std::int64_t count = upto(14);
  for (std::int64_t i = 0; i < count; ++i) {
    ParamSpec next;
    next.name = "p" + std::to_string(i);
    switch (upto(6)) {
      case 0:
        next.shape = {upto(300)};
        break;
      case 1:
        next.shape = {upto(40), upto(40)};
        break;
      case 2:
        next.shape = {upto(3), 32 * upto(3), 32 * upto(3)};
        break;
      default:
        next.shape = {32 * (1 + upto(3)), 32 * (1 + upto(5))};
    }
    if (upto(3) == 0) next.format = upto(1) == 0 ? ParamFormat::kBf16 : ParamFormat::kFp32;
    if (upto(2) == 0) next.storage = Storage::kRow;
    if (upto(4) == 0) next.grad_mode = GradMode::kOverwrite;
    next.frozen = upto(5) == 0;
    specs.push_back(next);
  }
  const std::int64_t ties = count == 0 ? 0 : upto(2);
  std::set<std::size_t> targets;
  for (std::int64_t i = 0; i < ties; ++i) {
    const auto target = static_cast<std::size_t>(upto(count - 1));
    ParamSpec alias = specs[target];
    if (!alias.tied_to.empty()) continue;
    alias.name = "tied" + std::to_string(i);
    alias.tied_to = specs[target].name;
    alias.grad_mode = specs[target].grad_mode = GradMode::kAccumulate;
    // Behind all others, so that `target` stays an index; a swap below gives ties in both directions.
    specs.push_back(alias);
    targets.insert(target);
  }
  // Registration order is arbitrary, a tie may point forward or backward.
  std::ranges::shuffle(specs, random);
  return specs;
}

/// Element by element picture of a layout, made from offsets only.
struct Picture {
  struct Element {
    int param = -1;  // -1: padding
    std::int64_t offset = 0;
  };
  std::vector<std::vector<Element>> buckets;

  explicit Picture(const Layout& layout) {
    for (const Bucket& bucket : layout.buckets()) {
      buckets.emplace_back(static_cast<std::size_t>(bucket.elems));
    }
    for (int p = 0; p < static_cast<int>(layout.params().size()); ++p) {
      const ParamLayout& param = layout.param(p);
      if (param.tied_to >= 0) continue;
      auto& bucket = buckets[static_cast<std::size_t>(param.bucket)];
      for (std::int64_t i = 0; i < param.elems(); ++i) {
        Element& element = bucket.at(static_cast<std::size_t>(param.bucket_begin + i));
        EXPECT_EQ(element.param, -1) << "params overlap";
        element = {p, i};
      }
    }
  }
};

void expect_segments_cover_each_element_once(const Layout& layout, const Picture& picture) {
  std::int64_t covered = 0, logical = 0;
  for (const ParamLayout& param : layout.params()) logical += param.tied_to >= 0 ? 0 : param.elems();
  for (std::int64_t rank = 0; rank < layout.world_size(); ++rank) {
    int last_bucket = 0;
    std::int64_t last_end = 0;
    std::vector<std::int64_t> elems_of_bucket(picture.buckets.size(), 0);
    for (const Segment& segment : layout.segments(rank)) {
      ASSERT_GT(segment.elems, 0);
      // Ordered and disjoint: by bucket, then by position.
      if (segment.bucket != last_bucket) last_end = 0;
      ASSERT_GE(segment.bucket, last_bucket);
      ASSERT_GE(segment.bucket_begin, last_end);
      last_bucket = segment.bucket;
      last_end = segment.bucket_begin + segment.elems;
      // Inside the rank's shard, which starts and ends on a multiple of 128.
      const std::int64_t n = layout.bucket(segment.bucket).elems;
      ASSERT_EQ(n % (128 * layout.world_size()), 0);
      ASSERT_GE(segment.bucket_begin, rank * n / layout.world_size());
      ASSERT_LE(last_end, (rank + 1) * n / layout.world_size());
      // Says of every element what the picture says.
      for (std::int64_t i = 0; i < segment.elems; ++i) {
        const Picture::Element& element = picture.buckets[static_cast<std::size_t>(segment.bucket)].at(
            static_cast<std::size_t>(segment.bucket_begin + i));
        ASSERT_EQ(element.param, segment.param);
        ASSERT_EQ(element.offset, segment.param_begin + i);
      }
      // A row block is never cut.
      const ParamLayout& param = layout.param(segment.param);
      if (param.family.format == ParamFormat::kMxfp8) {
        ASSERT_EQ(segment.param_begin % 32, 0);
        ASSERT_EQ(segment.elems % 32, 0);
      }
      covered += segment.elems;
      elems_of_bucket[static_cast<std::size_t>(segment.bucket)] += segment.elems;
    }
    for (std::size_t b = 0; b < picture.buckets.size(); ++b) {
      const auto& bucket = picture.buckets[b];
      const std::size_t shard = bucket.size() / static_cast<std::size_t>(layout.world_size());
      const auto begin = bucket.begin() + static_cast<std::ptrdiff_t>(shard * static_cast<std::size_t>(rank));
      const auto owned = std::count_if(begin, begin + static_cast<std::ptrdiff_t>(shard),
                                       [](const Picture::Element& element) { return element.param >= 0; });
      ASSERT_EQ(owned, elems_of_bucket[b]);
    }
  }
  EXPECT_EQ(covered, logical);
}

/// Owner of every element by position alone, then bands by counting owners.
void expect_cut_bands_are_those_with_several_owners(const Layout& layout, const Picture& picture) {
  struct Owned {
    std::int64_t first = 0, last = 0, elems = 0;
  };
  // (param, band) -> rank -> what the rank owns of the band
  std::map<std::pair<int, std::int64_t>, std::map<std::int64_t, Owned>> bands;
  std::map<std::int64_t, std::int64_t> owned_of_rank;
  std::int64_t column_elems = 0;
  for (const auto& bucket : picture.buckets) {
    for (std::size_t i = 0; i < bucket.size(); ++i) {
      if (bucket[i].param < 0) continue;
      const ParamLayout& param = layout.param(bucket[i].param);
      if (param.family.format != ParamFormat::kMxfp8 || param.family.storage != Storage::kBoth) continue;
      const auto rank =
          static_cast<std::int64_t>(i * static_cast<std::size_t>(layout.world_size()) / bucket.size());
      const std::int64_t row = bucket[i].offset / param.cols;
      Owned& owned = bands[{bucket[i].param, row / 32}][rank];
      if (owned.elems == 0) owned.first = bucket[i].offset;
      owned.last = bucket[i].offset;
      ++owned.elems;
      ++owned_of_rank[rank];
      ++column_elems;
    }
  }
  std::map<std::int64_t, std::map<std::pair<int, std::int64_t>, Owned>> expected;
  std::map<std::int64_t, std::int64_t> cut_of_rank;
  std::int64_t cut_bands = 0, cut_elems = 0;
  for (const auto& [band, ranks] : bands) {
    if (ranks.size() < 2) continue;
    ++cut_bands;
    for (const auto& [rank, owned] : ranks) {
      expected[rank][band] = owned;
      cut_of_rank[rank] += owned.elems;
      cut_elems += owned.elems;
    }
  }
  for (std::int64_t rank = 0; rank < layout.world_size(); ++rank) {
    const std::vector<CutBand> actual = layout.cut_bands(rank);
    ASSERT_EQ(actual.size(), expected[rank].size()) << "rank " << rank;
    std::map<int, int> in_bucket;
    for (const CutBand& cut : actual) {
      const auto found = expected[rank].find({cut.param, cut.band});
      ASSERT_NE(found, expected[rank].end()) << "band " << cut.band << " of param " << cut.param;
      EXPECT_EQ(cut.param_begin, found->second.first);
      EXPECT_EQ(cut.param_end, found->second.last + 1);
      EXPECT_LE(++in_bucket[layout.param(cut.param).bucket], 2);
    }
  }
  const CutShare share = layout.cut_share();
  double worst = 0;
  for (const auto& [rank, elems] : cut_of_rank) {
    worst = std::max(worst, static_cast<double>(elems) / static_cast<double>(owned_of_rank[rank]));
  }
  EXPECT_EQ(share.cut_bands, cut_bands);
  EXPECT_EQ(share.mean,
            column_elems == 0 ? 0 : static_cast<double>(cut_elems) / static_cast<double>(column_elems));
  EXPECT_EQ(share.worst_rank, worst);
}

/// Index of the param whose gradient completes the storage of `param` last, in a backward pass from the last
/// registered param to the first.
int completing_param(const Layout& layout, int param) {
  int result = param;
  for (int p = 0; p < static_cast<int>(layout.params().size()); ++p) {
    if (layout.storage_of(p) == layout.storage_of(param)) result = std::min(result, p);
  }
  return result;
}

void expect_bucket_order_is_the_order_of_completion(const Layout& layout) {
  // Plays the backward pass and notes when a bucket has all its gradients.
  std::vector<std::set<int>> missing(layout.buckets().size());
  for (int p = 0; p < static_cast<int>(layout.params().size()); ++p) {
    missing[static_cast<std::size_t>(layout.param(p).bucket)].insert(p);
  }
  std::vector<int> completed;
  for (int p = static_cast<int>(layout.params().size()) - 1; p >= 0; --p) {
    const int b = layout.param(p).bucket;
    missing[static_cast<std::size_t>(b)].erase(p);
    if (missing[static_cast<std::size_t>(b)].empty()) completed.push_back(b);
  }
  std::vector<int> numbers(layout.buckets().size());
  std::iota(numbers.begin(), numbers.end(), 0);
  EXPECT_EQ(completed, numbers);
}

void expect_buckets_close_at_the_limit(const Layout& layout) {
  std::vector<bool> shared(layout.params().size(), false);
  for (const ParamLayout& param : layout.params()) {
    if (param.tied_to >= 0) shared[static_cast<std::size_t>(param.tied_to)] = true;
  }
  std::vector<Family> open;
  for (const Bucket& bucket : layout.buckets()) {
    ASSERT_FALSE(bucket.params.empty());
    std::int64_t end = 0;
    int last = static_cast<int>(layout.params().size());
    for (int p : bucket.params) {
      const ParamLayout& param = layout.param(p);
      EXPECT_TRUE(param.family == bucket.family);
      EXPECT_EQ(param.bucket_begin, (end + 127) / 128 * 128);
      EXPECT_LT(completing_param(layout, p), last);
      last = completing_param(layout, p);
      if (p != bucket.params.back()) {
        EXPECT_LT(param.bucket_begin + param.elems(), layout.options().bucket_elems);
      }
      end = param.bucket_begin + param.elems();
      if (shared[static_cast<std::size_t>(p)]) {
        EXPECT_EQ(bucket.params.size(), 1u);
      }
    }
    EXPECT_EQ(bucket.used_elems, end);
    EXPECT_GE(bucket.elems, end);
    EXPECT_LT(bucket.elems - end, 128 * layout.world_size());
    if (end < layout.options().bucket_elems && !shared[static_cast<std::size_t>(bucket.params[0])]) {
      EXPECT_EQ(std::ranges::find(open, bucket.family), open.end()) << "two unfilled buckets of one family";
      open.push_back(bucket.family);
    }
  }
}

void expect_scales_are_disjoint_and_trainable_first(const Layout& layout) {
  std::vector<int> owner(static_cast<std::size_t>(layout.scale_bytes()), -1);
  for (int p = 0; p < static_cast<int>(layout.params().size()); ++p) {
    const ParamLayout& param = layout.param(p);
    if (param.tied_to >= 0) {
      const ParamLayout& target = layout.param(param.tied_to);
      EXPECT_EQ(param.row_scales_begin, target.row_scales_begin);
      EXPECT_EQ(param.row_scales_bytes, target.row_scales_bytes);
      EXPECT_EQ(param.column_scales_begin, target.column_scales_begin);
      EXPECT_EQ(param.column_scales_bytes, target.column_scales_bytes);
      continue;
    }
    const bool mxfp8 = param.family.format == ParamFormat::kMxfp8;
    const auto up = [](std::int64_t value, std::int64_t unit) { return (value + unit - 1) / unit * unit; };
    EXPECT_EQ(param.row_scales_bytes, mxfp8 ? up(param.rows, 128) * up(param.cols / 32, 4) : 0);
    EXPECT_EQ(param.column_scales_bytes, mxfp8 && param.family.storage == Storage::kBoth
                                             ? up(param.rows / 32, 4) * up(param.cols, 128)
                                             : 0);
    for (const auto& [begin, bytes] : {std::pair{param.row_scales_begin, param.row_scales_bytes},
                                       {param.column_scales_begin, param.column_scales_bytes}}) {
      EXPECT_EQ(begin % 128, 0);
      if (bytes > 0) {
        EXPECT_EQ(begin + bytes <= layout.trainable_scale_bytes(), !param.family.frozen);
      }
      for (std::int64_t i = begin; i < begin + bytes; ++i) {
        EXPECT_EQ(owner.at(static_cast<std::size_t>(i)), -1);
        owner[static_cast<std::size_t>(i)] = p;
      }
    }
  }
  EXPECT_EQ(std::ranges::count(owner, -1), 0);
}

void expect_arenas_hold_the_buckets_back_to_back(const Layout& layout) {
  std::int64_t row = 0, column = 0, bf16 = 0, fp32 = 0, grad = 0, master = 0, moment = 0;
  for (const Bucket& bucket : layout.buckets()) {
    const auto take = [](std::int64_t begin, std::int64_t& arena, std::int64_t elems) {
      EXPECT_EQ(begin, arena);
      arena += elems;
    };
    const std::int64_t shard = bucket.elems / layout.world_size();
    take(bucket.value_begin,
         bucket.family.format == ParamFormat::kMxfp8  ? row
         : bucket.family.format == ParamFormat::kBf16 ? bf16
                                                      : fp32,
         bucket.elems);
    if (bucket.family.has_column()) take(bucket.column_begin, column, bucket.elems);
    take(bucket.shard_begin, master, shard);
    if (bucket.family.frozen) continue;
    take(bucket.grad_begin, grad, bucket.elems);
    take(bucket.moment_begin, moment, shard);
  }
  const ByteCounts bytes = layout.byte_counts(DType::kBf16);
  EXPECT_EQ(bytes.row_plane, row);
  EXPECT_EQ(bytes.column_plane, column);
  EXPECT_EQ(bytes.bf16_values, 2 * bf16);
  EXPECT_EQ(bytes.fp32_values, 4 * fp32);
  EXPECT_EQ(bytes.scales, layout.scale_bytes());
  EXPECT_EQ(bytes.gradients, 2 * grad);
  EXPECT_EQ(bytes.master, 4 * master);
  EXPECT_EQ(bytes.exp_avg, 4 * moment);
  EXPECT_EQ(bytes.exp_avg_sq, 4 * moment);
  EXPECT_EQ(bytes.total(),
            row + column + 2 * bf16 + 4 * fp32 + layout.scale_bytes() + 2 * grad + 4 * master + 8 * moment);
  EXPECT_EQ(layout.byte_counts(DType::kFp32).gradients, 4 * grad);
}

TEST(Layout, HoldsItsPropertiesOnRandomListsForWorldSizes1To64) {
  // --gtest_random_seed=N gives another series.
  const auto first_seed = static_cast<std::uint64_t>(GTEST_FLAG_GET(random_seed)) * 1'000'003;
  for (std::uint64_t round = 0; round < 256; ++round) {
    std::mt19937_64 random(first_seed + round);
    const std::vector<ParamSpec> specs = random_specs(random);
    const std::int64_t limits[] = {1, 100, 4096, 20000, 1'000'000};
    const std::int64_t world_size = 1 + static_cast<std::int64_t>(round % 64);
    const std::int64_t bucket_elems = limits[random() % std::size(limits)];
    SCOPED_TRACE("seed " + std::to_string(first_seed + round) + ", W " + std::to_string(world_size) +
                 ", bucket_elems " + std::to_string(bucket_elems));
    const Layout layout(specs, options_for(world_size, bucket_elems));
    ASSERT_EQ(layout.params().size(), specs.size());
    const Picture picture(layout);
    expect_segments_cover_each_element_once(layout, picture);
    expect_cut_bands_are_those_with_several_owners(layout, picture);
    expect_bucket_order_is_the_order_of_completion(layout);
    expect_buckets_close_at_the_limit(layout);
    expect_scales_are_disjoint_and_trainable_first(layout);
    expect_arenas_hold_the_buckets_back_to_back(layout);
    EXPECT_EQ(layout.digest(), Layout(specs, options_for(world_size, bucket_elems)).digest());
    if (HasFailure()) return;
  }
}

TEST(Layout, OneBandMayBelongToManyRanksAndAShardMayLieInsideOneBand) {
  const Layout layout({spec("w", {32, 2048})}, options_for(8));
  for (std::int64_t rank = 0; rank < 8; ++rank) {
    const std::vector<CutBand> cuts = layout.cut_bands(rank);
    ASSERT_EQ(cuts.size(), 1u);
    EXPECT_EQ(cuts[0].band, 0);
    EXPECT_EQ(cuts[0].param_begin, rank * 8192);
    EXPECT_EQ(cuts[0].param_end, (rank + 1) * 8192);
  }
  EXPECT_EQ(layout.cut_share().cut_bands, 1);
  EXPECT_EQ(layout.cut_share().mean, 1.0);
}

TEST(Layout, RowOnlyParamsHaveNoCutBands) {
  const Layout layout({spec("w", {32, 2048}, ParamFormat::kMxfp8, Storage::kRow)}, options_for(8));
  EXPECT_TRUE(layout.cut_bands(3).empty());
  EXPECT_EQ(layout.cut_share().cut_bands, 0);
  EXPECT_EQ(layout.cut_share().mean, 0.0);
}

// ----
// Buckets

TEST(Layout, DefaultBucketLimitGrowsWithTheWorld) {
  const Family row{ParamFormat::kMxfp8, Storage::kRow, false};
  const Family both{ParamFormat::kMxfp8, Storage::kBoth, false};
  const Family bf16{ParamFormat::kBf16, Storage::kRow, false};
  EXPECT_EQ(default_bucket_elems(row, 1), 40'000'000);
  EXPECT_EQ(default_bucket_elems(both, 1), 40'000'000);
  EXPECT_EQ(default_bucket_elems(both, 10), 40'000'000);
  EXPECT_EQ(default_bucket_elems(both, 11), 44'000'000);
  EXPECT_EQ(default_bucket_elems(row, 40), 40'000'000);
  EXPECT_EQ(default_bucket_elems(bf16, 41), 41'000'000);
  EXPECT_EQ(default_bucket_elems(both, 16'384), 65'536'000'000);
}

TEST(Layout, ADefaultBucketClosesWhenItReachesTheLimit) {
  // 5 params of 16 Mi elements: 3 reach 40e6.
  std::vector<ParamSpec> specs;
  for (int i = 0; i < 5; ++i) specs.push_back(spec("w" + std::to_string(i), {4096, 4096}));
  const Layout layout(specs, options_for(2));
  ASSERT_EQ(count_of_buckets(layout), 2);
  EXPECT_EQ(layout.bucket(0).params, (std::vector<int>{4, 3, 2}));
  EXPECT_EQ(layout.bucket(1).params, (std::vector<int>{1, 0}));
}

TEST(Layout, ATiedParamSharesStorageInABucketOfItsOwn) {
  // Tied from the last layer to the first and from the first to the last: the same layout.
  for (bool forward : {false, true}) {
    std::vector<ParamSpec> specs = {spec("embedding", {64, 64}), spec("a", {32, 32}), spec("b", {32, 32}),
                                    spec("head", {64, 64})};
    if (forward)
      specs[0].tied_to = "head";
    else
      specs[3].tied_to = "embedding";
    const Layout layout(specs, options_for(2));
    ASSERT_EQ(count_of_buckets(layout), 2);
    EXPECT_EQ(layout.bucket(0).params, (std::vector<int>{2, 1}));
    // Complete only with the embedding, so it comes last even when the head holds the storage.
    EXPECT_EQ(layout.bucket(1).params, (std::vector<int>{forward ? 3 : 0}));
    const ParamLayout& embedding = layout.param(0);
    const ParamLayout& head = layout.param(3);
    EXPECT_EQ(embedding.bucket, head.bucket);
    EXPECT_EQ(embedding.bucket_begin, head.bucket_begin);
    EXPECT_EQ(layout.storage_of(0), layout.storage_of(3));
    EXPECT_EQ(layout.storage_of(0), forward ? 3 : 0);
    EXPECT_EQ(layout.storage_of(1), 1);
  }
}

TEST(Layout, ATiedParamIsOwnedOnce) {
  // 800 elements under two names: one master, counted once.
  std::vector<ParamSpec> specs = {spec("w", {800}, ParamFormat::kFp32),
                                  spec("alias", {800}, ParamFormat::kFp32)};
  specs[1].tied_to = "w";
  const Layout layout(specs, options_for(2));
  std::int64_t owned = 0;
  for (std::int64_t rank : {0, 1}) {
    for (const Segment& segment : layout.segments(rank)) {
      EXPECT_EQ(segment.param, 0);
      owned += segment.elems;
    }
  }
  EXPECT_EQ(owned, 800);
  EXPECT_EQ(layout.master_elems() * 2, 1024);
}

TEST(Layout, AFrozenParamHasPlanesAndMasterButNoGradientAndNoMoments) {
  std::vector<ParamSpec> specs = {spec("a", {32, 32}), spec("b", {64, 32}), spec("c", {32, 32})};
  specs[1].frozen = true;
  const Layout layout(specs, options_for(2));
  ASSERT_EQ(count_of_buckets(layout), 2);
  EXPECT_EQ(layout.row_plane_elems(), 4096);
  EXPECT_EQ(layout.master_elems(), 2048);
  EXPECT_EQ(layout.grad_elems(), 2048);
  EXPECT_EQ(layout.moment_elems(), 1024);
  EXPECT_EQ(layout.bucket(layout.param(1).bucket).params, (std::vector<int>{1}));
}

TEST(Layout, BucketsOfAnySizeDivideByTheWorldSize) {
  for (std::int64_t world_size : {3, 5, 6, 7}) {
    const std::vector<ParamSpec> specs = {spec("a", {1000}, ParamFormat::kFp32),
                                          spec("b", {1001}, ParamFormat::kFp32),
                                          spec("c", {1}, ParamFormat::kFp32)};
    const Layout layout(specs, options_for(world_size, 1));
    ASSERT_EQ(count_of_buckets(layout), 3);
    expect_segments_cover_each_element_once(layout, Picture(layout));
  }
}

TEST(Layout, RanksThatOwnOnlyPaddingAndZeroSizesAreOrdinary) {
  const Layout layout({spec("w", {32, 32}), spec("bias", {5}, ParamFormat::kBf16), spec("empty", {0, 64})},
                      options_for(8));
  expect_segments_cover_each_element_once(layout, Picture(layout));
  EXPECT_EQ(layout.segments(0).size(), 2u);
  EXPECT_EQ(layout.segments(7).size(), 1u);  // the last 128 elements of w
  const Layout wider({spec("bias", {5}, ParamFormat::kBf16)}, options_for(64));
  EXPECT_EQ(wider.segments(0).size(), 1u);
  for (std::int64_t rank = 1; rank < 64; ++rank) EXPECT_TRUE(wider.segments(rank).empty());
  EXPECT_EQ(wider.bf16_value_elems(), 128 * 64);
}

TEST(Layout, AListOfNothingIsOrdinary) {
  for (const std::vector<ParamSpec>& specs :
       {std::vector<ParamSpec>{}, std::vector<ParamSpec>{spec("empty", {0, 64}), spec("none", {32, 0})}}) {
    const Layout layout(specs, options_for(3));
    EXPECT_EQ(layout.byte_counts(DType::kFp32).total(), 0);
    EXPECT_TRUE(layout.segments(2).empty());
    EXPECT_TRUE(layout.cut_bands(2).empty());
    EXPECT_EQ(layout.cut_share().worst_rank, 0.0);
  }
}

// ----
// Formats

TEST(Layout, FallbackIsDecidedFromTheGlobalShape) {
  struct Case {
    std::vector<std::int64_t> shape;
    Storage storage;
    std::string reason;
  };
  const std::vector<Case> cases = {
      {{48, 64}, Storage::kBoth, "matrix view 48x64 is not a multiple of 32 in both dims"},
      {{33, 32}, Storage::kRow, "matrix view 33x32 is not a multiple of 32 in both dims"},
      {{64, 40}, Storage::kBoth, "matrix view 64x40 is not a multiple of 32 in both dims"},
      {{1, 32}, Storage::kRow, "matrix view 1x32 is not a multiple of 32 in both dims"},
      {{100}, Storage::kBoth, "matrix view 1x100 is not a multiple of 32 in both dims"},
      {{64}, Storage::kBoth, "matrix view 1x64 is not a multiple of 32 in both dims"},
      {{3, 32, 32}, Storage::kBoth, ""},
      {{2, 16, 64}, Storage::kBoth, ""},
      {{32, 32}, Storage::kRow, ""},
  };
  for (std::int64_t world_size : {1, 3, 8}) {
    for (const Case& c : cases) {
      ParamSpec request = spec("w", c.shape, ParamFormat::kMxfp8, c.storage);
      const Layout layout({request}, options_for(world_size));
      const ParamLayout& param = layout.param(0);
      SCOPED_TRACE(shape_text(c.shape));
      EXPECT_EQ(param.fallback_reason, c.reason);
      EXPECT_EQ(param.family.format, c.reason.empty() ? ParamFormat::kMxfp8 : ParamFormat::kBf16);
      EXPECT_EQ(param.family.storage, c.reason.empty() ? c.storage : Storage::kRow);
      EXPECT_EQ(layout.scale_bytes() > 0, c.reason.empty());
      if (c.reason.empty()) continue;
      // The same under the policy `error`, from the param or from the options.
      const std::string expected = "param 'w' (shape " + shape_text(c.shape) + "): mxfp8 needs it, but the " +
                                   c.reason + " (precision.fallback: error)";
      LayoutOptions strict = options_for(world_size);
      strict.fallback = Fallback::kError;
      EXPECT_EQ(thrown_message<ConfigError>([&] { Layout({request}, strict); }), expected);
      request.fallback = Fallback::kError;
      EXPECT_EQ(thrown_message<ConfigError>([&] { Layout({request}, options_for(world_size)); }), expected);
      request.fallback = Fallback::kBf16;
      EXPECT_NO_THROW(Layout({request}, strict));
    }
  }
}

TEST(Layout, WhatASpecLeavesUnsetComesFromTheOptions) {
  ParamSpec open;
  open.name = "w";
  open.shape = {32, 64};
  LayoutOptions options = options_for(1);
  EXPECT_TRUE(
      (Layout({open}, options).param(0).family == Family{ParamFormat::kMxfp8, Storage::kBoth, false}));
  options.default_storage = Storage::kRow;
  EXPECT_TRUE((Layout({open}, options).param(0).family == Family{ParamFormat::kMxfp8, Storage::kRow, false}));
  options.default_format = ParamFormat::kFp32;
  EXPECT_TRUE((Layout({open}, options).param(0).family == Family{ParamFormat::kFp32, Storage::kRow, false}));
  open.format = ParamFormat::kBf16;
  EXPECT_TRUE((Layout({open}, options).param(0).family == Family{ParamFormat::kBf16, Storage::kRow, false}));
}

TEST(Layout, MatrixViewIsLeadingDimsByLastDim) {
  const Layout layout({spec("w", {2, 3, 32, 64}, ParamFormat::kFp32), spec("bias", {7}, ParamFormat::kFp32)},
                      options_for(1));
  EXPECT_EQ(layout.param(0).rows, 192);
  EXPECT_EQ(layout.param(0).cols, 64);
  EXPECT_EQ(layout.param(1).rows, 1);
  EXPECT_EQ(layout.param(1).cols, 7);
}

// ----
// Messages

TEST(Layout, RefusesBadOptionsByValue) {
  EXPECT_EQ(thrown_message<ConfigError>([] { Layout({}, options_for(0)); }),
            "world size 0: allowed is 1 to 2147483647");
  EXPECT_EQ(thrown_message<ConfigError>([] { Layout({}, options_for(std::int64_t{1} << 31)); }),
            "world size 2147483648: allowed is 1 to 2147483647");
  EXPECT_EQ(thrown_message<ConfigError>([] { Layout({}, options_for(1, -5)); }),
            "bucket_elems -5: allowed is 0 (automatic) or more");
}

TEST(Layout, NamesEveryProblemOfAListAtOnce) {
  EXPECT_EQ(thrown_message<ConfigError>([] {
              Layout({spec("", {32, 32}), spec("a", {}), spec("a", {4, -1}), spec("big", {1 << 30, 1 << 30})},
                     options_for(1));
            }),
            "a param has an empty name\n"
            "param 'a': shape has no dims; allowed: rank >= 1\n"
            "param 'a' is registered twice; to share storage, use another name and tied_to\n"
            "param 'a': shape 4x-1 has a negative dim\n"
            "param 'big': shape 1073741824x1073741824 has more than 2^56 elements");
  EXPECT_EQ(thrown_message<ConfigError>([] {
              Layout({spec("w", {32, 32}, ParamFormat::kMxfp8, Storage::kColumn), tied("t", "v", {32, 32}),
                      tied("u", "t", {32, 32})},
                     options_for(1));
            }),
            "param 'w' (shape 32x32): storage column is not a trainer's storage; allowed: row, both\n"
            "param 't' (shape 32x32): tied_to 'v' is not a registered param, the nearest name is 'w'\n"
            "param 'u' (shape 32x32): tied_to 't' is itself tied; tie both to the same param");
}

TEST(Layout, ADuplicateKeyIsOneWordOfOneParamWithStorage) {
  const auto with_key = [](ParamSpec param, std::string key) {
    param.duplicate_key = std::move(key);
    return param;
  };
  const Layout layout({with_key(spec("a", {4}), "k"), spec("b", {4})}, options_for(1));
  EXPECT_EQ(layout.param(0).duplicate_key, "k");
  EXPECT_EQ(layout.param(1).duplicate_key, "");
  EXPECT_NE(layout.digest(), Layout({spec("a", {4}), spec("b", {4})}, options_for(1)).digest());
  EXPECT_EQ(thrown_message<ConfigError>([&] {
              Layout({with_key(spec("a", {4}), "k k"), with_key(spec("b", {4}), "k k"),
                      with_key(tied("t", "a", {4}), "t")},
                     options_for(1));
            }),
            "param 'a': duplicate_key 'k k' must not contain white space or control characters\n"
            "param 'b': duplicate_key 'k k' must not contain white space or control characters\n"
            "param 'b': duplicate_key 'k k' is that of 'a' too; copies on one rank are tied_to it\n"
            "param 't': duplicate_key 't' has no meaning beside tied_to; give it to 'a'");
}

TEST(Layout, TiedParamsAccumulate) {
  ParamSpec first = spec("embed", {32, 64});
  ParamSpec second = spec("head", {32, 64});
  second.tied_to = "embed";
  first.grad_mode = second.grad_mode = GradMode::kOverwrite;
  EXPECT_EQ(thrown_message<ConfigError>([&] {
              Layout({first, second}, options_for(1));
            }),
            "param 'head' is tied to 'embed': their gradients share memory, so grad_mode must be accumulate");
}

TEST(Layout, NamesAreOneWord) {
  for (const char* name : {"a b", "a\n", "\ta", "a\x7f"}) {
    EXPECT_EQ(thrown_message<ConfigError>([&] {
                Layout({spec(name, {32, 32})}, options_for(1));
              }),
              "param '" + std::string(name) + "': names must not contain white space or control characters");
  }
  EXPECT_NO_THROW(Layout({spec("layer.0/attn-qkv[1]", {32, 32})}, options_for(1)));
}

TEST(Layout, SizesThatNoByteCountCanHoldAreRefused) {
  // A zero dim does not hide the others.
  EXPECT_EQ(thrown_message<ConfigError>([] {
              Layout({spec("w", {std::int64_t{1} << 40, std::int64_t{1} << 40, 0})}, options_for(1));
            }),
            "param 'w': shape 1099511627776x1099511627776x0 has more than 2^56 elements");
  EXPECT_NO_THROW(Layout({spec("w", {std::int64_t{1} << 40, std::int64_t{1} << 16})}, options_for(1)));
  const std::vector<ParamSpec> two = {
      spec("a", {std::int64_t{1} << 40, std::int64_t{1} << 15}, ParamFormat::kFp32),
      spec("b", {(std::int64_t{1} << 55) + 1}, ParamFormat::kFp32)};
  EXPECT_EQ(thrown_message<ConfigError>([&] { Layout(two, options_for(1)); }),
            "the params have more than 2^56 elements together");
}

TEST(Layout, TiedParamsMustBeAlikeInEverything) {
  const auto text_of = [](ParamSpec alias) {
    alias.name = "alias";
    alias.tied_to = "w";
    return thrown_message<ConfigError>([&] { Layout({spec("w", {32, 64}), alias}, options_for(1)); });
  };
  const std::string tail = "), but shape, format, storage, frozen and grad_mode must be equal";
  EXPECT_EQ(text_of(spec("", {64, 32})),
            "param 'alias' (shape 64x32, mxfp8) is tied to 'w' (shape 32x64, mxfp8" + tail);
  EXPECT_EQ(text_of(spec("", {32, 64}, ParamFormat::kFp32)),
            "param 'alias' (shape 32x64, fp32) is tied to 'w' (shape 32x64, mxfp8" + tail);
  EXPECT_TRUE(contains(text_of(spec("", {32, 64}, ParamFormat::kMxfp8, Storage::kRow)), tail));
  ParamSpec frozen = spec("", {32, 64});
  frozen.frozen = true;
  EXPECT_TRUE(contains(text_of(frozen), tail));
  ParamSpec overwrite = spec("", {32, 64});
  overwrite.grad_mode = GradMode::kOverwrite;
  EXPECT_TRUE(contains(text_of(overwrite), tail));
}

TEST(Layout, FindNamesTheNearestParam) {
  const Layout layout({spec("layer0.qkv", {32, 32}), spec("layer0.out", {32, 32})}, options_for(1));
  EXPECT_EQ(layout.find("layer0.out"), 1);
  EXPECT_EQ(thrown_message<ContractError>([&] { (void)layout.find("layer0.qvk"); }),
            "unknown param 'layer0.qvk'; 2 params are registered, the nearest name is 'layer0.qkv'");
  EXPECT_EQ(thrown_message<ContractError>([&] { (void)layout.find("x"); }),
            "unknown param 'x'; 2 params are registered");
}

TEST(Layout, RefusesRanksOutsideTheWorld) {
  const Layout layout({spec("w", {32, 32})}, options_for(4));
  for (std::int64_t rank : {-1, 4}) {
    const std::string expected = "rank " + std::to_string(rank) + " of a layout for world size 4";
    EXPECT_TRUE(contains(thrown_message<ContractError>([&] { (void)layout.segments(rank); }), expected));
    EXPECT_TRUE(contains(thrown_message<ContractError>([&] { (void)layout.cut_bands(rank); }), expected));
  }
}

// ----
// Digest

std::vector<ParamSpec> digest_specs() {
  std::vector<ParamSpec> specs = {spec("w", {32, 64}), spec("bias", {100}, ParamFormat::kFp32),
                                  spec("v", {32, 64})};
  return specs;
}

TEST(Layout, DigestIsTheSameOnEveryMachine) {
  EXPECT_EQ(hash64(""), 0xCBF29CE484222325u);
  EXPECT_EQ(hash64("a"), 0xAF63DC4C8601EC8Cu);  // published FNV-1a test vectors
  EXPECT_EQ(hash64("foobar"), 0x85944171F73967E8u);
  EXPECT_EQ(hash64("bar", hash64("foo")), hash64("foobar"));
  const Layout layout(digest_specs(), options_for(2, 1000));
  const std::vector<LayoutField> fields = layout.fields();
  ASSERT_EQ(fields.size(), 3u);
  EXPECT_EQ(fields[0].name + "=" + fields[0].text, "world_size=2");
  EXPECT_EQ(fields[1].name + "=" + fields[1].text, "bucket_elems=1000");
  EXPECT_EQ(fields[2].name + "=" + fields[2].text,
            "params=w 32x64 mxfp8 both\nbias 100 fp32\nv 32x64 mxfp8 both\n");
  EXPECT_EQ(layout.digest(), 0x1854AC37942E8ECBu);
}

TEST(Layout, DigestChangesWithEveryField) {
  std::vector<std::vector<ParamSpec>> variants(9, digest_specs());
  variants[1][0].name = "w2";
  variants[2][0].shape = {64, 32};
  variants[3][0].format = ParamFormat::kBf16;
  variants[4][0].storage = Storage::kRow;
  variants[5][0].grad_mode = GradMode::kOverwrite;
  variants[6][0].frozen = true;
  variants[7][2].tied_to = "w";
  std::swap(variants[8][0], variants[8][1]);
  std::set<std::uint64_t> digests;
  for (const std::vector<ParamSpec>& specs : variants)
    digests.insert(Layout(specs, options_for(2, 1000)).digest());
  digests.insert(Layout(digest_specs(), options_for(3, 1000)).digest());
  digests.insert(Layout(digest_specs(), options_for(2, 1001)).digest());
  EXPECT_EQ(digests.size(), variants.size() + 2);
}

// ----
// Size

TEST(Layout, OffsetsBeyond32Bits) {
  // One param of 2^31 + 1,048,576 elements.
  for (std::int64_t world_size : {1, 3}) {
    const Layout layout({spec("w", {65'568, 32'768})}, options_for(world_size));
    EXPECT_EQ(layout.param(0).elems(), 2'148'532'224);
    std::int64_t end = 0;
    for (std::int64_t rank = 0; rank < world_size; ++rank) {
      for (const Segment& segment : layout.segments(rank)) {
        EXPECT_EQ(segment.param_begin, end);
        end += segment.elems;
      }
    }
    EXPECT_EQ(end, 2'148'532'224);
  }
  // Each of five is small, their offsets are not.
  std::vector<ParamSpec> specs;
  for (int i = 0; i < 5; ++i) specs.push_back(spec("w" + std::to_string(i), {16'384, 32'768}));
  const Layout layout(specs, options_for(2, std::int64_t{1} << 40));
  ASSERT_EQ(count_of_buckets(layout), 1);
  EXPECT_EQ(layout.param(0).bucket_begin, std::int64_t{4} << 29);
  EXPECT_EQ(layout.bucket(0).elems, std::int64_t{5} << 29);
  EXPECT_EQ(layout.byte_counts(DType::kFp32).gradients, std::int64_t{20} << 29);
  EXPECT_EQ(layout.segments(1).back().bucket_begin, std::int64_t{4} << 29);
  // The cut lies in the middle of w2, on a band.
  EXPECT_TRUE(layout.cut_bands(0).empty());
  EXPECT_EQ(layout.segments(1).front().param_begin, std::int64_t{1} << 28);
}

/// The params of a decoder with 405 billion parameters.
std::vector<ParamSpec> specs_of_405b() {
  constexpr std::int64_t kHidden = 16'384, kFfn = 53'248, kKv = 1'024, kVocab = 128'256;
  std::vector<ParamSpec> specs = {spec("embedding", {kVocab, kHidden}, ParamFormat::kBf16)};
  for (int layer = 0; layer < 126; ++layer) {
    const std::string prefix = "layers." + std::to_string(layer) + ".";
    specs.push_back(spec(prefix + "attention_norm", {kHidden}, ParamFormat::kFp32));
    specs.push_back(spec(prefix + "q", {kHidden, kHidden}));
    specs.push_back(spec(prefix + "k", {kKv, kHidden}));
    specs.push_back(spec(prefix + "v", {kKv, kHidden}));
    specs.push_back(spec(prefix + "o", {kHidden, kHidden}));
    specs.push_back(spec(prefix + "ffn_norm", {kHidden}, ParamFormat::kFp32));
    specs.push_back(spec(prefix + "gate", {kFfn, kHidden}));
    specs.push_back(spec(prefix + "up", {kFfn, kHidden}));
    specs.push_back(spec(prefix + "down", {kHidden, kFfn}));
  }
  specs.push_back(spec("norm", {kHidden}, ParamFormat::kFp32));
  specs.push_back(spec("head", {kVocab, kHidden}, ParamFormat::kBf16));
  return specs;
}

TEST(Layout, Of405BillionParamsAt16384RanksAddsUpInUnderASecond) {
  constexpr std::int64_t kRanks = 16'384;
  const std::vector<ParamSpec> specs = specs_of_405b();
  const auto start = std::chrono::steady_clock::now();
  const Layout layout(specs, options_for(kRanks));
  const CutShare share = layout.cut_share();
  const std::vector<Segment> last = layout.segments(kRanks - 1);
  const std::uint64_t digest = layout.digest();
  const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
#if defined(NDEBUG) && !defined(MXOPT_SANITIZED)
  EXPECT_LT(elapsed.count(), 1.0);
#endif
  EXPECT_NE(digest, 0u);

  std::int64_t logical = 0, mxfp8 = 0, bf16 = 0, fp32 = 0;
  for (const ParamLayout& param : layout.params()) {
    logical += param.elems();
    (param.family.format == ParamFormat::kMxfp8  ? mxfp8
     : param.family.format == ParamFormat::kBf16 ? bf16
                                                 : fp32) += param.elems();
  }
  EXPECT_EQ(logical, 405'853'388'800);
  // 128 divides every size here, so padding is at the ends of buckets only.
  const std::int64_t padding = 128 * kRanks * count_of_buckets(layout);
  const ByteCounts bytes = layout.byte_counts(DType::kFp32);
  EXPECT_GE(bytes.row_plane, mxfp8);
  EXPECT_LT(bytes.row_plane, mxfp8 + padding);
  EXPECT_EQ(bytes.column_plane, bytes.row_plane);
  EXPECT_EQ(bytes.scales, 2 * mxfp8 / 32);
  EXPECT_GE(bytes.bf16_values, 2 * bf16);
  EXPECT_LT(bytes.bf16_values, 2 * (bf16 + padding));
  EXPECT_GE(bytes.fp32_values, 4 * fp32);
  EXPECT_LT(bytes.fp32_values, 4 * (fp32 + padding));
  const std::int64_t all_elems = bytes.row_plane + bytes.bf16_values / 2 + bytes.fp32_values / 4;
  EXPECT_EQ(bytes.gradients, 4 * all_elems);
  EXPECT_EQ(bytes.master * kRanks, 4 * all_elems);
  EXPECT_EQ(bytes.exp_avg, bytes.master);
  EXPECT_EQ(bytes.exp_avg_sq, bytes.master);

  std::int64_t owned = 0;
  for (std::int64_t rank = 0; rank < kRanks; ++rank) {
    for (const Segment& segment : layout.segments(rank)) owned += segment.elems;
  }
  EXPECT_EQ(owned, logical);
  EXPECT_FALSE(last.empty() && share.cut_bands == 0);
  EXPECT_GT(share.mean, 0.0);
  EXPECT_LT(share.mean, 0.25);  // shards of 4e6 elements, bands of 0.5e6 to 1.7e6
  EXPECT_LE(share.worst_rank, 1.0);
}

TEST(Layout, TextOfAShape) {
  EXPECT_EQ(shape_text(std::vector<std::int64_t>{32, 64}), "32x64");
  EXPECT_EQ(shape_text(std::vector<std::int64_t>{7}), "7");
  EXPECT_EQ(shape_text({}), "");
}

}  // namespace
}  // namespace mxopt
