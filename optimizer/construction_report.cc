#include "mxopt/optimizer/construction_report.h"

#include <iomanip>
#include <sstream>

namespace mxopt {

namespace {

std::string mebibytes(std::int64_t bytes) {
  std::ostringstream text;
  text << std::fixed << std::setprecision(2) << static_cast<double>(bytes) / (1 << 20) << " MiB";
  return text.str();
}

std::string reduction_text(const ConstructionReport& report) {
  switch (report.grad_reduce) {
    case GradReduce::kAverage:
      return "divided by " + std::to_string(report.average_divisor) +
             (report.averages_in_reduction ? " in the reduction" : " in the update");
    case GradReduce::kSum:
      return "summed over ranks";
    case GradReduce::kTokens:
      return "summed over ranks, and divided by the tokens of the step in the update";
  }
  return "?";
}

}  // namespace

ConstructionReport make_report(const Layout& layout, const ParallelGroups& ranks,
                               const OptimizerConfig& optimizer) {
  ConstructionReport report;
  report.communicator = ranks.data->describe();
  report.replicas = ranks.replica_count();
  report.world_size = layout.world_size();
  report.params = static_cast<std::int64_t>(layout.params().size());
  report.buckets = static_cast<std::int64_t>(layout.buckets().size());
  for (const ParamLayout& param : layout.params()) {
    if (param.tied_to < 0) report.elems += param.elems();
    if (!param.fallback_reason.empty()) {
      report.fallbacks.push_back("param '" + param.name + "' (shape " + shape_text(param.shape) +
                                 "): " + param.fallback_reason);
    }
  }
  report.bytes = layout.byte_counts(optimizer.grad_dtype);
  report.cut = layout.cut_share();
  report.average_divisor = optimizer.grad_reduce == GradReduce::kAverage ? ranks.ranks_of_mean() : 1;
  report.averages_in_reduction = ranks.averages_in_reduction();
  report.grad_reduce = optimizer.grad_reduce;
  report.layout_digest = layout.digest();
  return report;
}

std::string ConstructionReport::text() const {
  std::ostringstream out;
  out << communicator;
  if (replicas > 1) out << ", in " << replicas << " replicas";
  out << "; " << params << " params, " << elems << " elements, " << buckets << " buckets, layout digest "
      << std::hex << layout_digest << std::dec << '\n';
  out << "memory of this rank: " << mebibytes(bytes.total() + gather_staging_bytes + grad_staging_bytes)
      << " = row planes " << mebibytes(bytes.row_plane) << ", column planes " << mebibytes(bytes.column_plane)
      << ", scales " << mebibytes(bytes.scales) << ", bf16 and fp32 params "
      << mebibytes(bytes.bf16_values + bytes.fp32_values) << ", gradients " << mebibytes(bytes.gradients)
      << ", master shards " << mebibytes(bytes.master) << ", moments "
      << mebibytes(bytes.exp_avg + bytes.exp_avg_sq) << ", gather staging " << mebibytes(gather_staging_bytes)
      << ", gradient staging " << mebibytes(grad_staging_bytes) << '\n';
  out << "cut bands: " << cut.cut_bands << ", " << std::fixed << std::setprecision(2) << 100 * cut.mean
      << " % of the column-plane elements (worst rank " << 100 * cut.worst_rank << " %); gradients are "
      << reduction_text(*this);
  if (!gather.empty()) out << "\ngather: " << gather;
  for (const std::string& line : fallbacks) out << "\nkept in bf16: " << line;
  return out.str();
}

}  // namespace mxopt
