#include "mxopt/optimizer/checkpoint/manifest.h"

#include <algorithm>
#include <array>
#include <bit>
#include <charconv>
#include <cmath>
#include <iterator>
#include <limits>
#include <set>
#include <sstream>
#include <tuple>
#include <utility>

#include "mxopt/optimizer/checkpoint/crc32c.h"
#include "mxopt/optimizer/checkpoint/file_input.h"
#include "mxopt/optimizer/checkpoint/strict_json.h"
#include "mxopt/params/check.h"

namespace mxopt {

namespace {

constexpr std::int64_t kMostManifestBytes = std::int64_t{1} << 30;
constexpr std::int64_t kMostWriters = 99'999;
constexpr std::array kKinds = {StateKind::kMaster, StateKind::kExpAvg, StateKind::kExpAvgSq};

// The last line: everything before the digits is in the checksum.
constexpr std::string_view kChecksumKey = ",\n\"manifest_crc32c\": \"";
constexpr std::string_view kChecksumEnd = "\"}\n";
constexpr std::size_t kChecksumDigits = 8;

std::string hex(std::uint64_t value, int digits) {
  std::string text(static_cast<std::size_t>(digits), '0');
  for (auto digit = text.rbegin(); digit != text.rend(); ++digit, value >>= 4U) {
    *digit = "0123456789abcdef"[value & 0xFU];
  }
  return text;
}

bool parse_hex(std::string_view text, std::size_t digits, std::uint64_t& value) {
  const auto is_digit = [](char c) { return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f'); };
  if (text.size() != digits || !std::all_of(text.begin(), text.end(), is_digit)) return false;
  return std::from_chars(text.data(), text.data() + text.size(), value, 16).ec == std::errc();
}

/// Numbers that are not finite stand as text with their bits.
std::string double_text(double value) {
  if (std::isfinite(value)) return json_number(value, "a scalar");
  return "\"0x" + hex(std::bit_cast<std::uint64_t>(value), 16) + "\"";
}

double read_double(const JsonPlace& place) {
  if (!place.is_text()) return place.number();
  const std::string& text = place.text();
  std::uint64_t bits = 0;
  const bool has_prefix = text.rfind("0x", 0) == 0;
  if (!has_prefix || !parse_hex(std::string_view(text).substr(2), 16, bits)) {
    place.fail("a number, or 0x and 16 hexadecimal digits", place.found());
  }
  return std::bit_cast<double>(bits);
}

std::string text_of(std::string_view text) {
  return json_text(text, "'" + std::string(text) + "'");
}

template <class Range, class Text>
std::string list_text(const Range& range, std::string_view between, const Text& text) {
  std::string all;
  for (const auto& item : range) all += (all.empty() ? std::string() : std::string(between)) + text(item);
  return "[" + all + "]";
}

std::string param_text(const CheckpointParam& param) {
  return "{\"name\": " + text_of(param.name) +
         ", \"shape\": " + list_text(param.shape, ", ", [](std::int64_t n) { return std::to_string(n); }) +
         ", \"kinds\": " +
         list_text(param.kinds, ", ", [](StateKind k) { return text_of(state_kind_name(k)); }) +
         ", \"group\": " + text_of(param.group) + ", \"format\": " + text_of(param.format) + "}";
}

std::string group_text(const GroupScalars& group) {
  return "{\"name\": " + text_of(group.name) + ", \"lr\": " + double_text(group.lr) +
         ", \"min_lr\": " + double_text(group.min_lr) +
         ", \"weight_decay\": " + double_text(group.weight_decay) +
         ", \"end_weight_decay\": " + double_text(group.end_weight_decay) +
         ", \"beta1\": " + double_text(group.beta1) + ", \"beta2\": " + double_text(group.beta2) +
         ", \"eps\": " + double_text(group.eps) + "}";
}

std::string scalars_text(const ScalarState& state) {
  return "{\"steps\": " + std::to_string(state.steps) + ", \"calls\": " + std::to_string(state.calls) +
         ", \"consecutive_skips\": " + std::to_string(state.consecutive_skips) +
         ", \"skipped_total\": " + std::to_string(state.skipped_total) +
         ", \"loss_scale\": " + double_text(state.loss_scale) +
         ", \"hysteresis_left\": " + std::to_string(state.hysteresis_left) +
         ", \"clean_steps\": " + std::to_string(state.clean_steps) +
         ",\n\"groups\": " + list_text(state.groups, ",\n", group_text) + "}";
}

std::string section_text(const CheckpointSection& section) {
  return "{\"name\": " + text_of(section.name) + ",\n\"scalars\": " + scalars_text(section.scalars) +
         ",\n\"params\": " + list_text(section.params, ",\n", param_text) + "}";
}

std::string slice_text(const ManifestSlice& slice) {
  return "{\"section\": " + text_of(slice.section) + ", \"param\": " + text_of(slice.param) +
         ", \"kind\": " + text_of(state_kind_name(slice.kind)) +
         ", \"begin\": " + std::to_string(slice.begin) + ", \"elems\": " + std::to_string(slice.elems) +
         ", \"file\": " + text_of(slice.file) + ", \"tensor\": " + text_of(slice.tensor) + "}";
}

std::string file_text(const ManifestFile& file) {
  return "{\"name\": " + text_of(file.name) + ", \"bytes\": " + std::to_string(file.bytes) +
         ", \"crc32c\": " +
         list_text(file.crcs, ", ", [](std::uint32_t c) { return "\"" + hex(c, 8) + "\""; }) + "}";
}

StateKind read_kind(const JsonPlace& place) {
  for (const StateKind kind : kKinds) {
    if (place.text() == state_kind_name(kind)) return kind;
  }
  place.fail("one of master, exp_avg, exp_avg_sq", place.found());
}

CheckpointParam read_param(const JsonPlace& place) {
  constexpr std::array<std::string_view, 5> kKeys = {"name", "shape", "kinds", "group", "format"};
  place.only(kKeys);
  CheckpointParam param;
  param.name = place.at("name").text();
  for (const JsonPlace& length : place.at("shape").items())
    param.shape.push_back(length.integer(0, INT64_MAX));
  for (const JsonPlace& kind : place.at("kinds").items()) param.kinds.push_back(read_kind(kind));
  param.group = place.at("group").text();
  param.format = place.at("format").text();
  return param;
}

GroupScalars read_group(const JsonPlace& place) {
  constexpr std::array<std::string_view, 8> kKeys = {
      "name", "lr", "min_lr", "weight_decay", "end_weight_decay", "beta1", "beta2", "eps"};
  place.only(kKeys);
  GroupScalars group;
  group.name = place.at("name").text();
  group.lr = read_double(place.at("lr"));
  group.min_lr = read_double(place.at("min_lr"));
  group.weight_decay = read_double(place.at("weight_decay"));
  group.end_weight_decay = read_double(place.at("end_weight_decay"));
  group.beta1 = read_double(place.at("beta1"));
  group.beta2 = read_double(place.at("beta2"));
  group.eps = read_double(place.at("eps"));
  return group;
}

ScalarState read_scalars(const JsonPlace& place) {
  constexpr std::array<std::string_view, 8> kKeys = {"steps",         "calls",      "consecutive_skips",
                                                     "skipped_total", "loss_scale", "hysteresis_left",
                                                     "clean_steps",   "groups"};
  place.only(kKeys);
  ScalarState state;
  state.steps = place.at("steps").integer(INT64_MIN, INT64_MAX);
  state.calls = place.at("calls").integer(INT64_MIN, INT64_MAX);
  state.consecutive_skips = place.at("consecutive_skips").integer(INT64_MIN, INT64_MAX);
  state.skipped_total = place.at("skipped_total").integer(INT64_MIN, INT64_MAX);
  state.loss_scale = read_double(place.at("loss_scale"));
  state.hysteresis_left = place.at("hysteresis_left").integer(INT64_MIN, INT64_MAX);
  state.clean_steps = place.at("clean_steps").integer(INT64_MIN, INT64_MAX);
  for (const JsonPlace& group : place.at("groups").items()) state.groups.push_back(read_group(group));
  return state;
}

CheckpointSection read_section(const JsonPlace& place) {
  constexpr std::array<std::string_view, 3> kKeys = {"name", "scalars", "params"};
  place.only(kKeys);
  CheckpointSection section;
  section.name = place.at("name").text();
  section.scalars = read_scalars(place.at("scalars"));
  for (const JsonPlace& param : place.at("params").items()) section.params.push_back(read_param(param));
  return section;
}

/// A name that stays in the folder.
std::string read_file_name(const JsonPlace& place) {
  const std::string& name = place.text();
  if (name.empty() || name.front() == '.' ||
      name.find_first_of(std::string_view("/\\\0", 3)) != std::string::npos) {
    place.fail("a file name without a folder", place.found());
  }
  return name;
}

ManifestSlice read_slice(const JsonPlace& place) {
  constexpr std::array<std::string_view, 7> kKeys = {"section", "param", "kind",  "begin",
                                                     "elems",   "file",  "tensor"};
  place.only(kKeys);
  ManifestSlice slice;
  slice.section = place.at("section").text();
  slice.param = place.at("param").text();
  slice.kind = read_kind(place.at("kind"));
  slice.begin = place.at("begin").integer(0, INT64_MAX);
  slice.elems = place.at("elems").integer(0, INT64_MAX);
  slice.file = read_file_name(place.at("file"));
  slice.tensor = place.at("tensor").text();
  return slice;
}

ManifestFile read_file(const JsonPlace& place) {
  constexpr std::array<std::string_view, 3> kKeys = {"name", "bytes", "crc32c"};
  place.only(kKeys);
  ManifestFile file;
  file.name = read_file_name(place.at("name"));
  file.bytes = place.at("bytes").integer(0, INT64_MAX);
  for (const JsonPlace& crc : place.at("crc32c").items()) {
    std::uint64_t value = 0;
    if (!parse_hex(crc.text(), 8, value)) crc.fail("8 hexadecimal digits", crc.found());
    file.crcs.push_back(static_cast<std::uint32_t>(value));
  }
  const std::int64_t pieces =
      file.bytes / kChecksumPieceBytes + (file.bytes % kChecksumPieceBytes != 0 ? 1 : 0);
  if (static_cast<std::int64_t>(file.crcs.size()) != pieces) {
    place.at("crc32c").fail(
        std::to_string(pieces) + " checksums for " + std::to_string(file.bytes) + " bytes",
        std::to_string(file.crcs.size()));
  }
  return file;
}

void check_checksum(std::string_view text, const std::string& file) {
  const std::size_t tail = kChecksumKey.size() + kChecksumDigits + kChecksumEnd.size();
  const bool fits = text.size() > tail && text.ends_with(kChecksumEnd) &&
                    text.substr(text.size() - tail, kChecksumKey.size()) == kChecksumKey;
  if (!fits)
    throw DataError(file + ": does not end with its checksum, key `manifest_crc32c`; it is cut or damaged");
  const std::size_t digits = text.size() - kChecksumEnd.size() - kChecksumDigits;
  const std::string expected(text.substr(digits, kChecksumDigits));
  const std::string found = hex(crc32c(std::as_bytes(std::span(text.substr(0, digits)))), 8);
  if (expected != found) {
    throw DataError(file + ": key `manifest_crc32c`: expected checksum " + expected + ", found " + found);
  }
}

[[noreturn]] void refuse(const std::string& file, const std::string& key, const std::string& expected,
                         const std::string& found) {
  throw DataError(file + ": " + key + ": expected " + expected + ", found " + found);
}

bool is_section_name(std::string_view name) {
  return std::all_of(name.begin(), name.end(), [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' ||
           c == '-' || c == '.';
  });
}

using StateName = std::tuple<std::string_view, std::string_view, StateKind>;  // section, param, kind

std::string state_text(const StateName& state) {
  const auto& [section, param, kind] = state;
  return (section.empty() ? std::string() : "section `" + std::string(section) + "`, ") + "param `" +
         std::string(param) + "`, " + std::string(state_kind_name(kind));
}

/// Elements of every state there has to be.
std::map<StateName, std::int64_t> expected_states(const Manifest& manifest, const std::string& file) {
  std::map<StateName, std::int64_t> states;
  std::set<std::string_view> section_names;
  for (const CheckpointSection& section : manifest.sections) {
    const std::string where = "section `" + section.name + "`";
    if (!is_section_name(section.name))
      refuse(file, where, "a name of letters, digits, '_', '-' and '.'", "another");
    if (!section_names.insert(section.name).second) refuse(file, where, "one of this name", "two");
    std::set<std::string_view> names;
    for (const CheckpointParam& param : section.params) {
      const std::string param_where = where + ", param `" + param.name + "`";
      if (!names.insert(param.name).second) refuse(file, param_where, "one of this name", "two");
      std::int64_t elems = 0;
      try {
        elems = shape_elems(param.shape, param.name);
      } catch (const ContractError& error) {
        throw DataError(file + ": " + param_where + ": " + error.what());
      }
      for (const StateKind kind : param.kinds) {
        if (!states.emplace(StateName(section.name, param.name, kind), elems).second) {
          refuse(file, param_where, "each kind once", std::string(state_kind_name(kind)) + " twice");
        }
      }
    }
    std::set<std::string_view> groups;
    for (const GroupScalars& group : section.scalars.groups) {
      if (!groups.insert(group.name).second)
        refuse(file, where + ", group `" + group.name + "`", "one", "two");
    }
  }
  return states;
}

void check_files(const Manifest& manifest, const std::string& file) {
  std::set<std::string_view> names;
  for (const ManifestFile& listed : manifest.files) {
    if (!names.insert(listed.name).second)
      refuse(file, "file `" + listed.name + "`", "one of this name", "two");
  }
  for (int writer = 0; writer < manifest.writers; ++writer) {
    const std::string name = rank_file_name(writer, manifest.writers);
    if (!names.contains(name)) refuse(file, "file `" + name + "`", "one of this name", "none");
  }
  if (static_cast<std::size_t>(manifest.writers) != manifest.files.size()) {
    refuse(file, "key `files`", std::to_string(manifest.writers) + ", one for each writer",
           std::to_string(manifest.files.size()));
  }
  std::set<std::pair<std::string_view, std::string_view>> tensors;
  for (const ManifestSlice& slice : manifest.slices) {
    const std::string where = "slice of " + state_text({slice.section, slice.param, slice.kind});
    if (!names.contains(slice.file)) refuse(file, where, "a listed file", "`" + slice.file + "`");
    if (!tensors.emplace(slice.file, slice.tensor).second) {
      refuse(file, where, "a tensor of its own",
             "`" + slice.tensor + "` of `" + slice.file + "`, used by another");
    }
  }
}

/// `slices` are those of one state, in order.
void check_cover(const std::vector<const ManifestSlice*>& slices, const StateName& state, std::int64_t elems,
                 const std::string& file) {
  std::int64_t end = 0;
  std::string before = "the begin";
  for (const ManifestSlice* slice : slices) {
    if (slice->begin != end) {
      refuse(file, state_text(state),
             "element " + std::to_string(end) + " next, after " + before +
                 (slice->begin < end ? " (overlap)" : " (hole)"),
             "a slice of `" + slice->file + "` that begins with " + std::to_string(slice->begin));
    }
    if (slice->elems > elems - end) {
      refuse(file, state_text(state), std::to_string(elems) + " elements",
             "a slice of `" + slice->file + "` of " + std::to_string(slice->elems) + " from " +
                 std::to_string(end) + " on");
    }
    end += slice->elems;
    before = "a slice of `" + slice->file + "`";
  }
  if (end != elems) {
    refuse(file, state_text(state), std::to_string(elems) + " elements",
           "slices of the first " + std::to_string(end));
  }
}

}  // namespace

std::string_view state_kind_name(StateKind kind) {
  switch (kind) {
    case StateKind::kMaster:
      return "master";
    case StateKind::kExpAvg:
      return "exp_avg";
    case StateKind::kExpAvgSq:
      return "exp_avg_sq";
  }
  return "?";
}

const CheckpointSection* Manifest::find_section(std::string_view name) const {
  const auto found = std::find_if(sections.begin(), sections.end(),
                                  [&](const auto& section) { return section.name == name; });
  return found == sections.end() ? nullptr : &*found;
}

std::int64_t shape_elems(const std::vector<std::int64_t>& shape, std::string_view name) {
  std::int64_t elems = 1;
  for (const std::int64_t length : shape) {
    MXOPT_CHECK(length >= 0, "param `" << name << "` has the length " << length << " in its shape");
    MXOPT_CHECK(!__builtin_mul_overflow(elems, length, &elems),
                "param `" << name << "` has more than 2^63 elements");
  }
  return elems;
}

bool equal_sections(const CheckpointSection& a, const CheckpointSection& b) {
  return section_text(a) == section_text(b);
}

std::string manifest_text(const Manifest& manifest) {
  std::string user;
  for (const auto& [key, value] : manifest.user) {
    user += (user.empty() ? "" : ",\n") + json_text(key, "a key of the user's map") + ": " +
            json_text(value, "user's value `" + key + "`");
  }
  std::string text =
      "{\"format\": " + std::to_string(kCheckpointFormat) +
      ",\n\"library_version\": " + text_of(manifest.library_version) +
      ",\n\"step\": " + std::to_string(manifest.step) + ",\n\"attempt\": " + text_of(manifest.attempt) +
      ",\n\"writers\": " + std::to_string(manifest.writers) +
      ",\n\"piece_bytes\": " + std::to_string(kChecksumPieceBytes) +
      ",\n\"sections\": " + list_text(manifest.sections, ",\n", section_text) +
      ",\n\"slices\": " + list_text(manifest.slices, ",\n", slice_text) +
      ",\n\"files\": " + list_text(manifest.files, ",\n", file_text) +
      ",\n\"config\": " + json_text(manifest.config, "the configuration") + ",\n\"user\": {" + user + "}";
  text += kChecksumKey;
  return text + hex(crc32c(std::as_bytes(std::span(text))), 8) + std::string(kChecksumEnd);
}

Manifest parse_manifest(std::string_view text, const std::string& file) {
  check_checksum(text, file);
  const JsonValue root = parse_json(text, file);
  const JsonPlace place(root, file);
  // Before the other keys: another format may have others.
  place.at("format").integer(kCheckpointFormat, kCheckpointFormat);
  constexpr std::array<std::string_view, 12> kKeys = {
      "format",   "library_version", "step",  "attempt", "writers", "piece_bytes",
      "sections", "slices",          "files", "config",  "user",    "manifest_crc32c"};
  place.only(kKeys);
  Manifest manifest;
  manifest.library_version = place.at("library_version").text();
  manifest.step = place.at("step").integer(0, INT64_MAX);
  manifest.attempt = place.at("attempt").text();
  manifest.writers = static_cast<int>(place.at("writers").integer(1, kMostWriters));
  place.at("piece_bytes").integer(kChecksumPieceBytes, kChecksumPieceBytes);
  for (const JsonPlace& section : place.at("sections").items())
    manifest.sections.push_back(read_section(section));
  for (const JsonPlace& slice : place.at("slices").items()) manifest.slices.push_back(read_slice(slice));
  for (const JsonPlace& listed : place.at("files").items()) manifest.files.push_back(read_file(listed));
  manifest.config = place.at("config").text();
  for (const auto& [key, value] : place.at("user").entries()) manifest.user[key] = value.text();
  return manifest;
}

void check_manifest(const Manifest& manifest, const std::string& file) {
  check_files(manifest, file);
  const std::map<StateName, std::int64_t> states = expected_states(manifest, file);
  std::map<StateName, std::vector<const ManifestSlice*>> slices;
  for (const ManifestSlice& slice : manifest.slices) {
    const StateName state(slice.section, slice.param, slice.kind);
    if (!states.contains(state)) {
      refuse(file, "slice of " + state_text(state) + " in `" + slice.file + "`", "a state of the tables",
             "none");
    }
    slices[state].push_back(&slice);
  }
  for (const auto& [state, elems] : states) {
    std::vector<const ManifestSlice*>& own = slices[state];
    std::sort(own.begin(), own.end(), [](const auto* a, const auto* b) {
      return std::tie(a->begin, a->elems, a->file) < std::tie(b->begin, b->elems, b->file);
    });
    check_cover(own, state, elems, file);
  }
}

Manifest read_manifest(const std::filesystem::path& folder) {
  const std::filesystem::path path = folder / "manifest.json";
  Manifest manifest = parse_manifest(read_text_file(path, kMostManifestBytes), path.string());
  check_manifest(manifest, path.string());
  return manifest;
}

std::string step_folder_name(std::int64_t step) {
  const std::string digits = std::to_string(step);
  return "step-" + std::string(digits.size() < 8 ? 8 - digits.size() : 0, '0') + digits;
}

std::int64_t step_of_folder_name(std::string_view name) {
  constexpr std::string_view kPrefix = "step-";
  if (!name.starts_with(kPrefix)) return -1;
  const std::string_view digits = name.substr(kPrefix.size());
  std::int64_t step = -1;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), step);
  const bool fits = error == std::errc() && end == digits.data() + digits.size() && step >= 0;
  return fits && step_folder_name(step) == name ? step : -1;
}

std::string rank_file_name(int writer, int writers) {
  const auto five = [](int number) {
    const std::string digits = std::to_string(number);
    return std::string(digits.size() < 5 ? 5 - digits.size() : 0, '0') + digits;
  };
  return "rank-" + five(writer) + "-of-" + five(writers) + ".safetensors";
}

void check_file_sizes(const Manifest& manifest, const std::filesystem::path& folder) {
  for (const ManifestFile& file : manifest.files) {
    const std::filesystem::path path = folder / file.name;
    const std::int64_t found = FileInput(path).bytes();
    if (found != file.bytes) {
      refuse(path.string(), "size", std::to_string(file.bytes) + " bytes", std::to_string(found));
    }
  }
}

}  // namespace mxopt
