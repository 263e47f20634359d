#include "kedge/writer/snapshot_writer.h"

#include <algorithm>
#include <cstring>
#include <mutex>
#include <utility>

#include "kedge/engine/cpu/record_apply.h"
#include "kedge/format/limits.h"
#include "kedge/format/status.h"
#include "kedge/writer/rank_group.h"
#include "kedge/writer/rank_parts.h"

namespace kedge {
namespace {

// Units read at once when a whole model is copied or summed.
constexpr std::uint64_t kScanUnits = std::uint64_t{1} << 22;

}  // namespace

// The last published bytes of what this rank holds of every untied tensor.
class SnapshotWriter::SnapshotSource : public TensorSource {
 public:
  // What `live` holds, copied. Fills `held`, if given, with S of the copy: what
  // is vouched for is what later deltas start from.
  static absl::StatusOr<std::unique_ptr<SnapshotSource>> Copy(
      const TensorTable& table, MemorySource& live, const L61Summer* summer,
      StoreWriter::HeldPart* held) {
    auto snapshot = std::unique_ptr<SnapshotSource>(new SnapshotSource);
    snapshot->parts_.resize(table.size());
    const std::vector<OwnedSlice> owned = OwnedOf(table, live);
    for (const OwnedSlice& range : owned) {
      const TensorSpec& spec = table[range.tensor];
      Part part;
      part.units = range.slice;
      part.unit_bytes = UnitBytes(spec.dtype);
      part.bytes.resize(range.slice.count() * part.unit_bytes);
      snapshot->total_bytes_ += part.bytes.size();
      snapshot->parts_[range.tensor].push_back(std::move(part));
    }
    if (held != nullptr) {
      held->owned = owned;
      held->l61.assign(table.size(), 0);
    }
    std::vector<std::byte> scratch;
    for (const TensorSlice& slice : SplitOwned(table, owned, kScanUnits)) {
      const std::uint32_t unit_bytes = UnitBytes(table[slice.tensor].dtype);
      const std::uint64_t begin = slice.units.begin * unit_bytes;
      KEDGE_ASSIGN_OR_RETURN(
          const auto bytes,
          live.Read(slice.tensor, begin, slice.units.count() * unit_bytes,
                    &scratch));
      Part& part = snapshot->PartOf(slice.tensor, begin);
      std::byte* const to =
          part.bytes.data() + (begin - part.units.begin * unit_bytes);
      std::memcpy(to, bytes.data(), bytes.size());
      if (held != nullptr) {
        std::uint64_t& sum = held->l61[slice.tensor];
        sum = L61Add(sum, summer->Sum(begin, {to, bytes.size()}));
      }
    }
    return snapshot;
  }

  std::optional<std::vector<UnitRange>> Owned(
      std::uint32_t ordinal) const override {
    std::vector<UnitRange> ranges;
    for (const Part& part : parts_[ordinal]) ranges.push_back(part.units);
    return ranges;
  }

  absl::StatusOr<std::span<const std::byte>> Read(
      std::uint32_t ordinal, std::uint64_t byte_begin, std::uint64_t byte_count,
      std::vector<std::byte>* /*scratch*/) override {
    if (byte_count == 0) return std::span<const std::byte>();
    const Part& part = PartOf(ordinal, byte_begin);
    return std::span<const std::byte>(part.bytes)
        .subspan(byte_begin - part.units.begin * part.unit_bytes, byte_count);
  }

  // Adds a record of `slice`, which lies within one part.
  void Apply(std::uint32_t ordinal, const TensorSpec& spec,
             const UnitRange& slice, std::span<const std::byte> record) {
    const TileGrid grid = spec.grid();
    Part& part = PartOf(ordinal, slice.begin * UnitBytes(spec.dtype));
    // A part is at most three boxes of the tensor's matrix: the rest of a row,
    // whole rows, the start of a row.
    std::vector<BoxTarget> boxes;
    for (std::uint64_t at = part.units.begin; at < part.units.end;) {
      const std::uint64_t row = at / grid.cols;
      const std::uint64_t col = at - row * grid.cols;
      const std::uint64_t left = part.units.end - at;
      BoxTarget box;
      box.data = part.bytes.data() + (at - part.units.begin) * part.unit_bytes;
      box.row_begin = row;
      box.col_begin = col;
      if (col == 0 && left >= grid.cols) {
        box.row_end = row + left / grid.cols;
        box.col_end = grid.cols;
      } else {
        box.row_end = row + 1;
        box.col_end = std::min(grid.cols, col + left);
      }
      box.unit_bytes = part.unit_bytes;
      box.units_per_element = UnitsPerElement(spec.dtype);
      box.row_stride_bytes =
          static_cast<std::int64_t>(grid.cols * part.unit_bytes);
      box.col_stride_bytes = ElementBytes(spec.dtype);
      at += box.unit_count();
      boxes.push_back(box);
    }
    const auto applied =
        ApplyRecord(record, grid, slice, part.unit_bytes, boxes);
    KEDGE_CHECK(applied.ok());  // our own record, just encoded
  }

  std::uint64_t total_bytes() const { return total_bytes_; }

 private:
  struct Part {
    UnitRange units;
    std::uint32_t unit_bytes = 0;
    std::vector<std::byte> bytes;
  };

  Part& PartOf(std::uint32_t ordinal, std::uint64_t byte) {
    auto& parts = parts_[ordinal];
    const auto part = std::upper_bound(parts.begin(), parts.end(), byte,
                                       [](std::uint64_t at, const Part& p) {
                                         return at < p.units.end * p.unit_bytes;
                                       });
    KEDGE_CHECK(part != parts.end() &&
                part->units.begin * part->unit_bytes <= byte);
    return *part;
  }

  std::vector<std::vector<Part>> parts_;  // by ordinal; ascending
  std::uint64_t total_bytes_ = 0;
};

namespace {

// The table of what all ranks together hold.
absl::StatusOr<TensorTable> AgreeOnTable(
    Coordinator* coordinator, std::span<const TrainerTensor> tensors) {
  const RankGroup group(coordinator);
  const absl::Status sound = CheckTensors(tensors);
  if (group.alone()) {
    // A table says more of what is wrong with names and shapes.
    KEDGE_ASSIGN_OR_RETURN(TensorTable table, MakeTable(tensors));
    KEDGE_RETURN_IF_ERROR(sound);
    return table;
  }
  RankGroup::Piece mine = std::vector<std::byte>();
  if (sound.ok()) {
    mine = SerializeDeclared(Declare(tensors));
  } else {
    mine = sound;
  }
  const Verdict verdict = group.Agree(
      "tensor tables", mine,
      [](std::span<const std::vector<std::byte>> pieces) -> Verdict {
        std::vector<std::vector<DeclaredTensor>> declared;
        for (std::uint32_t rank = 0; rank < pieces.size(); ++rank) {
          auto one = ParseDeclared(
              RankName(rank, static_cast<std::uint32_t>(pieces.size())),
              pieces[rank]);
          if (!one.ok()) return {one.status(), {}};
          declared.push_back(*std::move(one));
        }
        const auto table = UniteTables(declared);
        if (!table.ok()) return {table.status(), {}};
        return {absl::OkStatus(),
                {table->bytes().begin(), table->bytes().end()}};
      });
  KEDGE_RETURN_IF_ERROR(verdict.status);
  return TensorTable::Parse("tensor table of all ranks", verdict.payload);
}

MemorySource::Others OthersOf(Coordinator* coordinator) {
  return RankGroup(coordinator).alone() ? MemorySource::Others::kNone
                                        : MemorySource::Others::kHoldTheRest;
}

}  // namespace

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
    snapshot_->Apply(
        record.tensor, table[record.tensor], record.slice,
        std::span<const std::byte>(record.bytes).first(record.record_bytes));
  }
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
