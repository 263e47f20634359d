// Goal: Device::Encode gives, tile by tile, what the plain encoder gives, so
// that records made on any device are the same bytes. Method: property tests
// with printed seeds over dtype x layout of old and new x density x shape, many
// slices a batch; records assembled from tiles against SliceEncoder's; poisoned
// outputs, guards around the arena.

#include <algorithm>
#include <limits>
#include <random>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "gtest/gtest.h"
#include "kedge/engine/cpu/slice_encoder.h"
#include "kedge/format/codec.h"
#include "kedge/format/l61.h"
#include "kedge/tests/engine/device/device_test_support.h"

namespace kedge {
namespace {

using testing::DeviceArray;
using testing::DeviceBuffer;
using testing::DeviceTest;
using testing::FillRandom;
using testing::kUnitTypes;
using testing::Must;
using testing::Perturb;
using testing::Shape;
using testing::UnitType;
using testing::Values;

using EncodeTest = DeviceTest;

constexpr double kDensities[] = {0,   0.0001, 0.003, 0.01, 0.05,
                                 0.2, 0.3,    0.6,   1};

// Where the units of a slice lie.
enum class SliceLayout {
  kContiguous,
  kPadded,       // rows of a packed parameter
  kTransposed,   // a column after the other
  kInterleaved,  // every third element of a row
};
constexpr SliceLayout kSliceLayouts[] = {
    SliceLayout::kContiguous, SliceLayout::kPadded, SliceLayout::kTransposed,
    SliceLayout::kInterleaved};

// A slice before and after a step, on the host and on the device.
struct SliceCase {
  std::string name;
  UnitType type;
  TileGrid grid;
  UnitRange slice;
  std::vector<std::byte> before;  // contiguous
  std::vector<std::byte> after;
  std::vector<DeviceBuffer> memory;
  EncodeSlice on_device;
};

// Puts contiguous `units` of the slice in memory of their own. Bytes between
// them are random, and differ between old and new.
StridedUnits Place(Device& device, std::mt19937_64& rng, SliceCase& c,
                   const std::vector<std::byte>& units, SliceLayout layout) {
  const std::uint64_t element = c.type.element_bytes();
  const std::uint64_t elements = c.grid.cols / c.type.units_per_element;
  StridedUnits place;
  place.unit_bytes = c.type.unit_bytes;
  place.units_per_element = c.type.units_per_element;
  place.first_row = c.slice.begin / c.grid.cols;
  const std::uint64_t last_row = (c.slice.end - 1) / c.grid.cols;
  const std::uint64_t rows = last_row - place.first_row + 1;
  std::uint64_t row_stride = elements * element;
  std::uint64_t col_stride = element;
  switch (layout) {
    case SliceLayout::kContiguous:
      break;
    case SliceLayout::kPadded:
      row_stride += (1 + rng() % 9) * element;
      break;
    case SliceLayout::kTransposed:
      row_stride = element;
      col_stride = rows * element;
      break;
    case SliceLayout::kInterleaved:
      col_stride = 3 * element;
      row_stride = elements * col_stride;
      break;
  }
  place.row_stride_bytes = static_cast<std::int64_t>(row_stride);
  place.col_stride_bytes = static_cast<std::int64_t>(col_stride);
  // Offsets from `base` of the slice's first and last unit; memory is what lies
  // between, so that `base` may stand before it.
  std::int64_t low = std::numeric_limits<std::int64_t>::max();
  std::int64_t high = 0;
  const auto offset = [&](std::uint64_t unit) {
    const std::uint64_t row = unit / c.grid.cols - place.first_row;
    const std::uint64_t col = unit % c.grid.cols;
    return static_cast<std::int64_t>(
        row * row_stride + col / c.type.units_per_element * col_stride +
        col % c.type.units_per_element * c.type.unit_bytes);
  };
  const std::uint64_t run =
      layout == SliceLayout::kContiguous ? c.slice.count() : std::uint64_t{1};
  const std::uint64_t step = std::max<std::uint64_t>(run - 1, 1);
  for (std::uint64_t unit = c.slice.begin; unit < c.slice.end; unit += step) {
    low = std::min<std::int64_t>(low, offset(unit));
    high = std::max<std::int64_t>(high, offset(unit));
  }
  std::vector<std::byte> bytes(high - low + c.type.unit_bytes);
  FillRandom(rng, bytes);
  for (std::uint64_t i = 0; i < c.slice.count(); i += run) {
    std::memcpy(bytes.data() + (offset(c.slice.begin + i) - low),
                units.data() + i * c.type.unit_bytes, run * c.type.unit_bytes);
  }
  // Aligned as its units are, and no more.
  c.memory.emplace_back(device, bytes, (rng() % 16) * c.type.unit_bytes);
  place.base = c.memory.back().data() - low;
  return place;
}

SliceCase MakeCase(Device& device, std::mt19937_64& rng, const Shape& shape,
                   const UnitType& type, double density, SliceLayout old_layout,
                   SliceLayout new_layout) {
  SliceCase c;
  c.type = type;
  c.grid = MakeTileGrid(shape, type.units_per_element);
  c.slice = testing::RandomSlice(rng, c.grid);
  c.name = absl::StrCat(type.name, " ", absl::StrJoin(shape, "x"), " [",
                        c.slice.begin, ", ", c.slice.end, ") density ", density,
                        " layouts ", static_cast<int>(old_layout), " ",
                        static_cast<int>(new_layout));
  c.before.resize(c.slice.count() * type.unit_bytes);
  FillRandom(rng, c.before);
  c.after = c.before;
  Perturb(rng, density, static_cast<Values>(rng() % 3), type.unit_bytes,
          c.after);
  c.memory.reserve(2);
  c.on_device.grid = c.grid;
  c.on_device.slice = c.slice;
  c.on_device.old_units = Place(device, rng, c, c.before, old_layout);
  c.on_device.new_units = Place(device, rng, c, c.after, new_layout);
  return c;
}

struct BatchResult {
  std::vector<EncodedTile> tiles;
  std::vector<std::byte> arena;
  EncodeTotals totals;
};

BatchResult EncodeOn(Device& device, const L61Key& key,
                     std::vector<SliceCase>& cases, std::uint64_t arena_bytes) {
  std::vector<EncodeSlice> slices;
  std::uint64_t tile_count = 0;
  for (SliceCase& c : cases) {
    c.on_device.first_tile = tile_count;
    slices.push_back(c.on_device);
    tile_count += c.grid.TilesOf(c.slice).count;
  }
  const DeviceMemory table = Must(device.MakeL61Table(key));
  const DeviceArray<EncodeSlice> slices_there(device, slices);
  const DeviceArray<EncodedTile> tiles(device, tile_count);
  const DeviceArray<EncodeTotals> totals(device, 1);
  const DeviceArray<std::uint32_t> scratch(device, tile_count);
  const DeviceBuffer arena(device, arena_bytes);
  EncodeBatch batch;
  batch.slices = slices_there.data();
  batch.slice_count = static_cast<std::uint32_t>(slices.size());
  batch.tile_count = tile_count;
  batch.tiles = tiles.data();
  batch.arena = arena.data();
  batch.arena_bytes = arena_bytes;
  batch.totals = totals.data();
  batch.scratch = scratch.data();
  batch.l61 = {table.as<std::uint64_t>(), key};
  const OwnedStream stream = Must(device.CreateStream());
  Must(device.Encode(batch, stream.get()));
  Must(device.WaitForStream(stream.get()));
  BatchResult result{tiles.Read(), arena.Read(), totals.Read()[0]};
  EXPECT_TRUE(arena.GuardsIntact());
  EXPECT_TRUE(tiles.GuardsIntact());
  EXPECT_TRUE(totals.GuardsIntact());
  EXPECT_TRUE(scratch.GuardsIntact());
  for (const SliceCase& c : cases) {
    for (const DeviceBuffer& memory : c.memory) {
      EXPECT_TRUE(memory.GuardsIntact()) << c.name;
    }
  }
  return result;
}

std::uint64_t AlignUp(std::uint64_t bytes) {
  return (bytes + kArenaAlignment - 1) / kArenaAlignment * kArenaAlignment;
}

// What the device says of a slice, against the plain encoder. Tiles without
// room in the arena are skipped if `may_lack_room`; returns how many.
void ExpectSlice(const SliceCase& c, const L61Key& key,
                 const BatchResult& result, std::uint64_t arena_bytes,
                 EncodeTotals* totals, std::vector<UnitRange>* places,
                 std::uint64_t* without_room) {
  SCOPED_TRACE(c.name);
  SliceEncoder encoder(key);
  std::vector<std::byte> expected;
  const EncodedSlice encoded =
      encoder.Encode(c.grid, c.slice, c.type.unit_bytes, c.before.data(),
                     c.after.data(), &expected);
  const TileRange range = c.grid.TilesOf(c.slice);
  RecordBuilder builder;
  builder.Start(range);
  std::uint64_t l61 = 0;
  std::uint64_t nnz = 0;
  bool whole = true;
  std::vector<Change> changes;
  for (std::uint64_t i = 0; i < range.count; ++i) {
    const EncodedTile& tile = result.tiles[c.on_device.first_tile + i];
    SCOPED_TRACE(absl::StrCat("tile ", range.first + i));
    if (tile.bytes == 0) {
      ASSERT_EQ(tile.nnz, 0u);
      ASSERT_EQ(tile.l61, 0u);
      continue;
    }
    const TileBox box = c.grid.Box(range.first + i);
    ASSERT_LE(tile.bytes, MaxTilePayload(box.unit_count(), c.type.unit_bytes));
    ASSERT_LT(tile.l61, kL61Prime);
    l61 = L61Add(l61, tile.l61);
    nnz += tile.nnz;
    totals->arena_bytes += AlignUp(tile.bytes);
    totals->nnz += tile.nnz;
    ++totals->changed_tiles;
    if (tile.payload == kNoPayload) {
      whole = false;
      ++*without_room;
      continue;
    }
    const std::uint64_t at = std::uint64_t{tile.payload} * kArenaAlignment;
    ASSERT_LE(at, arena_bytes);
    ASSERT_LE(tile.bytes, arena_bytes - at);
    places->push_back({at, at + tile.bytes});
    const std::span<const std::byte> payload(result.arena.data() + at,
                                             tile.bytes);
    const TileHeader header{static_cast<TileMode>(tile.mode), tile.a, tile.b,
                            tile.bytes};
    const TileView view{range.first + i, header.mode, header.a, header.b,
                        payload};
    const absl::Status decoded =
        DecodeTile(view, box.unit_count(), c.type.unit_bytes, &changes);
    ASSERT_TRUE(decoded.ok()) << decoded;
    ASSERT_EQ(changes.size(), tile.nnz);
    std::uint64_t tile_l61 = 0;
    for (const Change& change : changes) {
      tile_l61 =
          L61Add(tile_l61, L61OfChange(key, c.grid.FlatIndex(box, change.index),
                                       c.type.unit_bytes, change.difference));
    }
    ASSERT_EQ(tile.l61, tile_l61);
    builder.payload()->insert(builder.payload()->end(), payload.begin(),
                              payload.end());
    builder.AddTile(range.first + i, header, tile.nnz);
  }
  EXPECT_EQ(nnz, encoded.nnz);
  EXPECT_EQ(l61, encoded.l61);
  if (!whole) return;
  std::vector<std::byte> record;
  if (!builder.empty()) {
    EXPECT_EQ(builder.Finish(&record), encoded.record_bytes);
  }
  EXPECT_TRUE(record == expected) << "the record's bytes differ";
}

// Room for all tiles of all cases whatever they hold.
std::uint64_t FullArena(const std::vector<SliceCase>& cases) {
  std::uint64_t bytes = 0;
  for (const SliceCase& c : cases) {
    const TileRange range = c.grid.TilesOf(c.slice);
    for (std::uint64_t i = 0; i < range.count; ++i) {
      bytes += MaxTilePayload(c.grid.Box(range.first + i).unit_count(),
                              c.type.unit_bytes);
    }
  }
  return bytes;
}

// Returns the totals that the device gave.
EncodeTotals ExpectBatch(Device& device, const L61Key& key,
                         std::vector<SliceCase>& cases,
                         std::uint64_t arena_bytes,
                         std::uint64_t* without_room) {
  const BatchResult result = EncodeOn(device, key, cases, arena_bytes);
  EncodeTotals totals;
  std::vector<UnitRange> places;
  for (const SliceCase& c : cases) {
    ExpectSlice(c, key, result, arena_bytes, &totals, &places, without_room);
    if (::testing::Test::HasFatalFailure()) return result.totals;
  }
  std::sort(
      places.begin(), places.end(),
      [](const UnitRange& x, const UnitRange& y) { return x.begin < y.begin; });
  for (std::size_t i = 1; i < places.size(); ++i) {
    EXPECT_LE(places[i - 1].end, places[i].begin) << "payloads overlap";
  }
  EXPECT_EQ(result.totals.arena_bytes, totals.arena_bytes);
  EXPECT_EQ(result.totals.nnz, totals.nnz);
  EXPECT_EQ(result.totals.changed_tiles, totals.changed_tiles);
  return result.totals;
}

TEST_F(EncodeTest, RecordsAreThePlainOnesInEveryDtypeDensityAndShape) {
  for (const UnitType& type : kUnitTypes) {
    std::uint64_t seed = 100 * type.element_bytes();
    std::size_t turn = 0;
    for (const double density : kDensities) {
      std::mt19937_64 rng(++seed);
      SCOPED_TRACE(absl::StrCat("seed ", seed));
      std::vector<SliceCase> cases;
      for (const Shape& shape :
           testing::DeviceShapes(density == 0.003 || density == 0.3)) {
        // Sanitizer builds take every seventh.
        if (++turn % static_cast<std::size_t>(kSanitized ? 7 : 1) != 0)
          continue;
        cases.push_back(MakeCase(device(), rng, shape, type, density,
                                 SliceLayout::kContiguous,
                                 SliceLayout::kContiguous));
      }
      std::uint64_t without_room = 0;
      ExpectBatch(device(), L61Key::FromSeed(seed), cases, FullArena(cases),
                  &without_room);
      EXPECT_EQ(without_room, 0u);
      if (HasFailure()) return;
    }
  }
}

TEST_F(EncodeTest, OldAndNewMayLieInAnyLayoutAndDtypesShareABatch) {
  const std::vector<Shape> shapes = {{1},       {7},        {300, 130},
                                     {5, 1000}, {900, 7},   {257, 127},
                                     {40000},   {140, 900}, {131, 257}};
  for (std::uint64_t seed = 0; seed < std::uint64_t(Rounds(20)); ++seed) {
    std::mt19937_64 rng(seed);
    SCOPED_TRACE(absl::StrCat("seed ", seed));
    std::vector<SliceCase> cases;
    for (const SliceLayout old_layout : kSliceLayouts) {
      for (const SliceLayout new_layout : kSliceLayouts) {
        cases.push_back(MakeCase(device(), rng, shapes[rng() % shapes.size()],
                                 kUnitTypes[rng() % std::size(kUnitTypes)],
                                 kDensities[rng() % std::size(kDensities)],
                                 old_layout, new_layout));
      }
    }
    std::uint64_t without_room = 0;
    ExpectBatch(device(), L61Key::FromSeed(seed), cases, FullArena(cases),
                &without_room);
    EXPECT_EQ(without_room, 0u);
    if (HasFailure()) return;
  }
}

TEST_F(EncodeTest, AFullArenaIsSaidOfEachTileAndTotalsSayWhatItTakes) {
  for (std::uint64_t seed = 0; seed < (kSanitized ? 1u : 4u); ++seed) {
    std::mt19937_64 rng(seed);
    SCOPED_TRACE(absl::StrCat("seed ", seed));
    std::vector<SliceCase> cases;
    for (int i = 0; i < 6; ++i) {
      cases.push_back(MakeCase(
          device(), rng, {300, 400}, kUnitTypes[rng() % std::size(kUnitTypes)],
          0.05, SliceLayout::kContiguous, SliceLayout::kContiguous));
    }
    const L61Key key = L61Key::FromSeed(seed);
    std::uint64_t without_room = 0;
    const EncodeTotals all =
        ExpectBatch(device(), key, cases, FullArena(cases), &without_room);
    ASSERT_EQ(without_room, 0u);
    // As much as is asked for is enough.
    const EncodeTotals exact =
        ExpectBatch(device(), key, cases, all.arena_bytes, &without_room);
    ASSERT_EQ(without_room, 0u);
    EXPECT_EQ(exact.arena_bytes, all.arena_bytes);
    for (const std::uint64_t room :
         {all.arena_bytes - kArenaAlignment, all.arena_bytes / 2,
          2 * kArenaAlignment, std::uint64_t{0}}) {
      without_room = 0;
      const EncodeTotals some =
          ExpectBatch(device(), key, cases, room, &without_room);
      EXPECT_GT(without_room, 0u);
      EXPECT_EQ(some.arena_bytes, all.arena_bytes);
      EXPECT_EQ(some.nnz, all.nnz);
      if (HasFailure()) return;
    }
  }
}

TEST_F(EncodeTest, EqualWeightsHaveNoPayloadAndEmptyBatchesAreOrdinary) {
  std::mt19937_64 rng(5);
  std::vector<SliceCase> cases;
  std::uint64_t without_room = 0;
  EncodeTotals totals =
      ExpectBatch(device(), L61Key::FromSeed(5), cases, 64, &without_room);
  EXPECT_EQ(totals.nnz, 0u);
  EXPECT_EQ(totals.arena_bytes, 0u);
  for (const UnitType& type : kUnitTypes) {
    cases.push_back(MakeCase(device(), rng, {700, 300}, type, 0,
                             SliceLayout::kContiguous, SliceLayout::kPadded));
  }
  totals = ExpectBatch(device(), L61Key::FromSeed(5), cases, 64, &without_room);
  EXPECT_EQ(totals.nnz, 0u);
  EXPECT_EQ(totals.changed_tiles, 0u);
  EXPECT_EQ(totals.arena_bytes, 0u);
}

// Every count of changes in a tile around those where the coder's choices
// change: 0, 1, the quarter from which a tile may be dense, all.
TEST_F(EncodeTest, TilesOfEveryCountAreThePlainOnes) {
  std::mt19937_64 rng(6);
  const L61Key key = L61Key::FromSeed(6);
  for (const UnitType& type : kUnitTypes) {
    std::vector<SliceCase> cases;
    for (const std::uint64_t units :
         {1u, 2u, 3u, 31u, 33u, 100u, 128u, 1000u}) {
      const std::uint64_t last =
          units < 130 ? units : std::min<std::uint64_t>(units, 40);
      for (std::uint64_t count = 0; count <= last; ++count) {
        if (kSanitized && count % 8 > 1) continue;
        SliceCase c =
            MakeCase(device(), rng, {units}, type, 0, SliceLayout::kContiguous,
                     SliceLayout::kContiguous);
        c.slice = {0, c.grid.unit_count()};
        c.name = absl::StrCat(type.name, " ", count, " of ", units);
        c.before.assign(c.slice.count() * type.unit_bytes, std::byte{0x40});
        c.after = c.before;
        std::vector<std::uint64_t> order(c.slice.count());
        for (std::uint64_t i = 0; i < order.size(); ++i) order[i] = i;
        std::shuffle(order.begin(), order.end(), rng);
        for (std::uint64_t i = 0; i < std::min(count, c.slice.count()); ++i) {
          c.after[order[i] * type.unit_bytes] ^= std::byte{1};
        }
        c.memory.clear();
        c.on_device.slice = c.slice;
        c.on_device.old_units =
            Place(device(), rng, c, c.before, SliceLayout::kContiguous);
        c.on_device.new_units =
            Place(device(), rng, c, c.after, SliceLayout::kContiguous);
        cases.push_back(std::move(c));
      }
    }
    std::uint64_t without_room = 0;
    ExpectBatch(device(), key, cases, FullArena(cases), &without_room);
    if (HasFailure()) return;
  }
}

// A slice far beyond 2^32 units of its tensor keeps its place.
TEST_F(EncodeTest, SlicesBeyondFourBillionUnitsKeepTheirPlace) {
  std::mt19937_64 rng(7);
  std::vector<SliceCase> cases;
  for (const UnitType& type : kUnitTypes) {
    SliceCase c;
    c.type = type;
    c.grid = MakeTileGrid(Shape{3'000'000, 4001}, type.units_per_element);
    const std::uint64_t per_element = type.units_per_element;
    c.slice = {std::uint64_t{11'999'000'123} / per_element * per_element,
               kSanitized ? 11'999'030'001 : 11'999'300'001};
    c.name = absl::StrCat(type.name, " at 2^33");
    c.before.resize(c.slice.count() * type.unit_bytes);
    FillRandom(rng, c.before);
    c.after = c.before;
    Perturb(rng, 0.01, Values::kSmall, type.unit_bytes, c.after);
    c.memory.reserve(2);
    c.on_device.grid = c.grid;
    c.on_device.slice = c.slice;
    c.on_device.old_units =
        Place(device(), rng, c, c.before, SliceLayout::kContiguous);
    c.on_device.new_units =
        Place(device(), rng, c, c.after, SliceLayout::kPadded);
    cases.push_back(std::move(c));
  }
  std::uint64_t without_room = 0;
  ExpectBatch(device(), L61Key::FromSeed(7), cases, FullArena(cases),
              &without_room);
  EXPECT_EQ(without_room, 0u);
}

}  // namespace
}  // namespace kedge
