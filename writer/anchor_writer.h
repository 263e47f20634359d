#ifndef KEDGE_WRITER_ANCHOR_WRITER_H_
#define KEDGE_WRITER_ANCHOR_WRITER_H_

// Writes every byte of one version, or this rank's part of it, into an anchor's
// files. See spec/anchor.md.

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kedge/engine/cpu/l61_sum.h"
#include "kedge/engine/device/kernel_tasks.h"
#include "kedge/engine/io/io_pool.h"
#include "kedge/engine/io/staging.h"
#include "kedge/engine/io/writeback.h"
#include "kedge/format/anchor_layout.h"
#include "kedge/format/manifest.h"
#include "kedge/writer/tensor_source.h"

namespace kedge {

// What one rank has written of an anchor, or what all have.
struct AnchorPart {
  std::vector<OwnedSlice> owned;  // what l61 sums up
  std::vector<DataFile> files;
  std::vector<AnchorSlice> slices;  // ascending; file is an index into `files`
  std::vector<std::uint64_t> l61;   // of `owned`, table order; 0 for ties
};

// The parts of all ranks, by rank, as one: S of every tensor, ties included.
// kFailedPrecondition (CheckOwnership) names tensor and ranks of gaps and
// overlaps.
absl::StatusOr<AnchorPart> MergeAnchorParts(std::span<const AnchorPart> parts,
                                            const TensorTable& table);

// One anchor being written, in a staging directory of its own that ranks may
// share: WriteSlices or WriteUnits, Seal; then, by the rank that commits,
// Commit and PublishAs of the staging directory (or of the one it lies in).
//
// Thread safety: none; works on `pool`'s threads inside.
class AnchorWriter {
 public:
  // Creates the staging directory and files of `layout`. Everything borrowed
  // outlives the writer.
  static absl::StatusOr<std::unique_ptr<AnchorWriter>> Create(
      FileSystem* fs, std::string staging_path, IoPool* pool, const RunId& run,
      std::uint64_t step, const TensorTable* table, const AnchorLayout* layout);

  // Reads every slice once; hashes, sums and writes it on the pool's threads.
  // Large slices are written from where the source has them; small ones are
  // gathered into writes of up to kPieceBytes.
  //
  // `wanted`, if given, says which slices to write: the others' bytes come
  // through WriteUnits, or from another source.
  using WantsSlice = std::function<bool(const AnchorSlice&)>;
  absl::Status WriteSlices(TensorSource& source, const L61Summer& summer,
                           const WantsSlice& wanted = nullptr);

  // The other way to fill it: any units at any time, in any order, each once.
  // What of a tensor's range [units.begin, units.end) goes into one piece of a
  // file, from its start on. O(log slices).
  UnitRange FirstPieceOf(std::uint32_t tensor, const UnitRange& units) const;
  // Writes `units` of `tensor`, which lie in one piece, from where `source` has
  // them in host memory; what is not contiguous there is gathered in `scratch`,
  // of kPieceBytes. A piece that comes whole is hashed on the way, one that
  // comes in parts by Seal, which reads it again. May run concurrently.
  // Allocates nothing.
  absl::Status WriteUnits(std::uint32_t tensor, const UnitRange& units,
                          const TileGrid& grid, const StridedUnits& source,
                          std::span<std::byte> scratch);
  // S of what WriteUnits wrote of `tensor`, which nobody sums on the way.
  void AddSum(std::uint32_t tensor, std::uint64_t l61);

  // Writes the headers, hashes pieces that came in parts, syncs and closes the
  // files and tells what is in them. kFailedPrecondition names a tensor that
  // was not written in full.
  absl::StatusOr<AnchorPart> Seal();

  // Writes MANIFEST and COMMIT over the parts of all ranks: the directory is
  // complete, and not yet visible.
  absl::Status Commit(std::uint32_t epoch, const VersionId& version,
                      const Metadata& metadata, const AnchorPart& whole);

  StagingDirectory& staging() { return *staging_; }
  // For an anchor that is published inside its step: the committed directory.
  std::unique_ptr<StagingDirectory> TakeStaging() {
    return std::move(staging_);
  }
  // The COMMIT bytes; empty before Commit().
  const std::vector<std::byte>& commit_bytes() const { return commit_bytes_; }
  // Of all ranks' files, MANIFEST and COMMIT; after Commit().
  std::uint64_t total_bytes() const { return total_bytes_; }

 private:
  AnchorWriter() = default;
  std::uint64_t SliceBytes(std::uint32_t slice) const;
  // The slice that holds unit `unit` of `tensor`.
  std::uint32_t SliceOf(std::uint32_t tensor, std::uint64_t unit) const;
  absl::Status WriteHeaders();
  absl::Status HashPiecesInParts();

  IoPool* pool_ = nullptr;
  RunId run_;
  std::uint64_t step_ = 0;
  const TensorTable* table_ = nullptr;
  const AnchorLayout* layout_ = nullptr;
  std::unique_ptr<StagingDirectory> staging_;
  std::vector<File*> files_;
  Writeback writeback_;  // of files_; stops before staging_ closes them
  // By file and piece. A piece's hash stands once `written_` says kHashed.
  std::vector<std::vector<std::uint64_t>> piece_hashes_;
  std::vector<std::unique_ptr<std::atomic<std::uint64_t>[]>> written_;  // bytes
  std::vector<std::uint64_t> l61_;
  std::vector<std::byte> commit_bytes_;
  std::uint64_t total_bytes_ = 0;
};

}  // namespace kedge

#endif  // KEDGE_WRITER_ANCHOR_WRITER_H_
