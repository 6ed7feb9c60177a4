// High-precision weights in safetensors files, as initial values.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "mxopt/optimizer/checkpoint/safetensors.h"
#include "mxopt/params/layout.h"

namespace mxopt {

/// The values of what a rank owns of one param.
struct WeightPiece {
  int param = 0;
  std::int64_t begin = 0;  // flat offset in the param
  std::vector<float> values;
};

class WeightFiles {
 public:
  /// Throws DataError for a file that is no safetensors file, or a tensor that two of them have.
  explicit WeightFiles(std::span<const std::filesystem::path> files);

  /// Throws DataError that lists params without a tensor of their name, or with one of another shape or a
  /// type that is not F32 or BF16. Tied params need none. Returns the names of tensors that no param has.
  std::vector<std::string> require_params(const Layout& layout) const;

  /// The values of a segment of the param of this name.
  WeightPiece read(const std::string& name, const Segment& segment) const;

 private:
  std::vector<std::filesystem::path> paths_;
  std::vector<SafetensorsFile> files_;
  std::map<std::string, std::size_t> file_of_;  // by tensor
};

}  // namespace mxopt
