#include "mxopt/optimizer/param_groups.h"

#include <algorithm>

#include <fnmatch.h>

namespace mxopt {

namespace {

bool matches(const GroupConfig& group, const ParamLayout& param) {
  return (group.ndim == 0 || group.ndim == static_cast<std::int64_t>(param.shape.size())) &&
         ::fnmatch(group.match.c_str(), param.name.c_str(), 0) == 0;
}

WeightDecayRange weight_decay_of(const GroupConfig& group, WeightDecayRange decay) {
  if (group.weight_decay) return {*group.weight_decay, *group.weight_decay};
  const double factor = group.weight_decay_mult.value_or(1);
  return {decay.start * factor, decay.end * factor};
}

/// The number of the group's norm, which is added when it is a new one.
int norm_of(const GroupConfig& group, const OptimizerConfig& optimizer, std::vector<NormGroup>& norms) {
  const auto known = std::ranges::find(norms, group.norm_group, &NormGroup::name);
  const auto at = static_cast<int>(known - norms.begin());
  if (known == norms.end()) {
    norms.push_back({group.norm_group, group.clip_grad.value_or(optimizer.clip_grad)});
  }
  return at;
}

/// Whether the group decays its params of one dimension too.
bool decays_all(const OptimizerConfig& optimizer, int group) {
  if (optimizer.decay_1d) return true;
  if (group == 0) return false;
  const GroupConfig& config = optimizer.groups[static_cast<std::size_t>(group - 1)];
  return config.weight_decay || config.weight_decay_mult;
}

void add_parts(const OptimizerConfig& optimizer, std::span<const ParamLayout> params, ParamGroups& result) {
  const int groups = static_cast<int>(result.groups.size());
  for (int group = 0; group < groups; ++group) result.parts.push_back({group, true});
  result.part_of = result.group_of;
  for (int group = 0; group < groups; ++group) {
    if (decays_all(optimizer, group)) continue;
    bool any_decays = false, any_does_not = false;
    for (std::size_t p = 0; p < params.size(); ++p) {
      if (result.group_of[p] != group) continue;
      const bool decays = params[p].shape.size() != 1;
      (decays ? any_decays : any_does_not) = true;
      if (!decays) result.part_of[p] = static_cast<int>(result.parts.size());
    }
    if (!any_does_not) continue;
    result.parts.push_back({group, false});
    result.groups[static_cast<std::size_t>(group)].has_decay = any_decays;
  }
}

}  // namespace

ParamGroup& ParamGroups::find(std::string_view name) {
  const auto found = std::ranges::find(groups, name, &ParamGroup::name);
  if (found != groups.end()) return *found;
  std::string names;
  for (const ParamGroup& group : groups) names += (names.empty() ? "" : ", ") + group.name;
  throw ContractError("unknown param group '" + std::string(name) + "'; groups are: " + names);
}

ParamGroups make_param_groups(const Config& config, std::span<const ParamLayout> params,
                              bool may_match_nothing) {
  const OptimizerConfig& optimizer = config.optimizer;
  const WeightDecayRange decay = {optimizer.weight_decay,
                                  config.schedule.end_weight_decay.value_or(optimizer.weight_decay)};
  ParamGroups result;
  result.groups.push_back(
      {"default", {optimizer.lr, config.schedule.min_lr}, decay, optimizer.betas, optimizer.eps, true});
  result.norms.push_back({"", optimizer.clip_grad});
  result.group_of.assign(params.size(), 0);
  for (std::size_t g = 0; g < optimizer.groups.size(); ++g) {
    const GroupConfig& group = optimizer.groups[g];
    const std::string key = "optimizer.groups[" + std::to_string(g) + "]";
    const std::string& name = group_name(group);
    if (name == "*" || std::ranges::find(result.groups, name, &ParamGroup::name) != result.groups.end()) {
      throw ConfigError(key + ".name: '" + name +
                        "' is taken; allowed is a name that no other group has, and not '*'");
    }
    result.groups.push_back({name,
                             {peak_lr(group, optimizer.lr), group.min_lr.value_or(config.schedule.min_lr)},
                             weight_decay_of(group, decay),
                             group.betas.value_or(optimizer.betas),
                             group.eps.value_or(optimizer.eps),
                             true,
                             norm_of(group, optimizer, result.norms)});
    bool matched = false;
    for (std::size_t p = 0; p < params.size(); ++p) {
      if (!matches(group, params[p])) continue;
      matched = true;
      if (result.group_of[p] == 0) result.group_of[p] = static_cast<int>(g) + 1;
    }
    result.groups.back().is_matched = matched;
    if (!matched && !may_match_nothing) {
      throw ConfigError(
          key + ".match: '" + group.match + "'" +
          (group.ndim == 0 ? "" : " with ndim " + std::to_string(group.ndim)) + " matches none of the " +
          std::to_string(params.size()) + " params" +
          (params.empty() ? std::string() : ", the first of which is '" + params[0].name + "'"));
    }
  }
  add_parts(optimizer, params, result);
  return result;
}

}  // namespace mxopt
