#include "mxopt/collectives/rendezvous_roster.h"

#include <sstream>

#include "mxopt/params/check.h"

namespace mxopt {

namespace {

std::string hex_text(std::uint64_t value) {
  std::ostringstream text;
  text << "0x" << std::hex << value;
  return text.str();
}

/// "rank 3 (host n3, pid 77, 10.0.0.3:4711)".
std::string who_text(const Hello& hello, const std::string& address) {
  return "rank " + std::to_string(hello.rank) + " (host " + hello.host + ", pid " +
         std::to_string(hello.pid) + ", " + address + ")";
}

}  // namespace

std::string name_rank_runs(std::span<const int> ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (std::size_t i = 0; i < ranks.size();) {
    std::size_t last = i;
    while (last + 1 < ranks.size() && ranks[last + 1] == ranks[last] + 1) ++last;
    text += (i == 0 ? "" : ", ") + std::to_string(ranks[i]);
    if (last > i) text += (last == i + 1 ? ", " : "-") + std::to_string(ranks[last]);
    i = last + 1;
  }
  return text;
}

RendezvousRoster::RendezvousRoster(const Hello& own, const std::string& address)
    : own_(own), address_(address), entries_(static_cast<std::size_t>(own.world)) {
  MXOPT_CHECK_EQ(own.rank, 0);
  join(own, address);
}

RendezvousRoster::Answer RendezvousRoster::admit(const Hello& hello, const std::string& address) {
  if (!equal_tokens(hello.token, own_.token)) {
    return {.verdict = Verdict::kOtherJob, .reason = "the job at " + address_ + " has another token"};
  }
  std::string problem = problem_of(hello, address);
  if (!problem.empty()) return {.verdict = Verdict::kInconsistent, .reason = std::move(problem)};
  join(hello, address);
  return {};
}

std::string RendezvousRoster::problem_of(const Hello& hello, const std::string& address) const {
  std::ostringstream text;
  const std::string who = who_text(hello, address);
  if (hello.library_version != own_.library_version) {
    text << who << " has library version " << hello.library_version << ", rank 0 has "
         << own_.library_version;
  } else if (hello.world != own_.world) {
    text << who << " was started for " << hello.world << " ranks, rank 0 for " << own_.world;
  } else if (hello.rank < 0 || hello.rank >= own_.world) {
    text << who << " is out of range; allowed are 0 to " << own_.world - 1;
  } else if (hello.config_hash != own_.config_hash) {
    text << who << " has another configuration (hash " << hex_text(hello.config_hash) << ") than rank 0 ("
         << hex_text(own_.config_hash) << ")";
  } else if (const auto& first = entries_[static_cast<std::size_t>(hello.rank)]; first.has_value()) {
    text << "rank " << hello.rank << " is claimed twice: by " << first->address << " (host " << first->host
         << ", pid " << first->pid << ") and by " << address << " (host " << hello.host << ", pid "
         << hello.pid << ")";
  }
  return text.str();
}

void RendezvousRoster::join(const Hello& hello, const std::string& address) {
  entries_[static_cast<std::size_t>(hello.rank)] = RankEntry{.rank = hello.rank,
                                                             .local_rank = hello.local_rank,
                                                             .pid = hello.pid,
                                                             .host = hello.host,
                                                             .address = address};
  ++joined_;
}

std::vector<int> RendezvousRoster::missing() const {
  std::vector<int> ranks;
  for (int rank = 0; rank < world(); ++rank) {
    if (!entries_[static_cast<std::size_t>(rank)].has_value()) ranks.push_back(rank);
  }
  return ranks;
}

const RankEntry& RendezvousRoster::entry(int rank) const {
  MXOPT_CHECK(rank >= 0 && rank < world(), "rank " << rank << "; allowed are 0 to " << world() - 1);
  const std::optional<RankEntry>& found = entries_[static_cast<std::size_t>(rank)];
  MXOPT_CHECK(found.has_value(), "rank " << rank << " has not joined");
  return *found;
}

std::vector<RankEntry> RendezvousRoster::entries() const {
  std::vector<RankEntry> all;
  for (int rank = 0; rank < world(); ++rank) all.push_back(entry(rank));
  return all;
}

std::string RendezvousRoster::missing_text(double timeout_s) const {
  std::ostringstream text;
  text << name_rank_runs(missing()) << " did not join " << address_ << " within " << timeout_s << " s ("
       << joined_ << " of " << world() << " joined)";
  return text.str();
}

}  // namespace mxopt
