// Reading ranges of one file that may be damaged.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>

namespace mxopt {

/// A regular file, open for reading.
class FileInput {
 public:
  /// Throws DataError naming the path and the reason.
  explicit FileInput(std::filesystem::path path);
  ~FileInput();
  FileInput(const FileInput&) = delete;
  FileInput& operator=(const FileInput&) = delete;

  const std::filesystem::path& path() const { return path_; }
  std::int64_t bytes() const { return bytes_; }  // when it was opened

  /// Fills `out` with the bytes from `begin` on. Throws DataError naming the path, also if the file ends
  /// before.
  void read(std::int64_t begin, std::span<std::byte> out) const;

 private:
  std::filesystem::path path_;
  std::int64_t bytes_ = 0;
  int descriptor_ = -1;
};

/// The whole file. Throws DataError naming the path, also if it has more than `most_bytes`.
std::string read_text_file(const std::filesystem::path& path, std::int64_t most_bytes);

}  // namespace mxopt
