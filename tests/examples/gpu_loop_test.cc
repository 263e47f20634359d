// Goal: the parts of examples/gpu_loop that a run of it cannot show: boxes that
// together are the tensor, sums whose ranks do not all come. Method: boxes
// counted element by element; threads that stay away or come with other values.

#include <chrono>
#include <thread>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kedge/examples/gpu_loop/engine_rank.h"
#include "kedge/examples/gpu_loop/thread_sum.h"
#include "kedge/format/l61.h"

namespace kedge::example {
namespace {

TEST(BoxOfRankTest, RanksHoldEachElementOnceOrAllOfIt) {
  const TensorSpec tensors[] = {
      {"model.norm.weight", DType::kBf16, {64}},
      {"model.layers.1.mlp.gate.weight", DType::kBf16, {8, 6}},
      {"model.layers.0.self_attn.q_proj.weight", DType::kBf16, {9, 6}},
      {"model.layers.0.self_attn.o_proj.weight", DType::kBf16, {6, 9}},
      {"model.layers.0.self_attn.o_proj.weight_scale_inv", DType::kF32, {2, 1}},
      {"model.layers.2.mlp.experts.gate_proj", DType::kBf16, {3, 8, 5}},
      {"model.layers.2.mlp.experts.down_proj", DType::kBf16, {3, 5, 7}},
  };
  const bool whole[] = {true, true, false, false, true, false, false};
  for (std::size_t t = 0; t < std::size(tensors); ++t) {
    std::uint64_t sum = 0;
    for (std::uint32_t rank = 0; rank < 2; ++rank) {
      const RankBox box = BoxOfRank(tensors[t], rank, 2);
      ASSERT_EQ(box.extent.size(), tensors[t].shape.size());
      sum += box.elements();
      int cuts = 0;
      for (std::size_t d = 0; d < box.extent.size(); ++d) {
        ASSERT_LE(box.begin[d] + box.extent[d], tensors[t].shape[d]);
        if (box.extent[d] == tensors[t].shape[d]) continue;
        ++cuts;
        EXPECT_EQ(box.begin[d], rank == 0 ? 0u : tensors[t].shape[d] / 2);
      }
      EXPECT_EQ(cuts, whole[t] ? 0 : 1) << tensors[t].name;
    }
    EXPECT_EQ(sum, tensors[t].element_count() * (whole[t] ? 2 : 1))
        << tensors[t].name;
  }
}

// What both ranks get, each from a thread of its own.
std::vector<absl::Status> Add(ThreadSum& sum,
                              std::vector<std::vector<std::uint64_t>>& values) {
  std::vector<absl::Status> outcomes(values.size());
  std::vector<std::thread> threads;
  for (std::uint32_t r = 0; r < values.size(); ++r) {
    threads.emplace_back([&, r] { outcomes[r] = sum.ForRank(r)(values[r]); });
  }
  for (std::thread& thread : threads) thread.join();
  return outcomes;
}

TEST(ThreadSumTest, AddsModuloThePrimeRoundAfterRound) {
  ThreadSum sum(2, std::chrono::seconds(60));
  for (std::uint64_t round = 0; round < 100; ++round) {
    std::vector<std::vector<std::uint64_t>> values = {{kL61Prime - 1, round},
                                                      {round + 2, 7}};
    for (const absl::Status& outcome : Add(sum, values)) {
      ASSERT_TRUE(outcome.ok()) << outcome;
    }
    EXPECT_THAT(values[0], testing::ElementsAre(round + 1, round + 7));
    EXPECT_EQ(values[0], values[1]);
  }
}

TEST(ThreadSumTest, ARankThatStaysAwayIsADeadline) {
  ThreadSum sum(2, std::chrono::milliseconds(20));
  std::vector<std::uint64_t> alone = {1};
  EXPECT_TRUE(absl::IsDeadlineExceeded(sum.ForRank(0)(alone)));
  EXPECT_THAT(alone, testing::ElementsAre(1));
}

TEST(ThreadSumTest, UnlikeNumbersOfValuesFailOnBothRanks) {
  ThreadSum sum(2, std::chrono::seconds(60));
  std::vector<std::vector<std::uint64_t>> values = {{1, 2}, {3}};
  for (const absl::Status& outcome : Add(sum, values)) {
    EXPECT_TRUE(absl::IsUnavailable(outcome)) << outcome;
  }
  values = {{1}, {3}};
  for (const absl::Status& outcome : Add(sum, values)) {
    EXPECT_TRUE(outcome.ok()) << outcome;
  }
  EXPECT_EQ(values[0][0], 4u);
}

}  // namespace
}  // namespace kedge::example
