#include "mxopt/optimizer/plan.h"

#include <functional>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "support/optimizer_fixture.h"
#include "support/thrown_message.h"

namespace mxopt {
namespace {

using test::contains;
using test::run_ranks;
using test::spec;
using test::thrown_message;

struct Input {
  std::vector<ParamSpec> specs = {spec("a", {32, 32}), spec("b", {5})};
  Config config;
};

/// What each of three ranks gets to read when `change` was applied to one rank's input.
template <class Error>
std::vector<std::string> messages(int changed_rank, const std::function<void(Input&)>& change) {
  std::vector<std::string> texts(3);
  run_ranks(3, [&](Communicator& comm) {
    Input input;
    if (comm.rank() == changed_rank) change(input);
    texts[static_cast<std::size_t>(comm.rank())] =
        thrown_message<Error>([&] { make_agreed_plan(input.specs, input.config, comm, Device()); });
  });
  return texts;
}

void expect_on_all_ranks(const std::vector<std::string>& texts, const std::string& part) {
  for (const std::string& text : texts) EXPECT_TRUE(contains(text, part));
}

TEST(Plan, IsMadeFromListConfigurationAndWorldSize) {
  run_ranks(3, [](Communicator& comm) {
    Input input;
    input.config.optimizer.bucket_elems = 128;
    input.config.precision.storage = StorageChoice::kRow;
    input.config.optimizer.groups = {{"b", "biases", 1, 0}};
    input.config.parallel.world_size = 3;
    const Plan plan = make_agreed_plan(input.specs, input.config, comm, Device());
    EXPECT_EQ(plan.layout.world_size(), 3);
    EXPECT_EQ(plan.layout.buckets().size(), 2u);
    EXPECT_EQ(plan.layout.param(0).family.storage, Storage::kRow);
    EXPECT_EQ(plan.layout.param(1).family.format, ParamFormat::kBf16);
    EXPECT_EQ(plan.groups.group_of, std::vector<int>({0, 1}));
  });
}

TEST(Plan, AutomaticStorageFollowsTheBackwardOverride) {
  SelfCommunicator comm;
  Input input;
  EXPECT_EQ(make_agreed_plan(input.specs, input.config, comm, Device()).layout.param(0).family.storage,
            Storage::kBoth);
  input.config.precision.backward_override = BackwardOverride::kDequantized;
  EXPECT_EQ(make_agreed_plan(input.specs, input.config, comm, Device()).layout.param(0).family.storage,
            Storage::kRow);
}

TEST(Plan, AShapeThatDiffersIsNamedOnAllRanks) {
  const auto texts = messages<ContractError>(1, [](Input& input) { input.specs[0].shape = {33, 32}; });
  expect_on_all_ranks(texts, "params: rank 1 has 'a 33x32 bf16' where rank 0 has 'a 32x32 mxfp8 both'");
}

TEST(Plan, AnotherOrderOfEqualSizesIsNamedOnAllRanks) {
  std::vector<std::string> texts(3);
  run_ranks(3, [&](Communicator& comm) {
    std::vector<ParamSpec> specs;
    for (int i = 0; i < 8; ++i) {
      specs.push_back(spec("p" + std::to_string((i * (comm.rank() == 2 ? 3 : 1)) % 8), {32, 32}));
    }
    texts[static_cast<std::size_t>(comm.rank())] =
        thrown_message<ContractError>([&] { make_agreed_plan(specs, Config(), comm, Device()); });
  });
  expect_on_all_ranks(texts,
                      "params: rank 2 has 'p3 32x32 mxfp8 both' where rank 0 has 'p1 32x32 mxfp8 both'");
}

TEST(Plan, EveryConfigurationFieldIsCompared) {
  const std::vector<std::pair<std::string, std::function<void(Config&)>>> changes = {
      {"lr", [](Config& c) { c.optimizer.lr = 1e-3; }},
      {"betas", [](Config& c) { c.optimizer.betas[1] = 0.999; }},
      {"eps", [](Config& c) { c.optimizer.eps = 1e-7; }},
      {"weight_decay", [](Config& c) { c.optimizer.weight_decay = 0; }},
      {"decay_1d", [](Config& c) { c.optimizer.decay_1d = true; }},
      {"clip_grad", [](Config& c) { c.optimizer.clip_grad = 2; }},
      {"kind", [](Config& c) { c.optimizer.kind = AdamKind::kAdam; }},
      {"grad_dtype", [](Config& c) { c.optimizer.grad_dtype = DType::kBf16; }},
      {"max_consecutive_skips", [](Config& c) { c.optimizer.max_consecutive_skips = 3; }},
      {"growth_interval", [](Config& c) { c.optimizer.loss_scale.growth_interval = 3; }},
      {"scale_layout", [](Config& c) { c.precision.scale_layout = ScaleLayout::kGemm; }},
      {"warmup_steps", [](Config& c) { c.schedule.warmup_steps = 3; }},
      {"gather_format", [](Config& c) { c.parallel.gather_format = GatherFormat::kBf16; }},
      {"wsd_decay_shape", [](Config& c) { c.schedule.wsd_decay_shape = DecayShape::kLinear; }},
      {"weight_decay_kind",
       [](Config& c) {
         c.schedule.weight_decay_kind = WeightDecayKind::kCosine;
         c.schedule.decay_steps = 9;
         c.schedule.end_weight_decay = 1;
       }},
      {"lr_mult", [](Config& c) {
         c.optimizer.groups = {{"a", "", 2, 1}};
       }}};
  for (const auto& [key, change] : changes) {
    SCOPED_TRACE(key);
    const auto texts = messages<ContractError>(2, [&](Input& input) { change(input.config); });
    expect_on_all_ranks(texts, "configuration: rank 2 has ");
    if (key != "lr_mult" && key != "weight_decay_kind") expect_on_all_ranks(texts, key);
  }
}

TEST(Plan, AnotherBucketLimitOfRankZeroIsNamedOnAllRanks) {
  const auto texts =
      messages<ContractError>(0, [](Input& input) { input.config.optimizer.bucket_elems = 4096; });
  expect_on_all_ranks(texts, "bucket_elems: rank 1 has '0' where rank 0 has '4096'");
  expect_on_all_ranks(texts, "bucket_elems: rank 2 has '0' where rank 0 has '4096'");
}

TEST(Plan, ABadListOfOneRankIsAnErrorOnAllRanks) {
  const auto texts = messages<ContractError>(1, [](Input& input) { input.specs[1].name = "a"; });
  expect_on_all_ranks(texts, "problems: rank 1 has 'param 'a' is registered twice");
}

TEST(Plan, ABadConfigurationOfAllRanksIsAConfigError) {
  std::vector<std::string> texts(3);
  run_ranks(3, [&](Communicator& comm) {
    Input input;
    input.config.optimizer.eps = -1;
    texts[static_cast<std::size_t>(comm.rank())] =
        thrown_message<ConfigError>([&] { make_agreed_plan(input.specs, input.config, comm, Device()); });
  });
  expect_on_all_ranks(texts, "`optimizer.eps` is -1");
}

TEST(Plan, AWorldOfAnotherSizeIsRefusedWithBothNumbers) {
  run_ranks(2, [](Communicator& comm) {
    Input input;
    input.config.parallel.world_size = 4;
    EXPECT_EQ(
        thrown_message<ConfigError>([&] { make_agreed_plan(input.specs, input.config, comm, Device()); }),
        "parallel.world_size is 4, but the communicator has 2 ranks");
  });
}

TEST(Plan, ACommunicatorOfAnotherMemoryIsRefused) {
  SelfCommunicator comm;
  Input input;
  EXPECT_EQ(thrown_message<ConfigError>([&] {
              make_agreed_plan(input.specs, input.config, comm, Device{DeviceKind::kCuda, 0});
            }),
            "the communicator (self, rank 0 of 1) does not move bytes of the optimizer's device");
}

TEST(Plan, AnotherDeviceThanTheConfiguredOneIsRefused) {
  SelfCommunicator comm;
  Input input;
  input.config.parallel.device = DeviceChoice::kCuda;
  EXPECT_EQ(thrown_message<ConfigError>([&] { make_agreed_plan(input.specs, input.config, comm, Device()); }),
            "parallel.device is cuda, but the optimizer was made on the host");
  input.config.parallel.device = DeviceChoice::kHost;
  EXPECT_EQ(thrown_message<ConfigError>([&] {
              make_agreed_plan(input.specs, input.config, comm, Device{DeviceKind::kCuda, 0});
            }),
            "parallel.device is host, but the optimizer was made on a CUDA device");
}

TEST(Plan, TransportSelfIsForOneRank) {
  std::vector<std::string> texts(2);
  run_ranks(2, [&](Communicator& comm) {
    Input input;
    input.config.parallel.transport = Transport::kSelf;
    texts[static_cast<std::size_t>(comm.rank())] =
        thrown_message<ConfigError>([&] { make_agreed_plan(input.specs, input.config, comm, Device()); });
  });
  for (const std::string& text : texts) {
    EXPECT_EQ(text, "parallel.transport is self, but the communicator has 2 ranks");
  }
}

}  // namespace
}  // namespace mxopt
