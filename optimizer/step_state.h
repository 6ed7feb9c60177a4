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
  double max_norm = 0;  // 0: no clipping
  bool decoupled = true;
  LossScaleKind loss_scale_kind = LossScaleKind::kNone;
  double min_loss_scale = 1;
  std::int64_t growth_interval = 1;
  std::int64_t hysteresis = 1;
  std::int64_t hash = 0;  // of what the user may change between steps
  int world_size = 1;
  bool divides_by_tokens = false;
  int groups = 0;
};

struct GroupConstants {
  double betas[2] = {0, 0};
  double eps = 0;
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
  bool options_differ = false;   // ranks were told different things
  bool is_step_missing = false;  // the table of the groups ends before this step
  StepState after;
  double loss_scale = 1;    // used for this step's gradients
  std::int64_t tokens = 0;  // of all ranks; 0 where nobody counts them
  double grad_norm = 0;
  float clip_factor = 1;
};

/// What a rank adds to the statistics: equal sums mean that every rank was told the same and took the same
/// steps. Why mixed: counts themselves could differ and still have the sum of equal ones.
MXOPT_HD std::int64_t agreement_hash(std::int64_t options_hash, std::int64_t taken) {
  std::uint64_t x =
      static_cast<std::uint64_t>(options_hash) + 0x9E3779B97F4A7C15u * static_cast<std::uint64_t>(taken + 1);
  x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
  x = (x ^ x >> 27) * 0x94D049BB133111EBu;
  return static_cast<std::int64_t>(x ^ x >> 31);
}

/// From reduced statistics to the decision, the groups' scalars for fused_update, and the next state.
/// scalars  [options.groups]; written only when the step is taken.
MXOPT_HD void advance(StepStatistics& reduced, const StepOptions& options, const GroupTable& table,
                      StepState& state, AdamScalars* scalars, StepOutcome& outcome) {
  // The sum of equal numbers over ranks, modulo 2^64.
  outcome.options_differ = static_cast<std::uint64_t>(reduced.options_hash) !=
                           static_cast<std::uint64_t>(options.world_size) *
                               static_cast<std::uint64_t>(agreement_hash(options.hash, state.taken));
  outcome.is_step_missing = !table.has_step(state.taken + 1);
  const bool is_void = outcome.options_differ || outcome.is_step_missing;
  // The gradients of no tokens are zero.
  const std::int64_t tokens = options.divides_by_tokens && reduced.tokens > 1 ? reduced.tokens : 1;
  const double divisor = state.loss_scale.scale * static_cast<double>(tokens);
  const StepDecision decision = decide(reduced, divisor, options.max_norm);
  outcome.taken = decision.take && !is_void;
  outcome.grad_norm = decision.grad_norm;
  outcome.clip_factor = decision.clip_factor;
  outcome.loss_scale = state.loss_scale.scale;
  outcome.tokens = reduced.tokens;

  if (!is_void) {
    ++state.calls;
    state.consecutive_skips = decision.take ? 0 : state.consecutive_skips + 1;
    state.skipped_total += decision.take ? 0 : 1;
    state.taken += decision.take ? 1 : 0;
    state.loss_scale = next_loss_scale(state.loss_scale, !decision.take, options.loss_scale_kind,
                                       options.min_loss_scale, options.growth_interval, options.hysteresis);
    state.loss_factor = static_cast<float>(state.loss_scale.scale);
  }
  outcome.after = state;
  if (!outcome.taken) return;

  for (int group = 0; group < options.groups; ++group) {
    const GroupConstants& constants = table.constants[group];
    AdamScalars s;
    s.beta1 = static_cast<float>(constants.betas[0]);
    s.beta2 = static_cast<float>(constants.betas[1]);
    s.omb1 = static_cast<float>(1.0 - constants.betas[0]);
    s.omb2 = static_cast<float>(1.0 - constants.betas[1]);
    s.bc1 = static_cast<float>(1.0 - integer_power(constants.betas[0], state.taken));
    s.bc2 = static_cast<float>(1.0 - integer_power(constants.betas[1], state.taken));
    s.eps = static_cast<float>(constants.eps);
    const std::int64_t at = table.index_of(group, state.taken);
    s.lr = table.lr[at];
    s.weight_decay = table.weight_decay[at];
    s.grad_factor = decision.grad_factor;
    s.decoupled = options.decoupled;
    scalars[group] = s;
  }
}

}  // namespace mxopt
