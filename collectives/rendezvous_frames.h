// The frames that ranks exchange over TCP while they meet, and as bytes of a stream.
//
// A frame is magic (8 bytes), version (2), type (2), body length (4) and the body; numbers are little-endian.
// Lengths are checked before memory is taken. Texts that come from outside are given back as plain ASCII: any
// other byte is a '?'.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "mxopt/collectives/job_token.h"
#include "mxopt/collectives/rank_table.h"

namespace mxopt {

inline constexpr std::array<std::uint8_t, 8> kFrameMagic = {'m', 'x', 'o', 'p', 't', 'r', 'd', 'z'};
inline constexpr std::uint16_t kFrameVersion = 1;
inline constexpr std::size_t kFrameHeaderBytes = 16;
inline constexpr std::uint32_t kMaxFrameBodyBytes = 65536;
inline constexpr std::uint32_t kHelloBodyBytes = 336;
/// What rank 0 can hand to all.
inline constexpr std::size_t kMaxPayloadBytes = kMaxFrameBodyBytes - 8;
inline constexpr std::size_t kMaxHostBytes = 255;
inline constexpr std::size_t kMaxVersionBytes = 31;
inline constexpr std::size_t kMaxReasonBytes = 4096;
inline constexpr std::size_t kMaxOperationBytes = 255;

enum class FrameType : std::uint16_t {
  kHello = 1,  // to rank 0: who I am
  kRanks,      // from rank 0: a part of the rank table
  kWelcome,    // from rank 0, when all have come: the payload
  kAck,        // to rank 0: I have table and payload
  kCommit,     // from rank 0: all have
  kReject,     // from rank 0: no, and why
  kHeartbeat,  // both ways: alive, and how far
  kAbort,      // both ways: the job fails, and who failed
  kBye,        // both ways: I leave in good order
};

struct Hello {
  JobToken token{};
  int rank = 0;
  int world = 0;
  int local_rank = -1;
  std::int64_t pid = 0;
  std::uint64_t config_hash = 0;
  std::string library_version = {};  // at most kMaxVersionBytes
  std::string host = {};             // at most kMaxHostBytes
};

struct Welcome {
  std::uint32_t generation = 1;
  std::vector<std::uint8_t> payload = {};  // at most kMaxPayloadBytes
};

/// Why a rank is turned away.
enum class RejectKind : std::uint16_t {
  kOtherJob = 1,  // the token is another job's: the job at this address may be an old one
  kComplete,      // the group has all its ranks
  kInconsistent,  // ranks were started with different settings: the whole job fails
  kRankLost,      // a rank is dead or missing: the whole job fails
};

struct Reject {
  RejectKind kind = RejectKind::kInconsistent;
  int culprit_rank = -1;    // -1: not known
  std::int64_t pid = 0;     // of the culprit; 0: not known
  std::string host = {};    // likewise; empty: not known
  std::string reason = {};  // at most kMaxReasonBytes; longer ones are cut
};

struct Abort {
  int culprit_rank = -1;
  std::int64_t pid = 0;
  std::string host = {};
  std::string reason = {};  // at most kMaxReasonBytes; longer ones are cut
};

/// How far a rank has come. Rank 0 sends the slowest one's, the others their own.
struct Heartbeat {
  int rank = 0;
  std::int64_t sequence = -1;  // of the last call that is finished; -1: none
  std::int64_t age_ms = 0;     // since it was finished
  std::string operation = {};  // at most kMaxOperationBytes; longer ones are cut
};

/// Whole frames, header included. ContractError when something is longer than
/// allowed.
std::vector<std::uint8_t> encode(const Hello& hello);
/// As many kRanks frames as it takes.
std::vector<std::uint8_t> encode(std::span<const RankEntry> ranks);
std::vector<std::uint8_t> encode(const Welcome& welcome);
std::vector<std::uint8_t> encode(const Reject& reject);
std::vector<std::uint8_t> encode(const Abort& abort);
std::vector<std::uint8_t> encode(const Heartbeat& heartbeat);
/// A frame without a body: kAck, kCommit or kBye.
std::vector<std::uint8_t> encode(FrameType type);

/// Bodies of frames. Empty when the bytes are no such body, whole and without a rest.
std::optional<Hello> decode_hello(std::span<const std::uint8_t> body);
std::optional<std::vector<RankEntry>> decode_ranks(std::span<const std::uint8_t> body);
std::optional<Welcome> decode_welcome(std::span<const std::uint8_t> body);
std::optional<Reject> decode_reject(std::span<const std::uint8_t> body);
std::optional<Abort> decode_abort(std::span<const std::uint8_t> body);
std::optional<Heartbeat> decode_heartbeat(std::span<const std::uint8_t> body);

/// `text` cut to `max_bytes`, in plain ASCII on one line.
std::string plain_text(std::string_view text, std::size_t max_bytes);

struct Frame {
  FrameType type = FrameType::kBye;
  std::vector<std::uint8_t> body;
};

/// Takes the bytes of a stream in any split. Holds at most one frame, and memory only for bytes that came.
class FrameDecoder {
 public:
  /// Bodies longer than that are a problem.
  explicit FrameDecoder(std::uint32_t max_body_bytes) : max_body_bytes_(max_body_bytes) {}

  void set_max_body_bytes(std::uint32_t bytes) { max_body_bytes_ = bytes; }

  /// Takes bytes up to the end of the frame that has begun, and returns how many. Takes none while a whole
  /// frame waits or after a problem.
  std::size_t take(std::span<const std::uint8_t> bytes);
  /// The whole frame, once.
  std::optional<Frame> next();
  /// Why the stream is none of ours, in plain words; empty when it is. Stays.
  const std::string& problem() const { return problem_; }
  /// Whether the stream would end inside of a frame.
  bool is_inside_frame() const { return header_bytes_ > 0; }
  std::size_t held_bytes() const { return body_.capacity(); }

 private:
  void check_header();

  std::uint32_t max_body_bytes_;
  std::array<std::uint8_t, kFrameHeaderBytes> header_{};
  std::size_t header_bytes_ = 0;  // that came
  std::uint32_t body_bytes_ = 0;  // that the header says
  std::vector<std::uint8_t> body_;
  std::string problem_;
};

}  // namespace mxopt
