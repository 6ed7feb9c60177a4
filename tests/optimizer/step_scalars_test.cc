#include "mxopt/optimizer/step_scalars.h"

#include <vector>

#include <gtest/gtest.h>

#include "support/devices.h"
#include "support/host_view.h"

namespace mxopt {
namespace {

class StepScalarsOf : public ::testing::TestWithParam<DeviceKind> {
 protected:
  void SetUp() override { MXOPT_SKIP_WITHOUT(device()); }
  Device device() const { return {GetParam(), 0}; }

  template <class T>
  T read(const T* memory) const {
    T value{};
    copy_bytes(&value, memory, sizeof(T), device(), StreamRef());
    synchronize(device(), StreamRef());
    return value;
  }
};
INSTANTIATE_TEST_SUITE_P(Devices, StepScalarsOf, ::testing::ValuesIn(test::built_device_kinds()),
                         [](const auto& kind) { return test::device_kind_name(kind.param); });

TEST_P(StepScalarsOf, StartWithTheGivenStateAndZeroes) {
  StepState initial;
  initial.taken = 17;
  initial.loss_factor = 512;
  const StepScalars scalars(3, 5, initial, device(), default_allocator(device()));
  EXPECT_EQ(read(scalars.memory().state).taken, 17);
  EXPECT_EQ(read(scalars.loss_factor().data()), 512);
  EXPECT_EQ(scalars.memory().table.steps, 5);
  EXPECT_EQ(scalars.statistics().elems, kStatisticsElems);
  EXPECT_EQ(scalars.common_statistics().elems, kStatisticsElems);
  EXPECT_EQ(read(scalars.memory().statistics.step).nonfinite_runs, 0);
  EXPECT_EQ(scalars.memory().statistics.params, nullptr);
  EXPECT_EQ(scalars.memory().statistics.nonfinite_runs_of_rank, nullptr);
  EXPECT_TRUE(scalars.norm_outcomes().empty());
  EXPECT_TRUE(scalars.param_sums().empty());
}

TEST_P(StepScalarsOf, StatisticsAreOneMessageThatEndsWithWhatIsOfOneParam) {
  const StatisticsLayout layout = {{0.5, 0.25}, 3, 1, 7, true};
  const StepScalars scalars(1, 1, StepState(), device(), default_allocator(device()), layout);
  const StepMemory& memory = scalars.memory();
  const StatisticsMemory& statistics = memory.statistics;
  EXPECT_TRUE(statistics.counts_zeros);
  constexpr std::int64_t kParamElems = 2 * kSumLimbs + 2;
  EXPECT_EQ(scalars.common_statistics().elems, kStatisticsElems + 2 * 3 + 2 * kSumLimbs);
  EXPECT_EQ(scalars.statistics().elems, scalars.common_statistics().elems + 7 * kParamElems);
  EXPECT_EQ(statistics.elems, scalars.statistics().elems);
  const auto* const message = static_cast<const std::int64_t*>(scalars.statistics().data);
  EXPECT_EQ(scalars.common_statistics().data, message);
  EXPECT_EQ(memory.tokens_of_ranks, message + kStatisticsElems);
  EXPECT_EQ(statistics.tokens, message + kStatisticsElems + 1);
  EXPECT_EQ(memory.nonfinite_runs_of_ranks, message + kStatisticsElems + 3);
  EXPECT_EQ(statistics.nonfinite_runs_of_rank, message + kStatisticsElems + 3 + 1);
  EXPECT_EQ(scalars.own_statistics().data, &statistics.step->options_hash);
  EXPECT_EQ(static_cast<const std::int64_t*>(scalars.own_statistics().data) + scalars.own_statistics().elems,
            memory.nonfinite_runs_of_ranks);
  EXPECT_EQ(statistics.squares_of(2), message + kStatisticsElems + 2 * 3 + kSumLimbs);
  EXPECT_EQ(statistics.squares_of(0), statistics.step->square_sum);
  EXPECT_EQ(statistics.squares_of(-1), nullptr);
  EXPECT_EQ(static_cast<const void*>(statistics.params + 7), message + statistics.elems);
  EXPECT_EQ(scalars.param_sums().data(), statistics.params);
  EXPECT_EQ(scalars.param_sums().size(), 7U);
  EXPECT_EQ(scalars.norm_outcomes().size(), 2U);
  EXPECT_EQ(memory.norms.count, 2);
  EXPECT_EQ(memory.norms.sums, statistics.norms);
  EXPECT_EQ(read(memory.norms.max_norms), 0.5);
  EXPECT_EQ(read(memory.norms.max_norms + 1), 0.25);
}

TEST_P(StepScalarsOf, TakeTheStateOfOthers) {
  StepState state;
  state.taken = 3;
  state.calls = 5;
  state.loss_scale = {64, 1, 2};
  state.loss_factor = 64;
  StepScalars scalars(1, 1, StepState(), device(), default_allocator(device()));
  scalars.set_state(state, StreamRef());
  StepScalars others(2, 1, StepState(), device(), default_allocator(device()));
  others.copy_state(scalars, StreamRef());
  const StepState copied = read(others.memory().state);
  EXPECT_EQ(copied.taken, 3);
  EXPECT_EQ(copied.calls, 5);
  EXPECT_EQ(copied.loss_scale.scale, 64);
  EXPECT_EQ(copied.loss_scale.clean_steps, 2);
  EXPECT_EQ(read(others.loss_factor().data()), 64);
}

TEST_P(StepScalarsOf, TakeWhatTheHostSays) {
  StepScalars scalars(2, 3, StepState(), device(), default_allocator(device()));
  {
    const std::vector<GroupConstants> constants{{{0.5, 0.75}, 1e-3}, {{0.25, 0.125}, 1e-4}};
    const std::vector<float> weight_decay{7, 8, 9, 10, 11, 12}, lr{1, 2, 3, 4, 5, 6};
    scalars.set_groups({constants, weight_decay, lr, 9, false}, StreamRef());
  }
  scalars.set_taken(11, StreamRef());
  const GroupTable& table = scalars.memory().table;
  EXPECT_EQ(table.first_step, 9);
  EXPECT_TRUE(table.has_step(11));
  EXPECT_FALSE(table.has_step(12));
  EXPECT_EQ(read(table.constants).eps, 1e-3);
  EXPECT_EQ(read(table.constants + 1).betas[0], 0.25);
  EXPECT_EQ(read(table.constants + 1).betas[1], 0.125);
  EXPECT_EQ(read(table.constants + 1).eps, 1e-4);
  EXPECT_EQ(read(table.weight_decay), 7);
  EXPECT_EQ(read(table.weight_decay + 5), 12);
  EXPECT_EQ(read(table.lr), 1);
  EXPECT_EQ(read(table.lr + 5), 6);
  EXPECT_EQ(read(scalars.memory().state).taken, 11);
}

}  // namespace
}  // namespace mxopt
