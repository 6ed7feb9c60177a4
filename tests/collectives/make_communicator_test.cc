// Without MPI_Init in this process; mpi_communicator_test.cc has the cases with it.
#include "mxopt/collectives/make_communicator.h"

#include <gtest/gtest.h>

#include "support/thrown_message.h"

namespace mxopt {
namespace {

using test::contains;
using test::thrown_message;

TEST(MakeCommunicator, AutoAndSelfGiveOneRank) {
  for (Transport transport : {Transport::kAuto, Transport::kSelf}) {
    const auto comm = make_communicator({.transport = transport, .world_size = 1});
    EXPECT_EQ(comm->size(), 1);
    EXPECT_EQ(comm->describe(), "self, rank 0 of 1");
  }
}

TEST(MakeCommunicator, RefusesAnotherWorldSizeWithBothNumbers) {
  for (Transport transport : {Transport::kAuto, Transport::kSelf}) {
    const std::string message =
        thrown_message<ConfigError>([&] { make_communicator({.transport = transport, .world_size = 4}); });
    EXPECT_TRUE(contains(message, "parallel.world_size: 4 was asked for"));
    EXPECT_TRUE(contains(message, " has 1 (self, rank 0 of 1)"));
  }
  EXPECT_TRUE(contains(thrown_message<ConfigError>([] { make_communicator({.world_size = -1}); }),
                       "parallel.world_size: -1"));
}

TEST(MakeCommunicator, SaysWhatMpiNeeds) {
#ifdef MXOPT_TEST_HAS_MPI
  EXPECT_TRUE(
      contains(thrown_message<ContractError>([] { make_communicator({.transport = Transport::kMpi}); }),
               "MPI_Init_thread"));
#else
  EXPECT_TRUE(
      contains(thrown_message<ConfigError>([] { make_communicator({.transport = Transport::kMpi}); }),
               "this build has no MPI transport; allowed are auto and self; switch on MXOPT_WITH_MPI"));
#endif
}

TEST(MakeCommunicator, SaysWhatNcclNeeds) {
  const std::string on_host =
      thrown_message<ConfigError>([] { make_communicator({.transport = Transport::kNccl}); });
#ifdef MXOPT_TEST_HAS_NCCL
  EXPECT_EQ(on_host,
            "parallel.transport: nccl moves memory of CUDA devices, but the run is on the host; allowed are "
            "auto, self and mpi");
#else
  EXPECT_EQ(on_host,
            "parallel.transport: nccl was asked for, but this build has no NCCL transport; switch on "
            "MXOPT_WITH_NCCL");
#endif
}

TEST(MakeCommunicator, TheTransportMovesTheDevicesMemory) {
  const Device gpu{DeviceKind::kCuda, 3};
  for (Transport transport : {Transport::kAuto, Transport::kSelf}) {
    EXPECT_EQ(make_communicator({.transport = transport, .device = gpu})->device(), gpu);
  }
  EXPECT_EQ(
      thrown_message<ConfigError>([&] { make_communicator({.transport = Transport::kMpi, .device = gpu}); }),
      "parallel.transport: mpi moves memory of the host, but the run is on a CUDA device; allowed are "
      "auto, self and nccl");
}

TEST(MakeCommunicator, RefusesUnknownTransports) {
  EXPECT_TRUE(contains(
      thrown_message<ConfigError>([] { make_communicator({.transport = static_cast<Transport>(9)}); }),
      "allowed are auto, self, mpi and nccl"));
  EXPECT_EQ(transport_name(Transport::kAuto), "auto");
  EXPECT_EQ(transport_name(Transport::kSelf), "self");
  EXPECT_EQ(transport_name(Transport::kMpi), "mpi");
  EXPECT_EQ(transport_name(Transport::kNccl), "nccl");
  EXPECT_EQ(transport_name(static_cast<Transport>(9)), "?");
}

}  // namespace
}  // namespace mxopt
