// Dense params whose state all ranks share, and experts in parts, each shared by some of them. Oracle: one
// optimizer on one rank that holds the whole model and is given the reduced gradients.
#include "mxopt/optimizer/optimizer_chain.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "support/device_over_host.h"
#include "support/devices.h"
#include "support/host_view.h"
#include "support/optimizer_fixture.h"
#include "support/thrown_message.h"

namespace mxopt {
namespace {

using test::contains;
using test::Fact;
using test::Facts;
using test::HostView;
using test::Place;
using test::run_ranks;
using test::spec;
using test::thrown_message;

/// Ranks of a job, and the parts that its experts are in: those of part p are shared by the ranks r with
/// r % parts == p.
struct Job {
  int ranks = 4, parts = 2;
  int sharing() const { return ranks / parts; }
};

std::vector<ParamSpec> dense_specs() {
  return {spec("embed", {96, 64}, ParamFormat::kMxfp8, Storage::kBoth),
          spec("norm", {33}, ParamFormat::kFp32), spec("attn", {64, 96}, ParamFormat::kMxfp8, Storage::kRow),
          spec("head", {64, 96})};
}

/// Part 1 has nothing but a bias.
std::vector<ParamSpec> expert_specs(int part) {
  const std::string name = "expert." + std::to_string(part);
  if (part == 1) return {spec(name + ".bias", {5}, ParamFormat::kBf16)};
  return {spec(name + ".up", {32, 352}, ParamFormat::kMxfp8, Storage::kBoth),
          spec(name + ".down", {352, 32}, ParamFormat::kMxfp8, Storage::kRow), spec(name + ".bias", {77})};
}

Config chain_config() {
  Config config;
  OptimizerConfig& optimizer = config.optimizer;
  optimizer.lr = 3e-3;
  optimizer.clip_grad = 4;
  optimizer.skip_norm = 900;
  optimizer.bucket_elems = 7000;
  optimizer.grad_reduce = GradReduce::kSum;
  optimizer.loss_scale = {LossScaleKind::kDynamic, 4096, 1, 3, 1};
  optimizer.param_norms = optimizer.count_zeros = true;
  return config;
}

/// The same for the member that has the head.
Config dense_config(Config config) {
  GroupConfig head;
  head.match = "head";
  head.norm_group = "head";
  head.clip_grad = 0.5;
  config.optimizer.groups = {head};
  return config;
}

constexpr int kSteps = 8;

/// What one rank adds to the gradient of a step, without the loss scale; all that share the param add it.
/// Step 2 has a NaN in an expert, step 4 is too large in a dense param, step 5 in another expert.
std::vector<float> added_grad(const std::string& name, std::int64_t elems, int step) {
  std::vector<float> grad = test::grad_values(name, elems, step);
  const bool is_large = (step == 4 && name == "attn") || (step == 5 && name == "expert.0.up");
  for (float& value : grad) value *= is_large ? 4096.0f : 1.0f;
  if (step == 2 && name == "expert.1.bias") grad.back() = std::numeric_limits<float>::quiet_NaN();
  return grad;
}

void write_grads(DistributedAdam& opt, std::span<const ParamSpec> specs, int step, float factor,
                 Place place) {
  for (const ParamSpec& s : specs) {
    const HostView grad(place.device, place.stream, opt.grad(s.name).data);
    test::write_values(grad.span(), added_grad(s.name, grad.span().elems, step), factor);
    grad.store();
  }
}

struct ChainRank {
  Communicator& all;  // for the test, on the host, as the two sides
  ParallelGroups dense, experts;
  Communicator& dense_side;
  Communicator& expert_side;
  int part;
  Place place;
};

void run_job(Job job, Device device, const std::function<void(const ChainRank&)>& body) {
  run_ranks(job.ranks, [&](Communicator& all) {
    const int part = all.rank() % job.parts;
    const auto dense = all.split(0, all.rank()), dense_side = all.split(0, all.rank());
    const auto data = all.split(part, all.rank()), data_side = all.split(part, all.rank());
    const auto model = all.split(all.rank() / job.parts, all.rank());
    const Stream stream(device);
    std::vector<std::unique_ptr<test::DeviceOverHost>> staged;
    const auto on_device = [&](Communicator& comm) -> Communicator& {
      if (device.kind == DeviceKind::kHost) return comm;
      staged.push_back(std::make_unique<test::DeviceOverHost>(comm, device));
      return *staged.back();
    };
    body({all,
          on_device(*dense),
          ParallelGroups(on_device(*data), &on_device(*model)),
          *dense_side,
          *data_side,
          part,
          {device, stream.ref()}});
  });
}

using FactMap = std::map<std::string, std::uint64_t>;

void add_facts(FactMap& map, const Facts& facts) {
  for (const Fact& fact : facts) map[fact.label] = fact.bits;
}

/// What a member's own reports would have, which the chain's has for all: in no order.
void add_record(FactMap& map, StepRecord record, int step) {
  std::ranges::sort(record.param_norms, {}, &ParamNorm::name);
  Facts facts;
  record.nonfinite_gradient_rank = -1;
  test::add_record_facts(facts, record, "step " + std::to_string(step) + ": ");
  add_facts(map, facts);
}

/// Every fact of a part of the model must be one of the whole.
void expect_part(const FactMap& whole, const FactMap& part) {
  for (const auto& [label, bits] : part) {
    const auto at = whole.find(label);
    if (at == whole.end()) {
      ADD_FAILURE() << label << " is nothing of the whole model";
    } else {
      EXPECT_EQ(at->second, bits) << label;
    }
  }
}

/// What the whole model in one optimizer comes to.
FactMap whole_model(Job job, const Config& config) {
  FactMap map;
  SelfCommunicator self;
  std::vector<ParamSpec> specs = dense_specs(), experts;
  for (int part = 0; part < job.parts; ++part) {
    for (const ParamSpec& s : expert_specs(part)) experts.push_back(s);
  }
  specs.insert(specs.end(), experts.begin(), experts.end());
  DistributedAdam opt(specs, dense_config(config), self);
  test::set_all_initial(opt, specs);
  opt.publish();
  for (int step = 0; step < kSteps; ++step) {
    const float scale = test::loss_scale_of(opt, {});
    write_grads(opt, dense_specs(), step, scale * static_cast<float>(job.ranks), {});
    write_grads(opt, experts, step, scale * static_cast<float>(job.sharing()), {});
    add_record(map, *opt.step(), step);
    add_facts(map, test::state_facts(opt, self, "after " + std::to_string(step) + ": "));
  }
  return map;
}

class Chain : public ::testing::TestWithParam<DeviceKind> {
 protected:
  void SetUp() override { MXOPT_SKIP_WITHOUT(device()); }
  Device device() const { return {GetParam(), 0}; }
};
INSTANTIATE_TEST_SUITE_P(Devices, Chain, ::testing::ValuesIn(test::built_device_kinds()),
                         [](const auto& kind) { return test::device_kind_name(kind.param); });

TEST_P(Chain, HasTheBitsOfOneOptimizerWithAllParams) {
  for (const Job job : {Job{1, 1}, Job{2, 2}, Job{4, 2}, Job{6, 3}, Job{6, 2}, Job{3, 1}}) {
    SCOPED_TRACE(std::to_string(job.ranks) + " ranks, " + std::to_string(job.parts) + " parts");
    const FactMap whole = whole_model(job, chain_config());
    FactMap seen;
    std::mutex mutex;
    run_job(job, device(), [&](const ChainRank& rank) {
      const std::vector<ParamSpec> specs = expert_specs(rank.part);
      DistributedAdam dense(dense_specs(), dense_config(chain_config()), rank.dense, device());
      DistributedAdam experts(specs, chain_config(), rank.experts, device());
      test::set_all_initial(dense, dense_specs(), rank.all.rank(), rank.place.stream);
      test::set_all_initial(experts, specs, rank.all.rank(), rank.place.stream);
      OptimizerChain chain({{"dense", &dense}, {"experts", &experts}});
      chain.publish(rank.place.stream);
      FactMap part;
      int taken = 0;
      for (int step = 0; step < kSteps; ++step) {
        const float scale = test::loss_scale_of(dense, rank.place);
        EXPECT_EQ(test::loss_scale_of(experts, rank.place), scale);
        chain.begin_backward();
        write_grads(dense, dense_specs(), step, scale, rank.place);
        write_grads(experts, specs, step, scale, rank.place);
        for (const ParamSpec& s : specs) experts.grad_ready(s.name, rank.place.stream);
        const StepReport report = chain.step(rank.place.stream);
        taken += report->taken ? 1 : 0;
        StepRecord record = *report;
        // One part knows the names of its own params; that there is one, all know.
        if (record.skip_reason == SkipReason::kNonFiniteGradient && rank.part != 1) {
          EXPECT_TRUE(record.nonfinite_gradient_params.empty());
          EXPECT_EQ(record.nonfinite_gradient_rank, job.parts > 1 ? 1 : -1);
          record.nonfinite_gradient_params = {"expert.1.bias"};
        }
        add_record(part, record, step);
        const std::string when = "after " + std::to_string(step) + ": ";
        add_facts(part, test::state_facts(dense, rank.dense_side, when, rank.place));
        add_facts(part, test::state_facts(experts, rank.expert_side, when, rank.place));
        EXPECT_EQ(chain.steps_taken(), taken);
      }
      EXPECT_EQ(taken, job.parts > 1 ? kSteps - 3 : kSteps - 2);
      expect_part(whole, part);
      const std::lock_guard lock(mutex);
      for (const auto& [label, bits] : part) seen[label] = bits;
    });
    EXPECT_EQ(seen.size(), whole.size()) << "something of the whole model is on no rank";
  }
}

TEST_P(Chain, MeansOfExpertsAreOverAllRanksWhoseLossesTheyHold) {
  run_job({4, 2}, device(), [&](const ChainRank& rank) {
    Config config = chain_config();
    config.optimizer.grad_reduce = GradReduce::kAverage;
    config.optimizer.loss_scale = {};
    config.optimizer.clip_grad = 1;
    const std::vector<ParamSpec> dense_spec = {spec("d", {100}, ParamFormat::kFp32)};
    const std::vector<ParamSpec> expert_spec = {spec("e", {44}, ParamFormat::kFp32)};
    ParallelGroups groups = rank.experts;
    groups.averaged_ranks = 4;
    DistributedAdam dense(dense_spec, config, rank.dense, device());
    DistributedAdam experts(expert_spec, config, groups, device());
    test::set_all_initial(dense, dense_spec, 0, rank.place.stream);
    test::set_all_initial(experts, expert_spec, 0, rank.place.stream);
    OptimizerChain chain({{"dense", &dense}, {"experts", &experts}});
    chain.publish(rank.place.stream);
    const auto fill = [&](DistributedAdam& opt, const char* name, float value) {
      const HostView grad(rank.place.device, rank.place.stream, opt.grad(name).data);
      std::ranges::fill(grad.span().as<float>(), value);
      grad.store();
    };
    fill(dense, "d", 3);    // the mean of 3, 3, 3, 3
    fill(experts, "e", 8);  // of two ranks; 16 / 4
    const StepReport report = chain.step(rank.place.stream);
    EXPECT_DOUBLE_EQ(report->grad_norm, std::sqrt(100 * 9.0 + 2 * 44 * 16.0));
    EXPECT_FLOAT_EQ(report->clip_factor, static_cast<float>(1 / (report->grad_norm + 1e-6)));
    ASSERT_EQ(report->param_norms.size(), 2U);
    EXPECT_DOUBLE_EQ(report->param_norms[0].grad_norm, std::sqrt(100 * 9.0));
    EXPECT_DOUBLE_EQ(report->param_norms[1].grad_norm, std::sqrt(44 * 16.0));
    // What the update saw of each: the moment of the first step.
    const auto moment = [&](DistributedAdam& opt, const char* name, float grad) {
      const HostView view(rank.place.device, rank.place.stream, opt.owned(name).exp_avg);
      for (const float value : view.span().as<float>()) {
        ASSERT_FLOAT_EQ(value, 0.1f * grad * report->clip_factor) << name;
      }
    };
    moment(dense, "d", 3);
    moment(experts, "e", 4);
  });
}

TEST_P(Chain, DividesAllGradientsByTheTokensOfItsFirstMember) {
  run_job({4, 2}, device(), [&](const ChainRank& rank) {
    Config config = chain_config();
    config.optimizer.grad_reduce = GradReduce::kTokens;
    config.optimizer.loss_scale = {};
    config.optimizer.clip_grad = 0;
    const std::vector<ParamSpec> specs = {spec("w", {300}, ParamFormat::kFp32)};
    DistributedAdam dense(specs, config, rank.dense, device());
    DistributedAdam experts(specs, config, rank.experts, device());
    test::set_all_initial(dense, specs, 0, rank.place.stream);
    test::set_all_initial(experts, specs, 0, rank.place.stream);
    OptimizerChain chain({{"dense", &dense}, {"experts", &experts}});
    chain.publish(rank.place.stream);
    EXPECT_TRUE(contains(thrown_message<ContractError>([&] { chain.step(rank.place.stream); }),
                         "called add_tokens() not once"));
    EXPECT_TRUE(contains(thrown_message<ContractError>([&] { experts.add_tokens(1); }),
                         "whose first member counts the tokens of all"));
    chain.add_tokens(5, rank.place.stream);
    for (DistributedAdam* opt : {&dense, &experts}) {
      const HostView grad(rank.place.device, rank.place.stream, opt->grad("w").data);
      std::ranges::fill(grad.span().as<float>(), opt == &dense ? 5.0f : 10.0f);
      grad.store();
    }
    const StepReport report = chain.step(rank.place.stream);
    EXPECT_EQ(report->tokens, 20);
    EXPECT_DOUBLE_EQ(report->param_norms[0].grad_norm, std::sqrt(300.0));
    EXPECT_DOUBLE_EQ(report->param_norms[1].grad_norm, std::sqrt(300.0));
    EXPECT_DOUBLE_EQ(report->grad_norm, std::sqrt(900.0));
  });
}

TEST_P(Chain, ThatSkipsTooOftenSaysWhichParamOnTheRanksThatHaveIt) {
  run_job({4, 2}, device(), [&](const ChainRank& rank) {
    Config config = chain_config();
    config.optimizer.max_consecutive_skips = 2;
    const std::vector<ParamSpec> specs = expert_specs(rank.part);
    DistributedAdam dense(dense_specs(), config, rank.dense, device());
    DistributedAdam experts(specs, config, rank.experts, device());
    test::set_all_initial(dense, dense_specs(), 0, rank.place.stream);
    test::set_all_initial(experts, specs, 0, rank.place.stream);
    OptimizerChain chain({{"dense", &dense}, {"experts", &experts}});
    chain.publish(rank.place.stream);
    const auto bad_step = [&] {
      write_grads(experts, specs, 2, 1, rank.place);
      return chain.step(rank.place.stream);
    };
    EXPECT_FALSE(bad_step()->taken);
    const std::string message = thrown_message<ContractError>([&] { static_cast<void>(*bad_step()); });
    EXPECT_TRUE(contains(message, "2 steps in a row were skipped"));
    EXPECT_TRUE(contains(
        message, rank.part == 1 ? "of param 'expert.1.bias'" : "on rank 1 of the model-parallel group"));
    if (device().kind == DeviceKind::kHost) return;
    // A report that nobody read is thrown 8 steps later, once.
    int thrown = 0;
    for (int step = 0; step < 12; ++step) {
      write_grads(experts, specs, step == 0 ? 2 : 0, 1, rank.place);
      try {
        chain.step(rank.place.stream);
      } catch (const ContractError& error) {
        EXPECT_TRUE(contains(error.what(), "in a row were skipped"));
        ++thrown;
      }
    }
    EXPECT_EQ(thrown, 2);  // the one that was read above, and the one after it
  });
}

TEST_P(Chain, IsRefusedWhereMembersCanNotDecideTogether) {
  struct Case {
    const char* text;
    std::function<void(Config&)> change;
  };
  const std::vector<Case> cases = {
      {"another optimizer.clip_grad than 'dense'", [](Config& c) { c.optimizer.clip_grad = 3; }},
      {"another optimizer.skip_norm", [](Config& c) { c.optimizer.skip_norm = 3; }},
      {"another optimizer.max_consecutive_skips", [](Config& c) { c.optimizer.max_consecutive_skips = 7; }},
      {"another optimizer.grad_reduce", [](Config& c) { c.optimizer.grad_reduce = GradReduce::kAverage; }},
      {"another optimizer.loss_scale.kind", [](Config& c) { c.optimizer.loss_scale = {}; }},
      {"another optimizer.loss_scale.initial", [](Config& c) { c.optimizer.loss_scale.initial = 2; }},
      {"another optimizer.loss_scale.hysteresis", [](Config& c) { c.optimizer.loss_scale.hysteresis = 9; }},
      {"norm_group 'head', which another member has too", [](Config& c) { c = dense_config(c); }},
  };
  for (const Case& c : cases) {
    run_job({2, 1}, device(), [&](const ChainRank& rank) {
      Config config = chain_config();
      c.change(config);
      const std::vector<ParamSpec> specs = {spec("head", {64})};
      DistributedAdam dense(dense_specs(), dense_config(chain_config()), rank.dense, device());
      DistributedAdam experts(specs, config, rank.experts, device());
      EXPECT_TRUE(contains(thrown_message<ContractError>([&] {
                             OptimizerChain({{"dense", &dense}, {"experts", &experts}});
                           }),
                           c.text));
    });
  }
}

TEST_P(Chain, MembersAreNamedOnceAndChainedOnce) {
  SelfCommunicator self(device());
  DistributedAdam a(dense_specs(), chain_config(), self, device());
  DistributedAdam b(dense_specs(), chain_config(), self, device());
  const auto message = [](std::vector<OptimizerChain::Member> members) {
    return thrown_message<ContractError>([&] { OptimizerChain chain(std::move(members)); });
  };
  EXPECT_TRUE(contains(message({}), "a chain of 0 optimizers; allowed are 1 to 8"));
  EXPECT_TRUE(contains(message({{"a", &a}, {"a", &b}}), "'a' is there twice"));
  EXPECT_TRUE(contains(message({{"a", &a}, {"b", &a}}), "is an optimizer of a chain already"));
  EXPECT_TRUE(contains(message({{"a", nullptr}}), "null pointer"));
  b.set_steps_taken(3);
  EXPECT_TRUE(contains(message({{"a", &a}, {"b", &b}}), "'b' has taken 3 steps, 'a' 0"));
  b.set_steps_taken(0);
  test::set_all_initial(a, dense_specs());
  test::set_all_initial(b, dense_specs());
  {
    OptimizerChain chain({{"a", &a}, {"b", &b}});
    EXPECT_TRUE(contains(message({{"b", &b}}), "is an optimizer of a chain already"));
    EXPECT_TRUE(contains(thrown_message<ContractError>([&] { chain.step(); }), "no weight was published"));
    chain.publish();
    for (const auto& call : std::vector<std::function<void()>>{[&] { a.step(); }, [&] { b.last_report(); },
                                                               [&] { b.set_steps_taken(1); }}) {
      EXPECT_TRUE(contains(thrown_message<ContractError>(call), "is one of a chain"));
    }
    chain.set_steps_taken(7);
    EXPECT_EQ(chain.step()->step, 8);
    EXPECT_EQ(b.steps_taken(), 8);
  }
  EXPECT_EQ(b.step()->step, 9) << "the chain is gone";
}

TEST_P(Chain, NeedsOneNumberOfRanksForAllMeans) {
  run_job({4, 2}, device(), [&](const ChainRank& rank) {
    Config config = chain_config();
    config.optimizer.grad_reduce = GradReduce::kAverage;
    const std::vector<ParamSpec> specs = expert_specs(rank.part);
    DistributedAdam dense(dense_specs(), config, rank.dense, device());
    DistributedAdam experts(specs, config, rank.experts, device());
    EXPECT_TRUE(contains(thrown_message<ContractError>([&] {
                           OptimizerChain({{"dense", &dense}, {"experts", &experts}});
                         }),
                         "'experts' has means over 2 ranks, 'dense' over 4"));
  });
}

TEST_P(Chain, OfTokensBeginsWithTheMemberThatAddsMostRanks) {
  run_job({4, 2}, device(), [&](const ChainRank& rank) {
    Config config = chain_config();
    config.optimizer.grad_reduce = GradReduce::kTokens;
    const std::vector<ParamSpec> specs = expert_specs(rank.part);
    DistributedAdam dense(dense_specs(), config, rank.dense, device());
    DistributedAdam experts(specs, config, rank.experts, device());
    EXPECT_TRUE(contains(thrown_message<ContractError>([&] {
                           OptimizerChain({{"experts", &experts}, {"dense", &dense}});
                         }),
                         "must be first"));
  });
}

TEST_P(Chain, AProblemOfOneRankIsAnErrorOnAll) {
  run_job({4, 2}, device(), [&](const ChainRank& rank) {
    const std::vector<ParamSpec> specs = expert_specs(rank.part);
    DistributedAdam dense(dense_specs(), chain_config(), rank.dense, device());
    DistributedAdam experts(specs, chain_config(), rank.experts, device());
    if (rank.all.rank() == 2) experts.set_steps_taken(5);
    EXPECT_TRUE(contains(thrown_message<ContractError>([&] {
                           OptimizerChain({{"dense", &dense}, {"experts", &experts}});
                         }),
                         rank.all.rank() == 2 ? "'experts' has taken 5 steps" : "on another rank"));
  });
}

TEST_P(Chain, GivesMembersTheCountersOfTheFirst) {
  SelfCommunicator self(device());
  Config config = chain_config();
  config.schedule.kind = ScheduleKind::kLinear;
  config.schedule.decay_steps = 100;
  const std::vector<ParamSpec> specs = {spec("w", {300}, ParamFormat::kFp32)};
  DistributedAdam first(specs, config, self, device()), other(specs, config, self, device());
  for (DistributedAdam* opt : {&first, &other}) {
    test::set_all_initial(*opt, specs);
    opt->publish();
  }
  // The other has skipped a step, so that it has more calls and another loss scale.
  for (int step = 0; step < 3; ++step) {
    const HostView grad(device(), {}, other.grad("w").data);
    test::write_values(grad.span(),
                       std::vector<float>(300, step == 1 ? std::numeric_limits<float>::infinity() : 1.0f));
    grad.store();
    static_cast<void>(*other.step());
  }
  first.set_steps_taken(2);  // its device has not been told yet
  OptimizerChain chain({{"first", &first}, {"other", &other}});
  for (int step = 3; step < 7; ++step) {
    const StepReport report = chain.step();
    EXPECT_TRUE(report->taken);
    EXPECT_EQ(report->step, step);
    EXPECT_EQ(report->calls, step - 2);
    EXPECT_EQ(other.steps_taken(), step);
    EXPECT_EQ(report->loss_scale, step < 6 ? 4096 : 8192);
  }
}

TEST_P(Chain, OfMembersOnOtherRanksIsRefusedOnEveryRank) {
  run_job({4, 2}, device(), [&](const ChainRank& rank) {
    const std::vector<ParamSpec> specs = expert_specs(rank.part);
    DistributedAdam dense(dense_specs(), chain_config(), rank.dense, device());
    DistributedAdam experts(specs, chain_config(), *rank.experts.data, device());
    const std::string message = thrown_message<ContractError>([&] {
      OptimizerChain({{"dense", &dense}, {"experts", &experts}});
    });
    EXPECT_TRUE(contains(message, "are not the same ranks ('dense' 4, 'experts' 2)"));
  });
}

TEST_P(Chain, RanksThatWereToldDifferentThingsAreFoundInWhicheverMember) {
  run_job({4, 2}, device(), [&](const ChainRank& rank) {
    const std::vector<ParamSpec> specs = expert_specs(rank.part);
    DistributedAdam dense(dense_specs(), chain_config(), rank.dense, device());
    DistributedAdam experts(specs, chain_config(), rank.experts, device());
    test::set_all_initial(dense, dense_specs(), 0, rank.place.stream);
    test::set_all_initial(experts, specs, 0, rank.place.stream);
    OptimizerChain chain({{"dense", &dense}, {"experts", &experts}});
    chain.publish(rank.place.stream);
    if (rank.all.rank() == 3) experts.set_lr("*", 0.5);
    const std::string message =
        thrown_message<ContractError>([&] { static_cast<void>(*chain.step(rank.place.stream)); });
    EXPECT_TRUE(contains(message, "hyper-parameters"));
    // On the host the ranks that share the member compare what they were told.
    if (device().kind == DeviceKind::kHost && rank.part == 1) {
      EXPECT_TRUE(contains(message, "0x1p-1"));
    }
    EXPECT_EQ(chain.steps_taken(), 0);
  });
}

}  // namespace
}  // namespace mxopt
