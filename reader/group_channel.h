#ifndef KEDGE_READER_GROUP_CHANNEL_H_
#define KEDGE_READER_GROUP_CHANNEL_H_

// What the ranks of a group say to each other through the one operation that
// they are given, a sum. An all-gather is had from it by slots that one rank
// alone fills.

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "kedge/format/manifest.h"
#include "kedge/reader/follower.h"
#include "kedge/reader/group.h"

namespace kedge {

// What a rank is doing, so that ranks which do different things find out.
enum class GroupPhase : std::uint32_t {
  kOpen = 1,
  kUpdate,
  kWait,
  kJoin,
  kJoinStep,
  kJoinLoaded,
  kVerifyHeld,
  // Sums.
  kMask,
  kVerify,
};
absl::string_view ToString(GroupPhase phase);

// What a rank says before anything is written.
struct Ballot {
  absl::StatusCode code = absl::StatusCode::kOk;  // of its own preparations
  FollowerState state = FollowerState::kEmpty;
  bool superseded = false;
  bool expired = false;  // its patience has ended; that of rank 0 counts
  bool last = true;      // it knows of no version after its target
  std::optional<VersionId> held;
  std::optional<VersionId> target;  // nothing: nothing newer
  std::uint32_t target_epoch = 0;
};

// Thread safety: one thread at a time.
class GroupChannel {
 public:
  // kInvalidArgument.
  static absl::Status Check(const GroupOptions& options);
  explicit GroupChannel(GroupOptions options);

  bool alone() const { return options_.size == 1; }
  std::uint32_t rank() const { return options_.rank; }
  std::uint32_t size() const { return options_.size; }
  // "group tp", for messages.
  const std::string& text() const { return text_; }

  // Every rank's ballot, by rank. One reduce.
  //
  // Errors: the reducer's; kFailedPrecondition, on every rank, if the ranks are
  // in different phases, or a rank is missing or there twice.
  absl::StatusOr<std::vector<Ballot>> Vote(GroupPhase phase,
                                           const Ballot& mine);

  // Sums of residues, and how each rank fared. One reduce.
  struct Total {
    std::vector<std::uint64_t> residues;  // in [0, p)
    std::vector<absl::StatusCode> codes;  // by rank
  };
  absl::StatusOr<Total> Add(GroupPhase phase, absl::StatusCode code,
                            std::span<const std::uint64_t> residues);

  // Every rank's bytes, by rank. Two reduces: sizes, bytes; the first one alone
  // if a rank has none to give because it failed (`mine` is not OK), or if
  // ranks do not agree on `alike`.
  absl::StatusOr<std::vector<std::vector<std::byte>>> Exchange(
      GroupPhase phase, const absl::StatusOr<std::vector<std::byte>>& mine,
      std::span<const std::uint64_t> alike);

  // What to return where some ranks failed: `mine` if this one did, else an
  // error of the first one's class that names them all.
  absl::Status Failure(const std::vector<absl::StatusCode>& codes,
                       const absl::Status& mine, absl::string_view what,
                       absl::string_view consequence) const;

 private:
  absl::Status Reduce(std::span<std::uint64_t> values);
  // `mine`, one entry for each of `slots`, in place of this rank.
  absl::Status Gather(GroupPhase phase, std::size_t slots,
                      std::vector<std::uint64_t>* values);

  GroupOptions options_;
  std::string text_;
};

}  // namespace kedge

#endif  // KEDGE_READER_GROUP_CHANNEL_H_
