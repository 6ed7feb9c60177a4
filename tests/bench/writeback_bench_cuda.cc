// Speed of the batch writeback on a GPU, against a large device copy measured in the same run.
//
// amax and cast are the throughput of calls back to back, in a CUDA graph: kernels may begin before the one
// in front is done, so a call's start is hidden by the end of the one before it. The calls go round over at
// least two sets of buffers whose masters together are larger than the second-level cache; at most 64 sets,
// so that those of one 160x96 stay in it. "amax, isolated" and "cast, isolated", of 1/64 of a matrix and of
// 300 params, are the time of one call between two kernels that overlap nothing (see measure_isolated).
//
// Masters of a shard have memory of their own that starts at a multiple of 256 bytes, so at offset 17 no row
// of the matrix is aligned. Bytes are those of writeback_bench on the host; wrong are bytes of packed scales,
// planes and scale arrays that differ from the host's, all of the first and of the last set compared. A
// master that is counted as not finite ends the program.
//
// In a scale arena the packed scales are the scale arrays themselves, as in the optimizer, so that the cast
// has none to copy: its bytes are those of the masters, the planes and the scales of the blocks that it owns.
#include "bench/writeback_bench_cuda.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <cuda_runtime.h>

#include "bench/cuda_measurements.h"
#include "bench/cuda_timer.h"
#include "bench/measurements.h"
#include "bench/random_values.h"
#include "bench/rotated_sets.h"
#include "bench/table.h"

#include "mxopt/params/cuda_handles.h"
#include "mxopt/quant/writeback.h"

namespace mxopt::bench {

namespace {

constexpr Device kCuda{DeviceKind::kCuda, 0};

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
  /// values  on the set's device.
  void fill(const RandomValues& values, Device device) const {
    for (const Mxfp8Shard& shard : shards) {
      // The set owns this memory; only the view of it is const.
      values.copy_to(const_cast<void*>(shard.master.data), shard.master.elems, StreamRef());
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
std::int64_t count_wrong(const Case& chosen, std::span<const Set> sets) {
  const Set expected(chosen, Device());
  expected.fill(RandomValues(chosen.dtype, 0, Device(), StreamRef()), Device());
  const Mxfp8Batch batch(expected.shards, Device());
  batch.partial_amax(expected.packed_scales(), StreamRef());
  batch.partial_cast(expected.packed_scales(), {}, StreamRef());
  std::int64_t wrong = 0;
  for (const Set* const set : {&sets.front(), &sets.back()}) {
    wrong += differing(expected.packed, set->packed) + differing(expected.planes, set->planes) +
             differing(expected.scales, set->scales);
  }
  return wrong;
}

void require_all_finite(const Buffer& nonfinite) {
  std::int64_t count = 0;
  copy_bytes(&count, nonfinite.data(), sizeof(count), kCuda, StreamRef());
  synchronize(kCuda, StreamRef());
  if (count != 0) {
    throw std::logic_error(std::to_string(count) + " masters were counted as not finite; there are none");
  }
}

struct Options {
  int replays;
  bool verify;
  std::int64_t max_elems;
  std::string shape;     // empty: all
  std::int64_t divisor;  // 0: all
};

void run_case(const Case& chosen, const Options& options, const RandomValues& masters, StreamRef stream,
              Measurements& rows) {
  std::vector<Set> sets;
  sets.emplace_back(chosen, kCuda);
  const auto packed_bytes = static_cast<std::int64_t>(sets[0].packed_scales().size());
  const std::int64_t owned = chosen.params * chosen.owned();
  const std::int64_t master_bytes = owned * dtype_bytes(chosen.dtype);
  const std::int64_t count = std::max<std::int64_t>(rotated_sets(master_bytes), 2);
  for (std::int64_t i = 1; i < count; ++i) sets.emplace_back(chosen, kCuda);
  std::vector<Mxfp8Batch> batches;
  for (const Set& set : sets) {
    set.fill(masters, kCuda);
    batches.emplace_back(set.shards, kCuda);
  }
  const Buffer nonfinite(8, kCuda, default_allocator(kCuda));
  fill_zero(nonfinite.data(), nonfinite.bytes(), kCuda, stream);
  const auto at = [&](int call) { return static_cast<std::size_t>(call) % sets.size(); };
  const auto call_amax = [&](int i) { batches[at(i)].partial_amax(sets[at(i)].packed_scales(), stream); };
  const auto call_cast = [&](int i) {
    batches[at(i)].partial_cast(sets[at(i)].packed_scales(), nonfinite.as<std::int64_t>(), stream);
  };
  const int calls = calls_over(count);
  const Times amax = measure_calls(calls, options.replays, stream, call_amax);
  const Times cast = measure_calls(calls, options.replays, stream, call_cast);
  Measurement row{.workload = chosen.arena ? "batch writeback, scale arena" : "batch writeback",
                  .shape = chosen.name(),
                  .dtype = std::string(dtype_name(chosen.dtype)),
                  .planes = chosen.both ? "both" : "row"};
  row.fraction = 1.0 / static_cast<double>(chosen.divisor);
  row.offset = chosen.offset;
  if (options.verify) row.wrong_elements = count_wrong(chosen, sets);
  const auto add = [&](const char* phase, const Times& times, std::int64_t bytes) {
    row.phase = phase;
    row.bytes = bytes;
    row.times = times;
    rows.add(row);
  };
  const std::int64_t amax_bytes = master_bytes + packed_bytes;
  const std::int64_t plane_bytes = owned * (chosen.both ? 2 : 1);
  const std::int64_t cast_bytes =
      master_bytes + plane_bytes + (chosen.arena ? plane_bytes / kBlockElems : 2 * packed_bytes);
  add("amax", amax, amax_bytes);
  add("cast", cast, cast_bytes);
  if (chosen.divisor == 64 || chosen.params > 1) {
    add("amax, isolated", measure_isolated(calls, options.replays, stream, call_amax), amax_bytes);
    add("cast, isolated", measure_isolated(calls, options.replays, stream, call_cast), cast_bytes);
  }
  require_all_finite(nonfinite);
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
  std::optional<RandomValues> masters;
  DType dtype = DType::kUint8;
  for (const Case& chosen : cases) {
    if (chosen.dtype != dtype) masters.emplace(chosen.dtype, 0, kCuda, stream.ref());
    dtype = chosen.dtype;
    run_case(chosen, options, *masters, stream.ref(), rows);
  }
  write_json(rows, argc, argv);
}

}  // namespace mxopt::bench
