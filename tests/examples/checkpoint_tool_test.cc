// The command mxopt-checkpoint, as it is built.

#include <cstdlib>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>
#include <sys/wait.h>

#include "checkpoint_model.h"
#include "support/temporary_folder.h"
#include "support/thrown_message.h"

#include "mxopt/optimizer/checkpoint/safetensors.h"

namespace mxopt {
namespace {

using test::contains;
using test::TemporaryFolder;

struct Result {
  int status = -1;
  std::string out;
  std::string errors;
};

class CheckpointTool : public ::testing::Test {
 protected:
  CheckpointTool() {
    model_.params = {{"w", {40, 8}}, {"bias", {300}}, {"none", {0, 2}}};
    test::save(model_, dir(), 1000, 3);
    model_.seed = 1;
    test::save(model_, dir(), 2000, 2);
  }

  std::filesystem::path dir() const { return folder_ / "checkpoints"; }
  std::string step(int number) const { return dir() / ("step-0000" + std::to_string(number)); }

  Result run(const std::string& arguments) const {
    const std::string out = folder_ / "out";
    const std::string errors = folder_ / "errors";
    const std::string command =
        std::string(MXOPT_CHECKPOINT_TOOL) + " " + arguments + " >" + out + " 2>" + errors;
    const int status = std::system(command.c_str());  // NOLINT: our own file names
    return {WIFEXITED(status) ? WEXITSTATUS(status) : -1, test::file_content(out),
            test::file_content(errors)};
  }

  TemporaryFolder folder_;
  test::CheckpointModel model_;
};

TEST_F(CheckpointTool, Lists) {
  std::filesystem::remove(step(1000) + "/manifest.json");
  const Result result = run("list " + dir().string());
  EXPECT_EQ(result.status, 0);
  EXPECT_TRUE(contains(result.out, "step-00001000  broken: "));
  EXPECT_TRUE(contains(result.out, "step-00002000  complete, "));
  EXPECT_TRUE(contains(result.out, " bytes  <- latest\n"));
}

TEST_F(CheckpointTool, Verifies) {
  Result result = run("verify " + dir().string());
  EXPECT_EQ(result.status, 0);
  EXPECT_TRUE(contains(result.out, "step-00002000: step 2000, 2 files, "));
  const std::filesystem::path file = step(2000) + "/rank-00001-of-00002.safetensors";
  std::string content = test::file_content(file);
  content.back() = static_cast<char>(content.back() ^ 1);
  test::set_file_content(file, content);
  result = run("verify " + dir().string());
  EXPECT_EQ(result.status, 2);
  EXPECT_EQ(result.out, "");
  EXPECT_TRUE(contains(result.errors, "mxopt-checkpoint: "));
  EXPECT_TRUE(contains(result.errors, "rank-00001-of-00002.safetensors: checksum of the bytes from 0"));
  EXPECT_EQ(run("verify " + step(1000)).status, 0);
}

TEST_F(CheckpointTool, Shows) {
  // Known values, so that the figures can be known.
  const std::vector<float> values = {3.0F, -4.0F, 0.0F};
  CheckpointContents contents;
  contents.sections = {{"", {{"p", {3}, {StateKind::kMaster}, "default", "bf16"}}, {}}};
  contents.slices = {{"", "p", StateKind::kMaster, 0, std::span(values).first(2)},
                     {"", "p", StateKind::kMaster, 2, std::span(values).subspan(2)}};
  write_checkpoint(test::make_job(folder_ / "known", 7), contents);
  Result result = run("show " + (folder_ / "known").string());
  EXPECT_EQ(result.status, 0);
  EXPECT_TRUE(contains(result.out, "step 7, 1 writers, mxopt "));
  EXPECT_TRUE(contains(result.out,
                       "p  [3]  bf16  group default\n  master  min -4  max 3  norm 5  not finite 0\n"
                       "    [0, 2)  rank-00000-of-00001.safetensors\n"
                       "    [2, 3)  rank-00000-of-00001.safetensors\n"));
  result = run("show " + step(1000) + " --param bias");
  EXPECT_EQ(result.status, 0);
  EXPECT_TRUE(contains(result.out, "bias  [300]  fp32  group default\n  master  min "));
  EXPECT_EQ(result.out.find("w  [40, 8]"), std::string::npos);
  result = run("show " + step(1000) + " --param absent");
  EXPECT_EQ(result.status, 2);
  EXPECT_TRUE(contains(result.errors, "expected param `absent`, found none of that name"));
}

TEST_F(CheckpointTool, TellsDifferences) {
  test::CheckpointModel again = model_;
  test::save(again, folder_ / "same", 2000, 5);
  Result result = run("diff " + step(2000) + " " + (folder_ / "same").string());
  EXPECT_EQ(result.status, 0);
  EXPECT_EQ(result.out, "");
  result = run("diff " + step(1000) + " " + step(2000));
  EXPECT_EQ(result.status, 1);
  EXPECT_TRUE(contains(result.out, "step: 1000 and 2000\n"));
  EXPECT_TRUE(contains(result.out, "section ``: the scalar state is different\n"));
  EXPECT_TRUE(
      contains(result.out, "bias: exp_avg_sq: first different element 0, 300 in all, largest difference "));
  again.params = {{"w", {8, 40}}, {"new", {3}}, {"none", {0, 2}}};
  test::save(again, folder_ / "other", 2000, 1);
  result = run("diff " + step(2000) + " " + (folder_ / "other").string());
  EXPECT_EQ(result.status, 1);
  EXPECT_EQ(result.out,
            "bias: is only in the first\nnew: is only in the second\nw: shape [40, 8] and [8, 40]\n");
  EXPECT_EQ(run("diff " + step(2000) + " " + (folder_ / "absent").string()).status, 2);
}

TEST_F(CheckpointTool, MergesTheMasters) {
  const std::filesystem::path out = folder_ / "all.safetensors";
  const Result result = run("merge " + dir().string() + " " + out.string());
  EXPECT_EQ(result.status, 0) << result.errors;
  const SafetensorsFile file(out);
  ASSERT_EQ(file.header().tensors.size(), 3U);
  for (const auto& [name, shape] : model_.params) {
    EXPECT_EQ(file.find(name).shape, shape);
    std::vector<float> values(static_cast<std::size_t>(file.find(name).elems));
    file.read(name, 0, values);
    for (std::size_t i = 0; i < values.size(); ++i) {
      const float expected = test::state_value(name, StateKind::kMaster, static_cast<std::int64_t>(i), 1);
      ASSERT_EQ(std::bit_cast<std::uint32_t>(values[i]), std::bit_cast<std::uint32_t>(expected))
          << name << " " << i;
    }
  }
  EXPECT_EQ(run("merge " + dir().string() + " " + (folder_ / "absent/x").string()).status, 2);
}

TEST_F(CheckpointTool, RefusesAnotherUse) {
  EXPECT_EQ(run("").status, 2);
  EXPECT_EQ(run("lists x").status, 2);
  EXPECT_EQ(run("list").status, 2);
  EXPECT_EQ(run("list " + (folder_ / "absent").string()).status, 2);
  EXPECT_EQ(run("--help").status, 0);
}

}  // namespace
}  // namespace mxopt
