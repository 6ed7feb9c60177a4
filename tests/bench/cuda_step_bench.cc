// Speed of the passes of one step on a CUDA device, against a large copy measured in the same run.
//
//   cuda_step_bench [--repeats 15] [--workload NAME] [--json FILE] [--commit TEXT]
//
//   workload  all, or shapes: one matrix, all of it. small: 300 params of 160 x 96. 8b, 70b: the matrices
//             of four layers of Llama-3-8B, of two of Llama-3-70B, one rank's work of W = 1, 2, 8, 64.
//             odd: a list of which more than a fifth of the elements lies in bands that a shard boundary
//             divides. zeros: gradients of which some are exactly zero and always were, as those of rows
//             of an embedding that no token used (moments of 0 are ordinary numbers to the update), and
//             gradients of 2^-106 or so: such first moments are what is left of rows that no token used for
//             hundreds of steps, and are divided in FP64, out of line.
//   rank      rank W / 2; of odd, the one whose share of cut bands is next to the mean.
//   phases    update: gradient read, master and both moments read and written, plane bytes written: 29
//             bytes (row) or 30 (both) per element with fp32 gradients, two less with bf16, and the column
//             byte of an element of a cut band is not its. cut bands: their masters read, their column bytes
//             written. stats: the gradient read. Scales, a byte for 32 elements and plane, are not counted.
//   times     of a phase that moves 256 MiB or more, between two events around each call. Of a smaller one,
//             throughput back to back in a CUDA graph of calls that use several sets of params in turn, so
//             that together they move more than that: kernels may begin before the one in front is done, so
//             a call's start is hidden by the end of the one before it. At most 64 sets, in three
//             quarters of the memory that is free: one 160x96 stays in the second-level cache all the same,
//             and the cut bands of 8b and 70b at W = 64 in part.
//   wrong     update, cut bands: see band_check.h, after one update. stats: limbs of the sum that differ
//             from those of the host, for up to 300 million elements; else it is not compared.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <iostream>
#include <memory>
#include <optional>
#include <random>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "bench/band_check.h"
#include "bench/cuda_measurements.h"
#include "bench/cuda_timer.h"
#include "bench/first_step.h"
#include "bench/measurements.h"
#include "bench/param_lists.h"
#include "bench/random_values.h"
#include "bench/rotated_sets.h"
#include "bench/table.h"

#include "mxopt/collectives/self_communicator.h"
#include "mxopt/optimizer/step_tables.h"

namespace {

using namespace mxopt;

constexpr Device kDevice{DeviceKind::kCuda, 0};
constexpr std::int64_t kMostComparedElems = 300'000'000;

enum class ZeroGrads { kNone, kHalfOfRows, kHalfOfElements, kAll, kAlmost };

struct Workload {
  bench::ParamList list;
  int world_size = 1;
  ZeroGrads zeros = ZeroGrads::kNone;
};

LayoutOptions layout_options(int world_size) {
  LayoutOptions options;
  options.world_size = world_size;
  return options;
}

/// What one rank of a workload's world holds, filled with random values.
class RankWork {
 public:
  RankWork(const Workload& workload, Storage storage, DType grad_dtype, StreamRef stream)
      : stream_(stream),
        layout_(bench::specs_of(workload.list, storage), layout_options(workload.world_size)),
        rank_(workload.list.name == bench::odd_shapes().name ? mean_rank() : workload.world_size / 2),
        storage_(layout_, grad_dtype, static_cast<std::int64_t>(layout_.params().size()), kDevice,
                 default_allocator(kDevice)),
        sync_(layout_, storage_, self_, GatherFormat::kQuantized, {}, {}, ScaleLayout::kCompact,
              default_allocator(kDevice)),
        tables_(
            make_step_tables(layout_, storage_, sync_, std::vector<int>(layout_.params().size(), 0), rank_)),
        kernels_(StepKernels::make(tables_, kDevice)) {
    const bench::RandomValues masters(DType::kFp32, 0, kDevice, stream);
    const bench::RandomValues grads(grad_dtype, workload.zeros == ZeroGrads::kHalfOfElements ? 0.5 : 0,
                                    kDevice, stream, workload.zeros == ZeroGrads::kAlmost ? 0x1p-100f : 1.0f);
    std::mt19937 random(2);
    for (const SegmentRow& row : tables_.segments) {
      masters.copy_to(row.master, row.elems, stream);
      // The memory is this object's own; only the kernels' view of it is const.
      auto* const grad = static_cast<std::uint8_t*>(const_cast<void*>(row.grad));
      if (workload.zeros != ZeroGrads::kAll) grads.copy_to(grad, row.elems, stream);
      if (workload.zeros == ZeroGrads::kHalfOfRows) {
        const std::int64_t row_bytes = row.planes.cols * dtype_bytes(grad_dtype);
        for (std::int64_t r = 0; r < row.elems / row.planes.cols; ++r) {
          if (random() % 2 == 0) fill_zero(grad + r * row_bytes, row_bytes, kDevice, stream);
        }
      }
      elems_ += row.elems;
    }
    for (const CutBand& band : layout_.cut_bands(rank_)) cut_elems_ += band.param_end - band.param_begin;
    synchronize(kDevice, stream_);
  }

  StepKernels& kernels() { return *kernels_; }
  const Layout& layout() const { return layout_; }
  int rank() const { return rank_; }
  std::int64_t elems() const { return elems_; }
  std::int64_t cut_elems() const { return cut_elems_; }
  /// Of device memory: gradients and planes of the whole list, state of the rank's part.
  std::int64_t memory_bytes() const {
    return layout_.grad_elems() * dtype_bytes(tables_.grad_dtype) + 2 * layout_.row_plane_elems() +
           elems_ * 12;
  }

  bench::BandCheck band_check() const {
    return {tables_.segments, tables_.grad_dtype, true, kDevice, stream_};
  }

  /// Words in which the statistics differ from the host's.
  std::int64_t count_wrong_statistics(StepStatistics got) const {
    StepTables host = tables_;
    std::vector<std::vector<std::uint8_t>> grads;
    std::uint8_t status = 0;
    for (SegmentRow& row : host.segments) {
      grads.emplace_back(static_cast<std::size_t>(row.elems * dtype_bytes(host.grad_dtype)));
      copy_bytes(grads.back().data(), row.grad, static_cast<std::int64_t>(grads.back().size()), kDevice,
                 stream_);
      row.grad = grads.back().data();
      row.status = &status;
    }
    synchronize(kDevice, stream_);
    StepStatistics expected;
    StepKernels::make(host, Device())->grad_stats(expected, {});
    normalize_sum(expected.square_sum);
    normalize_sum(got.square_sum);
    std::int64_t wrong = expected.nonfinite_runs != got.nonfinite_runs;
    for (int k = 0; k < kSumLimbs; ++k) wrong += expected.square_sum[k] != got.square_sum[k];
    return wrong;
  }

 private:
  /// The rank whose share of cut elements is next to that of all.
  int mean_rank() const {
    const double mean = layout_.cut_share().mean;
    int best = 0;
    double best_distance = 2;
    for (int rank = 0; rank < static_cast<int>(layout_.world_size()); ++rank) {
      double elems = 0, cut = 0;
      for (const Segment& segment : layout_.segments(rank)) elems += static_cast<double>(segment.elems);
      for (const CutBand& band : layout_.cut_bands(rank)) {
        cut += static_cast<double>(band.param_end - band.param_begin);
      }
      const double distance = elems > 0 ? std::abs(cut / elems - mean) : 2;
      if (distance < best_distance) {
        best = rank;
        best_distance = distance;
      }
    }
    return best;
  }

  StreamRef stream_;
  SelfCommunicator self_{kDevice};
  Layout layout_;
  int rank_;
  ParamStorage storage_;
  ParamSync sync_;
  StepTables tables_;
  std::unique_ptr<StepKernels> kernels_;
  std::int64_t elems_ = 0, cut_elems_ = 0;
};

std::vector<Workload> workloads(const std::string& which) {
  std::vector<Workload> all;
  const auto wants = [&](const char* name) { return which == "all" || which == name; };
  if (wants("shapes")) {
    for (const auto& [rows, cols] : std::vector<std::pair<std::int64_t, std::int64_t>>{
             {160, 96}, {1024, 1024}, {4096, 4096}, {16384, 6144}, {28672, 8192}}) {
      all.push_back({bench::one_matrix(rows, cols)});
    }
  }
  if (wants("small")) all.push_back({bench::many_small(300)});
  for (const auto& [name, list] : std::vector<std::pair<const char*, bench::ParamList>>{
           {"8b", bench::llama_8b()}, {"70b", bench::llama_70b()}}) {
    for (const int world_size : {1, 2, 8, 64}) {
      if (wants(name)) all.push_back({list, world_size});
    }
  }
  if (wants("odd")) all.push_back({bench::odd_shapes(), 32});
  if (wants("zeros")) {
    for (const auto& [zeros, name] : std::vector<std::pair<ZeroGrads, std::string>>{
             {ZeroGrads::kNone, "no zero gradients"},
             {ZeroGrads::kHalfOfRows, "gradients of half the rows 0"},
             {ZeroGrads::kHalfOfElements, "half the gradients 0"},
             {ZeroGrads::kAll, "all gradients 0"},
             {ZeroGrads::kAlmost, "gradients of 2^-106"}}) {
      all.push_back({{name, {{32768, 4096}}}, 1, zeros});
    }
  }
  if (all.empty())
    throw std::invalid_argument("--workload " + which +
                                "; allowed are all, shapes, small, 8b, 70b, odd, zeros");
  return all;
}

void print_cut_share(const RankWork& work) {
  const CutShare share = work.layout().cut_share();
  std::cout << "cut bands: " << share.cut_bands << " with " << 100 * share.mean
            << " % of the elements; of rank " << work.rank() << "'s, "
            << 100 * static_cast<double>(work.cut_elems()) / static_cast<double>(work.elems()) << " %\n";
  if (share.mean <= 0.2) throw std::logic_error("the share of cut bands is not above 20 %");
}

/// Runs one workload. Each phase has as many sets of params as its bytes ask for.
void run_workload(const Workload& workload, Storage storage, DType grad_dtype, int repeats, StreamRef stream,
                  std::span<const AdamScalars> scalars, bench::Measurements& rows) {
  std::vector<std::unique_ptr<RankWork>> sets;
  sets.push_back(std::make_unique<RankWork>(workload, storage, grad_dtype, stream));
  const RankWork& first = *sets[0];
  const bool is_both = storage == Storage::kBoth;
  if (workload.list.name == bench::odd_shapes().name && is_both) print_cut_share(first);

  // call(kernels) of one phase.
  const auto measure = [&](std::int64_t bytes, const auto& call) {
    const std::int64_t wanted = bench::rotated_sets(bytes);
    if (wanted == 1) {
      return bench::measure_on_device(repeats, stream, [&](int) { call(sets[0]->kernels()); });
    }
    std::size_t free_bytes = 0, all_bytes = 0;
    MXOPT_CUDA_CHECK(cudaMemGetInfo(&free_bytes, &all_bytes));
    const std::int64_t more = static_cast<std::int64_t>(free_bytes) / 4 * 3 / first.memory_bytes();
    const std::int64_t count = std::min(wanted, static_cast<std::int64_t>(sets.size()) + more);
    while (static_cast<std::int64_t>(sets.size()) < count) {
      sets.push_back(std::make_unique<RankWork>(workload, storage, grad_dtype, stream));
    }
    return bench::measure_calls(bench::calls_over(count), repeats, stream,
                                [&](int i) { call(sets[static_cast<std::size_t>(i % count)]->kernels()); });
  };

  bench::Measurement row{.workload = workload.list.name,
                         .shape = workload.list.shape_name(),
                         .dtype = std::string(dtype_name(grad_dtype)),
                         .planes = std::string(storage_name(storage))};
  row.fraction = 1.0 / workload.world_size;
  row.world_size = workload.world_size;
  const auto add = [&](const char* phase, std::int64_t bytes, const bench::Times& times,
                       std::optional<std::int64_t> wrong) {
    row.phase = phase;
    row.bytes = bytes;
    row.times = times;
    row.wrong_elements = wrong;
    rows.add(row);
  };

  const auto update = [&](StepKernels& kernels) { kernels.fused_update(scalars, nullptr, stream); };
  const auto cast = [&](StepKernels& kernels) { kernels.cast_cut_bands(false, nullptr, stream); };
  const bench::BandCheck check = first.band_check();
  update(sets[0]->kernels());
  cast(sets[0]->kernels());
  const std::int64_t wrong = check.count_wrong(reference::AdamSettings());
  const std::int64_t update_bytes =
      first.elems() * (24 + (is_both ? 2 : 1) + dtype_bytes(grad_dtype)) - (is_both ? first.cut_elems() : 0);
  add("update", update_bytes, measure(update_bytes, update), wrong);
  if (first.cut_elems() > 0 && is_both) {
    const std::int64_t cut_bytes = 5 * first.cut_elems();
    add("cut bands", cut_bytes, measure(cut_bytes, cast), wrong);
  }
  if (is_both || workload.zeros != ZeroGrads::kNone) return;

  const Buffer memory(sizeof(StepStatistics), kDevice, default_allocator(kDevice));
  auto& statistics = *reinterpret_cast<StepStatistics*>(memory.data());
  std::optional<std::int64_t> wrong_words;
  if (first.elems() <= kMostComparedElems) {
    sets[0]->kernels().grad_stats(statistics, stream);
    StepStatistics got;
    copy_bytes(&got, &statistics, sizeof(got), kDevice, stream);
    synchronize(kDevice, stream);
    wrong_words = first.count_wrong_statistics(got);
  }
  const auto stats = [&](StepKernels& kernels) { kernels.grad_stats(statistics, stream); };
  const std::int64_t grad_bytes = first.elems() * dtype_bytes(grad_dtype);
  add("stats", grad_bytes, measure(grad_bytes, stats), wrong_words);
}

void run(int argc, char** argv) {
  const int repeats = std::stoi(bench::option(argc, argv, "--repeats", "15"));
  const std::vector<Workload> chosen = workloads(bench::option(argc, argv, "--workload", "all"));
  const Stream stream(kDevice);
  bench::Measurements rows = bench::start_measurements(argc, argv, kDevice, stream.ref());
  const AdamScalars host_scalars = bench::first_step_scalars(reference::AdamSettings());
  const Buffer memory(sizeof(AdamScalars), kDevice, default_allocator(kDevice));
  copy_bytes(memory.data(), &host_scalars, sizeof(AdamScalars), kDevice, stream.ref());
  const std::span<const AdamScalars> scalars(reinterpret_cast<const AdamScalars*>(memory.data()), 1);
  for (const Workload& workload : chosen) {
    for (const Storage storage : {Storage::kRow, Storage::kBoth}) {
      for (const DType grad_dtype : {DType::kFp32, DType::kBf16}) {
        run_workload(workload, storage, grad_dtype, repeats, stream.ref(), scalars, rows);
      }
    }
  }
  bench::write_json(rows, argc, argv);
}

}  // namespace

int main(int argc, char** argv) {
  return mxopt::bench::run_program("cuda_step_bench", run, argc, argv);
}
