// Picks the transport of a run over host memory.
#pragma once

#include <memory>
#include <string_view>

#include "mxopt/collectives/communicator.h"

namespace mxopt {

enum class Transport { kAuto, kSelf, kMpi };

std::string_view transport_name(Transport transport);

struct CommunicatorOptions {
  /// kAuto is MPI where it is built in, initialised and has more than one rank, else self. A trainer that
  /// forgot MPI_Init is alone then: world_size, or describe(), tells.
  Transport transport = Transport::kAuto;
  double timeout_s = 600;          // of every wait
  const void* mpi_comm = nullptr;  // address of the caller's MPI_Comm; null: MPI_COMM_WORLD
  int world_size = 0;              // ranks the run was configured for; 0: any
};

/// Throws ConfigError when the transport is not built in, or when it has not `world_size` ranks.
/// Collective when MPI is chosen.
std::unique_ptr<Communicator> make_communicator(const CommunicatorOptions& options);

}  // namespace mxopt
