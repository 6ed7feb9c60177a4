#include "mxopt/optimizer/checkpointer.h"

#include <algorithm>
#include <cstddef>
#include <exception>
#include <optional>
#include <random>
#include <span>
#include <sstream>
#include <utility>

#include "mxopt/collectives/host_exchange.h"
#include "mxopt/optimizer/agreement.h"
#include "mxopt/optimizer/checkpoint/background_save.h"
#include "mxopt/optimizer/config_difference.h"
#include "mxopt/optimizer/loss_scale.h"
#include "mxopt/optimizer/restore_check.h"
#include "mxopt/optimizer/state_access.h"
#include "mxopt/optimizer/state_snapshot.h"
#include "mxopt/optimizer/weight_digest.h"
#include "mxopt/params/check.h"

namespace mxopt {

struct Checkpointer::Member {
  DistributedAdam& optimizer;
  StateAccess& state;
  std::string section;
  std::unique_ptr<StateSnapshot> snapshot = nullptr;  // with its memory, for the next save
};

class Checkpointer::Flight {
 public:
  BackgroundSave save;
};

namespace {

constexpr StateKind kKinds[] = {StateKind::kMaster, StateKind::kExpAvg, StateKind::kExpAvgSq};

/// This rank's number among all ranks of the groups.
int number_of(const ParallelGroups& groups) {
  int number = groups.replicas == nullptr ? 0 : groups.replicas->rank();
  number =
      number * static_cast<int>(groups.model_ranks()) + (groups.model == nullptr ? 0 : groups.model->rank());
  return number * groups.data->size() + groups.data->rank();
}

/// A name that no save had before, equal on all ranks.
std::string new_attempt(StateAccess& state) {
  std::int64_t number = 0;
  if (number_of(state.groups()) == 0) {
    std::random_device random;
    number = static_cast<std::int64_t>((std::uint64_t{random()} << 32) ^ random());
  }
  std::ostringstream text;
  text << std::hex << static_cast<std::uint64_t>(state.sum_over_ranks(number));
  return text.str();
}

StepState step_state_of(const ScalarState& saved, const LossScaleConfig& config) {
  StepState state;
  state.taken = saved.steps;
  state.calls = saved.calls;
  state.consecutive_skips = saved.consecutive_skips;
  state.skipped_total = saved.skipped_total;
  state.loss_scale = config.kind == LossScaleKind::kDynamic
                         ? LossScaleState{saved.loss_scale, saved.hysteresis_left, saved.clean_steps}
                         : initial_loss_scale(config);
  state.loss_factor = static_cast<float>(state.loss_scale.scale);
  return state;
}

ParamGroup group_of(const GroupScalars& saved) {
  ParamGroup group;
  group.name = saved.name;
  group.lr = {saved.lr, saved.min_lr};
  group.weight_decay = {saved.weight_decay, saved.end_weight_decay};
  group.betas = {saved.beta1, saved.beta2};
  group.eps = saved.eps;
  return group;
}

/// What of the groups' hyper-parameters is another than it was.
/// is_saved  the saved values are used, not the configured ones.
void add_group_differences(const CheckpointSection& saved, std::span<const ParamGroup> groups, bool is_saved,
                           std::vector<std::string>& lines) {
  for (const ParamGroup& now : groups) {
    const std::string name = "group '" + now.name + "'";
    const auto at = std::ranges::find(saved.scalars.groups, now.name, &GroupScalars::name);
    if (at == saved.scalars.groups.end()) {
      lines.push_back(name + " is not in the checkpoint");
      continue;
    }
    const auto compare = [&](const char* what, double before, double value) {
      if (before == value) return;
      std::ostringstream line;
      line << name << ' ' << what << ": " << before
           << (is_saved ? " is used, as it was saved; configured is " : ", now ") << value;
      lines.push_back(line.str());
    };
    compare("lr", at->lr, now.lr.peak);
    compare("min_lr", at->min_lr, now.lr.floor);
    compare("weight_decay", at->weight_decay, now.weight_decay.start);
    compare("end_weight_decay", at->end_weight_decay, now.weight_decay.end);
    compare("beta1", at->beta1, now.betas[0]);
    compare("beta2", at->beta2, now.betas[1]);
    compare("eps", at->eps, now.eps);
  }
  for (const GroupScalars& before : saved.scalars.groups) {
    if (std::ranges::find(groups, before.name, &ParamGroup::name) == groups.end()) {
      lines.push_back("group '" + before.name + "' of the checkpoint is not here");
    }
  }
}

/// A section's name without the part of the model.
std::string base_name(const std::string& section) {
  const std::size_t at = section.find("model-");
  return at == std::string::npos ? section : section.substr(0, at == 0 ? 0 : at - 1);
}

/// What a save may not have is told before anything is sent: all ranks have the same configuration.
void require_dir(const CheckpointConfig& config) {
  MXOPT_CHECK(!config.dir.empty(),
              "save: checkpoint.dir is empty; it must name the folder of all checkpoints");
}

}  // namespace

/// What was read and not applied yet.
struct Checkpointer::Staged {
  std::vector<std::unique_ptr<float[]>> values;  // for each member, piece and kind, in order
  std::vector<const CheckpointSection*> sections;
};

Checkpointer::Checkpointer(DistributedAdam& optimizer, CheckpointConfig config)
    : Checkpointer({{"", &optimizer}}, std::move(config)) {}

Checkpointer::Checkpointer(std::vector<OptimizerChain::Member> members, CheckpointConfig config)
    : config_(std::move(config)), flight_(std::make_unique<Flight>()) {
  MXOPT_CHECK(!members.empty(), "a checkpoint of no optimizer");
  for (const OptimizerChain::Member& member : members) {
    MXOPT_CHECK(member.optimizer != nullptr,
                "a checkpoint: optimizer '" << member.name << "' is a null pointer");
    StateAccess& state = member.optimizer->state();
    const std::string section = checkpoint_section_name(member.name, state.groups());
    for (const auto& other : members_) {
      MXOPT_CHECK(other->section != section,
                  "a checkpoint: two optimizers are called '" << member.name << "'");
    }
    members_.push_back(std::make_unique<Member>(Member{*member.optimizer, state, section}));
  }
  // Pinning memory takes longer than a save: not in the middle of the training.
  if (config_.async) agreed<CheckpointError>([&] { make_snapshots(); });
}

Checkpointer::~Checkpointer() = default;

template <class Error, class Body>
void Checkpointer::agreed(const Body& body) const {
  agreed_over<Error>(first().state.groups().comms(), body);
}

void Checkpointer::make_snapshots() {
  for (const auto& member : members_) {
    if (member->snapshot != nullptr) continue;
    member->snapshot = std::make_unique<StateSnapshot>(member->state, member->section, config_.async);
  }
}

SavedRun Checkpointer::save(const RunState& run, StreamRef stream) {
  wait();
  require_dir(config_);
  agreed<CheckpointError>([&] { make_snapshots(); });
  // Before the copies: messages of the host would wait for them on a device.
  CheckpointJob job;
  job.attempt = new_attempt(first().state);
  for (const auto& member : members_) member->snapshot->take(stream);
  const ParallelGroups& groups = first().state.groups();
  job.dir = config_.dir;
  job.step = first().snapshot->steps_taken();
  job.writer = number_of(groups);
  job.writers = static_cast<int>(groups.ranks());
  job.timeout_s = config_.timeout_s;
  job.keep_last = static_cast<int>(config_.keep_last);
  RunState own = run;
  if (own.config.empty()) own.config = configuration_text(first().state.config());
  const auto contents = [this, own] {
    CheckpointContents all;
    for (const auto& member : members_) {
      CheckpointContents part = member->snapshot->contents();
      std::ranges::move(part.sections, std::back_inserter(all.sections));
      std::ranges::move(part.slices, std::back_inserter(all.slices));
    }
    all.user = own.user;
    all.config = own.config;
    return all;
  };
  if (config_.async) {
    flight_->save.start(job, contents);
    return {job.dir / step_folder_name(job.step), {}};
  }
  SavedCheckpoint saved;
  agreed<CheckpointError>([&] { saved = write_checkpoint(job, contents); });
  return {saved.folder, saved.warnings};
}

SavedRun Checkpointer::wait() {
  if (!flight_->save.active()) return {};
  SavedCheckpoint saved;
  agreed<CheckpointError>([&] { saved = flight_->save.wait(); });
  return {saved.folder, saved.warnings};
}

bool Checkpointer::is_saving() const {
  return !flight_->save.done();
}

LoadedRun Checkpointer::load(const std::filesystem::path& path, StreamRef stream, const std::string& config) {
  return restore(path, true, stream, config);
}

LoadedRun Checkpointer::load_weights(const std::filesystem::path& path, StreamRef stream) {
  LoadedRun loaded = restore(path, false, stream, "");
  loaded.run = {};
  return loaded;
}

LoadedRun Checkpointer::restore(const std::filesystem::path& path, bool is_whole, StreamRef stream,
                                const std::string& config) {
  wait();
  const ParallelGroups& groups = first().state.groups();
  std::optional<CheckpointReader> reader;
  agreed<DataError>([&] {
    MXOPT_CHECK(!path.empty() || !config_.dir.empty(), "load: no path, and checkpoint.dir is empty");
    for (const auto& member : members_) member->state.require_between_steps();
    reader.emplace(path.empty() ? std::filesystem::path(config_.dir) : path, config_.verify,
                   VerifyShare{number_of(groups), static_cast<int>(groups.ranks())});
  });
  const LayoutField chosen = {"checkpoint",
                              reader->folder().filename().string() + ", save " + reader->manifest().attempt};
  require_agreement(groups.comms(), groups.comms(), std::span(&chosen, 1));

  Staged staged;
  agreed<DataError>([&] { stage(*reader, is_whole, staged); });

  LoadedRun loaded;
  loaded.folder = reader->folder();
  loaded.step = reader->step();
  loaded.run = {reader->user(), reader->config()};
  loaded.warnings = reader->warnings();
  if (is_whole) {
    loaded.differences = config_differences(
        reader->config(), config.empty() ? configuration_text(first().state.config()) : config);
  }
  Event here(first().state.device());
  here.record(stream);
  auto values = staged.values.begin();
  for (std::size_t m = 0; m < members_.size(); ++m) {
    StateAccess& state = members_[m]->state;
    const Stream own(state.device());
    here.join(own.ref());
    state.join_enqueued(own.ref());
    for (const StatePiece& piece : state.pieces()) {
      for (std::size_t k = 0; k < (is_whole ? piece.kinds.size() : 1); ++k) {
        if (piece.kinds[k] == nullptr) continue;
        copy_bytes(piece.kinds[k], values->get(), piece.elems * static_cast<std::int64_t>(sizeof(float)),
                   state.device(), own.ref());
        ++values;
      }
    }
    if (is_whole) restore_groups(*staged.sections[m], state, loaded.differences);
    const StepState step = step_state_of(staged.sections[m]->scalars, state.config().optimizer.loss_scale);
    state.note_restored(is_whole ? &step : nullptr, own.ref());
    synchronize(state.device(), own.ref());
    members_[m]->optimizer.publish(own.ref());
    require_equal_weights(members_[m]->optimizer, state.groups(), own.ref());
    synchronize(state.device(), own.ref());
  }
  return loaded;
}

/// Tells what differs, and gives the groups what they were saved with where that is wanted.
void Checkpointer::restore_groups(const CheckpointSection& section, StateAccess& state,
                                  std::vector<std::string>& differences) const {
  const bool is_saved = config_.hyper_parameters == HyperParameters::kSaved;
  add_group_differences(section, state.param_groups(), is_saved, differences);
  if (!is_saved) return;
  std::vector<ParamGroup> saved;
  for (const GroupScalars& group : section.scalars.groups) saved.push_back(group_of(group));
  state.set_param_groups(saved);
}

/// Reads all that this rank owns; everything that can be wrong is found here.
void Checkpointer::stage(CheckpointReader& reader, bool is_whole, Staged& staged) const {
  std::string problems;
  for (const CheckpointSection& section : reader.sections()) {
    const bool is_known = std::ranges::any_of(
        members_, [&](const auto& member) { return base_name(member->section) == base_name(section.name); });
    if (!is_known)
      problems +=
          (problems.empty() ? "" : "\n") + ("section '" + section.name + "' of the checkpoint is not here");
  }
  for (const auto& member : members_) {
    const CheckpointSection& section = reader.section(member->section);
    staged.sections.push_back(&section);
    for (const std::string& problem : restore_problems(section, member->state.layout(), is_whole)) {
      problems += (problems.empty() ? "" : "\n") + problem;
    }
  }
  if (!problems.empty()) {
    throw DataError(reader.folder().string() + " does not fit the params there are:\n" + problems);
  }
  for (const auto& member : members_) {
    for (const StatePiece& piece : member->state.pieces()) {
      const std::string& name = member->state.layout().param(piece.param).name;
      for (std::size_t k = 0; k < (is_whole ? piece.kinds.size() : 1); ++k) {
        if (piece.kinds[k] == nullptr) continue;
        const auto elems = static_cast<std::size_t>(piece.elems);
        staged.values.push_back(std::make_unique_for_overwrite<float[]>(elems));
        reader.read(member->section, name, kKinds[k], piece.begin, {staged.values.back().get(), elems});
      }
    }
  }
}

}  // namespace mxopt
