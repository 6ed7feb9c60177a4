// Where a process stands in its job, as its launcher says.
//
// The sources, first one first: explicit settings; torchrun's RANK and WORLD_SIZE; Open MPI's; Slurm's, in a
// job step only, since a batch script has SLURM_PROCID too; PMI's. All that are there must say the same. One
// difference is none: a launcher of the nodes (say srun, one task per node) that starts the launcher of the
// ranks; then the ranks' launcher counts.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <string_view>

namespace mxopt {

/// The value of a variable, where it is set.
using EnvironmentLookup = std::function<std::optional<std::string>(const std::string&)>;

/// Of this process. The one place of the library that reads environment variables.
EnvironmentLookup environment_lookup();

inline constexpr int kMaxWorld = 65536;
/// Used where an address is known, but no port.
inline constexpr int kDefaultRendezvousPort = 29500;

/// What the user sets by hand; it goes before what the launcher says.
struct LaunchSettings {
  std::optional<int> rank = {};         // 0 to world - 1; with `world`
  std::optional<int> world = {};        // 1 to kMaxWorld; with `rank`
  std::optional<int> local_rank = {};   // 0 to local_world - 1; with `rank`
  std::optional<int> local_world = {};  // 1 to world; with `rank`
  std::optional<std::string> address = {};
  std::optional<int> port = {};  // 0 to 65535; 0: any free one
};

struct LaunchPlace {
  int rank = 0;
  int world = 1;
  int local_rank = -1;  // on its node; -1: not known
  int local_world = 0;  // ranks on its node; 0: not known
  std::string address;  // host name or number of rank 0's machine; empty: not known
  int port = kDefaultRendezvousPort;
  std::string job;     // what tells the job from others, equal on all ranks; empty: not known
  std::string source;  // which source the rank is from: "torchrun (RANK, WORLD_SIZE)"
  std::string note;    // what was passed over; empty: nothing

  /// "rank 3 of 8, local rank 1 of 4, from torchrun (RANK, WORLD_SIZE); rank 0 at n0:29500".
  std::string summary() const;
};

/// Throws ConfigError, with the variables and their values, when a source is there in part, a value is not a
/// whole number of its range, or two sources disagree. Without any source: rank 0 of 1.
LaunchPlace find_launch_place(const LaunchSettings& settings, const EnvironmentLookup& lookup);

/// Throws ConfigError unless a group that was made some other way has the same rank and size; `group` is its
/// name, as "MPI". Without a source of its own, the place fits every group.
void check_launch_against(const LaunchPlace& place, std::string_view group, int rank, int size);

/// Number of the GPU this rank is to use, of `devices` that the process sees: the local rank, or 0 where
/// CUDA_VISIBLE_DEVICES names a single one. Throws ConfigError when the node has fewer than local ranks.
int device_of_place(const LaunchPlace& place, int devices, const EnvironmentLookup& lookup);

}  // namespace mxopt
