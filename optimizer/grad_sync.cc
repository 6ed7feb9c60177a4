#include "mxopt/optimizer/grad_sync.h"

#include <algorithm>
#include <exception>
#include <utility>

namespace mxopt {

GradSync::GradSync(const Layout& layout, const ParamStorage& storage, Communicator& comm,
                   const GradSyncOptions& options, std::shared_ptr<Allocator> allocator)
    : layout_(layout),
      storage_(storage),
      comm_(comm),
      options_(options),
      names_in_bucket_(layout.buckets().size(), 0),
      ready_in_bucket_(layout.buckets().size(), 0),
      ready_now_(layout.params().size(), 0),
      ready_ever_(layout.params().size(), 0),
      writers_(layout.buckets().size()),
      clear_stream_(storage.device()),
      updated_(storage.device()),
      cleared_(storage.device()),
      side_stream_(storage.device()),
      arrived_(storage.device()),
      summed_(storage.device()),
      reported_(storage.device()) {
  for (const ParamLayout& param : layout.params()) {
    ++names_in_bucket_[static_cast<std::size_t>(param.bucket)];
    has_accumulating_ = has_accumulating_ || param.grad_mode == GradMode::kAccumulate;
  }
  works_.reserve(layout.buckets().size());
  const int pieces = std::max(comm.size(), options.replicas == nullptr ? 1 : options.replicas->size());
  options_.exchanges = options.exchanges && pieces > 1;  // else there is nothing to add up
  if (!options_.checks && !options_.exchanges) return;
  if (allocator == nullptr) allocator = default_allocator(storage.device());
  kernels_ = GradKernels::make(make_tables(allocator), storage.device(), allocator);
  if (!options_.exchanges) return;
  std::int64_t largest = 0;
  for (const Bucket& bucket : layout.buckets()) {
    if (!bucket.family.frozen) largest = std::max(largest, pieces * (bucket.elems / comm.size()));
  }
  staging_ = Buffer(largest * dtype_bytes(storage.grad_dtype()), storage.device(), allocator);
}

GradTables GradSync::make_tables(const std::shared_ptr<Allocator>& allocator) {
  GradTables tables;
  tables.dtype = storage_.grad_dtype();
  tables.buckets.resize(layout_.buckets().size());
  if (!options_.checks) return tables;
  for (const Bucket& bucket : layout_.buckets()) {
    if (bucket.family.frozen) continue;
    checked_params_.insert(checked_params_.end(), bucket.params.begin(), bucket.params.end());
  }
  local_status_ = Buffer(static_cast<std::int64_t>(checked_params_.size()), storage_.device(), allocator);
  for (std::size_t i = 0; i < checked_params_.size(); ++i) {
    const ParamLayout& param = layout_.param(checked_params_[i]);
    const TypedSpan grad = storage_.gradients(param.bucket).sub(param.bucket_begin, param.elems());
    tables.buckets[static_cast<std::size_t>(param.bucket)].push_back(
        {grad.data, grad.elems, local_status_.data() + i});
  }
  return tables;
}

GradSync::~GradSync() {
  bool have_all_come = true;
  for (std::vector<Work>* works : {&works_, &added_}) {
    for (Work& work : *works) {
      try {
        work.wait();
      } catch (const std::exception&) {  // dropped: nobody will use the gradients
        have_all_come = false;
      }
    }
  }
  if (!have_all_come) return;
  try {
    summed_.wait();
  } catch (const std::exception&) {  // dropped likewise
  }
}

void GradSync::wait() {
  for (std::vector<Work>* works : {&works_, &added_}) {
    for (Work& work : *works) work.wait();
  }
  summed_.wait();
  cleared_.wait();
}

void GradSync::begin_backward(bool last_micro_batch) {
  MXOPT_CHECK(works_.empty(),
              "begin_backward after gradients of this step were sent: call step() first, and pass "
              "last_micro_batch = true only for the last micro-batch of a step");
  last_micro_batch_ = last_micro_batch;
  std::ranges::fill(ready_now_, 0);
  std::ranges::fill(ready_in_bucket_, 0);
}

void GradSync::ready(int param, StreamRef stream) {
  const ParamLayout& layout = layout_.param(param);
  MXOPT_CHECK(!layout.family.frozen,
              "grad_ready: param '" << layout.name << "' is frozen and has no gradient");
  MXOPT_CHECK(ready_now_[static_cast<std::size_t>(param)] == 0,
              "grad_ready: param '" << layout.name
                                    << "' was ready already in this micro-batch; call it once, after the "
                                    << "last use, and begin_backward() before the next micro-batch");
  ready_now_[static_cast<std::size_t>(param)] = 1;
  ready_ever_[static_cast<std::size_t>(param)] = 1;
  ++ready_in_bucket_[static_cast<std::size_t>(layout.bucket)];
  note_writer(layout.bucket, stream);
  if (!last_micro_batch_) return;
  const bool is_sending = !works_.empty();
  issue_ready_buckets(stream);
  // Why: some host transports move bytes only while they are called.
  if (is_sending && storage_.device().kind == DeviceKind::kHost) comm_.health();
}

void GradSync::note_writer(int bucket, StreamRef stream) {
  Writers& writers = writers_[static_cast<std::size_t>(bucket)];
  if (writers.has_current && writers.current.native() != stream.native()) {
    // Why now and not at each call: nearly always one stream writes all gradients, and then no event is
    // needed.
    writers.left.emplace_back(storage_.device());
    writers.left.back().record(writers.current);
  }
  writers.has_current = true;
  writers.current = stream;
}

void GradSync::join_writers(int bucket, StreamRef stream) {
  Writers& writers = writers_[static_cast<std::size_t>(bucket)];
  if (writers.has_current) note_writer(bucket, stream);
  for (const Event& event : writers.left) event.join(stream);
  writers.left.clear();
  writers.has_current = false;
}

void GradSync::issue_ready_buckets(StreamRef stream) {
  const auto count = static_cast<int>(layout_.buckets().size());
  while (next_bucket_ < count) {
    const auto b = static_cast<std::size_t>(next_bucket_);
    if (!layout_.bucket(next_bucket_).family.frozen && ready_in_bucket_[b] < names_in_bucket_[b]) return;
    issue(next_bucket_, stream);
  }
}

void GradSync::issue(int bucket, StreamRef stream) {
  next_bucket_ = bucket + 1;
  const Bucket& layout = layout_.bucket(bucket);
  if (layout.family.frozen) return;
  join_writers(bucket, stream);
  // Where nothing wrote to the bucket, nobody has joined the zeroing yet.
  if (!is_capturing(storage_.device(), stream)) {
    cleared_.join(stream);
  } else {
    MXOPT_CHECK(
        cleared_.passed() && (!options_.checks || reported_.passed()),
        "a step is being captured while gradients are still being zeroed; synchronize the device before the "
        "capture begins");
  }
  const TypedSpan grads = storage_.gradients(bucket);
  for (int member : layout.params) {
    const ParamLayout& param = layout_.param(member);
    if (param.grad_mode == GradMode::kAccumulate || ready_ever_[static_cast<std::size_t>(member)] != 0)
      continue;
    const TypedSpan stale = grads.sub(param.bucket_begin, param.elems());
    fill_zero(stale.data, stale.bytes(), storage_.device(), stream);
  }
  check(bucket, stream);
  issued_.push_back(bucket);
  works_.push_back(reduce(bucket, stream));
  add_replicas(false);
}

void GradSync::check(int bucket, StreamRef stream) {
  if (!options_.checks) return;
  if (!is_capturing(storage_.device(), stream)) reported_.join(stream);
  kernels_->find_nonfinite(bucket, stream);
}

Work GradSync::reduce(int bucket, StreamRef stream) {
  const TypedSpan grads = storage_.gradients(bucket);
  if (!options_.exchanges) {
    return comm_.reduce_scatter(shard(bucket), grads, options_.op, Traffic::kGradient, stream);
  }
  // Why a stream of its own: the caller's goes on with the backward pass while the pieces travel.
  const StreamRef own = side_stream_.ref();
  arrived_.record(stream);
  arrived_.join(own);
  const TypedSpan pieces(staging_.data(), grads.dtype, grads.elems);
  Work work = comm_.all_to_all(pieces, grads, Traffic::kGradient, own);
  work.join(own);
  kernels_->sum_in_rank_order(shard(bucket), pieces, options_.op, own);
  summed_.record(own);
  return work;
}

TypedSpan GradSync::shard(int bucket) const {
  const std::int64_t elems = layout_.shard_elems(bucket);
  return storage_.gradients(bucket).sub(comm_.rank() * elems, elems);
}

void GradSync::add_replicas(bool all) {
  if (options_.replicas == nullptr) return;
  // On a device the side stream waits for a shard. On the host it would be this thread: there all are added
  // at the end, since the order of messages must not depend on how far a rank's reductions are.
  if (storage_.device().kind == DeviceKind::kHost && !all) return;
  while (added_.size() < works_.size()) {
    works_[added_.size()].join(side_stream_.ref());
    added_.push_back(add_replicas_to(issued_[added_.size()]));
  }
}

Work GradSync::add_replicas_to(int bucket) {
  const StreamRef own = side_stream_.ref();
  const TypedSpan sum = shard(bucket);
  Communicator& replicas = *options_.replicas;
  if (!options_.exchanges) return replicas.all_reduce(sum, ReduceOp::kSum, Traffic::kGradient, own);
  const TypedSpan pieces(staging_.data(), sum.dtype, replicas.size() * sum.elems);
  Work work = replicas.all_gather(pieces, sum, Traffic::kGradient, own);
  work.join(own);
  kernels_->sum_in_rank_order(sum, pieces, ReduceOp::kSum, own);
  summed_.record(own);
  return work;
}

void GradSync::finish(StreamRef stream) {
  while (next_bucket_ < static_cast<int>(layout_.buckets().size())) issue(next_bucket_, stream);
  add_replicas(true);
  for (std::vector<Work>* works : {&works_, &added_}) {
    for (Work& work : *works) work.join(stream);
  }
  summed_.join(stream);
}

void GradSync::reset(StreamRef stream) {
  works_.clear();
  added_.clear();
  issued_.clear();
  next_bucket_ = 0;
  last_micro_batch_ = true;
  std::ranges::fill(ready_now_, 0);
  std::ranges::fill(ready_ever_, 0);
  std::ranges::fill(ready_in_bucket_, 0);
  if (!has_accumulating_ || layout_.grad_elems() == 0) return;
  const auto first =
      std::ranges::find_if(layout_.buckets(), [](const Bucket& b) { return !b.family.frozen; });
  const auto index = static_cast<int>(first - layout_.buckets().begin());
  // The gradients of all buckets are one allocation, back to back.
  const auto clear = [&](StreamRef on) {
    fill_zero(storage_.gradients(index).data, layout_.grad_elems() * dtype_bytes(storage_.grad_dtype()),
              storage_.device(), on);
    cleared_.record(on);
  };
  // A captured stream must not leave others behind that it does not join.
  if (is_capturing(storage_.device(), stream)) return clear(stream);
  updated_.record(stream);
  updated_.join(clear_stream_.ref());
  clear(clear_stream_.ref());
}

}  // namespace mxopt
