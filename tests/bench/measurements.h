// The rows of docs/performance.json: the one place that knows their keys. What is printed and what is written
// are made from the same row.
#pragma once

#include <array>
#include <cstdint>
#include <fstream>
#include <iomanip>
#include <iostream>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include "bench/run_facts.h"
#include "bench/table.h"

namespace mxopt::bench {

/// One phase of one workload. What does not apply is absent: null in the file, a dash in print.
struct Measurement {
  std::string workload = {};
  std::string phase = {};
  std::string shape = {};
  std::string dtype = {};  // of the gradients; of the masters where there are none
  std::string implementation = "mxopt";
  std::string planes = {};
  double fraction = 1;      // of the shape, that this rank owns
  std::int64_t offset = 0;  // at which its part begins, in elements
  int world_size = 1;
  std::optional<std::int64_t> bytes = {};
  Times times = {};
  bool has_minimum = true;
  std::optional<std::int64_t> wrong_elements = {};
  std::optional<std::int64_t> launches = {};  // of kernels, counted in a captured graph
};

class Measurements {
 public:
  /// ceiling  the time of a copy of `ceiling_bytes` bytes, read and written: the first row.
  /// prints   false on all ranks but one.
  Measurements(RunFacts facts, const Times& ceiling, std::int64_t ceiling_bytes, bool prints = true)
      : facts_(std::move(facts)),
        ceiling_tb_per_s_(gb_per_s(ceiling_bytes, ceiling.p50_ms) / 1000),
        prints_(prints) {
    if (prints_) {
      std::cout << facts_.command << "\n"
                << facts_.card << ", driver " << facts_.driver << ", CUDA " << facts_.cuda << ", commit "
                << facts_.commit << ", " << facts_.date << "\n";
    }
    Measurement copy{.workload = "ceiling", .phase = "copy", .shape = "2 GiB", .dtype = "uint8"};
    copy.implementation = "cudaMemcpyAsync";
    copy.planes = "-";
    copy.bytes = ceiling_bytes;
    copy.times = ceiling;
    add(copy);
  }

  /// Prints the row as it is added, under a head line before the first.
  void add(const Measurement& measurement) {
    const nlohmann::ordered_json row = row_of(measurement);
    if (rows_.empty()) print([](const Column& column) { return std::string(column.head); });
    print([&](const Column& column) { return text(row.at(column.key), column.digits); });
    rows_.push_back(row);
  }

  /// Writes the rows as a JSON array, a row a line. Throws std::runtime_error when the file can not be
  /// written.
  void write_json(const std::string& path) const {
    std::ofstream file(path);
    for (std::size_t i = 0; i < rows_.size(); ++i) file << (i == 0 ? "[\n" : ",\n") << rows_[i].dump();
    file << "\n]\n";
    if (!file) throw std::runtime_error("can not write " + path);
  }

 private:
  struct Column {
    const char* key;
    const char* head;
    int width;
    int digits;
  };
  static constexpr std::array<Column, 15> kColumns = {{{"workload", "workload", 36, 0},
                                                       {"shape", "shape", 16, 0},
                                                       {"phase", "phase", 15, 0},
                                                       {"implementation", "implementation", 16, 0},
                                                       {"planes", "planes", 7, 0},
                                                       {"dtype", "dtype", 6, 0},
                                                       {"fraction", "fraction", 9, 6},
                                                       {"offset", "offset", 7, 0},
                                                       {"world_size", "W", 4, 0},
                                                       {"bytes", "bytes", 13, 0},
                                                       {"us_min", "us_min", 10, 2},
                                                       {"us_median", "us_median", 10, 2},
                                                       {"ratio_to_ceiling", "ratio", 6, 3},
                                                       {"wrong_elements", "wrong", 6, 0},
                                                       {"launches", "launches", 8, 0}}};

  /// Without the digits that a timer does not have.
  static double decimal(double value, int digits) {
    std::ostringstream out;
    out << std::fixed << std::setprecision(digits) << value;
    return std::stod(out.str());
  }
  template <class T>
  static nlohmann::ordered_json or_null(const std::optional<T>& value) {
    return value ? nlohmann::ordered_json(*value) : nlohmann::ordered_json(nullptr);
  }

  nlohmann::ordered_json row_of(const Measurement& m) const {
    nlohmann::ordered_json row;
    row["workload"] = m.workload;
    row["phase"] = m.phase;
    row["shape"] = m.shape;
    row["dtype"] = m.dtype;
    row["implementation"] = m.implementation;
    row["planes"] = m.planes;
    row["fraction"] = m.fraction;
    row["offset"] = m.offset;
    row["world_size"] = m.world_size;
    row["bytes"] = or_null(m.bytes);
    row["us_median"] = decimal(1000 * m.times.p50_ms, 3);
    row["us_min"] = nullptr;
    if (m.has_minimum) row["us_min"] = decimal(1000 * m.times.min_ms, 3);
    row["tb_per_s"] = nullptr;
    row["ratio_to_ceiling"] = nullptr;
    if (m.bytes) {
      const double speed = gb_per_s(*m.bytes, m.times.p50_ms) / 1000;
      row["tb_per_s"] = decimal(speed, 4);
      row["ratio_to_ceiling"] = decimal(speed / ceiling_tb_per_s_, 4);
    }
    row["wrong_elements"] = or_null(m.wrong_elements);
    row["launches"] = or_null(m.launches);
    row["card"] = facts_.card;
    row["driver"] = facts_.driver;
    row["cuda"] = facts_.cuda;
    row["commit"] = facts_.commit;
    row["date"] = facts_.date;
    row["command"] = facts_.command;
    return row;
  }

  static std::string text(const nlohmann::ordered_json& value, int digits) {
    if (value.is_null()) return "-";
    if (value.is_string()) return value.get<std::string>();
    if (!value.is_number_float() || digits == 0) return value.dump();
    std::ostringstream out;
    out << std::fixed << std::setprecision(digits) << value.get<double>();
    return out.str();
  }

  template <class Cell>
  void print(const Cell& cell) const {
    if (!prints_) return;
    for (const Column& column : kColumns)
      std::cout << std::left << std::setw(column.width) << cell(column) << ' ';
    std::cout << std::endl;
  }

  RunFacts facts_;
  double ceiling_tb_per_s_;
  bool prints_;
  std::vector<nlohmann::ordered_json> rows_;
};

}  // namespace mxopt::bench
