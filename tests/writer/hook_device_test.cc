// Goal: hook and snapshot writer publish on any device what the optimizer
// wrote. Method: the same steps on CpuDevice and, where there is one, on a GPU;
// versions are rebuilt with the plain code of format/, and fsck judges the
// stores.

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "kedge/tests/engine/device/test_device.h"
#include "kedge/tests/support/temp_directory.h"
#include "kedge/tests/support/test_model.h"
#include "kedge/tests/writer/hook_trainer.h"
#include "kedge/tests/writer/store_checks.h"
#include "kedge/writer/device_snapshot_writer.h"
#include "kedge/writer/optimizer_hook.h"

namespace kedge {
namespace {

class HookDeviceTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string reason;
    device_ = testing::MakeTestDevice(&reason);
    if (device_ == nullptr) GTEST_SKIP() << reason;
    trainer_ = std::make_unique<HookTrainer>(device_.get(), 12);
    trainer_->AddEverything();
    // Larger than a chunk, in parts that no tile divides, on a GPU much larger.
    const std::uint64_t rows = testing::TestDeviceIsGpu() ? 9001 : 301;
    const auto large =
        trainer_->AddFiniteParameter("large", 2 * rows * 700 * 2);
    trainer_->AddQuantised(large, 0, "large.fp8", {rows, 700});
    trainer_->AddTensor(large, rows * 700 * 2, "large.bf16", DType::kBf16,
                        {rows, 700});
    about_bytes_ = testing::TestDeviceIsGpu() ? 3'000'000 : 60'000;
  }
  WriterOptions Writer() const {
    WriterOptions options;
    options.store_path = temp_.Join("store");
    return options;
  }

  const TempDirectory temp_;
  std::unique_ptr<Device> device_;
  std::unique_ptr<HookTrainer> trainer_;
  std::uint64_t about_bytes_ = 0;
};

TEST_F(HookDeviceTest, TheHookPublishesWhatTheOptimizerWrote) {
  HookOptions options = trainer_->Options();
  options.chunk_bytes = 4 * about_bytes_ / 3;
  options.ring_bytes = std::uint64_t{16} << 20;
  auto hook = OptimizerHook::Create(Writer(), {}, options);
  ASSERT_TRUE(hook.ok()) << hook.status();
  ExpectVersion(temp_.Join("store"), 0, trainer_->Expected());
  const double fractions[] = {0, 0.01, 0.5, 0.001, 0.03, 0.03};
  for (std::uint64_t step = 1; step <= 5; ++step) {
    SCOPED_TRACE(step);
    // The fourth is given up, and the fifth is a root.
    ASSERT_TRUE((*hook)->BeginStep(step, step == 2 || step == 5).ok());
    trainer_->Optimize(fractions[step]);
    ASSERT_TRUE(
        trainer_->Write(**hook, trainer_->Ranges(false, about_bytes_)).ok());
    ASSERT_TRUE((*hook)->EndStep().ok());
    trainer_->SyncReplicas();
    EXPECT_TRUE(trainer_->DeviceHoldsNext());
    if (step == 4) continue;
    const auto result = (*hook)->Publish();
    ASSERT_TRUE(result.ok()) << result.status();
    EXPECT_TRUE(result->publish.anchor_status.ok())
        << result->publish.anchor_status;
    ExpectVersion(temp_.Join("store"), step, trainer_->Expected());
  }
  ExpectClean(temp_.Join("store"));
  (*hook).reset();
  const auto again = OptimizerHook::Open(Writer(), options);
  EXPECT_TRUE(again.ok()) << again.status();
}

TEST_F(HookDeviceTest, TheSnapshotWriterPublishesWhatTheTensorsHold) {
  const HookOptions hook = trainer_->Options();
  DeviceSnapshotOptions options;
  options.device = device_.get();
  options.tensors = hook.tensors;
  options.tensors.insert(options.tensors.end(), hook.residual.begin(),
                         hook.residual.end());
  options.chunk_bytes = about_bytes_;
  options.ring_bytes = std::uint64_t{16} << 20;
  for (std::uint64_t step = 1; step <= 4; ++step) {
    options.snapshot = step <= 2 ? MemoryKind::kPinned : MemoryKind::kDevice;
    auto writer = step == 1
                      ? DeviceSnapshotWriter::Create(Writer(), {}, options)
                      : DeviceSnapshotWriter::Open(Writer(), options);
    ASSERT_TRUE(writer.ok()) << writer.status();
    trainer_->Optimize(step == 2 ? 0.5 : 0.01);
    trainer_->PutRight();
    PublishOptions publish;
    publish.anchor = step % 2 == 0;
    const auto result = (*writer)->Publish(step, publish);
    ASSERT_TRUE(result.ok()) << result.status();
    EXPECT_TRUE(result->anchor_status.ok()) << result->anchor_status;
    EXPECT_EQ(result->anchor_under_way, step == 2);
    const absl::Status anchored = (*writer)->WaitForAnchor();
    EXPECT_TRUE(anchored.ok()) << anchored;
    // Here bf16 travels as it is.
    ExpectVersion(temp_.Join("store"), step,
                  trainer_->Expected(/*quantised=*/false));
  }
  ExpectClean(temp_.Join("store"));
}

}  // namespace
}  // namespace kedge
