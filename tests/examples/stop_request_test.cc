#include "train_gpt/stop_request.h"

#include <csignal>

#include <gtest/gtest.h>

namespace train_gpt {
namespace {

TEST(StopRequest, IsWhatTheSignalsAskForOnce) {
  note_signals();
  StopRequest request = take_stop_request();
  EXPECT_FALSE(request.save || request.stop);
  raise(SIGUSR1);
  request = take_stop_request();
  EXPECT_TRUE(request.save && !request.stop);
  raise(SIGTERM);
  request = take_stop_request();
  EXPECT_TRUE(request.stop && !request.save);
  request = take_stop_request();
  EXPECT_FALSE(request.save || request.stop);
}

}  // namespace
}  // namespace train_gpt
