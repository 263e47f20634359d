// Goal: the kernels that sum weights give what engine/cpu gives, for every
// shape, element size, box, memory layout and alignment, and reads no byte
// outside the boxes.
// Method: plan and kernel bodies run on the host (phased_group.cuh) on property
// tests with printed seeds; boxes lie in memory whose other bytes are random,
// and at the very ends of allocations, where sanitizers see a read beyond.

#include <algorithm>
#include <cstring>
#include <memory>
#include <random>
#include <set>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "kedge/engine/cpu/l61_sum.h"
#include "kedge/engine/cuda/l61_plan.h"
#include "kedge/engine/cuda/l61_sum.cuh"
#include "kedge/format/tile_grid.h"
#include "kedge/tests/engine/cpu/cpu_test_support.h"
#include "kedge/tests/support/sanitized.h"

namespace kedge {
namespace {

using internal::HostGroup;
using internal::kSumThreads;
using internal::kSumWarps;
using internal::RowShared;
using internal::SharedWeights;
using internal::SumTask;
using internal::TileShared;
using testing::FillRandom;
using testing::Shape;

const L61Key kKey = L61Key::FromSeed(61);

std::vector<std::uint64_t> RunOnHost(std::mt19937_64& rng, const SumPlan& plan,
                                     std::uint32_t outputs) {
  static const std::vector<std::uint64_t> table = [] {
    std::vector<std::uint64_t> a(kL61TileWords);
    for (std::uint32_t t = 0; t < kL61TileWords; ++t) a[t] = kKey.A(t);
    return a;
  }();
  std::vector<std::uint64_t> halves(2 * std::size_t{outputs});
  std::vector<std::uint64_t> given(kSumWarps + 2);
  SumTask task{plan.items.data(),
               static_cast<std::uint32_t>(plan.row_items),
               {table.data(), kKey},
               halves.data(),
               given.data()};
  // A block's last warp takes all that is left, so blocks also come last first.
  const auto blocks = static_cast<std::uint32_t>(1 + rng() % 4);
  const bool backwards = rng() % 2 == 0;
  for (std::uint32_t i = 0; i < blocks; ++i) {
    const std::uint32_t block = backwards ? blocks - 1 - i : i;
    for (std::uint32_t part = 0; part < kSumWarps; ++part) {
      HostGroup<32> warp(rng());
      auto shared = std::make_unique<RowShared>();
      std::memset(static_cast<void*>(shared.get()), 0xee, sizeof(RowShared));
      internal::SumRowItems(warp, task, part, block, blocks, shared.get());
    }
  }
  task.items += task.item_count;
  task.item_count = static_cast<std::uint32_t>(plan.vector_items);
  task.given += kSumWarps;
  auto weights = std::make_unique<SharedWeights>();
  HostGroup<kSumThreads> block_threads(rng());
  internal::SplitWeights(block_threads, table.data(), weights.get());
  for (std::uint32_t i = 0; i < blocks; ++i) {
    HostGroup<32> warp(rng());
    internal::SumVectorItems(warp, task, backwards ? blocks - 1 - i : i, blocks,
                             *weights);
  }
  task.items += task.item_count;
  task.item_count = static_cast<std::uint32_t>(plan.column_items);
  ++task.given;
  std::memset(static_cast<void*>(weights.get()), 0xee, sizeof(SharedWeights));
  internal::SplitColumnWeights(block_threads, table.data(), weights.get());
  for (std::uint32_t i = 0; i < blocks; ++i) {
    HostGroup<32> warp(rng());
    internal::SumColumnItems(warp, task, backwards ? blocks - 1 - i : i, blocks,
                             *weights);
  }
  task.items += task.item_count;
  task.item_count = static_cast<std::uint32_t>(plan.tile_items);
  for (std::uint32_t block = 0; block < blocks; ++block) {
    HostGroup<kSumThreads> group(rng());
    auto shared = std::make_unique<TileShared>();
    std::memset(static_cast<void*>(shared.get()), 0xee, sizeof(TileShared));
    internal::SumTileItems(group, task, block, blocks, shared.get());
  }
  std::vector<std::uint64_t> residues(outputs);
  for (std::uint32_t i = 0; i < outputs; ++i) {
    residues[i] = internal::ResidueOfHalves(halves.data(), i);
  }
  return residues;
}

// A box in an allocation that begins and ends with it.
struct PlacedBox {
  TileGrid grid;
  BoxTarget target;
  std::unique_ptr<std::byte[]> memory;
};

enum class Layout { kPacked, kPitched, kTransposed, kPitchedTransposed, kOdd };

// `shift` moves the box's data by that many elements from an aligned address.
PlacedBox Place(std::mt19937_64& rng, const TileGrid& grid,
                std::uint32_t unit_bytes, std::uint32_t units_per_element,
                std::uint64_t row_begin, std::uint64_t row_end,
                std::uint64_t col_begin, std::uint64_t col_end, Layout layout,
                std::uint64_t pitch_elements, std::uint64_t shift) {
  PlacedBox placed;
  placed.grid = grid;
  BoxTarget& box = placed.target;
  box.row_begin = row_begin;
  box.row_end = row_end;
  box.col_begin = col_begin;
  box.col_end = col_end;
  box.unit_bytes = unit_bytes;
  box.units_per_element = units_per_element;
  const auto element =
      static_cast<std::int64_t>(unit_bytes * units_per_element);
  const auto rows = static_cast<std::int64_t>(row_end - row_begin);
  const auto cols =
      static_cast<std::int64_t>((col_end - col_begin) / units_per_element);
  const auto pitch = static_cast<std::int64_t>(pitch_elements);
  switch (layout) {
    case Layout::kPacked:
    case Layout::kPitched:
      box.col_stride_bytes = element;
      box.row_stride_bytes =
          (cols + (layout == Layout::kPitched ? pitch : 0)) * element;
      break;
    case Layout::kTransposed:
    case Layout::kPitchedTransposed:
      box.row_stride_bytes = element;
      box.col_stride_bytes =
          (rows + (layout == Layout::kPitchedTransposed ? pitch : 0)) * element;
      break;
    case Layout::kOdd:  // rows backwards, columns some elements apart
      box.col_stride_bytes = (1 + pitch) * element;
      box.row_stride_bytes = -(1 + pitch) * element * cols - element;
  }
  std::int64_t lowest = 0;
  std::int64_t highest = 0;
  for (const std::int64_t end :
       {(rows - 1) * box.row_stride_bytes, (cols - 1) * box.col_stride_bytes}) {
    (end < 0 ? lowest : highest) += end;
  }
  const std::size_t before = shift * static_cast<std::size_t>(element);
  const auto size =
      before + static_cast<std::size_t>(highest - lowest + element);
  placed.memory.reset(new std::byte[size]);
  FillRandom(rng, std::span(placed.memory.get(), size));
  box.data = placed.memory.get() + before - lowest;
  return placed;
}

// What each box sums to by engine/cpu, added up by output.
std::vector<std::uint64_t> Expected(std::span<const PlacedBox> boxes,
                                    std::span<const std::uint32_t> outputs,
                                    std::uint32_t output_count) {
  static const L61Summer summer(kKey);
  std::vector<std::uint64_t> sums(output_count);
  for (std::size_t i = 0; i < boxes.size(); ++i) {
    sums[outputs[i]] =
        L61Add(sums[outputs[i]], summer.SumBox(boxes[i].grid, boxes[i].target));
  }
  return sums;
}

SumPlan Plan(std::span<const PlacedBox> boxes,
             std::span<const std::uint32_t> outputs) {
  std::vector<SumBox> sums;
  for (std::size_t i = 0; i < boxes.size(); ++i) {
    SumBox sum;
    sum.box = boxes[i].target;
    sum.cols = boxes[i].grid.cols;
    sum.output = outputs[i];
    sums.push_back(sum);
  }
  return PlanSums(sums);
}

class L61SumEmulationTest : public ::testing::Test {
 protected:
  // Checks one box; returns which kinds of items it took.
  std::set<SumKind> CheckBox(const PlacedBox& box) {
    const std::uint32_t zero[] = {0};
    const SumPlan plan = Plan({&box, 1}, zero);
    EXPECT_EQ(plan.bytes, box.target.unit_count() * box.target.unit_bytes);
    EXPECT_EQ(RunOnHost(rng_, plan, 1), Expected({&box, 1}, zero, 1));
    std::set<SumKind> kinds;
    for (const SumItem& item : plan.items) kinds.insert(item.kind);
    return kinds;
  }

  std::uint64_t seed_ = std::random_device{}();
  std::mt19937_64 rng_{seed_};
  ::testing::ScopedTrace trace_{__FILE__, __LINE__,
                                absl::StrCat("seed ", seed_)};
};

TEST_F(L61SumEmulationTest, BoxesOfEveryShapeAndLayoutSumUpByOutput) {
  for (int round = 0; round < Rounds(150); ++round) {
    const auto count = 1 + rng_() % 6;
    const auto output_count = static_cast<std::uint32_t>(1 + rng_() % 4);
    std::vector<PlacedBox> boxes;
    std::vector<std::uint32_t> outputs;
    for (std::uint64_t n = 0; n < count; ++n) {
      const std::vector<Shape> shapes = testing::TestShapes();
      const auto kind = rng_() % 4;  // elements of 1, 2, 4 and 8 bytes
      const std::uint32_t unit_bytes = kind == 3 ? 4 : 1u << kind;
      const std::uint32_t pair = kind == 3 ? 2 : 1;
      Shape shape = shapes[rng_() % shapes.size()];
      if (rng_() % 2 == 0) shape = {1 + rng_() % 100, 1 + rng_() % 1200};
      if (rng_() % 3 == 0 && !shape.empty()) {
        shape.back() = (shape.back() + 15) / 16 * 16;
      }
      const TileGrid grid = MakeTileGrid(shape, pair);
      std::uint64_t bounds[4] = {0, grid.rows, 0, grid.cols / pair};
      for (int dimension = 0; dimension < 2; ++dimension) {
        if (rng_() % 2 == 0) continue;
        std::uint64_t* const ends = bounds + 2 * dimension;
        const std::uint64_t extent = ends[1];
        ends[0] = rng_() % extent;
        ends[1] = ends[0] + 1 + rng_() % (extent - ends[0]);
        if (rng_() % 2 == 0 && ends[1] >= 32) {
          ends[0] = ends[0] / 16 * 16;
          ends[1] = ends[1] / 16 * 16;
          if (ends[0] >= ends[1]) ends[0] = 0;
        }
      }
      boxes.push_back(Place(rng_, grid, unit_bytes, pair, bounds[0], bounds[1],
                            bounds[2] * pair, bounds[3] * pair,
                            static_cast<Layout>(rng_() % 5),
                            rng_() % 2 == 0 ? 16 : rng_() % 20,
                            rng_() % 2 == 0 ? 0 : rng_() % 17));
      outputs.push_back(static_cast<std::uint32_t>(rng_() % output_count));
    }
    const SumPlan plan = Plan(boxes, outputs);
    std::uint64_t bytes = 0;
    for (const PlacedBox& box : boxes) {
      bytes += box.target.unit_count() * box.target.unit_bytes;
    }
    ASSERT_EQ(plan.bytes, bytes);
    ASSERT_EQ(RunOnHost(rng_, plan, output_count),
              Expected(boxes, outputs, output_count))
        << "round " << round;
  }
}

TEST_F(L61SumEmulationTest, LayoutsOfModelsRunAsTheyShould) {
  // [rows, cols] of bf16.
  const TileGrid grid = MakeTileGrid(Shape{300, 1536}, 1);
  using Kinds = std::set<SumKind>;
  // A whole tensor: rows of A, the last in part.
  EXPECT_EQ(
      CheckBox(Place(rng_, grid, 2, 1, 0, 300, 0, 1536, Layout::kPacked, 0, 0)),
      (Kinds{SumKind::kRows}));
  // Rows of it: the first in part too.
  EXPECT_EQ(CheckBox(Place(rng_, grid, 2, 1, 100, 200, 0, 1536, Layout::kPacked,
                           0, 0)),
            (Kinds{SumKind::kRows}));
  // Half of its columns, packed and in place.
  for (const Layout layout : {Layout::kPacked, Layout::kPitched}) {
    EXPECT_EQ(
        CheckBox(Place(rng_, grid, 2, 1, 0, 300, 768, 1536, layout, 768, 0)),
        (Kinds{SumKind::kVectors}));
  }
  // Stored transposed; the last four rows are half a vector.
  EXPECT_EQ(CheckBox(Place(rng_, grid, 2, 1, 0, 296, 0, 1536,
                           Layout::kTransposed, 0, 0)),
            (Kinds{SumKind::kColumns}));
  EXPECT_EQ(CheckBox(Place(rng_, grid, 2, 1, 0, 300, 0, 1536,
                           Layout::kPitchedTransposed, 4, 0)),
            (Kinds{SumKind::kColumns, SumKind::kTiles}));
  // Columns that do not begin at vectors, in memory.
  EXPECT_EQ(CheckBox(Place(rng_, grid, 2, 1, 0, 300, 0, 1536,
                           Layout::kPitchedTransposed, 3, 0)),
            (Kinds{SumKind::kTiles}));
  // Columns that begin within 16 bytes, in memory that does too.
  EXPECT_EQ(CheckBox(Place(rng_, grid, 2, 1, 0, 300, 3, 1530, Layout::kPitched,
                           9, 3)),
            (Kinds{SumKind::kVectors, SumKind::kTiles}));
  // Very long rows.
  const TileGrid wide = MakeTileGrid(Shape{3, 150000}, 1);
  EXPECT_EQ(CheckBox(Place(rng_, wide, 2, 1, 0, 3, 40000, 110000,
                           Layout::kPitched, 80000, 0)),
            (Kinds{SumKind::kRows}));
}

TEST_F(L61SumEmulationTest, TransposedStorageOfEveryUnitIsReadInVectors) {
  // 100 rows: three whole tiles and one of four rows.
  for (const std::uint32_t unit_bytes : {1u, 2u, 4u}) {
    for (const std::uint64_t cols : {1024u, 1030u}) {
      const TileGrid grid = MakeTileGrid(Shape{100, cols}, 1);
      CheckBox(Place(rng_, grid, unit_bytes, 1, 0, 100, 0, cols,
                     Layout::kPitchedTransposed, 12, 0));
      CheckBox(Place(rng_, grid, unit_bytes, 1, 3, 99, 16, cols - 20,
                     Layout::kTransposed, 0, 0));
    }
  }
}

TEST_F(L61SumEmulationTest, TransposedRowsMeetEveryRowOfAWhereTheyShould) {
  // Rows that begin anywhere in a row of A, at multiples of 32 bytes, and pass
  // into the next one anywhere; bands and parts of every size.
  for (int round = 0; round < Rounds(150); ++round) {
    const std::uint64_t cols =
        16 * (round % 3 == 0 ? 8u << rng_() % 7 : 8 + rng_() % 600);
    const std::uint64_t rows = 8 + rng_() % (rng_() % 2 == 0 ? 40 : 300);
    const TileGrid grid = MakeTileGrid(Shape{rows, cols}, 1);
    ASSERT_EQ(grid.cols, cols);
    std::uint64_t row_begin = 0;
    std::uint64_t col_begin = 0;
    if (rng_() % 2 == 0) row_begin = rng_() % (rows - 7);
    if (rng_() % 2 == 0) col_begin = rng_() % (cols - 47);
    const std::uint64_t row_end =
        row_begin + 8 + rng_() % (rows - row_begin - 7);
    const std::uint64_t col_end =
        rng_() % 2 == 0 ? cols
                        : col_begin + 47 + rng_() % (cols - col_begin - 46);
    // So that columns begin at vectors.
    const std::uint64_t pitch = 8 + (8 - (row_end - row_begin) % 8) % 8;
    const std::set<SumKind> kinds =
        CheckBox(Place(rng_, grid, 2, 1, row_begin, row_end, col_begin, col_end,
                       Layout::kPitchedTransposed, pitch, 0));
    ASSERT_TRUE(kinds.contains(SumKind::kColumns));
    // Data that begin within a vector: some rows of the first one are missing.
    if (row_end - row_begin >= 16) {
      ASSERT_TRUE(CheckBox(Place(rng_, grid, 2, 1, row_begin, row_end,
                                 col_begin, col_end, Layout::kPitchedTransposed,
                                 pitch, 1 + rng_() % 7))
                      .contains(SumKind::kColumns));
    }
    ASSERT_FALSE(HasFailure()) << "round " << round;
  }
}

TEST_F(L61SumEmulationTest, EveryUnitOfTransposedRowsCountsWithItsOwnWeight) {
  // One unit that is not 0, at every row of a band and some columns.
  const TileGrid grid = MakeTileGrid(Shape{72, 2080}, 1);
  PlacedBox box =
      Place(rng_, grid, 2, 1, 0, 72, 0, 2080, Layout::kTransposed, 0, 0);
  std::memset(box.memory.get(), 0, std::size_t{2} * 72 * 2080);
  for (std::uint64_t r = 0; r < 72; ++r) {
    const std::uint64_t c = rng_() % 2080;
    const std::uint16_t value = static_cast<std::uint16_t>(1 + rng_() % 65535);
    std::memcpy(box.target.At(r, c), &value, 2);
    EXPECT_EQ(CheckBox(box), std::set<SumKind>{SumKind::kColumns})
        << "row " << r << ", column " << c;
    std::memset(box.target.At(r, c), 0, 2);
  }
}

TEST_F(L61SumEmulationTest, LargestBytesDoNotOverflow) {
  // All bits set, in rows of A and elsewhere.
  const TileGrid grid = MakeTileGrid(Shape{64, 8192}, 1);
  for (const Layout layout :
       {Layout::kPacked, Layout::kPitched, Layout::kPitchedTransposed}) {
    PlacedBox box = Place(rng_, grid, 4, 1, 0, 64, 0, 8192, layout, 16, 0);
    for (std::uint64_t r = 0; r < 64; ++r) {
      for (std::uint64_t c = 0; c < 8192; ++c) {
        std::memset(box.target.At(r, c), 0xff, 4);
      }
    }
    CheckBox(box);
  }
  const TileGrid halves = MakeTileGrid(Shape{64, 8192}, 1);
  PlacedBox box =
      Place(rng_, halves, 2, 1, 0, 64, 0, 8192, Layout::kTransposed, 0, 0);
  std::memset(box.memory.get(), 0xff, std::size_t{2} * 64 * 8192);
  EXPECT_EQ(CheckBox(box), std::set<SumKind>{SumKind::kColumns});
}

TEST_F(L61SumEmulationTest, RowsFarApartLookUpEachB) {
  // 40 rows, each of them 128 rows of A after the last.
  const TileGrid grid = MakeTileGrid(Shape{40, 1 << 20}, 1);
  PlacedBox box =
      Place(rng_, grid, 2, 1, 0, 40, 1000, 1080, Layout::kPacked, 0, 0);
  EXPECT_EQ(CheckBox(box), std::set<SumKind>{SumKind::kVectors});
  box = Place(rng_, grid, 2, 1, 0, 40, 8190, 8195, Layout::kTransposed, 0, 0);
  EXPECT_EQ(CheckBox(box), std::set<SumKind>{SumKind::kTiles});
  box = Place(rng_, grid, 2, 1, 0, 40, 8160, 8240, Layout::kTransposed, 0, 0);
  EXPECT_EQ(CheckBox(box), std::set<SumKind>{SumKind::kColumns});
}

TEST_F(L61SumEmulationTest, TensorsOfFewRowsOfAReadAheadIntoTheNextOnes) {
  // Runs of one to six rows of A, whole or not, by turns to few outputs.
  for (int round = 0; round < Rounds(100); ++round) {
    std::vector<PlacedBox> boxes;
    std::vector<std::uint32_t> outputs;
    for (std::uint64_t n = 2 + rng_() % 20; n > 0; --n) {
      const std::uint64_t bytes =
          rng_() % 3 == 0 ? (1 + rng_() % 6) * kL61RowBytes
                          : 16 * (1 + rng_() % (5 * kL61RowBytes / 16));
      const std::uint64_t before = rng_() % 2 == 0 ? 0 : 16 * (rng_() % 1500);
      const TileGrid grid = MakeTileGrid(Shape{before + bytes}, 1);
      boxes.push_back(Place(rng_, grid, 1, 1, 0, 1, before, before + bytes,
                            Layout::kPacked, 0, 0));
      outputs.push_back(static_cast<std::uint32_t>(rng_() % 3));
    }
    const SumPlan plan = Plan(boxes, outputs);
    ASSERT_EQ(plan.items.size(), plan.row_items);
    ASSERT_EQ(RunOnHost(rng_, plan, 3), Expected(boxes, outputs, 3))
        << "round " << round;
  }
}

TEST_F(L61SumEmulationTest, SlicesOfColumnsOfEveryWidthSumUp) {
  for (int round = 0; round < Rounds(100); ++round) {
    const std::uint64_t cols = 8 * (1 + rng_() % 4096);
    const std::uint64_t rows = 1 + rng_() % (3'000'000 / cols);
    const TileGrid grid = MakeTileGrid(Shape{rows, cols}, 1);
    const std::uint64_t begin = 8 * (rng_() % (cols / 8));
    const std::uint64_t end = begin + 8 * (1 + rng_() % ((cols - begin) / 8));
    CheckBox(Place(rng_, grid, 2, 1, 0, rows, begin, end,
                   rng_() % 2 == 0 ? Layout::kPacked : Layout::kPitched,
                   8 * (rng_() % 100), 0));
  }
}

TEST_F(L61SumEmulationTest, EmptyBoxesAndNoBoxesAreZero) {
  SumBox empty;
  empty.box.unit_bytes = 2;
  empty.box.col_stride_bytes = 2;
  const SumPlan plan = PlanSums({&empty, 1});
  EXPECT_TRUE(plan.items.empty());
  EXPECT_EQ(plan.bytes, 0u);
  EXPECT_EQ(RunOnHost(rng_, plan, 3), std::vector<std::uint64_t>(3));
}

TEST_F(L61SumEmulationTest, ItemsKeepTheirLimits) {
  // Shapes of a large model; memory is not touched.
  std::vector<SumBox> boxes;
  const auto add = [&](std::uint64_t rows, std::uint64_t cols,
                       std::uint64_t col_begin, std::uint64_t col_end,
                       bool transposed) {
    SumBox sum;
    sum.cols = cols;
    sum.box.data = reinterpret_cast<std::byte*>(std::uintptr_t{1} << 32);
    sum.box.row_end = rows;
    sum.box.col_begin = col_begin;
    sum.box.col_end = col_end;
    sum.box.unit_bytes = 2;
    const auto width = static_cast<std::int64_t>(col_end - col_begin);
    sum.box.row_stride_bytes = transposed ? 2 : 2 * width;
    sum.box.col_stride_bytes =
        transposed ? 2 * static_cast<std::int64_t>(rows) : 2;
    sum.output = static_cast<std::uint32_t>(boxes.size());
    boxes.push_back(sum);
  };
  add(151936, 2048, 0, 2048, false);
  add(2048, 768, 384, 768, false);
  add(4096, 151936, 0, 75968, false);
  add(1, 1'000'000'007, 0, 1'000'000'007, false);
  add(8192, 28672, 0, 14336, true);
  add(768, 2048, 0, 2048, true);
  add(64, std::uint64_t{1} << 24, 32, 64, true);
  add(1000, 1000, 8, 999, true);
  add(100000, 24, 0, 8, false);
  add(1 << 20, 8, 0, 8, false);
  add(3, std::uint64_t{3} << 30, 16, 24, false);
  add(2000, std::uint64_t{1} << 26, 64, 16384, false);
  const SumPlan plan = PlanSums(boxes);
  for (std::size_t i = 0; i < plan.items.size(); ++i) {
    const std::size_t columns = plan.row_items + plan.vector_items;
    ASSERT_EQ(plan.items[i].kind, i < plan.row_items ? SumKind::kRows
                                  : i < columns      ? SumKind::kVectors
                                  : i < columns + plan.column_items
                                      ? SumKind::kColumns
                                      : SumKind::kTiles);
  }
  ASSERT_EQ(
      plan.row_items + plan.vector_items + plan.column_items + plan.tile_items,
      plan.items.size());
  ASSERT_GT(plan.column_items, 0u);
  std::vector<std::uint64_t> bytes(boxes.size());
  for (const SumItem& item : plan.items) {
    ASSERT_GT(item.rows, 0u);
    ASSERT_GT(item.row_bytes, 0u);
    switch (item.kind) {
      case SumKind::kRows: {
        const std::uint64_t first = item.offset % kL61RowBytes;
        ASSERT_LE(first + item.row_bytes, kMaxSumRows * kL61RowBytes);
        ASSERT_EQ(item.rows,
                  (first + item.row_bytes + kL61RowBytes - 1) / kL61RowBytes);
        ASSERT_EQ((item.offset | item.row_bytes) % 16, 0u);
        bytes[item.output] += item.row_bytes;
        break;
      }
      case SumKind::kVectors:
        ASSERT_LE(item.rows * (item.row_bytes / 16), kMaxVectors);
        ASSERT_LT(item.row_bytes, 1u << 16);
        ASSERT_LE((item.rows - 1) * item.tensor_stride + item.row_bytes,
                  kMaxVectorSpan);
        bytes[item.output] += std::uint64_t{item.rows} * item.row_bytes;
        break;
      case SumKind::kColumns:
        ASSERT_LE(item.rows, kMaxColumnRows);
        ASSERT_EQ(item.rows % 8, 0u);
        ASSERT_LE(item.row_bytes, kMaxColumnBytes);
        ASSERT_EQ((item.offset | item.tensor_stride | item.row_bytes) % 32, 0u);
        ASSERT_EQ((reinterpret_cast<std::uintptr_t>(item.data) |
                   static_cast<std::uint64_t>(item.col_stride_bytes)) %
                      16,
                  0u);
        ASSERT_LE((item.rows - 1) * item.tensor_stride + item.row_bytes,
                  kMaxVectorSpan);
        bytes[item.output] += std::uint64_t{item.rows} * item.row_bytes;
        break;
      case SumKind::kTiles:
        ASSERT_LE(item.offset % 16 + item.row_bytes, kSumTileBytes);
        bytes[item.output] += std::uint64_t{item.rows} * item.row_bytes;
    }
  }
  for (std::size_t i = 0; i < boxes.size(); ++i) {
    EXPECT_EQ(bytes[i], 2 * boxes[i].box.unit_count()) << i;
  }
}

}  // namespace
}  // namespace kedge
