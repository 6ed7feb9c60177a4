#include "mxopt/optimizer/checkpoint/file_input.h"

#include <algorithm>
#include <cerrno>
#include <system_error>
#include <utility>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "mxopt/params/check.h"

namespace mxopt {

namespace {

[[noreturn]] void fail(const std::filesystem::path& path, const std::string& what, int code) {
  throw DataError(path.string() + ": " + what + ": " + std::generic_category().message(code));
}

}  // namespace

FileInput::FileInput(std::filesystem::path path) : path_(std::move(path)) {
  // Why not blocking: opening a pipe would wait for its writer.
  descriptor_ = ::open(path_.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (descriptor_ < 0) fail(path_, "can not be opened", errno);
  struct stat status = {};
  const bool known = ::fstat(descriptor_, &status) == 0;
  if (known && S_ISREG(status.st_mode)) {
    bytes_ = status.st_size;
    return;
  }
  const int code = errno;
  ::close(descriptor_);
  if (!known) fail(path_, "can not be examined", code);
  throw DataError(path_.string() + ": is no regular file");
}

FileInput::~FileInput() {
  ::close(descriptor_);
}

void FileInput::read(std::int64_t begin, std::span<std::byte> out) const {
  constexpr std::size_t kMostBytes = std::size_t{1} << 30;
  while (!out.empty()) {
    const ssize_t got = ::pread(descriptor_, out.data(), std::min(kMostBytes, out.size()), begin);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) fail(path_, "can not be read at byte " + std::to_string(begin), errno);
    if (got == 0) {
      throw DataError(path_.string() + ": ends at byte " + std::to_string(begin) + ", expected " +
                      std::to_string(out.size()) + " more bytes");
    }
    begin += got;
    out = out.subspan(static_cast<std::size_t>(got));
  }
}

std::string read_text_file(const std::filesystem::path& path, std::int64_t most_bytes) {
  const FileInput file(path);
  if (file.bytes() > most_bytes) {
    throw DataError(path.string() + ": has " + std::to_string(file.bytes()) + " bytes, allowed are at most " +
                    std::to_string(most_bytes));
  }
  std::string text(static_cast<std::size_t>(file.bytes()), '\0');
  file.read(0, std::as_writable_bytes(std::span(text)));
  return text;
}

}  // namespace mxopt
