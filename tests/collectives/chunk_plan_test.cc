#include "mxopt/collectives/chunk_plan.h"

#include <gtest/gtest.h>

#include "support/thrown_message.h"

namespace mxopt {
namespace {

TEST(ChunkPlan, ChunksCoverEveryElementOnceInOrder) {
  for (std::int64_t elems : {0, 1, 7, 99, 100, 101, 1000}) {
    for (std::int64_t elem_bytes : {1, 2, 4, 8}) {
      for (std::int64_t limit_bytes : {0, 8, 100, 1 << 20}) {
        const ChunkPlan plan(elems, elem_bytes, limit_bytes);
        std::int64_t next = 0;
        for (std::int64_t i = 0; i < plan.chunks(); ++i) {
          const Chunk chunk = plan.chunk(i);
          EXPECT_EQ(chunk.begin, next);
          EXPECT_GT(chunk.elems, 0);
          EXPECT_LE(chunk.elems, plan.chunk_elems());
          EXPECT_TRUE(chunk.elems == 1 || chunk.elems * elem_bytes <= limit_bytes);
          next += chunk.elems;
        }
        EXPECT_EQ(next, elems);
      }
    }
  }
}

TEST(ChunkPlan, CountsBeyondThirtyTwoBitsAreCutAndNotTruncated) {
  constexpr std::int64_t kElems = (std::int64_t{1} << 31) + 5;
  const ChunkPlan bytes(kElems, 1, 256 << 20);
  ASSERT_EQ(bytes.chunks(), 9);
  EXPECT_EQ(bytes.chunk(8).begin, std::int64_t{1} << 31);
  EXPECT_EQ(bytes.chunk(8).elems, 5);

  const ChunkPlan words(kElems, 8, 1 << 30);
  ASSERT_EQ(words.chunks(), 17);
  EXPECT_EQ(words.chunk(16).begin * 8, std::int64_t{1} << 34);
  EXPECT_EQ(words.chunk(16).elems, 5);
}

TEST(ChunkPlan, RefusesWhatAnIntCanNotCarry) {
  EXPECT_TRUE(test::contains(
      test::thrown_message<ContractError>([] { ChunkPlan(1, 1, std::int64_t{1} << 31); }), "2147483648"));
  EXPECT_TRUE(test::contains(test::thrown_message<ContractError>([] { ChunkPlan(-1, 1, 8); }), "-1"));
  EXPECT_TRUE(test::contains(test::thrown_message<ContractError>([] { ChunkPlan(8, 1, 8).chunk(1); }),
                             "chunk 1 of 1"));
}

}  // namespace
}  // namespace mxopt
