// Goal: the pages of spec/ and the code never disagree.
// Method: every block that follows a line `<!-- example: NAME -->` is taken
// from its page and compared with what the code writes; what can be parsed is
// parsed from the page's bytes as well. Tables are compared cell by cell. A
// failure prints the block as the code would have it.

#include <cctype>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <sstream>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kedge/format/anchor_layout.h"
#include "kedge/format/codec.h"
#include "kedge/format/control_file.h"
#include "kedge/format/dtype.h"
#include "kedge/format/fixed_files.h"
#include "kedge/format/hash.h"
#include "kedge/format/l61.h"
#include "kedge/format/limits.h"
#include "kedge/format/manifest.h"
#include "kedge/format/tensor_table.h"
#include "kedge/format/tile_grid.h"

namespace kedge {
namespace {

using Bytes = std::vector<std::byte>;
using Table = std::vector<std::vector<std::string>>;  // rows of cells

std::string SpecFolder() { return absl::StrCat(KEDGE_SOURCE_DIR, "/spec/"); }

std::vector<std::string> LinesOf(const std::string& page) {
  std::ifstream in(SpecFolder() + page);
  EXPECT_TRUE(in.is_open()) << page;
  std::vector<std::string> lines;
  for (std::string line; std::getline(in, line);) lines.push_back(line);
  return lines;
}

// The lines of the block after the marker.
std::vector<std::string> BlockOf(const std::string& page,
                                 const std::string& marker) {
  std::vector<std::string> block;
  bool found = false;
  for (const std::string& line : LinesOf(page)) {
    if (!found) {
      found = line == marker;
      continue;
    }
    const bool part = absl::StartsWith(line, "    ") || line[0] == '|';
    if (part) block.push_back(line);
    if (!part && !block.empty()) break;
    if (!part && !line.empty()) break;
  }
  EXPECT_TRUE(found) << page << ": no line " << marker;
  return block;
}

std::string Marker(const std::string& name) {
  return absl::StrCat("<!-- example: ", name, " -->");
}

// As `hexdump -C` prints it, indented by four.
std::string Dump(std::span<const std::byte> bytes) {
  std::string text;
  bool starred = false;
  for (std::size_t at = 0; at < bytes.size(); at += 16) {
    const auto row =
        bytes.subspan(at, std::min<std::size_t>(16, bytes.size() - at));
    if (at > 0 && row.size() == 16 &&
        std::memcmp(row.data(), row.data() - 16, 16) == 0) {
      if (!starred) text += "    *\n";
      starred = true;
      continue;
    }
    starred = false;
    absl::StrAppendFormat(&text, "    %08x ", at);
    std::string letters;
    for (std::size_t i = 0; i < 16; ++i) {
      if (i % 8 == 0) text += ' ';
      if (i >= row.size()) {
        text += "   ";
        continue;
      }
      const auto byte = std::to_integer<unsigned>(row[i]);
      absl::StrAppendFormat(&text, "%02x ", byte);
      letters += byte >= 0x20 && byte < 0x7f ? static_cast<char>(byte) : '.';
    }
    absl::StrAppend(&text, " |", letters, "|\n");
  }
  absl::StrAppendFormat(&text, "    %08x\n", bytes.size());
  return text;
}

Bytes ParseDump(const std::vector<std::string>& lines) {
  Bytes bytes;
  bool repeat = false;
  for (const std::string& line : lines) {
    std::istringstream in(line.substr(0, line.find('|')));
    std::string word;
    in >> word;
    if (word == "*") {
      repeat = true;
      continue;
    }
    const std::size_t offset = std::stoul(word, nullptr, 16);
    if (repeat) {
      while (bytes.size() >= 16 && bytes.size() < offset) {
        bytes.push_back(bytes[bytes.size() - 16]);
      }
      repeat = false;
    }
    EXPECT_EQ(bytes.size(), offset) << line;
    while (in >> word) {
      bytes.push_back(static_cast<std::byte>(std::stoul(word, nullptr, 16)));
    }
  }
  return bytes;
}

// Which examples a test has looked at; the last test compares with the pages.
std::set<std::string>& Seen() {
  static std::set<std::string> seen;
  return seen;
}

// The page's bytes, which must be `expected`.
Bytes ExampleBytes(const std::string& page, const std::string& name,
                   std::span<const std::byte> expected) {
  Seen().insert(name);
  const auto block = BlockOf(page, Marker(name));
  std::string text;
  for (const std::string& line : block) absl::StrAppend(&text, line, "\n");
  EXPECT_EQ(text, Dump(expected))
      << "spec/" << page << ", example " << name << ": by the code it reads\n"
      << Dump(expected);
  return ParseDump(block);
}

Table TableAfter(const std::string& page, const std::string& marker) {
  Table table;
  for (const std::string& line : BlockOf(page, marker)) {
    if (absl::StartsWith(line, "|---")) continue;
    std::vector<std::string> cells;
    for (absl::string_view cell : absl::StrSplit(line, '|')) {
      cell = absl::StripAsciiWhitespace(cell);
      absl::ConsumePrefix(&cell, "`");
      absl::ConsumeSuffix(&cell, "`");
      cells.emplace_back(cell.data(), cell.size());
    }
    table.emplace_back(cells.begin() + 1, cells.end() - 1);
  }
  return table;
}

// A table of two columns, "what" and "value".
void ExpectValues(const std::string& page, const std::string& name,
                  const Table& expected) {
  Seen().insert(name);
  Table found = TableAfter(page, Marker(name));
  if (!found.empty()) found.erase(found.begin());
  std::string text;
  for (const auto& row : expected) {
    absl::StrAppend(&text, "| `", row[0], "` | `", row[1], "` |\n");
  }
  EXPECT_EQ(found, expected)
      << "spec/" << page << ", example " << name << ": by the code it reads\n"
      << text;
}

std::string Hex64Text(std::uint64_t value) {
  return absl::StrFormat("0x%016x", value);
}

std::span<const std::byte> AsBytes(const std::string& text) {
  return std::as_bytes(std::span(text));
}

Bytes16 Counting(std::uint8_t first) {
  Bytes16 value;
  for (std::uint8_t i = 0; i < 16; ++i) {
    value.bytes[i] = static_cast<std::uint8_t>(first + i);
  }
  return value;
}

RunId ExampleRun() {
  RunId run;
  for (std::uint8_t i = 0; i < 16; ++i) {
    run.bytes[i] = static_cast<std::uint8_t>(0x11 * i);
  }
  return run;
}

TensorTable ExampleTable() {
  std::vector<TensorSpec> tensors(3);
  tensors[0] = {"embed.weight", DType::kBf16, {4, 3}};
  tensors[1] = {"head.weight", DType::kBf16, {4, 3}};
  tensors[2] = {"scale", DType::kF32, {}};
  const std::vector<std::pair<std::string, std::string>> ties = {
      {"head.weight", "embed.weight"}};
  auto table = TensorTable::Create(std::move(tensors), ties);
  EXPECT_TRUE(table.ok()) << table.status();
  return *std::move(table);
}

// Fixed files ----------------------------------------------------------------

TEST(SpecExamplesTest, Store) {
  StoreInfo store;
  store.run = ExampleRun();
  store.l61_seed = 1;
  store.v0_digest = Counting(0xa0);
  store.v0_table_hash = Counting(0xb0);
  store.created_unix_seconds = 1'800'000'000;
  const Bytes page =
      ExampleBytes("store_file.md", "store-1", SerializeStore(store));
  const auto parsed = ParseStore("page", page);
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  EXPECT_EQ(*parsed, store);
}

TEST(SpecExamplesTest, Commit) {
  CommitRecord commit;
  commit.run = ExampleRun();
  commit.step = 18;
  commit.epoch = 3;
  commit.manifest_bytes = 1000;
  commit.manifest_hash = Counting(0xc0);
  const Bytes page =
      ExampleBytes("commit.md", "commit-1", SerializeCommit(commit));
  const auto parsed = ParseCommit("page", page);
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  EXPECT_EQ(*parsed, commit);
}

TEST(SpecExamplesTest, Head) {
  Head head;
  head.run = ExampleRun();
  head.step = 18;
  head.epoch = 3;
  head.manifest_hash = Counting(0xc0);
  const Bytes page = ExampleBytes("head.md", "head-1", SerializeHead(head));
  const auto parsed = ParseHead("page", page);
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  EXPECT_EQ(*parsed, head);
}

TEST(SpecExamplesTest, Epoch) {
  EpochInfo epoch;
  epoch.run = ExampleRun();
  epoch.resume_step = 17;
  epoch.epoch = 3;
  epoch.resume_manifest_hash = Counting(0xd0);
  const Bytes page = ExampleBytes("epoch.md", "epoch-1", SerializeEpoch(epoch));
  const auto parsed = ParseEpoch("page", page);
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  EXPECT_EQ(*parsed, epoch);
}

TEST(SpecExamplesTest, Lease) {
  LeaseRecord lease;
  lease.run = ExampleRun();
  lease.oldest_step = 18;
  lease.holds = true;
  lease.held_step = 18;
  lease.held_manifest_hash = Counting(0xc0);
  lease.counter = 41;
  lease.reader = "node-7.rank-0";
  const Bytes page = ExampleBytes("lease.md", "lease-1", SerializeLease(lease));
  const auto parsed = ParseLease("page", page);
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  EXPECT_EQ(*parsed, lease);
}

TEST(SpecExamplesTest, ControlFile) {
  ControlHeader header;
  header.run = ExampleRun();
  header.world_size = 3;
  header.session = 0x0a0a0a0a0a0a0a0a;
  header.nonce = 0x0101010101010101;
  header.kind = ControlKind::kWelcome;
  const std::vector<ControlPeer> peers = {{1, 0x0202020202020202},
                                          {2, 0x0303030303030303}};
  const Bytes page =
      ExampleBytes("control_file.md", "control-file-1",
                   SerializeControlFile(header, SerializeWelcome(peers)));
  const auto parsed = ParseControlFile("page", page);
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  header.payload_bytes = 32;
  EXPECT_EQ(*parsed, header);
  EXPECT_EQ(*ParseWelcome("page", std::span(page).subspan(kControlHeaderBytes)),
            peers);
}

// Data files -----------------------------------------------------------------

TEST(SpecExamplesTest, Segment) {
  const std::vector<std::uint64_t> shape = {300, 200};
  const TileGrid grid = MakeTileGrid(shape, 1);
  const UnitRange slice{0, 60000};
  const std::vector<Change> changes = {
      {5, 2}, {6, -1}, {130, 1}, {40000, -256}};
  const Bytes record = EncodeRecordScalar(grid, slice, 2, changes);
  DataFileHeader header;
  header.run = ExampleRun();
  header.step = 18;
  header.file = {FileKind::kSegment, 3, 0};
  header.payload_bytes = (record.size() + 7) / 8 * 8;
  header.count = 1;
  const auto header_bytes = SerializeDataFileHeader(header);
  Bytes file(header_bytes.begin(), header_bytes.end());
  file.insert(file.end(), record.begin(), record.end());
  file.resize(SegmentFileBytes(header.payload_bytes));

  const Bytes page = ExampleBytes("segment.md", "segment-1", file);
  ASSERT_GE(page.size(), 64 + record.size());
  const auto parsed = ParseDataFileHeader("page", FileKind::kSegment,
                                          std::span(page).first(64));
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  EXPECT_EQ(*parsed, header);
  std::vector<Change> found;
  ASSERT_TRUE(
      VisitRecord(std::span(page).subspan(64, record.size()), grid, slice, 2,
                  [&](std::uint64_t unit, std::int64_t d) {
                    found.push_back({static_cast<std::uint32_t>(unit), d});
                  })
          .ok());
  EXPECT_EQ(found, changes);
}

TEST(SpecExamplesTest, DenseTile) {
  const std::vector<std::uint64_t> shape = {8};
  const TileGrid grid = MakeTileGrid(shape, 1);
  const std::vector<Change> changes = {{0, 17}, {1, -22},   {2, 30}, {4, -25},
                                       {5, 19}, {6, 20000}, {7, -18}};
  const Bytes record = EncodeRecordScalar(grid, {0, 8}, 2, changes);
  const Bytes page = ExampleBytes("segment.md", "dense-1", record);
  const auto view = RecordView::Parse(page, grid.TilesOf({0, 8}));
  ASSERT_TRUE(view.ok()) << view.status();
  ASSERT_EQ(view->tiles().size(), 1u);
  EXPECT_EQ(view->tiles()[0].mode, TileMode::kDense);
  std::vector<Change> found;
  ASSERT_TRUE(DecodeTile(view->tiles()[0], 8, 2, &found).ok());
  EXPECT_EQ(found, changes);
}

TEST(SpecExamplesTest, AnchorFile) {
  const std::uint16_t bf16[] = {0x3f80, 0x3fc0, 0xc000, 0x0000, 0x3f00};
  const std::uint8_t u8[] = {7, 8, 9};
  DataFileHeader header;
  header.run = ExampleRun();
  header.step = 18;
  header.file = {FileKind::kAnchor, 3, 0};
  header.payload_bytes = 4099;
  header.count = 2;
  const auto header_bytes = SerializeDataFileHeader(header);
  Bytes file(8195);
  std::copy(header_bytes.begin(), header_bytes.end(), file.begin());
  std::memcpy(file.data() + 4096, bf16, sizeof(bf16));
  std::memcpy(file.data() + 8192, u8, sizeof(u8));
  const Bytes page = ExampleBytes("anchor.md", "anchor-1", file);
  ASSERT_EQ(page.size(), file.size());
  const auto parsed =
      ParseDataFileHeader("page", FileKind::kAnchor, std::span(page).first(64));
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  EXPECT_EQ(*parsed, header);

  // The plan for these two tensors is the page's layout.
  auto table =
      TensorTable::Create({{"a", DType::kBf16, {5}}, {"b", DType::kU8, {3}}});
  ASSERT_TRUE(table.ok()) << table.status();
  const auto layout = PlanAnchor(*table, {.rank = 3});
  ASSERT_TRUE(layout.ok()) << layout.status();
  ASSERT_EQ(layout->files.size(), 1u);
  EXPECT_EQ(layout->files[0].bytes, page.size());
  ASSERT_EQ(layout->slices.size(), 2u);
  EXPECT_EQ(layout->slices[0].offset, 4096u);
  EXPECT_EQ(layout->slices[1].offset, 8192u);
}

// FlatBuffers ----------------------------------------------------------------

DataFile ExampleFile(FileKind kind, std::uint64_t bytes,
                     std::vector<std::uint64_t> pieces) {
  DataFile file;
  file.id = {kind, 0, 0};
  file.bytes = bytes;
  file.piece_hashes = std::move(pieces);
  file.hash = HashOfPieces(file.piece_hashes);
  return file;
}

DeltaRecord ExampleRecord() {
  DeltaRecord record;
  record.tensor = 0;
  record.slice = {0, 12};
  record.offset = 64;
  record.bytes = 52;
  record.nnz = 4;
  record.l61 = 5;
  return record;
}

TEST(SpecExamplesTest, TensorTable) {
  const TensorTable table = ExampleTable();
  const Bytes page = ExampleBytes("tensor_table.md", "table-1", table.bytes());
  const auto parsed = TensorTable::Parse("page", page);
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  EXPECT_THAT(parsed->tensors(), testing::ElementsAreArray(table.tensors()));
  EXPECT_EQ((*parsed)[1].tied_to, 0u);
  const std::vector<std::uint64_t> l61 = {1, 1, 2};
  ExpectValues("tensor_table.md", "digest-1",
               {{"digest", ToHex(table.StateDigest(l61))}});
}

TEST(SpecExamplesTest, StepManifest) {
  const TensorTable table = ExampleTable();
  StepManifest manifest;
  manifest.run = ExampleRun();
  manifest.epoch = 3;
  manifest.step = 18;
  manifest.table_hash = table.hash();
  manifest.base = {17, Counting(0xd0)};
  manifest.digest_before =
      table.StateDigest(std::vector<std::uint64_t>{1, 1, 2});
  manifest.digest_after =
      table.StateDigest(std::vector<std::uint64_t>{6, 6, 2});
  manifest.files = {ExampleFile(FileKind::kSegment, 192, {0x1111111111111111})};
  manifest.states = {{0, 1, 6}, {1, 1, 6}};
  manifest.records = {ExampleRecord()};
  manifest.metadata_changed = true;
  manifest.metadata = {{"loss", "0.25"}};
  const auto bytes = SerializeStepManifest(manifest, table);
  ASSERT_TRUE(bytes.ok()) << bytes.status();
  const Bytes page =
      ExampleBytes("step_manifest.md", "step-manifest-1", *bytes);
  const auto parsed = ParseStepManifest("page", page);
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  ASSERT_TRUE(CheckStepManifest("page", *parsed, table).ok());
  EXPECT_EQ(parsed->base, manifest.base);
  EXPECT_EQ(parsed->metadata, manifest.metadata);
  ASSERT_EQ(parsed->states.size(), 2u);
  EXPECT_EQ(parsed->states[1].l61_after, 6u);
  ASSERT_EQ(parsed->records.size(), 1u);
  EXPECT_EQ(parsed->records[0].bytes, 52u);
  const auto again = SerializeStepManifest(*parsed, table);
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_EQ(*again, page);
}

TEST(SpecExamplesTest, AnchorManifest) {
  const TensorTable table = ExampleTable();
  AnchorManifest manifest;
  manifest.run = ExampleRun();
  manifest.epoch = 4;
  manifest.version = {18, Counting(0xc0)};
  manifest.table_hash = table.hash();
  manifest.l61 = {6, 6, 2};
  manifest.digest = table.StateDigest(manifest.l61);
  manifest.files = {ExampleFile(FileKind::kAnchor, 8196,
                                {0x1111111111111111, 0x2222222222222222})};
  manifest.slices = {{0, {0, 12}, 0, 4096}, {2, {0, 1}, 0, 8192}};
  manifest.metadata = {{"loss", "0.25"}};
  const auto bytes = SerializeAnchorManifest(manifest, table);
  ASSERT_TRUE(bytes.ok()) << bytes.status();
  const Bytes page =
      ExampleBytes("anchor_manifest.md", "anchor-manifest-1", *bytes);
  const auto parsed = ParseAnchorManifest("page", page);
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  ASSERT_TRUE(CheckAnchorManifest("page", *parsed, table).ok());
  EXPECT_EQ(parsed->version, manifest.version);
  EXPECT_EQ(parsed->l61, manifest.l61);
  ASSERT_EQ(parsed->slices.size(), 2u);
  EXPECT_EQ(parsed->slices[1].offset, 8192u);
  const auto again = SerializeAnchorManifest(*parsed, table);
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_EQ(*again, page);
}

TEST(SpecExamplesTest, RankFragment) {
  const TensorTable table = ExampleTable();
  RankFragment fragment;
  fragment.run = ExampleRun();
  fragment.epoch = 3;
  fragment.step = 18;
  fragment.attempt = 2;
  fragment.table_hash = table.hash();
  fragment.base = {17, Counting(0xd0)};
  fragment.files = {ExampleFile(FileKind::kSegment, 192, {0x1111111111111111})};
  fragment.records = {ExampleRecord()};
  fragment.owned = {{0, {0, 12}}, {2, {0, 1}}};
  const auto bytes = SerializeRankFragment(fragment, table);
  ASSERT_TRUE(bytes.ok()) << bytes.status();
  const Bytes page =
      ExampleBytes("rank_fragment.md", "rank-fragment-1", *bytes);
  const auto parsed = ParseRankFragment("page", page);
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  EXPECT_EQ(parsed->attempt, 2u);
  EXPECT_EQ(parsed->owned.size(), 2u);

  // Merged, it is the step of step_manifest.md.
  const std::vector<std::uint64_t> before = {1, 1, 2};
  const auto merged =
      MergeFragments(std::span<const RankFragment>(&*parsed, 1), table, before);
  ASSERT_TRUE(merged.ok()) << merged.status();
  StepManifest with_metadata = *merged;
  with_metadata.metadata_changed = true;
  with_metadata.metadata = {{"loss", "0.25"}};
  const auto step = SerializeStepManifest(with_metadata, table);
  ASSERT_TRUE(step.ok()) << step.status();
  EXPECT_EQ(ParseDump(BlockOf("step_manifest.md", Marker("step-manifest-1"))),
            *step);
}

// Numbers --------------------------------------------------------------------

TEST(SpecExamplesTest, L61) {
  const L61Key key = L61Key::FromSeed(1);
  const auto sum = [&](const std::string& text, std::uint64_t offset) {
    return Hex64Text(L61SumScalar(key, offset, AsBytes(text)));
  };
  ExpectValues(
      "l61.md", "l61-1",
      {{"seed_a", Hex64Text(key.seed_a)},
       {"seed_b", Hex64Text(key.seed_b)},
       {"A[0]", Hex64Text(key.A(0))},
       {"A[4095]", Hex64Text(key.A(4095))},
       {"B[0]", Hex64Text(key.B(0))},
       {"B[1]", Hex64Text(key.B(1))},
       {"W[4096]", Hex64Text(key.Weight(4096))},
       {"S of \"kedge\"", sum("kedge", 0)},
       {"part \"kedge\" at offset 16383", sum("kedge", 16383)},
       {"L of unit 3 of 2 bytes, d = 1", Hex64Text(L61OfChange(key, 3, 2, 1))},
       {"L of unit 3 of 2 bytes, d = -300",
        Hex64Text(L61OfChange(key, 3, 2, -300))}});
}

TEST(SpecExamplesTest, PieceHash) {
  const FileId file{FileKind::kSegment, 3, 1};
  ExpectValues(
      "README.md", "piece-1",
      {{"seed of run 00112233445566778899aabbccddeeff, step 18, segment, rank "
        "3, number 1, piece 2",
        Hex64Text(PieceSeed(ExampleRun(), 18, file, 2))},
       {"hash of the ASCII bytes \"kedge\" there",
        Hex64Text(HashPiece(ExampleRun(), 18, file, 2, AsBytes("kedge")))},
       {"XXH3-128 of the ASCII bytes \"kedge\"",
        ToHex(HashBytes128(AsBytes("kedge")))}});
}

TEST(SpecExamplesTest, TileGrids) {
  Seen().insert("tiles-1");
  const Table table = TableAfter("segment.md", Marker("tiles-1"));
  ASSERT_GT(table.size(), 5u);
  for (std::size_t i = 1; i < table.size(); ++i) {
    const auto& row = table[i];
    std::vector<std::uint64_t> shape;
    for (absl::string_view number :
         absl::StrSplit(absl::StripSuffix(absl::StripPrefix(row[0], "["), "]"),
                        ", ", absl::SkipEmpty())) {
      shape.emplace_back();
      ASSERT_TRUE(absl::SimpleAtoi(number, &shape.back())) << row[0];
    }
    const TileGrid grid = MakeTileGrid(shape, row[1] == "2" ? 2 : 1);
    EXPECT_EQ(row[2], absl::StrCat(grid.rows, " x ", grid.cols)) << row[0];
    EXPECT_EQ(row[3], absl::StrCat(grid.tile_rows, " x ", grid.tile_cols))
        << row[0];
    EXPECT_EQ(row[4], absl::StrCat(grid.tile_count())) << row[0];
  }
}

TEST(SpecExamplesTest, DTypes) {
  Seen().insert("dtypes-1");
  const Table table = TableAfter("tensor_table.md", Marker("dtypes-1"));
  ASSERT_EQ(table.size(), 3u);
  for (std::size_t column = 1; column <= kMaxDType; ++column) {
    const auto dtype = static_cast<DType>(column);
    ASSERT_LT(column, table[2].size());
    EXPECT_EQ(table[0][column], absl::StrCat(column));
    EXPECT_EQ(table[1][column], std::string(DTypeName(dtype)));
    EXPECT_EQ(table[2][column], absl::StrCat(ElementBytes(dtype)));
  }
}

TEST(SpecExamplesTest, Limits) {
  // By the header's text, so that a constant that is added there is missed
  // here.
  std::map<std::string, std::uint64_t> expected;
  std::ifstream in(absl::StrCat(KEDGE_SOURCE_DIR, "/format/limits.h"));
  for (std::string line; std::getline(in, line);) {
    const std::size_t equals = line.find(" = ");
    if (!absl::StartsWith(line, "inline constexpr") ||
        equals == std::string::npos) {
      continue;
    }
    const std::size_t name = line.rfind(' ', equals - 1) + 1;
    std::string value = line.substr(equals + 3);
    value = value.substr(0, value.find(';'));
    std::uint64_t base = 1;
    std::uint64_t shift = 0;
    if (const std::size_t at = value.find(" << "); at != std::string::npos) {
      ASSERT_TRUE(absl::SimpleAtoi(value.substr(at + 4), &shift)) << line;
      value = value.substr(value.find('{') + 1);
      value = value.substr(0, value.find('}'));
    }
    value.erase(std::remove(value.begin(), value.end(), '\''), value.end());
    ASSERT_TRUE(absl::SimpleAtoi(value, &base)) << line;
    expected[line.substr(name, equals - name)] = base << shift;
  }
  ASSERT_GT(expected.size(), 15u);

  std::map<std::string, std::uint64_t> found;
  const Table table = TableAfter("limits.md", "<!-- limits -->");
  for (std::size_t i = 1; i < table.size(); ++i) {
    const std::string& text = table[i][1];
    std::uint64_t value = 0;
    if (absl::StartsWith(text, "2^")) {
      ASSERT_TRUE(absl::SimpleAtoi(text.substr(2), &value)) << text;
      value = std::uint64_t{1} << value;
    } else {
      ASSERT_TRUE(absl::SimpleAtoi(text, &value)) << text;
    }
    found[table[i][0]] = value;
  }
  EXPECT_EQ(found, expected);
}

// Runs last: the examples of all pages are those that the tests looked at.
TEST(SpecExamplesZLast, EveryExampleIsCompared) {
  std::set<std::string> found;
  for (const auto& entry : std::filesystem::directory_iterator(SpecFolder())) {
    for (const std::string& line : LinesOf(entry.path().filename())) {
      absl::string_view name = line;
      if (absl::ConsumePrefix(&name, "<!-- example: ") &&
          absl::ConsumeSuffix(&name, " -->")) {
        EXPECT_TRUE(found.emplace(name).second) << line << " stands twice";
      }
    }
  }
  if (testing::GTEST_FLAG(filter) != "*") GTEST_SKIP() << "tests were filtered";
  EXPECT_EQ(found, Seen());
}

}  // namespace
}  // namespace kedge
