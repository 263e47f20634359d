#ifndef KEDGE_WRITER_SNAPSHOT_WRITER_H_
#define KEDGE_WRITER_SNAPSHOT_WRITER_H_

// The trainer's side, for any optimizer: keeps a copy of the last published
// weights and publishes what has changed since. See docs/protocol.md.

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kedge/writer/store_writer.h"
#include "kedge/writer/tensor_source.h"

namespace kedge {

class SnapshotSource;

struct PublishOptions {
  bool anchor = false;  // also write every byte, after the step is published
  const Metadata* metadata = nullptr;  // null: as before
};

// Publishes the weights of one trainer rank, alone or with others: with a
// WriterOptions::coordinator every call here is made by all ranks, in the same
// order, each with its own tensors and shards (see StoreWriter).
//
// Ownership: borrows the trainer's tensors, which stay at their addresses; owns
// a snapshot of their bytes (the size in host memory of what the rank holds).
// Thread safety: one thread at a time. The tensors must not change during
// Publish; they may between calls.
class SnapshotWriter {
 public:
  // Creates a store whose v0 is what `tensors` hold now, and opens it. Its
  // table is the union of all ranks' tensors. Errors: as InitStore;
  // kFailedPrecondition names tensors that ranks declare differently, and
  // tensors of which a part is held by nobody or twice, with the ranks.
  static absl::StatusOr<std::unique_ptr<SnapshotWriter>> Create(
      const WriterOptions& options, const InitOptions& init,
      std::vector<TrainerTensor> tensors);

  // Opens an existing store at `resume_step` (default: the newest version). The
  // tensors must hold exactly that version's weights, as a trainer restored
  // from its own checkpoint of that step does; this is checked before anything
  // in the store is changed.
  //
  // Errors: as StoreWriter::Open; kFailedPrecondition names the tensors that
  // differ from the table or from the version.
  static absl::StatusOr<std::unique_ptr<SnapshotWriter>> Open(
      const WriterOptions& options, std::vector<TrainerTensor> tensors,
      std::optional<std::uint64_t> resume_step = std::nullopt);
  ~SnapshotWriter();

  // Publishes the tensors as version `step`, a delta on the last published
  // version, whatever the cadence. Only a success moves the snapshot on, so a
  // failed publish may be repeated, or the next step published instead. Errors:
  // see StoreWriter::PublishDelta.
  //
  // An anchor that fails does not fail the step: see
  // PublishResult::anchor_status.
  absl::StatusOr<PublishResult> Publish(std::uint64_t step,
                                        const PublishOptions& options = {});

  // Publishes other tensors (names, shapes, dtypes, shards may differ) as
  // version `step`: no delta, an anchor. Takes the place of the tensors given
  // before.
  absl::StatusOr<PublishResult> ReplaceTensors(
      std::uint64_t step, std::vector<TrainerTensor> tensors,
      const Metadata& metadata);

  const VersionId& held() const { return writer_->held(); }
  const StoreWriter& store_writer() const { return *writer_; }
  std::uint64_t snapshot_bytes() const;

 private:
  SnapshotWriter(Coordinator* coordinator, std::unique_ptr<StoreWriter> writer,
                 MemorySource live, std::unique_ptr<SnapshotSource> snapshot);

  Coordinator* coordinator_;  // null: alone
  std::unique_ptr<StoreWriter> writer_;
  MemorySource live_;
  std::unique_ptr<SnapshotSource> snapshot_;
};

}  // namespace kedge

#endif  // KEDGE_WRITER_SNAPSHOT_WRITER_H_
