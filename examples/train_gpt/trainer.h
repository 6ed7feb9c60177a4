// The training run of one rank: communicators, optimizer, model, and the loop over steps.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "train_gpt/cpu_share.h"
#include "train_gpt/gpt_model.h"
#include "train_gpt/metrics.h"
#include "train_gpt/progress.h"
#include "train_gpt/text_data.h"
#include "train_gpt/trainer_config.h"

#include "mxopt/collectives/communicator.h"
#include "mxopt/collectives/traced_communicator.h"
#include "mxopt/optimizer/distributed_adam.h"

namespace train_gpt {

/// After an exception the object must live until the job has ended: MPI may still write to its buffers.
class Trainer {
 public:
  /// Collective. config, data and metrics must outlive the trainer; rank 0 alone writes metrics and progress.
  Trainer(const TrainerConfig& config, const TextData& data, const CpuShare& cpus, MetricsFile& metrics);

  /// Collective: publishes the initial weights and takes every step of the configuration.
  void run();

 private:
  struct Gradients {
    double loss = 0;  // mean over this rank's micro-batches
    double forward_ms = 0, backward_ms = 0, wait_ms = 0;
  };

  StepMetrics train_step(std::int64_t step);
  Gradients compute_gradients(std::int64_t step);
  double mean_over_ranks(double value);
  void wait_for_all_params();
  /// What the gather of the MXFP8 params would move if it moved BF16 values.
  std::int64_t bf16_gather_bytes() const;

  const TrainerConfig& config_;
  const TextData& data_;
  MetricsFile& metrics_;
  std::unique_ptr<mxopt::Communicator> comm_;
  std::unique_ptr<mxopt::Communicator> loss_comm_;  // the optimizer has comm_ for itself
  mxopt::TracedCommunicator traced_;
  mxopt::DistributedAdam optimizer_;
  GptModel model_;
  std::unique_ptr<Progress> progress_;  // of rank 0
  std::int64_t tokens_per_step_;
};

}  // namespace train_gpt
