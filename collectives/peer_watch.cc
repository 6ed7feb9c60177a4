#include "mxopt/collectives/peer_watch.h"

#include <algorithm>

#include "mxopt/params/check.h"

namespace mxopt {

PeerWatch::PeerWatch(double heartbeat_s, int misses, Time now) : last_tick_(now) {
  MXOPT_CHECK(heartbeat_s >= 0.01 && heartbeat_s <= 3600,
              "heartbeat of " << heartbeat_s << " s; allowed are 0.01 to 3600");
  MXOPT_CHECK(misses >= 2 && misses <= 1000, misses << " missed heartbeats; allowed are 2 to 1000");
  heartbeat_ = std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(heartbeat_s));
  limit_ = heartbeat_ * misses;
}

void PeerWatch::heard(int rank, Time now) {
  const auto found = heard_.find(rank);
  if (found != heard_.end()) found->second = now;
}

std::optional<PeerWatch::Silent> PeerWatch::tick(Time now) {
  const bool was_stopped = now - last_tick_ > 2 * heartbeat_;
  last_tick_ = now;
  if (was_stopped) {
    for (auto& [rank, time] : heard_) time = now;
  }
  const auto oldest = std::min_element(heard_.begin(), heard_.end(),
                                       [](const auto& a, const auto& b) { return a.second < b.second; });
  if (oldest == heard_.end() || now - oldest->second <= limit_) return std::nullopt;
  return Silent{.rank = oldest->first,
                .silent_s = std::chrono::duration<double>(now - oldest->second).count()};
}

}  // namespace mxopt
