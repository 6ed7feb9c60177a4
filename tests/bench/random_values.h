// Random values on a device, to be copied from.
#pragma once

#include <algorithm>
#include <cstdint>
#include <random>
#include <vector>

#include "mxopt/params/bf16.h"
#include "mxopt/params/dtype.h"
#include "mxopt/params/memory.h"

namespace mxopt::bench {

/// Normal values with a standard deviation of 0.02, repeated with a period that no row length divides.
class RandomValues {
 public:
  /// zero_share  of the values, at random places, is 0.
  /// factor      of the standard deviation.
  RandomValues(DType dtype, double zero_share, Device device, StreamRef stream, float factor = 1)
      : dtype_(dtype), device_(device) {
    std::mt19937 random(1);
    std::normal_distribution<float> normal(0.0f, 0.02f);
    std::bernoulli_distribution is_zero(zero_share);
    std::vector<float> values((1 << 20) + 77);
    for (float& value : values) value = is_zero(random) ? 0.0f : normal(random) * factor;
    std::vector<Bf16> rounded;
    for (const float value : values) rounded.push_back(fp32_to_bf16(value));
    elems_ = static_cast<std::int64_t>(values.size());
    memory_ = Buffer(elems_ * dtype_bytes(dtype), device, default_allocator(device));
    copy_bytes(memory_.data(),
               dtype == DType::kFp32 ? static_cast<const void*>(values.data()) : rounded.data(),
               memory_.bytes(), device, stream);
    synchronize(device, stream);
  }

  ConstTypedSpan period() const { return {memory_.data(), dtype_, elems_}; }

  void copy_to(void* to, std::int64_t elems, StreamRef stream) const {
    for (std::int64_t begin = 0; begin < elems; begin += elems_) {
      const ConstTypedSpan part = period().sub(0, std::min(elems_, elems - begin));
      copy_bytes(static_cast<std::uint8_t*>(to) + begin * dtype_bytes(dtype_), part.data, part.bytes(),
                 device_, stream);
    }
  }

 private:
  DType dtype_;
  Device device_;
  std::int64_t elems_ = 0;
  Buffer memory_;
};

}  // namespace mxopt::bench
