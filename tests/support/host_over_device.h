// A communicator of host memory over one of device memory, so that tests written for the host try it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "mxopt/collectives/communicator.h"
#include "mxopt/params/memory.h"

namespace mxopt::test {

/// Device memory for the buffers of the calls, taken in turns: what is outstanding must fit. Allocated once,
/// since freeing device memory waits for the device, and so perhaps for another rank of this thread's
/// process.
class StagingArena {
 public:
  explicit StagingArena(Device device)
      : stream_(device), memory_(kBytes, device, default_allocator(device)) {}

  StreamRef stream() const { return stream_.ref(); }

  /// A copy of the host memory between guard bytes.
  std::uint8_t* upload(TypedSpan host) {
    const std::int64_t bytes = host.bytes() + 2 * kGuardBytes;
    const std::int64_t whole = (bytes + kGuardBytes - 1) / kGuardBytes * kGuardBytes;
    EXPECT_LE(whole, kBytes);
    if (used_ + whole > kBytes) used_ = 0;
    std::uint8_t* const begin = memory_.data() + used_;
    used_ += whole;
    std::vector<std::uint8_t> all(static_cast<std::size_t>(bytes), kGuard);
    if (host.elems > 0) std::copy_n(host.byte_data(), host.bytes(), all.begin() + kGuardBytes);
    copy_bytes(begin, all.data(), bytes, memory_.device(), stream());
    synchronize(memory_.device(), stream());
    return begin + kGuardBytes;
  }

  void download(TypedSpan host, const std::uint8_t* data) const {
    std::vector<std::uint8_t> all(static_cast<std::size_t>(host.bytes() + 2 * kGuardBytes));
    copy_bytes(all.data(), data - kGuardBytes, static_cast<std::int64_t>(all.size()), memory_.device(),
               stream());
    synchronize(memory_.device(), stream());
    const auto is_guard = [](std::uint8_t byte) { return byte == kGuard; };
    EXPECT_TRUE(std::all_of(all.begin(), all.begin() + kGuardBytes, is_guard)) << "written before a buffer";
    EXPECT_TRUE(std::all_of(all.end() - kGuardBytes, all.end(), is_guard)) << "written after a buffer";
    if (host.elems > 0) std::copy_n(all.begin() + kGuardBytes, host.bytes(), host.byte_data());
  }

 private:
  static constexpr std::int64_t kBytes = std::int64_t{32} << 20;
  static constexpr std::int64_t kGuardBytes = 256;
  static constexpr std::uint8_t kGuard = 0xA5;

  Stream stream_;
  Buffer memory_;
  std::int64_t used_ = 0;
};

/// Calls stay asynchronous: results come back to the host when their Work is tested or waited for.
class HostOverDevice final : public Communicator {
 public:
  explicit HostOverDevice(std::unique_ptr<Communicator> inner)
      : arena_(std::make_shared<StagingArena>(inner->device())), inner_(std::move(inner)) {}

  int rank() const override { return inner_->rank(); }
  int size() const override { return inner_->size(); }
  Device device() const override { return {}; }
  std::string describe() const override { return inner_->describe(); }
  void group_begin() override { inner_->group_begin(); }
  void group_end() override { inner_->group_end(); }
  std::unique_ptr<Communicator> split(int color, int key) override {
    return std::unique_ptr<Communicator>(new HostOverDevice(arena_, inner_->split(color, key)));
  }
  void abort(const std::string& reason) noexcept override { inner_->abort(reason); }
  Health health() override { return inner_->health(); }
  std::shared_ptr<Allocator> window_allocator() override { return nullptr; }
  PeerWindow open_window(const Buffer&) override { return {{}, "the buffers are of the host", nullptr}; }
  CopyRates measure_copy_rates() override { return {}; }

 protected:
  Work do_all_reduce(const Call& call, void* buffer) override {
    const TypedSpan host(buffer, call.dtype, call.elems);
    std::uint8_t* const data = arena_->upload(host);
    return staged(inner_->all_reduce(on_device(host, data), call.op, call.traffic, arena_->stream()), host,
                  data);
  }
  Work do_reduce_scatter(const Call& call, void* shard, void* input) override {
    const TypedSpan whole(input, call.dtype, call.elems * size());
    const TypedSpan part(shard, call.dtype, call.elems);
    std::uint8_t* const whole_data = arena_->upload(whole);
    const bool in_place = is_inside(part, whole);
    std::uint8_t* const data =
        in_place ? whole_data + (part.byte_data() - whole.byte_data()) : arena_->upload(part);
    Work work = inner_->reduce_scatter(on_device(part, data), on_device(whole, whole_data), call.op,
                                       call.traffic, arena_->stream());
    return in_place ? staged(work, whole, whole_data) : staged(work, part, data);
  }
  Work do_all_gather(const Call& call, void* output, const void* shard) override {
    const TypedSpan whole(output, call.dtype, call.elems * size());
    const TypedSpan part(const_cast<void*>(shard), call.dtype, call.elems);
    std::uint8_t* const whole_data = arena_->upload(whole);
    std::uint8_t* const data =
        is_inside(part, whole) ? whole_data + (part.byte_data() - whole.byte_data()) : arena_->upload(part);
    return staged(inner_->all_gather(on_device(whole, whole_data), on_device(part, data), call.traffic,
                                     arena_->stream()),
                  whole, whole_data);
  }
  Work do_all_to_all(const Call& call, void* output, const void* input) override {
    const TypedSpan to(output, call.dtype, call.elems * size());
    const TypedSpan from(const_cast<void*>(input), call.dtype, call.elems * size());
    std::uint8_t* const to_data = arena_->upload(to);
    std::uint8_t* const from_data = arena_->upload(from);
    return staged(inner_->all_to_all(on_device(to, to_data), on_device(from, from_data), call.traffic,
                                     arena_->stream()),
                  to, to_data);
  }
  Work do_broadcast(const Call& call, void* buffer) override {
    const TypedSpan host(buffer, call.dtype, call.elems);
    std::uint8_t* const data = arena_->upload(host);
    return staged(inner_->broadcast(on_device(host, data), call.root, call.traffic, arena_->stream()), host,
                  data);
  }
  void do_barrier(const Call&) override { inner_->barrier(); }

 private:
  class StagedWork final : public Work::State {
   public:
    StagedWork(Work work, std::function<void()> bring_back)
        : work_(std::move(work)), bring_back_(std::move(bring_back)) {}
    bool test() override {
      if (!work_.test()) return false;
      finish();
      return true;
    }
    void wait() override {
      work_.wait();
      finish();
    }
    void join(StreamRef) override { wait(); }

   private:
    void finish() {
      if (bring_back_) std::exchange(bring_back_, nullptr)();
    }
    Work work_;
    std::function<void()> bring_back_;
  };

  HostOverDevice(std::shared_ptr<StagingArena> arena, std::unique_ptr<Communicator> inner)
      : arena_(std::move(arena)), inner_(std::move(inner)) {}

  static bool is_inside(TypedSpan part, TypedSpan whole) {
    return part.elems > 0 && part.byte_data() >= whole.byte_data() &&
           part.byte_data() < whole.byte_data() + whole.bytes();
  }
  static TypedSpan on_device(TypedSpan host, std::uint8_t* data) { return {data, host.dtype, host.elems}; }

  Work staged(Work work, TypedSpan host, const std::uint8_t* data) const {
    return Work(std::make_shared<StagedWork>(std::move(work),
                                             [arena = arena_, host, data] { arena->download(host, data); }));
  }

  std::shared_ptr<StagingArena> arena_;
  std::unique_ptr<Communicator> inner_;
};

}  // namespace mxopt::test
