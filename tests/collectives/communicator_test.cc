// The argument checks, which stand before every transport.
#include "mxopt/collectives/communicator.h"

#include <limits>
#include <vector>

#include <gtest/gtest.h>

#include "support/run_ranks.h"
#include "support/thrown_message.h"

namespace mxopt {
namespace {

using test::contains;
using test::thrown_message;

/// The message of the ContractError that `call` gets on rank 1 of 3.
template <class Call>
std::string refused(Call call) {
  std::string message;
  test::run_ranks(3, [&](Communicator& comm) {
    if (comm.rank() == 1) message = thrown_message<ContractError>([&] { call(comm); });
    comm.barrier();
  });
  return message;
}

TEST(Communicator, NamesEveryOpAndTraffic) {
  EXPECT_EQ(op_name(ReduceOp::kSum), "sum");
  EXPECT_EQ(op_name(ReduceOp::kAvg), "avg");
  EXPECT_EQ(op_name(ReduceOp::kMax), "max");
  for (int kind = 0; kind < kTrafficKinds; ++kind) EXPECT_NE(traffic_name(static_cast<Traffic>(kind)), "?");
  EXPECT_EQ(traffic_name(static_cast<Traffic>(kTrafficKinds)), "?");
}

TEST(Communicator, DefaultWorkIsComplete) {
  Work work;
  EXPECT_TRUE(work.test());
  work.wait();
  work.join(StreamRef());
}

TEST(Communicator, RefusesReductionsThatAreNotDefined) {
  const std::vector<std::pair<ReduceOp, DType>> undefined = {
      {ReduceOp::kSum, DType::kUint8}, {ReduceOp::kAvg, DType::kUint8}, {ReduceOp::kAvg, DType::kInt64},
      {ReduceOp::kMax, DType::kFp32},  {ReduceOp::kMax, DType::kBf16},  {ReduceOp::kMax, DType::kInt64}};
  for (const auto& [op, dtype] : undefined) {
    std::vector<std::int64_t> memory(6);
    const std::string what =
        std::string(op_name(op)) + " of " + std::string(dtype_name(dtype)) + " is not defined";
    EXPECT_TRUE(contains(refused([&](Communicator& comm) {
                           comm.all_reduce({memory.data(), dtype, 2}, op, Traffic::kControl);
                         }),
                         "all_reduce: " + what));
    EXPECT_TRUE(contains(refused([&](Communicator& comm) {
                           comm.reduce_scatter({memory.data(), dtype, 1}, {memory.data() + 2, dtype, 3}, op,
                                               Traffic::kControl);
                         }),
                         "reduce_scatter: " + what));
  }
}

TEST(Communicator, RefusesWrongSizes) {
  std::vector<float> memory(64);
  const auto span = [&](std::int64_t begin, std::int64_t elems) {
    return TypedSpan(memory.data() + begin, DType::kFp32, elems);
  };
  EXPECT_TRUE(contains(refused([&](Communicator& comm) {
                         comm.reduce_scatter(span(0, 4), span(8, 11), ReduceOp::kSum, Traffic::kGradient);
                       }),
                       "reduce_scatter: input has 11 elements, expected 3 ranks * 4 of the shard"));
  EXPECT_TRUE(contains(
      refused([&](Communicator& comm) { comm.all_gather(span(8, 13), span(0, 4), Traffic::kPlanes); }),
      "all_gather: output has 13 elements, expected 3 ranks * 4 of the shard"));
  EXPECT_TRUE(
      contains(refused([&](Communicator& comm) { comm.broadcast(span(0, -1), 0, Traffic::kControl); }),
               "broadcast: buffer has -1 elements"));
  constexpr std::int64_t kHuge = std::numeric_limits<std::int64_t>::max() / 2;
  EXPECT_TRUE(contains(
      refused([&](Communicator& comm) { comm.all_gather(span(0, 0), span(0, kHuge), Traffic::kPlanes); }),
      "output has 0 elements"));
}

TEST(Communicator, RefusesNullPointersUnlessEmpty) {
  EXPECT_TRUE(contains(refused([](Communicator& comm) {
                         comm.all_reduce({nullptr, DType::kFp32, 4}, ReduceOp::kSum, Traffic::kGradient);
                       }),
                       "all_reduce: buffer has 4 elements and a null pointer"));
  test::run_ranks(3, [](Communicator& comm) {
    const TypedSpan empty(nullptr, DType::kFp32, 0);
    comm.all_reduce(empty, ReduceOp::kSum, Traffic::kGradient).wait();
    comm.reduce_scatter(empty, empty, ReduceOp::kAvg, Traffic::kGradient).wait();
    comm.all_gather(empty, empty, Traffic::kPlanes).wait();
    comm.all_to_all(empty, empty, Traffic::kGradient).wait();
    comm.broadcast(empty, 2, Traffic::kControl).wait();
    EXPECT_EQ(comm.health().calls, 5);
  });
}

TEST(Communicator, RefusesMixedTypes) {
  std::vector<float> memory(64);
  EXPECT_TRUE(contains(refused([&](Communicator& comm) {
                         comm.all_gather({memory.data() + 8, DType::kBf16, 12},
                                         {memory.data(), DType::kFp32, 4}, Traffic::kPlain);
                       }),
                       "all_gather: shard is fp32, output is bf16"));
}

TEST(Communicator, RefusesShardsThatOverlapAnythingButTheirRange) {
  std::vector<float> memory(12);
  const std::span<float> all(memory);
  EXPECT_TRUE(
      contains(refused([&](Communicator& comm) { comm.all_gather(all, all.first(4), Traffic::kPlanes); }),
               "all_gather: shard of rank 1 overlaps output but is not its range [4, 8)"));
  EXPECT_TRUE(contains(refused([&](Communicator& comm) {
                         comm.reduce_scatter(all.subspan(5, 4), all, ReduceOp::kSum, Traffic::kGradient);
                       }),
                       "reduce_scatter: shard of rank 1 overlaps input but is not its range [4, 8)"));
}

TEST(Communicator, RefusesExchangesThatDoNotFit) {
  std::vector<float> memory(64);
  const auto span = [&](std::int64_t begin, std::int64_t elems) {
    return TypedSpan(memory.data() + begin, DType::kFp32, elems);
  };
  const auto message = [&](TypedSpan output, TypedSpan input) {
    return refused([&](Communicator& comm) { comm.all_to_all(output, input, Traffic::kGradient); });
  };
  EXPECT_TRUE(
      contains(message(span(0, 12), span(16, 9)),
               "all_to_all: input has 9 elements, output has 12; expected the same multiple of 3 ranks"));
  EXPECT_TRUE(contains(message(span(0, 10), span(16, 10)), "expected the same multiple of 3 ranks"));
  EXPECT_TRUE(contains(message(span(0, 12), span(11, 12)), "all_to_all: input overlaps output"));
  EXPECT_TRUE(contains(message(span(0, 12), span(0, 12)), "all_to_all: input overlaps output"));
  EXPECT_TRUE(contains(message({memory.data(), DType::kBf16, 12}, span(16, 12)),
                       "all_to_all: input is fp32, output is bf16"));
}

TEST(Communicator, RefusesRootsAndColorsThatDoNotExist) {
  std::vector<float> memory(4);
  EXPECT_TRUE(
      contains(refused([&](Communicator& comm) { comm.broadcast(std::span(memory), 3, Traffic::kControl); }),
               "broadcast: root 3 of 3 ranks"));
  EXPECT_TRUE(contains(refused([](Communicator& comm) { comm.split(-2, 0); }), "split: color -2"));
}

}  // namespace
}  // namespace mxopt
