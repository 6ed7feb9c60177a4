// How the model reaches the optimizer's params: their present values as short-lived fp32 tensors, and their
// gradients.
//
// The optimizer's storage is the only lasting copy of a weight. An MXFP8 plane or bf16 values become fp32 in
// one scratch tensor that all params share, so a tensor got here is valid until the next one is asked for; on
// a GPU, for work that was enqueued before. One thread at a time: on a GPU the backward pass runs on another
// one than the forward pass.
#pragma once

#include <string>
#include <vector>

#include <ATen/ATen.h>

#include "mxopt/optimizer/config.h"
#include "mxopt/optimizer/distributed_adam.h"
#include "mxopt/params/memory.h"

namespace train_gpt {

enum class Pass { kForward, kBackward };

class ParamAccess {
 public:
  /// optimizer  must outlive this object; its gradients must be fp32.
  /// device     the optimizer's.
  ParamAccess(mxopt::DistributedAdam& optimizer, mxopt::BackwardOverride backward_override,
              mxopt::Device device);

  /// Of fp32 tensors where the params are.
  at::TensorOptions options() const;

  /// fp32 values of a whole param. An MXFP8 param is read from its row plane in the forward pass; in the
  /// backward pass from its column plane, or from the row plane where there is none or backward_override is
  /// dequantized. Waits until the plane may be read.
  at::Tensor values(const std::string& name, Pass pass);

  /// fp32 values of some rows of a bf16 or fp32 param: a new tensor [rows.size, cols].
  at::Tensor rows(const std::string& name, const at::Tensor& rows);

  /// The param's gradient in the optimizer's own memory.
  at::Tensor grad(const std::string& name) const;
  /// The param's gradient is complete for this micro-batch: scales it and tells the optimizer.
  void grad_ready(const std::string& name);
  /// What grad_ready() multiplies gradients by from now on.
  void set_grad_factor(double factor) { grad_factor_ = factor; }

  /// A copy of the factor that losses are multiplied by before the backward pass.
  at::Tensor loss_scale() const;

  /// Time that the host spent waiting for planes since the last call; 0 on a GPU, whose stream waits.
  double take_wait_ms();

 private:
  mxopt::ParamView wait(const std::string& name, mxopt::Plane plane);
  at::Tensor scratch(const std::vector<std::int64_t>& shape);

  mxopt::DistributedAdam& optimizer_;
  mxopt::BackwardOverride backward_override_;
  mxopt::Device device_;
  at::Tensor scratch_;
  double wait_ms_ = 0;
  double grad_factor_ = 1;
};

}  // namespace train_gpt
