#include "mxopt/collectives/rendezvous_roster.h"

#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "support/thrown_message.h"

#include "mxopt/params/check.h"

namespace mxopt {
namespace {

using test::contains;
using test::thrown_message;
using Verdict = RendezvousRoster::Verdict;

Hello hello_of(int rank, int world) {
  return {.token = job_token("job"),
          .rank = rank,
          .world = world,
          .local_rank = rank,
          .pid = 100 + rank,
          .config_hash = 0xABC,
          .library_version = "0.1.0",
          .host = "n" + std::to_string(rank)};
}

RendezvousRoster roster_of(int world) {
  return {hello_of(0, world), "n0:29500"};
}

TEST(RendezvousRoster, NamesRanksInRuns) {
  EXPECT_EQ(name_rank_runs(std::vector<int>{3}), "rank 3");
  EXPECT_EQ(name_rank_runs(std::vector<int>{3, 7, 8, 9}), "ranks 3, 7-9");
  EXPECT_EQ(name_rank_runs(std::vector<int>{1, 2, 4}), "ranks 1, 2, 4");
  EXPECT_EQ(name_rank_runs(std::vector<int>{0, 1, 2}), "ranks 0-2");
}

TEST(RendezvousRoster, IsCompleteWhenEveryRankHasJoined) {
  RendezvousRoster roster = roster_of(3);
  EXPECT_FALSE(roster.is_complete());
  EXPECT_EQ(roster.missing(), (std::vector<int>{1, 2}));
  EXPECT_EQ(roster.admit(hello_of(2, 3), "b:2").verdict, Verdict::kJoined);
  EXPECT_EQ(roster.missing(), (std::vector<int>{1}));
  EXPECT_EQ(roster.admit(hello_of(1, 3), "b:1").verdict, Verdict::kJoined);
  EXPECT_TRUE(roster.is_complete());
  const std::vector<RankEntry> entries = roster.entries();
  ASSERT_EQ(entries.size(), 3U);
  EXPECT_EQ(entries[0].address, "n0:29500");
  EXPECT_EQ(entries[2].rank, 2);
  EXPECT_EQ(entries[2].local_rank, 2);
  EXPECT_EQ(entries[2].host, "n2");
  EXPECT_EQ(entries[2].pid, 102);
  EXPECT_EQ(entries[2].address, "b:2");
  EXPECT_TRUE(roster_of(1).is_complete());
}

TEST(RendezvousRoster, ListsTheMissingRanks) {
  RendezvousRoster roster = roster_of(9);
  for (const int rank : {1, 2, 4, 5}) roster.admit(hello_of(rank, 9), "x:1");
  EXPECT_EQ(roster.missing_text(300), "ranks 3, 6-8 did not join n0:29500 within 300 s (5 of 9 joined)");
}

TEST(RendezvousRoster, AnotherJobIsToldAndChangesNothing) {
  RendezvousRoster roster = roster_of(2);
  Hello hello = hello_of(1, 2);
  hello.token = job_token("another");
  const auto answer = roster.admit(hello, "x:1");
  EXPECT_EQ(answer.verdict, Verdict::kOtherJob);
  EXPECT_EQ(answer.reason, "the job at n0:29500 has another token");
  EXPECT_EQ(roster.missing(), (std::vector<int>{1}));
}

TEST(RendezvousRoster, GreetingsThatDoNotFitAreRefusedWithBothSides) {
  RendezvousRoster roster = roster_of(3);
  const auto refusal = [&](const Hello& hello) {
    const auto answer = roster.admit(hello, "x:1");
    EXPECT_EQ(answer.verdict, Verdict::kInconsistent);
    return answer.reason;
  };
  EXPECT_EQ(refusal(hello_of(1, 4)), "rank 1 (host n1, pid 101, x:1) was started for 4 ranks, rank 0 for 3");
  EXPECT_EQ(refusal(hello_of(3, 3)), "rank 3 (host n3, pid 103, x:1) is out of range; allowed are 0 to 2");
  EXPECT_TRUE(contains(refusal(hello_of(-1, 3)), "rank -1 (host n-1, pid 99, x:1) is out of range"));
  Hello hello = hello_of(1, 3);
  hello.config_hash = 0xDEF;
  EXPECT_EQ(refusal(hello),
            "rank 1 (host n1, pid 101, x:1) has another configuration (hash 0xdef) than rank 0 (0xabc)");
  hello = hello_of(1, 3);
  hello.library_version = "0.2.0";
  EXPECT_EQ(refusal(hello), "rank 1 (host n1, pid 101, x:1) has library version 0.2.0, rank 0 has 0.1.0");
  EXPECT_EQ(roster.missing(), (std::vector<int>{1, 2}));
}

TEST(RendezvousRoster, ARankClaimedTwiceNamesBothAddresses) {
  RendezvousRoster roster = roster_of(3);
  roster.admit(hello_of(1, 3), "a:1");
  Hello second = hello_of(1, 3);
  second.pid = 999;
  const auto answer = roster.admit(second, "b:2");
  EXPECT_EQ(answer.verdict, Verdict::kInconsistent);
  EXPECT_EQ(answer.reason,
            "rank 1 is claimed twice: by a:1 (host n1, pid 101) and by b:2 (host n1, pid 999)");
  EXPECT_TRUE(contains(roster.admit(hello_of(0, 3), "c:3").reason, "rank 0 is claimed twice: by n0:29500"));
}

TEST(RendezvousRoster, EntriesOfRanksThatAreNotThereAreRefused) {
  const RendezvousRoster roster = roster_of(2);
  EXPECT_TRUE(contains(thrown_message<ContractError>([&] { roster.entry(2); }), "allowed are 0 to 1"));
  EXPECT_TRUE(contains(thrown_message<ContractError>([&] { roster.entries(); }), "rank 1 has not joined"));
}

TEST(RendezvousRoster, BelongsToRankZero) {
  EXPECT_TRUE(contains(thrown_message<ContractError>([] { RendezvousRoster(hello_of(1, 2), "x:1"); }),
                       "1 against 0"));
}

}  // namespace
}  // namespace mxopt
