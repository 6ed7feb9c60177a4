#include "mxopt/optimizer/restore_check.h"

#include <algorithm>
#include <array>
#include <map>
#include <set>
#include <string_view>

#include "mxopt/params/nearest_name.h"

namespace mxopt {

namespace {

bool has_moments(const CheckpointParam& param) {
  return std::ranges::all_of(std::array{StateKind::kExpAvg, StateKind::kExpAvgSq}, [&](StateKind kind) {
    return std::ranges::find(param.kinds, kind) != param.kinds.end();
  });
}

}  // namespace

std::vector<std::string> restore_problems(const CheckpointSection& section, const Layout& layout,
                                          bool with_moments) {
  std::map<std::string, const CheckpointParam*> saved;
  std::vector<std::string_view> saved_names;
  for (const CheckpointParam& param : section.params) {
    saved[param.name] = &param;
    saved_names.push_back(param.name);
  }
  std::vector<std::string> problems;
  std::set<std::string> wanted;
  for (const ParamLayout& param : layout.params()) {
    if (param.tied_to >= 0) continue;
    wanted.insert(param.name);
    const auto at = saved.find(param.name);
    const std::string who = "param '" + param.name + "' ";
    if (at == saved.end()) {
      const std::string nearest(nearest_name(param.name, saved_names));
      problems.push_back(who + "is not in the checkpoint" +
                         (nearest.empty() ? "" : "; it has '" + nearest + "'"));
      continue;
    }
    const CheckpointParam& found = *at->second;
    if (found.shape != param.shape) {
      problems.push_back(who + "has shape " + shape_text(found.shape) + " in the checkpoint, here " +
                         shape_text(param.shape));
    }
    if (with_moments && !param.family.frozen && !has_moments(found)) {
      problems.push_back(who + "was saved without moments, since it was frozen, and is not frozen here");
    }
  }
  for (const auto& [name, param] : saved) {
    if (!wanted.contains(name)) problems.push_back("param '" + name + "' of the checkpoint is not here");
  }
  return problems;
}

}  // namespace mxopt
