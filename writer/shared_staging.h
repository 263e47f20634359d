#ifndef KEDGE_WRITER_SHARED_STAGING_H_
#define KEDGE_WRITER_SHARED_STAGING_H_

// A file system as one of several ranks sees it that write into one staging
// directory. Private to writer/.

#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "kedge/engine/io/file_system.h"

namespace kedge {

// Passes everything on to `base`, but that MakeDirectory takes a directory that
// another rank has made for success, and that ranks above 0 remove nothing: a
// staging directory that failed is rank 0's to remove, and one whose outcome is
// unknown must stay whole.
//
// Thread safety: as `base`.
class SharedStagingFileSystem final : public FileSystem {
 public:
  SharedStagingFileSystem(FileSystem* base, bool removes)
      : base_(base), removes_(removes) {}

  absl::StatusOr<std::unique_ptr<File>> OpenForRead(
      absl::string_view path) override {
    return base_->OpenForRead(path);
  }
  absl::StatusOr<std::unique_ptr<File>> CreateExclusive(
      absl::string_view path) override {
    return base_->CreateExclusive(path);
  }
  absl::Status MakeDirectory(absl::string_view path) override {
    return EnsureDirectory(*base_, path);
  }
  absl::Status Rename(absl::string_view from, absl::string_view to) override {
    return base_->Rename(from, to);
  }
  absl::Status Link(absl::string_view from, absl::string_view to) override {
    return base_->Link(from, to);
  }
  absl::Status RemoveFile(absl::string_view path) override {
    return removes_ ? base_->RemoveFile(path) : absl::OkStatus();
  }
  absl::Status RemoveDirectory(absl::string_view path) override {
    return removes_ ? base_->RemoveDirectory(path) : absl::OkStatus();
  }
  absl::StatusOr<std::vector<std::string>> List(
      absl::string_view path) override {
    return base_->List(path);
  }
  absl::StatusOr<FileInfo> Stat(absl::string_view path) override {
    return base_->Stat(path);
  }
  absl::Status SyncDirectory(absl::string_view path) override {
    return base_->SyncDirectory(path);
  }
  absl::StatusOr<StorageKind> KindOf(absl::string_view path) override {
    return base_->KindOf(path);
  }

 private:
  FileSystem* base_;
  bool removes_;
};

}  // namespace kedge

#endif  // KEDGE_WRITER_SHARED_STAGING_H_
