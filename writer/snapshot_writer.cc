#include "kedge/writer/snapshot_writer.h"

#include <algorithm>
#include <cstring>
#include <mutex>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kedge/engine/cpu/record_apply.h"
#include "kedge/format/limits.h"
#include "kedge/format/status.h"

namespace kedge {
namespace {

// Units read at once when a whole model is copied or summed.
constexpr std::uint64_t kScanUnits = std::uint64_t{1} << 22;

}  // namespace

// The last published bytes of every untied tensor.
class SnapshotWriter::SnapshotSource : public TensorSource {
 public:
  explicit SnapshotSource(const TensorTable& table) : bytes_(table.size()) {
    for (std::size_t i = 0; i < table.size(); ++i) {
      if (table[i].tied_to == kNotTied) {
        bytes_[i].resize(table[i].byte_count());
      }
    }
  }

  absl::StatusOr<std::span<const std::byte>> Read(
      std::uint32_t ordinal, std::uint64_t byte_begin, std::uint64_t byte_count,
      std::vector<std::byte>* /*scratch*/) override {
    return std::span<const std::byte>(bytes_[ordinal])
        .subspan(byte_begin, byte_count);
  }

  std::byte* data(std::uint32_t ordinal) { return bytes_[ordinal].data(); }
  std::uint64_t total_bytes() const {
    std::uint64_t total = 0;
    for (const auto& tensor : bytes_) total += tensor.size();
    return total;
  }

 private:
  std::vector<std::vector<std::byte>> bytes_;
};

SnapshotWriter::SnapshotWriter(std::unique_ptr<StoreWriter> writer,
                               MemorySource live)
    : writer_(std::move(writer)), live_(std::move(live)) {}

SnapshotWriter::~SnapshotWriter() = default;

absl::StatusOr<std::unique_ptr<SnapshotWriter>> SnapshotWriter::Create(
    const WriterOptions& options, const InitOptions& init,
    std::vector<TrainerTensor> tensors) {
  KEDGE_ASSIGN_OR_RETURN(const TensorTable table, MakeTable(tensors));
  KEDGE_ASSIGN_OR_RETURN(MemorySource live, MemorySource::Bind(table, tensors));
  KEDGE_RETURN_IF_ERROR(InitStore(options, init, table, live));
  return Open(options, std::move(tensors));
}

absl::StatusOr<std::unique_ptr<SnapshotWriter>> SnapshotWriter::Open(
    const WriterOptions& options, std::vector<TrainerTensor> tensors,
    std::optional<std::uint64_t> resume_step) {
  // Prove that the tensors are the version before the store is touched.
  FileSystem* fs = options.fs != nullptr ? options.fs : PosixFileSystem();
  KEDGE_ASSIGN_OR_RETURN(const auto store, Store::Open(fs, options.store_path));
  std::shared_ptr<const PublishedStep> step;
  if (resume_step) {
    KEDGE_ASSIGN_OR_RETURN(step, store->ReadStep(*resume_step));
  } else {
    KEDGE_ASSIGN_OR_RETURN(step, store->Newest());
  }
  KEDGE_ASSIGN_OR_RETURN(const VersionState state, store->StateAt(step));
  const TensorTable& table = *state.table;
  KEDGE_ASSIGN_OR_RETURN(MemorySource live, MemorySource::Bind(table, tensors));
  const L61Summer summer(L61Key::FromSeed(store->info().l61_seed));
  std::vector<std::uint64_t> sums(table.size(), 0);
  std::vector<std::byte> scratch;
  for (const TensorSlice& slice : SplitTable(table, kScanUnits)) {
    const std::uint32_t unit_bytes = UnitBytes(table[slice.tensor].dtype);
    KEDGE_ASSIGN_OR_RETURN(
        const auto bytes,
        live.Read(slice.tensor, slice.units.begin * unit_bytes,
                  slice.units.count() * unit_bytes, &scratch));
    sums[slice.tensor] = L61Add(
        sums[slice.tensor], summer.Sum(slice.units.begin * unit_bytes, bytes));
  }
  std::vector<std::string> different;
  std::size_t different_count = 0;
  for (std::size_t i = 0; i < table.size(); ++i) {
    if (table[i].tied_to != kNotTied || sums[i] == state.l61[i]) continue;
    if (++different_count <= 4) {
      different.push_back(absl::StrCat(table[i].name, ": L61: expected ",
                                       Hex64(state.l61[i]), ", found ",
                                       Hex64(sums[i])));
    }
  }
  if (different_count > 0) {
    return absl::FailedPreconditionError(absl::StrCat(
        "the trainer's weights are not ", ToString(step->id), " of ",
        options.store_path, " in ", different_count, " of ", table.size(),
        " tensors: ", absl::StrJoin(different, "; "),
        "; restore the trainer's checkpoint of that step, resume at the step "
        "that it holds, or replace the tensors"));
  }

  KEDGE_ASSIGN_OR_RETURN(auto writer,
                         StoreWriter::Open(options, step->id.step));
  if (writer->held() != step->id) {
    return absl::UnavailableError(absl::StrCat(
        options.store_path, ": ", ToString(step->id), " became ",
        ToString(writer->held()), " while it was opened; open again"));
  }
  auto snapshot_writer = std::unique_ptr<SnapshotWriter>(
      new SnapshotWriter(std::move(writer), std::move(live)));
  KEDGE_RETURN_IF_ERROR(snapshot_writer->TakeSnapshot());
  return snapshot_writer;
}

absl::Status SnapshotWriter::TakeSnapshot() {
  const TensorTable& table = writer_->table();
  snapshot_ = std::make_unique<SnapshotSource>(table);
  std::vector<std::byte> scratch;
  for (const TensorSlice& slice : SplitTable(table, kScanUnits)) {
    const std::uint32_t unit_bytes = UnitBytes(table[slice.tensor].dtype);
    const std::uint64_t begin = slice.units.begin * unit_bytes;
    KEDGE_ASSIGN_OR_RETURN(
        const auto bytes,
        live_.Read(slice.tensor, begin, slice.units.count() * unit_bytes,
                   &scratch));
    std::memcpy(snapshot_->data(slice.tensor) + begin, bytes.data(),
                bytes.size());
  }
  return absl::OkStatus();
}

absl::StatusOr<PublishResult> SnapshotWriter::Publish(
    std::uint64_t step, const PublishOptions& options) {
  const TensorTable& table = writer_->table();
  // Records are kept until the commit: only then does the snapshot move on, by
  // exactly what was published.
  struct Kept {
    std::uint32_t tensor;
    UnitRange slice;
    std::vector<std::byte> bytes;
    std::uint64_t record_bytes;
  };
  std::mutex mutex;
  std::vector<Kept> kept;
  KEDGE_ASSIGN_OR_RETURN(
      PublishResult result,
      writer_->PublishDelta(
          step, *snapshot_, live_, options.metadata,
          [&](std::uint32_t tensor, const UnitRange& slice,
              std::span<const std::byte> record, std::uint64_t record_bytes) {
            Kept entry{tensor, slice, {}, record_bytes};
            entry.bytes.reserve(record.size() + kRecordSlackBytes);
            entry.bytes.assign(record.begin(), record.end());
            entry.bytes.resize(record.size() + kRecordSlackBytes);
            const std::lock_guard<std::mutex> lock(mutex);
            kept.push_back(std::move(entry));
          }));
  for (const Kept& record : kept) {
    const TensorSpec& spec = table[record.tensor];
    const TileGrid grid = spec.grid();
    BoxTarget box;
    box.data = snapshot_->data(record.tensor);
    box.row_end = grid.rows;
    box.col_end = grid.cols;
    box.unit_bytes = UnitBytes(spec.dtype);
    box.units_per_element = UnitsPerElement(spec.dtype);
    box.row_stride_bytes =
        static_cast<std::int64_t>(grid.cols * box.unit_bytes);
    box.col_stride_bytes = ElementBytes(spec.dtype);
    const auto applied = ApplyRecord(
        std::span<const std::byte>(record.bytes).first(record.record_bytes),
        grid, record.slice, box.unit_bytes, std::span(&box, 1));
    KEDGE_CHECK(applied.ok());  // our own record, just encoded
  }
  if (options.anchor) {
    result.anchor_status = writer_->AddAnchor(*snapshot_, &result);
  }
  return result;
}

absl::StatusOr<PublishResult> SnapshotWriter::ReplaceTensors(
    std::uint64_t step, std::vector<TrainerTensor> tensors,
    const Metadata& metadata) {
  KEDGE_ASSIGN_OR_RETURN(const TensorTable table, MakeTable(tensors));
  KEDGE_ASSIGN_OR_RETURN(MemorySource live, MemorySource::Bind(table, tensors));
  KEDGE_ASSIGN_OR_RETURN(PublishResult result,
                         writer_->PublishRoot(step, table, live, metadata));
  live_ = std::move(live);
  KEDGE_RETURN_IF_ERROR(TakeSnapshot());
  return result;
}

std::uint64_t SnapshotWriter::snapshot_bytes() const {
  return snapshot_->total_bytes();
}

}  // namespace kedge
