// A decoder-only byte-level GPT whose weights are the optimizer's params.
//
// Pre-norm blocks without biases in the linear layers: norm, attention, residual; norm, GELU MLP, residual.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "train_gpt/trainer_config.h"

#include "mxopt/optimizer/config.h"
#include "mxopt/optimizer/distributed_adam.h"
#include "mxopt/params/memory.h"
#include "mxopt/params/param_spec.h"

namespace train_gpt {

inline constexpr std::int64_t kVocabulary = 256;

/// Every param of the model, in the order of the forward pass. Linear weights are left to precision.weights.
std::vector<mxopt::ParamSpec> gpt_params(const ModelConfig& config, std::int64_t seq_len);

/// Uses the first `threads` threads of the tensor library in this process from now on.
void use_threads(int threads);

/// On a GPU the calls enqueue on the stream of the tensor library (compute_device.h); only take_loss() waits
/// for it.
class GptModel {
 public:
  /// optimizer  made of gpt_params(config, seq_len) on `device`; must outlive the model.
  GptModel(const ModelConfig& config, std::int64_t seq_len, mxopt::BackwardOverride backward_override,
           mxopt::DistributedAdam& optimizer, mxopt::Device device);
  ~GptModel();
  GptModel(const GptModel&) = delete;
  GptModel& operator=(const GptModel&) = delete;

  /// Sets every param; the values depend on the seed, the param's name and the element only. publish() is
  /// still due.
  void set_initial_values(std::uint64_t seed);

  /// The mean loss over the bytes of one micro-batch, in nats. Divided by micro_batches, it counts in
  /// take_loss().
  /// sequences  [n, seq_len + 1] bytes: inputs are the first seq_len of a row, targets the last.
  void forward(std::span<const std::uint8_t> sequences, std::int64_t micro_batches);

  /// Adds the gradients of the last forward()'s loss, times the optimizer's loss scale, into the optimizer's
  /// gradient views, then multiplies those views by grad_factor: the mean over micro-batches is taken with
  /// the last one.
  void backward(double grad_factor);

  /// Sum of what forward() has computed since the last call.
  double take_loss();

  /// Time that the host spent waiting for planes since the last call; 0 on a GPU, whose stream waits.
  double take_wait_ms();

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace train_gpt
