#include "mxopt/optimizer/config_schema.h"

#include <array>
#include <cstdint>
#include <fstream>
#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "support/thrown_message.h"

#include "mxopt/params/check.h"

namespace mxopt {
namespace {

using test::contains;
using test::thrown_message;

enum class Color { kRed, kGreen };

struct Layer {
  std::string name;
  std::int64_t width = 8;
  Color color = Color::kRed;
};

/// One variable of every type, and a schema bound to them.
struct Fixture {
  double rate = 0.5;
  float scale = 0.25F;
  std::int64_t steps = 10;
  std::int64_t bucket = 0;
  bool verbose = false;
  std::string title = "run";
  Color color = Color::kRed;
  std::array<double, 2> range = {0, 1};
  std::vector<std::string> files;
  std::vector<Layer> layers;
  ConfigSchema schema;

  Fixture() {
    schema.add("train.rate", rate, Bounds::at_least(0), "A rate.").alias("speed");
    schema.add("train.scale", scale, Bounds::any(), "A scale.");
    schema.add("train.steps", steps, Bounds::at_least(1).at_most(1e9), "Number of steps.", "steps");
    schema.add("train.bucket", bucket, Bounds::at_least(128).or_zero("automatic"), "A size.");
    schema.add("train.verbose", verbose, "Whether to talk.");
    schema.add("train.title", title, "A title.");
    schema.add("model.color", color, {{"red", Color::kRed}, {"green", Color::kGreen}}, "A color.");
    schema.add("model.range", range, Bounds::at_least(0).at_most(1), "A range.");
    schema.add("model.files", files, "Files.");
    schema.add_list("model.layers", layers, describe_layer, "Layers.");
  }

  static void describe_layer(ConfigSchema& schema, Layer& layer) {
    schema.add("name", layer.name, "Its name.").required().not_empty();
    schema.add("size.width", layer.width, Bounds::at_least(1), "Its width.");
    schema.add("color", layer.color, {{"red", Color::kRed}, {"green", Color::kGreen}}, "Its color.");
  }

  void load(const std::string& text, const std::vector<std::string>& overrides = {}) {
    schema.load_text(text, "run.yaml", overrides);
  }

  std::string error(const std::string& text, const std::vector<std::string>& overrides = {}) {
    return thrown_message<ConfigError>([&] { load(text, overrides); });
  }
};

std::string error_of(const std::string& text, const std::vector<std::string>& overrides = {}) {
  return Fixture().error(text, overrides);
}

TEST(ConfigSchema, ReadsEveryType) {
  Fixture f;
  f.load(R"(
train:
  rate: 3.0e-4
  scale: -0.1
  steps: 1e6
  bucket: 256
  verbose: true
  title: "a: b"
model:
  color: green
  range: [0.25, 1]
  files: [a.bin, 'b c']
  layers:
    - name: first
      size: {width: 16}
    - {name: 2, color: green}
)");
  EXPECT_EQ(f.rate, 3.0e-4);
  EXPECT_EQ(f.scale, -0.1F);
  EXPECT_EQ(f.steps, 1'000'000);
  EXPECT_EQ(f.bucket, 256);
  EXPECT_TRUE(f.verbose);
  EXPECT_EQ(f.title, "a: b");
  EXPECT_EQ(f.color, Color::kGreen);
  EXPECT_EQ(f.range, (std::array<double, 2>{0.25, 1}));
  EXPECT_EQ(f.files, (std::vector<std::string>{"a.bin", "b c"}));
  ASSERT_EQ(f.layers.size(), 2U);
  EXPECT_EQ(f.layers[0].name, "first");
  EXPECT_EQ(f.layers[0].width, 16);
  EXPECT_EQ(f.layers[1].name, "2");
  EXPECT_EQ(f.layers[1].width, 8);
  EXPECT_EQ(f.layers[1].color, Color::kGreen);
}

TEST(ConfigSchema, LeavesAbsentKeysAtTheirDefaults) {
  Fixture f;
  f.load("{}");
  EXPECT_EQ(f.rate, 0.5);
  EXPECT_EQ(f.steps, 10);
  for (const std::string key : {"train.rate", "train.title", "model.range", "model.layers"}) {
    EXPECT_EQ(f.schema.origin(key), "default");
  }
}

struct Case {
  std::string value;
  std::string message;  // after "run.yaml:1:N: `key` is "
};

/// Checks the message for `section: {key: value}`; the value stands in column `section + key + 6`.
void expect_rejected(const std::string& section, const std::string& key, const std::vector<Case>& cases) {
  for (const Case& c : cases) {
    const std::string place = "run.yaml:1:" + std::to_string(section.size() + key.size() + 6) + ": `";
    EXPECT_EQ(error_of(section + ": {" + key + ": " + c.value + "}"),
              place + section + "." + key + "` is " + c.message);
  }
}

TEST(ConfigSchema, RealsAreWholeFiniteDecimalAndUnquoted) {
  const std::string allowed = "; allowed: number >= 0";
  expect_rejected("train", "rate",
                  {{"banana", "banana (not a number)" + allowed},
                   {"1x", "1x (not a number)" + allowed},
                   {"1_000", "1_000 (not a number)" + allowed},
                   {"0x10", "0x10 (not a number)" + allowed},
                   {"+1", "+1 (not a number)" + allowed},
                   {"010", "010 (leading zero)" + allowed},
                   {"-00.5", "-00.5 (leading zero)" + allowed},
                   {"1e-400", "1e-400 (too large or too small to be stored)" + allowed},
                   {"1e400", "1e400 (too large or too small to be stored)" + allowed},
                   {".inf", ".inf (not finite)" + allowed},
                   {".nan", ".nan (not finite)" + allowed},
                   {"inf", "inf (not finite)" + allowed},
                   {"nan", "nan (not finite)" + allowed},
                   {"\"1\"", "\"1\" (quoted, and so text)" + allowed},
                   {"true", "true (not a number)" + allowed},
                   {"[1]", "a list" + allowed},
                   {"[]", "an empty list" + allowed},
                   {"{a: 1}", "a map" + allowed},
                   {"-1e-9", "-1e-9" + allowed}});
  expect_rejected("train", "scale",
                  {{"1e-46", "1e-46 (too large or too small to be stored); allowed: number"},
                   {"1e39", "1e39 (too large or too small to be stored); allowed: number"}});
}

TEST(ConfigSchema, IntegersAreDecimalAndMayHaveAnExponent) {
  const std::string allowed = "; allowed: integer in [1, 1e+09], in steps";
  expect_rejected(
      "train", "steps",
      {{"1.5", "1.5 (not an integer)" + allowed},
       {"3.0", "3.0 (not an integer)" + allowed},
       {"1e-1", "1e-1 (not an integer)" + allowed},
       {"010", "010 (leading zero)" + allowed},
       {"0x10", "0x10 (not an integer)" + allowed},
       {"1_000", "1_000 (not an integer)" + allowed},
       {"ten", "ten (not an integer)" + allowed},
       {"99999999999999999999", "99999999999999999999 (too large or too small to be stored)" + allowed},
       {"1e30", "1e30 (too large or too small; write all digits)" + allowed},
       {"'7'", "\"7\" (quoted, and so text)" + allowed},
       {"0", "0" + allowed},
       {"2e9", "2e9" + allowed}});
  for (const auto& [text, value] : std::vector<std::pair<std::string, std::int64_t>>{
           {"7", 7}, {"1e6", 1'000'000}, {"2.5E3", 2500}, {"1000000000", 1'000'000'000}}) {
    Fixture f;
    f.load("train: {steps: " + text + "}");
    EXPECT_EQ(f.steps, value) << text;
  }
}

TEST(ConfigSchema, ZeroMayHaveAMeaningOfItsOwn) {
  Fixture f;
  f.load("train: {bucket: 0}");
  EXPECT_EQ(f.bucket, 0);
  expect_rejected("train", "bucket",
                  {{"127", "127; allowed: integer >= 128, or 0 (automatic)"},
                   {"-1", "-1; allowed: integer >= 128, or 0 (automatic)"}});
}

TEST(ConfigSchema, TruthIsTrueOrFalse) {
  for (const std::string value : {"y", "n", "yes", "no", "on", "off", "True", "TRUE", "False", "1", "0"}) {
    expect_rejected("train", "verbose", {{value, value + "; allowed: true or false"}});
  }
  expect_rejected("train", "verbose", {{"\"true\"", "\"true\"; allowed: true or false"}});
}

TEST(ConfigSchema, TextIsAScalar) {
  expect_rejected("train", "title", {{"[a]", "a list; allowed: text"}, {"{a: b}", "a map; allowed: text"}});
  for (const std::string value : {"", " ~", " null"}) {
    EXPECT_EQ(error_of("train:\n  title:" + value), "run.yaml:2:3: `train.title` is empty; allowed: text");
  }
}

TEST(ConfigSchema, ChoicesNameTheNearest) {
  expect_rejected("model", "color",
                  {{"gren", "gren; allowed: one of red, green; did you mean `green`?"},
                   {"Red", "Red; allowed: one of red, green; did you mean `red`?"},
                   {"ultraviolet", "ultraviolet; allowed: one of red, green"},
                   {"[red]", "a list; allowed: one of red, green"}});
}

TEST(ConfigSchema, ListsReportEveryItem) {
  const std::string allowed = "; allowed: list of 2 numbers in [0, 1]";
  expect_rejected("model", "range",
                  {{"0.5", "0.5" + allowed},
                   {"[0.5]", "a list (of 1)" + allowed},
                   {"[0.5, 1, 1]", "a list (of 3)" + allowed}});
  EXPECT_EQ(error_of("model: {range: [x, 2]}"), "run.yaml:1:17: `model.range[0]` is x (not a number)" +
                                                    allowed +
                                                    "\n"
                                                    "run.yaml:1:20: `model.range[1]` is 2" +
                                                    allowed);
  EXPECT_EQ(error_of("model: {files: a.bin}"),
            "run.yaml:1:16: `model.files` is a.bin; allowed: list of texts");
  EXPECT_EQ(error_of("model: {files: [a, [b]]}"),
            "run.yaml:1:20: `model.files[1]` is a list; allowed: list of texts");
}

TEST(ConfigSchema, ItemsOfAListOfMapsAreAsStrict) {
  EXPECT_EQ(
      error_of(R"(model:
  layers:
    - {name: a, size: {width: 0}}
    - {nam: b}
    - c
    - {name: "", size: 3}
    - {name: e, name: f, depth: 1}
)"),
      "run.yaml:3:31: `model.layers[0].size.width` is 0; allowed: integer >= 1\n"
      "run.yaml:4:7: missing key `model.layers[1].name` (text, not empty)\n"
      "run.yaml:4:8: unknown key `model.layers[1].nam` (value b); did you mean `model.layers[1].name` (text, "
      "not "
      "empty)?\n"
      "run.yaml:5:7: `model.layers[2]` is c; allowed: list of maps with the keys name, size.width, color\n"
      "run.yaml:6:14: `model.layers[3].name` is \"\"; allowed: text, not empty\n"
      "run.yaml:6:24: `model.layers[3].size` is 3; allowed: a map with the keys width\n"
      "run.yaml:7:17: key `model.layers[4].name` is repeated; it stands first at line 7, column 8\n"
      "run.yaml:7:26: unknown key `model.layers[4].depth` (value 1); allowed here: name, size, color");
  EXPECT_EQ(
      error_of("model: {layers: {name: a}}"),
      "run.yaml:1:17: `model.layers` is a map; allowed: list of maps with the keys name, size.width, color");
}

TEST(ConfigSchema, UnknownKeysNameTheNearestKey) {
  const std::vector<std::pair<std::string, std::string>> cases = {
      // misspelt
      {"train: {stps: 1}",
       "run.yaml:1:9: unknown key `train.stps` (value 1); did you mean `train.steps` (integer in [1, 1e+09], "
       "in steps)?"},
      {"trian: {steps: 1}", "run.yaml:1:1: unknown key `trian` (a map); did you mean the section `train`?"},
      // misplaced
      {"rate: 1", "run.yaml:1:1: unknown key `rate` (value 1); did you mean `train.rate` (number >= 0)?"},
      {"model: {rate: 1}",
       "run.yaml:1:9: unknown key `model.rate` (value 1); did you mean `train.rate` (number >= 0)?"},
      {"train: {train: {rate: 1}}",
       "run.yaml:1:9: unknown key `train.train` (a map); did you mean the section `train`?"},
      {"train: {deeper: {rate: 1}}",
       "run.yaml:1:9: unknown key `train.deeper` (a map); allowed in `train`: rate, scale, steps, bucket, "
       "verbose, title"},
      // another program's name
      {"train: {speed: 1}",
       "run.yaml:1:9: unknown key `train.speed` (value 1); did you mean `train.rate` (number >= 0)?"},
      {"speed: 1", "run.yaml:1:1: unknown key `speed` (value 1); did you mean `train.rate` (number >= 0)?"},
      // dotted
      {"train.rate: 1",
       "run.yaml:1:1: unknown key `train.rate` (value 1); keys are nested, one section a level, not dotted"},
      // nothing like it
      {"zzzzzzzz: [1]", "run.yaml:1:1: unknown key `zzzzzzzz` (a list); allowed here: train, model"},
      {"zzzzzzzz:", "run.yaml:1:1: unknown key `zzzzzzzz` (empty); allowed here: train, model"},
      {"\"a\\nb\": 1", "run.yaml:1:1: unknown key `a\\nb` (value 1); allowed here: train, model"},
  };
  for (const auto& [text, message] : cases) EXPECT_EQ(error_of(text), message);
  EXPECT_TRUE(contains(error_of(std::string(1000, 'x') + ": 1"),
                       std::string(80, 'x') + "...` (value 1); allowed here"));
}

TEST(ConfigSchema, SectionsAreMaps) {
  const std::string allowed = "; allowed: a map with the keys rate, scale, steps, bucket, verbose, title";
  EXPECT_EQ(error_of("train: [1]"), "run.yaml:1:8: `train` is a list" + allowed);
  EXPECT_EQ(error_of("train: 3"), "run.yaml:1:8: `train` is 3" + allowed);
  EXPECT_EQ(error_of("train:"), "run.yaml:1:1: `train` is empty" + allowed);
  EXPECT_EQ(error_of("[train]"), "run.yaml:1:1: is a list; allowed: a map with the keys train, model");
  EXPECT_EQ(error_of(""), "run.yaml:1:1: holds no configuration; write {} for one of defaults only");
}

TEST(ConfigSchema, ReportsAllProblemsInTheOrderOfTheText) {
  EXPECT_EQ(
      error_of("train:\n  rate: -1\n  rate: 1\n  steps: !!int 1\n  title: []\nfoo: 1\n", {"train.rate=x"}),
      "run.yaml:2:9: `train.rate` is -1; allowed: number >= 0\n"
      "run.yaml:3:3: key `train.rate` is repeated; it stands first at line 2, column 3\n"
      "run.yaml:4:10: tags (tag:yaml.org,2002:int) are not allowed; the schema knows the type\n"
      "run.yaml:5:10: `train.title` is an empty list; allowed: text\n"
      "run.yaml:6:1: unknown key `foo` (value 1); allowed here: train, model\n"
      "--set train.rate=x: `train.rate` is x (not a number); allowed: number >= 0");
}

TEST(ConfigSchema, ReportsAtMostTwentyProblems) {
  std::string text;
  for (int i = 0; i < 25; ++i) text += "zzzzzz" + std::to_string(i) + ": 1\n";
  const std::string message = error_of(text);
  EXPECT_TRUE(contains(message, "zzzzzz19"));
  EXPECT_FALSE(contains(message, "zzzzzz20"));
  EXPECT_TRUE(message.ends_with("\n... and 5 more problems"));
}

TEST(ConfigSchema, OverridesUseTheSameParsers) {
  Fixture f;
  f.load("train: {rate: 1}\nmodel: {layers: [{name: a}]}",
         {"train.rate=2", "train.steps=1e3", "model.range=[0, 0.5]", "model.files=[x, y]", "train.title=a=b",
          "model.layers=[{name: b, size: {width: 3}}, {name: c}]", "train.rate=3"});
  EXPECT_EQ(f.rate, 3);
  EXPECT_EQ(f.steps, 1000);
  EXPECT_EQ(f.range[1], 0.5);
  EXPECT_EQ(f.files, (std::vector<std::string>{"x", "y"}));
  EXPECT_EQ(f.title, "a=b");
  ASSERT_EQ(f.layers.size(), 2U);
  EXPECT_EQ(f.layers[0].width, 3);
  EXPECT_EQ(f.schema.origin("train.rate"), "--set");
  EXPECT_EQ(f.schema.origin("model.layers[0].name"), "--set");
  EXPECT_EQ(f.schema.origin("model.layers[1].color"), "default");
}

TEST(ConfigSchema, OverridesAreAsStrict) {
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"train.rate=-1", "`train.rate` is -1; allowed: number >= 0"},
      {"train.rate=\"1\"", "`train.rate` is \"1\" (quoted, and so text); allowed: number >= 0"},
      {"train.rate=", "`train.rate` is empty; allowed: number >= 0"},
      {"train.rate=&x 1", "anchors (&name) are not allowed; write the value where it is needed"},
      {"train.rate=[", "not valid YAML: end of sequence flow not found"},
      {"train.rat=1", "unknown key `train.rat` (value 1); did you mean `train.rate` (number >= 0)?"},
      {"rate=1", "unknown key `rate` (value 1); did you mean `train.rate` (number >= 0)?"},
      {"speed=1", "unknown key `speed` (value 1); did you mean `train.rate` (number >= 0)?"},
      {"train={rate: 1}",
       "`train` is a section; set one of its keys: rate, scale, steps, bucket, verbose, title"},
      {"model.layers[0].name=x",
       "a list is set as a whole: model.layers=[...] (list of maps with the keys name, size.width, color)"},
      {"model.layers=[{}]", "missing key `model.layers[0].name` (text, not empty)"},
      {"train.rate", "expected key=value"},
      {"=1", "expected key=value"},
  };
  for (const auto& [text, message] : cases) {
    const std::vector<std::string> overrides = {text};
    EXPECT_EQ(error_of("model: {layers: [{name: a}]}", overrides), "--set " + text + ": " + message);
  }
  Fixture f;
  EXPECT_EQ(thrown_message<ConfigError>([&] { f.schema.apply_overrides({"train.steps=0"}); }),
            "--set train.steps=0: `train.steps` is 0; allowed: integer in [1, 1e+09], in steps");
}

TEST(ConfigSchema, RequiredKeysMayComeFromAnOverride) {
  std::vector<std::string> files;
  std::string dir;
  ConfigSchema schema;
  schema.add("data.files", files, "Files.").required().not_empty();
  schema.add("data.dir", dir, "Directory.");
  const auto error = [&](const std::string& text) {
    return thrown_message<ConfigError>([&] { schema.load_text(text, "run.yaml"); });
  };
  EXPECT_EQ(error("{}"), "run.yaml:1:1: missing key `data.files` (list of texts, not empty)");
  EXPECT_EQ(error("\ndata:\n  dir: x"), "run.yaml:3:3: missing key `data.files` (list of texts, not empty)");
  EXPECT_EQ(error("data: {files: []}"),
            "run.yaml:1:15: `data.files` is an empty list; allowed: list of texts, not empty");
  EXPECT_EQ(error("data: {files: 3}"), "run.yaml:1:15: `data.files` is 3; allowed: list of texts, not empty");
  schema.load_text("data: {dir: x}", "run.yaml", {"data.files=[a]"});
  EXPECT_EQ(files, std::vector<std::string>{"a"});
  files.clear();
  EXPECT_EQ(schema.problems(),
            std::vector<std::string>{"`data.files` is []; allowed: list of texts, not empty"});
}

TEST(ConfigSchema, PrintsEveryValueWithItsOrigin) {
  Fixture f;
  f.load(
      "train:\n  rate: 1e-3\nmodel:\n  layers:\n    - name: \"q\\\"\\\\\\n\\t#\"\n      size:\n        "
      "width: 3\n",
      {"train.steps=5"});
  f.bucket = 128;
  f.files = {"a: b"};
  EXPECT_EQ(f.schema.to_yaml(),
            "train:\n"
            "  rate: 0.001  # run.yaml:2:9\n"
            "  scale: 0.25  # default\n"
            "  steps: 5  # --set\n"
            "  bucket: 128  # set by the program\n"
            "  verbose: false  # default\n"
            "  title: \"run\"  # default\n"
            "model:\n"
            "  color: red  # default\n"
            "  range: [0, 1]  # default\n"
            "  files: [\"a: b\"]  # set by the program\n"
            "  layers:  # run.yaml:5:5\n"
            "    - name: \"q\\\"\\\\\\n\\x09#\"  # run.yaml:5:13\n"
            "      size:\n"
            "        width: 3  # run.yaml:7:16\n"
            "      color: red  # default\n");
  EXPECT_EQ(f.schema.origin("train.rate"), "run.yaml:2:9");
  EXPECT_EQ(f.schema.origin("model.layers[0].size.width"), "run.yaml:7:16");
  EXPECT_TRUE(contains(thrown_message<ContractError>([&] { (void)f.schema.origin("train.x"); }),
                       "origin of `train.x`: there is no such configuration key"));
}

TEST(ConfigSchema, WhatItPrintsLoadsBackToTheSameValues) {
  Fixture a;
  a.rate = 0.1 + 0.2;
  a.scale = 1.1754944e-38F;
  a.steps = 999'999'999;
  a.bucket = std::int64_t{1} << 62;
  a.verbose = true;
  a.title = "\xC3\xA9 'x' \"y\" \\ # : \n\x01 null";
  a.color = Color::kGreen;
  a.range = {1e-300, 1};
  a.files = {"", "true", "1", "- a", std::string(300, 'x')};
  a.layers = {{"one", 1, Color::kGreen}, {"two", 2, Color::kRed}};
  Fixture b;
  b.load(a.schema.to_yaml());
  EXPECT_EQ(b.rate, a.rate);
  EXPECT_EQ(b.scale, a.scale);
  EXPECT_EQ(b.steps, a.steps);
  EXPECT_EQ(b.bucket, a.bucket);
  EXPECT_EQ(b.verbose, a.verbose);
  EXPECT_EQ(b.title, a.title);
  EXPECT_EQ(b.color, a.color);
  EXPECT_EQ(b.range, a.range);
  EXPECT_EQ(b.files, a.files);
  ASSERT_EQ(b.layers.size(), 2U);
  EXPECT_EQ(b.layers[1].name, "two");
  EXPECT_EQ(b.layers[0].color, Color::kGreen);
  EXPECT_EQ(b.layers[1].width, 2);
}

TEST(ConfigSchema, PrintsAPathWithoutBreakingTheYaml) {
  Fixture f;
  f.schema.load_text("train: {rate: 1}", "odd # name\n" + std::string(200, 'x') + ".yaml");
  Fixture g;
  g.load(f.schema.to_yaml());
  EXPECT_EQ(g.rate, 1);
  EXPECT_EQ(f.schema.origin("train.rate"), "odd # name\\n" + std::string(200, 'x') + ".yaml:1:15");
}

TEST(ConfigSchema, ChecksTheValuesOfAProgram) {
  Fixture f;
  EXPECT_EQ(f.schema.problems(), std::vector<std::string>{});
  f.rate = -1;
  f.steps = 0;
  f.color = static_cast<Color>(7);
  f.range[1] = 1.5;
  f.layers = {{"", 0, Color::kRed}};
  EXPECT_EQ(f.schema.problems(),
            (std::vector<std::string>{"`train.rate` is -1; allowed: number >= 0",
                                      "`train.steps` is 0; allowed: integer in [1, 1e+09], in steps",
                                      "`model.color` is no valid choice; allowed: one of red, green",
                                      "`model.range` is [0, 1.5]; allowed: list of 2 numbers in [0, 1]",
                                      "`model.layers[0].name` is \"\"; allowed: text, not empty",
                                      "`model.layers[0].size.width` is 0; allowed: integer >= 1"}));
  f.rate = std::numeric_limits<double>::quiet_NaN();
  EXPECT_EQ(f.schema.problems().front(), "`train.rate` is nan; allowed: number >= 0");
}

TEST(ConfigSchema, ListsItsKeysAndDocuments) {
  const Fixture f;
  EXPECT_EQ(
      f.schema.keys(),
      (std::vector<std::string>{"train.rate", "train.scale", "train.steps", "train.bucket", "train.verbose",
                                "train.title", "model.color", "model.range", "model.files", "model.layers",
                                "model.layers[].name", "model.layers[].size.width", "model.layers[].color"}));
  const std::string table = f.schema.markdown_table();
  EXPECT_TRUE(table.starts_with("| key | default | allowed | meaning |\n| --- | --- | --- | --- |\n"));
  EXPECT_TRUE(
      contains(table, "\n| `train.steps` | `10` | integer in [1, 1e+09], in steps | Number of steps. |\n"));
  EXPECT_TRUE(contains(table, "\n| `model.layers[].name` | required | text, not empty | Its name. |\n"));
}

TEST(ConfigSchema, RunsActionsAfterEveryCleanLoad) {
  Fixture f;
  int runs = 0;
  f.schema.after_load([&] {
    ++runs;
    f.steps = 42;
  });
  f.error("train: {rate: x}");
  EXPECT_EQ(runs, 0);
  f.load("{}");
  EXPECT_EQ(runs, 1);
  EXPECT_EQ(f.schema.origin("train.steps"), "set by the program");
}

TEST(ConfigSchema, LoadsAFileUnderTheNameItWasGiven) {
  const std::string path = testing::TempDir() + "config_schema_test.yaml";
  std::ofstream(path) << "train:\n  rate: 7\n";
  Fixture f;
  f.schema.load_file(path, {"train.steps=2"});
  EXPECT_EQ(f.rate, 7);
  EXPECT_EQ(f.steps, 2);
  EXPECT_EQ(f.schema.origin("train.rate"), path + ":2:9");
}

TEST(ConfigSchema, RefusesBadKeysOfAProgram) {
  Fixture f;
  bool value = false;
  const auto error = [&](const std::string& key) {
    return thrown_message<ContractError>([&] { f.schema.add(key, value, "A flag."); });
  };
  EXPECT_TRUE(contains(error("train.rate"), "configuration key `train.rate` is there already"));
  EXPECT_TRUE(contains(error("train"), "configuration key `train` is a section of other keys"));
  EXPECT_TRUE(contains(error("train.rate.x"),
                       "configuration key `train.rate.x` lies in `train.rate`, which is no section"));
  for (const std::string key : {"", ".a", "a.", "a..b", "A", "a b", "a[0]"}) {
    EXPECT_TRUE(contains(error(key), "expected lower-case names joined by single dots")) << key;
  }
}

TEST(Bounds, TestAndDescribeTheirEnds) {
  struct Row {
    Bounds bounds;
    std::string text;
    std::vector<double> inside;
    std::vector<double> outside;
  };
  const std::vector<Row> rows = {
      {Bounds::any(), "number", {-1e300, 0, 1e300}, {}},
      {Bounds::at_least(2), "number >= 2", {2, 3}, {1.9}},
      {Bounds::above(2), "number > 2", {2.1}, {2, 1}},
      {Bounds::any().at_most(2), "number <= 2", {2, -5}, {2.1}},
      {Bounds::any().below(2), "number < 2", {1.9}, {2}},
      {Bounds::at_least(0).at_most(1), "number in [0, 1]", {0, 1}, {-0.1, 1.1}},
      {Bounds::at_least(0).below(1), "number in [0, 1)", {0, 0.9}, {1}},
      {Bounds::above(0).at_most(1), "number in (0, 1]", {1, 0.1}, {0}},
      {Bounds::at_least(5).or_zero("off"), "number >= 5, or 0 (off)", {0, 5}, {1, -1}},
  };
  for (const Row& row : rows) {
    EXPECT_EQ(row.bounds.text("number"), row.text);
    for (const double value : row.inside) EXPECT_TRUE(row.bounds.allows(value)) << row.text << " " << value;
    for (const double value : row.outside) EXPECT_FALSE(row.bounds.allows(value)) << row.text << " " << value;
    EXPECT_FALSE(row.bounds.allows(std::numeric_limits<double>::infinity()));
    EXPECT_FALSE(row.bounds.allows(std::numeric_limits<double>::quiet_NaN()));
  }
}

TEST(ConfigSchema, AnEmptyValueIsWrittenInherit) {
  std::optional<double> rate;
  std::optional<std::array<double, 2>> range;
  ConfigSchema schema;
  schema.add("rate", rate, Bounds::at_least(0), "A rate; inherit: another.");
  schema.add("range", range, Bounds::at_least(-9).below(1), "A range; inherit: another.");
  EXPECT_EQ(schema.to_yaml(), "rate: inherit  # default\nrange: inherit  # default\n");
  schema.load_text("{rate: 0, range: [-1, 0.5]}", "a.yaml");
  EXPECT_EQ(rate, 0.0);
  EXPECT_EQ(range, (std::array<double, 2>{-1, 0.5}));
  EXPECT_EQ(schema.to_yaml(), "rate: 0  # a.yaml:1:8\nrange: [-1, 0.5]  # a.yaml:1:18\n");
  schema.load_text("{rate: inherit, range: inherit}", "a.yaml");
  EXPECT_EQ(rate, std::nullopt);
  EXPECT_EQ(range, std::nullopt);

  const auto error = [&](const std::string& text) {
    return thrown_message<ConfigError>([&] { schema.load_text(text, "a.yaml"); });
  };
  EXPECT_EQ(error("rate: 'inherit'"),
            "a.yaml:1:7: `rate` is \"inherit\" (quoted, and so text); allowed: number >= 0, or inherit");
  EXPECT_EQ(error("rate: -1"), "a.yaml:1:7: `rate` is -1; allowed: number >= 0, or inherit");
  EXPECT_EQ(error("range: 0"), "a.yaml:1:8: `range` is 0; allowed: list of 2 numbers in [-9, 1), or inherit");
  EXPECT_EQ(error("range: [0, 1]"),
            "a.yaml:1:12: `range[1]` is 1; allowed: list of 2 numbers in [-9, 1), or inherit");
  rate = -1;
  range = {0, 1};
  EXPECT_EQ(schema.problems(), (std::vector<std::string>{
                                   "`rate` is -1; allowed: number >= 0, or inherit",
                                   "`range` is [0, 1]; allowed: list of 2 numbers in [-9, 1), or inherit"}));
}

}  // namespace
}  // namespace mxopt
