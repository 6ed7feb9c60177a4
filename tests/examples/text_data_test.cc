#include "train_gpt/text_data.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <string>

#include <gtest/gtest.h>
#include <unistd.h>

#include "mxopt/params/check.h"

namespace train_gpt {
namespace {

class TextDataFiles : public testing::Test {
 protected:
  TextDataFiles() { std::filesystem::create_directories(folder_); }
  ~TextDataFiles() override { std::filesystem::remove_all(folder_); }

  void write(const std::string& name, const std::string& text) {
    std::ofstream(folder_ + "/" + name) << text;
  }

  std::string folder_ = testing::TempDir() + "text_data_test." + std::to_string(getpid());
};

TEST_F(TextDataFiles, EachFileCountsOnceInTheOrderOfItsRealPath) {
  write("b", "3456789");
  write("a", "012");
  std::filesystem::create_symlink("b", folder_ + "/0_link");
  std::filesystem::create_directory(folder_ + "/c");
  const TextData data({folder_ + "/*", folder_ + "/a"}, 9, "test");
  EXPECT_EQ(data.files(), 2);
  EXPECT_EQ(data.bytes(), 10);
  // Ten bytes hold one sequence of 9 + 1.
  const auto sequence = data.micro_batch(1, 1, 0, 1);
  EXPECT_EQ(std::string(sequence.begin(), sequence.end()), "0123456789");
}

TEST_F(TextDataFiles, BatchesDependOnSeedStepAndPlaceOnly) {
  std::string text;
  for (int i = 0; i < 5000; ++i) text += static_cast<char>('a' + i * i % 26);
  write("a", text);
  const TextData data({folder_ + "/a"}, 15, "test");
  const auto two = data.micro_batch(1, 3, 0, 2);
  const auto first = data.micro_batch(1, 3, 0, 1);
  const auto second = data.micro_batch(1, 3, 1, 1);
  // Two micro-batches of one sequence are one of two.
  EXPECT_TRUE(std::equal(first.begin(), first.end(), two.begin()));
  EXPECT_TRUE(std::equal(second.begin(), second.end(), two.begin() + 16));
  EXPECT_EQ(first, data.micro_batch(1, 3, 0, 1));
  EXPECT_NE(first, data.micro_batch(2, 3, 0, 1));
  EXPECT_NE(first, data.micro_batch(1, 4, 0, 1));
}

TEST_F(TextDataFiles, RefusesPatternsWithoutAMatchAndTooLittleText) {
  write("a", "01234");
  const auto message = [](const auto& action) -> std::string {
    try {
      action();
    } catch (const mxopt::ConfigError& error) {
      return error.what();
    }
    return "nothing thrown";
  };
  EXPECT_EQ(message([&] {
              TextData({folder_ + "/a", folder_ + "/z*"}, 4, "run.yaml:7:3");
            }),
            "run.yaml:7:3: `data.files`: no file matches \"" + folder_ +
                "/z*\"; allowed: patterns that each match a file");
  EXPECT_NE(message([&] { TextData({folder_ + "/a"}, 5, "test"); }).find("have 5 bytes"), std::string::npos);
}

}  // namespace
}  // namespace train_gpt
