// Goal: the fp8 quantiser's kernel gives what a plain reading of spec/fp8.md
// gives. Method: the kernel's own source, compiled for a block of fibers that
// run in random order.

#include <algorithm>
#include <cstring>
#include <random>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "kedge/engine/cuda/quantise.cuh"
#include "kedge/tests/engine/cuda/block_emulator.h"
#include "kedge/tests/engine/cuda/quantise_test_support.h"
#include "kedge/tests/support/sanitized.h"

namespace kedge {
namespace {

using testing::BlockEmulator;
using testing::Fill;
using testing::QuantiseCase;

// What LaunchQuantise does, with blocks in any order.
void QuantiseAndCompare(QuantiseCase& c, std::uint64_t seed) {
  c.Poison();
  std::uint64_t first_bad = ~std::uint64_t{0};
  const QuantiseBatch batch = c.Batch(&first_bad);
  std::mt19937_64 rng(seed);
  std::vector<std::uint64_t> blocks(batch.block_count);
  for (std::uint64_t b = 0; b < blocks.size(); ++b) blocks[b] = b;
  std::shuffle(blocks.begin(), blocks.end(), rng);
  BlockEmulator emulator(quantise::kThreads, rng());
  for (const std::uint64_t b : blocks) {
    quantise::Shared shared;
    std::memset(&shared, static_cast<int>(rng()), sizeof(shared));
    emulator.Run([&](BlockEmulator& block) {
      quantise::QuantiseBlock(block, shared, batch, b);
    });
  }
  c.ExpectReference(first_bad);
}

TEST(QuantiseEmulationTest, BlocksOfEveryKindAndExtent) {
  std::uint64_t seed = 1000;
  for (const ScaleKind kind : {ScaleKind::kExact, ScaleKind::kPowerOfTwo}) {
    for (const auto& [rows, cols] : testing::QuantiseExtents()) {
      for (const Fill fill : testing::kFills) {
        SCOPED_TRACE(absl::StrCat("seed ", seed + 1, " ", rows, "x", cols,
                                  " fill ", static_cast<int>(fill)));
        QuantiseCase c(++seed, kind);
        c.Add(rows, cols, fill);
        QuantiseAndCompare(c, seed);
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST(QuantiseEmulationTest, TasksOfABatchAreToldApart) {
  std::mt19937_64 rng(1100);
  for (const int tasks : {2, 33, 70}) {
    QuantiseCase c(rng(), ScaleKind::kExact);
    for (int i = 0; i < Rounds(tasks); ++i) {
      c.Add(1 + rng() % 140, 1 + rng() % 140, testing::kFills[rng() % 5]);
    }
    SCOPED_TRACE(absl::StrCat(tasks, " tasks, seed 1100"));
    QuantiseAndCompare(c, rng());
    if (HasFatalFailure()) return;
  }
}

TEST(QuantiseEmulationTest, NamesTheFirstBlockThatIsNotFinite) {
  for (const std::uint16_t bad : {0x7f80, 0xff80, 0x7fc1, 0xffff}) {
    QuantiseCase c(9, ScaleKind::kExact);
    c.Add(200, 300, Fill::kOrdinary);  // 6 blocks
    c.Add(130, 130, Fill::kOrdinary);  // 4
    c.Set(0, 150, 290, bad);           // block 5
    c.Set(1, 0, 129, bad);             // block 7
    QuantiseAndCompare(c, bad);
    EXPECT_EQ(c.expected_first_bad(), 5u);
  }
}

}  // namespace
}  // namespace kedge
