// Speed of the batch writeback on a GPU, against a large device copy measured in the same run.
//
// Each time is that of one call in a CUDA graph that goes round over sets of buffers which together are
// larger than the second-level cache. Masters of a shard have memory of their own that starts at a multiple
// of 256 bytes, so at offset 17 no row of the matrix is aligned. Bytes are those of writeback_bench on the
// host; wrong are bytes of packed scales, planes and scale arrays that differ from the host's, all compared.
//
// In a scale arena the packed scales are the scale arrays themselves, as in the optimizer, so that the cast
// has none to copy: its bytes are those of the masters, the planes and the scales of the blocks that it owns.
#include "bench/writeback_bench_cuda.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <iostream>
#include <random>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <cuda_runtime.h>

#include "bench/cuda_timer.h"
#include "bench/table.h"

#include "mxopt/params/bf16.h"
#include "mxopt/params/cuda_handles.h"
#include "mxopt/quant/writeback.h"

namespace mxopt::bench {

namespace {

constexpr Device kCuda{DeviceKind::kCuda, 0};
constexpr std::int64_t kRotatedBytes = 256 << 20;  // several times the second-level cache
constexpr std::int64_t kMaxSets = 64;
constexpr int kCallsAtLeast = 24;

struct Case {
  std::int64_t rows;
  std::int64_t cols;
  DType dtype;
  bool both;
  std::int64_t divisor = 1;  // the shard is 1 / divisor of the matrix
  std::int64_t offset = 0;
  std::int64_t params = 1;
  bool arena = false;

  std::int64_t elems() const { return rows * cols; }
  std::int64_t owned() const { return elems() / divisor; }
  std::string name() const {
    const std::string shape = std::to_string(rows) + "x" + std::to_string(cols);
    return params == 1 ? shape : std::to_string(params) + " of " + shape;
  }
};

/// Masters as bytes: normal values, repeated with a period that no row length divides.
std::vector<std::uint8_t> make_masters(DType dtype, std::int64_t elems) {
  constexpr std::size_t kPeriodElems = 1048573;
  std::mt19937 random(1);
  std::normal_distribution<float> normal(0.0f, 0.02f);
  std::vector<std::uint8_t> period;
  for (std::size_t i = 0; i < kPeriodElems; ++i) {
    const std::uint32_t bits = float_to_bits(normal(random));
    const std::uint32_t rounded = bf16_rne_bits(bits);
    const auto* bytes = reinterpret_cast<const std::uint8_t*>(dtype == DType::kFp32 ? &bits : &rounded);
    period.insert(period.end(), bytes, bytes + dtype_bytes(dtype));
  }
  std::vector<std::uint8_t> masters(static_cast<std::size_t>(elems * dtype_bytes(dtype)));
  for (std::size_t at = 0; at < masters.size(); at += period.size()) {
    std::memcpy(masters.data() + at, period.data(), std::min(period.size(), masters.size() - at));
  }
  return masters;
}

/// One set of buffers: the memory of all params of a case on one device.
struct Set {
  Buffer masters, planes, scales, packed;
  std::vector<Mxfp8Shard> shards;

  Set(const Case& chosen, Device device) {
    const auto allocator = default_allocator(device);
    const std::int64_t master_bytes = round_up(chosen.owned() * dtype_bytes(chosen.dtype), 256);
    const std::int64_t plane_bytes = round_up(chosen.elems(), 256);
    const std::int64_t row_bytes = row_scale_bytes(chosen.rows, chosen.cols);
    const std::int64_t param_scales =
        row_bytes + (chosen.both ? column_scale_bytes(chosen.rows, chosen.cols) : 0);
    masters = Buffer(chosen.params * master_bytes, device, allocator);
    planes = Buffer(chosen.params * plane_bytes * (chosen.both ? 2 : 1), device, allocator);
    scales = Buffer(chosen.params * param_scales, device, allocator);
    if (!chosen.arena) packed = Buffer(chosen.params * param_scales, device, allocator);
    for (std::int64_t p = 0; p < chosen.params; ++p) {
      Mxfp8Shard shard;
      shard.name = "w";
      shard.weight.rows = chosen.rows;
      shard.weight.cols = chosen.cols;
      shard.weight.row_data = planes.data() + p * plane_bytes * (chosen.both ? 2 : 1);
      shard.weight.row_scales = scales.data() + p * param_scales;
      if (chosen.both) {
        shard.weight.column_data = shard.weight.row_data + plane_bytes;
        shard.weight.column_scales = shard.weight.row_scales + row_bytes;
      }
      shard.master = ConstTypedSpan(masters.data() + p * master_bytes, chosen.dtype, chosen.owned());
      shard.start = chosen.offset;
      shards.push_back(shard);
    }
  }

  std::span<std::uint8_t> packed_scales() const {
    return packed.bytes() != 0 ? packed.as<std::uint8_t>() : scales.as<std::uint8_t>();
  }
  std::int64_t bytes() const { return masters.bytes() + planes.bytes() + scales.bytes() + packed.bytes(); }
  void fill(const std::vector<std::uint8_t>& values, Device device) const {
    for (const Mxfp8Shard& shard : shards) {
      // The set owns this memory; only the view of it is const.
      copy_bytes(const_cast<void*>(shard.master.data), values.data(), shard.master.bytes(), device,
                 StreamRef());
    }
    synchronize(device, StreamRef());
  }
};

std::int64_t differing(const Buffer& expected, const Buffer& got) {
  std::vector<std::uint8_t> bytes(static_cast<std::size_t>(got.bytes()));
  copy_bytes(bytes.data(), got.data(), got.bytes(), kCuda, StreamRef());
  synchronize(kCuda, StreamRef());
  if (std::memcmp(bytes.data(), expected.data(), bytes.size()) == 0) return 0;
  std::int64_t count = 0;
  for (std::size_t i = 0; i < bytes.size(); ++i) count += bytes[i] != expected.data()[i] ? 1 : 0;
  return count;
}

/// Bytes of packed scales, planes and scale arrays that differ from the host's.
std::int64_t count_wrong(const Case& chosen, const Set& set, const std::vector<std::uint8_t>& masters) {
  const Set expected(chosen, Device());
  expected.fill(masters, Device());
  const Mxfp8Batch batch(expected.shards, Device());
  batch.partial_amax(expected.packed_scales(), StreamRef());
  batch.partial_cast(expected.packed_scales(), {}, StreamRef());
  return differing(expected.packed, set.packed) + differing(expected.planes, set.planes) +
         differing(expected.scales, set.scales);
}

struct Options {
  int replays;
  bool verify;
  std::int64_t max_elems;
  std::string shape;     // empty: all
  std::int64_t divisor;  // 0: all
};

void run_case(const Case& chosen, const Options& options, const std::vector<std::uint8_t>& masters,
              StreamRef stream, Measurements& rows) {
  std::vector<Set> sets;
  sets.emplace_back(chosen, kCuda);
  // What a call touches, not the whole matrix, must not fit into the cache.
  const auto packed_bytes = static_cast<std::int64_t>(sets[0].packed_scales().size());
  const std::int64_t owned = chosen.params * chosen.owned();
  const std::int64_t master_bytes = owned * dtype_bytes(chosen.dtype);
  const std::int64_t count = std::clamp<std::int64_t>(kRotatedBytes / master_bytes + 1, 2, kMaxSets);
  for (std::int64_t i = 1; i < count; ++i) sets.emplace_back(chosen, kCuda);
  std::vector<Mxfp8Batch> batches;
  for (const Set& set : sets) {
    set.fill(masters, kCuda);
    batches.emplace_back(set.shards, kCuda);
  }
  const Buffer nonfinite(8, kCuda, default_allocator(kCuda));
  const int calls = std::max(static_cast<int>(count), kCallsAtLeast);
  const auto at = [&](int call) { return static_cast<std::size_t>(call) % sets.size(); };
  const Times amax = measure_calls(calls, options.replays, stream, [&](int i) {
    batches[at(i)].partial_amax(sets[at(i)].packed_scales(), stream);
  });
  const Times cast = measure_calls(calls, options.replays, stream, [&](int i) {
    batches[at(i)].partial_cast(sets[at(i)].packed_scales(), nonfinite.as<std::int64_t>(), stream);
  });
  Measurement row{.workload = chosen.arena ? "batch writeback, scale arena" : "batch writeback",
                  .shape = chosen.name(),
                  .dtype = std::string(dtype_name(chosen.dtype)),
                  .planes = chosen.both ? "both" : "row"};
  row.fraction = 1.0 / static_cast<double>(chosen.divisor);
  row.offset = chosen.offset;
  if (options.verify) row.wrong_elements = count_wrong(chosen, sets.back(), masters);
  const auto add = [&](const char* phase, const Times& times, std::int64_t bytes) {
    row.phase = phase;
    row.bytes = bytes;
    row.times = times;
    rows.add(row);
  };
  add("amax", amax, master_bytes + packed_bytes);
  const std::int64_t plane_bytes = owned * (chosen.both ? 2 : 1);
  add("cast", cast,
      master_bytes + plane_bytes + (chosen.arena ? plane_bytes / kBlockElems : 2 * packed_bytes));
}

std::vector<Case> all_cases() {
  constexpr std::pair<std::int64_t, std::int64_t> kShapes[] = {
      {160, 96}, {1024, 1024}, {4096, 4096}, {16384, 6144}, {28672, 8192}};
  std::vector<Case> cases;
  for (const DType dtype : {DType::kBf16, DType::kFp32}) {
    for (const auto& [rows, cols] : kShapes) {
      for (const bool both : {false, true}) {
        cases.push_back({rows, cols, dtype, both});
        cases.push_back({rows, cols, dtype, both, 4, 17});
      }
    }
    for (std::int64_t divisor = 2; divisor <= 64; divisor *= 2) {
      cases.push_back({16384, 6144, dtype, true, divisor});
    }
    for (std::int64_t divisor = 1; divisor <= 64; divisor *= 4) {
      cases.push_back({16384, 6144, dtype, true, divisor, 0, 1, true});
    }
    cases.push_back({160, 96, dtype, true, 1, 0, 300});
  }
  return cases;
}

}  // namespace

void run_writeback_on_cuda(int argc, char** argv) {
  const Options options{std::stoi(option(argc, argv, "--repeats", "9")),
                        option(argc, argv, "--verify", "1") != "0",
                        std::stoll(option(argc, argv, "--max-elems", "1000000000")),
                        option(argc, argv, "--shape", ""), std::stoll(option(argc, argv, "--divisor", "0"))};
  const Stream stream(kCuda);
  Measurements rows = start_measurements(argc, argv, kCuda, stream.ref());
  std::vector<Case> cases = all_cases();
  std::erase_if(cases, [&](const Case& chosen) {
    return chosen.elems() > options.max_elems || !(options.shape.empty() || chosen.name() == options.shape) ||
           !(options.divisor == 0 || chosen.divisor == options.divisor);
  });
  if (cases.empty()) throw std::invalid_argument("no case has that --shape, --divisor and --max-elems");
  std::int64_t largest = 0;
  for (const Case& chosen : cases) largest = std::max(largest, chosen.owned());
  DType dtype = DType::kUint8;
  std::vector<std::uint8_t> masters;
  for (const Case& chosen : cases) {
    if (chosen.dtype != dtype) masters = make_masters(chosen.dtype, largest);
    dtype = chosen.dtype;
    run_case(chosen, options, masters, stream.ref(), rows);
  }
  write_json(rows, argc, argv);
}

}  // namespace mxopt::bench
