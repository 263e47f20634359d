#ifndef KEDGE_EXAMPLES_OFFLOAD_TRAINER_THREAD_TEAM_H_
#define KEDGE_EXAMPLES_OFFLOAD_TRAINER_THREAD_TEAM_H_

// Threads that wait for work: a step hands out hundreds of pieces, each of a
// few milliseconds.

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"

namespace kedge::example {

// Thread safety: one thread at a time calls Run.
class ThreadTeam {
 public:
  explicit ThreadTeam(int threads);
  ~ThreadTeam();
  ThreadTeam(const ThreadTeam&) = delete;
  ThreadTeam& operator=(const ThreadTeam&) = delete;

  // Runs body(begin, end) on ranges that make up [0, count), one a thread, this
  // one included. A range begins at a multiple of 4096 and none is shorter but
  // the last. Returns when all are done.
  void Run(std::uint64_t count,
           const std::function<void(std::uint64_t, std::uint64_t)>& body);

 private:
  void Work(std::uint64_t index);
  void DoPart(std::uint64_t index, std::uint64_t count,
              const std::function<void(std::uint64_t, std::uint64_t)>& body);

  const std::uint64_t size_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::uint64_t round_ ABSL_GUARDED_BY(mutex_) = 0;
  std::uint64_t running_ ABSL_GUARDED_BY(mutex_) = 0;
  bool stop_ ABSL_GUARDED_BY(mutex_) = false;
  std::uint64_t count_ ABSL_GUARDED_BY(mutex_) = 0;
  const std::function<void(std::uint64_t, std::uint64_t)>* body_
      ABSL_GUARDED_BY(mutex_) = nullptr;
  std::vector<std::thread> threads_;
};

}  // namespace kedge::example

#endif  // KEDGE_EXAMPLES_OFFLOAD_TRAINER_THREAD_TEAM_H_
