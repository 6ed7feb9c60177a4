#include "mxopt/collectives/self_communicator.h"

#include <cstring>

#include "mxopt/collectives/process_identity.h"
#include "mxopt/collectives/rank_sum.h"

namespace mxopt {

std::unique_ptr<Communicator> SelfCommunicator::split(int color, int) {
  MXOPT_CHECK(color >= 0, "split: color " << color << "; allowed are 0 and above");
  check_alive({.sequence = next_sequence(), .operation = "split", .stream = {}});
  return std::make_unique<SelfCommunicator>();
}

void SelfCommunicator::abort(const std::string& reason) noexcept {
  if (!aborted_) reason_ = reason;
  aborted_ = true;
}

Health SelfCommunicator::health() {
  return {.ok = !aborted_, .reason = aborted_ ? "rank 0 aborted: " + reason_ : "", .calls = issued()};
}

void SelfCommunicator::check_alive(const Call& call) const {
  if (!aborted_) return;
  throw PeerError({.operation = call.signature(),
                   .sequence = call.sequence,
                   .rank = 0,
                   .culprit_rank = 0,
                   .host = host_name(),
                   .pid = process_id(),
                   .reason = "rank 0 aborted: " + reason_});
}

Work SelfCommunicator::do_all_reduce(const Call& call, void* buffer) {
  check_alive(call);
  const void* const piece = buffer;
  reduce_in_rank_order(buffer, {&piece, 1}, call.elems, call.dtype, call.op);
  return {};
}

Work SelfCommunicator::do_reduce_scatter(const Call& call, void* shard, void* input) {
  check_alive(call);
  const void* const piece = input;
  reduce_in_rank_order(shard, {&piece, 1}, call.elems, call.dtype, call.op);
  return {};
}

Work SelfCommunicator::do_all_gather(const Call& call, void* output, const void* shard) {
  check_alive(call);
  if (call.elems > 0 && output != shard) {
    std::memcpy(output, shard, static_cast<std::size_t>(call.elems * dtype_bytes(call.dtype)));
  }
  return {};
}

Work SelfCommunicator::do_broadcast(const Call& call, void*) {
  check_alive(call);
  return {};
}

void SelfCommunicator::do_barrier(const Call& call) {
  check_alive(call);
}

}  // namespace mxopt
