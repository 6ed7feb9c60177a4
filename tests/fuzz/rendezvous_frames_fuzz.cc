// Any bytes, in any split, against the decoder of the rendezvous.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "mxopt/collectives/rendezvous_frames.h"

namespace {

void decode_all(std::span<const std::uint8_t> body) {
  (void)mxopt::decode_hello(body);
  (void)mxopt::decode_ranks(body);
  (void)mxopt::decode_welcome(body);
  (void)mxopt::decode_reject(body);
  (void)mxopt::decode_abort(body);
  (void)mxopt::decode_heartbeat(body);
}

}  // namespace

/// The first byte is the length of the pieces.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size == 0) return 0;
  const std::size_t piece_bytes = 1U + data[0];
  std::span<const std::uint8_t> stream(data + 1, size - 1);
  decode_all(stream);
  mxopt::FrameDecoder decoder(mxopt::kMaxFrameBodyBytes);
  while (!stream.empty() && decoder.problem().empty()) {
    stream = stream.subspan(decoder.take(stream.first(std::min(piece_bytes, stream.size()))));
    if (const std::optional<mxopt::Frame> frame = decoder.next()) decode_all(frame->body);
    if (decoder.held_bytes() > std::size_t{2} * mxopt::kMaxFrameBodyBytes) __builtin_trap();
  }
  return 0;
}
