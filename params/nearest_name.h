// The registered name nearest to a misspelt one, for error messages.
#pragma once

#include <span>
#include <string_view>

namespace mxopt {

/// The first of the candidates with the smallest edit distance to `name`; empty when even that one is further
/// away than half the name's length (and than one edit).
std::string_view nearest_name(std::string_view name, std::span<const std::string_view> candidates);

}  // namespace mxopt
