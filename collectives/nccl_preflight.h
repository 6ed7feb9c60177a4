// What ranks tell each other before they make an NCCL communicator, and whether it fits.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace mxopt {

/// One rank's part. It travels as bytes; texts end with a zero.
struct NcclCandidate {
  std::array<char, 256> host{};
  std::array<char, 32> pci_bus_id{};    // of its GPU
  std::array<std::uint8_t, 16> uuid{};  // of its GPU; all zero: not known
  std::int32_t device = 0;              // its number of the GPU
  std::int32_t library_version = 0;     // as ncclGetVersion() gives it
  std::array<char, 512> problem{};      // what keeps this rank from taking part; empty: nothing

  void set_host(std::string_view text);
  void set_pci_bus_id(std::string_view text);
  void set_problem(std::string_view text);
};

/// Why these ranks can not make a communicator together, in words that name the ranks; empty when they can.
/// Equal on all ranks, as all of them see the same list.
std::string nccl_problem(std::span<const NcclCandidate> ranks);

/// Why this process can not use the library it has loaded; empty when it can. Both as NCCL_VERSION_CODE.
std::string nccl_version_problem(int header_version, int library_version);

/// Why this process can not use NCCL's windows; empty when it can. Their structure is that of one minor
/// version.
std::string nccl_window_problem(int header_version, int library_version);

/// Why a group can not have windows when this many of its ranks are in one NVLink domain; empty when it can.
std::string nccl_domain_problem(int domain_ranks, int ranks);

/// "2.28.9" of 22809.
std::string nccl_version_text(int version);

}  // namespace mxopt
