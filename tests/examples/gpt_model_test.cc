// The whole model: its gradient against differences of its loss, and on a GPU against the host.
#include "train_gpt/gpt_model.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "support/devices.h"
#include "train_gpt/compute_device.h"
#include "train_gpt/random.h"

#include "mxopt/collectives/self_communicator.h"
#include "mxopt/optimizer/distributed_adam.h"

namespace train_gpt {
namespace {

constexpr std::int64_t kSeqLen = 16;

/// Sequences [count, kSeqLen + 1] of seven different bytes.
std::vector<std::uint8_t> random_sequences(std::int64_t count) {
  std::vector<std::uint8_t> bytes(static_cast<std::size_t>(count * (kSeqLen + 1)));
  for (std::size_t i = 0; i < bytes.size(); ++i)
    bytes[i] = static_cast<std::uint8_t>(random_bits(5, 0, i) % 7);
  return bytes;
}

TEST(GptModel, GradientIsTheDerivativeOfTheLoss) {
  ModelConfig model_config{.layers = 2, .hidden = 32, .heads = 4, .ffn_mult = 2, .init_std = 0.2};
  model_config.embeddings = mxopt::ParamFormat::kFp32;
  model_config.norms = mxopt::ParamFormat::kFp32;
  mxopt::Config config;
  config.precision.weights = mxopt::ParamFormat::kFp32;
  mxopt::SelfCommunicator comm;
  mxopt::DistributedAdam optimizer(gpt_params(model_config, kSeqLen), config, comm);
  GptModel model(model_config, kSeqLen, config.precision.backward_override, optimizer, mxopt::Device{});
  model.set_initial_values(3);
  optimizer.publish();

  const std::vector<std::uint8_t> bytes = random_sequences(2);
  optimizer.begin_backward();
  model.forward(bytes, 1);
  model.backward(1.0);
  model.take_loss();

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
      model.forward(bytes, 1);
      return model.take_loss();
    };
    const double slope = (loss_at(step) - loss_at(-step)) / (2 * step);
    EXPECT_NEAR(slope, norm, 0.02 * norm + 1e-4) << param.name;
    std::copy(kept.begin(), kept.end(), values.begin());
  }
}

TEST(GptModel, LossIsTheMeanOverMicroBatches) {
  const ModelConfig model_config{.layers = 1, .hidden = 32, .heads = 2, .ffn_mult = 2, .init_std = 0.2};
  const mxopt::Config config;
  mxopt::SelfCommunicator comm;
  mxopt::DistributedAdam optimizer(gpt_params(model_config, kSeqLen), config, comm);
  GptModel model(model_config, kSeqLen, config.precision.backward_override, optimizer, mxopt::Device{});
  model.set_initial_values(3);
  optimizer.publish();
  const std::vector<std::uint8_t> bytes = random_sequences(3);
  const std::span<const std::uint8_t> all(bytes);
  double sum = 0;
  for (std::size_t i = 0; i < 3; ++i) {
    model.forward(all.subspan(i * (kSeqLen + 1), kSeqLen + 1), 1);
    sum += model.take_loss() / 3;
  }
  for (std::size_t i = 0; i < 3; ++i) model.forward(all.subspan(i * (kSeqLen + 1), kSeqLen + 1), 3);
  EXPECT_EQ(model.take_loss(), sum);
}

/// What a model on one device computes, as host memory.
struct Computed {
  double loss = 0;
  std::vector<std::vector<float>> grads;             // [params]
  std::vector<std::vector<std::uint8_t>> row_bytes;  // [params] row plane, or bf16 values
};

template <class T>
std::vector<T> copied(const void* data, std::int64_t elems, mxopt::Device device, mxopt::StreamRef stream) {
  std::vector<T> out(static_cast<std::size_t>(elems));
  mxopt::copy_bytes(out.data(), data, elems * static_cast<std::int64_t>(sizeof(T)), device, stream);
  mxopt::synchronize(device, stream);
  return out;
}

Computed compute_on(mxopt::Device device) {
  const ModelConfig model_config{.layers = 2, .hidden = 64, .heads = 4, .ffn_mult = 2, .init_std = 0.2};
  const mxopt::Config config;
  mxopt::SelfCommunicator comm(device);
  mxopt::DistributedAdam optimizer(gpt_params(model_config, kSeqLen), config, comm, device);
  GptModel model(model_config, kSeqLen, config.precision.backward_override, optimizer, device);
  const mxopt::StreamRef stream = tensor_stream(device);
  model.set_initial_values(3);
  optimizer.publish(stream);
  for (const bool last : {false, true}) {
    optimizer.begin_backward(last);
    model.forward(random_sequences(2), 2);
    model.backward(last ? 0.5 : 1.0);
  }
  Computed computed{.loss = model.take_loss(), .grads = {}, .row_bytes = {}};
  for (const mxopt::ParamLayout& param : optimizer.layout().params()) {
    const mxopt::ParamView view = optimizer.wait_param(param.name, mxopt::Plane::kRow, stream);
    computed.grads.push_back(
        copied<float>(optimizer.grad(param.name).data.data, param.elems(), device, stream));
    const bool is_mxfp8 = view.format == mxopt::ParamFormat::kMxfp8;
    computed.row_bytes.push_back(
        copied<std::uint8_t>(is_mxfp8 ? static_cast<const void*>(view.planes.row_data) : view.values.data,
                             is_mxfp8 ? param.elems() : view.values.bytes(), device, stream));
  }
  return computed;
}

// twin: the same initial bytes; losses and gradients up to the order of sums.
TEST(GptModelCuda, ComputesWhatTheHostComputes) {
  const mxopt::Device cuda{mxopt::DeviceKind::kCuda, 0};
  MXOPT_SKIP_WITHOUT(cuda);
  if (!has_cuda_tensors()) GTEST_SKIP() << "this libtorch has no CUDA";
  const Computed expected = compute_on({});
  const Computed got = compute_on(cuda);
  EXPECT_EQ(got.row_bytes, expected.row_bytes);
  EXPECT_NEAR(got.loss, expected.loss, 1e-5 * expected.loss);
  ASSERT_EQ(got.grads.size(), expected.grads.size());
  for (std::size_t p = 0; p < got.grads.size(); ++p) {
    double difference = 0, norm = 0;
    for (std::size_t i = 0; i < got.grads[p].size(); ++i) {
      const double e = expected.grads[p][i];
      difference += (got.grads[p][i] - e) * (got.grads[p][i] - e);
      norm += e * e;
    }
    EXPECT_LE(std::sqrt(difference), 1e-4 * std::sqrt(norm)) << "param " << p;
  }
}

// Sums on a GPU are taken in an order that does not change.
TEST(GptModelCuda, ComputesTheSameBitsEachTime) {
  const mxopt::Device cuda{mxopt::DeviceKind::kCuda, 0};
  MXOPT_SKIP_WITHOUT(cuda);
  if (!has_cuda_tensors()) GTEST_SKIP() << "this libtorch has no CUDA";
  const Computed first = compute_on(cuda);
  const Computed second = compute_on(cuda);
  EXPECT_EQ(first.loss, second.loss);
  EXPECT_EQ(first.grads, second.grads);
}

}  // namespace
}  // namespace train_gpt
