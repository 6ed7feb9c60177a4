#include "mxopt/optimizer/config_difference.h"

#include <cstddef>
#include <map>

#include "mxopt/optimizer/yaml_tree.h"

namespace mxopt {

namespace {

using Values = std::map<std::string, std::string>;  // by full key

void add_values(Values& values, const std::string& key, const YamlNode& node) {
  switch (node.kind) {
    case YamlNode::Kind::kMap:
      for (const YamlEntry& entry : node.entries) {
        add_values(values, key.empty() ? entry.key : key + '.' + entry.key, entry.value);
      }
      return;
    case YamlNode::Kind::kList:
      for (std::size_t i = 0; i < node.items.size(); ++i) {
        add_values(values, key + '[' + std::to_string(i) + ']', node.items[i]);
      }
      return;
    case YamlNode::Kind::kScalar:
      values[key] = one_line(node.scalar);
      return;
    case YamlNode::Kind::kNull:
    case YamlNode::Kind::kRefused:
      return;
  }
}

Values values_of(std::string_view yaml) {
  Values values;
  std::vector<YamlProblem> problems;
  add_values(values, "", parse_yaml(yaml, problems));
  return values;
}

}  // namespace

std::vector<std::string> config_differences(std::string_view before, std::string_view now) {
  const Values old_values = values_of(before);
  const Values new_values = values_of(now);
  Values all = old_values;
  all.insert(new_values.begin(), new_values.end());
  const auto text = [](const Values& values, const std::string& key) {
    const auto at = values.find(key);
    return at == values.end() ? "nothing" : at->second;
  };
  std::vector<std::string> lines;
  for (const auto& [key, value] : all) {
    const std::string old_text = text(old_values, key), new_text = text(new_values, key);
    if (old_text != new_text) lines.push_back(key + ": " + old_text + ", now " + new_text);
  }
  return lines;
}

}  // namespace mxopt
