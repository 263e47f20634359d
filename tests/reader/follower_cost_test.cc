// Goal: what an update costs follows what changed, not what there is: bytes
// read, storage operations, memory.
// Method: count operations through the file system seam and bytes through
// operator new, with assertions that do not depend on the scale.

#include <atomic>
#include <cstdlib>
#include <memory>
#include <new>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "kedge/reader/follower.h"
#include "kedge/reader/version_reader.h"
#include "kedge/tests/support/fault_file_system.h"
#include "kedge/tests/support/temp_directory.h"
#include "kedge/writer/snapshot_writer.h"

namespace {
std::atomic<std::uint64_t> allocated_bytes{0};
}  // namespace

// Every allocation of this program is counted.
void* operator new(std::size_t bytes) {
  allocated_bytes.fetch_add(bytes, std::memory_order_relaxed);
  if (void* memory = std::malloc(bytes == 0 ? 1 : bytes)) return memory;
  std::abort();
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }

namespace kedge {
namespace {

// Memory that takes no space until it is written.
struct Sparse {
  explicit Sparse(std::uint64_t bytes)
      : data(static_cast<std::byte*>(std::calloc(bytes, 1))) {}
  ~Sparse() { std::free(data); }
  std::byte* data;
};

TensorTarget Target(const TrainerTensor& tensor, void* data) {
  TensorTarget target;
  target.name = tensor.name;
  target.dtype = tensor.dtype;
  target.shape = tensor.shape;
  target.data = data;
  return target;
}

// Report 41: one changed entry allocated a temporary of the full shape.
TEST(FollowerCostTest, OneChangedElementOfALargeTensorCostsNoLargeAnything) {
  // 64 MiB here; nothing below depends on it.
  const std::uint64_t rows = 8192;
  const std::uint64_t cols = 4096;
  const std::uint64_t bytes = rows * cols * 2;
  TempDirectory directory;
  const Sparse trainer(bytes);
  const Sparse engine(bytes);
  TrainerTensor tensor;
  tensor.name = "big";
  tensor.shape = {rows, cols};
  tensor.data = trainer.data;
  WriterOptions writer_options;
  writer_options.store_path = directory.Join("store");
  auto writer =
      SnapshotWriter::Create(writer_options, {.external_v0 = true}, {tensor});
  ASSERT_TRUE(writer.ok()) << writer.status();

  FaultFileSystem counting;
  WeightSet set;
  ASSERT_TRUE(set.Add(Target(tensor, engine.data)).ok());
  FollowerOptions options;
  options.store_path = writer_options.store_path;
  options.fs = &counting;
  options.read_mode = ReadMode::kRead;
  options.retry_deadline = std::chrono::milliseconds(0);
  const auto follower = Follower::Open(options, {&set});
  ASSERT_TRUE(follower.ok()) << follower.status();
  ASSERT_TRUE((*follower)->VerifyHeld(0).ok());

  trainer.data[bytes / 2 + 2] = std::byte{1};
  ASSERT_TRUE((*writer)->Publish(1).ok());
  counting.Reset();
  const std::uint64_t before = allocated_bytes.load();
  const auto result = (*follower)->Update();
  const std::uint64_t allocated = allocated_bytes.load() - before;
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->nnz, 1u);
  EXPECT_EQ(result->units_written, 1u);
  EXPECT_EQ(result->bytes_verified, bytes);
  EXPECT_LT(counting.bytes_read(), 16u << 10);
  EXPECT_LT(counting.operation_count(), 40);
  EXPECT_LT(allocated, 1u << 20);
  EXPECT_EQ(engine.data[bytes / 2 + 2], std::byte{1});
}

class ManyTensorsTest : public testing::Test {
 protected:
  static constexpr std::uint64_t kTensors = 20'000;
  static constexpr std::uint64_t kElements = 24;

  ManyTensorsTest()
      : trainer_(kTensors * kElements * 2), engine_(kTensors * kElements * 2) {
    for (std::uint64_t i = 0; i < kTensors; ++i) {
      TrainerTensor tensor;
      tensor.name = absl::StrCat("layer.", i, ".weight");
      tensor.shape = {4, kElements / 4};
      tensor.data = trainer_.data + i * kElements * 2;
      trainer_.data[i * kElements * 2] = std::byte(i);
      EXPECT_TRUE(
          set_.Add(Target(tensor, engine_.data + i * kElements * 2)).ok());
      tensors_.push_back(std::move(tensor));
    }
    writer_options_.store_path = directory_.Join("store");
    writer_options_.fs = &counting_;
    auto writer = SnapshotWriter::Create(writer_options_, {}, tensors_);
    EXPECT_TRUE(writer.ok()) << writer.status();
    writer_ = *std::move(writer);
    options_.store_path = writer_options_.store_path;
    options_.fs = &counting_;
    options_.read_mode = ReadMode::kRead;
  }
  bool Same() const {
    return std::equal(trainer_.data, trainer_.data + kTensors * kElements * 2,
                      engine_.data);
  }

  TempDirectory directory_;
  FaultFileSystem counting_;
  Sparse trainer_;
  Sparse engine_;
  WeightSet set_;
  std::vector<TrainerTensor> tensors_;
  WriterOptions writer_options_;
  std::unique_ptr<SnapshotWriter> writer_;
  FollowerOptions options_;
};

TEST_F(ManyTensorsTest, TwentyThousandSmallTensorsCostAFewLargeReads) {
  for (std::uint64_t i = 0; i < kTensors; ++i) {
    trainer_.data[i * kElements * 2 + 8] = std::byte{7};
  }
  ASSERT_TRUE(writer_->Publish(1).ok());
  const auto follower = Follower::Open(options_, {&set_});
  ASSERT_TRUE(follower.ok()) << follower.status();

  counting_.Reset();
  const auto joined = (*follower)->JoinStep(0);
  ASSERT_TRUE(joined.ok()) << joined.status();
  // 20,000 slices on 4 KiB boundaries are 78 MiB: ten reads of a piece.
  EXPECT_LT(counting_.operation_count(), 80) << counting_.LogText();

  counting_.Reset();
  const auto result = (*follower)->Update();
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->records, kTensors);
  EXPECT_LT(counting_.operation_count(), 40) << counting_.LogText();
  EXPECT_TRUE(Same());
}

}  // namespace
}  // namespace kedge
