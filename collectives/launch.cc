#include "mxopt/collectives/launch.h"

#include <charconv>
#include <cstdlib>
#include <sstream>
#include <system_error>
#include <utility>
#include <vector>

#include "mxopt/params/check.h"

namespace mxopt {

namespace {

/// What one launcher says.
struct Claim {
  std::string launcher;  // "torchrun"
  std::string names;     // "RANK, WORLD_SIZE"
  std::string values;    // "RANK=3, WORLD_SIZE=8"
  bool is_explicit = false;
  int rank = 0;
  int world = 1;
  int local_rank = -1;
  int local_world = 0;
  int node = -1;   // which of its nodes this is; -1: not known
  int nodes = -1;  // how many there are; -1: not known

  std::string source() const { return launcher + " (" + names + ")"; }
};

/// The variables of a launcher. The optional ones may be empty.
struct Variables {
  std::string launcher;
  std::string rank;
  std::string world;
  std::string local_rank = {};
  std::string local_world = {};
  std::string node = {};
  std::string nodes = {};
};

std::string range_text(int least, int most) {
  return "allowed are whole numbers from " + std::to_string(least) + " to " + std::to_string(most);
}

int checked_number(const std::string& name, int value, int least, int most) {
  if (value >= least && value <= most) return value;
  throw ConfigError(name + ": " + std::to_string(value) + "; " + range_text(least, most));
}

/// Takes the whole text or nothing: no blanks, no plus, no digits left.
int parsed_number(const std::string& name, const std::string& text, int least, int most) {
  int value = 0;
  const char* const end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  if (error != std::errc{} || stop != end || value < least || value > most) {
    throw ConfigError("variable " + name + ": '" + text + "'; " + range_text(least, most));
  }
  return value;
}

class VariableReader {
 public:
  explicit VariableReader(const EnvironmentLookup& lookup) : lookup_(lookup) {}

  std::optional<std::string> text(const std::string& name) const {
    return name.empty() ? std::nullopt : lookup_(name);
  }

  /// The text when it is set and not empty.
  std::string text_or_empty(const std::string& name) const { return text(name).value_or(std::string()); }

  int number_or(int otherwise, const std::string& name, int least, int most) const {
    const std::optional<std::string> found = text(name);
    return found.has_value() ? parsed_number(name, *found, least, most) : otherwise;
  }

  std::optional<Claim> claim(const Variables& of) const;

 private:
  const EnvironmentLookup& lookup_;
};

std::optional<Claim> VariableReader::claim(const Variables& of) const {
  Claim claim{.launcher = of.launcher, .names = of.rank + ", " + of.world, .values = {}};
  for (const std::string& name : {of.rank, of.world, of.local_rank, of.local_world}) {
    const std::optional<std::string> value = text(name);
    if (!value.has_value()) continue;
    claim.values += (claim.values.empty() ? "" : ", ") + name + "=" + *value;
  }
  const bool has_rank = text(of.rank).has_value();
  const bool has_world = text(of.world).has_value();
  if (!has_rank && !has_world && claim.values.empty()) return std::nullopt;
  if (!has_rank || !has_world) {
    throw ConfigError("variables of " + of.launcher + " are there in part: " + claim.values + ", but no " +
                      (has_rank ? of.world : of.rank) + "; allowed are both of " + claim.names + ", or none");
  }
  claim.world = number_or(1, of.world, 1, kMaxWorld);
  claim.rank = number_or(0, of.rank, 0, claim.world - 1);
  claim.local_world = number_or(0, of.local_world, 1, claim.world);
  const int most_local = (claim.local_world > 0 ? claim.local_world : claim.world) - 1;
  claim.local_rank = number_or(-1, of.local_rank, 0, most_local);
  claim.nodes = number_or(-1, of.nodes, 1, kMaxWorld);
  claim.node = number_or(-1, of.node, 0, kMaxWorld - 1);
  return claim;
}

std::optional<Claim> claim_of(const LaunchSettings& settings) {
  const bool has_any = settings.rank.has_value() || settings.world.has_value() ||
                       settings.local_rank.has_value() || settings.local_world.has_value();
  if (!has_any) return std::nullopt;
  if (!settings.rank.has_value() || !settings.world.has_value()) {
    throw ConfigError(std::string("explicit settings are there in part: no ") +
                      (settings.rank.has_value() ? "world" : "rank") +
                      "; allowed are both of rank, world, or none");
  }
  Claim claim{.launcher = "explicit settings", .names = "rank, world", .values = {}, .is_explicit = true};
  claim.world = checked_number("explicit world", *settings.world, 1, kMaxWorld);
  claim.rank = checked_number("explicit rank", *settings.rank, 0, claim.world - 1);
  claim.values = "rank=" + std::to_string(claim.rank) + ", world=" + std::to_string(claim.world);
  if (settings.local_world.has_value()) {
    claim.local_world = checked_number("explicit local_world", *settings.local_world, 1, claim.world);
    claim.values += ", local_world=" + std::to_string(claim.local_world);
  }
  if (settings.local_rank.has_value()) {
    const int most = (claim.local_world > 0 ? claim.local_world : claim.world) - 1;
    claim.local_rank = checked_number("explicit local_rank", *settings.local_rank, 0, most);
    claim.values += ", local_rank=" + std::to_string(claim.local_rank);
  }
  return claim;
}

std::vector<Claim> all_claims(const LaunchSettings& settings, const VariableReader& reader) {
  std::vector<Claim> claims;
  const auto add = [&](std::optional<Claim> claim) {
    if (claim.has_value()) claims.push_back(std::move(*claim));
  };
  add(claim_of(settings));
  add(reader.claim({.launcher = "torchrun",
                    .rank = "RANK",
                    .world = "WORLD_SIZE",
                    .local_rank = "LOCAL_RANK",
                    .local_world = "LOCAL_WORLD_SIZE",
                    .node = "GROUP_RANK",
                    .nodes = "GROUP_WORLD_SIZE"}));
  add(reader.claim({.launcher = "Open MPI",
                    .rank = "OMPI_COMM_WORLD_RANK",
                    .world = "OMPI_COMM_WORLD_SIZE",
                    .local_rank = "OMPI_COMM_WORLD_LOCAL_RANK",
                    .local_world = "OMPI_COMM_WORLD_LOCAL_SIZE"}));
  if (reader.text("SLURM_STEP_ID").has_value()) {
    // The step's own number of tasks; the other one is the job's, where srun was not asked for fewer.
    const bool has_step = reader.text("SLURM_STEP_NUM_TASKS").has_value();
    add(reader.claim({.launcher = "Slurm",
                      .rank = "SLURM_PROCID",
                      .world = has_step ? "SLURM_STEP_NUM_TASKS" : "SLURM_NTASKS",
                      .local_rank = "SLURM_LOCALID"}));
  }
  add(reader.claim({.launcher = "PMI",
                    .rank = "PMI_RANK",
                    .world = "PMI_SIZE",
                    .local_rank = "MPI_LOCALRANKID",
                    .local_world = "MPI_LOCALNRANKS"}));
  return claims;
}

bool agree(const Claim& a, const Claim& b) {
  const bool same_local_rank = a.local_rank < 0 || b.local_rank < 0 || a.local_rank == b.local_rank;
  const bool same_local_world = a.local_world == 0 || b.local_world == 0 || a.local_world == b.local_world;
  return a.rank == b.rank && a.world == b.world && same_local_rank && same_local_world;
}

/// Whether `nodes` counts the tasks that started the launchers of `ranks`, one on each node.
bool starts_launchers_of(const Claim& nodes, const Claim& ranks) {
  if (nodes.is_explicit || ranks.is_explicit || nodes.world >= ranks.world) return false;
  if (ranks.nodes > 0) return nodes.world == ranks.nodes && nodes.rank == ranks.node;
  // Every other node has at least one rank.
  return ranks.local_world > 0 && nodes.world <= ranks.world - ranks.local_world + 1;
}

/// "n1" of "n[1-4,7],m2".
std::string first_host(const std::string& nodes) {
  const std::size_t bracket = nodes.find_first_of("[,");
  if (bracket == std::string::npos || nodes[bracket] == ',') return nodes.substr(0, bracket);
  const std::size_t number_end = nodes.find_first_of("-,]", bracket);
  const std::size_t close = nodes.find(']', bracket);
  if (number_end == std::string::npos || close == std::string::npos) return {};
  const std::string tail = nodes.substr(close + 1, nodes.find(',', close) - close - 1);
  if (tail.find('[') != std::string::npos) return {};  // two ranges in a name: left to the user
  return nodes.substr(0, bracket) + nodes.substr(bracket + 1, number_end - bracket - 1) + tail;
}

void find_address(const LaunchSettings& settings, const VariableReader& reader, LaunchPlace& place) {
  const std::string master = reader.text_or_empty("MASTER_ADDR");
  const int master_port = reader.number_or(kDefaultRendezvousPort, "MASTER_PORT", 1, 65535);
  if (settings.address.has_value()) {
    if (settings.address->empty()) throw ConfigError("explicit address: ''; allowed is a name or a number");
    place.address = *settings.address;
  } else if (!master.empty()) {
    place.address = master;
  } else if (reader.text("SLURM_STEP_ID").has_value()) {
    place.address = first_host(reader.text_or_empty("SLURM_STEP_NODELIST"));
  }
  if (place.address.empty() && place.local_world == place.world) place.address = "127.0.0.1";
  place.port =
      settings.port.has_value() ? checked_number("explicit port", *settings.port, 0, 65535) : master_port;
}

std::string job_text(const VariableReader& reader) {
  const std::string token = reader.text_or_empty("MXOPT_RDZV_TOKEN");
  if (!token.empty()) return token;
  const std::string elastic = reader.text_or_empty("TORCHELASTIC_RUN_ID");
  if (!elastic.empty() && elastic != "none") return elastic;
  const std::string job = reader.text_or_empty("SLURM_JOB_ID");
  const std::string step = reader.text_or_empty("SLURM_STEP_ID");
  if (!job.empty() && !step.empty()) return job + "." + step;
  return reader.text_or_empty("PMIX_NAMESPACE");
}

std::string of_text(int rank, int world) {
  return std::to_string(rank) + " of " + std::to_string(world);
}

}  // namespace

EnvironmentLookup environment_lookup() {
  return [](const std::string& name) -> std::optional<std::string> {
    const char* const value = std::getenv(name.c_str());
    if (value == nullptr) return std::nullopt;
    return std::string(value);
  };
}

std::string LaunchPlace::summary() const {
  std::string text = "rank " + of_text(rank, world);
  if (local_rank >= 0) {
    text += ", local rank " + std::to_string(local_rank);
    if (local_world > 0) text += " of " + std::to_string(local_world);
  }
  text += ", from " + source + "; rank 0 at " +
          (address.empty() ? "an unknown address" : address + ":" + std::to_string(port));
  return note.empty() ? text : text + "; " + note;
}

LaunchPlace find_launch_place(const LaunchSettings& settings, const EnvironmentLookup& lookup) {
  const VariableReader reader(lookup);
  const std::vector<Claim> claims = all_claims(settings, reader);
  LaunchPlace place;
  place.source = "no launcher";
  Claim chosen{.launcher = {}, .names = {}, .values = {}, .local_rank = 0, .local_world = 1};
  if (!claims.empty()) chosen = claims.front();
  for (const Claim& other : claims) {
    if (agree(chosen, other)) {
      if (chosen.local_rank < 0) chosen.local_rank = other.local_rank;
      if (chosen.local_world == 0) chosen.local_world = other.local_world;
    } else if (starts_launchers_of(other, chosen)) {
      place.note = other.source() + " counts launchers: " + other.values;
    } else if (starts_launchers_of(chosen, other)) {
      place.note = chosen.source() + " counts launchers: " + chosen.values;
      chosen = other;
    } else {
      throw ConfigError("two sources disagree on this process's place: " + chosen.launcher + " says " +
                        chosen.values + ", " + other.launcher + " says " + other.values +
                        "; unset the variables of one of them");
    }
  }
  if (!claims.empty()) place.source = chosen.source();
  place.rank = chosen.rank;
  place.world = chosen.world;
  place.local_rank = chosen.local_rank;
  place.local_world = chosen.local_world;
  find_address(settings, reader, place);
  place.job = job_text(reader);
  return place;
}

void check_launch_against(const LaunchPlace& place, std::string_view group, int rank, int size) {
  if (place.source == "no launcher" || (place.rank == rank && place.world == size)) return;
  std::ostringstream text;
  text << "the launcher says rank " << of_text(place.rank, place.world) << ", from " << place.source
       << ", but " << group << " says rank " << of_text(rank, size) << "; " << group
       << " must be the launcher's own, or every process runs alone";
  throw ConfigError(text.str());
}

int device_of_place(const LaunchPlace& place, int devices, const EnvironmentLookup& lookup) {
  if (devices < 1) throw ConfigError("this process sees no GPU; at least one is needed");
  const std::optional<std::string> visible = lookup("CUDA_VISIBLE_DEVICES");
  const bool has_own = visible.has_value() && !visible->empty() && visible->find(',') == std::string::npos;
  if (devices == 1 && (has_own || place.world == 1)) return 0;
  if (place.local_rank < 0) {
    throw ConfigError("rank " + of_text(place.rank, place.world) + " has no local rank (from " +
                      place.source + "), so its one of " + std::to_string(devices) +
                      " GPUs is not known; set LOCAL_RANK or the device");
  }
  if (place.local_rank >= devices || place.local_world > devices) {
    const int ranks = place.local_world > 0 ? place.local_world : place.local_rank + 1;
    throw ConfigError(std::to_string(ranks) + (place.local_world > 0 ? "" : " or more") +
                      " ranks on this node, but this process sees " + std::to_string(devices) + " GPU" +
                      (devices == 1 ? "" : "s") + "; each rank needs a GPU of its own");
  }
  return place.local_rank;
}

}  // namespace mxopt
