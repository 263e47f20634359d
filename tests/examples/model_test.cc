// Goal: the loss is that of the model described, its gradient is right, and no
// layout of the weights in memory changes a bit of it. Method: a second
// forward pass in double precision, central differences of it, and views that
// cut the same weights in every way an inference engine does.

#include "kedge/examples/model/model.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kedge/examples/model/bf16.h"
#include "kedge/examples/model/text.h"
#include "kedge/examples/model/weight_view.h"
#include "kedge/tests/examples/reference_model.h"

namespace kedge::example {
namespace {

using Weights = std::vector<std::vector<std::uint16_t>>;

constexpr ModelConfig kTiny = {.layers = 2,
                               .d_model = 16,
                               .heads = 2,
                               .d_ff = 24,
                               .context = 6,
                               .batch = 3,
                               .threads = 2};
// Nothing here is a multiple of a vector.
constexpr ModelConfig kOdd = {.layers = 2,
                              .d_model = 30,
                              .heads = 3,
                              .d_ff = 37,
                              .context = 17,
                              .batch = 1,
                              .threads = 1};

Weights RandomWeights(const Model& model, std::uint64_t seed) {
  Random random(seed);
  Weights weights;
  for (const TensorSpec& spec : model.tensors()) {
    auto& tensor = weights.emplace_back(spec.elements());
    for (std::uint16_t& w : tensor) {
      w = FloatToBf16(static_cast<float>(spec.shape.size() == 1
                                             ? 1 + 0.2 * random.Normal()
                                             : 0.3 * random.Normal()));
    }
  }
  return weights;
}

WeightView WholeView(const Model& model, const Weights& weights) {
  WeightView view;
  for (std::size_t i = 0; i < weights.size(); ++i) {
    view.AddWhole(model.tensors()[i], weights[i].data());
  }
  return view;
}

ReferenceWeights ToReference(const Model& model, const Weights& weights) {
  ReferenceWeights reference;
  for (std::size_t i = 0; i < weights.size(); ++i) {
    std::vector<double>& tensor = reference[model.tensors()[i].name];
    for (const std::uint16_t w : weights[i]) tensor.push_back(Bf16ToFloat(w));
  }
  return reference;
}

Batch RandomBatch(const ModelConfig& config, std::uint64_t seed) {
  Random random(seed);
  Batch batch{.sequences = config.batch, .tokens = config.context};
  for (int i = 0; i < config.batch * config.context; ++i) {
    batch.inputs.push_back(static_cast<std::uint8_t>(random.Below(256)));
    batch.targets.push_back(static_cast<std::uint8_t>(random.Below(256)));
  }
  return batch;
}

// Loss and gradient of one thing under several layouts and levels.
class ModelTest : public testing::TestWithParam<ModelConfig> {
 protected:
  static constexpr std::uint64_t kSeed = 11;

  void SetUp() override {
    auto model = Model::Create(GetParam());
    ASSERT_TRUE(model.ok()) << model.status();
    model_ = *std::move(model);
    weights_ = RandomWeights(*model_, kSeed);
    batch_ = RandomBatch(GetParam(), kSeed + 1);
  }

  std::unique_ptr<Model> model_;
  Weights weights_;
  Batch batch_;
};

INSTANTIATE_TEST_SUITE_P(Shapes, ModelTest, testing::Values(kTiny, kOdd),
                         [](const testing::TestParamInfo<ModelConfig>& shape) {
                           return shape.index == 0 ? "Tiny" : "Odd";
                         });

TEST_P(ModelTest, LossMatchesPlainDoublePrecision) {
  const auto loss = model_->Loss(WholeView(*model_, weights_), batch_);
  ASSERT_TRUE(loss.ok()) << loss.status();
  EXPECT_NEAR(*loss,
              ReferenceLoss(GetParam(), ToReference(*model_, weights_), batch_),
              1e-5)
      << "seed " << kSeed;
}

TEST_P(ModelTest, GradientMatchesFiniteDifferencesOfEveryTensor) {
  FloatBuffer gradient(model_->gradient_elements());
  const auto loss = model_->LossAndGradient(
      WholeView(*model_, weights_), batch_,
      {gradient.data(), static_cast<std::size_t>(gradient.size())});
  ASSERT_TRUE(loss.ok()) << loss.status();

  ReferenceWeights reference = ToReference(*model_, weights_);
  Random random(kSeed + 2);
  for (std::size_t i = 0; i < weights_.size(); ++i) {
    const TensorSpec& spec = model_->tensors()[i];
    std::vector<double>& tensor = reference[spec.name];
    const std::vector<double> kept = tensor;
    const float* found = gradient.data() + model_->gradient_index(i);
    // Random directions that move every element at once: an element with a
    // wrong gradient shows in each of them.
    double largest = 0;
    for (int direction = 0; direction < 3; ++direction) {
      constexpr double kStep = 1e-6;
      double expected = 0;
      double length = 0;
      double along = 0;
      std::vector<double> move(tensor.size());
      for (std::size_t at = 0; at < move.size(); ++at) {
        move[at] = random.Normal();
        along += move[at] * static_cast<double>(found[at]);
        length += static_cast<double>(found[at]) * found[at];
      }
      for (const double sign : {1.0, -1.0}) {
        for (std::size_t at = 0; at < move.size(); ++at) {
          tensor[at] = kept[at] + sign * kStep * move[at];
        }
        expected +=
            sign * ReferenceLoss(GetParam(), reference, batch_) / (2 * kStep);
      }
      tensor = kept;
      largest = std::max(largest, std::fabs(expected));
      EXPECT_NEAR(along, expected, 1e-6 + 2e-5 * std::sqrt(length))
          << spec.name << ", seed " << kSeed;
    }
    // A gradient that is zero everywhere would be compared with nothing.
    EXPECT_GT(largest, 1e-4) << spec.name;
  }
}

TEST_P(ModelTest, TrainingAndEvaluationGiveTheSameLossBits) {
  const WeightView view = WholeView(*model_, weights_);
  FloatBuffer gradient(model_->gradient_elements());
  const double before = *model_->Loss(view, batch_);
  EXPECT_EQ(*model_->LossAndGradient(
                view, batch_,
                {gradient.data(), static_cast<std::size_t>(gradient.size())}),
            before);
  EXPECT_EQ(*model_->Loss(view, batch_), before);
}

TEST_P(ModelTest, ThreadsChangeNoBitOfLossOrGradient) {
  std::vector<float> first;
  double first_loss = 0;
  for (const int threads : {1, 2}) {
    ModelConfig config = GetParam();
    config.threads = threads;
    const auto model = *Model::Create(config);
    FloatBuffer gradient(model->gradient_elements());
    const double loss = *model->LossAndGradient(
        WholeView(*model, weights_), batch_,
        {gradient.data(), static_cast<std::size_t>(gradient.size())});
    const std::vector<float> all(gradient.data(),
                                 gradient.data() + gradient.size());
    if (threads == 1) {
      first = all;
      first_loss = loss;
    } else {
      EXPECT_EQ(all, first);
      EXPECT_EQ(loss, first_loss);
    }
  }
}

TEST_P(ModelTest, EveryInstructionSetAgreesClosely) {
  const double best = *model_->Loss(WholeView(*model_, weights_), batch_);
  for (const Kernels* kernels : SupportedKernels()) {
    const auto model = *Model::Create(GetParam(), *kernels);
    EXPECT_NEAR(*model->Loss(WholeView(*model, weights_), batch_), best, 1e-5)
        << kernels->level;
  }
}

// Two tensor-parallel ranks: projections into the layer cut by rows, those out
// of it by columns, the rest held by rank 0.
TEST_P(ModelTest, TensorParallelSlicesGiveTheSameLossBits) {
  WeightView view;
  std::vector<std::unique_ptr<std::vector<std::uint16_t>>> memory;
  for (std::size_t i = 0; i < weights_.size(); ++i) {
    const TensorSpec& spec = model_->tensors()[i];
    const auto ends_with = [&](const char* end) {
      const std::string tail = end;
      return spec.name.size() >= tail.size() &&
             spec.name.compare(spec.name.size() - tail.size(), tail.size(),
                               tail) == 0;
    };
    const bool by_cols =
        ends_with("o_proj.weight") || ends_with("down_proj.weight");
    if (spec.shape.size() == 1) {
      view.AddWhole(spec, weights_[i].data());
      continue;
    }
    const std::int64_t whole = by_cols ? spec.cols() : spec.rows();
    for (const auto& [begin, end] :
         {std::pair{std::int64_t{0}, whole / 2}, std::pair{whole / 2, whole}}) {
      WeightBox box{.row_begin = by_cols ? 0 : begin,
                    .row_end = by_cols ? spec.rows() : end,
                    .col_begin = by_cols ? begin : 0,
                    .col_end = by_cols ? end : spec.cols()};
      box.row_stride = box.col_end - box.col_begin;
      auto& slice =
          *memory.emplace_back(std::make_unique<std::vector<std::uint16_t>>());
      for (std::int64_t r = box.row_begin; r < box.row_end; ++r) {
        for (std::int64_t c = box.col_begin; c < box.col_end; ++c) {
          slice.push_back(weights_[i][r * spec.cols() + c]);
        }
      }
      box.data = slice.data();
      view.Add(spec.name, box);
    }
  }
  EXPECT_EQ(*model_->Loss(view, batch_),
            *model_->Loss(WholeView(*model_, weights_), batch_));
}

// q, k and v of a layer interleaved by row in one buffer, everything else
// stored transposed.
TEST_P(ModelTest, PackedAndTransposedTensorsGiveTheSameLossBits) {
  WeightView view;
  std::map<std::string, std::vector<std::uint16_t>> packed;
  std::vector<std::unique_ptr<std::vector<std::uint16_t>>> memory;
  for (std::size_t i = 0; i < weights_.size(); ++i) {
    const TensorSpec& spec = model_->tensors()[i];
    const std::size_t attention = spec.name.find("self_attn.");
    const std::string which = attention == std::string::npos
                                  ? ""
                                  : spec.name.substr(attention + 10, 1);
    WeightBox box{.row_end = spec.rows(), .col_end = spec.cols()};
    if (which == "q" || which == "k" || which == "v") {
      std::vector<std::uint16_t>& buffer =
          packed[spec.name.substr(0, attention)];
      buffer.resize(3 * spec.elements());
      const std::int64_t part = which == "q" ? 0 : which == "k" ? 1 : 2;
      for (std::int64_t r = 0; r < spec.rows(); ++r) {
        std::copy_n(weights_[i].begin() + r * spec.cols(), spec.cols(),
                    buffer.begin() + (3 * r + part) * spec.cols());
      }
      box.data = buffer.data() + part * spec.cols();
      box.row_stride = 3 * spec.cols();
    } else {
      auto& buffer = *memory.emplace_back(
          std::make_unique<std::vector<std::uint16_t>>(spec.elements()));
      for (std::int64_t r = 0; r < spec.rows(); ++r) {
        for (std::int64_t c = 0; c < spec.cols(); ++c) {
          buffer[c * spec.rows() + r] = weights_[i][r * spec.cols() + c];
        }
      }
      box.data = buffer.data();
      box.row_stride = 1;
      box.col_stride = spec.rows();
    }
    view.Add(spec.name, box);
  }
  EXPECT_EQ(*model_->Loss(view, batch_),
            *model_->Loss(WholeView(*model_, weights_), batch_));
}

// The canary of the two tests above: they could not pass with wrong weights.
TEST_P(ModelTest, OneChangedBitInAnyTensorChangesTheLoss) {
  const double before = *model_->Loss(WholeView(*model_, weights_), batch_);
  for (std::size_t i = 0; i < weights_.size(); ++i) {
    // A row of the embedding that the batch uses.
    const std::int64_t at =
        i == 0 ? batch_.inputs[0] * model_->tensors()[0].cols() : 0;
    weights_[i][at] ^= 0x20;
    EXPECT_NE(*model_->Loss(WholeView(*model_, weights_), batch_), before)
        << model_->tensors()[i].name;
    weights_[i][at] ^= 0x20;
  }
  EXPECT_EQ(*model_->Loss(WholeView(*model_, weights_), batch_), before);
}

TEST_P(ModelTest, MissingTensorIsNamed) {
  WeightView view;
  for (std::size_t i = 0; i + 1 < weights_.size(); ++i) {
    view.AddWhole(model_->tensors()[i], weights_[i].data());
  }
  const absl::Status status = model_->Loss(view, batch_).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(status.message()),
              testing::HasSubstr("lm_head.weight"));
}

TEST_P(ModelTest, BatchOfAnotherSizeIsRefused) {
  Batch batch = batch_;
  batch.targets.pop_back();
  EXPECT_EQ(model_->Loss(WholeView(*model_, weights_), batch).status().code(),
            absl::StatusCode::kInvalidArgument);
  FloatBuffer gradient(model_->gradient_elements());
  EXPECT_EQ(model_
                ->LossAndGradient(WholeView(*model_, weights_), batch_,
                                  {gradient.data(), 1})
                .status()
                .code(),
            absl::StatusCode::kInvalidArgument);
}

TEST(ModelConfigTest, DefaultHasThreeMillionWeightsUnderHuggingFaceNames) {
  const auto model = *Model::Create({});
  std::int64_t elements = 0;
  std::vector<std::string> names;
  for (const TensorSpec& spec : model->tensors()) {
    elements += spec.elements();
    names.push_back(spec.name);
  }
  EXPECT_EQ(elements, 3344640);
  EXPECT_EQ(names.size(), 39u);
  EXPECT_THAT(names,
              testing::IsSupersetOf({"model.embed_tokens.weight",
                                     "model.layers.0.self_attn.q_proj.weight",
                                     "model.layers.3.mlp.down_proj.weight",
                                     "model.norm.weight", "lm_head.weight"}));
}

TEST(ModelConfigTest, ImpossibleShapesAreRefusedByName) {
  const auto message = [](const ModelConfig& config) {
    const auto model = Model::Create(config);
    EXPECT_EQ(model.status().code(), absl::StatusCode::kInvalidArgument);
    return std::string(model.status().message());
  };
  EXPECT_THAT(message({.layers = 0}), testing::HasSubstr("layers"));
  EXPECT_THAT(message({.d_model = 1 << 30}), testing::HasSubstr("d_model"));
  EXPECT_THAT(message({.heads = 3}), testing::HasSubstr("heads"));
  EXPECT_THAT(message({.d_ff = -1}), testing::HasSubstr("d_ff"));
  EXPECT_THAT(message({.context = 0}), testing::HasSubstr("context"));
  EXPECT_THAT(message({.batch = 0}), testing::HasSubstr("batch"));
  EXPECT_THAT(message({.threads = 3}), testing::HasSubstr("threads"));
  EXPECT_THAT(message({.layers = 64,
                       .d_model = 4096,
                       .d_ff = 16384,
                       .context = 2048,
                       .batch = 256}),
              testing::HasSubstr("memory"));
}

}  // namespace
}  // namespace kedge::example
