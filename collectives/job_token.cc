#include "mxopt/collectives/job_token.h"

#include <algorithm>

namespace mxopt {

namespace {

int hex_value(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  if (c >= 'A' && c <= 'F') return c - 'A' + 10;
  return -1;
}

/// 64-bit FNV-1a with `seed` as an extra first byte.
std::uint64_t hash_of(std::string_view text, std::uint8_t seed) {
  constexpr std::uint64_t kPrime = 1099511628211U;
  std::uint64_t hash = (14695981039346656037U ^ seed) * kPrime;
  for (const char c : text) hash = (hash ^ static_cast<std::uint8_t>(c)) * kPrime;
  return hash;
}

}  // namespace

JobToken job_token(std::string_view job) {
  JobToken token{};
  const bool is_hex = job.size() == 2 * token.size() &&
                      std::all_of(job.begin(), job.end(), [](char c) { return hex_value(c) >= 0; });
  for (std::size_t i = 0; i < token.size(); ++i) {
    if (is_hex) {
      token[i] = static_cast<std::uint8_t>(hex_value(job[2 * i]) * 16 + hex_value(job[2 * i + 1]));
    } else {
      const std::uint64_t half = hash_of(job, i < 8 ? 1 : 2);
      token[i] = static_cast<std::uint8_t>((half >> (8 * (i % 8))) & 0xFFU);
    }
  }
  return token;
}

bool equal_tokens(const JobToken& a, const JobToken& b) {
  volatile std::uint8_t difference = 0;  // so that the loop does not end early
  for (std::size_t i = 0; i < a.size(); ++i) {
    difference = static_cast<std::uint8_t>(difference | (a[i] ^ b[i]));
  }
  return difference == 0;
}

}  // namespace mxopt
