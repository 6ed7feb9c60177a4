// A folder of checkpoints: what lies in it, which one is the latest, putting one there, and removing old
// ones.
//
// <dir>/step-00001000/   a checkpoint; the name appears when everything in it is on the disk
// <dir>/latest           the name of one of them and a line end
// <dir>/.*-step-*        saves under way or failed, and what is being removed
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "mxopt/optimizer/checkpoint/manifest.h"

namespace mxopt {

class FileHook;

struct CheckpointListing {
  std::filesystem::path folder;
  std::int64_t step = 0;
  bool complete = false;   // manifest, and all files with their sizes; checksums are not compared
  std::string problem;     // why it is not complete
  std::int64_t bytes = 0;  // of its files, without the manifest; 0 if it is not complete
  bool is_latest = false;
};

/// The checkpoints in `dir` by their steps, broken ones too. Throws DataError if `dir` can not be read.
std::vector<CheckpointListing> list_checkpoints(const std::filesystem::path& dir);

/// The folder that `dir`/latest names. Throws DataError if the file is absent or has no such name in it, or
/// if what it names is not there.
std::filesystem::path latest_checkpoint(const std::filesystem::path& dir);

/// Gives the complete folder `from`, in `dir`, the name of its step, and makes it the latest.
///
/// A checkpoint of the same step is exchanged in one action of the file system. Where that has no such
/// action, the old one is first renamed to ".old-step-..."; list_checkpoints() knows that name, so a complete
/// one is there at every moment. What is replaced lies under `from` or that name afterwards. Throws
/// FileError.
void publish_checkpoint(const std::filesystem::path& dir, const std::filesystem::path& from,
                        std::int64_t step, const std::string& attempt, FileHook* hook);

/// Removes what other saves have left over, and, if keep_last > 0, all complete checkpoints but the keep_last
/// that were saved last, and the latest one. Returns what could not be done, as warnings.
std::vector<std::string> prune_checkpoints(const std::filesystem::path& dir, int keep_last,
                                           const std::string& attempt, FileHook* hook);

/// `dir`/.<role>-step-00001000-<attempt>; the roles are tmp, ready, failed, old, trash and result.
std::filesystem::path hidden_path(const std::filesystem::path& dir, const std::string& role,
                                  std::int64_t step, const std::string& attempt);

}  // namespace mxopt
