// The text of the exception that a call throws, for tests of messages.
#pragma once

#include <exception>
#include <string>

#include <gtest/gtest.h>

namespace mxopt::test {

/// The message of the `Error` that `call` throws; a failure of the test when it throws none or another type.
template <class Error, class Call>
std::string thrown_message(Call&& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  } catch (const std::exception& error) {
    ADD_FAILURE() << "another exception type was thrown: " << error.what();
    return {};
  }
  ADD_FAILURE() << "nothing was thrown";
  return {};
}

/// Whether `text` contains `part`, for EXPECT_TRUE with both texts on failure.
inline ::testing::AssertionResult contains(const std::string& text, const std::string& part) {
  if (text.find(part) != std::string::npos) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << "'" << part << "' is not in:\n" << text;
}

}  // namespace mxopt::test
