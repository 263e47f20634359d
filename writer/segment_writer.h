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

// Records fill pieces of kPieceBytes; a full piece is written while later ones
// fill, and the next record starts in the next file, so that a large step has
// `max_files` files in flight and a small one is a single file.
//
// Memory: at most 2 max_files + 8 pieces.
// Thread safety: Add may run concurrently.
class SegmentWriter {
 public:
  // Borrows `staging` and `pool`, which outlive it.
  SegmentWriter(StagingDirectory* staging, IoPool* pool, const RunId& run,
                std::uint64_t step, std::uint32_t rank,
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
  struct OpenSegment;

  absl::Status Append(OpenSegment& segment, std::span<const std::byte> bytes)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void SubmitPiece(OpenSegment& segment, std::uint32_t piece,
                   std::vector<std::byte> bytes);

  StagingDirectory* staging_;
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
