// Goal: the pool starts tasks in order, keeps the bound, reports the first
// error and never hangs. Runs under tsan.

#include "kedge/engine/io/io_pool.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "gtest/gtest.h"

namespace kedge {
namespace {

// Lets tasks wait until the test says go.
class Gate {
 public:
  void Open() {
    const std::lock_guard lock(mutex_);
    open_ = true;
    changed_.notify_all();
  }
  void Pass() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return open_; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool open_ = false;
};

TEST(IoPoolTest, RunsEveryTaskOnceOnItsThreads) {
  IoPool pool(4);
  EXPECT_EQ(pool.thread_count(), 4);
  std::vector<std::atomic<int>> runs(1000);
  IoPool::Batch batch(&pool);
  for (std::atomic<int>& run : runs) {
    batch.Submit([&run] {
      ++run;
      return absl::OkStatus();
    });
  }
  EXPECT_TRUE(batch.Wait().ok());
  for (const std::atomic<int>& run : runs) EXPECT_EQ(run, 1);
}

TEST(IoPoolTest, OneThreadRunsTasksInSubmissionOrder) {
  IoPool pool(1);
  std::vector<int> order;
  IoPool::Batch batch(&pool);
  for (int i = 0; i < 200; ++i) {
    batch.Submit([&order, i] {
      order.push_back(i);
      return absl::OkStatus();
    });
  }
  ASSERT_TRUE(batch.Wait().ok());
  ASSERT_EQ(order.size(), 200u);
  EXPECT_TRUE(std::is_sorted(order.begin(), order.end()));
}

TEST(IoPoolTest, ReportsTheFirstErrorAndSkipsTheRest) {
  IoPool pool(1);
  std::atomic<int> runs = 0;
  IoPool::Batch batch(&pool);
  batch.set_max_in_flight(100);
  for (int i = 0; i < 50; ++i) {
    batch.Submit([&runs, i] {
      ++runs;
      if (i == 7) return absl::DataLossError("seven");
      if (i > 7) return absl::InternalError("later");
      return absl::OkStatus();
    });
  }
  EXPECT_EQ(batch.Wait(), absl::DataLossError("seven"));
  EXPECT_EQ(runs, 8);
  batch.Submit([&runs] {
    ++runs;
    return absl::OkStatus();
  });
  EXPECT_EQ(batch.Wait(), absl::DataLossError("seven"));
  EXPECT_EQ(runs, 8);
}

TEST(IoPoolTest, AFailedBatchDoesNotTouchAnotherOne) {
  IoPool pool(2);
  IoPool::Batch bad(&pool);
  IoPool::Batch good(&pool);
  std::atomic<int> runs = 0;
  for (int i = 0; i < 20; ++i) {
    bad.Submit([] { return absl::InternalError("bad"); });
    good.Submit([&runs] {
      ++runs;
      return absl::OkStatus();
    });
  }
  EXPECT_TRUE(good.Wait().ok());
  EXPECT_FALSE(bad.Wait().ok());
  EXPECT_EQ(runs, 20);
}

TEST(IoPoolTest, BatchIsUsedAgainAfterSuccess) {
  IoPool pool(2);
  IoPool::Batch batch(&pool);
  EXPECT_TRUE(batch.Wait().ok());  // an empty one too
  std::atomic<int> runs = 0;
  for (int round = 1; round <= 3; ++round) {
    for (int i = 0; i < 10; ++i) {
      batch.Submit([&runs] {
        ++runs;
        return absl::OkStatus();
      });
    }
    EXPECT_TRUE(batch.Wait().ok());
    EXPECT_EQ(runs, 10 * round);
  }
}

TEST(IoPoolTest, InFlightBoundCountsWhatTasksHold) {
  IoPool pool(8);
  IoPool::Batch batch(&pool);
  batch.set_max_in_flight(3);
  std::atomic<int> held = 0;
  std::atomic<int> most = 0;
  for (int i = 0; i < 300; ++i) {
    batch.Submit(
        [&held, &most,
         buffer = std::shared_ptr<int>(new int(++held), [&held](int* value) {
           --held;
           delete value;
         })] {
          most = std::max(most.load(), held.load());
          return absl::OkStatus();
        });
  }
  EXPECT_TRUE(batch.Wait().ok());
  EXPECT_EQ(held, 0);
  // One more: the task that Submit waits with has its buffer already.
  EXPECT_LE(most, 4);
  EXPECT_GE(most, 1);
}

TEST(IoPoolTest, SubmitBlocksWhileTheBoundIsReached) {
  IoPool pool(1);
  IoPool::Batch batch(&pool);
  batch.set_max_in_flight(2);
  Gate gate;
  std::atomic<int> submitted = 0;
  std::thread producer([&] {
    for (int i = 0; i < 3; ++i) {
      batch.Submit([&gate] {
        gate.Pass();
        return absl::OkStatus();
      });
      ++submitted;
    }
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  EXPECT_LE(submitted, 2);
  gate.Open();
  producer.join();
  EXPECT_EQ(submitted, 3);
  EXPECT_TRUE(batch.Wait().ok());
}

TEST(IoPoolTest, TasksRunAtTheSameTime) {
  constexpr int kThreads = 4;
  IoPool pool(kThreads);
  IoPool::Batch batch(&pool);
  std::mutex mutex;
  std::condition_variable changed;
  int arrived = 0;
  for (int i = 0; i < kThreads; ++i) {
    batch.Submit([&] {
      std::unique_lock lock(mutex);
      ++arrived;
      changed.notify_all();
      const bool met = changed.wait_for(lock, std::chrono::seconds(20),
                                        [&] { return arrived == kThreads; });
      return met ? absl::OkStatus() : absl::DeadlineExceededError("alone");
    });
  }
  EXPECT_TRUE(batch.Wait().ok());
}

TEST(IoPoolTest, SeveralThreadsShareABatch) {
  IoPool pool(3);
  IoPool::Batch batch(&pool);
  batch.set_max_in_flight(2);
  std::atomic<int> runs = 0;
  std::vector<std::thread> producers;
  for (int i = 0; i < 4; ++i) {
    producers.emplace_back([&] {
      for (int j = 0; j < 100; ++j) {
        batch.Submit([&runs] {
          ++runs;
          return absl::OkStatus();
        });
      }
      EXPECT_TRUE(batch.Wait().ok());
    });
  }
  for (std::thread& producer : producers) producer.join();
  EXPECT_TRUE(batch.Wait().ok());
  EXPECT_EQ(runs, 400);
}

TEST(IoPoolTest, DestroyingTheBatchWaits) {
  IoPool pool(2);
  std::atomic<int> runs = 0;
  {
    IoPool::Batch batch(&pool);
    for (int i = 0; i < 100; ++i) {
      batch.Submit([&runs] {
        ++runs;
        return absl::OkStatus();
      });
    }
  }
  EXPECT_EQ(runs, 100);
}

TEST(IoPoolTest, DestroyingThePoolDropsUnstartedTasksAndReportsIt) {
  auto pool = std::make_unique<IoPool>(1);
  IoPool::Batch batch(pool.get());
  batch.set_max_in_flight(10);
  Gate started;
  Gate gate;
  std::atomic<int> runs = 0;
  batch.Submit([&] {
    ++runs;
    started.Open();
    gate.Pass();
    return absl::OkStatus();
  });
  for (int i = 0; i < 5; ++i) {
    batch.Submit([&runs] {
      ++runs;
      return absl::OkStatus();
    });
  }
  started.Pass();
  std::thread opener([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    gate.Open();
  });
  pool.reset();
  opener.join();
  EXPECT_TRUE(absl::IsCancelled(batch.Wait()));
  EXPECT_EQ(runs, 1);
}

}  // namespace
}  // namespace kedge
