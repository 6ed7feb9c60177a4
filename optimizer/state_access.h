// What checkpoints read from an optimizer and put into it.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "mxopt/optimizer/config.h"
#include "mxopt/optimizer/parallel_groups.h"
#include "mxopt/optimizer/param_groups.h"
#include "mxopt/optimizer/step_state.h"
#include "mxopt/params/layout.h"
#include "mxopt/params/memory.h"

namespace mxopt {

/// What this rank owns of one param, in the memory of the optimizer's device.
struct StatePiece {
  int param = 0;
  std::int64_t begin = 0;  // flat offset in the param
  std::int64_t elems = 0;
  std::array<float*, 3> kinds = {};  // master, exp_avg, exp_avg_sq; the moments of frozen params are null
};

class StateAccess {
 public:
  virtual ~StateAccess() = default;

  virtual const Layout& layout() const = 0;
  virtual const Config& config() const = 0;
  virtual Device device() const = 0;
  virtual const ParallelGroups& groups() const = 0;
  /// Collective over all ranks: the sum, modulo 2^64.
  virtual std::int64_t sum_over_ranks(std::int64_t value) = 0;

  /// Those with elements, in the order of the layout.
  virtual std::vector<StatePiece> pieces() const = 0;
  /// In the memory of the device.
  virtual const StepState* step_state() const = 0;
  virtual std::span<const ParamGroup> param_groups() const = 0;
  virtual const ParamGroup& group_of(int param) const = 0;

  /// Throws ContractError in the middle of a step: gradients were begun that no step() has used.
  virtual void require_between_steps() const = 0;
  /// Later work of `stream` waits for all that was enqueued, copies of the state included.
  virtual void join_enqueued(StreamRef stream) = 0;
  /// State is changed again when the event has passed: by later calls, and by replays of a captured step on
  /// `stream`.
  virtual void hold_changes(std::shared_ptr<const Event> copied, StreamRef stream) = 0;

  /// What was enqueued on `stream` has changed masters of all params, and with `state` all of the rest.
  /// Reports that nobody has read are dropped then: they are of what was given up.
  virtual void note_restored(const StepState* state, StreamRef stream) = 0;
  /// Takes effect at the next step. Those without a group of their name here are left out.
  virtual void set_param_groups(std::span<const ParamGroup> groups) = 0;
};

}  // namespace mxopt
