#include "mxopt/optimizer/restore_check.h"

#include <gtest/gtest.h>

namespace mxopt {
namespace {

using Lines = std::vector<std::string>;

Layout layout_of(std::vector<ParamSpec> specs) {
  return Layout(std::move(specs), LayoutOptions());
}

ParamSpec param(std::string name, std::vector<std::int64_t> shape, bool frozen = false) {
  ParamSpec spec;
  spec.name = std::move(name);
  spec.shape = std::move(shape);
  spec.frozen = frozen;
  return spec;
}

CheckpointParam saved(std::string name, std::vector<std::int64_t> shape, bool with_moments = true) {
  CheckpointParam result;
  result.name = std::move(name);
  result.shape = std::move(shape);
  result.kinds = {StateKind::kMaster};
  if (with_moments) result.kinds.insert(result.kinds.end(), {StateKind::kExpAvg, StateKind::kExpAvgSq});
  return result;
}

TEST(RestoreCheck, FindsNothingWhereAllFits) {
  ParamSpec tied = param("head", {8, 8});
  tied.tied_to = "embed";
  const Layout layout = layout_of({param("embed", {8, 8}), param("table", {3}, true), tied});
  CheckpointSection section;
  section.params = {saved("table", {3}, false), saved("embed", {8, 8})};
  EXPECT_EQ(restore_problems(section, layout, true), Lines{});
  section.params[0] = saved("table", {3});  // it was trained before
  EXPECT_EQ(restore_problems(section, layout, true), Lines{});
}

TEST(RestoreCheck, NamesEveryParamThatDoesNotFit) {
  const Layout layout = layout_of({param("a.weight", {8, 8}), param("b", {3})});
  CheckpointSection section;
  section.params = {saved("a.weights", {8, 8}), saved("b", {3}, false)};
  EXPECT_EQ(restore_problems(section, layout, true),
            (Lines{"param 'a.weight' is not in the checkpoint; it has 'a.weights'",
                   "param 'b' was saved without moments, since it was frozen, and is not frozen here",
                   "param 'a.weights' of the checkpoint is not here"}));
  section.params = {saved("a.weight", {64}, false), saved("b", {3}, false)};
  EXPECT_EQ(restore_problems(section, layout, false),
            Lines{"param 'a.weight' has shape 64 in the checkpoint, here 8x8"});
}

}  // namespace
}  // namespace mxopt
