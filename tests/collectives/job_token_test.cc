#include "mxopt/collectives/job_token.h"

#include <gtest/gtest.h>

namespace mxopt {
namespace {

TEST(JobToken, IsHexadecimalOrHashed) {
  const JobToken token = job_token("000102030405060708090a0B0c0D0e0F");
  for (std::size_t i = 0; i < token.size(); ++i) EXPECT_EQ(token[i], i);
  EXPECT_EQ(job_token("4711.0"), job_token("4711.0"));
  EXPECT_FALSE(equal_tokens(job_token("4711.0"), job_token("4711.1")));
  EXPECT_FALSE(equal_tokens(job_token(""), JobToken{}));
  EXPECT_TRUE(equal_tokens(token, token));
  for (std::size_t i = 0; i < token.size(); ++i) {
    JobToken other = token;
    other[i] ^= 0x80U;
    EXPECT_FALSE(equal_tokens(token, other)) << i;
  }
}

}  // namespace
}  // namespace mxopt
