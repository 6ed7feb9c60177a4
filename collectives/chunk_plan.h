// Cuts a 64-bit element count into pieces that a 32-bit interface can carry.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "mxopt/params/check.h"

namespace mxopt {

struct Chunk {
  std::int64_t begin = 0;  // element
  std::int64_t elems = 0;
};

/// Chunks of at most `limit_bytes`, but never less than one element, in order; only the last one is shorter.
class ChunkPlan {
 public:
  ChunkPlan(std::int64_t elems, std::int64_t elem_bytes, std::int64_t limit_bytes) : elems_(elems) {
    MXOPT_CHECK_GE(elems, 0);
    MXOPT_CHECK_GT(elem_bytes, 0);
    MXOPT_CHECK_LE(limit_bytes, std::numeric_limits<int>::max());
    chunk_elems_ = std::max<std::int64_t>(1, limit_bytes / elem_bytes);
  }

  std::int64_t chunk_elems() const { return std::min(chunk_elems_, elems_); }
  std::int64_t chunks() const { return elems_ / chunk_elems_ + (elems_ % chunk_elems_ != 0 ? 1 : 0); }

  Chunk chunk(std::int64_t index) const {
    MXOPT_CHECK(index >= 0 && index < chunks(), "chunk " << index << " of " << chunks());
    const std::int64_t begin = index * chunk_elems_;
    return {begin, std::min(chunk_elems_, elems_ - begin)};
  }

 private:
  std::int64_t elems_;
  std::int64_t chunk_elems_;
};

}  // namespace mxopt
