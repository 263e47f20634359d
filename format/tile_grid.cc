#include "kedge/format/tile_grid.h"

#include <algorithm>

namespace kedge {

TileGrid MakeTileGrid(std::span<const std::uint64_t> shape,
                      std::uint32_t units_per_element) {
  constexpr std::uint64_t kBox = 128;
  TileGrid grid;
  grid.rows = 1;
  grid.cols = units_per_element;
  std::size_t kept = shape.size();  // dimensions not folded into cols
  if (kept > 0) {
    grid.cols *= shape[--kept];
    while (grid.cols < kBox && kept > 1) grid.cols *= shape[--kept];
  }
  for (std::size_t i = 0; i < kept; ++i) grid.rows *= shape[i];
  if (grid.rows == 0 || grid.cols == 0) return TileGrid{};

  if (grid.cols < kBox) {
    grid.tile_cols = static_cast<std::uint32_t>(grid.cols);
    grid.tile_rows =
        static_cast<std::uint32_t>(std::min(grid.rows, kTileUnits / grid.cols));
  } else {
    const std::uint64_t height = std::min(grid.rows, kBox);
    grid.tile_rows = static_cast<std::uint32_t>(height);
    grid.tile_cols = static_cast<std::uint32_t>(kBox * (kBox / height));
  }
  grid.tiles_per_band = (grid.cols + grid.tile_cols - 1) / grid.tile_cols;
  grid.band_count = (grid.rows + grid.tile_rows - 1) / grid.tile_rows;
  return grid;
}

}  // namespace kedge
