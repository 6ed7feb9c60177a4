#include "mxopt/optimizer/step_tables.h"

namespace mxopt {

StepTables make_step_tables(const Layout& layout, const ParamStorage& storage, const ParamSync& sync,
                            std::span<const int> group_of, int rank, std::span<const int> norm_of) {
  StepTables tables;
  tables.grad_dtype = storage.grad_dtype();
  tables.peers = sync.peers();
  tables.staged_codes = sync.staged_codes();
  tables.cut_bands = sync.cut_band_rows();
  tables.trainable_cut_bands = sync.trainable_cut_bands();
  for (const Segment& segment : layout.segments(rank)) {
    const ParamLayout& param = layout.param(segment.param);
    const std::int64_t offset = segment.bucket_begin - layout.shard_begin(segment.bucket, rank);
    SegmentRow row;
    row.elems = segment.elems;
    row.param_begin = segment.param_begin;
    row.master = storage.master(segment.bucket) + offset;
    row.status = sync.status().data() + segment.param;
    row.group = group_of[static_cast<std::size_t>(segment.param)];
    row.norm = norm_of.empty() ? 0 : norm_of[static_cast<std::size_t>(segment.param)];
    row.param = segment.param;
    if (!param.family.frozen) {
      row.exp_avg = storage.exp_avg(segment.bucket) + offset;
      row.exp_avg_sq = storage.exp_avg_sq(segment.bucket) + offset;
      row.grad = storage.gradients(segment.bucket).sub(segment.bucket_begin, segment.elems).data;
    }
    if (Bf16* staging = sync.staging(segment.param)) {
      row.values = staging;
    } else if (param.family.format == ParamFormat::kMxfp8) {
      row.planes = sync.planes(segment.param);
    } else {
      const TypedSpan values = storage.values(segment.bucket).sub(param.bucket_begin, param.elems());
      row.values = values.data;
      row.values_dtype = values.dtype;
    }
    tables.segments.push_back(row);
    if (tables.staged_codes == nullptr) continue;
    std::array<std::int64_t, 2> codes = {-1, -1};
    if (param.family.has_column() && segment.elems > 0) {
      const std::int64_t band_elems = kBlockElems * param.cols;
      codes = {sync.codes_of(segment.param, segment.param_begin / band_elems),
               sync.codes_of(segment.param, (segment.param_begin + segment.elems - 1) / band_elems)};
    }
    tables.codes_of_segment.push_back(codes);
  }
  return tables;
}

}  // namespace mxopt
