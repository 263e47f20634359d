// Goal: the ranks of a group are at one version, bit for bit, or at none, after
// whatever happened to any of them; one retry or one Join makes it one version.
// Method: ranks as threads with an in-process sum, every cut of the model over
// them; failures planted in one rank at a time.

#include <atomic>
#include <cerrno>
#include <cstring>
#include <random>
#include <set>
#include <thread>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kedge/format/fixed_files.h"
#include "kedge/format/hash.h"
#include "kedge/reader/anchor_load.h"
#include "kedge/tests/reader/reader_group.h"

namespace kedge {
namespace {

using std::chrono::milliseconds;
using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::Not;
using ReduceFault = ThreadReducer::Fault;

bool IsOk(const std::vector<absl::Status>& statuses) {
  return ErrorsOf(statuses).empty();
}

// Every rank failed, with this code, and says so.
void ExpectAllFail(const std::vector<absl::Status>& statuses,
                   absl::StatusCode code, const std::string& text) {
  for (std::size_t r = 0; r < statuses.size(); ++r) {
    EXPECT_EQ(statuses[r].code(), code) << "rank " << r << ": " << statuses[r];
    EXPECT_THAT(std::string(statuses[r].message()), HasSubstr(text))
        << "rank " << r;
  }
}

class SplitTest
    : public testing::TestWithParam<std::tuple<Split, std::uint32_t>> {};

// Report 15: two tensor-parallel ranks end at one version.
TEST_P(SplitTest, FollowsRandomStepsAndJoinsAtEveryOne) {
  const auto [split, size] = GetParam();
  const std::uint64_t seed = 100 * size + static_cast<std::uint64_t>(split);
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  std::mt19937_64 random(seed);
  PublishedRun run(seed);
  ReaderGroup group(run, split, size);
  group.reducer().set_plain(size <= 8);
  group.Hold(0);
  ASSERT_EQ(group.TroubleAt(0), "");
  std::uint64_t newest = 0;
  for (int round = 0; round < 5; ++round) {
    const std::uint64_t steps = 1 + random() % 3;
    for (std::uint64_t s = 0; s < steps; ++s) {
      newest += 1 + random() % 2;
      run.Publish(newest, random() % 3 == 0, 0.002);
    }
    group.Reset();
    const auto statuses = group.Update();
    ASSERT_EQ(ErrorsOf(statuses), "");
    ASSERT_EQ(group.TroubleAt(newest), "");
    for (std::uint32_t r = 0; r < size; ++r) {
      EXPECT_EQ(group.result(r).tensors_verified, run.table().size());
      EXPECT_EQ(group.result(r).deltas, steps);
      EXPECT_EQ(group.reducer().calls(r), size == 1 ? 0 : 2);
    }
  }
  group.Reset();
  ASSERT_TRUE(IsOk(group.Update()));
  EXPECT_FALSE(group.result(0).changed);
  EXPECT_EQ(group.reducer().calls(0), size == 1 ? 0 : 1);

  // Late, and in place from another version.
  for (std::uint32_t r = 0; r < size; ++r) {
    group.memory(r).Fill(std::byte{0x33});
  }
  ASSERT_EQ(ErrorsOf(group.Open()), "");
  ASSERT_EQ(ErrorsOf(group.Join()), "");
  ASSERT_EQ(group.TroubleAt(newest), "");
  ASSERT_EQ(ErrorsOf(group.JoinStep(0)), "");
  ASSERT_EQ(group.TroubleAt(0), "");
  ASSERT_EQ(ErrorsOf(group.Update()), "");
  ASSERT_EQ(group.TroubleAt(newest), "");
}

INSTANTIATE_TEST_SUITE_P(All, SplitTest,
                         testing::Combine(testing::ValuesIn(kAllSplits),
                                          testing::Values(1u, 2u, 3u, 4u, 9u)),
                         [](const auto& test) {
                           return SplitName(std::get<0>(test.param)) +
                                  std::to_string(std::get<1>(test.param));
                         });

class GroupTest : public testing::Test {
 protected:
  // One retry where nothing was written, else one Join: all come to the newest
  // version.
  void Converge(ReaderGroup& group, std::uint64_t newest) {
    group.Reset();
    bool joins = false;
    for (std::uint32_t r = 0; r < group.size(); ++r) {
      joins = joins || group.follower(r).state() != FollowerState::kReady;
    }
    const auto statuses = joins ? group.Join() : group.Update();
    ASSERT_EQ(ErrorsOf(statuses), "");
    ASSERT_EQ(group.TroubleAt(newest), "");
  }

  PublishedRun run_;
};

TEST_F(GroupTest, OpenRefusesGroupsThatCannotAgree) {
  EngineMemory memory(run_.table(), Layout::kWhole);
  FollowerOptions options = run_.Options();
  options.group.size = 2;
  EXPECT_TRUE(
      absl::IsInvalidArgument(Follower::Open(options, memory.sets()).status()));
  options.group.rank = 2;
  options.group.reduce = [](std::span<std::uint64_t>) {
    return absl::OkStatus();
  };
  EXPECT_TRUE(
      absl::IsInvalidArgument(Follower::Open(options, memory.sets()).status()));
}

TEST_F(GroupTest, OpenFailsOnEveryRankIfItFailsOnOne) {
  ReaderGroup group(run_, Split::kRows, 3);
  group.faults(1).set_script(
      FaultOn(FileOperation::kOpenForRead, "STORE", Fault::Fail(EACCES)));
  ExpectAllFail(group.Open(), absl::StatusCode::kPermissionDenied,
                "rank 1 (PERMISSION_DENIED)");
  group.Reset();
  EXPECT_EQ(ErrorsOf(group.Open()), "");
}

TEST_F(GroupTest, OpenRefusesTwoProcessesOfOneRankAndUnlikeOptions) {
  ReaderGroup twice(run_, Split::kRows, 3,
                    [](std::uint32_t rank, FollowerOptions* options) {
                      if (rank == 2) options->group.rank = 1;
                    });
  ExpectAllFail(twice.Open(), absl::StatusCode::kFailedPrecondition,
                "2 processes are rank 1");
  ReaderGroup unlike(run_, Split::kRows, 2,
                     [](std::uint32_t rank, FollowerOptions* options) {
                       options->every_version = rank == 1;
                     });
  ExpectAllFail(unlike.Open(), absl::StatusCode::kFailedPrecondition,
                "ranks 0 and 1 do not open alike");
}

// Reports 3, 20: what no rank holds is named, on every rank.
TEST_F(GroupTest, OpenNamesTensorsThatTheGroupDoesNotCover) {
  // Two ranks that are both told to be the first of three.
  const auto parts = PartsOf(run_.table(), Split::kRows, 0, 3);
  EngineMemory memory(run_.table(), parts, "w");
  ThreadReducer reducer(2);
  std::vector<absl::Status> statuses(2);
  std::vector<std::vector<std::string>> unverified(2);
  for (const bool partial : {false, true}) {
    std::vector<std::thread> ranks;
    for (std::uint32_t r = 0; r < 2; ++r) {
      ranks.emplace_back([&, r] {
        FollowerOptions options = run_.Options();
        options.allow_partial = partial;
        options.group.rank = r;
        options.group.size = 2;
        options.group.reduce = reducer.ForRank(r);
        EngineMemory own(run_.table(), parts, "w");
        own.Load(run_.at(0));
        auto follower = Follower::Open(options, own.sets());
        statuses[r] = follower.status();
        if (!follower.ok()) return;
        unverified[r] = (*follower)->unverified_tensors();
        EXPECT_TRUE((*follower)->VerifyHeld(0).ok());
        // Report 6: what cannot be vouched for is never ready.
        EXPECT_EQ((*follower)->state(), FollowerState::kEmpty);
      });
    }
    for (std::thread& rank : ranks) rank.join();
    if (!partial) {
      ExpectAllFail(statuses, absl::StatusCode::kFailedPrecondition,
                    "embed.weight: weight sets hold 3341 of 10280 units");
    }
  }
  EXPECT_EQ(ErrorsOf(statuses), "");
  EXPECT_THAT(unverified[0], testing::Contains("mlp.up.weight"));
  EXPECT_EQ(unverified[0], unverified[1]);
}

TEST_F(GroupTest, VerifyHeldNamesTheTensorAndTheRanksThatShareIt) {
  run_.PublishUpTo(2);
  ReaderGroup group(run_, Split::kRows, 3);
  group.Hold(1);
  EXPECT_EQ(group.TroubleAt(1), "");
  group.memory(1).At("masters", *group.memory(1).SomeElement("masters"))[1] ^=
      std::byte{4};
  group.memory(2).At("steps", 0)[0] ^= std::byte{4};
  ASSERT_EQ(ErrorsOf(group.Open()), "");
  const auto statuses = group.VerifyHeld(1);
  ExpectAllFail(statuses, absl::StatusCode::kDataLoss,
                "tensor masters in ranks 0, 1, 2");
  ExpectAllFail(statuses, absl::StatusCode::kDataLoss,
                "tensor steps in rank 2");
  EXPECT_EQ(group.state(), FollowerState::kEmpty);
  ExpectAllFail(group.OnAll([&](std::uint32_t r) {
    return group.follower(r).VerifyHeld(r == 0 ? 1 : 2);
  }),
                absl::StatusCode::kFailedPrecondition,
                "the ranks do not mean one version");
}

TEST_F(GroupTest, RanksThatMakeDifferentCallsFindOut) {
  run_.PublishUpTo(1);
  ReaderGroup group(run_, Split::kRows, 2);
  group.Hold(0);
  const auto statuses = group.OnAll([&](std::uint32_t r) {
    return r == 0 ? group.follower(r).Update().status()
                  : group.follower(r).Join().status();
  });
  ExpectAllFail(statuses, absl::StatusCode::kFailedPrecondition,
                "rank 0 is in Update, rank 1 in Join");
  EXPECT_EQ(group.TroubleAt(0), "");
  Converge(group, 1);
}

// ------------------------------------------------------------------- the vote

TEST_F(GroupTest, RanksThatSeeDifferentVersionsGoToTheOldestOfThem) {
  run_.PublishUpTo(3);
  for (const std::uint32_t behind : {0u, 1u, 2u}) {
    ReaderGroup group(run_, Split::kRows, 3);
    group.Hold(0);
    // All but one read v3 before the vote; that one looks at HEAD of v2.
    for (std::uint32_t r = 0; r < 3; ++r) {
      if (r != behind) {
        ASSERT_TRUE(group.follower(r).Prefetch().ok());
      }
    }
    std::filesystem::rename(run_.StepPath(3), run_.path() + "/hidden");
    std::filesystem::copy_file(run_.path() + "/HEAD", run_.path() + "/HEAD.3");
    std::filesystem::remove(run_.path() + "/HEAD");
    const auto statuses = group.Update();
    EXPECT_EQ(ErrorsOf(statuses), "");
    EXPECT_EQ(group.TroubleAt(2), "");
    for (std::uint32_t r = 0; r < 3; ++r) {
      EXPECT_EQ(group.reducer().calls(r), 3);
      // Who had read more than that keeps what it needs.
      std::set<std::string> opened;
      for (const Operation& operation : group.faults(r).log()) {
        if (operation.kind == FileOperation::kOpenForRead &&
            operation.path.ends_with(".kds")) {
          EXPECT_TRUE(opened.insert(operation.path).second) << operation.path;
        }
      }
    }
    std::filesystem::rename(run_.path() + "/hidden", run_.StepPath(3));
    std::filesystem::rename(run_.path() + "/HEAD.3", run_.path() + "/HEAD");
    Converge(group, 3);
  }
}

// Reports 50, 51: a client of shared storage that does not see a new name yet.
TEST_F(GroupTest, ARankThatSeesNothingNewerFindsWhatAnotherHasSeen) {
  run_.PublishUpTo(2);
  for (const bool in_time : {true, false}) {
    ReaderGroup group(
        run_, Split::kColumns, 2, [&](std::uint32_t, FollowerOptions* options) {
          options->retry_deadline = milliseconds(in_time ? 20'000 : 20);
        });
    group.Hold(1);
    bool listed = false;
    group.faults(1).set_script([&](const Operation& operation) {
      const bool of_step =
          operation.path.find("step_00000002") != std::string::npos;
      if (of_step && operation.kind == FileOperation::kList) listed = in_time;
      return (of_step && !listed) || operation.path.ends_with("HEAD")
                 ? Fault::Fail(ENOENT)
                 : Fault::None();
    });
    const auto statuses = group.Update();
    for (std::uint32_t r = 0; r < 2; ++r) {
      EXPECT_EQ(group.reducer().calls(r), in_time ? 3 : 2);
    }
    if (in_time) {
      EXPECT_EQ(ErrorsOf(statuses), "");
      EXPECT_EQ(group.TroubleAt(2), "");
      continue;
    }
    ExpectAllFail(statuses, absl::StatusCode::kUnavailable,
                  "rank 1 (UNAVAILABLE)");
    EXPECT_THAT(std::string(statuses[1].message()),
                HasSubstr("another rank goes to v2"));
    EXPECT_EQ(group.TroubleAt(1), "");
    Converge(group, 2);
  }
}

TEST_F(GroupTest, OneRankThatFailsBeforeTheVoteStopsAllAndIsNamed) {
  run_.PublishUpTo(2);
  struct Case {
    const char* what;
    FaultScript script;
  };
  const Case cases[] = {
      {"plan", FaultOn(FileOperation::kOpenForRead, "step_00000002/MANIFEST",
                       Fault::Fail(EIO))},
      {"read",
       [](const Operation& operation) {
         return operation.kind == FileOperation::kRead &&
                        operation.path.ends_with(".kds")
                    ? Fault::Fail(EIO)
                    : Fault::None();
       }},
  };
  for (const Case& planted : cases) {
    for (const std::uint32_t bad : {0u, 2u}) {
      SCOPED_TRACE(testing::Message() << planted.what << " of rank " << bad);
      ReaderGroup group(run_, Split::kRows, 3);
      group.Hold(0);
      group.faults(bad).set_script(planted.script);
      ExpectAllFail(group.Update(), absl::StatusCode::kUnavailable,
                    "rank " + std::to_string(bad) + " (UNAVAILABLE)");
      EXPECT_EQ(group.TroubleAt(0), "");
      for (std::uint32_t r = 0; r < 3; ++r) {
        EXPECT_EQ(group.reducer().calls(r), 1);
      }
      Converge(group, 2);
    }
  }
}

TEST_F(GroupTest, APauseThatFailsOnOneRankResumesTheOthers) {
  run_.PublishUpTo(2);
  std::atomic<bool> busy{true};
  std::atomic<int> paused{0};
  std::atomic<int> commits{0};
  ReaderGroup group(run_, Split::kRows, 3,
                    [&](std::uint32_t rank, FollowerOptions* options) {
                      options->pause = [&, rank]() -> absl::Status {
                        if (rank == 1 && busy) {
                          return absl::UnavailableError("requests in flight");
                        }
                        ++paused;
                        return absl::OkStatus();
                      };
                      options->resume = [&] { --paused; };
                      options->commit = [&](const VersionId&) { ++commits; };
                    });
  group.Hold(0);
  const auto statuses = group.Update();
  ExpectAllFail(statuses, absl::StatusCode::kUnavailable,
                "rank 1 (UNAVAILABLE)");
  EXPECT_THAT(std::string(statuses[1].message()),
              HasSubstr("requests in flight"));
  EXPECT_EQ(paused, 0);
  EXPECT_EQ(commits, 0);
  EXPECT_EQ(group.TroubleAt(0), "");
  busy = false;
  Converge(group, 2);
  EXPECT_EQ(paused, 3);
  EXPECT_EQ(commits, 3);
}

TEST_F(GroupTest, AJoinPausesAllRanksOrChangesNothing) {
  run_.PublishUpTo(3, 2);
  std::atomic<bool> busy{true};
  std::atomic<int> paused{0};
  ReaderGroup group(
      run_, Split::kRows, 3, [&](std::uint32_t rank, FollowerOptions* options) {
        options->pause = [&, rank]() -> absl::Status {
          if (rank == 2 && busy) {
            return absl::UnavailableError("requests in flight");
          }
          ++paused;
          return absl::OkStatus();
        };
        options->resume = [&] { --paused; };
        options->commit = [&](const VersionId&) { EXPECT_EQ(paused, 3); };
      });
  group.Hold(1);
  ExpectAllFail(group.Join(), absl::StatusCode::kUnavailable,
                "rank 2 (UNAVAILABLE) could not prepare a join");
  EXPECT_EQ(paused, 0);
  EXPECT_EQ(group.TroubleAt(1), "");
  busy = false;
  group.Reset();
  ASSERT_EQ(ErrorsOf(group.Join()), "");
  EXPECT_EQ(paused, 3);
  EXPECT_EQ(group.TroubleAt(3), "");
  for (std::uint32_t r = 0; r < 3; ++r) EXPECT_EQ(group.reducer().calls(r), 4);
}

// What a join of a healthy group reads is what is not the target's already.
TEST_F(GroupTest, AJoinReadsOnlyWhatDoesNotVerifyOverAllRanks) {
  run_.PublishUpTo(2, 2);
  ReaderGroup group(run_, Split::kRows, 3);
  group.Hold(2);
  std::byte* const damaged = group.memory(1).At(
      "conv.weight", *group.memory(1).SomeElement("conv.weight"));
  damaged[0] ^= std::byte{1};
  ASSERT_EQ(ErrorsOf(group.Join()), "");
  EXPECT_EQ(group.TroubleAt(2), "");
  std::uint64_t written = 0;
  for (std::uint32_t r = 0; r < 3; ++r)
    written += group.result(r).units_written;
  EXPECT_EQ(written, 6u * 5 * 3 * 3);  // the tensor, once
}

TEST_F(GroupTest, EveryVersionPausesOnAllRanksForEach) {
  run_.PublishUpTo(5, 3);
  std::vector<std::vector<std::uint64_t>> seen(3);
  ReaderGroup group(run_, Split::kRows, 3,
                    [&](std::uint32_t rank, FollowerOptions* options) {
                      options->every_version = true;
                      options->commit = [&, rank](const VersionId& id) {
                        seen[rank].push_back(id.step);
                      };
                    });
  group.Hold(0);
  // Rank 0 knows of no more than v3 when it starts.
  std::filesystem::rename(run_.StepPath(5), run_.path() + "/hidden5");
  std::filesystem::rename(run_.StepPath(4), run_.path() + "/hidden4");
  std::filesystem::rename(run_.path() + "/HEAD", run_.path() + "/hidden");
  ASSERT_TRUE(group.follower(0).Prefetch().ok());
  std::filesystem::rename(run_.path() + "/hidden5", run_.StepPath(5));
  std::filesystem::rename(run_.path() + "/hidden4", run_.StepPath(4));
  std::filesystem::rename(run_.path() + "/hidden", run_.path() + "/HEAD");
  ASSERT_EQ(ErrorsOf(group.Update()), "");
  EXPECT_EQ(group.TroubleAt(5), "");
  EXPECT_THAT(seen, Each(testing::ElementsAre(1, 2, 3, 4, 5)));
  for (std::uint32_t r = 0; r < 3; ++r) EXPECT_EQ(group.reducer().calls(r), 10);
}

TEST_F(GroupTest, WaitForUpdateEndsOnAllRanksWhenRankZeroHasWaitedEnough) {
  ReaderGroup group(run_, Split::kRows, 3);
  group.Hold(0);
  ExpectAllFail(group.OnAll([&](std::uint32_t r) {
    // The others would wait much longer, or not at all.
    return group.follower(r)
        .WaitForUpdate(milliseconds(r == 0   ? 30
                                    : r == 1 ? 600'000
                                             : 0))
        .status();
  }),
                absl::StatusCode::kDeadlineExceeded,
                "a version newer than the held v0");
  std::thread trainer([&] {
    std::this_thread::sleep_for(milliseconds(30));
    run_.Publish(1);
  });
  const auto statuses = group.OnAll([&](std::uint32_t r) {
    return group.follower(r).WaitForUpdate(milliseconds(60'000)).status();
  });
  trainer.join();
  EXPECT_EQ(ErrorsOf(statuses), "");
  EXPECT_EQ(group.TroubleAt(1), "");
}

TEST_F(GroupTest, ASupersededGroupIsSoOnAllRanksAndRejoins) {
  run_.PublishUpTo(5, 2);
  const auto fail_on_rank_two = [](const Operation& operation) {
    return operation.kind == FileOperation::kRead &&
                   operation.path.ends_with(".kds")
               ? Fault::Fail(EIO)
               : Fault::None();
  };
  ReaderGroup group(run_, Split::kReplicas, 4,
                    [](std::uint32_t, FollowerOptions* options) {
                      options->directory_interval = milliseconds(0);
                    });
  group.Hold(5);
  run_.ResumeAt(3, 99);
  run_.Publish(4);
  run_.Publish(6);
  // What rank 1 alone has seen is not said yet.
  ASSERT_TRUE(group.follower(1).Prefetch().ok());
  EXPECT_EQ(group.follower(1).state(), FollowerState::kReady);
  group.faults(2).set_script(fail_on_rank_two);
  ExpectAllFail(group.Update(), absl::StatusCode::kUnavailable,
                "rank 2 (UNAVAILABLE)");
  for (std::uint32_t r = 0; r < 4; ++r) {
    EXPECT_EQ(group.follower(r).state(), FollowerState::kSuperseded);
  }
  group.Reset();
  ASSERT_EQ(ErrorsOf(group.Update()), "");
  EXPECT_EQ(group.TroubleAt(6), "");
  EXPECT_TRUE(group.result(0).joined);
  for (std::uint32_t r = 0; r < 4; ++r) EXPECT_EQ(group.reducer().calls(r), 2);
}

// The one way to be in different states: a reducer that failed for one rank and
// not for the others, after all was written. The next vote finds it.
TEST_F(GroupTest, ARankThatMissedTheLastSumPoisonsAllUntilTheyJoin) {
  run_.PublishUpTo(4, 2);
  ReaderGroup group(run_, Split::kScattered, 3);
  group.Hold(2);
  group.reducer().set_script([](std::uint32_t rank, std::int64_t call) {
    return rank == 1 && call == 2 ? ReduceFault::kLate : ReduceFault::kNone;
  });
  group.Update();
  EXPECT_EQ(group.follower(0).state(), FollowerState::kReady);
  EXPECT_EQ(group.follower(1).state(), FollowerState::kPoisoned);
  group.Reset();
  ExpectAllFail(group.Update(), absl::StatusCode::kFailedPrecondition,
                "half-way on rank 1");
  EXPECT_EQ(group.Trouble(), "");
  EXPECT_EQ(group.state(), FollowerState::kPoisoned);
  Converge(group, 4);
  // All of it verified already: nothing was read or written again.
  for (std::uint32_t r = 0; r < 3; ++r) {
    EXPECT_EQ(group.result(r).units_written, 0u);
    EXPECT_EQ(group.faults(r).bytes_mapped(), 0u);
    EXPECT_THAT(group.faults(r).LogText(), Not(HasSubstr(".kda")));
  }
}

// A process that was restarted: its rank holds nothing, the others still do.
TEST_F(GroupTest, AGroupWithARankThatHoldsNothingIsToldToJoin) {
  run_.PublishUpTo(2);
  ReaderGroup group(run_, Split::kRows, 2);
  ASSERT_EQ(ErrorsOf(group.Open()), "");
  ExpectAllFail(group.Update(), absl::StatusCode::kFailedPrecondition,
                "no version is held by rank 0, rank 1; call Join");
  Converge(group, 2);
}

// Report 26: the table changes; every rank binds the whole group anew.
TEST_F(GroupTest, AnotherTableIsRejoinedWithoutAnotherExchange) {
  run_.PublishUpTo(2, 2);
  ReaderGroup group(run_, Split::kColumns, 3);
  group.Hold(2);
  run_.Train(0.3);
  ASSERT_TRUE(run_.writer().ReplaceTensors(3, run_.Tensors(), {}).ok());
  run_.Remember();
  ASSERT_EQ(ErrorsOf(group.Update()), "");
  EXPECT_EQ(group.TroubleAt(3), "");
  std::vector<TrainerTensor> tensors = run_.Tensors();
  for (TrainerTensor& tensor : tensors) {
    if (tensor.name == "router.bias") tensor.dtype = DType::kI32;
  }
  ASSERT_TRUE(run_.writer().ReplaceTensors(4, tensors, {}).ok());
  ExpectAllFail(group.Update(), absl::StatusCode::kFailedPrecondition,
                "router.bias of w of rank 0: dtype: expected i32, found f32");
  EXPECT_EQ(group.TroubleAt(3), "");
}

// -------------------------------------------------------------- after the vote

// Report 14, 15: one rank fails half-way; all heal in place to one version.
TEST_F(GroupTest, WrongWeightsOnOneRankPoisonAllAndNameTensorAndRank) {
  run_.PublishUpTo(5, 3);
  const auto store = Store::Open(PosixFileSystem(), run_.path());
  struct Case {
    const char* what;
    std::vector<std::string> named;
    std::function<void(EngineMemory&)> sabotage;
  };
  const auto twice = [&](EngineMemory& memory) {
    // As if v4 had been added here before.
    const auto& before = run_.at(3).at("mlp.up.weight");
    const auto& after = run_.at(4).at("mlp.up.weight");
    for (std::uint64_t i = 0; i < before.size() / 2; ++i) {
      std::uint16_t a = 0;
      std::uint16_t b = 0;
      std::memcpy(&a, before.data() + 2 * i, 2);
      std::memcpy(&b, after.data() + 2 * i, 2);
      if (a == b || i / 130 < 50 || i / 130 >= 100) continue;
      std::uint16_t w = 0;
      std::byte* at = memory.At("mlp.up.weight", i);
      std::memcpy(&w, at, 2);
      w = static_cast<std::uint16_t>(w + b - a);
      std::memcpy(at, &w, 2);
    }
  };
  const Case cases[] = {
      {"a delta applied twice", {"mlp.up.weight"}, twice},
      {"a flipped bit",
       {"quantised.weight"},
       [](EngineMemory& memory) {
         memory.At("quantised.weight", *memory.SomeElement("quantised.weight") +
                                           7)[0] ^= std::byte{1};
       }},
      {"two tensors swapped",
       {"mlp.gate.weight", "mlp.up.weight"},
       [](EngineMemory& memory) {
         std::byte* gate = memory.At("mlp.gate.weight",
                                     *memory.SomeElement("mlp.gate.weight"));
         std::byte* up =
             memory.At("mlp.up.weight", *memory.SomeElement("mlp.up.weight"));
         std::swap_ranges(gate, gate + 50 * 130 * 2, up);
       }},
  };
  for (const Case& planted : cases) {
    SCOPED_TRACE(planted.what);
    std::atomic<bool> once{true};
    std::vector<int> commits(3, 0);
    ReaderGroup* all = nullptr;
    ReaderGroup group(run_, Split::kRows, 3,
                      [&](std::uint32_t rank, FollowerOptions* options) {
                        options->pause = [&, rank] {
                          if (rank == 1 && once.exchange(false)) {
                            planted.sabotage(all->memory(1));
                          }
                          return absl::OkStatus();
                        };
                        options->commit = [&, rank](const VersionId&) {
                          ++commits[rank];
                        };
                      });
    all = &group;
    group.Hold(3);
    const auto statuses = group.Update();
    const std::string count = std::to_string(planted.named.size());
    ExpectAllFail(statuses, absl::StatusCode::kDataLoss, count + " tensor");
    for (const std::string& name : planted.named) {
      ExpectAllFail(statuses, absl::StatusCode::kDataLoss,
                    "tensor " + name + " in ranks 0, 1, 2");
    }
    EXPECT_THAT(std::string(statuses[1].message()),
                HasSubstr("rank 1's own part is wrong: " + planted.named[0]));
    EXPECT_THAT(std::string(statuses[0].message()),
                HasSubstr("rank 0's own part is what the deltas make of it"));
    EXPECT_EQ(group.Trouble(), "");
    EXPECT_EQ(group.state(), FollowerState::kPoisoned);
    EXPECT_THAT(commits, Each(0));
    for (std::uint32_t r = 0; r < 3; ++r) {
      EXPECT_EQ(group.reducer().calls(r), 2);
    }
    ExpectAllFail(group.Update(), absl::StatusCode::kFailedPrecondition,
                  "call Join on every rank");
    Converge(group, 5);
    EXPECT_THAT(commits, Each(1));
    // What verified was not written again, on any rank.
    std::uint64_t most = 0;
    for (const std::string& name : planted.named) {
      most += run_.at(5).at(name).size();
    }
    std::uint64_t written = 0;
    for (std::uint32_t r = 0; r < 3; ++r) {
      written += group.result(r).units_written;
    }
    EXPECT_GT(written, 0u);
    EXPECT_LT(written, most + most / 10);  // and their changes
  }
}

// Bytes that change under one rank after they were checked.
TEST_F(GroupTest, ADeltaThatCannotBeAppliedOnOneRankPoisonsAll) {
  if (DefaultTestDevice() != nullptr) {
    GTEST_SKIP() << "what is on a device by then does not change";
  }
  run_.PublishUpTo(2);
  const std::string file = DataFilesOf(run_.StepPath(2)).front();
  const auto size = std::filesystem::file_size(file);
  const auto put = [&](const std::string& bytes) {
    std::FILE* opened = std::fopen(file.c_str(), "r+b");
    ASSERT_NE(opened, nullptr);
    EXPECT_EQ(std::fwrite(bytes.data(), 1, bytes.size(), opened), bytes.size());
    ASSERT_EQ(std::fclose(opened), 0);
  };
  std::string sound(size, '\0');
  std::FILE* opened = std::fopen(file.c_str(), "rb");
  ASSERT_NE(opened, nullptr);
  ASSERT_EQ(std::fread(sound.data(), 1, size, opened), size);
  ASSERT_EQ(std::fclose(opened), 0);

  std::atomic<bool> spoils{true};
  ReaderGroup group(
      run_, Split::kRows, 3, [&](std::uint32_t rank, FollowerOptions* options) {
        if (rank != 1) return;
        options->read_mode = ReadMode::kMap;
        options->pause = [&] {
          if (spoils.exchange(false)) {
            put(sound.substr(0, 64) + std::string(size - 64, '\xff'));
          }
          return absl::OkStatus();
        };
      });
  group.Hold(0);
  // The others have read it by then.
  ASSERT_TRUE(group.follower(0).Prefetch().ok());
  ASSERT_TRUE(group.follower(2).Prefetch().ok());
  const auto statuses = group.Update();
  ExpectAllFail(statuses, absl::StatusCode::kDataLoss,
                "rank 1 (DATA_LOSS) could not apply v2");
  EXPECT_THAT(std::string(statuses[1].message()), HasSubstr(".kds"));
  EXPECT_EQ(group.Trouble(), "");
  EXPECT_EQ(group.state(), FollowerState::kPoisoned);
  for (std::uint32_t r = 0; r < 3; ++r) EXPECT_EQ(group.reducer().calls(r), 2);
  put(sound);
  Converge(group, 2);
}

// Ranks that were led apart (here by a reducer that shows each rank itself in
// place of the other) notice at the next vote and rejoin within it.
TEST_F(GroupTest, RanksThatHoldDifferentVersionsRejoin) {
  run_.PublishUpTo(4, 2);
  std::atomic<bool> apart{false};
  ReaderGroup* all = nullptr;
  ReaderGroup group(
      run_, Split::kReplicas, 2,
      [&](std::uint32_t rank, FollowerOptions* options) {
        options->group.reduce = [&, rank](std::span<std::uint64_t> values) {
          if (!apart) return all->reducer().ForRank(rank)(values);
          // Both hold the whole model: a vote has 16 slots a rank; a sum (from
          // GroupPhase::kMask on) has 3, then residues, of rank 0 first.
          const std::size_t slots = values[1] < 8 ? 16 : 3;
          std::copy_n(values.data() + rank * slots, slots,
                      values.data() + (1 - rank) * slots);
          for (std::size_t i = 2 * slots; i < values.size(); ++i) {
            if (values[i] == 0) values[i] = values[i - 1];
          }
          return absl::OkStatus();
        };
      });
  all = &group;
  group.Hold(2);
  apart = true;
  const auto strayed = group.follower(0).JoinStep(3);
  ASSERT_TRUE(strayed.ok()) << strayed.status();  // rank 0 alone
  apart = false;
  EXPECT_EQ(group.follower(0).held(), run_.id(3));
  EXPECT_EQ(group.follower(1).held(), run_.id(2));
  const auto statuses = group.Update();
  EXPECT_EQ(ErrorsOf(statuses), "");
  EXPECT_EQ(group.TroubleAt(4), "");
  EXPECT_TRUE(group.result(0).joined);
}

TEST_F(GroupTest, AnAnchorThatFailsOnOneRankPoisonsAll) {
  run_.PublishUpTo(3, 2);
  for (const bool held : {false, true}) {
    ReaderGroup group(run_, Split::kRows, 3);
    group.Hold(3);
    if (!held) {
      for (std::uint32_t r = 0; r < 3; ++r) group.memory(r).Fill(std::byte{1});
      ASSERT_EQ(ErrorsOf(group.Open()), "");
      group.Reset();
    } else {
      for (std::uint32_t r = 0; r < 3; ++r) {
        group.memory(r).At("steps", 0)[0] ^= std::byte{1};
      }
    }
    group.faults(2).set_script([](const Operation& operation) {
      return operation.kind == FileOperation::kRead &&
                     operation.path.ends_with(".kda")
                 ? Fault::Fail(EIO)
                 : Fault::None();
    });
    ExpectAllFail(group.Join(), absl::StatusCode::kUnavailable,
                  "rank 2 (UNAVAILABLE)");
    EXPECT_EQ(group.Trouble(), "");
    EXPECT_EQ(group.state(), FollowerState::kPoisoned);
    Converge(group, 3);
  }
}

// An anchor whose hashes are right and whose bytes are not its version's: no
// rank can tell before all have verified. The next join leaves it alone.
TEST_F(GroupTest, AnAnchorThatDoesNotVerifyIsPassedOverByTheNextJoin) {
  run_.PublishUpTo(5, 2);
  const auto store = Store::Open(PosixFileSystem(), run_.path());
  ASSERT_TRUE(store.ok()) << store.status();
  const auto anchor = (*store)->ReadAnchor(run_.id(4));
  ASSERT_TRUE(anchor.ok()) << anchor.status();
  const auto pieces = PiecesOf(**anchor);
  ASSERT_TRUE(pieces.ok());
  AnchorManifest manifest = (*anchor)->manifest;
  const AnchorPiece& piece = pieces->front();
  DataFile& file = manifest.files[piece.file];
  const std::string path = JoinPath((*anchor)->path, DataFileName(file.id));
  FlipByte(path, piece.offset);
  const auto bytes = ReadFileOfSize(*PosixFileSystem(), path, file.bytes);
  ASSERT_TRUE(bytes.ok());
  file.piece_hashes[piece.number] =
      HashPiece(manifest.run, 4, file.id, piece.number,
                std::span(*bytes).subspan(piece.offset, piece.bytes));
  file.hash = HashOfPieces(file.piece_hashes);
  const auto sealed = SerializeAnchorManifest(manifest, *(*anchor)->table);
  ASSERT_TRUE(sealed.ok()) << sealed.status();
  CommitRecord commit;
  commit.run = manifest.run;
  commit.step = 4;
  commit.epoch = manifest.epoch;
  commit.manifest_bytes = static_cast<std::uint32_t>(sealed->size());
  commit.manifest_hash = HashBytes128(*sealed);
  for (const char* name : {"MANIFEST", "COMMIT"}) {
    std::filesystem::remove((*anchor)->path + "/" + name);
  }
  ASSERT_TRUE(
      WriteNewFile(*PosixFileSystem(), (*anchor)->path + "/MANIFEST", *sealed)
          .ok());
  ASSERT_TRUE(WriteNewFile(*PosixFileSystem(), (*anchor)->path + "/COMMIT",
                           SerializeCommit(commit))
                  .ok());

  ReaderGroup group(run_, Split::kRows, 3);
  ASSERT_EQ(ErrorsOf(group.Open()), "");
  ExpectAllFail(
      group.Join(), absl::StatusCode::kDataLoss,
      "1 tensor does not verify: tensor " + run_.table()[piece.tensor].name);
  EXPECT_EQ(group.Trouble(), "");
  EXPECT_EQ(group.state(), FollowerState::kPoisoned);
  Converge(group, 5);
  EXPECT_EQ(group.result(0).deltas, 3u);
}

// A rank passes over an anchor that it alone cannot read.
TEST_F(GroupTest, ARankMayTakeAnOlderAnchorThanTheOthers) {
  run_.PublishUpTo(4, 2);
  ReaderGroup group(run_, Split::kRows, 2);
  for (std::uint32_t r = 0; r < 2; ++r) group.memory(r).Fill(std::byte{1});
  ASSERT_EQ(ErrorsOf(group.Open()), "");
  group.faults(1).set_script([](const Operation& operation) {
    return operation.kind == FileOperation::kRead &&
                   operation.path.find("step_00000004/anchor/anchor-") !=
                       std::string::npos
               ? Fault::Fail(EIO)
               : Fault::None();
  });
  ASSERT_EQ(ErrorsOf(group.Join()), "");
  EXPECT_EQ(group.TroubleAt(4), "");
  EXPECT_EQ(group.result(0).deltas, 0u);
  EXPECT_EQ(group.result(1).deltas, 2u);
}

// ---------------------------------------------------------------- the reducer

TEST_F(GroupTest, AReducerThatFailsAnywhereLeavesOneVersionOrNone) {
  run_.PublishUpTo(4, 2);
  for (const bool joins : {false, true}) {
    for (const ReduceFault fault : {ReduceFault::kAbort, ReduceFault::kLate}) {
      for (std::uint32_t bad = 0; bad < 3; ++bad) {
        for (std::int64_t call = 1; call <= (joins ? 4 : 2); ++call) {
          SCOPED_TRACE(testing::Message()
                       << (joins ? "join" : "update") << ", rank " << bad
                       << ", call " << call << ", late "
                       << (fault == ReduceFault::kLate));
          ReaderGroup group(run_, Split::kUneven, 3);
          group.Hold(3);
          group.reducer().set_script([&](std::uint32_t rank,
                                         std::int64_t number) {
            return rank == bad && number == call ? fault : ReduceFault::kNone;
          });
          const auto statuses = joins ? group.Join() : group.Update();
          EXPECT_FALSE(statuses[bad].ok());
          if (fault == ReduceFault::kAbort) {
            // All learned of it: all are alike.
            EXPECT_EQ(group.Trouble(), "");
            EXPECT_THAT(std::string(statuses[(bad + 1) % 3].message()),
                        HasSubstr("the reducer failed"));
            EXPECT_EQ(group.state(), call == (joins ? 4 : 2)
                                         ? FollowerState::kPoisoned
                                         : FollowerState::kReady);
          }
          Converge(group, 4);
        }
      }
    }
  }
}

TEST_F(GroupTest, ARankThatDoesNotComeIsWaitedForUntilTheDeadline) {
  run_.PublishUpTo(2);
  ReaderGroup group(run_, Split::kRows, 2, nullptr, milliseconds(500));
  group.Hold(0);
  const auto statuses = group.OnAll([&](std::uint32_t r) {
    return r == 0 ? group.follower(0).Update().status() : absl::OkStatus();
  });
  EXPECT_TRUE(absl::IsUnavailable(statuses[0])) << statuses[0];
  EXPECT_THAT(std::string(statuses[0].message()),
              HasSubstr("group tp: rank 0 of 2: the reducer failed: waited"));
  EXPECT_EQ(group.TroubleAt(0), "");
  Converge(group, 2);
}

// --------------------------------------------------------- every single fault

struct FaultCase {
  const char* name;
  bool joins;
  bool poisoned;  // before the call
  Fault fault;
};

class GroupFaultTest : public testing::TestWithParam<FaultCase> {};

TEST_P(GroupFaultTest, WhateverFailsOnOneRankTheGroupIsOfOneVersionOrOfNone) {
  const FaultCase& planted = GetParam();
  PublishedRun run;
  run.PublishUpTo(4, 2);
  ReaderGroup group(run, Split::kRows, 2);
  const auto prepare = [&] {
    group.Hold(3);
    if (!planted.poisoned) return;
    group.memory(1).At("mask", 8)[0] ^= std::byte{1};
    EXPECT_FALSE(IsOk(group.Update()));
    EXPECT_EQ(group.state(), FollowerState::kPoisoned);
    group.Reset();
  };
  const auto act = [&] {
    return planted.joins ? group.Join() : group.Update();
  };
  prepare();
  ASSERT_EQ(ErrorsOf(act()), "");
  const std::int64_t count = group.faults(1).operation_count();
  ASSERT_GT(count, 10);
  int failures = 0;
  for (std::int64_t k = 1; k <= count; ++k) {
    prepare();
    group.faults(1).set_script(FaultAt(k, planted.fault));
    const auto statuses = act();
    SCOPED_TRACE(group.faults(1).LogText());
    ASSERT_EQ(group.Trouble(), "") << ErrorsOf(statuses);
    EXPECT_EQ(statuses[0].ok(), statuses[1].ok()) << ErrorsOf(statuses);
    failures += statuses[0].ok() ? 0 : 1;
    group.Reset();
    const auto retried =
        group.state() == FollowerState::kPoisoned ? group.Join() : act();
    ASSERT_EQ(ErrorsOf(retried), "");
    ASSERT_EQ(group.TroubleAt(4), "");
  }
  EXPECT_GT(failures, 0);
}

INSTANTIATE_TEST_SUITE_P(
    Faults, GroupFaultTest,
    testing::Values(FaultCase{"UpdateEio", false, false, Fault::Fail(EIO)},
                    FaultCase{"UpdateDropped", false, false, Fault::Drop()},
                    FaultCase{"JoinEio", true, false, Fault::Fail(EIO)},
                    FaultCase{"HealEnoent", true, true, Fault::Fail(ENOENT)},
                    FaultCase{"HealDropped", true, true, Fault::Drop()}),
    [](const auto& test) { return test.param.name; });

}  // namespace
}  // namespace kedge
