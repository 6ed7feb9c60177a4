#include "mxopt/optimizer/param_sync.h"

#include <algorithm>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "support/faulty_communicator.h"
#include "support/optimizer_fixture.h"

#include "mxopt/collectives/traced_communicator.h"

namespace mxopt {
namespace {

using test::FaultKind;
using test::FaultyCommunicator;
using test::run_ranks;
using test::spec;

std::vector<ParamSpec> specs_of_all_families() {
  std::vector<ParamSpec> specs = {
      spec("both", {64, 64}, ParamFormat::kMxfp8, Storage::kBoth),
      spec("row", {32, 64}, ParamFormat::kMxfp8, Storage::kRow), spec("bf16", {33}, ParamFormat::kBf16),
      spec("fp32", {7}, ParamFormat::kFp32), spec("frozen", {32, 32}, ParamFormat::kMxfp8, Storage::kBoth)};
  specs[4].frozen = true;
  return specs;
}

struct Rank {
  Rank(Communicator& comm, GatherFormat format, ScaleLayout scale_layout = ScaleLayout::kCompact)
      : layout(specs_of_all_families(), {.world_size = comm.size(), .bucket_elems = 128}),
        storage(layout, DType::kFp32, 5, Device(), default_allocator(Device())),
        sync(layout, storage, comm, format, {}, {}, scale_layout, default_allocator(Device())) {}

  int id(const char* name) const { return layout.find(name); }

  void share(SyncScope scope) {
    sync.gather_rows(scope, StreamRef());
    sync.reduce_scales(scope, StreamRef());
    sync.gather_columns(scope, StreamRef());
  }

  Layout layout;
  ParamStorage storage;
  ParamSync sync;
};

std::vector<std::string> signatures_of(GatherFormat format, SyncScope scope) {
  SelfCommunicator self;
  TracedCommunicator traced(self);
  traced.record_signatures();
  Rank rank(traced, format);
  rank.share(scope);
  return traced.signatures();
}

TEST(ParamSync, QuantizedGathersRowsThenReducesThenGathersColumnsLastBucketsFirst) {
  const std::vector<std::string> expected = {
      "all_gather(uint8 x 4096, planes)",      "all_gather(uint8 x 2048, planes)",
      "all_gather(bf16 x 128, plain)",         "all_gather(fp32 x 128, plain)",
      "all_reduce(max, uint8 x 1664, scales)", "all_gather(uint8 x 4096, planes)"};
  // Head 128; both: 128 * 4 row and 4 * 128 column scales; row: 128 * 4 row scales.
  EXPECT_EQ(signatures_of(GatherFormat::kQuantized, SyncScope::kTrainable), expected);
}

TEST(ParamSync, EverythingIncludesTheFrozenParams) {
  const std::vector<std::string> all = signatures_of(GatherFormat::kQuantized, SyncScope::kAll);
  ASSERT_EQ(all.size(), 8u);
  EXPECT_EQ(all[4], "all_gather(uint8 x 1024, planes)");
  EXPECT_EQ(all[5], "all_reduce(max, uint8 x 2688, scales)");
  EXPECT_EQ(all[7], "all_gather(uint8 x 1024, planes)");
}

TEST(ParamSync, Bf16GathersNoPlaneAndReducesOnlyTheStatus) {
  const std::vector<std::string> expected = {"all_gather(bf16 x 4096, high precision)",
                                             "all_gather(bf16 x 2048, high precision)",
                                             "all_gather(bf16 x 128, plain)", "all_gather(fp32 x 128, plain)",
                                             "all_reduce(max, uint8 x 128, scales)"};
  EXPECT_EQ(signatures_of(GatherFormat::kBf16, SyncScope::kTrainable), expected);
}

TEST(ParamSync, PlanesPointIntoTheArenasAndAbsentOnesAreNull) {
  SelfCommunicator comm;
  Rank rank(comm, GatherFormat::kQuantized, ScaleLayout::kGemm);
  const MxView both = rank.sync.planes(rank.id("both"));
  EXPECT_EQ(both.rows, 64);
  EXPECT_EQ(both.cols, 64);
  EXPECT_EQ(both.scale_layout, ScaleLayout::kGemm);
  EXPECT_NE(both.row_data, nullptr);
  EXPECT_NE(both.column_data, nullptr);
  EXPECT_NE(both.column_scales, nullptr);
  const MxView row = rank.sync.planes(rank.id("row"));
  EXPECT_NE(row.row_data, nullptr);
  EXPECT_EQ(row.column_data, nullptr);
  EXPECT_EQ(row.column_scales, nullptr);
  EXPECT_EQ(rank.sync.planes(rank.id("bf16")).rows, 0);
  EXPECT_EQ(rank.sync.planes(rank.id("bf16")).row_data, nullptr);
}

TEST(ParamSync, StagingExistsForMxfp8ParamsOfTheBf16FormatOnly) {
  SelfCommunicator comm;
  Rank quantized(comm, GatherFormat::kQuantized);
  EXPECT_EQ(quantized.sync.staging_bytes(), 0);
  EXPECT_EQ(quantized.sync.staging(quantized.id("both")), nullptr);
  Rank bf16(comm, GatherFormat::kBf16);
  EXPECT_GE(bf16.sync.staging_bytes(), 2 * (4096 + 2048 + 1024));
  EXPECT_NE(bf16.sync.staging(bf16.id("both")), nullptr);
  EXPECT_NE(bf16.sync.staging(bf16.id("frozen")), nullptr);
  EXPECT_EQ(bf16.sync.staging(bf16.id("bf16")), nullptr);
  EXPECT_EQ(bf16.sync.staging(bf16.id("fp32")), nullptr);
}

TEST(ParamSync, ScalesOfFrozenParamsAreOnlyClearedWithAll) {
  SelfCommunicator comm;
  Rank rank(comm, GatherFormat::kQuantized);
  std::uint8_t* const frozen = rank.sync.planes(rank.id("frozen")).row_scales;
  std::uint8_t* const trained = rank.sync.planes(rank.id("row")).row_scales;
  *frozen = *trained = 9;
  std::ranges::fill(rank.sync.scales_to_clear(SyncScope::kTrainable), std::uint8_t{0});
  EXPECT_EQ(*frozen, 9);
  EXPECT_EQ(*trained, 0);
  std::ranges::fill(rank.sync.scales_to_clear(SyncScope::kAll), std::uint8_t{0});
  EXPECT_EQ(*frozen, 0);
}

TEST(ParamSync, StatusIsTheMaximumOverRanksAndOpenClearsIt) {
  run_ranks(3, [](Communicator& comm) {
    Rank rank(comm, GatherFormat::kQuantized);
    rank.sync.open(StreamRef());
    rank.sync.status()[1] = static_cast<std::uint8_t>(comm.rank());
    rank.share(SyncScope::kTrainable);
    EXPECT_EQ(rank.sync.status()[1], 2);
    EXPECT_EQ(rank.sync.status()[0], 0);
    rank.sync.open(StreamRef());
    EXPECT_EQ(rank.sync.status()[1], 0);
  });
}

TEST(ParamSync, AWaitStampsTheVersionOfItsPlane) {
  SelfCommunicator comm;
  Rank rank(comm, GatherFormat::kQuantized);
  const int both = rank.id("both");
  EXPECT_EQ(rank.sync.version(both, Plane::kRow), 0);
  rank.share(SyncScope::kAll);
  EXPECT_EQ(rank.sync.version(both, Plane::kRow), 1);
  EXPECT_EQ(rank.sync.version(both, Plane::kColumn), 1);
  EXPECT_EQ(rank.sync.waited_version(both, Plane::kRow), 0);
  rank.sync.wait(both, Plane::kRow, StreamRef());
  EXPECT_EQ(rank.sync.waited_version(both, Plane::kRow), 1);
  EXPECT_EQ(rank.sync.waited_version(both, Plane::kColumn), 0);
  rank.sync.wait(both, Plane::kColumn, StreamRef());
  EXPECT_EQ(rank.sync.waited_version(both, Plane::kColumn), 1);
}

TEST(ParamSync, APlaneWhoseGatherFailedIsNeverGivenOut) {
  SelfCommunicator self;
  FaultyCommunicator comm(self, {{FaultKind::kFailWait, Traffic::kPlanes, 0, 0}});
  Rank rank(comm, GatherFormat::kQuantized);
  rank.share(SyncScope::kTrainable);
  const int both = rank.id("both");
  for (int attempt = 0; attempt < 3; ++attempt) {
    EXPECT_THROW(rank.sync.wait(both, Plane::kRow, StreamRef()), PeerError) << "attempt " << attempt;
    EXPECT_EQ(rank.sync.waited_version(both, Plane::kRow), 0);
  }
  rank.sync.wait(rank.id("row"), Plane::kRow, StreamRef());
}

}  // namespace
}  // namespace mxopt
