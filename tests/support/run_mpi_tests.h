// The main() of a test program that mpirun starts: every rank runs the same tests.
#pragma once

#include <iostream>
#include <string>

#include <gtest/gtest.h>
#include <mpi.h>

namespace mxopt::test {

/// Prints the failures of one rank, and nothing else.
class FailurePrinter final : public ::testing::EmptyTestEventListener {
 public:
  explicit FailurePrinter(int rank) : rank_(rank) {}
  void OnTestStart(const ::testing::TestInfo& test) override { test_ = test.name(); }
  void OnTestPartResult(const ::testing::TestPartResult& result) override {
    if (!result.failed()) return;
    std::cerr << "rank " << rank_ << ": " << test_ << ": "
              << (result.file_name() == nullptr ? "?" : result.file_name()) << ":" << result.line_number()
              << "\n"
              << result.message() << "\n";
  }

 private:
  int rank_;
  std::string test_;
};

/// Initialises MPI, runs all tests, finalizes MPI. Ranks but the first print their failures only. Returns
/// this rank's exit code; mpirun fails when one of them is not 0.
inline int run_mpi_tests(int argc, char** argv) {
  int provided = 0;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_FUNNELED, &provided);
  ::testing::InitGoogleTest(&argc, argv);
  int rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  auto& listeners = ::testing::UnitTest::GetInstance()->listeners();
  if (rank != 0) {
    delete listeners.Release(listeners.default_result_printer());
    listeners.Append(new FailurePrinter(rank));
  }
  const int failed = RUN_ALL_TESTS();
  MPI_Finalize();
  return failed;
}

}  // namespace mxopt::test
