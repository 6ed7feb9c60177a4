// The metrics file: one JSON object per line and step.
#pragma once

#include <cstdint>
#include <fstream>
#include <string>
#include <string_view>
#include <vector>

namespace train_gpt {

/// One phase of a step.
struct PhaseTime {
  std::string_view name;  // of a constant
  double ms = 0;
};

struct StepMetrics {
  std::int64_t step = 0;  // of the run, from 1; skipped steps count
  double loss = 0;        // mean over the global batch, in nats per byte, before the step
  double lr = 0;
  double grad_norm = 0;
  double clip_factor = 1;
  bool taken = false;
  std::int64_t taken_total = 0;
  double tokens_per_s = 0;    // of all ranks
  std::vector<PhaseTime> ms;  // of rank 0; which phases there are depends on the device
  std::int64_t amax_reductions = 0;
  std::int64_t gathered_bytes = 0;              // planes of MXFP8 params, as every rank ends up with
  std::int64_t plain_param_bytes = 0;           // bf16 and fp32 params
  std::int64_t high_precision_param_bytes = 0;  // MXFP8 params in any other format
  std::int64_t skipped_total = 0;
};

/// `metrics` as one line of JSON, without the line's end. Numbers that are not finite become null.
std::string to_json(const StepMetrics& metrics);

class MetricsFile {
 public:
  /// Makes the file's folder, and empties the file unless the run goes on from a checkpoint; an empty path
  /// writes nothing. Throws ConfigError when it can not; origin says where the path comes from.
  MetricsFile(const std::string& path, const std::string& origin, bool goes_on = false);

  /// Writes and flushes one line. Throws DataError when it can not.
  void write(const StepMetrics& metrics);

 private:
  std::string path_;
  std::ofstream file_;
};

}  // namespace train_gpt
