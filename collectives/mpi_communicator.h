// The group of an MPI communicator, over host memory.
//
// Every operation is a non-blocking MPI call, in chunks that a 32-bit count can carry, polled against the
// deadline. Chunks of all calls go to MPI in call order, so that ranks agree on the order however they are
// polled. MPI moves data while some Work of the communicator is tested or waited for, and not otherwise.
//
// Sums of fp32 and bf16 are taken here, in rank order: the pieces of a chunk are exchanged into scratch
// memory and reduced on the host. reduce_scatter so receives what it reduces; all_reduce of fp32 and bf16
// receives size() times its buffer, and is meant for small ones. all_reduce of int64 and uint8 is MPI's own.
//
// After a PeerError, MPI may still read and write the buffers of the calls that are not complete: end the
// job, or keep the buffers until test() gives true. Late calls still complete when the late rank comes.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <mpi.h>

#include "mxopt/collectives/communicator.h"

namespace mxopt {

/// Ranks of one node see in a shared window which calls the others have issued. So a late rank of the own
/// node is named by its PeerError, and ranks of one node that call different operations get one in place of
/// wrong data. A rank that closes or destroys its communicator fails the calls that the others have open.
class MpiCommunicator final : public Communicator {
 public:
  static constexpr std::int64_t kDefaultChunkBytes = std::int64_t{256} << 20;

  /// Collective: makes a duplicate of `comm`, which stays the caller's. MPI must be initialised and is never
  /// finalized here; it must outlive the communicator. One chunk moves at most `chunk_bytes`, in 8 .. 2^30;
  /// all ranks give the same.
  static std::unique_ptr<MpiCommunicator> dup(MPI_Comm comm, double timeout_s,
                                              std::int64_t chunk_bytes = kDefaultChunkBytes);

  /// Closes, and drops the error. After a failed call nothing is given back to MPI, as that would wait for
  /// the peers.
  ~MpiCommunicator() override;

  /// Collective: completes all calls, then frees what MPI holds. Throws PeerError at the deadline.
  void close();

  int rank() const override;
  int size() const override;
  Device device() const override { return {}; }
  std::string describe() const override;

  void group_begin() override {}
  void group_end() override {}
  std::unique_ptr<Communicator> split(int color, int key) override;
  /// Ends the whole job with code 86, this rank included: MPI knows no smaller abort. Say `reason` before.
  void abort(const std::string& reason) noexcept override;
  Health health() override;
  std::shared_ptr<Allocator> window_allocator() override { return nullptr; }
  PeerWindow open_window(const Buffer&) override { return {{}, "MPI has no windows", nullptr}; }
  CopyRates measure_copy_rates() override { return {.reason = "MPI has no windows"}; }

 protected:
  Work do_all_reduce(const Call& call, void* buffer) override;
  Work do_reduce_scatter(const Call& call, void* shard, void* input) override;
  Work do_all_gather(const Call& call, void* output, const void* shard) override;
  Work do_all_to_all(const Call& call, void* output, const void* input) override;
  Work do_broadcast(const Call& call, void* buffer) override;
  void do_barrier(const Call& call) override;

 private:
  struct Posted;
  class Bulletin;
  struct Operation;
  class Engine;
  class OperationState;

  explicit MpiCommunicator(std::shared_ptr<Engine> engine);
  Work start(const Call& call, void* out, const void* in);

  std::shared_ptr<Engine> engine_;
};

}  // namespace mxopt
