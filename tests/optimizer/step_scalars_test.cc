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
  EXPECT_EQ(read(scalars.memory().statistics).nonfinite_runs, 0);
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
