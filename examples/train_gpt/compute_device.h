// Where a rank's model computes: the host, or a GPU of its own.
#pragma once

#include <c10/core/Device.h>

#include "mxopt/optimizer/config.h"
#include "mxopt/optimizer/config_schema.h"
#include "mxopt/params/memory.h"

namespace train_gpt {

/// Whether this program was built for GPUs: the library and the tensor library both have CUDA.
bool has_cuda_tensors();

/// The device that parallel.device stands for. auto: a GPU where this process sees one and
/// has_cuda_tensors(), else the host.
///
/// node_rank  this rank's number on its node. GPUs are taken in turn, so that a launcher may show each rank
///            its own only. Ranks that share a GPU are refused later, by NCCL's communicator.
/// Throws     ConfigError with the origin of parallel.device when cuda was asked for and can not be had.
mxopt::Device compute_device(const mxopt::ParallelConfig& parallel, const mxopt::ConfigSchema& schema,
                             int node_rank);

/// Makes `device` this thread's current GPU. Without that every rank of a node would also hold memory of its
/// first GPU, where the runtime goes back to after each call for another one.
void use_device(mxopt::Device device);

/// The same device in the tensor library's words.
c10::Device tensor_device(mxopt::Device device);

/// The stream on which this thread's tensor operations on `device` run.
mxopt::StreamRef tensor_stream(mxopt::Device device);

}  // namespace train_gpt
