#include "mxopt/optimizer/param_groups.h"

#include <array>
#include <cstdint>
#include <string>
#include <utility>
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

Config config_with(std::vector<GroupConfig> groups) {
  Config config;
  config.optimizer.lr = 0.5;
  config.optimizer.weight_decay = 0.25;
  config.optimizer.betas = {0.75, 0.5};
  config.optimizer.eps = 0.125;
  config.optimizer.groups = std::move(groups);
  config.schedule.min_lr = 0.0625;
  return config;
}

TEST(ParamGroups, WithoutGroupsEverythingIsInTheDefault) {
  const Layout layout = layout_of({"a", "b"});
  const ParamGroups groups = make_param_groups(config_with({}), layout.params());
  ASSERT_EQ(groups.groups.size(), 1u);
  EXPECT_EQ(groups.groups[0].name, "default");
  EXPECT_EQ(groups.groups[0].lr.peak, 0.5);
  EXPECT_EQ(groups.groups[0].lr.floor, 0.0625);
  EXPECT_EQ(groups.groups[0].weight_decay.start, 0.25);
  EXPECT_EQ(groups.groups[0].betas, (std::array<double, 2>{0.75, 0.5}));
  EXPECT_EQ(groups.groups[0].eps, 0.125);
  EXPECT_EQ(groups.group_of, std::vector<int>({0, 0}));
}

TEST(ParamGroups, TheFirstPatternThatMatchesWins) {
  const Layout layout = layout_of({"layer0.norm", "layer0.qkv", "layer1.norm", "head"});
  const ParamGroups groups =
      make_param_groups(config_with({{"*.norm", "norms", 2, 0}, {"layer0.*", "", 0.5, 4}}), layout.params());
  EXPECT_EQ(groups.group_of, std::vector<int>({1, 2, 1, 0}));
  EXPECT_EQ(groups.groups[1].name, "norms");
  EXPECT_EQ(groups.groups[1].lr.peak, 1.0);
  EXPECT_EQ(groups.groups[1].weight_decay.start, 0.0);
  EXPECT_EQ(groups.groups[2].name, "layer0.*");
  EXPECT_EQ(groups.groups[2].lr.peak, 0.25);
  EXPECT_EQ(groups.groups[2].weight_decay.start, 1.0);
}

TEST(ParamGroups, PatternsAreShellWildcards) {
  const Layout layout = layout_of({"block.0.w", "block.1.w", "block.12.w"});
  const ParamGroups groups = make_param_groups(config_with({{"block.[0-1].w", "", 1, 1}}), layout.params());
  EXPECT_EQ(groups.group_of, std::vector<int>({1, 1, 0}));
}

TEST(ParamGroups, AGroupOverridesWhatItNamesAndInheritsTheRest) {
  const Layout layout = layout_of({"embed", "head"});
  const ParamGroups groups = make_param_groups(
      config_with({{.match = "embed", .name = "", .lr = 0.03125, .min_lr = 0.0, .weight_decay = 2.0},
                   {.match = "head", .name = "", .lr_mult = 4, .betas = {{0.5, 0.25}}, .eps = 0.0}}),
      layout.params());
  const ParamGroup& embed = groups.groups[1];
  EXPECT_EQ(embed.lr.peak, 0.03125);
  EXPECT_EQ(embed.lr.floor, 0);
  EXPECT_EQ(embed.weight_decay.start, 2);
  EXPECT_EQ(embed.betas, groups.groups[0].betas);
  EXPECT_EQ(embed.eps, 0.125);
  const ParamGroup& head = groups.groups[2];
  EXPECT_EQ(head.lr.peak, 2);
  EXPECT_EQ(head.lr.floor, 0.0625);
  EXPECT_EQ(head.weight_decay.start, 0.25);
  EXPECT_EQ(head.betas, (std::array<double, 2>{0.5, 0.25}));
  EXPECT_EQ(head.eps, 0);
}

TEST(ParamGroups, TheEndOfTheWeightDecayIsScaledUnlessTheGroupHasAValueOfItsOwn) {
  const Layout layout = layout_of({"a", "b", "c"});
  Config config = config_with(
      {{.match = "b", .name = "", .weight_decay_mult = 2}, {.match = "c", .name = "", .weight_decay = 0.5}});
  config.schedule.weight_decay_kind = WeightDecayKind::kLinear;
  config.schedule.end_weight_decay = 0.75;
  const ParamGroups groups = make_param_groups(config, layout.params());
  EXPECT_EQ(groups.groups[0].weight_decay.start, 0.25);
  EXPECT_EQ(groups.groups[0].weight_decay.end, 0.75);
  EXPECT_EQ(groups.groups[1].weight_decay.start, 0.5);
  EXPECT_EQ(groups.groups[1].weight_decay.end, 1.5);
  EXPECT_EQ(groups.groups[2].weight_decay.start, 0.5);
  EXPECT_EQ(groups.groups[2].weight_decay.end, 0.5);
}

TEST(ParamGroups, DimensionsDecideBesideThePattern) {
  std::vector<ParamSpec> specs;
  for (const auto& [name, shape] : std::vector<std::pair<std::string, std::vector<std::int64_t>>>{
           {"a.bias", {4}}, {"a.weight", {4, 4}}, {"b.stack", {2, 4, 4}}, {"b.bias", {4}}}) {
    ParamSpec spec;
    spec.name = name;
    spec.shape = shape;
    specs.push_back(spec);
  }
  const Layout layout(std::move(specs), {});
  std::vector<GroupConfig> configs = {{.match = "a.*", .name = "vectors of a", .ndim = 1},
                                      {.match = "*", .name = "stacks", .ndim = 3}};
  EXPECT_EQ(make_param_groups(config_with(configs), layout.params()).group_of,
            std::vector<int>({1, 0, 2, 0}));
  configs[1].ndim = 4;
  EXPECT_EQ(thrown_message<ConfigError>([&] { make_param_groups(config_with(configs), layout.params()); }),
            "optimizer.groups[1].match: '*' with ndim 4 matches none of the 4 params, the first of which is "
            "'a.bias'");
}

TEST(ParamGroups, ParamsOfOneDimensionHaveAPartWithoutDecay) {
  std::vector<ParamSpec> specs;
  for (const auto& [name, shape] : std::vector<std::pair<std::string, std::vector<std::int64_t>>>{
           {"a.bias", {4}}, {"a.weight", {4, 1}}, {"b.bias", {4}}, {"c.bias", {4}}, {"d.bias", {4}}}) {
    ParamSpec spec;
    spec.name = name;
    spec.shape = shape;
    specs.push_back(spec);
  }
  const Layout layout(std::move(specs), {});
  Config config = config_with({{.match = "b.*", .name = "", .lr_mult = 2},
                               {.match = "c.*", .name = "", .weight_decay_mult = 1},
                               {.match = "d.*", .name = "", .weight_decay = 1}});
  const ParamGroups groups = make_param_groups(config, layout.params());
  EXPECT_EQ(groups.group_of, std::vector<int>({0, 0, 1, 2, 3}));
  EXPECT_EQ(groups.part_of, std::vector<int>({4, 0, 5, 2, 3}));
  ASSERT_EQ(groups.parts.size(), 6u);
  for (int part = 0; part < 6; ++part) {
    EXPECT_EQ(groups.parts[static_cast<std::size_t>(part)].group, part % 4);
    EXPECT_EQ(groups.parts[static_cast<std::size_t>(part)].has_decay, part < 4);
  }
  EXPECT_TRUE(groups.groups[0].has_decay);
  EXPECT_FALSE(groups.groups[1].has_decay);
  EXPECT_TRUE(groups.groups[2].has_decay);

  config.optimizer.decay_1d = true;
  const ParamGroups decaying = make_param_groups(config, layout.params());
  EXPECT_EQ(decaying.part_of, decaying.group_of);
  EXPECT_EQ(decaying.parts.size(), 4u);
  EXPECT_TRUE(decaying.groups[1].has_decay);
}

TEST(ParamGroups, GroupsThatNameANormShareIt) {
  const Layout layout = layout_of({"a", "b", "c", "d"});
  std::vector<GroupConfig> configs(4);
  for (std::size_t i = 0; i < configs.size(); ++i) configs[i].match = std::string(1, "abcd"[i]);
  configs[0].norm_group = configs[3].norm_group = "first";
  configs[0].clip_grad = configs[3].clip_grad = 0.25;
  configs[2].norm_group = "second";
  Config config = config_with(configs);
  config.optimizer.clip_grad = 3;
  const ParamGroups groups = make_param_groups(config, layout.params());
  ASSERT_EQ(groups.norms.size(), 3U);
  EXPECT_EQ(groups.norms[0].max_norm, 3);
  EXPECT_EQ(groups.norms[1].name, "first");
  EXPECT_EQ(groups.norms[1].max_norm, 0.25);
  EXPECT_EQ(groups.norms[2].name, "second");
  EXPECT_EQ(groups.norms[2].max_norm, 3);
  const int expected[] = {0, 1, 0, 2, 1};
  for (std::size_t i = 0; i < std::size(expected); ++i) EXPECT_EQ(groups.groups[i].norm, expected[i]) << i;
}

TEST(ParamGroups, APatternNeedNotMatchWhereThatIsSaid) {
  const Layout layout = layout_of({"a"});
  const ParamGroups groups =
      make_param_groups(config_with({{"a", "first", 1, 1}, {"b", "", 1, 1}}), layout.params(), true);
  EXPECT_TRUE(groups.groups[0].is_matched);
  EXPECT_TRUE(groups.groups[1].is_matched);
  EXPECT_FALSE(groups.groups[2].is_matched);
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
