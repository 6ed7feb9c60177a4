// What a person sees of a run: one updating line on a terminal, log lines elsewhere, and a report at the end.
//
// Rank 0 has one. Output goes to standard output.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>

#include "train_gpt/metrics.h"
#include "train_gpt/trainer_config.h"

namespace train_gpt {

/// Whether a person sees standard output as a terminal. Under mpirun that is the launcher's: ranks get one of
/// their own.
bool output_is_terminal();

class Progress {
 public:
  Progress(const TrainConfig& config, std::int64_t trained_bytes_per_step);

  /// A line of its own, above the updating line.
  void note(const std::string& text);
  void step(const StepMetrics& metrics);

  /// Ends the updating line and prints what the run came to. bf16_bytes  what a gather of the MXFP8 params
  /// would move as BF16; memory  one line of the optimizer's report.
  void finish(std::int64_t bf16_bytes, const std::string& memory);

 private:
  void clear_line();

  TrainConfig config_;
  std::int64_t bytes_per_step_;
  bool line_ = false;
  bool colors_ = false;
  bool line_is_open_ = false;
  std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
  std::chrono::steady_clock::time_point shown_;
  std::int64_t steps_ = 0;
  StepMetrics first_;
  StepMetrics last_;
};

}  // namespace train_gpt
