// The memory that a layout describes, and the views into it: one allocation per kind of plane, or one for all
// that every rank has alike, so that it is at one distance from a peer's.
//
// Everything is allocated once, in the constructor, zeroed, and keeps its address until destruction. Views
// are plain pointers; who may write when is the optimizer's business.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "mxopt/params/dtype.h"
#include "mxopt/params/layout.h"
#include "mxopt/params/memory.h"

namespace mxopt {

/// Where in memory the part is that every rank has alike: planes, values and scales.
struct StorageWindow {
  std::shared_ptr<Allocator> allocator;  // of one allocation for all of it; null: one for each kind
  bool has_column_planes = true;         // false: these are in memory of their own nevertheless
};

class ParamStorage {
 public:
  /// layout  must outlive the storage and keep its address.
  /// Memory  allocates layout.byte_counts(grad_dtype) and scale_head_bytes.
  /// scale_head_bytes  extra bytes right before the scale arena, in the same allocation; rounded up to 128.
  ParamStorage(const Layout& layout, DType grad_dtype, std::int64_t scale_head_bytes, Device device,
               std::shared_ptr<Allocator> allocator, const StorageWindow& window = {});

  Device device() const { return device_; }
  /// The one allocation of a StorageWindow; empty without one.
  const Buffer& window() const { return window_; }
  DType grad_dtype() const { return grad_dtype_; }

  /// Planes of one bucket: [bucket.elems] bytes. Empty span where the family has no such plane.
  TypedSpan row_plane(int bucket) const;
  TypedSpan column_plane(int bucket) const;
  /// bf16 or fp32 values of one bucket: [bucket.elems].
  TypedSpan values(int bucket) const;
  /// Gradients of one bucket: [bucket.elems] of grad_dtype(); empty for a frozen bucket.
  TypedSpan gradients(int bucket) const;
  /// All scales of all params, [layout.scale_bytes()], with the head right before them.
  std::uint8_t* scales() const { return scales_ + scale_head_bytes_; }
  std::uint8_t* scale_head() const { return scales_; }
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
  Buffer window_;
  std::vector<Buffer> kinds_;  // what is in no window
  std::uint8_t* row_plane_ = nullptr;
  std::uint8_t* column_plane_ = nullptr;
  std::uint8_t* bf16_values_ = nullptr;
  std::uint8_t* fp32_values_ = nullptr;
  std::uint8_t* scales_ = nullptr;
  Buffer gradients_, master_, exp_avg_, exp_avg_sq_;
};

}  // namespace mxopt
