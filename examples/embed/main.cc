// mxopt inside somebody else's trainer: two data-parallel ranks, here as two threads of one process, fit a
// linear map.
//
// Prints the loss as it falls, and exits with 0 when it fell five-hundredfold and both ranks hold the same
// weight bytes.

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <span>
#include <thread>
#include <vector>

#include "mxopt/collectives/thread_communicator.h"
#include "mxopt/optimizer/distributed_adam.h"
#include "mxopt/quant/writeback.h"

namespace {

constexpr std::int64_t kRows = 64, kCols = 96, kBatch = 128, kSteps = 300;

/// A fixed sequence in [-1, 1).
float pseudo_random(std::uint32_t& state) {
  state = state * 1664525u + 1013904223u;
  return static_cast<float>(state >> 8) / 8388608.0f - 1.0f;
}

struct Result {
  double first_loss = 0, last_loss = 0;
  std::vector<std::uint8_t> weight_bytes;
};

Result train(mxopt::Communicator& comm) {
  mxopt::Config config;
  config.optimizer.lr = 0.02;
  config.optimizer.weight_decay = 0;
  config.schedule.kind = mxopt::ScheduleKind::kCosine;
  config.schedule.decay_steps = kSteps;
  config.precision.storage = mxopt::StorageChoice::kRow;

  std::vector<mxopt::ParamSpec> specs(1);
  specs[0].name = "linear.weight";
  specs[0].shape = {kRows, kCols};
  mxopt::DistributedAdam opt(specs, config, comm);
  if (comm.rank() == 0) std::printf("%s\n", opt.construction().text().c_str());

  std::vector<float> weight(kRows * kCols, 0.0f), target(kRows * kCols);
  std::uint32_t target_seed = 1, data_seed = 100 + static_cast<std::uint32_t>(comm.rank());
  for (float& value : target) value = pseudo_random(target_seed);
  opt.set_initial("linear.weight", std::span<const float>(weight));
  opt.publish();

  Result result;
  const std::span<float> grad = opt.grad("linear.weight").data.as<float>();
  for (std::int64_t step = 0; step < kSteps; ++step) {
    const mxopt::ParamView view = opt.wait_param("linear.weight");
    mxopt::dequantize(view.planes, mxopt::Plane::kRow, 0, std::span(weight), {}, {});
    opt.begin_backward();
    double loss = 0;
    for (std::int64_t sample = 0; sample < kBatch; ++sample) {
      float x[kCols];
      for (float& value : x) value = pseudo_random(data_seed);
      for (std::int64_t r = 0; r < kRows; ++r) {
        float error = 0;
        for (std::int64_t c = 0; c < kCols; ++c)
          error += (weight[r * kCols + c] - target[r * kCols + c]) * x[c];
        loss += 0.5 * error * error / kBatch;
        for (std::int64_t c = 0; c < kCols; ++c) grad[r * kCols + c] += error * x[c] / kBatch;
      }
    }
    opt.grad_ready("linear.weight");
    const mxopt::StepReport report = opt.step();
    if (step == 0) result.first_loss = loss;
    result.last_loss = loss;
    if (comm.rank() == 0 && step % 60 == 0)
      std::printf("step %3ld  loss %9.5f  grad norm %.4f\n", step, loss, report->grad_norm);
  }
  const mxopt::ParamView view = opt.wait_param("linear.weight");
  result.weight_bytes.assign(view.planes.row_data, view.planes.row_data + view.planes.elems());
  return result;
}

}  // namespace

int main() {
  auto ranks = mxopt::ThreadCommunicator::make_group(2, 60.0);
  std::vector<Result> results(2);
  std::thread second([&] { results[1] = train(*ranks[1]); });
  results[0] = train(*ranks[0]);
  second.join();
  const bool equal = results[0].weight_bytes == results[1].weight_bytes;
  std::printf("loss %.5f -> %.5f, weights of both ranks %s\n", results[0].first_loss, results[0].last_loss,
              equal ? "equal" : "DIFFER");
  return equal && results[0].last_loss * 500 < results[0].first_loss ? EXIT_SUCCESS : EXIT_FAILURE;
}
