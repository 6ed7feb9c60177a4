#include "train_gpt/cpu_share.h"

#include <algorithm>
#include <bit>
#include <climits>
#include <cstring>
#include <sstream>
#include <vector>

#include <sched.h>
#include <unistd.h>

#include "train_gpt/mpi_job.h"

namespace train_gpt {
namespace {

using Word = unsigned long;
constexpr int kWords = CPU_SETSIZE / (CHAR_BIT * static_cast<int>(sizeof(Word)));

int count_bits(const std::vector<Word>& words) {
  int count = 0;
  for (const Word word : words) count += std::popcount(word);
  return count;
}

}  // namespace

CpuShare find_cpu_share(MpiJob& job, std::int64_t configured_threads) {
  CpuShare share;
  share.node_cores = std::max(1, static_cast<int>(sysconf(_SC_NPROCESSORS_ONLN)));
  std::vector<Word> words(kWords, 0);
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  if (sched_getaffinity(0, sizeof allowed, &allowed) == 0) {
    static_assert(sizeof allowed == kWords * sizeof(Word));
    std::memcpy(words.data(), &allowed, sizeof allowed);
  }
  share.allowed_cores = std::max(1, count_bits(words));
  share.node_ranks = job.combine_over_node(words.data(), kWords);
  const int usable_cores = std::max(1, count_bits(words));

  const int wanted = configured_threads > 0 ? static_cast<int>(configured_threads)
                                            : std::max(1, share.node_cores / share.node_ranks);
  share.threads =
      configured_threads > 0 ? wanted : std::min(wanted, std::max(1, usable_cores / share.node_ranks));
  if (share.allowed_cores < wanted) {
    std::ostringstream text;
    text << "rank " << job.rank() << " on " << job.host() << " may run on " << share.allowed_cores << " of "
         << share.node_cores << " cores, fewer than "
         << (configured_threads > 0 ? "its threads, " : "its share, ") << wanted
         << "; with mpirun, --bind-to none leaves them free";
    share.warning = text.str();
  }
  return share;
}

}  // namespace train_gpt
