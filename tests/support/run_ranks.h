// N ranks as N threads of this process.
#pragma once

#include <exception>
#include <functional>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "mxopt/collectives/communicator.h"
#include "mxopt/collectives/thread_communicator.h"

namespace mxopt::test {

/// Runs body(communicator) on `size` threads and waits for all of them. The first rank that throws ends the
/// others' waits, and its exception is the one that is thrown here. A rank that returns leaves the group.
/// Every wait has the deadline `timeout_s`.
inline void run_ranks(int size, const std::function<void(Communicator&)>& body, double timeout_s = 30) {
  std::mutex mutex;
  std::exception_ptr first_error;
  std::vector<std::thread> threads;
  for (auto& made : ThreadCommunicator::make_group(size, timeout_s)) {
    threads.emplace_back([&, communicator = std::move(made)]() mutable {
      try {
        body(*communicator);
      } catch (const std::exception& error) {
        {
          const std::lock_guard lock(mutex);
          if (first_error == nullptr) first_error = std::current_exception();
        }
        communicator->abort(error.what());
      }
      communicator.reset();
    });
  }
  for (std::thread& thread : threads) thread.join();
  if (first_error != nullptr) std::rethrow_exception(first_error);
}

}  // namespace mxopt::test
