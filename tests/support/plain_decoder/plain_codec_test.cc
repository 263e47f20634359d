// Goal: kedge's plain codec and L61 are what spec/ says.
// Method: property tests against kedge_plain, which was written from the pages
// alone: the same bytes from both encoders, the same changes from both
// decoders, the same verdict on damaged records. A failure prints its seed.

#include "plain_codec.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <random>
#include <span>
#include <stdexcept>
#include <vector>

#include "gtest/gtest.h"
#include "kedge/format/codec.h"
#include "kedge/format/l61.h"
#include "kedge/format/tile_grid.h"

namespace kedge {
namespace {

using kedge_plain::FlatChange;

struct Case {
  std::vector<std::uint64_t> shape;
  std::uint32_t element_bytes = 1;
  std::uint32_t unit_bytes = 1;
  UnitRange slice;
  std::vector<FlatChange> plain;  // by flat index in the tensor
  std::vector<Change> changes;    // by index in the slice
  TileGrid grid;
};

Case RandomCase(std::mt19937_64& random) {
  const auto below = [&](std::uint64_t n) { return random() % n; };
  Case c;
  const std::uint64_t rank = below(5);
  const std::uint64_t largest[] = {1, 40000, 250, 30, 12};
  std::uint64_t units = 1;
  for (std::uint64_t i = 0; i < rank; ++i) {
    c.shape.push_back(1 + below(largest[rank]));
    units *= c.shape.back();
  }
  c.element_bytes = 1u << below(4);
  c.unit_bytes = std::min(c.element_bytes, 4u);
  if (c.element_bytes == 8) units *= 2;
  c.slice.begin = below(3) == 0 ? below(units) : 0;
  c.slice.end =
      below(3) == 0 ? c.slice.begin + 1 + below(units - c.slice.begin) : units;
  c.grid = MakeTileGrid(c.shape, c.element_bytes == 8 ? 2 : 1);

  const double densities[] = {0.0005, 0.01, 0.1, 0.3, 1.0};
  const double density = densities[below(5)];
  const std::uint64_t values = below(4);
  const std::int64_t limit = std::int64_t{1} << (8 * c.unit_bytes);
  for (std::uint64_t unit = c.slice.begin; unit < c.slice.end; ++unit) {
    if (std::uniform_real_distribution<>(0, 1)(random) >= density) continue;
    std::int64_t d = below(2) == 0 ? 1 : -1;
    if (values == 1) d = static_cast<std::int64_t>(below(9)) - 4;
    if (values == 2) d *= limit - 1;
    if (values == 3) {
      d = static_cast<std::int64_t>(below(2 * limit - 1)) - limit + 1;
    }
    if (d == 0) continue;
    c.plain.emplace_back(unit, d);
    c.changes.push_back({static_cast<std::uint32_t>(unit - c.slice.begin), d});
  }
  return c;
}

std::vector<FlatChange> Visited(std::span<const std::byte> record,
                                const Case& c, absl::Status* status) {
  std::vector<FlatChange> found;
  *status = VisitRecord(
      record, c.grid, c.slice, c.unit_bytes,
      [&](std::uint64_t unit, std::int64_t d) { found.emplace_back(unit, d); });
  std::sort(found.begin(), found.end());
  return found;
}

TEST(PlainCodecTest, BothEncodersGiveTheSameBytesAndBothDecodersReadThem) {
  int encoded = 0;
  for (std::uint64_t seed = 1; seed <= 120; ++seed) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    std::mt19937_64 random(seed);
    const Case c = RandomCase(random);
    if (c.changes.empty()) continue;
    ++encoded;
    const kedge_plain::Bytes expected = kedge_plain::EncodeRecord(
        c.plain, c.shape, c.element_bytes, c.slice.begin, c.slice.end);
    const std::vector<std::byte> found =
        EncodeRecordScalar(c.grid, c.slice, c.unit_bytes, c.changes);
    const auto found_bytes = std::as_bytes(std::span(expected));
    ASSERT_TRUE(std::equal(found.begin(), found.end(), found_bytes.begin(),
                           found_bytes.end()));
    ASSERT_EQ(kedge_plain::DecodeRecord(expected, c.shape, c.element_bytes,
                                        c.slice.begin, c.slice.end),
              c.plain);
    absl::Status status;
    ASSERT_EQ(Visited(found, c, &status), c.plain) << status;
    ASSERT_TRUE(status.ok()) << status;
  }
  EXPECT_GT(encoded, 80);
}

TEST(PlainCodecTest, BothDecodersAgreeOnDamagedRecords) {
  int refused = 0;
  for (std::uint64_t seed = 1; seed <= 50; ++seed) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    std::mt19937_64 random(seed);
    const Case c = RandomCase(random);
    if (c.changes.empty()) continue;
    const kedge_plain::Bytes sound = kedge_plain::EncodeRecord(
        c.plain, c.shape, c.element_bytes, c.slice.begin, c.slice.end);
    for (int i = 0; i < 20; ++i) {
      kedge_plain::Bytes bad = sound;
      // Anywhere, in the headers, or cut short.
      const std::uint64_t where[] = {bad.size(),
                                     std::min<std::uint64_t>(bad.size(), 80)};
      if (i % 3 == 2) {
        bad.resize(random() % bad.size());
      } else {
        bad[random() % where[i % 3]] ^=
            static_cast<std::uint8_t>(1u << (random() % 8));
      }
      bool plain_takes = true;
      std::vector<FlatChange> plain;
      try {
        plain = kedge_plain::DecodeRecord(bad, c.shape, c.element_bytes,
                                          c.slice.begin, c.slice.end);
      } catch (const std::runtime_error&) {
        plain_takes = false;
      }
      absl::Status status;
      const auto found = Visited(std::as_bytes(std::span(bad)), c, &status);
      ASSERT_EQ(status.ok(), plain_takes) << "mutation " << i << ": " << status;
      if (plain_takes) {
        ASSERT_EQ(found, plain) << "mutation " << i;
      }
      refused += plain_takes ? 0 : 1;
    }
  }
  EXPECT_GT(refused, 200);
}

TEST(PlainCodecTest, ApplyingTheDifferenceGivesTheNewBytes) {
  for (std::uint64_t seed = 1; seed <= 40; ++seed) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    std::mt19937_64 random(seed);
    const std::uint32_t element_bytes = 1u << (random() % 4);
    kedge_plain::Bytes before(element_bytes * (1 + random() % 500));
    for (std::uint8_t& byte : before)
      byte = static_cast<std::uint8_t>(random());
    kedge_plain::Bytes after = before;
    for (std::uint8_t& byte : after) {
      if (random() % 5 == 0) byte = static_cast<std::uint8_t>(random());
    }
    const auto changes = kedge_plain::Difference(before, after, element_bytes);
    const std::uint64_t l61_before = kedge_plain::L61(seed, before);
    kedge_plain::Bytes applied = before;
    kedge_plain::Apply(changes, element_bytes, &applied);
    ASSERT_EQ(applied, after);
    ASSERT_EQ(
        kedge_plain::L61Sum(l61_before, kedge_plain::L61OfChanges(
                                            seed, changes, element_bytes)),
        kedge_plain::L61(seed, after));
  }
}

TEST(PlainCodecTest, L61IsTheSameFromPageAndCode) {
  for (std::uint64_t seed = 0; seed < 60; ++seed) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    std::mt19937_64 random(seed);
    kedge_plain::Bytes bytes(random() % 40000);
    for (std::uint8_t& byte : bytes) byte = static_cast<std::uint8_t>(random());
    const std::uint64_t offset = random() % 70000;
    const L61Key key = L61Key::FromSeed(seed);
    ASSERT_EQ(L61SumScalar(key, offset, std::as_bytes(std::span(bytes))),
              kedge_plain::L61(seed, bytes, offset));
    const std::uint32_t unit_bytes = 1u << (random() % 3);
    const std::uint64_t unit = random() >> 20;
    const std::int64_t limit = std::int64_t{1} << (8 * unit_bytes);
    const std::int64_t d =
        static_cast<std::int64_t>(random() % (2 * limit - 1)) - limit + 1;
    if (d == 0) continue;
    ASSERT_EQ(L61OfChange(key, unit, unit_bytes, d),
              kedge_plain::L61OfChanges(seed, {{unit, d}}, unit_bytes));
  }
}

}  // namespace
}  // namespace kedge
