// What a gather costs that rides in the update: stores into the peers' planes against all-gathers. Under
// mpirun, one process per GPU; alone, only the update can be measured.
//
//   direct_gather_bench [--repeats 20] [--json FILE] [--commit TEXT]
//
//   workloads  a matrix of which each rank owns 134,217,728 elements, with compact and with swizzled
//              scales; the matrices of four layers of Llama-3-8B; wide and short matrices, a bucket each, of
//              which 39 % lie in cut bands at W = 2.
//   phases     between two events, ranks in step before the first: update: the fused update alone, with no
//   peer.
//              update, collective: zeroing of the scales, update, row gathers, MAX, cut bands, column
//              gathers, and the wait for all of it. update, direct: the update that stores to the peers too,
//              the scales to the peers, MAX, cut bands, the closing reduction, and the wait for all of it.
//              stores to 1, 3, 7: that update and the scales, each byte stored to so many places of the next
//              rank, as at W = 2, 4, 8, with nothing behind it. Then, for groups of other sizes in which a
//              rank owns as much, what follows from this run, and what kAuto chooses there: "model, direct"
//              is the larger of the measured update and W - 1 times the bytes at the measured rate of the
//              link; "model, gather" the update and W - 1 times what the all-gather took behind it, of which
//              a forward pass may hide a part.
//   bytes      of the rank, through its own memory: gradients, master and moments, planes and values; in
//              "stores" and in the models what leaves over the link, scales included.
//   wrong      plane and scale bytes after an update that are not the same as after one with all-gathers, on
//              all ranks.
//   times      those of the slowest rank.
#include <algorithm>
#include <cstdint>
#include <iostream>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <cuda_runtime.h>

#include "bench/bench_world.h"
#include "bench/busy_cuda.h"
#include "bench/cuda_measurements.h"
#include "bench/cuda_timer.h"
#include "bench/measurements.h"
#include "bench/param_lists.h"
#include "bench/random_values.h"
#include "bench/table.h"

#include "mxopt/collectives/make_communicator.h"
#include "mxopt/optimizer/gather_plan.h"
#include "mxopt/optimizer/loss_scale.h"
#include "mxopt/optimizer/param_sync.h"
#include "mxopt/optimizer/step_scalars.h"
#include "mxopt/optimizer/step_tables.h"

namespace {

using namespace mxopt;

constexpr double kTimeoutS = 60;
constexpr GatherPlan kCollective;
constexpr int kPlaces[] = {1, 3, 7};

struct Workload {
  bench::ParamList list;
  Storage storage = Storage::kBoth;
  ScaleLayout scale_layout = ScaleLayout::kCompact;
  DType grad_dtype = DType::kFp32;
  std::int64_t bucket_elems = 0;

  std::string name() const { return list.name + (scale_layout == ScaleLayout::kGemm ? ", gemm scales" : ""); }
  LayoutOptions options(int world_size) const {
    LayoutOptions options;
    options.world_size = world_size;
    options.bucket_elems = bucket_elems;
    return options;
  }
};

/// The memory and the passes of one rank, with one way to gather.
class Rank {
 public:
  /// places  0: as the plan says; else so many places of the next rank, one behind the other.
  Rank(const Workload& work, const GatherPlan& plan, Communicator& comm, StreamRef stream, int places = 0)
      : comm_(comm),
        stream_(stream),
        layout_(bench::specs_of(work.list, work.storage, GradMode::kOverwrite), work.options(comm.size())),
        storage_(layout_, work.grad_dtype, static_cast<std::int64_t>(layout_.params().size()), comm.device(),
                 allocator(),
                 {plan.is_row_direct ? comm.window_allocator() : nullptr, plan.is_column_direct}),
        window_(plan.is_row_direct ? comm.open_window(storage_.window()) : PeerWindow()),
        sync_(layout_, storage_, comm, GatherFormat::kQuantized, plan, window_, work.scale_layout,
              allocator()),
        scalars_(1, 1, initial_state(), comm.device(), allocator()),
        token_(1, comm.device(), allocator()) {
    if (plan.is_row_direct && !window_.is_open()) throw std::runtime_error(window_.reason);
    StepTables tables =
        make_step_tables(layout_, storage_, sync_, std::vector<int>(layout_.params().size(), 0), comm.rank());
    if (places > 0) tables.peers = stores_to_places(places, tables.peers);
    kernels_ = StepKernels::make(tables, comm.device());
    const GroupConstants constants = {{0.9, 0.95}, 1e-8};
    const float weight_decay = 0.1f, lr = 3e-4f;
    scalars_.set_groups({{&constants, 1}, {&weight_decay, 1}, {&lr, 1}}, stream);
    const bench::RandomValues masters(DType::kFp32, 0, comm.device(), stream);
    const bench::RandomValues grads(work.grad_dtype, 0, comm.device(), stream);
    for (const SegmentRow& row : tables.segments) {
      masters.copy_to(row.master, row.elems, stream);
      grads.copy_to(const_cast<void*>(row.grad), row.elems, stream);
      owned_elems_ += row.elems;
    }
    // The update's scalars, as a step decides them; they stay.
    const StepMemory& memory = scalars_.memory();
    kernels_->open_statistics(memory, 0, stream_);
    comm_.all_reduce(scalars_.statistics(), ReduceOp::kSum, Traffic::kStatistics, stream_).join(stream_);
    StepOptions options;
    options.world_size = comm_.size();
    options.groups = 1;
    const StepPart part = {memory, options};
    kernels_->decide({&part, 1}, stream_);
    synchronize(comm_.device(), stream_);
  }

  const Layout& layout() const { return layout_; }
  std::int64_t bytes_of_update(Storage storage) const {
    return owned_elems_ * (24 + (storage == Storage::kBoth ? 2 : 1) + dtype_bytes(storage_.grad_dtype()));
  }

  void update() {
    const StepMemory& memory = scalars_.memory();
    kernels_->fused_update({memory.scalars, 1}, memory.outcome, stream_);
  }
  void stores() {
    update();
    kernels_->share_scales(false, scalars_.memory().outcome, stream_);
  }
  /// All that a step does from the update on, to the end of the gathers.
  void all() {
    const StepOutcome* const outcome = scalars_.memory().outcome;
    kernels_->clear(sync_.scales_to_clear(SyncScope::kTrainable), outcome, stream_);
    stores();
    sync_.gather_rows(SyncScope::kTrainable, stream_);
    sync_.reduce_scales(SyncScope::kTrainable, stream_);
    kernels_->spread_cut_codes(false, outcome, stream_);
    kernels_->cast_cut_bands(false, outcome, stream_);
    sync_.gather_columns(SyncScope::kTrainable, stream_);
    for (const Bucket& bucket : layout_.buckets()) {
      sync_.wait(bucket.params.front(), Plane::kRow, stream_);
      if (bucket.family.has_column()) sync_.wait(bucket.params.front(), Plane::kColumn, stream_);
    }
  }
  /// What open() does for the next update, behind a reduction that brings the ranks in step.
  void open() {
    sync_.open(stream_);
    comm_.all_reduce(TypedSpan(token_.data(), DType::kUint8, 1), ReduceOp::kMax, Traffic::kControl, stream_)
        .join(stream_);
  }

  template <class Body>
  bench::Times time(int repeats, const Body& body) {
    const auto before = [&](int) {
      bench::keep_busy(bench::kHeadStartUs, stream_);
      open();
    };
    return bench::measure_on_device(repeats, stream_, before, [&](int) { body(); });
  }

  /// Plane and scale bytes of this rank that are others than `expected`.
  std::int64_t count_wrong(const Rank& expected) const {
    std::int64_t wrong = 0;
    for (int b = 0; b < static_cast<int>(layout_.buckets().size()); ++b) {
      wrong += differing(storage_.row_plane(b), expected.storage_.row_plane(b));
      if (layout_.bucket(b).family.has_column()) {
        wrong += differing(storage_.column_plane(b), expected.storage_.column_plane(b));
      }
    }
    return wrong + differing({storage_.scales(), DType::kUint8, layout_.scale_bytes()},
                             {expected.storage_.scales(), DType::kUint8, layout_.scale_bytes()});
  }

 private:
  std::shared_ptr<Allocator> allocator() const { return default_allocator(comm_.device()); }
  static StepState initial_state() {
    StepState state;
    state.loss_scale = initial_loss_scale(LossScaleConfig());
    return state;
  }
  PeerStores stores_to_places(int places, const PeerStores& to_all) {
    const std::int64_t bytes = storage_.window().bytes();
    places_ = Buffer(places * bytes, comm_.device(), comm_.window_allocator());
    places_window_ = comm_.open_window(places_);
    if (!places_window_.is_open()) throw std::runtime_error(places_window_.reason);
    const auto next = static_cast<std::size_t>((comm_.rank() + 1) % comm_.size());
    PeerStores peers;
    peers.count = places;
    peers.column_count = to_all.column_count > 0 ? places : 0;
    for (int place = 0; place < places; ++place) {
      peers.distance[place] =
          static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(places_window_.bases[next]) -
                                    reinterpret_cast<std::uintptr_t>(storage_.window().data())) +
          place * bytes;
    }
    return peers;
  }
  std::int64_t differing(ConstTypedSpan a, ConstTypedSpan b) const {
    std::vector<std::uint8_t> of_a(static_cast<std::size_t>(a.bytes())), of_b(of_a.size());
    copy_bytes(of_a.data(), a.data, a.bytes(), comm_.device(), stream_);
    copy_bytes(of_b.data(), b.data, b.bytes(), comm_.device(), stream_);
    synchronize(comm_.device(), stream_);
    std::int64_t count = 0;
    for (std::size_t i = 0; i < of_a.size(); ++i) count += of_a[i] != of_b[i] ? 1 : 0;
    return count;
  }

  Communicator& comm_;
  StreamRef stream_;
  Layout layout_;
  ParamStorage storage_;
  PeerWindow window_;
  ParamSync sync_;
  StepScalars scalars_;
  Buffer token_;
  Buffer places_;
  PeerWindow places_window_;
  std::unique_ptr<StepKernels> kernels_;
  std::int64_t owned_elems_ = 0;
};

void run_workload(const Workload& work, int repeats, const bench::World& world, Communicator& comm,
                  const CopyRates& rates, StreamRef stream, bench::Measurements& rows) {
  bench::Measurement row{.workload = work.name(),
                         .shape = work.list.shape_name(),
                         .dtype = std::string(dtype_name(work.grad_dtype)),
                         .planes = std::string(storage_name(work.storage))};
  row.fraction = 1.0 / world.size();
  row.world_size = world.size();
  const auto add = [&](const std::string& phase, std::optional<std::int64_t> bytes, const bench::Times& times,
                       std::optional<std::int64_t> wrong = {}) {
    row.phase = phase;
    row.bytes = bytes;
    row.times = world.slowest(times);
    row.wrong_elements = wrong;
    rows.add(row);
  };
  const GatherPlan direct = {true, true, "measured"};
  Rank collective(work, kCollective, comm, stream);
  const std::int64_t bytes = collective.bytes_of_update(work.storage);
  const GatherCosts costs = gather_costs(collective.layout(), work.grad_dtype);
  double update_ms = 0, gather_ms = 0;
  if (world.size() > 1) {
    Rank storing(work, direct, comm, stream);
    for (Rank* rank : {&collective, &storing}) {
      rank->open();
      rank->all();
    }
    synchronize(comm.device(), stream);
    const std::int64_t wrong = world.sum(storing.count_wrong(collective));
    const bench::Times update = collective.time(repeats, [&] { collective.update(); });
    const bench::Times gathered = collective.time(repeats, [&] { collective.all(); });
    update_ms = world.slowest(update).p50_ms;
    gather_ms = world.slowest(gathered).p50_ms - update_ms;
    add("update", bytes, update);
    add("update, collective", bytes, gathered);
    add("update, direct", bytes, storing.time(repeats, [&] { storing.all(); }), wrong);
  } else {
    add("update", bytes, collective.time(repeats, [&] { collective.update(); }));
    return;
  }
  if (work.scale_layout == ScaleLayout::kGemm || work.list.shapes.size() > 1) return;
  const double link_bytes = costs.row_bytes + costs.column_bytes;
  for (const int places : kPlaces) {
    Rank emulated(work, direct, comm, stream, places);
    add("stores to " + std::to_string(places), static_cast<std::int64_t>(link_bytes * places),
        emulated.time(repeats, [&] { emulated.stores(); }));
  }
  // The same bytes of each rank in groups of other sizes.
  for (const int size : {2, 3, 4, 8, 72}) {
    GatherCosts of_group = costs;
    of_group.world_size = size;
    const GatherPlan plan = cheaper_gather(of_group, rates);
    const std::string name = ", W = " + std::to_string(size) + ", auto: " +
                             (!plan.is_row_direct                                ? "collective"
                              : plan.is_column_direct || costs.column_bytes == 0 ? "direct"
                                                                                 : "rows direct");
    const auto bytes_sent = static_cast<std::int64_t>(link_bytes * (size - 1));
    row.has_minimum = false;
    row.implementation = "model, direct";
    add("update" + name, bytes_sent,
        {0, std::max(update_ms, 1e3 * link_bytes * (size - 1) / rates.to_peer), 0});
    row.implementation = "model, gather";
    add("update" + name, bytes_sent, {0, update_ms + (size - 1) * gather_ms, 0});
  }
}

/// Short ones, of which one band in few is cut in the middle.
bench::ParamList wide_shapes() {
  return {"wide shapes", {{96, 229376}, {160, 65792}, {32, 524416}, {224, 65696}, {288, 41120}}};
}

void run(int argc, char** argv) {
  const int repeats = std::stoi(bench::option(argc, argv, "--repeats", "20"));
  const bench::World world(argc, argv);
  MXOPT_CUDA_CHECK(cudaSetDevice(world.device().index));
  const Stream stream(world.device());
  const auto comm =
      make_communicator({.device = world.device(), .timeout_s = kTimeoutS, .world_size = world.size()});
  bench::Measurements rows =
      bench::start_measurements(argc, argv, world.device(), stream.ref(), world.size(), world.rank());
  const CopyRates rates = comm->measure_copy_rates();
  if (world.rank() == 0) {
    std::cout << comm->describe();
    if (rates.to_peer > 0) {
      std::cout << "; copies at " << rates.local / 1e9 << " GB/s in memory, " << rates.to_peer / 1e9
                << " GB/s to a peer";
    }
    std::cout << '\n';
  }
  bench::ParamList matrix = bench::one_matrix(std::int64_t{16384} * world.size(), 8192);
  matrix.name = "134 M elements a rank";
  for (const Storage storage : {Storage::kRow, Storage::kBoth}) {
    for (const DType grad_dtype : {DType::kFp32, DType::kBf16}) {
      run_workload({matrix, storage, ScaleLayout::kCompact, grad_dtype}, repeats, world, *comm, rates,
                   stream.ref(), rows);
    }
    run_workload({matrix, storage, ScaleLayout::kGemm}, repeats, world, *comm, rates, stream.ref(), rows);
    run_workload({bench::llama_8b(), storage}, repeats, world, *comm, rates, stream.ref(), rows);
  }
  run_workload({wide_shapes(), Storage::kBoth, ScaleLayout::kCompact, DType::kFp32, 1}, repeats, world, *comm,
               rates, stream.ref(), rows);
  if (world.rank() == 0) bench::write_json(rows, argc, argv);
}

}  // namespace

int main(int argc, char** argv) {
  return mxopt::bench::run_program("direct_gather_bench", run, argc, argv);
}
