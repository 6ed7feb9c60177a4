#include "mxopt/collectives/traced_communicator.h"

#include <utility>

namespace mxopt {

TracedCommunicator::TracedCommunicator(Communicator& inner)
    : inner_(inner), trace_(std::make_shared<Trace>()) {}

TracedCommunicator::TracedCommunicator(std::unique_ptr<Communicator> inner, std::shared_ptr<Trace> trace)
    : owned_(std::move(inner)), inner_(*owned_), trace_(std::move(trace)) {}

TrafficCounts TracedCommunicator::counts(Traffic traffic) const {
  TrafficCounts sum;
  for (const auto& [operation, counts] : trace_->counts[static_cast<std::size_t>(traffic)]) {
    sum.operations += counts.operations;
    sum.bytes += counts.bytes;
  }
  return sum;
}

TrafficCounts TracedCommunicator::counts(Traffic traffic, std::string_view operation) const {
  const auto& of_traffic = trace_->counts[static_cast<std::size_t>(traffic)];
  const auto found = of_traffic.find(operation);
  return found == of_traffic.end() ? TrafficCounts() : found->second;
}

TrafficCounts TracedCommunicator::total() const {
  TrafficCounts sum;
  for (int kind = 0; kind < kTrafficKinds; ++kind) {
    const TrafficCounts of_kind = counts(static_cast<Traffic>(kind));
    sum.operations += of_kind.operations;
    sum.bytes += of_kind.bytes;
  }
  return sum;
}

void TracedCommunicator::record_signatures() {
  trace_->recording = true;
}

const std::vector<std::string>& TracedCommunicator::signatures() const {
  return trace_->signatures;
}

void TracedCommunicator::reset() {
  trace_->counts = {};
  trace_->signatures.clear();
}

void TracedCommunicator::count(const Call& call, std::int64_t shards) {
  TrafficCounts& counts = trace_->counts[static_cast<std::size_t>(call.traffic)][call.operation];
  ++counts.operations;
  counts.bytes += shards * call.elems * dtype_bytes(call.dtype);
  if (trace_->recording) trace_->signatures.push_back(call.signature());
}

std::unique_ptr<Communicator> TracedCommunicator::split(int color, int key) {
  return std::unique_ptr<Communicator>(new TracedCommunicator(inner_.split(color, key), trace_));
}

Work TracedCommunicator::do_all_reduce(const Call& call, void* buffer) {
  count(call, 1);
  return inner_.all_reduce({buffer, call.dtype, call.elems}, call.op, call.traffic, call.stream);
}

Work TracedCommunicator::do_reduce_scatter(const Call& call, void* shard, void* input) {
  count(call, size());
  return inner_.reduce_scatter({shard, call.dtype, call.elems}, {input, call.dtype, call.elems * size()},
                               call.op, call.traffic, call.stream);
}

Work TracedCommunicator::do_all_gather(const Call& call, void* output, const void* shard) {
  count(call, size());
  return inner_.all_gather({output, call.dtype, call.elems * size()}, {shard, call.dtype, call.elems},
                           call.traffic, call.stream);
}

Work TracedCommunicator::do_all_to_all(const Call& call, void* output, const void* input) {
  count(call, size());
  return inner_.all_to_all({output, call.dtype, call.elems * size()},
                           {input, call.dtype, call.elems * size()}, call.traffic, call.stream);
}

Work TracedCommunicator::do_broadcast(const Call& call, void* buffer) {
  count(call, 1);
  return inner_.broadcast({buffer, call.dtype, call.elems}, call.root, call.traffic, call.stream);
}

void TracedCommunicator::do_barrier(const Call& call) {
  count(call, 1);
  inner_.barrier();
}

}  // namespace mxopt
