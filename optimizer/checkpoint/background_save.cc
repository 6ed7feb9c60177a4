#include "mxopt/optimizer/checkpoint/background_save.h"

#include <chrono>
#include <future>
#include <utility>

#include "mxopt/params/check.h"

namespace mxopt {

struct BackgroundSave::Flight {
  CheckpointJob job;
  std::function<CheckpointContents()> make;
  std::future<SavedCheckpoint> saved;  // its destructor waits for the thread
};

BackgroundSave::BackgroundSave() = default;
BackgroundSave::~BackgroundSave() = default;

void BackgroundSave::start(CheckpointJob job, CheckpointContents contents, FileHook* hook) {
  const auto own = std::make_shared<CheckpointContents>(std::move(contents));
  start(
      std::move(job), [own] { return *own; }, hook);
}

void BackgroundSave::start(CheckpointJob job, std::function<CheckpointContents()> make, FileHook* hook) {
  MXOPT_CHECK(flight_ == nullptr, "a save of step " << job.step << " can not start: that of step "
                                                    << flight_->job.step << " has not been waited for");
  auto flight = std::make_unique<Flight>();
  flight->job = std::move(job);
  flight->make = std::move(make);
  flight->saved = std::async(
      std::launch::async, [own = flight.get(), hook] { return write_checkpoint(own->job, own->make, hook); });
  flight_ = std::move(flight);
}

bool BackgroundSave::done() const {
  return flight_ == nullptr || flight_->saved.wait_for(std::chrono::seconds(0)) == std::future_status::ready;
}

SavedCheckpoint BackgroundSave::wait() {
  MXOPT_CHECK(flight_ != nullptr, "no save was started");
  const std::unique_ptr<Flight> flight = std::move(flight_);
  return flight->saved.get();
}

}  // namespace mxopt
