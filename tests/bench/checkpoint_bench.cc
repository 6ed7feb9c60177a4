// Saving and loading the state of an optimizer against what the disk does, and what an asynchronous save
// costs training.
//
//   checkpoint_bench --dir DIR [--device host|cuda] [--params 8] [--rows 4096] [--compute-ms 0] [--steps 40]
//                    [--json FILE]
//
//   DIR      a folder on the disk to be measured, without other files; what the program writes is removed at
//   the end
//
//   state       fp32 master and moments of params of rows x 4096 elements; under mpirun each rank has its
//   share
//
//   disk write  one file of as many bytes, written in pieces of 8 MiB and brought to the disk
//
//   disk read   the same file, read in pieces of 64 MiB, after the system was told to forget it
//
//   save        Checkpointer::save(), until it is complete and on the disk; the next one replaces the first
//
//   load        Checkpointer::load() with checkpoint.verify size and full, likewise after forgetting; with
//   publish
//
//   ratio       of the row's GB/s to the disk's in this run
//
//   async       copying_ms: the call of save(). save_ms: until the checkpoint is complete. step_ms: the
//   median step
//               without a save, whose forward and backward passes are compute-ms of nothing. lost_ms: what
//               the steps that began while the save was in flight took longer than that, all together, with
//               the call
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <filesystem>
#include <iostream>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <fcntl.h>
#include <unistd.h>

#include "bench/bench_world.h"
#include "bench/table.h"
#if MXOPT_BENCH_HAS_CUDA
#include "bench/busy_cuda.h"
#endif

#include "mxopt/collectives/make_communicator.h"
#include "mxopt/optimizer/checkpoint/file_input.h"
#include "mxopt/optimizer/checkpoint/file_output.h"
#include "mxopt/optimizer/checkpointer.h"

namespace {

using namespace mxopt;
using Clock = std::chrono::steady_clock;

constexpr std::int64_t kCols = 4096;

double ms_since(Clock::time_point begin) {
  return std::chrono::duration<double, std::milli>(Clock::now() - begin).count();
}

/// Has the system drop what it keeps of a file, so that it is read from the disk.
void forget(const std::filesystem::path& path) {
  const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (file < 0) throw std::runtime_error("can not open " + path.string());
  posix_fadvise(file, 0, 0, POSIX_FADV_DONTNEED);
  close(file);
}

void forget_all(const std::filesystem::path& folder) {
  for (const auto& entry : std::filesystem::directory_iterator(folder)) forget(entry.path());
}

double write_ms(const std::filesystem::path& path, std::int64_t bytes) {
  const std::vector<std::byte> piece(std::size_t{8} << 20, std::byte{0x5A});
  const auto begin = Clock::now();
  FileOutput file(path, nullptr);
  for (std::int64_t left = bytes; left > 0; left -= static_cast<std::int64_t>(piece.size())) {
    file.write(std::span(piece).first(
        static_cast<std::size_t>(std::min(left, static_cast<std::int64_t>(piece.size())))));
  }
  file.close();
  return ms_since(begin);
}

double read_ms(const std::filesystem::path& path) {
  forget(path);
  std::vector<std::byte> piece(std::size_t{64} << 20);
  const auto begin = Clock::now();
  const FileInput file(path);
  for (std::int64_t at = 0; at < file.bytes(); at += static_cast<std::int64_t>(piece.size())) {
    const std::int64_t part = std::min(file.bytes() - at, static_cast<std::int64_t>(piece.size()));
    file.read(at, std::span(piece).first(static_cast<std::size_t>(part)));
  }
  return ms_since(begin);
}

/// Steps without gradients, with a stand-in for the passes of a model.
class Trainer {
 public:
  Trainer(DistributedAdam& opt, Device device, double compute_ms)
      : opt_(opt), device_(device), stream_(device), compute_ms_(compute_ms) {}

  double step_ms() {
    const auto begin = Clock::now();
    opt_.begin_backward();
#if MXOPT_BENCH_HAS_CUDA
    if (device_.kind == DeviceKind::kCuda) bench::keep_busy(compute_ms_ * 1e3, stream_.ref());
#endif
    if (device_.kind == DeviceKind::kHost) {
      std::this_thread::sleep_for(std::chrono::duration<double, std::milli>(compute_ms_));
    }
    static_cast<void>(*opt_.step(stream_.ref()));
    synchronize(device_, stream_.ref());
    return ms_since(begin);
  }

 private:
  DistributedAdam& opt_;
  Device device_;
  Stream stream_;
  double compute_ms_;
};

Device device_of(const bench::World& world, const std::string& name) {
  if (name == "host") return {};
  if (name == "cuda") return world.device();
  throw std::runtime_error("--device " + name + "; allowed: host, cuda");
}

void run(int argc, char** argv) {
  const bench::World world(argc, argv);
  const auto number = [&](const char* name, const char* otherwise) {
    return std::stoll(bench::option(argc, argv, name, otherwise));
  };
  const std::string dir = bench::option(argc, argv, "--dir", "");
  if (dir.empty()) throw std::runtime_error("--dir is missing: a folder on the disk to be measured");
  const std::string device_name = bench::option(argc, argv, "--device", "host");
  const Device device = device_of(world, device_name);
  const double compute_ms = std::stod(bench::option(argc, argv, "--compute-ms", "0"));
  const auto steps = static_cast<int>(number("--steps", "40"));

  Config config;
  config.parallel.device = device.kind == DeviceKind::kHost ? DeviceChoice::kHost : DeviceChoice::kCuda;
  config.checkpoint.dir = dir;
  std::vector<ParamSpec> specs(static_cast<std::size_t>(number("--params", "8")));
  std::int64_t elems = 0;
  for (std::size_t i = 0; i < specs.size(); ++i) {
    specs[i].name = "p" + std::to_string(i);
    specs[i].shape = {number("--rows", "4096"), kCols};
    elems += specs[i].shape[0] * kCols;
  }
  const auto comm = make_communicator(communicator_options(config.parallel, device));
  DistributedAdam opt(specs, config, *comm, device);
  {
    const std::vector<float> values(static_cast<std::size_t>(specs[0].shape[0] * kCols), 0.5f);
    for (const ParamSpec& spec : specs) opt.set_initial(spec.name, std::span<const float>(values));
    opt.publish();
  }
  const std::int64_t bytes = 12 * elems;  // of all ranks
  bench::Table table({"what", "device", "ranks", "bytes", "seconds", "GB/s", "ratio"});
  const auto add = [&](const char* what, double ms, double disk_ms) {
    if (world.rank() != 0) return;
    table.add({what, device_name, world.size(), bytes, ms / 1e3, bench::gb_per_s(bytes, ms), disk_ms / ms});
  };

  // One rank alone has the disk for itself, as all together have it in a save.
  const std::filesystem::path trial = std::filesystem::path(dir) / "trial";
  double disk_write_ms = 0, disk_read_ms = 0;
  comm->barrier();
  if (world.rank() == 0) {
    disk_write_ms = write_ms(trial, bytes);
    disk_read_ms = read_ms(trial);
    std::filesystem::remove(trial);
  }
  comm->barrier();
  add("disk write", disk_write_ms, disk_write_ms);
  std::filesystem::path folder;
  {
    // On a device the first save pins its memory, and the next one has it.
    Checkpointer checkpoints(opt, config.checkpoint);
    for (const char* what : {"first save", "next save"}) {
      const auto begin = Clock::now();
      folder = checkpoints.save().folder;
      add(what, ms_since(begin), disk_write_ms);
    }
  }
  add("disk read", disk_read_ms, disk_read_ms);
  for (const auto& [verify, what] :
       {std::pair{Verify::kSize, "load, size"}, std::pair{Verify::kFull, "load, full"}}) {
    config.checkpoint.verify = verify;
    Checkpointer checkpoints(opt, config.checkpoint);
    if (world.rank() == 0) forget_all(folder);
    comm->barrier();
    const auto begin = Clock::now();
    checkpoints.load();
    add(what, ms_since(begin), disk_read_ms);
  }

  Trainer trainer(opt, device, compute_ms);
  std::vector<double> without;
  for (int step = 0; step < 5; ++step) trainer.step_ms();
  for (int step = 0; step < steps; ++step) without.push_back(trainer.step_ms());
  const double step_ms = bench::statistics(without).p50_ms;
  config.checkpoint.async = true;
  bench::Table times({"async", "copying_ms", "save_ms", "step_ms", "steps", "lost_ms"});
  {
    Checkpointer checkpoints(opt, config.checkpoint);
    for (const char* which : {"first save", "next save"}) {
      const auto begin = Clock::now();
      checkpoints.save();
      const double copying_ms = ms_since(begin);
      double lost_ms = copying_ms;
      int count = 0;
      // Every rank makes as many steps.
      std::int64_t is_saving = 1;
      while (is_saving != 0) {
        lost_ms += trainer.step_ms() - step_ms;
        ++count;
        is_saving = world.sum(checkpoints.is_saving() ? 1 : 0);
      }
      checkpoints.wait();
      if (world.rank() == 0) times.add({which, copying_ms, ms_since(begin), step_ms, count, lost_ms});
    }
  }
  comm->barrier();
  const std::string json = bench::option(argc, argv, "--json", "");
  if (world.rank() != 0) return;
  if (!json.empty()) table.write_json(json);
  for (const auto& entry : std::filesystem::directory_iterator(dir))
    std::filesystem::remove_all(entry.path());
}

}  // namespace

int main(int argc, char** argv) {
  return mxopt::bench::run_program("checkpoint_bench", run, argc, argv);
}
