// Facts about a constructed optimizer, for the trainer to print.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "mxopt/collectives/communicator.h"
#include "mxopt/optimizer/config.h"
#include "mxopt/optimizer/parallel_groups.h"
#include "mxopt/params/layout.h"

namespace mxopt {

struct ConstructionReport {
  std::string communicator;  // transport and size in words
  std::int64_t world_size = 1;
  std::int64_t params = 0;
  std::int64_t elems = 0;  // of all params, ties counted once
  std::int64_t buckets = 0;
  std::vector<std::string> fallbacks;     // one line for each MXFP8 request that became bf16, with its reason
  ByteCounts bytes;                       // of this rank
  std::int64_t gather_staging_bytes = 0;  // gather_format bf16, or direct stores
  std::string gather;                     // which planes are stored to the peers directly, and why
  std::int64_t grad_staging_bytes = 0;    // grad_reduction exchange only, where the transport does not do it
  CutShare cut;
  std::int64_t average_divisor = 1;   // the one number gradients are divided by
  bool averages_in_reduction = true;  // false: in the update
  std::int64_t replicas = 1;          // of every shard
  GradReduce grad_reduce = GradReduce::kAverage;
  std::uint64_t layout_digest = 0;

  /// All of it in a few lines, without a newline at the end.
  std::string text() const;
};

ConstructionReport make_report(const Layout& layout, const ParallelGroups& ranks,
                               const OptimizerConfig& optimizer);

}  // namespace mxopt
