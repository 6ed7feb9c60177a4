// A save on a thread of its own, while training goes on.
#pragma once

#include <functional>
#include <memory>

#include "mxopt/optimizer/checkpoint/checkpoint_contents.h"
#include "mxopt/optimizer/checkpoint/checkpoint_writer.h"

namespace mxopt {

class FileHook;

/// At most one save in flight. Not for use by several threads at once.
class BackgroundSave {
 public:
  BackgroundSave();
  /// Waits for the save in flight, at most its timeout, and drops its error; wait() tells it.
  ~BackgroundSave();
  BackgroundSave(const BackgroundSave&) = delete;
  BackgroundSave& operator=(const BackgroundSave&) = delete;

  /// Returns at once. The slices' memory must stay as it is until the save is over.
  /// make    gives the contents; called from the thread of the save, so that it may wait for copies. What it
  ///         throws is a failure of this writer.
  /// hook    as for write_checkpoint(), but used from the thread of the save.
  /// Throws  ContractError if the save before it has not been waited for.
  void start(CheckpointJob job, std::function<CheckpointContents()> make, FileHook* hook = nullptr);
  /// The same for contents that there are.
  void start(CheckpointJob job, CheckpointContents contents, FileHook* hook = nullptr);
  /// Whether a save was started that has not been waited for.
  bool active() const { return flight_ != nullptr; }
  /// Whether wait() would return at once.
  bool done() const;
  /// Waits for the save and returns what write_checkpoint() returned, or throws what it threw. Throws
  /// ContractError if none was started.
  SavedCheckpoint wait();

 private:
  struct Flight;
  std::unique_ptr<Flight> flight_;
};

}  // namespace mxopt
