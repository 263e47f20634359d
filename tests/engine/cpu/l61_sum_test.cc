// Goal: the SIMD sum equals the plain one for any offset, length, alignment
// and layout, on every instruction set, and sums of shards add up.

#include "kedge/engine/cpu/l61_sum.h"

#include <random>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "gtest/gtest.h"
#include "kedge/format/l61.h"
#include "kedge/tests/engine/cpu/cpu_test_support.h"

namespace kedge {
namespace {

using testing::FillRandom;
using testing::ForEachTarget;
using testing::GuardedBytes;
using testing::Shape;

TEST(L61SumTest, EqualsThePlainSumAtAnyOffsetAndLength) {
  const L61Key key = L61Key::FromSeed(21);
  const L61Summer summer(key);
  std::uint64_t seed = 0;
  ForEachTarget([&] {
    for (int i = 0; i < 150; ++i) {
      std::mt19937_64 rng(++seed);
      const std::size_t size = rng() % 200000 >> rng() % 16;
      std::uint64_t offset = rng() % 70000;
      if (rng() % 4 == 0) offset = 16384 * (rng() % 5);
      if (rng() % 4 == 0) offset += std::uint64_t{1} << 45;
      GuardedBytes bytes(size, rng() % 64);
      FillRandom(rng, bytes.span());
      if (rng() % 4 == 0) {  // the largest words
        std::fill(bytes.span().begin(), bytes.span().end(), std::byte{0xff});
      }
      ASSERT_EQ(summer.Sum(offset, bytes.span()),
                L61SumScalar(key, offset, bytes.span()))
          << "seed " << seed << ": " << size << " bytes at " << offset;
    }
  });
}

TEST(L61SumTest, EveryShortLength) {
  const L61Key key = L61Key::FromSeed(22);
  const L61Summer summer(key);
  std::mt19937_64 rng(23);
  GuardedBytes bytes(600, 0);
  FillRandom(rng, bytes.span());
  ForEachTarget([&] {
    for (std::size_t size = 0; size <= 600; ++size) {
      for (const std::uint64_t offset : {0, 1, 2, 3, 16380, 16383}) {
        const auto part = bytes.span().first(size);
        ASSERT_EQ(summer.Sum(offset, part), L61SumScalar(key, offset, part))
            << size << " bytes at " << offset;
      }
    }
  });
}

TEST(L61SumTest, ShardsAddUpInAnySplit) {
  const L61Key key = L61Key::FromSeed(24);
  const L61Summer summer(key);
  std::mt19937_64 rng(25);
  std::vector<std::byte> bytes(300000);
  FillRandom(rng, bytes);
  const std::uint64_t whole = summer.Sum(6, bytes);
  for (int i = 0; i < 50; ++i) {
    std::uint64_t sum = 0;
    for (std::size_t at = 0; at < bytes.size();) {
      const std::size_t take =
          std::min<std::size_t>(1 + rng() % 90000, bytes.size() - at);
      sum = L61Add(sum, summer.Sum(6 + at, std::span(bytes).subspan(at, take)));
      at += take;
    }
    ASSERT_EQ(sum, whole);
  }
}

TEST(L61SumTest, BoxesOfAnyLayoutAddUpToTheTensor) {
  const L61Key key = L61Key::FromSeed(26);
  const L61Summer summer(key);
  std::uint64_t seed = 100;
  for (const Shape& shape : testing::TestShapes()) {
    for (const std::uint32_t unit_bytes : {1u, 2u, 4u}) {
      for (const bool transposed : {false, true}) {
        const std::uint32_t per_element = unit_bytes == 4 ? 2 : 1;
        std::mt19937_64 rng(++seed);
        SCOPED_TRACE(absl::StrCat("seed ", seed, " shape ",
                                  absl::StrJoin(shape, "x"), " unit bytes ",
                                  unit_bytes, transposed ? " transposed" : ""));
        const TileGrid grid = MakeTileGrid(shape, per_element);
        std::vector<std::byte> tensor(grid.unit_count() * unit_bytes);
        FillRandom(rng, tensor);
        // Four boxes around a point, each with its own memory.
        const std::uint64_t elements = grid.cols / per_element;
        const std::uint64_t row_cuts[] = {0, rng() % (grid.rows + 1),
                                          grid.rows};
        const std::uint64_t col_cuts[] = {0, rng() % (elements + 1), elements};
        std::uint64_t sum = 0;
        for (int i = 0; i < 2; ++i) {
          for (int j = 0; j < 2; ++j) {
            BoxTarget box;
            box.row_begin = row_cuts[i];
            box.row_end = row_cuts[i + 1];
            box.col_begin = col_cuts[j] * per_element;
            box.col_end = col_cuts[j + 1] * per_element;
            box.unit_bytes = unit_bytes;
            box.units_per_element = per_element;
            const std::int64_t element_bytes = unit_bytes * per_element;
            const auto rows =
                static_cast<std::int64_t>(box.row_end - box.row_begin);
            const auto cols =
                static_cast<std::int64_t>(col_cuts[j + 1] - col_cuts[j]);
            box.row_stride_bytes =
                transposed ? element_bytes : element_bytes * cols;
            box.col_stride_bytes =
                transposed ? element_bytes * rows : element_bytes;
            GuardedBytes memory(
                static_cast<std::size_t>(rows * cols * element_bytes),
                rng() % 8);
            box.data = memory.data();
            for (std::uint64_t r = box.row_begin; r < box.row_end; ++r) {
              for (std::uint64_t c = box.col_begin; c < box.col_end; ++c) {
                testing::StoreUnit(
                    box.At(r, c), unit_bytes,
                    testing::LoadUnit(
                        tensor.data() + (r * grid.cols + c) * unit_bytes,
                        unit_bytes));
              }
            }
            sum = L61Add(sum, summer.SumBox(grid, box));
          }
        }
        ASSERT_EQ(sum, L61SumScalar(key, 0, tensor));
      }
    }
  }
}

}  // namespace
}  // namespace kedge
