// Goal: the trainer's figures are right, a store's metadata is all an engine
// needs, and waits end with the names of those who did not come. Method: small
// cases computed by hand, files in a temporary directory.

#include <chrono>
#include <cmath>
#include <cstdint>
#include <fstream>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kedge/examples/run/progress.h"
#include "kedge/examples/run/run_description.h"
#include "kedge/examples/trainer/step_statistics.h"
#include "kedge/tests/support/temp_directory.h"

namespace kedge::example {
namespace {

using std::chrono::milliseconds;
using testing::AllOf;
using testing::HasSubstr;
using testing::Not;

TEST(StepStatisticsTest, EntropyIsThatOfDifferencesOfRawBits) {
  StepStatistics statistics;
  // Differences 0, 0, +1, +1, 0, -65535, 0, 0: probabilities 5/8, 1/4, 1/8.
  const std::vector<std::uint16_t> old_bits = {1, 2, 3, 0, 9, 65535, 7, 8};
  const std::vector<std::uint16_t> new_bits = {1, 2, 4, 1, 9, 0, 7, 8};
  statistics.Add(old_bits, new_bits);
  EXPECT_EQ(statistics.elements(), 8u);
  EXPECT_EQ(statistics.changed(), 3u);
  EXPECT_NEAR(statistics.entropy_bits(), 5 * std::log2(8.0 / 5) + 2 * 2 + 3,
              1e-9);
}

TEST(StepStatisticsTest, EntropyOfNoChangeIsZero) {
  StepStatistics statistics;
  const std::vector<std::uint16_t> bits = {0x8000, 0x7fc1, 3};
  statistics.Add(bits, bits);
  EXPECT_EQ(statistics.changed(), 0u);
  EXPECT_EQ(statistics.entropy_bits(), 0);
}

class RunDescriptionTest : public testing::Test {
 protected:
  RunDescriptionTest() {
    model_.layers = 3;
    model_.context = 17;
    batch_.inputs = {1, 2, 3};
    batch_.targets = {2, 3, 4};
  }
  ModelConfig model_;
  Batch batch_;
};

TEST_F(RunDescriptionTest, ComesBackFromMetadata) {
  const auto run = FromMetadata(ToMetadata(Describe(model_, batch_)));
  ASSERT_TRUE(run.ok()) << run.status();
  EXPECT_EQ(run->model.layers, 3);
  EXPECT_EQ(run->model.context, 17);
  EXPECT_EQ(run->model.d_ff, model_.d_ff);
  EXPECT_TRUE(CheckComparable(*run, batch_).ok());
}

TEST_F(RunDescriptionTest, RefusesMetadataOfAnotherProgram) {
  Metadata metadata = ToMetadata(Describe(model_, batch_));
  metadata["example.heads"] = "many";
  EXPECT_THAT(std::string(FromMetadata(metadata).status().message()),
              HasSubstr("example.heads"));
  metadata.erase("example.heads");
  EXPECT_EQ(FromMetadata(metadata).status().code(),
            absl::StatusCode::kFailedPrecondition);
}

TEST_F(RunDescriptionTest, RefusesToCompareLossesOfOtherTextOrArithmetic) {
  RunDescription run = Describe(model_, batch_);
  Batch other = batch_;
  other.targets.back() ^= 1;
  EXPECT_THAT(std::string(CheckComparable(run, other).message()),
              HasSubstr("evaluation text"));
  run.kernel_level = "another";
  EXPECT_THAT(std::string(CheckComparable(run, batch_).message()),
              HasSubstr("instruction set"));
}

TEST(ProgressTest, EngineNamesMayCarryTheirFirstVersion) {
  const auto plain = ParseAwaitedEngine("whole");
  ASSERT_TRUE(plain.ok());
  EXPECT_EQ(plain->name, "whole");
  EXPECT_EQ(plain->from_version, 0u);
  const auto late = ParseAwaitedEngine("late@11");
  ASSERT_TRUE(late.ok());
  EXPECT_EQ(late->name, "late");
  EXPECT_EQ(late->from_version, 11u);
  for (const char* bad : {"", "@3", "late@", "late@x", "../late"}) {
    EXPECT_FALSE(ParseAwaitedEngine(bad).ok()) << bad;
  }
}

TEST(ProgressTest, WaitsForEnginesThatAreDue) {
  const TempDirectory directory;
  const std::string path = directory.path();
  const std::vector<AwaitedEngine> engines = {{"whole", 0}, {"late", 2}};
  ASSERT_TRUE(WriteProgress(path, "whole", 1).ok());
  EXPECT_TRUE(WaitForEngines(milliseconds(0), path, engines, 1).ok());

  ASSERT_TRUE(WriteProgress(path, "whole", 2).ok());
  const absl::Status late = WaitForEngines(milliseconds(1), path, engines, 2);
  EXPECT_EQ(late.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_THAT(std::string(late.message()),
              AllOf(HasSubstr("v2"), HasSubstr("late (not started)"),
                    Not(HasSubstr("whole"))));

  ASSERT_TRUE(WriteProgress(path, "late", 2).ok());
  EXPECT_TRUE(WaitForEngines(milliseconds(0), path, engines, 2).ok());
  EXPECT_THAT(
      std::string(WaitForEngines(milliseconds(0), path, engines, 3).message()),
      HasSubstr("whole (holds v2)"));
}

TEST(ProgressTest, RefusesAFileThatIsNoVersion) {
  const TempDirectory directory;
  std::ofstream(std::string(directory.path()) + "/whole") << "soon\n";
  EXPECT_EQ(
      ReadProgress(std::string(directory.path()), "whole").status().code(),
      absl::StatusCode::kDataLoss);
}

TEST(WaitUntilTest, EndsWithTheErrorOfItsQuestion) {
  EXPECT_EQ(WaitUntil(milliseconds(1000), "nothing",
                      []() -> absl::StatusOr<bool> {
                        return absl::DataLossError("torn");
                      })
                .code(),
            absl::StatusCode::kDataLoss);
}

}  // namespace
}  // namespace kedge::example
