#include "mxopt/optimizer/gather_plan.h"

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include <gtest/gtest.h>

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

/// Forwards to a group of threads, as a transport without windows would answer.
class NoWindows final : public Communicator {
 public:
  explicit NoWindows(Communicator& inner) : inner_(inner) {}
  int rank() const override { return inner_.rank(); }
  int size() const override { return inner_.size(); }
  Device device() const override { return inner_.device(); }
  std::string describe() const override { return inner_.describe(); }
  void group_begin() override { inner_.group_begin(); }
  void group_end() override { inner_.group_end(); }
  std::unique_ptr<Communicator> split(int color, int key) override { return inner_.split(color, key); }
  void abort(const std::string& reason) noexcept override { inner_.abort(reason); }
  Health health() override { return inner_.health(); }
  std::shared_ptr<Allocator> window_allocator() override { return nullptr; }
  PeerWindow open_window(const Buffer&) override { return {{}, "there are none here", nullptr}; }
  CopyRates measure_copy_rates() override { return {1e18, 1}; }  // so that kAuto tries

 protected:
  Work do_all_reduce(const Call& call, void* buffer) override {
    return inner_.all_reduce({buffer, call.dtype, call.elems}, call.op, call.traffic, call.stream);
  }
  Work do_reduce_scatter(const Call& call, void* shard, void* input) override {
    return inner_.reduce_scatter({shard, call.dtype, call.elems}, {input, call.dtype, call.elems * size()},
                                 call.op, call.traffic, call.stream);
  }
  Work do_all_gather(const Call& call, void* output, const void* shard) override {
    return inner_.all_gather({output, call.dtype, call.elems * size()}, {shard, call.dtype, call.elems},
                             call.traffic, call.stream);
  }
  Work do_all_to_all(const Call& call, void* output, const void* input) override {
    return inner_.all_to_all({output, call.dtype, call.elems * size()},
                             {input, call.dtype, call.elems * size()}, call.traffic, call.stream);
  }
  Work do_broadcast(const Call& call, void* buffer) override {
    return inner_.broadcast({buffer, call.dtype, call.elems}, call.root, call.traffic, call.stream);
  }
  void do_barrier(const Call&) override { inner_.barrier(); }

 private:
  Communicator& inner_;
};

std::string gather_of(Communicator& comm, GatherChoice choice,
                      GatherFormat format = GatherFormat::kQuantized) {
  Config config;
  config.parallel.gather = choice;
  config.parallel.gather_format = format;
  return DistributedAdam(test::mixed_specs(), config, comm).construction().gather;
}

TEST(GatherPlan, WithoutWindowsAutoIsCollectiveAndSaysWhy) {
  test::run_ranks(2, [](Communicator& threads) {
    NoWindows comm(threads);
    EXPECT_EQ(gather_of(comm, GatherChoice::kAuto), "collective (there are none here)");
    EXPECT_EQ(gather_of(comm, GatherChoice::kCollective), "collective (as configured)");
  });
}

TEST(GatherPlan, WithoutWindowsDirectIsAnErrorOnEveryRank) {
  std::atomic<int> refused = 0;
  test::run_ranks(3, [&](Communicator& threads) {
    NoWindows comm(threads);
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
