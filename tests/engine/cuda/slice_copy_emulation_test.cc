// Goal: the kernels that copy a slice into a box do what engine/cpu does, at
// every stride and alignment, and write nothing else.
// Method: their bodies, run on the host (phased_group.cuh), on random slices
// and boxes with printed seeds.

#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "kedge/engine/cpu/record_apply.h"
#include "kedge/engine/cuda/slice_copy.cuh"
#include "kedge/format/tile_grid.h"
#include "kedge/tests/engine/cpu/cpu_test_support.h"
#include "kedge/tests/support/sanitized.h"

namespace kedge {
namespace {

using internal::CopyShared;
using internal::HostGroup;
using internal::kCopyTileThreads;
using testing::FillRandom;
using testing::Shape;

template <typename Unit>
void RunTiles(std::mt19937_64& rng, const internal::SliceCopyTask& task) {
  const std::uint64_t groups = 1 + rng() % 3;
  for (std::uint64_t g = 0; g < groups; ++g) {
    HostGroup<kCopyTileThreads> group(rng());
    CopyShared shared;
    std::memset(static_cast<void*>(&shared), 0xee, sizeof(shared));
    internal::CopyTiles<Unit>(group, task, internal::CopyTileCount(task),
                              internal::CopyTilesOfRow(task), g, groups,
                              &shared);
  }
}

// What LaunchCopySliceToBox does, but for one run, where it is one copy.
void RunOnHost(std::mt19937_64& rng, const internal::SliceCopyTask& task) {
  if (task.row_begin >= task.row_end) return;
  if (task.box.rows_are_contiguous()) {
    const std::uint64_t groups = 1 + rng() % 5;
    for (std::uint64_t g = 0; g < groups; ++g) {
      HostGroup<32> group(rng());
      internal::CopyRowChunks(group, task, internal::CopyChunksOfRow(task), g,
                              groups);
    }
    return;
  }
  switch (task.box.unit_bytes) {
    case 1:
      RunTiles<std::uint8_t>(rng, task);
      break;
    case 2:
      RunTiles<std::uint16_t>(rng, task);
      break;
    default:
      RunTiles<std::uint32_t>(rng, task);
  }
}

TEST(SliceCopyEmulationTest, SlicesReachEveryBoxAsOnTheHost) {
  const std::uint64_t seed = std::random_device{}();
  SCOPED_TRACE(absl::StrCat("seed ", seed));
  std::mt19937_64 rng(seed);
  const std::vector<Shape> shapes = testing::TestShapes();
  std::uint64_t copied = 0;
  for (int round = 0; round < Rounds(400); ++round) {
    const auto kind = rng() % 4;  // elements of 1, 2, 4 and 8 bytes
    const std::uint32_t unit_bytes = kind == 3 ? 4 : 1u << kind;
    const std::uint32_t pair = kind == 3 ? 2 : 1;
    const TileGrid grid = MakeTileGrid(shapes[rng() % shapes.size()], pair);
    const UnitRange slice = testing::RandomSlice(rng, grid);
    // An allocation of its own, not always aligned to more than a unit.
    const std::size_t shift = rng() % 3 * unit_bytes;
    const std::size_t slice_bytes = slice.count() * unit_bytes;
    const auto slice_memory =
        std::make_unique<std::byte[]>(shift + slice_bytes);
    std::byte* const from = slice_memory.get() + shift;
    FillRandom(rng, {from, slice_bytes});

    BoxTarget box;
    box.unit_bytes = unit_bytes;
    box.units_per_element = pair;
    box.row_begin = rng() % 2 == 0 ? 0 : rng() % grid.rows;
    box.row_end = box.row_begin + 1 + rng() % (grid.rows - box.row_begin);
    const std::uint64_t elements = grid.cols / pair;
    const std::uint64_t first = rng() % 2 == 0 ? 0 : rng() % elements;
    const std::uint64_t count =
        rng() % 2 == 0 ? elements - first : 1 + rng() % (elements - first);
    box.col_begin = first * pair;
    box.col_end = (first + count) * pair;
    const auto element = static_cast<std::int64_t>(unit_bytes * pair);
    const auto rows = static_cast<std::int64_t>(box.row_end - box.row_begin);
    const auto cols = static_cast<std::int64_t>(count);
    const auto gap = static_cast<std::int64_t>(rng() % 3);
    switch (rng() % 3) {
      case 0:
        box.col_stride_bytes = element;
        box.row_stride_bytes = (cols + gap) * element;
        break;
      case 1:
        box.row_stride_bytes = element;
        box.col_stride_bytes = (rows + gap) * element;
        break;
      default:
        box.col_stride_bytes = 2 * element;
        box.row_stride_bytes = -(2 * cols + gap) * element;
    }
    const std::int64_t row_span = (rows - 1) * box.row_stride_bytes;
    const std::int64_t span =
        std::abs(row_span) + (cols - 1) * box.col_stride_bytes + element;
    std::vector<std::byte> memory(static_cast<std::size_t>(span) + 64);
    FillRandom(rng, memory);
    std::vector<std::byte> expected = memory;
    const std::int64_t start =
        element * static_cast<std::int64_t>(1 + rng() % 3) -
        std::min<std::int64_t>(row_span, 0);

    box.data = expected.data() + start;
    copied += CopySliceToBox(from, grid, slice, box);
    box.data = memory.data() + start;
    RunOnHost(rng, internal::MakeSliceCopyTask(from, grid, slice, box));
    ASSERT_EQ(memory, expected) << "round " << round;
  }
  EXPECT_GT(copied, 1000u);
}

}  // namespace
}  // namespace kedge
