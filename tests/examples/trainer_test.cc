// Goal: training is a pure function of configuration, text and calls; its bf16
// weights are always its rounded masters. Method: twin trainers compared bit
// for bit, and single steps recomputed from the gradient.

#include "kedge/examples/model/trainer.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kedge/examples/model/bf16.h"

namespace kedge::example {
namespace {

Text Sentence() {
  std::string bytes;
  while (bytes.size() < 4000) {
    bytes += "The quick brown fox jumps over the lazy dog. ";
  }
  return Text(bytes);
}

TrainerConfig Small() {
  TrainerConfig config;
  config.model = {.layers = 2,
                  .d_model = 32,
                  .heads = 2,
                  .d_ff = 48,
                  .context = 16,
                  .batch = 5,
                  .threads = 2};
  config.seed = 3;
  return config;
}

std::unique_ptr<Trainer> Make(const TrainerConfig& config) {
  auto trainer = Trainer::Create(config, Sentence());
  EXPECT_TRUE(trainer.ok()) << trainer.status();
  return *std::move(trainer);
}

std::vector<float> Masters(const Trainer& trainer) {
  return {trainer.masters().data(),
          trainer.masters().data() + trainer.masters().size()};
}

std::vector<std::vector<std::uint16_t>> Weights(const Trainer& trainer) {
  std::vector<std::vector<std::uint16_t>> weights;
  for (std::size_t i = 0; i < trainer.tensors().size(); ++i) {
    weights.push_back(trainer.bf16(i));
  }
  return weights;
}

void ExpectRounded(Trainer& trainer) {
  for (std::size_t i = 0; i < trainer.tensors().size(); ++i) {
    const float* master =
        trainer.masters().data() + trainer.model().gradient_index(i);
    for (std::size_t j = 0; j < trainer.bf16(i).size(); ++j) {
      ASSERT_EQ(trainer.bf16(i)[j], FloatToBf16(master[j]))
          << trainer.tensors()[i].name << "[" << j << "]";
    }
  }
}

// The gradient that the next step, number `step`, is going to use.
std::vector<float> NextGradient(Trainer& trainer, const TrainerConfig& config,
                                std::int64_t step) {
  const Batch batch = *Sentence().TrainingBatch(
      config.model.batch, config.model.context, config.seed, step);
  FloatBuffer gradient(trainer.model().gradient_elements());
  EXPECT_TRUE(trainer.model()
                  .LossAndGradient(trainer.view(), batch,
                                   {gradient.data(),
                                    static_cast<std::size_t>(gradient.size())})
                  .ok());
  return {gradient.data(), gradient.data() + gradient.size()};
}

TEST(TrainerTest, TwinsAgreeBitForBitWhateverTheThreads) {
  for (const Optimizer optimizer : {Optimizer::kAdamW, Optimizer::kSignSgd}) {
    TrainerConfig config = Small();
    const auto two = Make(config);
    config.model.threads = 1;
    const auto one = Make(config);
    EXPECT_EQ(Weights(*two), Weights(*one));
    for (int step = 1; step <= 12; ++step) {
      const auto a = two->Step(optimizer, 1e-3);
      const auto b = one->Step(optimizer, 1e-3);
      ASSERT_TRUE(a.ok() && b.ok());
      EXPECT_EQ(a->loss, b->loss);
      EXPECT_EQ(a->gradient_norm, b->gradient_norm);
      EXPECT_EQ(a->step, step);
    }
    EXPECT_EQ(Masters(*two), Masters(*one));
    EXPECT_EQ(Weights(*two), Weights(*one));
    EXPECT_EQ(*two->Evaluate(), *one->Evaluate());
    ExpectRounded(*two);
  }
}

TEST(TrainerTest, AnotherSeedGivesOtherWeights) {
  TrainerConfig config = Small();
  const auto first = Make(config);
  config.seed = 4;
  EXPECT_NE(Weights(*first), Weights(*Make(config)));
}

TEST(TrainerTest, TrainingLearnsTheSentence) {
  const auto trainer = Make(Small());
  const double before = *trainer->Evaluate();
  EXPECT_NEAR(before, std::log(256.0), 0.3);
  for (int i = 0; i < 50; ++i) {
    ASSERT_TRUE(trainer->Step(Optimizer::kAdamW, 1e-2).ok());
  }
  EXPECT_LT(*trainer->Evaluate(), 0.5 * before);
}

TEST(TrainerTest, FirstAdamWStepMovesByTheRateTowardsLowerLoss) {
  TrainerConfig config = Small();
  config.weight_decay = 0;
  const auto trainer = Make(config);
  const std::vector<float> before = Masters(*trainer);
  const std::vector<float> gradient = NextGradient(*trainer, config, 1);
  const double rate = 1e-3;
  ASSERT_TRUE(trainer->Step(Optimizer::kAdamW, rate).ok());
  const std::vector<float> after = Masters(*trainer);
  for (std::size_t i = 0; i < before.size(); ++i) {
    // With fresh moments the update is the gradient over its own length.
    if (std::fabs(gradient[i]) < 1e-5) continue;
    ASSERT_NEAR(after[i] - before[i], gradient[i] > 0 ? -rate : rate,
                2e-3 * rate + 2e-7)
        << i;
  }
}

TEST(TrainerTest, SignSgdMovesEachMasterByExactlyTheRate) {
  const TrainerConfig config = Small();
  const auto trainer = Make(config);
  const std::vector<float> before = Masters(*trainer);
  const std::vector<float> gradient = NextGradient(*trainer, config, 1);
  ASSERT_TRUE(trainer->Step(Optimizer::kSignSgd, 1e-4).ok());
  const std::vector<float> after = Masters(*trainer);
  std::int64_t moved = 0;
  for (std::size_t i = 0; i < before.size(); ++i) {
    const float move = gradient[i] > 0 ? 1e-4f : gradient[i] < 0 ? -1e-4f : 0;
    ASSERT_EQ(after[i], before[i] - move) << i;
    moved += after[i] != before[i];
  }
  EXPECT_GT(moved, static_cast<std::int64_t>(before.size() / 4));
}

TEST(TrainerTest, LongGradientsAreScaledToTheLimit) {
  // With a huge epsilon and beta1 = 0 AdamW divides by a constant, so the
  // length of the update shows the length of the gradient it used.
  TrainerConfig config = Small();
  config.weight_decay = 0;
  config.epsilon = 1e3f;
  config.beta1 = 0;
  config.max_gradient_norm = 0.125f;
  const auto trainer = Make(config);
  const std::vector<float> before = Masters(*trainer);
  const auto step = trainer->Step(Optimizer::kAdamW, 1e5);
  ASSERT_TRUE(step.ok()) << step.status();
  ASSERT_GT(step->gradient_norm, 0.2);
  const std::vector<float> after = Masters(*trainer);
  double squares = 0;
  for (std::size_t i = 0; i < before.size(); ++i) {
    squares += std::pow((after[i] - before[i]) / 100.0, 2);
  }
  EXPECT_NEAR(std::sqrt(squares), 0.125, 0.001);
}

TEST(TrainerTest, ResetForgetsTheMoments) {
  TrainerConfig config = Small();
  config.weight_decay = 0;
  const auto trainer = Make(config);
  for (int i = 0; i < 5; ++i) {
    ASSERT_TRUE(trainer->Step(Optimizer::kAdamW, 1e-3).ok());
  }
  trainer->ResetOptimizer();
  const std::vector<float> before = Masters(*trainer);
  const std::vector<float> gradient = NextGradient(*trainer, config, 6);
  ASSERT_TRUE(trainer->Step(Optimizer::kAdamW, 1e-3).ok());
  const std::vector<float> after = Masters(*trainer);
  for (std::size_t i = 0; i < before.size(); ++i) {
    if (std::fabs(gradient[i]) < 1e-5) continue;
    ASSERT_NEAR(after[i] - before[i], gradient[i] > 0 ? -1e-3 : 1e-3, 3e-6);
  }
}

TEST(TrainerTest, WeightsKeepTheirAddresses) {
  const auto trainer = Make(Small());
  std::vector<const std::uint16_t*> before;
  for (std::size_t i = 0; i < trainer->tensors().size(); ++i) {
    before.push_back(trainer->bf16(i).data());
    EXPECT_EQ(trainer->bf16(trainer->tensors()[i].name), &trainer->bf16(i));
  }
  ASSERT_TRUE(trainer->Step(Optimizer::kAdamW, 1e-3).ok());
  ASSERT_TRUE(trainer->Step(Optimizer::kSignSgd, 1e-3).ok());
  for (std::size_t i = 0; i < before.size(); ++i) {
    EXPECT_EQ(trainer->bf16(i).data(), before[i]);
  }
  EXPECT_EQ(trainer->bf16("no such tensor"), nullptr);
}

TEST(TrainerTest, BadRatesAndShortTextsAreRefusedAndChangeNothing) {
  const auto trainer = Make(Small());
  const auto before = Weights(*trainer);
  for (const double rate :
       {0.0, -1.0, std::nan(""), std::numeric_limits<double>::infinity()}) {
    EXPECT_EQ(trainer->Step(Optimizer::kAdamW, rate).status().code(),
              absl::StatusCode::kInvalidArgument);
  }
  EXPECT_EQ(Weights(*trainer), before);
  EXPECT_EQ(Trainer::Create(Small(), Text("short")).status().code(),
            absl::StatusCode::kInvalidArgument);
}

TEST(TrainerTest, DivergedWeightsAreReportedAndKept) {
  const auto trainer = Make(Small());
  ASSERT_TRUE(trainer->Step(Optimizer::kSignSgd, 1e30).ok());
  const auto before = Weights(*trainer);
  const absl::Status status = trainer->Step(Optimizer::kAdamW, 1e-3).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
  EXPECT_THAT(std::string(status.message()), testing::HasSubstr("step 2"));
  EXPECT_EQ(Weights(*trainer), before);
}

}  // namespace
}  // namespace kedge::example
