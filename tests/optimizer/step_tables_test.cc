#include "mxopt/optimizer/step_tables.h"

#include <vector>

#include <gtest/gtest.h>

#include "support/optimizer_fixture.h"

namespace mxopt {
namespace {

/// Layout and memory of one rank of three, without a communicator of three: nothing is sent.
struct Rank {
  explicit Rank(int rank_, GatherFormat format = GatherFormat::kQuantized)
      : rank(rank_),
        layout(test::mixed_specs(), options()),
        storage(layout, DType::kBf16, 64, Device(), default_allocator(Device())),
        sync(layout, storage, self, format, {}, {}, ScaleLayout::kCompact, default_allocator(Device())),
        groups(layout.params().size(), 0) {
    groups.front() = 5;
  }
  static LayoutOptions options() {
    LayoutOptions options;
    options.world_size = 3;
    options.bucket_elems = 4000;
    return options;
  }
  StepTables tables() const { return make_step_tables(layout, storage, sync, groups, rank); }

  int rank;
  SelfCommunicator self;
  Layout layout;
  ParamStorage storage;
  ParamSync sync;
  std::vector<int> groups;
};

TEST(StepTables, HaveTheRanksSegmentsAndPointIntoItsArenas) {
  for (int r = 0; r < 3; ++r) {
    const Rank rank(r);
    const StepTables tables = rank.tables();
    const std::vector<Segment> segments = rank.layout.segments(r);
    ASSERT_EQ(tables.segments.size(), segments.size());
    EXPECT_EQ(tables.grad_dtype, DType::kBf16);
    for (std::size_t i = 0; i < segments.size(); ++i) {
      const Segment& segment = segments[i];
      const SegmentRow& row = tables.segments[i];
      const ParamLayout& param = rank.layout.param(segment.param);
      SCOPED_TRACE(param.name);
      EXPECT_EQ(row.elems, segment.elems);
      EXPECT_EQ(row.param_begin, segment.param_begin);
      EXPECT_EQ(row.param_begin % kAlignElems, 0);
      EXPECT_EQ(row.group, segment.param == 0 ? 5 : 0);
      EXPECT_EQ(row.norm, 0);
      EXPECT_EQ(row.param, segment.param);
      const float* const shard = rank.storage.master(segment.bucket);
      EXPECT_GE(row.master, shard);
      EXPECT_LE(row.master + row.elems, shard + rank.layout.shard_elems(segment.bucket));
      EXPECT_EQ(row.exp_avg == nullptr, param.family.frozen);
      EXPECT_EQ(row.grad == nullptr, param.family.frozen);
      EXPECT_EQ(row.planes.rows != 0, param.family.format == ParamFormat::kMxfp8);
      EXPECT_EQ(row.values != nullptr, param.family.format != ParamFormat::kMxfp8);
      EXPECT_EQ(row.status, rank.storage.scale_head() + segment.param);
    }
  }
}

TEST(StepTables, RowsHaveTheNormOfTheirParam) {
  const Rank rank(1);
  std::vector<int> norm_of;
  for (std::size_t p = 0; p < rank.groups.size(); ++p) norm_of.push_back(static_cast<int>(p) % 4 - 1);
  const StepTables tables = make_step_tables(rank.layout, rank.storage, rank.sync, rank.groups, 1, norm_of);
  for (const SegmentRow& row : tables.segments) EXPECT_EQ(row.norm, row.param % 4 - 1);
}

TEST(StepTables, TheBf16FormatWritesMxfp8ParamsToTheStaging) {
  const Rank rank(0, GatherFormat::kBf16);
  for (const SegmentRow& row : rank.tables().segments) {
    EXPECT_EQ(row.planes.rows, 0);
    EXPECT_NE(row.values, nullptr);
  }
}

}  // namespace
}  // namespace mxopt
