// Goal: a reader never sees half a step. Method: a small publish (three data
// files, MANIFEST, COMMIT) is broken at every operation in every way, and after
// every single operation a reader looks at the target.

#include "kedge/engine/io/staging.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <memory>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kedge/tests/support/fault_file_system.h"
#include "kedge/tests/support/temp_directory.h"

namespace kedge {
namespace {

using testing::AnyOf;
using testing::ElementsAre;
using testing::HasSubstr;

constexpr std::size_t kDataBytes = 3000;

std::span<const std::byte> Bytes(absl::string_view text) {
  return std::as_bytes(std::span(text.data(), text.size()));
}

std::string Read(const std::string& path) {
  const absl::StatusOr<std::vector<std::byte>> bytes =
      ReadFile(*PosixFileSystem(), path, 1 << 20);
  if (!bytes.ok()) return std::string(bytes.status().message());
  return std::string(reinterpret_cast<const char*>(bytes->data()),
                     bytes->size());
}

std::string Data(int i) { return std::string(kDataBytes, 'a' + i); }

// Writes the data file in two parts, as an anchor writer does.
absl::Status WriteData(StagingDirectory& staging, int i) {
  absl::StatusOr<File*> file =
      staging.AddFile("data-" + std::to_string(i), kDataBytes);
  if (!file.ok()) return file.status();
  const std::string data = Data(i);
  const absl::Status status = WriteAll(**file, 1000, Bytes(data).subspan(1000));
  if (!status.ok()) return status;
  return WriteAll(**file, 0, Bytes(data).first(1000));
}

// What a reader concludes: a step with COMMIT is there as a whole, or it is
// damaged. Real readers know by hashes; here the bytes are known.
std::string ReaderSees(const std::string& target) {
  if (!PosixFileSystem()->Stat(target).ok()) return "nothing";
  if (Read(target + "/COMMIT") != "commit") return "no COMMIT";
  if (Read(target + "/MANIFEST") != "manifest") return "bad MANIFEST";
  for (int i = 0; i < 3; ++i) {
    if (Read(target + "/data-" + std::to_string(i)) != Data(i)) {
      return "bad data";
    }
  }
  return "step";
}

class StagingTest : public testing::Test {
 protected:
  void SetUp() override {
    ASSERT_TRUE(PosixFileSystem()->MakeDirectory(temp_.Join(".staging")).ok());
  }

  std::string Staging() const { return temp_.Join(".staging/step.1"); }
  std::string Target() const { return temp_.Join("step"); }

  // As a writer does: by what the commit record says.
  absl::StatusOr<bool> IsOurs() {
    const absl::StatusOr<std::vector<std::byte>> commit =
        ReadFile(fs_, Target() + "/COMMIT", 100);
    if (!commit.ok()) return commit.status();
    return commit->size() == 6;
  }

  absl::Status Publish(IoPool& pool) {
    absl::StatusOr<std::unique_ptr<StagingDirectory>> staging =
        StagingDirectory::Create(&fs_, Staging());
    if (!staging.ok()) return staging.status();
    for (int i = 0; i < 3; ++i) {
      const absl::Status status = WriteData(**staging, i);
      if (!status.ok()) return status;
    }
    absl::Status status = (*staging)->SealFiles(pool);
    if (!status.ok()) return status;
    status = (*staging)->WriteCommit(Bytes("manifest"), Bytes("commit"), pool);
    if (!status.ok()) return status;
    status = (*staging)->PublishAs(Target(), [this] { return IsOurs(); });
    if (status.ok()) parent_sync_status_ = (*staging)->parent_sync_status();
    return status;
  }

  // Back to an empty store.
  void Clear() {
    ASSERT_TRUE(RemoveTree(*PosixFileSystem(), Target()).ok());
    ASSERT_TRUE(RemoveTree(*PosixFileSystem(), Staging()).ok());
    fs_.Reset();
  }

  std::vector<Operation> CleanLog() {
    EXPECT_TRUE(Publish(pool_).ok());
    std::vector<Operation> log = fs_.log();
    Clear();
    return log;
  }

  TempDirectory temp_;
  FaultFileSystem fs_{PosixFileSystem(), temp_.path()};
  IoPool pool_{1};
  absl::Status parent_sync_status_;
};

// User report 44: each file, then the directory, then the rename, then the
// parent: nothing becomes visible before it is durable.
TEST_F(StagingTest, SyncsEverythingBeforeTheRenameAndTheParentAfter) {
  ASSERT_TRUE(Publish(pool_).ok());
  EXPECT_EQ(ReaderSees(Target()), "step");
  const std::vector<Operation> log = fs_.log();
  std::vector<std::string> synced;
  std::vector<std::string> closed;
  bool renamed = false;
  std::vector<std::string> synced_after;
  for (const Operation& operation : log) {
    if (operation.kind == FileOperation::kSync) {
      EXPECT_FALSE(renamed);
      synced.push_back(operation.path);
    } else if (operation.kind == FileOperation::kClose) {
      closed.push_back(operation.path);
    } else if (operation.kind == FileOperation::kSyncDirectory) {
      (renamed ? synced_after : synced).push_back(operation.path);
    } else if (operation.kind == FileOperation::kWrite) {
      EXPECT_EQ(std::count(synced.begin(), synced.end(), operation.path), 0)
          << "written after its fsync: " << operation.ToString();
    } else if (operation.kind == FileOperation::kRename) {
      renamed = true;
      EXPECT_EQ(operation.to, "step");
    }
  }
  const std::string s = ".staging/step.1";
  EXPECT_THAT(synced, ElementsAre(s + "/data-0", s + "/data-1", s + "/data-2",
                                  s + "/MANIFEST", s + "/COMMIT", s));
  EXPECT_THAT(closed, ElementsAre(s + "/data-0", s + "/data-1", s + "/data-2",
                                  s + "/MANIFEST", s + "/COMMIT"));
  EXPECT_THAT(synced_after, ElementsAre("."));
  EXPECT_TRUE(parent_sync_status_.ok());
  EXPECT_THAT(*PosixFileSystem()->List(temp_.Join(".staging")), ElementsAre());
}

TEST_F(StagingTest, ReaderSeesNothingOrTheStepAfterEveryOperation) {
  int looks = 0;
  int steps = 0;
  fs_.set_after_each([&](const Operation& operation) {
    const std::string seen = ReaderSees(Target());
    EXPECT_THAT(seen, AnyOf("nothing", "step")) << operation.ToString();
    ++looks;
    steps += seen == "step";
  });
  IoPool pool(8);
  ASSERT_TRUE(Publish(pool).ok());
  EXPECT_GT(looks, 20);
  EXPECT_EQ(steps, 2);  // after the rename, and after the parent's fsync
}

// Fails, tears, shortens, drops, performs-then-fails every k-th operation, once
// and from then on, and stops for ever after it.
TEST_F(StagingTest, TargetIsNeverHalfVisibleUnderAnyFault) {
  const std::vector<Operation> clean = CleanLog();
  ASSERT_GT(clean.size(), 20u);
  const Fault kFaults[] = {Fault::Fail(EIO),    Fault::Fail(ENOSPC),
                           Fault::Fail(ESTALE), Fault::PerformThenFail(EIO),
                           Fault::Drop(),       Fault::Shorten(),
                           Fault::Tear(EIO),    Fault::Tear(ENOSPC)};
  int failed = 0;
  int published = 0;
  for (const Operation& operation : clean) {
    for (const Fault& fault : kFaults) {
      for (const bool once : {true, false}) {
        SCOPED_TRACE(testing::Message()
                     << operation.ToString() << ", fault "
                     << static_cast<int>(fault.kind) << " errno " << fault.error
                     << (once ? " once" : " from then on"));
        // A lost write is not seen by its writer; readers find it by its hash.
        const bool silent = fault.kind == Fault::Kind::kDrop;
        fs_.set_script(once ? FaultAt(operation.number, fault)
                            : FaultFrom(operation.number, fault));
        fs_.set_after_each([&](const Operation& now) {
          if (!silent) {
            EXPECT_THAT(ReaderSees(Target()), AnyOf("nothing", "step"))
                << now.ToString();
          }
        });
        const absl::Status status = Publish(pool_);
        const std::string seen = ReaderSees(Target());
        if (status.ok()) ++published;
        if (!status.ok()) ++failed;
        if (!silent) {
          EXPECT_THAT(seen, AnyOf("nothing", "step"));
          if (status.ok()) {
            EXPECT_EQ(seen, "step");
          }
          // Not published and yet visible only if the outcome is unknown.
          if (!status.ok() && seen == "step") {
            EXPECT_THAT(std::string(status.message()),
                        HasSubstr("outcome unknown"));
          }
          if (fault.kind == Fault::Kind::kShorten) {
            EXPECT_TRUE(status.ok()) << status;
          }
        }
        // A failure that the process outlives leaves nothing, but a directory
        // whose mkdir lied and a file that could not be removed.
        if (once && !status.ok() && operation.number > 1) {
          EXPECT_TRUE(
              absl::IsNotFound(PosixFileSystem()->Stat(Staging()).status()))
              << status;
        }
        Clear();
      }
    }
  }
  EXPECT_GT(failed, 100);
  EXPECT_GT(published, 20);
}

TEST_F(StagingTest, CrashAfterAnyOperationLeavesOldOrNew) {
  const auto count = static_cast<std::int64_t>(CleanLog().size());
  for (std::int64_t k = 0; k <= count; ++k) {
    fs_.set_script(StopAfter(k));
    Publish(pool_).IgnoreError();
    const bool renamed = k >= count - 1;  // the rename is the last but one
    EXPECT_EQ(ReaderSees(Target()), renamed ? "step" : "nothing") << k;
    Clear();
  }
}

// User report 48: an error of fsync or close of one part must not get lost.
TEST_F(StagingTest, FailedSyncOrCloseOfOneFilePoisons) {
  for (const FileOperation kind :
       {FileOperation::kSync, FileOperation::kClose}) {
    for (int i = 0; i < 3; ++i) {
      auto staging = StagingDirectory::Create(&fs_, Staging());
      ASSERT_TRUE(staging.ok());
      for (int j = 0; j < 3; ++j) {
        ASSERT_TRUE(WriteData(**staging, j).ok());
      }
      fs_.set_script(
          FaultOn(kind, "data-" + std::to_string(i), Fault::Fail(EIO)));
      const absl::Status status = (*staging)->SealFiles(pool_);
      EXPECT_TRUE(absl::IsUnavailable(status)) << status;
      EXPECT_THAT(std::string(status.message()), HasSubstr("EIO"));
      // Healthy again: still nothing may be published from here.
      fs_.Reset();
      EXPECT_TRUE(absl::IsFailedPrecondition((*staging)->SealFiles(pool_)));
      EXPECT_TRUE(absl::IsFailedPrecondition(
          (*staging)->WriteCommit(Bytes("manifest"), Bytes("commit"), pool_)));
      EXPECT_TRUE(absl::IsFailedPrecondition(
          (*staging)->PublishAs(Target(), [] { return true; })));
      EXPECT_TRUE(
          absl::IsFailedPrecondition((*staging)->AddFile("x", 0).status()));
      EXPECT_EQ(fs_.operation_count(), 0);
      staging->reset();
      EXPECT_EQ(ReaderSees(Target()), "nothing");
      Clear();
    }
  }
}

TEST_F(StagingTest, FailedWriteThatItsCallerIgnoredPoisons) {
  auto staging = StagingDirectory::Create(&fs_, Staging());
  ASSERT_TRUE(staging.ok());
  fs_.set_script(FaultOn(FileOperation::kWrite, "data-0", Fault::Fail(EIO)));
  WriteData(**staging, 0).IgnoreError();
  EXPECT_TRUE(absl::IsFailedPrecondition((*staging)->SealFiles(pool_)));
}

// User report 56: ENOSPC at each write (and at each reservation) in turn.
TEST_F(StagingTest, FullDiskAtAnyWriteIsReportedAndLeavesNothing) {
  int tried = 0;
  for (const Operation& operation : CleanLog()) {
    if (operation.kind != FileOperation::kWrite &&
        operation.kind != FileOperation::kResize) {
      continue;
    }
    ++tried;
    fs_.set_script(FaultAt(operation.number, Fault::Tear(ENOSPC)));
    const absl::Status status = Publish(pool_);
    EXPECT_TRUE(absl::IsResourceExhausted(status)) << status;
    EXPECT_THAT(std::string(status.message()),
                testing::AllOf(HasSubstr(operation.path), HasSubstr("ENOSPC"),
                               HasSubstr("free some space")));
    EXPECT_EQ(ReaderSees(Target()), "nothing");
    EXPECT_TRUE(absl::IsNotFound(PosixFileSystem()->Stat(Staging()).status()));
    fs_.Reset();
    EXPECT_TRUE(Publish(pool_).ok());  // the disk has room again
    Clear();
  }
  EXPECT_EQ(tried, 3 + 6 + 2);
}

TEST_F(StagingTest, RenameThatWorkedButFailedIsASuccess) {
  for (const int error : {EIO, ESTALE, ENOENT, ENOTEMPTY}) {
    fs_.set_script(
        FaultOn(FileOperation::kRename, "step", Fault::PerformThenFail(error)));
    const absl::Status status = Publish(pool_);
    EXPECT_TRUE(status.ok()) << status;
    EXPECT_EQ(ReaderSees(Target()), "step");
    Clear();
  }
}

TEST_F(StagingTest, RenameThatFailedTellsItsReason) {
  fs_.set_script(FaultOn(FileOperation::kRename, "step", Fault::Fail(ENOSPC)));
  const absl::Status status = Publish(pool_);
  EXPECT_TRUE(absl::IsResourceExhausted(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("not renamed"));
  EXPECT_EQ(ReaderSees(Target()), "nothing");
  EXPECT_TRUE(absl::IsNotFound(PosixFileSystem()->Stat(Staging()).status()));
}

TEST_F(StagingTest, UnknownOutcomeIsSaidAndNothingIsRemoved) {
  fs_.set_script([&](const Operation& operation) {
    if (operation.kind == FileOperation::kRename) return Fault::Fail(EIO);
    if (operation.kind == FileOperation::kOpenForRead) return Fault::Fail(EIO);
    return Fault::None();
  });
  const absl::Status status = Publish(pool_);
  EXPECT_TRUE(absl::IsUnavailable(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("outcome unknown"));
  // A server may still carry the rename out: what it would show must be whole.
  fs_.Reset();
  ASSERT_TRUE(fs_.Rename(Staging(), Target()).ok());
  EXPECT_EQ(ReaderSees(Target()), "step");
}

TEST_F(StagingTest, VanishedStagingDirectoryIsAnUnknownOutcome) {
  fs_.set_script([&](const Operation& operation) {
    if (operation.kind == FileOperation::kRename) {
      return Fault::PerformThenFail(EIO);
    }
    // This client still believes that there is no target.
    if (operation.path == "step" || operation.path == "step/COMMIT") {
      return Fault::Fail(ENOENT);
    }
    return Fault::None();
  });
  const absl::Status status = Publish(pool_);
  EXPECT_TRUE(absl::IsUnavailable(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("outcome unknown"));
  EXPECT_EQ(ReaderSees(Target()), "step");

  // The same if the caller takes a missing target for "not ours".
  Clear();
  fs_.set_script([&](const Operation& operation) {
    if (operation.kind == FileOperation::kRename) {
      return Fault::PerformThenFail(EIO);
    }
    return operation.path == "step" ? Fault::Fail(ENOENT) : Fault::None();
  });
  auto staging = StagingDirectory::Create(&fs_, Staging());
  ASSERT_TRUE(staging.ok());
  ASSERT_TRUE((*staging)->SealFiles(pool_).ok());
  ASSERT_TRUE((*staging)->WriteCommit(Bytes("m"), Bytes("c"), pool_).ok());
  EXPECT_THAT(
      std::string(
          (*staging)->PublishAs(Target(), [] { return false; }).message()),
      HasSubstr("outcome unknown"));
  EXPECT_TRUE((*staging)->outcome_unknown());
}

TEST_F(StagingTest, AnotherStepAtTheTargetIsKeptAndReported) {
  ASSERT_TRUE(PosixFileSystem()->MakeDirectory(Target()).ok());
  ASSERT_TRUE(WriteNewFile(*PosixFileSystem(), Target() + "/COMMIT",
                           Bytes("somebody else's"))
                  .ok());
  const absl::Status status = Publish(pool_);
  EXPECT_TRUE(absl::IsAlreadyExists(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr(Target()));
  EXPECT_EQ(Read(Target() + "/COMMIT"), "somebody else's");
  EXPECT_TRUE(absl::IsNotFound(PosixFileSystem()->Stat(Staging()).status()));
}

TEST_F(StagingTest, FileAtTheTargetIsKeptAndReported) {
  ASSERT_TRUE(WriteNewFile(*PosixFileSystem(), Target(), Bytes("x")).ok());
  const absl::Status status = Publish(pool_);
  EXPECT_TRUE(absl::IsAlreadyExists(status)) << status;
  EXPECT_EQ(Read(Target()), "x");
}

TEST_F(StagingTest, DirectoryWithoutCommitAtTheTargetIsKeptAndReported) {
  ASSERT_TRUE(PosixFileSystem()->MakeDirectory(Target()).ok());
  ASSERT_TRUE(
      WriteNewFile(*PosixFileSystem(), Target() + "/notes", Bytes("x")).ok());
  const absl::Status status = Publish(pool_);
  EXPECT_TRUE(absl::IsAlreadyExists(status)) << status;
  EXPECT_EQ(Read(Target() + "/notes"), "x");
}

TEST_F(StagingTest, FailedSyncOfTheParentIsAWarningNotAFailure) {
  fs_.set_script([&](const Operation& operation) {
    return operation.kind == FileOperation::kSyncDirectory &&
                   operation.path == "."
               ? Fault::Fail(EIO)
               : Fault::None();
  });
  EXPECT_TRUE(Publish(pool_).ok());
  EXPECT_EQ(ReaderSees(Target()), "step");
  EXPECT_TRUE(absl::IsUnavailable(parent_sync_status_));
}

TEST_F(StagingTest, TakenStagingNameIsAlreadyExists) {
  ASSERT_TRUE(PosixFileSystem()->MakeDirectory(Staging()).ok());
  EXPECT_TRUE(absl::IsAlreadyExists(
      StagingDirectory::Create(&fs_, Staging()).status()));
  // And it is not ours to remove.
  EXPECT_TRUE(PosixFileSystem()->Stat(Staging()).ok());
}

TEST_F(StagingTest, NamesThatAreNoDataFilesAreRefused) {
  auto staging = StagingDirectory::Create(&fs_, Staging());
  ASSERT_TRUE(staging.ok());
  for (const char* name :
       {"", ".", "..", "a/b", "../x", "/etc/passwd", "MANIFEST", "COMMIT"}) {
    EXPECT_TRUE(absl::IsInvalidArgument((*staging)->AddFile(name, 1).status()))
        << name;
  }
  ASSERT_TRUE((*staging)->AddFile("a", 1).ok());
  EXPECT_TRUE(absl::IsAlreadyExists((*staging)->AddFile("a", 1).status()));
}

TEST_F(StagingTest, FileThatChangedItsSizeIsRefused) {
  auto staging = StagingDirectory::Create(&fs_, Staging());
  ASSERT_TRUE(staging.ok());
  ASSERT_TRUE(WriteData(**staging, 0).ok());
  ASSERT_EQ(truncate((Staging() + "/data-0").c_str(), 10), 0);
  const absl::Status status = (*staging)->SealFiles(pool_);
  EXPECT_TRUE(absl::IsDataLoss(status)) << status;
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("expected 3000 bytes, found 10"));
}

// A writer that is alone lets the commit seal its files.
TEST_F(StagingTest, CommitSealsWhatIsNotSealed) {
  auto staging = StagingDirectory::Create(&fs_, Staging());
  ASSERT_TRUE(staging.ok());
  for (int i = 0; i < 3; ++i) ASSERT_TRUE(WriteData(**staging, i).ok());
  ASSERT_TRUE(
      (*staging)->WriteCommit(Bytes("manifest"), Bytes("commit"), pool_).ok());
  int synced = 0;
  for (const Operation& operation : fs_.log()) {
    if (operation.kind == FileOperation::kSync) ++synced;
  }
  EXPECT_EQ(synced, 5);  // MANIFEST and COMMIT, too
  EXPECT_TRUE(absl::IsFailedPrecondition((*staging)->SealFiles(pool_)));

  // And a sync that fails there poisons as any other.
  auto poisoned = StagingDirectory::Create(&fs_, Staging() + "b");
  ASSERT_TRUE(poisoned.ok());
  absl::StatusOr<File*> file = (*poisoned)->AddFile("data-0", 0);
  ASSERT_TRUE(file.ok());
  fs_.set_script(FaultOn(FileOperation::kSync, "data-0", Fault::Fail(EIO)));
  EXPECT_TRUE(absl::IsUnavailable(
      (*poisoned)->WriteCommit(Bytes("m"), Bytes("c"), pool_)));
  EXPECT_TRUE(absl::IsFailedPrecondition(
      (*poisoned)->PublishAs(Target(), [] { return false; })));
}

TEST_F(StagingTest, CallsOutOfOrderAreRefused) {
  auto staging = StagingDirectory::Create(&fs_, Staging());
  ASSERT_TRUE(staging.ok());
  const auto ours = [] { return false; };
  EXPECT_TRUE(
      absl::IsFailedPrecondition((*staging)->PublishAs(Target(), ours)));
  ASSERT_TRUE((*staging)->SealFiles(pool_).ok());  // a step without data files
  EXPECT_TRUE(absl::IsFailedPrecondition((*staging)->AddFile("a", 1).status()));
  EXPECT_TRUE(
      absl::IsFailedPrecondition((*staging)->PublishAs(Target(), ours)));
  ASSERT_TRUE((*staging)->WriteCommit(Bytes("m"), Bytes("c"), pool_).ok());
  ASSERT_TRUE((*staging)->PublishAs(Target(), ours).ok());
  EXPECT_TRUE(
      absl::IsFailedPrecondition((*staging)->PublishAs(Target(), ours)));
  staging->reset();
  EXPECT_THAT(*PosixFileSystem()->List(Target()),
              ElementsAre("COMMIT", "MANIFEST"));
}

TEST_F(StagingTest, AdoptedDirectoryAppearsWithTheOuterOneOrNotAtAll) {
  for (const bool publish : {true, false}) {
    auto outer = StagingDirectory::Create(&fs_, Staging());
    ASSERT_TRUE(outer.ok());
    auto inner = StagingDirectory::Create(&fs_, Staging() + "/anchor");
    ASSERT_TRUE(inner.ok());
    ASSERT_TRUE(WriteData(**inner, 1).ok());
    ASSERT_TRUE((*inner)->SealFiles(pool_).ok());
    ASSERT_TRUE((*inner)->WriteCommit(Bytes("m"), Bytes("c"), pool_).ok());
    (*outer)->Adopt(*std::move(inner));
    for (int i = 0; i < 3; ++i) ASSERT_TRUE(WriteData(**outer, i).ok());
    ASSERT_TRUE((*outer)->SealFiles(pool_).ok());
    ASSERT_TRUE(
        (*outer)->WriteCommit(Bytes("manifest"), Bytes("commit"), pool_).ok());
    if (publish) {
      ASSERT_TRUE((*outer)->PublishAs(Target(), [] { return false; }).ok());
    }
    outer->reset();
    EXPECT_EQ(ReaderSees(Target()), publish ? "step" : "nothing");
    EXPECT_EQ(PosixFileSystem()->Stat(Target() + "/anchor/COMMIT").ok(),
              publish);
    EXPECT_THAT(*PosixFileSystem()->List(temp_.Join(".staging")),
                ElementsAre());
    Clear();
  }
}

// Data files through 8 threads, each piece its own task.
TEST_F(StagingTest, FilesAreWrittenConcurrently) {
  IoPool pool(8);
  auto staging = StagingDirectory::Create(PosixFileSystem(), Staging());
  ASSERT_TRUE(staging.ok());
  std::vector<File*> files;
  for (int i = 0; i < 4; ++i) {
    auto file = (*staging)->AddFile("data-" + std::to_string(i), 64 * 1024);
    ASSERT_TRUE(file.ok());
    files.push_back(*file);
  }
  {
    IoPool::Batch batch(&pool);
    for (int piece = 0; piece < 64; ++piece) {
      for (File* file : files) {
        batch.Submit([file, piece] {
          const std::vector<std::byte> bytes(1024, std::byte(piece));
          return WriteAll(*file, piece * 1024, bytes);
        });
      }
    }
    ASSERT_TRUE(batch.Wait().ok());
  }
  ASSERT_TRUE((*staging)->SealFiles(pool).ok());
  ASSERT_TRUE((*staging)->WriteCommit(Bytes("m"), Bytes("c"), pool_).ok());
  ASSERT_TRUE((*staging)->PublishAs(Target(), [] { return false; }).ok());
  for (int i = 0; i < 4; ++i) {
    const std::string text = Read(Target() + "/data-" + std::to_string(i));
    ASSERT_EQ(text.size(), 64u * 1024);
    for (int piece = 0; piece < 64; ++piece) {
      EXPECT_EQ(text[piece * 1024 + 1023], static_cast<char>(piece));
    }
  }
}

}  // namespace
}  // namespace kedge
