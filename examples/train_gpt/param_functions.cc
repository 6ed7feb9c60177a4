#include "train_gpt/param_functions.h"

#include <array>
#include <cstdint>
#include <tuple>

#include <torch/csrc/autograd/custom_function.h>

namespace train_gpt {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

constexpr double kNormEps = 1e-5;

// An autograd context keeps numbers and strings; the address of the access object travels as a number.
void save_params(AutogradContext* context, ParamAccess& params) {
  context->saved_data["params"] = reinterpret_cast<std::int64_t>(&params);
}
ParamAccess& saved_params(AutogradContext* context) {
  return *reinterpret_cast<ParamAccess*>(context->saved_data["params"].toInt());
}
std::string saved_name(AutogradContext* context, const char* key) {
  return context->saved_data[key].toStringRef();
}

struct LinearFunction : Function<LinearFunction> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, std::int64_t params_address,
                            const std::string& weight) {
    auto& params = *reinterpret_cast<ParamAccess*>(params_address);
    save_params(context, params);
    context->saved_data["weight"] = weight;
    context->save_for_backward({x});
    return at::mm(x, params.values(weight, Pass::kForward).t());
  }

  static variable_list backward(AutogradContext* context, variable_list grads) {
    ParamAccess& params = saved_params(context);
    const std::string weight = saved_name(context, "weight");
    const at::Tensor x = context->get_saved_variables()[0];
    const at::Tensor dy = grads[0].contiguous();
    params.grad(weight).addmm_(dy.t(), x);
    params.grad_ready(weight);
    return {at::mm(dy, params.values(weight, Pass::kBackward)), at::Tensor(), at::Tensor()};
  }
};

struct LayerNormFunction : Function<LayerNormFunction> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, std::int64_t params_address,
                            const std::string& scale, const std::string& shift) {
    auto& params = *reinterpret_cast<ParamAccess*>(params_address);
    save_params(context, params);
    context->saved_data["scale"] = scale;
    context->saved_data["shift"] = shift;
    // The copy is [hidden] long and ends with this step; scratch holds one param at a time.
    const at::Tensor scale_values = params.values(scale, Pass::kForward).clone();
    const auto [y, mean, rstd] =
        at::native_layer_norm(x, {x.size(1)}, scale_values, params.values(shift, Pass::kForward), kNormEps);
    context->save_for_backward({x, mean, rstd});
    return y;
  }

  static variable_list backward(AutogradContext* context, variable_list grads) {
    ParamAccess& params = saved_params(context);
    const std::string scale = saved_name(context, "scale");
    const std::string shift = saved_name(context, "shift");
    const variable_list saved = context->get_saved_variables();
    const at::Tensor dy = grads[0].contiguous();
    const at::Tensor shift_unused = at::empty({dy.size(1)}, dy.options());
    const auto [dx, dscale, dshift] = at::native_layer_norm_backward(
        dy, saved[0], {dy.size(1)}, saved[1], saved[2], params.values(scale, Pass::kBackward), shift_unused,
        std::array<bool, 3>{true, true, true});
    params.grad(scale).add_(dscale);
    params.grad_ready(scale);
    params.grad(shift).add_(dshift);
    params.grad_ready(shift);
    return {dx, at::Tensor(), at::Tensor(), at::Tensor()};
  }
};

struct EmbeddingFunction : Function<EmbeddingFunction> {
  /// anchor  any tensor that requires a gradient: the function has no other differentiable input.
  static at::Tensor forward(AutogradContext* context, const at::Tensor& anchor, const at::Tensor& ids,
                            std::int64_t params_address, const std::string& table,
                            const std::string& positions) {
    auto& params = *reinterpret_cast<ParamAccess*>(params_address);
    save_params(context, params);
    context->saved_data["table"] = table;
    context->saved_data["positions"] = positions;
    context->save_for_backward({anchor, ids});
    const std::int64_t seq_len = ids.size(1);
    at::Tensor out = params.rows(table, ids.reshape({-1}));
    const at::Tensor position_rows = params.rows(positions, at::arange(seq_len, ids.options()));
    out.view({ids.size(0), seq_len, -1}).add_(position_rows);
    return out;
  }

  static variable_list backward(AutogradContext* context, variable_list grads) {
    ParamAccess& params = saved_params(context);
    const std::string table = saved_name(context, "table");
    const std::string positions = saved_name(context, "positions");
    const variable_list saved = context->get_saved_variables();
    const at::Tensor& ids = saved[1];
    const at::Tensor dy = grads[0].contiguous();
    params.grad(positions).narrow(0, 0, ids.size(1)).add_(dy.view({ids.size(0), ids.size(1), -1}).sum(0));
    params.grad_ready(positions);
    if (dy.is_cpu()) {
      params.grad(table).index_add_(0, ids.reshape({-1}), dy);
    } else {
      // Why not index_add_: on a GPU it adds in an order that changes from run to run.
      params.grad(table).index_put_({ids.reshape({-1})}, dy, /*accumulate=*/true);
    }
    params.grad_ready(table);
    return {at::zeros_like(saved[0]), at::Tensor(), at::Tensor(), at::Tensor(), at::Tensor()};
  }
};

std::int64_t address_of(ParamAccess& params) {
  return reinterpret_cast<std::int64_t>(&params);
}

}  // namespace

at::Tensor linear(ParamAccess& params, const std::string& weight, const at::Tensor& x) {
  return LinearFunction::apply(x, address_of(params), weight);
}

at::Tensor layer_norm(ParamAccess& params, const std::string& scale, const std::string& shift,
                      const at::Tensor& x) {
  return LayerNormFunction::apply(x, address_of(params), scale, shift);
}

at::Tensor embedding(ParamAccess& params, const std::string& table, const std::string& positions,
                     const at::Tensor& ids) {
  const at::Tensor anchor = at::zeros({1}, ids.options().dtype(at::kFloat)).set_requires_grad(true);
  return EmbeddingFunction::apply(anchor, ids, address_of(params), table, positions);
}

}  // namespace train_gpt
