// Goal: a step manifest comes back as written, is small, and no bytes give one
// that breaks a rule of spec/step_manifest.md. Method: each rule broken once in
// the file's own fields; every prefix, every flipped bit, random damage, each
// judged by a second, plain form of the rules; random manifests.

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "kedge/format/fixed_files.h"
#include "kedge/format/l61.h"
#include "kedge/format/limits.h"
#include "kedge/format/manifest.h"
#include "kedge/tests/format/manifest_samples.h"
#include "step_manifest_generated.h"

namespace kedge {
namespace {

using samples::Rng;
using samples::Says;
using Fields = fbs::StepManifestT;

constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
constexpr auto kLoss = absl::StatusCode::kDataLoss;

absl::StatusOr<StepManifest> Judge(std::span<const std::byte> bytes,
                                   const TensorTable& table) {
  auto manifest = ParseStepManifest("step_00000018/MANIFEST", bytes);
  if (!manifest.ok()) return manifest;
  const absl::Status status =
      CheckStepManifest("step_00000018/MANIFEST", *manifest, table);
  if (!status.ok()) return status;
  return manifest;
}

// What readers rely on, the slow and plain way.
void ExpectInvariants(const StepManifest& m, const TensorTable& table,
                      const std::string& what) {
  SCOPED_TRACE(what);
  EXPECT_EQ(m.table_hash, table.hash());
  if (m.kind == StepKind::kRoot) {
    EXPECT_EQ(m.l61.size(), table.size());
    EXPECT_TRUE(m.records.empty());
    return;
  }
  ASSERT_EQ(m.kind, StepKind::kDelta);
  EXPECT_LT(m.base.step, m.step);
  for (std::size_t i = 0; i < m.records.size(); ++i) {
    const DeltaRecord& a = m.records[i];
    ASSERT_LT(a.tensor, table.size());
    EXPECT_LT(a.slice.begin, a.slice.end);
    EXPECT_LE(a.slice.end, table[a.tensor].unit_count());
    ASSERT_LT(a.file, m.files.size());
    EXPECT_GE(a.offset, 64u);
    EXPECT_LE(a.offset + a.bytes + kSegmentTailBytes, m.files[a.file].bytes);
    EXPECT_LE(a.nnz, a.slice.count());
    EXPECT_LT(a.l61, kL61Prime);
    for (std::size_t k = 0; k < i; ++k) {
      const DeltaRecord& b = m.records[k];
      EXPECT_TRUE(a.file != b.file || a.offset >= b.offset + b.bytes ||
                  b.offset >= a.offset + a.bytes);
      EXPECT_TRUE(a.tensor != b.tensor || a.slice.begin >= b.slice.end ||
                  b.slice.begin >= a.slice.end);
    }
  }
  for (const TensorState& state : m.states) {
    ASSERT_LT(state.tensor, table.size());
    EXPECT_LT(state.l61_after, kL61Prime);
  }
  for (const DataFile& file : m.files) {
    EXPECT_EQ(file.piece_hashes.size(), PieceCount(file.bytes));
    EXPECT_LT(file.id.rank, kMaxRanks);
    EXPECT_LT(file.id.number, kMaxFilesPerRank);
  }
}

TEST(StepManifestTest, DeltaComesBack) {
  const TensorTable table = samples::SmallTable();
  const StepManifest m = samples::SmallStep(table);
  const auto bytes = SerializeStepManifest(m, table);
  ASSERT_TRUE(bytes.ok()) << bytes.status();
  const auto parsed = Judge(*bytes, table);
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  samples::ExpectSame(*parsed, m);
  EXPECT_EQ(*SerializeStepManifest(*parsed, table), *bytes);
}

TEST(StepManifestTest, RootComesBack) {
  const TensorTable table = samples::SmallTable();
  StepManifest m = samples::SmallRoot(table);
  for (int round = 0; round < 2; ++round) {
    const auto bytes = SerializeStepManifest(m, table);
    ASSERT_TRUE(bytes.ok()) << bytes.status();
    const auto parsed = Judge(*bytes, table);
    ASSERT_TRUE(parsed.ok()) << parsed.status();
    samples::ExpectSame(*parsed, m);
    // A step whose table differs from its base's.
    m.step = 9;
    m.epoch = 1;
    m.base = {8, m.run};
  }
}

TEST(StepManifestTest, EmptyDeltaIsOrdinary) {
  const TensorTable table = samples::SmallTable();
  StepManifest m = samples::SmallStep(table);
  m.files.clear();
  m.records.clear();
  m.states.clear();
  m.metadata_changed = false;
  m.metadata.clear();
  m.digest_after = m.digest_before;
  for (int round = 0; round < 2; ++round) {
    const auto bytes = SerializeStepManifest(m, table);
    ASSERT_TRUE(bytes.ok()) << bytes.status();
    const auto parsed = Judge(*bytes, table);
    ASSERT_TRUE(parsed.ok()) << parsed.status();
    samples::ExpectSame(*parsed, m);
    // A rank may have written a segment with nothing in it.
    Rng rng(5);
    m.files = {{{FileKind::kSegment, 0, 0}}};
    samples::Fill(rng, m.files, {});
  }
}

TEST(StepManifestTest, OneRecordOfOneTensorTakesLessThanHalfAKiB) {
  const auto table = TensorTable::Create({{"w", DType::kBf16, {1 << 29}}});
  ASSERT_TRUE(table.ok());
  Rng rng(6);
  StepManifest m = samples::SmallStep(samples::SmallTable());
  m.table_hash = table->hash();
  m.files.resize(1);
  m.records.resize(1);
  m.records[0].slice = {0, 1 << 29};
  m.records[0].file = 0;
  m.states = {{0, 0, m.records[0].l61}};
  m.metadata.clear();
  m.metadata_changed = false;
  samples::Fill(rng, m.files, {&m.records[0]});
  const auto bytes = SerializeStepManifest(m, *table);
  ASSERT_TRUE(bytes.ok()) << bytes.status();
  EXPECT_LE(bytes->size(), 512u);
}

TEST(StepManifestTest, WideValuesComeBack) {
  // Beyond 2^32 in every column that has two widths.
  constexpr std::uint64_t kUnits = std::uint64_t{1} << 36;
  const auto table = TensorTable::Create({{"w", DType::kU8, {kUnits}}});
  ASSERT_TRUE(table.ok());
  Rng rng(7);
  StepManifest m = samples::SmallStep(samples::SmallTable());
  m.table_hash = table->hash();
  m.records.resize(1);
  m.files.clear();
  for (std::uint32_t i = 0; i < 70'000; ++i) {
    m.files.push_back({{FileKind::kSegment, i / 1000, i % 1000}});
  }
  DeltaRecord& record = m.records[0];
  record.file = 69'999;
  record.slice = {(std::uint64_t{1} << 33) + 1, kUnits};
  record.nnz = std::uint64_t{1} << 34;
  m.states = {{0, 0, record.l61}};
  samples::Fill(rng, m.files, {&record});
  const auto bytes = SerializeStepManifest(m, *table);
  ASSERT_TRUE(bytes.ok()) << bytes.status();
  const auto parsed = Judge(*bytes, *table);
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  samples::ExpectSame(*parsed, m);
}

TEST(StepManifestTest, RecordsBeyond32GiBOfAFileComeBack) {
  // Records of 1 GiB until offsets no longer fit the narrow column.
  constexpr std::uint64_t kUnits = std::uint64_t{1} << 36;
  const auto table = TensorTable::Create({{"w", DType::kU8, {kUnits}}});
  ASSERT_TRUE(table.ok());
  Rng rng(8);
  StepManifest m = samples::SmallStep(samples::SmallTable());
  m.table_hash = table->hash();
  m.files.resize(1);
  m.records.clear();
  std::uint64_t after = 0;
  for (std::uint64_t i = 0; i < 40; ++i) {
    DeltaRecord record;
    record.slice = {i << 30, (i + 1) << 30};
    record.bytes = kMaxRecordBytes;
    record.nnz = 1;
    record.l61 = 1;
    after += 1;
    m.records.push_back(record);
  }
  m.states = {{0, 0, after}};
  std::vector<DeltaRecord*> order;
  for (DeltaRecord& record : m.records) order.push_back(&record);
  samples::Fill(rng, m.files, order);
  const auto bytes = SerializeStepManifest(m, *table);
  ASSERT_TRUE(bytes.ok()) << bytes.status();
  const auto parsed = Judge(*bytes, *table);
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  samples::ExpectSame(*parsed, m);
}

class StepManifestRules : public testing::Test {
 protected:
  StepManifestRules() : table_(samples::SmallTable()) {
    auto bytes = SerializeStepManifest(samples::SmallStep(table_), table_);
    EXPECT_TRUE(bytes.ok()) << bytes.status();
    delta_ = *std::move(bytes);
    bytes = SerializeStepManifest(samples::SmallRoot(table_), table_);
    EXPECT_TRUE(bytes.ok()) << bytes.status();
    root_ = *std::move(bytes);
  }

  absl::Status After(std::span<const std::byte> bytes,
                     const std::function<void(Fields&)>& mutate) {
    return Judge(samples::Mutated<fbs::StepManifest>(bytes, "KDSM", mutate),
                 table_)
        .status();
  }
  void Delta(const std::string& text,
             const std::function<void(Fields&)>& mutate,
             absl::StatusCode code = kLoss) {
    EXPECT_TRUE(Says(After(delta_, mutate), code, text));
  }
  void Root(const std::string& text,
            const std::function<void(Fields&)>& mutate) {
    EXPECT_TRUE(Says(After(root_, mutate), kLoss, text));
  }
  // The hash of a file's piece hashes follows a change of them.
  static void SetHash(Fields& f, std::size_t file, std::size_t first,
                      std::size_t count) {
    const Hash128 hash =
        HashOfPieces(std::span(f.piece_hash).subspan(first, count));
    f.file_hash[file] = fbs::Bytes16(hash.bytes);
  }

  TensorTable table_;
  std::vector<std::byte> delta_;
  std::vector<std::byte> root_;
};

TEST_F(StepManifestRules, UnchangedFieldsPass) {
  EXPECT_TRUE(After(delta_, [](Fields&) {}).ok());
  EXPECT_TRUE(After(root_, [](Fields&) {}).ok());
}

TEST_F(StepManifestRules, Head) {
  Delta(
      "min_reader", [](Fields& f) { f.min_reader = 2; },
      absl::StatusCode::kUnimplemented);
  Delta("min_reader", [](Fields& f) { f.min_reader = 0; });
  Delta("step: expected 0 to", [](Fields& f) { f.step = kMaxStep + 1; });
  Delta("epoch", [](Fields& f) { f.epoch = 0; });
  Delta("epoch", [](Fields& f) { f.epoch = kMaxEpoch + 1; });
  Delta("kind", [](Fields& f) { f.kind = 0; });
  Delta("kind", [](Fields& f) { f.kind = 3; });
  Delta("base: expected a step below 18", [](Fields& f) { f.base_step = 18; });
  Delta("base: expected the hash",
        [](Fields& f) { *f.base_manifest_hash = fbs::Bytes16(); });
  Delta("table_hash", [](Fields& f) { *f.table_hash = fbs::Bytes16(); });
  Delta("l61: expected none in a delta", [](Fields& f) { f.l61.push_back(1); });
  Delta("digest_after: expected another",
        [](Fields& f) { *f.digest_after = *f.digest_before; });
  Delta("epoch", [](Fields& f) { f.step = 0; });
  Delta("base: expected none", [](Fields& f) { f.step = f.epoch = 0; });
  Delta("kind: expected 2 (root) at step 0", [](Fields& f) {
    f.step = f.epoch = 0;
    f.base_step = 0;
    *f.base_manifest_hash = fbs::Bytes16();
  });
}

TEST_F(StepManifestRules, RootStep) {
  Root("files, records, states", [](Fields& f) {
    f.state_tensor = {0};
    f.state_l61_before = f.state_l61_after = {0};
  });
  Root("digest_before", [](Fields& f) { *f.digest_before = *f.digest_after; });
  Root("l61[1]: expected a residue", [](Fields& f) { f.l61[1] = kL61Prime; });
  Root("l61: expected 6 rows", [](Fields& f) { f.l61.pop_back(); });
  Root("l61[2]: expected 0x", [](Fields& f) { f.l61[2] ^= 1; });
  Root("l61[4]: expected 0", [](Fields& f) { f.l61[4] = 1; });
  Root("digest_after", [](Fields& f) { f.l61[1] ^= 1; });
  Root("epoch", [](Fields& f) { f.epoch = 1; });
  Root("base", [](Fields& f) { f.base_step = 1; });
}

TEST_F(StepManifestRules, Files) {
  Delta("file_number: expected 3 rows",
        [](Fields& f) { f.file_number.pop_back(); });
  Delta("file_bytes: expected 3 rows",
        [](Fields& f) { f.file_bytes.push_back(1); });
  Delta("file_hash: expected 3 rows", [](Fields& f) { f.file_hash.clear(); });
  Delta("piece_hash", [](Fields& f) { f.piece_hash.pop_back(); });
  Delta("piece_hash", [](Fields& f) { f.piece_hash.push_back(1); });
  Delta("piece_hash", [](Fields& f) { f.file_bytes[1] = ~0ull; });
  Delta("files[0] (delta-r000-000.kds).hash",
        [](Fields& f) { f.piece_hash[0] ^= 1; });
  Delta("files[2].rank", [](Fields& f) { f.file_rank[2] = kMaxRanks; });
  Delta("files[1].number",
        [](Fields& f) { f.file_number[1] = kMaxFilesPerRank; });
  Delta("files[1]: expected a file after",
        [](Fields& f) { f.file_number[1] = 0; });
  Delta("files[2]: expected a file after",
        [](Fields& f) { f.file_rank[2] = 0; });
  Delta("files[0] (delta-r000-000.kds).bytes",
        [](Fields& f) { f.file_bytes[0] += 64; });
  Delta("files[0] (delta-r000-000.kds).bytes",
        [](Fields& f) { f.file_bytes[0] -= 1; });
  Delta(".bytes: expected at most", [](Fields& f) {
    f.file_bytes[2] = kMaxFileBytes + 64;
    const std::size_t pieces = PieceCount(f.file_bytes[2]);
    f.piece_hash.resize(2 + pieces);
    SetHash(f, 2, 2, pieces);
  });
}

TEST_F(StepManifestRules, RecordColumns) {
  Delta("record_begin: expected 5 rows",
        [](Fields& f) { f.record_begin.pop_back(); });
  Delta("record_begin: expected one width",
        [](Fields& f) { f.record_begin_wide.push_back(1); });
  Delta("record_count: expected 5 rows",
        [](Fields& f) { f.record_count.clear(); });
  Delta("record_count: expected one width",
        [](Fields& f) { f.record_count_wide.resize(5); });
  Delta("record_file: expected 5 rows",
        [](Fields& f) { f.record_file.push_back(0); });
  Delta("record_file: expected one width",
        [](Fields& f) { f.record_file_wide.resize(5); });
  Delta("record_offset8: expected 5 rows",
        [](Fields& f) { f.record_offset8.clear(); });
  Delta("record_offset8: expected one width",
        [](Fields& f) { f.record_offset8_wide.resize(5); });
  Delta("record_bytes: expected 5 rows",
        [](Fields& f) { f.record_bytes.pop_back(); });
  Delta("record_codec: expected 5 rows",
        [](Fields& f) { f.record_codec.resize(2); });
  Delta("record_nnz: expected 5 rows", [](Fields& f) { f.record_nnz.clear(); });
  Delta("record_nnz: expected one width",
        [](Fields& f) { f.record_nnz_wide.resize(5); });
  Delta("record_l61: expected 5 rows",
        [](Fields& f) { f.record_l61.push_back(0); });
}

TEST_F(StepManifestRules, ColumnsInTheirOtherWidthAreTheSame) {
  const absl::Status status = After(delta_, [](Fields& f) {
    f.record_begin_wide.assign(f.record_begin.begin(), f.record_begin.end());
    f.record_begin.clear();
    f.record_count_wide.assign(f.record_count.begin(), f.record_count.end());
    f.record_count.clear();
    f.record_file_wide.assign(f.record_file.begin(), f.record_file.end());
    f.record_file.clear();
    f.record_offset8_wide.assign(f.record_offset8.begin(),
                                 f.record_offset8.end());
    f.record_offset8.clear();
    f.record_nnz_wide.assign(f.record_nnz.begin(), f.record_nnz.end());
    f.record_nnz.clear();
    f.record_codec.assign(5, 1);
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST_F(StepManifestRules, Records) {
  Delta("records[4].tensor: expected below 6", [](Fields& f) {
    f.record_tensor[4] = 6;
    f.state_tensor[4] = 6;
  });
  Delta("records[4].tensor: expected below 1000000",
        [](Fields& f) { f.record_tensor[4] = kMaxTensorCount; });
  Delta("records[1]: expected a slice after",
        [](Fields& f) { f.record_begin[1] -= 1; });
  Delta("records[3]: expected a slice after",
        [](Fields& f) { std::swap(f.record_tensor[2], f.record_tensor[3]); });
  Delta("records[2].slice", [](Fields& f) { f.record_count[2] = 0; });
  Delta("records[2].slice: expected within the 10 units of tensor \"b\"",
        [](Fields& f) { f.record_count[2] = 11; });
  Delta("records[3].slice: expected whole elements", [](Fields& f) {
    f.record_begin[3] = 3;
    f.record_count[3] = 11;
    f.record_nnz[3] = 1;
  });
  Delta("records[1].slice", [](Fields& f) {
    f.record_begin_wide.assign(f.record_begin.begin(), f.record_begin.end());
    f.record_begin.clear();
    f.record_begin_wide[1] = ~0ull;  // wraps with the count
  });
  Delta("records[2].tensor: expected a tensor that has its own storage",
        [](Fields& f) {
          f.record_tensor[2] = 2;
          f.state_tensor = {0, 2, 3, 5};
          f.state_l61_before.erase(f.state_l61_before.begin() + 2);
          f.state_l61_after.erase(f.state_l61_after.begin() + 2);
          f.state_l61_after[1] = L61Add(f.state_l61_before[1], f.record_l61[2]);
        });
  Delta("records[0].file", [](Fields& f) { f.record_file[0] = 3; });
  Delta("records[0].offset", [](Fields& f) { f.record_offset8[0] = 7; });
  Delta("record_offset8[0]", [](Fields& f) {
    f.record_offset8_wide.assign(5, ~0ull);
    f.record_offset8.clear();
  });
  // Holes and overlaps.
  Delta("in delta-r000-001.kds, where the record before it ends",
        [](Fields& f) { f.record_offset8[0] += 1; });
  Delta("where the record before it ends",
        [](Fields& f) { f.record_offset8[0] -= 1; });
  Delta("where the record before it ends",
        [](Fields& f) { f.record_bytes[3] = 64; });
  Delta("files[2] (delta-r001-000.kds).bytes",
        [](Fields& f) { f.record_bytes[1] = 1000; });
  Delta("records[1].bytes", [](Fields& f) { f.record_bytes[1] = 15; });
  Delta("records[1].bytes",
        [](Fields& f) { f.record_bytes[1] = kMaxRecordBytes + 1; });
  Delta("records[2].nnz", [](Fields& f) { f.record_nnz[2] = 0; });
  Delta("records[2].nnz", [](Fields& f) { f.record_nnz[2] = 11; });
  Delta("records[2].l61", [](Fields& f) { f.record_l61[2] = kL61Prime; });
  Delta("records[3].codec", [](Fields& f) {
    f.record_codec = {1, 1, 1, 0, 1};
  });
  Delta("records[3].codec", [](Fields& f) {
    f.record_codec = {1, 1, 1, 3, 1};
  });
  Delta(
      "records[3].codec",
      [](Fields& f) {
        f.record_codec = {1, 1, 1, 2, 1};
      },
      absl::StatusCode::kUnimplemented);
}

TEST_F(StepManifestRules, States) {
  Delta("state_l61_before: expected 5 rows",
        [](Fields& f) { f.state_l61_before.pop_back(); });
  Delta("state_l61_after: expected 5 rows",
        [](Fields& f) { f.state_l61_after.push_back(0); });
  Delta("states[1].l61_after: expected 0x",
        [](Fields& f) { f.state_l61_after[1] ^= 1; });
  Delta("states[1].l61_after: expected 0x",
        [](Fields& f) { f.record_l61[2] ^= 1; });
  Delta("states[1].l61: expected residues",
        [](Fields& f) { f.state_l61_before[1] = kL61Prime; });
  Delta("states[2].tensor: expected above 1",
        [](Fields& f) { f.state_tensor[2] = 1; });
  Delta("states[0].tensor: expected 0",
        [](Fields& f) { f.state_tensor[0] = 1; });
  Delta("states: expected a row for tensor 5", [](Fields& f) {
    f.state_tensor.pop_back();
    f.state_l61_before.pop_back();
    f.state_l61_after.pop_back();
  });
  // The tie's row is missing, differs, or stands for a tensor without record.
  Delta("states: expected a row for tensor \"c\"", [](Fields& f) {
    f.state_tensor.erase(f.state_tensor.begin() + 2);
    f.state_l61_before.erase(f.state_l61_before.begin() + 2);
    f.state_l61_after.erase(f.state_l61_after.begin() + 2);
  });
  Delta("states[2].l61: expected 0x",
        [](Fields& f) { f.state_l61_after[2] ^= 1; });
  Delta("no row for tensor \"e\"", [](Fields& f) {
    f.state_tensor.insert(f.state_tensor.begin() + 4, 4);
    f.state_l61_before.insert(f.state_l61_before.begin() + 4, 0);
    f.state_l61_after.insert(f.state_l61_after.begin() + 4, 0);
  });
  Delta("states[5].tensor: expected below 6", [](Fields& f) {
    f.state_tensor.push_back(6);
    f.state_l61_before.push_back(0);
    f.state_l61_after.push_back(0);
  });
}

TEST_F(StepManifestRules, Metadata) {
  Delta("metadata: expected none",
        [](Fields& f) { f.metadata_changed = false; });
  Delta("metadata_end: expected two rows a pair",
        [](Fields& f) { f.metadata_end.pop_back(); });
  Delta("metadata_end[2]", [](Fields& f) { f.metadata_end[2] = 1; });
  Delta("metadata_end[2]", [](Fields& f) { f.metadata_end[3] = 0xffffffff; });
  Delta("metadata: expected", [](Fields& f) { f.metadata.push_back('x'); });
  Delta("metadata[1].key: expected a key above",
        [](Fields& f) { f.metadata[8] = 'a'; });
  Delta("metadata[0].key: expected UTF-8",
        [](Fields& f) { f.metadata[5] = 0xff; });
  Delta("metadata[0].value: expected UTF-8",
        [](Fields& f) { f.metadata[6] = 0xff; });
  Delta("metadata: expected at most",
        [](Fields& f) { f.metadata.resize(kMaxMetadataBytes + 1); });
  Delta("metadata_end: expected two rows a pair, at most", [](Fields& f) {
    f.metadata_end.assign(2 * kMaxMetadataEntries + 2, 0);
  });
}

TEST_F(StepManifestRules, FileWithoutARequiredFieldIsRejected) {
  flatbuffers::FlatBufferBuilder builder;
  const auto start = builder.StartTable();
  builder.AddElement<std::uint16_t>(fbs::StepManifest::VT_MIN_READER, 1, 0);
  builder.Finish(
      flatbuffers::Offset<fbs::StepManifest>(builder.EndTable(start)), "KDSM");
  const auto bytes =
      std::as_bytes(std::span(builder.GetBufferPointer(), builder.GetSize()));
  EXPECT_TRUE(Says(ParseStepManifest("m", bytes).status(), kLoss,
                   "FlatBuffer structure"));
}

TEST(StepManifestTest, SerializeRefusesWhatParseRefuses) {
  const TensorTable table = samples::SmallTable();
  const auto expect = [&](const std::string& text, auto mutate) {
    StepManifest m = samples::SmallStep(table);
    mutate(m);
    EXPECT_TRUE(Says(SerializeStepManifest(m, table).status(), kInvalid, text));
  };
  expect("records[0].slice", [](auto& m) { m.records[0].slice.end = 0; });
  expect("records[0].offset", [](auto& m) { m.records[0].offset += 1; });
  expect("records[2].codec",
         [](auto& m) { m.records[2].codec = Codec::kOldExponentContext; });
  expect("files[1].kind",
         [](auto& m) { m.files[1].id.kind = FileKind::kAnchor; });
  expect(".pieces", [](auto& m) { m.files[1].piece_hashes.push_back(1); });
  expect("states[0].l61_after", [](auto& m) { m.states[0].l61_after ^= 1; });
  expect("states", [](auto& m) { m.states.erase(m.states.begin() + 2); });
  expect("table_hash", [](auto& m) { m.table_hash = {}; });
  expect("metadata[0].key", [](auto& m) { m.metadata = {{"\xff", ""}}; });
  expect("metadata bytes", [](auto& m) {
    m.metadata = {{"k", std::string(kMaxMetadataBytes, 'x')}};
  });
}

TEST(StepManifestTest, ManifestThatAReaderWouldRefuseForItsSizeIsNotWritten) {
  const TensorTable table = samples::SmallTable();
  StepManifest m = samples::SmallStep(table);
  m.metadata.clear();
  m.metadata_changed = false;
  // 8 TiB of segments have 1 Mi pieces, 8 MiB of hashes; 33 such are too many.
  // Records of 1 GiB fill them.
  const auto big = TensorTable::Create({{"w", DType::kU8, {1ull << 45}}});
  ASSERT_TRUE(big.ok());
  m.table_hash = big->hash();
  m.records.clear();
  m.files.clear();
  for (std::uint32_t file = 0; file < 300; ++file) {
    m.files.push_back({{FileKind::kSegment, 0, file}});
    for (std::uint64_t i = 0; i < 1000; ++i) {
      DeltaRecord record;
      const std::uint64_t begin = (file * 1000ull + i) << 20;
      record.slice = {begin, begin + (1 << 20)};
      record.file = file;
      record.bytes = kMaxRecordBytes;
      record.nnz = 1;
      m.records.push_back(record);
    }
  }
  m.states = {{0, 0, 0}};
  m.digest_after = m.digest_before;
  std::vector<DeltaRecord*> order;
  for (DeltaRecord& record : m.records) order.push_back(&record);
  Rng rng(9);
  samples::Fill(rng, m.files, order);
  EXPECT_TRUE(Says(SerializeStepManifest(m, *big).status(), kInvalid, "size"));
}

TEST(StepManifestTest, DamageIsRejectedOrHarmless) {
  const TensorTable table = samples::SmallTable();
  for (const StepManifest& m :
       {samples::SmallStep(table), samples::SmallRoot(table)}) {
    const auto bytes = SerializeStepManifest(m, table);
    ASSERT_TRUE(bytes.ok()) << bytes.status();
    int passed = 0;
    samples::ForEachDamage(
        *bytes, 30000,
        [&](std::span<const std::byte> damaged, const std::string& what) {
          const auto parsed = Judge(damaged, table);
          if (!parsed.ok()) return;
          // COMMIT's hash is what refuses these. They hold every rule.
          ++passed;
          ExpectInvariants(*parsed, table, what);
          EXPECT_TRUE(SerializeStepManifest(*parsed, table).ok()) << what;
        });
    // Run id, base, digests and the like are free to be anything.
    EXPECT_GT(passed, 0);
  }
}

TEST(StepManifestTest, ErrorSaysWhereWhatExpectedFoundAndWhatToDo) {
  const TensorTable table = samples::SmallTable();
  const auto bytes = SerializeStepManifest(samples::SmallStep(table), table);
  const auto bad = samples::Mutated<fbs::StepManifest>(
      *bytes, "KDSM", [](Fields& f) { f.record_count[2] = 11; });
  EXPECT_EQ(Judge(bad, table).status().message(),
            "step_00000018/MANIFEST: records[2].slice: expected within the 10 "
            "units of tensor \"b\", found [0, 11); run `kedge fsck`");
}

TEST(StepManifestTest, NamesAVersionInFull) {
  VersionId version = {19, {}};
  version.manifest_hash.bytes[0] = 0xab;
  EXPECT_EQ(ToString(version), "v19 (ab000000000000000000000000000000)");
}

TEST(StepManifestTest, PieceCountCountsTheLastPartialPiece) {
  EXPECT_EQ(PieceCount(0), 0u);
  EXPECT_EQ(PieceCount(1), 1u);
  EXPECT_EQ(PieceCount(kPieceBytes), 1u);
  EXPECT_EQ(PieceCount(kPieceBytes + 1), 2u);
  EXPECT_EQ(PieceCount(~std::uint64_t{0}), (std::uint64_t{1} << 41));
}

}  // namespace
}  // namespace kedge
