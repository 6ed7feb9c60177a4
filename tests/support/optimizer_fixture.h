// An optimizer on W ranks that is fed equal reduced gradients, and a digest of everything it holds.
//
// A scenario is a list of params, a configuration and a course of steps. Whatever W, bucket limit, number of
// threads or transport it is run with, its facts must be the same.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <functional>
#include <iterator>
#include <limits>
#include <memory>
#include <numeric>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <gtest/gtest.h>
#if defined(_OPENMP)
#include <omp.h>
#endif

#include "support/compare.h"
#include "support/device_over_host.h"
#include "support/exact_inputs.h"
#include "support/host_view.h"
#include "support/reference_mxfp8.h"
#include "support/run_ranks.h"

#include "mxopt/collectives/communicator.h"
#include "mxopt/collectives/self_communicator.h"
#include "mxopt/optimizer/distributed_adam.h"
#include "mxopt/params/bf16.h"

namespace mxopt::test {

/// Threads that the host kernels of the calling thread use from now on.
inline void set_kernel_threads([[maybe_unused]] int threads) {
#if defined(_OPENMP)
  omp_set_num_threads(threads);
#endif
}

// ---------------------------------------------------------------------------------------------------------
// Values
// ---------------------------------------------------------------------------------------------------------

/// FNV-1a of bytes, continued from `seed`.
inline std::uint64_t digest_bytes(const void* data, std::size_t bytes,
                                  std::uint64_t seed = 14695981039346656037u) {
  const auto* at = static_cast<const unsigned char*>(data);
  for (std::size_t i = 0; i < bytes; ++i) seed = (seed ^ at[i]) * 1099511628211u;
  return seed;
}

inline std::uint64_t name_seed(std::string_view name) {
  return digest_bytes(name.data(), name.size());
}

/// Full 24-bit mantissas, magnitudes from 2^-14 to 2, some zeros of both signs.
inline std::vector<float> initial_values(std::string_view name, std::int64_t elems) {
  const std::uint64_t seed = name_seed(name);
  std::vector<float> values;
  values.reserve(static_cast<std::size_t>(elems));
  for (std::int64_t i = 0; i < elems; ++i) {
    const std::uint64_t bits = mix(seed, 0, i);
    const auto mantissa = static_cast<float>(static_cast<std::int64_t>(bits >> 39) - (std::int64_t{1} << 24));
    const int exponent = static_cast<int>(bits % 14);
    const float value = std::ldexp(mantissa, -24 - exponent);
    values.push_back(bits % 61 == 0 ? std::copysign(0.0f, value) : value);
  }
  return values;
}

/// Gradients with 7 significant bits: sums of up to 16 equal ones, and halves, are exact in fp32 and bf16.
inline std::vector<float> grad_values(std::string_view name, std::int64_t elems, int step) {
  const std::uint64_t seed = name_seed(name) + 7;
  const float unit = std::ldexp(1.0f, -10 - step % 6);
  std::vector<float> values;
  values.reserve(static_cast<std::size_t>(elems));
  for (std::int64_t i = 0; i < elems; ++i) {
    values.push_back(unit * static_cast<float>(static_cast<int>(mix(seed, step, i) % 255) - 127));
  }
  return values;
}

inline void write_values(TypedSpan to, std::span<const float> values, float factor = 1) {
  if (to.dtype == DType::kFp32) {
    std::ranges::transform(values, to.as<float>().begin(), [&](float value) { return value * factor; });
  } else {
    std::ranges::transform(values, to.as<Bf16>().begin(),
                           [&](float value) { return fp32_to_bf16(value * factor); });
  }
}

inline void add_values(TypedSpan to, std::span<const float> values, float factor) {
  if (to.dtype == DType::kFp32) {
    const std::span<float> sums = to.as<float>();
    for (std::size_t i = 0; i < values.size(); ++i) sums[i] += values[i] * factor;
  } else {
    const std::span<Bf16> sums = to.as<Bf16>();
    for (std::size_t i = 0; i < values.size(); ++i) {
      sums[i] = fp32_to_bf16(bf16_to_fp32(sums[i]) + values[i] * factor);
    }
  }
}

inline std::vector<float> read_values(ConstTypedSpan from) {
  if (from.dtype == DType::kFp32) {
    const std::span<const float> values = from.as<float>();
    return {values.begin(), values.end()};
  }
  std::vector<float> values;
  for (const Bf16 value : from.as<Bf16>()) values.push_back(bf16_to_fp32(value));
  return values;
}

// ---------------------------------------------------------------------------------------------------------
// Param lists
// ---------------------------------------------------------------------------------------------------------

inline ParamSpec spec(std::string name, std::vector<std::int64_t> shape,
                      std::optional<ParamFormat> format = {}, std::optional<Storage> storage = {}) {
  ParamSpec result;
  result.name = std::move(name);
  result.shape = std::move(shape);
  result.format = format;
  result.storage = storage;
  return result;
}

/// All families, odd sizes, fallbacks, ties, frozen and empty params, matrices wider than a shard.
inline std::vector<ParamSpec> mixed_specs() {
  std::vector<ParamSpec> specs = {
      spec("embed.weight", {96, 64}, ParamFormat::kMxfp8, Storage::kBoth),
      spec("norm.0", {33}, ParamFormat::kFp32),
      spec("attn.qkv", {64, 96}, ParamFormat::kMxfp8, Storage::kBoth),
      spec("attn.bias", {5}),
      spec("attn.out", {32, 64}, ParamFormat::kMxfp8, Storage::kRow),
      spec("frozen.table", {64, 64}, ParamFormat::kMxfp8, Storage::kBoth),
      spec("frozen.bias", {40}, ParamFormat::kBf16),
      spec("mlp.up", {3, 32, 160}, ParamFormat::kMxfp8, Storage::kRow),
      spec("mlp.odd", {33, 32}),
      spec("empty", {0, 64}, ParamFormat::kMxfp8, Storage::kBoth),
      spec("mlp.down", {160, 96}, ParamFormat::kMxfp8, Storage::kBoth),
      spec("norm.1", {1}, ParamFormat::kFp32),
      spec("stack", {32, 352}, ParamFormat::kMxfp8, Storage::kBoth),
      spec("norm.2", {130}, ParamFormat::kBf16),
      spec("head.weight", {96, 64}, ParamFormat::kMxfp8, Storage::kBoth),
  };
  for (ParamSpec& s : specs) {
    s.frozen = s.name.starts_with("frozen");
    if (s.name == "norm.1" || s.name == "attn.out") s.grad_mode = GradMode::kOverwrite;
    if (s.name == "head.weight") s.tied_to = "embed.weight";
  }
  return specs;
}

/// Matrices of random sizes in every family, some of them wider than a shard, and plain params between them.
/// "stack" and "norm.0" are among them, so that some steps are skipped.
inline std::vector<ParamSpec> random_specs(std::uint64_t seed) {
  const auto pick = [&](int what, std::int64_t of) {
    return static_cast<std::int64_t>(mix(seed, what, of) >> 20);
  };
  std::vector<ParamSpec> specs = {
      spec("norm.0", {1 + pick(0, 0) % 300}, ParamFormat::kFp32),
      spec("stack", {32, 32 * (1 + pick(1, 0) % 24)}, ParamFormat::kMxfp8, Storage::kBoth)};
  for (int i = 0; i < 6; ++i) {
    const std::string name = "random." + std::to_string(i);
    if (pick(2, i) % 4 == 0) {
      specs.push_back(
          spec(name, {1 + pick(3, i) % 1000}, pick(4, i) % 2 == 0 ? ParamFormat::kBf16 : ParamFormat::kFp32));
    } else {
      specs.push_back(spec(name, {32 * (1 + pick(5, i) % 6), 32 * (1 + pick(6, i) % 12)}, ParamFormat::kMxfp8,
                           pick(7, i) % 3 == 0 ? Storage::kRow : Storage::kBoth));
    }
    specs.back().frozen = pick(8, i) % 8 == 0;
  }
  return specs;
}

/// Two groups beside the default one, dynamic loss scale, clipping that is active in some steps only.
inline Config mixed_config() {
  Config config;
  config.optimizer.lr = 3e-3;
  config.optimizer.clip_grad = 4.0;
  config.optimizer.loss_scale = {LossScaleKind::kDynamic, 4096, 1, 5, 2};
  config.optimizer.groups = {{"norm.*", "norms", 2.0, 0.0}, {"mlp.*", "mlp", 0.5, 3.0}};
  config.schedule.warmup_steps = 3;
  config.schedule.kind = ScheduleKind::kCosine;
  config.schedule.decay_steps = 16;
  config.schedule.min_lr = 1e-4;
  return config;
}

/// Every control of groups and schedules: values of their own, matching by dimensions, params of one
/// dimension with and without decay, the three phases of wsd, and a weight decay that rises.
inline Config controls_config() {
  Config config = mixed_config();
  config.optimizer.groups = {
      {.match = "norm.*", .name = "norms", .weight_decay_mult = 0.5, .betas = {{0.7, 0.9}}, .eps = 0.01},
      {.match = "mlp.*", .name = "mlp", .lr_mult = 0.5, .weight_decay_mult = 3.0},
      {.match = "embed.*",
       .name = "embedding",
       .lr = 1e-3,
       .min_lr = 4e-4,
       .weight_decay = 0.02,
       .betas = {{0.5, 0.99}}},
      {.match = "*", .name = "vectors", .lr_mult = 2, .ndim = 1, .eps = 1e-5}};
  config.schedule.kind = ScheduleKind::kWsd;
  config.schedule.wsd_decay_steps = 8;
  config.schedule.wsd_decay_shape = DecayShape::kMinusSqrt;
  config.schedule.weight_decay_kind = WeightDecayKind::kCosine;
  config.schedule.end_weight_decay = 0.4;
  return config;
}

// ---------------------------------------------------------------------------------------------------------
// Facts: what must not depend on how a scenario is run
// ---------------------------------------------------------------------------------------------------------

/// Where an optimizer lives, and the stream it is used on.
struct Place {
  Device device;
  StreamRef stream;
};

struct Fact {
  std::string label;
  std::uint64_t bits = 0;
  friend bool operator==(const Fact&, const Fact&) = default;
};
using Facts = std::vector<Fact>;

inline ::testing::AssertionResult same_facts(const Facts& expected, const Facts& actual) {
  for (std::size_t i = 0; i < std::max(expected.size(), actual.size()); ++i) {
    if (i >= expected.size() || i >= actual.size()) {
      return ::testing::AssertionFailure() << expected.size() << " facts against " << actual.size();
    }
    if (expected[i] == actual[i]) continue;
    return ::testing::AssertionFailure()
           << "first difference: expected '" << expected[i].label << "' " << expected[i].bits << ", got '"
           << actual[i].label << "' " << actual[i].bits;
  }
  return ::testing::AssertionSuccess();
}

/// Whole state of one param on every rank, put together from the ranks' slices. Collective.
inline std::vector<float> whole_state(Communicator& comm, std::int64_t elems, std::int64_t begin,
                                      std::span<const float> slice) {
  std::vector<std::int64_t> bits(static_cast<std::size_t>(elems), 0);
  for (std::size_t i = 0; i < slice.size(); ++i) {
    bits[static_cast<std::size_t>(begin) + i] = std::bit_cast<std::uint32_t>(slice[i]);
  }
  comm.all_reduce(std::span(bits), ReduceOp::kSum, Traffic::kControl).wait();
  std::vector<float> whole;
  for (const std::int64_t b : bits) whole.push_back(std::bit_cast<float>(static_cast<std::uint32_t>(b)));
  return whole;
}

/// Digests of the masters and moments, which ranks own in parts, and of the planes, scales and values, which
/// every rank must hold alike: a difference between ranks throws. Collective on `side`.
inline Facts state_facts(DistributedAdam& opt, Communicator& side, const std::string& when,
                         Place place = {}) {
  std::vector<std::string> owned_labels, held_labels;
  std::vector<std::int64_t> owned_sums, held;
  for (const ParamLayout& param : opt.layout().params()) {
    if (param.tied_to >= 0) continue;
    const OwnedSlice slice = opt.owned(param.name);
    const auto add_owned = [&](const char* what, std::span<float> memory) {
      const HostView view(place.device, place.stream, memory);
      const std::span<const float> values = view.span().as<float>();
      std::uint64_t sum = 0;
      for (std::size_t i = 0; i < values.size(); ++i) {
        sum +=
            mix(std::bit_cast<std::uint32_t>(values[i]), 3, slice.param_begin + static_cast<std::int64_t>(i));
      }
      owned_labels.push_back(when + param.name + what);
      owned_sums.push_back(static_cast<std::int64_t>(sum));
    };
    add_owned(" master", slice.master);
    add_owned(" exp_avg", slice.exp_avg);
    add_owned(" exp_avg_sq", slice.exp_avg_sq);
    const auto add_held = [&](const char* what, void* data, std::int64_t bytes) {
      const HostView view(place.device, place.stream, TypedSpan(data, DType::kUint8, bytes));
      held_labels.push_back(when + param.name + what);
      held.push_back(
          static_cast<std::int64_t>(digest_bytes(view.span().data, static_cast<std::size_t>(bytes))));
    };
    ParamView view = opt.wait_param(param.name, Plane::kRow, place.stream);
    if (param.family.format != ParamFormat::kMxfp8) {
      add_held(" values", view.values.data, view.values.bytes());
      continue;
    }
    const MxView& planes = view.planes;
    add_held(" row data", planes.row_data, planes.elems());
    add_held(" row scales", planes.row_scales, param.row_scales_bytes);
    if (!param.family.has_column()) continue;
    opt.wait_param(param.name, Plane::kColumn, place.stream);
    add_held(" column data", planes.column_data, planes.elems());
    add_held(" column scales", planes.column_scales, param.column_scales_bytes);
  }
  side.all_reduce(std::span(owned_sums), ReduceOp::kSum, Traffic::kControl).wait();
  std::vector<std::int64_t> of_all(held.size() * static_cast<std::size_t>(side.size()));
  side.all_gather(std::span(of_all), std::span<const std::int64_t>(held), Traffic::kControl).wait();
  for (std::size_t i = 0; i < of_all.size(); ++i) {
    if (of_all[i] == held[i % held.size()]) continue;
    throw std::runtime_error(held_labels[i % held.size()] + " differs between ranks " +
                             std::to_string(side.rank()) + " and " + std::to_string(i / held.size()));
  }
  Facts facts;
  for (std::size_t i = 0; i < owned_sums.size(); ++i) {
    facts.push_back({owned_labels[i], static_cast<std::uint64_t>(owned_sums[i])});
  }
  for (std::size_t i = 0; i < held.size(); ++i) {
    facts.push_back({held_labels[i], static_cast<std::uint64_t>(held[i])});
  }
  return facts;
}

inline void add_record_facts(Facts& facts, const StepRecord& record, const std::string& when) {
  const auto number = [&](const char* what, double value) {
    facts.push_back({when + what, std::bit_cast<std::uint64_t>(std::isnan(value) ? 1e300 : value)});
  };
  const auto count = [&](const char* what, std::int64_t value) {
    facts.push_back({when + what, static_cast<std::uint64_t>(value)});
  };
  const auto names = [&](const char* what, const std::vector<std::string>& list) {
    std::string text;
    for (const std::string& name : list) text += name + '\n';
    facts.push_back({when + what, name_seed(text)});
  };
  count("taken", record.taken ? 1 : 0);
  count("skip_reason", static_cast<int>(record.skip_reason));
  count("step", record.step);
  count("calls", record.calls);
  count("consecutive_skips", record.consecutive_skips);
  count("skipped_total", record.skipped_total);
  count("tokens", record.tokens);
  number("grad_norm", record.grad_norm);
  number("clip_factor", static_cast<double>(record.clip_factor));
  number("loss_scale", record.loss_scale);
  number("next_loss_scale", record.next_loss_scale);
  number("lr", record.lr);
  names("nonfinite_gradient_params", record.nonfinite_gradient_params);
  names("nonfinite_master_params", record.nonfinite_master_params);
  count("nonfinite_gradient_rank", record.nonfinite_gradient_rank);
  count("zero_grads", record.zero_grads);
  for (const NormRecord& norm : record.norm_groups) {
    number((norm.name + " norm").c_str(), norm.grad_norm);
    number((norm.name + " clip_factor").c_str(), static_cast<double>(norm.clip_factor));
  }
  for (const ParamNorm& norm : record.param_norms) {
    number((norm.name + " grad_norm").c_str(), norm.grad_norm);
    number((norm.name + " weight_norm").c_str(), norm.weight_norm);
  }
}

// ---------------------------------------------------------------------------------------------------------
// Scenarios
// ---------------------------------------------------------------------------------------------------------

struct Scenario {
  std::vector<ParamSpec> specs = mixed_specs();
  Config config = mixed_config();
  int steps = 20;
  int threads = 1;
  bool with_skips = true;
  bool with_changes = true;                         // hyper-parameters and masters are changed between steps
  int shard_ranks = 0;                              // hybrid sharding; 0: one group of all ranks
  bool nan_padding = false;                         // NaN in all gradient padding before every step
  std::vector<int> digest_after = {-1, 5, 10, 19};  // steps; -1: the first publish
};

inline void set_all_initial(DistributedAdam& opt, std::span<const ParamSpec> specs, int rank = 0,
                            StreamRef stream = {}) {
  for (const ParamSpec& s : specs) {
    if (!s.tied_to.empty()) continue;
    const std::int64_t elems = opt.layout().param(opt.layout().find(s.name)).elems();
    const std::vector<float> values = initial_values(s.name, elems);
    const ConstTypedSpan whole{std::span<const float>(values)};
    if (rank % 2 == 0) {
      opt.set_initial(s.name, whole, stream);
    } else {  // overlapping slices, out of order
      const std::int64_t third = elems / 3;
      opt.set_initial(s.name, third, whole.sub(third, elems - third), stream);
      opt.set_initial(s.name, 0, whole.sub(0, std::min(elems, third + 1)), stream);
    }
  }
}

/// Whether the scenario gives `name` a gradient in this step; the same on all ranks.
inline bool is_fed(const ParamSpec& s, int step) {
  if (s.frozen) return false;
  return s.name != "norm.1" && s.name != "attn.out" && s.name != "mlp.odd" ? true : step % 4 != 3;
}

/// The gradient of a step before clipping, as it is after the reduction and without the loss scale.
inline std::vector<float> reduced_grad(const ParamSpec& s, std::int64_t elems, int step) {
  if (!is_fed(s, step)) return std::vector<float>(static_cast<std::size_t>(elems), 0.0f);
  return grad_values(s.name, elems, step);
}

/// Fills the padding of all gradient buckets through the views next to it. Padding has no view of its own.
inline void fill_grad_padding(DistributedAdam& opt, float value, Place place = {}) {
  for (const Bucket& bucket : opt.layout().buckets()) {
    if (bucket.family.frozen || bucket.params.empty()) continue;
    const ParamLayout& first = opt.layout().param(bucket.params.front());
    const TypedSpan start = opt.grad(first.name).data;
    std::vector<char> used(static_cast<std::size_t>(bucket.elems), 0);
    for (const int member : bucket.params) {
      const ParamLayout& param = opt.layout().param(member);
      std::fill_n(used.begin() + param.bucket_begin, param.elems(), char{1});
    }
    const HostView whole(place.device, place.stream,
                         TypedSpan(start.byte_data() - first.bucket_begin * dtype_bytes(start.dtype),
                                   start.dtype, bucket.elems));
    const float values[] = {value};
    for (std::int64_t i = 0; i < bucket.elems; ++i) {
      if (used[static_cast<std::size_t>(i)] == 0) write_values(whole.span().sub(i, 1), values);
    }
    whole.store();
  }
}

inline float loss_scale_of(const DistributedAdam& opt, Place place) {
  float scale = 0;
  copy_bytes(&scale, opt.loss_scale().data(), sizeof(scale), place.device, place.stream);
  synchronize(place.device, place.stream);
  return scale;
}

/// One step's backward pass: one or two micro-batches, every rank in another order, with the loss scale.
/// with_calls  false: only writes the gradients.
inline void feed(DistributedAdam& opt, const Scenario& scenario, int step, int rank, int size,
                 Place place = {}, bool with_calls = true) {
  const int micro_batches = step % 3 == 1 ? 2 : 1;
  const float scale = loss_scale_of(opt, place);
  for (int micro = 0; micro < micro_batches; ++micro) {
    const bool last = micro == micro_batches - 1;
    if (with_calls) opt.begin_backward(last);
    if (scenario.nan_padding) fill_grad_padding(opt, std::numeric_limits<float>::quiet_NaN(), place);
    std::vector<std::size_t> order(scenario.specs.size());
    std::iota(order.rbegin(), order.rend(), std::size_t{0});
    if (!order.empty()) {
      std::ranges::rotate(order, order.begin() + (5 * rank) % static_cast<int>(order.size()));
    }
    if (rank % 3 == 2) std::ranges::reverse(order);
    for (const std::size_t at : order) {
      const ParamSpec& s = scenario.specs[at];
      if (!is_fed(s, step)) continue;
      const GradMode mode = opt.grad(s.name).mode;
      const HostView grad(place.device, place.stream, opt.grad(s.name).data);
      const TypedSpan data = grad.span();
      const bool is_shared = s.name == "head.weight" || s.name == "embed.weight";
      const std::vector<float> values = grad_values(is_shared ? "embed.weight" : s.name, data.elems, step);
      if (mode == GradMode::kOverwrite) {
        if (last) write_values(data, values, scale);
      } else {
        add_values(data, values, scale / static_cast<float>(micro_batches * (is_shared ? 2 : 1)));
      }
      if (last && scenario.with_skips && s.name == "stack" && rank == step % size &&
          (step % 20 == 4 || step % 20 == 5)) {
        const float bad[] = {step % 20 == 4 ? std::numeric_limits<float>::quiet_NaN()
                                            : -std::numeric_limits<float>::infinity()};
        write_values(data.sub(data.elems - 1, 1), bad);
      }
      if (last && scenario.with_skips && s.name == "norm.0" && step % 20 == 12) {
        const float bad[] = {std::numeric_limits<float>::infinity()};
        write_values(data.sub(0, 1), bad);
      }
      grad.store();
      if (with_calls) opt.grad_ready(s.name, place.stream);
    }
  }
}

inline void change_between_steps(DistributedAdam& opt, int step, Place place = {}) {
  if (step == 8) {
    opt.set_lr("mlp", 2e-3);
    opt.set_weight_decay("*", 0.05);
    opt.set_betas(0.8, 0.98);
  }
  if (step == 10) {
    for (const ParamLayout& param : opt.layout().params()) {
      if (param.tied_to >= 0) continue;
      const HostView master(place.device, place.stream, opt.owned(param.name).master);
      for (float& value : master.span().as<float>()) value *= 0.75f;
      master.store();
    }
    opt.publish(place.stream);
  }
  if (step == 15) opt.set_lr("*", 1e-3);
}

/// What is known after a step of a scenario. `side` is for messages of the test, and has the ranks of the
/// optimizer's data-parallel group.
struct StepContext {
  DistributedAdam& opt;
  Communicator& side;
  int step = 0;
  const StepRecord& record;
};

/// Runs the scenario on one rank. `after_step` is called after every step, and makes each wait for its
/// report.
/// device  CUDA: bytes between ranks go through `over`, else through `comm`, a host transport; one rank is
/// its
///         own group.
inline Facts run_scenario(Communicator& comm, const Scenario& scenario,
                          const std::function<void(const StepContext&)>& after_step = {}, Device device = {},
                          Communicator* over = nullptr) {
  set_kernel_threads(scenario.threads);
  ShardGroups shards;
  if (scenario.shard_ranks > 0) shards = split_for_sharding(comm, scenario.shard_ranks);
  ParallelGroups groups = scenario.shard_ranks > 0 ? shards.groups() : ParallelGroups(comm);
  const std::unique_ptr<Communicator> side = groups.data->split(0, comm.rank());
  const Stream stream(device);
  const Place place{device, stream.ref()};
  DeviceOverHost staged(*groups.data, device);
  std::optional<DeviceOverHost> staged_replicas;
  SelfCommunicator alone(device);
  ShardGroups shards_over;
  if (device.kind != DeviceKind::kHost && over != nullptr) {
    if (scenario.shard_ranks > 0) shards_over = split_for_sharding(*over, scenario.shard_ranks);
    groups = scenario.shard_ranks > 0 ? shards_over.groups() : ParallelGroups(*over);
  } else if (device.kind != DeviceKind::kHost) {
    groups.data = comm.size() == 1 ? static_cast<Communicator*>(&alone) : &staged;
    if (groups.replicas != nullptr) groups.replicas = &staged_replicas.emplace(*groups.replicas, device);
  }
  DistributedAdam opt(scenario.specs, scenario.config, groups, device);
  set_all_initial(opt, scenario.specs, comm.rank(), place.stream);
  opt.publish(place.stream);
  Facts facts;
  const auto digest = [&](int step) {
    if (std::ranges::find(scenario.digest_after, step) == scenario.digest_after.end()) return;
    std::ranges::move(state_facts(opt, *side, "after step " + std::to_string(step) + ": ", place),
                      std::back_inserter(facts));
  };
  digest(-1);
  std::vector<StepReport> reports;
  for (int step = 0; step < scenario.steps; ++step) {
    if (scenario.with_changes) change_between_steps(opt, step, place);
    feed(opt, scenario, step, comm.rank(), comm.size(), place);
    reports.push_back(opt.step(place.stream));
    if (after_step) after_step({opt, *side, step, *reports.back()});
    digest(step);
  }
  for (int step = 0; step < scenario.steps; ++step) {
    add_record_facts(facts, *reports[static_cast<std::size_t>(step)], "step " + std::to_string(step) + ": ");
  }
  return facts;
}

/// The facts of rank 0 of W ranks in threads; throws when another rank has others.
inline Facts run_world(int size, const Scenario& scenario,
                       const std::function<void(const StepContext&)>& after_step = {}, Device device = {}) {
  std::vector<Facts> facts(static_cast<std::size_t>(size));
  run_ranks(size, [&](Communicator& comm) {
    facts[static_cast<std::size_t>(comm.rank())] = run_scenario(comm, scenario, after_step, device);
  });
  for (const Facts& other : facts) {
    const ::testing::AssertionResult same = same_facts(facts[0], other);
    if (!same) throw std::runtime_error(std::string("ranks disagree: ") + same.message());
  }
  return facts[0];
}

struct NamedScenario {
  const char* name;
  Scenario scenario;
};

/// mixed_config() with all that norms can have: separate ones, a limit that one step is above, and everything
/// in the reports.
inline Config norms_config() {
  Config config = mixed_config();
  OptimizerConfig& optimizer = config.optimizer;
  optimizer.groups[0].norm_group = optimizer.groups[1].norm_group = "small";
  optimizer.groups[0].clip_grad = optimizer.groups[1].clip_grad = 0.75;
  optimizer.groups.push_back({"attn.*", "attn"});
  optimizer.groups.back().norm_group = "attention";
  optimizer.groups.back().clip_grad = 2;
  optimizer.skip_norm = 12.5;
  optimizer.param_norms = true;
  optimizer.count_zeros = true;
  return config;
}

/// The scenarios whose facts must not depend on world size, bucket limit, threads or transport.
inline std::vector<NamedScenario> invariance_scenarios() {
  std::vector<NamedScenario> all;
  all.push_back({"AdamW, fp32 gradients, compact scales", {}});
  Scenario l2;
  l2.config.optimizer.kind = AdamKind::kAdam;
  l2.config.optimizer.grad_dtype = DType::kBf16;
  l2.config.precision.scale_layout = ScaleLayout::kGemm;
  all.push_back({"L2 Adam, bf16 gradients, gemm scales", l2});
  Scenario staged;
  staged.config.optimizer.grad_dtype = DType::kBf16;
  staged.config.parallel.gather_format = GatherFormat::kBf16;
  all.push_back({"AdamW, bf16 gradients, bf16 gather", staged});
  Scenario controls;
  controls.config = controls_config();
  all.push_back({"AdamW, groups and schedules", controls});
  controls.with_changes = false;
  controls.config.optimizer.kind = AdamKind::kAdam;
  controls.config.optimizer.decay_1d = true;
  controls.config.schedule.kind = ScheduleKind::kInverseSqrt;
  controls.config.schedule.wsd_decay_steps = 0;
  controls.config.schedule.weight_decay_kind = WeightDecayKind::kLinear;
  all.push_back({"L2 Adam, groups, inverse square root", controls});
  Scenario norms;
  norms.config = norms_config();
  all.push_back({"AdamW, separate norms, full reports", norms});
  return all;
}

/// Compares every plane, scale array (padding included) and plain value that this rank holds with a
/// quantisation of the whole masters in one process. Collective on `side`; call it on every rank.
inline void expect_oracle_bytes(DistributedAdam& opt, Communicator& side, bool gemm) {
  for (const ParamLayout& param : opt.layout().params()) {
    if (param.tied_to >= 0) continue;
    SCOPED_TRACE(param.name);
    const OwnedSlice slice = opt.owned(param.name);
    const std::vector<float> master = whole_state(side, param.elems(), slice.param_begin, slice.master);
    const ParamView view = opt.wait_param(param.name);
    if (side.rank() != side.size() - 1) continue;  // planes are compared between ranks elsewhere
    if (param.family.format == ParamFormat::kFp32) {
      EXPECT_TRUE(bits_equal(master, view.values.as<float>()));
    } else if (param.family.format == ParamFormat::kBf16) {
      std::vector<float> rounded;
      for (const float value : master) rounded.push_back(reference::bf16(value));
      EXPECT_TRUE(bits_equal(rounded, read_values(view.values)));
    } else {
      const reference::Mxfp8 expected = reference::quantize(master, param.rows, param.cols, gemm);
      const auto bytes = [](const std::uint8_t* data, std::size_t size) { return std::span(data, size); };
      EXPECT_TRUE(bits_equal(expected.row_data, bytes(view.planes.row_data, expected.row_data.size())));
      EXPECT_TRUE(bits_equal(expected.row_scales, bytes(view.planes.row_scales, expected.row_scales.size())));
      EXPECT_EQ(param.row_scales_bytes, static_cast<std::int64_t>(expected.row_scales.size()));
      EXPECT_EQ(view.planes.column_data != nullptr && param.elems() > 0,
                param.family.has_column() && param.elems() > 0);
      if (!param.family.has_column()) continue;
      const MxView planes = opt.wait_param(param.name, Plane::kColumn).planes;
      EXPECT_TRUE(bits_equal(expected.column_data, bytes(planes.column_data, expected.column_data.size())));
      EXPECT_TRUE(
          bits_equal(expected.column_scales, bytes(planes.column_scales, expected.column_scales.size())));
    }
  }
}

}  // namespace mxopt::test
