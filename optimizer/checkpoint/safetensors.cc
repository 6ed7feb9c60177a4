#include "mxopt/optimizer/checkpoint/safetensors.h"

#include <algorithm>
#include <array>
#include <bit>
#include <optional>
#include <set>
#include <tuple>
#include <utility>

#include "mxopt/optimizer/checkpoint/file_input.h"
#include "mxopt/optimizer/checkpoint/strict_json.h"
#include "mxopt/params/check.h"

namespace mxopt {

static_assert(std::endian::native == std::endian::little,
              "the format's numbers are read and written as they are");

namespace {

constexpr std::int64_t kLengthBytes = 8;
constexpr std::int64_t kDataAlignBytes = 64;
constexpr std::string_view kMetadata = "__metadata__";

std::optional<std::int64_t> product(std::span<const std::int64_t> factors) {
  std::int64_t result = 1;
  for (const std::int64_t factor : factors) {
    if (__builtin_mul_overflow(result, factor, &result)) return std::nullopt;
  }
  return result;
}

/// Bytes of `elems` elements; nothing if they overflow or do not fill whole bytes.
std::optional<std::int64_t> packed_bytes(std::int64_t elems, int bits) {
  std::int64_t all_bits = 0;
  if (__builtin_mul_overflow(elems, bits, &all_bits) || all_bits % 8 != 0) return std::nullopt;
  return all_bits / 8;
}

std::string shape_text(std::span<const std::int64_t> shape) {
  std::string text;
  for (const std::int64_t length : shape) text += (text.empty() ? "" : ",") + std::to_string(length);
  return "[" + text + "]";
}

SafetensorsEntry read_entry(const std::string& name, const JsonPlace& place) {
  constexpr std::array<std::string_view, 3> kKeys = {"dtype", "shape", "data_offsets"};
  place.only(kKeys);
  SafetensorsEntry entry;
  entry.name = name;
  entry.dtype = place.at("dtype").text();
  const int bits = safetensors_bits(entry.dtype);
  if (bits == 0) place.at("dtype").fail("a dtype of the format", place.at("dtype").found());
  for (const JsonPlace& length : place.at("shape").items()) {
    entry.shape.push_back(length.integer(0, INT64_MAX));
  }
  const JsonPlace offsets_place = place.at("data_offsets");
  const std::vector<JsonPlace> offsets = offsets_place.items();
  if (offsets.size() != 2) offsets_place.fail("2 offsets", std::to_string(offsets.size()));
  entry.begin_bytes = offsets[0].integer(0, INT64_MAX);
  entry.end_bytes = offsets[1].integer(0, INT64_MAX);
  if (entry.end_bytes < entry.begin_bytes) {
    offsets_place.fail("an end of at least the begin " + std::to_string(entry.begin_bytes),
                       std::to_string(entry.end_bytes));
  }
  const std::optional<std::int64_t> elems = product(entry.shape);
  const std::optional<std::int64_t> bytes = elems ? packed_bytes(*elems, bits) : std::nullopt;
  if (!bytes) {
    place.at("shape").fail("a shape with a 64-bit number of bits that fills whole bytes",
                           shape_text(entry.shape));
  }
  if (*bytes != entry.end_bytes - entry.begin_bytes) {
    offsets_place.fail(std::to_string(*bytes) + " bytes for " + entry.dtype + " " + shape_text(entry.shape),
                       std::to_string(entry.end_bytes - entry.begin_bytes));
  }
  entry.elems = *elems;
  return entry;
}

void check_no_holes(const std::string& file, const SafetensorsHeader& header, std::int64_t file_bytes) {
  std::int64_t end = 0;
  for (const SafetensorsEntry& entry : header.tensors) {
    if (entry.begin_bytes != end) {
      throw DataError(file + ": tensor `" + entry.name + "`: expected begin " + std::to_string(end) +
                      ", where the tensor before it ends, found " + std::to_string(entry.begin_bytes));
    }
    end = entry.end_bytes;
  }
  std::int64_t expected = 0;
  if (__builtin_add_overflow(end, header.data_begin_bytes, &expected) || expected != file_bytes) {
    const std::string last =
        header.tensors.empty() ? "the header" : "tensor `" + header.tensors.back().name + "`";
    throw DataError(file + ": ends with " + last + ": expected " + std::to_string(header.data_begin_bytes) +
                    " + " + std::to_string(end) + " bytes, found " + std::to_string(file_bytes));
  }
}

std::string read_header_text(const FileInput& file) {
  const std::string name = file.path().string();
  if (file.bytes() < kLengthBytes) {
    throw DataError(name + ": expected at least 8 bytes, found " + std::to_string(file.bytes()));
  }
  std::uint64_t length = 0;
  file.read(0, std::as_writable_bytes(std::span(&length, 1)));
  const std::int64_t most = std::min(file.bytes() - kLengthBytes, kMaxSafetensorsHeaderBytes);
  if (length > static_cast<std::uint64_t>(most)) {
    throw DataError(name + ": expected a header of at most " + std::to_string(most) + " bytes, found " +
                    std::to_string(length));
  }
  std::string text(static_cast<std::size_t>(length), '\0');
  file.read(kLengthBytes, std::as_writable_bytes(std::span(text)));
  if (text.empty() || text.front() != '{') throw DataError(name + ": the header does not begin with '{'");
  return text;
}

}  // namespace

int safetensors_bits(std::string_view dtype) {
  struct Dtype {
    std::string_view name;
    int bits = 0;
  };
  constexpr std::array<Dtype, 22> kDtypes = {{
      {"BOOL", 8},        {"F4", 4},      {"F6_E2M3", 6}, {"F6_E3M2", 6},     {"U8", 8},   {"I8", 8},
      {"F8_E5M2", 8},     {"F8_E4M3", 8}, {"F8_E8M0", 8}, {"F8_E4M3FNUZ", 8}, {"I16", 16}, {"U16", 16},
      {"F8_E5M2FNUZ", 8}, {"F16", 16},    {"BF16", 16},   {"I32", 32},        {"U32", 32}, {"F32", 32},
      {"C64", 64},        {"F64", 64},    {"I64", 64},    {"U64", 64},
  }};
  const auto* const found = std::find_if(kDtypes.begin(), kDtypes.end(),
                                         [&](const Dtype& candidate) { return candidate.name == dtype; });
  return found == kDtypes.end() ? 0 : found->bits;
}

SafetensorsHeader read_safetensors_header(const FileInput& file) {
  const std::string name = file.path().string();
  const std::string text = read_header_text(file);
  const JsonValue root = parse_json(text, name);
  SafetensorsHeader header;
  header.data_begin_bytes = kLengthBytes + static_cast<std::int64_t>(text.size());
  for (const auto& [key, place] : JsonPlace(root, name).entries()) {
    if (key != kMetadata) {
      header.tensors.push_back(read_entry(key, place));
      continue;
    }
    for (const auto& [metadata_key, value] : place.entries()) header.metadata[metadata_key] = value.text();
  }
  std::stable_sort(header.tensors.begin(), header.tensors.end(), [](const auto& a, const auto& b) {
    return std::tie(a.begin_bytes, a.end_bytes) < std::tie(b.begin_bytes, b.end_bytes);
  });
  check_no_holes(name, header, file.bytes());
  return header;
}

std::string make_safetensors_header(SafetensorsHeader& header) {
  std::sort(header.tensors.begin(), header.tensors.end(), [](const auto& a, const auto& b) {
    return std::pair(-safetensors_bits(a.dtype), std::string_view(a.name)) <
           std::pair(-safetensors_bits(b.dtype), std::string_view(b.name));
  });
  std::string json = "{";
  if (!header.metadata.empty()) {
    json += "\"__metadata__\":{";
    for (const auto& [key, value] : header.metadata) {
      json += (json.back() == '{' ? "" : ",") + json_text(key, "a metadata key") + ":" +
              json_text(value, "metadata " + key);
    }
    json += "}";
  }
  std::set<std::string_view> names;
  std::int64_t end = 0;
  for (SafetensorsEntry& entry : header.tensors) {
    const int bits = safetensors_bits(entry.dtype);
    MXOPT_CHECK(bits != 0, "tensor `" << entry.name << "`: unknown dtype '" << entry.dtype << "'");
    MXOPT_CHECK(entry.name != kMetadata, "the tensor name `" << kMetadata << "` is reserved");
    MXOPT_CHECK(names.insert(entry.name).second, "tensor `" << entry.name << "` is repeated");
    const bool is_positive =
        std::all_of(entry.shape.begin(), entry.shape.end(), [](std::int64_t length) { return length >= 0; });
    const std::optional<std::int64_t> elems = is_positive ? product(entry.shape) : std::nullopt;
    const std::optional<std::int64_t> bytes = elems ? packed_bytes(*elems, bits) : std::nullopt;
    entry.begin_bytes = end;
    MXOPT_CHECK(bytes && !__builtin_add_overflow(end, *bytes, &end),
                "tensor `" << entry.name << "`: the shape " << shape_text(entry.shape) << " is not possible");
    entry.elems = *elems;
    entry.end_bytes = end;
    json += (json.back() == '{' ? "" : ",") + json_text(entry.name, "a tensor's name") + ":{\"dtype\":\"" +
            entry.dtype + "\",\"shape\":" + shape_text(entry.shape) + ",\"data_offsets\":[" +
            std::to_string(entry.begin_bytes) + "," + std::to_string(end) + "]}";
  }
  json += "}";
  constexpr auto kAlign = static_cast<std::size_t>(kDataAlignBytes);
  const std::size_t used = kLengthBytes + json.size();
  json.append((kAlign - used % kAlign) % kAlign, ' ');
  MXOPT_CHECK(json.size() <= static_cast<std::size_t>(kMaxSafetensorsHeaderBytes),
              "a header of " << json.size() << " bytes; allowed are " << kMaxSafetensorsHeaderBytes);
  header.data_begin_bytes = kLengthBytes + static_cast<std::int64_t>(json.size());
  const auto length = std::bit_cast<std::array<char, kLengthBytes>>(std::uint64_t{json.size()});
  return std::string(length.data(), length.size()) + json;
}

SafetensorsFile::SafetensorsFile(const std::filesystem::path& path)
    : file_(std::make_unique<FileInput>(path)), header_(read_safetensors_header(*file_)) {
  for (std::size_t i = 0; i < header_.tensors.size(); ++i) index_[header_.tensors[i].name] = i;
}

SafetensorsFile::~SafetensorsFile() = default;
SafetensorsFile::SafetensorsFile(SafetensorsFile&&) noexcept = default;

const SafetensorsEntry& SafetensorsFile::find(std::string_view name) const {
  const auto found = index_.find(name);
  if (found == index_.end()) {
    throw DataError(file_->path().string() + ": expected tensor `" + std::string(name) +
                    "`, found none of that name");
  }
  return header_.tensors[found->second];
}

void SafetensorsFile::read(std::string_view name, std::int64_t begin, std::int64_t elems,
                           std::span<std::byte> out) const {
  const SafetensorsEntry& entry = find(name);
  if (begin < 0 || elems < 0 || begin > entry.elems || elems > entry.elems - begin) {
    throw DataError(file_->path().string() + ": tensor `" + entry.name + "`: expected elements from " +
                    std::to_string(begin) + " on, " + std::to_string(elems) + " of them, found " +
                    std::to_string(entry.elems) + " in all");
  }
  const int bits = safetensors_bits(entry.dtype);
  const std::optional<std::int64_t> skipped = packed_bytes(begin, bits);
  const std::optional<std::int64_t> wanted = packed_bytes(elems, bits);
  MXOPT_CHECK(skipped && wanted, "tensor `" << entry.name << "` of " << entry.dtype << ": elements " << begin
                                            << " + " << elems << " are no whole bytes");
  MXOPT_CHECK_EQ(static_cast<std::int64_t>(out.size()), *wanted);
  file_->read(header_.data_begin_bytes + entry.begin_bytes + *skipped, out);
}

void SafetensorsFile::read(std::string_view name, std::int64_t begin, std::span<float> out) const {
  const SafetensorsEntry& entry = find(name);
  if (entry.dtype != "F32") {
    throw DataError(file_->path().string() + ": tensor `" + entry.name + "`: expected dtype F32, found " +
                    entry.dtype);
  }
  read(name, begin, static_cast<std::int64_t>(out.size()), std::as_writable_bytes(out));
}

}  // namespace mxopt
