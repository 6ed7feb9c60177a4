// Do all ranks hold the same text? Used before anything depends on it.
#pragma once

#include <exception>
#include <span>
#include <string>

#include "mxopt/collectives/communicator.h"
#include "mxopt/collectives/host_exchange.h"
#include "mxopt/params/layout.h"

namespace mxopt {

/// Collective: compares the fields over ranks. Every rank passes the same field names in the same order.
/// Throws ContractError on every rank when a field differs, naming the field, the ranks that differ from rank
/// 0, and the first line on which they do.
void require_agreement(Communicator& comm, std::span<const LayoutField> fields);

/// Collective over all of `tell`: compares the fields in each communicator of `compare`, every one of them
/// whatever the others find, and throws ContractError on every rank of `tell` where one differs anywhere.
void require_agreement(std::span<Communicator* const> compare, std::span<Communicator* const> tell,
                       std::span<const LayoutField> fields);

/// Collective: runs `body`, which sends nothing. Where it throws on one rank, throws on all ranks of `comms`:
/// there its own error, on the others an Error with the reason.
template <class Error, class Body>
void agreed_over(std::span<Communicator* const> comms, const Body& body) {
  std::exception_ptr failure;
  std::string problem;
  try {
    body();
  } catch (const std::exception& error) {
    failure = std::current_exception();
    problem = *error.what() != '\0' ? error.what() : "failed";
  }
  for (Communicator* comm : comms) problem = first_problem(*comm, problem);
  if (failure) std::rethrow_exception(failure);
  if (!problem.empty()) throw Error(problem);
}

}  // namespace mxopt
