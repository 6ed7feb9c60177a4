#include "mxopt/optimizer/state_snapshot.h"

#include <gtest/gtest.h>

#include "mxopt/collectives/self_communicator.h"
#include "mxopt/collectives/thread_communicator.h"

namespace mxopt {
namespace {

/// One trained and one frozen param of a rank, as an optimizer would hold them.
class State final : public StateAccess {
 public:
  explicit State(Communicator& comm) : groups_(comm), layout_(make_layout()) {
    group_.name = "default";
    group_.lr = {0.5, 0.125};
    group_.weight_decay = {0.25, 0.75};
    group_.betas = {0.875, 0.9375};
    group_.eps = 1e-3;
    state.taken = 7;
    state.calls = 9;
    state.skipped_total = 2;
    state.loss_scale = {64, 1, 5};
  }

  const Layout& layout() const override { return layout_; }
  const Config& config() const override { return config_; }
  Device device() const override { return {}; }
  const ParallelGroups& groups() const override { return groups_; }
  std::int64_t sum_over_ranks(std::int64_t value) override { return value; }
  std::vector<StatePiece> pieces() const override {
    auto* const self = const_cast<State*>(this);
    return {{0, 1, 2, {self->masters, self->moments, self->moments + 2}}, {1, 0, 1, {self->masters + 2}}};
  }
  const StepState* step_state() const override { return &state; }
  std::span<const ParamGroup> param_groups() const override { return {&group_, 1}; }
  const ParamGroup& group_of(int) const override { return group_; }
  void join_enqueued(StreamRef) override { ++joined; }
  void require_between_steps() const override {}
  void hold_changes(std::shared_ptr<const Event> copied, StreamRef) override { held = std::move(copied); }
  void note_restored(const StepState*, StreamRef) override {}
  void set_param_groups(std::span<const ParamGroup>) override {}

  float masters[3] = {1, 2, 3}, moments[4] = {4, 5, 6, 7};
  StepState state;
  int joined = 0;
  std::shared_ptr<const Event> held;
  ParallelGroups groups_;

 private:
  static Layout make_layout() {
    std::vector<ParamSpec> specs(3);
    specs[0].name = "w";
    specs[0].shape = {3};
    specs[1].name = "table";
    specs[1].shape = {1};
    specs[1].frozen = true;
    specs[2].name = "tied";
    specs[2].shape = {3};
    specs[2].tied_to = "w";
    return Layout(std::move(specs), LayoutOptions());
  }

  Layout layout_;
  Config config_;
  ParamGroup group_;
};

TEST(StateSnapshot, HasTheTermsOfACheckpoint) {
  SelfCommunicator self;
  State state(self);
  for (const bool copies : {false, true}) {
    StateSnapshot snapshot(state, "part", copies);
    snapshot.take();
    EXPECT_NE(state.held, nullptr);
    EXPECT_EQ(snapshot.steps_taken(), 7);
    const CheckpointContents contents = snapshot.contents();
    ASSERT_EQ(contents.sections.size(), 1U);
    const CheckpointSection& section = contents.sections[0];
    EXPECT_EQ(section.name, "part");
    ASSERT_EQ(section.params.size(), 2U);
    EXPECT_EQ(section.params[0].kinds.size(), 3U);
    EXPECT_EQ(section.params[1].name, "table");
    EXPECT_EQ(section.params[1].kinds, std::vector<StateKind>{StateKind::kMaster});
    EXPECT_EQ(section.params[1].group, "default");
    EXPECT_EQ(section.scalars.steps, 7);
    EXPECT_EQ(section.scalars.calls, 9);
    EXPECT_EQ(section.scalars.skipped_total, 2);
    EXPECT_EQ(section.scalars.loss_scale, 64);
    EXPECT_EQ(section.scalars.hysteresis_left, 1);
    EXPECT_EQ(section.scalars.clean_steps, 5);
    ASSERT_EQ(section.scalars.groups.size(), 1U);
    EXPECT_EQ(section.scalars.groups[0].min_lr, 0.125);
    EXPECT_EQ(section.scalars.groups[0].end_weight_decay, 0.75);
    ASSERT_EQ(contents.slices.size(), 4U);
    EXPECT_EQ(contents.slices[0].begin, 1);
    EXPECT_EQ(contents.slices[2].kind, StateKind::kExpAvgSq);
    EXPECT_EQ(contents.slices[2].values[1], 7);
    EXPECT_EQ(contents.slices[3].param, "table");
    EXPECT_EQ(contents.slices[3].values[0], 3);
  }
  EXPECT_EQ(state.joined, 2);
}

TEST(StateSnapshot, CopiesStayAsTheyWere) {
  SelfCommunicator self;
  State state(self);
  StateSnapshot copied(state, "", true), borrowed(state, "", false);
  copied.take();
  borrowed.take();
  state.masters[1] = 99;
  state.state.taken = 8;
  EXPECT_EQ(copied.contents().slices[0].values[1], 2);
  EXPECT_EQ(copied.contents().sections[0].scalars.steps, 7);
  EXPECT_EQ(borrowed.contents().slices[0].values[1], 99);
}

TEST(StateSnapshot, OfAReplicaThatIsNotTheFirstHasNoSlices) {
  auto group = ThreadCommunicator::make_group(2, 10);
  SelfCommunicator self;
  State state(self);
  state.groups_.replicas = group[1].get();
  StateSnapshot snapshot(state, "", true);
  snapshot.take();
  EXPECT_TRUE(snapshot.contents().slices.empty());
  EXPECT_EQ(snapshot.contents().sections[0].params.size(), 2U);
}

TEST(CheckpointSections, AreNamedByOptimizerAndPartOfTheModel) {
  auto group = ThreadCommunicator::make_group(3, 10);
  SelfCommunicator self;
  const ParallelGroups one(self), of_model(self, group[1].get());
  EXPECT_EQ(checkpoint_section_name("", one), "");
  EXPECT_EQ(checkpoint_section_name("dense", one), "dense");
  EXPECT_EQ(checkpoint_section_name("", of_model), "model-1-of-3");
  EXPECT_EQ(checkpoint_section_name("dense", of_model), "dense.model-1-of-3");
}

}  // namespace
}  // namespace mxopt
