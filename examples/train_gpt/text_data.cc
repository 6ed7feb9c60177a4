#include "train_gpt/text_data.h"

#include <cerrno>
#include <cstddef>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <set>
#include <sstream>

#include <glob.h>

#include "train_gpt/random.h"

#include "mxopt/params/check.h"
#include "mxopt/params/layout.h"

namespace train_gpt {
namespace {

namespace fs = std::filesystem;

/// Adds the real paths of the regular files that `pattern` matches.
void add_matches(const std::string& pattern, const std::string& origin, std::set<std::string>& paths) {
  glob_t found{};
  const int status = glob(pattern.c_str(), GLOB_BRACE | GLOB_TILDE, nullptr, &found);
  const std::unique_ptr<glob_t, void (*)(glob_t*)> owner(&found, globfree);
  bool any = false;
  if (status == 0) {
    for (std::size_t i = 0; i < found.gl_pathc; ++i) {
      std::error_code error;
      const fs::path path = fs::canonical(found.gl_pathv[i], error);
      if (error || !fs::is_regular_file(path, error)) continue;
      paths.insert(path.string());
      any = true;
    }
  }
  if (!any) {
    throw mxopt::ConfigError(origin + ": `data.files`: no file matches \"" + pattern +
                             "\"; allowed: patterns that each match a file");
  }
}

}  // namespace

TextData::TextData(const std::vector<std::string>& patterns, std::int64_t seq_len, const std::string& origin)
    : seq_len_(seq_len) {
  std::set<std::string> paths;
  for (const std::string& pattern : patterns) add_matches(pattern, origin, paths);
  for (const std::string& path : paths) {
    errno = 0;
    std::ifstream file(path, std::ios::binary);
    if (file) text_.append(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
    if (!file || file.bad()) {
      throw mxopt::DataError("data file " + path + " can not be read: " + std::strerror(errno));
    }
  }
  files_ = static_cast<std::int64_t>(paths.size());
  if (bytes() < seq_len + 1) {
    std::ostringstream text;
    text << origin << ": `train.seq_len` is " << seq_len << ", but the " << files_
         << " files of `data.files` have " << bytes()
         << " bytes; allowed: at most one byte less than the files have";
    throw mxopt::ConfigError(text.str());
  }
}

std::uint64_t TextData::digest() const {
  return mxopt::hash64(text_);
}

std::vector<std::uint8_t> TextData::micro_batch(std::uint64_t seed, std::int64_t step,
                                                std::int64_t micro_batch, std::int64_t sequences) const {
  const std::int64_t row = seq_len_ + 1;
  const auto places = static_cast<std::uint64_t>(bytes() - seq_len_);
  const std::uint64_t stream = random_bits(seed, static_cast<std::uint64_t>(step), 0);
  std::vector<std::uint8_t> out(static_cast<std::size_t>(sequences * row));
  for (std::int64_t i = 0; i < sequences; ++i) {
    const auto index = static_cast<std::uint64_t>(micro_batch * sequences + i);
    const std::uint64_t place = random_bits(seed, stream, index) % places;
    std::memcpy(out.data() + i * row, text_.data() + place, static_cast<std::size_t>(row));
  }
  return out;
}

}  // namespace train_gpt
