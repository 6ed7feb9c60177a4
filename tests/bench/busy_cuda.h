// A stand-in for a trainer's computation: it takes time on a stream, and nothing else.
#pragma once

#include "mxopt/params/memory.h"

namespace mxopt::bench {

/// Keeps `stream` busy for `us` microseconds with one thread, so that all memory and nearly all
/// multiprocessors are left to others: what it hides is the most that a computation of this length can hide.
void keep_busy(double us, StreamRef stream);

/// More than the host takes to queue a step: in front of what is timed by events, so that its time does not
/// count.
inline constexpr double kHeadStartUs = 3000;

}  // namespace mxopt::bench
