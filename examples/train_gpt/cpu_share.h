// How many threads this rank may use, and whether the launcher left it the cores for them.
#pragma once

#include <cstdint>
#include <string>

namespace train_gpt {

class MpiJob;

struct CpuShare {
  int threads = 1;        // to use
  int allowed_cores = 1;  // this process may run on
  int node_cores = 1;     // online
  int node_ranks = 1;
  std::string warning;  // empty: nothing to warn of
};

/// Collective. configured_threads  0: the node's cores divided by its ranks.
CpuShare find_cpu_share(MpiJob& job, std::int64_t configured_threads);

}  // namespace train_gpt
