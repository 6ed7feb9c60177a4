// The batch writeback gives the same bytes on CUDA as on the host, around everything that it may write.
#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include "support/compare.h"
#include "support/devices.h"
#include "support/guarded_bytes.h"

#include "mxopt/params/bf16.h"
#include "mxopt/quant/e4m3.h"
#include "mxopt/quant/e8m0.h"
#include "mxopt/quant/writeback.h"

namespace mxopt {
namespace {

using test::bits_equal;
using test::GuardedBytes;

constexpr Device kHostDevice{DeviceKind::kHost, 0};
constexpr Device kCudaDevice{DeviceKind::kCuda, 0};
constexpr std::uint8_t kPreset = 0xEE;

class WritebackCuda : public ::testing::Test {
 protected:
  void SetUp() override { MXOPT_SKIP_WITHOUT(kCudaDevice); }
};

/// A weight, the elements [begin, end) of it that are owned, and where its memory starts in each arena.
struct Param {
  std::int64_t rows;
  std::int64_t cols;
  Storage storage;
  ScaleLayout layout;
  DType dtype;
  std::int64_t begin;
  std::int64_t end;
  bool fragments = false;

  std::int64_t master = 0;
  std::int64_t row_plane = 0;
  std::int64_t column_plane = 0;
  std::int64_t row_scales = 0;
  std::int64_t column_scales = 0;
  std::int64_t fragment = 0;

  std::int64_t elems() const { return rows * cols; }
  std::int64_t owned() const { return end - begin; }
};

/// Hands out bytes of an arena; never moves back.
struct Arena {
  std::int64_t bytes = 0;
  std::int64_t take(std::int64_t size, std::int64_t alignment, std::int64_t gap) {
    const std::int64_t at = round_up(bytes, alignment) + gap;
    bytes = at + size;
    return at;
  }
};

/// A batch whose memory is a few arenas, the same on every device.
struct Plan {
  std::vector<Param> params;
  Arena planes, scales, fragments;
  std::vector<std::uint8_t> masters;
  std::int64_t packed_gap = 0;
};

/// Bits of an element: finite values of some magnitudes, and now and then infinity, NaN or any bits.
std::uint32_t master_bits(std::uint64_t key) {
  std::uint64_t x = key * 0x9E3779B97F4A7C15ull;
  x ^= x >> 29;
  x *= 0xBF58476D1CE4E5B9ull;
  x ^= x >> 32;
  const auto bits = static_cast<std::uint32_t>(x);
  const auto choice = static_cast<std::uint32_t>(x >> 32) % 4096;
  if (choice == 0) return 0x7F800000u | (bits & 0x80000000u);
  if (choice == 1) return bits | 0x7FC00000u;
  if (choice < 8) return bits;
  if (choice < 16) return bits & 0x80000000u;
  return (bits & 0x80FFFFFFu) | (118u + (choice & 7u)) << 23;
}

/// Lays the arenas out and fills the masters. Masters start at any multiple of their element; with `aligned`
/// planes start at multiples of 128 bytes, else anywhere.
Plan make_plan(std::vector<Param> params, bool aligned, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  Plan plan;
  Arena masters;
  for (Param& param : params) {
    const std::int64_t gap = aligned ? 0 : static_cast<std::int64_t>(random() % 16);
    const std::int64_t elem = dtype_bytes(param.dtype);
    param.master = masters.take(param.owned() * elem, 16, static_cast<std::int64_t>(random() % 16) * elem);
    if (param.storage != Storage::kColumn) {
      param.row_plane = plan.planes.take(param.elems(), 128, gap);
      param.row_scales = plan.scales.take(row_scale_bytes(param.rows, param.cols), 128, gap);
    }
    if (param.storage != Storage::kRow) {
      param.column_plane = plan.planes.take(param.elems(), 128, gap);
      param.column_scales = plan.scales.take(column_scale_bytes(param.rows, param.cols), 128, gap);
    }
    if (param.fragments) param.fragment = plan.fragments.take(2 * param.owned(), 1, gap);
  }
  plan.packed_gap = aligned ? 0 : 1 + static_cast<std::int64_t>(random() % 15);
  // What lies between the masters is NaN, so that nothing read from there can go unseen.
  plan.masters.assign(static_cast<std::size_t>(masters.bytes), 0xFF);
  for (const Param& param : params) {
    std::uint8_t* to = plan.masters.data() + param.master;
    const std::uint64_t key = random();
    for (std::int64_t i = 0; i < param.owned(); ++i) {
      const std::uint32_t bits = master_bits(key + static_cast<std::uint64_t>(i));
      if (param.dtype == DType::kFp32) {
        std::memcpy(to + 4 * i, &bits, 4);
      } else {
        const auto high = static_cast<std::uint16_t>(bits >> 16);
        std::memcpy(to + 2 * i, &high, 2);
      }
    }
  }
  plan.params = std::move(params);
  return plan;
}

struct Outputs {
  std::vector<std::uint8_t> packed, planes, scales, fragments, counter;
};

/// Both phases on one device; with `prepared` through one Mxfp8Batch, twice each, else through the free
/// functions.
Outputs run(const Plan& plan, Device device, bool prepared) {
  const GuardedBytes masters(device, plan.masters);
  const GuardedBytes planes(device, plan.planes.bytes, kPreset);
  const GuardedBytes scales(device, plan.scales.bytes, kPreset);
  const GuardedBytes fragments(device, plan.fragments.bytes, kPreset);
  const GuardedBytes counter(device, 8, 0);
  std::vector<Mxfp8Shard> batch;
  for (const Param& param : plan.params) {
    Mxfp8Shard shard;
    shard.name = "w";
    shard.weight = {param.rows, param.cols, nullptr, nullptr, nullptr, nullptr, param.layout};
    if (param.storage != Storage::kColumn) {
      shard.weight.row_data = planes.data() + param.row_plane;
      shard.weight.row_scales = scales.data() + param.row_scales;
      if (param.fragments) shard.row_fragment = fragments.data() + param.fragment;
    }
    if (param.storage != Storage::kRow) {
      shard.weight.column_data = planes.data() + param.column_plane;
      shard.weight.column_scales = scales.data() + param.column_scales;
      if (param.fragments) shard.column_fragment = fragments.data() + param.fragment + param.owned();
    }
    shard.master = {masters.data() + param.master, param.dtype, param.owned()};
    shard.start = param.begin;
    batch.push_back(shard);
  }
  const GuardedBytes packed(device, packed_scale_bytes(batch) + plan.packed_gap, kPreset);
  const std::span<std::uint8_t> codes = packed.span().subspan(static_cast<std::size_t>(plan.packed_gap));
  const std::span<std::int64_t> nonfinite(reinterpret_cast<std::int64_t*>(counter.data()), 1);
  if (prepared) {
    const Stream stream(device);
    const Mxfp8Batch whole(batch, device);
    batch.clear();
    for (int repeat = 0; repeat < 2; ++repeat) {
      whole.partial_amax(codes, stream.ref());
      whole.partial_cast(codes, repeat == 0 ? nonfinite : std::span<std::int64_t>(), stream.ref());
    }
    synchronize(device, stream.ref());
  } else {
    partial_amax(batch, codes, device, StreamRef());
    partial_cast(batch, codes, nonfinite, device, StreamRef());
  }
  EXPECT_TRUE(bits_equal(plan.masters, masters.read()));
  return {packed.read(), planes.read(), scales.read(), fragments.read(), counter.read()};
}

void expect_twins(const Plan& plan) {
  const Outputs expected = run(plan, kHostDevice, false);
  for (const bool prepared : {false, true}) {
    const Outputs got = run(plan, kCudaDevice, prepared);
    EXPECT_TRUE(bits_equal(expected.packed, got.packed)) << "packed scales";
    EXPECT_TRUE(bits_equal(expected.planes, got.planes)) << "planes";
    EXPECT_TRUE(bits_equal(expected.scales, got.scales)) << "scales";
    EXPECT_TRUE(bits_equal(expected.fragments, got.fragments)) << "fragments";
    EXPECT_TRUE(bits_equal(expected.counter, got.counter)) << "count of values that are not finite";
  }
}

constexpr std::array kStorages = {Storage::kRow, Storage::kColumn, Storage::kBoth};
constexpr std::array kLayouts = {ScaleLayout::kCompact, ScaleLayout::kGemm};
constexpr std::array kDtypes = {DType::kFp32, DType::kBf16};

TEST_F(WritebackCuda, RandomBatchesEqualTheHosts) {
  for (std::uint64_t seed = 1; seed <= 24; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937_64 random(seed);
    const auto upto = [&](std::int64_t last) {
      return static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(last + 1));
    };
    std::vector<Param> params;
    for (std::int64_t i = upto(40); i >= 0; --i) {
      Param param{};
      param.rows = 32 * (upto(9) == 0 ? upto(40) : upto(6));
      param.cols = 32 * (upto(9) == 0 ? 1 + upto(60) : 1 + upto(18));
      param.storage = kStorages[static_cast<std::size_t>(upto(2))];
      param.layout = kLayouts[static_cast<std::size_t>(upto(1))];
      param.dtype = kDtypes[static_cast<std::size_t>(upto(1))];
      const std::int64_t a = upto(param.elems());
      const std::int64_t b = upto(param.elems());
      param.begin = upto(3) == 0 ? 0 : std::min(a, b);
      param.end = upto(3) == 0 ? param.elems() : std::max(a, b);
      if (upto(9) == 0) param.end = param.begin;
      param.fragments = upto(3) == 0;
      params.push_back(param);
    }
    expect_twins(make_plan(std::move(params), seed % 3 != 0, seed));
    if (HasFailure()) return;
  }
}

TEST_F(WritebackCuda, EveryOffsetOfAShardEqualsTheHosts) {
  std::vector<Param> params;
  for (const DType dtype : kDtypes) {
    for (const Storage storage : kStorages) {
      for (const ScaleLayout layout : kLayouts) {
        for (std::int64_t offset = 1; offset <= 33; ++offset) {
          Param param{96, 544, storage, layout, dtype, offset, 96 * 544 - 7 * offset % 41};
          param.fragments = offset % 8 == 0;
          params.push_back(param);
        }
      }
    }
  }
  expect_twins(make_plan(std::move(params), true, 1));
}

TEST_F(WritebackCuda, ShardsOfAFewElementsEqualTheHosts) {
  std::vector<Param> params;
  const std::int64_t cols = 800;
  for (const DType dtype : kDtypes) {
    for (const ScaleLayout layout : kLayouts) {
      for (const std::int64_t begin : {std::int64_t{0}, std::int64_t{31}, std::int64_t{255}, cols - 3,
                                       31 * cols + 250, 32 * cols - 1, 160 * cols - 40}) {
        for (const std::int64_t owned : {1, 2, 15, 16, 33, 40}) {
          params.push_back(
              {160, cols, Storage::kBoth, layout, dtype, begin, std::min(begin + owned, 160 * cols)});
        }
      }
    }
  }
  expect_twins(make_plan(std::move(params), true, 2));
}

// Each master has memory of its own, without a byte to spare: for runs under compute-sanitizer.
TEST_F(WritebackCuda, MastersAreNotReadOutsideOfTheShard) {
  constexpr std::int64_t kRows = 96;
  constexpr std::int64_t kCols = 544;
  for (const DType dtype : kDtypes) {
    for (std::int64_t offset = 0; offset <= 16; ++offset) {
      const std::int64_t owned = kRows * kCols - 3 * offset;
      const Buffer master(owned * dtype_bytes(dtype), kCudaDevice, default_allocator(kCudaDevice));
      const GuardedBytes planes(kCudaDevice, 2 * kRows * kCols, kPreset);
      const GuardedBytes scales(kCudaDevice, row_scale_bytes(kRows, kCols) + column_scale_bytes(kRows, kCols),
                                kPreset);
      Mxfp8Shard shard;
      shard.name = "w";
      shard.weight = {kRows,
                      kCols,
                      planes.data(),
                      scales.data(),
                      planes.data() + kRows * kCols,
                      scales.data() + row_scale_bytes(kRows, kCols)};
      shard.master = {master.data(), dtype, owned};
      shard.start = offset;
      partial_amax(std::span(&shard, 1), scales.span(), kCudaDevice, StreamRef());
      partial_cast(std::span(&shard, 1), scales.span(), {}, kCudaDevice, StreamRef());
      std::vector<std::uint8_t> expected(2 * kRows * kCols, kPreset);
      for (const std::int64_t plane : {std::int64_t{0}, kRows * kCols}) {
        std::fill_n(expected.begin() + plane + offset, owned, std::uint8_t{0});
      }
      ASSERT_TRUE(bits_equal(expected, planes.read()));
      ASSERT_TRUE(bits_equal(std::vector<std::uint8_t>(scales.span().size(), 0), scales.read()));
    }
  }
}

TEST_F(WritebackCuda, AVeryTallAndAVeryWideParamEqualTheHosts) {
  constexpr std::int64_t kLong = 1 << 20;
  for (const bool tall : {true, false}) {
    for (const DType dtype : kDtypes) {
      const bool gemm = tall == (dtype == DType::kBf16);
      Param param{tall ? kLong : 32,
                  tall ? 32 : kLong,
                  Storage::kBoth,
                  gemm ? ScaleLayout::kGemm : ScaleLayout::kCompact,
                  dtype,
                  17,
                  32 * kLong - 5};
      SCOPED_TRACE(std::string(tall ? "tall " : "wide ") + std::string(dtype_name(dtype)));
      expect_twins(make_plan({param}, true, 3));
    }
  }
}

TEST_F(WritebackCuda, ThousandsOfTinyParamsAreOneBatch) {
  std::vector<Param> params;
  for (std::size_t i = 0; i < 2000; ++i) {
    Param param{32, 32, kStorages[i % 3], kLayouts[i / 3 % 2], kDtypes[i / 6 % 2], 0, 1024};
    if (i % 7 == 0) param.begin = static_cast<std::int64_t>(i % 1024);
    if (i % 11 == 0) param.end = param.begin;
    params.push_back(param);
  }
  expect_twins(make_plan(std::move(params), true, 4));
}

TEST_F(WritebackCuda, DequantizedValuesEqualTheHosts) {
  constexpr std::int64_t kRows = 96;
  constexpr std::int64_t kCols = 160;
  constexpr std::int64_t kElems = kRows * kCols;
  std::mt19937_64 random(5);
  std::vector<std::uint8_t> data(kElems), scales(4096);
  for (std::uint8_t& byte : data) byte = static_cast<std::uint8_t>(random());
  for (std::uint8_t& byte : scales) byte = static_cast<std::uint8_t>(random());
  for (const ScaleLayout layout : kLayouts) {
    for (const Plane plane : {Plane::kRow, Plane::kColumn}) {
      for (const DType dtype : kDtypes) {
        for (const auto& [begin, end] : std::vector<std::array<std::int64_t, 2>>{
                 {0, kElems}, {1, kElems - 1}, {7, 8}, {8, 9}, {1003, 9001}, {kElems - 1, kElems}}) {
          const auto values_on = [&](Device device) {
            const GuardedBytes codes(device, data);
            const GuardedBytes codes_scales(device, scales);
            const MxView view{
                kRows, kCols, codes.data(), codes_scales.data(), codes.data(), codes_scales.data(), layout};
            const GuardedBytes out(device, (end - begin) * dtype_bytes(dtype), kPreset);
            dequantize(view, plane, begin, {out.data(), dtype, end - begin}, device, StreamRef());
            return out.read();
          };
          ASSERT_TRUE(bits_equal(values_on(kHostDevice), values_on(kCudaDevice)))
              << plane_name(plane) << ' ' << dtype_name(dtype) << ' ' << begin;
        }
      }
    }
  }
}

// A param of more than 2^31 elements: filled and checked on the device, element by element.

constexpr std::int64_t kHugeRows = 65568;
constexpr std::int64_t kHugeCols = 32800;
constexpr std::int64_t kHugeElems = kHugeRows * kHugeCols;
static_assert(kHugeElems > std::int64_t{1} << 31);
constexpr std::int64_t kHugeBegin = 5;
constexpr std::int64_t kHugeEnd = kHugeElems - 3;

__host__ __device__ std::uint32_t huge_bits(std::int64_t element) {
  const auto x = static_cast<std::uint32_t>(element * 0x9E3779B97F4A7C15 >> 32);
  return (x & 0x80FFu) | (0x3C00u + (x >> 9 & 0x700u));  // BF16: sign, some exponents, all mantissas
}

/// 0 where nothing is owned, as in the partial maxima.
__device__ float huge_value(std::int64_t element) {
  return element < kHugeBegin || element >= kHugeEnd ? 0.0f : bits_to_float(huge_bits(element) << 16);
}

__global__ void fill_huge_kernel(std::uint16_t* master) {
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < kHugeEnd - kHugeBegin) master[i] = static_cast<std::uint16_t>(huge_bits(kHugeBegin + i));
}

/// One block of 32 elements per thread, `pitch` elements apart from one another.
__device__ bool block_is_right(const std::uint8_t* data, std::uint32_t scale, std::int64_t first,
                               std::int64_t pitch) {
  std::uint32_t amax = 0;
  for (int k = 0; k < 32; ++k) {
    amax = max(amax, float_to_bits(huge_value(first + k * pitch)) & 0x7FFFFFFFu);
  }
  if (scale != e8m0_from_amax_bits(amax)) return false;
  for (int k = 0; k < 32; ++k) {
    const std::int64_t at = first + k * pitch;
    const bool owned = at >= kHugeBegin && at < kHugeEnd;
    const std::uint32_t byte = owned ? e4m3_from_fp32(huge_value(at) * e8m0_reciprocal(scale)) : kPreset;
    if (data[at] != byte) return false;
  }
  return true;
}

__global__ void check_huge_kernel(MxView view, unsigned long long* wrong) {
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= kHugeElems / 32) return;
  constexpr std::int64_t kBlocksAcross = kHugeCols / 32;
  const std::int64_t row = i / kBlocksAcross;
  const std::int64_t block = i % kBlocksAcross;
  const std::uint32_t row_scale = view.row_scales[row_scale_offset(row, block, kHugeCols, view.scale_layout)];
  const bool row_right = block_is_right(view.row_data, row_scale, row * kHugeCols + block * 32, 1);
  const std::int64_t band = i / kHugeCols;
  const std::int64_t col = i % kHugeCols;
  const std::uint32_t column_scale =
      view.column_scales[column_scale_offset(band, col, kHugeRows, kHugeCols, view.scale_layout)];
  const bool column_right =
      block_is_right(view.column_data, column_scale, band * 32 * kHugeCols + col, kHugeCols);
  if (!row_right || !column_right) atomicAdd(wrong, 1ull);
}

TEST_F(WritebackCuda, MoreThanTwoToThe31ElementsInOneParam) {
  const std::int64_t scale_bytes =
      row_scale_bytes(kHugeRows, kHugeCols) + column_scale_bytes(kHugeRows, kHugeCols);
  const std::int64_t needed_bytes = 4 * kHugeElems + 2 * scale_bytes;
  std::size_t free_bytes = 0;
  std::size_t all_bytes = 0;
  ASSERT_EQ(cudaMemGetInfo(&free_bytes, &all_bytes), cudaSuccess);
  if (static_cast<std::int64_t>(free_bytes) < needed_bytes + (std::int64_t{1} << 30)) {
    GTEST_SKIP() << "needs " << needed_bytes << " bytes of device memory, " << free_bytes << " are free";
  }
  const auto buffer = [](std::int64_t bytes) {
    return Buffer(bytes, kCudaDevice, default_allocator(kCudaDevice));
  };
  const Buffer master = buffer(2 * (kHugeEnd - kHugeBegin));
  const Buffer planes = buffer(2 * kHugeElems);
  const Buffer scales = buffer(scale_bytes);
  const Buffer packed = buffer(scale_bytes);
  const Buffer wrong = buffer(8);
  const Stream stream(kCudaDevice);
  const auto native = static_cast<cudaStream_t>(stream.ref().native());
  ASSERT_EQ(cudaMemsetAsync(planes.data(), kPreset, static_cast<std::size_t>(planes.bytes()), native),
            cudaSuccess);
  constexpr unsigned kThreads = 256;
  fill_huge_kernel<<<static_cast<unsigned>(kHugeElems / kThreads + 1), kThreads, 0, native>>>(
      reinterpret_cast<std::uint16_t*>(master.data()));
  ASSERT_EQ(cudaGetLastError(), cudaSuccess);
  for (const ScaleLayout layout : kLayouts) {
    Mxfp8Shard shard;
    shard.name = "huge";
    shard.weight = {kHugeRows,
                    kHugeCols,
                    planes.data(),
                    scales.data(),
                    planes.data() + kHugeElems,
                    scales.data() + row_scale_bytes(kHugeRows, kHugeCols),
                    layout};
    shard.master = {master.data(), DType::kBf16, kHugeEnd - kHugeBegin};
    shard.start = kHugeBegin;
    const Mxfp8Batch batch(std::span(&shard, 1), kCudaDevice);
    batch.partial_amax(packed.as<std::uint8_t>(), stream.ref());
    batch.partial_cast(packed.as<std::uint8_t>(), {}, stream.ref());
    check_huge_kernel<<<static_cast<unsigned>(kHugeElems / 32 / kThreads + 1), kThreads, 0, native>>>(
        shard.weight, reinterpret_cast<unsigned long long*>(wrong.data()));
    ASSERT_EQ(cudaGetLastError(), cudaSuccess);
    std::uint64_t count = 1;
    copy_bytes(&count, wrong.data(), 8, kCudaDevice, stream.ref());
    synchronize(kCudaDevice, stream.ref());
    EXPECT_EQ(count, 0u) << "blocks are wrong";
  }
}

}  // namespace
}  // namespace mxopt
