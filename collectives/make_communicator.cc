#include "mxopt/collectives/make_communicator.h"

#include <sstream>

#include "mxopt/collectives/self_communicator.h"
#include "mxopt/params/check.h"
#if MXOPT_WITH_MPI
#include "mxopt/collectives/mpi_communicator.h"
#endif

namespace mxopt {

namespace {

#if MXOPT_WITH_MPI
MPI_Comm chosen_comm(const CommunicatorOptions& options) {
  return options.mpi_comm == nullptr ? MPI_COMM_WORLD : *static_cast<const MPI_Comm*>(options.mpi_comm);
}

bool mpi_has_peers(const CommunicatorOptions& options) {
  int initialized = 0;
  int finalized = 0;
  int size = 1;
  MPI_Initialized(&initialized);
  MPI_Finalized(&finalized);
  if (initialized == 0 || finalized != 0) return false;
  return MPI_Comm_size(chosen_comm(options), &size) == MPI_SUCCESS && size > 1;
}

std::unique_ptr<Communicator> make_mpi(const CommunicatorOptions& options) {
  return MpiCommunicator::dup(chosen_comm(options), options.timeout_s);
}
#else
bool mpi_has_peers(const CommunicatorOptions&) {
  return false;
}

std::unique_ptr<Communicator> make_mpi(const CommunicatorOptions&) {
  throw ConfigError(
      "parallel.transport: mpi was asked for, but this build has no MPI transport; allowed are auto and "
      "self; "
      "switch on MXOPT_WITH_MPI");
}
#endif

std::unique_ptr<Communicator> make(const CommunicatorOptions& options) {
  switch (options.transport) {
    case Transport::kAuto:
      if (mpi_has_peers(options)) return make_mpi(options);
      return std::make_unique<SelfCommunicator>();
    case Transport::kSelf:
      return std::make_unique<SelfCommunicator>();
    case Transport::kMpi:
      return make_mpi(options);
  }
  throw ConfigError("parallel.transport: unknown value; allowed are auto, self and mpi");
}

}  // namespace

std::string_view transport_name(Transport transport) {
  switch (transport) {
    case Transport::kAuto:
      return "auto";
    case Transport::kSelf:
      return "self";
    case Transport::kMpi:
      return "mpi";
  }
  return "?";
}

std::unique_ptr<Communicator> make_communicator(const CommunicatorOptions& options) {
  if (options.world_size < 0) {
    throw ConfigError("parallel.world_size: " + std::to_string(options.world_size) +
                      "; allowed are 0 (any) and above");
  }
  auto communicator = make(options);
  if (options.world_size != 0 && options.world_size != communicator->size()) {
    std::ostringstream text;
    text << "parallel.world_size: " << options.world_size << " was asked for, but transport "
         << transport_name(options.transport) << " has " << communicator->size() << " ("
         << communicator->describe() << ")";
    throw ConfigError(text.str());
  }
  return communicator;
}

}  // namespace mxopt
