#include "mxopt/optimizer/weight_files.h"

#include <algorithm>
#include <cstddef>
#include <set>
#include <string_view>

#include "mxopt/params/bf16.h"
#include "mxopt/params/check.h"
#include "mxopt/params/nearest_name.h"

namespace mxopt {

WeightFiles::WeightFiles(std::span<const std::filesystem::path> files) : paths_(files.begin(), files.end()) {
  for (const std::filesystem::path& path : paths_) {
    files_.emplace_back(path);
    for (const SafetensorsEntry& tensor : files_.back().header().tensors) {
      const auto [at, is_new] = file_of_.try_emplace(tensor.name, files_.size() - 1);
      if (is_new) continue;
      throw DataError(path.string() + ": tensor '" + tensor.name + "' is in " + paths_[at->second].string() +
                      " too");
    }
  }
}

std::vector<std::string> WeightFiles::require_params(const Layout& layout) const {
  std::vector<std::string_view> names;
  for (const auto& [name, file] : file_of_) names.push_back(name);
  std::string problems;
  const auto add = [&](const std::string& problem) { problems += (problems.empty() ? "" : "\n") + problem; };
  std::set<std::string> used;
  for (const ParamLayout& param : layout.params()) {
    used.insert(param.name);
    if (param.tied_to >= 0) continue;
    const std::string who = "param '" + param.name + "' ";
    const auto at = file_of_.find(param.name);
    if (at == file_of_.end()) {
      const std::string_view nearest = nearest_name(param.name, names);
      add(who + "has no tensor of its name" +
          (nearest.empty() ? std::string() : "; there is '" + std::string(nearest) + "'"));
      continue;
    }
    const SafetensorsEntry& tensor = files_[at->second].find(param.name);
    const std::string where = paths_[at->second].string();
    if (tensor.shape != param.shape) {
      add(where + ": tensor '" + param.name + "' has shape " + shape_text(tensor.shape) + ", the param " +
          shape_text(param.shape));
    }
    if (tensor.dtype != "F32" && tensor.dtype != "BF16") {
      add(where + ": tensor '" + param.name + "' is " + tensor.dtype + "; allowed are F32 and BF16");
    }
  }
  if (!problems.empty()) throw DataError("weights do not fit the params there are:\n" + problems);
  std::vector<std::string> left_out;
  for (const auto& [name, file] : file_of_) {
    if (!used.contains(name)) left_out.push_back(name);
  }
  return left_out;
}

WeightPiece WeightFiles::read(const std::string& name, const Segment& segment) const {
  WeightPiece piece = {segment.param, segment.param_begin,
                       std::vector<float>(static_cast<std::size_t>(segment.elems))};
  const SafetensorsFile& file = files_[file_of_.at(name)];
  if (file.find(name).dtype == "F32") {
    file.read(name, segment.param_begin, piece.values);
    return piece;
  }
  std::vector<Bf16> values(piece.values.size());
  file.read(name, segment.param_begin, segment.elems, std::as_writable_bytes(std::span(values)));
  std::ranges::transform(values, piece.values.begin(), [](Bf16 value) { return bf16_to_fp32(value); });
  return piece;
}

}  // namespace mxopt
