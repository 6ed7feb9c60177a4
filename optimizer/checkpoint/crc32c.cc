#include "mxopt/optimizer/checkpoint/crc32c.h"

#include <array>
#include <cstring>

namespace mxopt {

namespace {

constexpr std::uint32_t kPolynomial = 0x82F63B78;  // 0x1EDC6F41 with its bits reversed

constexpr std::array<std::uint32_t, 256> make_table() {
  std::array<std::uint32_t, 256> table{};
  for (std::uint32_t i = 0; i < 256; ++i) {
    std::uint32_t value = i;
    for (int bit = 0; bit < 8; ++bit) value = (value >> 1U) ^ ((value & 1U) != 0 ? kPolynomial : 0U);
    table[i] = value;
  }
  return table;
}

constexpr std::array<std::uint32_t, 256> kTable = make_table();

#if defined(__x86_64__)
__attribute__((target("sse4.2"))) std::uint32_t crc32c_instruction(std::span<const std::byte> bytes,
                                                                   std::uint32_t before) {
  std::uint64_t state = ~before;
  std::size_t at = 0;
  for (; at + 8 <= bytes.size(); at += 8) {
    std::uint64_t word = 0;
    std::memcpy(&word, bytes.data() + at, 8);
    state = __builtin_ia32_crc32di(state, word);
  }
  auto last = static_cast<std::uint32_t>(state);
  for (; at < bytes.size(); ++at) {
    last = __builtin_ia32_crc32qi(last, std::to_integer<unsigned char>(bytes[at]));
  }
  return ~last;
}

bool has_instruction() {
  static const bool has = __builtin_cpu_supports("sse4.2") != 0;
  return has;
}
#endif

}  // namespace

std::uint32_t crc32c_table(std::span<const std::byte> bytes, std::uint32_t before) {
  std::uint32_t state = ~before;
  for (const std::byte byte : bytes) {
    state = (state >> 8U) ^ kTable[(state ^ std::to_integer<std::uint32_t>(byte)) & 0xFFU];
  }
  return ~state;
}

std::uint32_t crc32c(std::span<const std::byte> bytes, std::uint32_t before) {
#if defined(__x86_64__)
  if (has_instruction()) return crc32c_instruction(bytes, before);
#endif
  return crc32c_table(bytes, before);
}

}  // namespace mxopt
