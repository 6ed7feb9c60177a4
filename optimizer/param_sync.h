// How written shards become whole params on every rank: the packed MAX over scales, the gathers, and who may
// read when.
//
// quantized  the bytes of the planes are gathered, in place
// bf16       BF16 values are gathered into a staging arena, and every rank quantizes whole params into the
// planes
//
// In the quantized format planes can also be written into the peers' memory directly, by the step's own
// passes (PeerStores). Then nothing is gathered, and the MAX covers the codes of cut bands alone, in a
// staging buffer that no peer stores to. The order that makes this right is kept here:
//
// opening  Before a rank stores to a peer, that peer must have done with its old planes. open() joins
// gathers,
//          readers and the caller's stream to the step's stream; a rank enters the reduction of the
//          statistics behind them, and no rank comes out of it before all have entered. publish() has no such
//          reduction: open_publish() makes one.
// closing  A rank enters the packed MAX behind its update. So whoever has seen the MAX complete finds the row
//          planes, values and scales of all ranks in its memory. Column bytes of cut bands follow the MAX; a
//          reduction of one element behind them closes the column planes, where any rank has a cut band.
// arena    It is never zeroed: a slow rank would wipe what a fast peer has stored. The codes of cut bands are
//          copied into it by each rank for itself, behind the MAX; no peer stores to those bytes.
// skip     The passes store nothing; the reductions are made all the same, so ranks agree on them.
//
// Both formats and both ways end with the same bytes. Row planes and plain values are gathered first, column
// planes after the cut bands were cast; the last buckets go first, since they hold the first layers.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "mxopt/collectives/communicator.h"
#include "mxopt/optimizer/config.h"
#include "mxopt/optimizer/gather_plan.h"
#include "mxopt/optimizer/step_kernels.h"
#include "mxopt/params/layout.h"
#include "mxopt/params/storage.h"
#include "mxopt/quant/writeback.h"

namespace mxopt {

/// Which params a sync covers: those a step changes, or all of them.
enum class SyncScope { kTrainable, kAll };

class ParamSync {
 public:
  /// layout, storage and comm are borrowed. Allocates the staging of GatherFormat::kBf16, and that of
  /// direct stores.
  /// window  the storage's, which stays open; not open where the plan says collective.
  ParamSync(const Layout& layout, const ParamStorage& storage, Communicator& comm, GatherFormat format,
            const GatherPlan& plan, const PeerWindow& window, ScaleLayout scale_layout,
            std::shared_ptr<Allocator> allocator);
  /// Waits for the gathers in flight, since peers read this rank's planes; drops their errors.
  ~ParamSync();
  ParamSync(const ParamSync&) = delete;
  ParamSync& operator=(const ParamSync&) = delete;

  /// The host waits for the reduction and the gathers in flight, and throws their errors.
  void wait_for_peers();

  /// Where writeback puts the BF16 values of one param (bf16 format only, else null).
  Bf16* staging(int param) const;
  std::int64_t staging_bytes() const { return staging_.bytes() + packed_.bytes() + message_.bytes(); }
  MxView planes(int param) const;

  /// Joins the gathers still in flight and the readers of planes to `stream`, so that planes may be written;
  /// clears the status bytes.
  void open(StreamRef stream);
  /// The same outside of a step: where peers store directly, also waits for all ranks on the stream.
  void open_publish(StreamRef stream);
  /// After a captured step: forgets its events, which nothing outside of the graph can wait for.
  void forget_events();
  /// The scales to be zeroed before the scope is written, so that the MAX only sees what is written from then
  /// on. Empty in the bf16 format.
  std::span<std::uint8_t> scales_to_clear(SyncScope scope) const;
  /// Starts the gathers that need only the written shards.
  void gather_rows(SyncScope scope, StreamRef stream);
  /// The one packed MAX all-reduce: status bytes, and the scales of the scope.
  void reduce_scales(SyncScope scope, StreamRef stream);
  /// Starts the gathers of the column planes.
  void gather_columns(SyncScope scope, StreamRef stream);

  /// The end of reduce_scales().
  Work reduced() const { return reduced_; }

  /// Joins the gather of the param's plane, and its scales, to `stream`.
  void wait(int param, Plane plane, StreamRef stream);
  /// What was enqueued on `stream` so far is the last that it reads of the planes: open() waits for it.
  void done_reading(StreamRef stream);
  /// How often the param's plane was written.
  std::int64_t version(int param, Plane plane) const { return gather_of(param, plane).version; }
  /// The newest version of the param's plane that was waited for.
  std::int64_t waited_version(int param, Plane plane) const;

  /// Launches of the requantization since the last call (bf16 format only).
  int take_launches() { return std::exchange(launches_, 0); }

  /// One byte a param; reduced over ranks after reduce_scales().
  std::span<std::uint8_t> status() const;

  /// What the step's passes need for direct stores; nothing of it without them.
  const PeerStores& peers() const { return peers_; }
  std::uint8_t* staged_codes() const;
  /// Of all ranks, those of frozen params last.
  std::vector<CutBandRow> cut_band_rows() const;
  std::int64_t trainable_cut_bands() const { return trainable_cut_bands_; }
  /// Where the codes of a cut band of a param are staged.
  std::int64_t codes_of(int param, std::int64_t band) const;

 private:
  struct Gather {
    Work work;
    std::int64_t version = 0;
    std::int64_t waited_version = 0;
  };

  /// A band that the shard boundary of any rank divides.
  struct CutBand {
    int param = -1;
    std::int64_t band = 0;
    std::int64_t codes = 0;  // offset of its staged codes
  };

  void find_cut_bands();
  /// What the packed MAX reduces: status bytes, and behind them scales or codes.
  TypedSpan message(SyncScope scope) const;
  std::uint8_t* message_head() const;
  const Gather& gather_of(int param, Plane plane) const;
  /// is_direct: the bytes are there already.
  void start(Gather& gather, TypedSpan whole, Traffic traffic, bool is_direct, StreamRef stream);
  Work meet(StreamRef stream);
  static void join(Gather& gather, StreamRef stream);
  std::vector<Mxfp8Shard> requantize_batch(SyncScope scope) const;
  void requantize(SyncScope scope, StreamRef stream);

  const Layout& layout_;
  const ParamStorage& storage_;
  Communicator& comm_;
  GatherFormat format_;
  const GatherPlan plan_;
  ScaleLayout scale_layout_;
  PeerStores peers_;                // direct only
  std::vector<CutBand> cut_bands_;  // of all ranks, those of frozen params last; direct only
  std::int64_t trainable_cut_bands_ = 0;
  std::int64_t code_bytes_ = 0, trainable_code_bytes_ = 0;
  Buffer message_;  // direct: status bytes and staged codes
  Buffer token_;    // direct: what a reduction without content reduces
  Buffer staging_;  // bf16, laid out like the row plane
  Buffer packed_;   // packed scales of whole params
  Mxfp8Batch trainable_batch_, whole_batch_;
  int launches_ = 0;
  std::vector<Gather> rows_, columns_;  // [buckets]
  Work reduced_;
  Work closed_;  // direct: the reduction behind the cut bands
  Event requantized_;
  std::vector<Event> readers_;  // the first open_readers_ are of now
  std::size_t open_readers_ = 0;
};

}  // namespace mxopt
