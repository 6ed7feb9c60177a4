// Every change that checkpoints make on disk: writing, syncing, renaming, removing.
//
// All of it goes through here, so that a FileHook can watch it, slow it down or make any part of it fail.
#pragma once

#include <cstddef>
#include <filesystem>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>

namespace mxopt {

enum class FileAction { kCreate, kWrite, kSync, kClose, kRename, kMakeFolder, kSyncFolder, kRemove };

std::string_view file_action_name(FileAction action);

/// Called before every action, from the thread that does it. Without overrides it changes nothing.
class FileHook {
 public:
  virtual ~FileHook() = default;

  /// 0: the action is done. Otherwise it is not, and fails with this errno.
  virtual int before(FileAction /*action*/, const std::filesystem::path& /*path*/) { return 0; }
  /// Most bytes that one write may take, more than 0.
  virtual std::size_t write_limit() { return static_cast<std::size_t>(-1); }
  /// False: as on a file system that can not exchange two names.
  virtual bool can_exchange() { return true; }
};

/// A file or folder can not be changed: action, path, reason.
class FileError : public std::runtime_error {
 public:
  FileError(FileAction action, const std::filesystem::path& path, int code);
  int code() const { return code_; }  // errno

 private:
  int code_;
};

/// A new file, written from its begin to its end.
class FileOutput {
 public:
  /// Throws FileError, also when the path exists already.
  FileOutput(std::filesystem::path path, FileHook* hook);
  /// Closes a file that close() did not, and drops the error: the file is not complete anyway.
  ~FileOutput();
  FileOutput(const FileOutput&) = delete;
  FileOutput& operator=(const FileOutput&) = delete;

  /// Throws FileError.
  void write(std::span<const std::byte> bytes);
  /// Brings the bytes to the disk and closes the file. Throws FileError.
  void close();

 private:
  std::filesystem::path path_;
  FileHook* hook_;
  int descriptor_ = -1;
};

/// Creates one folder; it may exist. Its parent must. Throws FileError.
void make_folder(const std::filesystem::path& path, FileHook* hook);
/// Renames; what has the name `to` already is replaced if it is a file. Throws FileError.
void rename_path(const std::filesystem::path& from, const std::filesystem::path& to, FileHook* hook);
/// Exchanges two names in one step. False, with nothing changed, where the file system can not. Throws
/// FileError.
bool exchange_paths(const std::filesystem::path& a, const std::filesystem::path& b, FileHook* hook);
/// Brings the names in a folder to the disk. Throws FileError.
void sync_folder(const std::filesystem::path& path, FileHook* hook);
/// Removes a file, or a folder with all that is in it; it may be absent. Throws FileError.
void remove_path(const std::filesystem::path& path, FileHook* hook);
/// Makes `text` the content of `path`: others see the old content, or all of the new one. Nothing can fail
/// once they see it. Uses the name `path` + ".new" in between. Throws FileError.
void show_file(const std::filesystem::path& path, std::string_view text, FileHook* hook);
/// The same, and on return it is so after a crash too.
void replace_file(const std::filesystem::path& path, std::string_view text, FileHook* hook);

}  // namespace mxopt
