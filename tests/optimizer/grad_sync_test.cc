#include "mxopt/optimizer/grad_sync.h"

#include <algorithm>
#include <limits>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "support/inexact_gradients.h"
#include "support/optimizer_fixture.h"
#include "support/thrown_message.h"

#include "mxopt/collectives/traced_communicator.h"

namespace mxopt {
namespace {

using test::contains;
using test::run_ranks;
using test::spec;
using test::thrown_message;

/// Gradients of one rank: a bucket for every param unless `bucket_elems` says otherwise.
struct Rank {
  Rank(std::vector<ParamSpec> specs, Communicator& comm, std::int64_t bucket_elems = 128,
       DType dtype = DType::kFp32, const GradSyncOptions& options = {})
      : layout(std::move(specs), {.world_size = comm.size(), .bucket_elems = bucket_elems}),
        storage(layout, dtype, 1, Device(), default_allocator(Device())),
        traced(comm),
        sync(layout, storage, traced, options) {
    traced.record_signatures();
  }

  TypedSpan grad(const std::string& name) const {
    const ParamLayout& param = layout.param(layout.find(name));
    return storage.gradients(param.bucket).sub(param.bucket_begin, param.elems());
  }
  void fill(const std::string& name, float value) const {
    test::write_values(grad(name), std::vector<float>(static_cast<std::size_t>(grad(name).elems), value));
  }
  void ready(const std::string& name) { sync.ready(layout.find(name), StreamRef()); }
  std::int64_t sent() const { return traced.counts(Traffic::kGradient).operations; }

  /// The reduced gradients of this rank's part of a param.
  std::vector<float> owned(const std::string& name) const {
    for (const Segment& segment : layout.segments(traced.rank())) {
      if (layout.param(segment.param).name != name) continue;
      return test::read_values(grad(name).sub(segment.param_begin, segment.elems));
    }
    return {};
  }

  Layout layout;
  ParamStorage storage;
  TracedCommunicator traced;
  GradSync sync;
};

/// Buckets of 3, 2 and 1 times 128 * W elements, in the order of the backward pass.
std::vector<ParamSpec> three_params() {
  return {spec("first", {128 * 4}, ParamFormat::kFp32), spec("second", {200 * 4}, ParamFormat::kFp32),
          spec("third", {300 * 4}, ParamFormat::kFp32)};
}

TEST(GradSync, BucketsAreSentInLayoutOrderWhateverTheOrderOfTheCalls) {
  const std::vector<std::string> names = {"first", "second", "third"};
  std::vector<std::vector<std::string>> signatures(3);
  run_ranks(3, [&](Communicator& comm) {
    Rank rank(three_params(), comm);
    for (std::size_t i = 0; i < 3; ++i) {
      const std::string& name = names[(i + static_cast<std::size_t>(comm.rank())) % 3];
      if (comm.rank() == 1 && name == "second") continue;  // unused on this rank
      rank.ready(name);
    }
    rank.sync.finish(StreamRef());
    signatures[static_cast<std::size_t>(comm.rank())] = rank.traced.signatures();
  });
  ASSERT_EQ(signatures[0].size(), 3u);
  EXPECT_EQ(signatures[1], signatures[0]);
  EXPECT_EQ(signatures[2], signatures[0]);
  EXPECT_EQ(signatures[0][0], "reduce_scatter(avg, fp32 x 512, gradient)");
  EXPECT_EQ(signatures[0][1], "reduce_scatter(avg, fp32 x 384, gradient)");
  EXPECT_EQ(signatures[0][2], "reduce_scatter(avg, fp32 x 256, gradient)");
}

TEST(GradSync, ABucketIsSentWhenItAndAllEarlierOnesAreReady) {
  SelfCommunicator comm;
  Rank rank(three_params(), comm);
  rank.ready("first");
  rank.ready("second");
  EXPECT_EQ(rank.sent(), 0);
  rank.ready("third");
  EXPECT_EQ(rank.sent(), 3);
}

TEST(GradSync, ABucketWaitsForAllItsParams) {
  SelfCommunicator comm;
  Rank rank(three_params(), comm, 1 << 20);
  ASSERT_EQ(rank.layout.buckets().size(), 1u);
  rank.ready("third");
  rank.ready("first");
  EXPECT_EQ(rank.sent(), 0);
  rank.ready("second");
  EXPECT_EQ(rank.sent(), 1);
}

TEST(GradSync, NothingIsSentBeforeTheLastMicroBatch) {
  SelfCommunicator comm;
  Rank rank(three_params(), comm);
  for (const bool last : {false, false, true}) {
    rank.sync.begin_backward(last);
    for (const char* name : {"third", "second", "first"}) rank.ready(name);
    EXPECT_EQ(rank.sent(), last ? 3 : 0);
  }
}

TEST(GradSync, AMeanIsTakenExactlyOnce) {
  for (const DType dtype : {DType::kFp32, DType::kBf16}) {
    run_ranks(4, [&](Communicator& comm) {
      Rank rank(three_params(), comm, 128, dtype);
      const auto share = static_cast<float>(comm.rank() + 1);
      for (const char* name : {"first", "second", "third"}) rank.fill(name, share);
      rank.sync.finish(StreamRef());
      for (const char* name : {"first", "second", "third"}) {
        for (const float value : rank.owned(name)) ASSERT_EQ(value, 2.5f);
      }
    });
  }
}

TEST(GradSync, ExchangedPiecesGiveTheBitsOfTheHostTransports) {
  const std::vector<std::string> names = {"first", "second", "third"};
  for (const DType dtype : {DType::kFp32, DType::kBf16}) {
    for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kAvg}) {
      for (const int size : {1, 2, 3, 4, 7}) {
        SCOPED_TRACE("W " + std::to_string(size));
        run_ranks(size, [&](Communicator& comm) {
          Rank native(three_params(), comm, 128, dtype, {.op = op});
          Rank exchanging(three_params(), comm, 128, dtype, {.op = op, .exchanges = true});
          EXPECT_EQ(native.sync.staging_bytes(), 0);
          const std::int64_t largest = exchanging.layout.bucket(0).elems;  // "third"
          EXPECT_EQ(exchanging.sync.staging_bytes(), size == 1 ? 0 : largest * dtype_bytes(dtype));
          for (int step = 0; step < 2; ++step) {
            for (Rank* rank : {&native, &exchanging}) {
              for (const std::string& name : names) {
                const TypedSpan grad = rank->grad(name);
                test::write_values(grad, test::inexact_grad(name, grad.elems, step, comm.rank()));
                rank->ready(name);
              }
              rank->sync.finish(StreamRef());
            }
            for (const std::string& name : names) {
              EXPECT_TRUE(test::bits_equal(native.owned(name), exchanging.owned(name))) << name;
            }
            for (Rank* rank : {&native, &exchanging}) rank->sync.reset(StreamRef());
          }
          const std::string_view operation = size == 1 ? "reduce_scatter" : "all_to_all";
          EXPECT_EQ(exchanging.traced.counts(Traffic::kGradient, operation).operations, 6);
          EXPECT_EQ(exchanging.sent(), 6);
        });
      }
    }
  }
}

TEST(GradSync, LooksAtThisRanksGradientsBeforeTheyAreSent) {
  const std::vector<std::string> names = {"first", "second", "third"};
  for (const std::int64_t bucket_elems : {128, 1 << 20}) {
    for (const DType dtype : {DType::kFp32, DType::kBf16}) {
      run_ranks(3, [&](Communicator& comm) {
        Rank rank(three_params(), comm, bucket_elems, dtype, {.checks = true});
        for (int step = 0; step < 4; ++step) {
          // Rank 0 has no bad value, the others one each; in the last step nobody has.
          const int bad = step == 3 ? 3 : (comm.rank() - 1 + step) % 3;
          for (int p = 0; p < 3; ++p) {
            rank.fill(names[static_cast<std::size_t>(p)], 1);
            if (comm.rank() == 0 || p != bad) continue;
            const float value[] = {std::numeric_limits<float>::quiet_NaN()};
            test::write_values(rank.grad(names[static_cast<std::size_t>(p)]).sub(411, 1), value);
          }
          for (const std::string& name : names) rank.ready(name);
          rank.sync.finish(StreamRef());
          ASSERT_EQ(rank.sync.local_status().size(), 3u);
          for (std::size_t i = 0; i < 3; ++i) {
            const int param = rank.sync.checked_params()[i];
            EXPECT_EQ(rank.sync.local_status()[i], comm.rank() != 0 && param == bad ? 1 : 0);
          }
          rank.sync.reset(StreamRef());
        }
      });
    }
  }
  SelfCommunicator comm;
  EXPECT_TRUE(Rank(three_params(), comm).sync.local_status().empty());
}

TEST(GradSync, ResetZeroesWhatAccumulates) {
  run_ranks(2, [&](Communicator& comm) {
    Rank rank(three_params(), comm);
    for (const char* name : {"first", "second", "third"}) rank.fill(name, 3);
    rank.sync.finish(StreamRef());
    rank.sync.reset(StreamRef());
    for (const char* name : {"first", "second", "third"}) {
      for (const float value : test::read_values(rank.grad(name))) ASSERT_EQ(value, 0.0f);
    }
  });
}

TEST(GradSync, OldOverwriteGradientsAreZeroFilledAndNewOnesKept) {
  std::vector<ParamSpec> specs = three_params();
  specs[0].grad_mode = specs[2].grad_mode = GradMode::kOverwrite;
  for (const std::int64_t bucket_elems : {128, 1 << 20}) {
    SelfCommunicator comm;
    Rank rank(specs, comm, bucket_elems);
    for (const char* name : {"first", "second", "third"}) rank.fill(name, 3);
    rank.ready("third");
    rank.sync.finish(StreamRef());
    for (const float value : rank.owned("first")) ASSERT_EQ(value, 0.0f);
    for (const float value : rank.owned("second")) ASSERT_EQ(value, 3.0f);
    for (const float value : rank.owned("third")) ASSERT_EQ(value, 3.0f);
  }
}

TEST(GradSync, AnOverwriteGradientOfAnEarlierMicroBatchIsNotOld) {
  std::vector<ParamSpec> specs = three_params();
  for (ParamSpec& s : specs) s.grad_mode = GradMode::kOverwrite;
  SelfCommunicator comm;
  Rank rank(specs, comm);
  rank.sync.begin_backward(false);
  rank.fill("first", 3);
  rank.ready("first");
  rank.sync.begin_backward(true);
  rank.sync.finish(StreamRef());
  for (const float value : rank.owned("first")) ASSERT_EQ(value, 3.0f);
  rank.sync.reset(StreamRef());
  rank.fill("first", 5);
  rank.sync.finish(StreamRef());  // nobody said ready in this step
  for (const float value : rank.owned("first")) ASSERT_EQ(value, 0.0f);
}

TEST(GradSync, ATiedStorageWaitsForAllItsNames) {
  std::vector<ParamSpec> specs = {spec("embed", {256}, ParamFormat::kFp32),
                                  spec("body", {256}, ParamFormat::kFp32),
                                  spec("head", {256}, ParamFormat::kFp32)};
  specs[2].tied_to = "embed";
  SelfCommunicator comm;
  Rank rank(specs, comm);
  rank.ready("head");
  rank.ready("body");
  EXPECT_EQ(rank.sent(), 1);
  rank.ready("embed");
  EXPECT_EQ(rank.sent(), 2);
  rank.sync.finish(StreamRef());
  rank.sync.reset(StreamRef());
  rank.fill("embed", 2);
  rank.ready("head");
  rank.sync.finish(StreamRef());
  for (const float value : rank.owned("embed")) ASSERT_EQ(value, 2.0f);
}

TEST(GradSync, FrozenBucketsAreNotSentAndHoldNothingUp) {
  std::vector<ParamSpec> specs = three_params();
  specs[1].frozen = true;
  SelfCommunicator comm;
  Rank rank(specs, comm);
  rank.ready("third");
  rank.ready("first");
  EXPECT_EQ(rank.sent(), 2);
  rank.sync.finish(StreamRef());
  EXPECT_EQ(rank.sent(), 2);
  EXPECT_EQ(rank.traced.counts(Traffic::kGradient).bytes, (1200 + 80 + 512) * 4);
}

TEST(GradSync, RefusesWhatMakesNoSense) {
  std::vector<ParamSpec> specs = three_params();
  specs[1].frozen = true;
  SelfCommunicator comm;
  Rank rank(specs, comm);
  EXPECT_TRUE(contains(thrown_message<ContractError>([&] { rank.ready("second"); }),
                       "grad_ready: param 'second' is frozen and has no gradient"));
  rank.ready("first");
  EXPECT_TRUE(contains(thrown_message<ContractError>([&] { rank.ready("first"); }),
                       "grad_ready: param 'first' was ready already in this micro-batch; call it once"));
  rank.ready("third");
  EXPECT_TRUE(contains(thrown_message<ContractError>([&] { rank.sync.begin_backward(true); }),
                       "begin_backward after gradients of this step were sent: call step() first"));
  rank.sync.finish(StreamRef());
  rank.sync.reset(StreamRef());
  rank.sync.begin_backward(true);
  rank.ready("first");
}

TEST(GradSync, NoParamsAndOnlyFrozenParamsAreOrdinary) {
  std::vector<ParamSpec> frozen = three_params();
  for (ParamSpec& s : frozen) s.frozen = true;
  for (const std::vector<ParamSpec>& specs : {std::vector<ParamSpec>(), frozen}) {
    SelfCommunicator comm;
    Rank rank(specs, comm);
    rank.sync.begin_backward(true);
    rank.sync.finish(StreamRef());
    rank.sync.reset(StreamRef());
    EXPECT_EQ(rank.sent(), 0);
  }
}

}  // namespace
}  // namespace mxopt
