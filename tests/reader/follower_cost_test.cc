// Goal: what an update costs follows what changed, not what there is: bytes
// read, storage operations, memory.
// Method: count operations through the file system seam and bytes through
// operator new, with assertions that do not depend on the scale.

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <memory>
#include <new>
#include <string>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "kedge/format/fixed_files.h"
#include "kedge/format/layout.h"
#include "kedge/format/limits.h"
#include "kedge/reader/follower.h"
#include "kedge/reader/version_reader.h"
#include "kedge/tests/support/fault_file_system.h"
#include "kedge/tests/support/temp_directory.h"
#include "kedge/writer/snapshot_writer.h"

namespace {
std::atomic<std::uint64_t> allocated_bytes{0};
}  // namespace

// Every allocation of this program is counted.
[[gnu::noinline]] void* operator new(std::size_t bytes) {
  allocated_bytes.fetch_add(bytes, std::memory_order_relaxed);
  if (void* memory = std::malloc(bytes == 0 ? 1 : bytes)) return memory;
  std::abort();
}
[[gnu::noinline]] void operator delete(void* memory) noexcept {
  std::free(memory);
}
[[gnu::noinline]] void operator delete(void* memory, std::size_t) noexcept {
  std::free(memory);
}

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

// A run of many small steps of a model that is large beside them, with an
// anchor every so often.
class LongRunTest : public testing::Test {
 protected:
  static constexpr std::uint64_t kSteps = 1000;
  static constexpr std::uint64_t kElements = 1 << 19;  // 1 MiB

  LongRunTest() : trainer_(2 * kElements), engine_(2 * kElements) {
    unsynced_.set_script([](const Operation& operation) {
      return operation.kind == FileOperation::kSync ||
                     operation.kind == FileOperation::kSyncDirectory
                 ? Fault::Drop()
                 : Fault::None();
    });
    tensor_.name = "w";
    tensor_.shape = {1 << 10, kElements >> 10};
    tensor_.data = trainer_.data;
    writer_options_.store_path = directory_.Join("store");
    writer_options_.fs = &unsynced_;
    auto writer = SnapshotWriter::Create(writer_options_, {}, {tensor_});
    EXPECT_TRUE(writer.ok()) << writer.status();
    writer_ = *std::move(writer);
    EXPECT_TRUE(set_.Add(Target(tensor_, engine_.data)).ok());
    options_.store_path = writer_options_.store_path;
    options_.fs = &counting_;
    options_.read_mode = ReadMode::kRead;
    options_.io_threads = 1;
    options_.apply_threads = 1;
  }
  void Publish(std::uint64_t step, bool anchor) {
    trainer_.data[2 * (step * 521 % kElements)] ^= std::byte{1};
    const auto published = writer_->Publish(step, {.anchor = anchor});
    ASSERT_TRUE(published.ok()) << published.status();
    ASSERT_TRUE(published->anchor_status.ok()) << published->anchor_status;
  }
  std::unique_ptr<Follower> Open() {
    auto follower = Follower::Open(options_, {&set_});
    EXPECT_TRUE(follower.ok()) << follower.status();
    return follower.ok() ? *std::move(follower) : nullptr;
  }
  bool Same() const {
    return std::equal(trainer_.data, trainer_.data + 2 * kElements,
                      engine_.data);
  }
  // Of the files in `directory` itself.
  static std::uint64_t BytesOf(const std::string& directory) {
    std::uint64_t bytes = 0;
    for (const auto& entry : std::filesystem::directory_iterator(directory)) {
      if (entry.is_regular_file()) bytes += entry.file_size();
    }
    return bytes;
  }
  std::string StepPath(std::uint64_t step) const {
    return writer_options_.store_path + "/" + StepDirectoryName(step);
  }

  TempDirectory directory_;
  FaultFileSystem unsynced_;
  FaultFileSystem counting_;
  Sparse trainer_;
  Sparse engine_;
  TrainerTensor tensor_;
  WriterOptions writer_options_;
  std::unique_ptr<SnapshotWriter> writer_;
  WeightSet set_;
  FollowerOptions options_;
};

TEST_F(LongRunTest,
       FollowingAThousandStepsReadsEachByteOnceWhateverTheAnchors) {
  const auto follower = Open();
  ASSERT_TRUE(follower->VerifyHeld(0).ok());
  counting_.Reset();
  std::uint64_t step_bytes = 0;
  std::int64_t operations_of_first = 0;
  for (std::uint64_t step = 1; step <= kSteps; ++step) {
    // None in the first half, one at every tenth step in the second.
    Publish(step, step > kSteps / 2 && step % 10 == 0);
    step_bytes += BytesOf(StepPath(step));
    const std::int64_t before = counting_.operation_count();
    const auto result = follower->Update();
    ASSERT_TRUE(result.ok()) << result.status();
    ASSERT_EQ(result->deltas, 1u);
    ASSERT_FALSE(result->joined);
    const std::int64_t operations = counting_.operation_count() - before;
    if (step == 1) operations_of_first = operations;
    // What the last one costs is what the first one cost.
    ASSERT_EQ(operations, operations_of_first) << "v" << step;
  }
  EXPECT_LT(operations_of_first, 25);
  EXPECT_EQ(counting_.bytes_read(), step_bytes + kSteps * kHeadBytes);
  EXPECT_TRUE(Same());
  std::map<std::string, int> opened;
  for (const Operation& operation : counting_.log()) {
    if (operation.kind != FileOperation::kOpenForRead) continue;
    EXPECT_EQ(operation.path.find("/anchor/"), std::string::npos);
    if (operation.path.find("/step_") == std::string::npos) continue;
    EXPECT_EQ(++opened[operation.path], 1) << operation.path;
  }

  // All at once, from where it began.
  std::fill(engine_.data, engine_.data + 2 * kElements, std::byte{0});
  const auto late = Open();
  ASSERT_TRUE(late->VerifyHeld(0).ok());
  counting_.Reset();
  const auto result = late->Update();
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->deltas, kSteps);
  EXPECT_EQ(counting_.bytes_read(), step_bytes + kHeadBytes);
  EXPECT_TRUE(Same());

  // A join: one anchor, the deltas after it, and what says that they are sound.
  Publish(kSteps + 1, false);
  Publish(kSteps + 2, false);
  counting_.Reset();
  const auto joined = Open()->Join();
  ASSERT_TRUE(joined.ok()) << joined.status();
  EXPECT_EQ(joined->deltas, 2u);
  EXPECT_TRUE(Same());
  const std::string anchored = StepPath(kSteps);
  std::uint64_t expected = BytesOf(anchored + "/anchor");
  expected += std::filesystem::file_size(anchored + "/MANIFEST") + kCommitBytes;
  for (const std::uint64_t step : {kSteps + 1, kSteps + 2}) {
    expected += BytesOf(StepPath(step));
  }
  // Open and Join each look for the newest step; Open reads what the store is.
  expected += std::filesystem::file_size(StepPath(kSteps + 2) + "/MANIFEST") +
              kCommitBytes + kStoreBytes + kEpochBytes +
              writer_->store_writer().table().bytes().size();
  // The head and the padding of the anchor's one file are not read.
  EXPECT_LE(counting_.bytes_read(), expected);
  EXPECT_GE(counting_.bytes_read(), expected - 2 * kSliceAlignment);
}

}  // namespace
}  // namespace kedge
