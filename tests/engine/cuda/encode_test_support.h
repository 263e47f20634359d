#ifndef KEDGE_TESTS_ENGINE_CUDA_ENCODE_TEST_SUPPORT_H_
#define KEDGE_TESTS_ENGINE_CUDA_ENCODE_TEST_SUPPORT_H_

// Batches for the encoder, in host memory, and what must come of them: shared
// by the emulated and the real kernels' tests.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "gtest/gtest.h"
#include "kedge/engine/device/kernel_tasks.h"
#include "kedge/format/codec.h"

namespace kedge::testing {

// How the units of a slice lie in memory.
enum class Layout {
  kContiguous,  // the slice alone, from a multiple of 16 bytes on
  kUnaligned,   // the same at some other element
  kRows,        // rows of a wider matrix, each at a multiple of 16 bytes
  kOddRows,     // and not
  kElements,    // every third element of a wider matrix
};

// What the changes of a slice are.
enum class Steps { kOne, kMostlyOne, kSmall, kAnything, kExtreme };

struct SliceCase {
  std::vector<std::uint64_t> shape;
  std::uint32_t unit_bytes = 2;
  std::uint32_t units_per_element = 1;
  // Units. {0, 0}: all of them.
  UnitRange slice;
  Layout old_layout = Layout::kContiguous;
  Layout new_layout = Layout::kContiguous;
  double density = 0.01;
  Steps steps = Steps::kMostlyOne;
  // Changes in rows of 128 units, not evenly.
  bool clustered = false;

  std::string ToString() const {
    return absl::StrCat(
        "shape ", absl::StrJoin(shape, "x"), " unit bytes ", unit_bytes, " x ",
        units_per_element, " slice ", slice.begin, "..", slice.end, " layouts ",
        static_cast<int>(old_layout), " ", static_cast<int>(new_layout),
        " density ", density, " steps ", static_cast<int>(steps));
  }
};

// Units in memory: `bytes` holds what `units` reaches and not a byte more, but
// for what is in front of the first unit to align it.
struct PlacedUnits {
  std::vector<std::byte> storage;
  std::size_t begin = 0;  // of what is reached
  std::size_t size = 0;
  StridedUnits units;  // base counts from `storage.data() + begin`, as address

  std::byte* At(std::uint64_t row, std::uint64_t col) {
    return const_cast<std::byte*>(units.At(row, col));
  }
};

inline PlacedUnits Place(std::mt19937_64& rng, const TileGrid& grid,
                         const UnitRange& slice, std::uint32_t unit_bytes,
                         std::uint32_t units_per_element, Layout layout) {
  PlacedUnits placed;
  const std::int64_t element = std::int64_t{unit_bytes} * units_per_element;
  const auto elements =
      static_cast<std::int64_t>(grid.cols / units_per_element);
  StridedUnits& units = placed.units;
  units.unit_bytes = unit_bytes;
  units.units_per_element = units_per_element;
  units.first_row = slice.begin / grid.cols;
  units.col_stride_bytes = layout == Layout::kElements ? 3 * element : element;
  switch (layout) {
    case Layout::kContiguous:
    case Layout::kUnaligned:
      units.row_stride_bytes = elements * element;
      break;
    case Layout::kRows:
      units.row_stride_bytes = (elements * element + 15) / 16 * 16 +
                               16 * static_cast<std::int64_t>(rng() % 3);
      break;
    case Layout::kOddRows:
      units.row_stride_bytes = elements * element + element;
      break;
    case Layout::kElements:
      units.row_stride_bytes = (3 * elements + 1) * element;
      break;
  }
  // The offsets of the first and the last unit from `base`.
  const auto offset = [&](std::uint64_t flat) {
    const std::uint64_t row = flat / grid.cols;
    const std::uint64_t col = flat % grid.cols;
    return static_cast<std::int64_t>(row - units.first_row) *
               units.row_stride_bytes +
           static_cast<std::int64_t>(col / units_per_element) *
               units.col_stride_bytes +
           static_cast<std::int64_t>(col % units_per_element * unit_bytes);
  };
  const std::int64_t first = offset(slice.begin);
  std::int64_t last = offset(slice.end - 1);
  for (std::uint64_t row = units.first_row; row < (slice.end - 1) / grid.cols;
       ++row) {
    last = std::max(last, offset((row + 1) * grid.cols - 1));
  }
  placed.size = static_cast<std::size_t>(last + unit_bytes - first);
  placed.storage.resize(placed.size + 32);
  // Rows are aligned if row `first_row` is.
  std::int64_t misalignment = 0;
  if (layout == Layout::kUnaligned || layout == Layout::kOddRows) {
    misalignment = element * static_cast<std::int64_t>(1 + rng() % 7) % 16;
  } else if (layout == Layout::kRows) {
    misalignment = first % 16;
  }
  const auto address = reinterpret_cast<std::uintptr_t>(placed.storage.data());
  placed.begin = (16 - address % 16) % 16 + misalignment;
  // Exact at the end, so that a sanitizer sees what lies behind.
  placed.storage.resize(placed.begin + placed.size);
  if (reinterpret_cast<std::uintptr_t>(placed.storage.data()) != address) {
    ADD_FAILURE() << "storage moved";
  }
  units.base = placed.storage.data() + placed.begin - first;
  return placed;
}

struct BuiltSlice {
  EncodeSlice task;
  PlacedUnits before;
  PlacedUnits after;
  std::vector<Change> changes;  // by index from the slice's begin
};

inline std::uint64_t NextValue(std::mt19937_64& rng, Steps steps,
                               std::uint32_t unit_bytes, std::uint64_t value) {
  const std::uint64_t mask = unit_bytes == 8
                                 ? ~std::uint64_t{0}
                                 : (std::uint64_t{1} << (8 * unit_bytes)) - 1;
  switch (steps) {
    case Steps::kOne:
      return (rng() % 2 == 0 ? value + 1 : value - 1) & mask;
    case Steps::kMostlyOne: {
      const std::uint64_t by = rng() % 10 == 0 ? 1 + rng() % 9 : 1;
      return (rng() % 2 == 0 ? value + by : value - by) & mask;
    }
    case Steps::kSmall:
      return (value + rng() % 40 - 20) & mask;
    case Steps::kAnything:
      return rng() & mask;
    case Steps::kExtreme:
      return rng() % 2 == 0 ? mask - rng() % 2 : rng() % 2;
  }
  return value;
}

inline BuiltSlice Build(std::mt19937_64& rng, const SliceCase& c) {
  BuiltSlice built;
  EncodeSlice& task = built.task;
  task.grid = MakeTileGrid(c.shape, c.units_per_element);
  task.slice =
      c.slice.end == 0 ? UnitRange{0, task.grid.unit_count()} : c.slice;
  built.before = Place(rng, task.grid, task.slice, c.unit_bytes,
                       c.units_per_element, c.old_layout);
  built.after = Place(rng, task.grid, task.slice, c.unit_bytes,
                      c.units_per_element, c.new_layout);
  // What lies between units differs and must not count.
  for (std::byte& b : built.before.storage) b = static_cast<std::byte>(rng());
  for (std::byte& b : built.after.storage) b = static_cast<std::byte>(rng());
  bool dense_row = false;
  for (std::uint64_t flat = task.slice.begin; flat < task.slice.end; ++flat) {
    if (flat % 128 == 0) dense_row = rng() % 16 == 0;
    const std::uint64_t row = flat / task.grid.cols;
    const std::uint64_t col = flat % task.grid.cols;
    std::uint64_t value = rng();
    if (c.steps == Steps::kExtreme)
      value = rng() % 2 == 0 ? 0 : ~std::uint64_t{0};
    const std::uint64_t mask = (std::uint64_t{1} << (8 * c.unit_bytes)) - 1;
    value &= mask;
    const double density =
        c.clustered ? (dense_row ? 0.8 : c.density / 16) : c.density;
    std::uint64_t next = value;
    if (std::generate_canonical<double, 30>(rng) < density) {
      next = NextValue(rng, c.steps, c.unit_bytes, value);
    }
    std::memcpy(built.before.At(row, col), &value, c.unit_bytes);
    std::memcpy(built.after.At(row, col), &next, c.unit_bytes);
    if (next != value) {
      built.changes.push_back(
          {static_cast<std::uint32_t>(flat - task.slice.begin),
           static_cast<std::int64_t>(next) - static_cast<std::int64_t>(value)});
    }
  }
  task.old_units = built.before.units;
  task.new_units = built.after.units;
  return built;
}

// The slices of a batch, and where its results go.
struct BuiltBatch {
  std::vector<BuiltSlice> built;
  std::vector<EncodeSlice> slices;
  std::uint64_t tile_count = 0;

  void Add(BuiltSlice slice) {
    slice.task.first_tile = tile_count;
    tile_count += slice.task.grid.TilesOf(slice.task.slice).count;
    slices.push_back(slice.task);
    built.push_back(std::move(slice));
  }
  std::uint64_t arena_bound() const {
    std::uint64_t bytes = 0;
    for (const EncodeSlice& slice : slices) {
      const TileRange tiles = slice.grid.TilesOf(slice.slice);
      for (std::uint64_t t = 0; t < tiles.count; ++t) {
        bytes += MaxTilePayload(slice.grid.Box(tiles.first + t).unit_count(),
                                slice.old_units.unit_bytes);
      }
    }
    return bytes;
  }
};

// What the encoder left, in host memory.
struct BatchResults {
  std::vector<EncodedTile> tiles;
  std::vector<std::byte> arena;  // as many bytes as the batch had
  EncodeTotals totals;
};

inline constexpr std::byte kArenaPoison{0xa5};

// Compares with the plain encoder, tile by tile and as records.
inline void ExpectPlainResults(const BuiltBatch& batch, const L61Key& key,
                               const BatchResults& results) {
  ASSERT_EQ(results.tiles.size(), batch.tile_count);
  EncodeTotals totals;
  std::vector<std::pair<std::uint64_t, std::uint64_t>> taken;
  bool complete = true;
  for (const BuiltSlice& slice : batch.built) {
    const TileGrid& grid = slice.task.grid;
    const std::uint32_t unit_bytes = slice.task.old_units.unit_bytes;
    const TileRange tiles = grid.TilesOf(slice.task.slice);
    std::vector<std::vector<Change>> by_tile(tiles.count);
    for (const Change& change : slice.changes) {
      const std::uint64_t flat = slice.task.slice.begin + change.index;
      const std::uint64_t row = flat / grid.cols;
      const std::uint64_t col = flat % grid.cols;
      const std::uint64_t tile =
          row / grid.tile_rows * grid.tiles_per_band + col / grid.tile_cols;
      const TileBox box = grid.Box(tile);
      by_tile[tile - tiles.first].push_back(
          {static_cast<std::uint32_t>((row - box.row) * box.width +
                                      (col - box.col)),
           change.difference});
    }
    RecordBuilder builder;
    builder.Start(tiles);
    for (std::uint64_t t = 0; t < tiles.count; ++t) {
      SCOPED_TRACE(absl::StrCat("tile ", t, " of the slice, ",
                                by_tile[t].size(), " changes"));
      const EncodedTile& found = results.tiles[slice.task.first_tile + t];
      ASSERT_EQ(found.reserved, 0u);
      ASSERT_EQ(found.nnz, by_tile[t].size());
      if (by_tile[t].empty()) {
        ASSERT_EQ(found.bytes, 0u);
        ASSERT_EQ(found.l61, 0u);
        continue;
      }
      const TileBox box = grid.Box(tiles.first + t);
      std::vector<std::byte> payload;
      const TileHeader header =
          EncodeTile(by_tile[t], box.unit_count(), unit_bytes, &payload);
      std::uint64_t l61 = 0;
      for (const Change& change : by_tile[t]) {
        l61 = L61Add(l61, L61OfChange(key, grid.FlatIndex(box, change.index),
                                      unit_bytes, change.difference));
      }
      ASSERT_EQ(found.mode, static_cast<std::uint32_t>(header.mode));
      ASSERT_EQ(found.a, header.a);
      ASSERT_EQ(found.b, header.b);
      ASSERT_EQ(found.bytes, header.bytes);
      ASSERT_EQ(found.l61, l61);
      ASSERT_LE(found.bytes, MaxTilePayload(box.unit_count(), unit_bytes));
      totals.arena_bytes += (header.bytes + 7) / 8 * 8;
      totals.nnz += by_tile[t].size();
      ++totals.changed_tiles;
      if (found.payload == kNoPayload) {
        complete = false;
        continue;
      }
      const std::uint64_t at = std::uint64_t{found.payload} * kArenaAlignment;
      ASSERT_LE(at, results.arena.size());
      ASSERT_LE(payload.size(), results.arena.size() - at);
      taken.emplace_back(at, at + (payload.size() + 7) / 8 * 8);
      ASSERT_TRUE(std::equal(payload.begin(), payload.end(),
                             results.arena.begin() + at));
      builder.payload()->insert(builder.payload()->end(),
                                results.arena.begin() + at,
                                results.arena.begin() + at + found.bytes);
      builder.AddTile(
          tiles.first + t,
          {static_cast<TileMode>(found.mode), found.a, found.b, found.bytes},
          found.nnz);
    }
    if (complete && !builder.empty()) {
      std::vector<std::byte> record;
      record.resize(builder.Finish(&record));
      ASSERT_EQ(record, EncodeRecordScalar(grid, slice.task.slice, unit_bytes,
                                           slice.changes));
    }
  }
  EXPECT_EQ(results.totals.arena_bytes, totals.arena_bytes);
  EXPECT_EQ(results.totals.nnz, totals.nnz);
  EXPECT_EQ(results.totals.changed_tiles, totals.changed_tiles);
  EXPECT_LE(results.totals.heavy_tiles, totals.changed_tiles);
  if (results.totals.arena_bytes <= results.arena.size()) {
    EXPECT_TRUE(complete);
  }
  // Payloads do not overlap, and nothing else of the arena is written.
  std::sort(taken.begin(), taken.end());
  std::uint64_t end = 0;
  taken.emplace_back(results.arena.size(), 0);
  for (const auto& [begin, next] : taken) {
    ASSERT_GE(begin, end);
    for (std::uint64_t i = end; i < begin; ++i) {
      ASSERT_EQ(results.arena[i], kArenaPoison) << "arena byte " << i;
    }
    end = next;
  }
}

}  // namespace kedge::testing

#endif  // KEDGE_TESTS_ENGINE_CUDA_ENCODE_TEST_SUPPORT_H_
