// The class trainers use: a distributed Adam optimizer whose weights live in MXFP8 planes that it writes
// itself.
//
// One object per rank, used by one thread. Calls marked collective must be made by every rank of the
// communicator, in the same order. All memory is allocated in the constructor, but for a copy that
// set_initial() makes of bf16 values on a device; pointers handed out stay valid and unchanged until the
// object is destroyed. A call that fails before its first message changes nothing on any rank.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "mxopt/optimizer/config.h"
#include "mxopt/optimizer/construction_report.h"
#include "mxopt/optimizer/parallel_groups.h"
#include "mxopt/optimizer/step_report.h"
#include "mxopt/params/dtype.h"
#include "mxopt/params/layout.h"
#include "mxopt/params/memory.h"
#include "mxopt/params/param_spec.h"
#include "mxopt/quant/mxfp8.h"

namespace mxopt {

class StateAccess;
class StepPhases;

/// The gradient buffer of one param: packed, [shape], fp32 or bf16.
struct GradView {
  TypedSpan data;
  std::vector<std::int64_t> shape;
  GradMode mode = GradMode::kAccumulate;
};

/// The primary storage of one param. Versions count publishes; 0 is "never published".
struct ParamView {
  ParamFormat format = ParamFormat::kMxfp8;
  std::vector<std::int64_t> shape;
  MxView planes;                 // MXFP8 params
  TypedSpan values;              // bf16 and fp32 params: packed, [shape]
  std::int64_t row_version = 0;  // version that was waited for; bf16 and fp32 values count as the row plane
  std::int64_t column_version = 0;
};

/// What this rank owns of one param, for trainers with their own checkpoints. The moments are empty for
/// frozen params.
struct OwnedSlice {
  std::int64_t param_begin = 0;  // flat offset in the param; meaningful when master is not empty
  std::span<float> master;
  std::span<float> exp_avg;
  std::span<float> exp_avg_sq;
};

class DistributedAdam {
 public:
  /// Collective over all groups. Allocates everything and compares layout, configuration and library version
  /// over ranks.
  ///
  /// specs   the same list in the same order on every rank.
  /// ranks   a communicator, or the groups of a larger job.
  /// Throws  ConfigError for a bad list or configuration; ContractError on every rank when ranks disagree,
  /// naming rank
  ///         and field, a rank whose own list is bad included.
  DistributedAdam(std::vector<ParamSpec> specs, const Config& config, const ParallelGroups& ranks,
                  Device device = {}, std::shared_ptr<Allocator> allocator = nullptr);
  /// Waits for what is in flight and drops its errors. After a PeerError under MPI, MPI may still use the
  /// gradients and planes (see mpi_communicator.h): keep the object until the process ends.
  ~DistributedAdam();
  DistributedAdam(const DistributedAdam&) = delete;
  DistributedAdam& operator=(const DistributedAdam&) = delete;

  const Layout& layout() const;
  const ConstructionReport& construction() const;

  /// Copies high-precision initial values (fp32 or bf16, packed, the whole param) into this rank's masters.
  /// Not collective. Throws ContractError when the name is unknown or size or dtype do not fit.
  void set_initial(std::string_view name, ConstTypedSpan values, StreamRef stream = {});
  /// The same for the flat range [flat_begin, flat_begin + slice.elems); parts this rank does not own are
  /// ignored.
  void set_initial(std::string_view name, std::int64_t flat_begin, ConstTypedSpan slice,
                   StreamRef stream = {});

  /// Collective and idempotent: masters -> planes, scales and values of every rank. Also after masters were
  /// changed through owned(). Of replicas, the first one's masters and moments become those of all. Returns,
  /// on every rank alike, the names of params whose masters are NaN or infinite in BF16. Throws ContractError
  /// on every rank, listing names, when a param was never set.
  std::vector<std::string> publish(StreamRef stream = {});

  /// Throw ContractError for an unknown name, or a frozen param's gradient.
  GradView grad(std::string_view name) const;
  ParamView param(std::string_view name) const;
  /// To restore a checkpoint of one's own: set_initial(name, param_begin, slice) for the masters, the spans
  /// for the moments, set_steps_taken(), publish().
  OwnedSlice owned(std::string_view name);

  /// Starts a micro-batch. Gradients are communicated only in the last one of a step.
  void begin_backward(bool last_micro_batch = true);
  /// The gradient of `name` is final for this micro-batch. A bucket's reduce-scatter is issued when all its
  /// params are ready and all earlier buckets' were issued; step() issues the rest, so unused params need no
  /// call.
  void grad_ready(std::string_view name, StreamRef stream = {});

  /// With optimizer.grad_reduce tokens: adds to the number of tokens whose losses this rank's gradients of
  /// the next step are sums over. At least one call for each step on every rank; 0 is allowed. Where
  /// no rank counts any, gradients must be zero, else the step is a ContractError. Of model-parallel ranks,
  /// those that count count alike, and the others add 0.
  /// While a step is captured: on its stream.
  void add_tokens(std::int64_t count, StreamRef stream = {});
  /// The same for [1] in the memory of the optimizer's device, not negative, read in the order of `stream`.
  void add_tokens(std::span<const std::int64_t> count, StreamRef stream = {});

  /// Collective, over all groups: one optimizer step, or a skip on every rank. See
  /// StepRecord.
  /// Throws ContractError on every rank when a param was never published, when ranks hold different
  /// hyper-parameters, or when optimizer.max_consecutive_skips is reached. On a device the last two
  /// are found out later: they are thrown when the report is read, and by the call 8 steps on.
  /// On a device a step may be captured in a CUDA graph, when one was made before and is complete, and the
  /// transport can be captured: learning rates, weight decays, loss scale and counters are in device memory
  /// and go on with each replay.
  StepReport step(StreamRef stream = {});
  /// The newest step that was enqueued on `stream`, for replays of a captured one: without its launches and
  /// times.
  StepReport last_report(StreamRef stream = {});

  /// After this the plane may be read on `stream`; returns the view stamped with the version waited for.
  /// For bf16 and fp32 params the plane is Plane::kRow. Throws ContractError when the param has no such
  /// plane.
  ParamView wait_param(std::string_view name, Plane plane = Plane::kRow, StreamRef stream = {});
  /// Throws ContractError when the view's plane was written or may be in flight since it was waited for.
  void require_current(std::string_view name, const ParamView& view, Plane plane) const;
  /// What was enqueued on a side stream so far has read what it wanted.
  void done_reading(StreamRef stream = {});

  /// Factor the loss must be multiplied by before backward; [1] fp32 on the optimizer's device.
  std::span<const float> loss_scale() const;

  /// Group names: "default" first, then those of the configuration, in order.
  std::span<const std::string> groups() const;
  /// Take effect at the next step; every rank must set the same values before it. Group "*" means all.
  void set_lr(std::string_view group, double value);  // the peak of the group's schedule
  /// The value stays, whatever schedule the group's weight decay had. Not for the params of one dimension
  /// that are left without decay, see optimizer.decay_1d. Throws ContractError when the group has no others.
  void set_weight_decay(std::string_view group, double value);
  void set_betas(double beta1, double beta2);  // of all groups
  void set_betas(std::string_view group, double beta1, double beta2);

  /// Collective: a checkpoint in `dir`, with the number of taken steps in its name; empty: in checkpoint.dir.
  /// Throws CheckpointError on every rank. Checkpointer has the trainer's own state, several optimizers and
  /// saves beside the training.
  void save(const std::filesystem::path& dir = {});
  /// Collective: restores the latest checkpoint in `dir`, or the one that it is the folder of, and publishes
  /// it. Throws DataError on every rank, before anything is changed.
  void load(const std::filesystem::path& dir = {});
  /// Collective: initial values of all params from the tensors of their names in safetensors files, F32 or
  /// BF16; then publish(). Throws DataError on every rank, before anything is changed, listing params that
  /// are missing, in two files, or of another shape or type. Tensors of other names are left out, and
  /// returned.
  std::vector<std::string> import_weights(std::span<const std::filesystem::path> files);

  /// Taken steps, as far as reports were made: after replays of a captured step, read last_report() first.
  /// Setting it is for trainers with their own checkpoints; every rank must set the same.
  std::int64_t steps_taken() const;
  void set_steps_taken(std::int64_t steps);

 private:
  friend class OptimizerChain;
  friend class Checkpointer;
  class Impl;
  StepPhases& phases();
  StateAccess& state();
  void require_unchained(std::string_view call) const;
  std::unique_ptr<Impl> impl_;
};

}  // namespace mxopt
