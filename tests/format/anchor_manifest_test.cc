// Goal: an anchor's layout covers every byte once and spreads it, its manifest
// comes back as written, and no bytes give one that breaks a rule of
// spec/anchor_manifest.md. Method: as for step manifests.

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "anchor_manifest_generated.h"
#include "kedge/format/anchor_layout.h"
#include "kedge/format/l61.h"
#include "kedge/format/limits.h"
#include "kedge/format/manifest.h"
#include "kedge/tests/format/manifest_samples.h"

namespace kedge {
namespace {

using samples::Rng;
using samples::Says;
using Fields = fbs::AnchorManifestT;

constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
constexpr auto kLoss = absl::StatusCode::kDataLoss;

absl::StatusOr<AnchorManifest> Judge(std::span<const std::byte> bytes,
                                     const TensorTable& table) {
  const char* const where = "step_00000018/anchor/MANIFEST";
  auto manifest = ParseAnchorManifest(where, bytes);
  if (!manifest.ok()) return manifest;
  const absl::Status status = CheckAnchorManifest(where, *manifest, table);
  if (!status.ok()) return status;
  return manifest;
}

TEST(AnchorManifestTest, ComesBack) {
  const TensorTable table = samples::SmallTable();
  const AnchorManifest m = samples::SmallAnchor(table);
  ASSERT_EQ(m.files.size(), 2u);
  ASSERT_EQ(m.slices.size(), 5u);
  const auto bytes = SerializeAnchorManifest(m, table);
  ASSERT_TRUE(bytes.ok()) << bytes.status();
  const auto parsed = Judge(*bytes, table);
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  samples::ExpectSame(*parsed, m);
  EXPECT_EQ(*SerializeAnchorManifest(*parsed, table), *bytes);
}

TEST(AnchorManifestTest, RandomOnesComeBack) {
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    SCOPED_TRACE(absl::StrCat("seed ", seed));
    Rng rng(seed);
    const TensorTable table = samples::RandomTable(rng, 1 + 50 * seed);
    AnchorLayoutOptions options;
    options.slice_bytes = 1000 + samples::Below(rng, 100'000);
    options.anchor_file_bytes =
        std::max<std::uint64_t>(1, table.total_bytes() / 5);
    const AnchorManifest m = samples::MakeAnchor(rng, table, options);
    const auto bytes = SerializeAnchorManifest(m, table);
    ASSERT_TRUE(bytes.ok()) << bytes.status();
    const auto parsed = Judge(*bytes, table);
    ASSERT_TRUE(parsed.ok()) << parsed.status();
    samples::ExpectSame(*parsed, m);
  }
}

TEST(AnchorManifestTest, ModelWithoutBytesHasNoFiles) {
  const auto table = TensorTable::Create({{"none", DType::kF32, {2, 0}}});
  ASSERT_TRUE(table.ok());
  Rng rng(1);
  const AnchorManifest m = samples::MakeAnchor(rng, *table, {});
  EXPECT_TRUE(m.files.empty());
  const auto bytes = SerializeAnchorManifest(m, *table);
  ASSERT_TRUE(bytes.ok()) << bytes.status();
  EXPECT_TRUE(Judge(*bytes, *table).ok());
}

TEST(AnchorManifestTest, EachBrokenRuleIsRejected) {
  const TensorTable table = samples::SmallTable();
  const auto bytes =
      SerializeAnchorManifest(samples::SmallAnchor(table), table);
  ASSERT_TRUE(bytes.ok()) << bytes.status();
  const auto expect = [&](const std::string& text,
                          const std::function<void(Fields&)>& mutate,
                          absl::StatusCode code = kLoss) {
    EXPECT_TRUE(Says(
        Judge(samples::Mutated<fbs::AnchorManifest>(*bytes, "KDAM", mutate),
              table)
            .status(),
        code, text));
  };
  const auto rehash = [](Fields& f) {
    std::size_t next = 0;
    for (std::size_t i = 0; i < f.file_hash.size(); ++i) {
      const Hash128 hash = HashOfPieces(
          std::span(f.piece_hash).subspan(next, f.file_piece_count[i]));
      f.file_hash[i] = fbs::Bytes16(hash.bytes);
      next += f.file_piece_count[i];
    }
  };
  ASSERT_TRUE(Judge(samples::Mutated<fbs::AnchorManifest>(*bytes, "KDAM",
                                                          [](Fields&) {}),
                    table)
                  .ok());

  expect(
      "min_reader", [](Fields& f) { f.min_reader = 2; },
      absl::StatusCode::kUnimplemented);
  expect("step: expected", [](Fields& f) { f.step = kMaxStep + 1; });
  expect("epoch", [](Fields& f) { f.epoch = 0; });
  expect("epoch", [](Fields& f) { f.epoch = kMaxEpoch + 1; });
  expect("step_manifest_hash",
         [](Fields& f) { *f.step_manifest_hash = fbs::Bytes16(); });
  expect("table_hash", [](Fields& f) { *f.table_hash = fbs::Bytes16(); });
  expect("digest", [](Fields& f) { *f.digest = fbs::Bytes16(); });
  expect("digest", [](Fields& f) { f.l61[1] ^= 1; });
  expect("l61[1]: expected a residue", [](Fields& f) { f.l61[1] = kL61Prime; });
  expect("l61: expected 6 rows", [](Fields& f) { f.l61.push_back(0); });
  expect("l61[2]: expected 0x", [](Fields& f) { f.l61[2] ^= 1; });
  expect("l61[4]: expected 0", [](Fields& f) { f.l61[4] = 1; });

  expect("file_piece_count: expected 2 rows",
         [](Fields& f) { f.file_piece_count.pop_back(); });
  expect("file_number: expected 2 rows",
         [](Fields& f) { f.file_number.clear(); });
  expect("file_bytes: expected 2 rows",
         [](Fields& f) { f.file_bytes.clear(); });
  expect("file_hash: expected 2 rows",
         [](Fields& f) { f.file_hash.pop_back(); });
  expect("piece_hash", [](Fields& f) { f.file_piece_count[1] = 0xffffffff; });
  expect("piece_hash", [](Fields& f) { f.piece_hash.push_back(0); });
  expect("files[0] (anchor-r000-000.kda).hash",
         [](Fields& f) { f.piece_hash[0] ^= 1; });
  expect(".pieces: expected", [&](Fields& f) {
    f.file_piece_count[0] += 1;
    f.file_piece_count[1] -= 1;
    rehash(f);
  });
  expect("files[1]: expected a file after",
         [](Fields& f) { f.file_number[1] = 0; });
  expect("files[1].rank", [](Fields& f) { f.file_rank[1] = kMaxRanks; });
  expect("files[0] (anchor-r000-000.kda).bytes: expected",
         [](Fields& f) { f.file_bytes[0] += 1; });
  expect("files[0] (anchor-r000-000.kda).bytes: expected at most",
         [](Fields& f) { f.file_bytes[0] = kMaxFileBytes + 1; });
  expect("files[2] (anchor-r007-000.kda): expected at least one slice",
         [&](Fields& f) {
           f.file_rank.push_back(7);
           f.file_number.push_back(0);
           f.file_bytes.push_back(4096);
           f.file_hash.emplace_back();
           f.file_piece_count.push_back(0);
           rehash(f);
         });

  expect("slice_begin: expected 5 rows",
         [](Fields& f) { f.slice_begin.pop_back(); });
  expect("slice_count: expected 5 rows",
         [](Fields& f) { f.slice_count.pop_back(); });
  expect("slice_count: expected one width",
         [](Fields& f) { f.slice_count_wide.push_back(1); });
  expect("slice_file: expected 5 rows",
         [](Fields& f) { f.slice_file.pop_back(); });
  expect("slice_offset4096: expected 5 rows",
         [](Fields& f) { f.slice_offset4096.clear(); });
  expect("slices[1].file", [](Fields& f) { f.slice_file[1] = 2; });
  expect("slices[0].slice", [](Fields& f) { f.slice_count[0] = 0; });
  expect("slices[1]: expected a slice after",
         [](Fields& f) { f.slice_begin[1] -= 1; });
  expect("slices[4].tensor: expected below 6",
         [](Fields& f) { f.slice_tensor[4] = 6; });
  expect("slices[4].slice: expected within",
         [](Fields& f) { f.slice_count[4] += 1; });
  expect("slices[2].tensor: expected a tensor that has its own storage",
         [](Fields& f) { f.slice_tensor[2] = 2; });
  // Coverage.
  expect("all 76800 units of tensor \"a\", found none that holds [40000,",
         [](Fields& f) {
           f.slice_begin[1] += 1;
           f.slice_count[1] -= 1;
         });
  expect("all 25 units of tensor \"f\", found none that holds [24, 25)",
         [](Fields& f) { f.slice_count[4] -= 1; });
  expect("all 10 units of tensor \"b\", found none that holds [0, 10)",
         [](Fields& f) {
           f.slice_tensor.erase(f.slice_tensor.begin() + 2);
           f.slice_begin.erase(f.slice_begin.begin() + 2);
           f.slice_count.erase(f.slice_count.begin() + 2);
           f.slice_file.erase(f.slice_file.begin() + 2);
           f.slice_offset4096.erase(f.slice_offset4096.begin() + 2);
         });
  // Places.
  expect("slices[0].offset", [](Fields& f) { f.slice_offset4096[0] = 0; });
  expect("slices[0].offset", [](Fields& f) { f.slice_offset4096[0] = 2; });
  expect("where the slice before it ends",
         [](Fields& f) { f.slice_offset4096[4] += 1; });
  expect("offset", [](Fields& f) { f.slice_offset4096[4] = 1; });
  expect("offset", [](Fields& f) { f.slice_offset4096[4] = 0xffffffff; });
  expect("metadata", [](Fields& f) { f.metadata.push_back('x'); });
}

TEST(AnchorManifestTest, SliceThatSplitsAnElementIsRejected) {
  const auto table = TensorTable::Create({{"d", DType::kI64, {7}}});
  ASSERT_TRUE(table.ok());
  Rng rng(2);
  AnchorLayoutOptions options;
  options.slice_bytes = 24;
  AnchorManifest m = samples::MakeAnchor(rng, *table, options);
  ASSERT_EQ(m.slices.size(), 3u);
  m.slices[0].slice.end -= 1;
  m.slices[1].slice.begin -= 1;
  EXPECT_TRUE(Says(SerializeAnchorManifest(m, *table).status(), kInvalid,
                   "slices[0].slice: expected whole elements"));
}

TEST(AnchorManifestTest, DamageIsRejectedOrHarmless) {
  const TensorTable table = samples::SmallTable();
  const auto bytes =
      SerializeAnchorManifest(samples::SmallAnchor(table), table);
  ASSERT_TRUE(bytes.ok()) << bytes.status();
  int passed = 0;
  samples::ForEachDamage(
      *bytes, 30000,
      [&](std::span<const std::byte> damaged, const std::string& what) {
        const auto parsed = Judge(damaged, table);
        if (!parsed.ok()) return;
        ++passed;
        SCOPED_TRACE(what);
        EXPECT_TRUE(SerializeAnchorManifest(*parsed, table).ok());
        std::uint64_t units = 0;
        for (const AnchorSlice& slice : parsed->slices) {
          ASSERT_LT(slice.tensor, table.size());
          ASSERT_LT(slice.file, parsed->files.size());
          EXPECT_LE(slice.slice.end, table[slice.tensor].unit_count());
          EXPECT_LE(slice.offset + slice.slice.count() *
                                       UnitBytes(table[slice.tensor].dtype),
                    parsed->files[slice.file].bytes);
          units += slice.slice.count();
        }
        EXPECT_EQ(units, 76800u + 10 + 14 + 25);
      });
  EXPECT_GT(passed, 0);
}

// --- PlanAnchor --------------------------------------------------------------

// A layout with these properties makes a manifest that passes; checked through
// SerializeAnchorManifest. What the manifest does not say is checked here.
void ExpectPlan(const TensorTable& table, const AnchorLayoutOptions& options,
                std::size_t files) {
  const auto layout = PlanAnchor(table, options);
  ASSERT_TRUE(layout.ok()) << layout.status();
  ASSERT_EQ(layout->files.size(), files);
  ASSERT_EQ(layout->first_piece.size(), layout->slices.size());
  std::vector<std::uint32_t> slices(files);
  std::vector<std::uint32_t> pieces(files);
  for (std::size_t i = 0; i < layout->slices.size(); ++i) {
    const AnchorSlice& slice = layout->slices[i];
    const std::uint64_t bytes =
        slice.slice.count() * UnitBytes(table[slice.tensor].dtype);
    EXPECT_LE(bytes, options.slice_bytes);
    EXPECT_EQ(layout->first_piece[i], pieces[slice.file]);
    pieces[slice.file] += static_cast<std::uint32_t>(PieceCount(bytes));
    slices[slice.file] += 1;
  }
  std::uint64_t least = ~0ull;
  std::uint64_t most = 0;
  for (std::size_t i = 0; i < files; ++i) {
    EXPECT_EQ(layout->files[i].slice_count, slices[i]);
    EXPECT_EQ(layout->files[i].piece_count, pieces[i]);
    EXPECT_EQ(layout->files[i].id, (FileId{FileKind::kAnchor, options.rank,
                                           static_cast<std::uint32_t>(i)}));
    least = std::min(least, layout->files[i].bytes);
    most = std::max(most, layout->files[i].bytes);
  }
  if (files > 0) {
    EXPECT_LE(most - least, options.slice_bytes + 4096);
  }
  Rng rng(1);
  const AnchorManifest m = samples::MakeAnchor(rng, table, options);
  const auto bytes = SerializeAnchorManifest(m, table);
  EXPECT_TRUE(bytes.ok()) << bytes.status();
}

TEST(PlanAnchorTest, EqualSlicesGoRoundRobin) {
  const auto table = TensorTable::Create({{"w", DType::kBf16, {1 << 30}}});
  ASSERT_TRUE(table.ok());
  AnchorLayoutOptions options;
  options.anchor_file_bytes = 512 << 20;
  ExpectPlan(*table, options, 4);
  const auto layout = PlanAnchor(*table, options);
  ASSERT_EQ(layout->slices.size(), 64u);
  for (std::size_t i = 0; i < 64; ++i) {
    EXPECT_EQ(layout->slices[i].file, i % 4);
    EXPECT_EQ(layout->slices[i].offset, 4096 + i / 4 * options.slice_bytes);
    EXPECT_EQ(layout->first_piece[i], i / 4 * 4);
  }
}

TEST(PlanAnchorTest, LargeAndSmallTensorsInTurnStillFillFilesEvenly) {
  // Plain round-robin would put all large ones into one of two files.
  std::vector<TensorSpec> tensors;
  for (int i = 0; i < 40; ++i) {
    tensors.push_back(
        {absl::StrCat("layer", 100 + i, ".a"), DType::kBf16, {1 << 22}});
    tensors.push_back(
        {absl::StrCat("layer", 100 + i, ".b"), DType::kBf16, {64}});
  }
  const auto table = TensorTable::Create(tensors);
  ASSERT_TRUE(table.ok());
  AnchorLayoutOptions options;
  options.anchor_file_bytes = 168 << 20;
  ExpectPlan(*table, options, 2);
}

TEST(PlanAnchorTest, RandomTablesKeepTheRules) {
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    SCOPED_TRACE(absl::StrCat("seed ", seed));
    Rng rng(seed);
    const TensorTable table = samples::RandomTable(rng, 200);
    AnchorLayoutOptions options;
    options.rank = 5;
    options.slice_bytes = 5000 + samples::Below(rng, 1'000'000);
    std::uint64_t total = 0;
    const auto all = PlanAnchor(table, options);
    ASSERT_TRUE(all.ok());
    for (const AnchorSlice& slice : all->slices) {
      total +=
          (slice.slice.count() * UnitBytes(table[slice.tensor].dtype) + 4095) /
          4096 * 4096;
    }
    options.anchor_file_bytes = total / 7 + 1;
    ExpectPlan(table, options, 7);
  }
}

TEST(PlanAnchorTest, OwnedSlicesAloneArePlanned) {
  const TensorTable table = samples::SmallTable();
  AnchorLayoutOptions options;
  options.slice_bytes = 4096;
  const auto layout =
      PlanAnchor(table, options, {{3, {4, 14}}, {0, {100, 3000}}, {1, {5, 5}}});
  ASSERT_TRUE(layout.ok()) << layout.status();
  ASSERT_EQ(layout->slices.size(), 3u);
  EXPECT_EQ(layout->slices[0].slice.begin, 100u);
  EXPECT_EQ(layout->slices[0].slice.end, 2148u);
  EXPECT_EQ(layout->slices[1].slice.end, 3000u);
  EXPECT_EQ(layout->slices[2].tensor, 3u);
  EXPECT_EQ(layout->slices[2].slice.begin, 4u);
}

TEST(PlanAnchorTest, ARankThatHoldsNothingHasNoFiles) {
  const auto layout = PlanAnchor(samples::SmallTable(), {.rank = 4}, {});
  ASSERT_TRUE(layout.ok()) << layout.status();
  EXPECT_TRUE(layout->files.empty());
  EXPECT_TRUE(layout->slices.empty());
}

TEST(CheckOwnershipTest, GapsAndOverlapsNameTensorAndRanks) {
  // a: 76800 units, b: 10, c tied to a, d: 14, e: 0, f: 12 (samples).
  const TensorTable table = samples::SmallTable();
  std::vector<std::vector<OwnedSlice>> good(3);
  for (std::uint32_t i = 0; i < table.size(); ++i) {
    if (table[i].tied_to != kNotTied || table[i].unit_count() == 0) continue;
    good[2].push_back({i, {0, table[i].unit_count()}});
  }
  // In any order, over several ranks, one of them empty.
  good[2][0].slice = {5, table[0].unit_count()};
  good[0].push_back({0, {0, 5}});
  std::reverse(good[2].begin(), good[2].end());
  EXPECT_TRUE(CheckOwnership(good, table).ok()) << CheckOwnership(good, table);
  const auto expect = [&](const std::string& text, auto mutate) {
    auto bad = good;
    mutate(bad);
    EXPECT_TRUE(Says(CheckOwnership(bad, table),
                     absl::StatusCode::kFailedPrecondition, text));
  };
  expect(
      "tensor \"a\": owned ranges: expected all of its 76800 units owned, "
      "found no owner of [4, 5) among 3 ranks, after rank 0 with [0, 4), "
      "before rank 2 with [5, 76800)",
      [](auto& by_rank) { by_rank[0][0].slice.end = 4; });
  expect(
      "tensor \"a\": owned ranges: expected no unit owned twice, found "
      "rank 0 with [0, 6) and rank 2 with [5, 76800)",
      [](auto& by_rank) { by_rank[0][0].slice.end = 6; });
  expect("rank 1: owned tensor: expected below 6, found 6", [](auto& by_rank) {
    by_rank[1].push_back({6, {0, 1}});
  });
  expect("tensor \"c\": owned ranges: expected none, the tensor is tied",
         [](auto& by_rank) {
           by_rank[1].push_back({2, {0, 1}});
         });
  expect("tensor \"b\": owned ranges: expected ranges within its 10 units",
         [](auto& by_rank) {
           by_rank[1].push_back({1, {9, 11}});
         });
  expect("found rank 1 with [3, 3)", [](auto& by_rank) {
    by_rank[1].push_back({1, {3, 3}});
  });
}

TEST(PlanAnchorTest, WhatDoesNotFitIsRejectedByName) {
  const TensorTable table = samples::SmallTable();
  const auto status = [&](AnchorLayoutOptions options,
                          const std::vector<OwnedSlice>& owned = {}) {
    return owned.empty() ? PlanAnchor(table, options).status()
                         : PlanAnchor(table, options, owned).status();
  };
  AnchorLayoutOptions options;
  options.anchor_file_bytes = 0;
  EXPECT_TRUE(Says(status(options), kInvalid, "anchor_file_bytes"));
  options = {};
  options.slice_bytes = 7;
  EXPECT_TRUE(Says(status(options), kInvalid, "slice_bytes"));
  options = {};
  options.rank = kMaxRanks;
  EXPECT_TRUE(Says(status(options), kInvalid, "rank"));
  options = {};
  options.slice_bytes = 8;
  options.anchor_file_bytes = 1;
  EXPECT_TRUE(Says(status(options), kInvalid, "files: expected at most 1000"));
  options = {};
  EXPECT_TRUE(Says(status(options, {{6, {0, 1}}}), kInvalid, "tensor"));
  EXPECT_TRUE(
      Says(status(options, {{2, {0, 1}}}), kInvalid,
           "tensor \"c\": owned slice: expected a tensor with its own"));
  EXPECT_TRUE(Says(status(options, {{1, {0, 11}}}), kInvalid, "tensor \"b\""));
  EXPECT_TRUE(Says(status(options, {{1, {3, 2}}}), kInvalid, "tensor \"b\""));
  EXPECT_TRUE(Says(status(options, {{3, {1, 2}}}), kInvalid,
                   "tensor \"d\": owned slice: expected whole elements"));
  EXPECT_TRUE(Says(status(options, {{1, {4, 8}}, {1, {0, 5}}}), kInvalid,
                   "found [0, 5) and [4, 8)"));
  const auto huge = TensorTable::Create({{"w", DType::kU8, {1ull << 45}}});
  options.slice_bytes = 4096;
  EXPECT_TRUE(Says(PlanAnchor(*huge, options).status(), kInvalid,
                   "slices: expected at most"));
}

}  // namespace
}  // namespace kedge
