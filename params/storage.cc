#include "mxopt/params/storage.h"

#include "mxopt/params/block_geometry.h"

namespace mxopt {

ParamStorage::ParamStorage(const Layout& layout, DType grad_dtype, std::int64_t scale_head_bytes,
                           Device device, std::shared_ptr<Allocator> allocator)
    : layout_(&layout),
      device_(device),
      grad_dtype_(grad_dtype),
      scale_head_bytes_(round_up(scale_head_bytes, kAlignElems)) {
  MXOPT_CHECK(grad_dtype == DType::kFp32 || grad_dtype == DType::kBf16,
              "gradients are fp32 or bf16, not " << dtype_name(grad_dtype));
  const ByteCounts bytes = layout.byte_counts(grad_dtype);
  const auto make = [&](std::int64_t size) { return Buffer(size, device, allocator); };
  row_plane_ = make(bytes.row_plane);
  column_plane_ = make(bytes.column_plane);
  bf16_values_ = make(bytes.bf16_values);
  fp32_values_ = make(bytes.fp32_values);
  scales_ = make(scale_head_bytes_ + bytes.scales);
  gradients_ = make(bytes.gradients);
  master_ = make(bytes.master);
  exp_avg_ = make(bytes.exp_avg);
  exp_avg_sq_ = make(bytes.exp_avg_sq);
}

TypedSpan ParamStorage::row_plane(int bucket) const {
  const Bucket& b = layout_->bucket(bucket);
  if (b.family.format != ParamFormat::kMxfp8) return {};
  return {row_plane_.data() + b.value_begin, DType::kUint8, b.elems};
}

TypedSpan ParamStorage::column_plane(int bucket) const {
  const Bucket& b = layout_->bucket(bucket);
  if (!b.family.has_column()) return {};
  return {column_plane_.data() + b.column_begin, DType::kUint8, b.elems};
}

TypedSpan ParamStorage::values(int bucket) const {
  const Bucket& b = layout_->bucket(bucket);
  switch (b.family.format) {
    case ParamFormat::kMxfp8:
      return {};
    case ParamFormat::kBf16:
      return {bf16_values_.as<Bf16>().data() + b.value_begin, DType::kBf16, b.elems};
    case ParamFormat::kFp32:
      return {fp32_values_.as<float>().data() + b.value_begin, DType::kFp32, b.elems};
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
