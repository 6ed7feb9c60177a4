// The five error types of the project, and the checks that throw ContractError.
//
// Every message is complete by itself: it names the thing, its value, and what is allowed. Checks stay on in
// release builds; they run once per call, never once per element.
#pragma once

#include <cstdint>
#include <source_location>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>

namespace mxopt {

/// The user's YAML or configuration struct is wrong: file, line, key, given value, allowed values.
class ConfigError : public std::invalid_argument {
 public:
  using std::invalid_argument::invalid_argument;
};

/// The caller broke a documented precondition: what was expected and both values.
class ContractError : public std::logic_error {
 public:
  using std::logic_error::logic_error;
};

/// A CUDA, NCCL or MPI call failed: API name, code, library's text, rank.
class BackendError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// What is known about a rank that is late, dead or out of step.
struct PeerFailure {
  std::string operation;      // for example "all_reduce(max, uint8 x 4096, scales)"
  std::int64_t sequence = 0;  // number of the call on this communicator, from 0
  double elapsed_ms = 0;      // since the call was issued
  int rank = -1;              // the rank that reports
  int culprit_rank = -1;      // -1: not known
  std::string host;           // of the culprit where known, else of the reporter
  std::int64_t pid = 0;       // likewise
  std::string reason;         // plain words
};

/// A rank is late, dead or out of step.
class PeerError : public std::runtime_error {
 public:
  explicit PeerError(PeerFailure failure);
  const PeerFailure& failure() const { return failure_; }

 private:
  PeerFailure failure_;
};

/// A file's content is corrupt or does not fit: file, entry, expected, found.
class DataError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// Throws ContractError with the failed expression, the message and the place.
[[noreturn]] void fail_check(std::string_view expression, const std::string& message,
                             std::source_location where = std::source_location::current());

/// Text of two compared values, for MXOPT_CHECK_EQ and its kin.
template <class A, class B>
std::string both_values(const A& a, const B& b) {
  std::ostringstream text;
  text << a << " against " << b;
  return text.str();
}

}  // namespace mxopt

/// MXOPT_CHECK(condition, "text " << value): throws ContractError when the condition is false.
#define MXOPT_CHECK(condition, message)                  \
  do {                                                   \
    if (!(condition)) [[unlikely]] {                     \
      std::ostringstream mxopt_text;                     \
      mxopt_text << message;                             \
      ::mxopt::fail_check(#condition, mxopt_text.str()); \
    }                                                    \
  } while (false)

#define MXOPT_CHECK_OP(a, op, b)                                                      \
  do {                                                                                \
    const auto& mxopt_a = (a);                                                        \
    const auto& mxopt_b = (b);                                                        \
    if (!(mxopt_a op mxopt_b)) [[unlikely]] {                                         \
      ::mxopt::fail_check(#a " " #op " " #b, ::mxopt::both_values(mxopt_a, mxopt_b)); \
    }                                                                                 \
  } while (false)

#define MXOPT_CHECK_EQ(a, b) MXOPT_CHECK_OP(a, ==, b)
#define MXOPT_CHECK_LE(a, b) MXOPT_CHECK_OP(a, <=, b)
#define MXOPT_CHECK_LT(a, b) MXOPT_CHECK_OP(a, <, b)
#define MXOPT_CHECK_GE(a, b) MXOPT_CHECK_OP(a, >=, b)
#define MXOPT_CHECK_GT(a, b) MXOPT_CHECK_OP(a, >, b)
