#include "mxopt/collectives/host_exchange.h"

#include <vector>

#include <gtest/gtest.h>

#include "support/devices.h"
#include "support/run_ranks.h"

#include "mxopt/collectives/self_communicator.h"

namespace mxopt {
namespace {

void exchange_and_check(Communicator& comm) {
  const int rank = comm.rank();
  const int size = comm.size();
  std::vector<std::int64_t> sums{rank, 10 * rank};
  all_reduce_on_host(comm, std::span(sums), ReduceOp::kSum, Traffic::kControl);
  const std::int64_t triangle = size * (size - 1) / 2;
  EXPECT_EQ(sums, (std::vector<std::int64_t>{triangle, 10 * triangle}));

  const std::vector<std::uint8_t> own{static_cast<std::uint8_t>(rank), 7};
  std::vector<std::uint8_t> all(2 * static_cast<std::size_t>(size), 0xEE);
  all_gather_on_host(comm, std::span(all), std::span<const std::uint8_t>(own), Traffic::kControl);
  for (int r = 0; r < size; ++r) {
    EXPECT_EQ(all[2 * static_cast<std::size_t>(r)], r);
    EXPECT_EQ(all[2 * static_cast<std::size_t>(r) + 1], 7);
  }

  std::vector<std::uint8_t> text(5, static_cast<std::uint8_t>(rank == size - 1 ? 42 : 0xEE));
  broadcast_on_host(comm, std::span(text), size - 1, Traffic::kControl);
  EXPECT_EQ(text, std::vector<std::uint8_t>(5, 42));
}

TEST(HostExchange, ReducesGathersAndBroadcastsOverAHostTransport) {
  for (int size : {1, 3}) test::run_ranks(size, exchange_and_check);
}

TEST(HostExchange, GoesThroughTheDeviceWhereTheTransportIsThere) {
  const Device device{DeviceKind::kCuda, 0};
  MXOPT_SKIP_WITHOUT(device);
  SelfCommunicator comm(device);
  exchange_and_check(comm);
}

TEST(HostExchange, EmptyMessagesAreCallsToo) {
  test::run_ranks(2, [](Communicator& comm) {
    const std::int64_t before = comm.health().calls;
    all_reduce_on_host(comm, std::span<std::uint8_t>(), ReduceOp::kMax, Traffic::kControl);
    EXPECT_EQ(comm.health().calls, before + 1);
  });
}

}  // namespace
}  // namespace mxopt
