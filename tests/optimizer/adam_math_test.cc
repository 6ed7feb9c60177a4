#include "mxopt/optimizer/adam_math.h"

#include <bit>
#include <cmath>
#include <limits>
#include <vector>

#include <gtest/gtest.h>

#include "support/compare.h"
#include "support/exact_inputs.h"
#include "support/reference_adam.h"

namespace mxopt {
namespace {

AdamScalars scalars_of(const reference::AdamSettings& settings, std::int64_t t) {
  AdamScalars s;
  s.beta1 = static_cast<float>(settings.beta1);
  s.beta2 = static_cast<float>(settings.beta2);
  s.omb1 = static_cast<float>(1 - settings.beta1);
  s.omb2 = static_cast<float>(1 - settings.beta2);
  s.bc1 = static_cast<float>(1 - integer_power(settings.beta1, t));
  s.bc2 = static_cast<float>(1 - integer_power(settings.beta2, t));
  s.eps = static_cast<float>(settings.eps);
  s.lr = static_cast<float>(settings.lr);
  s.weight_decay = static_cast<float>(settings.weight_decay);
  s.grad_factor = static_cast<float>(settings.grad_factor);
  s.decoupled = settings.decoupled;
  return s;
}

/// Any finite float: all exponents, subnormals and zeros included.
float any_finite(int salt, std::int64_t i) {
  const auto bits = static_cast<std::uint32_t>(test::mix(11, salt, i));
  const float value = std::bit_cast<float>(bits);
  return std::isfinite(value) ? value : 0.0f;
}

TEST(AdamMath, FollowsTheContractLineByLine) {
  for (const bool decoupled : {true, false}) {
    reference::AdamSettings settings;
    settings.decoupled = decoupled;
    settings.grad_factor = 0.37f;
    std::vector<float> masters, grads;
    for (std::int64_t i = 0; i < 20'000; ++i) {
      const float scale = i % 2 == 0 ? 1e-3f : 1.0f;
      masters.push_back(i % 5 == 0 ? any_finite(0, i) : scale * test::exact_input<float>(1, 0, i) / 7);
      grads.push_back(i % 7 == 0 ? any_finite(1, i) : scale * test::exact_input<float>(2, 0, i) / 3);
    }
    reference::AdamState<float> expected(masters);
    std::vector<float> p = masters, m(masters.size()), v(masters.size());
    for (std::int64_t t = 1; t <= 3; ++t) {
      reference::adam_step(expected, grads, settings, t);
      for (std::size_t i = 0; i < p.size(); ++i) {
        const AdamElement now = adam_update({p[i], m[i], v[i]}, grads[i], scalars_of(settings, t));
        p[i] = now.p;
        m[i] = now.m;
        v[i] = now.v;
        // A huge gradient may make a NaN, whose payload is not part of the contract.
        if (std::isnan(p[i]) && std::isnan(expected.p[i])) p[i] = expected.p[i] = 0;
        if (std::isnan(m[i]) && std::isnan(expected.m[i])) m[i] = expected.m[i] = 0;
        if (std::isnan(v[i]) && std::isnan(expected.v[i])) v[i] = expected.v[i] = 0;
      }
      EXPECT_TRUE(test::bits_equal(expected.p, p)) << "decoupled " << decoupled << ", step " << t;
      EXPECT_TRUE(test::bits_equal(expected.m, m)) << "decoupled " << decoupled << ", step " << t;
      EXPECT_TRUE(test::bits_equal(expected.v, v)) << "decoupled " << decoupled << ", step " << t;
    }
  }
}

// Bound, with h = 2^-24 and |g| between G/2 and G, |p| <= P, T steps. m is a sum of T terms below G with at
// most 4 roundings a step (1-beta, two products, sum): |dm| <= 4 h T G. v has only positive terms, each step
// adds at most 5 relative roundings: |dv| <= 5 h T v. v' / bc2 >= G^2 / 4, so the ratio is at most 2 and its
// error is at most 4 h T G / (bc1 G / 2) + 2 (5 h T / 2 + 6 h), which with bc1 >= 0.1 is below 100 h T. The
// decay term adds 3 h wd P. So a step moves p by an error of at most lr (100 h T + 3 h wd P) + h P.
TEST(AdamMath, StaysWithinTheDerivedBoundOfTheReferenceInFp64) {
  for (const bool decoupled : {true, false}) {
    reference::AdamSettings settings;
    settings.decoupled = decoupled;
    settings.weight_decay = decoupled ? 0.1 : 1e-4;  // small beside the gradient, so that |g| stays in range
    settings.lr = 1e-2;
    constexpr int kSteps = 12;
    constexpr double kHalfUlp = 0x1p-24;
    constexpr double kLargest = 2;
    std::vector<float> masters, grads;
    for (std::int64_t i = 0; i < 4000; ++i) {
      masters.push_back(static_cast<float>(test::mix(5, 0, i) % 100'000) * 2e-5f - 1.0f);
      const float magnitude = 0.55f + 0.4f * static_cast<float>(test::mix(6, 0, i) % 1000) / 1000;
      grads.push_back(test::mix(7, 0, i) % 2 == 0 ? magnitude : -magnitude);
    }
    reference::AdamState<double> expected(std::vector<double>(masters.begin(), masters.end()));
    std::vector<float> p = masters, m(masters.size()), v(masters.size());
    double bound = 0;
    for (std::int64_t t = 1; t <= kSteps; ++t) {
      reference::adam_step(expected, grads, settings, t);
      const AdamScalars scalars = scalars_of(settings, t);
      bound += settings.lr * (100 * kHalfUlp * static_cast<double>(t) +
                              3 * kHalfUlp * settings.weight_decay * kLargest) +
               kHalfUlp * kLargest;
      double worst = 0;
      for (std::size_t i = 0; i < p.size(); ++i) {
        const AdamElement now = adam_update({p[i], m[i], v[i]}, grads[i], scalars);
        p[i] = now.p;
        m[i] = now.m;
        v[i] = now.v;
        worst = std::max(worst, std::fabs(static_cast<double>(p[i]) - expected.p[i]));
      }
      EXPECT_LE(worst, bound) << "decoupled " << decoupled << ", step " << t;
      EXPECT_GT(worst, 0) << "the comparison compares something with itself";
    }
  }
}

TEST(AdamMath, FirstStepMovesByTheLearningRateForEveryBeta2) {
  for (const double beta2 : {0.9, 0.999, 0.99999}) {
    reference::AdamSettings settings;
    settings.beta2 = beta2;
    settings.eps = 0;
    settings.weight_decay = 0;
    settings.lr = 0.25;
    for (const float grad : {1.0f, -3.0f, 1e-15f, 7e15f}) {
      const AdamElement now = adam_update({0, 0, 0}, grad, scalars_of(settings, 1));
      EXPECT_NEAR(std::fabs(static_cast<double>(now.p)) / settings.lr, 1.0, 1e-6)
          << "beta2 " << beta2 << ", gradient " << grad;
    }
  }
}

TEST(AdamMath, WithoutMomentumTheUpdateIsTheSign) {
  AdamScalars s;
  s.lr = 0.125f;
  for (const float grad : {2.5f, -2.5f, 10.0f}) {
    EXPECT_EQ(adam_update({1, 5, 7}, grad, s).p, 1 - std::copysign(0.125f, grad));
  }
}

TEST(AdamMath, IntegerPowerIsExactWhereTheResultIs) {
  EXPECT_EQ(integer_power(0.5, 0), 1.0);
  EXPECT_EQ(integer_power(0.0, 0), 1.0);
  EXPECT_EQ(integer_power(0.0, 3), 0.0);
  EXPECT_EQ(integer_power(0.5, 300), 0x1p-300);
  EXPECT_EQ(integer_power(1.0, std::int64_t{1} << 62), 1.0);
  EXPECT_EQ(integer_power(0.9, std::int64_t{1} << 40), 0.0);
  EXPECT_EQ(integer_power(3.0, 20), 3486784401.0);
}

TEST(AdamMath, IntegerPowerCountsBeyondTheIntegersOfFp32) {
  constexpr std::int64_t kFloatLimit = std::int64_t{1} << 24;
  const double base = 1 - 0x1p-26;
  const double at = integer_power(base, kFloatLimit);
  const double after = integer_power(base, kFloatLimit + 1);
  EXPECT_NEAR(at, std::pow(base, 0x1p24), 1e-8);
  EXPECT_LT(after, at);
}

}  // namespace
}  // namespace mxopt
