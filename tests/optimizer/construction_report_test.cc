#include "mxopt/optimizer/construction_report.h"

#include <string>

#include <gtest/gtest.h>

#include "support/optimizer_fixture.h"
#include "support/thrown_message.h"

namespace mxopt {
namespace {

using test::contains;
using test::mixed_config;
using test::mixed_specs;
using test::run_ranks;

TEST(ConstructionReport, CountsParamsOnceAndNamesEveryFallback) {
  SelfCommunicator comm;
  const Layout layout(mixed_specs(), {});
  const ConstructionReport report = make_report(layout, comm, OptimizerConfig());
  std::int64_t elems = 0;
  for (const ParamLayout& param : layout.params()) elems += param.tied_to < 0 ? param.elems() : 0;
  EXPECT_EQ(report.params, 15);
  EXPECT_EQ(report.elems, elems);
  EXPECT_EQ(report.communicator, "self, rank 0 of 1");
  EXPECT_EQ(report.average_divisor, 1);
  EXPECT_EQ(report.layout_digest, layout.digest());
  ASSERT_EQ(report.fallbacks.size(), 2u);
  EXPECT_EQ(report.fallbacks[0],
            "param 'attn.bias' (shape 5): matrix view 1x5 is not a multiple of 32 in both dims");
  EXPECT_EQ(report.fallbacks[1],
            "param 'mlp.odd' (shape 33x32): matrix view 33x32 is not a multiple of 32 in both dims");
}

TEST(ConstructionReport, BytesAreThoseOfTheLayoutAndTheGradientType) {
  SelfCommunicator comm;
  const Layout layout(mixed_specs(), {.world_size = 1});
  OptimizerConfig optimizer;
  const ConstructionReport fp32 = make_report(layout, comm, optimizer);
  optimizer.grad_dtype = DType::kBf16;
  const ConstructionReport bf16 = make_report(layout, comm, optimizer);
  EXPECT_EQ(fp32.bytes.gradients, 2 * bf16.bytes.gradients);
  EXPECT_EQ(fp32.bytes.total() - bf16.bytes.total(), bf16.bytes.gradients);
}

TEST(ConstructionReport, TextHasAllOfItWithoutANewlineAtTheEnd) {
  run_ranks(3, [](Communicator& comm) {
    Config config = mixed_config();
    config.parallel.gather_format = GatherFormat::kBf16;
    const DistributedAdam opt(mixed_specs(), config, comm);
    const ConstructionReport& report = opt.construction();
    EXPECT_EQ(report.world_size, 3);
    EXPECT_EQ(report.average_divisor, 3);
    EXPECT_GT(report.gather_staging_bytes, 0);
    EXPECT_GT(report.cut.cut_bands, 0);
    const std::string text = report.text();
    for (const char* part :
         {"threads, rank", "of 3; 15 params, ", " buckets, layout digest ",
          "memory of this rank: ", "row planes ", "column planes ", "scales ", "bf16 and fp32 params ",
          "gradients ", "master shards ", "moments ", "gather staging ", "gradient staging ",
          "cut bands: ", "% of the column-plane elements (worst rank ",
          "gradients are divided by 3 in the reduction", "\nkept in bf16: param 'attn.bias' (shape 5): "}) {
      EXPECT_TRUE(contains(text, part));
    }
    EXPECT_NE(text.back(), '\n');
  });
}

}  // namespace
}  // namespace mxopt
