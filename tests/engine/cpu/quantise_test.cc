// Goal: blocks of bf16 become e4m3fn values and scales as spec/fp8.md says.
// Method: every bf16 value against a table of all e4m3fn values, searched; the
// division done in double, which rounds to the same float.

#include "kedge/engine/cpu/quantise.h"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "gtest/gtest.h"
#include "kedge/format/fp8.h"
#include "kedge/tests/engine/cuda/quantise_test_support.h"
#include "kedge/tests/support/sanitized.h"

namespace kedge {
namespace {

using testing::Fill;
using testing::QuantiseCase;
using testing::ReferenceFp8;
using testing::ReferenceScale;

TEST(Fp8Test, EveryBf16RoundsToTheNearestValue) {
  for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
    const auto unit = static_cast<std::uint16_t>(bits);
    if ((unit & kBf16Magnitude) >= kBf16NotFinite) continue;
    const float x = FloatOfBf16(unit);
    ASSERT_EQ(Fp8OfFloat(x), ReferenceFp8(x)) << "bf16 bits " << bits;
  }
}

TEST(Fp8Test, EveryNeighbourhoodOfATieRoundsToEven) {
  for (std::uint32_t code = 0; code < 0x7e; ++code) {
    const double low = testing::ValueOfFp8(code);
    const double high = testing::ValueOfFp8(code + 1);
    const auto middle = static_cast<float>((low + high) / 2);
    const float sides[] = {std::nextafter(middle, 0.0f), middle,
                           std::nextafter(middle, 1000.0f)};
    EXPECT_EQ(Fp8OfFloat(sides[0]), code);
    EXPECT_EQ(Fp8OfFloat(sides[1]), code % 2 == 0 ? code : code + 1);
    EXPECT_EQ(Fp8OfFloat(sides[2]), code + 1);
    for (const float side : sides) {
      EXPECT_EQ(Fp8OfFloat(side), ReferenceFp8(side));
      EXPECT_EQ(Fp8OfFloat(-side), ReferenceFp8(side) | 0x80);
    }
  }
}

TEST(Fp8Test, ExtremesSaturateAndZerosKeepTheirSign) {
  EXPECT_EQ(Fp8OfFloat(448.0f), 0x7e);
  EXPECT_EQ(Fp8OfFloat(463.99f), 0x7e);
  EXPECT_EQ(Fp8OfFloat(464.0f), 0x7e);
  EXPECT_EQ(Fp8OfFloat(-1e30f), 0xfe);
  EXPECT_EQ(Fp8OfFloat(INFINITY), 0x7e);
  EXPECT_EQ(Fp8OfFloat(0.0f), 0x00);
  EXPECT_EQ(Fp8OfFloat(-0.0f), 0x80);
  EXPECT_EQ(Fp8OfFloat(-1e-30f), 0x80);
  EXPECT_EQ(Fp8OfFloat(0x1p-9f), 0x01);
  EXPECT_EQ(Fp8OfFloat(0x1p-10f), 0x00);  // a tie
  EXPECT_EQ(Fp8OfFloat(0x1.8p-10f), 0x01);
  EXPECT_EQ(Fp8OfFloat(0x1.ep-7f), 0x08);  // 7.5 * 2^-9 rounds to a normal
}

TEST(Fp8Test, RandomFloatsRoundToTheNearestValue) {
  std::mt19937_64 rng(5);
  for (int i = 0; i < Rounds(300'000); ++i) {
    // Exponents around the range of e4m3fn.
    const auto exponent = static_cast<std::uint32_t>(110 + rng() % 28);
    const float x =
        FloatOfBits(exponent << 23 | static_cast<std::uint32_t>(rng() >> 41));
    ASSERT_EQ(Fp8OfFloat(x), ReferenceFp8(x)) << "bits " << BitsOfFloat(x);
  }
}

TEST(Fp8Test, ScalesFollowFromAmax) {
  const float floor = 1e-12f;
  for (std::uint32_t bits = 0; bits < kBf16NotFinite; ++bits) {
    const float amax = FloatOfBf16(static_cast<std::uint16_t>(bits));
    for (const ScaleKind kind : {ScaleKind::kExact, ScaleKind::kPowerOfTwo}) {
      const float scale = kind == ScaleKind::kExact
                              ? Fp8ExactScale(amax, floor)
                              : Fp8PowerOfTwoScale(amax, floor);
      ASSERT_EQ(BitsOfFloat(scale),
                BitsOfFloat(ReferenceScale(amax, floor, kind)))
          << "bits " << bits;
      ASSERT_LE(amax / scale, 464.0f);
    }
  }
  EXPECT_EQ(Fp8PowerOfTwoScale(448.0f, floor), 1.0f);
  EXPECT_EQ(Fp8PowerOfTwoScale(450.0f, floor), 2.0f);
  EXPECT_EQ(Fp8PowerOfTwoScale(0.0f, 448 * 0x1p-100f), 0x1p-100f);
  EXPECT_EQ(Fp8ExactScale(0.0f, 448.0f), 1.0f);
}

TEST(Fp8Test, TheWorkedNumbersOfTheSpecificationHold) {
  const auto hex = [](std::uint32_t value, int digits) {
    return absl::StrFormat("`0x%0*x`", digits, value);
  };
  const auto scale = [&](float s) { return hex(BitsOfFloat(s), 8); };
  const auto value = [&](float x) { return hex(Fp8OfFloat(x), 2); };
  const std::vector<std::pair<std::string, std::string>> rows = {
      {"exact scale of amax 0, floor 1e-12", scale(Fp8ExactScale(0, 1e-12f))},
      {"exact scale of amax 448", scale(Fp8ExactScale(448, 1e-12f))},
      {"exact scale of amax 450", scale(Fp8ExactScale(450, 1e-12f))},
      {"power-of-two scale of amax 448",
       scale(Fp8PowerOfTwoScale(448, 1e-12f))},
      {"power-of-two scale of amax 450",
       scale(Fp8PowerOfTwoScale(450, 1e-12f))},
      {"e4m3fn(448)", value(448)},
      {"e4m3fn(1)", value(1)},
      {"e4m3fn(-0.0)", value(-0.0f)},
      {"e4m3fn(-2^-9)", value(-0x1p-9f)},
      {"e4m3fn(2^-10), a tie", value(0x1p-10f)},
      {"e4m3fn(232), a tie", value(232)},
      {"e4m3fn(-1e30)", value(-1e30f)}};
  std::string expected =
      "<!-- compared by tests/engine/cpu/quantise_test.cc -->\n| what | value "
      "|\n|---|---|\n";
  for (const auto& [what, number] : rows) {
    absl::StrAppend(&expected, "| `", what, "` | ", number, " |\n");
  }
  std::ifstream in(absl::StrCat(KEDGE_SOURCE_DIR, "/spec/fp8.md"));
  const std::string page((std::istreambuf_iterator<char>(in)),
                         std::istreambuf_iterator<char>());
  EXPECT_NE(page.find(absl::StrCat(expected, "\n")), std::string::npos)
      << "spec/fp8.md: by the code it reads\n"
      << expected;
}

void ExpectReference(QuantiseCase& c) {
  std::uint64_t first_bad = 0;
  const QuantiseBatch batch = c.Batch(&first_bad);
  c.Poison();
  Quantise(batch);
  c.ExpectReference(first_bad);
  // In parts, too.
  c.Poison();
  const std::uint64_t middle = batch.block_count / 2;
  first_bad = std::min(QuantiseBlocks(batch, 0, middle),
                       QuantiseBlocks(batch, middle, batch.block_count));
  c.ExpectReference(first_bad);
  c.Dump();
}

TEST(QuantiseTest, BlocksOfEveryKindAndExtent) {
  std::uint64_t seed = 0;
  for (const ScaleKind kind : {ScaleKind::kExact, ScaleKind::kPowerOfTwo}) {
    for (const auto& [rows, cols] : testing::QuantiseExtents()) {
      for (const Fill fill : testing::kFills) {
        SCOPED_TRACE(absl::StrCat("seed ", seed + 1, " ", rows, "x", cols,
                                  " fill ", static_cast<int>(fill)));
        QuantiseCase c(++seed, kind);
        c.Add(rows, cols, fill);
        ExpectReference(c);
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST(QuantiseTest, TasksOfABatchAreToldApart) {
  std::mt19937_64 rng(77);
  QuantiseCase c(78, ScaleKind::kExact);
  for (int i = 0; i < Rounds(40); ++i) {
    c.Add(1 + rng() % 300, 1 + rng() % 300, testing::kFills[rng() % 5]);
  }
  ExpectReference(c);
}

TEST(QuantiseTest, NamesTheFirstBlockThatIsNotFinite) {
  for (const std::uint16_t bad : {0x7f80, 0xff80, 0x7fc1, 0xffff, 0x7f81}) {
    QuantiseCase c(9, ScaleKind::kExact);
    c.Add(200, 300, Fill::kOrdinary);  // 6 blocks
    c.Add(130, 130, Fill::kOrdinary);  // 4
    c.Set(0, 150, 290, bad);           // block 5
    c.Set(1, 0, 129, bad);             // block 7
    ExpectReference(c);
    EXPECT_EQ(c.expected_first_bad(), 5u);
  }
}

}  // namespace
}  // namespace kedge
