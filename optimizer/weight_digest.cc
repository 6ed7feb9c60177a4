#include "mxopt/optimizer/weight_digest.h"

#include <algorithm>
#include <cstdint>
#include <span>
#include <sstream>
#include <vector>

#include "mxopt/optimizer/agreement.h"
#include "mxopt/optimizer/checkpoint/crc32c.h"

namespace mxopt {

namespace {

/// Checksums of memory of a device, through a buffer of the host.
class Digest {
 public:
  Digest(Device device, StreamRef stream) : device_(device), stream_(stream) {}

  std::uint32_t of(const void* data, std::int64_t bytes) {
    std::uint32_t sum = 0;
    const auto* at = static_cast<const std::byte*>(data);
    while (bytes > 0) {
      const std::int64_t part = std::min(bytes, kMostBytes);
      sum = crc32c(on_host(at, part), sum);
      at += part;
      bytes -= part;
    }
    return sum;
  }

 private:
  static constexpr std::int64_t kMostBytes = std::int64_t{64} << 20;

  std::span<const std::byte> on_host(const std::byte* data, std::int64_t bytes) {
    const auto size = static_cast<std::size_t>(bytes);
    if (device_.kind == DeviceKind::kHost) return {data, size};
    if (copy_.bytes() < bytes) copy_ = Buffer(bytes, Device{}, pinned_allocator(device_));
    copy_bytes(copy_.data(), data, bytes, device_, stream_);
    synchronize(device_, stream_);
    return copy_.as<std::byte>().first(size);
  }

  Device device_;
  StreamRef stream_;
  Buffer copy_;
};

}  // namespace

void require_equal_weights(DistributedAdam& optimizer, const ParallelGroups& groups, StreamRef stream) {
  Digest digest(groups.data->device(), stream);
  std::ostringstream text;
  for (const ParamLayout& param : optimizer.layout().params()) {
    if (param.tied_to >= 0) continue;
    const ParamView view = optimizer.wait_param(param.name, Plane::kRow, stream);
    text << param.name << ':';
    if (param.family.format != ParamFormat::kMxfp8) {
      text << ' ' << digest.of(view.values.data, view.values.bytes()) << '\n';
      continue;
    }
    const MxView& planes = view.planes;
    text << ' ' << digest.of(planes.row_data, planes.elems()) << ' '
         << digest.of(planes.row_scales, param.row_scales_bytes);
    if (param.family.has_column()) {
      optimizer.wait_param(param.name, Plane::kColumn, stream);
      text << ' ' << digest.of(planes.column_data, planes.elems()) << ' '
           << digest.of(planes.column_scales, param.column_scales_bytes);
    }
    text << '\n';
  }
  const LayoutField field = {"weights", text.str()};
  std::vector<Communicator*> holders = {groups.data};
  if (groups.replicas != nullptr) holders.push_back(groups.replicas);
  require_agreement(holders, groups.comms(), std::span(&field, 1));
}

}  // namespace mxopt
