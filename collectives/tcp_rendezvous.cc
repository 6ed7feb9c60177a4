#include "mxopt/collectives/tcp_rendezvous.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <csignal>
#include <deque>
#include <exception>
#include <limits>
#include <list>
#include <mutex>
#include <random>
#include <sstream>
#include <thread>
#include <utility>

#include <boost/asio/buffer.hpp>
#include <boost/asio/executor_work_guard.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/ip/v6_only.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/write.hpp>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include "mxopt/collectives/deadline.h"
#include "mxopt/collectives/peer_watch.h"
#include "mxopt/collectives/process_identity.h"
#include "mxopt/collectives/rendezvous_frames.h"
#include "mxopt/collectives/rendezvous_roster.h"
#include "mxopt/collectives/resolve_address.h"
#include "mxopt/params/check.h"

namespace mxopt {

namespace {

namespace asio = boost::asio;
using boost::system::error_code;
using tcp = asio::ip::tcp;
using Clock = PeerWatch::Clock;
using Seconds = std::chrono::duration<double>;

constexpr std::uint32_t kGeneration = 1;
constexpr std::size_t kMaxNoteBytes = 63;
/// How long a connection that is being left may take to send what is queued.
constexpr double kLingerS = 2;
constexpr std::string_view kConnectionEnded =
    "its connection ended without a goodbye: the process is dead or cut off";

Clock::duration duration_of(double seconds) {
  return std::chrono::duration_cast<Clock::duration>(Seconds(seconds));
}

/// "n0:29500", "[::1]:29500".
std::string address_text(const std::string& host, int port) {
  const bool needs_brackets = host.find(':') != std::string::npos;
  return (needs_brackets ? "[" + host + "]" : host) + ":" + std::to_string(port);
}

std::string address_text(const tcp::endpoint& endpoint) {
  asio::ip::address address = endpoint.address();
  if (address.is_v6() && address.to_v6().is_v4_mapped()) {
    address = asio::ip::make_address_v4(asio::ip::v4_mapped, address.to_v6());
  }
  return address_text(address.to_string(), endpoint.port());
}

std::string who_text(int rank, const std::string& host, std::int64_t pid) {
  return "rank " + std::to_string(rank) + " (host " + host + ", pid " + std::to_string(pid) + ")";
}

/// Not kept by the processes that this one starts, since a copy would hide its death.
void close_on_exec(int descriptor) {
  fcntl(descriptor, F_SETFD, FD_CLOEXEC);
}

/// One connection. Lives on the serving thread; whoever waits for it keeps it alive.
class Link : public std::enable_shared_from_this<Link> {
 public:
  class Owner {
   public:
    virtual void on_frame(Link& link, const Frame& frame) = 0;
    /// Not the owner's own doing. `is_stranger`: what came is not of this protocol.
    virtual void on_end(Link& link, const std::string& reason, bool is_stranger) = 0;
    virtual void on_closed() = 0;

   protected:
    ~Owner() = default;
  };

  Link(tcp::socket socket, Owner& owner, std::uint32_t max_body_bytes, double user_timeout_s)
      : socket_(std::move(socket)), timer_(socket_.get_executor()), owner_(owner), decoder_(max_body_bytes) {
    const int descriptor = socket_.native_handle();
    close_on_exec(descriptor);
    error_code ignored;
    socket_.set_option(tcp::no_delay(true), ignored);
    socket_.set_option(asio::socket_base::keep_alive(true), ignored);
    const auto user_timeout_ms = static_cast<unsigned int>(std::min(user_timeout_s, 86400.0) * 1000);
    setsockopt(descriptor, IPPROTO_TCP, TCP_USER_TIMEOUT, &user_timeout_ms, sizeof(user_timeout_ms));
    const tcp::endpoint remote = socket_.remote_endpoint(ignored);
    if (!ignored) address_ = address_text(remote);
  }

  int rank() const { return rank_; }
  /// Of a greeted connection.
  void set_rank(int rank) {
    rank_ = rank;
    decoder_.set_max_body_bytes(kMaxFrameBodyBytes);
  }
  const std::string& address() const { return address_; }
  bool is_open() const { return state_ == State::kOpen; }
  asio::steady_timer& timer() { return timer_; }

  void read() {
    socket_.async_read_some(asio::buffer(in_), [self = shared_from_this()](error_code error, std::size_t n) {
      self->on_read(error, n);
    });
  }
  void send(std::vector<std::uint8_t> bytes) {
    if (state_ != State::kOpen || !writable_) return;
    out_.push_back(std::move(bytes));
    if (out_.size() == 1) write();
  }
  /// Sends what is queued, then waits for the other side to close, but not for long. Closing at once could
  /// take back what the other side has not read.
  void finish() {
    if (state_ != State::kOpen) return;
    state_ = State::kFinishing;
    timer_.expires_after(duration_of(kLingerS));
    timer_.async_wait([self = shared_from_this()](error_code error) {
      if (!error) self->close();
    });
    if (out_.empty()) shut_down();
  }
  void close() {
    if (state_ == State::kClosed) return;
    state_ = State::kClosed;
    error_code ignored;
    timer_.cancel();
    socket_.close(ignored);
    owner_.on_closed();
  }

 private:
  enum class State { kOpen, kFinishing, kClosed };

  void on_read(error_code error, std::size_t bytes) {
    if (state_ == State::kClosed) return;
    if (error) return end(reason_of(error), false);
    std::span<const std::uint8_t> rest(in_.data(), bytes);
    while (!rest.empty() && state_ == State::kOpen) {
      rest = rest.subspan(decoder_.take(rest));
      if (!decoder_.problem().empty()) return end(decoder_.problem(), true);
      if (const std::optional<Frame> frame = decoder_.next()) owner_.on_frame(*this, *frame);
    }
    if (state_ != State::kClosed) read();
  }
  /// A process that ends with something unread in its buffer resets the connection.
  static std::string reason_of(error_code error) {
    const bool has_ended = error == asio::error::eof || error == asio::error::connection_reset ||
                           error == asio::error::broken_pipe;
    return has_ended ? std::string(kConnectionEnded) : error.message();
  }
  void end(const std::string& reason, bool is_stranger) {
    const bool was_open = state_ == State::kOpen;
    close();
    if (was_open) owner_.on_end(*this, reason, is_stranger);
  }
  void write() {
    asio::async_write(
        socket_, asio::buffer(out_.front()),
        [self = shared_from_this()](error_code error, std::size_t) { self->on_written(error); });
  }
  void on_written(error_code error) {
    if (state_ == State::kClosed) return;
    if (error) {
      // The reading side still has to see what came before the connection broke.
      writable_ = false;
      out_.clear();
    } else {
      out_.pop_front();
    }
    if (!out_.empty()) return write();
    if (state_ == State::kFinishing) shut_down();
  }
  void shut_down() {
    error_code error;
    socket_.shutdown(tcp::socket::shutdown_send, error);
    if (error) close();
  }

  tcp::socket socket_;
  asio::steady_timer timer_;  // of the greeting, then of the leaving
  Owner& owner_;
  FrameDecoder decoder_;
  State state_ = State::kOpen;
  bool writable_ = true;
  int rank_ = -1;  // -1: not known
  std::string address_ = "an unknown address";
  std::array<std::uint8_t, 4096> in_{};
  std::deque<std::vector<std::uint8_t>> out_;
};

template <class T>
void check_option(const char* name, T value, T least, T most) {
  if (value >= least && value <= most) return;
  std::ostringstream text;
  text << "rendezvous " << name << ": " << value << "; allowed are " << least << " to " << most;
  throw ConfigError(text.str());
}

void check_options(const RendezvousOptions& options) {
  check_option("world", options.world, 1, kMaxWorld);
  check_option("rank", options.rank, 0, options.world - 1);
  check_option("port", options.port, options.rank == 0 ? 0 : 1, 65535);
  check_option("timeout_s", options.timeout_s, 0.001, 1e6);
  check_option("handshake_s", options.handshake_s, 0.05, 600.0);
  check_option("heartbeat_s", options.heartbeat_s, 0.05, 3600.0);
  check_option("heartbeat_misses", options.heartbeat_misses, 2, 1000);
  if (options.world > 1 && options.address.empty()) {
    throw ConfigError(
        "rendezvous address: ''; allowed is a name or a number of rank 0's machine, as in "
        "MASTER_ADDR");
  }
}

Hello own_hello(const RendezvousOptions& options) {
  return {.token = options.token,
          .rank = options.rank,
          .world = options.world,
          .local_rank = options.local_rank,
          .pid = process_id(),
          .config_hash = options.config_hash,
          .library_version = MXOPT_VERSION,
          .host = plain_text(host_name(), kMaxHostBytes)};
}

/// A rank's report with the time it came.
struct Report {
  Heartbeat heartbeat;
  Clock::time_point time;

  std::int64_t age_ms(Clock::time_point now) const {
    return heartbeat.age_ms + std::chrono::duration_cast<std::chrono::milliseconds>(now - time).count();
  }
};

}  // namespace

std::string PeerLoss::describe() const {
  return who_text(rank, host, pid) + ": " + reason;
}

std::string PeerProgress::describe() const {
  std::ostringstream text;
  text << who_text(rank, host, pid);
  if (sequence < 0) {
    text << " has finished no call in " << age_s << " s";
  } else {
    text << " last finished #" << sequence << " " << operation << " " << age_s << " s ago";
  }
  return text.str();
}

RendezvousOptions rendezvous_options(const LaunchPlace& place) {
  return {.rank = place.rank,
          .world = place.world,
          .local_rank = place.local_rank,
          .address = place.address,
          .port = place.port,
          .token = job_token(place.job)};
}

/// What both sides have: the serving thread, the outcome, the watch. Members without a lock belong to the
/// serving thread, once it runs.
class TcpRendezvous::Service : public Link::Owner {
 public:
  explicit Service(const RendezvousOptions& options)
      : options_(options),
        own_(own_hello(options)),
        begin_(Clock::now()),
        work_(io_.get_executor()),
        tick_timer_(io_),
        deadline_timer_(io_),
        stop_timer_(io_),
        watch_(options.heartbeat_s, options.heartbeat_misses, Clock::now()) {
    note_.operation.reserve(kMaxNoteBytes);
    note_.rank = options.rank;
  }
  virtual ~Service() = default;
  Service(const Service&) = delete;
  Service& operator=(const Service&) = delete;

  /// Collective. Returns when the group is complete; throws why it is not.
  void join();
  void close() noexcept;

  const RendezvousResult& result() const { return *result_; }
  std::optional<PeerLoss> lost() const {
    const std::lock_guard lock(mutex_);
    return lost_;
  }
  RendezvousCounts counts() const {
    const std::lock_guard lock(mutex_);
    return counts_;
  }
  void note(std::int64_t sequence, std::string_view operation);
  std::optional<PeerProgress> slowest() const;
  void abort(const std::string& reason) noexcept;

 protected:
  // What the sides do differently. All on the serving thread, but for prepare().
  virtual void prepare() = 0;  // on the thread of join(), before the serving thread runs
  virtual void begin() = 0;
  virtual void welcome(const std::vector<std::uint8_t>& payload) = 0;
  virtual void fail_payload(const std::string& reason) = 0;
  virtual void on_deadline() = 0;
  virtual void send_heartbeats() = 0;
  /// Tells the others of a loss that this rank has found.
  virtual void tell(const PeerLoss& loss) = 0;
  virtual void leave() = 0;
  virtual void on_silent(const PeerWatch::Silent& silent) = 0;

  void on_closed() final {
    --open_links_;
    stop_if_idle();
  }

  std::shared_ptr<Link> make_link(tcp::socket socket, std::uint32_t max_body_bytes) {
    ++open_links_;
    return std::make_shared<Link>(std::move(socket), *this, max_body_bytes,
                                  options_.heartbeat_s * options_.heartbeat_misses);
  }

  void want_payload();
  void succeed(RendezvousResult result);
  void fail(std::exception_ptr failure);
  void fail(const PeerLoss& culprit) { fail(std::make_exception_ptr(error_of(culprit))); }
  PeerError error_of(const PeerLoss& culprit) const;
  /// Once committed: tells all, then this rank's callers.
  void lose(PeerLoss loss, bool tells_others);
  void set_deadline(Clock::time_point time);
  bool has_failed() const { return failed_; }
  bool is_member() const { return member_; }
  bool is_lost() const { return is_lost_; }
  Report own_report() const;
  void publish_slowest(const Report& report);
  template <class Change>
  void count(const Change& change) {
    const std::lock_guard lock(mutex_);
    change(counts_);
  }
  std::string place_text() const { return address_text(options_.address, port_); }

  const RendezvousOptions options_;
  const Hello own_;
  const Clock::time_point begin_;
  int port_ = 0;  // rank 0's, once known
  asio::io_context io_;
  asio::executor_work_guard<asio::io_context::executor_type> work_;
  asio::steady_timer tick_timer_;
  asio::steady_timer deadline_timer_;
  asio::steady_timer stop_timer_;
  PeerWatch watch_;
  bool stopping_ = false;

 private:
  void serve() noexcept;
  void tick();
  void stop_if_idle();
  void stop_serving();

  std::thread thread_;
  std::atomic<bool> closing_ = false;
  int open_links_ = 0;
  bool member_ = false;
  bool failed_ = false;
  bool is_lost_ = false;

  mutable std::mutex mutex_;  // guards all below
  std::condition_variable changed_;
  bool payload_wanted_ = false;
  std::optional<RendezvousResult> result_;  // does not change once it is there
  std::exception_ptr failure_;
  std::optional<PeerLoss> lost_;
  Heartbeat note_;
  Clock::time_point note_time_ = Clock::now();
  std::optional<Report> slowest_;
  RendezvousCounts counts_;
};

void TcpRendezvous::Service::join() {
  prepare();
  asio::post(io_, [this] {
    set_deadline(begin_ + duration_of(options_.timeout_s));
    begin();
    tick();
  });
  thread_ = std::thread([this] { serve(); });

  // The timers of the serving thread end this wait.
  std::unique_lock lock(mutex_);
  const auto is_settled = [&] { return result_.has_value() || failure_ != nullptr; };
  changed_.wait(lock, [&] { return payload_wanted_ || is_settled(); });
  if (!is_settled()) {
    lock.unlock();
    std::exception_ptr own_failure;
    std::vector<std::uint8_t> payload;
    std::string problem;
    try {
      if (options_.make_payload) payload = options_.make_payload();
      MXOPT_CHECK_LE(payload.size(), kMaxPayloadBytes);
      asio::post(io_, [this, payload] { welcome(payload); });
    } catch (const std::exception& error) {
      own_failure = std::current_exception();
      problem = error.what();
    } catch (...) {
      own_failure = std::current_exception();
      problem = "an exception of an unknown type";
    }
    if (own_failure != nullptr) asio::post(io_, [this, problem] { fail_payload(problem); });
    lock.lock();
    changed_.wait(lock, is_settled);
    if (own_failure != nullptr) failure_ = own_failure;
  }
  if (failure_ == nullptr) return;
  const std::exception_ptr failure = failure_;
  lock.unlock();
  close();
  std::rethrow_exception(failure);
}

void TcpRendezvous::Service::serve() noexcept {
  sigset_t all;
  sigfillset(&all);
  pthread_sigmask(SIG_BLOCK, &all, nullptr);  // signals are for the threads of the trainer
  try {
    io_.run();
  } catch (const std::exception& error) {
    // The others miss this rank's heartbeats.
    const std::lock_guard lock(mutex_);
    if (!result_.has_value()) {
      failure_ = std::current_exception();
    } else if (!lost_.has_value()) {
      lost_ = PeerLoss{.rank = own_.rank,
                       .host = own_.host,
                       .pid = own_.pid,
                       .reason = std::string("its control connection failed: ") + error.what()};
    }
    changed_.notify_all();
  }
}

void TcpRendezvous::Service::close() noexcept {
  if (closing_.exchange(true) || !thread_.joinable()) return;
  asio::post(io_, [this] { stop_serving(); });
  thread_.join();
}

void TcpRendezvous::Service::stop_serving() {
  stopping_ = true;
  tick_timer_.cancel();
  deadline_timer_.cancel();
  leave();
  stop_timer_.expires_after(duration_of(kLingerS));
  stop_timer_.async_wait([this](error_code error) {
    if (!error) io_.stop();
  });
  stop_if_idle();
}

void TcpRendezvous::Service::stop_if_idle() {
  if (stopping_ && open_links_ == 0) io_.stop();
}

void TcpRendezvous::Service::tick() {
  if (stopping_) return;
  // First: what is told of a loss must not queue behind a heartbeat.
  const std::optional<PeerWatch::Silent> silent = watch_.tick(Clock::now());
  if (silent.has_value()) on_silent(*silent);
  if (is_lost_ || failed_) return;
  send_heartbeats();
  tick_timer_.expires_after(duration_of(options_.heartbeat_s));
  tick_timer_.async_wait([this](error_code error) {
    if (!error) tick();
  });
}

void TcpRendezvous::Service::set_deadline(Clock::time_point time) {
  deadline_timer_.expires_at(time);
  deadline_timer_.async_wait([this](error_code error) {
    if (!error && !member_ && !failed_ && !stopping_) on_deadline();
  });
}

void TcpRendezvous::Service::want_payload() {
  const std::lock_guard lock(mutex_);
  payload_wanted_ = true;
  changed_.notify_all();
}

void TcpRendezvous::Service::succeed(RendezvousResult result) {
  member_ = true;
  deadline_timer_.cancel();
  const std::lock_guard lock(mutex_);
  note_time_ = Clock::now();
  result_ = std::move(result);
  changed_.notify_all();
}

void TcpRendezvous::Service::fail(std::exception_ptr failure) {
  failed_ = true;
  deadline_timer_.cancel();
  const std::lock_guard lock(mutex_);
  if (failure_ == nullptr) failure_ = std::move(failure);
  changed_.notify_all();
}

PeerError TcpRendezvous::Service::error_of(const PeerLoss& culprit) const {
  return PeerError({.operation = "rendezvous",
                    .elapsed_ms = Seconds(Clock::now() - begin_).count() * 1000,
                    .rank = own_.rank,
                    .culprit_rank = culprit.rank,
                    .host = culprit.host,  // none where it never came
                    .pid = culprit.pid,
                    .reason = culprit.reason});
}

void TcpRendezvous::Service::lose(PeerLoss loss, bool tells_others) {
  if (is_lost_ || stopping_) return;
  is_lost_ = true;
  // Told first: when this process ends at once, the others still know who was the first.
  if (tells_others) tell(loss);
  {
    const std::lock_guard lock(mutex_);
    lost_ = loss;
  }
  if (options_.on_lost) options_.on_lost(loss);
}

void TcpRendezvous::Service::abort(const std::string& reason) noexcept {
  if (closing_) return;
  asio::post(io_, [this, reason] {
    lose({.rank = own_.rank, .host = own_.host, .pid = own_.pid, .reason = "it aborted: " + reason}, true);
  });
}

void TcpRendezvous::Service::note(std::int64_t sequence, std::string_view operation) {
  const std::lock_guard lock(mutex_);
  note_.sequence = sequence;
  note_.operation.assign(operation.substr(0, kMaxNoteBytes));
  note_time_ = Clock::now();
}

Report TcpRendezvous::Service::own_report() const {
  const std::lock_guard lock(mutex_);
  return {.heartbeat = note_, .time = note_time_};
}

void TcpRendezvous::Service::publish_slowest(const Report& report) {
  const std::lock_guard lock(mutex_);
  slowest_ = report;
}

std::optional<PeerProgress> TcpRendezvous::Service::slowest() const {
  const std::lock_guard lock(mutex_);
  if (!slowest_.has_value() || !result_.has_value()) return std::nullopt;
  const Heartbeat& heartbeat = slowest_->heartbeat;
  const RankEntry& entry = result_->ranks[static_cast<std::size_t>(heartbeat.rank)];
  return PeerProgress{.rank = heartbeat.rank,
                      .host = entry.host,
                      .pid = entry.pid,
                      .sequence = heartbeat.sequence,
                      .operation = heartbeat.operation,
                      .age_s = static_cast<double>(slowest_->age_ms(Clock::now())) / 1000};
}

/// Rank 0.
class TcpRendezvous::Server final : public Service {
 public:
  explicit Server(const RendezvousOptions& options)
      : Service(options),
        acceptor_(io_),
        accept_timer_(io_),
        grace_timer_(io_),
        members_(static_cast<std::size_t>(options.world)),
        acknowledged_(static_cast<std::size_t>(options.world)),
        reports_(static_cast<std::size_t>(options.world)) {}

 private:
  enum class Stage { kGathering, kWelcomed, kCommitted, kFailed };

  void prepare() override;
  void begin() override;
  void welcome(const std::vector<std::uint8_t>& payload) override;
  void fail_payload(const std::string& reason) override;
  void on_deadline() override;
  void send_heartbeats() override;
  void tell(const PeerLoss& loss) override;
  void leave() override;
  void on_silent(const PeerWatch::Silent& silent) override;
  void on_frame(Link& link, const Frame& frame) override;
  void on_end(Link& link, const std::string& reason, bool is_stranger) override;

  bool listen(const std::string& number, error_code& error);
  void accept();
  void on_accepted(tcp::socket socket);
  void forget_guest(const Link& link);
  void greet(Link& link, const Frame& frame);
  void admit(Link& link, const Hello& hello);
  void reject(Link& link, const Reject& why);
  void on_member_frame(Link& link, const Frame& frame);
  void acknowledge(int rank);
  void lose_member(int rank, const std::string& reason);
  void fail_job(Reject why);
  void reject_failed(Link& link, int rank);
  void stop_telling();
  void end_failure();
  PeerLoss loss_of(int rank, std::string reason) const;
  Report slowest_report() const;
  void send_to_members(const std::vector<std::uint8_t>& bytes);

  tcp::acceptor acceptor_;
  asio::steady_timer accept_timer_;  // after an error of accepting
  asio::steady_timer grace_timer_;   // for the ranks that come after a failure
  Stage stage_ = Stage::kGathering;
  std::optional<RendezvousRoster> roster_;
  std::list<std::shared_ptr<Link>> guests_;     // have not said who they are; oldest first
  std::vector<std::shared_ptr<Link>> members_;  // [world], null: rank 0, has not come, or has gone
  std::vector<bool> acknowledged_;              // [world]
  std::vector<Report> reports_;                 // [world]
  RendezvousResult made_;
  Reject why_failed_;
  std::vector<bool> told_;  // [world], of a failure
};

void TcpRendezvous::Server::prepare() {
  port_ = options_.port;
  if (options_.world > 1) {
    const std::string& host = options_.bind_address.empty() ? options_.address : options_.bind_address;
    const ResolvedAddresses found = resolve_address(host, Deadline(options_.timeout_s));
    if (found.numbers.empty()) throw ConfigError("rendezvous address: " + found.problem);
    error_code error;
    std::string tried;
    bool listens = false;
    for (const std::string& number : found.numbers) {
      tried += (tried.empty() ? "" : ", ") + address_text(number, options_.port);
      listens = listen(number, error);
      if (listens || error == asio::error::address_in_use) break;
    }
    if (!listens) {
      const bool is_taken = error == asio::error::address_in_use;
      throw ConfigError("rank 0 can not listen on " + tried + ": " + error.message() +
                        (is_taken ? "; another process has the port (under torchrun this may be its agent): "
                                    "set another one, or 0 for any free one where all ranks get to know it"
                                  : "; allowed is an address of rank 0's own machine"));
    }
    port_ = acceptor_.local_endpoint().port();
    if (options_.on_listening) options_.on_listening(port_);
  }
  roster_.emplace(own_, place_text());
  for (int rank = 0; rank < options_.world; ++rank) {
    Report& report = reports_[static_cast<std::size_t>(rank)];
    report.heartbeat.rank = rank;
    report.time = begin_;
  }
}

bool TcpRendezvous::Server::listen(const std::string& number, error_code& error) {
  const asio::ip::address address = asio::ip::make_address(number, error);
  if (error) return false;
  const tcp::endpoint endpoint(address, static_cast<std::uint16_t>(options_.port));
  error_code ignored;
  acceptor_.close(ignored);
  acceptor_.open(endpoint.protocol(), error);
  if (error) return false;
  close_on_exec(acceptor_.native_handle());
  acceptor_.set_option(tcp::acceptor::reuse_address(true), error);
  if (error) return false;
  if (address.is_v6()) acceptor_.set_option(asio::ip::v6_only(!address.is_unspecified()), ignored);
  acceptor_.bind(endpoint, error);
  if (error) return false;
  acceptor_.listen(std::max(options_.world, 128), error);
  return !error;
}

void TcpRendezvous::Server::begin() {
  if (acceptor_.is_open()) accept();
  if (roster_->is_complete()) want_payload();
}

void TcpRendezvous::Server::accept() {
  acceptor_.async_accept([this](error_code error, tcp::socket socket) {
    if (stopping_ || error == asio::error::operation_aborted) return;
    if (!error) {
      on_accepted(std::move(socket));
      return accept();
    }
    // Say, no descriptor is free. It may pass.
    accept_timer_.expires_after(std::chrono::milliseconds(50));
    accept_timer_.async_wait([this](error_code) {
      if (!stopping_ && acceptor_.is_open()) accept();
    });
  });
}

void TcpRendezvous::Server::on_accepted(tcp::socket socket) {
  const std::shared_ptr<Link> link = make_link(std::move(socket), kHelloBodyBytes);
  guests_.push_back(link);
  link->timer().expires_after(duration_of(options_.handshake_s));
  link->timer().async_wait([this, link](error_code error) {
    if (error || link->rank() >= 0 || !link->is_open()) return;
    count([](RendezvousCounts& counts) { ++counts.silent; });
    forget_guest(*link);
    link->close();
  });
  link->read();
  // A rank greets at once: whoever is silent for longest is the least likely to be one.
  if (guests_.size() > 2 * static_cast<std::size_t>(options_.world) + 16) {
    count([](RendezvousCounts& counts) { ++counts.crowded_out; });
    const std::shared_ptr<Link> oldest = guests_.front();
    guests_.pop_front();
    oldest->close();
  }
}

void TcpRendezvous::Server::forget_guest(const Link& link) {
  guests_.remove_if([&](const std::shared_ptr<Link>& guest) { return guest.get() == &link; });
}

void TcpRendezvous::Server::on_frame(Link& link, const Frame& frame) {
  if (link.rank() >= 0) {
    on_member_frame(link, frame);
  } else {
    greet(link, frame);
  }
}

void TcpRendezvous::Server::greet(Link& link, const Frame& frame) {
  const std::optional<Hello> hello =
      frame.type == FrameType::kHello ? decode_hello(frame.body) : std::nullopt;
  if (!hello.has_value()) {
    count([](RendezvousCounts& counts) { ++counts.strangers; });
    forget_guest(link);
    return link.close();
  }
  admit(link, *hello);
  forget_guest(link);
}

void TcpRendezvous::Server::admit(Link& link, const Hello& hello) {
  if (!equal_tokens(hello.token, own_.token)) {
    count([](RendezvousCounts& counts) { ++counts.other_jobs; });
    return reject(
        link, {.kind = RejectKind::kOtherJob, .reason = "the job at " + place_text() + " has another token"});
  }
  if (stage_ == Stage::kFailed) return reject_failed(link, hello.rank);
  if (stage_ == Stage::kCommitted || roster_->is_complete()) {
    count([](RendezvousCounts& counts) { ++counts.late; });
    return reject(link, {.kind = RejectKind::kComplete,
                         .reason = "generation " + std::to_string(kGeneration) + " of the job at " +
                                   place_text() + " is already complete"});
  }
  RendezvousRoster::Answer answer = roster_->admit(hello, link.address());
  if (answer.verdict != RendezvousRoster::Verdict::kJoined) {
    fail_job({.kind = RejectKind::kInconsistent,
              .culprit_rank = hello.rank,
              .pid = hello.pid,
              .host = hello.host,
              .reason = std::move(answer.reason)});
    return reject_failed(link, hello.rank);
  }
  link.timer().cancel();
  link.set_rank(hello.rank);
  members_[static_cast<std::size_t>(hello.rank)] = link.shared_from_this();
  watch_.watch(hello.rank, Clock::now());
  link.send(encode(Heartbeat{}));  // so that it knows that it has come
  if (roster_->is_complete()) want_payload();
}

void TcpRendezvous::Server::reject(Link& link, const Reject& why) {
  link.send(encode(why));
  link.finish();
}

void TcpRendezvous::Server::reject_failed(Link& link, int rank) {
  reject(link, why_failed_);
  if (rank >= 0 && rank < options_.world) told_[static_cast<std::size_t>(rank)] = true;
  end_failure();
}

void TcpRendezvous::Server::on_member_frame(Link& link, const Frame& frame) {
  const int rank = link.rank();
  watch_.heard(rank, Clock::now());
  if (frame.type == FrameType::kHeartbeat) {
    std::optional<Heartbeat> heartbeat = decode_heartbeat(frame.body);
    if (!heartbeat.has_value()) return lose_member(rank, "it sent a broken frame");
    heartbeat->rank = rank;
    reports_[static_cast<std::size_t>(rank)] = {.heartbeat = *heartbeat, .time = Clock::now()};
  } else if (frame.type == FrameType::kAck && stage_ == Stage::kWelcomed) {
    acknowledge(rank);
  } else if (frame.type == FrameType::kAbort) {
    const std::optional<Abort> abort = decode_abort(frame.body);
    lose_member(rank, abort.has_value() ? abort->reason : "it sent a broken frame");
  } else if (frame.type == FrameType::kBye && stage_ == Stage::kCommitted) {
    watch_.forget(rank);
    members_[static_cast<std::size_t>(rank)] = nullptr;
    link.finish();
  } else {
    lose_member(rank, frame.type == FrameType::kBye ? "it left before the group was complete"
                                                    : "it sent a frame out of turn");
  }
}

void TcpRendezvous::Server::on_end(Link& link, const std::string& reason, bool is_stranger) {
  if (link.rank() >= 0) return lose_member(link.rank(), reason);
  if (is_stranger) count([](RendezvousCounts& counts) { ++counts.strangers; });
  forget_guest(link);
}

void TcpRendezvous::Server::lose_member(int rank, const std::string& reason) {
  watch_.forget(rank);
  const PeerLoss loss = loss_of(rank, reason);
  // The rank itself is told, too: it may only have been stopped.
  if (stage_ == Stage::kCommitted) {
    lose(loss, true);
  } else {
    fail_job({.kind = RejectKind::kRankLost,
              .culprit_rank = rank,
              .pid = loss.pid,
              .host = loss.host,
              .reason = loss.describe() + "; it was lost before the group was complete"});
  }
  const std::shared_ptr<Link> link = std::exchange(members_[static_cast<std::size_t>(rank)], nullptr);
  if (link != nullptr) link->finish();
}

PeerLoss TcpRendezvous::Server::loss_of(int rank, std::string reason) const {
  const RankEntry& entry = roster_->entry(rank);
  return {.rank = rank, .host = entry.host, .pid = entry.pid, .reason = std::move(reason)};
}

void TcpRendezvous::Server::welcome(const std::vector<std::uint8_t>& payload) {
  if (stage_ != Stage::kGathering) return;
  stage_ = Stage::kWelcomed;
  made_ = {.rank = 0, .ranks = roster_->entries(), .payload = payload};
  send_to_members(encode(std::span<const RankEntry>(made_.ranks)));
  send_to_members(encode(Welcome{.generation = kGeneration, .payload = payload}));
  acknowledge(0);
}

void TcpRendezvous::Server::acknowledge(int rank) {
  acknowledged_[static_cast<std::size_t>(rank)] = true;
  if (!std::all_of(acknowledged_.begin(), acknowledged_.end(), [](bool done) { return done; })) return;
  stage_ = Stage::kCommitted;
  send_to_members(encode(FrameType::kCommit));
  for (Report& report : reports_) {
    report.heartbeat.age_ms = 0;
    report.time = Clock::now();
  }
  succeed(made_);
}

void TcpRendezvous::Server::fail_payload(const std::string& reason) {
  fail_job({.kind = RejectKind::kRankLost,
            .culprit_rank = 0,
            .pid = own_.pid,
            .host = own_.host,
            .reason = "rank 0 could not make its payload: " + reason});
}

void TcpRendezvous::Server::on_deadline() {
  if (stage_ == Stage::kFailed) return stop_telling();
  Reject why{.kind = RejectKind::kRankLost};
  std::ostringstream text;
  if (!roster_->is_complete()) {
    why.culprit_rank = roster_->missing().front();
    text << roster_->missing_text(options_.timeout_s);
  } else if (stage_ == Stage::kGathering) {
    why.culprit_rank = 0;
    text << "rank 0 has not made its payload within " << options_.timeout_s << " s";
  } else {
    std::vector<int> missing;
    for (int rank = 0; rank < options_.world; ++rank) {
      if (!acknowledged_[static_cast<std::size_t>(rank)]) missing.push_back(rank);
    }
    why.culprit_rank = missing.front();
    text << name_rank_runs(missing) << " did not confirm the group at " << place_text() << " within "
         << options_.timeout_s << " s";
  }
  why.reason = text.str();
  fail_job(std::move(why));
}

/// Tells all that have come. Those that have yet to come are told, too, for a short time, so that they need
/// not wait for their deadlines; not where the deadline has passed already.
void TcpRendezvous::Server::fail_job(Reject why) {
  if (stage_ == Stage::kFailed) return;
  stage_ = Stage::kFailed;
  why_failed_ = std::move(why);
  told_.assign(static_cast<std::size_t>(options_.world), false);
  told_[0] = true;
  for (std::size_t at = 1; at < members_.size(); ++at) {
    const std::shared_ptr<Link> link = std::exchange(members_[at], nullptr);
    watch_.forget(static_cast<int>(at));
    if (link == nullptr) continue;
    told_[at] = true;
    reject(*link, why_failed_);
  }
  const int culprit = why_failed_.culprit_rank;
  if (why_failed_.kind == RejectKind::kRankLost && culprit >= 0)
    told_[static_cast<std::size_t>(culprit)] = true;
  if (Clock::now() >= begin_ + duration_of(options_.timeout_s)) told_.assign(told_.size(), true);
  grace_timer_.expires_after(duration_of(options_.handshake_s));
  grace_timer_.async_wait([this](error_code error) {
    if (!error && !has_failed()) stop_telling();
  });
  end_failure();
}

void TcpRendezvous::Server::stop_telling() {
  told_.assign(told_.size(), true);
  end_failure();
}

void TcpRendezvous::Server::end_failure() {
  if (!std::all_of(told_.begin(), told_.end(), [](bool told) { return told; })) return;
  if (why_failed_.kind == RejectKind::kInconsistent) {
    return fail(std::make_exception_ptr(ConfigError(why_failed_.reason)));
  }
  fail({.rank = why_failed_.culprit_rank,
        .host = why_failed_.host,
        .pid = why_failed_.pid,
        .reason = why_failed_.reason});
}

void TcpRendezvous::Server::on_silent(const PeerWatch::Silent& silent) {
  std::ostringstream reason;
  reason << "nothing was heard of it for " << silent.silent_s << " s: it is stopped or cut off";
  lose_member(silent.rank, reason.str());
}

Report TcpRendezvous::Server::slowest_report() const {
  const auto now = Clock::now();
  // Those that left in good order have nothing more to do.
  const auto has_left = [&](const Report& report) {
    return report.heartbeat.rank != 0 && members_[static_cast<std::size_t>(report.heartbeat.rank)] == nullptr;
  };
  return *std::min_element(reports_.begin(), reports_.end(), [&](const Report& a, const Report& b) {
    if (has_left(a) != has_left(b)) return has_left(b);
    if (a.heartbeat.sequence != b.heartbeat.sequence) return a.heartbeat.sequence < b.heartbeat.sequence;
    return a.age_ms(now) > b.age_ms(now);
  });
}

void TcpRendezvous::Server::send_heartbeats() {
  if (!is_member()) return send_to_members(encode(Heartbeat{}));
  reports_[0] = own_report();
  Report slowest = slowest_report();
  publish_slowest(slowest);
  slowest.heartbeat.age_ms = slowest.age_ms(Clock::now());
  send_to_members(encode(slowest.heartbeat));
}

void TcpRendezvous::Server::send_to_members(const std::vector<std::uint8_t>& bytes) {
  for (const std::shared_ptr<Link>& member : members_) {
    if (member != nullptr) member->send(bytes);
  }
}

void TcpRendezvous::Server::tell(const PeerLoss& loss) {
  send_to_members(
      encode(Abort{.culprit_rank = loss.rank, .pid = loss.pid, .host = loss.host, .reason = loss.reason}));
}

void TcpRendezvous::Server::leave() {
  error_code ignored;
  acceptor_.close(ignored);
  accept_timer_.cancel();
  grace_timer_.cancel();
  for (const std::shared_ptr<Link>& guest : std::exchange(guests_, {})) guest->close();
  for (std::shared_ptr<Link>& member : members_) {
    const std::shared_ptr<Link> link = std::exchange(member, nullptr);
    if (link == nullptr) continue;
    link->send(encode(FrameType::kBye));
    link->finish();
  }
}

/// Any other rank.
class TcpRendezvous::Client final : public Service {
 public:
  explicit Client(const RendezvousOptions& options)
      : Service(options),
        attempt_timer_(io_),
        random_(static_cast<std::uint32_t>(process_id() * 7919 + options.rank)) {
    port_ = options.port;
  }

 private:
  /// kGreeting: the greeting is sent. kJoined: rank 0 has taken it. kWelcomed: all have come.
  enum class Stage { kSeeking, kGreeting, kJoined, kWelcomed, kCommitted };

  void prepare() override {}
  void begin() override { attempt(); }
  void welcome(const std::vector<std::uint8_t>&) override {}
  void fail_payload(const std::string&) override {}
  void on_deadline() override;
  void send_heartbeats() override;
  void tell(const PeerLoss& loss) override;
  void leave() override;
  void on_silent(const PeerWatch::Silent& silent) override;
  void on_frame(Link& link, const Frame& frame) override;
  void on_end(Link& link, const std::string& reason, bool is_stranger) override;

  void attempt();
  void try_next_address();
  void on_connected(error_code error);
  void retry(const std::string& error);
  void on_heartbeat(const Frame& frame);
  void on_ranks(const Frame& frame);
  void on_welcome(const Frame& frame);
  void on_commit();
  void on_reject(const Frame& frame);
  void on_abort(const Frame& frame);
  void on_bye();
  void refuse_frame(const std::string& reason);
  void lose_rank_0(const std::string& reason);
  void drop_link() {
    if (const std::shared_ptr<Link> link = std::exchange(link_, nullptr)) link->close();
  }
  Clock::time_point own_deadline() const { return begin_ + duration_of(options_.timeout_s); }

  Stage stage_ = Stage::kSeeking;
  asio::steady_timer attempt_timer_;  // of one connection and its greeting, or until the next try
  std::minstd_rand random_;
  double pause_s_ = 0.05;
  int tries_ = 0;
  std::string last_error_ = "none";
  std::deque<std::string> numbers_;  // yet to be tried
  std::string number_;               // being tried
  std::optional<tcp::socket> socket_;
  std::shared_ptr<Link> link_;
  std::vector<RankEntry> ranks_;
  std::vector<std::uint8_t> payload_;
};

void TcpRendezvous::Client::attempt() {
  if (stopping_ || has_failed()) return;
  ++tries_;
  const double left_s = Seconds(own_deadline() - Clock::now()).count();
  if (left_s <= 0) return on_deadline();
  ResolvedAddresses found = resolve_address(options_.address, Deadline(left_s));
  if (found.numbers.empty()) return retry(found.problem);
  numbers_.assign(found.numbers.begin(), found.numbers.end());
  try_next_address();
}

void TcpRendezvous::Client::try_next_address() {
  number_ = numbers_.front();
  numbers_.pop_front();
  error_code error;
  const asio::ip::address address = asio::ip::make_address(number_, error);
  if (error) return retry(number_ + ": " + error.message());
  const tcp::endpoint endpoint(address, static_cast<std::uint16_t>(options_.port));
  socket_.emplace(io_);
  socket_->open(endpoint.protocol(), error);
  if (error) return retry(address_text(endpoint) + ": " + error.message());
  close_on_exec(socket_->native_handle());
  attempt_timer_.expires_after(duration_of(options_.handshake_s));
  attempt_timer_.async_wait([this](error_code timer_error) {
    error_code ignored;
    if (!timer_error && socket_.has_value()) socket_->close(ignored);
  });
  socket_->async_connect(endpoint, [this](error_code connect_error) { on_connected(connect_error); });
}

void TcpRendezvous::Client::on_connected(error_code error) {
  attempt_timer_.cancel();
  if (stopping_ || has_failed() || !socket_.has_value()) return;
  const std::string where = address_text(number_, options_.port);
  if (error || !socket_->is_open()) {
    const bool is_late = error == asio::error::operation_aborted || !error;
    return retry(where + ": " + (is_late ? "no connection in time" : error.message()));
  }
  link_ = make_link(*std::exchange(socket_, std::nullopt), kMaxFrameBodyBytes);
  stage_ = Stage::kGreeting;
  link_->set_rank(0);
  link_->send(encode(own_));
  link_->read();
  attempt_timer_.expires_after(duration_of(options_.handshake_s));
  attempt_timer_.async_wait([this, link = link_, where](error_code timer_error) {
    if (timer_error || stage_ != Stage::kGreeting || link != link_) return;
    drop_link();
    retry(where + ": no answer to the greeting");
  });
}

/// Goes to the next address, or waits and resolves anew.
void TcpRendezvous::Client::retry(const std::string& error) {
  socket_.reset();
  stage_ = Stage::kSeeking;
  last_error_ = error;
  if (stopping_ || has_failed()) return;
  if (!numbers_.empty()) {
    // Not from here: a long list must not become a deep stack.
    return asio::post(io_, [this] {
      if (!stopping_ && !has_failed() && !numbers_.empty()) try_next_address();
    });
  }
  const double jitter = std::uniform_real_distribution<double>(0.75, 1.25)(random_);
  attempt_timer_.expires_after(duration_of(pause_s_ * jitter));
  pause_s_ = std::min(2.0, pause_s_ * 2);
  attempt_timer_.async_wait([this](error_code timer_error) {
    if (!timer_error) attempt();
  });
}

void TcpRendezvous::Client::on_deadline() {
  if (has_failed()) return;
  std::ostringstream text;
  if (stage_ == Stage::kSeeking || stage_ == Stage::kGreeting) {
    text << "rank 0 was not found at " << place_text() << " within " << options_.timeout_s << " s (" << tries_
         << (tries_ == 1 ? " try" : " tries") << ", last error: " << last_error_ << "); is rank 0 running?";
  } else {
    text << "rank 0 at " << place_text() << " did not complete the group in time";
  }
  drop_link();
  fail({.rank = 0, .host = {}, .pid = 0, .reason = text.str()});
}

void TcpRendezvous::Client::on_frame(Link& link, const Frame& frame) {
  if (&link != link_.get()) return;
  watch_.heard(0, Clock::now());
  switch (frame.type) {
    case FrameType::kHeartbeat:
      return on_heartbeat(frame);
    case FrameType::kRanks:
      return on_ranks(frame);
    case FrameType::kWelcome:
      return on_welcome(frame);
    case FrameType::kCommit:
      return on_commit();
    case FrameType::kReject:
      return on_reject(frame);
    case FrameType::kAbort:
      return on_abort(frame);
    case FrameType::kBye:
      return on_bye();
    case FrameType::kHello:
    case FrameType::kAck:
      break;
  }
  refuse_frame("it sent a frame out of turn");
}

void TcpRendezvous::Client::on_heartbeat(const Frame& frame) {
  const std::optional<Heartbeat> heartbeat = decode_heartbeat(frame.body);
  if (!heartbeat.has_value() || heartbeat->rank < 0 || heartbeat->rank >= options_.world) {
    return refuse_frame("it sent a broken frame");
  }
  if (stage_ == Stage::kGreeting) {
    stage_ = Stage::kJoined;
    attempt_timer_.cancel();
    numbers_.clear();
    watch_.watch(0, Clock::now());
    // From now on rank 0's deadline counts, which names who is missing.
    set_deadline(Clock::now() + duration_of(options_.timeout_s + options_.handshake_s));
  } else if (stage_ == Stage::kCommitted) {
    publish_slowest({.heartbeat = *heartbeat, .time = Clock::now()});
  }
}

void TcpRendezvous::Client::on_ranks(const Frame& frame) {
  const std::optional<std::vector<RankEntry>> part = decode_ranks(frame.body);
  if (stage_ != Stage::kJoined) return refuse_frame("it sent a frame out of turn");
  if (!part.has_value()) return refuse_frame("it sent a broken frame");
  for (const RankEntry& entry : *part) {
    const bool is_next = entry.rank == static_cast<int>(ranks_.size()) && entry.rank < options_.world;
    if (!is_next) return refuse_frame("its table of ranks is out of order");
    ranks_.push_back(entry);
  }
}

void TcpRendezvous::Client::on_welcome(const Frame& frame) {
  std::optional<Welcome> welcome = decode_welcome(frame.body);
  if (stage_ != Stage::kJoined) return refuse_frame("it sent a frame out of turn");
  if (!welcome.has_value()) return refuse_frame("it sent a broken frame");
  if (ranks_.size() != static_cast<std::size_t>(options_.world)) {
    return refuse_frame("its table has " + std::to_string(ranks_.size()) + " ranks of " +
                        std::to_string(options_.world));
  }
  stage_ = Stage::kWelcomed;
  payload_ = std::move(welcome->payload);
  link_->send(encode(FrameType::kAck));
}

void TcpRendezvous::Client::on_commit() {
  if (stage_ != Stage::kWelcomed) return refuse_frame("it sent a frame out of turn");
  stage_ = Stage::kCommitted;
  succeed({.rank = own_.rank, .ranks = ranks_, .payload = std::move(payload_)});
}

void TcpRendezvous::Client::on_reject(const Frame& frame) {
  const std::optional<Reject> why = decode_reject(frame.body);
  if (stage_ == Stage::kCommitted) return refuse_frame("it sent a frame out of turn");
  if (!why.has_value()) return refuse_frame("it sent a broken frame");
  drop_link();
  if (why->kind == RejectKind::kOtherJob) {
    // It may be an old job that is about to end.
    return retry(address_text(number_, options_.port) + ": " + why->reason);
  }
  if (why->kind == RejectKind::kRankLost) {
    return fail({.rank = why->culprit_rank, .host = why->host, .pid = why->pid, .reason = why->reason});
  }
  fail(std::make_exception_ptr(ConfigError(why->reason)));
}

void TcpRendezvous::Client::on_abort(const Frame& frame) {
  const std::optional<Abort> abort = decode_abort(frame.body);
  if (!abort.has_value() || stage_ != Stage::kCommitted) return refuse_frame("it sent a broken frame");
  watch_.forget(0);
  lose({.rank = abort->culprit_rank, .host = abort->host, .pid = abort->pid, .reason = abort->reason}, false);
}

void TcpRendezvous::Client::on_bye() {
  if (stage_ != Stage::kCommitted) return refuse_frame("it left before the group was complete");
  watch_.forget(0);
  if (const std::shared_ptr<Link> link = std::exchange(link_, nullptr)) link->finish();
}

void TcpRendezvous::Client::on_end(Link& link, const std::string& reason, bool is_stranger) {
  if (&link != link_.get()) return;
  link_ = nullptr;
  if (stage_ == Stage::kGreeting) {
    attempt_timer_.cancel();
    return retry(address_text(number_, options_.port) + ": what answers there is " +
                 (is_stranger ? reason : "closed at once"));
  }
  lose_rank_0(is_stranger ? "it sent what is " + reason : reason);
}

void TcpRendezvous::Client::refuse_frame(const std::string& reason) {
  if (stage_ == Stage::kGreeting) {
    attempt_timer_.cancel();
    drop_link();
    return retry(address_text(number_, options_.port) + ": no rank 0: " + reason);
  }
  lose_rank_0(reason);
}

void TcpRendezvous::Client::lose_rank_0(const std::string& reason) {
  watch_.forget(0);
  drop_link();
  const bool has_table = !ranks_.empty();
  PeerLoss loss{.rank = 0,
                .host = has_table ? ranks_[0].host : options_.address,
                .pid = has_table ? ranks_[0].pid : 0,
                .reason = reason};
  if (stage_ == Stage::kCommitted) return lose(std::move(loss), false);
  if (has_failed()) return;
  loss.reason = "rank 0 at " + place_text() + " was lost before the group was complete: " + reason;
  fail(loss);
}

void TcpRendezvous::Client::on_silent(const PeerWatch::Silent& silent) {
  std::ostringstream reason;
  reason << "nothing was heard of it for " << silent.silent_s << " s: it is stopped or cut off";
  lose_rank_0(reason.str());
}

void TcpRendezvous::Client::send_heartbeats() {
  if (link_ == nullptr || stage_ == Stage::kGreeting) return;
  Report report = own_report();
  report.heartbeat.age_ms = report.age_ms(Clock::now());
  link_->send(encode(report.heartbeat));
}

void TcpRendezvous::Client::tell(const PeerLoss& loss) {
  if (link_ == nullptr) return;
  link_->send(
      encode(Abort{.culprit_rank = loss.rank, .pid = loss.pid, .host = loss.host, .reason = loss.reason}));
}

void TcpRendezvous::Client::leave() {
  attempt_timer_.cancel();
  socket_.reset();
  const std::shared_ptr<Link> link = std::exchange(link_, nullptr);
  if (link == nullptr) return;
  link->send(encode(FrameType::kBye));
  link->finish();
}

std::unique_ptr<TcpRendezvous> TcpRendezvous::join(const RendezvousOptions& options) {
  check_options(options);
  std::unique_ptr<Service> service;
  if (options.rank == 0) {
    service = std::make_unique<Server>(options);
  } else {
    service = std::make_unique<Client>(options);
  }
  service->join();
  return std::unique_ptr<TcpRendezvous>(new TcpRendezvous(std::move(service)));
}

TcpRendezvous::TcpRendezvous(std::unique_ptr<Service> service) : service_(std::move(service)) {}

TcpRendezvous::~TcpRendezvous() {
  service_->close();
}

const RendezvousResult& TcpRendezvous::result() const {
  return service_->result();
}

std::optional<PeerLoss> TcpRendezvous::lost() const {
  return service_->lost();
}

void TcpRendezvous::note(std::int64_t sequence, std::string_view operation) {
  service_->note(sequence, operation);
}

std::optional<PeerProgress> TcpRendezvous::slowest() const {
  return service_->slowest();
}

void TcpRendezvous::abort(const std::string& reason) noexcept {
  service_->abort(reason);
}

RendezvousCounts TcpRendezvous::counts() const {
  return service_->counts();
}

void TcpRendezvous::close() noexcept {
  service_->close();
}

}  // namespace mxopt
