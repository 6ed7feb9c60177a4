// The memory that a layout describes: one allocation per kind of plane, and the views into it.
//
// Everything is allocated once, in the constructor, zeroed, and keeps its address until destruction. Views
// are plain pointers; who may write when is the optimizer's business.
#pragma once

#include <cstdint>
#include <memory>

#include "mxopt/params/dtype.h"
#include "mxopt/params/layout.h"
#include "mxopt/params/memory.h"

namespace mxopt {

class ParamStorage {
 public:
  /// layout  must outlive the storage and keep its address.
  /// Memory  allocates layout.byte_counts(grad_dtype) and scale_head_bytes.
  /// scale_head_bytes  extra bytes right before the scale arena, in the same allocation; rounded up to 128.
  ParamStorage(const Layout& layout, DType grad_dtype, std::int64_t scale_head_bytes, Device device,
               std::shared_ptr<Allocator> allocator);

  Device device() const { return device_; }
  DType grad_dtype() const { return grad_dtype_; }

  /// Planes of one bucket: [bucket.elems] bytes. Empty span where the family has no such plane.
  TypedSpan row_plane(int bucket) const;
  TypedSpan column_plane(int bucket) const;
  /// bf16 or fp32 values of one bucket: [bucket.elems].
  TypedSpan values(int bucket) const;
  /// Gradients of one bucket: [bucket.elems] of grad_dtype(); empty for a frozen bucket.
  TypedSpan gradients(int bucket) const;
  /// All scales of all params, [layout.scale_bytes()], with the head right before them.
  std::uint8_t* scales() const { return scales_.data() + scale_head_bytes_; }
  std::uint8_t* scale_head() const { return scales_.data(); }
  std::int64_t scale_head_bytes() const { return scale_head_bytes_; }

  /// This rank's shard of one bucket: [bucket.elems / W] fp32 each; the moments are null for a frozen bucket.
  float* master(int bucket) const;
  float* exp_avg(int bucket) const;
  float* exp_avg_sq(int bucket) const;

 private:
  const Layout* layout_;
  Device device_;
  DType grad_dtype_;
  std::int64_t scale_head_bytes_;
  Buffer row_plane_, column_plane_, bf16_values_, fp32_values_, scales_;
  Buffer gradients_, master_, exp_avg_, exp_avg_sq_;
};

}  // namespace mxopt
