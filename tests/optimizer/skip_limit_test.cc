#include "mxopt/optimizer/skip_limit.h"

#include <gtest/gtest.h>

#include "support/thrown_message.h"

#include "mxopt/params/check.h"

namespace mxopt {
namespace {

using test::contains;
using test::thrown_message;

StepRecord skipped(std::int64_t steps, SkipReason reason) {
  StepRecord record;
  record.consecutive_skips = steps;
  record.skip_reason = reason;
  return record;
}

TEST(SkipLimit, IsReachedByThatManySkipsInARow) {
  OptimizerConfig config;
  config.max_consecutive_skips = 3;
  const StepRecord two = skipped(2, SkipReason::kNonFiniteGradient);
  const StepRecord three = skipped(3, SkipReason::kNonFiniteGradient);
  EXPECT_NO_THROW(require_few_skips(StepRecord(), config));
  EXPECT_NO_THROW(require_few_skips(two, config));
  EXPECT_THROW(require_few_skips(three, config), ContractError);
  config.max_consecutive_skips = 0;
  EXPECT_NO_THROW(require_few_skips(three, config));
}

TEST(SkipLimit, NamesTheCause) {
  OptimizerConfig config;
  config.max_consecutive_skips = 1;
  config.skip_norm = 4;
  StepRecord record = skipped(1, SkipReason::kNonFiniteGradient);
  const auto message = [&] {
    return thrown_message<ContractError>([&] { require_few_skips(record, config); });
  };
  EXPECT_TRUE(contains(message(), "1 steps in a row")) << message();
  EXPECT_TRUE(contains(message(), "a non-finite gradient")) << message();
  record.nonfinite_gradient_rank = 2;
  EXPECT_TRUE(contains(message(), "rank 2 of the model-parallel group")) << message();
  record.nonfinite_gradient_params = {"mlp.up", "mlp.down"};
  EXPECT_TRUE(contains(message(), "param 'mlp.up'")) << message();

  record = skipped(1, SkipReason::kGradNorm);
  record.grad_norm = 5;
  EXPECT_TRUE(contains(message(), "a gradient norm of 5, above optimizer.skip_norm, 4")) << message();
  record.grad_norm = 3;
  record.norm_groups = {{"small", 1, 1}, {"heads", 6, 1}};
  EXPECT_TRUE(contains(message(), "a gradient norm of 6 in norm_group 'heads'")) << message();
}

}  // namespace
}  // namespace mxopt
