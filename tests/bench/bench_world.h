// The processes of one run of a benchmark: one per GPU under mpirun, or this one alone.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <stdexcept>
#include <string>

#if MXOPT_BENCH_HAS_MPI
#include <mpi.h>
#endif

#include "bench/table.h"

#include "mxopt/params/memory.h"

namespace mxopt::bench {

/// Lives in main(): MPI begins and ends with it, where mpirun started the process.
class World {
 public:
  World([[maybe_unused]] int argc, [[maybe_unused]] char** argv) {
    // Open MPI's launcher sets this one. Without a launcher MPI is left alone.
    const char* const ranks = std::getenv("OMPI_COMM_WORLD_SIZE");
    if (ranks == nullptr) return;
#if MXOPT_BENCH_HAS_MPI
    int provided = 0;
    MPI_Init_thread(&argc, &argv, MPI_THREAD_FUNNELED, &provided);
    has_mpi_ = true;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank_);
    MPI_Comm_size(MPI_COMM_WORLD, &size_);
    MPI_Comm node = MPI_COMM_NULL;
    MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, rank_, MPI_INFO_NULL, &node);
    MPI_Comm_rank(node, &local_rank_);
    MPI_Comm_free(&node);
#else
    if (std::string(ranks) != "1") throw std::runtime_error("started by mpirun, but built without MPI");
#endif
  }
  ~World() {
#if MXOPT_BENCH_HAS_MPI
    if (has_mpi_) MPI_Finalize();
#endif
  }
  World(const World&) = delete;
  World& operator=(const World&) = delete;

  int rank() const {
    return rank_;
  }
  int size() const {
    return size_;
  }
  Device device() const {
    return {DeviceKind::kCuda, local_rank_};
  }

  /// The largest of all ranks' times: a collective is as late as its last rank.
  Times slowest(Times times) const {
#if MXOPT_BENCH_HAS_MPI
    double values[3] = {times.min_ms, times.p50_ms, times.p99_ms};
    if (size_ > 1) MPI_Allreduce(MPI_IN_PLACE, values, 3, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
    times = {values[0], values[1], values[2]};
#endif
    return times;
  }
  std::int64_t sum(std::int64_t value) const {
#if MXOPT_BENCH_HAS_MPI
    if (size_ > 1) MPI_Allreduce(MPI_IN_PLACE, &value, 1, MPI_INT64_T, MPI_SUM, MPI_COMM_WORLD);
#endif
    return value;
  }
  /// From rank 0.
  void broadcast([[maybe_unused]] void* data, [[maybe_unused]] int bytes) const {
#if MXOPT_BENCH_HAS_MPI
    if (size_ > 1) MPI_Bcast(data, bytes, MPI_BYTE, 0, MPI_COMM_WORLD);
#endif
  }

 private:
  bool has_mpi_ = false;
  int rank_ = 0, size_ = 1, local_rank_ = 0;
};

}  // namespace mxopt::bench
