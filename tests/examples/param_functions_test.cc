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

#include "support/devices.h"
#include "train_gpt/compute_device.h"
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

/// An optimizer over some params with random initial values. Tensors of the tests are the host's.
struct Fixture {
  explicit Fixture(const Case& tested, mxopt::DeviceKind kind)
      : device{kind, 0},
        comm(device),
        optimizer(specs(tested), mxopt::Config{}, comm, device),
        params(optimizer, tested.backward_override, device) {
    for (const mxopt::ParamLayout& param : optimizer.layout().params()) {
      std::vector<float> values;
      fill_normal(values, static_cast<std::size_t>(param.elems()), 7, param.name, 1.0);
      optimizer.set_initial(param.name, std::span<const float>(values), tensor_stream(device));
    }
    optimizer.publish(tensor_stream(device));
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
    const mxopt::StreamRef stream = tensor_stream(device);
    const mxopt::ParamView view = optimizer.wait_param(name, plane, stream);
    at::Tensor out =
        at::empty(view.shape, at::TensorOptions().dtype(at::kFloat).device(tensor_device(device)));
    if (view.format == mxopt::ParamFormat::kMxfp8) {
      const std::span<float> span(out.data_ptr<float>(), static_cast<std::size_t>(out.numel()));
      mxopt::dequantize(view.planes, plane, 0, span, device, stream);
      return out.cpu();
    }
    const bool is_bf16 = view.format == mxopt::ParamFormat::kBf16;
    at::Tensor stored =
        at::empty(view.shape, at::TensorOptions().dtype(is_bf16 ? at::kBFloat16 : at::kFloat));
    mxopt::copy_bytes(stored.data_ptr(), view.values.data, view.values.bytes(), device, stream);
    mxopt::synchronize(device, stream);
    return stored.to(at::kFloat);
  }

  at::Tensor leaf(const std::string& name) { return values(name).set_requires_grad(true); }
  at::Tensor grad(const std::string& name) { return params.grad(name).cpu(); }
  /// The same values where the params are.
  at::Tensor there(const at::Tensor& tensor) const { return tensor.detach().to(tensor_device(device)); }

  mxopt::Device device;
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

/// On a GPU that can not be used here a test is skipped.
class OnDevice : public testing::TestWithParam<mxopt::DeviceKind> {
 protected:
  void SetUp() override { skip_without(GetParam()); }

  static void skip_without(mxopt::DeviceKind kind) {
    MXOPT_SKIP_WITHOUT((mxopt::Device{kind, 0}));
    if (kind == mxopt::DeviceKind::kCuda && !has_cuda_tensors()) GTEST_SKIP() << "this libtorch has no CUDA";
  }
};

constexpr auto device_name = [](const auto& tested) { return mxopt::test::device_kind_name(tested.param); };

class Linear : public OnDevice {
 protected:
  void expect_autograd_on_planes(const Case& tested) {
    Fixture fixture(tested, GetParam());
    const at::Tensor x = random_tensor({40, 96}, "x");
    const at::Tensor dy = random_tensor({40, 64}, "dy");
    const at::Tensor weight = fixture.leaf("linear");
    const at::Tensor expected = at::mm(x, weight.t());
    expected.backward(dy);

    fixture.optimizer.begin_backward(false);
    const at::Tensor x_there = fixture.there(x).set_requires_grad(true);
    const at::Tensor y = linear(fixture.params, "linear", x_there);
    y.backward(fixture.there(dy));

    expect_close(y.detach().cpu(), expected.detach());
    expect_close(fixture.grad("linear"), weight.grad());
    expect_close(x_there.grad().cpu(), at::mm(dy, fixture.values("linear", tested.backward_plane)));

    // A second micro-batch adds to the gradient.
    fixture.optimizer.begin_backward(true);
    linear(fixture.params, "linear", x_there).backward(fixture.there(dy));
    expect_close(fixture.grad("linear"), 2 * weight.grad());
  }
};

TEST_P(Linear, OfBothPlanesEqualsAutograd) {
  expect_autograd_on_planes({});
}
TEST_P(Linear, OfTheRowPlaneEqualsAutograd) {
  expect_autograd_on_planes({.storage = mxopt::Storage::kRow, .backward_plane = mxopt::Plane::kRow});
}
TEST_P(Linear, DequantizedInTheBackwardPassEqualsAutograd) {
  expect_autograd_on_planes(
      {.backward_override = mxopt::BackwardOverride::kDequantized, .backward_plane = mxopt::Plane::kRow});
}
TEST_P(Linear, OfBf16EqualsAutograd) {
  expect_autograd_on_planes({.weights = mxopt::ParamFormat::kBf16, .backward_plane = mxopt::Plane::kRow});
}
TEST_P(Linear, OfFp32EqualsAutograd) {
  expect_autograd_on_planes({.weights = mxopt::ParamFormat::kFp32, .backward_plane = mxopt::Plane::kRow});
}

INSTANTIATE_TEST_SUITE_P(Devices, Linear, testing::ValuesIn(mxopt::test::built_device_kinds()), device_name);

class LayerNorm : public OnDevice {};

TEST_P(LayerNorm, EqualsAutograd) {
  Fixture fixture(Case{}, GetParam());
  const at::Tensor x = random_tensor({40, 96}, "x").set_requires_grad(true);
  const at::Tensor x_there = fixture.there(x).set_requires_grad(true);
  const at::Tensor dy = random_tensor({40, 96}, "dy");
  const at::Tensor scale = fixture.leaf("scale");
  const at::Tensor shift = fixture.leaf("shift");
  const at::Tensor expected = at::layer_norm(x, {96}, scale, shift, 1e-5);
  expected.backward(dy);

  fixture.optimizer.begin_backward();
  const at::Tensor y = layer_norm(fixture.params, "scale", "shift", x_there);
  y.backward(fixture.there(dy));

  expect_close(y.detach().cpu(), expected.detach());
  expect_close(x_there.grad().cpu(), x.grad());
  expect_close(fixture.grad("scale"), scale.grad());
  expect_close(fixture.grad("shift"), shift.grad());
}

INSTANTIATE_TEST_SUITE_P(Devices, LayerNorm, testing::ValuesIn(mxopt::test::built_device_kinds()),
                         device_name);

class Embedding : public OnDevice {};

TEST_P(Embedding, EqualsAutograd) {
  Fixture fixture(Case{}, GetParam());
  const at::Tensor ids = at::arange(16, at::kLong).view({2, 8}).remainder(5);
  const at::Tensor dy = random_tensor({16, 96}, "dy");
  const at::Tensor tokens = fixture.leaf("tokens");
  const at::Tensor positions = fixture.leaf("positions");
  const at::Tensor expected =
      (tokens.index_select(0, ids.reshape({-1})).view({2, 8, 96}) + positions).reshape({16, 96});
  expected.backward(dy);

  fixture.optimizer.begin_backward();
  const at::Tensor y = embedding(fixture.params, "tokens", "positions", fixture.there(ids));
  y.backward(fixture.there(dy));

  expect_close(y.detach().cpu(), expected.detach());
  expect_close(fixture.grad("tokens"), tokens.grad());
  expect_close(fixture.grad("positions"), positions.grad());
}

INSTANTIATE_TEST_SUITE_P(Devices, Embedding, testing::ValuesIn(mxopt::test::built_device_kinds()),
                         device_name);

}  // namespace
}  // namespace train_gpt
