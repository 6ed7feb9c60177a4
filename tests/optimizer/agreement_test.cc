#include "mxopt/optimizer/agreement.h"

#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "support/run_ranks.h"
#include "support/thrown_message.h"

#include "mxopt/collectives/traced_communicator.h"

namespace mxopt {
namespace {

using test::contains;
using test::run_ranks;
using test::thrown_message;

/// The message that each rank gets when rank r has the texts of fields[r].
std::vector<std::string> messages(const std::vector<std::vector<LayoutField>>& fields) {
  std::vector<std::string> result(fields.size());
  run_ranks(static_cast<int>(fields.size()), [&](Communicator& comm) {
    const auto at = static_cast<std::size_t>(comm.rank());
    result[at] = thrown_message<ContractError>([&] { require_agreement(comm, fields[at]); });
  });
  return result;
}

void expect_same_on_all_ranks(const std::vector<std::string>& texts) {
  for (const std::string& text : texts) EXPECT_EQ(text, texts[0]);
}

TEST(OptimizerAgreement, EqualTextsPass) {
  const std::vector<LayoutField> fields = {{"a", "one\ntwo\n"}, {"b", ""}};
  for (const int size : {1, 2, 5}) {
    run_ranks(size, [&](Communicator& comm) { require_agreement(comm, fields); });
  }
}

TEST(OptimizerAgreement, NamesTheRankTheFieldAndTheFirstLineThatDiffers) {
  const std::vector<std::string> texts = messages({{{"a", "x"}, {"b", "one\ntwo\nthree\n"}},
                                                   {{"a", "x"}, {"b", "one\n2\n3\n"}},
                                                   {{"a", "x"}, {"b", "one\ntwo\nthree\n"}}});
  expect_same_on_all_ranks(texts);
  EXPECT_EQ(texts[0], "ranks disagree:\n  b: rank 1 has '2' where rank 0 has 'two'");
}

TEST(OptimizerAgreement, NamesEveryRankAndEveryField) {
  const std::vector<std::string> texts =
      messages({{{"a", "x\n"}, {"b", "1\n"}}, {{"a", "y\n"}, {"b", "1\n"}}, {{"a", "z\n"}, {"b", "1\n2\n"}}});
  expect_same_on_all_ranks(texts);
  EXPECT_EQ(texts[0],
            "ranks disagree:\n  a: rank 1 has 'y' where rank 0 has 'x'\n  a: rank 2 has 'z' where rank 0 has "
            "'x'\n  b: rank 2 has '2' where rank 0 has '(nothing)'");
}

TEST(OptimizerAgreement, ADifferenceFarInALongLineIsShown) {
  const std::string start(500, 'x');
  const std::vector<std::string> texts = messages({{{"a", start + "left"}}, {{"a", start + "right"}}});
  expect_same_on_all_ranks(texts);
  EXPECT_TRUE(contains(texts[0], "right"));
  EXPECT_TRUE(contains(texts[0], "left"));
}

TEST(OptimizerAgreement, ADifferenceOfLineEndsAloneIsOne) {
  const std::vector<std::string> texts = messages({{{"a", "x\n"}}, {{"a", "x"}}});
  expect_same_on_all_ranks(texts);
  EXPECT_TRUE(contains(texts[0], "a: rank 1"));
}

TEST(OptimizerAgreement, IsControlTrafficAndTheSameOnAllRanks) {
  std::vector<std::vector<std::string>> signatures(3);
  run_ranks(3, [&](Communicator& comm) {
    TracedCommunicator traced(comm);
    traced.record_signatures();
    const std::vector<LayoutField> fields = {{"a", comm.rank() == 2 ? "x" : "y"}};
    EXPECT_THROW(require_agreement(traced, fields), ContractError);
    EXPECT_EQ(traced.total().operations, traced.counts(Traffic::kControl).operations);
    signatures[static_cast<std::size_t>(comm.rank())] = traced.signatures();
  });
  EXPECT_EQ(signatures[1], signatures[0]);
  EXPECT_EQ(signatures[2], signatures[0]);
}

TEST(Agreement, OfSeveralGroupsIsToldToAll) {
  // Pairs compare; the other direction hears.
  test::run_ranks(4, [](Communicator& all) {
    const auto pair = all.split(all.rank() / 2, all.rank());
    const auto other = all.split(all.rank() % 2, all.rank());
    Communicator* const compare[] = {pair.get()};
    Communicator* const tell[] = {pair.get(), other.get()};
    const LayoutField equal = {"text", std::to_string(all.rank() / 2)};
    EXPECT_NO_THROW(require_agreement(compare, tell, std::span(&equal, 1)));
    const LayoutField one = {"text", all.rank() == 3 ? "b" : "a"};
    EXPECT_TRUE(test::contains(
        test::thrown_message<ContractError>([&] { require_agreement(compare, tell, std::span(&one, 1)); }),
        "ranks disagree"));
  });
}

TEST(Agreement, AProblemOfOneRankIsThrownOnAll) {
  test::run_ranks(4, [](Communicator& all) {
    const auto pair = all.split(all.rank() / 2, all.rank());
    const auto other = all.split(all.rank() % 2, all.rank());
    Communicator* const comms[] = {pair.get(), other.get()};
    EXPECT_NO_THROW(agreed_over<DataError>(comms, [] {}));
    const auto body = [&] {
      if (all.rank() == 2) throw ConfigError("broken");
    };
    if (all.rank() == 2) {
      EXPECT_THROW(agreed_over<DataError>(comms, body), ConfigError);
    } else {
      EXPECT_TRUE(test::contains(
          test::thrown_message<DataError>([&] { agreed_over<DataError>(comms, body); }), "broken"));
    }
  });
}

}  // namespace
}  // namespace mxopt
