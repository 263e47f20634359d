#include "kedge/engine/io/staging.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kedge/format/layout.h"
#include "kedge/format/status.h"

namespace kedge {
namespace {

// Passes every call on, and poisons the staging directory when a call that
// changes the file fails: nobody can publish what was not written.
class StagedFile final : public File {
 public:
  StagedFile(std::unique_ptr<File> file, std::atomic<bool>* poisoned)
      : file_(std::move(file)), poisoned_(poisoned) {}

  absl::string_view path() const override { return file_->path(); }
  absl::StatusOr<std::size_t> ReadSome(std::uint64_t offset,
                                       std::span<std::byte> out) override {
    return file_->ReadSome(offset, out);
  }
  absl::StatusOr<std::size_t> WriteSome(
      std::uint64_t offset, std::span<const std::byte> bytes) override {
    absl::StatusOr<std::size_t> moved = file_->WriteSome(offset, bytes);
    if (!moved.ok()) *poisoned_ = true;
    return moved;
  }
  absl::StatusOr<std::uint64_t> Size() override { return file_->Size(); }
  absl::Status Resize(std::uint64_t bytes) override {
    return Checked(file_->Resize(bytes));
  }
  absl::Status Sync() override { return Checked(file_->Sync()); }
  absl::Status Close() override { return Checked(file_->Close()); }
  absl::StatusOr<std::unique_ptr<MappedRegion>> Map(
      std::uint64_t bytes) override {
    return file_->Map(bytes);
  }
  void WillRead(std::uint64_t offset, std::uint64_t bytes) override {
    file_->WillRead(offset, bytes);
  }
  void StartWriteback(std::uint64_t offset, std::uint64_t bytes) override {
    file_->StartWriteback(offset, bytes);
  }

 private:
  absl::Status Checked(absl::Status status) {
    if (!status.ok()) *poisoned_ = true;
    return status;
  }

  std::unique_ptr<File> file_;
  std::atomic<bool>* poisoned_;
};

// Checks the size, syncs and closes. `bytes` of 0: any size.
absl::Status SealFile(File& file, std::uint64_t bytes) {
  if (bytes != 0) {
    KEDGE_ASSIGN_OR_RETURN(const std::uint64_t found, file.Size());
    if (found != bytes) {
      return absl::DataLossError(absl::StrCat(
          file.path(), ": size: expected ", bytes, " bytes, found ", found,
          "; something else writes into this directory"));
    }
  }
  KEDGE_RETURN_IF_ERROR(file.Sync());
  return file.Close();
}

absl::Status CheckDataFileName(absl::string_view path, absl::string_view name) {
  if (!name.empty() && name != "." && name != ".." &&
      name.find('/') == absl::string_view::npos && name != kManifestFileName &&
      name != kCommitFileName) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat(
      path,
      ": data file name: expected one name without '/', not MANIFEST or "
      "COMMIT, found \"",
      name, "\""));
}

}  // namespace

StagingDirectory::StagingDirectory(FileSystem* fs, std::string path)
    : fs_(fs), path_(std::move(path)) {}

absl::StatusOr<std::unique_ptr<StagingDirectory>> StagingDirectory::Create(
    FileSystem* fs, std::string path) {
  KEDGE_RETURN_IF_ERROR(fs->MakeDirectory(path));
  return std::unique_ptr<StagingDirectory>(
      new StagingDirectory(fs, std::move(path)));
}

StagingDirectory::~StagingDirectory() {
  if (stage_ == Stage::kPublished || stage_ == Stage::kUnknown) return;
  files_.clear();
  inner_.reset();
  // Backwards, so that COMMIT goes first: what is left can never be taken for
  // a step.
  std::reverse(names_.begin(), names_.end());
  for (const std::string& name : names_) {
    fs_->RemoveFile(JoinPath(path_, name)).IgnoreError();
  }
  fs_->RemoveDirectory(path_).IgnoreError();
}

const std::string& StagingDirectory::path() const { return path_; }

absl::Status StagingDirectory::CheckStage(Stage expected,
                                          absl::string_view call) const {
  if (poisoned_) {
    return absl::FailedPreconditionError(
        absl::StrCat(path_, ": ", call,
                     ": an earlier operation here failed, so nothing in this "
                     "directory can be trusted; start again under a new name"));
  }
  if (stage_ != expected) {
    return absl::FailedPreconditionError(absl::StrCat(
        path_, ": ", call,
        ": out of order: the order is AddFile, SealFiles (or not), "
        "WriteCommit, PublishAs, each of the last three once"));
  }
  return absl::OkStatus();
}

absl::Status StagingDirectory::Poison(absl::Status status) {
  if (!status.ok()) poisoned_ = true;
  return status;
}

absl::StatusOr<File*> StagingDirectory::AddFile(absl::string_view name,
                                                std::uint64_t bytes) {
  KEDGE_RETURN_IF_ERROR(CheckStage(Stage::kWriting, "AddFile"));
  KEDGE_RETURN_IF_ERROR(CheckDataFileName(path_, name));
  absl::StatusOr<std::unique_ptr<File>> file =
      fs_->CreateExclusive(JoinPath(path_, name));
  // A create that failed may have made the file all the same, but a file that
  // was there before is not ours to remove.
  if (!absl::IsAlreadyExists(file.status())) names_.emplace_back(name);
  KEDGE_RETURN_IF_ERROR(Poison(file.status()));
  files_.push_back(
      {std::make_unique<StagedFile>(*std::move(file), &poisoned_), bytes});
  File* const added = files_.back().file.get();
  if (bytes != 0) KEDGE_RETURN_IF_ERROR(added->Resize(bytes));
  return added;
}

absl::Status StagingDirectory::SealFiles(IoPool& pool) {
  KEDGE_RETURN_IF_ERROR(CheckStage(Stage::kWriting, "SealFiles"));
  IoPool::Batch batch(&pool);
  for (const DataFile& data : files_) {
    batch.Submit([&data] { return SealFile(*data.file, data.bytes); });
  }
  KEDGE_RETURN_IF_ERROR(Poison(batch.Wait()));
  stage_ = Stage::kSealed;
  return absl::OkStatus();
}

void StagingDirectory::Adopt(std::unique_ptr<StagingDirectory> inner) {
  KEDGE_CHECK(inner->stage_ == Stage::kCommitted && inner_ == nullptr);
  inner_ = std::move(inner);
}

// What happens to this directory happens to the one inside it.
void StagingDirectory::SetStage(Stage stage) {
  stage_ = stage;
  if (inner_ != nullptr) inner_->stage_ = stage;
}

absl::Status StagingDirectory::WriteCommit(std::span<const std::byte> manifest,
                                           std::span<const std::byte> commit,
                                           IoPool& pool) {
  const bool seals = stage_ == Stage::kWriting;
  KEDGE_RETURN_IF_ERROR(
      CheckStage(seals ? Stage::kWriting : Stage::kSealed, "WriteCommit"));
  std::vector<std::unique_ptr<File>> files;
  const auto write = [&](absl::string_view name,
                         std::span<const std::byte> bytes) -> absl::Status {
    names_.emplace_back(name);
    KEDGE_ASSIGN_OR_RETURN(std::unique_ptr<File> file,
                           fs_->CreateExclusive(JoinPath(path_, name)));
    files.push_back(std::move(file));
    return WriteAll(*files.back(), 0, bytes);
  };
  KEDGE_RETURN_IF_ERROR(Poison(write(kManifestFileName, manifest)));
  KEDGE_RETURN_IF_ERROR(Poison(write(kCommitFileName, commit)));
  // Nobody looks in here before the rename, so that the order in which files
  // and their names reach the disk does not matter, and one wait is enough for
  // all of them.
  IoPool::Batch batch(&pool);
  if (seals) {
    for (const DataFile& data : files_) {
      batch.Submit([&data] { return SealFile(*data.file, data.bytes); });
    }
  }
  for (const std::unique_ptr<File>& file : files) {
    batch.Submit([&file] { return SealFile(*file, 0); });
  }
  batch.Submit([&] { return fs_->SyncDirectory(path_); });
  KEDGE_RETURN_IF_ERROR(Poison(batch.Wait()));
  stage_ = Stage::kCommitted;
  return absl::OkStatus();
}

absl::Status StagingDirectory::PublishAs(
    const std::string& target,
    const std::function<absl::StatusOr<bool>()>& is_ours) {
  KEDGE_RETURN_IF_ERROR(CheckStage(Stage::kCommitted, "PublishAs"));
  const absl::Status renamed = fs_->Rename(path_, target);
  if (!renamed.ok()) {
    KEDGE_RETURN_IF_ERROR(Poison(AfterFailedRename(renamed, target, is_ours)));
  }
  SetStage(Stage::kPublished);
  parent_sync_status_ = fs_->SyncDirectory(ParentPath(target));
  return absl::OkStatus();
}

// OK if the rename took place in spite of `renamed`.
absl::Status StagingDirectory::AfterFailedRename(
    const absl::Status& renamed, const std::string& target,
    const std::function<absl::StatusOr<bool>()>& is_ours) {
  const auto unknown = [&](const absl::Status& why) {
    SetStage(Stage::kUnknown);
    return absl::UnavailableError(absl::StrCat(
        target, ": publish: outcome unknown: rename said \"", renamed.message(),
        "\", then looking said \"", why.message(),
        "\"; open the store again under a new epoch and look"));
  };
  const absl::StatusOr<bool> ours = is_ours();
  if (ours.ok() && *ours) return absl::OkStatus();
  // Nothing there is an answer as well; everything else is none.
  if (!ours.ok() && !absl::IsNotFound(ours.status())) {
    return unknown(ours.status());
  }
  const absl::StatusOr<FileInfo> there = fs_->Stat(target);
  if (!there.ok() && !absl::IsNotFound(there.status())) {
    return unknown(there.status());
  }
  // Unless somebody else's content was seen, only our own directory, still in
  // its place, proves that nothing was renamed.
  if (!ours.ok() || !there.ok()) {
    const absl::StatusOr<FileInfo> here = fs_->Stat(path_);
    if (!here.ok()) return unknown(here.status());
  }
  if (there.ok()) {
    return absl::AlreadyExistsError(absl::StrCat(
        target,
        ": publish: something else stands there already (rename said \"",
        renamed.message(), "\"); run `kedge fsck`"));
  }
  return Annotate(renamed, absl::StrCat(target, ": publish: not renamed"));
}

}  // namespace kedge
