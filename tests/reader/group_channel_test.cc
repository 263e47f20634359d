// Goal: what ranks tell each other through a sum arrives whole, and whoever
// breaks the contract is told on every rank.
// Method: channels of several ranks on threads, with a sum that is right and
// with sums that are not.

#include "kedge/reader/group_channel.h"

#include <random>
#include <string>
#include <thread>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kedge/format/l61.h"
#include "kedge/reader/weight_exchange.h"
#include "kedge/tests/support/thread_reducer.h"

namespace kedge {
namespace {

using ::testing::HasSubstr;

class GroupChannelTest : public testing::Test {
 protected:
  // Runs call(channel, rank) for each rank on a thread.
  template <typename Call>
  void OnAll(std::uint32_t size, Call call) {
    ThreadReducer reducer(size);
    reducer.set_plain(size <= 8);
    std::vector<std::thread> threads;
    for (std::uint32_t r = 0; r < size; ++r) {
      threads.emplace_back([&, r] {
        GroupChannel channel({r, size, reducer.ForRank(r), "tp"});
        call(channel, r);
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
};

VersionId Version(std::uint64_t step, std::uint8_t byte) {
  VersionId id;
  id.step = step;
  id.manifest_hash.bytes.fill(byte);
  id.manifest_hash.bytes[3] = 7;
  return id;
}

TEST_F(GroupChannelTest, BallotsArriveAsTheyWereCast) {
  for (const std::uint32_t size : {2u, 3u, 8u, 9u, 17u}) {
    OnAll(size, [size](GroupChannel& channel, std::uint32_t rank) {
      Ballot mine;
      mine.code = static_cast<absl::StatusCode>(rank % 17);
      mine.state = static_cast<FollowerState>(rank % 5);
      mine.superseded = rank % 2 == 1;
      mine.expired = rank % 3 == 1;
      mine.last = rank % 4 == 1;
      if (rank % 2 == 0) mine.held = Version(rank, 0xff);
      if (rank % 3 == 0) {
        mine.target = Version(99'999'999, static_cast<std::uint8_t>(rank));
        mine.target_epoch = 1000 + rank;
      }
      const auto ballots = channel.Vote(GroupPhase::kUpdate, mine);
      ASSERT_TRUE(ballots.ok()) << ballots.status();
      ASSERT_EQ(ballots->size(), size);
      for (std::uint32_t r = 0; r < size; ++r) {
        const Ballot& ballot = (*ballots)[r];
        EXPECT_EQ(ballot.code, static_cast<absl::StatusCode>(r % 17));
        EXPECT_EQ(ballot.state, static_cast<FollowerState>(r % 5));
        EXPECT_EQ(ballot.superseded, r % 2 == 1);
        EXPECT_EQ(ballot.expired, r % 3 == 1);
        EXPECT_EQ(ballot.last, r % 4 == 1);
        EXPECT_EQ(ballot.held.has_value(), r % 2 == 0);
        if (ballot.held) {
          EXPECT_EQ(*ballot.held, Version(r, 0xff));
        }
        EXPECT_EQ(ballot.target.has_value(), r % 3 == 0);
        if (!ballot.target) continue;
        EXPECT_EQ(*ballot.target,
                  Version(99'999'999, static_cast<std::uint8_t>(r)));
        EXPECT_EQ(ballot.target_epoch, 1000 + r);
      }
    });
  }
}

TEST_F(GroupChannelTest, ResiduesAddUpModuloThePrime) {
  for (const std::uint32_t size : {2u, 8u, 9u}) {
    OnAll(size, [size](GroupChannel& channel, std::uint32_t rank) {
      const std::vector<std::uint64_t> mine = {kL61Prime - 1, rank, 0};
      const auto total = channel.Add(
          GroupPhase::kVerify,
          rank == 1 ? absl::StatusCode::kDataLoss : absl::StatusCode::kOk,
          mine);
      ASSERT_TRUE(total.ok()) << total.status();
      EXPECT_EQ(total->residues[0], kL61Prime - size);
      EXPECT_EQ(total->residues[1], size * (size - 1) / 2);
      EXPECT_EQ(total->residues[2], 0u);
      for (std::uint32_t r = 0; r < size; ++r) {
        EXPECT_EQ(total->codes[r] == absl::StatusCode::kDataLoss, r == 1);
      }
    });
  }
}

TEST_F(GroupChannelTest, BytesOfAnyLengthAreExchangedInTwoReduces) {
  const auto bytes_of = [](std::uint32_t rank) {
    std::vector<std::byte> bytes(rank * 5);
    for (std::size_t i = 0; i < bytes.size(); ++i) {
      bytes[i] = static_cast<std::byte>(255 - i * rank);
    }
    return bytes;
  };
  ThreadReducer reducer(4);
  std::vector<std::thread> threads;
  for (std::uint32_t r = 0; r < 4; ++r) {
    threads.emplace_back([&, r] {
      GroupChannel channel({r, 4, reducer.ForRank(r), ""});
      const std::vector<std::uint64_t> alike = {7, 8};
      const auto all = channel.Exchange(GroupPhase::kOpen, bytes_of(r), alike);
      ASSERT_TRUE(all.ok()) << all.status();
      for (std::uint32_t other = 0; other < 4; ++other) {
        EXPECT_EQ((*all)[other], bytes_of(other));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(reducer.calls(0), 2);
}

// A reducer that does nothing, as one that was never connected.
TEST_F(GroupChannelTest, AReducerThatReturnsNoSumIsFoundOut) {
  GroupChannel idle(
      {0, 2, [](std::span<std::uint64_t>) { return absl::OkStatus(); }, "tp"});
  const absl::Status status = idle.Vote(GroupPhase::kUpdate, {}).status();
  EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("0 processes are rank 1"));
  GroupChannel doubled({0, 2,
                        [](std::span<std::uint64_t> values) {
                          for (std::uint64_t& value : values) value *= 2;
                          return absl::OkStatus();
                        },
                        "tp"});
  EXPECT_FALSE(
      doubled.Add(GroupPhase::kVerify, absl::StatusCode::kOk, {}).ok());
}

TEST_F(GroupChannelTest, FailureNamesEveryRankAndKeepsOnesOwnStatus) {
  GroupChannel channel(
      {1, 3, [](std::span<std::uint64_t>) { return absl::OkStatus(); }, "tp"});
  using Code = absl::StatusCode;
  const std::vector<Code> codes = {Code::kOk, Code::kUnavailable,
                                   Code::kDataLoss};
  const absl::Status mine =
      channel.Failure(codes, absl::UnavailableError("EIO"), "could not", "so");
  EXPECT_TRUE(absl::IsUnavailable(mine));
  EXPECT_EQ(mine.message(),
            "EIO; group tp: rank 1 (UNAVAILABLE), rank 2 (DATA_LOSS) could "
            "not; so");
  const absl::Status others =
      channel.Failure(codes, absl::OkStatus(), "could not", "so");
  EXPECT_TRUE(absl::IsUnavailable(others));
  EXPECT_TRUE(channel.Failure({Code::kOk}, absl::OkStatus(), "", "").ok());
}

// ------------------------------------------------------------- weight exchange

TEST(WeightExchangeTest, RandomSetsComeBackAsTheyWere) {
  for (std::uint64_t seed = 0; seed < 50; ++seed) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    std::mt19937_64 random(seed);
    std::vector<std::byte> memory(1);
    std::vector<WeightSet> sets;
    for (std::uint64_t s = 0; s < random() % 4; ++s) {
      WeightSet& set = sets.emplace_back("set" + std::to_string(s));
      for (std::uint64_t t = 0; t < random() % 6; ++t) {
        TensorTarget target;
        target.name = "tensor " + std::to_string(random());
        target.dtype = random() % 2 == 0 ? DType::kBf16 : DType::kF64;
        target.data = memory.data();
        std::int64_t stride = random() % 2 == 0 ? 8 : -8;
        const bool boxed = random() % 2 == 0;
        for (std::uint64_t d = 0; d < random() % 4; ++d) {
          target.shape.push_back(1 + random() % 1000);
          if (boxed) {
            target.begin.push_back(target.shape.back() / 2);
            target.extent.push_back(target.shape.back() - target.begin.back());
          }
          target.strides_bytes.push_back(stride);
          stride *= static_cast<std::int64_t>(target.shape.back());
        }
        ASSERT_TRUE(set.Add(target).ok());
      }
    }
    std::vector<const WeightSet*> pointers;
    for (const WeightSet& set : sets) pointers.push_back(&set);
    const std::vector<std::byte> bytes = SerializeWeightSets(pointers);
    const auto parsed = ParseWeightSets(bytes);
    ASSERT_TRUE(parsed.ok()) << parsed.status();
    ASSERT_EQ(parsed->size(), sets.size());
    std::vector<const WeightSet*> again;
    for (std::size_t s = 0; s < sets.size(); ++s) {
      again.push_back((*parsed)[s].get());
      EXPECT_EQ((*parsed)[s]->name(), sets[s].name());
      ASSERT_EQ((*parsed)[s]->targets().size(), sets[s].targets().size());
      for (std::size_t t = 0; t < sets[s].targets().size(); ++t) {
        const TensorTarget& was = sets[s].targets()[t];
        const TensorTarget& is = (*parsed)[s]->targets()[t];
        EXPECT_EQ(is.name, was.name);
        EXPECT_EQ(is.dtype, was.dtype);
        EXPECT_EQ(is.shape, was.shape);
        EXPECT_EQ(is.begin, was.begin);
        EXPECT_EQ(is.extent, was.extent);
        EXPECT_EQ(is.data, was.data);
        EXPECT_EQ(is.strides_bytes, was.strides_bytes);
      }
    }
    EXPECT_EQ(SerializeWeightSets(again), bytes);
    // Any cut, and bytes that follow, are refused.
    for (std::size_t cut = 0; cut < bytes.size(); ++cut) {
      EXPECT_FALSE(ParseWeightSets(std::span(bytes).first(cut)).ok()) << cut;
    }
    std::vector<std::byte> longer = bytes;
    longer.push_back(std::byte{0});
    EXPECT_FALSE(ParseWeightSets(longer).ok());
    // Damage is refused or harmless.
    for (int i = 0; i < 200 && !bytes.empty(); ++i) {
      std::vector<std::byte> damaged = bytes;
      damaged[random() % damaged.size()] = static_cast<std::byte>(random());
      ParseWeightSets(damaged).status().IgnoreError();
    }
  }
}

}  // namespace
}  // namespace kedge
