// Alone on one GPU, and with a thread and a GPU per rank: NcclWorld and NcclWorldConformance need several.
#include "mxopt/collectives/nccl_communicator.h"

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include <cuda_runtime.h>
#include <gtest/gtest.h>
#include <nccl.h>

#include "communicator_conformance.h"
#include "support/devices.h"
#include "support/host_over_device.h"
#include "support/run_ranks.h"
#include "support/thrown_message.h"

#include "mxopt/collectives/make_communicator.h"
#include "mxopt/collectives/self_communicator.h"
#include "mxopt/collectives/tcp_rendezvous.h"

namespace mxopt {
namespace {

using test::communicator_conformance;
using test::ConformanceCase;
using test::contains;
using test::HostOverDevice;
using test::thrown_message;

constexpr double kTimeoutS = 30;
constexpr Device kGpu{DeviceKind::kCuda, 0};

Device gpu(int index) {
  return {DeviceKind::kCuda, index};
}

std::unique_ptr<NcclCommunicator> alone(double timeout_s = kTimeoutS) {
  SelfCommunicator host;
  return NcclCommunicator::create(host, kGpu, timeout_s);
}

/// Elements in device memory, with copies from and to the host that wait.
template <class T>
class OnDevice {
 public:
  OnDevice(Device device, const std::vector<T>& values)
      : elems_(static_cast<std::int64_t>(values.size())),
        stream_(device),
        memory_(elems_ * static_cast<std::int64_t>(sizeof(T)), device, default_allocator(device)) {
    copy_bytes(memory_.data(), values.data(), memory_.bytes(), device, stream_.ref());
    synchronize(device, stream_.ref());
  }

  TypedSpan span() const { return {memory_.data(), dtype_of<T>(), elems_}; }
  StreamRef stream() const { return stream_.ref(); }
  cudaStream_t native() const { return static_cast<cudaStream_t>(stream_.ref().native()); }
  std::vector<T> read() const {
    std::vector<T> values(static_cast<std::size_t>(elems_));
    copy_bytes(values.data(), memory_.data(), memory_.bytes(), memory_.device(), stream_.ref());
    synchronize(memory_.device(), stream_.ref());
    return values;
  }

 private:
  std::int64_t elems_;
  Stream stream_;
  Buffer memory_;
};

Work add_up(Communicator& comm, const OnDevice<std::int64_t>& values) {
  return comm.all_reduce(values.span(), ReduceOp::kSum, Traffic::kStatistics, values.stream());
}

/// What `enqueue` puts on the stream, as a graph that runs when it is launched.
class Graph {
 public:
  Graph(cudaStream_t stream, const std::function<void()>& enqueue) : stream_(stream) {
    cudaGraph_t graph = nullptr;
    EXPECT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
    enqueue();
    EXPECT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
    EXPECT_EQ(cudaGraphInstantiate(&executable_, graph, 0), cudaSuccess);
    EXPECT_EQ(cudaGraphDestroy(graph), cudaSuccess);
  }
  ~Graph() { EXPECT_EQ(cudaGraphExecDestroy(executable_), cudaSuccess); }
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;

  void launch() {
    EXPECT_EQ(cudaGraphLaunch(executable_, stream_), cudaSuccess);
    EXPECT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
  }

 private:
  cudaStream_t stream_;
  cudaGraphExec_t executable_ = nullptr;
};

// Without a GPU.

TEST(NcclCommunicator, IsRefusedOnEveryRankWhenOneHasNoGpu) {
  std::atomic<int> refused = 0;
  test::run_ranks(2, [&](Communicator& host) {
    const Device device = host.rank() == 1 ? Device{} : kGpu;
    const std::string message =
        thrown_message<ConfigError>([&] { NcclCommunicator::create(host, device, kTimeoutS); });
    if (host.rank() == 1) {
      EXPECT_EQ(message,
                "the NCCL transport was asked for on the host; it moves memory of CUDA devices only");
    } else if (test::why_not_usable(kGpu).empty()) {
      EXPECT_EQ(message,
                "rank 1 can not take part in NCCL: the NCCL transport was asked for on the host; "
                "it moves memory of CUDA devices only");
    } else {
      EXPECT_EQ(message, test::why_not_usable(kGpu));
    }
    ++refused;
  });
  EXPECT_EQ(refused, 2);
}

TEST(NcclCommunicator, RefusesNullCommunicators) {
  EXPECT_TRUE(contains(thrown_message<ContractError>([] { NcclCommunicator::adopt(nullptr, kTimeoutS); }),
                       "NcclCommunicator of a null communicator"));
  EXPECT_TRUE(contains(thrown_message<ContractError>([] { NcclCommunicator::borrow(nullptr, kTimeoutS); }),
                       "NcclCommunicator of a null communicator"));
  EXPECT_TRUE(contains(thrown_message<ContractError>([] {
                         NcclCommunicator::create(std::unique_ptr<Communicator>(), kGpu, kTimeoutS);
                       }),
                       "needs a host communicator"));
}

TEST(NcclCommunicator, RefusesAPayloadThatIsNoUniqueId) {
  const RendezvousResult rendezvous{.rank = 0, .ranks = {RankEntry{}}, .payload = {1, 2, 3}};
  EXPECT_TRUE(
      contains(thrown_message<ContractError>([&] { NcclCommunicator::create(rendezvous, kGpu, kTimeoutS); }),
               "payload of 3 bytes; NCCL's unique id has 128"));
}

// On one GPU.

TEST(NcclCommunicator, IsMadeOfThePayloadOfARendezvous) {
  MXOPT_SKIP_WITHOUT(kGpu);
  const RendezvousResult rendezvous{
      .rank = 0, .ranks = {RankEntry{}}, .payload = NcclCommunicator::rendezvous_payload()};
  const auto comm = NcclCommunicator::create(rendezvous, kGpu, kTimeoutS);
  EXPECT_EQ(comm->rank(), 0);
  EXPECT_EQ(comm->size(), 1);
  const OnDevice<std::int64_t> values(kGpu, {7});
  add_up(*comm, values).wait();
  EXPECT_EQ(values.read(), std::vector<std::int64_t>{7});
  comm->close();
}

class NcclConformance : public ::testing::TestWithParam<ConformanceCase> {};

TEST_P(NcclConformance, HoldsAlone) {
  MXOPT_SKIP_WITHOUT(kGpu);
  HostOverDevice comm(alone());
  GetParam().check(comm);
}

INSTANTIATE_TEST_SUITE_P(Communicator, NcclConformance, ::testing::ValuesIn(communicator_conformance()),
                         [](const auto& tested) { return tested.param.name; });

class NcclCommunicatorTest : public ::testing::Test {
 protected:
  void SetUp() override { MXOPT_SKIP_WITHOUT(kGpu); }
};

TEST_F(NcclCommunicatorTest, DescribesVersionPlaceAndGpu) {
  int version = 0;
  ASSERT_EQ(ncclGetVersion(&version), ncclSuccess);
  const std::string text = alone()->describe();
  EXPECT_TRUE(contains(text, "nccl " + std::to_string(version / 10000) + "." +
                                 std::to_string(version % 10000 / 100) + "." + std::to_string(version % 100) +
                                 ", rank 0 of 1 on cuda:0 ("));
  EXPECT_EQ(text.back(), ')') << text;
  EXPECT_EQ(alone()->device(), kGpu);
}

TEST_F(NcclCommunicatorTest, TwoRanksOnOneGpuAreRefusedOnBoth) {
  std::atomic<int> refused = 0;
  test::run_ranks(2, [&](Communicator& host) {
    const std::string message =
        thrown_message<ConfigError>([&] { NcclCommunicator::create(host, kGpu, kTimeoutS); });
    EXPECT_TRUE(contains(message, "ranks 0 and 1 are both on the GPU with PCI bus id "));
    EXPECT_TRUE(contains(message, "(cuda:0 and cuda:0); NCCL needs a GPU of its own for every rank"));
    ++refused;
  });
  EXPECT_EQ(refused, 2);
}

TEST_F(NcclCommunicatorTest, RefusesBadTimeouts) {
  EXPECT_TRUE(contains(thrown_message<ContractError>([] { alone(0); }), "timeout of 0 s"));
}

TEST_F(NcclCommunicatorTest, IsPickedByItsName) {
  const auto comm = make_communicator({.transport = Transport::kNccl, .device = kGpu, .world_size = 1});
  EXPECT_TRUE(contains(comm->describe(), "nccl "));
  comm->barrier();
}

TEST_F(NcclCommunicatorTest, ACallComesAfterItsStreamAndBeforeWhatJoins) {
  const auto comm = alone();
  constexpr std::int64_t kElems = 1 << 22;
  const OnDevice<std::uint8_t> from(kGpu, std::vector<std::uint8_t>(kElems, 1));
  const OnDevice<std::uint8_t> to(kGpu, std::vector<std::uint8_t>(kElems, 0xEE));
  for (int round = 0; round < 20; ++round) {
    ASSERT_EQ(cudaMemsetAsync(from.span().data, round, kElems, from.native()), cudaSuccess);
    Work work = comm->all_gather(to.span(), from.span(), Traffic::kPlanes, from.stream());
    work.join(from.stream());  // the next round writes what this one reads
    work.join(to.stream());
    const std::vector<std::uint8_t> found = to.read();
    ASSERT_EQ(found.front(), round);
    ASSERT_EQ(found.back(), round);
    EXPECT_TRUE(work.test());
  }
}

TEST_F(NcclCommunicatorTest, CallsOfAGroupAreValidAfterItsEnd) {
  const auto comm = alone();
  const OnDevice<std::int64_t> values(kGpu, {1, 2});
  comm->group_begin();
  Work work = add_up(*comm, values);
  EXPECT_TRUE(contains(thrown_message<ContractError>([&] { work.test(); }),
                       "all_reduce(sum, int64 x 2, statistics): its Work is valid after group_end()"));
  EXPECT_THROW(work.wait(), ContractError);
  EXPECT_THROW(work.join(values.stream()), ContractError);
  EXPECT_TRUE(contains(thrown_message<ContractError>([&] { comm->group_begin(); }), "twice"));
  EXPECT_TRUE(contains(thrown_message<ContractError>([&] { comm->barrier(); }),
                       "barrier() between group_begin() and group_end()"));
  EXPECT_THROW(comm->split(0, 0), ContractError);
  comm->group_end();
  work.wait();
  EXPECT_TRUE(contains(thrown_message<ContractError>([&] { comm->group_end(); }), "without a group_begin()"));
  comm->group_begin();
  comm->group_end();
  EXPECT_EQ(comm->health().outstanding, 0);
}

TEST_F(NcclCommunicatorTest, EveryCallFailsAfterAbort) {
  const auto comm = alone();
  const OnDevice<std::int64_t> values(kGpu, {1});
  Work complete = add_up(*comm, values);
  complete.wait();
  comm->abort("disk full");
  comm->abort("a second reason");
  EXPECT_TRUE(complete.test());
  const std::string message = thrown_message<PeerError>([&] { add_up(*comm, values); });
  EXPECT_TRUE(contains(message, "all_reduce(sum, int64 x 1, statistics) #1 on rank 0"));
  EXPECT_TRUE(contains(message, "rank 0 aborted: disk full; culprit rank 0"));
  EXPECT_THROW(comm->barrier(), PeerError);
  EXPECT_THROW(comm->split(0, 0), PeerError);
  EXPECT_THROW(comm->group_begin(), PeerError);
  EXPECT_THROW(comm->close(), PeerError);
  EXPECT_FALSE(comm->health().ok);
  EXPECT_EQ(comm->health().reason, "rank 0 aborted: disk full");
}

TEST_F(NcclCommunicatorTest, WorksOutliveTheirCommunicator) {
  auto comm = alone();
  const OnDevice<std::int64_t> values(kGpu, {7});
  Work work = add_up(*comm, values);
  comm->close();
  comm->close();
  EXPECT_TRUE(contains(thrown_message<ContractError>([&] { comm->barrier(); }), "after close()"));
  comm.reset();
  work.wait();
  EXPECT_TRUE(work.test());
  work.join(values.stream());
  EXPECT_EQ(values.read(), std::vector<std::int64_t>{7});
}

TEST_F(NcclCommunicatorTest, ABorrowedCommunicatorStaysTheCallers) {
  ncclComm_t comm = nullptr;
  const int device = 0;
  ASSERT_EQ(ncclCommInitAll(&comm, 1, &device), ncclSuccess);
  const OnDevice<std::int64_t> values(kGpu, {7});
  for (int time = 0; time < 2; ++time) {
    const auto borrowed = NcclCommunicator::borrow(comm, kTimeoutS);
    EXPECT_EQ(borrowed->size(), 1);
    add_up(*borrowed, values).wait();
    borrowed->split(0, 0)->barrier();
  }
  NcclCommunicator::borrow(comm, kTimeoutS)->abort("of this use only");
  int count = 0;
  EXPECT_EQ(ncclCommCount(comm, &count), ncclSuccess);
  const auto adopted = NcclCommunicator::adopt(comm, kTimeoutS);
  adopted->barrier();
  EXPECT_NO_THROW(adopted->close());
}

TEST_F(NcclCommunicatorTest, CallsCanBeCapturedIntoAGraph) {
  const auto comm = alone();
  const OnDevice<float> from(kGpu, {1, 2, 3});
  const OnDevice<float> to(kGpu, {0, 0, 0});
  comm->all_gather(to.span(), from.span(), Traffic::kPlain, from.stream()).wait();
  ASSERT_EQ(cudaMemsetAsync(to.span().data, 0, 12, to.native()), cudaSuccess);
  ASSERT_EQ(cudaStreamSynchronize(to.native()), cudaSuccess);
  Work captured;
  Graph graph(from.native(), [&] {
    captured = comm->all_gather(to.span(), from.span(), Traffic::kPlain, from.stream());
    captured.join(from.stream());
    EXPECT_THROW(captured.test(), ContractError);
    EXPECT_TRUE(contains(thrown_message<ContractError>([&] { comm->barrier(); }),
                         "barrier() while calls of the communicator are being captured into a graph"));
    EXPECT_TRUE(contains(thrown_message<ContractError>(
                             [&] { comm->all_gather(to.span(), from.span(), Traffic::kPlain, to.stream()); }),
                         "capture all or none"));
    EXPECT_EQ(comm->health().outstanding, 0);
  });
  EXPECT_EQ(to.read(), (std::vector<float>{0, 0, 0})) << "captured, not run";
  graph.launch();
  EXPECT_EQ(to.read(), (std::vector<float>{1, 2, 3}));
  comm->barrier();
  EXPECT_TRUE(comm->health().ok);
}

// A GPU per rank.

/// Empty when there are so many GPUs, else why not.
std::string why_not(int gpus) {
  for (int index = 0; index < gpus; ++index) {
    const std::string reason = test::why_not_usable(gpu(index));
    if (!reason.empty()) return "needs " + std::to_string(gpus) + " GPUs: " + reason;
  }
  return "";
}

#define MXOPT_SKIP_WITHOUT_GPUS(count)                       \
  do {                                                       \
    const std::string mxopt_reason = why_not(count);         \
    if (!mxopt_reason.empty()) GTEST_SKIP() << mxopt_reason; \
  } while (false)

class NcclWorldConformance : public ::testing::TestWithParam<std::tuple<ConformanceCase, int>> {};

TEST_P(NcclWorldConformance, Holds) {
  const auto& [conformance, size] = GetParam();
  MXOPT_SKIP_WITHOUT_GPUS(size);
  if (size > 2 &&
      (conformance.name == "SumsAreTakenInRankOrder" || conformance.name == "Bf16SumsRoundOnce")) {
    GTEST_SKIP() << "order and type of NCCL's sums are its own";
  }
  test::run_ranks(size, [&, &check = conformance.check](Communicator& host) {
    HostOverDevice comm(NcclCommunicator::create(host, gpu(host.rank()), kTimeoutS));
    check(comm);
  });
}

INSTANTIATE_TEST_SUITE_P(Communicator, NcclWorldConformance,
                         ::testing::Combine(::testing::ValuesIn(communicator_conformance()),
                                            ::testing::Values(2, 4)),
                         [](const auto& tested) {
                           return std::get<0>(tested.param).name + std::to_string(std::get<1>(tested.param));
                         });

/// Checks that the communicator gives PeerErrors at once, whatever is called.
void expect_out_of_use(NcclCommunicator& comm, const OnDevice<std::int64_t>& values) {
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_THROW(add_up(comm, values), PeerError);
  EXPECT_THROW(comm.barrier(), PeerError);
  EXPECT_THROW(comm.split(0, 0), PeerError);
  EXPECT_THROW(comm.close(), PeerError);
  EXPECT_FALSE(comm.health().ok);
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(1));
}

TEST(NcclWorld, ARankThatDoesNotComeEndsTheOthersWaits) {
  MXOPT_SKIP_WITHOUT_GPUS(2);
  constexpr double kShortS = 5;
  std::atomic<bool> checked = false;
  test::run_ranks(2, [&](Communicator& host) {
    const auto comm = NcclCommunicator::create(host, gpu(host.rank()), kShortS);
    const OnDevice<std::int64_t> values(gpu(host.rank()), {1});
    comm->barrier();
    if (host.rank() == 1) {
      while (!checked) std::this_thread::yield();
      return;
    }
    Work work = add_up(*comm, values);
    try {
      work.wait();
      ADD_FAILURE() << "nothing was thrown";
    } catch (const PeerError& error) {
      EXPECT_EQ(error.failure().operation, "all_reduce(sum, int64 x 1, statistics)");
      EXPECT_EQ(error.failure().sequence, 1);
      EXPECT_EQ(error.failure().rank, 0);
      EXPECT_EQ(error.failure().culprit_rank, -1);
      EXPECT_GE(error.failure().elapsed_ms, 1000 * kShortS);
      EXPECT_LT(error.failure().elapsed_ms, 1000 * kShortS + 2000);
      EXPECT_TRUE(contains(error.what(), "not complete within 5 s"));
      EXPECT_TRUE(contains(error.what(), "the communicator is aborted"));
    }
    EXPECT_THROW(work.wait(), PeerError);
    EXPECT_THROW(work.test(), PeerError);
    EXPECT_THROW(work.join(values.stream()), PeerError);
    EXPECT_EQ(comm->health().outstanding, 1);
    expect_out_of_use(*comm, values);
    checked = true;
  });
}

TEST(NcclWorld, RanksThatMetOverTcpMakeAGroup) {
  MXOPT_SKIP_WITHOUT_GPUS(2);
  const auto run = [](int rank, int port, const std::function<void(int)>& on_listening) {
    RendezvousOptions options;
    options.rank = rank;
    options.world = 2;
    options.address = "127.0.0.1";
    options.port = port;
    options.timeout_s = kTimeoutS;
    options.make_payload = [] { return NcclCommunicator::rendezvous_payload(); };
    options.on_listening = on_listening;
    const auto group = TcpRendezvous::join(options);
    const auto comm = NcclCommunicator::create(group->result(), gpu(rank), kTimeoutS);
    const OnDevice<std::int64_t> values(gpu(rank), {1 + rank});
    add_up(*comm, values).wait();
    EXPECT_EQ(values.read(), std::vector<std::int64_t>{3});
    comm->close();
  };
  std::thread other;
  run(0, 0, [&](int port) { other = std::thread(run, 1, port, nullptr); });
  other.join();
}

TEST(NcclWorld, AnAbortEndsTheOtherRanksFirstCallAtItsDeadline) {
  MXOPT_SKIP_WITHOUT_GPUS(2);
  constexpr double kShortS = 5;
  std::atomic<bool> checked = false;
  test::run_ranks(2, [&](Communicator& host) {
    const auto comm = NcclCommunicator::create(host, gpu(host.rank()), kShortS);
    const OnDevice<std::int64_t> values(gpu(host.rank()), {1});
    if (host.rank() == 1) {
      comm->abort("kernel launch failed");
      expect_out_of_use(*comm, values);
      while (!checked) std::this_thread::yield();
      return;
    }
    const auto begin = std::chrono::steady_clock::now();
    EXPECT_THROW(add_up(*comm, values).wait(), PeerError);  // the ranks would meet in the first call
    EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(20));
    expect_out_of_use(*comm, values);
    checked = true;
  });
}

TEST(NcclWorld, TheDeadlineIsThatOfTheWaitNotOfTheCall) {
  MXOPT_SKIP_WITHOUT_GPUS(2);
  constexpr double kShortS = 5;
  test::run_ranks(2, [&](Communicator& host) {
    const auto comm = NcclCommunicator::create(host, gpu(host.rank()), kShortS);
    const OnDevice<std::int64_t> values(gpu(host.rank()), {host.rank() + 1});
    comm->barrier();
    if (host.rank() == 1) std::this_thread::sleep_for(std::chrono::milliseconds(7000));
    Work work = add_up(*comm, values);
    if (host.rank() == 0) std::this_thread::sleep_for(std::chrono::milliseconds(6000));  // it computes
    EXPECT_NO_THROW(work.wait());
    EXPECT_EQ(values.read(), std::vector<std::int64_t>{3});
  });
}

TEST(NcclWorld, CapturedCallsRunWithEveryLaunch) {
  MXOPT_SKIP_WITHOUT_GPUS(2);
  test::run_ranks(2, [&](Communicator& host) {
    const Device device = gpu(host.rank());
    ASSERT_EQ(cudaSetDevice(device.index), cudaSuccess);
    const auto comm = NcclCommunicator::create(host, device, kTimeoutS);
    const OnDevice<std::int64_t> values(device, {1});
    add_up(*comm, values).wait();
    {
      Graph graph(values.native(), [&] { add_up(*comm, values).join(values.stream()); });
      EXPECT_EQ(values.read(), std::vector<std::int64_t>{2});
      graph.launch();
      graph.launch();
      EXPECT_EQ(values.read(), std::vector<std::int64_t>{8});
    }
    add_up(*comm, values).wait();
    EXPECT_EQ(values.read(), std::vector<std::int64_t>{16});
    EXPECT_NO_THROW(comm->close());
  });
}

}  // namespace
}  // namespace mxopt
