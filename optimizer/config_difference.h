// What two configurations differ in.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace mxopt {

/// A line for every key whose values differ, or that only one of the two YAML texts has: "optimizer.lr:
/// 0.001, now 0.002". A text that is no valid YAML has no keys.
std::vector<std::string> config_differences(std::string_view before, std::string_view now);

}  // namespace mxopt
