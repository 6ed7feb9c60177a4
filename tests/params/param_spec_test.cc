#include "mxopt/params/param_spec.h"

#include <gtest/gtest.h>

namespace mxopt {
namespace {

TEST(ParamSpec, LeavesFormatStorageAndFallbackToTheConfiguration) {
  const ParamSpec spec;
  EXPECT_FALSE(spec.format.has_value());
  EXPECT_FALSE(spec.storage.has_value());
  EXPECT_FALSE(spec.fallback.has_value());
  EXPECT_EQ(spec.grad_mode, GradMode::kAccumulate);
  EXPECT_FALSE(spec.frozen);
  EXPECT_TRUE(spec.tied_to.empty());
}

TEST(ParamSpec, NamesAreTheWordsOfTheConfiguration) {
  EXPECT_EQ(format_name(ParamFormat::kMxfp8), "mxfp8");
  EXPECT_EQ(format_name(ParamFormat::kBf16), "bf16");
  EXPECT_EQ(format_name(ParamFormat::kFp32), "fp32");
  EXPECT_EQ(storage_name(Storage::kRow), "row");
  EXPECT_EQ(storage_name(Storage::kBoth), "both");
  EXPECT_EQ(storage_name(Storage::kColumn), "column");
  EXPECT_EQ(plane_name(Plane::kRow), "row");
  EXPECT_EQ(plane_name(Plane::kColumn), "column");
}

}  // namespace
}  // namespace mxopt
