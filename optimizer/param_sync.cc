#include "mxopt/optimizer/param_sync.h"

#include <algorithm>
#include <exception>
#include <set>
#include <tuple>

namespace mxopt {

namespace {

bool covers(SyncScope scope, const Family& family) {
  return scope == SyncScope::kAll || !family.frozen;
}

PeerStores stores_to(const PeerWindow& window, const Buffer& own, int rank) {
  MXOPT_CHECK_LE(window.bases.size(), std::size_t{PeerStores::kMostPeers + 1});
  PeerStores peers;
  for (std::size_t peer = 0; peer < window.bases.size(); ++peer) {
    if (static_cast<int>(peer) == rank) continue;
    // Of numbers: the addresses are of different allocations.
    peers.distance[peers.count++] = static_cast<std::int64_t>(
        reinterpret_cast<std::uintptr_t>(window.bases[peer]) - reinterpret_cast<std::uintptr_t>(own.data()));
  }
  return peers;
}

}  // namespace

ParamSync::ParamSync(const Layout& layout, const ParamStorage& storage, Communicator& comm,
                     GatherFormat format, const GatherPlan& plan, const PeerWindow& window,
                     ScaleLayout scale_layout, std::shared_ptr<Allocator> allocator)
    : layout_(layout),
      storage_(storage),
      comm_(comm),
      format_(format),
      plan_(plan),
      scale_layout_(scale_layout),
      rows_(layout.buckets().size()),
      columns_(layout.buckets().size()),
      requantized_(storage.device()) {
  if (plan_.is_row_direct) {
    peers_ = stores_to(window, storage.window(), comm_.rank());
    peers_.column_count = plan_.is_column_direct ? peers_.count : 0;
    find_cut_bands();
    message_ = Buffer(storage.scale_head_bytes() + code_bytes_, storage.device(), allocator);
    token_ = Buffer(1, storage.device(), allocator);
  }
  if (format_ == GatherFormat::kQuantized) return;
  staging_ = Buffer(layout.row_plane_elems() * dtype_bytes(DType::kBf16), storage.device(), allocator);
  packed_ = Buffer(layout.scale_bytes(), storage.device(), allocator);
  trainable_batch_ = Mxfp8Batch(requantize_batch(SyncScope::kTrainable), storage.device(), allocator);
  whole_batch_ = Mxfp8Batch(requantize_batch(SyncScope::kAll), storage.device(), allocator);
}

ParamSync::~ParamSync() {
  for (std::vector<Gather>* gathers : {&rows_, &columns_}) {
    for (Gather& gather : *gathers) {
      try {
        gather.work.wait();
      } catch (const std::exception&) {  // dropped: nobody will read the plane
      }
    }
  }
}

void ParamSync::wait_for_peers() {
  reduced_.wait();
  closed_.wait();
  for (std::vector<Gather>* gathers : {&rows_, &columns_}) {
    for (Gather& gather : *gathers) gather.work.wait();
  }
}

MxView ParamSync::planes(int param) const {
  const ParamLayout& p = layout_.param(param);
  MxView view;
  view.scale_layout = scale_layout_;
  if (p.family.format != ParamFormat::kMxfp8) return view;
  view.rows = p.rows;
  view.cols = p.cols;
  view.row_data = storage_.row_plane(p.bucket).sub(p.bucket_begin, p.elems()).byte_data();
  view.row_scales = storage_.scales() + p.row_scales_begin;
  if (p.family.has_column()) {
    view.column_data = storage_.column_plane(p.bucket).sub(p.bucket_begin, p.elems()).byte_data();
    view.column_scales = storage_.scales() + p.column_scales_begin;
  }
  return view;
}

Bf16* ParamSync::staging(int param) const {
  const ParamLayout& p = layout_.param(param);
  if (format_ == GatherFormat::kQuantized || p.family.format != ParamFormat::kMxfp8) return nullptr;
  return staging_.as<Bf16>().data() + layout_.bucket(p.bucket).value_begin + p.bucket_begin;
}

std::uint8_t* ParamSync::message_head() const {
  return plan_.is_row_direct ? message_.data() : storage_.scale_head();
}

std::span<std::uint8_t> ParamSync::status() const {
  return {message_head(), layout_.params().size()};
}

TypedSpan ParamSync::message(SyncScope scope) const {
  const bool is_all = scope == SyncScope::kAll;
  std::int64_t bytes = storage_.scale_head_bytes();
  if (plan_.is_row_direct) {
    bytes += is_all ? code_bytes_ : trainable_code_bytes_;
  } else if (format_ == GatherFormat::kQuantized) {
    bytes += is_all ? layout_.scale_bytes() : layout_.trainable_scale_bytes();
  }
  return {message_head(), DType::kUint8, bytes};
}

void ParamSync::find_cut_bands() {
  std::set<std::tuple<bool, int, std::int64_t>> found;  // frozen, param, band
  for (int rank = 0; rank < comm_.size(); ++rank) {
    for (const mxopt::CutBand& cut : layout_.cut_bands(rank)) {
      found.emplace(layout_.param(cut.param).family.frozen, cut.param, cut.band);
    }
  }
  for (const auto& [is_frozen, param, band] : found) {
    cut_bands_.push_back({param, band, code_bytes_});
    code_bytes_ += layout_.param(param).cols;
    if (is_frozen) continue;
    trainable_code_bytes_ = code_bytes_;
    ++trainable_cut_bands_;
  }
}

std::uint8_t* ParamSync::staged_codes() const {
  return plan_.is_row_direct ? message_.data() + storage_.scale_head_bytes() : nullptr;
}

std::vector<CutBandRow> ParamSync::cut_band_rows() const {
  std::vector<CutBandRow> rows;
  for (const CutBand& cut : cut_bands_) rows.push_back({planes(cut.param), cut.band, cut.codes});
  return rows;
}

std::int64_t ParamSync::codes_of(int param, std::int64_t band) const {
  const auto at = std::ranges::find_if(
      cut_bands_, [&](const CutBand& cut) { return cut.param == param && cut.band == band; });
  return at == cut_bands_.end() ? -1 : at->codes;
}

void ParamSync::open(StreamRef stream) {
  const bool captured = is_capturing(storage_.device(), stream);
  const auto settle = [&](auto&& join, auto&& is_complete) {
    if (!captured) return join();
    MXOPT_CHECK(is_complete(),
                "a step is being captured while gathers or readers of planes from before are not complete; "
                "synchronize the device before the capture begins");
  };
  for (std::vector<Gather>* gathers : {&rows_, &columns_}) {
    for (Gather& gather : *gathers) {
      settle([&] { join(gather, stream); }, [&] { return gather.work.test(); });
      gather.work = Work();
    }
  }
  settle([&] { closed_.join(stream); }, [&] { return closed_.test(); });
  closed_ = Work();
  for (std::size_t i = 0; i < open_readers_; ++i) {
    settle([&] { readers_[i].join(stream); }, [&] { return readers_[i].passed(); });
  }
  open_readers_ = 0;
  // Nothing but the status bytes, and what this rank stages for the MAX.
  fill_zero(message_head(), plan_.is_row_direct ? message_.bytes() : storage_.scale_head_bytes(),
            storage_.device(), stream);
}

void ParamSync::open_publish(StreamRef stream) {
  open(stream);
  if (!plan_.is_row_direct) return;
  Work met = meet(stream);
  met.join(stream);
  met.wait();  // so that nothing is stored behind a reduction that a lost peer has ended
}

/// A reduction that no rank leaves before all have entered it.
Work ParamSync::meet(StreamRef stream) {
  return comm_.all_reduce(TypedSpan(token_.data(), DType::kUint8, 1), ReduceOp::kMax, Traffic::kControl,
                          stream);
}

void ParamSync::forget_events() {
  for (std::vector<Gather>* gathers : {&rows_, &columns_}) {
    for (Gather& gather : *gathers) gather.work = Work();
  }
  reduced_ = Work();
  closed_ = Work();
  requantized_ = Event(storage_.device());
}

std::span<std::uint8_t> ParamSync::scales_to_clear(SyncScope scope) const {
  if (format_ == GatherFormat::kBf16 || plan_.is_row_direct) return {};
  const std::int64_t bytes =
      scope == SyncScope::kAll ? layout_.scale_bytes() : layout_.trainable_scale_bytes();
  return {storage_.scales(), static_cast<std::size_t>(bytes)};
}

void ParamSync::start(Gather& gather, TypedSpan whole, Traffic traffic, bool is_direct, StreamRef stream) {
  ++gather.version;
  if (is_direct) return;
  const std::int64_t shard = whole.elems / comm_.size();
  gather.work = comm_.all_gather(whole, whole.sub(comm_.rank() * shard, shard), traffic, stream);
}

void ParamSync::join(Gather& gather, StreamRef stream) {
  gather.work.join(stream);  // a gather that failed fails again, so that its plane is never given out
}

void ParamSync::gather_rows(SyncScope scope, StreamRef stream) {
  comm_.group_begin();
  for (int b = static_cast<int>(layout_.buckets().size()) - 1; b >= 0; --b) {
    const Bucket& bucket = layout_.bucket(b);
    if (!covers(scope, bucket.family)) continue;
    Gather& gather = rows_[static_cast<std::size_t>(b)];
    if (bucket.family.format != ParamFormat::kMxfp8) {
      start(gather, storage_.values(b), Traffic::kPlain, plan_.is_row_direct, stream);
    } else if (format_ == GatherFormat::kQuantized) {
      start(gather, storage_.row_plane(b), Traffic::kPlanes, plan_.is_row_direct, stream);
    } else {
      Bf16* whole = staging_.as<Bf16>().data() + bucket.value_begin;
      start(gather, TypedSpan(whole, DType::kBf16, bucket.elems), Traffic::kHighPrecision, false, stream);
    }
  }
  comm_.group_end();
}

void ParamSync::reduce_scales(SyncScope scope, StreamRef stream) {
  reduced_ = comm_.all_reduce(message(scope), ReduceOp::kMax, Traffic::kScales, stream);
  reduced_.join(stream);
}

void ParamSync::gather_columns(SyncScope scope, StreamRef stream) {
  if (format_ == GatherFormat::kBf16) {
    requantize(scope, stream);
  } else {
    comm_.group_begin();
    for (int b = static_cast<int>(layout_.buckets().size()) - 1; b >= 0; --b) {
      const Bucket& bucket = layout_.bucket(b);
      if (!covers(scope, bucket.family) || !bucket.family.has_column()) continue;
      start(columns_[static_cast<std::size_t>(b)], storage_.column_plane(b), Traffic::kPlanes,
            plan_.is_column_direct, stream);
    }
    comm_.group_end();
    if (!plan_.is_column_direct) return;
    const bool is_any_cut = scope == SyncScope::kAll ? !cut_bands_.empty() : trainable_cut_bands_ > 0;
    closed_ = is_any_cut ? meet(stream) : Work();
  }
}

std::vector<Mxfp8Shard> ParamSync::requantize_batch(SyncScope scope) const {
  std::vector<Mxfp8Shard> batch;
  for (int p = 0; p < static_cast<int>(layout_.params().size()); ++p) {
    const ParamLayout& param = layout_.param(p);
    if (param.family.format != ParamFormat::kMxfp8 || param.tied_to >= 0 || !covers(scope, param.family))
      continue;
    Mxfp8Shard shard;
    shard.name = param.name;
    shard.weight = planes(p);
    shard.master = ConstTypedSpan(staging(p), DType::kBf16, param.elems());
    batch.push_back(shard);
  }
  return batch;
}

void ParamSync::requantize(SyncScope scope, StreamRef stream) {
  for (std::size_t b = 0; b < rows_.size(); ++b) {
    if (layout_.bucket(static_cast<int>(b)).family.format == ParamFormat::kMxfp8) join(rows_[b], stream);
  }
  const Mxfp8Batch& batch = scope == SyncScope::kAll ? whole_batch_ : trainable_batch_;
  const std::span<std::uint8_t> packed =
      packed_.as<std::uint8_t>().first(static_cast<std::size_t>(batch.packed_scale_bytes()));
  batch.partial_amax(packed, stream);
  batch.partial_cast(packed, {}, stream);
  launches_ += 2;
  requantized_.record(stream);
  for (std::size_t b = 0; b < columns_.size(); ++b) {
    const Family& family = layout_.bucket(static_cast<int>(b)).family;
    if (family.has_column() && covers(scope, family)) ++columns_[b].version;
  }
}

const ParamSync::Gather& ParamSync::gather_of(int param, Plane plane) const {
  const auto bucket = static_cast<std::size_t>(layout_.param(param).bucket);
  return plane == Plane::kRow ? rows_[bucket] : columns_[bucket];
}

void ParamSync::wait(int param, Plane plane, StreamRef stream) {
  const auto bucket = static_cast<std::size_t>(layout_.param(param).bucket);
  Gather& gather = plane == Plane::kRow ? rows_[bucket] : columns_[bucket];
  join(gather, stream);
  reduced_.join(stream);
  if (plane == Plane::kColumn) closed_.join(stream);
  requantized_.join(stream);
  gather.waited_version = gather.version;
}

void ParamSync::done_reading(StreamRef stream) {
  if (open_readers_ == readers_.size()) readers_.emplace_back(storage_.device());
  readers_[open_readers_++].record(stream);
}

std::int64_t ParamSync::waited_version(int param, Plane plane) const {
  return gather_of(param, plane).waited_version;
}

}  // namespace mxopt
