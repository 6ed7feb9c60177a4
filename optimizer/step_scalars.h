// The scalars of a step in the optimizer's memory, and what the host changes in them between steps.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

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

/// What the statistics of a step have beside their head.
struct StatisticsLayout {
  std::vector<double> separate_max_norms;  // of each separate norm
  int model_parallel_ranks = 0;            // 0: no such group
  int model_parallel_rank = 0;
  std::int64_t params = 0;  // that are reported; 0: none is
  bool counts_zeros = false;
};

class StepScalars {
 public:
  /// steps  entries of the table for each group and scheduled value.
  StepScalars(int groups, std::int64_t steps, const StepState& initial, Device device,
              std::shared_ptr<Allocator> allocator, const StatisticsLayout& layout = {});

  const StepMemory& memory() const { return memory_; }
  /// int64, to be summed over data-parallel ranks: the head, and what the layout has beside it.
  TypedSpan statistics() const { return {memory_.statistics.step, DType::kInt64, memory_.statistics.elems}; }
  /// The start of them that is to be summed over model-parallel ranks too: all but what is of one param.
  TypedSpan common_statistics() const { return statistics().sub(0, common_elems_); }
  /// What of them ranks that own the same shard have of their own: agreement and tokens.
  TypedSpan own_statistics() const { return statistics().sub(kOwnStatisticsAt, own_elems_); }
  /// What of them is of one param each.
  std::span<const ParamSums> param_sums() const { return param_sums_; }
  std::span<const NormOutcome> norm_outcomes() const {
    return {memory_.norms.outcomes, static_cast<std::size_t>(memory_.norms.count)};
  }
  /// [1]: what the trainer multiplies the loss by.
  std::span<const float> loss_factor() const { return {&memory_.state->loss_factor, 1}; }

  // In the order of the stream; the arguments may be gone when the call returns.

  void set_groups(const GroupValues& values, StreamRef stream);
  void set_taken(std::int64_t taken, StreamRef stream);
  void set_state(const StepState& state, StreamRef stream);
  /// That of other scalars on this device.
  void copy_state(const StepScalars& from, StreamRef stream);

 private:
  Device device_;
  Buffer buffer_;
  StepMemory memory_;
  static constexpr std::int64_t kOwnStatisticsAt =
      offsetof(StepStatistics, options_hash) / sizeof(std::int64_t);
  std::int64_t common_elems_ = 0, own_elems_ = 0;
  std::span<const ParamSums> param_sums_;
  GroupConstants* constants_ = nullptr;
  float* weight_decay_ = nullptr;
  float* lr_ = nullptr;
};

}  // namespace mxopt
