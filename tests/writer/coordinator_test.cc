// Goal: ranks meet or fail with a message that says who is missing and why;
// nothing that a dead run left behind is taken for an answer. Method: ranks are
// threads; files of dead, damaged and foreign ranks are written by hand.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "kedge/format/control_file.h"
#include "kedge/format/fixed_files.h"
#include "kedge/format/layout.h"
#include "kedge/format/limits.h"
#include "kedge/tests/support/fault_file_system.h"
#include "kedge/tests/support/temp_directory.h"
#include "kedge/tests/writer/rank_world.h"
#include "kedge/writer/file_coordinator.h"
#include "kedge/writer/local_coordinator.h"
#include "kedge/writer/rank_group.h"

namespace kedge {
namespace {

using std::chrono::milliseconds;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

using Opened = absl::StatusOr<std::unique_ptr<FileCoordinator>>;

std::vector<std::byte> BytesOf(absl::string_view text) {
  const auto* data = reinterpret_cast<const std::byte*>(text.data());
  return {data, data + text.size()};
}
std::string TextOf(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

FileCoordinatorOptions Options(const TempDirectory& temp, std::uint32_t rank,
                               std::uint32_t world_size,
                               milliseconds deadline = milliseconds(10000)) {
  FileCoordinatorOptions options;
  options.store_path = temp.Join("store");
  options.rank = rank;
  options.world_size = world_size;
  options.deadline = deadline;
  return options;
}

std::vector<Opened> OpenAll(
    std::uint32_t world_size,
    const std::function<FileCoordinatorOptions(std::uint32_t)>& options) {
  return OnRanks<Opened>(world_size, [&](std::uint32_t rank) {
    return FileCoordinator::Open(options(rank));
  });
}

std::string ControlPath(const TempDirectory& temp, std::uint32_t rank) {
  return temp.Join(absl::StrCat("store/ranks/", ControlFileName(rank)));
}

void WriteFile(const std::string& path, std::span<const std::byte> bytes) {
  FileSystem& fs = *PosixFileSystem();
  ASSERT_TRUE(EnsureDirectory(fs, ParentPath(ParentPath(path))).ok());
  ASSERT_TRUE(EnsureDirectory(fs, ParentPath(path)).ok());
  fs.RemoveFile(path).IgnoreError();
  ASSERT_TRUE(WriteNewFile(fs, path, bytes).ok());
}

// Both implementations keep the same contract.
class CoordinatorTest : public ::testing::TestWithParam<bool> {
 protected:
  std::vector<std::unique_ptr<Coordinator>> Make(std::uint32_t world_size,
                                                 milliseconds deadline) {
    std::vector<std::unique_ptr<Coordinator>> ranks;
    if (GetParam()) {
      temp_ = std::make_unique<TempDirectory>();
      for (Opened& opened : OpenAll(world_size, [&](std::uint32_t rank) {
             return Options(*temp_, rank, world_size, deadline);
           })) {
        EXPECT_TRUE(opened.ok()) << opened.status();
        if (opened.ok()) ranks.push_back(*std::move(opened));
      }
    } else {
      for (auto& rank : LocalCoordinator::MakeGroup(world_size, deadline)) {
        ranks.push_back(std::move(rank));
      }
    }
    return ranks;
  }

  std::unique_ptr<TempDirectory> temp_;
};

TEST_P(CoordinatorTest, EveryRoundGathersAllAndBroadcastsOne) {
  constexpr std::uint32_t kRanks = 5;
  const auto ranks = Make(kRanks, milliseconds(10000));
  ASSERT_EQ(ranks.size(), kRanks);
  const auto results = OnRanks<std::string>(kRanks, [&](std::uint32_t rank) {
    Coordinator& me = *ranks[rank];
    EXPECT_EQ(me.rank(), rank);
    EXPECT_EQ(me.world_size(), kRanks);
    for (int round = 0; round < 40; ++round) {
      const std::string mine(rank * 1000 + round,
                             static_cast<char>('a' + rank));
      auto pieces = me.Gather("pieces", BytesOf(mine));
      if (!pieces.ok()) return pieces.status().ToString();
      if (rank == 0) {
        if (pieces->size() != kRanks) return std::string("count");
        for (std::uint32_t r = 0; r < kRanks; ++r) {
          if (TextOf((*pieces)[r]) !=
              std::string(r * 1000 + round, static_cast<char>('a' + r))) {
            return absl::StrCat("piece of rank ", r, " in round ", round);
          }
        }
      } else if (!pieces->empty()) {
        return std::string("pieces at a rank that is not 0");
      }
      const std::string said = absl::StrCat("round ", round);
      auto heard = me.Broadcast(
          "word", rank == 0 ? BytesOf(said) : std::vector<std::byte>());
      if (!heard.ok()) return heard.status().ToString();
      if (TextOf(*heard) != said) return TextOf(*heard);
    }
    return std::string();
  });
  EXPECT_THAT(results, ::testing::Each(""));
}

TEST_P(CoordinatorTest, MissingRanksAreNamedAndOthersAreTold) {
  const auto ranks = Make(4, milliseconds(1000));
  ASSERT_EQ(ranks.size(), 4u);
  const auto results = OnRanks<std::string>(4, [&](std::uint32_t rank) {
    if (rank == 1 || rank == 3) return std::string();  // dead
    const RankGroup group(ranks[rank].get());
    const auto start = std::chrono::steady_clock::now();
    const Verdict verdict =
        group.Agree("fragments of v7", BytesOf("x"), [](auto) -> Verdict {
          ADD_FAILURE() << "decided without all ranks";
          return {};
        });
    EXPECT_LT(std::chrono::steady_clock::now() - start, milliseconds(9000));
    EXPECT_EQ(verdict.status.code(), absl::StatusCode::kUnavailable);
    return verdict.status.ToString();
  });
  EXPECT_THAT(results[0],
              AllOf(HasSubstr("fragments of v7"), HasSubstr("ranks 1, 3 of 4"),
                    HasSubstr("waited 1000 ms")));
  // Rank 2 hears it from rank 0, or its own time is up a moment before.
  EXPECT_THAT(results[2], ::testing::AnyOf(HasSubstr("ranks 1, 3 of 4"),
                                           HasSubstr("for rank 0")));
}

TEST_P(CoordinatorTest, ADeadRankZeroIsNamed) {
  const auto ranks = Make(2, milliseconds(700));
  ASSERT_EQ(ranks.size(), 2u);
  const RankGroup group(ranks[1].get());
  const Verdict verdict =
      group.Agree("anchor of v3", BytesOf("x"), [](auto) { return Verdict(); });
  EXPECT_EQ(verdict.status.code(), absl::StatusCode::kUnavailable);
  EXPECT_TRUE(verdict.outcome_unknown);
  EXPECT_THAT(verdict.status.ToString(),
              AllOf(HasSubstr("anchor of v3: outcome unknown"),
                    HasSubstr("rank 1 waited 700 ms for rank 0")));
}

// A rank that comes late hears what became of its round, and all go on.
TEST_P(CoordinatorTest, ALateRankIsInStepAgain) {
  const auto ranks = Make(2, milliseconds(1000));
  ASSERT_EQ(ranks.size(), 2u);
  const auto agree = [&](std::uint32_t rank) {
    return RankGroup(ranks[rank].get()).Agree("a step", BytesOf("x"), [](auto) {
      return Verdict{absl::OkStatus(), BytesOf("y")};
    });
  };
  EXPECT_FALSE(agree(0).status.ok());
  const Verdict late = agree(1);
  EXPECT_EQ(late.status.code(), absl::StatusCode::kUnavailable);
  EXPECT_FALSE(late.outcome_unknown);
  EXPECT_THAT(late.status.ToString(), HasSubstr("ranks 1 of 2"));
  for (const Verdict& verdict : OnRanks<Verdict>(2, agree)) {
    EXPECT_TRUE(verdict.status.ok()) << verdict.status;
    EXPECT_EQ(TextOf(verdict.payload), "y");
  }
}

TEST_P(CoordinatorTest, ARankThatWasPassedOverFails) {
  const auto ranks = Make(2, milliseconds(500));
  ASSERT_EQ(ranks.size(), 2u);
  const auto agree = [&](std::uint32_t rank) {
    return RankGroup(ranks[rank].get()).Agree("a step", BytesOf("x"), [](auto) {
      return Verdict();
    });
  };
  agree(0);
  agree(0);
  const Verdict late = agree(1);
  EXPECT_TRUE(late.outcome_unknown);
  EXPECT_THAT(late.status.ToString(),
              AllOf(HasSubstr("round 1"), HasSubstr("round 2")));
}

TEST_P(CoordinatorTest, FailuresOfRanksReachAllWithNumberAndMessage) {
  const auto ranks = Make(3, milliseconds(10000));
  ASSERT_EQ(ranks.size(), 3u);
  bool cleaned = false;
  const auto results = OnRanks<Verdict>(3, [&](std::uint32_t rank) {
    RankGroup::Piece mine = BytesOf("x");
    if (rank == 1) mine = absl::ResourceExhaustedError("disk full");
    if (rank == 2) mine = absl::DataLossError("bad block");
    return RankGroup(ranks[rank].get())
        .Agree(
            "fragments of v2", mine, [](auto) { return Verdict(); },
            [&] { cleaned = true; });
  });
  for (const Verdict& verdict : results) {
    EXPECT_EQ(verdict.status.code(), absl::StatusCode::kResourceExhausted);
    EXPECT_EQ(verdict.status.message(),
              "fragments of v2: rank 1 of 3: disk full; rank 2 of 3: bad "
              "block");
    EXPECT_FALSE(verdict.outcome_unknown);
  }
  EXPECT_TRUE(cleaned);
}

// Report: a rank skipped a collective, and the others waited for ever.
TEST_P(CoordinatorTest, RanksThatMakeDifferentCallsAreNamed) {
  const auto ranks = Make(3, milliseconds(10000));
  ASSERT_EQ(ranks.size(), 3u);
  for (const Verdict& verdict : OnRanks<Verdict>(3, [&](std::uint32_t rank) {
         return RankGroup(ranks[rank].get())
             .Agree(rank == 2 ? "anchor of v1" : "fragments of v2",
                    BytesOf("x"), [](auto) { return Verdict(); });
       })) {
    EXPECT_EQ(verdict.status.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_THAT(verdict.status.ToString(),
                HasSubstr("rank 2 of 3: expected \"fragments of v2\" as at "
                          "rank 0, found \"anchor of v1\""));
  }
}

TEST_P(CoordinatorTest, AnUnknownOutcomeIsToldAndNothingIsCleaned) {
  const auto ranks = Make(2, milliseconds(10000));
  ASSERT_EQ(ranks.size(), 2u);
  for (const Verdict& verdict : OnRanks<Verdict>(2, [&](std::uint32_t rank) {
         return RankGroup(ranks[rank].get())
             .Agree(
                 "a step", BytesOf("x"),
                 [](auto) {
                   return Verdict{absl::UnavailableError("who knows"),
                                  BytesOf("y"), true};
                 },
                 [] { ADD_FAILURE() << "cleaned up"; });
       })) {
    EXPECT_TRUE(verdict.outcome_unknown);
    EXPECT_EQ(verdict.status.message(), "a step, at rank 0: who knows");
    EXPECT_THAT(verdict.payload, IsEmpty());
  }
}

INSTANTIATE_TEST_SUITE_P(Both, CoordinatorTest, ::testing::Bool(),
                         [](const auto& param) {
                           return param.param ? "File" : "Local";
                         });

// ----------------------------------------------------------- control files

TEST(FileCoordinatorTest, FilesOfADeadRunAreNoAnswer) {
  TempDirectory temp;
  // A run of 5 ranks that died: its last files say all there is to say.
  constexpr std::uint64_t kOldSession = 77;
  for (std::uint32_t rank = 0; rank < 5; ++rank) {
    ControlHeader header;
    header.rank = rank;
    header.world_size = 5;
    header.session = kOldSession;
    header.nonce = 1000 + rank;
    header.kind = rank == 0   ? ControlKind::kBroadcast
                  : rank == 3 ? ControlKind::kReady
                              : ControlKind::kGather;
    header.round = rank == 3 ? 0 : 9;
    WriteFile(ControlPath(temp, rank),
              SerializeControlFile(header, BytesOf(rank == 3 ? "" : "old")));
  }
  WriteFile(temp.Join("store/ranks/rank_00001.00000000000003e9"), {});
  WriteFile(temp.Join("store/ranks/rank_00004.00000000000003ec"), {});
  // Ranks come one after another.
  const auto opened = OnRanks<Opened>(3, [&](std::uint32_t rank) {
    std::this_thread::sleep_for(milliseconds(30 * (2 - rank)));
    return FileCoordinator::Open(Options(temp, rank, 3));
  });
  std::vector<std::uint64_t> sessions;
  for (const Opened& one : opened) {
    ASSERT_TRUE(one.ok()) << one.status();
    sessions.push_back((*one)->session());
  }
  EXPECT_EQ(sessions[0], sessions[1]);
  EXPECT_EQ(sessions[0], sessions[2]);
  EXPECT_NE(sessions[0], kOldSession);
  // The larger run's files are gone, and what its ranks were writing.
  EXPECT_THAT(*PosixFileSystem()->List(temp.Join("store/ranks")),
              ::testing::ElementsAre("rank_00000", "rank_00001", "rank_00002"));
}

TEST(FileCoordinatorTest, DamagedFilesOfADeadRunAreReplaced) {
  for (const char* damage : {"", "K", "KDRC", "garbage of some length"}) {
    TempDirectory temp;
    std::string bytes = damage;
    bytes.resize(std::max<std::size_t>(bytes.size(), bytes.empty() ? 0 : 200));
    for (std::uint32_t rank = 0; rank < 2; ++rank) {
      WriteFile(ControlPath(temp, rank), BytesOf(bytes));
    }
    for (const Opened& one : OpenAll(
             2, [&](std::uint32_t rank) { return Options(temp, rank, 2); })) {
      EXPECT_TRUE(one.ok()) << damage << ": " << one.status();
    }
  }
}

TEST(FileCoordinatorTest, AMissingRankIsNamedWithWhatItsFileSays) {
  TempDirectory temp;
  ControlHeader header;
  header.rank = 2;
  header.world_size = 3;
  header.session = 5;
  header.nonce = 6;
  header.kind = ControlKind::kReady;
  WriteFile(ControlPath(temp, 2), SerializeControlFile(header, {}));
  const auto opened = OnRanks<Opened>(2, [&](std::uint32_t rank) {
    return FileCoordinator::Open(Options(temp, rank, 3, milliseconds(1000)));
  });
  EXPECT_EQ(opened[0].status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(opened[0].status().ToString(),
              AllOf(HasSubstr("waited 1000 ms for ranks 2 of 3"),
                    HasSubstr("its control file is of another session")));
  // Rank 1 was welcomed, and finds out in its first round.
  EXPECT_TRUE(opened[1].ok()) << opened[1].status();
}

TEST(FileCoordinatorTest, AMissingRankZeroIsNamed) {
  TempDirectory temp;
  const auto opened =
      FileCoordinator::Open(Options(temp, 1, 2, milliseconds(100)));
  EXPECT_EQ(opened.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(opened.status().ToString(),
              AllOf(HasSubstr("rank 1 waited 100 ms for a welcome by rank 0"),
                    HasSubstr("it has no control file")));
}

TEST(FileCoordinatorTest, AnotherWorldSizeFailsAtOnceOnBothSides) {
  for (const auto& [size0, size1] : {std::pair{2u, 3u}, std::pair{3u, 2u}}) {
    TempDirectory temp;
    const auto start = std::chrono::steady_clock::now();
    const auto opened = OnRanks<Opened>(2, [&, s0 = size0,
                                            s1 = size1](std::uint32_t rank) {
      return FileCoordinator::Open(Options(temp, rank, rank == 0 ? s0 : s1));
    });
    EXPECT_LT(std::chrono::steady_clock::now() - start, milliseconds(9000));
    const std::string expected =
        absl::StrCat("world size: expected ", size1,
                     " as rank 1 was told, found ", size0, " at rank 0");
    EXPECT_EQ(opened[1].status().code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_THAT(opened[1].status().ToString(), HasSubstr(expected));
    EXPECT_EQ(opened[0].status().code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_THAT(opened[0].status().ToString(),
                AllOf(HasSubstr("rank 1 refused"), HasSubstr(expected)));
  }
}

TEST(FileCoordinatorTest, ARankBeyondTheWorldFailsAtOnce) {
  TempDirectory temp;
  const auto opened = OnRanks<Opened>(2, [&](std::uint32_t rank) {
    return FileCoordinator::Open(rank == 0 ? Options(temp, 0, 2)
                                           : Options(temp, 7, 8));
  });
  EXPECT_THAT(opened[0].status().ToString(), HasSubstr("rank 7 refused"));
  EXPECT_THAT(opened[1].status().ToString(),
              HasSubstr("world size: expected 8"));
}

TEST(FileCoordinatorTest, AnotherRunFailsAtOnceAndNamesBoth) {
  TempDirectory temp;
  const auto opened = OnRanks<Opened>(2, [&](std::uint32_t rank) {
    FileCoordinatorOptions options = Options(temp, rank, 2);
    options.run = RunId{{static_cast<std::uint8_t>(0xa0 + rank)}};
    return FileCoordinator::Open(options);
  });
  for (const Opened& one : opened) {
    EXPECT_EQ(one.status().code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_THAT(one.status().ToString(),
                AllOf(HasSubstr("run id"), HasSubstr("a1000000"),
                      HasSubstr("a0000000")));
  }
}

TEST(FileCoordinatorTest, TheRunIsThatOfTheStore) {
  TempDirectory temp;
  StoreInfo info;
  info.run = RandomRunId();
  info.l61_seed = 1;
  WriteFile(temp.Join("store/ranks/x"), {});
  WriteFile(temp.Join("store/STORE"), SerializeStore(info));
  const auto opened = FileCoordinator::Open(Options(temp, 0, 1));
  ASSERT_TRUE(opened.ok()) << opened.status();
  const auto bytes = ReadFile(*PosixFileSystem(), ControlPath(temp, 0), 1000);
  ASSERT_TRUE(bytes.ok());
  EXPECT_EQ(ParseControlFile("", *bytes)->run, info.run);
}

TEST(FileCoordinatorTest, ARestartedRankFailsTheOthersAtOnce) {
  TempDirectory temp;
  auto ranks =
      OpenAll(3, [&](std::uint32_t rank) { return Options(temp, rank, 3); });
  for (const Opened& one : ranks) ASSERT_TRUE(one.ok()) << one.status();
  // Rank 1 dies and is started again: it says hello to a run that goes on.
  const auto start = std::chrono::steady_clock::now();
  const auto results = OnRanks<std::string>(3, [&](std::uint32_t rank) {
    if (rank == 1) {
      return FileCoordinator::Open(Options(temp, 1, 3, milliseconds(500)))
          .status()
          .ToString();
    }
    std::this_thread::sleep_for(milliseconds(100));
    return RankGroup((*ranks[rank]).get())
        .Agree("fragments of v4", BytesOf("x"), [](auto) { return Verdict(); })
        .status.ToString();
  });
  EXPECT_LT(std::chrono::steady_clock::now() - start, milliseconds(9000));
  for (const std::uint32_t rank : {0, 2}) {
    EXPECT_THAT(results[rank], AllOf(HasSubstr("fragments of v4"),
                                     HasSubstr("rank 1 was started again")));
  }
  EXPECT_THAT(results[1], HasSubstr("waited 500 ms for a welcome by rank 0"));
  // All open again, and it works.
  ranks =
      OpenAll(3, [&](std::uint32_t rank) { return Options(temp, rank, 3); });
  for (const Opened& one : ranks) EXPECT_TRUE(one.ok()) << one.status();
}

TEST(FileCoordinatorTest, ARestartedRankZeroFailsTheOthersAtOnce) {
  TempDirectory temp;
  auto ranks =
      OpenAll(2, [&](std::uint32_t rank) { return Options(temp, rank, 2); });
  for (const Opened& one : ranks) ASSERT_TRUE(one.ok()) << one.status();
  const auto results = OnRanks<std::string>(2, [&](std::uint32_t rank) {
    if (rank == 0) {
      return FileCoordinator::Open(Options(temp, 0, 2, milliseconds(500)))
          .status()
          .ToString();
    }
    return RankGroup((*ranks[1]).get())
        .Agree("a step", BytesOf("x"), [](auto) { return Verdict(); })
        .status.ToString();
  });
  EXPECT_THAT(results[1], HasSubstr("rank 0 was started again"));
  EXPECT_THAT(results[0], HasSubstr("for ranks 1 of 2"));
}

TEST(FileCoordinatorTest, ADamagedFileInMidRunIsReportedByName) {
  for (const std::size_t at : {std::size_t{0}, std::size_t{30}, std::size_t{73},
                               kControlHeaderBytes + 1}) {
    TempDirectory temp;
    auto ranks =
        OpenAll(2, [&](std::uint32_t rank) { return Options(temp, rank, 2); });
    for (const Opened& one : ranks) ASSERT_TRUE(one.ok()) << one.status();
    ASSERT_TRUE((*ranks[1])->Gather("a step", BytesOf("abc")).ok());
    auto bytes = ReadFile(*PosixFileSystem(), ControlPath(temp, 1), 1000);
    ASSERT_TRUE(bytes.ok());
    (*bytes)[at] ^= std::byte{4};
    WriteFile(ControlPath(temp, 1), *bytes);
    const auto gathered = (*ranks[0])->Gather("a step", {});
    EXPECT_EQ(gathered.status().code(), absl::StatusCode::kDataLoss) << at;
    EXPECT_THAT(gathered.status().ToString(), HasSubstr("rank_00001")) << at;
  }
}

TEST(FileCoordinatorTest, OptionsOutOfRangeAreRefused) {
  TempDirectory temp;
  for (const auto& [rank, size] :
       {std::pair{0u, 0u}, std::pair{2u, 2u}, std::pair{0u, kMaxRanks + 1}}) {
    EXPECT_EQ(FileCoordinator::Open(Options(temp, rank, size)).status().code(),
              absl::StatusCode::kInvalidArgument);
  }
}

TEST(FileCoordinatorTest, NamesThatDoNotExistAreNeverOpened) {
  TempDirectory temp;
  FaultFileSystem fs(PosixFileSystem(), temp.path());
  std::int64_t missed = 0;
  fs.set_after_each([&](const Operation& operation) {
    if (operation.kind == FileOperation::kOpenForRead &&
        absl::IsNotFound(
            PosixFileSystem()->Stat(temp.Join(operation.path)).status())) {
      ++missed;
    }
  });
  OnRanks<Opened>(2, [&](std::uint32_t rank) {
    if (rank == 0) std::this_thread::sleep_for(milliseconds(100));
    FileCoordinatorOptions options = Options(temp, rank, 2);
    options.fs = &fs;
    return FileCoordinator::Open(options);
  });
  EXPECT_EQ(missed, 0) << fs.LogText();
  EXPECT_GT(fs.count(FileOperation::kList), 3);
}

// A transient failure of the storage is no reason to stop a run.
TEST(FileCoordinatorTest, OneFailedOperationIsOutwaited) {
  for (std::int64_t k = 1; k <= 40; ++k) {
    TempDirectory temp;
    auto opened =
        OpenAll(2, [&](std::uint32_t rank) { return Options(temp, rank, 2); });
    ASSERT_TRUE(opened[0].ok());
    opened.clear();
    FaultFileSystem fs(PosixFileSystem(), temp.path());
    fs.set_script([k](const Operation& operation) {
      // Directories are made before anybody waits for anything.
      return operation.number == k &&
                     operation.kind != FileOperation::kMakeDirectory &&
                     operation.kind != FileOperation::kStat &&
                     operation.number > 3
                 ? Fault::Fail(EIO)
                 : Fault::None();
    });
    const auto results = OnRanks<std::string>(2, [&](std::uint32_t rank) {
      FileCoordinatorOptions options = Options(temp, rank, 2);
      options.run = RunId();  // else the store is looked for, once
      if (rank == 1) options.fs = &fs;
      auto me = FileCoordinator::Open(options);
      if (!me.ok()) return me.status().ToString();
      for (int round = 0; round < 2; ++round) {
        const Verdict verdict = RankGroup(me->get()).Agree(
            "a step", BytesOf("x"), [](auto) { return Verdict(); });
        if (!verdict.status.ok()) return verdict.status.ToString();
      }
      return std::string();
    });
    EXPECT_THAT(results, ::testing::Each(""))
        << k << ": " << fs.log()[k - 1].ToString();
    if (fs.operation_count() < k) break;
  }
}

TEST(ControlFileTest, EveryBitThatChangesIsFound) {
  ControlHeader header;
  header.run = RunId{{1, 2, 3}};
  header.rank = 2;
  header.world_size = 3;
  header.session = 4;
  header.nonce = 5;
  header.round = 6;
  header.kind = ControlKind::kGather;
  const auto good = SerializeControlFile(header, BytesOf("payload"));
  const auto parsed = ParseControlFile("f", good);
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  header.payload_bytes = 7;
  EXPECT_EQ(*parsed, header);
  for (std::size_t bit = 0; bit < good.size() * 8; ++bit) {
    auto bad = good;
    bad[bit / 8] ^= std::byte(1 << (bit % 8));
    EXPECT_EQ(ParseControlFile("f", bad).status().code(),
              absl::StatusCode::kDataLoss)
        << bit;
  }
  for (std::size_t size = 0; size < good.size(); ++size) {
    EXPECT_FALSE(ParseControlFile("f", std::span(good).first(size)).ok());
  }
}

TEST(ControlFileTest, SoundBytesThatBreakARuleAreRefused) {
  const auto expect = [](const std::string& text, ControlHeader header,
                         std::size_t payload = 0) {
    const std::vector<std::byte> bytes(payload);
    const auto parsed =
        ParseControlFile("f", SerializeControlFile(header, bytes));
    EXPECT_EQ(parsed.status().code(), absl::StatusCode::kDataLoss) << text;
    EXPECT_THAT(parsed.status().ToString(), HasSubstr(text));
  };
  ControlHeader hello;
  hello.rank = 1;
  hello.world_size = 2;
  hello.nonce = 9;
  ASSERT_TRUE(ParseControlFile("f", SerializeControlFile(hello, {})).ok());
  const auto with = [&](auto change) {
    ControlHeader header = hello;
    change(header);
    return header;
  };
  expect("world_size", with([](auto& h) { h.world_size = kMaxRanks + 1; }));
  expect("world_size", with([](auto& h) { h.world_size = 0; }));
  expect("rank", with([](auto& h) { h.rank = 2; }));
  expect("nonce", with([](auto& h) { h.nonce = 0; }));
  expect("kind", with([](auto& h) { h.kind = ControlKind{7}; }));
  expect("kind", with([](auto& h) { h.rank = 0; }));
  expect("kind", with([](auto& h) {
           h.kind = ControlKind::kBroadcast;
           h.session = 1;
           h.round = 1;
         }));
  expect("session", with([](auto& h) { h.session = 1; }));
  expect("session", with([](auto& h) { h.kind = ControlKind::kReady; }));
  expect("round", with([](auto& h) { h.round = 1; }));
  expect("payload_bytes: expected at most 0 in a hello", hello, 1);
}

TEST(ControlFileTest, WelcomesOutOfOrderAreRefused) {
  const std::vector<ControlPeer> peers = {{1, 5}, {2, 6}};
  EXPECT_EQ(*ParseWelcome("f", SerializeWelcome(peers)), peers);
  EXPECT_FALSE(ParseWelcome("f", BytesOf("short")).ok());
  for (const std::vector<ControlPeer>& bad :
       {std::vector<ControlPeer>{{2, 5}, {1, 6}},
        std::vector<ControlPeer>{{2, 5}, {2, 6}},
        std::vector<ControlPeer>{{kMaxRanks, 5}},
        std::vector<ControlPeer>{{1, 0}}}) {
    EXPECT_FALSE(ParseWelcome("f", SerializeWelcome(bad)).ok());
  }
}

TEST(ControlFileTest, NamesReadBackAndOthersDoNot) {
  EXPECT_EQ(ControlFileName(3), "rank_00003");
  EXPECT_EQ(ParseControlFileName("rank_00003"), 3u);
  EXPECT_EQ(ControlTemporaryName({3, 0xab}), "rank_00003.00000000000000ab");
  EXPECT_EQ(ParseControlTemporaryName("rank_00003.00000000000000ab")->nonce,
            0xabu);
  for (const char* name :
       {"rank_3", "rank_000003", "rank_0000x", "rank_", "", "RANK_00003",
        "rank_00003.", "rank_00003.00000000000000AB"}) {
    EXPECT_FALSE(ParseControlFileName(name).has_value()) << name;
    EXPECT_FALSE(ParseControlTemporaryName(name).has_value()) << name;
  }
}

}  // namespace
}  // namespace kedge
