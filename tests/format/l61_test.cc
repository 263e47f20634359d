// Goal: L61 is what spec/l61.md says, adds up over any shards, is linear, and
// notices shifts and swaps. Method: a second computation by 128-bit division.

#include "kedge/format/l61.h"

#include <cstring>
#include <random>
#include <vector>

#include "gtest/gtest.h"

namespace kedge {
namespace {

using Wide = unsigned __int128;

std::vector<std::byte> RandomBytes(std::mt19937_64& rng, std::size_t count) {
  std::vector<std::byte> bytes(count);
  for (std::byte& b : bytes) b = static_cast<std::byte>(rng());
  return bytes;
}

std::uint64_t ByDivision(const L61Key& key, std::uint64_t offset,
                         std::span<const std::byte> bytes) {
  Wide sum = 0;
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    const std::uint64_t at = offset + i;
    const std::uint64_t value = std::to_integer<std::uint64_t>(bytes[i])
                                << (8 * (at % 4));
    const Wide weight =
        Wide{key.A(at / 4 % 4096)} * key.B(at / 4 / 4096) % kL61Prime;
    sum = (sum + weight * value) % kL61Prime;
  }
  return static_cast<std::uint64_t>(sum);
}

TEST(L61Test, ReducesTheEdges) {
  EXPECT_EQ(L61Reduce(0), 0u);
  EXPECT_EQ(L61Reduce(kL61Prime), 0u);
  EXPECT_EQ(L61Reduce(kL61Prime + 1), 1u);
  EXPECT_EQ(L61Reduce(~std::uint64_t{0}), 7u);
  EXPECT_EQ(L61Add(kL61Prime - 1, 1), 0u);
  EXPECT_EQ(L61Sub(0, 1), kL61Prime - 1);
  EXPECT_EQ(L61Sub(5, 5), 0u);
}

TEST(L61Test, MultipliesLikeDivision) {
  std::mt19937_64 rng(1);
  for (int i = 0; i < 20000; ++i) {
    const std::uint64_t a = rng() >> (3 + rng() % 61);
    const std::uint64_t b = rng() >> (3 + rng() % 61);
    ASSERT_EQ(L61Mul(a, b), static_cast<std::uint64_t>(Wide{a} * b % kL61Prime))
        << a << " * " << b;
  }
  EXPECT_EQ(L61Mul(kL61Prime - 1, kL61Prime - 1), 1u);
  EXPECT_EQ(L61Mul(kL61Prime, 5), 0u);
}

TEST(L61Test, WeightsAreInRangeAndDiffer) {
  const L61Key key = L61Key::FromSeed(42);
  for (std::uint32_t t = 0; t < kL61TileWords; ++t) {
    ASSERT_GE(key.A(t), 1u);
    ASSERT_LT(key.A(t), std::uint64_t{1} << 58);
  }
  for (std::uint64_t q = 0; q < 5000; ++q) {
    ASSERT_GE(key.B(q), 1u);
    ASSERT_LT(key.B(q), kL61Prime);
  }
  EXPECT_NE(key.A(0), key.A(1));
  EXPECT_NE(key.B(0), key.B(1));
  EXPECT_NE(key.A(0), L61Key::FromSeed(43).A(0));
  EXPECT_NE(key.seed_a, key.seed_b);
}

TEST(L61Test, SumEqualsTheDefinition) {
  std::mt19937_64 rng(2);
  const L61Key key = L61Key::FromSeed(7);
  for (const std::size_t size : {0, 1, 3, 4, 5, 63, 4097, 40001}) {
    const auto bytes = RandomBytes(rng, size);
    for (const std::uint64_t offset :
         {std::uint64_t{0}, std::uint64_t{1}, std::uint64_t{2},
          std::uint64_t{3}, std::uint64_t{16383},
          (std::uint64_t{1} << 40) + 6}) {
      ASSERT_EQ(L61SumScalar(key, offset, bytes),
                ByDivision(key, offset, bytes))
          << size << " bytes at " << offset;
    }
  }
}

TEST(L61Test, ShardsAddUpInAnySplit) {
  std::mt19937_64 rng(3);
  const L61Key key = L61Key::FromSeed(8);
  const auto bytes = RandomBytes(rng, 50000);
  const std::uint64_t whole = L61SumScalar(key, 10, bytes);
  for (int i = 0; i < 100; ++i) {
    const std::size_t cut = rng() % (bytes.size() + 1);
    const auto span = std::span<const std::byte>(bytes);
    ASSERT_EQ(L61Add(L61SumScalar(key, 10, span.first(cut)),
                     L61SumScalar(key, 10 + cut, span.subspan(cut))),
              whole)
        << "cut at " << cut;
  }
}

TEST(L61Test, ZerosWeighNothingAndPaddingNeither) {
  const L61Key key = L61Key::FromSeed(9);
  std::vector<std::byte> bytes(1000);
  EXPECT_EQ(L61SumScalar(key, 0, bytes), 0u);
  bytes[998] = std::byte{7};
  EXPECT_EQ(L61SumScalar(key, 0, std::span(bytes).first(999)),
            L61SumScalar(key, 0, bytes));
}

template <typename Unit>
void ExpectLinear(std::uint64_t seed) {
  std::mt19937_64 rng(seed);
  const L61Key key = L61Key::FromSeed(rng());
  const std::uint64_t first_unit = rng() % 100000;
  std::vector<Unit> before(20000);
  for (Unit& u : before) u = static_cast<Unit>(rng());
  std::vector<Unit> after = before;
  std::uint64_t l = 0;
  for (std::size_t i = 0; i < after.size(); ++i) {
    if (rng() % 10 != 0) continue;
    // The extreme differences too.
    after[i] = rng() % 4 == 0 ? Unit{0}
                              : (rng() % 3 == 0 ? static_cast<Unit>(~Unit{0})
                                                : static_cast<Unit>(rng()));
    l = L61Add(l, L61OfChange(key, first_unit + i, sizeof(Unit),
                              static_cast<std::int64_t>(after[i]) -
                                  static_cast<std::int64_t>(before[i])));
  }
  const std::uint64_t offset = first_unit * sizeof(Unit);
  EXPECT_EQ(
      L61SumScalar(key, offset, std::as_bytes(std::span(after))),
      L61Add(L61SumScalar(key, offset, std::as_bytes(std::span(before))), l))
      << "seed " << seed;
}

TEST(L61Test, NewSumIsOldSumPlusTheSumOfTheChanges) {
  for (std::uint64_t seed = 0; seed < 10; ++seed) {
    ExpectLinear<std::uint8_t>(seed);
    ExpectLinear<std::uint16_t>(seed);
    ExpectLinear<std::uint32_t>(seed);
  }
}

TEST(L61Test, NoticesShiftsAndSwaps) {
  std::mt19937_64 rng(4);
  const L61Key key = L61Key::FromSeed(10);
  auto bytes = RandomBytes(rng, 40000);
  const std::uint64_t sum = L61SumScalar(key, 0, bytes);
  EXPECT_NE(L61SumScalar(key, 2, bytes), sum);
  EXPECT_NE(L61SumScalar(key, 16384, bytes), sum);
  for (int i = 0; i < 1000; ++i) {
    const std::size_t x = rng() % bytes.size();
    const std::size_t y = rng() % bytes.size();
    if (bytes[x] == bytes[y]) continue;
    std::swap(bytes[x], bytes[y]);
    ASSERT_NE(L61SumScalar(key, 0, bytes), sum) << x << " and " << y;
    std::swap(bytes[x], bytes[y]);
  }
}

}  // namespace
}  // namespace kedge
