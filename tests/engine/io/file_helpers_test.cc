// Goal: whatever fails, is cut short, lost or torn inside ReplaceFile and
// CreateFileAtomically, a reader finds the old bytes or the new ones; and
// ReadFile never believes a size. Method: every operation k of each call is
// broken in every way, and after every single operation the file is read.

#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <functional>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kedge/engine/io/file_system.h"
#include "kedge/tests/support/fault_file_system.h"
#include "kedge/tests/support/temp_directory.h"

namespace kedge {
namespace {

using testing::AnyOf;
using testing::HasSubstr;

constexpr char kOld[] = "old bytes of the file";
constexpr char kNew[] = "new bytes, somewhat longer than the old ones";

std::span<const std::byte> Bytes(absl::string_view text) {
  return std::as_bytes(std::span(text.data(), text.size()));
}

std::string Text(const std::vector<std::byte>& bytes) {
  return std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size());
}

// "missing", or the contents.
std::string Look(const std::string& path) {
  const absl::StatusOr<std::vector<std::byte>> bytes =
      ReadFile(*PosixFileSystem(), path, 1 << 20);
  if (absl::IsNotFound(bytes.status())) return "missing";
  if (!bytes.ok()) return std::string(bytes.status().message());
  return Text(*bytes);
}

const std::vector<Fault>& AllFaults() {
  static const auto* const faults = new std::vector<Fault>{
      Fault::Fail(EIO),   Fault::Fail(ENOSPC), Fault::PerformThenFail(EIO),
      Fault::Drop(),      Fault::Shorten(),    Fault::Tear(EIO),
      Fault::Tear(ENOSPC)};
  return *faults;
}

// Drops of a write or of a create cannot be seen by who made them: files of
// kedge carry hashes for that. All other faults must leave `path` whole.
bool LosesDataSilently(const Fault& fault, const Operation& operation) {
  return fault.kind == Fault::Kind::kDrop &&
         (operation.kind == FileOperation::kWrite ||
          operation.kind == FileOperation::kCreateExclusive);
}

TEST(PathTest, ParentAndJoin) {
  EXPECT_EQ(JoinPath("a", "b"), "a/b");
  EXPECT_EQ(ParentPath("a/b"), "a");
  EXPECT_EQ(ParentPath("a/b/"), "a");
  EXPECT_EQ(ParentPath("a"), ".");
  EXPECT_EQ(ParentPath("/a"), "/");
  EXPECT_EQ(ParentPath("/"), "/");
}

class FileHelpersTest : public testing::Test {
 protected:
  // A fresh directory for each try.
  std::string NextDirectory() {
    const std::string path = temp_.Join(std::to_string(++directories_));
    EXPECT_TRUE(PosixFileSystem()->MakeDirectory(path).ok());
    return path;
  }

  TempDirectory temp_;
  FaultFileSystem fs_{PosixFileSystem(), temp_.path()};
  int directories_ = 0;
};

// Runs `call` once per (operation, fault, once or from then on) and checks that
// `path` is one of two things after every operation, and `after` at the end.
void BreakEverywhere(
    FaultFileSystem& fs, const std::function<std::string()>& new_directory,
    const std::string& before, const std::string& after,
    const std::function<absl::Status(const std::string& path,
                                     const std::string& temporary)>& call) {
  const auto prepare = [&](const std::string& directory) {
    if (before != "missing") {
      ASSERT_TRUE(
          WriteNewFile(*PosixFileSystem(), directory + "/file", Bytes(before))
              .ok());
    }
  };
  std::string directory = new_directory();
  prepare(directory);
  fs.Reset();
  ASSERT_TRUE(call(directory + "/file", directory + "/tmp").ok());
  ASSERT_EQ(Look(directory + "/file"), after);
  const std::vector<Operation> clean = fs.log();
  for (std::size_t i = 0; i < clean.size(); ++i) {
    for (const Fault& fault : AllFaults()) {
      for (const bool once : {true, false}) {
        const auto k = static_cast<std::int64_t>(i + 1);
        SCOPED_TRACE(testing::Message()
                     << clean[i].ToString() << ", fault "
                     << static_cast<int>(fault.kind) << " errno " << fault.error
                     << (once ? " once" : " from then on"));
        directory = new_directory();
        prepare(directory);
        const std::string path = directory + "/file";
        fs.Reset();
        fs.set_script(once ? FaultAt(k, fault) : FaultFrom(k, fault));
        const bool silent = LosesDataSilently(fault, clean[i]) ||
                            (!once && fault.kind == Fault::Kind::kDrop);
        fs.set_after_each([&](const Operation& operation) {
          if (!silent) {
            EXPECT_THAT(Look(path), AnyOf(before, after))
                << operation.ToString();
          }
        });
        const absl::Status status = call(path, directory + "/tmp");
        const std::string found = Look(path);
        if (!silent) {
          EXPECT_THAT(found, AnyOf(before, after)) << status;
          if (status.ok() && fault.kind != Fault::Kind::kDrop) {
            EXPECT_EQ(found, after);
          }
          if (fault.kind == Fault::Kind::kShorten) {
            EXPECT_TRUE(status.ok()) << status;
          }
        }
        // What is left behind is in nobody's way.
        fs.Reset();
        if (found == before) {
          EXPECT_TRUE(call(path, directory + "/tmp").ok());
          EXPECT_EQ(Look(path), after);
        }
      }
    }
  }
}

TEST_F(FileHelpersTest, ReplaceFileIsAtomicUnderEveryFault) {
  BreakEverywhere(
      fs_, [&] { return NextDirectory(); }, kOld, kNew,
      [&](const std::string& path, const std::string& temporary) {
        return ReplaceFile(fs_, path, temporary, Bytes(kNew));
      });
}

TEST_F(FileHelpersTest, CreateFileAtomicallyIsAtomicUnderEveryFault) {
  BreakEverywhere(
      fs_, [&] { return NextDirectory(); }, "missing", kNew,
      [&](const std::string& path, const std::string& temporary) {
        return CreateFileAtomically(fs_, path, temporary, Bytes(kNew));
      });
}

TEST_F(FileHelpersTest, ReplaceFileSyncsFileBeforeAndDirectoryAfterRename) {
  ASSERT_TRUE(
      ReplaceFile(fs_, temp_.Join("file"), temp_.Join("tmp"), Bytes(kNew))
          .ok());
  EXPECT_EQ(fs_.LogText(),
            "1: create tmp\n2: write tmp @0 +44\n3: fsync tmp\n4: close tmp\n"
            "5: rename tmp -> file\n6: fsync-directory .\n");
}

TEST_F(FileHelpersTest, ReplaceFileTakesOverALeftoverTemporary) {
  ASSERT_TRUE(WriteNewFile(fs_, temp_.Join("tmp"), Bytes("left over")).ok());
  ASSERT_TRUE(
      ReplaceFile(fs_, temp_.Join("file"), temp_.Join("tmp"), Bytes(kNew))
          .ok());
  EXPECT_EQ(Look(temp_.Join("file")), kNew);
  EXPECT_EQ(Look(temp_.Join("tmp")), "missing");
}

TEST_F(FileHelpersTest, CreateFileAtomicallyNeverReplaces) {
  ASSERT_TRUE(WriteNewFile(fs_, temp_.Join("file"), Bytes(kOld)).ok());
  const absl::Status status = CreateFileAtomically(
      fs_, temp_.Join("file"), temp_.Join("tmp"), Bytes(kNew));
  EXPECT_TRUE(absl::IsAlreadyExists(status)) << status;
  EXPECT_EQ(Look(temp_.Join("file")), kOld);
  EXPECT_EQ(Look(temp_.Join("tmp")), "missing");
}

TEST_F(FileHelpersTest, CreateFileAtomicallyWorksWithoutHardLinks) {
  for (const int error : {EPERM, EOPNOTSUPP}) {
    const std::string directory = NextDirectory();
    fs_.set_script(FaultOn(FileOperation::kLink, "file", Fault::Fail(error)));
    const std::string path = directory + "/file";
    EXPECT_TRUE(
        CreateFileAtomically(fs_, path, directory + "/tmp", Bytes(kNew)).ok());
    EXPECT_EQ(Look(path), kNew);
    EXPECT_EQ(Look(directory + "/tmp"), "missing");
    EXPECT_TRUE(absl::IsAlreadyExists(
        CreateFileAtomically(fs_, path, directory + "/tmp", Bytes(kOld))));
    EXPECT_EQ(Look(path), kNew);
  }
}

TEST_F(FileHelpersTest, ManyThreadsCreateAFileOnce) {
  std::vector<absl::Status> results(16);
  std::vector<std::thread> threads;
  for (std::size_t i = 0; i < results.size(); ++i) {
    threads.emplace_back([&, i] {
      results[i] = CreateFileAtomically(*PosixFileSystem(), temp_.Join("epoch"),
                                        temp_.Join("tmp" + std::to_string(i)),
                                        Bytes(std::to_string(i)));
    });
  }
  for (std::thread& thread : threads) thread.join();
  std::optional<std::size_t> winner;
  for (std::size_t i = 0; i < results.size(); ++i) {
    if (results[i].ok()) {
      EXPECT_FALSE(winner.has_value());
      winner = i;
    } else {
      EXPECT_TRUE(absl::IsAlreadyExists(results[i])) << results[i];
    }
  }
  ASSERT_TRUE(winner.has_value());
  EXPECT_EQ(Look(temp_.Join("epoch")), std::to_string(*winner));
}

TEST_F(FileHelpersTest, WriteNewFileLeavesNothingBehindWhenItFails) {
  for (std::int64_t k = 2; k <= 4; ++k) {  // write, fsync, close
    fs_.Reset();
    fs_.set_script(FaultAt(k, Fault::Tear(ENOSPC)));
    const absl::Status status =
        WriteNewFile(fs_, temp_.Join("file"), Bytes(kNew));
    EXPECT_TRUE(absl::IsResourceExhausted(status)) << status;
    EXPECT_EQ(Look(temp_.Join("file")), "missing");
  }
}

TEST_F(FileHelpersTest, ReadFileRefusesMoreThanItsBound) {
  ASSERT_TRUE(WriteNewFile(fs_, temp_.Join("file"), Bytes("12345")).ok());
  EXPECT_EQ(Text(*ReadFile(fs_, temp_.Join("file"), 5)), "12345");
  const absl::Status status = ReadFile(fs_, temp_.Join("file"), 4).status();
  EXPECT_TRUE(absl::IsDataLoss(status));
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("expected at most 4 bytes, found 5"));
  EXPECT_EQ(Text(*ReadFileOfSize(fs_, temp_.Join("file"), 5)), "12345");
  for (const std::uint64_t wrong : {0, 4, 6}) {
    EXPECT_TRUE(absl::IsDataLoss(
        ReadFileOfSize(fs_, temp_.Join("file"), wrong).status()));
  }
}

TEST_F(FileHelpersTest, ReadFileRefusesABombBeforeAllocating) {
  ASSERT_TRUE(WriteNewFile(fs_, temp_.Join("file"), {}).ok());
  ASSERT_EQ(truncate(temp_.Join("file").c_str(), off_t{1} << 40), 0);
  EXPECT_TRUE(
      absl::IsDataLoss(ReadFile(fs_, temp_.Join("file"), 1 << 20).status()));
}

TEST_F(FileHelpersTest, ReadFileReadsEachByteOnce) {
  ASSERT_TRUE(WriteNewFile(fs_, temp_.Join("file"), Bytes(kNew)).ok());
  fs_.Reset();
  ASSERT_TRUE(ReadFile(fs_, temp_.Join("file"), 1000).ok());
  EXPECT_EQ(fs_.bytes_read(), sizeof(kNew) - 1);
  EXPECT_EQ(fs_.count(FileOperation::kRead), 1);
}

TEST_F(FileHelpersTest, FileThatShrinksBetweenSizeAndReadIsDataLoss) {
  const std::string path = temp_.Join("file");
  ASSERT_TRUE(WriteNewFile(fs_, path, Bytes("0123456789")).ok());
  fs_.Reset();
  fs_.set_after_each([&](const Operation& operation) {
    if (operation.kind == FileOperation::kSize) {
      EXPECT_EQ(truncate(path.c_str(), 4), 0);
    }
  });
  const absl::Status status = ReadFile(fs_, path, 1000).status();
  EXPECT_TRUE(absl::IsDataLoss(status)) << status;
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("expected 10 bytes, found 4"));
}

TEST_F(FileHelpersTest, ReadFileRefusesASymbolicLink) {
  ASSERT_TRUE(WriteNewFile(fs_, temp_.Join("file"), Bytes("x")).ok());
  ASSERT_EQ(symlink("file", temp_.Join("link").c_str()), 0);
  EXPECT_TRUE(
      absl::IsDataLoss(ReadFile(fs_, temp_.Join("link"), 100).status()));
}

// User report 52, on file systems whose clients remember missing names.
TEST_F(FileHelpersTest, EnsureDirectorySurvivesSpuriousErrors) {
  const std::string path = temp_.Join("d");
  ASSERT_TRUE(fs_.MakeDirectory(path).ok());
  // mkdir says EEXIST, lstat ENOENT until the parent is read.
  bool listed = false;
  fs_.Reset();
  fs_.set_script([&](const Operation& operation) {
    if (operation.kind == FileOperation::kList) listed = true;
    return operation.kind == FileOperation::kStat && !listed
               ? Fault::Fail(ENOENT)
               : Fault::None();
  });
  EXPECT_TRUE(EnsureDirectory(fs_, path).ok());
  EXPECT_TRUE(listed);

  // mkdir says ENOENT although the parent is there.
  fs_.Reset();
  fs_.set_script(FaultAt(1, Fault::Fail(ENOENT)));
  EXPECT_TRUE(EnsureDirectory(fs_, temp_.Join("e")).ok());

  // mkdir did its work and says EEXIST (a repeated request).
  fs_.Reset();
  fs_.set_script(FaultAt(1, Fault::PerformThenFail(EEXIST)));
  EXPECT_TRUE(EnsureDirectory(fs_, temp_.Join("f")).ok());
}

TEST_F(FileHelpersTest, EnsureDirectoryNamesWhatIsInTheWay) {
  ASSERT_TRUE(WriteNewFile(fs_, temp_.Join("file"), Bytes("x")).ok());
  ASSERT_EQ(symlink("nowhere", temp_.Join("link").c_str()), 0);
  EXPECT_TRUE(absl::IsAlreadyExists(EnsureDirectory(fs_, temp_.Join("file"))));
  EXPECT_TRUE(absl::IsAlreadyExists(EnsureDirectory(fs_, temp_.Join("link"))));
  // A parent that really is missing ends after a few tries.
  EXPECT_TRUE(absl::IsNotFound(EnsureDirectory(fs_, temp_.Join("no/d"))));
}

TEST_F(FileHelpersTest, RemoveTreeRemovesLinksAndNotWhatTheyPointTo) {
  ASSERT_TRUE(fs_.MakeDirectory(temp_.Join("keep")).ok());
  ASSERT_TRUE(WriteNewFile(fs_, temp_.Join("keep/file"), Bytes("x")).ok());
  ASSERT_TRUE(fs_.MakeDirectory(temp_.Join("tree")).ok());
  ASSERT_TRUE(fs_.MakeDirectory(temp_.Join("tree/sub")).ok());
  ASSERT_TRUE(WriteNewFile(fs_, temp_.Join("tree/sub/a"), Bytes("x")).ok());
  ASSERT_EQ(symlink("../keep", temp_.Join("tree/link").c_str()), 0);
  ASSERT_EQ(mkfifo(temp_.Join("tree/fifo").c_str(), 0644), 0);
  EXPECT_TRUE(RemoveTree(fs_, temp_.Join("tree")).ok());
  EXPECT_TRUE(absl::IsNotFound(fs_.Stat(temp_.Join("tree")).status()));
  EXPECT_EQ(Look(temp_.Join("keep/file")), "x");
  EXPECT_TRUE(RemoveTree(fs_, temp_.Join("tree")).ok());  // again: no error
  EXPECT_TRUE(RemoveTree(fs_, temp_.Join("keep/file")).ok());
}

TEST_F(FileHelpersTest, RemoveTreeGoesOnAfterAnErrorAndReportsIt) {
  ASSERT_TRUE(fs_.MakeDirectory(temp_.Join("tree")).ok());
  for (const char* name : {"a", "b", "c"}) {
    ASSERT_TRUE(WriteNewFile(fs_, temp_.Join("tree/") + name, Bytes("x")).ok());
  }
  fs_.set_script(FaultOn(FileOperation::kRemoveFile, "b", Fault::Fail(EIO)));
  EXPECT_TRUE(absl::IsUnavailable(RemoveTree(fs_, temp_.Join("tree"))));
  fs_.Reset();
  EXPECT_THAT(*fs_.List(temp_.Join("tree")), testing::ElementsAre("b"));
  // Names that another gc removed meanwhile are no error.
  fs_.set_script(
      FaultOn(FileOperation::kRemoveFile, "b", Fault::PerformThenFail(ENOENT)));
  EXPECT_TRUE(RemoveTree(fs_, temp_.Join("tree")).ok());
}

}  // namespace
}  // namespace kedge
