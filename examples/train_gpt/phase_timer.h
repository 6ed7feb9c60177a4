// How long the phases of a step take: on the host by its clock, on a GPU by events on the stream that
// computes.
//
// One thread. A phase on a GPU lasts from the end of what the stream held when it began until the end of what
// it holds when the phase ends, so it counts waits of the stream for other streams, and for a host that is
// slow to enqueue.
#pragma once

#include <memory>

#include "mxopt/params/memory.h"

namespace train_gpt {

enum class Phase { kForward, kBackward, kOptimizer };

class PhaseTimer {
 public:
  explicit PhaseTimer(mxopt::Device device);
  ~PhaseTimer();
  PhaseTimer(const PhaseTimer&) = delete;
  PhaseTimer& operator=(const PhaseTimer&) = delete;

  /// Ends the phase that is open.
  void begin(Phase phase);
  void end();

  struct Times {
    double forward_ms = 0;
    double backward_ms = 0;
    double optimizer_ms = 0;
  };
  /// Sums since the last call. On a GPU the host waits until the last phase has ended.
  Times take();

 private:
  class Marks;
  std::unique_ptr<Marks> marks_;
};

}  // namespace train_gpt
