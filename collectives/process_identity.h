// Host name and process id, as PeerError reports them.
#pragma once

#include <array>
#include <cstdint>
#include <string>

#include <unistd.h>

namespace mxopt {

inline std::string host_name() {
  std::array<char, 256> name{};
  return gethostname(name.data(), name.size() - 1) == 0 ? std::string(name.data()) : std::string("unknown");
}

inline std::int64_t process_id() {
  return getpid();
}

}  // namespace mxopt
