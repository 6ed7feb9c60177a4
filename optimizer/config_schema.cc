#include "mxopt/optimizer/config_schema.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <set>
#include <system_error>
#include <tuple>

#include "mxopt/optimizer/yaml_tree.h"
#include "mxopt/params/check.h"
#include "mxopt/params/nearest_name.h"

namespace mxopt {

namespace {

using Kind = YamlNode::Kind;

std::string joined(const std::vector<std::string>& names) {
  std::string text;
  for (const std::string& name : names) text += (text.empty() ? "" : ", ") + name;
  return text;
}

std::string join_key(const std::string& parent, std::string_view name) {
  if (parent.empty() || name.empty()) return parent + std::string(name);
  return parent + "." + std::string(name);
}

std::string_view parent_of(std::string_view key) {
  const std::size_t dot = key.rfind('.');
  return dot == std::string_view::npos ? std::string_view{} : key.substr(0, dot);
}

std::string_view leaf_of(std::string_view key) {
  return key.substr(key.rfind('.') + 1);
}

bool is_below(std::string_view key, std::string_view section) {
  return section.empty() ||
         (key.size() > section.size() && key.starts_with(section) && key[section.size()] == '.');
}

std::string quoted_text(std::string_view text) {
  constexpr char kHex[] = "0123456789abcdef";
  std::string out = "\"";
  for (const char c : text) {
    const auto code = static_cast<unsigned char>(c);
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (c == '\n') {
      out += "\\n";
    } else if (code < 0x20 || code == 0x7F) {
      out += std::string("\\x") + kHex[code >> 4U] + kHex[code & 0xFU];
    } else {
      out += c;
    }
  }
  return out + "\"";
}

template <class Number>
std::string number_text(Number value) {
  char buffer[64];
  const auto result = std::to_chars(std::begin(buffer), std::end(buffer), value);
  return {buffer, result.ptr};
}

std::string shown(const YamlNode& node) {
  switch (node.kind) {
    case Kind::kScalar:
      return node.quoted ? "\"" + one_line(node.scalar) + "\"" : one_line(node.scalar);
    case Kind::kList:
      return node.items.empty() ? "an empty list" : "a list";
    case Kind::kMap:
      return "a map";
    case Kind::kNull:
    case Kind::kRefused:
      break;
  }
  return "empty";
}

/// "010" is 8 to some readers and 10 to others.
bool has_leading_zero(std::string_view text) {
  if (text.starts_with('-')) text.remove_prefix(1);
  return text.size() > 1 && text[0] == '0' && text[1] >= '0' && text[1] <= '9';
}

/// The parsers below set `value`, or return why `text` is no such value.
template <class Real>
std::optional<std::string> parse(std::string_view text, Real& value) {
  if (has_leading_zero(text)) return "leading zero";
  if (text == ".inf" || text == "-.inf" || text == ".nan") return "not finite";
  Real parsed{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), parsed);
  if (error == std::errc::invalid_argument || end != text.data() + text.size()) return "not a number";
  if (error == std::errc::result_out_of_range) return "too large or too small to be stored";
  if (!std::isfinite(parsed)) return "not finite";
  value = parsed;
  return std::nullopt;
}

std::optional<std::string> parse(std::string_view text, std::int64_t& value) {
  if (has_leading_zero(text)) return "leading zero";
  std::int64_t parsed = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), parsed);
  if (end == text.data() + text.size()) {
    if (error == std::errc::result_out_of_range) return "too large or too small to be stored";
    if (error == std::errc{}) {
      value = parsed;
      return std::nullopt;
    }
  }
  double real = 0;
  if (const auto why = parse<double>(text, real)) return *why == "not a number" ? "not an integer" : *why;
  if (text.find_first_of("eE") == std::string_view::npos || real != std::trunc(real)) return "not an integer";
  constexpr double kExact = 9007199254740992.0;  // 2^53
  if (std::abs(real) > kExact) return "too large or too small; write all digits";
  value = static_cast<std::int64_t>(real);
  return std::nullopt;
}

std::optional<std::string> parse(std::string_view text, bool& value) {
  if (text != "true" && text != "false") return "not a truth value";
  value = text == "true";
  return std::nullopt;
}

/// Parses a scalar that must not be quoted. Anything else needs no reason: the message shows what it is.
template <class Value>
std::optional<std::string> parse_plain(const YamlNode& node, Value& value) {
  if (node.kind != Kind::kScalar) return "";
  if (node.quoted) return "quoted, and so text";
  return parse(node.scalar, value);
}

}  // namespace

/// Reads trees into the variables of a schema, and collects what is wrong.
class ConfigReader {
 public:
  explicit ConfigReader(ConfigSchema& root) : root_(root) {}

  void read_document(std::string_view text, const std::string& source);
  void read_override(const std::string& override);
  /// Reports missing keys, throws if there are problems, and runs the after_load actions.
  void finish(bool check_required);

  /// Records that `key` does not accept the value of `node`; `reason` and `advice` may be empty.
  void reject(const ConfigField& field, const std::string& key, const YamlNode& node,
              const std::string& reason, const std::string& advice = {});
  void read_items(const ConfigField& field, const ConfigItems& items, const std::string& key,
                  const YamlNode& node);

 private:
  void read_map(const ConfigSchema& schema, const std::string& base, const std::string& section,
                const YamlNode& map);
  void read_field(const ConfigField& field, const std::string& key, const YamlNode& node);
  void report(YamlPlace place, std::string text) { problems_.push_back({place, std::move(text)}); }
  void report_unknown(const ConfigSchema& schema, const std::string& base, const std::string& name,
                      YamlPlace place, const YamlNode& value);
  void report_missing(const ConfigSchema& schema, const std::string& base);
  /// Turns problems_ into lines, in the order of the text.
  void flush();
  std::string where(YamlPlace place) const;

  ConfigSchema& root_;
  std::string source_;
  bool is_override_ = false;
  bool is_readable_ = true;
  std::vector<YamlProblem> problems_;                // of source_
  std::vector<std::string> lines_;                   // complete messages
  std::set<std::string> given_;                      // full keys that were there, right or wrong
  std::map<std::string, YamlPlace> section_places_;  // by full key
};

/// A variable of one type, and how YAML becomes its value.
class ConfigValue {
 public:
  virtual ~ConfigValue() = default;
  /// Sets the variable, or rejects the node.
  virtual void read(const ConfigField& field, const std::string& key, const YamlNode& node,
                    ConfigReader& reader) = 0;
  /// The present value as YAML on one line.
  virtual std::string text() const = 0;
  virtual std::string allowed() const = 0;
  virtual bool is_allowed() const { return true; }
  virtual bool is_empty() const { return false; }
  virtual const ConfigItems* items() const { return nullptr; }
};

namespace {

template <class Number>
class NumberValue : public ConfigValue {
 public:
  NumberValue(Number& value, Bounds bounds) : value_(value), bounds_(std::move(bounds)) {}

  void read(const ConfigField& field, const std::string& key, const YamlNode& node,
            ConfigReader& reader) override {
    Number parsed{};
    if (const auto why = parse_plain(node, parsed)) {
      reader.reject(field, key, node, *why);
    } else if (!bounds_.allows(static_cast<double>(parsed))) {
      reader.reject(field, key, node, "");
    } else {
      value_ = parsed;
    }
  }
  std::string text() const override { return number_text(value_); }
  std::string allowed() const override {
    return bounds_.text(std::is_integral_v<Number> ? "integer" : "number");
  }
  bool is_allowed() const override { return bounds_.allows(static_cast<double>(value_)); }

 private:
  Number& value_;
  Bounds bounds_;
};

class BoolValue : public ConfigValue {
 public:
  explicit BoolValue(bool& value) : value_(value) {}

  void read(const ConfigField& field, const std::string& key, const YamlNode& node,
            ConfigReader& reader) override {
    if (const auto why = parse_plain(node, value_)) reader.reject(field, key, node, "");
  }
  std::string text() const override { return value_ ? "true" : "false"; }
  std::string allowed() const override { return "true or false"; }

 private:
  bool& value_;
};

class TextValue : public ConfigValue {
 public:
  explicit TextValue(std::string& value) : value_(value) {}

  void read(const ConfigField& field, const std::string& key, const YamlNode& node,
            ConfigReader& reader) override {
    if (node.kind != Kind::kScalar) {
      reader.reject(field, key, node, "");
    } else {
      value_ = node.scalar;
    }
  }
  std::string text() const override { return quoted_text(value_); }
  std::string allowed() const override { return "text"; }
  bool is_empty() const override { return value_.empty(); }

 private:
  std::string& value_;
};

class ChoiceValue : public ConfigValue {
 public:
  explicit ChoiceValue(ConfigChoice choice) : choice_(std::move(choice)) {}

  void read(const ConfigField& field, const std::string& key, const YamlNode& node,
            ConfigReader& reader) override {
    if (node.kind != Kind::kScalar) {
      reader.reject(field, key, node, "");
      return;
    }
    const auto found = std::find(choice_.names.begin(), choice_.names.end(), node.scalar);
    if (found != choice_.names.end()) {
      choice_.choose(static_cast<std::size_t>(found - choice_.names.begin()));
      return;
    }
    const std::vector<std::string_view> names(choice_.names.begin(), choice_.names.end());
    const std::string_view nearest = nearest_name(one_line(node.scalar), names);
    reader.reject(field, key, node, "",
                  nearest.empty() ? "" : "; did you mean `" + std::string(nearest) + "`?");
  }
  std::string text() const override {
    const std::size_t i = choice_.index();
    return i < choice_.names.size() ? choice_.names[i] : "no valid choice";
  }
  std::string allowed() const override {
    return choice_.names.size() == 1 ? choice_.names[0] : "one of " + joined(choice_.names);
  }
  bool is_allowed() const override { return choice_.index() < choice_.names.size(); }

 private:
  ConfigChoice choice_;
};

class NumbersValue : public ConfigValue {
 public:
  NumbersValue(std::span<double> values, Bounds bounds) : values_(values), bounds_(std::move(bounds)) {}

  void read(const ConfigField& field, const std::string& key, const YamlNode& node,
            ConfigReader& reader) override {
    if (node.kind != Kind::kList) {
      reader.reject(field, key, node, "");
      return;
    }
    if (node.items.size() != values_.size()) {
      reader.reject(field, key, node, "of " + std::to_string(node.items.size()));
      return;
    }
    for (std::size_t i = 0; i < values_.size(); ++i) {
      const YamlNode& item = node.items[i];
      if (item.kind == Kind::kRefused) continue;
      double parsed = 0;
      if (const auto why = parse_plain(item, parsed); why || !bounds_.allows(parsed)) {
        reader.reject(field, key + "[" + std::to_string(i) + "]", item, why.value_or(""));
      } else {
        values_[i] = parsed;
      }
    }
  }
  std::string text() const override {
    std::vector<std::string> texts;
    for (const double value : values_) texts.push_back(number_text(value));
    return "[" + joined(texts) + "]";
  }
  std::string allowed() const override {
    return "list of " + std::to_string(values_.size()) + " " + bounds_.text("numbers");
  }
  bool is_allowed() const override {
    return std::all_of(values_.begin(), values_.end(),
                       [this](double value) { return bounds_.allows(value); });
  }

 private:
  std::span<double> values_;
  Bounds bounds_;
};

/// What `Inner` reads, or the word for "that of another key".
template <class Value, class Inner>
class InheritedValue : public ConfigValue {
 public:
  InheritedValue(std::optional<Value>& value, Bounds bounds) : value_(value), bounds_(std::move(bounds)) {}

  void read(const ConfigField& field, const std::string& key, const YamlNode& node,
            ConfigReader& reader) override {
    value_.reset();
    if (node.kind == Kind::kScalar && !node.quoted && node.scalar == kInherit) return;
    Value parsed{};
    Inner(parsed, bounds_).read(field, key, node, reader);
    value_ = parsed;
  }
  std::string text() const override {
    if (!value_) return kInherit;
    Value value = *value_;
    return Inner(value, bounds_).text();
  }
  std::string allowed() const override {
    Value value{};
    return Inner(value, bounds_).allowed() + ", or " + kInherit;
  }
  bool is_allowed() const override {
    if (!value_) return true;
    Value value = *value_;
    return Inner(value, bounds_).is_allowed();
  }

 private:
  static constexpr const char* kInherit = "inherit";
  std::optional<Value>& value_;
  Bounds bounds_;
};

class TextsValue : public ConfigValue {
 public:
  explicit TextsValue(std::vector<std::string>& value) : value_(value) {}

  void read(const ConfigField& field, const std::string& key, const YamlNode& node,
            ConfigReader& reader) override {
    if (node.kind != Kind::kList) {
      reader.reject(field, key, node, "");
      return;
    }
    value_.clear();
    for (std::size_t i = 0; i < node.items.size(); ++i) {
      const YamlNode& item = node.items[i];
      if (item.kind == Kind::kScalar) {
        value_.push_back(item.scalar);
      } else if (item.kind != Kind::kRefused) {
        reader.reject(field, key + "[" + std::to_string(i) + "]", item, "");
      }
    }
  }
  std::string text() const override {
    std::vector<std::string> texts;
    for (const std::string& text : value_) texts.push_back(quoted_text(text));
    return "[" + joined(texts) + "]";
  }
  std::string allowed() const override { return "list of texts"; }
  bool is_empty() const override { return value_.empty(); }

 private:
  std::vector<std::string>& value_;
};

class ItemsValue : public ConfigValue {
 public:
  explicit ItemsValue(ConfigItems items) : items_(std::move(items)) {}

  void read(const ConfigField& field, const std::string& key, const YamlNode& node,
            ConfigReader& reader) override {
    if (node.kind != Kind::kList) {
      reader.reject(field, key, node, "");
    } else {
      reader.read_items(field, items_, key, node);
    }
  }
  std::string text() const override {
    return items_.size() == 0 ? "[]" : std::to_string(items_.size()) + " items";
  }
  std::string allowed() const override {
    ConfigSchema schema;
    const auto item = items_.describe_default(schema);
    std::vector<std::string> names;
    for (const std::string& key : schema.keys()) names.push_back(key);
    return "list of maps with the keys " + joined(names);
  }
  bool is_empty() const override { return items_.size() == 0; }
  const ConfigItems* items() const override { return &items_; }

 private:
  ConfigItems items_;
};

}  // namespace

// Bounds

Bounds Bounds::at_least(double low) {
  Bounds bounds;
  bounds.low_ = low;
  return bounds;
}

Bounds Bounds::above(double low) {
  Bounds bounds = at_least(low);
  bounds.low_is_open_ = true;
  return bounds;
}

Bounds Bounds::at_most(double high) const {
  Bounds bounds = *this;
  bounds.high_ = high;
  return bounds;
}

Bounds Bounds::below(double high) const {
  Bounds bounds = at_most(high);
  bounds.high_is_open_ = true;
  return bounds;
}

Bounds Bounds::or_zero(std::string meaning) const {
  Bounds bounds = *this;
  bounds.zero_meaning_ = std::move(meaning);
  return bounds;
}

bool Bounds::allows(double value) const {
  if (!std::isfinite(value)) return false;
  if (value == 0 && !zero_meaning_.empty()) return true;
  if (low_ && (low_is_open_ ? value <= *low_ : value < *low_)) return false;
  return !high_ || (high_is_open_ ? value < *high_ : value <= *high_);
}

std::string Bounds::text(std::string_view noun) const {
  std::string text(noun);
  if (low_ && high_) {
    text += std::string(" in ") + (low_is_open_ ? "(" : "[") + number_text(*low_) + ", " +
            number_text(*high_) + (high_is_open_ ? ")" : "]");
  } else if (low_) {
    text += (low_is_open_ ? " > " : " >= ") + number_text(*low_);
  } else if (high_) {
    text += (high_is_open_ ? " < " : " <= ") + number_text(*high_);
  }
  if (!zero_meaning_.empty()) text += ", or 0 (" + zero_meaning_ + ")";
  return text;
}

// ConfigField

ConfigField::ConfigField(std::string key, std::unique_ptr<ConfigValue> value, std::string doc,
                         std::string unit)
    : key_(std::move(key)),
      value_(std::move(value)),
      doc_(std::move(doc)),
      unit_(std::move(unit)),
      default_(value_->text()) {}

ConfigField::~ConfigField() = default;

ConfigField& ConfigField::alias(std::string name) {
  aliases_.push_back(std::move(name));
  return *this;
}

ConfigField& ConfigField::required() {
  is_required_ = true;
  return *this;
}

ConfigField& ConfigField::not_empty() {
  is_not_empty_ = true;
  return *this;
}

std::string ConfigField::allowed() const {
  return value_->allowed() + (is_not_empty_ ? ", not empty" : "") + (unit_.empty() ? "" : ", in " + unit_);
}

bool ConfigField::holds_allowed_value() const {
  return value_->is_allowed() && !(is_not_empty_ && value_->is_empty());
}

// ConfigReader

void ConfigReader::read_document(std::string_view text, const std::string& source) {
  source_ = one_line(source, std::string::npos);
  is_override_ = false;
  const YamlNode root = parse_yaml(text, problems_);
  is_readable_ = root.kind == Kind::kMap;
  if (root.kind == Kind::kMap) {
    read_map(root_, "", "", root);
  } else if (root.kind == Kind::kNull) {
    report({}, "holds no configuration; write {} for one of defaults only");
  } else if (root.kind != Kind::kRefused) {
    report(root.place, "is " + shown(root) + "; allowed: a map with the keys " + joined(root_.names_in("")));
  }
  flush();
}

void ConfigReader::read_override(const std::string& override) {
  source_ = "--set " + one_line(override);
  is_override_ = true;
  const std::size_t equals = override.find('=');
  if (equals == std::string::npos || equals == 0) {
    report({}, "expected key=value");
    return flush();
  }
  const std::string key = override.substr(0, equals);
  const YamlNode node = parse_yaml(std::string_view(override).substr(equals + 1), problems_);
  if (const ConfigField* field = root_.find(key)) {
    read_field(*field, key, node);
  } else if (root_.is_section(key)) {
    report({}, "`" + key + "` is a section; set one of its keys: " + joined(root_.names_in(key)));
  } else if (const ConfigField* list = root_.find(key.substr(0, key.find('[')))) {
    report({}, "a list is set as a whole: " + list->key_ + "=[...] (" + list->allowed() + ")");
  } else {
    report_unknown(root_, "", key, {}, node);
  }
  flush();
}

void ConfigReader::finish(bool check_required) {
  if (check_required && is_readable_) {
    is_override_ = false;
    report_missing(root_, "");
    flush();
  }
  if (!lines_.empty()) {
    constexpr std::size_t kMaxLines = 20;
    std::string text;
    for (std::size_t i = 0; i < std::min(lines_.size(), kMaxLines); ++i)
      text += (i == 0 ? "" : "\n") + lines_[i];
    if (lines_.size() > kMaxLines)
      text += "\n... and " + std::to_string(lines_.size() - kMaxLines) + " more problems";
    throw ConfigError(text);
  }
  for (const auto& action : root_.after_load_) action();
}

void ConfigReader::reject(const ConfigField& field, const std::string& key, const YamlNode& node,
                          const std::string& reason, const std::string& advice) {
  report(node.place, "`" + key + "` is " + shown(node) + (reason.empty() ? "" : " (" + reason + ")") +
                         "; allowed: " + field.allowed() + advice);
}

void ConfigReader::read_items(const ConfigField& field, const ConfigItems& items, const std::string& key,
                              const YamlNode& node) {
  // An override replaces the whole list of the file.
  std::erase_if(root_.origins_, [&](const auto& entry) { return entry.first.starts_with(key + "["); });
  std::erase_if(given_, [&](const std::string& full_key) { return full_key.starts_with(key + "["); });
  items.assign_defaults(node.items.size());
  for (std::size_t i = 0; i < node.items.size(); ++i) {
    const std::string base = key + "[" + std::to_string(i) + "]";
    if (node.items[i].kind == Kind::kRefused) continue;
    if (node.items[i].kind != Kind::kMap) {
      reject(field, base, node.items[i], "");
      continue;
    }
    ConfigSchema schema;
    items.describe(schema, i);
    const std::size_t problems_before = problems_.size();
    read_map(schema, base, "", node.items[i]);
    report_missing(schema, base);
    if (problems_.size() > problems_before) continue;
    for (const auto& action : schema.after_load_) action();
    // What the item left out is at its default now, which may follow from its other values.
    schema.visit(base, false, [this](const std::string& full_key, const ConfigField& item_field) {
      root_.origins_.try_emplace(full_key, ConfigSchema::Origin{"default", item_field.value_->text()});
    });
  }
}

void ConfigReader::read_map(const ConfigSchema& schema, const std::string& base, const std::string& section,
                            const YamlNode& map) {
  section_places_[join_key(base, section)] = map.place;
  for (const YamlEntry& entry : map.entries) {
    const std::string name = join_key(section, entry.key);
    const bool is_dotted = entry.key.find('.') != std::string::npos;
    const ConfigField* field = is_dotted ? nullptr : schema.find(name);
    if (field != nullptr) {
      read_field(*field, base.empty() ? name : join_key(base, name), entry.value);
    } else if (is_dotted || !schema.is_section(name)) {
      report_unknown(schema, base, name, entry.place, entry.value);
    } else if (entry.value.kind == Kind::kMap) {
      read_map(schema, base, name, entry.value);
    } else if (entry.value.kind != Kind::kRefused) {
      report(entry.value.place, "`" + join_key(base, name) + "` is " + shown(entry.value) +
                                    "; allowed: a map with the keys " + joined(schema.names_in(name)));
    }
  }
}

void ConfigReader::read_field(const ConfigField& field, const std::string& key, const YamlNode& node) {
  given_.insert(key);
  if (node.kind == Kind::kRefused) return;
  const std::size_t problems_before = problems_.size();
  field.value_->read(field, key, node, *this);
  if (problems_.size() > problems_before) return;
  if (!field.holds_allowed_value()) return reject(field, key, node, "");
  root_.origins_[key] = {is_override_ ? "--set" : where(node.place), field.value_->text()};
}

void ConfigReader::report_unknown(const ConfigSchema& schema, const std::string& base,
                                  const std::string& name, YamlPlace place, const YamlNode& value) {
  std::string text = "unknown key `" + one_line(join_key(base, name)) + "` (";
  text += (value.kind == Kind::kScalar ? "value " : "") + shown(value) + "); ";
  const bool is_known_path = !is_override_ && (schema.find(name) != nullptr || schema.is_section(name));
  const std::string meant = schema.meant_key(name);
  if (is_known_path) {
    text += "keys are nested, one section a level, not dotted";
  } else if (const ConfigField* field = schema.find(meant)) {
    text += "did you mean `" + join_key(base, meant) + "` (" + field->allowed() + ")?";
  } else if (!meant.empty()) {
    text += "did you mean the section `" + join_key(base, meant) + "`?";
  } else {
    const std::string_view parent = parent_of(name);
    const bool is_parent_known = parent.empty() || schema.is_section(parent);
    text += "allowed " + (is_parent_known && !parent.empty() ? "in `" + std::string(parent) + "`" : "here") +
            ": " + joined(schema.names_in(is_parent_known ? parent : std::string_view{}));
  }
  report(place, std::move(text));
}

void ConfigReader::report_missing(const ConfigSchema& schema, const std::string& base) {
  for (const auto& field : schema.fields_) {
    const std::string key = join_key(base, field->key_);
    if (!field->is_required_ || given_.contains(key)) continue;
    std::string_view section = parent_of(key);
    while (!section.empty() && !section_places_.contains(std::string(section))) section = parent_of(section);
    report(section_places_[std::string(section)], "missing key `" + key + "` (" + field->allowed() + ")");
  }
}

void ConfigReader::flush() {
  std::stable_sort(problems_.begin(), problems_.end(), [](const YamlProblem& a, const YamlProblem& b) {
    return std::tie(a.place.line, a.place.column) < std::tie(b.place.line, b.place.column);
  });
  for (const YamlProblem& problem : problems_) lines_.push_back(where(problem.place) + ": " + problem.text);
  problems_.clear();
}

std::string ConfigReader::where(YamlPlace place) const {
  if (is_override_) return source_;
  return source_ + ":" + std::to_string(place.line) + ":" + std::to_string(place.column);
}

// ConfigSchema

ConfigSchema::ConfigSchema() = default;
ConfigSchema::~ConfigSchema() = default;
ConfigSchema::ConfigSchema(ConfigSchema&&) noexcept = default;
ConfigSchema& ConfigSchema::operator=(ConfigSchema&&) noexcept = default;

ConfigField& ConfigSchema::add(std::string key, double& value, Bounds bounds, std::string doc,
                               std::string unit) {
  return add_value(std::move(key), std::make_unique<NumberValue<double>>(value, std::move(bounds)),
                   std::move(doc), std::move(unit));
}

ConfigField& ConfigSchema::add(std::string key, float& value, Bounds bounds, std::string doc,
                               std::string unit) {
  return add_value(std::move(key), std::make_unique<NumberValue<float>>(value, std::move(bounds)),
                   std::move(doc), std::move(unit));
}

ConfigField& ConfigSchema::add(std::string key, std::int64_t& value, Bounds bounds, std::string doc,
                               std::string unit) {
  return add_value(std::move(key), std::make_unique<NumberValue<std::int64_t>>(value, std::move(bounds)),
                   std::move(doc), std::move(unit));
}

ConfigField& ConfigSchema::add(std::string key, bool& value, std::string doc) {
  return add_value(std::move(key), std::make_unique<BoolValue>(value), std::move(doc));
}

ConfigField& ConfigSchema::add(std::string key, std::string& value, std::string doc) {
  return add_value(std::move(key), std::make_unique<TextValue>(value), std::move(doc));
}

ConfigField& ConfigSchema::add(std::string key, std::vector<std::string>& value, std::string doc) {
  return add_value(std::move(key), std::make_unique<TextsValue>(value), std::move(doc));
}

ConfigField& ConfigSchema::add(std::string key, std::span<double> values, Bounds bounds, std::string doc,
                               std::string unit) {
  return add_value(std::move(key), std::make_unique<NumbersValue>(values, std::move(bounds)), std::move(doc),
                   std::move(unit));
}

ConfigField& ConfigSchema::add(std::string key, std::optional<double>& value, Bounds bounds, std::string doc,
                               std::string unit) {
  return add_value(std::move(key),
                   std::make_unique<InheritedValue<double, NumberValue<double>>>(value, std::move(bounds)),
                   std::move(doc), std::move(unit));
}

ConfigField& ConfigSchema::add(std::string key, std::optional<std::array<double, 2>>& values, Bounds bounds,
                               std::string doc, std::string unit) {
  return add_value(
      std::move(key),
      std::make_unique<InheritedValue<std::array<double, 2>, NumbersValue>>(values, std::move(bounds)),
      std::move(doc), std::move(unit));
}

ConfigField& ConfigSchema::add_choice(std::string key, ConfigChoice choice, std::string doc) {
  return add_value(std::move(key), std::make_unique<ChoiceValue>(std::move(choice)), std::move(doc));
}

ConfigField& ConfigSchema::add_items(std::string key, ConfigItems items, std::string doc) {
  return add_value(std::move(key), std::make_unique<ItemsValue>(std::move(items)), std::move(doc));
}

ConfigField& ConfigSchema::add_value(std::string key, std::unique_ptr<ConfigValue> value, std::string doc,
                                     std::string unit) {
  const bool has_good_characters =
      key.find_first_not_of("abcdefghijklmnopqrstuvwxyz0123456789_.") == std::string::npos;
  const bool has_good_dots =
      !key.starts_with('.') && !key.ends_with('.') && key.find("..") == std::string::npos;
  MXOPT_CHECK(!key.empty() && has_good_characters && has_good_dots,
              "configuration key `" << key << "`: expected lower-case names joined by single dots");
  MXOPT_CHECK(find(key) == nullptr, "configuration key `" << key << "` is there already");
  MXOPT_CHECK(!is_section(key), "configuration key `" << key << "` is a section of other keys");
  for (std::string_view section = parent_of(key); !section.empty(); section = parent_of(section)) {
    MXOPT_CHECK(find(section) == nullptr,
                "configuration key `" << key << "` lies in `" << section << "`, which is no section");
  }
  fields_.emplace_back(new ConfigField(std::move(key), std::move(value), std::move(doc), std::move(unit)));
  return *fields_.back();
}

void ConfigSchema::after_load(std::function<void()> action) {
  after_load_.push_back(std::move(action));
}

void ConfigSchema::load_file(const std::string& path, const std::vector<std::string>& overrides) {
  load_text(read_yaml_file(path), path, overrides);
}

void ConfigSchema::load_text(std::string_view text, const std::string& source,
                             const std::vector<std::string>& overrides) {
  ConfigReader reader(*this);
  reader.read_document(text, source);
  for (const std::string& override : overrides) reader.read_override(override);
  reader.finish(/*check_required=*/true);
}

void ConfigSchema::apply_overrides(const std::vector<std::string>& overrides) {
  ConfigReader reader(*this);
  for (const std::string& override : overrides) reader.read_override(override);
  reader.finish(/*check_required=*/false);
}

std::vector<std::string> ConfigSchema::problems() const {
  std::vector<std::string> found;
  visit("", false, [&](const std::string& key, const ConfigField& field) {
    if (field.holds_allowed_value()) return;
    found.push_back("`" + key + "` is " + one_line(field.value_->text()) + "; allowed: " + field.allowed());
  });
  return found;
}

std::string ConfigSchema::origin(std::string_view key) const {
  std::string text;
  visit("", false, [&](const std::string& full_key, const ConfigField& field) {
    if (full_key == key) text = origin_of(full_key, field, origins_);
  });
  MXOPT_CHECK(!text.empty(), "origin of `" << key << "`: there is no such configuration key");
  return text;
}

std::string ConfigSchema::to_yaml() const {
  std::string out;
  print(out, origins_, "", "", 0);
  return out;
}

std::string ConfigSchema::markdown_table() const {
  std::string table = "| key | default | allowed | meaning |\n| --- | --- | --- | --- |\n";
  visit("", true, [&](const std::string& key, const ConfigField& field) {
    const std::string preset = field.is_required_ ? "required" : "`" + field.default_ + "`";
    table += "| `" + key + "` | " + preset + " | " + field.allowed() + " | " + field.doc_ + " |\n";
  });
  return table;
}

std::vector<std::string> ConfigSchema::keys() const {
  std::vector<std::string> all;
  visit("", true, [&](const std::string& key, const ConfigField&) { all.push_back(key); });
  return all;
}

const ConfigField* ConfigSchema::find(std::string_view key) const {
  for (const auto& field : fields_) {
    if (field->key_ == key) return field.get();
  }
  return nullptr;
}

bool ConfigSchema::is_section(std::string_view key) const {
  return !key.empty() && std::any_of(fields_.begin(), fields_.end(),
                                     [&](const auto& field) { return is_below(field->key_, key); });
}

std::vector<std::string> ConfigSchema::names_in(std::string_view section) const {
  std::vector<std::string> names;
  for (const auto& field : fields_) {
    if (!is_below(field->key_, section)) continue;
    const std::string_view rest =
        std::string_view(field->key_).substr(section.empty() ? 0 : section.size() + 1);
    const std::string name(rest.substr(0, rest.find('.')));
    if (std::find(names.begin(), names.end(), name) == names.end()) names.push_back(name);
  }
  return names;
}

/// The key or section that the author of an unknown key had in mind; empty if there is no good guess.
std::string ConfigSchema::meant_key(std::string_view unknown_key) const {
  constexpr std::size_t kLongestGuessed = 64;
  const std::string_view leaf = leaf_of(unknown_key);
  const std::string_view parent = parent_of(unknown_key);
  if (leaf.size() > kLongestGuessed) return {};

  for (const auto& field : fields_) {
    if (std::find(field->aliases_.begin(), field->aliases_.end(), leaf) != field->aliases_.end())
      return field->key_;
  }

  std::vector<std::string_view> same_leaf;
  for (const auto& field : fields_) {
    for (std::string_view key = field->key_; !key.empty(); key = parent_of(key)) {
      if (leaf_of(key) == leaf) same_leaf.push_back(key);
    }
  }
  if (!same_leaf.empty()) {
    const std::string_view nearest = nearest_name(unknown_key.substr(0, 2 * kLongestGuessed), same_leaf);
    return std::string(nearest.empty() ? same_leaf.front() : nearest);
  }

  const std::vector<std::string> siblings = names_in(parent);
  const std::vector<std::string_view> candidates(siblings.begin(), siblings.end());
  const std::string_view nearest = nearest_name(leaf, candidates);
  return nearest.empty() ? std::string() : join_key(std::string(parent), nearest);
}

std::string ConfigSchema::origin_of(std::string_view full_key, const ConfigField& field,
                                    const Origins& origins) {
  const auto read = origins.find(full_key);
  const bool is_read = read != origins.end();
  const bool is_unchanged = field.value_->text() == (is_read ? read->second.value : field.default_);
  const bool is_new_item = !is_read && full_key.find('[') != std::string_view::npos;
  if (!is_unchanged || is_new_item) return "set by the program";
  return is_read ? read->second.text : "default";
}

/// Calls `visitor` for every field, and for those of list items: the present ones, or one default item as
/// "list[]".
void ConfigSchema::visit(const std::string& base, bool default_items, const Visitor& visitor) const {
  for (const auto& field : fields_) {
    const std::string key = join_key(base, field->key_);
    visitor(key, *field);
    const ConfigItems* items = field->value_->items();
    if (items == nullptr) continue;
    if (default_items) {
      ConfigSchema schema;
      const auto item = items->describe_default(schema);
      schema.visit(key + "[]", default_items, visitor);
      continue;
    }
    for (std::size_t i = 0; i < items->size(); ++i) {
      ConfigSchema schema;
      items->describe(schema, i);
      schema.visit(key + "[" + std::to_string(i) + "]", default_items, visitor);
    }
  }
}

/// Prints the keys of `section`; `base` is the full key of the list item that this schema describes, if any.
void ConfigSchema::print(std::string& out, const Origins& origins, const std::string& base,
                         const std::string& section, int indent) const {
  const std::string margin(static_cast<std::size_t>(indent), ' ');
  for (const std::string& name : names_in(section)) {
    const std::string key = join_key(section, name);
    const ConfigField* field = find(key);
    if (field == nullptr) {
      out += margin + name + ":\n";
      print(out, origins, base, key, indent + 2);
      continue;
    }
    const std::string full_key = join_key(base, key);
    const std::string comment = "  # " + origin_of(full_key, *field, origins) + "\n";
    const ConfigItems* items = field->value_->items();
    if (items == nullptr || items->size() == 0) {
      out += margin + name + ": " + field->value_->text() + comment;
      continue;
    }
    out += margin + name + ":" + comment;
    for (std::size_t i = 0; i < items->size(); ++i) {
      ConfigSchema schema;
      items->describe(schema, i);
      std::string item;
      schema.print(item, origins, full_key + "[" + std::to_string(i) + "]", "", indent + 4);
      item[static_cast<std::size_t>(indent) + 2] = '-';
      out += item;
    }
  }
}

}  // namespace mxopt
