#ifndef KEDGE_EXAMPLES_GPU_LOOP_THREAD_SUM_H_
#define KEDGE_EXAMPLES_GPU_LOOP_THREAD_SUM_H_

// What GroupOptions::reduce needs when the ranks of an inference engine are
// threads of one process.

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"

namespace kedge::example {

// A sum of 64-bit words over the ranks, who meet in rounds.
//
// Thread safety: each rank calls what ForRank gave it from one thread.
class ThreadSum {
 public:
  ThreadSum(std::uint32_t ranks, std::chrono::milliseconds deadline)
      : ranks_(ranks), deadline_(deadline), round_(NewRound()) {}

  // Outlived by this object. kDeadlineExceeded if a rank does not come;
  // kUnavailable if they come with unlike numbers of values.
  std::function<absl::Status(std::span<std::uint64_t>)> ForRank(
      std::uint32_t rank);

 private:
  // Who waits in a round keeps it until he has its sum.
  struct Round {
    std::vector<std::uint64_t> sum;
    std::uint32_t arrived = 0;
    bool ended = false;
    absl::Status outcome;
  };
  static std::shared_ptr<Round> NewRound() { return std::make_shared<Round>(); }
  absl::Status Add(std::uint32_t rank, std::span<std::uint64_t> values);

  const std::uint32_t ranks_;
  const std::chrono::milliseconds deadline_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::shared_ptr<Round> round_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace kedge::example

#endif  // KEDGE_EXAMPLES_GPU_LOOP_THREAD_SUM_H_
