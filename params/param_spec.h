// What the trainer declares about one parameter.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace mxopt {

enum class ParamFormat { kMxfp8, kBf16, kFp32 };
/// Which planes an MXFP8 param stores. kColumn exists in the batch call of quant/, not as a trainer's
/// storage.
enum class Storage { kRow, kBoth, kColumn };
enum class Plane { kRow, kColumn };
/// What becomes of an MXFP8 request whose matrix view does not fit 32x32 blocks.
enum class Fallback { kBf16, kError };
/// kAccumulate: the library zeroes the gradient after its reduction. kOverwrite: the trainer writes it whole.
enum class GradMode { kAccumulate, kOverwrite };

constexpr std::string_view format_name(ParamFormat format) {
  switch (format) {
    case ParamFormat::kMxfp8:
      return "mxfp8";
    case ParamFormat::kBf16:
      return "bf16";
    case ParamFormat::kFp32:
      return "fp32";
  }
  return "?";
}

constexpr std::string_view storage_name(Storage storage) {
  switch (storage) {
    case Storage::kRow:
      return "row";
    case Storage::kBoth:
      return "both";
    case Storage::kColumn:
      return "column";
  }
  return "?";
}

constexpr std::string_view plane_name(Plane plane) {
  return plane == Plane::kRow ? "row" : "column";
}

/// One parameter. Its name is its identity; the registration order is the same on all ranks.
struct ParamSpec {
  std::string name;
  std::vector<std::int64_t> shape;  // rank >= 1; matrix view: rows = product of leading dims, cols = last dim
  std::optional<ParamFormat> format;  // unset: precision.weights of the configuration
  std::optional<Storage> storage;     // unset: precision.storage of the configuration
  std::optional<Fallback> fallback;   // unset: precision.fallback of the configuration
  GradMode grad_mode = GradMode::kAccumulate;
  std::string tied_to;  // name of the param whose storage this one shares; empty: its own storage
  bool frozen = false;  // planes and master, but no gradient, no moments and no update
  // Model-parallel ranks hold copies of one param with equal gradients under this key, whatever its names: in
  // norms and counts it is there once. Empty: no copies.
  std::string duplicate_key = {};
};

}  // namespace mxopt
