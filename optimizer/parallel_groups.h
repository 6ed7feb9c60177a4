// Who an optimizer shares its params, its gradients and its decisions with.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "mxopt/collectives/communicator.h"

namespace mxopt {

/// The ranks around one optimizer, as a grid of data x model x replicas. All communicators are borrowed: they
/// must outlive the optimizer and be used for nothing else while it lives.
struct ParallelGroups {
  // A single group is what most trainers have.
  // NOLINTNEXTLINE(google-explicit-constructor)
  ParallelGroups(Communicator& shards, Communicator* model_ranks = nullptr,
                 Communicator* replica_ranks = nullptr)
      : data(&shards), model(model_ranks), replicas(replica_ranks) {}

  /// The ranks that share this rank's params: each owns a shard of their state.
  Communicator* data;
  /// The ranks that hold the other parts of the model: those with this one's rank in their data-parallel
  /// groups, which are all of one size. Norms, non-finite gradients and counts are of the whole model then,
  /// and every rank takes or skips a step. Null: this rank has all of the model.
  Communicator* model = nullptr;
  /// Hybrid sharding: the ranks that own the same shard as this one, in data-parallel groups of their own.
  /// Their gradients are added, and every replica makes the same update. Null: nobody does.
  Communicator* replicas = nullptr;
  /// With optimizer.grad_reduce average: the number of ranks whose losses the mean is over. 0: those of
  /// `data` and `replicas`. Larger for experts, whose gradients hold the losses of ranks that have other
  /// experts.
  std::int64_t averaged_ranks = 0;

  /// Those there are, the data-parallel one first.
  std::vector<Communicator*> comms() const;
  std::int64_t replica_count() const { return replicas == nullptr ? 1 : replicas->size(); }
  std::int64_t model_ranks() const { return model == nullptr ? 1 : model->size(); }
  /// Ranks that add their gradients of one param.
  std::int64_t adding_ranks() const { return data->size() * replica_count(); }
  /// All ranks of the grid.
  std::int64_t ranks() const { return adding_ranks() * model_ranks(); }
  /// What `averaged_ranks` stands for.
  std::int64_t ranks_of_mean() const { return averaged_ranks > 0 ? averaged_ranks : adding_ranks(); }
  /// Whether the mean of gradients is made by the one reduction there is; else they become sums there.
  bool averages_in_reduction() const { return replicas == nullptr && ranks_of_mean() == data->size(); }
};

/// The two communicators of hybrid sharding.
struct ShardGroups {
  std::unique_ptr<Communicator> data;
  std::unique_ptr<Communicator> replicas;  // null: one group has all ranks

  ParallelGroups groups() const;
};

/// Collective: groups of `shard_ranks` ranks of `all` that follow each other, as the ranks of one node do.
/// Throws ConfigError when `shard_ranks` does not divide their number, ContractError when ranks have
/// different ones; on every rank.
ShardGroups split_for_sharding(Communicator& all, int shard_ranks);

}  // namespace mxopt
