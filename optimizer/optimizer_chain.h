// Several optimizers that take their steps together: dense and expert params, say, whose state is sharded
// over different ranks.
//
// One norm over all params, one decision to take or skip, one loss scale, one count of steps. The norm is the
// exact sum of all squares where all members' gradients have one divisor: sums, tokens, or means that are all
// made in the reduction or all in the update; else members' sums are added in FP64. A chain is used by the
// thread that uses its members, and its calls are collective like theirs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <span>
#include <string>
#include <vector>

#include "mxopt/optimizer/distributed_adam.h"
#include "mxopt/optimizer/step_report.h"
#include "mxopt/params/memory.h"

namespace mxopt {

class OptimizerChain {
 public:
  struct Member {
    std::string name;
    DistributedAdam* optimizer = nullptr;  // borrowed; must outlive the chain
  };

  /// Collective over all groups of all members, which must be the same ranks for each member. While the chain
  /// lives, steps are its own: the members' step(), last_report() and set_steps_taken() throw.
  ///
  /// members  1 to 8, in the same order on every rank, on one device. The first one's tokens count, its lr is
  ///          that of the reports, and the others' loss scale and counters become its own. Over NCCL,
  ///          members' calls of grad_ready() must come in one order on all ranks, since their messages do not
  ///          wait for each other.
  /// Throws   ContractError on every rank when members can not decide together: another clip_grad, skip_norm,
  ///          max_consecutive_skips, loss_scale or grad_reduce, other ranks, means over another number of
  ///          them, other steps taken, a norm_group that two of them have, or a member of another chain.
  explicit OptimizerChain(std::vector<Member> members);
  ~OptimizerChain();
  OptimizerChain(const OptimizerChain&) = delete;
  OptimizerChain& operator=(const OptimizerChain&) = delete;

  /// What DistributedAdam's calls of the same names do, for every member, in order.
  std::vector<std::string> publish(StreamRef stream = {});
  void begin_backward(bool last_micro_batch = true);
  void done_reading(StreamRef stream = {});
  void set_steps_taken(std::int64_t steps);
  std::int64_t steps_taken() const;

  /// See DistributedAdam. Members' gradients are all divided by these tokens.
  void add_tokens(std::int64_t count, StreamRef stream = {});
  void add_tokens(std::span<const std::int64_t> count, StreamRef stream = {});

  /// One step of all members, or a skip of all on every rank. As DistributedAdam::step(); the report has the
  /// params, norm groups, launches and times of all members.
  StepReport step(StreamRef stream = {});
  StepReport last_report(StreamRef stream = {});

  /// The one loss scale; [1] fp32 on the members' device.
  std::span<const float> loss_scale() const;

 private:
  StepPhases& phases(std::size_t member) const { return members_[member].optimizer->phases(); }
  void require_one_decision() const;
  void require_equal_ranks(const std::string& problem) const;
  /// Before a step: the report that is `depth` steps old is read, so that what it found is not missed.
  void make_room();
  StepReport united(std::vector<StepReport> reports) const;
  /// Runs `body` for every member in order.
  template <class Body>
  void for_all(const Body& body);
  /// The same to the last member also where one throws a ContractError; the first one is thrown then.
  template <class Body>
  void for_each_member(const Body& body);

  std::vector<Member> members_;
  std::deque<StepReport> pending_;
};

}  // namespace mxopt
