#ifndef KEDGE_ENGINE_IO_STAGING_H_
#define KEDGE_ENGINE_IO_STAGING_H_

// A directory that is written out of sight and becomes visible in one rename.
// See spec/store.md, "Publishing".

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "kedge/engine/io/file_system.h"
#include "kedge/engine/io/io_pool.h"

namespace kedge {

// One staging directory: data files first, then MANIFEST and COMMIT, then the
// rename. Any failure before the rename poisons it: nothing is retried in it,
// the caller starts a new one under another name.
//
// Ownership: owns its open files. When destroyed unpublished it removes what it
// wrote (errors ignored: gc removes leftovers), except after an unknown
// outcome: a rename that a server carries out late must not show a half removed
// step. Thread safety: none, but files returned by AddFile may be written
// concurrently through WriteAll.
class StagingDirectory {
 public:
  // Makes `path`; its parent exists. kAlreadyExists if the name is taken.
  static absl::StatusOr<std::unique_ptr<StagingDirectory>> Create(
      FileSystem* fs, std::string path);
  ~StagingDirectory();

  const std::string& path() const;

  // Creates a data file and sets its final size. The file belongs to this
  // object. `bytes` of 0 leaves the size to the writes. A failed write, resize,
  // sync or close of the file poisons this object, also when its caller looks
  // away. kInvalidArgument for a name that is no plain file name, or is
  // MANIFEST or COMMIT.
  absl::StatusOr<File*> AddFile(absl::string_view name, std::uint64_t bytes);

  // Syncs and closes every data file, several at a time through `pool`. Each
  // fsync and close is checked, and that the size is still the one AddFile set.
  // Here and below kFailedPrecondition if this object is poisoned, or a call is
  // out of order.
  absl::Status SealFiles(IoPool& pool);

  // Takes a committed staging directory that lies inside this one: it becomes
  // visible with this one's rename, and is removed with this one before it.
  void Adopt(std::unique_ptr<StagingDirectory> inner);

  // Writes MANIFEST and COMMIT (each synced and closed), then syncs the
  // directory. Data files that SealFiles has not sealed yet are sealed here, at
  // the same time: where nobody else has to hear of them before, that saves a
  // wait for the disk.
  absl::Status WriteCommit(std::span<const std::byte> manifest,
                           std::span<const std::byte> commit, IoPool& pool);

  // Renames to `target` and syncs the parent of `target`. `is_ours` is asked
  // when rename failed: it looks at `target` and says whether what stands there
  // is this directory's content, in which case the publish is a success.
  //
  // OK means that readers see it. Whether it also outlives a power loss is in
  // parent_sync_status(): a failed sync there does not take the rename back.
  //
  // Errors: kAlreadyExists if something else stands at `target` (an empty
  // directory does not count: rename replaces it). kUnavailable "outcome
  // unknown" if it could not be found out. Any other error: nothing was
  // renamed.
  absl::Status PublishAs(const std::string& target,
                         const std::function<absl::StatusOr<bool>()>& is_ours);

  // After PublishAs returned OK: how the sync of the parent of `target` went.
  const absl::Status& parent_sync_status() const { return parent_sync_status_; }

  // Whether PublishAs failed without anybody knowing if the rename took place.
  bool outcome_unknown() const { return stage_ == Stage::kUnknown; }

 private:
  enum class Stage { kWriting, kSealed, kCommitted, kPublished, kUnknown };
  struct DataFile {
    std::unique_ptr<File> file;
    std::uint64_t bytes;  // as asked for; 0 leaves it open
  };

  StagingDirectory(FileSystem* fs, std::string path);

  absl::Status CheckStage(Stage expected, absl::string_view call) const;
  absl::Status Poison(absl::Status status);
  void SetStage(Stage stage);
  absl::Status AfterFailedRename(
      const absl::Status& renamed, const std::string& target,
      const std::function<absl::StatusOr<bool>()>& is_ours);

  FileSystem* fs_;
  std::string path_;
  std::vector<DataFile> files_;
  std::vector<std::string> names_;  // what the destructor removes
  std::unique_ptr<StagingDirectory> inner_;
  Stage stage_ = Stage::kWriting;
  std::atomic<bool> poisoned_{false};  // set by concurrent writes too
  absl::Status parent_sync_status_;
};

}  // namespace kedge

#endif  // KEDGE_ENGINE_IO_STAGING_H_
