#ifndef KEDGE_TESTS_SUPPORT_THREAD_REDUCER_H_
#define KEDGE_TESTS_SUPPORT_THREAD_REDUCER_H_

// The sum over the ranks of a group whose ranks are threads of one process: a
// barrier with a deadline. Can be told to fail.

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

namespace kedge {

class ThreadReducer {
 public:
  // What happens to one call of one rank.
  enum class Fault {
    kNone,
    kAbsent,  // fails and takes no part: the others wait for their deadline
    // Fails and takes no part; the others fail at once, until Reset: the
    // connection is gone.
    kAbort,
    kLate,  // likewise, but the others have got this sum
  };
  using Script = std::function<Fault(std::uint32_t rank, std::int64_t call)>;

  explicit ThreadReducer(
      std::uint32_t size,
      std::chrono::milliseconds deadline = std::chrono::seconds(60));

  // What GroupOptions::reduce of a rank is to be. Outlived by this object.
  std::function<absl::Status(std::span<std::uint64_t>)> ForRank(
      std::uint32_t rank);

  // Asked about each call; calls of a rank are numbered from 1 since the last
  // Reset.
  void set_script(Script script);
  // Forgets the script, the counts and a lost connection.
  void Reset();
  // Calls of a rank since the last Reset.
  std::int64_t calls(std::uint32_t rank) const;
  // Most values of one call since the last Reset.
  std::size_t most_values() const;
  // Plain sums of 64-bit integers, as a library gives them that knows no
  // modulus. For at most 8 ranks.
  void set_plain(bool plain);

 private:
  absl::Status Reduce(std::uint32_t rank, std::span<std::uint64_t> values);

  const std::uint32_t size_;
  const std::chrono::milliseconds deadline_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  Script script_ ABSL_GUARDED_BY(mutex_);
  bool plain_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<std::int64_t> calls_ ABSL_GUARDED_BY(mutex_);
  std::size_t most_values_ ABSL_GUARDED_BY(mutex_) = 0;
  bool broken_ ABSL_GUARDED_BY(mutex_) = false;
  // The round in progress. Who waits in it keeps it until he has its result.
  struct Round {
    bool ended = false;
    absl::Status outcome;
    std::vector<std::uint64_t> sum;
    std::vector<std::vector<std::uint64_t>> given;
    std::vector<bool> here;
  };
  std::shared_ptr<Round> NewRound() const;
  std::shared_ptr<Round> round_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace kedge

#endif  // KEDGE_TESTS_SUPPORT_THREAD_REDUCER_H_
