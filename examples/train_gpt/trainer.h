// The training run of one rank: communicators, optimizer, model, and the loop over steps.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "train_gpt/cpu_share.h"
#include "train_gpt/gpt_model.h"
#include "train_gpt/metrics.h"
#include "train_gpt/phase_timer.h"
#include "train_gpt/progress.h"
#include "train_gpt/text_data.h"
#include "train_gpt/trainer_config.h"

#include "mxopt/collectives/communicator.h"
#include "mxopt/collectives/traced_communicator.h"
#include "mxopt/optimizer/distributed_adam.h"
#include "mxopt/params/memory.h"

namespace train_gpt {

/// After an exception the object must live until the job has ended: MPI may still write to its buffers.
class Trainer {
 public:
  /// Collective. config, data and metrics must outlive the trainer; rank 0 alone writes metrics and progress.
  /// device  of compute_device(); of one kind on all ranks.
  Trainer(const TrainerConfig& config, mxopt::Device device, const TextData& data, const CpuShare& cpus,
          MetricsFile& metrics);

  /// Collective: publishes the initial weights and takes every step of the configuration.
  void run();

 private:
  /// Time that the host spent waiting for planes, by the phase that it was in.
  struct PlaneWaits {
    double forward_ms = 0, backward_ms = 0;
  };

  StepMetrics train_step(std::int64_t step);
  PlaneWaits compute_gradients(std::int64_t step);
  std::vector<PhaseTime> phase_times(const PlaneWaits& waits, const mxopt::PhaseTimes& host);
  double mean_over_ranks(double value);
  void wait_for_all_params();
  /// What the gather of the MXFP8 params would move if it moved BF16 values.
  std::int64_t bf16_gather_bytes() const;

  const TrainerConfig& config_;
  mxopt::Device device_;
  const TextData& data_;
  MetricsFile& metrics_;
  std::unique_ptr<mxopt::Communicator> comm_;
  // The optimizer has comm_ for itself. On the host, since that reads every loss anyway.
  std::unique_ptr<mxopt::Communicator> loss_comm_;
  mxopt::TracedCommunicator traced_;
  mxopt::DistributedAdam optimizer_;
  GptModel model_;
  PhaseTimer timer_;
  std::unique_ptr<Progress> progress_;  // of rank 0
  std::int64_t tokens_per_step_;
};

}  // namespace train_gpt
