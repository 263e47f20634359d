// Goal: the trainer's rounding to bf16 is round to nearest even for every
// float. Method: every bf16 value, every tie between two neighbours, and random
// bit patterns against a choice made in double precision.

#include "kedge/examples/model/bf16.h"

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>

#include "gtest/gtest.h"

namespace kedge::example {
namespace {

float FromBits(std::uint32_t bits) { return std::bit_cast<float>(bits); }

// The neighbour of a finite value that is nearer, by comparing distances.
std::uint16_t NearestByDistance(float value) {
  const auto low =
      static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(value) >> 16);
  const auto high = static_cast<std::uint16_t>(low + 1);
  const double x = std::fabs(static_cast<double>(value));
  const double below = std::fabs(static_cast<double>(Bf16ToFloat(low)));
  // Past the largest finite value the next one would be 2^128.
  const double above = (high & 0x7fff) == 0x7f80
                           ? 0x1p128
                           : std::fabs(static_cast<double>(Bf16ToFloat(high)));
  if (x - below < above - x) return low;
  if (x - below > above - x) return high;
  return low % 2 == 0 ? low : high;
}

TEST(Bf16Test, EveryValueThatIsNotNanSurvivesTheRoundTrip) {
  for (std::uint32_t bits = 0; bits < 65536; ++bits) {
    const float value = Bf16ToFloat(static_cast<std::uint16_t>(bits));
    if (std::isnan(value)) continue;
    EXPECT_EQ(FloatToBf16(value), bits);
  }
}

TEST(Bf16Test, EveryTieGoesToTheEvenNeighbour) {
  for (std::uint32_t bits = 0; bits < 65536; ++bits) {
    if ((bits & 0x7f80) == 0x7f80) continue;
    const std::uint32_t even = bits + (bits & 1);
    EXPECT_EQ(FloatToBf16(FromBits(bits << 16 | 0x8000)), even) << bits;
    EXPECT_EQ(FloatToBf16(FromBits(bits << 16 | 0x7fff)), bits);
    EXPECT_EQ(FloatToBf16(FromBits(bits << 16 | 0x8001)), bits + 1);
  }
}

TEST(Bf16Test, RandomFiniteValuesGoToTheNearestNeighbour) {
  const std::uint32_t seed = 20251129;
  std::mt19937 random(seed);
  for (int i = 0; i < 500000; ++i) {
    const float value = FromBits(random());
    if (!std::isfinite(value)) continue;
    ASSERT_EQ(FloatToBf16(value), NearestByDistance(value))
        << "seed " << seed << ", value " << value;
  }
}

TEST(Bf16Test, InfinityStaysAndTheLargestFloatBecomesInfinity) {
  const float infinity = std::numeric_limits<float>::infinity();
  EXPECT_EQ(FloatToBf16(infinity), 0x7f80);
  EXPECT_EQ(FloatToBf16(-infinity), 0xff80);
  EXPECT_EQ(FloatToBf16(std::numeric_limits<float>::max()), 0x7f80);
  EXPECT_EQ(FloatToBf16(std::numeric_limits<float>::lowest()), 0xff80);
}

TEST(Bf16Test, NanStaysNanWithItsSignAndUpperPayload) {
  // The payload sits in the half that is cut off: rounding it would carry into
  // the sign, cutting it would leave an infinity.
  EXPECT_EQ(FloatToBf16(FromBits(0x7f800001)), 0x7fc0);
  EXPECT_EQ(FloatToBf16(FromBits(0xff800001)), 0xffc0);
  EXPECT_EQ(FloatToBf16(FromBits(0x7fffffff)), 0x7fff);
  EXPECT_EQ(FloatToBf16(FromBits(0xffffffff)), 0xffff);
  EXPECT_EQ(FloatToBf16(FromBits(0x7fc50000)), 0x7fc5);
}

TEST(Bf16Test, ZerosKeepTheirSignAndSubnormalsAreKept) {
  EXPECT_EQ(FloatToBf16(0.0f), 0x0000);
  EXPECT_EQ(FloatToBf16(-0.0f), 0x8000);
  EXPECT_EQ(FloatToBf16(FromBits(0x00010000)), 0x0001);
  EXPECT_EQ(FloatToBf16(FromBits(0x80010000)), 0x8001);
  EXPECT_EQ(FloatToBf16(FromBits(0x00000001)), 0x0000);
}

}  // namespace
}  // namespace kedge::example
