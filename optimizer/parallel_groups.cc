#include "mxopt/optimizer/parallel_groups.h"

#include <span>
#include <string>

#include "mxopt/optimizer/agreement.h"
#include "mxopt/params/check.h"

namespace mxopt {

std::vector<Communicator*> ParallelGroups::comms() const {
  std::vector<Communicator*> all;
  for (Communicator* comm : {data, model, replicas}) {
    if (comm != nullptr) all.push_back(comm);
  }
  return all;
}

ParallelGroups ShardGroups::groups() const {
  return {*data, nullptr, replicas.get()};
}

ShardGroups split_for_sharding(Communicator& all, int shard_ranks) {
  const LayoutField field = {"shard_ranks", std::to_string(shard_ranks)};
  require_agreement(all, std::span(&field, 1));
  if (shard_ranks < 1 || all.size() % shard_ranks != 0) {
    throw ConfigError("ranks that share one copy of the state: " + std::to_string(shard_ranks) +
                      "; allowed is a number that divides the " + std::to_string(all.size()) +
                      " ranks of the job");
  }
  const int group = all.rank() / shard_ranks;
  const int place = all.rank() % shard_ranks;
  ShardGroups groups;
  groups.data = all.split(group, place);
  if (shard_ranks < all.size()) groups.replicas = all.split(place, group);
  return groups;
}

}  // namespace mxopt
