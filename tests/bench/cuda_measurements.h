// A program's rows on one CUDA device: how they begin and where they go, from its options.
#pragma once

#include <string>

#include "bench/cuda_ceiling.h"
#include "bench/measurements.h"
#include "bench/run_facts.h"
#include "bench/table.h"

#include "mxopt/params/memory.h"

namespace mxopt::bench {

/// The ceiling is measured now. Of several ranks, only the first prints.
inline Measurements start_measurements(int argc, char** argv, Device device, StreamRef stream,
                                       int world_size = 1, int rank = 0) {
  return {facts_of_run(argc, argv, device, world_size), measure_ceiling(device, stream), 2 * kCeilingBytes,
          rank == 0};
}

/// To the file that --json names, if any.
inline void write_json(const Measurements& measurements, int argc, char** argv) {
  const std::string path = option(argc, argv, "--json", "");
  if (!path.empty()) measurements.write_json(path);
}

}  // namespace mxopt::bench
