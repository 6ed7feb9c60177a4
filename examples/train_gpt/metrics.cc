#include "train_gpt/metrics.h"

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <utility>

#include <nlohmann/json.hpp>

#include "mxopt/params/check.h"

namespace train_gpt {

std::string to_json(const StepMetrics& metrics) {
  nlohmann::ordered_json ms = nlohmann::ordered_json::object();
  for (const PhaseTime& phase : metrics.ms) ms[std::string(phase.name)] = phase.ms;
  const nlohmann::ordered_json line = {
      {"step", metrics.step},
      {"loss", metrics.loss},
      {"lr", metrics.lr},
      {"grad_norm", metrics.grad_norm},
      {"clip_factor", metrics.clip_factor},
      {"taken", metrics.taken},
      {"tokens_per_s", metrics.tokens_per_s},
      {"ms", std::move(ms)},
      {"amax_reductions", metrics.amax_reductions},
      {"gathered_bytes", metrics.gathered_bytes},
      {"plain_param_bytes", metrics.plain_param_bytes},
      {"high_precision_param_bytes", metrics.high_precision_param_bytes},
      {"skipped_total", metrics.skipped_total},
  };
  return line.dump();
}

MetricsFile::MetricsFile(const std::string& path, const std::string& origin, bool goes_on) : path_(path) {
  if (path.empty()) return;
  const std::filesystem::path folder = std::filesystem::path(path).parent_path();
  std::error_code error;
  if (!folder.empty()) std::filesystem::create_directories(folder, error);
  errno = 0;
  if (!error) file_.open(path, goes_on ? std::ios::app : std::ios::trunc);
  if (error || !file_) {
    throw mxopt::ConfigError(origin + ": `train.metrics` is \"" + path + "\", which can not be written: " +
                             (error ? error.message() : std::strerror(errno)));
  }
}

void MetricsFile::write(const StepMetrics& metrics) {
  if (path_.empty()) return;
  file_ << to_json(metrics) << '\n' << std::flush;
  if (!file_) throw mxopt::DataError("metrics file " + path_ + " can not be written");
}

}  // namespace train_gpt
