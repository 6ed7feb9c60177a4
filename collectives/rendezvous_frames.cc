#include "mxopt/collectives/rendezvous_frames.h"

#include <algorithm>
#include <cstring>
#include <type_traits>
#include <utility>

#include "mxopt/params/check.h"

namespace mxopt {

namespace {

/// A rank whose entry is longest takes this much of a kRanks body.
constexpr std::size_t kMaxEntryBytes = 4 + 4 + 8 + 2 * (2 + kMaxHostBytes);

class Writer {
 public:
  explicit Writer(FrameType type) {
    bytes_.assign(kFrameMagic.begin(), kFrameMagic.end());
    put(kFrameVersion);
    put(static_cast<std::uint16_t>(type));
    put(std::uint32_t{0});  // the length, see take()
  }

  template <class T>
  void put(T value) {
    auto bits = static_cast<std::make_unsigned_t<T>>(value);
    for (std::size_t i = 0; i < sizeof(T); ++i) {
      bytes_.push_back(static_cast<std::uint8_t>(bits & 0xFFU));
      bits = static_cast<std::make_unsigned_t<T>>(static_cast<std::uint64_t>(bits) >> 8U);
    }
  }
  void put_bytes(std::span<const std::uint8_t> bytes) {
    bytes_.insert(bytes_.end(), bytes.begin(), bytes.end());
  }
  /// Length, then the bytes.
  void put_text(std::string_view text) {
    put(static_cast<std::uint16_t>(text.size()));
    bytes_.insert(bytes_.end(), text.begin(), text.end());
  }
  /// The same in a field of `field_bytes` after the length.
  void put_field(std::string_view text, std::size_t field_bytes) {
    put_text(text);
    bytes_.resize(bytes_.size() + field_bytes - text.size());
  }

  std::size_t body_bytes() const { return bytes_.size() - kFrameHeaderBytes; }

  std::vector<std::uint8_t> take() {
    const std::size_t length = body_bytes();
    MXOPT_CHECK_LE(length, std::size_t{kMaxFrameBodyBytes});
    for (std::size_t i = 0; i < 4; ++i) {
      bytes_[kFrameHeaderBytes - 4 + i] = static_cast<std::uint8_t>((length >> (8 * i)) & 0xFFU);
    }
    return std::move(bytes_);
  }

 private:
  std::vector<std::uint8_t> bytes_;
};

/// Reads past the end give zeroes and are remembered.
class Reader {
 public:
  explicit Reader(std::span<const std::uint8_t> bytes) : rest_(bytes) {}

  template <class T>
  T get() {
    std::make_unsigned_t<T> bits = 0;
    const std::span<const std::uint8_t> bytes = get_bytes(sizeof(T));
    for (std::size_t i = 0; i < bytes.size(); ++i) {
      bits = static_cast<std::make_unsigned_t<T>>(bits | (std::uint64_t{bytes[i]} << (8 * i)));
    }
    return static_cast<T>(bits);
  }
  std::span<const std::uint8_t> get_bytes(std::size_t count) {
    if (count > rest_.size()) {
      failed_ = true;
      return {};
    }
    const auto taken = rest_.first(count);
    rest_ = rest_.subspan(count);
    return taken;
  }
  std::string get_text(std::size_t max_bytes) {
    const std::size_t length = get<std::uint16_t>();
    if (length > max_bytes) failed_ = true;
    const std::span<const std::uint8_t> bytes = get_bytes(length);
    return plain_text(std::string(bytes.begin(), bytes.end()), max_bytes);
  }
  std::string get_field(std::size_t field_bytes) {
    const std::size_t before = rest_.size();
    const std::string text = get_text(field_bytes);
    get_bytes(field_bytes + 2 - std::min(field_bytes + 2, before - rest_.size()));
    return text;
  }

  bool at_end() const { return rest_.empty(); }
  bool ended_well() const { return !failed_ && rest_.empty(); }
  bool failed() const { return failed_; }

 private:
  std::span<const std::uint8_t> rest_;
  bool failed_ = false;
};

template <class Message>
std::optional<Message> if_whole(const Reader& reader, Message message) {
  if (!reader.ended_well()) return std::nullopt;
  return message;
}

void put_entry(Writer& writer, const RankEntry& entry) {
  MXOPT_CHECK_LE(entry.host.size(), kMaxHostBytes);
  MXOPT_CHECK_LE(entry.address.size(), kMaxHostBytes);
  writer.put(std::int32_t{entry.rank});
  writer.put(std::int32_t{entry.local_rank});
  writer.put(entry.pid);
  writer.put_text(entry.host);
  writer.put_text(entry.address);
}

RankEntry get_entry(Reader& reader) {
  RankEntry entry;
  entry.rank = reader.get<std::int32_t>();
  entry.local_rank = reader.get<std::int32_t>();
  entry.pid = reader.get<std::int64_t>();
  entry.host = reader.get_text(kMaxHostBytes);
  entry.address = reader.get_text(kMaxHostBytes);
  return entry;
}

bool is_known(std::uint16_t type) {
  return type >= static_cast<std::uint16_t>(FrameType::kHello) &&
         type <= static_cast<std::uint16_t>(FrameType::kBye);
}

}  // namespace

std::string plain_text(std::string_view text, std::size_t max_bytes) {
  std::string plain(text.substr(0, max_bytes));
  for (char& c : plain) {
    if (c < ' ' || c > '~') c = '?';
  }
  return plain;
}

std::vector<std::uint8_t> encode(const Hello& hello) {
  MXOPT_CHECK_LE(hello.host.size(), kMaxHostBytes);
  MXOPT_CHECK_LE(hello.library_version.size(), kMaxVersionBytes);
  Writer writer(FrameType::kHello);
  writer.put_bytes(hello.token);
  writer.put(std::int32_t{hello.rank});
  writer.put(std::int32_t{hello.world});
  writer.put(std::int32_t{hello.local_rank});
  writer.put(hello.pid);
  writer.put(hello.config_hash);
  writer.put_field(hello.library_version, kMaxVersionBytes);
  writer.put_field(hello.host, kMaxHostBytes);
  writer.put(std::uint16_t{0});
  MXOPT_CHECK_EQ(writer.body_bytes(), std::size_t{kHelloBodyBytes});
  return writer.take();
}

std::vector<std::uint8_t> encode(std::span<const RankEntry> ranks) {
  std::vector<std::uint8_t> frames;
  const auto add = [&](Writer& writer) {
    const std::vector<std::uint8_t> frame = writer.take();
    frames.insert(frames.end(), frame.begin(), frame.end());
  };
  Writer writer(FrameType::kRanks);
  for (const RankEntry& entry : ranks) {
    if (writer.body_bytes() + kMaxEntryBytes > kMaxFrameBodyBytes) {
      add(writer);
      writer = Writer(FrameType::kRanks);
    }
    put_entry(writer, entry);
  }
  add(writer);
  return frames;
}

std::vector<std::uint8_t> encode(const Welcome& welcome) {
  MXOPT_CHECK_LE(welcome.payload.size(), kMaxPayloadBytes);
  Writer writer(FrameType::kWelcome);
  writer.put(welcome.generation);
  writer.put(static_cast<std::uint32_t>(welcome.payload.size()));
  writer.put_bytes(welcome.payload);
  return writer.take();
}

std::vector<std::uint8_t> encode(const Reject& reject) {
  Writer writer(FrameType::kReject);
  writer.put(static_cast<std::uint16_t>(reject.kind));
  writer.put(std::int32_t{reject.culprit_rank});
  writer.put(reject.pid);
  writer.put_text(plain_text(reject.host, kMaxHostBytes));
  writer.put_text(plain_text(reject.reason, kMaxReasonBytes));
  return writer.take();
}

std::vector<std::uint8_t> encode(const Abort& abort) {
  Writer writer(FrameType::kAbort);
  writer.put(std::int32_t{abort.culprit_rank});
  writer.put(abort.pid);
  writer.put_text(plain_text(abort.host, kMaxHostBytes));
  writer.put_text(plain_text(abort.reason, kMaxReasonBytes));
  return writer.take();
}

std::vector<std::uint8_t> encode(const Heartbeat& heartbeat) {
  Writer writer(FrameType::kHeartbeat);
  writer.put(std::int32_t{heartbeat.rank});
  writer.put(heartbeat.sequence);
  writer.put(heartbeat.age_ms);
  writer.put_text(plain_text(heartbeat.operation, kMaxOperationBytes));
  return writer.take();
}

std::vector<std::uint8_t> encode(FrameType type) {
  MXOPT_CHECK(type == FrameType::kAck || type == FrameType::kCommit || type == FrameType::kBye,
              "frame type " << static_cast<int>(type) << " has a body");
  return Writer(type).take();
}

std::optional<Hello> decode_hello(std::span<const std::uint8_t> body) {
  Reader reader(body);
  Hello hello;
  const std::span<const std::uint8_t> token = reader.get_bytes(hello.token.size());
  std::copy(token.begin(), token.end(), hello.token.begin());
  hello.rank = reader.get<std::int32_t>();
  hello.world = reader.get<std::int32_t>();
  hello.local_rank = reader.get<std::int32_t>();
  hello.pid = reader.get<std::int64_t>();
  hello.config_hash = reader.get<std::uint64_t>();
  hello.library_version = reader.get_field(kMaxVersionBytes);
  hello.host = reader.get_field(kMaxHostBytes);
  reader.get<std::uint16_t>();
  return if_whole(reader, std::move(hello));
}

std::optional<std::vector<RankEntry>> decode_ranks(std::span<const std::uint8_t> body) {
  Reader reader(body);
  std::vector<RankEntry> ranks;
  while (!reader.at_end() && !reader.failed()) ranks.push_back(get_entry(reader));
  return if_whole(reader, std::move(ranks));
}

std::optional<Welcome> decode_welcome(std::span<const std::uint8_t> body) {
  Reader reader(body);
  Welcome welcome;
  welcome.generation = reader.get<std::uint32_t>();
  const std::span<const std::uint8_t> payload = reader.get_bytes(reader.get<std::uint32_t>());
  welcome.payload.assign(payload.begin(), payload.end());
  return if_whole(reader, std::move(welcome));
}

std::optional<Reject> decode_reject(std::span<const std::uint8_t> body) {
  Reader reader(body);
  Reject reject;
  const auto kind = reader.get<std::uint16_t>();
  if (kind < static_cast<std::uint16_t>(RejectKind::kOtherJob) ||
      kind > static_cast<std::uint16_t>(RejectKind::kRankLost)) {
    return std::nullopt;
  }
  reject.kind = static_cast<RejectKind>(kind);
  reject.culprit_rank = reader.get<std::int32_t>();
  reject.pid = reader.get<std::int64_t>();
  reject.host = reader.get_text(kMaxHostBytes);
  reject.reason = reader.get_text(kMaxReasonBytes);
  return if_whole(reader, std::move(reject));
}

std::optional<Abort> decode_abort(std::span<const std::uint8_t> body) {
  Reader reader(body);
  Abort abort;
  abort.culprit_rank = reader.get<std::int32_t>();
  abort.pid = reader.get<std::int64_t>();
  abort.host = reader.get_text(kMaxHostBytes);
  abort.reason = reader.get_text(kMaxReasonBytes);
  return if_whole(reader, std::move(abort));
}

std::optional<Heartbeat> decode_heartbeat(std::span<const std::uint8_t> body) {
  Reader reader(body);
  Heartbeat heartbeat;
  heartbeat.rank = reader.get<std::int32_t>();
  heartbeat.sequence = reader.get<std::int64_t>();
  heartbeat.age_ms = reader.get<std::int64_t>();
  heartbeat.operation = reader.get_text(kMaxOperationBytes);
  return if_whole(reader, std::move(heartbeat));
}

std::size_t FrameDecoder::take(std::span<const std::uint8_t> bytes) {
  std::size_t taken = 0;
  while (taken < bytes.size() && header_bytes_ < kFrameHeaderBytes && problem_.empty()) {
    header_[header_bytes_++] = bytes[taken++];
    check_header();
  }
  if (!problem_.empty() || header_bytes_ < kFrameHeaderBytes) return taken;
  const std::size_t count = std::min(bytes.size() - taken, body_bytes_ - body_.size());
  const auto part = bytes.subspan(taken, count);
  body_.insert(body_.end(), part.begin(), part.end());
  return taken + count;
}

std::optional<Frame> FrameDecoder::next() {
  const bool whole = problem_.empty() && header_bytes_ == kFrameHeaderBytes && body_.size() == body_bytes_;
  if (!whole) return std::nullopt;
  header_bytes_ = 0;
  Frame frame{static_cast<FrameType>(header_[10] | (header_[11] << 8)), std::move(body_)};
  body_ = {};
  return frame;
}

/// Looks at what the last byte has completed.
void FrameDecoder::check_header() {
  if (header_bytes_ <= kFrameMagic.size()) {
    if (header_[header_bytes_ - 1] != kFrameMagic[header_bytes_ - 1]) problem_ = "not of this protocol";
    return;
  }
  Reader reader(std::span<const std::uint8_t>(header_).subspan(kFrameMagic.size()));
  const auto version = reader.get<std::uint16_t>();
  const auto type = reader.get<std::uint16_t>();
  body_bytes_ = reader.get<std::uint32_t>();
  if (header_bytes_ == 10 && version != kFrameVersion) {
    problem_ =
        "protocol version " + std::to_string(version) + "; this one is " + std::to_string(kFrameVersion);
  } else if (header_bytes_ == 12 && !is_known(type)) {
    problem_ = "unknown frame type " + std::to_string(type);
  } else if (header_bytes_ == kFrameHeaderBytes && body_bytes_ > max_body_bytes_) {
    problem_ = "a frame of " + std::to_string(body_bytes_) + " bytes; at most " +
               std::to_string(max_body_bytes_) + " are allowed";
  }
}

}  // namespace mxopt
