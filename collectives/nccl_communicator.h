// The group of an NCCL communicator, over the memory of one GPU per rank.
//
// A call is put on a stream of the communicator's own, behind what the call's stream holds at that time. The
// host does not wait for the call's completion; it waits only until NCCL has put it on the stream, which for
// the first calls of a group means that the ranks connect, and so meet. Work::join(stream) is an event wait
// on the GPU; Work::wait() and test() ask an event and NCCL's own error state, and end at the deadline.
//
// Sums are NCCL's: in an order, and between ranks in the type, of its choice, and kAvg multiplies each rank's
// values by 1/size() before the sum. Over two ranks that gives the bits of the host transports, unless a
// halved value is subnormal. Calls of a group go to NCCL together, at group_end().
//
// When a rank is late or dead, NCCL reports nothing, or an error of its own that names no rank. The wait then
// ends by a PeerError without a culprit, the communicator is aborted on this rank, for which up to ten
// seconds are given, and every later call and wait is a PeerError at once. NCCL tells the other ranks
// nothing: each meets its own deadline. After a failure the calls that were open have undefined output. A
// call that NCCL or CUDA refuses here is a BackendError, and ends the communicator likewise.
//
// Graph capture: a call whose stream is being captured becomes part of the graph. The work must be joined to
// a captured stream before the capture ends, the host can neither test nor wait for it, and calls of one
// communicator are not mixed: while its stream is captured, all its calls must be, and barrier(), split() and
// close() are refused. All ranks capture the same calls. Use cudaStreamCaptureModeThreadLocal, and make the
// call once before the capture, so that connections are there. Before a graph is launched, its stream must
// have joined what was called outside of it, and the reverse. Destroy graphs before the communicator.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "mxopt/collectives/communicator.h"
#include "mxopt/collectives/rank_table.h"

/// What ncclComm_t points to.
struct ncclComm;

namespace mxopt {

/// Every rank of a group has a thread, and destroys its communicator in it: NCCL's destruction is collective
/// over the ranks of a host.
///
/// Communicators made here are non-blocking in NCCL's words. Where the user's NCCL_COMM_BLOCKING=1 overrides
/// that, describe() ends with "blocking": then, as with a blocking communicator of the caller, a thread that
/// is inside of NCCL while ranks connect can not be brought back; the deadline still ends waits for calls.
class NcclCommunicator final : public Communicator {
 public:
  /// Collective over `host`, any communicator with one rank per GPU: it carries NCCL's unique id and the
  /// agreement on versions and GPUs, and is not used later. Throws ConfigError, on every rank, when a rank
  /// has no such device, two ranks share a GPU or the versions of NCCL do not fit; PeerError at the deadline,
  /// which is also that of every later wait.
  static std::unique_ptr<NcclCommunicator> create(Communicator& host, Device device, double timeout_s);
  /// The same, keeping `host` as long as itself.
  static std::unique_ptr<NcclCommunicator> create(std::unique_ptr<Communicator> host, Device device,
                                                  double timeout_s);
  /// Of ranks that met over TCP: rank 0 hands rendezvous_payload() to all as the payload. That no two ranks
  /// share a GPU, and that versions fit, is left to NCCL; a rank that fails here alone is missed by the
  /// others at the deadline. Throws ContractError when the payload is none of rendezvous_payload(), else as
  /// above.
  static std::unique_ptr<NcclCommunicator> create(const RendezvousResult& rendezvous, Device device,
                                                  double timeout_s);
  /// For RendezvousOptions::make_payload: NCCL's unique id of a new group. Throws BackendError.
  static std::vector<std::uint8_t> rendezvous_payload();
  /// Takes over the caller's communicator: destroys or aborts it. When this throws, it is still the caller's.
  static std::unique_ptr<NcclCommunicator> adopt(ncclComm* comm, double timeout_s);
  /// Uses the caller's communicator, which must outlive it and is neither destroyed nor aborted here: after a
  /// PeerError abort it, since calls may still be running on the GPU.
  static std::unique_ptr<NcclCommunicator> borrow(ncclComm* comm, double timeout_s);

  /// Closes, and drops the error. After a failed call it aborts. Waits no longer than the deadline and a few
  /// seconds; what NCCL then still holds is not given back.
  ~NcclCommunicator() override;

  /// Collective: completes all calls and frees what NCCL holds. Throws PeerError at the deadline.
  void close();

  int rank() const override;
  int size() const override;
  Device device() const override;
  /// "nccl 2.28.9, rank 1 of 2 on cuda:1 (NVIDIA H200)".
  std::string describe() const override;

  void group_begin() override;
  void group_end() override;
  /// Waits for the calls that are open, as NCCL demands.
  std::unique_ptr<Communicator> split(int color, int key) override;
  /// Ends the calls of this rank. The others meet their deadlines, or see a network error before. Groups
  /// split off are not ended.
  void abort(const std::string& reason) noexcept override;
  Health health() override;
  /// ncclMemAlloc().
  std::shared_ptr<Allocator> window_allocator() override;
  /// Symmetric windows, from NCCL 2.28 on, where NCCL can map the memory of all ranks: in one NVLink domain.
  PeerWindow open_window(const Buffer& buffer) override;
  /// Each rank to the next one, all at the same time; once. For its time takes 256 MiB of the device.
  CopyRates measure_copy_rates() override;

 protected:
  Work do_all_reduce(const Call& call, void* buffer) override;
  Work do_reduce_scatter(const Call& call, void* shard, void* input) override;
  Work do_all_gather(const Call& call, void* output, const void* shard) override;
  Work do_all_to_all(const Call& call, void* output, const void* input) override;
  Work do_broadcast(const Call& call, void* buffer) override;
  void do_barrier(const Call& call) override;

 private:
  struct Posted;
  struct Batch;
  class EventPool;
  class Engine;
  class CallState;
  class Registration;

  NcclCommunicator(std::shared_ptr<Engine> engine, std::unique_ptr<Communicator> host);
  static std::unique_ptr<NcclCommunicator> of(ncclComm* comm, bool owned, double timeout_s);
  Work start(const Call& call, void* out, const void* in);
  template <class Body>
  auto or_abort(const Body& body);

  std::unique_ptr<Communicator> host_;  // kept only; null when it is the caller's
  std::shared_ptr<Engine> engine_;      // goes first
  std::optional<CopyRates> copy_rates_;
};

}  // namespace mxopt
