// Turns YAML text into a tree in which every value knows its line and column.
//
// The accepted language is small on purpose: one document of maps, lists and scalars in UTF-8. Refused, each
// with its place: anchors, aliases, tags, merge keys, repeated keys, keys that are not plain text, a second
// document, control characters, invalid UTF-8, and anything beyond the limits below.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace mxopt {

inline constexpr std::size_t kMaxYamlBytes = std::size_t{1} << 20;
inline constexpr int kMaxYamlDepth = 32;
inline constexpr int kMaxYamlNodes = 10'000;

/// Both count from 1; columns count bytes, as compilers do.
struct YamlPlace {
  int line = 1;
  int column = 1;
};

struct YamlProblem {
  YamlPlace place;
  std::string text;
};

struct YamlEntry;

struct YamlNode {
  /// kRefused stands where a value was that is already among the problems.
  enum class Kind { kRefused, kNull, kScalar, kList, kMap };

  Kind kind = Kind::kRefused;
  YamlPlace place;
  std::string scalar;
  bool quoted = false;             // a quoted or block scalar: text, never a number
  std::vector<YamlNode> items;     // of a kList
  std::vector<YamlEntry> entries;  // of a kMap, in the order of the text; keys are unique
};

struct YamlEntry {
  std::string key;
  YamlPlace place;
  YamlNode value;
};

/// The tree of `text`. What is refused is appended to `problems`; text without any value gives a kNull.
YamlNode parse_yaml(std::string_view text, std::vector<YamlProblem>& problems);

/// The bytes of a configuration file. Throws ConfigError if it can not be read or is larger than
/// kMaxYamlBytes.
std::string read_yaml_file(const std::string& path);

/// `text` on one line, for messages: control characters escaped, and cut after about `max_bytes`.
std::string one_line(std::string_view text, std::size_t max_bytes = 80);

}  // namespace mxopt
