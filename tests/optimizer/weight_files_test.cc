#include "mxopt/optimizer/weight_files.h"

#include <fstream>

#include <gtest/gtest.h>

#include "support/optimizer_fixture.h"
#include "support/temporary_folder.h"
#include "support/thrown_message.h"

#include "mxopt/params/bf16.h"
#include "mxopt/params/check.h"

namespace mxopt {
namespace {

using test::contains;
using test::spec;
using test::TemporaryFolder;
using test::thrown_message;
using Names = std::vector<std::string>;

struct Tensor {
  std::string name, dtype;
  std::vector<std::int64_t> shape;
  std::vector<float> values;  // none: zeroes of the type
};

std::filesystem::path write_file(const std::filesystem::path& path, const std::vector<Tensor>& tensors) {
  SafetensorsHeader header;
  for (const Tensor& tensor : tensors) header.tensors.push_back({tensor.name, tensor.dtype, tensor.shape});
  const std::string head = make_safetensors_header(header);
  std::ofstream out(path, std::ios::binary);
  out.write(head.data(), static_cast<std::streamsize>(head.size()));
  for (const SafetensorsEntry& entry : header.tensors) {
    const auto at = std::ranges::find(tensors, entry.name, &Tensor::name);
    std::vector<char> bytes(static_cast<std::size_t>(entry.end_bytes - entry.begin_bytes), 0);
    for (std::size_t i = 0; i < at->values.size(); ++i) {
      if (entry.dtype == "F32") {
        std::memcpy(&bytes[4 * i], &at->values[i], 4);
      } else {
        const Bf16 value = fp32_to_bf16(at->values[i]);
        std::memcpy(&bytes[2 * i], &value, 2);
      }
    }
    out.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  }
  return path;
}

std::vector<float> counted(std::int64_t elems) {
  std::vector<float> values;
  for (std::int64_t i = 0; i < elems; ++i) values.push_back(static_cast<float>(i % 200) * 0.25f);
  return values;
}

TEST(WeightFiles, AreTheInitialValuesOfAllParams) {
  const TemporaryFolder folder;
  const std::vector<std::filesystem::path> files = {
      write_file(folder / "a", {{"w", "BF16", {64, 96}, counted(64 * 96)}, {"step", "I64", {}, {}}}),
      write_file(folder / "b", {{"b", "F32", {333}, counted(333)}, {"none", "F32", {0, 5}, {}}})};
  std::vector<ParamSpec> specs = {spec("w", {64, 96}), spec("b", {333}, ParamFormat::kFp32),
                                  spec("none", {0, 5}), spec("tied", {64, 96})};
  specs[3].tied_to = "w";
  for (const int ranks : {1, 3, 4}) {
    test::run_ranks(ranks, [&](Communicator& comm) {
      DistributedAdam opt(specs, Config(), comm);
      EXPECT_EQ(opt.import_weights(files), Names{"step"});
      opt.publish();
      const auto side = comm.split(0, comm.rank());
      for (const char* name : {"w", "b"}) {
        const OwnedSlice slice = opt.owned(name);
        const std::int64_t elems = opt.layout().param(opt.layout().find(name)).elems();
        EXPECT_TRUE(test::bits_equal(counted(elems),
                                     test::whole_state(*side, elems, slice.param_begin, slice.master)));
      }
    });
  }
}

TEST(WeightFiles, ThatDoNotFitAreRefusedOnEveryRankWithAllReasons) {
  const TemporaryFolder folder;
  const std::vector<std::filesystem::path> files = {write_file(
      folder / "a", {{"w", "F32", {96, 64}, {}}, {"half", "F16", {8}, {}}, {"bias.", "F32", {5}, {}}})};
  const std::vector<ParamSpec> specs = {spec("w", {64, 96}), spec("half", {8}), spec("bias", {5})};
  test::run_ranks(2, [&](Communicator& comm) {
    DistributedAdam opt(specs, Config(), comm);
    const std::string message = thrown_message<DataError>([&] { opt.import_weights(files); });
    EXPECT_TRUE(contains(message, "tensor 'w' has shape 96x64, the param 64x96"));
    EXPECT_TRUE(contains(message, "tensor 'half' is F16; allowed are F32 and BF16"));
    EXPECT_TRUE(contains(message, "param 'bias' has no tensor of its name; there is 'bias.'"));
    EXPECT_TRUE(contains(thrown_message<ContractError>([&] { opt.publish(); }), "no initial value"));
  });
}

TEST(WeightFiles, MayNotHaveATensorTwice) {
  const TemporaryFolder folder;
  const std::vector<std::filesystem::path> files = {write_file(folder / "a", {{"w", "F32", {8}, {}}}),
                                                    write_file(folder / "b", {{"w", "F32", {8}, {}}})};
  EXPECT_TRUE(contains(thrown_message<DataError>([&] { WeightFiles{files}; }), "tensor 'w' is in"));
}

TEST(WeightFiles, ThatOneRankCanNotReadAreAnErrorOnAllRanks) {
  const TemporaryFolder folder;
  const std::filesystem::path file = write_file(folder / "a", {{"w", "F32", {8}, {}}});
  const std::vector<ParamSpec> specs = {spec("w", {8})};
  test::run_ranks(3, [&](Communicator& comm) {
    DistributedAdam opt(specs, Config(), comm);
    const std::vector<std::filesystem::path> files = {comm.rank() == 1 ? folder / "absent" : file};
    try {
      opt.import_weights(files);
      ADD_FAILURE() << "nothing was thrown";
    } catch (const std::exception& error) {
      EXPECT_TRUE(contains(error.what(), "absent"));
    }
  });
}

}  // namespace
}  // namespace mxopt
