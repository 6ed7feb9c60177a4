// Outcomes of steps on their way from the device to the host.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "mxopt/collectives/communicator.h"
#include "mxopt/optimizer/step_report.h"
#include "mxopt/optimizer/step_state.h"
#include "mxopt/params/memory.h"

namespace mxopt {

class StepReports {
 public:
  /// What comes back from a step beside the record.
  struct Result {
    const StepOutcome* outcome = nullptr;
    std::span<const NormOutcome> norms;
    std::span<const ParamSums> params;
    std::span<const std::uint8_t> status;
    std::span<const std::uint8_t> local_status;  // see GradSync
  };
  /// Completes a record from what came back; throws ContractError for what the trainer must not miss.
  using Complete = std::function<void(StepRecord& record, const Result& result)>;

  /// Steps that may be under way before a call waits for the oldest: 8 on devices, none on the host.
  static int depth_of(Device device) { return device.kind == DeviceKind::kHost ? 1 : 8; }

  /// shape  of every step's result: only the sizes of its spans matter.
  StepReports(Device device, const Result& shape, Complete complete);
  /// Reports that are held and not complete say that the optimizer is gone.
  ~StepReports();
  StepReports(const StepReports&) = delete;
  StepReports& operator=(const StepReports&) = delete;

  /// Before a step: completes the report whose memory the step will use, and throws what it found. Every rank
  /// sees the same steps here, in the same call.
  void make_room();

  /// Enqueues the copies of `result`.
  /// last  of each group of ranks, a call whose end means that no peer is missing; they are waited for first,
  ///       for the sake of their deadlines.
  StepReport add(StepRecord record, const Result& result, std::array<Work, 3> last, StreamRef stream);

  /// Completes all reports, and drops what was found by those that nobody has read.
  void forget();

  /// Completes all reports; what they found is thrown when they are read.
  void settle();

 private:
  class Pending;
  struct Slot {
    Buffer memory;  // host memory that the device reaches, where `result` lies
    Result result;
    Event written;
    std::shared_ptr<Pending> pending;
  };

  Device device_;
  Complete complete_;
  std::vector<Slot> slots_;
  std::size_t next_ = 0;
};

}  // namespace mxopt
