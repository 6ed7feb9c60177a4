// The learning rate as a function of the taken steps.
#pragma once

#include <cstdint>

#include "mxopt/optimizer/config.h"

namespace mxopt {

/// Rate of taken step `step`, counted from 1: rises linearly to `peak` over warmup_steps, then stays, or
/// falls to the floor min(min_lr, peak) at decay_steps along a line or half a cosine, and stays there.
double scheduled_lr(const ScheduleConfig& schedule, double peak, std::int64_t step);

/// The first step, at least 1, from which on the rate stays the same.
std::int64_t last_lr_change(const ScheduleConfig& schedule);

}  // namespace mxopt
