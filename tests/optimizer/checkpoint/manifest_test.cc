#include "mxopt/optimizer/checkpoint/manifest.h"

#include <bit>
#include <cmath>
#include <functional>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "checkpoint_model.h"
#include "support/temporary_folder.h"
#include "support/thrown_message.h"

#include "mxopt/optimizer/checkpoint/crc32c.h"
#include "mxopt/params/check.h"

namespace mxopt {
namespace {

using test::contains;
using test::TemporaryFolder;
using test::thrown_message;

const std::string kFile = "rank-00000-of-00001.safetensors";

Manifest sample() {
  test::CheckpointModel model;
  model.params = {{"w", {4, 8}}, {"none", {0}}};
  Manifest manifest;
  manifest.library_version = "0.1.0";
  manifest.step = 12;
  manifest.attempt = "a1";
  manifest.writers = 1;
  manifest.sections = {model.table()};
  for (const StateKind kind : test::kAllKinds) {
    for (const std::int64_t begin : {0, 20}) {
      const std::int64_t elems = begin == 0 ? 20 : 12;
      const std::string tensor = "/w/" + std::string(state_kind_name(kind)) + "/" + std::to_string(begin);
      manifest.slices.push_back({"", "w", kind, begin, elems, kFile, tensor});
    }
  }
  manifest.files = {{kFile, 1000, {0x01ABCDEFU}}};
  manifest.config = "a: \"1\"\n";
  manifest.user = {{"random", "1 2 3"}, {"data \xC3\xA9", ""}};
  return manifest;
}

/// `text` with its checksum made right.
std::string sealed(const std::string& text) {
  const std::size_t digits = text.size() - 3 - 8;
  std::string made = text;
  const std::uint32_t crc = crc32c(std::as_bytes(std::span(text).first(digits)));
  for (std::size_t i = 0; i < 8; ++i) made[digits + i] = "0123456789abcdef"[(crc >> (28 - 4 * i)) & 15U];
  return made;
}

std::string replaced(std::string text, const std::string& what, const std::string& by) {
  const std::size_t at = text.find(what);
  EXPECT_NE(at, std::string::npos) << what;
  return at == std::string::npos ? text : text.replace(at, what.size(), by);
}

TEST(Manifest, ReadsBackWithTheSameText) {
  const std::string text = manifest_text(sample());
  const Manifest manifest = parse_manifest(text, "m");
  check_manifest(manifest, "m");
  EXPECT_EQ(manifest_text(manifest), text);
  EXPECT_EQ(manifest.step, 12);
  EXPECT_EQ(manifest.config, "a: \"1\"\n");
  EXPECT_EQ(manifest.user, sample().user);
  EXPECT_EQ(manifest.files[0].crcs[0], 0x01ABCDEFU);
  EXPECT_EQ(sealed(text), text);
}

TEST(Manifest, ScalarsReadBackWithTheSameBits) {
  Manifest manifest = sample();
  ScalarState& state = manifest.sections[0].scalars;
  const double quiet = std::bit_cast<double>(std::uint64_t{0x7FF8000000001234U});
  state.groups = {{"a", 0.1, 1.0 / 3, 5e-324, -0.0, std::numeric_limits<double>::max(), 1 - 0x1p-53, 1e-8},
                  {"b", quiet, std::numeric_limits<double>::infinity(), 0, 1, -1, 3e-4, 2.5}};
  state.steps = (std::int64_t{1} << 53) + 1;  // no double has this value
  state.skipped_total = INT64_MAX;
  state.loss_scale = 0x1p127;
  const Manifest back = parse_manifest(manifest_text(manifest), "m");
  const ScalarState& read = back.sections[0].scalars;
  EXPECT_EQ(read.steps, state.steps);
  EXPECT_EQ(read.calls, state.calls);
  EXPECT_EQ(read.consecutive_skips, state.consecutive_skips);
  EXPECT_EQ(read.skipped_total, INT64_MAX);
  EXPECT_EQ(read.loss_scale, 0x1p127);
  EXPECT_EQ(read.hysteresis_left, state.hysteresis_left);
  EXPECT_EQ(read.clean_steps, state.clean_steps);
  ASSERT_EQ(read.groups.size(), 2U);
  const auto numbers = [](const GroupScalars& g) {
    return std::vector<double>{g.lr, g.min_lr, g.weight_decay, g.end_weight_decay, g.beta1, g.beta2, g.eps};
  };
  for (std::size_t i = 0; i < 2; ++i) {
    EXPECT_EQ(read.groups[i].name, state.groups[i].name);
    for (std::size_t n = 0; n < 7; ++n) {
      EXPECT_EQ(std::bit_cast<std::uint64_t>(numbers(read.groups[i])[n]),
                std::bit_cast<std::uint64_t>(numbers(state.groups[i])[n]));
    }
  }
  EXPECT_TRUE(equal_sections(back.sections[0], manifest.sections[0]));
  manifest.sections[0].scalars.groups[0].lr = std::nextafter(0.1, 1);
  EXPECT_FALSE(equal_sections(back.sections[0], manifest.sections[0]));
}

TEST(Manifest, EveryFlippedBitAndEveryCutIsRefused) {
  const std::string text = manifest_text(sample());
  for (std::size_t bit = 0; bit < text.size() * 8; ++bit) {
    std::string damaged = text;
    damaged[bit / 8] = static_cast<char>(damaged[bit / 8] ^ (1 << (bit % 8)));
    EXPECT_TRUE(contains(thrown_message<DataError>([&] { parse_manifest(damaged, "m.json"); }), "m.json: "))
        << bit;
  }
  for (std::size_t bytes = 0; bytes < text.size(); ++bytes) {
    EXPECT_THROW(parse_manifest(std::string_view(text).substr(0, bytes), "m"), DataError) << bytes;
  }
  EXPECT_THROW(parse_manifest(text + "\n", "m"), DataError);
}

TEST(Manifest, WrongKeysAndTypesAreRefusedByName) {
  const std::string text = manifest_text(sample());
  struct Case {
    std::string what, by, problem;
  };
  const std::vector<Case> cases = {
      {"\"format\": 1", "\"format\": 2", "m: key `format`: expected an integer from 1 to 1, found 2"},
      {"\"step\": 12", "\"stop\": 12", "found the unknown key `stop`"},
      {"\"step\": 12,", "", "m: key `step` is missing"},
      {"\"step\": 12,", "\"step\": 12, \"step\": 12,", "m: key `step` is repeated"},
      {"\"step\": 12", "\"step\": -1",
       "m: key `step`: expected an integer from 0 to 9223372036854775807, found -1"},
      {"\"step\": 12", "\"step\": \"12\"", "found the text '12'"},
      {"\"writers\": 1", "\"writers\": 0", "m: key `writers`: expected an integer from 1 to 99999, found 0"},
      {"\"piece_bytes\": 67108864", "\"piece_bytes\": 1", "m: key `piece_bytes`"},
      {"\"kind\": \"master\"", "\"kind\": \"slave\"",
       "m: key `slices[0].kind`: expected one of master, exp_avg, exp_avg_sq, found the text 'slave'"},
      {"\"file\": \"" + kFile, "\"file\": \"../x",
       "m: key `slices[0].file`: expected a file name without a folder"},
      {"\"file\": \"" + kFile, "\"file\": \"a/x",
       "m: key `slices[0].file`: expected a file name without a folder"},
      {"\"file\": \"" + kFile, "\"file\": \"",
       "m: key `slices[0].file`: expected a file name without a folder"},
      {"\"begin\": 0", "\"begin\": 0.5", "m: key `slices[0].begin`: expected an integer"},
      {"01abcdef", "01ABCDEF", "m: key `files[0].crc32c[0]`: expected 8 hexadecimal digits"},
      {"\"bytes\": 1000", "\"bytes\": 67108865", "expected 2 checksums for 67108865 bytes, found 1"},
      {"\"lr\": 0.1", "\"lr\": \"0x1\"",
       "expected a number, or 0x and 16 hexadecimal digits, found the text '0x1'"},
      {"\"lr\": 0.1", "\"lr\": null",
       "m: key `sections[0].scalars.groups[0].lr`: expected a number, found null"},
      {"\"random\": \"1 2 3\"", "\"random\": 1", "m: key `user.random`: expected a text, found 1"}};
  for (const Case& each : cases) {
    const std::string damaged = sealed(replaced(text, each.what, each.by));
    EXPECT_TRUE(contains(thrown_message<DataError>([&] { parse_manifest(damaged, "m"); }), each.problem));
  }
}

TEST(Manifest, ChecksThatSlicesCoverEveryStateOnce) {
  struct Case {
    std::function<void(Manifest&)> change;
    std::string problem;
  };
  const std::vector<Case> cases = {
      {[](Manifest& m) { m.slices.erase(m.slices.begin() + 1); },
       "m: param `w`, master: expected 32 elements, found slices of the first 20"},
      {[](Manifest& m) { m.slices.erase(m.slices.begin()); },
       "m: param `w`, master: expected element 0 next, after the begin (hole), found a slice of `" + kFile +
           "` that begins with 20"},
      {[](Manifest& m) { m.slices[1].begin = 19; },
       "expected element 20 next, after a slice of `" + kFile + "` (overlap)"},
      {[](Manifest& m) { m.slices[1].elems = 13; },
       "m: param `w`, master: expected 32 elements, found a slice"},
      {[](Manifest& m) { m.slices[1].elems = INT64_MAX; },
       "m: param `w`, master: expected 32 elements, found a slice"},
      {[](Manifest& m) { m.slices[0].param = "v"; },
       "slice of param `v`, master in `" + kFile + "`: expected a state"},
      {[](Manifest& m) { m.slices[0].section = "s"; }, "slice of section `s`, param `w`, master"},
      {[](Manifest& m) { m.slices[0].file = "x"; }, "expected a listed file, found `x`"},
      {[](Manifest& m) { m.slices[0].tensor = m.slices[1].tensor; }, "expected a tensor of its own"},
      {[](Manifest& m) { m.files.push_back(m.files[0]); },
       "file `" + kFile + "`: expected one of this name, found two"},
      {[](Manifest& m) { m.files.clear(); }, "file `" + kFile + "`: expected one of this name, found none"},
      {[](Manifest& m) {
         m.files.push_back({"x", 0, {}});
       },
       "key `files`: expected 1, one for each writer, found 2"},
      {[](Manifest& m) { m.sections.push_back(m.sections[0]); },
       "section ``: expected one of this name, found two"},
      {[](Manifest& m) { m.sections[0].name = "a/b"; }, "section `a/b`: expected a name of letters"},
      {[](Manifest& m) { m.sections[0].params.push_back(m.sections[0].params[0]); },
       "param `w`: expected one of this name"},
      {[](Manifest& m) { m.sections[0].params[0].kinds.push_back(StateKind::kMaster); },
       "expected each kind once"},
      {[](Manifest& m) {
         m.sections[0].params[0].shape = {INT64_MAX, 3};
       },
       "has more than 2^63 elements"},
      {[](Manifest& m) { m.sections[0].scalars.groups.push_back(m.sections[0].scalars.groups[0]); },
       "section ``, group `default`: expected one, found two"}};
  for (const Case& each : cases) {
    Manifest manifest = sample();
    each.change(manifest);
    EXPECT_TRUE(contains(thrown_message<DataError>([&] { check_manifest(manifest, "m"); }), each.problem));
  }
}

TEST(Manifest, TextThatIsNotUtf8IsRefused) {
  Manifest manifest = sample();
  manifest.user["state"] = "\xFF\xFE";
  EXPECT_TRUE(contains(thrown_message<ContractError>([&] { manifest_text(manifest); }),
                       "user's value `state` is not valid UTF-8"));
}

TEST(Manifest, NamesOfFoldersAndFiles) {
  EXPECT_EQ(step_folder_name(1000), "step-00001000");
  EXPECT_EQ(step_folder_name(123456789012), "step-123456789012");
  EXPECT_EQ(rank_file_name(3, 16), "rank-00003-of-00016.safetensors");
  for (const std::int64_t step :
       {std::int64_t{0}, std::int64_t{99999999}, std::int64_t{100000000}, INT64_MAX}) {
    EXPECT_EQ(step_of_folder_name(step_folder_name(step)), step);
  }
  for (const std::string name : {"", "step-", "step-1", "step-0000100x", "step-000001000", "Step-00001000",
                                 "step--0000001", "step-99999999999999999999", "step-00001000/"}) {
    EXPECT_EQ(step_of_folder_name(name), -1) << name;
  }
}

TEST(Manifest, SizesOfFilesAreCompared) {
  const TemporaryFolder folder;
  test::set_file_content(folder / kFile, std::string(999, 'x'));
  EXPECT_TRUE(contains(thrown_message<DataError>([&] { check_file_sizes(sample(), folder.path()); }),
                       kFile + ": size: expected 1000 bytes, found 999"));
  test::set_file_content(folder / kFile, std::string(1000, 'x'));
  check_file_sizes(sample(), folder.path());
}

}  // namespace
}  // namespace mxopt
