// Goal: batches depend on text and seed alone, and evaluation text is never
// trained on. Method: texts whose bytes tell their position.

#include "kedge/examples/model/text.h"

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <set>
#include <string>
#include <utility>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace kedge::example {
namespace {

// Training bytes are 0 to 99, evaluation bytes 100 to 199.
Text Marked(int size) {
  std::string bytes;
  for (int i = 0; i < size; ++i) {
    bytes += static_cast<char>(i % 100 + (i >= size / 10 * 9 ? 100 : 0));
  }
  return Text(std::move(bytes));
}

TEST(TextTest, TargetsAreTheNextBytesOfInputs) {
  const auto batch = Marked(1000).TrainingBatch(8, 16, 1, 1);
  ASSERT_TRUE(batch.ok()) << batch.status();
  ASSERT_EQ(batch->inputs.size(), 128u);
  ASSERT_EQ(batch->targets.size(), 128u);
  for (std::size_t i = 0; i < 128; ++i) {
    EXPECT_EQ(batch->targets[i], (batch->inputs[i] + 1) % 100);
  }
}

TEST(TextTest, EqualSeedAndStepGiveEqualBatchesAndOthersDiffer) {
  const Text text = Marked(5000);
  const auto first = text.TrainingBatch(8, 16, 1, 1);
  EXPECT_EQ(first->inputs, text.TrainingBatch(8, 16, 1, 1)->inputs);
  EXPECT_NE(first->inputs, text.TrainingBatch(8, 16, 1, 2)->inputs);
  EXPECT_NE(first->inputs, text.TrainingBatch(8, 16, 2, 1)->inputs);
}

TEST(TextTest, TrainingNeverSeesEvaluationBytes) {
  const Text text = Marked(1000);
  for (int step = 1; step <= 200; ++step) {
    const auto batch = text.TrainingBatch(4, 50, 3, step);
    for (const std::uint8_t byte : batch->targets) ASSERT_LT(byte, 100);
  }
  const auto evaluation = text.EvaluationBatch(4, 50);
  ASSERT_TRUE(evaluation.ok()) << evaluation.status();
  for (const std::uint8_t byte : evaluation->inputs) ASSERT_GE(byte, 100);
  for (const std::uint8_t byte : evaluation->targets) ASSERT_GE(byte, 100);
  EXPECT_EQ(evaluation->targets.back(), 199);  // the very last byte
}

TEST(TextTest, ShortTextIsRefused) {
  const Text text = Marked(100);
  EXPECT_EQ(text.TrainingBatch(1, 90, 1, 1).status().code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_TRUE(text.TrainingBatch(1, 89, 1, 1).ok());
  EXPECT_EQ(text.EvaluationBatch(1, 10).status().code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_TRUE(text.EvaluationBatch(1, 9).ok());
  EXPECT_FALSE(Text("").TrainingBatch(1, 1, 1, 1).ok());
}

TEST(TextTest, LoadJoinsFilesAndNamesTheOneThatIsMissing) {
  const std::filesystem::path folder =
      std::filesystem::path(testing::TempDir()) / "kedge_text_test";
  std::filesystem::create_directories(folder);
  const std::string a = folder / "a";
  const std::string b = folder / "b";
  std::ofstream(a, std::ios::binary) << "abc";
  std::ofstream(b, std::ios::binary) << "de";
  const auto text = Text::Load({a, b});
  ASSERT_TRUE(text.ok()) << text.status();
  EXPECT_EQ(text->size_bytes(), 5);
  const std::string missing = folder / "missing";
  const absl::Status status = Text::Load({a, missing}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(status.message()), testing::HasSubstr(missing));
  EXPECT_EQ(Text::Load({}).status().code(), absl::StatusCode::kNotFound);
  EXPECT_FALSE(Text::Load({folder}).ok());
  std::filesystem::remove_all(folder);
}

TEST(TextTest, NormalsHaveMeanZeroAndVarianceOne) {
  Random random(5);
  double sum = 0;
  double squares = 0;
  const int n = 100000;
  for (int i = 0; i < n; ++i) {
    const double x = random.Normal();
    sum += x;
    squares += x * x;
  }
  EXPECT_NEAR(sum / n, 0, 0.02);
  EXPECT_NEAR(squares / n, 1, 0.02);
}

}  // namespace
}  // namespace kedge::example
