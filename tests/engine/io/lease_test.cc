// Goal: a lease says what its reader needs, whole at every moment, and nothing
// that is no lease is taken for one. Method: real files in a temporary
// directory, each operation of a write failing in turn, and files that others
// could have put there.

#include "kedge/engine/io/lease.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <limits>
#include <thread>

#include "absl/strings/str_cat.h"
#include "kedge/format/layout.h"
#include "kedge/format/limits.h"
#include "kedge/tests/support/fault_file_system.h"
#include "kedge/tests/support/temp_directory.h"

namespace kedge {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

RunId MakeRun(std::uint8_t first = 0x10) {
  RunId run;
  for (std::uint8_t i = 0; i < 16; ++i) run.bytes[i] = first + i;
  return run;
}

VersionId Version(std::uint64_t step) { return {step, MakeRun(0xa0)}; }

std::string Text(const absl::Status& status) { return status.ToString(); }

class LeaseTest : public ::testing::Test {
 protected:
  std::unique_ptr<Lease> Make(const std::string& id, FileSystem* fs = nullptr) {
    auto lease = Lease::Create(fs != nullptr ? fs : PosixFileSystem(),
                               temp_.path(), id, MakeRun());
    EXPECT_TRUE(lease.ok()) << lease.status();
    return lease.ok() ? *std::move(lease) : nullptr;
  }
  LeaseListing Read() {
    auto listing = ReadLeases(*PosixFileSystem(), temp_.path(), MakeRun());
    EXPECT_TRUE(listing.ok()) << listing.status();
    return listing.ok() ? *listing : LeaseListing();
  }
  std::string LeasePath(const std::string& name) {
    return temp_.Join(absl::StrCat(kLeasesDirectoryName, "/", name));
  }
  void Put(const std::string& name, std::span<const std::byte> bytes) {
    EXPECT_TRUE(
        EnsureDirectory(*PosixFileSystem(), temp_.Join(kLeasesDirectoryName))
            .ok());
    PosixFileSystem()->RemoveFile(LeasePath(name)).IgnoreError();
    EXPECT_TRUE(WriteNewFile(*PosixFileSystem(), LeasePath(name), bytes).ok());
  }
  static LeaseRecord Record(const std::string& reader) {
    LeaseRecord lease;
    lease.run = MakeRun();
    lease.oldest_step = 3;
    lease.counter = 1;
    lease.reader = reader;
    return lease;
  }

  TempDirectory temp_;
};

TEST_F(LeaseTest, SaysWhatWasSetAndCountsWrites) {
  const auto lease = Make("engine-1");
  EXPECT_THAT(Read().leases, IsEmpty());  // nothing before the first Set
  ASSERT_TRUE(lease->Set(17, std::nullopt).ok());
  LeaseListing listing = Read();
  ASSERT_EQ(listing.leases.size(), 1u);
  EXPECT_EQ(listing.leases[0].name, "engine-1");
  ASSERT_TRUE(listing.leases[0].info) << listing.leases[0].status;
  EXPECT_EQ(listing.leases[0].info->reader, "engine-1");
  EXPECT_EQ(listing.leases[0].info->oldest_step, 17u);
  EXPECT_EQ(listing.leases[0].info->held, std::nullopt);
  EXPECT_EQ(listing.leases[0].info->counter, 1u);
  EXPECT_GT(listing.leases[0].modified_ns, 0);
  ASSERT_TRUE(lease->Set(18, Version(18)).ok());
  ASSERT_TRUE(lease->Renew().ok());
  listing = Read();
  ASSERT_TRUE(listing.leases.at(0).info);
  EXPECT_EQ(listing.leases[0].info->oldest_step, 18u);
  EXPECT_EQ(listing.leases[0].info->held, Version(18));
  EXPECT_EQ(listing.leases[0].info->counter, 3u);
  EXPECT_THAT(listing.temporaries, IsEmpty());
  ASSERT_TRUE(lease->Remove().ok());
  EXPECT_THAT(Read().leases, IsEmpty());
  EXPECT_TRUE(lease->Remove().ok());  // gone already
  ASSERT_TRUE(lease->Set(19, Version(19)).ok());
  EXPECT_EQ(Read().leases.size(), 1u);
}

TEST_F(LeaseTest, RenewBeforeSetAndStepsBeyondTheLimitAreRefused) {
  const auto lease = Make("r");
  EXPECT_EQ(lease->Renew().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(lease->Set(kMaxStep + 1, std::nullopt).code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(lease->Set(0, Version(kMaxStep + 1)).code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(Read().leases, IsEmpty());
}

TEST_F(LeaseTest, NamesThatAreNoReaderIdAreRefused) {
  for (const char* id : {"", "..", "../x", ".hidden", "a~0123456789abcdef"}) {
    const auto lease =
        Lease::Create(PosixFileSystem(), temp_.path(), id, MakeRun());
    EXPECT_EQ(lease.status().code(), absl::StatusCode::kInvalidArgument) << id;
    EXPECT_THAT(Text(lease.status()), HasSubstr("reader id"));
  }
}

TEST_F(LeaseTest, RestartedReaderGoesOnFromItsCounter) {
  ASSERT_TRUE(Make("r")->Set(5, Version(5)).ok());
  const auto again = Make("r");
  ASSERT_TRUE(again->Set(6, Version(6)).ok());
  EXPECT_EQ(Read().leases.at(0).info->counter, 2u);
}

TEST_F(LeaseTest, SecondProcessWithTheSameIdIsNoticed) {
  const auto one = Make("r");
  ASSERT_TRUE(one->Set(5, Version(5)).ok());
  const auto two = Make("r");
  ASSERT_TRUE(two->Set(9, Version(9)).ok());
  const absl::Status status = one->Renew();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(Text(status), HasSubstr("leases/r: counter: expected 1, found 2: "
                                      "another process writes this lease"));
  // The lease of the other one stands, also when the first one goes.
  EXPECT_TRUE(one->Remove().ok());
  EXPECT_EQ(Read().leases.at(0).info->oldest_step, 9u);
  EXPECT_TRUE(two->Renew().ok());
}

TEST_F(LeaseTest, LeaseThatGcTookAwayIsWrittenAgain) {
  const auto lease = Make("r");
  ASSERT_TRUE(lease->Set(5, Version(5)).ok());
  ASSERT_TRUE(PosixFileSystem()->RemoveFile(LeasePath("r")).ok());
  ASSERT_TRUE(lease->Renew().ok());
  EXPECT_EQ(Read().leases.at(0).info->counter, 2u);
}

TEST_F(LeaseTest, DamagedOrForeignLeaseOfOnesOwnIdIsReplaced) {
  auto bytes = SerializeLease(Record("r"));
  bytes[30] ^= std::byte{1};
  Put("r", bytes);
  ASSERT_TRUE(Make("r")->Set(5, std::nullopt).ok());
  EXPECT_EQ(Read().leases.at(0).info->oldest_step, 5u);
  LeaseRecord other = Record("r");
  other.run = MakeRun(0x77);
  other.counter = 9;
  Put("r", SerializeLease(other));
  ASSERT_TRUE(Make("r")->Set(6, std::nullopt).ok());
  EXPECT_EQ(Read().leases.at(0).info->oldest_step, 6u);
}

TEST_F(LeaseTest, WhatCannotBeBelievedIsListedWithTheReason) {
  auto damaged = SerializeLease(Record("damaged"));
  damaged[24] ^= std::byte{1};
  Put("damaged", damaged);
  Put("empty", {});
  LeaseRecord foreign = Record("foreign");
  foreign.run = MakeRun(0x77);
  Put("foreign", SerializeLease(foreign));
  auto newer = SerializeLease(Record("newer"));
  newer[4] = std::byte{9};
  const std::uint64_t hash =
      HashBytes64(std::span<const std::byte>(newer).first(136));
  std::memcpy(newer.data() + 136, &hash, 8);
  Put("newer", newer);
  Put("renamed", SerializeLease(Record("somebody-else")));
  ASSERT_EQ(symlink("renamed", LeasePath("zlink").c_str()), 0);
  ASSERT_TRUE(PosixFileSystem()->MakeDirectory(LeasePath("zzdir")).ok());

  const LeaseListing listing = Read();
  std::vector<std::string> seen;
  for (const LeaseEntry& entry : listing.leases) {
    EXPECT_FALSE(entry.info) << entry.name;
    EXPECT_THAT(Text(entry.status), HasSubstr("leases/")) << entry.name;
    seen.push_back(absl::StrCat(entry.name, " ",
                                absl::StatusCodeToString(entry.status.code())));
  }
  EXPECT_THAT(seen, ElementsAre("damaged DATA_LOSS", "empty DATA_LOSS",
                                "foreign FAILED_PRECONDITION",
                                "newer UNIMPLEMENTED", "renamed DATA_LOSS",
                                "zlink DATA_LOSS", "zzdir DATA_LOSS"));
  EXPECT_THAT(Text(listing.leases[2].status), HasSubstr("another run"));
}

TEST_F(LeaseTest, TemporariesAndOtherNamesAreNoLeases) {
  ASSERT_TRUE(Make("r")->Set(1, std::nullopt).ok());
  Put("gone~0123456789abcdef", {});
  Put("r~fedcba9876543210", {});
  Put(".nfs00001", {});
  Put("a b", {});
  Put("r~short", {});
  const LeaseListing listing = Read();
  ASSERT_EQ(listing.leases.size(), 1u);
  EXPECT_EQ(listing.leases[0].name, "r");
  ASSERT_EQ(listing.temporaries.size(), 2u);
  EXPECT_EQ(listing.temporaries[0].name, "gone~0123456789abcdef");
  EXPECT_EQ(ReaderOfLeaseTemporary("r~fedcba9876543210"), "r");
  EXPECT_EQ(ReaderOfLeaseTemporary("r~FEDCBA9876543210"), std::nullopt);
  EXPECT_EQ(ReaderOfLeaseTemporary("r"), std::nullopt);
}

TEST_F(LeaseTest, StoreWithoutTheDirectoryHasNone) {
  EXPECT_THAT(Read().leases, IsEmpty());
  FaultFileSystem fs(PosixFileSystem(), temp_.path());
  fs.set_script(FaultOn(FileOperation::kList, "leases", Fault::Fail(EIO)));
  EXPECT_EQ(ReadLeases(fs, temp_.path(), MakeRun()).status().code(),
            absl::StatusCode::kUnavailable);
}

// Report 53: a file that is replaced by rename gives ESTALE to other clients.
TEST_F(LeaseTest, StaleHandleOfAReplacedLeaseIsAskedForAgain) {
  ASSERT_TRUE(Make("r")->Set(4, std::nullopt).ok());
  FaultFileSystem fs(PosixFileSystem(), temp_.path());
  int left = 2;
  fs.set_script([&](const Operation& operation) {
    return operation.kind == FileOperation::kRead && left-- > 0
               ? Fault::Fail(ESTALE)
               : Fault::None();
  });
  const auto listing = ReadLeases(fs, temp_.path(), MakeRun());
  ASSERT_TRUE(listing.ok());
  ASSERT_TRUE(listing->leases.at(0).info) << listing->leases[0].status;
}

// Report 56: the disk may be full at each write in turn.
TEST_F(LeaseTest, EveryFaultLeavesTheOldLeaseOrTheNewOneAndOneRetryConverges) {
  FaultFileSystem fs(PosixFileSystem(), temp_.path());
  const auto subject = Make("r", &fs);
  ASSERT_TRUE(subject->Set(1, Version(1)).ok());
  fs.Reset();
  ASSERT_TRUE(subject->Set(2, Version(2)).ok());
  const std::int64_t count = fs.operation_count();
  ASSERT_GT(count, 5);
  std::uint64_t step = 2;
  for (const Fault fault :
       {Fault::Fail(EIO), Fault::Fail(ENOSPC), Fault::PerformThenFail(EIO),
        Fault::Shorten(), Fault::Tear(EIO)}) {
    for (std::int64_t k = 1; k <= count; ++k) {
      fs.Reset();
      fs.set_script(FaultAt(k, fault));
      ++step;
      const absl::Status status = subject->Set(step, Version(step));
      SCOPED_TRACE(absl::StrCat("fault ", static_cast<int>(fault.kind),
                                " at operation ", k, "\n", fs.LogText()));
      LeaseListing listing = Read();
      ASSERT_EQ(listing.leases.size(), 1u);
      ASSERT_TRUE(listing.leases[0].info) << listing.leases[0].status;
      const std::uint64_t found = listing.leases[0].info->oldest_step;
      if (status.ok()) {
        EXPECT_EQ(found, step);
      } else {
        EXPECT_TRUE(found == step || found == step - 1) << found;
      }
      fs.Reset();
      ASSERT_TRUE(subject->Set(step, Version(step)).ok());
      listing = Read();
      EXPECT_EQ(listing.leases.at(0).info->oldest_step, step);
      EXPECT_THAT(listing.temporaries, IsEmpty());
    }
  }
}

TEST_F(LeaseTest, ReadersThatRenewAreNeverMissedOrHalfSeen) {
  constexpr int kReaders = 4;
  std::vector<std::unique_ptr<Lease>> leases;
  for (int i = 0; i < kReaders; ++i) {
    leases.push_back(Make(absl::StrCat("reader-", i)));
    ASSERT_TRUE(leases.back()->Set(1, std::nullopt).ok());
  }
  std::atomic<bool> stop{false};
  std::vector<std::thread> threads;
  for (auto& lease : leases) {
    threads.emplace_back([&stop, &lease] {
      while (!stop) EXPECT_TRUE(lease->Renew().ok());
    });
  }
  for (int i = 0; i < 200; ++i) {
    const LeaseListing listing = Read();
    ASSERT_EQ(listing.leases.size(), std::size_t{kReaders}) << "listing " << i;
    for (const LeaseEntry& entry : listing.leases) {
      ASSERT_TRUE(entry.info) << entry.status;
    }
  }
  stop = true;
  for (std::thread& thread : threads) thread.join();
}

TEST(LeaseStateTest, IsJudgedByTheStoragesClockAlone) {
  constexpr std::int64_t kSecond = 1'000'000'000;
  constexpr std::int64_t kNow = 1'800'000'000 * kSecond;
  const std::chrono::seconds ttl(600);
  LeaseEntry lease;
  lease.info = LeaseInfo();
  const auto state = [&](std::int64_t modified_ns) {
    lease.modified_ns = modified_ns;
    return StateOfLease(lease, kNow, ttl);
  };
  EXPECT_EQ(state(kNow), LeaseState::kLive);
  EXPECT_EQ(state(kNow + kSecond), LeaseState::kLive);  // one instant, rounded
  EXPECT_EQ(state(kNow - 599 * kSecond), LeaseState::kLive);
  EXPECT_EQ(state(kNow - 600 * kSecond), LeaseState::kExpired);
  EXPECT_EQ(state(0), LeaseState::kExpired);
  EXPECT_EQ(state(kNow + 3600 * kSecond), LeaseState::kFuture);
  EXPECT_EQ(state(std::numeric_limits<std::int64_t>::max()),
            LeaseState::kFuture);
  EXPECT_EQ(state(std::numeric_limits<std::int64_t>::min()),
            LeaseState::kExpired);
  lease.info.reset();
  lease.status = absl::DataLossError("damaged");
  EXPECT_EQ(state(kNow), LeaseState::kUnreadable);
  EXPECT_EQ(state(kNow + 3600 * kSecond), LeaseState::kUnreadable);
  EXPECT_EQ(state(kNow - 600 * kSecond), LeaseState::kExpired);
  lease.status = absl::FailedPreconditionError("another run");
  EXPECT_EQ(state(kNow), LeaseState::kForeign);
  EXPECT_EQ(state(0), LeaseState::kForeign);
}

}  // namespace
}  // namespace kedge
