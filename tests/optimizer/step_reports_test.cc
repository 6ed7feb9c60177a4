#include "mxopt/optimizer/step_reports.h"

#include <cstring>
#include <memory>
#include <span>
#include <vector>

#include <gtest/gtest.h>

#include "support/devices.h"
#include "support/guarded_bytes.h"
#include "support/thrown_message.h"

#include "mxopt/params/check.h"

namespace mxopt {
namespace {

using test::thrown_message;

/// Reports of steps whose number of taken steps is given; a step 13 is a problem.
class StepReportsOf : public ::testing::TestWithParam<DeviceKind> {
 protected:
  void SetUp() override {
    MXOPT_SKIP_WITHOUT(device());
    reports_ = std::make_unique<StepReports>(
        device(), result(), [this](StepRecord& record, const StepReports::Result& result) {
          completed_.push_back(result.outcome->after.taken);
          record.step = result.outcome->after.taken;
          record.launches = result.status[0] + result.status[1] + result.status[2] + result.local_status[0];
          record.clip_factor = result.norms[1].clip_factor;
          record.zero_grads = result.params[2].nonfinite_master_runs;
          if (record.step == 13) throw ContractError("thirteen");
        });
  }
  Device device() const { return {GetParam(), 0}; }

  StepReport add(std::int64_t taken) {
    reports_->make_room();
    StepOutcome outcome;
    outcome.after.taken = taken;
    std::vector<std::uint8_t> bytes(sizeof(outcome));
    std::memcpy(bytes.data(), &outcome, sizeof(outcome));
    outcomes_.push_back(std::make_unique<test::GuardedBytes>(device(), bytes));
    StepRecord record;
    record.calls = 5;
    StepReports::Result all = result();
    all.outcome = reinterpret_cast<const StepOutcome*>(outcomes_.back()->data());
    return reports_->add(std::move(record), all, {}, StreamRef());
  }
  int depth() const { return StepReports::depth_of(device()); }

  std::vector<std::int64_t> completed_;
  std::unique_ptr<StepReports> reports_;

 private:
  template <class T>
  static std::vector<std::uint8_t> bytes_of(const std::vector<T>& values) {
    std::vector<std::uint8_t> bytes(values.size() * sizeof(T));
    std::memcpy(bytes.data(), values.data(), bytes.size());
    return bytes;
  }
  /// All but the outcome.
  StepReports::Result result() {
    return {nullptr,
            {reinterpret_cast<const NormOutcome*>(norms_.data()), 2},
            {reinterpret_cast<const ParamSums*>(params_.data()), 3},
            status_.span(),
            local_status_.span()};
  }

  std::vector<std::unique_ptr<test::GuardedBytes>> outcomes_;
  test::GuardedBytes norms_{usable(), bytes_of(std::vector<NormOutcome>{{1, 0.75f, 1}, {2, 0.25f, 1}})};
  test::GuardedBytes params_{usable(), bytes_of(std::vector<ParamSums>{{}, {}, {{}, {}, 5, 77}})};
  test::GuardedBytes status_{usable(), std::vector<std::uint8_t>{1, 2, 4}};
  test::GuardedBytes local_status_{usable(), std::vector<std::uint8_t>{8}};

  Device usable() const { return test::why_not_usable(device()).empty() ? device() : Device{}; }
};
INSTANTIATE_TEST_SUITE_P(Devices, StepReportsOf, ::testing::ValuesIn(test::built_device_kinds()),
                         [](const auto& kind) { return test::device_kind_name(kind.param); });

TEST_P(StepReportsOf, AreCompletedOnceAndSharedByCopies) {
  const StepReport report = add(1);
  const StepReport copy = report;
  EXPECT_EQ(report->step, 1);
  EXPECT_EQ(report->launches, 15);
  EXPECT_EQ((*copy).calls, 5);
  EXPECT_EQ(report->clip_factor, 0.25f);
  EXPECT_EQ(report->zero_grads, 77);
  EXPECT_EQ(completed_, std::vector<std::int64_t>{1});
}

TEST_P(StepReportsOf, MayBeReadLateAndInAnyOrder) {
  std::vector<StepReport> all;
  for (int step = 0; step < 3 * depth(); ++step) all.push_back(add(100 + step));
  for (std::size_t i = all.size(); i-- > 0;) EXPECT_EQ(all[i]->step, 100 + static_cast<std::int64_t>(i));
  EXPECT_EQ(completed_.size(), all.size());
}

TEST_P(StepReportsOf, SettleCompletesAllOfThem) {
  const StepReport report = add(4);
  reports_->settle();
  EXPECT_EQ(completed_.back(), 4);
  EXPECT_EQ(report->step, 4);
}

TEST_P(StepReportsOf, AProblemIsThrownWhenReadAndBeforeItsMemoryIsUsedAgain) {
  const StepReport report = add(13);
  EXPECT_EQ(thrown_message<ContractError>([&] { *report; }), "thirteen");
  EXPECT_EQ(thrown_message<ContractError>([&] { *report; }), "thirteen");
  for (int step = 1; step < depth(); ++step) add(20 + step);
  EXPECT_EQ(thrown_message<ContractError>([&] { add(60); }), "thirteen")
      << "a rank that has not read it throws here";
  EXPECT_NO_THROW(add(61));
}

TEST_P(StepReportsOf, OutliveTheOptimizerOnlyWhenComplete) {
  const StepReport complete = add(1);
  EXPECT_EQ(complete->step, 1);
  const StepReport open = add(2);
  reports_.reset();
  EXPECT_EQ(complete->step, 1);
  EXPECT_EQ(thrown_message<ContractError>([&] { *open; }),
            "the report of a step was read after its optimizer was destroyed; read it before");
}

}  // namespace
}  // namespace mxopt
