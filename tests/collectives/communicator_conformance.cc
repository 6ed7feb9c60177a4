#include "communicator_conformance.h"

#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <random>
#include <span>
#include <thread>
#include <type_traits>

#include <gtest/gtest.h>

#include "support/exact_inputs.h"

#include "mxopt/collectives/communicator.h"
#include "mxopt/params/bf16.h"

namespace mxopt::test {

namespace {

constexpr std::int64_t kConformanceSizes[] = {0, 1, 7, 31, 32, 33, 1000};

/// A buffer preset to 0xEE, between guard bytes that must stay 0xEE.
template <class T>
class Guarded {
 public:
  explicit Guarded(std::int64_t elems)
      : elems_(elems), bytes_(static_cast<std::size_t>(elems) * sizeof(T) + 2 * kGuard, 0xEE) {}
  ~Guarded() {
    for (std::size_t i = 0; i < kGuard; ++i) {
      EXPECT_EQ(bytes_[i], 0xEE) << "byte " << kGuard - i << " before the buffer was written";
      EXPECT_EQ(bytes_[bytes_.size() - 1 - i], 0xEE)
          << "byte " << kGuard - i << " after the buffer was written";
    }
  }
  Guarded(const Guarded&) = delete;
  Guarded& operator=(const Guarded&) = delete;

  std::span<T> all() {
    return {reinterpret_cast<T*>(bytes_.data() + kGuard), static_cast<std::size_t>(elems_)};
  }
  std::span<T> part(std::int64_t begin, std::int64_t count) {
    return all().subspan(static_cast<std::size_t>(begin), static_cast<std::size_t>(count));
  }
  T& operator[](std::int64_t i) { return all()[static_cast<std::size_t>(i)]; }

 private:
  static constexpr std::size_t kGuard = 64;
  std::int64_t elems_;
  std::vector<std::uint8_t> bytes_;
};

template <class T>
ReduceOp exact_op() {
  return std::is_same_v<T, std::uint8_t> ? ReduceOp::kMax : ReduceOp::kSum;
}

/// Calls check(T{}) for every element type.
template <class Check>
void for_every_type(Check check) {
  check(float{});
  check(Bf16{});
  check(std::int64_t{});
  check(std::uint8_t{});
}

void knows_its_place_and_its_health(Communicator& comm) {
  EXPECT_GE(comm.rank(), 0);
  EXPECT_LT(comm.rank(), comm.size());
  EXPECT_EQ(comm.device(), Device{});
  EXPECT_NE(
      comm.describe().find("rank " + std::to_string(comm.rank()) + " of " + std::to_string(comm.size())),
      std::string::npos)
      << comm.describe();
  const std::int64_t before = comm.health().calls;
  comm.barrier();
  const Health health = comm.health();
  EXPECT_TRUE(health.ok);
  EXPECT_EQ(health.reason, "");
  EXPECT_EQ(health.calls, before + 1);
  EXPECT_EQ(health.outstanding, 0);
}

void windows_reach_every_rank_or_say_why_not(Communicator& comm) {
  constexpr std::int64_t kSlotBytes = 64;
  const Buffer buffer(kSlotBytes * comm.size(), Device{}, default_allocator(Device{}));
  const PeerWindow window = comm.open_window(buffer);
  EXPECT_EQ(window.is_open(), window.reason.empty()) << window.reason;
  const CopyRates rates = comm.measure_copy_rates();
  EXPECT_GE(rates.to_peer, 0);
  EXPECT_EQ(rates.to_peer > 0, rates.local > 0);
  if (!window.is_open()) return;
  ASSERT_EQ(static_cast<int>(window.bases.size()), comm.size());
  EXPECT_EQ(window.bases[static_cast<std::size_t>(comm.rank())], buffer.data());
  for (std::uint8_t* base : window.bases) {
    std::fill_n(base + comm.rank() * kSlotBytes, kSlotBytes, static_cast<std::uint8_t>(comm.rank() + 1));
  }
  std::uint8_t one = 1;
  comm.all_reduce(std::span(&one, 1), ReduceOp::kMax, Traffic::kControl).wait();
  for (std::int64_t i = 0; i < buffer.bytes(); ++i) {
    ASSERT_EQ(static_cast<std::int64_t>(buffer.data()[i]), i / kSlotBytes + 1) << i;
  }
  comm.barrier();
}

void all_reduce_gives_every_rank_the_exact_result(Communicator& comm) {
  for_every_type([&]<class T>(T) {
    for (std::int64_t elems : kConformanceSizes) {
      Guarded<T> buffer(elems);
      for (std::int64_t i = 0; i < elems; ++i) buffer[i] = exact_input<T>(1, comm.rank(), i);
      comm.all_reduce(buffer.all(), exact_op<T>(), Traffic::kStatistics).wait();
      for (std::int64_t i = 0; i < elems; ++i) ASSERT_EQ(buffer[i], exact_result<T>(1, comm.size(), i)) << i;
    }
  });
}

void reduce_scatter_gives_each_rank_its_part(Communicator& comm) {
  for_every_type([&]<class T>(T) {
    for (std::int64_t elems : kConformanceSizes) {
      for (bool in_place : {false, true}) {
        const std::int64_t own = comm.rank() * elems;
        Guarded<T> input(elems * comm.size());
        Guarded<T> separate(elems);
        for (std::int64_t i = 0; i < elems * comm.size(); ++i) input[i] = exact_input<T>(2, comm.rank(), i);
        const std::span<T> shard = in_place ? input.part(own, elems) : separate.all();
        comm.reduce_scatter(shard, input.all(), exact_op<T>(), Traffic::kGradient).wait();
        for (std::int64_t i = 0; i < elems; ++i) {
          ASSERT_EQ(shard[static_cast<std::size_t>(i)], exact_result<T>(2, comm.size(), own + i))
              << "element " << i << " of " << elems << ", in place " << in_place;
        }
      }
    }
  });
}

void all_gather_puts_each_shard_in_its_range(Communicator& comm) {
  for_every_type([&]<class T>(T) {
    for (std::int64_t elems : kConformanceSizes) {
      for (bool in_place : {false, true}) {
        const std::int64_t own = comm.rank() * elems;
        Guarded<T> output(elems * comm.size());
        Guarded<T> separate(elems);
        const std::span<T> shard = in_place ? output.part(own, elems) : separate.all();
        for (std::int64_t i = 0; i < elems; ++i) {
          shard[static_cast<std::size_t>(i)] = exact_input<T>(3, comm.rank(), i);
        }
        comm.all_gather(output.all(), std::span<const T>(shard), Traffic::kPlanes).wait();
        for (std::int64_t i = 0; i < elems * comm.size(); ++i) {
          ASSERT_EQ(output[i], exact_input<T>(3, static_cast<int>(i / elems), i % elems))
              << "element " << i << " of " << elems << " * " << comm.size() << ", in place " << in_place;
        }
      }
    }
  });
}

void all_to_all_exchanges_the_shards(Communicator& comm) {
  for_every_type([&]<class T>(T) {
    for (std::int64_t elems : kConformanceSizes) {
      Guarded<T> input(elems * comm.size());
      Guarded<T> output(elems * comm.size());
      for (std::int64_t i = 0; i < elems * comm.size(); ++i) input[i] = exact_input<T>(4, comm.rank(), i);
      comm.all_to_all(output.all(), std::span<const T>(input.all()), Traffic::kGradient).wait();
      for (std::int64_t i = 0; i < elems * comm.size(); ++i) {
        const auto from = static_cast<int>(i / elems);
        ASSERT_EQ(output[i], exact_input<T>(4, from, comm.rank() * elems + i % elems))
            << "element " << i << " of " << elems << " * " << comm.size();
        ASSERT_EQ(input[i], exact_input<T>(4, comm.rank(), i));
      }
    }
  });
}

void in_place_calls_use_the_ranks_own_offset(Communicator& comm) {
  constexpr std::int64_t kElems = 96;
  Guarded<std::uint8_t> plane(kElems * comm.size());
  const auto marker = [](std::int64_t rank) { return static_cast<std::uint8_t>(0x10 + rank); };
  for (auto& byte : plane.part(comm.rank() * kElems, kElems)) byte = marker(comm.rank());
  comm.all_gather(plane.all(), plane.part(comm.rank() * kElems, kElems), Traffic::kPlanes).wait();
  for (std::int64_t i = 0; i < kElems * comm.size(); ++i) ASSERT_EQ(plane[i], marker(i / kElems)) << i;

  Guarded<float> grads(kElems * comm.size());
  for (std::int64_t i = 0; i < kElems * comm.size(); ++i) grads[i] = static_cast<float>(i / kElems + 1);
  const std::span<float> own = grads.part(comm.rank() * kElems, kElems);
  comm.reduce_scatter(own, grads.all(), ReduceOp::kSum, Traffic::kGradient).wait();
  for (float value : own) ASSERT_EQ(value, static_cast<float>((comm.rank() + 1) * comm.size()));
}

void broadcast_comes_from_any_root(Communicator& comm) {
  for_every_type([&]<class T>(T) {
    for (int root = 0; root < comm.size(); ++root) {
      for (std::int64_t elems : kConformanceSizes) {
        Guarded<T> buffer(elems);
        if (comm.rank() == root) {
          for (std::int64_t i = 0; i < elems; ++i) buffer[i] = exact_input<T>(4, root, i);
        }
        comm.broadcast(buffer.all(), root, Traffic::kControl).wait();
        for (std::int64_t i = 0; i < elems; ++i) ASSERT_EQ(buffer[i], exact_input<T>(4, root, i)) << i;
      }
    }
  });
}

void average_divides_the_sum_once(Communicator& comm) {
  const auto ranks = static_cast<float>(comm.size());
  constexpr std::int64_t kElems = 1000;
  const auto average = [&](std::int64_t i) { return exact_result<float>(5, comm.size(), i) / ranks; };

  Guarded<float> shard(kElems);
  Guarded<float> input(kElems * comm.size());
  for (std::int64_t i = 0; i < kElems * comm.size(); ++i) input[i] = exact_input<float>(5, comm.rank(), i);
  comm.reduce_scatter(shard.all(), input.all(), ReduceOp::kAvg, Traffic::kGradient).wait();
  for (std::int64_t i = 0; i < kElems; ++i) ASSERT_EQ(shard[i], average(comm.rank() * kElems + i)) << i;

  Guarded<Bf16> buffer(kElems);
  for (std::int64_t i = 0; i < kElems; ++i) buffer[i] = exact_input<Bf16>(5, comm.rank(), i);
  comm.all_reduce(buffer.all(), ReduceOp::kAvg, Traffic::kGradient).wait();
  for (std::int64_t i = 0; i < kElems; ++i) ASSERT_EQ(buffer[i], fp32_to_bf16(average(i))) << i;
}

void sums_are_taken_in_rank_order(Communicator& comm) {
  // Random exponents: another order of the sum gives other bits.
  const auto value = [](int rank, std::int64_t i) {
    const std::uint64_t bits = mix(6, rank, i);
    return std::ldexp(static_cast<float>(bits & 0xFFFFFF) - 8e6f, static_cast<int>(bits >> 60));
  };
  const auto expected = [&](std::int64_t i) {
    float sum = value(0, i);
    for (int rank = 1; rank < comm.size(); ++rank) sum += value(rank, i);
    return sum;
  };
  constexpr std::int64_t kElems = 5000;
  Guarded<float> shard(kElems);
  Guarded<float> input(kElems * comm.size());
  for (std::int64_t i = 0; i < kElems * comm.size(); ++i) input[i] = value(comm.rank(), i);
  comm.reduce_scatter(shard.all(), input.all(), ReduceOp::kSum, Traffic::kGradient).wait();
  for (std::int64_t i = 0; i < kElems; ++i) ASSERT_EQ(shard[i], expected(comm.rank() * kElems + i)) << i;

  Guarded<float> buffer(kElems);
  for (std::int64_t i = 0; i < kElems; ++i) buffer[i] = value(comm.rank(), i);
  comm.all_reduce(buffer.all(), ReduceOp::kSum, Traffic::kStatistics).wait();
  for (std::int64_t i = 0; i < kElems; ++i) ASSERT_EQ(buffer[i], expected(i)) << i;
}

void bf16_sums_round_once(Communicator& comm) {
  // 256 + 1 rounds to 256 in bf16, so a sum that rounds at each rank would stay at 256.
  const float expected = 256.0f + static_cast<float>(comm.size() - 1);
  const Bf16 own = fp32_to_bf16(comm.rank() == 0 ? 256.0f : 1.0f);
  std::vector<Bf16> buffer(33, own);
  comm.all_reduce(std::span(buffer), ReduceOp::kSum, Traffic::kGradient).wait();
  for (Bf16 value : buffer) ASSERT_EQ(value, fp32_to_bf16(expected));

  std::vector<Bf16> input(static_cast<std::size_t>(33 * comm.size()), own);
  std::vector<Bf16> shard(33);
  comm.reduce_scatter(std::span(shard), std::span(input), ReduceOp::kSum, Traffic::kGradient).wait();
  for (Bf16 value : shard) ASSERT_EQ(value, fp32_to_bf16(expected));
}

void nan_of_any_rank_is_not_lost(Communicator& comm) {
  const bool last = comm.rank() == comm.size() - 1;
  std::vector<Bf16> half(3, last ? Bf16{0xFFA1} : fp32_to_bf16(1.0f));
  std::vector<float> full(3, last ? std::numeric_limits<float>::quiet_NaN() : 1.0f);
  std::vector<std::uint8_t> codes(3, last ? std::uint8_t{0xFF} : std::uint8_t{127});
  comm.all_reduce(std::span(half), ReduceOp::kSum, Traffic::kGradient).wait();
  comm.all_reduce(std::span(full), ReduceOp::kAvg, Traffic::kGradient).wait();
  comm.all_reduce(std::span(codes), ReduceOp::kMax, Traffic::kScales).wait();
  EXPECT_TRUE(std::isnan(bf16_to_fp32(half[0])));  // which NaN is the transport's choice
  EXPECT_TRUE(std::isnan(full[0]));
  EXPECT_EQ(codes[0], 0xFF);
}

void many_calls_may_be_outstanding(Communicator& comm) {
  constexpr std::int64_t kElems = 700;
  constexpr int kCalls = 9;
  std::vector<std::unique_ptr<Guarded<float>>> buffers;
  std::vector<Work> works;
  for (int call = 0; call < kCalls; ++call) {
    buffers.push_back(std::make_unique<Guarded<float>>(kElems * comm.size()));
    Guarded<float>& buffer = *buffers.back();
    for (std::int64_t i = 0; i < kElems * comm.size(); ++i) {
      buffer[i] = exact_input<float>(static_cast<std::uint64_t>(call), comm.rank(), i);
    }
    const std::span<float> own = buffer.part(comm.rank() * kElems, kElems);
    switch (call % 3) {
      case 0:
        works.push_back(comm.reduce_scatter(own, buffer.all(), ReduceOp::kSum, Traffic::kGradient));
        break;
      case 1:
        works.push_back(comm.all_gather(buffer.all(), own, Traffic::kPlain));
        break;
      case 2:
        works.push_back(comm.all_reduce(buffer.all(), ReduceOp::kSum, Traffic::kStatistics));
        break;
    }
  }
  for (int call = kCalls - 1; call >= 0; --call) {
    works[static_cast<std::size_t>(call)].wait();
    EXPECT_TRUE(works[static_cast<std::size_t>(call)].test());
    Guarded<float>& buffer = *buffers[static_cast<std::size_t>(call)];
    const auto seed = static_cast<std::uint64_t>(call);
    for (std::int64_t i = 0; i < kElems * comm.size(); ++i) {
      const bool own = i / kElems == comm.rank();
      if (call % 3 == 0 && !own) continue;
      // All-gather: every range holds its owner's values, which its owner made from the same index.
      const float expected = call % 3 == 1 ? exact_input<float>(seed, static_cast<int>(i / kElems), i)
                                           : exact_result<float>(seed, comm.size(), i);
      ASSERT_EQ(buffer[i], expected) << "call " << call << ", element " << i;
    }
  }
  EXPECT_EQ(comm.health().outstanding, 0);
}

void test_makes_progress_without_wait(Communicator& comm) {
  std::vector<std::int64_t> value{comm.rank() + 1};
  Work work = comm.all_reduce(std::span(value), ReduceOp::kSum, Traffic::kControl);
  while (!work.test()) std::this_thread::yield();
  EXPECT_EQ(value[0], comm.size() * (comm.size() + 1) / 2);
  work.join(StreamRef());
}

void grouped_calls_are_complete_after_their_waits(Communicator& comm) {
  std::vector<std::int64_t> a{1};
  std::vector<std::uint8_t> b{static_cast<std::uint8_t>(comm.rank())};
  comm.group_begin();
  Work first = comm.all_reduce(std::span(a), ReduceOp::kSum, Traffic::kControl);
  Work second = comm.all_reduce(std::span(b), ReduceOp::kMax, Traffic::kScales);
  comm.group_end();
  second.wait();
  first.wait();
  EXPECT_EQ(a[0], comm.size());
  EXPECT_EQ(b[0], comm.size() - 1);
}

void split_orders_by_key_then_rank(Communicator& comm) {
  const int color = comm.rank() % 2;
  const std::unique_ptr<Communicator> part = comm.split(color, -comm.rank());
  const int members = (comm.size() + (color == 0 ? 1 : 0)) / 2;
  ASSERT_EQ(part->size(), members);
  EXPECT_EQ(part->rank(), members - 1 - comm.rank() / 2);

  std::vector<std::int64_t> ranks(static_cast<std::size_t>(members));
  const std::vector<std::int64_t> own{comm.rank()};
  Work gather = part->all_gather(std::span(ranks), std::span(own), Traffic::kControl);
  std::vector<std::int64_t> ones{1};
  Work sum = comm.all_reduce(std::span(ones), ReduceOp::kSum, Traffic::kControl);
  gather.wait();
  sum.wait();
  for (int i = 0; i < members; ++i) {
    EXPECT_EQ(ranks[static_cast<std::size_t>(i)], color + 2 * (members - 1 - i));
  }
  EXPECT_EQ(ones[0], comm.size());

  const std::unique_ptr<Communicator> copy = comm.split(0, 0);
  EXPECT_EQ(copy->rank(), comm.rank());
  EXPECT_EQ(copy->size(), comm.size());
  copy->barrier();
}

void bad_arguments_are_refused_before_any_message(Communicator& comm) {
  std::vector<float> floats(static_cast<std::size_t>(4 * comm.size() + 1));
  const std::span<float> all(floats);
  const std::int64_t before = comm.health().calls;
  EXPECT_THROW(comm.all_reduce(all, ReduceOp::kMax, Traffic::kControl), ContractError);
  EXPECT_THROW(comm.reduce_scatter(all.first(4), all, ReduceOp::kSum, Traffic::kControl), ContractError);
  EXPECT_THROW(comm.all_gather(all, all.first(4), Traffic::kControl), ContractError);
  EXPECT_THROW(comm.broadcast(all, comm.size(), Traffic::kControl), ContractError);
  EXPECT_THROW(comm.split(-1, 0), ContractError);
  EXPECT_EQ(comm.health().calls, before);
  comm.barrier();
}

void random_programs_give_exact_results(Communicator& comm) {
  std::mt19937_64 random(20240607);  // equal on all ranks
  struct Pending {
    Work work;
    std::function<void()> check;
    std::shared_ptr<void> whole;
    std::shared_ptr<void> part;
  };
  std::vector<Pending> pending;
  const auto settle_one = [&] {
    const auto at = static_cast<std::ptrdiff_t>(random() % pending.size());
    pending[static_cast<std::size_t>(at)].work.wait();
    pending[static_cast<std::size_t>(at)].check();
    pending.erase(pending.begin() + at);
  };
  for (std::uint64_t step = 0; step < 120; ++step) {
    const auto kind = random() % 6;
    const auto elems = static_cast<std::int64_t>(random() % 600);
    const bool in_place = random() % 2 == 0;
    const int size = comm.size();
    const std::int64_t own = comm.rank() * elems;
    const auto issue = [&]<class T>(T) {
      auto whole = std::make_shared<Guarded<T>>(elems * size);
      auto part = std::make_shared<Guarded<T>>(elems);
      const std::span<T> shard = in_place ? whole->part(own, elems) : part->all();
      for (std::int64_t i = 0; i < elems * size; ++i) (*whole)[i] = exact_input<T>(step, comm.rank(), i);
      Work work;
      std::function<void()> check;
      if (kind == 0) {
        work = comm.reduce_scatter(shard, whole->all(), exact_op<T>(), Traffic::kGradient);
        check = [=] {
          for (std::int64_t i = 0; i < elems; ++i) {
            ASSERT_EQ(shard[static_cast<std::size_t>(i)], exact_result<T>(step, size, own + i))
                << "step " << step;
          }
        };
      } else if (kind == 1) {
        for (std::int64_t i = 0; i < elems; ++i) {
          shard[static_cast<std::size_t>(i)] = exact_input<T>(step, comm.rank(), own + i);
        }
        work = comm.all_gather(whole->all(), std::span<const T>(shard), Traffic::kPlanes);
        check = [=] {
          for (std::int64_t i = 0; i < elems * size; ++i) {
            ASSERT_EQ((*whole)[i], exact_input<T>(step, static_cast<int>(i / elems), i)) << "step " << step;
          }
        };
      } else if (kind == 2) {
        const int root = static_cast<int>(step) % size;
        work = comm.broadcast(whole->all(), root, Traffic::kPlain);
        check = [=] {
          for (std::int64_t i = 0; i < elems * size; ++i) {
            ASSERT_EQ((*whole)[i], exact_input<T>(step, root, i)) << "step " << step;
          }
        };
      } else if (kind == 3) {
        auto from = std::make_shared<Guarded<T>>(elems * size);
        for (std::int64_t i = 0; i < elems * size; ++i) (*from)[i] = exact_input<T>(step, comm.rank(), i);
        work = comm.all_to_all(whole->all(), std::span<const T>(from->all()), Traffic::kGradient);
        const int rank = comm.rank();
        check = [=] {
          for (std::int64_t i = 0; i < elems * size; ++i) {
            const auto sender = static_cast<int>(i / elems);
            ASSERT_EQ((*whole)[i], exact_input<T>(step, sender, rank * elems + i % elems)) << "step " << step;
            ASSERT_EQ((*from)[i], exact_input<T>(step, rank, i)) << "step " << step;
          }
        };
      } else {
        work = comm.all_reduce(whole->all(), exact_op<T>(), Traffic::kStatistics);
        check = [=] {
          for (std::int64_t i = 0; i < elems * size; ++i) {
            ASSERT_EQ((*whole)[i], exact_result<T>(step, size, i)) << "step " << step;
          }
        };
      }
      pending.push_back({work, check, whole, part});
    };
    switch (random() % 4) {
      case 0:
        issue(float{});
        break;
      case 1:
        issue(Bf16{});
        break;
      case 2:
        issue(std::int64_t{});
        break;
      default:
        issue(std::uint8_t{});
        break;
    }
    if (pending.size() > 6) settle_one();
    if (step % 40 == 39) comm.barrier();
  }
  while (!pending.empty()) settle_one();
}

}  // namespace

const std::vector<ConformanceCase>& communicator_conformance() {
  static const std::vector<ConformanceCase> cases = {
      {"KnowsItsPlaceAndItsHealth", knows_its_place_and_its_health},
      {"AllReduceGivesEveryRankTheExactResult", all_reduce_gives_every_rank_the_exact_result},
      {"ReduceScatterGivesEachRankItsPart", reduce_scatter_gives_each_rank_its_part},
      {"AllGatherPutsEachShardInItsRange", all_gather_puts_each_shard_in_its_range},
      {"AllToAllExchangesTheShards", all_to_all_exchanges_the_shards},
      {"InPlaceCallsUseTheRanksOwnOffset", in_place_calls_use_the_ranks_own_offset},
      {"BroadcastComesFromAnyRoot", broadcast_comes_from_any_root},
      {"AverageDividesTheSumOnce", average_divides_the_sum_once},
      {"SumsAreTakenInRankOrder", sums_are_taken_in_rank_order},
      {"Bf16SumsRoundOnce", bf16_sums_round_once},
      {"NanOfAnyRankIsNotLost", nan_of_any_rank_is_not_lost},
      {"ManyCallsMayBeOutstanding", many_calls_may_be_outstanding},
      {"TestMakesProgressWithoutWait", test_makes_progress_without_wait},
      {"WindowsReachEveryRankOrSayWhyNot", windows_reach_every_rank_or_say_why_not},
      {"GroupedCallsAreCompleteAfterTheirWaits", grouped_calls_are_complete_after_their_waits},
      {"SplitOrdersByKeyThenRank", split_orders_by_key_then_rank},
      {"BadArgumentsAreRefusedBeforeAnyMessage", bad_arguments_are_refused_before_any_message},
      {"RandomProgramsGiveExactResults", random_programs_give_exact_results},
  };
  return cases;
}

}  // namespace mxopt::test
