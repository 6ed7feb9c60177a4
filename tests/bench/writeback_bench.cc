// Speed of the batch writeback, against a copy measured in the same run.
//
//   writeback_bench [--rows 4096] [--cols 4096] [--repeats 15] [--json FILE]
//   writeback_bench --device cuda [--repeats 9] [--verify 1|0] [--max-elems N] [--shape 16384x6144]
//                   [--divisor N: parts of 1 / N] [--json FILE] [--commit TEXT]
//
// On the host:
// One line per phase, storage, master type, part of the matrix and number of threads:
//   bytes   what the phase must move: the owned masters, the owned plane bytes it writes, and the scales
//           (amax: packed ones written; cast: packed ones read, scale arrays written)
//   GB/s    bytes over the median time, ratio = that over the copy's GB/s with as many threads
//   wrong   bytes of planes and scales that differ from the reference, in the first whole band of the range
// Masters are larger than the caches at the default size; nothing is flushed.
#include <cstdint>
#include <iostream>
#include <stdexcept>
#include <string>
#include <vector>

#include "bench/host_ceiling.h"
#include "bench/random_values.h"
#include "bench/table.h"
#if MXOPT_WITH_CUDA
#include "bench/writeback_bench_cuda.h"
#endif
#include "support/reference_mxfp8.h"

#include "mxopt/params/bf16.h"
#include "mxopt/quant/writeback.h"

namespace {

using namespace mxopt;

struct Options {
  std::int64_t rows;
  std::int64_t cols;
  int repeats;
};

struct Masters {
  std::vector<float> fp32;
  std::vector<Bf16> bf16;
};

Masters make_masters(std::int64_t elems) {
  Masters masters;
  masters.fp32.resize(static_cast<std::size_t>(elems));
  bench::RandomValues(DType::kFp32, 0, Device(), StreamRef())
      .copy_to(masters.fp32.data(), elems, StreamRef());
  for (const float value : masters.fp32) masters.bf16.push_back(fp32_to_bf16(value));
  return masters;
}

/// Bytes of the first whole band of the range that differ from the reference.
std::int64_t count_wrong(const Mxfp8Shard& shard, const Masters& masters) {
  const MxView& weight = shard.weight;
  const std::int64_t band_elems = kBlockElems * weight.cols;
  const std::int64_t band = (shard.start + band_elems - 1) / band_elems;
  const std::int64_t first = band * band_elems;
  if (first + band_elems > shard.start + shard.master.elems) return -1;
  const std::span<const float> values =
      std::span(masters.fp32).subspan(static_cast<std::size_t>(first), static_cast<std::size_t>(band_elems));
  const reference::Mxfp8 expected = reference::quantize(values, kBlockElems, weight.cols, false);
  std::int64_t wrong = 0;
  for (std::int64_t i = 0; i < band_elems; ++i) {
    const auto at = static_cast<std::size_t>(i);
    if (weight.has_row()) wrong += weight.row_data[first + i] != expected.row_data[at] ? 1 : 0;
    if (weight.has_column()) wrong += weight.column_data[first + i] != expected.column_data[at] ? 1 : 0;
  }
  const std::int64_t row_bytes = kBlockElems * row_scale_stride(weight.cols);
  for (std::int64_t i = 0; weight.has_row() && i < row_bytes; ++i) {
    wrong +=
        weight.row_scales[band * row_bytes + i] != expected.row_scales[static_cast<std::size_t>(i)] ? 1 : 0;
  }
  const std::int64_t column_bytes = column_scale_stride(weight.cols);
  for (std::int64_t i = 0; weight.has_column() && i < column_bytes; ++i) {
    wrong +=
        weight.column_scales[band * column_bytes + i] != expected.column_scales[static_cast<std::size_t>(i)]
            ? 1
            : 0;
  }
  return wrong;
}

struct Case {
  Storage storage;
  DType dtype;
  bool quarter;  // a quarter of the matrix at offset 17, else all of it
};

void run_case(const Case& chosen, const Options& options, const Masters& masters, int threads,
              double copy_gb_per_s, bench::Table* table) {
  const std::int64_t elems = options.rows * options.cols;
  const bool both = chosen.storage == Storage::kBoth;
  std::vector<std::uint8_t> row_data(static_cast<std::size_t>(elems));
  std::vector<std::uint8_t> column_data(static_cast<std::size_t>(both ? elems : 0));
  std::vector<std::uint8_t> row_scales(static_cast<std::size_t>(row_scale_bytes(options.rows, options.cols)));
  std::vector<std::uint8_t> column_scales(
      static_cast<std::size_t>(column_scale_bytes(options.rows, options.cols)));

  Mxfp8Shard shard;
  shard.name = "w";
  shard.weight = {options.rows, options.cols, row_data.data(), row_scales.data(), nullptr, nullptr};
  if (both) {
    shard.weight.column_data = column_data.data();
    shard.weight.column_scales = column_scales.data();
  }
  shard.start = chosen.quarter ? 17 : 0;
  const ConstTypedSpan master = chosen.dtype == DType::kFp32
                                    ? ConstTypedSpan(std::span<const float>(masters.fp32))
                                    : ConstTypedSpan(std::span<const Bf16>(masters.bf16));
  shard.master = master.sub(shard.start, chosen.quarter ? elems / 4 : elems);
  const std::span<const Mxfp8Shard> batch(&shard, 1);
  std::vector<std::uint8_t> packed(static_cast<std::size_t>(packed_scale_bytes(batch)));
  std::vector<std::int64_t> nonfinite(1);

  const bench::Times amax = bench::measure(
      options.repeats, [] {}, [&] { partial_amax(batch, packed, Device(), StreamRef()); });
  const bench::Times cast = bench::measure(
      options.repeats, [] {}, [&] { partial_cast(batch, packed, nonfinite, Device(), StreamRef()); });
  const std::int64_t wrong = count_wrong(shard, masters);

  const auto scale_bytes = static_cast<std::int64_t>(packed.size());
  const std::int64_t amax_bytes = shard.master.bytes() + scale_bytes;
  const std::int64_t cast_bytes =
      shard.master.bytes() + shard.master.elems * (both ? 2 : 1) + 2 * scale_bytes;
  const auto add = [&](const char* phase, const bench::Times& times, std::int64_t bytes) {
    const double speed = bench::gb_per_s(bytes, times.p50_ms);
    table->add({phase, std::string(storage_name(chosen.storage)), std::string(dtype_name(chosen.dtype)),
                chosen.quarter ? "1/4 at 17" : "all", threads, bytes, times.min_ms, times.p50_ms, speed,
                copy_gb_per_s, speed / copy_gb_per_s, wrong});
  };
  add("amax", amax, amax_bytes);
  add("cast", cast, cast_bytes);
}

void run(int argc, char** argv) {
  const Options options{std::stoll(bench::option(argc, argv, "--rows", "4096")),
                        std::stoll(bench::option(argc, argv, "--cols", "4096")),
                        std::stoi(bench::option(argc, argv, "--repeats", "15"))};
  const Masters masters = make_masters(options.rows * options.cols);
  bench::Table table({"phase", "storage", "master", "range", "threads", "bytes", "min_ms", "p50_ms", "GB/s",
                      "copy_GB/s", "ratio", "wrong"});
  const auto copy_bytes = static_cast<std::int64_t>(masters.fp32.size() * sizeof(float));
  for (const int threads : bench::thread_counts()) {
    bench::use_threads(threads);
    const double copy_gb_per_s = bench::copy_gb_per_s(copy_bytes, options.repeats);
    for (const Storage storage : {Storage::kRow, Storage::kBoth}) {
      for (const DType dtype : {DType::kFp32, DType::kBf16}) {
        for (const bool quarter : {false, true}) {
          run_case({storage, dtype, quarter}, options, masters, threads, copy_gb_per_s, &table);
        }
      }
    }
  }
  const std::string json = bench::option(argc, argv, "--json", "");
  if (!json.empty()) table.write_json(json);
}

void run_on_device(int argc, char** argv) {
  const std::string device = bench::option(argc, argv, "--device", "host");
  if (device == "host") return run(argc, argv);
#if MXOPT_WITH_CUDA
  if (device == "cuda") return bench::run_writeback_on_cuda(argc, argv);
#endif
  throw std::invalid_argument("--device " + device + " is none of this build's");
}

}  // namespace

int main(int argc, char** argv) {
  return mxopt::bench::run_program("writeback_bench", run_on_device, argc, argv);
}
