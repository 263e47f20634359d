#include "kedge/format/manifest_rules.h"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "kedge/format/fixed_files.h"
#include "kedge/format/flat_columns.h"
#include "kedge/format/l61.h"
#include "kedge/format/layout.h"
#include "kedge/format/limits.h"
#include "kedge/format/status.h"

namespace kedge {
namespace rules {
namespace {

using flat::Bad;
using flat::Row;

constexpr std::uint64_t RoundUp(std::uint64_t value, std::uint64_t alignment) {
  return (value + alignment - 1) / alignment * alignment;
}

std::string FileRow(std::span<const DataFile> files, std::size_t i) {
  return absl::StrCat("files[", i, "] (", DataFileName(files[i].id), ")");
}

absl::Status CheckRange(absl::string_view where, absl::string_view field,
                        std::uint64_t value, std::uint64_t least,
                        std::uint64_t most) {
  if (value >= least && value <= most) return absl::OkStatus();
  return Bad(where, field, absl::StrCat(least, " to ", most),
             absl::StrCat(value));
}

absl::Status CheckResidues(absl::string_view where, absl::string_view column,
                           std::span<const std::uint64_t> l61) {
  for (std::size_t i = 0; i < l61.size(); ++i) {
    if (l61[i] >= kL61Prime) {
      return Bad(where, Row(column, i), "a residue below 2^61 - 1",
                 Hex64(l61[i]));
    }
  }
  return absl::OkStatus();
}

// Base and step of a step or a fragment.
absl::Status CheckBase(absl::string_view where, std::uint64_t step,
                       const VersionId& base) {
  if (step == 0) {
    if (base == VersionId{}) return absl::OkStatus();
    return Bad(where, "base", "none (v0 has no base)", ToString(base));
  }
  if (base.step >= step) {
    return Bad(where, "base", absl::StrCat("a step below ", step),
               ToString(base));
  }
  if (base.manifest_hash.IsZero()) {
    return Bad(where, "base", "the hash of its manifest", "zero");
  }
  return absl::OkStatus();
}

absl::Status CheckMetadata(absl::string_view where, const Metadata& metadata) {
  KEDGE_RETURN_IF_ERROR(CheckRange(where, "metadata pairs", metadata.size(), 0,
                                   kMaxMetadataEntries));
  std::uint64_t bytes = 0;
  std::size_t row = 0;
  for (const auto& [key, value] : metadata) {
    if (!flat::IsUtf8(key)) {
      return Bad(where, Row("metadata", row, "key"), "UTF-8", "other bytes");
    }
    if (!flat::IsUtf8(value)) {
      return Bad(where, Row("metadata", row, "value"), "UTF-8", "other bytes");
    }
    bytes += key.size() + value.size();
    ++row;
  }
  return CheckRange(where, "metadata bytes", bytes, 0, kMaxMetadataBytes);
}

absl::Status CheckFiles(absl::string_view where, FileKind kind,
                        std::span<const DataFile> files) {
  for (std::size_t i = 0; i < files.size(); ++i) {
    const DataFile& file = files[i];
    if (file.id.kind != kind) {
      return Bad(where, Row("files", i, "kind"),
                 absl::StrCat(static_cast<std::uint32_t>(kind)),
                 absl::StrCat(static_cast<std::uint32_t>(file.id.kind)));
    }
    if (file.id.rank >= kMaxRanks) {
      return Bad(where, Row("files", i, "rank"),
                 absl::StrCat("below ", kMaxRanks), absl::StrCat(file.id.rank));
    }
    if (file.id.number >= kMaxFilesPerRank) {
      return Bad(where, Row("files", i, "number"),
                 absl::StrCat("below ", kMaxFilesPerRank),
                 absl::StrCat(file.id.number));
    }
    if (i > 0 && !(files[i - 1].id < file.id)) {
      return Bad(where, Row("files", i),
                 absl::StrCat("a file after ", DataFileName(files[i - 1].id)),
                 DataFileName(file.id));
    }
    if (file.bytes > kMaxFileBytes) {
      return Bad(where, absl::StrCat(FileRow(files, i), ".bytes"),
                 absl::StrCat("at most ", kMaxFileBytes),
                 absl::StrCat(file.bytes));
    }
    if (kind == FileKind::kSegment &&
        file.piece_hashes.size() != PieceCount(file.bytes)) {
      return Bad(
          where, absl::StrCat(FileRow(files, i), ".pieces"),
          absl::StrCat(PieceCount(file.bytes), " for ", file.bytes, " bytes"),
          absl::StrCat(file.piece_hashes.size()));
    }
    const Hash128 hash = HashOfPieces(file.piece_hashes);
    if (file.hash != hash) {
      return Bad(where, absl::StrCat(FileRow(files, i), ".hash"),
                 absl::StrCat(ToHex(hash), ", that of its piece hashes"),
                 ToHex(file.hash));
    }
  }
  return absl::OkStatus();
}

// Ranges of rows that have `tensor` and `slice`: non-empty, ascending, not
// overlapping.
template <class T>
absl::Status CheckSlices(absl::string_view where, absl::string_view column,
                         std::span<const T> rows) {
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const T& row = rows[i];
    if (row.tensor >= kMaxTensorCount) {
      return Bad(where, Row(column, i, "tensor"),
                 absl::StrCat("below ", kMaxTensorCount),
                 absl::StrCat(row.tensor));
    }
    if (row.slice.begin >= row.slice.end || row.slice.end > kMaxTensorBytes) {
      return Bad(
          where, Row(column, i, "slice"),
          absl::StrCat("a non-empty range within ", kMaxTensorBytes, " units"),
          RangeText(row.slice));
    }
    if (i == 0) continue;
    const T& before = rows[i - 1];
    if (row.tensor < before.tensor ||
        (row.tensor == before.tensor && row.slice.begin < before.slice.end)) {
      return Bad(
          where, Row(column, i),
          absl::StrCat("a slice after tensor ", before.tensor, " ",
                       RangeText(before.slice)),
          absl::StrCat("tensor ", row.tensor, " ", RangeText(row.slice)));
    }
  }
  return absl::OkStatus();
}

// The same against the table: the tensor is there, owns its storage, and holds
// the range in whole elements.
template <class T>
absl::Status CheckSlicesAgainstTable(absl::string_view where,
                                     absl::string_view column,
                                     std::span<const T> rows,
                                     const TensorTable& table) {
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const T& row = rows[i];
    if (row.tensor >= table.size()) {
      return Bad(where, Row(column, i, "tensor"),
                 absl::StrCat("below ", table.size(), ", the tensor count"),
                 absl::StrCat(row.tensor));
    }
    const TensorSpec& tensor = table[row.tensor];
    if (tensor.tied_to != kNotTied) {
      return Bad(
          where, Row(column, i, "tensor"), "a tensor that has its own storage",
          absl::StrCat(TensorText(table, row.tensor), ", which is tied to ",
                       TensorText(table, tensor.tied_to)));
    }
    if (row.slice.end > tensor.unit_count()) {
      return Bad(where, Row(column, i, "slice"),
                 absl::StrCat("within the ", tensor.unit_count(), " units of ",
                              TensorText(table, row.tensor)),
                 RangeText(row.slice));
    }
    const std::uint32_t step = UnitsPerElement(tensor.dtype);
    if (row.slice.begin % step != 0 || row.slice.end % step != 0) {
      return Bad(where, Row(column, i, "slice"),
                 absl::StrCat("whole elements (", step, " units each) of ",
                              TensorText(table, row.tensor)),
                 RangeText(row.slice));
    }
  }
  return absl::OkStatus();
}

// Records by themselves and as what their files hold: together with their
// padding they are the payload, without holes.
absl::Status CheckRecords(absl::string_view where,
                          std::span<const DataFile> files,
                          std::span<const DeltaRecord> records) {
  KEDGE_RETURN_IF_ERROR(
      CheckRange(where, "records", records.size(), 0, kMaxRecordsPerStep));
  KEDGE_RETURN_IF_ERROR(CheckSlices(where, "records", records));
  for (std::size_t i = 0; i < records.size(); ++i) {
    const DeltaRecord& record = records[i];
    if (record.codec == Codec::kOldExponentContext) {
      return absl::UnimplementedError(Describe(
          {where, Row("records", i, "codec"), "1, which this reader knows",
           absl::StrCat(static_cast<int>(record.codec)), "update kedge"}));
    }
    if (record.codec != Codec::kR2) {
      return Bad(where, Row("records", i, "codec"), "1",
                 absl::StrCat(static_cast<int>(record.codec)));
    }
    if (record.file >= files.size()) {
      return Bad(where, Row("records", i, "file"),
                 absl::StrCat("below ", files.size(), ", the file count"),
                 absl::StrCat(record.file));
    }
    if (record.offset % kRecordAlignment != 0 ||
        record.offset < kDataFileHeaderBytes || record.offset > kMaxFileBytes) {
      return Bad(where, Row("records", i, "offset"),
                 absl::StrCat("a multiple of 8, ", kDataFileHeaderBytes, " to ",
                              kMaxFileBytes),
                 absl::StrCat(record.offset));
    }
    if (record.bytes < sizeof(RecordHeader) || record.bytes > kMaxRecordBytes) {
      return Bad(where, Row("records", i, "bytes"),
                 absl::StrCat(sizeof(RecordHeader), " to ", kMaxRecordBytes),
                 absl::StrCat(record.bytes));
    }
    if (record.nnz == 0 || record.nnz > record.slice.count()) {
      return Bad(where, Row("records", i, "nnz"),
                 absl::StrCat("1 to ", record.slice.count(),
                              ", the units of its slice"),
                 absl::StrCat(record.nnz));
    }
    if (record.l61 >= kL61Prime) {
      return Bad(where, Row("records", i, "l61"), "a residue below 2^61 - 1",
                 Hex64(record.l61));
    }
  }

  std::vector<std::uint32_t> order(records.size());
  for (std::uint32_t i = 0; i < order.size(); ++i) order[i] = i;
  std::sort(order.begin(), order.end(), [&](std::uint32_t a, std::uint32_t b) {
    return records[a].file != records[b].file
               ? records[a].file < records[b].file
               : records[a].offset < records[b].offset;
  });
  std::size_t next = 0;
  for (std::size_t i = 0; i < files.size(); ++i) {
    std::uint64_t end = kDataFileHeaderBytes;
    for (; next < order.size() && records[order[next]].file == i; ++next) {
      const DeltaRecord& record = records[order[next]];
      if (record.offset != end) {
        return Bad(where, Row("records", order[next], "offset"),
                   absl::StrCat(end, " in ", DataFileName(files[i].id),
                                ", where the record before it ends"),
                   absl::StrCat(record.offset));
      }
      end += RoundUp(record.bytes, kRecordAlignment);
      if (end > kMaxFileBytes) {
        return Bad(where, Row("records", order[next], "bytes"),
                   absl::StrCat("an end within ", kMaxFileBytes, " bytes"),
                   absl::StrCat(end));
      }
    }
    const std::uint64_t bytes = SegmentFileBytes(end - kDataFileHeaderBytes);
    if (files[i].bytes != bytes) {
      return Bad(where, absl::StrCat(FileRow(files, i), ".bytes"),
                 absl::StrCat(bytes, ", what its records take"),
                 absl::StrCat(files[i].bytes));
    }
  }
  return absl::OkStatus();
}

// States by themselves and against the records; which ties are there is left to
// the table.
absl::Status CheckStates(absl::string_view where,
                         const StepManifest& manifest) {
  const auto& states = manifest.states;
  KEDGE_RETURN_IF_ERROR(
      CheckRange(where, "states", states.size(), 0, kMaxTensorCount));
  bool any_change = false;
  std::size_t next = 0;  // record
  for (std::size_t i = 0; i < states.size(); ++i) {
    const TensorState& state = states[i];
    if (i > 0 && state.tensor <= states[i - 1].tensor) {
      return Bad(where, Row("states", i, "tensor"),
                 absl::StrCat("above ", states[i - 1].tensor),
                 absl::StrCat(state.tensor));
    }
    if (state.l61_before >= kL61Prime || state.l61_after >= kL61Prime) {
      return Bad(
          where, Row("states", i, "l61"), "residues below 2^61 - 1",
          absl::StrCat(Hex64(state.l61_before), ", ", Hex64(state.l61_after)));
    }
    any_change = any_change || state.l61_before != state.l61_after;
    if (next == manifest.records.size() ||
        manifest.records[next].tensor > state.tensor) {
      continue;  // a tie, or one row too many
    }
    if (manifest.records[next].tensor < state.tensor) {
      return Bad(
          where, Row("states", i, "tensor"),
          absl::StrCat(manifest.records[next].tensor, ", which has a record"),
          absl::StrCat(state.tensor));
    }
    std::uint64_t after = state.l61_before;
    for (; next < manifest.records.size() &&
           manifest.records[next].tensor == state.tensor;
         ++next) {
      after = L61Add(after, manifest.records[next].l61);
    }
    if (state.l61_after != after) {
      return Bad(where, Row("states", i, "l61_after"),
                 absl::StrCat(Hex64(after),
                              ", l61_before and its records' l61 together"),
                 Hex64(state.l61_after));
    }
  }
  if (next < manifest.records.size()) {
    return Bad(where, "states",
               absl::StrCat("a row for tensor ", manifest.records[next].tensor,
                            ", which has a record"),
               "none");
  }
  if (any_change == (manifest.digest_before == manifest.digest_after)) {
    return Bad(where, "digest_after",
               any_change ? "another than digest_before, as tensors change"
                          : "digest_before, as no tensor changes",
               ToHex(manifest.digest_after));
  }
  return absl::OkStatus();
}

// S of every tensor.
absl::Status CheckAllL61(absl::string_view where,
                         std::span<const std::uint64_t> l61,
                         const TensorTable& table) {
  if (l61.size() != table.size()) {
    return Bad(where, "l61", absl::StrCat(table.size(), " rows, one a tensor"),
               absl::StrCat(l61.size()));
  }
  for (std::uint32_t i = 0; i < table.size(); ++i) {
    const TensorSpec& tensor = table[i];
    if (tensor.tied_to != kNotTied && l61[i] != l61[tensor.tied_to]) {
      return Bad(where, Row("l61", i),
                 absl::StrCat(Hex64(l61[tensor.tied_to]), " as for ",
                              TensorText(table, tensor.tied_to), ", to which ",
                              TensorText(table, i), " is tied"),
                 Hex64(l61[i]));
    }
    if (tensor.element_count() == 0 && l61[i] != 0) {
      return Bad(where, Row("l61", i),
                 absl::StrCat("0, as ", TensorText(table, i), " is empty"),
                 Hex64(l61[i]));
    }
  }
  return absl::OkStatus();
}

absl::Status CheckTableHash(absl::string_view where, const Hash128& hash,
                            const TensorTable& table) {
  if (hash == table.hash()) return absl::OkStatus();
  return Bad(where, "table_hash", ToHex(table.hash()), ToHex(hash));
}

absl::Status CheckDigest(absl::string_view where, absl::string_view field,
                         const Hash128& digest,
                         std::span<const std::uint64_t> l61,
                         const TensorTable& table) {
  const Hash128 expected = table.StateDigest(l61);
  if (digest == expected) return absl::OkStatus();
  return Bad(where, field,
             absl::StrCat(ToHex(expected), ", that of its l61 column"),
             ToHex(digest));
}

}  // namespace

std::string TensorText(const TensorTable& table, std::uint32_t ordinal) {
  return absl::StrCat(
      "tensor \"",
      absl::CHexEscape(absl::string_view(table[ordinal].name).substr(0, 200)),
      "\"");
}

std::string RangeText(const UnitRange& range) {
  return absl::StrCat("[", range.begin, ", ", range.end, ")");
}

absl::Status CheckStepLayout(absl::string_view where,
                             const StepManifest& manifest) {
  KEDGE_RETURN_IF_ERROR(CheckRange(where, "step", manifest.step, 0, kMaxStep));
  const bool v0 = manifest.step == 0;
  KEDGE_RETURN_IF_ERROR(CheckRange(where, "epoch", manifest.epoch, v0 ? 0 : 1,
                                   v0 ? 0 : kMaxEpoch));
  KEDGE_RETURN_IF_ERROR(CheckBase(where, manifest.step, manifest.base));
  if (!manifest.metadata_changed && !manifest.metadata.empty()) {
    return Bad(where, "metadata", "none, as metadata_changed is false",
               absl::StrCat(manifest.metadata.size(), " pairs"));
  }
  KEDGE_RETURN_IF_ERROR(CheckMetadata(where, manifest.metadata));

  if (manifest.kind == StepKind::kRoot) {
    if (!manifest.files.empty() || !manifest.records.empty() ||
        !manifest.states.empty()) {
      return Bad(
          where, "files, records, states", "none in a root step",
          absl::StrCat(manifest.files.size(), ", ", manifest.records.size(),
                       ", ", manifest.states.size()));
    }
    if (!manifest.digest_before.IsZero()) {
      return Bad(where, "digest_before", "zero in a root step",
                 ToHex(manifest.digest_before));
    }
    KEDGE_RETURN_IF_ERROR(
        CheckRange(where, "l61 rows", manifest.l61.size(), 0, kMaxTensorCount));
    return CheckResidues(where, "l61", manifest.l61);
  }
  if (manifest.kind != StepKind::kDelta) {
    return Bad(where, "kind", "1 (delta) or 2 (root)",
               absl::StrCat(static_cast<int>(manifest.kind)));
  }
  if (v0) return Bad(where, "kind", "2 (root) at step 0", "1 (delta)");
  if (!manifest.l61.empty()) {
    return Bad(where, "l61", "none in a delta",
               absl::StrCat(manifest.l61.size(), " rows"));
  }
  KEDGE_RETURN_IF_ERROR(CheckFiles(where, FileKind::kSegment, manifest.files));
  KEDGE_RETURN_IF_ERROR(CheckRecords(where, manifest.files, manifest.records));
  return CheckStates(where, manifest);
}

absl::Status CheckAnchorLayout(absl::string_view where,
                               const AnchorManifest& manifest) {
  KEDGE_RETURN_IF_ERROR(
      CheckRange(where, "step", manifest.version.step, 0, kMaxStep));
  KEDGE_RETURN_IF_ERROR(CheckRange(where, "epoch", manifest.epoch,
                                   manifest.version.step == 0 ? 0 : 1,
                                   kMaxEpoch));
  if (manifest.version.manifest_hash.IsZero()) {
    return Bad(where, "step_manifest_hash", "the hash of the step's manifest",
               "zero");
  }
  KEDGE_RETURN_IF_ERROR(CheckMetadata(where, manifest.metadata));
  KEDGE_RETURN_IF_ERROR(
      CheckRange(where, "l61 rows", manifest.l61.size(), 0, kMaxTensorCount));
  KEDGE_RETURN_IF_ERROR(CheckResidues(where, "l61", manifest.l61));
  KEDGE_RETURN_IF_ERROR(CheckFiles(where, FileKind::kAnchor, manifest.files));
  KEDGE_RETURN_IF_ERROR(CheckRange(where, "slices", manifest.slices.size(), 0,
                                   kMaxSlicesPerAnchor));
  KEDGE_RETURN_IF_ERROR(
      CheckSlices(where, "slices", std::span(manifest.slices)));
  std::vector<std::uint64_t> least(manifest.files.size(), kSliceAlignment);
  for (std::size_t i = 0; i < manifest.slices.size(); ++i) {
    const AnchorSlice& slice = manifest.slices[i];
    if (slice.file >= manifest.files.size()) {
      return Bad(
          where, Row("slices", i, "file"),
          absl::StrCat("below ", manifest.files.size(), ", the file count"),
          absl::StrCat(slice.file));
    }
    if (slice.offset % kSliceAlignment != 0 ||
        slice.offset < least[slice.file] || slice.offset > kMaxFileBytes) {
      return Bad(where, Row("slices", i, "offset"),
                 absl::StrCat("a multiple of 4096, ", least[slice.file], " to ",
                              kMaxFileBytes, " in ",
                              DataFileName(manifest.files[slice.file].id)),
                 absl::StrCat(slice.offset));
    }
    least[slice.file] = slice.offset + kSliceAlignment;
  }
  for (std::size_t i = 0; i < manifest.files.size(); ++i) {
    if (least[i] == kSliceAlignment) {
      return Bad(where, FileRow(manifest.files, i), "at least one slice",
                 "none");
    }
  }
  return absl::OkStatus();
}

absl::Status CheckFragmentLayout(absl::string_view where,
                                 const RankFragment& fragment) {
  KEDGE_RETURN_IF_ERROR(CheckRange(where, "step", fragment.step, 1, kMaxStep));
  KEDGE_RETURN_IF_ERROR(
      CheckRange(where, "epoch", fragment.epoch, 1, kMaxEpoch));
  KEDGE_RETURN_IF_ERROR(
      CheckRange(where, "world_size", fragment.world_size, 1, kMaxRanks));
  KEDGE_RETURN_IF_ERROR(
      CheckRange(where, "rank", fragment.rank, 0, fragment.world_size - 1));
  KEDGE_RETURN_IF_ERROR(CheckBase(where, fragment.step, fragment.base));
  KEDGE_RETURN_IF_ERROR(CheckFiles(where, FileKind::kSegment, fragment.files));
  for (std::size_t i = 0; i < fragment.files.size(); ++i) {
    if (fragment.files[i].id.rank != fragment.rank) {
      return Bad(where, Row("files", i, "rank"),
                 absl::StrCat(fragment.rank, ", the fragment's"),
                 absl::StrCat(fragment.files[i].id.rank));
    }
  }
  KEDGE_RETURN_IF_ERROR(CheckRecords(where, fragment.files, fragment.records));
  return CheckSlices(where, "owned", std::span(fragment.owned));
}

absl::Status CheckFragmentTable(absl::string_view where,
                                const RankFragment& fragment,
                                const TensorTable& table) {
  KEDGE_RETURN_IF_ERROR(CheckTableHash(where, fragment.table_hash, table));
  KEDGE_RETURN_IF_ERROR(CheckSlicesAgainstTable(
      where, "records", std::span(fragment.records), table));
  return CheckSlicesAgainstTable(where, "owned", std::span(fragment.owned),
                                 table);
}

std::optional<std::size_t> FirstRecordOutside(const RankFragment& fragment) {
  std::size_t next = 0;  // owned range
  for (std::size_t i = 0; i < fragment.records.size(); ++i) {
    const DeltaRecord& record = fragment.records[i];
    while (next < fragment.owned.size() &&
           (fragment.owned[next].tensor < record.tensor ||
            (fragment.owned[next].tensor == record.tensor &&
             fragment.owned[next].slice.end <= record.slice.begin))) {
      ++next;
    }
    if (next == fragment.owned.size() ||
        fragment.owned[next].tensor != record.tensor ||
        fragment.owned[next].slice.begin > record.slice.begin ||
        fragment.owned[next].slice.end < record.slice.end) {
      return i;
    }
  }
  return std::nullopt;
}

}  // namespace rules

using flat::Bad;
using flat::Row;

absl::Status CheckStepManifest(absl::string_view where,
                               const StepManifest& manifest,
                               const TensorTable& table) {
  using rules::TensorText;
  KEDGE_RETURN_IF_ERROR(
      rules::CheckTableHash(where, manifest.table_hash, table));
  if (manifest.kind == StepKind::kRoot) {
    KEDGE_RETURN_IF_ERROR(rules::CheckAllL61(where, manifest.l61, table));
    return rules::CheckDigest(where, "digest_after", manifest.digest_after,
                              manifest.l61, table);
  }
  KEDGE_RETURN_IF_ERROR(rules::CheckSlicesAgainstTable(
      where, "records", std::span(manifest.records), table));
  // Exactly the tensors with records, and their ties.
  std::vector<bool> changed(table.size());
  for (const DeltaRecord& record : manifest.records) {
    changed[record.tensor] = true;
  }
  constexpr std::uint32_t kNone = std::numeric_limits<std::uint32_t>::max();
  std::vector<std::uint32_t> state_of(table.size(), kNone);
  std::size_t next = 0;
  for (std::uint32_t i = 0; i < table.size(); ++i) {
    const std::uint32_t tied_to = table[i].tied_to;
    const bool expected = changed[tied_to == kNotTied ? i : tied_to];
    const bool found =
        next < manifest.states.size() && manifest.states[next].tensor == i;
    if (expected != found) {
      return Bad(where, found ? Row("states", next, "tensor") : "states",
                 absl::StrCat(expected ? "a row" : "no row", " for ",
                              TensorText(table, i), ", which has ",
                              expected ? "a" : "no", " record",
                              tied_to == kNotTied ? "" : " by its tie"),
                 found ? "one" : "none");
    }
    if (found) state_of[i] = static_cast<std::uint32_t>(next++);
  }
  if (next < manifest.states.size()) {
    return Bad(where, Row("states", next, "tensor"),
               absl::StrCat("below ", table.size(), ", the tensor count"),
               absl::StrCat(manifest.states[next].tensor));
  }
  for (std::size_t i = 0; i < manifest.states.size(); ++i) {
    const TensorState& state = manifest.states[i];
    const std::uint32_t tied_to = table[state.tensor].tied_to;
    if (tied_to == kNotTied) continue;
    const TensorState& owner = manifest.states[state_of[tied_to]];
    if (state.l61_before != owner.l61_before ||
        state.l61_after != owner.l61_after) {
      return Bad(
          where, Row("states", i, "l61"),
          absl::StrCat(Hex64(owner.l61_before), ", ", Hex64(owner.l61_after),
                       " as for ", TensorText(table, tied_to), ", to which ",
                       TensorText(table, state.tensor), " is tied"),
          absl::StrCat(Hex64(state.l61_before), ", ", Hex64(state.l61_after)));
    }
  }
  return absl::OkStatus();
}

absl::Status CheckAnchorManifest(absl::string_view where,
                                 const AnchorManifest& manifest,
                                 const TensorTable& table) {
  using rules::RangeText;
  using rules::TensorText;
  KEDGE_RETURN_IF_ERROR(
      rules::CheckTableHash(where, manifest.table_hash, table));
  KEDGE_RETURN_IF_ERROR(rules::CheckAllL61(where, manifest.l61, table));
  KEDGE_RETURN_IF_ERROR(rules::CheckDigest(where, "digest", manifest.digest,
                                           manifest.l61, table));
  const auto& slices = manifest.slices;
  KEDGE_RETURN_IF_ERROR(rules::CheckSlicesAgainstTable(
      where, "slices", std::span(slices), table));

  // Every unit of every tensor with its own storage exactly once. Slices ascend
  // and do not overlap.
  std::size_t next = 0;
  for (std::uint32_t i = 0; i < table.size(); ++i) {
    if (table[i].tied_to != kNotTied) continue;
    const std::uint64_t units = table[i].unit_count();
    std::uint64_t covered = 0;
    while (covered < units) {
      const bool here = next < slices.size() && slices[next].tensor == i;
      const std::uint64_t begin = here ? slices[next].slice.begin : units;
      if (begin != covered) {
        return Bad(
            where, "slices",
            absl::StrCat("all ", units, " units of ", TensorText(table, i)),
            absl::StrCat("none that holds ", RangeText({covered, begin})));
      }
      covered = slices[next++].slice.end;
    }
  }

  // Slices fill their files in the order of the table.
  struct Filled {
    std::uint64_t bytes = kSliceAlignment;
    std::uint64_t pieces = 0;
  };
  std::vector<Filled> filled(manifest.files.size());
  for (std::size_t i = 0; i < slices.size(); ++i) {
    const AnchorSlice& slice = slices[i];
    Filled& file = filled[slice.file];
    const std::uint64_t offset = rules::RoundUp(file.bytes, kSliceAlignment);
    if (slice.offset != offset) {
      return Bad(
          where, Row("slices", i, "offset"),
          absl::StrCat(offset, " in ",
                       DataFileName(manifest.files[slice.file].id),
                       ", where the slice before it ends, rounded up to 4096"),
          absl::StrCat(slice.offset));
    }
    const std::uint64_t bytes =
        slice.slice.count() * UnitBytes(table[slice.tensor].dtype);
    // Both are below 2^49.
    file.bytes = slice.offset + bytes;
    file.pieces += PieceCount(bytes);
  }
  for (std::size_t i = 0; i < filled.size(); ++i) {
    const DataFile& file = manifest.files[i];
    if (file.bytes != filled[i].bytes) {
      return Bad(where,
                 absl::StrCat(rules::FileRow(manifest.files, i), ".bytes"),
                 absl::StrCat(filled[i].bytes, ", the end of its last slice"),
                 absl::StrCat(file.bytes));
    }
    if (file.piece_hashes.size() != filled[i].pieces) {
      return Bad(where,
                 absl::StrCat(rules::FileRow(manifest.files, i), ".pieces"),
                 absl::StrCat(filled[i].pieces, ", those of its slices"),
                 absl::StrCat(file.piece_hashes.size()));
    }
  }
  return absl::OkStatus();
}

}  // namespace kedge
