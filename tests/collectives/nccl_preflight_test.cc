#include "mxopt/collectives/nccl_preflight.h"

#include <vector>

#include <gtest/gtest.h>

namespace mxopt {
namespace {

NcclCandidate candidate(const char* host, const char* pci_bus_id, std::uint8_t uuid, int device) {
  NcclCandidate made;
  made.set_host(host);
  made.set_pci_bus_id(pci_bus_id);
  made.uuid[7] = uuid;
  made.device = device;
  made.library_version = 22809;
  return made;
}

/// Four ranks on two hosts whose GPUs have equal bus ids.
std::vector<NcclCandidate> good() {
  return {candidate("n1", "0000:18:00.0", 1, 0), candidate("n1", "0000:2A:00.0", 2, 1),
          candidate("n2", "0000:18:00.0", 3, 0), candidate("n2", "0000:2A:00.0", 4, 1)};
}

TEST(NcclPreflight, AcceptsOneGpuPerRank) {
  EXPECT_EQ(nccl_problem(good()), "");
  auto ranks = good();
  for (NcclCandidate& rank : ranks) rank.uuid = {};  // not known
  EXPECT_EQ(nccl_problem(ranks), "");
}

TEST(NcclPreflight, NamesTheRankWithAProblemOfItsOwn) {
  auto ranks = good();
  ranks[2].set_problem("CUDA device 7 was asked for");
  ranks[3].library_version = 21903;
  EXPECT_EQ(nccl_problem(ranks), "rank 2 can not take part in NCCL: CUDA device 7 was asked for");
  ranks[2].set_problem(std::string(10000, 'x'));
  EXPECT_EQ(nccl_problem(ranks), "rank 2 can not take part in NCCL: " + std::string(511, 'x'));
}

TEST(NcclPreflight, NamesTheRankWithAnotherVersion) {
  auto ranks = good();
  ranks[3].library_version = 21903;
  EXPECT_EQ(nccl_problem(ranks),
            "rank 3 (host n2) has NCCL 2.19.3, rank 0 (host n1) has NCCL 2.28.9; all ranks must load the "
            "same version");
}

TEST(NcclPreflight, NamesTheRanksThatShareAGpu) {
  auto ranks = good();
  ranks[3] = candidate("n2", "0000:18:00.0", 5, 1);
  EXPECT_EQ(nccl_problem(ranks),
            "ranks 2 and 3 are both on the GPU with PCI bus id 0000:18:00.0 of host n2 (cuda:0 and cuda:1); "
            "NCCL needs a GPU of its own for every rank");
  ranks = good();
  ranks[2].uuid = ranks[1].uuid;  // two containers with host names of their own
  EXPECT_EQ(nccl_problem(ranks),
            "ranks 1 and 2 are both on the GPU with PCI bus id 0000:18:00.0 of host n2 (cuda:1 and cuda:0); "
            "NCCL needs a GPU of its own for every rank");
}

TEST(NcclPreflight, RefusesALibraryOfAnotherMajorVersionOrTooOldAOne) {
  EXPECT_EQ(nccl_version_problem(22809, 22809), "");
  EXPECT_EQ(nccl_version_problem(22809, 21900), "");
  EXPECT_EQ(nccl_version_problem(22809, 23102), "");
  EXPECT_EQ(nccl_version_problem(22809, 30001),
            "this library was built with the header of NCCL 2.28.9, but NCCL 3.0.1 is loaded; allowed are "
            "versions 2.x, and 2.19 or newer");
  EXPECT_EQ(nccl_version_problem(22809, 21806),
            "this library was built with the header of NCCL 2.28.9, but NCCL 2.18.6 is loaded; allowed are "
            "versions 2.x, and 2.19 or newer");
}

TEST(NcclPreflight, ReadsBothFormsOfTheVersionNumber) {
  EXPECT_EQ(nccl_version_text(22809), "2.28.9");
  EXPECT_EQ(nccl_version_text(2804), "2.8.4");
}

TEST(NcclPreflight, WindowsNeedOneMinorVersionThatHasThem) {
  EXPECT_EQ(nccl_window_problem(22809, 22803), "");
  EXPECT_EQ(nccl_window_problem(22809, 22703), "NCCL 2.27.3 has no windows; 2.28 or newer is needed");
  EXPECT_EQ(nccl_window_problem(21903, 22809), "NCCL 2.19.3 has no windows; 2.28 or newer is needed");
  EXPECT_EQ(nccl_window_problem(22809, 22907),
            "NCCL 2.29.7 is loaded, but the windows of NCCL 2.28.9 were built in; both must be of one minor "
            "version");
}

TEST(NcclPreflight, WindowsNeedOneDomain) {
  EXPECT_EQ(nccl_domain_problem(8, 8), "");
  EXPECT_EQ(nccl_domain_problem(8, 16),
            "only 8 of the 16 ranks can reach each other's memory (one NVLink domain)");
}

}  // namespace
}  // namespace mxopt
