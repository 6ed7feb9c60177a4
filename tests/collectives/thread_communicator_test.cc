#include "mxopt/collectives/thread_communicator.h"

#include <array>
#include <atomic>
#include <chrono>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include <gtest/gtest.h>

#include "communicator_conformance.h"
#include "support/run_ranks.h"
#include "support/thrown_message.h"

namespace mxopt {
namespace {

using test::communicator_conformance;
using test::ConformanceCase;
using test::contains;

class ThreadConformance : public ::testing::TestWithParam<std::tuple<ConformanceCase, int>> {};

TEST_P(ThreadConformance, Holds) {
  const auto& [conformance, size] = GetParam();
  test::run_ranks(size, conformance.check);
}

INSTANTIATE_TEST_SUITE_P(Communicator, ThreadConformance,
                         ::testing::Combine(::testing::ValuesIn(communicator_conformance()),
                                            ::testing::Values(1, 2, 3, 4, 7, 8)),
                         [](const auto& tested) {
                           return std::get<0>(tested.param).name + std::to_string(std::get<1>(tested.param));
                         });

/// What each rank's `body` threw; nullopt where it threw nothing. The ranks end only when all bodies have.
std::vector<std::optional<PeerFailure>> failures(int size, double timeout_s,
                                                 const std::function<void(Communicator&)>& body) {
  std::vector<std::optional<PeerFailure>> result(static_cast<std::size_t>(size));
  std::atomic<int> ended = 0;
  test::run_ranks(
      size,
      [&](Communicator& comm) {
        try {
          body(comm);
        } catch (const PeerError& error) {
          result[static_cast<std::size_t>(comm.rank())] = error.failure();
        }
        ++ended;
        while (ended < size) std::this_thread::yield();
      },
      timeout_s);
  return result;
}

TEST(ThreadCommunicator, PostingDoesNotWaitForTheOthers) {
  std::atomic<bool> posted = false;
  test::run_ranks(2, [&](Communicator& comm) {
    std::vector<std::int64_t> a{1};
    std::vector<std::int64_t> b{2};
    if (comm.rank() == 1) {
      while (!posted) std::this_thread::yield();
    }
    Work first = comm.all_reduce(std::span(a), ReduceOp::kSum, Traffic::kControl);
    Work second = comm.all_reduce(std::span(b), ReduceOp::kSum, Traffic::kControl);
    if (comm.rank() == 0) {
      EXPECT_FALSE(first.test());
      EXPECT_EQ(comm.health().outstanding, 2);
      posted = true;
    }
    second.wait();
    first.wait();
    EXPECT_EQ(a[0] + b[0], 6);
  });
}

TEST(ThreadCommunicator, MismatchIsAnErrorOnEveryRankThatNamesTheOddOne) {
  const auto thrown = failures(3, 30, [](Communicator& comm) {
    comm.barrier();
    std::vector<float> buffer(comm.rank() == 1 ? 5 : 4);
    comm.all_reduce(std::span(buffer), ReduceOp::kSum, Traffic::kGradient).wait();
  });
  for (int rank = 0; rank < 3; ++rank) {
    const auto& failure = thrown[static_cast<std::size_t>(rank)];
    ASSERT_TRUE(failure.has_value()) << rank;
    EXPECT_EQ(failure->culprit_rank, 1);
    EXPECT_EQ(failure->rank, rank);
    EXPECT_EQ(failure->sequence, 1);
    EXPECT_EQ(failure->reason,
              "rank 1 called all_reduce(sum, fp32 x 5, gradient), ranks 0, 2 called all_reduce(sum, fp32 x "
              "4, gradient)");
    EXPECT_GT(failure->pid, 0);
    EXPECT_FALSE(failure->host.empty());
  }
}

TEST(ThreadCommunicator, EveryPartOfTheSignatureIsCompared) {
  std::vector<std::array<std::uint8_t, 64>> memory(2);
  using Calls = std::array<std::function<Work(Communicator&, void*)>, 2>;
  const std::vector<Calls> pairs = {
      {[](auto& c, void* p) {
         return c.all_reduce({p, DType::kFp32, 4}, ReduceOp::kSum, Traffic::kGradient);
       },
       [](auto& c, void* p) {
         return c.all_reduce({p, DType::kBf16, 4}, ReduceOp::kSum, Traffic::kGradient);
       }},
      {[](auto& c, void* p) {
         return c.all_reduce({p, DType::kFp32, 4}, ReduceOp::kSum, Traffic::kGradient);
       },
       [](auto& c, void* p) {
         return c.all_reduce({p, DType::kFp32, 4}, ReduceOp::kAvg, Traffic::kGradient);
       }},
      {[](auto& c, void* p) {
         return c.all_reduce({p, DType::kFp32, 4}, ReduceOp::kSum, Traffic::kGradient);
       },
       [](auto& c, void* p) {
         return c.all_reduce({p, DType::kFp32, 4}, ReduceOp::kSum, Traffic::kStatistics);
       }},
      {[](auto& c, void* p) {
         return c.broadcast({p, DType::kFp32, 4}, 0, Traffic::kControl);
       },
       [](auto& c, void* p) {
         return c.broadcast({p, DType::kFp32, 4}, 1, Traffic::kControl);
       }},
      {[](auto& c, void* p) {
         return c.broadcast({p, DType::kFp32, 4}, 0, Traffic::kControl);
       },
       [](auto& c, void* p) {
         return c.all_reduce({p, DType::kFp32, 4}, ReduceOp::kSum, Traffic::kControl);
       }},
  };
  for (const Calls& calls : pairs) {
    const auto thrown = failures(2, 30, [&](Communicator& comm) {
      const auto rank = static_cast<std::size_t>(comm.rank());
      calls[rank](comm, memory[rank].data()).wait();
    });
    for (const auto& failure : thrown) {
      ASSERT_TRUE(failure.has_value());
      EXPECT_EQ(failure->culprit_rank, 1) << "rank 0 is the reference of a tie";
      EXPECT_TRUE(contains(failure->reason, "rank 1 called "));
      EXPECT_TRUE(contains(failure->reason, ", rank 0 called "));
    }
  }
}

TEST(ThreadCommunicator, CallsAfterAMismatchStillLineUp) {
  test::run_ranks(3, [](Communicator& comm) {
    std::vector<float> buffer(comm.rank() == 2 ? 5 : 4);
    Work odd = comm.broadcast(std::span(buffer), 0, Traffic::kControl);
    EXPECT_THROW(odd.wait(), PeerError);
    EXPECT_THROW(odd.test(), PeerError);
    comm.barrier();
    const Health health = comm.health();
    EXPECT_FALSE(health.ok);
    EXPECT_TRUE(contains(health.reason, "rank 2 called broadcast(root 0, fp32 x 5, control)"));
    EXPECT_EQ(health.outstanding, 0);
  });
}

TEST(ThreadCommunicator, DeadlineNamesTheRanksThatHaveNotCome) {
  std::atomic<int> given_up = 0;
  const auto thrown = failures(4, 0.1, [&](Communicator& comm) {
    if (comm.rank() == 1 || comm.rank() == 3) {
      while (given_up < 2) std::this_thread::yield();
    }
    std::vector<std::int64_t> value{1};
    Work work = comm.all_reduce(std::span(value), ReduceOp::kSum, Traffic::kStatistics);
    try {
      work.wait();
    } catch (const PeerError&) {
      ++given_up;
      throw;
    }
  });
  for (const auto& failure : thrown) {
    ASSERT_TRUE(failure.has_value()) << "a late rank learns that the others have given up";
    EXPECT_EQ(failure->culprit_rank, 1);
    EXPECT_EQ(failure->operation, "all_reduce(sum, int64 x 1, statistics)");
    EXPECT_EQ(failure->reason, "ranks 1, 3 have not come within 0.1 s");
  }
  EXPECT_GE(thrown[0]->elapsed_ms + thrown[2]->elapsed_ms, 100);
}

TEST(ThreadCommunicator, DeadlineAlsoEndsTestLoops) {
  const auto thrown = failures(2, 0.05, [](Communicator& comm) {
    if (comm.rank() == 1) return;
    std::vector<std::int64_t> value{1};
    Work work = comm.all_reduce(std::span(value), ReduceOp::kSum, Traffic::kStatistics);
    while (!work.test()) std::this_thread::yield();
  });
  ASSERT_TRUE(thrown[0].has_value());
  EXPECT_EQ(thrown[0]->reason, "rank 1 has not come within 0.05 s");
}

TEST(ThreadCommunicator, AbortEndsTheWaitsOfAllRanks) {
  const auto thrown = failures(3, 30, [](Communicator& comm) {
    std::vector<std::int64_t> value{1};
    if (comm.rank() == 2) {
      comm.abort("kernel launch failed");
      comm.abort("only the first reason counts");
    }
    comm.all_reduce(std::span(value), ReduceOp::kSum, Traffic::kStatistics).wait();
  });
  for (const auto& failure : thrown) {
    ASSERT_TRUE(failure.has_value());
    EXPECT_EQ(failure->culprit_rank, 2);
    EXPECT_EQ(failure->reason, "rank 2 aborted: kernel launch failed");
  }
}

TEST(ThreadCommunicator, AbortReachesSplitGroupsAndCallsPostedLater) {
  const auto thrown = failures(4, 30, [](Communicator& comm) {
    const auto part = comm.split(comm.rank() / 2, 0);
    if (comm.rank() == 0) {
      comm.abort("out of memory");
    } else {
      try {
        comm.barrier();  // ends by the abort
      } catch (const PeerError&) {
      }
    }
    EXPECT_FALSE(part->health().ok);
    part->barrier();
  });
  for (const auto& failure : thrown) ASSERT_TRUE(failure.has_value());
  EXPECT_EQ(thrown[1]->culprit_rank, 0);
  EXPECT_EQ(thrown[1]->reason, "rank 0 aborted: out of memory");
  EXPECT_EQ(thrown[3]->culprit_rank, -1) << "rank 0 is no member of the group of ranks 2 and 3";
  EXPECT_EQ(thrown[3]->reason, "rank 0 of the first group aborted: out of memory");
}

TEST(ThreadCommunicator, CompleteCallsStayCompleteAfterAbort) {
  test::run_ranks(2, [](Communicator& comm) {
    std::vector<std::int64_t> value{1};
    Work work = comm.all_reduce(std::span(value), ReduceOp::kSum, Traffic::kStatistics);
    comm.barrier();
    comm.abort("later");
    EXPECT_TRUE(work.test());
    EXPECT_EQ(value[0], 2);
  });
}

TEST(ThreadCommunicator, ARankThatLeavesFailsTheOthersAtOnce) {
  const auto begin = std::chrono::steady_clock::now();
  std::atomic<int> failed = 0;
  test::run_ranks(
      3,
      [&](Communicator& comm) {
        comm.barrier();
        if (comm.rank() == 1) return;
        for (int call = 0; call < 2; ++call) {  // open when it leaves, and posted later
          try {
            comm.barrier();
          } catch (const PeerError& error) {
            EXPECT_EQ(error.failure().culprit_rank, 1);
            EXPECT_EQ(error.failure().reason, "rank 1 has left the group after 1 calls");
            ++failed;
          }
        }
      },
      300);
  EXPECT_EQ(failed, 4);
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(100));
}

TEST(ThreadCommunicator, LeavingWithAnOpenCallFailsThatCall) {
  auto group = ThreadCommunicator::make_group(2, 30);
  std::vector<float> a(4);
  std::vector<float> b(4);
  group[0]->broadcast(std::span(a), 0, Traffic::kControl);
  group[0].reset();
  Work work = group[1]->broadcast(std::span(b), 0, Traffic::kControl);
  const std::string message = test::thrown_message<PeerError>([&] { work.wait(); });
  EXPECT_TRUE(contains(message, "culprit rank 0"));
  EXPECT_TRUE(contains(message, "rank 0 has left the group after 1 calls"));
}

TEST(ThreadCommunicator, RefusesEmptyGroupsAndBadTimeouts) {
  EXPECT_TRUE(
      contains(test::thrown_message<ContractError>([] { ThreadCommunicator::make_group(0, 1); }), "0"));
  EXPECT_TRUE(contains(test::thrown_message<ContractError>([] { ThreadCommunicator::make_group(1, 0); }),
                       "timeout of 0 s"));
}

TEST(RunRanks, TheFirstErrorWinsAndEndsTheOthers) {
  const std::string message = test::thrown_message<std::runtime_error>([] {
    test::run_ranks(3, [](Communicator& comm) {
      if (comm.rank() == 1) throw std::runtime_error("the cause");
      comm.barrier();
    });
  });
  EXPECT_EQ(message, "the cause");
}

TEST(ThreadCommunicator, TheDeadlineIsThatOfTheWaitNotOfTheCall) {
  auto group = ThreadCommunicator::make_group(2, 0.5);
  std::vector<std::int64_t> first{1}, second{2};
  Work work = group[0]->all_reduce(std::span(first), ReduceOp::kSum, Traffic::kStatistics);
  std::this_thread::sleep_for(std::chrono::milliseconds(700));  // the caller computes
  std::thread late([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    group[1]->all_reduce(std::span(second), ReduceOp::kSum, Traffic::kStatistics).wait();
  });
  EXPECT_NO_THROW(work.wait());
  late.join();
  EXPECT_EQ(first[0], 3);
}

}  // namespace
}  // namespace mxopt
