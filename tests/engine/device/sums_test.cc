// Goal: Device's checksums are those of the plain code, and slices reach their
// boxes, in every layout. Method: property tests with printed seeds against
// L61SumScalar over a tensor that holds the box alone, and against engine/cpu's
// CopySliceToBox; guards around all targets.

#include <random>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "gtest/gtest.h"
#include "kedge/engine/cpu/record_apply.h"
#include "kedge/format/l61.h"
#include "kedge/tests/engine/device/device_test_support.h"

namespace kedge {
namespace {

using testing::BoxPlace;
using testing::DeviceBuffer;
using testing::DeviceTest;
using testing::FillBox;
using testing::FillRandom;
using testing::kLayouts;
using testing::kUnitTypes;
using testing::Layout;
using testing::Must;
using testing::PlaceBox;
using testing::Shape;
using testing::UnitType;

using SumsTest = DeviceTest;
using SliceCopyTest = DeviceTest;

// A box in device memory, and what it adds to S.
struct SummedBox {
  std::string name;
  DeviceBuffer memory;
  SumBox sum;
  std::vector<std::byte> bytes;
  std::uint64_t expected = 0;
};

// S of a tensor that is zero but for the box.
std::uint64_t PlainSum(const L61Key& key, const TileGrid& grid,
                       const BoxTarget& box) {
  std::vector<std::byte> tensor(grid.unit_count() * box.unit_bytes);
  for (std::uint64_t r = box.row_begin; r < box.row_end; ++r) {
    for (std::uint64_t c = box.col_begin; c < box.col_end; ++c) {
      std::memcpy(tensor.data() + (r * grid.cols + c) * box.unit_bytes,
                  box.At(r, c), box.unit_bytes);
    }
  }
  return L61SumScalar(key, 0, tensor);
}

SummedBox MakeSummedBox(Device& device, std::mt19937_64& rng, const L61Key& key,
                        const Shape& shape, const UnitType& type, Layout layout,
                        std::uint32_t output) {
  const TileGrid grid = MakeTileGrid(shape, type.units_per_element);
  const BoxPlace place = PlaceBox(rng, grid, type, layout);
  std::vector<std::byte> bytes(place.bytes);
  FillRandom(rng, bytes);
  DeviceBuffer memory(device, bytes, (rng() % 9) * type.element_bytes());
  SummedBox box{absl::StrCat(type.name, " ", absl::StrJoin(shape, "x"), " ",
                             Name(layout)),
                std::move(memory),
                {},
                std::move(bytes)};
  box.sum.box = place.At(box.memory.data());
  box.sum.cols = grid.cols;
  box.sum.output = output;
  box.expected = PlainSum(key, grid, place.At(box.bytes.data()));
  return box;
}

void ExpectSums(Device& device, DeviceSums& sums,
                const std::vector<std::uint64_t>& expected) {
  const OwnedStream stream = Must(device.CreateStream());
  // Twice: what the first left behind does not count.
  for (int round = 0; round < 2; ++round) {
    Must(sums.Enqueue(stream.get()));
    Must(device.WaitForStream(stream.get()));
    ASSERT_EQ(sums.residues().size(), expected.size());
    for (std::size_t i = 0; i < expected.size(); ++i) {
      ASSERT_EQ(sums.residues()[i], expected[i]) << "output " << i;
    }
  }
}

TEST_F(SumsTest, AreThePlainOnesInEveryDtypeLayoutAndShape) {
  std::uint64_t seed = 3000;
  for (const UnitType& type : kUnitTypes) {
    for (const Layout layout : kLayouts) {
      std::mt19937_64 rng(++seed);
      SCOPED_TRACE(absl::StrCat("seed ", seed));
      const L61Key key = L61Key::FromSeed(seed);
      std::vector<SummedBox> boxes;
      std::vector<SumBox> tables;
      std::vector<std::uint64_t> expected;
      std::uint64_t bytes = 0;
      std::size_t turn = seed;
      for (const Shape& shape : testing::DeviceShapes(
               layout == Layout::kWhole || layout == Layout::kTransposed)) {
        if (kSanitized && ++turn % 7 != 0) continue;
        boxes.push_back(
            MakeSummedBox(device(), rng, key, shape, type, layout,
                          static_cast<std::uint32_t>(expected.size())));
        tables.push_back(boxes.back().sum);
        expected.push_back(boxes.back().expected);
        bytes += boxes.back().sum.box.unit_count() * type.unit_bytes;
      }
      const auto sums = Must(device().PrepareSums(
          tables, static_cast<std::uint32_t>(expected.size()), key));
      EXPECT_EQ(sums->bytes(), bytes);
      ExpectSums(device(), *sums, expected);
      if (HasFailure()) {
        for (std::size_t i = 0; i < boxes.size(); ++i) {
          ADD_FAILURE() << "output " << i << ": " << boxes[i].name;
        }
        return;
      }
    }
  }
}

// Columns that begin at multiples of 16 bytes, for which kernels have a way of
// their own.
TEST_F(SumsTest, OfTransposedWeightsAreThePlainOnes) {
  std::mt19937_64 rng(7);
  const L61Key key = L61Key::FromSeed(7);
  std::vector<DeviceBuffer> memories;
  std::vector<SumBox> tables;
  std::vector<std::uint64_t> expected(3);
  for (const UnitType& type : kUnitTypes) {
    if (type.units_per_element > 1) continue;
    for (const Shape& shape :
         {Shape{96, 2048}, Shape{64, 384}, Shape{136, 1440}, Shape{72, 4112},
          Shape{768, 128}, Shape{300, 640}}) {
      const TileGrid grid = MakeTileGrid(shape, 1);
      SumBox sum;
      BoxTarget& target = sum.box;
      target.row_begin = rng() % 40;
      target.row_end = grid.rows - rng() % 3;
      target.col_begin = rng() % 2 * (rng() % 40);
      target.col_end = grid.cols - rng() % 2 * (rng() % 40);
      target.unit_bytes = type.unit_bytes;
      target.row_stride_bytes = type.unit_bytes;
      const std::uint64_t pitch =
          (target.row_end - target.row_begin + 15) / 16 * 16 * type.unit_bytes;
      target.col_stride_bytes = static_cast<std::int64_t>(pitch);
      std::vector<std::byte> bytes((target.col_end - target.col_begin) * pitch);
      FillRandom(rng, bytes);
      memories.emplace_back(device(), bytes);
      sum.cols = grid.cols;
      sum.output = static_cast<std::uint32_t>(rng() % expected.size());
      target.data = bytes.data();
      expected[sum.output] =
          L61Add(expected[sum.output], PlainSum(key, grid, target));
      target.data = memories.back().data();
      tables.push_back(sum);
    }
  }
  const auto sums = Must(device().PrepareSums(
      tables, static_cast<std::uint32_t>(expected.size()), key));
  ExpectSums(device(), *sums, expected);
}

TEST_F(SumsTest, ManyBoxesOfMixedDtypesAddToTheirOutputs) {
  const std::vector<Shape> shapes = {
      {1}, {300, 130}, {900, 7}, {40000}, {5, 1000}, {16, 8, 3, 3}, {131, 257}};
  for (std::uint64_t seed = 0; seed < std::uint64_t(Rounds(10)); ++seed) {
    std::mt19937_64 rng(seed);
    SCOPED_TRACE(absl::StrCat("seed ", seed));
    const L61Key key = L61Key::FromSeed(seed);
    constexpr std::uint32_t kOutputs = 7;  // of which the last has no box
    std::vector<SummedBox> boxes;
    std::vector<SumBox> tables;
    std::vector<std::uint64_t> expected(kOutputs);
    for (int i = 0; i < 40; ++i) {
      boxes.push_back(
          MakeSummedBox(device(), rng, key, shapes[rng() % shapes.size()],
                        kUnitTypes[rng() % std::size(kUnitTypes)],
                        kLayouts[rng() % std::size(kLayouts)],
                        static_cast<std::uint32_t>(rng() % (kOutputs - 1))));
      tables.push_back(boxes.back().sum);
      std::uint64_t& output = expected[boxes.back().sum.output];
      output = L61Add(output, boxes.back().expected);
    }
    const auto sums = Must(device().PrepareSums(tables, kOutputs, key));
    tables.assign(tables.size(), SumBox{});  // they are not kept
    ExpectSums(device(), *sums, expected);
    if (HasFailure()) return;
  }
}

TEST_F(SumsTest, ShardsAddUpAndAChangeShows) {
  std::mt19937_64 rng(11);
  const L61Key key = L61Key::FromSeed(11);
  const UnitType type = kUnitTypes[1];
  const TileGrid grid = MakeTileGrid(Shape{500, 301}, 1);
  std::vector<std::byte> tensor(grid.unit_count() * 2);
  FillRandom(rng, tensor);
  DeviceBuffer memory(device(), tensor);
  std::vector<SumBox> shards;
  for (const std::uint64_t first_row : {0u, 123u}) {
    for (const std::uint64_t first_col : {0u, 77u}) {
      SumBox shard;
      shard.cols = grid.cols;
      shard.box = {memory.data() + (first_row * grid.cols + first_col) * 2,
                   first_row,
                   first_row == 0 ? 123 : grid.rows,
                   first_col,
                   first_col == 0 ? 77 : grid.cols,
                   static_cast<std::int64_t>(2 * grid.cols),
                   2,
                   type.unit_bytes,
                   1};
      shards.push_back(shard);
    }
  }
  const auto sums = Must(device().PrepareSums(shards, 1, key));
  ExpectSums(device(), *sums, {L61SumScalar(key, 0, tensor)});
  tensor[123'456] ^= std::byte{4};
  memory.Write(tensor);
  ExpectSums(device(), *sums, {L61SumScalar(key, 0, tensor)});
}

TEST_F(SumsTest, OfNothingAreZero) {
  const L61Key key = L61Key::FromSeed(12);
  const auto none = Must(device().PrepareSums({}, 0, key));
  ExpectSums(device(), *none, {});
  EXPECT_EQ(none->bytes(), 0u);
  const auto outputs = Must(device().PrepareSums({}, 3, key));
  ExpectSums(device(), *outputs, {0, 0, 0});
  SumBox empty;
  empty.cols = 100;
  empty.box.unit_bytes = 2;
  empty.box.row_end = 0;
  empty.box.col_end = 100;
  const auto zero = Must(device().PrepareSums({&empty, 1}, 1, key));
  ExpectSums(device(), *zero, {0});
}

TEST_F(SumsTest, BoxOfAnOutputThatIsNotThereIsRefused) {
  SumBox box;
  box.cols = 1;
  box.output = 3;
  box.box.unit_bytes = 2;
  const auto sums = device().PrepareSums({&box, 1}, 3, L61Key::FromSeed(1));
  ASSERT_FALSE(sums.ok());
  EXPECT_EQ(sums.status().code(), absl::StatusCode::kInvalidArgument);
}

TEST_F(SumsTest, GoAwayWithWorkInFlight) {
  std::mt19937_64 rng(13);
  const L61Key key = L61Key::FromSeed(13);
  SummedBox box = MakeSummedBox(device(), rng, key, {2000, 1000}, kUnitTypes[1],
                                Layout::kWhole, 0);
  const OwnedStream stream = Must(device().CreateStream());
  {
    const auto sums = Must(device().PrepareSums({&box.sum, 1}, 1, key));
    Must(sums->Enqueue(stream.get()));
  }
  EXPECT_TRUE(device().WaitForStream(stream.get()).ok());
}

// Words far beyond 2^32 of their tensor keep their weights.
TEST_F(SumsTest, BoxesBeyondFourBillionUnitsKeepTheirPlace) {
  std::mt19937_64 rng(14);
  const L61Key key = L61Key::FromSeed(14);
  for (const UnitType& type : kUnitTypes) {
    SCOPED_TRACE(type.name);
    const std::uint64_t cols = 4001 * type.units_per_element;
    const std::uint64_t first_row = 7'999'900;
    const std::uint64_t rows = 9;
    std::vector<std::byte> bytes(rows * cols * type.unit_bytes);
    FillRandom(rng, bytes);
    const DeviceBuffer memory(device(), bytes);
    SumBox sum;
    sum.cols = cols;
    sum.box = {memory.data(),
               first_row,
               first_row + rows,
               0,
               cols,
               static_cast<std::int64_t>(cols * type.unit_bytes),
               static_cast<std::int64_t>(type.element_bytes()),
               type.unit_bytes,
               type.units_per_element};
    const auto sums = Must(device().PrepareSums({&sum, 1}, 1, key));
    ExpectSums(device(), *sums,
               {L61SumScalar(key, first_row * cols * type.unit_bytes, bytes)});
  }
}

TEST_F(SliceCopyTest, SlicesReachTheirBoxesInEveryLayout) {
  std::uint64_t seed = 4000;
  for (const UnitType& type : kUnitTypes) {
    for (const Layout layout : kLayouts) {
      std::size_t turn = seed;
      for (const Shape& shape : testing::DeviceShapes(
               layout == Layout::kWhole || layout == Layout::kTransposed)) {
        std::mt19937_64 rng(++seed);
        if (kSanitized && ++turn % 7 != 0) continue;
        SCOPED_TRACE(absl::StrCat("seed ", seed, " ", type.name, " ",
                                  absl::StrJoin(shape, "x"), " ",
                                  Name(layout)));
        const TileGrid grid = MakeTileGrid(shape, type.units_per_element);
        const UnitRange slice = testing::RandomSlice(rng, grid);
        std::vector<std::byte> units(slice.count() * type.unit_bytes);
        FillRandom(rng, units);
        const BoxPlace place = PlaceBox(rng, grid, type, layout);
        std::vector<std::byte> expected(place.bytes);
        FillRandom(rng, expected);
        const DeviceBuffer target(device(), expected,
                                  (rng() % 5) * type.element_bytes());
        const DeviceBuffer source(device(), units,
                                  (rng() % 5) * type.unit_bytes);
        CopySliceToBox(units.data(), grid, slice, place.At(expected.data()));
        Must(device().CopySliceToBox(source.data(), grid, slice,
                                     place.At(target.data()), nullptr));
        Must(device().WaitForStream(nullptr));
        ASSERT_TRUE(target.Read() == expected);
        ASSERT_TRUE(target.GuardsIntact());
      }
    }
  }
}

TEST_F(SliceCopyTest, SliceOutsideTheBoxOrOfNothingWritesNothing) {
  const TileGrid grid = MakeTileGrid(Shape{300, 200}, 1);
  const DeviceBuffer source(device(), 2000 * 2);
  const DeviceBuffer target(device(), 100 * 200 * 2);
  const auto before = target.Read();
  const BoxTarget box{target.data(), 100, 200, 0, 200, 400, 2, 2, 1};
  for (const UnitRange& slice :
       {UnitRange{0, 2000}, UnitRange{18'000, 20'000},
        UnitRange{40'000, 42'000}, UnitRange{20'000, 20'000}}) {
    Must(device().CopySliceToBox(source.data(), grid, slice, box, nullptr));
    Must(device().WaitForStream(nullptr));
    EXPECT_TRUE(target.Read() == before);
  }
  EXPECT_TRUE(target.GuardsIntact());
}

}  // namespace
}  // namespace kedge
