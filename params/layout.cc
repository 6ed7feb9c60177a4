#include "mxopt/params/layout.h"

#include <algorithm>
#include <limits>
#include <sstream>

#include "mxopt/params/nearest_name.h"

namespace mxopt {

namespace {

constexpr std::int64_t kBandRows = 32;
constexpr std::int64_t kBlock = 32;

std::int64_t round_up_to(std::int64_t value, std::int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

std::string join(const std::vector<std::string>& lines) {
  std::string text;
  for (const std::string& line : lines) text += (text.empty() ? "" : "\n") + line;
  return text;
}

/// Product of the dims, or -1 when it does not fit 62 bits.
std::int64_t product(std::span<const std::int64_t> dims) {
  if (std::ranges::find(dims, 0) != dims.end()) return 0;
  std::int64_t result = 1;
  for (std::int64_t dim : dims) {
    if (dim > (std::numeric_limits<std::int64_t>::max() / 2) / result) return -1;
    result *= dim;
  }
  return result;
}

/// Problems of one shape, empty when it is fine.
std::string shape_problem(const ParamSpec& spec) {
  if (spec.shape.empty()) return "shape has no dims; allowed: rank >= 1";
  for (std::int64_t dim : spec.shape) {
    if (dim < 0) return "shape " + shape_text(spec.shape) + " has a negative dim";
  }
  if (product(spec.shape) < 0) return "shape " + shape_text(spec.shape) + " has more than 2^62 elements";
  return {};
}

}  // namespace

std::string shape_text(std::span<const std::int64_t> shape) {
  std::string text;
  for (std::int64_t dim : shape) text += (text.empty() ? "" : "x") + std::to_string(dim);
  return text;
}

std::uint64_t hash64(std::string_view text, std::uint64_t seed) {
  std::uint64_t hash = seed;
  for (char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001B3u;
  return hash;
}

std::int64_t default_bucket_elems(const Family& family, std::int64_t world_size) {
  const std::int64_t per_rank = family.has_column() ? 4'000'000 : 1'000'000;
  return std::max<std::int64_t>(40'000'000, per_rank * world_size);
}

Layout::Layout(std::vector<ParamSpec> specs, LayoutOptions options) : options_(options) {
  if (options_.world_size < 1) {
    throw ConfigError("world size " + std::to_string(options_.world_size) + ": allowed is 1 or more");
  }
  if (options_.bucket_elems < 0) {
    throw ConfigError("bucket_elems " + std::to_string(options_.bucket_elems) + ": allowed is 0 (automatic) or more");
  }
  resolve(std::move(specs));
  place();
  place_scales();
}

void Layout::resolve(std::vector<ParamSpec> specs) {
  std::vector<std::string> problems;
  for (const ParamSpec& spec : specs) {
    if (spec.name.empty()) problems.push_back("a param has an empty name");
    if (!index_.emplace(spec.name, static_cast<int>(index_.size())).second) {
      problems.push_back("param '" + spec.name + "' is registered twice; to share storage, use another name and tied_to");
    }
    const std::string problem = shape_problem(spec);
    if (!problem.empty()) problems.push_back("param '" + spec.name + "': " + problem);
  }
  if (!problems.empty()) throw ConfigError(join(problems));

  for (ParamSpec& spec : specs) {
    ParamLayout param;
    param.name = std::move(spec.name);
    param.shape = std::move(spec.shape);
    param.cols = param.shape.back();
    param.rows = product(std::span(param.shape).first(param.shape.size() - 1));
    param.grad_mode = spec.grad_mode;
    param.family.frozen = spec.frozen;
    param.family.format = spec.format.value_or(options_.default_format);
    const std::string subject = "param '" + param.name + "' (shape " + shape_text(param.shape) + ")";
    if (param.family.format == ParamFormat::kMxfp8) {
      param.family.storage = spec.storage.value_or(options_.default_storage);
      if (param.family.storage == Storage::kColumn) {
        problems.push_back(subject + ": storage column is not a trainer's storage; allowed: row, both");
      }
      if (param.rows % kBlock != 0 || param.cols % kBlock != 0) {
        const std::string reason = "matrix view " + std::to_string(param.rows) + "x" + std::to_string(param.cols) +
                                   " is not a multiple of 32 in both dims";
        if (spec.fallback.value_or(options_.fallback) == Fallback::kError) {
          problems.push_back(subject + ": mxfp8 needs it, but the " + reason + " (precision.fallback: error)");
        }
        param.fallback_reason = reason;
        param.family.format = ParamFormat::kBf16;
        param.family.storage = Storage::kRow;
      }
    }
    if (!spec.tied_to.empty()) {
      const auto target = index_.find(spec.tied_to);
      if (target == index_.end()) {
        problems.push_back(subject + ": tied_to '" + spec.tied_to + "' is not a registered param");
      } else if (!specs[static_cast<std::size_t>(target->second)].tied_to.empty()) {
        problems.push_back(subject + ": tied_to '" + spec.tied_to + "' is itself tied; tie both to the same param");
      } else {
        param.tied_to = target->second;
      }
    }
    params_.push_back(std::move(param));
  }

  for (const ParamLayout& param : params_) {
    if (param.tied_to < 0) continue;
    const ParamLayout& target = this->param(param.tied_to);
    if (param.shape != target.shape || !(param.family == target.family) || param.grad_mode != target.grad_mode) {
      problems.push_back("param '" + param.name + "' (shape " + shape_text(param.shape) + ", " +
                         std::string(format_name(param.family.format)) + ") is tied to '" + target.name + "' (shape " +
                         shape_text(target.shape) + ", " + std::string(format_name(target.family.format)) +
                         "), but shape, format, storage, frozen and grad_mode must be equal");
    }
  }
  if (!problems.empty()) throw ConfigError(join(problems));
}

void Layout::place() {
  std::vector<bool> shared(params_.size(), false);
  for (const ParamLayout& param : params_) {
    if (param.tied_to >= 0) shared[static_cast<std::size_t>(param.tied_to)] = true;
  }

  // One open bucket per family. Buckets get their number when they close, so their order is the order in which a
  // backward pass in reverse registration order completes them.
  std::vector<Bucket> open;
  const auto close = [&](Bucket& bucket) {
    if (bucket.params.empty()) return;
    bucket.elems = round_up_to(bucket.used_elems, kAlignElems * options_.world_size);
    const int number = static_cast<int>(buckets_.size());
    for (int member : bucket.params) params_[static_cast<std::size_t>(member)].bucket = number;
    const Family family = bucket.family;
    buckets_.push_back(std::move(bucket));
    bucket = Bucket();
    bucket.family = family;
  };
  const auto append = [&](Bucket& bucket, int index) {
    ParamLayout& param = params_[static_cast<std::size_t>(index)];
    param.bucket_begin = round_up_to(bucket.used_elems, kAlignElems);
    bucket.used_elems = param.bucket_begin + param.elems();
    bucket.params.push_back(index);
  };

  for (int i = static_cast<int>(params_.size()) - 1; i >= 0; --i) {
    const ParamLayout& param = this->param(i);
    if (param.tied_to >= 0) continue;
    auto slot = std::ranges::find(open, param.family, &Bucket::family);
    if (slot == open.end()) {
      slot = open.insert(open.end(), Bucket());
      slot->family = param.family;
    }
    const bool alone = shared[static_cast<std::size_t>(i)];
    if (alone) close(*slot);
    append(*slot, i);
    const std::int64_t limit =
        options_.bucket_elems > 0 ? options_.bucket_elems : default_bucket_elems(param.family, options_.world_size);
    if (alone || slot->used_elems >= limit) close(*slot);
  }
  // What is still open closes in the order of its last param, which is the earliest registered one.
  std::ranges::sort(open, [](const Bucket& a, const Bucket& b) {
    return (a.params.empty() ? -1 : a.params.back()) > (b.params.empty() ? -1 : b.params.back());
  });
  for (Bucket& bucket : open) close(bucket);

  for (ParamLayout& param : params_) {
    if (param.tied_to < 0) continue;
    param.bucket = this->param(param.tied_to).bucket;
    param.bucket_begin = this->param(param.tied_to).bucket_begin;
  }

  for (Bucket& bucket : buckets_) {
    std::int64_t& values = bucket.family.format == ParamFormat::kMxfp8  ? row_plane_elems_
                           : bucket.family.format == ParamFormat::kBf16 ? bf16_value_elems_
                                                                        : fp32_value_elems_;
    bucket.value_begin = values;
    values += bucket.elems;
    if (bucket.family.has_column()) {
      bucket.column_begin = column_plane_elems_;
      column_plane_elems_ += bucket.elems;
    }
    const std::int64_t shard = bucket.elems / options_.world_size;
    bucket.shard_begin = master_elems_;
    master_elems_ += shard;
    if (!bucket.family.frozen) {
      bucket.grad_begin = grad_elems_;
      grad_elems_ += bucket.elems;
      bucket.moment_begin = moment_elems_;
      moment_elems_ += shard;
    }
  }
}

void Layout::place_scales() {
  for (bool frozen : {false, true}) {
    for (ParamLayout& param : params_) {
      if (param.family.format != ParamFormat::kMxfp8 || param.tied_to >= 0 || param.family.frozen != frozen) continue;
      param.row_scales_begin = scale_bytes_;
      param.row_scales_bytes = round_up_to(param.rows, 128) * round_up_to(param.cols / kBlock, 4);
      scale_bytes_ += param.row_scales_bytes;
      param.column_scales_begin = scale_bytes_;
      if (param.family.has_column()) {
        param.column_scales_bytes = round_up_to(param.rows / kBlock, 4) * round_up_to(param.cols, 128);
        scale_bytes_ += param.column_scales_bytes;
      }
    }
    if (!frozen) trainable_scale_bytes_ = scale_bytes_;
  }
  for (ParamLayout& param : params_) {
    if (param.tied_to < 0) continue;
    const ParamLayout& target = this->param(param.tied_to);
    param.row_scales_begin = target.row_scales_begin;
    param.row_scales_bytes = target.row_scales_bytes;
    param.column_scales_begin = target.column_scales_begin;
    param.column_scales_bytes = target.column_scales_bytes;
  }
}

int Layout::find(std::string_view name) const {
  const auto found = index_.find(std::string(name));
  if (found != index_.end()) return found->second;
  std::vector<std::string_view> names;
  for (const ParamLayout& param : params_) names.push_back(param.name);
  const std::string_view nearest = nearest_name(name, names);
  throw ContractError("unknown param '" + std::string(name) + "'; " + std::to_string(params_.size()) +
                      " params are registered" +
                      (nearest.empty() ? std::string() : ", the nearest name is '" + std::string(nearest) + "'"));
}

int Layout::storage_of(int param) const {
  const int target = this->param(param).tied_to;
  return target >= 0 ? target : param;
}

std::vector<Segment> Layout::segments(std::int64_t rank) const {
  MXOPT_CHECK(rank >= 0 && rank < options_.world_size,
              "rank " << rank << " of a layout for world size " << options_.world_size);
  std::vector<Segment> result;
  for (int b = 0; b < static_cast<int>(buckets_.size()); ++b) {
    const Bucket& bucket = this->bucket(b);
    const std::int64_t begin = shard_begin(b, rank);
    const std::int64_t end = begin + shard_elems(b);
    auto member = std::ranges::lower_bound(bucket.params, begin + 1, {}, [&](int index) {
      return param(index).bucket_begin + param(index).elems();
    });
    for (; member != bucket.params.end() && param(*member).bucket_begin < end; ++member) {
      const ParamLayout& owner = param(*member);
      const std::int64_t first = std::max(begin, owner.bucket_begin);
      const std::int64_t last = std::min(end, owner.bucket_begin + owner.elems());
      if (first >= last) continue;
      result.push_back({*member, b, first, first - owner.bucket_begin, last - first});
    }
  }
  return result;
}

std::vector<CutBand> Layout::cut_bands(std::int64_t rank) const {
  std::vector<CutBand> result;
  for (const Segment& segment : segments(rank)) {
    const ParamLayout& owner = param(segment.param);
    if (!owner.family.has_column()) continue;
    const std::int64_t band_elems = kBandRows * owner.cols;
    const std::int64_t begin = segment.param_begin;
    const std::int64_t end = begin + segment.elems;
    const auto add = [&](std::int64_t band) {
      result.push_back({segment.param, band, std::max(begin, band * band_elems), std::min(end, (band + 1) * band_elems)});
    };
    const std::int64_t first = begin / band_elems;
    const std::int64_t last = (end - 1) / band_elems;
    const bool cut_first = begin % band_elems != 0;
    const bool cut_last = end % band_elems != 0;
    if (cut_first || (first == last && cut_last)) add(first);
    if (cut_last && last != first) add(last);
  }
  return result;
}

CutShare Layout::cut_share() const {
  CutShare share;
  std::int64_t column_elems = 0;
  std::vector<std::int64_t> cut_of_rank, owned_of_rank;
  std::int64_t cut_elems = 0;
  for (const ParamLayout& param : params_) {
    if (param.tied_to < 0 && param.family.has_column()) column_elems += param.elems();
  }
  if (column_elems == 0) return share;
  cut_of_rank.assign(static_cast<std::size_t>(options_.world_size), 0);
  owned_of_rank.assign(static_cast<std::size_t>(options_.world_size), 0);

  for (int b = 0; b < static_cast<int>(buckets_.size()); ++b) {
    const Bucket& bucket = this->bucket(b);
    if (!bucket.family.has_column()) continue;
    const std::int64_t shard = shard_elems(b);
    // Adds [begin, end) of the bucket to the ranks that own it.
    const auto spread = [&](std::int64_t begin, std::int64_t end, std::vector<std::int64_t>& per_rank) {
      while (begin < end) {
        const std::int64_t rank = begin / shard;
        const std::int64_t stop = std::min(end, (rank + 1) * shard);
        per_rank[static_cast<std::size_t>(rank)] += stop - begin;
        begin = stop;
      }
    };
    for (int member : bucket.params) {
      const ParamLayout& owner = param(member);
      if (owner.elems() == 0) continue;
      const std::int64_t band_elems = kBandRows * owner.cols;
      const std::int64_t owner_end = owner.bucket_begin + owner.elems();
      spread(owner.bucket_begin, owner_end, owned_of_rank);
      std::int64_t last_band = -1;
      for (std::int64_t cut = (owner.bucket_begin / shard + 1) * shard; cut < owner_end; cut += shard) {
        const std::int64_t offset = cut - owner.bucket_begin;
        const std::int64_t band = offset / band_elems;
        if (offset % band_elems == 0 || band == last_band) continue;
        last_band = band;
        ++share.cut_bands;
        cut_elems += band_elems;
        const std::int64_t band_begin = owner.bucket_begin + band * band_elems;
        spread(band_begin, band_begin + band_elems, cut_of_rank);
      }
    }
  }
  share.mean = static_cast<double>(cut_elems) / static_cast<double>(column_elems);
  for (std::size_t r = 0; r < cut_of_rank.size(); ++r) {
    if (owned_of_rank[r] == 0) continue;
    share.worst_rank =
        std::max(share.worst_rank, static_cast<double>(cut_of_rank[r]) / static_cast<double>(owned_of_rank[r]));
  }
  return share;
}

ByteCounts Layout::byte_counts(DType grad_dtype) const {
  ByteCounts bytes;
  bytes.row_plane = row_plane_elems_;
  bytes.column_plane = column_plane_elems_;
  bytes.scales = scale_bytes_;
  bytes.bf16_values = bf16_value_elems_ * dtype_bytes(DType::kBf16);
  bytes.fp32_values = fp32_value_elems_ * dtype_bytes(DType::kFp32);
  bytes.gradients = grad_elems_ * dtype_bytes(grad_dtype);
  bytes.master = master_elems_ * dtype_bytes(DType::kFp32);
  bytes.exp_avg = moment_elems_ * dtype_bytes(DType::kFp32);
  bytes.exp_avg_sq = bytes.exp_avg;
  return bytes;
}

std::vector<LayoutField> Layout::fields() const {
  std::ostringstream params;
  for (const ParamLayout& param : params_) {
    params << param.name << ' ' << shape_text(param.shape) << ' ' << format_name(param.family.format);
    if (param.family.format == ParamFormat::kMxfp8) params << ' ' << storage_name(param.family.storage);
    if (param.grad_mode == GradMode::kOverwrite) params << " overwrite";
    if (param.family.frozen) params << " frozen";
    if (param.tied_to >= 0) params << " tied_to " << this->param(param.tied_to).name;
    params << '\n';
  }
  return {{"world_size", std::to_string(options_.world_size)},
          {"bucket_elems", std::to_string(options_.bucket_elems)},
          {"params", params.str()}};
}

std::uint64_t Layout::digest() const {
  std::uint64_t hash = hash64("mxopt layout");
  for (const LayoutField& field : fields()) hash = hash64(field.text, hash64(field.name, hash));
  return hash;
}

}  // namespace mxopt
