// mxopt-checkpoint: lists, verifies, shows and compares checkpoints, and writes their masters into one file.

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <iostream>
#include <map>
#include <span>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <CLI/CLI.hpp>

#include "mxopt/optimizer/checkpoint/checkpoint_reader.h"
#include "mxopt/optimizer/checkpoint/file_output.h"
#include "mxopt/optimizer/checkpoint/safetensors.h"
#include "mxopt/params/check.h"

namespace {

constexpr int kDifferent = 1;
constexpr int kFailed = 2;
constexpr std::int64_t kPartElems = std::int64_t{1} << 20;

std::string shape_text(const std::vector<std::int64_t>& shape) {
  std::string text;
  for (const std::int64_t length : shape) text += (text.empty() ? "" : ", ") + std::to_string(length);
  return "[" + text + "]";
}

std::string number_text(double value) {
  char text[40];
  std::snprintf(text, sizeof text, "%.9g", value);
  return text;
}

std::string param_label(const mxopt::CheckpointSection& section, const mxopt::CheckpointParam& param) {
  return (section.name.empty() ? "" : section.name + "/") + param.name;
}

mxopt::CheckpointReader open(const std::string& path, mxopt::Verify verify) {
  mxopt::CheckpointReader reader(path, verify);
  for (const std::string& warning : reader.warnings()) std::cerr << "warning: " << warning << '\n';
  return reader;
}

/// Calls use(begin, values) for all elements of a state in order.
template <class Use>
void for_each_part(mxopt::CheckpointReader& reader, const std::string& section,
                   const mxopt::CheckpointParam& param, mxopt::StateKind kind, Use use) {
  const std::int64_t elems = mxopt::shape_elems(param.shape, param.name);
  std::vector<float> values(static_cast<std::size_t>(std::min(elems, kPartElems)));
  for (std::int64_t begin = 0; begin < elems; begin += kPartElems) {
    const std::span<float> part =
        std::span(values).first(static_cast<std::size_t>(std::min(kPartElems, elems - begin)));
    reader.read(section, param.name, kind, begin, part);
    use(begin, part);
  }
}

int list(const std::string& dir) {
  for (const mxopt::CheckpointListing& listing : mxopt::list_checkpoints(dir)) {
    std::cout << listing.folder.filename().string() << "  "
              << (listing.complete ? "complete, " + std::to_string(listing.bytes) + " bytes"
                                   : "broken: " + listing.problem)
              << (listing.is_latest ? "  <- latest" : "") << '\n';
  }
  return 0;
}

int verify(const std::string& path) {
  const mxopt::CheckpointReader reader = open(path, mxopt::Verify::kFull);
  std::int64_t bytes = 0;
  for (const mxopt::ManifestFile& file : reader.manifest().files) bytes += file.bytes;
  std::cout << reader.folder().string() << ": step " << reader.step() << ", "
            << reader.manifest().files.size() << " files, " << bytes << " bytes, all as they were written\n";
  return 0;
}

struct Summary {
  float min = INFINITY;
  float max = -INFINITY;
  double squares = 0;
  std::int64_t non_finite = 0;

  void add(std::span<const float> values) {
    for (const float value : values) {
      if (!std::isfinite(value)) {
        ++non_finite;
        continue;
      }
      min = std::min(min, value);
      max = std::max(max, value);
      squares += static_cast<double>(value) * static_cast<double>(value);
    }
  }
};

void show_param(mxopt::CheckpointReader& reader, const mxopt::CheckpointSection& section,
                const mxopt::CheckpointParam& param) {
  std::cout << param_label(section, param) << "  " << shape_text(param.shape) << "  " << param.format
            << "  group " << param.group << '\n';
  for (const mxopt::StateKind kind : param.kinds) {
    Summary summary;
    for_each_part(reader, section.name, param, kind,
                  [&](std::int64_t, std::span<const float> values) { summary.add(values); });
    std::cout << "  " << mxopt::state_kind_name(kind) << "  min " << number_text(summary.min) << "  max "
              << number_text(summary.max) << "  norm " << number_text(std::sqrt(summary.squares))
              << "  not finite " << summary.non_finite << '\n';
    for (const mxopt::ManifestSlice& slice : reader.manifest().slices) {
      if (std::tie(slice.section, slice.param, slice.kind) != std::tie(section.name, param.name, kind))
        continue;
      std::cout << "    [" << slice.begin << ", " << slice.begin + slice.elems << ")  " << slice.file << '\n';
    }
  }
}

void show_scalars(const mxopt::CheckpointSection& section) {
  const mxopt::ScalarState& state = section.scalars;
  std::cout << "section `" << section.name << "`: " << section.params.size() << " params, taken steps "
            << state.steps << ", calls " << state.calls << ", consecutive skips " << state.consecutive_skips
            << ", skipped " << state.skipped_total << ", loss scale " << number_text(state.loss_scale)
            << '\n';
  for (const mxopt::GroupScalars& group : state.groups) {
    std::cout << "  group " << group.name << ": lr " << number_text(group.lr) << " (min "
              << number_text(group.min_lr) << "), weight decay " << number_text(group.weight_decay)
              << " (end " << number_text(group.end_weight_decay) << "), betas " << number_text(group.beta1)
              << ", " << number_text(group.beta2) << ", eps " << number_text(group.eps) << '\n';
  }
}

int show(const std::string& path, const std::string& name) {
  mxopt::CheckpointReader reader = open(path, mxopt::Verify::kSize);
  const mxopt::Manifest& manifest = reader.manifest();
  bool is_found = false;
  if (name.empty()) {
    std::cout << reader.folder().string() << ": step " << manifest.step << ", " << manifest.writers
              << " writers, mxopt " << manifest.library_version << '\n';
    for (const auto& [key, value] : manifest.user)
      std::cout << key << ": " << value.size() << " bytes of the caller\n";
  }
  for (const mxopt::CheckpointSection& section : manifest.sections) {
    if (name.empty()) show_scalars(section);
    for (const mxopt::CheckpointParam& param : section.params) {
      if (!name.empty() && param_label(section, param) != name && param.name != name) continue;
      is_found = true;
      show_param(reader, section, param);
    }
  }
  if (!name.empty() && !is_found) {
    throw mxopt::DataError(reader.folder().string() + ": expected param `" + name +
                           "`, found none of that name");
  }
  return 0;
}

/// Prints the differences between two checkpoints and counts them.
class Comparison {
 public:
  Comparison(mxopt::CheckpointReader& a, mxopt::CheckpointReader& b) : a_(a), b_(b) {}

  int run() {
    std::map<std::string, std::pair<const mxopt::CheckpointSection*, const mxopt::CheckpointSection*>>
        sections;
    for (const mxopt::CheckpointSection& section : a_.sections()) sections[section.name].first = &section;
    for (const mxopt::CheckpointSection& section : b_.sections()) sections[section.name].second = &section;
    if (a_.step() != b_.step())
      say("step: " + std::to_string(a_.step()) + " and " + std::to_string(b_.step()));
    for (const auto& [name, both] : sections) {
      if (both.first == nullptr || both.second == nullptr) {
        say("section `" + name + "` is only in " + (both.first != nullptr ? "the first" : "the second"));
      } else {
        compare_sections(*both.first, *both.second);
      }
    }
    return different_ ? kDifferent : 0;
  }

 private:
  void say(const std::string& text) {
    different_ = true;
    std::cout << text << '\n';
  }

  void compare_sections(const mxopt::CheckpointSection& a, const mxopt::CheckpointSection& b) {
    mxopt::CheckpointSection scalars_a{a.name, {}, a.scalars};
    mxopt::CheckpointSection scalars_b{b.name, {}, b.scalars};
    if (!mxopt::equal_sections(scalars_a, scalars_b)) {
      say("section `" + a.name + "`: the scalar state is different");
      show_scalars(a);
      show_scalars(b);
    }
    std::map<std::string, std::pair<const mxopt::CheckpointParam*, const mxopt::CheckpointParam*>> params;
    for (const mxopt::CheckpointParam& param : a.params) params[param.name].first = &param;
    for (const mxopt::CheckpointParam& param : b.params) params[param.name].second = &param;
    for (const auto& [name, both] : params) {
      if (both.first == nullptr || both.second == nullptr) {
        say(name + ": is only in " + (both.first != nullptr ? "the first" : "the second"));
      } else if (both.first->shape != both.second->shape) {
        say(name + ": shape " + shape_text(both.first->shape) + " and " + shape_text(both.second->shape));
      } else if (both.first->kinds != both.second->kinds) {
        say(name + ": other kinds of state were saved");
      } else {
        for (const mxopt::StateKind kind : both.first->kinds) compare_states(a.name, *both.first, kind);
      }
    }
  }

  void compare_states(const std::string& section, const mxopt::CheckpointParam& param,
                      mxopt::StateKind kind) {
    std::int64_t first = -1;
    std::int64_t count = 0;
    double largest = 0;
    std::vector<float> other;
    for_each_part(a_, section, param, kind, [&](std::int64_t begin, std::span<const float> values) {
      other.resize(values.size());
      b_.read(section, param.name, kind, begin, other);
      for (std::size_t i = 0; i < values.size(); ++i) {
        if (std::bit_cast<std::uint32_t>(values[i]) == std::bit_cast<std::uint32_t>(other[i])) continue;
        if (first < 0) first = begin + static_cast<std::int64_t>(i);
        ++count;
        const double difference = std::abs(static_cast<double>(values[i]) - static_cast<double>(other[i]));
        largest = std::isnan(difference) ? INFINITY : std::max(largest, difference);
      }
    });
    if (count == 0) return;
    say((section.empty() ? "" : section + "/") + param.name + ": " +
        std::string(mxopt::state_kind_name(kind)) + ": first different element " + std::to_string(first) +
        ", " + std::to_string(count) + " in all, largest difference " + number_text(largest));
  }

  mxopt::CheckpointReader& a_;
  mxopt::CheckpointReader& b_;
  bool different_ = false;
};

int diff(const std::string& a, const std::string& b) {
  mxopt::CheckpointReader first = open(a, mxopt::Verify::kSize);
  mxopt::CheckpointReader second = open(b, mxopt::Verify::kSize);
  return Comparison(first, second).run();
}

int merge(const std::string& path, const std::string& out) {
  mxopt::CheckpointReader reader = open(path, mxopt::Verify::kFull);
  mxopt::SafetensorsHeader header;
  header.metadata = {{"format", "pt"}, {"step", std::to_string(reader.step())}};
  std::map<std::string, std::pair<const mxopt::CheckpointSection*, const mxopt::CheckpointParam*>> sources;
  for (const mxopt::CheckpointSection& section : reader.sections()) {
    for (const mxopt::CheckpointParam& param : section.params) {
      if (!sources.emplace(param.name, std::pair(&section, &param)).second) {
        throw mxopt::DataError("param `" + param.name +
                               "` is in more than one section; one file can not hold both");
      }
      mxopt::SafetensorsEntry entry;
      entry.name = param.name;
      entry.dtype = "F32";
      entry.shape = param.shape;
      header.tensors.push_back(std::move(entry));
    }
  }
  const std::string head = mxopt::make_safetensors_header(header);
  const std::string partial = out + ".partial";
  mxopt::remove_path(partial, nullptr);
  mxopt::FileOutput file(partial, nullptr);
  file.write(std::as_bytes(std::span(head)));
  for (const mxopt::SafetensorsEntry& entry : header.tensors) {
    const auto& [section, param] = sources.at(entry.name);
    for_each_part(reader, section->name, *param, mxopt::StateKind::kMaster,
                  [&](std::int64_t, std::span<const float> values) { file.write(std::as_bytes(values)); });
  }
  file.close();
  mxopt::rename_path(partial, out, nullptr);
  std::cout << out << ": " << header.tensors.size() << " params of step " << reader.step() << '\n';
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app{"Looks at checkpoints of mxopt."};
  app.require_subcommand(1);
  std::string path;
  std::string other;
  std::string param;
  CLI::App* list_command = app.add_subcommand("list", "checkpoints in a folder, complete and broken ones");
  list_command->add_option("DIR", path, "folder of all checkpoints")->required();
  CLI::App* verify_command = app.add_subcommand("verify", "compares all checksums");
  verify_command->add_option("PATH", path, "a checkpoint, or a folder of checkpoints")->required();
  CLI::App* show_command = app.add_subcommand("show", "params, slices and values");
  show_command->add_option("PATH", path, "a checkpoint, or a folder of checkpoints")->required();
  show_command->add_option("--param", param, "only this param");
  CLI::App* diff_command = app.add_subcommand("diff", "what two checkpoints differ in; status 1 if they do");
  diff_command->add_option("A", path, "a checkpoint, or a folder of checkpoints")->required();
  diff_command->add_option("B", other, "the other one")->required();
  CLI::App* merge_command = app.add_subcommand("merge", "masters of all params into one safetensors file");
  merge_command->add_option("PATH", path, "a checkpoint, or a folder of checkpoints")->required();
  merge_command->add_option("OUT", other, "the new file")->required();
  try {
    app.parse(argc, argv);
    if (list_command->parsed()) return list(path);
    if (verify_command->parsed()) return verify(path);
    if (show_command->parsed()) return show(path, param);
    if (diff_command->parsed()) return diff(path, other);
    return merge(path, other);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : kFailed;
  } catch (const std::exception& error) {
    std::cerr << "mxopt-checkpoint: " << error.what() << '\n';
    return kFailed;
  }
}
