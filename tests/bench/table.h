// What the benchmarks share: timing, statistics, a table on standard output and the same rows as JSON.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <exception>
#include <fstream>
#include <iomanip>
#include <iostream>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

namespace mxopt::bench {

/// Times of repeated runs, in milliseconds.
struct Times {
  double min_ms = 0;
  double p50_ms = 0;
  double p99_ms = 0;
};

inline Times statistics(std::vector<double> samples_ms) {
  if (samples_ms.empty()) return {};
  std::sort(samples_ms.begin(), samples_ms.end());
  const std::size_t last = samples_ms.size() - 1;
  return {samples_ms.front(), samples_ms[last / 2], samples_ms[last * 99 / 100]};
}

/// Runs `body` once to warm up, then `repeats` times; `before` runs before each and is not timed.
template <class Before, class Body>
Times measure(int repeats, const Before& before, const Body& body) {
  before();
  body();
  std::vector<double> samples_ms;
  for (int i = 0; i < repeats; ++i) {
    before();
    const auto start = std::chrono::steady_clock::now();
    body();
    const std::chrono::duration<double, std::milli> elapsed = std::chrono::steady_clock::now() - start;
    samples_ms.push_back(elapsed.count());
  }
  return statistics(std::move(samples_ms));
}

/// GB/s, with 1 GB = 1e9 bytes.
inline double gb_per_s(std::int64_t bytes, double ms) {
  return static_cast<double>(bytes) / ms * 1e-6;
}

/// Rows with the same columns. Numbers are printed with three digits after the point, integers as they are.
class Table {
 public:
  explicit Table(std::vector<std::string> columns) : columns_(std::move(columns)) {}

  /// Prints a row as it is added, under a head line before the first.
  void add(const std::vector<nlohmann::ordered_json>& values) {
    if (values.size() != columns_.size()) throw std::logic_error("a row of the table has another length");
    if (rows_.empty()) {
      for (const std::string& column : columns_) std::cout << std::left << std::setw(width(column)) << column;
      std::cout << '\n';
    }
    nlohmann::ordered_json row;
    for (std::size_t i = 0; i < values.size(); ++i) {
      row[columns_[i]] = values[i];
      std::cout << std::left << std::setw(width(columns_[i]) - 1) << text(values[i]) << ' ';
    }
    std::cout << std::endl;
    rows_.push_back(std::move(row));
  }

  /// Writes the rows as a JSON array. Throws std::runtime_error when the file can not be written.
  void write_json(const std::string& path) const {
    std::ofstream file(path);
    file << nlohmann::ordered_json(rows_).dump(2) << '\n';
    if (!file) throw std::runtime_error("can not write " + path);
  }

 private:
  static int width(const std::string& column) { return std::max(10, static_cast<int>(column.size()) + 2); }
  static std::string text(const nlohmann::ordered_json& value) {
    if (value.is_string()) return value.get<std::string>();
    if (!value.is_number_float()) return value.dump();
    std::ostringstream out;
    out << std::fixed << std::setprecision(3) << value.get<double>();
    return out.str();
  }

  std::vector<std::string> columns_;
  std::vector<nlohmann::ordered_json> rows_;
};

/// Value of "--name value", or `otherwise`.
inline std::string option(int argc, char** argv, const std::string& name, const std::string& otherwise) {
  for (int i = 1; i + 1 < argc; ++i) {
    if (argv[i] == name) return argv[i + 1];
  }
  return otherwise;
}

/// main() of a benchmark: run(argc, argv), with an error on the error stream and exit status 1.
template <class Run>
int run_program(const char* name, const Run& run, int argc, char** argv) {
  try {
    run(argc, argv);
  } catch (const std::exception& error) {
    std::cerr << name << ": " << error.what() << '\n';
    return 1;
  }
  return 0;
}

}  // namespace mxopt::bench
