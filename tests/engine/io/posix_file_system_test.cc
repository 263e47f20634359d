// Goal: every promise of file_system.h that can be tried without root: codes,
// texts, and that nothing but a regular file is ever opened. Method: real files
// in a temporary directory.

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <limits>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kedge/engine/io/errno_status.h"
#include "kedge/engine/io/file_system.h"
#include "kedge/tests/support/temp_directory.h"

namespace kedge {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;

std::span<const std::byte> Bytes(absl::string_view text) {
  return std::as_bytes(std::span(text.data(), text.size()));
}

class PosixFileSystemTest : public testing::Test {
 protected:
  void Write(const std::string& name, absl::string_view text) {
    ASSERT_TRUE(WriteNewFile(*fs_, temp_.Join(name), Bytes(text)).ok());
  }

  TempDirectory temp_;
  FileSystem* fs_ = PosixFileSystem();
};

TEST(ErrnoStatusTest, EachErrnoHasTheCodeThatTheHeaderLists) {
  const std::pair<int, absl::StatusCode> kTable[] = {
      {ENOENT, absl::StatusCode::kNotFound},
      {ENOTDIR, absl::StatusCode::kNotFound},
      {EEXIST, absl::StatusCode::kAlreadyExists},
      {ENOTEMPTY, absl::StatusCode::kAlreadyExists},
      {ENOSPC, absl::StatusCode::kResourceExhausted},
      {EDQUOT, absl::StatusCode::kResourceExhausted},
      {EMFILE, absl::StatusCode::kResourceExhausted},
      {ENFILE, absl::StatusCode::kResourceExhausted},
      {ENOMEM, absl::StatusCode::kResourceExhausted},
      {EACCES, absl::StatusCode::kPermissionDenied},
      {EPERM, absl::StatusCode::kPermissionDenied},
      {EROFS, absl::StatusCode::kPermissionDenied},
      {ENOTSUP, absl::StatusCode::kUnimplemented},
      {EOPNOTSUPP, absl::StatusCode::kUnimplemented},
      {ENODEV, absl::StatusCode::kUnimplemented},
      {ELOOP, absl::StatusCode::kDataLoss},
      {EIO, absl::StatusCode::kUnavailable},
      {ESTALE, absl::StatusCode::kUnavailable},
      {ENAMETOOLONG, absl::StatusCode::kUnavailable},
  };
  for (const auto& [error, code] : kTable) {
    const absl::Status status = ErrnoStatus(error, "write", "dir/file");
    EXPECT_EQ(status.code(), code) << status;
    EXPECT_THAT(std::string(status.message()),
                AllOf(testing::StartsWith("dir/file: write: "),
                      HasSubstr(strerrorname_np(error))));
  }
  EXPECT_THAT(std::string(ErrnoStatus(9999, "read", "f").message()),
              HasSubstr("errno 9999"));
}

TEST_F(PosixFileSystemTest, MissingNamesAreNotFound) {
  const std::string missing = temp_.Join("missing");
  EXPECT_TRUE(absl::IsNotFound(fs_->OpenForRead(missing).status()));
  EXPECT_TRUE(absl::IsNotFound(fs_->CreateExclusive(missing + "/x").status()));
  EXPECT_TRUE(absl::IsNotFound(fs_->MakeDirectory(missing + "/x")));
  EXPECT_TRUE(absl::IsNotFound(fs_->Rename(missing, temp_.Join("x"))));
  EXPECT_TRUE(absl::IsNotFound(fs_->Link(missing, temp_.Join("x"))));
  EXPECT_TRUE(absl::IsNotFound(fs_->RemoveFile(missing)));
  EXPECT_TRUE(absl::IsNotFound(fs_->RemoveDirectory(missing)));
  EXPECT_TRUE(absl::IsNotFound(fs_->List(missing).status()));
  EXPECT_TRUE(absl::IsNotFound(fs_->Stat(missing).status()));
  EXPECT_TRUE(absl::IsNotFound(fs_->SyncDirectory(missing)));
  EXPECT_TRUE(absl::IsNotFound(fs_->KindOf(missing).status()));
  EXPECT_THAT(std::string(fs_->OpenForRead(missing).status().message()),
              AllOf(HasSubstr(missing), HasSubstr("open for reading"),
                    HasSubstr("ENOENT (No such file or directory)")));
}

TEST_F(PosixFileSystemTest, TakenNamesAreAlreadyExists) {
  Write("file", "x");
  ASSERT_TRUE(fs_->MakeDirectory(temp_.Join("full")).ok());
  Write("full/file", "x");
  ASSERT_TRUE(fs_->MakeDirectory(temp_.Join("other")).ok());
  const std::string file = temp_.Join("file");
  EXPECT_TRUE(absl::IsAlreadyExists(fs_->CreateExclusive(file).status()));
  EXPECT_TRUE(absl::IsAlreadyExists(fs_->MakeDirectory(file)));
  EXPECT_TRUE(absl::IsAlreadyExists(fs_->Link(file, temp_.Join("full/file"))));
  EXPECT_TRUE(absl::IsAlreadyExists(
      fs_->Rename(temp_.Join("other"), temp_.Join("full"))));
  EXPECT_TRUE(absl::IsAlreadyExists(fs_->RemoveDirectory(temp_.Join("full"))));
  // Through a file as if it were a directory.
  EXPECT_TRUE(absl::IsNotFound(fs_->OpenForRead(file + "/x").status()));
}

TEST_F(PosixFileSystemTest, OnlyRegularFilesAreOpened) {
  Write("file", "x");
  ASSERT_EQ(symlink("file", temp_.Join("link").c_str()), 0);
  ASSERT_EQ(symlink("nowhere", temp_.Join("dangling").c_str()), 0);
  ASSERT_EQ(mkfifo(temp_.Join("fifo").c_str(), 0644), 0);
  ASSERT_TRUE(fs_->MakeDirectory(temp_.Join("directory")).ok());
  const int listener = socket(AF_UNIX, SOCK_STREAM, 0);
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  const std::string socket_path = temp_.Join("socket");
  ASSERT_LT(socket_path.size(), sizeof(address.sun_path));
  std::memcpy(address.sun_path, socket_path.c_str(), socket_path.size());
  ASSERT_EQ(
      bind(listener, reinterpret_cast<sockaddr*>(&address), sizeof(address)),
      0);
  for (const char* name : {"link", "dangling", "fifo", "directory", "socket"}) {
    // A FIFO that nobody writes would hang here without O_NONBLOCK.
    const absl::Status status = fs_->OpenForRead(temp_.Join(name)).status();
    EXPECT_TRUE(absl::IsDataLoss(status)) << name << ": " << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(name));
  }
  EXPECT_TRUE(absl::IsDataLoss(fs_->OpenForRead("/dev/zero").status()));
  EXPECT_THAT(
      std::string(fs_->OpenForRead(temp_.Join("link")).status().message()),
      HasSubstr("ELOOP"));
  close(listener);

  // Creating never writes through a link either.
  EXPECT_TRUE(absl::IsAlreadyExists(
      fs_->CreateExclusive(temp_.Join("dangling")).status()));
}

TEST_F(PosixFileSystemTest, NulInsideAPathIsRefused) {
  Write("file", "x");
  std::string path = temp_.Join("file");
  path.append("\0tail", 5);
  EXPECT_TRUE(absl::IsInvalidArgument(fs_->OpenForRead(path).status()));
  EXPECT_TRUE(absl::IsInvalidArgument(fs_->RemoveFile(path)));
  EXPECT_TRUE(absl::IsInvalidArgument(fs_->Rename(path, path)));
  EXPECT_TRUE(absl::IsInvalidArgument(fs_->List(path).status()));
  EXPECT_TRUE(fs_->Stat(temp_.Join("file")).ok());
}

TEST_F(PosixFileSystemTest, OpenFileLimitIsResourceExhausted) {
  Write("file", "x");
  rlimit old;
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &old), 0);
  rlimit none = old;
  none.rlim_cur = 0;
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &none), 0);
  const absl::Status status = fs_->OpenForRead(temp_.Join("file")).status();
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &old), 0);
  EXPECT_TRUE(absl::IsResourceExhausted(status)) << status;
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr("EMFILE"), HasSubstr("ulimit -n")));
}

TEST_F(PosixFileSystemTest, WritesBeyondTheFileSizeLimitFailInTime) {
  rlimit old;
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &old), 0);
  const auto old_handler = signal(SIGXFSZ, SIG_IGN);
  const absl::StatusOr<std::unique_ptr<File>> file =
      fs_->CreateExclusive(temp_.Join("file"));
  ASSERT_TRUE(file.ok());
  rlimit small = old;
  small.rlim_cur = 10;
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
  const absl::Status status = WriteAll(**file, 0, Bytes("twelve bytes"));
  const absl::Status resized = (*file)->Resize(100);
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &old), 0);
  signal(SIGXFSZ, old_handler);
  // The first pwrite is short (10 bytes), the second one fails.
  EXPECT_TRUE(absl::IsUnavailable(status)) << status;
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr("EFBIG"), HasSubstr("offset 10")));
  EXPECT_TRUE(absl::IsUnavailable(resized)) << resized;
  EXPECT_EQ(*(*file)->Size(), 10u);
}

TEST_F(PosixFileSystemTest, OffsetsThatOverflowAreRefused) {
  const absl::StatusOr<std::unique_ptr<File>> file =
      fs_->CreateExclusive(temp_.Join("file"));
  ASSERT_TRUE(file.ok());
  constexpr std::uint64_t kMost = std::numeric_limits<std::uint64_t>::max();
  std::byte byte{};
  for (const std::uint64_t offset : {kMost, kMost / 2, kMost - 1}) {
    EXPECT_TRUE(absl::IsInvalidArgument(
        (*file)->ReadSome(offset, std::span(&byte, 1)).status()));
    EXPECT_TRUE(absl::IsInvalidArgument(
        (*file)->WriteSome(offset, std::span(&byte, 1)).status()));
  }
  EXPECT_TRUE(absl::IsInvalidArgument((*file)->Resize(kMost)));
  (*file)->WillRead(kMost, kMost);
}

TEST_F(PosixFileSystemTest, ResizeReservesSpaceAndReadsAsZeros) {
  const absl::StatusOr<std::unique_ptr<File>> file =
      fs_->CreateExclusive(temp_.Join("file"));
  ASSERT_TRUE(file.ok());
  ASSERT_TRUE((*file)->Resize(1 << 20).ok());
  EXPECT_EQ(*(*file)->Size(), std::uint64_t{1} << 20);
  struct stat info;
  ASSERT_EQ(stat(temp_.Join("file").c_str(), &info), 0);
  const absl::StatusOr<StorageKind> kind = fs_->KindOf(temp_.path());
  ASSERT_TRUE(kind.ok());
  if (*kind == StorageKind::kLocal) {
    EXPECT_GE(info.st_blocks * 512, 1 << 20);
  }
  std::vector<std::byte> bytes(1 << 20, std::byte{1});
  ASSERT_TRUE(ReadAll(**file, 0, bytes).ok());
  EXPECT_EQ(std::count(bytes.begin(), bytes.end(), std::byte{0}), 1 << 20);
  ASSERT_TRUE((*file)->Resize(0).ok());
  EXPECT_EQ(*(*file)->Size(), 0u);
}

TEST_F(PosixFileSystemTest, MapShowsTheFileAndRefusesMoreThanItHas) {
  Write("file", "mapped bytes");
  const absl::StatusOr<std::unique_ptr<File>> file =
      fs_->OpenForRead(temp_.Join("file"));
  ASSERT_TRUE(file.ok());
  (*file)->WillRead(0, 12);
  const auto region = (*file)->Map(6);
  ASSERT_TRUE(region.ok()) << region.status();
  ASSERT_EQ((*region)->bytes().size(), 6u);
  EXPECT_EQ(std::memcmp((*region)->bytes().data(), "mapped", 6), 0);
  EXPECT_TRUE(absl::IsInvalidArgument((*file)->Map(0).status()));
  EXPECT_TRUE(absl::IsInvalidArgument((*file)->Map(13).status()));
  // The mapping outlives the file and its name.
  ASSERT_TRUE((*file)->Close().ok());
  ASSERT_TRUE(fs_->RemoveFile(temp_.Join("file")).ok());
  EXPECT_EQ(std::memcmp((*region)->bytes().data(), "mapped", 6), 0);
}

TEST_F(PosixFileSystemTest, ClosedFileFailsInsteadOfTouchingAnotherOne) {
  absl::StatusOr<std::unique_ptr<File>> file =
      fs_->CreateExclusive(temp_.Join("file"));
  ASSERT_TRUE(file.ok());
  ASSERT_TRUE((*file)->Close().ok());
  Write("other", "untouched");  // may get the same descriptor number
  EXPECT_FALSE((*file)->WriteSome(0, Bytes("x")).ok());
  EXPECT_FALSE((*file)->Size().ok());
  EXPECT_FALSE((*file)->Close().ok());
  const absl::Status first = (*file)->Sync();
  EXPECT_FALSE(first.ok());
  EXPECT_EQ((*file)->Sync(), first);  // a failed fsync stays failed
}

TEST_F(PosixFileSystemTest, StatTellsTypeSizeAndTime) {
  Write("file", "12345");
  ASSERT_EQ(symlink("file", temp_.Join("link").c_str()), 0);
  const timespec times[2] = {{5, 7}, {1234567890, 987654321}};
  ASSERT_EQ(utimensat(AT_FDCWD, temp_.Join("file").c_str(), times, 0), 0);
  const absl::StatusOr<FileInfo> file = fs_->Stat(temp_.Join("file"));
  ASSERT_TRUE(file.ok());
  EXPECT_EQ(file->type, FileType::kRegular);
  EXPECT_EQ(file->bytes, 5u);
  EXPECT_EQ(file->modified_ns, 1234567890987654321);
  EXPECT_EQ(fs_->Stat(temp_.path())->type, FileType::kDirectory);
  EXPECT_EQ(fs_->Stat(temp_.Join("link"))->type, FileType::kOther);
}

TEST_F(PosixFileSystemTest, ListIsSortedAndWithoutDots) {
  for (const char* name : {"b", "a", ".hidden", "c"}) Write(name, "");
  EXPECT_THAT(*fs_->List(temp_.path()), ElementsAre(".hidden", "a", "b", "c"));
  EXPECT_TRUE(absl::IsNotFound(fs_->List(temp_.Join("a")).status()));
}

TEST_F(PosixFileSystemTest, KindOfKnowsLocalFileSystems) {
  // /proc is none of the kinds that are known to be safe to map.
  EXPECT_EQ(*fs_->KindOf("/proc"), StorageKind::kNetwork);
  if (fs_->Stat("/dev/shm").ok()) {
    EXPECT_EQ(*fs_->KindOf("/dev/shm"), StorageKind::kLocal);
  }
}

TEST_F(PosixFileSystemTest, SyncDirectoryAsksForADirectory) {
  Write("file", "x");
  EXPECT_TRUE(fs_->SyncDirectory(temp_.path()).ok());
  EXPECT_TRUE(absl::IsNotFound(fs_->SyncDirectory(temp_.Join("file"))));
}

// User report 52: concurrent `mkdir -p` must not leak EEXIST.
TEST_F(PosixFileSystemTest, ManyThreadsMakeTheSameThreeLevelPath) {
  for (int round = 0; round < 10; ++round) {
    const std::string top = temp_.Join("round" + std::to_string(round));
    std::vector<absl::Status> results(64);
    std::vector<std::thread> threads;
    for (absl::Status& result : results) {
      threads.emplace_back([&result, &top, this] {
        for (const char* tail : {"", "/b", "/b/c"}) {
          result.Update(EnsureDirectory(*fs_, top + tail));
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    for (const absl::Status& result : results) EXPECT_TRUE(result.ok());
    EXPECT_EQ(fs_->Stat(top + "/b/c")->type, FileType::kDirectory);
  }
}

// Positioned reads and writes of one file from many threads.
TEST_F(PosixFileSystemTest, PositionedCallsRunConcurrently) {
  const absl::StatusOr<std::unique_ptr<File>> file =
      fs_->CreateExclusive(temp_.Join("file"));
  ASSERT_TRUE(file.ok());
  constexpr std::size_t kEach = 100'000;
  std::vector<std::thread> threads;
  for (int i = 0; i < 8; ++i) {
    threads.emplace_back([&, i] {
      std::vector<std::byte> bytes(kEach, std::byte(i + 1));
      EXPECT_TRUE(WriteAll(**file, i * kEach, bytes).ok());
      std::vector<std::byte> back(kEach);
      EXPECT_TRUE(ReadAll(**file, i * kEach, back).ok());
      EXPECT_EQ(bytes, back);
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(*(*file)->Size(), 8 * kEach);
}

}  // namespace
}  // namespace kedge
