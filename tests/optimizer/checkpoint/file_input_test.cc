#include "mxopt/optimizer/checkpoint/file_input.h"

#include <array>

#include <gtest/gtest.h>
#include <sys/stat.h>

#include "checkpoint_model.h"
#include "support/temporary_folder.h"
#include "support/thrown_message.h"

#include "mxopt/params/check.h"

namespace mxopt {
namespace {

using test::contains;
using test::TemporaryFolder;
using test::thrown_message;

TEST(FileInput, ReadsRanges) {
  const TemporaryFolder folder;
  test::set_file_content(folder / "a", "0123456789");
  const FileInput file(folder / "a");
  EXPECT_EQ(file.bytes(), 10);
  std::array<char, 4> part{};
  file.read(6, std::as_writable_bytes(std::span(part)));
  EXPECT_EQ(std::string(part.data(), part.size()), "6789");
  EXPECT_TRUE(
      contains(thrown_message<DataError>([&] { file.read(7, std::as_writable_bytes(std::span(part))); }),
               "a: ends at byte 10, expected 1 more bytes"));
}

TEST(FileInput, RefusesWhatIsNoRegularFile) {
  const TemporaryFolder folder;
  EXPECT_TRUE(contains(thrown_message<DataError>([&] { FileInput(folder / "a"); }),
                       "a: can not be opened: No such file"));
  EXPECT_TRUE(contains(thrown_message<DataError>([&] { FileInput(folder.path()); }), "is no regular file"));
  ASSERT_EQ(mkfifo((folder / "pipe").c_str(), 0600), 0);
  EXPECT_TRUE(contains(thrown_message<DataError>([&] { FileInput(folder / "pipe"); }), "is no regular file"));
}

TEST(FileInput, TextFilesHaveALimit) {
  const TemporaryFolder folder;
  test::set_file_content(folder / "a", "0123456789");
  EXPECT_EQ(read_text_file(folder / "a", 10), "0123456789");
  EXPECT_TRUE(contains(thrown_message<DataError>([&] { read_text_file(folder / "a", 9); }),
                       "a: has 10 bytes, allowed are at most 9"));
}

}  // namespace
}  // namespace mxopt
