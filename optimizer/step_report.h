// What one step did: a complete record on every path, equal on all ranks but for the fields that say
// otherwise.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace mxopt {

enum class SkipReason { kNone, kNonFiniteGradient, kGradNorm };

constexpr std::string_view skip_reason_name(SkipReason reason) {
  switch (reason) {
    case SkipReason::kNone:
      return "none";
    case SkipReason::kNonFiniteGradient:
      return "non-finite gradient";
    case SkipReason::kGradNorm:
      return "gradient norm above optimizer.skip_norm";
  }
  return "?";
}

/// Milliseconds of the phases of one step on this rank, as the host saw them: on devices, of enqueueing them.
struct PhaseTimes {
  double reduce_scatter = 0;  // waiting for what was issued before, and issuing the rest
  double statistics = 0;      // sums of squares and their reduction
  double update = 0;          // fused update with writeback
  double scales = 0;          // packed MAX reduction and the cast of cut bands
  double gather = 0;          // issuing the gathers; their waiting is in wait_param
};

/// A norm of its own, see optimizer.groups[].norm_group.
struct NormRecord {
  std::string name;
  double grad_norm = 0;   // as StepRecord::grad_norm
  float clip_factor = 1;  // as StepRecord::clip_factor
};

/// Norms of one param over the ranks that share its state: of a model-parallel rank's part of it.
struct ParamNorm {
  std::string name;
  double grad_norm = 0;    // after unscaling and averaging, before clipping; NaN when not finite
  double weight_norm = 0;  // of the masters before the step; NaN when not finite
};

struct StepRecord {
  bool taken = false;
  SkipReason skip_reason = SkipReason::kNone;
  std::int64_t step = 0;               // taken steps so far, this one included
  std::int64_t calls = 0;              // step() calls so far, this one included
  std::int64_t consecutive_skips = 0;  // this one included
  std::int64_t skipped_total = 0;
  // Global, after unscaling and averaging, without the params of a separate norm; NaN when a gradient is not
  // finite.
  double grad_norm = 0;
  float clip_factor = 1;                // what clipping multiplied the gradients by; 1 on a skipped step
  std::vector<NormRecord> norm_groups;  // the separate norms, by their first group
  std::int64_t zero_grads = -1;         // gradients that are 0; -1: optimizer.count_zeros is off
  std::vector<ParamNorm> param_norms;   // in registration order; empty: optimizer.param_norms is off
  double loss_scale = 1;                // used for this step's gradients
  double next_loss_scale = 1;
  std::int64_t tokens = 0;                             // of all ranks, with optimizer.grad_reduce tokens
  double lr = 0;                                       // of the schedule, before group multipliers
  std::vector<std::string> nonfinite_gradient_params;  // names in registration order
  std::vector<std::string> nonfinite_master_params;    // whose masters became NaN or infinite in BF16
  /// This rank's params with a NaN or infinity in a gradient before the reduction, in registration order;
  /// with optimizer.check_grads. A param that only nonfinite_gradient_params has became so in the reduction.
  std::vector<std::string> local_nonfinite_params;
  // The first rank of the model-parallel group that has a non-finite gradient, and names its params in its
  // own record; -1: none, or there is no such group. Of a chain: in the group of the first member that has
  // one.
  int nonfinite_gradient_rank = -1;
  int launches = 0;  // kernel launches (host: parallel regions) of this rank's step
  PhaseTimes ms;     // this rank's
};

/// Handle of a record that may not be complete yet. Reading waits for the step on devices, not longer than
/// the deadline of the communicator; copies share the record. Reading throws ContractError, on every rank
/// alike, when the step found ranks with different hyper-parameters or reached
/// optimizer.max_consecutive_skips; on the host step() throws it.
class StepReport {
 public:
  /// Where a record comes from.
  class Source {
   public:
    virtual ~Source() = default;
    virtual const StepRecord& read() = 0;
  };

  explicit StepReport(std::shared_ptr<Source> source) : source_(std::move(source)) {}
  const StepRecord& operator*() const { return source_->read(); }
  const StepRecord* operator->() const { return &source_->read(); }

 private:
  std::shared_ptr<Source> source_;
};

}  // namespace mxopt
