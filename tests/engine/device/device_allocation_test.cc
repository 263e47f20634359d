// Goal: CpuDevice allocates nothing once it runs, so that tests above it may
// count what others allocate. Method: operator new counted over a step of all
// kinds of work, on all threads.

#include <cstring>
#include <random>
#include <vector>

#include "gtest/gtest.h"
#include "kedge/engine/cpu/cpu_device.h"
#include "kedge/format/l61.h"
#include "kedge/tests/engine/device/counted_heap.h"
#include "kedge/tests/engine/device/device_test_support.h"

namespace kedge {
namespace {

using testing::Must;

TEST(CpuDeviceTest, SteadyStateAllocatesNothing) {
  CpuDevice device;
  const L61Key key = L61Key::FromSeed(2);
  const DeviceMemory table = Must(device.MakeL61Table(key));
  std::mt19937_64 rng(2);
  constexpr std::uint64_t kUnits = 300 * 400;
  const DeviceMemory before =
      Must(device.Allocate(MemoryKind::kDevice, 2 * kUnits));
  const DeviceMemory after =
      Must(device.Allocate(MemoryKind::kDevice, 2 * kUnits));
  const DeviceMemory arena =
      Must(device.Allocate(MemoryKind::kDevice, 4 * kUnits));
  const OwnedStream stream = Must(device.CreateStream());
  const OwnedStream other = Must(device.CreateStream());
  const OwnedEvent event = Must(device.CreateEvent());
  const std::span<std::byte> old_units(before.data(), before.bytes());
  const std::span<std::byte> new_units(after.data(), after.bytes());
  testing::FillRandom(rng, old_units);
  std::memcpy(after.data(), before.data(), before.bytes());
  // Sparse tiles and dense ones.
  testing::Perturb(rng, 0.01, testing::Values::kSmall, 2,
                   new_units.first(kUnits));
  testing::Perturb(rng, 1, testing::Values::kAnything, 2,
                   new_units.subspan(kUnits));

  EncodeSlice slice;
  slice.grid = MakeTileGrid(testing::Shape{300, 400}, 1);
  slice.slice = {0, kUnits};
  slice.old_units = {before.data(), 0, 800, 2, 2, 1};
  slice.new_units = {after.data(), 0, 800, 2, 2, 1};
  std::vector<EncodedTile> tiles(slice.grid.tile_count());
  std::vector<ApplyTile> apply_tiles(tiles.size());
  EncodeTotals totals;
  EncodeBatch encode;
  encode.slices = &slice;
  encode.slice_count = 1;
  encode.tile_count = tiles.size();
  encode.tiles = tiles.data();
  encode.arena = arena.data();
  encode.arena_bytes = arena.bytes() - 16;
  encode.totals = &totals;
  encode.l61 = {table.as<std::uint64_t>(), key};
  BoxTarget box{before.data(), 0, 300, 0, 400, 800, 2, 2, 1};
  ApplyRecord record;
  record.grid = slice.grid;
  record.slice = slice.slice;
  record.unit_bytes = 2;
  record.box_count = 1;
  ApplyOutcome outcome;
  ApplyBatch apply;
  apply.tiles = apply_tiles.data();
  apply.tile_count = tiles.size();
  apply.records = &record;
  apply.record_count = 1;
  apply.boxes = &box;
  apply.payloads = arena.data();
  apply.payload_bytes = encode.arena_bytes;
  apply.outcome = &outcome;
  SumBox sum;
  sum.box = box;
  sum.cols = 400;
  const auto sums = Must(device.PrepareSums({&sum, 1}, 1, key));
  const std::uint64_t expected = L61SumScalar(key, 0, new_units);

  std::uint64_t counted = 0;
  for (int round = 0; round < 3; ++round) {
    const std::uint64_t start = testing::HeapAllocations();
    Must(device.Encode(encode, stream.get()));
    Must(device.WaitForStream(stream.get()));
    for (std::size_t t = 0; t < tiles.size(); ++t) {
      apply_tiles[t] = {std::uint64_t{tiles[t].payload} * kArenaAlignment,
                        t,
                        0,
                        tiles[t].bytes,
                        tiles[t].a,
                        tiles[t].b,
                        tiles[t].mode};
    }
    Must(device.Apply(apply, stream.get()));
    Must(sums->Enqueue(stream.get()));
    Must(device.Record(event.get(), stream.get()));
    Must(device.StreamWait(other.get(), event.get()));
    Must(device.Copy(arena.data(), before.data(), 8, other.get()));
    Must(device.WaitForStream(other.get()));
    Must(device.WaitForEvent(event.get()));
    counted = testing::HeapAllocations() - start;
    ASSERT_EQ(outcome.fault, TileFault::kNone);
    ASSERT_EQ(outcome.units_written, totals.nnz);
    ASSERT_EQ(sums->residues()[0], expected);
    ASSERT_EQ(std::memcmp(before.data(), after.data(), before.bytes()), 0);
    // Back to the old weights.
    testing::Perturb(rng, 0.01, testing::Values::kSmall, 2,
                     old_units.first(kUnits));
    testing::Perturb(rng, 1, testing::Values::kAnything, 2,
                     old_units.subspan(kUnits));
  }
  EXPECT_EQ(counted, 0u);
}

}  // namespace
}  // namespace kedge
