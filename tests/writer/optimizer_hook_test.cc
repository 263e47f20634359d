// Goal: the optimizer hook publishes exactly what an optimizer wrote, from the
// pass itself, and says so when something else happened. Method: a small
// trainer on CpuDevice, whose streams run late; versions are rebuilt with the
// plain code of format/ and compared byte by byte, and fsck judges the store.

#include "kedge/writer/optimizer_hook.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <span>
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
#include "kedge/format/fp8.h"
#include "kedge/format/layout.h"
#include "kedge/format/limits.h"
#include "kedge/reader/fsck.h"
#include "kedge/tests/support/fault_file_system.h"
#include "kedge/tests/support/fp8_form.h"
#include "kedge/tests/support/sanitized.h"
#include "kedge/tests/support/temp_directory.h"
#include "kedge/tests/support/test_model.h"
#include "kedge/tests/writer/hook_trainer.h"
#include "kedge/tests/writer/rank_world.h"
#include "kedge/tests/writer/store_checks.h"
#include "kedge/writer/local_coordinator.h"
#include "kedge/writer/snapshot_writer.h"

namespace kedge {
namespace {

using ::testing::HasSubstr;

// Syncs nothing to the disk, which would take most of the time.
WriterOptions Writer(const TempDirectory& temp) {
  static FaultFileSystem* const fs = new FaultFileSystem;
  WriterOptions options;
  options.store_path = temp.Join("store");
  options.fs = fs;
  options.io_threads = 3;
  options.encode_threads = 2;
  options.anchor_file_bytes = 200'000;
  return options;
}

InitOptions Init() {
  InitOptions init;
  init.l61_seed = 77;
  return init;
}

CpuDeviceOptions Late() {
  CpuDeviceOptions options;
  options.delay = std::chrono::microseconds(20);
  return options;
}

TEST(OptimizerHookTest, PublishesWhatTheOptimizerWrote) {
  for (const std::uint64_t seed : {1, 2}) {
    SCOPED_TRACE(seed);
    const TempDirectory temp;
    CpuDevice device(Late());
    HookTrainer trainer(&device, seed);
    trainer.AddEverything();
    auto hook = OptimizerHook::Create(Writer(temp), Init(), trainer.Options());
    ASSERT_TRUE(hook.ok()) << hook.status();
    ExpectVersion(temp.Join("store"), 0, trainer.Expected());
    for (std::uint64_t step = 1; step <= 4; ++step) {
      const double fractions[] = {0, 0.02, 0.7, 0.001, 0.1};
      const bool anchor = step == 3;
      ASSERT_TRUE(trainer
                      .Step(**hook, step, anchor, fractions[step],
                            /*shuffled=*/seed == 2)
                      .ok());
      EXPECT_TRUE(trainer.DeviceHoldsNext());
      const auto result = (*hook)->Publish();
      ASSERT_TRUE(result.ok()) << result.status();
      EXPECT_TRUE(result->publish.anchor_status.ok())
          << result->publish.anchor_status;
      EXPECT_EQ(result->publish.anchor_bytes > 0, anchor);
      EXPECT_EQ(result->early_drains, 0u);
      EXPECT_GT(result->guard_bytes, 0u);
      EXPECT_EQ((*hook)->held().step, step);
      ExpectVersion(temp.Join("store"), step, trainer.Expected());
    }
    const FsckReport report = ExpectClean(temp.Join("store"));
    EXPECT_EQ(report.steps_checked, 5u);
    EXPECT_EQ(report.anchors_checked, 2u);
  }
}

// A model of two parameters, for tests that need no more.
void AddFew(HookTrainer& trainer) {
  const auto packed = trainer.AddParameter("packed", 2 * 40 * 200 * 2);
  trainer.AddTensor(packed, 0, "gate", DType::kBf16, {40, 200});
  trainer.AddTensor(packed, 40 * 200 * 2, "up", DType::kBf16, {40, 200});
  const auto mixed = trainer.AddParameter("mixed", 9000);
  trainer.AddTensor(mixed, 0, "q", DType::kBf16, {10, 150}, {600, 2});
  trainer.AddTensor(mixed, 300, "k", DType::kBf16, {10, 150}, {600, 2});
  trainer.AddTensor(mixed, 6000, "v", DType::kF32, {750});
  const auto embed = trainer.AddParameter("embed", 5000, /*frozen=*/true);
  trainer.AddTensor(embed, 0, "embed", DType::kBf16, {25, 100});
  trainer.AddResidual("bias", DType::kF32, {33}, /*on_device=*/true);
}

class HookTest : public ::testing::Test {
 protected:
  // `fs`: in place of the one of Writer().
  void Start(HookOptions options, FaultFileSystem* fs = nullptr) {
    WriterOptions writer = Writer(temp_);
    if (fs != nullptr) writer.fs = fs;
    auto made = OptimizerHook::Create(writer, Init(), std::move(options));
    ASSERT_TRUE(made.ok()) << made.status();
    hook_ = *std::move(made);
  }
  void Start(FaultFileSystem* fs = nullptr) {
    AddFew(trainer_);
    Start(trainer_.Options(), fs);
  }
  std::string Path() const { return temp_.Join("store"); }
  // A step that goes well.
  void GoOn(std::uint64_t step, bool anchor = false) {
    ASSERT_TRUE(trainer_.Step(*hook_, step, anchor, 0.02).ok());
    const auto result = hook_->Publish();
    ASSERT_TRUE(result.ok()) << result.status();
    EXPECT_TRUE(result->publish.anchor_status.ok())
        << result->publish.anchor_status;
    ExpectVersion(Path(), step, trainer_.Expected());
  }

  const TempDirectory temp_;
  CpuDevice device_{Late()};
  HookTrainer trainer_{&device_, 5};
  std::unique_ptr<OptimizerHook> hook_;
};

TEST_F(HookTest, ARingThatRunsFullIsDrainedEarly) {
  trainer_.AddEverything();
  HookOptions options = trainer_.Options();
  options.ring_bytes = 300'000;
  Start(options);
  ASSERT_TRUE(trainer_.Step(*hook_, 1, true, 0.9).ok());
  const auto result = hook_->Publish();
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_GT(result->early_drains, 0u);
  ExpectVersion(Path(), 1, trainer_.Expected());
  GoOn(2);
  ExpectClean(Path());
}

// Storage begins with an anchor while the step goes on, and with a delta while
// its records are assembled: what Publish syncs is half done.
TEST_F(HookTest, StorageBeginsBeforeAnythingIsSynced) {
  FaultFileSystem fs;
  Start(&fs);
  fs.Reset();
  ASSERT_TRUE(trainer_.Step(*hook_, 1, true, 0.1).ok());
  const std::uint64_t written = fs.bytes_written();
  EXPECT_GT(written, 0u);
  for (int i = 0; i < 10'000 && fs.bytes_started() < written; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  EXPECT_EQ(fs.bytes_started(), written);
  ASSERT_TRUE(hook_->Publish().ok());

  fs.Reset();
  GoOn(2);
  std::uint64_t segments = 0;
  for (const Operation& operation : fs.log()) {
    if (operation.kind == FileOperation::kWrite &&
        absl::EndsWith(operation.path, ".kds")) {
      segments += operation.bytes;
    }
  }
  EXPECT_GT(segments, 0u);
  EXPECT_GE(fs.bytes_started(), segments);
  ExpectClean(Path());
}

// Anchors that are given up while storage is slow to begin with them: the file
// system ends the program if a file goes meanwhile.
TEST_F(HookTest, NoFileIsClosedWhileStorageBeginsWithIt) {
  FaultFileSystem fs;
  Start(&fs);
  fs.set_start_delay(std::chrono::milliseconds(20));
  const auto write_half = [&](std::uint64_t step) {
    ASSERT_TRUE(hook_->BeginStep(step, true).ok());
    trainer_.Optimize(0.1);
    auto ranges = trainer_.Ranges(false, 4000);
    ranges.resize(ranges.size() / 2);
    ASSERT_TRUE(trainer_.Write(*hook_, ranges).ok());
  };
  write_half(1);  // and begins again
  ASSERT_TRUE(trainer_.Step(*hook_, 1, true, 0.1).ok());
  fs.set_script(FaultOn(FileOperation::kWrite, ".kda", Fault::Fail(EIO)));
  EXPECT_FALSE(hook_->Publish().ok());
  fs.set_script(nullptr);
  GoOn(2, true);
  const ModelBytes published = trainer_.Expected();
  write_half(3);
  hook_.reset();
  ExpectVersion(Path(), 2, published);
  ExpectClean(Path());
}

TEST_F(HookTest, AFailedPublishIsRepeatedFromThePartsThatAreStillThere) {
  FaultFileSystem fs;
  Start(&fs);
  ASSERT_TRUE(trainer_.Step(*hook_, 1, true, 0.1).ok());
  for (const FileOperation kind :
       {FileOperation::kWrite, FileOperation::kSync, FileOperation::kRename}) {
    fs.set_script(FaultOn(
        kind, kind == FileOperation::kRename ? "step_00000001" : "000.kds",
        Fault::Fail(EIO)));
    const auto failed = hook_->Publish();
    EXPECT_EQ(failed.status().code(), absl::StatusCode::kUnavailable)
        << failed.status();
    EXPECT_EQ(hook_->held().step, 0u);
  }
  fs.set_script(nullptr);
  const auto result = hook_->Publish();
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_TRUE(result->publish.anchor_status.ok())
      << result->publish.anchor_status;
  EXPECT_GT(result->publish.anchor_bytes, 0u);
  ExpectVersion(Path(), 1, trainer_.Expected());
  GoOn(2);
  ExpectClean(Path());
}

TEST_F(HookTest, AnAnchorThatFailsDoesNotFailItsStep) {
  FaultFileSystem fs;
  Start(&fs);
  std::uint64_t step = 0;
  // When its files are made, while they are written, when they are sealed, and
  // when it is shown.
  for (const auto& [kind, name] :
       std::vector<std::pair<FileOperation, const char*>>{
           {FileOperation::kCreateExclusive, "-000.kda"},
           {FileOperation::kWrite, "-000.kda"},
           {FileOperation::kRead, "-000.kda"},
           {FileOperation::kSync, "-000.kda"},
           {FileOperation::kRename, "/anchor"}}) {
    ++step;
    SCOPED_TRACE(step);
    fs.set_script(FaultOn(kind, name, Fault::Fail(EIO)));
    ASSERT_TRUE(trainer_.Step(*hook_, step, true, 0.02, true).ok());
    const auto result = hook_->Publish();
    fs.set_script(nullptr);
    ASSERT_TRUE(result.ok()) << result.status();
    EXPECT_EQ(result->publish.anchor_status.code(),
              absl::StatusCode::kUnavailable)
        << result->publish.anchor_status;
    EXPECT_EQ(result->publish.anchor_bytes, 0u);
    ExpectVersion(Path(), step, trainer_.Expected());
  }
  GoOn(++step, true);
  ExpectClean(Path());
}

TEST_F(HookTest, PartsDrainedEarlyGoWithThePublishThatFailed) {
  FaultFileSystem fs;
  trainer_.AddEverything();
  HookOptions options = trainer_.Options();
  options.ring_bytes = 300'000;
  Start(options, &fs);
  ASSERT_TRUE(trainer_.Step(*hook_, 1, false, 0.9).ok());
  fs.set_script(
      FaultOn(FileOperation::kRename, "step_00000001", Fault::Fail(EIO)));
  EXPECT_FALSE(hook_->Publish().ok());
  fs.set_script(nullptr);
  const auto again = hook_->Publish();
  EXPECT_EQ(again.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(again.status().message()),
              HasSubstr("begin the next step with an anchor"));
  // Not without one.
  EXPECT_EQ(hook_->BeginStep(2, false).code(),
            absl::StatusCode::kFailedPrecondition);
  GoOn(2, true);
  GoOn(3);
  ExpectClean(Path());
}

TEST_F(HookTest, AStepGivenUpIsFollowedByARootWithoutADelta) {
  Start();
  GoOn(1);
  ASSERT_TRUE(trainer_.Step(*hook_, 2, true, 0.1).ok());
  const absl::Status without = hook_->BeginStep(3, false);
  EXPECT_EQ(without.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(without.message()),
              HasSubstr("begin this step with an anchor"));
  ASSERT_TRUE(trainer_.Step(*hook_, 3, true, 0.1).ok());
  const auto result = hook_->Publish();
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->publish.records, 0u);
  EXPECT_GT(result->publish.anchor_bytes, 0u);
  ExpectVersion(Path(), 3, trainer_.Expected());
  GoOn(4);
  GoOn(5, true);
  ExpectClean(Path());
}

TEST_F(HookTest, AStepInWhichNothingWasWrittenMayBeBegunAgain) {
  Start();
  ASSERT_TRUE(hook_->BeginStep(1, false).ok());
  const absl::Status twice = hook_->BeginStep(1, false);
  EXPECT_EQ(twice.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(twice.message()), HasSubstr("open already"));
  GoOn(1, true);
  EXPECT_EQ(hook_->held().step, 1u);
  ExpectClean(Path());
}

TEST_F(HookTest, StepsAreNumberedInOrder) {
  Start();
  EXPECT_EQ(hook_->BeginStep(0, false).code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(hook_->BeginStep(2, true).code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(hook_->EndStep().code(), absl::StatusCode::kFailedPrecondition);
  const auto published = hook_->Publish();
  EXPECT_THAT(std::string(published.status().message()),
              HasSubstr("no step was hooked"));
  GoOn(1);
}

TEST_F(HookTest, TheGuardNamesWhatChangedOutsideTheStep) {
  Start();
  GoOn(1);
  struct Case {
    const char* parameter;
    std::uint64_t byte;
    const char* tensor;
    const char* what;
  };
  const std::uint64_t step = 2;
  ASSERT_TRUE(trainer_.Step(*hook_, step, false, 0.05).ok());
  for (const Case& c :
       {Case{"packed", 3, "\"gate\"", "changed outside the step"},
        Case{"packed", 31'999, "\"up\"", "changed outside the step"},
        Case{"mixed", 305, "\"k\"", "changed outside the step"},
        Case{"mixed", 620, "\"q\"", "changed outside the step"},
        Case{"embed", 4'999, "\"embed\"", "a frozen parameter was changed"}}) {
    SCOPED_TRACE(c.tensor);
    std::byte& byte = trainer_.Weights(trainer_.IndexOf(c.parameter))[c.byte];
    byte ^= std::byte{1};
    const auto result = hook_->Publish();
    EXPECT_EQ(result.status().code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_THAT(std::string(result.status().message()), HasSubstr(c.tensor));
    EXPECT_THAT(std::string(result.status().message()), HasSubstr(c.what));
    byte ^= std::byte{1};
  }
  const auto result = hook_->Publish();
  ASSERT_TRUE(result.ok()) << result.status();
  ExpectVersion(Path(), step, trainer_.Expected());
  ExpectClean(Path());
}

TEST_F(HookTest, TheGuardSeesWeightsChangedBetweenSteps) {
  Start();
  GoOn(1);
  trainer_.Weights(trainer_.IndexOf("mixed"))[8'000] ^= std::byte{0x40};
  ASSERT_TRUE(trainer_.Step(*hook_, 2, false, 0.05).ok());
  const auto result = hook_->Publish();
  EXPECT_THAT(std::string(result.status().message()),
              HasSubstr("tensor \"v\" (parameter \"mixed\"): changed outside "
                        "the step"));
  GoOn(3, true);
  ExpectClean(Path());
}

TEST_F(HookTest, TheGuardChecksReplicas) {
  trainer_.AddEverything();
  Start(trainer_.Options());
  ASSERT_TRUE(trainer_.Step(*hook_, 1, false, 0.05).ok());
  std::byte& byte = trainer_.Replica(trainer_.IndexOf("mlp.gate_up"))[1];
  byte ^= std::byte{4};
  const auto failed = hook_->Publish();
  EXPECT_THAT(std::string(failed.status().message()),
              HasSubstr("\"mlp.gate\" (parameter \"mlp.gate_up\"): replica 0"));
  byte ^= std::byte{4};
  EXPECT_TRUE(hook_->Publish().ok());
}

TEST_F(HookTest, WhatWasLeftOutIsNamed) {
  Start();
  ASSERT_TRUE(hook_->BeginStep(1, false).ok());
  trainer_.Optimize(0.1);
  const std::uint32_t mixed = trainer_.IndexOf("mixed");
  std::vector<HookTrainer::Range> ranges = {
      {trainer_.IndexOf("packed"), 0, 32'000},
      {mixed, 0, 600},
      {mixed, 6'000, 8'000}};
  ASSERT_TRUE(trainer_.Write(*hook_, ranges).ok());
  const absl::Status missing = hook_->EndStep();
  EXPECT_EQ(missing.code(), absl::StatusCode::kFailedPrecondition);
  for (const char* text :
       {"never written", "\"mixed\" bytes [600, 6000) (q; k)",
        "bytes [8000, 9000) (v)"}) {
    EXPECT_THAT(std::string(missing.message()), HasSubstr(text));
  }
  EXPECT_THAT(std::string(hook_->Publish().status().message()),
              HasSubstr("has not ended"));
  ranges = {{mixed, 8'000, 9'000}, {mixed, 600, 6'000}};
  ASSERT_TRUE(trainer_.Write(*hook_, ranges).ok());
  ASSERT_TRUE(hook_->EndStep().ok());
  const auto result = hook_->Publish();
  ASSERT_TRUE(result.ok()) << result.status();
  ExpectVersion(Path(), 1, trainer_.Expected());
}

TEST_F(HookTest, ARangeWrittenTwiceIsRefusedAndItsWeightsStillArrive) {
  Start();
  ASSERT_TRUE(hook_->BeginStep(1, false).ok());
  trainer_.Optimize(0.1);
  const std::uint32_t packed = trainer_.IndexOf("packed");
  ASSERT_TRUE(trainer_.Write(*hook_, {{packed, 0, 20'000}}).ok());
  const absl::Status twice = trainer_.Write(*hook_, {{packed, 19'998, 32'000}});
  EXPECT_EQ(twice.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(twice.message()), HasSubstr("[19998, 32000)"));
  EXPECT_THAT(std::string(twice.message()), HasSubstr("[0, 20000)"));
  ASSERT_TRUE(
      trainer_.Write(*hook_, {{trainer_.IndexOf("mixed"), 0, 9'000}}).ok());
  EXPECT_EQ(hook_->EndStep(), twice);
  EXPECT_TRUE(trainer_.DeviceHoldsNext());
  GoOn(2, true);
  ExpectClean(Path());
}

TEST_F(HookTest, FrozenParametersAndClosedStepsTakeNoUpdates) {
  Start();
  const std::uint32_t embed = trainer_.IndexOf("embed");
  const std::uint32_t packed = trainer_.IndexOf("packed");
  trainer_.Next(packed)[0] ^= std::byte{1};
  const absl::Status closed = trainer_.Write(*hook_, {{packed, 0, 100}});
  EXPECT_THAT(std::string(closed.message()), HasSubstr("outside of a step"));
  EXPECT_TRUE(trainer_.DeviceHoldsNext());
  trainer_.Next(packed)[0] ^= std::byte{1};
  trainer_.Weights(packed)[0] ^= std::byte{1};
  ASSERT_TRUE(hook_->BeginStep(1, false).ok());
  const absl::Status frozen = trainer_.Write(*hook_, {{embed, 0, 100}});
  EXPECT_EQ(frozen.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(frozen.message()), HasSubstr("declared frozen"));
  GoOn(2, true);
}

TEST_F(HookTest, WrongArgumentsAreRefused) {
  Start();
  ASSERT_TRUE(hook_->BeginStep(1, false).ok());
  const std::uint32_t mixed = trainer_.IndexOf("mixed");
  std::vector<std::byte> source(9'008);
  const auto update = [&](std::uint32_t parameter, std::uint64_t begin,
                          std::uint64_t bytes, const void* from) {
    return hook_->OnUpdate(parameter, begin, bytes, from, trainer_.stream())
        .status()
        .code();
  };
  constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
  EXPECT_EQ(update(7, 0, 8, source.data()), kInvalid);
  EXPECT_EQ(update(mixed, 0, 9'001, source.data()), kInvalid);
  EXPECT_EQ(update(mixed, 9'001, 0, source.data()), kInvalid);
  EXPECT_EQ(update(mixed, ~std::uint64_t{0}, 2, source.data()), kInvalid);
  EXPECT_EQ(update(mixed, 0, 8, nullptr), kInvalid);
  EXPECT_EQ(update(mixed, 1, 8, source.data()), kInvalid);  // half of a bf16
  EXPECT_EQ(update(mixed, 0, 6'002, source.data()), kInvalid);  // of an f32
  EXPECT_EQ(update(mixed, 5, 0, nullptr), absl::StatusCode::kOk);
  ASSERT_TRUE(trainer_.Step(*hook_, 2, true, 0.1).code() ==
              absl::StatusCode::kInvalidArgument);  // nothing was written yet
  GoOn(1, true);
}

TEST_F(HookTest, OpensWhatTheTensorsHoldAndNothingElse) {
  Start();
  GoOn(1);
  GoOn(2);
  hook_.reset();
  std::byte& byte = trainer_.Weights(trainer_.IndexOf("mixed"))[7'777];
  byte ^= std::byte{1};
  const auto wrong = OptimizerHook::Open(Writer(temp_), trainer_.Options());
  EXPECT_EQ(wrong.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(wrong.status().message()), HasSubstr("v: L61"));
  byte ^= std::byte{1};
  auto again = OptimizerHook::Open(Writer(temp_), trainer_.Options());
  ASSERT_TRUE(again.ok()) << again.status();
  hook_ = *std::move(again);
  EXPECT_EQ(hook_->held().step, 2u);
  GoOn(3, true);
  ExpectClean(Path());
}

TEST_F(HookTest, SaysWhatItHolds) {
  trainer_.AddEverything();
  const std::uint64_t device_before = device_.bytes_in_use(MemoryKind::kDevice);
  const std::uint64_t pinned_before = device_.bytes_in_use(MemoryKind::kPinned);
  HookOptions options = trainer_.Options();
  Start(options);
  const HookMemory& memory = hook_->memory();
  EXPECT_EQ(memory.device_bytes,
            device_.bytes_in_use(MemoryKind::kDevice) - device_before);
  EXPECT_EQ(memory.pinned_bytes,
            device_.bytes_in_use(MemoryKind::kPinned) - pinned_before);
  EXPECT_GE(memory.device_bytes, 4 * options.chunk_bytes + options.ring_bytes);
  EXPECT_EQ(memory.residual_bytes, 77u * 4 + 23 * 40 * 2 + 30 * 50 * 2);
  EXPECT_THAT(memory.residual, ::testing::UnorderedElementsAre(
                                   ::testing::Pair("router.bias", 77u * 4),
                                   ::testing::Pair("router.gate", 23u * 40 * 2),
                                   ::testing::Pair("router.up", 30u * 50 * 2)));
}

TEST_F(HookTest, RefusesTensorsThatItCannotMap) {
  const auto refuses = [&](const std::function<void(HookTrainer&)>& add,
                           const char* first, const char* second) {
    HookTrainer trainer(&device_, 9);
    add(trainer);
    const auto made =
        OptimizerHook::Create(Writer(temp_), Init(), trainer.Options());
    EXPECT_EQ(made.status().code(), absl::StatusCode::kInvalidArgument)
        << made.status();
    EXPECT_THAT(std::string(made.status().message()), HasSubstr(first));
    EXPECT_THAT(std::string(made.status().message()), HasSubstr(second));
  };
  refuses(
      [](HookTrainer& t) {
        t.AddTensor(t.AddParameter("p", 800), 0, "turned", DType::kBf16,
                    {20, 20}, {2, 40});
      },
      "turned", "do not ascend");
  refuses(
      [](HookTrainer& t) {
        t.AddTensor(t.AddParameter("p", 800), 2, "long", DType::kBf16, {400});
      },
      "long", "beyond");
  refuses(
      [](HookTrainer& t) {
        const auto p = t.AddParameter("p", 800);
        t.AddTensor(p, 0, "one", DType::kBf16, {200});
        t.AddTensor(p, 398, "two", DType::kBf16, {10});
      },
      "\"one\" and \"two\"", "share bytes");
  refuses(
      [](HookTrainer& t) {
        const auto p = t.AddParameter("p", 800);
        t.AddTensor(p, 0, "even", DType::kBf16, {10, 10}, {40, 4});
        t.AddTensor(p, 42, "odd", DType::kBf16, {10, 10}, {40, 4});
        t.AddTensor(p, 80, "row", DType::kBf16, {1, 3});
      },
      "\"even\" and \"row\"", "share bytes");
  refuses(
      [](HookTrainer& t) {
        t.AddParameter("p", 800);
        auto& tensor = t.AddTensor(0, 0, "host", DType::kBf16, {4});
        static std::byte host[8];
        tensor.data = host;
      },
      "host", "lies in no parameter");
}

// Experts that travel as fp8, beside tensors that do not.
void AddFp8Experts(HookTrainer& trainer) {
  constexpr std::uint64_t kRows = 300;
  constexpr std::uint64_t kCols = 140;
  const auto experts =
      trainer.AddFiniteParameter("experts", 3 * kRows * kCols * 2 + 4000);
  trainer.AddQuantised(experts, 0, "e0", {kRows, kCols});
  trainer.AddQuantised(experts, kRows * kCols * 2, "e1", {kRows, kCols},
                       ScaleKind::kPowerOfTwo);
  trainer.AddTensor(experts, 2 * kRows * kCols * 2, "norm", DType::kBf16,
                    {2000});
  trainer.AddQuantised(experts, 2 * kRows * kCols * 2 + 4000, "e2",
                       {kRows, kCols});
  const auto small = trainer.AddFiniteParameter("small", 6 * 50 * 2 + 256 * 2);
  trainer.AddQuantised(small, 0, "s0", {6, 50});
  trainer.AddQuantised(small, 600, "s1", {256, 1});
  const auto plain = trainer.AddParameter("plain", 30'000);
  trainer.AddTensor(plain, 0, "plain", DType::kBf16, {100, 150});
}

TEST_F(HookTest, Fp8FormsTravelWithTheirScales) {
  AddFp8Experts(trainer_);
  // Chunks smaller than a row of blocks, and chunks of several tensors.
  for (const std::uint64_t chunk_bytes : {20'000, 400'000}) {
    SCOPED_TRACE(chunk_bytes);
    HookOptions options = trainer_.Options();
    options.chunk_bytes = chunk_bytes;
    WriterOptions writer = Writer(temp_);
    writer.store_path = temp_.Join(absl::StrCat("store", chunk_bytes));
    auto hook = OptimizerHook::Create(writer, Init(), options);
    ASSERT_TRUE(hook.ok()) << hook.status();
    ExpectVersion(writer.store_path, 0, trainer_.Expected());
    for (std::uint64_t step = 1; step <= 4; ++step) {
      const double fractions[] = {0, 0.02, 0.6, 0.0005, 0.1};
      ASSERT_TRUE((*hook)->BeginStep(step, step == 3).ok());
      trainer_.Optimize(fractions[step]);
      ASSERT_TRUE(trainer_.Write(**hook, trainer_.Ranges(false, 60'000)).ok());
      ASSERT_TRUE((*hook)->EndStep().ok());
      const auto result = (*hook)->Publish();
      ASSERT_TRUE(result.ok()) << result.status();
      EXPECT_TRUE(result->publish.anchor_status.ok())
          << result->publish.anchor_status;
      ExpectVersion(writer.store_path, step, trainer_.Expected());
    }
    // A step given up, and the root after it.
    ASSERT_TRUE(trainer_.Step(**hook, 5, false, 0.1).ok());
    ASSERT_TRUE(trainer_.Step(**hook, 6, true, 0.1).ok());
    ASSERT_TRUE((*hook)->Publish().ok());
    ExpectVersion(writer.store_path, 6, trainer_.Expected());
    ExpectClean(writer.store_path);
    (*hook).reset();
    const auto again = OptimizerHook::Open(writer, options);
    EXPECT_TRUE(again.ok()) << again.status();
  }
}

TEST_F(HookTest, Fp8TensorsAreGuardedAndKeptFinite) {
  AddFp8Experts(trainer_);
  Start(trainer_.Options());
  const std::uint32_t experts = trainer_.IndexOf("experts");
  ASSERT_TRUE(trainer_.Step(*hook_, 1, false, 0.1).ok());
  std::byte& byte = trainer_.Weights(experts)[300 * 140 * 2];
  byte ^= std::byte{1};
  EXPECT_THAT(std::string(hook_->Publish().status().message()),
              HasSubstr("\"e1\" (parameter \"experts\"): changed outside"));
  byte ^= std::byte{1};
  ASSERT_TRUE(hook_->Publish().ok());

  ASSERT_TRUE(hook_->BeginStep(2, false).ok());
  trainer_.Optimize(0.01);
  std::byte* const weight = trainer_.Next(experts) + 2 * (300 * 140 + 777);
  const std::byte before = weight[1];
  weight[0] = std::byte{0x80};
  weight[1] = std::byte{0x7f};
  ASSERT_TRUE(trainer_.Write(*hook_, trainer_.Ranges(false)).ok());
  const absl::Status ended = hook_->EndStep();
  EXPECT_EQ(ended.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(ended.message()), HasSubstr("tensor \"e1\": a NaN"));
  EXPECT_FALSE(hook_->Publish().ok());
  weight[1] = before;
  ASSERT_TRUE(hook_->BeginStep(3, true).ok());
  trainer_.Optimize(0.01);
  ASSERT_TRUE(trainer_.Write(*hook_, trainer_.Ranges(false)).ok());
  ASSERT_TRUE(hook_->EndStep().ok());
  ASSERT_TRUE(hook_->Publish().ok());
  ExpectVersion(Path(), 3, trainer_.Expected());

  // In ascending order.
  ASSERT_TRUE(hook_->BeginStep(4, false).ok());
  const absl::Status order = trainer_.Write(*hook_, {{experts, 1000, 2000}});
  EXPECT_THAT(std::string(order.message()), HasSubstr("ascending order"));
}

TEST_F(HookTest, RefusesFp8FormsThatItCannotMake) {
  const auto refuses = [&](const std::function<void(HookTrainer&)>& add,
                           const char* text) {
    HookTrainer trainer(&device_, 9);
    add(trainer);
    const auto made =
        OptimizerHook::Create(Writer(temp_), Init(), trainer.Options());
    EXPECT_EQ(made.status().code(), absl::StatusCode::kInvalidArgument)
        << made.status();
    EXPECT_THAT(std::string(made.status().message()), HasSubstr(text));
  };
  refuses(
      [](HookTrainer& t) {
        t.AddQuantised(t.AddFiniteParameter("p", 800), 0, "w", {400});
      },
      "bf16 of two dimensions");
  refuses(
      [](HookTrainer& t) {
        t.AddQuantised(t.AddFiniteParameter("p", 256 * 20 * 2), 0, "w",
                       {300, 20});
        t.tensors().back().shard = ElementRange{0, 256 * 20 - 20};
      },
      "whole blocks of 128 rows");
  refuses(
      [](HookTrainer& t) {
        t.AddQuantised(t.AddFiniteParameter("p", 800), 0, "w", {10, 20});
        t.tensors().back().strides_bytes = {80, 2};
      },
      "rows are not contiguous");
}

// The bytes of every record of a step, by tensor and first unit.
std::map<std::pair<std::uint32_t, std::uint64_t>, std::vector<std::byte>>
Records(const std::string& path, std::uint64_t step) {
  std::map<std::pair<std::uint32_t, std::uint64_t>, std::vector<std::byte>> all;
  const auto store = Store::Open(PosixFileSystem(), path);
  EXPECT_TRUE(store.ok()) << store.status();
  const auto published = (*store)->ReadStep(step);
  EXPECT_TRUE(published.ok()) << published.status();
  for (const DeltaRecord& record : (*published)->manifest.records) {
    const DataFile& file = (*published)->manifest.files[record.file];
    const auto bytes = ReadFile(
        *PosixFileSystem(), JoinPath((*published)->path, DataFileName(file.id)),
        kMaxFileBytes);
    EXPECT_TRUE(bytes.ok()) << bytes.status();
    const auto first =
        bytes->begin() + static_cast<std::ptrdiff_t>(record.offset);
    all[{record.tensor, record.slice.begin}].assign(first,
                                                    first + record.bytes);
  }
  return all;
}

TEST(OptimizerHookTest, RecordsAreThoseOfTheSnapshotWriter) {
  const TempDirectory temp;
  const TempDirectory other;
  CpuDevice device(Late());
  HookTrainer trainer(&device, 21);
  const auto p = trainer.AddParameter("p", 3 * 100'000);
  trainer.AddTensor(p, 0, "a", DType::kBf16, {200, 250});
  trainer.AddTensor(p, 100'000, "b", DType::kBf16, {200, 250}, {1000, 4});
  trainer.AddTensor(p, 100'002, "c", DType::kBf16, {200, 250}, {1000, 4});
  HookOptions options = trainer.Options();
  options.chunk_bytes = 1 << 20;
  auto hook = OptimizerHook::Create(Writer(temp), Init(), options);
  ASSERT_TRUE(hook.ok()) << hook.status();
  std::vector<TrainerTensor> tensors = trainer.tensors();
  auto snapshot = SnapshotWriter::Create(Writer(other), Init(), tensors);
  ASSERT_TRUE(snapshot.ok()) << snapshot.status();
  for (std::uint64_t step = 1; step <= 3; ++step) {
    ASSERT_TRUE((*hook)->BeginStep(step, false).ok());
    trainer.Optimize(step == 2 ? 0.9 : 0.01);
    ASSERT_TRUE(trainer.Write(**hook, {{p, 0, 300'000}}).ok());
    ASSERT_TRUE((*hook)->EndStep().ok());
    ASSERT_TRUE((*hook)->Publish().ok());
    ASSERT_TRUE((*snapshot)->Publish(step).ok());
    const auto records = Records(temp.Join("store"), step);
    EXPECT_EQ(records.size(), 3u);
    EXPECT_TRUE(records == Records(other.Join("store"), step));
  }
}

// Whatever call on the device fails, the trainer's weights arrive, the step is
// published whole or not at all, and the next ones go on from there.
TEST(HookFaultTest, AnyFailureOfTheDeviceIsSaidAndGotOver) {
  // Operations are counted over a step and its publish.
  std::atomic<std::int64_t> count{0};
  std::atomic<std::int64_t> broken{-1};
  CpuDeviceOptions device_options;
  device_options.fault = [&](absl::string_view operation) -> absl::Status {
    // The trainer's own; the hook has all its memory by then.
    if (absl::StartsWith(operation, "Allocate")) return absl::OkStatus();
    if (++count != broken.load()) return absl::OkStatus();
    return absl::InternalError(absl::StrCat("cpu: ", operation, ": broken"));
  };
  constexpr std::int64_t kStride = kSanitized ? 7 : 3;
  std::int64_t operations = 0;
  std::int64_t failures = 0;
  std::int64_t roots = 0;
  std::int64_t given = 0;  // failures after which all weights were there
  // How many there are before Publish differs from run to run: its own are
  // counted from its beginning, after all others.
  constexpr std::int64_t kOfPublish = 4;
  const auto next_of = [&](std::int64_t k) {
    return k + (k == 0 || operations - k < 10 ? 1 : kStride);
  };
  for (std::int64_t k = 0; k <= operations + kOfPublish; k = next_of(k)) {
    SCOPED_TRACE(absl::StrCat("operation ", k, " of ", operations));
    const TempDirectory temp;
    broken = -1;
    CpuDevice device(device_options);
    HookTrainer trainer(&device, 3);
    AddFew(trainer);
    trainer.AddQuantised(trainer.AddFiniteParameter("fp8", 260 * 30 * 2), 0,
                         "fp8", {260, 30});
    auto hook = OptimizerHook::Create(Writer(temp), Init(), trainer.Options());
    ASSERT_TRUE(hook.ok()) << hook.status();
    count = 0;
    broken = k == 0 || k > operations ? -1 : k;
    const absl::Status stepped = trainer.Step(**hook, 1, k % 2 == 1, 0.05);
    absl::StatusOr<HookResult> result = absl::UnknownError("not tried");
    if (stepped.ok()) {
      if (k > operations) {
        count = 0;
        broken = k - operations;
      }
      result = (*hook)->Publish();
      if (!result.ok()) {
        ++failures;
        EXPECT_EQ(result.status().code(), absl::StatusCode::kInternal);
        // The fault was a passing one.
        result = (*hook)->Publish();
      }
    } else {
      ++failures;
      // Before a trainer touches its weights it ends the step.
      (*hook)->EndStep().IgnoreError();
      if (trainer.all_given()) {
        ++given;
        EXPECT_TRUE(trainer.DeviceHoldsNext()) << stepped;
      }
    }
    if (k == 0) operations = count;
    broken = -1;
    std::uint64_t next = 2;
    if (!result.ok()) {
      ++roots;
      trainer.PutRight();
      ASSERT_TRUE(trainer.Step(**hook, next, true, 0.05).ok());
      result = (*hook)->Publish();
      ASSERT_TRUE(result.ok()) << result.status();
      ++next;
    }
    EXPECT_TRUE(trainer.DeviceHoldsNext());
    ExpectVersion(temp.Join("store"), next - 1, trainer.Expected());
    ASSERT_TRUE(trainer.Step(**hook, next, false, 0.05).ok());
    result = (*hook)->Publish();
    ASSERT_TRUE(result.ok()) << result.status();
    ExpectVersion(temp.Join("store"), next, trainer.Expected());
    if (k % 16 == 0) ExpectClean(temp.Join("store"));
  }
  EXPECT_GT(operations, 50);
  EXPECT_GT(failures * kStride, operations / 2);
  EXPECT_GT(roots, 0);
  EXPECT_LT(roots, failures);
  EXPECT_GT(given, 0);
}

// With a device that copies nothing any more for the hook's own thread the
// weights cannot arrive: whatever failed first, the trainer hears of that.
TEST(HookFaultTest, WeightsThatDidNotArriveAreSaidBeforeAnythingElse) {
  const std::thread::id trainers_thread = std::this_thread::get_id();
  std::atomic<bool> broken{false};
  CpuDeviceOptions device_options;
  device_options.fault = [&](absl::string_view operation) -> absl::Status {
    if (!broken || operation != "Copy" ||
        std::this_thread::get_id() == trainers_thread) {
      return absl::OkStatus();
    }
    return absl::InternalError(absl::StrCat("cpu: ", operation, ": broken"));
  };
  const TempDirectory temp;
  CpuDevice device(device_options);
  HookTrainer trainer(&device, 3);
  AddFew(trainer);
  auto hook = OptimizerHook::Create(Writer(temp), Init(), trainer.Options());
  ASSERT_TRUE(hook.ok()) << hook.status();
  broken = true;
  const absl::Status stepped = trainer.Step(**hook, 1, false, 0.05);
  EXPECT_EQ(stepped.code(), absl::StatusCode::kInternal) << stepped;
  EXPECT_THAT(std::string(stepped.message()), HasSubstr("did not arrive"));
  // Nor is the source of any ticket known to be free.
  const OptimizerHook::Ticket first{1};
  EXPECT_EQ((*hook)->WaitFor(first).message(), stepped.message());
  EXPECT_EQ((*hook)->HasPassed(first).status().message(), stepped.message());
  // Nothing works on the weights once the step has been ended.
  EXPECT_EQ((*hook)->EndStep().message(), stepped.message());
  broken = false;
  trainer.PutRight();
  ASSERT_TRUE(trainer.Step(**hook, 2, true, 0.05).ok());
  const auto result = (*hook)->Publish();
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_TRUE(trainer.DeviceHoldsNext());
  ExpectVersion(temp.Join("store"), 2, trainer.Expected());
}

// Two ranks with uneven shards of the same tensors.
class RanksHookTest : public ::testing::Test {
 protected:
  static constexpr std::uint32_t kRanks = 2;
  struct Cut {
    const char* name;
    DType dtype;
    std::vector<std::uint64_t> shape;
    std::uint64_t at;  // elements of rank 0
  };

  void Start() {
    const std::vector<Cut> cuts = {{"wide", DType::kBf16, {130, 300}, 11'111},
                                   {"tall", DType::kBf16, {700, 20}, 13'999},
                                   {"norm", DType::kF32, {77}, 0},
                                   {"bias", DType::kBf16, {501}, 501},
                                   {"pairs", DType::kI64, {40, 3}, 7},
                                   {"fp8", DType::kBf16, {300, 70}, 128 * 70}};
    for (std::uint32_t rank = 0; rank < kRanks; ++rank) {
      devices_[rank] = std::make_unique<CpuDevice>(Late());
      trainers_[rank] =
          std::make_unique<HookTrainer>(devices_[rank].get(), 40 + rank);
      std::uint64_t bytes = 0;
      for (const Cut& cut : cuts) bytes += RoomOf(cut, rank);
      HookTrainer& trainer = *trainers_[rank];
      // A flat parameter, as a distributed optimizer has it.
      const auto flat = trainer.AddFiniteParameter("flat", bytes);
      std::uint64_t at = 0;
      for (const Cut& cut : cuts) {
        if (std::string(cut.name) == "fp8") {
          trainer.AddQuantised(flat, at, cut.name, cut.shape);
        } else {
          trainer.AddTensor(flat, at, cut.name, cut.dtype, cut.shape);
        }
        TrainerTensor& tensor = trainer.tensors().back();
        const std::uint64_t all = Elements(cut);
        tensor.shard =
            rank == 0 ? ElementRange{0, cut.at} : ElementRange{cut.at, all};
        at += RoomOf(cut, rank);
      }
    }
    group_ = LocalCoordinator::MakeGroup(kRanks, std::chrono::seconds(60));
    const auto made = OnRanks<absl::Status>(kRanks, [&](std::uint32_t rank) {
      auto hook = OptimizerHook::Create(Options(rank), Init(),
                                        trainers_[rank]->Options());
      if (hook.ok()) hooks_[rank] = *std::move(hook);
      return hook.status();
    });
    for (const absl::Status& status : made) ASSERT_TRUE(status.ok()) << status;
  }
  static std::uint64_t Elements(const Cut& cut) {
    std::uint64_t elements = 1;
    for (const std::uint64_t extent : cut.shape) elements *= extent;
    return elements;
  }
  static std::uint64_t PartBytes(const Cut& cut, std::uint32_t rank) {
    return ElementBytes(cut.dtype) *
           (rank == 0 ? cut.at : Elements(cut) - cut.at);
  }
  // Units of what comes next stay aligned.
  static std::uint64_t RoomOf(const Cut& cut, std::uint32_t rank) {
    return (PartBytes(cut, rank) + 7) / 8 * 8;
  }
  WriterOptions Options(std::uint32_t rank) {
    WriterOptions options = Writer(temp_);
    options.coordinator = group_[rank].get();
    options.fs = &fs_[rank];
    return options;
  }
  std::vector<absl::Status> StepAll(std::uint64_t step, bool anchor) {
    return OnRanks<absl::Status>(kRanks, [&](std::uint32_t rank) {
      return trainers_[rank]->Step(*hooks_[rank], step, anchor, 0.03,
                                   /*shuffled=*/false);
    });
  }
  std::vector<absl::StatusOr<HookResult>> PublishAll() {
    return OnRanks<absl::StatusOr<HookResult>>(
        kRanks, [&](std::uint32_t rank) { return hooks_[rank]->Publish(); });
  }
  ModelBytes Expected() const {
    ModelBytes model = trainers_[0]->Expected();
    for (auto& [name, bytes] : trainers_[1]->Expected()) {
      auto& all = model[name];
      all.insert(all.end(), bytes.begin(), bytes.end());
    }
    return model;
  }
  void GoOn(std::uint64_t step, bool anchor) {
    for (const absl::Status& status : StepAll(step, anchor)) {
      ASSERT_TRUE(status.ok()) << status;
    }
    for (const auto& result : PublishAll()) {
      ASSERT_TRUE(result.ok()) << result.status();
      EXPECT_TRUE(result->publish.anchor_status.ok())
          << result->publish.anchor_status;
    }
    ExpectVersion(temp_.Join("store"), step, Expected());
  }

  const TempDirectory temp_;
  FaultFileSystem fs_[kRanks];
  std::unique_ptr<CpuDevice> devices_[kRanks];
  std::unique_ptr<HookTrainer> trainers_[kRanks];
  std::vector<std::unique_ptr<LocalCoordinator>> group_;
  std::unique_ptr<OptimizerHook> hooks_[kRanks];
};

TEST_F(RanksHookTest, PublishTogether) {
  Start();
  ExpectVersion(temp_.Join("store"), 0, Expected());
  for (std::uint64_t step = 1; step <= 3; ++step) GoOn(step, step == 2);
  ExpectClean(temp_.Join("store"));
}

TEST_F(RanksHookTest, AFailureOfOneIsEverybodys) {
  Start();
  GoOn(1, false);
  // Its guard.
  for (const absl::Status& status : StepAll(2, true)) ASSERT_TRUE(status.ok());
  std::byte& byte = trainers_[1]->Weights(0)[100];
  byte ^= std::byte{1};
  for (const auto& result : PublishAll()) {
    EXPECT_EQ(result.status().code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_THAT(std::string(result.status().message()),
                HasSubstr("rank 1 of 2: v2: tensor \"wide\""));
  }
  byte ^= std::byte{1};
  for (const auto& result : PublishAll()) {
    ASSERT_TRUE(result.ok()) << result.status();
    EXPECT_GT(result->publish.anchor_bytes, 0u);
  }
  // Its range, and a step given up by all.
  for (std::uint32_t rank = 0; rank < kRanks; ++rank) {
    fs_[rank].Reset();
  }
  const auto ended = OnRanks<absl::Status>(kRanks, [&](std::uint32_t rank) {
    EXPECT_TRUE(hooks_[rank]->BeginStep(3, false).ok());
    HookTrainer& trainer = *trainers_[rank];
    trainer.Optimize(0.1);
    auto ranges = trainer.Ranges(false);
    if (rank == 0) ranges.pop_back();
    EXPECT_TRUE(trainer.Write(*hooks_[rank], ranges).ok());
    return hooks_[rank]->EndStep();
  });
  EXPECT_FALSE(ended[0].ok());
  EXPECT_TRUE(ended[1].ok());
  for (const auto& result : PublishAll()) {
    EXPECT_THAT(std::string(result.status().message()),
                HasSubstr("rank 0 of 2: v3: the step has not ended"));
  }
  for (std::uint32_t rank = 0; rank < kRanks; ++rank) {
    trainers_[rank]->PutRight();
  }
  GoOn(4, true);
  GoOn(5, false);
  ExpectClean(temp_.Join("store"));
  // Nothing is left of the attempts that failed.
  const auto staged =
      PosixFileSystem()->List(JoinPath(temp_.Join("store"), ".staging"));
  ASSERT_TRUE(staged.ok());
  EXPECT_THAT(*staged, ::testing::IsEmpty());
}

// Three ranks whose shards end within rows of fp8 blocks. The hook quantises
// none of it: each rank does, as docs/hook.md says, by the amax of whole
// blocks, and gives its part of values and scales as residual tensors.
class StraddlingFp8Test : public ::testing::TestWithParam<ScaleKind> {
 protected:
  static constexpr std::uint32_t kRanks = 3;
  static constexpr std::uint64_t kCols = 200;
  static constexpr std::uint64_t kBlockCols = 2;
  static constexpr float kFloor = 1e-12f;

  // One rank's part of a weight.
  struct Part {
    std::uint64_t begin = 0;  // elements of the whole
    std::uint64_t end = 0;
    std::uint64_t first_scale = 0;  // of those that this rank publishes
    std::uint64_t last_scale = 0;
    std::uint64_t flat_byte = 0;    // where its bf16 is in the parameter
    DeviceMemory values;            // in device memory
    std::vector<std::byte> scales;  // in host memory
  };
  struct Weight {
    std::string name;
    std::uint64_t rows = 0;
    std::vector<std::uint64_t> cuts;
    std::vector<std::uint16_t> bf16;  // the whole, as the optimizer has it
    std::vector<Part> parts;

    std::uint64_t elements() const { return rows * kCols; }
    std::uint64_t block_rows() const { return (rows + 127) / 128; }
    std::uint64_t blocks() const { return block_rows() * kBlockCols; }
    std::string scales() const { return name + "_scale_inv"; }
  };
  static std::uint64_t BlockOf(std::uint64_t element) {
    return element / kCols / 128 * kBlockCols + element % kCols / 128;
  }

  void Start() {
    // Cut within the first and the second row of blocks; and one whose middle
    // part is 20 elements of one row.
    AddWeight("down", 300, {90 * kCols + 37, 140 * kCols + 111});
    AddWeight("up", 150, {20 * kCols + 150, 20 * kCols + 170});
    group_ = LocalCoordinator::MakeGroup(kRanks, std::chrono::seconds(60));
    for (std::uint32_t rank = 0; rank < kRanks; ++rank) MakeRank(rank);
    const auto made = OnRanks<absl::Status>(kRanks, [&](std::uint32_t rank) {
      Quantise(rank);
      auto hook = OptimizerHook::Create(WriterOf(rank), Init(), HookOf(rank));
      if (hook.ok()) hooks_[rank] = *std::move(hook);
      return hook.status();
    });
    for (const absl::Status& status : made) ASSERT_TRUE(status.ok()) << status;
    history_.push_back(Expected());
  }
  void AddWeight(std::string name, std::uint64_t rows,
                 std::vector<std::uint64_t> cuts) {
    Weight weight;
    weight.name = std::move(name);
    weight.rows = rows;
    weight.cuts = std::move(cuts);
    weight.cuts.insert(weight.cuts.begin(), 0);
    weight.cuts.push_back(weight.elements());
    weight.bf16.resize(weight.elements());
    for (auto& x : weight.bf16) {  // 0.01 to 0.05
      x = static_cast<std::uint16_t>((random_() & 0x8000) |
                                     (0x3c24 + random_() % 0x128));
    }
    weight.parts.resize(kRanks);
    weights_.push_back(std::move(weight));
  }
  void MakeRank(std::uint32_t rank) {
    devices_[rank] = std::make_unique<CpuDevice>(Late());
    trainers_[rank] =
        std::make_unique<HookTrainer>(devices_[rank].get(), 60 + rank);
    HookTrainer& trainer = *trainers_[rank];
    // Beside them a tensor as it is and one that the hook quantises.
    constexpr std::uint64_t kPlain = 400;
    const std::uint64_t own_rows = rank == 1 ? 128 : 0;
    std::uint64_t bytes = kPlain + own_rows * 40 * 2;
    for (Weight& weight : weights_) {
      Part& part = weight.parts[rank];
      part.begin = weight.cuts[rank];
      part.end = weight.cuts[rank + 1];
      // Whoever has a row of blocks' first element publishes its scales.
      const auto first = [](std::uint64_t element) {
        constexpr std::uint64_t kBlockRow = 128 * kCols;
        return (element + kBlockRow - 1) / kBlockRow * kBlockCols;
      };
      part.first_scale = first(part.begin);
      part.last_scale = first(part.end);
      part.flat_byte = bytes;
      bytes += ((part.end - part.begin) * 2 + 7) / 8 * 8;
      part.values =
          *devices_[rank]->Allocate(MemoryKind::kDevice, part.end - part.begin);
      // One more: the rank that publishes none gives an address all the same.
      part.scales.assign((part.last_scale - part.first_scale + 1) * 4,
                         std::byte{0xa5});
    }
    const auto flat = trainer.AddFiniteParameter("flat", bytes);
    trainer.AddTensor(flat, 0, "plain", DType::kBf16, {kRanks, kPlain / 2});
    trainer.tensors().back().shard =
        ElementRange{rank * kPlain / 2, (rank + 1) * kPlain / 2};
    if (own_rows > 0) {
      trainer.AddQuantised(flat, kPlain, "whole_blocks", {own_rows, 40},
                           GetParam());
    }
    PutWeights(rank);
    for (const Weight& weight : weights_) {
      const Part& part = weight.parts[rank];
      std::memcpy(trainer.Weights(flat) + part.flat_byte,
                  trainer.Next(flat) + part.flat_byte,
                  (part.end - part.begin) * 2);
    }
  }
  WriterOptions WriterOf(std::uint32_t rank) {
    WriterOptions options = Writer(temp_);
    options.coordinator = group_[rank].get();
    options.fs = &fs_[rank];
    return options;
  }
  HookOptions HookOf(std::uint32_t rank) {
    HookOptions options = trainers_[rank]->Options();
    for (Weight& weight : weights_) {
      Part& part = weight.parts[rank];
      TrainerTensor values;
      values.name = weight.name;
      values.dtype = DType::kF8E4M3;
      values.shape = {weight.rows, kCols};
      values.data = part.values.data();
      values.shard = ElementRange{part.begin, part.end};
      options.residual.push_back(std::move(values));
      TrainerTensor scales;
      scales.name = weight.scales();
      scales.dtype = DType::kF32;
      scales.shape = {weight.block_rows(), kBlockCols};
      scales.data = part.scales.data();
      scales.shard = ElementRange{part.first_scale, part.last_scale};
      options.residual.push_back(std::move(scales));
    }
    return options;
  }

  // What the optimizer of a rank makes of its part.
  void PutWeights(std::uint32_t rank) {
    for (const Weight& weight : weights_) {
      const Part& part = weight.parts[rank];
      std::memcpy(trainers_[rank]->Next(0) + part.flat_byte,
                  weight.bf16.data() + part.begin, (part.end - part.begin) * 2);
    }
  }
  // The greatest of every rank's, at every rank: what a trainer's all_reduce
  // does. A round of the hook's Coordinator, between EndStep and Publish.
  std::vector<std::uint16_t> LargestOfAll(std::uint32_t rank,
                                          std::vector<std::uint16_t> own) {
    const auto bytes = std::as_bytes(std::span(own));
    const auto all = group_[rank]->Gather("amax", bytes);
    EXPECT_TRUE(all.ok()) << all.status();
    if (rank == 0 && all.ok()) {
      for (const std::vector<std::byte>& one : *all) {
        for (std::size_t i = 0; i < own.size(); ++i) {
          std::uint16_t other = 0;
          std::memcpy(&other, one.data() + 2 * i, sizeof(other));
          own[i] = std::max(own[i], other);
        }
      }
    }
    const auto largest = group_[rank]->Broadcast("amax", bytes);
    EXPECT_TRUE(largest.ok()) << largest.status();
    if (largest.ok()) {
      std::memcpy(own.data(), largest->data(), largest->size());
    }
    return own;
  }
  // A rank's own parts of values and scales, from its bf16 and all ranks' amax.
  void Quantise(std::uint32_t rank) {
    HookTrainer& trainer = *trainers_[rank];
    for (Weight& weight : weights_) {
      Part& part = weight.parts[rank];
      std::vector<std::uint16_t> x(part.end - part.begin);
      std::memcpy(x.data(), trainer.Next(0) + part.flat_byte, x.size() * 2);
      std::vector<std::uint16_t> amax(weight.blocks());
      for (std::uint64_t i = 0; i < x.size(); ++i) {
        std::uint16_t& largest = amax[BlockOf(part.begin + i)];
        largest = std::max<std::uint16_t>(largest, x[i] & kBf16Magnitude);
      }
      amax = LargestOfAll(rank, std::move(amax));
      std::vector<float> scales;
      for (const std::uint16_t largest : amax) {
        const float as_float = FloatOfBf16(largest);
        scales.push_back(GetParam() == ScaleKind::kExact
                             ? Fp8ExactScale(as_float, kFloor)
                             : Fp8PowerOfTwoScale(as_float, kFloor));
      }
      std::vector<std::uint8_t> values(x.size());
      for (std::uint64_t i = 0; i < x.size(); ++i) {
        values[i] = Fp8OfFloat(
            DivideIeee(FloatOfBf16(x[i]), scales[BlockOf(part.begin + i)]));
      }
      std::memcpy(part.scales.data(), scales.data() + part.first_scale,
                  (part.last_scale - part.first_scale) * 4);
      EXPECT_TRUE(devices_[rank]
                      ->Copy(part.values.data(), values.data(), values.size(),
                             trainer.stream())
                      .ok());
      EXPECT_TRUE(devices_[rank]->WaitForStream(trainer.stream()).ok());
    }
  }

  // The rule of engine/cpu on whole weights, which no rank has.
  ModelBytes Expected() const {
    ModelBytes model;
    for (const auto& trainer : trainers_) {
      for (auto& [name, bytes] : trainer->Expected()) {
        auto& all = model[name];
        all.insert(all.end(), bytes.begin(), bytes.end());
      }
    }
    for (const Weight& weight : weights_) {
      Fp8Form form =
          Fp8FormOf(weight.bf16, weight.rows, kCols, GetParam(), kFloor);
      model[weight.name] = std::move(form.values);
      const auto bytes = std::as_bytes(std::span(form.scales));
      model[weight.scales()].assign(bytes.begin(), bytes.end());
    }
    return model;
  }

  // The bits of weights move by one, about one in thirty.
  void Nudge() {
    for (Weight& weight : weights_) {
      for (std::uint16_t& x : weight.bf16) x ^= random_() % 30 == 0 ? 1 : 0;
    }
  }
  // What all weights are by now, as a step of the hook.
  void Step(std::uint64_t step, bool anchor, bool published = true) {
    SCOPED_TRACE(absl::StrCat("v", step));
    const auto results = OnRanks<absl::Status>(kRanks, [&](std::uint32_t rank) {
      OptimizerHook& hook = *hooks_[rank];
      absl::Status status = hook.BeginStep(step, anchor);
      trainers_[rank]->Optimize(0.02);
      PutWeights(rank);
      status.Update(
          trainers_[rank]->Write(hook, trainers_[rank]->Ranges(false)));
      status.Update(hook.EndStep());
      Quantise(rank);
      if (!published) return status;
      const auto result = hook.Publish();
      status.Update(result.status());
      if (result.ok()) status.Update(result->publish.anchor_status);
      return status;
    });
    for (const absl::Status& status : results) {
      ASSERT_TRUE(status.ok()) << status;
    }
    if (!published) return;
    history_.resize(step + 1);
    history_[step] = Expected();
    ExpectVersion(Path(), step, history_[step]);
  }
  std::string Path() const { return temp_.Join("store"); }
  // Whether a step's delta has a record of a tensor.
  bool Travels(std::uint64_t step, const std::string& tensor) {
    const auto ordinal = hooks_[0]->store_writer().table().Find(tensor);
    EXPECT_TRUE(ordinal.ok()) << ordinal.status();
    for (const auto& [record, bytes] : Records(Path(), step)) {
      if (record.first == *ordinal) return true;
    }
    return false;
  }

  const TempDirectory temp_;
  std::mt19937_64 random_{71};
  FaultFileSystem fs_[kRanks];
  std::unique_ptr<CpuDevice> devices_[kRanks];
  std::unique_ptr<HookTrainer> trainers_[kRanks];
  std::vector<Weight> weights_;  // their memory outlives the hooks
  std::vector<std::unique_ptr<LocalCoordinator>> group_;
  std::unique_ptr<OptimizerHook> hooks_[kRanks];
  std::vector<ModelBytes> history_;  // by step
};

// Sanitizers see the same code with either.
INSTANTIATE_TEST_SUITE_P(
    Scales, StraddlingFp8Test,
    ::testing::ValuesIn(kSanitized
                            ? std::vector<ScaleKind>{ScaleKind::kExact}
                            : std::vector<ScaleKind>{ScaleKind::kExact,
                                                     ScaleKind::kPowerOfTwo}),
    [](const auto& test) {
      return test.param == ScaleKind::kExact ? "Exact" : "PowersOfTwo";
    });

TEST_P(StraddlingFp8Test, TravelsAsResidualTensorsWithItsScales) {
  Start();
  ExpectVersion(Path(), 0, history_[0]);
  // One weight of one rank moves a scale, and the values of other ranks. The
  // second of these steps has an anchor.
  struct Move {
    std::uint32_t rank;
    std::uint64_t offset;  // elements in its part
    std::uint16_t bits;
  };
  const std::vector<Move> moves = {
      {1, 5, 0x3f80}, {2, 7, 0x4080}, {0, 3, 0x4180}};
  std::uint64_t step = 0;
  for (const Move& move : moves) {
    ++step;
    for (Weight& weight : weights_) {
      weight.bf16[weight.cuts[move.rank] + move.offset] = move.bits;
    }
    ASSERT_NO_FATAL_FAILURE(Step(step, /*anchor=*/step == 2));
    for (const Weight& weight : weights_) {
      SCOPED_TRACE(absl::StrCat("v", step, " ", weight.name));
      EXPECT_NE(history_[step].at(weight.scales()),
                history_[step - 1].at(weight.scales()));
      const std::uint64_t block = BlockOf(weight.cuts[move.rank] + move.offset);
      // Somebody else's values of that block.
      std::uint64_t others = 0;
      for (std::uint64_t i = 0; i < weight.elements(); ++i) {
        const bool own =
            i >= weight.cuts[move.rank] && i < weight.cuts[move.rank + 1];
        const bool moved = history_[step].at(weight.name)[i] !=
                           history_[step - 1].at(weight.name)[i];
        if (moved) {
          EXPECT_EQ(BlockOf(i), block) << i;
        }
        others += moved && !own;
      }
      EXPECT_GT(others, 0u);
      EXPECT_TRUE(Travels(step, weight.name));
      EXPECT_TRUE(Travels(step, weight.scales()));
    }
  }
  // They fall back, while all else moves; then values move alone.
  for (const Move& move : moves) {
    for (Weight& weight : weights_) {
      weight.bf16[weight.cuts[move.rank] + move.offset] = 0x3c80;
    }
  }
  Nudge();
  ASSERT_NO_FATAL_FAILURE(Step(4, false));
  for (Weight& weight : weights_) {
    EXPECT_TRUE(Travels(4, weight.name));
    EXPECT_TRUE(Travels(4, weight.scales()));
    weight.bf16[weight.cuts[1] + 2] = 0x3c30;
  }
  ASSERT_NO_FATAL_FAILURE(Step(5, false));
  for (const Weight& weight : weights_) {
    EXPECT_TRUE(Travels(5, weight.name));
    EXPECT_FALSE(Travels(5, weight.scales()));
  }
  // A step given up leaves nothing, and a root is whole.
  weights_[0].bf16[weights_[0].cuts[1] + 5] = 0x4280;
  ASSERT_NO_FATAL_FAILURE(Step(6, false, /*published=*/false));
  Nudge();
  ASSERT_NO_FATAL_FAILURE(Step(7, true));
  Nudge();
  ASSERT_NO_FATAL_FAILURE(Step(8, false));

  for (const std::uint64_t published : {0, 1, 2, 3, 4, 5, 7, 8}) {
    ExpectVersion(Path(), published, history_[published]);
  }
  const FsckReport report = ExpectClean(Path());
  EXPECT_EQ(report.anchors_checked, 3u);
  // A trainer that goes on later has what was published.
  const auto again = OnRanks<absl::Status>(kRanks, [&](std::uint32_t rank) {
    hooks_[rank].reset();
    return OptimizerHook::Open(WriterOf(rank), HookOf(rank)).status();
  });
  for (const absl::Status& status : again) EXPECT_TRUE(status.ok()) << status;
}

}  // namespace
}  // namespace kedge
