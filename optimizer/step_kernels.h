// The passes over optimizer state that one step makes, as tables and an interface that host and CUDA
// implement.
//
// A pass is one launch (host: one parallel region) over all params; its work is proportional to what this
// rank owns.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "mxopt/optimizer/adam_math.h"
#include "mxopt/optimizer/step_state.h"
#include "mxopt/params/dtype.h"
#include "mxopt/params/memory.h"
#include "mxopt/params/param_spec.h"
#include "mxopt/quant/mxfp8.h"

namespace mxopt {

/// What the status byte of a param says after a step, reduced by MAX over ranks.
enum ParamStatus : std::uint8_t { kStatusFine = 0, kStatusNonFiniteMaster = 1, kStatusNonFiniteGradient = 2 };

/// One owned piece of one param. State pointers are those of the piece's first element, the others of the
/// param's.
struct SegmentRow {
  std::int64_t elems = 0;
  std::int64_t param_begin = 0;  // flat offset of the piece in the param; a multiple of 128
  MxView planes;                 // rows == 0: the values below are written instead
  void* values = nullptr;        // bf16 or fp32 values of the param
  DType values_dtype = DType::kBf16;
  float* master = nullptr;
  float* exp_avg = nullptr;  // null for a frozen param, likewise the next two
  float* exp_avg_sq = nullptr;
  const void* grad = nullptr;
  std::uint8_t* status = nullptr;  // one byte
  int group = 0;
  int norm = 0;   // that its gradients are in: 0 the common one, i: separate norm i - 1, -1: none
  int param = 0;  // its number
};

struct StepTables {
  std::vector<SegmentRow> segments;
  DType grad_dtype = DType::kFp32;
};

/// Passes of one rank. Pointers in the tables stay valid for the object's life; nothing is allocated after
/// construction. All pointers and spans are in the device's memory, and every pass is enqueued on its stream.
/// A pass that is given an outcome does nothing when that says that the step is not taken.
class StepKernels {
 public:
  virtual ~StepKernels() = default;

  /// allocator  of what the passes need beside the tables; null: the default one.
  /// Throws ConfigError when the device's backend is not built in.
  static std::unique_ptr<StepKernels> make(StepTables tables, Device device,
                                           std::shared_ptr<Allocator> allocator = nullptr);

  /// Zeroes the statistics, and sets in them what is for agreement between ranks.
  virtual void open_statistics(const StepMemory& memory, std::int64_t options_hash, StreamRef stream) = 0;

  /// Adds the squares of all owned gradients, exactly, each to the norm of its segment, and marks params with
  /// a non-finite one in their status byte. What `statistics` wants beside that, it gets in the same pass.
  virtual void grad_stats(const StatisticsMemory& statistics, StreamRef stream) = 0;

  /// advance() on reduced statistics.
  virtual void decide(const StepMemory& memory, const StepOptions& options, StreamRef stream) = 0;

  /// Zeroes bytes; begin and size are multiples of 16.
  virtual void clear(std::span<std::uint8_t> bytes, const StepOutcome* outcome, StreamRef stream) = 0;

  /// Adam on master and moments, one scalar set per group; in the same pass writes row bytes, complete column
  /// blocks and their scales, and bf16 and fp32 values. Blocks of cut bands only get their partial code, in
  /// the scale array. Frozen params are left out. The scale arrays of the others must be zero before.
  virtual void fused_update(std::span<const AdamScalars> groups, const StepOutcome* outcome,
                            StreamRef stream) = 0;

  /// The same writeback without an update, frozen params included.
  virtual void writeback(StreamRef stream) = 0;

  /// Column bytes of the owned parts of cut bands, with the scales as reduced over ranks.
  /// frozen_too  as in writeback.
  virtual void cast_cut_bands(bool frozen_too, const StepOutcome* outcome, StreamRef stream) = 0;

  /// master[i] := values[i], fp32 or bf16; values may be in the memory of the host. Not a pass of a step: for
  /// bf16 values a device makes a copy, and the host waits.
  virtual void load_master(float* master, ConstTypedSpan values, StreamRef stream) = 0;

  /// Launches since the last call.
  int take_launches() { return std::exchange(launches_, 0); }

 protected:
  int launches_ = 0;
};

}  // namespace mxopt
