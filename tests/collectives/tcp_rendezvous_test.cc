#include "mxopt/collectives/tcp_rendezvous.h"

#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <functional>
#include <future>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <arpa/inet.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "support/thrown_message.h"

#include "mxopt/collectives/process_identity.h"
#include "mxopt/collectives/rendezvous_frames.h"
#include "mxopt/params/check.h"

namespace mxopt {
namespace {

using test::contains;
using test::thrown_message;
using Bytes = std::vector<std::uint8_t>;
using Group = std::unique_ptr<TcpRendezvous>;

constexpr int kPatienceMs = 20'000;

bool eventually(const std::function<bool()>& condition) {
  for (int waited_ms = 0; waited_ms < kPatienceMs; waited_ms += 5) {
    if (condition()) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  return condition();
}

RendezvousOptions options_of(int rank, int world) {
  RendezvousOptions options;
  options.rank = rank;
  options.world = world;
  options.local_rank = rank;
  options.address = "127.0.0.1";
  options.port = rank == 0 ? 0 : 1;  // rank 0's becomes the others'
  options.token = job_token("test job");
  options.config_hash = 0xC0FFEE;
  options.timeout_s = 20;
  options.handshake_s = 2;
  options.heartbeat_s = 0.05;
  options.heartbeat_misses = 30;
  return options;
}

std::vector<RendezvousOptions> options_of_all(int world) {
  std::vector<RendezvousOptions> options;
  for (int rank = 0; rank < world; ++rank) options.push_back(options_of(rank, world));
  return options;
}

/// How join() ended on one rank.
struct Outcome {
  Group group = nullptr;
  std::string config_error = {};
  std::optional<PeerFailure> failure = {};
};

Outcome outcome_of(const RendezvousOptions& options) {
  Outcome outcome;
  try {
    outcome.group = TcpRendezvous::join(options);
  } catch (const ConfigError& error) {
    outcome.config_error = error.what();
  } catch (const PeerError& error) {
    outcome.failure = error.failure();
  }
  return outcome;
}

/// Rank 0 on a thread of its own, with its port.
class RankZero {
 public:
  explicit RankZero(RendezvousOptions options) {
    std::promise<int> listening;
    std::future<int> heard = listening.get_future();
    options.on_listening = [&](int port) { listening.set_value(port); };
    outcome_ = std::async(std::launch::async, [options] { return outcome_of(options); });
    port_ = heard.get();
  }

  int port() const { return port_; }
  Outcome outcome() { return outcome_.get(); }

 private:
  int port_ = 0;
  std::future<Outcome> outcome_;
};

std::future<Outcome> join_later(RendezvousOptions options, int port) {
  options.port = port;
  return std::async(std::launch::async, [options] { return outcome_of(options); });
}

/// All ranks as threads; the first options are rank 0's.
std::vector<Outcome> meet(const std::vector<RendezvousOptions>& options) {
  RankZero rank_0(options[0]);
  std::vector<std::future<Outcome>> others;
  for (std::size_t i = 1; i < options.size(); ++i) others.push_back(join_later(options[i], rank_0.port()));
  std::vector<Outcome> outcomes;
  outcomes.push_back(rank_0.outcome());
  for (std::future<Outcome>& other : others) outcomes.push_back(other.get());
  return outcomes;
}

/// Closes all ranks at the same time.
void close_all(std::vector<Outcome>& outcomes) {
  std::vector<std::thread> threads;
  for (Outcome& outcome : outcomes) {
    threads.emplace_back([&outcome] { outcome.group.reset(); });
  }
  for (std::thread& thread : threads) thread.join();
}

class Descriptor {
 public:
  explicit Descriptor(int value) : value_(value) {}
  Descriptor(Descriptor&& other) noexcept : value_(std::exchange(other.value_, -1)) {}
  Descriptor& operator=(Descriptor&&) = delete;
  ~Descriptor() { reset(); }
  int get() const { return value_; }
  void reset() {
    if (value_ >= 0) close(value_);
    value_ = -1;
  }

 private:
  int value_;
};

sockaddr_in loopback(int port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<std::uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  return address;
}

/// A listening socket that nobody serves.
class DeafListener {
 public:
  DeafListener() : socket_(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    sockaddr_in address = loopback(0);
    socklen_t length = sizeof(address);
    EXPECT_EQ(bind(socket_.get(), reinterpret_cast<sockaddr*>(&address), length), 0);
    EXPECT_EQ(listen(socket_.get(), 16), 0);
    EXPECT_EQ(getsockname(socket_.get(), reinterpret_cast<sockaddr*>(&address), &length), 0);
    port_ = ntohs(address.sin_port);
  }

  int port() const { return port_; }
  int get() const { return socket_.get(); }

 private:
  Descriptor socket_;
  int port_ = 0;
};

/// A port that nobody listens on.
int free_port() {
  return DeafListener().port();
}

/// A connection to rank 0 whose bytes the test writes itself.
class RawPeer {
 public:
  explicit RawPeer(int port) : socket_(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    const timeval patience{.tv_sec = kPatienceMs / 1000, .tv_usec = 0};
    setsockopt(socket_.get(), SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience));
    const sockaddr_in address = loopback(port);
    is_connected_ = connect(socket_.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0;
  }

  bool is_connected() const { return is_connected_; }
  void send_bytes(std::span<const std::uint8_t> bytes) {
    EXPECT_EQ(send(socket_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL),
              static_cast<ssize_t>(bytes.size()));
  }
  /// For strangers, who may be cut off at any time.
  void try_send(std::span<const std::uint8_t> bytes) {
    send(socket_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
  }
  /// The next frame that is no heartbeat; empty when the connection ends.
  std::optional<Frame> read_frame() {
    std::uint8_t byte = 0;
    while (recv(socket_.get(), &byte, 1, 0) == 1) {
      decoder_.take(std::span(&byte, 1));
      std::optional<Frame> frame = decoder_.next();
      if (frame.has_value() && frame->type != FrameType::kHeartbeat) return frame;
    }
    return std::nullopt;
  }
  bool is_closed_by_peer() {
    while (const std::optional<Frame> frame = read_frame()) {
    }
    return errno != EAGAIN;
  }
  void close_now() { socket_.reset(); }

 private:
  Descriptor socket_;
  bool is_connected_ = false;
  FrameDecoder decoder_{kMaxFrameBodyBytes};
};

Hello hello_of(int rank, int world) {
  return {.token = job_token("test job"),
          .rank = rank,
          .world = world,
          .local_rank = rank,
          .pid = 100 + rank,
          .config_hash = 0xC0FFEE,
          .library_version = MXOPT_VERSION,
          .host = "n" + std::to_string(rank)};
}

/// Rank 0 of two, and what it and the raw rank 1 with `hello` are told.
struct RawOutcome {
  Outcome rank_0 = {};
  std::optional<Reject> told = {};
};

RawOutcome greet_with(const Hello& hello, int world = 2) {
  RendezvousOptions options = options_of(0, world);
  options.handshake_s = 0.2;
  RankZero rank_0(options);
  RawPeer peer(rank_0.port());
  peer.send_bytes(encode(hello));
  RawOutcome outcome;
  const std::optional<Frame> frame = peer.read_frame();
  if (frame.has_value() && frame->type == FrameType::kReject) outcome.told = decode_reject(frame->body);
  peer.close_now();
  outcome.rank_0 = rank_0.outcome();
  return outcome;
}

class Sizes : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(TcpRendezvous, Sizes, testing::Values(1, 2, 3, 5, 8));

TEST_P(Sizes, AllRanksGetTheSameTableAndPayload) {
  std::vector<RendezvousOptions> options = options_of_all(GetParam());
  std::atomic<int> made = 0;
  options[0].make_payload = [&] {
    ++made;
    return Bytes(128, 0xAB);
  };
  if (GetParam() == 1) {  // nothing is opened
    const Group group = TcpRendezvous::join(options[0]);
    EXPECT_EQ(group->result().ranks.size(), 1U);
    EXPECT_EQ(group->result().payload, Bytes(128, 0xAB));
    return;
  }
  std::vector<Outcome> outcomes = meet(options);
  EXPECT_EQ(made, 1);
  for (int rank = 0; rank < GetParam(); ++rank) {
    const Outcome& outcome = outcomes[static_cast<std::size_t>(rank)];
    ASSERT_NE(outcome.group, nullptr) << outcome.config_error;
    const RendezvousResult& result = outcome.group->result();
    EXPECT_EQ(result.rank, rank);
    EXPECT_EQ(result.payload, Bytes(128, 0xAB));
    ASSERT_EQ(result.ranks.size(), static_cast<std::size_t>(GetParam()));
    for (int other = 0; other < GetParam(); ++other) {
      const auto at = static_cast<std::size_t>(other);
      EXPECT_EQ(result.ranks[at].rank, other);
      EXPECT_EQ(result.ranks[at].local_rank, other);
      EXPECT_EQ(result.ranks[at].pid, process_id());
      EXPECT_EQ(result.ranks[at].host, host_name());
      EXPECT_EQ(result.ranks[at].address, outcomes[0].group->result().ranks[at].address);
      EXPECT_TRUE(contains(result.ranks[at].address, "127.0.0.1:"));
    }
    EXPECT_FALSE(outcome.group->lost().has_value());
  }
  close_all(outcomes);
}

TEST(TcpRendezvous, APayloadMayBeAsLongAsIsAllowed) {
  std::vector<RendezvousOptions> options = options_of_all(2);
  options[0].make_payload = [] { return Bytes(kMaxPayloadBytes, 1); };
  std::vector<Outcome> outcomes = meet(options);
  ASSERT_NE(outcomes[1].group, nullptr);
  EXPECT_EQ(outcomes[1].group->result().payload, Bytes(kMaxPayloadBytes, 1));
  close_all(outcomes);
}

TEST(TcpRendezvous, APayloadThatCanNotBeMadeFailsAllRanks) {
  RendezvousOptions options = options_of(0, 2);
  options.make_payload = []() -> Bytes { throw BackendError("no id today"); };
  std::promise<std::future<Outcome>> other;
  options.on_listening = [&](int port) { other.set_value(join_later(options_of(1, 2), port)); };
  EXPECT_EQ(thrown_message<BackendError>([&] { TcpRendezvous::join(options); }), "no id today");
  const Outcome outcome = other.get_future().get().get();
  ASSERT_TRUE(outcome.failure.has_value());
  EXPECT_EQ(outcome.failure->reason, "rank 0 could not make its payload: no id today");
  EXPECT_EQ(outcome.failure->culprit_rank, 0);
  EXPECT_EQ(outcome.failure->pid, process_id());

  RendezvousOptions alone = options_of(0, 1);
  alone.make_payload = [] { return Bytes(kMaxPayloadBytes + 1); };
  EXPECT_TRUE(contains(thrown_message<ContractError>([&] { TcpRendezvous::join(alone); }), "65529"));
}

TEST(TcpRendezvous, ARankThatNeverComesIsNamedOnTheOthers) {
  std::vector<RendezvousOptions> options = options_of_all(4);
  options.pop_back();
  for (RendezvousOptions& one : options) one.timeout_s = 2;
  bool made = false;
  options[0].make_payload = [&] {
    made = true;
    return Bytes();
  };
  for (const Outcome& outcome : meet(options)) {
    ASSERT_TRUE(outcome.failure.has_value());
    EXPECT_TRUE(contains(outcome.failure->reason, "rank 3 did not join 127.0.0.1:"));
    EXPECT_TRUE(contains(outcome.failure->reason, " within 2 s (3 of 4 joined)"));
    EXPECT_EQ(outcome.failure->operation, "rendezvous");
    EXPECT_EQ(outcome.failure->culprit_rank, 3);
  }
  EXPECT_FALSE(made);
}

TEST(TcpRendezvous, RanksThatDoNotFitFailTheWholeJobWithOneReason) {
  std::vector<RendezvousOptions> options = options_of_all(3);
  options[2].config_hash = 0xBAD;
  const std::vector<Outcome> outcomes = meet(options);
  EXPECT_TRUE(
      contains(outcomes[0].config_error, "has another configuration (hash 0xbad) than rank 0 (0xc0ffee)"));
  EXPECT_TRUE(contains(outcomes[0].config_error, "rank 2 (host " + host_name() + ", pid "));
  EXPECT_EQ(outcomes[1].config_error, outcomes[0].config_error);
  EXPECT_EQ(outcomes[2].config_error, outcomes[0].config_error);
}

TEST(TcpRendezvous, GreetingsThatDoNotFitAreAnsweredWithTheReason) {
  const auto expect_refusal = [](const Hello& hello, const std::string& part) {
    const RawOutcome outcome = greet_with(hello);
    EXPECT_TRUE(contains(outcome.rank_0.config_error, part));
    ASSERT_TRUE(outcome.told.has_value());
    EXPECT_EQ(outcome.told->kind, RejectKind::kInconsistent);
    EXPECT_EQ(outcome.told->reason, outcome.rank_0.config_error);
  };
  expect_refusal(hello_of(1, 3), "was started for 3 ranks, rank 0 for 2");
  expect_refusal(hello_of(2, 2), "rank 2 (host n2, pid 102, 127.0.0.1:");
  expect_refusal(hello_of(0, 2), "rank 0 is claimed twice: by 127.0.0.1:");
  Hello hello = hello_of(1, 2);
  hello.library_version = "9.9.9";
  expect_refusal(hello, "has library version 9.9.9, rank 0 has " MXOPT_VERSION);
}

TEST(TcpRendezvous, ARankClaimedTwiceFailsTheJobWithBothAddresses) {
  RendezvousOptions options = options_of(0, 3);
  options.handshake_s = 0.5;
  RankZero rank_0(options);
  RawPeer first(rank_0.port());
  first.send_bytes(encode(hello_of(1, 3)));
  RawPeer second(rank_0.port());
  Hello hello = hello_of(1, 3);
  hello.host = "other";
  second.send_bytes(encode(hello));
  const std::optional<Frame> to_first = first.read_frame();
  const std::optional<Frame> to_second = second.read_frame();
  // Late, but within the grace: told at once, too.
  const Outcome late = join_later(options_of(2, 3), rank_0.port()).get();
  ASSERT_TRUE(to_first.has_value());
  ASSERT_TRUE(to_second.has_value());
  const std::string reason = decode_reject(to_first->body).value().reason;
  EXPECT_EQ(decode_reject(to_second->body).value().reason, reason);
  EXPECT_TRUE(contains(reason, "rank 1 is claimed twice: by 127.0.0.1:"));
  EXPECT_TRUE(contains(reason, "(host n1, pid 101) and by 127.0.0.1:"));
  EXPECT_TRUE(contains(reason, "(host other, pid 101)"));
  EXPECT_EQ(late.config_error, reason);
  first.close_now();
  second.close_now();
  EXPECT_EQ(rank_0.outcome().config_error, reason);
}

TEST(TcpRendezvous, AGreetingMayComeOneByteAtATime) {
  RankZero rank_0(options_of(0, 2));
  RawPeer peer(rank_0.port());
  for (const std::uint8_t byte : encode(hello_of(1, 2))) {
    peer.send_bytes(std::span(&byte, 1));
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
  ASSERT_EQ(peer.read_frame().value().type, FrameType::kRanks);
  ASSERT_EQ(peer.read_frame().value().type, FrameType::kWelcome);
  peer.send_bytes(encode(FrameType::kAck));
  ASSERT_EQ(peer.read_frame().value().type, FrameType::kCommit);
  Outcome outcome = rank_0.outcome();
  ASSERT_NE(outcome.group, nullptr);
  peer.send_bytes(encode(FrameType::kBye));
  EXPECT_TRUE(peer.is_closed_by_peer());
  peer.close_now();
  EXPECT_FALSE(outcome.group->lost().has_value());
}

TEST(TcpRendezvous, NobodyGoesOnBeforeAllHaveConfirmed) {
  RendezvousOptions options = options_of(0, 2);
  options.timeout_s = 1;
  RankZero rank_0(options);
  RawPeer peer(rank_0.port());
  peer.send_bytes(encode(hello_of(1, 2)));
  ASSERT_EQ(peer.read_frame().value().type, FrameType::kRanks);
  ASSERT_EQ(peer.read_frame().value().type, FrameType::kWelcome);
  const std::optional<Frame> frame = peer.read_frame();  // no kAck is sent
  ASSERT_TRUE(frame.has_value());
  EXPECT_EQ(frame->type, FrameType::kReject);
  peer.close_now();
  const Outcome outcome = rank_0.outcome();
  ASSERT_TRUE(outcome.failure.has_value());
  EXPECT_TRUE(contains(outcome.failure->reason, "rank 1 did not confirm the group at 127.0.0.1:"));
}

TEST(TcpRendezvous, SilentAndMalformedPeersHoldUpNobody) {
  RendezvousOptions options = options_of(0, 2);
  options.handshake_s = 0.3;
  RankZero rank_0(options);
  const Bytes hello = encode(hello_of(1, 2));
  RawPeer half(rank_0.port());
  half.send_bytes(std::span(hello).first(14));  // two of the four bytes of the length
  RawPeer huge(rank_0.port());
  Bytes header(hello.begin(), hello.begin() + kFrameHeaderBytes);
  header[12] = header[13] = header[14] = 0xFF;
  header[15] = 0x7F;
  huge.send_bytes(header);
  RawPeer future_version(rank_0.port());
  header = hello;
  header[8] = 2;
  future_version.send_bytes(std::span(header).first(10));
  RawPeer not_a_greeting(rank_0.port());
  not_a_greeting.send_bytes(encode(FrameType::kAck));

  Outcome other = join_later(options_of(1, 2), rank_0.port()).get();
  Outcome outcome = rank_0.outcome();
  ASSERT_NE(outcome.group, nullptr);
  ASSERT_NE(other.group, nullptr);
  EXPECT_TRUE(huge.is_closed_by_peer());
  EXPECT_TRUE(future_version.is_closed_by_peer());
  EXPECT_TRUE(not_a_greeting.is_closed_by_peer());
  EXPECT_TRUE(half.is_closed_by_peer());
  EXPECT_EQ(outcome.group->counts().strangers, 3);
  EXPECT_EQ(outcome.group->counts().silent, 1);
}

TEST(TcpRendezvous, AnotherJobIsToldAndTheJobStillForms) {
  RankZero job_a(options_of(0, 2));
  RendezvousOptions options_b = options_of(0, 2);
  options_b.token = job_token("job b");
  RankZero job_b(options_b);
  RendezvousOptions astray = options_of(1, 2);
  astray.token = job_token("job b");
  astray.timeout_s = 0.5;
  const Outcome lost_one = join_later(astray, job_a.port()).get();
  ASSERT_TRUE(lost_one.failure.has_value());
  EXPECT_TRUE(contains(lost_one.failure->reason, "has another token); is rank 0 running?"));
  EXPECT_EQ(lost_one.failure->culprit_rank, 0);

  astray.timeout_s = 20;
  std::vector<Outcome> outcomes;
  outcomes.push_back(join_later(options_of(1, 2), job_a.port()).get());
  outcomes.push_back(job_a.outcome());
  outcomes.push_back(join_later(astray, job_b.port()).get());
  outcomes.push_back(job_b.outcome());
  for (const Outcome& outcome : outcomes) ASSERT_NE(outcome.group, nullptr);
  EXPECT_GE(outcomes[1].group->counts().other_jobs, 1);
  EXPECT_EQ(outcomes[3].group->counts().other_jobs, 0);
  close_all(outcomes);
}

TEST(TcpRendezvous, WhoComesLateIsToldThatTheGroupIsComplete) {
  std::vector<RendezvousOptions> options = options_of_all(2);
  RankZero rank_0(options[0]);
  std::vector<Outcome> outcomes;
  outcomes.push_back(join_later(options[1], rank_0.port()).get());
  outcomes.push_back(rank_0.outcome());
  const Outcome late = join_later(options[1], rank_0.port()).get();
  EXPECT_TRUE(contains(late.config_error, "generation 1 of the job at 127.0.0.1:"));
  EXPECT_TRUE(contains(late.config_error, "is already complete"));
  EXPECT_EQ(outcomes[1].group->counts().late, 1);
  EXPECT_FALSE(outcomes[1].group->lost().has_value());
  close_all(outcomes);
}

TEST(TcpRendezvous, AFloodOfStrangersDoesNotKeepTheJobFromForming) {
  constexpr int kConnections = 2000;
  RankZero rank_0(options_of(0, 4));
  std::atomic<int> connected = 0;
  std::thread flood([&, port = rank_0.port()] {
    std::mt19937 random(7);
    for (int i = 0; i < kConnections; ++i) {
      RawPeer stranger(port);
      if (!stranger.is_connected()) continue;
      ++connected;
      Bytes bytes(1 + random() % 100);
      for (std::uint8_t& byte : bytes) byte = static_cast<std::uint8_t>(random());
      bytes[0] |= 0x80U;  // never the start of a frame
      stranger.try_send(bytes);
    }
  });
  std::vector<std::future<Outcome>> others;
  EXPECT_TRUE(eventually([&] { return connected > kConnections / 10; }));
  for (const int rank : {1, 2}) others.push_back(join_later(options_of(rank, 4), rank_0.port()));
  EXPECT_TRUE(eventually([&] { return connected > kConnections / 2; }));
  others.push_back(join_later(options_of(3, 4), rank_0.port()));
  flood.join();
  std::vector<Outcome> outcomes;
  outcomes.push_back(rank_0.outcome());
  for (std::future<Outcome>& other : others) outcomes.push_back(other.get());
  for (const Outcome& outcome : outcomes) ASSERT_NE(outcome.group, nullptr) << outcome.config_error;
  const auto turned_away = [&] {
    const RendezvousCounts counts = outcomes[0].group->counts();
    return counts.strangers + counts.crowded_out;
  };
  EXPECT_GT(connected, kConnections / 2);
  EXPECT_TRUE(eventually([&] { return turned_away() > connected / 2; })) << turned_away();
  EXPECT_FALSE(outcomes[0].group->lost().has_value());
  close_all(outcomes);
}

TEST(TcpRendezvous, SilentConnectionsBeyondTheCapAreCrowdedOut) {
  RankZero rank_0(options_of(0, 2));
  std::vector<RawPeer> silent;
  for (int i = 0; i < 2 * 2 + 16 + 5; ++i) silent.emplace_back(rank_0.port());
  std::vector<Outcome> outcomes;
  outcomes.push_back(join_later(options_of(1, 2), rank_0.port()).get());
  outcomes.push_back(rank_0.outcome());
  ASSERT_NE(outcomes[0].group, nullptr);
  EXPECT_GE(outcomes[1].group->counts().crowded_out, 5);
  EXPECT_TRUE(silent.front().is_closed_by_peer());
  close_all(outcomes);
}

TEST(TcpRendezvous, ARankLostBeforeTheGroupIsCompleteEndsTheWait) {
  RendezvousOptions options = options_of(0, 3);
  options.handshake_s = 0.1;
  RankZero rank_0(options);
  std::future<Outcome> other = join_later(options_of(2, 3), rank_0.port());
  RawPeer peer(rank_0.port());
  peer.send_bytes(encode(hello_of(1, 3)));
  peer.close_now();
  const std::vector<Outcome> outcomes = [&] {
    std::vector<Outcome> both;
    both.push_back(rank_0.outcome());
    both.push_back(other.get());
    return both;
  }();
  ASSERT_TRUE(outcomes[0].failure.has_value());
  EXPECT_EQ(outcomes[0].failure->culprit_rank, 1);
  EXPECT_EQ(outcomes[0].failure->host, "n1");
  EXPECT_EQ(outcomes[0].failure->pid, 101);
  EXPECT_TRUE(contains(outcomes[0].failure->reason, "rank 1 (host n1, pid 101): its connection ended"));
  EXPECT_LT(outcomes[0].failure->elapsed_ms, 15'000);
}

TEST(TcpRendezvous, WithoutRankZeroTheErrorSaysWhereAndHowOften) {
  RendezvousOptions options = options_of(1, 2);
  options.port = free_port();
  options.timeout_s = 0.6;
  const Outcome outcome = outcome_of(options);
  ASSERT_TRUE(outcome.failure.has_value());
  EXPECT_TRUE(contains(outcome.failure->reason, "rank 0 was not found at 127.0.0.1:" +
                                                    std::to_string(options.port) + " within 0.6 s ("));
  EXPECT_TRUE(contains(outcome.failure->reason, " tries, last error: 127.0.0.1:"));
  EXPECT_TRUE(contains(outcome.failure->reason, "Connection refused); is rank 0 running?"));

  options.address = "no-such-host.invalid";
  const Outcome unresolved = outcome_of(options);
  ASSERT_TRUE(unresolved.failure.has_value());
  EXPECT_TRUE(contains(unresolved.failure->reason, "rank 0 was not found at no-such-host.invalid:"));
}

TEST(TcpRendezvous, WhatIsNoRankZeroIsTriedAgainUntilTheDeadline) {
  DeafListener deaf;
  RendezvousOptions options = options_of(1, 2);
  options.port = deaf.port();
  options.timeout_s = 0.8;
  options.handshake_s = 0.1;
  const Outcome silent = outcome_of(options);
  ASSERT_TRUE(silent.failure.has_value());
  EXPECT_TRUE(contains(silent.failure->reason, "no answer to the greeting"));

  DeafListener web;
  std::atomic<bool> ends = false;
  std::thread server([&] {
    const timeval patience{.tv_sec = 0, .tv_usec = 50'000};
    setsockopt(web.get(), SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience));
    const std::string answer = "HTTP/1.1 400 Bad Request\r\n\r\n";
    while (!ends) {
      const Descriptor client(accept4(web.get(), nullptr, nullptr, SOCK_CLOEXEC));
      if (client.get() < 0) continue;
      send(client.get(), answer.data(), answer.size(), MSG_NOSIGNAL);
      std::array<char, 512> greeting{};
      recv(client.get(), greeting.data(), greeting.size(), 0);
    }
  });
  options.port = web.port();
  options.handshake_s = 2;
  const Outcome foreign = outcome_of(options);
  ends = true;
  server.join();
  ASSERT_TRUE(foreign.failure.has_value());
  EXPECT_TRUE(contains(foreign.failure->reason, "what answers there is not of this protocol"));
}

TEST(TcpRendezvous, RanksMayComeBeforeRankZero) {
  const int port = free_port();
  std::future<Outcome> other = join_later(options_of(1, 2), port);
  std::this_thread::sleep_for(std::chrono::milliseconds(200));
  RendezvousOptions options = options_of(0, 2);
  options.port = port;
  std::vector<Outcome> outcomes;
  outcomes.push_back(outcome_of(options));
  outcomes.push_back(other.get());
  ASSERT_NE(outcomes[0].group, nullptr) << outcomes[0].config_error;
  ASSERT_NE(outcomes[1].group, nullptr);
  close_all(outcomes);
}

TEST(TcpRendezvous, APortThatIsTakenIsRefusedWithAHint) {
  const DeafListener taken;
  RendezvousOptions options = options_of(0, 2);
  options.port = taken.port();
  const std::string text = thrown_message<ConfigError>([&] { TcpRendezvous::join(options); });
  EXPECT_TRUE(contains(text, "rank 0 can not listen on 127.0.0.1:" + std::to_string(taken.port()) +
                                 ": Address already in use; another process has the port"));
  EXPECT_TRUE(contains(text, "or 0 for any free one"));
  options.bind_address = "192.0.2.1";  // of the range for documentation: of no machine
  EXPECT_TRUE(contains(thrown_message<ConfigError>([&] { TcpRendezvous::join(options); }),
                       "allowed is an address of rank 0's own machine"));
  options.bind_address = "no-such-host.invalid";
  EXPECT_TRUE(contains(thrown_message<ConfigError>([&] { TcpRendezvous::join(options); }),
                       "rendezvous address: 'no-such-host.invalid'"));
}

TEST(TcpRendezvous, LocalhostIsFoundWhereRankZeroListensOnIpv4Only) {
  std::vector<RendezvousOptions> options = options_of_all(2);
  options[0].bind_address = "127.0.0.1";
  for (RendezvousOptions& one : options) one.address = "localhost";
  std::vector<Outcome> outcomes = meet(options);
  ASSERT_NE(outcomes[1].group, nullptr);
  EXPECT_TRUE(contains(outcomes[1].group->result().ranks[0].address, "localhost:"));
  close_all(outcomes);
}

bool has_ipv6() {
  const Descriptor socket_6(socket(AF_INET6, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in6 address{};
  address.sin6_family = AF_INET6;
  address.sin6_addr = in6addr_loopback;
  return bind(socket_6.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0;
}

TEST(TcpRendezvous, RanksMeetOverIpv6) {
  if (!has_ipv6()) GTEST_SKIP() << "this machine has no IPv6 loopback";
  std::vector<RendezvousOptions> options = options_of_all(3);
  for (RendezvousOptions& one : options) one.address = "::1";
  std::vector<Outcome> outcomes = meet(options);
  ASSERT_NE(outcomes[1].group, nullptr);
  EXPECT_TRUE(contains(outcomes[1].group->result().ranks[0].address, "[::1]:"));
  EXPECT_TRUE(contains(outcomes[1].group->result().ranks[2].address, "[::1]:"));
  close_all(outcomes);
}

TEST(TcpRendezvous, AllInterfacesAreOfBothFamilies) {
  if (!has_ipv6()) GTEST_SKIP() << "this machine has no IPv6 loopback";
  std::vector<RendezvousOptions> options = options_of_all(3);
  options[0].bind_address = "::";
  options[2].address = "::1";
  std::vector<Outcome> outcomes = meet(options);
  ASSERT_NE(outcomes[1].group, nullptr);
  EXPECT_TRUE(outcomes[1].group->result().ranks[1].address.starts_with("127.0.0.1:"));
  EXPECT_TRUE(outcomes[1].group->result().ranks[2].address.starts_with("[::1]:"));
  close_all(outcomes);
}

TEST(TcpRendezvous, OptionsOutOfRangeAreRefused) {
  const auto refusal = [](const std::function<void(RendezvousOptions&)>& change) {
    RendezvousOptions options = options_of(1, 2);
    change(options);
    return thrown_message<ConfigError>([&] { TcpRendezvous::join(options); });
  };
  EXPECT_EQ(refusal([](auto& o) { o.rank = 2; }), "rendezvous rank: 2; allowed are 0 to 1");
  EXPECT_EQ(refusal([](auto& o) { o.world = 0; }), "rendezvous world: 0; allowed are 1 to 65536");
  EXPECT_EQ(refusal([](auto& o) { o.port = 0; }), "rendezvous port: 0; allowed are 1 to 65535");
  EXPECT_TRUE(
      contains(refusal([](auto& o) { o.timeout_s = 0; }), "rendezvous timeout_s: 0; allowed are 0.001"));
  EXPECT_TRUE(
      contains(refusal([](auto& o) { o.handshake_s = 0; }), "rendezvous handshake_s: 0; allowed are 0.05"));
  EXPECT_TRUE(
      contains(refusal([](auto& o) { o.heartbeat_s = 0.01; }), "heartbeat_s: 0.01; allowed are 0.05"));
  EXPECT_TRUE(
      contains(refusal([](auto& o) { o.heartbeat_misses = 1; }), "heartbeat_misses: 1; allowed are 2"));
  EXPECT_TRUE(contains(refusal([](auto& o) { o.address = ""; }), "rendezvous address: ''"));
}

TEST(TcpRendezvous, OptionsFollowTheLaunchersWord) {
  LaunchPlace place;
  place.rank = 3;
  place.world = 4;
  place.local_rank = 1;
  place.address = "n0";
  place.port = 4242;
  place.job = "4711.0";
  const RendezvousOptions options = rendezvous_options(place);
  EXPECT_EQ(options.rank, 3);
  EXPECT_EQ(options.world, 4);
  EXPECT_EQ(options.local_rank, 1);
  EXPECT_EQ(options.address, "n0");
  EXPECT_EQ(options.port, 4242);
  EXPECT_EQ(options.token, job_token("4711.0"));
}

// The control connection.

TEST(ControlConnection, TheSlowestRankIsKnownToAll) {
  std::vector<Outcome> outcomes = meet(options_of_all(3));
  for (int rank = 0; rank < 3; ++rank) {
    const Outcome& outcome = outcomes[static_cast<std::size_t>(rank)];
    ASSERT_NE(outcome.group, nullptr);
    outcome.group->note(rank == 1 ? 3 : 5, rank == 1 ? "barrier" : std::string(200, 'x'));
  }
  for (const Outcome& outcome : outcomes) {
    EXPECT_TRUE(eventually([&] {
      const std::optional<PeerProgress> slowest = outcome.group->slowest();
      return slowest.has_value() && slowest->rank == 1 && slowest->sequence == 3;
    }));
    const PeerProgress slowest = outcome.group->slowest().value();
    EXPECT_EQ(slowest.operation, "barrier");
    EXPECT_EQ(slowest.host, host_name());
    EXPECT_EQ(slowest.pid, process_id());
    EXPECT_GE(slowest.age_s, 0);
    EXPECT_TRUE(contains(slowest.describe(), ") last finished #3 barrier "));
  }
  outcomes[1].group->note(9, "barrier");
  EXPECT_TRUE(eventually([&] { return outcomes[2].group->slowest()->sequence == 5; }));
  EXPECT_EQ(outcomes[2].group->slowest()->operation, std::string(63, 'x'));
  EXPECT_EQ((PeerProgress{.rank = 4, .host = "n", .pid = 8, .age_s = 2}).describe(),
            "rank 4 (host n, pid 8) has finished no call in 2 s");
  close_all(outcomes);
}

TEST(ControlConnection, AnAbortIsHeardByAllAndReportedOnce) {
  std::vector<RendezvousOptions> options = options_of_all(3);
  std::array<std::atomic<int>, 3> calls{};
  for (std::size_t i = 0; i < 3; ++i) {
    options[i].on_lost = [&calls, i](const PeerLoss& loss) {
      EXPECT_EQ(loss.rank, 2);
      ++calls[i];
    };
  }
  std::vector<Outcome> outcomes = meet(options);
  for (const Outcome& outcome : outcomes) ASSERT_NE(outcome.group, nullptr);
  outcomes[2].group->abort("out of memory");
  outcomes[2].group->abort("again");
  for (const Outcome& outcome : outcomes) {
    ASSERT_TRUE(eventually([&] { return outcome.group->lost().has_value(); }));
    EXPECT_EQ(outcome.group->lost()->describe(), "rank 2 (host " + host_name() + ", pid " +
                                                     std::to_string(process_id()) +
                                                     "): it aborted: out of memory");
  }
  close_all(outcomes);
  for (const std::atomic<int>& count : calls) EXPECT_EQ(count, 1);
}

TEST(ControlConnection, AnAbortOfRankZeroIsHeardByAll) {
  std::vector<Outcome> outcomes = meet(options_of_all(2));
  ASSERT_NE(outcomes[1].group, nullptr);
  outcomes[0].group->abort("no more");
  for (const Outcome& outcome : outcomes) {
    ASSERT_TRUE(eventually([&] { return outcome.group->lost().has_value(); }));
    EXPECT_EQ(outcome.group->lost()->rank, 0);
    EXPECT_EQ(outcome.group->lost()->reason, "it aborted: no more");
  }
  close_all(outcomes);
}

class Leaving : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(ControlConnection, Leaving, testing::Values(0, 1));

TEST_P(Leaving, InGoodOrderIsNoLoss) {
  const auto first = static_cast<std::size_t>(GetParam());
  std::vector<Outcome> outcomes = meet(options_of_all(3));
  for (const Outcome& outcome : outcomes) ASSERT_NE(outcome.group, nullptr);
  outcomes[first].group->close();
  outcomes[first].group->close();
  outcomes[first].group->abort("nobody hears that");
  // Longer than the heartbeats that may be missed.
  std::this_thread::sleep_for(std::chrono::milliseconds(1700));
  for (const Outcome& outcome : outcomes) EXPECT_FALSE(outcome.group->lost().has_value());
  close_all(outcomes);
}

TEST(ControlConnection, AFrameOutOfTurnIsALoss) {
  RankZero rank_0(options_of(0, 2));
  RawPeer peer(rank_0.port());
  peer.send_bytes(encode(hello_of(1, 2)));
  ASSERT_EQ(peer.read_frame().value().type, FrameType::kRanks);
  ASSERT_EQ(peer.read_frame().value().type, FrameType::kWelcome);
  peer.send_bytes(encode(FrameType::kAck));
  ASSERT_EQ(peer.read_frame().value().type, FrameType::kCommit);
  peer.send_bytes(encode(hello_of(1, 2)));
  const std::optional<Frame> frame = peer.read_frame();
  ASSERT_TRUE(frame.has_value());
  EXPECT_EQ(frame->type, FrameType::kAbort);
  peer.close_now();
  const Outcome outcome = rank_0.outcome();
  ASSERT_NE(outcome.group, nullptr);
  ASSERT_TRUE(eventually([&] { return outcome.group->lost().has_value(); }));
  EXPECT_EQ(outcome.group->lost()->describe(), "rank 1 (host n1, pid 101): it sent a frame out of turn");
}

// Ranks as processes, which can be killed and stopped.

/// A forked rank. It waits for the port, joins, writes "joined", and then what it has lost.
class ChildRank {
 public:
  ChildRank(int rank, int world) : ChildRank(options_of(rank, world)) {}
  explicit ChildRank(const RendezvousOptions& options) {
    std::array<int, 2> down{};
    std::array<int, 2> up{};
    EXPECT_EQ(pipe2(down.data(), O_CLOEXEC), 0);
    EXPECT_EQ(pipe2(up.data(), O_CLOEXEC), 0);
    pid_ = fork();
    if (pid_ == 0) {
      close(down[1]);
      close(up[0]);
      run(options, down[0], up[1]);
      _exit(0);
    }
    close(down[0]);
    close(up[1]);
    to_.emplace(down[1]);
    from_.emplace(up[0]);
  }
  ~ChildRank() {
    signal(SIGKILL);
    int status = 0;
    waitpid(pid_, &status, 0);
  }
  ChildRank(const ChildRank&) = delete;
  ChildRank& operator=(const ChildRank&) = delete;

  std::int64_t pid() const { return pid_; }
  void signal(int number) const { kill(pid_, number); }
  void tell_port(int port) const { EXPECT_EQ(write(to_->get(), &port, sizeof(port)), ssize_t{sizeof(port)}); }
  /// The next line it writes; empty at its end.
  std::string read_line() const {
    std::string line;
    char c = 0;
    while (read(from_->get(), &c, 1) == 1 && c != '\n') line += c;
    return line;
  }

 private:
  static void say(int to, const std::string& line) {
    const std::string text = line + "\n";
    if (write(to, text.data(), text.size()) < 0) _exit(1);
  }
  static void run(RendezvousOptions options, int from, int to) {
    if (options.rank == 0) {
      options.on_listening = [to](int port) { say(to, std::to_string(port)); };
    } else if (read(from, &options.port, sizeof(options.port)) != ssize_t{sizeof(options.port)}) {
      _exit(1);
    }
    const Outcome outcome = outcome_of(options);
    if (outcome.group == nullptr) {
      say(to, outcome.failure.has_value() ? outcome.failure->reason : outcome.config_error);
      _exit(0);
    }
    say(to, "joined");
    if (eventually([&] { return outcome.group->lost().has_value(); })) {
      say(to, outcome.group->lost()->describe());
    }
    _exit(0);
  }

  pid_t pid_ = -1;
  std::optional<Descriptor> to_;
  std::optional<Descriptor> from_;
};

/// Rank 0 in this process with its children.
Outcome join_with(RendezvousOptions options, const std::vector<const ChildRank*>& children) {
  options.on_listening = [&](int port) {
    for (const ChildRank* child : children) child->tell_port(port);
  };
  return outcome_of(options);
}

TEST(RankProcesses, AKilledRankIsNamedOnAllOthers) {
  const ChildRank one(1, 3);
  const ChildRank two(2, 3);
  const Outcome outcome = join_with(options_of(0, 3), {&one, &two});
  ASSERT_NE(outcome.group, nullptr) << outcome.config_error;
  EXPECT_EQ(outcome.group->result().ranks[1].pid, one.pid());
  EXPECT_EQ(outcome.group->result().ranks[2].pid, two.pid());
  EXPECT_EQ(one.read_line(), "joined");
  EXPECT_EQ(two.read_line(), "joined");
  EXPECT_FALSE(outcome.group->lost().has_value());
  one.signal(SIGKILL);
  ASSERT_TRUE(eventually([&] { return outcome.group->lost().has_value(); }));
  const PeerLoss loss = *outcome.group->lost();
  EXPECT_EQ(loss.rank, 1);
  EXPECT_EQ(loss.host, host_name());
  EXPECT_EQ(loss.pid, one.pid());
  EXPECT_TRUE(contains(loss.reason, "ended without a goodbye"));
  EXPECT_EQ(two.read_line(), loss.describe());
}

TEST(RankProcesses, ARankKilledBeforeItComesIsNamed) {
  RendezvousOptions options = options_of(0, 3);
  options.timeout_s = 2;
  const ChildRank one(1, 3);
  const ChildRank two(2, 3);
  one.signal(SIGKILL);
  const Outcome outcome = join_with(options, {&two});
  ASSERT_TRUE(outcome.failure.has_value());
  EXPECT_EQ(outcome.failure->culprit_rank, 1);
  EXPECT_TRUE(contains(outcome.failure->reason, "rank 1 did not join 127.0.0.1:"));
  EXPECT_EQ(two.read_line(), outcome.failure->reason);
}

TEST(RankProcesses, AStoppedRankIsFoundByItsMissingHeartbeats) {
  const ChildRank one(1, 3);
  const ChildRank two(2, 3);
  const Outcome outcome = join_with(options_of(0, 3), {&one, &two});
  ASSERT_NE(outcome.group, nullptr) << outcome.config_error;
  EXPECT_EQ(one.read_line(), "joined");
  EXPECT_EQ(two.read_line(), "joined");
  two.signal(SIGSTOP);
  ASSERT_TRUE(eventually([&] { return outcome.group->lost().has_value(); }));
  const PeerLoss loss = *outcome.group->lost();
  EXPECT_EQ(loss.rank, 2);
  EXPECT_EQ(loss.pid, two.pid());
  EXPECT_TRUE(contains(loss.reason, "nothing was heard of it for "));
  EXPECT_EQ(one.read_line(), loss.describe());
  two.signal(SIGCONT);
  EXPECT_EQ(two.read_line(), loss.describe());  // it is told what was thought of it
}

/// Rank 0 in a child, the others in this process.
class RankZeroProcess : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(RankProcesses, RankZeroProcess, testing::Values(SIGKILL, SIGSTOP));

TEST_P(RankZeroProcess, IsNamedByAllOthersWhenItEnds) {
  const ChildRank zero(0, 3);
  const int port = std::stoi(zero.read_line());
  std::future<Outcome> other = join_later(options_of(2, 3), port);
  std::vector<Outcome> outcomes;
  outcomes.push_back(join_later(options_of(1, 3), port).get());
  outcomes.push_back(other.get());
  EXPECT_EQ(zero.read_line(), "joined");
  zero.signal(GetParam());
  for (const Outcome& outcome : outcomes) {
    ASSERT_NE(outcome.group, nullptr) << outcome.config_error;
    ASSERT_TRUE(eventually([&] { return outcome.group->lost().has_value(); }));
    EXPECT_EQ(outcome.group->lost()->rank, 0);
    EXPECT_EQ(outcome.group->lost()->host, host_name());
    EXPECT_EQ(outcome.group->lost()->pid, zero.pid());
  }
  close_all(outcomes);
}

TEST(RankProcesses, RankZeroKilledWhileOthersWaitEndsTheirWait) {
  const ChildRank zero(0, 3);
  const int port = std::stoi(zero.read_line());
  std::future<Outcome> other = join_later(options_of(1, 3), port);
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  zero.signal(SIGKILL);
  const Outcome outcome = other.get();
  ASSERT_TRUE(outcome.failure.has_value());
  EXPECT_EQ(outcome.failure->culprit_rank, 0);
  EXPECT_TRUE(contains(outcome.failure->reason, "rank 0 at 127.0.0.1:"));
  EXPECT_TRUE(contains(outcome.failure->reason, "was lost before the group was complete"));
}

TEST(RankProcesses, TheSamePortCanBeUsedAtOnceAfterAKill) {
  std::optional<ChildRank> zero(std::in_place, 0, 2);
  const int port = std::stoi(zero->read_line());
  const Outcome first = join_later(options_of(1, 2), port).get();
  ASSERT_NE(first.group, nullptr);
  zero.reset();
  RendezvousOptions options = options_of(0, 2);
  options.port = port;
  std::future<Outcome> other = join_later(options_of(1, 2), port);
  std::vector<Outcome> outcomes;
  outcomes.push_back(outcome_of(options));
  outcomes.push_back(other.get());
  ASSERT_NE(outcomes[0].group, nullptr) << outcomes[0].config_error;
  ASSERT_NE(outcomes[1].group, nullptr);
  close_all(outcomes);
}

}  // namespace
}  // namespace mxopt
