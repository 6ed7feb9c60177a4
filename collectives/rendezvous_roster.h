// Rank 0's list of who has come to the rendezvous, and whether the next one fits.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <vector>

#include "mxopt/collectives/rendezvous_frames.h"

namespace mxopt {

/// "rank 3" or "ranks 1, 3, 7-9"; of sorted ranks.
std::string name_rank_runs(std::span<const int> ranks);

class RendezvousRoster {
 public:
  enum class Verdict { kJoined, kOtherJob, kInconsistent };
  struct Answer {
    Verdict verdict = Verdict::kJoined;
    std::string reason = {};  // empty when joined
  };

  /// `own` is rank 0's own greeting, to which all others must fit; `address` is where it listens.
  RendezvousRoster(const Hello& own, const std::string& address);

  /// Joins the rank if it fits.
  Answer admit(const Hello& hello, const std::string& address);

  int world() const { return own_.world; }
  bool is_complete() const { return joined_ == own_.world; }
  std::vector<int> missing() const;
  /// The entry of a rank that has joined.
  const RankEntry& entry(int rank) const;
  /// Of all ranks, once complete.
  std::vector<RankEntry> entries() const;
  /// "ranks 3, 7-9 did not join n0:29500 within 300 s (5 of 9 joined)".
  std::string missing_text(double timeout_s) const;

 private:
  std::string problem_of(const Hello& hello, const std::string& address) const;
  void join(const Hello& hello, const std::string& address);

  Hello own_;
  std::string address_;
  int joined_ = 0;
  std::vector<std::optional<RankEntry>> entries_;
};

}  // namespace mxopt
