#include "mxopt/collectives/self_communicator.h"

#include <utility>

#include "mxopt/collectives/process_identity.h"

namespace mxopt {

namespace {

class SelfWork final : public Work::State {
 public:
  explicit SelfWork(Event event) : event_(std::move(event)) {}
  bool test() override { return event_.passed(); }
  void wait() override { event_.wait(); }
  void join(StreamRef stream) override { event_.join(stream); }

 private:
  Event event_;
};

}  // namespace

std::unique_ptr<Communicator> SelfCommunicator::split(int color, int) {
  MXOPT_CHECK(color >= 0, "split: color " << color << "; allowed are 0 and above");
  check_alive({.sequence = next_sequence(), .operation = "split", .stream = {}});
  return std::make_unique<SelfCommunicator>(device_);
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

void SelfCommunicator::copy(const Call& call, void* to, const void* from) const {
  if (to != from) copy_bytes(to, from, call.elems * dtype_bytes(call.dtype), device_, call.stream);
}

Work SelfCommunicator::work_of(const Call& call) const {
  if (device_.kind == DeviceKind::kHost) return {};
  Event event(device_);
  event.record(call.stream);
  return Work(std::make_shared<SelfWork>(std::move(event)));
}

// The sum, average or maximum over one rank is its value.

Work SelfCommunicator::do_all_reduce(const Call& call, void*) {
  check_alive(call);
  return work_of(call);
}

Work SelfCommunicator::do_reduce_scatter(const Call& call, void* shard, void* input) {
  check_alive(call);
  copy(call, shard, input);
  return work_of(call);
}

Work SelfCommunicator::do_all_gather(const Call& call, void* output, const void* shard) {
  check_alive(call);
  copy(call, output, shard);
  return work_of(call);
}

Work SelfCommunicator::do_all_to_all(const Call& call, void* output, const void* input) {
  check_alive(call);
  copy(call, output, input);
  return work_of(call);
}

Work SelfCommunicator::do_broadcast(const Call& call, void*) {
  check_alive(call);
  return work_of(call);
}

void SelfCommunicator::do_barrier(const Call& call) {
  check_alive(call);
}

}  // namespace mxopt
