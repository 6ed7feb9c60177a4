#include "mxopt/params/check.h"

#include <utility>

namespace mxopt {

namespace {

std::string describe(const PeerFailure& f) {
  std::ostringstream text;
  text << f.operation << " #" << f.sequence << " on rank " << f.rank << " failed after " << f.elapsed_ms
       << " ms: " << f.reason;
  if (f.culprit_rank >= 0) text << "; culprit rank " << f.culprit_rank;
  if (!f.host.empty()) text << " (host " << f.host << ", pid " << f.pid << ")";
  return text.str();
}

}  // namespace

PeerError::PeerError(PeerFailure failure)
    : std::runtime_error(describe(failure)), failure_(std::move(failure)) {}

void fail_check(std::string_view expression, const std::string& message, std::source_location where) {
  std::ostringstream text;
  text << message << " [" << expression << " is false, " << where.function_name() << ":" << where.line()
       << "]";
  throw ContractError(text.str());
}

}  // namespace mxopt
