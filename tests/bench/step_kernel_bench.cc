// Speed of the host's fused update (Adam and writeback in one pass) and of the gradient statistics, against a
// copy measured in the same run.
//
//   step_kernel_bench [--rows 4096] [--cols 4096] [--repeats 9] [--json FILE]
//
//   range   all of the matrix, or the quarter that begins 17 alignment units (17 * 128 elements) in: shards
//   of the
//           optimizer begin at multiples of 128, so that is its unaligned case, with a cut band at either end
//   bytes   update: gradient read, master and both moments read and written, plane bytes written: 29 (row) or
//   30 (both)
//           per element with fp32 gradients, two less with bf16; statistics: the gradient read
//   wrong   masters, moments and plane bytes of one band that differ from the reference after the first step
#include <cstdint>
#include <iostream>
#include <random>
#include <string>
#include <vector>

#include "bench/first_step.h"
#include "bench/host_ceiling.h"
#include "bench/table.h"
#include "support/reference_adam.h"
#include "support/reference_mxfp8.h"

#include "mxopt/optimizer/step_kernels.h"
#include "mxopt/params/bf16.h"

namespace {

using namespace mxopt;

struct Options {
  std::int64_t rows;
  std::int64_t cols;
  int repeats;
};

struct Case {
  Storage storage;
  DType grad_dtype;
  bool quarter;
};

/// One rank's piece of one param, with everything the kernels touch.
class Piece {
 public:
  Piece(const Case& chosen, const Options& options, std::span<const float> masters,
        std::span<const float> grads)
      : elems_(chosen.quarter ? options.rows * options.cols / 4 : options.rows * options.cols),
        begin_(chosen.quarter ? 17 * 128 : 0),
        initial_(owned(masters)),
        grad_(owned(grads)),
        master_(initial_),
        exp_avg_(grad_.size()),
        exp_avg_sq_(grad_.size()) {
    for (float& value : grad_) {
      grad_bf16_.push_back(fp32_to_bf16(value));
      if (chosen.grad_dtype == DType::kBf16) value = bf16_rne(value);
    }
    const std::int64_t whole = options.rows * options.cols;
    planes_.rows = options.rows;
    planes_.cols = options.cols;
    planes_.row_data = fill(row_data_, whole);
    planes_.row_scales = fill(row_scales_, row_scale_bytes(options.rows, options.cols));
    if (chosen.storage == Storage::kBoth) {
      planes_.column_data = fill(column_data_, whole);
      planes_.column_scales = fill(column_scales_, column_scale_bytes(options.rows, options.cols));
    }
    SegmentRow row;
    row.elems = elems_;
    row.param_begin = begin_;
    row.planes = planes_;
    row.master = master_.data();
    row.exp_avg = exp_avg_.data();
    row.exp_avg_sq = exp_avg_sq_.data();
    row.grad = chosen.grad_dtype == DType::kFp32 ? static_cast<const void*>(grad_.data()) : grad_bf16_.data();
    row.status = &status_;
    kernels_ = StepKernels::make({{row}, chosen.grad_dtype}, Device());
  }

  StepKernels& kernels() { return *kernels_; }
  std::int64_t elems() const { return elems_; }

  /// Differences in the first whole band after one update.
  std::int64_t count_wrong(const reference::AdamSettings& settings) const {
    const std::int64_t band_elems = kBlockElems * planes_.cols;
    const std::int64_t band = (begin_ + band_elems - 1) / band_elems;
    const auto at = static_cast<std::size_t>(band * band_elems - begin_);
    const auto count = static_cast<std::size_t>(band_elems);
    reference::AdamState<float> state(
        std::vector<float>(initial_.begin() + static_cast<std::ptrdiff_t>(at),
                           initial_.begin() + static_cast<std::ptrdiff_t>(at + count)));
    reference::adam_step(state, std::span(grad_).subspan(at, count), settings, 1);
    const reference::Mxfp8 expected = reference::quantize(state.p, kBlockElems, planes_.cols, false);
    std::int64_t wrong = 0;
    for (std::size_t i = 0; i < count; ++i) {
      const std::size_t whole = static_cast<std::size_t>(band * band_elems) + i;
      // By bits: the sign of a zero counts.
      wrong += float_to_bits(master_[at + i]) != float_to_bits(state.p[i]) ||
               float_to_bits(exp_avg_[at + i]) != float_to_bits(state.m[i]) ||
               float_to_bits(exp_avg_sq_[at + i]) != float_to_bits(state.v[i]);
      wrong += row_data_[whole] != expected.row_data[i];
      if (planes_.has_column()) wrong += column_data_[whole] != expected.column_data[i];
    }
    return wrong;
  }

 private:
  std::vector<float> owned(std::span<const float> values) const {
    const auto part = values.subspan(static_cast<std::size_t>(begin_), static_cast<std::size_t>(elems_));
    return {part.begin(), part.end()};
  }

  static std::uint8_t* fill(std::vector<std::uint8_t>& bytes, std::int64_t size) {
    bytes.assign(static_cast<std::size_t>(size), 0);
    return bytes.data();
  }

  std::int64_t elems_, begin_;
  std::vector<float> initial_, grad_, master_, exp_avg_, exp_avg_sq_;
  std::vector<Bf16> grad_bf16_;
  std::vector<std::uint8_t> row_data_, row_scales_, column_data_, column_scales_;
  std::uint8_t status_ = 0;
  MxView planes_;
  std::unique_ptr<StepKernels> kernels_;
};

void run(int argc, char** argv) {
  const Options options{std::stoll(bench::option(argc, argv, "--rows", "4096")),
                        std::stoll(bench::option(argc, argv, "--cols", "4096")),
                        std::stoi(bench::option(argc, argv, "--repeats", "9"))};
  std::mt19937 random(1);
  std::normal_distribution<float> normal(0.0f, 0.02f);
  std::vector<float> masters(static_cast<std::size_t>(options.rows * options.cols)), grads(masters.size());
  for (float& value : masters) value = normal(random);
  for (float& value : grads) value = normal(random);

  const reference::AdamSettings settings;
  const std::vector<AdamScalars> scalars = {bench::first_step_scalars(settings)};
  bench::Table table({"phase", "storage", "grads", "range", "threads", "bytes", "min_ms", "p50_ms", "GB/s",
                      "copy_GB/s", "ratio", "wrong"});
  for (const int threads : bench::thread_counts()) {
    bench::use_threads(threads);
    const double ceiling =
        bench::copy_gb_per_s(static_cast<std::int64_t>(masters.size() * sizeof(float)), options.repeats);
    for (const Storage storage : {Storage::kRow, Storage::kBoth}) {
      for (const DType grad_dtype : {DType::kFp32, DType::kBf16}) {
        for (const bool quarter : {false, true}) {
          Piece piece({storage, grad_dtype, quarter}, options, masters, grads);
          piece.kernels().fused_update(scalars, nullptr, {});
          const std::int64_t wrong = piece.count_wrong(settings);
          StepStatistics statistics;
          const auto add = [&](const char* phase, std::int64_t bytes, const bench::Times& times) {
            const double speed = bench::gb_per_s(bytes, times.p50_ms);
            table.add({phase, std::string(storage_name(storage)), std::string(dtype_name(grad_dtype)),
                       quarter ? "1/4" : "all", threads, bytes, times.min_ms, times.p50_ms, speed, ceiling,
                       speed / ceiling, wrong});
          };
          const std::int64_t state_bytes = 24 + (storage == Storage::kBoth ? 2 : 1);
          add("update", piece.elems() * (state_bytes + dtype_bytes(grad_dtype)),
              bench::measure(
                  options.repeats, [] {}, [&] { piece.kernels().fused_update(scalars, nullptr, {}); }));
          add("stats", piece.elems() * dtype_bytes(grad_dtype),
              bench::measure(
                  options.repeats, [] {}, [&] { piece.kernels().grad_stats(statistics, {}); }));
        }
      }
    }
  }
  const std::string json = bench::option(argc, argv, "--json", "");
  if (!json.empty()) table.write_json(json);
}

}  // namespace

int main(int argc, char** argv) {
  return mxopt::bench::run_program("step_kernel_bench", run, argc, argv);
}
