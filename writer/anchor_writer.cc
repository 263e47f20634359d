#include "kedge/writer/anchor_writer.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <mutex>
#include <utility>

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
  }
  return writer;
}

absl::Status AnchorWriter::WriteSlices(TensorSource& source,
                                       const L61Summer& summer) {
  // Plan the writes of each file in offset order.
  std::vector<std::vector<std::uint32_t>> by_file(files_.size());
  for (std::uint32_t i = 0; i < layout_->slices.size(); ++i) {
    by_file[layout_->slices[i].file].push_back(i);
  }
  const auto slice_bytes = [&](std::uint32_t slice) {
    const AnchorSlice& s = layout_->slices[slice];
    return s.slice.count() * UnitBytes((*table_)[s.tensor].dtype);
  };
  std::vector<std::vector<WriteRun>> runs(files_.size());
  for (std::uint32_t f = 0; f < files_.size(); ++f) {
    std::sort(by_file[f].begin(), by_file[f].end(),
              [&](std::uint32_t a, std::uint32_t b) {
                return layout_->slices[a].offset < layout_->slices[b].offset;
              });
    bool open = false;  // whether the last run may still be added to
    for (const std::uint32_t s : by_file[f]) {
      const std::uint64_t offset = layout_->slices[s].offset;
      const std::uint64_t bytes = slice_bytes(s);
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
      const std::uint64_t bytes = run.gathered ? slice_bytes(s) : run.bytes;
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
      const std::lock_guard<std::mutex> lock(mutex);
      l61_[slice.tensor] = L61Add(l61_[slice.tensor], sum);
    }
    return run.gathered ? WriteAll(file, run.offset, gathered)
                        : absl::OkStatus();
  };

  for (std::uint32_t f = 0; f < files_.size(); ++f) {
    batch.Submit([this, f]() -> absl::Status {
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
      return WriteAll(*files_[f], 0, block);
    });
  }
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

absl::StatusOr<AnchorPart> AnchorWriter::Seal() {
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
  return staging_->WriteCommit(bytes, commit_bytes_);
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
