#include "mxopt/optimizer/state_snapshot.h"

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <utility>

#include "mxopt/params/dtype.h"

namespace mxopt {

namespace {

constexpr StateKind kKinds[] = {StateKind::kMaster, StateKind::kExpAvg, StateKind::kExpAvgSq};

std::vector<StateKind> kinds_of(const ParamLayout& param) {
  if (param.family.frozen) return {StateKind::kMaster};
  return {std::begin(kKinds), std::end(kKinds)};
}

std::string format_text(const ParamLayout& param) {
  std::string text(format_name(param.family.format));
  if (param.family.format == ParamFormat::kMxfp8)
    text += ' ' + std::string(storage_name(param.family.storage));
  return text;
}

std::int64_t bytes_of(const std::vector<StatePiece>& pieces) {
  std::int64_t bytes = 0;
  for (const StatePiece& piece : pieces) {
    for (const float* kind : piece.kinds) {
      if (kind != nullptr) bytes += piece.elems * static_cast<std::int64_t>(sizeof(float));
    }
  }
  return bytes;
}

}  // namespace

std::string checkpoint_section_name(const std::string& name, const ParallelGroups& groups) {
  if (groups.model == nullptr) return name;
  return name + (name.empty() ? "" : ".") + "model-" + std::to_string(groups.model->rank()) + "-of-" +
         std::to_string(groups.model->size());
}

std::vector<int> saved_params(const Layout& layout) {
  std::vector<int> params;
  for (int p = 0; p < static_cast<int>(layout.params().size()); ++p) {
    if (layout.param(p).tied_to < 0) params.push_back(p);
  }
  return params;
}

StateSnapshot::StateSnapshot(StateAccess& state, std::string section, bool copies)
    : state_(state), section_(std::move(section)), stream_(state.device()) {
  if (is_writer()) pieces_ = state.pieces();
  const std::shared_ptr<Allocator> pinned = pinned_allocator(state.device());
  step_state_ = Buffer(sizeof(StepState), Device{}, pinned);
  if (copies || state.device().kind != DeviceKind::kHost)
    memory_ = Buffer(bytes_of(pieces_), Device{}, pinned);
}

void StateSnapshot::take(StreamRef stream) {
  const Device device = state_.device();
  taken_ = describe();
  Event here(device);
  here.record(stream);
  here.join(stream_.ref());
  state_.join_enqueued(stream_.ref());
  copy_bytes(step_state_.data(), state_.step_state(), sizeof(StepState), device, stream_.ref());
  counted_ = std::make_shared<Event>(device);
  counted_->record(stream_.ref());
  if (memory_.bytes() > 0) {
    std::uint8_t* to = memory_.data();
    for (const StatePiece& piece : pieces_) {
      for (const float* kind : piece.kinds) {
        if (kind == nullptr) continue;
        const std::int64_t bytes = piece.elems * static_cast<std::int64_t>(sizeof(float));
        copy_bytes(to, kind, bytes, device, stream_.ref());
        to += bytes;
      }
    }
  }
  copied_ = std::make_shared<Event>(device);
  copied_->record(stream_.ref());
  state_.hold_changes(copied_, stream);
}

std::int64_t StateSnapshot::steps_taken() const {
  counted_->wait();
  return step_state().taken;
}

StepState StateSnapshot::step_state() const {
  StepState state;
  std::memcpy(&state, step_state_.data(), sizeof(state));
  return state;
}

CheckpointContents StateSnapshot::contents() const {
  copied_->wait();
  CheckpointContents contents = taken_;
  const StepState state = step_state();
  ScalarState& scalars = contents.sections[0].scalars;
  scalars.steps = state.taken;
  scalars.calls = state.calls;
  scalars.consecutive_skips = state.consecutive_skips;
  scalars.skipped_total = state.skipped_total;
  scalars.loss_scale = state.loss_scale.scale;
  scalars.hysteresis_left = state.loss_scale.hysteresis_left;
  scalars.clean_steps = state.loss_scale.clean_steps;
  return contents;
}

/// Tables and slices; the latter point to where the values will be.
CheckpointContents StateSnapshot::describe() const {
  CheckpointContents contents;
  CheckpointSection& section = contents.sections.emplace_back();
  section.name = section_;
  for (const int p : saved_params(state_.layout())) {
    const ParamLayout& param = state_.layout().param(p);
    section.params.push_back(
        {param.name, param.shape, kinds_of(param), state_.group_of(p).name, format_text(param)});
  }
  for (const ParamGroup& group : state_.param_groups()) {
    section.scalars.groups.push_back({group.name, group.lr.peak, group.lr.floor, group.weight_decay.start,
                                      group.weight_decay.end, group.betas[0], group.betas[1], group.eps});
  }
  const auto* copy = reinterpret_cast<const float*>(memory_.data());
  for (const StatePiece& piece : pieces_) {
    for (std::size_t k = 0; k < piece.kinds.size(); ++k) {
      if (piece.kinds[k] == nullptr) continue;
      const float* const values = memory_.bytes() > 0 ? copy : piece.kinds[k];
      copy += piece.elems;
      contents.slices.push_back({section_, state_.layout().param(piece.param).name, kKinds[k], piece.begin,
                                 std::span(values, static_cast<std::size_t>(piece.elems))});
    }
  }
  return contents;
}

}  // namespace mxopt
