// Goal: a piece that is damaged, cut short, or intact in the wrong place is
// refused, and one that is right is read with one system call.

#include "kedge/engine/io/piece_io.h"

#include <algorithm>
#include <cerrno>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kedge/format/status.h"
#include "kedge/tests/support/fault_file_system.h"
#include "kedge/tests/support/temp_directory.h"

namespace kedge {
namespace {

using testing::HasSubstr;

class PieceIoTest : public testing::Test {
 protected:
  void SetUp() override {
    key_.run.bytes[3] = 7;
    key_.step = 19;
    key_.file = {FileKind::kAnchor, 3, 2};
    key_.piece = 5;
    for (std::size_t i = 0; i < bytes_.size(); ++i) {
      bytes_[i] = std::byte(i * 31 % 251);
    }
    file_ = fs_.CreateExclusive(temp_.Join("file")).value();
    hash_ = WritePiece(*file_, 4096, bytes_, key_).value();
  }

  absl::Status ReadBack(const PieceKey& key) {
    std::vector<std::byte> out(bytes_.size());
    const absl::Status status = ReadPiece(*file_, 4096, hash_, key, out);
    if (status.ok()) {
      EXPECT_EQ(out, bytes_);
    }
    return status;
  }

  TempDirectory temp_;
  FaultFileSystem fs_{PosixFileSystem(), temp_.path()};
  PieceKey key_;
  std::vector<std::byte> bytes_ = std::vector<std::byte>(20'000);
  std::unique_ptr<File> file_;
  std::uint64_t hash_ = 0;
};

TEST_F(PieceIoTest, WritesTheBytesAndReturnsTheirPieceHash) {
  EXPECT_EQ(hash_,
            HashPiece(key_.run, key_.step, key_.file, key_.piece, bytes_));
  EXPECT_TRUE(ReadBack(key_).ok());
  EXPECT_EQ(fs_.count(FileOperation::kWrite), 1);
  EXPECT_EQ(fs_.count(FileOperation::kRead), 1);
  EXPECT_EQ(fs_.bytes_read(), bytes_.size());
}

TEST_F(PieceIoTest, HashInBlocksIsThePieceHash) {
  std::vector<std::byte> bytes(3 * kHashBlockBytes + 7);
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    bytes[i] = std::byte(i * i * 17 % 253);
  }
  for (const std::size_t size :
       {std::size_t{0}, std::size_t{1}, std::size_t{240}, std::size_t{241},
        std::size_t{1024}, kHashBlockBytes - 1, kHashBlockBytes,
        kHashBlockBytes + 1, 2 * kHashBlockBytes, bytes.size()}) {
    const std::span<const std::byte> part = std::span(bytes).first(size);
    const std::uint64_t expected =
        HashPiece(key_.run, key_.step, key_.file, key_.piece, part);
    const absl::StatusOr<std::uint64_t> written =
        WritePiece(*file_, 1'000'000, part, key_);
    ASSERT_TRUE(written.ok()) << written.status();
    EXPECT_EQ(*written, expected) << size;
    std::vector<std::byte> out(size);
    EXPECT_TRUE(ReadPiece(*file_, 1'000'000, expected, key_, out).ok()) << size;
    EXPECT_TRUE(std::equal(out.begin(), out.end(), part.begin())) << size;
    EXPECT_TRUE(CheckPiece("file", 0, expected, key_, part).ok()) << size;
  }
}

TEST_F(PieceIoTest, ShortWritesAndReadsAreCompleted) {
  fs_.set_script(FaultAt(3, Fault::Shorten()));
  EXPECT_TRUE(ReadBack(key_).ok());
  EXPECT_EQ(fs_.count(FileOperation::kRead), 2);
}

TEST_F(PieceIoTest, FlippedBitIsRefusedAndNamesFileOffsetAndHashes) {
  const std::byte wrong = bytes_[777] ^ std::byte{4};
  ASSERT_TRUE(WriteAll(*file_, 4096 + 777, std::span(&wrong, 1)).ok());
  const absl::Status status = ReadBack(key_);
  EXPECT_TRUE(absl::IsDataLoss(status)) << status;
  EXPECT_THAT(
      std::string(status.message()),
      testing::AllOf(HasSubstr("/file: offset 4096"), HasSubstr("piece 5"),
                     HasSubstr(Hex64(hash_)), HasSubstr("kedge fsck")));
}

TEST_F(PieceIoTest, IntactPieceInTheWrongPlaceIsRefused) {
  PieceKey other = key_;
  other.run.bytes[0] = 1;
  EXPECT_TRUE(absl::IsDataLoss(ReadBack(other)));
  other = key_;
  other.step = 18;
  EXPECT_TRUE(absl::IsDataLoss(ReadBack(other)));
  other = key_;
  other.file.number = 1;
  EXPECT_TRUE(absl::IsDataLoss(ReadBack(other)));
  other = key_;
  other.piece = 4;
  EXPECT_TRUE(absl::IsDataLoss(ReadBack(other)));
}

TEST_F(PieceIoTest, FileThatEndsInsideThePieceIsRefused) {
  ASSERT_TRUE(file_->Resize(4096 + 100).ok());
  const absl::Status status = ReadBack(key_);
  EXPECT_TRUE(absl::IsDataLoss(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("too short"));
}

TEST_F(PieceIoTest, DroppedWriteIsFoundByTheHash) {
  fs_.Reset();
  fs_.set_script(FaultOn(FileOperation::kWrite, "file", Fault::Drop()));
  ASSERT_TRUE(WritePiece(*file_, 100'000, bytes_, key_).ok());
  std::vector<std::byte> out(bytes_.size());
  EXPECT_TRUE(absl::IsDataLoss(ReadPiece(*file_, 100'000, hash_, key_, out)));
}

}  // namespace
}  // namespace kedge
