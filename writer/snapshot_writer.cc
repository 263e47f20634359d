#include "kedge/writer/snapshot_writer.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "kedge/format/status.h"
#include "kedge/writer/snapshot_source.h"
#include "kedge/writer/table_agreement.h"

namespace kedge {

SnapshotWriter::SnapshotWriter(Coordinator* coordinator,
                               std::unique_ptr<StoreWriter> writer,
                               MemorySource live,
                               std::unique_ptr<SnapshotSource> snapshot)
    : coordinator_(coordinator),
      writer_(std::move(writer)),
      live_(std::move(live)),
      snapshot_(std::move(snapshot)) {}

SnapshotWriter::~SnapshotWriter() = default;

absl::StatusOr<std::unique_ptr<SnapshotWriter>> SnapshotWriter::Create(
    const WriterOptions& options, const InitOptions& init,
    std::vector<TrainerTensor> tensors) {
  KEDGE_ASSIGN_OR_RETURN(const TensorTable table,
                         AgreeOnTable(options.coordinator, tensors));
  if (table.size() == 0) {
    return absl::InvalidArgumentError(
        absl::StrCat(options.store_path,
                     ": expected the tensors of a model, found none; pass the "
                     "trainer's tensors"));
  }
  KEDGE_ASSIGN_OR_RETURN(
      MemorySource live,
      MemorySource::Bind(table, tensors, OthersOf(options.coordinator)));
  KEDGE_RETURN_IF_ERROR(InitStore(options, init, table, live));
  return Open(options, std::move(tensors));
}

absl::StatusOr<std::unique_ptr<SnapshotWriter>> SnapshotWriter::Open(
    const WriterOptions& options, std::vector<TrainerTensor> tensors,
    std::optional<std::uint64_t> resume_step) {
  std::optional<MemorySource> live;
  std::unique_ptr<SnapshotSource> snapshot;
  KEDGE_ASSIGN_OR_RETURN(
      auto writer,
      StoreWriter::Open(
          options, resume_step,
          [&](const VersionState& state, const L61Summer& summer)
              -> absl::StatusOr<StoreWriter::HeldPart> {
            KEDGE_ASSIGN_OR_RETURN(
                live, MemorySource::Bind(*state.table, tensors,
                                         OthersOf(options.coordinator)));
            StoreWriter::HeldPart held;
            KEDGE_ASSIGN_OR_RETURN(
                snapshot,
                SnapshotSource::Copy(*state.table, *live, &summer, &held));
            return held;
          }));
  return std::unique_ptr<SnapshotWriter>(
      new SnapshotWriter(options.coordinator, std::move(writer),
                         *std::move(live), std::move(snapshot)));
}

absl::StatusOr<PublishResult> SnapshotWriter::Publish(
    std::uint64_t step, const PublishOptions& options) {
  const TensorTable& table = writer_->table();
  KeptRecords kept;
  KEDGE_ASSIGN_OR_RETURN(PublishResult result,
                         writer_->PublishDelta(step, *snapshot_, live_,
                                               options.metadata, kept.sink()));
  kept.ApplyTo(table, snapshot_.get());
  if (options.anchor) {
    result.anchor_status = writer_->AddAnchor(*snapshot_, &result);
  }
  writer_->Retain(&result);
  return result;
}

absl::StatusOr<PublishResult> SnapshotWriter::ReplaceTensors(
    std::uint64_t step, std::vector<TrainerTensor> tensors,
    const Metadata& metadata) {
  KEDGE_RETURN_IF_ERROR(writer_->CheckUsable());
  KEDGE_ASSIGN_OR_RETURN(const TensorTable table,
                         AgreeOnTable(coordinator_, tensors));
  KEDGE_ASSIGN_OR_RETURN(
      MemorySource live,
      MemorySource::Bind(table, tensors, OthersOf(coordinator_)));
  // What is published is the copy that later deltas start from, whatever the
  // trainer does to its tensors meanwhile.
  KEDGE_ASSIGN_OR_RETURN(std::unique_ptr<SnapshotSource> snapshot,
                         SnapshotSource::Copy(table, live, nullptr, nullptr));
  KEDGE_ASSIGN_OR_RETURN(
      PublishResult result,
      writer_->PublishRoot(step, table, *snapshot, metadata));
  live_ = std::move(live);
  snapshot_ = std::move(snapshot);
  writer_->Retain(&result);
  return result;
}

std::uint64_t SnapshotWriter::snapshot_bytes() const {
  return snapshot_->total_bytes();
}

}  // namespace kedge
