// When each bucket's gradients are looked at and reduced, and in which order.
//
// Reduce-scatters are issued in layout order on every rank, whatever the order of the ready() calls.
// Averaging over ranks happens inside the reduction, and nowhere else; with replicas, where there is no one
// reduction, the gradients become sums. A division that is left, by ranks or tokens, happens in the update,
// and nowhere else.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "mxopt/collectives/communicator.h"
#include "mxopt/optimizer/grad_kernels.h"
#include "mxopt/params/layout.h"
#include "mxopt/params/storage.h"

namespace mxopt {

struct GradSyncOptions {
  ReduceOp op = ReduceOp::kAvg;  // or kSum
  /// Looks for NaN and infinity in every bucket before it is sent.
  bool checks = false;
  /// Has the ranks exchange their pieces and adds them here, in FP32 and in rank order, with one rounding:
  /// for transports that add in an order or a type of their own; over replicas once more. Takes the memory of
  /// the largest bucket.
  bool exchanges = false;
  /// Ranks that own the same shards, whose gradients are added to this one's; borrowed, null: none.
  Communicator* replicas = nullptr;
};

class GradSync {
 public:
  /// The first three are borrowed.
  /// allocator  of what the options need; null: the default one.
  GradSync(const Layout& layout, const ParamStorage& storage, Communicator& comm,
           const GradSyncOptions& options = {}, std::shared_ptr<Allocator> allocator = nullptr);
  /// Waits for the reductions in flight, since peers read this rank's gradients; drops their errors.
  ~GradSync();
  /// The host waits for them, and throws their errors.
  void wait();
  GradSync(const GradSync&) = delete;
  GradSync& operator=(const GradSync&) = delete;

  void begin_backward(bool last_micro_batch);
  /// Throws ContractError when the param was ready already in this micro-batch, or is frozen.
  void ready(int param, StreamRef stream);

  /// Issues what is left, waits for all: then the owned range of every bucket holds the reduced gradients.
  void finish(StreamRef stream);
  /// After the update: zeroes what accumulates, beside what follows on `stream`, and forgets who was ready.
  void reset(StreamRef stream);
  /// After a captured step: forgets its events, which nothing outside of the graph can wait for.
  void forget_events() {
    for (Event* event : {&cleared_, &summed_}) *event = Event(storage_.device());
  }
  /// Whether no param was ready since the last step.
  bool is_idle() const { return works_.empty() && std::ranges::find(ready_ever_, 1) == ready_ever_.end(); }
  /// Later work of `stream` waits until gradients may be written.
  void join_reset(StreamRef stream) const { cleared_.join(stream); }

  std::int64_t staging_bytes() const { return staging_.bytes(); }

  // What the look before the sending found, with checks. After finish() it is there on the stream.

  /// A byte for each of checked_params(): 1 where this rank's gradient was not finite.
  std::span<const std::uint8_t> local_status() const { return local_status_.as<std::uint8_t>(); }
  std::span<const int> checked_params() const { return checked_params_; }
  /// The status was copied on `stream`: buckets of the next step may be looked at.
  void note_reported(StreamRef stream) { reported_.record(stream); }

 private:
  /// The streams on which a bucket's gradients became final.
  struct Writers {
    std::vector<Event> left;  // recorded when another stream followed
    bool has_current = false;
    StreamRef current;
  };

  void note_writer(int bucket, StreamRef stream);
  /// Later work of `stream` waits for the bucket's gradients.
  void join_writers(int bucket, StreamRef stream);
  void issue_ready_buckets(StreamRef stream);
  void issue(int bucket, StreamRef stream);
  void check(int bucket, StreamRef stream);
  TypedSpan shard(int bucket) const;
  Work reduce(int bucket, StreamRef stream);
  /// Issues what shards that are reduced within this group still need. On the host only with `all`.
  void add_replicas(bool all);
  Work add_replicas_to(int bucket);
  GradTables make_tables(const std::shared_ptr<Allocator>& allocator);

  const Layout& layout_;
  const ParamStorage& storage_;
  Communicator& comm_;
  GradSyncOptions options_;
  std::vector<int> names_in_bucket_;  // params that count as members, ties included
  std::vector<int> ready_in_bucket_;
  std::vector<char> ready_now_;   // [params] in this micro-batch
  std::vector<char> ready_ever_;  // [params] since the last step
  std::vector<Writers> writers_;  // [buckets]
  std::vector<int> issued_;       // buckets, in order
  std::vector<Work> works_;       // [issued] within the group
  std::vector<Work> added_;       // [issued, as far as that is] over the replicas
  Stream clear_stream_;
  Event updated_, cleared_;
  std::vector<int> checked_params_;
  Buffer local_status_;
  std::unique_ptr<GradKernels> kernels_;  // null when no option needs them
  Buffer staging_;                        // what the ranks sent of one bucket
  Stream side_stream_;
  Event arrived_, summed_, reported_;
  bool last_micro_batch_ = true;
  bool has_accumulating_ = false;
  int next_bucket_ = 0;
};

}  // namespace mxopt
