#include "mxopt/optimizer/plan.h"

#include <exception>
#include <optional>
#include <sstream>
#include <string>
#include <utility>

#include "mxopt/optimizer/agreement.h"
#include "mxopt/optimizer/config_schema.h"

namespace mxopt {

namespace {

Plan make_plan(std::vector<ParamSpec> specs, const Config& config, const Communicator& comm, Device device) {
  validate(config);
  const ParallelConfig& parallel = config.parallel;
  if (parallel.world_size != 0 && parallel.world_size != comm.size()) {
    throw ConfigError("parallel.world_size is " + std::to_string(parallel.world_size) +
                      ", but the communicator has " + std::to_string(comm.size()) + " ranks");
  }
  if (parallel.transport == Transport::kSelf && comm.size() != 1) {
    throw ConfigError("parallel.transport is self, but the communicator has " + std::to_string(comm.size()) +
                      " ranks");
  }
  const bool is_host = device.kind == DeviceKind::kHost;
  if ((parallel.device == DeviceChoice::kHost && !is_host) ||
      (parallel.device == DeviceChoice::kCuda && is_host)) {
    throw ConfigError(std::string("parallel.device is ") + (is_host ? "cuda" : "host") +
                      ", but the optimizer was made on " + (is_host ? "the host" : "a CUDA device"));
  }
  if (comm.device() != device) {
    throw ConfigError("the communicator (" + comm.describe() +
                      ") does not move bytes of the optimizer's device");
  }
  LayoutOptions options;
  options.world_size = comm.size();
  options.bucket_elems = config.optimizer.bucket_elems;
  options.default_format = config.precision.weights;
  options.default_storage = resolved_storage(config.precision);
  options.fallback = config.precision.fallback;
  Layout layout(std::move(specs), options);
  ParamGroups groups = make_param_groups(config, layout.params());
  return {std::move(layout), std::move(groups)};
}

/// The configuration as lines of "key: value", without the origins.
std::string configuration_text(Config config) {
  ConfigSchema schema;
  describe(schema, config);
  std::istringstream lines(schema.to_yaml());
  std::string text;
  for (std::string line; std::getline(lines, line);) text += line.substr(0, line.rfind("  # ")) + '\n';
  return text;
}

}  // namespace

Plan make_agreed_plan(std::vector<ParamSpec> specs, const Config& config, Communicator& comm, Device device) {
  std::optional<Plan> plan;
  std::string problem;
  std::exception_ptr failure;
  try {
    plan.emplace(make_plan(std::move(specs), config, comm, device));
  } catch (const std::exception& error) {
    problem = error.what();
    failure = std::current_exception();
  }
  const LayoutField status[] = {{"library_version", MXOPT_VERSION}, {"problems", problem}};
  require_agreement(comm, status);
  if (failure) std::rethrow_exception(failure);
  std::vector<LayoutField> fields = plan->layout.fields();
  fields.push_back({"configuration", configuration_text(config)});
  require_agreement(comm, fields);
  return std::move(*plan);
}

}  // namespace mxopt
