// The trainer's functions against the tensor library's own autograd on the same values.
#include "train_gpt/param_functions.h"

#include <algorithm>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "train_gpt/random.h"

#include "mxopt/collectives/self_communicator.h"
#include "mxopt/optimizer/distributed_adam.h"
#include "mxopt/quant/writeback.h"

namespace train_gpt {
namespace {

struct Case {
  mxopt::ParamFormat weights = mxopt::ParamFormat::kMxfp8;
  mxopt::Storage storage = mxopt::Storage::kBoth;
  mxopt::BackwardOverride backward_override = mxopt::BackwardOverride::kNone;
  mxopt::Plane backward_plane = mxopt::Plane::kColumn;
};

/// An optimizer over some params with random initial values.
struct Fixture {
  explicit Fixture(const Case& tested)
      : optimizer(specs(tested), mxopt::Config{}, comm), params(optimizer, tested.backward_override) {
    for (const mxopt::ParamLayout& param : optimizer.layout().params()) {
      std::vector<float> values;
      fill_normal(values, static_cast<std::size_t>(param.elems()), 7, param.name, 1.0);
      optimizer.set_initial(param.name, std::span<const float>(values));
    }
    optimizer.publish();
  }

  static std::vector<mxopt::ParamSpec> specs(const Case& tested) {
    std::vector<mxopt::ParamSpec> list(5);
    const auto set = [&list](std::size_t i, std::string name, std::vector<std::int64_t> shape,
                             mxopt::ParamFormat format) {
      list[i].name = std::move(name);
      list[i].shape = std::move(shape);
      list[i].format = format;
    };
    set(0, "linear", {64, 96}, tested.weights);
    list[0].storage = tested.storage;
    set(1, "scale", {96}, mxopt::ParamFormat::kBf16);
    set(2, "shift", {96}, mxopt::ParamFormat::kFp32);
    set(3, "tokens", {256, 96}, mxopt::ParamFormat::kBf16);
    set(4, "positions", {8, 96}, mxopt::ParamFormat::kFp32);
    return list;
  }

  /// fp32 values read here, without the code under test.
  at::Tensor values(const std::string& name, mxopt::Plane plane = mxopt::Plane::kRow) {
    const mxopt::ParamView view = optimizer.wait_param(name, plane);
    at::Tensor out = at::empty(view.shape, at::kFloat);
    const std::span<float> span(out.data_ptr<float>(), static_cast<std::size_t>(out.numel()));
    if (view.format == mxopt::ParamFormat::kMxfp8) {
      mxopt::dequantize(view.planes, plane, 0, span, {}, {});
    } else if (view.format == mxopt::ParamFormat::kBf16) {
      out.copy_(at::from_blob(view.values.data, view.shape, at::TensorOptions().dtype(at::kBFloat16)));
    } else {
      out.copy_(at::from_blob(view.values.data, view.shape, at::TensorOptions().dtype(at::kFloat)));
    }
    return out;
  }

  at::Tensor leaf(const std::string& name) { return values(name).set_requires_grad(true); }

  mxopt::SelfCommunicator comm;
  mxopt::DistributedAdam optimizer;
  ParamAccess params;
};

at::Tensor random_tensor(at::IntArrayRef shape, const std::string& name) {
  at::Tensor out = at::empty(shape, at::kFloat);
  std::vector<float> values;
  fill_normal(values, static_cast<std::size_t>(out.numel()), 11, name, 1.0);
  std::copy(values.begin(), values.end(), out.data_ptr<float>());
  return out;
}

void expect_close(const at::Tensor& got, const at::Tensor& expected) {
  ASSERT_EQ(got.sizes(), expected.sizes());
  const double difference = (got - expected).abs().max().item<double>();
  EXPECT_LE(difference, 1e-5 * (1.0 + expected.abs().max().item<double>()));
}

class LinearOfFormat : public testing::TestWithParam<Case> {};

TEST_P(LinearOfFormat, EqualsAutogradOnTheValuesOfThePlanes) {
  Fixture fixture(GetParam());
  const at::Tensor x = random_tensor({40, 96}, "x").set_requires_grad(true);
  const at::Tensor dy = random_tensor({40, 64}, "dy");
  const at::Tensor weight = fixture.leaf("linear");
  const at::Tensor expected = at::mm(x.detach(), weight.t());
  expected.backward(dy);

  fixture.optimizer.begin_backward(false);
  const at::Tensor y = linear(fixture.params, "linear", x);
  y.backward(dy);

  expect_close(y.detach(), expected.detach());
  expect_close(fixture.params.grad("linear"), weight.grad());
  expect_close(x.grad(), at::mm(dy, fixture.values("linear", GetParam().backward_plane)));

  // A second micro-batch adds to the gradient.
  fixture.optimizer.begin_backward(true);
  linear(fixture.params, "linear", x).backward(dy);
  expect_close(fixture.params.grad("linear"), 2 * weight.grad());
}

INSTANTIATE_TEST_SUITE_P(
    Formats, LinearOfFormat,
    testing::Values(Case{}, Case{.storage = mxopt::Storage::kRow, .backward_plane = mxopt::Plane::kRow},
                    Case{.backward_override = mxopt::BackwardOverride::kDequantized,
                         .backward_plane = mxopt::Plane::kRow},
                    Case{.weights = mxopt::ParamFormat::kBf16, .backward_plane = mxopt::Plane::kRow},
                    Case{.weights = mxopt::ParamFormat::kFp32, .backward_plane = mxopt::Plane::kRow}));

TEST(LayerNorm, EqualsAutograd) {
  Fixture fixture(Case{});
  const at::Tensor x = random_tensor({40, 96}, "x").set_requires_grad(true);
  const at::Tensor x_leaf = x.detach().clone().set_requires_grad(true);
  const at::Tensor dy = random_tensor({40, 96}, "dy");
  const at::Tensor scale = fixture.leaf("scale");
  const at::Tensor shift = fixture.leaf("shift");
  const at::Tensor expected = at::layer_norm(x_leaf, {96}, scale, shift, 1e-5);
  expected.backward(dy);

  fixture.optimizer.begin_backward();
  const at::Tensor y = layer_norm(fixture.params, "scale", "shift", x);
  y.backward(dy);

  expect_close(y.detach(), expected.detach());
  expect_close(x.grad(), x_leaf.grad());
  expect_close(fixture.params.grad("scale"), scale.grad());
  expect_close(fixture.params.grad("shift"), shift.grad());
}

TEST(Embedding, EqualsAutograd) {
  Fixture fixture(Case{});
  const at::Tensor ids = at::arange(16, at::kLong).view({2, 8}).remainder(5);
  const at::Tensor dy = random_tensor({16, 96}, "dy");
  const at::Tensor tokens = fixture.leaf("tokens");
  const at::Tensor positions = fixture.leaf("positions");
  const at::Tensor expected =
      (tokens.index_select(0, ids.reshape({-1})).view({2, 8, 96}) + positions).reshape({16, 96});
  expected.backward(dy);

  fixture.optimizer.begin_backward();
  const at::Tensor y = embedding(fixture.params, "tokens", "positions", ids);
  y.backward(dy);

  expect_close(y.detach(), expected.detach());
  expect_close(fixture.params.grad("tokens"), tokens.grad());
  expect_close(fixture.params.grad("positions"), positions.grad());
}

}  // namespace
}  // namespace train_gpt
