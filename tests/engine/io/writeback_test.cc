// Goal: who writes never waits for storage to begin, no file is in use once
// Stop has returned, and the hint reaches the file below. Runs under tsan.

#include "kedge/engine/io/writeback.h"

#include <pthread.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace kedge {
namespace {

using ::testing::ElementsAre;

// Begins with a range when it is let.
class SlowFile final : public File {
 public:
  absl::string_view path() const override { return "slow"; }
  absl::StatusOr<std::size_t> ReadSome(std::uint64_t,
                                       std::span<std::byte>) override {
    return std::size_t{0};
  }
  absl::StatusOr<std::size_t> WriteSome(
      std::uint64_t, std::span<const std::byte> bytes) override {
    return bytes.size();
  }
  absl::StatusOr<std::uint64_t> Size() override { return std::uint64_t{0}; }
  absl::Status Resize(std::uint64_t) override { return absl::OkStatus(); }
  absl::Status Sync() override { return absl::OkStatus(); }
  absl::Status Close() override { return absl::OkStatus(); }
  absl::StatusOr<std::unique_ptr<MappedRegion>> Map(std::uint64_t) override {
    return absl::UnimplementedError("slow");
  }
  void WillRead(std::uint64_t, std::uint64_t) override {}
  void StartWriteback(std::uint64_t offset, std::uint64_t) override {
    std::unique_lock lock(mutex_);
    begun_.push_back(offset);
    in_use_ = true;
    changed_.notify_all();
    changed_.wait(lock, [this] { return begun_.size() <= allowed_; });
    in_use_ = false;
  }

  void Allow(std::size_t ranges) {
    const std::lock_guard lock(mutex_);
    allowed_ = ranges;
    changed_.notify_all();
  }
  void WaitUntilBegun(std::size_t ranges) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return begun_.size() >= ranges; });
  }
  std::vector<std::uint64_t> begun() {
    const std::lock_guard lock(mutex_);
    return begun_;
  }
  bool in_use() {
    const std::lock_guard lock(mutex_);
    return in_use_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::size_t allowed_ = 0;
  bool in_use_ = false;
  std::vector<std::uint64_t> begun_;
};

TEST(WritebackTest, BeginsInOrder) {
  SlowFile file;
  file.Allow(3);
  Writeback writeback;
  for (const std::uint64_t offset : {30, 10, 20}) {
    writeback.Add(&file, offset, 5);
  }
  file.WaitUntilBegun(3);
  EXPECT_THAT(file.begun(), ElementsAre(30, 10, 20));
}

TEST(WritebackTest, ARangeTooManyIsLeftOutAndNobodyWaits) {
  SlowFile file;
  Writeback writeback(2);
  writeback.Add(&file, 0, 5);
  file.WaitUntilBegun(1);  // and hangs
  for (std::uint64_t offset = 1; offset < 100; ++offset) {
    writeback.Add(&file, offset, 5);
  }
  file.Allow(100);
  file.WaitUntilBegun(3);
  writeback.Stop();
  EXPECT_THAT(file.begun(), ElementsAre(0, 1, 2));
}

TEST(WritebackTest, StopForgetsTheRestAndWaitsForTheFile) {
  SlowFile file;
  Writeback writeback;
  for (std::uint64_t offset = 0; offset < 10; ++offset) {
    writeback.Add(&file, offset, 5);
  }
  file.WaitUntilBegun(1);
  std::thread later([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    file.Allow(10);  // what Stop did not forget would begin
  });
  writeback.Stop();
  EXPECT_FALSE(file.in_use());
  later.join();
  writeback.Add(&file, 77, 5);
  writeback.Stop();
  EXPECT_THAT(file.begun(), ElementsAre(0));
}

// A trainer at the limit of its container's threads goes on.
TEST(WritebackTest, WithoutAThreadAllIsLeftToSync) {
  pthread_attr_t usual;
  pthread_attr_t huge;
  ASSERT_EQ(pthread_getattr_default_np(&usual), 0);
  ASSERT_EQ(pthread_getattr_default_np(&huge), 0);
  // No address space has room for such a stack.
  ASSERT_EQ(pthread_attr_setstacksize(&huge, std::size_t{1} << 60), 0);
  ASSERT_EQ(pthread_setattr_default_np(&huge), 0);
  SlowFile file;
  {
    Writeback writeback;
    writeback.Add(&file, 0, 5);
    writeback.Stop();
  }
  EXPECT_EQ(pthread_setattr_default_np(&usual), 0);
  pthread_attr_destroy(&usual);
  pthread_attr_destroy(&huge);
  EXPECT_THAT(file.begun(), ElementsAre());
}

}  // namespace
}  // namespace kedge
