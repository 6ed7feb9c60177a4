#include "train_gpt/gpt_model.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <dlfcn.h>
#ifdef _OPENMP
#include <omp.h>
#endif

#include "train_gpt/compute_device.h"
#include "train_gpt/param_access.h"
#include "train_gpt/param_functions.h"
#include "train_gpt/random.h"

#include "mxopt/params/check.h"
#include "mxopt/params/layout.h"

namespace train_gpt {
namespace {

std::string layer_param(std::int64_t layer, std::string_view name) {
  return "layer" + std::to_string(layer) + "." + std::string(name);
}

/// Kinds of initial values, told from the end of the name.
enum class Initial { kOne, kZero, kNormal, kResidual };

Initial initial_of(std::string_view name) {
  if (name.ends_with(".scale")) return Initial::kOne;
  if (name.ends_with(".shift")) return Initial::kZero;
  if (name.ends_with(".out") || name.ends_with(".down")) return Initial::kResidual;
  return Initial::kNormal;
}

}  // namespace

std::vector<mxopt::ParamSpec> gpt_params(const ModelConfig& config, std::int64_t seq_len) {
  const std::int64_t hidden = config.hidden;
  const std::int64_t ffn = config.ffn_mult * hidden;
  std::vector<mxopt::ParamSpec> specs;
  const auto add = [&specs](std::string name, std::vector<std::int64_t> shape,
                            std::optional<mxopt::ParamFormat> format = {}) {
    mxopt::ParamSpec spec;
    spec.name = std::move(name);
    spec.shape = std::move(shape);
    spec.format = format;
    specs.push_back(std::move(spec));
  };
  const auto add_norm = [&](const std::string& name) {
    add(name + ".scale", {hidden}, config.norms);
    add(name + ".shift", {hidden}, config.norms);
  };

  add("tokens", {kVocabulary, hidden}, config.embeddings);
  add("positions", {seq_len, hidden}, config.embeddings);
  for (std::int64_t layer = 0; layer < config.layers; ++layer) {
    add_norm(layer_param(layer, "norm1"));
    add(layer_param(layer, "qkv"), {3 * hidden, hidden});
    add(layer_param(layer, "out"), {hidden, hidden});
    add_norm(layer_param(layer, "norm2"));
    add(layer_param(layer, "up"), {ffn, hidden});
    add(layer_param(layer, "down"), {hidden, ffn});
  }
  add_norm("final_norm");
  add("head", {kVocabulary, hidden});
  return specs;
}

void use_threads(int threads) {
  at::set_num_threads(threads);
#ifdef _OPENMP
  omp_set_num_threads(threads);
#endif
  // OpenBLAS has a pool of its own, which neither of the calls above reaches.
  if (auto* set = reinterpret_cast<void (*)(int)>(dlsym(RTLD_DEFAULT, "openblas_set_num_threads")))
    set(threads);
}

class GptModel::Impl {
 public:
  Impl(const ModelConfig& config, std::int64_t seq_len, mxopt::BackwardOverride backward_override,
       mxopt::DistributedAdam& optimizer, mxopt::Device device)
      : config_(config),
        seq_len_(seq_len),
        optimizer_(optimizer),
        device_(device),
        params_(optimizer, backward_override, device) {
    const at::Tensor future = at::ones({seq_len, seq_len}, params_.options().dtype(at::kBool)).triu(1);
    mask_ = at::zeros({seq_len, seq_len}, params_.options())
                .masked_fill(future, -std::numeric_limits<double>::infinity());
  }

  void set_initial_values(std::uint64_t seed) {
    const double residual_std = config_.init_std / std::sqrt(2.0 * static_cast<double>(config_.layers));
    std::vector<float> values;
    for (const mxopt::ParamLayout& param : optimizer_.layout().params()) {
      const auto count = static_cast<std::size_t>(param.elems());
      switch (initial_of(param.name)) {
        case Initial::kOne:
          values.assign(count, 1.0F);
          break;
        case Initial::kZero:
          values.assign(count, 0.0F);
          break;
        case Initial::kNormal:
          fill_normal(values, count, seed, param.name, config_.init_std);
          break;
        case Initial::kResidual:
          fill_normal(values, count, seed, param.name, residual_std);
          break;
      }
      optimizer_.set_initial(param.name, std::span<const float>(values), tensor_stream(device_));
    }
  }

  void forward(std::span<const std::uint8_t> sequences, std::int64_t micro_batches) {
    const auto bytes = static_cast<std::int64_t>(sequences.size());
    MXOPT_CHECK(bytes > 0 && bytes % (seq_len_ + 1) == 0,
                bytes << " bytes are not whole sequences of " << seq_len_ << " + 1");
    const std::int64_t count = bytes / (seq_len_ + 1);
    // A copy of pageable memory to a GPU would wait for what the stream holds.
    const bool pinned = device_.kind == mxopt::DeviceKind::kCuda;
    at::Tensor ids =
        at::empty({count, seq_len_ + 1}, at::TensorOptions().dtype(at::kLong).pinned_memory(pinned));
    std::copy(sequences.begin(), sequences.end(), ids.data_ptr<std::int64_t>());
    ids = ids.to(tensor_device(device_), at::kLong, /*non_blocking=*/true);
    const at::Tensor inputs = ids.narrow(1, 0, seq_len_).contiguous();
    const at::Tensor targets = ids.narrow(1, 1, seq_len_).reshape({-1});

    at::Tensor x = embedding(params_, "tokens", "positions", inputs);
    for (std::int64_t layer = 0; layer < config_.layers; ++layer) {
      x = x + attention(layer, norm(layer_param(layer, "norm1"), x), count);
      x = x + feed_forward(layer, norm(layer_param(layer, "norm2"), x));
    }
    const at::Tensor logits = linear(params_, "head", norm("final_norm", x));
    loss_ = at::cross_entropy_loss(logits, targets);
    const at::Tensor share = loss_.detach().to(at::kDouble).div(static_cast<double>(micro_batches));
    loss_sum_ = loss_sum_.defined() ? loss_sum_ + share : share;
  }

  void backward(double grad_factor) {
    MXOPT_CHECK(loss_.defined(), "backward() without a forward()");
    params_.set_grad_factor(grad_factor);
    loss_.backward(params_.loss_scale());
    loss_.reset();
  }

  double take_loss() {
    MXOPT_CHECK(loss_sum_.defined(), "take_loss() without a forward()");
    return std::exchange(loss_sum_, at::Tensor()).item<double>();
  }

  double take_wait_ms() { return params_.take_wait_ms(); }

 private:
  at::Tensor norm(const std::string& name, const at::Tensor& x) {
    return layer_norm(params_, name + ".scale", name + ".shift", x);
  }

  at::Tensor attention(std::int64_t layer, const at::Tensor& x, std::int64_t sequences) {
    const std::int64_t head_dim = config_.hidden / config_.heads;
    // [3, sequences, heads, seq_len, head_dim]
    const at::Tensor qkv = linear(params_, layer_param(layer, "qkv"), x)
                               .view({sequences, seq_len_, 3, config_.heads, head_dim})
                               .permute({2, 0, 3, 1, 4});
    const at::Tensor q = qkv.select(0, 0) * (1.0 / std::sqrt(static_cast<double>(head_dim)));
    const at::Tensor scores = at::matmul(q, qkv.select(0, 1).transpose(-2, -1)) + mask_;
    const at::Tensor mixed = at::matmul(at::softmax(scores, -1), qkv.select(0, 2));
    return linear(params_, layer_param(layer, "out"),
                  mixed.transpose(1, 2).reshape({sequences * seq_len_, config_.hidden}));
  }

  at::Tensor feed_forward(std::int64_t layer, const at::Tensor& x) {
    return linear(params_, layer_param(layer, "down"),
                  at::gelu(linear(params_, layer_param(layer, "up"), x)));
  }

  ModelConfig config_;
  std::int64_t seq_len_;
  mxopt::DistributedAdam& optimizer_;
  mxopt::Device device_;
  ParamAccess params_;
  at::Tensor mask_;
  at::Tensor loss_;
  at::Tensor loss_sum_;
};

GptModel::GptModel(const ModelConfig& config, std::int64_t seq_len, mxopt::BackwardOverride backward_override,
                   mxopt::DistributedAdam& optimizer, mxopt::Device device)
    : impl_(std::make_unique<Impl>(config, seq_len, backward_override, optimizer, device)) {}
GptModel::~GptModel() = default;

void GptModel::set_initial_values(std::uint64_t seed) {
  impl_->set_initial_values(seed);
}
void GptModel::forward(std::span<const std::uint8_t> sequences, std::int64_t micro_batches) {
  impl_->forward(sequences, micro_batches);
}
void GptModel::backward(double grad_factor) {
  impl_->backward(grad_factor);
}
double GptModel::take_loss() {
  return impl_->take_loss();
}
double GptModel::take_wait_ms() {
  return impl_->take_wait_ms();
}

}  // namespace train_gpt
