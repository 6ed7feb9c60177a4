// The deadline of one wait.
#pragma once

#include <chrono>

#include "mxopt/params/check.h"

namespace mxopt {

class Deadline {
 public:
  using Clock = std::chrono::steady_clock;

  explicit Deadline(double timeout_s) : begin_(Clock::now()), end_(begin_) {
    MXOPT_CHECK(timeout_s > 0 && timeout_s <= 1e8,
                "timeout of " << timeout_s << " s; allowed is more than 0 and at most 1e8");
    end_ += std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(timeout_s));
  }

  Clock::time_point end() const { return end_; }
  bool passed() const { return Clock::now() >= end_; }
  double elapsed_ms() const {
    return std::chrono::duration<double, std::milli>(Clock::now() - begin_).count();
  }

 private:
  Clock::time_point begin_;
  Clock::time_point end_;
};

}  // namespace mxopt
