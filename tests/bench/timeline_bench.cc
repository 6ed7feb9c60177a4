// Where the time of a step goes between ranks: one process per GPU under mpirun, with NCCL, or W = 1 alone.
//
//   timeline_bench [--repeats 20] [--forward-ms 12] [--json FILE] [--commit TEXT]
//
// The list is that of four layers of Llama-3-8B, both planes, fp32 and bf16 gradients.
//
//   phases    one after the other on one stream, each between two events, with the device busy until the host
//             has queued them all: reduce-scatter, statistics (squares, their sum over ranks, the decision),
//             update (zeroing of scales and fused update), row gather, MAX, cut bands, column gather; serial:
//             from the first event to the last.
//             cycle: backward, step and forward, where the reductions run beside the backward pass and
//             the gathers beside the forward pass; computing is a kernel that only takes time, 2/3 of it
//             in the backward pass. compute: the same without an optimizer. exposed: the median of cycle less
//             that of compute, so the passes of the step, and what of the messages nothing hides. The best
//             case: the stand-in for computation leaves all of the memory's bandwidth to others.
//             gather: all planes, in the library's way (mxopt), and by ncclAllGather in place on the same
//             communicator and the same pieces (nccl); the host's time to queue them counts.
//   bytes     what the rank moves through memory (update, statistics, cut bands), or what a ring sends of
//             it: (W - 1) / W of the buffers for reduce-scatter and gathers, twice that for MAX; none at
//             W = 1. Column bytes of cut bands are those of cut bands, not of the update.
//   wrong     serial: the phases stand in this program a second time, so masters, moments, plane and scale
//             bytes after one step of theirs are compared with those of DistributedAdam with the same
//             values, all of them, on the list of odd shapes. gather: plane bytes that are not those of
//             their owner. Both of all ranks. Else nothing is compared here (step_bench does).
//   times     those of the slowest rank.
#include <algorithm>
#include <cstdint>
#include <functional>
#include <iostream>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <cuda_runtime.h>
#if MXOPT_BENCH_HAS_NCCL
#include <nccl.h>
#endif

#include "bench/bench_world.h"
#include "bench/busy_cuda.h"
#include "bench/cuda_measurements.h"
#include "bench/cuda_timer.h"
#include "bench/initial_masters.h"
#include "bench/measurements.h"
#include "bench/param_lists.h"
#include "bench/random_values.h"
#include "bench/table.h"

#include "mxopt/collectives/self_communicator.h"
#include "mxopt/optimizer/distributed_adam.h"
#include "mxopt/optimizer/grad_sync.h"
#include "mxopt/optimizer/param_sync.h"
#include "mxopt/optimizer/step_scalars.h"
#include "mxopt/optimizer/step_tables.h"
#if MXOPT_BENCH_HAS_NCCL
#include "mxopt/collectives/nccl_communicator.h"
#endif

namespace {

using namespace mxopt;

constexpr double kTimeoutS = 60;

#if MXOPT_BENCH_HAS_NCCL
void check_nccl(ncclResult_t result) {
  if (result != ncclSuccess) throw std::runtime_error(std::string("NCCL: ") + ncclGetErrorString(result));
}

/// NCCL's communicator of all ranks: the bare calls and the library's use the same one.
class BareNccl {
 public:
  explicit BareNccl(const bench::World& world) {
    ncclUniqueId id{};
    if (world.rank() == 0) check_nccl(ncclGetUniqueId(&id));
    world.broadcast(&id, sizeof(id));
    check_nccl(ncclCommInitRank(&comm_, world.size(), id, world.rank()));
  }
  ~BareNccl() { ncclCommDestroy(comm_); }
  BareNccl(const BareNccl&) = delete;
  BareNccl& operator=(const BareNccl&) = delete;
  ncclComm_t get() const { return comm_; }

 private:
  ncclComm_t comm_ = nullptr;
};
#endif

/// What a step leaves of one param, on the host.
class StateOfParam {
 public:
  StateOfParam(Device device, StreamRef stream) : device_(device), stream_(stream) {}

  void add_owned(std::span<const float> master, std::span<const float> exp_avg,
                 std::span<const float> exp_avg_sq) {
    for (const std::span<const float> values : {master, exp_avg, exp_avg_sq}) {
      const std::size_t begin = words_.size();
      words_.resize(begin + values.size());
      copy_bytes(words_.data() + begin, values.data(), static_cast<std::int64_t>(values.size_bytes()),
                 device_, stream_);
      synchronize(device_, stream_);
    }
  }
  void add_planes(const MxView& planes) {
    const std::int64_t elems = planes.rows * planes.cols;
    add_bytes(planes.row_data, elems);
    add_bytes(planes.row_scales, row_scale_bytes(planes.rows, planes.cols));
    add_bytes(planes.column_data, elems);
    add_bytes(planes.column_scales, column_scale_bytes(planes.rows, planes.cols));
  }

  /// Values and bytes that are others.
  std::int64_t count_wrong(const StateOfParam& expected) const {
    return differing(words_, expected.words_) + differing(bytes_, expected.bytes_);
  }

 private:
  void add_bytes(const std::uint8_t* data, std::int64_t count) {
    const std::size_t begin = bytes_.size();
    bytes_.resize(begin + static_cast<std::size_t>(count));
    copy_bytes(bytes_.data() + begin, data, count, device_, stream_);
    synchronize(device_, stream_);
  }
  template <class T>
  static std::int64_t differing(const std::vector<T>& a, const std::vector<T>& b) {
    if (a.size() != b.size())
      throw std::logic_error("a param's state has another size than DistributedAdam's");
    std::int64_t count = 0;
    for (std::size_t i = 0; i < a.size(); ++i) count += a[i] != b[i] ? 1 : 0;
    return count;
  }

  Device device_;
  StreamRef stream_;
  std::vector<std::uint32_t> words_;  // bits of masters and moments: the sign of a zero counts
  std::vector<std::uint8_t> bytes_;
};

/// The parts that DistributedAdam puts together, with every phase in reach.
class StepParts {
 public:
  StepParts(const bench::ParamList& list, DType grad_dtype, Communicator& comm, StreamRef stream)
      : comm_(comm),
        stream_(stream),
        layout_(bench::specs_of(list, Storage::kBoth, GradMode::kOverwrite), options(comm.size())),
        storage_(layout_, grad_dtype, static_cast<std::int64_t>(layout_.params().size()), comm.device(),
                 allocator()),
        sync_(layout_, storage_, comm, GatherFormat::kQuantized, {}, {}, ScaleLayout::kCompact, allocator()),
        grads_(layout_, storage_, comm),
        tables_(make_step_tables(layout_, storage_, sync_, std::vector<int>(layout_.params().size(), 0),
                                 comm.rank())),
        kernels_(StepKernels::make(tables_, comm.device())),
        scalars_(1, 1, initial_state(), comm.device(), allocator()) {
    const GroupConstants constants = {{0.9, 0.95}, 1e-8};
    const float weight_decay = 0.1f, lr = 3e-4f;
    scalars_.set_groups({{&constants, 1}, {&weight_decay, 1}, {&lr, 1}}, stream);
    const bench::RandomValues masters(DType::kFp32, 0, comm.device(), stream);
    const bench::RandomValues grads(grad_dtype, 0, comm.device(), stream);
    for (const SegmentRow& row : tables_.segments) {
      masters.copy_to(row.master, row.elems, stream);
      owned_elems_ += row.elems;
    }
    for (const ParamLayout& param : layout_.params()) {
      const TypedSpan grad = storage_.gradients(param.bucket).sub(param.bucket_begin, param.elems());
      grads.copy_to(grad.data, grad.elems, stream);
    }
    for (const CutBand& band : layout_.cut_bands(comm.rank()))
      cut_elems_ += band.param_end - band.param_begin;
  }

  const Layout& layout() const { return layout_; }
  const ParamStorage& storage() const { return storage_; }
  int bucket_count() const { return static_cast<int>(layout_.buckets().size()); }

  struct Phase {
    const char* name;
    std::int64_t bytes;
    std::function<void()> run;
  };
  std::vector<Phase> phases() {
    const std::int64_t grad_bytes = dtype_bytes(storage_.grad_dtype());
    const std::int64_t planes = layout_.row_plane_elems();
    const std::int64_t maxed = storage_.scale_head_bytes() + layout_.trainable_scale_bytes();
    const StepMemory& memory = scalars_.memory();
    return {
        {"reduce-scatter", ring_bytes(layout_.grad_elems() * grad_bytes),
         [this] {
           grads_.begin_backward(true);
           for (int p = 0; p < static_cast<int>(layout_.params().size()); ++p) grads_.ready(p, stream_);
           grads_.finish(stream_);
         }},
        {"statistics", owned_elems_ * grad_bytes,
         [this, &memory] {
           sync_.open(stream_);
           kernels_->open_statistics(memory, 0, stream_);
           kernels_->grad_stats(memory.statistics, stream_);
           comm_.all_reduce(scalars_.statistics(), ReduceOp::kSum, Traffic::kStatistics, stream_)
               .join(stream_);
           const StepPart part = {memory, step_options()};
           kernels_->decide({&part, 1}, stream_);
         }},
        {"update", owned_elems_ * (26 + grad_bytes) - cut_elems_,
         [this, &memory] {
           kernels_->clear(sync_.scales_to_clear(SyncScope::kTrainable), memory.outcome, stream_);
           kernels_->fused_update({memory.scalars, 1}, memory.outcome, stream_);
           grads_.reset(stream_);
         }},
        {"row gather", ring_bytes(planes), [this] { gather(Plane::kRow); }},
        {"MAX", 2 * ring_bytes(maxed), [this] { sync_.reduce_scales(SyncScope::kTrainable, stream_); }},
        {"cut bands", 5 * cut_elems_,
         [this, &memory] { kernels_->cast_cut_bands(false, memory.outcome, stream_); }},
        {"column gather", ring_bytes(planes), [this] { gather(Plane::kColumn); }},
    };
  }

  /// All planes of one kind, and the wait for them.
  void gather(Plane plane) {
    if (plane == Plane::kRow) {
      sync_.gather_rows(SyncScope::kTrainable, stream_);
    } else {
      sync_.gather_columns(SyncScope::kTrainable, stream_);
    }
    join(plane);
  }
  /// Both kinds as a step issues them, and the wait for all.
  void gather_all() {
    sync_.gather_rows(SyncScope::kTrainable, stream_);
    sync_.gather_columns(SyncScope::kTrainable, stream_);
    join(Plane::kRow);
    join(Plane::kColumn);
  }

  std::int64_t ring_bytes(std::int64_t bytes) const { return bytes / comm_.size() * (comm_.size() - 1); }

  /// Of one param.
  StateOfParam state(int param) const {
    StateOfParam state(comm_.device(), stream_);
    // One row of the tables for each, in order.
    const std::vector<Segment> segments = layout_.segments(comm_.rank());
    for (std::size_t i = 0; i < segments.size(); ++i) {
      const SegmentRow& row = tables_.segments[i];
      const auto elems = static_cast<std::size_t>(row.elems);
      if (segments[i].param == param) {
        state.add_owned({row.master, elems}, {row.exp_avg, elems}, {row.exp_avg_sq, elems});
      }
    }
    state.add_planes(sync_.planes(param));
    return state;
  }

  bool was_taken() const {
    StepOutcome outcome;
    copy_bytes(&outcome, scalars_.memory().outcome, sizeof(outcome), comm_.device(), stream_);
    synchronize(comm_.device(), stream_);
    return outcome.taken;
  }

 private:
  static LayoutOptions options(int world_size) {
    LayoutOptions options;
    options.world_size = world_size;
    return options;
  }
  std::shared_ptr<Allocator> allocator() const { return default_allocator(comm_.device()); }
  static StepState initial_state() {
    StepState state;
    state.loss_scale = initial_loss_scale(LossScaleConfig());
    return state;
  }
  StepOptions step_options() const {
    StepOptions options;
    options.max_norm = 1;
    options.world_size = comm_.size();
    options.groups = 1;
    return options;
  }
  void join(Plane plane) {
    for (int b = 0; b < bucket_count(); ++b) sync_.wait(layout_.bucket(b).params.front(), plane, stream_);
  }

  Communicator& comm_;
  StreamRef stream_;
  Layout layout_;
  ParamStorage storage_;
  ParamSync sync_;
  GradSync grads_;
  StepTables tables_;
  std::unique_ptr<StepKernels> kernels_;
  StepScalars scalars_;
  std::int64_t owned_elems_ = 0, cut_elems_ = 0;
};

/// What all rows of this program have in common.
class Rows {
 public:
  Rows(const bench::ParamList& list, DType grad_dtype, const bench::World& world, bench::Measurements& rows)
      : world_(world),
        rows_(rows),
        row_{
            .workload = list.name, .shape = list.shape_name(), .dtype = std::string(dtype_name(grad_dtype))} {
    row_.planes = "both";
    row_.fraction = 1.0 / world.size();
    row_.world_size = world.size();
  }

  /// Without bytes, or without any, there is no rate.
  void add(const std::string& phase, std::int64_t bytes, const bench::Times& times,
           const std::string& implementation = "mxopt", std::optional<std::int64_t> wrong = {}) {
    row_.phase = phase;
    row_.has_minimum = true;
    row_.bytes = bytes > 0 ? std::optional(bytes) : std::nullopt;
    row_.times = world_.slowest(times);
    row_.implementation = implementation;
    row_.wrong_elements = wrong;
    rows_.add(row_);
  }
  /// A difference of medians, which has no minimum.
  void add_median(const std::string& phase, double ms) {
    row_.phase = phase;
    row_.has_minimum = false;
    row_.bytes = {};
    row_.times = world_.slowest({0, ms, 0});
    row_.implementation = "mxopt";
    row_.wrong_elements = {};
    rows_.add(row_);
  }

 private:
  const bench::World& world_;
  bench::Measurements& rows_;
  bench::Measurement row_;
};

Config config_of(DType grad_dtype) {
  Config config;
  config.parallel.gather = GatherChoice::kCollective;  // as the phases above
  config.optimizer.grad_dtype = grad_dtype;
  config.parallel.device = DeviceChoice::kCuda;
  config.parallel.timeout_s = kTimeoutS;
  return config;
}

/// What one step of StepParts leaves in another way than one of DistributedAdam with the same values, on this
/// rank.
std::int64_t count_wrong_state(DType grad_dtype, Communicator& comm, StreamRef stream) {
  const bench::ParamList list = bench::odd_shapes();
  std::vector<StateOfParam> got;
  {
    StepParts parts(list, grad_dtype, comm, stream);
    for (const StepParts::Phase& phase : parts.phases()) phase.run();
    if (!parts.was_taken()) throw std::runtime_error("a step was not taken");
    for (int p = 0; p < static_cast<int>(list.shapes.size()); ++p) got.push_back(parts.state(p));
  }

  DistributedAdam opt(bench::specs_of(list, Storage::kBoth, GradMode::kOverwrite), config_of(grad_dtype),
                      comm, comm.device());
  // As StepParts fills a rank's part: from its first element on.
  const bench::RandomValues masters(DType::kFp32, 0, comm.device(), stream);
  bench::set_masters(opt, masters, stream);
  const bench::RandomValues grads(grad_dtype, 0, comm.device(), stream);
  const std::span<const ParamLayout> params = opt.layout().params();
  for (const ParamLayout& param : params) {
    const TypedSpan grad = opt.grad(param.name).data;
    grads.copy_to(grad.data, grad.elems, stream);
  }
  opt.publish(stream);
  opt.begin_backward();
  for (const ParamLayout& param : params) opt.grad_ready(param.name, stream);
  opt.step(stream);
  std::int64_t wrong = 0;
  for (std::size_t p = 0; p < params.size(); ++p) {
    opt.wait_param(params[p].name, Plane::kRow, stream);
    const ParamView view = opt.wait_param(params[p].name, Plane::kColumn, stream);
    const OwnedSlice slice = opt.owned(params[p].name);
    StateOfParam expected(comm.device(), stream);
    expected.add_owned(slice.master, slice.exp_avg, slice.exp_avg_sq);
    expected.add_planes(view.planes);
    wrong += got[p].count_wrong(expected);
  }
  return wrong;
}

void measure_phases(StepParts& parts, std::int64_t wrong, int repeats, StreamRef stream, Device device,
                    Rows& rows) {
  constexpr int kWarmUps = 3;
  std::vector<StepParts::Phase> phases = parts.phases();
  std::vector<std::vector<double>> samples_ms(phases.size() + 1);
  std::vector<bench::TimedEvent> marks(phases.size() + 1);
  for (int i = 0; i < kWarmUps + repeats; ++i) {
    bench::keep_busy(bench::kHeadStartUs, stream);
    marks[0].record(stream);
    for (std::size_t p = 0; p < phases.size(); ++p) {
      phases[p].run();
      marks[p + 1].record(stream);
    }
    synchronize(device, stream);
    if (i < kWarmUps) continue;
    for (std::size_t p = 0; p < phases.size(); ++p) {
      samples_ms[p].push_back(marks[p + 1].ms_since(marks[p]));
    }
    samples_ms.back().push_back(marks.back().ms_since(marks[0]));
  }
  if (!parts.was_taken()) throw std::runtime_error("a step was not taken");
  for (std::size_t p = 0; p < phases.size(); ++p) {
    rows.add(phases[p].name, phases[p].bytes, bench::statistics(std::move(samples_ms[p])));
  }
  rows.add("serial", 0, bench::statistics(std::move(samples_ms.back())), "mxopt", wrong);
}

/// The byte that the owner of element i of all buckets writes there.
std::uint8_t expected_byte(std::int64_t i, Plane plane) {
  const auto x = static_cast<std::uint64_t>(i) * 0x9E3779B97F4A7C15u + (plane == Plane::kRow ? 0 : 1);
  return static_cast<std::uint8_t>(x >> 56);
}

/// All bytes of the planes that are not those of their owner, after `gather`.
std::int64_t count_wrong(const StepParts& parts, const Communicator& comm, StreamRef stream,
                         const std::function<void()>& gather) {
  const Layout& layout = parts.layout();
  const auto plane_of = [&](int b, Plane plane) {
    return plane == Plane::kRow ? parts.storage().row_plane(b) : parts.storage().column_plane(b);
  };
  std::vector<std::uint8_t> bytes;
  const auto fill = [&](std::int64_t count, std::int64_t first, Plane plane) {
    bytes.resize(static_cast<std::size_t>(count));
#if defined(_OPENMP)
#pragma omp parallel for schedule(static)
#endif
    for (std::int64_t i = 0; i < count; ++i) {
      bytes[static_cast<std::size_t>(i)] = expected_byte(first + i, plane);
    }
  };
  for (int b = 0; b < parts.bucket_count(); ++b) {
    for (const Plane plane : {Plane::kRow, Plane::kColumn}) {
      const TypedSpan whole = plane_of(b, plane);
      const std::int64_t begin = layout.shard_begin(b, comm.rank());
      fill(layout.shard_elems(b), layout.bucket(b).value_begin + begin, plane);
      fill_zero(whole.data, whole.bytes(), comm.device(), stream);
      copy_bytes(whole.byte_data() + begin, bytes.data(), layout.shard_elems(b), comm.device(), stream);
      synchronize(comm.device(), stream);
    }
  }
  gather();
  std::int64_t wrong = 0;
  std::vector<std::uint8_t> got;
  for (int b = 0; b < parts.bucket_count(); ++b) {
    for (const Plane plane : {Plane::kRow, Plane::kColumn}) {
      const TypedSpan whole = plane_of(b, plane);
      fill(whole.elems, layout.bucket(b).value_begin, plane);
      got.resize(bytes.size());
      copy_bytes(got.data(), whole.data, whole.bytes(), comm.device(), stream);
      synchronize(comm.device(), stream);
#if defined(_OPENMP)
#pragma omp parallel for schedule(static) reduction(+ : wrong)
#endif
      for (std::int64_t i = 0; i < whole.elems; ++i) {
        wrong += got[static_cast<std::size_t>(i)] != bytes[static_cast<std::size_t>(i)];
      }
    }
  }
  return wrong;
}

void measure_gathers(StepParts& parts, Communicator& comm, const bench::World& world, int repeats,
                     StreamRef stream, [[maybe_unused]] void* native_comm, Rows& rows) {
  const std::int64_t bytes = 2 * parts.ring_bytes(parts.layout().row_plane_elems());
  const auto measure = [&](const std::string& implementation, const std::function<void()>& gather) {
    const std::int64_t wrong = world.sum(count_wrong(parts, comm, stream, gather));
    rows.add("gather", bytes, bench::measure_on_device(repeats, stream, [&](int) { gather(); }),
             implementation, wrong);
  };
  measure("mxopt", [&] { parts.gather_all(); });
#if MXOPT_BENCH_HAS_NCCL
  measure("nccl", [&] {
    for (const Plane plane : {Plane::kRow, Plane::kColumn}) {
      check_nccl(ncclGroupStart());
      for (int b = 0; b < parts.bucket_count(); ++b) {
        const TypedSpan whole =
            plane == Plane::kRow ? parts.storage().row_plane(b) : parts.storage().column_plane(b);
        const auto shard = static_cast<std::size_t>(parts.layout().shard_elems(b));
        check_nccl(ncclAllGather(whole.byte_data() + static_cast<std::size_t>(comm.rank()) * shard,
                                 whole.data, shard, ncclUint8, static_cast<ncclComm_t>(native_comm),
                                 cuda::native(stream)));
      }
      check_nccl(ncclGroupEnd());
    }
  });
#endif
}

/// Times of a training iteration without and with an optimizer.
void measure_cycle(const bench::ParamList& list, DType grad_dtype, Communicator& comm, int repeats,
                   double forward_ms, StreamRef stream, Rows& rows) {
  DistributedAdam opt(bench::specs_of(list, Storage::kBoth, GradMode::kOverwrite), config_of(grad_dtype),
                      comm, comm.device());
  const bench::RandomValues masters(DType::kFp32, 0, comm.device(), stream);
  const bench::RandomValues grads(grad_dtype, 0, comm.device(), stream);
  std::int64_t elems = 0;
  for (const ParamLayout& param : opt.layout().params()) {
    const std::int64_t period = masters.period().elems;
    for (std::int64_t begin = 0; begin < param.elems(); begin += period) {
      opt.set_initial(param.name, begin, masters.period().sub(0, std::min(period, param.elems() - begin)),
                      stream);
    }
    const TypedSpan grad = opt.grad(param.name).data;
    grads.copy_to(grad.data, grad.elems, stream);
    elems += param.elems();
  }
  opt.publish(stream);

  const std::span<const ParamLayout> params = opt.layout().params();
  const auto forward_us = [&](const ParamLayout& param) {
    return 1000 * forward_ms * static_cast<double>(param.elems()) / static_cast<double>(elems);
  };
  const auto compute = [&](int) {
    for (auto param = params.rbegin(); param != params.rend(); ++param) {
      bench::keep_busy(2 * forward_us(*param), stream);
    }
    for (const ParamLayout& param : params) bench::keep_busy(forward_us(param), stream);
  };
  const auto cycle = [&](int) {
    opt.begin_backward();
    for (auto param = params.rbegin(); param != params.rend(); ++param) {
      opt.wait_param(param->name, Plane::kColumn, stream);
      bench::keep_busy(2 * forward_us(*param), stream);
      opt.grad_ready(param->name, stream);
    }
    opt.step(stream);
    for (const ParamLayout& param : params) {
      opt.wait_param(param.name, Plane::kRow, stream);
      bench::keep_busy(forward_us(param), stream);
    }
  };
  const bench::Times alone = bench::measure_on_device(repeats, stream, compute);
  const bench::Times together = bench::measure_on_device(repeats, stream, cycle);
  rows.add("compute", 0, alone);
  rows.add("cycle", 0, together);
  rows.add_median("exposed", together.p50_ms - alone.p50_ms);
}

void run(int argc, char** argv) {
  const int repeats = std::stoi(bench::option(argc, argv, "--repeats", "20"));
  const double forward_ms = std::stod(bench::option(argc, argv, "--forward-ms", "12"));
  const bench::World world(argc, argv);
  const Device device = world.device();
  MXOPT_CUDA_CHECK(cudaSetDevice(device.index));
  const Stream stream(device);
  bench::Measurements rows =
      bench::start_measurements(argc, argv, device, stream.ref(), world.size(), world.rank());
#if MXOPT_BENCH_HAS_NCCL
  const BareNccl bare(world);
  void* const native_comm = bare.get();
  const std::unique_ptr<Communicator> comm = NcclCommunicator::borrow(bare.get(), kTimeoutS);
#else
  if (world.size() > 1) throw std::runtime_error("several ranks need NCCL, which this build has not");
  void* const native_comm = nullptr;
  const std::unique_ptr<Communicator> comm = std::make_unique<SelfCommunicator>(device);
#endif
  if (world.rank() == 0) std::cout << comm->describe() << '\n';
  const bench::ParamList list = bench::llama_8b();
  for (const DType grad_dtype : {DType::kFp32, DType::kBf16}) {
    Rows rows_of_type(list, grad_dtype, world, rows);
    const std::int64_t wrong = world.sum(count_wrong_state(grad_dtype, *comm, stream.ref()));
    {
      StepParts parts(list, grad_dtype, *comm, stream.ref());
      measure_phases(parts, wrong, repeats, stream.ref(), device, rows_of_type);
      if (grad_dtype == DType::kFp32) {
        measure_gathers(parts, *comm, world, repeats, stream.ref(), native_comm, rows_of_type);
      }
    }
    measure_cycle(list, grad_dtype, *comm, repeats, forward_ms, stream.ref(), rows_of_type);
  }
  if (world.rank() == 0) bench::write_json(rows, argc, argv);
}

}  // namespace

int main(int argc, char** argv) {
  return mxopt::bench::run_program("timeline_bench", run, argc, argv);
}
