// Speed of DistributedAdam::step() as a trainer calls it, on one GPU or, under mpirun, on one GPU a rank.
//
//   step_bench [--repeats 20] [--list all|8b|small] [--json FILE] [--commit TEXT]
//
//   list      8b: the matrices of four layers of Llama-3-8B, 872 million elements, with every mix of
//             planes and type of gradients, with and without clipping, and with gradients that the
//             trainer overwrites or that the optimizer zeroes. small: 28 and 2,800 params of 160 x 96.
//             Between ranks weights are gathered as parallel.gather: auto chooses, and, as said,
//             collectively.
//   phases    step: begin_backward(), grad_ready() of every param and step(), between two events on the
//             trainer's stream. Where the trainer overwrites its gradients, which stay as they are, the calls
//             are back to back, so that what is left to other streams by one step is waited for in the next.
//             Where the optimizer zeroes them, they are filled again in front of each step, outside of the
//             time, the device is busy until the host has queued the step, and the wait for what the step
//             leaves to other streams (gathers, zeroing) is part of the time.
//             step, grads 0: those calls back to back where the optimizer zeroes; nothing can fill gradients
//             in between, so that all are steps with gradients of 0.
//             step synced: step() alone, by the host's clock, with a wait for the stream; zeroing goes on
//             behind it, and does not count. step host: by the host's clock, the call of step() alone, while
//             nothing else is queued. In front of both, and outside of the time: gradients filled, where
//             they were zeroed, begin_backward() and grad_ready(), with all that those start.
//             step reduced: between ranks, step() and the wait for all it leaves to other streams, between
//             two events; gradients are reduced, and ranks in step, before the first.
//             step replay: a captured step in a CUDA graph, zeroing in it, with gradients filled in front.
//   bytes     of the rank, of one step: gradients read twice (their norm, the update), master and moments
//             read and written, plane bytes written, masters of cut bands read again; where the optimizer
//             zeroes gradients within the time, those. Scales and messages are not counted.
//   wrong     see band_check.h, after the first step, its clip factor taken from the report; of all
//             ranks. All ranks hold the same gradients, whose average is exact, and compared, where W is
//             a power of two.
//   launches  kernels in the graph of a captured step, at W = 1. Copies and fills of memory are not among
//             them.
//   times     those of the slowest rank.
#include <algorithm>
#include <bit>
#include <chrono>
#include <cstdint>
#include <iostream>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <cuda_runtime.h>

#include "bench/band_check.h"
#include "bench/bench_world.h"
#include "bench/busy_cuda.h"
#include "bench/cuda_measurements.h"
#include "bench/cuda_timer.h"
#include "bench/initial_masters.h"
#include "bench/measurements.h"
#include "bench/param_lists.h"
#include "bench/random_values.h"
#include "bench/table.h"

#include "mxopt/collectives/make_communicator.h"
#include "mxopt/optimizer/distributed_adam.h"

namespace {

using namespace mxopt;

constexpr double kTimeoutS = 60;

struct Variant {
  bench::ParamList list;
  Storage storage = Storage::kBoth;
  DType grad_dtype = DType::kFp32;
  bool with_clip = true;
  GradMode grad_mode = GradMode::kOverwrite;
  GatherChoice gather = GatherChoice::kAuto;

  std::string workload() const {
    return list.name + (with_clip ? "" : ", no clip") +
           (grad_mode == GradMode::kAccumulate ? ", zeroing" : "") +
           (gather == GatherChoice::kCollective ? ", collective gather" : "");
  }
};

Config config_of(const Variant& variant) {
  Config config;
  config.optimizer.grad_dtype = variant.grad_dtype;
  config.optimizer.clip_grad = variant.with_clip ? 1.0 : 0.0;
  config.parallel.device = DeviceChoice::kCuda;
  config.parallel.gather = variant.gather;
  config.parallel.timeout_s = kTimeoutS;
  return config;
}

/// The graph of one step.
class CapturedStep {
 public:
  CapturedStep(DistributedAdam& opt, StreamRef stream) {
    MXOPT_CUDA_CHECK(cudaDeviceSynchronize());
    cudaGraph_t graph = nullptr;
    MXOPT_CUDA_CHECK(cudaStreamBeginCapture(cuda::native(stream), cudaStreamCaptureModeThreadLocal));
    opt.step(stream);
    MXOPT_CUDA_CHECK(cudaStreamEndCapture(cuda::native(stream), &graph));
    std::size_t count = 0;
    MXOPT_CUDA_CHECK(cudaGraphGetNodes(graph, nullptr, &count));
    std::vector<cudaGraphNode_t> nodes(count);
    MXOPT_CUDA_CHECK(cudaGraphGetNodes(graph, nodes.data(), &count));
    for (cudaGraphNode_t node : nodes) {
      cudaGraphNodeType type{};
      MXOPT_CUDA_CHECK(cudaGraphNodeGetType(node, &type));
      kernels_ += type == cudaGraphNodeTypeKernel;
    }
    MXOPT_CUDA_CHECK(cudaGraphInstantiate(&exec_, graph, 0));
    MXOPT_CUDA_CHECK(cudaGraphDestroy(graph));
  }
  ~CapturedStep() { cudaGraphExecDestroy(exec_); }
  CapturedStep(const CapturedStep&) = delete;
  CapturedStep& operator=(const CapturedStep&) = delete;

  std::int64_t kernels() const { return kernels_; }
  void replay(StreamRef stream) const { MXOPT_CUDA_CHECK(cudaGraphLaunch(exec_, cuda::native(stream))); }

 private:
  cudaGraphExec_t exec_ = nullptr;
  std::int64_t kernels_ = 0;
};

/// An optimizer with random masters and gradients.
class Training {
 public:
  Training(const Variant& variant, Communicator& comm, StreamRef stream)
      : comm_(comm),
        stream_(stream),
        grad_dtype_(variant.grad_dtype),
        grad_mode_(variant.grad_mode),
        opt_(bench::specs_of(variant.list, variant.storage, variant.grad_mode), config_of(variant), comm,
             comm.device()),
        grads_(variant.grad_dtype, 0, comm.device(), stream) {
    const bench::RandomValues masters(DType::kFp32, 0, comm.device(), stream);
    bench::set_masters(opt_, masters, stream);
    for (const ParamLayout& param : opt_.layout().params()) {
      owned_elems_ += static_cast<std::int64_t>(opt_.owned(param.name).master.size());
      grad_elems_ += param.elems();
    }
    for (const CutBand& band : opt_.layout().cut_bands(comm.rank())) {
      cut_elems_ += band.param_end - band.param_begin;
    }
    fill_gradients();
    opt_.publish(stream);
  }

  std::int64_t bytes_of_step(Storage storage) const {
    const bool is_both = storage == Storage::kBoth;
    return owned_elems_ * (24 + (is_both ? 2 : 1) + 2 * dtype_bytes(grad_dtype_)) +
           (is_both ? cut_elems_ * 4 : 0);
  }
  std::int64_t bytes_of_zeroing() const {
    return grad_mode_ == GradMode::kAccumulate ? grad_elems_ * dtype_bytes(grad_dtype_) : 0;
  }

  /// Makes the first step.
  std::int64_t count_wrong() {
    const bench::BandCheck check(owned_rows(), grad_dtype_, comm_.size() == 1, comm_.device(), stream_);
    call_ready();
    const StepReport report = opt_.step(stream_);
    if (!report->taken) throw std::runtime_error("the first step was skipped");
    wait_for_rest();
    reference::AdamSettings settings;
    settings.grad_factor = report->clip_factor;
    return check.count_wrong(settings);
  }

  /// Steps one by one, each with its own gradients, to the end of all that it leaves to other streams.
  bench::Times with_gradients(int repeats) {
    return after_filling(repeats, [&] {
      step();
      wait_for_rest();
    });
  }

  bench::Times replays(int repeats, const CapturedStep& captured) {
    return after_filling(repeats, [&] { captured.replay(stream_); });
  }

  bench::Times back_to_back(int repeats) {
    constexpr int kWarmUps = 3;
    std::vector<bench::TimedEvent> marks(static_cast<std::size_t>(repeats) + 1);
    for (int i = 0; i < kWarmUps; ++i) step();
    marks[0].record(stream_);
    for (std::size_t i = 1; i < marks.size(); ++i) {
      step();
      marks[i].record(stream_);
    }
    synchronize(comm_.device(), stream_);
    std::vector<double> samples_ms;
    for (std::size_t i = 1; i < marks.size(); ++i) samples_ms.push_back(marks[i].ms_since(marks[i - 1]));
    return bench::statistics(std::move(samples_ms));
  }

  struct HostTimes {
    bench::Times call, synced;
  };
  HostTimes one_by_one(int repeats) {
    using Clock = std::chrono::steady_clock;
    std::vector<double> call_ms, synced_ms;
    for (int i = 0; i < repeats; ++i) {
      if (grad_mode_ == GradMode::kAccumulate) {
        wait_for_rest();
        fill_gradients();
      }
      call_ready();
      MXOPT_CUDA_CHECK(cudaDeviceSynchronize());
      const auto start = Clock::now();
      opt_.step(stream_);
      const auto called = Clock::now();
      synchronize(comm_.device(), stream_);
      const auto end = Clock::now();
      call_ms.push_back(std::chrono::duration<double, std::milli>(called - start).count());
      synced_ms.push_back(std::chrono::duration<double, std::milli>(end - start).count());
    }
    return {bench::statistics(std::move(call_ms)), bench::statistics(std::move(synced_ms))};
  }

  /// From reduced gradients to gathered planes.
  bench::Times reduced(int repeats) {
    std::vector<double> samples_ms;
    bench::TimedEvent begin, end;
    for (int i = 0; i < repeats; ++i) {
      call_ready();
      MXOPT_CUDA_CHECK(cudaDeviceSynchronize());
      comm_.barrier();
      bench::keep_busy(bench::kHeadStartUs, stream_);
      begin.record(stream_);
      opt_.step(stream_);
      wait_for_rest();
      end.record(stream_);
      synchronize(comm_.device(), stream_);
      samples_ms.push_back(end.ms_since(begin));
    }
    return bench::statistics(std::move(samples_ms));
  }

  DistributedAdam& opt() { return opt_; }

 private:
  template <class Body>
  bench::Times after_filling(int repeats, const Body& body) {
    const auto before = [&](int) {
      fill_gradients();
      bench::keep_busy(bench::kHeadStartUs, stream_);
    };
    return bench::measure_on_device(repeats, stream_, before, [&](int) { body(); });
  }
  /// After what zeroes them, in the order of the stream.
  void fill_gradients() {
    for (const ParamLayout& param : opt_.layout().params()) {
      const TypedSpan grad = opt_.grad(param.name).data;
      grads_.copy_to(grad.data, grad.elems, stream_);
    }
  }
  /// The stream waits for all planes and for the zeroing of gradients; params of a bucket are waited for
  /// together.
  void wait_for_rest() {
    for (const Bucket& bucket : opt_.layout().buckets()) {
      const ParamLayout& param = opt_.layout().param(bucket.params.front());
      opt_.wait_param(param.name, Plane::kRow, stream_);
      if (param.family.has_column()) opt_.wait_param(param.name, Plane::kColumn, stream_);
    }
  }
  /// Buffers to be overwritten count as empty without this.
  void call_ready() {
    opt_.begin_backward();
    for (const ParamLayout& param : opt_.layout().params()) opt_.grad_ready(param.name, stream_);
  }
  void step() {
    call_ready();
    opt_.step(stream_);
  }

  std::vector<SegmentRow> owned_rows() {
    std::vector<SegmentRow> rows;
    for (const ParamLayout& param : opt_.layout().params()) {
      const OwnedSlice slice = opt_.owned(param.name);
      if (slice.master.empty()) continue;
      SegmentRow row;
      row.elems = static_cast<std::int64_t>(slice.master.size());
      row.param_begin = slice.param_begin;
      row.planes = opt_.param(param.name).planes;
      row.master = slice.master.data();
      row.exp_avg = slice.exp_avg.data();
      row.exp_avg_sq = slice.exp_avg_sq.data();
      row.grad = opt_.grad(param.name).data.sub(row.param_begin, row.elems).data;
      rows.push_back(row);
    }
    return rows;
  }

  Communicator& comm_;
  StreamRef stream_;
  DType grad_dtype_;
  GradMode grad_mode_;
  DistributedAdam opt_;
  bench::RandomValues grads_;
  std::int64_t owned_elems_ = 0, grad_elems_ = 0, cut_elems_ = 0;
};

void run_variant(const Variant& variant, int repeats, const bench::World& world, Communicator& comm,
                 StreamRef stream, bench::Measurements& rows) {
  Training training(variant, comm, stream);
  bench::Measurement row{.workload = variant.workload(),
                         .shape = variant.list.shape_name(),
                         .dtype = std::string(dtype_name(variant.grad_dtype)),
                         .planes = std::string(storage_name(variant.storage))};
  row.fraction = 1.0 / world.size();
  row.world_size = world.size();
  const std::int64_t wrong = world.sum(training.count_wrong());
  if (std::has_single_bit(static_cast<unsigned>(world.size()))) row.wrong_elements = wrong;
  const auto add = [&](const char* phase, std::optional<std::int64_t> bytes, const bench::Times& times) {
    row.phase = phase;
    row.bytes = bytes;
    row.times = world.slowest(times);
    rows.add(row);
  };
  const std::int64_t bytes = training.bytes_of_step(variant.storage);
  const bool is_zeroing = variant.grad_mode == GradMode::kAccumulate;
  const bench::Times device = is_zeroing ? training.with_gradients(repeats) : training.back_to_back(repeats);
  const Training::HostTimes host = training.one_by_one(repeats);
  bench::Times without_gradients;
  if (is_zeroing) without_gradients = training.back_to_back(repeats);
  // Without calls of grad_ready a captured step takes buffers to be overwritten for empty ones.
  std::optional<CapturedStep> captured;
  if (world.size() == 1 && is_zeroing) {
    captured.emplace(training.opt(), stream);
    row.launches = captured->kernels();
  }
  const std::int64_t all_bytes = bytes + training.bytes_of_zeroing();
  add("step", all_bytes, device);
  if (is_zeroing) add("step, grads 0", all_bytes, without_gradients);
  add("step synced", bytes, host.synced);
  add("step host", {}, host.call);
  if (world.size() > 1 && !is_zeroing) add("step reduced", bytes, training.reduced(repeats));
  if (!captured) return;
  add("step replay", all_bytes, training.replays(repeats, *captured));
}

std::vector<Variant> variants(const std::string& list, int world_size) {
  std::vector<Variant> all;
  if (list == "all" || list == "8b") {
    for (const Storage storage : {Storage::kRow, Storage::kBoth}) {
      for (const DType grad_dtype : {DType::kFp32, DType::kBf16}) {
        const Variant base{bench::llama_8b(), storage, grad_dtype};
        Variant no_clip = base, zeroing = base;
        no_clip.with_clip = false;
        zeroing.grad_mode = GradMode::kAccumulate;
        all.insert(all.end(), {base, no_clip, zeroing});
        if (world_size == 1) continue;
        Variant collective = base, no_clip_collective = no_clip;
        collective.gather = no_clip_collective.gather = GatherChoice::kCollective;
        all.insert(all.end(), {collective, no_clip_collective});
      }
    }
  }
  if (list == "all" || list == "small") {
    for (const int count : {28, 2800}) {
      Variant small{bench::many_small(count)};
      small.grad_mode = GradMode::kAccumulate;
      all.push_back(small);
    }
  }
  if (all.empty()) throw std::invalid_argument("--list " + list + "; allowed are all, 8b and small");
  return all;
}

void run(int argc, char** argv) {
  const int repeats = std::stoi(bench::option(argc, argv, "--repeats", "20"));
  const bench::World world(argc, argv);
  const std::vector<Variant> chosen = variants(bench::option(argc, argv, "--list", "all"), world.size());
  MXOPT_CUDA_CHECK(cudaSetDevice(world.device().index));
  const Stream stream(world.device());
  const auto comm =
      make_communicator({.device = world.device(), .timeout_s = kTimeoutS, .world_size = world.size()});
  bench::Measurements rows =
      bench::start_measurements(argc, argv, world.device(), stream.ref(), world.size(), world.rank());
  if (world.rank() == 0) std::cout << comm->describe() << '\n';
  for (const Variant& variant : chosen) run_variant(variant, repeats, world, *comm, stream.ref(), rows);
  if (world.rank() == 0) bench::write_json(rows, argc, argv);
}

}  // namespace

int main(int argc, char** argv) {
  return mxopt::bench::run_program("step_bench", run, argc, argv);
}
