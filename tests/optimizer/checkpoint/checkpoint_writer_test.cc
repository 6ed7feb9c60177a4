#include "mxopt/optimizer/checkpoint/checkpoint_writer.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cerrno>
#include <chrono>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>
#include <unistd.h>

#include "checkpoint_model.h"
#include "support/temporary_folder.h"
#include "support/thrown_message.h"

#include "mxopt/optimizer/checkpoint/safetensors.h"
#include "mxopt/params/check.h"

namespace mxopt {
namespace {

using test::contains;
using test::names_of;
using test::TemporaryFolder;
using test::thrown_message;

test::CheckpointModel small_model(int seed = 0) {
  test::CheckpointModel model;
  model.params = {{"w", {40, 8}}, {"b", {300}}};
  model.seed = seed;
  return model;
}

constexpr auto kUnchanged = [](int, CheckpointJob&, CheckpointContents&) {
  return static_cast<FileHook*>(nullptr);
};

/// Expects the step, as latest and undamaged, and no other checkpoint.
void expect_only(const std::filesystem::path& dir, std::int64_t step, const test::CheckpointModel& model) {
  CheckpointReader reader(dir);
  EXPECT_EQ(reader.step(), step);
  EXPECT_TRUE(reader.warnings().empty());
  test::expect_equal(model, reader);
  const std::vector<CheckpointListing> listings = list_checkpoints(dir);
  EXPECT_EQ(listings.size(), 1U);
}

// B43: writers that own only padding, or nothing.
TEST(CheckpointWriter, WritersWithoutSlicesTakePart) {
  test::CheckpointModel model;
  model.params = {{"a", {1000}}, {"b", {17}}, {"c", {32, 64}}, {"d", {1}}};
  model.align_elems = 1;
  const TemporaryFolder folder;
  // Shards of 256 elements: 11 full ones, one of 250, and four of nothing.
  CheckpointJob job = test::make_job(folder.path(), 1);
  const auto errors =
      test::save_with(model, job, 16, [&](int writer, CheckpointJob&, CheckpointContents& contents) {
        std::size_t elems = 0;
        for (const CheckpointSlice& slice : contents.slices) elems += slice.values.size();
        EXPECT_EQ(elems, 3 * (writer < 11 ? 256U : writer == 11 ? 250U : 0U));
        return static_cast<FileHook*>(nullptr);
      });
  for (const std::string& error : errors) EXPECT_EQ(error, "");
  for (const int readers : {1, 2, 3, 5, 8, 16}) {
    CheckpointReader reader(folder.path());
    test::expect_equal(model, reader, readers);
  }
  // One that should own data and gives none is an error.
  job = test::make_job(folder.path(), 2);
  const auto lost =
      test::save_with(model, job, 16, [](int writer, CheckpointJob&, CheckpointContents& contents) {
        if (writer == 3) contents.slices.clear();
        return static_cast<FileHook*>(nullptr);
      });
  for (const std::string& error : lost)
    EXPECT_TRUE(contains(error, "param `a`, master: expected 1000 elements, found slices of the first 768"));
}

// B44, B47: only logical elements are in the files, whatever the padding was.
TEST(CheckpointWriter, FilesHoldNoPadding) {
  for (const std::int64_t align : {4, 16, 128}) {
    for (const int writers : {1, 2, 3, 7, 8}) {
      test::CheckpointModel model;
      model.params = {{"a", {57}}, {"b", {300}}};
      model.align_elems = align;
      model.shard_align_elems = align;
      const TemporaryFolder folder;
      test::save(model, folder.path(), 1, writers);
      std::int64_t payload = 0;
      for (int writer = 0; writer < writers; ++writer) {
        const std::filesystem::path path = folder / "step-00000001" / rank_file_name(writer, writers);
        const SafetensorsFile file(path);
        payload +=
            static_cast<std::int64_t>(std::filesystem::file_size(path)) - file.header().data_begin_bytes;
      }
      EXPECT_EQ(payload, 357 * 12);
      CheckpointReader reader(folder.path());
      test::expect_equal(model, reader, 3);
    }
  }
}

// B46: very different numbers of params per writer; the shared part does not depend on the writers.
TEST(CheckpointWriter, TheSharedPartIsTheSameForEveryNumberOfWriters) {
  test::CheckpointModel model;
  model.params = {{"large", {100'000}}};
  for (int i = 0; i < 50; ++i) model.params.push_back({"small" + std::to_string(i), {7}});
  std::vector<CheckpointSection> tables;
  for (const int writers : {1, 2, 4}) {
    const TemporaryFolder folder;
    test::save(model, folder.path(), 1, writers);
    CheckpointReader reader(folder.path());
    test::expect_equal(model, reader, 2);
    tables.push_back(reader.section(""));
  }
  EXPECT_TRUE(equal_sections(tables[0], tables[1]));
  EXPECT_TRUE(equal_sections(tables[0], tables[2]));
}

// B50: the bits of the master, not of a rounded weight.
TEST(CheckpointWriter, KeepsTheBitsOfTheMaster) {
  const TemporaryFolder folder;
  const std::vector<float> values(64, 1 + 0x1p-20F);
  CheckpointContents contents;
  contents.sections = {{"", {{"w", {64}, {StateKind::kMaster}, "default", "mxfp8 row"}}, {}}};
  contents.slices = {{"", "w", StateKind::kMaster, 0, values}};
  const SavedCheckpoint saved = write_checkpoint(test::make_job(folder.path(), 1), contents);
  EXPECT_EQ(saved.payload_bytes, 256);
  EXPECT_EQ(saved.folder, folder / "step-00000001");
  EXPECT_TRUE(saved.warnings.empty());
  CheckpointReader reader(folder.path());
  std::vector<float> back(64);
  reader.read("", "w", StateKind::kMaster, 0, back);
  for (const float value : back) EXPECT_EQ(std::bit_cast<std::uint32_t>(value), 0x3F800008U);
}

// B48, B49: by name and section, whatever the order.
TEST(CheckpointWriter, SectionsOfSeveralOptimizersAreKeptApart) {
  const TemporaryFolder folder;
  test::CheckpointModel first = small_model(1);
  first.section = "dense";
  test::CheckpointModel second = small_model(2);
  second.section = "experts-0";
  std::swap(second.params[0], second.params[1]);
  const CheckpointJob job = test::make_job(folder.path(), 1);
  std::vector<std::vector<float>> memory;
  const CheckpointContents other = second.part(0, 1, memory);
  // Writer 2 alone knows the second section, and gives no table of the first.
  const auto errors =
      test::save_with(first, job, 3, [&](int writer, CheckpointJob&, CheckpointContents& contents) {
        if (writer == 2) {
          contents.sections = other.sections;
          contents.slices.insert(contents.slices.end(), other.slices.begin(), other.slices.end());
        }
        return static_cast<FileHook*>(nullptr);
      });
  for (const std::string& error : errors) EXPECT_EQ(error, "");
  CheckpointReader reader(folder.path());
  test::expect_equal(first, reader, 2);
  test::expect_equal(second, reader, 2);
}

TEST(CheckpointWriter, ReplacesTheSameStep) {
  const TemporaryFolder folder;
  test::save(small_model(1), folder.path(), 5, 2);
  test::save(small_model(2), folder.path(), 5, 3);
  expect_only(folder.path(), 5, small_model(2));
  const std::vector<std::string> names = names_of(folder.path());
  ASSERT_EQ(names.size(), 3U);
  EXPECT_EQ(names_of(folder / "step-00000005"),
            (std::vector<std::string>{"manifest.json", "rank-00000-of-00003.safetensors",
                                      "rank-00001-of-00003.safetensors", "rank-00002-of-00003.safetensors"}));
}

TEST(CheckpointWriter, RefusesAJobThatIsNotAllowedBeforeAnythingIsChanged) {
  const TemporaryFolder folder;
  const auto problem = [&](const std::function<void(CheckpointJob&)>& change) {
    CheckpointJob job = test::make_job(folder / "new", 1);
    change(job);
    return thrown_message<ContractError>([&] { write_checkpoint(job, CheckpointContents()); });
  };
  EXPECT_TRUE(contains(problem([](CheckpointJob& job) { job.dir.clear(); }), "dir is empty"));
  EXPECT_TRUE(contains(problem([](CheckpointJob& job) { job.step = -1; }), "step -1; allowed is 0 or more"));
  EXPECT_TRUE(
      contains(problem([](CheckpointJob& job) { job.writers = 0; }), "0 writers; allowed are 1 to 99999"));
  EXPECT_TRUE(
      contains(problem([](CheckpointJob& job) { job.writer = 1; }), "writer 1 of 1; allowed are 0 to 0"));
  EXPECT_TRUE(contains(problem([](CheckpointJob& job) { job.keep_last = -1; }),
                       "keep_last -1; allowed is 0 or more"));
  EXPECT_TRUE(contains(problem([](CheckpointJob& job) { job.attempt = "a/b"; }),
                       "attempt 'a/b'; allowed are 1 to 64"));
  EXPECT_TRUE(
      contains(problem([](CheckpointJob& job) { job.attempt = ""; }), "attempt ''; allowed are 1 to 64"));
  EXPECT_TRUE(contains(problem([](CheckpointJob& job) { job.timeout_s = 0; }), "timeout of 0 s"));
  EXPECT_FALSE(std::filesystem::exists(folder / "new"));
}

/// Fails the actions of one writer from a given one on, or only that one.
class FailFrom : public FileHook {
 public:
  FailFrom(int first, int last, int code) : first_(first), last_(last), code_(code) {}
  int before(FileAction, const std::filesystem::path&) override {
    const int now = ++actions_;
    return now >= first_ && now <= last_ ? code_ : 0;
  }
  std::size_t write_limit() override { return 4096; }
  int actions() const { return actions_; }

 private:
  int first_;
  int last_;
  int code_;
  std::atomic<int> actions_ = 0;
};

constexpr int kNever = 1 << 30;

/// Runs saves of 3 writers in which an action of one writer fails, the actions from `first` on in turn, and
/// expects the same outcome everywhere.
void fail_actions(int failing_writer, int first, int stride, bool only_one) {
  FailFrom counter(kNever, kNever, 0);
  {
    const TemporaryFolder folder;
    test::save_with(small_model(1), test::make_job(folder.path(), 1), 3,
                    [&](int writer, CheckpointJob&, CheckpointContents&) {
                      return writer == failing_writer ? &counter : nullptr;
                    });
  }
  EXPECT_GT(counter.actions(), 8);
  for (int action = first; action <= counter.actions(); action += stride) {
    const TemporaryFolder folder;
    test::save(small_model(1), folder.path(), 1, 1);
    FailFrom hook(action, only_one ? action : kNever, ENOSPC);
    const CheckpointJob job = test::make_job(folder.path(), 2);
    const auto errors =
        test::save_with(small_model(2), job, 3, [&](int writer, CheckpointJob& own, CheckpointContents&) {
          // A writer that can write nothing can not even tell the others.
          own.timeout_s = only_one ? 30 : 0.3;
          return writer == failing_writer ? &hook : nullptr;
        });
    const bool is_saved = std::filesystem::exists(folder / "step-00000002");
    const bool all_failed =
        std::none_of(errors.begin(), errors.end(), [](const auto& e) { return e.empty(); });
    const bool none_failed =
        std::all_of(errors.begin(), errors.end(), [](const auto& e) { return e.empty(); });
    EXPECT_TRUE(all_failed || none_failed)
        << "action " << action << ": " << errors[0] << "|" << errors[1] << "|" << errors[2];
    EXPECT_TRUE(is_saved || all_failed) << action;
    if (only_one && !is_saved) {
      for (const std::string& error : errors) {
        EXPECT_TRUE(contains(error, "No space left on device")) << action;
        EXPECT_TRUE(contains(error, "writer " + std::to_string(failing_writer) + ": ")) << action;
      }
    }
    // What was there is there; what is new is there as a whole or not at all.
    CheckpointReader reader(folder.path());
    test::expect_equal(small_model(reader.step() == 2 ? 2 : 1), reader);
    CheckpointReader old(folder / "step-00000001");
    test::expect_equal(small_model(1), old);
    if (is_saved) {
      CheckpointReader saved(folder / "step-00000002");
      test::expect_equal(small_model(2), saved);
    }
    // The next save works.
    test::save(small_model(3), folder.path(), 2, 1);
    CheckpointReader next(folder.path());
    test::expect_equal(small_model(3), next);
    for (const std::string& name : names_of(folder.path())) EXPECT_FALSE(name.starts_with(".tmp")) << name;
  }
}

TEST(CheckpointWriter, AnyActionOfAnotherWriterThatFailsFailsAll) {
  fail_actions(2, 1, 1, true);
}

TEST(CheckpointWriter, AnyActionOfWriter0ThatFailsFailsAll) {
  fail_actions(0, 1, 2, true);
}

TEST(CheckpointWriter, AnyOtherActionOfWriter0ThatFailsFailsAll) {
  fail_actions(0, 2, 2, true);
}

TEST(CheckpointWriter, AWriterThatCanWriteNothingFailsAll) {
  fail_actions(1, 1, 4, false);
}

TEST(CheckpointWriter, AMissingParentIsAnErrorOnAll) {
  const TemporaryFolder folder;
  const auto errors =
      test::save_with(small_model(), test::make_job(folder / "absent/runs", 1), 2, kUnchanged);
  for (const std::string& error : errors) {
    EXPECT_TRUE(contains(error, "absent/runs: can not make the folder: No such file or directory"));
  }
  EXPECT_FALSE(std::filesystem::exists(folder / "absent"));
}

TEST(CheckpointWriter, AFileSystemThatTakesNoWritesIsAnErrorOnAllAtOnce) {
  const TemporaryFolder folder;
  test::save(small_model(), folder.path(), 1, 1);
  FailFrom hook(1, kNever, EROFS);
  const auto errors = test::save_with(small_model(), test::make_job(folder.path(), 2), 3,
                                      [&](int, CheckpointJob&, CheckpointContents&) { return &hook; });
  for (const std::string& error : errors) EXPECT_TRUE(contains(error, "Read-only file system"));
  expect_only(folder.path(), 1, small_model());
}

TEST(CheckpointWriter, AReadOnlyFolderIsAnErrorOnAll) {
  if (geteuid() == 0) GTEST_SKIP() << "root may write everywhere";
  const TemporaryFolder folder;
  test::save(small_model(), folder.path(), 1, 1);
  std::filesystem::permissions(folder.path(),
                               std::filesystem::perms::owner_read | std::filesystem::perms::owner_exec);
  const auto errors = test::save_with(small_model(), test::make_job(folder.path(), 2), 2, kUnchanged);
  std::filesystem::permissions(folder.path(), std::filesystem::perms::owner_all);
  for (const std::string& error : errors) EXPECT_TRUE(contains(error, "Permission denied"));
  expect_only(folder.path(), 1, small_model());
}

TEST(CheckpointWriter, AWriterThatDoesNotComeIsNamedByAll) {
  const TemporaryFolder folder;
  test::save(small_model(1), folder.path(), 1, 2);
  const CheckpointJob job = test::make_job(folder.path(), 2);
  const auto errors =
      test::save_with(small_model(2), job, 3, [](int writer, CheckpointJob& own, CheckpointContents&) {
        own.timeout_s = 0.5;
        if (writer == 1) throw std::runtime_error("dead");
        return static_cast<FileHook*>(nullptr);
      });
  EXPECT_EQ(errors[1], "dead");
  for (const int writer : {0, 2}) {
    EXPECT_TRUE(contains(
        errors[static_cast<std::size_t>(writer)],
        "of 3 writers, these have not come within 0.45 s: 1; they are late or dead, or the folder is "
        "not on a file system that all ranks share"));
  }
  expect_only(folder.path(), 1, small_model(1));
  // It comes after all: the same error, at once.
  std::vector<std::vector<float>> memory;
  CheckpointJob late = job;
  late.writer = 1;
  late.writers = 3;
  const CheckpointContents contents = small_model(2).part(1, 3, memory);
  EXPECT_EQ(thrown_message<CheckpointError>([&] { write_checkpoint(late, contents); }), errors[0]);
}

TEST(CheckpointWriter, WithoutWriter0TheOthersGiveUpAndItCanNotPublishAnyMore) {
  const TemporaryFolder folder;
  test::save(small_model(1), folder.path(), 1, 2);
  const CheckpointJob job = test::make_job(folder.path(), 2);
  const auto errors =
      test::save_with(small_model(2), job, 2, [](int writer, CheckpointJob& own, CheckpointContents&) {
        own.timeout_s = writer == 0 ? 60 : 0.2;
        if (writer == 0) std::this_thread::sleep_for(std::chrono::milliseconds(600));
        return static_cast<FileHook*>(nullptr);
      });
  EXPECT_TRUE(contains(errors[1], "writer 1 waited 0.2 s for writer 0, which is late or dead"));
  EXPECT_EQ(errors[0], errors[1]);
  expect_only(folder.path(), 1, small_model(1));
}

TEST(CheckpointWriter, AnAttemptIsUsedOnce) {
  const TemporaryFolder folder;
  const CheckpointJob job = test::make_job(folder.path(), 1, 0, 1, "same");
  for (const std::string expected : {"", "attempt 'same' was used before; it must be new for every save"}) {
    EXPECT_TRUE(contains(test::save_with(small_model(1), job, 1, kUnchanged)[0], expected));
  }
  expect_only(folder.path(), 1, small_model(1));
}

TEST(CheckpointWriter, WritersThatDisagreeAreRefused) {
  struct Case {
    std::function<void(CheckpointJob&, CheckpointContents&)> change;  // of writer 1
    std::string problem;
  };
  const std::vector<Case> cases = {
      {[](CheckpointJob&, CheckpointContents& c) { c.user["data"] = "position 8"; },
       "key `data` of the user's map: the value of writer 1 is not that of the writers before it"},
      {[](CheckpointJob&, CheckpointContents& c) { c.sections[0].scalars.calls = 0; },
       "section ``: the params or scalars of writer 1 are not those of the writers before it"},
      {[](CheckpointJob&, CheckpointContents& c) { c.slices[0].begin += 1000; },
       "writer 1: slice of param `b`, master: has"},
      {[](CheckpointJob&, CheckpointContents& c) { c.user["x"] = "\xFF"; },
       "writer 1: user's value `x` is not valid UTF-8"},
      {[](CheckpointJob&, CheckpointContents& c) { c.slices.pop_back(); }, "found slices of the first "}};
  for (const Case& each : cases) {
    const TemporaryFolder folder;
    const auto errors = test::save_with(small_model(), test::make_job(folder.path(), 1), 2,
                                        [&](int writer, CheckpointJob& job, CheckpointContents& contents) {
                                          if (writer == 1) each.change(job, contents);
                                          return static_cast<FileHook*>(nullptr);
                                        });
    EXPECT_EQ(errors[0], errors[1]);
    EXPECT_TRUE(contains(errors[0], each.problem));
    EXPECT_TRUE(list_checkpoints(folder.path()).empty());
  }
}

}  // namespace
}  // namespace mxopt
