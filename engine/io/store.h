#ifndef KEDGE_ENGINE_IO_STORE_H_
#define KEDGE_ENGINE_IO_STORE_H_

// A store as readers and writers both see it: what is published, what is valid,
// how versions hang together. Read-only; the writer alone changes a store. See
// spec/store.md and docs/protocol.md.

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "kedge/engine/io/file_system.h"
#include "kedge/format/fixed_files.h"
#include "kedge/format/layout.h"
#include "kedge/format/manifest.h"
#include "kedge/format/tensor_table.h"

namespace kedge {

// A committed step: its manifest, checked against its COMMIT and its table.
struct PublishedStep {
  VersionId id;
  std::string path;  // the step directory
  StepManifest manifest;
  std::shared_ptr<const TensorTable> table;
  std::uint64_t manifest_bytes = 0;
};

// A committed anchor, checked likewise.
struct PublishedAnchor {
  VersionId version;  // whose bytes it holds
  std::string path;   // the anchor directory
  AnchorManifest manifest;
  std::shared_ptr<const TensorTable> table;
  std::uint64_t manifest_bytes = 0;
};

// S of every tensor at a version, and its metadata.
struct VersionState {
  VersionId id;
  std::shared_ptr<const TensorTable> table;
  std::vector<std::uint64_t> l61;  // table order
  Metadata metadata;
};

// How to get from nothing, or from a held version, to a target: optionally an
// anchor, then deltas in ascending order.
struct Chain {
  std::unique_ptr<PublishedAnchor> anchor;  // null: start from what is held
  std::vector<std::shared_ptr<const PublishedStep>> deltas;
};

// Thread safety: all methods may run concurrently.
class Store {
 public:
  // Reads STORE. kNotFound if `path` holds no store, kDataLoss, kUnimplemented.
  static absl::StatusOr<std::unique_ptr<Store>> Open(FileSystem* fs,
                                                     absl::string_view path);

  FileSystem* fs() const { return fs_; }
  const std::string& path() const { return path_; }
  const StoreInfo& info() const { return info_; }
  std::string PathOf(absl::string_view name) const;
  std::string StepPath(std::uint64_t step) const;
  std::string AnchorPath(std::uint64_t step) const;

  // HEAD is a hint: the newest valid step is the truth.
  absl::StatusOr<Head> ReadHead() const;

  // Steps that have a directory, ascending, whether committed or not.
  absl::StatusOr<std::vector<std::uint64_t>> ListSteps() const;

  // Every epoch of the store, ascending. Files once read are remembered.
  absl::StatusOr<std::vector<EpochInfo>> ReadEpochs() const;
  // The only epoch that a valid step `step` can have: the highest whose resume
  // step is below `step`; 0 for step 0 or if there is none.
  static std::uint32_t ValidEpoch(const std::vector<EpochInfo>& epochs,
                                  std::uint64_t step);

  // Reads COMMIT and MANIFEST of a step and checks them in full, against the
  // store, the epochs and the table; not the data files.
  //
  // Errors:
  //   kNotFound           no such step, or it has no COMMIT: for readers it
  //   does
  //                       not exist
  //   kDataLoss           COMMIT, MANIFEST or table are damaged, of another
  //   run,
  //                       another step, or contradict each other
  //   kFailedPrecondition the step was written by an epoch that was fenced
  absl::StatusOr<std::shared_ptr<const PublishedStep>> ReadStep(
      std::uint64_t step) const;
  // The anchor of a step; it must name the manifest `id.manifest_hash`.
  absl::StatusOr<std::unique_ptr<PublishedAnchor>> ReadAnchor(
      const VersionId& id) const;
  // Whether step_N/anchor has a COMMIT.
  bool HasAnchor(std::uint64_t step) const;

  // The newest valid step, from the directory. Damaged and unfinished steps are
  // passed over; `on_skipped`, if given, hears why. kNotFound if there is none.
  absl::StatusOr<std::shared_ptr<const PublishedStep>> Newest(
      const std::function<void(std::uint64_t, const absl::Status&)>&
          on_skipped = nullptr) const;

  // The cheapest chain from `held` (null: nothing) to `target`, by bytes: the
  // deltas after `held`, or an anchor and the deltas after it. Follows base
  // links by step and hash, so that a fork or another run's step is never used.
  // Anchors of the steps in `passed_over_anchors` are not used: a caller that
  // found one's files damaged asks again without it.
  //
  // Reads the manifest of every step on the way once, but for `held`'s own; no
  // anchor's as long as the deltas after `held` are fewer bytes than the model.
  //
  // Errors: kFailedPrecondition if `held` is not an ancestor of `target` and no
  // anchor reaches it (says where the chain breaks); kDataLoss likewise when a
  // link is damaged.
  absl::StatusOr<Chain> FindChain(
      const std::shared_ptr<const PublishedStep>& target, const VersionId* held,
      const std::vector<std::uint64_t>& passed_over_anchors = {}) const;

  // S of every tensor at `step`'s version, and its metadata: from the nearest
  // root or anchor back along the chain; checked against digest_after.
  absl::StatusOr<VersionState> StateAt(
      const std::shared_ptr<const PublishedStep>& step) const;

  absl::StatusOr<std::shared_ptr<const TensorTable>> ReadTable(
      const Hash128& hash) const;

 private:
  Store(FileSystem* fs, std::string path, StoreInfo info);
  // The step that `step` stands on, on the way back from `target`.
  absl::StatusOr<std::shared_ptr<const PublishedStep>> ReadBase(
      const PublishedStep& step, const VersionId& target) const;

  FileSystem* fs_;
  std::string path_;
  StoreInfo info_;
  mutable std::mutex mutex_;
  mutable std::vector<std::shared_ptr<const TensorTable>> tables_
      ABSL_GUARDED_BY(mutex_);
  mutable std::vector<EpochInfo> epochs_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace kedge

#endif  // KEDGE_ENGINE_IO_STORE_H_
