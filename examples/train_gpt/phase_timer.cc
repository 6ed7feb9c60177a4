#include "train_gpt/phase_timer.h"

#include <chrono>
#include <cstddef>
#include <optional>
#include <vector>

#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include "train_gpt/compute_device.h"

#include "mxopt/params/check.h"

namespace train_gpt {
namespace {

/// Milliseconds between two events; the host waits for the second.
template <class Event>
double elapsed_ms(const Event& begin, const Event& end) {
  if constexpr (requires { begin.elapsedTime(end); }) {
    end.synchronize();
    return begin.elapsedTime(end);
  } else {
    // find_torch.cmake takes the CUDA part of no libtorch that is so old.
    throw mxopt::ContractError("this libtorch has no times between events");
  }
}

/// A moment of the host, or a place in the stream of a GPU.
class Mark {
 public:
  explicit Mark(mxopt::Device device) : device_(device) {
    // BACKEND_DEFAULT: with a time.
    if (on_gpu()) event_.emplace(tensor_device(device).type(), c10::EventFlag::BACKEND_DEFAULT);
  }

  void set() {
    if (on_gpu()) {
      event_->record(c10::Stream(c10::Stream::DEFAULT, tensor_device(device_)));
    } else {
      moment_ = std::chrono::steady_clock::now();
    }
  }

  double ms_until(const Mark& later) const {
    if (on_gpu()) return elapsed_ms(*event_, *later.event_);
    return std::chrono::duration<double, std::milli>(later.moment_ - moment_).count();
  }

 private:
  bool on_gpu() const { return device_.kind == mxopt::DeviceKind::kCuda; }

  mxopt::Device device_;
  std::optional<c10::Event> event_;
  std::chrono::steady_clock::time_point moment_;
};

}  // namespace

class PhaseTimer::Marks {
 public:
  explicit Marks(mxopt::Device device) : device_(device) {}

  void begin(Phase phase) {
    end();
    if (used_ == intervals_.size()) intervals_.push_back({phase, Mark(device_), Mark(device_)});
    intervals_[used_].phase = phase;
    intervals_[used_].begin.set();
    is_open_ = true;
  }

  void end() {
    if (!is_open_) return;
    intervals_[used_++].end.set();
    is_open_ = false;
  }

  Times take() {
    end();
    Times times;
    for (std::size_t i = 0; i < used_; ++i) {
      const Interval& interval = intervals_[i];
      const double ms = interval.begin.ms_until(interval.end);
      switch (interval.phase) {
        case Phase::kForward:
          times.forward_ms += ms;
          break;
        case Phase::kBackward:
          times.backward_ms += ms;
          break;
        case Phase::kOptimizer:
          times.optimizer_ms += ms;
          break;
      }
    }
    used_ = 0;
    return times;
  }

 private:
  struct Interval {
    Phase phase;
    Mark begin, end;
  };

  mxopt::Device device_;
  std::vector<Interval> intervals_;  // the first used_ are of this step; the others are kept for the next
  std::size_t used_ = 0;
  bool is_open_ = false;
};

PhaseTimer::PhaseTimer(mxopt::Device device) : marks_(std::make_unique<Marks>(device)) {}
PhaseTimer::~PhaseTimer() = default;

void PhaseTimer::begin(Phase phase) {
  marks_->begin(phase);
}
void PhaseTimer::end() {
  marks_->end();
}
PhaseTimer::Times PhaseTimer::take() {
  return marks_->take();
}

}  // namespace train_gpt
