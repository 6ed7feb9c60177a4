// The group of one rank: every call is complete when it returns.
#pragma once

#include "mxopt/collectives/communicator.h"

namespace mxopt {

class SelfCommunicator final : public Communicator {
 public:
  int rank() const override { return 0; }
  int size() const override { return 1; }
  DeviceKind device_kind() const override { return DeviceKind::kHost; }
  std::string describe() const override { return "self, rank 0 of 1"; }

  void group_begin() override {}
  void group_end() override {}
  std::unique_ptr<Communicator> split(int color, int key) override;
  /// Later calls throw PeerError, as on any other transport.
  void abort(const std::string& reason) noexcept override;
  Health health() override;
  std::vector<void*> peer_bases(const Buffer&) override { return {}; }

 protected:
  Work do_all_reduce(const Call& call, void* buffer) override;
  Work do_reduce_scatter(const Call& call, void* shard, void* input) override;
  Work do_all_gather(const Call& call, void* output, const void* shard) override;
  Work do_broadcast(const Call& call, void* buffer) override;
  void do_barrier(const Call& call) override;

 private:
  void check_alive(const Call& call) const;

  bool aborted_ = false;
  std::string reason_;
};

}  // namespace mxopt
