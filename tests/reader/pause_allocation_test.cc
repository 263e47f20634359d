// Goal: engines do not meet the allocator while their weights are locked: from
// pause to commit a follower on a device allocates nothing.
// Method: operator new counts (counted_heap.cc), over updates of one delta and
// of several, right after VerifyHeld, Join and an update.

#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "kedge/reader/follower.h"
#include "kedge/tests/engine/device/counted_heap.h"
#include "kedge/tests/engine/device/test_device.h"
#include "kedge/tests/support/temp_directory.h"
#include "kedge/writer/snapshot_writer.h"

namespace kedge {
namespace {

constexpr std::uint64_t kTensors = 40;
constexpr std::uint64_t kRows = 96;
constexpr std::uint64_t kCols = 1024;
constexpr std::uint64_t kBytes = kRows * kCols * 2;  // of a tensor

class PauseAllocationTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string reason;
    device_ = testing::MakeTestDevice(&reason);
    if (device_ == nullptr) GTEST_SKIP() << reason;
    auto engine = device_->Allocate(MemoryKind::kDevice, kTensors * kBytes);
    ASSERT_TRUE(engine.ok()) << engine.status();
    engine_ = *std::move(engine);
    ASSERT_TRUE(
        device_->Fill(engine_.data(), 0, engine_.bytes(), nullptr).ok());
    ASSERT_TRUE(device_->WaitForStream(nullptr).ok());

    std::vector<TrainerTensor> tensors;
    for (std::uint64_t i = 0; i < kTensors; ++i) {
      TrainerTensor tensor;
      tensor.name = absl::StrCat("layer.", i, ".weight");
      tensor.shape = {kRows, kCols};
      tensor.data = trainer_.data() + i * kBytes;
      TensorTarget target;
      target.name = tensor.name;
      target.dtype = tensor.dtype;
      target.shape = tensor.shape;
      target.data = engine_.data() + i * kBytes;
      // Every third is stored transposed.
      if (i % 3 == 0) target.strides_bytes = {2, 2 * kRows};
      ASSERT_TRUE(set_.Add(std::move(target)).ok());
      tensors.push_back(std::move(tensor));
    }
    WriterOptions writer_options;
    writer_options.store_path = directory_.Join("store");
    auto writer = SnapshotWriter::Create(writer_options, {.external_v0 = true},
                                         std::move(tensors));
    ASSERT_TRUE(writer.ok()) << writer.status();
    writer_ = *std::move(writer);

    FollowerOptions options;
    options.store_path = writer_options.store_path;
    options.device = device_.get();
    options.pause = [this] {
      ++pauses_;
      at_pause_ = testing::HeapAllocations();
      return absl::OkStatus();
    };
    options.commit = [this](const VersionId&) {
      in_pause_ = testing::HeapAllocations() - at_pause_;
    };
    auto follower = Follower::Open(options, {&set_});
    ASSERT_TRUE(follower.ok()) << follower.status();
    follower_ = *std::move(follower);
  }

  void Publish(std::uint64_t step, bool anchor = false) {
    for (std::uint64_t i = step; i < kTensors * kBytes / 2; i += 101) {
      trainer_[2 * i] ^= std::byte{1};
    }
    const auto published = writer_->Publish(step, {.anchor = anchor});
    ASSERT_TRUE(published.ok()) << published.status();
    ASSERT_TRUE(published->anchor_status.ok()) << published->anchor_status;
  }
  void UpdateAllocatesNothing(std::uint64_t deltas) {
    in_pause_ = ~std::uint64_t{0};
    const int pauses = pauses_;
    const auto result = follower_->Update();
    ASSERT_TRUE(result.ok()) << result.status();
    EXPECT_EQ(result->deltas, deltas);
    EXPECT_EQ(result->bytes_verified, kTensors * kBytes);
    EXPECT_GE(result->units_written, kTensors * kBytes / 2 / 101);
    EXPECT_EQ(pauses_, pauses + 1);
    EXPECT_EQ(in_pause_, 0u) << result->version.step;
  }

  TempDirectory directory_;
  std::unique_ptr<Device> device_;
  DeviceMemory engine_;
  std::vector<std::byte> trainer_ = std::vector<std::byte>(kTensors * kBytes);
  WeightSet set_;
  std::unique_ptr<SnapshotWriter> writer_;
  int pauses_ = 0;
  std::uint64_t at_pause_ = 0;
  std::uint64_t in_pause_ = 0;
  std::unique_ptr<Follower> follower_;
};

TEST_F(PauseAllocationTest, UpdatesAllocateNothingInThePause) {
  ASSERT_TRUE(follower_->VerifyHeld(0).ok());
  Publish(1);
  UpdateAllocatesNothing(1);
  Publish(2);
  Publish(3);
  Publish(4);
  UpdateAllocatesNothing(3);
}

TEST_F(PauseAllocationTest, TheFirstUpdateAfterAJoinAllocatesNothingToo) {
  Publish(1, /*anchor=*/true);
  ASSERT_TRUE(follower_->Join().ok());
  Publish(2);
  UpdateAllocatesNothing(1);
}

}  // namespace
}  // namespace kedge
