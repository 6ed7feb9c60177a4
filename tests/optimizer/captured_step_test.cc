// A step in a CUDA graph.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include "support/captured_scenario.h"
#include "support/devices.h"
#include "support/optimizer_fixture.h"
#include "support/temporary_folder.h"
#include "support/thrown_message.h"

#include "mxopt/optimizer/checkpointer.h"
#include "mxopt/optimizer/optimizer_chain.h"

namespace mxopt {
namespace {

constexpr Device kCuda{DeviceKind::kCuda, 0};

TEST(CapturedStep, ReplaysGiveTheFactsOfTheHost) {
  MXOPT_SKIP_WITHOUT(kCuda);
  for (const Config& config : {test::mixed_config(), test::norms_config()}) {
    test::Scenario scenario = test::for_replays({});
    scenario.config = config;
    scenario.config.schedule.kind = ScheduleKind::kLinear;
    scenario.config.schedule.decay_steps = 12;
    std::int64_t taken = 0;
    const test::Facts expected =
        test::run_world(1, scenario, [&](const test::StepContext& now) { taken = now.record.step; });
    scenario.config.optimizer.check_grads = true;
    const Stream stream(kCuda);
    SelfCommunicator comm(kCuda), side;
    DistributedAdam opt(scenario.specs, scenario.config, comm, kCuda);
    EXPECT_TRUE(test::same_facts(
        expected, test::run_captured_scenario(opt, side, scenario, 0, 1, {kCuda, stream.ref()})));
    EXPECT_EQ(opt.steps_taken(), taken);
    EXPECT_EQ(taken == 17, config.optimizer.skip_norm == 0);
  }
}

TEST(CapturedStep, ReplaysDivideByTheTokensThatAreCountedWhenTheyRun) {
  MXOPT_SKIP_WITHOUT(kCuda);
  const Stream stream(kCuda);
  const auto native = static_cast<cudaStream_t>(stream.ref().native());
  SelfCommunicator comm(kCuda);
  const std::vector<ParamSpec> specs{test::spec("a", {64, 64})};
  Config config;
  config.optimizer.grad_reduce = GradReduce::kTokens;
  DistributedAdam opt(specs, config, comm, kCuda);
  test::set_all_initial(opt, specs, 0, stream.ref());
  opt.publish(stream.ref());
  const Buffer memory(8, kCuda, default_allocator(kCuda));
  const std::span<const std::int64_t> counter = memory.as<std::int64_t>();
  const auto count = [&](std::int64_t tokens) {
    copy_bytes(memory.data(), &tokens, 8, kCuda, stream.ref());
    synchronize(kCuda, stream.ref());
  };
  count(5);
  opt.add_tokens(counter, stream.ref());
  EXPECT_EQ(opt.step(stream.ref())->tokens, 5);
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  ASSERT_EQ(cudaStreamBeginCapture(native, cudaStreamCaptureModeThreadLocal), cudaSuccess);
  opt.add_tokens(counter, stream.ref());
  opt.step(stream.ref());
  cudaGraph_t captured = nullptr;
  ASSERT_EQ(cudaStreamEndCapture(native, &captured), cudaSuccess);
  cudaGraphExec_t graph = nullptr;
  ASSERT_EQ(cudaGraphInstantiate(&graph, captured, 0), cudaSuccess);
  EXPECT_EQ(cudaGraphDestroy(captured), cudaSuccess);
  for (const std::int64_t tokens : {std::int64_t{7}, std::int64_t{1} << 40, std::int64_t{0}}) {
    count(tokens);
    EXPECT_EQ(cudaGraphLaunch(graph, native), cudaSuccess);
    EXPECT_EQ(opt.last_report(stream.ref())->tokens, tokens);
  }
  EXPECT_EQ(cudaGraphExecDestroy(graph), cudaSuccess);
}

/// The state after six steps of a chain, the last four of them replays where asked for.
test::Facts run_chain(bool is_captured) {
  const Stream stream(kCuda);
  const auto native = static_cast<cudaStream_t>(stream.ref().native());
  const test::Place place{kCuda, stream.ref()};
  SelfCommunicator comm(kCuda), more(kCuda), side;
  const std::vector<ParamSpec> specs{test::spec("a", {64, 96}, ParamFormat::kMxfp8, Storage::kBoth)};
  const std::vector<ParamSpec> more_specs{test::spec("b", {330})};
  Config config;
  config.optimizer.clip_grad = 0.5;
  DistributedAdam first(specs, config, comm, kCuda), second(more_specs, config, more, kCuda);
  test::set_all_initial(first, specs, 0, stream.ref());
  test::set_all_initial(second, more_specs, 0, stream.ref());
  OptimizerChain chain({{"first", &first}, {"second", &second}});
  chain.publish(stream.ref());
  test::Facts facts;
  cudaGraphExec_t graph = nullptr;
  for (int step = 0; step < 6; ++step) {
    if (is_captured && step == 2) {
      EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
      cudaGraph_t captured = nullptr;
      EXPECT_EQ(cudaStreamBeginCapture(native, cudaStreamCaptureModeThreadLocal), cudaSuccess);
      const StepReport report = chain.step(stream.ref());
      EXPECT_EQ(cudaStreamEndCapture(native, &captured), cudaSuccess);
      EXPECT_THROW(*report, ContractError);
      EXPECT_EQ(cudaGraphInstantiate(&graph, captured, 0), cudaSuccess);
      EXPECT_EQ(cudaGraphDestroy(captured), cudaSuccess);
    }
    for (DistributedAdam* opt : {&first, &second}) {
      const std::string name = opt == &first ? "a" : "b";
      const test::HostView grad(kCuda, stream.ref(), opt->grad(name).data);
      test::write_values(grad.span(), test::grad_values(name, grad.span().elems, step));
      grad.store();
    }
    if (graph == nullptr) {
      chain.step(stream.ref());
    } else {
      EXPECT_EQ(cudaGraphLaunch(graph, native), cudaSuccess);
    }
    StepRecord record = *chain.last_report(stream.ref());
    EXPECT_EQ(record.step, step + 1);
    test::add_record_facts(facts, record, "step " + std::to_string(step) + ": ");
  }
  if (graph != nullptr) {
    EXPECT_EQ(cudaGraphExecDestroy(graph), cudaSuccess);
  }
  for (DistributedAdam* opt : {&first, &second}) {
    std::ranges::move(test::state_facts(*opt, side, "", place), std::back_inserter(facts));
  }
  return facts;
}

TEST(CapturedStep, OfAChainIsThatOfAllMembers) {
  MXOPT_SKIP_WITHOUT(kCuda);
  EXPECT_TRUE(test::same_facts(run_chain(false), run_chain(true)));
}

TEST(CapturedStep, ReplaysGoOnAroundSavesAndAfterALoad) {
  MXOPT_SKIP_WITHOUT(kCuda);
  const test::TemporaryFolder folder;
  const Stream stream(kCuda);
  const auto native = static_cast<cudaStream_t>(stream.ref().native());
  SelfCommunicator comm(kCuda);
  // Large enough that a copy of it takes longer than a step.
  const std::vector<ParamSpec> specs{test::spec("a", {4096, 8192}, ParamFormat::kMxfp8, Storage::kBoth)};
  Config config;
  config.schedule.kind = ScheduleKind::kLinear;
  config.schedule.decay_steps = 50;
  config.schedule.warmup_steps = 10;
  DistributedAdam opt(specs, config, comm, kCuda);
  test::set_all_initial(opt, specs, 0, stream.ref());
  opt.publish(stream.ref());
  CheckpointConfig saves;
  saves.dir = folder.path().string();
  saves.async = true;
  Checkpointer checkpoints(opt, saves);
  const auto fill = [&](int step) {
    std::vector<float> values(static_cast<std::size_t>(opt.grad("a").data.elems),
                              static_cast<float>(1 + step % 3));
    copy_bytes(opt.grad("a").data.data, values.data(), opt.grad("a").data.bytes(), kCuda, stream.ref());
  };
  const auto master = [&] {
    const std::span<float> owned = opt.owned("a").master;
    std::vector<float> values(owned.size());
    copy_bytes(values.data(), owned.data(), static_cast<std::int64_t>(owned.size_bytes()), kCuda,
               stream.ref());
    synchronize(kCuda, stream.ref());
    return values;
  };
  fill(0);
  static_cast<void>(*opt.step(stream.ref()));
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  ASSERT_EQ(cudaStreamBeginCapture(native, cudaStreamCaptureModeThreadLocal), cudaSuccess);
  opt.step(stream.ref());
  cudaGraph_t captured = nullptr;
  ASSERT_EQ(cudaStreamEndCapture(native, &captured), cudaSuccess);
  cudaGraphExec_t graph = nullptr;
  ASSERT_EQ(cudaGraphInstantiate(&graph, captured, 0), cudaSuccess);
  EXPECT_EQ(cudaGraphDestroy(captured), cudaSuccess);
  const auto replay = [&](int step) {
    fill(step);
    EXPECT_EQ(cudaGraphLaunch(graph, native), cudaSuccess);
  };
  for (int step = 1; step < 5; ++step) replay(step);
  // Nothing waits for the replays before the save, and the next one follows at once.
  checkpoints.save({}, stream.ref());
  replay(5);
  const std::vector<float> after = master();
  EXPECT_EQ(checkpoints.wait().folder.filename(), "step-00000005");
  for (int step = 6; step < 9; ++step) replay(step);
  // Back to step 5 beside the replays, and on with the same graph.
  EXPECT_EQ(checkpoints.load({}, stream.ref()).step, 5);
  replay(5);
  EXPECT_TRUE(test::bits_equal(after, master()));
  EXPECT_EQ(opt.last_report(stream.ref())->step, 6);
  EXPECT_EQ(cudaGraphExecDestroy(graph), cudaSuccess);
}

TEST(CapturedStep, WhatIsNotSentYetIsRefused) {
  MXOPT_SKIP_WITHOUT(kCuda);
  const Stream stream(kCuda);
  const auto native = static_cast<cudaStream_t>(stream.ref().native());
  SelfCommunicator comm(kCuda);
  const std::vector<ParamSpec> specs{test::spec("a", {64, 64})};
  DistributedAdam opt(specs, Config(), comm, kCuda);
  test::set_all_initial(opt, specs, 0, stream.ref());
  opt.publish(stream.ref());
  opt.step(stream.ref());
  opt.set_lr("*", 1e-3);
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  ASSERT_EQ(cudaStreamBeginCapture(native, cudaStreamCaptureModeThreadLocal), cudaSuccess);
  EXPECT_TRUE(test::contains(test::thrown_message<ContractError>([&] { opt.step(stream.ref()); }),
                             "changed hyper-parameters were not sent to the device yet"));
  cudaGraph_t captured = nullptr;
  ASSERT_EQ(cudaStreamEndCapture(native, &captured), cudaSuccess);
  EXPECT_EQ(cudaGraphDestroy(captured), cudaSuccess);
  EXPECT_TRUE(opt.step(stream.ref())->taken);
}

}  // namespace
}  // namespace mxopt
