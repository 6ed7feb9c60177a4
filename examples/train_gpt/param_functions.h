// The differentiable functions whose weights are the optimizer's params: linear, layer norm and embedding.
//
// Autograd sees the activations only. The backward of each adds the weight's gradient straight into the
// optimizer's gradient view and then reports it ready.
#pragma once

#include <string>

#include <ATen/ATen.h>

#include "train_gpt/param_access.h"

namespace train_gpt {

/// x [tokens, in] with the weight [out, in]: [tokens, out]. Forward reads the row plane, backward the column
/// plane (or the row plane again, where there is no column plane).
at::Tensor linear(ParamAccess& params, const std::string& weight, const at::Tensor& x);

/// Layer norm over the last dimension of x [tokens, hidden]; scale and shift are [hidden].
at::Tensor layer_norm(ParamAccess& params, const std::string& scale, const std::string& shift,
                      const at::Tensor& x);

/// Rows `ids`, on the params' device, of the table, plus the first rows of the position table: [sequences,
/// seq_len] int64 ids give [sequences * seq_len, hidden].
at::Tensor embedding(ParamAccess& params, const std::string& table, const std::string& positions,
                     const at::Tensor& ids);

}  // namespace train_gpt
