// A stand-in for a trainer's computation: it takes time on a stream, and nothing else.
#pragma once

#include "mxopt/params/memory.h"

namespace mxopt::bench {

/// Keeps `stream` busy for `us` microseconds with one thread, so that all memory and nearly all
/// multiprocessors are left to others: what it hides is the most that a computation of this length can hide.
void keep_busy(double us, StreamRef stream);

}  // namespace mxopt::bench
