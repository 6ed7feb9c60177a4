// First values of an optimizer's masters.
#pragma once

#include <algorithm>
#include <cstdint>

#include "bench/random_values.h"

#include "mxopt/optimizer/distributed_adam.h"

namespace mxopt::bench {

/// Gives this rank's part of every param the values, from the first of them on.
inline void set_masters(DistributedAdam& opt, const RandomValues& values, StreamRef stream) {
  const ConstTypedSpan period = values.period();
  for (const ParamLayout& param : opt.layout().params()) {
    const OwnedSlice slice = opt.owned(param.name);
    const auto owned = static_cast<std::int64_t>(slice.master.size());
    for (std::int64_t begin = 0; begin < owned; begin += period.elems) {
      opt.set_initial(param.name, slice.param_begin + begin,
                      period.sub(0, std::min(period.elems, owned - begin)), stream);
    }
  }
}

}  // namespace mxopt::bench
