// The scalars of a step in the optimizer's memory, and what the host changes in them between steps.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "mxopt/optimizer/step_kernels.h"
#include "mxopt/params/dtype.h"
#include "mxopt/params/memory.h"

namespace mxopt {

/// What the table of groups is to hold, see GroupTable.
struct GroupValues {
  std::span<const GroupConstants> constants;  // [groups]
  std::span<const float> weight_decay;        // [groups][steps]
  std::span<const float> lr;                  // [groups][steps]
  std::int64_t first_step = 1;
  bool is_last_kept = true;
};

class StepScalars {
 public:
  /// steps  entries of the table for each group and scheduled value.
  StepScalars(int groups, std::int64_t steps, const StepState& initial, Device device,
              std::shared_ptr<Allocator> allocator);

  const StepMemory& memory() const { return memory_; }
  /// [kStatisticsElems] int64, to be summed over ranks.
  TypedSpan statistics() const { return {memory_.statistics, DType::kInt64, kStatisticsElems}; }
  /// [1]: what the trainer multiplies the loss by.
  std::span<const float> loss_factor() const { return {&memory_.state->loss_factor, 1}; }

  // In the order of the stream; the arguments may be gone when the call returns.

  void set_groups(const GroupValues& values, StreamRef stream);
  void set_taken(std::int64_t taken, StreamRef stream);

 private:
  Device device_;
  Buffer buffer_;
  StepMemory memory_;
  GroupConstants* constants_ = nullptr;
  float* weight_decay_ = nullptr;
  float* lr_ = nullptr;
};

}  // namespace mxopt
