// Run under mpirun with 2 or 4 ranks, over which averages of equal gradients are exact: the optimizer over
// NCCL against the one on the host, in processes that may share a GPU.
//
// NCCL refuses two ranks on one GPU of a host. Each rank here says that it is on a host of its own, so that
// bytes go through sockets: slow, and every call is NCCL's.
#include <chrono>
#include <cstdlib>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>

#include <cuda_runtime.h>
#include <gtest/gtest.h>
#include <mpi.h>
#include <nccl.h>

#include "../collectives/communicator_conformance.h"
#include "support/captured_scenario.h"
#include "support/devices.h"
#include "support/host_over_device.h"
#include "support/inexact_gradients.h"
#include "support/optimizer_fixture.h"
#include "support/run_mpi_tests.h"

#include "mxopt/collectives/mpi_communicator.h"
#include "mxopt/collectives/nccl_communicator.h"
#include "mxopt/collectives/self_communicator.h"

namespace mxopt {
namespace {

constexpr double kTimeoutS = 60;

/// A communicator of all ranks, made as a trainer would make its own, and taken over.
std::unique_ptr<NcclCommunicator> all_ranks(Communicator& host, Device device, double timeout_s = kTimeoutS) {
  EXPECT_EQ(cudaSetDevice(device.index), cudaSuccess);
  ncclUniqueId id{};
  if (host.rank() == 0) {
    EXPECT_EQ(ncclGetUniqueId(&id), ncclSuccess);
  }
  MPI_Bcast(&id, sizeof(id), MPI_BYTE, 0, MPI_COMM_WORLD);
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  ncclComm_t comm = nullptr;
  ncclResult_t state = ncclCommInitRankConfig(&comm, host.size(), id, host.rank(), &config);
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(30);
  while (state == ncclInProgress && std::chrono::steady_clock::now() < end) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    EXPECT_EQ(ncclCommGetAsyncError(comm, &state), ncclSuccess);
  }
  if (state != ncclSuccess) throw std::runtime_error(std::string("NCCL: ") + ncclGetErrorString(state));
  return NcclCommunicator::adopt(comm, timeout_s);
}

class NcclTwin : public ::testing::Test {
 protected:
  void SetUp() override {
    MXOPT_SKIP_WITHOUT((Device{DeviceKind::kCuda, 0}));  // the same answer on every rank of a host
    int gpus = 0;
    ASSERT_EQ(cudaGetDeviceCount(&gpus), cudaSuccess);
    host_ = MpiCommunicator::dup(MPI_COMM_WORLD, kTimeoutS);
    device_ = {DeviceKind::kCuda, host_->rank() % gpus};
  }

  std::unique_ptr<Communicator> host_;
  Device device_;
};

TEST_F(NcclTwin, TheCommunicatorConforms) {
  test::HostOverDevice comm(all_ranks(*host_, device_));
  for (const test::ConformanceCase& conformance : test::communicator_conformance()) {
    // Over more than two ranks, order and type of NCCL's sums are its own.
    const bool is_about_sums =
        conformance.name == "SumsAreTakenInRankOrder" || conformance.name == "Bf16SumsRoundOnce";
    if (is_about_sums && comm.size() > 2) continue;
    SCOPED_TRACE(conformance.name);
    conformance.check(comm);
  }
}

TEST_F(NcclTwin, TwentyStepsGiveTheFactsOfOneRankOnTheHost) {
  const auto nccl = all_ranks(*host_, device_);
  for (const test::NamedScenario& named : test::invariance_scenarios()) {
    SCOPED_TRACE(named.name);
    SelfCommunicator self;
    const test::Facts expected = test::run_scenario(self, named.scenario);
    for (const std::int64_t bucket_elems : {0, 3000}) {
      test::Scenario other = named.scenario;
      other.config.optimizer.bucket_elems = bucket_elems;
      EXPECT_TRUE(test::same_facts(expected, test::run_scenario(*host_, other, {}, device_, nccl.get())));
    }
  }
}

TEST_F(NcclTwin, HybridShardingGivesTheFactsOfOneRankOnTheHost) {
  const auto nccl = all_ranks(*host_, device_);
  test::Scenario scenario;
  scenario.config = test::norms_config();
  SelfCommunicator self;
  const test::Facts expected = test::run_scenario(self, scenario);
  scenario.config.optimizer.bucket_elems = 3000;
  for (const GradReduction reduction : {GradReduction::kNative, GradReduction::kExchange}) {
    scenario.config.parallel.grad_reduction = reduction;
    for (const int shard_ranks : {1, 2}) {
      SCOPED_TRACE(shard_ranks);
      scenario.shard_ranks = shard_ranks;
      EXPECT_TRUE(test::same_facts(expected, test::run_scenario(*host_, scenario, {}, device_, nccl.get())));
    }
  }
}

TEST_F(NcclTwin, ExchangedGradientsGiveTheBitsOfTheHostTransports) {
  const auto nccl = all_ranks(*host_, device_);
  for (const DType dtype : {DType::kFp32, DType::kBf16}) {
    for (const GradReduce reduce : {GradReduce::kAverage, GradReduce::kSum}) {
      test::Scenario scenario;
      scenario.config.optimizer.grad_dtype = dtype;
      scenario.config.optimizer.grad_reduce = reduce;
      scenario.config.optimizer.bucket_elems = 3000;
      const test::Facts expected = test::run_inexact(*host_, scenario);
      scenario.config.optimizer.check_grads = true;
      scenario.config.parallel.grad_reduction = GradReduction::kExchange;
      EXPECT_TRUE(test::same_facts(expected, test::run_inexact(*host_, scenario, device_, nccl.get())));
    }
  }
}

TEST_F(NcclTwin, ReplaysOfACapturedStepGiveTheFactsOfOneRankOnTheHost) {
  test::Scenario scenario = test::for_replays({});
  SelfCommunicator self;
  const test::Facts expected = test::run_scenario(self, scenario);
  const auto nccl = all_ranks(*host_, device_);
  const auto side = host_->split(0, host_->rank());
  for (const GradReduction reduction : {GradReduction::kNative, GradReduction::kExchange}) {
    scenario.config.parallel.grad_reduction = reduction;
    scenario.config.optimizer.check_grads = reduction == GradReduction::kExchange;
    const Stream stream(device_);
    DistributedAdam opt(scenario.specs, scenario.config, *nccl, device_);
    EXPECT_TRUE(
        test::same_facts(expected, test::run_captured_scenario(opt, *side, scenario, host_->rank(),
                                                               host_->size(), {device_, stream.ref()})));
  }
}

// Here each rank is a host of its own for NCCL.
TEST_F(NcclTwin, RanksThatCanNotReachEachOthersMemoryGatherCollectively) {
  if (host_->size() == 1) GTEST_SKIP() << "needs a second rank";
  const auto nccl = all_ranks(*host_, device_);
  Config config;
  EXPECT_EQ(DistributedAdam(test::mixed_specs(), config, *nccl, device_).construction().gather,
            "collective (rank 0: only 1 of the " + std::to_string(host_->size()) +
                " ranks can reach each other's memory (one NVLink domain))");
  config.parallel.gather = GatherChoice::kDirect;
  const std::string text = test::thrown_message<ConfigError>(
      [&] { DistributedAdam(test::mixed_specs(), config, *nccl, device_); });
  EXPECT_NE(
      text.find("only 1 of the " + std::to_string(host_->size()) + " ranks can reach each other's memory"),
      std::string::npos)
      << text;
}

TEST_F(NcclTwin, ALateRankIsAnErrorAtTheDeadlineAndNothingHangs) {
  if (host_->size() == 1) GTEST_SKIP() << "needs a second rank";
  constexpr double kShortS = 5;
  const auto nccl = all_ranks(*host_, device_, kShortS);
  test::Scenario scenario;
  {
    const Stream stream(device_);
    const test::Place place{device_, stream.ref()};
    DistributedAdam opt(scenario.specs, scenario.config, *nccl, device_);
    test::set_all_initial(opt, scenario.specs, host_->rank(), place.stream);
    opt.publish(place.stream);
    test::feed(opt, scenario, 0, host_->rank(), host_->size(), place);
    EXPECT_TRUE(opt.step(place.stream)->taken);
    host_->barrier();
    if (host_->rank() != host_->size() - 1) {
      const auto begin = std::chrono::steady_clock::now();
      EXPECT_THROW(opt.step(place.stream)->taken, PeerError);
      EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(20));
      EXPECT_THROW(opt.step(place.stream), PeerError);
    }
    host_->barrier();
  }
  host_->barrier();
}

}  // namespace
}  // namespace mxopt

int main(int argc, char** argv) {
  const char* rank = std::getenv("OMPI_COMM_WORLD_RANK");
  setenv("NCCL_HOSTID", (std::string("rank-") + (rank == nullptr ? "0" : rank)).c_str(), 1);
  setenv("NCCL_SOCKET_IFNAME", "lo", 0);
  return mxopt::test::run_mpi_tests(argc, argv);
}
