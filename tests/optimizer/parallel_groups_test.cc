// Hybrid sharding: groups that shard the state, and replicas of them. What it must not change is in
// test::Facts: those of one rank, given equal reduced gradients.
#include "mxopt/optimizer/parallel_groups.h"

#include <chrono>
#include <cmath>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <memory>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "support/device_over_host.h"
#include "support/devices.h"
#include "support/optimizer_fixture.h"
#include "support/thrown_message.h"

#include "mxopt/collectives/traced_communicator.h"

namespace mxopt {
namespace {

using test::contains;
using test::Facts;
using test::run_ranks;
using test::run_world;
using test::same_facts;
using test::Scenario;
using test::spec;
using test::thrown_message;

TEST(ParallelGroups, CountRanks) {
  SelfCommunicator self;
  ParallelGroups one(self);
  EXPECT_EQ(one.ranks(), 1);
  EXPECT_EQ(one.ranks_of_mean(), 1);
  one.averaged_ranks = 6;
  EXPECT_EQ(one.ranks_of_mean(), 6);
  run_ranks(6, [](Communicator& all) {
    const ShardGroups groups = split_for_sharding(all, 2);
    const ParallelGroups ranks = groups.groups();
    EXPECT_EQ(ranks.data->size(), 2);
    EXPECT_EQ(ranks.data->rank(), all.rank() % 2);
    EXPECT_EQ(ranks.replicas->size(), 3);
    EXPECT_EQ(ranks.replicas->rank(), all.rank() / 2);
    EXPECT_EQ(ranks.ranks(), 6);
    EXPECT_EQ(ranks.ranks_of_mean(), 6);
    EXPECT_EQ(split_for_sharding(all, 6).replicas, nullptr);
    EXPECT_TRUE(
        contains(thrown_message<ContractError>([&] { split_for_sharding(all, all.rank() == 4 ? 3 : 2); }),
                 "shard_ranks"));
    for (const int bad : {0, 4, 7, -2}) {
      EXPECT_TRUE(contains(thrown_message<ConfigError>([&] { split_for_sharding(all, bad); }),
                           std::to_string(bad) + "; allowed is a number that divides the 6 ranks"));
    }
  });
}

class HybridSharding : public ::testing::TestWithParam<DeviceKind> {
 protected:
  void SetUp() override { MXOPT_SKIP_WITHOUT(device()); }
  Device device() const { return {GetParam(), 0}; }
};
INSTANTIATE_TEST_SUITE_P(Devices, HybridSharding, ::testing::ValuesIn(test::built_device_kinds()),
                         [](const auto& kind) { return test::device_kind_name(kind.param); });

/// Ranks, and how many of them share the state.
struct Shape {
  int ranks, shard_ranks;
};

void expect_same(Scenario scenario, std::initializer_list<Shape> shapes, Device device) {
  for (const std::int64_t bucket_elems : {std::int64_t{0}, std::int64_t{3000}}) {
    scenario.config.optimizer.bucket_elems = bucket_elems;
    scenario.shard_ranks = 0;
    const Facts one = run_world(1, scenario);
    for (const Shape shape : shapes) {
      SCOPED_TRACE(std::to_string(shape.ranks) + " ranks, shards of " + std::to_string(shape.shard_ranks));
      scenario.shard_ranks = shape.shard_ranks;
      EXPECT_TRUE(same_facts(one, run_world(shape.ranks, scenario, {}, device)));
    }
  }
}

TEST_P(HybridSharding, HasTheBitsOfOneRank) {
  // Means over a power of two of ranks are exact.
  Scenario scenario;
  scenario.config = test::norms_config();
  scenario.config.optimizer.check_grads = true;
  expect_same(scenario, {{4, 2}, {4, 1}, {8, 2}, {8, 4}}, device());
}

TEST_P(HybridSharding, HasTheBitsOfOneRankInBf16) {
  Scenario scenario;
  scenario.config.optimizer.grad_dtype = DType::kBf16;
  scenario.config.parallel.grad_reduction = GradReduction::kExchange;
  expect_same(scenario, {{4, 2}, {4, 1}}, device());
  scenario.config.parallel.gather_format = GatherFormat::kBf16;
  expect_same(scenario, {{4, 2}}, device());
}

/// The facts of steps in which every rank adds gradients of its own, and tokens where these are counted.
Facts run_sums(Communicator& all, int shard_ranks, GradReduce reduce, Device device) {
  Scenario scenario;
  scenario.config.optimizer.grad_reduce = reduce;
  const ShardGroups shards = split_for_sharding(all, shard_ranks);
  const auto side = shards.data->split(0, all.rank());
  test::DeviceOverHost data(*shards.data, device);
  std::unique_ptr<test::DeviceOverHost> replicas;
  ParallelGroups groups = shards.groups();
  if (device.kind != DeviceKind::kHost) {
    groups.data = &data;
    if (groups.replicas != nullptr) {
      replicas = std::make_unique<test::DeviceOverHost>(*groups.replicas, device);
      groups.replicas = replicas.get();
    }
  }
  const Stream stream(device);
  const test::Place place{device, stream.ref()};
  DistributedAdam opt(scenario.specs, scenario.config, groups, device);
  test::set_all_initial(opt, scenario.specs, all.rank(), place.stream);
  opt.publish(place.stream);
  Facts facts;
  for (int step = 0; step < 4; ++step) {
    opt.begin_backward();
    if (reduce == GradReduce::kTokens) opt.add_tokens(all.rank() == 1 ? 0 : 3 + all.rank());
    for (const ParamSpec& s : scenario.specs) {
      if (s.frozen || !s.tied_to.empty()) continue;
      const test::HostView grad(place.device, place.stream, opt.grad(s.name).data);
      // A few bits, another multiple on every rank: sums of them are exact.
      test::write_values(grad.span(), test::grad_values(s.name, grad.span().elems, step),
                         static_cast<float>(1 + all.rank()));
      grad.store();
      opt.grad_ready(s.name, place.stream);
    }
    test::add_record_facts(facts, *opt.step(place.stream), "step " + std::to_string(step) + ": ");
  }
  for (test::Fact& fact : test::state_facts(opt, *side, "", place)) facts.push_back(std::move(fact));
  return facts;
}

TEST_P(HybridSharding, AddsWhatEveryRankHas) {
  for (const GradReduce reduce : {GradReduce::kSum, GradReduce::kTokens}) {
    std::vector<Facts> of_shape;
    for (const int shard_ranks : {6, 3, 2, 1}) {
      std::vector<Facts> facts(6);
      run_ranks(6, [&](Communicator& all) {
        facts[static_cast<std::size_t>(all.rank())] = run_sums(all, shard_ranks, reduce, device());
      });
      for (const Facts& other : facts) EXPECT_TRUE(same_facts(facts[0], other));
      of_shape.push_back(facts[0]);
    }
    for (const Facts& other : of_shape) EXPECT_TRUE(same_facts(of_shape[0], other));
  }
}

TEST(HybridSharding, MeansAreDividedOnceByAllRanks) {
  run_ranks(6, [](Communicator& all) {
    const ShardGroups groups = split_for_sharding(all, 3);
    Config config;
    config.optimizer.clip_grad = 0;
    config.optimizer.param_norms = true;
    DistributedAdam opt({spec("w", {300}, ParamFormat::kFp32)}, config, groups.groups());
    test::set_all_initial(opt, std::vector<ParamSpec>{spec("w", {300})});
    opt.publish();
    for (float& value : opt.grad("w").data.as<float>()) value = static_cast<float>(all.rank());
    const StepReport report = opt.step();
    EXPECT_DOUBLE_EQ(report->grad_norm, 2.5 * std::sqrt(300.0));
    EXPECT_DOUBLE_EQ(report->param_norms[0].grad_norm, 2.5 * std::sqrt(300.0));
    const std::string text = opt.construction().text();
    EXPECT_TRUE(contains(text, "in 2 replicas"));
    EXPECT_TRUE(contains(text, "divided by 6 in the update"));
  });
}

TEST(HybridSharding, OrderOfReplicaMessagesDoesNotDependOnWhoIsLate) {
  // publish() between grad_ready() and step(): had one rank added its shard by then and another not, they
  // would meet in different calls.
  const std::vector<ParamSpec> specs = {spec("w", {640}, ParamFormat::kFp32)};
  run_ranks(4, [&](Communicator& all) {
    const ShardGroups groups = split_for_sharding(all, 2);
    DistributedAdam opt(specs, Config(), groups.groups());
    test::set_all_initial(opt, specs);
    opt.publish();
    for (int step = 0; step < 5; ++step) {
      opt.begin_backward();
      if (all.rank() == step % 4) std::this_thread::sleep_for(std::chrono::milliseconds(20));
      opt.grad_ready("w");
      opt.publish();
      EXPECT_TRUE(opt.step()->taken);
    }
  });
}

TEST(HybridSharding, ModelPartsAndReplicasTogether) {
  // 8 ranks: 2 parts of the model, shards of 2, 2 replicas.
  run_ranks(8, [](Communicator& all) {
    const int part = all.rank() % 2;
    const auto of_part = all.split(part, all.rank());
    const ShardGroups shards = split_for_sharding(*of_part, 2);
    const auto model = all.split(all.rank() / 2, all.rank());
    ParallelGroups groups = shards.groups();
    groups.model = model.get();
    const std::vector<ParamSpec> specs = {spec("w" + std::to_string(part), {400}, ParamFormat::kFp32)};
    Config config;
    config.optimizer.grad_reduce = GradReduce::kTokens;
    config.optimizer.clip_grad = 0;
    DistributedAdam opt(specs, config, groups);
    test::set_all_initial(opt, specs);
    opt.publish();
    for (int step = 0; step < 3; ++step) {
      opt.add_tokens(3);  // of four ranks; the other part sees the same
      for (float& value : opt.grad(specs[0].name).data.as<float>()) value = 3;
      if (step == 1 && all.rank() == 5) opt.grad(specs[0].name).data.as<float>()[399] = std::nanf("");
      const StepReport report = opt.step();
      EXPECT_EQ(report->tokens, 12);
      EXPECT_EQ(report->taken, step != 1);
      EXPECT_EQ(report->nonfinite_gradient_rank, step == 1 ? 1 : -1);
      if (step != 1) {
        EXPECT_DOUBLE_EQ(report->grad_norm, std::sqrt(800.0));
      }
    }
  });
}

TEST(HybridSharding, MovesShardsOfGradientsBetweenReplicasAndNothingElse) {
  run_ranks(4, [](Communicator& all) {
    const ShardGroups groups = split_for_sharding(all, 2);
    TracedCommunicator replicas(*groups.replicas);
    const std::vector<ParamSpec> specs = {spec("w", {64, 64}, ParamFormat::kMxfp8, Storage::kBoth)};
    DistributedAdam opt(specs, Config(), {*groups.data, nullptr, &replicas});
    test::set_all_initial(opt, specs);
    opt.publish();
    replicas.reset();
    opt.step();
    EXPECT_EQ(replicas.counts(Traffic::kGradient).operations, 1);
    EXPECT_EQ(replicas.counts(Traffic::kGradient).bytes, 64 * 64 / 2 * 4);
    EXPECT_EQ(replicas.counts(Traffic::kStatistics).operations, 1);
    EXPECT_EQ(replicas.counts(Traffic::kStatistics).bytes, 16);
    for (const Traffic traffic :
         {Traffic::kScales, Traffic::kPlanes, Traffic::kPlain, Traffic::kHighPrecision, Traffic::kControl}) {
      EXPECT_EQ(replicas.counts(traffic).operations, 0) << traffic_name(traffic);
    }
  });
}

TEST(HybridSharding, PublishGivesReplicasTheStateOfTheFirst) {
  run_ranks(4, [](Communicator& all) {
    const ShardGroups groups = split_for_sharding(all, 2);
    const std::vector<ParamSpec> specs = {spec("w", {64, 32}, ParamFormat::kMxfp8, Storage::kBoth)};
    DistributedAdam opt(specs, Config(), groups.groups());
    const std::vector<float> values(64 * 32, groups.replicas->rank() == 0 ? 0.5f : 2.0f);
    opt.set_initial("w", ConstTypedSpan(std::span<const float>(values)));
    for (float& value : opt.owned("w").exp_avg) value = static_cast<float>(1 + groups.replicas->rank());
    opt.publish();
    for (const float value : opt.owned("w").master) ASSERT_EQ(value, 0.5f);
    for (const float value : opt.owned("w").exp_avg) ASSERT_EQ(value, 1.0f);
    EXPECT_EQ(opt.param("w").planes.row_scales[0], 118);  // 0.5 is 256 * 2^(118 - 127)
  });
}

TEST(HybridSharding, ReplicasThatDifferAreRefusedOnEveryRank) {
  struct Case {
    const char* text;
    std::function<void(int replica, std::vector<ParamSpec>&, Config&)> change;
  };
  const std::vector<Case> cases = {
      {"params", [](int replica, auto& specs, Config&) { specs[0].shape[0] += replica; }},
      {"configuration", [](int replica, auto&, Config& c) { c.optimizer.lr += replica; }},
      {"construction", [](int replica, auto&, Config& c) { c.optimizer.lr = replica == 0 ? 1 : -1; }},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(c.text);
    run_ranks(4, [&](Communicator& all) {
      const ShardGroups groups = split_for_sharding(all, 2);
      std::vector<ParamSpec> specs = {spec("w", {64})};
      Config config;
      c.change(groups.replicas->rank(), specs, config);
      try {
        const DistributedAdam opt(specs, config, groups.groups());
        ADD_FAILURE() << "nothing was thrown on rank " << all.rank();
      } catch (const ContractError& error) {
        EXPECT_TRUE(contains(error.what(), c.text));
      } catch (const ConfigError& error) {  // the rank's own problem
        EXPECT_TRUE(contains(error.what(), "optimizer.lr"));
      }
    });
  }
}

TEST(HybridSharding, OptionsThatReplicasWereToldDifferentlyAreRefused) {
  run_ranks(4, [](Communicator& all) {
    const ShardGroups groups = split_for_sharding(all, 2);
    const std::vector<ParamSpec> specs = {spec("w", {640})};
    DistributedAdam opt(specs, Config(), groups.groups());
    test::set_all_initial(opt, specs);
    opt.publish();
    opt.set_lr("*", groups.replicas->rank() == 0 ? 1e-3 : 2e-3);
    EXPECT_TRUE(contains(thrown_message<ContractError>([&] { opt.step(); }), "hyper-parameters"));
    EXPECT_EQ(opt.steps_taken(), 0);
  });
}

TEST(ParallelGroups, AveragedRanksAreThoseOfAMean) {
  SelfCommunicator self;
  ParallelGroups groups(self);
  groups.averaged_ranks = 4;
  Config config;
  config.optimizer.grad_reduce = GradReduce::kSum;
  const std::vector<ParamSpec> specs = {spec("w", {640})};
  EXPECT_TRUE(contains(thrown_message<ConfigError>([&] { DistributedAdam(specs, config, groups); }),
                       "averaged_ranks is 4; allowed is 0, or more with optimizer.grad_reduce average"));
  groups.averaged_ranks = -1;
  EXPECT_THROW(DistributedAdam(specs, Config(), groups), ConfigError);
}

}  // namespace
}  // namespace mxopt
