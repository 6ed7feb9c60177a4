// The passes over optimizer state that one step makes, as tables and an interface that host and CUDA
// implement.
//
// A pass is one launch (host: one parallel region) over all params; its work is proportional to what this
// rank owns.
#pragma once

#include <array>
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

/// The ranks into whose memory writes go as well. That memory is arranged alike on all ranks, so one distance
/// leads from any address here to its counterpart.
struct PeerStores {
  static constexpr int kMostPeers = 127;

  std::int32_t count = 0;
  std::int32_t column_count = 0;           // of column planes: count, or 0 where these are gathered
  std::int64_t distance[kMostPeers] = {};  // bytes
};

/// A band that a shard boundary divides, on any rank: where its codes wait for their MAX over ranks, and
/// where they go then.
struct CutBandRow {
  MxView planes;
  std::int64_t band = 0;
  std::int64_t codes = 0;  // offset of planes.cols staged bytes
};

struct StepTables {
  std::vector<SegmentRow> segments;
  DType grad_dtype = DType::kFp32;

  PeerStores peers = {};
  /// For the codes of cut bands; null: their partial codes go to the scale arrays.
  std::uint8_t* staged_codes = nullptr;
  std::vector<CutBandRow> cut_bands = {};  // of all ranks, those of frozen params last
  std::int64_t trainable_cut_bands = 0;
  /// [segments] offset of the codes of the segment's first and of its last band, where these are cut; empty
  /// without staged_codes.
  std::vector<std::array<std::int64_t, 2>> codes_of_segment = {};

  /// Where the codes of a cut band of a segment are staged; -1: nowhere.
  std::int64_t codes_at(std::size_t segment, bool is_first_band) const {
    return staged_codes == nullptr ? -1 : codes_of_segment[segment][is_first_band ? 0 : 1];
  }
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

  /// *sum += count + *counter; without the counter where that is null.
  virtual void add_tokens(std::int64_t* sum, std::int64_t count, const std::int64_t* counter,
                          StreamRef stream) = 0;

  /// Zeroes the statistics, and sets in them what is for agreement between ranks and the tokens, of which a
  /// new count begins.
  virtual void open_statistics(const StepMemory& memory, std::int64_t options_hash, StreamRef stream) = 0;

  /// Adds the squares of all owned gradients, exactly, each to the norm of its segment, and marks params with
  /// a non-finite one in their status byte. What `statistics` wants beside that, it gets in the same pass.
  virtual void grad_stats(const StatisticsMemory& statistics, StreamRef stream) = 0;

  /// advance() on reduced statistics, of 1 to kMostParts optimizers on this device.
  virtual void decide(std::span<const StepPart> parts, StreamRef stream) = 0;

  /// Zeroes bytes; begin and size are multiples of 16.
  virtual void clear(std::span<std::uint8_t> bytes, const StepOutcome* outcome, StreamRef stream) = 0;

  /// Adam on master and moments, one scalar set per group; in the same pass writes row bytes, complete column
  /// blocks and their scales, and bf16 and fp32 values. Blocks of cut bands only get their partial code, in
  /// the scale array. Frozen params are left out. The scale arrays of the others must be zero before.
  virtual void fused_update(std::span<const AdamScalars> groups, const StepOutcome* outcome,
                            StreamRef stream) = 0;

  /// The same writeback without an update, frozen params included.
  virtual void writeback(StreamRef stream) = 0;

  // With peers, bytes and values are stored to them in the passes above and in cast_cut_bands(). Scales
  // follow in a pass of their own: within a tile of 32 rows they are a few bytes a row, each of which would
  // be a packet of its own on the link, for as many packets as there are of data.

  /// Stores the scales of the blocks that this rank owns as a whole to the peers. Nothing without peers.
  /// frozen_too  as in writeback.
  virtual void share_scales(bool frozen_too, const StepOutcome* outcome, StreamRef stream) = 0;

  /// Copies the staged codes of all cut bands, as reduced over ranks, to the scale arrays of this rank.
  /// Nothing without staged codes.
  virtual void spread_cut_codes(bool frozen_too, const StepOutcome* outcome, StreamRef stream) = 0;

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
