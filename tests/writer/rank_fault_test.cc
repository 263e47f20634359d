// Goal: whatever operation fails on whatever rank, a reader finds the old
// version or the new one, whole; all ranks say the same, and one retry or one
// reopening converges. Method: two ranks as threads, each on a file system of
// its own that breaks the k-th operation, for every k.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cerrno>

#include "absl/strings/str_cat.h"
#include "kedge/engine/io/store.h"
#include "kedge/format/layout.h"
#include "kedge/reader/fsck.h"
#include "kedge/tests/support/fault_file_system.h"
#include "kedge/tests/support/sanitized.h"
#include "kedge/tests/support/temp_directory.h"
#include "kedge/tests/support/test_model.h"
#include "kedge/tests/writer/rank_world.h"
#include "kedge/writer/local_coordinator.h"
#include "kedge/writer/snapshot_writer.h"

namespace kedge {
namespace {

using ::testing::HasSubstr;

constexpr std::uint32_t kRanks = 2;
constexpr std::uint64_t kSeed = 100;
// Every operation, but under sanitizers.
constexpr std::int64_t kStride = kSanitized ? 5 : 1;

using MaybeWriter = absl::StatusOr<std::unique_ptr<SnapshotWriter>>;
using Published = absl::StatusOr<PublishResult>;

class RankFaultTest : public ::testing::Test {
 protected:
  // A store at v1, writers on faulty file systems, the next step in memory.
  void Start() {
    for (auto& writer : writers_) writer.reset();
    for (FaultFileSystem& fs : fs_) fs.Reset();
    temp_ = std::make_unique<TempDirectory>();
    model_ = std::make_unique<TestModel>(kSeed);
    Make([&](std::uint32_t rank) {
      InitOptions init;
      init.l61_seed = 5;
      return SnapshotWriter::Create(Options(rank), init, Shards(*model_)[rank]);
    });
    ASSERT_FALSE(HasFailure());
    model_->Step(0.01);
    for (const Published& result : Publish(1, false)) {
      ASSERT_TRUE(result.ok()) << result.status();
    }
    old_ = model_->Bytes();
    model_->Step(0.01);
    new_ = model_->Bytes();
    for (FaultFileSystem& fs : fs_) fs.Reset();
  }
  WriterOptions Options(std::uint32_t rank) {
    WriterOptions options;
    options.store_path = temp_->Join("store");
    options.fs = &fs_[rank];
    options.io_threads = 1;
    options.encode_threads = 1;
    options.slice_units = 5000;
    options.coordinator = group_[rank].get();
    return options;
  }
  // The same cut every time.
  static std::vector<std::vector<TrainerTensor>> Shards(
      const TestModel& model) {
    std::mt19937_64 random(kSeed);
    return CutIntoShards(model.Tensors(), kRanks, random);
  }
  void Make(const std::function<MaybeWriter(std::uint32_t)>& make) {
    group_ = LocalCoordinator::MakeGroup(kRanks, std::chrono::seconds(20));
    auto made = OnRanks<MaybeWriter>(kRanks, make);
    for (std::uint32_t rank = 0; rank < kRanks; ++rank) {
      opened_[rank] = made[rank].status();
      writers_[rank] = made[rank].ok() ? *std::move(made[rank]) : nullptr;
    }
    EXPECT_EQ(opened_[0].code(), opened_[1].code()) << opened_[0] << "\n"
                                                    << opened_[1];
  }
  void Open(const TestModel& model,
            std::optional<std::uint64_t> resume = std::nullopt) {
    Make([&](std::uint32_t rank) {
      return SnapshotWriter::Open(Options(rank), Shards(model)[rank], resume);
    });
  }
  std::vector<Published> Publish(std::uint64_t step, bool anchor = true) {
    return OnRanks<Published>(kRanks, [&](std::uint32_t rank) {
      PublishOptions options;
      options.anchor = anchor;
      return writers_[rank]->Publish(step, options);
    });
  }
  // The step that a reader finds, 0 if what it finds is damaged.
  std::uint64_t Look(const std::string& what, bool may_be_damaged = false) {
    auto store = Store::Open(PosixFileSystem(), temp_->Join("store"));
    EXPECT_TRUE(store.ok()) << what << ": " << store.status();
    if (!store.ok()) return 0;
    const auto step = (*store)->Newest();
    EXPECT_TRUE(step.ok()) << what << ": " << step.status();
    if (!step.ok()) return 0;
    const auto model = ReadModel(**store, *step);
    if (!model.ok()) {
      EXPECT_TRUE(may_be_damaged) << what << ": " << model.status();
      return 0;
    }
    const std::uint64_t number = (*step)->id.step;
    EXPECT_TRUE(number >= 1 && number <= 3) << what;
    EXPECT_TRUE(*model == (number == 1 ? old_ : new_))
        << what << ": v" << number << " has other bytes";
    return number;
  }
  TestModel At(std::uint64_t step) const {
    TestModel model(kSeed);
    for (std::uint64_t i = 0; i < step && i < 2; ++i) model.Step(0.01);
    return model;
  }
  void ExpectSound(const std::string& what) {
    FsckOptions options;
    options.store_path = temp_->Join("store");
    options.deep = true;
    options.io_threads = 1;
    options.settle_seconds = 0;
    const auto report = Fsck(options);
    ASSERT_TRUE(report.ok()) << report.status();
    EXPECT_EQ(report->error_count, 0u) << what << "\n"
                                       << FormatFsckReport(*report);
    EXPECT_EQ(report->warning_count, 0u) << what << "\n"
                                         << FormatFsckReport(*report);
  }

  FaultFileSystem fs_[kRanks];
  std::unique_ptr<TempDirectory> temp_;
  std::unique_ptr<TestModel> model_;
  std::vector<std::unique_ptr<LocalCoordinator>> group_;
  std::unique_ptr<SnapshotWriter> writers_[kRanks];
  absl::Status opened_[kRanks];
  ModelBytes old_;
  ModelBytes new_;
};

TEST_F(RankFaultTest, AfterEveryOperationOfEitherRankAReaderSeesOldOrNew) {
  Start();
  std::mutex mutex;
  std::uint64_t newest = 1;
  int changes = 0;
  for (FaultFileSystem& fs : fs_) {
    fs.set_after_each([&](const Operation& operation) {
      const std::lock_guard<std::mutex> lock(mutex);
      const std::uint64_t step = Look(operation.ToString());
      EXPECT_GE(step, newest) << operation.ToString();
      changes += step != newest;
      newest = step;
    });
  }
  for (const Published& result : Publish(2)) {
    ASSERT_TRUE(result.ok()) << result.status();
    EXPECT_TRUE(result->anchor_status.ok()) << result->anchor_status;
  }
  EXPECT_EQ(newest, 2u);
  EXPECT_EQ(changes, 1);
}

TEST_F(RankFaultTest,
       EveryFaultOnEitherRankLeavesOldOrNewAndOneRetryConverges) {
  const std::pair<const char*, Fault> faults[] = {
      {"EIO", Fault::Fail(EIO)},
      {"ENOSPC", Fault::Fail(ENOSPC)},
      {"ESTALE after", Fault::PerformThenFail(ESTALE)},
      {"short", Fault::Shorten()},
      {"torn", Fault::Tear(EIO)},
      {"dropped", Fault::Drop()},
  };
  std::int64_t runs = 0;
  for (std::uint32_t broken = 0; broken < kRanks; ++broken) {
    for (const auto& [name, fault] : faults) {
      const bool dropped = fault.kind == Fault::Kind::kDrop;
      for (std::int64_t k = 1;; k += kStride) {
        Start();
        ASSERT_FALSE(HasFailure());
        fs_[broken].set_script(FaultAt(k, fault));
        const auto results = Publish(2);
        const auto log = fs_[broken].log();
        if (log.size() < static_cast<std::size_t>(k)) break;
        ++runs;
        const std::string what = absl::StrCat("rank ", broken, ": ", name,
                                              " at ", log[k - 1].ToString());
        SCOPED_TRACE(what);
        for (FaultFileSystem& fs : fs_) fs.Reset();
        const std::uint64_t seen = Look(what, dropped);
        // All say the same, and what is told is what is so.
        EXPECT_EQ(results[0].status(), results[1].status());
        EXPECT_EQ(writers_[0]->held(), writers_[1]->held());
        if (results[0].ok()) {
          EXPECT_EQ(results[0]->anchor_status, results[1]->anchor_status);
          EXPECT_TRUE(seen == 2 || dropped);
          EXPECT_EQ(writers_[0]->held().step, 2u);
        } else {
          EXPECT_EQ(writers_[0]->held().step, 1u);
          EXPECT_THAT(results[0].status().ToString(), HasSubstr("v2"));
        }
        // Once more, or on to the next step: both work.
        std::vector<Published> again;
        if (!dropped) again = Publish(results[0].ok() ? 3 : 2);
        if (dropped || absl::IsUnavailable(again[0].status()) ||
            absl::IsAlreadyExists(again[0].status())) {
          // Outcome unknown, or storage that lied: open anew and look.
          const std::uint64_t resume = dropped ? 1 : seen;
          TestModel restored = At(resume);
          Open(restored, resume);
          ASSERT_TRUE(opened_[0].ok()) << opened_[0];
          if (resume == 1) restored.Step(0.01);
          again = Publish(resume + 1);
          for (auto& writer : writers_) writer.reset();
        }
        for (const Published& result : again) {
          ASSERT_TRUE(result.ok()) << result.status();
          EXPECT_TRUE(result->anchor_status.ok()) << result->anchor_status;
        }
        EXPECT_GE(Look(what), 2u);
        ExpectSound(what);
        ASSERT_FALSE(HasFailure());
      }
    }
  }
  std::printf("%lld faults\n", static_cast<long long>(runs));
  EXPECT_GT(runs, 300 / kStride);
}

TEST_F(RankFaultTest, ARankWhoseStorageDiesLeavesAStoreThatOpens) {
  for (std::uint32_t broken = 0; broken < kRanks; ++broken) {
    for (std::int64_t k = 0;; k += kStride) {
      Start();
      ASSERT_FALSE(HasFailure());
      fs_[broken].set_script(StopAfter(k));
      Publish(2);
      const bool all = fs_[broken].operation_count() <= k;
      const std::string what = absl::StrCat("rank ", broken, " after ", k);
      SCOPED_TRACE(what);
      for (auto& writer : writers_) writer.reset();
      for (FaultFileSystem& fs : fs_) fs.Reset();
      const std::uint64_t seen = Look(what);
      TestModel restored = At(seen);
      Open(restored);
      ASSERT_TRUE(opened_[0].ok()) << opened_[0];
      restored.Step(0.01);
      for (const Published& result : Publish(seen + 1)) {
        ASSERT_TRUE(result.ok()) << result.status();
        EXPECT_TRUE(result->anchor_status.ok()) << result->anchor_status;
      }
      // Nothing of the dead writer stays in the way.
      const auto staged =
          PosixFileSystem()->List(temp_->Join("store/.staging"));
      ASSERT_TRUE(staged.ok());
      for (const std::string& name : *staged) {
        EXPECT_FALSE(ParseStagingName(name).has_value()) << name;
      }
      ExpectSound(what);
      ASSERT_FALSE(HasFailure());
      if (all) break;
    }
  }
}

TEST_F(RankFaultTest, EveryFaultWhileOpeningLeavesAStoreThatOpens) {
  for (std::uint32_t broken = 0; broken < kRanks; ++broken) {
    for (const Fault& fault :
         {Fault::Fail(EIO), Fault::PerformThenFail(ESTALE), Fault::Tear(EIO)}) {
      for (std::int64_t k = 1;; k += kStride) {
        Start();
        ASSERT_FALSE(HasFailure());
        for (auto& writer : writers_) writer.reset();
        fs_[broken].set_script(FaultAt(k, fault));
        TestModel restored = At(1);
        Open(restored, 1);
        const auto log = fs_[broken].log();
        if (log.size() < static_cast<std::size_t>(k)) break;
        const std::string what =
            absl::StrCat("rank ", broken, " at ", log[k - 1].ToString());
        SCOPED_TRACE(what);
        for (FaultFileSystem& fs : fs_) fs.Reset();
        EXPECT_EQ(Look(what), 1u);
        if (!opened_[0].ok()) Open(restored, 1);
        ASSERT_TRUE(opened_[0].ok()) << opened_[0];
        restored.Step(0.01);
        for (const Published& result : Publish(2)) {
          ASSERT_TRUE(result.ok()) << result.status();
        }
        EXPECT_EQ(Look(what), 2u);
        ExpectSound(what);
        ASSERT_FALSE(HasFailure());
      }
    }
  }
}

// Report: a disk that was full on one node left half a step on the others.
TEST_F(RankFaultTest, AFullDiskOnOneRankFailsAllWithItsNumber) {
  for (std::uint32_t broken = 0; broken < kRanks; ++broken) {
    Start();
    fs_[broken].set_script([](const Operation& operation) {
      return operation.kind == FileOperation::kWrite ? Fault::Fail(ENOSPC)
                                                     : Fault::None();
    });
    for (const Published& result : Publish(2)) {
      EXPECT_EQ(result.status().code(), absl::StatusCode::kResourceExhausted);
      EXPECT_THAT(
          result.status().ToString(),
          ::testing::AllOf(HasSubstr(absl::StrCat("rank ", broken, " of 2")),
                           HasSubstr("ENOSPC"), HasSubstr("v2")));
    }
    for (FaultFileSystem& fs : fs_) fs.Reset();
    // What was written is gone on all ranks: it would only fill the disk.
    EXPECT_THAT(
        *PosixFileSystem()->List(temp_->Join("store/.staging")),
        ::testing::Each(::testing::Not(::testing::StartsWith("step_"))));
    for (const Published& result : Publish(2)) {
      EXPECT_TRUE(result.ok()) << result.status();
    }
    EXPECT_EQ(Look("after"), 2u);
  }
}

}  // namespace
}  // namespace kedge
