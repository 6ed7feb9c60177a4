// Backward, step and forward on three streams that do not wait for one another: only the optimizer orders
// them.
#include <vector>

#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include "support/compare.h"
#include "support/devices.h"
#include "support/optimizer_fixture.h"

namespace mxopt {
namespace {

constexpr Device kCuda{DeviceKind::kCuda, 0};
constexpr int kSteps = 4;

/// Keeps a stream busy for some milliseconds.
__global__ void spin_kernel(long long cycles) {
  const long long begin = clock64();
  while (clock64() - begin < cycles) {
  }
}
void spin(StreamRef stream) {
  spin_kernel<<<1, 1, 0, static_cast<cudaStream_t>(stream.native())>>>(8'000'000);
  ASSERT_EQ(cudaGetLastError(), cudaSuccess);
}

/// Row data, row scales, column data and column scales of a param.
std::vector<TypedSpan> planes_of(const DistributedAdam& opt) {
  const ParamLayout& param = opt.layout().param(0);
  const MxView view = opt.param(param.name).planes;
  return {{view.row_data, DType::kUint8, view.elems()},
          {view.row_scales, DType::kUint8, param.row_scales_bytes},
          {view.column_data, DType::kUint8, view.elems()},
          {view.column_scales, DType::kUint8, param.column_scales_bytes}};
}

TEST(CudaStreams, OnlyTheOptimizerOrdersThem) {
  MXOPT_SKIP_WITHOUT(kCuda);
  const std::vector<ParamSpec> specs{test::spec("a", {256, 96}, ParamFormat::kMxfp8, Storage::kBoth)};
  constexpr std::int64_t kElems = 256 * 96;

  // What every step should give.
  SelfCommunicator host_comm;
  DistributedAdam host(specs, Config(), host_comm);
  test::set_all_initial(host, specs);
  host.publish();
  std::vector<std::vector<std::vector<std::uint8_t>>> expected;
  for (int step = 0; step < kSteps; ++step) {
    test::write_values(host.grad("a").data, test::grad_values("a", kElems, step));
    ASSERT_TRUE(host.step()->taken);
    expected.emplace_back();
    for (const TypedSpan plane : planes_of(host)) {
      expected.back().emplace_back(plane.byte_data(), plane.byte_data() + plane.bytes());
    }
  }

  const Stream setup(kCuda), backward(kCuda), stepping(kCuda), forward(kCuda);
  const auto allocator = default_allocator(kCuda);
  SelfCommunicator comm(kCuda);
  DistributedAdam opt(specs, Config(), comm, kCuda);
  std::vector<Buffer> gradients, snapshots;
  for (int step = 0; step < kSteps; ++step) {
    const std::vector<float> values = test::grad_values("a", kElems, step);
    gradients.emplace_back(kElems * 4, kCuda, allocator);
    copy_bytes(gradients.back().data(), values.data(), kElems * 4, kCuda, setup.ref());
    for (const TypedSpan plane : planes_of(opt)) snapshots.emplace_back(plane.bytes(), kCuda, allocator);
  }
  synchronize(kCuda, setup.ref());
  spin(setup.ref());
  test::set_all_initial(opt, specs, 0, setup.ref());
  opt.publish(stepping.ref());

  std::vector<StepReport> reports;
  for (int step = 0; step < kSteps; ++step) {
    opt.wait_param("a", Plane::kRow, backward.ref());
    spin(backward.ref());
    copy_bytes(opt.grad("a").data.data, gradients[static_cast<std::size_t>(step)].data(), kElems * 4, kCuda,
               backward.ref());
    opt.grad_ready("a", backward.ref());
    reports.push_back(opt.step(stepping.ref()));
    opt.wait_param("a", Plane::kRow, forward.ref());
    opt.wait_param("a", Plane::kColumn, forward.ref());
    spin(forward.ref());
    std::size_t at = 4 * static_cast<std::size_t>(step);
    for (const TypedSpan plane : planes_of(opt)) {
      copy_bytes(snapshots[at++].data(), plane.data, plane.bytes(), kCuda, forward.ref());
    }
    opt.done_reading(forward.ref());
  }
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  for (int step = 0; step < kSteps; ++step) {
    SCOPED_TRACE("step " + std::to_string(step));
    EXPECT_TRUE(reports[static_cast<std::size_t>(step)]->taken);
    for (std::size_t plane = 0; plane < 4; ++plane) {
      const Buffer& snapshot = snapshots[4 * static_cast<std::size_t>(step) + plane];
      std::vector<std::uint8_t> found(static_cast<std::size_t>(snapshot.bytes()));
      copy_bytes(found.data(), snapshot.data(), snapshot.bytes(), kCuda, setup.ref());
      synchronize(kCuda, setup.ref());
      EXPECT_TRUE(test::bits_equal(expected[static_cast<std::size_t>(step)][plane], found))
          << "plane " << plane;
    }
  }
}

TEST(CudaStreams, AStepReturnsBeforeTheDeviceIsDone) {
  MXOPT_SKIP_WITHOUT(kCuda);
  const std::vector<ParamSpec> specs{test::spec("a", {256, 96})};
  const Stream stream(kCuda);
  SelfCommunicator comm(kCuda);
  DistributedAdam opt(specs, Config(), comm, kCuda);
  test::set_all_initial(opt, specs, 0, stream.ref());
  opt.publish(stream.ref());
  opt.step(stream.ref());
  spin_kernel<<<1, 1, 0, static_cast<cudaStream_t>(stream.ref().native())>>>(400'000'000);
  Event spun(kCuda);
  spun.record(stream.ref());
  const StepReport report = opt.step(stream.ref());
  EXPECT_FALSE(spun.passed()) << "step() waited for the stream";
  EXPECT_EQ(report->step, 2);
}

}  // namespace
}  // namespace mxopt
