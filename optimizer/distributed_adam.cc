#include "mxopt/optimizer/distributed_adam.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <exception>
#include <sstream>

#include "mxopt/optimizer/agreement.h"
#include "mxopt/optimizer/grad_sync.h"
#include "mxopt/optimizer/initial_coverage.h"
#include "mxopt/optimizer/loss_scale.h"
#include "mxopt/optimizer/param_groups.h"
#include "mxopt/optimizer/param_sync.h"
#include "mxopt/optimizer/plan.h"
#include "mxopt/optimizer/schedule.h"
#include "mxopt/optimizer/step_kernels.h"
#include "mxopt/params/bf16.h"
#include "mxopt/params/storage.h"

namespace mxopt {

namespace {

/// Milliseconds since the last call.
class PhaseClock {
 public:
  double lap() {
    const auto now = std::chrono::steady_clock::now();
    const double ms = std::chrono::duration<double, std::milli>(now - last_).count();
    last_ = now;
    return ms;
  }

 private:
  std::chrono::steady_clock::time_point last_ = std::chrono::steady_clock::now();
};

/// Adds the bits of a number to a hash.
std::uint64_t hash_number(double value, std::uint64_t seed) {
  char bytes[sizeof(value)];
  std::memcpy(bytes, &value, sizeof(value));
  return hash64({bytes, sizeof(bytes)}, seed);
}

std::string quoted_list(const std::vector<std::string>& names) {
  std::string list;
  for (const std::string& name : names) list += (list.empty() ? "'" : ", '") + name + "'";
  return list;
}

/// A local failure after messages began makes the peers fail too instead of wait. A PeerError is no local
/// failure: it comes to every rank by itself, and under MPI abort() would end the process before the caller
/// could report it. Neither is a ContractError, which is thrown before a call sends anything, or on every
/// rank alike.
template <class Body>
void guarded(Communicator& comm, const Body& body) {
  try {
    body();
  } catch (const PeerError&) {
    throw;
  } catch (const ContractError&) {
    throw;
  } catch (const std::exception& error) {
    comm.abort(error.what());
    throw;
  }
}

}  // namespace

class DistributedAdam::Impl {
 public:
  Impl(Plan plan, const Config& config, Communicator& comm, Device device,
       std::shared_ptr<Allocator> allocator)
      : config_(config),
        comm_(comm),
        device_(device),
        plan_(std::move(plan)),
        allocator_(allocator != nullptr ? std::move(allocator) : default_allocator(device)),
        storage_(layout(), config.optimizer.grad_dtype, std::max<std::int64_t>(1, param_count()), device,
                 allocator_),
        param_sync_(layout(), storage_, comm, config.parallel.gather_format, config.precision.scale_layout,
                    allocator_),
        grad_sync_(layout(), storage_, comm),
        segments_(layout().segments(comm.rank())),
        segment_of_(layout().params().size(), -1),
        kernels_(StepKernels::make(make_tables(), device)),
        coverage_(layout().params().size()),
        betas_(config.optimizer.betas),
        loss_scale_(initial_loss_scale(config.optimizer.loss_scale)),
        report_(make_report(layout(), comm, config.optimizer.grad_dtype)) {
    for (std::size_t i = 0; i < segments_.size(); ++i) {
      segment_of_[index(segments_[i].param)] = static_cast<int>(i);
    }
    report_.gather_staging_bytes = param_sync_.staging_bytes();
    for (const ParamGroup& group : plan_.groups.groups) group_names_.push_back(group.name);
    scalars_.resize(group_names_.size());
    publish_loss_scale();
  }

  const Layout& layout() const { return plan_.layout; }
  const ConstructionReport& construction() const { return report_; }
  std::span<const std::string> groups() const { return group_names_; }
  std::span<const float> loss_scale() const { return {&loss_scale_value_, 1}; }
  std::int64_t steps_taken() const { return steps_taken_; }

  void set_steps_taken(std::int64_t steps) {
    MXOPT_CHECK(steps >= 0, "set_steps_taken: " << steps << "; allowed is 0 or more");
    steps_taken_ = steps;
  }

  void set_initial(std::string_view name, std::int64_t flat_begin, ConstTypedSpan values, StreamRef stream) {
    const int param = storage_param(name);
    const std::int64_t elems = layout().param(param).elems();
    MXOPT_CHECK(
        values.dtype == DType::kFp32 || values.dtype == DType::kBf16,
        "set_initial: param '" << name << "' got " << dtype_name(values.dtype) << "; allowed: fp32, bf16");
    MXOPT_CHECK(values.elems == 0 || values.data != nullptr,
                "set_initial: param '" << name << "' got " << values.elems << " elements at a null pointer");
    MXOPT_CHECK(flat_begin >= 0 && flat_begin <= elems && values.elems <= elems - flat_begin,
                "set_initial: param '" << name << "' has " << elems << " elements, got [" << flat_begin
                                       << ", " << flat_begin << " + " << values.elems << ")");
    if (const Segment* segment = owned_segment(param)) {
      const std::int64_t begin = std::max(segment->param_begin, flat_begin);
      const std::int64_t end = std::min(segment->param_begin + segment->elems, flat_begin + values.elems);
      if (begin < end) {
        copy_to_master(values.sub(begin - flat_begin, end - begin),
                       master_of(*segment) + (begin - segment->param_begin), stream);
      }
    }
    coverage_[index(param)].add(flat_begin, flat_begin + values.elems);
  }

  std::int64_t elems_of(std::string_view name) const { return layout().param(layout().find(name)).elems(); }

  std::vector<std::string> publish(StreamRef stream) {
    require_initialized(stream);
    guarded(comm_, [&] {
      param_sync_.open(stream);
      param_sync_.clear_scales(SyncScope::kAll, stream);
      kernels_->writeback(stream);
      share_written(SyncScope::kAll, stream, nullptr);
    });
    published_ = true;
    return names_with_status(param_sync_.status(), kStatusNonFiniteMaster);
  }

  GradView grad(std::string_view name) const {
    const ParamLayout& param = layout().param(layout().find(name));
    MXOPT_CHECK(!param.family.frozen, "grad: param '" << name << "' is frozen and has no gradient");
    return {storage_.gradients(param.bucket).sub(param.bucket_begin, param.elems()), param.shape,
            param.grad_mode};
  }

  ParamView param(std::string_view name) const {
    const int id = layout().find(name);
    const ParamLayout& param = layout().param(id);
    ParamView view;
    view.format = param.family.format;
    view.shape = param.shape;
    view.planes = param_sync_.planes(id);
    if (param.family.format != ParamFormat::kMxfp8) {
      view.values = storage_.values(param.bucket).sub(param.bucket_begin, param.elems());
    }
    view.row_version = param_sync_.waited_version(id, Plane::kRow);
    view.column_version = param.family.has_column() ? param_sync_.waited_version(id, Plane::kColumn) : 0;
    return view;
  }

  OwnedSlice owned(std::string_view name) {
    const int param = storage_param(name);
    OwnedSlice slice;
    const Segment* segment = owned_segment(param);
    if (segment == nullptr) return slice;
    const auto elems = static_cast<std::size_t>(segment->elems);
    slice.param_begin = segment->param_begin;
    slice.master = {master_of(*segment), elems};
    if (layout().param(param).family.frozen) return slice;
    const std::int64_t offset = segment->bucket_begin - layout().shard_begin(segment->bucket, comm_.rank());
    slice.exp_avg = {storage_.exp_avg(segment->bucket) + offset, elems};
    slice.exp_avg_sq = {storage_.exp_avg_sq(segment->bucket) + offset, elems};
    return slice;
  }

  void begin_backward(bool last_micro_batch) { grad_sync_.begin_backward(last_micro_batch); }

  void grad_ready(std::string_view name, StreamRef stream) {
    const int param = layout().find(name);
    guarded(comm_, [&] { grad_sync_.ready(param, stream); });
  }

  StepReport step(StreamRef stream) {
    // publish() is collective, so this is so on every rank or on none.
    if (!published_) {
      const std::vector<std::string> names = names_with_status(locally_uninitialized(), 1);
      throw ContractError(
          "step: no weight was published yet; call set_initial() for every param, then publish()" +
          (names.empty() ? "" : "; without an initial value: " + quoted_list(names)));
    }
    StepRecord record;
    StepStatistics statistics;
    PhaseClock clock;
    kernels_->take_launches();
    param_sync_.take_launches();
    guarded(comm_, [&] {
      grad_sync_.finish(stream);
      record.ms.reduce_scatter = clock.lap();

      param_sync_.open(stream);
      kernels_->grad_stats(statistics, stream);
      statistics.options_hash = options_hash();
      comm_
          .all_reduce(std::span(reinterpret_cast<std::int64_t*>(&statistics), kStatisticsElems),
                      ReduceOp::kSum, Traffic::kStatistics, stream)
          .wait();
      record.ms.statistics = clock.lap();
    });
    require_same_options(statistics.options_hash);

    const StepDecision decision = decide(statistics, loss_scale_.scale, config_.optimizer.clip_grad);
    record.lr = scheduled_lr(config_.schedule, plan_.groups.groups[0].peak_lr, steps_taken_ + 1);
    guarded(comm_, [&] {
      if (decision.take) {
        ++steps_taken_;
        fill_scalars(decision.grad_factor);
        param_sync_.clear_scales(SyncScope::kTrainable, stream);
        kernels_->fused_update(scalars_, stream);
      }
      record.ms.update = clock.lap();
      share_written(SyncScope::kTrainable, stream, &record.ms, decision.take);
      grad_sync_.reset(stream);
    });
    finish_record(record, decision);
    return StepReport(std::move(record));
  }

  ParamView wait_param(std::string_view name, Plane plane, StreamRef stream) {
    const int id = layout().find(name);
    MXOPT_CHECK(plane == Plane::kRow || layout().param(id).family.has_column(),
                "wait_param: param '" << name << "' (" << format_name(layout().param(id).family.format)
                                      << ", storage " << storage_name(layout().param(id).family.storage)
                                      << ") has no column plane; precision.storage: both would store one");
    param_sync_.wait(id, plane, stream);
    return param(name);
  }

  void require_current(std::string_view name, const ParamView& view, Plane plane) const {
    const int id = layout().find(name);
    const std::int64_t current = param_sync_.version(id, plane);
    const std::int64_t held = plane == Plane::kRow ? view.row_version : view.column_version;
    MXOPT_CHECK(held == current && held > 0, "the " << plane_name(plane) << " plane of param '" << name
                                                    << "' was read at version " << held << ", but version "
                                                    << current << " is current: call wait_param first");
  }

  void set_lr(std::string_view group, double value) {
    MXOPT_CHECK(std::isfinite(value) && value >= 0,
                "set_lr: " << value << " for group '" << group << "'; allowed: >= 0");
    for_groups(group, [&](ParamGroup& g) { g.peak_lr = value; });
  }

  void set_weight_decay(std::string_view group, double value) {
    MXOPT_CHECK(std::isfinite(value) && value >= 0,
                "set_weight_decay: " << value << " for group '" << group << "'; allowed: >= 0");
    for_groups(group, [&](ParamGroup& g) { g.weight_decay = value; });
  }

  void set_betas(double beta1, double beta2) {
    for (double beta : {beta1, beta2}) {
      MXOPT_CHECK(beta >= 0 && beta < 1, "set_betas: " << beta << "; allowed: 0 <= beta < 1");
    }
    betas_ = {beta1, beta2};
  }

 private:
  static std::size_t index(int param) { return static_cast<std::size_t>(param); }
  std::int64_t param_count() const { return static_cast<std::int64_t>(layout().params().size()); }
  int storage_param(std::string_view name) const { return layout().storage_of(layout().find(name)); }

  /// The rank's piece of a param, null when it owns nothing of it: a param lies in one bucket, so there is at
  /// most one.
  const Segment* owned_segment(int param) const {
    const int at = segment_of_[index(param)];
    return at < 0 ? nullptr : &segments_[index(at)];
  }

  float* master_of(const Segment& segment) const {
    return storage_.master(segment.bucket) + segment.bucket_begin -
           layout().shard_begin(segment.bucket, comm_.rank());
  }

  StepTables make_tables() const {
    StepTables tables;
    tables.grad_dtype = storage_.grad_dtype();
    for (const Segment& segment : segments_) {
      const ParamLayout& param = layout().param(segment.param);
      const std::int64_t offset = segment.bucket_begin - layout().shard_begin(segment.bucket, comm_.rank());
      SegmentRow row;
      row.elems = segment.elems;
      row.param_begin = segment.param_begin;
      row.master = master_of(segment);
      row.status = storage_.scale_head() + segment.param;
      row.group = plan_.groups.group_of[index(segment.param)];
      if (!param.family.frozen) {
        row.exp_avg = storage_.exp_avg(segment.bucket) + offset;
        row.exp_avg_sq = storage_.exp_avg_sq(segment.bucket) + offset;
        row.grad = storage_.gradients(segment.bucket).sub(segment.bucket_begin, segment.elems).data;
      }
      if (Bf16* staging = param_sync_.staging(segment.param)) {
        row.values = staging;
      } else if (param.family.format == ParamFormat::kMxfp8) {
        row.planes = param_sync_.planes(segment.param);
      } else {
        const TypedSpan values = storage_.values(segment.bucket).sub(param.bucket_begin, param.elems());
        row.values = values.data;
        row.values_dtype = values.dtype;
      }
      tables.segments.push_back(row);
    }
    return tables;
  }

  void copy_to_master(ConstTypedSpan values, float* master, StreamRef stream) const {
    if (values.dtype == DType::kFp32) {
      copy_bytes(master, values.data, values.bytes(), device_, stream);
      return;
    }
    const std::span<const Bf16> source = values.as<Bf16>();
    std::ranges::transform(source, master, [](Bf16 value) { return bf16_to_fp32(value); });
  }

  /// Collective: throws on every rank when a param has no initial value on one of them.
  void require_initialized(StreamRef stream) {
    std::vector<std::uint8_t> missing = locally_uninitialized();
    guarded(comm_,
            [&] { comm_.all_reduce(std::span(missing), ReduceOp::kMax, Traffic::kControl, stream).wait(); });
    const std::vector<std::string> names = names_with_status(missing, 1);
    if (names.empty()) return;
    throw ContractError("publish: " + std::to_string(names.size()) +
                        " params have no initial value: " + quoted_list(names));
  }

  /// 1 for each param of which an owned element has no initial value; at least one entry.
  std::vector<std::uint8_t> locally_uninitialized() const {
    std::vector<std::uint8_t> missing(static_cast<std::size_t>(std::max<std::int64_t>(1, param_count())), 0);
    for (const Segment& segment : segments_) {
      if (!coverage_[index(segment.param)].covers(segment.param_begin, segment.param_begin + segment.elems)) {
        missing[index(segment.param)] = 1;
      }
    }
    return missing;
  }

  std::vector<std::string> names_with_status(std::span<const std::uint8_t> status, std::uint8_t value) const {
    std::vector<std::string> names;
    for (std::size_t p = 0; p < layout().params().size(); ++p) {
      if (status[p] == value) names.push_back(layout().params()[p].name);
    }
    return names;
  }

  /// From written shards to whole params on every rank. The list of messages never depends on `wrote`.
  void share_written(SyncScope scope, StreamRef stream, PhaseTimes* ms, bool wrote = true) {
    PhaseClock clock;
    param_sync_.gather_rows(scope, stream);
    const double rows = clock.lap();
    param_sync_.reduce_scales(scope, stream);
    if (wrote) kernels_->cast_cut_bands(scope == SyncScope::kAll, stream);
    const double scales = clock.lap();
    param_sync_.gather_columns(scope, stream);
    if (ms == nullptr) return;
    ms->scales = scales;
    ms->gather = rows + clock.lap();
  }

  void fill_scalars(float grad_factor) {
    const double bc1 = 1.0 - integer_power(betas_[0], steps_taken_);
    const double bc2 = 1.0 - integer_power(betas_[1], steps_taken_);
    for (std::size_t g = 0; g < scalars_.size(); ++g) {
      const ParamGroup& group = plan_.groups.groups[g];
      AdamScalars& s = scalars_[g];
      s.beta1 = static_cast<float>(betas_[0]);
      s.beta2 = static_cast<float>(betas_[1]);
      s.omb1 = static_cast<float>(1.0 - betas_[0]);
      s.omb2 = static_cast<float>(1.0 - betas_[1]);
      s.bc1 = static_cast<float>(bc1);
      s.bc2 = static_cast<float>(bc2);
      s.eps = static_cast<float>(config_.optimizer.eps);
      s.lr = static_cast<float>(scheduled_lr(config_.schedule, group.peak_lr, steps_taken_));
      s.weight_decay = static_cast<float>(group.weight_decay);
      s.grad_factor = grad_factor;
      s.decoupled = config_.optimizer.kind == AdamKind::kAdamW;
    }
  }

  std::vector<LayoutField> option_fields() const {
    std::ostringstream text;
    text << std::hexfloat << "betas " << betas_[0] << ' ' << betas_[1] << "\nsteps_taken " << steps_taken_
         << '\n';
    for (const ParamGroup& group : plan_.groups.groups) {
      text << "group '" << group.name << "' lr " << group.peak_lr << " weight_decay " << group.weight_decay
           << '\n';
    }
    return {{"hyper-parameters of the next step", text.str()}};
  }

  std::int64_t options_hash() const {
    std::uint64_t hash =
        hash_number(static_cast<double>(steps_taken_), hash_number(betas_[1], hash_number(betas_[0], 1)));
    for (const ParamGroup& group : plan_.groups.groups) {
      hash = hash_number(group.weight_decay, hash_number(group.peak_lr, hash));
    }
    return static_cast<std::int64_t>(hash);
  }

  /// The sum of equal hashes is W times one of them; otherwise every rank sees that, and the fields are
  /// compared.
  void require_same_options(std::int64_t hash_sum) {
    const auto expected =
        static_cast<std::uint64_t>(options_hash()) * static_cast<std::uint64_t>(comm_.size());
    if (static_cast<std::uint64_t>(hash_sum) == expected) return;
    require_agreement(comm_, option_fields());
  }

  void finish_record(StepRecord& record, const StepDecision& decision) {
    ++calls_;
    consecutive_skips_ = decision.take ? 0 : consecutive_skips_ + 1;
    if (!decision.take) ++skipped_total_;
    record.taken = decision.take;
    record.skip_reason = decision.take ? SkipReason::kNone : SkipReason::kNonFiniteGradient;
    record.step = steps_taken_;
    record.calls = calls_;
    record.consecutive_skips = consecutive_skips_;
    record.skipped_total = skipped_total_;
    record.grad_norm = decision.grad_norm;
    record.clip_factor = decision.clip_factor;
    record.nonfinite_gradient_params = names_with_status(param_sync_.status(), kStatusNonFiniteGradient);
    record.nonfinite_master_params = names_with_status(param_sync_.status(), kStatusNonFiniteMaster);
    record.launches = kernels_->take_launches() + param_sync_.take_launches();

    const LossScaleConfig& scale = config_.optimizer.loss_scale;
    record.loss_scale = loss_scale_.scale;
    loss_scale_ = next_loss_scale(loss_scale_, !decision.take, scale.kind, scale.min, scale.growth_interval,
                                  scale.hysteresis);
    record.next_loss_scale = loss_scale_.scale;
    publish_loss_scale();

    const std::int64_t limit = config_.optimizer.max_consecutive_skips;
    if (limit > 0 && consecutive_skips_ >= limit) {
      throw ContractError("step: " + std::to_string(consecutive_skips_) +
                          " steps in a row were skipped (optimizer.max_consecutive_skips is " +
                          std::to_string(limit) +
                          "); the last one because of a non-finite gradient of param '" +
                          record.nonfinite_gradient_params.front() + "'");
    }
  }

  void publish_loss_scale() { loss_scale_value_ = static_cast<float>(loss_scale_.scale); }

  template <class Change>
  void for_groups(std::string_view name, const Change& change) {
    if (name != "*") return change(plan_.groups.find(name));
    for (ParamGroup& group : plan_.groups.groups) change(group);
  }

  Config config_;
  Communicator& comm_;
  Device device_;
  Plan plan_;
  std::shared_ptr<Allocator> allocator_;
  ParamStorage storage_;
  ParamSync param_sync_;
  GradSync grad_sync_;
  std::vector<Segment> segments_;
  std::vector<int> segment_of_;  // [params] index into segments_, -1 for none
  std::unique_ptr<StepKernels> kernels_;
  std::vector<InitialCoverage> coverage_;  // [params]
  std::array<double, 2> betas_;
  LossScaleState loss_scale_;
  float loss_scale_value_ = 1;
  std::vector<std::string> group_names_;
  std::vector<AdamScalars> scalars_;  // [groups]
  ConstructionReport report_;
  bool published_ = false;
  std::int64_t steps_taken_ = 0;
  std::int64_t calls_ = 0;
  std::int64_t consecutive_skips_ = 0;
  std::int64_t skipped_total_ = 0;
};

DistributedAdam::DistributedAdam(std::vector<ParamSpec> specs, const Config& config, Communicator& comm,
                                 Device device, std::shared_ptr<Allocator> allocator) {
  Plan plan = make_agreed_plan(std::move(specs), config, comm, device);
  std::exception_ptr failure;
  LayoutField problem = {"construction", ""};
  try {
    impl_ = std::make_unique<Impl>(std::move(plan), config, comm, device, std::move(allocator));
  } catch (const std::exception& error) {
    failure = std::current_exception();
    problem.text = error.what();
  }
  require_agreement(comm, std::span(&problem, 1));
  if (failure) std::rethrow_exception(failure);
}
DistributedAdam::~DistributedAdam() = default;

const Layout& DistributedAdam::layout() const {
  return impl_->layout();
}
const ConstructionReport& DistributedAdam::construction() const {
  return impl_->construction();
}

void DistributedAdam::set_initial(std::string_view name, ConstTypedSpan values, StreamRef stream) {
  MXOPT_CHECK(values.elems == impl_->elems_of(name), "set_initial: param '"
                                                         << name << "' has " << impl_->elems_of(name)
                                                         << " elements, got " << values.elems);
  impl_->set_initial(name, 0, values, stream);
}

void DistributedAdam::set_initial(std::string_view name, std::int64_t flat_begin, ConstTypedSpan slice,
                                  StreamRef stream) {
  impl_->set_initial(name, flat_begin, slice, stream);
}

std::vector<std::string> DistributedAdam::publish(StreamRef stream) {
  return impl_->publish(stream);
}
GradView DistributedAdam::grad(std::string_view name) const {
  return impl_->grad(name);
}
ParamView DistributedAdam::param(std::string_view name) const {
  return impl_->param(name);
}
OwnedSlice DistributedAdam::owned(std::string_view name) {
  return impl_->owned(name);
}
void DistributedAdam::begin_backward(bool last_micro_batch) {
  impl_->begin_backward(last_micro_batch);
}
void DistributedAdam::grad_ready(std::string_view name, StreamRef stream) {
  impl_->grad_ready(name, stream);
}
StepReport DistributedAdam::step(StreamRef stream) {
  return impl_->step(stream);
}

ParamView DistributedAdam::wait_param(std::string_view name, Plane plane, StreamRef stream) {
  return impl_->wait_param(name, plane, stream);
}

void DistributedAdam::require_current(std::string_view name, const ParamView& view, Plane plane) const {
  impl_->require_current(name, view, plane);
}

// Host reads are over when the reader returns, so there is nothing to remember.
void DistributedAdam::done_reading(StreamRef) {}

std::span<const float> DistributedAdam::loss_scale() const {
  return impl_->loss_scale();
}
std::span<const std::string> DistributedAdam::groups() const {
  return impl_->groups();
}
void DistributedAdam::set_lr(std::string_view group, double value) {
  impl_->set_lr(group, value);
}
void DistributedAdam::set_weight_decay(std::string_view group, double value) {
  impl_->set_weight_decay(group, value);
}
void DistributedAdam::set_betas(double beta1, double beta2) {
  impl_->set_betas(beta1, beta2);
}
std::int64_t DistributedAdam::steps_taken() const {
  return impl_->steps_taken();
}
void DistributedAdam::set_steps_taken(std::int64_t steps) {
  impl_->set_steps_taken(steps);
}

}  // namespace mxopt
