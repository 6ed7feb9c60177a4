#include "mxopt/optimizer/yaml_tree.h"

#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "support/thrown_message.h"

#include "mxopt/params/check.h"

namespace mxopt {
namespace {

using Kind = YamlNode::Kind;
using test::thrown_message;

/// The problems of `text`, each as "line:column: text".
std::vector<std::string> problems_of(const std::string& text) {
  std::vector<YamlProblem> problems;
  parse_yaml(text, problems);
  std::vector<std::string> lines;
  for (const YamlProblem& problem : problems) {
    lines.push_back(std::to_string(problem.place.line) + ":" + std::to_string(problem.place.column) + ": " +
                    problem.text);
  }
  return lines;
}

YamlNode tree_of(const std::string& text) {
  std::vector<YamlProblem> problems;
  YamlNode root = parse_yaml(text, problems);
  for (const YamlProblem& problem : problems) ADD_FAILURE() << problem.text;
  return root;
}

std::string nested_lists(int depth) {
  return "a: " + std::string(static_cast<std::size_t>(depth), '[') +
         std::string(static_cast<std::size_t>(depth), ']');
}

TEST(YamlTree, KeepsKindsAndPlaces) {
  const YamlNode root = tree_of("a: 1\nb:\n  c: \"2\"\n  d: [x, y]\ne:\n");
  ASSERT_EQ(root.kind, Kind::kMap);
  ASSERT_EQ(root.entries.size(), 3U);
  EXPECT_EQ(root.entries[0].key, "a");
  EXPECT_EQ(root.entries[0].value.kind, Kind::kScalar);
  EXPECT_EQ(root.entries[0].value.scalar, "1");
  EXPECT_FALSE(root.entries[0].value.quoted);
  EXPECT_EQ(root.entries[0].value.place.line, 1);
  EXPECT_EQ(root.entries[0].value.place.column, 4);

  const YamlNode& b = root.entries[1].value;
  ASSERT_EQ(b.kind, Kind::kMap);
  EXPECT_EQ(b.entries[0].place.line, 3);
  EXPECT_EQ(b.entries[0].place.column, 3);
  EXPECT_EQ(b.entries[0].value.scalar, "2");
  EXPECT_TRUE(b.entries[0].value.quoted);
  ASSERT_EQ(b.entries[1].value.kind, Kind::kList);
  ASSERT_EQ(b.entries[1].value.items.size(), 2U);
  EXPECT_EQ(b.entries[1].value.items[1].scalar, "y");
  EXPECT_EQ(b.entries[1].value.items[1].place.column, 10);

  EXPECT_EQ(root.entries[2].value.kind, Kind::kNull);
  EXPECT_EQ(root.entries[2].value.place.line, 5);
  EXPECT_EQ(root.entries[2].value.place.column, 1);
}

TEST(YamlTree, TellsQuotedAndBlockScalarsFromPlainOnes) {
  const YamlNode root = tree_of("- 12\n- '12'\n- \"12\"\n- ! 12\n- |\n 12\n- >\n 12\n");
  ASSERT_EQ(root.items.size(), 6U);
  EXPECT_FALSE(root.items[0].quoted);
  for (std::size_t i = 1; i < 6; ++i) EXPECT_TRUE(root.items[i].quoted) << i;
}

TEST(YamlTree, TextWithoutAValueIsNull) {
  EXPECT_EQ(tree_of("").kind, Kind::kNull);
  EXPECT_EQ(tree_of("# only a comment\n").kind, Kind::kNull);
  EXPECT_EQ(tree_of("---\n").kind, Kind::kNull);
  EXPECT_EQ(tree_of("~").kind, Kind::kNull);
}

TEST(YamlTree, AcceptsAByteOrderMarkWindowsLineEndsAndUtf8) {
  const YamlNode root = tree_of(
      "\xEF\xBB\xBF"
      "a: 1\r\nb: \xC3\xA9\xE2\x82\xAC\xF0\x9F\x98\x80\r\n");
  ASSERT_EQ(root.entries.size(), 2U);
  EXPECT_EQ(root.entries[0].place.column, 1);
  EXPECT_EQ(root.entries[1].place.line, 2);
  EXPECT_EQ(root.entries[1].value.scalar, "\xC3\xA9\xE2\x82\xAC\xF0\x9F\x98\x80");
}

struct Refusal {
  std::string text;
  std::vector<std::string> problems;
};

TEST(YamlTree, RefusesWhatAConfigurationDoesNotNeed) {
  const std::string repeated = " is repeated; it stands first at line ";
  const std::vector<Refusal> refusals = {
      {"a: &x 1", {"1:4: anchors (&name) are not allowed; write the value where it is needed"}},
      {"a: &x {b: 1}", {"1:4: anchors (&name) are not allowed; write the value where it is needed"}},
      {"a: &x\nb: 1", {"1:4: anchors (&name) are not allowed; write the value where it is needed"}},
      {"a: &x {b: *x}",
       {"1:4: anchors (&name) are not allowed; write the value where it is needed",
        "1:11: aliases (*name) are not allowed; write the value out"}},
      {"a: !!int 3", {"1:4: tags (tag:yaml.org,2002:int) are not allowed; the schema knows the type"}},
      {"a: !mine [1]", {"1:4: tags (!mine) are not allowed; the schema knows the type"}},
      {"a: !!str", {"1:4: tags (tag:yaml.org,2002:str) are not allowed; the schema knows the type"}},
      {"a: 1\nb: 2\na: 3", {"3:1: key `a`" + repeated + "1, column 1"}},
      {"a: {b: 1, c: 2, b: 3}", {"1:17: key `a.b`" + repeated + "1, column 5"}},
      {"a: [{b: 1}, {c: 1, 'c': 2}]", {"1:20: key `a[1].c`" + repeated + "1, column 14"}},
      {"a: 1\na: {x: 1, x: 2}",
       {"2:1: key `a`" + repeated + "1, column 1", "2:11: key `x`" + repeated + "2, column 5"}},
      {"a: {<<: {b: 1}}", {"1:5: merge keys (<<) are not allowed; write the keys out"}},
      {"? [a, b]\n: 1", {"1:3: a key of the document is not plain text"}},
      {"a: {~: 1}", {"1:5: a key of `a` is not plain text"}},
      {"a: 1\n---\nb: 2", {"2:1: a second document starts here; a configuration is one document"}},
      {"a: 1\n---\n", {"2:1: a second document starts here; a configuration is one document"}},
      {"a: 1\nb: \xFF", {"2:4: invalid UTF-8"}},
      {"\xC0\xAF", {"1:1: invalid UTF-8"}},          // overlong
      {"\xE0\x80\xAF", {"1:1: invalid UTF-8"}},      // overlong
      {"\xED\xA0\x80", {"1:1: invalid UTF-8"}},      // surrogate
      {"\xF4\x90\x80\x80", {"1:1: invalid UTF-8"}},  // beyond Unicode
      {"\xF8\x88\x80\x80\x80", {"1:1: invalid UTF-8"}},
      {"ab\xE2\x82", {"1:3: invalid UTF-8"}},  // cut
      {std::string("\xFF\xFE"
                   "a\0",
                   4),
       {"1:1: invalid UTF-8"}},
      {std::string("a: \0", 4), {"1:4: a control character; a configuration is plain text"}},
      {"a: \x04", {"1:4: a control character; a configuration is plain text"}},
      {"a: \x7F", {"1:4: a control character; a configuration is plain text"}},
  };
  for (const Refusal& refusal : refusals)
    EXPECT_EQ(problems_of(refusal.text), refusal.problems) << refusal.text;
}

TEST(YamlTree, RefusesBrokenYamlWithThePlaceAndTextOfTheParser) {
  for (const std::string text :
       {"\na: *x", "\na: [1, 2", "\na: 1\n b: 2", "\na: \"x", "\na: {b: 1", "\n\ta: 1\nb: @"}) {
    const std::vector<std::string> found = problems_of(text);
    ASSERT_EQ(found.size(), 1U) << text;
    EXPECT_TRUE(test::contains(found[0], ": not valid YAML: ")) << text;
    EXPECT_GE(found[0][0], '1') << found[0];
    EXPECT_LE(found[0][0], '3') << found[0];
  }
}

TEST(YamlTree, ARefusedValueLeavesTheOthersReadable) {
  std::vector<YamlProblem> problems;
  const YamlNode root = parse_yaml("a: !!int 1\nb: 2\nb: 3\n", problems);
  EXPECT_EQ(problems.size(), 2U);
  ASSERT_EQ(root.entries.size(), 2U);
  EXPECT_EQ(root.entries[0].value.kind, Kind::kRefused);
  EXPECT_EQ(root.entries[1].value.scalar, "2");
}

TEST(YamlTree, LimitsTheDepth) {
  EXPECT_TRUE(problems_of(nested_lists(kMaxYamlDepth - 1)).empty());
  EXPECT_EQ(problems_of(nested_lists(kMaxYamlDepth)),
            std::vector<std::string>{"1:35: nested more than 32 levels deep"});
  EXPECT_EQ(problems_of(nested_lists(100'000)),
            std::vector<std::string>{"1:35: nested more than 32 levels deep"});
}

TEST(YamlTree, LimitsTheNumberOfValues) {
  std::string text = "[";
  for (int i = 1; i < kMaxYamlNodes; ++i) text += "1,";
  EXPECT_TRUE(problems_of(text + "]").empty());
  EXPECT_EQ(problems_of(text + "1]"),
            std::vector<std::string>{"1:20000: more than 10000 values; this is no configuration"});
}

TEST(YamlTree, LimitsTheSize) {
  const std::string text(kMaxYamlBytes - 4, '#');
  EXPECT_TRUE(problems_of("a: 1" + text.substr(4) + "\n# b").empty());
  EXPECT_EQ(problems_of("a: 1 " + text),
            std::vector<std::string>{"1:1: larger than 1048576 bytes; this is no configuration"});
}

TEST(YamlTree, BillionLaughsEndAtTheFirstAlias) {
  std::string text = "a0: &a0 [x]\n";
  for (int i = 1; i <= 9; ++i) {
    const std::string before = "*a" + std::to_string(i - 1);
    text += "a" + std::to_string(i) + ": &a" + std::to_string(i) + " [" + before;
    for (int k = 0; k < 8; ++k) text += ", " + before;
    text += "]\n";
  }
  EXPECT_EQ(problems_of(text).size(), 10U + 9U * 9U);
}

TEST(YamlTree, ReadsFiles) {
  const std::string path = testing::TempDir() + "yaml_tree_test.yaml";
  std::ofstream(path) << "a: 1\n";
  EXPECT_EQ(read_yaml_file(path), "a: 1\n");
  std::ofstream(path) << std::string(kMaxYamlBytes, '#');
  EXPECT_EQ(read_yaml_file(path).size(), kMaxYamlBytes);
  std::ofstream(path) << std::string(kMaxYamlBytes + 1, '#');
  EXPECT_EQ(thrown_message<ConfigError>([&] { read_yaml_file(path); }),
            path + ":1:1: larger than 1048576 bytes; this is no configuration");
  std::filesystem::remove(path);
  EXPECT_EQ(thrown_message<ConfigError>([&] { read_yaml_file(path); }),
            path + ": can not be opened: No such file or directory");
  EXPECT_EQ(thrown_message<ConfigError>([&] { read_yaml_file(testing::TempDir()); }),
            testing::TempDir() + ": is a directory; expected a YAML file");
}

TEST(YamlTree, OneLineEscapesAndCuts) {
  EXPECT_EQ(one_line("a b"), "a b");
  EXPECT_EQ(one_line("a\nb\tc\x7F"), "a\\nb\\x09c\\x7f");
  EXPECT_EQ(one_line("abcdef", 3), "abc...");
  EXPECT_EQ(one_line("abc", 3), "abc");
  EXPECT_EQ(one_line("ab\xC3\xA9"
                     "d",
                     3),
            "ab\xC3\xA9...");
}

}  // namespace
}  // namespace mxopt
