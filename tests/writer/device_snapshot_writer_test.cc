// Goal: the snapshot writer on a device publishes what the tensors hold, from a
// snapshot in either memory, at any cadence; an anchor that is written while
// the trainer goes on is the version that it was begun at. Method: as
// optimizer_hook_test; anchors are held where their first operation is.

#include "kedge/writer/device_snapshot_writer.h"

#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kedge/engine/cpu/cpu_device.h"
#include "kedge/engine/io/store.h"
#include "kedge/tests/support/fault_file_system.h"
#include "kedge/tests/support/temp_directory.h"
#include "kedge/tests/support/test_model.h"
#include "kedge/tests/writer/hook_trainer.h"
#include "kedge/tests/writer/rank_world.h"
#include "kedge/tests/writer/store_checks.h"
#include "kedge/writer/local_coordinator.h"

namespace kedge {
namespace {

using std::chrono::milliseconds;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

class SnapshotInTest : public ::testing::Test {
 protected:
  explicit SnapshotInTest(MemoryKind kind)
      : kind_(kind), device_(Options()), trainer_(&device_, 31) {
    trainer_.AddEverything();
  }
  CpuDeviceOptions Options() {
    CpuDeviceOptions options;
    options.delay = std::chrono::microseconds(10);
    options.fault = [this](absl::string_view operation) {
      if (on_operation_) on_operation_(operation);
      return fault_ ? fault_(operation) : absl::OkStatus();
    };
    return options;
  }
  WriterOptions Writer() {
    WriterOptions options;
    options.store_path = temp_.Join("store");
    options.fs = &fs_;
    options.io_threads = 3;
    options.encode_threads = 2;
    return options;
  }
  DeviceSnapshotOptions Snapshot() {
    DeviceSnapshotOptions options;
    const HookOptions hook = trainer_.Options();
    options.device = &device_;
    options.tensors = hook.tensors;
    options.tensors.insert(options.tensors.end(), hook.residual.begin(),
                           hook.residual.end());
    options.snapshot = kind_;
    options.chunk_bytes = 20'000;
    options.ring_bytes = 300'000;
    return options;
  }
  void Train(double fraction) {
    trainer_.Optimize(fraction);
    trainer_.PutRight();
  }
  void ExpectVersion(std::uint64_t step) {
    ExpectVersion(step, trainer_.Expected());
  }
  // `joined`: from the version's own anchor, without a delta.
  void ExpectVersion(std::uint64_t step, const ModelBytes& expected,
                     bool joined = false) {
    const auto store = Store::Open(PosixFileSystem(), temp_.Join("store"));
    ASSERT_TRUE(store.ok()) << store.status();
    const auto published = (*store)->ReadStep(step);
    ASSERT_TRUE(published.ok()) << published.status();
    const auto chain = (*store)->FindChain(*published, nullptr);
    ASSERT_TRUE(chain.ok()) << chain.status();
    if (joined) {
      EXPECT_EQ(chain->deltas.size(), 0u) << "v" << step;
    }
    const auto model = ReadModel(**store, *published);
    ASSERT_TRUE(model.ok()) << model.status();
    EXPECT_TRUE(*model == expected) << "v" << step;
  }
  bool HasAnchor(std::uint64_t step) {
    const auto store = Store::Open(PosixFileSystem(), temp_.Join("store"));
    EXPECT_TRUE(store.ok()) << store.status();
    return PosixFileSystem()->Stat((*store)->AnchorPath(step)).ok();
  }

  const MemoryKind kind_;
  const TempDirectory temp_;
  FaultFileSystem fs_;  // syncs nothing to the disk
  std::function<void(absl::string_view)> on_operation_;
  std::function<absl::Status(absl::string_view)> fault_;
  CpuDevice device_;
  HookTrainer trainer_;
};

class DeviceSnapshotWriterTest
    : public SnapshotInTest,
      public ::testing::WithParamInterface<MemoryKind> {
 protected:
  DeviceSnapshotWriterTest() : SnapshotInTest(GetParam()) {}
};

INSTANTIATE_TEST_SUITE_P(SnapshotIn, DeviceSnapshotWriterTest,
                         ::testing::Values(MemoryKind::kDevice,
                                           MemoryKind::kPinned),
                         [](const auto& kind) {
                           return kind.param == MemoryKind::kDevice ? "Device"
                                                                    : "Pinned";
                         });

TEST_P(DeviceSnapshotWriterTest, PublishesWhatTheTensorsHold) {
  const std::uint64_t device_before = device_.bytes_in_use(MemoryKind::kDevice);
  const std::uint64_t pinned_before = device_.bytes_in_use(MemoryKind::kPinned);
  auto writer = DeviceSnapshotWriter::Create(Writer(), {}, Snapshot());
  ASSERT_TRUE(writer.ok()) << writer.status();
  EXPECT_EQ((*writer)->memory().device_bytes,
            device_.bytes_in_use(MemoryKind::kDevice) - device_before);
  EXPECT_EQ((*writer)->memory().pinned_bytes,
            device_.bytes_in_use(MemoryKind::kPinned) - pinned_before);
  ExpectVersion(0);
  for (const std::uint64_t step : {1, 2, 5, 6}) {  // any cadence
    // Dense steps run the ring full.
    Train(step == 2 ? 0.9 : 0.01);
    PublishOptions options;
    options.anchor = step == 5;
    auto result = (*writer)->Publish(step, options);
    ASSERT_TRUE(result.ok()) << result.status();
    EXPECT_EQ(result->anchor_under_way,
              options.anchor && kind_ == MemoryKind::kPinned);
    EXPECT_TRUE((*writer)->WaitForAnchor(&*result).ok());
    EXPECT_FALSE(result->anchor_under_way);
    EXPECT_TRUE(result->anchor_status.ok()) << result->anchor_status;
    EXPECT_EQ(result->anchor_bytes > 0, options.anchor);
    ExpectVersion(step, trainer_.Expected(), options.anchor);
  }
  (*writer).reset();
  // Resume, and an empty step.
  auto again = DeviceSnapshotWriter::Open(Writer(), Snapshot());
  ASSERT_TRUE(again.ok()) << again.status();
  const auto empty = (*again)->Publish(7);
  ASSERT_TRUE(empty.ok()) << empty.status();
  EXPECT_EQ(empty->records, 0u);
  ExpectVersion(7);
  ExpectClean(temp_.Join("store"));
}

TEST_P(DeviceSnapshotWriterTest, OnlyASuccessMovesTheSnapshotOn) {
  auto writer = DeviceSnapshotWriter::Create(Writer(), {}, Snapshot());
  ASSERT_TRUE(writer.ok()) << writer.status();
  Train(0.9);
  fs_.set_script(
      FaultOn(FileOperation::kRename, "step_00000001", Fault::Fail(EIO)));
  EXPECT_FALSE((*writer)->Publish(1).ok());
  fs_.set_script(nullptr);
  Train(0.01);
  const auto result = (*writer)->Publish(2);
  ASSERT_TRUE(result.ok()) << result.status();
  ExpectVersion(2);
  ExpectClean(temp_.Join("store"));
}

TEST_P(DeviceSnapshotWriterTest, NamesATensorThatChangesDuringThePublish) {
  auto writer = DeviceSnapshotWriter::Create(Writer(), {}, Snapshot());
  ASSERT_TRUE(writer.ok()) << writer.status();
  Train(0.01);
  std::byte* const weight = trainer_.Weights(trainer_.IndexOf("flat")) + 99;
  on_operation_ = [&](absl::string_view operation) {
    if (operation == "Sums") *weight ^= std::byte{1};
  };
  const auto failed = (*writer)->Publish(1);
  on_operation_ = nullptr;
  EXPECT_EQ(failed.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(failed.status().message()),
              HasSubstr("tensor \"flat\": changed while"));
  *weight ^= std::byte{1};
  ASSERT_TRUE((*writer)->Publish(1).ok());
  ExpectVersion(1);
}

// ------------------------------------------------- anchors in the background

// Holds every anchor at the first thing that is done for it, before a byte of
// it was read. FaultFileSystem runs one operation at a time: whatever else goes
// through it waits as well.
class Hold {
 public:
  FaultScript Script() {
    return [this](const Operation& operation) {
      if (operation.kind != FileOperation::kMakeDirectory ||
          !absl::StrContains(operation.path, ".anchor.")) {
        return Fault::None();
      }
      std::unique_lock<std::mutex> lock(mutex_);
      held_ = true;
      changed_.notify_all();
      // A writer that waits where it should not fails the test, and ends.
      return changed_.wait_for(lock, kLong, [this] { return released_; })
                 ? Fault::None()
                 : Fault::Fail(ETIMEDOUT);
    };
  }
  bool WaitUntilHeld() {
    std::unique_lock<std::mutex> lock(mutex_);
    return changed_.wait_for(lock, kLong, [this] { return held_; });
  }
  void Release() {
    const std::lock_guard<std::mutex> lock(mutex_);
    released_ = true;
    changed_.notify_all();
  }

 private:
  static constexpr std::chrono::seconds kLong{20};
  std::mutex mutex_;
  std::condition_variable changed_;
  bool held_ = false;
  bool released_ = false;
};

PublishOptions WithAnchor() {
  PublishOptions options;
  options.anchor = true;
  return options;
}

class BackgroundAnchorTest : public SnapshotInTest {
 protected:
  BackgroundAnchorTest() : SnapshotInTest(MemoryKind::kPinned) {}
};

TEST_F(BackgroundAnchorTest, TheTrainerGoesOnAndTheAnchorIsTheVersion) {
  // Shards of one tensor in both memories, beside all else.
  constexpr std::uint64_t kOnDevice = 777;
  constexpr std::uint64_t kElements = 2000;
  std::vector<std::uint16_t> mixed(kElements);  // what is on the host is last
  const DeviceMemory on_device =
      *device_.Allocate(MemoryKind::kDevice, 2 * kOnDevice);
  const auto change_mixed = [&](std::uint16_t by) {
    for (std::uint64_t i = 0; i < kElements; ++i) {
      mixed[i] = static_cast<std::uint16_t>(mixed[i] + by * i);
    }
    std::memcpy(on_device.data(), mixed.data(), 2 * kOnDevice);
  };
  change_mixed(1);
  DeviceSnapshotOptions options = Snapshot();
  for (const bool host : {true, false}) {
    TrainerTensor shard;
    shard.name = "mixed";
    shard.shape = {kElements};
    shard.data = host ? static_cast<const void*>(mixed.data() + kOnDevice)
                      : on_device.data();
    shard.shard =
        host ? ElementRange{kOnDevice, kElements} : ElementRange{0, kOnDevice};
    options.tensors.push_back(shard);
  }
  const auto expected = [&] {
    ModelBytes model = trainer_.Expected();
    const auto* const bytes = reinterpret_cast<const std::byte*>(mixed.data());
    model["mixed"].assign(bytes, bytes + 2 * kElements);
    return model;
  };

  auto writer = DeviceSnapshotWriter::Create(Writer(), {}, options);
  ASSERT_TRUE(writer.ok()) << writer.status();
  EXPECT_TRUE((*writer)->WaitForAnchor().ok());  // none was begun
  Train(0.01);
  change_mixed(3);
  const ModelBytes published = expected();
  Hold hold;
  fs_.set_script(hold.Script());
  auto result = (*writer)->Publish(1, WithAnchor());
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_TRUE(result->anchor_under_way);
  EXPECT_TRUE(result->anchor_status.ok()) << result->anchor_status;
  EXPECT_EQ(result->anchor_bytes, 0u);
  EXPECT_TRUE(hold.WaitUntilHeld());
  // The step is visible, its anchor is not.
  ExpectVersion(1, published);
  EXPECT_FALSE(HasAnchor(1));

  // The next step changes all that the anchor could read by mistake.
  Train(0.9);
  change_mixed(5);
  for (const auto& [name, bytes] : expected()) {
    if (bytes.empty() || name == "embed" || name == "lm_head") continue;
    EXPECT_NE(bytes, published.at(name)) << name;
  }
  hold.Release();
  // Beside it.
  EXPECT_EQ((*writer)->held(), result->version);
  EXPECT_TRUE((*writer)->store_writer().CheckUsable().ok());
  EXPECT_EQ((*writer)->store_writer().held(), result->version);
  EXPECT_GT((*writer)->memory().snapshot_bytes, 0u);
  EXPECT_TRUE((*writer)->WaitForAnchor(&*result).ok());
  EXPECT_FALSE(result->anchor_under_way);
  EXPECT_TRUE(result->anchor_status.ok()) << result->anchor_status;
  EXPECT_GT(result->anchor_bytes, 100'000u);
  EXPECT_GT(result->anchor_seconds, 0);
  EXPECT_TRUE((*writer)->WaitForAnchor().ok());
  ExpectVersion(1, published, /*joined=*/true);

  const auto next = (*writer)->Publish(2);
  ASSERT_TRUE(next.ok()) << next.status();
  EXPECT_THAT(next->warnings, IsEmpty());
  ExpectVersion(2, expected());
  ExpectClean(temp_.Join("store"));
}

TEST_F(BackgroundAnchorTest,
       TheNextPublishTouchesNothingBeforeTheAnchorStands) {
  auto writer = DeviceSnapshotWriter::Create(Writer(), {}, Snapshot());
  ASSERT_TRUE(writer.ok()) << writer.status();
  Train(0.01);
  const ModelBytes published = trainer_.Expected();
  Hold hold;
  std::atomic<bool> stands{false};
  fs_.set_script(hold.Script());
  fs_.set_after_each([&](const Operation& operation) {
    if (absl::EndsWith(operation.to, "step_00000001/anchor")) stands = true;
  });
  ASSERT_TRUE((*writer)->Publish(1, WithAnchor()).ok());
  ASSERT_TRUE(hold.WaitUntilHeld());
  Train(0.5);
  std::atomic<int> early{0};
  on_operation_ = [&](absl::string_view) {
    if (!stands) ++early;
  };
  // What a publish that does not wait would have time to do.
  std::thread releaser([&] {
    std::this_thread::sleep_for(milliseconds(100));
    hold.Release();
  });
  const auto next = (*writer)->Publish(2, WithAnchor());
  releaser.join();
  on_operation_ = nullptr;
  ASSERT_TRUE(next.ok()) << next.status();
  EXPECT_EQ(early, 0);
  EXPECT_TRUE(stands);
  EXPECT_THAT(next->warnings, IsEmpty());
  EXPECT_TRUE((*writer)->WaitForAnchor().ok());
  ExpectVersion(1, published, /*joined=*/true);
  ExpectVersion(2, trainer_.Expected(), /*joined=*/true);
  ExpectClean(temp_.Join("store"));
}

TEST_F(BackgroundAnchorTest, OneThatFailsIsToldAndHarmsNoStep) {
  auto writer = DeviceSnapshotWriter::Create(Writer(), {}, Snapshot());
  ASSERT_TRUE(writer.ok()) << writer.status();
  std::atomic<bool> broken{true};
  fs_.set_script([&](const Operation& operation) {
    if (operation.kind != FileOperation::kRename) return Fault::None();
    if (absl::EndsWith(operation.to, "step_00000001/anchor")) {
      return Fault::Fail(EIO);
    }
    // The step after it, once.
    if (absl::EndsWith(operation.to, "step_00000002") &&
        broken.exchange(false)) {
      return Fault::Fail(EIO);
    }
    return Fault::None();
  });
  Train(0.01);
  auto first = (*writer)->Publish(1, WithAnchor());
  ASSERT_TRUE(first.ok()) << first.status();
  ExpectVersion(1);
  Train(0.01);
  // There is no result that could carry the warning.
  EXPECT_FALSE((*writer)->Publish(2).ok());
  const auto second = (*writer)->Publish(2);
  ASSERT_TRUE(second.ok()) << second.status();
  EXPECT_THAT(second->warnings,
              ElementsAre(HasSubstr("v1 is published, but its anchor is not")));
  ExpectVersion(2);
  Train(0.01);
  const auto third = (*writer)->Publish(3);
  ASSERT_TRUE(third.ok()) << third.status();
  EXPECT_THAT(third->warnings, IsEmpty());
  // It is remembered until there is another one.
  EXPECT_FALSE((*writer)->WaitForAnchor(&*first).ok());
  EXPECT_FALSE(first->anchor_under_way);
  EXPECT_THAT(std::string(first->anchor_status.message()),
              HasSubstr("step_00000001/anchor"));
  EXPECT_EQ(first->anchor_bytes, 0u);
  EXPECT_FALSE(HasAnchor(1));
  Train(0.01);
  ASSERT_TRUE((*writer)->Publish(4, WithAnchor()).ok());
  const absl::Status last = (*writer)->WaitForAnchor();
  EXPECT_TRUE(last.ok()) << last;
  ExpectVersion(4, trainer_.Expected(), /*joined=*/true);
  ExpectClean(temp_.Join("store"));
}

// Copies into it may still be on their way, or were never made.
TEST_F(BackgroundAnchorTest, NoAnchorIsReadFromASnapshotThatWasNotTaken) {
  for (const bool background : {true, false}) {
    SCOPED_TRACE(background);
    const TempDirectory temp;
    WriterOptions writer_options = Writer();
    writer_options.store_path = temp.Join("store");
    DeviceSnapshotOptions options = Snapshot();
    options.anchors_in_background = background;
    auto writer = DeviceSnapshotWriter::Create(writer_options, {}, options);
    ASSERT_TRUE(writer.ok()) << writer.status();
    Train(0.01);
    // The first of these after the step stands.
    const char* const broken = background ? "Copy" : "WaitForStream";
    std::atomic<bool> stands{false};
    fs_.set_after_each([&](const Operation& operation) {
      if (absl::EndsWith(operation.to, "step_00000001")) stands = true;
    });
    fault_ = [&](absl::string_view operation) {
      return operation == broken && stands.exchange(false)
                 ? absl::InternalError("broken")
                 : absl::OkStatus();
    };
    auto result = (*writer)->Publish(1, WithAnchor());
    ASSERT_TRUE(result.ok()) << result.status();
    EXPECT_THAT(result->warnings,
                ElementsAre(HasSubstr("its snapshot was not taken")));
    (*writer)->WaitForAnchor(&*result).IgnoreError();
    EXPECT_EQ(result->anchor_status.code(), absl::StatusCode::kInternal)
        << result->anchor_status;
    EXPECT_EQ(result->anchor_bytes, 0u);
    fs_.set_after_each(nullptr);
    fault_ = nullptr;
    (*writer).reset();
    kedge::ExpectVersion(temp.Join("store"), 1, trainer_.Expected());
  }
}

TEST_F(BackgroundAnchorTest, TheDestructorWaits) {
  auto writer = DeviceSnapshotWriter::Create(Writer(), {}, Snapshot());
  ASSERT_TRUE(writer.ok()) << writer.status();
  Train(0.01);
  Hold hold;
  fs_.set_script(hold.Script());
  ASSERT_TRUE((*writer)->Publish(1, WithAnchor()).ok());
  ASSERT_TRUE(hold.WaitUntilHeld());
  const ModelBytes published = trainer_.Expected();
  Train(0.5);
  std::thread releaser([&] {
    std::this_thread::sleep_for(milliseconds(50));
    hold.Release();
  });
  (*writer).reset();
  releaser.join();
  ExpectVersion(1, published, /*joined=*/true);
  ExpectClean(temp_.Join("store"));
}

TEST_F(BackgroundAnchorTest, TheForegroundCanBeHad) {
  DeviceSnapshotOptions options = Snapshot();
  options.anchors_in_background = false;
  auto writer = DeviceSnapshotWriter::Create(Writer(), {}, options);
  ASSERT_TRUE(writer.ok()) << writer.status();
  Train(0.01);
  const auto result = (*writer)->Publish(1, WithAnchor());
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_FALSE(result->anchor_under_way);
  EXPECT_TRUE(result->anchor_status.ok()) << result->anchor_status;
  EXPECT_GT(result->anchor_bytes, 0u);
  ExpectVersion(1, trainer_.Expected(), /*joined=*/true);
}

TEST_F(BackgroundAnchorTest, RetentionFollowsTheAnchor) {
  WriterOptions options = Writer();
  options.retention.emplace();
  options.retention->keep_anchors = 1;
  auto writer = DeviceSnapshotWriter::Create(options, {}, Snapshot());
  ASSERT_TRUE(writer.ok()) << writer.status();
  Train(0.01);
  ASSERT_TRUE((*writer)->Publish(1, WithAnchor()).ok());
  ASSERT_TRUE((*writer)->WaitForAnchor().ok());
  const auto steps = (*writer)->store_writer().store().ListSteps();
  ASSERT_TRUE(steps.ok()) << steps.status();
  EXPECT_THAT(*steps, ElementsAre(1));
}

// Two ranks share the trainer's tensors out; rank 1 writes its anchors in the
// background, or not.
class BackgroundAnchorRanksTest : public SnapshotInTest,
                                  public ::testing::WithParamInterface<bool> {
 protected:
  static constexpr std::uint32_t kRanks = 2;
  static constexpr std::uint64_t kSeed = 47;

  BackgroundAnchorRanksTest() : SnapshotInTest(MemoryKind::kPinned) {
    std::mt19937_64 random(kSeed);
    shards_ = CutIntoShards(Snapshot().tensors, kRanks, random);
    group_ = LocalCoordinator::MakeGroup(kRanks, std::chrono::seconds(60));
    for (const absl::Status& status :
         OnRanks<absl::Status>(kRanks, [&](std::uint32_t rank) {
           WriterOptions writer = Writer();
           writer.coordinator = group_[rank].get();
           DeviceSnapshotOptions options = Snapshot();
           options.tensors = shards_[rank];
           options.anchors_in_background = rank == 0 || GetParam();
           auto made = DeviceSnapshotWriter::Create(writer, {}, options);
           if (made.ok()) writers_[rank] = *std::move(made);
           return made.status();
         })) {
      EXPECT_TRUE(status.ok()) << status;
    }
  }
  std::vector<PublishResult> Publish(std::uint64_t step, bool anchor) {
    std::vector<PublishResult> results;
    for (const auto& result : OnRanks<absl::StatusOr<PublishResult>>(
             kRanks, [&](std::uint32_t rank) {
               PublishOptions options;
               options.anchor = anchor;
               return writers_[rank]->Publish(step, options);
             })) {
      EXPECT_TRUE(result.ok()) << result.status();
      results.push_back(result.value_or(PublishResult()));
      EXPECT_EQ(results.back().anchor_under_way,
                anchor && (results.size() == 1 || GetParam()));
    }
    return results;
  }
  std::vector<absl::Status> WaitForAnchors(
      std::vector<PublishResult>* results) {
    return OnRanks<absl::Status>(kRanks, [&](std::uint32_t rank) {
      writers_[rank]->WaitForAnchor(&(*results)[rank]).IgnoreError();
      return (*results)[rank].anchor_status;
    });
  }

  std::vector<std::vector<TrainerTensor>> shards_;
  std::vector<std::unique_ptr<LocalCoordinator>> group_;
  std::unique_ptr<DeviceSnapshotWriter> writers_[kRanks];
};

INSTANTIATE_TEST_SUITE_P(OfRank1, BackgroundAnchorRanksTest, ::testing::Bool(),
                         [](const auto& background) {
                           return background.param ? "InTheBackground"
                                                   : "InTheForeground";
                         });

TEST_P(BackgroundAnchorRanksTest, EveryAnchorIsItsVersion) {
  SCOPED_TRACE(absl::StrCat("shards from seed ", kSeed));
  Hold hold;
  if (GetParam()) fs_.set_script(hold.Script());
  std::vector<ModelBytes> versions = {trainer_.Expected()};
  for (std::uint64_t step = 1; step <= 5; ++step) {
    Train(step % 2 == 0 ? 0.5 : 0.01);
    versions.push_back(trainer_.Expected());
    const std::vector<PublishResult> results = Publish(step, step % 3 != 0);
    for (const PublishResult& result : results) {
      EXPECT_THAT(result.warnings, IsEmpty());
    }
    if (GetParam() && step == 1) {
      EXPECT_TRUE(hold.WaitUntilHeld());
      ExpectVersion(1);
      Train(0.9);  // both ranks, in the midst of it
      hold.Release();
    }
  }
  for (auto& writer : writers_) {
    const absl::Status last = writer->WaitForAnchor();
    EXPECT_TRUE(last.ok()) << last;
  }
  for (std::uint64_t step = 1; step <= 5; ++step) {
    ExpectVersion(step, versions[step], /*joined=*/step % 3 != 0);
  }
  ExpectClean(temp_.Join("store"));
}

TEST_P(BackgroundAnchorRanksTest, AFailureOfOneIsToldToBothAndBothGoOn) {
  SCOPED_TRACE(absl::StrCat("shards from seed ", kSeed));
  fs_.set_script([](const Operation& operation) {
    return operation.kind == FileOperation::kWrite &&
                   absl::StrContains(operation.path, "step_00000001.anchor.") &&
                   absl::StrContains(operation.path, "-r001-")
               ? Fault::Fail(ENOSPC)
               : Fault::None();
  });
  Train(0.01);
  std::vector<PublishResult> first = Publish(1, true);
  for (const absl::Status& status : WaitForAnchors(&first)) {
    EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
    EXPECT_THAT(std::string(status.message()), HasSubstr("rank 1 of 2"));
  }
  EXPECT_FALSE(HasAnchor(1));
  Train(0.01);
  std::vector<PublishResult> second = Publish(2, true);
  for (std::uint32_t rank = 0; rank < kRanks; ++rank) {
    // Who heard it from Publish is not told again.
    if (rank == 0 || GetParam()) {
      EXPECT_THAT(second[rank].warnings, ElementsAre(HasSubstr("rank 1 of 2")));
    } else {
      EXPECT_THAT(second[rank].warnings, IsEmpty());
    }
  }
  for (const absl::Status& status : WaitForAnchors(&second)) {
    EXPECT_TRUE(status.ok()) << status;
  }
  EXPECT_EQ(second[0].anchor_bytes, second[1].anchor_bytes);
  ExpectVersion(2, trainer_.Expected(), /*joined=*/true);
  ExpectClean(temp_.Join("store"));
}

}  // namespace
}  // namespace kedge
