#include "mxopt/optimizer/config.h"

#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "support/devices.h"
#include "support/thrown_message.h"

#include "mxopt/optimizer/config_schema.h"
#include "mxopt/params/check.h"

#ifndef MXOPT_SOURCE_DIR
#error "the build defines MXOPT_SOURCE_DIR as the root of the source tree"
#endif

namespace mxopt {
namespace {

using test::contains;
using test::thrown_message;

/// A directory that holds run.yaml and is the current one, so that messages start with the short name.
class ConfigFile : public testing::Test {
 protected:
  ConfigFile() : old_dir_(std::filesystem::current_path()) {
    const std::string name = testing::UnitTest::GetInstance()->current_test_info()->name();
    dir_ = std::filesystem::path(testing::TempDir()) / ("config_test_" + name);
    std::filesystem::create_directories(dir_);
    std::filesystem::current_path(dir_);
  }
  ~ConfigFile() override {
    std::filesystem::current_path(old_dir_);
    std::filesystem::remove_all(dir_);
  }

  static Config load(const std::string& text, const std::vector<std::string>& overrides = {}) {
    std::ofstream("run.yaml") << text;
    return load_config("run.yaml", overrides);
  }

  static std::string error(const std::string& text, const std::vector<std::string>& overrides = {}) {
    return thrown_message<ConfigError>([&] { load(text, overrides); });
  }

 private:
  std::filesystem::path old_dir_;
  std::filesystem::path dir_;
};

std::vector<std::string> all_keys() {
  Config config;
  ConfigSchema schema;
  describe(schema, config);
  return schema.keys();
}

/// "a.b" with value "v" as the YAML {a: {b: v}}; "list[].key" as the one key of an item, beside a good
/// pattern.
std::string nested(std::string key, const std::string& value) {
  std::string open;
  std::string close;
  for (std::size_t dot = key.find('.'); dot != std::string::npos; dot = key.find('.')) {
    std::string section = key.substr(0, dot);
    key = key.substr(dot + 1);
    if (section.ends_with("[]")) {
      open += section.substr(0, section.size() - 2) + ": [{" + (key == "match" ? "" : "match: x, ");
      close = "}]" + close;
    } else {
      open += section + ": {";
      close = "}" + close;
    }
  }
  return "{" + open + key + ": " + value + close + "}";
}

TEST_F(ConfigFile, EmptyMapGivesTheDefaults) {
  const Config config = load("{}");
  EXPECT_EQ(config.optimizer.kind, AdamKind::kAdamW);
  EXPECT_EQ(config.optimizer.lr, 3e-4);
  EXPECT_EQ(config.optimizer.betas, (std::array<double, 2>{0.9, 0.95}));
  EXPECT_EQ(config.optimizer.eps, 1e-8);
  EXPECT_EQ(config.optimizer.weight_decay, 0.1);
  EXPECT_FALSE(config.optimizer.decay_1d);
  EXPECT_EQ(config.optimizer.clip_grad, 1.0);
  EXPECT_EQ(config.optimizer.skip_norm, 0);
  EXPECT_FALSE(config.optimizer.param_norms);
  EXPECT_FALSE(config.optimizer.count_zeros);
  EXPECT_EQ(config.optimizer.grad_dtype, DType::kFp32);
  EXPECT_EQ(config.optimizer.grad_reduce, GradReduce::kAverage);
  EXPECT_FALSE(config.optimizer.check_grads);
  EXPECT_EQ(config.optimizer.state_dtype, DType::kFp32);
  EXPECT_EQ(config.optimizer.bucket_elems, 0);
  EXPECT_EQ(config.optimizer.max_consecutive_skips, 100);
  EXPECT_EQ(config.optimizer.loss_scale.kind, LossScaleKind::kNone);
  EXPECT_EQ(config.optimizer.loss_scale.initial, 65536);
  EXPECT_EQ(config.optimizer.loss_scale.min, 1);
  EXPECT_EQ(config.optimizer.loss_scale.growth_interval, 2000);
  EXPECT_EQ(config.optimizer.loss_scale.hysteresis, 2);
  EXPECT_TRUE(config.optimizer.groups.empty());
  EXPECT_EQ(config.precision.weights, ParamFormat::kMxfp8);
  EXPECT_EQ(config.precision.storage, StorageChoice::kAuto);
  EXPECT_EQ(config.precision.backward_override, BackwardOverride::kNone);
  EXPECT_EQ(config.precision.fallback, Fallback::kBf16);
  EXPECT_EQ(config.precision.scale_layout, ScaleLayout::kCompact);
  EXPECT_EQ(config.schedule.kind, ScheduleKind::kConstant);
  EXPECT_EQ(config.schedule.warmup_steps, 0);
  EXPECT_EQ(config.schedule.decay_steps, 0);
  EXPECT_EQ(config.schedule.min_lr, 0);
  EXPECT_EQ(config.schedule.wsd_decay_steps, 0);
  EXPECT_EQ(config.schedule.wsd_decay_shape, DecayShape::kExponential);
  EXPECT_EQ(config.schedule.weight_decay_kind, WeightDecayKind::kConstant);
  EXPECT_EQ(config.schedule.end_weight_decay, std::nullopt);
  EXPECT_EQ(config.parallel.transport, Transport::kAuto);
  EXPECT_EQ(config.parallel.device, DeviceChoice::kAuto);
  EXPECT_EQ(config.parallel.timeout_s, 100);
  EXPECT_EQ(config.parallel.init_timeout_s, 300);
  EXPECT_EQ(config.parallel.gather_format, GatherFormat::kQuantized);
  EXPECT_EQ(config.parallel.grad_reduction, GradReduction::kNative);
  EXPECT_EQ(config.parallel.world_size, 0);
  EXPECT_TRUE(problems(config).empty());
}

/// Every key with a value that is not its default. Printing and loading it back must give every value again.
constexpr char kEveryKey[] = R"(
optimizer:
  kind: adam
  lr: 1.0e-3
  betas: [0.8, 0.999]
  eps: 1e-6
  weight_decay: 0
  decay_1d: true
  clip_grad: 0.5
  skip_norm: 80
  param_norms: true
  count_zeros: true
  grad_dtype: bf16
  grad_reduce: tokens
  check_grads: true
  state_dtype: fp32
  bucket_elems: 4e6
  max_consecutive_skips: 0
  loss_scale:
    kind: dynamic
    initial: 1024
    min: 2
    growth_interval: 100
    hysteresis: 1
  groups:
    - match: "*.bias"
      name: biases
      weight_decay_mult: 0
    - match: "embed*"
      lr_mult: 0.5
    - match: "head*"
      ndim: 2
      lr: 5e-4
      min_lr: 5e-5
      weight_decay: 0.01
      betas: [0.7, 0.9]
      eps: 1e-7
      norm_group: heads
      clip_grad: 0.25
precision:
  weights: bf16
  storage: row
  backward_override: dequantized
  fallback: error
  scale_layout: gemm
schedule:
  kind: wsd
  warmup_steps: 10
  decay_steps: 200
  min_lr: 1e-5
  wsd_decay_steps: 40
  wsd_decay_shape: minus_sqrt
  weight_decay_kind: linear
  end_weight_decay: 0.25
parallel:
  transport: mpi
  device: host
  timeout_s: 7.5
  init_timeout_s: 60
  gather_format: bf16
  grad_reduction: exchange
  world_size: 4
)";

TEST_F(ConfigFile, EveryKeyReachesItsField) {
  const Config config = load(kEveryKey);
  EXPECT_EQ(config.optimizer.kind, AdamKind::kAdam);
  EXPECT_EQ(config.optimizer.lr, 1e-3);
  EXPECT_EQ(config.optimizer.betas, (std::array<double, 2>{0.8, 0.999}));
  EXPECT_EQ(config.optimizer.eps, 1e-6);
  EXPECT_EQ(config.optimizer.weight_decay, 0);
  EXPECT_TRUE(config.optimizer.decay_1d);
  EXPECT_EQ(config.optimizer.clip_grad, 0.5);
  EXPECT_EQ(config.optimizer.skip_norm, 80);
  EXPECT_TRUE(config.optimizer.param_norms);
  EXPECT_TRUE(config.optimizer.count_zeros);
  EXPECT_EQ(config.optimizer.grad_dtype, DType::kBf16);
  EXPECT_EQ(config.optimizer.grad_reduce, GradReduce::kTokens);
  EXPECT_TRUE(config.optimizer.check_grads);
  EXPECT_EQ(config.optimizer.bucket_elems, 4'000'000);
  EXPECT_EQ(config.optimizer.max_consecutive_skips, 0);
  EXPECT_EQ(config.optimizer.loss_scale.kind, LossScaleKind::kDynamic);
  EXPECT_EQ(config.optimizer.loss_scale.initial, 1024);
  EXPECT_EQ(config.optimizer.loss_scale.min, 2);
  EXPECT_EQ(config.optimizer.loss_scale.growth_interval, 100);
  EXPECT_EQ(config.optimizer.loss_scale.hysteresis, 1);
  ASSERT_EQ(config.optimizer.groups.size(), 3U);
  EXPECT_EQ(config.optimizer.groups[0].match, "*.bias");
  EXPECT_EQ(config.optimizer.groups[0].name, "biases");
  EXPECT_EQ(config.optimizer.groups[0].lr_mult, 1);
  EXPECT_EQ(config.optimizer.groups[0].weight_decay_mult, 0);
  EXPECT_EQ(config.optimizer.groups[1].name, "embed*");
  EXPECT_EQ(config.optimizer.groups[1].lr_mult, 0.5);
  EXPECT_EQ(config.optimizer.groups[1].ndim, 0);
  EXPECT_EQ(config.optimizer.groups[1].lr, std::nullopt);
  EXPECT_EQ(config.optimizer.groups[1].betas, std::nullopt);
  const GroupConfig& head = config.optimizer.groups[2];
  EXPECT_EQ(head.ndim, 2);
  EXPECT_EQ(head.lr, 5e-4);
  EXPECT_EQ(head.min_lr, 5e-5);
  EXPECT_EQ(head.weight_decay, 0.01);
  EXPECT_EQ(head.betas, (std::array<double, 2>{0.7, 0.9}));
  EXPECT_EQ(head.eps, 1e-7);
  EXPECT_EQ(head.norm_group, "heads");
  EXPECT_EQ(head.clip_grad, 0.25);
  EXPECT_EQ(config.precision.weights, ParamFormat::kBf16);
  EXPECT_EQ(config.precision.storage, StorageChoice::kRow);
  EXPECT_EQ(config.precision.backward_override, BackwardOverride::kDequantized);
  EXPECT_EQ(config.precision.fallback, Fallback::kError);
  EXPECT_EQ(config.precision.scale_layout, ScaleLayout::kGemm);
  EXPECT_EQ(config.schedule.kind, ScheduleKind::kWsd);
  EXPECT_EQ(config.schedule.warmup_steps, 10);
  EXPECT_EQ(config.schedule.decay_steps, 200);
  EXPECT_EQ(config.schedule.min_lr, 1e-5);
  EXPECT_EQ(config.schedule.wsd_decay_steps, 40);
  EXPECT_EQ(config.schedule.wsd_decay_shape, DecayShape::kMinusSqrt);
  EXPECT_EQ(config.schedule.weight_decay_kind, WeightDecayKind::kLinear);
  EXPECT_EQ(config.schedule.end_weight_decay, 0.25);
  EXPECT_EQ(config.parallel.transport, Transport::kMpi);
  EXPECT_EQ(config.parallel.device, DeviceChoice::kHost);
  EXPECT_EQ(config.parallel.timeout_s, 7.5);
  EXPECT_EQ(config.parallel.init_timeout_s, 60);
  EXPECT_EQ(config.parallel.gather_format, GatherFormat::kBf16);
  EXPECT_EQ(config.parallel.grad_reduction, GradReduction::kExchange);
  EXPECT_EQ(config.parallel.world_size, 4);
  EXPECT_TRUE(problems(config).empty());
}

TEST_F(ConfigFile, WhatItPrintsLoadsBack) {
  Config config;
  ConfigSchema schema;
  describe(schema, config);
  schema.load_text(kEveryKey, "run.yaml", {"optimizer.lr=0.002"});
  const std::string printed = schema.to_yaml();
  EXPECT_TRUE(contains(printed, "\n  lr: 0.002  # --set\n"));
  EXPECT_TRUE(contains(printed, "\n  eps: 1e-06  # run.yaml:6:8\n"));
  EXPECT_TRUE(contains(printed,
                       "\n    - match: \"embed*\"  # run.yaml:29:14\n      ndim: 0  # default\n"
                       "      name: \"embed*\"  # default\n      lr: inherit  # default\n"));

  Config again;
  ConfigSchema schema_again;
  describe(schema_again, again);
  schema_again.load_text(printed, "printed.yaml");
  const auto without_comments = [](std::string text) {
    for (std::size_t at = text.find("  # "); at != std::string::npos; at = text.find("  # ", at)) {
      text.erase(at, text.find('\n', at) - at);
    }
    return text;
  };
  EXPECT_EQ(without_comments(schema_again.to_yaml()), without_comments(printed));
  EXPECT_EQ(again.optimizer.lr, 0.002);
  EXPECT_EQ(again.optimizer.groups[1].lr_mult, 0.5);
  EXPECT_EQ(again.optimizer.groups[1].lr, std::nullopt);
  EXPECT_EQ(again.optimizer.groups[2].betas, (std::array<double, 2>{0.7, 0.9}));
}

TEST_F(ConfigFile, EveryKeyRefusesABadValue) {
  const std::map<std::string, std::string> bad_values = {
      {"optimizer.kind", "sgd"},
      {"optimizer.lr", "-1e-9"},
      {"optimizer.betas", "[0.9, 1.0]"},
      {"optimizer.eps", "-1"},
      {"optimizer.weight_decay", "-0.1"},
      {"optimizer.decay_1d", "1"},
      {"optimizer.clip_grad", "-1"},
      {"optimizer.skip_norm", "-1"},
      {"optimizer.param_norms", "1"},
      {"optimizer.count_zeros", "'true'"},
      {"optimizer.grad_dtype", "fp16"},
      {"optimizer.grad_reduce", "mean"},
      {"optimizer.check_grads", "1"},
      {"optimizer.state_dtype", "bf16"},
      {"optimizer.bucket_elems", "127"},
      {"optimizer.max_consecutive_skips", "-1"},
      {"optimizer.loss_scale.kind", "auto"},
      {"optimizer.loss_scale.initial", "0"},
      {"optimizer.loss_scale.min", "0"},
      {"optimizer.loss_scale.growth_interval", "0"},
      {"optimizer.loss_scale.hysteresis", "0"},
      {"optimizer.groups", "'*.bias'"},
      {"optimizer.groups[].match", "\"\""},
      {"optimizer.groups[].name", "[a]"},
      {"optimizer.groups[].ndim", "-1"},
      {"optimizer.groups[].lr", "-1"},
      {"optimizer.groups[].min_lr", "none"},
      {"optimizer.groups[].weight_decay", "-0.1"},
      {"optimizer.groups[].betas", "[0.9, 1.0]"},
      {"optimizer.groups[].eps", "'inherit'"},
      {"optimizer.groups[].norm_group", "[a]"},
      {"optimizer.groups[].clip_grad", "-1"},
      {"optimizer.groups[].lr_mult", "-1"},
      {"optimizer.groups[].weight_decay_mult", ".inf"},
      {"precision.weights", "nvfp4"},
      {"precision.storage", "column"},
      {"precision.backward_override", "off"},
      {"precision.fallback", "fp32"},
      {"precision.scale_layout", "rowwise"},
      {"schedule.kind", "polynomial"},
      {"schedule.warmup_steps", "-1"},
      {"schedule.decay_steps", "0.5"},
      {"schedule.min_lr", "-1"},
      {"schedule.wsd_decay_steps", "-1"},
      {"schedule.wsd_decay_shape", "sqrt"},
      {"schedule.weight_decay_kind", "exponential"},
      {"schedule.end_weight_decay", "-0.1"},
      {"parallel.transport", "gloo"},
      {"parallel.device", "tpu"},
      {"parallel.timeout_s", "0"},
      {"parallel.init_timeout_s", "2e6"},
      {"parallel.gather", "nvlink"},
      {"parallel.gather_format", "fp32"},
      {"parallel.grad_reduction", "auto"},
      {"parallel.world_size", "-1"},
      {"checkpoint.dir", "[a]"},
      {"checkpoint.every", "-1"},
      {"checkpoint.keep_last", "1.5"},
      {"checkpoint.async", "1"},
      {"checkpoint.verify", "crc"},
      {"checkpoint.hyper_parameters", "both"},
      {"checkpoint.timeout_s", "0"},
  };
  for (const std::string& key : all_keys()) {
    const auto bad = bad_values.find(key);
    ASSERT_NE(bad, bad_values.end()) << "a bad value of " << key << " is missing in this test";
    std::string shown_key = key;
    if (const std::size_t at = shown_key.find("[]"); at != std::string::npos) shown_key.insert(at + 1, "0");
    const std::string message = error(nested(key, bad->second));
    EXPECT_TRUE(message.starts_with("run.yaml:1:")) << message;
    EXPECT_TRUE(contains(message, "`" + shown_key)) << key;
    EXPECT_TRUE(contains(message, "; allowed: ")) << key;
    EXPECT_EQ(message.find('\n'), std::string::npos) << "more than one problem: " << message;
  }
  EXPECT_EQ(bad_values.size(), all_keys().size());
}

struct BadConfig {
  std::string text;
  std::string message;
};

TEST_F(ConfigFile, BadConfigurationsPrintExactlyThis) {
  const std::vector<BadConfig> cases = {
      // Misspelt, in the wrong place, one level too deep, twice.
      {"optimizer:\n  weight_decy: 0.1\n",
       "run.yaml:2:3: unknown key `optimizer.weight_decy` (value 0.1); did you mean `optimizer.weight_decay` "
       "(number >= "
       "0)?"},
      {"lr: 1e-3\n",
       "run.yaml:1:1: unknown key `lr` (value 1e-3); did you mean `optimizer.lr` (number >= 0)?"},
      {"optimizer:\n  loss_scale:\n    lr: 1\n",
       "run.yaml:3:5: unknown key `optimizer.loss_scale.lr` (value 1); did you mean `optimizer.lr` (number "
       ">= 0)?"},
      {"optimizer:\n  lr: 1\n  eps: 1\n  lr: 2\n",
       "run.yaml:4:3: key `optimizer.lr` is repeated; it stands first at line 2, column 3"},
      {"optimizer:\n  lr: 1\noptimizer:\n  eps: 1\n",
       "run.yaml:3:1: key `optimizer` is repeated; it stands first at line 1, column 1"},
      // Names of other programs.
      {"optimizer: {learning_rate: 1}\n",
       "run.yaml:1:13: unknown key `optimizer.learning_rate` (value 1); did you mean `optimizer.lr` (number "
       ">= 0)?"},
      {"optimizer: {adam_beta1: 0.9}\n",
       "run.yaml:1:13: unknown key `optimizer.adam_beta1` (value 0.9); did you mean `optimizer.betas` (list "
       "of 2 numbers "
       "in [0, 1))?"},
      {"max_grad_norm: 1.0\n",
       "run.yaml:1:1: unknown key `max_grad_norm` (value 1.0); did you mean `optimizer.clip_grad` (number >= "
       "0)?"},
      // Wrong types.
      {"optimizer:\n  lr: \"3e-4\"\n",
       "run.yaml:2:7: `optimizer.lr` is \"3e-4\" (quoted, and so text); allowed: number >= 0"},
      {"optimizer:\n  lr:\n", "run.yaml:2:3: `optimizer.lr` is empty; allowed: number >= 0"},
      {"optimizer:\n  betas: 0.9\n",
       "run.yaml:2:10: `optimizer.betas` is 0.9; allowed: list of 2 numbers in [0, 1)"},
      {"optimizer:\n  - lr: 1\n",
       "run.yaml:2:3: `optimizer` is a list; allowed: a map with the keys kind, lr, betas, eps, "
       "weight_decay, decay_1d, clip_grad, skip_norm, param_norms, count_zeros, "
       "grad_dtype, grad_reduce, check_grads, state_dtype, bucket_elems, max_consecutive_skips, loss_scale, "
       "groups"},
      {"optimizer:\n  loss_scale: dynamic\n",
       "run.yaml:2:15: `optimizer.loss_scale` is dynamic; allowed: a map with the keys kind, initial, min, "
       "growth_interval, hysteresis"},
      {"schedule: {warmup_steps: 010}\n",
       "run.yaml:1:26: `schedule.warmup_steps` is 010 (leading zero); allowed: integer >= 0, in steps"},
      // Out of range, and not in this version.
      {"optimizer:\n  betas: [0.9, 1.0]\n",
       "run.yaml:2:16: `optimizer.betas[1]` is 1.0; allowed: list of 2 numbers in [0, 1)"},
      {"optimizer: {bucket_elems: 64}\n",
       "run.yaml:1:27: `optimizer.bucket_elems` is 64; allowed: integer >= 128, or 0 (automatic rule), in "
       "elements"},
      {"parallel: {transport: gloo}\n",
       "run.yaml:1:23: `parallel.transport` is gloo; allowed: one of auto, self, mpi, nccl"},
      {"precision: {weights: mxfp4}\n",
       "run.yaml:1:22: `precision.weights` is mxfp4; allowed: one of mxfp8, bf16, fp32; did you mean "
       "`mxfp8`?"},
      {"optimizer: {groups: [{lr_mult: 0}]}\n",
       "run.yaml:1:22: missing key `optimizer.groups[0].match` (text, not empty)"},
      // YAML that a configuration does not need, or that is none.
      {"optimizer: &o {lr: 1}\n",
       "run.yaml:1:12: anchors (&name) are not allowed; write the value where it is needed"},
      {"optimizer: {lr: 1}\n---\noptimizer: {lr: 2}\n",
       "run.yaml:2:1: a second document starts here; a configuration is one document"},
      {"", "run.yaml:1:1: holds no configuration; write {} for one of defaults only"},
      // Values that contradict each other.
      {"optimizer: {lr: 1e-4}\nschedule:\n  min_lr: 1e-3\n",
       "run.yaml:3:11: `schedule.min_lr` is 0.001; allowed: at most `optimizer.lr`, 0.0001"},
      {"schedule: {kind: linear, warmup_steps: 20, decay_steps: 10}\n",
       "run.yaml:1:40: `schedule.warmup_steps` is 20; allowed: at most `schedule.decay_steps`, 10"},
      {"schedule: {kind: wsd, decay_steps: 10}\n",
       "default: `schedule.wsd_decay_steps` is 0; allowed: integer >= 1 when `schedule.kind` is wsd"},
      {"schedule: {kind: cosine, decay_steps: 10, wsd_decay_steps: 5}\n",
       "run.yaml:1:60: `schedule.wsd_decay_steps` is 5; allowed: 0 unless `schedule.kind` is wsd"},
      {"schedule: {kind: wsd, warmup_steps: 6, decay_steps: 10, wsd_decay_steps: 5}\n",
       "run.yaml:1:74: `schedule.wsd_decay_steps` is 5; allowed: at most `schedule.decay_steps` less "
       "`schedule.warmup_steps`, 4"},
      {"schedule: {weight_decay_kind: linear, decay_steps: 10}\n",
       "default: `schedule.end_weight_decay` is inherit; allowed: number >= 0 when "
       "`schedule.weight_decay_kind` is linear or cosine"},
      {"schedule: {end_weight_decay: 0.5}\n",
       "run.yaml:1:30: `schedule.end_weight_decay` is 0.5; allowed: inherit unless "
       "`schedule.weight_decay_kind` is linear or cosine"},
      {"schedule: {lr_wsd_decay_style: cosine}\n",
       "run.yaml:1:12: unknown key `schedule.lr_wsd_decay_style` (value cosine); did you mean "
       "`schedule.wsd_decay_shape` (one of linear, cosine, exponential, minus_sqrt)?"},
      {"optimizer: {loss_scale: {kind: dynamic, min: 1e6}}\n",
       "default: `optimizer.loss_scale.initial` is 65536; allowed: at least `optimizer.loss_scale.min`, "
       "1e+06"},
      {"optimizer: {groups: [{match: a, clip_grad: 2}, {match: b, norm_group: n}, {match: c, norm_group: n, "
       "clip_grad: 2}]}\n",
       "run.yaml:1:44: `optimizer.groups[0].clip_grad` is 2; allowed: inherit without norm_group\n"
       "run.yaml:1:112: `optimizer.groups[2].clip_grad` is 2; allowed: 1, as in the first group of "
       "norm_group "
       "'n'"},
      {"optimizer: {groups: [{match: a}, {match: a}, {match: b, name: a}, {match: c, name: default}]}\n",
       "run.yaml:1:42: `optimizer.groups[1].match` is a; allowed: a pattern of its own; an earlier group has "
       "this one and "
       "wins\n"
       "run.yaml:1:63: `optimizer.groups[2].name` is a; allowed: a name that no other group has, and neither "
       "default nor *\n"
       "run.yaml:1:84: `optimizer.groups[3].name` is default; allowed: a name that no other group has, and "
       "neither "
       "default nor *"},
      {"optimizer: {groups: [{match: a, lr: 1, lr_mult: 2}]}\n",
       "run.yaml:1:49: `optimizer.groups[0].lr_mult` is 2; allowed: 1 beside `optimizer.groups[0].lr`"},
      {"optimizer: {groups: [{match: a, weight_decay: 1, weight_decay_mult: 0}]}\n",
       "run.yaml:1:69: `optimizer.groups[0].weight_decay_mult` is 0; allowed: inherit beside "
       "`optimizer.groups[0].weight_decay`"},
      {"optimizer: {lr: 1, groups: [{match: a, lr_mult: 0.5, min_lr: 0.75}]}\n",
       "run.yaml:1:62: `optimizer.groups[0].min_lr` is 0.75; allowed: at most the group's peak learning "
       "rate, 0.5"},
      {"optimizer: {groups: [{match: a, ndim: 1}, {match: a, name: b}, {match: a, name: c, ndim: 2}]}\n",
       "run.yaml:1:72: `optimizer.groups[2].match` is a; allowed: a pattern of its own; an earlier group has "
       "this one and wins"},
      {"parallel: {transport: self, world_size: 2}\n",
       "run.yaml:1:41: `parallel.world_size` is 2; allowed: 0 or 1 when `parallel.transport` is self"},
      {"checkpoint: {every: 5}\n",
       "run.yaml:1:21: `checkpoint.every` is 5; allowed: 0 when `checkpoint.dir` is empty"},
  };
  for (const BadConfig& c : cases) EXPECT_EQ(error(c.text), c.message) << c.text;
}

TEST_F(ConfigFile, OverridesComeAfterTheFile) {
  const Config config =
      load("optimizer: {lr: 1}", {"optimizer.lr=1e-4", "optimizer.groups=[{match: '*.bias'}]"});
  EXPECT_EQ(config.optimizer.lr, 1e-4);
  ASSERT_EQ(config.optimizer.groups.size(), 1U);
  EXPECT_EQ(config.optimizer.groups[0].name, "*.bias");
  EXPECT_EQ(error("{}", {"optimizer.lr=abc"}),
            "--set optimizer.lr=abc: `optimizer.lr` is abc (not a number); allowed: number >= 0");
  EXPECT_EQ(error("{}", {"schedule.min_lr=1"}),
            "--set: `schedule.min_lr` is 1; allowed: at most `optimizer.lr`, 0.0003");
}

TEST_F(ConfigFile, DecayStepsMayFollowTheFile) {
  Config config = load("schedule: {kind: cosine}");
  const std::string message =
      "`schedule.decay_steps` is 0; allowed: integer >= 1 when `schedule.kind` is linear, cosine or wsd";
  EXPECT_EQ(problems(config), std::vector<std::string>{message});
  EXPECT_EQ(thrown_message<ConfigError>([&] { validate(config); }), message);
  config.schedule.decay_steps = 100;
  validate(config);
  config = load("schedule: {weight_decay_kind: linear, end_weight_decay: 1}");
  EXPECT_EQ(problems(config),
            std::vector<std::string>{"`schedule.decay_steps` is 0; allowed: integer >= 1 when "
                                     "`schedule.weight_decay_kind` is linear or cosine"});
  config.schedule.decay_steps = 100;
  validate(config);
}

TEST_F(ConfigFile, ATrainerAddsItsOwnKeys) {
  Config config;
  std::int64_t steps = 0;
  ConfigSchema schema;
  describe(schema, config);
  schema.add("train.steps", steps, Bounds::at_least(1), "Number of steps.").required();
  std::ofstream("run.yaml") << "schedule:\n  kind: cosine\n  warmup_steps: 70\ntrain:\n  steps: 50\n";
  schema.load_file("run.yaml");
  EXPECT_EQ(steps, 50);
  config.schedule.decay_steps = steps;
  EXPECT_EQ(schema.origin("schedule.decay_steps"), "set by the program");
  EXPECT_EQ(thrown_message<ConfigError>([&] { validate(config, schema); }),
            "run.yaml:3:17: `schedule.warmup_steps` is 70; allowed: at most `schedule.decay_steps`, 50");
  schema.apply_overrides({"schedule.warmup_steps=7"});
  validate(config, schema);
}

TEST(Config, ValidateListsAllProblemsOfAStruct) {
  Config config;
  config.optimizer.betas[0] = 1;
  config.optimizer.groups = {{.match = "", .name = "x"}};
  config.schedule.min_lr = 1;
  EXPECT_EQ(thrown_message<ConfigError>([&] { validate(config); }),
            "`optimizer.betas` is [1, 0.95]; allowed: list of 2 numbers in [0, 1)\n"
            "`optimizer.groups[0].match` is \"\"; allowed: text, not empty\n"
            "`schedule.min_lr` is 1; allowed: at most `optimizer.lr`, 0.0003");
}

TEST(Config, StorageIsResolvedFromTheBackwardOverride) {
  PrecisionConfig precision;
  EXPECT_EQ(resolved_storage(precision), Storage::kBoth);
  precision.backward_override = BackwardOverride::kHighPrecision;
  EXPECT_EQ(resolved_storage(precision), Storage::kRow);
  precision.backward_override = BackwardOverride::kDequantized;
  EXPECT_EQ(resolved_storage(precision), Storage::kRow);
  precision.storage = StorageChoice::kBoth;
  EXPECT_EQ(resolved_storage(precision), Storage::kBoth);
  precision = {};
  precision.storage = StorageChoice::kRow;
  EXPECT_EQ(resolved_storage(precision), Storage::kRow);
}

TEST(Config, AGroupIsNamedAfterItsPattern) {
  EXPECT_EQ(group_name({.match = "*.bias", .name = ""}), "*.bias");
  EXPECT_EQ(group_name({.match = "*.bias", .name = "biases"}), "biases");
}

TEST(Config, ReadmeHasARowForEveryKey) {
  std::ifstream file(std::string(MXOPT_SOURCE_DIR) + "/README.md");
  const std::string readme{std::istreambuf_iterator<char>(file), {}};
  Config config;
  ConfigSchema schema;
  describe(schema, config);
  EXPECT_TRUE(contains(readme, schema.markdown_table())) << "README.md must contain this table as it stands";
}

TEST(Config, CommunicatorOptionsAreThoseOfTheParallelSection) {
  ParallelConfig parallel;
  parallel.transport = Transport::kMpi;
  parallel.timeout_s = 7;
  parallel.world_size = 3;
  const Device device{DeviceKind::kCuda, 2};
  const CommunicatorOptions options = communicator_options(parallel, device);
  EXPECT_EQ(options.device, device);
  EXPECT_EQ(options.transport, Transport::kMpi);
  EXPECT_EQ(options.timeout_s, 7);
  EXPECT_EQ(options.world_size, 3);
}

TEST(Config, ResolvedDeviceIsTheOneThatCanBeUsed) {
  const Device cuda{DeviceKind::kCuda, 0};
  const std::string reason = test::why_not_usable(cuda);
  ParallelConfig parallel;
  EXPECT_EQ(resolved_device(parallel, 0), reason.empty() ? cuda : Device());
  parallel.device = DeviceChoice::kHost;
  EXPECT_EQ(resolved_device(parallel, 0), Device());
  parallel.device = DeviceChoice::kCuda;
  if (reason.empty()) {
    EXPECT_EQ(resolved_device(parallel, 0), cuda);
  } else {
    EXPECT_EQ(thrown_message<ConfigError>([&] { resolved_device(parallel, 0); }), reason);
  }
}

}  // namespace
}  // namespace mxopt
