#include "mxopt/params/layout.h"

#include <algorithm>
#include <iterator>
#include <numeric>
#include <sstream>

#include "mxopt/params/block_geometry.h"
#include "mxopt/params/nearest_name.h"

namespace mxopt {

namespace {

// Byte counts of every arena and their sum fit 63 bits below these.
constexpr std::int64_t kMaxElems = std::int64_t{1} << 56;
constexpr std::int64_t kMaxWorldSize = (std::int64_t{1} << 31) - 1;

std::string join(const std::vector<std::string>& lines) {
  std::string text;
  for (const std::string& line : lines) text += (text.empty() ? "" : "\n") + line;
  return text;
}

/// Product of the dims, or -1 when it is more than kMaxElems.
std::int64_t product(std::span<const std::int64_t> dims) {
  if (std::ranges::find(dims, 0) != dims.end()) return 0;
  std::int64_t result = 1;
  for (std::int64_t dim : dims) {
    if (dim > kMaxElems / result) return -1;
    result *= dim;
  }
  return result;
}

/// ", the nearest name is 'x'", or nothing when no name is near.
std::string nearest_hint(std::string_view name, std::span<const std::string_view> names) {
  const std::string_view nearest = nearest_name(name, names);
  return nearest.empty() ? std::string() : ", the nearest name is '" + std::string(nearest) + "'";
}

bool has_space_or_control(std::string_view text) {
  return std::ranges::any_of(text, [](unsigned char c) { return c <= ' ' || c == 0x7F; });
}

/// What is wrong with a duplicate_key. keys: those of the params before, with their names.
void add_duplicate_problem(const ParamSpec& spec, std::unordered_map<std::string, std::string>& keys,
                           std::vector<std::string>& problems) {
  if (spec.duplicate_key.empty()) return;
  const std::string subject = "param '" + spec.name + "': duplicate_key '" + spec.duplicate_key + "' ";
  if (has_space_or_control(spec.duplicate_key)) {
    problems.push_back(subject + "must not contain white space or control characters");
  }
  if (!spec.tied_to.empty()) {
    problems.push_back(subject + "has no meaning beside tied_to; give it to '" + spec.tied_to + "'");
  }
  const auto [first, is_new] = keys.emplace(spec.duplicate_key, spec.name);
  if (is_new) return;
  problems.push_back(subject + "is that of '" + first->second + "' too; copies on one rank are tied_to it");
}

/// The problem of one shape, empty when it is fine.
std::string shape_problem(const ParamSpec& spec) {
  if (spec.shape.empty()) return "shape has no dims; allowed: rank >= 1";
  for (std::int64_t dim : spec.shape) {
    if (dim < 0) return "shape " + shape_text(spec.shape) + " has a negative dim";
  }
  const std::int64_t rows = product(std::span(spec.shape).first(spec.shape.size() - 1));
  if (rows < 0 || spec.shape.back() > kMaxElems || product(spec.shape) < 0) {
    return "shape " + shape_text(spec.shape) + " has more than 2^56 elements";
  }
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
  if (options_.world_size < 1 || options_.world_size > kMaxWorldSize) {
    throw ConfigError("world size " + std::to_string(options_.world_size) + ": allowed is 1 to 2147483647");
  }
  if (options_.bucket_elems < 0) {
    throw ConfigError("bucket_elems " + std::to_string(options_.bucket_elems) +
                      ": allowed is 0 (automatic) or more");
  }
  resolve(std::move(specs));
  place();
  place_scales();
}

void Layout::resolve(std::vector<ParamSpec> specs) {
  std::vector<std::string> problems;
  std::vector<std::string_view> names;
  std::unordered_map<std::string, std::string> keys;
  std::int64_t total_elems = 0;
  for (const ParamSpec& spec : specs) {
    if (spec.name.empty()) problems.push_back("a param has an empty name");
    if (has_space_or_control(spec.name)) {
      problems.push_back("param '" + spec.name +
                         "': names must not contain white space or control characters");
    }
    const auto [entry, fresh] = index_.emplace(spec.name, static_cast<int>(index_.size()));
    names.push_back(entry->first);
    if (!fresh) {
      problems.push_back("param '" + spec.name +
                         "' is registered twice; to share storage, use another name and tied_to");
    }
    add_duplicate_problem(spec, keys, problems);
    const std::string problem = shape_problem(spec);
    if (!problem.empty()) problems.push_back("param '" + spec.name + "': " + problem);
    if (problem.empty() && total_elems <= kMaxElems) total_elems += product(spec.shape);
  }
  if (total_elems > kMaxElems) problems.push_back("the params have more than 2^56 elements together");
  if (!problems.empty()) throw ConfigError(join(problems));

  for (ParamSpec& spec : specs) {
    ParamLayout param;
    param.name = std::move(spec.name);
    param.shape = std::move(spec.shape);
    param.cols = param.shape.back();
    param.rows = product(std::span(param.shape).first(param.shape.size() - 1));
    param.grad_mode = spec.grad_mode;
    param.duplicate_key = std::move(spec.duplicate_key);
    param.family.frozen = spec.frozen;
    param.family.format = spec.format.value_or(options_.default_format);
    const std::string subject = "param '" + param.name + "' (shape " + shape_text(param.shape) + ")";
    if (param.family.format == ParamFormat::kMxfp8) {
      param.family.storage = spec.storage.value_or(options_.default_storage);
      if (param.family.storage == Storage::kColumn) {
        problems.push_back(subject + ": storage column is not a trainer's storage; allowed: row, both");
      }
      if (param.rows % kBlockElems != 0 || param.cols % kBlockElems != 0) {
        const std::string reason = "matrix view " + std::to_string(param.rows) + "x" +
                                   std::to_string(param.cols) + " is not a multiple of 32 in both dims";
        if (spec.fallback.value_or(options_.fallback) == Fallback::kError) {
          problems.push_back(subject + ": mxfp8 needs it, but the " + reason +
                             " (precision.fallback: error)");
        }
        param.fallback_reason = reason;
        param.family.format = ParamFormat::kBf16;
        param.family.storage = Storage::kRow;
      }
    }
    if (!spec.tied_to.empty()) {
      const auto target = index_.find(spec.tied_to);
      if (target == index_.end()) {
        problems.push_back(subject + ": tied_to '" + spec.tied_to + "' is not a registered param" +
                           nearest_hint(spec.tied_to, names));
      } else if (!specs[static_cast<std::size_t>(target->second)].tied_to.empty()) {
        problems.push_back(subject + ": tied_to '" + spec.tied_to +
                           "' is itself tied; tie both to the same param");
      } else {
        param.tied_to = target->second;
      }
    }
    params_.push_back(std::move(param));
  }

  for (const ParamLayout& param : params_) {
    if (param.tied_to < 0) continue;
    const ParamLayout& target = this->param(param.tied_to);
    if (param.grad_mode == GradMode::kOverwrite && target.grad_mode == GradMode::kOverwrite) {
      problems.push_back("param '" + param.name + "' is tied to '" + target.name +
                         "': their gradients share memory, so grad_mode must be accumulate");
    }
    if (param.shape != target.shape || !(param.family == target.family) ||
        param.grad_mode != target.grad_mode) {
      problems.push_back("param '" + param.name + "' (shape " + shape_text(param.shape) + ", " +
                         std::string(format_name(param.family.format)) + ") is tied to '" + target.name +
                         "' (shape " + shape_text(target.shape) + ", " +
                         std::string(format_name(target.family.format)) +
                         "), but shape, format, storage, frozen and grad_mode must be equal");
    }
  }
  if (!problems.empty()) throw ConfigError(join(problems));
}

void Layout::place() {
  // A backward pass in reverse registration order completes a storage when it has reached the earliest
  // registered of the params that share it.
  std::vector<int> completed_by(params_.size());
  std::iota(completed_by.begin(), completed_by.end(), 0);
  std::vector<bool> shared(params_.size(), false);
  for (int i = 0; i < static_cast<int>(params_.size()); ++i) {
    const int target = param(i).tied_to;
    if (target < 0) continue;
    shared[static_cast<std::size_t>(target)] = true;
    completed_by[static_cast<std::size_t>(target)] =
        std::min(completed_by[static_cast<std::size_t>(target)], i);
  }
  const auto completed_later = [&](int a, int b) {
    return completed_by[static_cast<std::size_t>(a)] > completed_by[static_cast<std::size_t>(b)];
  };
  std::vector<int> walk;
  for (int i = 0; i < static_cast<int>(params_.size()); ++i) {
    if (param(i).tied_to < 0) walk.push_back(i);
  }
  std::ranges::sort(walk, completed_later);

  const auto append = [&](Bucket& bucket, int index) {
    ParamLayout& param = params_[static_cast<std::size_t>(index)];
    param.bucket_begin = round_up(bucket.used_elems, kAlignElems);
    bucket.used_elems = param.bucket_begin + param.elems();
    bucket.params.push_back(index);
  };
  std::vector<Bucket> open;  // at most one per family
  for (int index : walk) {
    const Family& family = param(index).family;
    if (shared[static_cast<std::size_t>(index)]) {
      Bucket alone;
      alone.family = family;
      append(alone, index);
      buckets_.push_back(std::move(alone));
      continue;
    }
    auto slot = std::ranges::find(open, family, &Bucket::family);
    if (slot == open.end()) {
      slot = open.insert(open.end(), Bucket());
      slot->family = family;
    }
    append(*slot, index);
    const std::int64_t limit =
        options_.bucket_elems > 0 ? options_.bucket_elems : default_bucket_elems(family, options_.world_size);
    if (slot->used_elems < limit) continue;
    buckets_.push_back(std::move(*slot));
    open.erase(slot);
  }
  std::ranges::move(open, std::back_inserter(buckets_));
  std::ranges::sort(buckets_, completed_later, [](const Bucket& bucket) { return bucket.params.back(); });

  for (int b = 0; b < static_cast<int>(buckets_.size()); ++b) {
    Bucket& bucket = buckets_[static_cast<std::size_t>(b)];
    bucket.elems = round_up(bucket.used_elems, kAlignElems * options_.world_size);
    for (int member : bucket.params) params_[static_cast<std::size_t>(member)].bucket = b;
  }
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
      if (param.family.format != ParamFormat::kMxfp8 || param.tied_to >= 0 || param.family.frozen != frozen)
        continue;
      param.row_scales_begin = scale_bytes_;
      param.row_scales_bytes = row_scale_bytes(param.rows, param.cols);
      scale_bytes_ += param.row_scales_bytes;
      param.column_scales_begin = scale_bytes_;
      if (param.family.has_column()) {
        param.column_scales_bytes = column_scale_bytes(param.rows, param.cols);
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
  throw ContractError("unknown param '" + std::string(name) + "'; " + std::to_string(params_.size()) +
                      " params are registered" + nearest_hint(name, names));
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
    const std::int64_t band_elems = kBlockElems * owner.cols;
    const std::int64_t begin = segment.param_begin;
    const std::int64_t end = begin + segment.elems;
    const auto add = [&](std::int64_t band) {
      result.push_back(
          {segment.param, band, std::max(begin, band * band_elems), std::min(end, (band + 1) * band_elems)});
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
      const std::int64_t band_elems = kBlockElems * owner.cols;
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
    share.worst_rank = std::max(share.worst_rank,
                                static_cast<double>(cut_of_rank[r]) / static_cast<double>(owned_of_rank[r]));
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
    if (!param.duplicate_key.empty()) params << " duplicate_key " << param.duplicate_key;
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
