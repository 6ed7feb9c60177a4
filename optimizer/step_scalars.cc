#include "mxopt/optimizer/step_scalars.h"

#include <utility>

#include "mxopt/params/block_geometry.h"

namespace mxopt {

namespace {

template <class T>
constexpr std::int64_t kElemsOf = sizeof(T) / sizeof(std::int64_t);

/// Hands out pieces of one buffer, each aligned to 128 bytes.
class Pieces {
 public:
  template <class T>
  T* take(std::uint8_t* base, std::int64_t count) {
    T* const piece = reinterpret_cast<T*>(base + used_);
    used_ += round_up(count * static_cast<std::int64_t>(sizeof(T)), 128);
    return piece;
  }
  std::int64_t used() const { return used_; }

 private:
  std::int64_t used_ = 0;
};

}  // namespace

StepScalars::StepScalars(int groups, std::int64_t steps, const StepState& initial, Device device,
                         std::shared_ptr<Allocator> allocator, const StatisticsLayout& layout)
    : device_(device) {
  const auto norms = static_cast<std::int64_t>(layout.separate_max_norms.size());
  StatisticsMemory& statistics = memory_.statistics;
  own_elems_ = kStatisticsElems - kOwnStatisticsAt + layout.model_parallel_ranks;
  common_elems_ = kStatisticsElems + 2 * layout.model_parallel_ranks + norms * kElemsOf<NormSum>;
  statistics.elems = common_elems_ + layout.params * kElemsOf<ParamSums>;
  statistics.counts_zeros = layout.counts_zeros;
  double* max_norms = nullptr;
  const auto lay_out = [&](std::uint8_t* base) {
    Pieces pieces;
    std::int64_t* const message = pieces.take<std::int64_t>(base, statistics.elems);
    statistics.step = reinterpret_cast<StepStatistics*>(message);
    std::int64_t* const of_ranks = message + kStatisticsElems;
    if (layout.model_parallel_ranks > 0) {
      memory_.tokens_of_ranks = of_ranks;
      statistics.tokens = of_ranks + layout.model_parallel_rank;
      memory_.nonfinite_runs_of_ranks = of_ranks + layout.model_parallel_ranks;
      statistics.nonfinite_runs_of_rank = of_ranks + layout.model_parallel_ranks + layout.model_parallel_rank;
    } else {
      statistics.tokens = message + offsetof(StepStatistics, tokens) / sizeof(std::int64_t);  // null at first
    }
    statistics.norms = reinterpret_cast<NormSum*>(of_ranks + 2 * layout.model_parallel_ranks);
    if (layout.params > 0) statistics.params = reinterpret_cast<ParamSums*>(message + common_elems_);
    memory_.norms = {statistics.norms, max_norms = pieces.take<double>(base, norms),
                     pieces.take<NormOutcome>(base, norms), static_cast<int>(norms)};
    memory_.state = pieces.take<StepState>(base, 1);
    memory_.outcome = pieces.take<StepOutcome>(base, 1);
    memory_.tokens = pieces.take<std::int64_t>(base, 1);
    memory_.scalars = pieces.take<AdamScalars>(base, groups);
    memory_.table.constants = constants_ = pieces.take<GroupConstants>(base, groups);
    memory_.table.weight_decay = weight_decay_ = pieces.take<float>(base, groups * steps);
    memory_.table.lr = lr_ = pieces.take<float>(base, groups * steps);
    return pieces.used();
  };
  buffer_ = Buffer(lay_out(nullptr), device, std::move(allocator));
  lay_out(buffer_.data());
  param_sums_ = {statistics.params, static_cast<std::size_t>(layout.params)};
  memory_.table.steps = steps;
  const Stream setup(device);
  copy_bytes(memory_.state, &initial, sizeof(initial), device_, setup.ref());
  copy_bytes(max_norms, layout.separate_max_norms.data(), norms * static_cast<std::int64_t>(sizeof(double)),
             device_, setup.ref());
  synchronize(device_, setup.ref());
}

void StepScalars::set_groups(const GroupValues& values, StreamRef stream) {
  memory_.table.first_step = values.first_step;
  memory_.table.is_last_kept = values.is_last_kept;
  const auto send = [&](auto* to, auto from) {
    copy_bytes(to, from.data(), static_cast<std::int64_t>(from.size_bytes()), device_, stream);
  };
  send(constants_, values.constants);
  send(weight_decay_, values.weight_decay);
  send(lr_, values.lr);
}

void StepScalars::set_state(const StepState& state, StreamRef stream) {
  copy_bytes(memory_.state, &state, sizeof(state), device_, stream);
}

void StepScalars::copy_state(const StepScalars& from, StreamRef stream) {
  copy_bytes(memory_.state, from.memory_.state, sizeof(StepState), device_, stream);
}

void StepScalars::set_taken(std::int64_t taken, StreamRef stream) {
  copy_bytes(&memory_.state->taken, &taken, sizeof(taken), device_, stream);
}

}  // namespace mxopt
