#include "mxopt/collectives/communicator.h"

#include <limits>

#include "mxopt/params/check.h"

namespace mxopt {

namespace {

void check_span(std::string_view operation, std::string_view name, ConstTypedSpan span) {
  MXOPT_CHECK(span.elems >= 0, operation << ": " << name << " has " << span.elems << " elements");
  MXOPT_CHECK(span.elems == 0 || span.data != nullptr,
              operation << ": " << name << " has " << span.elems << " elements and a null pointer");
}

void check_op(std::string_view operation, ReduceOp op, DType dtype) {
  const bool is_float = dtype == DType::kFp32 || dtype == DType::kBf16;
  const bool allowed = op == ReduceOp::kMax   ? dtype == DType::kUint8
                       : op == ReduceOp::kSum ? is_float || dtype == DType::kInt64
                                              : is_float;
  MXOPT_CHECK(allowed, operation << ": " << op_name(op) << " of " << dtype_name(dtype)
                                 << " is not defined; allowed are sum of fp32, bf16 and int64, avg of fp32 "
                                    "and bf16, max of uint8");
}

/// `whole` is size shards long; `shard` is outside of it or exactly the rank's own range.
void check_shard(std::string_view operation, std::string_view whole_name, ConstTypedSpan whole,
                 ConstTypedSpan shard, int rank, int size) {
  check_span(operation, "shard", shard);
  check_span(operation, whole_name, whole);
  MXOPT_CHECK(shard.dtype == whole.dtype, operation << ": shard is " << dtype_name(shard.dtype) << ", "
                                                    << whole_name << " is " << dtype_name(whole.dtype));
  MXOPT_CHECK(
      shard.elems <= std::numeric_limits<std::int64_t>::max() / 8 / size && whole.elems == shard.elems * size,
      operation << ": " << whole_name << " has " << whole.elems << " elements, expected " << size
                << " ranks * " << shard.elems << " of the shard");
  if (shard.elems == 0) return;
  const auto own = reinterpret_cast<std::uintptr_t>(whole.byte_data() + rank * shard.bytes());
  const auto begin = reinterpret_cast<std::uintptr_t>(whole.data);
  const auto at = reinterpret_cast<std::uintptr_t>(shard.data);
  const auto shard_bytes = static_cast<std::uintptr_t>(shard.bytes());
  const auto whole_bytes = static_cast<std::uintptr_t>(whole.bytes());
  const bool outside = at + shard_bytes <= begin || begin + whole_bytes <= at;
  MXOPT_CHECK(outside || at == own, operation << ": shard of rank " << rank << " overlaps " << whole_name
                                              << " but is not its range [" << rank * shard.elems << ", "
                                              << (rank + 1) * shard.elems << ")");
}

}  // namespace

std::string_view op_name(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
      return "sum";
    case ReduceOp::kAvg:
      return "avg";
    case ReduceOp::kMax:
      return "max";
  }
  return "?";
}

std::string_view traffic_name(Traffic traffic) {
  switch (traffic) {
    case Traffic::kGradient:
      return "gradient";
    case Traffic::kStatistics:
      return "statistics";
    case Traffic::kScales:
      return "scales";
    case Traffic::kPlanes:
      return "planes";
    case Traffic::kPlain:
      return "plain";
    case Traffic::kHighPrecision:
      return "high precision";
    case Traffic::kControl:
      return "control";
  }
  return "?";
}

std::string Communicator::Call::signature() const {
  std::string text(operation);
  if (operation == "barrier" || operation == "split" || operation == "init" || operation == "close") {
    return text + "()";
  }
  text += "(";
  if (operation == "all_reduce" || operation == "reduce_scatter") text += std::string(op_name(op)) + ", ";
  if (operation == "broadcast") text += "root " + std::to_string(root) + ", ";
  text += std::string(dtype_name(dtype)) + " x " + std::to_string(elems) + ", ";
  return text + std::string(traffic_name(traffic)) + ")";
}

Work Communicator::all_reduce(TypedSpan buffer, ReduceOp op, Traffic traffic, StreamRef stream) {
  check_span("all_reduce", "buffer", buffer);
  check_op("all_reduce", op, buffer.dtype);
  const Call call{.sequence = next_sequence(),
                  .operation = "all_reduce",
                  .dtype = buffer.dtype,
                  .elems = buffer.elems,
                  .op = op,
                  .traffic = traffic,
                  .stream = stream};
  return do_all_reduce(call, buffer.data);
}

Work Communicator::reduce_scatter(TypedSpan shard, TypedSpan input, ReduceOp op, Traffic traffic,
                                  StreamRef stream) {
  check_shard("reduce_scatter", "input", input, shard, rank(), size());
  check_op("reduce_scatter", op, shard.dtype);
  const Call call{.sequence = next_sequence(),
                  .operation = "reduce_scatter",
                  .dtype = shard.dtype,
                  .elems = shard.elems,
                  .op = op,
                  .traffic = traffic,
                  .stream = stream};
  return do_reduce_scatter(call, shard.data, input.data);
}

Work Communicator::all_gather(TypedSpan output, ConstTypedSpan shard, Traffic traffic, StreamRef stream) {
  check_shard("all_gather", "output", output, shard, rank(), size());
  const Call call{.sequence = next_sequence(),
                  .operation = "all_gather",
                  .dtype = shard.dtype,
                  .elems = shard.elems,
                  .traffic = traffic,
                  .stream = stream};
  return do_all_gather(call, output.data, shard.data);
}

Work Communicator::all_to_all(TypedSpan output, ConstTypedSpan input, Traffic traffic, StreamRef stream) {
  check_span("all_to_all", "output", output);
  check_span("all_to_all", "input", input);
  MXOPT_CHECK(input.dtype == output.dtype, "all_to_all: input is " << dtype_name(input.dtype)
                                                                   << ", output is "
                                                                   << dtype_name(output.dtype));
  MXOPT_CHECK(input.elems == output.elems && input.elems % size() == 0,
              "all_to_all: input has " << input.elems << " elements, output has " << output.elems
                                       << "; expected the same multiple of " << size() << " ranks");
  const auto in = reinterpret_cast<std::uintptr_t>(input.data);
  const auto out = reinterpret_cast<std::uintptr_t>(output.data);
  const auto bytes = static_cast<std::uintptr_t>(input.bytes());
  MXOPT_CHECK(bytes == 0 || in + bytes <= out || out + bytes <= in, "all_to_all: input overlaps output");
  const Call call{.sequence = next_sequence(),
                  .operation = "all_to_all",
                  .dtype = input.dtype,
                  .elems = input.elems / size(),
                  .traffic = traffic,
                  .stream = stream};
  return do_all_to_all(call, output.data, input.data);
}

Work Communicator::broadcast(TypedSpan buffer, int root, Traffic traffic, StreamRef stream) {
  check_span("broadcast", "buffer", buffer);
  MXOPT_CHECK(root >= 0 && root < size(), "broadcast: root " << root << " of " << size() << " ranks");
  const Call call{.sequence = next_sequence(),
                  .operation = "broadcast",
                  .dtype = buffer.dtype,
                  .elems = buffer.elems,
                  .root = root,
                  .traffic = traffic,
                  .stream = stream};
  return do_broadcast(call, buffer.data);
}

void Communicator::barrier() {
  do_barrier({.sequence = next_sequence(), .operation = "barrier", .stream = {}});
}

}  // namespace mxopt
