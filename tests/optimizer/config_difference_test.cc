#include "mxopt/optimizer/config_difference.h"

#include <gtest/gtest.h>

#include "mxopt/optimizer/config.h"

namespace mxopt {
namespace {

using Lines = std::vector<std::string>;

TEST(ConfigDifferences, AreKeysWithBothValues) {
  const std::string before = "a: {b: 1, c: [2, {d: x}]}\nonly: old\nsame: 7\n";
  const std::string now = "same: 7\na:\n  b: 1\n  c: [3, {d: y}, 4]\nmore: new\n";
  EXPECT_EQ(config_differences(before, now),
            (Lines{"a.c[0]: 2, now 3", "a.c[1].d: x, now y", "a.c[2]: nothing, now 4",
                   "more: nothing, now new", "only: old, now nothing"}));
  EXPECT_EQ(config_differences(before, before), Lines{});
}

TEST(ConfigDifferences, OfTextsThatAreNoYamlAreAllKeysOfTheOther) {
  EXPECT_EQ(config_differences("a: [", "b: 1"), Lines{"b: nothing, now 1"});
  EXPECT_EQ(config_differences("", "b: 1"), Lines{"b: nothing, now 1"});
}

TEST(ConfigDifferences, OfTheLibrarysOwnTexts) {
  Config config;
  config.optimizer.groups.push_back({"norm.*", "norms"});
  const std::string before = configuration_text(config);
  config.optimizer.lr = 0.5;
  config.optimizer.groups[0].eps = 0.25;
  const Lines lines = config_differences(before, configuration_text(config));
  ASSERT_EQ(lines.size(), 2U);
  EXPECT_EQ(lines[0].substr(0, 24), "optimizer.groups[0].eps:");
  EXPECT_EQ(lines[1], "optimizer.lr: 3e-04, now 0.5");
}

}  // namespace
}  // namespace mxopt
