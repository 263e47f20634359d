#ifndef KEDGE_WRITER_ANCHOR_FEED_H_
#define KEDGE_WRITER_ANCHOR_FEED_H_

// Threads that write an anchor's bytes while a step goes on, from where the
// optimizer has them. Private to writer/.

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "kedge/writer/anchor_writer.h"

namespace kedge {

// Allocates nothing after it is made.
//
// Thread safety: Begin, Push and Finish from one thread at a time; HasPassed
// and WaitFor from any.
class AnchorFeed {
 public:
  // Units in one piece of an anchor file (AnchorWriter::FirstPieceOf), in host
  // memory that stays as it is until the job is done.
  struct Job {
    std::uint32_t tensor = 0;
    UnitRange units;
    const TileGrid* grid = nullptr;
    StridedUnits source;
  };

  // `gathers`: some sources are not contiguous; a buffer of kPieceBytes a
  // thread. `deadline`: of what is said to have one.
  AnchorFeed(int threads, std::size_t capacity, bool gathers,
             std::chrono::milliseconds deadline);
  ~AnchorFeed();
  AnchorFeed(const AnchorFeed&) = delete;
  AnchorFeed& operator=(const AnchorFeed&) = delete;

  // Later jobs are of `writer`, which outlives them. Waits for earlier ones.
  void Begin(AnchorWriter* writer);
  // Queues a job; waits while `capacity` jobs are not done, up to the deadline,
  // which is a failure. After one jobs are passed over. Returns how many were
  // ever queued.
  std::uint64_t Push(const Job& job);
  // Waits for every job. The first error since Begin.
  absl::Status Finish();

  // Whether the first `count` jobs that were ever queued are done.
  bool HasPassed(std::uint64_t count) const;
  // kUnavailable after the deadline: their sources are then still in use.
  absl::Status WaitFor(std::uint64_t count) const;
  absl::Status WaitUntilIdle() const;

 private:
  void Work(std::byte* scratch);

  const std::chrono::milliseconds deadline_;
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  std::vector<Job> jobs_ ABSL_GUARDED_BY(mutex_);   // [capacity], a ring
  std::vector<bool> done_ ABSL_GUARDED_BY(mutex_);  // [capacity]
  std::uint64_t pushed_ ABSL_GUARDED_BY(mutex_) = 0;
  std::uint64_t taken_ ABSL_GUARDED_BY(mutex_) = 0;
  std::uint64_t passed_ ABSL_GUARDED_BY(mutex_) = 0;  // all below are done
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Status status_ ABSL_GUARDED_BY(mutex_);
  AnchorWriter* writer_ ABSL_GUARDED_BY(mutex_) = nullptr;
  std::vector<std::unique_ptr<std::byte[]>> scratch_;
  std::vector<std::thread> threads_;
};

}  // namespace kedge

#endif  // KEDGE_WRITER_ANCHOR_FEED_H_
