// The registered name nearest to a misspelt one, for error messages.
#pragma once

#include <span>
#include <string_view>

namespace mxopt {

/// The candidate with the smallest edit distance to `name`; empty when none is closer than half the name's length.
std::string_view nearest_name(std::string_view name, std::span<const std::string_view> candidates);

}  // namespace mxopt
