#include "train_gpt/compute_device.h"

#include <algorithm>
#include <string>

#include <c10/core/Stream.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "mxopt/params/check.h"

namespace train_gpt {

bool has_cuda_tensors() {
  // There when the tensor library's CUDA part is loaded; find_torch.cmake loads it only beside the CUDA
  // backend.
  return c10::impl::hasDeviceGuardImpl(c10::DeviceType::CUDA);
}

mxopt::Device compute_device(const mxopt::ParallelConfig& parallel, const mxopt::ConfigSchema& schema,
                             int node_rank) {
  if (parallel.device == mxopt::DeviceChoice::kAuto && !has_cuda_tensors()) return {};
  const int devices = std::max(1, mxopt::device_count(mxopt::DeviceKind::kCuda));
  try {
    return mxopt::resolved_device(parallel, node_rank % devices);
  } catch (const mxopt::ConfigError& error) {
    throw mxopt::ConfigError(schema.origin("parallel.device") + ": " + error.what());
  }
}

void use_device(mxopt::Device device) {
  if (device.kind == mxopt::DeviceKind::kHost) return;
  const c10::Device place = tensor_device(device);
  c10::impl::VirtualGuardImpl(place.type()).setDevice(place);
}

c10::Device tensor_device(mxopt::Device device) {
  if (device.kind == mxopt::DeviceKind::kHost) return {c10::DeviceType::CPU};
  return {c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(device.index)};
}

mxopt::StreamRef tensor_stream(mxopt::Device device) {
  if (device.kind == mxopt::DeviceKind::kHost) return {};
  // The tensor library computes on its default stream, which is CUDA's legacy default stream, unless a
  // program chooses another one; this one does not. Why not ask for the handle: that takes the headers of the
  // tensor library's CUDA part and the CUDA runtime's, which a libtorch without CUDA does not have.
  const c10::Device place = tensor_device(device);
  const c10::Stream current = c10::impl::VirtualGuardImpl(place.type()).getStream(place);
  MXOPT_CHECK(current == c10::Stream(c10::Stream::DEFAULT, place),
              "tensors on " << place.str() << " compute on stream " << current.id()
                            << "; expected the default stream");
  return mxopt::StreamRef();
}

}  // namespace train_gpt
