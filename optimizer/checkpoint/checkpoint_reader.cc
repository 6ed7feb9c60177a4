#include "mxopt/optimizer/checkpoint/checkpoint_reader.h"

#include <algorithm>
#include <system_error>
#include <utility>

#include "mxopt/optimizer/checkpoint/file_input.h"
#include "mxopt/optimizer/checkpoint/rank_file.h"
#include "mxopt/optimizer/checkpoint/safetensors.h"
#include "mxopt/params/check.h"
#include "mxopt/params/nearest_name.h"

namespace mxopt {

struct CheckpointReader::OpenFile {
  std::string name;
  SafetensorsFile file;
};

namespace {

// Section names have no '/'.
std::string param_key(std::string_view section, std::string_view param) {
  return std::string(section) + "/" + std::string(param);
}

std::string state_key(std::string_view section, std::string_view param, StateKind kind) {
  return std::string(state_kind_name(kind)) + "/" + param_key(section, param);
}

SafetensorsFile open_rank_file(const std::filesystem::path& path, const Manifest& manifest) {
  SafetensorsFile file(path);
  check_rank_file(file, manifest, path);
  return file;
}

}  // namespace

CheckpointReader::CheckpointReader(const std::filesystem::path& path, Verify verify, VerifyShare share) {
  MXOPT_CHECK(share.parts >= 1 && share.part >= 0 && share.part < share.parts,
              "share " << share.part << " of " << share.parts << "; allowed are 0 to " << share.parts - 1);
  choose_folder(path);
  manifest_ = read_manifest(folder_);
  const std::int64_t named = step_of_folder_name(folder_.filename().string());
  if (named >= 0 && named != manifest_.step) {
    throw DataError((folder_ / "manifest.json").string() + ": key `step`: expected " + std::to_string(named) +
                    " as the folder's name says, found " + std::to_string(manifest_.step));
  }
  verify_files(verify, share);
  for (const CheckpointSection& table : manifest_.sections) {
    for (const CheckpointParam& each : table.params) params_[param_key(table.name, each.name)] = &each;
  }
  for (const ManifestSlice& slice : manifest_.slices) {
    slices_[state_key(slice.section, slice.param, slice.kind)].push_back(&slice);
  }
  for (auto& [key, slices] : slices_) {
    std::sort(slices.begin(), slices.end(), [](const auto* a, const auto* b) { return a->begin < b->begin; });
  }
}

CheckpointReader::~CheckpointReader() = default;
CheckpointReader::CheckpointReader(CheckpointReader&&) noexcept = default;

void CheckpointReader::choose_folder(const std::filesystem::path& path) {
  std::error_code error;
  if (!std::filesystem::is_directory(path, error)) {
    throw DataError(path.string() + ": expected a folder with checkpoints, found " +
                    (std::filesystem::exists(path, error) ? "a file" : "nothing"));
  }
  folder_ = path.has_filename() ? path : path.parent_path();
  const bool is_one = std::filesystem::exists(path / "manifest.json", error) ||
                      step_of_folder_name(folder_.filename().string()) >= 0;
  if (is_one) return;
  try {
    folder_ = latest_checkpoint(path);
  } catch (const DataError& problem) {
    warnings_.emplace_back(problem.what());
    choose_newest(path);
  }
}

void CheckpointReader::choose_newest(const std::filesystem::path& dir) {
  const std::vector<CheckpointListing> listings = list_checkpoints(dir);
  for (auto listing = listings.rbegin(); listing != listings.rend(); ++listing) {
    if (!listing->complete) {
      warnings_.push_back(listing->problem);
      continue;
    }
    folder_ = listing->folder;
    warnings_.push_back("so the newest complete checkpoint is used: " + folder_.string());
    return;
  }
  std::string text = dir.string() + ": expected a complete checkpoint, found none";
  for (const std::string& warning : warnings_) text += "; " + warning;
  throw DataError(text);
}

void CheckpointReader::verify_files(Verify verify, VerifyShare share) {
  if (verify == Verify::kOff) return;
  check_file_sizes(manifest_, folder_);
  if (verify == Verify::kSize) return;
  const auto parts = static_cast<std::size_t>(share.parts);
  for (auto i = static_cast<std::size_t>(share.part); i < manifest_.files.size(); i += parts) {
    check_checksums(manifest_.files[i], folder_);
    open_rank_file(folder_ / manifest_.files[i].name, manifest_);
  }
}

CheckpointReader::OpenFile& CheckpointReader::open(const std::string& name) {
  if (file_ == nullptr || file_->name != name) {
    file_.reset();
    file_ = std::make_unique<OpenFile>(OpenFile{name, open_rank_file(folder_ / name, manifest_)});
  }
  return *file_;
}

const CheckpointSection& CheckpointReader::section(std::string_view name) const {
  if (const CheckpointSection* found = manifest_.find_section(name)) return *found;
  std::string known;
  for (const CheckpointSection& each : manifest_.sections)
    known += (known.empty() ? "`" : ", `") + each.name + "`";
  throw DataError(folder_.string() + ": expected section `" + std::string(name) + "`, found " +
                  (known.empty() ? "none" : known));
}

const CheckpointParam& CheckpointReader::param(std::string_view section_name, std::string_view name) const {
  const CheckpointSection& table = section(section_name);
  const auto found = params_.find(param_key(section_name, name));
  if (found != params_.end()) return *found->second;
  std::vector<std::string_view> names;
  for (const CheckpointParam& each : table.params) names.push_back(each.name);
  const std::string nearest(nearest_name(name, names));
  throw DataError(folder_.string() + ": expected param `" + std::string(name) + "` in section `" +
                  std::string(section_name) + "`, found " + std::to_string(names.size()) + " others" +
                  (nearest.empty() ? "" : ", the nearest `" + nearest + "`"));
}

void CheckpointReader::read(std::string_view section_name, std::string_view name, StateKind kind,
                            std::int64_t begin, std::span<float> out) {
  const CheckpointParam& table = param(section_name, name);
  const std::string where = folder_.string() + ": param `" + std::string(name) + "`";
  if (std::find(table.kinds.begin(), table.kinds.end(), kind) == table.kinds.end()) {
    throw DataError(where + ": expected " + std::string(state_kind_name(kind)) +
                    ", found that it was not saved");
  }
  const std::int64_t elems = shape_elems(table.shape, name);
  const auto wanted = static_cast<std::int64_t>(out.size());
  if (begin < 0 || begin > elems || wanted > elems - begin) {
    throw DataError(where + ": expected elements from " + std::to_string(begin) + " on, " +
                    std::to_string(wanted) + " of them, found " + std::to_string(elems) + " in all");
  }
  if (wanted == 0) return;
  const std::vector<const ManifestSlice*>& slices = slices_.at(state_key(section_name, name, kind));
  auto slice = std::upper_bound(slices.begin(), slices.end(), begin,
                                [](std::int64_t at, const ManifestSlice* each) { return at < each->begin; });
  for (--slice; !out.empty(); ++slice) {
    const std::int64_t skipped = begin - (*slice)->begin;
    const std::int64_t part = std::min((*slice)->elems - skipped, static_cast<std::int64_t>(out.size()));
    const auto elems_here = static_cast<std::size_t>(part);
    open((*slice)->file).file.read((*slice)->tensor, skipped, out.first(elems_here));
    out = out.subspan(elems_here);
    begin += part;
  }
}

}  // namespace mxopt
