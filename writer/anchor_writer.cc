#include "kedge/writer/anchor_writer.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <mutex>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kedge/engine/io/piece_io.h"
#include "kedge/format/fixed_files.h"
#include "kedge/format/layout.h"
#include "kedge/format/limits.h"
#include "kedge/format/status.h"

namespace kedge {
namespace {

// One write: a piece of a large slice, or several small slices of one file
// that lie side by side.
struct WriteRun {
  std::uint32_t file = 0;
  std::uint64_t offset = 0;
  std::uint64_t bytes = 0;            // gathered runs: to the last slice's end
  std::vector<std::uint32_t> slices;  // gathered: several; a piece: one
  std::uint64_t within_slice = 0;     // a piece: where it starts in the slice
  bool gathered = false;
};

// Slices up to this size are gathered.
constexpr std::uint64_t kGatherBytes = std::uint64_t{1} << 20;

// In place of the bytes written of a piece: its hash stands.
constexpr std::uint64_t kHashed = ~std::uint64_t{0};

}  // namespace

absl::StatusOr<std::unique_ptr<AnchorWriter>> AnchorWriter::Create(
    FileSystem* fs, std::string staging_path, IoPool* pool, const RunId& run,
    std::uint64_t step, const TensorTable* table, const AnchorLayout* layout) {
  auto writer = std::unique_ptr<AnchorWriter>(new AnchorWriter);
  writer->pool_ = pool;
  writer->run_ = run;
  writer->step_ = step;
  writer->table_ = table;
  writer->layout_ = layout;
  writer->l61_.assign(table->size(), 0);
  KEDGE_ASSIGN_OR_RETURN(writer->staging_,
                         StagingDirectory::Create(fs, std::move(staging_path)));
  for (const AnchorLayout::PlannedFile& planned : layout->files) {
    KEDGE_ASSIGN_OR_RETURN(
        File * file,
        writer->staging_->AddFile(DataFileName(planned.id), planned.bytes));
    writer->files_.push_back(file);
    writer->piece_hashes_.emplace_back(planned.piece_count);
    writer->written_.emplace_back(
        new std::atomic<std::uint64_t>[planned.piece_count]());
  }
  return writer;
}

std::uint64_t AnchorWriter::SliceBytes(std::uint32_t slice) const {
  const AnchorSlice& s = layout_->slices[slice];
  return s.slice.count() * UnitBytes((*table_)[s.tensor].dtype);
}

absl::Status AnchorWriter::WriteSlices(TensorSource& source,
                                       const L61Summer& summer,
                                       const WantsSlice& wanted) {
  // Plan the writes of each file in offset order.
  std::vector<std::vector<std::uint32_t>> by_file(files_.size());
  for (std::uint32_t i = 0; i < layout_->slices.size(); ++i) {
    by_file[layout_->slices[i].file].push_back(i);
  }
  std::vector<std::vector<WriteRun>> runs(files_.size());
  for (std::uint32_t f = 0; f < files_.size(); ++f) {
    std::sort(by_file[f].begin(), by_file[f].end(),
              [&](std::uint32_t a, std::uint32_t b) {
                return layout_->slices[a].offset < layout_->slices[b].offset;
              });
    bool open = false;  // whether the last run may still be added to
    for (const std::uint32_t s : by_file[f]) {
      const std::uint64_t offset = layout_->slices[s].offset;
      const std::uint64_t bytes = SliceBytes(s);
      if (wanted && !wanted(layout_->slices[s])) {
        open = false;  // what lies between is not ours
        continue;
      }
      if (bytes > kGatherBytes) {
        for (std::uint64_t at = 0; at < bytes; at += kPieceBytes) {
          runs[f].push_back({f,
                             offset + at,
                             std::min(kPieceBytes, bytes - at),
                             {s},
                             at,
                             false});
        }
        open = false;
        continue;
      }
      if (open && offset + bytes - runs[f].back().offset <= kPieceBytes) {
        runs[f].back().slices.push_back(s);
        runs[f].back().bytes = offset + bytes - runs[f].back().offset;
      } else {
        runs[f].push_back({f, offset, bytes, {s}, 0, true});
        open = true;
      }
    }
  }

  std::mutex mutex;  // guards l61_; hashes go to distinct places
  IoPool::Batch batch(pool_);
  batch.set_max_in_flight(4 * pool_->thread_count());
  const auto write = [&](const WriteRun& run) -> absl::Status {
    std::vector<std::byte> scratch;
    std::vector<std::byte> gathered(run.gathered ? run.bytes : 0);
    File& file = *files_[run.file];
    const FileId& id = layout_->files[run.file].id;
    for (const std::uint32_t s : run.slices) {
      const AnchorSlice& slice = layout_->slices[s];
      const std::uint32_t unit_bytes = UnitBytes((*table_)[slice.tensor].dtype);
      const std::uint64_t byte_begin =
          slice.slice.begin * unit_bytes + run.within_slice;
      const std::uint64_t bytes = run.gathered ? SliceBytes(s) : run.bytes;
      KEDGE_ASSIGN_OR_RETURN(
          std::span<const std::byte> data,
          source.Read(slice.tensor, byte_begin, bytes, &scratch));
      const auto piece = static_cast<std::uint32_t>(
          layout_->first_piece[s] + run.within_slice / kPieceBytes);
      const PieceKey key{run_, step_, id, piece};
      std::uint64_t hash;
      std::uint64_t sum = 0;
      if (run.gathered) {
        // Hashed and summed from the copy, so that what is vouched for is what
        // is written.
        std::byte* to = gathered.data() + (slice.offset - run.offset);
        std::memcpy(to, data.data(), bytes);
        data = {to, bytes};
        hash = HashPiece(run_, step_, id, piece, data);
        sum = summer.Sum(byte_begin, data);
      } else {
        KEDGE_ASSIGN_OR_RETURN(
            hash, WritePiece(file, run.offset, data, key,
                             [&](std::uint64_t at, auto block) {
                               sum = L61Add(sum,
                                            summer.Sum(byte_begin + at, block));
                             }));
      }
      piece_hashes_[run.file][piece] = hash;
      written_[run.file][piece] = kHashed;
      const std::lock_guard<std::mutex> lock(mutex);
      l61_[slice.tensor] = L61Add(l61_[slice.tensor], sum);
    }
    if (run.gathered) {
      KEDGE_RETURN_IF_ERROR(WriteAll(file, run.offset, gathered));
    }
    writeback_.Add(&file, run.offset, run.bytes);
    return absl::OkStatus();
  };

  // Round-robin over the files, so that all of them are written at once.
  for (std::size_t i = 0, submitted = 1; submitted > 0; ++i) {
    submitted = 0;
    for (const std::vector<WriteRun>& file_runs : runs) {
      if (i >= file_runs.size()) continue;
      ++submitted;
      batch.Submit([&write, run = &file_runs[i]] { return write(*run); });
    }
  }
  return batch.Wait();
}

UnitRange AnchorWriter::FirstPieceOf(std::uint32_t tensor,
                                     const UnitRange& units) const {
  const std::uint64_t piece_units =
      kPieceBytes / UnitBytes((*table_)[tensor].dtype);
  const AnchorSlice& slice = layout_->slices[SliceOf(tensor, units.begin)];
  const std::uint64_t within = units.begin - slice.slice.begin;
  const std::uint64_t piece_end =
      slice.slice.begin + (within / piece_units + 1) * piece_units;
  return {units.begin, std::min({units.end, piece_end, slice.slice.end})};
}

std::uint32_t AnchorWriter::SliceOf(std::uint32_t tensor,
                                    std::uint64_t unit) const {
  const auto after = std::upper_bound(
      layout_->slices.begin(), layout_->slices.end(), std::pair(tensor, unit),
      [](const std::pair<std::uint32_t, std::uint64_t>& at,
         const AnchorSlice& slice) {
        return at.first != slice.tensor ? at.first < slice.tensor
                                        : at.second < slice.slice.end;
      });
  KEDGE_CHECK(after != layout_->slices.end() && after->tensor == tensor &&
              after->slice.begin <= unit);
  return static_cast<std::uint32_t>(after - layout_->slices.begin());
}

absl::Status AnchorWriter::WriteUnits(std::uint32_t tensor,
                                      const UnitRange& units,
                                      const TileGrid& grid,
                                      const StridedUnits& source,
                                      std::span<std::byte> scratch) {
  const std::uint32_t s = SliceOf(tensor, units.begin);
  const AnchorSlice& slice = layout_->slices[s];
  const std::uint64_t unit_bytes = source.unit_bytes;
  const std::uint64_t within = (units.begin - slice.slice.begin) * unit_bytes;
  const std::uint64_t bytes = units.count() * unit_bytes;
  const std::uint64_t element_bytes = unit_bytes * source.units_per_element;
  KEDGE_CHECK(within % kPieceBytes + bytes <= kPieceBytes &&
              units.end <= slice.slice.end);

  std::span<const std::byte> data;
  const bool rows_close =
      source.col_stride_bytes == static_cast<std::int64_t>(element_bytes);
  const std::uint64_t first_row = units.begin / grid.cols;
  const bool one_row = (units.end - 1) / grid.cols == first_row;
  if (rows_close &&
      (one_row || source.row_stride_bytes ==
                      static_cast<std::int64_t>(grid.cols * unit_bytes))) {
    data = {source.At(first_row, units.begin - first_row * grid.cols), bytes};
  } else {
    KEDGE_CHECK(scratch.size() >= bytes);
    std::byte* out = scratch.data();
    for (std::uint64_t unit = units.begin; unit < units.end;) {
      const std::uint64_t row = unit / grid.cols;
      const std::uint64_t end = std::min(units.end, (row + 1) * grid.cols);
      std::uint64_t col = unit - row * grid.cols;
      const std::uint64_t count = end - unit;
      if (rows_close) {
        std::memcpy(out, source.At(row, col), count * unit_bytes);
        out += count * unit_bytes;
      } else {
        for (std::uint64_t i = 0; i < count; i += source.units_per_element) {
          std::memcpy(out, source.At(row, col + i), element_bytes);
          out += element_bytes;
        }
      }
      unit = end;
    }
    data = {scratch.data(), bytes};
  }

  const auto piece = static_cast<std::uint32_t>(layout_->first_piece[s] +
                                                within / kPieceBytes);
  File& file = *files_[slice.file];
  const std::uint64_t piece_begin = within / kPieceBytes * kPieceBytes;
  if (bytes == std::min(kPieceBytes, SliceBytes(s) - piece_begin)) {
    const PieceKey key{run_, step_, layout_->files[slice.file].id, piece};
    KEDGE_ASSIGN_OR_RETURN(piece_hashes_[slice.file][piece],
                           WritePiece(file, slice.offset + within, data, key));
    written_[slice.file][piece] = kHashed;
  } else {
    KEDGE_RETURN_IF_ERROR(WriteAll(file, slice.offset + within, data));
    written_[slice.file][piece] += bytes;
  }
  writeback_.Add(&file, slice.offset + within, bytes);
  return absl::OkStatus();
}

void AnchorWriter::AddSum(std::uint32_t tensor, std::uint64_t l61) {
  l61_[tensor] = L61Add(l61_[tensor], l61);
}

absl::Status AnchorWriter::HashPiecesInParts() {
  IoPool::Batch batch(pool_);
  batch.set_max_in_flight(2 * pool_->thread_count());
  for (std::uint32_t s = 0; s < layout_->slices.size(); ++s) {
    const AnchorSlice& slice = layout_->slices[s];
    const std::uint64_t slice_bytes = SliceBytes(s);
    for (std::uint64_t at = 0; at < slice_bytes; at += kPieceBytes) {
      const auto piece = static_cast<std::uint32_t>(layout_->first_piece[s] +
                                                    at / kPieceBytes);
      const std::uint64_t written = written_[slice.file][piece];
      if (written == kHashed) continue;
      const std::uint64_t bytes = std::min(kPieceBytes, slice_bytes - at);
      if (written != bytes) {
        batch.Wait().IgnoreError();
        return absl::FailedPreconditionError(absl::StrCat(
            staging_->path(), ": ", (*table_)[slice.tensor].name, ": bytes [",
            at, ", ", at + bytes, ") of the slice at unit ", slice.slice.begin,
            ": expected all of them, found ", written, " written"));
      }
      batch.Submit([this, &slice, at, bytes, piece]() -> absl::Status {
        PieceHasher hasher(run_, step_, layout_->files[slice.file].id, piece);
        std::vector<std::byte> block(
            std::min<std::uint64_t>(bytes, kHashBlockBytes));
        for (std::uint64_t done = 0; done < bytes;) {
          const auto part = std::span(block).first(
              std::min<std::uint64_t>(bytes - done, block.size()));
          KEDGE_RETURN_IF_ERROR(
              ReadAll(*files_[slice.file], slice.offset + at + done, part));
          hasher.Update(part);
          done += part.size();
        }
        piece_hashes_[slice.file][piece] = hasher.Finish();
        written_[slice.file][piece] = kHashed;
        return absl::OkStatus();
      });
    }
  }
  return batch.Wait();
}

absl::Status AnchorWriter::WriteHeaders() {
  for (std::size_t f = 0; f < files_.size(); ++f) {
    const AnchorLayout::PlannedFile& planned = layout_->files[f];
    DataFileHeader header;
    header.run = run_;
    header.step = step_;
    header.file = planned.id;
    header.payload_bytes = planned.bytes - kSliceAlignment;
    header.count = planned.slice_count;
    std::array<std::byte, kSliceAlignment> block{};
    const auto bytes = SerializeDataFileHeader(header);
    std::copy(bytes.begin(), bytes.end(), block.begin());
    KEDGE_RETURN_IF_ERROR(WriteAll(*files_[f], 0, block));
  }
  return absl::OkStatus();
}

absl::StatusOr<AnchorPart> AnchorWriter::Seal() {
  KEDGE_RETURN_IF_ERROR(WriteHeaders());
  KEDGE_RETURN_IF_ERROR(HashPiecesInParts());
  writeback_.Stop();
  KEDGE_RETURN_IF_ERROR(staging_->SealFiles(*pool_));
  AnchorPart part;
  for (std::size_t f = 0; f < files_.size(); ++f) {
    DataFile file;
    file.id = layout_->files[f].id;
    file.bytes = layout_->files[f].bytes;
    file.piece_hashes = piece_hashes_[f];
    file.hash = HashOfPieces(file.piece_hashes);
    part.files.push_back(std::move(file));
  }
  part.slices = layout_->slices;
  for (const AnchorSlice& slice : part.slices) {
    part.owned.push_back({slice.tensor, slice.slice});
  }
  part.l61 = l61_;
  return part;
}

absl::Status AnchorWriter::Commit(std::uint32_t epoch, const VersionId& version,
                                  const Metadata& metadata,
                                  const AnchorPart& whole) {
  AnchorManifest manifest;
  manifest.run = run_;
  manifest.epoch = epoch;
  manifest.version = version;
  manifest.table_hash = table_->hash();
  manifest.digest = table_->StateDigest(whole.l61);
  manifest.files = whole.files;
  manifest.l61 = whole.l61;
  manifest.slices = whole.slices;
  manifest.metadata = metadata;
  KEDGE_ASSIGN_OR_RETURN(const std::vector<std::byte> bytes,
                         SerializeAnchorManifest(manifest, *table_));
  CommitRecord commit;
  commit.run = run_;
  commit.step = step_;
  commit.epoch = epoch;
  commit.manifest_bytes = static_cast<std::uint32_t>(bytes.size());
  commit.manifest_hash = HashBytes128(bytes);
  const auto commit_bytes = SerializeCommit(commit);
  commit_bytes_.assign(commit_bytes.begin(), commit_bytes.end());
  total_bytes_ = bytes.size() + commit_bytes_.size();
  for (const DataFile& file : whole.files) total_bytes_ += file.bytes;
  return staging_->WriteCommit(bytes, commit_bytes_, *pool_);
}

absl::StatusOr<AnchorPart> MergeAnchorParts(std::span<const AnchorPart> parts,
                                            const TensorTable& table) {
  std::vector<std::vector<OwnedSlice>> owned;
  for (const AnchorPart& part : parts) owned.push_back(part.owned);
  KEDGE_RETURN_IF_ERROR(CheckOwnership(owned, table));
  AnchorPart whole;
  whole.l61.assign(table.size(), 0);
  for (const AnchorPart& part : parts) {
    KEDGE_CHECK(part.l61.size() == table.size());
    const auto first_file = static_cast<std::uint32_t>(whole.files.size());
    whole.owned.insert(whole.owned.end(), part.owned.begin(), part.owned.end());
    whole.files.insert(whole.files.end(), part.files.begin(), part.files.end());
    for (AnchorSlice slice : part.slices) {
      slice.file += first_file;
      whole.slices.push_back(slice);
    }
    for (std::size_t i = 0; i < table.size(); ++i) {
      whole.l61[i] = L61Add(whole.l61[i], part.l61[i]);
    }
  }
  std::sort(whole.slices.begin(), whole.slices.end(),
            [](const AnchorSlice& a, const AnchorSlice& b) {
              return a.tensor != b.tensor ? a.tensor < b.tensor
                                          : a.slice.begin < b.slice.begin;
            });
  for (std::size_t i = 0; i < table.size(); ++i) {
    const std::uint32_t owner = table[i].tied_to;
    if (owner != kNotTied) whole.l61[i] = whole.l61[owner];
  }
  return whole;
}

}  // namespace kedge
