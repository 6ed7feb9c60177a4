#include "mxopt/optimizer/plan.h"

#include <algorithm>
#include <cstdint>
#include <exception>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <utility>

#include "mxopt/collectives/host_exchange.h"
#include "mxopt/optimizer/agreement.h"

namespace mxopt {

namespace {

Plan make_plan(std::vector<ParamSpec> specs, const Config& config, const ParallelGroups& ranks,
               Device device) {
  validate(config);
  const Communicator& comm = *ranks.data;
  const ParallelConfig& parallel = config.parallel;
  if (parallel.world_size != 0 && parallel.world_size != ranks.ranks()) {
    throw ConfigError("parallel.world_size is " + std::to_string(parallel.world_size) + ", but the " +
                      (ranks.ranks() == comm.size() ? "communicator has " : "groups have ") +
                      std::to_string(ranks.ranks()) + " ranks");
  }
  if (ranks.averaged_ranks < 0 ||
      (ranks.averaged_ranks > 0 && config.optimizer.grad_reduce != GradReduce::kAverage)) {
    throw ConfigError("averaged_ranks is " + std::to_string(ranks.averaged_ranks) +
                      "; allowed is 0, or more with optimizer.grad_reduce average");
  }
  if (parallel.transport == Transport::kSelf && comm.size() != 1) {
    throw ConfigError("parallel.transport is self, but the communicator has " + std::to_string(comm.size()) +
                      " ranks");
  }
  const bool is_host = device.kind == DeviceKind::kHost;
  if ((parallel.device == DeviceChoice::kHost && !is_host) ||
      (parallel.device == DeviceChoice::kCuda && is_host)) {
    throw ConfigError(std::string("parallel.device is ") + (is_host ? "cuda" : "host") +
                      ", but the optimizer was made on " + (is_host ? "the host" : "a CUDA device"));
  }
  if (comm.device() != device) {
    throw ConfigError("the communicator (" + comm.describe() +
                      ") does not move bytes of the optimizer's device");
  }
  for (const auto& [other, name] :
       {std::pair{ranks.model, "model-parallel"}, std::pair{ranks.replicas, "replicas'"}}) {
    if (other == nullptr || other->device() == device) continue;
    throw ConfigError(std::string("the ") + name + " communicator (" + other->describe() +
                      ") does not move bytes of the optimizer's device");
  }
  LayoutOptions options;
  options.world_size = comm.size();
  options.bucket_elems = config.optimizer.bucket_elems;
  options.default_format = config.precision.weights;
  options.default_storage = resolved_storage(config.precision);
  options.fallback = config.precision.fallback;
  Layout layout(std::move(specs), options);
  ParamGroups groups = make_param_groups(config, layout.params(), ranks.model != nullptr);
  std::vector<int> norm_of;
  for (const int group : groups.group_of) {
    norm_of.push_back(groups.groups[static_cast<std::size_t>(group)].norm);
  }
  return {std::move(layout), std::move(groups), std::move(norm_of)};
}

/// Collective: makes the groups what they are over all ranks. Throws on every rank when a group's pattern
/// matches no param of any.
void unite_groups(Plan& plan, Communicator& model_parallel) {
  std::vector<ParamGroup>& groups = plan.groups.groups;
  enum Flag : std::size_t { kMatches, kDecays, kDoesNotDecay, kFlags };
  std::vector<std::uint8_t> flags(groups.size() * kFlags, 0);
  for (std::size_t g = 0; g < groups.size(); ++g) {
    const bool has_params =
        std::ranges::find(plan.groups.group_of, static_cast<int>(g)) != plan.groups.group_of.end();
    flags[g * kFlags + kMatches] = groups[g].is_matched ? 1 : 0;
    flags[g * kFlags + kDecays] = has_params && groups[g].has_decay ? 1 : 0;
    flags[g * kFlags + kDoesNotDecay] = has_params && !groups[g].has_decay ? 1 : 0;
  }
  all_reduce_on_host(model_parallel, std::span(flags), ReduceOp::kMax, Traffic::kControl);
  for (std::size_t g = 0; g < groups.size(); ++g) {
    if (flags[g * kFlags + kMatches] == 0) {
      throw ConfigError("optimizer.groups[" + std::to_string(g - 1) + "].match: the pattern of group '" +
                        groups[g].name + "' matches no param of any model-parallel rank");
    }
    groups[g].has_decay = flags[g * kFlags + kDecays] != 0 || flags[g * kFlags + kDoesNotDecay] == 0;
  }
}

/// Collective: takes params out of the norms that a lower rank has with the same duplicate_key. Throws on
/// every rank when the shapes of copies differ.
void count_duplicates_once(Plan& plan, Communicator& model_parallel) {
  constexpr std::size_t kNumbers = 3;  // hashes of key, of shape, and of how it is trained
  std::vector<std::size_t> params;
  std::vector<std::int64_t> own;
  for (std::size_t p = 0; p < plan.layout.params().size(); ++p) {
    const ParamLayout& param = plan.layout.params()[p];
    if (param.duplicate_key.empty()) continue;
    params.push_back(p);
    own.push_back(static_cast<std::int64_t>(hash64(param.duplicate_key)));
    own.push_back(static_cast<std::int64_t>(hash64(shape_text(param.shape))));
    const GroupPart& part = plan.groups.parts[static_cast<std::size_t>(plan.groups.part_of[p])];
    const std::string training = plan.groups.groups[static_cast<std::size_t>(part.group)].name + '\n' +
                                 std::to_string(plan.norm_of[p]) + (param.family.frozen ? "\nfrozen" : "");
    own.push_back(static_cast<std::int64_t>(hash64(training)));
  }
  const auto ranks = static_cast<std::size_t>(model_parallel.size());
  const std::vector<std::int64_t> own_size(1, static_cast<std::int64_t>(own.size()));
  std::vector<std::int64_t> sizes(ranks);
  all_gather_on_host(model_parallel, std::span(sizes), std::span(own_size), Traffic::kControl);
  const auto longest = static_cast<std::size_t>(std::ranges::max(sizes));
  own.resize(longest);
  std::vector<std::int64_t> all(longest * ranks);
  all_gather_on_host(model_parallel, std::span(all), std::span<const std::int64_t>(own), Traffic::kControl);

  struct Copy {
    std::size_t rank;
    std::int64_t shape, training;
  };
  std::map<std::int64_t, Copy> first;  // by the hash of the key
  std::set<std::int64_t> bad_keys, bad_training;
  for (std::size_t rank = 0; rank < ranks; ++rank) {
    const std::int64_t* const of_rank = all.data() + rank * longest;
    for (std::size_t i = 0; i < static_cast<std::size_t>(sizes[rank]); i += kNumbers) {
      const auto [copy, is_new] = first.try_emplace(of_rank[i], Copy{rank, of_rank[i + 1], of_rank[i + 2]});
      if (!is_new && copy->second.shape != of_rank[i + 1]) bad_keys.insert(of_rank[i]);
      if (!is_new && copy->second.training != of_rank[i + 2]) bad_training.insert(of_rank[i]);
    }
  }
  std::string problems;
  for (std::size_t i = 0; i < params.size(); ++i) {
    const ParamLayout& param = plan.layout.params()[params[i]];
    const std::int64_t key = own[kNumbers * i];
    if (bad_keys.contains(key)) {
      problems += (problems.empty() ? "param '" : "\nparam '") + param.name + "' (shape " +
                  shape_text(param.shape) + "): other model-parallel ranks have its duplicate_key '" +
                  param.duplicate_key + "' at another shape";
    }
    if (bad_training.contains(key) && !bad_keys.contains(key)) {
      problems += (problems.empty() ? "param '" : "\nparam '") + param.name +
                  "': other model-parallel ranks have its duplicate_key '" + param.duplicate_key +
                  "' in another group or norm, or frozen where this one is not";
    }
    if (first.at(key).rank != static_cast<std::size_t>(model_parallel.rank())) plan.norm_of[params[i]] = -1;
  }
  if (bad_keys.empty() && bad_training.empty()) return;
  throw ConfigError(!problems.empty() ? problems
                                      : "params of other model-parallel ranks with one duplicate_key have "
                                        "different shapes, groups or norms");
}

std::string place_in(const Communicator& comm) {
  return "rank " + std::to_string(comm.rank()) + " of " + std::to_string(comm.size());
}

std::string replicas_text(const ParallelGroups& ranks) {
  return ranks.replicas == nullptr ? "none" : place_in(*ranks.replicas);
}

/// What ranks of one data-parallel group have in common as parts of the model.
std::string model_parallel_text(const Plan& plan, const ParallelGroups& ranks) {
  if (ranks.model == nullptr) return "none";
  std::string text = place_in(*ranks.model) + '\n';
  for (std::size_t p = 0; p < plan.norm_of.size(); ++p) {
    if (plan.norm_of[p] < 0) text += "counted elsewhere: " + plan.layout.params()[p].name + '\n';
  }
  return text;
}

/// What all ranks that share params have in common.
std::vector<LayoutField> plan_fields(const Plan& plan, const Config& config, const ParallelGroups& ranks) {
  std::vector<LayoutField> fields = plan.layout.fields();
  fields.push_back({"model_parallel", model_parallel_text(plan, ranks)});
  fields.push_back({"averaged_ranks", std::to_string(ranks.ranks_of_mean())});
  fields.push_back({"configuration", configuration_text(config)});
  return fields;
}

}  // namespace

Plan make_agreed_plan(std::vector<ParamSpec> specs, const Config& config, const ParallelGroups& ranks,
                      Device device) {
  Communicator& comm = *ranks.data;
  Communicator* const model_parallel = ranks.model;
  std::optional<Plan> plan;
  LayoutField status[] = {{"library_version", MXOPT_VERSION}, {"problems", ""}};
  std::exception_ptr failure;
  // Keeps the first failure: it is thrown when all ranks know that there is one.
  const auto attempt = [&](const auto& body) {
    try {
      body();
    } catch (const PeerError&) {
      throw;
    } catch (const std::exception& error) {
      if (failure) return;
      status[1].text = *error.what() != '\0' ? error.what() : "failed";
      std::ranges::replace(status[1].text, '\n', ' ');  // ranks that differ are shown one line
      failure = std::current_exception();
    }
  };
  attempt([&] { plan.emplace(make_plan(std::move(specs), config, ranks, device)); });
  if (model_parallel != nullptr) {
    attempt([&] { require_agreement(*model_parallel, status); });
    // Now it failed on every rank of that group, or on none.
    if (!failure) {
      attempt([&] {
        const LayoutField fields[] = {{"configuration", configuration_text(config)},
                                      {"data_parallel", place_in(comm)},
                                      {"replicas", replicas_text(ranks)},
                                      {"averaged_ranks", std::to_string(ranks.ranks_of_mean())}};
        require_agreement(*model_parallel, fields);
        unite_groups(*plan, *model_parallel);
        count_duplicates_once(*plan, *model_parallel);
      });
    }
  }
  require_agreement(comm, status);
  if (failure) std::rethrow_exception(failure);
  std::vector<LayoutField> fields = plan_fields(*plan, config, ranks);
  fields.push_back({"replicas", replicas_text(ranks)});
  require_agreement(comm, fields);
  return std::move(*plan);
}

void require_equal_replicas(Communicator& replicas, const Plan* plan, const Config& config,
                            const ParallelGroups& ranks, const std::string& problem) {
  LayoutField status[] = {{"library_version", MXOPT_VERSION}, {"construction", problem}};
  std::ranges::replace(status[1].text, '\n', ' ');
  require_agreement(replicas, status);
  if (plan == nullptr) return;  // then it is so on every rank
  std::vector<LayoutField> fields = plan_fields(*plan, config, ranks);
  fields.push_back({"data_parallel", place_in(*ranks.data)});
  require_agreement(replicas, fields);
}

}  // namespace mxopt
