#include "mxopt/optimizer/step_reports.h"

#include <exception>
#include <type_traits>
#include <utility>

#include "mxopt/params/check.h"

namespace mxopt {

static_assert(std::is_trivially_copyable_v<StepOutcome> && std::is_trivially_copyable_v<NormOutcome> &&
              std::is_trivially_copyable_v<ParamSums>);

namespace {

/// Spans of the sizes of `shape`, back to back from `base` on; returns their end. What is aligned to 8 bytes
/// comes first.
std::uint8_t* lay_out(std::uint8_t* base, const StepReports::Result& shape, StepReports::Result& result) {
  const auto take = [&](auto span) {
    const decltype(span) taken(reinterpret_cast<decltype(span.data())>(base), span.size());
    base += span.size_bytes();
    return taken;
  };
  result.outcome = reinterpret_cast<const StepOutcome*>(base);
  base += sizeof(StepOutcome);
  result.norms = take(shape.norms);
  result.params = take(shape.params);
  result.status = take(shape.status);
  result.local_status = take(shape.local_status);
  return base;
}

}  // namespace

class StepReports::Pending final : public StepReport::Source {
 public:
  Pending(StepRecord record, Slot& slot, std::array<Work, 3> last, const StepReports& owner)
      : record_(std::move(record)), slot_(&slot), last_(std::move(last)), owner_(&owner) {}

  const StepRecord& read() override {
    complete();
    if (problem_ != nullptr) std::rethrow_exception(problem_);
    return record_;
  }

  /// Waits for the step, then keeps what is to be thrown. A PeerError leaves the report as it was.
  void complete() {
    if (slot_ == nullptr) return;
    for (Work& work : last_) work.wait();
    slot_->written.wait();
    try {
      owner_->complete_(record_, slot_->result);
    } catch (const ContractError&) {
      problem_ = std::current_exception();
    }
    slot_ = nullptr;
    last_ = {};
  }

  void give_up() {
    if (slot_ == nullptr) return;
    slot_ = nullptr;
    problem_ = std::make_exception_ptr(
        ContractError("the report of a step was read after its optimizer was destroyed; read it before"));
  }

 private:
  StepRecord record_;
  Slot* slot_;  // null: complete
  std::array<Work, 3> last_;
  const StepReports* owner_;
  std::exception_ptr problem_;
};

StepReports::StepReports(Device device, const Result& shape, Complete complete)
    : device_(device), complete_(std::move(complete)) {
  const auto allocator = pinned_allocator(device);
  const auto bytes =
      static_cast<std::int64_t>(sizeof(StepOutcome) + shape.norms.size_bytes() + shape.params.size_bytes() +
                                shape.status.size_bytes() + shape.local_status.size_bytes());
  for (int i = 0; i < depth_of(device); ++i) {
    Slot slot = {Buffer(bytes, Device{}, allocator), {}, Event(device), nullptr};
    lay_out(slot.memory.data(), shape, slot.result);
    slots_.push_back(std::move(slot));
  }
}

StepReports::~StepReports() {
  for (Slot& slot : slots_) {
    if (slot.pending != nullptr) slot.pending->give_up();
  }
}

void StepReports::make_room() {
  Slot& slot = slots_[next_];
  if (slot.pending == nullptr) return;
  slot.pending->complete();
  const std::shared_ptr<Pending> oldest = std::move(slot.pending);
  slot.pending = nullptr;
  oldest->read();
}

StepReport StepReports::add(StepRecord record, const Result& result, std::array<Work, 3> last,
                            StreamRef stream) {
  Slot& slot = slots_[next_];
  next_ = (next_ + 1) % slots_.size();
  const auto receive = [&](auto to, auto from) {
    MXOPT_CHECK_EQ(from.size(), to.size());
    copy_bytes(const_cast<void*>(static_cast<const void*>(to.data())), from.data(),
               static_cast<std::int64_t>(from.size_bytes()), device_, stream);
  };
  receive(std::span(slot.result.outcome, 1), std::span(result.outcome, 1));
  receive(slot.result.norms, result.norms);
  receive(slot.result.params, result.params);
  receive(slot.result.status, result.status);
  receive(slot.result.local_status, result.local_status);
  slot.written.record(stream);
  slot.pending = std::make_shared<Pending>(std::move(record), slot, std::move(last), *this);
  return StepReport(slot.pending);
}

void StepReports::forget() {
  settle();
  for (Slot& slot : slots_) slot.pending = nullptr;
}

void StepReports::settle() {
  // The oldest first: that is the order in which they become complete.
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    Slot& slot = slots_[(next_ + i) % slots_.size()];
    if (slot.pending != nullptr) slot.pending->complete();
  }
}

}  // namespace mxopt
