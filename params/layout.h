// Where every byte of a list of params lives and who owns it: pure arithmetic, no memory, no messages.
//
// A Layout is immutable; any thread may read it. It is the same on every rank and can be computed for any
// world size on any machine. All sizes and offsets are 64-bit counts of elements unless the name says bytes.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "mxopt/params/dtype.h"
#include "mxopt/params/param_spec.h"

namespace mxopt {

/// Alignment of param starts and of shard boundaries, in elements.
inline constexpr std::int64_t kAlignElems = 128;

struct LayoutOptions {
  std::int64_t world_size = 1;
  std::int64_t bucket_elems = 0;  // a bucket closes when it reaches this; 0: default_bucket_elems()
  ParamFormat default_format = ParamFormat::kMxfp8;
  Storage default_storage = Storage::kBoth;
  Fallback fallback = Fallback::kBf16;
};

/// Buckets hold params of one family only, so that a bucket's planes are plain contiguous arrays.
struct Family {
  ParamFormat format = ParamFormat::kMxfp8;
  Storage storage = Storage::kRow;  // kRow for bf16 and fp32
  bool frozen = false;
  bool has_column() const { return format == ParamFormat::kMxfp8 && storage == Storage::kBoth; }
  friend bool operator==(const Family&, const Family&) = default;
};

/// max(40e6, 1e6 * W) elements, and max(40e6, 4e6 * W) where a column plane exists.
std::int64_t default_bucket_elems(const Family& family, std::int64_t world_size);

/// One param with everything resolved.
struct ParamLayout {
  std::string name;
  std::vector<std::int64_t> shape;
  std::int64_t rows = 0;  // matrix view
  std::int64_t cols = 0;
  Family family;
  GradMode grad_mode = GradMode::kAccumulate;
  int tied_to = -1;  // index of the param whose storage this one shares; -1: its own
  int bucket = -1;   // the target's, when tied
  std::int64_t bucket_begin = 0;
  std::string duplicate_key;    // see ParamSpec
  std::string fallback_reason;  // why an MXFP8 request became bf16; empty when it did not
  // Byte offsets and sizes in the scale arena; MXFP8 params only, 0 bytes for a plane that does not exist.
  std::int64_t row_scales_begin = 0, row_scales_bytes = 0;
  std::int64_t column_scales_begin = 0, column_scales_bytes = 0;

  std::int64_t elems() const { return rows * cols; }
};

/// One bucket: [0, elems) of its family, padded to a multiple of 128 * W. Rank r owns elems / W of it, from
/// r * elems / W on. Buckets are numbered in the order in which a backward pass in reverse registration order
/// completes them; a storage shared by tied params is complete with the earliest registered of them.
struct Bucket {
  Family family;
  std::vector<int> params;  // by bucket_begin
  std::int64_t elems = 0;
  std::int64_t used_elems = 0;  // end of the last param
  // Where the bucket starts in the arena of its kind: elements of the row plane (MXFP8), or of the bf16 or
  // fp32 values.
  std::int64_t value_begin = 0;
  std::int64_t column_begin = 0;  // elements of the column plane; meaningful when family.has_column()
  std::int64_t grad_begin = 0;    // elements of the gradient arena; not for frozen buckets
  std::int64_t shard_begin = 0;   // elements of every rank's master arena
  std::int64_t moment_begin = 0;  // elements of every rank's moment arenas; not for frozen buckets
};

/// The part of one param that one rank owns. Contiguous in the param, the bucket and the rank's shard.
struct Segment {
  int param = -1;
  int bucket = -1;
  std::int64_t bucket_begin = 0;  // offset in the bucket
  std::int64_t param_begin = 0;   // flat offset in the param
  std::int64_t elems = 0;
};

/// The owned part of a 32-row band that a shard boundary divides.
struct CutBand {
  int param = -1;
  std::int64_t band = 0;         // rows [32 * band, 32 * band + 32)
  std::int64_t param_begin = 0;  // owned flat range inside the band
  std::int64_t param_end = 0;
};

/// Bytes of one rank.
struct ByteCounts {
  std::int64_t row_plane = 0, column_plane = 0, scales = 0;
  std::int64_t bf16_values = 0, fp32_values = 0;
  std::int64_t gradients = 0;
  std::int64_t master = 0, exp_avg = 0, exp_avg_sq = 0;
  std::int64_t total() const {
    return row_plane + column_plane + scales + bf16_values + fp32_values + gradients + master + exp_avg +
           exp_avg_sq;
  }
};

/// Share of the elements of column-plane families that lie in cut bands, over ranks.
struct CutShare {
  std::int64_t cut_bands = 0;  // bands that at least one boundary divides
  double mean = 0;             // of all elements
  double worst_rank = 0;       // of one rank's owned elements
};

/// One named part of what ranks must agree on, as canonical text.
struct LayoutField {
  std::string name;
  std::string text;
};

class Layout {
 public:
  /// Throws ConfigError with every problem of the list (names, shapes, ties, formats), each by param name.
  Layout(std::vector<ParamSpec> specs, LayoutOptions options);

  const LayoutOptions& options() const { return options_; }
  std::int64_t world_size() const { return options_.world_size; }
  std::span<const ParamLayout> params() const { return params_; }
  std::span<const Bucket> buckets() const { return buckets_; }
  const ParamLayout& param(int index) const { return params_[static_cast<std::size_t>(index)]; }
  const Bucket& bucket(int index) const { return buckets_[static_cast<std::size_t>(index)]; }

  /// Index of a param. Throws ContractError with the nearest registered name when there is none.
  int find(std::string_view name) const;
  /// The param that holds the storage: itself, or what it is tied to.
  int storage_of(int param) const;

  std::int64_t shard_elems(int bucket) const { return this->bucket(bucket).elems / options_.world_size; }
  /// Offset in the bucket at which a rank's shard begins.
  std::int64_t shard_begin(int bucket, std::int64_t rank) const { return rank * shard_elems(bucket); }

  /// What a rank owns, by bucket and then by position. Padding belongs to no segment.
  std::vector<Segment> segments(std::int64_t rank) const;
  /// Bands of column-plane params that shard boundaries divide, with the rank's part; at most two a bucket.
  std::vector<CutBand> cut_bands(std::int64_t rank) const;
  CutShare cut_share() const;

  // Sizes of the arenas, in elements unless named bytes. Every rank uses the same offsets.
  std::int64_t row_plane_elems() const { return row_plane_elems_; }
  std::int64_t column_plane_elems() const { return column_plane_elems_; }
  std::int64_t bf16_value_elems() const { return bf16_value_elems_; }
  std::int64_t fp32_value_elems() const { return fp32_value_elems_; }
  std::int64_t grad_elems() const { return grad_elems_; }
  std::int64_t master_elems() const { return master_elems_; }  // of each rank
  std::int64_t moment_elems() const { return moment_elems_; }  // of each rank
  std::int64_t scale_bytes() const { return scale_bytes_; }
  /// The scales of params that are not frozen come first: [0, trainable_scale_bytes()).
  std::int64_t trainable_scale_bytes() const { return trainable_scale_bytes_; }

  ByteCounts byte_counts(DType grad_dtype) const;

  /// What ranks must agree on: "world_size", "bucket_elems", "params".
  std::vector<LayoutField> fields() const;
  /// 64-bit hash of fields(); equal layouts have equal digests on every machine.
  std::uint64_t digest() const;

 private:
  void resolve(std::vector<ParamSpec> specs);
  void place();
  void place_scales();

  LayoutOptions options_;
  std::vector<ParamLayout> params_;
  std::vector<Bucket> buckets_;
  std::unordered_map<std::string, int> index_;
  std::int64_t row_plane_elems_ = 0, column_plane_elems_ = 0, bf16_value_elems_ = 0, fp32_value_elems_ = 0;
  std::int64_t grad_elems_ = 0, master_elems_ = 0, moment_elems_ = 0;
  std::int64_t scale_bytes_ = 0, trainable_scale_bytes_ = 0;
};

/// "32x64".
std::string shape_text(std::span<const std::int64_t> shape);
/// FNV-1a over the bytes of `text`, continued from `seed`.
std::uint64_t hash64(std::string_view text, std::uint64_t seed = 0xCBF29CE484222325u);

}  // namespace mxopt
