#ifndef KEDGE_TESTS_READER_READER_GROUP_H_
#define KEDGE_TESTS_READER_READER_GROUP_H_

// The ranks of an inference engine as threads of one process, each with its
// memory, its file system and its follower.

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "kedge/format/tensor_table.h"
#include "kedge/reader/follower.h"
#include "kedge/tests/reader/engine_memory.h"
#include "kedge/tests/reader/published_run.h"
#include "kedge/tests/support/fault_file_system.h"
#include "kedge/tests/support/thread_reducer.h"

namespace kedge {

// How a model is cut over the ranks. What cannot be cut is held by all of them.
enum class Split {
  kRows,       // equal parts of the first dimension
  kColumns,    // equal parts of the last dimension
  kUneven,     // rows: the higher the rank, the more; rank 0 has none of many
  kReplicas,   // rows in half as many parts as ranks: two hold the same ones
  kUnalike,    // rows: odd ranks have other cuts of what even ranks hold
  kPacked,     // rows, with gaps; gate and up between each other's rows
  kScattered,  // each tensor on one rank, those without dimensions on all
};
inline constexpr Split kAllSplits[] = {
    Split::kRows,    Split::kColumns, Split::kUneven,   Split::kReplicas,
    Split::kUnalike, Split::kPacked,  Split::kScattered};
std::string SplitName(Split split);

std::vector<EngineMemory::Part> PartsOf(const TensorTable& table, Split split,
                                        std::uint32_t rank, std::uint32_t size);

class ReaderGroup {
 public:
  // Changes the options of one rank.
  using Adjust = std::function<void(std::uint32_t rank, FollowerOptions*)>;

  ReaderGroup(
      const PublishedRun& run, Split split, std::uint32_t size,
      const Adjust& adjust = nullptr,
      std::chrono::milliseconds reduce_deadline = std::chrono::seconds(60),
      std::vector<Device*> devices = {});  // by rank; none: the default one

  std::uint32_t size() const { return size_; }
  EngineMemory& memory(std::uint32_t rank) { return *memories_[rank]; }
  Follower& follower(std::uint32_t rank) { return *followers_[rank]; }
  FaultFileSystem& faults(std::uint32_t rank) { return *faults_[rank]; }
  ThreadReducer& reducer() { return reducer_; }

  // Calls call(rank) on a thread for each rank; waits; by rank.
  std::vector<absl::Status> OnAll(
      const std::function<absl::Status(std::uint32_t)>& call);
  std::vector<absl::Status> Open();
  std::vector<absl::Status> Update();
  std::vector<absl::Status> Join();
  std::vector<absl::Status> JoinStep(std::uint64_t step);
  std::vector<absl::Status> VerifyHeld(std::uint64_t step);
  // What the last Update, Join or JoinStep did, by rank.
  const UpdateResult& result(std::uint32_t rank) const {
    return results_[rank];
  }

  // Puts `step` into the memory of every rank and opens and verifies anew.
  void Hold(std::uint64_t step);
  // Forgets faults and counts.
  void Reset();

  // Empty if all ranks are in one state, which is true: one version and its
  // bytes, or none. Else says what is not so.
  std::string Trouble();
  // Likewise, and all are ready with `step`.
  std::string TroubleAt(std::uint64_t step);
  FollowerState state() { return followers_[0]->state(); }

 private:
  const PublishedRun& run_;
  const std::uint32_t size_;
  Adjust adjust_;
  std::vector<Device*> devices_;
  ThreadReducer reducer_;
  std::vector<std::unique_ptr<EngineMemory>> memories_;
  std::vector<std::unique_ptr<FaultFileSystem>> faults_;
  std::vector<std::unique_ptr<Follower>> followers_;
  std::vector<UpdateResult> results_;
};

// "" if all are OK.
std::string ErrorsOf(const std::vector<absl::Status>& statuses);

}  // namespace kedge

#endif  // KEDGE_TESTS_READER_READER_GROUP_H_
