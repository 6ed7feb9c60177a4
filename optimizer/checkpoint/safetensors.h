// The safetensors file format: header, ranges of tensors, and headers of new files.
//
// A file is 8 bytes N (little-endian), N bytes of JSON, then the tensors' bytes without holes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace mxopt {

class FileInput;

/// A longer header is refused.
inline constexpr std::int64_t kMaxSafetensorsHeaderBytes = 100'000'000;

struct SafetensorsEntry {
  std::string name;
  std::string dtype;  // as the format names it: "F32", "BF16", "F8_E4M3", ...
  std::vector<std::int64_t> shape;
  std::int64_t elems = 0;
  std::int64_t begin_bytes = 0;  // in the data, not in the file
  std::int64_t end_bytes = 0;
};

struct SafetensorsHeader {
  std::vector<SafetensorsEntry> tensors;        // in the order of their bytes
  std::map<std::string, std::string> metadata;  // "__metadata__"
  std::int64_t data_begin_bytes = 0;            // in the file
};

/// Bits of an element, or 0 for a name that the format does not have.
int safetensors_bits(std::string_view dtype);

/// Reads the header and checks it against all rules of the format and against the size of the file. Throws
/// DataError that names file, tensor, expected and found.
SafetensorsHeader read_safetensors_header(const FileInput& file);

/// What stands before the data: length, JSON, spaces up to a multiple of 64 bytes.
///
/// header  in: name, dtype and shape of every tensor, and the metadata. Out: the tensors in the order in
/// which their
///         bytes have to follow (wide dtypes first, then by name), with all other fields filled in.
/// Throws ContractError for a repeated or reserved name, an unknown dtype, a negative or too large shape, or
/// text
///         that is not UTF-8.
std::string make_safetensors_header(SafetensorsHeader& header);

/// An existing file. Reads of one object may run at the same time.
class SafetensorsFile {
 public:
  /// Throws DataError, see read_safetensors_header().
  explicit SafetensorsFile(const std::filesystem::path& path);
  ~SafetensorsFile();
  SafetensorsFile(SafetensorsFile&&) noexcept;

  const SafetensorsHeader& header() const { return header_; }
  /// Throws DataError if there is no such tensor.
  const SafetensorsEntry& find(std::string_view name) const;
  /// The bytes of the elements from `begin` on, in the order of the flat tensor. Throws DataError naming file
  /// and tensor if they are not there; ContractError if the range does not begin and end with a byte.
  void read(std::string_view name, std::int64_t begin, std::int64_t elems, std::span<std::byte> out) const;
  /// The same of an F32 tensor; other dtypes are a DataError.
  void read(std::string_view name, std::int64_t begin, std::span<float> out) const;

 private:
  std::unique_ptr<FileInput> file_;
  SafetensorsHeader header_;
  std::map<std::string, std::size_t, std::less<>> index_;
};

}  // namespace mxopt
