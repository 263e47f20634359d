// Goal: the memory of staged deltas stays below its limit and is used again.
// Method: blocks taken and given back in several orders, on a CpuDevice.

#include "kedge/reader/stage_pool.h"

#include <cstring>
#include <optional>
#include <random>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "kedge/engine/cpu/cpu_device.h"

namespace kedge {
namespace {

using Block = StagePool::Block;

std::optional<Block> TakeOrDie(StagePool& pool, std::uint64_t bytes) {
  auto block = pool.Take(bytes);
  EXPECT_TRUE(block.ok()) << block.status();
  if (!block.ok()) return std::nullopt;
  return *std::move(block);
}

TEST(StagePoolTest, EvenStepsAllocateOnce) {
  CpuDevice device;
  StagePool pool(&device, std::uint64_t{1} << 30);
  for (int step = 0; step < 100; ++step) {
    const auto first = TakeOrDie(pool, 10'000 + step);
    const auto second = TakeOrDie(pool, 1);
    ASSERT_TRUE(first && second);
    EXPECT_NE(first->data(), second->data());
    EXPECT_FALSE(pool.empty());
  }
  EXPECT_TRUE(pool.empty());
  EXPECT_EQ(device.allocation_count(), 1u);
}

TEST(StagePoolTest, TheLimitHoldsAndNothingIsGivenBeyondIt) {
  CpuDevice device;
  StagePool pool(&device, 1 << 20);
  EXPECT_FALSE(pool.HasRoom((1 << 20) + 1));
  EXPECT_FALSE(pool.HasRoom(~std::uint64_t{0} / 2));
  EXPECT_FALSE(TakeOrDie(pool, (1 << 20) + 1).has_value());
  auto all = TakeOrDie(pool, 1 << 20);
  ASSERT_TRUE(all.has_value());
  EXPECT_FALSE(pool.HasRoom(1));
  EXPECT_FALSE(TakeOrDie(pool, 1).has_value());
  all.reset();
  EXPECT_TRUE(TakeOrDie(pool, 1).has_value());
  EXPECT_LE(device.bytes_in_use(MemoryKind::kDevice), 1u << 20);
}

// A step that is larger than all before it takes the place of what they left.
TEST(StagePoolTest, ALargerBlockReplacesMemoryThatIsOutOfUse) {
  CpuDevice device;
  StagePool pool(&device, 100 << 20);
  { const auto small = TakeOrDie(pool, 20 << 20); }
  EXPECT_TRUE(pool.HasRoom(100 << 20));
  const auto large = TakeOrDie(pool, 100 << 20);
  ASSERT_TRUE(large.has_value());
  EXPECT_EQ(device.bytes_in_use(MemoryKind::kDevice), 100u << 20);
}

// Blocks do not overlap, whatever the order; what HasRoom says is true.
TEST(StagePoolTest, RandomBlocksKeepTheirBytes) {
  const std::uint64_t seed = 20;
  SCOPED_TRACE(seed);
  std::mt19937_64 random(seed);
  CpuDevice device;
  const std::uint64_t limit = 3 << 20;
  StagePool pool(&device, limit);
  struct Held {
    Block block;
    std::uint64_t bytes;
    int mark;
  };
  std::vector<Held> held;
  for (int i = 0; i < 2000; ++i) {
    if (!held.empty() && random() % 2 == 0) {
      const std::size_t at = random() % held.size();
      for (std::uint64_t b = 0; b < held[at].bytes; b += 97) {
        ASSERT_EQ(held[at].block.data()[b], std::byte(held[at].mark));
      }
      held.erase(held.begin() + static_cast<std::ptrdiff_t>(at));
      continue;
    }
    const std::uint64_t bytes = 1 + random() % (600 << 10);
    const bool room = pool.HasRoom(bytes);
    auto block = TakeOrDie(pool, bytes);
    ASSERT_EQ(block.has_value(), room);
    if (!block) continue;
    std::memset(block->data(), i & 0xff, bytes);
    held.push_back({*std::move(block), bytes, i & 0xff});
    ASSERT_LE(device.bytes_in_use(MemoryKind::kDevice), limit);
  }
}

}  // namespace
}  // namespace kedge
