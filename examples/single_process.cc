// The smallest trainer: one process pulls an MXFP8 matrix and an fp32 vector towards known targets.

#include <cmath>
#include <cstddef>
#include <cstdio>
#include <span>
#include <vector>

#include "mxopt/collectives/self_communicator.h"
#include "mxopt/optimizer/config.h"
#include "mxopt/optimizer/distributed_adam.h"
#include "mxopt/quant/writeback.h"

namespace {

float target(std::size_t i) {
  return static_cast<float>(std::sin(static_cast<double>(i)));
}

/// Adds the gradient of 1/2 |values - targets|^2 and returns that loss.
double add_gradient(std::span<const float> values, std::span<float> grad) {
  double loss = 0;
  for (std::size_t i = 0; i < values.size(); ++i) {
    const float error = values[i] - target(i);
    grad[i] += error;
    loss += 0.5 * error * error;
  }
  return loss;
}

}  // namespace

int main() {
  // What exists: names, shapes, and where the format differs from precision.weights, which is MXFP8.
  std::vector<mxopt::ParamSpec> specs(2);
  specs[0].name = "weight";
  specs[0].shape = {64, 128};
  specs[1].name = "bias";
  specs[1].shape = {64};
  specs[1].format = mxopt::ParamFormat::kFp32;

  mxopt::Config config;  // or mxopt::load_config("run.yaml")
  config.optimizer.lr = 0.05;
  config.optimizer.weight_decay = 0;
  config.schedule = {.kind = mxopt::ScheduleKind::kCosine, .decay_steps = 100};
  mxopt::SelfCommunicator comm;
  mxopt::DistributedAdam optimizer(specs, config, comm);

  // High-precision initial values go to the masters; publish() writes the planes from them.
  std::vector<float> weight(64 * 128, 0.0F);  // later: the dequantized weight, for this loop's arithmetic
  optimizer.set_initial("weight", std::span<const float>(weight));
  optimizer.set_initial("bias", std::span<const float>(weight).first(64));
  optimizer.publish();

  for (int step = 1; step <= 100; ++step) {
    // After wait_param() a plane may be read. Its memory, and that of the gradients, never moves.
    const mxopt::ParamView view = optimizer.wait_param("weight", mxopt::Plane::kRow);
    mxopt::dequantize(view.planes, mxopt::Plane::kRow, 0, std::span<float>(weight), {}, {});
    const std::span<const float> bias = optimizer.wait_param("bias").values.as<float>();

    optimizer.begin_backward();
    double loss = add_gradient(weight, optimizer.grad("weight").data.as<float>());
    optimizer.grad_ready("weight");
    loss += add_gradient(bias, optimizer.grad("bias").data.as<float>());
    optimizer.grad_ready("bias");
    const mxopt::StepReport report = optimizer.step();
    if (step == 1 || step % 20 == 0) {
      std::printf("step %3d  loss %10.4f  gradient norm %8.3f\n", step, loss, report->grad_norm);
    }
  }
  return 0;
}
