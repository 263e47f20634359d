// Goal: a follower whose weights lie on a device does what one in host memory
// does: follows, joins, verifies, heals; and its pause is a launch for each
// delta and one for all sums, without an allocation.
// Method: the real follower and writer over CpuDevice, whose streams lag
// behind, and over a GPU; every call of the device made to fail once, launches
// replaced by wrong ones. The other tests of this folder run on CpuDevice as
// well.

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <ostream>
#include <random>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kedge/engine/cpu/cpu_device.h"
#include "kedge/format/fixed_files.h"
#include "kedge/reader/follower.h"
#include "kedge/tests/engine/device/test_device.h"
#include "kedge/tests/reader/engine_memory.h"
#include "kedge/tests/reader/published_run.h"
#include "kedge/tests/reader/reader_group.h"
#include "kedge/tests/reader/scripted_device.h"
#include "kedge/tests/support/fp8_form.h"
#include "kedge/tests/support/sanitized.h"

namespace kedge {
namespace {

using std::chrono::microseconds;
using ::testing::HasSubstr;
using Part = EngineMemory::Part;

// No test runs where the program's device is missing.
class NeedsDevice : public ::testing::Environment {
 public:
  void SetUp() override {
    std::string reason;
    if (kedge::testing::MakeTestDevice(&reason) == nullptr)
      GTEST_SKIP() << reason;
  }
};
[[maybe_unused]] ::testing::Environment* const kNeedsDevice =
    ::testing::AddGlobalTestEnvironment(new NeedsDevice);

// The streams of a CPU lag by `delay`; those of a GPU lag anyhow.
std::unique_ptr<Device> NewDevice(microseconds delay = {}) {
  if (!kedge::testing::TestDeviceIsGpu()) {
    return std::make_unique<CpuDevice>(CpuDeviceOptions{.delay = delay});
  }
  std::string reason;
  return kedge::testing::MakeTestDevice(&reason);
}

TrainerTensor Tensor(std::string name, DType dtype,
                     std::vector<std::uint64_t> shape) {
  TrainerTensor tensor;
  tensor.name = std::move(name);
  tensor.dtype = dtype;
  tensor.shape = std::move(shape);
  return tensor;
}

// What a layer of a mixture of experts has, bf16 and fp8.
std::vector<TrainerTensor> LayerTensors() {
  return {Tensor("down", DType::kBf16, {260, 130}),
          Tensor("experts", DType::kBf16, {6, 40, 96}),
          Tensor("fp8", DType::kF8E4M3, {256, 260}),
          Tensor("fp8_scale_inv", DType::kF32, {2, 3}),
          Tensor("gate", DType::kBf16, {150, 130}),
          Tensor("k", DType::kBf16, {40, 200}),
          Tensor("norm", DType::kF32, {257}),
          Tensor("q", DType::kBf16, {120, 200}),
          Tensor("steps", DType::kI64, {5, 3}),
          Tensor("up", DType::kBf16, {150, 130}),
          Tensor("v", DType::kBf16, {40, 200}),
          Tensor("wide", DType::kBf16, {24, 4096})};
}

Part MakePart(std::string name, std::vector<std::uint64_t> begin,
              std::vector<std::uint64_t> extent,
              std::vector<std::int64_t> strides = {},
              std::uint64_t after_previous = 0) {
  return {std::move(name), std::move(begin), std::move(extent),
          std::move(strides), after_previous};
}

// What rank `rank` of two holds, as engines lay it out: q, k and v rows packed;
// gate and up rows between each other; half of the experts; columns of `down`,
// transposed; wide rows in halves.
std::vector<Part> LayerParts(std::uint64_t rank) {
  const std::uint64_t q_bytes = 60 * 400;
  const std::uint64_t k_bytes = 20 * 400;
  return {MakePart("q", {60 * rank, 0}, {60, 200}),
          MakePart("k", {20 * rank, 0}, {20, 200}, {}, q_bytes),
          MakePart("v", {20 * rank, 0}, {20, 200}, {}, k_bytes),
          MakePart("gate", {75 * rank, 0}, {75, 130}, {520, 2}),
          MakePart("up", {75 * rank, 0}, {75, 130}, {520, 2}, 260),
          MakePart("experts", {3 * rank, 0, 0}, {3, 40, 96}),
          MakePart("down", {0, 65 * rank}, {260, 65}, {2, 520}),
          MakePart("wide", {0, 2048 * rank}, {24, 2048}),
          MakePart("fp8", {128 * rank, 0}, {128, 260}),
          MakePart("fp8_scale_inv", {rank, 0}, {1, 3}),
          MakePart("norm", {0}, {257}),
          MakePart("steps", {0, 0}, {5, 3})};
}

using PartsOf = std::vector<Part> (*)(std::uint64_t rank);

// Two ranks with devices of their own.
class LayerGroup {
 public:
  explicit LayerGroup(const PublishedRun& run, microseconds delay = {},
                      ReadMode mode = ReadMode::kRead,
                      PartsOf parts = LayerParts)
      : run_(run), mode_(mode) {
    for (std::uint32_t r = 0; r < 2; ++r) {
      devices_.push_back(std::make_unique<ScriptedDevice>(NewDevice(delay)));
      memories_.push_back(std::make_unique<EngineMemory>(
          run.table(), parts(r), "engine", devices_[r]->plain()));
    }
    followers_.resize(2);
    results_.resize(2);
    pauses_.resize(2);
    commits_.resize(2);
  }

  ScriptedDevice& device(std::uint32_t rank) { return *devices_[rank]; }
  EngineMemory& memory(std::uint32_t rank) { return *memories_[rank]; }
  Follower& follower(std::uint32_t rank) { return *followers_[rank]; }
  const UpdateResult& result(std::uint32_t rank) { return results_[rank]; }
  // Called by each pause of a rank.
  std::function<void()>& on_pause(std::uint32_t rank) { return pauses_[rank]; }
  // Called at the end of each pause that made a version of the weights.
  std::function<void(const VersionId&)>& on_commit(std::uint32_t rank) {
    return commits_[rank];
  }

  std::vector<absl::Status> OnAll(
      const std::function<absl::Status(std::uint32_t)>& call) {
    std::vector<absl::Status> statuses(2);
    std::thread other([&] { statuses[1] = call(1); });
    statuses[0] = call(0);
    other.join();
    return statuses;
  }
  std::vector<absl::Status> Open() {
    return OnAll([&](std::uint32_t r) {
      FollowerOptions options = run_.Options(mode_);
      options.device = devices_[r].get();
      options.group = {r, 2, reducer_.ForRank(r), "tp"};
      options.pause = [this, r] {
        if (pauses_[r]) pauses_[r]();
        return absl::OkStatus();
      };
      options.commit = [this, r](const VersionId& id) {
        if (commits_[r]) commits_[r](id);
      };
      auto opened = Follower::Open(options, memories_[r]->sets());
      if (opened.ok()) followers_[r] = *std::move(opened);
      return opened.status();
    });
  }
  void Hold(std::uint64_t step) {
    for (std::uint32_t r = 0; r < 2; ++r) {
      pauses_[r] = nullptr;
      devices_[r]->Reset();
      followers_[r].reset();
      memories_[r]->Load(run_.at(step));
    }
    ASSERT_EQ(ErrorsOf(Open()), "");
    ASSERT_EQ(ErrorsOf(OnAll([&](std::uint32_t r) {
                return followers_[r]->VerifyHeld(step);
              })),
              "");
  }
  std::vector<absl::Status> Update() {
    return OnAll([&](std::uint32_t r) {
      auto result = followers_[r]->Update();
      if (result.ok()) results_[r] = *result;
      return result.status();
    });
  }
  std::vector<absl::Status> Join() {
    return OnAll([&](std::uint32_t r) {
      auto result = followers_[r]->Join();
      if (result.ok()) results_[r] = *result;
      return result.status();
    });
  }
  // Empty if both are ready with `step` and its bytes.
  std::string TroubleAt(std::uint64_t step) {
    for (std::uint32_t r = 0; r < 2; ++r) {
      if (followers_[r]->state() != FollowerState::kReady) {
        return absl::StrCat("rank ", r, " is ",
                            ToString(followers_[r]->state()));
      }
      if (followers_[r]->held() != run_.id(step)) {
        return absl::StrCat("rank ", r, " holds another version");
      }
      const std::string difference = memories_[r]->Difference(run_.at(step));
      if (!difference.empty()) {
        return absl::StrCat("rank ", r, ": ", difference);
      }
    }
    return "";
  }

 private:
  const PublishedRun& run_;
  ReadMode mode_;
  std::vector<std::unique_ptr<ScriptedDevice>> devices_;
  std::vector<std::unique_ptr<EngineMemory>> memories_;
  ThreadReducer reducer_{2};
  std::vector<std::function<void()>> pauses_;
  std::vector<std::function<void(const VersionId&)>> commits_;
  std::vector<std::unique_ptr<Follower>> followers_;
  std::vector<UpdateResult> results_;
};

std::uint64_t UnitsOf(const TensorTable& table, const std::string& name) {
  const TensorSpec& spec = table[*table.Find(name)];
  return spec.byte_count() / UnitBytes(spec.dtype);
}

class LayerTest : public ::testing::TestWithParam<ReadMode> {};

// Streams lag behind by more than the calls take: what is not waited for is
// seen.
TEST_P(LayerTest, ATensorParallelPairFollowsTenStepsAndJoins) {
  PublishedRun run(LayerTensors(), 11);
  LayerGroup group(run, microseconds(300), GetParam());
  group.Hold(0);
  std::uint64_t own_elements[2] = {};
  std::uint64_t own_bytes[2] = {0, 0};
  for (std::uint64_t step = 1; step <= 10; ++step) {
    run.Publish(step, step == 4);
    ASSERT_EQ(ErrorsOf(group.Update()), "");
    ASSERT_EQ(group.TroubleAt(step), "") << "v" << step;
    std::uint64_t written = 0;
    for (std::uint32_t r = 0; r < 2; ++r) {
      const UpdateResult& result = group.result(r);
      EXPECT_TRUE(result.changed);
      EXPECT_EQ(result.deltas, 1u);
      EXPECT_EQ(result.tensors_verified, run.table().size());
      own_elements[r] = result.elements_verified;
      own_bytes[r] = result.bytes_verified;
      written += result.units_written;
    }
    // Of two replicas one half of the boxes is in a cover, the other in another
    // one: norm and steps count twice.
    EXPECT_EQ(own_elements[0] + own_elements[1],
              ElementsOf(run.table()) + 257 + 15);
    EXPECT_EQ(own_bytes[0] + own_bytes[1],
              run.table().total_bytes() + 257 * 4 + 15 * 8);
    EXPECT_GT(written, 0u);
  }
  for (std::uint32_t r = 0; r < 2; ++r) {
    group.memory(r).Fill(std::byte{0x5b});
  }
  ASSERT_EQ(ErrorsOf(group.Open()), "");
  ASSERT_EQ(ErrorsOf(group.Join()), "");
  ASSERT_EQ(group.TroubleAt(10), "");
  for (std::uint32_t r = 0; r < 2; ++r) {
    EXPECT_TRUE(group.result(r).joined);
    EXPECT_EQ(group.result(r).deltas, 6u);
  }
}

INSTANTIATE_TEST_SUITE_P(All, LayerTest,
                         ::testing::Values(ReadMode::kMap, ReadMode::kRead),
                         [](const auto& test) {
                           return test.param == ReadMode::kMap ? "Mapped"
                                                               : "Read";
                         });

class DeviceLayoutTest : public ::testing::TestWithParam<Layout> {};

// Every dtype, tensors of every odd shape.
TEST_P(DeviceLayoutTest, FollowsAndJoins) {
  PublishedRun run(8);
  const std::unique_ptr<Device> device = NewDevice();
  EngineMemory memory(run.table(), GetParam(), {}, device.get());
  FollowerOptions options = run.Options();
  options.device = device.get();
  memory.Load(run.at(0));
  const auto follower = run.Open(memory, options);
  ASSERT_TRUE(follower->VerifyHeld(0).ok());
  for (std::uint64_t step = 1; step <= 3; ++step) {
    run.Publish(step, step == 2, step == 3 ? 0.4 : 0.02);
    const auto result = follower->Update();
    ASSERT_TRUE(result.ok()) << result.status();
    EXPECT_EQ(result->tensors_verified, run.table().size());
    ASSERT_EQ(memory.Difference(run.at(step)), "") << "v" << step;
  }
  memory.Fill(std::byte{0x33});
  const auto joiner = run.Open(memory, options);
  ASSERT_TRUE(joiner->Join().ok());
  EXPECT_EQ(memory.Difference(run.at(3)), "");
}

INSTANTIATE_TEST_SUITE_P(All, DeviceLayoutTest,
                         ::testing::ValuesIn(kAllLayouts),
                         [](const auto& test) {
                           return LayoutName(test.param);
                         });

// Followers alone, of one set, on a scripted device.
class DeviceFollowerTest : public ::testing::Test {
 protected:
  FollowerOptions Options() {
    FollowerOptions options = run_.Options();
    options.device = &device_;
    options.pause = [this] {
      if (on_pause_) on_pause_();
      return absl::OkStatus();
    };
    return options;
  }
  std::unique_ptr<Follower> Holding(std::uint64_t step,
                                    const FollowerOptions& options) {
    on_pause_ = nullptr;
    device_.Reset();
    memory_.Load(run_.at(step));
    auto follower = run_.Open(memory_, options);
    if (follower == nullptr) return nullptr;
    const absl::Status held = follower->VerifyHeld(step);
    EXPECT_TRUE(held.ok()) << held;
    return follower;
  }
  std::unique_ptr<Follower> Holding(std::uint64_t step) {
    return Holding(step, Options());
  }

  PublishedRun run_{LayerTensors(), 5};
  ScriptedDevice device_{NewDevice()};
  std::function<void()> on_pause_;
  EngineMemory memory_{run_.table(), Layout::kWhole, {}, device_.plain()};
};

TEST_F(DeviceFollowerTest, APauseIsALaunchForEachDeltaAndOneForAllSums) {
  run_.PublishUpTo(7);
  std::int64_t made = 0;
  std::string in_pause;
  FollowerOptions options = Options();
  options.commit = [&](const VersionId&) {
    in_pause = device_.Counts();
    EXPECT_EQ(device_.made(), made);
  };
  const auto follower = Holding(0, options);
  FaultFileSystem counting;
  on_pause_ = [&] {
    device_.Reset();
    made = device_.made();
  };
  auto result = follower->Update();
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->deltas, 7u);
  EXPECT_EQ(result->tensors_verified, run_.table().size());
  EXPECT_EQ(result->bytes_verified, run_.table().total_bytes());
  EXPECT_EQ(result->elements_verified, ElementsOf(run_.table()));
  // One copy brings back what became of all launches; one wait for these, one
  // for the sums.
  EXPECT_EQ(in_pause, "Apply 7, Copy 1, Sums 1, WaitForStream 2");
  EXPECT_EQ(memory_.Difference(run_.at(7)), "");

  // Later steps take nothing at all: not before the pause either.
  run_.Publish(8);
  ASSERT_TRUE(follower->Update().ok());
  const std::int64_t before = device_.made();
  for (std::uint64_t step = 9; step <= 12; ++step) {
    run_.Publish(step);
    result = follower->Update();
    ASSERT_TRUE(result.ok()) << result.status();
    EXPECT_EQ(in_pause, "Apply 1, Copy 1, Sums 1, WaitForStream 2");
    // Every change is written, and written once.
    EXPECT_EQ(result->units_written, result->nnz);
  }
  EXPECT_EQ(device_.made(), before);
  EXPECT_EQ(memory_.Difference(run_.at(12)), "");
}

TEST_F(DeviceFollowerTest, ManyDeltasAreReadOnceAndBeforeThePause) {
  run_.PublishUpTo(6);
  std::uint64_t step_bytes = 0;
  for (std::uint64_t step = 1; step <= 6; ++step) {
    for (const auto& entry :
         std::filesystem::directory_iterator(run_.StepPath(step))) {
      step_bytes += entry.file_size();
    }
  }
  FaultFileSystem counting;
  FollowerOptions options = Options();
  options.fs = &counting;
  const auto follower = Holding(0, options);
  counting.Reset();
  std::int64_t operations = 0;
  on_pause_ = [&] { operations = counting.operation_count(); };
  options.commit = nullptr;
  const auto result = follower->Update();
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(counting.operation_count(), operations);
  EXPECT_LE(counting.bytes_read(), step_bytes + 200);  // and HEAD
  EXPECT_GT(counting.bytes_read(), step_bytes * 9 / 10);
  EXPECT_EQ(memory_.Difference(run_.at(6)), "");
}

TEST_F(DeviceFollowerTest, PrefetchReadsAndUpdateOnlyPauses) {
  run_.PublishUpTo(2);
  FaultFileSystem counting;
  FollowerOptions options = Options();
  options.fs = &counting;
  const auto follower = Holding(0, options);
  const auto next = follower->Prefetch();
  ASSERT_TRUE(next.ok()) << next.status();
  EXPECT_EQ(*next, run_.id(2));
  EXPECT_EQ(memory_.Difference(run_.at(0)), "");
  counting.Reset();
  device_.Reset();
  const auto result = follower->Update();
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(counting.bytes_read(), 0u);
  EXPECT_EQ(device_.Counts(), "Apply 2, Copy 1, Sums 1, WaitForStream 2");
  EXPECT_EQ(memory_.Difference(run_.at(2)), "");
}

TEST_F(DeviceFollowerTest, AStepWithoutChangesIsOnlyVerified) {
  run_.Publish(1, false, 0);
  const auto follower = Holding(0);
  on_pause_ = [&] { device_.Reset(); };
  const auto result = follower->Update();
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(device_.count("Apply"), 0);
  EXPECT_EQ(result->units_written, 0u);
  EXPECT_EQ(follower->held(), run_.id(1));
}

// What the caller has on the stream when `pause` returns comes first.
TEST_F(DeviceFollowerTest, WorkOnTheCallersStreamComesBeforeTheUpdate) {
  run_.PublishUpTo(1);
  const std::unique_ptr<Device> slow = NewDevice(microseconds(2000));
  EngineMemory memory(run_.table(), Layout::kWhole, {}, slow.get());
  auto stream = slow->CreateStream();
  ASSERT_TRUE(stream.ok());
  FollowerOptions options = run_.Options();
  options.device = slow.get();
  options.stream = stream->get();
  const std::byte right = run_.at(0).at("norm").front();
  const auto fill = [&](std::byte value) {
    return slow->Fill(const_cast<std::byte*>(memory.Address("norm", 0)),
                      std::to_integer<std::uint8_t>(value), 1, stream->get());
  };
  options.pause = [&] {
    *memory.At("norm", 0) = right ^ std::byte{1};
    memory.Push();
    return fill(right);
  };
  memory.Load(run_.at(0));
  const auto follower = run_.Open(memory, options);
  ASSERT_TRUE(follower->VerifyHeld(0).ok());
  ASSERT_TRUE(follower->Update().ok());
  EXPECT_EQ(memory.Difference(run_.at(1)), "");
  // Likewise for what an anchor writes.
  options.pause = [&] { return fill(right ^ std::byte{2}); };
  const auto joiner = run_.Open(memory, options);
  ASSERT_TRUE(joiner->JoinStep(0).ok());
  EXPECT_EQ(memory.Difference(run_.at(0)), "");
}

// ------------------------------------------------------------ limits of memory

TEST_F(DeviceFollowerTest, AChainThatDoesNotFitIsFollowedInSeveralPauses) {
  run_.PublishUpTo(9);
  FollowerOptions options = Options();
  std::vector<std::uint64_t> commits;
  int files_in_pause = 0;
  FaultFileSystem counting;
  std::int64_t at_pause = 0;
  options.fs = &counting;
  options.commit = [&](const VersionId& id) {
    commits.push_back(id.step);
    EXPECT_EQ(id, run_.id(id.step));
    EXPECT_EQ(memory_.Difference(run_.at(id.step)), "");
    files_in_pause += counting.operation_count() != at_pause;
  };
  // A step takes about 60 KiB on the device.
  options.device_stage_bytes = 200 << 10;
  const auto follower = Holding(0, options);
  on_pause_ = [&] { at_pause = counting.operation_count(); };
  const auto next = follower->Prefetch();
  ASSERT_TRUE(next.ok()) << next.status();
  EXPECT_EQ(*next, run_.id(9));
  const auto result = follower->Update();
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->version, run_.id(9));
  EXPECT_EQ(result->deltas, 9u);
  EXPECT_GT(commits.size(), 1u);
  EXPECT_LT(commits.size(), 9u);
  EXPECT_EQ(commits.back(), 9u);
  EXPECT_EQ(files_in_pause, 0);
  if (const auto* cpu = dynamic_cast<const CpuDevice*>(device_.plain())) {
    EXPECT_LE(cpu->bytes_in_use(MemoryKind::kDevice),
              (200u << 10) + 2 * run_.table().total_bytes() + (1u << 20));
  }

  // A join reads the deltas for which there is no room during its pause.
  memory_.Fill(std::byte{0x11});
  commits.clear();
  options.commit = [&](const VersionId& id) { commits.push_back(id.step); };
  const auto joiner = run_.Open(memory_, options);
  const auto joined = joiner->Join();
  ASSERT_TRUE(joined.ok()) << joined.status();
  EXPECT_EQ(joined->deltas, 9u);
  EXPECT_EQ(commits, std::vector<std::uint64_t>{9});
  EXPECT_EQ(memory_.Difference(run_.at(9)), "");
}

TEST_F(DeviceFollowerTest, ADeltaAboveTheLimitIsRefusedBeforeThePause) {
  run_.PublishUpTo(1);
  FollowerOptions options = Options();
  options.device_stage_bytes = 8 << 10;
  const auto follower = Holding(0, options);
  on_pause_ = [] { ADD_FAILURE() << "paused"; };
  const absl::Status status = follower->Update().status();
  EXPECT_TRUE(absl::IsResourceExhausted(status)) << status;
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("device_stage_bytes is 8192"));
  EXPECT_EQ(follower->held(), run_.id(0));
  EXPECT_EQ(follower->state(), FollowerState::kReady);
}

TEST(DeviceGroupTest, RanksWithDifferentLimitsPauseTogether) {
  PublishedRun run(LayerTensors(), 3);
  run.PublishUpTo(6);
  const std::unique_ptr<Device> devices[] = {NewDevice(), NewDevice()};
  std::vector<std::uint64_t> commits[2];
  ReaderGroup group(
      run, Split::kRows, 2,
      [&](std::uint32_t rank, FollowerOptions* options) {
        options->device_stage_bytes = (rank == 0 ? 100 : 140) << 10;
        options->commit = [&, rank](const VersionId& id) {
          commits[rank].push_back(id.step);
        };
      },
      std::chrono::seconds(60), {devices[0].get(), devices[1].get()});
  group.Hold(0);
  for (int i = 0; i < 6 && group.TroubleAt(6) != ""; ++i) {
    ASSERT_EQ(ErrorsOf(group.Update()), "");
  }
  EXPECT_EQ(group.TroubleAt(6), "");
  EXPECT_EQ(commits[0], commits[1]);
  EXPECT_GT(commits[0].size(), 1u);
}

// ------------------------------------------------------------------ large ones

// Records that lie across pieces, and tensors of several pieces; a read that
// fails when a part of its piece is on the device already is made again.
TEST(LargeDeltaTest, RecordsAcrossPiecesAndTensorsOfSeveralPiecesArrive) {
  TempDirectory directory;
  const std::uint64_t rows = 3000;
  const std::uint64_t cols = 1537;
  std::mt19937_64 random(17);
  std::vector<std::uint16_t> weights(rows * cols);
  for (auto& weight : weights) weight = static_cast<std::uint16_t>(random());
  TrainerTensor tensor = Tensor("large", DType::kBf16, {rows, cols});
  tensor.data = weights.data();
  FaultFileSystem unsynced;
  WriterOptions writer_options;
  writer_options.store_path = directory.Join("store");
  writer_options.fs = &unsynced;
  writer_options.segment_files = 1;
  auto writer = SnapshotWriter::Create(writer_options, {}, {tensor});
  ASSERT_TRUE(writer.ok()) << writer.status();
  for (auto& weight : weights) weight = static_cast<std::uint16_t>(random());
  ASSERT_TRUE((*writer)->Publish(1).ok());
  ASSERT_GT(std::filesystem::file_size(
                DataFilesOf(writer_options.store_path + "/step_00000001")[0]),
            std::uint64_t{8} << 20);

  const TensorTable& table = (*writer)->store_writer().table();
  ModelBytes model;
  const auto* bytes = reinterpret_cast<const std::byte*>(weights.data());
  model["large"].assign(bytes, bytes + 2 * weights.size());
  const std::unique_ptr<Device> device = NewDevice(microseconds(500));
  for (const ReadMode mode : {ReadMode::kRead, ReadMode::kMap}) {
    if (kSanitized && mode == ReadMode::kMap) break;
    // Right columns as rows of their own, left ones transposed.
    EngineMemory memory(table,
                        {MakePart("large", {0, 400}, {rows, cols - 400}),
                         MakePart("large", {0, 0}, {rows, 400},
                                  {2, static_cast<std::int64_t>(2 * rows)})},
                        "engine", device.get());
    std::atomic<int> failures{0};
    FaultFileSystem faults;
    faults.set_script([&](const Operation& operation) {
      constexpr std::uint64_t kLate = std::uint64_t{5} << 20;
      return operation.kind == FileOperation::kRead &&
                     operation.offset >= kLate &&
                     absl::StrContains(operation.path, ".kda") &&
                     failures++ == 0
                 ? Fault::Fail(ESTALE)
                 : Fault::None();
    });
    FollowerOptions options;
    options.store_path = writer_options.store_path;
    options.fs = &faults;
    options.read_mode = mode;
    options.io_threads = 2;
    options.device = device.get();
    const auto follower = Follower::Open(options, memory.sets());
    ASSERT_TRUE(follower.ok()) << follower.status();
    const auto joined = (*follower)->JoinStep(0);
    ASSERT_TRUE(joined.ok()) << joined.status();
    if (mode == ReadMode::kRead) {
      EXPECT_GT(failures, 1);
    }
    EXPECT_EQ(joined->units_written, rows * cols);
    const auto result = (*follower)->Update();
    ASSERT_TRUE(result.ok()) << result.status();
    EXPECT_EQ(result->units_written, result->nnz);
    EXPECT_EQ(memory.Difference(model), "");
  }
}

// -------------------------------------------------------------- wrong launches

// How a launch goes wrong, and the tensors that do not verify then.
struct WrongLaunch {
  std::string name;
  std::vector<std::string> tensors;
  std::function<ScriptedDevice::Launch(EngineMemory* memory)> make;
};

void PrintTo(const WrongLaunch& wrong, std::ostream* out) {
  *out << wrong.name;
}

// Tables of a launch, wherever they lie.
template <typename T>
std::vector<T> Download(Device* device, const T* from, std::uint64_t count,
                        DeviceStream stream) {
  std::vector<T> values(count);
  EXPECT_TRUE(
      device->Copy(values.data(), from, count * sizeof(T), stream).ok());
  EXPECT_TRUE(device->WaitForStream(stream).ok());
  return values;
}
template <typename T>
DeviceMemory Upload(Device* device, const std::vector<T>& values,
                    DeviceStream stream) {
  auto memory =
      device->Allocate(MemoryKind::kDevice, values.size() * sizeof(T));
  EXPECT_TRUE(memory.ok()) << memory.status();
  EXPECT_TRUE(device
                  ->Copy(memory->data(), values.data(),
                         values.size() * sizeof(T), stream)
                  .ok());
  return *std::move(memory);
}

// `batch` with other tiles, kept until the stream has passed it.
absl::Status LaunchWithTiles(
    Device* device, ApplyBatch batch, DeviceStream stream,
    const std::function<void(std::vector<ApplyTile>* tiles)>& change) {
  std::vector<ApplyTile> tiles =
      Download(device, batch.tiles, batch.tile_count, stream);
  change(&tiles);
  const DeviceMemory changed = Upload(device, tiles, stream);
  batch.tiles = changed.as<const ApplyTile>();
  batch.tile_count = tiles.size();
  absl::Status status = device->Apply(batch, stream);
  status.Update(device->WaitForStream(stream));
  return status;
}

std::vector<BoxTarget> BoxesOf(Device* device, const ApplyBatch& batch,
                               DeviceStream stream) {
  std::uint64_t count = 0;
  for (const auto& record :
       Download(device, batch.records, batch.record_count, stream)) {
    count = std::max<std::uint64_t>(count, record.first_box + record.box_count);
  }
  return Download(device, batch.boxes, count, stream);
}

// Likewise with other boxes.
absl::Status LaunchWithBoxes(
    Device* device, ApplyBatch batch, DeviceStream stream,
    const std::function<void(std::vector<BoxTarget>* boxes)>& change) {
  std::vector<BoxTarget> boxes = BoxesOf(device, batch, stream);
  change(&boxes);
  const DeviceMemory changed = Upload(device, boxes, stream);
  batch.boxes = changed.as<const BoxTarget>();
  absl::Status status = device->Apply(batch, stream);
  status.Update(device->WaitForStream(stream));
  return status;
}

// Runs `after` on the weights once the launch has run.
ScriptedDevice::Launch Then(std::function<void()> after) {
  return [after = std::move(after)](Device* device, const ApplyBatch& batch,
                                    DeviceStream stream) {
    absl::Status status = device->Apply(batch, stream);
    status.Update(device->WaitForStream(stream));
    after();
    return status;
  };
}

bool LiesIn(const BoxTarget& box, EngineMemory* memory,
            const std::string& name) {
  return box.data == memory->Address(name, 0);
}

std::vector<WrongLaunch> WrongLaunches() {
  return {
      {"DeltaAppliedTwice",
       {"down", "experts", "fp8", "fp8_scale_inv"},
       [](EngineMemory*) -> ScriptedDevice::Launch {
         return
             [](Device* device, const ApplyBatch& batch, DeviceStream stream) {
               const absl::Status first = device->Apply(batch, stream);
               return first.ok() ? device->Apply(batch, stream) : first;
             };
       }},
      {"ShiftedByOneElement",
       {"gate"},
       [](EngineMemory* memory) -> ScriptedDevice::Launch {
         return [memory](Device* device, const ApplyBatch& batch,
                         DeviceStream stream) {
           return LaunchWithBoxes(device, batch, stream,
                                  [&](std::vector<BoxTarget>* boxes) {
                                    for (BoxTarget& box : *boxes) {
                                      // The last row stays out, so that nothing
                                      // else is hit.
                                      if (!LiesIn(box, memory, "gate"))
                                        continue;
                                      box.data += box.unit_bytes;
                                      --box.row_end;
                                    }
                                  });
         };
       }},
      {"TwoElementsSwapped",
       {"experts"},
       [](EngineMemory* memory) {
         return Then([memory] {
           std::byte* const first = memory->At("experts", 5);
           std::byte* second = memory->At("experts", 700);
           while (std::memcmp(first, second, 2) == 0) second += 2;
           std::swap_ranges(first, first + 2, second);
           memory->Push();
         });
       }},
      {"TwoEqualShapedTensorsSwapped",
       {"k", "v"},
       [](EngineMemory* memory) {
         return Then([memory] {
           std::byte* const k = memory->At("k", 0);
           std::swap_ranges(k, k + 40 * 200 * 2, memory->At("v", 0));
           memory->Push();
         });
       }},
      {"DeltaOfOneAppliedToAnotherOfItsShape",
       {"gate", "up"},
       [](EngineMemory* memory) -> ScriptedDevice::Launch {
         return [memory](Device* device, const ApplyBatch& batch,
                         DeviceStream stream) {
           return LaunchWithBoxes(
               device, batch, stream, [&](std::vector<BoxTarget>* boxes) {
                 for (BoxTarget& box : *boxes) {
                   if (LiesIn(box, memory, "gate")) {
                     box.data =
                         const_cast<std::byte*>(memory->Address("up", 0));
                   } else if (LiesIn(box, memory, "up")) {
                     box.data =
                         const_cast<std::byte*>(memory->Address("gate", 0));
                   }
                 }
               });
         };
       }},
      {"ATileDropped",
       {"q"},
       [](EngineMemory* memory) -> ScriptedDevice::Launch {
         return [memory](Device* device, const ApplyBatch& batch,
                         DeviceStream stream) {
           const auto boxes = BoxesOf(device, batch, stream);
           const auto records =
               Download(device, batch.records, batch.record_count, stream);
           return LaunchWithTiles(
               device, batch, stream, [&](std::vector<ApplyTile>* tiles) {
                 tiles->erase(std::find_if(
                     tiles->begin(), tiles->end(), [&](const ApplyTile& tile) {
                       return LiesIn(boxes[records[tile.record].first_box],
                                     memory, "q");
                     }));
               });
         };
       }},
      {"AWrongStride",
       {"wide"},
       [](EngineMemory* memory) -> ScriptedDevice::Launch {
         return [memory](Device* device, const ApplyBatch& batch,
                         DeviceStream stream) {
           return LaunchWithBoxes(device, batch, stream,
                                  [&](std::vector<BoxTarget>* boxes) {
                                    for (BoxTarget& box : *boxes) {
                                      if (!LiesIn(box, memory, "wide"))
                                        continue;
                                      box.row_stride_bytes -= 2;
                                    }
                                  });
         };
       }},
      {"OneBitOfAWeightThatTheDeltaDoesNotTouch",
       {"steps"},
       [](EngineMemory* memory) {
         return Then([memory] {
           // The middle of it never trains (see Untouched).
           memory->At("steps", 7)[3] ^= std::byte{0x20};
           memory->Push();
         });
       }},
  };
}

class WrongLaunchTest : public DeviceFollowerTest,
                        public ::testing::WithParamInterface<WrongLaunch> {};

TEST_P(WrongLaunchTest, FailsVerificationByNameAndHealsInPlace) {
  const WrongLaunch& wrong = GetParam();
  const ModelBytes before = run_.weights();
  run_.Train(0.02);
  // What a delta leaves alone: `steps`.
  run_.weights().at("steps") = before.at("steps");
  run_.PublishHere(1);
  const auto follower = Holding(0);
  device_.set_launch(wrong.make(&memory_));
  const absl::Status status = follower->Update().status();
  EXPECT_TRUE(absl::IsDataLoss(status)) << status;
  const std::string text(status.message());
  EXPECT_THAT(text, HasSubstr("verify"));
  // At most four are named, ascending by name.
  for (std::size_t i = 0; i < std::min<std::size_t>(4, wrong.tensors.size());
       ++i) {
    EXPECT_THAT(text, HasSubstr("tensor " + wrong.tensors[i] + " in tp0"));
  }
  EXPECT_EQ(follower->state(), FollowerState::kPoisoned);
  EXPECT_FALSE(follower->held().has_value());
  EXPECT_TRUE(absl::IsFailedPrecondition(follower->Update().status()));

  device_.Reset();
  const auto healed = follower->Join();
  ASSERT_TRUE(healed.ok()) << healed.status();
  EXPECT_EQ(memory_.Difference(run_.at(1)), "");
  EXPECT_EQ(follower->held(), run_.id(1));
  EXPECT_EQ(follower->state(), FollowerState::kReady);
  if (wrong.name == "DeltaAppliedTwice") return;  // nearly all of it is wrong
  // Only what did not verify was read and written again.
  std::uint64_t units = 0;
  for (const std::string& name : wrong.tensors) {
    units += UnitsOf(run_.table(), name);
  }
  EXPECT_GE(healed->units_written, units);
  EXPECT_LE(healed->units_written, units + units / 10);
}

INSTANTIATE_TEST_SUITE_P(All, WrongLaunchTest,
                         ::testing::ValuesIn(WrongLaunches()),
                         [](const auto& test) { return test.param.name; });

// A tile that cannot be decoded, found by the device alone.
TEST_F(DeviceFollowerTest, ATileThatCannotBeDecodedIsNamedWithItsFile) {
  run_.PublishUpTo(1);
  const auto follower = Holding(0);
  device_.set_launch(
      [](Device* device, const ApplyBatch& batch, DeviceStream stream) {
        return LaunchWithTiles(device, batch, stream,
                               [](std::vector<ApplyTile>* tiles) {
                                 tiles->back().a = 0;
                                 tiles->back().b = 0;
                               });
      });
  const absl::Status status = follower->Update().status();
  EXPECT_TRUE(absl::IsDataLoss(status)) << status;
  const std::string text(status.message());
  EXPECT_THAT(text, HasSubstr("step_00000001/delta-r000-"));
  EXPECT_THAT(text, HasSubstr(": offset "));
  EXPECT_THAT(text, HasSubstr("tensor wide units ["));
  EXPECT_THAT(text, HasSubstr("payload at offset "));
  EXPECT_EQ(follower->state(), FollowerState::kPoisoned);
  device_.Reset();
  ASSERT_TRUE(follower->Join().ok());
  EXPECT_EQ(memory_.Difference(run_.at(1)), "");
}

TEST_F(DeviceFollowerTest, HostMemoryIsRefusedByTensorAndSet) {
  EngineMemory elsewhere(run_.table(), Layout::kWhole, {}, nullptr);
  const auto follower = Follower::Open(Options(), elsewhere.sets());
  EXPECT_EQ(follower.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(follower.status().message()),
              HasSubstr("tensor down in tp0: expected memory of scripted"));
}

// A kernel would fault, and end the process.
TEST_F(DeviceFollowerTest, ElementsOffTheirAlignmentAreRefusedByTensorAndSet) {
  const auto refuses = [&](std::uint64_t first, std::int64_t row_bytes) {
    TensorTarget target;
    target.name = "norm";
    target.dtype = DType::kF32;
    target.shape = {257};
    target.begin = {0};
    target.extent = {40};
    target.strides_bytes = {row_bytes};
    auto memory = device_.plain()->Allocate(MemoryKind::kDevice, 4'096);
    ASSERT_TRUE(memory.ok()) << memory.status();
    target.data = memory->data() + first;
    WeightSet set("tp0");
    ASSERT_TRUE(set.Add(target).ok());
    FollowerOptions options = Options();
    options.allow_partial = true;
    const auto follower = Follower::Open(options, {&set});
    EXPECT_EQ(follower.status().code(), absl::StatusCode::kInvalidArgument)
        << follower.status();
    EXPECT_THAT(std::string(follower.status().message()),
                HasSubstr("tensor norm in tp0: expected elements at multiples "
                          "of 4 bytes"));
  };
  refuses(2, 4);
  refuses(0, 6);
}

TEST(DeviceGroupTest, MemoryThatOneRankHasElsewhereFailsOpenOnAll) {
  PublishedRun run(LayerTensors(), 4);
  const std::unique_ptr<Device> device = NewDevice();
  // In the heap. What another Device of the same GPU gives out would do.
  ReaderGroup group(run, Split::kRows, 2,
                    [&](std::uint32_t rank, FollowerOptions* options) {
                      if (rank == 1) options->device = device.get();
                    },
                    std::chrono::seconds(60), {device.get(), nullptr});
  const auto statuses = group.Open();
  EXPECT_EQ(statuses[1].code(), absl::StatusCode::kInvalidArgument)
      << statuses[1];
  EXPECT_FALSE(statuses[0].ok());
}

// ------------------------------------------------------------- every call
// fails

TEST_F(DeviceFollowerTest, ACallThatFailsBeforeThePauseChangesNothing) {
  run_.PublishUpTo(2);
  const auto follower = Holding(0);
  ASSERT_TRUE(follower->Update().ok());
  run_.PublishUpTo(4);
  std::int64_t k = 1;
  for (;; k += kFaultStride) {
    device_.FailAt(k);
    const auto next = follower->Prefetch();
    const bool reached = device_.calls() >= k;
    device_.Reset();
    if (next.ok() && !reached) break;
    SCOPED_TRACE(k);
    // A wait that fails on the way out of nothing is no harm.
    if (!next.ok()) {
      EXPECT_TRUE(absl::IsInternal(next.status())) << next.status();
    }
    EXPECT_EQ(follower->state(), FollowerState::kReady);
    EXPECT_EQ(follower->held(), run_.id(2));
    EXPECT_EQ(memory_.Difference(run_.at(2)), "");
    if (next.ok()) break;
  }
  EXPECT_GT(k, 10);
  ASSERT_TRUE(follower->Update().ok());
  EXPECT_EQ(memory_.Difference(run_.at(4)), "");
}

TEST_F(DeviceFollowerTest, ACallThatFailsDuringAJoinIsHealedByTheNext) {
  run_.PublishUpTo(3, 2);
  std::int64_t k = 1;
  for (bool reached = true; reached; ++k) {
    SCOPED_TRACE(k);
    device_.Reset();
    memory_.Fill(std::byte{0x44});
    const auto follower = run_.Open(memory_, Options());
    ASSERT_NE(follower, nullptr);
    device_.FailAt(k);
    const auto joined = follower->Join();
    reached = device_.calls() >= k;
    device_.Reset();
    if (!joined.ok()) {
      EXPECT_NE(follower->state(), FollowerState::kReady);
      const auto again = follower->Join();
      ASSERT_TRUE(again.ok()) << again.status();
    }
    EXPECT_EQ(follower->state(), FollowerState::kReady);
    ASSERT_EQ(memory_.Difference(run_.at(3)), "");
    if (k > 40) k += 6;  // they are all alike: copies of pieces
    k += kFaultStride - 1;
  }
  EXPECT_GT(k, 30);
}

// A join into memory of no version reads deltas beside the anchor.
TEST_F(DeviceFollowerTest, ADeltaThatAJoinCannotReadIsNamedAndHealedLater) {
  run_.PublishUpTo(3, 2);
  const std::vector<std::string> files = DataFilesOf(run_.StepPath(3));
  ASSERT_FALSE(files.empty());
  memory_.Fill(std::byte{0x44});
  FaultFileSystem fs;  // for its log
  FollowerOptions options = Options();
  options.fs = &fs;
  const auto follower = run_.Open(memory_, options);
  ASSERT_NE(follower, nullptr);
  FlipByte(files.front(), kDataFileHeaderBytes + 9);
  const absl::Status status = follower->Join().status();
  EXPECT_TRUE(absl::IsDataLoss(status)) << status;
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("step_00000003/delta-r000-000"));
  EXPECT_EQ(follower->state(), FollowerState::kPoisoned);
  // No older anchor leads around a delta.
  bool newest = false;
  for (const Operation& operation : fs.log()) {
    if (operation.kind != FileOperation::kOpenForRead ||
        !absl::EndsWith(operation.path, ".kda")) {
      continue;
    }
    newest = newest || absl::StrContains(operation.path, "step_00000002/");
    EXPECT_FALSE(absl::StrContains(operation.path, "step_00000000/"))
        << operation.ToString();
  }
  EXPECT_TRUE(newest);
  FlipByte(files.front(), kDataFileHeaderBytes + 9);
  const auto again = follower->Join();
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_EQ(memory_.Difference(run_.at(3)), "");
}

// A follower of a part of the model is never ready, and serves all the same.
TEST_F(DeviceFollowerTest,
       AnUpdateOverAnAnchorLeavesServingWeightsAloneIfADeltaIsBad) {
  run_.PublishUpTo(3, 2);
  EngineMemory half(run_.table(), LayerParts(0), "engine", device_.plain());
  half.Load(run_.at(0));
  FollowerOptions options = Options();
  options.allow_partial = true;
  bool paused = false;
  on_pause_ = [&] { paused = true; };
  const auto follower = run_.Open(half, options);
  ASSERT_NE(follower, nullptr);
  ASSERT_TRUE(follower->VerifyHeld(0).ok());
  ASSERT_EQ(follower->state(), FollowerState::kEmpty);
  std::filesystem::remove_all(run_.StepPath(1));  // the way leads over v2's
  const std::string file = DataFilesOf(run_.StepPath(3)).front();
  FlipByte(file, kDataFileHeaderBytes + 9);
  const absl::Status status = follower->Update().status();
  EXPECT_TRUE(absl::IsDataLoss(status)) << status;
  EXPECT_FALSE(paused);
  EXPECT_EQ(half.Difference(run_.at(0)), "");
  FlipByte(file, kDataFileHeaderBytes + 9);
  const auto again = follower->Update();
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_TRUE(paused);
  EXPECT_EQ(half.Difference(run_.at(3)), "");
}

// Where an update of a group fails, and on which rank.
class GroupHealTest : public ::testing::Test {
 protected:
  // Updates from v1 to v3 with `arm` called in the pause of `rank`; expects
  // that all are poisoned, or (if nothing failed) that all are at v3. Then all
  // join; `broken`, if given, sees what the failure left first.
  void Check(
      std::uint32_t rank, const std::function<void()>& arm, bool* failed,
      const std::function<void(const std::vector<absl::Status>& statuses)>&
          broken = nullptr) {
    group_.Hold(1);
    group_.on_pause(rank) = arm;
    const auto statuses = group_.Update();
    *failed = !statuses[0].ok() || !statuses[1].ok();
    group_.on_pause(rank) = nullptr;
    group_.device(rank).Reset();
    if (!*failed) {
      EXPECT_EQ(group_.TroubleAt(3), "");
      return;
    }
    for (std::uint32_t r = 0; r < 2; ++r) {
      EXPECT_FALSE(statuses[r].ok()) << r;
      EXPECT_EQ(group_.follower(r).state(), FollowerState::kPoisoned) << r;
    }
    if (broken) broken(statuses);
    ASSERT_EQ(ErrorsOf(group_.Join()), "");
    ASSERT_EQ(group_.TroubleAt(3), "");
    // And on as if nothing had been.
    EXPECT_EQ(ErrorsOf(group_.Update()), "");
  }

  GroupHealTest() : GroupHealTest(LayerTensors(), LayerParts) {
    run_.PublishUpTo(3);
  }
  GroupHealTest(std::vector<TrainerTensor> tensors, PartsOf parts,
                microseconds delay = {})
      : run_(std::move(tensors), 9),
        group_(run_, delay, ReadMode::kRead, parts) {}

  PublishedRun run_;
  LayerGroup group_;
};

TEST_F(GroupHealTest, EveryCallOfThePauseOnEitherRank) {
  for (std::uint32_t rank = 0; rank < 2; ++rank) {
    std::int64_t k = 1;
    for (bool failed = true; failed; k += kFaultStride) {
      SCOPED_TRACE(absl::StrCat("rank ", rank, " call ", k));
      ASSERT_NO_FATAL_FAILURE(Check(
          rank, [&] { group_.device(rank).FailAt(k); }, &failed));
    }
    // Apply 2, Copy 1, Sums 1, WaitForStream 2, and none.
    if (!kSanitized) {
      EXPECT_EQ(k, 8);
    }
  }
}

TEST_F(GroupHealTest, LaunchesThatDieAtAnyTile) {
  for (std::uint32_t rank = 0; rank < 2; ++rank) {
    for (const int launch_number : {1, 2}) {
      for (const std::uint64_t limit : {0u, 1u, 5u, 1000u}) {
        if (kSanitized && limit < 2) continue;
        SCOPED_TRACE(absl::StrCat("rank ", rank, " launch ", launch_number,
                                  " limit ", limit));
        bool failed = false;
        int launches = 0;
        ASSERT_NO_FATAL_FAILURE(Check(
            rank,
            [&] {
              group_.device(rank).set_launch(
                  [&](Device* device, ApplyBatch batch, DeviceStream stream) {
                    if (++launches == launch_number) batch.tile_limit = limit;
                    return device->Apply(batch, stream);
                  });
            },
            &failed));
        EXPECT_EQ(failed, limit < 1000);
      }
    }
  }
}

// The messages name the rank whose slice shows it.
TEST_F(GroupHealTest, TheRankWhoseLaunchDiedSaysSo) {
  group_.Hold(1);
  group_.device(1).set_launch(
      [](Device* device, ApplyBatch batch, DeviceStream stream) {
        batch.tile_limit = 0;
        return device->Apply(batch, stream);
      });
  const auto statuses = group_.Update();
  EXPECT_THAT(std::string(statuses[0].message()),
              HasSubstr("rank 0's own part is what the deltas make of it"));
  EXPECT_THAT(std::string(statuses[1].message()),
              HasSubstr("rank 1's own part is wrong: down"));
  // Rank 0 wrote all it had to; healing reads what is wrong over both.
  group_.device(1).Reset();
  ASSERT_EQ(ErrorsOf(group_.Join()), "");
  EXPECT_EQ(group_.TroubleAt(3), "");
}

TEST_F(GroupHealTest, OnlyWhatDoesNotVerifyIsReadAgain) {
  group_.Hold(1);
  // On rank 1 something else writes into a weight meanwhile.
  bool done = false;
  group_.device(1).set_launch(Then([&] {
    if (std::exchange(done, true)) return;
    group_.memory(1).At("v", 20 * 200)[0] ^= std::byte{4};
    group_.memory(1).Push();
  }));
  EXPECT_NE(ErrorsOf(group_.Update()), "");
  group_.device(1).Reset();
  ASSERT_EQ(ErrorsOf(group_.Join()), "");
  EXPECT_EQ(group_.TroubleAt(3), "");
  for (std::uint32_t r = 0; r < 2; ++r) {
    EXPECT_GE(group_.result(r).units_written, 20u * 200);
    EXPECT_LE(group_.result(r).units_written, 22u * 200);
  }
}

// ------------------------------------------------------------------------ fp8

// Matrices that travel as fp8, with either kind of scale, as columns (down) and
// as rows (up) of two ranks, cut where a block ends.
struct Fp8Matrix {
  std::string name;
  ScaleKind scale_kind;
  bool by_columns;
};
const std::vector<Fp8Matrix>& Fp8Matrices() {
  static const auto* const matrices =
      new std::vector<Fp8Matrix>{{"down_exact", ScaleKind::kExact, true},
                                 {"down_powers", ScaleKind::kPowerOfTwo, true},
                                 {"up_exact", ScaleKind::kExact, false},
                                 {"up_powers", ScaleKind::kPowerOfTwo, false}};
  return *matrices;
}
constexpr std::uint64_t kFp8Rows = 300;
constexpr std::uint64_t kFp8Cols = 260;
constexpr std::uint64_t kFp8Blocks = 3;  // of rows, and of columns

std::string ScalesOf(const std::string& name) { return name + "_scale_inv"; }

std::vector<TrainerTensor> Fp8Tensors() {
  std::vector<TrainerTensor> tensors;
  for (const Fp8Matrix& matrix : Fp8Matrices()) {
    tensors.push_back(
        Tensor(matrix.name, DType::kF8E4M3, {kFp8Rows, kFp8Cols}));
    tensors.push_back(
        Tensor(ScalesOf(matrix.name), DType::kF32, {kFp8Blocks, kFp8Blocks}));
  }
  return tensors;
}

// The first block on rank 0, the other two on rank 1; one of them transposed.
std::vector<Part> Fp8Parts(std::uint64_t rank) {
  std::vector<Part> parts;
  for (const Fp8Matrix& matrix : Fp8Matrices()) {
    const auto part = [&](const std::string& name, std::int64_t bytes,
                          std::uint64_t rows, std::uint64_t cols,
                          std::uint64_t cut) {
      std::vector<std::uint64_t> begin = {0, 0};
      std::vector<std::uint64_t> extent = {rows, cols};
      const int sliced = matrix.by_columns ? 1 : 0;
      begin[sliced] = rank == 0 ? 0 : cut;
      extent[sliced] = rank == 0 ? cut : extent[sliced] - cut;
      std::vector<std::int64_t> strides;
      if (matrix.name == "down_powers") {
        strides = {bytes, static_cast<std::int64_t>(rows) * bytes};
      }
      parts.push_back(MakePart(name, begin, extent, strides));
    };
    part(matrix.name, 1, kFp8Rows, kFp8Cols, 128);
    part(ScalesOf(matrix.name), 4, kFp8Blocks, kFp8Blocks, 1);
  }
  return parts;
}

// The trainer's bf16, and their fp8 form by engine/cpu.
class Fp8Trainer {
 public:
  explicit Fp8Trainer(std::uint64_t seed) : random_(seed) {
    for (const Fp8Matrix& matrix : Fp8Matrices()) {
      auto& bf16 = weights_[matrix.name];
      bf16.resize(kFp8Rows * kFp8Cols);
      for (auto& x : bf16) {  // 0.01 to 0.05
        x = static_cast<std::uint16_t>((random_() & 0x8000) |
                                       (0x3c24 + random_() % 0x128));
      }
    }
  }
  // One weight in fifty moves by a bit. One on each rank grows beyond all
  // others at odd steps, and its block's scale with it, and falls back at the
  // even ones.
  void Train(std::uint64_t step) {
    for (auto& [name, bf16] : weights_) {
      for (auto& x : bf16) x ^= random_() % 50 == 0 ? 1 : 0;
      const std::uint64_t block = (step - 1) / 2 % 2 + 1;  // on the diagonal
      const auto large = static_cast<std::uint16_t>(
          step % 2 == 1 ? 0x3f80 + 0x80 * step : 0x3c80);
      bf16[7 * kFp8Cols + 9] = large;
      bf16[(block * 128 + 3) * kFp8Cols + block * 128 + 2] = large;
    }
  }
  void QuantiseInto(ModelBytes* model) const {
    for (const Fp8Matrix& matrix : Fp8Matrices()) {
      const Fp8Form form = Fp8FormOf(weights_.at(matrix.name), kFp8Rows,
                                     kFp8Cols, matrix.scale_kind, 1e-12f);
      model->at(matrix.name) = form.values;
      const auto bytes = std::as_bytes(std::span(form.scales));
      model->at(ScalesOf(matrix.name)).assign(bytes.begin(), bytes.end());
    }
  }

 private:
  std::mt19937_64 random_;
  std::map<std::string, std::vector<std::uint16_t>> weights_;
};

class Fp8GroupTest : public GroupHealTest {
 protected:
  // v0 has random bytes; v1 is the first of the trainer's.
  Fp8GroupTest() : GroupHealTest(Fp8Tensors(), Fp8Parts, microseconds(100)) {
    PublishUpTo(3);
  }

  void PublishUpTo(std::uint64_t last) {
    while (run_.writer().held().step < last) {
      const std::uint64_t step = run_.writer().held().step + 1;
      trainer_.Train(step);
      trainer_.QuantiseInto(&run_.weights());
      run_.PublishHere(step, /*anchor=*/step == 1);
    }
  }
  // Whether a rank's box of one tensor is that of a version.
  bool Holds(std::uint32_t rank, const std::string& name, std::uint64_t step) {
    return group_.memory(rank).Difference(run_.at(step), name).empty();
  }
  // The tensor of each tile of a launch on a rank.
  std::vector<std::string> TensorsOf(std::uint32_t rank, Device* device,
                                     const ApplyBatch& batch,
                                     DeviceStream stream) {
    std::map<const std::byte*, std::string> names;
    for (const TrainerTensor& tensor : Fp8Tensors()) {
      EngineMemory& memory = group_.memory(rank);
      const auto element = memory.SomeElement(tensor.name);
      names[memory.Address(tensor.name, *element)] = tensor.name;
    }
    const auto boxes = BoxesOf(device, batch, stream);
    const auto records =
        Download(device, batch.records, batch.record_count, stream);
    std::vector<std::string> tensors;
    for (const ApplyTile& tile :
         Download(device, batch.tiles, batch.tile_count, stream)) {
      tensors.push_back(names[boxes[records[tile.record].first_box].data]);
    }
    return tensors;
  }

  Fp8Trainer trainer_{31};
};

// What the tests below rest on.
TEST_F(Fp8GroupTest, EveryStepMovesScalesAndValuesOnBothRanks) {
  const std::uint64_t last = kSanitized ? 3 : 9;
  PublishUpTo(last);
  group_.Hold(1);
  for (std::uint64_t step = 2; step <= last; ++step) {
    for (std::uint32_t r = 0; r < 2; ++r) {
      group_.memory(r).Load(run_.at(step));
      for (const Fp8Matrix& matrix : Fp8Matrices()) {
        EXPECT_FALSE(Holds(r, matrix.name, step - 1)) << matrix.name;
        EXPECT_FALSE(Holds(r, ScalesOf(matrix.name), step - 1)) << matrix.name;
        EXPECT_TRUE(Holds(r, matrix.name, step)) << matrix.name;
        EXPECT_TRUE(Holds(r, ScalesOf(matrix.name), step)) << matrix.name;
      }
    }
  }
}

// Before a pause all is of the version held, after it all of the next one.
TEST_F(Fp8GroupTest, EachPauseChangesWeightsAndScalesTogether) {
  group_.Hold(1);
  std::uint64_t held[2] = {1, 1};
  std::vector<std::uint64_t> commits[2];
  for (std::uint32_t r = 0; r < 2; ++r) {
    group_.on_pause(r) = [&, r] {
      EXPECT_EQ(group_.memory(r).Difference(run_.at(held[r])), "");
    };
    group_.on_commit(r) = [&, r](const VersionId& id) {
      EXPECT_EQ(group_.memory(r).Difference(run_.at(id.step)), "");
      held[r] = id.step;
      commits[r].push_back(id.step);
    };
  }
  // v2 and v3 together, then one by one, then five together.
  for (const std::uint64_t step : {3, 4, 5, 6, 7, 12}) {
    SCOPED_TRACE(step);
    PublishUpTo(step);
    ASSERT_EQ(ErrorsOf(group_.Update()), "");
    ASSERT_EQ(group_.TroubleAt(step), "");
    for (std::uint32_t r = 0; r < 2; ++r) {
      EXPECT_EQ(group_.result(r).tensors_verified, run_.table().size());
    }
  }
  for (std::uint32_t r = 0; r < 2; ++r) {
    EXPECT_THAT(commits[r], ::testing::ElementsAre(3, 4, 5, 6, 7, 12)) << r;
    EXPECT_EQ(group_.result(r).deltas, 5u);
  }
}

// The second launch of a pause dies when it has written one of a matrix's two
// tensors, and not all of the other.
TEST_F(Fp8GroupTest, ALaunchThatDiesBetweenWeightsAndScalesHeals) {
  for (std::uint32_t rank = 0; rank < 2; ++rank) {
    for (const Fp8Matrix& matrix : Fp8Matrices()) {
      if (kSanitized && matrix.by_columns == (rank == 0)) continue;
      SCOPED_TRACE(absl::StrCat("rank ", rank, " ", matrix.name));
      bool failed = false;
      int launches = 0;
      std::string whole;
      std::string half;
      ASSERT_NO_FATAL_FAILURE(Check(
          rank,
          [&] {
            group_.device(rank).set_launch(
                [&](Device* device, ApplyBatch batch, DeviceStream stream) {
                  if (++launches == 2) {
                    const auto tensors = TensorsOf(rank, device, batch, stream);
                    const auto end = [&](const std::string& name) {
                      return tensors.rend() -
                             std::find(tensors.rbegin(), tensors.rend(), name);
                    };
                    whole = matrix.name;
                    half = ScalesOf(matrix.name);
                    if (end(whole) > end(half)) std::swap(whole, half);
                    EXPECT_GT(end(whole), 0);
                    batch.tile_limit = static_cast<std::uint64_t>(end(whole));
                  }
                  return device->Apply(batch, stream);
                });
          },
          &failed,
          [&](const std::vector<absl::Status>&) {
            EXPECT_TRUE(Holds(rank, whole, 3)) << whole;
            EXPECT_FALSE(Holds(rank, half, 3)) << half;
          }));
      EXPECT_TRUE(failed);
      EXPECT_EQ(launches, 2);
    }
  }
}

// Nothing fails, but one of the two tensors stays what it was: that one does
// not verify.
TEST_F(Fp8GroupTest, WeightsWithoutTheirScalesOrScalesAloneDoNotVerify) {
  std::uint32_t rank = 0;
  for (const Fp8Matrix& matrix : Fp8Matrices()) {
    for (const std::string& left_out : {matrix.name, ScalesOf(matrix.name)}) {
      rank = 1 - rank;
      if (kSanitized && matrix.by_columns == (rank == 0)) continue;
      SCOPED_TRACE(absl::StrCat("rank ", rank, " ", left_out));
      bool failed = false;
      int launches = 0;
      ASSERT_NO_FATAL_FAILURE(Check(
          rank,
          [&] {
            group_.device(rank).set_launch([&](Device* device,
                                               const ApplyBatch& batch,
                                               DeviceStream stream) {
              if (++launches != 2) return device->Apply(batch, stream);
              const auto tensors = TensorsOf(rank, device, batch, stream);
              return LaunchWithTiles(
                  device, batch, stream, [&](std::vector<ApplyTile>* tiles) {
                    std::vector<ApplyTile> kept;
                    for (std::size_t i = 0; i < tiles->size(); ++i) {
                      if (tensors[i] != left_out) kept.push_back((*tiles)[i]);
                    }
                    EXPECT_LT(kept.size(), tiles->size());
                    *tiles = std::move(kept);
                  });
            });
          },
          &failed,
          [&](const std::vector<absl::Status>& statuses) {
            EXPECT_TRUE(Holds(rank, left_out, 2));
            for (const TrainerTensor& other : Fp8Tensors()) {
              if (other.name != left_out) {
                EXPECT_TRUE(Holds(rank, other.name, 3)) << other.name;
              }
            }
            for (const absl::Status& status : statuses) {
              EXPECT_TRUE(absl::IsDataLoss(status)) << status;
              EXPECT_THAT(
                  std::string(status.message()),
                  HasSubstr(absl::StrCat("1 tensor does not verify: tensor ",
                                         left_out, " ")));
            }
          }));
      EXPECT_TRUE(failed);
    }
  }
}

}  // namespace
}  // namespace kedge
