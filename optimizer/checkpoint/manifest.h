// The table of contents of a checkpoint, and its text in manifest.json.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "mxopt/optimizer/checkpoint/checkpoint_contents.h"

namespace mxopt {

inline constexpr std::int64_t kCheckpointFormat = 1;
/// Bytes of a file that have a checksum of their own.
inline constexpr std::int64_t kChecksumPieceBytes = std::int64_t{64} << 20;

struct ManifestSlice {
  std::string section;
  std::string param;
  StateKind kind = StateKind::kMaster;
  std::int64_t begin = 0;
  std::int64_t elems = 0;
  std::string file;
  std::string tensor;  // name in the file
};

struct ManifestFile {
  std::string name;
  std::int64_t bytes = 0;
  std::vector<std::uint32_t> crcs;  // CRC32C of every kChecksumPieceBytes, the last piece may be shorter
};

struct Manifest {
  std::string library_version;
  std::int64_t step = 0;
  std::string attempt;  // the save that wrote it
  int writers = 0;
  std::vector<CheckpointSection> sections;
  std::vector<ManifestSlice> slices;
  std::vector<ManifestFile> files;
  std::string config;
  std::map<std::string, std::string> user;

  /// Null where there is none.
  const CheckpointSection* find_section(std::string_view name) const;
};

/// Number of elements of a shape. Throws ContractError naming `name` if a length is negative or the product
/// too large.
std::int64_t shape_elems(const std::vector<std::int64_t>& shape, std::string_view name);

/// Whether two sections have the same bits. The texts of both, as they stand in the manifest, are equal then.
bool equal_sections(const CheckpointSection& a, const CheckpointSection& b);

/// The JSON text; its last line is a checksum of what stands before. Throws ContractError for text that is
/// not UTF-8.
std::string manifest_text(const Manifest& manifest);

/// Reads what manifest_text() wrote. Throws DataError naming `file`, the key, what is expected and what was
/// found.
Manifest parse_manifest(std::string_view text, const std::string& file);

/// Checks that sections, params and files are named once, that every slice is within a param and a listed
/// file, and that the slices of every state cover it exactly once. Throws DataError starting with `file`.
void check_manifest(const Manifest& manifest, const std::string& file);

/// Reads and checks manifest.json of a checkpoint's folder. Throws DataError.
Manifest read_manifest(const std::filesystem::path& folder);

/// "step-00001000".
std::string step_folder_name(std::int64_t step);
/// The step in such a name, or -1 for any other name.
std::int64_t step_of_folder_name(std::string_view name);
/// "rank-00000-of-00008.safetensors".
std::string rank_file_name(int writer, int writers);

/// Checks that `files` (name and size) lie in `folder`. Throws DataError naming file, expected and found
/// bytes.
void check_file_sizes(const Manifest& manifest, const std::filesystem::path& folder);

}  // namespace mxopt
