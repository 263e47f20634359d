// Goal: what many ranks publish is what one rank would have, bit for bit, and
// whatever they disagree about is refused with the tensor's name and the ranks'
// numbers. Method: ranks are threads over one model in memory, cut into random
// shards; the store is read with kedge's plain code and with the decoder that
// was written from spec/ alone.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstdio>
#include <cstring>
#include <functional>
#include <iterator>
#include <set>

#include "absl/strings/str_cat.h"
#include "kedge/engine/io/store.h"
#include "kedge/format/layout.h"
#include "kedge/tests/support/fault_file_system.h"
#include "kedge/tests/support/sanitized.h"
#include "kedge/tests/support/temp_directory.h"
#include "kedge/tests/support/test_model.h"
#include "kedge/tests/writer/rank_world.h"
#include "kedge/writer/local_coordinator.h"
#include "kedge/writer/rank_parts.h"
#include "kedge/writer/snapshot_writer.h"
#include "plain_decoder.h"

namespace kedge {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr auto kDeadline = std::chrono::milliseconds(20000);

WriterOptions Options(const TempDirectory& temp, const char* name = "store") {
  WriterOptions options;
  options.store_path = temp.Join(name);
  options.io_threads = 1;
  options.encode_threads = 1;
  options.slice_units = 5000;
  options.anchor_file_bytes = std::uint64_t{64} << 10;
  return options;
}

InitOptions Init() {
  InitOptions init;
  init.run = RunId{{1, 2, 3}};
  init.l61_seed = 42;
  init.metadata = {{"model", "test"}};
  return init;
}

using Writer = std::unique_ptr<SnapshotWriter>;
using MaybeWriter = absl::StatusOr<Writer>;
using Shards = std::vector<std::vector<TrainerTensor>>;

// The ranks of one incarnation of a trainer.
class World {
 public:
  explicit World(std::uint32_t size,
                 std::chrono::milliseconds deadline = kDeadline)
      : coordinators_(LocalCoordinator::MakeGroup(size, deadline)) {}

  std::uint32_t size() const {
    return static_cast<std::uint32_t>(coordinators_.size());
  }
  WriterOptions OptionsOf(std::uint32_t rank, WriterOptions options) const {
    options.coordinator = coordinators_[rank].get();
    return options;
  }
  // Status of each rank; writers() are those that have one.
  std::vector<absl::Status> Create(const WriterOptions& options,
                                   const Shards& shards,
                                   const InitOptions& init = Init()) {
    return Keep(OnRanks<MaybeWriter>(size(), [&](std::uint32_t rank) {
      return SnapshotWriter::Create(OptionsOf(rank, options), init,
                                    shards[rank]);
    }));
  }
  std::vector<absl::Status> Open(
      const WriterOptions& options, const Shards& shards,
      std::optional<std::uint64_t> resume = std::nullopt) {
    return Keep(OnRanks<MaybeWriter>(size(), [&](std::uint32_t rank) {
      return SnapshotWriter::Open(OptionsOf(rank, options), shards[rank],
                                  resume);
    }));
  }
  std::vector<absl::StatusOr<PublishResult>> Publish(
      std::uint64_t step, const PublishOptions& options = {}) {
    return OnRanks<absl::StatusOr<PublishResult>>(
        size(), [&](std::uint32_t rank) {
          return writers_[rank]->Publish(step, options);
        });
  }
  SnapshotWriter& writer(std::uint32_t rank) { return *writers_[rank]; }
  std::vector<Writer>& writers() { return writers_; }

 private:
  std::vector<absl::Status> Keep(std::vector<MaybeWriter> made) {
    writers_.clear();
    std::vector<absl::Status> statuses;
    for (MaybeWriter& one : made) {
      statuses.push_back(one.status());
      writers_.push_back(one.ok() ? *std::move(one) : nullptr);
    }
    return statuses;
  }

  std::vector<std::unique_ptr<LocalCoordinator>> coordinators_;
  std::vector<Writer> writers_;
};

void ExpectOk(const std::vector<absl::Status>& statuses) {
  for (std::size_t rank = 0; rank < statuses.size(); ++rank) {
    EXPECT_TRUE(statuses[rank].ok())
        << "rank " << rank << ": " << statuses[rank];
  }
}

// All published the same.
void ExpectSame(const std::vector<absl::StatusOr<PublishResult>>& results,
                bool anchor = false) {
  for (const auto& result : results) {
    ASSERT_TRUE(result.ok()) << result.status();
    EXPECT_EQ(result->version, results[0]->version);
    EXPECT_EQ(result->nnz, results[0]->nnz);
    EXPECT_EQ(result->bytes, results[0]->bytes);
    EXPECT_TRUE(result->anchor_status.ok()) << result->anchor_status;
    EXPECT_EQ(result->anchor_bytes, results[0]->anchor_bytes);
    EXPECT_EQ(result->anchor_bytes > 0, anchor);
    EXPECT_THAT(result->warnings, IsEmpty());
  }
}

// A model of random tensors, to be changed at random.
class RandomModel {
 public:
  explicit RandomModel(std::mt19937_64& random) {
    const std::uint64_t count = 1 + random() % 12;
    for (std::uint64_t i = 0; i < count; ++i) {
      Tensor tensor;
      tensor.view.name = absl::StrCat("t", i * 7 % 13, ".", i);
      tensor.view.dtype = static_cast<DType>(1 + random() % kMaxDType);
      static constexpr std::uint64_t kExtents[] = {0,   1,   2,   3,   7,  64,
                                                   127, 128, 129, 200, 300};
      const std::uint64_t rank = random() % 4;
      std::uint64_t elements = 1;
      for (std::uint64_t d = 0; d < rank; ++d) {
        std::uint64_t extent = kExtents[random() % std::size(kExtents)];
        if (random() % 4 != 0 && extent == 0) extent = 5;
        if (elements * extent > 60000) extent = 2;
        tensor.view.shape.push_back(extent);
        elements *= extent;
      }
      if (!tensors_.empty() && random() % 6 == 0 &&
          tensors_[0].view.tied_to.empty()) {
        tensor.view.dtype = tensors_[0].view.dtype;
        tensor.view.shape = tensors_[0].view.shape;
        tensor.view.tied_to = tensors_[0].view.name;
      } else {
        tensor.bytes.resize(elements * ElementBytes(tensor.view.dtype));
        for (std::byte& byte : tensor.bytes) byte = std::byte(random());
      }
      tensors_.push_back(std::move(tensor));
    }
  }

  void Step(std::mt19937_64& random) {
    for (Tensor& tensor : tensors_) {
      if (tensor.bytes.empty() || random() % 4 == 0) continue;
      const std::uint64_t one_in = random() % 5 == 0 ? 1 : 50;
      for (std::uint64_t n = tensor.bytes.size() / one_in + 1; n > 0; --n) {
        tensor.bytes[random() % tensor.bytes.size()] = std::byte(random());
      }
    }
  }

  std::vector<TrainerTensor> Tensors() const {
    std::vector<TrainerTensor> views;
    for (const Tensor& tensor : tensors_) {
      views.push_back(tensor.view);
      views.back().data = tensor.view.tied_to.empty()
                              ? tensor.bytes.data()
                              : tensors_[0].bytes.data();
    }
    return views;
  }

 private:
  struct Tensor {
    TrainerTensor view;
    std::vector<std::byte> bytes;
  };
  std::vector<Tensor> tensors_;
};

// Two stores hold the same weights at `step`, by every reader.
void ExpectSameVersion(const std::string& many, const std::string& one,
                       std::uint64_t step) {
  auto store_many = Store::Open(PosixFileSystem(), many);
  auto store_one = Store::Open(PosixFileSystem(), one);
  ASSERT_TRUE(store_many.ok() && store_one.ok());
  const auto at_many = (*store_many)->ReadStep(step);
  const auto at_one = (*store_one)->ReadStep(step);
  ASSERT_TRUE(at_many.ok()) << at_many.status();
  ASSERT_TRUE(at_one.ok()) << at_one.status();
  EXPECT_EQ((*at_many)->manifest.digest_after,
            (*at_one)->manifest.digest_after);
  const auto state_many = (*store_many)->StateAt(*at_many);
  const auto state_one = (*store_one)->StateAt(*at_one);
  ASSERT_TRUE(state_many.ok()) << state_many.status();
  EXPECT_EQ(state_many->l61, state_one->l61);
  EXPECT_EQ(state_many->metadata, state_one->metadata);
  EXPECT_EQ(state_many->table->hash(), state_one->table->hash());
  std::uint64_t nnz_many = 0;
  std::uint64_t nnz_one = 0;
  for (const auto& record : (*at_many)->manifest.records)
    nnz_many += record.nnz;
  for (const auto& record : (*at_one)->manifest.records) nnz_one += record.nnz;
  EXPECT_EQ(nnz_many, nnz_one);
  try {
    const auto a = kedge_plain::PlainStore(many).Read(step);
    const auto b = kedge_plain::PlainStore(one).Read(step);
    EXPECT_EQ(a.digest, b.digest);
    EXPECT_EQ(a.l61, b.l61);
    EXPECT_EQ(a.bytes, b.bytes);
  } catch (const std::exception& error) {
    ADD_FAILURE() << error.what();
  }
}

// Random tables, random uneven shards over 1 to 5 ranks, random steps.
TEST(RanksPropertyTest, ManyRanksPublishWhatOneDoes) {
  for (std::uint64_t seed = 1; seed <= static_cast<std::uint64_t>(Rounds(25));
       ++seed) {
    SCOPED_TRACE(absl::StrCat("seed ", seed));
    std::mt19937_64 random(seed);
    TempDirectory temp;
    // Which does not wait for the disk.
    FaultFileSystem fs(PosixFileSystem(), temp.path());
    WriterOptions options_many = Options(temp);
    WriterOptions options_one = Options(temp, "one");
    options_many.fs = options_one.fs = &fs;
    RandomModel model(random);
    const auto tensors = model.Tensors();
    const auto size = static_cast<std::uint32_t>(1 + random() % 5);
    Shards shards = CutIntoShards(tensors, size, random);
    InitOptions init = Init();
    init.external_v0 = random() % 5 == 0;
    auto world = std::make_unique<World>(size);
    const auto created = world->Create(options_many, shards, init);
    ExpectOk(created);
    auto one = SnapshotWriter::Create(options_one, init, tensors);
    ASSERT_TRUE(one.ok()) << one.status();
    ASSERT_FALSE(::testing::Test::HasFailure());
    std::uint64_t snapshot_bytes = 0;
    for (const Writer& writer : world->writers()) {
      snapshot_bytes += writer->snapshot_bytes();
    }
    EXPECT_EQ(snapshot_bytes, (*one)->snapshot_bytes());
    for (std::uint64_t step = 1; step <= 5; ++step) {
      SCOPED_TRACE(absl::StrCat("step ", step));
      if (random() % 4 == 0) {
        // The trainer is started again, with other shards.
        world = std::make_unique<World>(
            static_cast<std::uint32_t>(1 + random() % 5));
        shards = CutIntoShards(tensors, world->size(), random);
        ExpectOk(world->Open(options_many, shards));
        ASSERT_FALSE(::testing::Test::HasFailure());
      }
      model.Step(random);
      PublishOptions options;
      options.anchor = random() % 3 == 0 || (init.external_v0 && step == 1);
      const Metadata metadata = {{"step", absl::StrCat(step / 2)}};
      options.metadata = &metadata;
      ExpectSame(world->Publish(step, options), options.anchor);
      const auto alone = (*one)->Publish(step, options);
      ASSERT_TRUE(alone.ok()) << alone.status();
      if (::testing::Test::HasFailure()) return;
      ExpectSameVersion(temp.Join("store"), temp.Join("one"), step);
      if (::testing::Test::HasFailure()) return;
    }
  }
}

// Every dtype, views, ties, empty tensors; resumed with another world each
// time.
TEST(RanksTest, AnotherWorldGoesOnFromWhatOneLeft) {
  std::mt19937_64 random(7);
  TempDirectory temp;
  TestModel model(7);
  std::uint64_t step = 0;
  for (const std::uint32_t size : {3u, 1u, 5u, 2u}) {
    World world(size);
    const Shards shards = CutIntoShards(model.Tensors(), size, random);
    ExpectOk(step == 0 ? world.Create(Options(temp), shards)
                       : world.Open(Options(temp), shards));
    ASSERT_FALSE(HasFailure());
    for (int i = 0; i < 3; ++i) {
      model.Step(0.02);
      PublishOptions options;
      options.anchor = i == 1;
      ExpectSame(world.Publish(++step, options), options.anchor);
      auto store = Store::Open(PosixFileSystem(), temp.Join("store"));
      const auto read = ReadModel(**store, *(*store)->Newest());
      ASSERT_TRUE(read.ok()) << read.status();
      EXPECT_EQ(*read, model.Bytes());
    }
  }
  EXPECT_THAT(*PosixFileSystem()->List(temp.Join("store/.staging")),
              Each(::testing::Not(::testing::StartsWith("step"))));
}

TEST(RanksTest, ShardsWithinARowAndATileAreExact) {
  TempDirectory temp;
  std::vector<std::uint16_t> weights(300 * 200);
  const auto shards = [&] {
    Shards ranks(3);
    // 128x128 tiles: cuts inside rows and tiles; rank 1 holds two parts.
    const std::uint64_t cuts[] = {0, 7, 129, 200 * 130 + 77, 59999, 60000};
    const std::uint32_t owner[] = {1, 0, 2, 1, 0};
    for (int i = 0; i < 5; ++i) {
      TrainerTensor tensor;
      tensor.name = "w";
      tensor.shape = {300, 200};
      tensor.shard = ElementRange{cuts[i], cuts[i + 1]};
      tensor.data = weights.data() + cuts[i];
      ranks[owner[i]].push_back(tensor);
    }
    return ranks;
  }();
  World world(3);
  ExpectOk(world.Create(Options(temp), shards));
  // Both sides of every cut, and nothing else; then everything.
  for (const std::size_t i :
       {0u, 6u, 7u, 128u, 129u, 26076u, 26077u, 59998u, 59999u}) {
    weights[i] += 1;
  }
  auto results = world.Publish(1);
  ExpectSame(results);
  EXPECT_EQ(results[0]->nnz, 9u);
  for (std::uint16_t& weight : weights) weight += 3;
  ExpectSame(world.Publish(2));
  auto store = Store::Open(PosixFileSystem(), temp.Join("store"));
  const auto read = ReadModel(**store, *(*store)->Newest());
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(std::memcmp(read->at("w").data(), weights.data(), 120000), 0);
}

// Experts: no rank has all tensors, and no two have the same.
TEST(RanksTest, TheTableIsTheUnionOfAllRanks) {
  TempDirectory temp;
  TestModel model(9);
  Shards shards(3);
  const auto tensors = model.Tensors();
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    shards[1 + i % 2].push_back(tensors[i]);  // rank 0 has nothing
  }
  World world(3);
  ExpectOk(world.Create(Options(temp), shards));
  EXPECT_EQ(world.writer(0).snapshot_bytes(), 0u);
  EXPECT_EQ(world.writer(0).store_writer().table().hash(),
            MakeTable(tensors)->hash());
  model.Step(0.01);
  PublishOptions options;
  options.anchor = true;
  ExpectSame(world.Publish(1, options), true);
  auto store = Store::Open(PosixFileSystem(), temp.Join("store"));
  EXPECT_EQ(*ReadModel(**store, *(*store)->Newest()), model.Bytes());
}

TEST(RanksTest, ReplacedTensorsTravelAsAnAnchor) {
  std::mt19937_64 random(10);
  TempDirectory temp;
  TestModel model(10);
  TestModel other(11, 2);
  World world(3);
  ExpectOk(
      world.Create(Options(temp), CutIntoShards(model.Tensors(), 3, random)));
  model.Step(0.01);
  ExpectSame(world.Publish(1));
  const Shards shards = CutIntoShards(other.Tensors(), 3, random);
  const auto replaced =
      OnRanks<absl::StatusOr<PublishResult>>(3, [&](std::uint32_t rank) {
        return world.writer(rank).ReplaceTensors(2, shards[rank], {{"k", "v"}});
      });
  for (const auto& result : replaced) {
    ASSERT_TRUE(result.ok()) << result.status();
    EXPECT_EQ(result->version, replaced[0]->version);
    EXPECT_GT(result->anchor_bytes, 0u);
  }
  other.Step(0.01);
  PublishOptions options;
  options.anchor = true;
  ExpectSame(world.Publish(3, options), true);
  auto store = Store::Open(PosixFileSystem(), temp.Join("store"));
  EXPECT_EQ(*ReadModel(**store, *(*store)->Newest()), other.Bytes());
  EXPECT_EQ((*store)->StateAt(*(*store)->Newest())->metadata,
            (Metadata{{"k", "v"}}));
}

// Anchor files are those of the plan, the same at every anchor of the run.
TEST(RanksTest, EveryRankWritesItsOwnFilesAtFixedOffsets) {
  std::mt19937_64 random(12);
  TempDirectory temp;
  TestModel model(12, 4);
  World world(3);
  ExpectOk(
      world.Create(Options(temp), CutIntoShards(model.Tensors(), 3, random)));
  PublishOptions options;
  options.anchor = true;
  for (std::uint64_t step = 1; step <= 2; ++step) {
    model.Step(0.05);
    ExpectSame(world.Publish(step, options), true);
  }
  auto store = Store::Open(PosixFileSystem(), temp.Join("store"));
  std::vector<std::string> layouts;
  for (std::uint64_t step = 0; step <= 2; ++step) {
    const auto published = (*store)->ReadStep(step);
    ASSERT_TRUE(published.ok()) << published.status();
    const auto anchor = (*store)->ReadAnchor((*published)->id);
    ASSERT_TRUE(anchor.ok()) << anchor.status();
    std::string layout;
    std::set<std::uint32_t> ranks;
    for (const DataFile& file : (*anchor)->manifest.files) {
      absl::StrAppend(&layout, DataFileName(file.id), " ", file.bytes, "\n");
      ranks.insert(file.id.rank);
    }
    EXPECT_EQ(ranks, (std::set<std::uint32_t>{0, 1, 2}));
    for (const AnchorSlice& slice : (*anchor)->manifest.slices) {
      absl::StrAppend(&layout, slice.tensor, " ", slice.slice.begin, " ",
                      slice.file, " ", slice.offset, "\n");
    }
    layouts.push_back(layout);
  }
  EXPECT_EQ(layouts[1], layouts[0]);
  EXPECT_EQ(layouts[2], layouts[0]);
}

// ------------------------------------------------------------ disagreements

class RankErrorsTest : public ::testing::Test {
 protected:
  static TrainerTensor Shard(std::uint64_t begin, std::uint64_t end,
                             const char* name = "w") {
    static std::vector<std::uint16_t> weights(1000);
    TrainerTensor tensor;
    tensor.name = name;
    tensor.shape = {1000};
    tensor.shard = ElementRange{begin, end};
    tensor.data = weights.data() + begin;
    return tensor;
  }
  // All ranks fail to create a store, with the same words.
  void ExpectRefused(const Shards& shards, absl::StatusCode code,
                     const ::testing::Matcher<std::string>& text) {
    TempDirectory temp;
    World world(static_cast<std::uint32_t>(shards.size()));
    const auto statuses = world.Create(Options(temp), shards);
    for (const absl::Status& status : statuses) {
      EXPECT_EQ(status.code(), code);
      EXPECT_THAT(status.ToString(), text);
    }
    // Nothing was made.
    EXPECT_TRUE(
        absl::IsNotFound(PosixFileSystem()->Stat(temp.Join("store")).status()));
  }
};

TEST_F(RankErrorsTest, GapsNameTensorRangeAndRanks) {
  ExpectRefused(
      {{Shard(0, 400)}, {}, {Shard(401, 1000)}},
      absl::StatusCode::kFailedPrecondition,
      HasSubstr("tensor \"w\": owned ranges: expected all of its 1000 units "
                "owned, found no owner of [400, 401) among 3 ranks, after rank "
                "0 with [0, 400), before rank 2 with [401, 1000)"));
}

// Report: a replicated tensor came from two ranks and was added twice.
TEST_F(RankErrorsTest, DoubleOwnersAreNamed) {
  ExpectRefused({{Shard(0, 1000)}, {Shard(0, 1000)}},
                absl::StatusCode::kFailedPrecondition,
                HasSubstr("tensor \"w\": owned ranges: expected no unit owned "
                          "twice, found rank 0 with [0, 1000) and rank 1 with "
                          "[0, 1000)"));
}

TEST_F(RankErrorsTest, TensorsDeclaredDifferentlyAreNamed) {
  TrainerTensor other = Shard(500, 1000);
  other.dtype = DType::kF16;
  ExpectRefused({{Shard(0, 500)}, {}, {other}},
                absl::StatusCode::kFailedPrecondition,
                AllOf(HasSubstr("tensor \"w\": expected bf16 [1000] as at rank "
                                "0, found f16 [1000] at rank 2")));
  other = Shard(500, 1000);
  other.shape = {1000, 1};
  ExpectRefused({{Shard(0, 500)}, {other}},
                absl::StatusCode::kFailedPrecondition,
                HasSubstr("found bf16 [1000, 1] at rank 1"));
  other = Shard(500, 1000);
  other.tied_to = "v";
  ExpectRefused({{Shard(0, 500)}, {other}},
                absl::StatusCode::kFailedPrecondition,
                HasSubstr("found bf16 [1000] tied to v at rank 1"));
}

TEST_F(RankErrorsTest, ShardsThatDoNotFitAreNamedWithTheirRank) {
  ExpectRefused({{Shard(0, 500)}, {Shard(500, 1001)}},
                absl::StatusCode::kFailedPrecondition,
                AllOf(HasSubstr("rank 1 of 2"),
                      HasSubstr("w: shard: expected a range within its 1000 "
                                "elements, found [500, 1001)")));
  ExpectRefused({{Shard(0, 500), Shard(400, 1000)}, {}},
                absl::StatusCode::kFailedPrecondition,
                AllOf(HasSubstr("rank 0 of 2"),
                      HasSubstr("shards overlap: [0, 500) and [400, 1000)")));
  TrainerTensor view = Shard(3, 1000);
  view.shape = {100, 10};
  view.strides_bytes = {40, 2};
  ExpectRefused({{}, {view}}, absl::StatusCode::kFailedPrecondition,
                HasSubstr("shard of a view: expected whole rows of 10"));
  TrainerTensor null = Shard(0, 1000);
  null.data = nullptr;
  ExpectRefused({{null}, {}}, absl::StatusCode::kFailedPrecondition,
                AllOf(HasSubstr("rank 0 of 2"), HasSubstr("data is null")));
}

TEST_F(RankErrorsTest, AloneTooAGapIsRefused) {
  TempDirectory temp;
  const auto writer =
      SnapshotWriter::Create(Options(temp), Init(), {Shard(0, 999)});
  EXPECT_EQ(writer.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(writer.status().ToString(),
              HasSubstr("no owner of [999, 1000) among 1 ranks"));
  EXPECT_TRUE(SnapshotWriter::Create(Options(temp), Init(),
                                     {Shard(999, 1000), Shard(0, 999)})
                  .ok());
}

TEST_F(RankErrorsTest, OpeningAtDifferentStepsIsRefused) {
  TempDirectory temp;
  const Shards shards = {{Shard(0, 500)}, {Shard(500, 1000)}};
  {
    World world(2);
    ExpectOk(world.Create(Options(temp), shards));
    ExpectSame(world.Publish(1));
  }
  World world(2);
  for (const MaybeWriter& one :
       OnRanks<MaybeWriter>(2, [&](std::uint32_t rank) {
         return SnapshotWriter::Open(world.OptionsOf(rank, Options(temp)),
                                     shards[rank], rank);
       })) {
    EXPECT_EQ(one.status().code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_THAT(one.status().ToString(),
                HasSubstr("rank 1 of 2: opens the store at another resume "
                          "step"));
  }
}

TEST(RanksTest, WeightsThatAreNotTheVersionNameTensorAndHolders) {
  std::mt19937_64 random(13);
  TempDirectory temp;
  TestModel model(13);
  Shards shards(3);
  for (const TrainerTensor& tensor : model.Tensors()) {
    if (tensor.name != "norm.weight") {
      shards[1].push_back(tensor);
      continue;
    }
    for (const std::uint32_t rank : {0u, 2u}) {
      TrainerTensor half = tensor;
      half.shard = rank == 0 ? ElementRange{0, 100} : ElementRange{100, 257};
      half.data =
          static_cast<const std::uint16_t*>(tensor.data) + half.shard->begin;
      shards[rank].push_back(half);
    }
  }
  {
    World world(3);
    ExpectOk(world.Create(Options(temp), shards));
  }
  model.StepOne("norm.weight", 300);
  const auto epochs = PosixFileSystem()->List(temp.Join("store/epochs"));
  World world(3);
  for (const absl::Status& status : world.Open(Options(temp), shards)) {
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_THAT(status.ToString(),
                HasSubstr("norm.weight (held by ranks 0, 2): L61: expected"));
  }
  EXPECT_EQ(*PosixFileSystem()->List(temp.Join("store/epochs")), *epochs);
}

TEST(RanksTest, PublishingDifferentStepsFailsOnAllAndOneRetryConverges) {
  std::mt19937_64 random(14);
  TempDirectory temp;
  TestModel model(14);
  World world(2);
  ExpectOk(
      world.Create(Options(temp), CutIntoShards(model.Tensors(), 2, random)));
  model.Step(0.01);
  const auto results = OnRanks<absl::StatusOr<PublishResult>>(
      2,
      [&](std::uint32_t rank) { return world.writer(rank).Publish(1 + rank); });
  for (const auto& result : results) {
    EXPECT_EQ(result.status().code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_THAT(result.status().ToString(),
                HasSubstr("rank 1 of 2: expected \"fragments of v1\""));
  }
  for (std::uint32_t rank = 0; rank < 2; ++rank) {
    EXPECT_EQ(world.writer(rank).held().step, 0u);
  }
  ExpectSame(world.Publish(2));
  auto store = Store::Open(PosixFileSystem(), temp.Join("store"));
  EXPECT_EQ(*ReadModel(**store, *(*store)->Newest()), model.Bytes());
}

// Report: local baselines moved on although the step was never committed.
TEST(RanksTest, AMissingRankFailsThePublishAndNoBaselineMoves) {
  std::mt19937_64 random(15);
  TempDirectory temp;
  TestModel model(15);
  World world(3, std::chrono::milliseconds(1500));
  const Shards shards = CutIntoShards(model.Tensors(), 3, random);
  ExpectOk(world.Create(Options(temp), shards));
  model.Step(0.01);
  ExpectSame(world.Publish(1));
  model.Step(0.01);
  const auto late = OnRanks<absl::Status>(3, [&](std::uint32_t rank) {
    if (rank == 2) return absl::OkStatus();
    if (rank == 1) std::this_thread::sleep_for(std::chrono::milliseconds(100));
    return world.writer(rank).Publish(2).status();
  });
  EXPECT_THAT(late[0].ToString(), HasSubstr("ranks 2 of 3"));
  EXPECT_THAT(late[1].ToString(), HasSubstr("ranks 2 of 3"));
  for (std::uint32_t rank = 0; rank < 2; ++rank) {
    EXPECT_EQ(late[rank].code(), absl::StatusCode::kUnavailable);
    EXPECT_EQ(world.writer(rank).held().step, 1u);
  }
  // It was only slow: all go on.
  const absl::Status slow = world.writer(2).Publish(2).status();
  EXPECT_EQ(slow.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(slow.ToString(), HasSubstr("ranks 2 of 3"));
  model.Step(0.01);
  ExpectSame(world.Publish(3));
  auto store = Store::Open(PosixFileSystem(), temp.Join("store"));
  EXPECT_EQ(*ReadModel(**store, *(*store)->Newest()), model.Bytes());
  // What it made of the dead attempt, after that was cleaned up, is gone too.
  EXPECT_THAT(*PosixFileSystem()->List(temp.Join("store/.staging")),
              Each(::testing::Not(::testing::StartsWith("step"))));
}

TEST(RanksTest, NoWordFromRankZeroIsOutcomeUnknownUntilReopened) {
  std::mt19937_64 random(16);
  TempDirectory temp;
  TestModel model(16);
  const Shards shards = CutIntoShards(model.Tensors(), 2, random);
  {
    World world(2, std::chrono::milliseconds(1000));
    ExpectOk(world.Create(Options(temp), shards));
    model.Step(0.01);
    const absl::Status lost = world.writer(1).Publish(1).status();
    EXPECT_EQ(lost.code(), absl::StatusCode::kUnavailable);
    EXPECT_THAT(lost.ToString(), HasSubstr("outcome unknown"));
    EXPECT_EQ(world.writer(1).held().step, 0u);
    for (int i = 0; i < 2; ++i) {
      const absl::Status again = world.writer(1).Publish(1).status();
      EXPECT_EQ(again.code(), absl::StatusCode::kUnavailable);
      EXPECT_THAT(again.ToString(), HasSubstr("open a new writer"));
    }
    EXPECT_EQ(world.writer(1).ReplaceTensors(1, shards[1], {}).status().code(),
              absl::StatusCode::kUnavailable);
  }
  TestModel v0(16);
  World world(2);
  ExpectOk(world.Open(Options(temp), CutIntoShards(v0.Tensors(), 2, random)));
  v0.Step(0.01);
  ExpectSame(world.Publish(1));
}

TEST(RanksTest, TheLaterWorldFencesTheEarlier) {
  std::mt19937_64 random(17);
  TempDirectory temp;
  TestModel model(17);
  World first(2);
  World second(3);
  ExpectOk(
      first.Create(Options(temp), CutIntoShards(model.Tensors(), 2, random)));
  ExpectOk(
      second.Open(Options(temp), CutIntoShards(model.Tensors(), 3, random)));
  model.Step(0.01);
  PublishOptions options;
  options.anchor = true;
  for (const auto& late : first.Publish(1, options)) {
    EXPECT_EQ(late.status().code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_THAT(late.status().ToString(), HasSubstr("fenced by epoch 2"));
  }
  ExpectSame(second.Publish(1, options), true);
  auto store = Store::Open(PosixFileSystem(), temp.Join("store"));
  EXPECT_EQ(*ReadModel(**store, *(*store)->Newest()), model.Bytes());
}

TEST(RanksTest, ResumeMovesLaterStepsAway) {
  std::mt19937_64 random(18);
  TempDirectory temp;
  TestModel model(18);
  TestModel resumed(18);
  VersionId lost;
  {
    World world(2);
    ExpectOk(
        world.Create(Options(temp), CutIntoShards(model.Tensors(), 2, random)));
    for (std::uint64_t step = 1; step <= 4; ++step) {
      model.Step(0.01);
      if (step <= 2) resumed.Step(0.01);
      ExpectSame(world.Publish(step));
    }
    lost = world.writer(1).held();
  }
  World world(3);
  ExpectOk(world.Open(Options(temp),
                      CutIntoShards(resumed.Tensors(), 3, random), 2));
  auto store = Store::Open(PosixFileSystem(), temp.Join("store"));
  EXPECT_EQ(*(*store)->ListSteps(), (std::vector<std::uint64_t>{0, 1, 2}));
  resumed.Step(0.2);
  ExpectSame(world.Publish(4));
  EXPECT_NE(world.writer(2).held(), lost);
  EXPECT_EQ(*ReadModel(**store, *(*store)->Newest()), resumed.Bytes());
}

TEST(RanksTest, AnAnchorOfChangedWeightsNamesTensorAndHolder) {
  TempDirectory temp;
  TestModel model(19);
  const auto table = MakeTable(model.Tensors());
  ASSERT_TRUE(table.ok());
  Shards shards(2);
  for (const TrainerTensor& tensor : model.Tensors()) {
    shards[tensor.name == "mlp.up.weight"].push_back(tensor);
  }
  const auto group = LocalCoordinator::MakeGroup(2, kDeadline);
  const auto statuses = OnRanks<absl::Status>(2, [&](std::uint32_t rank) {
    WriterOptions options = Options(temp);
    options.coordinator = group[rank].get();
    auto source = MemorySource::Bind(*table, shards[rank],
                                     MemorySource::Others::kHoldTheRest);
    if (!source.ok()) return source.status();
    const absl::Status made = InitStore(options, Init(), *table, *source);
    if (!made.ok()) return made;
    auto writer = StoreWriter::Open(options);
    if (!writer.ok()) return writer.status();
    // Between step and anchor.
    if (rank == 1) model.StepOne("mlp.up.weight", 999);
    PublishResult result;
    return (*writer)->AddAnchor(*source, &result);
  });
  for (const absl::Status& status : statuses) {
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_THAT(status.ToString(),
                HasSubstr("mlp.up.weight (held by rank 1): L61: expected"));
  }
  EXPECT_THAT(*PosixFileSystem()->List(temp.Join("store/.staging")), IsEmpty());
}

TEST(RanksTest, RanksThatDoNotSeeOneStoreAreRefused) {
  std::mt19937_64 random(20);
  TempDirectory temp;
  TestModel model(20);
  const Shards shards = CutIntoShards(model.Tensors(), 2, random);
  World world(2);
  // Rank 1 writes elsewhere, as if the store were not shared.
  const auto made = OnRanks<MaybeWriter>(2, [&](std::uint32_t rank) {
    WriterOptions options =
        world.OptionsOf(rank, Options(temp, rank == 0 ? "store" : "local"));
    if (rank == 1) {
      EXPECT_TRUE(EnsureDirectory(*PosixFileSystem(), options.store_path).ok());
      EXPECT_TRUE(EnsureDirectory(*PosixFileSystem(),
                                  JoinPath(options.store_path, ".staging"))
                      .ok());
    }
    return SnapshotWriter::Create(options, Init(), shards[rank]);
  });
  for (const MaybeWriter& one : made) {
    EXPECT_FALSE(one.ok());
    EXPECT_THAT(one.status().ToString(), HasSubstr("rank 1"));
  }
}

// ----------------------------------------------------------------- messages

// Messages come through files: whatever bytes come, nobody crashes, and what is
// accepted can be merged or refused.
TEST(RankPartsTest, MutatedMessagesNeverCrash) {
  std::mt19937_64 random(40);
  const TestModel model(40);
  const auto table = MakeTable(model.Tensors());
  ASSERT_TRUE(table.ok());
  const auto shards = CutIntoShards(model.Tensors(), 2, random);
  AnchorPart part;
  auto source =
      MemorySource::Bind(*table, shards[0], MemorySource::Others::kHoldTheRest);
  ASSERT_TRUE(source.ok()) << source.status();
  const auto layout = PlanAnchor(*table, {}, OwnedOf(*table, *source));
  ASSERT_TRUE(layout.ok()) << layout.status();
  part.owned = OwnedOf(*table, *source);
  part.slices = layout->slices;
  part.files.resize(layout->files.size());
  part.files[0].piece_hashes = {1, 2, 3};
  part.l61.assign(table->size(), 7);
  SharedState shared;
  shared.state.table = std::make_shared<const TensorTable>(*table);
  shared.state.l61.assign(table->size(), 9);
  shared.state.metadata = Init().metadata;
  StepOutcome outcome;
  outcome.warnings = {"a", "b"};
  outcome.l61_tensors = {0, 3};
  outcome.l61_after = {5, 6};
  outcome.metadata = Init().metadata;
  const std::vector<std::vector<std::byte>> good = {
      SerializeAnchorPart(part, *table), SerializeSharedState(shared),
      SerializeStepOutcome(outcome), SerializeDeclared(Declare(shards[1]))};
  int accepted = 0;
  int refused = 0;
  const auto read = [&](std::size_t which, std::span<const std::byte> bytes) {
    bool ok = false;
    if (which == 0) {
      auto parsed = ParseAnchorPart("part", bytes, *table);
      ok = parsed.ok();
      if (ok) {
        MergeAnchorParts(std::span(&*parsed, 1), *table).status().IgnoreError();
      }
    } else if (which == 1) {
      ok = ParseSharedState("state", bytes).ok();
    } else if (which == 2) {
      ok = ParseStepOutcome("outcome", bytes, table->size()).ok();
    } else {
      auto parsed = ParseDeclared("declared", bytes);
      ok = parsed.ok();
      if (ok) {
        const std::vector<std::vector<DeclaredTensor>> ranks = {
            Declare(shards[0]), *parsed};
        UniteTables(ranks).status().IgnoreError();
      }
    }
    ++(ok ? accepted : refused);
    return ok;
  };
  for (std::size_t which = 0; which < good.size(); ++which) {
    ASSERT_TRUE(read(which, good[which])) << which;
    for (int round = 0; round < Rounds(3000); ++round) {
      auto bad = good[which];
      switch (random() % 3) {
        case 0:
          bad.resize(random() % bad.size());
          break;
        case 1:
          bad.push_back(std::byte{0});
          break;
        default:
          break;
      }
      for (std::uint64_t n = random() % 4; n > 0 && !bad.empty(); --n) {
        bad[random() % bad.size()] = std::byte(random());
      }
      read(which, bad);
    }
  }
  EXPECT_GT(accepted, 20);
  EXPECT_GT(refused, 100);
}

// ------------------------------------------------------------------- cost

// Takes the time between the end of each Gather and the Broadcast after it:
// what rank 0 needs to decide.
class TimedCoordinator final : public Coordinator {
 public:
  explicit TimedCoordinator(Coordinator* inner) : inner_(inner) {}
  std::uint32_t rank() const override { return inner_->rank(); }
  std::uint32_t world_size() const override { return inner_->world_size(); }
  absl::StatusOr<std::vector<std::vector<std::byte>>> Gather(
      absl::string_view what, std::span<const std::byte> bytes) override {
    auto pieces = inner_->Gather(what, bytes);
    gathered_ = std::chrono::steady_clock::now();
    return pieces;
  }
  absl::StatusOr<std::vector<std::byte>> Broadcast(
      absl::string_view what, std::span<const std::byte> bytes) override {
    decided_ms_ = std::chrono::duration<double, std::milli>(
                      std::chrono::steady_clock::now() - gathered_)
                      .count();
    return inner_->Broadcast(what, bytes);
  }
  double decided_ms() const { return decided_ms_; }

 private:
  Coordinator* inner_;
  std::chrono::steady_clock::time_point gathered_;
  double decided_ms_ = 0;
};

// 18,867 tensors on 6 ranks: what merge and manifest take, from the ranks'
// messages to bytes, against the delta that a step of this size has.
TEST(RanksCostTest, MergeAndManifestOfALargeModel) {
  std::mt19937_64 random(30);
  TempDirectory temp;
  constexpr std::uint32_t kRanks = 6;
  constexpr std::size_t kTensors = kSanitized ? 300 : 18867;
  // Scaled down: each tensor stands for one of 1.6 M elements.
  constexpr std::uint64_t kElements = 1536;
  std::vector<std::uint16_t> weights(kTensors * kElements);
  Shards shards(kRanks);
  for (std::size_t i = 0; i < kTensors; ++i) {
    for (std::uint32_t rank = 0; rank < kRanks; ++rank) {
      TrainerTensor tensor;
      tensor.name = absl::StrCat("model.layers.", i % 48, ".mlp.experts.",
                                 i / 48, ".proj.weight");
      tensor.shape = {12, 128};
      tensor.shard = ElementRange{rank * kElements / kRanks,
                                  (rank + 1) * kElements / kRanks};
      tensor.data = weights.data() + i * kElements + tensor.shard->begin;
      shards[rank].push_back(tensor);
    }
  }
  const auto group =
      LocalCoordinator::MakeGroup(kRanks, std::chrono::seconds(120));
  TimedCoordinator timed(group[0].get());
  InitOptions init = Init();
  init.external_v0 = true;
  const auto writers = OnRanks<MaybeWriter>(kRanks, [&](std::uint32_t rank) {
    WriterOptions options = Options(temp);
    options.slice_units = std::uint64_t{1} << 24;
    options.coordinator =
        rank == 0 ? static_cast<Coordinator*>(&timed) : group[rank].get();
    return SnapshotWriter::Create(options, init, shards[rank]);
  });
  for (const MaybeWriter& writer : writers) {
    ASSERT_TRUE(writer.ok()) << writer.status();
  }
  // Every shard of every tensor changes in one unit.
  for (std::size_t i = 0; i < weights.size(); i += kElements / kRanks) {
    weights[i] += 1;
  }
  const auto results = OnRanks<absl::StatusOr<PublishResult>>(
      kRanks, [&](std::uint32_t rank) { return (*writers[rank])->Publish(1); });
  ExpectSame(results);
  EXPECT_EQ(results[0]->records, kRanks * kTensors);
  // The step that this one is scaled down from: 332 MiB.
  const double of_delta = 100.0 *
                          static_cast<double>(results[0]->manifest_bytes) /
                          (332.0 * 1024 * 1024);
  // A follower has the table; a step costs it COMMIT, MANIFEST and all rules.
  auto store = Store::Open(PosixFileSystem(), Options(temp).store_path);
  ASSERT_TRUE(store.ok() && (*store)->ReadStep(0).ok());
  const auto start = std::chrono::steady_clock::now();
  const auto opened = (*store)->ReadStep(1);
  const double open_ms = std::chrono::duration<double, std::milli>(
                             std::chrono::steady_clock::now() - start)
                             .count();
  ASSERT_TRUE(opened.ok()) << opened.status();
  std::printf(
      "%zu tensors, %u ranks, %llu records: manifest %llu bytes, %.2f %% of a "
      "delta of 332 MiB; fragments read, merged, committed and synced in %.0f "
      "ms; opened and validated in %.0f ms\n",
      kTensors, kRanks, static_cast<unsigned long long>(results[0]->records),
      static_cast<unsigned long long>(results[0]->manifest_bytes), of_delta,
      timed.decided_ms(), open_ms);
  EXPECT_LE(of_delta, 3);
}

}  // namespace
}  // namespace kedge
