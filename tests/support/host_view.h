// Memory of a device as a test on the host can read and change it.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "mxopt/params/dtype.h"
#include "mxopt/params/memory.h"

namespace mxopt::test {

/// The memory itself on the host; else a copy, which store() writes back.
class HostView {
 public:
  HostView(Device device, StreamRef stream, TypedSpan memory)
      : device_(device), stream_(stream), memory_(memory), view_(memory) {
    if (device.kind == DeviceKind::kHost) return;
    bytes_.resize(static_cast<std::size_t>(memory.bytes()));
    view_ = TypedSpan(bytes_.data(), memory.dtype, memory.elems);
    copy_bytes(bytes_.data(), memory.data, memory.bytes(), device, stream);
    synchronize(device, stream);
  }
  HostView(const HostView&) = delete;
  HostView& operator=(const HostView&) = delete;

  TypedSpan span() const { return view_; }
  void store() const {
    if (device_.kind == DeviceKind::kHost) return;
    copy_bytes(memory_.data, bytes_.data(), memory_.bytes(), device_, stream_);
    synchronize(device_, stream_);
  }

 private:
  Device device_;
  StreamRef stream_;
  TypedSpan memory_, view_;
  std::vector<std::uint8_t> bytes_;
};

}  // namespace mxopt::test
