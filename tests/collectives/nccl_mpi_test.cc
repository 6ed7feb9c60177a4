// Run under mpirun, with a GPU per rank: what make_communicator() gives a trainer on GPUs.
#include <gtest/gtest.h>
#include <mpi.h>

#include "communicator_conformance.h"
#include "support/devices.h"
#include "support/host_over_device.h"
#include "support/run_mpi_tests.h"
#include "support/thrown_message.h"

#include "mxopt/collectives/make_communicator.h"

namespace mxopt {
namespace {

constexpr double kTimeoutS = 30;

/// One communicator for all cases, as it takes a while to make.
TEST(NcclOverMpi, AutoIsNcclOnGpusAndConforms) {
  int rank = 0;
  int size = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  MXOPT_SKIP_WITHOUT((Device{DeviceKind::kCuda, size - 1}));  // the same answer on every rank
  const Device device{DeviceKind::kCuda, rank};
  test::HostOverDevice comm(
      make_communicator({.device = device, .timeout_s = kTimeoutS, .world_size = size}));
  EXPECT_TRUE(test::contains(comm.describe(), size > 1 ? "nccl " : "self"));
  for (const test::ConformanceCase& conformance : test::communicator_conformance()) {
    SCOPED_TRACE(conformance.name);
    conformance.check(comm);
  }
}

}  // namespace
}  // namespace mxopt

int main(int argc, char** argv) {
  return mxopt::test::run_mpi_tests(argc, argv);
}
