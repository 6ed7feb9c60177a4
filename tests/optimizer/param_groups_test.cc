#include "mxopt/optimizer/param_groups.h"

#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "support/thrown_message.h"

namespace mxopt {
namespace {

using test::contains;
using test::thrown_message;

Layout layout_of(const std::vector<std::string>& names) {
  std::vector<ParamSpec> specs;
  for (const std::string& name : names) {
    ParamSpec spec;
    spec.name = name;
    spec.shape = {4};
    specs.push_back(spec);
  }
  return Layout(std::move(specs), {});
}

OptimizerConfig config_with(std::vector<GroupConfig> groups) {
  OptimizerConfig config;
  config.lr = 0.5;
  config.weight_decay = 0.25;
  config.groups = std::move(groups);
  return config;
}

TEST(ParamGroups, WithoutGroupsEverythingIsInTheDefault) {
  const Layout layout = layout_of({"a", "b"});
  const ParamGroups groups = make_param_groups(config_with({}), layout.params());
  ASSERT_EQ(groups.groups.size(), 1u);
  EXPECT_EQ(groups.groups[0].name, "default");
  EXPECT_EQ(groups.groups[0].peak_lr, 0.5);
  EXPECT_EQ(groups.groups[0].weight_decay, 0.25);
  EXPECT_EQ(groups.group_of, std::vector<int>({0, 0}));
}

TEST(ParamGroups, TheFirstPatternThatMatchesWins) {
  const Layout layout = layout_of({"layer0.norm", "layer0.qkv", "layer1.norm", "head"});
  const ParamGroups groups =
      make_param_groups(config_with({{"*.norm", "norms", 2, 0}, {"layer0.*", "", 0.5, 4}}), layout.params());
  EXPECT_EQ(groups.group_of, std::vector<int>({1, 2, 1, 0}));
  EXPECT_EQ(groups.groups[1].name, "norms");
  EXPECT_EQ(groups.groups[1].peak_lr, 1.0);
  EXPECT_EQ(groups.groups[1].weight_decay, 0.0);
  EXPECT_EQ(groups.groups[2].name, "layer0.*");
  EXPECT_EQ(groups.groups[2].peak_lr, 0.25);
  EXPECT_EQ(groups.groups[2].weight_decay, 1.0);
}

TEST(ParamGroups, PatternsAreShellWildcards) {
  const Layout layout = layout_of({"block.0.w", "block.1.w", "block.12.w"});
  const ParamGroups groups = make_param_groups(config_with({{"block.[0-1].w", "", 1, 1}}), layout.params());
  EXPECT_EQ(groups.group_of, std::vector<int>({1, 1, 0}));
}

TEST(ParamGroups, APatternWithoutAParamIsAnError) {
  const Layout layout = layout_of({"layer0.norm", "head"});
  const std::string text = thrown_message<ConfigError>([&] {
    make_param_groups(config_with({{"*norm", "", 1, 1}, {"bias*", "", 1, 1}}), layout.params());
  });
  EXPECT_TRUE(contains(text,
                       "optimizer.groups[1].match: 'bias*' matches none of the 2 params, the first of "
                       "which is 'layer0.norm'"));
  const std::string none = thrown_message<ConfigError>([&] {
    make_param_groups(config_with({{"*", "all", 1, 1}}), layout_of({}).params());
  });
  EXPECT_EQ(none, "optimizer.groups[0].match: '*' matches none of the 0 params");
}

TEST(ParamGroups, ANameIsUsedOnce) {
  const Layout layout = layout_of({"a", "b"});
  for (const std::string name : {"default", "*", "first"}) {
    const std::string text = thrown_message<ConfigError>([&] {
      make_param_groups(config_with({{"a", "first", 1, 1}, {"b", name, 1, 1}}), layout.params());
    });
    EXPECT_EQ(text, "optimizer.groups[1].name: '" + name +
                        "' is taken; allowed is a name that no other group has, and not '*'");
  }
}

TEST(ParamGroups, FindNamesTheGroupsThereAre) {
  const Layout layout = layout_of({"a", "b"});
  ParamGroups groups = make_param_groups(config_with({{"a", "first", 1, 1}}), layout.params());
  EXPECT_EQ(&groups.find("first"), &groups.groups[1]);
  EXPECT_EQ(thrown_message<ContractError>([&] { groups.find("frist"); }),
            "unknown param group 'frist'; groups are: default, first");
}

}  // namespace
}  // namespace mxopt
