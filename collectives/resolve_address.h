// Numbers of a machine's addresses, of both families, within a deadline.
#pragma once

#include <string>
#include <vector>

#include "mxopt/collectives/deadline.h"

namespace mxopt {

struct ResolvedAddresses {
  std::vector<std::string> numbers;  // "10.0.0.1", "fe80::1%eth0"; the families take turns
  std::string problem = {};          // why there is none, in plain words
  bool may_change = false;           // whether a later try can find some
};

/// `host` is a number, or a name that the system's resolver is asked for. The resolver knows no deadline: it
/// is asked on a thread that is left to itself when the deadline passes.
ResolvedAddresses resolve_address(const std::string& host, const Deadline& deadline);

}  // namespace mxopt
