// Goal: a follower says in the store what it still needs before it reads it, so
// that gc leaves it alone; where that cannot be said, or gc was faster, it goes
// on all the same and never ends with weights of no version.
// Method: look at leases and at the order of operations; run gc beside
// followers.

#include <atomic>
#include <cerrno>
#include <thread>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kedge/engine/io/lease.h"
#include "kedge/reader/follower.h"
#include "kedge/tests/reader/published_run.h"
#include "kedge/tests/reader/reader_group.h"
#include "kedge/tests/support/fault_file_system.h"
#include "kedge/writer/retention.h"

namespace kedge {
namespace {

using std::chrono::milliseconds;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

class FollowerLeaseTest : public testing::Test {
 protected:
  FollowerLeaseTest() {
    options_ = run_.Options();
    options_.fs = &faults_;
    options_.io_threads = 1;
    options_.lease_id = "engine";
  }
  std::unique_ptr<Follower> Holding(std::uint64_t step) {
    memory_.Load(run_.at(step));
    auto follower = run_.Open(memory_, options_);
    EXPECT_TRUE(follower->VerifyHeld(step).ok());
    return follower;
  }
  std::vector<LeaseEntry> Leases() const {
    const auto store = Store::Open(PosixFileSystem(), run_.path());
    auto listing =
        ReadLeases(*PosixFileSystem(), run_.path(), (*store)->info().run);
    EXPECT_TRUE(listing.ok()) << listing.status();
    for (const LeaseEntry& entry : listing->leases) {
      EXPECT_TRUE(entry.status.ok()) << entry.status;
    }
    return listing->leases;
  }
  LeaseInfo TheLease() const {
    const auto leases = Leases();
    if (leases.size() == 1 && leases[0].info) return *leases[0].info;
    ADD_FAILURE() << leases.size() << " leases";
    return {};
  }
  absl::StatusOr<GcReport> Gc(std::uint32_t keep_anchors) const {
    GcOptions gc;
    gc.store_path = run_.path();
    gc.keep_anchors = keep_anchors;
    gc.grace = std::chrono::seconds(0);
    return CollectGarbage(gc);
  }

  PublishedRun run_;
  EngineMemory memory_{run_.table(), Layout::kWhole};
  FaultFileSystem faults_;
  FollowerOptions options_;
};

TEST_F(FollowerLeaseTest, SaysWhatIsHeldAndGoesWithTheFollower) {
  run_.PublishUpTo(2);
  auto follower = Holding(0);
  EXPECT_EQ(TheLease().reader, "engine");
  EXPECT_EQ(TheLease().held, run_.id(0));
  EXPECT_EQ(TheLease().oldest_step, 0u);
  ASSERT_TRUE(follower->Update().ok());
  EXPECT_EQ(TheLease().held, run_.id(2));
  EXPECT_EQ(TheLease().oldest_step, 2u);
  follower.reset();
  EXPECT_THAT(Leases(), IsEmpty());
}

TEST_F(FollowerLeaseTest, NoNameNoLease) {
  run_.PublishUpTo(2, 2);
  options_.lease_id = "";
  const auto follower = Holding(0);
  ASSERT_TRUE(follower->Update().ok());
  ASSERT_TRUE(follower->Join().ok());
  EXPECT_THAT(faults_.LogText(), testing::Not(HasSubstr("leases")));
}

TEST_F(FollowerLeaseTest, AnIdThatIsNoFileNameIsRefusedAtOpen) {
  for (const char* id : {"a/b", "..", ".x", "a b"}) {
    options_.lease_id = id;
    const auto opened = Follower::Open(options_, memory_.sets());
    EXPECT_TRUE(absl::IsInvalidArgument(opened.status())) << id;
  }
}

// The lease stands before a data file is opened, and what it covers is looked
// for again after that.
TEST_F(FollowerLeaseTest,
       IsWrittenBeforeTheChainIsReadAndTheChainLookedAtAgain) {
  run_.PublishUpTo(4, 2);
  const auto follower = run_.Open(memory_, options_);
  faults_.Reset();
  ASSERT_TRUE(follower->JoinStep(3).ok());
  std::int64_t leased = 0;
  std::int64_t checked = 0;
  std::int64_t opened = 0;
  for (const Operation& operation : faults_.log()) {
    if (operation.kind == FileOperation::kRename && leased == 0 &&
        operation.to.ends_with("leases/engine")) {
      leased = operation.number;
    }
    if (operation.kind == FileOperation::kStat &&
        (operation.path.ends_with("step_00000002/anchor/COMMIT") ||
         operation.path.ends_with("step_00000003/COMMIT"))) {
      EXPECT_GT(leased, 0);
      checked = operation.number;
    }
    if (operation.kind == FileOperation::kOpenForRead && opened == 0 &&
        (operation.path.ends_with(".kds") ||
         operation.path.ends_with(".kda"))) {
      opened = operation.number;
    }
  }
  EXPECT_GT(leased, 0);
  EXPECT_GT(checked, leased);
  EXPECT_GT(opened, checked);
  EXPECT_EQ(TheLease().held, run_.id(3));
  EXPECT_EQ(TheLease().oldest_step, 3u);
}

// gc was at work before it could see the lease: what it moved is missed before
// anything is written.
TEST_F(FollowerLeaseTest, AChainThatGoesBeforeTheLeaseStandsIsNotReadHalf) {
  run_.PublishUpTo(5, 3);
  options_.lease_renewal = milliseconds(0);  // written before every update
  const auto follower = Holding(0);
  bool once = true;
  faults_.Reset();
  faults_.set_after_each([&](const Operation& operation) {
    // Once the plan is made and before the lease is written.
    if (once && operation.path.ends_with("step_00000001/MANIFEST") &&
        operation.kind == FileOperation::kRead) {
      once = false;
      std::filesystem::rename(run_.StepPath(1), run_.path() + "/.trash/1");
    }
  });
  std::filesystem::create_directories(run_.path() + "/.trash");
  const auto result = follower->Update();
  EXPECT_FALSE(once);
  EXPECT_TRUE(absl::IsNotFound(result.status())) << result.status();
  EXPECT_THAT(std::string(result.status().message()), HasSubstr("pruned"));
  EXPECT_EQ(follower->state(), FollowerState::kReady);
  EXPECT_EQ(memory_.Difference(run_.at(0)), "");
  faults_.Reset();
  const auto next = follower->Update();
  ASSERT_TRUE(next.ok()) << next.status();
  EXPECT_TRUE(next->joined);
  EXPECT_EQ(memory_.Difference(run_.at(5)), "");
}

TEST_F(FollowerLeaseTest, IsRenewedWhenItIsOldAndNotBefore) {
  const auto follower = Holding(0);
  const std::uint64_t first = TheLease().counter;
  ASSERT_TRUE(follower->Update().ok());
  ASSERT_TRUE(follower->Prefetch().ok());
  EXPECT_EQ(TheLease().counter, first);
  options_.lease_renewal = milliseconds(0);
  options_.lease_id = "other";
  const auto eager = Holding(0);
  const std::uint64_t second = Leases()[1].info->counter;
  ASSERT_TRUE(eager->Update().ok());
  ASSERT_TRUE(eager->Prefetch().ok());
  EXPECT_TRUE(
      absl::IsDeadlineExceeded(eager->WaitForUpdate(milliseconds(0)).status()));
  EXPECT_EQ(Leases()[1].info->counter, second + 3);
}

// Report: an engine node mounts the store read-only.
TEST_F(FollowerLeaseTest, AReadOnlyMountIsAWarningOnceAndNoError) {
  run_.PublishUpTo(1);
  faults_.set_script([](const Operation& operation) {
    return operation.path.find("leases") != std::string::npos
               ? Fault::Fail(EROFS)
               : Fault::None();
  });
  const auto follower = Holding(0);
  const auto first = follower->Update();
  ASSERT_TRUE(first.ok()) << first.status();
  ASSERT_THAT(first->warnings, SizeIs(1));
  EXPECT_THAT(first->warnings[0], HasSubstr("lease engine"));
  EXPECT_THAT(first->warnings[0], HasSubstr("EROFS"));
  for (std::uint64_t step = 2; step < 5; ++step) {
    run_.Publish(step);
    const auto next = follower->Update();
    ASSERT_TRUE(next.ok()) << next.status();
    EXPECT_THAT(next->warnings, IsEmpty());
  }
  EXPECT_EQ(memory_.Difference(run_.at(4)), "");
}

TEST_F(FollowerLeaseTest, RanksOfAGroupHaveALeaseEach) {
  run_.PublishUpTo(2);
  {
    ReaderGroup group(run_, Split::kRows, 2,
                      [](std::uint32_t, FollowerOptions* options) {
                        options->lease_id = "engine";
                      });
    group.Hold(0);
    ASSERT_EQ(ErrorsOf(group.Update()), "");
    const auto leases = Leases();
    ASSERT_THAT(leases, SizeIs(2));
    for (std::uint32_t r = 0; r < 2; ++r) {
      EXPECT_EQ(leases[r].name, "engine-r" + std::to_string(r));
      EXPECT_EQ(leases[r].info->held, run_.id(2));
    }
  }
  EXPECT_THAT(Leases(), IsEmpty());
}

// Section 7: a lease pins every step that its reader has not passed yet.
TEST_F(FollowerLeaseTest, GcLeavesWhatALeasePinsAndTakesItOnceItIsPassed) {
  options_.every_version = true;
  const auto follower = Holding(0);
  run_.PublishUpTo(9, 3);
  ASSERT_TRUE(Gc(1).ok());
  const auto result = follower->Update();
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->deltas, 9u);
  EXPECT_EQ(memory_.Difference(run_.at(9)), "");
  const auto gone = Gc(1);
  ASSERT_TRUE(gone.ok());
  EXPECT_GE(gone->moved_steps.size(), 8u);
  run_.PublishUpTo(11);
  ASSERT_TRUE(follower->Update().ok());
  EXPECT_EQ(memory_.Difference(run_.at(11)), "");
}

TEST_F(FollowerLeaseTest, WithoutALeaseAPrunedChainIsReplacedByAnAnchor) {
  options_.lease_id = "";
  const auto follower = Holding(0);
  run_.PublishUpTo(9, 3);
  ASSERT_TRUE(Gc(1).ok());
  const auto result = follower->Update();
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_TRUE(result->joined);
  EXPECT_EQ(memory_.Difference(run_.at(9)), "");
}

// gc takes all it may, all the time; followers of every kind and a group go on
// beside it.
TEST_F(FollowerLeaseTest, FollowersSurviveAGcThatNeverRests) {
  EngineMemory passing_memory(run_.table(), Layout::kRows);
  passing_memory.Load(run_.at(0));
  FollowerOptions passing = run_.Options();
  passing.lease_id = "passing";
  passing.every_version = true;
  const auto every = run_.Open(passing_memory, passing);
  ASSERT_TRUE(every->VerifyHeld(0).ok());
  FollowerOptions careless = run_.Options();
  careless.retry_deadline = milliseconds(50);
  memory_.Load(run_.at(0));
  const auto without = run_.Open(memory_, careless);
  ASSERT_TRUE(without->VerifyHeld(0).ok());
  ReaderGroup group(run_, Split::kRows, 2,
                    [](std::uint32_t, FollowerOptions* options) {
                      options->lease_id = "group";
                      options->retry_deadline = milliseconds(2000);
                    });
  group.Hold(0);

  constexpr std::uint64_t kLast = 60;
  std::atomic<bool> done{false};
  std::thread collector([&] {
    while (!done) {
      const auto report = Gc(1);
      EXPECT_TRUE(report.ok()) << report.status();
    }
  });
  std::thread trainer([&] {
    run_.PublishUpTo(kLast, 4);
    done = true;
  });
  std::uint64_t passed = 0;
  std::thread follower_every([&] {
    while (every->held()->step < kLast) {
      const auto result = every->Update();
      ASSERT_TRUE(result.ok()) << result.status();
      EXPECT_FALSE(result->joined);
      passed += result->deltas;
    }
  });
  std::thread follower_without([&] {
    while (!done) {
      const auto result = without->Update();
      // At worst it is told to come again.
      ASSERT_NE(without->state(), FollowerState::kPoisoned) << result.status();
      if (!result.ok()) {
        EXPECT_TRUE(absl::IsNotFound(result.status()) ||
                    absl::IsUnavailable(result.status()) ||
                    absl::IsFailedPrecondition(result.status()))
            << result.status();
      }
    }
  });
  while (!done) {
    const auto statuses = group.Update();
    EXPECT_NE(group.state(), FollowerState::kPoisoned) << ErrorsOf(statuses);
  }
  trainer.join();
  collector.join();
  follower_every.join();
  follower_without.join();
  EXPECT_EQ(passed, kLast);
  EXPECT_EQ(passing_memory.Difference(run_.at(kLast)), "");
  ASSERT_TRUE(without->Update().ok());
  EXPECT_EQ(memory_.Difference(run_.at(kLast)), "");
  ASSERT_EQ(ErrorsOf(group.Update()), "");
  EXPECT_EQ(group.TroubleAt(kLast), "");
}

}  // namespace
}  // namespace kedge
