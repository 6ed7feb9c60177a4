#include "mxopt/optimizer/checkpoint/strict_json.h"

#include <algorithm>
#include <cmath>
#include <set>
#include <utility>

#include <nlohmann/json.hpp>

#include "mxopt/params/check.h"

namespace mxopt {

namespace {

using Kind = JsonValue::Kind;

/// Builds the tree while the parser walks; returns false to stop it.
class TreeBuilder : public nlohmann::json_sax<nlohmann::json> {
 public:
  JsonValue take_root() { return std::move(root_); }
  const std::string& problem() const { return problem_; }

  bool null() override { return add({}); }
  bool boolean(bool value) override {
    JsonValue node;
    node.kind = Kind::kBool;
    node.flag = value;
    return add(std::move(node));
  }
  bool number_integer(std::int64_t value) override {
    JsonValue node;
    node.kind = Kind::kNegative;
    node.negative = value;
    return add(std::move(node));
  }
  bool number_unsigned(std::uint64_t value) override {
    JsonValue node;
    node.kind = Kind::kUnsigned;
    node.whole = value;
    return add(std::move(node));
  }
  bool number_float(double value, const std::string& text) override {
    if (!std::isfinite(value)) return stop("the number " + text + " is too large");
    JsonValue node;
    node.kind = Kind::kFraction;
    node.fraction = value;
    return add(std::move(node));
  }
  bool string(std::string& value) override {
    JsonValue node;
    node.kind = Kind::kText;
    node.text = std::move(value);
    return add(std::move(node));
  }
  bool binary(nlohmann::json::binary_t& /*value*/) override { return stop("is no text"); }
  bool start_object(std::size_t /*elements*/) override { return open(Kind::kMap); }
  bool start_array(std::size_t /*elements*/) override { return open(Kind::kList); }
  bool end_object() override { return close(); }
  bool end_array() override { return close(); }

  bool key(std::string& value) override {
    if (!stack_.back().seen.insert(value).second) return stop("key `" + value + "` is repeated");
    stack_.back().key = std::move(value);
    return true;
  }

  bool parse_error(std::size_t /*byte*/, const std::string& /*token*/,
                   const nlohmann::detail::exception& error) override {
    return stop(std::string("not valid JSON: ") + error.what());
  }

 private:
  struct Frame {
    JsonValue node;
    std::string key;  // of the value that comes next
    std::set<std::string> seen;
  };

  bool stop(std::string problem) {
    problem_ = std::move(problem);
    return false;
  }

  bool open(Kind kind) {
    if (stack_.size() >= kMaxJsonDepth) {
      return stop("nested more than " + std::to_string(kMaxJsonDepth) + " levels deep");
    }
    Frame frame;
    frame.node.kind = kind;
    stack_.push_back(std::move(frame));
    return true;
  }

  bool close() {
    JsonValue node = std::move(stack_.back().node);
    stack_.pop_back();
    return add(std::move(node));
  }

  bool add(JsonValue node) {
    if (stack_.empty()) {
      root_ = std::move(node);
    } else {
      Frame& frame = stack_.back();
      if (frame.node.kind == Kind::kMap) frame.node.keys.push_back(std::move(frame.key));
      frame.node.items.push_back(std::move(node));
    }
    return true;
  }

  JsonValue root_;
  std::vector<Frame> stack_;
  std::string problem_;
};

std::string dump(const nlohmann::json& value, std::string_view what) {
  try {
    return value.dump();
  } catch (const nlohmann::json::type_error&) {
    throw ContractError(std::string(what) + " is not valid UTF-8; a checkpoint keeps only text");
  }
}

}  // namespace

JsonValue parse_json(std::string_view text, const std::string& file) {
  TreeBuilder builder;
  if (!nlohmann::json::sax_parse(text.begin(), text.end(), &builder)) {
    throw DataError(file + ": " + builder.problem());
  }
  return builder.take_root();
}

JsonPlace JsonPlace::at(std::string_view key) const {
  if (value_->kind != Kind::kMap) fail("a map", found());
  const auto place = std::find(value_->keys.begin(), value_->keys.end(), key);
  const std::string path = (key_.empty() ? "" : key_ + ".") + std::string(key);
  if (place == value_->keys.end()) throw DataError(file_ + ": key `" + path + "` is missing");
  return {value_->items[static_cast<std::size_t>(place - value_->keys.begin())], file_, path};
}

void JsonPlace::only(std::span<const std::string_view> keys) const {
  for (const auto& [key, place] : entries()) {
    if (std::find(keys.begin(), keys.end(), key) == keys.end()) {
      std::string allowed;
      for (const std::string_view name : keys) allowed += (allowed.empty() ? "" : ", ") + std::string(name);
      place.fail("one of the keys " + allowed, "the unknown key `" + key + "`");
    }
  }
}

std::vector<JsonPlace> JsonPlace::items() const {
  if (value_->kind != Kind::kList) fail("a list", found());
  std::vector<JsonPlace> places;
  places.reserve(value_->items.size());
  for (const JsonValue& item : value_->items) {
    places.emplace_back(item, file_, key_ + "[" + std::to_string(places.size()) + "]");
  }
  return places;
}

std::vector<std::pair<std::string, JsonPlace>> JsonPlace::entries() const {
  if (value_->kind != Kind::kMap) fail("a map", found());
  std::vector<std::pair<std::string, JsonPlace>> places;
  for (std::size_t i = 0; i < value_->items.size(); ++i) {
    const std::string& key = value_->keys[i];
    places.emplace_back(key, JsonPlace(value_->items[i], file_, (key_.empty() ? "" : key_ + ".") + key));
  }
  return places;
}

const std::string& JsonPlace::text() const {
  if (value_->kind != Kind::kText) fail("a text", found());
  return value_->text;
}

std::int64_t JsonPlace::integer(std::int64_t least, std::int64_t most) const {
  const bool fits_positive = value_->kind == Kind::kUnsigned && value_->whole <= std::uint64_t{INT64_MAX};
  const bool is_whole = fits_positive || value_->kind == Kind::kNegative;
  const std::int64_t value = fits_positive ? static_cast<std::int64_t>(value_->whole) : value_->negative;
  if (!is_whole || value < least || value > most) {
    fail("an integer from " + std::to_string(least) + " to " + std::to_string(most), found());
  }
  return value;
}

double JsonPlace::number() const {
  if (value_->kind == Kind::kUnsigned) return static_cast<double>(value_->whole);
  if (value_->kind == Kind::kNegative) return static_cast<double>(value_->negative);
  if (value_->kind != Kind::kFraction) fail("a number", found());
  return value_->fraction;
}

void JsonPlace::fail(const std::string& expected, const std::string& found) const {
  throw DataError(file_ + ": " + (key_.empty() ? "the document" : "key `" + key_ + "`") + ": expected " +
                  expected + ", found " + found);
}

std::string JsonPlace::found() const {
  constexpr std::size_t kMostChars = 80;
  switch (value_->kind) {
    case Kind::kNull:
      return "null";
    case Kind::kBool:
      return value_->flag ? "true" : "false";
    case Kind::kUnsigned:
      return std::to_string(value_->whole);
    case Kind::kNegative:
      return std::to_string(value_->negative);
    case Kind::kFraction:
      return json_number(value_->fraction, "a number");
    case Kind::kText:
      return "the text '" + value_->text.substr(0, kMostChars) + "'";
    case Kind::kList:
      return "a list";
    case Kind::kMap:
      return "a map";
  }
  return "?";
}

std::string json_text(std::string_view text, std::string_view what) {
  return dump(nlohmann::json(std::string(text)), what);
}

std::string json_number(double value, std::string_view what) {
  MXOPT_CHECK(std::isfinite(value), what << " is " << value << "; a finite number is needed");
  return dump(nlohmann::json(value), what);
}

}  // namespace mxopt
