#include "kedge/engine/io/file_system.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "kedge/format/status.h"

namespace kedge {
namespace {

absl::StatusOr<std::vector<std::byte>> ReadOpenFile(File& file,
                                                    std::uint64_t bytes) {
  std::vector<std::byte> contents(bytes);
  KEDGE_RETURN_IF_ERROR(ReadAll(file, 0, contents));
  return contents;
}

enum class Syncs { kNo, kYes };

absl::Status WriteNew(FileSystem& fs, absl::string_view path,
                      std::span<const std::byte> bytes, Syncs syncs) {
  KEDGE_ASSIGN_OR_RETURN(std::unique_ptr<File> file, fs.CreateExclusive(path));
  const absl::Status status = [&]() -> absl::Status {
    KEDGE_RETURN_IF_ERROR(WriteAll(*file, 0, bytes));
    if (syncs == Syncs::kYes) KEDGE_RETURN_IF_ERROR(file->Sync());
    return file->Close();
  }();
  if (!status.ok()) {
    file.reset();
    // Half a file under this name would only be in the way of the next try.
    fs.RemoveFile(path).IgnoreError();
  }
  return status;
}

// WriteNew over what an earlier attempt may have left.
absl::Status WriteTemporary(FileSystem& fs, absl::string_view path,
                            std::span<const std::byte> bytes,
                            Syncs syncs = Syncs::kYes) {
  const absl::Status status = WriteNew(fs, path, bytes, syncs);
  if (!absl::IsAlreadyExists(status)) return status;
  if (absl::Status removed = fs.RemoveFile(path);
      !removed.ok() && !absl::IsNotFound(removed)) {
    return removed;
  }
  return WriteNew(fs, path, bytes, syncs);
}

// Renames `temporary`, which goes if that fails.
absl::Status RenameTemporary(FileSystem& fs, absl::string_view temporary,
                             absl::string_view path) {
  const absl::Status status = fs.Rename(temporary, path);
  if (!status.ok()) fs.RemoveFile(temporary).IgnoreError();
  return status;
}

}  // namespace

std::string JoinPath(absl::string_view directory, absl::string_view name) {
  return absl::StrCat(directory, "/", name);
}

std::string ParentPath(absl::string_view path) {
  while (path.size() > 1 && path.back() == '/') path.remove_suffix(1);
  const std::size_t slash = path.rfind('/');
  if (slash == absl::string_view::npos) return ".";
  if (slash == 0) return "/";
  return std::string(path.substr(0, slash));
}

absl::Status WriteAll(File& file, std::uint64_t offset,
                      std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    KEDGE_ASSIGN_OR_RETURN(const std::size_t moved,
                           file.WriteSome(offset, bytes));
    if (moved == 0 || moved > bytes.size()) {
      return absl::UnavailableError(
          absl::StrCat(file.path(), ": offset ", offset,
                       ": write: expected 1 to ", bytes.size(),
                       " bytes written, found ", moved, "; check the storage"));
    }
    offset += moved;
    bytes = bytes.subspan(moved);
  }
  return absl::OkStatus();
}

absl::Status ReadAll(File& file, std::uint64_t offset,
                     std::span<std::byte> out) {
  const std::uint64_t start = offset;
  const std::size_t wanted = out.size();
  while (!out.empty()) {
    KEDGE_ASSIGN_OR_RETURN(const std::size_t moved, file.ReadSome(offset, out));
    if (moved == 0 || moved > out.size()) {
      return absl::DataLossError(
          absl::StrCat(file.path(), ": offset ", start, ": expected ", wanted,
                       " bytes, found ", wanted - out.size(),
                       ": the file is too short; run `kedge fsck`"));
    }
    offset += moved;
    out = out.subspan(moved);
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<std::byte>> ReadFile(FileSystem& fs,
                                                absl::string_view path,
                                                std::uint64_t max_bytes) {
  KEDGE_ASSIGN_OR_RETURN(const std::unique_ptr<File> file,
                         fs.OpenForRead(path));
  KEDGE_ASSIGN_OR_RETURN(const std::uint64_t bytes, file->Size());
  if (bytes > max_bytes) {
    return absl::DataLossError(absl::StrCat(path, ": size: expected at most ",
                                            max_bytes, " bytes, found ", bytes,
                                            "; run `kedge fsck`"));
  }
  return ReadOpenFile(*file, bytes);
}

absl::StatusOr<std::vector<std::byte>> ReadFileOfSize(FileSystem& fs,
                                                      absl::string_view path,
                                                      std::uint64_t bytes) {
  KEDGE_ASSIGN_OR_RETURN(const std::unique_ptr<File> file,
                         fs.OpenForRead(path));
  KEDGE_ASSIGN_OR_RETURN(const std::uint64_t found, file->Size());
  if (found != bytes) {
    return absl::DataLossError(absl::StrCat(path, ": size: expected ", bytes,
                                            " bytes, found ", found,
                                            "; run `kedge fsck`"));
  }
  return ReadOpenFile(*file, bytes);
}

absl::Status WriteNewFile(FileSystem& fs, absl::string_view path,
                          std::span<const std::byte> bytes) {
  return WriteNew(fs, path, bytes, Syncs::kYes);
}

absl::Status ReplaceFile(FileSystem& fs, absl::string_view path,
                         absl::string_view temporary,
                         std::span<const std::byte> bytes) {
  KEDGE_RETURN_IF_ERROR(WriteTemporary(fs, temporary, bytes));
  KEDGE_RETURN_IF_ERROR(RenameTemporary(fs, temporary, path));
  return fs.SyncDirectory(ParentPath(path));
}

absl::Status ReplaceHint(FileSystem& fs, absl::string_view path,
                         absl::string_view temporary,
                         std::span<const std::byte> bytes) {
  KEDGE_RETURN_IF_ERROR(WriteTemporary(fs, temporary, bytes, Syncs::kNo));
  return RenameTemporary(fs, temporary, path);
}

absl::Status CreateFileAtomically(FileSystem& fs, absl::string_view path,
                                  absl::string_view temporary,
                                  std::span<const std::byte> bytes) {
  KEDGE_RETURN_IF_ERROR(WriteTemporary(fs, temporary, bytes));
  absl::Status status = fs.Link(temporary, path);
  fs.RemoveFile(temporary).IgnoreError();
  // EPERM is what link(2) says on a file system without hard links.
  if (absl::IsUnimplemented(status) || absl::IsPermissionDenied(status)) {
    status = WriteNewFile(fs, path, bytes);
  }
  KEDGE_RETURN_IF_ERROR(status);
  return fs.SyncDirectory(ParentPath(path));
}

absl::Status EnsureDirectory(FileSystem& fs, absl::string_view path) {
  // Several machines may make the directory at once, and on a network file
  // system one of them may be told EEXIST and, for a moment, ENOENT. Reading
  // the parent makes the client forget what it believed about missing names.
  constexpr int kTries = 4;
  for (int attempt = 1;; ++attempt) {
    const absl::Status made = fs.MakeDirectory(path);
    if (made.ok()) return made;
    if (!absl::IsAlreadyExists(made) && !absl::IsNotFound(made)) return made;
    const absl::StatusOr<FileInfo> info = fs.Stat(path);
    if (info.ok()) {
      if (info->type == FileType::kDirectory) return absl::OkStatus();
      return absl::AlreadyExistsError(absl::StrCat(
          path,
          ": file type: expected a directory, found something else; move "
          "it away"));
    }
    if (attempt == kTries || !absl::IsNotFound(info.status())) return made;
    if (!fs.List(ParentPath(path)).ok()) return made;
  }
}

absl::Status RemoveTree(FileSystem& fs, absl::string_view path) {
  // Goes on after an error, so that one bad name keeps as little as possible.
  absl::Status first_error;
  const auto keep = [&](const absl::Status& status) {
    if (!status.ok() && !absl::IsNotFound(status)) first_error.Update(status);
  };
  const absl::StatusOr<FileInfo> info = fs.Stat(path);
  if (!info.ok()) {
    keep(info.status());
  } else if (info->type != FileType::kDirectory) {
    keep(fs.RemoveFile(path));  // a link itself, never what it points to
  } else {
    const absl::StatusOr<std::vector<std::string>> names = fs.List(path);
    keep(names.status());
    if (names.ok()) {
      for (const std::string& name : *names) {
        keep(RemoveTree(fs, JoinPath(path, name)));
      }
    }
    // Would only repeat in other words why a name is still there.
    if (first_error.ok()) keep(fs.RemoveDirectory(path));
  }
  return first_error;
}

}  // namespace kedge
