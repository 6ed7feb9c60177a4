#include "mxopt/optimizer/checkpoint/checkpoint_folder.h"

#include <algorithm>
#include <array>
#include <set>
#include <system_error>
#include <utility>

#include "mxopt/optimizer/checkpoint/file_input.h"
#include "mxopt/optimizer/checkpoint/file_output.h"
#include "mxopt/params/check.h"

namespace mxopt {

namespace {

constexpr std::array<std::string_view, 6> kRoles = {"tmp", "ready", "failed", "old", "trash", "result"};
constexpr std::int64_t kMostLatestBytes = 64;

std::vector<std::string> names_in(const std::filesystem::path& dir) {
  std::vector<std::string> names;
  std::error_code error;
  std::filesystem::directory_iterator entry(dir, error);
  for (; !error && entry != std::filesystem::directory_iterator(); entry.increment(error)) {
    names.push_back(entry->path().filename().string());
  }
  if (error) throw DataError(dir.string() + ": can not be listed: " + error.message());
  std::sort(names.begin(), names.end());
  return names;
}

/// Role and step of a name that hidden_path() makes; no role for other names.
std::pair<std::string_view, std::int64_t> read_hidden_name(std::string_view name) {
  for (const std::string_view role : kRoles) {
    const std::string prefix = "." + std::string(role) + "-";
    if (!name.starts_with(prefix)) continue;
    const std::string_view rest = name.substr(prefix.size());
    const std::size_t end = rest.find('-', rest.find('-') + 1);
    const std::int64_t step = step_of_folder_name(rest.substr(0, end));
    if (end != std::string_view::npos && step >= 0) return {role, step};
  }
  return {};
}

bool is_there(const std::filesystem::path& path) {
  std::error_code error;
  return std::filesystem::exists(std::filesystem::symlink_status(path, error));
}

CheckpointListing examine(const std::filesystem::path& folder, std::int64_t step) {
  CheckpointListing listing;
  listing.folder = folder;
  listing.step = step;
  try {
    const Manifest manifest = read_manifest(folder);
    if (manifest.step != step) {
      throw DataError((folder / "manifest.json").string() + ": key `step`: expected " + std::to_string(step) +
                      " as the folder's name says, found " + std::to_string(manifest.step));
    }
    check_file_sizes(manifest, folder);
    for (const ManifestFile& file : manifest.files) listing.bytes += file.bytes;
    listing.complete = true;
  } catch (const DataError& error) {
    listing.problem = error.what();
  }
  return listing;
}

/// Runs one action of the pruning; a failure is a warning.
template <class Action>
void attempt_to(std::vector<std::string>& warnings, const Action& action) {
  try {
    action();
  } catch (const std::runtime_error& error) {
    warnings.emplace_back(error.what());
  }
}

void remove_checkpoint(const CheckpointListing& listing, const std::filesystem::path& dir,
                       const std::string& attempt, FileHook* hook) {
  // Why renamed first: a removal that is cut short must not leave a damaged checkpoint.
  const std::filesystem::path trash = hidden_path(dir, "trash", listing.step, attempt);
  rename_path(listing.folder, trash, hook);
  remove_path(trash, hook);
}

}  // namespace

std::filesystem::path hidden_path(const std::filesystem::path& dir, const std::string& role,
                                  std::int64_t step, const std::string& attempt) {
  return dir / ("." + role + "-" + step_folder_name(step) + "-" + attempt);
}

std::vector<CheckpointListing> list_checkpoints(const std::filesystem::path& dir) {
  std::filesystem::path latest;
  try {
    latest = latest_checkpoint(dir);
  } catch (const DataError&) {
    latest.clear();  // then none of them is the latest
  }
  std::vector<CheckpointListing> listings;
  std::set<std::int64_t> steps;
  const std::vector<std::string> names = names_in(dir);
  for (const std::string& name : names) {
    const std::int64_t step = step_of_folder_name(name);
    if (step < 0) continue;
    steps.insert(step);
    listings.push_back(examine(dir / name, step));
    listings.back().is_latest = dir / name == latest;
  }
  for (const std::string& name : names) {
    const auto [role, step] = read_hidden_name(name);
    // A replacement was cut short.
    if (role == "old" && steps.insert(step).second) listings.push_back(examine(dir / name, step));
  }
  std::sort(listings.begin(), listings.end(), [](const auto& a, const auto& b) { return a.step < b.step; });
  return listings;
}

std::filesystem::path latest_checkpoint(const std::filesystem::path& dir) {
  const std::filesystem::path path = dir / "latest";
  std::string name = read_text_file(path, kMostLatestBytes);
  const bool has_end = name.ends_with('\n');
  if (has_end) name.pop_back();
  if (!has_end || step_of_folder_name(name) < 0) {
    throw DataError(path.string() + ": expected a name like step-00001000 and a line end, found " +
                    std::to_string(name.size()) + " bytes of another kind");
  }
  if (!is_there(dir / name / "manifest.json")) {
    throw DataError(path.string() + ": names " + name +
                    ": expected a folder with a manifest.json, found none");
  }
  return dir / name;
}

void publish_checkpoint(const std::filesystem::path& dir, const std::filesystem::path& from,
                        std::int64_t step, const std::string& attempt, FileHook* hook) {
  const std::filesystem::path to = dir / step_folder_name(step);
  if (!is_there(to)) {
    rename_path(from, to, hook);
  } else if (!exchange_paths(from, to, hook)) {
    const std::filesystem::path old = hidden_path(dir, "old", step, attempt);
    rename_path(to, old, hook);
    try {
      rename_path(from, to, hook);
    } catch (const FileError&) {
      rename_path(old, to, hook);
      throw;
    }
  }
  sync_folder(dir, hook);
  replace_file(dir / "latest", step_folder_name(step) + "\n", hook);
}

std::vector<std::string> prune_checkpoints(const std::filesystem::path& dir, int keep_last,
                                           const std::string& attempt, FileHook* hook) {
  std::vector<std::string> warnings;
  attempt_to(warnings, [&] {
    for (const std::string& name : names_in(dir)) {
      const auto [role, step] = read_hidden_name(name);
      if (role.empty() || (role == "result" && dir / name == hidden_path(dir, "result", step, attempt)))
        continue;
      const std::filesystem::path visible = dir / step_folder_name(step);
      const bool is_lost = role == "old" && !is_there(visible);
      attempt_to(warnings, [&, &hidden = name] {
        if (is_lost) {
          rename_path(dir / hidden, visible, hook);
        } else {
          remove_path(dir / hidden, hook);
        }
      });
    }
  });
  if (keep_last == 0) return warnings;
  attempt_to(warnings, [&] {
    std::vector<CheckpointListing> listings = list_checkpoints(dir);
    std::erase_if(listings, [](const CheckpointListing& listing) { return !listing.complete; });
    // Not by step: a run that went back to an older one must keep what it saves, and not what it left.
    std::ranges::stable_sort(listings, {}, [](const CheckpointListing& listing) {
      return std::filesystem::last_write_time(listing.folder / "manifest.json");
    });
    const auto kept = static_cast<std::size_t>(keep_last);
    for (std::size_t i = 0; i + kept < listings.size(); ++i) {
      if (listings[i].is_latest) continue;
      attempt_to(warnings, [&] { remove_checkpoint(listings[i], dir, attempt, hook); });
    }
  });
  return warnings;
}

}  // namespace mxopt
