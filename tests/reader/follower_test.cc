// Goal: a follower's memory holds the trainer's bytes at the version it claims,
// bit for bit, whatever the layout and however it got there; callbacks and
// states tell the truth.
// Method: stores made by the real writer, compared with the trainer's bytes.

#include "kedge/reader/follower.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <thread>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kedge/tests/reader/published_run.h"

namespace kedge {
namespace {

using std::chrono::milliseconds;
using ::testing::HasSubstr;

class LayoutTest : public testing::TestWithParam<std::tuple<Layout, ReadMode>> {
};

// Report 33: strided views of packed parameters. 15: two tensor-parallel ranks
// end at one version.
TEST_P(LayoutTest, FollowsTwentyStepsAndJoinsAtEveryOne) {
  const auto [layout, mode] = GetParam();
  PublishedRun run(7);
  EngineMemory memory(run.table(), layout);
  memory.Fill(std::byte{0x5a});
  memory.Load(run.at(0));
  const auto follower = run.Open(memory, run.Options(mode));
  ASSERT_NE(follower, nullptr);
  EXPECT_EQ(follower->state(), FollowerState::kEmpty);
  EXPECT_TRUE(follower->unverified_tensors().empty());
  ASSERT_TRUE(follower->VerifyHeld(0).ok());
  EXPECT_EQ(follower->state(), FollowerState::kReady);
  for (std::uint64_t step = 1; step <= 20; ++step) {
    run.Publish(step, step % 6 == 0);
    const auto result = follower->Update();
    ASSERT_TRUE(result.ok()) << result.status();
    EXPECT_TRUE(result->changed);
    EXPECT_FALSE(result->joined);
    EXPECT_EQ(result->deltas, 1u);
    EXPECT_EQ(result->version, run.id(step));
    EXPECT_EQ(result->tensors_verified, run.table().size());
    EXPECT_GE(result->elements_verified, ElementsOf(run.table()));
    EXPECT_GE(result->bytes_verified, run.table().total_bytes());
    ASSERT_EQ(memory.Difference(run.at(step)), "") << "v" << step;
    EXPECT_EQ(follower->held(), run.id(step));
  }
  for (std::uint64_t step = 0; step <= 20; ++step) {
    memory.Fill(std::byte{0x33});
    const auto joiner = run.Open(memory, run.Options(mode));
    ASSERT_NE(joiner, nullptr);
    const auto result = joiner->JoinStep(step);
    ASSERT_TRUE(result.ok()) << result.status();
    EXPECT_TRUE(result->joined);
    EXPECT_EQ(result->deltas, step % 6);
    ASSERT_EQ(memory.Difference(run.at(step)), "") << "v" << step;
    EXPECT_EQ(joiner->held(), run.id(step));
    EXPECT_EQ(joiner->state(), FollowerState::kReady);
  }
}

INSTANTIATE_TEST_SUITE_P(
    All, LayoutTest,
    testing::Combine(testing::ValuesIn(kAllLayouts),
                     testing::Values(ReadMode::kMap, ReadMode::kRead)),
    [](const auto& test) {
      return LayoutName(std::get<0>(test.param)) +
             (std::get<1>(test.param) == ReadMode::kMap ? "Mapped" : "Read");
    });

class FollowerTest : public testing::Test {
 protected:
  // A follower whose memory holds `step`.
  std::unique_ptr<Follower> Holding(std::uint64_t step,
                                    const FollowerOptions& options) {
    memory_.Load(run_.at(step));
    auto follower = run_.Open(memory_, options);
    if (follower == nullptr) return nullptr;
    const absl::Status held = follower->VerifyHeld(step);
    EXPECT_TRUE(held.ok()) << held;
    return follower;
  }
  std::unique_ptr<Follower> Holding(std::uint64_t step) {
    return Holding(step, run_.Options());
  }

  PublishedRun run_;
  EngineMemory memory_{run_.table(), Layout::kWhole};
};

TEST_F(FollowerTest, ManyDeltasAreAppliedInOnePause) {
  run_.PublishUpTo(7);
  int pauses = 0;
  std::vector<VersionId> commits;
  FollowerOptions options = run_.Options();
  options.pause = [&] {
    ++pauses;
    return absl::OkStatus();
  };
  options.commit = [&](const VersionId& id) { commits.push_back(id); };
  const auto follower = Holding(0, options);
  const auto result = follower->Update();
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->deltas, 7u);
  EXPECT_EQ(pauses, 1);
  // Report 66: the commit callback fires once, after verification.
  EXPECT_EQ(commits, std::vector<VersionId>{run_.id(7)});
  EXPECT_EQ(memory_.Difference(run_.at(7)), "");
}

TEST_F(FollowerTest, EveryVersionPausesAndCommitsForEach) {
  run_.PublishUpTo(7, /*anchor_every=*/3);
  FollowerOptions options = run_.Options();
  options.every_version = true;
  int pauses = 0;
  std::vector<VersionId> commits;
  options.pause = [&] {
    ++pauses;
    return absl::OkStatus();
  };
  options.commit = [&](const VersionId& id) {
    commits.push_back(id);
    EXPECT_EQ(memory_.Difference(run_.at(id.step)), "");
  };
  const auto follower = Holding(0, options);
  const auto next = follower->Prefetch();
  ASSERT_TRUE(next.ok()) << next.status();
  EXPECT_EQ(*next, run_.id(7));
  const auto result = follower->Update();
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->version, run_.id(7));
  EXPECT_EQ(result->deltas, 7u);
  EXPECT_EQ(pauses, 7);
  ASSERT_EQ(commits.size(), 7u);
  for (std::uint64_t s = 1; s <= 7; ++s) EXPECT_EQ(commits[s - 1], run_.id(s));
}

TEST_F(FollowerTest, EveryVersionRefusesToSkipPrunedOnes) {
  run_.PublishUpTo(6, /*anchor_every=*/3);
  FollowerOptions options = run_.Options();
  options.every_version = true;
  const auto follower = Holding(0, options);
  std::filesystem::remove_all(run_.StepPath(2));
  const auto result = follower->Update();
  EXPECT_THAT(std::string(result.status().message()), HasSubstr("Join skips"));
  EXPECT_EQ(follower->held(), run_.id(0));
  // One that may skip goes through the anchor.
  FollowerOptions skipping = run_.Options();
  const auto other = Holding(0, skipping);
  const auto joined = other->Update();
  ASSERT_TRUE(joined.ok()) << joined.status();
  EXPECT_TRUE(joined->joined);
  EXPECT_EQ(memory_.Difference(run_.at(6)), "");
}

// Report 40: an empty update was skipped, and versions diverged.
TEST_F(FollowerTest, AnEmptyDeltaAdvancesTheVersion) {
  run_.Publish(1, false, 0);
  int commits = 0;
  FollowerOptions options = run_.Options();
  options.commit = [&](const VersionId&) { ++commits; };
  const auto follower = Holding(0, options);
  const auto result = follower->Update();
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_TRUE(result->changed);
  EXPECT_EQ(result->nnz, 0u);
  EXPECT_EQ(result->version, run_.id(1));
  EXPECT_EQ(commits, 1);
}

TEST_F(FollowerTest, NothingNewerIsNoChangeAndNoPause) {
  FollowerOptions options = run_.Options();
  options.pause = [] { return absl::InternalError("must not be called"); };
  const auto follower = Holding(0, options);
  const auto result = follower->Update();
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_FALSE(result->changed);
  const auto prefetched = follower->Prefetch();
  ASSERT_TRUE(prefetched.ok());
  EXPECT_FALSE(prefetched->has_value());
}

// Reports 23, 24, 27: sentinels and float compares lose NaNs and signed zeros.
TEST_F(FollowerTest, NanPayloadsAndSignedZerosArriveBitForBit) {
  const auto set16 = [&](std::uint64_t i, std::uint16_t bits) {
    std::memcpy(run_.weights().at("embed.weight").data() + 2 * i, &bits, 2);
  };
  const auto set32 = [&](std::uint64_t i, std::uint32_t bits) {
    std::memcpy(run_.weights().at("router.bias").data() + 4 * i, &bits, 4);
  };
  const std::uint16_t halves[] = {0x7fc1, 0x8000, 0x0000, 0x7f80, 0xff80};
  const std::uint16_t next[] = {0xffc1, 0x0000, 0x8000, 0x7f81, 0x7fff};
  const std::uint32_t words[] = {0x7fc00001, 0x80000000, 0, 0x7f800000};
  const std::uint32_t next_words[] = {0xffc00001, 0, 0x80000000, 0x7f800001};
  for (int i = 0; i < 5; ++i) set16(i, halves[i]);
  for (int i = 0; i < 4; ++i) set32(i, words[i]);
  run_.PublishHere(1);
  for (int i = 0; i < 5; ++i) set16(i, next[i]);
  for (int i = 0; i < 4; ++i) set32(i, next_words[i]);
  run_.PublishHere(2);
  const auto follower = Holding(1);
  const auto result = follower->Update();
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->nnz, 9u);
  EXPECT_EQ(memory_.Difference(run_.at(2)), "");
}

// Report 22: a change of one element went unseen.
TEST_F(FollowerTest, OneUlpInOneElementIsOneChange) {
  for (const char* name : {"norm.weight", "router.bias", "steps", "masters"}) {
    std::byte& byte = run_.weights().at(name).front();
    byte = std::byte(std::to_integer<int>(byte) ^ 1);
  }
  run_.PublishHere(1);
  const auto follower = Holding(0);
  const auto result = follower->Update();
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->nnz, 4u);
  EXPECT_EQ(memory_.Difference(run_.at(1)), "");
}

// Report 34, 35: one record serves both names; an engine without lm_head is
// whole.
TEST_F(FollowerTest, TiedTensorsFollowThroughEitherName) {
  run_.PublishUpTo(2);
  for (const char* without : {"lm_head.weight", "embed.weight"}) {
    EngineMemory memory(run_.table(), Layout::kWhole, {without});
    memory.Load(run_.at(0));
    const auto follower = run_.Open(memory, run_.Options());
    ASSERT_NE(follower, nullptr);
    EXPECT_TRUE(follower->unverified_tensors().empty());
    ASSERT_TRUE(follower->VerifyHeld(0).ok());
    ASSERT_TRUE(follower->Update().ok());
    EXPECT_EQ(memory.Difference(run_.at(2)), "");
    EXPECT_EQ(follower->state(), FollowerState::kReady);
  }
}

// Report 39: tensors without elements need no place and break nothing.
TEST_F(FollowerTest, ZeroSizeTensorsNeedNoTarget) {
  run_.PublishUpTo(2);
  EngineMemory memory(run_.table(), Layout::kWhole, {"empty", "empty.matrix"});
  memory.Load(run_.at(1));
  const auto follower = run_.Open(memory, run_.Options());
  ASSERT_TRUE(follower->VerifyHeld(1).ok());
  const auto result = follower->Update();
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->tensors_verified, run_.table().size());
}

// Report 3, 20: an engine that lacks a tensor is told so at open.
TEST_F(FollowerTest, OpenNamesTensorsThatNoSetHolds) {
  EngineMemory memory(run_.table(), Layout::kWhole,
                      {"router.bias", "norm.weight"});
  const auto follower = Follower::Open(run_.Options(), memory.sets());
  EXPECT_TRUE(absl::IsFailedPrecondition(follower.status()));
  const std::string text(follower.status().message());
  EXPECT_THAT(text, HasSubstr("router.bias: no weight set holds it"));
  EXPECT_THAT(text, HasSubstr("norm.weight: no weight set holds it"));
}

// Report 6: an engine that cannot vouch for its weights must not say ready.
TEST_F(FollowerTest, APartialFollowerUpdatesWhatItHasAndIsNeverReady) {
  run_.PublishUpTo(3);
  EngineMemory memory(run_.table(), Layout::kWhole, {"mlp.up.weight"});
  memory.Load(run_.at(0));
  FollowerOptions options = run_.Options();
  options.allow_partial = true;
  const auto follower = run_.Open(memory, options);
  EXPECT_THAT(follower->unverified_tensors(),
              testing::ElementsAre("mlp.up.weight"));
  ASSERT_TRUE(follower->VerifyHeld(0).ok());
  EXPECT_EQ(follower->state(), FollowerState::kEmpty);
  const auto result = follower->Update();
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->tensors_verified, run_.table().size() - 1);
  EXPECT_EQ(follower->held(), run_.id(3));
  EXPECT_EQ(follower->state(), FollowerState::kEmpty);
  EXPECT_EQ(memory.Difference(run_.at(3)), "");
}

// Report 5: traffic before the first verified version.
TEST_F(FollowerTest, NothingIsReadyBeforeItIsVerified) {
  run_.PublishUpTo(2, 2);
  memory_.Fill(std::byte{0});
  FollowerOptions options = run_.Options();
  Follower* seen = nullptr;
  options.commit = [&](const VersionId&) {
    EXPECT_EQ(seen->state(), FollowerState::kUpdating);
    EXPECT_FALSE(seen->held().has_value());
  };
  const auto follower = run_.Open(memory_, options);
  seen = follower.get();
  EXPECT_TRUE(absl::IsFailedPrecondition(follower->Update().status()));
  EXPECT_TRUE(absl::IsFailedPrecondition(follower->Prefetch().status()));
  EXPECT_EQ(follower->state(), FollowerState::kEmpty);
  ASSERT_TRUE(follower->Join().ok());
  EXPECT_EQ(follower->state(), FollowerState::kReady);
}

// Report 8, 4: weights of another version, or of another model of equal shapes.
TEST_F(FollowerTest, VerifyHeldNamesTensorsThatAreNotTheVersions) {
  run_.PublishUpTo(2);
  memory_.Load(run_.at(1));
  memory_.At("masters", 7)[3] ^= std::byte{1};
  const auto follower = run_.Open(memory_, run_.Options());
  const absl::Status wrong = follower->VerifyHeld(1);
  EXPECT_TRUE(absl::IsDataLoss(wrong));
  EXPECT_THAT(std::string(wrong.message()), HasSubstr("1 tensor does not"));
  EXPECT_THAT(std::string(wrong.message()), HasSubstr("tensor masters in tp0"));
  EXPECT_EQ(follower->state(), FollowerState::kEmpty);
  EXPECT_TRUE(absl::IsDataLoss(follower->VerifyHeld(2)));
  EXPECT_TRUE(absl::IsNotFound(follower->VerifyHeld(9)));
  memory_.At("masters", 7)[3] ^= std::byte{1};
  EXPECT_TRUE(follower->VerifyHeld(1).ok());
}

TEST_F(FollowerTest, APauseThatFailsChangesNothingAndCanBeRepeated) {
  run_.PublishUpTo(2);
  bool busy = true;
  FollowerOptions options = run_.Options();
  options.pause = [&] {
    return busy ? absl::UnavailableError("requests in flight")
                : absl::OkStatus();
  };
  options.commit = [&](const VersionId&) { EXPECT_FALSE(busy); };
  const auto follower = Holding(0, options);
  EXPECT_TRUE(absl::IsUnavailable(follower->Update().status()));
  EXPECT_EQ(follower->state(), FollowerState::kReady);
  EXPECT_EQ(follower->held(), run_.id(0));
  EXPECT_EQ(memory_.Difference(run_.at(0)), "");
  busy = false;
  ASSERT_TRUE(follower->Update().ok());
  EXPECT_EQ(memory_.Difference(run_.at(2)), "");
}

TEST_F(FollowerTest, AJoinWhosePauseFailsLeavesNoPlanBehind) {
  run_.PublishUpTo(3);
  bool busy = true;
  FollowerOptions options = run_.Options();
  options.pause = [&] {
    return busy ? absl::UnavailableError("busy") : absl::OkStatus();
  };
  const auto follower = Holding(2, options);
  EXPECT_TRUE(absl::IsUnavailable(follower->JoinStep(1).status()));
  EXPECT_EQ(follower->held(), run_.id(2));
  busy = false;
  const auto result = follower->Update();
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->version, run_.id(3));
  EXPECT_FALSE(result->joined);
}

TEST_F(FollowerTest, PrefetchReadsEverythingAndUpdateNothing) {
  run_.PublishUpTo(4);
  const auto follower = Holding(0);
  const auto next = follower->Prefetch();
  ASSERT_TRUE(next.ok()) << next.status();
  EXPECT_EQ(*next, run_.id(4));
  EXPECT_EQ(memory_.Difference(run_.at(0)), "");
  // What was fetched is applied even if its files are gone by then.
  for (std::uint64_t s = 1; s <= 4; ++s) {
    std::filesystem::remove_all(run_.StepPath(s));
  }
  const auto result = follower->Update();
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(memory_.Difference(run_.at(4)), "");
}

// Report 61: every wait has a deadline and says what it waits for.
TEST_F(FollowerTest, WaitForUpdateEndsAtItsDeadlineAndSaysWhatItWaitedFor) {
  const auto follower = Holding(0);
  const auto result = follower->WaitForUpdate(milliseconds(20));
  EXPECT_TRUE(absl::IsDeadlineExceeded(result.status()));
  EXPECT_THAT(std::string(result.status().message()),
              HasSubstr("a version newer than the held v0"));
}

TEST_F(FollowerTest, WaitForUpdateSeesAStepPublishedMeanwhile) {
  const auto follower = Holding(0);
  std::thread trainer([&] {
    std::this_thread::sleep_for(milliseconds(30));
    run_.Publish(1);
  });
  const auto result = follower->WaitForUpdate(milliseconds(20'000));
  trainer.join();
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->version, run_.id(1));
  EXPECT_EQ(memory_.Difference(run_.at(1)), "");
}

// Report 14, 11: an update that failed half-way is healed in place.
TEST_F(FollowerTest, APoisonedFollowerSaysSoAndJoinHealsInPlace) {
  run_.PublishUpTo(5, 3);
  bool sabotage = true;
  FollowerOptions options = run_.Options();
  options.pause = [&] {
    if (sabotage) memory_.At("mlp.up.weight", 20)[0] ^= std::byte{4};
    return absl::OkStatus();
  };
  int commits = 0;
  options.commit = [&](const VersionId&) { ++commits; };
  const auto follower = Holding(4, options);
  const absl::Status failed = follower->Update().status();
  EXPECT_TRUE(absl::IsDataLoss(failed));
  EXPECT_THAT(std::string(failed.message()), HasSubstr("mlp.up.weight"));
  EXPECT_THAT(std::string(failed.message()), HasSubstr("call Join"));
  EXPECT_EQ(commits, 0);
  EXPECT_EQ(follower->state(), FollowerState::kPoisoned);
  EXPECT_FALSE(follower->held().has_value());
  EXPECT_TRUE(absl::IsFailedPrecondition(follower->Update().status()));
  sabotage = false;
  const auto healed = follower->Join();
  ASSERT_TRUE(healed.ok()) << healed.status();
  EXPECT_EQ(memory_.Difference(run_.at(5)), "");
  EXPECT_EQ(follower->state(), FollowerState::kReady);
  EXPECT_EQ(commits, 1);
  // Only the tensor that was wrong was written again: its elements, and the
  // changes of two deltas.
  EXPECT_LT(healed->units_written,
            2 * run_.at(0).at("mlp.up.weight").size() / 2);
}

// Report 41: the second update starts from what the first one left, for any
// number of deltas at once.
TEST_F(FollowerTest, JoinThenFollowThenJoinAgain) {
  run_.PublishUpTo(4, 2);
  memory_.Fill(std::byte{9});
  const auto follower = run_.Open(memory_, run_.Options());
  ASSERT_TRUE(follower->JoinStep(3).ok());
  EXPECT_EQ(memory_.Difference(run_.at(3)), "");
  run_.PublishUpTo(8, 3);
  ASSERT_TRUE(follower->Update().ok());
  EXPECT_EQ(memory_.Difference(run_.at(8)), "");
  ASSERT_TRUE(follower->JoinStep(5).ok());
  EXPECT_EQ(memory_.Difference(run_.at(5)), "");
  ASSERT_TRUE(follower->Update().ok());
  EXPECT_EQ(memory_.Difference(run_.at(8)), "");
}

// Report 4, 7: the trainer resumes from an earlier step; numbers come again.
TEST_F(FollowerTest, AResumedRunSupersedesAndTheNextUpdateRejoins) {
  run_.PublishUpTo(5, 2);
  FollowerOptions options = run_.Options();
  options.directory_interval = milliseconds(0);
  const auto follower = Holding(5, options);
  const ModelBytes abandoned = run_.at(5);
  run_.ResumeAt(3, 99);
  run_.Publish(4);
  const auto next = follower->Prefetch();
  ASSERT_TRUE(next.ok()) << next.status();
  EXPECT_EQ(*next, run_.id(4));
  // It goes on serving what it holds.
  EXPECT_EQ(follower->state(), FollowerState::kSuperseded);
  EXPECT_EQ(memory_.Difference(abandoned), "");
  const auto result = follower->Update();
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_TRUE(result->joined);
  EXPECT_EQ(result->version, run_.id(4));
  EXPECT_EQ(follower->state(), FollowerState::kReady);
  EXPECT_EQ(memory_.Difference(run_.at(4)), "");
}

TEST_F(FollowerTest, AResumedRunWithTheSameOrHigherStepsSupersedesToo) {
  for (const std::uint64_t newest : {5u, 7u}) {
    PublishedRun run(newest);
    run.PublishUpTo(5, 2);
    EngineMemory memory(run.table(), Layout::kRows);
    memory.Load(run.at(5));
    const auto follower = run.Open(memory, run.Options());
    ASSERT_TRUE(follower->VerifyHeld(5).ok());
    run.ResumeAt(3, 99);
    run.PublishUpTo(newest);
    const auto result = follower->Update();
    ASSERT_TRUE(result.ok()) << result.status();
    EXPECT_TRUE(result->joined);
    EXPECT_EQ(memory.Difference(run.at(newest)), "");
  }
}

TEST_F(FollowerTest, AResumedRunKeepsFollowersOfItsOwnPast) {
  run_.PublishUpTo(5, 2);
  const auto follower = Holding(3);
  run_.ResumeAt(3, 99);
  run_.PublishUpTo(6);
  const auto result = follower->Update();
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_FALSE(result->joined);
  EXPECT_EQ(result->deltas, 3u);
  EXPECT_EQ(memory_.Difference(run_.at(6)), "");
}

// Report 26: a tensor changes its dtype at some version.
TEST_F(FollowerTest, AnotherTableIsRejoinedIfTheSetsStillFitElseNamed) {
  run_.PublishUpTo(2, 2);
  const auto follower = Holding(2);
  // The same tensors without history: a root, entered through its anchor.
  run_.Train(0.3);
  const auto root = run_.writer().ReplaceTensors(3, run_.Tensors(), {});
  ASSERT_TRUE(root.ok()) << root.status();
  run_.Remember();
  const auto result = follower->Update();
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_TRUE(result->joined);
  EXPECT_EQ(memory_.Difference(run_.at(3)), "");

  std::vector<TrainerTensor> tensors = run_.Tensors();
  for (TrainerTensor& tensor : tensors) {
    if (tensor.name == "router.bias") tensor.dtype = DType::kI32;
  }
  ASSERT_TRUE(run_.writer().ReplaceTensors(4, tensors, {}).ok());
  const absl::Status refused = follower->Update().status();
  EXPECT_TRUE(absl::IsFailedPrecondition(refused));
  EXPECT_THAT(std::string(refused.message()),
              HasSubstr("router.bias of tp0: dtype: expected i32, found f32"));
  EXPECT_EQ(follower->held(), run_.id(3));
  EXPECT_EQ(follower->state(), FollowerState::kReady);
  EXPECT_EQ(memory_.Difference(run_.at(3)), "");
}

TEST_F(FollowerTest, EveryVersionGoesThroughARoot) {
  run_.PublishUpTo(2);
  FollowerOptions options = run_.Options();
  options.every_version = true;
  std::vector<std::uint64_t> steps;
  options.commit = [&](const VersionId& id) { steps.push_back(id.step); };
  const auto follower = Holding(1, options);
  run_.Train(0.3);
  ASSERT_TRUE(run_.writer().ReplaceTensors(3, run_.Tensors(), {}).ok());
  run_.Remember();
  run_.PublishUpTo(4);
  const auto result = follower->Update();
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_THAT(steps, testing::ElementsAre(2, 3, 4));
  EXPECT_EQ(memory_.Difference(run_.at(4)), "");
}

TEST_F(FollowerTest, StepsThatSkipNumbersAreOrdinary) {
  run_.Publish(10);
  run_.Publish(25);
  const auto follower = Holding(0);
  const auto result = follower->Update();
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->deltas, 2u);
  EXPECT_EQ(memory_.Difference(run_.at(25)), "");
}

TEST_F(FollowerTest, StateAndHeldMayBeReadDuringAnUpdate) {
  run_.PublishUpTo(5);
  const auto follower = Holding(0);
  std::atomic<bool> done{false};
  std::thread watcher([&] {
    while (!done) {
      const FollowerState state = follower->state();
      const auto held = follower->held();
      if (held.has_value()) {
        EXPECT_TRUE(*held == run_.id(0) || *held == run_.id(5));
      }
      EXPECT_NE(state, FollowerState::kPoisoned);
    }
  });
  EXPECT_TRUE(follower->Update().ok());
  done = true;
  watcher.join();
}

}  // namespace
}  // namespace kedge
