// Picks the transport of a run.
#pragma once

#include <memory>
#include <string_view>

#include "mxopt/collectives/communicator.h"

namespace mxopt {

enum class Transport { kAuto, kSelf, kMpi, kNccl };

std::string_view transport_name(Transport transport);

struct CommunicatorOptions {
  /// kAuto is self, unless MPI is built in, initialised and has more than one rank: then MPI on the host, and
  /// NCCL on a CUDA device. A trainer that forgot MPI_Init is alone then: world_size, or describe(), tells.
  /// kNccl, too, has the ranks of MPI where there are several, and else one.
  Transport transport = Transport::kAuto;
  Device device = {};              // whose memory the transport moves; on CUDA, each rank has its own
  double timeout_s = 600;          // of every wait
  const void* mpi_comm = nullptr;  // address of the caller's MPI_Comm; null: MPI_COMM_WORLD
  int world_size = 0;              // ranks the run was configured for; 0: any
};

/// Throws ConfigError when the transport is not built in, does not move memory of the device's kind, or has
/// not `world_size` ranks. Collective when MPI or NCCL is chosen.
std::unique_ptr<Communicator> make_communicator(const CommunicatorOptions& options);

}  // namespace mxopt
