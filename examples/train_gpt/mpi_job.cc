#include "train_gpt/mpi_job.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <map>
#include <sstream>
#include <string_view>
#include <thread>
#include <vector>

#include <mpi.h>
#include <unistd.h>

#include "mxopt/params/check.h"

namespace train_gpt {
namespace {

constexpr double kStartWaitS = 300;

/// What a rank sends: fixed sizes, so that one message is enough.
struct Report {
  std::array<char, 64> host{};
  std::array<char, 4096> text{};
};

template <std::size_t N>
void copy_text(std::array<char, N>& to, std::string_view from) {
  const std::size_t count = std::min(from.size(), N - 1);
  std::memcpy(to.data(), from.data(), count);
  to[count] = '\0';
}

/// False when the deadline passes first; the request is then still open.
bool completes(MPI_Request& request, double wait_s) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::duration<double>(wait_s);
  int done = 0;
  while (true) {
    MPI_Test(&request, &done, MPI_STATUS_IGNORE);
    if (done != 0) return true;
    if (std::chrono::steady_clock::now() > deadline) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

/// "rank 0", "ranks 0, 2-3", "all 4 ranks".
std::string ranks_text(const std::vector<int>& ranks, int size) {
  if (static_cast<int>(ranks.size()) == size && size > 1) return "all " + std::to_string(size) + " ranks";
  std::ostringstream text;
  text << (ranks.size() == 1 ? "rank " : "ranks ");
  for (std::size_t i = 0; i < ranks.size();) {
    std::size_t end = i + 1;
    while (end < ranks.size() && ranks[end] == ranks[end - 1] + 1) ++end;
    text << (i == 0 ? "" : ", ") << ranks[i];
    if (end - i > 1) text << '-' << ranks[end - 1];
    i = end;
  }
  return text.str();
}

void print_failures(const std::vector<Report>& reports, int size) {
  std::map<std::string, std::vector<int>> by_text;
  for (int rank = 0; rank < size; ++rank) {
    const char* text = reports[static_cast<std::size_t>(rank)].text.data();
    if (*text != '\0') by_text[text].push_back(rank);
  }
  for (const auto& [text, ranks] : by_text) {
    std::cerr << "train_gpt: " << ranks_text(ranks, size) << " on "
              << reports[static_cast<std::size_t>(ranks.front())].host.data() << ":\n"
              << text << std::endl;
  }
}

/// The size that a launcher's variable tells; throws when it is no number.
int launcher_size(const char* name, const char* value) {
  int size = 0;
  const std::string_view text(value);
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), size);
  if (error != std::errc() || end != text.data() + text.size() || size < 1) {
    throw mxopt::ConfigError(std::string("environment variable ") + name + " is \"" + value +
                             "\"; allowed: a number of ranks");
  }
  return size;
}

}  // namespace

struct MpiJob::Comms {
  MPI_Comm outcomes = MPI_COMM_NULL;  // settle() only, so that it never meets other messages
  MPI_Comm control = MPI_COMM_NULL;
  MPI_Comm node = MPI_COMM_NULL;
};

MpiJob::MpiJob(int* argc, char*** argv) {
  int provided = MPI_THREAD_SINGLE;
  MPI_Init_thread(argc, argv, MPI_THREAD_FUNNELED, &provided);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank_);
  MPI_Comm_size(MPI_COMM_WORLD, &size_);
  std::array<char, 64> name{};
  gethostname(name.data(), name.size() - 1);
  host_ = name.data();
  if (provided < MPI_THREAD_FUNNELED) {
    abort("MPI gives thread level " + std::to_string(provided) +
          ", but the tensor library runs threads: level " + std::to_string(MPI_THREAD_FUNNELED) +
          " is needed");
  }
  comms_ = std::make_unique<Comms>();
  MPI_Comm_dup(MPI_COMM_WORLD, &comms_->outcomes);
  MPI_Comm_dup(MPI_COMM_WORLD, &comms_->control);
  MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, rank_, MPI_INFO_NULL, &comms_->node);
  MPI_Comm_rank(comms_->node, &node_rank_);
}

MpiJob::~MpiJob() {
  for (MPI_Comm* comm : {&comms_->node, &comms_->control, &comms_->outcomes}) MPI_Comm_free(comm);
  MPI_Finalize();
}

void MpiJob::check_launcher() const {
  const auto check = [this](const char* name) {
    const char* value = std::getenv(name);
    if (value == nullptr) return false;
    if (const int expected = launcher_size(name, value); expected != size_) {
      std::ostringstream text;
      text << "the launcher started " << expected << " ranks (" << name << "=" << value << "), but MPI knows "
           << size_ << "; start with the mpirun of the MPI that this program is built with, or unset "
           << name;
      throw mxopt::ConfigError(text.str());
    }
    return true;
  };
  check("WORLD_SIZE");
  // The first launcher that speaks decides: mpirun in a Slurm job starts its own daemons as a job step.
  if (check("OMPI_COMM_WORLD_SIZE")) return;
  // Without a step these stand in the environment of a plain batch script as well.
  if (std::getenv("SLURM_STEP_ID") != nullptr && check("SLURM_NTASKS")) return;
  check("PMI_SIZE");
}

int MpiJob::settle(const Outcome& outcome, double wait_s) {
  constexpr int kConfigError = 1;
  constexpr int kOtherError = 2;
  const int mine = !outcome.failed ? 0 : outcome.is_config_error ? kConfigError : kOtherError;
  int worst = 0;
  MPI_Request request = MPI_REQUEST_NULL;
  MPI_Iallreduce(&mine, &worst, 1, MPI_INT, MPI_MAX, comms_->outcomes, &request);
  if (!completes(request, wait_s)) {
    abort(outcome.failed ? outcome.text : "the other ranks did not come to the end of this phase in time");
  }
  if (worst == 0) return 0;

  Report report;
  copy_text(report.host, host_);
  if (outcome.failed) copy_text(report.text, outcome.text);
  std::vector<Report> reports(rank_ == 0 ? static_cast<std::size_t>(size_) : 0);
  MPI_Igather(&report, static_cast<int>(sizeof report), MPI_BYTE, reports.data(),
              static_cast<int>(sizeof report), MPI_BYTE, 0, comms_->outcomes, &request);
  if (!completes(request, kStartWaitS)) abort(outcome.text);
  if (rank_ == 0) print_failures(reports, size_);
  return worst == kConfigError ? 2 : 1;
}

void MpiJob::abort(const std::string& reason) const {
  std::cerr << "train_gpt: rank " << rank_ << " on " << host_ << ":\n" << reason << std::endl;
  end(1);
}

void MpiJob::end(int exit_code) const {
  MPI_Abort(MPI_COMM_WORLD, exit_code);
  std::abort();
}

void MpiJob::require_equal(const std::string& what, const std::string& text) {
  using Text = std::array<char, 1024>;
  Text mine{};
  copy_text(mine, text);
  std::vector<Text> all(static_cast<std::size_t>(size_));
  MPI_Request request = MPI_REQUEST_NULL;
  MPI_Iallgather(mine.data(), static_cast<int>(mine.size()), MPI_BYTE, all.data(),
                 static_cast<int>(mine.size()), MPI_BYTE, comms_->control, &request);
  if (!completes(request, kStartWaitS)) abort("the other ranks did not come to compare their " + what);
  for (int rank = 1; rank < size_; ++rank) {
    const std::string_view theirs(all[static_cast<std::size_t>(rank)].data());
    if (theirs == all[0].data()) continue;
    std::ostringstream message;
    message << "ranks disagree on " << what << ":\n  rank 0: " << all[0].data() << "\n  rank " << rank << ": "
            << theirs;
    throw mxopt::ContractError(message.str());
  }
}

int MpiJob::combine_over_node(unsigned long* words, int count) {
  MPI_Request request = MPI_REQUEST_NULL;
  MPI_Iallreduce(MPI_IN_PLACE, words, count, MPI_UNSIGNED_LONG, MPI_BOR, comms_->node, &request);
  if (!completes(request, kStartWaitS)) abort("the other ranks of this node did not come to share its cores");
  int ranks = 1;
  MPI_Comm_size(comms_->node, &ranks);
  return ranks;
}

}  // namespace train_gpt
