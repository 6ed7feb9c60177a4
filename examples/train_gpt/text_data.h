// The training text: bytes of files, and which of them each micro-batch reads.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace train_gpt {

class TextData {
 public:
  /// Reads every regular file that a pattern matches (shell wildcards, {a,b}, ~), each once, in the order of
  /// their real paths. origin says where the patterns come from, for errors. Throws ConfigError for a pattern
  /// without a match or fewer than seq_len + 1 bytes in all, DataError for a file that can not be read.
  TextData(const std::vector<std::string>& patterns, std::int64_t seq_len, const std::string& origin);

  std::int64_t bytes() const { return static_cast<std::int64_t>(text_.size()); }
  std::int64_t files() const { return files_; }
  /// Equal text gives equal digests.
  std::uint64_t digest() const;

  /// Sequences [sequences, seq_len + 1] at places that depend on (seed, step, micro_batch) only.
  std::vector<std::uint8_t> micro_batch(std::uint64_t seed, std::int64_t step, std::int64_t micro_batch,
                                        std::int64_t sequences) const;

 private:
  std::int64_t seq_len_;
  std::int64_t files_ = 0;
  std::string text_;
};

}  // namespace train_gpt
