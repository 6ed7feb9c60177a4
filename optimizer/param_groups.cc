#include "mxopt/optimizer/param_groups.h"

#include <algorithm>

#include <fnmatch.h>

namespace mxopt {

ParamGroup& ParamGroups::find(std::string_view name) {
  const auto found = std::ranges::find(groups, name, &ParamGroup::name);
  if (found != groups.end()) return *found;
  std::string names;
  for (const ParamGroup& group : groups) names += (names.empty() ? "" : ", ") + group.name;
  throw ContractError("unknown param group '" + std::string(name) + "'; groups are: " + names);
}

ParamGroups make_param_groups(const OptimizerConfig& config, std::span<const ParamLayout> params) {
  ParamGroups result;
  result.groups.push_back({"default", config.lr, config.weight_decay});
  result.group_of.assign(params.size(), 0);
  for (std::size_t g = 0; g < config.groups.size(); ++g) {
    const GroupConfig& group = config.groups[g];
    const std::string key = "optimizer.groups[" + std::to_string(g) + "]";
    const std::string& name = group_name(group);
    if (name == "*" || std::ranges::find(result.groups, name, &ParamGroup::name) != result.groups.end()) {
      throw ConfigError(key + ".name: '" + name +
                        "' is taken; allowed is a name that no other group has, and not '*'");
    }
    result.groups.push_back({name, config.lr * group.lr_mult, config.weight_decay * group.weight_decay_mult});
    bool matched = false;
    for (std::size_t p = 0; p < params.size(); ++p) {
      if (::fnmatch(group.match.c_str(), params[p].name.c_str(), 0) != 0) continue;
      matched = true;
      if (result.group_of[p] == 0) result.group_of[p] = static_cast<int>(g) + 1;
    }
    if (!matched) {
      throw ConfigError(
          key + ".match: '" + group.match + "' matches none of the " + std::to_string(params.size()) +
          " params" + (params.empty() ? std::string() : ", the first of which is '" + params[0].name + "'"));
    }
  }
  return result;
}

}  // namespace mxopt
