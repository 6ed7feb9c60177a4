// The ceiling that host benchmarks are measured against: a large copy with the same number of threads.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#if defined(_OPENMP)
#include <omp.h>
#endif

#include "bench/table.h"

namespace mxopt::bench {

inline int max_threads() {
#if defined(_OPENMP)
  return omp_get_max_threads();
#else
  return 1;
#endif
}

inline void use_threads([[maybe_unused]] int threads) {
#if defined(_OPENMP)
  omp_set_num_threads(threads);
#endif
}

/// 1 and all, once each.
inline std::vector<int> thread_counts() {
  return max_threads() > 1 ? std::vector<int>{1, max_threads()} : std::vector<int>{1};
}

/// GB/s, read and written, of copying `bytes` bytes with as many threads as are in use; median of `repeats`.
inline double copy_gb_per_s(std::int64_t bytes, int repeats) {
  constexpr std::int64_t kChunkBytes = 4 << 20;
  std::vector<std::uint8_t> from(static_cast<std::size_t>(bytes), 1), to(static_cast<std::size_t>(bytes));
  const Times times = measure(
      repeats, [] {},
      [&] {
#if defined(_OPENMP)
#pragma omp parallel for schedule(static)
#endif
        for (std::int64_t begin = 0; begin < bytes; begin += kChunkBytes) {
          std::memcpy(to.data() + begin, from.data() + begin,
                      static_cast<std::size_t>(std::min(kChunkBytes, bytes - begin)));
        }
      });
  return gb_per_s(2 * bytes, times.p50_ms);
}

}  // namespace mxopt::bench
