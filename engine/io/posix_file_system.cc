// The FileSystem of the machine: one method, one system call where possible.

#include <dirent.h>
#include <fcntl.h>
#include <linux/magic.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kedge/engine/io/errno_status.h"
#include "kedge/engine/io/file_system.h"
#include "kedge/format/status.h"

namespace kedge {
namespace {

static_assert(sizeof(off_t) == 8, "files are larger than 2 GiB");

// Magic numbers that <linux/magic.h> of Debian 12 lacks.
constexpr std::uint32_t kZfsMagic = 0x2fc12fc1;
constexpr std::uint32_t kBcachefsMagic = 0xca451a4e;

// Repeats a call that a signal interrupted.
template <typename Call>
auto Uninterrupted(Call call) {
  for (;;) {
    auto result = call();
    if (result >= 0 || errno != EINTR) return result;
  }
}

// A regular file never asks to wait, but some FUSE file systems answer EAGAIN
// under load. Sleeping a millisecond at a time, this gives up after a while
// instead of hanging. False when it is time to give up.
class Patience {
 public:
  bool Wait() {
    if (++waits_ > kMostWaits) return false;
    const timespec millisecond = {0, 1'000'000};
    nanosleep(&millisecond, nullptr);
    return true;
  }

 private:
  static constexpr int kMostWaits = 10'000;
  int waits_ = 0;
};

// A NUL inside a name would silently name another file.
absl::Status CheckPath(absl::string_view path) {
  if (path.find('\0') == absl::string_view::npos) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(path.substr(0, path.find('\0')),
                   ": the path has a NUL byte inside, which no file name can"));
}

absl::Status CheckRange(absl::string_view path, std::uint64_t offset,
                        std::uint64_t bytes) {
  constexpr std::uint64_t kMost = std::numeric_limits<off_t>::max();
  if (offset <= kMost && bytes <= kMost - offset) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(path, ": offset ", offset, ": ", bytes,
                   " bytes reach beyond the largest file, ", kMost, " bytes"));
}

absl::string_view TypeName(mode_t mode) {
  if (S_ISREG(mode)) return "a regular file";
  if (S_ISDIR(mode)) return "a directory";
  if (S_ISLNK(mode)) return "a symbolic link";
  if (S_ISFIFO(mode)) return "a FIFO";
  if (S_ISSOCK(mode)) return "a socket";
  return "a device";
}

absl::Status NotARegularFile(absl::string_view path, absl::string_view found) {
  Problem problem;
  problem.where = path;
  problem.what = "file type";
  problem.expected = "a regular file";
  problem.found = found;
  return DataLoss(problem);
}

class PosixMappedRegion final : public MappedRegion {
 public:
  PosixMappedRegion(void* address, std::size_t bytes)
      : address_(address), bytes_(bytes) {}
  ~PosixMappedRegion() override { munmap(address_, bytes_); }

  std::span<const std::byte> bytes() const override {
    return {static_cast<const std::byte*>(address_), bytes_};
  }

 private:
  void* address_;
  std::size_t bytes_;
};

class PosixFile final : public File {
 public:
  PosixFile(int descriptor, std::string path)
      : descriptor_(descriptor), path_(std::move(path)) {}
  ~PosixFile() override {
    if (descriptor_ >= 0) close(descriptor_);
  }

  absl::string_view path() const override { return path_; }

  absl::StatusOr<std::size_t> ReadSome(std::uint64_t offset,
                                       std::span<std::byte> out) override {
    KEDGE_RETURN_IF_ERROR(CheckRange(path_, offset, out.size()));
    Patience patience;
    for (;;) {
      const ssize_t moved = Uninterrupted([&] {
        return pread(descriptor_, out.data(), out.size(),
                     static_cast<off_t>(offset));
      });
      if (moved >= 0) return static_cast<std::size_t>(moved);
      const int error = errno;
      if (error == EAGAIN && patience.Wait()) continue;
      return ErrnoStatus(error, absl::StrCat("read at offset ", offset), path_);
    }
  }

  absl::StatusOr<std::size_t> WriteSome(
      std::uint64_t offset, std::span<const std::byte> bytes) override {
    KEDGE_RETURN_IF_ERROR(CheckRange(path_, offset, bytes.size()));
    if (bytes.empty()) return 0;
    Patience patience;
    for (;;) {
      const ssize_t moved = Uninterrupted([&] {
        return pwrite(descriptor_, bytes.data(), bytes.size(),
                      static_cast<off_t>(offset));
      });
      if (moved > 0) return static_cast<std::size_t>(moved);
      const int error = moved == 0 ? EIO : errno;
      if (error == EAGAIN && patience.Wait()) continue;
      return ErrnoStatus(error, absl::StrCat("write at offset ", offset),
                         path_);
    }
  }

  absl::StatusOr<std::uint64_t> Size() override {
    struct stat info;
    if (fstat(descriptor_, &info) != 0) {
      return ErrnoStatus(errno, "fstat", path_);
    }
    return static_cast<std::uint64_t>(info.st_size);
  }

  absl::Status Resize(std::uint64_t bytes) override {
    KEDGE_RETURN_IF_ERROR(CheckRange(path_, 0, bytes));
    const off_t size = static_cast<off_t>(bytes);
    if (Uninterrupted([&] { return ftruncate(descriptor_, size); }) != 0) {
      return ErrnoStatus(errno, absl::StrCat("ftruncate to ", bytes, " bytes"),
                         path_);
    }
    if (bytes == 0) return absl::OkStatus();
    // A full disk shows here, before anything is written.
    if (Uninterrupted([&] { return fallocate(descriptor_, 0, 0, size); }) !=
            0 &&
        errno != EOPNOTSUPP && errno != ENOSYS) {
      return ErrnoStatus(errno, absl::StrCat("fallocate ", bytes, " bytes"),
                         path_);
    }
    return absl::OkStatus();
  }

  absl::Status Sync() override {
    // The kernel reports a lost page once; a second fsync would say success.
    if (!sync_status_.ok()) return sync_status_;
    if (Uninterrupted([&] { return fsync(descriptor_); }) != 0) {
      sync_status_ = ErrnoStatus(errno, "fsync", path_);
    }
    return sync_status_;
  }

  absl::Status Close() override {
    if (descriptor_ < 0) return ErrnoStatus(EBADF, "close", path_);
    // Linux frees the descriptor whatever close returns: never repeat it.
    const int result = close(std::exchange(descriptor_, -1));
    if (result != 0) return ErrnoStatus(errno, "close", path_);
    return absl::OkStatus();
  }

  absl::StatusOr<std::unique_ptr<MappedRegion>> Map(
      std::uint64_t bytes) override {
    KEDGE_ASSIGN_OR_RETURN(const std::uint64_t size, Size());
    if (bytes == 0 || bytes > size) {
      return absl::InvalidArgumentError(
          absl::StrCat(path_, ": map: expected 1 to ", size,
                       " bytes, which the file has, found ", bytes));
    }
    void* const address =
        mmap(nullptr, bytes, PROT_READ, MAP_SHARED, descriptor_, 0);
    if (address == MAP_FAILED) {
      return ErrnoStatus(errno, absl::StrCat("mmap ", bytes, " bytes"), path_);
    }
    return std::make_unique<PosixMappedRegion>(address, bytes);
  }

  void StartWriteback(std::uint64_t offset, std::uint64_t bytes) override {
    if (!CheckRange(path_, offset, bytes).ok()) return;
    sync_file_range(descriptor_, static_cast<off_t>(offset),
                    static_cast<off_t>(bytes), SYNC_FILE_RANGE_WRITE);
  }
  void WillRead(std::uint64_t offset, std::uint64_t bytes) override {
    if (!CheckRange(path_, offset, bytes).ok()) return;
    posix_fadvise(descriptor_, static_cast<off_t>(offset),
                  static_cast<off_t>(bytes), POSIX_FADV_WILLNEED);
  }

 private:
  int descriptor_;
  std::string path_;
  absl::Status sync_status_;
};

class Posix final : public FileSystem {
 public:
  absl::StatusOr<std::unique_ptr<File>> OpenForRead(
      absl::string_view path) override {
    KEDGE_RETURN_IF_ERROR(CheckPath(path));
    std::string name(path);
    // O_NONBLOCK: opening a FIFO that nobody writes would wait for ever.
    const int descriptor = Uninterrupted([&] {
      return open(name.c_str(), O_RDONLY | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK);
    });
    if (descriptor < 0) {
      if (errno == ENXIO) return NotARegularFile(path, "a socket or device");
      return ErrnoStatus(errno, "open for reading", path);
    }
    auto file = std::make_unique<PosixFile>(descriptor, std::move(name));
    struct stat info;
    if (fstat(descriptor, &info) != 0) {
      return ErrnoStatus(errno, "fstat", path);
    }
    if (!S_ISREG(info.st_mode)) {
      return NotARegularFile(path, TypeName(info.st_mode));
    }
    return file;
  }

  absl::StatusOr<std::unique_ptr<File>> CreateExclusive(
      absl::string_view path) override {
    KEDGE_RETURN_IF_ERROR(CheckPath(path));
    std::string name(path);
    const int descriptor = Uninterrupted([&] {
      return open(name.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
    });
    if (descriptor < 0) return ErrnoStatus(errno, "create", path);
    return std::make_unique<PosixFile>(descriptor, std::move(name));
  }

  absl::Status MakeDirectory(absl::string_view path) override {
    return OnPath(path, "mkdir",
                  [](const char* name) { return mkdir(name, 0755); });
  }

  absl::Status Rename(absl::string_view from, absl::string_view to) override {
    return OnTwoPaths(from, to, "rename", [](const char* a, const char* b) {
      return rename(a, b);
    });
  }

  absl::Status Link(absl::string_view from, absl::string_view to) override {
    return OnTwoPaths(from, to, "link",
                      [](const char* a, const char* b) { return link(a, b); });
  }

  absl::Status RemoveFile(absl::string_view path) override {
    return OnPath(path, "unlink",
                  [](const char* name) { return unlink(name); });
  }

  absl::Status RemoveDirectory(absl::string_view path) override {
    return OnPath(path, "rmdir", [](const char* name) { return rmdir(name); });
  }

  absl::StatusOr<std::vector<std::string>> List(
      absl::string_view path) override {
    KEDGE_RETURN_IF_ERROR(CheckPath(path));
    struct CloseDirectory {
      void operator()(DIR* directory) const { closedir(directory); }
    };
    const std::unique_ptr<DIR, CloseDirectory> directory(
        opendir(std::string(path).c_str()));
    if (directory == nullptr) return ErrnoStatus(errno, "opendir", path);
    std::vector<std::string> names;
    for (;;) {
      errno = 0;
      const dirent* const entry = readdir(directory.get());
      if (entry == nullptr) {
        if (errno != 0) return ErrnoStatus(errno, "readdir", path);
        break;
      }
      const absl::string_view name(entry->d_name);
      if (name != "." && name != "..") names.emplace_back(name);
    }
    std::sort(names.begin(), names.end());
    return names;
  }

  absl::StatusOr<FileInfo> Stat(absl::string_view path) override {
    struct stat info;
    KEDGE_RETURN_IF_ERROR(OnPath(
        path, "lstat", [&](const char* name) { return lstat(name, &info); }));
    FileInfo result;
    result.type = S_ISREG(info.st_mode)   ? FileType::kRegular
                  : S_ISDIR(info.st_mode) ? FileType::kDirectory
                                          : FileType::kOther;
    result.bytes = static_cast<std::uint64_t>(info.st_size);
    result.modified_ns = std::int64_t{info.st_mtim.tv_sec} * 1'000'000'000 +
                         info.st_mtim.tv_nsec;
    return result;
  }

  absl::Status SyncDirectory(absl::string_view path) override {
    KEDGE_RETURN_IF_ERROR(CheckPath(path));
    const int descriptor = Uninterrupted([&] {
      return open(std::string(path).c_str(),
                  O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    });
    if (descriptor < 0) {
      return ErrnoStatus(errno, "open directory for fsync", path);
    }
    absl::Status status;
    // EINVAL: a file system that has no fsync of directories (some FUSE and
    // SMB ones); their names persist by other means, or not at all.
    if (Uninterrupted([&] { return fsync(descriptor); }) != 0 &&
        errno != EINVAL && errno != EOPNOTSUPP) {
      status = ErrnoStatus(errno, "fsync directory", path);
    }
    close(descriptor);
    return status;
  }

  absl::StatusOr<StorageKind> KindOf(absl::string_view path) override {
    struct statfs info;
    KEDGE_RETURN_IF_ERROR(OnPath(
        path, "statfs", [&](const char* name) { return statfs(name, &info); }));
    // The field is signed and of another width on some machines.
    switch (static_cast<std::uint32_t>(info.f_type)) {
      case EXT4_SUPER_MAGIC:
      case XFS_SUPER_MAGIC:
      case BTRFS_SUPER_MAGIC:
      case TMPFS_MAGIC:
      case RAMFS_MAGIC:
      case OVERLAYFS_SUPER_MAGIC:
      case F2FS_SUPER_MAGIC:
      case kZfsMagic:
      case kBcachefsMagic:
        return StorageKind::kLocal;
      default:
        return StorageKind::kNetwork;
    }
  }

 private:
  template <typename Call>
  static absl::Status OnPath(absl::string_view path,
                             absl::string_view operation, Call call) {
    KEDGE_RETURN_IF_ERROR(CheckPath(path));
    const std::string name(path);
    if (Uninterrupted([&] { return call(name.c_str()); }) != 0) {
      return ErrnoStatus(errno, operation, path);
    }
    return absl::OkStatus();
  }

  template <typename Call>
  static absl::Status OnTwoPaths(absl::string_view from, absl::string_view to,
                                 absl::string_view operation, Call call) {
    KEDGE_RETURN_IF_ERROR(CheckPath(from));
    KEDGE_RETURN_IF_ERROR(CheckPath(to));
    const std::string a(from);
    const std::string b(to);
    // Not repeated after EINTR: the first call may have done it.
    if (call(a.c_str(), b.c_str()) != 0) {
      return ErrnoStatus(errno, absl::StrCat(operation, " to ", to), from);
    }
    return absl::OkStatus();
  }
};

}  // namespace

FileSystem* PosixFileSystem() {
  static Posix* const file_system = new Posix();
  return file_system;
}

}  // namespace kedge
