// Goal: the parts of examples/gpu_loop that a run of it cannot show: boxes that
// together are the tensor, sums whose ranks do not all come, which rank lies on
// which device. Method: boxes counted element by element; threads that stay
// away or come with other values; devices by name, none of which is opened.

#include <chrono>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kedge/examples/gpu_loop/engine_rank.h"
#include "kedge/examples/gpu_loop/host.h"
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

TEST(BoxOfRankTest, BoxesOfAnyNumberOfRanksFollowOnOneAnother) {
  const TensorSpec tensor = {
      "model.layers.0.mlp.down_proj.weight", DType::kBf16, {3, 11}};
  for (std::uint32_t ranks = 1; ranks <= 11; ++ranks) {
    std::uint64_t next = 0;
    for (std::uint32_t rank = 0; rank < ranks; ++rank) {
      const RankBox box = BoxOfRank(tensor, rank, ranks);
      EXPECT_THAT(box.begin, testing::ElementsAre(0, next)) << ranks;
      EXPECT_EQ(box.extent[0], 3u) << ranks;
      EXPECT_GT(box.extent[1], 0u) << ranks;
      next += box.extent[1];
    }
    EXPECT_EQ(next, 11u) << ranks;
  }
  // One that has no element for each rank is held by all.
  for (std::uint32_t rank = 0; rank < 12; ++rank) {
    EXPECT_EQ(BoxOfRank(tensor, rank, 12).elements(), 33u);
  }
}

// What each rank gets, each from a thread of its own.
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

TEST(ThreadSumTest, AddsOverOneRankAndOverEight) {
  for (const std::uint64_t ranks : {1u, 8u}) {
    ThreadSum sum(static_cast<std::uint32_t>(ranks), std::chrono::seconds(60));
    std::vector<std::vector<std::uint64_t>> values;
    for (std::uint64_t r = 0; r < ranks; ++r) values.push_back({r + 1, 5});
    for (const absl::Status& outcome : Add(sum, values)) {
      ASSERT_TRUE(outcome.ok()) << outcome;
    }
    for (const std::vector<std::uint64_t>& got : values) {
      EXPECT_THAT(got,
                  testing::ElementsAre(ranks * (ranks + 1) / 2, 5 * ranks));
    }
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

HostOptions Layout(std::uint32_t engines, std::uint32_t tp,
                   std::vector<std::string> engine_devices) {
  HostOptions options;
  options.engines = engines;
  options.tp = tp;
  options.engine_devices = std::move(engine_devices);
  return options;
}

TEST(HostTest, EngineDevicesAreTakenInTurnsOverTheRanksOfAllEngines) {
  EXPECT_THAT(DeviceNames(Layout(1, 2, {})),
              testing::ElementsAre("cpu", "cpu"));
  EXPECT_THAT(DeviceNames(Layout(2, 1, {"cuda:0", "cuda:1"})),
              testing::ElementsAre("cuda:0", "cuda:1"));
  EXPECT_THAT(DeviceNames(Layout(2, 3, {"cuda:0", "cuda:1"})),
              testing::ElementsAre("cuda:0", "cuda:1", "cuda:0", "cuda:1",
                                   "cuda:0", "cuda:1"));
  EXPECT_THAT(DeviceNames(Layout(1, 2, {"cuda:1", "cuda:2", "cuda:3"})),
              testing::ElementsAre("cuda:1", "cuda:2"));
}

TEST(HostTest, PlacesAreNamedByEngineWhereThereAreSeveral) {
  EXPECT_EQ(PlaceName(Layout(1, 4, {}), 3), "engine rank 3");
  EXPECT_EQ(PlaceName(Layout(2, 4, {}), 3), "engine 0 rank 3");
  EXPECT_EQ(PlaceName(Layout(2, 4, {}), 5), "engine 1 rank 1");
}

TEST(HostTest, NcclWantsGpusThatNoOtherEngineRankHas) {
  const HostOptions disjoint =
      Layout(2, 2, {"cuda:3", "cuda:0", "cuda:1", "cuda:2"});
  EXPECT_THAT(OwnGpus(disjoint, 0).value(), testing::ElementsAre(3, 0));
  EXPECT_THAT(OwnGpus(disjoint, 1).value(), testing::ElementsAre(1, 2));
  // Engine 0 has its own; the ranks of engine 1 share one, however it is named.
  const HostOptions mixed =
      Layout(2, 2, {"cuda:0", "cuda:1", "cuda:2", "cuda:02"});
  EXPECT_TRUE(OwnGpus(mixed, 0).ok());
  EXPECT_THAT(std::string(OwnGpus(mixed, 1).status().message()),
              testing::HasSubstr("engine 1 rank 0: NCCL: expected a GPU that "
                                 "no other engine rank has, found cuda:2, "
                                 "which engine 1 rank 1 has too"));
  // Both engines on the same two GPUs.
  EXPECT_THAT(
      std::string(
          OwnGpus(Layout(2, 2, {"cuda:0", "cuda:1"}), 1).status().message()),
      testing::HasSubstr("found cuda:0, which engine 0 rank 0 has too"));
  EXPECT_TRUE(absl::IsInvalidArgument(
      OwnGpus(Layout(1, 2, {"cuda:0", "cpu"}), 0).status()));
}

TEST(HostTest, SumsAreInProcessUnlessNcclIsAskedForInVain) {
  HostOptions options = Layout(2, 2, {});
  const auto host = Host::Open(options);
  ASSERT_TRUE(host.ok()) << host.status();
  EXPECT_EQ((*host)->reducer(1), "in process");
  options.nccl = "on";
  EXPECT_TRUE(absl::IsInvalidArgument(Host::Open(options).status()));
  const auto alone = Host::Open(Layout(2, 1, {}));
  ASSERT_TRUE(alone.ok()) << alone.status();
  EXPECT_EQ((*alone)->reducer(0), "none");
  EXPECT_TRUE(absl::IsInvalidArgument(Host::Open(Layout(9, 1, {})).status()));
  EXPECT_TRUE(absl::IsInvalidArgument(Host::Open(Layout(1, 0, {})).status()));
}

}  // namespace
}  // namespace kedge::example
