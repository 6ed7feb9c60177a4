#include "mxopt/optimizer/checkpoint/file_output.h"

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <system_error>
#include <utility>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

namespace mxopt {

namespace {

void ask(FileHook* hook, FileAction action, const std::filesystem::path& path) {
  if (hook == nullptr) return;
  if (const int code = hook->before(action, path); code != 0) throw FileError(action, path, code);
}

std::string error_text(FileAction action, const std::filesystem::path& path, int code) {
  return path.string() + ": can not " + std::string(file_action_name(action)) + ": " +
         std::generic_category().message(code);
}

void sync_descriptor(int descriptor, FileAction action, const std::filesystem::path& path) {
  while (fsync(descriptor) != 0) {
    if (errno != EINTR) throw FileError(action, path, errno);
  }
}

}  // namespace

std::string_view file_action_name(FileAction action) {
  switch (action) {
    case FileAction::kCreate:
      return "create the file";
    case FileAction::kWrite:
      return "write to the file";
    case FileAction::kSync:
      return "sync the file";
    case FileAction::kClose:
      return "close the file";
    case FileAction::kRename:
      return "rename";
    case FileAction::kMakeFolder:
      return "make the folder";
    case FileAction::kSyncFolder:
      return "sync the folder";
    case FileAction::kRemove:
      return "remove";
  }
  return "?";
}

FileError::FileError(FileAction action, const std::filesystem::path& path, int code)
    : std::runtime_error(error_text(action, path, code)), code_(code) {}

FileOutput::FileOutput(std::filesystem::path path, FileHook* hook) : path_(std::move(path)), hook_(hook) {
  ask(hook_, FileAction::kCreate, path_);
  descriptor_ = ::open(path_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  if (descriptor_ < 0) throw FileError(FileAction::kCreate, path_, errno);
}

FileOutput::~FileOutput() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

void FileOutput::write(std::span<const std::byte> bytes) {
  constexpr std::size_t kMostBytes = std::size_t{1} << 30;  // the kernel takes at most 2^31 - 4096 at once
  while (!bytes.empty()) {
    ask(hook_, FileAction::kWrite, path_);
    const std::size_t limit = hook_ == nullptr ? kMostBytes : std::min(kMostBytes, hook_->write_limit());
    const ssize_t written = ::write(descriptor_, bytes.data(), std::min(limit, bytes.size()));
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) throw FileError(FileAction::kWrite, path_, errno);
    bytes = bytes.subspan(static_cast<std::size_t>(written));
  }
}

void FileOutput::close() {
  ask(hook_, FileAction::kSync, path_);
  sync_descriptor(descriptor_, FileAction::kSync, path_);
  ask(hook_, FileAction::kClose, path_);
  // Why no second try: after an error of close() the descriptor is gone.
  if (::close(std::exchange(descriptor_, -1)) != 0) throw FileError(FileAction::kClose, path_, errno);
}

void make_folder(const std::filesystem::path& path, FileHook* hook) {
  ask(hook, FileAction::kMakeFolder, path);
  if (::mkdir(path.c_str(), 0777) == 0) return;
  const int code = errno;
  struct stat status = {};
  const bool is_folder = code == EEXIST && ::stat(path.c_str(), &status) == 0 && S_ISDIR(status.st_mode);
  if (!is_folder) throw FileError(FileAction::kMakeFolder, path, code);
}

void rename_path(const std::filesystem::path& from, const std::filesystem::path& to, FileHook* hook) {
  ask(hook, FileAction::kRename, from);
  if (std::rename(from.c_str(), to.c_str()) != 0) throw FileError(FileAction::kRename, from, errno);
}

bool exchange_paths(const std::filesystem::path& a, const std::filesystem::path& b, FileHook* hook) {
  if (hook != nullptr && !hook->can_exchange()) return false;
  ask(hook, FileAction::kRename, a);
#if defined(RENAME_EXCHANGE)
  if (renameat2(AT_FDCWD, a.c_str(), AT_FDCWD, b.c_str(), RENAME_EXCHANGE) == 0) return true;
  if (errno != EINVAL && errno != ENOSYS && errno != ENOTSUP) {
    throw FileError(FileAction::kRename, a, errno);
  }
#endif
  return false;
}

void sync_folder(const std::filesystem::path& path, FileHook* hook) {
  ask(hook, FileAction::kSyncFolder, path);
  const int descriptor = ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (descriptor < 0) throw FileError(FileAction::kSyncFolder, path, errno);
  try {
    sync_descriptor(descriptor, FileAction::kSyncFolder, path);
  } catch (const FileError& error) {
    ::close(descriptor);
    // Why: some network file systems can not sync folders, and keep their names safe by themselves.
    if (error.code() == EINVAL || error.code() == ENOTSUP) return;
    throw;
  }
  ::close(descriptor);
}

void remove_path(const std::filesystem::path& path, FileHook* hook) {
  ask(hook, FileAction::kRemove, path);
  std::error_code error;
  std::filesystem::remove_all(path, error);
  if (error) throw FileError(FileAction::kRemove, path, error.value());
}

void show_file(const std::filesystem::path& path, std::string_view text, FileHook* hook) {
  std::filesystem::path temporary = path;
  temporary += ".new";
  if (std::filesystem::exists(std::filesystem::symlink_status(temporary))) remove_path(temporary, hook);
  FileOutput file(temporary, hook);
  file.write(std::as_bytes(std::span(text)));
  file.close();
  rename_path(temporary, path, hook);
}

void replace_file(const std::filesystem::path& path, std::string_view text, FileHook* hook) {
  show_file(path, text, hook);
  sync_folder(path.parent_path(), hook);
}

}  // namespace mxopt
