// What the ranks of a job know of each other once they have met.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace mxopt {

struct RankEntry {
  int rank = 0;
  int local_rank = -1;  // -1: not known
  std::int64_t pid = 0;
  std::string host = {};     // its own name of its machine, at most 255 bytes
  std::string address = {};  // as rank 0 sees it: "10.0.0.2:41234"; of rank 0: where it listens
};

/// Equal on all ranks, but for `rank`.
struct RendezvousResult {
  int rank = 0;                            // of this process
  std::vector<RankEntry> ranks = {};       // [world], by rank
  std::vector<std::uint8_t> payload = {};  // what rank 0 handed to all
};

}  // namespace mxopt
