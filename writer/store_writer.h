#ifndef KEDGE_WRITER_STORE_WRITER_H_
#define KEDGE_WRITER_STORE_WRITER_H_

// Creates stores and publishes versions into them: steps, anchors, epochs,
// resume. See spec/store.md and docs/protocol.md.

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

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
  // This process's place among the trainer's ranks. Several ranks need a
  // Coordinator, which this version does not have: world_size is 1.
  std::uint32_t rank = 0;
  std::uint32_t world_size = 1;
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
// path does not exist yet or is an empty directory; STORE is written last, so
// that a store is there whole or not at all.
//
// Errors: kAlreadyExists if something is there; those of storage and source.
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
  // Things that did not fail the publish: HEAD could not be replaced, ...
  std::vector<std::string> warnings;
};

// One writer incarnation: an epoch of a store. Publishing a step with a higher
// number than the last one advances `held()`, and nothing else does.
//
// Thread safety: one thread at a time; works on threads of its own inside.
class StoreWriter {
 public:
  // Opens the store at `resume_step` (default: the newest valid step), under a
  // new epoch, which fences every writer opened before. Steps above it are
  // moved to .trash, staging directories of older epochs are removed, HEAD is
  // put right.
  //
  // Errors: kNotFound (no store, or no such step), kDataLoss, kUnavailable,
  // kFailedPrecondition "fenced" if another writer opened at the same time.
  static absl::StatusOr<std::unique_ptr<StoreWriter>> Open(
      const WriterOptions& options,
      std::optional<std::uint64_t> resume_step = std::nullopt);
  ~StoreWriter();

  const Store& store() const { return *store_; }
  const TensorTable& table() const { return *state_.table; }
  const VersionId& held() const { return state_.id; }
  const Metadata& metadata() const { return state_.metadata; }
  // S of every tensor at held(), in table order.
  std::span<const std::uint64_t> l61() const { return state_.l61; }
  std::uint32_t epoch() const { return epoch_; }
  const L61Summer& summer() const { return summer_; }

  // Hears every record of a step as it is encoded (padded to kRecordAlignment,
  // its size without padding given), from several threads at once.
  using RecordSink = std::function<void(
      std::uint32_t tensor, const UnitRange& slice,
      std::span<const std::byte> padded_record, std::uint64_t record_bytes)>;

  // Publishes `step` as the difference between `old_source`, which holds
  // held(), and `new_source`, which must not change meanwhile. `metadata` null:
  // as before.
  //
  // Errors (nothing is visible, held() stays, and the step may be published
  // again, under a new attempt):
  //   kInvalidArgument     step is not above held().step, or too large
  //   kFailedPrecondition  fenced by a later epoch
  //   kAlreadyExists       step_N stands with other content (a fork)
  //   kUnavailable         storage; or "outcome unknown": nobody can say
  //                        whether the rename happened. Every later call then
  //                        fails: open a new writer and look.
  //   kResourceExhausted   disk full
  absl::StatusOr<PublishResult> PublishDelta(std::uint64_t step,
                                             TensorSource& old_source,
                                             TensorSource& new_source,
                                             const Metadata* metadata,
                                             const RecordSink& sink = nullptr);

  // Publishes `step` without a delta, under another table or from weights that
  // have no history in this store: S of every tensor and an anchor, in one
  // rename. Errors as above.
  absl::StatusOr<PublishResult> PublishRoot(std::uint64_t step,
                                            const TensorTable& table,
                                            TensorSource& source,
                                            const Metadata& metadata);

  // Adds an anchor of held() from `source`, which holds it: its own
  // transaction, visible in one rename. Its bytes are summed as they are
  // written; kFailedPrecondition names a tensor that is not held()'s. Fills the
  // anchor members of `result`.
  absl::Status AddAnchor(TensorSource& source, PublishResult* result);

 private:
  StoreWriter(const WriterOptions& options, std::unique_ptr<Store> store,
              VersionState state, std::uint32_t epoch);

  absl::Status CheckMayPublish(std::uint64_t step) const;
  absl::Status CheckNotFenced(std::uint64_t step) const;
  std::string NewStagingPath(std::uint64_t step, FileKind kind);
  // Everything after the data files: MANIFEST, COMMIT, rename, HEAD.
  absl::Status CommitStep(StagingDirectory& staging,
                          const StepManifest& manifest,
                          const TensorTable& table, PublishResult* result);

  WriterOptions options_;
  std::unique_ptr<Store> store_;
  VersionState state_;
  std::uint32_t epoch_;
  std::uint64_t attempt_ = 0;
  bool outcome_unknown_ = false;
  L61Summer summer_;
  IoPool io_pool_;
  IoPool encode_pool_;
  std::optional<AnchorLayout> layout_;  // of the table; planned once
};

}  // namespace kedge

#endif  // KEDGE_WRITER_STORE_WRITER_H_
