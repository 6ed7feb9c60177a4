#include "mxopt/collectives/call_mismatch.h"

#include <vector>

#include <gtest/gtest.h>

namespace mxopt {
namespace {

TEST(CallMismatch, EqualOrUnknownSignaturesAgree) {
  EXPECT_FALSE(find_disagreement(std::vector<std::string>{}).has_value());
  EXPECT_FALSE(find_disagreement(std::vector<std::string>{"a", "a", "a"}).has_value());
  EXPECT_FALSE(find_disagreement(std::vector<std::string>{"", "a", ""}).has_value());
}

TEST(CallMismatch, MajorityIsTheReference) {
  const auto found = find_disagreement(std::vector<std::string>{"odd", "a", "", "a"});
  ASSERT_TRUE(found.has_value());
  EXPECT_EQ(found->culprit_rank, 0);
  EXPECT_EQ(found->reason, "rank 0 called odd, ranks 1, 3 called a");
}

TEST(CallMismatch, TiesGoToTheLowestRank) {
  const auto found = find_disagreement(std::vector<std::string>{"a", "b", "b", "a", "c"});
  ASSERT_TRUE(found.has_value());
  EXPECT_EQ(found->culprit_rank, 1);
  EXPECT_EQ(found->reason, "ranks 1, 2 called b, rank 4 called c, ranks 0, 3 called a");
}

}  // namespace
}  // namespace mxopt
