#include "mxopt/collectives/resolve_address.h"

#include <algorithm>
#include <string>

#include <gtest/gtest.h>

#include "support/thrown_message.h"

namespace mxopt {
namespace {

using test::contains;
using Numbers = std::vector<std::string>;

TEST(ResolveAddress, NumbersAreTakenAsTheyAre) {
  const Deadline deadline(30);
  EXPECT_EQ(resolve_address("10.1.2.3", deadline).numbers, Numbers{"10.1.2.3"});
  EXPECT_EQ(resolve_address("::1", deadline).numbers, Numbers{"::1"});
}

TEST(ResolveAddress, LocalhostIsOfThisMachine) {
  const ResolvedAddresses found = resolve_address("localhost", Deadline(30));
  ASSERT_FALSE(found.numbers.empty()) << found.problem;
  for (const std::string& number : found.numbers) {
    EXPECT_TRUE(number == "::1" || number.starts_with("127.")) << number;
    EXPECT_EQ(std::count(found.numbers.begin(), found.numbers.end(), number), 1);
  }
}

TEST(ResolveAddress, NamesThatDoNotExistAreNamedInTheProblem) {
  const ResolvedAddresses found = resolve_address("no-such-host.invalid", Deadline(30));
  EXPECT_TRUE(found.numbers.empty());
  EXPECT_TRUE(contains(found.problem, "'no-such-host.invalid' "));
  EXPECT_TRUE(found.may_change);
}

TEST(ResolveAddress, ReturnsAtTheDeadline) {
  const Deadline deadline(1e-9);
  const ResolvedAddresses found = resolve_address("no-such-host.invalid", deadline);
  EXPECT_TRUE(found.numbers.empty());
  EXPECT_TRUE(contains(found.problem, "'no-such-host.invalid' "));
}

}  // namespace
}  // namespace mxopt
