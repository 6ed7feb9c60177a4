#include "train_gpt/progress.h"

#include <array>
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <string_view>
#include <utility>

#include <unistd.h>

namespace train_gpt {
namespace {

constexpr auto kRefresh = std::chrono::milliseconds(100);

template <class... Values>
std::string formatted(const char* format, Values... values) {
  std::array<char, 512> text{};
  std::snprintf(text.data(), text.size(), format, values...);
  return text.data();
}

/// 12.3 MB and the like.
std::string bytes_text(std::int64_t bytes) {
  auto value = static_cast<double>(bytes);
  for (const char* unit : {"bytes", "kB", "MB", "GB"}) {
    if (value < 1000)
      return formatted(std::string_view(unit) == "bytes" ? "%.0f %s" : "%.2f %s", value, unit);
    value /= 1000;
  }
  return formatted("%.2f TB", value);
}

double seconds_since(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

}  // namespace

bool output_is_terminal() {
  if (isatty(STDOUT_FILENO) == 0) return false;
  if (std::getenv("OMPI_COMM_WORLD_SIZE") == nullptr) return true;
  std::error_code error;
  const auto target = std::filesystem::read_symlink("/proc/" + std::to_string(getppid()) + "/fd/1", error);
  return !error && (target.string().starts_with("/dev/pts/") || target.string().starts_with("/dev/tty"));
}

Progress::Progress(const TrainConfig& config, std::int64_t trained_bytes_per_step)
    : config_(config), bytes_per_step_(trained_bytes_per_step) {
  line_ = config.progress == ProgressStyle::kLine ||
          (config.progress == ProgressStyle::kAuto && output_is_terminal());
  const char* no_color = std::getenv("NO_COLOR");
  colors_ = line_ && (no_color == nullptr || *no_color == '\0');
}

void Progress::clear_line() {
  if (std::exchange(line_is_open_, false)) std::fputs("\r\x1b[K", stdout);
}

void Progress::note(const std::string& text) {
  clear_line();
  std::printf("%s\n", text.c_str());
  std::fflush(stdout);
}

void Progress::step(const StepMetrics& metrics) {
  if (steps_++ == 0) first_ = metrics;
  last_ = metrics;
  const std::int64_t last_step = config_.last_step();
  const bool ends = metrics.step == last_step;
  if (!metrics.taken) note(formatted("step %" PRId64 " skipped: a gradient is not finite", metrics.step));

  const std::string text =
      formatted("step %" PRId64 "/%" PRId64 "  loss %.4f  lr %.2e  norm %.3f  %.0f tokens/s", metrics.step,
                last_step, metrics.loss, metrics.lr, metrics.grad_norm, metrics.tokens_per_s);
  if (!line_) {
    if (metrics.step == 1 || ends || metrics.step % config_.log_every == 0) note(text);
    return;
  }
  const auto now = std::chrono::steady_clock::now();
  if (!ends && now - shown_ < kRefresh) return;
  shown_ = now;
  const double left_s =
      seconds_since(begin_) / static_cast<double>(steps_) * static_cast<double>(last_step - metrics.step);
  std::printf("\r\x1b[K%s%s%s  %.0f s left", colors_ ? "\x1b[1m" : "", text.c_str(), colors_ ? "\x1b[0m" : "",
              left_s);
  std::fflush(stdout);
  line_is_open_ = true;
}

void Progress::finish(std::int64_t bf16_bytes, const std::string& memory) {
  if (std::exchange(line_is_open_, false)) std::printf("\n");
  const double seconds = seconds_since(begin_);
  const double drop = 100.0 * (1.0 - last_.loss / first_.loss);
  std::printf("\n%" PRId64 " steps in %.1f s, %.0f tokens/s\n", steps_, seconds,
              static_cast<double>(steps_ * bytes_per_step_) / seconds);
  std::printf("loss %.4f -> %.4f (%.1f %% lower)\n", first_.loss, last_.loss, drop);
  std::printf("gathered per step: %s of MXFP8 planes", bytes_text(last_.gathered_bytes).c_str());
  if (bf16_bytes > 0) std::printf(" (as BF16: %s)", bytes_text(bf16_bytes).c_str());
  std::printf(", %s of bf16 and fp32 params, %s of MXFP8 params in another format\n",
              bytes_text(last_.plain_param_bytes).c_str(),
              bytes_text(last_.high_precision_param_bytes).c_str());
  std::printf("scale reductions per step: %" PRId64 "; steps skipped: %" PRId64 "\n", last_.amax_reductions,
              last_.skipped_total);
  std::printf("%s\n", memory.c_str());
  std::fflush(stdout);
}

}  // namespace train_gpt
