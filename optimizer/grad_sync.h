// When each bucket's gradients are reduced, and in which order.
//
// Reduce-scatters are issued in layout order on every rank, whatever the order of the ready() calls.
// Averaging over ranks happens inside the reduction, and nowhere else; a division by tokens happens in the
// update, and nowhere else.
#pragma once

#include <cstdint>
#include <vector>

#include "mxopt/collectives/communicator.h"
#include "mxopt/params/layout.h"
#include "mxopt/params/storage.h"

namespace mxopt {

class GradSync {
 public:
  /// The first three are borrowed.
  /// op  kAvg or kSum.
  GradSync(const Layout& layout, const ParamStorage& storage, Communicator& comm,
           ReduceOp op = ReduceOp::kAvg);
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
  void forget_events() { cleared_ = Event(storage_.device()); }
  /// Later work of `stream` waits until gradients may be written.
  void join_reset(StreamRef stream) const { cleared_.join(stream); }

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

  const Layout& layout_;
  const ParamStorage& storage_;
  Communicator& comm_;
  ReduceOp op_;
  std::vector<int> names_in_bucket_;  // params that count as members, ties included
  std::vector<int> ready_in_bucket_;
  std::vector<char> ready_now_;   // [params] in this micro-batch
  std::vector<char> ready_ever_;  // [params] since the last step
  std::vector<Writers> writers_;  // [buckets]
  std::vector<Work> works_;       // one for each issued bucket, in order
  Stream clear_stream_;
  Event updated_, cleared_;
  bool last_micro_batch_ = true;
  bool has_accumulating_ = false;
  int next_bucket_ = 0;
};

}  // namespace mxopt
