// Which owned elements have been given an initial value.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

namespace mxopt {

/// A set of disjoint ranges of one param, kept merged and sorted.
class InitialCoverage {
 public:
  void add(std::int64_t begin, std::int64_t end) {
    if (begin >= end) return;
    const auto touches = [&](const std::pair<std::int64_t, std::int64_t>& r) {
      return r.first <= end && begin <= r.second;
    };
    for (const auto& range : ranges_) {
      if (!touches(range)) continue;
      begin = std::min(begin, range.first);
      end = std::max(end, range.second);
    }
    std::erase_if(ranges_, touches);
    ranges_.insert(std::ranges::lower_bound(ranges_, std::pair(begin, end)), {begin, end});
  }

  bool covers(std::int64_t begin, std::int64_t end) const {
    return begin >= end ||
           std::ranges::any_of(ranges_, [&](const auto& r) { return r.first <= begin && end <= r.second; });
  }

 private:
  std::vector<std::pair<std::int64_t, std::int64_t>> ranges_;
};

}  // namespace mxopt
