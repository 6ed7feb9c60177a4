// JSON that is read strictly: no repeated keys, no surprise of types, every problem with file and key.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace mxopt {

/// Deeper nesting is refused.
inline constexpr std::size_t kMaxJsonDepth = 32;

struct JsonValue {
  enum class Kind { kNull, kBool, kUnsigned, kNegative, kFraction, kText, kList, kMap };

  Kind kind = Kind::kNull;
  bool flag = false;
  std::uint64_t whole = 0;    // kUnsigned
  std::int64_t negative = 0;  // kNegative
  double fraction = 0;        // kFraction
  std::string text;
  std::vector<JsonValue> items;   // of a list, or the values of a map, in the order of the text
  std::vector<std::string> keys;  // of a map: one for each item
};

/// Throws DataError that starts with `file`: invalid JSON or UTF-8, a repeated key, too deep.
JsonValue parse_json(std::string_view text, const std::string& file);

/// A value with the file and the key it stands at, for messages. Every function throws DataError if the value
/// is of another kind or out of range, naming file, key, what is expected and what was found.
class JsonPlace {
 public:
  JsonPlace(const JsonValue& value, std::string file, std::string key = {})
      : value_(&value), file_(std::move(file)), key_(std::move(key)) {}

  /// The member `key` of a map; it must be there.
  JsonPlace at(std::string_view key) const;
  /// Refuses members of a map that are not among `keys`.
  void only(std::span<const std::string_view> keys) const;
  std::vector<JsonPlace> items() const;
  /// Members of a map with their keys.
  std::vector<std::pair<std::string, JsonPlace>> entries() const;
  bool is_text() const { return value_->kind == JsonValue::Kind::kText; }
  const std::string& text() const;
  std::int64_t integer(std::int64_t least, std::int64_t most) const;
  double number() const;

  [[noreturn]] void fail(const std::string& expected, const std::string& found) const;
  std::string found() const;  // the value in a message

 private:
  const JsonValue* value_;
  std::string file_;
  std::string key_;
};

/// `text` in quotes, with escapes. Throws ContractError if it is not valid UTF-8; `what` says whose text it
/// is.
std::string json_text(std::string_view text, std::string_view what);
/// The shortest text that reads as the same bits. Throws ContractError if it is not finite.
std::string json_number(double value, std::string_view what);

}  // namespace mxopt
