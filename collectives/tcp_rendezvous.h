// Where the ranks of a job meet over TCP, and the control connection that they keep.
//
// Rank 0 listens, every other rank connects to it and says who it is. When all have come and every rank has
// the table of ranks and rank 0's payload, join() returns on all of them; when one does not come, does not
// fit or dies before, join() throws the same reason on all that were there; only where rank 0 dies while it
// tells them that the group is complete, some may know and others not. Then the connections stay: each rank
// is heard at every heartbeat, and when one dies or stops, all learn which one.
//
// The network is trusted: nothing is encrypted. What is no rank of this job (port scanners, ranks of an old
// job) is turned away and counted, and holds up nothing.
//
// A thread of each rank's own serves its connections. All functions may be called by any thread; close() and
// the destructor by one, and not by a callback.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "mxopt/collectives/job_token.h"
#include "mxopt/collectives/launch.h"
#include "mxopt/collectives/rank_table.h"

namespace mxopt {

/// A rank that is dead, stopped or has given up.
struct PeerLoss {
  int rank = -1;
  std::string host = {};
  std::int64_t pid = 0;
  std::string reason = {};  // plain words, without the rank

  /// "rank 3 (host n3, pid 77): its connection ended without a goodbye".
  std::string describe() const;
};

/// How far a rank has come, as far as rank 0 has heard.
struct PeerProgress {
  int rank = 0;
  std::string host = {};
  std::int64_t pid = 0;
  std::int64_t sequence = -1;  // of the last call that it has finished; -1: none
  std::string operation = {};  // that call
  double age_s = 0;            // since it was finished; since the start where there is none

  /// "rank 5 (host n2, pid 771) last finished #4181 all_gather 412 s ago".
  std::string describe() const;
};

/// What came to rank 0 and was turned away.
struct RendezvousCounts {
  std::int64_t strangers = 0;    // not of this protocol, or of another version
  std::int64_t other_jobs = 0;   // with another job's token; they were told
  std::int64_t silent = 0;       // no greeting within handshake_s
  std::int64_t crowded_out = 0;  // dropped without a greeting because newer ones came
  std::int64_t late = 0;         // of this job, when the group was complete; they were told
};

struct RendezvousOptions {
  int rank = 0;                       // 0 to world - 1
  int world = 1;                      // 1 to kMaxWorld
  int local_rank = -1;                // only told to the others; -1: not known
  std::string address;                // name or number of rank 0's machine
  int port = kDefaultRendezvousPort;  // 1 to 65535; on rank 0 also 0: any free one
  /// Rank 0: where to listen; empty: where `address` is. "0.0.0.0" and "::" are all interfaces.
  std::string bind_address = {};
  JobToken token = {};            // equal on all ranks, other than other jobs'
  std::uint64_t config_hash = 0;  // equal on all ranks, or the job fails
  double timeout_s = 300;         // for all to come; more than 0, at most 1e6
  double handshake_s = 5;         // for one connection to say who it is; 0.05 to 600
  double heartbeat_s = 5;         // 0.05 to 3600; equal on all ranks
  int heartbeat_misses = 4;       // so many missing in a row are a death; 2 to 1000

  /// Rank 0: makes what all get, at most 65528 bytes. Called once by join() itself, when all have come. What
  /// it throws, join() throws, and the others learn the text. Null: empty.
  std::function<std::vector<std::uint8_t>()> make_payload = {};
  /// Rank 0: called by join() with the port, before it waits.
  std::function<void(int port)> on_listening = {};
  /// Called once, on the serving thread, when lost() begins to have a value; that may be before join() has
  /// returned. Must not throw or wait.
  std::function<void(const PeerLoss&)> on_lost = {};
};

/// Ranks, address, port and token of the launcher's word.
RendezvousOptions rendezvous_options(const LaunchPlace& place);

class TcpRendezvous {
 public:
  /// Collective. Before anything is sent, throws ConfigError when an option is out of range or rank 0 can not
  /// listen. Then, on all ranks: ConfigError when ranks do not fit together (world size, configuration,
  /// version, a rank claimed twice), PeerError when one is missing at the deadline or has died. A rank that
  /// finds no rank 0 tries again until its deadline; one that has found it waits for rank 0's.
  static std::unique_ptr<TcpRendezvous> join(const RendezvousOptions& options);

  /// As close().
  ~TcpRendezvous();
  TcpRendezvous(const TcpRendezvous&) = delete;
  TcpRendezvous& operator=(const TcpRendezvous&) = delete;

  const RendezvousResult& result() const;

  /// The first rank that was lost, the same on all ranks that could be told; then nothing is watched any
  /// more. A rank that has closed is not lost.
  std::optional<PeerLoss> lost() const;

  /// Says that this rank has finished the call `sequence`; goes out with the next heartbeat. Does not
  /// allocate. The text is cut at 63 bytes.
  void note(std::int64_t sequence, std::string_view operation);
  /// The rank whose last finished call is the lowest; of equal ones, that of longest ago. Up to two
  /// heartbeats old, and empty before the first report.
  std::optional<PeerProgress> slowest() const;

  /// Local failure: all ranks, this one included, lose this rank, with the reason.
  void abort(const std::string& reason) noexcept;

  /// Rank 0 only; zeroes elsewhere.
  RendezvousCounts counts() const;

  /// Leaves in good order: the others do not miss this rank. Takes two seconds at most. When rank 0 has left,
  /// nobody watches any more.
  void close() noexcept;

 private:
  class Service;
  class Server;
  class Client;

  explicit TcpRendezvous(std::unique_ptr<Service> service);

  std::unique_ptr<Service> service_;
};

}  // namespace mxopt
