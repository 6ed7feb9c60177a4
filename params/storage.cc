#include "mxopt/params/storage.h"

#include "mxopt/params/block_geometry.h"

namespace mxopt {

ParamStorage::ParamStorage(const Layout& layout, DType grad_dtype, std::int64_t scale_head_bytes,
                           Device device, std::shared_ptr<Allocator> allocator, const StorageWindow& window)
    : layout_(&layout),
      device_(device),
      grad_dtype_(grad_dtype),
      scale_head_bytes_(round_up(scale_head_bytes, kAlignElems)) {
  MXOPT_CHECK(grad_dtype == DType::kFp32 || grad_dtype == DType::kBf16,
              "gradients are fp32 or bf16, not " << dtype_name(grad_dtype));
  const ByteCounts bytes = layout.byte_counts(grad_dtype);
  const auto make = [&](std::int64_t size) { return Buffer(size, device, allocator); };
  struct Kind {
    std::uint8_t*& data;
    std::int64_t bytes;
    bool is_in_window;
  };
  const bool has_window = window.allocator != nullptr;
  const Kind kinds[] = {{row_plane_, bytes.row_plane, has_window},
                        {column_plane_, bytes.column_plane, has_window && window.has_column_planes},
                        {bf16_values_, bytes.bf16_values, has_window},
                        {fp32_values_, bytes.fp32_values, has_window},
                        {scales_, scale_head_bytes_ + bytes.scales, has_window}};
  std::int64_t window_bytes = 0;
  for (const Kind& kind : kinds) {
    if (kind.is_in_window) window_bytes += round_up(kind.bytes, Buffer::kAlignmentBytes);
  }
  window_ = Buffer(window_bytes, device, window.allocator);
  std::uint8_t* next = window_.data();
  for (const Kind& kind : kinds) {
    if (kind.is_in_window) {
      kind.data = next;
      next += round_up(kind.bytes, Buffer::kAlignmentBytes);
    } else {
      kinds_.push_back(make(kind.bytes));
      kind.data = kinds_.back().data();
    }
  }
  gradients_ = make(bytes.gradients);
  master_ = make(bytes.master);
  exp_avg_ = make(bytes.exp_avg);
  exp_avg_sq_ = make(bytes.exp_avg_sq);
}

TypedSpan ParamStorage::row_plane(int bucket) const {
  const Bucket& b = layout_->bucket(bucket);
  if (b.family.format != ParamFormat::kMxfp8) return {};
  return {row_plane_ + b.value_begin, DType::kUint8, b.elems};
}

TypedSpan ParamStorage::column_plane(int bucket) const {
  const Bucket& b = layout_->bucket(bucket);
  if (!b.family.has_column()) return {};
  return {column_plane_ + b.column_begin, DType::kUint8, b.elems};
}

TypedSpan ParamStorage::values(int bucket) const {
  const Bucket& b = layout_->bucket(bucket);
  switch (b.family.format) {
    case ParamFormat::kMxfp8:
      return {};
    case ParamFormat::kBf16:
      return {reinterpret_cast<Bf16*>(bf16_values_) + b.value_begin, DType::kBf16, b.elems};
    case ParamFormat::kFp32:
      return {reinterpret_cast<float*>(fp32_values_) + b.value_begin, DType::kFp32, b.elems};
  }
  return {};
}

TypedSpan ParamStorage::gradients(int bucket) const {
  const Bucket& b = layout_->bucket(bucket);
  if (b.family.frozen) return {nullptr, grad_dtype_, 0};
  return {gradients_.data() + b.grad_begin * dtype_bytes(grad_dtype_), grad_dtype_, b.elems};
}

float* ParamStorage::master(int bucket) const {
  return master_.as<float>().data() + layout_->bucket(bucket).shard_begin;
}

float* ParamStorage::exp_avg(int bucket) const {
  const Bucket& b = layout_->bucket(bucket);
  return b.family.frozen ? nullptr : exp_avg_.as<float>().data() + b.moment_begin;
}

float* ParamStorage::exp_avg_sq(int bucket) const {
  const Bucket& b = layout_->bucket(bucket);
  return b.family.frozen ? nullptr : exp_avg_sq_.as<float>().data() + b.moment_begin;
}

}  // namespace mxopt
