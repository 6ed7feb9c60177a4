#include "mxopt/optimizer/config.h"

#include <map>
#include <set>
#include <sstream>
#include <utility>

#include "mxopt/optimizer/config_schema.h"
#include "mxopt/optimizer/schedule.h"
#include "mxopt/params/check.h"

namespace mxopt {

namespace {

/// Values that contradict each other, told at the key that is to be changed.
struct Conflict {
  std::string key;
  std::string text;
};

constexpr double kMaxTimeout = 1e6;  // about 12 days; counts of nanoseconds do not overflow

/// Whether the trainer has had its chance to fill in schedule.decay_steps.
enum class DecaySteps { kMayFollow, kAreFinal };

void describe_group(ConfigSchema& schema, GroupConfig& group) {
  schema.add("match", group.match, "Glob pattern on param names; the first matching group wins.")
      .alias("params")
      .alias("pattern")
      .required()
      .not_empty();
  schema.add("ndim", group.ndim, Bounds::at_least(1).or_zero("any"),
             "Number of dimensions that a param must have to match.");
  schema.add("name", group.name, "Name of the group in reports; empty: the pattern.");
  schema
      .add("lr", group.lr, Bounds::at_least(0),
           "Peak learning rate of the group; inherit: `optimizer.lr` times lr_mult.")
      .alias("learning_rate")
      .alias("max_lr");
  schema.add("min_lr", group.min_lr, Bounds::at_least(0),
             "Learning rate at the end of the group's decay; inherit: `schedule.min_lr`, or lr where that is "
             "less.");
  schema.add("lr_mult", group.lr_mult, Bounds::at_least(0), "Factor on `optimizer.lr`.").alias("lr_scale");
  schema
      .add("weight_decay", group.weight_decay, Bounds::at_least(0),
           "Weight decay of the group, params of one dimension included; inherit: `optimizer.weight_decay` "
           "times weight_decay_mult.")
      .alias("wd");
  schema
      .add("weight_decay_mult", group.weight_decay_mult, Bounds::at_least(0),
           "Factor on `optimizer.weight_decay`, params of one dimension included; inherit: 1, and see "
           "`optimizer.decay_1d`.")
      .alias("wd_mult");
  schema
      .add("betas", group.betas, Bounds::at_least(0).below(1),
           "Decay rates of the group's moments; inherit: `optimizer.betas`.")
      .alias("adam_beta1")
      .alias("adam_beta2")
      .alias("beta1")
      .alias("beta2");
  schema
      .add("eps", group.eps, Bounds::at_least(0),
           "Added to the root of the group's second moment; inherit: `optimizer.eps`.")
      .alias("adam_eps")
      .alias("adam_epsilon")
      .alias("epsilon");
  schema.add(
      "norm_group", group.norm_group,
      "Name of a separate gradient norm, with a clip factor of its own, that the group's params are in "
      "with those of other groups that name it; empty: the norm of the whole optimizer.");
  schema
      .add("clip_grad", group.clip_grad, Bounds::at_least(0),
           "Largest norm of the norm_group, 0: no clipping; inherit: `optimizer.clip_grad`.")
      .alias("max_grad_norm")
      .alias("max_norm");
  schema.after_load([&group] { group.name = group_name(group); });
}

void describe_optimizer(ConfigSchema& schema, OptimizerConfig& config) {
  schema.add("optimizer.kind", config.kind, {{"adamw", AdamKind::kAdamW}, {"adam", AdamKind::kAdam}},
             "adamw decays weights directly, adam adds the decay to the gradient.");
  schema.add("optimizer.lr", config.lr, Bounds::at_least(0), "Peak learning rate.")
      .alias("learning_rate")
      .alias("max_lr");
  schema
      .add("optimizer.betas", config.betas, Bounds::at_least(0).below(1),
           "Decay rates of the first and the second moment.")
      .alias("adam_beta1")
      .alias("adam_beta2")
      .alias("beta1")
      .alias("beta2");
  schema.add("optimizer.eps", config.eps, Bounds::at_least(0), "Added to the root of the second moment.")
      .alias("adam_eps")
      .alias("adam_epsilon")
      .alias("epsilon");
  schema
      .add("optimizer.weight_decay", config.weight_decay, Bounds::at_least(0),
           "Strength of the weight decay; where it has a schedule, at the start.")
      .alias("wd")
      .alias("start_weight_decay");
  schema.add(
      "optimizer.decay_1d", config.decay_1d,
      "Whether params of one dimension (biases, norms) decay where their group says nothing about weight "
      "decay.");
  schema
      .add("optimizer.clip_grad", config.clip_grad, Bounds::at_least(0),
           "Largest global norm of the gradient; 0: no clipping.")
      .alias("max_grad_norm")
      .alias("gradient_clipping")
      .alias("grad_clip")
      .alias("max_norm");
  schema.add("optimizer.skip_norm", config.skip_norm, Bounds::at_least(0),
             "Norm of the gradient above which a step is skipped, those of every norm_group included; 0: no "
             "limit.");
  schema.add("optimizer.param_norms", config.param_norms,
             "Whether reports have the norms of every param's gradient and master weights.");
  schema
      .add("optimizer.count_zeros", config.count_zeros,
           "Whether reports have the number of gradients that are 0.")
      .alias("log_num_zeros_in_grad");
  schema.add("optimizer.grad_dtype", config.grad_dtype, {{"fp32", DType::kFp32}, {"bf16", DType::kBf16}},
             "Type of the gradient buffers and of their reduction.");
  schema.add("optimizer.grad_reduce", config.grad_reduce,
             {{"average", GradReduce::kAverage}, {"sum", GradReduce::kSum}, {"tokens", GradReduce::kTokens}},
             "What the gradients of all ranks become: their mean, their sum, or their sum divided by the "
             "number of tokens that the ranks count with add_tokens().");
  schema.add("optimizer.check_grads", config.check_grads,
             "Whether each rank looks for NaN and infinity in its own gradients before they are reduced; the "
             "report names the params. It reads all gradients once more.");
  schema.add("optimizer.state_dtype", config.state_dtype, {{"fp32", DType::kFp32}},
             "Type of the master weights and the moments.");
  schema
      .add("optimizer.bucket_elems", config.bucket_elems, Bounds::at_least(128).or_zero("automatic rule"),
           "Size at which a bucket is full.", "elements")
      .alias("bucket_size")
      .alias("ddp_bucket_size")
      .alias("reduce_bucket_size");
  schema.add("optimizer.max_consecutive_skips", config.max_consecutive_skips, Bounds::at_least(0),
             "Skipped steps in a row after which a step is an error; 0: no limit.", "steps");
  schema.add("optimizer.loss_scale.kind", config.loss_scale.kind,
             {{"none", LossScaleKind::kNone},
              {"static", LossScaleKind::kStatic},
              {"dynamic", LossScaleKind::kDynamic}},
             "static keeps the initial scale, dynamic adapts it.");
  schema
      .add("optimizer.loss_scale.initial", config.loss_scale.initial, Bounds::above(0),
           "Loss scale at the start.")
      .alias("initial_loss_scale")
      .alias("init_scale");
  schema
      .add("optimizer.loss_scale.min", config.loss_scale.min, Bounds::above(0),
           "A dynamic scale does not fall below this.")
      .alias("min_loss_scale");
  schema
      .add("optimizer.loss_scale.growth_interval", config.loss_scale.growth_interval, Bounds::at_least(1),
           "Clean steps after which a dynamic scale doubles.", "steps")
      .alias("loss_scale_window");
  schema.add("optimizer.loss_scale.hysteresis", config.loss_scale.hysteresis, Bounds::at_least(1),
             "Overflows after which a dynamic scale halves.");
  schema
      .add_list("optimizer.groups", config.groups, describe_group,
                "Params with other hyper-parameters; a param without a match is in the group `default`.")
      .alias("param_groups");
}

void describe_precision(ConfigSchema& schema, PrecisionConfig& config) {
  schema.add("precision.weights", config.weights,
             {{"mxfp8", ParamFormat::kMxfp8}, {"bf16", ParamFormat::kBf16}, {"fp32", ParamFormat::kFp32}},
             "Format of the primary weights.");
  schema.add("precision.storage", config.storage,
             {{"row", StorageChoice::kRow}, {"both", StorageChoice::kBoth}, {"auto", StorageChoice::kAuto}},
             "Planes of an MXFP8 param; auto: row if backward_override is high_precision or dequantized, "
             "else both.");
  schema.add("precision.backward_override", config.backward_override,
             {{"none", BackwardOverride::kNone},
              {"high_precision", BackwardOverride::kHighPrecision},
              {"dequantized", BackwardOverride::kDequantized}},
             "What the backward pass uses in place of the column plane.");
  schema.add("precision.fallback", config.fallback, {{"bf16", Fallback::kBf16}, {"error", Fallback::kError}},
             "What becomes of an MXFP8 param whose rows or columns are not multiples of 32.");
  schema.add("precision.scale_layout", config.scale_layout,
             {{"compact", ScaleLayout::kCompact}, {"gemm", ScaleLayout::kGemm}},
             "Order of the scale bytes: row-major, or swizzled for block-scaled GEMMs.");
}

void describe_schedule(ConfigSchema& schema, ScheduleConfig& config) {
  schema
      .add("schedule.kind", config.kind,
           {{"constant", ScheduleKind::kConstant},
            {"linear", ScheduleKind::kLinear},
            {"cosine", ScheduleKind::kCosine},
            {"inverse_sqrt", ScheduleKind::kInverseSqrt},
            {"wsd", ScheduleKind::kWsd}},
           "Course of the learning rate after the warm-up; wsd: warm-up, stable, decay.")
      .alias("lr_decay_style")
      .alias("lr_scheduler")
      .alias("lr_scheduler_type");
  schema
      .add("schedule.warmup_steps", config.warmup_steps, Bounds::at_least(0),
           "Steps in which the learning rate rises linearly from 0.", "steps")
      .alias("lr_warmup_iters")
      .alias("warmup_iters");
  schema
      .add("schedule.decay_steps", config.decay_steps, Bounds::at_least(0),
           "Step at which linear, cosine and wsd reach min_lr, and the weight decay its end, warm-up "
           "included; 0: the number of steps of the trainer.",
           "steps")
      .alias("lr_decay_iters");
  schema
      .add("schedule.min_lr", config.min_lr, Bounds::at_least(0),
           "Learning rate at the end of the decay; inverse_sqrt does not fall below it.")
      .alias("min_learning_rate");
  schema
      .add("schedule.wsd_decay_steps", config.wsd_decay_steps, Bounds::at_least(0),
           "Length of the decay of wsd, which ends at decay_steps.", "steps")
      .alias("lr_wsd_decay_iters")
      .alias("num_decay_steps");
  schema
      .add("schedule.wsd_decay_shape", config.wsd_decay_shape,
           {{"linear", DecayShape::kLinear},
            {"cosine", DecayShape::kCosine},
            {"exponential", DecayShape::kExponential},
            {"minus_sqrt", DecayShape::kMinusSqrt}},
           "Course of the decay of wsd.")
      .alias("lr_wsd_decay_style")
      .alias("decay_type");
  schema
      .add("schedule.weight_decay_kind", config.weight_decay_kind,
           {{"constant", WeightDecayKind::kConstant},
            {"linear", WeightDecayKind::kLinear},
            {"cosine", WeightDecayKind::kCosine}},
           "Course of the weight decay from `optimizer.weight_decay` to end_weight_decay; groups with a "
           "weight_decay of their own keep it.")
      .alias("weight_decay_incr_style");
  schema.add(
      "schedule.end_weight_decay", config.end_weight_decay, Bounds::at_least(0),
      "Weight decay at decay_steps, of which groups have weight_decay_mult times as much; inherit: that "
      "of the start.");
}

void describe_parallel(ConfigSchema& schema, ParallelConfig& config) {
  schema
      .add(
          "parallel.transport", config.transport,
          {{"auto", Transport::kAuto},
           {"self", Transport::kSelf},
           {"mpi", Transport::kMpi},
           {"nccl", Transport::kNccl}},
          "How ranks talk; auto: self, or if MPI is initialised with more than one rank, mpi on the host and "
          "nccl on CUDA devices.")
      .alias("backend")
      .alias("distributed_backend");
  schema.add("parallel.device", config.device,
             {{"auto", DeviceChoice::kAuto}, {"host", DeviceChoice::kHost}, {"cuda", DeviceChoice::kCuda}},
             "Where memory and kernels live; auto: a CUDA device where there is one, else the host.");
  schema
      .add("parallel.timeout_s", config.timeout_s, Bounds::above(0).at_most(kMaxTimeout),
           "Longest wait for another rank.", "seconds")
      .alias("timeout")
      .alias("distributed_timeout_minutes");
  schema.add("parallel.init_timeout_s", config.init_timeout_s, Bounds::above(0).at_most(kMaxTimeout),
             "Longest wait for another rank while the run starts.", "seconds");
  schema.add("parallel.gather", config.gather,
             {{"auto", GatherChoice::kAuto},
              {"direct", GatherChoice::kDirect},
              {"collective", GatherChoice::kCollective}},
             "How new weights reach the other ranks: all-gathers, or stores of the update into their memory "
             "(NCCL in one "
             "NVLink domain); auto: whichever costs less.");
  schema.add("parallel.gather_format", config.gather_format,
             {{"quantized", GatherFormat::kQuantized}, {"bf16", GatherFormat::kBf16}},
             "What the gather moves: quantized planes, or BF16 values that each rank quantizes.");
  schema.add(
      "parallel.grad_reduction", config.grad_reduction,
      {{"native", GradReduction::kNative}, {"exchange", GradReduction::kExchange}},
      "How gradients of ranks are added: exchange, in FP32 and in rank order with one rounding, as host "
      "transports always do; native, on NCCL in an order and a type of its own.");
  schema.add("parallel.world_size", config.world_size, Bounds::at_least(1).or_zero("any"),
             "Number of ranks that the run must have.", "ranks");
}

void describe_checkpoint(ConfigSchema& schema, CheckpointConfig& config) {
  schema
      .add("checkpoint.dir", config.dir,
           "Folder of all checkpoints of the run, on a file system that all ranks share; empty: none are "
           "saved.")
      .alias("save")
      .alias("folder");
  schema
      .add("checkpoint.every", config.every, Bounds::at_least(1).or_zero("only when asked for"),
           "Taken steps between checkpoints.", "steps")
      .alias("save_interval")
      .alias("interval");
  schema
      .add("checkpoint.keep_last", config.keep_last, Bounds::at_least(1).at_most(1'000'000).or_zero("all"),
           "Complete checkpoints that are kept.")
      .alias("keep_latest_k");
  schema
      .add("checkpoint.async", config.async,
           "Whether training goes on while a checkpoint is written, from a copy of the state in host memory.")
      .alias("async_save")
      .alias("async_mode");
  schema.add("checkpoint.verify", config.verify,
             {{"full", Verify::kFull}, {"size", Verify::kSize}, {"off", Verify::kOff}},
             "What is compared before a checkpoint is loaded; full: sizes and checksums of all bytes.");
  schema.add(
      "checkpoint.hyper_parameters", config.hyper_parameters,
      {{"saved", HyperParameters::kSaved}, {"configured", HyperParameters::kConfigured}},
      "Learning rates, weight decays, betas and eps that a run goes on with: those of the checkpoint, or "
      "those of the configuration.");
  schema.add("checkpoint.timeout_s", config.timeout_s, Bounds::above(0).at_most(kMaxTimeout),
             "Longest time that a checkpoint may take to be written by all ranks.", "seconds");
}

template <class Value>
std::string is_value(const std::string& key, const Value& value) {
  std::ostringstream text;
  text << "`" << key << "` is " << value << "; allowed: ";
  return text.str();
}

void find_schedule_conflicts(const Config& config, DecaySteps decay_steps, std::vector<Conflict>& found) {
  const ScheduleConfig& schedule = config.schedule;
  std::ostringstream lr;
  lr << config.optimizer.lr;
  if (schedule.min_lr > config.optimizer.lr) {
    found.push_back({"schedule.min_lr",
                     is_value("schedule.min_lr", schedule.min_lr) + "at most `optimizer.lr`, " + lr.str()});
  }
  const bool is_wsd = schedule.kind == ScheduleKind::kWsd;
  const auto reject_tail = [&](const std::string& allowed) {
    found.push_back({"schedule.wsd_decay_steps",
                     is_value("schedule.wsd_decay_steps", schedule.wsd_decay_steps) + allowed});
  };
  if (is_wsd && schedule.wsd_decay_steps == 0) {
    reject_tail("integer >= 1 when `schedule.kind` is wsd");
  } else if (!is_wsd && schedule.wsd_decay_steps != 0) {
    reject_tail("0 unless `schedule.kind` is wsd");
  }
  const bool has_end = ends_at_decay_steps(schedule.kind);
  const bool is_decay_scheduled = schedule.weight_decay_kind != WeightDecayKind::kConstant;
  if (is_decay_scheduled != schedule.end_weight_decay.has_value()) {
    const std::string key = "schedule.end_weight_decay";
    found.push_back({key, is_decay_scheduled
                              ? is_value(key, "inherit") +
                                    "number >= 0 when `schedule.weight_decay_kind` is linear or cosine"
                              : is_value(key, *schedule.end_weight_decay) +
                                    "inherit unless `schedule.weight_decay_kind` is linear or cosine"});
  }
  if (schedule.decay_steps == 0) {
    if (decay_steps == DecaySteps::kMayFollow || (!has_end && !is_decay_scheduled)) return;
    found.push_back(
        {"schedule.decay_steps", is_value("schedule.decay_steps", 0) + "integer >= 1 when " +
                                     (has_end ? "`schedule.kind` is linear, cosine or wsd"
                                              : "`schedule.weight_decay_kind` is linear or cosine")});
  } else if (!has_end) {
    return;
  } else if (schedule.warmup_steps > schedule.decay_steps) {
    found.push_back({"schedule.warmup_steps", is_value("schedule.warmup_steps", schedule.warmup_steps) +
                                                  "at most `schedule.decay_steps`, " +
                                                  std::to_string(schedule.decay_steps)});
  } else if (is_wsd && schedule.wsd_decay_steps > schedule.decay_steps - schedule.warmup_steps) {
    reject_tail("at most `schedule.decay_steps` less `schedule.warmup_steps`, " +
                std::to_string(schedule.decay_steps - schedule.warmup_steps));
  }
}

/// Values that contradict each other within one group.
void find_conflicts_in_group(const GroupConfig& group, const std::string& base, double optimizer_lr,
                             std::vector<Conflict>& found) {
  if (group.lr && group.lr_mult != 1) {
    found.push_back(
        {base + "lr_mult", is_value(base + "lr_mult", group.lr_mult) + "1 beside `" + base + "lr`"});
  }
  if (group.weight_decay && group.weight_decay_mult) {
    found.push_back(
        {base + "weight_decay_mult", is_value(base + "weight_decay_mult", *group.weight_decay_mult) +
                                         "inherit beside `" + base + "weight_decay`"});
  }
  const double peak = peak_lr(group, optimizer_lr);
  if (group.min_lr && *group.min_lr > peak) {
    std::ostringstream allowed;
    allowed << "at most the group's peak learning rate, " << peak;
    found.push_back({base + "min_lr", is_value(base + "min_lr", *group.min_lr) + allowed.str()});
  }
}

/// Separate norms: one limit for each.
void find_norm_conflicts(const OptimizerConfig& optimizer, std::vector<Conflict>& found) {
  std::map<std::string, double> limits;
  for (std::size_t i = 0; i < optimizer.groups.size(); ++i) {
    const GroupConfig& group = optimizer.groups[i];
    const std::string key = "optimizer.groups[" + std::to_string(i) + "].clip_grad";
    if (group.norm_group.empty()) {
      if (group.clip_grad)
        found.push_back({key, is_value(key, *group.clip_grad) + "inherit without norm_group"});
      continue;
    }
    const double limit = group.clip_grad.value_or(optimizer.clip_grad);
    const auto [first, is_new] = limits.emplace(group.norm_group, limit);
    if (is_new || first->second == limit) continue;
    std::ostringstream allowed;
    allowed << first->second << ", as in the first group of norm_group '" << group.norm_group << "'";
    found.push_back({key, is_value(key, limit) + allowed.str()});
  }
}

void find_group_conflicts(const OptimizerConfig& optimizer, std::vector<Conflict>& found) {
  find_norm_conflicts(optimizer, found);
  std::set<std::string> names = {"default", "*"};
  std::set<std::pair<std::string, std::int64_t>> patterns;
  for (std::size_t i = 0; i < optimizer.groups.size(); ++i) {
    const std::string base = "optimizer.groups[" + std::to_string(i) + "].";
    const GroupConfig& group = optimizer.groups[i];
    const bool is_taken = patterns.contains({group.match, 0}) || patterns.contains({group.match, group.ndim});
    patterns.insert({group.match, group.ndim});
    if (is_taken) {
      found.push_back({base + "match", is_value(base + "match", group.match) +
                                           "a pattern of its own; an earlier group has this one and wins"});
    } else if (!names.insert(group_name(group)).second) {
      found.push_back({base + "name", is_value(base + "name", group_name(group)) +
                                          "a name that no other group has, and neither default nor *"});
    }
    find_conflicts_in_group(group, base, optimizer.lr, found);
  }
}

std::vector<Conflict> find_conflicts(const Config& config, DecaySteps decay_steps) {
  std::vector<Conflict> found;
  find_group_conflicts(config.optimizer, found);
  const LossScaleConfig& scale = config.optimizer.loss_scale;
  if (scale.kind == LossScaleKind::kDynamic && scale.initial < scale.min) {
    std::ostringstream min;
    min << scale.min;
    found.push_back({"optimizer.loss_scale.initial", is_value("optimizer.loss_scale.initial", scale.initial) +
                                                         "at least `optimizer.loss_scale.min`, " +
                                                         min.str()});
  }
  find_schedule_conflicts(config, decay_steps, found);
  if (config.parallel.gather == GatherChoice::kDirect &&
      config.parallel.gather_format == GatherFormat::kBf16) {
    found.push_back({"parallel.gather", is_value("parallel.gather", "direct") +
                                            "auto or collective when `parallel.gather_format` is bf16"});
  }
  if (config.parallel.transport == Transport::kSelf && config.parallel.world_size > 1) {
    found.push_back({"parallel.world_size", is_value("parallel.world_size", config.parallel.world_size) +
                                                "0 or 1 when `parallel.transport` is self"});
  }
  if (config.checkpoint.every > 0 && config.checkpoint.dir.empty()) {
    found.push_back({"checkpoint.every", is_value("checkpoint.every", config.checkpoint.every) +
                                             "0 when `checkpoint.dir` is empty"});
  }
  return found;
}

std::vector<std::string> range_problems(const Config& config) {
  Config copy = config;
  ConfigSchema schema;
  describe(schema, copy);
  return schema.problems();
}

void throw_unless_empty(const std::vector<std::string>& lines) {
  if (lines.empty()) return;
  std::string text;
  for (const std::string& line : lines) text += (text.empty() ? "" : "\n") + line;
  throw ConfigError(text);
}

void validate(const Config& config, const ConfigSchema& schema, DecaySteps decay_steps) {
  throw_unless_empty(range_problems(config));
  std::vector<std::string> lines;
  for (const Conflict& conflict : find_conflicts(config, decay_steps)) {
    lines.push_back(schema.origin(conflict.key) + ": " + conflict.text);
  }
  throw_unless_empty(lines);
}

}  // namespace

CommunicatorOptions communicator_options(const ParallelConfig& parallel, Device device) {
  CommunicatorOptions options;
  options.device = device;
  options.transport = parallel.transport;
  options.timeout_s = parallel.timeout_s;
  options.world_size = static_cast<int>(parallel.world_size);
  return options;
}

Device resolved_device(const ParallelConfig& parallel, int cuda_index) {
  if (parallel.device == DeviceChoice::kHost) return {};
  if (parallel.device == DeviceChoice::kAuto && device_count(DeviceKind::kCuda) == 0) return {};
  const Device cuda{DeviceKind::kCuda, cuda_index};
  default_allocator(cuda);  // throws what is missing
  return cuda;
}

Storage resolved_storage(const PrecisionConfig& precision) {
  switch (precision.storage) {
    case StorageChoice::kRow:
      return Storage::kRow;
    case StorageChoice::kBoth:
      return Storage::kBoth;
    case StorageChoice::kAuto:
      break;
  }
  return precision.backward_override == BackwardOverride::kNone ? Storage::kBoth : Storage::kRow;
}

const std::string& group_name(const GroupConfig& group) {
  return group.name.empty() ? group.match : group.name;
}

double peak_lr(const GroupConfig& group, double optimizer_lr) {
  return group.lr.value_or(optimizer_lr * group.lr_mult);
}

void describe(ConfigSchema& schema, Config& config) {
  describe_optimizer(schema, config.optimizer);
  describe_precision(schema, config.precision);
  describe_schedule(schema, config.schedule);
  describe_parallel(schema, config.parallel);
  describe_checkpoint(schema, config.checkpoint);
}

std::string configuration_text(const Config& config) {
  Config copy = config;
  ConfigSchema schema;
  describe(schema, copy);
  std::istringstream lines(schema.to_yaml());
  std::string text;
  // Without the origins.
  for (std::string line; std::getline(lines, line);) text += line.substr(0, line.rfind("  # ")) + '\n';
  return text;
}

Config load_config(const std::string& path, const std::vector<std::string>& overrides) {
  Config config;
  ConfigSchema schema;
  describe(schema, config);
  schema.load_file(path, overrides);
  validate(config, schema, DecaySteps::kMayFollow);
  return config;
}

std::vector<std::string> problems(const Config& config) {
  std::vector<std::string> lines = range_problems(config);
  for (Conflict& conflict : find_conflicts(config, DecaySteps::kAreFinal))
    lines.push_back(std::move(conflict.text));
  return lines;
}

void validate(const Config& config) {
  throw_unless_empty(problems(config));
}

void validate(const Config& config, const ConfigSchema& schema) {
  validate(config, schema, DecaySteps::kAreFinal);
}

}  // namespace mxopt
