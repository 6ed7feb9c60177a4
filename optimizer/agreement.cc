#include "mxopt/optimizer/agreement.h"

#include <algorithm>
#include <cstring>
#include <sstream>
#include <string>
#include <vector>

#include "mxopt/collectives/host_exchange.h"

namespace mxopt {

namespace {

constexpr std::int64_t kMessageBytes = 320;

/// The part of a line around `at`, for a message of limited length.
std::string excerpt(const std::string& line, std::size_t at) {
  constexpr std::size_t kBytes = 110, kBefore = 70;
  if (at < kBytes) return line.substr(0, kBytes);
  return "..." + line.substr(at - kBefore, kBytes);
}

/// Empty when the texts are equal.
std::string first_difference(const std::string& mine, const std::string& reference) {
  if (mine == reference) return {};
  std::istringstream left(mine), right(reference);
  std::string a, b;
  for (;;) {
    const bool has_a = static_cast<bool>(std::getline(left, a));
    const bool has_b = static_cast<bool>(std::getline(right, b));
    if (!has_a && !has_b) return "has other line ends than rank 0";
    if (!has_a) a = "(nothing)";
    if (!has_b) b = "(nothing)";
    if (a == b) continue;
    const auto at = static_cast<std::size_t>(std::ranges::mismatch(a, b).in1 - a.begin());
    return "has '" + excerpt(a, at) + "' where rank 0 has '" + excerpt(b, at) + "'";
  }
}

std::string reference_text(Communicator& comm, const std::string& mine) {
  std::vector<std::int64_t> bytes(1, static_cast<std::int64_t>(mine.size()));
  broadcast_on_host(comm, std::span(bytes), 0, Traffic::kControl);
  std::vector<std::uint8_t> text(static_cast<std::size_t>(bytes[0]));
  if (comm.rank() == 0) std::ranges::copy(mine, text.begin());
  broadcast_on_host(comm, std::span(text), 0, Traffic::kControl);
  return {text.begin(), text.end()};
}

/// Every rank's message, by rank; longer ones are cut.
std::vector<std::string> exchange_messages(Communicator& comm, const std::string& mine) {
  std::vector<std::uint8_t> own(kMessageBytes, 0);
  std::memcpy(own.data(), mine.data(), std::min(mine.size(), own.size() - 1));
  std::vector<std::uint8_t> all(own.size() * static_cast<std::size_t>(comm.size()));
  all_gather_on_host(comm, std::span(all), std::span<const std::uint8_t>(own), Traffic::kControl);
  std::vector<std::string> messages;
  for (std::size_t begin = 0; begin < all.size(); begin += own.size()) {
    messages.emplace_back(reinterpret_cast<const char*>(all.data() + begin));
  }
  return messages;
}

}  // namespace

void require_agreement(Communicator& comm, std::span<const LayoutField> fields) {
  std::vector<std::int64_t> own;
  for (const LayoutField& field : fields) own.push_back(static_cast<std::int64_t>(hash64(field.text)));
  std::vector<std::int64_t> all(own.size() * static_cast<std::size_t>(comm.size()));
  all_gather_on_host(comm, std::span(all), std::span<const std::int64_t>(own), Traffic::kControl);

  std::ostringstream report;
  for (std::size_t f = 0; f < own.size(); ++f) {
    bool equal = true;
    for (std::size_t r = f; r < all.size(); r += own.size()) equal = equal && all[r] == all[f];
    if (equal) continue;
    const std::string reference = reference_text(comm, fields[f].text);
    const std::vector<std::string> messages =
        exchange_messages(comm, first_difference(fields[f].text, reference));
    for (std::size_t rank = 0; rank < messages.size(); ++rank) {
      if (messages[rank].empty()) continue;
      report << "\n  " << fields[f].name << ": rank " << rank << ' ' << messages[rank];
    }
  }
  if (!report.str().empty()) throw ContractError("ranks disagree:" + report.str());
}

void require_agreement(std::span<Communicator* const> compare, std::span<Communicator* const> tell,
                       std::span<const LayoutField> fields) {
  std::string problem;
  for (Communicator* comm : compare) {
    try {
      require_agreement(*comm, fields);
    } catch (const ContractError& error) {
      if (problem.empty()) problem = error.what();
    }
  }
  std::string of_any = problem;
  for (Communicator* comm : tell) of_any = first_problem(*comm, of_any);
  if (!problem.empty()) throw ContractError(problem);
  if (!of_any.empty()) throw ContractError(of_any);
}

}  // namespace mxopt
