// Timing on a CUDA device: events around each run, or around a graph of many.
//
// Kernels of the library may begin before the kernel in front of them is done (programmatic dependent
// launch), in a graph too. What a graph of calls gives is therefore the throughput of calls back to back: the
// start of one overlaps the end of the one in front. measure_isolated() is for the time of one alone.
#pragma once

#include <cstddef>
#include <utility>
#include <vector>

#include <cuda_runtime.h>

#include "bench/spacer_cuda.h"
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

/// Times of body(run) on `stream`, each between two events; three runs to warm up. before(run) is enqueued in
/// front of the first event.
template <class Before, class Body>
Times measure_on_device(int repeats, StreamRef stream, const Before& before, const Body& body) {
  constexpr int kWarmUps = 3;
  for (int i = 0; i < kWarmUps; ++i) {
    before(i);
    body(i);
  }
  std::vector<TimedEvent> begins(static_cast<std::size_t>(repeats)), ends(begins.size());
  for (std::size_t i = 0; i < begins.size(); ++i) {
    const int run = kWarmUps + static_cast<int>(i);
    before(run);
    begins[i].record(stream);
    body(run);
    ends[i].record(stream);
  }
  MXOPT_CUDA_CHECK(cudaStreamSynchronize(cuda::native(stream)));
  std::vector<double> samples_ms;
  for (std::size_t i = 0; i < begins.size(); ++i) samples_ms.push_back(ends[i].ms_since(begins[i]));
  return statistics(std::move(samples_ms));
}

template <class Body>
Times measure_on_device(int repeats, StreamRef stream, const Body& body) {
  return measure_on_device(
      repeats, stream, [](int) {}, body);
}

/// Time of a replay over `calls`, of a graph of call(0), call(1) ... call(calls - 1): their throughput back
/// to back. For calls that are too short to be timed one by one.
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

/// The same with a spacer behind each call, which neither overlaps it nor what follows, less the median of a
/// graph of as many spacers alone: the time that one call takes of its own, its launch included.
template <class Call>
Times measure_isolated(int calls, int replays, StreamRef stream, const Call& call) {
  launch_spacer(stream);  // loads the kernel, outside of the capture
  const Times spacers = measure_calls(calls, replays, stream, [&](int) { launch_spacer(stream); });
  Times times = measure_calls(calls, replays, stream, [&](int i) {
    call(i);
    launch_spacer(stream);
  });
  for (double* const ms : {&times.min_ms, &times.p50_ms, &times.p99_ms}) *ms -= spacers.p50_ms;
  return times;
}

}  // namespace mxopt::bench
