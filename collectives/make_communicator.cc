#include "mxopt/collectives/make_communicator.h"

#include <sstream>
#include <string>
#include <utility>

#include "mxopt/collectives/self_communicator.h"
#include "mxopt/params/check.h"
#if MXOPT_WITH_MPI
#include "mxopt/collectives/mpi_communicator.h"
#endif
#if MXOPT_WITH_NCCL
#include "mxopt/collectives/nccl_communicator.h"
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

#if MXOPT_WITH_NCCL
std::unique_ptr<Communicator> make_nccl(const CommunicatorOptions& options) {
  if (options.device.kind != DeviceKind::kCuda) {
    throw ConfigError(
        "parallel.transport: nccl moves memory of CUDA devices, but the run is on the host; allowed are "
        "auto, self and mpi");
  }
  std::unique_ptr<Communicator> host;
  if (mpi_has_peers(options)) {
    host = make_mpi(options);
  } else {
    host = std::make_unique<SelfCommunicator>();
  }
  return NcclCommunicator::create(std::move(host), options.device, options.timeout_s);
}
#else
std::unique_ptr<Communicator> make_nccl(const CommunicatorOptions& options) {
  throw ConfigError("parallel.transport: " +
                    std::string(options.transport == Transport::kAuto
                                    ? "several ranks on CUDA devices need nccl"
                                    : "nccl was asked for") +
                    ", but this build has no NCCL transport; switch on MXOPT_WITH_NCCL");
}
#endif

std::unique_ptr<Communicator> make(const CommunicatorOptions& options) {
  const bool on_host = options.device.kind == DeviceKind::kHost;
  switch (options.transport) {
    case Transport::kAuto:
      if (mpi_has_peers(options)) return on_host ? make_mpi(options) : make_nccl(options);
      return std::make_unique<SelfCommunicator>(options.device);
    case Transport::kSelf:
      return std::make_unique<SelfCommunicator>(options.device);
    case Transport::kMpi:
      if (on_host) return make_mpi(options);
      throw ConfigError(
          "parallel.transport: mpi moves memory of the host, but the run is on a CUDA device; allowed are "
          "auto, self and nccl");
    case Transport::kNccl:
      return make_nccl(options);
  }
  throw ConfigError("parallel.transport: unknown value; allowed are auto, self, mpi and nccl");
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
    case Transport::kNccl:
      return "nccl";
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
