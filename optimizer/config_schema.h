// The table of configuration keys: it reads YAML and overrides, prints, and explains what is wrong.
//
// Each key is bound to a variable, whose value at that time is the key's default. The table is strict: an
// unknown, repeated or misplaced key, a wrong type, or a value out of range is an error; nothing is guessed
// or ignored. All problems of a file are reported together, one per line, each complete by itself:
//
//   run.yaml:3:3: unknown key `optimizer.weight_decy` (value 0.1); did you mean `optimizer.weight_decay`
//   (number >= 0)? run.yaml:4:9: `optimizer.eps` is -1; allowed: number >= 0
//
// A program adds its own keys to the table of the library:
//
//   mxopt::Config config;
//   std::int64_t steps = 100;
//   mxopt::ConfigSchema schema;
//   mxopt::describe(schema, config);
//   schema.add("train.steps", steps, mxopt::Bounds::at_least(1), "Number of steps.");
//   schema.load_file("run.yaml", {"optimizer.lr=1e-4"});
//
// The bound variables must outlive the schema and stay where they are. Not safe for use by several threads.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

namespace mxopt {

class ConfigReader;  // private
class ConfigSchema;
class ConfigValue;  // private

/// The numbers that a key allows.
class Bounds {
 public:
  static Bounds any() { return {}; }
  static Bounds at_least(double low);  // low <= x
  static Bounds above(double low);     // low < x
  Bounds at_most(double high) const;   // and x <= high
  Bounds below(double high) const;     // and x < high
  /// Allows 0 as well; `meaning` says what it stands for.
  Bounds or_zero(std::string meaning) const;

  bool allows(double value) const;
  /// "number" or "numbers" with its condition, such as "number >= 0".
  std::string text(std::string_view noun) const;

 private:
  std::optional<double> low_;
  std::optional<double> high_;
  bool low_is_open_ = false;
  bool high_is_open_ = false;
  std::string zero_meaning_;
};

/// One key. What add() returns, to say more about it.
class ConfigField {
 public:
  /// A name that other programs have for this key. It is never accepted, but its error points here.
  ConfigField& alias(std::string name);
  /// Leaving the key out is an error.
  ConfigField& required();
  /// An empty text or list is an error.
  ConfigField& not_empty();

  ~ConfigField();

 private:
  friend class ConfigReader;
  friend class ConfigSchema;
  ConfigField(std::string key, std::unique_ptr<ConfigValue> value, std::string doc, std::string unit);
  std::string allowed() const;
  bool holds_allowed_value() const;

  std::string key_;
  std::unique_ptr<ConfigValue> value_;
  std::string doc_;
  std::string unit_;
  std::string default_;
  std::vector<std::string> aliases_;
  bool is_required_ = false;
  bool is_not_empty_ = false;
};

/// An enum whose type is not known here: the texts it allows, and the index of its present value among them.
struct ConfigChoice {
  std::vector<std::string> names;
  std::function<std::size_t()> index;  // names.size() if the variable holds another value
  std::function<void(std::size_t)> choose;
};

/// A list of maps whose item type is not known here.
struct ConfigItems {
  std::function<std::size_t()> size;
  std::function<void(std::size_t)> assign_defaults;          // makes it a list of n default items
  std::function<void(ConfigSchema&, std::size_t)> describe;  // binds the keys of item i
  // Binds the keys of a default item, which it returns to keep it alive.
  std::function<std::shared_ptr<void>(ConfigSchema&)> describe_default;
};

class ConfigSchema {
 public:
  ConfigSchema();
  ~ConfigSchema();
  ConfigSchema(ConfigSchema&&) noexcept;
  ConfigSchema& operator=(ConfigSchema&&) noexcept;

  /// Binds `key` ("section.name", any depth) to a variable.
  ///
  /// doc     one sentence: what the value does.
  /// unit    plural, where the name does not tell: "seconds".
  /// Throws  ContractError if the key is malformed, already there, or a section of another key.
  ConfigField& add(std::string key, double& value, Bounds bounds, std::string doc, std::string unit = {});
  ConfigField& add(std::string key, float& value, Bounds bounds, std::string doc, std::string unit = {});
  ConfigField& add(std::string key, std::int64_t& value, Bounds bounds, std::string doc,
                   std::string unit = {});
  ConfigField& add(std::string key, bool& value, std::string doc);
  ConfigField& add(std::string key, std::string& value, std::string doc);
  ConfigField& add(std::string key, std::vector<std::string>& value, std::string doc);
  ConfigField& add(std::string key, std::span<double> values, Bounds bounds, std::string doc,
                   std::string unit = {});

  /// Values that another key stands in for while they are empty, which is written `inherit`; `doc` names it.
  ConfigField& add(std::string key, std::optional<double>& value, Bounds bounds, std::string doc,
                   std::string unit = {});
  ConfigField& add(std::string key, std::optional<std::array<double, 2>>& values, Bounds bounds,
                   std::string doc, std::string unit = {});

  template <std::size_t N>
  ConfigField& add(std::string key, std::array<double, N>& values, Bounds bounds, std::string doc,
                   std::string unit = {}) {
    return add(std::move(key), std::span<double>(values), std::move(bounds), std::move(doc), std::move(unit));
  }

  template <class Enum>
  requires std::is_enum_v<Enum> ConfigField& add(
      std::string key, Enum& value,
      std::initializer_list<std::pair<std::string_view, std::type_identity_t<Enum>>> names, std::string doc) {
    ConfigChoice choice;
    std::vector<Enum> values;
    for (const auto& [name, named] : names) {
      choice.names.emplace_back(name);
      values.push_back(named);
    }
    choice.index = [&value, values] {
      std::size_t i = 0;
      while (i < values.size() && values[i] != value) ++i;
      return i;
    };
    choice.choose = [&value, values](std::size_t i) { value = values.at(i); };
    return add_choice(std::move(key), std::move(choice), std::move(doc));
  }

  /// Binds `key` to a list of maps. `describe_item` adds the keys of one item, with names relative to it.
  template <class Item>
  ConfigField& add_list(std::string key, std::vector<Item>& items,
                        std::type_identity_t<std::function<void(ConfigSchema&, Item&)>> describe_item,
                        std::string doc) {
    ConfigItems access;
    access.size = [&items] { return items.size(); };
    access.assign_defaults = [&items](std::size_t count) { items.assign(count, Item{}); };
    access.describe = [&items, describe_item](ConfigSchema& schema, std::size_t i) {
      describe_item(schema, items.at(i));
    };
    access.describe_default = [describe_item](ConfigSchema& schema) -> std::shared_ptr<void> {
      auto item = std::make_shared<Item>();
      describe_item(schema, *item);
      return item;
    };
    return add_items(std::move(key), std::move(access), std::move(doc));
  }

  ConfigField& add_choice(std::string key, ConfigChoice choice, std::string doc);
  ConfigField& add_items(std::string key, ConfigItems items, std::string doc);

  /// Runs after every load without problems; for values that follow from others. In an item of a list: after
  /// that item.
  void after_load(std::function<void()> action);

  /// Reads a YAML file, then overrides "key=value" in their order, the last one wins. The value is YAML.
  ///
  /// Throws  ConfigError with all problems, at most 20 of them in full; the variables then hold a mixture.
  void load_file(const std::string& path, const std::vector<std::string>& overrides = {});
  /// The same for text; `source` stands in messages for the path.
  void load_text(std::string_view text, const std::string& source,
                 const std::vector<std::string>& overrides = {});
  /// Overrides alone. A required key counts as missing in load_file() unless the overrides are given there.
  void apply_overrides(const std::vector<std::string>& overrides);

  /// What is wrong with the values that the variables hold now, for configurations filled in by a program.
  std::vector<std::string> problems() const;

  /// Where the present value of `key` comes from: "run.yaml:7:3", "--set", "default" or "set by the program".
  std::string origin(std::string_view key) const;

  /// The present values as YAML that loads back to the same values, with the origin of each as a comment.
  std::string to_yaml() const;

  /// A row for every key: name, default, what is allowed, meaning.
  std::string markdown_table() const;

  /// Every key; keys of list items as "list[].key".
  std::vector<std::string> keys() const;

 private:
  friend class ConfigReader;
  struct Origin {
    std::string text;
    std::string value;  // as it printed when it was read
  };
  using Origins = std::map<std::string, Origin, std::less<>>;
  using Visitor = std::function<void(const std::string& full_key, const ConfigField& field)>;

  ConfigField& add_value(std::string key, std::unique_ptr<ConfigValue> value, std::string doc,
                         std::string unit = {});
  const ConfigField* find(std::string_view key) const;
  bool is_section(std::string_view key) const;
  std::vector<std::string> names_in(std::string_view section) const;
  std::string meant_key(std::string_view unknown_key) const;
  static std::string origin_of(std::string_view full_key, const ConfigField& field, const Origins& origins);
  void visit(const std::string& base, bool default_items, const Visitor& visitor) const;
  void print(std::string& out, const Origins& origins, const std::string& base, const std::string& section,
             int indent) const;

  std::vector<std::unique_ptr<ConfigField>> fields_;
  std::vector<std::function<void()>> after_load_;
  Origins origins_;  // by full key, those of list items included
};

}  // namespace mxopt
