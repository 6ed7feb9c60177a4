#include "mxopt/optimizer/checkpoint/checkpoint_reader.h"

#include <bit>
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
using test::TemporaryFolder;
using test::thrown_message;

test::CheckpointModel uneven_model() {
  test::CheckpointModel model;
  model.params = {{"big", {1000}}, {"bias", {17}},    {"matrix", {32, 64}},
                  {"one", {1}},    {"none", {0, 64}}, {"scalar", {}}};
  return model;
}

TEST(CheckpointReader, ReadsAnyRangesWhateverTheyWereAtTheSave) {
  for (const int writers : {1, 2, 3, 4, 5, 6, 7}) {
    const TemporaryFolder folder;
    test::save(uneven_model(), folder.path(), 1000, writers);
    for (const int readers : {1, 2, 3, 5, 8, 16}) {
      CheckpointReader reader(folder.path(), readers == 1 ? Verify::kFull : Verify::kOff);
      test::expect_equal(uneven_model(), reader, readers);
    }
  }
}

TEST(CheckpointReader, HandsOutWhatWasSavedBesidesTheState) {
  const TemporaryFolder folder;
  test::save(uneven_model(), folder.path(), 1000, 3);
  CheckpointReader reader(folder / "step-00001000/");
  EXPECT_EQ(reader.folder(), folder / "step-00001000");
  EXPECT_EQ(reader.step(), 1000);
  EXPECT_EQ(reader.manifest().writers, 3);
  EXPECT_EQ(reader.config(), "optimizer:\n  lr: 1e-3\n");
  EXPECT_EQ(reader.user().at("data"), "position 7");
  EXPECT_EQ(reader.user().at("rank2"), "random state");
  EXPECT_EQ(reader.param("", "matrix").shape, (std::vector<std::int64_t>{32, 64}));
  EXPECT_TRUE(equal_sections(reader.section(""), uneven_model().table()));
  CheckpointReader moved(std::move(reader));
  test::expect_equal(uneven_model(), moved);
}

TEST(CheckpointReader, RefusesWhatIsNotThereByName) {
  const TemporaryFolder folder;
  test::save(uneven_model(), folder.path(), 1000, 2);
  CheckpointReader reader(folder.path());
  std::vector<float> values(2);
  const auto problem = [&](const std::string& section, const std::string& param, std::int64_t begin) {
    return thrown_message<DataError>([&] { reader.read(section, param, StateKind::kMaster, begin, values); });
  };
  EXPECT_TRUE(contains(problem("s", "big", 0), "expected section `s`, found ``"));
  EXPECT_TRUE(contains(problem("", "bigg", 0),
                       "expected param `bigg` in section ``, found 6 others, the nearest `big`"));
  EXPECT_TRUE(contains(problem("", "big", 999),
                       "param `big`: expected elements from 999 on, 2 of them, found 1000 in all"));
  EXPECT_TRUE(contains(problem("", "big", -1), "expected elements from -1 on"));
  EXPECT_TRUE(contains(problem("", "big", INT64_MAX), "found 1000 in all"));
}

TEST(CheckpointReader, KindsThatWereNotSavedAreRefused) {
  const TemporaryFolder folder;
  const std::vector<float> values(4, 1.0F);
  CheckpointContents contents;
  contents.sections = {{"", {{"w", {4}, {StateKind::kMaster}, "default", "bf16"}}, {}}};
  contents.slices = {{"", "w", StateKind::kMaster, 0, values}};
  write_checkpoint(test::make_job(folder.path(), 1), contents);
  CheckpointReader reader(folder.path());
  std::vector<float> out(4);
  reader.read("", "w", StateKind::kMaster, 0, out);
  EXPECT_EQ(out, values);
  EXPECT_TRUE(contains(thrown_message<DataError>([&] { reader.read("", "w", StateKind::kExpAvg, 0, out); }),
                       "param `w`: expected exp_avg, found that it was not saved"));
}

TEST(CheckpointReader, WithoutLatestTheNewestCompleteOneIsReadWithAWarning) {
  const TemporaryFolder folder;
  test::CheckpointModel model = uneven_model();
  for (const int step : {1, 2, 3}) {
    model.seed = step;
    test::save(model, folder.path(), step, 2);
  }
  std::filesystem::resize_file(folder / "step-00000003/rank-00001-of-00002.safetensors", 100);
  const auto expect_step_2 = [&](const std::string& warning) {
    CheckpointReader reader(folder.path());
    ASSERT_EQ(reader.warnings().size(), 3U);
    EXPECT_TRUE(contains(reader.warnings()[0], warning));
    EXPECT_TRUE(
        contains(reader.warnings()[1], "step-00000003/rank-00001-of-00002.safetensors: size: expected "));
    EXPECT_TRUE(contains(reader.warnings()[2], "so the newest complete checkpoint is used: "));
    model.seed = 2;
    test::expect_equal(model, reader);
  };
  std::filesystem::remove(folder / "latest");
  expect_step_2("latest: can not be opened");
  test::set_file_content(folder / "latest", std::string(14, '\0'));
  expect_step_2("latest: expected a name like step-00001000");
  test::set_file_content(folder / "latest", "step-00000009\n");
  expect_step_2("latest: names step-00000009: expected a folder");
  // What latest names is not left aside in silence.
  test::set_file_content(folder / "latest", "step-00000003\n");
  EXPECT_TRUE(
      contains(thrown_message<DataError>([&] { CheckpointReader(folder.path()); }), "size: expected "));
}

TEST(CheckpointReader, WithoutAnyCheckpointItSaysSo) {
  const TemporaryFolder folder;
  EXPECT_TRUE(contains(thrown_message<DataError>([&] { CheckpointReader(folder.path()); }),
                       "expected a complete checkpoint, found none"));
  EXPECT_TRUE(contains(thrown_message<DataError>([&] { CheckpointReader(folder / "x"); }),
                       "x: expected a folder with checkpoints, found nothing"));
  std::filesystem::create_directory(folder / "step-00000001");
  EXPECT_TRUE(contains(thrown_message<DataError>([&] { CheckpointReader(folder / "step-00000001"); }),
                       "step-00000001/manifest.json: can not be opened"));
}

// B53: each of these is refused by name, before anything can be read.
class DamagedCheckpoint : public ::testing::Test {
 protected:
  DamagedCheckpoint() {
    model_ = uneven_model();
    test::save(model_, folder_ / "old", 7, 4);
    model_.seed = 1;
    test::save(model_, folder_ / "new", 7, 4);
  }

  std::filesystem::path step() const { return folder_ / "new/step-00000007"; }
  std::filesystem::path rank_file(int rank) const { return step() / rank_file_name(rank, 4); }

  /// What reading the checkpoint says while `path` has `content`; then it has its own again.
  std::string problem_with(const std::filesystem::path& path, const std::string& content,
                           Verify verify) const {
    const std::string before = test::file_content(path);
    test::set_file_content(path, content);
    std::string text = thrown_message<DataError>([&] { CheckpointReader(step(), verify); });
    test::set_file_content(path, before);
    return text;
  }

  TemporaryFolder folder_;
  test::CheckpointModel model_;
};

TEST_F(DamagedCheckpoint, CutAtEveryBorderOfTheFile) {
  for (int rank = 0; rank < 4; ++rank) {
    const std::string content = test::file_content(rank_file(rank));
    std::uint64_t header_bytes = 0;
    std::copy_n(content.data(), 8, reinterpret_cast<char*>(&header_bytes));
    const std::size_t data = 8 + header_bytes;
    for (const std::size_t end : {std::size_t{0}, std::size_t{8}, data, content.size()}) {
      const std::size_t cut = end == 0 ? 0 : end - 1;
      const std::string text = problem_with(rank_file(rank), content.substr(0, cut), Verify::kSize);
      EXPECT_TRUE(contains(text, rank_file_name(rank, 4) + ": size: expected " +
                                     std::to_string(content.size()) + " bytes, found " +
                                     std::to_string(cut)));
    }
    EXPECT_TRUE(contains(problem_with(rank_file(rank), content + "x", Verify::kSize), ": size: expected "));
  }
}

TEST_F(DamagedCheckpoint, OneBitInAnyFile) {
  for (int rank = 0; rank < 4; ++rank) {
    const std::string content = test::file_content(rank_file(rank));
    for (const std::size_t at : {std::size_t{0}, std::size_t{9}, content.size() / 2, content.size() - 1}) {
      std::string damaged = content;
      damaged[at] = static_cast<char>(damaged[at] ^ 1);
      EXPECT_TRUE(contains(problem_with(rank_file(rank), damaged, Verify::kFull),
                           rank_file_name(rank, 4) + ": checksum of the bytes from 0 to "));
    }
  }
  std::string manifest = test::file_content(step() / "manifest.json");
  manifest[manifest.size() / 2] = static_cast<char>(manifest[manifest.size() / 2] ^ 1);
  for (const Verify verify : {Verify::kFull, Verify::kSize, Verify::kOff}) {
    EXPECT_TRUE(contains(problem_with(step() / "manifest.json", manifest, verify),
                         "manifest.json: key `manifest_crc32c`: expected checksum "));
  }
}

TEST_F(DamagedCheckpoint, AFileIsAbsent) {
  for (const Verify verify : {Verify::kFull, Verify::kSize}) {
    std::filesystem::rename(rank_file(2), folder_ / "kept");
    EXPECT_TRUE(contains(thrown_message<DataError>([&] { CheckpointReader(step(), verify); }),
                         "rank-00002-of-00004.safetensors: can not be opened: No such file"));
    std::filesystem::rename(folder_ / "kept", rank_file(2));
  }
}

TEST_F(DamagedCheckpoint, AFileOfAnOlderSave) {
  const std::string old = test::file_content(folder_ / "old/step-00000007" / rank_file_name(1, 4));
  EXPECT_TRUE(contains(problem_with(rank_file(1), old, Verify::kFull), "rank-00001-of-00004.safetensors: "));
  // Without checksums the reading of that file finds it.
  test::set_file_content(rank_file(1), old);
  CheckpointReader reader(step(), Verify::kOff);
  std::vector<float> values(1000);
  EXPECT_TRUE(contains(
      thrown_message<DataError>([&] {
        for (const auto& [name, shape] : model_.params) {
          reader.read("", name, StateKind::kMaster, 0,
                      std::span(values).first(
                          static_cast<std::size_t>(std::min<std::int64_t>(1000, shape_elems(shape, name)))));
        }
      }),
      "rank-00001-of-00004.safetensors: metadata `attempt`, which says what save the file is of"));
}

TEST_F(DamagedCheckpoint, TheSharesOfSeveralReadersCoverAllFiles) {
  std::string content = test::file_content(rank_file(3));
  content.back() = static_cast<char>(content.back() ^ 1);
  test::set_file_content(rank_file(3), content);
  CheckpointReader(step(), Verify::kFull, {0, 2});
  EXPECT_THROW(CheckpointReader(step(), Verify::kFull, {1, 2}), DataError);
  EXPECT_TRUE(contains(thrown_message<ContractError>([&] {
                         CheckpointReader(step(), Verify::kFull, {2, 2});
                       }),
                       "share 2 of 2; allowed are 0 to 1"));
}

}  // namespace
}  // namespace mxopt
