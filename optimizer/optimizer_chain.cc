#include "mxopt/optimizer/optimizer_chain.h"

#include <algorithm>
#include <cstddef>
#include <exception>
#include <iterator>
#include <memory>
#include <optional>
#include <set>
#include <sstream>
#include <utility>

#include "mxopt/collectives/process_identity.h"
#include "mxopt/optimizer/skip_limit.h"
#include "mxopt/optimizer/step_phases.h"
#include "mxopt/optimizer/step_reports.h"
#include "mxopt/params/check.h"
#include "mxopt/params/layout.h"

namespace mxopt {

namespace {

/// What members must have in common, as lines of "key value".
std::string common_options(const Config& config) {
  const OptimizerConfig& o = config.optimizer;
  std::ostringstream text;
  text << std::hexfloat << "clip_grad " << o.clip_grad << "\nskip_norm " << o.skip_norm
       << "\nmax_consecutive_skips " << o.max_consecutive_skips << "\ngrad_reduce "
       << static_cast<int>(o.grad_reduce) << "\nloss_scale.kind " << static_cast<int>(o.loss_scale.kind)
       << "\nloss_scale.initial " << o.loss_scale.initial << "\nloss_scale.min " << o.loss_scale.min
       << "\nloss_scale.growth_interval " << o.loss_scale.growth_interval << "\nloss_scale.hysteresis "
       << o.loss_scale.hysteresis << '\n';
  return text.str();
}

/// The key of the first line that differs.
std::string first_difference(const std::string& a, const std::string& b) {
  std::istringstream lines_a(a), lines_b(b);
  std::string line_a, line_b;
  while (std::getline(lines_a, line_a) && std::getline(lines_b, line_b)) {
    if (line_a != line_b) return line_a.substr(0, line_a.find(' '));
  }
  return {};
}

template <class T>
void append(std::vector<T>& to, const std::vector<T>& more) {
  to.insert(to.end(), more.begin(), more.end());
}

void add_record(StepRecord& to, const StepRecord& more) {
  append(to.norm_groups, more.norm_groups);
  append(to.param_norms, more.param_norms);
  append(to.nonfinite_gradient_params, more.nonfinite_gradient_params);
  append(to.nonfinite_master_params, more.nonfinite_master_params);
  append(to.local_nonfinite_params, more.local_nonfinite_params);
  if (more.zero_grads >= 0) to.zero_grads = std::max<std::int64_t>(0, to.zero_grads) + more.zero_grads;
  if (to.nonfinite_gradient_rank < 0) to.nonfinite_gradient_rank = more.nonfinite_gradient_rank;
  to.launches += more.launches;
  to.ms.reduce_scatter += more.ms.reduce_scatter;
  to.ms.statistics += more.ms.statistics;
  to.ms.update += more.ms.update;
  to.ms.scales += more.ms.scales;
  to.ms.gather += more.ms.gather;
}

/// The record of a step of all members, made when it is read.
class UnitedRecord final : public StepReport::Source {
 public:
  UnitedRecord(std::vector<StepReport> reports, const OptimizerConfig& config)
      : reports_(std::move(reports)), config_(config) {}

  const StepRecord& read() override {
    if (!reports_.empty()) {
      StepRecord record = *reports_.front();
      for (std::size_t i = 1; i < reports_.size(); ++i) add_record(record, *reports_[i]);
      record_ = std::move(record);
      reports_.clear();
    }
    require_few_skips(record_, config_);
    return record_;
  }

 private:
  std::vector<StepReport> reports_;  // empty: the record is made
  OptimizerConfig config_;
  StepRecord record_;
};

}  // namespace

OptimizerChain::OptimizerChain(std::vector<Member> members) : members_(std::move(members)) {
  MXOPT_CHECK(!members_.empty() && members_.size() <= kMostParts,
              "a chain of " << members_.size() << " optimizers; allowed are 1 to " << kMostParts);
  for (const Member& member : members_) {
    MXOPT_CHECK(member.optimizer != nullptr, "a chain: member '" << member.name << "' is a null pointer");
  }
  std::string problem;
  try {
    require_one_decision();
  } catch (const ContractError& error) {
    problem = error.what();
  }
  require_equal_ranks(problem);
  for (std::size_t i = 1; i < members_.size(); ++i) phases(i).copy_state(phases(0));
  for (std::size_t i = 0; i < members_.size(); ++i) {
    phases(i).set_chained(i == 0 ? ChainRole::kFirst : ChainRole::kOther);
  }
}

OptimizerChain::~OptimizerChain() {
  for (std::size_t i = 0; i < members_.size(); ++i) phases(i).set_chained(ChainRole::kNone);
}

void OptimizerChain::require_one_decision() const {
  std::set<const DistributedAdam*> optimizers;
  std::set<std::string> names, norms;
  StepPhases& first = phases(0);
  for (std::size_t i = 0; i < members_.size(); ++i) {
    StepPhases& member = phases(i);
    const std::string who = "a chain: member '" + members_[i].name + "' ";
    MXOPT_CHECK(names.insert(members_[i].name).second, who << "is there twice; names must differ");
    MXOPT_CHECK(optimizers.insert(members_[i].optimizer).second && member.chain_role() == ChainRole::kNone,
                who << "is an optimizer of a chain already");
    MXOPT_CHECK(member.device() == first.device(),
                who << "is on another device than '" << members_[0].name << "'; allowed is one device");
    const std::string different =
        first_difference(common_options(first.config()), common_options(member.config()));
    MXOPT_CHECK(different.empty(), who << "has another optimizer." << different << " than '"
                                       << members_[0].name << "'; one decision has one");
    MXOPT_CHECK(member.steps_taken() == first.steps_taken(),
                who << "has taken " << member.steps_taken() << " steps, '" << members_[0].name << "' "
                    << first.steps_taken() << "; call set_steps_taken() before");
    const ParallelGroups& groups = member.groups();
    if (member.config().optimizer.grad_reduce == GradReduce::kAverage) {
      MXOPT_CHECK(groups.ranks_of_mean() == first.groups().ranks_of_mean(),
                  who << "has means over " << groups.ranks_of_mean() << " ranks, '" << members_[0].name
                      << "' over " << first.groups().ranks_of_mean()
                      << "; one loss is the mean over one number of ranks: set averaged_ranks");
    }
    if (member.config().optimizer.grad_reduce == GradReduce::kTokens) {
      MXOPT_CHECK(
          groups.adding_ranks() <= first.groups().adding_ranks(),
          who << "adds the gradients of " << groups.adding_ranks() << " ranks, the first member, '"
              << members_[0].name << "', of " << first.groups().adding_ranks()
              << ", and its tokens are those of all; the member that adds those of most ranks must be first");
    }
    for (const NormGroup& norm : member.norms()) {
      MXOPT_CHECK(norm.name.empty() || norms.insert(norm.name).second,
                  who << "has params in norm_group '" << norm.name
                      << "', which another member has too; allowed are groups of one member");
    }
  }
}

/// Every rank adds a number of its own to a sum over each member's ranks: equal ranks have equal sums. A
/// problem of one rank is one of all.
void OptimizerChain::require_equal_ranks(const std::string& problem) const {
  std::ostringstream self;
  self << host_name() << ' ' << process_id() << ' ' << static_cast<const void*>(this);
  const auto number = static_cast<std::int64_t>(hash64(self.str()));
  std::vector<std::int64_t> sums;
  for (std::size_t i = 0; i < members_.size(); ++i) {
    sums.push_back(phases(i).sum_over_ranks(number));
  }
  // Ranks that have a problem or see a difference tell those that do not.
  std::int64_t differences = 0;
  for (const std::int64_t sum : sums) differences += sum != sums[0] ? 1 : 0;
  std::int64_t all = 0, problems = 0;
  for (std::size_t i = 0; i < members_.size(); ++i) {
    all += phases(i).sum_over_ranks(differences);
    problems += phases(i).sum_over_ranks(problem.empty() ? 0 : 1);
  }
  if (!problem.empty()) throw ContractError(problem);
  if (problems != 0) throw ContractError("a chain: its members can not decide together on another rank");
  if (all == 0) return;
  std::string counts;
  for (std::size_t i = 0; i < members_.size(); ++i) {
    counts += (i == 0 ? "'" : ", '") + members_[i].name + "' " + std::to_string(phases(i).groups().ranks());
  }
  throw ContractError("a chain: the members' groups (data x model x replicas) are not the same ranks (" +
                      counts +
                      "); where a member's params are in parts on ranks of their own, give it "
                      "these ranks as its model-parallel group");
}

template <class Body>
void OptimizerChain::for_all(const Body& body) {
  aborting(
      [&](const std::string& reason) {
        for (std::size_t i = 0; i < members_.size(); ++i) phases(i).abort(reason);
      },
      [&] {
        for (std::size_t i = 0; i < members_.size(); ++i) body(phases(i));
      });
}

template <class Body>
void OptimizerChain::for_each_member(const Body& body) {
  std::exception_ptr problem;
  for_all([&](StepPhases& member) {
    try {
      body(member);
    } catch (const ContractError&) {
      if (!problem) problem = std::current_exception();
    }
  });
  if (problem) std::rethrow_exception(problem);
}

std::vector<std::string> OptimizerChain::publish(StreamRef stream) {
  std::vector<std::string> names;
  for (const Member& member : members_) append(names, member.optimizer->publish(stream));
  return names;
}

void OptimizerChain::begin_backward(bool last_micro_batch) {
  for (const Member& member : members_) member.optimizer->begin_backward(last_micro_batch);
}

void OptimizerChain::done_reading(StreamRef stream) {
  for (const Member& member : members_) member.optimizer->done_reading(stream);
}

void OptimizerChain::set_steps_taken(std::int64_t steps) {
  for_all([&](StepPhases& member) { member.set_steps_taken(steps); });
}

std::int64_t OptimizerChain::steps_taken() const {
  return members_.front().optimizer->steps_taken();
}

void OptimizerChain::add_tokens(std::int64_t count, StreamRef stream) {
  members_.front().optimizer->add_tokens(count, stream);
}

void OptimizerChain::add_tokens(std::span<const std::int64_t> count, StreamRef stream) {
  members_.front().optimizer->add_tokens(count, stream);
}

void OptimizerChain::make_room() {
  std::optional<StepReport> oldest;
  if (static_cast<int>(pending_.size()) == StepReports::depth_of(phases(0).device())) {
    oldest = std::move(pending_.front());
    pending_.pop_front();
  }
  for_each_member([&](StepPhases& member) { member.make_room(); });
  if (oldest) static_cast<void>(**oldest);
}

StepReport OptimizerChain::step(StreamRef stream) {
  for (std::size_t i = 0; i < members_.size(); ++i) phases(i).require_ready(stream);
  make_room();
  for_all([&](StepPhases& member) { member.measure(stream); });
  std::vector<StepPart> parts;
  for_all([&](StepPhases& member) { parts.push_back(member.part()); });
  phases(0).decide(parts, stream);
  // Every member's groups compare, and the error is that of those that found a difference.
  for_each_member([&](StepPhases& member) { member.compare_options(); });
  phases(0).require_agreed();
  // Why a member's report before the next one's update: it is complete, and waited for with a deadline, when
  // the messages of members up to its own are.
  std::vector<StepReport> reports;
  for_each_member([&](StepPhases& member) {
    member.update(stream);
    reports.push_back(member.report(stream));
  });
  StepReport report = united(std::move(reports));
  const Device device = phases(0).device();
  if (device.kind == DeviceKind::kHost) {
    static_cast<void>(*report);
  } else if (!is_capturing(device, stream)) {
    pending_.push_back(report);
  }
  return report;
}

StepReport OptimizerChain::last_report(StreamRef stream) {
  make_room();
  std::vector<StepReport> reports;
  for_all([&](StepPhases& member) { reports.push_back(member.last_report(stream)); });
  pending_.push_back(united(std::move(reports)));
  return pending_.back();
}

StepReport OptimizerChain::united(std::vector<StepReport> reports) const {
  return StepReport(std::make_shared<UnitedRecord>(std::move(reports),
                                                   members_.front().optimizer->phases().config().optimizer));
}

std::span<const float> OptimizerChain::loss_scale() const {
  return members_.front().optimizer->loss_scale();
}

}  // namespace mxopt
