#include "mxopt/optimizer/checkpoint/strict_json.h"

#include <array>
#include <bit>
#include <limits>
#include <string>

#include <gtest/gtest.h>

#include "support/thrown_message.h"

#include "mxopt/params/check.h"

namespace mxopt {
namespace {

using test::contains;
using test::thrown_message;

std::string problem_of(const std::string& text) {
  return thrown_message<DataError>([&] { parse_json(text, "f.json"); });
}

TEST(StrictJson, KeepsKindsAndOrder) {
  const JsonValue root = parse_json(R"({"b": [1, -2, 0.5, "x", true, null], "a": {}})", "f.json");
  EXPECT_EQ(root.keys, (std::vector<std::string>{"b", "a"}));
  const std::vector<JsonPlace> items = JsonPlace(root, "f.json").at("b").items();
  EXPECT_EQ(items[0].integer(1, 1), 1);
  EXPECT_EQ(items[1].integer(-2, 0), -2);
  EXPECT_EQ(items[2].number(), 0.5);
  EXPECT_EQ(items[0].number(), 1.0);
  EXPECT_EQ(items[3].text(), "x");
}

TEST(StrictJson, RefusesWhatIsNotStrict) {
  EXPECT_EQ(problem_of(R"({"a": 1, "a": 2})"), "f.json: key `a` is repeated");
  EXPECT_EQ(problem_of(R"({"x": {"a": 1, "b": 2, "a": 3}})"), "f.json: key `a` is repeated");
  EXPECT_EQ(problem_of(std::string(33, '[') + std::string(33, ']')),
            "f.json: nested more than 32 levels deep");
  EXPECT_EQ(problem_of("[1e999]").substr(0, 24), "f.json: not valid JSON: ");
  for (const std::string text : {"", "{", "{}x", "{\"a\"}", "[1,]", "\"\xFF\"", "nan", "01"}) {
    EXPECT_TRUE(contains(problem_of(text), "f.json: not valid JSON: ")) << text;
  }
  parse_json(std::string(32, '[') + std::string(32, ']'), "f.json");
}

TEST(StrictJson, WrongTypesNameFileKeyAndValue) {
  const JsonValue root =
      parse_json(R"({"a": {"n": -1, "u": 18446744073709551615, "f": 1.9, "t": "x", "l": [{}]}})", "f.json");
  const JsonPlace a = JsonPlace(root, "f.json").at("a");
  const auto problem = [](auto call) { return thrown_message<DataError>(call); };
  EXPECT_EQ(problem([&] { a.at("n").integer(0, 9); }),
            "f.json: key `a.n`: expected an integer from 0 to 9, found -1");
  EXPECT_EQ(
      problem([&] { a.at("u").integer(0, INT64_MAX); }),
      "f.json: key `a.u`: expected an integer from 0 to 9223372036854775807, found 18446744073709551615");
  EXPECT_EQ(problem([&] { a.at("f").integer(0, 9); }),
            "f.json: key `a.f`: expected an integer from 0 to 9, found 1.9");
  EXPECT_EQ(problem([&] { a.at("t").number(); }), "f.json: key `a.t`: expected a number, found the text 'x'");
  EXPECT_EQ(problem([&] { a.at("n").text(); }), "f.json: key `a.n`: expected a text, found -1");
  EXPECT_EQ(problem([&] { a.at("n").items(); }), "f.json: key `a.n`: expected a list, found -1");
  EXPECT_EQ(problem([&] { a.at("l").items()[0].text(); }),
            "f.json: key `a.l[0]`: expected a text, found a map");
  EXPECT_EQ(problem([&] { a.at("l").at("x"); }), "f.json: key `a.l`: expected a map, found a list");
  EXPECT_EQ(problem([&] { a.at("z"); }), "f.json: key `a.z` is missing");
  EXPECT_EQ(problem([&] { a.at("l").entries(); }), "f.json: key `a.l`: expected a map, found a list");
  constexpr std::array<std::string_view, 4> kKeys = {"n", "u", "f", "t"};
  EXPECT_EQ(problem([&] { a.only(kKeys); }),
            "f.json: key `a.l`: expected one of the keys n, u, f, t, found the unknown key `l`");
}

TEST(StrictJson, NumbersReadAsTheSameBits) {
  for (const double value :
       {0.1, 1.0 / 3, -0.0, 5e-324, 1e300, 3.0, 1e-4, std::numeric_limits<double>::max()}) {
    const JsonValue root = parse_json(json_number(value, "x"), "f.json");
    EXPECT_EQ(std::bit_cast<std::uint64_t>(JsonPlace(root, "f.json").number()),
              std::bit_cast<std::uint64_t>(value));
  }
  EXPECT_TRUE(contains(
      thrown_message<ContractError>([] { json_number(std::numeric_limits<double>::infinity(), "the lr"); }),
      "the lr is inf; a finite number is needed"));
}

TEST(StrictJson, TextIsEscapedAndMustBeUtf8) {
  EXPECT_EQ(json_text("a\"\n\\", "x"), R"("a\"\n\\")");
  EXPECT_TRUE(contains(thrown_message<ContractError>([] { json_text("\xFF", "the name"); }),
                       "the name is not valid UTF-8"));
}

}  // namespace
}  // namespace mxopt
