#ifndef KEDGE_WRITER_ANCHOR_WRITER_H_
#define KEDGE_WRITER_ANCHOR_WRITER_H_

// Writes every byte of one version into an anchor's files. See spec/anchor.md.

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kedge/engine/cpu/l61_sum.h"
#include "kedge/engine/io/io_pool.h"
#include "kedge/engine/io/staging.h"
#include "kedge/format/anchor_layout.h"
#include "kedge/format/manifest.h"
#include "kedge/writer/tensor_source.h"

namespace kedge {

// One anchor being written, in a staging directory of its own: WriteSlices,
// then Commit, then PublishAs of the staging directory (or of the one it lies
// in).
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
  absl::Status WriteSlices(TensorSource& source, const L61Summer& summer);

  // S of every tensor as read by WriteSlices, in table order, ties included.
  const std::vector<std::uint64_t>& l61() const { return l61_; }

  // Seals the files and writes MANIFEST and COMMIT: the directory is complete,
  // and not yet visible.
  absl::Status Commit(std::uint32_t epoch, const VersionId& version,
                      const Metadata& metadata);

  StagingDirectory& staging() { return *staging_; }
  // For an anchor that is published inside its step: the committed directory.
  std::unique_ptr<StagingDirectory> TakeStaging() {
    return std::move(staging_);
  }
  // The COMMIT bytes; empty before Commit().
  const std::vector<std::byte>& commit_bytes() const { return commit_bytes_; }
  std::uint64_t total_bytes() const;  // of all files, MANIFEST and COMMIT

 private:
  AnchorWriter() = default;

  IoPool* pool_ = nullptr;
  RunId run_;
  std::uint64_t step_ = 0;
  const TensorTable* table_ = nullptr;
  const AnchorLayout* layout_ = nullptr;
  std::unique_ptr<StagingDirectory> staging_;
  std::vector<File*> files_;
  std::vector<std::vector<std::uint64_t>> piece_hashes_;  // by file
  std::vector<std::uint64_t> l61_;
  std::vector<std::byte> commit_bytes_;
  std::uint64_t manifest_bytes_ = 0;
};

}  // namespace kedge

#endif  // KEDGE_WRITER_ANCHOR_WRITER_H_
