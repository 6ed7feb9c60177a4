// Does a checkpoint fit the params there are?
#pragma once

#include <string>
#include <vector>

#include "mxopt/optimizer/checkpoint/checkpoint_contents.h"
#include "mxopt/params/layout.h"

namespace mxopt {

/// A line for every param of `layout` that the section does not have, has with another shape or, with
/// `with_moments`, without the moments it needs; and for every param of the section that the layout does not
/// have. Empty: it fits.
std::vector<std::string> restore_problems(const CheckpointSection& section, const Layout& layout,
                                          bool with_moments);

}  // namespace mxopt
