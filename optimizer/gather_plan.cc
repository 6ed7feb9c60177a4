#include "mxopt/optimizer/gather_plan.h"

#include <iomanip>
#include <sstream>

#include "mxopt/optimizer/step_kernels.h"

namespace mxopt {

namespace {

std::string milliseconds(double seconds) {
  std::ostringstream text;
  text << std::setprecision(3) << 1e3 * seconds << " ms";
  return text.str();
}

}  // namespace

std::string GatherPlan::text() const {
  const char* const what = is_column_direct ? "direct"
                           : is_row_direct  ? "row planes direct, column planes collective"
                                            : "collective";
  return std::string(what) + " (" + reason + ")";
}

GatherCosts gather_costs(const Layout& layout, DType grad_dtype) {
  GatherCosts costs;
  costs.world_size = layout.world_size();
  double row = static_cast<double>(layout.trainable_scale_bytes());
  double column = 0;
  double elems = 0;
  for (const Bucket& bucket : layout.buckets()) {
    if (bucket.family.frozen) continue;
    const auto count = static_cast<double>(bucket.elems);
    elems += count;
    switch (bucket.family.format) {
      case ParamFormat::kMxfp8:
        row += count;
        if (bucket.family.has_column()) column += count;
        break;
      case ParamFormat::kBf16:
        row += count * dtype_bytes(DType::kBf16);
        break;
      case ParamFormat::kFp32:
        row += count * dtype_bytes(DType::kFp32);
        break;
    }
  }
  const auto world_size = static_cast<double>(costs.world_size);
  // Master and two moments are read and written, the gradient is read.
  const double state = elems * static_cast<double>(6 * sizeof(float) + dtype_bytes(grad_dtype));
  costs.row_bytes = row / world_size;
  costs.column_bytes = column / world_size;
  costs.update_bytes = state / world_size + costs.row_bytes + costs.column_bytes;
  return costs;
}

GatherPlan cheaper_gather(const GatherCosts& costs, const CopyRates& rates) {
  if (costs.world_size == 1) return {false, false, "one rank"};
  if (rates.to_peer <= 0 || rates.local <= 0)
    return {false, false,
            rates.reason.empty() ? "the transport does not know the rate of its links" : rates.reason};
  const auto peers = static_cast<double>(costs.world_size - 1);
  const double update_s = costs.update_bytes / rates.local;
  const double row_s = peers * costs.row_bytes / rates.to_peer;
  const double all_s = peers * (costs.row_bytes + costs.column_bytes) / rates.to_peer;
  GatherPlan plan;
  plan.is_row_direct = row_s <= update_s;
  plan.is_column_direct = all_s <= update_s;
  std::ostringstream text;
  text << "an update takes " << milliseconds(update_s) << " of memory at " << std::setprecision(3)
       << rates.local / 1e9 << " GB/s; storing to " << costs.world_size - 1
       << (costs.world_size == 2 ? " peer" : " peers") << " takes " << milliseconds(row_s)
       << " of the link at " << rates.to_peer / 1e9 << " GB/s for row planes, " << milliseconds(all_s)
       << " for all";
  plan.reason = text.str();
  return plan;
}

GatherPlan plan_gather(const Layout& layout, const Config& config, Communicator& comm) {
  const ParallelConfig& parallel = config.parallel;
  if (parallel.gather == GatherChoice::kCollective) return {false, false, "as configured"};
  // validate() refuses kDirect with this format.
  if (parallel.gather_format == GatherFormat::kBf16) return {false, false, "parallel.gather_format is bf16"};
  if (comm.size() - 1 > PeerStores::kMostPeers) {
    return without_window(parallel.gather, "a rank stores to " + std::to_string(PeerStores::kMostPeers) +
                                               " peers at most, and the group has " +
                                               std::to_string(comm.size()) + " ranks");
  }
  if (parallel.gather == GatherChoice::kDirect) return {true, true, "as configured"};
  if (comm.size() == 1) return cheaper_gather(gather_costs(layout, config.optimizer.grad_dtype), {});
  return cheaper_gather(gather_costs(layout, config.optimizer.grad_dtype), comm.measure_copy_rates());
}

GatherPlan without_window(GatherChoice choice, const std::string& reason) {
  if (choice == GatherChoice::kDirect) {
    throw ConfigError("`parallel.gather` is direct, but the ranks can not store into each other's memory: " +
                      reason + "; allowed: auto, collective");
  }
  return {false, false, reason};
}

}  // namespace mxopt
