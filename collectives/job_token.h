// Sixteen bytes that keep the jobs apart which use the same address.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

namespace mxopt {

/// Against accidents, not against attackers: it travels in plain text.
using JobToken = std::array<std::uint8_t, 16>;

/// 32 hexadecimal digits are the token itself; any other text, such as the number of a job, is hashed.
JobToken job_token(std::string_view job);

/// Takes the same time wherever they differ.
bool equal_tokens(const JobToken& a, const JobToken& b);

}  // namespace mxopt
