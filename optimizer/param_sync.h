// How written shards become whole params on every rank: the packed MAX over scales, the gathers, and who may
// read when.
//
// quantized  the bytes of the planes are gathered, in place
// bf16       BF16 values are gathered into a staging arena, and every rank quantizes whole params into the
// planes
//
// Both end with the same bytes. Row planes and plain values are gathered first, column planes after the cut
// bands were cast; the last buckets go first, since they hold the first layers.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "mxopt/collectives/communicator.h"
#include "mxopt/optimizer/config.h"
#include "mxopt/params/layout.h"
#include "mxopt/params/storage.h"
#include "mxopt/quant/writeback.h"

namespace mxopt {

/// Which params a sync covers: those a step changes, or all of them.
enum class SyncScope { kTrainable, kAll };

class ParamSync {
 public:
  /// layout, storage and comm are borrowed. Allocates the staging of GatherFormat::kBf16.
  ParamSync(const Layout& layout, const ParamStorage& storage, Communicator& comm, GatherFormat format,
            ScaleLayout scale_layout, std::shared_ptr<Allocator> allocator);
  /// Waits for the gathers in flight, since peers read this rank's planes; drops their errors.
  ~ParamSync();
  ParamSync(const ParamSync&) = delete;
  ParamSync& operator=(const ParamSync&) = delete;

  /// The host waits for the reduction and the gathers in flight, and throws their errors.
  void wait_for_peers();

  /// Where writeback puts the BF16 values of one param (bf16 format only, else null).
  Bf16* staging(int param) const;
  std::int64_t staging_bytes() const { return staging_.bytes() + packed_.bytes(); }
  MxView planes(int param) const;

  /// Joins the gathers still in flight and the readers of planes to `stream`, so that planes may be written;
  /// clears the status bytes.
  void open(StreamRef stream);
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

 private:
  struct Gather {
    Work work;
    std::int64_t version = 0;
    std::int64_t waited_version = 0;
  };

  const Gather& gather_of(int param, Plane plane) const;
  void start(Gather& gather, TypedSpan whole, Traffic traffic, StreamRef stream);
  static void join(Gather& gather, StreamRef stream);
  std::vector<Mxfp8Shard> requantize_batch(SyncScope scope) const;
  void requantize(SyncScope scope, StreamRef stream);

  const Layout& layout_;
  const ParamStorage& storage_;
  Communicator& comm_;
  GatherFormat format_;
  ScaleLayout scale_layout_;
  Buffer staging_;  // bf16, laid out like the row plane
  Buffer packed_;   // packed scales of whole params
  Mxfp8Batch trainable_batch_, whole_batch_;
  int launches_ = 0;
  std::vector<Gather> rows_, columns_;  // [buckets]
  Work reduced_;
  Event requantized_;
  std::vector<Event> readers_;  // the first open_readers_ are of now
  std::size_t open_readers_ = 0;
};

}  // namespace mxopt
