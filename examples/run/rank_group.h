#ifndef KEDGE_EXAMPLES_RUN_RANK_GROUP_H_
#define KEDGE_EXAMPLES_RUN_RANK_GROUP_H_

// Ranks as processes of one host: forked from one program, joined by sockets.
// Stands in for a launcher and NCCL; kedge needs neither.

#include <sys/types.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace kedge::example {

// Thread safety: none.
class RankGroup {
 public:
  // Starts ranks 1 to size - 1 as copies of this process, which is rank 0, and
  // returns in each of them. Call it while there is one thread. A rank dies
  // with rank 0. kResourceExhausted if the system has no more processes.
  static absl::StatusOr<std::unique_ptr<RankGroup>> Fork(
      std::uint32_t size, std::chrono::milliseconds timeout);
  // Rank 0: kills the ranks that still run.
  ~RankGroup();

  std::uint32_t rank() const { return rank_; }
  std::uint32_t size() const { return size_; }

  // Replaces each value, below 2^61 - 1, by the sum over all ranks modulo
  // 2^61 - 1. Collective: every rank calls it with as many values.
  // kUnavailable, naming the rank, if one has ended or does not answer in time.
  absl::Status AllReduce(std::span<std::uint64_t> values);

  // Rank 0: waits until the other ranks have ended; an error names the first
  // one that failed. Others: nothing.
  absl::Status Finish();

 private:
  RankGroup(std::uint32_t size, std::chrono::milliseconds timeout)
      : size_(size), timeout_(timeout) {}

  std::uint32_t rank_ = 0;
  std::uint32_t size_;
  std::chrono::milliseconds timeout_;
  std::vector<pid_t> children_;  // rank 0: of ranks 1, 2, ...
  std::vector<int> sockets_;  // rank 0: to ranks 1, 2, ...; others: to rank 0
};

}  // namespace kedge::example

#endif  // KEDGE_EXAMPLES_RUN_RANK_GROUP_H_
