#ifndef KEDGE_WRITER_SEGMENT_WRITER_H_
#define KEDGE_WRITER_SEGMENT_WRITER_H_

// Packs records into the segment files of one rank. See spec/segment.md.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kedge/engine/io/io_pool.h"
#include "kedge/engine/io/staging.h"
#include "kedge/format/manifest.h"

namespace kedge {

// Memory of kPieceBytes a piece, kept for the next one: to fill fresh memory
// takes several times as long. Thread safety: all methods may run concurrently.
class PieceBuffers {
 public:
  using Buffer = std::unique_ptr<std::byte[]>;

  // At most `kept` buffers wait to be used again.
  explicit PieceBuffers(std::size_t kept) : kept_(kept) {}
  Buffer Take();
  void Give(Buffer buffer);

 private:
  const std::size_t kept_;
  std::mutex mutex_;
  std::vector<Buffer> buffers_ ABSL_GUARDED_BY(mutex_);
};

// Records fill pieces of kPieceBytes; a full piece is written while later ones
// fill, and the next record starts in the next file, so that a large step has
// `max_files` files in flight and a small one is a single file.
//
// Memory: at most 2 max_files + 8 pieces.
// Thread safety: Add may run concurrently; copies do, too.
class SegmentWriter {
 public:
  // Borrows `staging`, `pool` and `buffers`, which outlive it.
  SegmentWriter(StagingDirectory* staging, IoPool* pool, PieceBuffers* buffers,
                const RunId& run, std::uint64_t step, std::uint32_t rank,
                std::uint32_t max_files);
  ~SegmentWriter();

  struct Location {
    std::uint32_t file = 0;  // number, also the index into Finish()'s files
    std::uint64_t offset = 0;
  };
  // Appends a record, already zero-padded to kRecordAlignment. An error of an
  // earlier write may come out here or from Finish.
  absl::StatusOr<Location> Add(std::span<const std::byte> padded_record);

  // Writes what is left and the headers. The files are in ascending order of
  // id; none if nothing was added.
  absl::StatusOr<std::vector<DataFile>> Finish();

 private:
  struct Piece;
  struct OpenSegment;
  // Room in a piece that a caller is about to fill.
  struct Room {
    Piece* piece = nullptr;
    std::uint64_t at = 0;
    std::uint64_t bytes = 0;
  };

  // The segment that the next record goes into.
  absl::StatusOr<OpenSegment*> Current() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The next room of the segment, of up to `bytes`; then filled.
  Room Reserve(OpenSegment& segment, std::uint64_t bytes)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Filled(OpenSegment& segment, Piece* piece)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Append(OpenSegment& segment, std::span<const std::byte> bytes)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Hands a piece of the segment over to be written, and hashed unless its
  // header is still to come.
  void Submit(OpenSegment& segment, Piece* piece)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  StagingDirectory* staging_;
  PieceBuffers* buffers_;
  RunId run_;
  std::uint64_t step_;
  std::uint32_t rank_;
  std::uint32_t max_files_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<OpenSegment>> segments_ ABSL_GUARDED_BY(mutex_);
  std::uint32_t current_ ABSL_GUARDED_BY(mutex_) = 0;
  std::unique_ptr<IoPool::Batch> batch_;  // last: its tasks use the rest
};

}  // namespace kedge

#endif  // KEDGE_WRITER_SEGMENT_WRITER_H_
