// Goal: any range of any tensor at any version, equal to the trainer's bytes;
// damage is named, and reading again costs no storage.

#include "kedge/reader/version_reader.h"

#include <sys/resource.h>

#include <random>
#include <thread>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kedge/tests/reader/published_run.h"
#include "kedge/tests/support/fault_file_system.h"

namespace kedge {
namespace {

using ::testing::HasSubstr;

class VersionReaderTest : public testing::Test {
 protected:
  VersionReaderTest() { run_.PublishUpTo(7, 3); }

  std::unique_ptr<VersionReader> Open(std::uint64_t step,
                                      std::uint64_t cache_bytes = 1 << 20) {
    auto store = Store::Open(&faults_, run_.path());
    EXPECT_TRUE(store.ok());
    store_ = *std::move(store);
    const auto published = store_->ReadStep(step);
    EXPECT_TRUE(published.ok()) << published.status();
    auto reader = VersionReader::Open(store_.get(), *published, cache_bytes);
    EXPECT_TRUE(reader.ok()) << reader.status();
    return reader.ok() ? *std::move(reader) : nullptr;
  }

  PublishedRun run_;
  FaultFileSystem faults_;
  std::unique_ptr<Store> store_;
};

TEST_F(VersionReaderTest, WholeTensorsOfEveryVersionAreTheTrainers) {
  for (std::uint64_t step = 0; step <= 7; ++step) {
    const auto reader = Open(step);
    ASSERT_NE(reader, nullptr);
    EXPECT_EQ(reader->state().id, run_.id(step));
    for (std::uint32_t t = 0; t < reader->table().size(); ++t) {
      const TensorSpec& spec = reader->table()[t];
      std::vector<std::byte> bytes(spec.byte_count());
      ASSERT_TRUE(reader->Read(t, 0, bytes).ok()) << spec.name;
      EXPECT_EQ(bytes, run_.at(step).at(spec.name))
          << spec.name << " v" << step;
    }
  }
}

TEST_F(VersionReaderTest, RandomRangesAreTheTrainersFromSeveralThreads) {
  const auto reader = Open(5, /*cache_bytes=*/1);  // evicts all the time
  ASSERT_NE(reader, nullptr);
  std::vector<std::thread> threads;
  for (std::uint64_t seed = 0; seed < 3; ++seed) {
    threads.emplace_back([&, seed] {
      std::mt19937_64 random(seed);
      for (int i = 0; i < 300; ++i) {
        const auto t =
            static_cast<std::uint32_t>(random() % reader->table().size());
        const TensorSpec& spec = reader->table()[t];
        const std::uint64_t unit = UnitBytes(spec.dtype);
        const std::uint64_t units = spec.byte_count() / unit;
        if (units == 0) continue;
        const std::uint64_t begin = random() % units;
        const std::uint64_t count = random() % (units - begin + 1);
        std::vector<std::byte> bytes(count * unit);
        ASSERT_TRUE(reader->Read(t, begin * unit, bytes).ok());
        const std::byte* expected =
            run_.at(5).at(spec.name).data() + begin * unit;
        ASSERT_TRUE(std::equal(bytes.begin(), bytes.end(), expected))
            << spec.name << " seed " << seed << " round " << i;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST_F(VersionReaderTest, WhatIsCachedIsNotReadAgain) {
  const auto reader = Open(7, 64 << 20);
  const std::uint32_t t = *reader->table().Find("mlp.up.weight");
  std::vector<std::byte> bytes(reader->table()[t].byte_count());
  ASSERT_TRUE(reader->Read(t, 0, bytes).ok());
  faults_.Reset();
  for (std::uint64_t at = 0; at + 2 <= bytes.size(); at += 4096) {
    std::vector<std::byte> part(2);
    ASSERT_TRUE(reader->Read(t, at, part).ok());
  }
  EXPECT_EQ(faults_.operation_count(), 0);
}

TEST_F(VersionReaderTest, RangesOutsideOrOfPartsOfUnitsAreRefused) {
  const auto reader = Open(7);
  const std::uint32_t t = *reader->table().Find("norm.weight");  // 514 bytes
  std::vector<std::byte> bytes(4);
  EXPECT_TRUE(absl::IsInvalidArgument(reader->Read(t, 1, bytes)));
  EXPECT_TRUE(absl::IsInvalidArgument(reader->Read(t, 512, bytes)));
  EXPECT_TRUE(absl::IsInvalidArgument(reader->Read(t, 1000, bytes)));
  EXPECT_TRUE(absl::IsInvalidArgument(reader->Read(999, 0, bytes)));
  EXPECT_TRUE(
      absl::IsInvalidArgument(reader->Read(t, 0, std::span(bytes).first(3))));
  EXPECT_TRUE(reader->Read(t, 510, bytes).ok());
}

// Report: one bad byte in the newest anchor kept operators from every version
// after it, though an older anchor led there.
TEST_F(VersionReaderTest, ADamagedAnchorIsPassedOverForAnOlderOne) {
  for (const std::uint64_t damaged : {6, 3}) {
    for (const std::string& file : DataFilesOf(run_.AnchorPath(damaged))) {
      FlipByte(file, 4096);
    }
    const auto reader = Open(7);
    ASSERT_NE(reader, nullptr);
    for (std::uint32_t t = 0; t < reader->table().size(); ++t) {
      const TensorSpec& spec = reader->table()[t];
      std::vector<std::byte> bytes(spec.byte_count());
      const absl::Status status = reader->Read(t, 0, bytes);
      ASSERT_TRUE(status.ok()) << status;
      EXPECT_EQ(bytes, run_.at(7).at(spec.name)) << spec.name;
    }
  }
}

TEST_F(VersionReaderTest, ALongChainNeedsFewOpenFiles) {
  run_.PublishUpTo(150, 1000);
  rlimit before;
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  rlimit few = before;
  few.rlim_cur = 100;
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &few), 0);
  const auto reader = Open(150);
  EXPECT_NE(reader, nullptr);
  for (std::uint32_t t = 0; reader && t < reader->table().size(); ++t) {
    const TensorSpec& spec = reader->table()[t];
    std::vector<std::byte> bytes(spec.byte_count());
    const absl::Status status = reader->Read(t, 0, bytes);
    EXPECT_TRUE(status.ok()) << status;
    EXPECT_EQ(bytes, run_.at(150).at(spec.name)) << spec.name;
  }
  EXPECT_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);
}

TEST_F(VersionReaderTest, DamageIsNamedByFileAndPiece) {
  for (const std::uint64_t step : {0, 3, 6}) {
    for (const std::string& file : DataFilesOf(run_.AnchorPath(step))) {
      FlipByte(file, 4096);
    }
  }
  const auto reader = Open(7);
  ASSERT_NE(reader, nullptr);
  int failures = 0;
  for (std::uint32_t t = 0; t < reader->table().size(); ++t) {
    std::vector<std::byte> bytes(reader->table()[t].byte_count());
    const absl::Status status = reader->Read(t, 0, bytes);
    if (status.ok()) continue;
    ++failures;
    EXPECT_TRUE(absl::IsDataLoss(status));
    EXPECT_THAT(std::string(status.message()), HasSubstr("hash of piece 0"));
    EXPECT_THAT(std::string(status.message()), HasSubstr("anchor-r000-"));
  }
  EXPECT_GT(failures, 0);
}

}  // namespace
}  // namespace kedge
