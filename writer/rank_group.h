#ifndef KEDGE_WRITER_RANK_GROUP_H_
#define KEDGE_WRITER_RANK_GROUP_H_

// How ranks come to one decision: all say what they have or why they failed,
// rank 0 decides, all hear. Private to writer/.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "kedge/writer/coordinator.h"

namespace kedge {

// What rank 0 decided, the same at every rank that heard it.
struct Verdict {
  absl::Status status;
  std::vector<std::byte> payload;  // empty unless OK
  // Whether what was decided took place cannot be said, at this rank: it did
  // not hear, or rank 0 itself does not know.
  bool outcome_unknown = false;
};

// Borrows the coordinator, which may be null: a rank that is alone.
//
// Thread safety: as the coordinator's.
class RankGroup {
 public:
  explicit RankGroup(Coordinator* coordinator) : coordinator_(coordinator) {}

  std::uint32_t rank() const {
    return coordinator_ == nullptr ? 0 : coordinator_->rank();
  }
  std::uint32_t world_size() const {
    return coordinator_ == nullptr ? 1 : coordinator_->world_size();
  }
  bool alone() const { return world_size() == 1; }
  bool leads() const { return rank() == 0; }

  using Piece = absl::StatusOr<std::vector<std::byte>>;
  // Sees every rank's bytes, in rank order. Called on rank 0 only, and only if
  // all ranks have some.
  using Decide =
      std::function<Verdict(std::span<const std::vector<std::byte>> pieces)>;

  // One round, which every rank takes part in, also with an error for a piece.
  // If a rank failed, or is missing, the verdict says which and why. `cleanup`
  // runs on rank 0 before a failure that is none of "outcome unknown" is told.
  //
  // Not for a rank that is alone.
  Verdict Agree(absl::string_view what, const Piece& mine, const Decide& decide,
                const std::function<void()>& cleanup = nullptr) const;

 private:
  Coordinator* coordinator_;
};

// "rank 2 of 6"
std::string RankName(std::uint32_t rank, std::uint32_t world_size);

}  // namespace kedge

#endif  // KEDGE_WRITER_RANK_GROUP_H_
