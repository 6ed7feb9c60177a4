#include "train_gpt/param_access.h"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <span>
#include <utility>

#include "train_gpt/compute_device.h"

#include "mxopt/params/check.h"
#include "mxopt/quant/writeback.h"

namespace train_gpt {
namespace {

/// A tensor over bf16 or fp32 values of the optimizer.
at::Tensor tensor_over(const mxopt::TypedSpan& span, const std::vector<std::int64_t>& shape,
                       mxopt::Device device) {
  MXOPT_CHECK(span.dtype == mxopt::DType::kBf16 || span.dtype == mxopt::DType::kFp32,
              "a tensor over " << mxopt::dtype_name(span.dtype) << "; expected bf16 or fp32");
  const auto type = span.dtype == mxopt::DType::kBf16 ? at::kBFloat16 : at::kFloat;
  const at::Device place = tensor_device(device);
  return at::for_blob(span.data, shape)
      .options(at::TensorOptions().dtype(type).device(place))
      .target_device(place)
      .make_tensor();
}

}  // namespace

ParamAccess::ParamAccess(mxopt::DistributedAdam& optimizer, mxopt::BackwardOverride backward_override,
                         mxopt::Device device)
    : optimizer_(optimizer), backward_override_(backward_override), device_(device) {
  std::int64_t largest = 0;
  for (const mxopt::ParamLayout& param : optimizer.layout().params()) {
    if (param.family.format != mxopt::ParamFormat::kFp32) largest = std::max(largest, param.elems());
  }
  scratch_ = at::empty({largest}, options());
}

at::TensorOptions ParamAccess::options() const {
  return at::TensorOptions().dtype(at::kFloat).device(tensor_device(device_));
}

mxopt::ParamView ParamAccess::wait(const std::string& name, mxopt::Plane plane) {
  const auto begin = std::chrono::steady_clock::now();
  mxopt::ParamView view = optimizer_.wait_param(name, plane, tensor_stream(device_));
  if (device_.kind == mxopt::DeviceKind::kHost) {
    wait_ms_ += std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count();
  }
  return view;
}

at::Tensor ParamAccess::scratch(const std::vector<std::int64_t>& shape) {
  std::int64_t elems = 1;
  for (const std::int64_t extent : shape) elems *= extent;
  return scratch_.narrow(0, 0, elems).view(shape);
}

at::Tensor ParamAccess::values(const std::string& name, Pass pass) {
  const mxopt::ParamLayout& param = optimizer_.layout().param(optimizer_.layout().find(name));
  const bool column = pass == Pass::kBackward && param.family.has_column() &&
                      backward_override_ == mxopt::BackwardOverride::kNone;
  const mxopt::Plane plane = column ? mxopt::Plane::kColumn : mxopt::Plane::kRow;
  const mxopt::ParamView view = wait(name, plane);
  if (view.format == mxopt::ParamFormat::kFp32) return tensor_over(view.values, view.shape, device_);

  at::Tensor fp32 = scratch(view.shape);
  if (view.format == mxopt::ParamFormat::kBf16) {
    fp32.copy_(tensor_over(view.values, view.shape, device_));
    return fp32;
  }
  const mxopt::TypedSpan out(fp32.data_ptr<float>(), mxopt::DType::kFp32, fp32.numel());
  mxopt::dequantize(view.planes, plane, 0, out, device_, tensor_stream(device_));
  return fp32;
}

at::Tensor ParamAccess::rows(const std::string& name, const at::Tensor& rows) {
  const mxopt::ParamView view = wait(name, mxopt::Plane::kRow);
  return tensor_over(view.values, view.shape, device_).index_select(0, rows).to(at::kFloat);
}

at::Tensor ParamAccess::grad(const std::string& name) const {
  const mxopt::GradView view = optimizer_.grad(name);
  return tensor_over(view.data, view.shape, device_);
}

void ParamAccess::grad_ready(const std::string& name) {
  if (grad_factor_ != 1) grad(name).mul_(grad_factor_);
  optimizer_.grad_ready(name, tensor_stream(device_));
}

at::Tensor ParamAccess::loss_scale() const {
  const std::span<const float> factor = optimizer_.loss_scale();
  const mxopt::TypedSpan span(const_cast<float*>(factor.data()), mxopt::DType::kFp32, 1);
  return tensor_over(span, {}, device_).clone();
}

double ParamAccess::take_wait_ms() {
  return std::exchange(wait_ms_, 0.0);
}

}  // namespace train_gpt
