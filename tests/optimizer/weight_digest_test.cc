#include "mxopt/optimizer/weight_digest.h"

#include <gtest/gtest.h>

#include "support/optimizer_fixture.h"
#include "support/thrown_message.h"

namespace mxopt {
namespace {

TEST(WeightDigest, FindsOneByteThatDiffersOnOneRank) {
  const test::Scenario scenario;
  test::run_ranks(3, [&](Communicator& comm) {
    DistributedAdam opt(scenario.specs, scenario.config, comm);
    test::set_all_initial(opt, scenario.specs);
    opt.publish();
    EXPECT_NO_THROW(require_equal_weights(opt, comm));
    if (comm.rank() == 1) opt.param("mlp.up").planes.row_data[77] ^= 1;
    const std::string message =
        test::thrown_message<ContractError>([&] { require_equal_weights(opt, comm); });
    EXPECT_TRUE(test::contains(message, "mlp.up"));
    EXPECT_TRUE(test::contains(message, "1"));
  });
}

TEST(WeightDigest, LooksAtEveryPlaneScaleAndValue) {
  const std::vector<ParamSpec> specs = {test::spec("both", {64, 64}, ParamFormat::kMxfp8, Storage::kBoth),
                                        test::spec("plain", {40}, ParamFormat::kBf16)};
  test::run_ranks(2, [&](Communicator& comm) {
    DistributedAdam opt(specs, Config(), comm);
    test::set_all_initial(opt, specs);
    opt.publish();
    const MxView& planes = opt.param("both").planes;
    for (std::uint8_t* byte : {planes.row_data, planes.row_scales, planes.column_data, planes.column_scales,
                               static_cast<std::uint8_t*>(opt.param("plain").values.data)}) {
      if (comm.rank() == 0) *byte ^= 4;
      EXPECT_THROW(require_equal_weights(opt, comm), ContractError);
      if (comm.rank() == 0) *byte ^= 4;
    }
    EXPECT_NO_THROW(require_equal_weights(opt, comm));
  });
}

TEST(WeightDigest, ComparesReplicasToo) {
  const std::vector<ParamSpec> specs = {test::spec("w", {64})};
  test::run_ranks(4, [&](Communicator& comm) {
    const ShardGroups shards = split_for_sharding(comm, 2);
    DistributedAdam opt(specs, Config(), shards.groups());
    test::set_all_initial(opt, specs);
    opt.publish();
    if (comm.rank() >= 2) opt.param("w").values.as<Bf16>()[3].bits ^= 1;
    EXPECT_THROW(require_equal_weights(opt, shards.groups()), ContractError);
  });
}

}  // namespace
}  // namespace mxopt
