// Run under mpirun: every rank runs the same tests, and a failure on any of them fails the run.
#include "mxopt/collectives/mpi_communicator.h"

#include <chrono>
#include <iostream>
#include <memory>
#include <thread>
#include <tuple>
#include <vector>

#include <gtest/gtest.h>
#include <unistd.h>

#include "communicator_conformance.h"
#include "support/run_mpi_tests.h"
#include "support/thrown_message.h"

#include "mxopt/collectives/make_communicator.h"

namespace mxopt {
namespace {

using test::communicator_conformance;
using test::ConformanceCase;
using test::contains;

constexpr double kTimeoutS = 20;

/// With a chunk size: small ones cut every message of the suite.
class MpiConformance : public ::testing::TestWithParam<std::tuple<ConformanceCase, std::int64_t>> {};

TEST_P(MpiConformance, Holds) {
  const auto& [conformance, chunk_bytes] = GetParam();
  const auto comm = MpiCommunicator::dup(MPI_COMM_WORLD, kTimeoutS, chunk_bytes);
  conformance.check(*comm);
  comm->close();
}

INSTANTIATE_TEST_SUITE_P(Communicator, MpiConformance,
                         ::testing::Combine(::testing::ValuesIn(communicator_conformance()),
                                            ::testing::Values(100, 1000,
                                                              MpiCommunicator::kDefaultChunkBytes)),
                         [](const auto& tested) {
                           return std::get<0>(tested.param).name + std::to_string(std::get<1>(tested.param));
                         });
using test::thrown_message;

std::unique_ptr<MpiCommunicator> world(double timeout_s = kTimeoutS) {
  return MpiCommunicator::dup(MPI_COMM_WORLD, timeout_s);
}

/// Ranks start each test together, so that short timeouts measure the test and not what was before.
class MpiCommunicatorTest : public ::testing::Test {
 protected:
  void SetUp() override { MPI_Barrier(MPI_COMM_WORLD); }
};

TEST_F(MpiCommunicatorTest, TheDeadlineIsThatOfTheWaitNotOfTheCall) {
  const auto comm = world(0.5);
  std::vector<float> values(1 << 20, 1.0f);
  const std::span<float> all(values);
  const auto shard = values.size() / static_cast<std::size_t>(comm->size());
  const std::span<float> input = all.first(shard * static_cast<std::size_t>(comm->size()));
  Work work = comm->reduce_scatter(input.subspan(shard * static_cast<std::size_t>(comm->rank()), shard),
                                   input, ReduceOp::kSum, Traffic::kGradient);
  std::this_thread::sleep_for(std::chrono::milliseconds(900));  // the caller computes
  EXPECT_NO_THROW(work.wait());
}

TEST_F(MpiCommunicatorTest, LateRankIsNamedAndTheJobGoesOn) {
  const auto comm = world(2);
  if (comm->size() == 1) GTEST_SKIP() << "needs two ranks";
  comm->barrier();
  std::vector<std::int64_t> value{1};
  // Rank 1 sleeps well beyond the deadline of the others.
  if (comm->rank() == 1) std::this_thread::sleep_for(std::chrono::milliseconds(5000));
  Work work = comm->all_reduce(std::span(value), ReduceOp::kSum, Traffic::kStatistics);
  if (comm->rank() != 1) {
    try {
      work.wait();
      ADD_FAILURE() << "nothing was thrown";
    } catch (const PeerError& error) {
      EXPECT_EQ(error.failure().operation, "all_reduce(sum, int64 x 1, statistics)");
      EXPECT_EQ(error.failure().sequence, 1);
      EXPECT_EQ(error.failure().rank, comm->rank());
      EXPECT_EQ(error.failure().culprit_rank, 1);
      EXPECT_NE(error.failure().pid, static_cast<std::int64_t>(getpid())) << "the pid is that of rank 1";
      EXPECT_GE(error.failure().elapsed_ms, 2000);
      EXPECT_EQ(error.failure().reason, "rank 1 has not come; rank 1 has issued 1 calls");
    }
    EXPECT_FALSE(comm->health().ok);
    EXPECT_EQ(comm->health().outstanding, 1);
  }
  // The late rank comes, and the call completes after all.
  const auto begin = std::chrono::steady_clock::now();
  while (std::chrono::steady_clock::now() - begin < std::chrono::seconds(30)) {
    try {
      if (work.test()) break;
    } catch (const PeerError&) {
      std::this_thread::yield();
    }
  }
  EXPECT_EQ(value[0], comm->size());
  EXPECT_EQ(comm->health().outstanding, 0);

  const auto fresh = world();
  fresh->barrier();
}

TEST_F(MpiCommunicatorTest, CallsThatDifferAreAnErrorOnEveryRank) {
  const auto comm = world(10);
  if (comm->size() < 3) GTEST_SKIP() << "a majority needs three ranks";
  // Equal byte counts: MPI itself sees nothing wrong and would deliver nonsense.
  const bool odd = comm->rank() == 1;
  const DType dtype = odd ? DType::kFp32 : DType::kBf16;
  const std::int64_t elems = odd ? 4 : 8;
  std::vector<float> shard(4);
  std::vector<float> output(static_cast<std::size_t>(4 * comm->size()));
  Work work = comm->all_gather({output.data(), dtype, elems * comm->size()}, {shard.data(), dtype, elems},
                               Traffic::kPlain);
  try {
    work.wait();
    ADD_FAILURE() << "nothing was thrown";
  } catch (const PeerError& error) {
    EXPECT_EQ(error.failure().culprit_rank, 1);
    EXPECT_TRUE(contains(error.what(), "rank 1 called all_gather(fp32 x 4, plain), ranks 0, 2"));
    EXPECT_TRUE(contains(error.what(), " called all_gather(bf16 x 8, plain)"));
  }
}

TEST_F(MpiCommunicatorTest, RanksInDifferentCallsAreToldAtTheDeadline) {
  const auto comm = world(3);
  if (comm->size() < 3) GTEST_SKIP() << "a majority needs three ranks";
  std::vector<std::uint8_t> memory(4096);
  std::string message;
  const auto part = comm->split(0, 0);
  try {
    // Rank 2 has lost a call of its own and is one ahead.
    Work work = part->rank() == 2 ? part->broadcast({memory.data(), DType::kUint8, 64}, 0, Traffic::kPlain)
                                  : part->all_reduce({memory.data(), DType::kInt64, 8}, ReduceOp::kSum,
                                                     Traffic::kStatistics);
    work.wait();
    part->barrier();
  } catch (const std::exception& error) {
    message = error.what();
  }
  EXPECT_TRUE(contains(message, "rank 2 called broadcast(root 0, uint8 x 64, plain)"));
  EXPECT_TRUE(contains(message, "called all_reduce(sum, int64 x 8, statistics)"));
  const auto fresh = world();
  fresh->barrier();
  // Why: MPI may still hold the pointers of the calls that did not complete.
  static auto* const kept = new std::vector<std::vector<std::uint8_t>>();
  kept->push_back(std::move(memory));
}

TEST_F(MpiCommunicatorTest, ARankThatLeavesFailsTheOthersAtOnce) {
  const auto begin = std::chrono::steady_clock::now();
  auto comm = world(300);
  if (comm->size() == 1) GTEST_SKIP() << "needs two ranks";
  comm->barrier();
  if (comm->rank() == 1) {
    EXPECT_TRUE(
        contains(thrown_message<PeerError>([&] { comm->close(); }), "has left the group without closing it"));
  } else {
    const std::string message = thrown_message<PeerError>([&] { comm->barrier(); });
    EXPECT_TRUE(contains(message, "barrier() #1"));
    EXPECT_TRUE(contains(message, "rank 1 has left the group after 1 calls; culprit rank 1"));
  }
  comm.reset();
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(100));
}

TEST_F(MpiCommunicatorTest, TheCallersCommunicatorStaysTheCallers) {
  MPI_Comm half = MPI_COMM_NULL;
  int rank = 0;
  int size = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  MPI_Comm_split(MPI_COMM_WORLD, rank % 2, rank, &half);
  int half_size = 0;
  MPI_Comm_size(half, &half_size);
  {
    const auto comm = MpiCommunicator::dup(half, kTimeoutS);
    EXPECT_EQ(comm->size(), half_size);
    comm->barrier();
  }
  EXPECT_EQ(MPI_Comm_free(&half), MPI_SUCCESS);
}

TEST_F(MpiCommunicatorTest, CloseEndsItsUse) {
  const auto comm = world();
  std::vector<std::int64_t> value{1};
  Work work = comm->all_reduce(std::span(value), ReduceOp::kSum, Traffic::kControl);
  comm->close();
  EXPECT_TRUE(work.test()) << "close completes what is outstanding";
  EXPECT_EQ(value[0], comm->size());
  comm->close();
  EXPECT_TRUE(
      contains(thrown_message<ContractError>([&] { comm->barrier(); }), "the communicator is closed"));
}

TEST_F(MpiCommunicatorTest, RefusesBadArguments) {
  EXPECT_TRUE(contains(thrown_message<ContractError>([] { MpiCommunicator::dup(MPI_COMM_NULL, 1); }),
                       "MPI_COMM_NULL"));
  for (std::int64_t chunk_bytes : {std::int64_t{7}, (std::int64_t{1} << 30) + 1}) {
    EXPECT_TRUE(
        contains(thrown_message<ContractError>([&] { MpiCommunicator::dup(MPI_COMM_WORLD, 1, chunk_bytes); }),
                 "chunk of " + std::to_string(chunk_bytes) + " bytes"));
  }
  EXPECT_TRUE(contains(thrown_message<ContractError>([] { MpiCommunicator::dup(MPI_COMM_WORLD, 0); }),
                       "timeout of 0 s"));
}

TEST_F(MpiCommunicatorTest, DupOfALateRankEndsAtTheDeadline) {
  int rank = 0;
  int size = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  if (size == 1) GTEST_SKIP() << "needs two ranks";
  MPI_Comm copy = MPI_COMM_NULL;
  MPI_Comm_dup(MPI_COMM_WORLD, &copy);
  if (rank != 1) {
    EXPECT_TRUE(contains(thrown_message<PeerError>([&] { MpiCommunicator::dup(copy, 0.1); }),
                         "not all ranks have come"));
  }
  MPI_Barrier(MPI_COMM_WORLD);
}

TEST(MakeCommunicator, PicksMpiWhenThereArePeers) {
  int size = 0;
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  const auto automatic = make_communicator({.timeout_s = kTimeoutS, .world_size = size});
  EXPECT_EQ(automatic->size(), size);
  EXPECT_TRUE(contains(automatic->describe(), size > 1 ? "mpi, rank" : "self, rank"));

  const auto mpi = make_communicator({.transport = Transport::kMpi, .timeout_s = kTimeoutS});
  EXPECT_TRUE(contains(mpi->describe(), "mpi, rank"));

  MPI_Comm alone = MPI_COMM_SELF;
  const auto self = make_communicator({.timeout_s = kTimeoutS, .mpi_comm = &alone, .world_size = 1});
  EXPECT_EQ(self->describe(), "self, rank 0 of 1");
}

TEST(MakeCommunicator, RefusesAnotherWorldSizeWithBothNumbers) {
  int size = 0;
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  const std::string message = thrown_message<ConfigError>([&] {
    make_communicator({.transport = Transport::kMpi, .timeout_s = kTimeoutS, .world_size = size + 1});
  });
  EXPECT_TRUE(contains(message, "parallel.world_size: " + std::to_string(size + 1) + " was asked for"));
  EXPECT_TRUE(contains(message, "transport mpi has " + std::to_string(size)));
}

TEST(MpiAbort, DISABLED_EndsTheJob) {
  const auto comm = world();
  if (comm->rank() == 1) comm->abort("a test");
  comm->barrier();
}

TEST(MpiLarge, DISABLED_CountsBeyondThirtyTwoBits) {
  const auto comm = world(300);
  const int size = comm->size();
  {
    constexpr std::int64_t kShard = (std::int64_t{12} << 30) / 10;
    Buffer plane(kShard * size, Device{}, default_allocator(Device{}));
    const auto byte = [](std::int64_t i, std::int64_t rank) {
      return static_cast<std::uint8_t>((i * 131 + rank) % 251);
    };
    std::uint8_t* const own = plane.data() + comm->rank() * kShard;
    for (std::int64_t i = 0; i < kShard; ++i) own[i] = byte(i, comm->rank());
    comm->all_gather({plane.data(), DType::kUint8, kShard * size}, {own, DType::kUint8, kShard},
                     Traffic::kPlanes)
        .wait();
    std::int64_t wrong = 0;
    for (int rank = 0; rank < size; ++rank) {
      for (std::int64_t i = 0; i < kShard; ++i) wrong += plane.data()[rank * kShard + i] != byte(i, rank);
    }
    EXPECT_EQ(wrong, 0);
  }
  constexpr std::int64_t kFloats = 600'000'000;
  const std::int64_t shard = kFloats / size;
  Buffer grads(shard * size * 4, Device{}, default_allocator(Device{}));
  const std::span<float> all = grads.as<float>();
  for (std::size_t i = 0; i < all.size(); ++i)
    all[i] = static_cast<float>(i % 1000) + static_cast<float>(comm->rank());
  const std::span<float> part =
      all.subspan(static_cast<std::size_t>(comm->rank() * shard), static_cast<std::size_t>(shard));
  comm->reduce_scatter(part, all, ReduceOp::kSum, Traffic::kGradient).wait();
  std::int64_t wrong = 0;
  for (std::int64_t i = 0; i < shard; ++i) {
    const auto expected =
        static_cast<float>((comm->rank() * shard + i) % 1000 * size + size * (size - 1) / 2);
    wrong += part[static_cast<std::size_t>(i)] != expected;
  }
  EXPECT_EQ(wrong, 0);
}

}  // namespace
}  // namespace mxopt

int main(int argc, char** argv) {
  // Before MPI is there, a communicator is refused.
  bool refused = false;
  try {
    mxopt::MpiCommunicator::dup(MPI_COMM_WORLD, 1);
  } catch (const mxopt::ContractError& error) {
    refused = std::string(error.what()).find("MPI_Init_thread") != std::string::npos;
  }

  const int failed = mxopt::test::run_mpi_tests(argc, argv);
  if (!refused) std::cerr << "dup before MPI_Init was not refused\n";
  return failed != 0 || !refused ? 1 : 0;
}
