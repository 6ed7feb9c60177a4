// A communicator over device memory that carries the bytes through a host transport: several ranks can share
// one device. Every call is complete when it returns.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "mxopt/collectives/communicator.h"
#include "mxopt/collectives/host_exchange.h"

namespace mxopt::test {

/// `host` must outlive it; groups split off from it are those of `host`.
class DeviceOverHost final : public Communicator {
 public:
  DeviceOverHost(Communicator& host, Device device) : host_(host), device_(device) {}

  int rank() const override { return host_.rank(); }
  int size() const override { return host_.size(); }
  Device device() const override { return device_; }
  std::string describe() const override { return "through the host: " + host_.describe(); }
  void group_begin() override {}
  void group_end() override {}
  std::unique_ptr<Communicator> split(int color, int key) override { return host_.split(color, key); }
  void abort(const std::string& reason) noexcept override { host_.abort(reason); }
  Health health() override { return host_.health(); }
  std::shared_ptr<Allocator> window_allocator() override { return default_allocator(device_); }
  PeerWindow open_window(const Buffer& buffer) override { return exchange_addresses(host_, buffer); }
  CopyRates measure_copy_rates() override { return {}; }

 protected:
  Work do_all_reduce(const Call& call, void* buffer) override {
    Copy copy(*this, call, buffer, call.elems);
    host_.all_reduce(copy.span(), call.op, call.traffic).wait();
    copy.store(buffer);
    return done(call);
  }
  Work do_reduce_scatter(const Call& call, void* shard, void* input) override {
    Copy whole(*this, call, input, call.elems * size());
    const TypedSpan own = whole.span().sub(rank() * call.elems, call.elems);
    host_.reduce_scatter(own, whole.span(), call.op, call.traffic).wait();
    copy_bytes(shard, own.data, own.bytes(), device_, call.stream);
    synchronize(device_, call.stream);
    return done(call);
  }
  Work do_all_gather(const Call& call, void* output, const void* shard) override {
    const Copy own(*this, call, shard, call.elems);
    Copy whole(*this, call, output, call.elems * size());
    host_.all_gather(whole.span(), own.span(), call.traffic).wait();
    whole.store(output);
    return done(call);
  }
  Work do_all_to_all(const Call& call, void* output, const void* input) override {
    const Copy from(*this, call, input, call.elems * size());
    Copy to(*this, call, output, call.elems * size());
    host_.all_to_all(to.span(), from.span(), call.traffic).wait();
    to.store(output);
    return done(call);
  }
  Work do_broadcast(const Call& call, void* buffer) override {
    Copy copy(*this, call, buffer, call.elems);
    host_.broadcast(copy.span(), call.root, call.traffic).wait();
    copy.store(buffer);
    return done(call);
  }
  void do_barrier(const Call&) override { host_.barrier(); }

 private:
  /// Host copy of device memory.
  class Copy {
   public:
    Copy(const DeviceOverHost& owner, const Call& call, const void* from, std::int64_t elems)
        : owner_(owner),
          stream_(call.stream),
          bytes_(static_cast<std::size_t>(elems * dtype_bytes(call.dtype))),
          span_(bytes_.data(), call.dtype, elems) {
      copy_bytes(bytes_.data(), from, span_.bytes(), owner_.device_, stream_);
      synchronize(owner_.device_, stream_);
    }
    TypedSpan span() const { return span_; }
    void store(void* to) const {
      copy_bytes(to, bytes_.data(), span_.bytes(), owner_.device_, stream_);
      synchronize(owner_.device_, stream_);
    }

   private:
    const DeviceOverHost& owner_;
    StreamRef stream_;
    std::vector<std::uint8_t> bytes_;
    TypedSpan span_;
  };

  class StreamWork final : public Work::State {
   public:
    explicit StreamWork(Event event) : event_(std::move(event)) {}
    bool test() override { return event_.passed(); }
    void wait() override { event_.wait(); }
    void join(StreamRef stream) override { event_.join(stream); }

   private:
    Event event_;
  };

  Work done(const Call& call) const {
    Event event(device_);
    event.record(call.stream);
    return Work(std::make_shared<StreamWork>(std::move(event)));
  }

  Communicator& host_;
  Device device_;
};

}  // namespace mxopt::test
