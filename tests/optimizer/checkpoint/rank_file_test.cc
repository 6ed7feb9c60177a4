#include "mxopt/optimizer/checkpoint/rank_file.h"

#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "checkpoint_model.h"
#include "support/temporary_folder.h"
#include "support/thrown_message.h"

#include "mxopt/optimizer/checkpoint/crc32c.h"
#include "mxopt/optimizer/checkpoint/safetensors.h"
#include "mxopt/params/check.h"

namespace mxopt {
namespace {

using test::contains;
using test::TemporaryFolder;
using test::thrown_message;

Manifest job_part() {
  Manifest part;
  part.step = 3;
  part.attempt = "a";
  part.writers = 1;
  return part;
}

const std::string kName = "rank-00000-of-00001.safetensors";

TEST(RankFile, HoldsTheSlicesAndItsChecksum) {
  const TemporaryFolder folder;
  test::CheckpointModel model;
  model.params = {{"w", {4, 100}}, {"b", {7}}};
  std::vector<std::vector<float>> memory;
  const CheckpointContents contents = model.part(0, 1, memory);
  const Manifest part = write_rank_file(folder.path(), job_part(), 0, contents, nullptr);
  ASSERT_EQ(part.files.size(), 1U);
  const std::string content = test::file_content(folder / kName);
  EXPECT_EQ(part.files[0].bytes, static_cast<std::int64_t>(content.size()));
  EXPECT_EQ(part.files[0].crcs, std::vector{crc32c(std::as_bytes(std::span(content)))});
  EXPECT_EQ(part.slices.size(), 6U);
  const SafetensorsFile file(folder / kName);
  check_rank_file(file, part, folder / kName);
  check_checksums(part.files[0], folder.path());
  // The data begin on a multiple of 64 bytes, and nothing but the elements follows.
  EXPECT_EQ(file.header().data_begin_bytes % 64, 0);
  EXPECT_EQ(part.files[0].bytes - file.header().data_begin_bytes, 407 * 12);
}

TEST(RankFile, ChecksumsAreOfPieces) {
  const TemporaryFolder folder;
  const std::vector<float> values((kChecksumPieceBytes + 12) / 4, 1.0F);
  CheckpointContents contents;
  contents.slices = {{"", "w", StateKind::kMaster, 0, values}};
  const Manifest part = write_rank_file(folder.path(), job_part(), 0, contents, nullptr);
  ASSERT_EQ(part.files[0].crcs.size(), 2U);
  check_checksums(part.files[0], folder.path());
  ManifestFile wrong = part.files[0];
  wrong.crcs[1] ^= 1U;
  EXPECT_TRUE(contains(thrown_message<DataError>([&] { check_checksums(wrong, folder.path()); }),
                       kName + ": checksum of the bytes from 67108864 to " + std::to_string(wrong.bytes)));
}

TEST(RankFile, RefusesSlicesThatDoNotFitBeforeItWrites) {
  test::CheckpointModel model;
  model.params = {{"w", {10}}};
  const std::vector<float> values(11);
  const auto problem = [&](std::vector<CheckpointSlice> slices) {
    const TemporaryFolder folder;
    CheckpointContents contents;
    contents.sections = {model.table()};
    contents.slices = std::move(slices);
    std::string text = thrown_message<ContractError>(
        [&] { write_rank_file(folder.path(), job_part(), 0, contents, nullptr); });
    EXPECT_FALSE(std::filesystem::exists(folder / kName));
    return text;
  };
  const auto slice = [&](const std::string& param, std::int64_t begin, std::size_t elems) {
    return CheckpointSlice{"", param, StateKind::kMaster, begin, std::span(values).first(elems)};
  };
  EXPECT_TRUE(contains(problem({slice("w", 0, 11)}),
                       "slice of param `w`, master: has elements from 0 on, 11 of them; the param has 10"));
  EXPECT_TRUE(contains(problem({slice("w", 11, 0)}), "has elements from 11 on"));
  EXPECT_TRUE(contains(problem({slice("w", -1, 1)}), "begins with element -1"));
  EXPECT_TRUE(
      contains(problem({slice("v", 0, 1)}), "slice of param `v`, master: section `` has no such param"));
  EXPECT_TRUE(contains(problem({slice("w", 0, 5), slice("w", 0, 5)}), "tensor `/w/master/0` is repeated"));
}

TEST(RankFile, IsComparedWithTheManifest) {
  const TemporaryFolder folder;
  test::CheckpointModel model;
  model.params = {{"w", {10}}};
  std::vector<std::vector<float>> memory;
  const Manifest part = write_rank_file(folder.path(), job_part(), 0, model.part(0, 1, memory), nullptr);
  const SafetensorsFile file(folder / kName);
  const auto problem = [&](const Manifest& manifest) {
    return thrown_message<DataError>([&] { check_rank_file(file, manifest, folder / kName); });
  };
  Manifest other = part;
  other.attempt = "b";
  EXPECT_TRUE(
      contains(problem(other),
               kName + ": metadata `attempt`, which says what save the file is of: expected `b`, found `a`"));
  other = part;
  other.slices[0].elems = 9;
  EXPECT_TRUE(
      contains(problem(other), "tensor `/w/master/0`: expected F32 with 9 elements, found F32 with 10"));
  other = part;
  other.slices[0].tensor = "x";
  EXPECT_TRUE(contains(problem(other), kName + ": expected tensor `x`, found none of that name"));
  other = part;
  other.slices.pop_back();
  EXPECT_TRUE(contains(problem(other), "expected a listed tensor, found another"));
}

}  // namespace
}  // namespace mxopt
