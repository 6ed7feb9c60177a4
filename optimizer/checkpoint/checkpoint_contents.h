// What a checkpoint holds, in the terms of the model: no padding, no bucket, no number of ranks.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace mxopt {

/// One kind of FP32 state of a param.
enum class StateKind { kMaster, kExpAvg, kExpAvgSq };

/// "master", "exp_avg" or "exp_avg_sq".
std::string_view state_kind_name(StateKind kind);

struct CheckpointParam {
  std::string name;
  std::vector<std::int64_t> shape;
  std::vector<StateKind> kinds;  // those that are saved, each once
  std::string group;             // name of its group of hyper-parameters
  std::string format;            // for example "mxfp8 row"; a note for people

  bool operator==(const CheckpointParam&) const = default;
};

/// Hyper-parameters of one group at the time of the save. Doubles come back with the same bits.
struct GroupScalars {
  std::string name;
  double lr = 0;
  double min_lr = 0;
  double weight_decay = 0;
  double end_weight_decay = 0;
  double beta1 = 0;
  double beta2 = 0;
  double eps = 0;
};

/// The state of an optimizer that is not per element.
struct ScalarState {
  std::int64_t steps = 0;  // taken ones
  std::int64_t calls = 0;
  std::int64_t consecutive_skips = 0;
  std::int64_t skipped_total = 0;
  double loss_scale = 1;
  std::int64_t hysteresis_left = 0;
  std::int64_t clean_steps = 0;
  std::vector<GroupScalars> groups;  // names differ
};

/// One optimizer's table of params: the usual job has one, with the name "". A job of several optimizers, or
/// whose model is spread over ranks, has one for each.
struct CheckpointSection {
  std::string name;                     // letters, digits, '_', '-' and '.', or empty
  std::vector<CheckpointParam> params;  // names differ
  ScalarState scalars;
};

/// A range of one param's state that this writer saves.
struct CheckpointSlice {
  std::string section;
  std::string param;
  StateKind kind = StateKind::kMaster;
  std::int64_t begin = 0;         // first element, in the flat param
  std::span<const float> values;  // host memory; must not change during the save
};

/// One writer's part of a checkpoint. Over all writers the slices cover every state of every param exactly
/// once.
struct CheckpointContents {
  /// A section must come from at least one writer. Those that give the same one must give it with equal
  /// values.
  std::vector<CheckpointSection> sections;
  std::vector<CheckpointSlice> slices;
  /// The caller's own text, for example random state or data position. UTF-8. Writers may give different
  /// keys; the same key needs the same value.
  std::map<std::string, std::string> user;
  std::string config;                      // YAML text; that of writer 0 is kept
  std::shared_ptr<const void> keep_alive;  // owner of the slices' memory, if nobody else keeps it
};

/// What is compared before anything is handed out. The manifest is always checked, and a file's header before
/// its first use.
enum class Verify {
  kFull,  // sizes, headers and the checksums of all bytes; reads all of it once
  kSize,  // sizes of the files
  kOff,
};

/// A save can not be made, or has failed, on all writers alike; the checkpoints there were before are intact.
class CheckpointError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

}  // namespace mxopt
