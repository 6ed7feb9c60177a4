// Steps with gradients whose sums over ranks are not exact, so that order and type of the sum can be seen.
#pragma once

#include <cmath>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "support/exact_inputs.h"
#include "support/optimizer_fixture.h"

namespace mxopt::test {

/// Full mantissas of many magnitudes, others on every rank.
inline std::vector<float> inexact_grad(std::string_view name, std::int64_t elems, int step, int rank) {
  std::vector<float> values;
  values.reserve(static_cast<std::size_t>(elems));
  const std::uint64_t seed = name_seed(name) + 31 * static_cast<std::uint64_t>(step);
  for (std::int64_t i = 0; i < elems; ++i) {
    const std::uint64_t bits = mix(seed, rank, i);
    const auto mantissa = static_cast<float>(static_cast<std::int64_t>(bits >> 39) - (std::int64_t{1} << 24));
    values.push_back(std::ldexp(mantissa, -30 - static_cast<int>(bits % 9)));
  }
  return values;
}

/// The facts after three steps of the scenario's params and configuration with such gradients.
/// comm    a host transport, for the messages of the test, and of the optimizer on the host.
/// over    on a device: what carries the optimizer's bytes; null: `comm`, through host memory.
inline Facts run_inexact(Communicator& comm, const Scenario& scenario, Device device = {},
                         Communicator* over = nullptr) {
  const std::unique_ptr<Communicator> side = comm.split(0, comm.rank());
  const Stream stream(device);
  const Place place{device, stream.ref()};
  DeviceOverHost staged(comm, device);
  Communicator& device_comm = over != nullptr ? *over : static_cast<Communicator&>(staged);
  DistributedAdam opt(scenario.specs, scenario.config, device.kind == DeviceKind::kHost ? comm : device_comm,
                      device);
  set_all_initial(opt, scenario.specs, comm.rank(), place.stream);
  opt.publish(place.stream);
  Facts facts;
  for (int step = 0; step < 3; ++step) {
    opt.begin_backward();
    for (auto s = scenario.specs.rbegin(); s != scenario.specs.rend(); ++s) {
      if (s->frozen) continue;
      opt.wait_param(s->name, Plane::kRow, place.stream);
      if (s->tied_to.empty()) {
        const HostView grad(place.device, place.stream, opt.grad(s->name).data);
        write_values(grad.span(), inexact_grad(s->name, grad.span().elems, step, comm.rank()));
        grad.store();
      }
      opt.grad_ready(s->name, place.stream);
    }
    add_record_facts(facts, *opt.step(place.stream), "step " + std::to_string(step) + ": ");
  }
  for (Fact& fact : state_facts(opt, *side, "", place)) facts.push_back(std::move(fact));
  return facts;
}

}  // namespace mxopt::test
