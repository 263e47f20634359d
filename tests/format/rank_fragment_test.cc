// Goal: fragments come back as written and merge into the manifest that one
// rank alone would have written, or into an error that names tensor and ranks.
// Method: each rule broken once, damage, random worlds of 1 to 8 ranks.

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <map>

#include "absl/strings/str_cat.h"
#include "kedge/format/l61.h"
#include "kedge/format/limits.h"
#include "kedge/format/manifest.h"
#include "kedge/tests/format/manifest_samples.h"
#include "rank_fragment_generated.h"

namespace kedge {
namespace {

using samples::Rng;
using samples::Says;
using Fields = fbs::RankFragmentT;

constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
constexpr auto kLoss = absl::StatusCode::kDataLoss;
constexpr auto kPrecondition = absl::StatusCode::kFailedPrecondition;

TEST(RankFragmentTest, ComesBack) {
  const TensorTable table = samples::SmallTable();
  const RankFragment f = samples::SmallFragment(table);
  const auto bytes = SerializeRankFragment(f, table);
  ASSERT_TRUE(bytes.ok()) << bytes.status();
  const auto parsed = ParseRankFragment("fragment", *bytes);
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  samples::ExpectSame(*parsed, f);
  EXPECT_EQ(*SerializeRankFragment(*parsed, table), *bytes);
}

TEST(RankFragmentTest, OfARankWithNothingComesBack) {
  const TensorTable table = samples::SmallTable();
  RankFragment f = samples::SmallFragment(table);
  f.files.clear();
  f.records.clear();
  f.owned.clear();
  const auto bytes = SerializeRankFragment(f, table);
  ASSERT_TRUE(bytes.ok()) << bytes.status();
  const auto parsed = ParseRankFragment("fragment", *bytes);
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  samples::ExpectSame(*parsed, f);
}

TEST(RankFragmentTest, EachBrokenRuleIsRejected) {
  const TensorTable table = samples::SmallTable();
  const auto bytes =
      SerializeRankFragment(samples::SmallFragment(table), table);
  ASSERT_TRUE(bytes.ok()) << bytes.status();
  const auto expect = [&](const std::string& text,
                          const std::function<void(Fields&)>& mutate,
                          absl::StatusCode code = kLoss) {
    const auto mutated =
        samples::Mutated<fbs::RankFragment>(*bytes, "KDRF", mutate);
    EXPECT_TRUE(
        Says(ParseRankFragment("fragment", mutated).status(), code, text));
  };
  expect(
      "min_reader", [](Fields& f) { f.min_reader = 2; },
      absl::StatusCode::kUnimplemented);
  expect("step", [](Fields& f) { f.step = 0; });
  expect("step", [](Fields& f) { f.step = kMaxStep + 1; });
  expect("epoch", [](Fields& f) { f.epoch = 0; });
  expect("epoch", [](Fields& f) { f.epoch = kMaxEpoch + 1; });
  expect("world_size", [](Fields& f) { f.world_size = 0; });
  expect("world_size", [](Fields& f) { f.world_size = kMaxRanks + 1; });
  expect("rank: expected 0 to 1", [](Fields& f) { f.rank = 2; });
  expect("base", [](Fields& f) { f.base_step = 18; });
  expect("base", [](Fields& f) { *f.base_manifest_hash = fbs::Bytes16(); });
  expect("files[0].rank: expected 0", [](Fields& f) { f.rank = 0; });
  expect("files[1]: expected a file after",
         [](Fields& f) { f.file_number[1] = 0; });
  expect("piece_hash", [](Fields& f) { f.piece_hash.pop_back(); });
  expect(".hash", [](Fields& f) { f.piece_hash[1] ^= 1; });
  expect(".bytes", [](Fields& f) { f.file_bytes[0] += 64; });
  expect("record_count: expected 2 rows",
         [](Fields& f) { f.record_count.push_back(1); });
  expect("records[0].nnz", [](Fields& f) { f.record_nnz[0] = 0; });
  expect(
      "records[0].codec",
      [](Fields& f) {
        f.record_codec = {2, 1};
      },
      absl::StatusCode::kUnimplemented);
  expect("records[1].offset", [](Fields& f) { f.record_offset8[1] += 1; });
  expect("owned_begin: expected 3 rows",
         [](Fields& f) { f.owned_begin.pop_back(); });
  expect("owned_count: expected 3 rows",
         [](Fields& f) { f.owned_count.clear(); });
  expect("owned_count: expected one width",
         [](Fields& f) { f.owned_count_wide.push_back(3); });
  expect("owned[1].slice", [](Fields& f) { f.owned_count[1] = 0; });
  expect("owned[1]", [](Fields& f) { f.owned_tensor[1] = 0; });
  expect("records[1].slice: expected within one of the rank's owned ranges",
         [](Fields& f) { f.owned_begin[2] += 2; });
  expect("records[0].slice: expected within one of the rank's owned ranges",
         [](Fields& f) { f.owned_tensor[0] = 1; });
}

TEST(RankFragmentTest, SerializeChecksAgainstTheTable) {
  const TensorTable table = samples::SmallTable();
  const auto expect = [&](const std::string& text, auto mutate) {
    RankFragment f = samples::SmallFragment(table);
    mutate(f);
    EXPECT_TRUE(Says(SerializeRankFragment(f, table).status(), kInvalid, text));
  };
  expect("table_hash", [](auto& f) { f.table_hash = {}; });
  expect("owned[2].tensor", [](auto& f) {
    f.owned[2].tensor = 6;
    f.records.pop_back();
    Rng rng(1);
    f.files.resize(1);
    samples::Fill(rng, f.files, {&f.records[0]});
  });
  expect("owned[2].slice", [](auto& f) { f.owned[2].slice.end = 26; });
  expect("owned[1].slice: expected whole elements",
         [](auto& f) { f.owned[1].slice.end = 13; });
  expect("owned[1].tensor: expected a tensor that has its own storage",
         [](auto& f) { f.owned[1].tensor = 2; });
  expect("owned ranges", [](auto& f) { f.owned[2].slice.end = 19; });
}

TEST(RankFragmentTest, DamageIsRejectedOrHarmless) {
  const TensorTable table = samples::SmallTable();
  const auto bytes =
      SerializeRankFragment(samples::SmallFragment(table), table);
  ASSERT_TRUE(bytes.ok()) << bytes.status();
  int passed = 0;
  samples::ForEachDamage(
      *bytes, 30000,
      [&](std::span<const std::byte> damaged, const std::string& what) {
        const auto parsed = ParseRankFragment("fragment", damaged);
        if (!parsed.ok()) return;
        ++passed;
        EXPECT_LT(parsed->rank, parsed->world_size) << what;
        for (const DeltaRecord& record : parsed->records) {
          ASSERT_LT(record.file, parsed->files.size()) << what;
          EXPECT_LE(record.offset + record.bytes,
                    parsed->files[record.file].bytes)
              << what;
        }
      });
  EXPECT_GT(passed, 0);
}

// --- Merging -----------------------------------------------------------------

class MergeTest : public testing::Test {
 protected:
  MergeTest() : table_(samples::SmallTable()) {
    Rng rng(11);
    before_ = samples::RandomL61(rng, table_);
    one_ = samples::SmallFragment(table_);
    zero_ = one_;
    zero_.rank = 0;
    zero_.files.clear();
    zero_.records.clear();
    zero_.owned = {{0, {0, 40000}}, {1, {0, 10}}, {5, {0, 5}}};
  }

  absl::StatusOr<StepManifest> Merge() {
    return MergeFragments(std::vector<RankFragment>{zero_, one_}, table_,
                          before_);
  }
  void Expect(const std::string& text) {
    EXPECT_TRUE(Says(Merge().status(), kPrecondition, text));
  }

  TensorTable table_;
  std::vector<std::uint64_t> before_;
  RankFragment zero_;
  RankFragment one_;
};

TEST_F(MergeTest, GivesAManifestThatPasses) {
  const auto merged = Merge();
  ASSERT_TRUE(merged.ok()) << merged.status();
  const auto bytes = SerializeStepManifest(*merged, table_);
  ASSERT_TRUE(bytes.ok()) << bytes.status();
  ASSERT_EQ(merged->states.size(), 3u);  // "a", its tie "c", "f"
  EXPECT_EQ(merged->states[1].tensor, 2u);
  EXPECT_EQ(merged->states[1].l61_after, L61Add(before_[0], 99));
  EXPECT_EQ(merged->digest_before, table_.StateDigest(before_));
  EXPECT_EQ(merged->base, one_.base);
}

TEST_F(MergeTest, TheOrderOfTheFragmentsDoesNotMatter) {
  const auto a = Merge();
  const auto b =
      MergeFragments(std::vector<RankFragment>{one_, zero_}, table_, before_);
  ASSERT_TRUE(a.ok() && b.ok());
  EXPECT_EQ(*SerializeStepManifest(*a, table_),
            *SerializeStepManifest(*b, table_));
}

TEST_F(MergeTest, GapNamesTensorRangeAndNeighbours) {
  zero_.owned[0].slice.end = 39000;
  Expect(
      "tensor \"a\": owned ranges: expected all of its 76800 units owned, "
      "found "
      "no owner of [39000, 40000) among 2 ranks, after rank 0 with [0, 39000), "
      "before rank 1 with [40000, 76800)");
  zero_.owned[0].slice.end = 40000;
  zero_.owned[1].slice.begin = 1;
  Expect("no owner of [0, 1)");
  zero_.owned[1].slice = {0, 9};
  Expect("no owner of [9, 10)");
  zero_.owned.erase(zero_.owned.begin() + 1);
  Expect("tensor \"b\": owned ranges: expected all of its 10 units");
}

TEST_F(MergeTest, OverlapNamesTensorAndBothRanks) {
  zero_.owned[0].slice.end = 40001;
  Expect(
      "tensor \"a\": owned ranges: expected no unit owned twice, found rank 0 "
      "with [0, 40001) and rank 1 with [40000, 76800)");
  zero_.owned[0].slice.end = 40000;
  zero_.owned[1].slice = {0, 10};
  one_.owned.insert(one_.owned.begin() + 1, {1, {0, 10}});
  Expect("tensor \"b\": owned ranges: expected no unit owned twice");
}

TEST_F(MergeTest, RecordOutsideItsRanksRangesNamesTensorAndRank) {
  one_.owned[2].slice.begin = 7;
  zero_.owned[2].slice.end = 7;
  Expect("tensor \"f\": record: expected within a range that rank 1 owns");
}

TEST_F(MergeTest, FragmentsThatDisagreeAreRefused) {
  const RankFragment good = zero_;
  const auto expect = [&](const std::string& text, auto mutate) {
    zero_ = good;
    mutate(zero_);
    Expect(text);
  };
  expect("run", [](auto& f) { f.run = {}; });
  expect("step", [](auto& f) { f.step += 1; });
  expect("epoch", [](auto& f) { f.epoch += 1; });
  expect("fragment of rank 1: attempt: expected 8 as in the fragment of rank 0",
         [](auto& f) { f.attempt += 1; });
  expect("world size: expected 3", [](auto& f) { f.world_size = 3; });
  expect("tensor table", [](auto& f) { f.table_hash = {}; });
  expect("base", [](auto& f) { f.base.step -= 1; });
  expect("base", [](auto& f) { f.base.manifest_hash.bytes[0] ^= 1; });
  expect("rank 1: expected one fragment, found two",
         [](auto& f) { f.rank = 1; });
}

TEST_F(MergeTest, MissingAndSurplusRanksAreRefused) {
  EXPECT_TRUE(Says(MergeFragments({}, table_, before_).status(), kPrecondition,
                   "one a rank"));
  EXPECT_TRUE(Says(
      MergeFragments(std::vector<RankFragment>{one_}, table_, before_).status(),
      kPrecondition,
      "world size 2: rank 0: expected one fragment, found none"));
  zero_.world_size = one_.world_size = 3;
  Expect("world size 3: rank 2: expected one fragment, found none");
  zero_.world_size = one_.world_size = 1;
  Expect("ranks: expected below 1");
}

TEST_F(MergeTest, AnotherTableIsRefused) {
  zero_.table_hash = one_.table_hash = {};
  Expect("tensor table");
}

TEST_F(MergeTest, BaseStatesThatDoNotFitAreRefused) {
  before_.pop_back();
  EXPECT_TRUE(Says(Merge().status(), kInvalid, "one a tensor"));
  before_.push_back(kL61Prime);
  EXPECT_TRUE(Says(Merge().status(), kInvalid, "tensor \"f\""));
  before_.back() = 0;
  before_[2] ^= 1;
  EXPECT_TRUE(Says(Merge().status(), kInvalid, "to which it is tied"));
}

TEST_F(MergeTest, FragmentThatBreaksARuleIsRefusedByItsRank) {
  one_.records[0].nnz = 0;
  EXPECT_TRUE(Says(Merge().status(), kPrecondition,
                   "fragment of rank 1: records[0].nnz"));
}

// A partial sum that cannot be one.
TEST_F(MergeTest, WrongPartialSumIsRefusedByItsRank) {
  one_.records[0].l61 = kL61Prime;
  EXPECT_TRUE(Says(Merge().status(), kPrecondition,
                   "fragment of rank 1: records[0].l61"));
}

TEST_F(MergeTest, EmptyStepOfEmptyRanksPasses) {
  one_.files.clear();
  one_.records.clear();
  const auto merged = Merge();
  ASSERT_TRUE(merged.ok()) << merged.status();
  EXPECT_EQ(merged->digest_before, merged->digest_after);
  EXPECT_TRUE(SerializeStepManifest(*merged, table_).ok());
}

TEST(MergePropertyTest, RandomWorldsMerge) {
  for (std::uint64_t seed = 0; seed < 60; ++seed) {
    SCOPED_TRACE(absl::StrCat("seed ", seed));
    Rng rng(seed);
    const TensorTable table = samples::RandomTable(rng, 1 + 5 * seed);
    const auto world = static_cast<std::uint32_t>(1 + samples::Below(rng, 8));
    const auto fragments =
        samples::RandomFragments(rng, table, world, samples::Below(rng, 101));
    std::vector<RankFragment> read;
    for (const RankFragment& fragment : fragments) {
      const auto bytes = SerializeRankFragment(fragment, table);
      ASSERT_TRUE(bytes.ok()) << bytes.status();
      auto parsed = ParseRankFragment("fragment", *bytes);
      ASSERT_TRUE(parsed.ok()) << parsed.status();
      samples::ExpectSame(*parsed, fragment);
      read.push_back(*std::move(parsed));
    }
    std::shuffle(read.begin(), read.end(), rng);
    const auto before = samples::RandomL61(rng, table);
    const auto merged = MergeFragments(read, table, before);
    ASSERT_TRUE(merged.ok()) << merged.status();
    const auto bytes = SerializeStepManifest(*merged, table);
    ASSERT_TRUE(bytes.ok()) << bytes.status();
    const auto parsed = ParseStepManifest("manifest", *bytes);
    ASSERT_TRUE(parsed.ok()) << parsed.status();
    const absl::Status status = CheckStepManifest("manifest", *parsed, table);
    ASSERT_TRUE(status.ok()) << status;
    samples::ExpectSame(*parsed, *merged);

    // Each record is there, where its rank put it.
    std::map<std::pair<std::uint32_t, std::uint64_t>, const DeltaRecord*> by;
    for (const DeltaRecord& record : parsed->records) {
      by[{record.tensor, record.slice.begin}] = &record;
    }
    std::size_t records = 0;
    auto after = before;
    for (const RankFragment& fragment : fragments) {
      for (const DeltaRecord& record : fragment.records) {
        ++records;
        const auto at = by.find({record.tensor, record.slice.begin});
        ASSERT_NE(at, by.end());
        EXPECT_EQ(at->second->offset, record.offset);
        EXPECT_EQ(at->second->nnz, record.nnz);
        EXPECT_EQ(parsed->files[at->second->file].id,
                  fragment.files[record.file].id);
        after[record.tensor] = L61Add(after[record.tensor], record.l61);
      }
    }
    EXPECT_EQ(records, parsed->records.size());
    for (std::size_t i = 0; i < table.size(); ++i) {
      if (table[i].tied_to != kNotTied) after[i] = after[table[i].tied_to];
    }
    EXPECT_EQ(parsed->digest_after, table.StateDigest(after));
  }
}

TEST(MergePropertyTest, ManyTensorsOnSixRanksTakeFewBytesARecord) {
  // The tensor count of a 30 B mixture of experts, each tensor cut into up to
  // six slices, all changed.
  Rng rng(30);
  const TensorTable table = samples::RandomTable(rng, 18'867);
  const auto fragments = samples::RandomFragments(rng, table, 6, 100);
  const auto before = samples::RandomL61(rng, table);
  using Clock = std::chrono::steady_clock;
  const auto ms = [](Clock::time_point from, Clock::time_point to) {
    return std::chrono::duration<double, std::milli>(to - from).count();
  };
  const auto t0 = Clock::now();
  const auto merged = MergeFragments(fragments, table, before);
  const auto t1 = Clock::now();
  ASSERT_TRUE(merged.ok()) << merged.status();
  const auto bytes = SerializeStepManifest(*merged, table);
  const auto t2 = Clock::now();
  ASSERT_TRUE(bytes.ok()) << bytes.status();
  const auto parsed = ParseStepManifest("manifest", *bytes);
  const auto t3 = Clock::now();
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  const absl::Status status = CheckStepManifest("manifest", *parsed, table);
  const auto t4 = Clock::now();
  ASSERT_TRUE(status.ok()) << status;
  ASSERT_GT(merged->records.size(), 50'000u);
  const double per_record = static_cast<double>(bytes->size()) /
                            static_cast<double>(merged->records.size());
  std::printf(
      "%zu tensors, %zu records: %zu bytes, %.1f a record; merge %.1f, "
      "serialize %.1f, parse %.1f, check %.1f ms\n",
      table.size(), merged->records.size(), bytes->size(), per_record,
      ms(t0, t1), ms(t1, t2), ms(t2, t3), ms(t3, t4));
  EXPECT_LE(per_record, 56);
}

}  // namespace
}  // namespace kedge
