#include "mxopt/collectives/call_mismatch.h"

#include <cstddef>
#include <utility>
#include <vector>

namespace mxopt {

std::string name_ranks(std::span<const int> ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (std::size_t i = 0; i < ranks.size(); ++i) text += (i == 0 ? "" : ", ") + std::to_string(ranks[i]);
  return text;
}

std::optional<Disagreement> find_disagreement(std::span<const std::string> signatures) {
  std::vector<std::pair<std::string, std::vector<int>>> camps;  // in order of their lowest rank
  for (std::size_t rank = 0; rank < signatures.size(); ++rank) {
    if (signatures[rank].empty()) continue;
    std::size_t camp = 0;
    while (camp < camps.size() && camps[camp].first != signatures[rank]) ++camp;
    if (camp == camps.size()) camps.emplace_back(signatures[rank], std::vector<int>());
    camps[camp].second.push_back(static_cast<int>(rank));
  }
  if (camps.size() < 2) return std::nullopt;

  std::size_t reference = 0;
  for (std::size_t camp = 1; camp < camps.size(); ++camp) {
    if (camps[camp].second.size() > camps[reference].second.size()) reference = camp;
  }
  Disagreement found;
  found.culprit_rank = camps[reference == 0 ? 1 : 0].second.front();
  for (std::size_t camp = 0; camp < camps.size(); ++camp) {
    if (camp == reference) continue;
    found.reason += name_ranks(camps[camp].second) + " called " + camps[camp].first + ", ";
  }
  found.reason += name_ranks(camps[reference].second) + " called " + camps[reference].first;
  return found;
}

}  // namespace mxopt
