// Goal: both layouts of an inference engine hold every element of the model
// once, and kedge and the model see the same memory. Method: writes a model
// through the weight sets, reads it back through the view.

#include "kedge/examples/inference_engine/engine_weights.h"

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kedge/examples/model/bf16.h"
#include "kedge/examples/model/model.h"

namespace kedge::example {
namespace {

std::vector<TensorSpec> SmallModel() {
  auto model = Model::Create({.layers = 2,
                              .d_model = 12,
                              .heads = 2,
                              .d_ff = 18,
                              .context = 4,
                              .batch = 2,
                              .threads = 1});
  EXPECT_TRUE(model.ok()) << model.status();
  return (*model)->tensors();
}

// The bits of element (r, c), different for each within a tensor of this size.
std::uint16_t BitsOf(const TensorSpec& spec, std::int64_t r, std::int64_t c) {
  return static_cast<std::uint16_t>(spec.name.size() * 97 + r * spec.cols() +
                                    c);
}

class EngineWeightsTest : public testing::TestWithParam<WeightLayout> {
 protected:
  EngineWeightsTest() : tensors_(SmallModel()) {
    auto weights = EngineWeights::Create(tensors_, GetParam());
    EXPECT_TRUE(weights.ok()) << weights.status();
    weights_ = *std::move(weights);
  }

  std::vector<TensorSpec> tensors_;
  std::unique_ptr<EngineWeights> weights_;
};

TEST_P(EngineWeightsTest, ViewReadsWhatWeightSetsWrote) {
  std::map<std::string, TensorSpec> specs;
  for (const TensorSpec& spec : tensors_) specs[spec.name] = spec;
  for (const WeightSet* set : weights_->sets()) {
    for (const TensorTarget& target : set->targets()) {
      ASSERT_EQ(specs.count(target.name), 1u) << target.name;
      const TensorSpec& spec = specs[target.name];
      const bool matrix = target.shape.size() == 2;
      const std::uint64_t rows = matrix ? target.extent[0] : 1;
      for (std::uint64_t r = 0; r < rows; ++r) {
        for (std::uint64_t c = 0; c < target.extent.back(); ++c) {
          const std::uint16_t bits = BitsOf(
              spec,
              static_cast<std::int64_t>(r) +
                  (matrix ? static_cast<std::int64_t>(target.begin[0]) : 0),
              static_cast<std::int64_t>(c + target.begin.back()));
          std::int64_t at =
              static_cast<std::int64_t>(c) * target.strides_bytes.back();
          if (matrix) {
            at += static_cast<std::int64_t>(r) * target.strides_bytes[0];
          }
          std::memcpy(static_cast<std::byte*>(target.data) + at, &bits,
                      sizeof(bits));
        }
      }
    }
  }
  for (const TensorSpec& spec : tensors_) {
    std::vector<float> read(static_cast<std::size_t>(spec.elements()));
    const absl::Status status = weights_->view().Gather(spec, read);
    ASSERT_TRUE(status.ok()) << status;
    for (std::int64_t r = 0; r < spec.rows(); ++r) {
      for (std::int64_t c = 0; c < spec.cols(); ++c) {
        ASSERT_EQ(
            FloatToBf16(read[static_cast<std::size_t>(r * spec.cols() + c)]),
            BitsOf(spec, r, c))
            << spec.name << " at " << r << ", " << c;
      }
    }
  }
}

TEST_P(EngineWeightsTest, MemoryThatNobodyLoadedIsNan) {
  for (const TensorSpec& spec : tensors_) {
    std::vector<float> read(static_cast<std::size_t>(spec.elements()));
    ASSERT_TRUE(weights_->view().Gather(spec, read).ok());
    for (const float value : read) ASSERT_TRUE(std::isnan(value)) << spec.name;
  }
}

INSTANTIATE_TEST_SUITE_P(Layouts, EngineWeightsTest,
                         testing::Values(WeightLayout::kWhole,
                                         WeightLayout::kTensorParallel2));

TEST(EngineWeightsLayoutTest, TensorParallelRanksPackQueryKeyAndValue) {
  const std::vector<TensorSpec> tensors = SmallModel();
  const auto weights =
      EngineWeights::Create(tensors, WeightLayout::kTensorParallel2);
  ASSERT_TRUE(weights.ok()) << weights.status();
  const std::vector<const WeightSet*> sets = (*weights)->sets();
  ASSERT_EQ(sets.size(), 2u);
  for (const WeightSet* set : sets) {
    std::map<std::string, const TensorTarget*> targets;
    for (const TensorTarget& target : set->targets()) {
      targets[target.name] = &target;
    }
    const std::string layer = "model.layers.0.self_attn.";
    const TensorTarget* const query = targets[layer + "q_proj.weight"];
    const TensorTarget* const key = targets[layer + "k_proj.weight"];
    const TensorTarget* const value = targets[layer + "v_proj.weight"];
    const TensorTarget* const output = targets[layer + "o_proj.weight"];
    ASSERT_TRUE(query != nullptr && key != nullptr && value != nullptr &&
                output != nullptr);
    const std::ptrdiff_t part_bytes = 6 * 12 * 2;
    const auto* const start = static_cast<const std::byte*>(query->data);
    EXPECT_EQ(static_cast<const std::byte*>(key->data), start + part_bytes);
    EXPECT_EQ(static_cast<const std::byte*>(value->data),
              start + 2 * part_bytes);
    EXPECT_THAT(query->extent, testing::ElementsAre(6, 12));
    EXPECT_THAT(output->extent, testing::ElementsAre(12, 6));
  }
}

}  // namespace
}  // namespace kedge::example
