#ifndef KEDGE_READER_FOLLOWER_IMPL_H_
#define KEDGE_READER_FOLLOWER_IMPL_H_

// A follower's insides. follower.cc runs updates, follower_plan.cc looks and
// prepares, follower_group.cc does what ranks do together.

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kedge/engine/io/io_pool.h"
#include "kedge/engine/io/store.h"
#include "kedge/format/l61.h"
#include "kedge/reader/anchor_load.h"
#include "kedge/reader/binding.h"
#include "kedge/reader/follower.h"
#include "kedge/reader/group_channel.h"
#include "kedge/reader/read_context.h"
#include "kedge/reader/reader_lease.h"
#include "kedge/reader/staged_delta.h"
#include "kedge/reader/weight_backend.h"

namespace kedge {

using SharedStep = std::shared_ptr<const PublishedStep>;

// Everything that one move to a version needs, in memory and checked, but for
// the bytes of an anchor.
struct Prepared {
  SharedStep target;
  std::shared_ptr<const Binding> binding;
  Chain chain;
  std::unique_ptr<AnchorLoad> anchor;  // null: from the version held
  // Of chain.deltas those from `applied` on; of a join that has no room for all
  // at once only the next ones.
  WeightBackend::Deltas deltas;
  std::size_t applied = 0;
  // Deltas are read while the anchor is written, not before, and what became of
  // that.
  bool reads_beside = false;
  absl::Status beside;
  std::vector<std::uint64_t> l61;  // at the target, by ordinal
  TensorMask mask;                 // what a join has to write; empty: all
  // Steps of anchors that proved damaged, and how the first one did.
  std::vector<std::uint64_t> passed_over;
  absl::Status anchor_error;
  // The steps after `target` that have a pause of their own: of a follower that
  // skips no version, or of a chain for which there is no room at once.
  std::vector<SharedStep> later;
  double seconds = 0;
  std::uint64_t bytes_read = 0;
};

// What memory holds.
struct Held {
  VersionId id;
  std::uint32_t epoch = 0;
  std::vector<std::uint64_t> l61;
  // Groups: what this rank's memory adds to each checksum (Binding::Sums).
  std::vector<std::uint64_t> own_residues;
};

struct Follower::Impl {
  using Clock = std::chrono::steady_clock;

  Impl(FollowerOptions follower_options,
       std::vector<const WeightSet*> held_sets, std::unique_ptr<Store> opened);
  // The newest version's table tells what to bind to.
  static absl::StatusOr<std::unique_ptr<Impl>> OpenStore(
      const FollowerOptions& options, std::vector<const WeightSet*> sets,
      SharedStep* newest);

  // ------------------------------------------------------------------- states
  void Set(FollowerState new_state, std::optional<VersionId> version);
  FollowerState State() const;
  // The run went on without the held version. A group says so once all know.
  void MarkSuperseded();
  void PublishSuperseded();
  // After a version stands in memory and is checked as far as it can be.
  void SetHolds(Held now);
  void Poison();
  absl::Status RequireHeld() const;

  // ------------------------------------------------ planning
  // (follower_plan.cc) Reads of manifests, which a moment's trouble must not
  // fail.
  template <typename T>
  absl::StatusOr<T> WithRetries(
      const std::function<absl::StatusOr<T>()>& read) {
    absl::StatusOr<T> result = absl::UnknownError("not read");
    const absl::Status status =
        RetryReads(context, 0, store->path(), /*published=*/false, [&] {
          result = read();
          return result.status();
        });
    if (!status.ok()) return status;
    return result;
  }
  absl::StatusOr<SharedStep> ReadNewest();
  absl::StatusOr<SharedStep> ReadStep(std::uint64_t step);
  // A version that another rank has seen: waits for it to show up here.
  absl::StatusOr<SharedStep> ReadVersion(const VersionId& id);
  // The newest valid step, or null if that is what is held.
  absl::StatusOr<SharedStep> Look();
  // Fills `prepared`, unless nothing newer is published.
  absl::Status Prepare();
  // Likewise for one target.
  absl::Status PrepareTo(const SharedStep& target, Clock::time_point start);
  // Likewise; keeps what is prepared already if it leads there.
  absl::Status PrepareToVersion(const VersionId& id);
  absl::StatusOr<std::vector<SharedStep>> Lineage(const SharedStep& target);
  absl::StatusOr<bool> WasAbandoned(const PublishedStep& target);
  // The first of `steps` (if every version is visited; else as many deltas as
  // there is room for), the others for later.
  absl::Status PrepareNext(std::vector<SharedStep> steps,
                           Clock::time_point start);
  absl::Status PrepareDeltas(std::vector<SharedStep> steps,
                             std::vector<SharedStep> later,
                             Clock::time_point start);
  absl::Status PrepareJoin(const SharedStep& target, Chain* chain,
                           Clock::time_point start);
  // A join without its files: binding, chain (`chain`, or the cheapest), S.
  absl::StatusOr<Prepared> PlanJoin(const SharedStep& target, Chain* chain);
  // S of every tensor at the target of `next`, whose chain begins with an
  // anchor.
  absl::Status ChainL61(Prepared* next) const;
  absl::StatusOr<std::shared_ptr<const Binding>> Bind(
      const std::shared_ptr<const TensorTable>& table) const;
  // Makes `next`, whose chain begins with an anchor, ready to run; passes over
  // damaged anchors for older ones.
  absl::Status LoadChain(Prepared* next);
  // Replaces the chain by one through an older anchor; returns the first
  // failure if there is none.
  absl::Status UseOlderAnchor(const absl::Status& error, Prepared* next);
  // Adds what `read` reads of files to next->bytes_read.
  absl::Status Counted(Prepared* next,
                       const std::function<absl::Status()>& read);
  // Stages the deltas of the chain that come next, as many as there is room
  // for, at least one; `read`: and reads them.
  absl::Status StageDeltas(Prepared* next, bool read);
  // Those that were staged and not read, until `stop`.
  absl::Status ReadDeltas(Prepared* next, const std::atomic<bool>& stop);
  // Which tensors a join must write.
  TensorMask MaskOf(const Binding& bound,
                    const std::vector<Binding::Mismatch>& mismatches) const;
  absl::StatusOr<TensorMask> MaskOfWrong(const Prepared& next);
  TensorMask MaskOfChanged(const Prepared& next) const;
  // The lease covers the chain from now on, and the chain is still there.
  absl::Status PinChain(const Chain& chain);

  // --------------------------------------------------------------------
  // running Pauses, writes, verifies, commits `prepared`, and adds to `result`.
  absl::Status Run(UpdateResult* result);
  // Anchor and deltas into the weights.
  absl::Status Write(Prepared* next, UpdateResult* result);
  // And reads deltas beside it, if that was left.
  absl::Status WriteAnchor(Prepared* next, UpdateResult* result);
  // Write, with another anchor if one fails on the way.
  absl::Status WriteOrPassOver(Prepared* next, UpdateResult* result);
  absl::Status Verify(const Prepared& next, UpdateResult* result);
  // What memory holds, for a process that holds every cover alone.
  struct Comparison {
    std::vector<Binding::Mismatch> mismatches;  // ascending by tensor
    std::uint64_t bytes = 0;                    // that were read
  };
  // Makes ready what Compare and SumOwn need, so that a pause has no need to.
  absl::Status PrepareSums(const std::shared_ptr<const Binding>& bound);
  absl::StatusOr<Comparison> Compare(
      const std::shared_ptr<const Binding>& bound,
      std::span<const std::uint64_t> l61);
  // After verification.
  void Commit(Prepared* next, std::vector<std::uint64_t> own_residues,
              Clock::time_point paused_at, UpdateResult* result);
  absl::StatusOr<UpdateResult> Join(const SharedStep& target,
                                    Clock::time_point start);
  absl::StatusOr<UpdateResult> Update();
  absl::Status VerifyHeld(std::uint64_t step);
  // A version's state and the binding to its table.
  struct Claim {
    SharedStep published;
    std::vector<std::uint64_t> l61;
    std::shared_ptr<const Binding> binding;
  };
  absl::StatusOr<Claim> ReadClaim(std::uint64_t step);
  // Renews the lease if it is due, or says in it what is held now.
  void RenewLease();
  void SetLease(UpdateResult* result);

  // ------------------------------------------------- groups
  // (follower_group.cc) Collective, also where this rank's `impl` is an error.
  static absl::Status OpenInGroup(const FollowerOptions& options,
                                  const std::vector<const WeightSet*>& sets,
                                  absl::StatusOr<std::unique_ptr<Impl>>& impl,
                                  const SharedStep& newest);
  // `expired`: this rank would wait no longer. Sets `*give_up` if rank 0 said
  // so and nothing is newer.
  absl::StatusOr<UpdateResult> UpdateInGroup(GroupPhase phase, bool expired,
                                             bool* give_up);
  absl::StatusOr<UpdateResult> JoinInGroup(GroupPhase phase,
                                           std::optional<std::uint64_t> step);
  absl::Status VerifyHeldInGroup(std::uint64_t step);
  absl::Status PauseOnce();
  void Resume();
  Ballot MakeBallot(const absl::Status& mine, const SharedStep& target) const;
  // Whether all ranks hold one version and may update from it. Sets `*rejoin`
  // if they hold different ones.
  absl::Status CheckHeldAlike(const std::vector<Ballot>& ballots, bool* rejoin);
  // What this rank's memory adds to the checksums; zeros if that failed, for
  // the others wait for a sum.
  struct Own {
    absl::Status status;
    Binding::Sums sums;
  };
  Own SumOwn(const std::shared_ptr<const Binding>& bound);
  // Writes `next`, verifies with the others, commits.
  absl::Status RunInGroup(Prepared* next, UpdateResult* result);
  absl::Status AfterVote(Prepared* next, const std::optional<Held>& before,
                         UpdateResult* result);
  // "; the part of rank 1 is wrong", from what the records should have made of
  // this rank's own slices.
  std::string BlameOwnPart(const Prepared& next,
                           const std::optional<Held>& before,
                           const std::vector<std::uint64_t>& own,
                           const std::vector<Binding::Mismatch>& mismatches);

  FollowerOptions options;
  std::vector<const WeightSet*> sets;
  std::unique_ptr<Store> store;
  const L61Key key;
  IoPool io_pool;
  std::atomic<std::uint64_t> bytes_read{0};  // of data files
  ReadContext context;
  std::unique_ptr<WeightBackend> backend;  // outlives what it staged
  std::shared_ptr<const Binding> binding;
  Clock::time_point last_directory_look;
  std::optional<Held> held;  // none while updating, poisoned, or nothing yet
  bool superseded = false;   // the held version is no ancestor any more
  std::optional<Prepared> prepared;
  Binding::Sums sums;  // of Compare: stays, to be used again
  ReaderLease lease;

  GroupChannel channel;
  // Sets of the other ranks, as they described them; empty at this rank's.
  std::vector<std::vector<std::unique_ptr<const WeightSet>>> foreign_sets;
  std::vector<std::vector<const WeightSet*>> sets_of_rank;
  std::optional<Clock::time_point> paused_at;  // by a group that may not run
  // Anchors from which a join of the group did not verify.
  std::vector<std::uint64_t> suspect_anchors;

  mutable std::mutex mutex;
  FollowerState state ABSL_GUARDED_BY(mutex) = FollowerState::kEmpty;
  std::optional<VersionId> public_held ABSL_GUARDED_BY(mutex);
};

}  // namespace kedge

#endif  // KEDGE_READER_FOLLOWER_IMPL_H_
