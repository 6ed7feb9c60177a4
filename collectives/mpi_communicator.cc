#include "mxopt/collectives/mpi_communicator.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <exception>
#include <limits>
#include <list>
#include <mutex>
#include <new>
#include <optional>
#include <thread>
#include <utility>

#include "mxopt/collectives/call_mismatch.h"
#include "mxopt/collectives/chunk_plan.h"
#include "mxopt/collectives/deadline.h"
#include "mxopt/collectives/process_identity.h"
#include "mxopt/collectives/rank_sum.h"
#include "mxopt/params/check.h"

/// Throws BackendError unless the MPI call succeeds.
#define MXOPT_MPI_CHECK(call, rank)             \
  do {                                          \
    const int mxopt_code = (call);              \
    if (mxopt_code != MPI_SUCCESS) [[unlikely]] \
      fail_mpi(#call, mxopt_code, rank);        \
  } while (false)

namespace mxopt {

namespace {

constexpr int kAbortCode = 86;

// Calls that exchange through scratch and may be in flight at once; more of them wait in the queue.
constexpr std::size_t kScratchLanes = 2;

std::string mpi_text(int code) {
  std::array<char, MPI_MAX_ERROR_STRING> text{};
  int length = 0;
  if (MPI_Error_string(code, text.data(), &length) != MPI_SUCCESS) return "unknown MPI error";
  return {text.data(), static_cast<std::size_t>(length)};
}

[[noreturn]] void fail_mpi(std::string_view call, int code, int rank) {
  throw BackendError(std::string(call.substr(0, call.find('('))) + " failed on rank " + std::to_string(rank) +
                     " with code " + std::to_string(code) + ": " + mpi_text(code));
}

bool mpi_is_up() {
  int initialized = 0;
  int finalized = 0;
  MPI_Initialized(&initialized);
  MPI_Finalized(&finalized);
  return initialized != 0 && finalized == 0;
}

/// Returns when all ranks of `comm` have come here; PeerError at the deadline. `check` runs while waiting,
/// and may throw.
template <class Check>
void meet(MPI_Comm comm, double timeout_s, std::string_view operation, Check check) {
  const Deadline deadline(timeout_s);
  int rank = 0;
  MXOPT_MPI_CHECK(MPI_Comm_rank(comm, &rank), -1);
  MPI_Request request = MPI_REQUEST_NULL;
  MXOPT_MPI_CHECK(MPI_Ibarrier(comm, &request), rank);
  while (true) {
    int done = 0;
    MXOPT_MPI_CHECK(MPI_Test(&request, &done, MPI_STATUS_IGNORE), rank);
    if (done != 0) return;
    check();
    if (deadline.passed()) break;
    std::this_thread::yield();
  }
  throw PeerError({.operation = std::string(operation),
                   .elapsed_ms = deadline.elapsed_ms(),
                   .rank = rank,
                   .host = host_name(),
                   .pid = process_id(),
                   .reason = "not all ranks have come; which one is late is not known"});
}

/// One chunk of every rank's shard: `bytes` bytes, the next rank's `stride_bytes` further on.
MPI_Datatype strided_chunk(std::int64_t bytes, std::int64_t stride_bytes, int rank) {
  MPI_Datatype packed = MPI_DATATYPE_NULL;
  MPI_Datatype strided = MPI_DATATYPE_NULL;
  MXOPT_MPI_CHECK(MPI_Type_contiguous(static_cast<int>(bytes), MPI_BYTE, &packed), rank);
  MXOPT_MPI_CHECK(MPI_Type_create_resized(packed, 0, static_cast<MPI_Aint>(stride_bytes), &strided), rank);
  MXOPT_MPI_CHECK(MPI_Type_free(&packed), rank);
  MXOPT_MPI_CHECK(MPI_Type_commit(&strided), rank);
  return strided;
}

std::uint8_t* at_byte(void* base, std::int64_t offset) {
  return static_cast<std::uint8_t*>(base) + offset;
}
const std::uint8_t* at_byte(const void* base, std::int64_t offset) {
  return static_cast<const std::uint8_t*>(base) + offset;
}

}  // namespace

/// A call in two words, so that ranks of a node can read each other's without a lock.
struct MpiCommunicator::Posted {
  std::uint64_t what = 0;
  std::int64_t elems = 0;

  static constexpr std::array<std::string_view, 7> kOperations = {
      "all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "barrier", "split"};

  static Posted of(const Call& call) {
    const auto operation =
        std::find(kOperations.begin(), kOperations.end(), call.operation) - kOperations.begin();
    const auto field = [](auto value, int shift) { return static_cast<std::uint64_t>(value) << shift; };
    return {field(operation, 0) | field(call.dtype, 8) | field(call.op, 16) | field(call.traffic, 24) |
                field(call.root, 32),
            call.elems};
  }

  std::string signature() const {
    const auto field = [this](int shift, std::uint64_t mask) {
      return static_cast<int>((what >> shift) & mask);
    };
    Call call;
    call.operation = kOperations.at(static_cast<std::size_t>(field(0, 0xFF)));
    call.dtype = static_cast<DType>(field(8, 0xFF));
    call.op = static_cast<ReduceOp>(field(16, 0xFF));
    call.traffic = static_cast<Traffic>(field(24, 0xFF));
    call.root = field(32, 0x7FFFFFFF);
    call.elems = elems;
    return call.signature();
  }

  friend bool operator==(const Posted&, const Posted&) = default;
};

/// What each rank of this node has called so far, in memory that all of them see.
class MpiCommunicator::Bulletin {
 public:
  /// Collective over `comm`.
  Bulletin(MPI_Comm comm, int rank, int size) : rank_(rank), seats_(static_cast<std::size_t>(size)) {
    MXOPT_MPI_CHECK(MPI_Comm_split_type(comm, MPI_COMM_TYPE_SHARED, rank, MPI_INFO_NULL, &node_), rank);
    MXOPT_MPI_CHECK(MPI_Comm_set_errhandler(node_, MPI_ERRORS_RETURN), rank);
    int node_size = 0;
    MXOPT_MPI_CHECK(MPI_Comm_size(node_, &node_size), rank);

    void* own = nullptr;
    MXOPT_MPI_CHECK(MPI_Win_allocate_shared(sizeof(Seat), 1, MPI_INFO_NULL, node_, &own, &window_), rank);
    MXOPT_MPI_CHECK(MPI_Win_set_errhandler(window_, MPI_ERRORS_RETURN), rank);
    (new (own) Seat)->pid.store(process_id());

    MPI_Group all = MPI_GROUP_NULL;
    MPI_Group here = MPI_GROUP_NULL;
    MXOPT_MPI_CHECK(MPI_Comm_group(comm, &all), rank);
    MXOPT_MPI_CHECK(MPI_Comm_group(node_, &here), rank);
    for (int member = 0; member < node_size; ++member) {
      int global = 0;
      MXOPT_MPI_CHECK(MPI_Group_translate_ranks(here, 1, &member, all, &global), rank);
      MPI_Aint bytes = 0;
      int unit = 0;
      void* base = nullptr;
      MXOPT_MPI_CHECK(MPI_Win_shared_query(window_, member, &bytes, &unit, &base), rank);
      seats_[static_cast<std::size_t>(global)] = static_cast<Seat*>(base);
    }
    MXOPT_MPI_CHECK(MPI_Group_free(&all), rank);
    MXOPT_MPI_CHECK(MPI_Group_free(&here), rank);
    MXOPT_MPI_CHECK(MPI_Barrier(node_), rank);
  }

  void post(const Call& call) {
    Seat& own = *seats_[static_cast<std::size_t>(rank_)];
    const Posted posted = Posted::of(call);
    Entry& entry = own.recent[static_cast<std::size_t>(call.sequence % kRecent)];
    std::atomic_thread_fence(std::memory_order_release);  // readers see the old `issued` before the new entry
    entry.what.store(posted.what, std::memory_order_relaxed);
    entry.elems.store(posted.elems, std::memory_order_relaxed);
    own.issued.store(call.sequence + 1, std::memory_order_release);
  }

  /// Ranks of this node that have not issued the call yet.
  std::vector<int> missing(const Call& call) const {
    std::vector<int> ranks;
    for (std::size_t rank = 0; rank < seats_.size(); ++rank) {
      if (seats_[rank] != nullptr && seats_[rank]->issued.load(std::memory_order_acquire) <= call.sequence) {
        ranks.push_back(static_cast<int>(rank));
      }
    }
    return ranks;
  }

  /// Whether ranks of this node have issued something else under the call's number.
  std::optional<Disagreement> disagreement(const Call& call) const {
    const Posted own = Posted::of(call);
    bool equal = true;
    for (std::size_t rank = 0; rank < seats_.size() && equal; ++rank) {
      const auto other = read(rank, call.sequence);
      equal = !other.has_value() || *other == own;
    }
    if (equal) return std::nullopt;
    std::vector<std::string> signatures(seats_.size());
    for (std::size_t rank = 0; rank < seats_.size(); ++rank) {
      const auto posted = read(rank, call.sequence);
      if (posted.has_value()) signatures[rank] = posted->signature();
    }
    return find_disagreement(signatures);
  }

  /// Tells the node that this rank issues no more calls, and later that it will not even close the group with
  /// them.
  enum class Presence : std::int64_t { kMember, kLeaving, kGone };
  void set_presence(Presence presence) {
    seats_[static_cast<std::size_t>(rank_)]->presence.store(presence, std::memory_order_release);
  }

  /// Lowest rank of this node that is at least so far gone and has issued at most `calls` calls; -1 for none.
  int absent(Presence presence, std::int64_t calls) const {
    for (std::size_t rank = 0; rank < seats_.size(); ++rank) {
      const Seat* seat = seats_[rank];
      if (seat != nullptr && seat->presence.load(std::memory_order_acquire) >= presence &&
          seat->issued.load(std::memory_order_acquire) <= calls) {
        return static_cast<int>(rank);
      }
    }
    return -1;
  }

  bool sees_all() const { return std::find(seats_.begin(), seats_.end(), nullptr) == seats_.end(); }
  bool sees(int rank) const { return rank >= 0 && seats_[static_cast<std::size_t>(rank)] != nullptr; }
  std::int64_t issued(int rank) const { return seats_[static_cast<std::size_t>(rank)]->issued.load(); }
  std::int64_t pid(int rank) const { return seats_[static_cast<std::size_t>(rank)]->pid.load(); }

  /// Collective over the node.
  void free() {
    MXOPT_MPI_CHECK(MPI_Win_free(&window_), rank_);
    MXOPT_MPI_CHECK(MPI_Comm_free(&node_), rank_);
  }

 private:
  static constexpr std::int64_t kRecent = 64;

  struct Entry {
    std::atomic<std::uint64_t> what{0};
    std::atomic<std::int64_t> elems{0};
  };
  struct Seat {
    std::atomic<std::int64_t> issued{0};
    std::atomic<std::int64_t> pid{0};
    std::atomic<Presence> presence{Presence::kMember};
    std::array<Entry, kRecent> recent;
  };
  static_assert(std::atomic<std::int64_t>::is_always_lock_free, "processes share these");

  /// What `rank` has issued under `sequence`; nothing when it has not yet, or when that is long ago.
  std::optional<Posted> read(std::size_t rank, std::int64_t sequence) const {
    const Seat* seat = seats_[rank];
    if (seat == nullptr || seat->issued.load(std::memory_order_acquire) <= sequence) return std::nullopt;
    const Entry& entry = seat->recent[static_cast<std::size_t>(sequence % kRecent)];
    const Posted posted{entry.what.load(std::memory_order_relaxed),
                        entry.elems.load(std::memory_order_relaxed)};
    std::atomic_thread_fence(std::memory_order_acquire);
    // The entry may be rewritten as soon as the call before the one that reuses it is issued.
    if (seat->issued.load(std::memory_order_relaxed) >= sequence + kRecent) return std::nullopt;
    return posted;
  }

  int rank_;
  MPI_Comm node_ = MPI_COMM_NULL;
  MPI_Win window_ = MPI_WIN_NULL;
  std::vector<Seat*> seats_;  // by rank of the whole group; null on other nodes
};

/// One call, from its issue until all its chunks are through.
struct MpiCommunicator::Operation {
  /// How a chunk travels.
  enum class Path { kBarrier, kBroadcast, kGather, kExchange, kNativeReduce, kGatherAndSum, kExchangeAndSum };

  Operation(const Call& call_, Path path_, ChunkPlan plan_, void* out_, const void* in_)
      : call(call_), path(path_), plan(plan_), out(out_), in(in_) {}

  bool uses_scratch() const { return path == Path::kGatherAndSum || path == Path::kExchangeAndSum; }
  std::int64_t chunks() const { return path == Path::kBarrier ? 1 : plan.chunks(); }
  bool all_issued() const { return issued_chunks == chunks(); }

  Call call;
  Path path;
  ChunkPlan plan;                    // of the shard, where there is one
  std::optional<Deadline> deadline;  // from the first look at the call, and anew from each wait
  void* out;
  const void* in;

  std::int64_t issued_chunks = 0;
  std::vector<MPI_Request> requests;  // of the chunks in flight
  std::vector<MPI_Datatype> types;    // likewise
  Buffer scratch;
  bool done = false;
  std::exception_ptr error;
};

class MpiCommunicator::Engine {
 public:
  /// Takes `comm` over. Collective.
  Engine(MPI_Comm comm, double timeout_s, std::int64_t chunk_bytes)
      : comm_(comm), timeout_s_(timeout_s), chunk_bytes_(chunk_bytes) {
    MXOPT_MPI_CHECK(MPI_Comm_set_errhandler(comm_, MPI_ERRORS_RETURN), -1);
    MXOPT_MPI_CHECK(MPI_Comm_rank(comm_, &rank_), -1);
    MXOPT_MPI_CHECK(MPI_Comm_size(comm_, &size_), rank_);
    MXOPT_MPI_CHECK(MPI_Comm_dup(comm_, &control_), rank_);
    bulletin_.emplace(comm_, rank_, size_);
  }

  int rank() const { return rank_; }
  int size() const { return size_; }
  const std::string& first_failure() const { return first_failure_; }
  std::int64_t outstanding() const { return static_cast<std::int64_t>(active_.size()); }

  std::shared_ptr<Operation> start(const Call& call, void* out, const void* in);
  /// Moves every call on as far as it goes without waiting.
  void progress();
  /// True when complete. Throws the call's error; PeerError when its deadline has passed.
  bool settled(Operation& operation);
  void wait(Operation& operation);

  /// Collective, as is the split of the caller's call.
  std::shared_ptr<Engine> split(const Call& call, int color, int key);
  void close();
  void release() noexcept;
  void abort() noexcept {
    if (mpi_is_up()) MPI_Abort(comm_, kAbortCode);
  }

 private:
  void issue_chunk(Operation& operation);
  bool advance(Operation& operation);
  void reduce_chunk(Operation& operation);
  void complete(Operation& operation);
  void fail(const std::shared_ptr<Operation>& operation, std::exception_ptr error);
  [[noreturn]] void fail_late(Operation& operation);
  [[noreturn]] void throw_peer_error(const Operation& operation, int culprit_rank, const std::string& reason);
  bool take_scratch(Operation& operation);
  void give_scratch(Operation& operation);
  void free_types(Operation& operation);

  MPI_Comm comm_;
  // Why: where ranks meet before MPI calls that wait without a deadline. On comm_ such a meeting would pair
  // with the call that another rank has open there.
  MPI_Comm control_ = MPI_COMM_NULL;
  double timeout_s_;
  std::int64_t chunk_bytes_;
  int rank_ = 0;
  int size_ = 1;
  bool closed_ = false;
  std::optional<Bulletin> bulletin_;
  std::list<std::shared_ptr<Operation>> active_;       // in call order
  std::vector<std::shared_ptr<Operation>> abandoned_;  // failed with chunks still in flight
  std::vector<Buffer> free_scratch_;
  std::size_t lanes_in_use_ = 0;
  std::string first_failure_;
};

std::shared_ptr<MpiCommunicator::Operation> MpiCommunicator::Engine::start(const Call& call, void* out,
                                                                           const void* in) {
  using Path = Operation::Path;
  MXOPT_CHECK(!closed_, call.signature() << ": the communicator is closed");
  const bool rounds = call.dtype == DType::kFp32 || call.dtype == DType::kBf16;
  const bool empty_handed = call.operation == "barrier" || call.operation == "split";
  const Path path = empty_handed                         ? Path::kBarrier
                    : call.operation == "broadcast"      ? Path::kBroadcast
                    : call.operation == "all_gather"     ? Path::kGather
                    : call.operation == "all_to_all"     ? Path::kExchange
                    : call.operation == "reduce_scatter" ? Path::kExchangeAndSum
                    : rounds                             ? Path::kGatherAndSum
                                                         : Path::kNativeReduce;
  const bool through_scratch = path == Path::kExchangeAndSum || path == Path::kGatherAndSum;
  const ChunkPlan plan(call.elems, dtype_bytes(call.dtype),
                       through_scratch ? chunk_bytes_ / size_ : chunk_bytes_);
  auto operation = std::make_shared<Operation>(call, path, plan, out, in);
  bulletin_->post(call);
  active_.push_back(operation);
  progress();
  return operation;
}

void MpiCommunicator::Engine::progress() {
  if (closed_) return;
  // Why: MPI pairs non-blocking collectives by their order, so a chunk may only go out when all chunks of
  // earlier calls are out; `may_issue` says so.
  bool may_issue = true;
  for (auto next = active_.begin(); next != active_.end();) {
    Operation& operation = **next;
    try {
      bool moved = true;
      while (moved && !operation.done) {
        moved = !operation.requests.empty() && advance(operation);
        const bool free_to_go = operation.requests.empty() || !operation.uses_scratch();
        if (may_issue && free_to_go && !operation.all_issued() && take_scratch(operation)) {
          issue_chunk(operation);
          moved = true;
        }
        if (operation.all_issued() && operation.requests.empty()) complete(operation);
      }
    } catch (const std::exception&) {  // kept for the Work of this call
      fail(*next, std::current_exception());
    }
    may_issue = may_issue && (operation.done || operation.all_issued());
    next = operation.done || operation.error ? active_.erase(next) : std::next(next);
  }
}

void MpiCommunicator::Engine::issue_chunk(Operation& operation) {
  using Path = Operation::Path;
  const Call& call = operation.call;
  MPI_Request request = MPI_REQUEST_NULL;
  if (operation.path == Path::kBarrier) {
    MXOPT_MPI_CHECK(MPI_Ibarrier(comm_, &request), rank_);
    operation.requests.push_back(request);
    ++operation.issued_chunks;
    return;
  }

  const Chunk chunk = operation.plan.chunk(operation.issued_chunks);
  const std::int64_t elem_bytes = dtype_bytes(call.dtype);
  const std::int64_t begin = chunk.begin * elem_bytes;
  const int bytes = static_cast<int>(chunk.elems * elem_bytes);  // ChunkPlan bounds it
  const std::int64_t shard_bytes = call.elems * elem_bytes;
  switch (operation.path) {
    case Path::kBarrier:
      break;
    case Path::kBroadcast:
      MXOPT_MPI_CHECK(MPI_Ibcast(at_byte(operation.out, begin), bytes, MPI_BYTE, call.root, comm_, &request),
                      rank_);
      break;
    case Path::kNativeReduce: {
      const bool max = call.op == ReduceOp::kMax;
      MXOPT_MPI_CHECK(
          MPI_Iallreduce(MPI_IN_PLACE, at_byte(operation.out, begin), static_cast<int>(chunk.elems),
                         max ? MPI_UINT8_T : MPI_INT64_T, max ? MPI_MAX : MPI_SUM, comm_, &request),
          rank_);
      break;
    }
    case Path::kGather: {
      const MPI_Datatype type = strided_chunk(bytes, shard_bytes, rank_);
      operation.types.push_back(type);
      const bool in_place = operation.in == at_byte(operation.out, rank_ * shard_bytes);
      MXOPT_MPI_CHECK(MPI_Iallgather(in_place ? MPI_IN_PLACE : at_byte(operation.in, begin), bytes, MPI_BYTE,
                                     at_byte(operation.out, begin), 1, type, comm_, &request),
                      rank_);
      break;
    }
    case Path::kExchange: {
      const MPI_Datatype type = strided_chunk(bytes, shard_bytes, rank_);
      operation.types.push_back(type);
      MXOPT_MPI_CHECK(MPI_Ialltoall(at_byte(operation.in, begin), 1, type, at_byte(operation.out, begin), 1,
                                    type, comm_, &request),
                      rank_);
      break;
    }
    case Path::kGatherAndSum:
      MXOPT_MPI_CHECK(MPI_Iallgather(at_byte(operation.out, begin), bytes, MPI_BYTE, operation.scratch.data(),
                                     bytes, MPI_BYTE, comm_, &request),
                      rank_);
      break;
    case Path::kExchangeAndSum: {
      const MPI_Datatype type = strided_chunk(bytes, shard_bytes, rank_);
      operation.types.push_back(type);
      MXOPT_MPI_CHECK(MPI_Ialltoall(at_byte(operation.in, begin), 1, type, operation.scratch.data(), bytes,
                                    MPI_BYTE, comm_, &request),
                      rank_);
      break;
    }
  }
  operation.requests.push_back(request);
  ++operation.issued_chunks;
}

bool MpiCommunicator::Engine::advance(Operation& operation) {
  int done = 0;
  MXOPT_MPI_CHECK(MPI_Testall(static_cast<int>(operation.requests.size()), operation.requests.data(), &done,
                              MPI_STATUSES_IGNORE),
                  rank_);
  if (done == 0) return false;
  operation.requests.clear();
  free_types(operation);
  if (operation.uses_scratch()) reduce_chunk(operation);
  return true;
}

void MpiCommunicator::Engine::reduce_chunk(Operation& operation) {
  const Call& call = operation.call;
  const std::int64_t elem_bytes = dtype_bytes(call.dtype);
  const Chunk chunk = operation.plan.chunk(operation.issued_chunks - 1);
  std::vector<const void*> pieces;
  for (int rank = 0; rank < size_; ++rank) {
    pieces.push_back(operation.scratch.data() + rank * chunk.elems * elem_bytes);
  }
  reduce_in_rank_order(at_byte(operation.out, chunk.begin * elem_bytes), pieces, chunk.elems, call.dtype,
                       call.op);
}

void MpiCommunicator::Engine::complete(Operation& operation) {
  give_scratch(operation);
  if (const auto found = bulletin_->disagreement(operation.call)) {
    throw_peer_error(operation, found->culprit_rank, found->reason);
  }
  operation.done = true;
}

void MpiCommunicator::Engine::fail(const std::shared_ptr<Operation>& operation, std::exception_ptr error) {
  if (operation->requests.empty()) {
    give_scratch(*operation);
  } else {
    // MPI may still write into the scratch, so it stays with the call.
    abandoned_.push_back(operation);
    if (operation->scratch.bytes() > 0) --lanes_in_use_;
  }
  try {
    if (const auto found =
            bulletin_->disagreement(operation->call)) {  // more telling than what MPI says of it
      throw_peer_error(*operation, found->culprit_rank, found->reason);
    }
    std::rethrow_exception(error);
  } catch (const std::exception& e) {
    operation->error = std::current_exception();
    if (first_failure_.empty()) first_failure_ = e.what();
  }
}

bool MpiCommunicator::Engine::settled(Operation& operation) {
  if (operation.error) std::rethrow_exception(operation.error);
  if (!operation.deadline.has_value()) operation.deadline.emplace(timeout_s_);
  if (!operation.done) {
    const int absent = bulletin_->absent(Bulletin::Presence::kLeaving, operation.call.sequence);
    if (absent >= 0) {
      throw_peer_error(operation, absent,
                       "rank " + std::to_string(absent) + " has left the group after " +
                           std::to_string(bulletin_->issued(absent)) + " calls");
    }
    if (operation.deadline->passed()) fail_late(operation);
  }
  return operation.done;
}

void MpiCommunicator::Engine::wait(Operation& operation) {
  operation.deadline.emplace(timeout_s_);
  while (true) {
    progress();
    if (settled(operation)) return;
    std::this_thread::yield();
  }
}

void MpiCommunicator::Engine::fail_late(Operation& operation) {
  const std::vector<int> missing = bulletin_->missing(operation.call);
  if (!missing.empty()) {
    const int first = missing.front();
    throw_peer_error(operation, first,
                     name_ranks(missing) + (missing.size() == 1 ? " has" : " have") + " not come; rank " +
                         std::to_string(first) + " has issued " + std::to_string(bulletin_->issued(first)) +
                         " calls");
  }
  if (const auto found = bulletin_->disagreement(operation.call)) {
    throw_peer_error(operation, found->culprit_rank, found->reason);
  }
  throw_peer_error(
      operation, -1,
      bulletin_->sees_all()
          ? "all ranks have issued the call, but it does not complete"
          : "all ranks of this node have issued the call; which rank of another node is late is not known");
}

void MpiCommunicator::Engine::throw_peer_error(const Operation& operation, int culprit_rank,
                                               const std::string& reason) {
  PeerError error({.operation = operation.call.signature(),
                   .sequence = operation.call.sequence,
                   .elapsed_ms = operation.deadline.has_value() ? operation.deadline->elapsed_ms() : 0.0,
                   .rank = rank_,
                   .culprit_rank = culprit_rank,
                   .host = host_name(),  // a culprit that can be named is on this node
                   .pid = bulletin_->sees(culprit_rank) ? bulletin_->pid(culprit_rank) : process_id(),
                   .reason = reason});
  if (first_failure_.empty()) first_failure_ = error.what();
  throw error;
}

/// False when all lanes are taken: then the call waits in the queue.
bool MpiCommunicator::Engine::take_scratch(Operation& operation) {
  if (!operation.uses_scratch() || operation.scratch.bytes() > 0) return true;
  if (lanes_in_use_ == kScratchLanes) return false;
  const std::int64_t bytes = operation.plan.chunk_elems() * size_ * dtype_bytes(operation.call.dtype);
  Buffer buffer;
  if (!free_scratch_.empty()) {
    buffer = std::move(free_scratch_.back());
    free_scratch_.pop_back();
  }
  if (buffer.bytes() < bytes) {
    buffer = Buffer();
    buffer = Buffer(bytes, Device{}, default_allocator(Device{}));
  }
  operation.scratch = std::move(buffer);
  ++lanes_in_use_;
  return true;
}

void MpiCommunicator::Engine::give_scratch(Operation& operation) {
  if (operation.scratch.bytes() == 0) return;
  free_scratch_.push_back(std::move(operation.scratch));
  --lanes_in_use_;
}

void MpiCommunicator::Engine::free_types(Operation& operation) {
  while (!operation.types.empty()) {
    MPI_Datatype type = operation.types.back();
    operation.types.pop_back();
    MXOPT_MPI_CHECK(MPI_Type_free(&type), rank_);
  }
}

std::shared_ptr<MpiCommunicator::Engine> MpiCommunicator::Engine::split(const Call& call, int color,
                                                                        int key) {
  wait(*start(call, nullptr, nullptr));  // the last of the queue, so MPI_Comm_split meets no call of ours
  meet(control_, timeout_s_, "split", [] {});
  MPI_Comm part = MPI_COMM_NULL;
  MXOPT_MPI_CHECK(MPI_Comm_split(comm_, color, key, &part), rank_);
  return std::make_shared<Engine>(part, timeout_s_, chunk_bytes_);
}

void MpiCommunicator::Engine::close() {
  if (closed_ || !mpi_is_up()) return;
  bulletin_->set_presence(Bulletin::Presence::kLeaving);
  while (!active_.empty()) {
    const std::shared_ptr<Operation> operation = active_.front();
    wait(*operation);
  }
  meet(control_, timeout_s_, "close", [this] {
    const int gone = bulletin_->absent(Bulletin::Presence::kGone, std::numeric_limits<std::int64_t>::max());
    if (gone < 0) return;
    throw PeerError({.operation = "close",
                     .rank = rank_,
                     .culprit_rank = gone,
                     .host = host_name(),
                     .pid = bulletin_->pid(gone),
                     .reason = "rank " + std::to_string(gone) + " has left the group without closing it"});
  });
  closed_ = true;
  bulletin_->free();
  MXOPT_MPI_CHECK(MPI_Comm_free(&control_), rank_);
  MXOPT_MPI_CHECK(MPI_Comm_free(&comm_), rank_);
}

/// For the destructor: closes what can be closed without waiting for a peer that has failed.
void MpiCommunicator::Engine::release() noexcept {
  try {
    if (first_failure_.empty()) close();
  } catch (const std::exception&) {  // a destructor has nobody to tell; close() is for those who care
  }
  if (closed_ || !mpi_is_up()) return;
  bulletin_->set_presence(Bulletin::Presence::kGone);
  // Why: MPI may still write into the scratch of these calls, so it is kept until the process ends.
  static std::mutex mutex;
  static auto* const kept = new std::vector<std::shared_ptr<Operation>>();
  const std::lock_guard lock(mutex);
  kept->insert(kept->end(), abandoned_.begin(), abandoned_.end());
  kept->insert(kept->end(), active_.begin(), active_.end());
  closed_ = true;
}

class MpiCommunicator::OperationState final : public Work::State {
 public:
  OperationState(std::shared_ptr<Engine> engine, std::shared_ptr<Operation> operation)
      : engine_(std::move(engine)), operation_(std::move(operation)) {}

  bool test() override {
    engine_->progress();
    return engine_->settled(*operation_);
  }
  void wait() override { engine_->wait(*operation_); }
  void join(StreamRef) override { wait(); }

 private:
  std::shared_ptr<Engine> engine_;
  std::shared_ptr<Operation> operation_;
};

std::unique_ptr<MpiCommunicator> MpiCommunicator::dup(MPI_Comm comm, double timeout_s,
                                                      std::int64_t chunk_bytes) {
  MXOPT_CHECK(mpi_is_up(), "MpiCommunicator needs MPI between MPI_Init_thread and MPI_Finalize");
  MXOPT_CHECK(comm != MPI_COMM_NULL, "MpiCommunicator of MPI_COMM_NULL");
  MXOPT_CHECK(chunk_bytes >= 8 && chunk_bytes <= std::int64_t{1} << 30,
              "chunk of " << chunk_bytes << " bytes; allowed are 8 to 2^30");
  meet(comm, timeout_s, "dup", [] {});
  MPI_Comm copy = MPI_COMM_NULL;
  MXOPT_MPI_CHECK(MPI_Comm_dup(comm, &copy), -1);
  return std::unique_ptr<MpiCommunicator>(
      new MpiCommunicator(std::make_shared<Engine>(copy, timeout_s, chunk_bytes)));
}

MpiCommunicator::MpiCommunicator(std::shared_ptr<Engine> engine) : engine_(std::move(engine)) {}

MpiCommunicator::~MpiCommunicator() {
  engine_->release();
}

void MpiCommunicator::close() {
  engine_->close();
}

int MpiCommunicator::rank() const {
  return engine_->rank();
}

int MpiCommunicator::size() const {
  return engine_->size();
}

std::string MpiCommunicator::describe() const {
  return "mpi, rank " + std::to_string(rank()) + " of " + std::to_string(size()) + " on " + host_name();
}

std::unique_ptr<Communicator> MpiCommunicator::split(int color, int key) {
  MXOPT_CHECK(color >= 0, "split: color " << color << "; allowed are 0 and above");
  const Call call{.sequence = next_sequence(), .operation = "split", .stream = {}};
  return std::unique_ptr<Communicator>(new MpiCommunicator(engine_->split(call, color, key)));
}

void MpiCommunicator::abort(const std::string&) noexcept {
  engine_->abort();
}

Health MpiCommunicator::health() {
  engine_->progress();
  return {.ok = engine_->first_failure().empty(),
          .reason = engine_->first_failure(),
          .calls = issued(),
          .outstanding = engine_->outstanding()};
}

Work MpiCommunicator::start(const Call& call, void* out, const void* in) {
  return Work(std::make_shared<OperationState>(engine_, engine_->start(call, out, in)));
}

Work MpiCommunicator::do_all_reduce(const Call& call, void* buffer) {
  return start(call, buffer, nullptr);
}

Work MpiCommunicator::do_reduce_scatter(const Call& call, void* shard, void* input) {
  return start(call, shard, input);
}

Work MpiCommunicator::do_all_gather(const Call& call, void* output, const void* shard) {
  return start(call, output, shard);
}

Work MpiCommunicator::do_all_to_all(const Call& call, void* output, const void* input) {
  return start(call, output, input);
}

Work MpiCommunicator::do_broadcast(const Call& call, void* buffer) {
  return start(call, buffer, nullptr);
}

void MpiCommunicator::do_barrier(const Call& call) {
  start(call, nullptr, nullptr).wait();
}

}  // namespace mxopt
