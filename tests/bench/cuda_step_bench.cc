// Speed of the passes of one step on a CUDA device, against a large copy measured in the same run.
//
//   cuda_step_bench [--repeats 15] [--workload all|shapes|small|llama] [--json FILE]
//
//   workload  shapes: one matrix, all of it. small: 300 params of 160 x 96. llama: the matrices of
//   Llama-3-8B's size
//             classes, 872 million elements in 28 params, one rank's work of W.
//   bytes     update: gradient read, master and both moments read and written, plane bytes written: 29 (row)
//   or 30
//             (both) per element with fp32 gradients, two less with bf16. stats: the gradient read.
//   wrong     elements of the first whole owned band of each param whose master, moments or plane bytes
//   differ from the
//             reference after one update
#include <cstdint>
#include <iostream>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "bench/cuda_timer.h"
#include "bench/first_step.h"
#include "bench/table.h"
#include "support/reference_adam.h"
#include "support/reference_mxfp8.h"

#include "mxopt/collectives/self_communicator.h"
#include "mxopt/optimizer/step_tables.h"
#include "mxopt/params/bf16.h"

namespace {

using namespace mxopt;

constexpr Device kDevice{DeviceKind::kCuda, 0};

struct Workload {
  std::string name;
  std::vector<std::vector<std::int64_t>> shapes;
  int world_size = 1;
};

std::vector<ParamSpec> specs_of(const Workload& workload, Storage storage) {
  std::vector<ParamSpec> specs;
  for (const auto& shape : workload.shapes) {
    ParamSpec spec;
    spec.name = "p" + std::to_string(specs.size());
    spec.shape = shape;
    spec.storage = storage;
    specs.push_back(std::move(spec));
  }
  return specs;
}

LayoutOptions layout_options(int world_size) {
  LayoutOptions options;
  options.world_size = world_size;
  return options;
}

/// What rank 0 of a workload's world size holds, filled with random values.
class RankWork {
 public:
  RankWork(const Workload& workload, Storage storage, DType grad_dtype, StreamRef stream)
      : stream_(stream),
        layout_(specs_of(workload, storage), layout_options(workload.world_size)),
        storage_(layout_, grad_dtype, layout_.params().size(), kDevice, default_allocator(kDevice)),
        sync_(layout_, storage_, self_, GatherFormat::kQuantized, ScaleLayout::kCompact,
              default_allocator(kDevice)),
        tables_(make_step_tables(layout_, storage_, sync_, std::vector<int>(layout_.params().size(), 0), 0)),
        kernels_(StepKernels::make(tables_, kDevice)) {
    std::mt19937 random(1);
    std::normal_distribution<float> normal(0.0f, 0.02f);
    std::vector<float> values((1 << 20) + 77);
    for (float& value : values) value = normal(random);
    for (const SegmentRow& row : tables_.segments) {
      fill(row.master, row.elems, values);
      if (grad_dtype == DType::kFp32) {
        fill(static_cast<float*>(const_cast<void*>(row.grad)), row.elems, values);
      } else {
        std::vector<Bf16> rounded;
        for (const float value : values) rounded.push_back(fp32_to_bf16(value));
        fill(static_cast<Bf16*>(const_cast<void*>(row.grad)), row.elems, rounded);
      }
      elems_ += row.elems;
    }
    synchronize(kDevice, stream_);
  }

  StepKernels& kernels() { return *kernels_; }
  std::int64_t elems() const { return elems_; }

  /// One update, and the differences in the first whole owned band of each param.
  std::int64_t count_wrong(std::span<const AdamScalars> scalars, const reference::AdamSettings& settings) {
    std::vector<std::vector<float>> masters, grads;
    for (const SegmentRow& row : tables_.segments) {
      masters.push_back(read(row.master + band_begin(row), band_elems(row)));
      grads.push_back(read_grads(row));
    }
    kernels_->fused_update(scalars, nullptr, stream_);
    std::int64_t wrong = 0;
    for (std::size_t s = 0; s < tables_.segments.size(); ++s) {
      const SegmentRow& row = tables_.segments[s];
      const std::int64_t count = band_elems(row);
      if (count == 0) continue;
      reference::AdamState<float> state(masters[s]);
      reference::adam_step(state, grads[s], settings, 1);
      const reference::Mxfp8 expected = reference::quantize(state.p, kBlockElems, row.planes.cols, false);
      const std::vector<float> p = read(row.master + band_begin(row), count);
      const std::vector<float> m = read(row.exp_avg + band_begin(row), count);
      const std::vector<float> v = read(row.exp_avg_sq + band_begin(row), count);
      const std::int64_t at = row.param_begin + band_begin(row);
      const std::vector<std::uint8_t> rows = read(row.planes.row_data + at, count);
      std::vector<std::uint8_t> columns;
      if (row.planes.has_column()) columns = read(row.planes.column_data + at, count);
      for (std::size_t i = 0; i < p.size(); ++i) {
        wrong += p[i] != state.p[i] || m[i] != state.m[i] || v[i] != state.v[i] ||
                 rows[i] != expected.row_data[i] ||
                 (!columns.empty() && columns[i] != expected.column_data[i]);
      }
    }
    return wrong;
  }

 private:
  template <class T>
  void fill(T* to, std::int64_t elems, const std::vector<T>& values) const {
    const auto chunk = static_cast<std::int64_t>(values.size());
    for (std::int64_t begin = 0; begin < elems; begin += chunk) {
      const std::int64_t count = std::min(chunk, elems - begin);
      copy_bytes(to + begin, values.data(), count * static_cast<std::int64_t>(sizeof(T)), kDevice, stream_);
    }
  }
  template <class T>
  std::vector<T> read(const T* from, std::int64_t count) const {
    std::vector<T> values(static_cast<std::size_t>(count));
    copy_bytes(values.data(), from, count * static_cast<std::int64_t>(sizeof(T)), kDevice, stream_);
    synchronize(kDevice, stream_);
    return values;
  }
  std::vector<float> read_grads(const SegmentRow& row) const {
    const std::int64_t begin = band_begin(row);
    if (tables_.grad_dtype == DType::kFp32) {
      return read(static_cast<const float*>(row.grad) + begin, band_elems(row));
    }
    std::vector<float> values;
    for (const Bf16 value : read(static_cast<const Bf16*>(row.grad) + begin, band_elems(row))) {
      values.push_back(bf16_to_fp32(value));
    }
    return values;
  }
  /// In the segment.
  static std::int64_t band_begin(const SegmentRow& row) {
    return round_up(row.param_begin, kBlockElems * row.planes.cols) - row.param_begin;
  }
  static std::int64_t band_elems(const SegmentRow& row) {
    const std::int64_t whole = kBlockElems * row.planes.cols;
    return band_begin(row) + whole <= row.elems ? whole : 0;
  }

  StreamRef stream_;
  SelfCommunicator self_{kDevice};
  Layout layout_;
  ParamStorage storage_;
  ParamSync sync_;
  StepTables tables_;
  std::unique_ptr<StepKernels> kernels_;
  std::int64_t elems_ = 0;
};

std::vector<Workload> workloads(const std::string& which) {
  std::vector<Workload> all;
  const auto wants = [&](const char* name) { return which == "all" || which == name; };
  if (wants("shapes")) {
    for (const auto& shape : std::vector<std::vector<std::int64_t>>{
             {160, 96}, {1024, 1024}, {4096, 4096}, {16384, 6144}, {28672, 8192}}) {
      all.push_back({std::to_string(shape[0]) + "x" + std::to_string(shape[1]), {shape}, 1});
    }
  }
  if (wants("small"))
    all.push_back({"300 of 160x96", std::vector<std::vector<std::int64_t>>(300, {160, 96}), 1});
  if (wants("llama")) {
    // Four layers of Llama-3-8B: q, k, v, o, gate, up, down.
    Workload llama{"llama", {}, 1};
    for (int layer = 0; layer < 4; ++layer) {
      for (const auto& shape : std::vector<std::vector<std::int64_t>>{{4096, 4096},
                                                                      {1024, 4096},
                                                                      {1024, 4096},
                                                                      {4096, 4096},
                                                                      {14336, 4096},
                                                                      {14336, 4096},
                                                                      {4096, 14336}}) {
        llama.shapes.push_back(shape);
      }
    }
    for (const int world_size : {1, 2, 8, 64}) {
      llama.world_size = world_size;
      all.push_back(llama);
    }
  }
  return all;
}

void run(int argc, char** argv) {
  const int repeats = std::stoi(bench::option(argc, argv, "--repeats", "15"));
  const Stream stream(kDevice);
  const double ceiling = bench::copy_tb_per_s(kDevice, stream.ref());
  std::cout << "ceiling: " << ceiling << " TB/s, a copy of 2 GiB on the device, read and written\n";
  const reference::AdamSettings settings;
  const std::vector<AdamScalars> host_scalars = {bench::first_step_scalars(settings)};
  const Buffer memory(sizeof(AdamScalars), kDevice, default_allocator(kDevice));
  copy_bytes(memory.data(), host_scalars.data(), sizeof(AdamScalars), kDevice, stream.ref());
  const std::span<const AdamScalars> scalars(reinterpret_cast<const AdamScalars*>(memory.data()), 1);
  const Buffer statistics(sizeof(StepStatistics), kDevice, default_allocator(kDevice));

  bench::Table table({"workload", "phase", "planes", "dtype", "world_size", "bytes", "us_min", "us_median",
                      "tb_per_s", "ratio", "wrong"});
  for (const Workload& workload : workloads(bench::option(argc, argv, "--workload", "all"))) {
    for (const Storage storage : {Storage::kRow, Storage::kBoth}) {
      for (const DType grad_dtype : {DType::kFp32, DType::kBf16}) {
        RankWork work(workload, storage, grad_dtype, stream.ref());
        const std::int64_t wrong = work.count_wrong(scalars, settings);
        const auto add = [&](const char* phase, std::int64_t bytes, const bench::Times& times) {
          const double speed = bench::gb_per_s(bytes, times.p50_ms) / 1000;
          table.add({workload.name, phase, std::string(storage_name(storage)),
                     std::string(dtype_name(grad_dtype)), workload.world_size, bytes, 1000 * times.min_ms,
                     1000 * times.p50_ms, speed, speed / ceiling, wrong});
        };
        const std::int64_t state_bytes = 24 + (storage == Storage::kBoth ? 2 : 1);
        add("update", work.elems() * (state_bytes + dtype_bytes(grad_dtype)),
            bench::measure_on_device(repeats, stream.ref(),
                                     [&] { work.kernels().fused_update(scalars, nullptr, stream.ref()); }));
        if (storage == Storage::kBoth) continue;
        add("stats", work.elems() * dtype_bytes(grad_dtype),
            bench::measure_on_device(repeats, stream.ref(), [&] {
              work.kernels().grad_stats(*reinterpret_cast<StepStatistics*>(statistics.data()), stream.ref());
            }));
      }
    }
  }
  const std::string json = bench::option(argc, argv, "--json", "");
  if (!json.empty()) table.write_json(json);
}

}  // namespace

int main(int argc, char** argv) {
  return mxopt::bench::run_program("cuda_step_bench", run, argc, argv);
}
