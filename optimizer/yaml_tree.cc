#include "mxopt/optimizer/yaml_tree.h"

#include <cerrno>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <map>
#include <sstream>
#include <system_error>
#include <utility>

#include <yaml-cpp/eventhandler.h>
#include <yaml-cpp/exceptions.h>
#include <yaml-cpp/mark.h>
#include <yaml-cpp/parser.h>

#include "mxopt/params/check.h"

namespace mxopt {

namespace {

YamlPlace place_of(const YAML::Mark& mark) {
  return mark.is_null() ? YamlPlace{} : YamlPlace{mark.line + 1, mark.column + 1};
}

std::string path_text(const std::string& path) {
  return path.empty() ? "the document" : "`" + one_line(path) + "`";
}

YamlNode make_node(YamlNode::Kind kind, YamlPlace place) {
  YamlNode node;
  node.kind = kind;
  node.place = place;
  return node;
}

/// Ends the parse; the problem is already recorded.
struct Stop {};

class TreeBuilder : public YAML::EventHandler {
 public:
  explicit TreeBuilder(std::vector<YamlProblem>& problems) : problems_(problems) {}

  YamlNode take_root() { return std::move(root_); }

  void OnDocumentStart(const YAML::Mark& mark) override {
    if (documents_++ > 0)
      stop(place_of(mark), "a second document starts here; a configuration is one document");
  }
  void OnDocumentEnd() override {}

  void OnNull(const YAML::Mark& mark, YAML::anchor_t anchor) override {
    add(checked(mark, "?", anchor, YamlNode::Kind::kNull));
  }

  void OnAlias(const YAML::Mark& mark, YAML::anchor_t) override {
    count_node(place_of(mark));
    refuse(place_of(mark), "aliases (*name) are not allowed; write the value out");
    add(make_node(YamlNode::Kind::kRefused, place_of(mark)));
  }

  void OnScalar(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor,
                const std::string& value) override {
    YamlNode node = checked(mark, tag, anchor, YamlNode::Kind::kScalar);
    node.scalar = value;
    node.quoted = tag == "!";
    add(std::move(node));
  }

  void OnSequenceStart(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor,
                       YAML::EmitterStyle::value) override {
    open(checked(mark, tag, anchor, YamlNode::Kind::kList));
  }
  void OnSequenceEnd() override { close(); }

  void OnMapStart(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor,
                  YAML::EmitterStyle::value) override {
    open(checked(mark, tag, anchor, YamlNode::Kind::kMap));
  }
  void OnMapEnd() override { close(); }

 private:
  struct Frame {
    YamlNode node;
    std::map<std::string, YamlPlace> seen;  // keys of a map
    std::string key;                        // the one whose value comes next
    YamlPlace key_place;
    bool has_key = false;
    bool drops_value = false;  // the key was refused, and so its value goes nowhere
  };

  void refuse(YamlPlace place, std::string text) { problems_.push_back({place, std::move(text)}); }

  [[noreturn]] void stop(YamlPlace place, std::string text) {
    refuse(place, std::move(text));
    throw Stop{};
  }

  void count_node(YamlPlace place) {
    if (++nodes_ > kMaxYamlNodes) {
      stop(place, "more than " + std::to_string(kMaxYamlNodes) + " values; this is no configuration");
    }
  }

  /// A node of `kind`, or a refused one if it has an anchor or a tag. Lists and maps keep their kind: their
  /// content is still read, so that its problems are found too.
  YamlNode checked(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor,
                   YamlNode::Kind kind) {
    YamlNode node = make_node(kind, place_of(mark));
    count_node(node.place);
    const bool has_tag = !tag.empty() && tag != "?" && tag != "!";
    if (anchor != 0)
      refuse(node.place, "anchors (&name) are not allowed; write the value where it is needed");
    if (has_tag)
      refuse(node.place, "tags (" + one_line(tag) + ") are not allowed; the schema knows the type");
    const bool is_leaf = kind == YamlNode::Kind::kNull || kind == YamlNode::Kind::kScalar;
    if (is_leaf && (anchor != 0 || has_tag)) node.kind = YamlNode::Kind::kRefused;
    return node;
  }

  void open(YamlNode node) {
    if (stack_.size() >= static_cast<std::size_t>(kMaxYamlDepth)) {
      stop(node.place, "nested more than " + std::to_string(kMaxYamlDepth) + " levels deep");
    }
    Frame frame;
    frame.node = std::move(node);
    stack_.push_back(std::move(frame));
  }

  void close() {
    YamlNode node = std::move(stack_.back().node);
    stack_.pop_back();
    add(std::move(node));
  }

  void add(YamlNode node) {
    if (stack_.empty()) {
      root_ = std::move(node);
      return;
    }
    Frame& frame = stack_.back();
    if (frame.node.kind == YamlNode::Kind::kList) {
      frame.node.items.push_back(std::move(node));
    } else if (!frame.has_key) {
      take_key(frame, node);
    } else {
      if (node.kind == YamlNode::Kind::kNull)
        node.place = frame.key_place;  // the parser gives that of the next token
      if (!frame.drops_value) {
        frame.node.entries.push_back({std::move(frame.key), frame.key_place, std::move(node)});
      }
      frame.has_key = false;
    }
  }

  void take_key(Frame& frame, const YamlNode& node) {
    frame.has_key = true;
    frame.drops_value = true;
    if (node.kind == YamlNode::Kind::kRefused) return;
    if (node.kind != YamlNode::Kind::kScalar) {
      refuse(node.place, "a key of " + path_text(path()) + " is not plain text");
    } else if (node.scalar == "<<") {
      refuse(node.place, "merge keys (<<) are not allowed; write the keys out");
    } else if (auto [first, is_new] = frame.seen.emplace(node.scalar, node.place); !is_new) {
      const std::string parent = path();
      refuse(node.place, "key `" + one_line(parent + (parent.empty() ? "" : ".") + node.scalar) +
                             "` is repeated; it stands first at line " + std::to_string(first->second.line) +
                             ", column " + std::to_string(first->second.column));
    } else {
      frame.key = node.scalar;
      frame.key_place = node.place;
      frame.drops_value = false;
    }
  }

  /// Full key of the innermost open map or list.
  std::string path() const {
    std::string text;
    for (std::size_t i = 0; i + 1 < stack_.size(); ++i) {
      const Frame& frame = stack_[i];
      if (frame.node.kind == YamlNode::Kind::kList) {
        text += "[" + std::to_string(frame.node.items.size()) + "]";
      } else {
        text += (text.empty() ? "" : ".") + frame.key;
      }
    }
    return text;
  }

  std::vector<YamlProblem>& problems_;
  std::vector<Frame> stack_;
  YamlNode root_ = make_node(YamlNode::Kind::kNull, {});
  int nodes_ = 0;
  int documents_ = 0;
};

/// Length of the UTF-8 sequence that starts `text`, or 0 if it is not a valid one.
std::size_t utf8_sequence_bytes(std::string_view text) {
  const auto byte = [&](std::size_t i) -> std::uint32_t {
    return i < text.size() ? static_cast<unsigned char>(text[i]) : 0U;
  };
  const std::uint32_t lead = byte(0);
  if (lead < 0x80) return 1;
  const std::size_t bytes = lead >= 0xF0 ? 4 : lead >= 0xE0 ? 3 : 2;
  std::uint32_t code = lead & (0xFFU >> (bytes + 1));
  for (std::size_t i = 1; i < bytes; ++i) {
    if ((byte(i) & 0xC0U) != 0x80U) return 0;
    code = (code << 6U) | (byte(i) & 0x3FU);
  }
  constexpr std::uint32_t kSmallest[] = {0, 0, 0x80, 0x800, 0x10000};
  const bool is_surrogate = code >= 0xD800 && code <= 0xDFFF;
  const bool has_lead = lead >= 0xC0 && lead < 0xF8;
  return has_lead && code >= kSmallest[bytes] && code <= 0x10FFFF && !is_surrogate ? bytes : 0;
}

/// Records the first byte that is no text. Returns whether there is none.
bool check_text(std::string_view text, std::vector<YamlProblem>& problems) {
  YamlPlace place;
  for (std::size_t i = 0; i < text.size();) {
    const char c = text[i];
    const bool is_control =
        (static_cast<unsigned char>(c) < 0x20 && c != '\n' && c != '\r' && c != '\t') || c == 0x7F;
    const std::size_t bytes = utf8_sequence_bytes(text.substr(i));
    if (is_control || bytes == 0) {
      problems.push_back(
          {place, is_control ? "a control character; a configuration is plain text" : "invalid UTF-8"});
      return false;
    }
    i += bytes;
    place.column += static_cast<int>(bytes);
    if (c == '\n') place = {place.line + 1, 1};
  }
  return true;
}

}  // namespace

YamlNode parse_yaml(std::string_view text, std::vector<YamlProblem>& problems) {
  if (text.size() > kMaxYamlBytes) {
    problems.push_back(
        {{}, "larger than " + std::to_string(kMaxYamlBytes) + " bytes; this is no configuration"});
    return {};
  }
  constexpr std::string_view kByteOrderMark = "\xEF\xBB\xBF";
  if (text.starts_with(kByteOrderMark)) text.remove_prefix(kByteOrderMark.size());
  if (!check_text(text, problems)) return {};

  TreeBuilder builder(problems);
  try {
    std::istringstream stream{std::string(text)};
    YAML::Parser parser(stream);
    while (parser.HandleNextDocument(builder)) {
    }
  } catch (const Stop&) {
    return {};
  } catch (const YAML::Exception& error) {
    problems.push_back({place_of(error.mark), "not valid YAML: " + error.msg});
    return {};
  }
  return builder.take_root();
}

std::string read_yaml_file(const std::string& path) {
  const auto fail = [&](const std::string& why) {
    throw ConfigError(one_line(path, std::string::npos) + ": " + why);
  };
  std::error_code ignored;
  if (std::filesystem::is_directory(path, ignored)) fail("is a directory; expected a YAML file");
  errno = 0;
  std::ifstream file(path, std::ios::binary);
  if (!file) fail("can not be opened: " + std::generic_category().message(errno));
  std::string text(kMaxYamlBytes + 1, '\0');
  file.read(text.data(), static_cast<std::streamsize>(text.size()));
  if (file.bad()) fail("can not be read: " + std::generic_category().message(errno));
  text.resize(static_cast<std::size_t>(file.gcount()));
  if (text.size() > kMaxYamlBytes) {
    throw ConfigError(one_line(path, std::string::npos) + ":1:1: larger than " +
                      std::to_string(kMaxYamlBytes) + " bytes; this is no configuration");
  }
  return text;
}

std::string one_line(std::string_view text, std::size_t max_bytes) {
  constexpr char kHex[] = "0123456789abcdef";
  std::string line;
  for (const char c : text) {
    // The cut never falls inside a UTF-8 sequence.
    if (line.size() >= max_bytes && (static_cast<unsigned char>(c) & 0xC0U) != 0x80U) return line + "...";
    const auto code = static_cast<unsigned char>(c);
    if (c == '\n') {
      line += "\\n";
    } else if (code < 0x20 || code == 0x7F) {
      line += std::string("\\x") + kHex[code >> 4U] + kHex[code & 0xFU];
    } else {
      line += c;
    }
  }
  return line;
}

}  // namespace mxopt
