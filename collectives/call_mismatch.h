// Which ranks are out of step, given what each rank has called.
#pragma once

#include <optional>
#include <span>
#include <string>

namespace mxopt {

struct Disagreement {
  int culprit_rank = 0;  // lowest rank that differs from the reference
  std::string reason;    // "rank 1 called barrier(), ranks 0, 2 called all_gather(fp32 x 4, planes)"
};

/// signatures[r] is the signature of rank r's call, empty where it is not known. The reference is the
/// signature of most ranks; of equally frequent ones, the lowest rank's. Empty when all known signatures are
/// equal.
std::optional<Disagreement> find_disagreement(std::span<const std::string> signatures);

/// "rank 3" or "ranks 1, 3".
std::string name_ranks(std::span<const int> ranks);

}  // namespace mxopt
