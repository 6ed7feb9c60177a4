// From a layout to the rows that a rank's step kernels walk.
#pragma once

#include <span>

#include "mxopt/optimizer/param_sync.h"
#include "mxopt/optimizer/step_kernels.h"
#include "mxopt/params/layout.h"
#include "mxopt/params/storage.h"

namespace mxopt {

/// One row for each segment of `rank`, in order.
///
/// group_of  [params] index of the param's group of hyper-parameters.
/// norm_of   [params] the norm that its gradients are in, see SegmentRow; empty: all in the common one.
/// The pointers are those of `storage`, and of the staging of `sync` where writeback goes there.
StepTables make_step_tables(const Layout& layout, const ParamStorage& storage, const ParamSync& sync,
                            std::span<const int> group_of, int rank, std::span<const int> norm_of = {});

}  // namespace mxopt
