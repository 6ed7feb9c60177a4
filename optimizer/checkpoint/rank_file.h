// One writer's safetensors file of a checkpoint.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>

#include "mxopt/optimizer/checkpoint/checkpoint_contents.h"
#include "mxopt/optimizer/checkpoint/file_output.h"
#include "mxopt/optimizer/checkpoint/manifest.h"

namespace mxopt {

class SafetensorsFile;

/// "section/param/kind/begin": differs for all slices, since section names have no '/'.
std::string slice_tensor_name(const CheckpointSlice& slice);

/// Writes the slices of `contents` into `folder` and brings them to the disk. The memory that it needs does
/// not grow with the slices. Slices without elements are left out.
///
/// job_part  step, attempt and writers of the save.
/// Returns   job_part with the slices and the file of this writer.
/// Throws    FileError; ContractError naming the param, before the file is created, if a slice does not fit
/// the tables
///           of `contents` or is given twice.
Manifest write_rank_file(const std::filesystem::path& folder, const Manifest& job_part, int writer,
                         const CheckpointContents& contents, FileHook* hook);

/// Checks that a rank's file is of the save that `manifest` is of, and that it has the tensors that are
/// listed, and no other. Throws DataError naming file, tensor, expected and found.
void check_rank_file(const SafetensorsFile& file, const Manifest& manifest,
                     const std::filesystem::path& path);

/// Compares the checksums. Reads the file once, in parts of bounded size. Throws DataError naming file,
/// piece, expected and found.
void check_checksums(const ManifestFile& listed, const std::filesystem::path& folder);

}  // namespace mxopt
