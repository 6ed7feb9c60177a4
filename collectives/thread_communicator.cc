#include "mxopt/collectives/thread_communicator.h"

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <map>
#include <mutex>
#include <optional>
#include <utility>

#include "mxopt/collectives/call_mismatch.h"
#include "mxopt/collectives/deadline.h"
#include "mxopt/collectives/host_exchange.h"
#include "mxopt/collectives/process_identity.h"
#include "mxopt/collectives/rank_sum.h"
#include "mxopt/params/check.h"

namespace mxopt {

/// What all groups of one make_group() share.
struct ThreadCommunicator::Family {
  std::mutex mutex;                 // guards everything in the groups, their slots and this
  std::condition_variable changed;  // a slot settled, or a rank aborted
  int running = 0;                  // operations being performed right now
  int aborted_rank = -1;            // in the first group's numbers
  std::string abort_reason;
};

/// A rank's place in a group. As the argument of a split: no group, and the key in place of the rank.
struct ThreadCommunicator::Seat {
  std::shared_ptr<Group> group;
  int rank = 0;
  int color = 0;
};

/// One rank's part of a call.
struct ThreadCommunicator::Post {
  bool present = false;
  Call call;
  void* out = nullptr;  // the whole buffer of a call that has only one
  const void* in = nullptr;
  Seat seat;  // of split: color and key go in, the new seat comes out
};

/// One call of the whole group.
struct ThreadCommunicator::Slot {
  enum class State { kOpen, kRunning, kDone, kFailed };

  State state = State::kOpen;
  std::vector<Post> posts;
  int arrived = 0;
  PeerFailure failure;  // the part that is the same for every rank

  bool settled() const { return state == State::kDone || state == State::kFailed; }
};

class ThreadCommunicator::Group {
 public:
  Group(std::shared_ptr<Family> family, std::vector<int> first_ranks, double timeout_s)
      : family_(std::move(family)),
        first_ranks_(std::move(first_ranks)),
        timeout_s_(timeout_s),
        calls_(first_ranks_.size()),
        outstanding_(first_ranks_.size()),
        left_(first_ranks_.size()) {}

  int size() const { return static_cast<int>(first_ranks_.size()); }
  double timeout_s() const { return timeout_s_; }

  std::shared_ptr<Slot> post(int rank, Post post);
  /// True when the call is complete. Waits for that until the deadline when `block`. Throws PeerError.
  bool settle(Slot& slot, int rank, const Deadline& deadline, bool block);
  void leave(int rank);
  void abort(int rank, const std::string& reason);
  Health health(int rank);

 private:
  // All of these are called with the mutex held.
  void fail(Slot& slot, int culprit_rank, std::string reason);
  void fail_if_hopeless(Slot& slot);
  void finish(Slot& slot, Slot::State state);
  void fail_late(Slot& slot);
  std::string left_text(int rank) const;
  std::string abort_text() const;
  int aborted_rank() const;  // in this group's numbers, -1 when it is no member

  // Called without the mutex; the slot is kRunning, so nobody else touches it.
  void perform(Slot& slot);
  void perform_split(Slot& slot);

  const std::shared_ptr<Family> family_;
  const std::vector<int> first_ranks_;  // each rank's number in the first group
  const double timeout_s_;

  std::map<std::int64_t, std::shared_ptr<Slot>> slots_;  // those to which a rank has yet to come
  std::vector<std::int64_t> calls_;                      // posted so far, per rank
  std::vector<std::int64_t> outstanding_;                // posted and not settled, per rank
  std::vector<bool> left_;
  std::string first_failure_;
};

std::shared_ptr<ThreadCommunicator::Slot> ThreadCommunicator::Group::post(int rank, Post post) {
  const auto at = static_cast<std::size_t>(rank);
  const std::int64_t sequence = post.call.sequence;
  std::unique_lock lock(family_->mutex);
  std::shared_ptr<Slot>& entry = slots_[sequence];
  if (entry == nullptr) {
    entry = std::make_shared<Slot>();
    entry->posts.resize(first_ranks_.size());
  }
  const std::shared_ptr<Slot> slot = entry;
  slot->posts[at] = std::move(post);
  slot->posts[at].present = true;
  ++slot->arrived;
  ++calls_[at];
  if (slot->arrived == size()) slots_.erase(sequence);
  if (slot->settled()) return slot;  // the others have given up, or one has left
  ++outstanding_[at];
  fail_if_hopeless(*slot);
  if (slot->settled() || slot->arrived < size()) return slot;

  const Call& first = slot->posts[0].call;
  const bool equal = std::all_of(slot->posts.begin(), slot->posts.end(), [&](const Post& other) {
    const Call& c = other.call;
    return c.operation == first.operation && c.dtype == first.dtype && c.elems == first.elems &&
           c.op == first.op && c.root == first.root && c.traffic == first.traffic;
  });
  if (!equal) {
    std::vector<std::string> signatures;
    for (const Post& other : slot->posts) signatures.push_back(other.call.signature());
    Disagreement found = find_disagreement(signatures).value();
    fail(*slot, found.culprit_rank, std::move(found.reason));
    return slot;
  }

  slot->state = Slot::State::kRunning;
  ++family_->running;
  lock.unlock();
  std::string error;
  try {
    perform(*slot);
  } catch (const std::exception& e) {  // handed to every rank, this one included
    error = e.what();
  }
  lock.lock();
  --family_->running;
  if (error.empty()) {
    finish(*slot, Slot::State::kDone);
  } else {
    fail(*slot, rank, "rank " + std::to_string(rank) + " could not perform the call: " + error);
  }
  return slot;
}

bool ThreadCommunicator::Group::settle(Slot& slot, int rank, const Deadline& deadline, bool block) {
  std::unique_lock lock(family_->mutex);
  fail_if_hopeless(slot);
  while (block && slot.state == Slot::State::kOpen && !deadline.passed()) {
    family_->changed.wait_until(lock, deadline.end());
    fail_if_hopeless(slot);
  }
  while (block && slot.state == Slot::State::kRunning) family_->changed.wait(lock);
  if (slot.state == Slot::State::kOpen && deadline.passed()) fail_late(slot);
  if (slot.state != Slot::State::kFailed) return slot.state == Slot::State::kDone;

  PeerFailure failure = slot.failure;
  const Call& call = slot.posts[static_cast<std::size_t>(rank)].call;
  failure.operation = call.signature();
  failure.sequence = call.sequence;
  failure.elapsed_ms = deadline.elapsed_ms();
  failure.rank = rank;
  failure.host = host_name();
  failure.pid = process_id();
  throw PeerError(std::move(failure));
}

void ThreadCommunicator::Group::leave(int rank) {
  std::unique_lock lock(family_->mutex);
  family_->changed.wait(lock, [&] { return family_->running == 0; });
  left_[static_cast<std::size_t>(rank)] = true;
  for (auto& [sequence, slot] : slots_) {
    if (slot->settled()) continue;
    fail(*slot, rank, left_text(rank));
  }
}

void ThreadCommunicator::Group::abort(int rank, const std::string& reason) {
  std::unique_lock lock(family_->mutex);
  if (family_->aborted_rank < 0) {
    family_->aborted_rank = first_ranks_[static_cast<std::size_t>(rank)];
    family_->abort_reason = reason;
  }
  family_->changed.notify_all();
  // Why: the caller may free its buffers when this returns.
  family_->changed.wait(lock, [&] { return family_->running == 0; });
}

Health ThreadCommunicator::Group::health(int rank) {
  const std::lock_guard lock(family_->mutex);
  Health health;
  health.reason = family_->aborted_rank >= 0 ? abort_text() : first_failure_;
  health.ok = health.reason.empty();
  health.calls = calls_[static_cast<std::size_t>(rank)];
  health.outstanding = outstanding_[static_cast<std::size_t>(rank)];
  return health;
}

void ThreadCommunicator::Group::fail(Slot& slot, int culprit_rank, std::string reason) {
  if (first_failure_.empty()) first_failure_ = reason;
  slot.failure.culprit_rank = culprit_rank;
  slot.failure.reason = std::move(reason);
  finish(slot, Slot::State::kFailed);
}

void ThreadCommunicator::Group::fail_if_hopeless(Slot& slot) {
  if (slot.state != Slot::State::kOpen) return;
  if (family_->aborted_rank >= 0) return fail(slot, aborted_rank(), abort_text());
  for (int rank = 0; rank < size(); ++rank) {
    const auto at = static_cast<std::size_t>(rank);
    if (!left_[at] || slot.posts[at].present) continue;
    return fail(slot, rank, left_text(rank));
  }
}

void ThreadCommunicator::Group::finish(Slot& slot, Slot::State state) {
  slot.state = state;
  for (std::size_t at = 0; at < slot.posts.size(); ++at) {
    if (slot.posts[at].present) --outstanding_[at];
  }
  family_->changed.notify_all();
}

void ThreadCommunicator::Group::fail_late(Slot& slot) {
  std::vector<int> missing;
  for (int rank = 0; rank < size(); ++rank) {
    if (!slot.posts[static_cast<std::size_t>(rank)].present) missing.push_back(rank);
  }
  std::ostringstream reason;
  reason << name_ranks(missing) << (missing.size() == 1 ? " has" : " have") << " not come within "
         << timeout_s_ << " s";
  fail(slot, missing.front(), reason.str());
}

std::string ThreadCommunicator::Group::left_text(int rank) const {
  return "rank " + std::to_string(rank) + " has left the group after " +
         std::to_string(calls_[static_cast<std::size_t>(rank)]) + " calls";
}

std::string ThreadCommunicator::Group::abort_text() const {
  const int member = aborted_rank();
  const std::string who = member >= 0
                              ? "rank " + std::to_string(member)
                              : "rank " + std::to_string(family_->aborted_rank) + " of the first group";
  return who + " aborted: " + family_->abort_reason;
}

int ThreadCommunicator::Group::aborted_rank() const {
  const auto found = std::find(first_ranks_.begin(), first_ranks_.end(), family_->aborted_rank);
  return found == first_ranks_.end() ? -1 : static_cast<int>(found - first_ranks_.begin());
}

void ThreadCommunicator::Group::perform(Slot& slot) {
  std::vector<Post>& posts = slot.posts;
  const Call& call = posts[0].call;
  if (call.operation == "split") return perform_split(slot);
  if (call.elems == 0 || call.operation == "barrier") return;

  const std::size_t ranks = posts.size();
  const std::int64_t bytes = call.elems * dtype_bytes(call.dtype);
  const auto copy = [&](void* to, std::int64_t offset_bytes, const void* from) {
    void* const at = static_cast<std::uint8_t*>(to) + offset_bytes;
    if (at != from) std::memcpy(at, from, static_cast<std::size_t>(bytes));
  };

  if (call.operation == "all_reduce") {
    std::vector<const void*> pieces;
    for (const Post& post : posts) pieces.push_back(post.out);
    reduce_in_rank_order(posts[0].out, pieces, call.elems, call.dtype, call.op);
    for (std::size_t to = 1; to < ranks; ++to) copy(posts[to].out, 0, posts[0].out);
  } else if (call.operation == "reduce_scatter") {
    std::vector<const void*> pieces(ranks);
    for (std::size_t to = 0; to < ranks; ++to) {
      for (std::size_t from = 0; from < ranks; ++from) {
        pieces[from] =
            static_cast<const std::uint8_t*>(posts[from].in) + static_cast<std::int64_t>(to) * bytes;
      }
      reduce_in_rank_order(posts[to].out, pieces, call.elems, call.dtype, call.op);
    }
  } else if (call.operation == "all_gather") {
    for (std::size_t to = 0; to < ranks; ++to) {
      for (std::size_t from = 0; from < ranks; ++from) {
        copy(posts[to].out, static_cast<std::int64_t>(from) * bytes, posts[from].in);
      }
    }
  } else if (call.operation == "all_to_all") {
    for (std::size_t to = 0; to < ranks; ++to) {
      for (std::size_t from = 0; from < ranks; ++from) {
        copy(posts[to].out, static_cast<std::int64_t>(from) * bytes,
             static_cast<const std::uint8_t*>(posts[from].in) + static_cast<std::int64_t>(to) * bytes);
      }
    }
  } else {
    for (std::size_t to = 0; to < ranks; ++to) {
      copy(posts[to].out, 0, posts[static_cast<std::size_t>(call.root)].out);
    }
  }
}

void ThreadCommunicator::Group::perform_split(Slot& slot) {
  std::map<int, std::vector<int>> members;  // color -> ranks
  for (int rank = 0; rank < size(); ++rank) {
    members[slot.posts[static_cast<std::size_t>(rank)].seat.color].push_back(rank);
  }
  for (auto& [color, ranks] : members) {
    const auto seat_of = [&](int rank) -> Seat& { return slot.posts[static_cast<std::size_t>(rank)].seat; };
    std::stable_sort(ranks.begin(), ranks.end(),
                     [&](int a, int b) { return seat_of(a).rank < seat_of(b).rank; });
    std::vector<int> first_ranks;
    for (int rank : ranks) first_ranks.push_back(first_ranks_[static_cast<std::size_t>(rank)]);
    const auto group = std::make_shared<Group>(family_, first_ranks, timeout_s_);
    int next = 0;
    for (int rank : ranks) seat_of(rank) = {.group = group, .rank = next++, .color = color};
  }
}

class ThreadCommunicator::CallState final : public Work::State {
 public:
  CallState(std::shared_ptr<Group> group, int rank, Post post)
      : group_(std::move(group)), rank_(rank), slot_(group_->post(rank, std::move(post))) {}

  bool test() override {
    if (!deadline_.has_value()) deadline_.emplace(group_->timeout_s());
    return group_->settle(*slot_, rank_, *deadline_, false);
  }
  void wait() override {
    deadline_.emplace(group_->timeout_s());
    group_->settle(*slot_, rank_, *deadline_, true);
  }
  void join(StreamRef) override { wait(); }

  /// What a completed split has given to this rank.
  const Seat& seat() const { return slot_->posts[static_cast<std::size_t>(rank_)].seat; }

 private:
  std::shared_ptr<Group> group_;
  int rank_;
  std::optional<Deadline> deadline_;  // from the first test(), and anew from each wait()
  std::shared_ptr<Slot> slot_;
};

std::vector<std::unique_ptr<Communicator>> ThreadCommunicator::make_group(int size, double timeout_s) {
  MXOPT_CHECK_GT(size, 0);
  Deadline{timeout_s};  // refuses a bad timeout
  std::vector<int> ranks;
  for (int rank = 0; rank < size; ++rank) ranks.push_back(rank);
  const auto group = std::make_shared<Group>(std::make_shared<Family>(), ranks, timeout_s);
  std::vector<std::unique_ptr<Communicator>> communicators;
  for (int rank : ranks) {
    communicators.push_back(std::unique_ptr<Communicator>(new ThreadCommunicator(group, rank)));
  }
  return communicators;
}

ThreadCommunicator::ThreadCommunicator(std::shared_ptr<Group> group, int rank)
    : group_(std::move(group)), rank_(rank) {}

ThreadCommunicator::~ThreadCommunicator() {
  group_->leave(rank_);
}

int ThreadCommunicator::size() const {
  return group_->size();
}

std::string ThreadCommunicator::describe() const {
  return "threads, rank " + std::to_string(rank_) + " of " + std::to_string(size());
}

std::unique_ptr<Communicator> ThreadCommunicator::split(int color, int key) {
  MXOPT_CHECK(color >= 0, "split: color " << color << "; allowed are 0 and above");
  const auto state = post({.sequence = next_sequence(), .operation = "split", .stream = {}}, nullptr, nullptr,
                          {.group = nullptr, .rank = key, .color = color});
  state->wait();
  return std::unique_ptr<Communicator>(new ThreadCommunicator(state->seat().group, state->seat().rank));
}

void ThreadCommunicator::abort(const std::string& reason) noexcept {
  group_->abort(rank_, reason);
}

Health ThreadCommunicator::health() {
  return group_->health(rank_);
}

std::shared_ptr<ThreadCommunicator::CallState> ThreadCommunicator::post(const Call& call, void* out,
                                                                        const void* in, Seat seat) {
  return std::make_shared<CallState>(group_, rank_,
                                     Post{.call = call, .out = out, .in = in, .seat = std::move(seat)});
}

PeerWindow ThreadCommunicator::open_window(const Buffer& buffer) {
  return exchange_addresses(*this, buffer);
}

Work ThreadCommunicator::do_all_reduce(const Call& call, void* buffer) {
  return Work(post(call, buffer, nullptr, {}));
}

Work ThreadCommunicator::do_reduce_scatter(const Call& call, void* shard, void* input) {
  return Work(post(call, shard, input, {}));
}

Work ThreadCommunicator::do_all_gather(const Call& call, void* output, const void* shard) {
  return Work(post(call, output, shard, {}));
}

Work ThreadCommunicator::do_all_to_all(const Call& call, void* output, const void* input) {
  return Work(post(call, output, input, {}));
}

Work ThreadCommunicator::do_broadcast(const Call& call, void* buffer) {
  return Work(post(call, buffer, nullptr, {}));
}

void ThreadCommunicator::do_barrier(const Call& call) {
  post(call, nullptr, nullptr, {})->wait();
}

}  // namespace mxopt
