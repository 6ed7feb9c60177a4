// How many sets of buffers short calls use in turn, so that each finds little of its memory in the cache.
#pragma once

#include <algorithm>
#include <cstdint>

namespace mxopt::bench {

inline constexpr std::int64_t kRotatedBytes = 256 << 20;  // several times the second-level cache of an H200
inline constexpr std::int64_t kMaxSets = 64;

/// So many that calls of `bytes` bytes touch more than kRotatedBytes together before one comes again, but at
/// most kMaxSets: calls of less than kRotatedBytes / kMaxSets, 4 MiB, find their memory in the cache. 1 for
/// those of kRotatedBytes or more.
inline std::int64_t rotated_sets(std::int64_t bytes) {
  return bytes >= kRotatedBytes ? 1
                                : std::min(kRotatedBytes / std::max<std::int64_t>(bytes, 1) + 1, kMaxSets);
}

/// Calls in a graph over so many sets: each set once at least.
inline int calls_over(std::int64_t sets) {
  constexpr std::int64_t kAtLeast = 24;
  return static_cast<int>(std::max(sets, kAtLeast));
}

}  // namespace mxopt::bench
