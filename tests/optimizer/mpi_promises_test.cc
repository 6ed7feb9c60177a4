// The same promises between processes: run by mpirun with 2, 3 and 4 ranks.
#include <algorithm>
#include <chrono>
#include <iostream>
#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>
#include <mpi.h>

#include "support/optimizer_fixture.h"
#include "support/run_mpi_tests.h"

#include "mxopt/collectives/mpi_communicator.h"
#include "mxopt/collectives/self_communicator.h"
#include "mxopt/collectives/traced_communicator.h"

namespace mxopt {
namespace {

using test::Facts;
using test::invariance_scenarios;
using test::run_scenario;
using test::same_facts;
using test::Scenario;
using test::StepContext;

constexpr double kTimeoutS = 60;

// MPI moves bytes only while it is called: the calls of grad_ready() have to be enough.
TEST(MpiPromises, ReductionsGoOnWhileTheBackwardPassRuns) {
  constexpr std::int64_t kElems = 1 << 19;
  constexpr int kSmallParams = 400;
  const auto comm = MpiCommunicator::dup(MPI_COMM_WORLD, kTimeoutS);
  std::vector<ParamSpec> specs;
  for (int i = 0; i < kSmallParams; ++i) {
    specs.push_back(test::spec("small" + std::to_string(i), {8}, ParamFormat::kFp32));
  }
  specs.push_back(test::spec("large", {kElems}, ParamFormat::kFp32));
  Config config;
  config.optimizer.bucket_elems = 1 << 17;  // "large" is alone, and first in the backward pass
  DistributedAdam opt(specs, config, *comm);
  test::set_all_initial(opt, specs);
  opt.publish();

  opt.begin_backward();
  const std::span<float> grad = opt.grad("large").data.as<float>();
  std::ranges::fill(grad, static_cast<float>(comm->rank()));
  opt.grad_ready("large");
  for (int i = kSmallParams - 1; i > 0; --i) {  // the last one is left to step()
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    opt.grad_ready("small" + std::to_string(i));
  }
  const OwnedSlice slice = opt.owned("large");
  const float mean = static_cast<float>(comm->size() - 1) / 2;
  for (std::size_t i = 0; i < slice.master.size(); ++i) {
    ASSERT_EQ(grad[static_cast<std::size_t>(slice.param_begin) + i], mean) << "element " << i;
  }
  EXPECT_TRUE(opt.step()->taken);
}

TEST(MpiPromises, EqualReducedGradientsGiveTheBitsOfOneProcess) {
  for (const auto& [name, scenario] : invariance_scenarios()) {
    SelfCommunicator self;
    const Facts expected = run_scenario(self, scenario);
    for (const std::int64_t bucket_elems : {0, 128, 1000}) {
      SCOPED_TRACE(std::string(name) + ", bucket limit " + std::to_string(bucket_elems));
      const auto comm = MpiCommunicator::dup(MPI_COMM_WORLD, kTimeoutS);
      Scenario other = scenario;
      other.config.optimizer.bucket_elems = bucket_elems;
      EXPECT_TRUE(same_facts(expected, run_scenario(*comm, other)));
    }
  }
}

TEST(MpiPromises, HybridShardingGivesTheBitsOfOneProcess) {
  const auto comm = MpiCommunicator::dup(MPI_COMM_WORLD, kTimeoutS);
  if (comm->size() == 3) GTEST_SKIP() << "means over 3 ranks are not exact";
  Scenario scenario;
  scenario.config = test::norms_config();
  SelfCommunicator self;
  const Facts expected = run_scenario(self, scenario);
  scenario.config.optimizer.bucket_elems = 1000;
  for (const int shard_ranks : {1, 2}) {
    scenario.shard_ranks = shard_ranks;
    EXPECT_TRUE(same_facts(expected, run_scenario(*comm, scenario)));
  }
}

TEST(MpiPromises, GatheredBytesAreASingleProcessQuantisationOfTheWholeMasters) {
  for (const GatherFormat format : {GatherFormat::kQuantized, GatherFormat::kBf16}) {
    const auto comm = MpiCommunicator::dup(MPI_COMM_WORLD, kTimeoutS);
    Scenario scenario;
    scenario.steps = 2;
    scenario.config.parallel.gather_format = format;
    run_scenario(*comm, scenario,
                 [](const StepContext& now) { test::expect_oracle_bytes(now.opt, now.side, false); });
  }
}

TEST(MpiPromises, OnePackedMaxPerStepAndTheSameCallsOnAllRanks) {
  const auto comm = MpiCommunicator::dup(MPI_COMM_WORLD, kTimeoutS);
  const auto side = comm->split(0, comm->rank());
  TracedCommunicator traced(*comm);
  traced.record_signatures();
  Scenario scenario;
  DistributedAdam opt(scenario.specs, scenario.config, traced);
  test::set_all_initial(opt, scenario.specs, comm->rank());
  opt.publish();
  for (int step = 0; step < 6; ++step) {
    const std::int64_t before = traced.counts(Traffic::kScales).operations;
    test::feed(opt, scenario, step, comm->rank(), comm->size());
    opt.step();
    EXPECT_EQ(traced.counts(Traffic::kScales).operations, before + 1);
  }
  EXPECT_EQ(traced.counts(Traffic::kHighPrecision).operations, 0);
  std::string text;
  for (const std::string& signature : traced.signatures()) text += signature + '\n';
  std::vector<std::int64_t> digests(static_cast<std::size_t>(comm->size()));
  const std::int64_t own[] = {static_cast<std::int64_t>(test::name_seed(text))};
  side->all_gather(std::span(digests), std::span<const std::int64_t>(own), Traffic::kControl).wait();
  for (const std::int64_t digest : digests) EXPECT_EQ(digest, own[0]);
}

TEST(MpiPromises, RanksThatDisagreeAllThrow) {
  const auto comm = MpiCommunicator::dup(MPI_COMM_WORLD, kTimeoutS);
  Config config;
  if (comm->rank() == 1) config.optimizer.lr = 0.5;
  EXPECT_THROW(DistributedAdam({test::spec("a", {32, 32})}, config, *comm), ContractError);
}

/// Ends the job: the other ranks are not coming back.
TEST(MpiLateRank, DISABLED_ThePeerErrorReachesTheTrainer) {
  const auto comm = MpiCommunicator::dup(MPI_COMM_WORLD, 2);
  Scenario scenario;
  DistributedAdam opt(scenario.specs, scenario.config, *comm);
  test::set_all_initial(opt, scenario.specs);
  opt.publish();
  if (comm->rank() == 2) std::this_thread::sleep_for(std::chrono::seconds(30));
  try {
    opt.step();
  } catch (const PeerError& error) {
    std::cerr << "caught by the trainer: " + std::string(error.what()) + '\n' << std::flush;
    std::this_thread::sleep_for(std::chrono::milliseconds(500));  // the others' turn to print
    MPI_Abort(MPI_COMM_WORLD, 3);
  }
}

}  // namespace
}  // namespace mxopt

int main(int argc, char** argv) {
  return mxopt::test::run_mpi_tests(argc, argv);
}
