// From the ranks' gradients to the one that the update sees: mean, sum, division by tokens, micro-batches,
// params that are used several times or not at all. The oracle is an Adam over the whole batch on one array.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "support/devices.h"
#include "support/inexact_gradients.h"
#include "support/optimizer_fixture.h"
#include "support/reference_adam.h"
#include "support/thrown_message.h"

namespace mxopt {
namespace {

using test::bits_equal;
using test::contains;
using test::Place;
using test::run_ranks;
using test::same_facts;
using test::spec;
using test::thrown_message;

const int kWorldSizes[] = {1, 2, 3, 4, 7};
const char* const kNames[] = {"first", "second"};

class Gradients : public ::testing::TestWithParam<DeviceKind> {
 protected:
  void SetUp() override { MXOPT_SKIP_WITHOUT(device()); }
  Device device() const { return {GetParam(), 0}; }
};
INSTANTIATE_TEST_SUITE_P(Devices, Gradients, ::testing::ValuesIn(test::built_device_kinds()),
                         [](const auto& kind) { return test::device_kind_name(kind.param); });

/// All params have two dimensions, so all decay alike.
std::vector<ParamSpec> two_params(GradMode mode = GradMode::kAccumulate) {
  std::vector<ParamSpec> specs = {spec("first", {64, 96}, ParamFormat::kMxfp8, Storage::kBoth),
                                  spec("second", {9, 37}, ParamFormat::kFp32)};
  for (ParamSpec& s : specs) s.grad_mode = mode;
  return specs;
}

/// Without clipping and loss scale, and with buckets of one param each.
Config plain_config(GradReduce reduce = GradReduce::kAverage, DType dtype = DType::kFp32) {
  Config config;
  config.optimizer.grad_reduce = reduce;
  config.optimizer.grad_dtype = dtype;
  config.optimizer.clip_grad = 0;
  config.optimizer.bucket_elems = 128;
  return config;
}

/// Gradient of the loss of one sample: small integers, whose sums over a batch are exact in bf16 too.
std::vector<float> sample_grad(const std::string& name, std::int64_t elems, int step, int sample) {
  std::vector<float> values;
  const std::uint64_t seed = test::name_seed(name) + static_cast<std::uint64_t>(step);
  for (std::int64_t i = 0; i < elems; ++i) {
    values.push_back(static_cast<float>(static_cast<int>(test::mix(seed, sample, i) % 17) - 8));
  }
  return values;
}

/// The whole batch in one array.
std::vector<float> batch_grad(const std::string& name, std::int64_t elems, int step, int samples) {
  std::vector<float> sum(static_cast<std::size_t>(elems), 0.0f);
  for (int sample = 0; sample < samples; ++sample) {
    const std::vector<float> values = sample_grad(name, elems, step, sample);
    for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += values[i];
  }
  return sum;
}

/// One optimizer of a group, on the host or a device, with `two_params`.
struct Trainer {
  Trainer(Communicator& group, Device device, const Config& config, std::vector<ParamSpec> specs)
      : side(group.split(0, group.rank())),
        stream(device),
        place{device, stream.ref()},
        staged(group, device),
        alone(device),
        opt(specs, config, pick(group), device) {
    test::set_all_initial(opt, specs, 0, place.stream);
    opt.publish(place.stream);
  }

  Communicator& pick(Communicator& group) {
    if (place.device.kind == DeviceKind::kHost) return group;
    return group.size() == 1 ? static_cast<Communicator&>(alone) : staged;
  }

  std::int64_t elems(const std::string& name) const {
    return opt.layout().param(opt.layout().find(name)).elems();
  }

  void add(const std::string& name, std::span<const float> values, float factor = 1) {
    opt.wait_param(name, Plane::kRow, place.stream);  // the old gradient is zeroed by then
    const test::HostView grad(place.device, place.stream, opt.grad(name).data);
    test::add_values(grad.span(), values, factor);
    grad.store();
  }
  void write(const std::string& name, std::span<const float> values, float factor = 1) {
    opt.wait_param(name, Plane::kRow, place.stream);  // the old gradient is zeroed by then
    const test::HostView grad(place.device, place.stream, opt.grad(name).data);
    test::write_values(grad.span(), values, factor);
    grad.store();
  }
  void ready(const std::string& name) { opt.grad_ready(name, place.stream); }
  StepReport step() { return opt.step(place.stream); }

  /// Collective.
  std::vector<float> master(const std::string& name) {
    const OwnedSlice slice = opt.owned(name);
    const test::HostView view(place.device, place.stream, slice.master);
    return test::whole_state(*side, elems(name), slice.param_begin, view.span().as<float>());
  }

  std::unique_ptr<Communicator> side;
  Stream stream;
  Place place;
  test::DeviceOverHost staged;
  SelfCommunicator alone;
  DistributedAdam opt;
};

void on_ranks(int size, Device device, const Config& config, const std::vector<ParamSpec>& specs,
              const std::function<void(Trainer&)>& body) {
  run_ranks(size, [&](Communicator& group) {
    Trainer trainer(group, device, config, specs);
    body(trainer);
  });
}

/// What the masters should be after steps with the given gradients of the whole batch.
class Expected {
 public:
  explicit Expected(const Trainer& trainer) {
    for (std::size_t i = 0; i < states_.size(); ++i) {
      states_[i] = reference::AdamState<float>(test::initial_values(kNames[i], trainer.elems(kNames[i])));
    }
  }

  /// grad_of(name, elems)
  template <class Grad>
  void step(const Grad& grad_of, double grad_factor = 1) {
    reference::AdamSettings settings;
    settings.grad_factor = static_cast<double>(static_cast<float>(grad_factor));
    ++steps_;
    for (std::size_t i = 0; i < states_.size(); ++i) {
      const std::vector<float> grad = grad_of(kNames[i], static_cast<std::int64_t>(states_[i].p.size()));
      reference::adam_step(states_[i], grad, settings, steps_);
    }
  }

  /// Collective.
  void compare(Trainer& trainer) const {
    for (std::size_t i = 0; i < states_.size(); ++i) {
      EXPECT_TRUE(bits_equal(states_[i].p, trainer.master(kNames[i]))) << kNames[i];
    }
  }

 private:
  std::array<reference::AdamState<float>, 2> states_{reference::AdamState<float>({}),
                                                     reference::AdamState<float>({})};
  std::int64_t steps_ = 0;
};

TEST_P(Gradients, AreTheMeanOrTheSumOfTheRanks) {
  for (const GradReduce reduce : {GradReduce::kAverage, GradReduce::kSum}) {
    for (const DType dtype : {DType::kFp32, DType::kBf16}) {
      for (const int size : kWorldSizes) {
        SCOPED_TRACE("W " + std::to_string(size));
        on_ranks(size, device(), plain_config(reduce, dtype), two_params(), [&](Trainer& trainer) {
          Expected expected(trainer);
          for (int step = 0; step < 3; ++step) {
            for (const char* name : kNames) {
              trainer.write(name, sample_grad(name, trainer.elems(name), step, trainer.side->rank()));
              trainer.ready(name);
            }
            const StepReport report = trainer.step();
            ASSERT_TRUE(report->taken);
            EXPECT_EQ(report->tokens, 0);
            expected.step([&](const char* name, std::int64_t elems) {
              std::vector<float> grad = batch_grad(name, elems, step, size);
              if (reduce == GradReduce::kSum) return grad;
              for (float& value : grad) value /= static_cast<float>(size);
              if (dtype == DType::kBf16) std::ranges::transform(grad, grad.begin(), reference::bf16);
              return grad;
            });
          }
          expected.compare(trainer);
        });
      }
    }
  }
}

/// A batch of 12 samples of 3, 4, 5 ... tokens, spread over ranks and two micro-batches; rank 0 of several
/// has no sample at all.
constexpr int kSamples = 12;
std::int64_t tokens_of(int sample) {
  return 3 + sample;
}
constexpr std::int64_t kBatchTokens = 3 * kSamples + kSamples * (kSamples - 1) / 2;

void feed_batch(Trainer& trainer, int step, float scale) {
  const int size = trainer.side->size(), rank = trainer.side->rank();
  for (const bool last : {false, true}) {
    trainer.opt.begin_backward(last);
    for (int sample = 0; sample < kSamples; ++sample) {
      const int owner = size == 1 ? 0 : 1 + sample % (size - 1);
      if (owner != rank || last != (sample >= kSamples / 2)) continue;
      for (const char* name : kNames) {
        trainer.add(name, sample_grad(name, trainer.elems(name), step, sample), scale);
      }
      trainer.opt.add_tokens(tokens_of(sample), trainer.place.stream);
    }
    for (const char* name : kNames) trainer.ready(name);
  }
  trainer.opt.add_tokens(0, trainer.place.stream);
}

TEST_P(Gradients, OfABatchAreDividedByItsTokensHoweverItIsSpread) {
  for (const bool clips : {false, true}) {
    for (const double scale : {1.0, 1024.0}) {
      for (const int size : kWorldSizes) {
        SCOPED_TRACE("W " + std::to_string(size));
        Config config = plain_config(GradReduce::kTokens);
        config.optimizer.clip_grad = clips ? 4.0 : 0.0;
        config.optimizer.loss_scale.kind = LossScaleKind::kStatic;
        config.optimizer.loss_scale.initial = scale;
        on_ranks(size, device(), config, two_params(), [&](Trainer& trainer) {
          Expected expected(trainer);
          for (int step = 0; step < 3; ++step) {
            feed_batch(trainer, step, static_cast<float>(scale));
            const StepReport report = trainer.step();
            ASSERT_TRUE(report->taken);
            EXPECT_EQ(report->tokens, kBatchTokens);
            double squares = 0;  // an integer, so exact
            for (const char* name : kNames) {
              for (const float value : batch_grad(name, trainer.elems(name), step, kSamples)) {
                squares += static_cast<double>(value) * static_cast<double>(value);
              }
            }
            const double norm = std::sqrt(squares) / static_cast<double>(kBatchTokens);
            const double clip = clips ? std::min(1.0, 4.0 / (norm + 1e-6)) : 1.0;
            EXPECT_EQ(report->grad_norm, norm);
            EXPECT_EQ(report->clip_factor, static_cast<float>(clip));
            // A loss scale that is a power of two changes no bit.
            expected.step(
                [&](const char* name, std::int64_t elems) { return batch_grad(name, elems, step, kSamples); },
                clip / static_cast<double>(kBatchTokens));
          }
          expected.compare(trainer);
        });
      }
    }
  }
}

TEST_P(Gradients, OfASkippedStepTakeTheirTokensAlong) {
  for (const int size : {1, 3}) {
    on_ranks(size, device(), plain_config(GradReduce::kTokens), two_params(), [&](Trainer& trainer) {
      const std::vector<float> bad(static_cast<std::size_t>(trainer.elems("first")),
                                   std::numeric_limits<float>::infinity());
      if (trainer.side->rank() == 0) trainer.write("first", bad);
      trainer.opt.add_tokens(1000, trainer.place.stream);
      const StepReport skipped = trainer.step();
      EXPECT_FALSE(skipped->taken);
      EXPECT_EQ(skipped->tokens, 1000 * size);
      Expected expected(trainer);
      feed_batch(trainer, 0, 1);
      EXPECT_EQ(trainer.step()->tokens, kBatchTokens);
      expected.step(
          [&](const char* name, std::int64_t elems) { return batch_grad(name, elems, 0, kSamples); },
          1.0 / static_cast<double>(kBatchTokens));
      expected.compare(trainer);
    });
  }
}

TEST_P(Gradients, OfNoTokensAreNotDivided) {
  for (const int size : kWorldSizes) {
    on_ranks(size, device(), plain_config(GradReduce::kTokens), two_params(), [&](Trainer& trainer) {
      Expected expected(trainer);
      trainer.opt.add_tokens(0, trainer.place.stream);
      const StepReport report = trainer.step();
      EXPECT_TRUE(report->taken);
      EXPECT_EQ(report->tokens, 0);
      EXPECT_EQ(report->grad_norm, 0);
      expected.step([](const char*, std::int64_t elems) {
        return std::vector<float>(static_cast<std::size_t>(elems), 0.0f);
      });
      expected.compare(trainer);
    });
  }
}

TEST_P(Gradients, OfNoTokensAreRefusedWhereTheyAreNotZero) {
  on_ranks(2, device(), plain_config(GradReduce::kTokens), two_params(), [&](Trainer& trainer) {
    trainer.write("first", std::vector<float>(static_cast<std::size_t>(trainer.elems("first")), 0.5f));
    trainer.opt.add_tokens(0, trainer.place.stream);
    EXPECT_TRUE(contains(thrown_message<ContractError>([&] { *trainer.step(); }),
                         "gradients are not zero, but no rank has counted a token"));
    EXPECT_EQ(trainer.opt.steps_taken(), 0);
  });
}

TEST_P(Gradients, TokensMayBeCountedInTheMemoryOfTheDevice) {
  for (const int size : kWorldSizes) {
    on_ranks(size, device(), plain_config(GradReduce::kTokens), two_params(), [&](Trainer& trainer) {
      const Buffer memory(8, device(), default_allocator(device()));
      const std::span<const std::int64_t> counter = memory.as<std::int64_t>();
      std::int64_t total = 0;
      for (int step = 0; step < 3; ++step) {
        // 40 bits, so that nothing shorter would do.
        const std::int64_t mine = (std::int64_t{1} << 40) + 100 * step + trainer.side->rank();
        copy_bytes(memory.data(), &mine, 8, device(), trainer.place.stream);
        trainer.opt.add_tokens(counter, trainer.place.stream);
        trainer.opt.add_tokens(5, trainer.place.stream);
        total = size * ((std::int64_t{1} << 40) + 100 * step + 5) + size * (size - 1) / 2;
        EXPECT_EQ(trainer.step()->tokens, total);
      }
    });
  }
}

TEST_P(Gradients, TokensThatMakeNoSenseAreRefused) {
  SelfCommunicator group;
  {
    Trainer trainer(group, device(), plain_config(GradReduce::kSum), two_params());
    EXPECT_TRUE(
        contains(thrown_message<ContractError>([&] { trainer.opt.add_tokens(3, trainer.place.stream); }),
                 "add_tokens: gradients are not divided by tokens; allowed with "
                 "optimizer.grad_reduce tokens"));
  }
  Trainer trainer(group, device(), plain_config(GradReduce::kTokens), two_params());
  const StreamRef stream = trainer.place.stream;
  EXPECT_TRUE(contains(thrown_message<ContractError>([&] { trainer.opt.add_tokens(-1, stream); }),
                       "add_tokens: -1; allowed is 0 or more"));
  const Buffer memory(16, device(), default_allocator(device()));
  const std::span<const std::int64_t> two = memory.as<std::int64_t>();
  EXPECT_TRUE(contains(thrown_message<ContractError>([&] { trainer.opt.add_tokens(two, stream); }),
                       "add_tokens: 2 numbers; allowed is 1"));
  const char* const missing = "this rank called add_tokens() not once since the last step";
  EXPECT_TRUE(contains(thrown_message<ContractError>([&] { trainer.step(); }), missing));
  trainer.opt.add_tokens(two.first(1), stream);
  EXPECT_TRUE(trainer.step()->taken);
  EXPECT_TRUE(contains(thrown_message<ContractError>([&] { trainer.step(); }), missing));
}

TEST_P(Gradients, AParamThatIsUsedSeveralTimesIsReadyAfterItsLastUse) {
  for (const GradMode mode : {GradMode::kAccumulate, GradMode::kOverwrite}) {
    for (const int size : kWorldSizes) {
      SCOPED_TRACE("W " + std::to_string(size));
      on_ranks(size, device(), plain_config(GradReduce::kSum), two_params(mode), [&](Trainer& trainer) {
        Expected expected(trainer);
        const int rank = trainer.side->rank();
        for (int step = 0; step < 3; ++step) {
          trainer.opt.begin_backward();
          // "first" has three uses in this backward pass, and "second" one between them.
          for (int use = 0; use < 3; ++use) {
            const std::vector<float> values =
                sample_grad("first", trainer.elems("first"), step, 3 * rank + use);
            if (use == 0 && mode == GradMode::kOverwrite) {
              trainer.write("first", values);
            } else {
              trainer.add("first", values);
            }
            if (use != 1) continue;
            trainer.write("second", sample_grad("second", trainer.elems("second"), step, rank));
            trainer.ready("second");
          }
          trainer.ready("first");
          // A second call would come behind the reduction; it is refused and changes nothing.
          EXPECT_TRUE(
              contains(thrown_message<ContractError>([&] { trainer.ready("first"); }),
                       "grad_ready: param 'first' was ready already in this micro-batch; call it once, "
                       "after the last use"));
          ASSERT_TRUE(trainer.step()->taken);
          expected.step([&](const std::string& name, std::int64_t elems) {
            return batch_grad(name, elems, step, name == "first" ? 3 * size : size);
          });
        }
        expected.compare(trainer);
      });
    }
  }
}

TEST_P(Gradients, AreLookedAtBeforeTheReductionWhereThatIsAskedFor) {
  const std::vector<std::string> bad_names = {"norm.1", "head.weight", "mlp.up"};
  const std::vector<std::string> reported = {"embed.weight", "mlp.up", "norm.1"};  // in registration order
  for (const bool checks : {false, true}) {
    for (const int size : kWorldSizes) {
      SCOPED_TRACE("W " + std::to_string(size));
      Config config = test::mixed_config();
      config.optimizer.check_grads = checks;
      on_ranks(size, device(), config, test::mixed_specs(), [&](Trainer& trainer) {
        const bool is_bad = trainer.side->rank() == size - 1;
        const std::vector<std::string> none;
        for (int step = 0; step < 3; ++step) {
          for (const std::string& name : bad_names) {
            std::vector<float> values(static_cast<std::size_t>(trainer.elems(name)), 1.0f);
            if (is_bad && step != 1) values.back() = -std::numeric_limits<float>::infinity();
            trainer.write(name, values);
            trainer.ready(name);
          }
          const StepReport report = trainer.step();
          EXPECT_EQ(report->taken, step == 1);
          EXPECT_EQ(report->nonfinite_gradient_params, step == 1 ? none : reported);
          EXPECT_EQ(report->local_nonfinite_params, checks && is_bad && step != 1 ? reported : none);
        }
      });
    }
  }
}

TEST_P(Gradients, ThatOverflowInTheReductionOnlyWereFineBefore) {
  for (const int size : {2, 3, 4, 7}) {
    Config config = plain_config(GradReduce::kSum);
    config.optimizer.check_grads = true;
    on_ranks(size, device(), config, two_params(), [&](Trainer& trainer) {
      const std::vector<float> large(static_cast<std::size_t>(trainer.elems("first")), 3e38f);
      trainer.write("first", large);
      const StepReport report = trainer.step();
      EXPECT_FALSE(report->taken);
      EXPECT_EQ(report->nonfinite_gradient_params, std::vector<std::string>{"first"});
      EXPECT_TRUE(report->local_nonfinite_params.empty());
    });
  }
}

TEST_P(Gradients, ExchangedAmongRanksHaveTheBitsOfTheHostTransports) {
  for (const DType dtype : {DType::kFp32, DType::kBf16}) {
    for (const GradReduce reduce : {GradReduce::kAverage, GradReduce::kSum}) {
      for (const int size : kWorldSizes) {
        SCOPED_TRACE("W " + std::to_string(size));
        test::Scenario scenario;
        scenario.config.optimizer.grad_dtype = dtype;
        scenario.config.optimizer.grad_reduce = reduce;
        scenario.config.optimizer.bucket_elems = 3000;
        run_ranks(size, [&](Communicator& comm) {
          const test::Facts expected = test::run_inexact(comm, scenario);
          test::Scenario exchanged = scenario;
          exchanged.config.parallel.grad_reduction = GradReduction::kExchange;
          EXPECT_TRUE(same_facts(expected, test::run_inexact(comm, exchanged, device())));
        });
      }
    }
  }
}

TEST_P(Gradients, StagingOfExchangesIsInTheConstructionReport) {
  for (const GradReduction reduction : {GradReduction::kNative, GradReduction::kExchange}) {
    for (const int size : {1, 3}) {
      Config config = plain_config();
      config.parallel.grad_reduction = reduction;
      on_ranks(size, device(), config, two_params(), [&](Trainer& trainer) {
        std::int64_t largest = 0;
        for (const Bucket& bucket : trainer.opt.layout().buckets()) largest = std::max(largest, bucket.elems);
        const bool has_staging =
            reduction == GradReduction::kExchange && size > 1 && device().kind != DeviceKind::kHost;
        EXPECT_EQ(trainer.opt.construction().grad_staging_bytes, has_staging ? 4 * largest : 0);
      });
    }
  }
}

/// "first" is used on every rank in step 0, on the last one in step 1, on none in step 2.
TEST_P(Gradients, AParamThatIsNotUsedHasAZeroGradient) {
  for (const GradMode mode : {GradMode::kAccumulate, GradMode::kOverwrite}) {
    for (const int size : kWorldSizes) {
      SCOPED_TRACE("W " + std::to_string(size));
      on_ranks(size, device(), plain_config(GradReduce::kSum), two_params(mode), [&](Trainer& trainer) {
        Expected expected(trainer);
        const int rank = trainer.side->rank();
        for (int step = 0; step < 4; ++step) {
          trainer.opt.begin_backward();
          const bool is_used = step % 3 == 0 || (step == 1 && rank == size - 1);
          for (const char* name : kNames) {
            if (name == std::string("first") && !is_used) continue;
            trainer.write(name, sample_grad(name, trainer.elems(name), step, rank));
            trainer.ready(name);
          }
          ASSERT_TRUE(trainer.step()->taken);
          expected.step([&](const std::string& name, std::int64_t elems) {
            if (name == "second" || step % 3 == 0) return batch_grad(name, elems, step, size);
            if (step == 1) return sample_grad(name, elems, step, size - 1);
            return std::vector<float>(static_cast<std::size_t>(elems), 0.0f);
          });
        }
        expected.compare(trainer);
      });
    }
  }
}

}  // namespace
}  // namespace mxopt
