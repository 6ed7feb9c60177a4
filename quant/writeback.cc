#include "mxopt/quant/writeback.h"

#include <algorithm>
#include <limits>
#include <ostream>
#include <utility>
#include <vector>

#include "mxopt/quant/writeback_host.h"

#if MXOPT_WITH_CUDA
#include "mxopt/quant/writeback_cuda.h"
#endif

namespace mxopt {

namespace {

/// A weight in an error message; dequantize() knows no name.
struct Weight {
  std::string_view name;
  friend std::ostream& operator<<(std::ostream& out, Weight weight) {
    return weight.name.empty() ? out << "the weight" : out << "weight '" << weight.name << "'";
  }
};

void check_view(std::string_view name, const MxView& weight) {
  MXOPT_CHECK(weight.rows >= 0 && weight.cols >= 0 &&
                  (weight.cols == 0 || weight.rows <= std::numeric_limits<std::int64_t>::max() / weight.cols),
              Weight{name} << " is " << weight.rows << " x " << weight.cols << ", which is no shape");
  if (weight.elems() == 0) return;
  MXOPT_CHECK(weight.rows % kBlockElems == 0 && weight.cols % kBlockElems == 0,
              Weight{name} << " is " << weight.rows << " x " << weight.cols
                           << ": rows and columns of an MXFP8 weight must be multiples of " << kBlockElems);
  MXOPT_CHECK(weight.has_row() || weight.has_column(),
              Weight{name} << " has neither a row plane nor a column plane");
  MXOPT_CHECK(!weight.has_row() || weight.row_scales != nullptr,
              Weight{name} << " has a row plane but no row scales");
  MXOPT_CHECK(!weight.has_column() || weight.column_scales != nullptr,
              Weight{name} << " has a column plane but no column scales");
}

void check_shard(const Mxfp8Shard& shard) {
  check_view(shard.name, shard.weight);
  const ConstTypedSpan& master = shard.master;
  const std::int64_t elems = shard.weight.elems();
  MXOPT_CHECK(
      master.elems >= 0 && shard.start >= 0 && shard.start <= elems && master.elems <= elems - shard.start,
      "weight '" << shard.name << "' has " << elems << " elements, its shard is [" << shard.start << ", "
                 << shard.start << " + " << master.elems << ")");
  if (master.elems == 0) return;
  MXOPT_CHECK(master.dtype == DType::kFp32 || master.dtype == DType::kBf16,
              "master of weight '" << shard.name << "' is " << dtype_name(master.dtype)
                                   << "; allowed are fp32 and bf16");
  MXOPT_CHECK(master.data != nullptr,
              "master of weight '" << shard.name << "' has " << master.elems << " elements but no memory");
  MXOPT_CHECK(shard.row_fragment == nullptr || shard.weight.has_row(),
              "weight '" << shard.name << "' has a row fragment but no row plane");
  MXOPT_CHECK(shard.column_fragment == nullptr || shard.weight.has_column(),
              "weight '" << shard.name << "' has a column fragment but no column plane");
}

/// A plane that occurs twice would be written by two shards, and its scales would be packed twice.
void check_planes_differ(std::span<const Mxfp8Shard> batch) {
  std::vector<std::pair<const std::uint8_t*, const Mxfp8Shard*>> planes;
  planes.reserve(2 * batch.size());
  for (const Mxfp8Shard& shard : batch) {
    if (shard.weight.has_row()) planes.emplace_back(shard.weight.row_data, &shard);
    if (shard.weight.has_column()) planes.emplace_back(shard.weight.column_data, &shard);
  }
  std::sort(planes.begin(), planes.end());
  for (std::size_t i = 1; i < planes.size(); ++i) {
    MXOPT_CHECK(planes[i - 1].first != planes[i].first,
                "weights '" << planes[i - 1].second->name << "' and '" << planes[i].second->name
                            << "' of a batch have the same plane; a weight may occur once");
  }
}

void check_shards(std::span<const Mxfp8Shard> batch) {
  for (const Mxfp8Shard& shard : batch) check_shard(shard);
  check_planes_differ(batch);
}

void check_packed(std::size_t packed_bytes, std::int64_t expected_bytes) {
  MXOPT_CHECK(static_cast<std::int64_t>(packed_bytes) == expected_bytes,
              "packed scales have " << packed_bytes << " bytes, the batch needs " << expected_bytes);
}

void check_nonfinite(std::span<std::int64_t> nonfinite) {
  MXOPT_CHECK(nonfinite.size() <= 1,
              "nonfinite is one counter or empty, not " << nonfinite.size() << " counters");
}

/// Null when there is no counter.
std::int64_t* counter(std::span<std::int64_t> nonfinite) {
  return nonfinite.empty() ? nullptr : nonfinite.data();
}

[[noreturn]] void refuse(Device device) {
  if (device.kind == DeviceKind::kCuda) {
    throw ConfigError(
        "MXFP8 writeback on a cuda device was asked for, but this build has no CUDA backend "
        "(MXOPT_WITH_CUDA=ON at configuration switches it on); allowed: host");
  }
  throw ConfigError("unknown device kind");
}

}  // namespace

std::int64_t packed_scale_bytes(std::span<const Mxfp8Shard> batch) {
  std::int64_t bytes = 0;
  for (const Mxfp8Shard& shard : batch) {
    const MxView& weight = shard.weight;
    if (weight.has_row()) bytes += row_scale_bytes(weight.rows, weight.cols);
    if (weight.has_column()) bytes += column_scale_bytes(weight.rows, weight.cols);
  }
  return bytes;
}

Mxfp8Batch::Mxfp8Batch(std::span<const Mxfp8Shard> shards, Device device,
                       [[maybe_unused]] std::shared_ptr<Allocator> allocator) {
  check_shards(shards);
  packed_scale_bytes_ = mxopt::packed_scale_bytes(shards);
  if (device.kind == DeviceKind::kHost) {
    state_ = host::prepare(shards);
    return;
  }
#if MXOPT_WITH_CUDA
  if (device.kind == DeviceKind::kCuda) {
    state_ = cuda::prepare(shards, device, std::move(allocator));
    return;
  }
#endif
  refuse(device);
}

void Mxfp8Batch::partial_amax(std::span<std::uint8_t> packed, StreamRef stream) const {
  check_packed(packed.size(), packed_scale_bytes_);
  if (state_ != nullptr) state_->partial_amax(packed.data(), stream);
}

void Mxfp8Batch::partial_cast(std::span<const std::uint8_t> packed, std::span<std::int64_t> nonfinite,
                              StreamRef stream) const {
  check_packed(packed.size(), packed_scale_bytes_);
  check_nonfinite(nonfinite);
  if (state_ != nullptr) state_->partial_cast(packed.data(), counter(nonfinite), stream);
}

void partial_amax(std::span<const Mxfp8Shard> batch, std::span<std::uint8_t> packed, Device device,
                  StreamRef stream) {
  check_shards(batch);
  check_packed(packed.size(), packed_scale_bytes(batch));
  if (device.kind == DeviceKind::kHost) return host::prepare(batch)->partial_amax(packed.data(), stream);
#if MXOPT_WITH_CUDA
  if (device.kind == DeviceKind::kCuda) return cuda::partial_amax_once(batch, packed.data(), device, stream);
#endif
  refuse(device);
}

void partial_cast(std::span<const Mxfp8Shard> batch, std::span<const std::uint8_t> packed,
                  std::span<std::int64_t> nonfinite, Device device, StreamRef stream) {
  check_shards(batch);
  check_packed(packed.size(), packed_scale_bytes(batch));
  check_nonfinite(nonfinite);
  if (device.kind == DeviceKind::kHost) {
    return host::prepare(batch)->partial_cast(packed.data(), counter(nonfinite), stream);
  }
#if MXOPT_WITH_CUDA
  if (device.kind == DeviceKind::kCuda) {
    return cuda::partial_cast_once(batch, packed.data(), counter(nonfinite), device, stream);
  }
#endif
  refuse(device);
}

void dequantize(const MxView& weight, Plane plane, std::int64_t begin, TypedSpan out, Device device,
                [[maybe_unused]] StreamRef stream) {
  check_view("", weight);
  MXOPT_CHECK(begin >= 0 && out.elems >= 0 && begin <= weight.elems() && out.elems <= weight.elems() - begin,
              "the weight has " << weight.elems() << " elements, the range to dequantize is [" << begin
                                << ", " << begin << " + " << out.elems << ")");
  MXOPT_CHECK(out.dtype == DType::kFp32 || out.dtype == DType::kBf16,
              "dequantized values are fp32 or bf16, not " << dtype_name(out.dtype));
  if (out.elems == 0) return;
  MXOPT_CHECK(out.data != nullptr, "the output of " << out.elems << " elements has no memory");
  MXOPT_CHECK(plane == Plane::kRow ? weight.has_row() : weight.has_column(),
              "the weight to dequantize has no " << plane_name(plane) << " plane");
  if (device.kind == DeviceKind::kHost) return host::dequantize(weight, plane, begin, out);
#if MXOPT_WITH_CUDA
  if (device.kind == DeviceKind::kCuda) {
    return cuda::dequantize(weight, plane, begin, out, device, stream);
  }
#endif
  refuse(device);
}

}  // namespace mxopt
