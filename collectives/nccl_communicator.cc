#include "mxopt/collectives/nccl_communicator.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <exception>
#include <functional>
#include <mutex>
#include <optional>
#include <span>
#include <sstream>
#include <thread>
#include <utility>

#include <cuda_runtime.h>
#include <nccl.h>

#include "mxopt/collectives/deadline.h"
#include "mxopt/collectives/host_exchange.h"
#include "mxopt/collectives/nccl_preflight.h"
#include "mxopt/collectives/nccl_window.h"
#include "mxopt/collectives/process_identity.h"
#include "mxopt/params/check.h"
#include "mxopt/params/cuda_handles.h"

/// Throws BackendError when NCCL refuses the call; one that NCCL goes on with in the background is not
/// refused.
#define MXOPT_NCCL_CHECK(call, rank)                 \
  do {                                               \
    const ncclResult_t mxopt_result = (call);        \
    if (is_error(mxopt_result)) [[unlikely]]         \
      ::mxopt::fail_nccl(mxopt_result, #call, rank); \
  } while (false)

namespace mxopt {

namespace {

using cuda::DeviceGuard;

/// How long an abort may take. It has been seen to hang.
constexpr double kAbortGraceS = 10;

bool is_error(ncclResult_t result) {
  return result != ncclSuccess && result != ncclInProgress;
}

/// "unhandled cuda error; last NCCL message: ...".
std::string nccl_text(ncclResult_t result) {
  std::string text = ncclGetErrorString(result);
  const char* const last = ncclGetLastError(nullptr);
  if (last != nullptr && *last != 0) text += std::string("; last NCCL message: ") + last;
  return text;
}

[[noreturn]] void fail_nccl(ncclResult_t result, const std::string& call, int rank) {
  throw BackendError(call + " failed on rank " + std::to_string(rank) + ": code " + std::to_string(result) +
                     ", " + nccl_text(result));
}

int loaded_version() {
  int version = 0;
  MXOPT_NCCL_CHECK(ncclGetVersion(&version), -1);
  return version;
}

void check_version() {
  const std::string problem = nccl_version_problem(NCCL_VERSION_CODE, loaded_version());
  if (!problem.empty()) throw ConfigError(problem);
}

/// An error of asking counts as one of the communicator.
ncclResult_t state_of(ncclComm_t comm) {
  ncclResult_t state = ncclSuccess;
  const ncclResult_t asked = ncclCommGetAsyncError(comm, &state);
  return asked == ncclSuccess ? state : asked;
}

/// The state of `comm` once NCCL has done what it was asked in the background; ncclInProgress at the
/// deadline.
ncclResult_t await_ready(ncclComm_t comm, const Deadline& deadline) {
  ncclResult_t state = state_of(comm);
  while (state == ncclInProgress && !deadline.passed()) {
    std::this_thread::yield();
    state = state_of(comm);
  }
  return state;
}

/// Runs `body`, which must not throw, on a thread of its own and waits for its end, but not for ever. False:
/// it is still running, and goes on.
bool run_bounded(std::function<void()> body, double limit_s) {
  struct Progress {
    std::mutex mutex;
    std::condition_variable changed;
    bool ended = false;
  };
  const auto progress = std::make_shared<Progress>();
  std::thread([progress, body = std::move(body)] {
    body();
    {
      const std::lock_guard lock(progress->mutex);
      progress->ended = true;
    }
    progress->changed.notify_all();
  }).detach();
  std::unique_lock lock(progress->mutex);
  return progress->changed.wait_for(lock, std::chrono::duration<double>(limit_s),
                                    [&] { return progress->ended; });
}

/// For what NCCL or the GPU may still write to, when nobody can tell.
void keep_until_process_ends(std::shared_ptr<void> object) {
  static std::mutex mutex;
  static auto* const kept = new std::vector<std::shared_ptr<void>>();
  const std::lock_guard lock(mutex);
  kept->push_back(std::move(object));
}

/// Collective over the ranks of this host. True when all of them came and nothing had failed; else aborts.
bool destroy_comm(ncclComm_t comm, double timeout_s) {
  const Deadline deadline(timeout_s);
  ncclResult_t state = ncclCommFinalize(comm);
  if (state == ncclInProgress) state = await_ready(comm, deadline);
  if (state == ncclSuccess) return ncclCommDestroy(comm) == ncclSuccess;
  ncclCommAbort(comm);
  return false;
}

struct HighPriorityStreamTraits {
  using Handle = cudaStream_t;
  static Handle create() {
    int least = 0;
    int greatest = 0;
    MXOPT_CUDA_CHECK(cudaDeviceGetStreamPriorityRange(&least, &greatest));
    Handle stream = nullptr;
    MXOPT_CUDA_CHECK(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, greatest));
    return stream;
  }
  static void destroy(Handle stream) noexcept { cudaStreamDestroy(stream); }
};

bool has_passed(cudaEvent_t event) {
  const cuda::RelaxedCapture relaxed;
  const cudaError_t state = cudaEventQuery(event);
  if (state == cudaErrorNotReady) return false;
  if (state != cudaSuccess) cuda::fail_call(state, "cudaEventQuery(event)");
  return true;
}

Device checked(Device device) {
  if (device.kind != DeviceKind::kCuda) {
    throw ConfigError("the NCCL transport was asked for on the host; it moves memory of CUDA devices only");
  }
  default_allocator(device);  // refuses devices that are not there
  return device;
}

ncclDataType_t nccl_type(DType dtype) {
  switch (dtype) {
    case DType::kFp32:
      return ncclFloat32;
    case DType::kBf16:
      return ncclBfloat16;
    case DType::kUint8:
      return ncclUint8;
    case DType::kInt64:
      return ncclInt64;
  }
  return ncclNumTypes;
}

ncclRedOp_t nccl_op(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
      return ncclSum;
    case ReduceOp::kAvg:
      return ncclAvg;
    case ReduceOp::kMax:
      return ncclMax;
  }
  return ncclNumOps;
}

NcclCandidate candidate(Device device) {
  check_version();
  cudaDeviceProp properties{};
  MXOPT_CUDA_CHECK(cudaGetDeviceProperties(&properties, device.index));
  std::array<char, 32> pci_bus_id{};
  MXOPT_CUDA_CHECK(
      cudaDeviceGetPCIBusId(pci_bus_id.data(), static_cast<int>(pci_bus_id.size()), device.index));
  NcclCandidate mine;
  mine.set_host(host_name());
  mine.set_pci_bus_id(pci_bus_id.data());
  static_assert(sizeof(properties.uuid.bytes) == sizeof(mine.uuid));
  std::memcpy(mine.uuid.data(), properties.uuid.bytes, sizeof(mine.uuid));
  mine.device = device.index;
  mine.library_version = loaded_version();
  return mine;
}

template <class T>
TypedSpan bytes_of(std::span<T> objects) {
  return {objects.data(), DType::kUint8, static_cast<std::int64_t>(objects.size_bytes())};
}

/// NCCL's unique id of the new group, from rank 0.
ncclUniqueId exchange_id(Communicator& host) {
  struct Message {
    ncclUniqueId id;
    std::array<char, 512> problem;
  };
  Message message{};
  if (host.rank() == 0) {
    const ncclResult_t result = ncclGetUniqueId(&message.id);
    if (result != ncclSuccess) {
      const std::string text = "ncclGetUniqueId failed on rank 0: " + nccl_text(result);
      text.copy(message.problem.data(), message.problem.size() - 1);
    }
  }
  broadcast_on_host(host, bytes_of(std::span(&message, 1)), 0, Traffic::kControl);
  if (message.problem[0] != 0) throw BackendError(message.problem.data());
  return message.id;
}

}  // namespace

/// Events for reuse: none is made while there is a free one.
class NcclCommunicator::EventPool {
 public:
  explicit EventPool(int device) : device_(device) {}

  cuda::UniqueEvent take() {
    if (free_.empty()) {
      cuda::UniqueEvent made(device_);
      free_.reserve(++made_);  // so that give() can not fail
      return made;
    }
    cuda::UniqueEvent event = std::move(free_.back());
    free_.pop_back();
    return event;
  }
  void give(cuda::UniqueEvent event) noexcept { free_.push_back(std::move(event)); }

 private:
  int device_;
  std::size_t made_ = 0;
  std::vector<cuda::UniqueEvent> free_;
};

/// A call with its buffers.
struct NcclCommunicator::Posted {
  Call call;
  void* out = nullptr;  // the whole buffer of a call that has only one
  const void* in = nullptr;
};

/// What goes to NCCL together and is complete together: a call, or a group of calls.
struct NcclCommunicator::Batch {
  enum class Stage { kOpen, kIssued, kComplete };

  Batch(std::shared_ptr<EventPool> events, bool is_captured)
      : pool(std::move(events)), event(pool->take()), captured(is_captured) {}
  ~Batch() { pool->give(std::move(event)); }
  Batch(const Batch&) = delete;
  Batch& operator=(const Batch&) = delete;

  std::shared_ptr<EventPool> pool;
  cuda::UniqueEvent event;  // behind the calls, once they are issued
  bool captured;            // part of a graph, of whose runs the host learns nothing
  Stage stage = Stage::kOpen;
  std::int64_t calls = 0;
};

/// The communicator's state, which Works share.
class NcclCommunicator::Engine {
 public:
  Engine(Device device, double timeout_s, std::shared_ptr<Buffer> token = nullptr)
      : device_(checked(device)),
        timeout_s_(timeout_s),
        stream_(device_.index),
        arrival_(device_.index),
        pool_(std::make_shared<EventPool>(device_.index)),
        token_(std::move(token)) {
    Deadline{timeout_s};  // refuses a bad timeout
    if (token_ == nullptr) token_ = std::make_shared<Buffer>(1, device_, default_allocator(device_));
    cudaDeviceProp properties{};
    MXOPT_CUDA_CHECK(cudaGetDeviceProperties(&properties, device_.index));
    place_ = "cuda:" + std::to_string(device_.index) + " (" + properties.name + ")";
  }

  /// Collective: makes the communicator.
  void connect(const ncclUniqueId& id, int rank, int size);
  /// Takes one that is ready.
  void attach(ncclComm_t comm, bool owned, bool blocking);

  int rank() const { return rank_; }
  int size() const { return size_; }
  Device device() const { return device_; }
  double timeout_s() const { return timeout_s_; }
  std::string describe() const;

  std::shared_ptr<Batch> start(const Call& call, void* out, const void* in);
  void barrier(const Call& call);
  void group_begin(const Call& call);
  void group_end();
  std::shared_ptr<Engine> split(const Call& call, int color, int key);
  /// Why the buffer can not be a window; empty when it can.
  std::string window_problem(const Call& call, const Buffer& buffer) const;
  /// Collective. NCCL's handle.
  ncclWindow_vidmem* register_window(const Call& call, const Buffer& buffer);
  void deregister_window(ncclWindow_vidmem* window) noexcept;
  void abort(const std::string& reason) noexcept;
  Health health(std::int64_t calls);

  /// True when the batch is complete. Throws PeerError when it failed or the deadline has passed.
  bool settled(Batch& batch, const Call& call, const Deadline& deadline);
  void join(Batch& batch, const Call& call, StreamRef stream);

  void close(const Call& call);
  /// Gives back what NCCL holds, by an abort if anything has failed. False when not all went well. Ends.
  bool release() noexcept;

 private:
  bool is_own_stream_captured() const { return is_capturing(device_, StreamRef(stream_.get())); }
  /// NCCL's own word on the communicator.
  ncclResult_t state() const { return comm_ == nullptr ? ncclSuccess : state_of(comm_); }

  void check_alive(const Call& call, double elapsed_ms = 0) const;
  /// For calls that make the host wait.
  void check_no_group_and_no_capture(const Call& call) const;
  /// A failure of this rank alone ends the communicator, so that the peers' waits end.
  template <class Body>
  void guarded(const Body& body);

  void issue(const std::shared_ptr<Batch>& batch, std::span<const Posted> posts);
  ncclResult_t enqueue(const Posted& post) const;
  void finish_background(ncclComm_t comm, const Call& call);
  void reap();
  void drain(const Call& call);

  /// Takes the communicator out of use, and aborts it if it is ours.
  void give_up(const std::string& reason, int culprit_rank) noexcept;
  [[noreturn]] void fail_peer(const Call& call, double elapsed_ms, ncclResult_t state);

  const Device device_;
  const double timeout_s_;
  const cuda::UniqueHandle<HighPriorityStreamTraits> stream_;
  const cuda::UniqueEvent arrival_;  // of a call, on its stream; read by the runtime when it is waited for
  const std::shared_ptr<EventPool> pool_;
  std::shared_ptr<Buffer> token_;  // what a barrier reduces; shared with split groups
  std::string place_;

  ncclComm_t comm_ = nullptr;  // null: not there yet, failed or closed
  bool owned_ = false;
  bool blocking_ = false;
  int rank_ = -1;
  int size_ = 0;

  std::shared_ptr<Batch> open_;                 // the group that is being collected, else null
  std::vector<Posted> queued_;                  // its calls
  std::deque<std::shared_ptr<Batch>> pending_;  // in the stream's order

  std::string first_failure_;
  int culprit_rank_ = -1;
  bool abort_ended_ = false;
  bool closed_ = false;
};

void NcclCommunicator::Engine::connect(const ncclUniqueId& id, int rank, int size) {
  rank_ = rank;
  size_ = size;
  const DeviceGuard guard(device_.index);
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  const Deadline deadline(timeout_s_);
  const auto slot = std::make_shared<ncclComm_t>(nullptr);
  const ncclResult_t begun = ncclCommInitRankConfig(slot.get(), size, id, rank, &config);
  comm_ = *slot;
  owned_ = true;
  // Why: NCCL starts the work in the background and says so, unless it was told from outside to block.
  blocking_ = begun == ncclSuccess;
  if (comm_ == nullptr) fail_nccl(begun, "ncclCommInitRankConfig", rank);
  const ncclResult_t state = begun == ncclInProgress ? await_ready(comm_, deadline) : begun;
  if (state == ncclSuccess) return;
  keep_until_process_ends(slot);
  fail_peer({.operation = "init", .stream = {}}, deadline.elapsed_ms(), state);
}

void NcclCommunicator::Engine::attach(ncclComm_t comm, bool owned, bool blocking) {
  MXOPT_NCCL_CHECK(ncclCommUserRank(comm, &rank_), -1);
  MXOPT_NCCL_CHECK(ncclCommCount(comm, &size_), rank_);
  blocking_ = blocking;
  owned_ = owned;
  comm_ = comm;
}

std::string NcclCommunicator::Engine::describe() const {
  return "nccl " + nccl_version_text(loaded_version()) + ", rank " + std::to_string(rank_) + " of " +
         std::to_string(size_) + " on " + place_ + (blocking_ ? ", blocking" : "");
}

void NcclCommunicator::Engine::check_alive(const Call& call, double elapsed_ms) const {
  if (first_failure_.empty()) return;
  throw PeerError({.operation = call.signature(),
                   .sequence = call.sequence,
                   .elapsed_ms = elapsed_ms,
                   .rank = rank_,
                   .culprit_rank = culprit_rank_,
                   .host = host_name(),
                   .pid = process_id(),
                   .reason = first_failure_});
}

void NcclCommunicator::Engine::check_no_group_and_no_capture(const Call& call) const {
  MXOPT_CHECK(open_ == nullptr, call.signature() << " between group_begin() and group_end()");
  MXOPT_CHECK(!is_own_stream_captured(),
              call.signature() << " while calls of the communicator are being captured into a graph");
}

template <class Body>
void NcclCommunicator::Engine::guarded(const Body& body) {
  try {
    body();
  } catch (const BackendError& error) {
    give_up(error.what(), rank_);
    throw;
  }
}

std::shared_ptr<NcclCommunicator::Batch> NcclCommunicator::Engine::start(const Call& call, void* out,
                                                                         const void* in) {
  check_alive(call);
  MXOPT_CHECK(!closed_, call.signature() << " after close()");
  const DeviceGuard guard(device_.index);
  const cudaStream_t stream = cuda::native(call.stream);
  const bool captured = is_capturing(device_, call.stream);
  MXOPT_CHECK(captured || !is_own_stream_captured(),
              call.signature() << ": its stream is not being captured, but earlier calls of the communicator "
                                  "are; capture all or none");
  MXOPT_CHECK(open_ == nullptr || open_->calls == 0 || open_->captured == captured,
              call.signature() << ": its stream is being captured, but earlier calls of its group are not; "
                                  "capture all or none");
  const Posted post{.call = call, .out = out, .in = in};
  std::shared_ptr<Batch> batch = open_;
  guarded([&] {
    if (!captured) reap();
    if (batch == nullptr) batch = std::make_shared<Batch>(pool_, captured);
    batch->captured = captured;
    ++batch->calls;
    MXOPT_CUDA_CHECK(cudaEventRecord(arrival_.get(), stream));
    MXOPT_CUDA_CHECK(cudaStreamWaitEvent(stream_.get(), arrival_.get(), 0));
    if (open_ != nullptr) {
      queued_.push_back(post);
    } else {
      issue(batch, std::span(&post, 1));
    }
  });
  return batch;
}

void NcclCommunicator::Engine::barrier(const Call& call) {
  check_alive(call);
  MXOPT_CHECK(!closed_, call.signature() << " after close()");
  const DeviceGuard guard(device_.index);
  check_no_group_and_no_capture(call);
  const Posted post{.call = call, .out = token_->data()};
  std::shared_ptr<Batch> batch;
  guarded([&] {
    batch = std::make_shared<Batch>(pool_, false);
    ++batch->calls;
    issue(batch, std::span(&post, 1));
  });
  const Deadline deadline(timeout_s_);
  while (!settled(*batch, call, deadline)) std::this_thread::yield();
}

void NcclCommunicator::Engine::group_begin(const Call& call) {
  check_alive(call);
  MXOPT_CHECK(!closed_, "group_begin() after close()");
  MXOPT_CHECK(open_ == nullptr, "group_begin() twice without a group_end()");
  guarded([&] { open_ = std::make_shared<Batch>(pool_, false); });
}

void NcclCommunicator::Engine::group_end() {
  MXOPT_CHECK(open_ != nullptr || !first_failure_.empty(), "group_end() without a group_begin()");
  const std::shared_ptr<Batch> batch = std::exchange(open_, nullptr);
  const std::vector<Posted> posts = std::exchange(queued_, {});
  if (posts.empty()) return;
  check_alive(posts.front().call);
  const DeviceGuard guard(device_.index);
  guarded([&] { issue(batch, posts); });
}

/// NCCL's groups belong to the thread, so one is opened and closed here and never left open for the caller.
void NcclCommunicator::Engine::issue(const std::shared_ptr<Batch>& batch, std::span<const Posted> posts) {
  MXOPT_NCCL_CHECK(ncclGroupStart(), rank_);
  ncclResult_t result = ncclSuccess;
  std::size_t at = 0;
  while (at < posts.size() && !is_error(result)) result = enqueue(posts[at++]);
  const ncclResult_t ended = ncclGroupEnd();  // after a refused call too: it closes the thread's group
  if (is_error(result)) fail_nccl(result, posts[at - 1].call.signature(), rank_);
  if (is_error(ended)) fail_nccl(ended, "ncclGroupEnd() of " + posts.front().call.signature(), rank_);
  finish_background(comm_, posts.front().call);
  MXOPT_CUDA_CHECK(cudaEventRecord(batch->event.get(), stream_.get()));
  batch->stage = Batch::Stage::kIssued;
  if (!batch->captured) pending_.push_back(batch);
}

ncclResult_t NcclCommunicator::Engine::enqueue(const Posted& post) const {
  const Call& call = post.call;
  const auto elems = static_cast<std::size_t>(call.elems);
  const cudaStream_t stream = stream_.get();
  if (call.operation == "barrier") {
    return ncclAllReduce(post.out, post.out, 1, ncclUint8, ncclMax, comm_, stream);
  }
  if (elems == 0) return ncclSuccess;  // nothing to send, on any rank
  const ncclDataType_t type = nccl_type(call.dtype);
  if (call.operation == "all_reduce") {
    return ncclAllReduce(post.out, post.out, elems, type, nccl_op(call.op), comm_, stream);
  }
  if (call.operation == "reduce_scatter") {
    return ncclReduceScatter(post.in, post.out, elems, type, nccl_op(call.op), comm_, stream);
  }
  if (call.operation == "all_gather") return ncclAllGather(post.in, post.out, elems, type, comm_, stream);
  if (call.operation == "all_to_all") {
    // They go out together, as every call is issued within a group of NCCL's.
    const std::int64_t bytes = call.elems * dtype_bytes(call.dtype);
    ncclResult_t result = ncclSuccess;
    for (int peer = 0; peer < size_ && !is_error(result); ++peer) {
      result = ncclSend(static_cast<const std::uint8_t*>(post.in) + peer * bytes, elems, type, peer, comm_,
                        stream);
      if (is_error(result)) break;
      result =
          ncclRecv(static_cast<std::uint8_t*>(post.out) + peer * bytes, elems, type, peer, comm_, stream);
    }
    return result;
  }
  return ncclBroadcast(post.out, post.out, elems, type, call.root, comm_, stream);
}

/// Until NCCL has launched what it was given, nothing else may be put on the stream or asked of NCCL.
void NcclCommunicator::Engine::finish_background(ncclComm_t comm, const Call& call) {
  const Deadline deadline(timeout_s_);
  const ncclResult_t state = await_ready(comm, deadline);
  if (state != ncclSuccess) fail_peer(call, deadline.elapsed_ms(), state);
}

/// Marks what is complete. With an error about, an event that has passed says nothing.
void NcclCommunicator::Engine::reap() {
  if (state() != ncclSuccess) return;
  while (!pending_.empty()) {
    Batch& first = *pending_.front();
    if (first.stage != Batch::Stage::kComplete && !has_passed(first.event.get())) return;
    first.stage = Batch::Stage::kComplete;
    pending_.pop_front();
  }
}

bool NcclCommunicator::Engine::settled(Batch& batch, const Call& call, const Deadline& deadline) {
  if (batch.stage == Batch::Stage::kComplete) return true;
  check_alive(call, deadline.elapsed_ms());
  MXOPT_CHECK(batch.stage == Batch::Stage::kIssued, call.signature()
                                                        << ": its Work is valid after group_end()");
  MXOPT_CHECK(!batch.captured,
              call.signature() << " was captured into a graph: the host can not tell whether it is complete");
  bool passed = false;
  guarded([&] { passed = has_passed(batch.event.get()); });
  const ncclResult_t now = state();
  if (is_error(now)) fail_peer(call, deadline.elapsed_ms(), now);
  if (passed) {
    batch.stage = Batch::Stage::kComplete;
    guarded([&] { reap(); });
  } else if (deadline.passed()) {
    fail_peer(call, deadline.elapsed_ms(), now);
  }
  return passed;
}

void NcclCommunicator::Engine::join(Batch& batch, const Call& call, StreamRef stream) {
  if (batch.stage == Batch::Stage::kComplete) return;
  check_alive(call);
  MXOPT_CHECK(batch.stage == Batch::Stage::kIssued, call.signature()
                                                        << ": its Work is valid after group_end()");
  const DeviceGuard guard(device_.index);
  guarded([&] { MXOPT_CUDA_CHECK(cudaStreamWaitEvent(cuda::native(stream), batch.event.get(), 0)); });
}

void NcclCommunicator::Engine::drain(const Call& call) {
  const Deadline deadline(timeout_s_);
  while (!pending_.empty()) {
    const std::shared_ptr<Batch> last = pending_.back();
    while (!settled(*last, call, deadline)) std::this_thread::yield();
    if (!pending_.empty() && pending_.back() == last) pending_.clear();  // all before it are complete as well
  }
}

std::shared_ptr<NcclCommunicator::Engine> NcclCommunicator::Engine::split(const Call& call, int color,
                                                                          int key) {
  check_alive(call);
  MXOPT_CHECK(!closed_, call.signature() << " after close()");
  const DeviceGuard guard(device_.index);
  check_no_group_and_no_capture(call);
  drain(call);
  std::shared_ptr<Engine> part;
  // NCCL writes it in the background, also after this rank has given up.
  const auto slot = std::make_shared<ncclComm_t>(nullptr);
  try {
    guarded([&] {
      part = std::make_shared<Engine>(device_, timeout_s_, token_);
      MXOPT_NCCL_CHECK(ncclCommSplit(comm_, color, key, slot.get(), nullptr), rank_);
      finish_background(comm_, call);
      if (*slot == nullptr) fail_nccl(ncclInternalError, "ncclCommSplit gave no communicator", rank_);
      finish_background(*slot, call);
      part->attach(*slot, true, blocking_);
    });
  } catch (const std::exception&) {
    keep_until_process_ends(slot);
    throw;
  }
  return part;
}

std::string NcclCommunicator::Engine::window_problem(const Call& call, const Buffer& buffer) const {
  check_alive(call);
  MXOPT_CHECK(!closed_, call.signature() << " after close()");
  const DeviceGuard guard(device_.index);
  return cuda::window_problem(buffer, comm_, size_);
}

ncclWindow_vidmem* NcclCommunicator::Engine::register_window(const Call& call, const Buffer& buffer) {
  check_alive(call);
  const DeviceGuard guard(device_.index);
  // NCCL writes it in the background, also after this rank has given up.
  const auto slot = std::make_shared<ncclWindow_vidmem*>(nullptr);
  try {
    guarded([&] {
      const auto result = static_cast<ncclResult_t>(cuda::register_window(comm_, buffer, slot.get()));
      if (is_error(result)) fail_nccl(result, "ncclCommWindowRegister", rank_);
      finish_background(comm_, call);
    });
  } catch (const std::exception&) {
    keep_until_process_ends(slot);
    throw;
  }
  return *slot;
}

void NcclCommunicator::Engine::deregister_window(ncclWindow_vidmem* window) noexcept {
  if (comm_ == nullptr) return;  // windows go with the communicator
  int former = 0;
  cudaGetDevice(&former);
  cudaSetDevice(device_.index);
  cudaDeviceSynchronize();  // stores of a graph may be under way, of which nobody here knows
  const auto result = static_cast<ncclResult_t>(cuda::deregister_window(comm_, window));
  try {
    if (result == ncclInProgress) await_ready(comm_, Deadline(timeout_s_));
  } catch (const std::exception&) {  // nobody to tell
  }
  cudaSetDevice(former);
}

void NcclCommunicator::Engine::give_up(const std::string& reason, int culprit_rank) noexcept {
  if (!first_failure_.empty()) return;
  try {
    try {
      reap();
    } catch (const BackendError&) {  // then these calls count as failed
    }
    first_failure_ = reason.empty() ? "no reason was given" : reason;
    culprit_rank_ = culprit_rank;
    const ncclComm_t comm = std::exchange(comm_, nullptr);
    if (comm == nullptr || !owned_) return;
    abort_ended_ = run_bounded(
        [comm, device = device_.index] {
          cudaSetDevice(device);
          ncclCommAbort(comm);
        },
        kAbortGraceS);
  } catch (const std::exception&) {  // no memory or no thread: the communicator stays as it is, out of use
    comm_ = nullptr;
  }
}

void NcclCommunicator::Engine::fail_peer(const Call& call, double elapsed_ms, ncclResult_t state) {
  std::ostringstream reason;
  if (is_error(state)) {
    reason << "NCCL reports code " << static_cast<int>(state) << ", " << nccl_text(state);
  } else {
    reason << "not complete within " << timeout_s_ << " s, and NCCL does not tell which rank is late";
    const char* const last = ncclGetLastError(nullptr);
    if (last != nullptr && *last != 0) reason << "; last NCCL message: " << last;
  }
  give_up(call.signature() + " #" + std::to_string(call.sequence) + " failed: " + reason.str(), -1);
  reason << (!owned_        ? "; the communicator is the caller's to abort"
             : abort_ended_ ? "; the communicator is aborted"
                            : "; its abort has not ended yet");
  throw PeerError({.operation = call.signature(),
                   .sequence = call.sequence,
                   .elapsed_ms = elapsed_ms,
                   .rank = rank_,
                   .culprit_rank = -1,
                   .host = host_name(),
                   .pid = process_id(),
                   .reason = reason.str()});
}

void NcclCommunicator::Engine::abort(const std::string& reason) noexcept {
  try {
    give_up("rank " + std::to_string(rank_) + " aborted: " + reason, rank_);
  } catch (const std::exception&) {  // no memory for the text
    give_up("", rank_);
  }
}

Health NcclCommunicator::Engine::health(std::int64_t calls) {
  if (first_failure_.empty()) {
    const ncclResult_t now = state();
    if (is_error(now)) {
      give_up("NCCL reports code " + std::to_string(now) + ", " + nccl_text(now), -1);
    } else {
      try {
        guarded([&] { reap(); });
      } catch (const BackendError&) {  // it is the failure that is reported
      }
    }
  }
  Health health{.ok = first_failure_.empty(), .reason = first_failure_, .calls = calls};
  for (const auto& batch : pending_) health.outstanding += batch->calls;
  if (open_ != nullptr) health.outstanding += open_->calls;
  return health;
}

void NcclCommunicator::Engine::close(const Call& call) {
  if (closed_) return;
  check_alive(call);
  const DeviceGuard guard(device_.index);
  check_no_group_and_no_capture(call);
  drain(call);
  const Deadline deadline(timeout_s_);
  if (!release()) check_alive(call, deadline.elapsed_ms());
}

bool NcclCommunicator::Engine::release() noexcept {
  if (closed_) return true;
  closed_ = true;
  try {
    std::shared_ptr<Buffer> token = std::move(token_);
    if (!first_failure_.empty() && !abort_ended_) {
      // Freeing waits for what runs on the device, which may be for ever.
      keep_until_process_ends(std::move(token));
      return false;
    }
    const ncclComm_t comm = std::exchange(comm_, nullptr);
    const auto good = std::make_shared<std::atomic<bool>>(true);
    // On a thread of its own: each of these calls may wait for other ranks.
    const bool ended = run_bounded(
        [comm = owned_ ? comm : nullptr, device = device_.index, timeout_s = timeout_s_, good,
         token = std::move(token)]() mutable {
          cudaSetDevice(device);
          if (comm != nullptr) *good = destroy_comm(comm, timeout_s);
          token.reset();
        },
        timeout_s_ + kAbortGraceS);
    if (ended && *good) return first_failure_.empty();
    if (first_failure_.empty()) first_failure_ = "not all ranks have closed the communicator";
  } catch (const std::exception&) {  // no memory or no thread: what NCCL holds is not given back
    comm_ = nullptr;
    if (first_failure_.empty()) first_failure_ = "close failed";  // short enough to need no memory
  }
  return false;
}

class NcclCommunicator::CallState final : public Work::State {
 public:
  CallState(std::shared_ptr<Engine> engine, std::shared_ptr<Batch> batch, const Call& call)
      : engine_(std::move(engine)), batch_(std::move(batch)), call_(call) {}

  bool test() override {
    if (!deadline_.has_value()) deadline_.emplace(engine_->timeout_s());
    return engine_->settled(*batch_, call_, *deadline_);
  }
  void wait() override {
    deadline_.emplace(engine_->timeout_s());
    while (!engine_->settled(*batch_, call_, *deadline_)) std::this_thread::yield();
  }
  void join(StreamRef stream) override { engine_->join(*batch_, call_, stream); }

 private:
  std::shared_ptr<Engine> engine_;
  std::shared_ptr<Batch> batch_;
  Call call_;
  std::optional<Deadline> deadline_;  // from the first test(), and anew from each wait()
};

/// Keeps a window open.
class NcclCommunicator::Registration {
 public:
  Registration(std::shared_ptr<Engine> engine, ncclWindow_vidmem* window)
      : engine_(std::move(engine)), window_(window) {}
  ~Registration() {
    if (window_ != nullptr) engine_->deregister_window(window_);
  }
  Registration(const Registration&) = delete;
  Registration& operator=(const Registration&) = delete;

 private:
  std::shared_ptr<Engine> engine_;
  ncclWindow_vidmem* window_;
};

std::unique_ptr<NcclCommunicator> NcclCommunicator::create(Communicator& host, Device device,
                                                           double timeout_s) {
  // What this rank can find wrong alone is told to all before it is thrown, so that all fail alike.
  std::shared_ptr<Engine> engine;
  NcclCandidate mine;
  std::exception_ptr own_problem;
  try {
    engine = std::make_shared<Engine>(device, timeout_s);
    mine = candidate(device);
  } catch (const std::exception& error) {
    own_problem = std::current_exception();
    mine.set_problem(error.what());
  }
  std::vector<NcclCandidate> all(static_cast<std::size_t>(host.size()));
  all_gather_on_host(host, bytes_of(std::span(all)), bytes_of(std::span(&mine, 1)), Traffic::kControl);
  if (own_problem != nullptr) std::rethrow_exception(own_problem);
  const std::string problem = nccl_problem(all);
  if (!problem.empty()) throw ConfigError(problem);

  const ncclUniqueId id = exchange_id(host);
  engine->connect(id, host.rank(), host.size());
  return std::unique_ptr<NcclCommunicator>(new NcclCommunicator(std::move(engine), nullptr));
}

std::unique_ptr<NcclCommunicator> NcclCommunicator::create(std::unique_ptr<Communicator> host, Device device,
                                                           double timeout_s) {
  MXOPT_CHECK(host != nullptr, "NcclCommunicator needs a host communicator");
  std::unique_ptr<NcclCommunicator> made = create(*host, device, timeout_s);
  made->host_ = std::move(host);
  return made;
}

std::unique_ptr<NcclCommunicator> NcclCommunicator::create(const RendezvousResult& rendezvous, Device device,
                                                           double timeout_s) {
  ncclUniqueId id{};
  MXOPT_CHECK(rendezvous.payload.size() == sizeof(id),
              "payload of " << rendezvous.payload.size() << " bytes; NCCL's unique id has " << sizeof(id));
  std::memcpy(&id, rendezvous.payload.data(), sizeof(id));
  check_version();
  const auto engine = std::make_shared<Engine>(device, timeout_s);
  engine->connect(id, rendezvous.rank, static_cast<int>(rendezvous.ranks.size()));
  return std::unique_ptr<NcclCommunicator>(new NcclCommunicator(engine, nullptr));
}

std::vector<std::uint8_t> NcclCommunicator::rendezvous_payload() {
  check_version();
  ncclUniqueId id{};
  MXOPT_NCCL_CHECK(ncclGetUniqueId(&id), 0);
  std::vector<std::uint8_t> payload(sizeof(id));
  std::memcpy(payload.data(), &id, sizeof(id));
  return payload;
}

std::unique_ptr<NcclCommunicator> NcclCommunicator::adopt(ncclComm* comm, double timeout_s) {
  return of(comm, true, timeout_s);
}

std::unique_ptr<NcclCommunicator> NcclCommunicator::borrow(ncclComm* comm, double timeout_s) {
  return of(comm, false, timeout_s);
}

std::unique_ptr<NcclCommunicator> NcclCommunicator::of(ncclComm* comm, bool owned, double timeout_s) {
  MXOPT_CHECK(comm != nullptr, "NcclCommunicator of a null communicator");
  check_version();
  const Deadline deadline(timeout_s);
  const ncclResult_t state = await_ready(comm, deadline);  // it may still be connecting
  if (state != ncclSuccess) {
    throw PeerError({.operation = "init()",
                     .elapsed_ms = deadline.elapsed_ms(),
                     .host = host_name(),
                     .pid = process_id(),
                     .reason = "the caller's communicator is not ready: " + nccl_text(state)});
  }
  int device = 0;
  MXOPT_NCCL_CHECK(ncclCommCuDevice(comm, &device), -1);
  const auto engine = std::make_shared<Engine>(Device{DeviceKind::kCuda, device}, timeout_s);
  engine->attach(comm, owned, false);
  return std::unique_ptr<NcclCommunicator>(new NcclCommunicator(engine, nullptr));
}

NcclCommunicator::NcclCommunicator(std::shared_ptr<Engine> engine, std::unique_ptr<Communicator> host)
    : host_(std::move(host)), engine_(std::move(engine)) {}

NcclCommunicator::~NcclCommunicator() {
  engine_->release();  // a destructor has nobody to tell; close() is for those who care
}

void NcclCommunicator::close() {
  engine_->close({.sequence = issued(), .operation = "close", .stream = {}});
}

int NcclCommunicator::rank() const {
  return engine_->rank();
}

int NcclCommunicator::size() const {
  return engine_->size();
}

Device NcclCommunicator::device() const {
  return engine_->device();
}

std::string NcclCommunicator::describe() const {
  return engine_->describe();
}

void NcclCommunicator::group_begin() {
  engine_->group_begin({.sequence = issued(), .operation = "group_begin", .stream = {}});
}

void NcclCommunicator::group_end() {
  engine_->group_end();
}

std::unique_ptr<Communicator> NcclCommunicator::split(int color, int key) {
  MXOPT_CHECK(color >= 0, "split: color " << color << "; allowed are 0 and above");
  const Call call{.sequence = next_sequence(), .operation = "split", .stream = {}};
  return std::unique_ptr<Communicator>(new NcclCommunicator(engine_->split(call, color, key), nullptr));
}

std::shared_ptr<Allocator> NcclCommunicator::window_allocator() {
  return cuda::make_window_allocator(device().index);
}

/// A failure of this rank alone between the messages of `body` ends the communicator, so that the peers do
/// not wait.
template <class Body>
auto NcclCommunicator::or_abort(const Body& body) {
  try {
    return body();
  } catch (const BackendError& error) {
    abort(error.what());
    throw;
  }
}

PeerWindow NcclCommunicator::open_window(const Buffer& buffer) {
  const Call call{.sequence = next_sequence(), .operation = "open_window", .stream = {}};
  return or_abort([&] {
    PeerWindow window;
    window.reason = first_problem(*this, engine_->window_problem(call, buffer));
    if (!window.reason.empty()) return window;
    if (buffer.bytes() == 0) {
      window.bases.resize(static_cast<std::size_t>(size()), nullptr);
      return window;
    }
    ncclWindow_vidmem* const handle = engine_->register_window(call, buffer);
    const auto registration = std::make_shared<Registration>(engine_, handle);
    window.reason = first_problem(
        *this, cuda::is_window(handle) ? "" : "NCCL has no symmetric memory for this communicator");
    if (!window.reason.empty()) return window;
    window.bases = cuda::window_bases(handle, size(), device().index);
    window.bases[static_cast<std::size_t>(rank())] = buffer.data();  // NCCL's is a second address of it
    window.registration = registration;
    return window;
  });
}

CopyRates NcclCommunicator::measure_copy_rates() {
  if (copy_rates_.has_value()) return *copy_rates_;
  constexpr std::int64_t kBytes = std::int64_t{128} << 20;  // more than any cache holds
  constexpr int kCopies = 4;                                // at a time, so that the host's part is small
  constexpr int kRounds = 4;                                // the first is a warm-up
  return or_abort([&]() -> CopyRates {
    Buffer buffer;
    std::string problem;
    try {
      buffer = Buffer(2 * kBytes, device(), window_allocator());
    } catch (const std::exception& error) {  // told to all: nobody measures then
      problem = error.what();
    }
    problem = first_problem(*this, problem);
    if (!problem.empty()) return {.reason = problem};
    const PeerWindow window = open_window(buffer);
    if (!window.is_open()) return {.reason = window.reason};

    const Stream stream(device());
    std::uint8_t* const next = window.bases[static_cast<std::size_t>((rank() + 1) % size())];
    // Seconds per copy: to the peer, and in the own memory.
    std::array<double, 2> best = {1e9, 1e9};
    for (int round = 0; round < kRounds; ++round) {
      for (std::size_t i = 0; i < best.size(); ++i) {
        barrier();  // all ranks at the same time
        const auto begin = std::chrono::steady_clock::now();
        for (int copy = 0; copy < kCopies; ++copy) {
          cuda::store_bytes((i == 0 ? next : buffer.data()) + kBytes, buffer.data(), kBytes, device().index,
                            stream.ref());
        }
        synchronize(device(), stream.ref());
        const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - begin;
        if (round > 0) best[i] = std::min(best[i], elapsed.count() / kCopies);
      }
    }
    std::vector<std::array<double, 2>> of_all(static_cast<std::size_t>(size()));
    all_gather_on_host(*this, bytes_of(std::span(of_all)), bytes_of(std::span(&best, 1)), Traffic::kControl);
    for (const std::array<double, 2>& theirs : of_all) {
      for (std::size_t i = 0; i < best.size(); ++i) best[i] = std::max(best[i], theirs[i]);
    }
    barrier();  // before any rank's memory goes
    copy_rates_ = {static_cast<double>(kBytes) / best[0], 2 * static_cast<double>(kBytes) / best[1], ""};
    return *copy_rates_;
  });
}

void NcclCommunicator::abort(const std::string& reason) noexcept {
  engine_->abort(reason);
}

Health NcclCommunicator::health() {
  return engine_->health(issued());
}

Work NcclCommunicator::start(const Call& call, void* out, const void* in) {
  return Work(std::make_shared<CallState>(engine_, engine_->start(call, out, in), call));
}

Work NcclCommunicator::do_all_reduce(const Call& call, void* buffer) {
  return start(call, buffer, nullptr);
}

Work NcclCommunicator::do_reduce_scatter(const Call& call, void* shard, void* input) {
  return start(call, shard, input);
}

Work NcclCommunicator::do_all_gather(const Call& call, void* output, const void* shard) {
  return start(call, output, shard);
}

Work NcclCommunicator::do_all_to_all(const Call& call, void* output, const void* input) {
  return start(call, output, input);
}

Work NcclCommunicator::do_broadcast(const Call& call, void* buffer) {
  return start(call, buffer, nullptr);
}

void NcclCommunicator::do_barrier(const Call& call) {
  engine_->barrier(call);
}

}  // namespace mxopt
