// Runs that are stopped, saved, loaded by other numbers of ranks, and go on. Oracle: the run without a break.
#include "mxopt/optimizer/checkpointer.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "support/device_over_host.h"
#include "support/devices.h"
#include "support/host_view.h"
#include "support/optimizer_fixture.h"
#include "support/temporary_folder.h"
#include "support/thrown_message.h"

#include "mxopt/params/check.h"

namespace mxopt {
namespace {

using test::contains;
using test::Fact;
using test::Facts;
using test::HostView;
using test::Place;
using test::run_ranks;
using test::Scenario;
using test::spec;
using test::TemporaryFolder;
using test::thrown_message;
using FactMap = std::map<std::string, std::uint64_t>;

constexpr Device kHost{};

/// An optimizer of a scenario on one rank, on any device.
struct Rank {
  Rank(Communicator& all, const Scenario& scenario, Device on)
      : comm(all), device(on), side(all.split(0, all.rank())), over(all, on), stream(on) {
    const ParallelGroups groups(on.kind == DeviceKind::kHost ? all : static_cast<Communicator&>(over));
    optimizer.emplace(scenario.specs, scenario.config, groups, device);
  }
  Place place() const { return {device, stream.ref()}; }
  CheckpointConfig checkpoints(const std::filesystem::path& dir) const {
    CheckpointConfig config;
    config.dir = dir.string();
    config.timeout_s = 60;
    return config;
  }

  Communicator& comm;
  Device device;
  std::unique_ptr<Communicator> side;
  test::DeviceOverHost over;
  Stream stream;
  std::optional<DistributedAdam> optimizer;
};

void add_facts(FactMap& map, const Facts& facts) {
  for (const Fact& fact : facts) map[fact.label] = fact.bits;
}

FactMap state_of(Rank& rank) {
  FactMap map;
  add_facts(map, test::state_facts(*rank.optimizer, *rank.side, "", rank.place()));
  return map;
}

/// Steps [begin, end) of the scenario; the state at the end and what every step reported.
void make_steps(Rank& rank, const Scenario& scenario, int begin, int end, FactMap& facts) {
  for (int step = begin; step < end; ++step) {
    test::change_between_steps(*rank.optimizer, step, rank.place());
    test::feed(*rank.optimizer, scenario, step, rank.comm.rank(), rank.comm.size(), rank.place());
    Facts record;
    test::add_record_facts(record, *rank.optimizer->step(rank.place().stream),
                           "step " + std::to_string(step) + ": ");
    add_facts(facts, record);
  }
}

void start(Rank& rank, const Scenario& scenario) {
  test::set_all_initial(*rank.optimizer, scenario.specs, rank.comm.rank(), rank.place().stream);
  rank.optimizer->publish(rank.place().stream);
}

void expect_same(const FactMap& expected, const FactMap& actual) {
  int shown = 0;
  for (const auto& [label, bits] : actual) {
    const auto at = expected.find(label);
    if (at != expected.end() && at->second == bits) continue;
    ADD_FAILURE() << label << (at == expected.end() ? " is not expected" : " differs");
    if (++shown == 5) return;
  }
  for (const auto& [label, bits] : expected) {
    if (!actual.contains(label)) ADD_FAILURE() << label << " is missing";
  }
}

constexpr int kBreak = 12, kEnd = 20;

/// What the run without a break comes to after its last step, with the reports since the break.
FactMap unbroken(const Scenario& scenario) {
  FactMap facts, before;
  run_ranks(1, [&](Communicator& comm) {
    Rank rank(comm, scenario, kHost);
    start(rank, scenario);
    make_steps(rank, scenario, 0, kBreak, before);
    make_steps(rank, scenario, kBreak, kEnd, facts);
    const FactMap state = state_of(rank);
    facts.insert(state.begin(), state.end());
  });
  return facts;
}

void save_at_break(const Scenario& scenario, int ranks, const std::filesystem::path& dir,
                   Device device = kHost, bool async = false) {
  run_ranks(ranks, [&](Communicator& comm) {
    Rank rank(comm, scenario, device);
    start(rank, scenario);
    FactMap facts;
    make_steps(rank, scenario, 0, kBreak, facts);
    CheckpointConfig config = rank.checkpoints(dir);
    config.async = async;
    Checkpointer checkpoints(*rank.optimizer, config);
    RunState run;
    run.user["data." + std::to_string(comm.rank())] = "position " + std::to_string(comm.rank());
    checkpoints.save(run);
    // What comes after must not be in it.
    if (async) make_steps(rank, scenario, kBreak, kBreak + 3, facts);
    checkpoints.wait();
  });
}

void go_on(const Scenario& scenario, int ranks, const std::filesystem::path& dir, const FactMap& expected,
           Device device = kHost) {
  run_ranks(ranks, [&](Communicator& comm) {
    Rank rank(comm, scenario, device);
    const LoadedRun loaded = Checkpointer(*rank.optimizer, rank.checkpoints(dir)).load();
    EXPECT_EQ(loaded.run.user.at("data.0"), "position 0");
    EXPECT_EQ(rank.optimizer->steps_taken(), loaded.step);
    FactMap facts;
    make_steps(rank, scenario, kBreak, kEnd, facts);
    const FactMap state = state_of(rank);
    facts.insert(state.begin(), state.end());
    expect_same(expected, facts);
  });
}

/// The same params and configuration in another order, with other buckets.
Scenario rearranged(Scenario scenario) {
  std::ranges::reverse(scenario.specs);
  // What others are tied to comes before them.
  std::ranges::stable_partition(scenario.specs, [](const ParamSpec& s) { return s.name == "embed.weight"; });
  std::ranges::reverse(scenario.config.optimizer.groups);
  scenario.config.optimizer.bucket_elems = 5000;
  return scenario;
}

class Checkpoints : public ::testing::TestWithParam<DeviceKind> {
 protected:
  void SetUp() override { MXOPT_SKIP_WITHOUT(device()); }
  Device device() const { return {GetParam(), 0}; }
};
INSTANTIATE_TEST_SUITE_P(Devices, Checkpoints, ::testing::ValuesIn(test::built_device_kinds()),
                         [](const auto& kind) { return test::device_kind_name(kind.param); });

TEST_P(Checkpoints, GoOnWithTheBitsOfTheRunWithoutABreak) {
  const Scenario scenario;
  const FactMap expected = unbroken(scenario);
  for (const int saved_by : {1, 3, 4}) {
    const TemporaryFolder folder;
    save_at_break(scenario, saved_by, folder.path(), device());
    for (const int loaded_by : {1, 3, 5}) {
      SCOPED_TRACE(std::to_string(saved_by) + " -> " + std::to_string(loaded_by));
      go_on(scenario, loaded_by, folder.path(), expected, device());
    }
    go_on(scenario, 2, folder.path(), expected, kHost);
  }
}

TEST_P(Checkpoints, SavedOnTheHostGoOnAnywhere) {
  Scenario scenario;
  scenario.config.precision.scale_layout = ScaleLayout::kGemm;
  scenario.config.optimizer.grad_dtype = DType::kBf16;
  const FactMap expected = unbroken(scenario);
  const TemporaryFolder folder;
  save_at_break(scenario, 3, folder.path());
  go_on(scenario, 4, folder.path(), expected, device());
}

TEST_P(Checkpoints, AreASnapshotAlsoWhereTrainingGoesOnBeside) {
  const Scenario scenario;
  const FactMap expected = unbroken(scenario);
  const TemporaryFolder folder;
  save_at_break(scenario, 3, folder.path(), device(), true);
  go_on(scenario, 2, folder.path(), expected, device());
}

TEST(Checkpoints, KnowNeitherBucketsNorTheOrderOfParamsNorOfGroups) {
  const Scenario scenario;
  const TemporaryFolder folder;
  save_at_break(scenario, 4, folder.path());
  go_on(rearranged(scenario), 3, folder.path(), unbroken(scenario));
}

TEST_P(Checkpoints, KeepTheBitsOfMasters) {
  const TemporaryFolder folder;
  Scenario scenario;
  scenario.specs = {spec("w", {64, 64}, ParamFormat::kMxfp8, Storage::kBoth)};
  scenario.config = Config();
  const float value = 1 + 0x1p-20f;
  run_ranks(2, [&](Communicator& comm) {
    Rank rank(comm, scenario, device());
    const std::vector<float> values(64 * 64, value);
    rank.optimizer->set_initial("w", ConstTypedSpan(std::span<const float>(values)), rank.place().stream);
    rank.optimizer->publish(rank.place().stream);
    Checkpointer(*rank.optimizer, rank.checkpoints(folder.path())).save();
  });
  run_ranks(3, [&](Communicator& comm) {
    Rank rank(comm, scenario, device());
    Checkpointer(*rank.optimizer, rank.checkpoints(folder.path())).load();
    const HostView master(rank.device, rank.place().stream, rank.optimizer->owned("w").master);
    for (const float loaded : master.span().as<float>()) ASSERT_EQ(loaded, value);
  });
}

TEST_P(Checkpoints, OfWeightsOnlyReplaceMastersAndNothingElse) {
  const TemporaryFolder folder;
  Scenario scenario;
  scenario.specs = {spec("w", {64, 64}, ParamFormat::kMxfp8, Storage::kBoth)};
  scenario.config = Config();
  const auto fill = [](Rank& rank, float value) {
    const std::vector<float> values(64 * 64, value);
    rank.optimizer->set_initial("w", ConstTypedSpan(std::span<const float>(values)), rank.place().stream);
    rank.optimizer->publish(rank.place().stream);
  };
  run_ranks(2, [&](Communicator& comm) {
    Rank rank(comm, scenario, device());
    fill(rank, 5);
    Checkpointer(*rank.optimizer, rank.checkpoints(folder.path())).save();
  });
  run_ranks(2, [&](Communicator& comm) {
    Rank rank(comm, scenario, device());
    fill(rank, 0.9f);
    rank.optimizer->set_lr("*", 0);
    {
      const HostView moments(rank.device, rank.place().stream, rank.optimizer->owned("w").exp_avg);
      std::ranges::fill(moments.span().as<float>(), 0.25f);
      moments.store();
    }
    rank.optimizer->set_steps_taken(3);
    EXPECT_TRUE(
        Checkpointer(*rank.optimizer, rank.checkpoints(folder.path())).load_weights().run.config.empty());
    {
      const HostView moments(rank.device, rank.place().stream, rank.optimizer->owned("w").exp_avg);
      for (const float value : moments.span().as<float>()) ASSERT_EQ(value, 0.25f);
    }
    EXPECT_EQ(rank.optimizer->step(rank.place().stream)->step, 4);
    const HostView master(rank.device, rank.place().stream, rank.optimizer->owned("w").master);
    for (const float value : master.span().as<float>()) ASSERT_EQ(value, 5.0f);
    const ParamView view = rank.optimizer->wait_param("w", Plane::kRow, rank.place().stream);
    const HostView scales(rank.device, rank.place().stream,
                          TypedSpan(view.planes.row_scales, DType::kUint8, 2));
    for (const std::uint8_t scale : scales.span().as<std::uint8_t>()) {
      EXPECT_EQ(scale, 121);  // 5 is 320 * 2^(121 - 127)
    }
  });
}

TEST(Checkpoints, ThatDoNotFitAreRefusedOnEveryRankAndNothingChanges) {
  const TemporaryFolder folder;
  Scenario scenario;
  scenario.specs = {spec("layer.w", {64, 64}), spec("layer.b", {64}), spec("frozen", {32}), spec("old", {8})};
  scenario.specs[2].frozen = true;
  scenario.config = Config();
  run_ranks(3, [&](Communicator& comm) {
    Rank rank(comm, scenario, kHost);
    start(rank, scenario);
    Checkpointer(*rank.optimizer, rank.checkpoints(folder.path())).save();
  });
  Scenario other = scenario;
  other.specs = {spec("layer.w", {64, 32}), spec("layer.bias", {64}), spec("frozen", {32})};
  other.config = Config();
  run_ranks(2, [&](Communicator& comm) {
    Rank rank(comm, other, kHost);
    test::set_all_initial(*rank.optimizer, other.specs);
    rank.optimizer->publish();
    const FactMap before = state_of(rank);
    const std::string message = thrown_message<DataError>(
        [&] { Checkpointer(*rank.optimizer, rank.checkpoints(folder.path())).load(); });
    for (const char* part :
         {"step-00000000 does not fit the params there are",
          "param 'layer.w' has shape 64x64 in the checkpoint, here 64x32",
          "param 'layer.bias' is not in the checkpoint; it has 'layer.b'",
          "param 'frozen' was saved without moments", "param 'old' of the checkpoint is not here",
          "param 'layer.b' of the checkpoint is not here"}) {
      EXPECT_TRUE(contains(message, part));
    }
    expect_same(before, state_of(rank));
    EXPECT_EQ(rank.optimizer->steps_taken(), 0);
  });
}

TEST(Checkpoints, ThatAreDamagedAreRefusedOnEveryRankAndNothingChanges) {
  const Scenario scenario;
  const TemporaryFolder folder;
  save_at_break(scenario, 3, folder.path());
  const std::filesystem::path file = latest_checkpoint(folder.path()) / "rank-00001-of-00003.safetensors";
  std::fstream bytes(file, std::ios::in | std::ios::out | std::ios::binary);
  bytes.seekg(-9, std::ios::end);
  const char flipped = static_cast<char>(bytes.get() ^ 1);
  bytes.seekp(-9, std::ios::end);
  bytes.put(flipped);
  bytes.close();
  run_ranks(3, [&](Communicator& comm) {
    Rank rank(comm, scenario, kHost);
    start(rank, scenario);
    const FactMap before = state_of(rank);
    EXPECT_TRUE(contains(thrown_message<DataError>(
                             [&] { Checkpointer(*rank.optimizer, rank.checkpoints(folder.path())).load(); }),
                         "rank-00001-of-00003.safetensors"));
    expect_same(before, state_of(rank));
  });
}

TEST(Checkpoints, AsynchronousErrorsComeWithTheNextCallOnEveryRank) {
  const Scenario scenario;
  const TemporaryFolder folder;
  run_ranks(3, [&](Communicator& comm) {
    Rank rank(comm, scenario, kHost);
    start(rank, scenario);
    CheckpointConfig config = rank.checkpoints(folder.path() / "absent" / "checkpoints");
    config.async = true;
    config.timeout_s = 20;
    Checkpointer checkpoints(*rank.optimizer, config);
    EXPECT_NO_THROW(checkpoints.save());
    EXPECT_THROW(checkpoints.save(), CheckpointError);
    EXPECT_FALSE(checkpoints.is_saving());
    EXPECT_NO_THROW(checkpoints.wait());
  });
}

TEST(Checkpoints, ASecondSaveWaitsForTheFirst) {
  const Scenario scenario;
  const TemporaryFolder folder;
  run_ranks(2, [&](Communicator& comm) {
    Rank rank(comm, scenario, kHost);
    start(rank, scenario);
    CheckpointConfig config = rank.checkpoints(folder.path());
    config.async = true;
    config.keep_last = 2;
    Checkpointer checkpoints(*rank.optimizer, config);
    FactMap facts;
    for (int step = 0; step < 3; ++step) {
      make_steps(rank, scenario, step, step + 1, facts);
      checkpoints.save();
    }
    checkpoints.wait();
  });
  const std::vector<CheckpointListing> all = list_checkpoints(folder.path());
  ASSERT_EQ(all.size(), 2U);
  EXPECT_EQ(all[0].step, 2);
  EXPECT_EQ(all[1].step, 3);
  EXPECT_TRUE(all[1].complete && all[1].is_latest);
}

TEST(Checkpoints, BringTheirHyperParametersUnlessTheConfigurationsAreWanted) {
  const TemporaryFolder folder;
  Scenario scenario;
  scenario.specs = {spec("a", {40}, ParamFormat::kFp32), spec("b", {50}, ParamFormat::kFp32)};
  scenario.config = Config();
  scenario.config.optimizer.decay_1d = true;
  scenario.config.optimizer.groups = {{.match = "a", .name = "first", .weight_decay = 0.1},
                                      {.match = "b", .name = "second", .weight_decay = 0.0}};
  run_ranks(2, [&](Communicator& comm) {
    Rank rank(comm, scenario, kHost);
    start(rank, scenario);
    Checkpointer(*rank.optimizer, rank.checkpoints(folder.path())).save();
  });
  Scenario other = scenario;
  std::ranges::reverse(other.specs);
  std::ranges::reverse(other.config.optimizer.groups);
  for (GroupConfig& group : other.config.optimizer.groups) group.weight_decay = 0.5;
  for (const bool is_saved : {true, false}) {
    run_ranks(3, [&](Communicator& comm) {
      Rank rank(comm, other, kHost);
      CheckpointConfig config = rank.checkpoints(folder.path());
      if (!is_saved) config.hyper_parameters = HyperParameters::kConfigured;
      const LoadedRun loaded = Checkpointer(*rank.optimizer, config).load();
      std::string lines;
      for (const std::string& line : loaded.differences) lines += line + '\n';
      EXPECT_TRUE(contains(
          lines, is_saved ? "group 'first' weight_decay: 0.1 is used, as it was saved; configured is 0.5"
                          : "group 'first' weight_decay: 0.1, now 0.5"));
      EXPECT_TRUE(contains(lines, "optimizer.groups[0].match: a, now b"));
      EXPECT_FALSE(contains(lines, "optimizer.lr"));
      // Without gradients a step is the decay alone: p - lr * decay * p.
      rank.optimizer->step();
      for (const char* name : {"a", "b"}) {
        const double decay = is_saved ? (name[0] == 'a' ? 0.1 : 0.0) : 0.5;
        const std::vector<float> initial = test::initial_values(name, name[0] == 'a' ? 40 : 50);
        const OwnedSlice slice = rank.optimizer->owned(name);
        for (std::size_t i = 0; i < slice.master.size(); ++i) {
          const auto before = static_cast<double>(initial[static_cast<std::size_t>(slice.param_begin) + i]);
          ASSERT_FLOAT_EQ(slice.master[i], static_cast<float>(before - 3e-4 * decay * before)) << name;
        }
      }
    });
  }
}

TEST(Checkpoints, OfChainsAndModelParallelRanksAndReplicasAreInSections) {
  const TemporaryFolder folder;
  // 8 ranks: dense params in shards of 4 with 2 replicas; experts in 2 parts, each shared by 4 ranks.
  const std::vector<ParamSpec> dense_specs = {spec("d", {64, 96})};
  const auto expert_specs = [](int part) { return std::vector<ParamSpec>{spec("e", {300 + 11 * part})}; };
  const auto with_chain =
      [&](Communicator& all,
          const std::function<void(OptimizerChain&, Checkpointer&, DistributedAdam&, DistributedAdam&)>&
              body) {
        const ShardGroups shards = split_for_sharding(all, 4);
        const int part = all.rank() % 2;
        const auto data = all.split(part, all.rank());
        const auto model = all.split(all.rank() / 2, all.rank());
        DistributedAdam dense(dense_specs, Config(), shards.groups());
        ParallelGroups groups(*data, model.get());
        groups.averaged_ranks = 8;
        DistributedAdam experts(expert_specs(part), Config(), groups);
        OptimizerChain chain({{"dense", &dense}, {"experts", &experts}});
        CheckpointConfig config;
        config.dir = folder.path().string();
        Checkpointer checkpoints({{"dense", &dense}, {"experts", &experts}}, config);
        body(chain, checkpoints, dense, experts);
      };
  const auto step = [&](OptimizerChain& chain, DistributedAdam& dense, DistributedAdam& experts, int number) {
    test::write_values(dense.grad("d").data, test::grad_values("d", 64 * 96, number));
    test::write_values(experts.grad("e").data, test::grad_values("e", experts.grad("e").data.elems, number));
    return *chain.step();
  };
  std::vector<std::vector<float>> expected(8), actual(8);
  const auto masters = [](DistributedAdam& dense, DistributedAdam& experts) {
    std::vector<float> all;
    for (const std::span<float> slice : {dense.owned("d").master, experts.owned("e").master}) {
      all.insert(all.end(), slice.begin(), slice.end());
    }
    return all;
  };
  run_ranks(8, [&](Communicator& all) {
    with_chain(all, [&](OptimizerChain& chain, Checkpointer& checkpoints, DistributedAdam& dense,
                        DistributedAdam& experts) {
      test::set_all_initial(dense, dense_specs);
      test::set_all_initial(experts, expert_specs(all.rank() % 2));
      chain.publish();
      step(chain, dense, experts, 0);
      checkpoints.save();
      step(chain, dense, experts, 1);
      expected[static_cast<std::size_t>(all.rank())] = masters(dense, experts);
    });
  });
  const CheckpointReader reader(folder.path());
  ASSERT_EQ(reader.sections().size(), 3U);
  std::vector<std::string> names;
  for (const CheckpointSection& section : reader.sections()) names.push_back(section.name);
  EXPECT_EQ(names, (std::vector<std::string>{"dense", "experts.model-0-of-2", "experts.model-1-of-2"}));
  std::int64_t elems = 0;
  for (const ManifestSlice& slice : reader.manifest().slices) elems += slice.elems;
  EXPECT_EQ(elems, 3 * (64 * 96 + 300 + 311)) << "replicas are saved once";
  run_ranks(8, [&](Communicator& all) {
    with_chain(all, [&](OptimizerChain& chain, Checkpointer& checkpoints, DistributedAdam& dense,
                        DistributedAdam& experts) {
      checkpoints.load();
      EXPECT_EQ(step(chain, dense, experts, 1).step, 2);
      actual[static_cast<std::size_t>(all.rank())] = masters(dense, experts);
    });
  });
  for (std::size_t rank = 0; rank < 8; ++rank)
    EXPECT_TRUE(test::bits_equal(expected[rank], actual[rank])) << rank;
}

TEST(Checkpoints, AreNotLoadedInTheMiddleOfAStep) {
  const TemporaryFolder folder;
  const Scenario scenario;
  run_ranks(2, [&](Communicator& comm) {
    Rank rank(comm, scenario, kHost);
    start(rank, scenario);
    Checkpointer checkpoints(*rank.optimizer, rank.checkpoints(folder.path()));
    checkpoints.save();
    rank.optimizer->begin_backward();
    rank.optimizer->grad_ready("stack");
    EXPECT_TRUE(contains(thrown_message<ContractError>([&] { checkpoints.load(); }), "no step() has used"));
    rank.optimizer->step();
    EXPECT_EQ(checkpoints.load().step, 0);
  });
}

TEST(Checkpoints, EndWhatWasSkippedBefore) {
  const TemporaryFolder folder;
  Scenario scenario;
  scenario.specs = {spec("w", {64})};
  scenario.config = Config();
  scenario.config.optimizer.max_consecutive_skips = 2;
  run_ranks(2, [&](Communicator& comm) {
    Rank rank(comm, scenario, kHost);
    start(rank, scenario);
    Checkpointer checkpoints(*rank.optimizer, rank.checkpoints(folder.path()));
    checkpoints.save();
    const auto bad_step = [&] {
      test::write_values(rank.optimizer->grad("w").data, std::vector<float>(64, std::nanf("")));
      rank.optimizer->step();
    };
    EXPECT_NO_THROW(bad_step());
    EXPECT_THROW(bad_step(), ContractError);
    checkpoints.load();
    EXPECT_NO_THROW(bad_step());
    EXPECT_TRUE(rank.optimizer->step()->taken);
  });
}

TEST(Checkpoints, OfOtherOptimizersAreRefused) {
  const TemporaryFolder folder;
  SelfCommunicator self;
  const std::vector<ParamSpec> specs = {spec("w", {64})};
  DistributedAdam a(specs, Config(), self), b(specs, Config(), self);
  test::set_all_initial(a, specs);
  test::set_all_initial(b, specs);
  CheckpointConfig config;
  config.dir = folder.path().string();
  Checkpointer({{"a", &a}, {"b", &b}}, config).save();
  EXPECT_TRUE(contains(thrown_message<DataError>([&] {
                         Checkpointer({{"a", &a}}, config).load();
                       }),
                       "section 'b' of the checkpoint is not here"));
  EXPECT_NO_THROW(Checkpointer({{"b", &b}, {"a", &a}}, config).load());
}

TEST(Checkpoints, NeedAFolder) {
  SelfCommunicator self;
  const std::vector<ParamSpec> specs = {spec("w", {64})};
  DistributedAdam opt(specs, Config(), self);
  Checkpointer checkpoints(opt, CheckpointConfig());
  EXPECT_TRUE(
      contains(thrown_message<ContractError>([&] { checkpoints.save(); }), "checkpoint.dir is empty"));
  EXPECT_TRUE(
      contains(thrown_message<ContractError>([&] { checkpoints.load(); }), "checkpoint.dir is empty"));
  EXPECT_THROW(checkpoints.load("/absent"), DataError);
  EXPECT_THROW(Checkpointer({{"a", &opt}, {"a", &opt}}, {}), ContractError);
  EXPECT_THROW(Checkpointer({{"a", nullptr}}, {}), ContractError);
  EXPECT_THROW(Checkpointer({}, {}), ContractError);
}

}  // namespace
}  // namespace mxopt
