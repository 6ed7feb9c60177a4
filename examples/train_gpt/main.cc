// train_gpt: trains a small byte-level GPT with mxopt::DistributedAdam, configured by YAML, over MPI ranks.

#include <iostream>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <CLI/CLI.hpp>

#include "train_gpt/compute_device.h"
#include "train_gpt/cpu_share.h"
#include "train_gpt/metrics.h"
#include "train_gpt/mpi_job.h"
#include "train_gpt/stop_request.h"
#include "train_gpt/text_data.h"
#include "train_gpt/trainer.h"
#include "train_gpt/trainer_config.h"

#include "mxopt/params/check.h"

namespace train_gpt {
namespace {

/// How long a rank that failed waits for the others to have failed as well.
constexpr double kFailureWaitS = 2;
/// How long it waits before training starts, when no other number is known.
constexpr double kStartWaitS = 300;

/// As shells say it of a process that SIGTERM ended.
constexpr int kStoppedBySignal = 128 + 15;

struct Options {
  std::string config_path;
  std::vector<std::string> overrides;
  std::string resume;
  bool print_config = false;
  bool check_config = false;
};

/// What the first phase prepares, alone on every rank.
struct Prepared {
  TrainerConfig config;
  mxopt::ConfigSchema schema;
  mxopt::Device device;
  std::unique_ptr<TextData> data;
  std::unique_ptr<MetricsFile> metrics;
};

/// Runs `action` and says how it went: the only place of the program that catches.
template <class Action>
Outcome outcome_of(const Action& action) {
  Outcome outcome;
  try {
    action();
    return outcome;
  } catch (const mxopt::ConfigError& error) {
    outcome.is_config_error = true;
    outcome.text = error.what();
  } catch (const CLI::ParseError& error) {
    outcome.is_config_error = true;
    outcome.text = std::string(error.what()) + "; --help shows the options";
  } catch (const std::exception& error) {
    outcome.text = error.what();
  }
  outcome.failed = true;
  return outcome;
}

void declare(CLI::App& app, Options& options) {
  app.add_option("--config", options.config_path, "YAML file with the configuration")->required();
  app.add_option("--set", options.overrides,
                 "key=value: overrides a key of the file, for example optimizer.lr=1e-3")
      ->expected(1)
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
  app.add_option("overrides", options.overrides, "The same, without --set");
  app.add_option("--resume", options.resume,
                 "auto: go on from the latest checkpoint in checkpoint.dir, where there is one; or a "
                 "checkpoint's folder");
  app.add_flag("--print-config", options.print_config,
               "Print every value with where it comes from, and stop");
  app.add_flag("--check-config", options.check_config, "Check the configuration, and stop");
}

void load(const Options& options, Prepared& prepared) {
  describe(prepared.schema, prepared.config);
  prepared.schema.load_file(options.config_path, options.overrides);
  validate(prepared.config, prepared.schema);
}

void prepare(const MpiJob& job, const std::string& resume, Prepared& prepared) {
  job.check_launcher();
  const TrainConfig& train = prepared.config.train;
  const auto origin = [&prepared](std::string_view key) { return prepared.schema.origin(key); };
  prepared.device = compute_device(prepared.config.library.parallel, prepared.schema, job.node_rank());
  validate_job(prepared.config, prepared.schema, job.size(), prepared.device.kind);
  prepared.data = std::make_unique<TextData>(prepared.config.data.files, train.seq_len, origin("data.files"));
  prepared.metrics = std::make_unique<MetricsFile>(job.rank() == 0 ? train.metrics : "",
                                                   origin("train.metrics"), !resume.empty());
  const std::string& dir = prepared.config.library.checkpoint.dir;
  if (resume == "auto" && dir.empty()) {
    throw mxopt::ConfigError(
        "--resume auto: `checkpoint.dir` is empty; it must name the folder of all checkpoints");
  }
}

std::string data_text(const TextData& data) {
  return std::to_string(data.files()) + " files, " + std::to_string(data.bytes()) + " bytes, digest " +
         std::to_string(data.digest());
}

int run(MpiJob& job, int argc, char** argv) {
  CLI::App app("Trains a small byte-level GPT whose weights are MXFP8 planes of the optimizer.", "train_gpt");
  Options options;
  declare(app, options);
  Prepared prepared;
  bool only_help = false;
  Outcome outcome = outcome_of([&] {
    try {
      app.parse(argc, argv);
    } catch (const CLI::CallForHelp&) {
      only_help = true;
      return;
    }
    load(options, prepared);
    if (!options.print_config && !options.check_config) prepare(job, options.resume, prepared);
  });
  const TrainerConfig& config = prepared.config;
  const double start_wait_s = outcome.failed ? kStartWaitS : config.library.parallel.init_timeout_s;
  if (const int code = job.settle(outcome, start_wait_s); code != 0) return code;

  if (only_help || options.print_config || options.check_config) {
    if (job.rank() != 0) return 0;
    if (only_help) std::cout << app.help();
    if (options.print_config) std::cout << prepared.schema.to_yaml();
    if (options.check_config) std::cout << options.config_path << ": the configuration is valid\n";
    return 0;
  }

  // Declared out here: after an error the trainer must live until the job has ended.
  std::optional<Trainer> trainer;
  bool is_complete = true;
  outcome = outcome_of([&] {
    const bool on_gpu = prepared.device.kind == mxopt::DeviceKind::kCuda;
    job.require_equal("the kind of device, parallel.device", on_gpu ? "cuda" : "host");
    job.require_equal("the configuration", shared_values(config));
    job.require_equal("the text of data.files", data_text(*prepared.data));
    const CpuShare cpus = find_cpu_share(job, config.train.threads);
    if (!cpus.warning.empty()) std::cerr << "train_gpt: warning: " << cpus.warning << std::endl;
    use_device(prepared.device);
    note_signals();
    trainer.emplace(config, prepared.schema.to_yaml(), prepared.device, *prepared.data, cpus,
                    *prepared.metrics);
    is_complete = trainer->run(options.resume);
  });
  const double wait_s = outcome.failed ? kFailureWaitS : config.library.parallel.timeout_s;
  const int code = job.settle(outcome, wait_s);
  if (code == 1) job.end(code);
  return code == 0 && !is_complete ? kStoppedBySignal : code;
}

}  // namespace
}  // namespace train_gpt

int main(int argc, char** argv) {
  train_gpt::MpiJob job(&argc, &argv);
  return train_gpt::run(job, argc, argv);
}
