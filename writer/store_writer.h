#ifndef KEDGE_WRITER_STORE_WRITER_H_
#define KEDGE_WRITER_STORE_WRITER_H_

// Creates stores and publishes versions into them: steps, anchors, epochs,
// resume; from one rank or from many. See spec/store.md and docs/protocol.md.
//
// With a Coordinator every call below that says *collective* is made by all
// ranks, in the same order with the same arguments, each with the part of the
// weights that it holds. Rank 0 commits; all hear the same outcome: a failure
// of one rank is every rank's failure, with that rank's number and message.

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
#include "absl/strings/string_view.h"
#include "kedge/engine/cpu/l61_sum.h"
#include "kedge/engine/io/file_system.h"
#include "kedge/engine/io/io_pool.h"
#include "kedge/engine/io/staging.h"
#include "kedge/engine/io/store.h"
#include "kedge/format/anchor_layout.h"
#include "kedge/format/manifest.h"
#include "kedge/writer/anchor_writer.h"
#include "kedge/writer/coordinator.h"
#include "kedge/writer/rank_group.h"
#include "kedge/writer/rank_parts.h"
#include "kedge/writer/retention.h"
#include "kedge/writer/segment_writer.h"
#include "kedge/writer/shared_staging.h"
#include "kedge/writer/tensor_source.h"

namespace kedge {

struct WriterOptions {
  std::string store_path;
  FileSystem* fs = nullptr;  // null: PosixFileSystem()
  int io_threads = 8;
  int encode_threads = 0;  // 0: one per core
  std::uint64_t anchor_file_bytes = std::uint64_t{1} << 30;
  // Segment files written at once by a large step.
  std::uint32_t segment_files = 8;
  // Units of a slice that one thread encodes.
  std::uint64_t slice_units = std::uint64_t{1} << 24;
  // How this rank meets the trainer's others; borrowed, and not used by anybody
  // else meanwhile. Null: this rank is alone.
  Coordinator* coordinator = nullptr;
  // Keeps the store small after each publish, like `kedge gc`. Nothing: all
  // stays until somebody runs gc.
  std::optional<RetentionOptions> retention;
};

struct InitOptions {
  // The run's identity; random unless given (tests, golden files).
  std::optional<RunId> run;
  std::optional<std::uint64_t> l61_seed;
  std::uint64_t created_unix_seconds = 0;  // 0: now
  Metadata metadata;
  // The engines have v0 already (a boot checkpoint): record its table, S and
  // digest, and write no anchor.
  bool external_v0 = false;
};

// Creates a store at `options.store_path` whose v0 is what `source` holds. The
// path does not exist yet or is an empty directory (ranks/ may be there if
// there are several); STORE is written last, so that a store is there whole or
// not at all. Collective; run, seed, time and metadata are rank 0's.
//
// Errors: kAlreadyExists if something is there; kFailedPrecondition if the
// ranks' parts do not make up the table; those of storage and source.
absl::Status InitStore(const WriterOptions& options, const InitOptions& init,
                       const TensorTable& table, TensorSource& source);

// What a publish did. Times in seconds.
struct PublishResult {
  VersionId version;
  std::uint64_t nnz = 0;
  std::uint64_t records = 0;
  std::uint64_t bytes = 0;           // every file of the step directory
  std::uint64_t manifest_bytes = 0;  // thereof
  std::uint64_t anchor_bytes = 0;    // 0: no anchor
  double encode_seconds = 0;         // diff, encode, and the writes beneath it
  double commit_seconds = 0;         // merge, sync, rename, HEAD
  double anchor_seconds = 0;
  // Not OK: the step stands, its anchor does not. A later step may carry one.
  absl::Status anchor_status;
  // The anchor is still being written: anchor_bytes, _seconds and _status do
  // not speak of it yet. See DeviceSnapshotWriter::WaitForAnchor.
  bool anchor_under_way = false;
  // Things that did not fail the publish: HEAD could not be replaced, ...
  std::vector<std::string> warnings;
};

// One writer incarnation: an epoch of a store. Publishing a step with a higher
// number than the last one advances `held()`, and nothing else does.
//
// Thread safety: one thread at a time; works on threads of its own inside. The
// const methods may run beside AddAnchor and Retain.
class StoreWriter {
 public:
  // S of what a rank holds of each tensor.
  struct HeldPart {
    std::vector<OwnedSlice> owned;
    std::vector<std::uint64_t> l61;  // table order; ties do not matter
  };
  using SumHeld = std::function<absl::StatusOr<HeldPart>(const VersionState&,
                                                         const L61Summer&)>;

  // Opens the store at `resume_step` (default: the newest valid step), under a
  // new epoch, which fences every writer opened before. Steps above it are
  // moved to .trash, staging directories of older epochs are removed, HEAD is
  // put right. Collective.
  //
  // `sum_held`, if given, is asked before anything in the store is changed:
  // what all ranks hold must be the version, each unit once.
  //
  // Errors: kNotFound (no store, or no such step), kDataLoss, kUnavailable,
  // kFailedPrecondition "fenced" if another writer opened at the same time, or
  // what is held is not the version (names tensors, and ranks if several).
  static absl::StatusOr<std::unique_ptr<StoreWriter>> Open(
      const WriterOptions& options,
      std::optional<std::uint64_t> resume_step = std::nullopt,
      const SumHeld& sum_held = nullptr);
  ~StoreWriter();

  const Store& store() const { return *store_; }
  const TensorTable& table() const { return *state_.table; }
  const VersionId& held() const { return state_.id; }
  const Metadata& metadata() const { return state_.metadata; }
  // S of every tensor at held(), in table order.
  std::span<const std::uint64_t> l61() const { return state_.l61; }
  std::uint32_t epoch() const { return epoch_; }
  const L61Summer& summer() const { return summer_; }

  // kUnavailable once the outcome of a publish is unknown: every call that
  // publishes fails with it, without a word to other ranks.
  absl::Status CheckUsable() const;

  // Hears every record of a step as it is encoded (padded to kRecordAlignment,
  // its size without padding given), from several threads at once.
  using RecordSink = std::function<void(
      std::uint32_t tensor, const UnitRange& slice,
      std::span<const std::byte> padded_record, std::uint64_t record_bytes)>;

  // Publishes `step` as the difference between `old_source`, which holds
  // held(), and `new_source`, which must not change meanwhile; of what both
  // hold. `metadata` null: as before; rank 0's count. Collective.
  //
  // Errors (nothing is visible, held() stays, and the step may be published
  // again, under a new attempt):
  //   kInvalidArgument     step is not above held().step, or too large
  //   kFailedPrecondition  fenced by a later epoch; ranks that disagree, or
  //                        whose parts leave a gap or overlap
  //   kAlreadyExists       step_N stands with other content (a fork)
  //   kUnavailable         storage; a rank that was not there in time; or
  //                        "outcome unknown": nobody can say whether the rename
  //                        happened, or this rank did not hear. Every later
  //                        call then fails: open a new writer, on all ranks,
  //                        and look.
  //   kResourceExhausted   disk full
  absl::StatusOr<PublishResult> PublishDelta(std::uint64_t step,
                                             TensorSource& old_source,
                                             TensorSource& new_source,
                                             const Metadata* metadata,
                                             const RecordSink& sink = nullptr);

  // Publishes `step` without a delta, under another table or from weights that
  // have no history in this store: S of every tensor and an anchor, in one
  // rename. Collective; the table is the same at all ranks, the metadata are
  // rank 0's. Errors as above.
  absl::StatusOr<PublishResult> PublishRoot(std::uint64_t step,
                                            const TensorTable& table,
                                            TensorSource& source,
                                            const Metadata& metadata);

  // ------------------------------------------------------------- step by step
  // What PublishDelta and AddAnchor do, for callers that make records or write
  // an anchor's bytes themselves while a step goes on (OptimizerHook). An
  // attempt has a number that all ranks count alike: every rank begins the same
  // ones in the same order. One that is dropped removes what it wrote.
  class DeltaAttempt;
  class AnchorAttempt;

  // This rank's part of a delta to `step`. Touches no storage yet.
  std::unique_ptr<DeltaAttempt> BeginDelta(std::uint64_t step);
  // Encodes the difference of two sources, of what both hold, into `attempt`.
  // Returns what that is.
  absl::StatusOr<std::vector<OwnedSlice>> Encode(
      DeltaAttempt& attempt, TensorSource& old_source, TensorSource& new_source,
      const RecordSink& sink = nullptr);
  // Publishes an attempt whose records all stand. `owned` is what this rank
  // vouches for, with the records or without; `written` says how making the
  // records went: an error fails the publish at all ranks. Errors: as
  // PublishDelta. Collective.
  absl::StatusOr<PublishResult> CommitDelta(
      std::unique_ptr<DeltaAttempt> attempt, const absl::Status& written,
      std::vector<OwnedSlice> owned, const Metadata* metadata);

  // This rank's part of an anchor of `step`, which may still be on its way;
  // `root`: one inside a step without delta, under the table as it is. Makes
  // the files; what fails is in the attempt's status().
  std::unique_ptr<AnchorAttempt> BeginAnchor(
      std::uint64_t step, const std::vector<OwnedSlice>& owned, bool root);
  // Publishes an anchor of held() whose every byte is written. `written` as
  // above. Fills the anchor members of `result`. Errors: as AddAnchor.
  // Collective.
  absl::Status CommitAnchor(std::unique_ptr<AnchorAttempt> attempt,
                            const absl::Status& written, PublishResult* result);
  // Publishes a root step. `metadata` null: as before. Errors: as PublishRoot.
  // Collective.
  absl::StatusOr<PublishResult> CommitRoot(
      std::unique_ptr<AnchorAttempt> attempt, const absl::Status& written,
      const Metadata* metadata);
  // Gives an attempt up that every rank gives up.
  void Abandon(std::unique_ptr<DeltaAttempt> attempt);
  void Abandon(std::unique_ptr<AnchorAttempt> attempt);

  // For work on an attempt.
  IoPool* io_pool() { return &io_pool_; }
  IoPool* encode_pool() { return &encode_pool_; }
  const WriterOptions& options() const { return options_; }

  // Drops what WriterOptions::retention lets go, if it is set; on rank 0 alone.
  // What goes wrong is a warning of `result`: the next call tries again.
  void Retain(PublishResult* result);

  // Adds an anchor of held() from `source`, which holds it: its own
  // transaction, visible in one rename. Its bytes are summed as they are
  // written; kFailedPrecondition names a tensor that is not held()'s, and who
  // holds it. Fills the anchor members of `result`. Collective.
  absl::Status AddAnchor(TensorSource& source, PublishResult* result);

 private:
  struct RootPart;

  StoreWriter(const WriterOptions& options, std::unique_ptr<Store> store,
              VersionState state, std::uint32_t epoch);

  // Creates the next epoch at `held`, moves later steps away, replaces HEAD.
  // `newest`: nobody asked to give up later steps; kUnavailable if there are
  // any.
  static absl::StatusOr<std::uint32_t> TakeOver(const Store& store,
                                                const VersionId& held,
                                                bool newest);

  absl::Status CheckMayPublish(std::uint64_t step) const;
  // A failure's cause, if it is that the writer was fenced: the later one has
  // removed the staging directory.
  absl::Status FencedOr(absl::Status status, std::uint64_t step) const;
  absl::Status CheckNotFenced(std::uint64_t step) const;
  std::string StagingPath(std::uint64_t step, FileKind kind,
                          std::uint64_t attempt) const;
  // Where the slices of `owned`, ascending, go: planned once for a table.
  absl::StatusOr<const AnchorLayout*> LayoutOf(std::vector<OwnedSlice> owned);
  // Rank 0, after an attempt failed: removes its staging directory, of all
  // ranks. A rank that came late may still make it again, so that it is looked
  // for once more after the next success, when all have gone on.
  void RemoveDead(const std::string& staging_path);
  void RemoveDeadAgain();
  // Takes a verdict's outcome_unknown over and returns its status.
  absl::Status Take(const Verdict& verdict);

  // Writes what is left of an attempt and describes it.
  absl::Status SealDelta(DeltaAttempt& attempt, std::vector<OwnedSlice> owned,
                         RankFragment* fragment);
  absl::Status CommitFragments(std::span<const RankFragment> fragments,
                               StagingDirectory& staging,
                               const Metadata* metadata, StepOutcome* outcome);
  // Takes an attempt's number.
  std::unique_ptr<RootPart> PlanRoot(std::uint64_t step,
                                     const TensorTable& table,
                                     std::vector<OwnedSlice> owned);
  absl::StatusOr<PublishResult> CommitRootPart(
      std::unique_ptr<RootPart> root, const absl::Status& written,
      std::shared_ptr<const TensorTable> table, const Metadata& metadata);
  // Everything after the data files: MANIFEST, COMMIT, rename, HEAD.
  absl::Status CommitStep(StagingDirectory& staging,
                          const StepManifest& manifest,
                          const TensorTable& table, StepOutcome* outcome);
  // Moves state_ on by what was published.
  void Advance(const StepOutcome& outcome);

  WriterOptions options_;
  RankGroup group_;
  std::unique_ptr<Store> store_;
  SharedStagingFileSystem shared_fs_;
  FileSystem* staging_fs_;  // where staging directories are written through
  VersionState state_;
  std::uint32_t epoch_;
  std::uint64_t attempt_ = 0;  // of all ranks alike
  // Of an anchor, too, which is written while others ask CheckUsable.
  std::atomic<bool> outcome_unknown_{false};
  std::optional<Retention> retention_;
  std::vector<std::string> dead_staging_;
  L61Summer summer_;
  PieceBuffers piece_buffers_{16};  // 128 MiB at most, from step to step
  IoPool io_pool_;
  IoPool encode_pool_;
  std::optional<AnchorLayout> layout_;  // of layout_owned_ of the table
  std::vector<OwnedSlice> layout_owned_;
};

// A delta on its way into a staging directory of its own, which is made when
// the first record comes.
//
// Thread safety: Add may run concurrently.
class StoreWriter::DeltaAttempt {
 public:
  ~DeltaAttempt();

  std::uint64_t step() const { return step_; }
  // Appends a record, zero-padded to kRecordAlignment. `record` says everything
  // but where it lies. An error of an earlier write may come out here.
  absl::Status Add(const DeltaRecord& record,
                   std::span<const std::byte> padded_record);

 private:
  friend class StoreWriter;
  DeltaAttempt(StoreWriter* writer, std::uint64_t step, std::uint64_t attempt,
               std::string path);

  // Makes directory and segment writer unless they are there.
  absl::StatusOr<SegmentWriter*> Stage();
  // Closes and removes what was written, unless it is published.
  void Drop();

  StoreWriter* writer_;
  std::uint64_t step_;
  std::uint64_t attempt_;
  std::string path_;
  std::chrono::steady_clock::time_point start_;
  bool checked_ = false;  // that the step may be published
  std::mutex mutex_;
  std::unique_ptr<StagingDirectory> staging_ ABSL_GUARDED_BY(mutex_);
  std::unique_ptr<SegmentWriter> segments_ ABSL_GUARDED_BY(mutex_);
  std::vector<DeltaRecord> records_ ABSL_GUARDED_BY(mutex_);
};

// An anchor on its way into a staging directory of its own, or into that of its
// step.
class StoreWriter::AnchorAttempt {
 public:
  ~AnchorAttempt();

  std::uint64_t step() const { return step_; }
  // Why there is no writer().
  const absl::Status& status() const { return status_; }
  AnchorWriter* writer() const { return writer_; }

 private:
  friend class StoreWriter;
  AnchorAttempt() = default;

  std::uint64_t step_ = 0;
  std::string path_;
  absl::Status status_;
  AnchorWriter* writer_ = nullptr;  // of one of these
  std::unique_ptr<AnchorWriter> anchor_;
  std::unique_ptr<RootPart> root_;
  std::chrono::steady_clock::time_point start_;
};

}  // namespace kedge

#endif  // KEDGE_WRITER_STORE_WRITER_H_
