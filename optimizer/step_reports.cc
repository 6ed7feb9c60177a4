#include "mxopt/optimizer/step_reports.h"

#include <exception>
#include <type_traits>
#include <utility>

#include "mxopt/params/check.h"

namespace mxopt {

static_assert(std::is_trivially_copyable_v<StepOutcome>);

class StepReports::Pending final : public StepReport::Source {
 public:
  Pending(StepRecord record, Slot& slot, Work last, const StepReports& owner)
      : record_(std::move(record)), slot_(&slot), last_(std::move(last)), owner_(&owner) {}

  const StepRecord& read() override {
    complete();
    if (problem_ != nullptr) std::rethrow_exception(problem_);
    return record_;
  }

  /// Waits for the step, then keeps what is to be thrown. A PeerError leaves the report as it was.
  void complete() {
    if (slot_ == nullptr) return;
    last_.wait();
    slot_->written.wait();
    const auto& outcome = *reinterpret_cast<const StepOutcome*>(slot_->memory.data());
    const std::span<const std::uint8_t> all = slot_->memory.as<std::uint8_t>();
    try {
      owner_->complete_(record_, outcome, all.subspan(sizeof(StepOutcome)));
    } catch (const ContractError&) {
      problem_ = std::current_exception();
    }
    slot_ = nullptr;
    last_ = Work();
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
  Work last_;
  const StepReports* owner_;
  std::exception_ptr problem_;
};

StepReports::StepReports(Device device, std::int64_t status_bytes, Complete complete)
    : device_(device), status_bytes_(status_bytes), complete_(std::move(complete)) {
  const auto allocator = pinned_allocator(device);
  for (int i = 0; i < depth_of(device); ++i) {
    slots_.push_back(
        {Buffer(static_cast<std::int64_t>(sizeof(StepOutcome)) + status_bytes, Device{}, allocator),
         Event(device), nullptr});
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

StepReport StepReports::add(StepRecord record, const StepOutcome* outcome,
                            std::span<const std::uint8_t> status, std::span<const std::uint8_t> local_status,
                            Work last, StreamRef stream) {
  const auto bytes = static_cast<std::int64_t>(status.size());
  const auto local_bytes = static_cast<std::int64_t>(local_status.size());
  MXOPT_CHECK_EQ(bytes + local_bytes, status_bytes_);
  Slot& slot = slots_[next_];
  next_ = (next_ + 1) % slots_.size();
  copy_bytes(slot.memory.data(), outcome, sizeof(StepOutcome), device_, stream);
  copy_bytes(slot.memory.data() + sizeof(StepOutcome), status.data(), bytes, device_, stream);
  copy_bytes(slot.memory.data() + sizeof(StepOutcome) + bytes, local_status.data(), local_bytes, device_,
             stream);
  slot.written.record(stream);
  slot.pending = std::make_shared<Pending>(std::move(record), slot, std::move(last), *this);
  return StepReport(slot.pending);
}

void StepReports::settle() {
  // The oldest first: that is the order in which they become complete.
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    Slot& slot = slots_[(next_ + i) % slots_.size()];
    if (slot.pending != nullptr) slot.pending->complete();
  }
}

}  // namespace mxopt
