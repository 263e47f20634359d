#include "kedge/writer/segment_writer.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "kedge/engine/io/piece_io.h"
#include "kedge/format/fixed_files.h"
#include "kedge/format/layout.h"
#include "kedge/format/limits.h"
#include "kedge/format/status.h"

namespace kedge {

struct SegmentWriter::OpenSegment {
  FileId id;
  File* file = nullptr;
  std::uint64_t size = 0;  // bytes appended, the header's place included
  std::uint32_t record_count = 0;
  std::vector<std::byte> first;    // piece 0 waits for its header
  std::vector<std::byte> filling;  // the last piece, unless it is piece 0
  std::mutex hashes_mutex;
  std::vector<std::uint64_t> hashes ABSL_GUARDED_BY(hashes_mutex);
};

SegmentWriter::SegmentWriter(StagingDirectory* staging, IoPool* pool,
                             const RunId& run, std::uint64_t step,
                             std::uint32_t rank, std::uint32_t max_files)
    : staging_(staging),
      run_(run),
      step_(step),
      rank_(rank),
      max_files_(std::clamp(max_files, 1u, kMaxFilesPerRank)),
      batch_(std::make_unique<IoPool::Batch>(pool)) {
  batch_->set_max_in_flight(8);
}

SegmentWriter::~SegmentWriter() = default;

void SegmentWriter::SubmitPiece(OpenSegment& segment, std::uint32_t piece,
                                std::vector<std::byte> bytes) {
  auto shared = std::make_shared<std::vector<std::byte>>(std::move(bytes));
  batch_->Submit([this, &segment, piece, shared]() -> absl::Status {
    const PieceKey key{run_, step_, segment.id, piece};
    KEDGE_ASSIGN_OR_RETURN(
        const std::uint64_t hash,
        WritePiece(*segment.file, piece * kPieceBytes, *shared, key));
    const std::lock_guard<std::mutex> lock(segment.hashes_mutex);
    if (segment.hashes.size() <= piece) segment.hashes.resize(piece + 1);
    segment.hashes[piece] = hash;
    return absl::OkStatus();
  });
}

absl::Status SegmentWriter::Append(OpenSegment& segment,
                                   std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const std::uint64_t piece = segment.size / kPieceBytes;
    std::vector<std::byte>& buffer =
        piece == 0 ? segment.first : segment.filling;
    const std::uint64_t room = kPieceBytes - segment.size % kPieceBytes;
    const std::uint64_t take = std::min<std::uint64_t>(room, bytes.size());
    buffer.insert(buffer.end(), bytes.begin(), bytes.begin() + take);
    bytes = bytes.subspan(take);
    segment.size += take;
    if (take == room && piece > 0) {
      SubmitPiece(segment, static_cast<std::uint32_t>(piece),
                  std::exchange(segment.filling, {}));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<SegmentWriter::Location> SegmentWriter::Add(
    std::span<const std::byte> padded_record) {
  KEDGE_CHECK(padded_record.size() % kRecordAlignment == 0);
  const std::lock_guard<std::mutex> lock(mutex_);
  if (current_ == segments_.size()) {
    auto segment = std::make_unique<OpenSegment>();
    segment->id = {FileKind::kSegment, rank_, current_};
    KEDGE_ASSIGN_OR_RETURN(segment->file,
                           staging_->AddFile(DataFileName(segment->id), 0));
    segment->first.resize(kDataFileHeaderBytes);
    segment->size = kDataFileHeaderBytes;
    segments_.push_back(std::move(segment));
  }
  OpenSegment& segment = *segments_[current_];
  const Location location{current_, segment.size};
  ++segment.record_count;
  KEDGE_RETURN_IF_ERROR(Append(segment, padded_record));
  if (segment.size / kPieceBytes > location.offset / kPieceBytes) {
    current_ = (current_ + 1) % max_files_;
  }
  return location;
}

absl::StatusOr<std::vector<DataFile>> SegmentWriter::Finish() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& segment : segments_) {
      DataFileHeader header;
      header.run = run_;
      header.step = step_;
      header.file = segment->id;
      header.payload_bytes = segment->size - kDataFileHeaderBytes;
      header.count = segment->record_count;
      const std::vector<std::byte> tail(SegmentFileBytes(header.payload_bytes) -
                                        segment->size);
      KEDGE_RETURN_IF_ERROR(Append(*segment, tail));
      const auto bytes = SerializeDataFileHeader(header);
      std::memcpy(segment->first.data(), bytes.data(), bytes.size());
      SubmitPiece(*segment, 0, std::exchange(segment->first, {}));
      if (!segment->filling.empty()) {
        SubmitPiece(
            *segment,
            static_cast<std::uint32_t>((segment->size - 1) / kPieceBytes),
            std::exchange(segment->filling, {}));
      }
    }
  }
  KEDGE_RETURN_IF_ERROR(batch_->Wait());
  std::vector<DataFile> files;
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& segment : segments_) {
    DataFile file;
    file.id = segment->id;
    file.bytes = segment->size;
    const std::lock_guard<std::mutex> hashes_lock(segment->hashes_mutex);
    file.piece_hashes = segment->hashes;
    file.hash = HashOfPieces(file.piece_hashes);
    files.push_back(std::move(file));
  }
  return files;
}

}  // namespace kedge
