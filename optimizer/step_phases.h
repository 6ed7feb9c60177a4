// One step of one optimizer, in the pieces between which the optimizers of a chain meet.
#pragma once

#include <cstdint>
#include <exception>
#include <span>
#include <string>

#include "mxopt/optimizer/config.h"
#include "mxopt/optimizer/parallel_groups.h"
#include "mxopt/optimizer/param_groups.h"
#include "mxopt/optimizer/step_report.h"
#include "mxopt/optimizer/step_scalars.h"
#include "mxopt/optimizer/step_state.h"
#include "mxopt/params/check.h"
#include "mxopt/params/memory.h"

namespace mxopt {

/// The first member of a chain counts the tokens of all.
enum class ChainRole { kNone, kFirst, kOther };

class StepPhases {
 public:
  virtual ~StepPhases() = default;

  // The pieces, in order.

  /// Throws ContractError where the step can not begin. Nothing was changed or sent.
  virtual void require_ready(StreamRef stream) = 0;
  /// Completes the report whose memory the step will use, and throws what it found.
  virtual void make_room() = 0;
  /// Reduced gradients, and their statistics summed over all ranks.
  virtual void measure(StreamRef stream) = 0;
  virtual StepPart part() const = 0;
  /// One decision, with these parts and this one's kernels.
  virtual void decide(std::span<const StepPart> parts, StreamRef stream) = 0;
  // On the host, where ranks were told different things; a device's report says so.

  /// Collective: throws where it were ranks of this one's groups, naming them.
  virtual void compare_options() = 0;
  /// Throws on every rank.
  virtual void require_agreed() = 0;
  /// Weights, and their gather.
  virtual void update(StreamRef stream) = 0;
  virtual StepReport report(StreamRef stream) = 0;

  // Beside the steps.

  virtual StepReport last_report(StreamRef stream) = 0;
  /// Makes the peers' waits fail, on all communicators.
  virtual void abort(const std::string& reason) noexcept = 0;
  /// Whether steps are those of a chain, which alone may call the pieces then.
  virtual void set_chained(ChainRole role) = 0;
  virtual ChainRole chain_role() const = 0;
  virtual const Config& config() const = 0;
  virtual Device device() const = 0;
  virtual const ParallelGroups& groups() const = 0;
  virtual std::int64_t steps_taken() = 0;
  virtual void set_steps_taken(std::int64_t steps) = 0;
  /// Scalars and counters of this one become those of another.
  virtual void copy_state(StepPhases& from) = 0;
  virtual const StepScalars& scalars() const = 0;
  /// Later work of `stream` waits for all that was enqueued, and for copies that are being made of the state.
  virtual void join_all(StreamRef stream) = 0;
  virtual std::int64_t calls() = 0;
  virtual std::span<const NormGroup> norms() const = 0;
  /// Collective over all ranks: the sum, modulo 2^64.
  virtual std::int64_t sum_over_ranks(std::int64_t value) = 0;
};

/// Runs `body`. A local failure makes the peers fail too instead of wait. A PeerError
/// is no local failure: it comes to every rank by itself, and under MPI abort() would end the process before
/// the caller could report it. Neither is a ContractError, which is thrown before a call sends anything, or
/// on every rank alike.
template <class Abort, class Body>
auto aborting(const Abort& abort, const Body& body) {
  try {
    return body();
  } catch (const PeerError&) {
    throw;
  } catch (const ContractError&) {
    throw;
  } catch (const std::exception& error) {
    abort(error.what());
    throw;
  }
}

}  // namespace mxopt
