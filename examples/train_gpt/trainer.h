// The training run of one rank: communicators, optimizer, model, and the loop over steps.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "train_gpt/cpu_share.h"
#include "train_gpt/gpt_model.h"
#include "train_gpt/metrics.h"
#include "train_gpt/phase_timer.h"
#include "train_gpt/progress.h"
#include "train_gpt/stop_request.h"
#include "train_gpt/text_data.h"
#include "train_gpt/trainer_config.h"

#include "mxopt/collectives/communicator.h"
#include "mxopt/collectives/traced_communicator.h"
#include "mxopt/optimizer/checkpointer.h"
#include "mxopt/optimizer/distributed_adam.h"
#include "mxopt/params/memory.h"

namespace train_gpt {

/// After an exception the object must live until the job has ended: MPI may still write to its buffers.
class Trainer {
 public:
  /// Collective. config, data and metrics must outlive the trainer; rank 0 alone writes metrics and progress.
  /// device  of compute_device(); of one kind on all ranks.
  /// yaml    the configuration as text, for checkpoints.
  Trainer(const TrainerConfig& config, const std::string& yaml, mxopt::Device device, const TextData& data,
          const CpuShare& cpus, MetricsFile& metrics);

  /// Collective: publishes the initial weights, or those of a checkpoint, and takes every step of the
  /// configuration that is left. Saves where the configuration or a signal says so.
  ///
  /// resume   empty: from the initial weights; "auto": from the latest checkpoint in checkpoint.dir, where
  /// there is one;
  ///          else a checkpoint's folder.
  /// Returns  false when it was asked to stop before the last step.
  bool run(const std::string& resume);

 private:
  /// Time that the host spent waiting for planes, by the phase that it was in.
  struct PlaneWaits {
    double forward_ms = 0, backward_ms = 0;
  };

  /// Makes the weights those of a checkpoint or the initial ones. Returns the steps that were made before.
  std::int64_t begin(const std::string& resume);
  void save(std::int64_t step);
  void finish_save();
  StepMetrics train_step(std::int64_t step);
  PlaneWaits compute_gradients(std::int64_t step);
  std::vector<PhaseTime> phase_times(const PlaneWaits& waits, const mxopt::PhaseTimes& host);
  /// The mean of a loss, and what any rank was asked for.
  double share_over_ranks(double loss);
  void wait_for_all_params();
  /// What the gather of the MXFP8 params would move if it moved BF16 values.
  std::int64_t bf16_gather_bytes() const;

  const TrainerConfig& config_;
  std::string yaml_;
  mxopt::Device device_;
  const TextData& data_;
  MetricsFile& metrics_;
  std::unique_ptr<mxopt::Communicator> comm_;
  // The optimizer has comm_ for itself. On the host, since that reads every loss anyway.
  std::unique_ptr<mxopt::Communicator> loss_comm_;
  mxopt::TracedCommunicator traced_;
  mxopt::DistributedAdam optimizer_;
  GptModel model_;
  mxopt::Checkpointer checkpoints_;
  PhaseTimer timer_;
  std::unique_ptr<Progress> progress_;  // of rank 0
  std::int64_t tokens_per_step_;
  StopRequest request_;  // of any rank, since the last step; equal on all ranks
  std::int64_t saved_step_ = -1;
};

}  // namespace train_gpt
