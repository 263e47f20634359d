// Goal: file hashes are the published XXH3 ones, seeded with a piece's place,
// and only names that kedge itself makes parse.

#include <cstddef>
#include <limits>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "kedge/format/hash.h"
#include "kedge/format/layout.h"
#include "kedge/format/limits.h"

namespace kedge {
namespace {

TEST(HashTest, EqualsThePublishedXxh3OfNothing) {
  EXPECT_EQ(HashBytes64({}), 0x2d06800538d394c2u);
  EXPECT_EQ(ToHex(HashBytes128({})), "99aa06d3014798d86001c324468d497f");
}

TEST(HashTest, PartsHashLikeTheWhole) {
  std::mt19937_64 rng(1);
  std::vector<std::byte> bytes(100000);
  for (std::byte& b : bytes) b = static_cast<std::byte>(rng());
  const auto span = std::span<const std::byte>(bytes);
  for (int i = 0; i < 20; ++i) {
    Hasher128 hasher;
    for (std::size_t at = 0; at < bytes.size();) {
      const std::size_t take =
          std::min<std::size_t>(rng() % 3000, bytes.size() - at);
      hasher.Update(span.subspan(at, take));
      at += take;
    }
    ASSERT_EQ(hasher.Finish(), HashBytes128(bytes));
  }
}

TEST(HashTest, HexRoundTripsAndRefusesOthers) {
  Bytes16 value;
  for (int i = 0; i < 16; ++i) {
    value.bytes[i] = static_cast<std::uint8_t>(17 * i + 1);
  }
  const std::string text = ToHex(value);
  ASSERT_EQ(text.size(), 32u);
  EXPECT_EQ(*ParseHex16(text), value);
  for (const std::string& bad :
       {std::string(), text.substr(1), text + "0", "G" + text.substr(1),
        std::string(32, 'A'), std::string(32, ' ')}) {
    EXPECT_EQ(ParseHex16(bad).status().code(),
              absl::StatusCode::kInvalidArgument)
        << bad;
  }
}

TEST(HashTest, EveryPartOfAPieceSeedCounts) {
  RunId run;
  run.bytes[3] = 9;
  RunId other = run;
  other.bytes[15] = 1;
  const FileId file{FileKind::kSegment, 2, 5};
  const std::set<std::uint64_t> seeds = {
      PieceSeed(run, 7, file, 0),
      PieceSeed(other, 7, file, 0),
      PieceSeed(run, 8, file, 0),
      PieceSeed(run, 7, {FileKind::kAnchor, 2, 5}, 0),
      PieceSeed(run, 7, {FileKind::kSegment, 3, 5}, 0),
      PieceSeed(run, 7, {FileKind::kSegment, 2, 6}, 0),
      PieceSeed(run, 7, file, 1)};
  EXPECT_EQ(seeds.size(), 7u);
  // An intact piece in the wrong place fails.
  const std::vector<std::byte> bytes(4096, std::byte{1});
  EXPECT_NE(HashPiece(run, 7, file, 0, bytes),
            HashPiece(run, 7, file, 1, bytes));
  EXPECT_NE(HashOfPieces(std::vector<std::uint64_t>{1, 2}),
            HashOfPieces(std::vector<std::uint64_t>{2, 1}));
}

TEST(LayoutTest, NamesRoundTrip) {
  for (const std::uint64_t step : {std::uint64_t{0}, std::uint64_t{19},
                                   std::uint64_t{12345678}, kMaxStep}) {
    EXPECT_EQ(ParseStepDirectoryName(StepDirectoryName(step)), step);
  }
  EXPECT_EQ(StepDirectoryName(19), "step_00000019");
  EXPECT_EQ(EpochFileName(3), "00000003");
  EXPECT_EQ(ParseEpochFileName("00000003"), 3u);
  const Hash128 hash = HashBytes128({});
  EXPECT_EQ(ParseTensorTableFileName(TensorTableFileName(hash)), hash);
  for (const FileKind kind : {FileKind::kSegment, FileKind::kAnchor}) {
    const FileId file{kind, 999, 7};
    EXPECT_EQ(ParseDataFileName(DataFileName(file)), file);
    const auto staging =
        ParseStagingName(StagingName(19, kind, 4, 123456789012345u));
    ASSERT_TRUE(staging.has_value());
    EXPECT_EQ(staging->step, 19u);
    EXPECT_EQ(staging->kind, kind);
    EXPECT_EQ(staging->epoch, 4u);
    EXPECT_EQ(staging->attempt, 123456789012345u);
  }
  EXPECT_EQ(DataFileName({FileKind::kSegment, 3, 0}), "delta-r003-000.kds");
  EXPECT_EQ(DataFileName({FileKind::kAnchor, 3, 12}), "anchor-r003-012.kda");
}

TEST(LayoutTest, OtherNamesDoNotParse) {
  for (const char* name :
       {"", "step_", "step_1", "step_000000001", "step_0000001a",
        "step_-0000001", "step_+0000001", "step_ 0000001", "Step_00000001",
        "step_00000001 ", "step_00000001.1.1", "step_00000001/"}) {
    EXPECT_FALSE(ParseStepDirectoryName(name)) << name;
  }
  for (const char* name : {"", "0", "00000000", "3", "000000003", "0000000x"}) {
    EXPECT_FALSE(ParseEpochFileName(name)) << name;
  }
  for (const char* name : {"", "tensors-.kdt", "tensors-00.kdt",
                           "tensors-99aa06d3014798d86001c324468d497F.kdt",
                           "tensors-99aa06d3014798d86001c324468d497f",
                           "99aa06d3014798d86001c324468d497f.kdt"}) {
    EXPECT_FALSE(ParseTensorTableFileName(name)) << name;
  }
  for (const char* name :
       {"", "delta-r003-000.kda", "anchor-r003-000.kds", "delta-r03-000.kds",
        "delta-r0003-000.kds", "delta-r003_000.kds", "delta-r003-000.kds.tmp",
        "../delta-r003-000.kds", "delta-r-03-000.kds", "delta-r003-00.kds"}) {
    EXPECT_FALSE(ParseDataFileName(name)) << name;
  }
  for (const char* name :
       {"", "step_00000019", "step_00000019.1", "step_00000019.1.",
        "step_00000019..1", "step_00000019.1.2.3", "step_00000019.anchor.1",
        "step_00000019.anchor.1.2.3", "step_00000019.01.2",
        "step_00000019.1.02", "step_00000019.100000000.1",
        "step_00000019.1.99999999999999999999", "x.1.1"}) {
    EXPECT_FALSE(ParseStagingName(name)) << name;
  }
}

}  // namespace
}  // namespace kedge
