// The suite that defines "is a communicator".
#pragma once

#include <functional>
#include <ostream>
#include <string>
#include <vector>

#include "mxopt/collectives/communicator.h"

namespace mxopt::test {

/// One property of every communicator. `check` is called on every rank of a group, each with its own
/// communicator.
struct ConformanceCase {
  std::string name;
  std::function<void(Communicator&)> check;

  friend std::ostream& operator<<(std::ostream& out, const ConformanceCase& tested) {
    return out << tested.name;
  }
};

/// All of them. A transport joins with a test that is parameterised by them.
const std::vector<ConformanceCase>& communicator_conformance();

}  // namespace mxopt::test
