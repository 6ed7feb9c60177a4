// N ranks in one process, one thread each: the transport of tests, and the definition of right results.
//
// A call is posted under its sequence number and returns. The rank that comes last checks that all ranks
// called the same, and performs the whole operation for all of them.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "mxopt/collectives/communicator.h"

namespace mxopt {

/// Destroying a communicator is leaving the group: calls that the others have open, and their later ones,
/// fail at once and name the rank that left. abort() reaches every group split off from the same
/// make_group(); it may be called from any thread. After a wait has thrown, no rank touches the buffers of
/// that call any more.
class ThreadCommunicator final : public Communicator {
 public:
  /// The communicators of ranks 0 .. size-1, each to be handed to its thread.
  static std::vector<std::unique_ptr<Communicator>> make_group(int size, double timeout_s);

  ~ThreadCommunicator() override;

  int rank() const override { return rank_; }
  int size() const override;
  Device device() const override { return {}; }
  std::string describe() const override;

  void group_begin() override {}
  void group_end() override {}
  std::unique_ptr<Communicator> split(int color, int key) override;
  void abort(const std::string& reason) noexcept override;
  Health health() override;
  std::shared_ptr<Allocator> window_allocator() override { return default_allocator(device()); }
  PeerWindow open_window(const Buffer& buffer) override;
  CopyRates measure_copy_rates() override { return {}; }

 protected:
  Work do_all_reduce(const Call& call, void* buffer) override;
  Work do_reduce_scatter(const Call& call, void* shard, void* input) override;
  Work do_all_gather(const Call& call, void* output, const void* shard) override;
  Work do_all_to_all(const Call& call, void* output, const void* input) override;
  Work do_broadcast(const Call& call, void* buffer) override;
  void do_barrier(const Call& call) override;

 private:
  struct Family;
  struct Seat;
  struct Post;
  struct Slot;
  class Group;
  class CallState;

  ThreadCommunicator(std::shared_ptr<Group> group, int rank);
  std::shared_ptr<CallState> post(const Call& call, void* out, const void* in, Seat seat);

  std::shared_ptr<Group> group_;
  int rank_;
};

}  // namespace mxopt
