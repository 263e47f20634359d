// Goal: Device::Apply turns old weights into new ones in every layout, checks
// what CheckRecord checks, and finds every malformed tile without writing
// outside a box or for a bad tile. Method: property tests with printed seeds
// over dtype x layout x density x shape against engine/cpu, many records a
// batch; mutated payloads against the plain decoder; guards around all targets.

#include <algorithm>
#include <optional>
#include <random>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "gtest/gtest.h"
#include "kedge/engine/cpu/record_apply.h"
#include "kedge/engine/cpu/slice_encoder.h"
#include "kedge/format/codec.h"
#include "kedge/format/l61.h"
#include "kedge/tests/engine/device/device_test_support.h"

namespace kedge {
namespace {

using testing::BoxPlace;
using testing::DeviceArray;
using testing::DeviceBuffer;
using testing::DeviceTest;
using testing::FillBox;
using testing::FillRandom;
using testing::kLayouts;
using testing::kUnitTypes;
using testing::Layout;
using testing::LoadUnit;
using testing::Must;
using testing::Perturb;
using testing::PlaceBox;
using testing::Shape;
using testing::StoreUnit;
using testing::UnitType;
using testing::Values;

using ApplyTest = DeviceTest;
using ApplyCheckTest = DeviceTest;
using MalformedTileTest = DeviceTest;

constexpr std::uint64_t kPayloadSlack = 16;

// A tensor before and after a step, and the record between them.
struct Step {
  std::string name;
  UnitType type;
  TileGrid grid;
  UnitRange slice;
  std::vector<std::byte> before;  // the whole tensor
  std::vector<std::byte> after;
  std::vector<std::byte> record;  // empty if nothing changed
};

Step MakeStep(std::mt19937_64& rng, const Shape& shape, const UnitType& type,
              double density, Values values, bool whole = false) {
  Step step;
  step.type = type;
  step.grid = MakeTileGrid(shape, type.units_per_element);
  step.slice = whole ? UnitRange{0, step.grid.unit_count()}
                     : testing::RandomSlice(rng, step.grid);
  step.name = absl::StrCat(type.name, " ", absl::StrJoin(shape, "x"), " [",
                           step.slice.begin, ", ", step.slice.end, ") density ",
                           density);
  step.before.resize(step.grid.unit_count() * type.unit_bytes);
  FillRandom(rng, step.before);
  step.after = step.before;
  const std::uint64_t begin = step.slice.begin * type.unit_bytes;
  Perturb(rng, density, values, type.unit_bytes,
          std::span(step.after)
              .subspan(begin, step.slice.count() * type.unit_bytes));
  SliceEncoder encoder(L61Key::FromSeed(0));
  const EncodedSlice encoded = encoder.Encode(
      step.grid, step.slice, type.unit_bytes, step.before.data() + begin,
      step.after.data() + begin, &step.record);
  step.record.resize(encoded.record_bytes);  // without its padding
  return step;
}

// A batch as the host makes it, before it goes to the device.
struct HostBatch {
  std::vector<ApplyTile> tiles;
  std::vector<struct ApplyRecord> records;
  std::vector<BoxTarget> boxes;
  std::vector<std::byte> payloads;

  // Adds a record and the boxes it goes to.
  void Add(const Step& step, const std::vector<BoxTarget>& targets) {
    struct ApplyRecord record;
    record.grid = step.grid;
    record.slice = step.slice;
    record.unit_bytes = step.type.unit_bytes;
    record.first_box = static_cast<std::uint32_t>(boxes.size());
    record.box_count = static_cast<std::uint32_t>(targets.size());
    boxes.insert(boxes.end(), targets.begin(), targets.end());
    if (!step.record.empty()) {
      const RecordView view =
          Must(RecordView::Parse(step.record, step.grid.TilesOf(step.slice)));
      for (const TileView& tile : view.tiles()) {
        ApplyTile there;
        there.payload =
            payloads.size() + (tile.payload.data() - step.record.data());
        there.tile = tile.tile;
        there.record = static_cast<std::uint32_t>(records.size());
        there.bytes = static_cast<std::uint32_t>(tile.payload.size());
        there.a = static_cast<std::uint16_t>(tile.a);
        there.b = static_cast<std::uint16_t>(tile.b);
        there.mode = static_cast<std::uint32_t>(tile.mode);
        tiles.push_back(there);
      }
      payloads.insert(payloads.end(), step.record.begin(), step.record.end());
    }
    records.push_back(record);
  }
};

struct ApplyResult {
  ApplyOutcome outcome;
  std::vector<RecordSums> sums;
};

ApplyResult RunOn(Device& device, const HostBatch& host, ApplyMode mode,
                  const L61Key& key = {},
                  std::uint64_t tile_limit = ~std::uint64_t{0}) {
  const DeviceArray<ApplyTile> tiles(device, host.tiles);
  const DeviceArray<struct ApplyRecord> records(device, host.records);
  const DeviceArray<BoxTarget> boxes(device, host.boxes);
  // What lies behind the last payload may be read, and does not matter.
  std::vector<std::byte> bytes = host.payloads;
  bytes.insert(bytes.end(), kPayloadSlack, std::byte{0xff});
  const DeviceBuffer payloads(device, bytes);
  const DeviceArray<ApplyOutcome> outcome(device, 1);
  const DeviceArray<RecordSums> sums(device, host.records.size());
  const DeviceMemory table = Must(device.MakeL61Table(key));
  ApplyBatch batch;
  batch.mode = mode;
  batch.tile_limit = tile_limit;
  batch.tiles = tiles.data();
  batch.tile_count = host.tiles.size();
  batch.records = records.data();
  batch.record_count = static_cast<std::uint32_t>(host.records.size());
  batch.boxes = boxes.data();
  batch.payloads = payloads.data();
  batch.payload_bytes = host.payloads.size();
  batch.outcome = outcome.data();
  if (mode == ApplyMode::kCheck) {
    batch.sums = sums.data();
    batch.l61 = {table.as<std::uint64_t>(), key};
  }
  const OwnedStream stream = Must(device.CreateStream());
  Must(device.Apply(batch, stream.get()));
  Must(device.WaitForStream(stream.get()));
  EXPECT_TRUE(outcome.GuardsIntact());
  EXPECT_TRUE(sums.GuardsIntact());
  EXPECT_TRUE(payloads.GuardsIntact());
  return {outcome.Read()[0], sums.Read()};
}

// A box in guarded device memory, and what that memory must hold.
struct Target {
  std::string name;
  BoxPlace place;
  std::vector<std::byte> expected;
  DeviceBuffer memory;

  BoxTarget box() const { return place.At(memory.data()); }
  BoxTarget host_box() { return place.At(expected.data()); }
};

Target MakeTarget(Device& device, std::mt19937_64& rng, const Step& step,
                  Layout layout) {
  const BoxPlace place = PlaceBox(rng, step.grid, step.type, layout);
  std::vector<std::byte> bytes(place.bytes);
  FillRandom(rng, bytes);  // what lies between the box's units
  FillBox(step.grid, step.before, place.At(bytes.data()));
  // Aligned as the elements are, and no more.
  DeviceBuffer memory(device, bytes, (rng() % 5) * step.type.element_bytes());
  return {Name(layout), place, std::move(bytes), std::move(memory)};
}

void ExpectTarget(const Target& target) {
  ASSERT_TRUE(target.memory.GuardsIntact()) << target.name;
  ASSERT_TRUE(target.memory.Read() == target.expected) << target.name;
}

// What ApplyRecord, the CPU's own, makes of the targets' host copies.
std::uint64_t ApplyOnHost(const Step& step, std::vector<Target>& targets) {
  if (step.record.empty()) return 0;
  std::vector<BoxTarget> boxes;
  for (Target& target : targets) boxes.push_back(target.host_box());
  std::vector<std::byte> record = step.record;
  record.resize(record.size() + kRecordSlackBytes);
  return Must(ApplyRecord(std::span(record).first(step.record.size()),
                          step.grid, step.slice, step.type.unit_bytes, boxes));
}

std::uint64_t CountChanges(const Step& step) {
  return testing::PlainDiff(step.before, step.after, step.type.unit_bytes)
      .size();
}

constexpr double kDensities[] = {0.0001, 0.003, 0.01, 0.05, 0.3, 1};

// One batch: a record for each shape, each with a box in every layout (which
// overlap, as replicas do).
void ExpectMatrix(Device& device, const UnitType& type, double density,
                  Values values, std::uint64_t seed) {
  std::mt19937_64 rng(seed);
  SCOPED_TRACE(absl::StrCat("seed ", seed));
  HostBatch batch;
  std::vector<Step> steps;
  std::vector<std::vector<Target>> targets;
  std::uint64_t nnz = 0;
  std::uint64_t written = 0;
  std::size_t turn = seed;
  for (const Shape& shape : testing::DeviceShapes(density == 0.003)) {
    if (kSanitized && ++turn % 7 != 0) continue;
    steps.push_back(MakeStep(rng, shape, type, density, values));
    const Step& step = steps.back();
    auto& of_step = targets.emplace_back();
    std::vector<BoxTarget> boxes;
    for (const Layout layout : kLayouts) {
      of_step.push_back(MakeTarget(device, rng, step, layout));
      boxes.push_back(of_step.back().box());
    }
    batch.Add(step, boxes);
    nnz += CountChanges(step);
    written += ApplyOnHost(step, of_step);
  }
  const ApplyResult result = RunOn(device, batch, ApplyMode::kApply);
  EXPECT_EQ(result.outcome.first_bad_tile, ~std::uint64_t{0});
  EXPECT_EQ(result.outcome.fault, TileFault::kNone);
  EXPECT_EQ(result.outcome.nnz, nnz);
  EXPECT_EQ(result.outcome.units_written, written);
  for (std::size_t s = 0; s < steps.size(); ++s) {
    SCOPED_TRACE(steps[s].name);
    for (const Target& target : targets[s]) {
      ExpectTarget(target);
      if (::testing::Test::HasFatalFailure()) return;
    }
    // The whole tensor is the new one, not only what ApplyRecord says.
    ASSERT_TRUE(targets[s][0].expected == steps[s].after);
  }
}

TEST_F(ApplyTest, TurnsOldIntoNewInEveryDtypeLayoutDensityAndShape) {
  std::uint64_t seed = 1000;
  for (const UnitType& type : kUnitTypes) {
    for (const double density : kDensities) {
      ++seed;
      ExpectMatrix(device(), type, density, static_cast<Values>(seed % 3),
                   seed);
      if (HasFailure()) return;
    }
  }
}

TEST_F(ApplyTest, BoxesOfOneAllocationAndOddNeighboursKeepEachOther) {
  // Rows of bytes and of 2-byte units of odd width, packed without gaps: the
  // neighbours of a unit that changes belong to another tensor.
  for (std::uint64_t seed = 0; seed < std::uint64_t(Rounds(20)); ++seed) {
    std::mt19937_64 rng(seed);
    SCOPED_TRACE(absl::StrCat("seed ", seed));
    const UnitType& type = kUnitTypes[rng() % 2];
    const Shape shape = {1 + rng() % 300, 1 + rng() % 300};
    const Step first = MakeStep(rng, shape, type, 0.5, Values::kAnything);
    const Step second = MakeStep(rng, shape, type, 0.5, Values::kAnything);
    const std::uint64_t row_bytes = first.grid.cols * type.unit_bytes;
    // Interleaved row by row in one allocation.
    std::vector<std::byte> before(first.before.size() * 2);
    std::vector<std::byte> after(before.size());
    BoxTarget box;
    box.unit_bytes = type.unit_bytes;
    box.row_end = first.grid.rows;
    box.col_end = first.grid.cols;
    box.row_stride_bytes = static_cast<std::int64_t>(2 * row_bytes);
    box.col_stride_bytes = type.unit_bytes;
    for (const auto& [step, offset] :
         {std::pair(&first, std::uint64_t{0}), {&second, row_bytes}}) {
      box.data = before.data() + offset;
      FillBox(step->grid, step->before, box);
      box.data = after.data() + offset;
      FillBox(step->grid, step->after, box);
    }
    const DeviceBuffer memory(device(), before, type.unit_bytes);
    HostBatch batch;
    box.data = memory.data();
    batch.Add(first, {box});
    box.data = memory.data() + row_bytes;
    batch.Add(second, {box});
    const ApplyResult result = RunOn(device(), batch, ApplyMode::kApply);
    EXPECT_EQ(result.outcome.fault, TileFault::kNone);
    ASSERT_TRUE(memory.Read() == after);
    ASSERT_TRUE(memory.GuardsIntact());
  }
}

TEST_F(ApplyTest, SliceOfOneRecordLeavesTheRestAlone) {
  std::mt19937_64 rng(3);
  HostBatch batch;
  Step step = MakeStep(rng, {300, 300}, kUnitTypes[1], 1, Values::kAnything);
  auto target = MakeTarget(device(), rng, step, Layout::kWhole);
  batch.Add(step, {target.box()});
  const ApplyResult result = RunOn(device(), batch, ApplyMode::kApply);
  EXPECT_EQ(result.outcome.units_written, CountChanges(step));
  EXPECT_TRUE(target.memory.Read() == step.after);
}

TEST_F(ApplyTest, ARecordWithoutBoxesAndAnEmptyBatchWriteNothing) {
  const ApplyResult none = RunOn(device(), {}, ApplyMode::kApply);
  EXPECT_EQ(none.outcome.nnz, 0u);
  EXPECT_EQ(none.outcome.units_written, 0u);
  EXPECT_EQ(none.outcome.first_bad_tile, ~std::uint64_t{0});
  std::mt19937_64 rng(4);
  const Step step =
      MakeStep(rng, {300, 300}, kUnitTypes[1], 0.01, Values::kSmall);
  HostBatch batch;
  batch.Add(step, {});
  const ApplyResult result = RunOn(device(), batch, ApplyMode::kApply);
  EXPECT_EQ(result.outcome.units_written, 0u);
  EXPECT_EQ(result.outcome.fault, TileFault::kNone);
}

TEST_F(ApplyTest, TileLimitLeavesTheOthersAlone) {
  std::mt19937_64 rng(5);
  const Step step =
      MakeStep(rng, {600, 500}, kUnitTypes[1], 0.02, Values::kSmall, true);
  HostBatch whole;
  whole.Add(step, {});
  for (const std::uint64_t limit :
       {std::uint64_t{0}, std::uint64_t{1},
        std::uint64_t{whole.tiles.size() / 2},
        std::uint64_t{whole.tiles.size()}, std::uint64_t{1} << 40}) {
    SCOPED_TRACE(absl::StrCat("limit ", limit));
    Target target = MakeTarget(device(), rng, step, Layout::kWhole);
    HostBatch batch;
    batch.Add(step, {target.box()});
    const ApplyResult result =
        RunOn(device(), batch, ApplyMode::kApply, {}, limit);
    std::uint64_t nnz = 0;
    for (std::size_t t = 0;
         t < std::min<std::uint64_t>(limit, batch.tiles.size()); ++t) {
      const TileBox box = step.grid.Box(batch.tiles[t].tile);
      for (std::uint32_t i = 0; i < box.unit_count(); ++i) {
        const std::uint64_t unit = step.grid.FlatIndex(box, i);
        nnz += LoadUnit(step.before.data() + 2 * unit, 2) !=
               LoadUnit(step.after.data() + 2 * unit, 2);
        StoreUnit(target.expected.data() + 2 * unit, 2,
                  LoadUnit(step.after.data() + 2 * unit, 2));
      }
    }
    ExpectTarget(target);
    EXPECT_EQ(result.outcome.units_written, nnz);
    EXPECT_EQ(result.outcome.nnz, nnz);
    EXPECT_EQ(result.outcome.fault, TileFault::kNone);
  }
}

// A box far beyond 2^32 units of its tensor keeps its place.
TEST_F(ApplyTest, BoxesBeyondFourBillionUnitsKeepTheirPlace) {
  std::mt19937_64 rng(6);
  for (const UnitType& type : kUnitTypes) {
    const Shape shape = {3'000'000, 4001};
    Step step;
    step.type = type;
    step.grid = MakeTileGrid(shape, type.units_per_element);
    const std::uint64_t rows = 70;
    const std::uint64_t first_row = 2'999'900;
    step.slice = {first_row * step.grid.cols,
                  (first_row + rows) * step.grid.cols};
    std::vector<std::byte> before(step.slice.count() * type.unit_bytes);
    FillRandom(rng, before);
    std::vector<std::byte> after = before;
    Perturb(rng, 0.01, Values::kSmall, type.unit_bytes, after);
    SliceEncoder encoder(L61Key::FromSeed(1));
    const EncodedSlice encoded =
        encoder.Encode(step.grid, step.slice, type.unit_bytes, before.data(),
                       after.data(), &step.record);
    step.record.resize(encoded.record_bytes);
    const DeviceBuffer memory(device(), before);
    BoxTarget box{memory.data(),
                  first_row,
                  first_row + rows,
                  0,
                  step.grid.cols,
                  static_cast<std::int64_t>(step.grid.cols * type.unit_bytes),
                  static_cast<std::int64_t>(type.element_bytes()),
                  type.unit_bytes,
                  type.units_per_element};
    HostBatch batch;
    batch.Add(step, {box});
    const L61Key key = L61Key::FromSeed(1);
    const ApplyResult checked = RunOn(device(), batch, ApplyMode::kCheck, key);
    EXPECT_EQ(checked.sums[0].l61(), encoded.l61);
    const ApplyResult result = RunOn(device(), batch, ApplyMode::kApply);
    EXPECT_EQ(result.outcome.units_written, encoded.nnz);
    EXPECT_TRUE(memory.Read() == after);
    EXPECT_TRUE(memory.GuardsIntact());
  }
}

TEST_F(ApplyCheckTest, SumsAreThoseOfCheckRecordAndNoWeightIsWritten) {
  std::uint64_t seed = 2000;
  for (const UnitType& type : kUnitTypes) {
    for (const double density : kDensities) {
      std::mt19937_64 rng(++seed);
      SCOPED_TRACE(absl::StrCat("seed ", seed));
      const L61Key key = L61Key::FromSeed(seed);
      HostBatch batch;
      std::vector<Step> steps;
      std::size_t turn = seed;
      for (const Shape& shape : testing::DeviceShapes(density == 0.003)) {
        if (kSanitized && ++turn % 7 != 0) continue;
        steps.push_back(
            MakeStep(rng, shape, type, density, static_cast<Values>(seed % 3)));
        // The boxes are no memory at all.
        BoxTarget box =
            PlaceBox(rng, steps.back().grid, type, Layout::kWhole).box;
        box.data = reinterpret_cast<std::byte*>(std::uintptr_t{64});
        batch.Add(steps.back(), {box});
      }
      const ApplyResult result = RunOn(device(), batch, ApplyMode::kCheck, key);
      EXPECT_EQ(result.outcome.fault, TileFault::kNone);
      EXPECT_EQ(result.outcome.units_written, 0u);
      std::uint64_t nnz = 0;
      for (std::size_t s = 0; s < steps.size(); ++s) {
        const Step& step = steps[s];
        SCOPED_TRACE(step.name);
        RecordSummary summary;
        if (!step.record.empty()) {
          std::vector<std::byte> record = step.record;
          record.resize(record.size() + kRecordSlackBytes);
          summary =
              Must(CheckRecord(std::span(record).first(step.record.size()),
                               step.grid, step.slice, type.unit_bytes, key));
        }
        ASSERT_EQ(result.sums[s].nnz, summary.nnz);
        ASSERT_EQ(result.sums[s].l61(), summary.l61);
        ASSERT_EQ(L61Add(L61SumScalar(key, 0, step.before), summary.l61),
                  L61SumScalar(key, 0, step.after));
        nnz += summary.nnz;
      }
      EXPECT_EQ(result.outcome.nnz, nnz);
    }
  }
}

// ------------------------------------------------------------ malformed tiles

// A batch whose tiles are given one by one.
struct TileBatch {
  explicit TileBatch(const Step& s) : step(s) { host.Add(step, {}); }

  const Step& step;
  HostBatch host;

  // What the plain decoder says of tile `t`: its changes, or nothing.
  std::optional<std::vector<Change>> Decode(std::size_t t) const {
    const ApplyTile& tile = host.tiles[t];
    const TileBox box = step.grid.Box(tile.tile);
    const TileView view{
        tile.tile, static_cast<TileMode>(tile.mode), tile.a, tile.b,
        std::span(host.payloads).subspan(tile.payload, tile.bytes)};
    std::vector<Change> changes;
    if (!DecodeTile(view, box.unit_count(), step.type.unit_bytes, &changes)
             .ok()) {
      return std::nullopt;
    }
    for (const Change& change : changes) {
      const std::uint64_t unit = step.grid.FlatIndex(box, change.index);
      if (unit < step.slice.begin || unit >= step.slice.end) {
        return std::nullopt;
      }
    }
    return changes;
  }
};

// Applies the batch to the whole tensor and, with gaps, to a part; compares
// with the good tiles applied one by one. Returns how many tiles are bad.
std::uint64_t ExpectGoodTilesOnly(Device& device, std::mt19937_64& rng,
                                  TileBatch& tiles, ApplyResult* result) {
  std::vector<Target> targets;
  std::vector<BoxTarget> boxes;
  for (const Layout layout :
       {Layout::kWhole, Layout::kTpColumns, Layout::kTransposed}) {
    targets.push_back(MakeTarget(device, rng, tiles.step, layout));
    boxes.push_back(targets.back().box());
  }
  tiles.host.boxes = boxes;
  tiles.host.records[0].box_count = static_cast<std::uint32_t>(boxes.size());
  const std::uint32_t unit_bytes = tiles.step.type.unit_bytes;
  std::uint64_t first_bad = ~std::uint64_t{0};
  std::uint64_t bad = 0;
  std::uint64_t written = 0;
  for (std::size_t t = 0; t < tiles.host.tiles.size(); ++t) {
    const auto changes = tiles.Decode(t);
    if (!changes) {
      first_bad = std::min<std::uint64_t>(first_bad, t);
      ++bad;
      continue;
    }
    const TileBox box = tiles.step.grid.Box(tiles.host.tiles[t].tile);
    for (const Change& change : *changes) {
      const std::uint64_t row = box.row + change.index / box.width;
      const std::uint64_t col = box.col + change.index % box.width;
      for (Target& target : targets) {
        const BoxTarget host_box = target.host_box();
        if (!host_box.Contains(row, col)) continue;
        ++written;
        std::byte* const at = host_box.At(row, col);
        StoreUnit(at, unit_bytes,
                  LoadUnit(at, unit_bytes) +
                      static_cast<std::uint64_t>(change.difference));
      }
    }
  }
  *result = RunOn(device, tiles.host, ApplyMode::kApply);
  EXPECT_EQ(result->outcome.first_bad_tile, first_bad);
  EXPECT_EQ(result->outcome.fault == TileFault::kNone, bad == 0);
  EXPECT_EQ(result->outcome.units_written, written);
  for (const Target& target : targets) ExpectTarget(target);
  const ApplyResult checked =
      RunOn(device, tiles.host, ApplyMode::kCheck, L61Key::FromSeed(1));
  EXPECT_EQ(checked.outcome.first_bad_tile, first_bad);
  EXPECT_EQ(checked.outcome.fault, result->outcome.fault);
  return bad;
}

TEST_F(MalformedTileTest, MutatedTilesAreRefusedAsThePlainDecoderRefuses) {
  const Shape shapes[] = {{300, 130}, {20000}, {900, 7}, {5, 1000}, {131, 257}};
  std::uint64_t refused = 0;
  std::uint64_t accepted = 0;
  for (std::uint64_t seed = 0; seed < std::uint64_t(Rounds(300)); ++seed) {
    std::mt19937_64 rng(seed);
    const Step step = MakeStep(rng, shapes[rng() % std::size(shapes)],
                               kUnitTypes[rng() % std::size(kUnitTypes)],
                               kDensities[rng() % std::size(kDensities)],
                               static_cast<Values>(rng() % 3));
    if (step.record.empty()) continue;
    SCOPED_TRACE(absl::StrCat("seed ", seed, " ", step.name));
    TileBatch tiles(step);
    for (ApplyTile& tile : tiles.host.tiles) {
      if (rng() % 2 == 0) continue;
      switch (rng() % 4) {
        case 0:
          tile.a = static_cast<std::uint16_t>(
              rng() % 4 == 0 ? rng() : tile.a + rng() % 5 - 2);
          break;
        case 1:
          tile.b = static_cast<std::uint16_t>(
              rng() % 4 == 0 ? rng() : tile.b + rng() % 5 - 2);
          break;
        case 2: {
          // Shorter, or as much longer as there are bytes.
          const std::uint64_t room = tiles.host.payloads.size() - tile.payload;
          const std::uint64_t bytes =
              rng() % 2 == 0 ? tile.bytes - 1 - rng() % tile.bytes
                             : std::uint64_t{tile.bytes} + 1 + rng() % 3;
          tile.bytes = static_cast<std::uint32_t>(std::min(bytes, room));
          break;
        }
        default:
          for (std::uint64_t n = 1 + rng() % 3; n > 0; --n) {
            tiles.host.payloads[tile.payload + rng() % tile.bytes] ^=
                static_cast<std::byte>(1 << rng() % 8);
          }
      }
      if (rng() % 20 == 0) tile.mode ^= 1;
    }
    ApplyResult result;
    const std::uint64_t bad =
        ExpectGoodTilesOnly(device(), rng, tiles, &result);
    refused += bad;
    accepted += tiles.host.tiles.size() - bad;
    if (HasFailure()) return;
  }
  // The mutations find something, and not only that.
  EXPECT_GT(refused, std::uint64_t(Rounds(100)));
  EXPECT_GT(accepted, std::uint64_t(Rounds(100)));
}

TEST_F(MalformedTileTest, EachFaultIsNamed) {
  std::mt19937_64 rng(1);
  Step step;
  step.type = {"bf16", 2, 1};
  step.grid = MakeTileGrid(Shape{128, 128}, 1);
  step.slice = {100, step.grid.unit_count()};
  step.name = "crafted";
  step.before.resize(step.grid.unit_count() * 2);
  FillRandom(rng, step.before);
  const std::uint32_t units = 16384;

  std::vector<Change> dense;
  for (std::uint32_t i = 100; i < units; ++i) {
    const auto d = static_cast<std::int64_t>(rng() % 200) - 100;
    if (d != 0) dense.push_back({i, i % 1000 == 0 ? 30000 : d});
  }
  const std::vector<Change> sparse = {{100, 1}, {7000, -900}, {16383, -1}};
  struct Case {
    const char* name;
    TileFault fault;
    std::vector<Change> changes;
    int a = 0;  // added to the header's
    int b = 0;
    int bytes = 0;
  };
  const std::vector<Case> cases = {
      {"a good sparse tile", TileFault::kNone, sparse},
      {"a good dense tile", TileFault::kNone, dense},
      {"no change", TileFault::kCounts, sparse, -2, -1},
      {"more changes than units", TileFault::kCounts, sparse, 20000},
      {"dense parameter 18 of 16 bits", TileFault::kCounts, dense, 18},
      {"a byte less, sparse", TileFault::kPlanes, sparse, 0, 0, -1},
      {"a byte more, sparse", TileFault::kPlanes, sparse, 0, 0, 1},
      {"a byte less, dense", TileFault::kPlanes, dense, 0, 0, -1},
      {"a byte more, dense", TileFault::kPlanes, dense, 0, 0, 1},
      {"no byte", TileFault::kPlanes, sparse, 0, 0, -1000},
      {"a unit beyond the tile", TileFault::kIndex, {{16384, 1}}},
      {"a unit far beyond the tile", TileFault::kIndex, {{200, 1}, {20000, 3}}},
      {"a unit in both lists", TileFault::kIndex, {{500, 1}, {500, 7}}},
      {"a unit before the slice", TileFault::kSlice, {{99, 1}, {300, 7}}},
      {"a difference of 2^16", TileFault::kDifference, {{300, 65536}}},
      {"a difference of 2^16 + 1", TileFault::kDifference, {{300, -65537}}},
      {"an escape too few", TileFault::kEscape, dense, 0, -1},
      {"an escape too many", TileFault::kEscape, dense, 0, 1},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(c.name);
    std::vector<std::byte> payload;
    const TileHeader header = EncodeTile(c.changes, units, 2, &payload);
    // The bytes behind are no zero padding, lest a longer payload be read on.
    ApplyTile tile;
    tile.a = static_cast<std::uint16_t>(header.a + c.a);
    tile.b = static_cast<std::uint16_t>(header.b + c.b);
    tile.mode = static_cast<std::uint32_t>(header.mode);
    tile.bytes = static_cast<std::uint32_t>(
        std::max<std::int64_t>(0, std::int64_t{header.bytes} + c.bytes));
    ASSERT_EQ(header.mode,
              c.changes.size() > 100 ? TileMode::kDense : TileMode::kSparse);
    payload.resize(header.bytes + 8);
    TileBatch tiles(step);
    tiles.host.tiles = {tile};
    tiles.host.payloads = payload;
    ApplyResult result;
    const std::uint64_t bad =
        ExpectGoodTilesOnly(device(), rng, tiles, &result);
    EXPECT_EQ(bad, c.fault == TileFault::kNone ? 0u : 1u);
    EXPECT_EQ(static_cast<int>(result.outcome.fault),
              static_cast<int>(c.fault));
  }
}

TEST_F(MalformedTileTest, TheLowestBadTileWinsAmongMany) {
  std::mt19937_64 rng(2);
  const Step step =
      MakeStep(rng, {3000, 300}, kUnitTypes[1], 0.01, Values::kSmall, true);
  TileBatch tiles(step);
  ASSERT_GT(tiles.host.tiles.size(), 60u);
  for (const std::size_t t : {50, 17, 33, 60}) {
    tiles.host.tiles[t].bytes -= 1;
  }
  tiles.host.tiles[17].a = 60000;
  ApplyResult result;
  EXPECT_EQ(ExpectGoodTilesOnly(device(), rng, tiles, &result), 4u);
  EXPECT_EQ(result.outcome.first_bad_tile, 17u);
  EXPECT_EQ(result.outcome.fault, TileFault::kCounts);
}

}  // namespace
}  // namespace kedge
