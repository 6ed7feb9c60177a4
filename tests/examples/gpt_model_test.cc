// The whole model: its gradient against differences of its loss.
#include "train_gpt/gpt_model.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <span>
#include <vector>

#include <gtest/gtest.h>

#include "train_gpt/random.h"

#include "mxopt/collectives/self_communicator.h"
#include "mxopt/optimizer/distributed_adam.h"

namespace train_gpt {
namespace {

constexpr std::int64_t kSeqLen = 16;

TEST(GptModel, GradientIsTheDerivativeOfTheLoss) {
  ModelConfig model_config{.layers = 2, .hidden = 32, .heads = 4, .ffn_mult = 2, .init_std = 0.2};
  model_config.embeddings = mxopt::ParamFormat::kFp32;
  model_config.norms = mxopt::ParamFormat::kFp32;
  mxopt::Config config;
  config.precision.weights = mxopt::ParamFormat::kFp32;
  mxopt::SelfCommunicator comm;
  mxopt::DistributedAdam optimizer(gpt_params(model_config, kSeqLen), config, comm);
  GptModel model(model_config, kSeqLen, config.precision.backward_override, optimizer);
  model.set_initial_values(3);
  optimizer.publish();

  std::vector<std::uint8_t> bytes(2 * (kSeqLen + 1));
  for (std::size_t i = 0; i < bytes.size(); ++i)
    bytes[i] = static_cast<std::uint8_t>(random_bits(5, 0, i) % 7);
  optimizer.begin_backward();
  model.forward(bytes);
  model.backward(1.0, 1.0);

  // For each param: the slope along its own gradient is the gradient's norm.
  for (const mxopt::ParamLayout& param : optimizer.layout().params()) {
    const std::span<const float> grad = optimizer.grad(param.name).data.as<float>();
    const std::span<float> values = optimizer.wait_param(param.name).values.as<float>();
    double norm = 0;
    for (const float g : grad) norm += static_cast<double>(g) * g;
    norm = std::sqrt(norm);
    ASSERT_GT(norm, 0) << param.name;
    const std::vector<float> kept(values.begin(), values.end());
    const double step = 0.02;
    const auto loss_at = [&](double distance) {
      for (std::size_t i = 0; i < kept.size(); ++i) {
        values[i] = static_cast<float>(kept[i] + distance * static_cast<double>(grad[i]) / norm);
      }
      return model.forward(bytes);
    };
    const double slope = (loss_at(step) - loss_at(-step)) / (2 * step);
    EXPECT_NEAR(slope, norm, 0.02 * norm + 1e-4) << param.name;
    std::copy(kept.begin(), kept.end(), values.begin());
  }
}

}  // namespace
}  // namespace train_gpt
