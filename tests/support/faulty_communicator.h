// A communicator that forwards every call to another one, shows it to an observer, and breaks one of them.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <new>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "mxopt/collectives/communicator.h"

namespace mxopt::test {

enum class FaultKind {
  kThrow,     // the call throws a PeerError before it is issued; abort() of the group is left to the caller
  kFailWait,  // the call is issued, and every wait for it throws a PeerError
  kDelay,     // the call is issued `delay_ms` late
  kCorrupt,   // after the call is complete, the lowest bit of its first output byte is flipped
  kBadAlloc   // the call throws std::bad_alloc: a failure of this rank alone
};

/// Breaks the n-th call, counted from 0, of those with this traffic tag.
struct Fault {
  FaultKind kind = FaultKind::kThrow;
  Traffic traffic = Traffic::kControl;
  std::int64_t nth = 0;
  int delay_ms = 0;
};

/// What an observer sees of a call before it is issued. `whole` is the largest buffer of the call.
struct ObservedCall {
  std::string operation;
  Traffic traffic = Traffic::kControl;
  TypedSpan whole;
};

/// `inner` must outlive it. Groups split off from it are those of `inner`.
class FaultyCommunicator final : public Communicator {
 public:
  using Observer = std::function<void(const ObservedCall&)>;

  explicit FaultyCommunicator(Communicator& inner, std::vector<Fault> faults = {}, Observer observer = {})
      : inner_(inner), faults_(std::move(faults)), observer_(std::move(observer)) {}

  int rank() const override { return inner_.rank(); }
  int size() const override { return inner_.size(); }
  Device device() const override { return inner_.device(); }
  std::string describe() const override { return inner_.describe(); }
  void group_begin() override { inner_.group_begin(); }
  void group_end() override { inner_.group_end(); }
  std::unique_ptr<Communicator> split(int color, int key) override { return inner_.split(color, key); }
  void abort(const std::string& reason) noexcept override {
    ++aborts_;
    inner_.abort(reason);
  }
  Health health() override { return inner_.health(); }
  std::shared_ptr<Allocator> window_allocator() override { return inner_.window_allocator(); }
  PeerWindow open_window(const Buffer& buffer) override {
    return no_windows_.empty() ? inner_.open_window(buffer) : PeerWindow{{}, no_windows_, nullptr};
  }
  /// There are no windows from now on, for this reason.
  void refuse_windows(const std::string& reason) { no_windows_ = reason; }
  CopyRates measure_copy_rates() override {
    return rates_.has_value() ? *rates_ : inner_.measure_copy_rates();
  }
  /// What measure_copy_rates() says from now on.
  void set_copy_rates(const CopyRates& rates) { rates_ = rates; }

  /// Breaks one more call; fault.nth counts from now on.
  void arm(Fault fault) {
    fault.nth += seen_[static_cast<std::size_t>(fault.traffic)];
    faults_.push_back(fault);
  }
  int aborts() const { return aborts_; }

 protected:
  Work do_all_reduce(const Call& call, void* buffer) override {
    const TypedSpan span(buffer, call.dtype, call.elems);
    return forward(call, span, [&] { return inner_.all_reduce(span, call.op, call.traffic, call.stream); });
  }
  Work do_reduce_scatter(const Call& call, void* shard, void* input) override {
    const TypedSpan whole(input, call.dtype, call.elems * size());
    const TypedSpan part(shard, call.dtype, call.elems);
    return forward(call, whole,
                   [&] { return inner_.reduce_scatter(part, whole, call.op, call.traffic, call.stream); });
  }
  Work do_all_gather(const Call& call, void* output, const void* shard) override {
    const TypedSpan whole(output, call.dtype, call.elems * size());
    const ConstTypedSpan part(shard, call.dtype, call.elems);
    return forward(call, whole, [&] { return inner_.all_gather(whole, part, call.traffic, call.stream); });
  }
  Work do_all_to_all(const Call& call, void* output, const void* input) override {
    const TypedSpan whole(output, call.dtype, call.elems * size());
    const ConstTypedSpan from(input, call.dtype, call.elems * size());
    return forward(call, whole, [&] { return inner_.all_to_all(whole, from, call.traffic, call.stream); });
  }
  Work do_broadcast(const Call& call, void* buffer) override {
    const TypedSpan span(buffer, call.dtype, call.elems);
    return forward(call, span, [&] { return inner_.broadcast(span, call.root, call.traffic, call.stream); });
  }
  void do_barrier(const Call& call) override {
    forward(call, {}, [&] {
      inner_.barrier();
      return Work();
    });
  }

 private:
  class FailingWork final : public Work::State {
   public:
    FailingWork(Work work, PeerError error) : work_(std::move(work)), error_(std::move(error)) {}
    bool test() override {
      if (!work_.test()) return false;
      throw error_;
    }
    void wait() override {
      work_.wait();
      throw error_;
    }
    void join(StreamRef) override { wait(); }

   private:
    Work work_;
    PeerError error_;
  };

  class CorruptingWork final : public Work::State {
   public:
    CorruptingWork(Work work, TypedSpan whole) : work_(std::move(work)), whole_(whole) {}
    bool test() override {
      if (!work_.test()) return false;
      corrupt();
      return true;
    }
    void wait() override {
      work_.wait();
      corrupt();
    }
    void join(StreamRef) override { wait(); }

   private:
    void corrupt() {
      if (!std::exchange(done_, true) && whole_.elems > 0) whole_.byte_data()[0] ^= 1u;
    }
    Work work_;
    TypedSpan whole_;
    bool done_ = false;
  };

  template <class Issue>
  Work forward(const Call& call, TypedSpan whole, const Issue& issue) {
    if (observer_) observer_({std::string(call.operation), call.traffic, whole});
    const std::int64_t now = seen_[static_cast<std::size_t>(call.traffic)]++;
    for (const Fault& fault : faults_) {
      if (fault.traffic != call.traffic || fault.nth != now) continue;
      const PeerError error({.operation = call.signature(),
                             .sequence = call.sequence,
                             .elapsed_ms = 0,
                             .rank = rank(),
                             .culprit_rank = -1,
                             .host = "test",
                             .pid = 0,
                             .reason = "injected fault"});
      switch (fault.kind) {
        case FaultKind::kThrow:
          throw error;
        case FaultKind::kBadAlloc:
          throw std::bad_alloc();
        case FaultKind::kDelay:
          std::this_thread::sleep_for(std::chrono::milliseconds(fault.delay_ms));
          break;
        case FaultKind::kFailWait:
          return Work(std::make_shared<FailingWork>(issue(), error));
        case FaultKind::kCorrupt:
          return Work(std::make_shared<CorruptingWork>(issue(), whole));
      }
    }
    return issue();
  }

  Communicator& inner_;
  std::string no_windows_;
  std::optional<CopyRates> rates_;
  std::vector<Fault> faults_;
  Observer observer_;
  std::int64_t seen_[kTrafficKinds] = {};
  int aborts_ = 0;
};

}  // namespace mxopt::test
