#include "mxopt/collectives/rank_sum.h"

#include <cmath>
#include <limits>
#include <vector>

#include <gtest/gtest.h>

#include "support/exact_inputs.h"
#include "support/thrown_message.h"

#include "mxopt/params/bf16.h"

namespace mxopt {
namespace {

template <class T>
std::vector<T> reduce(const std::vector<std::vector<T>>& ranks, ReduceOp op) {
  std::vector<const void*> pieces;
  for (const auto& rank : ranks) pieces.push_back(rank.data());
  std::vector<T> result(ranks[0].size());
  reduce_in_rank_order(result.data(), pieces, static_cast<std::int64_t>(result.size()), dtype_of<T>(), op);
  return result;
}

TEST(RankSum, AddsInRankOrder) {
  EXPECT_EQ(reduce<float>({{1e8f}, {1.0f}, {-1e8f}}, ReduceOp::kSum)[0], 0.0f);
  EXPECT_EQ(reduce<float>({{1e8f}, {-1e8f}, {1.0f}}, ReduceOp::kSum)[0], 1.0f);
}

TEST(RankSum, RoundsBf16Once) {
  const auto bf16 = [](float x) { return std::vector<Bf16>{fp32_to_bf16(x)}; };
  EXPECT_EQ(reduce<Bf16>({bf16(256), bf16(1), bf16(1)}, ReduceOp::kSum)[0], fp32_to_bf16(258));
  // 5 / 3 in fp32, then rounded; a rounded 1 / 3 would give another value for some inputs.
  EXPECT_EQ(reduce<Bf16>({bf16(2), bf16(2), bf16(1)}, ReduceOp::kAvg)[0], fp32_to_bf16(5.0f / 3.0f));
}

TEST(RankSum, AverageDividesAndDoesNotMultiplyByAReciprocal) {
  for (int i = 1; i < 2000; ++i) {
    const auto x = static_cast<float>(i) * 1.1f;
    ASSERT_EQ(reduce<float>({{x}, {0.0f}, {0.0f}}, ReduceOp::kAvg)[0], x / 3.0f);
  }
}

TEST(RankSum, KeepsSpecialValues) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  EXPECT_TRUE(std::signbit(reduce<float>({{-0.0f}, {-0.0f}}, ReduceOp::kSum)[0]));
  EXPECT_EQ(reduce<float>({{kInf}, {1.0f}}, ReduceOp::kAvg)[0], kInf);
  EXPECT_TRUE(std::isnan(reduce<float>({{kInf}, {-kInf}}, ReduceOp::kSum)[0]));
  const float tiny = std::numeric_limits<float>::denorm_min();
  EXPECT_EQ(reduce<float>({{tiny}, {tiny}}, ReduceOp::kSum)[0], 2 * tiny);
  EXPECT_EQ(reduce<Bf16>({{Bf16{0xFFFF}}}, ReduceOp::kSum)[0].bits, 0x7FC0) << "also of one rank";
  EXPECT_EQ(reduce<Bf16>({{Bf16{0x7F7F}}, {Bf16{0x7F7F}}}, ReduceOp::kSum)[0].bits, 0x7F80) << "overflow";
}

TEST(RankSum, IntegersAreExact) {
  constexpr std::int64_t kLarge = (std::int64_t{1} << 53) + 1;
  EXPECT_EQ(reduce<std::int64_t>({{kLarge}, {1}, {-3}}, ReduceOp::kSum)[0], kLarge - 2);
  constexpr std::int64_t kMax = std::numeric_limits<std::int64_t>::max();
  EXPECT_EQ(reduce<std::int64_t>({{kMax}, {1}}, ReduceOp::kSum)[0], std::numeric_limits<std::int64_t>::min());
  EXPECT_EQ(reduce<std::uint8_t>({{127}, {255}, {128}}, ReduceOp::kMax)[0], 255);
}

TEST(RankSum, EveryBlockBorderIsRight) {
  for (std::int64_t elems : {0, 1, 2047, 2048, 2049, 4096, 10001}) {
    const auto check = [&]<class T>(T, ReduceOp op) {
      std::vector<std::vector<T>> ranks(3);
      for (int rank = 0; rank < 3; ++rank) {
        for (std::int64_t i = 0; i < elems; ++i) {
          ranks[static_cast<std::size_t>(rank)].push_back(test::exact_input<T>(7, rank, i));
        }
      }
      const std::vector<T> result = reduce(ranks, op);
      for (std::int64_t i = 0; i < elems; ++i) {
        ASSERT_EQ(result[static_cast<std::size_t>(i)], test::exact_result<T>(7, 3, i))
            << i << " of " << elems;
      }
    };
    check(float{}, ReduceOp::kSum);
    check(Bf16{}, ReduceOp::kSum);
    check(std::int64_t{}, ReduceOp::kSum);
    check(std::uint8_t{}, ReduceOp::kMax);
  }
}

TEST(RankSum, TheResultMayReplaceAnyPiece) {
  for (int target = 0; target < 3; ++target) {
    std::vector<std::vector<float>> ranks(3, std::vector<float>(5000));
    std::vector<const void*> pieces;
    for (int rank = 0; rank < 3; ++rank) {
      auto& piece = ranks[static_cast<std::size_t>(rank)];
      for (std::size_t i = 0; i < piece.size(); ++i) {
        piece[i] = test::exact_input<float>(8, rank, static_cast<std::int64_t>(i));
      }
      pieces.push_back(piece.data());
    }
    auto& to = ranks[static_cast<std::size_t>(target)];
    reduce_in_rank_order(to.data(), pieces, 5000, DType::kFp32, ReduceOp::kSum);
    for (std::size_t i = 0; i < to.size(); ++i) {
      ASSERT_EQ(to[i], test::exact_result<float>(8, 3, static_cast<std::int64_t>(i))) << "target " << target;
    }
  }
}

TEST(RankSum, RefusesNoPieces) {
  EXPECT_TRUE(test::contains(test::thrown_message<ContractError>(
                                 [] { reduce_in_rank_order(nullptr, {}, 0, DType::kFp32, ReduceOp::kSum); }),
                             "no pieces"));
}

}  // namespace
}  // namespace mxopt
