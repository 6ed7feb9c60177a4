#include "mxopt/collectives/nccl_preflight.h"

#include <algorithm>
#include <cstddef>
#include <cstring>

namespace mxopt {

namespace {

template <std::size_t kSize>
void set_text(std::array<char, kSize>& field, std::string_view text) {
  field.fill(0);
  std::copy_n(text.begin(), std::min(text.size(), kSize - 1), field.begin());
}

template <std::size_t kSize>
std::string text_of(const std::array<char, kSize>& field) {
  return {field.data(), strnlen(field.data(), kSize)};
}

struct Version {
  int major = 0;
  int minor = 0;
  int patch = 0;
};

/// NCCL_VERSION has one more digit since 2.9.
Version parts(int version) {
  const int unit = version < 10000 ? 1000 : 10000;
  return {version / unit, version % unit / 100, version % 100};
}

bool same_gpu(const NcclCandidate& a, const NcclCandidate& b) {
  const bool known = std::any_of(a.uuid.begin(), a.uuid.end(), [](std::uint8_t byte) { return byte != 0; });
  return (known && a.uuid == b.uuid) ||
         (text_of(a.host) == text_of(b.host) && text_of(a.pci_bus_id) == text_of(b.pci_bus_id));
}

std::string rank_text(std::size_t rank) {
  return "rank " + std::to_string(rank);
}

}  // namespace

void NcclCandidate::set_host(std::string_view text) {
  set_text(host, text);
}

void NcclCandidate::set_pci_bus_id(std::string_view text) {
  set_text(pci_bus_id, text);
}

void NcclCandidate::set_problem(std::string_view text) {
  set_text(problem, text);
}

std::string nccl_problem(std::span<const NcclCandidate> ranks) {
  for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
    const std::string problem = text_of(ranks[rank].problem);
    if (!problem.empty()) return rank_text(rank) + " can not take part in NCCL: " + problem;
  }
  for (std::size_t rank = 1; rank < ranks.size(); ++rank) {
    if (ranks[rank].library_version == ranks[0].library_version) continue;
    return rank_text(rank) + " (host " + text_of(ranks[rank].host) + ") has NCCL " +
           nccl_version_text(ranks[rank].library_version) + ", rank 0 (host " + text_of(ranks[0].host) +
           ") has NCCL " + nccl_version_text(ranks[0].library_version) +
           "; all ranks must load the same version";
  }
  for (std::size_t rank = 1; rank < ranks.size(); ++rank) {
    for (std::size_t earlier = 0; earlier < rank; ++earlier) {
      if (!same_gpu(ranks[earlier], ranks[rank])) continue;
      return "ranks " + std::to_string(earlier) + " and " + std::to_string(rank) +
             " are both on the GPU with PCI bus id " + text_of(ranks[rank].pci_bus_id) + " of host " +
             text_of(ranks[rank].host) + " (cuda:" + std::to_string(ranks[earlier].device) +
             " and cuda:" + std::to_string(ranks[rank].device) +
             "); NCCL needs a GPU of its own for every rank";
    }
  }
  return "";
}

std::string nccl_version_problem(int header_version, int library_version) {
  const Version header = parts(header_version);
  const Version library = parts(library_version);
  if (header.major == library.major && library_version >= 21900) return "";
  return "this library was built with the header of NCCL " + nccl_version_text(header_version) +
         ", but NCCL " + nccl_version_text(library_version) + " is loaded; allowed are versions " +
         std::to_string(header.major) + ".x, and 2.19 or newer";
}

std::string nccl_window_problem(int header_version, int library_version) {
  const Version header = parts(header_version);
  const Version library = parts(library_version);
  constexpr int kFirstWithWindows = 22800;
  if (header_version < kFirstWithWindows || library_version < kFirstWithWindows) {
    return "NCCL " + nccl_version_text(std::min(header_version, library_version)) +
           " has no windows; 2.28 or newer is needed";
  }
  if (header.major == library.major && header.minor == library.minor) return "";
  return "NCCL " + nccl_version_text(library_version) + " is loaded, but the windows of NCCL " +
         nccl_version_text(header_version) + " were built in; both must be of one minor version";
}

std::string nccl_domain_problem(int domain_ranks, int ranks) {
  if (domain_ranks == ranks) return "";
  return "only " + std::to_string(domain_ranks) + " of the " + std::to_string(ranks) +
         " ranks can reach each other's memory (one NVLink domain)";
}

std::string nccl_version_text(int version) {
  const Version v = parts(version);
  return std::to_string(v.major) + "." + std::to_string(v.minor) + "." + std::to_string(v.patch);
}

}  // namespace mxopt
