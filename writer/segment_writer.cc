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

PieceBuffers::Buffer PieceBuffers::Take() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!buffers_.empty()) {
      Buffer buffer = std::move(buffers_.back());
      buffers_.pop_back();
      return buffer;
    }
  }
  return std::make_unique_for_overwrite<std::byte[]>(kPieceBytes);
}

void PieceBuffers::Give(Buffer buffer) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (buffers_.size() < kept_) buffers_.push_back(std::move(buffer));
}

struct SegmentWriter::Piece {
  Piece(PieceBuffers* from, std::uint32_t piece_number)
      : buffers(from), bytes(from->Take()), number(piece_number) {}
  ~Piece() { buffers->Give(std::move(bytes)); }

  PieceBuffers* buffers;
  PieceBuffers::Buffer bytes;
  std::uint32_t number;
  std::uint64_t size = 0;     // reserved
  std::uint32_t filling = 0;  // callers that copy into it

  std::span<const std::byte> contents() const { return {bytes.get(), size}; }
};

struct SegmentWriter::OpenSegment {
  FileId id;
  File* file = nullptr;
  std::uint64_t size = 0;  // bytes reserved, the header's place included
  std::uint32_t record_count = 0;
  std::vector<std::shared_ptr<Piece>> pieces;  // not submitted yet
  // Piece 0 once it is full: written but for its header, and not hashed.
  std::shared_ptr<Piece> first;
  std::mutex hashes_mutex;
  std::vector<std::uint64_t> hashes ABSL_GUARDED_BY(hashes_mutex);

  void SetHash(std::uint32_t piece, std::uint64_t hash) {
    const std::lock_guard<std::mutex> lock(hashes_mutex);
    if (hashes.size() <= piece) hashes.resize(piece + 1);
    hashes[piece] = hash;
  }
};

SegmentWriter::SegmentWriter(StagingDirectory* staging, IoPool* pool,
                             PieceBuffers* buffers, const RunId& run,
                             std::uint64_t step, std::uint32_t rank,
                             std::uint32_t max_files)
    : staging_(staging),
      buffers_(buffers),
      run_(run),
      step_(step),
      rank_(rank),
      max_files_(std::clamp(max_files, 1u, kMaxFilesPerRank)),
      batch_(std::make_unique<IoPool::Batch>(pool)) {
  batch_->set_max_in_flight(8);
}

SegmentWriter::~SegmentWriter() = default;

absl::StatusOr<SegmentWriter::OpenSegment*> SegmentWriter::Current() {
  if (current_ == segments_.size()) {
    auto segment = std::make_unique<OpenSegment>();
    segment->id = {FileKind::kSegment, rank_, current_};
    KEDGE_ASSIGN_OR_RETURN(segment->file,
                           staging_->AddFile(DataFileName(segment->id), 0));
    segments_.push_back(std::move(segment));
    const std::byte header[kDataFileHeaderBytes] = {};  // its place
    Append(*segments_.back(), header);
  }
  return segments_[current_].get();
}

SegmentWriter::Room SegmentWriter::Reserve(OpenSegment& segment,
                                           std::uint64_t bytes) {
  const std::uint64_t at = segment.size % kPieceBytes;
  if (at == 0) {
    segment.pieces.push_back(std::make_shared<Piece>(
        buffers_, static_cast<std::uint32_t>(segment.size / kPieceBytes)));
  }
  Piece& piece = *segment.pieces.back();
  const Room room{&piece, at, std::min(kPieceBytes - at, bytes)};
  segment.size += room.bytes;
  piece.size += room.bytes;
  ++piece.filling;
  return room;
}

void SegmentWriter::Filled(OpenSegment& segment, Piece* piece) {
  if (--piece->filling == 0 && piece->size == kPieceBytes) {
    Submit(segment, piece);
  }
}

void SegmentWriter::Append(OpenSegment& segment,
                           std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const Room room = Reserve(segment, bytes.size());
    std::memcpy(room.piece->bytes.get() + room.at, bytes.data(), room.bytes);
    bytes = bytes.subspan(room.bytes);
    Filled(segment, room.piece);
  }
}

void SegmentWriter::Submit(OpenSegment& segment, Piece* piece) {
  const auto found =
      std::find_if(segment.pieces.begin(), segment.pieces.end(),
                   [&](const auto& other) { return other.get() == piece; });
  const std::shared_ptr<Piece> owned = std::move(*found);
  segment.pieces.erase(found);
  if (owned->number == 0 && owned->size == kPieceBytes) {
    // The header says how much follows, and the hash covers the header: both
    // come last. The other bytes need not wait.
    segment.first = owned;
    batch_->Submit([&segment, owned]() -> absl::Status {
      const auto payload = owned->contents().subspan(kDataFileHeaderBytes);
      KEDGE_RETURN_IF_ERROR(
          WriteAll(*segment.file, kDataFileHeaderBytes, payload));
      segment.file->StartWriteback(0, kPieceBytes);
      return absl::OkStatus();
    });
    return;
  }
  batch_->Submit([this, &segment, owned]() -> absl::Status {
    const PieceKey key{run_, step_, segment.id, owned->number};
    const std::uint64_t offset = owned->number * kPieceBytes;
    KEDGE_ASSIGN_OR_RETURN(
        const std::uint64_t hash,
        WritePiece(*segment.file, offset, owned->contents(), key));
    segment.file->StartWriteback(offset, owned->size);
    segment.SetHash(owned->number, hash);
    return absl::OkStatus();
  });
}

absl::StatusOr<SegmentWriter::Location> SegmentWriter::Add(
    std::span<const std::byte> padded_record) {
  KEDGE_CHECK(padded_record.size() % kRecordAlignment == 0);
  std::unique_lock<std::mutex> lock(mutex_);
  KEDGE_ASSIGN_OR_RETURN(OpenSegment* const segment, Current());
  const Location location{current_, segment->size};
  ++segment->record_count;
  if ((segment->size + padded_record.size()) / kPieceBytes >
      location.offset / kPieceBytes) {
    current_ = (current_ + 1) % max_files_;
  }
  if (padded_record.size() > kPieceBytes) {
    // Of many pieces: they are written as they fill.
    Append(*segment, padded_record);
    return location;
  }
  // Others copy theirs at the same time.
  Room rooms[2];
  int count = 0;
  for (std::uint64_t left = padded_record.size(); left > 0; ++count) {
    rooms[count] = Reserve(*segment, left);
    left -= rooms[count].bytes;
  }
  lock.unlock();
  const std::byte* from = padded_record.data();
  for (int i = 0; i < count; ++i) {
    std::memcpy(rooms[i].piece->bytes.get() + rooms[i].at, from,
                rooms[i].bytes);
    from += rooms[i].bytes;
  }
  lock.lock();
  for (int i = 0; i < count; ++i) Filled(*segment, rooms[i].piece);
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
      Append(*segment, tail);
      const auto bytes = SerializeDataFileHeader(header);
      Piece* const first = segment->first != nullptr
                               ? segment->first.get()
                               : segment->pieces.front().get();
      std::memcpy(first->bytes.get(), bytes.data(), bytes.size());
      if (segment->first != nullptr) {
        batch_->Submit([this, segment = segment.get()]() -> absl::Status {
          const auto contents = segment->first->contents();
          segment->SetHash(0, HashPiece(run_, step_, segment->id, 0, contents));
          return WriteAll(*segment->file, 0,
                          contents.first(kDataFileHeaderBytes));
        });
      }
      while (!segment->pieces.empty()) {
        Submit(*segment, segment->pieces.front().get());
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
