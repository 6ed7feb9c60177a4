// A process that saves is killed anywhere; what it leaves is never taken for a checkpoint that it is not.

#include <atomic>
#include <csignal>
#include <random>
#include <string>

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include "checkpoint_model.h"
#include "support/temporary_folder.h"

namespace mxopt {
namespace {

using test::TemporaryFolder;

/// Kills its process before the n-th action.
class KillAt : public FileHook {
 public:
  explicit KillAt(int action) : action_(action) {}
  int before(FileAction, const std::filesystem::path&) override {
    if (++actions_ == action_) kill(getpid(), SIGKILL);
    return 0;
  }
  std::size_t write_limit() override { return 1000; }
  int actions() const { return actions_; }

 private:
  int action_;
  std::atomic<int> actions_ = 0;
};

test::CheckpointModel small_model(int seed) {
  test::CheckpointModel model;
  model.params = {{"w", {40, 8}}, {"b", {300}}};
  model.seed = seed;
  return model;
}

void save_with_hook(const std::filesystem::path& dir, std::int64_t step, int seed, FileHook& hook) {
  CheckpointJob job = test::make_job(dir, step, 0, 1, "killed" + std::to_string(seed));
  job.keep_last = 1;
  std::vector<std::vector<float>> memory;
  write_checkpoint(job, small_model(seed).part(0, 1, memory), &hook);
}

/// Whether the child was killed before the save was over.
bool save_in_child(const std::filesystem::path& dir, std::int64_t step, int seed, int action) {
  const pid_t child = fork();
  if (child == 0) {
    KillAt hook(action);
    try {
      save_with_hook(dir, step, seed, hook);
    } catch (const std::exception&) {
      _exit(1);
    }
    _exit(0);
  }
  int status = 0;
  EXPECT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFSIGNALED(status) || WEXITSTATUS(status) == 0);
  return WIFSIGNALED(status);
}

/// The next step each time, or the same one again.
void kill_at_random_points(bool same_step, int kills) {
  int actions = 0;
  {
    const TemporaryFolder folder;
    test::save(small_model(0), folder.path(), 1, 1);
    KillAt counter(0);
    save_with_hook(folder.path(), same_step ? 1 : 2, 1, counter);
    actions = counter.actions();
  }
  ASSERT_GT(actions, 20);
  std::mt19937 random(7);  // NOLINT: the same points every time
  const TemporaryFolder folder;
  test::save(small_model(0), folder.path(), 1, 1);
  std::int64_t last_step = 1;
  int last_seed = 0;
  for (int seed = 1; seed <= kills; ++seed) {
    const std::int64_t step = same_step ? 1 : seed + 1;
    const int action = static_cast<int>(random() % static_cast<unsigned>(actions)) + 1;
    const bool is_killed = save_in_child(folder.path(), step, seed, action);
    SCOPED_TRACE("killed before action " + std::to_string(action) + " of the save with seed " +
                 std::to_string(seed));
    EXPECT_TRUE(is_killed || action > actions - 10);  // there may be less to remove
    CheckpointReader reader(folder.path());
    const int found = static_cast<int>(reader.section("").scalars.steps) - 41;
    test::expect_equal(small_model(found), reader);
    if (found != seed) {
      EXPECT_EQ(found, last_seed);
      EXPECT_EQ(reader.step(), last_step);
      EXPECT_TRUE(is_killed);
    }
    // A new one that latest does not name yet is whole too.
    for (const CheckpointListing& listing : list_checkpoints(folder.path()))
      EXPECT_TRUE(listing.complete) << listing.problem;
    last_step = reader.step();
    last_seed = found;
  }
  test::save(small_model(99), folder.path(), 99, 2, 1);
  CheckpointReader reader(folder.path());
  test::expect_equal(small_model(99), reader);
  EXPECT_EQ(test::names_of(folder.path()).size(), 3U);  // the outcome of the save, latest, the step
}

TEST(KilledSave, TheCheckpointBeforeOrTheNewOneIsRead) {
  kill_at_random_points(false, 50);
}

TEST(KilledSave, WhileTheSameStepIsReplaced) {
  kill_at_random_points(true, 25);
}

}  // namespace
}  // namespace mxopt
