// Goal: every unit of a tensor lies in exactly one tile, whatever the shape,
// and the extents are those of spec/segment.md. Method: enumerate small
// tensors, pin the extents of named shapes.

#include "kedge/format/tile_grid.h"

#include <cstdint>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "gtest/gtest.h"

namespace kedge {
namespace {

using Shape = std::vector<std::uint64_t>;

TEST(TileGridTest, ExtentsOfNamedShapes) {
  struct Case {
    Shape shape;
    std::uint32_t units_per_element;
    std::uint64_t rows, cols;
    std::uint32_t tile_rows, tile_cols;
    std::uint64_t tiles_per_band, band_count;
  };
  const Case cases[] = {
      {{}, 1, 1, 1, 1, 1, 1, 1},
      {{}, 2, 1, 2, 1, 2, 1, 1},
      {{5}, 1, 1, 5, 1, 5, 1, 1},
      {{128}, 1, 1, 128, 1, 16384, 1, 1},
      {{100000}, 1, 1, 100000, 1, 16384, 7, 1},
      {{1, 50000}, 1, 1, 50000, 1, 16384, 4, 1},
      {{50000, 1}, 1, 50000, 1, 16384, 1, 1, 4},
      {{1000, 3}, 1, 1000, 3, 1000, 3, 1, 1},
      {{9000, 3}, 1, 9000, 3, 5461, 3, 1, 2},
      {{5, 1000}, 1, 5, 1000, 5, 3200, 1, 1},
      {{2, 100000}, 1, 2, 100000, 2, 8192, 13, 1},
      {{127, 128}, 1, 127, 128, 127, 128, 1, 1},
      {{300, 130}, 1, 300, 130, 128, 128, 2, 3},
      {{4096, 8192}, 1, 4096, 8192, 128, 128, 64, 32},
      {{64, 32, 3, 3}, 1, 64, 288, 64, 256, 2, 1},
      {{6, 7, 4, 4}, 1, 6, 112, 6, 112, 1, 1},
      {{128, 6, 40, 40}, 1, 768, 1600, 128, 128, 13, 6},
      {{300, 65}, 2, 300, 130, 128, 128, 2, 3},
      {{std::uint64_t{1} << 20, std::uint64_t{1} << 13},
       1,
       std::uint64_t{1} << 20,
       8192,
       128,
       128,
       64,
       8192},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(absl::StrJoin(c.shape, "x"));
    const TileGrid grid = MakeTileGrid(c.shape, c.units_per_element);
    EXPECT_EQ(grid.rows, c.rows);
    EXPECT_EQ(grid.cols, c.cols);
    EXPECT_EQ(grid.tile_rows, c.tile_rows);
    EXPECT_EQ(grid.tile_cols, c.tile_cols);
    EXPECT_EQ(grid.tiles_per_band, c.tiles_per_band);
    EXPECT_EQ(grid.band_count, c.band_count);
  }
}

TEST(TileGridTest, TensorsWithoutElementsHaveNoTiles) {
  for (const Shape& shape : {Shape{0}, Shape{2, 0}, Shape{0, 128}, Shape{0, 3},
                             Shape{4, 0, 9}, Shape{0, 0}}) {
    SCOPED_TRACE(absl::StrJoin(shape, "x"));
    const TileGrid grid = MakeTileGrid(shape, 1);
    EXPECT_EQ(grid.unit_count(), 0u);
    EXPECT_EQ(grid.tile_count(), 0u);
  }
}

TEST(TileGridTest, EveryUnitLiesInExactlyOneTile) {
  for (const Shape& shape :
       {Shape{}, Shape{1}, Shape{5}, Shape{16385}, Shape{40000},
        Shape{1, 20000}, Shape{20000, 1}, Shape{5, 1000}, Shape{3, 9000},
        Shape{300, 130}, Shape{257, 127}, Shape{129, 129}, Shape{2, 3, 128},
        Shape{16, 8, 3, 3}, Shape{70, 5, 5, 5}, Shape{9000, 2, 2}}) {
    for (const std::uint32_t per_element : {1u, 2u}) {
      SCOPED_TRACE(
          absl::StrCat(absl::StrJoin(shape, "x"), " units ", per_element));
      const TileGrid grid = MakeTileGrid(shape, per_element);
      std::uint64_t count = per_element;
      for (const std::uint64_t n : shape) count *= n;
      ASSERT_EQ(grid.unit_count(), count);
      std::vector<int> seen(count);
      for (std::uint64_t t = 0; t < grid.tile_count(); ++t) {
        const TileBox box = grid.Box(t);
        ASSERT_GE(box.unit_count(), 1u);
        ASSERT_LE(box.unit_count(), kTileUnits);
        std::uint64_t before = 0;
        for (std::uint32_t local = 0; local < box.unit_count(); ++local) {
          const std::uint64_t unit = grid.FlatIndex(box, local);
          ASSERT_LT(unit, count);
          ASSERT_TRUE(local == 0 || unit > before);
          before = unit;
          ++seen[unit];
          const TileRange range = grid.TilesOf({unit, unit + 1});
          ASSERT_GE(t, range.first);
          ASSERT_LT(t - range.first, range.count);
        }
      }
      for (std::uint64_t u = 0; u < count; ++u) ASSERT_EQ(seen[u], 1) << u;
    }
  }
}

TEST(TileGridTest, TilesOfCoversTheBandsOfTheSlice) {
  const TileGrid grid = MakeTileGrid(Shape{300, 130}, 1);
  EXPECT_EQ(grid.TilesOf({0, 1}).count, 2u);
  EXPECT_EQ(grid.TilesOf({0, 128 * 130}).count, 2u);
  EXPECT_EQ(grid.TilesOf({0, 128 * 130 + 1}).count, 4u);
  EXPECT_EQ(grid.TilesOf({128 * 130, 300 * 130}).first, 2u);
  EXPECT_EQ(grid.TilesOf({0, 300 * 130}).count, grid.tile_count());
  // Beyond 2^32 units.
  const TileGrid large = MakeTileGrid(Shape{1u << 20, 1u << 13}, 1);
  const std::uint64_t unit = (std::uint64_t{1} << 33) - 5;
  EXPECT_EQ(large.TilesOf({unit, unit + 5}).first, large.tile_count() - 64);
  EXPECT_EQ(large.FlatIndex(large.Box(large.tile_count() - 1), 16383),
            (std::uint64_t{1} << 33) - 1);
}

TEST(TileGridTest, RunsAreTilesOfFullRowsOrOneRow) {
  EXPECT_TRUE(MakeTileGrid(Shape{100000}, 1).tiles_are_runs());
  EXPECT_TRUE(MakeTileGrid(Shape{9000, 3}, 1).tiles_are_runs());
  EXPECT_TRUE(MakeTileGrid(Shape{5, 1000}, 1).tiles_are_runs());
  EXPECT_FALSE(MakeTileGrid(Shape{300, 130}, 1).tiles_are_runs());
}

}  // namespace
}  // namespace kedge
