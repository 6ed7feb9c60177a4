// A communicator that forwards every call to another one and counts what it carries.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "mxopt/collectives/communicator.h"

namespace mxopt {

struct TrafficCounts {
  std::int64_t operations = 0;
  std::int64_t bytes = 0;
};

/// bytes are those of the call's full buffer on this rank: size() shards for all_gather, all_to_all and
/// reduce_scatter, 0 for a barrier. Groups split off from it add to the same counts. `inner` must outlive it.
class TracedCommunicator final : public Communicator {
 public:
  explicit TracedCommunicator(Communicator& inner);

  TrafficCounts counts(Traffic traffic) const;
  /// Of one operation: "all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast",
  /// "barrier".
  TrafficCounts counts(Traffic traffic, std::string_view operation) const;
  TrafficCounts total() const;

  /// From now on keeps the signature of every call, in order: equal on all ranks unless one is out of step.
  void record_signatures();
  const std::vector<std::string>& signatures() const;

  /// Forgets counts and signatures; goes on recording if it was.
  void reset();

  int rank() const override { return inner_.rank(); }
  int size() const override { return inner_.size(); }
  Device device() const override { return inner_.device(); }
  std::string describe() const override { return inner_.describe(); }

  void group_begin() override { inner_.group_begin(); }
  void group_end() override { inner_.group_end(); }
  std::unique_ptr<Communicator> split(int color, int key) override;
  void abort(const std::string& reason) noexcept override { inner_.abort(reason); }
  Health health() override { return inner_.health(); }
  std::shared_ptr<Allocator> window_allocator() override { return inner_.window_allocator(); }
  PeerWindow open_window(const Buffer& buffer) override { return inner_.open_window(buffer); }
  CopyRates measure_copy_rates() override { return inner_.measure_copy_rates(); }

 protected:
  Work do_all_reduce(const Call& call, void* buffer) override;
  Work do_reduce_scatter(const Call& call, void* shard, void* input) override;
  Work do_all_gather(const Call& call, void* output, const void* shard) override;
  Work do_all_to_all(const Call& call, void* output, const void* input) override;
  Work do_broadcast(const Call& call, void* buffer) override;
  void do_barrier(const Call& call) override;

 private:
  struct Trace {
    std::array<std::map<std::string_view, TrafficCounts>, kTrafficKinds> counts;
    bool recording = false;
    std::vector<std::string> signatures;
  };

  TracedCommunicator(std::unique_ptr<Communicator> inner, std::shared_ptr<Trace> trace);
  void count(const Call& call, std::int64_t shards);

  std::unique_ptr<Communicator> owned_;  // only of a split group
  Communicator& inner_;
  std::shared_ptr<Trace> trace_;
};

}  // namespace mxopt
