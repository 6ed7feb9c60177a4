#include "mxopt/optimizer/checkpoint/file_output.h"

#include <cerrno>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "checkpoint_model.h"
#include "support/temporary_folder.h"
#include "support/thrown_message.h"

namespace mxopt {
namespace {

using test::contains;
using test::file_content;
using test::TemporaryFolder;
using test::thrown_message;

class OneFailure : public FileHook {
 public:
  OneFailure(FileAction action, int code) : action_(action), code_(code) {}
  int before(FileAction action, const std::filesystem::path&) override {
    return action == action_ ? code_ : 0;
  }
  std::size_t write_limit() override { return 3; }

 private:
  FileAction action_;
  int code_;
};

std::span<const std::byte> bytes_of(std::string_view text) {
  return std::as_bytes(std::span(text));
}

TEST(FileOutput, WritesInAsManyPartsAsItTakes) {
  const TemporaryFolder folder;
  OneFailure hook(FileAction::kRemove, EIO);
  FileOutput file(folder / "a", &hook);
  file.write(bytes_of("0123456789"));
  file.write(bytes_of("abc"));
  file.close();
  EXPECT_EQ(file_content(folder / "a"), "0123456789abc");
}

TEST(FileOutput, DoesNotTakeAnExistingFile) {
  const TemporaryFolder folder;
  test::set_file_content(folder / "a", "old");
  EXPECT_TRUE(contains(thrown_message<FileError>([&] { FileOutput(folder / "a", nullptr); }),
                       "a: can not create the file: File exists"));
  EXPECT_EQ(file_content(folder / "a"), "old");
}

TEST(FileOutput, EveryActionThatFailsIsAnError) {
  const std::vector<std::pair<FileAction, std::string>> actions = {
      {FileAction::kCreate, "can not create the file"}, {FileAction::kWrite, "can not write to the file"},
      {FileAction::kSync, "can not sync the file"},     {FileAction::kClose, "can not close the file"},
      {FileAction::kRename, "can not rename"},          {FileAction::kSyncFolder, "can not sync the folder"}};
  for (const auto& [action, text] : actions) {
    const TemporaryFolder folder;
    test::set_file_content(folder / "a", "old");
    OneFailure hook(action, ENOSPC);
    const std::string message = thrown_message<FileError>([&] { replace_file(folder / "a", "new", &hook); });
    EXPECT_TRUE(contains(message, folder.path().string()));
    EXPECT_TRUE(contains(message, text + ": No space left on device"));
    EXPECT_EQ(file_content(folder / "a"), action == FileAction::kSyncFolder ? "new" : "old");
    replace_file(folder / "a", "again", nullptr);
    EXPECT_EQ(file_content(folder / "a"), "again");
  }
}

TEST(FileOutput, MakesOneFolderButNotItsParent) {
  const TemporaryFolder folder;
  make_folder(folder / "a", nullptr);
  make_folder(folder / "a", nullptr);
  EXPECT_TRUE(contains(thrown_message<FileError>([&] { make_folder(folder / "b/c", nullptr); }),
                       "b/c: can not make the folder: No such file"));
  test::set_file_content(folder / "f", "");
  EXPECT_TRUE(
      contains(thrown_message<FileError>([&] { make_folder(folder / "f", nullptr); }), "File exists"));
  EXPECT_TRUE(
      contains(thrown_message<FileError>([&] { sync_folder(folder / "f", nullptr); }), "Not a directory"));
}

TEST(FileOutput, ExchangesFolders) {
  const TemporaryFolder folder;
  make_folder(folder / "a", nullptr);
  make_folder(folder / "b", nullptr);
  test::set_file_content(folder / "a/x", "of a");
  if (!exchange_paths(folder / "a", folder / "b", nullptr))
    GTEST_SKIP() << "the file system can not exchange names";
  EXPECT_EQ(file_content(folder / "b/x"), "of a");
  EXPECT_TRUE(
      contains(thrown_message<FileError>([&] { exchange_paths(folder / "a", folder / "c", nullptr); }),
               "can not rename: No such file"));
}

TEST(FileOutput, RemovesFoldersAndWhatIsAbsent) {
  const TemporaryFolder folder;
  make_folder(folder / "a", nullptr);
  test::set_file_content(folder / "a/x", "");
  remove_path(folder / "a", nullptr);
  remove_path(folder / "a", nullptr);
  EXPECT_FALSE(std::filesystem::exists(folder / "a"));
  OneFailure hook(FileAction::kRemove, EACCES);
  EXPECT_TRUE(contains(thrown_message<FileError>([&] { remove_path(folder / "a", &hook); }),
                       "can not remove: Permission denied"));
}

}  // namespace
}  // namespace mxopt
