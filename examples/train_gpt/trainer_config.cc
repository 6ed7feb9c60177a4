#include "train_gpt/trainer_config.h"

#include <sstream>

#include "train_gpt/compute_device.h"

#include "mxopt/params/check.h"

namespace train_gpt {
namespace {

using mxopt::Bounds;
using mxopt::ConfigError;
using mxopt::ParamFormat;

constexpr double kMaxCount = 1e12;

void describe_train(mxopt::ConfigSchema& schema, TrainConfig& train) {
  schema
      .add("train.steps", train.steps, Bounds::at_least(1).at_most(kMaxCount),
           "Optimizer steps that the schedule covers.", "steps")
      .alias("train_iters")
      .alias("max_steps");
  schema.add("train.stop_after", train.stop_after,
             Bounds::at_least(1).at_most(kMaxCount).or_zero("train.steps"),
             "Steps after which the run ends; the schedule stays as it is.", "steps");
  schema
      .add("train.global_batch", train.global_batch, Bounds::at_least(1).at_most(kMaxCount),
           "Sequences of one step, over all ranks.", "sequences")
      .alias("global_batch_size");
  schema
      .add("train.micro_batch", train.micro_batch, Bounds::at_least(1).at_most(kMaxCount),
           "Sequences that one rank computes at once.", "sequences")
      .alias("micro_batch_size");
  schema
      .add("train.seq_len", train.seq_len, Bounds::at_least(1).at_most(65536), "Length of a sequence.",
           "bytes")
      .alias("seq_length");
  schema.add("train.seed", train.seed, Bounds::at_least(0), "Seed of initial values and data order.");
  schema.add("train.log_every", train.log_every, Bounds::at_least(1).at_most(kMaxCount),
             "Steps between log lines.", "steps");
  schema.add("train.threads", train.threads,
             Bounds::at_least(1).at_most(4096).or_zero("this rank's share of the cores"),
             "Threads of one rank.", "threads");
  schema.add("train.metrics", train.metrics, "File for one JSON line per step; empty: none.");
  schema.add("train.progress", train.progress,
             {{"auto", ProgressStyle::kAuto}, {"line", ProgressStyle::kLine}, {"log", ProgressStyle::kLog}},
             "One updating line or log lines; auto: the line where output goes to a terminal.");
}

void describe_model(mxopt::ConfigSchema& schema, ModelConfig& model) {
  schema.add("model.layers", model.layers, Bounds::at_least(1).at_most(1024), "Transformer blocks.", "blocks")
      .alias("num_layers");
  schema
      .add("model.hidden", model.hidden, Bounds::at_least(1).at_most(65536), "Width of the residual stream.",
           "elements")
      .alias("hidden_size");
  schema
      .add("model.heads", model.heads, Bounds::at_least(1).at_most(65536),
           "Attention heads; they divide model.hidden.", "heads")
      .alias("num_attention_heads");
  schema.add("model.ffn_mult", model.ffn_mult, Bounds::at_least(1).at_most(64),
             "Width of the MLP in multiples of model.hidden.");
  schema.add("model.init_std", model.init_std, Bounds::above(0),
             "Standard deviation of initial weights; smaller where a layer adds to the residual stream.");
  schema.add("model.embeddings", model.embeddings,
             {{"bf16", ParamFormat::kBf16}, {"fp32", ParamFormat::kFp32}}, "Format of the embedding params.");
  schema.add("model.norms", model.norms, {{"bf16", ParamFormat::kBf16}, {"fp32", ParamFormat::kFp32}},
             "Format of the layer norms' params.");
}

class Problems {
 public:
  explicit Problems(const mxopt::ConfigSchema& schema) : schema_(schema) {}

  /// A line about the value of `key`.
  std::ostringstream& at(std::string_view key) {
    if (!text_.str().empty()) text_ << '\n';
    text_ << schema_.origin(key) << ": `" << key << "` ";
    return text_;
  }
  std::string text() const { return text_.str(); }

 private:
  const mxopt::ConfigSchema& schema_;
  std::ostringstream text_;
};

}  // namespace

void describe(mxopt::ConfigSchema& schema, TrainerConfig& config) {
  mxopt::describe(schema, config.library);
  describe_train(schema, config.train);
  describe_model(schema, config.model);
  schema
      .add("data.files", config.data.files,
           "Files of the training text: shell wildcards, {a,b} and ~; a relative path starts at the working "
           "directory.")
      .not_empty();
  schema.after_load([&config] {
    auto& schedule = config.library.schedule;
    if (schedule.decay_steps == 0) schedule.decay_steps = config.train.steps;
  });
}

void validate(const TrainerConfig& config, const mxopt::ConfigSchema& schema) {
  mxopt::validate(config.library, schema);
  const TrainConfig& train = config.train;
  const ModelConfig& model = config.model;
  Problems problems(schema);
  if (train.stop_after > train.steps) {
    problems.at("train.stop_after") << "is " << train.stop_after << "; allowed: at most `train.steps`, "
                                    << train.steps;
  }
  if (train.global_batch % train.micro_batch != 0) {
    problems.at("train.micro_batch") << "is " << train.micro_batch
                                     << "; allowed: a divisor of `train.global_batch`, "
                                     << train.global_batch;
  } else if (train.micro_batches() % kMicroBatchMultiple != 0) {
    problems.at("train.global_batch")
        << "is " << train.global_batch << ", which is " << train.micro_batches() << " micro-batches of "
        << train.micro_batch << "; allowed: a multiple of " << kMicroBatchMultiple << " micro-batches";
  }
  if (model.hidden % model.heads != 0) {
    problems.at("model.heads") << "is " << model.heads << "; allowed: a divisor of `model.hidden`, "
                               << model.hidden;
  }
  if (config.library.optimizer.grad_dtype != mxopt::DType::kFp32) {
    problems.at("optimizer.grad_dtype") << "is bf16; allowed in train_gpt: fp32, in which it accumulates";
  }
  if (config.library.optimizer.grad_reduce != mxopt::GradReduce::kAverage) {
    problems.at("optimizer.grad_reduce")
        << "is not average; allowed in train_gpt: average, as all its micro-batches have the same number of "
           "tokens";
  }
  if (config.library.parallel.device == mxopt::DeviceChoice::kCuda && !has_cuda_tensors()) {
    problems.at("parallel.device") << "is cuda; allowed in this train_gpt: host and auto, which is the host, "
                                      "as it was built without CUDA or "
                                      "with a libtorch without it";
  }
  if (config.library.precision.backward_override == mxopt::BackwardOverride::kHighPrecision) {
    problems.at("precision.backward_override")
        << "is high_precision; allowed in train_gpt: none and dequantized, as no rank has whole masters";
  }
  if (config.data.files.empty()) {
    problems.at("data.files") << "is empty; allowed: at least one pattern";
  }
  if (const std::string text = problems.text(); !text.empty()) throw ConfigError(text);
}

void validate_job(const TrainerConfig& config, const mxopt::ConfigSchema& schema, int world_size,
                  mxopt::DeviceKind device) {
  Problems problems(schema);
  const mxopt::Transport transport = config.library.parallel.transport;
  if (device == mxopt::DeviceKind::kHost && transport == mxopt::Transport::kNccl) {
    problems.at("parallel.transport")
        << "is nccl, which moves memory of GPUs, but the run is on the host; allowed: auto, self and mpi";
  } else if (device == mxopt::DeviceKind::kCuda && transport == mxopt::Transport::kMpi) {
    problems.at("parallel.transport")
        << "is mpi, which moves memory of the host, but the run is on GPUs; allowed: auto, self and nccl";
  }
  const std::int64_t expected = config.library.parallel.world_size;
  if (expected != 0 && expected != world_size) {
    problems.at("parallel.world_size") << "is " << expected << ", but MPI started " << world_size << " ranks";
  } else if (transport == mxopt::Transport::kSelf && world_size != 1) {
    problems.at("parallel.transport")
        << "is self, but MPI started " << world_size << " ranks; allowed: auto, "
        << (device == mxopt::DeviceKind::kHost ? "mpi" : "nccl");
  } else if (config.train.micro_batches() % world_size != 0) {
    problems.at("train.global_batch")
        << "is " << config.train.global_batch << ", which is " << config.train.micro_batches()
        << " micro-batches of " << config.train.micro_batch << "; " << world_size
        << " ranks can not share them evenly";
  }
  if (const std::string text = problems.text(); !text.empty()) throw ConfigError(text);
}

std::string shared_values(const TrainerConfig& config) {
  const TrainConfig& train = config.train;
  std::ostringstream text;
  text << "train.steps " << train.steps << ", stop_after " << train.stop_after << ", global_batch "
       << train.global_batch << ", micro_batch " << train.micro_batch << ", seq_len " << train.seq_len
       << ", seed " << train.seed << ", model.heads " << config.model.heads << ", init_std "
       << config.model.init_std;
  return text.str();
}

}  // namespace train_gpt
