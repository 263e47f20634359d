// Goal: gc and the writer's retention keep what anchors and leases need, drop
// the rest, and are safe beside readers, writers, each other and their own
// death. Method: small stores through a file system that fails, stops, or calls
// somebody else at every single operation of a gc; fsck judges what is left,
// and a plain reader reads every version that must be there.

#include "kedge/writer/retention.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <map>
#include <set>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "kedge/engine/io/lease.h"
#include "kedge/engine/io/store.h"
#include "kedge/format/layout.h"
#include "kedge/reader/fsck.h"
#include "kedge/tests/support/fault_file_system.h"
#include "kedge/tests/support/sanitized.h"
#include "kedge/tests/support/temp_directory.h"
#include "kedge/writer/snapshot_writer.h"

namespace kedge {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using Steps = std::vector<std::uint64_t>;

constexpr std::chrono::seconds kTtl(600);
// Between the operations that have a fault.
constexpr std::int64_t kStride = kSanitized ? 9 : 1;

// Many thousand small files: a disk would only take time.
[[maybe_unused]] const bool kInMemory = [] {
  struct stat info {};
  return getenv("TMPDIR") == nullptr && stat("/dev/shm", &info) == 0 &&
         access("/dev/shm", W_OK) == 0 && setenv("TMPDIR", "/dev/shm", 0) == 0;
}();

// Steps from `first` to `last`.
Steps Range(std::uint64_t first, std::uint64_t last) {
  Steps steps;
  for (std::uint64_t step = first; step <= last; ++step) steps.push_back(step);
  return steps;
}

// A store at temp/store and its trainer.
class TinyRun {
 public:
  explicit TinyRun(const std::string& path, std::uint64_t anchor_every = 3)
      : path_(path), anchor_every_(anchor_every), fs_(PosixFileSystem(), path) {
    options_.store_path = path;
    options_.fs = &fs_;  // which makes fsync cheap
    options_.io_threads = 1;
    options_.encode_threads = 1;
    auto writer = SnapshotWriter::Create(options_, {}, Tensors());
    EXPECT_TRUE(writer.ok()) << writer.status();
    writer_ = *std::move(writer);
  }
  void PublishUpTo(std::uint64_t last) {
    for (std::uint64_t step = writer_->held().step + 1; step <= last; ++step) {
      Publish(step);
    }
  }
  void Publish(std::uint64_t step) {
    ++weights_[step % weights_.size()];
    PublishOptions publish;
    publish.anchor = step % anchor_every_ == 0;
    const auto result = writer_->Publish(step, publish);
    ASSERT_TRUE(result.ok()) << result.status();
    ASSERT_TRUE(result->anchor_status.ok()) << result->anchor_status;
  }
  SnapshotWriter& writer() { return *writer_; }
  void Adopt(std::unique_ptr<SnapshotWriter> writer) {
    writer_ = std::move(writer);
  }
  const Store& store() const { return writer_->store_writer().store(); }
  FaultFileSystem& fs() { return fs_; }
  const WriterOptions& options() const { return options_; }
  std::vector<TrainerTensor> Tensors() {
    TrainerTensor tensor;
    tensor.name = "w";
    tensor.shape = {weights_.size()};
    tensor.data = weights_.data();
    return {tensor};
  }

 private:
  std::string path_;
  std::uint64_t anchor_every_;
  FaultFileSystem fs_;
  WriterOptions options_;
  std::vector<std::uint16_t> weights_ = std::vector<std::uint16_t>(64);
  std::unique_ptr<SnapshotWriter> writer_;
};

// Copies of one store, one for each fault; leases keep their time.
void CopyTree(const std::string& from, const std::string& to) {
  std::filesystem::remove_all(to);
  std::filesystem::copy(from, to, std::filesystem::copy_options::recursive);
  for (const auto& entry :
       std::filesystem::directory_iterator(from + "/leases")) {
    std::filesystem::last_write_time(
        to + "/leases/" + entry.path().filename().string(),
        entry.last_write_time());
  }
}

Steps StepsOf(const std::string& path) {
  auto store = Store::Open(PosixFileSystem(), path);
  EXPECT_TRUE(store.ok()) << store.status();
  return *(*store)->ListSteps();
}

Steps AnchorsOf(const std::string& path) {
  Steps anchors;
  for (const std::uint64_t step : StepsOf(path)) {
    if (std::filesystem::exists(path + "/" + StepDirectoryName(step) +
                                "/anchor/COMMIT")) {
      anchors.push_back(step);
    }
  }
  return anchors;
}

std::vector<std::string> Names(const std::string& path) {
  const auto names = PosixFileSystem()->List(path);
  EXPECT_TRUE(names.ok()) << names.status();
  return names.ok() ? *names : std::vector<std::string>();
}

// The store as fsck sees it; every byte is read.
FsckReport MustBeSound(const std::string& path) {
  FsckOptions options;
  options.store_path = path;
  options.deep = true;
  options.io_threads = 1;
  options.settle_seconds = 0;
  const auto report = Fsck(options);
  EXPECT_TRUE(report.ok()) << report.status();
  if (!report.ok()) return {};
  EXPECT_EQ(report->error_count, 0u) << FormatFsckReport(*report);
  EXPECT_TRUE(report->newest.has_value());
  EXPECT_EQ(report->newest, report->newest_joinable);
  return *report;
}

// The newest version, if it can be joined.
std::optional<std::uint64_t> Newest(const std::string& path) {
  FsckOptions options;
  options.store_path = path;
  options.settle_seconds = 0;
  const auto report = Fsck(options);
  if (!report.ok() || report->newest != report->newest_joinable ||
      !report->newest) {
    return {};
  }
  return report->newest->step;
}

class GcTest : public ::testing::Test {
 protected:
  std::string path() const { return temp_.Join("store"); }
  GcOptions Options(std::uint32_t keep_anchors = 1) const {
    GcOptions options;
    options.store_path = path();
    options.keep_anchors = keep_anchors;
    options.grace = std::chrono::seconds(0);
    options.lease_ttl = kTtl;
    return options;
  }
  GcReport MustCollect(const GcOptions& options) {
    const auto report = CollectGarbage(options);
    EXPECT_TRUE(report.ok()) << report.status();
    return report.ok() ? *report : GcReport();
  }
  static VersionId IdOf(const Store& store, std::uint64_t step) {
    const auto read = store.ReadStep(step);
    EXPECT_TRUE(read.ok()) << read.status();
    return (*read)->id;
  }
  // A lease of a reader that holds `step` (or joins from it).
  std::unique_ptr<Lease> Hold(const Store& store, const std::string& reader,
                              std::uint64_t step, bool holds = true) {
    auto lease = Lease::Create(PosixFileSystem(), store.path(), reader,
                               store.info().run);
    EXPECT_TRUE(lease.ok()) << lease.status();
    std::optional<VersionId> held;
    if (holds) held = IdOf(store, step);
    EXPECT_TRUE((*lease)->Set(step, held).ok());
    return *std::move(lease);
  }
  std::string LeasePath(const std::string& reader) const {
    return path() + "/leases/" + reader;
  }
  // Makes a file look `seconds` older (or, below 0, younger).
  static void Age(const std::string& file, std::int64_t seconds) {
    struct stat info {};
    ASSERT_EQ(stat(file.c_str(), &info), 0) << file;
    timespec times[2] = {info.st_atim, info.st_mtim};
    times[1].tv_sec -= seconds;
    ASSERT_EQ(utimensat(AT_FDCWD, file.c_str(), times, 0), 0);
  }

  TempDirectory temp_;
};

// -------------------------------------------------------------------- leases

// Report 54: retention of 2 while readers may be 8 steps behind.
TEST_F(GcTest, ReaderFarBehindPinsItsChainUntilItsLeaseExpires) {
  TinyRun run(path());
  run.PublishUpTo(16);
  const auto lease = Hold(run.store(), "slow", 8);
  GcReport report = MustCollect(Options());
  EXPECT_EQ(report.oldest_kept_step, 8u);
  EXPECT_EQ(report.moved_steps, Range(0, 7));
  ASSERT_EQ(report.leases.size(), 1u);
  EXPECT_TRUE(report.leases[0].pins);
  EXPECT_EQ(report.leases[0].state, LeaseState::kLive);
  EXPECT_EQ(StepsOf(path()), Range(8, 16));
  // It adds deltas: of the anchors only the newest one stays.
  EXPECT_EQ(report.moved_anchors, (Steps{9, 12}));
  EXPECT_EQ(AnchorsOf(path()), Steps{15});
  MustBeSound(path());

  Age(LeasePath("slow"), kTtl.count() - 5);
  EXPECT_THAT(MustCollect(Options()).moved_steps, IsEmpty());
  Age(LeasePath("slow"), 5);
  report = MustCollect(Options());
  EXPECT_EQ(report.leases.at(0).state, LeaseState::kExpired);
  EXPECT_FALSE(report.leases[0].pins);
  EXPECT_EQ(report.moved_steps, Range(8, 14));
  EXPECT_THAT(report.removed_leases, IsEmpty());
  EXPECT_EQ(StepsOf(path()), Range(15, 16));
  MustBeSound(path());
  // After twice its time the lease itself goes.
  Age(LeasePath("slow"), kTtl.count());
  EXPECT_THAT(MustCollect(Options()).removed_leases, ElementsAre("slow"));
  EXPECT_THAT(Names(path() + "/leases"), IsEmpty());
  EXPECT_THAT(Names(path() + "/.trash"), IsEmpty());
}

TEST_F(GcTest, ReaderThatJoinsPinsTheAnchorsFromItsOwnOn) {
  TinyRun run(path());
  run.PublishUpTo(13);
  const auto lease = Hold(run.store(), "joining", 6, /*holds=*/false);
  const GcReport report = MustCollect(Options());
  EXPECT_EQ(report.moved_steps, Range(0, 5));
  EXPECT_THAT(report.moved_anchors, IsEmpty());
  EXPECT_EQ(AnchorsOf(path()), (Steps{6, 9, 12}));
  // Once it holds the newest version nothing else is needed.
  ASSERT_TRUE(lease->Set(13, IdOf(run.store(), 13)).ok());
  EXPECT_EQ(MustCollect(Options()).moved_steps, Range(6, 11));
  EXPECT_EQ(AnchorsOf(path()), Steps{12});
  MustBeSound(path());
}

TEST_F(GcTest, OldestOfSeveralLeasesCounts) {
  TinyRun run(path());
  run.PublishUpTo(13);
  const auto a = Hold(run.store(), "a", 11);
  const auto b = Hold(run.store(), "b", 7);
  const auto c = Hold(run.store(), "c", 13);
  const GcReport report = MustCollect(Options());
  EXPECT_EQ(report.oldest_kept_step, 7u);
  ASSERT_EQ(report.leases.size(), 3u);
  EXPECT_TRUE(report.leases[0].pins);
  EXPECT_TRUE(report.leases[1].pins);
  EXPECT_FALSE(report.leases[2].pins);  // above the anchor that stays anyway
}

TEST_F(GcTest, LeaseFromTheFutureCountsAsLiveAndIsAWarning) {
  TinyRun run(path());
  run.PublishUpTo(7);
  const auto lease = Hold(run.store(), "r", 2);
  Age(LeasePath("r"), -3600);
  const GcReport report = MustCollect(Options());
  EXPECT_EQ(report.leases.at(0).state, LeaseState::kFuture);
  EXPECT_EQ(report.oldest_kept_step, 2u);
  ASSERT_EQ(report.warnings.size(), 1u);
  EXPECT_THAT(report.warnings[0], HasSubstr("leases/r: written 3"));
  EXPECT_THAT(report.warnings[0], HasSubstr("counts as live"));
}

TEST_F(GcTest, LeaseThatCannotBeReadKeepsEverythingUntilItIsOld) {
  TinyRun run(path());
  run.PublishUpTo(7);
  for (const bool newer_format : {false, true}) {
    LeaseRecord record;
    record.run = run.store().info().run;
    record.counter = 1;
    record.reader = "r";
    auto bytes = SerializeLease(record);
    if (newer_format) {
      bytes[4] = std::byte{9};
      const std::uint64_t hash =
          HashBytes64(std::span<const std::byte>(bytes).first(136));
      std::memcpy(bytes.data() + 136, &hash, 8);
    } else {
      bytes[24] ^= std::byte{1};
    }
    std::filesystem::remove(LeasePath("r"));
    ASSERT_TRUE(WriteNewFile(*PosixFileSystem(), LeasePath("r"), bytes).ok());
    const GcReport report = MustCollect(Options());
    EXPECT_THAT(report.moved_steps, IsEmpty());
    EXPECT_THAT(report.moved_anchors, IsEmpty());
    EXPECT_EQ(report.leases.at(0).state, LeaseState::kUnreadable);
    EXPECT_TRUE(report.leases[0].pins);
    ASSERT_EQ(report.warnings.size(), 1u);
    EXPECT_THAT(report.warnings[0], HasSubstr("nothing is moved until"));
  }
  Age(LeasePath("r"), kTtl.count());
  EXPECT_EQ(MustCollect(Options()).moved_steps, Range(0, 5));
}

TEST_F(GcTest, LeaseOfAnotherRunPinsNothingAndIsAWarning) {
  TinyRun run(path());
  run.PublishUpTo(7);
  auto lease = Lease::Create(PosixFileSystem(), path(), "r", RandomRunId());
  ASSERT_TRUE(lease.ok());
  ASSERT_TRUE((*lease)->Set(1, std::nullopt).ok());
  const GcReport report = MustCollect(Options());
  EXPECT_EQ(report.moved_steps, Range(0, 5));
  EXPECT_EQ(report.leases.at(0).state, LeaseState::kForeign);
  ASSERT_EQ(report.warnings.size(), 1u);
  EXPECT_THAT(report.warnings[0], HasSubstr("another run"));
}

TEST_F(GcTest, LeaseWhoseStepsAreGonePinsNothing) {
  TinyRun run(path());
  run.PublishUpTo(7);
  const auto lease = Hold(run.store(), "r", 3);
  Age(LeasePath("r"), kTtl.count());
  ASSERT_EQ(MustCollect(Options()).moved_steps, Range(0, 5));
  ASSERT_THAT(MustCollect(Options()).deleted_trash.size(), 6);
  ASSERT_TRUE(lease->Renew().ok());  // it was suspended, and knows nothing
  run.PublishUpTo(13);
  const GcReport report = MustCollect(Options());
  EXPECT_EQ(report.moved_steps, Range(6, 11));
  EXPECT_FALSE(report.leases.at(0).pins);
  EXPECT_THAT(report.leases[0].problem, HasSubstr("v3 is gone"));
}

TEST_F(GcTest, HeldVersionThatIsGoneStillPinsTheDeltasOnIt) {
  TinyRun run(path(), 1);
  run.PublishUpTo(4);
  const VersionId v3 = IdOf(run.store(), 3);
  const auto lease = Hold(run.store(), "r", 3);
  std::filesystem::remove(LeasePath("r"));
  ASSERT_EQ(MustCollect(Options()).moved_steps, Range(0, 3));
  MustCollect(Options());
  ASSERT_TRUE(lease->Set(3, v3).ok());
  run.PublishUpTo(9);
  EXPECT_THAT(MustCollect(Options()).moved_steps, IsEmpty());
  EXPECT_EQ(AnchorsOf(path()), Steps{9});
}

TEST_F(GcTest, TemporariesOfDeadReadersGoAfterTheTtl) {
  TinyRun run(path());
  run.PublishUpTo(3);
  const std::string file = LeasePath("r~0123456789abcdef");
  ASSERT_TRUE(WriteNewFile(*PosixFileSystem(), file, {}).ok());
  EXPECT_THAT(MustCollect(Options()).removed_leases, IsEmpty());
  Age(file, kTtl.count());
  EXPECT_THAT(MustCollect(Options()).removed_leases,
              ElementsAre("r~0123456789abcdef"));
  EXPECT_THAT(Names(path() + "/leases"), IsEmpty());
}

TEST_F(GcTest, LeaseThatIsRenewedWhileItIsRemovedStays) {
  TinyRun run(path());
  run.PublishUpTo(3);
  const auto lease = Hold(run.store(), "r", 1);
  Age(LeasePath("r"), 3 * kTtl.count());
  FaultFileSystem fs(PosixFileSystem(), path());
  bool renewed = false;
  // The last moment before it is taken: .trash was told the time.
  fs.set_script([&](const Operation& operation) {
    if (operation.kind == FileOperation::kRename &&
        operation.path == "leases/r") {
      EXPECT_TRUE(lease->Renew().ok());
      renewed = true;
    }
    return Fault::None();
  });
  GcOptions options = Options();
  options.fs = &fs;
  MustCollect(options);
  EXPECT_TRUE(renewed);
  const auto leases =
      ReadLeases(*PosixFileSystem(), path(), run.store().info().run);
  ASSERT_EQ(leases->leases.size(), 1u);
  EXPECT_EQ(leases->leases[0].info->counter, 2u);
  MustCollect(Options());
  EXPECT_THAT(Names(path() + "/.trash"), IsEmpty());
}

TEST_F(GcTest, DryRunChangesNothingAndSaysWhatWould) {
  TinyRun run(path());
  run.PublishUpTo(10);
  const auto lease = Hold(run.store(), "r", 4);
  FaultFileSystem fs(PosixFileSystem(), path());
  GcOptions options = Options();
  options.fs = &fs;
  options.dry_run = true;
  const GcReport report = MustCollect(options);
  EXPECT_EQ(report.moved_steps, Range(0, 3));
  EXPECT_EQ(report.moved_anchors, Steps{6});
  for (const FileOperation kind :
       {FileOperation::kCreateExclusive, FileOperation::kRename,
        FileOperation::kLink, FileOperation::kRemoveFile,
        FileOperation::kRemoveDirectory, FileOperation::kMakeDirectory,
        FileOperation::kWrite}) {
    EXPECT_EQ(fs.count(kind), 0) << FileOperationName(kind);
  }
  options.dry_run = false;
  options.fs = nullptr;
  EXPECT_EQ(MustCollect(options).moved_steps, Range(0, 3));
}

TEST_F(GcTest, OptionsThatMakeNoSenseAreRefused) {
  TinyRun run(path());
  GcOptions options = Options();
  options.lease_ttl = std::chrono::seconds(0);
  EXPECT_EQ(CollectGarbage(options).status().code(),
            absl::StatusCode::kInvalidArgument);
  options = Options();
  options.grace = std::chrono::seconds(-1);
  EXPECT_EQ(CollectGarbage(options).status().code(),
            absl::StatusCode::kInvalidArgument);
}

TEST_F(GcTest, RootStepKeepsItsAnchorAsLongAsItStays) {
  TinyRun run(path());
  run.PublishUpTo(7);
  const auto lease = Hold(run.store(), "r", 0);
  EXPECT_EQ(MustCollect(Options()).moved_anchors, Steps{3});
  EXPECT_EQ(AnchorsOf(path()), (Steps{0, 6}));
  MustBeSound(path());
}

TEST_F(GcTest, LeftoversOfFencedWritersGo) {
  TinyRun run(path());
  run.PublishUpTo(3);
  const auto touch = [&](const std::string& name) {
    ASSERT_TRUE(
        WriteNewFile(*PosixFileSystem(), path() + "/.staging/" + name, {})
            .ok());
  };
  std::filesystem::create_directories(path() + "/.staging/step_00000004.1.9");
  touch("HEAD.1");
  touch("table.1.0");
  touch("HEAD.2");
  ASSERT_TRUE(SnapshotWriter::Open(run.options(), run.Tensors(), {}).ok());
  const GcReport report = MustCollect(Options());
  EXPECT_THAT(report.removed_staging, ElementsAre("HEAD.1", "table.1.0"));
  EXPECT_THAT(Names(path() + "/.staging"), ElementsAre());
}

// --------------------------------------------------------------------- faults

class GcFaultTest : public GcTest {
 protected:
  // v0 to v13 with anchors at 3, 6, 9, 12; a reader at v8, an old lease, a
  // leftover, something in .trash.
  void SetUp() override {
    TinyRun run(origin());
    run.PublishUpTo(13);
    Hold(run.store(), "reader", 8);
    Hold(run.store(), "dead", 1);
    Age(origin() + "/leases/dead", 3 * kTtl.count());
    std::filesystem::create_directories(origin() + "/.trash/step_00000014.1");
    std::filesystem::create_directories(
        origin() + "/.trash/step_00000000.gc.1000.0123456789abcdef/x");
  }
  std::string origin() const { return temp_.Join("origin"); }

  void ExpectConverged(const std::string& what) {
    SCOPED_TRACE(what);
    EXPECT_EQ(StepsOf(path()), Range(8, 13));
    EXPECT_EQ(AnchorsOf(path()), Steps{12});
    MustBeSound(path());
    EXPECT_THAT(Names(path() + "/leases"), ElementsAre("reader"));
    EXPECT_THAT(Names(path() + "/.staging"), IsEmpty());
  }
};

// It may die anywhere, or the storage may fail it anywhere.
TEST_F(GcFaultTest, EveryFaultLeavesASoundStoreAndOneRerunConverges) {
  std::int64_t count = 0;
  {
    CopyTree(origin(), path());
    FaultFileSystem fs(PosixFileSystem(), path());
    GcOptions options = Options();
    options.fs = &fs;
    MustCollect(options);
    count = fs.operation_count();
    MustCollect(Options());
    ExpectConverged("without a fault");
    EXPECT_THAT(Names(path() + "/.trash"), IsEmpty());
  }
  ASSERT_GT(count, 100);
  RecordProperty("operations", static_cast<int>(count));
  const std::vector<std::pair<const char*, FaultScript (*)(std::int64_t)>>
      faults = {
          {"dies after", [](std::int64_t k) { return StopAfter(k); }},
          {"EIO at",
           [](std::int64_t k) { return FaultAt(k, Fault::Fail(EIO)); }},
          {"done, then EIO at",
           [](std::int64_t k) {
             return FaultAt(k, Fault::PerformThenFail(EIO));
           }},
          {"dropped at",
           [](std::int64_t k) { return FaultAt(k, Fault::Drop()); }},
      };
  for (const auto& [name, script] : faults) {
    for (std::int64_t k = 1; k <= count; k += kStride) {
      CopyTree(origin(), path());
      FaultFileSystem fs(PosixFileSystem(), path());
      fs.set_script(script(k));
      GcOptions options = Options();
      options.fs = &fs;
      const auto report = CollectGarbage(options);
      SCOPED_TRACE(absl::StrCat(name, " operation ", k, " of ", count, ": ",
                                report.status().ToString()));
      if (std::string(name) == "dropped at") {
        // A rename that the storage only claims to have done leaves a hole
        // below what is needed; versions that are needed stand.
        EXPECT_EQ(Newest(path()), 13u);
      } else {
        MustBeSound(path());
      }
      MustCollect(Options());
      ExpectConverged("after a rerun");
      MustCollect(Options());
      EXPECT_THAT(Names(path() + "/.trash"), IsEmpty());
      if (HasFailure()) return;
    }
  }
}

// What the protocol is for: a reader writes its lease, then looks whether what
// it needs is there. If it is, it stays.
TEST_F(GcFaultTest, LeaseAtAnyMomentIsSeenByGcOrItsReaderSeesTheGap) {
  std::int64_t count = 1;
  int kept = 0;
  int gone = 0;
  for (const bool holds : {true, false}) {
    for (std::int64_t k = 1; k <= count; k += kStride) {
      CopyTree(origin(), path());
      std::filesystem::remove(LeasePath("reader"));
      auto store = Store::Open(PosixFileSystem(), path());
      ASSERT_TRUE(store.ok());
      const VersionId v3 = IdOf(**store, 3);
      FaultFileSystem fs(PosixFileSystem(), path());
      bool promised = false;
      fs.set_after_each([&](const Operation& operation) {
        if (operation.number != k) return;
        auto lease = Lease::Create(PosixFileSystem(), path(), "late",
                                   (*store)->info().run);
        ASSERT_TRUE(lease.ok());
        ASSERT_TRUE(
            (*lease)->Set(3, holds ? std::optional(v3) : std::nullopt).ok());
        promised = holds || (*store)->HasAnchor(3);
        for (std::uint64_t step = 3; step <= 13; ++step) {
          promised = promised && (*store)->ReadStep(step).ok();
        }
      });
      GcOptions options = Options();
      options.fs = &fs;
      const auto report = CollectGarbage(options);
      ASSERT_TRUE(report.ok()) << report.status();
      count = std::max(count, fs.operation_count());
      SCOPED_TRACE(absl::StrCat("lease after operation ", k, " of ", count,
                                holds ? ", holds" : ", joins", "\n",
                                fs.LogText()));
      if (promised) {
        ++kept;
        EXPECT_EQ(StepsOf(path()).front(), 3u);
        for (std::uint64_t step = 3; step <= 13; ++step) {
          EXPECT_TRUE((*store)->ReadStep(step).ok()) << step;
        }
        if (!holds) {
          EXPECT_EQ(AnchorsOf(path()), (Steps{3, 6, 9, 12}));
        }
      } else {
        ++gone;
      }
      MustBeSound(path());
      if (HasFailure()) return;
    }
  }
  // Both orders were seen.
  EXPECT_GT(kept, 50 / kStride);
  EXPECT_GT(gone, 5 / kStride);
}

TEST_F(GcFaultTest, SecondGcAtAnyMomentIsHarmless) {
  std::int64_t count = 1;
  for (std::int64_t k = 1; k <= count; k += kStride) {
    CopyTree(origin(), path());
    FaultFileSystem fs(PosixFileSystem(), path());
    fs.set_after_each([&](const Operation& operation) {
      if (operation.number == k) MustCollect(Options());
    });
    GcOptions options = Options();
    options.fs = &fs;
    const auto report = CollectGarbage(options);
    count = std::max(count, fs.operation_count());
    SCOPED_TRACE(
        absl::StrCat("second gc after operation ", k, "\n", fs.LogText()));
    ASSERT_TRUE(report.ok()) << report.status();
    ExpectConverged("after both");
    MustCollect(Options());
    MustCollect(Options());
    EXPECT_THAT(Names(path() + "/.trash"), IsEmpty());
    if (HasFailure()) return;
  }
}

TEST_F(GcFaultTest, PublishAtAnyMomentIsHarmless) {
  std::int64_t count = 1;
  for (std::int64_t k = 1; k <= count; k += kStride) {
    std::filesystem::remove_all(path());
    TinyRun run(path());
    run.PublishUpTo(8);
    Hold(run.store(), "reader", 4);
    FaultFileSystem fs(PosixFileSystem(), path());
    bool published = false;
    fs.set_after_each([&](const Operation& operation) {
      if (operation.number != k) return;
      run.Publish(9);  // with an anchor
      published = true;
    });
    GcOptions options = Options();
    options.fs = &fs;
    const auto report = CollectGarbage(options);
    count = std::max(count, fs.operation_count());
    SCOPED_TRACE(absl::StrCat("publish after operation ", k));
    ASSERT_TRUE(report.ok()) << report.status();
    if (!published) continue;  // this run had fewer operations
    EXPECT_EQ(StepsOf(path()), Range(4, 9));
    const FsckReport checked = MustBeSound(path());
    EXPECT_EQ(checked.newest->step, 9u);
    if (HasFailure()) return;
  }
}

// Thousands of steps take a while to move.
TEST_F(GcFaultTest, LongGcStopsSoonWhenALeaseAsksForWhatItMoves) {
  TinyRun run(path(), 100);
  run.PublishUpTo(301);
  FaultFileSystem fs(PosixFileSystem(), path());
  std::unique_ptr<Lease> lease;
  std::int64_t moves = 0;
  fs.set_after_each([&](const Operation& operation) {
    if (operation.kind != FileOperation::kRename ||
        operation.path.find("step_") != 0) {
      return;
    }
    if (++moves == 10) lease = Hold(run.store(), "late", 150);
  });
  GcOptions options = Options();
  options.fs = &fs;
  GcReport report = MustCollect(options);
  EXPECT_EQ(moves, 64);
  EXPECT_EQ(report.moved_steps, Range(0, 63));
  EXPECT_EQ(report.oldest_kept_step, 150u);
  EXPECT_EQ(StepsOf(path()), Range(64, 301));
  MustBeSound(path());
  report = MustCollect(Options());
  EXPECT_EQ(report.moved_steps, Range(64, 149));
  MustBeSound(path());
}

// A gc that made its plan before a trainer went back below what it keeps.
TEST_F(GcFaultTest, ResumeBelowThePlanAtAnyMomentFindsItsChainOrNothing) {
  std::int64_t count = 1;
  int resumed = 0;
  int refused = 0;
  for (std::int64_t k = 1; k <= count; k += kStride) {
    std::filesystem::remove_all(path());
    TinyRun run(path());
    run.PublishUpTo(4);
    std::vector<std::uint16_t> at_4(64);
    {
      const auto tensors = run.Tensors();
      std::memcpy(at_4.data(), tensors[0].data, 128);
    }
    run.PublishUpTo(9);
    FaultFileSystem fs(PosixFileSystem(), path());
    bool ok = false;
    bool tried = false;
    fs.set_after_each([&](const Operation& operation) {
      if (operation.number != k) return;
      tried = true;
      TrainerTensor tensor = run.Tensors()[0];
      tensor.data = at_4.data();
      auto writer = SnapshotWriter::Open(run.options(), {tensor}, 4);
      ok = writer.ok();
      if (!ok) return;
      ++at_4[0];
      EXPECT_TRUE((*writer)->Publish(5).ok());
    });
    GcOptions options = Options();
    options.fs = &fs;
    const auto report = CollectGarbage(options);
    count = std::max(count, fs.operation_count());
    SCOPED_TRACE(absl::StrCat("resume after operation ", k, ": ", ok, "\n",
                              fs.LogText()));
    if (!tried) continue;  // this run had fewer operations
    (ok ? resumed : refused) += 1;
    const auto checked = MustBeSound(path());
    EXPECT_EQ(checked.newest->step, ok ? 5u : 9u);
    // What one gc could not see the next one puts right.
    ASSERT_TRUE(report.ok()) << report.status();
    MustCollect(Options());
    MustCollect(Options());
    MustBeSound(path());
    EXPECT_EQ(StepsOf(path()), ok ? Range(3, 5) : Range(9, 9));
    EXPECT_THAT(Names(path() + "/.trash"), IsEmpty());
    if (HasFailure()) return;
  }
  EXPECT_GT(resumed, 10 / kStride);
  EXPECT_GT(refused, 10 / kStride);
}

// A step that a lease kept when the plan was made, and no longer when epochs
// were looked at, lost the epoch that vouches for it.
TEST_F(GcFaultTest, LeaseThatGoesAtAnyMomentTakesNoEpochOfAStepThatStays) {
  {
    TinyRun run(temp_.Join("resumed"));
    run.PublishUpTo(4);
    for (const std::uint64_t step : {4, 6}) {
      auto writer = SnapshotWriter::Open(run.options(), run.Tensors(), step);
      ASSERT_TRUE(writer.ok()) << writer.status();
      run.Adopt(*std::move(writer));
      run.PublishUpTo(step + 2);
    }
    run.PublishUpTo(13);
  }
  std::int64_t count = 1;
  for (std::int64_t k = 1; k <= count; k += kStride) {
    CopyTree(temp_.Join("resumed"), path());
    auto store = Store::Open(PosixFileSystem(), path());
    ASSERT_TRUE(store.ok());
    const auto lease = Hold(**store, "r", 3);
    FaultFileSystem fs(PosixFileSystem(), path());
    fs.set_after_each([&](const Operation& operation) {
      if (operation.number != k) return;
      EXPECT_TRUE(lease->Remove().ok());
    });
    GcOptions options = Options();
    options.fs = &fs;
    MustCollect(options);
    count = std::max(count, fs.operation_count());
    SCOPED_TRACE(
        absl::StrCat("lease gone after operation ", k, "\n", fs.LogText()));
    MustBeSound(path());
    // And in the end all of them go but the newest.
    MustCollect(Options());
    MustCollect(Options());
    MustCollect(Options());
    MustBeSound(path());
    EXPECT_THAT(Names(path() + "/epochs"), ElementsAre("00000003"));
    if (HasFailure()) return;
  }
}

// ------------------------------------------------------- the writer's own gc

// Report 55: 10,000 tiny steps without cleanup fill the disk.
TEST(RetainTest, TenThousandTinyStepsStayBoundedAtConstantCost) {
  TempDirectory temp;
  TinyRun run(temp.Join("store"), 10);
  RetentionOptions options;
  options.keep_anchors = 2;
  options.grace = std::chrono::seconds(0);
  Retention retention(options);
  constexpr std::uint64_t kTenth = kSanitized ? 100 : 1000;
  std::size_t most_steps = 0;
  std::map<std::uint64_t, std::int64_t> operations;  // per tenth of the run
  std::map<std::uint64_t, std::int64_t> lists;
  std::int64_t most_operations = 0;
  for (std::uint64_t step = 1; step <= 10 * kTenth; ++step) {
    run.Publish(step);
    run.fs().Reset();
    const auto report = retention.Retain(run.store());
    ASSERT_TRUE(report.ok()) << report.status();
    ASSERT_THAT(report->warnings, IsEmpty());
    operations[(step - 1) / kTenth] += run.fs().operation_count();
    lists[(step - 1) / kTenth] += run.fs().count(FileOperation::kList);
    most_operations = std::max(most_operations, run.fs().operation_count());
    run.fs().Reset();
    if (step % 97 == 0) {
      most_steps = std::max(most_steps, run.store().ListSteps()->size());
    }
  }
  EXPECT_LE(most_steps, 21u);
  // The first tenth has the start in it; after that nothing grows.
  EXPECT_LE(operations[9], operations[1] * 101 / 100);
  EXPECT_EQ(lists[9], lists[1]);
  EXPECT_LE(operations[9] / static_cast<std::int64_t>(kTenth), 80)
      << "mean operations of a call";
  EXPECT_LE(most_operations, 600);
  std::size_t names = 0;
  for (const auto& entry :
       std::filesystem::recursive_directory_iterator(temp.Join("store"))) {
    names += entry.is_regular_file() ? 1 : 0;
  }
  EXPECT_LE(names, 21u * 3 + 3 * 3 + 11 * 3 + 5);
  MustBeSound(temp.Join("store"));
  RecordProperty(
      "mean_operations",
      static_cast<int>(operations[9] / static_cast<std::int64_t>(kTenth)));
}

TEST(RetainTest, CallWithNothingToDoIsCheap) {
  TempDirectory temp;
  TinyRun run(temp.Join("store"), 10);
  Retention retention({});
  run.PublishUpTo(25);
  ASSERT_TRUE(retention.Retain(run.store()).ok());
  run.Publish(26);
  run.fs().Reset();
  const auto report = retention.Retain(run.store());
  ASSERT_TRUE(report.ok());
  EXPECT_EQ(run.fs().count(FileOperation::kCreateExclusive), 0);
  EXPECT_EQ(run.fs().count(FileOperation::kRename), 0);
  // The newest manifest alone.
  EXPECT_EQ(run.fs().count(FileOperation::kOpenForRead), 2)
      << run.fs().LogText();
  EXPECT_LE(run.fs().operation_count(), 40) << run.fs().LogText();
}

TEST(RetainTest, AgreesWithGcAtEveryStep) {
  TempDirectory temp;
  TinyRun run(temp.Join("store"), 4);
  RetentionOptions options;
  options.keep_anchors = 2;
  Retention retention(options);
  GcOptions gc;
  gc.store_path = temp.Join("store");
  gc.keep_anchors = 2;
  gc.dry_run = true;
  for (std::uint64_t step = 1; step <= 40; ++step) {
    run.Publish(step);
    const auto plan = CollectGarbage(gc);
    ASSERT_TRUE(plan.ok()) << plan.status();
    const auto done = retention.Retain(run.store());
    ASSERT_TRUE(done.ok()) << done.status();
    EXPECT_EQ(done->moved_steps, plan->moved_steps);
    EXPECT_EQ(done->oldest_kept_step, plan->oldest_kept_step);
  }
  EXPECT_EQ(AnchorsOf(temp.Join("store")), (Steps{36, 40}));
}

TEST(RetainTest, AnchorThatWasTakenAwayIsNoticed) {
  TempDirectory temp;
  TinyRun run(temp.Join("store"), 4);
  Retention retention({});
  run.PublishUpTo(10);
  ASSERT_TRUE(retention.Retain(run.store()).ok());  // keeps 4 and 8
  std::filesystem::remove_all(temp.Join("store/step_00000008/anchor"));
  run.PublishUpTo(12);
  const auto report = retention.Retain(run.store());
  ASSERT_TRUE(report.ok());
  EXPECT_EQ(report->oldest_kept_step, 4u);
  MustBeSound(temp.Join("store"));
}

}  // namespace
}  // namespace kedge
