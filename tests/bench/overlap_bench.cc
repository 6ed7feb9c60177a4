// How much of the gradients' reduction on the host is hidden behind the backward pass, under mpirun.
//
//   overlap_bench [--params 32] [--rows 1024] [--backward-ms 400] [--bucket-elems 4194304] [--repeats 9]
//                 [--grad fp32|bf16] [--json FILE]
//
//   backward  for every param of rows x 1024 a fixed amount of arithmetic without memory, calibrated at the
//             start, then its gradient is written
//   course    no reduction: the backward pass of a micro-batch that is not the last one. behind: grad_ready()
//   of
//             all params after the backward pass. overlapped: grad_ready() of each param as it is final
//   rest_ms   what step() still waits for the reductions
//   sum_ms    from the begin of the backward pass until all gradients are reduced; the slowest rank's
//   hidden    1 - (sum overlapped - sum without reduction) / (sum behind - sum without reduction), of the
//   medians wrong     elements of the reduced gradients of all ranks that are not the mean
#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <iostream>
#include <iterator>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "bench/bench_world.h"
#include "bench/table.h"

#include "mxopt/collectives/make_communicator.h"
#include "mxopt/optimizer/distributed_adam.h"
#include "mxopt/params/bf16.h"

namespace {

using namespace mxopt;
using Clock = std::chrono::steady_clock;

constexpr std::int64_t kCols = 1024;

double ms_since(Clock::time_point begin) {
  return std::chrono::duration<double, std::milli>(Clock::now() - begin).count();
}

/// Arithmetic that takes no memory. The result is returned so that it is not left out.
float compute(std::int64_t rounds) {
  float x[8] = {1, 2, 3, 4, 5, 6, 7, 8};
  for (std::int64_t i = 0; i < rounds; ++i) {
    for (float& value : x) value = value * 0.999f + 0.001f;
  }
  return x[0] + x[7];
}

enum class Course { kNoReduction, kBehind, kOverlapped };

struct Sample {
  double backward_ms = 0, rest_ms = 0;
};

class Trainer {
 public:
  Trainer(Communicator& comm, const std::vector<ParamSpec>& specs, const Config& config, double backward_ms)
      : comm_(comm), opt_(specs, config, comm) {
    const std::vector<float> zeros(static_cast<std::size_t>(opt_.layout().params()[0].elems()), 0.0f);
    for (const ParamSpec& s : specs) {
      names_.push_back(s.name);
      opt_.set_initial(s.name, std::span<const float>(zeros));
    }
    opt_.publish();
    std::ranges::reverse(names_);
    constexpr std::int64_t kTrial = 10'000'000;
    const auto begin = Clock::now();
    sink_ += compute(kTrial);
    rounds_ = static_cast<std::int64_t>(kTrial * backward_ms / ms_since(begin) /
                                        static_cast<double>(names_.size()));
  }

  Sample run(Course course) {
    comm_.barrier();
    Sample sample;
    const auto begin = Clock::now();
    opt_.begin_backward(course != Course::kNoReduction);
    for (const std::string& name : names_) {
      sink_ += compute(rounds_);
      fill(opt_.grad(name).data);
      if (course == Course::kOverlapped) opt_.grad_ready(name);
    }
    if (course == Course::kBehind) {
      for (const std::string& name : names_) opt_.grad_ready(name);
    }
    sample.backward_ms = ms_since(begin);
    if (course == Course::kNoReduction) {
      opt_.begin_backward(true);  // else step() would take the buffers for empty ones
      for (const std::string& name : names_) opt_.grad_ready(name);
      opt_.step();
    } else {
      sample.rest_ms = opt_.step()->ms.reduce_scatter;
    }
    wrong_ += count_wrong();
    return sample;
  }

  std::int64_t wrong() const { return wrong_; }
  float sink() const { return sink_; }

 private:
  void fill(TypedSpan grad) const {
    const auto value = static_cast<float>(comm_.rank() + 1);
    if (grad.dtype == DType::kFp32) {
      std::ranges::fill(grad.as<float>(), value);
    } else {
      std::ranges::fill(grad.as<Bf16>(), fp32_to_bf16(value));
    }
  }

  std::int64_t count_wrong() {
    const float mean = static_cast<float>(comm_.size() + 1) / 2;
    std::int64_t wrong = 0;
    for (const std::string& name : names_) {
      const OwnedSlice slice = opt_.owned(name);
      const TypedSpan grad =
          opt_.grad(name).data.sub(slice.param_begin, static_cast<std::int64_t>(slice.master.size()));
      if (grad.dtype == DType::kFp32) {
        wrong += std::ranges::count_if(grad.as<float>(), [&](float x) { return x != mean; });
      } else {
        wrong += std::ranges::count_if(grad.as<Bf16>(), [&](Bf16 x) { return bf16_to_fp32(x) != mean; });
      }
    }
    return wrong;
  }

  Communicator& comm_;
  DistributedAdam opt_;
  std::vector<std::string> names_;  // in the order of the backward pass
  std::int64_t rounds_ = 0, wrong_ = 0;
  float sink_ = 0;
};

void run(int argc, char** argv) {
  const bench::World world(argc, argv);
  const auto number = [&](const char* name, const char* otherwise) {
    return std::stoll(bench::option(argc, argv, name, otherwise));
  };
  const auto repeats = static_cast<int>(number("--repeats", "9"));
  const std::string grad = bench::option(argc, argv, "--grad", "fp32");
  if (grad != "fp32" && grad != "bf16") throw std::runtime_error("--grad " + grad + "; allowed: fp32, bf16");
  Config config;
  config.parallel.device = DeviceChoice::kHost;
  config.optimizer.bucket_elems = number("--bucket-elems", "4194304");
  config.optimizer.grad_dtype = grad == "fp32" ? DType::kFp32 : DType::kBf16;
  std::vector<ParamSpec> specs(static_cast<std::size_t>(number("--params", "32")));
  for (std::size_t i = 0; i < specs.size(); ++i) {
    specs[i].name = "p" + std::to_string(i);
    specs[i].shape = {number("--rows", "1024"), kCols};
    specs[i].grad_mode = GradMode::kOverwrite;
  }
  const auto comm = make_communicator(communicator_options(config.parallel));
  Trainer trainer(*comm, specs, config, std::stod(bench::option(argc, argv, "--backward-ms", "400")));

  bench::Table table({"course", "ranks", "grad", "backward_ms", "rest_ms", "sum_ms", "sum_min_ms"});
  std::vector<double> medians;
  const std::pair<Course, const char*> courses[] = {{Course::kNoReduction, "no reduction"},
                                                    {Course::kBehind, "behind"},
                                                    {Course::kOverlapped, "overlapped"}};
  // In turns, so that what else the machine does meets all courses alike.
  std::array<std::vector<double>, std::size(courses)> backward, rest, sum;
  for (int i = -1; i < repeats; ++i) {
    for (std::size_t c = 0; c < std::size(courses); ++c) {
      const Sample sample = trainer.run(courses[c].first);
      if (i < 0) continue;  // a warm-up
      backward[c].push_back(sample.backward_ms);
      rest[c].push_back(sample.rest_ms);
      sum[c].push_back(sample.backward_ms + sample.rest_ms);
    }
  }
  for (std::size_t c = 0; c < std::size(courses); ++c) {
    const bench::Times all = world.slowest(bench::statistics(sum[c]));
    medians.push_back(all.p50_ms);
    const double backward_ms = world.slowest(bench::statistics(backward[c])).p50_ms;
    const double rest_ms = world.slowest(bench::statistics(rest[c])).p50_ms;
    if (world.rank() == 0) {
      table.add({courses[c].second, world.size(), grad, backward_ms, rest_ms, all.p50_ms, all.min_ms});
    }
  }
  const std::int64_t wrong = world.sum(trainer.wrong());
  if (world.rank() != 0) return;
  std::cout << "hidden " << 1 - (medians[2] - medians[0]) / (medians[1] - medians[0]) << ", wrong elements "
            << wrong << (trainer.sink() == 0 ? " " : "") << std::endl;
  const std::string json = bench::option(argc, argv, "--json", "");
  if (!json.empty()) table.write_json(json);
}

}  // namespace

int main(int argc, char** argv) {
  return mxopt::bench::run_program("overlap_bench", run, argc, argv);
}
