// Goal: the fault file system plants exactly the faults that it is told to, so
// that a test which survives them has survived something.

#include "kedge/tests/support/fault_file_system.h"

#include <cerrno>
#include <cstring>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kedge/tests/support/temp_directory.h"

namespace kedge {
namespace {

std::span<const std::byte> Bytes(absl::string_view text) {
  return std::as_bytes(std::span(text.data(), text.size()));
}

std::string Contents(const std::string& path) {
  const absl::StatusOr<std::vector<std::byte>> bytes =
      ReadFile(*PosixFileSystem(), path, 1 << 20);
  if (!bytes.ok()) return std::string(bytes.status().message());
  return std::string(reinterpret_cast<const char*>(bytes->data()),
                     bytes->size());
}

class FaultFileSystemTest : public testing::Test {
 protected:
  TempDirectory temp_;
  FaultFileSystem fs_{PosixFileSystem(), temp_.path()};
};

TEST_F(FaultFileSystemTest, CountsAndNamesEveryOperation) {
  ASSERT_TRUE(fs_.MakeDirectory(temp_.Join("d")).ok());
  ASSERT_TRUE(WriteNewFile(fs_, temp_.Join("d/a"), Bytes("hello")).ok());
  ASSERT_TRUE(fs_.Rename(temp_.Join("d/a"), temp_.Join("d/b")).ok());
  ASSERT_TRUE(ReadFile(fs_, temp_.Join("d/b"), 100).ok());
  EXPECT_EQ(fs_.LogText(),
            "1: mkdir d\n2: create d/a\n3: write d/a @0 +5\n4: fsync d/a\n"
            "5: close d/a\n6: rename d/a -> d/b\n7: open d/b\n8: size d/b\n"
            "9: read d/b @0 +5\n");
  EXPECT_EQ(fs_.operation_count(), 9);
  EXPECT_EQ(fs_.count(FileOperation::kWrite), 1);
  EXPECT_EQ(fs_.bytes_written(), 5u);
  EXPECT_EQ(fs_.bytes_read(), 5u);
  fs_.Reset();
  EXPECT_EQ(fs_.operation_count(), 0);
}

TEST_F(FaultFileSystemTest, FailsTheChosenOperationAndOnlyIt) {
  fs_.set_script(FaultAt(2, Fault::Fail(ENOSPC)));
  EXPECT_TRUE(fs_.MakeDirectory(temp_.Join("a")).ok());
  const absl::Status status = fs_.MakeDirectory(temp_.Join("b"));
  EXPECT_TRUE(absl::IsResourceExhausted(status)) << status;
  EXPECT_THAT(std::string(status.message()),
              testing::AllOf(testing::HasSubstr("ENOSPC"),
                             testing::HasSubstr("planted fault in mkdir")));
  EXPECT_TRUE(fs_.MakeDirectory(temp_.Join("c")).ok());
  EXPECT_THAT(*PosixFileSystem()->List(temp_.path()),
              testing::ElementsAre("a", "c"));
}

TEST_F(FaultFileSystemTest, StopAfterFailsAllThatFollows) {
  fs_.set_script(StopAfter(1));
  EXPECT_TRUE(fs_.MakeDirectory(temp_.Join("a")).ok());
  for (int i = 0; i < 3; ++i) {
    EXPECT_TRUE(absl::IsUnavailable(fs_.MakeDirectory(temp_.Join("b"))));
    EXPECT_TRUE(absl::IsUnavailable(fs_.RemoveDirectory(temp_.Join("a"))));
  }
  EXPECT_THAT(*PosixFileSystem()->List(temp_.path()),
              testing::ElementsAre("a"));
}

TEST_F(FaultFileSystemTest, PerformThenFailDoesTheWork) {
  ASSERT_TRUE(fs_.MakeDirectory(temp_.Join("a")).ok());
  fs_.set_script(
      FaultOn(FileOperation::kRename, "b", Fault::PerformThenFail(EIO)));
  EXPECT_TRUE(
      absl::IsUnavailable(fs_.Rename(temp_.Join("a"), temp_.Join("b"))));
  EXPECT_THAT(*PosixFileSystem()->List(temp_.path()),
              testing::ElementsAre("b"));
}

TEST_F(FaultFileSystemTest, DropReportsSuccessAndDoesNothing) {
  fs_.set_script(FaultOn(FileOperation::kWrite, "a", Fault::Drop()));
  EXPECT_TRUE(WriteNewFile(fs_, temp_.Join("a"), Bytes("hello")).ok());
  EXPECT_EQ(Contents(temp_.Join("a")), "");
  EXPECT_EQ(fs_.bytes_written(), 0u);

  fs_.set_script(FaultOn(FileOperation::kCreateExclusive, "b", Fault::Drop()));
  EXPECT_TRUE(WriteNewFile(fs_, temp_.Join("b"), Bytes("hello")).ok());
  EXPECT_TRUE(
      absl::IsNotFound(PosixFileSystem()->Stat(temp_.Join("b")).status()));
}

TEST_F(FaultFileSystemTest, ShortenMovesHalfAndWritersGoOn) {
  fs_.set_script(FaultAt(2, Fault::Shorten()));
  EXPECT_TRUE(WriteNewFile(fs_, temp_.Join("a"), Bytes("hello")).ok());
  EXPECT_EQ(fs_.log()[1].bytes, 5u);
  EXPECT_EQ(fs_.log()[2].ToString(), "3: write a @2 +3");
  EXPECT_EQ(Contents(temp_.Join("a")), "hello");

  fs_.Reset();
  fs_.set_script(FaultAt(3, Fault::Shorten()));
  const absl::StatusOr<std::vector<std::byte>> read =
      ReadFile(fs_, temp_.Join("a"), 100);
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(std::memcmp(read->data(), "hello", 5), 0);
  EXPECT_EQ(fs_.count(FileOperation::kRead), 2);
}

TEST_F(FaultFileSystemTest, TearWritesHalfAndFails) {
  const absl::StatusOr<std::unique_ptr<File>> file =
      fs_.CreateExclusive(temp_.Join("a"));
  ASSERT_TRUE(file.ok());
  fs_.set_script(FaultOn(FileOperation::kWrite, "a", Fault::Tear(EIO)));
  EXPECT_TRUE(absl::IsUnavailable(WriteAll(**file, 0, Bytes("hello!"))));
  EXPECT_EQ(Contents(temp_.Join("a")), "hel");
}

TEST_F(FaultFileSystemTest, CallbackSeesTheStoreAfterEachOperation) {
  std::vector<std::string> seen;
  fs_.set_after_each([&](const Operation& operation) {
    const absl::StatusOr<std::vector<std::string>> names =
        fs_.List(temp_.path());
    seen.push_back(operation.ToString() + ":" +
                   std::to_string(names.value().size()));
  });
  ASSERT_TRUE(fs_.MakeDirectory(temp_.Join("a")).ok());
  ASSERT_TRUE(fs_.MakeDirectory(temp_.Join("b")).ok());
  EXPECT_THAT(seen, testing::ElementsAre("1: mkdir a:1", "2: mkdir b:2"));
  EXPECT_EQ(fs_.count(FileOperation::kList), 0);
}

}  // namespace
}  // namespace kedge
