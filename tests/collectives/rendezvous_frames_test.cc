#include "mxopt/collectives/rendezvous_frames.h"

#include <algorithm>
#include <random>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "support/thrown_message.h"

#include "mxopt/params/check.h"

namespace mxopt {
namespace {

using Bytes = std::vector<std::uint8_t>;
using test::contains;
using test::thrown_message;

Hello some_hello() {
  return {.token = job_token("a job"),
          .rank = 3,
          .world = 8,
          .local_rank = -1,
          .pid = 123456789012,
          .config_hash = 0xFEDCBA9876543210U,
          .library_version = "0.1.0",
          .host = "n3"};
}

RankEntry some_entry(int rank) {
  return {.rank = rank,
          .local_rank = rank % 8,
          .pid = 1000 + rank,
          .host = "node" + std::to_string(rank),
          .address = "10.0.0.1:" + std::to_string(1024 + rank)};
}

/// One frame of every type.
std::vector<Bytes> one_of_each() {
  const std::vector<RankEntry> ranks = {some_entry(0), some_entry(1)};
  return {
      encode(some_hello()),
      encode(ranks),
      encode(Welcome{.generation = 1, .payload = Bytes(128, 7)}),
      encode(FrameType::kAck),
      encode(FrameType::kCommit),
      encode(Reject{.kind = RejectKind::kRankLost, .culprit_rank = 2, .pid = 7, .host = "h", .reason = "r"}),
      encode(Heartbeat{.rank = 1, .sequence = 5, .age_ms = 6, .operation = "all_gather"}),
      encode(Abort{.culprit_rank = 1, .pid = 9, .host = "h", .reason = "gone"}),
      encode(FrameType::kBye)};
}

/// The frames of a stream that comes in pieces of `piece_bytes`.
std::vector<Frame> frames_of(const Bytes& stream, std::size_t piece_bytes, FrameDecoder& decoder) {
  std::vector<Frame> frames;
  for (std::size_t at = 0; at < stream.size(); at += piece_bytes) {
    std::span<const std::uint8_t> piece(stream.data() + at, std::min(piece_bytes, stream.size() - at));
    while (!piece.empty() && decoder.problem().empty()) {
      piece = piece.subspan(decoder.take(piece));
      while (auto frame = decoder.next()) frames.push_back(std::move(*frame));
    }
  }
  return frames;
}

/// The only frame of `bytes`.
Frame frame_of(const Bytes& bytes) {
  FrameDecoder decoder(kMaxFrameBodyBytes);
  const std::vector<Frame> frames = frames_of(bytes, bytes.size(), decoder);
  EXPECT_EQ(frames.size(), 1U) << decoder.problem();
  return frames.empty() ? Frame{} : frames.front();
}

/// Runs every decoder of bodies. Returns how many of them took the body.
int decoders_that_take(std::span<const std::uint8_t> body) {
  return int{decode_hello(body).has_value()} + int{decode_ranks(body).has_value()} +
         int{decode_welcome(body).has_value()} + int{decode_reject(body).has_value()} +
         int{decode_abort(body).has_value()} + int{decode_heartbeat(body).has_value()};
}

TEST(RendezvousFrames, TheHeaderIsLittleEndianOfSixteenBytes) {
  EXPECT_EQ(encode(FrameType::kBye), (Bytes{'m', 'x', 'o', 'p', 't', 'r', 'd', 'z', 1, 0, 9, 0, 0, 0, 0, 0}));
  const Bytes hello = encode(some_hello());
  ASSERT_EQ(hello.size(), kFrameHeaderBytes + kHelloBodyBytes);
  EXPECT_EQ(hello[10], 1);
  EXPECT_EQ(hello[12], kHelloBodyBytes & 0xFF);
  EXPECT_EQ(hello[13], kHelloBodyBytes >> 8);
  EXPECT_EQ(hello[kFrameHeaderBytes + 16], 3);  // the rank, behind the token
}

TEST(RendezvousFrames, EveryMessageComesBack) {
  const Frame hello_frame = frame_of(encode(some_hello()));
  EXPECT_EQ(hello_frame.type, FrameType::kHello);
  const Hello hello = decode_hello(hello_frame.body).value();
  EXPECT_EQ(hello.token, job_token("a job"));
  EXPECT_EQ(hello.rank, 3);
  EXPECT_EQ(hello.world, 8);
  EXPECT_EQ(hello.local_rank, -1);
  EXPECT_EQ(hello.pid, 123456789012);
  EXPECT_EQ(hello.config_hash, 0xFEDCBA9876543210U);
  EXPECT_EQ(hello.library_version, "0.1.0");
  EXPECT_EQ(hello.host, "n3");

  const Bytes payload(kMaxPayloadBytes, 0xA5);
  const Frame welcome_frame = frame_of(encode(Welcome{.generation = 2, .payload = payload}));
  EXPECT_EQ(welcome_frame.type, FrameType::kWelcome);
  EXPECT_EQ(welcome_frame.body.size(), kMaxFrameBodyBytes);
  EXPECT_EQ(decode_welcome(welcome_frame.body).value().payload, payload);
  EXPECT_EQ(decode_welcome(welcome_frame.body).value().generation, 2U);

  const Reject reject =
      decode_reject(
          frame_of(encode(Reject{.kind = RejectKind::kComplete, .culprit_rank = -1, .reason = "late"})).body)
          .value();
  EXPECT_EQ(reject.kind, RejectKind::kComplete);
  EXPECT_EQ(reject.culprit_rank, -1);
  EXPECT_EQ(reject.reason, "late");

  const Abort abort =
      decode_abort(frame_of(encode(Abort{.culprit_rank = 4, .pid = 77, .host = "n4", .reason = "gone"})).body)
          .value();
  EXPECT_EQ(abort.culprit_rank, 4);
  EXPECT_EQ(abort.pid, 77);
  EXPECT_EQ(abort.host, "n4");
  EXPECT_EQ(abort.reason, "gone");

  const Heartbeat heartbeat =
      decode_heartbeat(
          frame_of(encode(Heartbeat{.rank = 2, .sequence = -1, .age_ms = 9, .operation = "barrier"})).body)
          .value();
  EXPECT_EQ(heartbeat.rank, 2);
  EXPECT_EQ(heartbeat.sequence, -1);
  EXPECT_EQ(heartbeat.age_ms, 9);
  EXPECT_EQ(heartbeat.operation, "barrier");
}

TEST(RendezvousFrames, ALongRankTableTakesSeveralFrames) {
  std::vector<RankEntry> ranks;
  for (int rank = 0; rank < 5000; ++rank) ranks.push_back(some_entry(rank));
  FrameDecoder decoder(kMaxFrameBodyBytes);
  const std::vector<Frame> frames = frames_of(encode(ranks), 1000, decoder);
  EXPECT_GT(frames.size(), 1U);
  int next = 0;
  for (const Frame& frame : frames) {
    ASSERT_EQ(frame.type, FrameType::kRanks);
    const std::vector<RankEntry> part = decode_ranks(frame.body).value();
    for (const RankEntry& entry : part) {
      EXPECT_EQ(entry.rank, next);
      EXPECT_EQ(entry.address, some_entry(next).address);
      ++next;
    }
  }
  EXPECT_EQ(next, 5000);
}

TEST(RendezvousFrames, BytesMayComeInAnySplit) {
  Bytes stream;
  const std::vector<Bytes> each = one_of_each();
  for (const Bytes& frame : each) stream.insert(stream.end(), frame.begin(), frame.end());
  for (const std::size_t piece_bytes : {1U, 2U, 3U, 15U, 16U, 17U, 100U, 100000U}) {
    FrameDecoder decoder(kMaxFrameBodyBytes);
    const std::vector<Frame> frames = frames_of(stream, piece_bytes, decoder);
    ASSERT_EQ(frames.size(), each.size()) << piece_bytes;
    for (std::size_t i = 0; i < each.size(); ++i) {
      EXPECT_EQ(static_cast<std::size_t>(frames[i].type), i + 1);
      EXPECT_TRUE(std::equal(frames[i].body.begin(), frames[i].body.end(),
                             each[i].begin() + kFrameHeaderBytes, each[i].end()));
    }
    EXPECT_FALSE(decoder.is_inside_frame());
    EXPECT_EQ(decoder.problem(), "");
  }
}

TEST(RendezvousFrames, AStrangerIsKnownByItsFirstWrongByte) {
  FrameDecoder decoder(kMaxFrameBodyBytes);
  const std::string http = "GET / HTTP/1.1\r\n";
  EXPECT_EQ(decoder.take(std::span(reinterpret_cast<const std::uint8_t*>(http.data()), http.size())), 1U);
  EXPECT_EQ(decoder.problem(), "not of this protocol");
  EXPECT_EQ(decoder.take(encode(FrameType::kBye)), 0U);
  EXPECT_FALSE(decoder.next().has_value());
}

TEST(RendezvousFrames, HeadersOutOfTheRulesAreProblems) {
  const auto problem_of = [](std::size_t at, Bytes bytes) {
    Bytes frame = encode(FrameType::kBye);
    std::copy(bytes.begin(), bytes.end(), frame.begin() + static_cast<std::ptrdiff_t>(at));
    FrameDecoder decoder(100);
    decoder.take(frame);
    EXPECT_FALSE(decoder.next().has_value());
    EXPECT_EQ(decoder.held_bytes(), 0U);
    return decoder.problem();
  };
  EXPECT_EQ(problem_of(8, {2, 1}), "protocol version 258; this one is 1");
  EXPECT_EQ(problem_of(10, {0, 0}), "unknown frame type 0");
  EXPECT_EQ(problem_of(10, {10, 0}), "unknown frame type 10");
  EXPECT_EQ(problem_of(12, {0xFF, 0xFF, 0xFF, 0x7F}), "a frame of 2147483647 bytes; at most 100 are allowed");
  EXPECT_EQ(problem_of(12, {101, 0, 0, 0}), "a frame of 101 bytes; at most 100 are allowed");
}

TEST(RendezvousFrames, MemoryIsTakenOnlyForBytesThatCame) {
  FrameDecoder decoder(kMaxFrameBodyBytes);
  const Bytes frame = encode(Welcome{.generation = 1, .payload = Bytes(60000)});
  EXPECT_EQ(decoder.take(std::span(frame).first(kFrameHeaderBytes + 10)), kFrameHeaderBytes + 10);
  EXPECT_LE(decoder.held_bytes(), 64U);
  EXPECT_TRUE(decoder.is_inside_frame());
}

TEST(RendezvousFrames, BodiesWithTooLittleOrARestAreRefused) {
  for (Bytes bytes : one_of_each()) {
    const auto type = static_cast<FrameType>(bytes[10]);
    const std::size_t body_bytes = bytes.size() - kFrameHeaderBytes;
    if (body_bytes == 0) continue;
    bytes.push_back(0);
    const auto body = std::span<const std::uint8_t>(bytes).subspan(kFrameHeaderBytes);
    EXPECT_GE(decoders_that_take(body.first(body_bytes)), 1) << "type " << static_cast<int>(type);
    EXPECT_EQ(decoders_that_take(body), 0) << "type " << static_cast<int>(type);
    EXPECT_EQ(decoders_that_take(body.first(body_bytes - 1)), 0) << "type " << static_cast<int>(type);
  }
  Bytes reject = encode(Reject{.kind = RejectKind::kComplete});
  reject[kFrameHeaderBytes] = 5;
  EXPECT_FALSE(decode_reject(std::span(reject).subspan(kFrameHeaderBytes)).has_value());
}

TEST(RendezvousFrames, WhatIsTooLongIsRefusedOrCut) {
  Hello hello = some_hello();
  hello.host.assign(kMaxHostBytes, 'h');
  EXPECT_EQ(decode_hello(frame_of(encode(hello)).body).value().host, hello.host);
  hello.host += 'h';
  EXPECT_TRUE(contains(thrown_message<ContractError>([&] { encode(hello); }), "256 against 255"));
  hello = some_hello();
  hello.library_version.assign(kMaxVersionBytes + 1, '1');
  EXPECT_TRUE(contains(thrown_message<ContractError>([&] { encode(hello); }), "32 against 31"));
  const Welcome welcome{.generation = 1, .payload = Bytes(kMaxPayloadBytes + 1)};
  EXPECT_TRUE(contains(thrown_message<ContractError>([&] { encode(welcome); }), "65529 against 65528"));
  std::vector<RankEntry> ranks = {some_entry(0)};
  ranks[0].host.assign(kMaxHostBytes + 1, 'h');
  EXPECT_TRUE(contains(thrown_message<ContractError>([&] { encode(ranks); }), "256 against 255"));
  ranks = {some_entry(0)};
  ranks[0].address.assign(kMaxHostBytes + 1, 'a');
  EXPECT_TRUE(contains(thrown_message<ContractError>([&] { encode(ranks); }), "256 against 255"));
  EXPECT_TRUE(contains(thrown_message<ContractError>([] { encode(FrameType::kHello); }), "has a body"));

  const Bytes reject = encode(Reject{.kind = RejectKind::kComplete, .reason = std::string(9999, 'r')});
  EXPECT_EQ(decode_reject(frame_of(reject).body).value().reason, std::string(kMaxReasonBytes, 'r'));
}

TEST(RendezvousFrames, TextsFromOutsideBecomePlain) {
  EXPECT_EQ(plain_text("a\nb\x1b[31m\xC3\xA4", 100), "a?b?[31m??");
  EXPECT_EQ(plain_text("abcdef", 3), "abc");
  Hello hello = some_hello();
  hello.host = "n\n3";
  EXPECT_EQ(decode_hello(frame_of(encode(hello)).body).value().host, "n?3");
}

// Streams that are random, or valid ones with bytes changed, cut out or put in. None may do harm; what comes
// out must be a frame within the limits, and the decoder must not hold more than one.
TEST(RendezvousFrames, DamagedStreamsDoNoHarm) {
  constexpr int kStreams = 120'000;
  constexpr std::uint32_t kLimit = 1024;
  std::mt19937 random(20240611);
  const auto below = [&](std::size_t limit) { return static_cast<std::size_t>(random() % limit); };
  const auto bit = [](std::size_t at) { return static_cast<std::uint8_t>(1U << at); };
  const std::vector<Bytes> valid = one_of_each();
  std::int64_t frames = 0;
  std::int64_t refused = 0;
  for (int i = 0; i < kStreams; ++i) {
    Bytes stream;
    if (i % 4 == 0) {
      stream.resize(below(200));
      for (std::uint8_t& byte : stream) byte = static_cast<std::uint8_t>(random());
    } else {
      for (std::size_t n = 1 + below(3); n > 0; --n) {
        const Bytes& frame = valid[below(valid.size())];
        stream.insert(stream.end(), frame.begin(), frame.end());
      }
      for (std::size_t n = below(4); n > 0; --n) {
        const auto at = static_cast<std::ptrdiff_t>(below(stream.size()));
        const auto kind = below(4);
        // Damage near the start of the stream meets headers.
        if (kind == 0) stream[static_cast<std::size_t>(at)] = static_cast<std::uint8_t>(random());
        if (kind == 1) stream[below(std::min<std::size_t>(64, stream.size()))] ^= bit(below(8));
        if (kind == 2) stream.insert(stream.begin() + at, static_cast<std::uint8_t>(random()));
        if (kind == 3 && stream.size() > 1) stream.erase(stream.begin() + at);
      }
    }
    FrameDecoder decoder(kLimit);
    for (const Frame& frame : frames_of(stream, 1 + below(64), decoder)) {
      ++frames;
      ASSERT_LE(frame.body.size(), kLimit);
      decoders_that_take(frame.body);
    }
    ASSERT_LE(decoder.held_bytes(), 2 * kLimit);
    if (!decoder.problem().empty()) ++refused;
    decoders_that_take(stream);
  }
  EXPECT_GT(frames, kStreams / 2);
  EXPECT_GT(refused, kStreams / 4);
}

}  // namespace
}  // namespace mxopt
