// A small model whose state is known for every element, and its slices for any number of writers.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <exception>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "mxopt/optimizer/checkpoint/checkpoint_reader.h"
#include "mxopt/optimizer/checkpoint/checkpoint_writer.h"
#include "mxopt/optimizer/checkpoint/file_output.h"

namespace mxopt::test {

inline constexpr StateKind kAllKinds[] = {StateKind::kMaster, StateKind::kExpAvg, StateKind::kExpAvgSq};

/// Any bits, NaN with payloads included; they depend on name, kind, element and seed.
inline float state_value(const std::string& param, StateKind kind, std::int64_t element, int seed) {
  std::uint64_t bits = 1469598103934665603U + static_cast<std::uint64_t>(seed);
  const auto mix = [&](std::uint64_t value) {
    bits = (bits ^ value) * 0x9E3779B97F4A7C15U, bits ^= bits >> 29U;
  };
  for (const char c : param) mix(static_cast<unsigned char>(c));
  mix(static_cast<std::uint64_t>(kind));
  mix(static_cast<std::uint64_t>(element));
  return std::bit_cast<float>(static_cast<std::uint32_t>(bits >> 16U));
}

/// Params laid out one after the other, divided evenly over the writers; what lies between the params belongs
/// to nobody.
struct CheckpointModel {
  std::vector<std::pair<std::string, std::vector<std::int64_t>>> params;
  std::int64_t align_elems = 128;        // of the params' starts
  std::int64_t shard_align_elems = 128;  // of the writers' shards
  int seed = 0;
  std::string section;

  CheckpointSection table() const {
    CheckpointSection made;
    made.name = section;
    for (const auto& [name, shape] : params) {
      made.params.push_back({name, shape, {std::begin(kAllKinds), std::end(kAllKinds)}, "default", "fp32"});
    }
    made.scalars.steps = 41 + seed;
    made.scalars.calls = 43;
    made.scalars.consecutive_skips = 1;
    made.scalars.skipped_total = 2;
    made.scalars.loss_scale = 65536;
    made.scalars.hysteresis_left = 2;
    made.scalars.clean_steps = 17;
    made.scalars.groups = {{"default", 0.1, 1.0 / 3, 5e-324, -0.0, 0.9, 0.95, 1e-8}};
    return made;
  }

  static std::int64_t up(std::int64_t value, std::int64_t to) { return (value + to - 1) / to * to; }

  /// Slices of a writer, with their values in `memory`.
  CheckpointContents part(int writer, int writers, std::vector<std::vector<float>>& memory) const {
    CheckpointContents contents;
    contents.sections = {table()};
    contents.config = "optimizer:\n  lr: 1e-3\n";
    contents.user = {{"rank" + std::to_string(writer), "random state"}, {"data", "position 7"}};
    std::int64_t total = 0;
    for (const auto& [name, shape] : params) total += up(shape_elems(shape, name), align_elems);
    const std::int64_t own = up(total, shard_align_elems * writers) / writers;
    std::int64_t start = 0;
    for (const auto& [name, shape] : params) {
      const std::int64_t elems = shape_elems(shape, name);
      const std::int64_t begin = std::clamp(own * writer - start, std::int64_t{0}, elems);
      const std::int64_t end = std::clamp(own * (writer + 1) - start, std::int64_t{0}, elems);
      start += up(elems, align_elems);
      if (begin == end) continue;
      for (const StateKind kind : kAllKinds) {
        std::vector<float>& values = memory.emplace_back();
        for (std::int64_t i = begin; i < end; ++i) values.push_back(state_value(name, kind, i, seed));
        contents.slices.push_back({section, name, kind, begin, values});
      }
    }
    return contents;
  }
};

inline CheckpointJob make_job(const std::filesystem::path& dir, std::int64_t step, int writer = 0,
                              int writers = 1, const std::string& attempt = {}) {
  CheckpointJob job;
  job.dir = dir;
  job.step = step;
  static int attempts = 0;
  job.attempt = attempt.empty() ? "a" + std::to_string(++attempts) : attempt;
  job.writer = writer;
  job.writers = writers;
  job.timeout_s = 60;
  return job;
}

/// Every writer as a thread. Returns the text of each one's error, empty where there was none.
/// change(writer, job, contents)  may change a writer's input, and returns its hook.
template <class Change>
std::vector<std::string> save_with(const CheckpointModel& model, const CheckpointJob& job, int writers,
                                   Change change) {
  std::vector<std::string> errors(static_cast<std::size_t>(writers));
  std::vector<std::thread> threads;
  for (int writer = 0; writer < writers; ++writer) {
    threads.emplace_back([&, writer] {
      try {
        CheckpointJob own = job;
        own.writer = writer;
        own.writers = writers;
        std::vector<std::vector<float>> memory;
        CheckpointContents contents = model.part(writer, writers, memory);
        FileHook* hook = change(writer, own, contents);
        write_checkpoint(own, contents, hook);
      } catch (const std::exception& error) {
        errors[static_cast<std::size_t>(writer)] = error.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return errors;
}

inline void save(const CheckpointModel& model, const std::filesystem::path& dir, std::int64_t step,
                 int writers, int keep_last = 0) {
  CheckpointJob job = make_job(dir, step);
  job.keep_last = keep_last;
  const auto errors = save_with(model, job, writers, [](int, CheckpointJob&, CheckpointContents&) {
    return static_cast<FileHook*>(nullptr);
  });
  for (const std::string& error : errors) EXPECT_EQ(error, "");
}

/// Reads all state in ranges as `readers` ranks would own them, and compares the bits.
inline void expect_equal(const CheckpointModel& model, CheckpointReader& reader, int readers = 1) {
  std::int64_t wrong = 0;
  for (const auto& [name, shape] : model.params) {
    const std::int64_t elems = shape_elems(shape, name);
    for (const StateKind kind : kAllKinds) {
      for (int rank = 0; rank < readers; ++rank) {
        const std::int64_t begin = elems * rank / readers;
        std::vector<float> values(static_cast<std::size_t>(elems * (rank + 1) / readers - begin));
        reader.read(model.section, name, kind, begin, values);
        for (std::size_t i = 0; i < values.size(); ++i) {
          const float expected = state_value(name, kind, begin + static_cast<std::int64_t>(i), model.seed);
          wrong += std::bit_cast<std::uint32_t>(values[i]) != std::bit_cast<std::uint32_t>(expected) ? 1 : 0;
        }
      }
    }
  }
  EXPECT_EQ(wrong, 0);
  EXPECT_EQ(reader.section(model.section).scalars.steps, 41 + model.seed);
}

inline std::string file_content(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

inline void set_file_content(const std::filesystem::path& path, const std::string& text) {
  std::ofstream(path, std::ios::binary) << text;
}

/// Names in a folder, sorted.
inline std::vector<std::string> names_of(const std::filesystem::path& folder) {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(folder))
    names.push_back(entry.path().filename());
  std::sort(names.begin(), names.end());
  return names;
}

}  // namespace mxopt::test
