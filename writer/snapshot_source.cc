#include "kedge/writer/snapshot_source.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "kedge/engine/cpu/record_apply.h"
#include "kedge/format/status.h"

namespace kedge {
namespace {

// Units read at once when a whole model is copied or summed.
constexpr std::uint64_t kScanUnits = std::uint64_t{1} << 22;

}  // namespace

absl::StatusOr<std::unique_ptr<SnapshotSource>> SnapshotSource::Copy(
    const TensorTable& table, TensorSource& live, const L61Summer* summer,
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

std::optional<std::vector<UnitRange>> SnapshotSource::Owned(
    std::uint32_t ordinal) const {
  std::vector<UnitRange> ranges;
  for (const Part& part : parts_[ordinal]) ranges.push_back(part.units);
  return ranges;
}

absl::StatusOr<std::span<const std::byte>> SnapshotSource::Read(
    std::uint32_t ordinal, std::uint64_t byte_begin, std::uint64_t byte_count,
    std::vector<std::byte>* /*scratch*/) {
  if (byte_count == 0) return std::span<const std::byte>();
  const Part& part = PartOf(ordinal, byte_begin);
  return std::span<const std::byte>(part.bytes)
      .subspan(byte_begin - part.units.begin * part.unit_bytes, byte_count);
}

void SnapshotSource::Apply(std::uint32_t ordinal, const TensorSpec& spec,
                           const UnitRange& slice,
                           std::span<const std::byte> record) {
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
  const auto applied = ApplyRecord(record, grid, slice, part.unit_bytes, boxes);
  KEDGE_CHECK(applied.ok());  // our own record, just encoded
}

std::uint64_t SnapshotSource::BytesOf(std::uint32_t ordinal) const {
  std::uint64_t bytes = 0;
  for (const Part& part : parts_[ordinal]) bytes += part.bytes.size();
  return bytes;
}

SnapshotSource::Part& SnapshotSource::PartOf(std::uint32_t ordinal,
                                             std::uint64_t byte) {
  auto& parts = parts_[ordinal];
  const auto part = std::upper_bound(parts.begin(), parts.end(), byte,
                                     [](std::uint64_t at, const Part& p) {
                                       return at < p.units.end * p.unit_bytes;
                                     });
  KEDGE_CHECK(part != parts.end() &&
              part->units.begin * part->unit_bytes <= byte);
  return *part;
}

StoreWriter::RecordSink KeptRecords::sink() {
  return [this](std::uint32_t tensor, const UnitRange& slice,
                std::span<const std::byte> record, std::uint64_t record_bytes) {
    Kept entry{tensor, slice, {}, record_bytes};
    entry.bytes.reserve(record.size() + kRecordSlackBytes);
    entry.bytes.assign(record.begin(), record.end());
    entry.bytes.resize(record.size() + kRecordSlackBytes);
    const std::lock_guard<std::mutex> lock(mutex_);
    kept_.push_back(std::move(entry));
  };
}

void KeptRecords::ApplyTo(const TensorTable& table, SnapshotSource* snapshot) {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const Kept& record : kept_) {
    snapshot->Apply(
        record.tensor, table[record.tensor], record.slice,
        std::span<const std::byte>(record.bytes).first(record.record_bytes));
  }
}

}  // namespace kedge
