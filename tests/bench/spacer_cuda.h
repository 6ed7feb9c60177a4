// A kernel that keeps calls apart in a graph.
#pragma once

#include "mxopt/params/memory.h"

namespace mxopt::bench {

/// Launches an empty kernel in the ordinary way: it begins when all before it is done, and only when it is
/// done does a later kernel begin, whatever that one allows.
void launch_spacer(StreamRef stream);

}  // namespace mxopt::bench
