#include "mxopt/optimizer/checkpoint/safetensors.h"

#include <array>
#include <bit>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "checkpoint_model.h"
#include "support/temporary_folder.h"
#include "support/thrown_message.h"

#include "mxopt/optimizer/checkpoint/file_input.h"
#include "mxopt/params/check.h"

namespace mxopt {
namespace {

using test::contains;
using test::TemporaryFolder;
using test::thrown_message;

std::string with_length(const std::string& json, std::uint64_t length) {
  const auto bytes = std::bit_cast<std::array<char, 8>>(length);
  return std::string(bytes.data(), bytes.size()) + json;
}

std::string file_text(const std::string& json, std::size_t data_bytes) {
  return with_length(json, json.size()) + std::string(data_bytes, 'x');
}

std::string problem_of(const std::string& content) {
  const TemporaryFolder folder;
  test::set_file_content(folder / "f.safetensors", content);
  const std::string text = thrown_message<DataError>([&] { SafetensorsFile(folder / "f.safetensors"); });
  EXPECT_TRUE(contains(text, "/f.safetensors: "));
  const std::size_t name = text.find("/f.safetensors: ");
  return name == std::string::npos ? text : text.substr(name + 16);
}

TEST(Safetensors, ReadsNamesShapesAndRanges) {
  const TemporaryFolder folder;
  const std::string json =
      R"({"b":{"dtype":"U8","shape":[4],"data_offsets":[8,12]},"__metadata__":{"k":"v"},)"
      R"("a":{"dtype":"F32","shape":[2,1],"data_offsets":[0,8]},"none":{"dtype":"BF16","shape":[0,7],"data_offsets":[8,8]},)"
      R"("one":{"dtype":"F16","shape":[],"data_offsets":[12,14]}}  )";
  const std::array<float, 2> values = {1.5F, -2.0F};
  std::string data(8, '\0');
  std::memcpy(data.data(), values.data(), 8);
  test::set_file_content(folder / "f", with_length(json, json.size()) + data + "0123" + "hh");
  const SafetensorsFile file(folder / "f");
  ASSERT_EQ(file.header().tensors.size(), 4U);
  EXPECT_EQ(file.header().tensors[0].name, "a");
  EXPECT_EQ(file.header().metadata.at("k"), "v");
  EXPECT_EQ(file.find("one").elems, 1);
  EXPECT_EQ(file.find("none").elems, 0);
  float second = 0;
  file.read("a", 1, std::span(&second, 1));
  EXPECT_EQ(second, -2.0F);
  std::array<std::byte, 2> bytes{};
  file.read("b", 2, 2, bytes);
  EXPECT_EQ(std::to_integer<char>(bytes[0]), '2');
  EXPECT_TRUE(contains(thrown_message<DataError>([&] { file.read("a", 2, std::span(&second, 1)); }),
                       "f: tensor `a`: expected elements from 2 on, 1 of them, found 2 in all"));
  EXPECT_TRUE(contains(thrown_message<DataError>([&] { file.read("b", 0, std::span(&second, 1)); }),
                       "f: tensor `b`: expected dtype F32, found U8"));
  EXPECT_TRUE(contains(thrown_message<DataError>([&] { file.read("c", 0, std::span(&second, 1)); }),
                       "f: expected tensor `c`, found none of that name"));
}

TEST(Safetensors, RangesOfPackedTypesBeginAndEndWithBytes) {
  const TemporaryFolder folder;
  test::set_file_content(folder / "f",
                         file_text(R"({"a":{"dtype":"F4","shape":[6],"data_offsets":[0,3]}})", 3));
  const SafetensorsFile file(folder / "f");
  std::array<std::byte, 2> bytes{};
  file.read("a", 2, 4, bytes);
  EXPECT_TRUE(
      contains(thrown_message<ContractError>([&] { file.read("a", 1, 4, bytes); }), "are no whole bytes"));
}

TEST(Safetensors, RefusesBrokenLengths) {
  EXPECT_EQ(problem_of(""), "expected at least 8 bytes, found 0");
  EXPECT_EQ(problem_of("1234567"), "expected at least 8 bytes, found 7");
  EXPECT_EQ(problem_of(with_length("{}", 3)), "expected a header of at most 2 bytes, found 3");
  EXPECT_EQ(problem_of(with_length("{}", ~std::uint64_t{0})),
            "expected a header of at most 2 bytes, found 18446744073709551615");
  EXPECT_EQ(problem_of(with_length("", 0)), "the header does not begin with '{'");
  EXPECT_EQ(problem_of(file_text(" {}", 0)), "the header does not begin with '{'");
  EXPECT_EQ(problem_of(file_text("{}", 1)), "ends with the header: expected 10 + 0 bytes, found 11");
}

TEST(Safetensors, RefusesMoreThanTheLargestHeaderBeforeReadingIt) {
  const TemporaryFolder folder;
  test::set_file_content(folder / "f", with_length("{", 100'000'001));
  std::filesystem::resize_file(folder / "f", 200'000'000);  // a hole, no bytes on the disk
  EXPECT_TRUE(contains(thrown_message<DataError>([&] { SafetensorsFile(folder / "f"); }),
                       "expected a header of at most 100000000 bytes, found 100000001"));
}

TEST(Safetensors, RefusesWhatIsNoStrictHeader) {
  const auto entry = [](const std::string& dtype, const std::string& shape, const std::string& offsets) {
    return R"({"t":{"dtype":")" + dtype + R"(","shape":)" + shape + R"(,"data_offsets":)" + offsets + "}}";
  };
  struct Case {
    std::string json;
    std::string problem;
  };
  const std::string offsets_type = "expected an integer from 0 to 9223372036854775807, found ";
  const std::vector<Case> cases = {
      {entry("F32", "[1]", "[0,-4]"), "key `t.data_offsets[1]`: " + offsets_type + "-4"},
      {entry("F32", "[1]", "[0,4.0]"), "key `t.data_offsets[1]`: " + offsets_type + "4.0"},
      {entry("F32", "[1]", "[0,18446744073709551615]"),
       "key `t.data_offsets[1]`: " + offsets_type + "18446744073709551615"},
      {entry("F32", "[-1]", "[0,4]"), "key `t.shape[0]`: " + offsets_type + "-1"},
      {entry("F32", "[1]", "[0]"), "key `t.data_offsets`: expected 2 offsets, found 1"},
      {entry("F32", "[1]", "[4,0]"),
       "key `t.data_offsets`: expected an end of at least the begin 4, found 0"},
      {entry("F32", "[2]", "[0,4]"), "key `t.data_offsets`: expected 8 bytes for F32 [2], found 4"},
      {entry("F32", "[4294967296,4294967296]", "[0,4]"),
       "key `t.shape`: expected a shape with a 64-bit number of bits that fills whole bytes, found "
       "[4294967296,4294967296]"},
      {entry("F32", "[4611686018427387904]", "[0,0]"),
       "key `t.shape`: expected a shape with a 64-bit number of bits that fills whole bytes, found "
       "[4611686018427387904]"},
      {entry("F4", "[3]", "[0,2]"),
       "key `t.shape`: expected a shape with a 64-bit number of bits that fills whole bytes, found [3]"},
      {entry("F33", "[1]", "[0,4]"), "key `t.dtype`: expected a dtype of the format, found the text 'F33'"},
      {R"({"t":{"dtype":"F32","shape":[1]}})", "key `t.data_offsets` is missing"},
      {R"({"t":{"dtype":"F32","shape":[1],"data_offsets":[0,4],"x":1}})",
       "key `t.x`: expected one of the keys dtype, shape, data_offsets, found the unknown key `x`"},
      {R"({"__metadata__":{"a":1}})", "key `__metadata__.a`: expected a text, found 1"},
      {R"({"t":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"t":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}})",
       "key `t` is repeated"},
      {R"({"t":3})", "key `t`: expected a map, found 3"}};
  for (const Case& each : cases) EXPECT_EQ(problem_of(file_text(each.json, 4)), each.problem) << each.json;
}

TEST(Safetensors, RefusesHolesOverlapsTrailingAndMissingBytes) {
  const auto two = [](const std::string& first, const std::string& second) {
    return R"({"a":{"dtype":"U8","shape":[4],"data_offsets":)" + first +
           R"(},"b":{"dtype":"U8","shape":[4],"data_offsets":)" + second + "}}";
  };
  const std::string where = "where the tensor before it ends, found ";
  EXPECT_EQ(problem_of(file_text(two("[0,4]", "[5,9]"), 9)), "tensor `b`: expected begin 4, " + where + "5");
  EXPECT_EQ(problem_of(file_text(two("[0,4]", "[3,7]"), 7)), "tensor `b`: expected begin 4, " + where + "3");
  EXPECT_EQ(problem_of(file_text(two("[0,4]", "[0,4]"), 4)), "tensor `b`: expected begin 4, " + where + "0");
  EXPECT_EQ(problem_of(file_text(two("[1,5]", "[5,9]"), 9)), "tensor `a`: expected begin 0, " + where + "1");
  const std::string good = two("[0,4]", "[4,8]");
  const std::string end =
      "ends with tensor `b`: expected " + std::to_string(8 + good.size()) + " + 8 bytes, found ";
  EXPECT_EQ(problem_of(file_text(good, 7)), end + std::to_string(8 + good.size() + 7));
  EXPECT_EQ(problem_of(file_text(good, 9)), end + std::to_string(8 + good.size() + 9));
}

TEST(Safetensors, EveryCutHeaderIsRefused) {
  const std::string whole = file_text(R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}})", 4);
  const TemporaryFolder folder;
  for (std::size_t bytes = 0; bytes < whole.size(); ++bytes) {
    test::set_file_content(folder / "f", whole.substr(0, bytes));
    EXPECT_THROW(SafetensorsFile(folder / "f"), DataError) << bytes;
  }
}

SafetensorsEntry entry_of(const std::string& name, const std::string& dtype,
                          const std::vector<std::int64_t>& shape) {
  SafetensorsEntry entry;
  entry.name = name;
  entry.dtype = dtype;
  entry.shape = shape;
  return entry;
}

TEST(Safetensors, NewHeadersAreAlignedOrderedAndReadBack) {
  const TemporaryFolder folder;
  for (const std::size_t name_bytes : {1U, 20U, 50U, 63U, 64U}) {
    SafetensorsHeader header;
    header.metadata = {{"a \"key\"", "value"}};
    header.tensors = {entry_of("z", "F8_E4M3", {3}), entry_of(std::string(name_bytes, 'y'), "F32", {2, 2}),
                      entry_of("b", "F32", {}), entry_of("w", "BF16", {0, 9})};
    const std::string text = make_safetensors_header(header);
    EXPECT_EQ(text.size() % 64, 0U);
    EXPECT_EQ(static_cast<std::size_t>(header.data_begin_bytes), text.size());
    EXPECT_EQ(header.tensors[0].name, "b");
    EXPECT_EQ(header.tensors[3].name, "z");
    test::set_file_content(folder / "f", text + std::string(4 + 16 + 3, 'x'));
    const SafetensorsFile file(folder / "f");
    EXPECT_EQ(file.header().metadata, header.metadata);
    for (const SafetensorsEntry& entry : header.tensors) {
      EXPECT_EQ(file.find(entry.name).begin_bytes, entry.begin_bytes);
      EXPECT_EQ(file.find(entry.name).shape, entry.shape);
    }
  }
}

TEST(Safetensors, NewHeadersRefuseWhatTheFormatCanNotHold) {
  const auto problem = [](std::vector<SafetensorsEntry> tensors) {
    return thrown_message<ContractError>([&] {
      SafetensorsHeader header;
      header.tensors = std::move(tensors);
      make_safetensors_header(header);
    });
  };
  EXPECT_TRUE(contains(problem({entry_of("a", "F31", {1})}), "tensor `a`: unknown dtype 'F31'"));
  EXPECT_TRUE(
      contains(problem({entry_of("a", "F32", {1}), entry_of("a", "F32", {1})}), "tensor `a` is repeated"));
  EXPECT_TRUE(contains(problem({entry_of("__metadata__", "F32", {1})}), "is reserved"));
  EXPECT_TRUE(contains(problem({entry_of("a", "F32", {-1})}), "tensor `a`: the shape [-1] is not possible"));
  EXPECT_TRUE(contains(problem({entry_of("a", "F32", {INT64_MAX, 2})}), "is not possible"));
  EXPECT_TRUE(contains(problem({entry_of("\xFF", "F32", {1})}), "is not valid UTF-8"));
}

// Oracle: the format's own Python package, where it is installed.
TEST(Safetensors, ThePythonPackageReadsARankFile) {
  if (std::system("python3 -c 'import safetensors.numpy' 2>/dev/null") != 0) {  // NOLINT: a fixed command
    GTEST_SKIP() << "the Python package safetensors is not installed";
  }
  const TemporaryFolder folder;
  test::CheckpointModel model;
  model.params = {{"layer.weight", {3, 50}}, {"bias", {7}}, {"none", {0, 4}}};
  test::save(model, folder.path(), 5, 2);
  for (const std::string rank : {"0", "1"}) {
    const std::string path = folder / ("step-00000005/rank-0000" + rank + "-of-00002.safetensors");
    const std::string dump = folder / ("dump" + rank);
    const std::string program =
        "import safetensors.numpy as s; t = s.load_file(\"" + path + "\"); f = open(\"" + dump +
        "\", \"wb\"); [f.write(t[n].tobytes()) for n in sorted(t)]; assert all(str(t[n].dtype)"
        " == \"float32\" for n in t)";
    ASSERT_EQ(std::system(("python3 -c '" + program + "'").c_str()), 0);  // NOLINT: our own file names
    const std::string content = test::file_content(path);
    const std::string data = test::file_content(dump);
    EXPECT_EQ(data, content.substr(content.size() - data.size()));
    EXPECT_GT(data.size(), 0U);
  }
}

}  // namespace
}  // namespace mxopt
