#ifndef KEDGE_ENGINE_IO_FILE_SYSTEM_H_
#define KEDGE_ENGINE_IO_FILE_SYSTEM_H_

// The seam between kedge and storage. Everything that kedge does to a file goes
// through a FileSystem, so that tests can fail, shorten, tear or drop any
// single operation.
//
// Errors carry the path, the operation, the errno name, and one of these codes:
//   kNotFound            ENOENT, ENOTDIR
//   kAlreadyExists       EEXIST, ENOTEMPTY
//   kResourceExhausted   ENOSPC, EDQUOT, EMFILE, ENFILE, ENOMEM
//   kPermissionDenied    EACCES, EPERM, EROFS
//   kUnimplemented       ENOTSUP, EOPNOTSUPP, ENODEV (mapping refused)
//   kDataLoss            ELOOP (a link where a file must be), other file types
//   kUnavailable         all else (EIO, ESTALE, ...): trying again, or opening
//                        the parent again, may help

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace kedge {

// A read-only mapping. Unmaps when destroyed.
class MappedRegion {
 public:
  virtual ~MappedRegion() = default;
  virtual std::span<const std::byte> bytes() const = 0;
};

// An open file. Thread safety: the positioned calls (ReadSome, WriteSome,
// WillRead, StartWriteback) may run concurrently; the others may not run beside
// any call.
class File {
 public:
  // Closes without reporting an error; writers call Close().
  virtual ~File() = default;

  virtual absl::string_view path() const = 0;

  // One pread or pwrite: may move fewer bytes than asked (at least 1, or 0 at
  // the end of the file when reading). EINTR and EAGAIN are retried inside.
  virtual absl::StatusOr<std::size_t> ReadSome(std::uint64_t offset,
                                               std::span<std::byte> out) = 0;
  virtual absl::StatusOr<std::size_t> WriteSome(
      std::uint64_t offset, std::span<const std::byte> bytes) = 0;

  virtual absl::StatusOr<std::uint64_t> Size() = 0;
  // Sets the size of a file being written, so that later writes never extend
  // it. Space is reserved where the file system can.
  virtual absl::Status Resize(std::uint64_t bytes) = 0;
  virtual absl::Status Sync() = 0;   // fsync; never call again after a failure
  virtual absl::Status Close() = 0;  // reports delayed write errors
  // Maps the first `bytes` bytes read-only and shared. `bytes` > 0 and at most
  // Size().
  virtual absl::StatusOr<std::unique_ptr<MappedRegion>> Map(
      std::uint64_t bytes) = 0;
  // Tells the system that the range will be read soon (posix_fadvise).
  virtual void WillRead(std::uint64_t offset, std::uint64_t bytes) = 0;
  // Lets storage begin with bytes that have been written, so that Sync waits
  // for less (sync_file_range). A hint: nothing follows from it. Waits while
  // the device's queue is full.
  virtual void StartWriteback(std::uint64_t offset, std::uint64_t bytes) = 0;
};

enum class FileType { kRegular, kDirectory, kOther };

struct FileInfo {
  FileType type = FileType::kOther;
  std::uint64_t bytes = 0;
  std::int64_t modified_ns = 0;  // mtime, nanoseconds since 1970
};

// Whether mapped reads are safe: on a network file system a lost server turns
// a mapped page into SIGBUS.
enum class StorageKind { kLocal, kNetwork };

// Thread safety: all methods may run concurrently.
class FileSystem {
 public:
  virtual ~FileSystem() = default;

  // Opens an existing regular file for reading. Never follows a symbolic link
  // in the last component (kDataLoss).
  virtual absl::StatusOr<std::unique_ptr<File>> OpenForRead(
      absl::string_view path) = 0;
  // Creates a file that must not exist yet (O_CREAT | O_EXCL), mode 0644, for
  // reading and writing.
  virtual absl::StatusOr<std::unique_ptr<File>> CreateExclusive(
      absl::string_view path) = 0;

  virtual absl::Status MakeDirectory(absl::string_view path) = 0;
  // Plain rename(2). Replaces a file; onto a non-empty directory it is
  // kAlreadyExists. A failure does not prove that nothing was renamed.
  virtual absl::Status Rename(absl::string_view from, absl::string_view to) = 0;
  // link(2): a second name for a file; kAlreadyExists if `to` exists.
  virtual absl::Status Link(absl::string_view from, absl::string_view to) = 0;
  virtual absl::Status RemoveFile(absl::string_view path) = 0;
  virtual absl::Status RemoveDirectory(absl::string_view path) = 0;  // empty
  // Names in a directory, sorted, without "." and "..".
  virtual absl::StatusOr<std::vector<std::string>> List(
      absl::string_view path) = 0;
  // lstat(2).
  virtual absl::StatusOr<FileInfo> Stat(absl::string_view path) = 0;
  // fsync of the directory: names created, renamed or removed in it persist.
  virtual absl::Status SyncDirectory(absl::string_view path) = 0;
  virtual absl::StatusOr<StorageKind> KindOf(absl::string_view path) = 0;
};

// The real one. Lives for ever; stateless.
FileSystem* PosixFileSystem();

// `directory` + "/" + `name`.
std::string JoinPath(absl::string_view directory, absl::string_view name);
// The directory of `path`: "a" for "a/b", "." for "b", "/" for "/b".
std::string ParentPath(absl::string_view path);

// Loops over WriteSome until all of `bytes` is written.
absl::Status WriteAll(File& file, std::uint64_t offset,
                      std::span<const std::byte> bytes);
// Loops over ReadSome until `out` is full; kDataLoss if the file ends before.
absl::Status ReadAll(File& file, std::uint64_t offset,
                     std::span<std::byte> out);

// Reads a whole small file. kDataLoss if it is larger than `max_bytes`. The
// second form also asks for an exact size.
absl::StatusOr<std::vector<std::byte>> ReadFile(FileSystem& fs,
                                                absl::string_view path,
                                                std::uint64_t max_bytes);
absl::StatusOr<std::vector<std::byte>> ReadFileOfSize(FileSystem& fs,
                                                      absl::string_view path,
                                                      std::uint64_t bytes);

// Creates, writes, fsyncs and closes `path`, which must not exist.
absl::Status WriteNewFile(FileSystem& fs, absl::string_view path,
                          std::span<const std::byte> bytes);
// Writes `temporary` (removed first if it exists), then renames it to `path`
// and syncs `path`'s directory: a reader sees the old bytes or the new ones.
absl::Status ReplaceFile(FileSystem& fs, absl::string_view path,
                         absl::string_view temporary,
                         std::span<const std::byte> bytes);
// ReplaceFile for what readers check and can do without: nothing is synced, so
// that a power loss may leave the old bytes, nothing, or nonsense.
absl::Status ReplaceHint(FileSystem& fs, absl::string_view path,
                         absl::string_view temporary,
                         std::span<const std::byte> bytes);
// Makes `path` with `bytes` unless it exists (kAlreadyExists): a temporary
// file, then link(2). Where links are not supported it is made with O_EXCL, and
// others may see it before its bytes.
absl::Status CreateFileAtomically(FileSystem& fs, absl::string_view path,
                                  absl::string_view temporary,
                                  std::span<const std::byte> bytes);
// mkdir that takes an existing directory for success, whoever made it.
absl::Status EnsureDirectory(FileSystem& fs, absl::string_view path);
// Removes a directory and everything in it; missing names are no error.
absl::Status RemoveTree(FileSystem& fs, absl::string_view path);

}  // namespace kedge

#endif  // KEDGE_ENGINE_IO_FILE_SYSTEM_H_
