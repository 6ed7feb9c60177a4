#include "mxopt/collectives/self_communicator.h"

#include <vector>

#include <gtest/gtest.h>

#include "communicator_conformance.h"
#include "support/devices.h"
#include "support/guarded_bytes.h"
#include "support/thrown_message.h"

namespace mxopt {
namespace {

using test::communicator_conformance;
using test::ConformanceCase;

class SelfConformance : public ::testing::TestWithParam<ConformanceCase> {};

TEST_P(SelfConformance, Holds) {
  SelfCommunicator comm;
  GetParam().check(comm);
}

INSTANTIATE_TEST_SUITE_P(Communicator, SelfConformance, ::testing::ValuesIn(communicator_conformance()),
                         [](const auto& tested) { return tested.param.name; });

TEST(SelfCommunicator, EveryCallFailsAfterAbort) {
  SelfCommunicator comm;
  comm.abort("disk full");
  comm.abort("a second reason");
  std::vector<float> buffer(4);
  const std::string message = test::thrown_message<PeerError>(
      [&] { comm.all_reduce(std::span(buffer), ReduceOp::kSum, Traffic::kGradient).wait(); });
  EXPECT_TRUE(test::contains(message, "all_reduce(sum, fp32 x 4, gradient) #0"));
  EXPECT_TRUE(test::contains(message, "rank 0 aborted: disk full"));
  EXPECT_THROW(comm.all_gather(std::span(buffer), std::span(buffer), Traffic::kPlain), PeerError);
  EXPECT_THROW(comm.reduce_scatter(std::span(buffer), std::span(buffer), ReduceOp::kSum, Traffic::kPlain),
               PeerError);
  EXPECT_THROW(comm.broadcast(std::span(buffer), 0, Traffic::kPlain), PeerError);
  EXPECT_THROW(comm.barrier(), PeerError);
  EXPECT_THROW(comm.split(0, 0), PeerError);
  EXPECT_FALSE(comm.health().ok);
  EXPECT_EQ(comm.health().reason, "rank 0 aborted: disk full");
}

TEST(SelfCommunicator, OnADeviceItMovesNothingButCopies) {
  const Device device{DeviceKind::kCuda, 0};
  MXOPT_SKIP_WITHOUT(device);
  SelfCommunicator comm(device);
  EXPECT_EQ(comm.device(), device);
  std::vector<std::uint8_t> content(1000);
  for (std::size_t i = 0; i < content.size(); ++i) content[i] = static_cast<std::uint8_t>(i * 7);
  const test::GuardedBytes from(device, content);
  const test::GuardedBytes to(device, 1000, 0xEE);
  const Stream stream(device);
  Work reduced = comm.all_reduce(from.span(), ReduceOp::kMax, Traffic::kScales, stream.ref());
  Work gathered = comm.all_gather(to.span(), from.span(), Traffic::kPlanes, stream.ref());
  reduced.join(StreamRef());
  gathered.wait();
  EXPECT_TRUE(gathered.test());
  EXPECT_EQ(from.read(), content);
  EXPECT_EQ(to.read(), content);
}

}  // namespace
}  // namespace mxopt
