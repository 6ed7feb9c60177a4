// The scalars of a first step, as the reference takes them.
#pragma once

#include "support/reference_adam.h"

#include "mxopt/optimizer/adam_math.h"

namespace mxopt::bench {

inline AdamScalars first_step_scalars(const reference::AdamSettings& s) {
  AdamScalars scalars;
  scalars.beta1 = static_cast<float>(s.beta1);
  scalars.beta2 = static_cast<float>(s.beta2);
  scalars.omb1 = scalars.bc1 = static_cast<float>(1 - s.beta1);
  scalars.omb2 = scalars.bc2 = static_cast<float>(1 - s.beta2);
  scalars.eps = static_cast<float>(s.eps);
  scalars.lr = static_cast<float>(s.lr);
  scalars.weight_decay = static_cast<float>(s.weight_decay);
  return scalars;
}

}  // namespace mxopt::bench
