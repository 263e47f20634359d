// Goal: whatever single storage operation fails while a follower updates or
// joins, memory is one whole version or says that it is none, and one retry
// converges; shared file systems that answer late are waited for.
// Method: fail the k-th operation, for every k.

#include <cerrno>
#include <set>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kedge/reader/follower.h"
#include "kedge/tests/reader/published_run.h"
#include "kedge/tests/support/fault_file_system.h"
#include "kedge/tests/support/sanitized.h"

namespace kedge {
namespace {

using std::chrono::milliseconds;
using ::testing::HasSubstr;

struct Case {
  const char* name;
  ReadMode mode;
  Fault fault;
};

class EveryOperationTest : public testing::TestWithParam<Case> {
 protected:
  EveryOperationTest() { run_.PublishUpTo(5, 2); }

  std::unique_ptr<Follower> Open() {
    FollowerOptions options = run_.Options(GetParam().mode);
    options.fs = &faults_;
    // One thread each: the k-th operation is the same in every round.
    options.io_threads = 1;
    options.apply_threads = 1;
    options.commit = [this](const VersionId& id) {
      EXPECT_EQ(memory_.Difference(run_.at(id.step)), "");
    };
    auto follower = Follower::Open(options, memory_.sets());
    EXPECT_TRUE(follower.ok()) << follower.status();
    return follower.ok() ? *std::move(follower) : nullptr;
  }

  // Memory is what the state says.
  void ExpectWhole(const Follower& follower) {
    switch (follower.state()) {
      case FollowerState::kReady:
        ASSERT_TRUE(follower.held().has_value());
        EXPECT_EQ(memory_.Difference(run_.at(follower.held()->step)), "");
        break;
      case FollowerState::kEmpty:
      case FollowerState::kPoisoned:
        EXPECT_FALSE(follower.held().has_value());
        break;
      default:
        ADD_FAILURE() << ToString(follower.state());
    }
  }

  PublishedRun run_;
  EngineMemory memory_{run_.table(), Layout::kRows};
  FaultFileSystem faults_;
};

TEST_P(EveryOperationTest, FollowIsOldOrNewAndOneRetryConverges) {
  const auto prepare = [&] {
    faults_.Reset();
    memory_.Load(run_.at(3));
    auto follower = Open();
    EXPECT_TRUE(follower->VerifyHeld(3).ok());
    faults_.Reset();
    return follower;
  };
  ASSERT_TRUE(prepare()->Update().ok());
  const std::int64_t count = faults_.operation_count();
  ASSERT_GT(count, 10);
  int failures = 0;
  for (std::int64_t k = 1; k <= count; k += kFaultStride) {
    const auto follower = prepare();
    faults_.set_script(FaultAt(k, GetParam().fault));
    const auto result = follower->Update();
    SCOPED_TRACE(faults_.LogText());
    ExpectWhole(*follower);
    // Before the pause everything is checked: no single fault of storage can
    // poison a follower that only needs deltas.
    ASSERT_EQ(follower->state(), FollowerState::kReady) << result.status();
    failures += result.ok() ? 0 : 1;
    faults_.set_script(nullptr);
    const auto retried = follower->Update();
    ASSERT_TRUE(retried.ok()) << retried.status();
    EXPECT_EQ(follower->held(), run_.id(5));
    EXPECT_EQ(memory_.Difference(run_.at(5)), "");
  }
  if (GetParam().fault.kind == Fault::Kind::kShorten) {
    EXPECT_EQ(failures, 0);
  } else {
    EXPECT_GT(failures, 0);
  }
}

TEST_P(EveryOperationTest, JoinIsNothingOrNewAndOneRetryConverges) {
  const auto prepare = [&] {
    faults_.Reset();
    memory_.Fill(std::byte{0x77});
    auto follower = Open();
    faults_.Reset();
    return follower;
  };
  ASSERT_TRUE(prepare()->Join().ok());
  const std::int64_t count = faults_.operation_count();
  ASSERT_GT(count, 10);
  for (std::int64_t k = 1; k <= count; k += kFaultStride) {
    const auto follower = prepare();
    faults_.set_script(FaultAt(k, GetParam().fault));
    const auto result = follower->Join();
    SCOPED_TRACE(faults_.LogText());
    ExpectWhole(*follower);
    EXPECT_EQ(result.ok(), follower->state() == FollowerState::kReady);
    faults_.set_script(nullptr);
    const auto retried = follower->Join();
    ASSERT_TRUE(retried.ok()) << retried.status();
    EXPECT_EQ(follower->held(), run_.id(5));
    EXPECT_EQ(memory_.Difference(run_.at(5)), "");
  }
}

// With time to retry, the update itself gets over a single failure.
class PassingTroubleTest : public EveryOperationTest {};

TEST_P(PassingTroubleTest, FollowGetsOverItWhenGivenTime) {
  std::int64_t count = 1;
  for (std::int64_t k = 0; k <= count; k += kFaultStride) {
    faults_.Reset();
    memory_.Load(run_.at(3));
    FollowerOptions options = run_.Options(GetParam().mode);
    options.fs = &faults_;
    options.io_threads = 1;
    options.apply_threads = 1;
    options.retry_deadline = milliseconds(10'000);
    auto follower = Follower::Open(options, memory_.sets());
    ASSERT_TRUE(follower.ok());
    ASSERT_TRUE((*follower)->VerifyHeld(3).ok());
    faults_.Reset();
    faults_.set_script(FaultAt(k, GetParam().fault));
    const auto result = (*follower)->Update();
    ASSERT_TRUE(result.ok()) << result.status() << "\n" << faults_.LogText();
    EXPECT_EQ(memory_.Difference(run_.at(5)), "");
    if (k == 0) count = faults_.operation_count();
  }
}

INSTANTIATE_TEST_SUITE_P(
    Faults, PassingTroubleTest,
    testing::Values(Case{"ReadEio", ReadMode::kRead, Fault::Fail(EIO)},
                    Case{"MapEstale", ReadMode::kMap, Fault::Fail(ESTALE)}),
    [](const auto& test) { return test.param.name; });

INSTANTIATE_TEST_SUITE_P(
    Faults, EveryOperationTest,
    testing::Values(Case{"ReadEio", ReadMode::kRead, Fault::Fail(EIO)},
                    Case{"ReadEstale", ReadMode::kRead, Fault::Fail(ESTALE)},
                    Case{"ReadEnoent", ReadMode::kRead, Fault::Fail(ENOENT)},
                    Case{"ReadShort", ReadMode::kRead, Fault::Shorten()},
                    Case{"ReadDropped", ReadMode::kRead, Fault::Drop()},
                    Case{"MapEstale", ReadMode::kMap, Fault::Fail(ESTALE)}),
    [](const auto& test) { return test.param.name; });

class SlowStorageTest : public testing::Test {
 protected:
  SlowStorageTest() {
    run_.PublishUpTo(3, 2);
    memory_.Load(run_.at(2));
    options_ = run_.Options();
    options_.fs = &faults_;
    options_.retry_deadline = milliseconds(20'000);
  }
  std::unique_ptr<Follower> Holding() {
    auto follower = run_.Open(memory_, options_);
    EXPECT_TRUE(follower->VerifyHeld(2).ok());
    return follower;
  }

  PublishedRun run_;
  EngineMemory memory_{run_.table(), Layout::kWhole};
  FaultFileSystem faults_;
  FollowerOptions options_;
};

// Reports 50, 51: a name made on another node stays invisible until its
// directory, or the one above, is read.
TEST_F(SlowStorageTest, NamesHiddenUntilTheDirectoryIsReadAreFound) {
  const auto follower = Holding();
  bool listed = false;
  int hidden = 0;
  faults_.set_script([&](const Operation& operation) {
    if (operation.kind == FileOperation::kList &&
        operation.path.find("step_00000003") != std::string::npos) {
      listed = true;
    }
    if (!listed && operation.kind == FileOperation::kOpenForRead &&
        operation.path.find("step_00000003/delta") != std::string::npos) {
      ++hidden;
      return Fault::Fail(ENOENT);
    }
    return Fault::None();
  });
  const auto result = follower->Update();
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_GE(hidden, 1);
  EXPECT_EQ(memory_.Difference(run_.at(3)), "");
}

// Report 53: a replaced HEAD and a replaced part give ESTALE for a while.
TEST_F(SlowStorageTest, EstaleOnOpenSizeAndReadIsRetriedOnAReopenedFile) {
  const auto follower = Holding();
  std::map<FileOperation, int> left = {{FileOperation::kOpenForRead, 3},
                                       {FileOperation::kSize, 3},
                                       {FileOperation::kRead, 3}};
  faults_.set_script([&](const Operation& operation) {
    auto entry = left.find(operation.kind);
    if (entry == left.end() || entry->second == 0) return Fault::None();
    --entry->second;
    return Fault::Fail(ESTALE);
  });
  const auto result = follower->Update();
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(left[FileOperation::kRead], 0);
  EXPECT_EQ(memory_.Difference(run_.at(3)), "");
}

// A stale handle stays stale: only opening the name again helps.
TEST_F(SlowStorageTest, AStaleHandleOfAPartIsReopened) {
  const auto follower = Holding();
  bool stale = true;
  int opened = 0;
  faults_.set_script([&](const Operation& operation) {
    if (operation.path.find(".kds") == std::string::npos) return Fault::None();
    if (operation.kind == FileOperation::kOpenForRead && ++opened > 1) {
      stale = false;
    }
    return operation.kind == FileOperation::kRead && stale ? Fault::Fail(ESTALE)
                                                           : Fault::None();
  });
  const auto result = follower->Update();
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(memory_.Difference(run_.at(3)), "");
}

// Reports 61, 62: no wait without end; the state is left by itself.
TEST_F(SlowStorageTest, StorageThatStaysAwayIsUnavailableAfterTheDeadline) {
  options_.retry_deadline = milliseconds(30);
  const auto follower = Holding();
  faults_.set_script([](const Operation& operation) {
    return operation.path.find(".kds") != std::string::npos &&
                   operation.kind == FileOperation::kRead
               ? Fault::Fail(EIO)
               : Fault::None();
  });
  const absl::Status status = follower->Update().status();
  EXPECT_TRUE(absl::IsUnavailable(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("waited"));
  EXPECT_THAT(std::string(status.message()), HasSubstr("EIO"));
  EXPECT_THAT(std::string(status.message()), HasSubstr("delta-r000-000.kds"));
  EXPECT_EQ(follower->state(), FollowerState::kReady);
  EXPECT_EQ(memory_.Difference(run_.at(2)), "");
}

// Report 15: an anchor that fails half-way through a join leaves no version
// behind, and the next join goes on.
TEST_F(SlowStorageTest, AnAnchorThatDiesHalfWayPoisonsAndJoinGoesOn) {
  options_.retry_deadline = milliseconds(0);
  memory_.Fill(std::byte{2});
  const auto follower = run_.Open(memory_, options_);
  int reads = 0;
  faults_.set_script([&](const Operation& operation) {
    return operation.path.find(".kda") != std::string::npos &&
                   operation.kind == FileOperation::kRead && ++reads > 1
               ? Fault::Fail(EIO)
               : Fault::None();
  });
  EXPECT_TRUE(absl::IsUnavailable(follower->Join().status()));
  EXPECT_EQ(follower->state(), FollowerState::kPoisoned);
  faults_.set_script(nullptr);
  ASSERT_TRUE(follower->Join().ok());
  EXPECT_EQ(memory_.Difference(run_.at(3)), "");
}

// Report 57, 58: bytes are read once, and mapped read-only.
TEST_F(SlowStorageTest, FollowingKDeltasReadsEachByteOnce) {
  run_.PublishUpTo(8, 100);
  for (const ReadMode mode : {ReadMode::kRead, ReadMode::kMap}) {
    options_.read_mode = mode;
    memory_.Load(run_.at(2));
    const auto follower = Holding();
    faults_.Reset();
    const auto result = follower->Update();
    ASSERT_TRUE(result.ok()) << result.status();
    EXPECT_EQ(result->deltas, 6u);
    std::uint64_t data_bytes = 0;
    std::set<std::pair<std::string, std::uint64_t>> seen;
    for (const Operation& operation : faults_.log()) {
      if (operation.path.find(".kds") == std::string::npos) continue;
      if (operation.kind == FileOperation::kRead) {
        EXPECT_TRUE(seen.emplace(operation.path, operation.offset).second);
        data_bytes += operation.bytes;
      }
      if (operation.kind == FileOperation::kMap) {
        EXPECT_TRUE(seen.emplace(operation.path, 0).second);
        data_bytes += operation.bytes;
      }
    }
    std::uint64_t file_bytes = 0;
    for (std::uint64_t step = 3; step <= 8; ++step) {
      for (const std::string& file : DataFilesOf(run_.StepPath(step))) {
        file_bytes += std::filesystem::file_size(file);
      }
    }
    EXPECT_EQ(data_bytes, file_bytes);
    EXPECT_GE(result->bytes_read, file_bytes);
  }
}

TEST_F(SlowStorageTest, AutoMapsLocalFilesAndReadsWhereItCannotTell) {
  options_.read_mode = ReadMode::kAuto;
  ASSERT_TRUE(Holding()->Update().ok());
  EXPECT_GT(faults_.count(FileOperation::kMap), 0);
  faults_.Reset();
  faults_.set_script(FaultOn(FileOperation::kKindOf, "", Fault::Fail(EIO)));
  memory_.Load(run_.at(2));
  ASSERT_TRUE(Holding()->Update().ok());
  EXPECT_EQ(faults_.count(FileOperation::kMap), 0);
  EXPECT_EQ(memory_.Difference(run_.at(3)), "");
}

TEST_F(SlowStorageTest, WhereMappingIsRefusedFilesAreRead) {
  options_.read_mode = ReadMode::kMap;
  const auto follower = Holding();
  faults_.set_script(FaultOn(FileOperation::kMap, "", Fault::Fail(ENODEV)));
  const auto result = follower->Update();
  ASSERT_TRUE(result.ok()) << result.status();
  ASSERT_TRUE(follower->Join().ok());
  EXPECT_EQ(memory_.Difference(run_.at(3)), "");
}

// What no held box needs is not read: neither records nor anchor slices.
TEST_F(SlowStorageTest, OnlyPiecesThatSomeBoxNeedsAreRead) {
  std::vector<std::string> without;
  for (const TensorSpec& spec : run_.table().tensors()) {
    if (spec.name != "steps") without.push_back(spec.name);
  }
  EngineMemory memory(run_.table(), Layout::kWhole, without);
  options_.allow_partial = true;
  const auto follower = run_.Open(memory, options_);
  faults_.Reset();
  const auto result = follower->JoinStep(2);
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(memory.Difference(run_.at(2)), "");
  std::uint64_t anchor_bytes = 0;
  for (const Operation& operation : faults_.log()) {
    if (operation.kind == FileOperation::kRead &&
        operation.path.find(".kda") != std::string::npos) {
      anchor_bytes += operation.bytes;
    }
  }
  EXPECT_EQ(anchor_bytes, 8u);  // one i64
}

}  // namespace
}  // namespace kedge
