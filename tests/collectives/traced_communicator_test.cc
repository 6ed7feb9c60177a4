#include "mxopt/collectives/traced_communicator.h"

#include <vector>

#include <gtest/gtest.h>

#include "communicator_conformance.h"
#include "support/run_ranks.h"

namespace mxopt {
namespace {

using test::communicator_conformance;
using test::ConformanceCase;

class TracedConformance : public ::testing::TestWithParam<ConformanceCase> {};

TEST_P(TracedConformance, Holds) {
  test::run_ranks(3, [](Communicator& inner) {
    TracedCommunicator traced(inner);
    GetParam().check(traced);
  });
}

INSTANTIATE_TEST_SUITE_P(Communicator, TracedConformance, ::testing::ValuesIn(communicator_conformance()),
                         [](const auto& tested) { return tested.param.name; });

TEST(TracedCommunicator, CountsOperationsAndFullBufferBytes) {
  test::run_ranks(3, [](Communicator& inner) {
    TracedCommunicator comm(inner);
    std::vector<float> shard(10);
    std::vector<float> whole(30);
    std::vector<std::uint8_t> codes(7);
    comm.reduce_scatter(std::span(shard), std::span(whole), ReduceOp::kAvg, Traffic::kGradient).wait();
    comm.reduce_scatter(std::span(shard), std::span(whole), ReduceOp::kAvg, Traffic::kGradient).wait();
    comm.all_gather(std::span(whole), std::span(shard), Traffic::kPlanes).wait();
    comm.all_reduce(std::span(codes), ReduceOp::kMax, Traffic::kScales).wait();
    comm.broadcast(std::span(codes), 1, Traffic::kScales).wait();
    comm.barrier();

    EXPECT_EQ(comm.counts(Traffic::kGradient).operations, 2);
    EXPECT_EQ(comm.counts(Traffic::kGradient).bytes, 2 * 30 * 4);
    EXPECT_EQ(comm.counts(Traffic::kPlanes, "all_gather").bytes, 30 * 4);
    EXPECT_EQ(comm.counts(Traffic::kPlanes, "all_reduce").operations, 0);
    EXPECT_EQ(comm.counts(Traffic::kScales).operations, 2);
    EXPECT_EQ(comm.counts(Traffic::kScales, "all_reduce").operations, 1);
    EXPECT_EQ(comm.counts(Traffic::kScales, "broadcast").bytes, 7);
    EXPECT_EQ(comm.counts(Traffic::kControl, "barrier").operations, 1);
    EXPECT_EQ(comm.counts(Traffic::kControl).bytes, 0);
    EXPECT_EQ(comm.total().operations, 6);
    EXPECT_EQ(comm.total().bytes, 3 * 120 + 14);

    comm.reset();
    EXPECT_EQ(comm.total().operations, 0);
    EXPECT_TRUE(comm.signatures().empty()) << "not asked to record";
  });
}

TEST(TracedCommunicator, RecordsSignaturesInOrder) {
  test::run_ranks(2, [](Communicator& inner) {
    TracedCommunicator comm(inner);
    comm.record_signatures();
    std::vector<Bf16> shard(4);
    std::vector<Bf16> whole(8);
    comm.reduce_scatter(std::span(shard), std::span(whole), ReduceOp::kAvg, Traffic::kGradient).wait();
    comm.broadcast(std::span(whole), 1, Traffic::kHighPrecision).wait();
    comm.all_gather(std::span(whole), std::span(shard), Traffic::kPlain).wait();
    comm.barrier();
    const std::vector<std::string> expected = {"reduce_scatter(avg, bf16 x 4, gradient)",
                                               "broadcast(root 1, bf16 x 8, high precision)",
                                               "all_gather(bf16 x 4, plain)", "barrier()"};
    EXPECT_EQ(comm.signatures(), expected);
    comm.reset();
    comm.barrier();
    EXPECT_EQ(comm.signatures().size(), 1u);
  });
}

TEST(TracedCommunicator, SplitGroupsAddToTheSameCounts) {
  test::run_ranks(3, [](Communicator& inner) {
    TracedCommunicator comm(inner);
    const auto part = comm.split(comm.rank() == 0 ? 0 : 1, 0);
    std::vector<std::int64_t> value{1};
    part->all_reduce(std::span(value), ReduceOp::kSum, Traffic::kStatistics).wait();
    EXPECT_EQ(value[0], part->size());
    EXPECT_EQ(comm.counts(Traffic::kStatistics).operations, 1);
    EXPECT_EQ(comm.counts(Traffic::kStatistics).bytes, 8);
  });
}

TEST(TracedCommunicator, ForwardsAbortAndHealth) {
  test::run_ranks(1, [](Communicator& inner) {
    TracedCommunicator comm(inner);
    EXPECT_EQ(comm.describe(), "threads, rank 0 of 1");
    comm.abort("told to");
    EXPECT_EQ(inner.health().reason, "rank 0 aborted: told to");
    EXPECT_EQ(comm.health().reason, "rank 0 aborted: told to");
  });
}

}  // namespace
}  // namespace mxopt
