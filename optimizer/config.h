// What a user can configure: plain structs, filled by a program or from YAML.
//
// Each field's default stands here; its key, range and meaning stand in describe(). Nothing is read from the
// environment.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "mxopt/collectives/make_communicator.h"
#include "mxopt/optimizer/checkpoint/checkpoint_contents.h"
#include "mxopt/params/dtype.h"
#include "mxopt/params/memory.h"
#include "mxopt/params/param_spec.h"
#include "mxopt/quant/mxfp8.h"

namespace mxopt {

class ConfigSchema;

/// kAdamW decays weights directly, kAdam adds the decay to the gradient.
enum class AdamKind { kAdamW, kAdam };
/// What the gradients of the ranks become: their mean, their sum, or their sum divided by the step's tokens.
enum class GradReduce { kAverage, kSum, kTokens };
enum class LossScaleKind { kNone, kStatic, kDynamic };
/// kAuto: the row plane alone where the backward pass needs no column plane, else both.
enum class StorageChoice { kRow, kBoth, kAuto };
/// What the backward pass multiplies with: the stored planes, the high-precision weights, or dequantized row
/// planes.
enum class BackwardOverride { kNone, kHighPrecision, kDequantized };
enum class ScheduleKind { kConstant, kLinear, kCosine, kInverseSqrt, kWsd };
/// The tail of a warm-up-stable-decay schedule.
enum class DecayShape { kLinear, kCosine, kExponential, kMinusSqrt };
enum class WeightDecayKind { kConstant, kLinear, kCosine };
/// kAuto: a CUDA device where there is one, else the host.
enum class DeviceChoice { kAuto, kHost, kCuda };
/// What the gather after a step moves: the quantized planes, or BF16 values that every rank quantizes itself.
enum class GatherFormat { kQuantized, kBf16 };
/// How what a step wrote reaches the other ranks: by all-gathers behind the update, or because the update
/// stores it into their memory too. kAuto: whichever costs less, see gather_plan.h.
enum class GatherChoice { kAuto, kDirect, kCollective };
/// How the gradients of ranks are added: as the transport does it, or by an exchange and an FP32 sum in rank
/// order.
enum class GradReduction { kNative, kExchange };

/// Which learning rates, weight decays, betas and eps a run goes on with: those it was saved with, or those
/// that the configuration has now.
enum class HyperParameters { kSaved, kConfigured };

struct LossScaleConfig {
  LossScaleKind kind = LossScaleKind::kNone;
  double initial = 65536;
  double min = 1;
  std::int64_t growth_interval = 2000;  // steps
  std::int64_t hysteresis = 2;          // overflows
};

/// Hyper-parameters of the params that match. The first matching group wins; a param without one is in the
/// group "default". What is empty is that of the whole optimizer.
struct GroupConfig {
  std::string match;  // glob on the param's name
  std::string name;   // empty: the pattern, see group_name()
  double lr_mult = 1;
  std::optional<double> weight_decay_mult = std::nullopt;
  std::int64_t ndim = 0;  // dimensions that a matching param has; 0: any
  std::optional<double> lr = std::nullopt;
  std::optional<double> min_lr = std::nullopt;
  std::optional<double> weight_decay = std::nullopt;
  std::optional<std::array<double, 2>> betas = std::nullopt;
  std::optional<double> eps = std::nullopt;
  std::string norm_group = {};  // empty: the norm of the whole optimizer
  std::optional<double> clip_grad = std::nullopt;
};

struct OptimizerConfig {
  AdamKind kind = AdamKind::kAdamW;
  double lr = 3e-4;
  std::array<double, 2> betas = {0.9, 0.95};
  double eps = 1e-8;
  double weight_decay = 0.1;
  bool decay_1d = false;
  double clip_grad = 1.0;  // 0: off
  double skip_norm = 0;    // 0: off
  bool param_norms = false;
  bool count_zeros = false;
  DType grad_dtype = DType::kFp32;
  GradReduce grad_reduce = GradReduce::kAverage;
  bool check_grads = false;
  DType state_dtype = DType::kFp32;
  std::int64_t bucket_elems = 0;             // 0: automatic rule
  std::int64_t max_consecutive_skips = 100;  // 0: no limit
  LossScaleConfig loss_scale;
  std::vector<GroupConfig> groups;
};

struct PrecisionConfig {
  ParamFormat weights = ParamFormat::kMxfp8;
  StorageChoice storage = StorageChoice::kAuto;
  BackwardOverride backward_override = BackwardOverride::kNone;
  Fallback fallback = Fallback::kBf16;
  ScaleLayout scale_layout = ScaleLayout::kCompact;
};

struct ScheduleConfig {
  ScheduleKind kind = ScheduleKind::kConstant;
  std::int64_t warmup_steps = 0;
  std::int64_t decay_steps = 0;  // warm-up included; 0: the trainer fills in its number of steps
  double min_lr = 0;
  std::int64_t wsd_decay_steps = 0;  // the last ones before decay_steps
  DecayShape wsd_decay_shape = DecayShape::kExponential;
  WeightDecayKind weight_decay_kind = WeightDecayKind::kConstant;
  std::optional<double> end_weight_decay = std::nullopt;  // at decay_steps
};

struct ParallelConfig {
  Transport transport = Transport::kAuto;
  DeviceChoice device = DeviceChoice::kAuto;
  double timeout_s = 100;
  double init_timeout_s = 300;
  GatherChoice gather = GatherChoice::kAuto;
  GatherFormat gather_format = GatherFormat::kQuantized;
  GradReduction grad_reduction = GradReduction::kNative;
  std::int64_t world_size = 0;  // 0: any
};

struct CheckpointConfig {
  std::string dir = {};        // of all checkpoints of a run; empty: none are saved
  std::int64_t every = 0;      // taken steps; 0: only when asked for
  std::int64_t keep_last = 0;  // 0: all
  bool async = false;
  Verify verify = Verify::kFull;
  HyperParameters hyper_parameters = HyperParameters::kSaved;
  double timeout_s = 1800;
};

struct Config {
  OptimizerConfig optimizer;
  PrecisionConfig precision;
  ScheduleConfig schedule;
  ParallelConfig parallel;
  CheckpointConfig checkpoint;
};

/// What make_communicator() needs: transport, deadline and world size, for buffers in the memory of `device`.
CommunicatorOptions communicator_options(const ParallelConfig& parallel, Device device = {});

/// The device that parallel.device stands for in a process that is to use CUDA device `cuda_index`.
/// Throws ConfigError when cuda was asked for and can not be had, or when there are devices but not this one.
Device resolved_device(const ParallelConfig& parallel, int cuda_index);

/// The storage that kAuto stands for, or the one that was chosen.
Storage resolved_storage(const PrecisionConfig& precision);

/// The values of all keys as YAML.
std::string configuration_text(const Config& config);

/// The group's name, which is its pattern where none was given.
const std::string& group_name(const GroupConfig& group);

/// The group's highest learning rate in an optimizer whose own is `optimizer_lr`.
double peak_lr(const GroupConfig& group, double optimizer_lr);

/// Adds every key of the library to `schema`, bound to `config`, which must outlive it and stay where it is.
void describe(ConfigSchema& schema, Config& config);

/// Reads a configuration that holds the keys of the library and no others, then overrides "key=value".
///
/// Checks  everything that validate() does, except that schedule.decay_steps may still be 0.
/// Throws  ConfigError with all problems, one per line, each with file, line, column, key, value and what is
/// allowed.
Config load_config(const std::string& path, const std::vector<std::string>& overrides = {});

/// What is wrong with `config`: values out of range, then values that contradict each other. Empty: nothing.
std::vector<std::string> problems(const Config& config);

/// Throws ConfigError with all problems() of `config`, one per line.
void validate(const Config& config);

/// The same, each line led by the origin of its value. `schema` is the one that `config` was read with.
void validate(const Config& config, const ConfigSchema& schema);

}  // namespace mxopt
