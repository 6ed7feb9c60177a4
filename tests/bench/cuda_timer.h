// Timing on a CUDA device: events around each run, the ceiling of a large copy, and the facts of the machine.
#pragma once

#include <array>
#include <cstdint>
#include <cstdio>
#include <ctime>
#include <string>
#include <string_view>
#include <vector>

#include <cuda_runtime.h>

#include "bench/measurements.h"
#include "bench/table.h"

#include "mxopt/params/cuda_handles.h"
#include "mxopt/params/memory.h"

namespace mxopt::bench {

/// An event that knows its time.
class TimedEvent {
 public:
  TimedEvent() { MXOPT_CUDA_CHECK(cudaEventCreate(&event_)); }
  ~TimedEvent() { cudaEventDestroy(event_); }
  TimedEvent(const TimedEvent&) = delete;
  TimedEvent& operator=(const TimedEvent&) = delete;

  void record(StreamRef stream) { MXOPT_CUDA_CHECK(cudaEventRecord(event_, cuda::native(stream))); }
  double ms_since(const TimedEvent& earlier) const {
    float ms = 0;
    MXOPT_CUDA_CHECK(cudaEventElapsedTime(&ms, earlier.event_, event_));
    return static_cast<double>(ms);
  }

 private:
  cudaEvent_t event_ = nullptr;
};

/// Times of body(run) on `stream`, each between two events; three runs to warm up.
template <class Body>
Times measure_on_device(int repeats, StreamRef stream, const Body& body) {
  constexpr int kWarmUps = 3;
  for (int i = 0; i < kWarmUps; ++i) body(i);
  std::vector<TimedEvent> begins(static_cast<std::size_t>(repeats)), ends(begins.size());
  for (std::size_t i = 0; i < begins.size(); ++i) {
    begins[i].record(stream);
    body(kWarmUps + static_cast<int>(i));
    ends[i].record(stream);
  }
  MXOPT_CUDA_CHECK(cudaStreamSynchronize(cuda::native(stream)));
  std::vector<double> samples_ms;
  for (std::size_t i = 0; i < begins.size(); ++i) samples_ms.push_back(ends[i].ms_since(begins[i]));
  return statistics(std::move(samples_ms));
}

/// Times of one call, from replays of a graph of `calls` calls: call(0), call(1) ... For those that are too
/// short to be timed one by one.
template <class Call>
Times measure_calls(int calls, int replays, StreamRef stream, const Call& call) {
  constexpr int kWarmUps = 2;
  const cudaStream_t native = cuda::native(stream);
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t exec = nullptr;
  MXOPT_CUDA_CHECK(cudaStreamBeginCapture(native, cudaStreamCaptureModeThreadLocal));
  for (int i = 0; i < calls; ++i) call(i);
  MXOPT_CUDA_CHECK(cudaStreamEndCapture(native, &graph));
  MXOPT_CUDA_CHECK(cudaGraphInstantiate(&exec, graph, 0));
  TimedEvent begin, end;
  std::vector<double> samples_ms;
  for (int i = 0; i < kWarmUps + replays; ++i) {
    begin.record(stream);
    MXOPT_CUDA_CHECK(cudaGraphLaunch(exec, native));
    end.record(stream);
    MXOPT_CUDA_CHECK(cudaStreamSynchronize(native));
    if (i >= kWarmUps) samples_ms.push_back(end.ms_since(begin) / calls);
  }
  MXOPT_CUDA_CHECK(cudaGraphExecDestroy(exec));
  MXOPT_CUDA_CHECK(cudaGraphDestroy(graph));
  return statistics(std::move(samples_ms));
}

inline constexpr std::int64_t kCeilingBytes = std::int64_t{1} << 31;

/// Of a copy of kCeilingBytes on the device.
inline Times measure_ceiling(Device device, StreamRef stream) {
  const auto allocator = default_allocator(device);
  const Buffer from(kCeilingBytes, device, allocator), to(kCeilingBytes, device, allocator);
  return measure_on_device(15, stream,
                           [&](int) { copy_bytes(to.data(), from.data(), kCeilingBytes, device, stream); });
}

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

/// The command is written without the folder of the program, and without --json and --commit.
inline RunFacts facts_of_run(int argc, char** argv, Device device) {
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
  facts.command = program.substr(program.find_last_of('/') + 1);
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

/// The rows of a program on one device, with the ceiling measured now.
inline Measurements start_measurements(int argc, char** argv, Device device, StreamRef stream,
                                       bool prints = true) {
  return {facts_of_run(argc, argv, device), measure_ceiling(device, stream), 2 * kCeilingBytes, prints};
}

/// To the file that --json names, if any.
inline void write_json(const Measurements& measurements, int argc, char** argv) {
  const std::string path = option(argc, argv, "--json", "");
  if (!path.empty()) measurements.write_json(path);
}

}  // namespace mxopt::bench
