// The devices that tests run on: the host, and CUDA where it is built in and a device is there.
#pragma once

#include <string>
#include <vector>

#include "mxopt/params/check.h"
#include "mxopt/params/memory.h"

namespace mxopt::test {

/// Empty when memory of this device can be had, else the library's own reason.
inline std::string why_not_usable(Device device) {
  try {
    default_allocator(device);
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "";
}

inline bool has_backend(DeviceKind kind) {
  return why_not_usable({kind, 0}).find("this build has no CUDA backend") == std::string::npos;
}

/// For parameterised tests: those on a device that is built in but not there are skipped, with the reason, by
/// MXOPT_SKIP_WITHOUT().
inline std::vector<DeviceKind> built_device_kinds() {
  std::vector<DeviceKind> kinds{DeviceKind::kHost};
  if (has_backend(DeviceKind::kCuda)) kinds.push_back(DeviceKind::kCuda);
  return kinds;
}

inline std::string device_kind_name(DeviceKind kind) {
  return kind == DeviceKind::kHost ? "Host" : "Cuda";
}

}  // namespace mxopt::test

/// In a test or its SetUp(): skips it when the device can not be used here.
#define MXOPT_SKIP_WITHOUT(device)                                          \
  do {                                                                      \
    const std::string mxopt_reason = ::mxopt::test::why_not_usable(device); \
    if (!mxopt_reason.empty()) GTEST_SKIP() << mxopt_reason;                \
  } while (false)
