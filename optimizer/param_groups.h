// Which param belongs to which group of hyper-parameters.
#pragma once

#include <array>
#include <span>
#include <string>
#include <vector>

#include "mxopt/optimizer/config.h"
#include "mxopt/optimizer/schedule.h"
#include "mxopt/params/layout.h"

namespace mxopt {

/// Hyper-parameters of one group, changeable between steps.
struct ParamGroup {
  std::string name;
  LrRange lr;  // the schedule runs between these
  WeightDecayRange weight_decay;
  std::array<double, 2> betas = {0, 0};
  double eps = 0;
  bool has_decay = true;   // false: of all its params the weight decay is 0, see GroupPart
  int norm = 0;            // index into ParamGroups::norms
  bool is_matched = true;  // false: no param of this rank matches its pattern
};

/// Params of one group that have the same scalars in a step.
struct GroupPart {
  int group = 0;
  bool has_decay = true;  // false: params of one dimension, whose weight decay is 0 whatever the group's is
};

/// Params whose gradients have one norm and one clip factor.
struct NormGroup {
  std::string name;     // empty: the common one
  double max_norm = 0;  // 0: no clipping
};

struct ParamGroups {
  std::vector<ParamGroup> groups;  // "default" first, then those of the configuration, in order
  std::vector<int> group_of;       // [params]
  std::vector<GroupPart> parts;    // one of every group, in order, then those without weight decay
  std::vector<int> part_of;        // [params]
  std::vector<NormGroup> norms;    // the common one first, then by the first group that names it

  /// Throws ContractError naming the groups there are.
  ParamGroup& find(std::string_view name);
};

/// The first pattern (shell wildcards) that matches a param's name and dimensions decides; the others are in
/// "default". Params of one dimension are in a part without weight decay unless their group or decay_1d says
/// otherwise.
/// may_match_nothing  a pattern need not match a param of this rank, see ParamGroup::is_matched.
/// Throws ConfigError for a pattern that matches no param, or a group name used twice.
ParamGroups make_param_groups(const Config& config, std::span<const ParamLayout> params,
                              bool may_match_nothing = false);

}  // namespace mxopt
