#include "mxopt/optimizer/checkpoint/rank_file.h"

#include <algorithm>
#include <cstddef>
#include <set>
#include <span>
#include <utility>
#include <vector>

#include "mxopt/optimizer/checkpoint/crc32c.h"
#include "mxopt/optimizer/checkpoint/file_input.h"
#include "mxopt/optimizer/checkpoint/safetensors.h"
#include "mxopt/params/check.h"

namespace mxopt {

namespace {

/// Small enough to be in the cache for the checksum and for the write.
constexpr std::int64_t kPartBytes = std::int64_t{1} << 20;

std::int64_t elems_of(const CheckpointSlice& slice) {
  return static_cast<std::int64_t>(slice.values.size());
}

/// Checks what this writer can know; sections of other writers are checked when all parts are together.
class SliceCheck {
 public:
  explicit SliceCheck(const CheckpointContents& contents) {
    for (const CheckpointSection& section : contents.sections) {
      sections_.insert(section.name);
      for (const CheckpointParam& param : section.params) {
        elems_[{section.name, param.name}] = shape_elems(param.shape, param.name);
      }
    }
  }

  /// Throws ContractError.
  void check(const CheckpointSlice& slice) const {
    const std::string where =
        "slice of param `" + slice.param + "`, " + std::string(state_kind_name(slice.kind));
    MXOPT_CHECK(slice.begin >= 0, where << ": begins with element " << slice.begin);
    if (!sections_.contains(slice.section)) return;
    const auto param = elems_.find({slice.section, slice.param});
    MXOPT_CHECK(param != elems_.end(), where << ": section `" << slice.section << "` has no such param");
    const std::int64_t elems = param->second;
    MXOPT_CHECK(slice.begin <= elems && elems_of(slice) <= elems - slice.begin,
                where << ": has elements from " << slice.begin << " on, " << elems_of(slice)
                      << " of them; the param has " << elems);
  }

 private:
  std::set<std::string_view> sections_;
  std::map<std::pair<std::string_view, std::string_view>, std::int64_t> elems_;
};

/// Writes to a file and takes the checksum of every piece.
class ChecksummedOutput {
 public:
  ChecksummedOutput(const std::filesystem::path& path, FileHook* hook) : file_(path, hook) {}

  void write(std::span<const std::byte> bytes) {
    while (!bytes.empty()) {
      if (bytes_ % kChecksumPieceBytes == 0) crcs_.push_back(0);
      const std::int64_t room = kChecksumPieceBytes - bytes_ % kChecksumPieceBytes;
      const auto part =
          static_cast<std::size_t>(std::min({kPartBytes, room, static_cast<std::int64_t>(bytes.size())}));
      crcs_.back() = crc32c(bytes.first(part), crcs_.back());
      file_.write(bytes.first(part));
      bytes_ += static_cast<std::int64_t>(part);
      bytes = bytes.subspan(part);
    }
  }

  ManifestFile close(std::string name) {
    file_.close();
    return {std::move(name), bytes_, std::move(crcs_)};
  }

 private:
  FileOutput file_;
  std::int64_t bytes_ = 0;
  std::vector<std::uint32_t> crcs_;
};

std::map<std::string, std::string> rank_metadata(const Manifest& manifest, const std::string& file) {
  return {{"format", "mxopt checkpoint"},
          {"step", std::to_string(manifest.step)},
          {"attempt", manifest.attempt},
          {"file", file}};
}

[[noreturn]] void refuse(const std::filesystem::path& path, const std::string& what,
                         const std::string& expected, const std::string& found) {
  throw DataError(path.string() + ": " + what + ": expected " + expected + ", found " + found);
}

}  // namespace

std::string slice_tensor_name(const CheckpointSlice& slice) {
  return slice.section + "/" + slice.param + "/" + std::string(state_kind_name(slice.kind)) + "/" +
         std::to_string(slice.begin);
}

Manifest write_rank_file(const std::filesystem::path& folder, const Manifest& job_part, int writer,
                         const CheckpointContents& contents, FileHook* hook) {
  Manifest part = job_part;
  const std::string name = rank_file_name(writer, part.writers);
  const SliceCheck checks(contents);
  SafetensorsHeader header;
  header.metadata = rank_metadata(part, name);
  std::map<std::string, const CheckpointSlice*> slices;  // by tensor
  for (const CheckpointSlice& slice : contents.slices) {
    checks.check(slice);
    if (slice.values.empty()) continue;
    SafetensorsEntry entry;
    entry.name = slice_tensor_name(slice);
    entry.dtype = "F32";
    entry.shape = {elems_of(slice)};
    slices[entry.name] = &slice;
    part.slices.push_back(
        {slice.section, slice.param, slice.kind, slice.begin, elems_of(slice), name, entry.name});
    header.tensors.push_back(std::move(entry));
  }
  const std::string head = make_safetensors_header(header);

  ChecksummedOutput file(folder / name, hook);
  file.write(std::as_bytes(std::span(head)));
  for (const SafetensorsEntry& entry : header.tensors)
    file.write(std::as_bytes(slices.at(entry.name)->values));
  part.files.push_back(file.close(name));
  return part;
}

void check_rank_file(const SafetensorsFile& file, const Manifest& manifest,
                     const std::filesystem::path& path) {
  const std::string name = path.filename().string();
  for (const auto& [key, value] : rank_metadata(manifest, name)) {
    const auto found = file.header().metadata.find(key);
    if (found == file.header().metadata.end() || found->second != value) {
      refuse(path, "metadata `" + key + "`, which says what save the file is of", "`" + value + "`",
             found == file.header().metadata.end() ? "none" : "`" + found->second + "`");
    }
  }
  std::set<std::string_view> listed;
  for (const ManifestSlice& slice : manifest.slices) {
    if (slice.file != name) continue;
    listed.insert(slice.tensor);
    const SafetensorsEntry& entry = file.find(slice.tensor);
    if (entry.dtype != "F32" || entry.elems != slice.elems) {
      refuse(path, "tensor `" + slice.tensor + "`", "F32 with " + std::to_string(slice.elems) + " elements",
             entry.dtype + " with " + std::to_string(entry.elems));
    }
  }
  for (const SafetensorsEntry& entry : file.header().tensors) {
    if (!listed.contains(entry.name))
      refuse(path, "tensor `" + entry.name + "`", "a listed tensor", "another");
  }
}

void check_checksums(const ManifestFile& listed, const std::filesystem::path& folder) {
  const FileInput file(folder / listed.name);
  std::vector<std::byte> part(static_cast<std::size_t>(std::min(kPartBytes, listed.bytes)));
  for (std::size_t piece = 0; piece < listed.crcs.size(); ++piece) {
    std::int64_t at = static_cast<std::int64_t>(piece) * kChecksumPieceBytes;
    const std::int64_t end = std::min(at + kChecksumPieceBytes, listed.bytes);
    std::uint32_t crc = 0;
    while (at < end) {
      const auto bytes = static_cast<std::size_t>(std::min(kPartBytes, end - at));
      file.read(at, std::span(part).first(bytes));
      crc = crc32c(std::span(part).first(bytes), crc);
      at += static_cast<std::int64_t>(bytes);
    }
    if (crc != listed.crcs[piece]) {
      refuse(file.path(),
             "checksum of the bytes from " +
                 std::to_string(static_cast<std::int64_t>(piece) * kChecksumPieceBytes) + " to " +
                 std::to_string(end),
             std::to_string(listed.crcs[piece]), std::to_string(crc));
    }
  }
}

}  // namespace mxopt
