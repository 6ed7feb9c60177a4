// A param of more than 2^31 elements, and another one behind it in the same bucket.
#include <cmath>
#include <span>
#include <string>
#include <vector>

#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include "support/compare.h"
#include "support/devices.h"
#include "support/host_view.h"
#include "support/optimizer_fixture.h"

namespace mxopt {
namespace {

constexpr Device kCuda{DeviceKind::kCuda, 0};
constexpr std::int64_t kCols = 32'768;
constexpr std::int64_t kBandElems = kBlockElems * kCols;
constexpr std::int64_t kLargeRows = 65'536 + 32;  // 2^31 elements and one more band
constexpr std::int64_t kSmallRows = 64;

/// Values that no two bands have in common, exact in fp32.
__host__ __device__ float master_value(std::int64_t index) {
  const std::uint64_t bits = (static_cast<std::uint64_t>(index) + 1) * 0x9E3779B97F4A7C15u;
  return (static_cast<float>(bits >> 40) - 8388608.0f) * 0x1p-25f;
}
/// +2^-7 or -2^-7, so that the norm is known.
__host__ __device__ float grad_value(std::int64_t index) {
  const std::uint64_t bits = (static_cast<std::uint64_t>(index) + 7) * 0xD1B54A32D192ED03u;
  return (bits >> 63) != 0 ? -0x1p-7f : 0x1p-7f;
}

__global__ void fill_kernel(float* to, std::int64_t elems, std::int64_t first_index, bool grads) {
  const std::int64_t stride = static_cast<std::int64_t>(gridDim.x) * blockDim.x;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < elems;
       i += stride) {
    to[i] = grads ? grad_value(first_index + i) : master_value(first_index + i);
  }
}
void fill(float* to, std::int64_t elems, std::int64_t first_index, bool grads, StreamRef stream) {
  fill_kernel<<<1024, 256, 0, static_cast<cudaStream_t>(stream.native())>>>(to, elems, first_index, grads);
  ASSERT_EQ(cudaGetLastError(), cudaSuccess);
}

/// Counts elements of which a first step did not change the master by about the learning rate, against the
/// sign of the gradient: the first update is +1 or -1, and weights do not decay.
__global__ void count_unmoved_kernel(const float* master, std::int64_t elems, std::int64_t first_index,
                                     float lr, unsigned long long* count) {
  const std::int64_t stride = static_cast<std::int64_t>(gridDim.x) * blockDim.x;
  unsigned long long mine = 0;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < elems;
       i += stride) {
    const float expected = master_value(first_index + i) - copysignf(lr, grad_value(first_index + i));
    mine += fabsf(master[i] - expected) > 1e-3f * lr ? 1 : 0;
  }
  if (mine != 0) atomicAdd(count, mine);
}
std::int64_t count_unmoved(std::span<const float> master, std::int64_t first_index, double lr,
                           StreamRef stream) {
  const Buffer count(sizeof(std::int64_t), kCuda, default_allocator(kCuda));
  fill_zero(count.data(), count.bytes(), kCuda, stream);
  count_unmoved_kernel<<<1024, 256, 0, static_cast<cudaStream_t>(stream.native())>>>(
      master.data(), static_cast<std::int64_t>(master.size()), first_index, static_cast<float>(lr),
      reinterpret_cast<unsigned long long*>(count.data()));
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
  std::int64_t result = -1;
  copy_bytes(&result, count.data(), sizeof(result), kCuda, stream);
  synchronize(kCuda, stream);
  return result;
}

/// One band of a param: state, planes and scales, as bytes.
std::vector<std::vector<std::uint8_t>> band_bytes(DistributedAdam& opt, const std::string& name,
                                                  std::int64_t band, Device device, StreamRef stream) {
  const OwnedSlice state = opt.owned(name);
  const MxView planes = opt.wait_param(name, Plane::kRow, stream).planes;
  opt.wait_param(name, Plane::kColumn, stream);
  const std::int64_t begin = band * kBandElems;
  const std::int64_t row_scales = kBandElems / kBlockElems;
  const TypedSpan parts[] = {
      {state.master.data() + begin, DType::kFp32, kBandElems},
      {state.exp_avg.data() + begin, DType::kFp32, kBandElems},
      {state.exp_avg_sq.data() + begin, DType::kFp32, kBandElems},
      {planes.row_data + begin, DType::kUint8, kBandElems},
      {planes.column_data + begin, DType::kUint8, kBandElems},
      {planes.row_scales + band * row_scales, DType::kUint8, row_scales},
      {planes.column_scales + band * kCols, DType::kUint8, kCols},
  };
  std::vector<std::vector<std::uint8_t>> bytes;
  for (const TypedSpan part : parts) {
    const test::HostView view(device, stream, part);
    const auto* data = static_cast<const std::uint8_t*>(view.span().data);
    bytes.emplace_back(data, data + view.span().bytes());
  }
  return bytes;
}

TEST(LargeParams, BandsOnBothSidesOfTwoToThe31AreThoseOfTheHost) {
  MXOPT_SKIP_WITHOUT(kCuda);
  std::size_t free = 0;
  std::size_t total = 0;
  ASSERT_EQ(cudaMemGetInfo(&free, &total), cudaSuccess);
  if (free < std::size_t{60} << 30)
    GTEST_SKIP() << "60 GiB of device memory are needed, " << free << " are free";

  Config config;
  config.optimizer.clip_grad = 0;
  config.optimizer.weight_decay = 0;
  config.optimizer.lr = 0.01;
  config.optimizer.bucket_elems = std::int64_t{1} << 33;
  const std::vector<ParamSpec> specs = {
      test::spec("small", {kSmallRows, kCols}, ParamFormat::kMxfp8, Storage::kBoth),
      test::spec("large", {kLargeRows, kCols}, ParamFormat::kMxfp8, Storage::kBoth),
      test::spec("other", {kSmallRows, kCols}, ParamFormat::kMxfp8, Storage::kBoth)};
  const Stream stream(kCuda);
  SelfCommunicator comm(kCuda);
  DistributedAdam opt(specs, config, comm, kCuda);
  ASSERT_EQ(opt.layout().buckets().size(), 1u);
  std::vector<std::int64_t> first_index;  // of each param, so that no two have a band in common
  std::int64_t index = 0;
  for (const ParamSpec& spec : specs) {
    const std::int64_t elems = spec.shape[0] * kCols;
    first_index.push_back(index);
    const Buffer values(elems * 4, kCuda, default_allocator(kCuda));
    fill(reinterpret_cast<float*>(values.data()), elems, index, false, stream.ref());
    opt.set_initial(spec.name, ConstTypedSpan(values.data(), DType::kFp32, elems), stream.ref());
    fill(opt.grad(spec.name).data.as<float>().data(), elems, index, true, stream.ref());
    synchronize(kCuda, stream.ref());
    index += elems;
  }
  opt.publish(stream.ref());
  const StepReport report = opt.step(stream.ref());
  ASSERT_TRUE(report->taken);
  EXPECT_EQ(report->grad_norm, std::sqrt(static_cast<double>(index)) * 0x1p-7);

  for (std::size_t p = 0; p < specs.size(); ++p) {
    EXPECT_EQ(
        count_unmoved(opt.owned(specs[p].name).master, first_index[p], config.optimizer.lr, stream.ref()), 0)
        << specs[p].name;
    const std::int64_t bands = specs[p].shape[0] / kBlockElems;
    for (const std::int64_t band : {std::int64_t{0}, bands / 2, bands - 2, bands - 1}) {
      SCOPED_TRACE(specs[p].name + ", band " + std::to_string(band));
      std::vector<float> masters, grads;
      for (std::int64_t i = 0; i < kBandElems; ++i) {
        masters.push_back(master_value(first_index[p] + band * kBandElems + i));
        grads.push_back(grad_value(first_index[p] + band * kBandElems + i));
      }
      const std::vector<ParamSpec> one = {
          test::spec("band", {kBlockElems, kCols}, ParamFormat::kMxfp8, Storage::kBoth)};
      SelfCommunicator host_comm;
      DistributedAdam host(one, config, host_comm);
      host.set_initial("band", ConstTypedSpan(std::span<const float>(masters)));
      host.publish();
      test::write_values(host.grad("band").data, grads);
      ASSERT_TRUE(host.step()->taken);
      const auto expected = band_bytes(host, "band", 0, Device(), StreamRef());
      const auto actual = band_bytes(opt, specs[p].name, band, kCuda, stream.ref());
      for (std::size_t i = 0; i < expected.size(); ++i) {
        EXPECT_TRUE(test::bits_equal(expected[i], actual[i])) << "part " << i;
      }
    }
  }
}

}  // namespace
}  // namespace mxopt
