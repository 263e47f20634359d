// Goal: the diff + encode kernels give the bytes, headers and sums of the plain
// encoder, whatever the tensor, the slice, the memory and the changes are.
// Method: the kernels' own source, compiled for a block of fibers that run in
// random order, against format/codec.h; seeds are printed.

#include <algorithm>
#include <cstring>
#include <random>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "kedge/engine/cuda/tile_encode.cuh"
#include "kedge/format/codec.h"
#include "kedge/tests/engine/cuda/block_emulator.h"
#include "kedge/tests/engine/cuda/encode_test_support.h"
#include "kedge/tests/support/sanitized.h"

namespace kedge {
namespace {

using testing::BatchResults;
using testing::BlockEmulator;
using testing::Build;
using testing::BuiltBatch;
using testing::ExpectPlainResults;
using testing::Layout;
using testing::SliceCase;
using testing::Steps;

const L61Key kKey = L61Key::FromSeed(20261130);

const std::vector<std::uint64_t>& TableOfA() {
  static const auto* const table = [] {
    auto* a = new std::vector<std::uint64_t>(kL61TileWords);
    for (std::uint32_t t = 0; t < kL61TileWords; ++t) (*a)[t] = kKey.A(t);
    return a;
  }();
  return *table;
}

// What LaunchEncode does, with blocks in any order.
BatchResults Encode(const BuiltBatch& built, std::uint64_t arena_bytes,
                    std::uint64_t seed) {
  std::mt19937_64 rng(seed);
  BatchResults results;
  results.tiles.resize(built.tile_count);
  std::memset(static_cast<void*>(results.tiles.data()), 0xee,
              results.tiles.size() * sizeof(EncodedTile));
  // Aligned to 16.
  std::vector<Bytes16> arena(arena_bytes / 16 + 2);
  std::memset(arena.data(), static_cast<int>(testing::kArenaPoison),
              arena.size() * 16);
  std::vector<std::uint32_t> scratch(built.tile_count, 0xeeeeeeee);

  EncodeBatch batch;
  batch.slices = built.slices.data();
  batch.slice_count = static_cast<std::uint32_t>(built.slices.size());
  batch.tile_count = built.tile_count;
  batch.tiles = results.tiles.data();
  batch.arena = reinterpret_cast<std::byte*>(arena.data());
  batch.arena_bytes = arena_bytes;
  batch.totals = &results.totals;
  batch.scratch = scratch.data();
  batch.l61 = {TableOfA().data(), kKey};

  std::vector<std::uint64_t> tiles(built.tile_count);
  for (std::uint64_t t = 0; t < tiles.size(); ++t) tiles[t] = t;
  std::shuffle(tiles.begin(), tiles.end(), rng);
  BlockEmulator fast(tile_encode::kFastThreads, rng());
  const auto fast_shared = std::make_unique<tile_encode::FastShared>();
  for (const std::uint64_t tile : tiles) {
    std::memset(static_cast<void*>(fast_shared.get()), static_cast<int>(rng()),
                sizeof(*fast_shared));
    fast.Run([&](BlockEmulator& block) {
      tile_encode::FastEncodeTile(block, *fast_shared, batch, tile);
    });
  }
  if (results.totals.heavy_tiles > 0) {
    BlockEmulator heavy(tile_encode::kHeavyThreads, rng());
    const auto heavy_shared = std::make_unique<tile_encode::HeavyShared>();
    std::memset(static_cast<void*>(heavy_shared.get()), static_cast<int>(rng()),
                sizeof(*heavy_shared));
    for (std::uint32_t i = 0; i < results.totals.heavy_tiles; ++i) {
      heavy.Run([&](BlockEmulator& block) {
        tile_encode::HeavyEncodeTile(block, *heavy_shared, batch, scratch[i]);
      });
    }
  }
  const auto* bytes = reinterpret_cast<const std::byte*>(arena.data());
  results.arena.assign(bytes, bytes + arena_bytes);
  for (std::size_t i = arena_bytes; i < 16 * arena.size(); ++i) {
    EXPECT_EQ(bytes[i], testing::kArenaPoison) << "behind the arena";
  }
  return results;
}

// One slice, encoded and compared. Returns its totals.
EncodeTotals Check(const SliceCase& c, std::uint64_t seed) {
  SCOPED_TRACE(absl::StrCat("seed ", seed, " ", c.ToString()));
  std::mt19937_64 rng(seed);
  BuiltBatch batch;
  batch.Add(Build(rng, c));
  const BatchResults results = Encode(batch, batch.arena_bound(), rng());
  ExpectPlainResults(batch, kKey, results);
  return results.totals;
}

struct Kind {
  std::uint32_t unit_bytes;
  std::uint32_t units_per_element;
};
constexpr Kind kKinds[] = {{1, 1}, {2, 1}, {4, 1}, {4, 2}};

TEST(TileEncodeEmulationTest, ListParameterIsTheRiceParameter) {
  for (std::uint32_t units = 1; units <= kTileUnits;
       units += units < 300 ? 1 : 997) {
    for (std::uint32_t count = 1; count <= units;
         count += count < 300 ? 1 : 101) {
      ASSERT_EQ(tile_encode::ListParameter(count, units),
                RiceParameter(count, units))
          << count << " of " << units;
    }
  }
  EXPECT_EQ(tile_encode::ListParameter(kTileUnits, kTileUnits),
            RiceParameter(kTileUnits, kTileUnits));
}

TEST(TileEncodeEmulationTest, FullTilesOfEveryDensity) {
  std::uint64_t seed = 100;
  for (const Kind kind : kKinds) {
    for (const double density : {0.0, 0.00006, 0.001, 0.01, 0.03, 0.07}) {
      for (int round = 0; round < Rounds(2); ++round) {
        const EncodeTotals totals =
            Check({.shape = {128, 256 / kind.units_per_element},
                   .unit_bytes = kind.unit_bytes,
                   .units_per_element = kind.units_per_element,
                   .density = density,
                   .steps = static_cast<Steps>(seed % 4)},
                  ++seed);
        if (HasFatalFailure()) return;
        // Entries of 4-byte units take twice the room.
        if (density <= (kind.unit_bytes == 4 ? 0.01 : 0.03)) {
          EXPECT_EQ(totals.heavy_tiles, 0u) << "the fast kernel takes these";
        }
      }
    }
  }
}

TEST(TileEncodeEmulationTest, HeavyTilesOfEveryDensity) {
  std::uint64_t seed = 200;
  int sparse = 0;
  int dense = 0;
  for (const Kind kind : kKinds) {
    for (const double density : {0.1, 0.2, 0.26, 0.3, 0.6, 1.0}) {
      for (int round = 0; round < Rounds(2); ++round) {
        SCOPED_TRACE(absl::StrCat("seed ", seed + 1));
        std::mt19937_64 rng(++seed);
        BuiltBatch batch;
        batch.Add(Build(rng, {.shape = {128, 128 / kind.units_per_element},
                              .unit_bytes = kind.unit_bytes,
                              .units_per_element = kind.units_per_element,
                              .density = density,
                              .steps = static_cast<Steps>(seed % 5)}));
        const BatchResults results = Encode(batch, batch.arena_bound(), rng());
        ExpectPlainResults(batch, kKey, results);
        if (HasFatalFailure()) return;
        if (density >= 0.2) {
          EXPECT_EQ(results.totals.heavy_tiles, 1u);
        }
        ++(results.tiles[0].mode == 1 ? dense : sparse);
      }
    }
  }
  EXPECT_GT(sparse, 0);
  EXPECT_GT(dense, 0);
}

TEST(TileEncodeEmulationTest, ClusteredChanges) {
  std::uint64_t seed = 300;
  for (const Kind kind : kKinds) {
    for (int round = 0; round < Rounds(3); ++round) {
      Check({.shape = {130, 384},
             .unit_bytes = kind.unit_bytes,
             .units_per_element = kind.units_per_element,
             .density = 0.02,
             .clustered = true},
            ++seed);
      if (HasFatalFailure()) return;
    }
  }
}

TEST(TileEncodeEmulationTest, EveryShapeSliceAndLayout) {
  const std::vector<std::vector<std::uint64_t>> shapes = {
      {},         {1},        {7},       {127},     {17000},
      {1, 999},   {999, 1},   {5, 1000}, {130, 96}, {129, 400},
      {200, 127}, {2, 20000}, {40, 64},  {9, 8, 3}, {131, 16, 16}};
  std::uint64_t seed = 400;
  for (const auto& shape : shapes) {
    for (const Kind kind : kKinds) {
      for (int round = 0; round < Rounds(3); ++round) {
        std::mt19937_64 rng(++seed);
        SliceCase c;
        c.shape = shape;
        c.unit_bytes = kind.unit_bytes;
        c.units_per_element = kind.units_per_element;
        const std::uint64_t elements =
            MakeTileGrid(shape, kind.units_per_element).unit_count() /
            kind.units_per_element;
        if (rng() % 3 != 0) {
          std::uint64_t begin = rng() % elements;
          std::uint64_t end = begin + 1 + rng() % (elements - begin);
          if (rng() % 2 == 0) begin = begin / 16 * 16;  // stays aligned
          c.slice = {begin * kind.units_per_element,
                     end * kind.units_per_element};
        }
        c.old_layout = static_cast<Layout>(rng() % 5);
        c.new_layout =
            rng() % 2 == 0 ? c.old_layout : static_cast<Layout>(rng() % 5);
        const double densities[] = {0, 0.0003, 0.003, 0.01, 0.05, 0.3, 1};
        c.density = densities[rng() % 7];
        c.steps = static_cast<Steps>(rng() % 5);
        Check(c, seed);
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST(TileEncodeEmulationTest, SlicesOfABatchAreToldApart) {
  std::uint64_t seed = 500;
  for (const int slices : {1, 2, 31, 32, 33, 64, 65, 1030}) {
    if (kSanitized && slices > 100) continue;
    std::mt19937_64 rng(++seed);
    SCOPED_TRACE(absl::StrCat("seed ", seed, ", ", slices, " slices"));
    BuiltBatch batch;
    for (int i = 0; i < slices; ++i) {
      const Kind kind = kKinds[rng() % 4];
      const std::uint64_t rows = 1 + rng() % (slices > 100 ? 1 : 200);
      batch.Add(Build(rng, {.shape = {rows, 1 + rng() % 150},
                            .unit_bytes = kind.unit_bytes,
                            .units_per_element = kind.units_per_element,
                            .density = rng() % 3 == 0 ? 0 : 0.05}));
    }
    ExpectPlainResults(batch, kKey, Encode(batch, batch.arena_bound(), rng()));
    if (HasFatalFailure()) return;
  }
}

// A tensor of 2^33 units: what lies behind 32 bits is computed in 64. The slice
// is what lies around unit 2^32; the memory of the rest does not exist.
TEST(TileEncodeEmulationTest, UnitsBehind32Bits) {
  std::uint64_t seed = 600;
  for (const Kind kind : kKinds) {
    const std::uint64_t middle = std::uint64_t{1} << 32;
    Check({.shape = {std::uint64_t{1} << 20, 8192 / kind.units_per_element},
           .unit_bytes = kind.unit_bytes,
           .units_per_element = kind.units_per_element,
           .slice = {middle - 200, middle + 300},
           .density = 0.1},
          ++seed);
    if (HasFatalFailure()) return;
  }
}

TEST(TileEncodeEmulationTest, AnArenaWithoutRoomIsSaid) {
  std::uint64_t seed = 700;
  for (const double density : {0.01, 0.5}) {
    for (int round = 0; round < Rounds(4); ++round) {
      std::mt19937_64 rng(++seed);
      SCOPED_TRACE(absl::StrCat("seed ", seed));
      BuiltBatch batch;
      batch.Add(Build(rng, {.shape = {150, 200}, .density = density}));
      const BatchResults whole = Encode(batch, batch.arena_bound(), rng());
      const std::uint64_t needed = whole.totals.arena_bytes;
      const std::uint64_t arena =
          round == 0 ? 0 : (round == 1 ? needed : rng() % needed / 8 * 8);
      const BatchResults results = Encode(batch, arena, rng());
      ExpectPlainResults(batch, kKey, results);
      if (HasFatalFailure()) return;
      const auto without = std::count_if(
          results.tiles.begin(), results.tiles.end(), [](const EncodedTile& t) {
            return t.bytes > 0 && t.payload == kNoPayload;
          });
      EXPECT_EQ(without > 0, arena < needed);
    }
  }
}

// Canary: the emulator finds a barrier that is not there.
TEST(TileEncodeEmulationTest, TheEmulatorFindsAMissingBarrier) {
  const auto run = [](std::uint64_t seed, bool barrier) {
    BlockEmulator emulator(64, seed);
    std::uint32_t shared[64] = {};
    std::uint32_t wrong = 0;
    emulator.Run([&](BlockEmulator& block) {
      shared[block.Thread()] = block.Thread() + 1;
      if (barrier) {
        block.Sync();
      } else {
        block.SyncWarp();
      }
      const std::uint32_t other = (block.Thread() + 32) % 64;
      if (shared[other] != other + 1) ++wrong;
    });
    return wrong;
  };
  EXPECT_EQ(run(1, true), 0u);
  EXPECT_GT(run(1, false), 0u);
}

}  // namespace
}  // namespace kedge
