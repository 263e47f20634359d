// Goal: the snapshot writer on a device publishes what the tensors hold, from a
// snapshot in either memory, at any cadence. Method: as optimizer_hook_test.

#include "kedge/writer/device_snapshot_writer.h"

#include <cerrno>
#include <chrono>
#include <functional>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kedge/engine/cpu/cpu_device.h"
#include "kedge/engine/io/store.h"
#include "kedge/reader/fsck.h"
#include "kedge/tests/support/fault_file_system.h"
#include "kedge/tests/support/temp_directory.h"
#include "kedge/tests/support/test_model.h"
#include "kedge/tests/writer/hook_trainer.h"

namespace kedge {
namespace {

using ::testing::HasSubstr;

class DeviceSnapshotWriterTest : public ::testing::TestWithParam<MemoryKind> {
 protected:
  DeviceSnapshotWriterTest() : device_(Options()), trainer_(&device_, 31) {
    trainer_.AddEverything();
  }
  CpuDeviceOptions Options() {
    CpuDeviceOptions options;
    options.delay = std::chrono::microseconds(10);
    options.fault = [this](absl::string_view operation) {
      if (on_operation_) on_operation_(operation);
      return absl::OkStatus();
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
    options.snapshot = GetParam();
    options.chunk_bytes = 20'000;
    options.ring_bytes = 300'000;
    return options;
  }
  void Train(double fraction) {
    trainer_.Optimize(fraction);
    trainer_.PutRight();
  }
  void ExpectVersion(std::uint64_t step) {
    const auto store = Store::Open(PosixFileSystem(), temp_.Join("store"));
    ASSERT_TRUE(store.ok()) << store.status();
    const auto published = (*store)->ReadStep(step);
    ASSERT_TRUE(published.ok()) << published.status();
    const auto model = ReadModel(**store, *published);
    ASSERT_TRUE(model.ok()) << model.status();
    EXPECT_TRUE(*model == trainer_.Expected()) << "v" << step;
  }
  void ExpectClean() {
    FsckOptions options;
    options.store_path = temp_.Join("store");
    options.deep = true;
    const auto report = Fsck(options);
    ASSERT_TRUE(report.ok()) << report.status();
    EXPECT_TRUE(report->clean()) << FormatFsckReport(*report);
  }

  const TempDirectory temp_;
  FaultFileSystem fs_;  // syncs nothing to the disk
  std::function<void(absl::string_view)> on_operation_;
  CpuDevice device_;
  HookTrainer trainer_;
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
    const auto result = (*writer)->Publish(step, options);
    ASSERT_TRUE(result.ok()) << result.status();
    EXPECT_TRUE(result->anchor_status.ok()) << result->anchor_status;
    ExpectVersion(step);
  }
  (*writer).reset();
  // Resume, and an empty step.
  auto again = DeviceSnapshotWriter::Open(Writer(), Snapshot());
  ASSERT_TRUE(again.ok()) << again.status();
  const auto empty = (*again)->Publish(7);
  ASSERT_TRUE(empty.ok()) << empty.status();
  EXPECT_EQ(empty->records, 0u);
  ExpectVersion(7);
  ExpectClean();
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
  ExpectClean();
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

}  // namespace
}  // namespace kedge
