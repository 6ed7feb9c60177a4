// Signals that ask a run for a checkpoint: SIGUSR1 to save and go on, SIGTERM to save and stop.
#pragma once

namespace train_gpt {

/// What this process was asked for since the last look.
struct StopRequest {
  bool save = false;
  bool stop = false;
};

/// From now on the signals are noted, and do nothing else.
void note_signals();
/// Forgets what it returns.
StopRequest take_stop_request();

}  // namespace train_gpt
