#include "mxopt/collectives/host_exchange.h"

#include <algorithm>
#include <span>
#include <vector>

namespace mxopt {

namespace {

/// Host memory as the transport can use it: itself, or a copy on the device.
class Staged {
 public:
  Staged(Communicator& comm, TypedSpan host) : device_(comm.device()), host_(host), stream_(device_) {
    if (device_.kind == DeviceKind::kHost) return;
    buffer_ = Buffer(host.bytes(), device_, default_allocator(device_));
    copy_bytes(buffer_.data(), host.data, host.bytes(), device_, stream_.ref());
  }

  TypedSpan span() const {
    return device_.kind == DeviceKind::kHost ? host_ : TypedSpan(buffer_.data(), host_.dtype, host_.elems);
  }
  StreamRef stream() const { return stream_.ref(); }

  /// Waits for the call, then for the bytes to be back on the host.
  void finish(Work work) const {
    work.wait();
    if (device_.kind == DeviceKind::kHost) return;
    copy_bytes(host_.data, buffer_.data(), host_.bytes(), device_, stream_.ref());
    synchronize(device_, stream_.ref());
  }

 private:
  Device device_;
  TypedSpan host_;
  Stream stream_;
  Buffer buffer_;
};

}  // namespace

void all_reduce_on_host(Communicator& comm, TypedSpan buffer, ReduceOp op, Traffic traffic) {
  const Staged staged(comm, buffer);
  staged.finish(comm.all_reduce(staged.span(), op, traffic, staged.stream()));
}

void all_gather_on_host(Communicator& comm, TypedSpan output, ConstTypedSpan shard, Traffic traffic) {
  const TypedSpan mine = output.sub(comm.rank() * shard.elems, shard.elems);
  copy_bytes(mine.data, shard.data, mine.data == shard.data ? 0 : shard.bytes(), Device{}, StreamRef());
  const Staged staged(comm, output);
  staged.finish(comm.all_gather(staged.span(), staged.span().sub(comm.rank() * shard.elems, shard.elems),
                                traffic, staged.stream()));
}

void broadcast_on_host(Communicator& comm, TypedSpan buffer, int root, Traffic traffic) {
  const Staged staged(comm, buffer);
  staged.finish(comm.broadcast(staged.span(), root, traffic, staged.stream()));
}

PeerWindow exchange_addresses(Communicator& comm, const Buffer& buffer) {
  PeerWindow window;
  window.bases.resize(static_cast<std::size_t>(comm.size()));
  std::uint8_t* mine = buffer.data();
  constexpr auto kBytes = static_cast<std::int64_t>(sizeof(mine));
  all_gather_on_host(comm, TypedSpan(window.bases.data(), DType::kUint8, kBytes * comm.size()),
                     ConstTypedSpan(&mine, DType::kUint8, kBytes), Traffic::kControl);
  return window;
}

std::string first_problem(Communicator& comm, const std::string& mine) {
  constexpr std::size_t kTextBytes = 400;
  std::vector<std::uint8_t> all(kTextBytes * static_cast<std::size_t>(comm.size()), 0);
  std::vector<std::uint8_t> text(mine.begin(), mine.begin() + std::min(mine.size(), kTextBytes - 1));
  text.resize(kTextBytes, 0);
  all_gather_on_host(comm, std::span(all), std::span<const std::uint8_t>(text), Traffic::kControl);
  for (int rank = 0; rank < comm.size(); ++rank) {
    const char* const found =
        reinterpret_cast<const char*>(all.data()) + kTextBytes * static_cast<std::size_t>(rank);
    if (*found != 0) return "rank " + std::to_string(rank) + ": " + found;
  }
  return "";
}

}  // namespace mxopt
