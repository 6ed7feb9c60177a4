// What the trainer reads from YAML: the library's configuration, and the sections train, model and data.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "mxopt/optimizer/config.h"
#include "mxopt/optimizer/config_schema.h"
#include "mxopt/params/param_spec.h"

namespace train_gpt {

enum class ProgressStyle { kAuto, kLine, kLog };

struct TrainConfig {
  std::int64_t steps = 300;
  std::int64_t stop_after = 0;     // 0: steps
  std::int64_t global_batch = 12;  // sequences
  std::int64_t micro_batch = 1;    // sequences
  std::int64_t seq_len = 128;      // bytes
  std::int64_t seed = 1;
  std::int64_t log_every = 10;
  std::int64_t threads = 0;  // 0: this rank's share of the node's cores
  std::string metrics;       // empty: none
  ProgressStyle progress = ProgressStyle::kAuto;

  std::int64_t micro_batches() const { return global_batch / micro_batch; }
  std::int64_t last_step() const { return stop_after == 0 ? steps : stop_after; }
};

struct ModelConfig {
  std::int64_t layers = 4;
  std::int64_t hidden = 192;
  std::int64_t heads = 6;
  std::int64_t ffn_mult = 4;
  double init_std = 0.06;
  mxopt::ParamFormat embeddings = mxopt::ParamFormat::kBf16;
  mxopt::ParamFormat norms = mxopt::ParamFormat::kBf16;
};

struct DataConfig {
  std::vector<std::string> files;
};

struct TrainerConfig {
  mxopt::Config library;
  TrainConfig train;
  ModelConfig model;
  DataConfig data;
};

/// Global batches are cut into a multiple of this many micro-batches, so that 1, 2, 3, 4, 6 and 12 ranks
/// share them.
inline constexpr std::int64_t kMicroBatchMultiple = 12;

/// Adds every key to `schema`, bound to `config`, which must stay where it is.
void describe(mxopt::ConfigSchema& schema, TrainerConfig& config);

/// Throws ConfigError with every contradiction between values, each with the origin of its value.
void validate(const TrainerConfig& config, const mxopt::ConfigSchema& schema);

/// Throws ConfigError when the micro-batches can not be shared evenly, or parallel.world_size is another
/// number, or the transport does not reach the memory of `device`.
void validate_job(const TrainerConfig& config, const mxopt::ConfigSchema& schema, int world_size,
                  mxopt::DeviceKind device);

/// The values on which a training run depends and all ranks must agree, as text. The library compares its
/// own.
std::string shared_values(const TrainerConfig& config);

}  // namespace train_gpt
