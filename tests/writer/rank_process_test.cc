// Goal: ranks are processes, and any of them may be killed at any moment: the
// others fail within their deadline, all start again, the store is sound and
// nothing that a rank was told is lost. Method: three forked processes publish
// through control files; one is killed with SIGKILL at a chosen operation of
// its own on the file system, or after a random time. Several such trainers run
// side by side, each with a store of its own.
//
// The weights of a version follow from its number alone, so that a process that
// is started again has the checkpoint that it needs, and anybody can tell
// whether a store holds the right ones.

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <functional>
#include <iterator>
#include <new>
#include <random>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kedge/engine/io/store.h"
#include "kedge/format/layout.h"
#include "kedge/reader/fsck.h"
#include "kedge/tests/support/fault_file_system.h"
#include "kedge/tests/support/sanitized.h"
#include "kedge/tests/support/temp_directory.h"
#include "kedge/tests/support/test_model.h"
#include "kedge/writer/file_coordinator.h"
#include "kedge/writer/snapshot_writer.h"

namespace kedge {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

constexpr std::uint32_t kRanks = 3;

// ------------------------------------------------------------- the weights

std::uint64_t Mixed(std::uint64_t x) {
  x ^= x >> 31;
  x *= 0x9e3779b97f4a7c15u;
  x ^= x >> 29;
  return x;
}

// Two tensors, of which each step changes a few elements.
struct Weights {
  std::vector<std::uint16_t> matrix = std::vector<std::uint16_t>(150 * 140);
  std::vector<std::uint32_t> vector = std::vector<std::uint32_t>(700);

  explicit Weights(std::uint64_t step) {
    for (std::uint64_t s = 0; s <= step; ++s) MoveTo(s);
  }
  void MoveTo(std::uint64_t step) {
    for (std::size_t i = 0; i < matrix.size(); ++i) {
      const std::uint64_t h = Mixed(i * 1000003 + step);
      if (step == 0 || h % 64 == 0) {
        matrix[i] = static_cast<std::uint16_t>(h >> 20);
      }
    }
    for (std::size_t i = 0; i < vector.size(); ++i) {
      const std::uint64_t h = Mixed(~i * 7919 + step);
      if (step == 0 || h % 8 == 0) vector[i] = static_cast<std::uint32_t>(h);
    }
  }
  std::vector<TrainerTensor> Shards(std::uint32_t rank) const {
    // Uneven, within rows; rank 2 has nothing of the vector.
    constexpr std::uint64_t kMatrix[] = {0, 777, 15001, 150 * 140};
    constexpr std::uint64_t kVector[] = {0, 1, 700, 700};
    std::vector<TrainerTensor> tensors(2);
    tensors[0].name = "matrix";
    tensors[0].shape = {150, 140};
    tensors[0].shard = ElementRange{kMatrix[rank], kMatrix[rank + 1]};
    tensors[0].data = matrix.data() + kMatrix[rank];
    tensors[1].name = "vector";
    tensors[1].dtype = DType::kF32;
    tensors[1].shape = {700};
    tensors[1].shard = ElementRange{kVector[rank], kVector[rank + 1]};
    tensors[1].data = vector.data() + kVector[rank];
    return tensors;
  }
  bool Equals(const ModelBytes& model) const {
    const auto same = [&](const char* name, const void* data,
                          std::size_t size) {
      const auto at = model.find(name);
      return at != model.end() && at->second.size() == size &&
             std::memcmp(at->second.data(), data, size) == 0;
    };
    return model.size() == 2 &&
           same("matrix", matrix.data(), matrix.size() * 2) &&
           same("vector", vector.data(), vector.size() * 4);
  }
};

// ----------------------------------------------------------------- a rank

// Where a rank may be told to die: before an operation of this kind on a path
// that contains `text`.
struct Point {
  const char* name;
  FileOperation kind;
  const char* text;
  bool rank_0_only;
};
constexpr Point kPoints[] = {
    {"hello, ready or gather", FileOperation::kRename, "ranks/rank_", false},
    {"a segment", FileOperation::kCreateExclusive, "delta-r", false},
    {"the sync of a segment", FileOperation::kSync, "delta-r", false},
    {"an anchor's file", FileOperation::kWrite, "anchor-r", false},
    {"the new epoch", FileOperation::kLink, "epochs/", true},
    {"MANIFEST", FileOperation::kCreateExclusive, "MANIFEST", true},
    {"COMMIT", FileOperation::kCreateExclusive, "COMMIT", true},
    {"the rename of a step", FileOperation::kRename, "step_", true},
    {"the rename of an anchor", FileOperation::kRename, "/anchor", true},
    {"HEAD", FileOperation::kRename, "HEAD", true},
    {"the broadcast", FileOperation::kRename, "ranks/rank_00000", true},
};

struct RankRun {
  std::string store;
  bool create = false;
  std::uint64_t resume = 0;
  std::uint64_t last_step = 0;
  milliseconds deadline{10000};
  std::uint64_t anchor_every = 5;
  // The rank that dies, and before which of its operations; 0: never by itself.
  std::uint32_t victim = 0;
  std::int64_t dies_at = 0;
  // Counts the operations at this point instead, if given.
  const Point* point = nullptr;
};

// Shared by the processes: the last step that each rank was told is published.
struct Board {
  std::atomic<std::uint64_t> told[kRanks];
  std::atomic<std::int64_t> operations[kRanks];
};

constexpr int kFailed = 3;  // exit status of a rank that saw an error

int RunRank(const RankRun& run, std::uint32_t rank, Board* board) {
  FaultFileSystem fs(PosixFileSystem(), run.store);
  std::int64_t seen_at_point = 0;
  const auto die = [&](const Operation& operation) {
    board->operations[rank] = operation.number;
    if (run.dies_at == 0 || rank != run.victim) return Fault::None();
    std::int64_t count = operation.number;
    if (run.point != nullptr) {
      const std::string& path =
          operation.to.empty() ? operation.path : operation.to;
      if (operation.kind != run.point->kind ||
          path.find(run.point->text) == std::string::npos) {
        return Fault::None();
      }
      count = ++seen_at_point;
    }
    if (count == run.dies_at) kill(getpid(), SIGKILL);
    return Fault::None();
  };
  fs.set_script(die);
  FileCoordinatorOptions meeting;
  meeting.store_path = run.store;
  meeting.rank = rank;
  meeting.world_size = kRanks;
  meeting.fs = &fs;
  meeting.deadline = run.deadline;
  const auto coordinator = FileCoordinator::Open(meeting);
  if (!coordinator.ok()) return kFailed;
  WriterOptions options;
  options.store_path = run.store;
  options.fs = &fs;
  options.io_threads = 1;
  options.encode_threads = 1;
  options.coordinator = coordinator->get();
  Weights weights(run.create ? 0 : run.resume);
  auto writer =
      run.create
          ? SnapshotWriter::Create(options, {}, weights.Shards(rank))
          : SnapshotWriter::Open(options, weights.Shards(rank), run.resume);
  if (!writer.ok()) return kFailed;
  for (std::uint64_t step = run.resume + 1; step <= run.last_step; ++step) {
    weights.MoveTo(step);
    PublishOptions publish;
    publish.anchor = step % run.anchor_every == 0;
    const auto result = (*writer)->Publish(step, publish);
    if (!result.ok()) return kFailed;
    board->told[rank] = step;
  }
  return 0;
}

// Forks the ranks, kills the victim after `kill_after` if that is positive, and
// waits for all. False, with the reason, if a survivor hangs or crashes.
bool RunRanks(const RankRun& run, Board* board, milliseconds kill_after,
              int* killed, std::string* error) {
  std::vector<pid_t> pids;
  for (std::uint32_t rank = 0; rank < kRanks; ++rank) {
    const pid_t pid = fork();
    if (pid == 0) _exit(RunRank(run, rank, board));
    pids.push_back(pid);
  }
  if (kill_after.count() > 0) {
    std::this_thread::sleep_for(kill_after);
    kill(pids[run.victim], SIGKILL);
  }
  const auto until =
      steady_clock::now() + 4 * run.deadline + milliseconds(20000);
  *killed = 0;
  bool sound = true;
  for (std::uint32_t rank = 0; rank < kRanks; ++rank) {
    int status = 0;
    while (waitpid(pids[rank], &status, WNOHANG) == 0) {
      if (steady_clock::now() > until) {
        kill(pids[rank], SIGKILL);
        waitpid(pids[rank], &status, 0);
        *error = absl::StrCat("rank ", rank, " hung");
        sound = false;
        break;
      }
      std::this_thread::sleep_for(milliseconds(1));
    }
    if (WIFSIGNALED(status)) {
      if (rank != run.victim || WTERMSIG(status) != SIGKILL) {
        *error =
            absl::StrCat("rank ", rank, " died of signal ", WTERMSIG(status));
        sound = false;
      }
      ++*killed;
    } else if (WEXITSTATUS(status) != 0 && WEXITSTATUS(status) != kFailed) {
      *error =
          absl::StrCat("rank ", rank, " exited with ", WEXITSTATUS(status));
      sound = false;
    }
  }
  return sound;
}

// The newest step of a store, which must be whole; kNotFound without a store.
// After a kill HEAD may be behind: it is a hint, and the next writer's to put
// right. Nothing else may be wrong.
absl::StatusOr<std::uint64_t> CheckStore(const std::string& path,
                                         bool head_may_be_behind = false) {
  auto store = Store::Open(PosixFileSystem(), path);
  if (!store.ok()) return store.status();
  const auto step = (*store)->Newest();
  if (!step.ok()) return absl::DataLossError(step.status().ToString());
  const auto model = ReadModel(**store, *step);
  if (!model.ok()) return absl::DataLossError(model.status().ToString());
  const std::uint64_t number = (*step)->id.step;
  if (!Weights(number).Equals(*model)) {
    return absl::DataLossError(
        absl::StrCat("v", number, " does not hold its weights"));
  }
  FsckOptions options;
  options.store_path = path;
  options.deep = true;
  options.io_threads = 1;
  options.settle_seconds = 0;
  const auto report = Fsck(options);
  if (!report.ok()) return absl::DataLossError(report.status().ToString());
  for (const Finding& finding : report->findings) {
    if (finding.severity == FindingSeverity::kInfo) continue;
    if (head_may_be_behind && finding.id == "head-behind") continue;
    return absl::DataLossError(FormatFsckReport(*report));
  }
  return number;
}

Board* MakeBoard() {
  void* memory = mmap(nullptr, sizeof(Board), PROT_READ | PROT_WRITE,
                      MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  EXPECT_NE(memory, MAP_FAILED);
  return new (memory) Board();
}

TEST(RankProcessTest, ThreeProcessesPublishTwentySteps) {
  TempDirectory temp;
  Board* board = MakeBoard();
  RankRun run;
  run.store = temp.Join("store");
  run.create = true;
  run.last_step = 20;
  int killed = 0;
  std::string error;
  ASSERT_TRUE(RunRanks(run, board, milliseconds(0), &killed, &error)) << error;
  EXPECT_EQ(killed, 0);
  for (const auto& told : board->told) EXPECT_EQ(told, 20u);
  const auto newest = CheckStore(run.store);
  ASSERT_TRUE(newest.ok()) << newest.status();
  EXPECT_EQ(*newest, 20u);
  auto store = Store::Open(PosixFileSystem(), run.store);
  for (std::uint64_t step = 0; step <= 20; ++step) {
    const auto published = (*store)->ReadStep(step);
    ASSERT_TRUE(published.ok()) << published.status();
    EXPECT_EQ((*store)->HasAnchor(step), step % 5 == 0);
    const auto model = ReadModel(**store, *published);
    ASSERT_TRUE(model.ok()) << model.status();
    EXPECT_TRUE(Weights(step).Equals(*model)) << step;
  }
}

// One trainer that is killed and started again until the time is up. Returns
// what went wrong, and counts.
struct LaneReport {
  int starts = 0;
  int kills = 0;
  int kills_at_points[std::size(kPoints)] = {};
  std::uint64_t last_step = 0;
  std::string error;
};

LaneReport RunLane(const std::string& store, std::uint64_t seed,
                   steady_clock::time_point until) {
  std::mt19937_64 random(seed);
  LaneReport report;
  Board* board = MakeBoard();
  std::uint64_t told = 0;  // the newest step that any rank ever was told
  std::int64_t most_operations[kRanks] = {60, 60, 60};
  while (true) {
    const bool last = steady_clock::now() >= until;
    RankRun run;
    run.store = store;
    const auto newest = CheckStore(store, /*head_may_be_behind=*/true);
    if (absl::IsNotFound(newest.status())) {
      // Killed before there was a store: start over.
      if (told > 0 || report.last_step > 0) {
        report.error = "the store is gone";
        return report;
      }
      RemoveTree(*PosixFileSystem(), store).IgnoreError();
      run.create = true;
    } else if (!newest.ok()) {
      report.error = newest.status().ToString();
      return report;
    } else {
      if (*newest < told || *newest < report.last_step) {
        report.error = absl::StrCat("v", told, " was published and is lost; v",
                                    *newest, " is the newest");
        return report;
      }
      run.resume = *newest;
      report.last_step = *newest;
    }
    if (last) run.deadline = milliseconds(20000);
    if (!last) run.deadline = milliseconds(200);
    run.last_step = run.resume + (last ? 3 : 6);
    run.anchor_every = 2;
    run.victim = static_cast<std::uint32_t>(random() % kRanks);
    milliseconds kill_after{0};
    if (!last) {
      const std::uint64_t kind = random() % 8;
      if (kind == 0) {
        kill_after = milliseconds(1 + random() % 60);
      } else if (kind < 4) {
        run.dies_at = static_cast<std::int64_t>(
            1 +
            random() % static_cast<std::uint64_t>(most_operations[run.victim]));
      } else {
        run.point = &kPoints[random() % std::size(kPoints)];
        if (run.point->rank_0_only) run.victim = 0;
        run.dies_at = static_cast<std::int64_t>(1 + random() % 3);
      }
    }
    for (auto& rank : board->told) rank = 0;
    int killed = 0;
    ++report.starts;
    if (!RunRanks(run, board, kill_after, &killed, &report.error)) {
      report.error += absl::StrCat("; dies_at ", run.dies_at, ", seed ", seed);
      return report;
    }
    report.kills += killed;
    if (run.point != nullptr) {
      report.kills_at_points[run.point - kPoints] += killed;
    }
    for (std::uint32_t rank = 0; rank < kRanks; ++rank) {
      told = std::max<std::uint64_t>(told, board->told[rank]);
      most_operations[rank] = std::max<std::int64_t>(most_operations[rank],
                                                     board->operations[rank]);
    }
    if (last) {
      for (const auto& rank : board->told) {
        if (rank != run.last_step) {
          report.error =
              absl::StrCat("the last start did not reach v", run.last_step);
        }
      }
      const auto end = CheckStore(store);
      if (!end.ok()) report.error = end.status().ToString();
      report.last_step = run.last_step;
      return report;
    }
  }
}

TEST(RankProcessTest, KilledRanksAnywhereLoseNothing) {
  constexpr int kLanes = 6;
  TempDirectory temp;
  const auto until =
      steady_clock::now() + std::chrono::seconds(kSanitized ? 8 : 22);
  const std::uint64_t seed = std::random_device()();
  std::printf("seed %llu\n", static_cast<unsigned long long>(seed));
  std::fflush(stdout);
  std::vector<pid_t> lanes;
  for (int lane = 0; lane < kLanes; ++lane) {
    const pid_t pid = fork();
    if (pid == 0) {
      const LaneReport report =
          RunLane(temp.Join(absl::StrCat("store", lane)), seed + lane, until);
      std::ofstream out(temp.Join(absl::StrCat("report", lane)));
      out << report.starts << ' ' << report.kills << ' ' << report.last_step;
      for (const int count : report.kills_at_points) out << ' ' << count;
      out << '\n' << report.error;
      out.close();
      _exit(0);
    }
    lanes.push_back(pid);
  }
  int starts = 0;
  int kills = 0;
  int kills_at_points[std::size(kPoints)] = {};
  std::uint64_t steps = 0;
  for (int lane = 0; lane < kLanes; ++lane) {
    int status = 0;
    waitpid(lanes[lane], &status, 0);
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    std::ifstream in(temp.Join(absl::StrCat("report", lane)));
    LaneReport report;
    ASSERT_TRUE(in >> report.starts >> report.kills >> report.last_step);
    for (int& count : kills_at_points) {
      int more = 0;
      ASSERT_TRUE(in >> more);
      count += more;
    }
    in.ignore(1);
    std::stringstream rest;
    rest << in.rdbuf();
    EXPECT_EQ(rest.str(), "") << "lane " << lane << ", seed " << seed + lane;
    starts += report.starts;
    kills += report.kills;
    steps += report.last_step;
  }
  std::printf("%d starts of 3 ranks, %d kills, %llu steps\n", starts, kills,
              static_cast<unsigned long long>(steps));
  for (std::size_t i = 0; i < std::size(kPoints); ++i) {
    std::printf("  %3d before %s\n", kills_at_points[i], kPoints[i].name);
  }
  EXPECT_GT(kills, kSanitized ? 3 : 20);
}

}  // namespace
}  // namespace kedge
