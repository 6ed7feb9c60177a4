#include "mxopt/optimizer/checkpoint/checkpoint_writer.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <iterator>
#include <optional>
#include <set>
#include <sstream>
#include <string_view>
#include <system_error>
#include <thread>
#include <utility>

#include "mxopt/collectives/deadline.h"
#include "mxopt/optimizer/checkpoint/checkpoint_folder.h"
#include "mxopt/optimizer/checkpoint/file_input.h"
#include "mxopt/optimizer/checkpoint/file_output.h"
#include "mxopt/optimizer/checkpoint/manifest.h"
#include "mxopt/optimizer/checkpoint/rank_file.h"
#include "mxopt/params/check.h"

namespace mxopt {

namespace {

constexpr std::int64_t kMostPartBytes = std::int64_t{1} << 30;
constexpr std::int64_t kMostOutcomeBytes = std::int64_t{1} << 20;
/// Writer 0 gives up before the others do, so that they learn from it who did not come.
constexpr double kLeaderShare = 0.9;
/// How long an outcome may take once somebody has decided it.
constexpr double kOutcomeGraceS = 10;
constexpr std::string_view kSaved = "saved\n";

void check_job(const CheckpointJob& job) {
  MXOPT_CHECK(!job.dir.empty(), "a checkpoint needs a folder; dir is empty");
  MXOPT_CHECK(job.step >= 0, "step " << job.step << "; allowed is 0 or more");
  MXOPT_CHECK(job.writers >= 1 && job.writers <= 99'999, job.writers << " writers; allowed are 1 to 99999");
  MXOPT_CHECK(job.writer >= 0 && job.writer < job.writers,
              "writer " << job.writer << " of " << job.writers << "; allowed are 0 to " << job.writers - 1);
  MXOPT_CHECK(job.keep_last >= 0, "keep_last " << job.keep_last << "; allowed is 0 or more");
  const bool is_plain = std::all_of(job.attempt.begin(), job.attempt.end(), [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_';
  });
  MXOPT_CHECK(is_plain && !job.attempt.empty() && job.attempt.size() <= 64,
              "attempt '" << job.attempt << "'; allowed are 1 to 64 letters, digits and '_'");
}

/// Sleeps a little longer each time; many writers leave the file system more time.
class Poll {
 public:
  explicit Poll(int writers) : longest_(std::min(20 + writers, 500)) {}

  void wait() {
    std::this_thread::sleep_for(pause_);
    pause_ = std::min(pause_ * 2, longest_);
  }

 private:
  std::chrono::milliseconds pause_{1};
  std::chrono::milliseconds longest_;
};

/// The names in a folder; nothing if it is not there. Why not ask for one name: a network file system may
/// remember that a file was absent, but looks again when a folder is opened.
std::optional<std::set<std::string>> names_in(const std::filesystem::path& folder) {
  std::set<std::string> names;
  std::error_code error;
  std::filesystem::directory_iterator entry(folder, error);
  for (; !error && entry != std::filesystem::directory_iterator(); entry.increment(error)) {
    names.insert(entry->path().filename().string());
  }
  if (error) return std::nullopt;
  return names;
}

std::string seconds_text(double seconds) {
  std::ostringstream text;
  text << seconds << " s";
  return text.str();
}

class Save {
 public:
  Save(const CheckpointJob& job, const std::function<CheckpointContents()>& make, FileHook* hook)
      : job_(job),
        make_(make),
        hook_(hook),
        deadline_(job.timeout_s),
        leader_deadline_(job.timeout_s * kLeaderShare),
        folder_(hidden_path(job.dir, "tmp", job.step, job.attempt)),
        outcome_(hidden_path(job.dir, "result", job.step, job.attempt)) {}

  SavedCheckpoint run() {
    if (const auto text = read_outcome()) {
      if (*text == kSaved)
        fail("attempt '" + job_.attempt + "' was used before; it must be new for every save");
      throw CheckpointError(*text);
    }
    const std::string problem = write_part();
    SavedCheckpoint saved;
    saved.folder = job_.dir / step_folder_name(job_.step);
    for (const CheckpointSlice& slice : contents_.slices) {
      saved.payload_bytes += static_cast<std::int64_t>(slice.values.size_bytes());
    }
    if (job_.writer == 0) {
      lead(problem);
      saved.warnings = prune_checkpoints(job_.dir, job_.keep_last, job_.attempt, hook_);
    } else {
      follow(problem);
    }
    return saved;
  }

 private:
  std::filesystem::path part_path(int writer, std::string_view ending) const {
    return folder_ / ("part-" + std::to_string(writer) + std::string(ending));
  }

  std::string failure(const std::string& why) const {
    return "the checkpoint of step " + std::to_string(job_.step) + " in " + job_.dir.string() +
           " was not saved: " + why;
  }
  [[noreturn]] void fail(const std::string& why) const { throw CheckpointError(failure(why)); }

  // --- what every writer does

  /// Returns what went wrong, after the others can know it; empty if nothing did.
  std::string write_part() {
    try {
      make_folders();
      contents_ = make_();
      Manifest part;
      part.library_version = MXOPT_VERSION;
      part.step = job_.step;
      part.attempt = job_.attempt;
      part.writers = job_.writers;
      part = write_rank_file(folder_, part, job_.writer, contents_, hook_);
      part.sections = contents_.sections;
      part.user = contents_.user;
      if (job_.writer == 0) part.config = contents_.config;
      sync_folder(folder_, hook_);
      // Last: once the others see it, nothing of this writer's part may fail.
      show_file(part_path(job_.writer, ".json"), manifest_text(part), hook_);
      return {};
    } catch (const std::exception& error) {  // handed to all writers, this one included
      const std::string problem = "writer " + std::to_string(job_.writer) + ": " + error.what();
      make_room();
      post_problem(problem);
      return problem;
    }
  }

  void make_folders() {
    make_folder(job_.dir, hook_);
    make_folder(folder_, hook_);
    has_folder_ = true;
  }

  /// On a full disk there is none for the problem's text as long as this writer's file is there.
  void make_room() {
    try {
      remove_path(folder_ / rank_file_name(job_.writer, job_.writers), hook_);
    } catch (const FileError&) {  // then there may be no room, and the others have their deadlines
    }
  }

  void post_problem(const std::string& problem) {
    if (job_.writer == 0) return;
    try {
      if (!has_folder_) make_folders();
      show_file(part_path(job_.writer, ".error"), problem, hook_);
      has_posted_problem_ = true;
    } catch (const FileError&) {
      has_posted_problem_ = false;  // follow() asks
    }
  }

  std::optional<std::string> read_outcome() const {
    const auto names = names_in(job_.dir);
    if (!names || !names->contains(outcome_.filename().string())) return std::nullopt;
    return read_text_file(outcome_, kMostOutcomeBytes);
  }

  std::optional<std::string> wait_for_outcome(const Deadline& deadline) const {
    Poll poll(job_.writers);
    for (;;) {
      if (auto text = read_outcome()) return text;
      if (deadline.passed()) return std::nullopt;
      poll.wait();
    }
  }

  // --- writers other than 0

  void follow(const std::string& problem) {
    std::error_code ignored;
    const bool is_decided = has_folder_ && !std::filesystem::exists(folder_, ignored);
    // Why not wait: nobody can learn of the problem, and writer 0 can not succeed without this writer.
    if (!problem.empty() && !has_posted_problem_ && !is_decided) fail(problem);
    std::optional<std::string> outcome = wait_for_outcome(deadline_);
    if (!outcome) outcome = give_up();
    if (*outcome != kSaved) throw CheckpointError(*outcome);
  }

  std::string give_up() {
    const std::string why =
        failure("writer " + std::to_string(job_.writer) + " waited " + seconds_text(job_.timeout_s) +
                " for writer 0, which is late or dead, or the folder is not on a file system "
                "that all ranks share");
    const std::filesystem::path taken = hidden_path(job_.dir, "failed", job_.step, job_.attempt);
    try {
      rename_path(folder_, taken, hook_);
    } catch (const FileError& error) {
      if (error.code() != ENOENT) fail(error.what());
      if (auto outcome = wait_for_outcome(Deadline(kOutcomeGraceS))) return *outcome;
      fail("writer 0 has stopped while it published it, so it may be there all the same");
    }
    leave_outcome(why, taken);
    return why;
  }

  // --- writer 0

  void lead(const std::string& problem) {
    std::filesystem::path folder = folder_;
    try {
      if (!problem.empty()) fail(problem);
      write_manifest(collect_parts());
      const std::filesystem::path ready = hidden_path(job_.dir, "ready", job_.step, job_.attempt);
      claim(ready);
      folder = ready;
      publish_checkpoint(job_.dir, ready, job_.step, job_.attempt, hook_);
      show_file(outcome_, kSaved, hook_);
    } catch (const CheckpointError& error) {
      leave_outcome(error.what(), folder);
      throw;
    } catch (const std::exception& error) {  // handed to all writers
      const std::string text = failure("writer 0: " + std::string(error.what()));
      leave_outcome(text, folder);
      throw CheckpointError(text);
    }
  }

  void claim(const std::filesystem::path& ready) {
    try {
      rename_path(folder_, ready, hook_);
    } catch (const FileError& error) {
      if (error.code() != ENOENT) throw;
      fail_overtaken();
    }
  }

  [[noreturn]] void fail_overtaken() const {
    if (const auto outcome = wait_for_outcome(Deadline(kOutcomeGraceS))) throw CheckpointError(*outcome);
    fail("another writer has given up before writer 0 was ready");
  }

  /// Removes `folder`, so that a full disk has room again, and leaves `text` for the others. They have their
  /// deadlines if that fails too.
  void leave_outcome(const std::string& text, const std::filesystem::path& folder) {
    for (const bool removes : {true, false}) {
      try {
        if (removes && has_folder_) remove_path(folder, hook_);
        if (!removes && !read_outcome()) show_file(outcome_, text, hook_);
      } catch (const std::runtime_error&) {
        continue;  // `text` is thrown here in any case
      }
    }
  }

  Manifest collect_parts() {
    Poll poll(job_.writers);
    std::vector<int> missing;
    for (int writer = 0; writer < job_.writers; ++writer) missing.push_back(writer);
    Manifest all;
    for (;;) {
      const auto names = names_in(folder_);
      if (!names) fail_overtaken();
      std::vector<int> still;
      for (const int writer : missing) {
        if (!take_part(writer, *names, all)) still.push_back(writer);
      }
      missing = std::move(still);
      if (missing.empty()) break;
      if (leader_deadline_.passed()) fail_late(missing);
      poll.wait();
    }
    check_manifest(all, (folder_ / "manifest.json").string());
    check_files_visible(all);
    return all;
  }

  [[noreturn]] void fail_late(const std::vector<int>& missing) const {
    std::string names;
    for (const int writer : missing) names += (names.empty() ? "" : ", ") + std::to_string(writer);
    fail("of " + std::to_string(job_.writers) + " writers, these have not come within " +
         seconds_text(job_.timeout_s * kLeaderShare) + ": " + names +
         "; they are late or dead, or the folder is not on a file system that all ranks share");
  }

  /// False if the writer has not come yet.
  bool take_part(int writer, const std::set<std::string>& names, Manifest& all) const {
    const std::filesystem::path path = part_path(writer, ".json");
    const std::filesystem::path problem = part_path(writer, ".error");
    if (names.contains(problem.filename().string())) fail(read_text_file(problem, kMostOutcomeBytes));
    if (!names.contains(path.filename().string())) return false;
    merge(parse_manifest(read_text_file(path, kMostPartBytes), path.string()), writer, all);
    return true;
  }

  void merge(Manifest part, int writer, Manifest& all) const {
    if (part.step != job_.step || part.writers != job_.writers) {
      fail("writer " + std::to_string(writer) + " saves step " + std::to_string(part.step) + " with " +
           std::to_string(part.writers) + " writers, writer 0 step " + std::to_string(job_.step) + " with " +
           std::to_string(job_.writers));
    }
    if (writer == 0) {
      all = std::move(part);
      return;
    }
    for (CheckpointSection& section : part.sections) {
      const CheckpointSection* known = all.find_section(section.name);
      if (known == nullptr) {
        all.sections.push_back(std::move(section));
      } else if (!equal_sections(*known, section)) {
        fail("section `" + section.name + "`: the params or scalars of writer " + std::to_string(writer) +
             " are not those of the writers before it");
      }
    }
    for (auto& [key, value] : part.user) {
      const auto [known, is_new] = all.user.emplace(key, value);
      if (!is_new && known->second != value) {
        fail("key `" + key + "` of the user's map: the value of writer " + std::to_string(writer) +
             " is not that of the writers before it");
      }
    }
    std::move(part.slices.begin(), part.slices.end(), std::back_inserter(all.slices));
    std::move(part.files.begin(), part.files.end(), std::back_inserter(all.files));
  }

  void check_files_visible(const Manifest& all) const {
    try {
      check_file_sizes(all, folder_);
    } catch (const DataError& error) {
      fail(std::string(error.what()) + "; the folder is not on a file system that all ranks share");
    }
  }

  /// Sorted, since the text must not depend on who came first.
  void write_manifest(Manifest all) const {
    const auto by_name = [](const auto& a, const auto& b) { return a.name < b.name; };
    std::sort(all.sections.begin(), all.sections.end(), by_name);
    std::sort(all.files.begin(), all.files.end(), by_name);
    std::sort(all.slices.begin(), all.slices.end(), [](const ManifestSlice& a, const ManifestSlice& b) {
      return std::pair(std::string_view(a.file), std::string_view(a.tensor)) <
             std::pair(std::string_view(b.file), std::string_view(b.tensor));
    });
    for (int writer = 0; writer < job_.writers; ++writer) remove_path(part_path(writer, ".json"), hook_);
    replace_file(folder_ / "manifest.json", manifest_text(all), hook_);
  }

  const CheckpointJob& job_;
  const std::function<CheckpointContents()>& make_;
  CheckpointContents contents_;  // after make_()
  FileHook* hook_;
  Deadline deadline_, leader_deadline_;
  std::filesystem::path folder_;
  std::filesystem::path outcome_;
  bool has_folder_ = false;
  bool has_posted_problem_ = false;
};

}  // namespace

SavedCheckpoint write_checkpoint(const CheckpointJob& job, const std::function<CheckpointContents()>& make,
                                 FileHook* hook) {
  check_job(job);
  return Save(job, make, hook).run();
}

SavedCheckpoint write_checkpoint(const CheckpointJob& job, const CheckpointContents& contents,
                                 FileHook* hook) {
  return write_checkpoint(
      job, [&contents] { return contents; }, hook);
}

}  // namespace mxopt
