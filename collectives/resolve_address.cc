#include "mxopt/collectives/resolve_address.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <system_error>
#include <thread>

#include <netdb.h>
#include <sys/socket.h>

namespace mxopt {

namespace {

/// Takes turns between the families, the first one first; each address once.
std::vector<std::string> in_turns(const addrinfo* list) {
  std::array<std::vector<std::string>, 2> of_family;
  for (const addrinfo* one = list; one != nullptr; one = one->ai_next) {
    std::array<char, NI_MAXHOST> number{};
    const bool is_first = one->ai_family == list->ai_family;
    if (getnameinfo(one->ai_addr, one->ai_addrlen, number.data(), number.size(), nullptr, 0,
                    NI_NUMERICHOST) != 0) {
      continue;
    }
    std::vector<std::string>& same = of_family[is_first ? 0 : 1];
    if (std::find(same.begin(), same.end(), number.data()) == same.end()) same.emplace_back(number.data());
  }
  std::vector<std::string> numbers;
  for (std::size_t i = 0; i < std::max(of_family[0].size(), of_family[1].size()); ++i) {
    for (const std::vector<std::string>& same : of_family) {
      if (i < same.size()) numbers.push_back(same[i]);
    }
  }
  return numbers;
}

ResolvedAddresses ask(const std::string& host, int flags) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = flags;
  addrinfo* list = nullptr;
  const int code = getaddrinfo(host.c_str(), nullptr, &hints, &list);
  const int system_code = errno;
  if (code != 0) {
    const std::string text =
        code == EAI_SYSTEM ? std::generic_category().message(system_code) : std::string(gai_strerror(code));
    return {.numbers = {},
            .problem = "'" + host + "' can not be resolved: " + text,
            .may_change = code == EAI_AGAIN || code == EAI_SYSTEM || code == EAI_NONAME};
  }
  const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> owner(list, &freeaddrinfo);
  ResolvedAddresses found{.numbers = in_turns(list)};
  if (found.numbers.empty()) found.problem = "'" + host + "' has no address";
  return found;
}

struct Answer {
  std::mutex mutex;
  std::condition_variable changed;
  std::optional<ResolvedAddresses> found;
};

}  // namespace

ResolvedAddresses resolve_address(const std::string& host, const Deadline& deadline) {
  ResolvedAddresses number = ask(host, AI_NUMERICHOST);
  if (!number.numbers.empty()) return number;

  const auto answer = std::make_shared<Answer>();
  std::thread([answer, host] {
    ResolvedAddresses found = ask(host, 0);
    const std::lock_guard lock(answer->mutex);
    answer->found = std::move(found);
    answer->changed.notify_all();
  }).detach();
  std::unique_lock lock(answer->mutex);
  answer->changed.wait_until(lock, deadline.end(), [&] { return answer->found.has_value(); });
  if (answer->found.has_value()) return *answer->found;
  return {.numbers = {}, .problem = "'" + host + "' was not resolved in time", .may_change = true};
}

}  // namespace mxopt
