// The CUDA mode of writeback_bench.
#pragma once

namespace mxopt::bench {

/// Runs the batch writeback on CUDA device 0; options are those of writeback_bench.
void run_writeback_on_cuda(int argc, char** argv);

}  // namespace mxopt::bench
