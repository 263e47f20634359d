// Goal: the optimizer hook at its edges: memory that a GPU would fault on is
// refused or kept aligned, storage that hangs holds nobody beyond the deadline,
// models and steps with nothing in them are ordinary, and ranks of which one
// fails come out alike. Method: a small trainer on CpuDevice; versions are
// rebuilt with the plain code of format/ and compared byte by byte.

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kedge/engine/cpu/cpu_device.h"
#include "kedge/tests/support/fault_file_system.h"
#include "kedge/tests/support/sanitized.h"
#include "kedge/tests/support/temp_directory.h"
#include "kedge/tests/support/test_model.h"
#include "kedge/tests/writer/hook_trainer.h"
#include "kedge/tests/writer/rank_world.h"
#include "kedge/tests/writer/store_checks.h"
#include "kedge/writer/device_snapshot_writer.h"
#include "kedge/writer/local_coordinator.h"

namespace kedge {
namespace {

using std::chrono::milliseconds;
using ::testing::HasSubstr;

class HookEdgesTest : public ::testing::Test {
 protected:
  WriterOptions Writer() {
    WriterOptions options;
    options.store_path = Path();
    options.fs = &fs_;
    options.io_threads = 3;
    options.encode_threads = 2;
    options.anchor_file_bytes = 200'000;
    return options;
  }
  std::string Path() const { return temp_.Join("store"); }
  void Start(HookOptions options) {
    auto made = OptimizerHook::Create(Writer(), {}, std::move(options));
    ASSERT_TRUE(made.ok()) << made.status();
    hook_ = *std::move(made);
  }
  void Start() { Start(trainer_.Options()); }
  void Refuses(const HookOptions& options,
               const std::vector<std::string>& texts) {
    const auto made = OptimizerHook::Create(Writer(), {}, options);
    EXPECT_EQ(made.status().code(), absl::StatusCode::kInvalidArgument)
        << made.status();
    for (const std::string& text : texts) {
      EXPECT_THAT(std::string(made.status().message()), HasSubstr(text));
    }
  }
  // A step of these ranges that goes well.
  void Publish(std::uint64_t step, bool anchor,
               const std::vector<HookTrainer::Range>& ranges) {
    ASSERT_TRUE(hook_->BeginStep(step, anchor).ok());
    const absl::Status written = trainer_.Write(*hook_, ranges);
    ASSERT_TRUE(written.ok()) << written;
    const absl::Status ended = hook_->EndStep();
    ASSERT_TRUE(ended.ok()) << ended;
    trainer_.SyncReplicas();
    const auto result = hook_->Publish();
    ASSERT_TRUE(result.ok()) << result.status();
    EXPECT_TRUE(result->publish.anchor_status.ok())
        << result->publish.anchor_status;
    ExpectVersion(Path(), step, trainer_.Expected());
  }

  const TempDirectory temp_;
  FaultFileSystem fs_;  // syncs nothing to the disk
  CpuDevice device_{{.delay = std::chrono::microseconds(10)}};
  HookTrainer trainer_{&device_, 17};
  std::unique_ptr<OptimizerHook> hook_;
};

// -------------------------------------------------- what a GPU would fault on

// CpuDevice stops the program where a GPU would.
TEST_F(HookEdgesTest, UnitsStayAlignedWhereverAChunkBegins) {
  // Bytes first, then wider units: a chunk may begin at any of the bytes.
  const auto p = trainer_.AddParameter("p", 77 + 3 + 80 + 160 + 2 * 301);
  trainer_.AddTensor(p, 0, "bytes", DType::kU8, {7, 11});
  trainer_.AddTensor(p, 80, "words", DType::kF32, {4, 5});
  trainer_.AddTensor(p, 160, "pairs", DType::kI64, {20});
  trainer_.AddTensor(p, 320, "halves", DType::kBf16, {301});
  const std::uint64_t end = 320 + 602;
  Start();
  std::uint64_t step = 0;
  for (const std::uint64_t cut : {1, 3, 6, 13, 77}) {
    SCOPED_TRACE(cut);
    trainer_.Optimize(0.2);
    ++step;
    Publish(step, step == 2, {{p, cut, end}, {p, 0, cut}});
  }
  ExpectClean(Path());
}

TEST_F(HookEdgesTest, TensorsOffTheirAlignmentAreRefusedByName) {
  const auto p = trainer_.AddParameter("p", 4'000);
  trainer_.AddTensor(p, 1, "odd", DType::kBf16, {100});
  Refuses(trainer_.Options(),
          {"tensor \"odd\" (parameter \"p\")", "multiples of 2 bytes"});
  trainer_.tensors().back().data = trainer_.Weights(p);
  trainer_.AddTensor(p, 1'000, "gaps", DType::kF32, {3, 5}, {22, 4});
  Refuses(trainer_.Options(), {"tensor \"gaps\"", "multiples of 4 bytes"});
  trainer_.tensors().back().strides_bytes = {24, 4};
  trainer_.AddReplica(p);
  HookOptions options = trainer_.Options();
  options.parameters[p].bytes -= 1;  // so that its copy may be a byte further
  options.parameters[p].replicas[0] = trainer_.Replica(p) + 1;
  Refuses(options, {"tensor \"odd\"", "replica 0", "multiples of 2 bytes"});
}

TEST_F(HookEdgesTest, MemoryThatIsNotAllTheDevicesIsRefusedByName) {
  const auto p = trainer_.AddParameter("p", 4'096);
  trainer_.AddTensor(p, 0, "t", DType::kBf16, {100});
  HookOptions options = trainer_.Options();
  options.parameters[p].bytes = 1 << 20;
  Refuses(options, {"parameter \"p\"", "not all in the device's memory"});
  options.parameters[p].bytes = 4'096;
  std::vector<std::byte> host(4'096);
  options.parameters[p].replicas = {host.data()};
  Refuses(options, {"parameter \"p\"", "replica 0", "expected memory of cpu"});
  options.parameters[p].replicas = {nullptr};
  Refuses(options, {"replica 0 is null"});
}

// A tensor that kernels cannot read is compared on the host; units between
// bytes stay aligned in the snapshot.
TEST_F(HookEdgesTest, TheSnapshotWriterTakesTensorsOffTheirAlignment) {
  const auto p = trainer_.AddParameter("p", 3'001);
  trainer_.AddTensor(p, 1, "odd", DType::kBf16, {10, 50});
  trainer_.AddTensor(p, 1'001, "bytes", DType::kU8, {500}, {4});
  trainer_.AddTensor(p, 1'002, "halves", DType::kBf16, {499}, {4});
  for (const MemoryKind kind : {MemoryKind::kDevice, MemoryKind::kPinned}) {
    WriterOptions writer = Writer();
    writer.store_path = temp_.Join(absl::StrCat("s", static_cast<int>(kind)));
    DeviceSnapshotOptions options;
    options.device = &device_;
    options.tensors = trainer_.tensors();
    options.snapshot = kind;
    auto made = DeviceSnapshotWriter::Create(writer, {}, options);
    ASSERT_TRUE(made.ok()) << made.status();
    for (std::uint64_t step = 1; step <= 2; ++step) {
      trainer_.Optimize(0.1);
      trainer_.PutRight();
      ASSERT_TRUE((*made)->Publish(step).ok());
      ExpectVersion(writer.store_path, step, trainer_.Expected());
    }
  }
}

TEST_F(HookEdgesTest, ChunksOfFp8TensorsAreOneSliceAtMost) {
  const auto p = trainer_.AddFiniteParameter("p", 300 * 140 * 2);
  trainer_.AddQuantised(p, 0, "w", {300, 140});
  HookOptions options = trainer_.Options();
  options.chunk_bytes = std::uint64_t{256} << 20;
  Refuses(options, {"\"w\": HookOptions::chunk_bytes: expected at most",
                    "found 268435456"});
}

// ------------------------------------------------------- storage that hangs

// Writes into anchor files wait.
class Gate {
 public:
  FaultScript Script() {
    return [this](const Operation& operation) {
      if (operation.kind == FileOperation::kWrite &&
          absl::EndsWith(operation.path, ".kda")) {
        std::unique_lock<std::mutex> lock(mutex_);
        opened_.wait(lock, [this] { return open_; });
      }
      return Fault::None();
    };
  }
  void Open() {
    const std::lock_guard<std::mutex> lock(mutex_);
    open_ = true;
    opened_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable opened_;
  bool open_ = false;
};

TEST_F(HookEdgesTest, AHangingAnchorHoldsNobodyBeyondTheDeadline) {
  const auto p = trainer_.AddParameter("p", 12'000);
  trainer_.AddTensor(p, 0, "t", DType::kBf16, {60, 100});
  HookOptions options = trainer_.Options();
  options.deadline = milliseconds(kSanitized ? 3'000 : 1'000);
  Start(options);
  Gate gate;
  trainer_.Optimize(0.1);
  ASSERT_TRUE(hook_->BeginStep(1, true).ok());
  fs_.set_script(gate.Script());
  // More writes than wait for a thread.
  OptimizerHook::Ticket last;
  for (std::uint64_t at = 0; at < 12'000; at += 8) {
    const auto ticket =
        hook_->OnUpdate(p, at, 8, trainer_.Next(p) + at, trainer_.stream());
    ASSERT_TRUE(ticket.ok()) << ticket.status();
    last = *ticket;
  }
  const absl::Status waited = hook_->WaitFor(last);
  EXPECT_EQ(waited.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(waited.message()), HasSubstr("the storage hangs"));
  EXPECT_FALSE(*hook_->HasPassed(last));
  ASSERT_TRUE(hook_->EndStep().ok());
  // The anchor's files are in use: the step cannot be given up yet.
  EXPECT_EQ(hook_->BeginStep(2, true).code(), absl::StatusCode::kUnavailable);
  gate.Open();
  EXPECT_TRUE(hook_->WaitFor(last).ok());
  EXPECT_TRUE(trainer_.DeviceHoldsNext());
  fs_.set_script(nullptr);
  trainer_.Optimize(0.1);
  Publish(2, true, {{p, 0, 12'000}});
  ExpectClean(Path());
}

TEST_F(HookEdgesTest, AnUpdateThatFailsLeavesItsSourceFree) {
  std::atomic<bool> broken{false};
  CpuDeviceOptions faulty;
  faulty.fault = [&](absl::string_view operation) -> absl::Status {
    if (!broken || operation != "Copy") return absl::OkStatus();
    return absl::InternalError("cpu: Copy: broken");
  };
  CpuDevice device(faulty);
  HookTrainer trainer(&device, 3);
  const auto p = trainer.AddParameter("p", 12'000);
  trainer.AddTensor(p, 0, "t", DType::kBf16, {60, 100});
  auto hook = OptimizerHook::Create(Writer(), {}, trainer.Options());
  ASSERT_TRUE(hook.ok()) << hook.status();
  ASSERT_TRUE((*hook)->BeginStep(1, true).ok());
  Gate gate;
  fs_.set_script(gate.Script());
  broken = true;
  // The anchor's threads read the source until the gate opens.
  auto updated = std::async(std::launch::async, [&] {
    return (*hook)
        ->OnUpdate(p, 0, 12'000, trainer.Next(p), trainer.stream())
        .status();
  });
  EXPECT_EQ(updated.wait_for(milliseconds(100)), std::future_status::timeout);
  gate.Open();
  EXPECT_EQ(updated.get().code(), absl::StatusCode::kInternal);
  broken = false;
}

// ------------------------------------------------- models and steps of little

TEST_F(HookEdgesTest, WhatIsEmptyIsOrdinary) {
  const auto nothing = trainer_.AddParameter("nothing", 0);
  const auto bare = trainer_.AddParameter("bare", 500);  // without a tensor
  const auto one = trainer_.AddParameter("one", 1);
  trainer_.AddTensor(one, 0, "byte", DType::kU8, {});
  const auto p = trainer_.AddParameter("p", 2'400);
  trainer_.AddTensor(p, 0, "t", DType::kF64, {10, 30});
  trainer_.AddTensor(p, 8, "none", DType::kF32, {3, 0, 5});
  trainer_.AddTensor(nothing, 0, "void", DType::kBf16, {0});
  trainer_.AddResidual("hollow", DType::kBf16, {0, 4}, /*on_device=*/true);
  Start();
  std::vector<HookTrainer::Range> elements = {{bare, 0, 500}, {one, 0, 1}};
  for (std::uint64_t at = 0; at < 2'400; at += 8) {
    elements.push_back({p, at, at + 8});
  }
  Publish(1, false, elements);  // the same weights again
  Publish(2, true, elements);
  trainer_.Optimize(0.1);
  Publish(3, true, elements);
  trainer_.Optimize(0.1);
  Publish(4, false, {{p, 0, 2'400}, {one, 0, 1}, {bare, 0, 500}});
  ExpectClean(Path());
}

TEST_F(HookEdgesTest, AModelOfFrozenAndResidualTensorsIsOrdinary) {
  const auto p = trainer_.AddParameter("p", 2'000, /*frozen=*/true);
  trainer_.AddTensor(p, 0, "t", DType::kBf16, {10, 100});
  trainer_.AddResidual("buffer", DType::kF32, {7, 9}, /*on_device=*/false);
  Start();
  for (std::uint64_t step = 1; step <= 3; ++step) {
    if (step != 2) trainer_.Optimize(0.3);
    Publish(step, step == 3, {});
  }
  ExpectClean(Path());
}

// Parts of one tensor here and there: in two parameters, of which one is
// frozen, and in a buffer.
TEST_F(HookEdgesTest, ATensorInPiecesIsWhole) {
  const auto add = [&](std::uint32_t parameter, ElementRange shard) {
    trainer_.AddTensor(parameter, 0, "t", DType::kBf16, {30, 100}).shard =
        shard;
  };
  const auto moving = trainer_.AddParameter("moving", 2'000);
  add(moving, {0, 1'000});
  const auto frozen = trainer_.AddParameter("frozen", 1'800, /*frozen=*/true);
  add(frozen, {1'000, 1'900});
  const auto other = trainer_.AddParameter("other", 2'200);
  add(other, {1'900, 3'000});
  Start();
  const std::vector<HookTrainer::Range> ranges = {{other, 0, 2'200},
                                                  {moving, 0, 2'000}};
  for (std::uint64_t step = 1; step <= 3; ++step) {
    trainer_.Optimize(0.1);
    Publish(step, step == 2, ranges);
  }
  // Given up, and started over.
  trainer_.Optimize(0.1);
  ASSERT_TRUE(hook_->BeginStep(4, false).ok());
  ASSERT_TRUE(trainer_.Write(*hook_, ranges).ok());
  trainer_.Optimize(0.1);
  Publish(5, true, ranges);
  ExpectClean(Path());
}

TEST_F(HookEdgesTest, OfARangeWrittenTwiceTheLastWeightsStay) {
  CpuDevice device({.delay = std::chrono::milliseconds(1)});
  HookTrainer trainer(&device, 4);
  const auto p = trainer.AddParameter("p", 8'000);
  trainer.AddTensor(p, 0, "t", DType::kBf16, {40, 100});
  auto hook = OptimizerHook::Create(Writer(), {}, trainer.Options());
  ASSERT_TRUE(hook.ok()) << hook.status();
  ASSERT_TRUE((*hook)->BeginStep(1, false).ok());
  const DeviceMemory first = *device.Allocate(MemoryKind::kPinned, 8'000);
  for (std::uint64_t at = 0; at < 8'000; at += 1'000) {
    ASSERT_TRUE(
        (*hook)
            ->OnUpdate(p, at, 1'000, first.data() + at, trainer.stream())
            .ok());
  }
  EXPECT_FALSE(
      (*hook)->OnUpdate(p, 0, 8'000, trainer.Next(p), trainer.stream()).ok());
  EXPECT_FALSE((*hook)->EndStep().ok());
  EXPECT_TRUE(trainer.DeviceHoldsNext());
}

TEST_F(HookEdgesTest, AStepNumberThatCannotBeLeavesTheOpenStepAlone) {
  const auto p = trainer_.AddParameter("p", 2'000);
  trainer_.AddTensor(p, 0, "t", DType::kBf16, {10, 100});
  Start();
  ASSERT_TRUE(trainer_.Step(*hook_, 1, false, 0.1).ok());
  EXPECT_EQ(hook_->BeginStep(0, true).code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(hook_->BeginStep(~std::uint64_t{0}, true).code(),
            absl::StatusCode::kInvalidArgument);
  const auto result = hook_->Publish();
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_GT(result->publish.records, 0u);
  ExpectVersion(Path(), 1, trainer_.Expected());
}

// ------------------------------------------------------------- several ranks

// Whatever call fails on the device of one rank, in a step or in the root after
// one that was given up: both hear of it, and both go on from there.
class HookRanksFaultTest : public ::testing::TestWithParam<bool> {};

INSTANTIATE_TEST_SUITE_P(In, HookRanksFaultTest, ::testing::Bool(),
                         [](const auto& root) {
                           return root.param ? "ARoot" : "AStep";
                         });

TEST_P(HookRanksFaultTest, AFailureOfOneDeviceIsHeardByAllAndGotOver) {
  constexpr std::uint32_t kRanks = 2;
  constexpr std::int64_t kStride = kSanitized ? 23 : 9;
  const bool root = GetParam();
  std::int64_t operations = 0;
  std::int64_t failures = 0;
  for (std::int64_t k = 0; k <= operations; k += k == 0 ? 1 : kStride) {
    SCOPED_TRACE(absl::StrCat("operation ", k, " of ", operations));
    const bool anchor = root || k / kStride % 2 == 1;
    const TempDirectory temp;
    FaultFileSystem fs[kRanks];
    std::atomic<std::int64_t> count{0};
    std::atomic<std::int64_t> broken{-1};
    std::unique_ptr<CpuDevice> devices[kRanks];
    std::unique_ptr<HookTrainer> trainers[kRanks];
    std::unique_ptr<OptimizerHook> hooks[kRanks];
    auto group = LocalCoordinator::MakeGroup(kRanks, std::chrono::seconds(60));
    for (std::uint32_t rank = 0; rank < kRanks; ++rank) {
      CpuDeviceOptions options;
      if (rank == 1) {
        options.fault = [&](absl::string_view operation) -> absl::Status {
          if (absl::StartsWith(operation, "Allocate")) return absl::OkStatus();
          if (++count != broken.load()) return absl::OkStatus();
          return absl::InternalError(absl::StrCat(operation, ": broken"));
        };
      }
      devices[rank] = std::make_unique<CpuDevice>(options);
      trainers[rank] =
          std::make_unique<HookTrainer>(devices[rank].get(), 60 + rank);
      HookTrainer& trainer = *trainers[rank];
      const auto flat = trainer.AddParameter("flat", 60'000);
      trainer.AddTensor(flat, 0, "w", DType::kBf16, {300, 200}).shard =
          rank == 0 ? ElementRange{0, 30'000} : ElementRange{30'000, 60'000};
      trainer.AddResidual(absl::StrCat("bias", rank), DType::kF32, {33},
                          /*on_device=*/true);
    }
    const auto on_ranks =
        [&](const std::function<absl::Status(std::uint32_t)>& body) {
          return OnRanks<absl::Status>(kRanks, body);
        };
    const auto expect_ok = [&](const std::vector<absl::Status>& statuses) {
      for (const absl::Status& status : statuses) {
        ASSERT_TRUE(status.ok()) << status;
      }
    };
    const auto step_all = [&](std::uint64_t step, bool with_anchor) {
      return on_ranks([&](std::uint32_t rank) {
        return trainers[rank]->Step(*hooks[rank], step, with_anchor, 0.05);
      });
    };
    const auto publish_all = [&] {
      return on_ranks([&](std::uint32_t rank) {
        const auto result = hooks[rank]->Publish();
        return result.ok() ? result->publish.anchor_status : result.status();
      });
    };
    const auto expected = [&] {
      ModelBytes model = trainers[0]->Expected();
      for (auto& [name, bytes] : trainers[1]->Expected()) {
        auto& all = model[name];
        all.insert(all.end(), bytes.begin(), bytes.end());
      }
      return model;
    };
    expect_ok(on_ranks([&](std::uint32_t rank) {
      WriterOptions writer;
      writer.store_path = temp.Join("store");
      writer.fs = &fs[rank];
      writer.io_threads = 2;
      writer.encode_threads = 1;
      writer.coordinator = group[rank].get();
      auto hook = OptimizerHook::Create(writer, {}, trainers[rank]->Options());
      if (hook.ok()) hooks[rank] = *std::move(hook);
      return hook.status();
    }));
    if (HasFatalFailure()) return;
    std::uint64_t step = 1;
    if (root) expect_ok(step_all(step++, false));  // given up

    count = 0;
    broken = k == 0 ? -1 : k;
    step_all(step, anchor);
    const std::vector<absl::Status> published = publish_all();
    if (k == 0) operations = count;
    broken = -1;
    EXPECT_EQ(published[0].code(), published[1].code())
        << published[0] << "; " << published[1];
    EXPECT_EQ(hooks[0]->held(), hooks[1]->held());
    if (hooks[0]->held().step != step) {
      ++failures;
      EXPECT_FALSE(published[0].ok());
      trainers[1]->PutRight();
      expect_ok(step_all(++step, true));
      expect_ok(publish_all());
    }
    if (HasFatalFailure()) return;
    ExpectVersion(temp.Join("store"), step, expected());
    expect_ok(step_all(++step, false));
    expect_ok(publish_all());
    if (HasFatalFailure()) return;
    ExpectVersion(temp.Join("store"), step, expected());
    if (k % 4 == 0) ExpectClean(temp.Join("store"));
  }
  EXPECT_GT(operations, 30);
  EXPECT_GT(failures * kStride, operations / 3);
}

// Nobody waits for a rank that has no memory for the hook.
TEST(HookRanksTest, ARankWithoutMemoryFailsCreateEverywhere) {
  for (std::int64_t k = 1; k <= 4; ++k) {
    SCOPED_TRACE(absl::StrCat("allocation ", k));
    const TempDirectory temp;
    FaultFileSystem fs[2];
    std::atomic<std::int64_t> count{0};
    bool armed = false;
    auto group = LocalCoordinator::MakeGroup(2, std::chrono::seconds(60));
    std::unique_ptr<CpuDevice> devices[2];
    std::unique_ptr<HookTrainer> trainers[2];
    for (std::uint32_t rank = 0; rank < 2; ++rank) {
      CpuDeviceOptions options;
      options.fault = [&, rank](absl::string_view operation) -> absl::Status {
        if (!armed || rank == 0 || !absl::StartsWith(operation, "Allocate") ||
            ++count != k) {
          return absl::OkStatus();
        }
        return absl::ResourceExhaustedError("cpu: no memory");
      };
      devices[rank] = std::make_unique<CpuDevice>(options);
      trainers[rank] = std::make_unique<HookTrainer>(devices[rank].get(), 5);
      const auto p = trainers[rank]->AddParameter("p", 200);
      trainers[rank]->AddTensor(p, 0, absl::StrCat("t", rank), DType::kBf16,
                                {100});
    }
    armed = true;
    const auto start = std::chrono::steady_clock::now();
    const auto made = OnRanks<absl::Status>(2, [&](std::uint32_t rank) {
      WriterOptions writer;
      writer.store_path = temp.Join("store");
      writer.fs = &fs[rank];
      writer.coordinator = group[rank].get();
      return OptimizerHook::Create(writer, {}, trainers[rank]->Options())
          .status();
    });
    EXPECT_LT(std::chrono::steady_clock::now() - start,
              std::chrono::seconds(30));
    for (const absl::Status& status : made) {
      EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
      EXPECT_THAT(std::string(status.message()),
                  HasSubstr("rank 1 of 2: cpu: no memory"));
    }
  }
}

}  // namespace
}  // namespace kedge
