// Checkpoints of a run: saving the state of its optimizers, and going on from it, with whatever ranks there
// are then.
//
// All calls are collective over all ranks of the optimizers, in the same order on each, and used by the
// thread that uses the optimizers. What is saved knows names and ranges of params only, so the number of
// ranks, bucket limits, the order of params and the device may be others when it is loaded.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "mxopt/optimizer/checkpoint/checkpoint_reader.h"
#include "mxopt/optimizer/config.h"
#include "mxopt/optimizer/distributed_adam.h"
#include "mxopt/optimizer/optimizer_chain.h"
#include "mxopt/params/memory.h"

namespace mxopt {

/// What of a checkpoint is not the optimizers'.
struct RunState {
  /// The trainer's own text, say random state and data position. UTF-8. Ranks may have different keys; a key
  /// that several have needs the same value.
  std::map<std::string, std::string> user;
  /// The configuration as YAML; empty: that of the first optimizer. The first rank's is kept.
  std::string config;
};

struct SavedRun {
  std::filesystem::path folder;
  std::vector<std::string> warnings;  // what could not be removed; on the first rank only
};

struct LoadedRun {
  std::filesystem::path folder;
  std::int64_t step = 0;  // that it was saved as
  RunState run;
  /// What is another than it was: keys of the configuration, hyper-parameters of groups.
  std::vector<std::string> differences;
  std::vector<std::string> warnings;
};

class Checkpointer {
 public:
  /// optimizer  borrowed; its state is in the section "". With config.async, or from the first save of a
  /// device's state on,
  ///            host memory for what this rank saves is kept: 12 bytes for each element that it owns.
  Checkpointer(DistributedAdam& optimizer, CheckpointConfig config);
  /// Several, as they are in an OptimizerChain; names are letters, digits, '_', '-' and '.'.
  Checkpointer(std::vector<OptimizerChain::Member> members, CheckpointConfig config);
  /// Waits for a save in flight, and drops its error.
  ~Checkpointer();
  Checkpointer(const Checkpointer&) = delete;
  Checkpointer& operator=(const Checkpointer&) = delete;

  /// Saves the state as it is after all that was enqueued, on `stream` too: as config.dir/step-%08d with the
  /// number of taken steps. With config.async this returns when the copies were started, and the rest goes on
  /// beside the training; else it returns when the checkpoint is complete, on the disk and the latest one.
  /// Replays of a captured step are ordered against the copies on `stream` only. Throws  CheckpointError on
  /// every rank alike, for this save or, with config.async, for the one before it, without
  ///         a new one; what was the latest checkpoint is intact then.
  SavedRun save(const RunState& run = {}, StreamRef stream = {});
  /// Waits for a save in flight. Throws as save(). Without one: nothing.
  SavedRun wait();
  /// Whether a save is in flight. Not collective.
  bool is_saving() const;

  /// Restores the state and publishes it, after all that was enqueued, on `stream` too; complete when it
  /// returns.
  ///
  /// path     a checkpoint's folder or the folder of all of them; empty: config.dir.
  /// config   YAML that the saved configuration is compared with; empty: that of the first optimizer.
  /// Throws   DataError on every rank, naming file, param or key, for what is damaged or does not fit: params
  /// that are
  ///          missing, unknown, or of another shape; ContractError between grad_ready() and step(). Nothing
  ///          was changed then.
  LoadedRun load(const std::filesystem::path& path = {}, StreamRef stream = {},
                 const std::string& config = {});
  /// The same for masters only: moments, steps, loss scale and hyper-parameters stay. Of RunState nothing is
  /// returned.
  LoadedRun load_weights(const std::filesystem::path& path = {}, StreamRef stream = {});

 private:
  struct Member;
  struct Staged;

  Member& first() const { return *members_.front(); }
  void make_snapshots();
  template <class Error, class Body>
  void agreed(const Body& body) const;
  LoadedRun restore(const std::filesystem::path& path, bool is_whole, StreamRef stream,
                    const std::string& config);
  void restore_groups(const CheckpointSection& section, StateAccess& state,
                      std::vector<std::string>& differences) const;
  void stage(CheckpointReader& reader, bool is_whole, Staged& staged) const;

  CheckpointConfig config_;
  std::vector<std::unique_ptr<Member>> members_;
  class Flight;
  std::unique_ptr<Flight> flight_;
};

}  // namespace mxopt
