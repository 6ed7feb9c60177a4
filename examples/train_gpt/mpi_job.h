// The MPI job that this process is a rank of: start, end, and what ranks tell each other when something goes
// wrong.
//
// One object per process, made first and destroyed last in main(). Every wait in here has a deadline.
#pragma once

#include <memory>
#include <string>

namespace train_gpt {

/// How one rank came out of a phase of the program.
struct Outcome {
  bool failed = false;
  bool is_config_error = false;
  std::string text;
};

class MpiJob {
 public:
  /// Initialises MPI for calls from this thread; works without a launcher as well.
  MpiJob(int* argc, char*** argv);
  /// Finalizes MPI.
  ~MpiJob();
  MpiJob(const MpiJob&) = delete;
  MpiJob& operator=(const MpiJob&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }
  /// This rank's number among those of its node.
  int node_rank() const { return node_rank_; }
  const std::string& host() const { return host_; }

  /// Throws ConfigError when MPI is not as the launcher's variables say: then each process would train alone.
  void check_launcher() const;

  /// Collective: compares outcomes. Rank 0 prints each different error once, with its ranks and hosts.
  ///
  /// Returns  the exit code: 0, 2 when configuration errors are all there is, else 1.
  /// When the others do not come within wait_s, a failed rank prints its error itself and ends the whole job.
  int settle(const Outcome& outcome, double wait_s);

  /// Ends the whole job without closing anything.
  [[noreturn]] void end(int exit_code) const;
  /// Prints the reason with rank and host, and ends the whole job.
  [[noreturn]] void abort(const std::string& reason) const;

  /// Collective. Throws ContractError on every rank, naming one that differs from rank 0, when texts are not
  /// equal.
  void require_equal(const std::string& what, const std::string& text);

  /// Collective: OR of `words` over the ranks of this node, and how many ranks those are.
  int combine_over_node(unsigned long* words, int count);

 private:
  struct Comms;
  int rank_ = 0;
  int size_ = 1;
  int node_rank_ = 0;
  std::string host_;
  std::unique_ptr<Comms> comms_;
};

}  // namespace train_gpt
