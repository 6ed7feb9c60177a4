#include "mxopt/params/storage.h"

#include <algorithm>
#include <vector>

#include <gtest/gtest.h>

#include "support/thrown_message.h"

namespace mxopt {
namespace {

using test::contains;
using test::thrown_message;

constexpr Device kHostDevice{DeviceKind::kHost, 0};

ParamSpec spec(std::string name, std::vector<std::int64_t> shape, ParamFormat format = ParamFormat::kMxfp8,
               Storage storage = Storage::kBoth) {
  ParamSpec result;
  result.name = std::move(name);
  result.shape = std::move(shape);
  result.format = format;
  result.storage = storage;
  return result;
}

LayoutOptions options_for(std::int64_t world_size, std::int64_t bucket_elems = 0) {
  LayoutOptions options;
  options.world_size = world_size;
  options.bucket_elems = bucket_elems;
  return options;
}

std::vector<ParamSpec> mixed_specs() {
  std::vector<ParamSpec> specs = {spec("embedding", {64, 96}, ParamFormat::kBf16),
                                  spec("a", {64, 64}),
                                  spec("b", {32, 96}, ParamFormat::kMxfp8, Storage::kRow),
                                  spec("norm", {33}, ParamFormat::kFp32),
                                  spec("frozen", {32, 32}),
                                  spec("c", {96, 32}),
                                  spec("empty", {0, 64}),
                                  spec("frozen_bias", {5}, ParamFormat::kFp32)};
  specs[4].frozen = true;
  specs[7].frozen = true;
  return specs;
}

/// Counts what was asked for.
class CountingAllocator final : public Allocator {
 public:
  void* allocate(std::int64_t bytes, std::int64_t alignment_bytes) override {
    sizes.push_back(bytes);
    return base_->allocate(bytes, alignment_bytes);
  }
  void deallocate(void* data, std::int64_t bytes) noexcept override { base_->deallocate(data, bytes); }

  std::vector<std::int64_t> sizes;

 private:
  std::shared_ptr<Allocator> base_ = default_allocator(kHostDevice);
};

struct Range {
  const std::uint8_t* begin;
  std::int64_t bytes;
};

/// Everything that one rank's storage hands out, without empty ranges.
std::vector<Range> all_ranges(const Layout& layout, const ParamStorage& storage, std::int64_t head_bytes) {
  std::vector<Range> ranges;
  const auto add = [&](const void* data, std::int64_t bytes) {
    if (bytes > 0) ranges.push_back({static_cast<const std::uint8_t*>(data), bytes});
  };
  for (int b = 0; b < static_cast<int>(layout.buckets().size()); ++b) {
    const std::int64_t shard_bytes = layout.shard_elems(b) * 4;
    for (const TypedSpan& span :
         {storage.row_plane(b), storage.column_plane(b), storage.values(b), storage.gradients(b)}) {
      add(span.data, span.bytes());
    }
    add(storage.master(b), shard_bytes);
    if (storage.exp_avg(b) != nullptr) add(storage.exp_avg(b), shard_bytes);
    if (storage.exp_avg_sq(b) != nullptr) add(storage.exp_avg_sq(b), shard_bytes);
  }
  add(storage.scales(), layout.scale_bytes());
  add(storage.scale_head(), head_bytes);
  return ranges;
}

TEST(ParamStorage, ViewsAreDisjointZeroedAndFillTheAllocations) {
  for (std::int64_t world_size : {1, 2, 3, 7}) {
    for (DType grad_dtype : {DType::kFp32, DType::kBf16}) {
      for (std::int64_t bucket_elems : {1, 5000, 0}) {
        const Layout layout(mixed_specs(), options_for(world_size, bucket_elems));
        const auto allocator = std::make_shared<CountingAllocator>();
        const std::int64_t head_bytes = 256;
        const ParamStorage storage(layout, grad_dtype, head_bytes, kHostDevice, allocator);
        std::vector<Range> ranges = all_ranges(layout, storage, head_bytes);
        std::ranges::sort(ranges, {}, &Range::begin);
        std::int64_t total = 0;
        for (std::size_t i = 0; i < ranges.size(); ++i) {
          total += ranges[i].bytes;
          if (i > 0) {
            EXPECT_LE(ranges[i - 1].begin + ranges[i - 1].bytes, ranges[i].begin);
          }
          EXPECT_TRUE(std::all_of(ranges[i].begin, ranges[i].begin + ranges[i].bytes,
                                  [](std::uint8_t byte) { return byte == 0; }));
        }
        std::int64_t allocated = 0;
        for (std::int64_t size : allocator->sizes) allocated += size;
        EXPECT_EQ(total, allocated);
        EXPECT_EQ(allocated, layout.byte_counts(grad_dtype).total() + head_bytes);
      }
    }
  }
}

TEST(ParamStorage, HasOnlyWhatTheFamilyOfABucketHas) {
  const Layout layout(mixed_specs(), options_for(2));
  const ParamStorage storage(layout, DType::kBf16, 0, kHostDevice, default_allocator(kHostDevice));
  for (int b = 0; b < static_cast<int>(layout.buckets().size()); ++b) {
    const Bucket& bucket = layout.bucket(b);
    const bool mxfp8 = bucket.family.format == ParamFormat::kMxfp8;
    EXPECT_EQ(storage.row_plane(b).elems, mxfp8 ? bucket.elems : 0);
    EXPECT_EQ(storage.column_plane(b).elems, bucket.family.has_column() ? bucket.elems : 0);
    EXPECT_EQ(storage.values(b).elems, mxfp8 ? 0 : bucket.elems);
    if (!mxfp8) {
      EXPECT_EQ(storage.values(b).dtype,
                bucket.family.format == ParamFormat::kBf16 ? DType::kBf16 : DType::kFp32);
    }
    EXPECT_EQ(storage.gradients(b).dtype, DType::kBf16);
    EXPECT_EQ(storage.gradients(b).elems, bucket.family.frozen ? 0 : bucket.elems);
    EXPECT_EQ(storage.exp_avg(b) == nullptr, bucket.family.frozen);
    EXPECT_EQ(storage.exp_avg_sq(b) == nullptr, bucket.family.frozen);
    EXPECT_NE(storage.master(b), nullptr);
  }
}

TEST(ParamStorage, ScaleHeadIsRightBeforeTheScalesAndKeepsThemAligned) {
  const Layout layout(mixed_specs(), options_for(1));
  for (const auto& [asked, rounded] : {std::pair{0, 0}, {1, 128}, {128, 128}, {129, 256}}) {
    const ParamStorage storage(layout, DType::kFp32, asked, kHostDevice, default_allocator(kHostDevice));
    EXPECT_EQ(storage.scale_head_bytes(), rounded);
    EXPECT_EQ(storage.scale_head() + rounded, storage.scales());
  }
}

TEST(ParamStorage, ARowOnlyParamCostsItsPlaneAndScalesAndNoColumn) {
  const Layout layout({spec("w", {64, 64}, ParamFormat::kMxfp8, Storage::kRow)}, options_for(1));
  const ByteCounts bytes = layout.byte_counts(DType::kFp32);
  EXPECT_EQ(bytes.row_plane, 4096);
  EXPECT_EQ(bytes.column_plane, 0);
  EXPECT_EQ(bytes.scales, 128 * 4);  // 64x2 scales in the padded shape
  EXPECT_EQ(bytes.bf16_values + bytes.fp32_values, 0);
  const ParamStorage storage(layout, DType::kFp32, 0, kHostDevice, default_allocator(kHostDevice));
  EXPECT_EQ(storage.column_plane(0).data, nullptr);
}

TEST(ParamStorage, EveryPointerIsAlignedWhateverSizeCameBefore) {
  for (std::int64_t world_size : {1, 2, 3, 7}) {
    const std::vector<ParamSpec> specs = {spec("bias33", {33}, ParamFormat::kBf16), spec("w64", {64, 64}),
                                          spec("bias1", {1}, ParamFormat::kBf16), spec("w32", {32, 32})};
    const Layout layout(specs, options_for(world_size));
    const ParamStorage storage(layout, DType::kBf16, 0, kHostDevice, default_allocator(kHostDevice));
    const auto expect_aligned = [](const void* pointer) {
      EXPECT_EQ(reinterpret_cast<std::uintptr_t>(pointer) % 128, 0u);
    };
    for (const ParamLayout& param : layout.params()) {
      const auto at = [&](const TypedSpan& span) {
        if (span.elems > 0) expect_aligned(span.sub(param.bucket_begin, param.elems()).data);
      };
      at(storage.row_plane(param.bucket));
      at(storage.column_plane(param.bucket));
      at(storage.values(param.bucket));
      at(storage.gradients(param.bucket));
      expect_aligned(storage.scales() + param.row_scales_begin);
      expect_aligned(storage.scales() + param.column_scales_begin);
    }
    for (int b = 0; b < static_cast<int>(layout.buckets().size()); ++b) {
      expect_aligned(storage.master(b));
      expect_aligned(storage.exp_avg(b));
      expect_aligned(storage.exp_avg_sq(b));
      for (std::int64_t rank = 0; rank < world_size; ++rank) {
        EXPECT_EQ(layout.shard_begin(b, rank) % kAlignElems, 0);
      }
    }
  }
}

TEST(ParamStorage, AddressesStayWhenTheStorageIsMoved) {
  const Layout layout(mixed_specs(), options_for(2));
  ParamStorage first(layout, DType::kFp32, 0, kHostDevice, default_allocator(kHostDevice));
  const std::vector<Range> before = all_ranges(layout, first, 0);
  const ParamStorage second = std::move(first);
  const std::vector<Range> after = all_ranges(layout, second, 0);
  ASSERT_EQ(before.size(), after.size());
  for (std::size_t i = 0; i < before.size(); ++i) EXPECT_EQ(before[i].begin, after[i].begin);
}

TEST(ParamStorage, AnEmptyListNeedsNoMemory) {
  const Layout layout({}, options_for(4));
  const auto allocator = std::make_shared<CountingAllocator>();
  const ParamStorage storage(layout, DType::kFp32, 0, kHostDevice, allocator);
  EXPECT_TRUE(allocator->sizes.empty());
  EXPECT_EQ(storage.scales(), nullptr);
}

TEST(ParamStorage, RefusesOtherGradientTypesByName) {
  const Layout layout({}, options_for(1));
  const std::string text = thrown_message<ContractError>(
      [&] { ParamStorage(layout, DType::kInt64, 0, kHostDevice, default_allocator(kHostDevice)); });
  EXPECT_TRUE(contains(text, "gradients are fp32 or bf16, not int64"));
}

}  // namespace
}  // namespace mxopt
