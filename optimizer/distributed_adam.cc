#include "mxopt/optimizer/distributed_adam.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstring>
#include <exception>
#include <initializer_list>
#include <limits>
#include <sstream>

#include "mxopt/collectives/host_exchange.h"
#include "mxopt/optimizer/agreement.h"
#include "mxopt/optimizer/checkpointer.h"
#include "mxopt/optimizer/gather_plan.h"
#include "mxopt/optimizer/grad_sync.h"
#include "mxopt/optimizer/initial_coverage.h"
#include "mxopt/optimizer/loss_scale.h"
#include "mxopt/optimizer/param_groups.h"
#include "mxopt/optimizer/param_sync.h"
#include "mxopt/optimizer/plan.h"
#include "mxopt/optimizer/schedule.h"
#include "mxopt/optimizer/skip_limit.h"
#include "mxopt/optimizer/state_access.h"
#include "mxopt/optimizer/step_kernels.h"
#include "mxopt/optimizer/step_phases.h"
#include "mxopt/optimizer/step_reports.h"
#include "mxopt/optimizer/step_scalars.h"
#include "mxopt/optimizer/step_tables.h"
#include "mxopt/optimizer/weight_files.h"
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

/// aborting() for the communicators of one optimizer; null ones are left out.
template <class Body>
auto guarded(std::initializer_list<Communicator*> comms, const Body& body) {
  return aborting(
      [&](const std::string& reason) {
        for (Communicator* comm : comms) {
          if (comm != nullptr) comm->abort(reason);
        }
      },
      body);
}

/// NaN where a run was not finite.
double reported_norm(NormSum sum, std::int64_t nonfinite_runs, double loss_scale) {
  if (nonfinite_runs != 0) return std::numeric_limits<double>::quiet_NaN();
  return unscaled_norm(sum.square_sum, loss_scale);
}

/// Steps in a device's table of learning rates and weight decays; where a schedule is longer, it is sent in
/// pieces.
constexpr std::int64_t kMostTableSteps = 1 << 16;

GradSyncOptions grad_sync_options(const Config& config, const ParallelGroups& ranks, Device device) {
  GradSyncOptions options;
  const bool is_mean = config.optimizer.grad_reduce == GradReduce::kAverage;
  options.op = is_mean && ranks.averages_in_reduction() ? ReduceOp::kAvg : ReduceOp::kSum;
  options.replicas = ranks.replicas;
  options.checks = config.optimizer.check_grads;
  // The transports of host memory add in rank order by themselves.
  options.exchanges =
      config.parallel.grad_reduction == GradReduction::kExchange && device.kind != DeviceKind::kHost;
  return options;
}

/// The first step from which on learning rates and weight decays stay.
std::int64_t last_change(const ScheduleConfig& schedule) {
  return std::max(last_lr_change(schedule), last_weight_decay_change(schedule));
}

/// What stands before the rest of an optimizer is made: agreed on, and in direct reach of the peers. Its
/// order is that in which it is made.
struct Groundwork {
  Plan plan;
  GatherPlan gather;
  std::unique_ptr<ParamStorage> storage;
  PeerWindow window;  // goes first
};

/// Never empty: that would mean that there is no problem.
std::string text_of(const std::exception& error) {
  return *error.what() != '\0' ? error.what() : "failed";
}

/// Runs `body`, which sends nothing; where it throws on one rank, throws on all.
template <class Body>
void agreed(Communicator& comm, const Body& body) {
  std::exception_ptr failure;
  LayoutField problem = {"construction", ""};
  try {
    body();
  } catch (const std::exception& error) {
    failure = std::current_exception();
    problem.text = text_of(error);
  }
  require_agreement(comm, std::span(&problem, 1));
  if (failure) std::rethrow_exception(failure);
}

std::unique_ptr<Groundwork> lay_groundwork(std::vector<ParamSpec> specs, const Config& config,
                                           const ParallelGroups& ranks, Device device,
                                           const std::shared_ptr<Allocator>& allocator) {
  Communicator& comm = *ranks.data;
  auto work = std::make_unique<Groundwork>(
      Groundwork{make_agreed_plan(std::move(specs), config, ranks, device), {}, nullptr, {}});
  const Layout& layout = work->plan.layout;
  work->gather = plan_gather(layout, config, comm);
  agreed(comm, [&] {
    const std::shared_ptr<Allocator> own = allocator != nullptr ? allocator : default_allocator(device);
    StorageWindow window;
    if (work->gather.is_row_direct) {
      const std::shared_ptr<Allocator> of_windows = comm.window_allocator();
      window = {allocator == nullptr && of_windows != nullptr ? of_windows : own,
                work->gather.is_column_direct};
    }
    const auto params = static_cast<std::int64_t>(layout.params().size());
    work->storage = std::make_unique<ParamStorage>(layout, config.optimizer.grad_dtype,
                                                   std::max<std::int64_t>(1, params), device, own, window);
  });
  if (work->gather.is_row_direct) {
    work->window = comm.open_window(work->storage->window());
    if (!work->window.is_open()) work->gather = without_window(config.parallel.gather, work->window.reason);
  }
  return work;
}

/// The report of a step that a graph repeats.
class CapturedStep final : public StepReport::Source {
 public:
  const StepRecord& read() override {
    throw ContractError("a captured step has no report of its own; after a replay, read last_report()");
  }
};

}  // namespace

class DistributedAdam::Impl final : public StepPhases, public StateAccess {
 public:
  Impl(std::unique_ptr<Groundwork> groundwork, const Config& config, const ParallelGroups& ranks,
       Device device, std::shared_ptr<Allocator> allocator)
      : config_(config),
        ranks_(ranks),
        comm_(*ranks.data),
        device_(device),
        groundwork_(std::move(groundwork)),
        plan_(groundwork_->plan),
        storage_(*groundwork_->storage),
        allocator_(allocator != nullptr ? std::move(allocator) : default_allocator(device)),
        param_sync_(layout(), storage_, comm_, config.parallel.gather_format, groundwork_->gather,
                    groundwork_->window, config.precision.scale_layout, allocator_),
        grad_sync_(layout(), storage_, comm_, grad_sync_options(config, ranks, device), allocator_),
        segments_(layout().segments(comm_.rank())),
        segment_of_(layout().params().size(), -1),
        kernels_(StepKernels::make(make_step_tables(layout(), storage_, param_sync_, plan_.groups.part_of,
                                                    comm_.rank(), plan_.norm_of),
                                   device, allocator_)),
        coverage_(layout().params().size()),
        table_steps_(
            device.kind == DeviceKind::kHost ? 1 : std::min(last_change(config.schedule), kMostTableSteps)),
        scalars_(part_count(), table_steps_, initial_state(), device, allocator_, statistics_layout()),
        reports_(device, step_result(),
                 [this](StepRecord& record, const auto& result) { complete_record(record, result); }),
        report_(make_report(layout(), ranks, config.optimizer)),
        last_(device) {
    for (std::size_t i = 0; i < segments_.size(); ++i) {
      segment_of_[index(segments_[i].param)] = static_cast<int>(i);
    }
    report_.gather_staging_bytes = param_sync_.staging_bytes();
    report_.gather = groundwork_->gather.text();
    report_.grad_staging_bytes = grad_sync_.staging_bytes();
    for (const ParamGroup& group : plan_.groups.groups) group_names_.push_back(group.name);
  }

  /// Waits until nothing uses this rank's memory any more; false when that can not be known, because a peer
  /// is gone.
  bool settle() noexcept {
    try {
      for (Work& work : reduced_elsewhere_) work.wait();
      grad_sync_.wait();
      param_sync_.wait_for_peers();
      if (copied_ != nullptr) copied_->wait();
      last_.wait();
      return true;
    } catch (const std::exception&) {
      return false;
    }
  }

  /// Whether others may still use this rank's memory after a wait for them has failed.
  bool is_memory_in_use() const { return device_.kind != DeviceKind::kHost || param_sync_.peers().count > 0; }
  Device device() const override { return device_; }
  const Config& config() const override { return config_; }
  const ParallelGroups& groups() const override { return ranks_; }
  const StepScalars& scalars() const override { return scalars_; }
  std::span<const NormGroup> norms() const override { return plan_.groups.norms; }
  ChainRole chain_role() const override { return chain_role_; }
  void set_chained(ChainRole role) override { chain_role_ = role; }

  void abort(const std::string& reason) noexcept override {
    for (Communicator* comm : {&comm_, ranks_.model, ranks_.replicas}) {
      if (comm != nullptr) comm->abort(reason);
    }
  }

  void copy_state(StepPhases& from) override {
    const Stream setup(device_);
    from.join_all(setup.ref());
    join_all(setup.ref());
    scalars_.copy_state(from.scalars(), setup.ref());
    synchronize(device_, setup.ref());
    steps_taken_ = from.steps_taken();
    calls_ = from.calls();
    // The other's count may be one that its next step will be told.
    is_taken_set_ = are_groups_changed_ = true;
  }

  void join_all(StreamRef stream) override { join_enqueued(stream); }

  std::int64_t calls() override {
    reports_.settle();
    return calls_;
  }

  std::int64_t sum_over_ranks(std::int64_t value) override {
    guarded_step([&] {
      for (Communicator* comm : {&comm_, ranks_.model, ranks_.replicas}) {
        if (comm != nullptr) {
          all_reduce_on_host(*comm, std::span(&value, 1), ReduceOp::kSum, Traffic::kControl);
        }
      }
    });
    return value;
  }

  const Plan& plan() const { return plan_; }
  const Layout& layout() const override { return plan_.layout; }
  const ConstructionReport& construction() const { return report_; }
  std::span<const std::string> group_names() const { return group_names_; }
  std::span<const float> loss_scale() const { return scalars_.loss_factor(); }

  std::int64_t steps_taken() override {
    reports_.settle();
    return steps_taken_;
  }

  void set_steps_taken(std::int64_t steps) override {
    MXOPT_CHECK(steps >= 0, "set_steps_taken: " << steps << "; allowed is 0 or more");
    reports_.settle();
    steps_taken_ = steps;
    is_taken_set_ = true;
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
        last_.join(stream);
        join_copies(stream);
        kernels_->load_master(master_of(*segment) + (begin - segment->param_begin),
                              values.sub(begin - flat_begin, end - begin), stream);
        last_.record(stream);
      }
    }
    coverage_[index(param)].add(flat_begin, flat_begin + values.elems);
  }

  std::vector<std::string> import_weights(std::span<const std::filesystem::path> files) {
    std::vector<std::string> left_out;
    std::vector<WeightPiece> pieces;
    agreed_over<DataError>(ranks_.comms(), [&] {
      const WeightFiles weights(files);
      left_out = weights.require_params(layout());
      for (const Segment& segment : segments_) {
        if (segment.elems > 0) pieces.push_back(weights.read(layout().param(segment.param).name, segment));
      }
    });
    const Stream setup(device_);
    for (const WeightPiece& piece : pieces) {
      const std::string& name = layout().param(piece.param).name;
      set_initial(name, piece.begin, std::span<const float>(piece.values), setup.ref());
    }
    // Every rank has its own part: the whole has a value.
    for (std::size_t p = 0; p < coverage_.size(); ++p) {
      coverage_[p].add(0, layout().param(static_cast<int>(p)).elems());
    }
    synchronize(device_, setup.ref());
    return left_out;
  }

  std::int64_t elems_of(std::string_view name) const { return layout().param(layout().find(name)).elems(); }

  std::vector<std::string> publish(StreamRef stream) {
    require_initialized();
    std::vector<std::uint8_t> status(param_sync_.status().size());
    guarded_step([&] {
      last_.join(stream);
      join_copies(stream);
      equalize_replicas(stream);
      param_sync_.open_publish(stream);
      const std::span<std::uint8_t> scales = param_sync_.scales_to_clear(SyncScope::kAll);
      fill_zero(scales.data(), static_cast<std::int64_t>(scales.size()), device_, stream);
      kernels_->writeback(stream);
      share_written(SyncScope::kAll, stream, nullptr, nullptr);
      param_sync_.reduced().wait();
      copy_bytes(status.data(), param_sync_.status().data(), static_cast<std::int64_t>(status.size()),
                 device_, stream);
      last_.record(stream);
      synchronize(device_, stream);
    });
    published_ = true;
    return names_with_status(status, kStatusNonFiniteMaster);
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
    const StatePiece piece = piece_of(*segment);
    const auto elems = static_cast<std::size_t>(piece.elems);
    slice.param_begin = piece.begin;
    slice.master = {piece.kinds[0], elems};
    if (piece.kinds[1] == nullptr) return slice;
    slice.exp_avg = {piece.kinds[1], elems};
    slice.exp_avg_sq = {piece.kinds[2], elems};
    return slice;
  }

  std::vector<StatePiece> pieces() const override {
    std::vector<StatePiece> pieces;
    for (const Segment& segment : segments_) {
      if (segment.elems > 0) pieces.push_back(piece_of(segment));
    }
    return pieces;
  }

  const StepState* step_state() const override { return scalars_.memory().state; }
  std::span<const ParamGroup> param_groups() const override { return plan_.groups.groups; }
  const ParamGroup& group_of(int param) const override {
    return plan_.groups.groups[index(plan_.groups.group_of[index(param)])];
  }

  void require_between_steps() const override {
    MXOPT_CHECK(grad_sync_.is_idle(),
                "load: gradients were begun that no step() has used; call step() before, which skips what is "
                "not finite");
  }

  void join_enqueued(StreamRef stream) override {
    last_.join(stream);
    join_copies(stream);
  }

  void hold_changes(std::shared_ptr<const Event> copied, StreamRef stream) override {
    copied_ = std::move(copied);
    // Replays call nothing of this.
    if (was_captured_) copied_->join(stream);
  }

  void note_restored(const StepState* state, StreamRef stream) override {
    for (std::size_t p = 0; p < coverage_.size(); ++p) {
      coverage_[p].add(0, layout().param(static_cast<int>(p)).elems());
    }
    if (state != nullptr) {
      reports_.forget();
      scalars_.set_state(*state, stream);
      steps_taken_ = state->taken;
      calls_ = state->calls;
      is_taken_set_ = false;
      // Now and not with the next step(): replays of a captured one would go on with the values there were.
      are_groups_changed_ = true;
      if (!is_host()) tell_changes(stream);
    }
    last_.record(stream);
  }

  void set_param_groups(std::span<const ParamGroup> groups) override {
    for (const ParamGroup& from : groups) {
      for (ParamGroup& to : plan_.groups.groups) {
        if (to.name != from.name) continue;
        to.lr = from.lr;
        to.weight_decay = from.weight_decay;
        to.betas = from.betas;
        to.eps = from.eps;
      }
    }
    are_groups_changed_ = true;
  }

  void begin_backward(bool last_micro_batch) { grad_sync_.begin_backward(last_micro_batch); }

  void grad_ready(std::string_view name, StreamRef stream) {
    const int param = layout().find(name);
    guarded_step([&] { grad_sync_.ready(param, stream); });
  }

  void add_tokens(std::int64_t count, std::span<const std::int64_t> counter, StreamRef stream) {
    MXOPT_CHECK(divides_by_tokens(),
                "add_tokens: gradients are not divided by tokens; allowed with optimizer.grad_reduce tokens");
    MXOPT_CHECK(chain_role_ != ChainRole::kOther,
                "add_tokens: this optimizer is one of a chain, whose first member counts the tokens of all");
    MXOPT_CHECK(count >= 0, "add_tokens: " << count << "; allowed is 0 or more");
    const bool captured = is_capturing(device_, stream);
    if (!captured) last_.join(stream);
    kernels_->add_tokens(scalars_.memory().tokens, count, counter.data(), stream);
    if (!captured) last_.record(stream);
    are_tokens_told_ = true;
  }

  StepReport step(StreamRef stream) {
    require_ready(stream);
    make_room();
    measure(stream);
    const StepPart own = part();
    decide({&own, 1}, stream);
    compare_options();
    require_agreed();
    update(stream);
    return report(stream);
  }

  void require_ready(StreamRef stream) override {
    // publish() is collective, so this is so on every rank or on none.
    if (!published_) {
      const std::vector<std::string> names = names_with_status(locally_uninitialized(), 1);
      throw ContractError(
          "step: no weight was published yet; call set_initial() for every param, then publish()" +
          (names.empty() ? "" : "; without an initial value: " + quoted_list(names)));
    }
    MXOPT_CHECK(!divides_by_tokens() || are_tokens_told_ || chain_role_ == ChainRole::kOther,
                "step: optimizer.grad_reduce is tokens, and this rank called add_tokens() not once since the "
                "last step; a rank without tokens calls add_tokens(0)");
    underway_ = Underway();
    underway_.is_captured = is_capturing(device_, stream);
    if (!underway_.is_captured) return;
    MXOPT_CHECK(
        copied_ == nullptr || copied_->passed(),
        "step: a step is being captured while the state is being copied for a checkpoint; wait for the save "
        "before the capture begins");
    reports_.settle();
    MXOPT_CHECK(!are_groups_changed_ && !is_taken_set_ && !is_next_step_missing(),
                "step: a step is being captured while changed hyper-parameters were not sent to the device "
                "yet; call step() once before the capture");
  }

  void make_room() override {
    guarded({&comm_}, [&] { reports_.make_room(); });
  }

  void measure(StreamRef stream) override {
    are_tokens_told_ = false;
    underway_.clock.lap();
    kernels_->take_launches();
    param_sync_.take_launches();
    guarded_step([&] {
      if (!underway_.is_captured) last_.join(stream);
      tell_changes(stream);
      grad_sync_.finish(stream);
      underway_.record.ms.reduce_scatter = underway_.clock.lap();

      param_sync_.open(stream);
      kernels_->open_statistics(scalars_.memory(), options_hash(), stream);
      kernels_->grad_stats(scalars_.memory().statistics, stream);
      reduce_statistics(stream);
      join_copies(stream);
      underway_.record.ms.statistics = underway_.clock.lap();
    });
  }

  StepPart part() const override { return {scalars_.memory(), step_options()}; }

  void decide(std::span<const StepPart> parts, StreamRef stream) override {
    guarded_step([&] { kernels_->decide(parts, stream); });
  }

  void compare_options() override {
    if (do_options_differ()) require_equal_options();
  }

  void require_agreed() override {
    if (do_options_differ())
      throw ContractError(options_differ_text());  // those that differ are in other groups
  }

  void update(StreamRef stream) override {
    const StepMemory& memory = scalars_.memory();
    guarded_step([&] {
      underway_.clock.lap();
      kernels_->clear(param_sync_.scales_to_clear(SyncScope::kTrainable), memory.outcome, stream);
      kernels_->fused_update({memory.scalars, plan_.groups.parts.size()}, memory.outcome, stream);
      underway_.record.ms.update = underway_.clock.lap();
      grad_sync_.reset(stream);
      share_written(SyncScope::kTrainable, stream, &underway_.record.ms, memory.outcome);
    });
  }

  StepReport report(StreamRef stream) override {
    if (underway_.is_captured) {
      was_captured_ = true;
      param_sync_.forget_events();
      grad_sync_.forget_events();
      reduced_elsewhere_ = {};
      last_ = Event(device_);
      return StepReport(std::make_shared<CapturedStep>());
    }
    StepRecord& record = underway_.record;
    record.launches = kernels_->take_launches() + param_sync_.take_launches();
    record.lr = plan_.groups.groups[0].lr.peak;  // until the step is known
    return guarded({&comm_}, [&] {
      StepReport report =
          reports_.add(std::move(record), step_result(),
                       {reduced_elsewhere_[0], reduced_elsewhere_[1], param_sync_.reduced()}, stream);
      grad_sync_.note_reported(stream);
      last_.record(stream);
      if (is_host()) reports_.make_room();
      return report;
    });
  }

  StepReport last_report(StreamRef stream) override {
    MXOPT_CHECK(published_, "last_report: no step was made yet");
    guarded({&comm_}, [&] { reports_.make_room(); });
    StepRecord record;
    record.lr = plan_.groups.groups[0].lr.peak;
    return guarded({&comm_}, [&] {
      last_.join(stream);
      StepReport report = reports_.add(std::move(record), step_result(), {}, stream);
      grad_sync_.note_reported(stream);
      last_.record(stream);
      return report;
    });
  }

  ParamView wait_param(std::string_view name, Plane plane, StreamRef stream) {
    const int id = layout().find(name);
    MXOPT_CHECK(plane == Plane::kRow || layout().param(id).family.has_column(),
                "wait_param: param '" << name << "' (" << format_name(layout().param(id).family.format)
                                      << ", storage " << storage_name(layout().param(id).family.storage)
                                      << ") has no column plane; precision.storage: both would store one");
    guarded({&comm_}, [&] {
      param_sync_.wait(id, plane, stream);
      grad_sync_.join_reset(stream);
    });
    return param(name);
  }

  void done_reading(StreamRef stream) {
    guarded({&comm_}, [&] { param_sync_.done_reading(stream); });
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
    for_groups(group, [&](ParamGroup& g) { g.lr.peak = value; });
  }

  void set_weight_decay(std::string_view group, double value) {
    MXOPT_CHECK(std::isfinite(value) && value >= 0,
                "set_weight_decay: " << value << " for group '" << group << "'; allowed: >= 0");
    MXOPT_CHECK(group == "*" || plan_.groups.find(group).has_decay,
                "set_weight_decay: the params of group '"
                    << group
                    << "' have one dimension and no weight decay; allowed with optimizer.decay_1d, or "
                    << "weight_decay or weight_decay_mult in the group");
    for_groups(group, [&](ParamGroup& g) { g.weight_decay = {value, value}; });
  }

  void set_betas(std::string_view group, double beta1, double beta2) {
    for (double beta : {beta1, beta2}) {
      MXOPT_CHECK(beta >= 0 && beta < 1,
                  "set_betas: " << beta << " for group '" << group << "'; allowed: 0 <= beta < 1");
    }
    for_groups(group, [&](ParamGroup& g) { g.betas = {beta1, beta2}; });
  }

 private:
  static std::size_t index(int number) { return static_cast<std::size_t>(number); }
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

  /// State that is being copied for a checkpoint is not changed before.
  void join_copies(StreamRef stream) {
    if (copied_ == nullptr) return;
    if (!is_capturing(device_, stream)) copied_->join(stream);  // else it has passed, see require_ready()
    copied_.reset();
  }

  StatePiece piece_of(const Segment& segment) const {
    StatePiece piece = {segment.param, segment.param_begin, segment.elems, {master_of(segment)}};
    if (layout().param(segment.param).family.frozen) return piece;
    const std::int64_t offset = segment.bucket_begin - layout().shard_begin(segment.bucket, comm_.rank());
    piece.kinds[1] = storage_.exp_avg(segment.bucket) + offset;
    piece.kinds[2] = storage_.exp_avg_sq(segment.bucket) + offset;
    return piece;
  }

  /// A device's outcome is not known yet: its step is not taken, and the report says why.
  bool do_options_differ() const { return is_host() && scalars_.memory().outcome->options_differ; }

  template <class Body>
  void guarded_step(const Body& body) {
    guarded({&comm_, ranks_.model, ranks_.replicas}, body);
  }

  StatisticsLayout statistics_layout() const {
    StatisticsLayout layout;
    for (std::size_t i = 1; i < plan_.groups.norms.size(); ++i) {
      layout.separate_max_norms.push_back(plan_.groups.norms[i].max_norm);
    }
    if (ranks_.model != nullptr) {
      layout.model_parallel_ranks = ranks_.model->size();
      layout.model_parallel_rank = ranks_.model->rank();
    }
    if (config_.optimizer.param_norms) layout.params = param_count();
    layout.counts_zeros = config_.optimizer.count_zeros;
    return layout;
  }

  /// What a step leaves for its report.
  StepReports::Result step_result() const {
    return {scalars_.memory().outcome, scalars_.norm_outcomes(), scalars_.param_sums(), param_sync_.status(),
            grad_sync_.local_status()};
  }

  /// The sums over all ranks, in a message for each of their groups: those of the param norms stay within a
  /// data-parallel group, and replicas have equal sums of gradients.
  void reduce_statistics(StreamRef stream) {
    const auto sum = [&](Communicator& comm, TypedSpan statistics) {
      Work work = comm.all_reduce(statistics, ReduceOp::kSum, Traffic::kStatistics, stream);
      work.join(stream);
      return work;
    };
    sum(comm_, scalars_.statistics());
    if (ranks_.replicas != nullptr) {
      reduced_elsewhere_[0] = sum(*ranks_.replicas, scalars_.own_statistics());
    }
    if (ranks_.model != nullptr) reduced_elsewhere_[1] = sum(*ranks_.model, scalars_.common_statistics());
  }

  /// Masters and moments become those of the first replica.
  void equalize_replicas(StreamRef stream) {
    if (ranks_.replicas == nullptr) return;
    for (int b = 0; b < static_cast<int>(layout().buckets().size()); ++b) {
      const std::int64_t elems = layout().shard_elems(b);
      const bool is_frozen = layout().bucket(b).family.frozen;
      for (float* state : {storage_.master(b), is_frozen ? nullptr : storage_.exp_avg(b),
                           is_frozen ? nullptr : storage_.exp_avg_sq(b)}) {
        if (state == nullptr) continue;
        ranks_.replicas->broadcast({state, DType::kFp32, elems}, 0, Traffic::kHighPrecision, stream)
            .join(stream);
      }
    }
  }

  /// Collective: throws on every rank that has others than a rank of one of its groups. Every rank makes all
  /// comparisons.
  void require_equal_options() {
    std::exception_ptr problem;
    for (Communicator* comm : {&comm_, ranks_.model, ranks_.replicas}) {
      if (comm == nullptr) continue;
      try {
        require_agreement(*comm, option_fields());
      } catch (const ContractError&) {
        if (!problem) problem = std::current_exception();
      }
    }
    if (problem) std::rethrow_exception(problem);
  }

  /// Collective: throws on every rank when a param has no initial value on one of them.
  void require_initialized() {
    std::vector<std::uint8_t> missing = locally_uninitialized();
    guarded({&comm_},
            [&] { all_reduce_on_host(comm_, std::span(missing), ReduceOp::kMax, Traffic::kControl); });
    const std::vector<std::string> names = names_with_status(missing, 1);
    std::uint8_t is_any_missing = names.empty() ? 0 : 1;
    guarded_step([&] {
      for (Communicator* comm : {ranks_.model, ranks_.replicas}) {
        if (comm == nullptr) continue;
        all_reduce_on_host(*comm, std::span(&is_any_missing, 1), ReduceOp::kMax, Traffic::kControl);
      }
    });
    if (is_any_missing == 0) return;
    if (names.empty()) {
      throw ContractError("publish: params of other model-parallel ranks or replicas have no initial value");
    }
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

  /// Names, in registration order, of the params whose gradients were found not finite before the reduction.
  std::vector<std::string> locally_nonfinite(std::span<const std::uint8_t> local_status) const {
    std::vector<int> params;
    for (std::size_t i = 0; i < local_status.size(); ++i) {
      if (local_status[i] != 0) params.push_back(grad_sync_.checked_params()[i]);
    }
    std::ranges::sort(params);
    std::vector<std::string> names;
    for (const int param : params) names.push_back(layout().param(param).name);
    return names;
  }

  /// From written shards to whole params on every rank. The list of messages never depends on the outcome.
  void share_written(SyncScope scope, StreamRef stream, PhaseTimes* ms, const StepOutcome* outcome) {
    const bool frozen_too = scope == SyncScope::kAll;
    PhaseClock clock;
    kernels_->share_scales(frozen_too, outcome, stream);
    param_sync_.gather_rows(scope, stream);
    const double rows = clock.lap();
    param_sync_.reduce_scales(scope, stream);
    kernels_->spread_cut_codes(frozen_too, outcome, stream);
    kernels_->cast_cut_bands(frozen_too, outcome, stream);
    const double scales = clock.lap();
    param_sync_.gather_columns(scope, stream);
    if (ms == nullptr) return;
    ms->scales = scales;
    ms->gather = rows + clock.lap();
  }

  bool is_host() const { return device_.kind == DeviceKind::kHost; }
  /// Ranks that the reduced gradients are still to be divided by.
  double grad_divisor() const {
    const bool is_mean = config_.optimizer.grad_reduce == GradReduce::kAverage;
    return is_mean && !ranks_.averages_in_reduction() ? static_cast<double>(ranks_.ranks_of_mean()) : 1;
  }
  bool divides_by_tokens() const { return config_.optimizer.grad_reduce == GradReduce::kTokens; }
  int part_count() const { return static_cast<int>(plan_.groups.parts.size()); }

  StepState initial_state() const {
    StepState state;
    state.loss_scale = initial_loss_scale(config_.optimizer.loss_scale);
    state.loss_factor = static_cast<float>(state.loss_scale.scale);
    return state;
  }

  StepOptions step_options() const {
    const OptimizerConfig& optimizer = config_.optimizer;
    StepOptions options;
    options.max_norm = optimizer.clip_grad;
    options.skip_norm = optimizer.skip_norm;
    options.decoupled = optimizer.kind == AdamKind::kAdamW;
    options.loss_scale_kind = optimizer.loss_scale.kind;
    options.min_loss_scale = optimizer.loss_scale.min;
    options.growth_interval = optimizer.loss_scale.growth_interval;
    options.hysteresis = optimizer.loss_scale.hysteresis;
    options.hash = options_hash();
    options.world_size = static_cast<int>(ranks_.ranks());
    options.model_parallel_ranks = ranks_.model == nullptr ? 0 : ranks_.model->size();
    options.grad_divisor = grad_divisor();
    options.divides_by_tokens = divides_by_tokens();
    options.groups = part_count();
    return options;
  }

  /// What the user changed since the last step. A device has a table of the whole schedules or of a
  /// piece that is long enough, since the host does not know which step it will take; on the host the next
  /// one is known and enough.
  void tell_changes(StreamRef stream) {
    if (is_taken_set_) scalars_.set_taken(steps_taken_, stream);
    if (!is_host() && !are_groups_changed_ && !is_taken_set_ && !is_next_step_missing()) return;
    is_taken_set_ = false;
    are_groups_changed_ = false;
    const std::int64_t last = last_change(config_.schedule);
    first_table_step_ = is_host() || last > table_steps_ ? steps_taken_ + 1 : 1;
    std::vector<GroupConstants> constants;
    std::vector<float> weight_decay, lr;
    for (const GroupPart& part : plan_.groups.parts) {
      const ParamGroup& group = plan_.groups.groups[index(part.group)];
      constants.push_back({{group.betas[0], group.betas[1]}, group.eps, group.norm});
      for (std::int64_t step = first_table_step_; step < first_table_step_ + table_steps_; ++step) {
        lr.push_back(static_cast<float>(scheduled_lr(config_.schedule, group.lr, step)));
        const double decay = scheduled_weight_decay(config_.schedule, group.weight_decay, step);
        weight_decay.push_back(part.has_decay ? static_cast<float>(decay) : 0);
      }
    }
    is_last_step_kept_ = first_table_step_ + table_steps_ > last;
    scalars_.set_groups({constants, weight_decay, lr, first_table_step_, is_last_step_kept_}, stream);
  }

  /// Whether the table could end before the next step: the host knows the taken steps of complete reports
  /// only.
  bool is_next_step_missing() const {
    return !is_last_step_kept_ &&
           steps_taken_ + StepReports::depth_of(device_) + 1 >= first_table_step_ + table_steps_;
  }

  std::vector<LayoutField> option_fields() const {
    std::ostringstream text;
    text << std::hexfloat << "steps_taken " << steps_taken_ << '\n';
    for (const ParamGroup& group : plan_.groups.groups) {
      const std::string name = "group '" + group.name + "' ";
      text << name << "lr " << group.lr.peak << " min_lr " << group.lr.floor << '\n'
           << name << "weight_decay " << group.weight_decay.start << " end_weight_decay "
           << group.weight_decay.end << '\n'
           << name << "betas " << group.betas[0] << ' ' << group.betas[1] << " eps " << group.eps << '\n';
    }
    return {{"hyper-parameters of the next step", text.str()}};
  }

  std::string options_differ_text() const {
    return "step: ranks hold different hyper-parameters or counts of taken steps, or model-parallel ranks of "
           "tokens, so "
           "the step was not taken; every rank must call set_lr, set_weight_decay, set_betas and "
           "set_steps_taken with the "
           "same values before the same step. This rank: " +
           option_fields().front().text;
  }

  std::int64_t options_hash() const {
    std::uint64_t hash = 1;
    for (const ParamGroup& group : plan_.groups.groups) {
      for (const double value : {group.lr.peak, group.lr.floor, group.weight_decay.start,
                                 group.weight_decay.end, group.betas[0], group.betas[1], group.eps}) {
        hash = hash_number(value, hash);
      }
    }
    return static_cast<std::int64_t>(hash);
  }

  void complete_record(StepRecord& record, const StepReports::Result& result) {
    const StepOutcome& outcome = *result.outcome;
    const StepState& after = outcome.after;
    // Reports may be read in any order.
    if (after.calls >= calls_) {
      calls_ = after.calls;
      steps_taken_ = after.taken;
    }
    record.taken = outcome.taken;
    record.skip_reason = outcome.skip_reason;
    record.step = after.taken;
    record.calls = after.calls;
    record.consecutive_skips = after.consecutive_skips;
    record.skipped_total = after.skipped_total;
    record.grad_norm = outcome.grad_norm;
    record.clip_factor = outcome.clip_factor;
    for (std::size_t i = 0; i < result.norms.size(); ++i) {
      record.norm_groups.push_back(
          {plan_.groups.norms[i + 1].name, result.norms[i].grad_norm, result.norms[i].clip_factor});
    }
    if (config_.optimizer.count_zeros) record.zero_grads = outcome.zero_grads;
    const double divisor = outcome.loss_scale *
                           static_cast<double>(divides_by_tokens() ? counted(outcome.tokens) : 1) *
                           grad_divisor();
    for (std::size_t p = 0; p < result.params.size(); ++p) {
      const ParamLayout& param = layout().params()[p];
      if (param.tied_to >= 0 || param.family.frozen) continue;
      const ParamSums& sums = result.params[p];
      record.param_norms.push_back({param.name, reported_norm(sums.grad, sums.nonfinite_grad_runs, divisor),
                                    reported_norm(sums.master, sums.nonfinite_master_runs, 1)});
    }
    record.loss_scale = outcome.loss_scale;
    record.tokens = outcome.tokens;
    record.next_loss_scale = after.loss_scale.scale;
    record.lr = scheduled_lr(config_.schedule, {record.lr, plan_.groups.groups[0].lr.floor},
                             outcome.taken ? after.taken : after.taken + 1);
    record.nonfinite_gradient_params = names_with_status(result.status, kStatusNonFiniteGradient);
    record.nonfinite_master_params = names_with_status(result.status, kStatusNonFiniteMaster);
    record.nonfinite_gradient_rank = outcome.nonfinite_rank;
    record.local_nonfinite_params = locally_nonfinite(result.local_status);

    if (outcome.options_differ) throw ContractError(options_differ_text());
    if (outcome.are_tokens_missing) {
      throw ContractError(
          "step: gradients are not zero, but no rank has counted a token, so the step was not taken; with "
          "optimizer.grad_reduce tokens, call add_tokens() with those of each micro-batch");
    }
    if (outcome.is_step_missing) {
      throw ContractError(
          "step: the replays of a captured step went on behind the " + std::to_string(table_steps_) +
          " steps for which the device has learning rates and weight decays, so the step was not taken; "
          "capture again after a call of step()");
    }
    if (chain_role_ == ChainRole::kNone) require_few_skips(record, config_.optimizer);
  }

  template <class Change>
  void for_groups(std::string_view name, const Change& change) {
    are_groups_changed_ = true;
    if (name != "*") return change(plan_.groups.find(name));
    for (ParamGroup& group : plan_.groups.groups) change(group);
  }

  /// The step that is being made.
  struct Underway {
    StepRecord record;
    PhaseClock clock;
    bool is_captured = false;
  };

  Config config_;
  ParallelGroups ranks_;
  Communicator& comm_;  // the data-parallel ones
  Device device_;
  std::unique_ptr<Groundwork> groundwork_;
  Plan& plan_;
  const ParamStorage& storage_;
  std::shared_ptr<Allocator> allocator_;
  ParamSync param_sync_;
  GradSync grad_sync_;
  std::vector<Segment> segments_;
  std::vector<int> segment_of_;  // [params] index into segments_, -1 for none
  std::unique_ptr<StepKernels> kernels_;
  std::vector<InitialCoverage> coverage_;  // [params]
  std::int64_t table_steps_;
  StepScalars scalars_;
  StepReports reports_;
  std::vector<std::string> group_names_;
  ConstructionReport report_;
  std::array<Work, 2> reduced_elsewhere_;  // of the statistics, over replicas and model-parallel ranks
  Underway underway_;
  bool was_captured_ = false;
  std::shared_ptr<const Event> copied_;  // null: nothing is being copied
  Event last_;                           // the end of the newest call that enqueued work
  bool published_ = false;
  ChainRole chain_role_ = ChainRole::kNone;
  std::int64_t first_table_step_ = 1;
  bool is_last_step_kept_ = true;
  bool are_groups_changed_ = true;
  bool is_taken_set_ = false;
  bool are_tokens_told_ = false;              // since the last step
  std::int64_t steps_taken_ = 0, calls_ = 0;  // of the newest report that is complete
};

DistributedAdam::DistributedAdam(std::vector<ParamSpec> specs, const Config& config,
                                 const ParallelGroups& ranks, Device device,
                                 std::shared_ptr<Allocator> allocator) {
  std::exception_ptr failure;
  std::string problem;
  // Keeps the first failure: it is thrown when all ranks know that there is one.
  const auto attempt = [&](const auto& body) {
    try {
      body();
    } catch (const PeerError&) {
      throw;
    } catch (const std::exception& error) {
      if (failure) return;
      failure = std::current_exception();
      problem = text_of(error);
    }
  };
  attempt([&] {
    std::unique_ptr<Groundwork> groundwork =
        lay_groundwork(std::move(specs), config, ranks, device, allocator);
    agreed(*ranks.data, [&] {
      impl_ = std::make_unique<Impl>(std::move(groundwork), config, ranks, device, std::move(allocator));
    });
  });
  // All ranks of the data-parallel group know by now; the others are told.
  if (ranks.replicas != nullptr) {
    attempt([&] {
      const Plan* const plan = failure ? nullptr : &impl_->plan();
      require_equal_replicas(*ranks.replicas, plan, config, ranks, problem);
    });
  }
  if (ranks.model != nullptr) {
    attempt([&] {
      const LayoutField field = {"construction", problem};
      require_agreement(*ranks.model, std::span(&field, 1));
    });
  }
  if (failure) std::rethrow_exception(failure);
}

DistributedAdam::~DistributedAdam() {
  // Kernels of a transport that wait for a lost peer still use the memory, and freeing it would wait for
  // them; a late rank may still store into it.
  if (!impl_->settle() && impl_->is_memory_in_use()) static_cast<void>(impl_.release());
}

StepPhases& DistributedAdam::phases() {
  return *impl_;
}

StateAccess& DistributedAdam::state() {
  return *impl_;
}

void DistributedAdam::require_unchained(std::string_view call) const {
  MXOPT_CHECK(impl_->chain_role() == ChainRole::kNone,
              call << ": this optimizer is one of a chain; call that of the chain");
}

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
void DistributedAdam::add_tokens(std::int64_t count, StreamRef stream) {
  impl_->add_tokens(count, {}, stream);
}
void DistributedAdam::add_tokens(std::span<const std::int64_t> count, StreamRef stream) {
  MXOPT_CHECK(count.size() == 1 && count.data() != nullptr,
              "add_tokens: " << count.size() << " numbers; allowed is 1");
  impl_->add_tokens(0, count, stream);
}
StepReport DistributedAdam::step(StreamRef stream) {
  require_unchained("step");
  return impl_->step(stream);
}

StepReport DistributedAdam::last_report(StreamRef stream) {
  require_unchained("last_report");
  return impl_->last_report(stream);
}

ParamView DistributedAdam::wait_param(std::string_view name, Plane plane, StreamRef stream) {
  return impl_->wait_param(name, plane, stream);
}

void DistributedAdam::require_current(std::string_view name, const ParamView& view, Plane plane) const {
  impl_->require_current(name, view, plane);
}

void DistributedAdam::done_reading(StreamRef stream) {
  impl_->done_reading(stream);
}

std::span<const float> DistributedAdam::loss_scale() const {
  return impl_->loss_scale();
}
std::span<const std::string> DistributedAdam::groups() const {
  return impl_->group_names();
}
void DistributedAdam::set_lr(std::string_view group, double value) {
  impl_->set_lr(group, value);
}
void DistributedAdam::set_weight_decay(std::string_view group, double value) {
  impl_->set_weight_decay(group, value);
}
void DistributedAdam::set_betas(double beta1, double beta2) {
  impl_->set_betas("*", beta1, beta2);
}
void DistributedAdam::set_betas(std::string_view group, double beta1, double beta2) {
  impl_->set_betas(group, beta1, beta2);
}
void DistributedAdam::save(const std::filesystem::path& dir) {
  CheckpointConfig config = impl_->config().checkpoint;
  if (!dir.empty()) config.dir = dir.string();
  config.async = false;
  Checkpointer(*this, config).save();
}

void DistributedAdam::load(const std::filesystem::path& dir) {
  Checkpointer(*this, impl_->config().checkpoint).load(dir);
}

std::vector<std::string> DistributedAdam::import_weights(std::span<const std::filesystem::path> files) {
  return impl_->import_weights(files);
}

std::int64_t DistributedAdam::steps_taken() const {
  return impl_->steps_taken();
}
void DistributedAdam::set_steps_taken(std::int64_t steps) {
  require_unchained("set_steps_taken");
  impl_->set_steps_taken(steps);
}

}  // namespace mxopt
