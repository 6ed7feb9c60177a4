#include "mxopt/optimizer/checkpoint/background_save.h"

#include <cerrno>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "checkpoint_model.h"
#include "support/temporary_folder.h"
#include "support/thrown_message.h"

#include "mxopt/params/check.h"

namespace mxopt {
namespace {

using test::contains;
using test::TemporaryFolder;
using test::thrown_message;

/// Holds the save before its first action until open().
class Gate : public FileHook {
 public:
  explicit Gate(int code = 0) : code_(code) {}
  int before(FileAction, const std::filesystem::path&) override {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return is_open_; });
    return code_;
  }
  void open() {
    const std::lock_guard lock(mutex_);
    is_open_ = true;
    changed_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool is_open_ = false;
  int code_;
};

test::CheckpointModel small_model(int seed) {
  test::CheckpointModel model;
  model.params = {{"w", {40, 8}}};
  model.seed = seed;
  return model;
}

/// Contents that own their memory.
CheckpointContents snapshot(int seed) {
  auto memory = std::make_shared<std::vector<std::vector<float>>>();
  CheckpointContents contents = small_model(seed).part(0, 1, *memory);
  contents.keep_alive = memory;
  return contents;
}

// B52: the file is of the moment of the snapshot, and a second save can not overtake it.
TEST(BackgroundSave, SavesWhatItWasGivenWhileTheCallerGoesOn) {
  const TemporaryFolder folder;
  Gate gate;
  BackgroundSave save;
  EXPECT_FALSE(save.active());
  EXPECT_TRUE(save.done());
  save.start(test::make_job(folder.path(), 5), snapshot(5), &gate);
  EXPECT_TRUE(save.active());
  EXPECT_FALSE(save.done());
  EXPECT_TRUE(contains(
      thrown_message<ContractError>([&] { save.start(test::make_job(folder.path(), 6), snapshot(6)); }),
      "a save of step 6 can not start: that of step 5 has not been waited for"));
  gate.open();
  const SavedCheckpoint saved = save.wait();
  EXPECT_EQ(saved.folder, folder / "step-00000005");
  EXPECT_FALSE(save.active());
  CheckpointReader reader(folder.path());
  test::expect_equal(small_model(5), reader);
  save.start(test::make_job(folder.path(), 10), snapshot(10));
  save.wait();
  CheckpointReader second(folder.path());
  test::expect_equal(small_model(10), second);
  EXPECT_TRUE(contains(thrown_message<ContractError>([&] { save.wait(); }), "no save was started"));
}

TEST(BackgroundSave, ThrowsTheErrorWhenItIsWaitedFor) {
  const TemporaryFolder folder;
  Gate gate(ENOSPC);
  gate.open();
  BackgroundSave save;
  save.start(test::make_job(folder.path(), 5), snapshot(5), &gate);
  EXPECT_TRUE(contains(thrown_message<CheckpointError>([&] { save.wait(); }), "No space left on device"));
  save.start(test::make_job(folder.path(), 6), snapshot(6));
  save.wait();
}

TEST(BackgroundSave, ItsDestructorWaits) {
  const TemporaryFolder folder;
  Gate gate;
  {
    BackgroundSave save;
    save.start(test::make_job(folder.path(), 5), snapshot(5), &gate);
    gate.open();
  }
  CheckpointReader reader(folder.path());
  test::expect_equal(small_model(5), reader);
}

}  // namespace
}  // namespace mxopt
