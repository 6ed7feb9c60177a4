// The group of one rank, on any device: nothing moves but copies, which are made in the order of the call's
// stream.
#pragma once

#include "mxopt/collectives/communicator.h"

namespace mxopt {

class SelfCommunicator final : public Communicator {
 public:
  explicit SelfCommunicator(Device device = {}) : device_(device) {}

  int rank() const override { return 0; }
  int size() const override { return 1; }
  Device device() const override { return device_; }
  std::string describe() const override { return "self, rank 0 of 1"; }

  void group_begin() override {}
  void group_end() override {}
  std::unique_ptr<Communicator> split(int color, int key) override;
  /// Later calls throw PeerError, as on any other transport.
  void abort(const std::string& reason) noexcept override;
  Health health() override;
  std::shared_ptr<Allocator> window_allocator() override { return default_allocator(device_); }
  PeerWindow open_window(const Buffer& buffer) override { return {{buffer.data()}, "", nullptr}; }
  CopyRates measure_copy_rates() override { return {}; }

 protected:
  Work do_all_reduce(const Call& call, void* buffer) override;
  Work do_reduce_scatter(const Call& call, void* shard, void* input) override;
  Work do_all_gather(const Call& call, void* output, const void* shard) override;
  Work do_all_to_all(const Call& call, void* output, const void* input) override;
  Work do_broadcast(const Call& call, void* buffer) override;
  void do_barrier(const Call& call) override;

 private:
  void check_alive(const Call& call) const;
  void copy(const Call& call, void* to, const void* from) const;
  /// Complete when the stream's work so far is.
  Work work_of(const Call& call) const;

  Device device_;
  bool aborted_ = false;
  std::string reason_;
};

}  // namespace mxopt
