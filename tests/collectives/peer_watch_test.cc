#include "mxopt/collectives/peer_watch.h"

#include <gtest/gtest.h>

#include "support/thrown_message.h"

#include "mxopt/params/check.h"

namespace mxopt {
namespace {

using test::contains;
using test::thrown_message;

/// A time in seconds.
PeerWatch::Time at(int seconds) {
  return PeerWatch::Time{} + std::chrono::seconds(seconds);
}

/// Ticks once a second from `begin` to `end`; `heard` is heard each time. The last answer.
std::optional<PeerWatch::Silent> run(PeerWatch& watch, int begin, int end, int heard) {
  std::optional<PeerWatch::Silent> silent;
  for (int second = begin; second <= end; ++second) {
    watch.heard(heard, at(second));
    silent = watch.tick(at(second));
    if (silent.has_value()) return silent;
  }
  return silent;
}

TEST(PeerWatch, FindsTheRankThatIsSilent) {
  PeerWatch watch(1, 4, at(0));
  watch.watch(1, at(0));
  watch.watch(2, at(0));
  EXPECT_FALSE(run(watch, 1, 4, 1).has_value());
  const auto silent = run(watch, 5, 5, 1);
  ASSERT_TRUE(silent.has_value());
  EXPECT_EQ(silent->rank, 2);
  EXPECT_DOUBLE_EQ(silent->silent_s, 5);
}

TEST(PeerWatch, NamesTheOneThatIsSilentTheLongest) {
  PeerWatch watch(1, 2, at(0));
  watch.watch(1, at(0));
  watch.watch(2, at(0));
  watch.watch(3, at(0));
  EXPECT_FALSE(run(watch, 1, 1, 1).has_value());
  watch.heard(2, at(1));
  watch.heard(3, at(2));
  EXPECT_FALSE(watch.tick(at(3)).has_value());
  const auto silent = watch.tick(at(4));
  ASSERT_TRUE(silent.has_value());
  EXPECT_EQ(silent->rank, 1);
}

TEST(PeerWatch, WhoIsForgottenOrUnknownIsNotMissed) {
  PeerWatch watch(1, 2, at(0));
  watch.watch(1, at(0));
  watch.forget(1);
  watch.heard(7, at(0));
  EXPECT_FALSE(run(watch, 1, 20, 0).has_value());
}

TEST(PeerWatch, AProcessThatWasStoppedItselfBlamesNobody) {
  PeerWatch watch(1, 4, at(0));
  watch.watch(1, at(0));
  EXPECT_FALSE(watch.tick(at(1)).has_value());
  EXPECT_FALSE(watch.tick(at(100)).has_value());
  EXPECT_FALSE(run(watch, 101, 104, 0).has_value());
  EXPECT_TRUE(run(watch, 105, 105, 0).has_value());
}

TEST(PeerWatch, RefusesTimesOutOfRange) {
  const auto refusal = [](double heartbeat_s, int misses) {
    return thrown_message<ContractError>([&] { PeerWatch(heartbeat_s, misses, at(0)); });
  };
  EXPECT_TRUE(contains(refusal(0.001, 4), "heartbeat of 0.001 s; allowed are 0.01 to 3600"));
  EXPECT_TRUE(contains(refusal(3601, 4), "heartbeat of 3601 s"));
  EXPECT_TRUE(contains(refusal(1, 1), "1 missed heartbeats; allowed are 2 to 1000"));
  EXPECT_TRUE(contains(refusal(1, 1001), "1001 missed heartbeats"));
}

}  // namespace
}  // namespace mxopt
