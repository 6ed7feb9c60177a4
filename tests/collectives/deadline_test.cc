#include "mxopt/collectives/deadline.h"

#include <limits>
#include <thread>

#include <gtest/gtest.h>

#include "support/thrown_message.h"

namespace mxopt {
namespace {

TEST(Deadline, PassesAfterItsTimeout) {
  const Deadline far(1e8);
  const Deadline near(0.001);
  std::this_thread::sleep_until(near.end());
  EXPECT_TRUE(near.passed());
  EXPECT_GE(near.elapsed_ms(), 1.0);
  EXPECT_FALSE(far.passed());
}

TEST(Deadline, RefusesTimeoutsThatAreNotPositiveOrTooLong) {
  for (double timeout_s : {0.0, -1.0, 1e9, std::numeric_limits<double>::quiet_NaN()}) {
    EXPECT_TRUE(test::contains(test::thrown_message<ContractError>([&] { Deadline deadline(timeout_s); }),
                               "allowed is more than 0 and at most 1e8"));
  }
}

}  // namespace
}  // namespace mxopt
