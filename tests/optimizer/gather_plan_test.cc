#include "mxopt/optimizer/gather_plan.h"

#include <atomic>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "support/faulty_communicator.h"
#include "support/optimizer_fixture.h"
#include "support/thrown_message.h"

namespace mxopt {
namespace {

using test::contains;
using test::spec;
using test::thrown_message;

/// 1 GB/s of memory, so that bytes are nanoseconds.
GatherCosts costs(std::int64_t world_size, double update, double row, double column) {
  return {world_size, update, row, column};
}

TEST(GatherPlan, StoresAreDirectWhereTheLinkNeedsNoLongerThanTheUpdate) {
  const CopyRates rates = {1e9, 1e9};
  const GatherPlan all = cheaper_gather(costs(2, 30e6, 1e6, 29e6), rates);
  EXPECT_TRUE(all.is_row_direct);
  EXPECT_TRUE(all.is_column_direct);
  const GatherPlan rows = cheaper_gather(costs(2, 30e6, 1e6, 29.1e6), rates);
  EXPECT_TRUE(rows.is_row_direct);
  EXPECT_FALSE(rows.is_column_direct);
  const GatherPlan none = cheaper_gather(costs(2, 30e6, 30.1e6, 0), rates);
  EXPECT_FALSE(none.is_row_direct);
  EXPECT_FALSE(none.is_column_direct);
}

TEST(GatherPlan, EveryPeerCostsTheLinkOnceMore) {
  const CopyRates rates = {1e9, 1e9};
  EXPECT_TRUE(cheaper_gather(costs(4, 30e6, 10e6, 0), rates).is_row_direct);
  EXPECT_FALSE(cheaper_gather(costs(5, 30e6, 10e6, 0), rates).is_row_direct);
}

TEST(GatherPlan, SaysWhatItWeighed) {
  const GatherPlan plan = cheaper_gather(costs(3, 40e6, 5e6, 6e6), {2e9, 4e9});
  EXPECT_EQ(plan.text(),
            "row planes direct, column planes collective (an update takes 10 ms of memory at 4 GB/s; storing "
            "to 2 peers "
            "takes 5 ms of the link at 2 GB/s for row planes, 11 ms for all)");
}

TEST(GatherPlan, IsCollectiveWhereThereIsNothingToWeigh) {
  EXPECT_EQ(cheaper_gather(costs(1, 1, 1, 1), {1, 1}).text(), "collective (one rank)");
  EXPECT_EQ(cheaper_gather(costs(2, 1, 1, 1), {}).text(),
            "collective (the transport does not know the rate of its links)");
}

TEST(GatherPlan, CostsAreThoseOfOneRanksTrainableBytes) {
  LayoutOptions options;
  options.world_size = 2;
  std::vector<ParamSpec> specs = {spec("both", {128, 128}, ParamFormat::kMxfp8, Storage::kBoth),
                                  spec("row", {128, 128}, ParamFormat::kMxfp8, Storage::kRow),
                                  spec("plain", {256}, ParamFormat::kBf16),
                                  spec("scalars", {256}, ParamFormat::kFp32),
                                  spec("frozen", {128, 128}, ParamFormat::kMxfp8, Storage::kBoth)};
  specs.back().frozen = true;
  const Layout layout(specs, options);
  const GatherCosts costs = gather_costs(layout, DType::kBf16);
  const double matrix = 128 * 128;
  const double scales = 3 * matrix / 32;  // two row planes and a column plane
  EXPECT_EQ(costs.world_size, 2);
  EXPECT_EQ(costs.row_bytes, (2 * matrix + scales + 256 * 2 + 256 * 4) / 2);
  EXPECT_EQ(costs.column_bytes, matrix / 2);
  EXPECT_EQ(costs.update_bytes, (2 * matrix + 512) * 26 / 2 + costs.row_bytes + costs.column_bytes);
}

std::string gather_of(Communicator& comm, GatherChoice choice,
                      GatherFormat format = GatherFormat::kQuantized) {
  Config config;
  config.parallel.gather = choice;
  config.parallel.gather_format = format;
  return DistributedAdam(test::mixed_specs(), config, comm).construction().gather;
}

TEST(GatherPlan, WithoutWindowsAutoIsCollectiveAndSaysWhy) {
  test::run_ranks(2, [](Communicator& threads) {
    test::FaultyCommunicator comm(threads);
    comm.refuse_windows("there are none here");
    comm.set_copy_rates({1e18, 1, ""});  // so that kAuto tries
    EXPECT_EQ(gather_of(comm, GatherChoice::kAuto), "collective (there are none here)");
    EXPECT_EQ(gather_of(comm, GatherChoice::kCollective), "collective (as configured)");
  });
}

TEST(GatherPlan, WithoutWindowsDirectIsAnErrorOnEveryRank) {
  std::atomic<int> refused = 0;
  test::run_ranks(3, [&](Communicator& threads) {
    test::FaultyCommunicator comm(threads);
    comm.refuse_windows("there are none here");
    comm.set_copy_rates({1e18, 1, ""});  // so that kAuto tries
    const std::string text = thrown_message<ConfigError>([&] { gather_of(comm, GatherChoice::kDirect); });
    refused +=
        contains(
            text,
            "`parallel.gather` is direct, but the ranks can not store into each other's memory: there are "
            "none here; allowed: auto, collective")
            ? 1
            : 0;
  });
  EXPECT_EQ(refused, 3);
}

TEST(GatherPlan, EveryReasonIsSaid) {
  test::run_ranks(2, [](Communicator& comm) {
    EXPECT_EQ(gather_of(comm, GatherChoice::kDirect), "direct (as configured)");
    EXPECT_EQ(gather_of(comm, GatherChoice::kAuto),
              "collective (the transport does not know the rate of its links)");
    EXPECT_EQ(gather_of(comm, GatherChoice::kAuto, GatherFormat::kBf16),
              "collective (parallel.gather_format is bf16)");
  });
  SelfCommunicator self;
  EXPECT_EQ(gather_of(self, GatherChoice::kAuto), "collective (one rank)");
  EXPECT_EQ(gather_of(self, GatherChoice::kDirect), "direct (as configured)");
}

TEST(GatherPlan, DirectStoresAreNotForTheBf16Format) {
  SelfCommunicator self;
  const std::string text =
      thrown_message<ConfigError>([&] { gather_of(self, GatherChoice::kDirect, GatherFormat::kBf16); });
  EXPECT_TRUE(
      contains(text,
               "`parallel.gather` is direct; allowed: auto or collective when `parallel.gather_format` is "
               "bf16"))
      << text;
}

}  // namespace
}  // namespace mxopt
