#ifndef KEDGE_FORMAT_TILE_GRID_H_
#define KEDGE_FORMAT_TILE_GRID_H_

// Where the tiles of a tensor lie. See spec/segment.md, "Tiles".
//
// A tensor is seen as a matrix [rows, cols] of units (dtype.h): dimensions are
// folded from the right until cols >= 128, but the first one always stays a
// row dimension; a tensor of rank 0 or 1 is one row. Tiles are boxes of at most
// 16,384 units on a grid that is global to the tensor, so that a slice held by
// a trainer rank, a box held by an inference engine and an fp8 scale block each
// touch only their own tiles.

#include <cstdint>
#include <span>

#include "kedge/format/host_device.h"
#include "kedge/format/limits.h"

namespace kedge {

// The units [row, row + height) x [col, col + width) of the matrix.
// A unit's tile-local index is (r - row) * width + (c - col).
struct TileBox {
  std::uint64_t row = 0;
  std::uint64_t col = 0;
  std::uint32_t height = 0;
  std::uint32_t width = 0;

  KEDGE_HOST_DEVICE std::uint32_t unit_count() const { return height * width; }
};

// A flat, half-open range of units of one tensor, in row-major order.
struct UnitRange {
  std::uint64_t begin = 0;
  std::uint64_t end = 0;

  KEDGE_HOST_DEVICE std::uint64_t count() const { return end - begin; }
};

// The tiles of the bands that a slice touches: [first, first + count).
struct TileRange {
  std::uint64_t first = 0;
  std::uint64_t count = 0;
};

struct TileGrid {
  std::uint64_t rows = 0;  // units; rows * cols is the tensor's unit count
  std::uint64_t cols = 0;
  std::uint32_t tile_rows = 0;  // extents of a tile that no edge clips
  std::uint32_t tile_cols = 0;
  std::uint64_t tiles_per_band = 0;  // tiles side by side in tile_rows rows
  std::uint64_t band_count = 0;

  KEDGE_HOST_DEVICE std::uint64_t unit_count() const { return rows * cols; }
  KEDGE_HOST_DEVICE std::uint64_t tile_count() const {
    return tiles_per_band * band_count;
  }

  // `tile` < tile_count().
  KEDGE_HOST_DEVICE TileBox Box(std::uint64_t tile) const {
    TileBox box;
    const std::uint64_t band = tile / tiles_per_band;
    box.row = band * tile_rows;
    box.col = (tile - band * tiles_per_band) * tile_cols;
    box.height = rows - box.row < tile_rows
                     ? static_cast<std::uint32_t>(rows - box.row)
                     : tile_rows;
    box.width = cols - box.col < tile_cols
                    ? static_cast<std::uint32_t>(cols - box.col)
                    : tile_cols;
    return box;
  }

  // The flat index of a unit of `box`. `local` < box.unit_count().
  KEDGE_HOST_DEVICE std::uint64_t FlatIndex(const TileBox& box,
                                            std::uint32_t local) const {
    const std::uint32_t r = local / box.width;
    return (box.row + r) * cols + box.col + (local - r * box.width);
  }

  // The bands that `slice`, a non-empty range within the tensor, touches.
  KEDGE_HOST_DEVICE TileRange TilesOf(const UnitRange& slice) const {
    const std::uint64_t band_units = cols * tile_rows;
    const std::uint64_t first = slice.begin / band_units;
    const std::uint64_t last = (slice.end - 1) / band_units;
    return {first * tiles_per_band, (last - first + 1) * tiles_per_band};
  }

  // Whether tiles are contiguous runs of the tensor (full rows, or one row).
  KEDGE_HOST_DEVICE bool tiles_are_runs() const {
    return rows == 1 || tile_cols >= cols;
  }
};

// The grid of a tensor of `shape` whose elements are `units_per_element` (1 or
// 2) units each; the last dimension counts the units. A tensor without elements
// has no tiles. The product of the shape fits in limits.h.
TileGrid MakeTileGrid(std::span<const std::uint64_t> shape,
                      std::uint32_t units_per_element);

}  // namespace kedge

#endif  // KEDGE_FORMAT_TILE_GRID_H_
