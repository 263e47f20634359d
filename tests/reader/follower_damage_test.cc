// Goal: wrong weights never pass for a version, and damaged, missing, foreign
// or replayed files never reach the weights; the error names what is wrong.
// Method: corrupt memory the way a buggy writer or engine would, and files the
// way storage and people do, one at a time.

#include <cstring>
#include <functional>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kedge/engine/cpu/record_apply.h"
#include "kedge/reader/follower.h"
#include "kedge/tests/reader/published_run.h"

namespace kedge {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;

// Adds the records of `step` of one tensor to `weights`, its bytes shifted by
// `shift` units: what an engine does that replays or misplaces a delta.
void ApplyByHand(const Store& store, std::uint64_t step,
                 const std::string& name, std::byte* weights,
                 std::uint64_t shift) {
  const auto published = store.ReadStep(step);
  ASSERT_TRUE(published.ok()) << published.status();
  const TensorTable& table = *(*published)->table;
  const std::uint32_t ordinal = *table.Find(name);
  const TileGrid grid = table[ordinal].grid();
  const std::uint32_t unit_bytes = UnitBytes(table[ordinal].dtype);
  for (const DeltaRecord& record : (*published)->manifest.records) {
    if (record.tensor != ordinal) continue;
    const DataFile& file = (*published)->manifest.files[record.file];
    const auto bytes = ReadFileOfSize(
        *store.fs(), JoinPath((*published)->path, DataFileName(file.id)),
        file.bytes);
    ASSERT_TRUE(bytes.ok()) << bytes.status();
    BoxTarget box;
    box.data = weights + shift * unit_bytes;
    box.row_end = grid.rows;
    box.col_end = grid.cols;
    box.unit_bytes = unit_bytes;
    box.col_stride_bytes = unit_bytes;
    box.row_stride_bytes = static_cast<std::int64_t>(grid.cols * unit_bytes);
    const auto applied =
        ApplyRecord(std::span(*bytes).subspan(record.offset, record.bytes),
                    grid, record.slice, unit_bytes, std::span(&box, 1));
    ASSERT_TRUE(applied.ok()) << applied.status();
  }
}

class WrongWeightsTest : public testing::Test {
 protected:
  // Runs v3 -> v5 with `sabotage` done between check and apply, which must fail
  // with the name of exactly that tensor, and then heals.
  void ExpectNamed(const std::string& name,
                   const std::function<void(std::byte*)>& sabotage) {
    run_.PublishUpTo(5, 2);
    const auto store = Store::Open(PosixFileSystem(), run_.path());
    ASSERT_TRUE(store.ok());
    store_ = store->get();
    memory_.Load(run_.at(3));
    bool once = true;
    FollowerOptions options = run_.Options();
    options.pause = [&] {
      if (once) sabotage(memory_.At(name, 0));
      once = false;
      return absl::OkStatus();
    };
    options.commit = [&](const VersionId&) {
      EXPECT_EQ(memory_.Difference(run_.at(5)), "");
    };
    const auto follower = run_.Open(memory_, options);
    ASSERT_TRUE(follower->VerifyHeld(3).ok());
    const absl::Status status = follower->Update().status();
    EXPECT_TRUE(absl::IsDataLoss(status));
    EXPECT_THAT(std::string(status.message()),
                HasSubstr("1 tensor does not verify: tensor " + name));
    EXPECT_EQ(follower->state(), FollowerState::kPoisoned);
    EXPECT_TRUE(follower->Join().ok());
    EXPECT_EQ(memory_.Difference(run_.at(5)), "");
  }

  PublishedRun run_;
  EngineMemory memory_{run_.table(), Layout::kWhole};
  Store* store_ = nullptr;
};

// Report 11: a retry applies again what is there already.
TEST_F(WrongWeightsTest, ADeltaAppliedTwiceIsNamed) {
  ExpectNamed("mlp.up.weight", [&](std::byte* weights) {
    ApplyByHand(*store_, 4, "mlp.up.weight", weights, 0);
  });
}

// Report 19: payload checksums pass, the destination is wrong.
TEST_F(WrongWeightsTest, ADeltaShiftedByOneElementIsNamed) {
  ExpectNamed("narrow.weight", [&](std::byte* weights) {
    // As if v4's changes had gone one element further: undo them there.
    std::vector<std::byte> before(run_.at(3).at("narrow.weight"));
    std::vector<std::byte> after(run_.at(4).at("narrow.weight"));
    for (std::size_t i = 0; i + 4 <= before.size(); i += 2) {
      std::uint16_t a = 0;
      std::uint16_t b = 0;
      std::uint16_t w = 0;
      std::memcpy(&a, before.data() + i, 2);
      std::memcpy(&b, after.data() + i, 2);
      const auto difference = static_cast<std::uint16_t>(b - a);
      if (difference == 0) continue;
      std::memcpy(&w, weights + i, 2);  // take it away here ...
      w = static_cast<std::uint16_t>(w - difference);
      std::memcpy(weights + i, &w, 2);
      std::memcpy(&w, weights + i + 2, 2);  // ... and add it there
      w = static_cast<std::uint16_t>(w + difference);
      std::memcpy(weights + i + 2, &w, 2);
    }
  });
}

TEST_F(WrongWeightsTest, TwoSwappedElementsAreNamed) {
  ExpectNamed("conv.weight", [&](std::byte* weights) {
    std::uint32_t a = 0;
    std::uint32_t b = 0;
    std::memcpy(&a, weights + 40, 4);
    std::memcpy(&b, weights + 400, 4);
    ASSERT_NE(a, b);
    std::memcpy(weights + 40, &b, 4);
    std::memcpy(weights + 400, &a, 4);
  });
}

TEST_F(WrongWeightsTest, ADeltaOnTheWrongBaseIsNamed) {
  ExpectNamed("masters", [&](std::byte* weights) {
    const std::vector<std::byte>& older = run_.at(2).at("masters");
    std::memcpy(weights, older.data(), older.size());
  });
}

TEST_F(WrongWeightsTest, OneFlippedBitAnywhereIsNamed) {
  ExpectNamed("mask", [](std::byte* weights) { weights[8] ^= std::byte{1}; });
}

// Report 19, 6: tensors that no delta touches are verified too.
TEST_F(WrongWeightsTest, ATensorThatTheDeltaDoesNotTouchIsVerifiedToo) {
  memory_.Load(run_.at(0));
  const auto follower = run_.Open(memory_, run_.Options());
  ASSERT_TRUE(follower->VerifyHeld(0).ok());
  run_.weights().at("steps")[0] ^= std::byte{1};
  run_.PublishHere(1);
  memory_.At("quantised.weight", 500)[0] ^= std::byte{0x80};
  const absl::Status status = follower->Update().status();
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("1 tensor does not verify: tensor quantised.weight"));
}

// A replica that differs is named with its set.
TEST(WrongReplicaTest, TheReplicaThatDiffersIsNamed) {
  PublishedRun run;
  EngineMemory memory(run.table(), Layout::kRows);
  memory.Load(run.at(0));
  std::byte* second = nullptr;
  for (const TensorTarget& target : memory.sets()[1]->targets()) {
    if (target.name == "steps") second = static_cast<std::byte*>(target.data);
  }
  ASSERT_NE(second, nullptr);
  *second ^= std::byte{1};
  const auto follower = run.Open(memory, run.Options());
  const absl::Status status = follower->VerifyHeld(0);
  EXPECT_THAT(std::string(status.message()), HasSubstr("steps in tp1"));
}

// ---------------------------------------------------------------- wrong writer

// A step whose hashes are all right and whose contents are not: what a buggy
// writer publishes.
class WrongStepTest : public testing::Test {
 protected:
  WrongStepTest() {
    run_.PublishUpTo(5, 3);
    memory_.Load(run_.at(4));
  }

  // Edits records of v5 and seals the step anew.
  void Forge(
      const std::function<void(StepManifest*, std::span<std::byte>)>& edit) {
    const auto store = Store::Open(PosixFileSystem(), run_.path());
    const auto published = (*store)->ReadStep(5);
    ASSERT_TRUE(published.ok()) << published.status();
    StepManifest manifest = (*published)->manifest;
    DataFile& file = manifest.files[0];
    const std::string path = JoinPath(run_.StepPath(5), DataFileName(file.id));
    std::vector<std::byte> bytes =
        *ReadFileOfSize(*PosixFileSystem(), path, file.bytes);
    edit(&manifest, bytes);
    file.piece_hashes = {HashPiece(manifest.run, 5, file.id, 0, bytes)};
    file.hash = HashOfPieces(file.piece_hashes);
    const auto sealed = SerializeStepManifest(manifest, *(*published)->table);
    ASSERT_TRUE(sealed.ok()) << sealed.status();
    CommitRecord commit;
    commit.run = manifest.run;
    commit.step = 5;
    commit.epoch = manifest.epoch;
    commit.manifest_bytes = static_cast<std::uint32_t>(sealed->size());
    commit.manifest_hash = HashBytes128(*sealed);
    Head head{manifest.run, 5, manifest.epoch, commit.manifest_hash};
    Replace(path, bytes);
    Replace(run_.StepPath(5) + "/MANIFEST", *sealed);
    Replace(run_.StepPath(5) + "/COMMIT", SerializeCommit(commit));
    Replace(run_.path() + "/HEAD", SerializeHead(head));
  }
  static void Replace(const std::string& path,
                      std::span<const std::byte> bytes) {
    fs::remove(path);
    ASSERT_TRUE(WriteNewFile(*PosixFileSystem(), path, bytes).ok());
  }
  std::unique_ptr<Follower> Holding(bool check) {
    FollowerOptions options = run_.Options();
    options.check_records_before_pause = check;
    auto follower = run_.Open(memory_, options);
    EXPECT_TRUE(follower->VerifyHeld(4).ok());
    return follower;
  }
  static std::string TensorOf(const PublishedRun& run,
                              const DeltaRecord& record) {
    return run.table()[record.tensor].name;
  }

  PublishedRun run_;
  EngineMemory memory_{run_.table(), Layout::kWhole};
};

TEST_F(WrongStepTest, AMalformedRecordNeverReachesTheWeights) {
  std::string name;
  Forge([&](StepManifest* manifest, std::span<std::byte> bytes) {
    const auto record =
        std::find_if(manifest->records.begin(), manifest->records.end(),
                     [](const DeltaRecord& r) { return r.file == 0; });
    name = TensorOf(run_, *record);
    bytes[record->offset] ^= std::byte{0x40};  // its tile count
  });
  const auto follower = Holding(/*check=*/true);
  const absl::Status status = follower->Update().status();
  EXPECT_TRUE(absl::IsDataLoss(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("tensor " + name));
  EXPECT_THAT(std::string(status.message()), HasSubstr("delta-r000-000.kds"));
  EXPECT_EQ(follower->state(), FollowerState::kReady);
  EXPECT_EQ(memory_.Difference(run_.at(4)), "");

  // Unchecked, it is found while it is applied; but headers are read before the
  // pause where a device does the rest.
  const auto trusting = Holding(/*check=*/false);
  const absl::Status late = trusting->Update().status();
  EXPECT_TRUE(absl::IsDataLoss(late)) << late;
  EXPECT_THAT(std::string(late.message()), HasSubstr("tensor " + name));
  EXPECT_EQ(trusting->state(), DefaultTestDevice() == nullptr
                                   ? FollowerState::kPoisoned
                                   : FollowerState::kReady);
  ASSERT_TRUE(trusting->JoinStep(4).ok());
  EXPECT_EQ(memory_.Difference(run_.at(4)), "");
}

TEST_F(WrongStepTest, ARecordThatIsNotWhatTheManifestSaysIsFoundEitherWay) {
  std::string name;
  Forge([&](StepManifest* manifest, std::span<std::byte> bytes) {
    // One sign bit of a tile's payload: well-formed, another difference.
    for (const DeltaRecord& record : manifest->records) {
      if (record.file != 0) continue;
      const TensorSpec& spec = run_.table()[record.tensor];
      const L61Key key = L61Key::FromSeed(
          run_.writer().store_writer().store().info().l61_seed);
      for (std::uint64_t at = 0; at < record.bytes; ++at) {
        std::byte& byte = bytes[record.offset + at];
        byte ^= std::byte{1};
        const auto summary =
            CheckRecord(bytes.subspan(record.offset, record.bytes), spec.grid(),
                        record.slice, UnitBytes(spec.dtype), key);
        if (summary.ok() && summary->nnz == record.nnz &&
            summary->l61 != record.l61) {
          name = spec.name;
          return;
        }
        byte ^= std::byte{1};
      }
    }
    FAIL() << "no byte to forge";
  });
  const auto follower = Holding(/*check=*/true);
  const absl::Status status = follower->Update().status();
  EXPECT_THAT(std::string(status.message()), HasSubstr("L(record)"));
  EXPECT_EQ(follower->state(), FollowerState::kReady);
  EXPECT_EQ(memory_.Difference(run_.at(4)), "");

  const auto trusting = Holding(/*check=*/false);
  const absl::Status late = trusting->Update().status();
  EXPECT_THAT(std::string(late.message()),
              HasSubstr("1 tensor does not verify: tensor " + name));
  EXPECT_EQ(trusting->state(), FollowerState::kPoisoned);
}

// Report 8: a delta that was encoded from other weights than it says.
TEST_F(WrongStepTest, ADeltaWhoseChecksumsBeforeAreNotOursIsRefused) {
  std::string name;
  Forge([&](StepManifest* manifest, std::span<std::byte>) {
    TensorState& state = manifest->states.front();
    state.l61_before = L61Add(state.l61_before, 1);
    state.l61_after = L61Add(state.l61_after, 1);
    name = run_.table()[state.tensor].name;
  });
  const auto follower = Holding(/*check=*/true);
  const absl::Status status = follower->Update().status();
  EXPECT_TRUE(absl::IsDataLoss(status)) << status;
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("L61 of tensor " + name + " at the base v4"));
  EXPECT_EQ(memory_.Difference(run_.at(4)), "");
}

// ----------------------------------------------------------------------- files

class DamagedFilesTest : public testing::TestWithParam<ReadMode> {
 protected:
  DamagedFilesTest() { run_.PublishUpTo(6, 3); }

  std::unique_ptr<Follower> Holding(std::uint64_t step) {
    memory_.Load(run_.at(step));
    auto follower = run_.Open(memory_, run_.Options(GetParam()));
    const absl::Status status = follower->VerifyHeld(step);
    EXPECT_TRUE(status.ok()) << status;
    return follower;
  }
  // An update that must fail before the pause.
  absl::Status ExpectRefused(Follower& follower, std::uint64_t held) {
    const absl::Status status = follower.Update().status();
    EXPECT_FALSE(status.ok());
    EXPECT_EQ(follower.state(), FollowerState::kReady);
    EXPECT_EQ(follower.held(), run_.id(held));
    EXPECT_EQ(memory_.Difference(run_.at(held)), "");
    return status;
  }

  PublishedRun run_;
  EngineMemory memory_{run_.table(), Layout::kWhole};
};
INSTANTIATE_TEST_SUITE_P(Modes, DamagedFilesTest,
                         testing::Values(ReadMode::kMap, ReadMode::kRead),
                         [](const auto& test) {
                           return test.param == ReadMode::kMap ? "Mapped"
                                                               : "Read";
                         });

TEST_P(DamagedFilesTest, AFlippedByteOfASegmentIsFoundBeforeThePause) {
  const auto follower = Holding(3);
  for (const std::string& file : DataFilesOf(run_.StepPath(5))) {
    const std::uint64_t size = fs::file_size(file);
    for (const std::uint64_t offset : {std::uint64_t{0}, size / 2, size - 1}) {
      FlipByte(file, offset);
      const absl::Status status = ExpectRefused(*follower, 3);
      EXPECT_TRUE(absl::IsDataLoss(status)) << status;
      EXPECT_THAT(std::string(status.message()),
                  HasSubstr(fs::path(file).filename()));
      FlipByte(file, offset);
    }
  }
  ASSERT_TRUE(follower->Update().ok());
  EXPECT_EQ(memory_.Difference(run_.at(6)), "");
}

// Report 17: v5 is good, v6 lacks a part; nothing may have changed.
TEST_P(DamagedFilesTest, AMissingSegmentIsFoundBeforeThePause) {
  const auto follower = Holding(4);
  const std::string file = DataFilesOf(run_.StepPath(6)).front();
  fs::rename(file, file + ".away");
  const absl::Status status = ExpectRefused(*follower, 4);
  EXPECT_TRUE(absl::IsUnavailable(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("waited"));
  fs::rename(file + ".away", file);
  ASSERT_TRUE(follower->Update().ok());
  EXPECT_EQ(memory_.Difference(run_.at(6)), "");
}

// Report 43: a mapped file that became shorter is a SIGBUS.
TEST_P(DamagedFilesTest, ATruncatedOrExtendedSegmentIsRefused) {
  const auto follower = Holding(5);
  const std::string file = DataFilesOf(run_.StepPath(6)).front();
  const std::uint64_t size = fs::file_size(file);
  fs::resize_file(file, size - 64);
  absl::Status status = ExpectRefused(*follower, 5);
  EXPECT_TRUE(absl::IsUnavailable(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("file size in bytes"));
  fs::resize_file(file, size + 64);
  status = ExpectRefused(*follower, 5);
  EXPECT_TRUE(absl::IsDataLoss(status)) << status;
}

TEST_P(DamagedFilesTest, SwappedSegmentsAndReplayedOnesAreRefused) {
  const auto follower = Holding(5);
  // The same file of another step, if of equal size; else padded to it.
  const std::string file = DataFilesOf(run_.StepPath(6)).front();
  const std::uint64_t size = fs::file_size(file);
  fs::copy_file(file, file + ".kept");
  fs::copy_file(DataFilesOf(run_.StepPath(5)).front(), file,
                fs::copy_options::overwrite_existing);
  fs::resize_file(file, size);
  EXPECT_TRUE(absl::IsDataLoss(ExpectRefused(*follower, 5)));
  fs::rename(file + ".kept", file);
  ASSERT_TRUE(follower->Update().ok());
}

TEST_P(DamagedFilesTest, ASymbolicLinkInPlaceOfASegmentIsRefused) {
  const auto follower = Holding(5);
  const std::string file = DataFilesOf(run_.StepPath(6)).front();
  fs::rename(file, run_.path() + "/elsewhere");
  fs::create_symlink(run_.path() + "/elsewhere", file);
  EXPECT_TRUE(absl::IsDataLoss(ExpectRefused(*follower, 5)));
}

// Report 16, 47: a step that HEAD promises and that is damaged is an error, not
// a reason to serve old weights in silence.
TEST_P(DamagedFilesTest, ADamagedNewestStepIsAnErrorNotSilence) {
  const auto follower = Holding(6);
  run_.Publish(7);
  const std::string manifest = run_.StepPath(7) + "/MANIFEST";
  FlipByte(manifest, fs::file_size(manifest) / 2);
  EXPECT_TRUE(absl::IsDataLoss(ExpectRefused(*follower, 6)));
  FlipByte(manifest, fs::file_size(manifest) / 2);
  const std::string commit = run_.StepPath(7) + "/COMMIT";
  FlipByte(commit, 20);
  EXPECT_TRUE(absl::IsDataLoss(ExpectRefused(*follower, 6)));
  FlipByte(commit, 20);
  fs::rename(manifest, manifest + ".away");
  EXPECT_TRUE(absl::IsDataLoss(ExpectRefused(*follower, 6)));
  fs::rename(manifest + ".away", manifest);
  fs::rename(commit, commit + ".away");
  const absl::Status status = ExpectRefused(*follower, 6);
  EXPECT_THAT(std::string(status.message()), HasSubstr("HEAD names v7"));
  fs::rename(commit + ".away", commit);
  ASSERT_TRUE(follower->Update().ok());
}

// Report 45: step_7 is there but unfinished; joining takes v6.
TEST_P(DamagedFilesTest, JoinTakesTheNewestCommittedStep) {
  fs::create_directory(run_.StepPath(7));
  memory_.Fill(std::byte{1});
  const auto follower = run_.Open(memory_, run_.Options(GetParam()));
  const auto result = follower->Join();
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->version, run_.id(6));
}

// Report 9: markers of an earlier run in the same directory.
TEST_P(DamagedFilesTest, StepsOfAnotherRunAreNeverUsed) {
  PublishedRun other(5);
  other.PublishUpTo(9);
  const auto follower = Holding(6);
  fs::copy(other.StepPath(9), run_.StepPath(9), fs::copy_options::recursive);
  const auto unchanged = follower->Update();
  ASSERT_TRUE(unchanged.ok()) << unchanged.status();
  EXPECT_FALSE(unchanged->changed);
  memory_.Fill(std::byte{1});
  const auto joiner = run_.Open(memory_, run_.Options(GetParam()));
  const auto joined = joiner->Join();
  ASSERT_TRUE(joined.ok()) << joined.status();
  EXPECT_EQ(joined->version, run_.id(6));
  // HEAD of another run is no hint at all.
  fs::copy_file(other.path() + "/HEAD", run_.path() + "/HEAD",
                fs::copy_options::overwrite_existing);
  run_.Publish(7);
  const auto updated = follower->Update();
  ASSERT_TRUE(updated.ok()) << updated.status();
  EXPECT_EQ(updated->version, run_.id(7));
}

TEST_P(DamagedFilesTest, AMissingOrStaleHeadIsOnlyAHint) {
  const auto follower = Holding(4);
  fs::copy_file(run_.path() + "/HEAD", run_.path() + "/HEAD.old");
  run_.PublishUpTo(7);
  fs::remove(run_.path() + "/HEAD");
  ASSERT_TRUE(follower->Update().ok());
  EXPECT_EQ(memory_.Difference(run_.at(7)), "");
  // Replayed: HEAD names v6 again. v7 is the truth.
  fs::rename(run_.path() + "/HEAD.old", run_.path() + "/HEAD");
  const auto result = follower->Update();
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_FALSE(result->changed);
  EXPECT_EQ(follower->held(), run_.id(7));
}

TEST_P(DamagedFilesTest, GoingBackWithinAnEpochIsAnError) {
  const auto follower = Holding(6);
  fs::remove_all(run_.StepPath(6));
  fs::remove_all(run_.StepPath(5));
  fs::remove(run_.path() + "/HEAD");
  const absl::Status status = ExpectRefused(*follower, 6);
  EXPECT_TRUE(absl::IsDataLoss(status)) << status;
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("went back within epoch"));
}

// Report 7: two trainers go on from one version; both call theirs v7.
TEST_P(DamagedFilesTest, AStepOnAForkedBaseSupersedesAndIsNeverApplied) {
  const std::string fork = run_.path() + ".fork";
  fs::copy(run_.path(), fork, fs::copy_options::recursive);
  run_.ResumeAt(6, 50);
  run_.Publish(7);
  memory_.Load(run_.at(7));
  FollowerOptions options = run_.Options(GetParam());
  options.directory_interval = std::chrono::milliseconds(0);
  const auto follower = run_.Open(memory_, options);
  ASSERT_TRUE(follower->VerifyHeld(7).ok());

  // The other branch has the same epoch number and another v7.
  PublishedRun other;
  for (auto& [name, bytes] : other.weights()) bytes = run_.at(6).at(name);
  WriterOptions writer_options;
  writer_options.store_path = fork;
  auto writer = SnapshotWriter::Open(writer_options, other.Tensors(), 6);
  ASSERT_TRUE(writer.ok()) << writer.status();
  for (const std::uint64_t step : {7, 8}) {
    other.Train(0.1);
    ASSERT_TRUE((*writer)->Publish(step).ok());
  }
  const Store& forked = (*writer)->store_writer().store();
  fs::copy(forked.StepPath(8), run_.StepPath(8), fs::copy_options::recursive);
  const absl::Status status = follower->Update().status();
  EXPECT_FALSE(status.ok());
  EXPECT_THAT(std::string(status.message()), HasSubstr("fork"));
  EXPECT_EQ(follower->state(), FollowerState::kSuperseded);
  EXPECT_EQ(follower->held(), run_.id(7));
  EXPECT_EQ(memory_.Difference(run_.at(7)), "");
}

// Report 12: a chain with a hole.
TEST_P(DamagedFilesTest, AHoleInTheChainIsPassedOverThroughAnAnchorOrNamed) {
  fs::remove_all(run_.StepPath(5));
  const auto follower = Holding(4);
  fs::rename(run_.AnchorPath(6), run_.path() + "/anchor.away");
  const absl::Status status = ExpectRefused(*follower, 4);
  EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("its base v5"));
  EngineMemory other(run_.table(), Layout::kWhole);
  const auto joiner = run_.Open(other, run_.Options(GetParam()));
  EXPECT_TRUE(absl::IsFailedPrecondition(joiner->Join().status()));
  EXPECT_EQ(joiner->state(), FollowerState::kEmpty);
  fs::rename(run_.path() + "/anchor.away", run_.AnchorPath(6));
  const auto result = follower->Update();
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_TRUE(result->joined);
  EXPECT_EQ(memory_.Difference(run_.at(6)), "");
}

// Report 49: a damaged anchor is passed over for an older one.
TEST_P(DamagedFilesTest, ADamagedAnchorIsPassedOverForAnOlderOne) {
  struct Damage {
    const char* name;
    std::function<void(const std::string& file)> harm;
  };
  const Damage damages[] = {
      {"flipped", [](const std::string& f) { FlipByte(f, 4096); }},
      {"missing", [](const std::string& f) { fs::remove(f); }},
      {"short", [](const std::string& f) { fs::resize_file(f, 5000); }},
      {"long",
       [](const std::string& f) { fs::resize_file(f, fs::file_size(f) + 1); }},
  };
  for (const Damage& damage : damages) {
    SCOPED_TRACE(damage.name);
    const std::string anchor = run_.AnchorPath(6);
    fs::copy(anchor, anchor + ".kept", fs::copy_options::recursive);
    damage.harm(DataFilesOf(anchor).back());
    memory_.Fill(std::byte{1});
    int pauses = 0;
    FollowerOptions options = run_.Options(GetParam());
    options.pause = [&] {
      ++pauses;
      return absl::OkStatus();
    };
    const auto follower = run_.Open(memory_, options);
    const auto result = follower->Join();
    ASSERT_TRUE(result.ok()) << result.status();
    EXPECT_EQ(result->deltas, 3u);  // from v3's anchor
    EXPECT_EQ(pauses, 1);
    EXPECT_EQ(memory_.Difference(run_.at(6)), "");
    fs::remove_all(anchor);
    fs::rename(anchor + ".kept", anchor);
  }
}

TEST_P(DamagedFilesTest, WithoutASoundAnchorJoinFailsAndSaysWhy) {
  for (const std::uint64_t step : {0, 3, 6}) {
    FlipByte(DataFilesOf(run_.AnchorPath(step)).front(), 4096);
  }
  memory_.Fill(std::byte{1});
  const auto follower = run_.Open(memory_, run_.Options(GetParam()));
  const absl::Status status = follower->Join().status();
  EXPECT_TRUE(absl::IsDataLoss(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("no older anchor"));
  EXPECT_EQ(follower->state(), FollowerState::kPoisoned);
  FlipByte(DataFilesOf(run_.AnchorPath(3)).front(), 4096);
  ASSERT_TRUE(follower->Join().ok());
  EXPECT_EQ(memory_.Difference(run_.at(6)), "");
}

// Report 54: retention removed what this reader still needs.
TEST_P(DamagedFilesTest, APrunedStepIsCalledPrunedAndTheNextUpdateRejoins) {
  memory_.Load(run_.at(4));
  FollowerOptions options = run_.Options(GetParam());
  FaultFileSystem faults;
  options.fs = &faults;
  const auto follower = run_.Open(memory_, options);
  ASSERT_TRUE(follower->VerifyHeld(4).ok());
  // gc strikes between plan and read: v5 vanishes when its segment is opened,
  // and the trainer has moved on.
  faults.set_script([&](const Operation& operation) {
    if (operation.kind == FileOperation::kOpenForRead &&
        operation.path.find("step_00000005/delta") != std::string::npos) {
      fs::remove_all(run_.StepPath(5));
    }
    return Fault::None();
  });
  const absl::Status status = ExpectRefused(*follower, 4);
  EXPECT_TRUE(absl::IsNotFound(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("pruned"));
  faults.set_script(nullptr);
  const auto result = follower->Update();
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_TRUE(result->joined);
  EXPECT_EQ(memory_.Difference(run_.at(6)), "");
}

TEST_P(DamagedFilesTest, AnotherStoreIsNoStore) {
  TempDirectory empty;
  FollowerOptions options = run_.Options();
  options.store_path = empty.path();
  EXPECT_TRUE(
      absl::IsNotFound(Follower::Open(options, memory_.sets()).status()));
}

}  // namespace
}  // namespace kedge
