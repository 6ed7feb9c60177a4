#include "train_gpt/stop_request.h"

#include <atomic>
#include <csignal>

namespace train_gpt {
namespace {

std::atomic<bool> asked_to_save = false;
std::atomic<bool> asked_to_stop = false;
static_assert(std::atomic<bool>::is_always_lock_free);  // a handler may use nothing else

void note(int signal) {
  (signal == SIGTERM ? asked_to_stop : asked_to_save).store(true);
}

}  // namespace

void note_signals() {
  struct sigaction action = {};
  action.sa_handler = note;
  action.sa_flags = SA_RESTART;
  for (const int signal : {SIGTERM, SIGUSR1}) sigaction(signal, &action, nullptr);
}

StopRequest take_stop_request() {
  return {asked_to_save.exchange(false), asked_to_stop.exchange(false)};
}

}  // namespace train_gpt
