// CRC32C (Castagnoli) of bytes, as iSCSI and ext4 use it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace mxopt {

/// The CRC32C of `bytes`, or, with the result for the bytes before them, of both together. Of no bytes it is
/// 0. Uses the instruction of the CPU where it has one.
std::uint32_t crc32c(std::span<const std::byte> bytes, std::uint32_t before = 0);

/// The same from a table, on every CPU.
std::uint32_t crc32c_table(std::span<const std::byte> bytes, std::uint32_t before = 0);

}  // namespace mxopt
