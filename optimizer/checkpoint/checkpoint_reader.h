// Reading a checkpoint by name and range, whatever the ranges were when it was saved.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "mxopt/optimizer/checkpoint/checkpoint_contents.h"
#include "mxopt/optimizer/checkpoint/checkpoint_folder.h"
#include "mxopt/optimizer/checkpoint/manifest.h"

namespace mxopt {

/// Which files this reader verifies with kFull: number `part`, and every `parts`-th after it. So that each of
/// several ranks need not read all; together they do.
struct VerifyShare {
  int part = 0;
  int parts = 1;
};

/// An existing checkpoint. Not for use by several threads at once.
class CheckpointReader {
 public:
  /// path    a checkpoint's folder, or the folder of all checkpoints. Of those the one that `latest` names;
  /// where that
  ///         file is absent or names none, the complete one of the highest step, which is a warning.
  /// Throws  DataError naming file, key or tensor, expected and found: anything is damaged, absent or of
  /// another save.
  explicit CheckpointReader(const std::filesystem::path& path, Verify verify = Verify::kFull,
                            VerifyShare share = {});
  ~CheckpointReader();
  CheckpointReader(CheckpointReader&&) noexcept;

  const std::filesystem::path& folder() const { return folder_; }
  const Manifest& manifest() const { return manifest_; }
  std::int64_t step() const { return manifest_.step; }
  const std::vector<CheckpointSection>& sections() const { return manifest_.sections; }
  const std::string& config() const { return manifest_.config; }
  const std::map<std::string, std::string>& user() const { return manifest_.user; }
  /// Why it is not the latest checkpoint.
  const std::vector<std::string>& warnings() const { return warnings_; }

  /// Throws DataError that lists the sections there are.
  const CheckpointSection& section(std::string_view name) const;
  /// Throws DataError naming the param, with the nearest name there is.
  const CheckpointParam& param(std::string_view section, std::string_view name) const;

  /// Fills `out` with the elements of the flat param from `begin` on.
  /// Throws DataError naming the param: it is not there, that kind was not saved, or the range is not within
  /// it; or
  ///        naming the file: it can not be read or has changed.
  void read(std::string_view section, std::string_view param, StateKind kind, std::int64_t begin,
            std::span<float> out);

 private:
  struct OpenFile;

  void choose_folder(const std::filesystem::path& path);
  void choose_newest(const std::filesystem::path& dir);
  void verify_files(Verify verify, VerifyShare share);
  OpenFile& open(const std::string& name);

  std::filesystem::path folder_;
  Manifest manifest_;
  std::vector<std::string> warnings_;
  std::map<std::string, const CheckpointParam*> params_;             // by section and name
  std::map<std::string, std::vector<const ManifestSlice*>> slices_;  // by state, in order
  std::unique_ptr<OpenFile> file_;                                   // the last one that was read
};

}  // namespace mxopt
