// Goal: the fixed-size files of a store come back as written, and not one wrong
// bit of them passes. Method: round trips, every single bit flipped, every
// length, and each field out of range behind a hash that is right.

#include "kedge/format/fixed_files.h"

#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kedge/format/limits.h"

namespace kedge {
namespace {

using Bytes = std::vector<std::byte>;
using Parse = std::function<absl::Status(std::span<const std::byte>)>;

template <std::size_t kSize>
Bytes ToVector(const std::array<std::byte, kSize>& bytes) {
  return {bytes.begin(), bytes.end()};
}

RunId MakeRun(std::uint8_t first) {
  RunId run;
  for (std::uint8_t i = 0; i < 16; ++i) run.bytes[i] = first + i;
  return run;
}

CommitRecord MakeCommit() {
  return {MakeRun(0x10), 18, 2, 4096, MakeRun(0xa0)};
}
Head MakeHead() { return {MakeRun(0x10), 18, 2, MakeRun(0xa0)}; }
StoreInfo MakeStore() {
  return {MakeRun(0x10),
          0x1122334455667788,
          CommitMode::kRenameDirectory,
          /*external_v0=*/false,
          MakeRun(0xa0),
          MakeRun(0xc0),
          1790000000};
}
EpochInfo MakeEpoch() { return {MakeRun(0x10), 18, 3, MakeRun(0xa0)}; }
LeaseRecord MakeLease() {
  return {MakeRun(0x10), 17, true, 18, MakeRun(0xa0), 5, "engine-3.tp-0"};
}
DataFileHeader MakeHeader(FileKind kind) {
  return {MakeRun(0x10), 18, {kind, 3, 1}, 4096, 7};
}

struct Kind {
  std::string name;
  Bytes bytes;
  Parse parse;
};

std::vector<Kind> AllKinds() {
  std::vector<Kind> kinds;
  kinds.push_back({"COMMIT", ToVector(SerializeCommit(MakeCommit())),
                   [](auto b) { return ParseCommit("COMMIT", b).status(); }});
  kinds.push_back({"HEAD", ToVector(SerializeHead(MakeHead())),
                   [](auto b) { return ParseHead("HEAD", b).status(); }});
  kinds.push_back({"STORE", ToVector(SerializeStore(MakeStore())),
                   [](auto b) { return ParseStore("STORE", b).status(); }});
  kinds.push_back({"epoch", ToVector(SerializeEpoch(MakeEpoch())),
                   [](auto b) { return ParseEpoch("epoch", b).status(); }});
  kinds.push_back({"lease", ToVector(SerializeLease(MakeLease())),
                   [](auto b) { return ParseLease("lease", b).status(); }});
  for (const FileKind kind : {FileKind::kSegment, FileKind::kAnchor}) {
    kinds.push_back({kind == FileKind::kSegment ? "segment" : "anchor",
                     ToVector(SerializeDataFileHeader(MakeHeader(kind))),
                     [kind](auto b) {
                       return ParseDataFileHeader("data", kind, b).status();
                     }});
  }
  return kinds;
}

void Rehash(Bytes& bytes) {
  const std::uint64_t hash =
      HashBytes64(std::span(bytes).first(bytes.size() - 8));
  std::memcpy(bytes.data() + bytes.size() - 8, &hash, 8);
}

template <class T>
Bytes With(Bytes bytes, std::size_t offset, T value) {
  std::memcpy(bytes.data() + offset, &value, sizeof(value));
  Rehash(bytes);
  return bytes;
}

void ExpectSays(const absl::Status& status, absl::StatusCode code,
                const std::string& text) {
  EXPECT_EQ(status.code(), code) << status;
  EXPECT_NE(std::string(status.message()).find(text), std::string::npos)
      << "expected \"" << text << "\" in " << status;
}

TEST(FixedFilesTest, FieldsComeBack) {
  EXPECT_EQ(*ParseCommit("", SerializeCommit(MakeCommit())), MakeCommit());
  EXPECT_EQ(*ParseHead("", SerializeHead(MakeHead())), MakeHead());
  EXPECT_EQ(*ParseStore("", SerializeStore(MakeStore())), MakeStore());
  EXPECT_EQ(*ParseEpoch("", SerializeEpoch(MakeEpoch())), MakeEpoch());
  EXPECT_EQ(*ParseLease("", SerializeLease(MakeLease())), MakeLease());
  LeaseRecord joining = MakeLease();
  joining.holds = false;
  joining.held_step = 0;
  joining.held_manifest_hash = {};
  joining.reader = std::string(kMaxReaderIdBytes, 'x');
  EXPECT_EQ(*ParseLease("", SerializeLease(joining)), joining);
  for (const FileKind kind : {FileKind::kSegment, FileKind::kAnchor}) {
    EXPECT_EQ(*ParseDataFileHeader("", kind,
                                   SerializeDataFileHeader(MakeHeader(kind))),
              MakeHeader(kind));
  }
}

TEST(FixedFilesTest, CommitHasItsFieldsAtTheStatedOffsets) {
  const auto bytes = SerializeCommit(MakeCommit());
  EXPECT_EQ(std::memcmp(bytes.data(), "KDCM", 4), 0);
  EXPECT_EQ(bytes[4], std::byte{1});
  EXPECT_EQ(bytes[6], std::byte{1});
  EXPECT_EQ(bytes[8], std::byte{0x10});
  EXPECT_EQ(bytes[24], std::byte{18});
  EXPECT_EQ(bytes[32], std::byte{2});
  EXPECT_EQ(bytes[37], std::byte{0x10});  // 4096
  EXPECT_EQ(bytes[40], std::byte{0xa0});
}

TEST(FixedFilesTest, DataFileHeaderHasItsFieldsAtTheStatedOffsets) {
  const auto bytes = SerializeDataFileHeader(MakeHeader(FileKind::kSegment));
  EXPECT_EQ(std::memcmp(bytes.data(), "KDSG", 4), 0);
  EXPECT_EQ(bytes[24], std::byte{18});
  EXPECT_EQ(bytes[32], std::byte{3});
  EXPECT_EQ(bytes[36], std::byte{1});
  EXPECT_EQ(bytes[41], std::byte{0x10});
  EXPECT_EQ(bytes[48], std::byte{7});
}

TEST(FixedFilesTest, EveryFlippedBitIsRejected) {
  for (const Kind& kind : AllKinds()) {
    ASSERT_TRUE(kind.parse(kind.bytes).ok()) << kind.name;
    Bytes bytes = kind.bytes;
    for (std::size_t bit = 0; bit < 8 * bytes.size(); ++bit) {
      bytes[bit / 8] ^= std::byte{1} << bit % 8;
      EXPECT_EQ(kind.parse(bytes).code(), absl::StatusCode::kDataLoss)
          << kind.name << " bit " << bit;
      bytes[bit / 8] = kind.bytes[bit / 8];
    }
  }
}

TEST(FixedFilesTest, EveryOtherLengthIsRejected) {
  for (const Kind& kind : AllKinds()) {
    for (std::size_t size = 0; size <= kind.bytes.size() + 64; ++size) {
      if (size == kind.bytes.size()) continue;
      Bytes bytes = kind.bytes;
      bytes.resize(size);
      ExpectSays(kind.parse(bytes), absl::StatusCode::kDataLoss, "size");
    }
  }
}

TEST(FixedFilesTest, OneKindIsNotAnother) {
  const auto kinds = AllKinds();
  for (const Kind& bytes_of : kinds) {
    for (const Kind& parse_of : kinds) {
      if (bytes_of.name == parse_of.name) continue;
      EXPECT_EQ(parse_of.parse(bytes_of.bytes).code(),
                absl::StatusCode::kDataLoss);
    }
  }
}

TEST(FixedFilesTest, NewerFormatIsUnimplementedAndZeroIsDataLoss) {
  for (const Kind& kind : AllKinds()) {
    ExpectSays(kind.parse(With<std::uint16_t>(kind.bytes, 4, 2)),
               absl::StatusCode::kUnimplemented, "min_reader");
    ExpectSays(kind.parse(With<std::uint16_t>(kind.bytes, 4, 0)),
               absl::StatusCode::kDataLoss, "min_reader");
    // Who wrote it is for messages alone.
    EXPECT_TRUE(kind.parse(With<std::uint16_t>(kind.bytes, 6, 9)).ok());
  }
}

TEST(FixedFilesTest, FieldsOutOfRangeAreRejectedByName) {
  const auto kinds = AllKinds();
  const auto expect = [&](const char* name, std::size_t offset, auto value,
                          const std::string& text) {
    for (const Kind& kind : kinds) {
      if (kind.name != name) continue;
      ExpectSays(kind.parse(With(kind.bytes, offset, value)),
                 absl::StatusCode::kDataLoss, text);
    }
  };
  using u32 = std::uint32_t;
  using u64 = std::uint64_t;
  for (const char* name : {"COMMIT", "HEAD", "segment", "anchor"}) {
    expect(name, 24, u64{kMaxStep + 1}, "step");
  }
  for (const char* name : {"COMMIT", "HEAD", "epoch"}) {
    expect(name, 32, u32{0}, "epoch");  // epoch 0 is of step 0 alone
    expect(name, 32, u32{kMaxEpoch + 1}, "epoch");
  }
  expect("COMMIT", 36, u32{0}, "manifest length");
  expect("COMMIT", 36, u32{kMaxFlatBufferBytes + 1}, "manifest length");
  expect("HEAD", 36, u32{1}, "reserved");
  expect("STORE", 32, u32{2}, "commit mode");
  expect("STORE", 36, u32{2}, "external v0");
  expect("STORE", 80, u64{1} << 63, "offset 87: reserved");
  expect("epoch", 24, u64{kMaxStep + 1}, "resume step");
  expect("epoch", 36, u32{1}, "reserved");
  expect("lease", 24, u64{kMaxStep + 1}, "oldest step");
  expect("lease", 32, u32{2}, "holds");
  expect("lease", 32, u32{0}, "offset 40: reserved");  // holds nothing, yet v18
  expect("lease", 36, u32{0}, "length of the reader id");
  expect("lease", 36, u32{65}, "length of the reader id");
  expect("lease", 36, u32{12}, "offset 84: reserved");
  expect("lease", 36, u32{14}, "reader id");
  expect("lease", 56, u64{kMaxStep + 1}, "held step");
  expect("lease", 64, u64{0}, "counter");
  expect("lease", 64, kMaxLeaseCounter + 1, "counter");
  expect("lease", 72, '.', "reader id");
  expect("lease", 73, '/', "reader id");
  expect("lease", 73, '\0', "reader id");
  expect("lease", 135, 'x', "offset 135: reserved");
  for (const char* name : {"segment", "anchor"}) {
    expect(name, 32, u32{kMaxRanks}, "rank");
    expect(name, 36, u32{kMaxFilesPerRank}, "number");
    expect(name, 40, u64{kMaxFileBytes + 8}, "payload_bytes");
    expect(name, 40, u64{0}, "count");
    expect(name, 48, u32{0}, "count");
    expect(name, 48, u32{4097}, "count");
    expect(name, 52, u32{1}, "reserved");
  }
  expect("segment", 40, u64{4097}, "a multiple of 8");
}

TEST(FixedFilesTest, StepZeroIsOfEpochZeroOrOfALaterAnchor) {
  CommitRecord commit = MakeCommit();
  commit.step = 0;
  for (const std::uint32_t epoch : {0u, 5u}) {
    commit.epoch = epoch;
    EXPECT_TRUE(ParseCommit("", SerializeCommit(commit)).ok());
  }
}

TEST(FixedFilesTest, ReaderIdsAreFileNamesThatNothingElseHas) {
  for (const char* id : {"a", "Engine_3.tp-0", "-", "_", "0"}) {
    EXPECT_TRUE(IsReaderId(id)) << id;
  }
  // ".nfs..." is what a network file system calls a file that is still open.
  for (const char* id :
       {"", ".", "..", ".nfs0001", "a/b", "a b", "a~b", "a\n", "\xc3\xa4"}) {
    EXPECT_FALSE(IsReaderId(id)) << id;
  }
  EXPECT_TRUE(IsReaderId(std::string(64, 'a')));
  EXPECT_FALSE(IsReaderId(std::string(65, 'a')));
  EXPECT_FALSE(IsReaderId(absl::string_view("a\0b", 3)));
}

TEST(FixedFilesTest, EmptyDataFileIsValid) {
  DataFileHeader header = MakeHeader(FileKind::kSegment);
  header.payload_bytes = 0;
  header.count = 0;
  EXPECT_TRUE(ParseDataFileHeader("", FileKind::kSegment,
                                  SerializeDataFileHeader(header))
                  .ok());
}

TEST(FixedFilesTest, MessageNamesPathOffsetExpectedFoundAndAdvice) {
  auto bytes = ToVector(SerializeCommit(MakeCommit()));
  bytes[24] = std::byte{19};
  const absl::Status status =
      ParseCommit("step_00000018/COMMIT", bytes).status();
  for (const char* part : {"step_00000018/COMMIT: offset 56: hash: expected 0x",
                           "found 0x", "run `kedge fsck`"}) {
    ExpectSays(status, absl::StatusCode::kDataLoss, part);
  }
}

TEST(FixedFilesTest, SegmentSizeIsAlignedWithATail) {
  EXPECT_EQ(SegmentFileBytes(0), 128u);
  EXPECT_EQ(SegmentFileBytes(32), 128u);
  EXPECT_EQ(SegmentFileBytes(40), 192u);
  for (std::uint64_t payload = 0; payload < 1000; payload += 8) {
    const std::uint64_t bytes = SegmentFileBytes(payload);
    EXPECT_EQ(bytes % kSegmentAlignment, 0u);
    EXPECT_GE(bytes - payload, kDataFileHeaderBytes + kSegmentTailBytes);
    EXPECT_LT(bytes - payload,
              kDataFileHeaderBytes + kSegmentTailBytes + kSegmentAlignment);
  }
}

TEST(FixedFilesTest, RandomIdsDiffer) {
  EXPECT_NE(RandomRunId(), RandomRunId());
  EXPECT_NE(RandomSeed(), RandomSeed());
}

}  // namespace
}  // namespace kedge
