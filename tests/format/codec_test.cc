// Goal: records hold exactly the changes of a slice, for every unit size,
// density and grid; and bytes that no encoder made are refused or mean
// something else, without a crash. Method: property tests with printed seeds,
// every single-bit flip of small records, every truncation.

#include "kedge/format/codec.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <random>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace kedge {
namespace {

enum class Values { kMostlyOne, kSmall, kWide };

std::int64_t RandomDifference(std::mt19937_64& rng, std::uint32_t unit_bytes,
                              Values values) {
  const std::int64_t most = (std::int64_t{1} << (8 * unit_bytes)) - 1;
  std::int64_t d = 1;
  switch (values) {
    case Values::kMostlyOne:
      d = rng() % 8 == 0 ? 1 + static_cast<std::int64_t>(rng() % 5) : 1;
      if (rng() % 2000 == 0) d = most;
      break;
    case Values::kSmall:
      d = 1 + static_cast<std::int64_t>(rng() % 20);
      break;
    case Values::kWide:
      d = 1 + static_cast<std::int64_t>(rng() % most);
      d >>= rng() % (8 * unit_bytes);
      if (rng() % 50 == 0) d = most;
      break;
  }
  d = std::clamp<std::int64_t>(d, 1, most);
  return rng() % 2 == 0 ? d : -d;
}

std::vector<Change> RandomChanges(std::mt19937_64& rng, std::uint32_t units,
                                  std::uint32_t unit_bytes, double density,
                                  Values values) {
  std::bernoulli_distribution changed(density);
  std::vector<Change> changes;
  for (std::uint32_t i = 0; i < units; ++i) {
    if (changed(rng)) {
      changes.push_back({i, RandomDifference(rng, unit_bytes, values)});
    }
  }
  return changes;
}

// Packs bit fields by the rule at the head of codec.h, for made-up payloads.
class Bits {
 public:
  Bits& Put(std::uint64_t value, std::uint32_t width) {
    for (std::uint32_t i = 0; i < width; ++i) bits_.push_back(value >> i & 1);
    return *this;
  }
  Bits& Unary(std::uint32_t zeros) {
    return Put(0, zeros / 2).Put(0, zeros - zeros / 2).Put(1, 1);
  }
  std::vector<std::byte> Bytes() const {
    std::vector<std::byte> bytes((bits_.size() + 7) / 8);
    for (std::size_t i = 0; i < bits_.size(); ++i) {
      if (bits_[i]) bytes[i / 8] |= static_cast<std::byte>(1 << (i % 8));
    }
    return bytes;
  }

 private:
  std::vector<bool> bits_;
};

TEST(RiceParameterTest, IsTheFloorOfTheLogarithm) {
  for (const std::uint32_t units : {1u, 2u, 100u, 3200u, 16384u}) {
    for (std::uint32_t count = 1; count <= units; ++count) {
      const std::uint32_t k = RiceParameter(count, units);
      // 0.48125 (2u - c) / c against 2^k and 2^(k+1), in integers.
      const std::uint64_t n = std::uint64_t{77} * (2 * units - count);
      const std::uint64_t d = std::uint64_t{160} * count;
      ASSERT_TRUE(k == 0 || n >= d << k) << count << " of " << units;
      ASSERT_TRUE(n < d << (k + 1)) << count << " of " << units;
    }
  }
  EXPECT_EQ(RiceParameter(1, 16384), 13u);
  EXPECT_EQ(RiceParameter(306, 16384), 5u);
}

TEST(ZigzagTest, RoundTrips) {
  for (const std::int64_t d :
       {std::int64_t{0}, std::int64_t{1}, std::int64_t{-1}, std::int64_t{65535},
        std::int64_t{-65535}, std::int64_t{0xffffffff},
        -std::int64_t{0xffffffff}}) {
    EXPECT_EQ(Unzigzag(Zigzag(d)), d);
  }
  EXPECT_EQ(Zigzag(-1), 1u);
  EXPECT_EQ(Zigzag(1), 2u);
}

TEST(TileCodecTest, RoundTripsEveryUnitSizeAndDensity) {
  std::uint64_t seed = 0;
  for (const std::uint32_t unit_bytes : {1u, 2u, 4u}) {
    for (const std::uint32_t units :
         {1u, 2u, 3u, 127u, 3200u, 16383u, 16384u}) {
      for (const double density : {0.0001, 0.001, 0.02, 0.2, 0.3, 0.7, 1.0}) {
        for (const Values values :
             {Values::kMostlyOne, Values::kSmall, Values::kWide}) {
          std::mt19937_64 rng(++seed);
          auto changes = RandomChanges(rng, units, unit_bytes, density, values);
          if (changes.empty()) {
            changes = {{static_cast<std::uint32_t>(rng() % units),
                        RandomDifference(rng, unit_bytes, values)}};
          }
          std::vector<std::byte> payload;
          const TileHeader header =
              EncodeTile(changes, units, unit_bytes, &payload);
          ASSERT_EQ(header.bytes, payload.size());
          ASSERT_LE(header.bytes, kMaxTileBytes);
          // Never longer than every unit in w + 1 bits.
          ASSERT_LE(header.bytes, (units * (8 * unit_bytes + 1) + 7) / 8 + 4)
              << "seed " << seed;
          std::vector<Change> decoded;
          const TileView view{0, header.mode, header.a, header.b, payload};
          const absl::Status status =
              DecodeTile(view, units, unit_bytes, &decoded);
          ASSERT_TRUE(status.ok()) << status.message() << " seed " << seed;
          ASSERT_EQ(decoded, changes) << "seed " << seed;
        }
      }
    }
  }
}

TEST(TileCodecTest, ModeFollowsTheRule) {
  std::mt19937_64 rng(1);
  std::vector<std::byte> payload;
  const auto mode = [&](double density, Values values) {
    payload.clear();
    return EncodeTile(RandomChanges(rng, 16384, 2, density, values), 16384, 2,
                      &payload)
        .mode;
  };
  EXPECT_EQ(mode(0.02, Values::kMostlyOne), TileMode::kSparse);
  EXPECT_EQ(mode(0.24, Values::kWide), TileMode::kSparse);
  EXPECT_EQ(mode(1.0, Values::kSmall), TileMode::kDense);
  EXPECT_EQ(mode(1.0, Values::kWide), TileMode::kDense);
}

TEST(TileCodecTest, WorkedSparsePayload) {
  // Units 5, 6 and 260 of 300 change by +1, -1 and +256.
  const std::vector<Change> changes = {{5, 1}, {6, -1}, {260, 256}};
  std::vector<std::byte> payload;
  const TileHeader header = EncodeTile(changes, 300, 2, &payload);
  const std::uint32_t ka = RiceParameter(2, 300);
  const std::uint32_t kb = RiceParameter(1, 300);
  EXPECT_EQ(ka, 7u);
  EXPECT_EQ(kb, 8u);
  Bits bits;
  bits.Put(5, ka).Put(0, 1).Put(0, ka).Put(1, 1);
  bits.Put(260 & 255, kb).Put(0, 1);
  bits.Unary(0).Unary(0).Unary(1);
  bits.Unary(7).Put(255 & 127, 7);
  EXPECT_EQ(payload, bits.Bytes());
  EXPECT_EQ(header.a, 2u);
  EXPECT_EQ(header.b, 1u);
}

absl::Status Decode(TileMode mode, std::uint32_t a, std::uint32_t b,
                    const std::vector<std::byte>& payload, std::uint32_t units,
                    std::uint32_t unit_bytes) {
  std::vector<Change> changes;
  return DecodeTile({0, mode, a, b, payload}, units, unit_bytes, &changes);
}

TEST(TileCodecTest, RefusesBrokenSparseTiles) {
  const std::uint32_t k1 = RiceParameter(1, 100);  // 6
  const auto sparse = [&](std::uint32_t a, std::uint32_t b, const Bits& bits) {
    return Decode(TileMode::kSparse, a, b, bits.Bytes(), 100, 2);
  };
  EXPECT_TRUE(sparse(1, 0, Bits().Put(35, k1).Put(0, 1).Unary(1)).ok());
  EXPECT_THAT(sparse(1, 0, Bits().Put(36, k1).Put(0, 1).Unary(1)).message(),
              testing::HasSubstr("names unit 100 of 100"));
  EXPECT_THAT(sparse(1, 1,
                     Bits()
                         .Put(9, k1)
                         .Put(0, 1)
                         .Put(9, k1)
                         .Put(0, 1)
                         .Unary(0)
                         .Unary(0)
                         .Unary(0))
                  .message(),
              testing::HasSubstr("unit 9 stands in both lists"));
  EXPECT_THAT(
      sparse(0, 1, Bits().Put(9, k1).Put(0, 1).Unary(0).Unary(16).Put(0, 16))
          .message(),
      testing::HasSubstr("exponent 16"));
  EXPECT_THAT(sparse(0, 1,
                     Bits().Put(9, k1).Put(0, 1).Unary(0).Unary(15).Put(
                         (1 << 15) - 1, 15))
                  .message(),
              testing::HasSubstr("difference of 65536"));
  EXPECT_TRUE(sparse(0, 1,
                     Bits().Put(9, k1).Put(0, 1).Unary(0).Unary(15).Put(
                         (1 << 15) - 2, 15))
                  .ok());
  EXPECT_THAT(sparse(0, 0, Bits().Put(0, 8)).message(),
              testing::HasSubstr("expected 1 to 100"));
  EXPECT_FALSE(sparse(100, 1, Bits().Put(0, 8)).ok());
  // A padding bit; a byte too many; a byte too few.
  EXPECT_FALSE(
      sparse(1, 0, Bits().Put(35, k1).Put(0, 1).Unary(1).Put(1, 1)).ok());
  EXPECT_FALSE(
      sparse(1, 0, Bits().Put(35, k1).Put(0, 1).Unary(1).Put(0, 8)).ok());
  EXPECT_FALSE(sparse(1, 0, Bits().Put(35, k1).Put(0, 1)).ok());
}

TEST(TileCodecTest, RefusesBrokenDenseTiles) {
  const auto dense = [&](std::uint32_t a, std::uint32_t b, const Bits& bits) {
    return Decode(TileMode::kDense, a, b, bits.Bytes(), 2, 1);
  };
  EXPECT_TRUE(dense(1, 0, Bits().Put(1, 1).Put(0, 1).Unary(1).Unary(0)).ok());
  EXPECT_TRUE(
      dense(1, 1, Bits().Put(1, 1).Put(0, 1).Unary(15).Unary(0).Put(31, 9))
          .ok());
  // An escape that needs none; one whose low bits contradict the plane.
  EXPECT_FALSE(
      dense(1, 1, Bits().Put(1, 1).Put(0, 1).Unary(15).Unary(0).Put(29, 9))
          .ok());
  EXPECT_FALSE(
      dense(1, 1, Bits().Put(1, 1).Put(0, 1).Unary(15).Unary(0).Put(32, 9))
          .ok());
  EXPECT_THAT(
      dense(1, 1, Bits().Put(1, 1).Put(0, 1).Unary(1).Unary(0)).message(),
      testing::HasSubstr("escapes: expected 1, found 0"));
  EXPECT_FALSE(dense(1, 0, Bits().Put(1, 1).Put(0, 1).Unary(16)).ok());
  EXPECT_THAT(dense(0, 0, Bits().Unary(0).Unary(0)).message(),
              testing::HasSubstr("no change"));
  EXPECT_FALSE(dense(10, 0, Bits().Put(5, 10).Put(3, 10)).ok());
  EXPECT_TRUE(dense(9, 0, Bits().Put(5, 9).Put(0, 9)).ok());
  EXPECT_TRUE(dense(9, 0, Bits().Put(510, 9).Put(509, 9)).ok());
  EXPECT_THAT(dense(9, 0, Bits().Put(511, 9).Put(0, 9)).message(),
              testing::HasSubstr("difference of -256"));
}

struct Unpacked {
  std::vector<std::uint64_t> units;
  std::vector<std::int64_t> differences;

  friend bool operator==(const Unpacked&, const Unpacked&) = default;
};

absl::StatusOr<Unpacked> Visit(std::span<const std::byte> record,
                               const TileGrid& grid, const UnitRange& slice,
                               std::uint32_t unit_bytes) {
  std::vector<std::pair<std::uint64_t, std::int64_t>> found;
  absl::Status status = VisitRecord(record, grid, slice, unit_bytes,
                                    [&](std::uint64_t unit, std::int64_t d) {
                                      found.push_back({unit, d});
                                    });
  if (!status.ok()) return status;
  std::sort(found.begin(), found.end());
  Unpacked result;
  for (const auto& [unit, d] : found) {
    result.units.push_back(unit);
    result.differences.push_back(d);
  }
  return result;
}

using Shape = std::vector<std::uint64_t>;

TEST(RecordTest, RoundTripsShapesAndSlices) {
  const Shape shapes[] = {{},         {1},        {5},           {127},
                          {40000},    {1, 999},   {999, 1},      {5, 1000},
                          {300, 130}, {257, 127}, {16, 8, 3, 3}, {70, 5, 5, 5},
                          {129, 400}, {20000, 1}, {140000}};
  std::uint64_t seed = 100;
  for (const Shape& shape : shapes) {
    const TileGrid grid = MakeTileGrid(shape, 1);
    for (const std::uint32_t unit_bytes : {1u, 2u, 4u}) {
      for (int round = 0; round < 6; ++round) {
        std::mt19937_64 rng(++seed);
        UnitRange slice{0, grid.unit_count()};
        if (round > 1) {  // begins and ends anywhere, mid row and mid tile
          slice.begin = rng() % grid.unit_count();
          slice.end =
              slice.begin + 1 + rng() % (grid.unit_count() - slice.begin);
        }
        const double densities[] = {0.00005, 0.002, 0.02, 0.3, 1.0};
        auto changes =
            RandomChanges(rng, static_cast<std::uint32_t>(slice.count()),
                          unit_bytes, densities[rng() % 5],
                          round % 2 ? Values::kMostlyOne : Values::kWide);
        const std::vector<std::byte> record =
            EncodeRecordScalar(grid, slice, unit_bytes, changes);
        ASSERT_EQ(record.empty(), changes.empty());
        if (changes.empty()) continue;
        Unpacked expected;
        for (const Change& change : changes) {
          expected.units.push_back(slice.begin + change.index);
          expected.differences.push_back(change.difference);
        }
        const auto found = Visit(record, grid, slice, unit_bytes);
        ASSERT_TRUE(found.ok())
            << found.status().message() << " shape "
            << absl::StrJoin(shape, "x") << " seed " << seed;
        ASSERT_EQ(*found, expected)
            << "shape " << absl::StrJoin(shape, "x") << " seed " << seed;
        const auto view = RecordView::Parse(record, grid.TilesOf(slice));
        ASSERT_EQ(view->nnz(), changes.size());
      }
    }
  }
}

TEST(RecordTest, BoundIsAnUpperBound) {
  std::mt19937_64 rng(5);
  const TileGrid grid = MakeTileGrid(Shape{2000, 300}, 1);
  RecordBuilder builder;
  std::vector<std::byte> out(24, std::byte{0xaa});
  for (int reuse = 0; reuse < 2; ++reuse) {
    builder.Start({0, grid.tile_count()});
    for (std::uint64_t t = 0; t < grid.tile_count(); t += 1 + rng() % 3) {
      const std::uint32_t units = grid.Box(t).unit_count();
      const auto changes = RandomChanges(rng, units, 2, 0.3, Values::kWide);
      if (changes.empty()) continue;
      const TileHeader header =
          EncodeTile(changes, units, 2, builder.payload());
      builder.AddTile(t, header, static_cast<std::uint32_t>(changes.size()));
    }
    const std::size_t before = out.size();
    const std::uint64_t bound = builder.bound_bytes();
    const std::uint64_t bytes = builder.Finish(&out);
    EXPECT_LE(bytes, bound);
    EXPECT_EQ((out.size() - before) % kRecordAlignment, 0u);
    EXPECT_LT(out.size() - before - bytes, kRecordAlignment);
    EXPECT_TRUE(Visit(std::span(out).subspan(before, bytes), grid,
                      {0, grid.unit_count()}, 2)
                    .ok());
  }
  EXPECT_EQ(out[23], std::byte{0xaa});
}

// Small records of every kind: one tile, many tiles of unlike counts, dense.
std::vector<std::vector<Change>> SmallChangeSets(std::mt19937_64& rng) {
  return {
      {{0, 1}},
      {{3, -1}, {7, 200}},
      {{1, 1}, {2, -1}, {3, 1}, {150, 5}, {290, -3}},
      RandomChanges(rng, 300, 1, 0.05, Values::kWide),
      RandomChanges(rng, 300, 1, 0.4, Values::kSmall),
      RandomChanges(rng, 300, 1, 1.0, Values::kWide),
  };
}

TEST(RecordTest, EveryBitFlipIsRefusedOrMeansSomethingElse) {
  std::mt19937_64 rng(6);
  // 128-unit runs, boxes, and a slice in the middle of them.
  for (const Shape& shape : {Shape{300}, Shape{100, 3}, Shape{2, 150}}) {
    TileGrid grid = MakeTileGrid(shape, 1);
    // Smaller tiles than any real tensor has give records of many tiles.
    for (const std::uint32_t cols : {grid.tile_cols, 20u, 3u}) {
      if (cols > grid.cols) continue;
      grid.tile_cols = cols;
      grid.tiles_per_band = (grid.cols + cols - 1) / cols;
      for (const auto& changes : SmallChangeSets(rng)) {
        const UnitRange slice{0, 300};
        std::vector<std::byte> record =
            EncodeRecordScalar(grid, slice, 1, changes);
        const auto original = Visit(record, grid, slice, 1);
        ASSERT_TRUE(original.ok()) << original.status().message();
        for (std::size_t bit = 0; bit < 8 * record.size(); ++bit) {
          record[bit / 8] ^= static_cast<std::byte>(1 << (bit % 8));
          const auto flipped = Visit(record, grid, slice, 1);
          ASSERT_FALSE(flipped.ok() && *flipped == *original)
              << "bit " << bit << " of " << 8 * record.size() << ", "
              << changes.size() << " changes, tile_cols " << cols;
          record[bit / 8] ^= static_cast<std::byte>(1 << (bit % 8));
        }
      }
    }
  }
}

TEST(RecordTest, EveryTruncationAndExtensionIsRefused) {
  std::mt19937_64 rng(7);
  const TileGrid grid = MakeTileGrid(Shape{300}, 1);
  for (const auto& changes : SmallChangeSets(rng)) {
    std::vector<std::byte> record =
        EncodeRecordScalar(grid, {0, 300}, 1, changes);
    for (std::size_t size = 0; size < record.size(); ++size) {
      ASSERT_FALSE(Visit(std::span(record).first(size), grid, {0, 300}, 1).ok())
          << size << " of " << record.size();
    }
    record.push_back(std::byte{0});
    ASSERT_FALSE(Visit(record, grid, {0, 300}, 1).ok());
  }
}

TEST(RecordTest, MoreTilesThanBytesAreRefusedBeforeTheirHeadersAreRead) {
  // Zeros, as in a sparse file: group headers alone, no byte for any tile.
  RecordHeader header = {};
  header.tile_count = 64 * 1000;
  header.nnz = 64 * 1000;
  std::vector<std::byte> record(sizeof(header) + 1000 * sizeof(GroupHeader));
  std::memcpy(record.data(), &header, sizeof(header));
  const auto parsed =
      RecordView::Parse(record, {.first = 0, .count = 1'000'000});
  ASSERT_EQ(parsed.status().code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(std::string(parsed.status().message()),
              testing::HasSubstr("tile_count 64000 does not fit"));
}

TEST(RecordTest, MutatedBytesNeverCrash) {
  const TileGrid grid = MakeTileGrid(Shape{300, 130}, 1);
  int accepted = 0;
  for (std::uint64_t seed = 0; seed < 3000; ++seed) {
    std::mt19937_64 rng(seed);
    const std::uint32_t unit_bytes = 1u << (rng() % 3);
    const UnitRange slice{rng() % 20000, 20001 + rng() % 18999};
    const double densities[] = {0.0005, 0.02, 0.5};
    const auto changes =
        RandomChanges(rng, static_cast<std::uint32_t>(slice.count()) / 8,
                      unit_bytes, densities[rng() % 3], Values::kWide);
    if (changes.empty()) continue;
    auto record = EncodeRecordScalar(grid, slice, unit_bytes, changes);
    for (std::uint64_t n = 1 + rng() % 3; n > 0; --n) {
      // Headers are few bytes: aim at them half of the time.
      const std::size_t reach =
          rng() % 2 ? std::min<std::size_t>(record.size(), 80) : record.size();
      record[rng() % reach] = static_cast<std::byte>(rng());
    }
    const auto found = Visit(record, grid, slice, unit_bytes);
    if (!found.ok()) {
      ASSERT_EQ(found.status().code(), absl::StatusCode::kDataLoss);
      continue;
    }
    ++accepted;
    for (std::size_t i = 0; i < found->units.size(); ++i) {
      ASSERT_GE(found->units[i], slice.begin);
      ASSERT_LT(found->units[i], slice.end);
      ASSERT_LT(std::abs(found->differences[i]),
                std::int64_t{1} << (8 * unit_bytes));
    }
  }
  EXPECT_GT(accepted, 0);  // some flips only change a sign or a low bit
}

TEST(RecordTest, RandomBytesAreRefused) {
  const TileGrid grid = MakeTileGrid(Shape{300, 130}, 1);
  for (std::uint64_t seed = 0; seed < 2000; ++seed) {
    std::mt19937_64 rng(seed);
    std::vector<std::byte> record(rng() % 200);
    for (std::byte& b : record) b = static_cast<std::byte>(rng());
    if (record.size() > 8) {
      const std::uint64_t counts = 1 + rng() % 3;  // a plausible tile_count
      std::memcpy(record.data(), &counts, 8);
    }
    ASSERT_FALSE(Visit(record, grid, {0, grid.unit_count()}, 2).ok()) << seed;
  }
}

TEST(RecordTest, UnitsOutsideTheSliceAreRefused) {
  const TileGrid grid = MakeTileGrid(Shape{300, 130}, 1);
  const std::vector<Change> changes = {{1000, 1}, {2000, -1}};
  const auto record = EncodeRecordScalar(grid, {0, 39000}, 2, changes);
  EXPECT_TRUE(Visit(record, grid, {1000, 2001}, 2).ok());
  for (const UnitRange slice : {UnitRange{1001, 2001}, UnitRange{1000, 2000}}) {
    const auto found = Visit(record, grid, slice, 2);
    EXPECT_EQ(found.status().code(), absl::StatusCode::kDataLoss);
    EXPECT_THAT(found.status().message(),
                testing::HasSubstr("outside the slice"));
  }
}

TEST(RecordTest, TileHeadersWiderThanNeededAreRefused) {
  const TileGrid grid = MakeTileGrid(Shape{300}, 1);
  const UnitRange slice{0, 300};
  auto record = EncodeRecordScalar(grid, slice, 2, std::vector<Change>{{5, 1}});
  ASSERT_TRUE(Visit(record, grid, slice, 2).ok());
  // One tile has no packed bits. A bit of width for any field, with a zero to
  // read, would say the same in other bytes.
  const std::size_t packed_at = sizeof(RecordHeader) + sizeof(GroupHeader);
  record.insert(record.begin() + packed_at, std::byte{0});
  for (int field = 0; field < kTileFieldCount; ++field) {
    auto wide = record;
    wide[sizeof(RecordHeader) + offsetof(GroupHeader, widths) + field] =
        std::byte{1};
    EXPECT_THAT(Visit(wide, grid, slice, 2).status().message(),
                testing::HasSubstr("not the tightest"))
        << field;
  }
}

TEST(RecordTest, WrongCountsAreNamed) {
  const TileGrid grid = MakeTileGrid(Shape{300, 130}, 1);
  const UnitRange slice{0, grid.unit_count()};
  auto record =
      EncodeRecordScalar(grid, slice, 2, std::vector<Change>{{5, 1}, {39, 4}});
  record[8] = std::byte{3};
  EXPECT_THAT(Visit(record, grid, slice, 2).status().message(),
              testing::HasSubstr("nnz: expected 3, found 2"));
  record[8] = std::byte{2};
  record[4] = std::byte{1};
  EXPECT_THAT(Visit(record, grid, slice, 2).status().message(),
              testing::HasSubstr("record offset 4"));
  record[4] = std::byte{0};
  record[3] = std::byte{0x80};  // a bomb: 2^31 tiles
  EXPECT_THAT(Visit(record, grid, slice, 2).status().message(),
              testing::HasSubstr("tile_count: expected 1 to 6"));
}

}  // namespace
}  // namespace kedge
