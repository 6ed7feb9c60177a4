#include "mxopt/optimizer/checkpoint/checkpoint_folder.h"

#include <cerrno>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "checkpoint_model.h"
#include "support/temporary_folder.h"
#include "support/thrown_message.h"

#include "mxopt/params/check.h"

namespace mxopt {
namespace {

using test::contains;
using test::file_content;
using test::names_of;
using test::TemporaryFolder;
using test::thrown_message;

test::CheckpointModel small_model(int seed = 0) {
  test::CheckpointModel model;
  model.params = {{"w", {4, 8}}};
  model.seed = seed;
  return model;
}

TEST(CheckpointFolder, ListsCompleteAndBrokenOnes) {
  const TemporaryFolder folder;
  for (const std::int64_t step : {30, 10, 20}) test::save(small_model(), folder.path(), step, 2);
  std::filesystem::remove(folder / "step-00000010/rank-00001-of-00002.safetensors");
  std::filesystem::copy(folder / "step-00000020", folder / "step-00000040");
  std::filesystem::create_directory(folder / "step-00000050");
  std::filesystem::create_directory(folder / "another");
  const std::vector<CheckpointListing> listings = list_checkpoints(folder.path());
  ASSERT_EQ(listings.size(), 5U);
  EXPECT_FALSE(listings[0].complete);
  EXPECT_TRUE(contains(listings[0].problem, "rank-00001-of-00002.safetensors: can not be opened"));
  EXPECT_TRUE(listings[1].complete);
  EXPECT_TRUE(listings[1].is_latest);
  EXPECT_EQ(listings[1].step, 20);
  EXPECT_EQ(listings[1].folder, folder / "step-00000020");
  EXPECT_GT(listings[1].bytes, 32 * 12);
  EXPECT_TRUE(listings[2].complete);
  EXPECT_FALSE(listings[2].is_latest);
  EXPECT_TRUE(contains(listings[3].problem, "key `step`: expected 40 as the folder's name says, found 20"));
  EXPECT_TRUE(contains(listings[4].problem, "step-00000050/manifest.json: can not be opened"));
  EXPECT_TRUE(contains(thrown_message<DataError>([&] { list_checkpoints(folder / "absent"); }),
                       "absent: can not be listed: No such file"));
}

TEST(CheckpointFolder, LatestMustNameACheckpoint) {
  const TemporaryFolder folder;
  test::save(small_model(), folder.path(), 10, 1);
  EXPECT_EQ(latest_checkpoint(folder.path()), folder / "step-00000010");
  EXPECT_EQ(file_content(folder / "latest"), "step-00000010\n");
  const auto problem = [&](const std::string& text) {
    test::set_file_content(folder / "latest", text);
    return thrown_message<DataError>([&] { latest_checkpoint(folder.path()); });
  };
  EXPECT_TRUE(contains(problem(""), "latest: expected a name like step-00001000 and a line end"));
  EXPECT_TRUE(contains(problem("step-00000010"), "latest: expected a name like"));
  EXPECT_TRUE(contains(problem("../step-00000010\n"), "latest: expected a name like"));
  EXPECT_TRUE(contains(problem(std::string(65, 'x')), "latest: has 65 bytes, allowed are at most 64"));
  EXPECT_TRUE(contains(problem("step-00000011\n"),
                       "latest: names step-00000011: expected a folder with a manifest.json"));
}

TEST(CheckpointFolder, KeepsWhatWasSavedLastAndTheLatest) {
  const TemporaryFolder folder;
  for (const std::int64_t step : {10, 20, 30, 40}) test::save(small_model(), folder.path(), step, 1);
  std::filesystem::remove(folder / "step-00000030/manifest.json");  // broken ones do not count, and stay
  test::save(small_model(), folder.path(), 5, 1, 2);
  const std::vector<std::string> names = names_of(folder.path());
  ASSERT_EQ(names.size(), 5U);
  EXPECT_TRUE(contains(names[0], ".result-step-00000005-"));
  EXPECT_EQ(std::vector(names.begin() + 1, names.end()),
            (std::vector<std::string>{"latest", "step-00000005", "step-00000030", "step-00000040"}));
}

TEST(CheckpointFolder, RemovesWhatOtherSavesLeftAndNothingElse) {
  const TemporaryFolder folder;
  test::save(small_model(), folder.path(), 10, 1);
  for (const std::string name :
       {".tmp-step-00000011-x", ".ready-step-00000011-x", ".failed-step-00000012-x", ".trash-step-00000001-x",
        ".old-step-00000010-x", ".result-step-00000009-x", ".tmp-step-1-x", ".tmp-mine", "step-mine"}) {
    std::filesystem::create_directory(folder / name);
    test::set_file_content(folder / name / "f", "x");
  }
  EXPECT_TRUE(prune_checkpoints(folder.path(), 0, "a", nullptr).empty());
  EXPECT_EQ(names_of(folder.path()),
            (std::vector<std::string>{".tmp-mine", ".tmp-step-1-x", "latest", "step-00000010", "step-mine"}));
}

/// A file system that can not exchange names, and fails the n-th rename (from 1; 0: none).
class NoExchange : public FileHook {
 public:
  explicit NoExchange(int fails) : fails_(fails) {}
  int before(FileAction action, const std::filesystem::path&) override {
    return action == FileAction::kRename && ++renames_ == fails_ ? EIO : 0;
  }
  bool can_exchange() override { return false; }

 private:
  int fails_;
  int renames_ = 0;
};

TEST(CheckpointFolder, ReplacesWithoutExchange) {
  // Renames: the old one away, the new one into its place, and `latest`.
  for (const int fails : {0, 1, 2, 3}) {
    const TemporaryFolder folder;
    test::save(small_model(1), folder.path(), 10, 1);
    test::save(small_model(2), folder / "other", 10, 1);
    std::filesystem::rename(folder / "other/step-00000010", folder / "new");
    NoExchange hook(fails);
    const auto publish = [&] { publish_checkpoint(folder.path(), folder / "new", 10, "x", &hook); };
    if (fails == 0) {
      publish();
    } else {
      EXPECT_TRUE(contains(thrown_message<FileError>(publish), "can not rename: Input/output error"));
    }
    const bool is_new = fails == 0 || fails == 3;
    CheckpointReader reader(folder / "step-00000010");
    test::expect_equal(small_model(is_new ? 2 : 1), reader);
    EXPECT_EQ(std::filesystem::exists(folder / ".old-step-00000010-x"), is_new);
  }
}

TEST(CheckpointFolder, AReplacementThatWasCutShortIsFoundAndUndone) {
  const TemporaryFolder folder;
  test::save(small_model(1), folder.path(), 10, 1);
  std::filesystem::rename(folder / "step-00000010", folder / ".old-step-00000010-x");
  std::vector<CheckpointListing> listings = list_checkpoints(folder.path());
  ASSERT_EQ(listings.size(), 1U);
  EXPECT_TRUE(listings[0].complete);
  {
    CheckpointReader reader(folder.path());
    test::expect_equal(small_model(1), reader);
    EXPECT_EQ(reader.warnings().size(), 2U);
  }
  EXPECT_TRUE(prune_checkpoints(folder.path(), 1, "y", nullptr).empty());
  CheckpointReader reader(folder.path());
  test::expect_equal(small_model(1), reader);
  EXPECT_TRUE(reader.warnings().empty());
}

class NoRemoval : public FileHook {
 public:
  int before(FileAction action, const std::filesystem::path&) override {
    return action == FileAction::kRemove ? EACCES : 0;
  }
};

TEST(CheckpointFolder, WhatCanNotBeRemovedIsAWarning) {
  const TemporaryFolder folder;
  for (const std::int64_t step : {10, 20}) test::save(small_model(), folder.path(), step, 1);
  NoRemoval hook;
  const std::vector<std::string> warnings = prune_checkpoints(folder.path(), 1, "a", &hook);
  ASSERT_EQ(warnings.size(), 2U);
  EXPECT_TRUE(contains(warnings[0], "can not remove: Permission denied"));
  EXPECT_TRUE(contains(warnings[1], ".trash-step-00000010-a: can not remove: Permission denied"));
}

}  // namespace
}  // namespace mxopt
