// Goal: two real processes hold the model together; one of them killed or hung
// at any time, the other fails by its deadline, both meet again and join, and
// every version that either commits is the trainer's, bit for bit.
// Method: group_engine twice, a trainer that publishes all the while, SIGKILL
// and SIGSTOP at random moments.

#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <fstream>
#include <map>
#include <random>
#include <sstream>
#include <thread>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kedge/format/hash.h"
#include "kedge/tests/reader/reader_group.h"
#include "kedge/tests/support/temp_directory.h"

extern char** environ;

namespace kedge {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

class Engine {
 public:
  Engine(std::string store, std::uint32_t rank, const TempDirectory& directory)
      : arguments_{std::string(KEDGE_BINARY_DIR) + "/tests/reader/group_engine",
                   std::move(store), std::to_string(rank),
                   directory.Join("socket"),
                   directory.Join("report" + std::to_string(rank))} {
    Start();
  }
  ~Engine() { Kill(); }
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  void Start() {
    std::vector<char*> argv;
    for (std::string& argument : arguments_) argv.push_back(argument.data());
    argv.push_back(nullptr);
    ASSERT_EQ(
        ::posix_spawn(&pid_, argv[0], nullptr, nullptr, argv.data(), environ),
        0)
        << argv[0];
  }
  void Signal(int signal) { ASSERT_EQ(::kill(pid_, signal), 0); }
  void Kill() {
    if (pid_ <= 0) return;
    ::kill(pid_, SIGKILL);
    int status = 0;
    ::waitpid(pid_, &status, 0);
    // It does not end by itself, whatever happens.
    EXPECT_TRUE(WIFSIGNALED(status)) << WEXITSTATUS(status);
    pid_ = 0;
  }

  // Lines of versions as (step, rest), and the others.
  struct Report {
    std::vector<std::pair<std::uint64_t, std::string>> versions;
    std::vector<std::string> others;
  };
  Report Read() const {
    Report report;
    std::ifstream file(arguments_[4]);
    for (std::string line; std::getline(file, line);) {
      std::istringstream fields(line);
      std::uint64_t step = 0;
      std::string manifest;
      std::string memory;
      if (fields >> step >> manifest >> memory && memory.size() == 32) {
        report.versions.emplace_back(step, manifest + " " + memory);
      } else {
        report.others.push_back(line);  // or cut off by a kill
      }
    }
    return report;
  }

 private:
  std::vector<std::string> arguments_;
  pid_t pid_ = 0;
};

TEST(GroupProcessTest, KilledAndHungRanksComeBackToOneVersion) {
  const std::uint64_t seed = std::random_device()();
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  std::mt19937_64 random(seed);
  TempDirectory directory;
  PublishedRun run;
  run.PublishUpTo(2, 2);
  std::vector<std::unique_ptr<Engine>> engines;
  for (std::uint32_t r = 0; r < 2; ++r) {
    engines.push_back(std::make_unique<Engine>(run.path(), r, directory));
  }
  std::atomic<bool> done{false};
  std::thread trainer([&] {
    for (std::uint64_t step = 3; !done; ++step) {
      run.Publish(step, step % 5 == 0, 0.005);
      std::this_thread::sleep_for(milliseconds(15));
    }
  });
  // Until both have committed something since.
  const auto wait_for_news = [&] {
    const Clock::time_point deadline = Clock::now() + std::chrono::seconds(30);
    for (const auto& engine : engines) {
      const std::size_t before = engine->Read().versions.size();
      while (engine->Read().versions.size() == before &&
             Clock::now() < deadline) {
        std::this_thread::sleep_for(milliseconds(5));
      }
    }
  };
  constexpr int kKills = 24;
  int hung = 0;
  for (int kill = 0; kill < kKills; ++kill) {
    std::this_thread::sleep_for(milliseconds(random() % 250));
    Engine& engine = *engines[random() % 2];
    if (kill % 8 == 7) {  // a process that hangs is waited for, not for ever
      wait_for_news();    // so that the other one is in a call with it
      engine.Signal(SIGSTOP);
      ++hung;
      std::this_thread::sleep_for(milliseconds(2000));
    }
    engine.Kill();
    engine.Start();
  }
  done = true;
  trainer.join();
  const std::uint64_t last = run.writer().held().step;
  const auto both_are_there = [&] {
    for (const auto& engine : engines) {
      const auto report = engine->Read();
      if (report.versions.empty() || report.versions.back().first != last) {
        return false;
      }
    }
    return true;
  };
  const Clock::time_point deadline = Clock::now() + std::chrono::seconds(60);
  while (!both_are_there() && Clock::now() < deadline) {
    std::this_thread::sleep_for(milliseconds(20));
  }
  EXPECT_TRUE(both_are_there()) << "newest: v" << last;

  int by_deadline = 0;
  int gone = 0;
  std::string others;
  for (std::uint32_t r = 0; r < 2; ++r) {
    engines[r]->Kill();
    EngineMemory memory(run.table(), PartsOf(run.table(), Split::kRows, r, 2),
                        "w");
    const auto report = engines[r]->Read();
    EXPECT_GT(report.versions.size(), 10u);
    std::map<std::uint64_t, std::string> expected;
    for (const auto& [step, rest] : report.versions) {
      std::string& line = expected[step];
      if (line.empty()) {
        memory.Load(run.at(step));
        line = ToHex(run.id(step).manifest_hash) + " " +
               ToHex(HashBytes128(memory.Contents()));
      }
      ASSERT_EQ(rest, line) << "rank " << r << ", v" << step;
    }
    for (const std::string& line : report.others) {
      others += line + "\n";
      by_deadline += line.find("waited 1000 ms") != std::string::npos ? 1 : 0;
      gone += line.find("is gone") != std::string::npos ? 1 : 0;
    }
  }
  EXPECT_GE(by_deadline, hung) << others;
  EXPECT_GT(gone, 0) << others;
}

}  // namespace
}  // namespace kedge
