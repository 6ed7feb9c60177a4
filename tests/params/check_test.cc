#include "mxopt/params/check.h"

#include <stdexcept>
#include <type_traits>

#include <gtest/gtest.h>

#include "support/thrown_message.h"

namespace mxopt {
namespace {

using test::contains;
using test::thrown_message;

static_assert(std::is_base_of_v<std::invalid_argument, ConfigError>);
static_assert(std::is_base_of_v<std::logic_error, ContractError>);
static_assert(std::is_base_of_v<std::runtime_error, BackendError>);
static_assert(std::is_base_of_v<std::runtime_error, PeerError>);
static_assert(std::is_base_of_v<std::runtime_error, DataError>);

TEST(Check, HoldsSilentlyAndEvaluatesItsConditionOnce) {
  int evaluated = 0;
  EXPECT_NO_THROW(MXOPT_CHECK(++evaluated == 1, "not reached"));
  EXPECT_NO_THROW(MXOPT_CHECK_EQ(++evaluated, 2));
  EXPECT_EQ(evaluated, 2);
}

TEST(Check, SaysMessageExpressionAndPlace) {
  const int rank = 5;
  const std::string text = thrown_message<ContractError>([&] { MXOPT_CHECK(rank < 4, "rank " << rank); });
  EXPECT_TRUE(contains(text, "rank 5 [rank < 4 is false, "));
  EXPECT_TRUE(contains(text, "SaysMessageExpressionAndPlace"));
}

TEST(Check, ComparisonsPrintBothValues) {
  const long count = 7;
  const auto text_of = [](auto&& call) { return thrown_message<ContractError>(call); };
  EXPECT_TRUE(contains(text_of([&] { MXOPT_CHECK_EQ(count, 8L); }), "7 against 8 [count == 8L is false"));
  EXPECT_TRUE(contains(text_of([&] { MXOPT_CHECK_LE(count, 6L); }), "7 against 6 [count <= 6L is false"));
  EXPECT_TRUE(contains(text_of([&] { MXOPT_CHECK_LT(count, 7L); }), "7 against 7 [count < 7L is false"));
  EXPECT_TRUE(contains(text_of([&] { MXOPT_CHECK_GE(count, 8L); }), "7 against 8 [count >= 8L is false"));
  EXPECT_TRUE(contains(text_of([&] { MXOPT_CHECK_GT(count, 7L); }), "7 against 7 [count > 7L is false"));
}

TEST(PeerError, NamesOperationSequenceTimeRanksHostPidAndReason) {
  PeerFailure failure;
  failure.operation = "all_gather(uint8 x 4096, planes)";
  failure.sequence = 12;
  failure.elapsed_ms = 1500;
  failure.rank = 0;
  failure.culprit_rank = 3;
  failure.host = "node7";
  failure.pid = 4711;
  failure.reason = "no answer before the deadline";
  const PeerError error(failure);
  EXPECT_STREQ(error.what(),
               "all_gather(uint8 x 4096, planes) #12 on rank 0 failed after 1500 ms: "
               "no answer before the deadline; culprit rank 3 (host node7, pid 4711)");
  EXPECT_EQ(error.failure().culprit_rank, 3);
}

TEST(PeerError, LeavesOutWhatIsNotKnown) {
  PeerFailure failure;
  failure.operation = "barrier";
  failure.rank = 1;
  failure.reason = "aborted";
  EXPECT_STREQ(PeerError(failure).what(), "barrier #0 on rank 1 failed after 0 ms: aborted");
}

}  // namespace
}  // namespace mxopt
