#include "kedge/format/manifest.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "anchor_manifest_generated.h"
#include "kedge/format/flat_columns.h"
#include "kedge/format/limits.h"
#include "kedge/format/manifest_rules.h"
#include "kedge/format/status.h"
#include "rank_fragment_generated.h"
#include "step_manifest_generated.h"

namespace kedge {
namespace {

using flat::Bad;
using flat::Row;
using flatbuffers::FlatBufferBuilder;

constexpr char kStepIdentifier[] = "KDSM";
constexpr char kAnchorIdentifier[] = "KDAM";
constexpr char kFragmentIdentifier[] = "KDRF";

// --- Files -------------------------------------------------------------------

// All columns of DataFile but the piece counts, which only anchors store.
template <class Builder>
auto PutFiles(FlatBufferBuilder& builder, const std::vector<DataFile>& files) {
  const auto rank = flat::PutColumn<std::uint16_t>(
      builder, files, [](const DataFile& file) { return file.id.rank; });
  const auto number = flat::PutColumn<std::uint16_t>(
      builder, files, [](const DataFile& file) { return file.id.number; });
  const auto bytes = flat::PutColumn<std::uint64_t>(
      builder, files, [](const DataFile& file) { return file.bytes; });
  std::vector<fbs::Bytes16> hashes;
  std::vector<std::uint64_t> pieces;
  for (const DataFile& file : files) {
    hashes.push_back(flat::FromBytes16(file.hash));
    pieces.insert(pieces.end(), file.piece_hashes.begin(),
                  file.piece_hashes.end());
  }
  flatbuffers::Offset<flatbuffers::Vector<const fbs::Bytes16*>> hash = 0;
  if (!hashes.empty()) hash = builder.CreateVectorOfStructs(hashes);
  const auto piece = flat::Put(builder, pieces);
  return [=](Builder& table) {
    table.add_file_rank(rank);
    table.add_file_number(number);
    table.add_file_bytes(bytes);
    table.add_file_hash(hash);
    table.add_piece_hash(piece);
  };
}

// `piece_counts`: of each file; empty if they follow from the sizes.
template <class Root>
absl::StatusOr<std::vector<DataFile>> ReadFiles(
    absl::string_view where, const Root& root, FileKind kind,
    flat::ColumnView<std::uint32_t> piece_counts) {
  const auto rank = flat::Column(root.file_rank());
  const auto number = flat::Column(root.file_number());
  const auto bytes = flat::Column(root.file_bytes());
  const auto hash = flat::Column(root.file_hash());
  const auto piece = flat::Column(root.piece_hash());
  const std::size_t count = rank.size();
  KEDGE_RETURN_IF_ERROR(
      flat::CheckRows(where, "file_number", number.size(), count));
  KEDGE_RETURN_IF_ERROR(
      flat::CheckRows(where, "file_bytes", bytes.size(), count));
  KEDGE_RETURN_IF_ERROR(
      flat::CheckRows(where, "file_hash", hash.size(), count));
  std::vector<DataFile> files(count);
  std::size_t next = 0;
  for (std::size_t i = 0; i < count; ++i) {
    DataFile& file = files[i];
    file.id = {kind, rank[i], number[i]};
    file.bytes = bytes[i];
    file.hash = hash[i];
    const std::uint64_t pieces =
        piece_counts.empty() ? PieceCount(bytes[i]) : piece_counts[i];
    if (pieces > piece.size() - next) {
      return Bad(
          where, "piece_hash",
          absl::StrCat(pieces, " from row ", next, " on for files[", i, "]"),
          absl::StrCat(piece.size() - next));
    }
    file.piece_hashes = piece.Rows(next, pieces);
    next += pieces;
  }
  KEDGE_RETURN_IF_ERROR(
      flat::CheckRows(where, "piece_hash", piece.size(), next));
  return files;
}

// --- Records -----------------------------------------------------------------

template <class Builder>
auto PutRecords(FlatBufferBuilder& builder,
                const std::vector<DeltaRecord>& records) {
  const auto tensor = flat::PutColumn<std::uint32_t>(
      builder, records, [](const DeltaRecord& r) { return r.tensor; });
  const auto begin = flat::PutEither<std::uint32_t, std::uint64_t>(
      builder, records, /*optional=*/true,
      [](const DeltaRecord& r) { return r.slice.begin; });
  const auto count = flat::PutEither<std::uint32_t, std::uint64_t>(
      builder, records, /*optional=*/false,
      [](const DeltaRecord& r) { return r.slice.count(); });
  const auto file = flat::PutEither<std::uint16_t, std::uint32_t>(
      builder, records, /*optional=*/true,
      [](const DeltaRecord& r) { return r.file; });
  const auto offset8 = flat::PutEither<std::uint32_t, std::uint64_t>(
      builder, records, /*optional=*/false,
      [](const DeltaRecord& r) { return r.offset / kRecordAlignment; });
  const auto bytes = flat::PutColumn<std::uint32_t>(
      builder, records, [](const DeltaRecord& r) { return r.bytes; });
  // Codec 1 alone passes the rules, so that the column is never needed yet.
  const auto nnz = flat::PutEither<std::uint32_t, std::uint64_t>(
      builder, records, /*optional=*/false,
      [](const DeltaRecord& r) { return r.nnz; });
  const auto l61 = flat::PutColumn<std::uint64_t>(
      builder, records, [](const DeltaRecord& r) { return r.l61; });
  return [=](Builder& table) {
    table.add_record_tensor(tensor);
    table.add_record_begin(begin.narrow);
    table.add_record_begin_wide(begin.wide);
    table.add_record_count(count.narrow);
    table.add_record_count_wide(count.wide);
    table.add_record_file(file.narrow);
    table.add_record_file_wide(file.wide);
    table.add_record_offset8(offset8.narrow);
    table.add_record_offset8_wide(offset8.wide);
    table.add_record_bytes(bytes);
    table.add_record_nnz(nnz.narrow);
    table.add_record_nnz_wide(nnz.wide);
    table.add_record_l61(l61);
  };
}

// `begin` + `count` of a row; a sum beyond 64 bits gives an empty range, which
// the rules refuse.
UnitRange RangeOf(std::uint64_t begin, std::uint64_t count) {
  const std::uint64_t end = begin + count;
  return end < begin ? UnitRange{begin, begin} : UnitRange{begin, end};
}

template <class Root>
absl::StatusOr<std::vector<DeltaRecord>> ReadRecords(absl::string_view where,
                                                     const Root& root) {
  const auto tensor = flat::Column(root.record_tensor());
  const auto begin =
      flat::Either(root.record_begin(), root.record_begin_wide());
  const auto units =
      flat::Either(root.record_count(), root.record_count_wide());
  const auto file = flat::Either(root.record_file(), root.record_file_wide());
  const auto offset8 =
      flat::Either(root.record_offset8(), root.record_offset8_wide());
  const auto bytes = flat::Column(root.record_bytes());
  const auto codec = flat::Column(root.record_codec());
  const auto nnz = flat::Either(root.record_nnz(), root.record_nnz_wide());
  const auto l61 = flat::Column(root.record_l61());
  const std::size_t count = tensor.size();
  KEDGE_RETURN_IF_ERROR(begin.Check(where, "record_begin", count, true));
  KEDGE_RETURN_IF_ERROR(units.Check(where, "record_count", count, false));
  KEDGE_RETURN_IF_ERROR(file.Check(where, "record_file", count, true));
  KEDGE_RETURN_IF_ERROR(offset8.Check(where, "record_offset8", count, false));
  KEDGE_RETURN_IF_ERROR(
      flat::CheckRows(where, "record_bytes", bytes.size(), count));
  if (!codec.empty()) {
    KEDGE_RETURN_IF_ERROR(
        flat::CheckRows(where, "record_codec", codec.size(), count));
  }
  KEDGE_RETURN_IF_ERROR(nnz.Check(where, "record_nnz", count, false));
  KEDGE_RETURN_IF_ERROR(
      flat::CheckRows(where, "record_l61", l61.size(), count));
  if (count > kMaxRecordsPerStep) {
    return Bad(where, "records", absl::StrCat("at most ", kMaxRecordsPerStep),
               absl::StrCat(count));
  }
  std::vector<DeltaRecord> records(count);
  for (std::size_t i = 0; i < count; ++i) {
    DeltaRecord& record = records[i];
    record.tensor = tensor[i];
    record.slice = RangeOf(begin[i], units[i]);
    record.file = file[i];
    if (offset8[i] > kMaxFileBytes / kRecordAlignment) {
      return Bad(where, Row("record_offset8", i),
                 absl::StrCat("at most ", kMaxFileBytes / kRecordAlignment),
                 absl::StrCat(offset8[i]));
    }
    record.offset = offset8[i] * kRecordAlignment;
    record.bytes = bytes[i];
    record.codec = codec.empty() ? Codec::kR2 : static_cast<Codec>(codec[i]);
    record.nnz = nnz[i];
    record.l61 = l61[i];
  }
  return records;
}

// --- Metadata ----------------------------------------------------------------

template <class Builder>
auto PutMetadata(FlatBufferBuilder& builder, const Metadata& metadata) {
  std::vector<std::uint8_t> pool;
  std::vector<std::uint32_t> ends;
  for (const auto& [key, value] : metadata) {
    for (const std::string* text : {&key, &value}) {
      pool.insert(pool.end(), text->begin(), text->end());
      ends.push_back(static_cast<std::uint32_t>(pool.size()));
    }
  }
  const auto end = flat::Put(builder, ends);
  const auto bytes = flat::Put(builder, pool);
  return [=](Builder& table) {
    table.add_metadata_end(end);
    table.add_metadata(bytes);
  };
}

template <class Root>
absl::StatusOr<Metadata> ReadMetadata(absl::string_view where,
                                      const Root& root) {
  const auto ends = flat::Column(root.metadata_end());
  const auto pool = flat::Column(root.metadata());
  if (ends.size() % 2 != 0 || ends.size() / 2 > kMaxMetadataEntries) {
    return Bad(where, "metadata_end",
               absl::StrCat("two rows a pair, at most ", kMaxMetadataEntries,
                            " pairs"),
               absl::StrCat(ends.size(), " rows"));
  }
  if (pool.size() > kMaxMetadataBytes) {
    return Bad(where, "metadata", absl::StrCat("at most ", kMaxMetadataBytes),
               absl::StrCat(pool.size(), " bytes"));
  }
  Metadata metadata;
  std::uint32_t at = 0;
  for (std::size_t i = 0; i < ends.size(); i += 2) {
    if (ends[i] < at || ends[i + 1] < ends[i] || ends[i + 1] > pool.size()) {
      return Bad(where, Row("metadata_end", i),
                 absl::StrCat("two ascending rows, ", at, " to ", pool.size()),
                 absl::StrCat(ends[i], ", ", ends[i + 1]));
    }
    std::string key = pool.Text(at, ends[i] - at);
    std::string value = pool.Text(ends[i], ends[i + 1] - ends[i]);
    at = ends[i + 1];
    if (!metadata.empty() && key <= metadata.rbegin()->first) {
      return Bad(where, Row("metadata", i / 2, "key"),
                 "a key above the one before", "one that is not");
    }
    metadata.emplace_hint(metadata.end(), std::move(key), std::move(value));
  }
  if (at != pool.size()) {
    return Bad(where, "metadata", absl::StrCat(at, " bytes"),
               absl::StrCat(pool.size()));
  }
  return metadata;
}

// --- Shared ------------------------------------------------------------------

// What a caller of Serialize gets for a manifest that breaks a rule: the fault
// is his, no bytes are wrong.
absl::Status AsInvalidArgument(const absl::Status& status) {
  return status.ok() ? status : absl::InvalidArgumentError(status.message());
}

// The builder must not grow beyond what a reader takes. `bytes` is a bound.
absl::Status CheckSize(absl::string_view where, std::uint64_t bytes) {
  if (bytes <= kMaxFlatBufferBytes) return absl::OkStatus();
  return absl::InvalidArgumentError(
      Describe({where, "size", absl::StrCat("at most ", kMaxFlatBufferBytes),
                absl::StrCat("about ", bytes, " bytes")}));
}

std::uint64_t BoundOfFiles(const std::vector<DataFile>& files) {
  std::uint64_t bytes = 0;
  for (const DataFile& file : files) bytes += 32 + 8 * file.piece_hashes.size();
  return bytes;
}

std::uint64_t BoundOfMetadata(const Metadata& metadata) {
  std::uint64_t bytes = 0;
  for (const auto& [key, value] : metadata) {
    bytes += 8 + key.size() + value.size();
  }
  return bytes;
}

// Of the fixed fields, the vtable and the padding between vectors.
constexpr std::uint64_t kBoundOfRest = 1024;
// Of one row in its widest form.
constexpr std::uint64_t kBoundOfRecord = 4 + 8 + 8 + 4 + 8 + 4 + 1 + 8 + 8;
constexpr std::uint64_t kBoundOfState = 4 + 8 + 8;
constexpr std::uint64_t kBoundOfSlice = 4 + 8 + 8 + 4 + 4;

absl::Status RecordOutside(absl::string_view where,
                           const RankFragment& fragment) {
  const auto outside = rules::FirstRecordOutside(fragment);
  if (!outside) return absl::OkStatus();
  return Bad(where, Row("records", *outside, "slice"),
             "within one of the rank's owned ranges",
             absl::StrCat("tensor ", fragment.records[*outside].tensor, " ",
                          rules::RangeText(fragment.records[*outside].slice)));
}

}  // namespace

std::string ToString(const VersionId& version) {
  return absl::StrCat("v", version.step, " (", ToHex(version.manifest_hash),
                      ")");
}

std::uint64_t PieceCount(std::uint64_t bytes) {
  return bytes / kPieceBytes + (bytes % kPieceBytes != 0 ? 1 : 0);
}

absl::StatusOr<std::vector<std::byte>> SerializeStepManifest(
    const StepManifest& manifest, const TensorTable& table) {
  const std::string where = absl::StrCat("manifest of step ", manifest.step);
  KEDGE_RETURN_IF_ERROR(
      AsInvalidArgument(rules::CheckStepLayout(where, manifest)));
  KEDGE_RETURN_IF_ERROR(
      AsInvalidArgument(CheckStepManifest(where, manifest, table)));
  KEDGE_RETURN_IF_ERROR(
      CheckSize(where, kBoundOfRest + BoundOfFiles(manifest.files) +
                           BoundOfMetadata(manifest.metadata) +
                           kBoundOfState * manifest.states.size() +
                           8 * manifest.l61.size() +
                           kBoundOfRecord * manifest.records.size()));

  FlatBufferBuilder builder;
  const auto add_metadata =
      PutMetadata<fbs::StepManifestBuilder>(builder, manifest.metadata);
  const auto add_files =
      PutFiles<fbs::StepManifestBuilder>(builder, manifest.files);
  const auto add_records =
      PutRecords<fbs::StepManifestBuilder>(builder, manifest.records);
  const auto state_tensor = flat::PutColumn<std::uint32_t>(
      builder, manifest.states,
      [](const TensorState& state) { return state.tensor; });
  const auto state_before = flat::PutColumn<std::uint64_t>(
      builder, manifest.states,
      [](const TensorState& state) { return state.l61_before; });
  const auto state_after = flat::PutColumn<std::uint64_t>(
      builder, manifest.states,
      [](const TensorState& state) { return state.l61_after; });
  const auto l61 = flat::Put(builder, manifest.l61);

  const fbs::Bytes16 run = flat::FromBytes16(manifest.run);
  const fbs::Bytes16 table_hash = flat::FromBytes16(manifest.table_hash);
  const fbs::Bytes16 base = flat::FromBytes16(manifest.base.manifest_hash);
  const fbs::Bytes16 before = flat::FromBytes16(manifest.digest_before);
  const fbs::Bytes16 after = flat::FromBytes16(manifest.digest_after);
  fbs::StepManifestBuilder root(builder);
  root.add_run(&run);
  root.add_table_hash(&table_hash);
  root.add_base_manifest_hash(&base);
  root.add_digest_before(&before);
  root.add_digest_after(&after);
  root.add_step(manifest.step);
  root.add_base_step(manifest.base.step);
  root.add_epoch(manifest.epoch);
  add_files(root);
  root.add_state_tensor(state_tensor);
  root.add_state_l61_before(state_before);
  root.add_state_l61_after(state_after);
  root.add_l61(l61);
  add_records(root);
  add_metadata(root);
  root.add_min_reader(kFormatVersion);
  root.add_writer(kFormatVersion);
  root.add_kind(static_cast<std::uint8_t>(manifest.kind));
  root.add_metadata_changed(manifest.metadata_changed);
  builder.Finish(root.Finish(), kStepIdentifier);
  KEDGE_CHECK(builder.GetSize() <= kMaxFlatBufferBytes);
  return flat::Take(builder);
}

absl::StatusOr<StepManifest> ParseStepManifest(
    absl::string_view where, std::span<const std::byte> bytes) {
  KEDGE_ASSIGN_OR_RETURN(const auto root, flat::Opened<fbs::StepManifest>::Open(
                                              where, bytes, kStepIdentifier));
  StepManifest manifest;
  manifest.run = flat::ToBytes16(*root->run());
  manifest.epoch = root->epoch();
  manifest.step = root->step();
  manifest.kind = static_cast<StepKind>(root->kind());
  manifest.table_hash = flat::ToBytes16(*root->table_hash());
  manifest.base = {root->base_step(),
                   flat::ToBytes16(*root->base_manifest_hash())};
  manifest.digest_before = flat::ToBytes16(*root->digest_before());
  manifest.digest_after = flat::ToBytes16(*root->digest_after());
  KEDGE_ASSIGN_OR_RETURN(manifest.files,
                         ReadFiles(where, *root, FileKind::kSegment, {}));
  KEDGE_ASSIGN_OR_RETURN(manifest.records, ReadRecords(where, *root));

  const auto state_tensor = flat::Column(root->state_tensor());
  const auto state_before = flat::Column(root->state_l61_before());
  const auto state_after = flat::Column(root->state_l61_after());
  KEDGE_RETURN_IF_ERROR(flat::CheckRows(
      where, "state_l61_before", state_before.size(), state_tensor.size()));
  KEDGE_RETURN_IF_ERROR(flat::CheckRows(
      where, "state_l61_after", state_after.size(), state_tensor.size()));
  manifest.states.reserve(state_tensor.size());
  for (std::size_t i = 0; i < state_tensor.size(); ++i) {
    manifest.states.push_back(
        {state_tensor[i], state_before[i], state_after[i]});
  }
  manifest.l61 = flat::Column(root->l61()).Rows();
  manifest.metadata_changed = root->metadata_changed();
  KEDGE_ASSIGN_OR_RETURN(manifest.metadata, ReadMetadata(where, *root));
  KEDGE_RETURN_IF_ERROR(rules::CheckStepLayout(where, manifest));
  return manifest;
}

absl::StatusOr<std::vector<std::byte>> SerializeAnchorManifest(
    const AnchorManifest& manifest, const TensorTable& table) {
  const std::string where =
      absl::StrCat("anchor manifest of step ", manifest.version.step);
  KEDGE_RETURN_IF_ERROR(
      AsInvalidArgument(rules::CheckAnchorLayout(where, manifest)));
  KEDGE_RETURN_IF_ERROR(
      AsInvalidArgument(CheckAnchorManifest(where, manifest, table)));
  KEDGE_RETURN_IF_ERROR(CheckSize(
      where, kBoundOfRest + BoundOfFiles(manifest.files) +
                 BoundOfMetadata(manifest.metadata) + 8 * manifest.l61.size() +
                 kBoundOfSlice * manifest.slices.size()));

  FlatBufferBuilder builder;
  const auto add_metadata =
      PutMetadata<fbs::AnchorManifestBuilder>(builder, manifest.metadata);
  const auto add_files =
      PutFiles<fbs::AnchorManifestBuilder>(builder, manifest.files);
  const auto piece_count = flat::PutColumn<std::uint32_t>(
      builder, manifest.files,
      [](const DataFile& file) { return file.piece_hashes.size(); });
  const auto l61 = flat::Put(builder, manifest.l61);
  const auto tensor = flat::PutColumn<std::uint32_t>(
      builder, manifest.slices, [](const AnchorSlice& s) { return s.tensor; });
  const auto begin = flat::PutEither<std::uint32_t, std::uint64_t>(
      builder, manifest.slices, /*optional=*/true,
      [](const AnchorSlice& s) { return s.slice.begin; });
  const auto count = flat::PutEither<std::uint32_t, std::uint64_t>(
      builder, manifest.slices, /*optional=*/false,
      [](const AnchorSlice& s) { return s.slice.count(); });
  const auto file = flat::PutEither<std::uint16_t, std::uint32_t>(
      builder, manifest.slices, /*optional=*/true,
      [](const AnchorSlice& s) { return s.file; });
  const auto offset4096 = flat::PutColumn<std::uint32_t>(
      builder, manifest.slices,
      [](const AnchorSlice& s) { return s.offset / kSliceAlignment; });

  const fbs::Bytes16 run = flat::FromBytes16(manifest.run);
  const fbs::Bytes16 version =
      flat::FromBytes16(manifest.version.manifest_hash);
  const fbs::Bytes16 table_hash = flat::FromBytes16(manifest.table_hash);
  const fbs::Bytes16 digest = flat::FromBytes16(manifest.digest);
  fbs::AnchorManifestBuilder root(builder);
  root.add_run(&run);
  root.add_step_manifest_hash(&version);
  root.add_table_hash(&table_hash);
  root.add_digest(&digest);
  root.add_step(manifest.version.step);
  root.add_epoch(manifest.epoch);
  add_files(root);
  root.add_file_piece_count(piece_count);
  root.add_l61(l61);
  root.add_slice_tensor(tensor);
  root.add_slice_begin(begin.narrow);
  root.add_slice_begin_wide(begin.wide);
  root.add_slice_count(count.narrow);
  root.add_slice_count_wide(count.wide);
  root.add_slice_file(file.narrow);
  root.add_slice_file_wide(file.wide);
  root.add_slice_offset4096(offset4096);
  add_metadata(root);
  root.add_min_reader(kFormatVersion);
  root.add_writer(kFormatVersion);
  builder.Finish(root.Finish(), kAnchorIdentifier);
  KEDGE_CHECK(builder.GetSize() <= kMaxFlatBufferBytes);
  return flat::Take(builder);
}

absl::StatusOr<AnchorManifest> ParseAnchorManifest(
    absl::string_view where, std::span<const std::byte> bytes) {
  KEDGE_ASSIGN_OR_RETURN(
      const auto root,
      flat::Opened<fbs::AnchorManifest>::Open(where, bytes, kAnchorIdentifier));
  AnchorManifest manifest;
  manifest.run = flat::ToBytes16(*root->run());
  manifest.epoch = root->epoch();
  manifest.version = {root->step(),
                      flat::ToBytes16(*root->step_manifest_hash())};
  manifest.table_hash = flat::ToBytes16(*root->table_hash());
  manifest.digest = flat::ToBytes16(*root->digest());
  const auto piece_counts = flat::Column(root->file_piece_count());
  KEDGE_RETURN_IF_ERROR(
      flat::CheckRows(where, "file_piece_count", piece_counts.size(),
                      flat::Column(root->file_rank()).size()));
  KEDGE_ASSIGN_OR_RETURN(
      manifest.files, ReadFiles(where, *root, FileKind::kAnchor, piece_counts));
  manifest.l61 = flat::Column(root->l61()).Rows();

  const auto tensor = flat::Column(root->slice_tensor());
  const auto begin =
      flat::Either(root->slice_begin(), root->slice_begin_wide());
  const auto units =
      flat::Either(root->slice_count(), root->slice_count_wide());
  const auto file = flat::Either(root->slice_file(), root->slice_file_wide());
  const auto offset4096 = flat::Column(root->slice_offset4096());
  const std::size_t count = tensor.size();
  KEDGE_RETURN_IF_ERROR(begin.Check(where, "slice_begin", count, true));
  KEDGE_RETURN_IF_ERROR(units.Check(where, "slice_count", count, false));
  KEDGE_RETURN_IF_ERROR(file.Check(where, "slice_file", count, true));
  KEDGE_RETURN_IF_ERROR(
      flat::CheckRows(where, "slice_offset4096", offset4096.size(), count));
  if (count > kMaxSlicesPerAnchor) {
    return Bad(where, "slices", absl::StrCat("at most ", kMaxSlicesPerAnchor),
               absl::StrCat(count));
  }
  manifest.slices.reserve(count);
  for (std::size_t i = 0; i < count; ++i) {
    manifest.slices.push_back({tensor[i], RangeOf(begin[i], units[i]), file[i],
                               offset4096[i] * kSliceAlignment});
  }
  KEDGE_ASSIGN_OR_RETURN(manifest.metadata, ReadMetadata(where, *root));
  KEDGE_RETURN_IF_ERROR(rules::CheckAnchorLayout(where, manifest));
  return manifest;
}

absl::StatusOr<std::vector<std::byte>> SerializeRankFragment(
    const RankFragment& fragment, const TensorTable& table) {
  const std::string where = absl::StrCat("fragment of rank ", fragment.rank,
                                         " for step ", fragment.step);
  KEDGE_RETURN_IF_ERROR(
      AsInvalidArgument(rules::CheckFragmentLayout(where, fragment)));
  KEDGE_RETURN_IF_ERROR(
      AsInvalidArgument(rules::CheckFragmentTable(where, fragment, table)));
  KEDGE_RETURN_IF_ERROR(AsInvalidArgument(RecordOutside(where, fragment)));
  constexpr std::uint64_t kBoundOfOwned = 4 + 8 + 8;
  KEDGE_RETURN_IF_ERROR(
      CheckSize(where, kBoundOfRest + BoundOfFiles(fragment.files) +
                           kBoundOfRecord * fragment.records.size() +
                           kBoundOfOwned * fragment.owned.size()));

  FlatBufferBuilder builder;
  const auto add_files =
      PutFiles<fbs::RankFragmentBuilder>(builder, fragment.files);
  const auto add_records =
      PutRecords<fbs::RankFragmentBuilder>(builder, fragment.records);
  const auto tensor = flat::PutColumn<std::uint32_t>(
      builder, fragment.owned,
      [](const RankFragment::Owned& o) { return o.tensor; });
  const auto begin = flat::PutEither<std::uint32_t, std::uint64_t>(
      builder, fragment.owned, /*optional=*/true,
      [](const RankFragment::Owned& o) { return o.slice.begin; });
  const auto count = flat::PutEither<std::uint32_t, std::uint64_t>(
      builder, fragment.owned, /*optional=*/false,
      [](const RankFragment::Owned& o) { return o.slice.count(); });

  const fbs::Bytes16 run = flat::FromBytes16(fragment.run);
  const fbs::Bytes16 table_hash = flat::FromBytes16(fragment.table_hash);
  const fbs::Bytes16 base = flat::FromBytes16(fragment.base.manifest_hash);
  fbs::RankFragmentBuilder root(builder);
  root.add_run(&run);
  root.add_table_hash(&table_hash);
  root.add_base_manifest_hash(&base);
  root.add_step(fragment.step);
  root.add_attempt(fragment.attempt);
  root.add_base_step(fragment.base.step);
  root.add_epoch(fragment.epoch);
  root.add_rank(fragment.rank);
  root.add_world_size(fragment.world_size);
  add_files(root);
  add_records(root);
  root.add_owned_tensor(tensor);
  root.add_owned_begin(begin.narrow);
  root.add_owned_begin_wide(begin.wide);
  root.add_owned_count(count.narrow);
  root.add_owned_count_wide(count.wide);
  root.add_min_reader(kFormatVersion);
  root.add_writer(kFormatVersion);
  builder.Finish(root.Finish(), kFragmentIdentifier);
  KEDGE_CHECK(builder.GetSize() <= kMaxFlatBufferBytes);
  return flat::Take(builder);
}

absl::StatusOr<RankFragment> ParseRankFragment(
    absl::string_view where, std::span<const std::byte> bytes) {
  KEDGE_ASSIGN_OR_RETURN(
      const auto root,
      flat::Opened<fbs::RankFragment>::Open(where, bytes, kFragmentIdentifier));
  RankFragment fragment;
  fragment.run = flat::ToBytes16(*root->run());
  fragment.epoch = root->epoch();
  fragment.step = root->step();
  fragment.attempt = root->attempt();
  fragment.rank = root->rank();
  fragment.world_size = root->world_size();
  fragment.table_hash = flat::ToBytes16(*root->table_hash());
  fragment.base = {root->base_step(),
                   flat::ToBytes16(*root->base_manifest_hash())};
  KEDGE_ASSIGN_OR_RETURN(fragment.files,
                         ReadFiles(where, *root, FileKind::kSegment, {}));
  KEDGE_ASSIGN_OR_RETURN(fragment.records, ReadRecords(where, *root));
  const auto tensor = flat::Column(root->owned_tensor());
  const auto begin =
      flat::Either(root->owned_begin(), root->owned_begin_wide());
  const auto units =
      flat::Either(root->owned_count(), root->owned_count_wide());
  const std::size_t count = tensor.size();
  KEDGE_RETURN_IF_ERROR(begin.Check(where, "owned_begin", count, true));
  KEDGE_RETURN_IF_ERROR(units.Check(where, "owned_count", count, false));
  fragment.owned.reserve(count);
  for (std::size_t i = 0; i < count; ++i) {
    fragment.owned.push_back({tensor[i], RangeOf(begin[i], units[i])});
  }
  KEDGE_RETURN_IF_ERROR(rules::CheckFragmentLayout(where, fragment));
  KEDGE_RETURN_IF_ERROR(RecordOutside(where, fragment));
  return fragment;
}

}  // namespace kedge
