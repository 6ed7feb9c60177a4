#include "mxopt/collectives/launch.h"

#include <cstdlib>
#include <map>
#include <string>

#include <gtest/gtest.h>

#include "support/thrown_message.h"

#include "mxopt/params/check.h"

namespace mxopt {
namespace {

using test::contains;
using test::thrown_message;
using Variables = std::map<std::string, std::string>;

EnvironmentLookup lookup_in(const Variables& variables) {
  return [variables](const std::string& name) -> std::optional<std::string> {
    const auto found = variables.find(name);
    if (found == variables.end()) return std::nullopt;
    return found->second;
  };
}

LaunchPlace place_of(const Variables& variables, const LaunchSettings& settings = {}) {
  return find_launch_place(settings, lookup_in(variables));
}

std::string refusal_of(const Variables& variables, const LaunchSettings& settings = {}) {
  return thrown_message<ConfigError>([&] { place_of(variables, settings); });
}

Variables with(Variables variables, const Variables& more) {
  for (const auto& [name, value] : more) variables[name] = value;
  return variables;
}

const Variables kTorchrun = {
    {"RANK", "5"},       {"WORLD_SIZE", "8"},       {"LOCAL_RANK", "1"},   {"LOCAL_WORLD_SIZE", "4"},
    {"GROUP_RANK", "1"}, {"GROUP_WORLD_SIZE", "2"}, {"MASTER_ADDR", "n0"}, {"MASTER_PORT", "29501"}};
const Variables kOpenMpi = {{"OMPI_COMM_WORLD_RANK", "2"},
                            {"OMPI_COMM_WORLD_SIZE", "4"},
                            {"OMPI_COMM_WORLD_LOCAL_RANK", "2"},
                            {"OMPI_COMM_WORLD_LOCAL_SIZE", "4"},
                            {"PMIX_NAMESPACE", "prte.1"}};
const Variables kSlurm = {{"SLURM_STEP_ID", "0"},  {"SLURM_PROCID", "3"},
                          {"SLURM_NTASKS", "6"},   {"SLURM_STEP_NUM_TASKS", "4"},
                          {"SLURM_LOCALID", "1"},  {"SLURM_STEP_NODELIST", "gpu[07-08,11],cpu1"},
                          {"SLURM_JOB_ID", "4711"}};
const Variables kPmi = {{"PMI_RANK", "1"}, {"PMI_SIZE", "2"}, {"MPI_LOCALRANKID", "1"}};

TEST(Launch, ReadsTorchrun) {
  const LaunchPlace place = place_of(kTorchrun);
  EXPECT_EQ(place.rank, 5);
  EXPECT_EQ(place.world, 8);
  EXPECT_EQ(place.local_rank, 1);
  EXPECT_EQ(place.local_world, 4);
  EXPECT_EQ(place.address, "n0");
  EXPECT_EQ(place.port, 29501);
  EXPECT_EQ(place.summary(),
            "rank 5 of 8, local rank 1 of 4, from torchrun (RANK, WORLD_SIZE); rank 0 at n0:29501");
}

TEST(Launch, ReadsOpenMpiOnOneNode) {
  const LaunchPlace place = place_of(kOpenMpi);
  EXPECT_EQ(place.rank, 2);
  EXPECT_EQ(place.world, 4);
  EXPECT_EQ(place.local_world, 4);
  EXPECT_EQ(place.address, "127.0.0.1");
  EXPECT_EQ(place.port, kDefaultRendezvousPort);
  EXPECT_EQ(place.job, "prte.1");
  EXPECT_EQ(place.source, "Open MPI (OMPI_COMM_WORLD_RANK, OMPI_COMM_WORLD_SIZE)");
}

TEST(Launch, ReadsTheStepOfSlurm) {
  const LaunchPlace place = place_of(kSlurm);
  EXPECT_EQ(place.rank, 3);
  EXPECT_EQ(place.world, 4);
  EXPECT_EQ(place.local_rank, 1);
  EXPECT_EQ(place.local_world, 0);
  EXPECT_EQ(place.address, "gpu07");
  EXPECT_EQ(place.job, "4711.0");
  EXPECT_EQ(place.source, "Slurm (SLURM_PROCID, SLURM_STEP_NUM_TASKS)");
}

TEST(Launch, FindsTheFirstHostOfANodeList) {
  const auto first = [](const std::string& list) {
    return place_of(with(kSlurm, {{"SLURM_STEP_NODELIST", list}})).address;
  };
  EXPECT_EQ(first("n1"), "n1");
  EXPECT_EQ(first("n1,n2"), "n1");
  EXPECT_EQ(first("n[4]"), "n4");
  EXPECT_EQ(first("n[4,6]-ib,m1"), "n4-ib");
  EXPECT_EQ(first("r[1-2]n[1-2]"), "");
  EXPECT_EQ(first("n[1"), "");
}

TEST(Launch, ABatchScriptOfSlurmIsNoStep) {
  const LaunchPlace place = place_of({{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "4"}});
  EXPECT_EQ(place.world, 1);
  EXPECT_EQ(place.source, "no launcher");
}

TEST(Launch, ReadsPmi) {
  const LaunchPlace place = place_of(kPmi);
  EXPECT_EQ(place.rank, 1);
  EXPECT_EQ(place.world, 2);
  EXPECT_EQ(place.local_rank, 1);
  EXPECT_EQ(place.address, "");
  EXPECT_TRUE(contains(place.summary(), "rank 0 at an unknown address"));
}

TEST(Launch, WithoutALauncherThereIsOneRank) {
  const LaunchPlace place = place_of({});
  EXPECT_EQ(place.rank, 0);
  EXPECT_EQ(place.world, 1);
  EXPECT_EQ(place.local_rank, 0);
  EXPECT_EQ(place.summary(), "rank 0 of 1, local rank 0 of 1, from no launcher; rank 0 at 127.0.0.1:29500");
}

TEST(Launch, ExplicitSettingsGoFirst) {
  const LaunchSettings settings{
      .rank = 1, .world = 2, .local_rank = 0, .local_world = 1, .address = "10.0.0.1", .port = 0};
  const LaunchPlace place = place_of({{"MASTER_ADDR", "n0"}, {"MASTER_PORT", "29501"}}, settings);
  EXPECT_EQ(place.rank, 1);
  EXPECT_EQ(place.world, 2);
  EXPECT_EQ(place.local_rank, 0);
  EXPECT_EQ(place.address, "10.0.0.1");
  EXPECT_EQ(place.port, 0);
  EXPECT_EQ(place.source, "explicit settings (rank, world)");
}

TEST(Launch, SourcesThatDisagreeAreRefusedWithBoth) {
  EXPECT_EQ(refusal_of(with({{"RANK", "0"}, {"WORLD_SIZE", "4"}}, kOpenMpi)),
            "two sources disagree on this process's place: torchrun says RANK=0, WORLD_SIZE=4, Open MPI says "
            "OMPI_COMM_WORLD_RANK=2, OMPI_COMM_WORLD_SIZE=4, OMPI_COMM_WORLD_LOCAL_RANK=2, "
            "OMPI_COMM_WORLD_LOCAL_SIZE=4; unset the variables of one of them");
  const std::string by_hand = refusal_of(kTorchrun, {.rank = 5, .world = 9});
  EXPECT_TRUE(
      contains(by_hand, "explicit settings says rank=5, world=9, torchrun says RANK=5, WORLD_SIZE=8"));
  EXPECT_TRUE(contains(refusal_of(with(kPmi, kOpenMpi)), "PMI says PMI_RANK=1, PMI_SIZE=2"));
  // A local rank alone is enough.
  EXPECT_TRUE(contains(refusal_of(with(kSlurm, {{"RANK", "3"}, {"WORLD_SIZE", "4"}, {"LOCAL_RANK", "3"}})),
                       "Slurm says SLURM_PROCID=3, SLURM_STEP_NUM_TASKS=4, SLURM_LOCALID=1"));
}

TEST(Launch, SourcesThatAgreeCompleteEachOther) {
  const LaunchPlace place = place_of(with(kSlurm, {{"RANK", "3"}, {"WORLD_SIZE", "4"}}));
  EXPECT_EQ(place.source, "torchrun (RANK, WORLD_SIZE)");
  EXPECT_EQ(place.local_rank, 1);
  EXPECT_EQ(place.note, "");
}

TEST(Launch, OneTaskPerNodeMayStartTheLaunchers) {
  const Variables srun = {{"SLURM_STEP_ID", "0"}, {"SLURM_PROCID", "1"}, {"SLURM_NTASKS", "2"}};
  const LaunchPlace place = place_of(with(kTorchrun, srun));
  EXPECT_EQ(place.rank, 5);
  EXPECT_EQ(place.note,
            "Slurm (SLURM_PROCID, SLURM_NTASKS) counts launchers: SLURM_PROCID=1, SLURM_NTASKS=2");
  EXPECT_TRUE(contains(place.summary(), place.note));
  // Another node than torchrun's own count says.
  EXPECT_TRUE(contains(refusal_of(with(with(kTorchrun, srun), {{"SLURM_PROCID", "0"}})), "disagree"));

  const Variables shell = {{"SLURM_STEP_ID", "0"}, {"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "1"}};
  EXPECT_EQ(place_of(with(kOpenMpi, shell)).rank, 2);
  EXPECT_TRUE(contains(refusal_of(with(kOpenMpi, srun)), "disagree"));  // one node can not have two launchers
  // Here the source that comes first counts the launchers.
  const LaunchPlace hydra = place_of(with(with(kPmi, {{"MPI_LOCALNRANKS", "2"}}), shell));
  EXPECT_EQ(hydra.rank, 1);
  EXPECT_EQ(hydra.world, 2);
  EXPECT_TRUE(contains(hydra.note, "Slurm"));
}

TEST(Launch, SetsThereInPartAreRefused) {
  EXPECT_EQ(refusal_of({{"RANK", "1"}}),
            "variables of torchrun are there in part: RANK=1, but no WORLD_SIZE; allowed are both of RANK, "
            "WORLD_SIZE, or none");
  EXPECT_TRUE(contains(refusal_of({{"LOCAL_RANK", "1"}}), "LOCAL_RANK=1, but no RANK"));
  EXPECT_TRUE(contains(refusal_of({{"OMPI_COMM_WORLD_SIZE", "4"}}), "but no OMPI_COMM_WORLD_RANK"));
  EXPECT_TRUE(contains(refusal_of({{"SLURM_STEP_ID", "0"}, {"SLURM_PROCID", "0"}}), "but no SLURM_NTASKS"));
  EXPECT_TRUE(contains(refusal_of({{"PMI_SIZE", "4"}}), "but no PMI_RANK"));
  EXPECT_TRUE(contains(refusal_of({}, {.rank = 0}), "explicit settings are there in part: no world"));
  EXPECT_TRUE(contains(refusal_of({}, {.world = 2}), "explicit settings are there in part: no rank"));
}

TEST(Launch, NumbersAreTakenWholeAndInTheirRange) {
  for (const char* bad : {"", " 1", "1 ", "+1", "1x", "0x1", "1.0", "-1", "8", "99999999999999999999"}) {
    EXPECT_EQ(refusal_of(with(kTorchrun, {{"RANK", bad}})),
              std::string("variable RANK: '") + bad + "'; allowed are whole numbers from 0 to 7");
  }
  EXPECT_TRUE(contains(refusal_of(with(kTorchrun, {{"WORLD_SIZE", "0"}})), "WORLD_SIZE: '0'; allowed are"));
  EXPECT_TRUE(contains(refusal_of(with(kTorchrun, {{"WORLD_SIZE", "65537"}})), "from 1 to 65536"));
  EXPECT_TRUE(contains(refusal_of(with(kTorchrun, {{"LOCAL_RANK", "4"}})), "LOCAL_RANK: '4'"));
  EXPECT_TRUE(contains(refusal_of(with(kTorchrun, {{"LOCAL_WORLD_SIZE", "9"}})), "LOCAL_WORLD_SIZE: '9'"));
  EXPECT_TRUE(contains(refusal_of(with(kTorchrun, {{"MASTER_PORT", "0"}})), "MASTER_PORT: '0'"));
  EXPECT_TRUE(contains(refusal_of(with(kTorchrun, {{"MASTER_PORT", "65536"}})), "from 1 to 65535"));
  EXPECT_EQ(refusal_of({}, {.rank = 2, .world = 2}),
            "explicit rank: 2; allowed are whole numbers from 0 to 1");
  EXPECT_TRUE(contains(refusal_of({}, {.rank = 0, .world = 0}), "explicit world: 0"));
  EXPECT_TRUE(contains(refusal_of({}, {.rank = 0, .world = 2, .local_world = 3}), "explicit local_world: 3"));
  EXPECT_TRUE(contains(refusal_of({}, {.rank = 0, .world = 2, .local_rank = 2}), "explicit local_rank: 2"));
  EXPECT_TRUE(contains(refusal_of({}, {.port = 65536}), "explicit port: 65536"));
  EXPECT_TRUE(contains(refusal_of({}, {.address = ""}), "explicit address: ''"));
}

TEST(Launch, TheJobIsNamedByTheMostSpecificVariable) {
  EXPECT_EQ(place_of(with(kSlurm, {{"MXOPT_RDZV_TOKEN", "abc"}})).job, "abc");
  EXPECT_EQ(place_of(with(kTorchrun, {{"TORCHELASTIC_RUN_ID", "run7"}})).job, "run7");
  EXPECT_EQ(place_of(with(kTorchrun, {{"TORCHELASTIC_RUN_ID", "none"}})).job, "");
}

TEST(Launch, CopiesOfRankZeroAreRefusedWithBothNumbers) {
  const LaunchPlace place = place_of(kOpenMpi);
  check_launch_against(place, "MPI", 2, 4);
  EXPECT_EQ(thrown_message<ConfigError>([&] { check_launch_against(place, "MPI", 0, 1); }),
            "the launcher says rank 2 of 4, from Open MPI (OMPI_COMM_WORLD_RANK, OMPI_COMM_WORLD_SIZE), but "
            "MPI says rank 0 of 1; MPI must be the launcher's own, or every process runs alone");
  EXPECT_TRUE(contains(
      thrown_message<ConfigError>([&] { check_launch_against(place_of(kSlurm), "MPI", 0, 1); }), "3 of 4"));
  check_launch_against(place_of({}), "MPI", 1, 2);
}

TEST(Launch, ADeviceIsChosenByTheLocalRank) {
  EXPECT_EQ(device_of_place(place_of(kTorchrun), 4, lookup_in({})), 1);
  EXPECT_EQ(device_of_place(place_of(kTorchrun), 8, lookup_in({{"CUDA_VISIBLE_DEVICES", "0,1,2"}})), 1);
  EXPECT_EQ(device_of_place(place_of(kTorchrun), 1, lookup_in({{"CUDA_VISIBLE_DEVICES", "3"}})), 0);
  EXPECT_EQ(device_of_place(place_of({}), 1, lookup_in({})), 0);
}

TEST(Launch, MoreLocalRanksThanGpusAreRefusedWithTheCounts) {
  const auto refusal = [](const LaunchPlace& place, int devices) {
    return thrown_message<ConfigError>([&] { device_of_place(place, devices, lookup_in({})); });
  };
  EXPECT_EQ(refusal(place_of(kTorchrun), 2),
            "4 ranks on this node, but this process sees 2 GPUs; each rank needs a GPU of its own");
  EXPECT_TRUE(
      contains(refusal(place_of(kTorchrun), 1), "4 ranks on this node, but this process sees 1 GPU;"));
  EXPECT_TRUE(contains(refusal(place_of(kPmi), 1), "2 or more ranks on this node"));
  EXPECT_TRUE(contains(refusal(place_of(kTorchrun), 0), "this process sees no GPU"));
  EXPECT_TRUE(contains(refusal(place_of({{"RANK", "1"}, {"WORLD_SIZE", "2"}}), 2), "has no local rank"));
}

TEST(Launch, ReadsTheEnvironmentOfTheProcess) {
  ASSERT_EQ(setenv("MXOPT_LAUNCH_TEST", "x y", 1), 0);
  EXPECT_EQ(environment_lookup()("MXOPT_LAUNCH_TEST"), "x y");
  ASSERT_EQ(unsetenv("MXOPT_LAUNCH_TEST"), 0);
  EXPECT_EQ(environment_lookup()("MXOPT_LAUNCH_TEST"), std::nullopt);
}

}  // namespace
}  // namespace mxopt
