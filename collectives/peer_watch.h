// Which ranks are silent for too long, given when each was last heard.
#pragma once

#include <chrono>
#include <map>
#include <optional>

namespace mxopt {

/// The time is an argument: a test needs no clock.
class PeerWatch {
 public:
  using Clock = std::chrono::steady_clock;
  using Time = Clock::time_point;
  struct Silent {
    int rank = 0;
    double silent_s = 0;
  };

  /// A rank is silent when nothing came from it for `misses` heartbeats of `heartbeat_s`. ContractError
  /// unless heartbeat_s is 0.01 to 3600 and misses 2 to 1000.
  PeerWatch(double heartbeat_s, int misses, Time now);

  void watch(int rank, Time now) { heard_[rank] = now; }
  void forget(int rank) { heard_.erase(rank); }
  void heard(int rank, Time now);

  /// To be called every heartbeat. The rank that is silent the longest, if that is too long. When this call
  /// itself comes late by more than a heartbeat, this process was stopped, and what it has not heard says
  /// nothing: all ranks count as heard now.
  std::optional<Silent> tick(Time now);

 private:
  Clock::duration heartbeat_;
  Clock::duration limit_;
  Time last_tick_;
  std::map<int, Time> heard_;
};

}  // namespace mxopt
