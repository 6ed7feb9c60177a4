// How one step changes the optimizer's scalars: counters, loss scale, and what Adam needs of each group.
//
// Everything here lives in the optimizer's own memory, host or device, so that a step on a device never waits
// for the host; advance() is the one function that changes it.
#pragma once

#include <cstdint>

#include "mxopt/optimizer/adam_math.h"
#include "mxopt/optimizer/loss_scale.h"
#include "mxopt/optimizer/step_decision.h"
#include "mxopt/params/host_device.h"

namespace mxopt {

/// What a step leaves for the next one. Equal on all ranks.
struct StepState {
  std::int64_t taken = 0;
  std::int64_t calls = 0;
  std::int64_t consecutive_skips = 0;
  std::int64_t skipped_total = 0;
  LossScaleState loss_scale;
  float loss_factor = 1;  // loss_scale.scale as the trainer multiplies by it
};

/// What the host tells a step. Changes take effect at the next one.
struct StepOptions {
  double max_norm = 0;   // of the common norm; 0: no clipping
  double skip_norm = 0;  // 0: no limit
  bool decoupled = true;
  LossScaleKind loss_scale_kind = LossScaleKind::kNone;
  double min_loss_scale = 1;
  std::int64_t growth_interval = 1;
  std::int64_t hysteresis = 1;
  std::int64_t hash = 0;         // of what the user may change between steps
  int world_size = 1;            // ranks whose statistics are added
  int model_parallel_ranks = 0;  // 0: no such group
  double grad_divisor = 1;       // ranks that the reduced gradients are still to be divided by
  bool divides_by_tokens = false;
  int groups = 0;
};

struct GroupConstants {
  double betas[2] = {0, 0};
  double eps = 0;
  int norm = 0;  // 0: the common one, i: separate norm i - 1
};

/// Hyper-parameters of the groups, in the optimizer's memory. Those of a schedule are there for each of the
/// taken steps from first_step on.
struct GroupTable {
  const GroupConstants* constants = nullptr;  // [groups]
  const float* weight_decay = nullptr;        // [groups][steps]
  const float* lr = nullptr;                  // [groups][steps]
  std::int64_t first_step = 1;
  std::int64_t steps = 1;
  bool is_last_kept = true;  // later steps have the values of the last one

  MXOPT_HD bool has_step(std::int64_t step) const { return is_last_kept || step - first_step < steps; }
  MXOPT_HD std::int64_t index_of(int group, std::int64_t step) const {
    const std::int64_t last = steps - 1;
    const std::int64_t at = step - first_step;
    return group * steps + (at < last ? at : last);
  }
};

/// What one step() call did.
struct StepOutcome {
  bool taken = false;
  // Why a step could be neither taken nor skipped; nothing was changed then:
  bool options_differ = false;      // ranks were told different things
  bool is_step_missing = false;     // the table of the groups ends before this step
  bool are_tokens_missing = false;  // gradients that are not zero, and nobody counted a token
  StepState after;
  SkipReason skip_reason = SkipReason::kNone;
  double loss_scale = 1;    // used for this step's gradients
  std::int64_t tokens = 0;  // of all ranks; 0 where nobody counts them
  double grad_norm = 0;
  float clip_factor = 1;
  std::int64_t zero_grads = 0;
  int nonfinite_rank = -1;  // the first of the model-parallel group; -1: none
};

/// What is reported of one param on request: exact sums over its ranks.
struct ParamSums {
  NormSum grad, master;
  std::int64_t nonfinite_grad_runs = 0, nonfinite_master_runs = 0;
};

/// What of a step's statistics the passes write. All of it is one message, `elems` int64 from `step` on.
struct StatisticsMemory {
  StatisticsMemory() = default;
  /// The head alone.
  // NOLINTNEXTLINE(google-explicit-constructor)
  StatisticsMemory(StepStatistics& head) : step(&head), tokens(&head.tokens), elems(kStatisticsElems) {}

  /// Where the squares of a segment's gradients go; null: nowhere.
  /// norm  see SegmentRow.
  MXOPT_HD std::int64_t* squares_of(int norm) const {
    if (norm < 0) return nullptr;
    return norm == 0 ? step->square_sum : norms[norm - 1].square_sum;
  }

  StepStatistics* step = nullptr;
  std::int64_t* nonfinite_runs_of_rank = nullptr;  // this rank's in the model-parallel group; may be null
  std::int64_t* tokens = nullptr;                  // where this rank's tokens go
  NormSum* norms = nullptr;                        // [separate norms]
  ParamSums* params = nullptr;                     // [params]; null: not wanted
  bool counts_zeros = false;
  std::int64_t elems = 0;
};

/// Where a step's scalars live: all in the memory of the kernels' device.
struct StepMemory {
  StatisticsMemory statistics;
  const std::int64_t* nonfinite_runs_of_ranks = nullptr;  // [model-parallel ranks]
  const std::int64_t* tokens_of_ranks = nullptr;          // [model-parallel ranks]
  SeparateNorms norms;
  StepState* state = nullptr;
  StepOutcome* outcome = nullptr;
  AdamScalars* scalars = nullptr;  // [groups]
  std::int64_t* tokens = nullptr;  // counted by this rank since the last step
  GroupTable table;
};

/// What gradients are divided by, where they are sums over tokens: those of no tokens are zero.
MXOPT_HD std::int64_t counted(std::int64_t tokens) {
  return tokens > 1 ? tokens : 1;
}

/// What a rank adds to the statistics: equal sums mean that every rank was told the same and took the same
/// steps. Why mixed: counts themselves could differ and still have the sum of equal ones.
MXOPT_HD std::int64_t agreement_hash(std::int64_t options_hash, std::int64_t taken) {
  std::uint64_t x =
      static_cast<std::uint64_t>(options_hash) + 0x9E3779B97F4A7C15u * static_cast<std::uint64_t>(taken + 1);
  x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
  x = (x ^ x >> 27) * 0x94D049BB133111EBu;
  return static_cast<std::int64_t>(x ^ x >> 31);
}

/// One optimizer's part in a decision.
struct StepPart {
  StepMemory memory;
  StepOptions options;
};

/// Optimizers that can decide together.
inline constexpr int kMostParts = 8;

/// Whether the ranks of a part were told different things, or the part has taken other steps than the first.
/// The sum of equal numbers over ranks, modulo 2^64.
MXOPT_HD bool do_options_differ(const StepPart& part, const StepState& first) {
  const auto expected =
      static_cast<std::uint64_t>(part.options.world_size) *
      static_cast<std::uint64_t>(agreement_hash(part.options.hash, part.memory.state->taken));
  return static_cast<std::uint64_t>(part.memory.statistics.step->options_hash) != expected ||
         part.memory.state->taken != first.taken;
}

/// The tokens of all ranks. Model-parallel ranks see the same ones: those that have counted any must have
/// counted alike, else `differ` is set.
MXOPT_HD std::int64_t all_tokens(const StepPart& part, bool& differ) {
  std::int64_t all = part.memory.statistics.step->tokens;
  for (int rank = 0; rank < part.options.model_parallel_ranks; ++rank) {
    const std::int64_t tokens = part.memory.tokens_of_ranks[rank];
    if (tokens == 0) continue;
    if (all != 0 && all != tokens) differ = true;
    all = tokens;
  }
  return all;
}

/// The model-parallel rank that is the first with a non-finite gradient; -1: none.
MXOPT_HD int first_nonfinite_rank(const StepPart& part) {
  for (int rank = 0; rank < part.options.model_parallel_ranks; ++rank) {
    if (part.memory.nonfinite_runs_of_ranks[rank] != 0) return rank;
  }
  return -1;
}

/// What the update of a taken step needs of each group.
MXOPT_HD void set_scalars(const StepPart& part, std::int64_t taken, float common_factor) {
  const GroupTable& table = part.memory.table;
  for (int group = 0; group < part.options.groups; ++group) {
    const GroupConstants& constants = table.constants[group];
    AdamScalars s;
    s.beta1 = static_cast<float>(constants.betas[0]);
    s.beta2 = static_cast<float>(constants.betas[1]);
    s.omb1 = static_cast<float>(1.0 - constants.betas[0]);
    s.omb2 = static_cast<float>(1.0 - constants.betas[1]);
    s.bc1 = static_cast<float>(1.0 - integer_power(constants.betas[0], taken));
    s.bc2 = static_cast<float>(1.0 - integer_power(constants.betas[1], taken));
    s.eps = static_cast<float>(constants.eps);
    const std::int64_t at = table.index_of(group, taken);
    s.lr = table.lr[at];
    s.weight_decay = table.weight_decay[at];
    s.grad_factor =
        constants.norm == 0 ? common_factor : part.memory.norms.outcomes[constants.norm - 1].grad_factor;
    s.decoupled = part.options.decoupled;
    part.memory.scalars[group] = s;
  }
}

/// From reduced statistics to the decision, the groups' scalars for fused_update, and the next state: one
/// decision for all parts, whose options agree in all but what is of one optimizer (hash, ranks, divisor,
/// groups). Tokens are those that the first part counted. The scalars are written only when the step is
/// taken. A step that is skipped for its norm has not overflowed: for the loss scale it is a clean one.
MXOPT_HD void advance(const StepPart* parts, int count) {
  const StepOptions& options = parts[0].options;
  StepState& state = *parts[0].memory.state;
  StepOutcome outcome;
  for (int p = 0; p < count; ++p) {
    if (do_options_differ(parts[p], state)) outcome.options_differ = true;
    if (!parts[p].memory.table.has_step(state.taken + 1)) outcome.is_step_missing = true;
  }
  outcome.tokens = all_tokens(parts[0], outcome.options_differ);
  outcome.loss_scale = state.loss_scale.scale;
  const double tokens = static_cast<double>(options.divides_by_tokens ? counted(outcome.tokens) : 1);
  ReducedPart reduced[kMostParts];
  for (int p = 0; p < count; ++p) {
    reduced[p] = {parts[p].memory.statistics.step,
                  outcome.loss_scale * tokens * parts[p].options.grad_divisor, parts[p].memory.norms};
  }
  const StepDecision decision = decide(reduced, count, options.max_norm, options.skip_norm);
  bool is_any_gradient = decision.grad_norm > 0;
  for (int p = 0; p < count; ++p) {
    for (int i = 0; i < reduced[p].separate.count; ++i) {
      is_any_gradient = is_any_gradient || reduced[p].separate.outcomes[i].grad_norm > 0;
    }
  }
  outcome.are_tokens_missing = options.divides_by_tokens && outcome.tokens == 0 && is_any_gradient;
  const bool is_void = outcome.options_differ || outcome.is_step_missing || outcome.are_tokens_missing;
  outcome.taken = decision.take && !is_void;
  outcome.skip_reason = decision.skip_reason;
  outcome.grad_norm = decision.grad_norm;
  outcome.clip_factor = decision.clip_factor;

  if (!is_void) {
    ++state.calls;
    state.consecutive_skips = decision.take ? 0 : state.consecutive_skips + 1;
    state.skipped_total += decision.take ? 0 : 1;
    state.taken += decision.take ? 1 : 0;
    const bool overflow = decision.skip_reason == SkipReason::kNonFiniteGradient;
    state.loss_scale = next_loss_scale(state.loss_scale, overflow, options.loss_scale_kind,
                                       options.min_loss_scale, options.growth_interval, options.hysteresis);
    state.loss_factor = static_cast<float>(state.loss_scale.scale);
  }
  outcome.after = state;
  for (int p = 0; p < count; ++p) {
    const StepMemory& memory = parts[p].memory;
    *memory.state = state;
    outcome.zero_grads = memory.statistics.step->zero_grads;
    outcome.nonfinite_rank = first_nonfinite_rank(parts[p]);
    *memory.outcome = outcome;
    if (!outcome.taken) continue;
    NormOutcome common;
    common.grad_norm = decision.grad_norm;
    clip(common, reduced[p].divisor, options.max_norm);
    set_scalars(parts[p], state.taken, common.grad_factor);
  }
}

}  // namespace mxopt
