// Writing a checkpoint by all ranks at once. They agree through files only.
//
// Every writer puts its file and a description of it into a hidden folder. Writer 0 waits for all
// descriptions, writes the manifest, gives the folder its name, and leaves the outcome in a file that the
// others wait for. A writer that has waited too long takes the hidden folder away, by a rename; writer 0
// claims it by another rename. Only one of the two can succeed, so all writers have the same outcome.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "mxopt/optimizer/checkpoint/checkpoint_contents.h"

namespace mxopt {

class FileHook;

struct CheckpointJob {
  /// The folder of all checkpoints of a run, on a file system that all writers share. It is created if its
  /// parent is there. Why not the parent: a file system that is not mounted must not be replaced by a local
  /// folder.
  std::filesystem::path dir;
  std::int64_t step = 0;  // at least 0
  /// Equal on all writers, and never used before in `dir`: 1 to 64 letters, digits and '_'.
  std::string attempt;
  int writer = 0;        // from 0
  int writers = 1;       // 1 to 99999
  double timeout_s = 0;  // more than 0; covers writing, and waiting for the other writers
  int keep_last = 0;     // complete checkpoints that are kept; 0: all. Writer 0's counts.
};

struct SavedCheckpoint {
  std::filesystem::path folder;
  std::int64_t payload_bytes = 0;     // of this writer's slices
  std::vector<std::string> warnings;  // what could not be removed; of writer 0 only
};

/// Saves `contents` as this writer's part. Blocks until the checkpoint is complete, on the disk and the
/// latest one. Memory does not grow with the contents. A checkpoint of the same step is replaced, see
/// publish_checkpoint().
///
/// hook    watches every change on disk; for tests. Used from this thread only.
/// Throws  ContractError, before anything is changed, for a value of `job` that is not allowed.
///         CheckpointError on every writer, with the same text where they could exchange it: a slice that
///         does not fit, a disk that is full, a writer that has not come. Waits end `timeout_s` after the
///         call; where writer 0 died while it published, at most 10 s later. What was the latest checkpoint
///         before is intact and still there.
SavedCheckpoint write_checkpoint(const CheckpointJob& job, const CheckpointContents& contents,
                                 FileHook* hook = nullptr);
/// The same; what `make` throws is a failure of this writer, which the others hear of.
SavedCheckpoint write_checkpoint(const CheckpointJob& job, const std::function<CheckpointContents()>& make,
                                 FileHook* hook = nullptr);

}  // namespace mxopt
