#include "train_gpt/trainer.h"

#include <array>
#include <chrono>
#include <filesystem>
#include <span>
#include <sstream>
#include <string>

#include "train_gpt/compute_device.h"

#include "mxopt/collectives/make_communicator.h"
#include "mxopt/optimizer/checkpoint/checkpoint_folder.h"

namespace train_gpt {
namespace {

/// Steps of the trainer, skipped ones included, in a checkpoint.
constexpr const char* kStepKey = "train_gpt.step";

class Stopwatch {
 public:
  /// Milliseconds since the last call, or since construction.
  double lap_ms() {
    const auto now = std::chrono::steady_clock::now();
    const double ms = std::chrono::duration<double, std::milli>(now - begin_).count();
    begin_ = now;
    return ms;
  }

 private:
  std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
};

/// The line of a construction report that says where this rank's bytes went.
std::string memory_line(const std::string& report) {
  std::istringstream lines(report);
  std::string line;
  while (std::getline(lines, line)) {
    if (line.starts_with("memory")) return line;
  }
  return report;
}

mxopt::CommunicatorOptions host_options(const mxopt::ParallelConfig& parallel) {
  mxopt::CommunicatorOptions options = mxopt::communicator_options(parallel);
  options.transport = mxopt::Transport::kAuto;
  return options;
}

}  // namespace

Trainer::Trainer(const TrainerConfig& config, const std::string& yaml, mxopt::Device device,
                 const TextData& data, const CpuShare& cpus, MetricsFile& metrics)
    : config_(config),
      yaml_(yaml),
      device_(device),
      data_(data),
      metrics_(metrics),
      comm_(mxopt::make_communicator(mxopt::communicator_options(config.library.parallel, device))),
      loss_comm_(mxopt::make_communicator(host_options(config.library.parallel))),
      traced_(*comm_),
      optimizer_(gpt_params(config.model, config.train.seq_len), config.library, traced_, device),
      model_(config.model, config.train.seq_len, config.library.precision.backward_override, optimizer_,
             device),
      checkpoints_(optimizer_, config.library.checkpoint),
      timer_(device),
      tokens_per_step_(config.train.global_batch * config.train.seq_len) {
  use_threads(cpus.threads);
  if (comm_->rank() != 0) return;
  progress_ = std::make_unique<Progress>(config.train, tokens_per_step_);
  std::ostringstream text;
  text << "text: " << data.bytes() << " bytes in " << data.files() << " files\n"
       << "threads per rank: " << cpus.threads << "; rank 0 may run on " << cpus.allowed_cores << " of "
       << cpus.node_cores << " cores, shared by " << cpus.node_ranks << " ranks\n"
       << "device of rank 0: "
       << (device.kind == mxopt::DeviceKind::kHost ? "the host" : tensor_device(device).str()) << '\n'
       << optimizer_.construction().text();
  progress_->note(text.str());
}

bool Trainer::run(const std::string& resume) {
  const std::int64_t made = begin(resume);
  wait_for_all_params();
  const std::int64_t every = config_.library.checkpoint.every;
  std::int64_t step = made;
  while (step < config_.train.last_step() && !request_.stop) {
    const StepMetrics metrics = train_step(++step);
    if (progress_ != nullptr) {
      metrics_.write(metrics);
      progress_->step(metrics);
    }
    if (request_.save || request_.stop || (every > 0 && metrics.taken && metrics.taken_total % every == 0))
      save(step);
  }
  if (!config_.library.checkpoint.dir.empty() && step > made) save(step);
  checkpoints_.wait();
  wait_for_all_params();
  traced_.barrier();  // with a deadline: a GPU has only been told to wait for the last gather
  const bool is_complete = step >= config_.train.last_step();
  if (progress_ == nullptr) return is_complete;
  if (!is_complete) {
    progress_->note(
        "stopped by a signal after step " + std::to_string(step) +
        (config_.library.checkpoint.dir.empty() ? "; not saved, since checkpoint.dir is empty" : ""));
  }
  if (step > made) progress_->finish(bf16_gather_bytes(), memory_line(optimizer_.construction().text()));
  return is_complete;
}

std::int64_t Trainer::begin(const std::string& resume) {
  const std::string& dir = config_.library.checkpoint.dir;
  bool loads = !resume.empty();
  if (resume == "auto") {
    // One rank looks: the others would not see a folder at the same moment.
    float found =
        comm_->rank() == 0 && std::filesystem::exists(dir) && !mxopt::list_checkpoints(dir).empty() ? 1 : 0;
    loss_comm_->broadcast(std::span(&found, 1), 0, mxopt::Traffic::kControl).wait();
    loads = found > 0;
  }
  if (!loads) {
    model_.set_initial_values(static_cast<std::uint64_t>(config_.train.seed));
    optimizer_.publish(tensor_stream(device_));
    return 0;
  }
  const mxopt::LoadedRun loaded =
      checkpoints_.load(resume == "auto" ? dir : resume, tensor_stream(device_), yaml_);
  const auto made = loaded.run.user.find(kStepKey);
  if (made == loaded.run.user.end()) {
    throw mxopt::DataError(loaded.folder.string() + " is no checkpoint of train_gpt: it has no '" + kStepKey +
                           "'");
  }
  saved_step_ = std::stoll(made->second);
  if (progress_ != nullptr) {
    std::string text = "going on from " + loaded.folder.string() + " after step " + made->second;
    for (const std::string& line : loaded.warnings) text += "\nwarning: " + line;
    for (const std::string& line : loaded.differences) text += "\nsaved with " + line;
    progress_->note(text);
  }
  return saved_step_;
}

/// The save that is in flight may have failed; the next one need not.
void Trainer::finish_save() {
  try {
    checkpoints_.wait();
  } catch (const mxopt::CheckpointError& error) {
    if (progress_ != nullptr) progress_->note(std::string("warning: ") + error.what());
  }
}

void Trainer::save(std::int64_t step) {
  if (saved_step_ == step || config_.library.checkpoint.dir.empty()) return;
  saved_step_ = step;
  mxopt::RunState run;
  // The data order is a function of the seed and this number.
  run.user[kStepKey] = std::to_string(step);
  run.config = yaml_;
  finish_save();
  const mxopt::SavedRun saved = checkpoints_.save(run, tensor_stream(device_));
  if (progress_ == nullptr) return;
  std::string text = (config_.library.checkpoint.async ? "saving " : "saved ") + saved.folder.string();
  for (const std::string& line : saved.warnings) text += "\nwarning: " + line;
  progress_->note(text);
}

StepMetrics Trainer::train_step(std::int64_t step) {
  Stopwatch watch;
  traced_.reset();
  const PlaneWaits waits = compute_gradients(step);
  timer_.begin(Phase::kOptimizer);
  const mxopt::StepReport report = optimizer_.step(tensor_stream(device_));
  timer_.end();

  // Here, and nowhere else in a step, the host waits for a GPU: for the report first, since that wait has a
  // deadline.
  StepMetrics metrics;
  metrics.step = step;
  metrics.lr = report->lr;
  metrics.loss = share_over_ranks(model_.take_loss());
  metrics.grad_norm = report->grad_norm;
  metrics.clip_factor = report->clip_factor;
  metrics.taken = report->taken;
  metrics.taken_total = report->step;
  metrics.skipped_total = report->skipped_total;
  metrics.amax_reductions = traced_.counts(mxopt::Traffic::kScales).operations;
  metrics.gathered_bytes = traced_.counts(mxopt::Traffic::kPlanes).bytes;
  metrics.plain_param_bytes = traced_.counts(mxopt::Traffic::kPlain).bytes;
  metrics.high_precision_param_bytes = traced_.counts(mxopt::Traffic::kHighPrecision).bytes;
  metrics.ms = phase_times(waits, report->ms);
  const double total_ms = watch.lap_ms();
  metrics.ms.push_back({"total", total_ms});
  metrics.tokens_per_s = static_cast<double>(tokens_per_step_) / total_ms * 1e3;
  return metrics;
}

std::vector<PhaseTime> Trainer::phase_times(const PlaneWaits& waits, const mxopt::PhaseTimes& host) {
  const PhaseTimer::Times times = timer_.take();
  if (device_.kind == mxopt::DeviceKind::kCuda) {
    // The optimizer's own times are the host's, which only enqueues.
    return {
        {"forward", times.forward_ms}, {"backward", times.backward_ms}, {"optimizer", times.optimizer_ms}};
  }
  return {{"forward", times.forward_ms - waits.forward_ms},
          {"backward", times.backward_ms - waits.backward_ms},
          {"reduce_scatter", host.reduce_scatter},
          {"statistics", host.statistics},
          {"update", host.update},
          {"scales", host.scales},
          {"gather", host.gather},
          {"wait", waits.forward_ms + waits.backward_ms}};
}

Trainer::PlaneWaits Trainer::compute_gradients(std::int64_t step) {
  // Rank r of W takes micro-batches [r * share, (r + 1) * share) of the global batch; the optimizer's
  // reduction averages over ranks, so a rank divides by its own share only. Why at the end: so each
  // micro-batch is computed with the same rounding for every W.
  const std::int64_t share = config_.train.micro_batches() / comm_->size();
  const std::int64_t first = comm_->rank() * share;
  PlaneWaits waits;
  for (std::int64_t i = 0; i < share; ++i) {
    const auto sequences = data_.micro_batch(static_cast<std::uint64_t>(config_.train.seed), step, first + i,
                                             config_.train.micro_batch);
    const bool last = i + 1 == share;
    optimizer_.begin_backward(last);
    timer_.begin(Phase::kForward);
    model_.forward(sequences, share);
    waits.forward_ms += model_.take_wait_ms();
    timer_.begin(Phase::kBackward);
    model_.backward(last ? 1.0 / static_cast<double>(share) : 1.0);
    waits.backward_ms += model_.take_wait_ms();
    timer_.end();
  }
  return waits;
}

double Trainer::share_over_ranks(double loss) {
  const StopRequest own = take_stop_request();
  std::array<float, 3> sums = {static_cast<float>(loss), own.save ? 1.0f : 0.0f, own.stop ? 1.0f : 0.0f};
  loss_comm_->all_reduce(std::span<float>(sums), mxopt::ReduceOp::kSum, mxopt::Traffic::kStatistics).wait();
  request_ = {sums[1] > 0, sums[2] > 0};
  return static_cast<double>(sums[0]) / loss_comm_->size();
}

void Trainer::wait_for_all_params() {
  for (const mxopt::ParamLayout& param : optimizer_.layout().params()) {
    const mxopt::StreamRef stream = tensor_stream(device_);
    optimizer_.wait_param(param.name, mxopt::Plane::kRow, stream);
    if (param.family.has_column()) optimizer_.wait_param(param.name, mxopt::Plane::kColumn, stream);
  }
}

std::int64_t Trainer::bf16_gather_bytes() const {
  std::int64_t elems = 0;
  for (const mxopt::Bucket& bucket : optimizer_.layout().buckets()) {
    if (bucket.family.format == mxopt::ParamFormat::kMxfp8) elems += bucket.elems;
  }
  return elems * mxopt::dtype_bytes(mxopt::DType::kBf16);
}

}  // namespace train_gpt
