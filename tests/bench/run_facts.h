// Where, when and how a benchmark ran on a CUDA device.
#pragma once

#include <array>
#include <cstdio>
#include <ctime>
#include <string>
#include <string_view>

#include <cuda_runtime.h>

#include "bench/table.h"

#include "mxopt/params/cuda_handles.h"
#include "mxopt/params/memory.h"

namespace mxopt::bench {

struct RunFacts {
  std::string card;
  std::string driver;
  std::string cuda;
  std::string commit;
  std::string date;
  std::string command;
};

/// First line of what a command prints; empty when there is none.
inline std::string output_of(const char* command) {
  std::FILE* const pipe = popen(command, "r");
  if (pipe == nullptr) return "";
  std::array<char, 256> line{};
  const bool is_read = std::fgets(line.data(), static_cast<int>(line.size()), pipe) != nullptr;
  pclose(pipe);
  const std::string_view text = is_read ? line.data() : "";
  return std::string(text.substr(0, text.find('\n')));
}

/// The command is written with the launcher of several ranks, without the folder of the program, and without
/// --json and --commit.
inline RunFacts facts_of_run(int argc, char** argv, Device device, int world_size) {
  RunFacts facts;
  cudaDeviceProp properties{};
  MXOPT_CUDA_CHECK(cudaGetDeviceProperties(&properties, device.index));
  facts.card = properties.name;
  facts.driver = output_of("nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null");
  if (facts.driver.empty()) facts.driver = "unknown";
  facts.cuda = std::to_string(CUDART_VERSION / 1000) + "." + std::to_string(CUDART_VERSION % 1000 / 10);
  facts.commit = option(argc, argv, "--commit", "unknown");
  const std::time_t now = std::time(nullptr);
  std::tm utc{};
  std::array<char, 16> day{};
  std::strftime(day.data(), day.size(), "%Y-%m-%d", gmtime_r(&now, &utc));
  facts.date = day.data();
  const std::string program = argv[0];
  if (world_size > 1) facts.command = "mpirun -n " + std::to_string(world_size) + " ";
  facts.command += program.substr(program.find_last_of('/') + 1);
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    if (argument == "--json" || argument == "--commit") {
      ++i;
    } else {
      facts.command += " " + argument;
    }
  }
  return facts;
}

}  // namespace mxopt::bench
