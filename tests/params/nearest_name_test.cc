#include "mxopt/params/nearest_name.h"

#include <vector>

#include <gtest/gtest.h>

namespace mxopt {
namespace {

const std::vector<std::string_view> kNames = {"layer0.qkv", "layer0.out", "layer1.qkv", "embedding", "bias"};

TEST(NearestName, FindsTheSmallestEditDistance) {
  EXPECT_EQ(nearest_name("layer0.qvk", kNames), "layer0.qkv");
  EXPECT_EQ(nearest_name("layer1.qk", kNames), "layer1.qkv");
  EXPECT_EQ(nearest_name("Embedding", kNames), "embedding");
  EXPECT_EQ(nearest_name("embeddings", kNames), "embedding");
  EXPECT_EQ(nearest_name("bias", kNames), "bias");
}

TEST(NearestName, TheFirstOfEquallyNearNamesWins) {
  EXPECT_EQ(nearest_name("layer2.qkv", kNames), "layer0.qkv");
}

TEST(NearestName, IsEmptyWhenNothingIsNear) {
  EXPECT_EQ(nearest_name("optimizer", kNames), "");
  EXPECT_EQ(nearest_name("bi", std::vector<std::string_view>{"bias"}), "");
  EXPECT_EQ(nearest_name("bia", std::vector<std::string_view>{"bias"}), "bias");
  EXPECT_EQ(nearest_name("x", {}), "");
  EXPECT_EQ(nearest_name("", kNames), "");
}

}  // namespace
}  // namespace mxopt
