// The one interface through which ranks exchange bytes.
//
// A communicator belongs to one thread of one rank. Every rank of the group calls the same operations with
// the same sizes, types and tags in the same order. Calls enqueue and return; the returned Work says when a
// call is complete, and until then the caller must not touch the buffers. An operation of zero elements is
// still a call of the group. Every wait ends at the deadline the communicator was made with, counted
// from the wait (for test(), from the first one), not from the call; a late, dead or
// desynchronised peer is a PeerError.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "mxopt/params/dtype.h"
#include "mxopt/params/memory.h"

namespace mxopt {

/// kSum and kAvg take fp32, bf16 and (kSum only) int64; kMax takes uint8.
/// Sums of fp32 and bf16 in reduce_scatter are taken in fp32, in rank order, and rounded once at the end;
/// kAvg divides that sum by size() before the rounding. So every host transport gives the same bits; what
/// NCCL does instead is said in nccl_communicator.h.
enum class ReduceOp { kSum, kAvg, kMax };

/// What a call's bytes are, for accounting.
enum class Traffic {
  kGradient,       // gradients of params
  kStatistics,     // sums of squares, flags
  kScales,         // the packed E8M0 bytes
  kPlanes,         // MXFP8 plane bytes
  kPlain,          // bf16 and fp32 params
  kHighPrecision,  // MXFP8 params in any other format
  kControl,        // agreement, barriers, digests
};
inline constexpr int kTrafficKinds = 7;

std::string_view op_name(ReduceOp op);
std::string_view traffic_name(Traffic traffic);

/// Handle of one asynchronous call. Copies share the call. A default handle is complete.
class Work {
 public:
  /// What a transport implements.
  class State {
   public:
    virtual ~State() = default;
    /// True when complete; makes progress; throws PeerError when the call failed or its deadline passed.
    virtual bool test() = 0;
    /// Host waits until complete. Throws as test().
    virtual void wait() = 0;
    /// Later work of `stream` waits; host transports wait here.
    virtual void join(StreamRef stream) = 0;
  };

  Work() = default;
  explicit Work(std::shared_ptr<State> state) : state_(std::move(state)) {}

  bool test() { return state_ == nullptr || state_->test(); }
  void wait() {
    if (state_ != nullptr) state_->wait();
  }
  void join(StreamRef stream) {
    if (state_ != nullptr) state_->join(stream);
  }

 private:
  std::shared_ptr<State> state_;
};

/// What a communicator knows of its own state.
struct Health {
  bool ok = true;
  std::string reason;            // empty when ok
  std::int64_t calls = 0;        // operations issued
  std::int64_t outstanding = 0;  // of these, not yet complete
};

/// A buffer of every rank of a group, as this rank's kernels can store into it while this object lives.
struct PeerWindow {
  std::vector<std::uint8_t*> bases;    // [size()] where each rank's buffer begins; empty: `reason` says why
  std::string reason;                  // equal on all ranks
  std::shared_ptr<void> registration;  // the transport's

  bool is_open() const { return !bases.empty(); }
};

/// Bytes per second of large copies, the least of any rank while all ranks copy. Zero: not known.
struct CopyRates {
  double to_peer = 0;       // stores of one rank into another's window
  double local = 0;         // read and written, inside of one rank's memory
  std::string reason = {};  // why they are not known; equal on all ranks
};

/// The interface. Arguments are checked once, here, before a transport sees them; bad ones are a
/// ContractError.
class Communicator {
 public:
  virtual ~Communicator() = default;
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  virtual int rank() const = 0;
  virtual int size() const = 0;
  /// Which memory the buffers must be in.
  virtual Device device() const = 0;
  /// Transport and place in plain words, for reports: "threads, rank 1 of 3".
  virtual std::string describe() const = 0;

  /// In place: every rank ends with the reduction of all buffers.
  Work all_reduce(TypedSpan buffer, ReduceOp op, Traffic traffic, StreamRef stream = {});
  /// shard [n], input [size() * n]: rank r gets the reduction of everyone's elements [r*n, (r+1)*n).
  /// `shard` may be exactly that range of `input` (in place); the rest of the input is left unspecified then.
  Work reduce_scatter(TypedSpan shard, TypedSpan input, ReduceOp op, Traffic traffic, StreamRef stream = {});
  /// shard [n], output [size() * n]: rank r's shard lands in [r*n, (r+1)*n) on every rank.
  /// `shard` may be exactly that range of `output` (in place).
  Work all_gather(TypedSpan output, ConstTypedSpan shard, Traffic traffic, StreamRef stream = {});
  /// input, output [size() * n]: rank r's elements [s*n, (s+1)*n) land in [r*n, (r+1)*n) of rank s. The two
  /// must not overlap.
  Work all_to_all(TypedSpan output, ConstTypedSpan input, Traffic traffic, StreamRef stream = {});
  /// Every rank ends with root's buffer.
  Work broadcast(TypedSpan buffer, int root, Traffic traffic, StreamRef stream = {});
  /// Host waits until every rank has come here.
  void barrier();

  /// Calls between begin and end may be merged by the transport into one launch; their Works are valid after
  /// end.
  virtual void group_begin() = 0;
  virtual void group_end() = 0;

  /// Collective: ranks of the same color (>= 0) form a group, ordered by (key, rank).
  virtual std::unique_ptr<Communicator> split(int color, int key) = 0;

  /// Local failure after messages began: makes the peers' waits fail instead of hang. Under MPI the job ends.
  virtual void abort(const std::string& reason) noexcept = 0;
  /// Moves on what is in flight, where a transport does so only while it is called; never waits.
  virtual Health health() = 0;

  /// Of memory that open_window() takes; null on transports without windows.
  virtual std::shared_ptr<Allocator> window_allocator() = 0;
  /// Collective, with buffers of equal size: lets every rank store into every other's buffer. Where that can
  /// not be, no rank has a window, and each learns the same reason. The buffer must outlive the window; close
  /// windows before the communicator. Stores are ordered by the group's calls alone: what a rank stored
  /// before it entered a reduction can be read by whoever has seen that reduction complete.
  virtual PeerWindow open_window(const Buffer& buffer) = 0;
  /// Collective: measures. Zeroes where there are no windows.
  virtual CopyRates measure_copy_rates() = 0;

 protected:
  Communicator() = default;

  /// One call as a transport gets it: arguments are checked, elems may be zero.
  struct Call {
    std::int64_t sequence = 0;
    /// "all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast"; "barrier", "split", "init",
    /// "close".
    std::string_view operation;
    DType dtype = DType::kUint8;
    std::int64_t elems = 0;        // of the shard where there is one, else of the buffer
    ReduceOp op = ReduceOp::kSum;  // reductions only
    int root = 0;                  // broadcast only
    Traffic traffic = Traffic::kControl;
    StreamRef stream = {};
    /// "reduce_scatter(avg, fp32 x 1024, gradient)".
    std::string signature() const;
  };

  virtual Work do_all_reduce(const Call& call, void* buffer) = 0;
  virtual Work do_reduce_scatter(const Call& call, void* shard, void* input) = 0;
  virtual Work do_all_gather(const Call& call, void* output, const void* shard) = 0;
  virtual Work do_all_to_all(const Call& call, void* output, const void* input) = 0;
  virtual Work do_broadcast(const Call& call, void* buffer) = 0;
  virtual void do_barrier(const Call& call) = 0;

  std::int64_t next_sequence() { return sequence_++; }
  std::int64_t issued() const { return sequence_; }

 private:
  std::int64_t sequence_ = 0;
};

}  // namespace mxopt
