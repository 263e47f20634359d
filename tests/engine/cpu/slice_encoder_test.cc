// Goal: the SIMD encoder gives the bytes of the plain one, and L(record) is the
// sum of its changes, on every instruction set. Method: property tests with
// printed seeds over unit sizes, shapes, slices, densities and alignments.

#include "kedge/engine/cpu/slice_encoder.h"

#include <random>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "gtest/gtest.h"
#include "kedge/format/codec.h"
#include "kedge/format/l61.h"
#include "kedge/tests/engine/cpu/cpu_test_support.h"
#include "kedge/tests/support/sanitized.h"

namespace kedge {
namespace {

using testing::FillRandom;
using testing::ForEachTarget;
using testing::GuardedBytes;
using testing::Perturb;
using testing::PlainDiff;
using testing::RandomSlice;
using testing::Shape;
using testing::Values;

std::uint64_t PlainL61(const L61Key& key, const UnitRange& slice,
                       std::uint32_t unit_bytes,
                       const std::vector<Change>& changes) {
  std::uint64_t sum = 0;
  for (const Change& change : changes) {
    sum = L61Add(sum, L61OfChange(key, slice.begin + change.index, unit_bytes,
                                  change.difference));
  }
  return sum;
}

void ExpectPlainBytes(SliceEncoder& encoder, const L61Key& key,
                      const TileGrid& grid, const UnitRange& slice,
                      std::uint32_t unit_bytes, const GuardedBytes& before,
                      const GuardedBytes& after) {
  const auto changes = PlainDiff(before.span(), after.span(), unit_bytes);
  const auto expected = EncodeRecordScalar(grid, slice, unit_bytes, changes);
  const std::vector<std::byte> prefix(16, std::byte{0x5a});
  std::vector<std::byte> out = prefix;
  const EncodedSlice encoded = encoder.Encode(
      grid, slice, unit_bytes, before.data(), after.data(), &out);
  ASSERT_EQ(encoded.nnz, changes.size());
  ASSERT_EQ(encoded.l61, PlainL61(key, slice, unit_bytes, changes));
  ASSERT_EQ(encoded.record_bytes, expected.size());
  ASSERT_EQ(out.size(), 16 + (expected.size() + 7) / 8 * 8);
  ASSERT_TRUE(std::equal(prefix.begin(), prefix.end(), out.begin()));
  ASSERT_TRUE(std::equal(expected.begin(), expected.end(), out.begin() + 16));
  for (std::size_t i = 16 + expected.size(); i < out.size(); ++i) {
    ASSERT_EQ(out[i], std::byte{0});
  }
}

TEST(SliceEncoderTest, EqualsThePlainEncoder) {
  const L61Key key = L61Key::FromSeed(11);
  std::uint64_t seed = 0;
  ForEachTarget([&] {
    SliceEncoder encoder(key);
    for (const Shape& shape : testing::TestShapes()) {
      const TileGrid grid = MakeTileGrid(shape, 1);
      for (const std::uint32_t unit_bytes : {1u, 2u, 4u}) {
        for (int round = 0; round < Rounds(4); ++round) {
          std::mt19937_64 rng(++seed);
          const UnitRange slice = RandomSlice(rng, grid);
          const double densities[] = {0, 0.0001, 0.001, 0.01, 0.05, 0.3, 1};
          const double density = densities[rng() % 7];
          const auto values = static_cast<Values>(rng() % 3);
          SCOPED_TRACE(absl::StrCat("seed ", seed, " shape ",
                                    absl::StrJoin(shape, "x"), " unit bytes ",
                                    unit_bytes, " density ", density));
          GuardedBytes before(slice.count() * unit_bytes, rng() % 64);
          GuardedBytes after(slice.count() * unit_bytes, rng() % 64);
          FillRandom(rng, before.span());
          std::memcpy(after.data(), before.data(), before.size());
          Perturb(rng, density, values, unit_bytes, after.span());
          ExpectPlainBytes(encoder, key, grid, slice, unit_bytes, before,
                           after);
          if (::testing::Test::HasFatalFailure()) return;
        }
      }
    }
  });
}

TEST(SliceEncoderTest, FindsOneChangeAtEveryPlace) {
  const L61Key key = L61Key::FromSeed(12);
  SliceEncoder encoder(key);
  const TileGrid grid = MakeTileGrid(Shape{5, 130}, 1);
  const UnitRange slice{0, 650};
  for (const std::uint32_t unit_bytes : {1u, 2u, 4u}) {
    GuardedBytes before(650 * unit_bytes, 3);
    for (std::uint32_t i = 0; i < 650; ++i) {
      GuardedBytes after = before;
      after.data()[i * unit_bytes + unit_bytes - 1] ^= std::byte{0x80};
      ExpectPlainBytes(encoder, key, grid, slice, unit_bytes, before, after);
      if (::testing::Test::HasFatalFailure()) FAIL() << "unit " << i;
    }
  }
}

TEST(SliceEncoderTest, NothingChangedAppendsNothing) {
  SliceEncoder encoder(L61Key::FromSeed(13));
  const TileGrid grid = MakeTileGrid(Shape{300, 130}, 1);
  GuardedBytes bytes(39000 * 2, 1);
  std::vector<std::byte> out;
  const EncodedSlice encoded =
      encoder.Encode(grid, {0, 39000}, 2, bytes.data(), bytes.data(), &out);
  EXPECT_EQ(encoded.nnz, 0u);
  EXPECT_EQ(encoded.record_bytes, 0u);
  EXPECT_EQ(encoded.l61, 0u);
  EXPECT_TRUE(out.empty());
}

TEST(SliceEncoderTest, NanPayloadsAndNegativeZerosAreOrdinaryBits) {
  const L61Key key = L61Key::FromSeed(14);
  SliceEncoder encoder(key);
  const TileGrid grid = MakeTileGrid(Shape{4}, 1);
  const std::uint16_t before_units[] = {0x0000, 0x7fc0, 0x7f80, 0xffff};
  const std::uint16_t after_units[] = {0x8000, 0x7fc1, 0xff80, 0x0000};
  GuardedBytes before(8, 1);
  GuardedBytes after(8, 0);
  std::memcpy(before.data(), before_units, 8);
  std::memcpy(after.data(), after_units, 8);
  ExpectPlainBytes(encoder, key, grid, {0, 4}, 2, before, after);
}

TEST(SliceEncoderTest, RowsAndUnitsBeyondTwoToThe32) {
  const L61Key key = L61Key::FromSeed(15);
  SliceEncoder encoder(key);
  std::mt19937_64 rng(16);
  for (const Shape& shape :
       {Shape{std::uint64_t{1} << 33}, Shape{std::uint64_t{1} << 21, 4100},
        Shape{std::uint64_t{1} << 34, 1}, Shape{2, std::uint64_t{1} << 33}}) {
    const TileGrid grid = MakeTileGrid(shape, 1);
    const std::uint64_t begin = grid.unit_count() - 50001;
    GuardedBytes before(50000 * 2, 0);
    FillRandom(rng, before.span());
    GuardedBytes after = before;
    Perturb(rng, 0.01, Values::kMostlyOne, 2, after.span());
    const UnitRange slice{begin, begin + 50000};
    std::vector<std::byte> out;
    const EncodedSlice encoded =
        encoder.Encode(grid, slice, 2, before.data(), after.data(), &out);
    out.resize(encoded.record_bytes);
    std::uint64_t visited = 0;
    const absl::Status status = VisitRecord(
        out, grid, slice, 2, [&](std::uint64_t unit, std::int64_t d) {
          const std::size_t at = (unit - begin) * 2;
          const auto sum = testing::LoadUnit(before.data() + at, 2) +
                           static_cast<std::uint64_t>(d);
          ASSERT_EQ(static_cast<std::uint16_t>(sum),
                    testing::LoadUnit(after.data() + at, 2));
          ++visited;
        });
    ASSERT_TRUE(status.ok()) << status.message();
    EXPECT_EQ(visited, PlainDiff(before.span(), after.span(), 2).size());
  }
}

}  // namespace
}  // namespace kedge
