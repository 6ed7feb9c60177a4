// The state of one optimizer at one moment, in host memory, in the terms of a checkpoint.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "mxopt/optimizer/checkpoint/checkpoint_contents.h"
#include "mxopt/optimizer/state_access.h"
#include "mxopt/params/memory.h"

namespace mxopt {

class StateSnapshot {
 public:
  /// Allocates host memory for what this rank saves: 12 bytes for each element that it owns, 4 for frozen
  /// ones.
  ///
  /// state   borrowed.
  /// copies  whether state that is in host memory is copied too: false only where it does not change before
  /// the
  ///         contents were used.
  StateSnapshot(StateAccess& state, std::string section, bool copies);

  /// Starts the copies, after all that was enqueued before, and all on `stream`. The optimizer changes its
  /// state only when they are done.
  void take(StreamRef stream = {});
  /// Taken steps at that moment. The host waits for what was enqueued before, not for the large copies.
  std::int64_t steps_taken() const;
  /// The host waits for the copies. The slices lie in this object or, without copies, in the optimizer. Any
  /// thread may call it, and the optimizer may be gone where there are copies.
  CheckpointContents contents() const;

  const std::string& section() const { return section_; }

 private:
  bool is_writer() const {
    return state_.groups().replicas == nullptr || state_.groups().replicas->rank() == 0;
  }
  StepState step_state() const;
  CheckpointContents describe() const;

  StateAccess& state_;
  std::string section_;
  std::vector<StatePiece> pieces_;  // none where another replica saves them
  Buffer memory_;                   // empty without copies
  Buffer step_state_;
  Stream stream_;
  std::shared_ptr<Event> counted_, copied_;
  CheckpointContents taken_;  // but for the step's scalars
};

/// Name of the section that an optimizer's state is in: `name`, and with it the part of the model.
std::string checkpoint_section_name(const std::string& name, const ParallelGroups& groups);

/// Params of a layout whose state is saved: ties are those of what they are tied to.
std::vector<int> saved_params(const Layout& layout);

}  // namespace mxopt
