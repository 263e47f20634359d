// Goal: what the writer publishes is the trainer's weights, bit for bit, whole
// or not at all, whatever operation fails. Method: small models through a file
// system that breaks one operation at a time; after each, a reader written from
// format/ alone looks at the store.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cerrno>
#include <cstring>
#include <filesystem>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "kedge/engine/io/store.h"
#include "kedge/format/layout.h"
#include "kedge/format/limits.h"
#include "kedge/tests/support/fault_file_system.h"
#include "kedge/tests/support/sanitized.h"
#include "kedge/tests/support/temp_directory.h"
#include "kedge/tests/support/test_model.h"
#include "kedge/writer/retention.h"
#include "kedge/writer/snapshot_writer.h"

namespace kedge {
namespace {

using ::testing::HasSubstr;

std::string Text(const absl::Status& status) { return status.ToString(); }

WriterOptions Options(const TempDirectory& temp, FileSystem* fs = nullptr) {
  WriterOptions options;
  options.store_path = temp.Join("store");
  options.fs = fs;
  options.io_threads = 2;
  options.encode_threads = 2;
  options.slice_units = 5000;  // several slices a tensor
  return options;
}

InitOptions Init() {
  InitOptions init;
  init.metadata = {{"model", "test"}};
  return init;
}

std::unique_ptr<SnapshotWriter> Create(const WriterOptions& options,
                                       const TestModel& model) {
  auto writer = SnapshotWriter::Create(options, Init(), model.Tensors());
  EXPECT_TRUE(writer.ok()) << writer.status();
  return writer.ok() ? *std::move(writer) : nullptr;
}

// The newest version of a store and its content.
struct Seen {
  std::uint64_t step = 0;
  ModelBytes model;
};
absl::StatusOr<Seen> Look(const std::string& path) {
  auto store = Store::Open(PosixFileSystem(), path);
  if (!store.ok()) return store.status();
  auto step = (*store)->Newest();
  if (!step.ok()) return step.status();
  auto model = ReadModel(**store, *step);
  if (!model.ok()) return model.status();
  return Seen{(*step)->id.step, *std::move(model)};
}

TEST(SnapshotWriterTest, EveryVersionReadsBackBitForBit) {
  TempDirectory temp;
  TestModel model(1);
  const WriterOptions options = Options(temp);
  auto writer = Create(options, model);
  ASSERT_NE(writer, nullptr);
  std::vector<ModelBytes> versions = {model.Bytes()};
  const double fractions[] = {0.01, 0.0, 0.3, 1.0, 0.001, 0.05};
  for (std::uint64_t step = 1; step <= 6; ++step) {
    if (step != 2) model.Step(fractions[step - 1]);  // v2 changes nothing
    versions.push_back(model.Bytes());
    PublishOptions publish;
    publish.anchor = step == 3;
    const auto result = writer->Publish(step, publish);
    ASSERT_TRUE(result.ok()) << result.status();
    EXPECT_TRUE(result->anchor_status.ok()) << result->anchor_status;
    EXPECT_THAT(result->warnings, ::testing::IsEmpty());
    EXPECT_EQ(result->nnz == 0, step == 2);
    EXPECT_EQ(result->anchor_bytes > 0, step == 3);
  }
  auto store = Store::Open(PosixFileSystem(), options.store_path);
  ASSERT_TRUE(store.ok());
  for (std::uint64_t step = 0; step <= 6; ++step) {
    SCOPED_TRACE(step);
    const auto published = (*store)->ReadStep(step);
    ASSERT_TRUE(published.ok()) << published.status();
    const auto read = ReadModel(**store, *published);
    ASSERT_TRUE(read.ok()) << read.status();
    EXPECT_EQ(*read, versions[step]);
  }
  const auto head = (*store)->ReadHead();
  ASSERT_TRUE(head.ok());
  EXPECT_EQ(head->step, 6u);
}

TEST(SnapshotWriterTest, OneThreadAndManyPublishTheSameState) {
  Hash128 digests[2];
  for (int threads : {1, 4}) {
    TempDirectory temp;
    TestModel model(2);
    WriterOptions options = Options(temp);
    options.encode_threads = threads;
    InitOptions init = Init();
    init.l61_seed = 42;
    auto writer = SnapshotWriter::Create(options, init, model.Tensors());
    ASSERT_TRUE(writer.ok()) << writer.status();
    model.Step(0.02);
    ASSERT_TRUE((*writer)->Publish(1).ok());
    auto store = Store::Open(PosixFileSystem(), options.store_path);
    ASSERT_TRUE(store.ok());
    digests[threads == 4] = (*(*store)->ReadStep(1))->manifest.digest_after;
  }
  EXPECT_EQ(digests[0], digests[1]);
}

// Report: a step without changes was skipped, and versions diverged.
TEST(SnapshotWriterTest, EmptyDeltaIsAVersion) {
  TempDirectory temp;
  TestModel model(3);
  auto writer = Create(Options(temp), model);
  ASSERT_NE(writer, nullptr);
  const VersionId before = writer->held();
  const auto result = writer->Publish(5);
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->nnz, 0u);
  EXPECT_NE(writer->held(), before);
  EXPECT_EQ(Look(Options(temp).store_path)->step, 5u);
}

TEST(SnapshotWriterTest, StepsMayBeSkippedButNeverGoBack) {
  TempDirectory temp;
  TestModel model(4);
  auto writer = Create(Options(temp), model);
  ASSERT_TRUE(writer->Publish(7).ok());
  for (const std::uint64_t step :
       {std::uint64_t{7}, std::uint64_t{3}, std::uint64_t{0}, kMaxStep + 1}) {
    const auto result = writer->Publish(step);
    EXPECT_EQ(result.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(Text(result.status()), HasSubstr("expected 8 to"));
  }
  EXPECT_TRUE(writer->Publish(8).ok());
}

// Report: -0.0 to +0.0 was never sent, NaN was sent for ever.
TEST(SnapshotWriterTest, ComparesBitsNotFloats) {
  TempDirectory temp;
  std::vector<std::uint16_t> weights(300, 0x8000);  // -0.0
  weights[100] = 0x7fc0;                            // NaN, unchanged
  weights[200] = 0x7fc1;
  TrainerTensor tensor;
  tensor.name = "w";
  tensor.shape = {300};
  tensor.data = weights.data();
  auto writer = SnapshotWriter::Create(Options(temp), {}, {tensor});
  ASSERT_TRUE(writer.ok()) << writer.status();
  EXPECT_EQ((*writer)->Publish(1)->nnz, 0u);
  weights[0] = 0x0000;    // +0.0
  weights[200] = 0xffc1;  // another NaN
  EXPECT_EQ((*writer)->Publish(2)->nnz, 2u);
  const auto seen = Look(Options(temp).store_path);
  ASSERT_TRUE(seen.ok()) << seen.status();
  EXPECT_EQ(std::memcmp(seen->model.at("w").data(), weights.data(), 600), 0);
}

TEST(SnapshotWriterTest, WrongModelIsRefusedWithEveryNameCounted) {
  TempDirectory temp;
  TestModel model(5);
  Create(Options(temp), model);
  auto tensors = model.Tensors();
  // Report: wrapped names matched nothing and no error was raised.
  for (TrainerTensor& tensor : tensors) {
    tensor.name = "_orig_mod." + tensor.name;
    if (!tensor.tied_to.empty()) tensor.tied_to = "_orig_mod." + tensor.tied_to;
  }
  auto opened = SnapshotWriter::Open(Options(temp), tensors);
  EXPECT_EQ(opened.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(Text(opened.status()),
              HasSubstr(absl::StrCat("in ", 2 * tensors.size(), " tensors")));
  EXPECT_THAT(Text(opened.status()), HasSubstr("conv.weight: missing"));

  tensors = model.Tensors();
  tensors[2].dtype = DType::kF16;
  tensors[3].shape = {130, 150};
  opened = SnapshotWriter::Open(Options(temp), tensors);
  EXPECT_THAT(Text(opened.status()), HasSubstr("in 2 tensors"));
  EXPECT_THAT(
      Text(opened.status()),
      HasSubstr("mlp.gate.weight: expected bf16 [150, 130], found f16"));
  tensors = model.Tensors();
  tensors.push_back(tensors[0]);
  opened = SnapshotWriter::Open(Options(temp), tensors);
  EXPECT_THAT(Text(opened.status()), HasSubstr("given twice"));
}

// Report: after a resume the first delta was made from the wrong weights.
TEST(SnapshotWriterTest, OpenRefusesWeightsThatAreNotTheVersion) {
  TempDirectory temp;
  TestModel model(6);
  auto writer = Create(Options(temp), model);
  model.Step(0.01);
  ASSERT_TRUE(writer->Publish(1).ok());
  writer.reset();
  model.StepOne("norm.weight", 17);
  const auto before = PosixFileSystem()->List(temp.Join("store/epochs"));
  const auto opened = SnapshotWriter::Open(Options(temp), model.Tensors());
  EXPECT_EQ(opened.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(Text(opened.status()), HasSubstr("norm.weight: L61: expected"));
  EXPECT_THAT(Text(opened.status()), HasSubstr("in 1 of"));
  // Nothing was fenced by an open that failed.
  EXPECT_EQ(*PosixFileSystem()->List(temp.Join("store/epochs")), *before);
}

TEST(SnapshotWriterTest, AnchorOfChangedWeightsFailsAndNamesTheTensor) {
  TempDirectory temp;
  TestModel model(7);
  const WriterOptions options = Options(temp);
  auto table = MakeTable(model.Tensors());
  ASSERT_TRUE(table.ok());
  auto source = MemorySource::Bind(*table, model.Tensors());
  ASSERT_TRUE(InitStore(options, Init(), *table, *source).ok());
  auto writer = StoreWriter::Open(options);
  ASSERT_TRUE(writer.ok()) << writer.status();
  TestModel before(7);
  auto old_source = MemorySource::Bind(*table, before.Tensors());
  model.Step(0.01);
  auto result = (*writer)->PublishDelta(1, *old_source, *source, nullptr);
  ASSERT_TRUE(result.ok()) << result.status();
  model.StepOne("mlp.up.weight", 999);
  const absl::Status anchor = (*writer)->AddAnchor(*source, &*result);
  EXPECT_EQ(anchor.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(Text(anchor), HasSubstr("mlp.up.weight: L61"));
  EXPECT_FALSE((*writer)->store().HasAnchor(1));
  EXPECT_THAT(*PosixFileSystem()->List(temp.Join("store/.staging")),
              ::testing::IsEmpty());
}

TEST(SnapshotWriterTest, ReplacedTensorsTravelAsAnAnchor) {
  TempDirectory temp;
  TestModel model(8);
  auto writer = Create(Options(temp), model);
  model.Step(0.01);
  ASSERT_TRUE(writer->Publish(1).ok());
  // Report: a router bias became bf16 in mid-run.
  auto tensors = model.Tensors();
  std::vector<std::uint16_t> bias(33, 0x3f80);
  for (TrainerTensor& tensor : tensors) {
    if (tensor.name == "router.bias") {
      tensor.dtype = DType::kBf16;
      tensor.data = bias.data();
    }
  }
  const auto result = writer->ReplaceTensors(2, tensors, {{"k", "v"}});
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_GT(result->anchor_bytes, 0u);
  bias[3] = 0;
  ASSERT_TRUE(writer->Publish(3).ok());
  const auto seen = Look(Options(temp).store_path);
  ASSERT_TRUE(seen.ok()) << seen.status();
  EXPECT_EQ(seen->step, 3u);
  EXPECT_EQ(std::memcmp(seen->model.at("router.bias").data(), bias.data(), 66),
            0);
}

TEST(SnapshotWriterTest, MetadataTravelOnlyWhenTheyChange) {
  TempDirectory temp;
  TestModel model(9);
  auto writer = Create(Options(temp), model);
  const Metadata changed = {{"lr", "1e-6"}, {"model", "test"}};
  ASSERT_TRUE(writer->Publish(1).ok());
  PublishOptions options;
  options.metadata = &changed;
  ASSERT_TRUE(writer->Publish(2, options).ok());
  ASSERT_TRUE(writer->Publish(3, options).ok());
  auto store = Store::Open(PosixFileSystem(), Options(temp).store_path);
  ASSERT_TRUE(store.ok());
  const Metadata expected[] = {Init().metadata, Init().metadata, changed,
                               changed};
  for (std::uint64_t step = 0; step <= 3; ++step) {
    const auto published = (*store)->ReadStep(step);
    ASSERT_TRUE(published.ok());
    EXPECT_EQ((*store)->StateAt(*published)->metadata, expected[step]);
    if (step > 0) {
      EXPECT_EQ((*published)->manifest.metadata_changed, step == 2);
    }
  }
}

TEST(InitStoreTest, ExternalV0RecordsSumsWithoutAnAnchor) {
  TempDirectory temp;
  TestModel model(10);
  InitOptions init = Init();
  init.external_v0 = true;
  auto writer = SnapshotWriter::Create(Options(temp), init, model.Tensors());
  ASSERT_TRUE(writer.ok()) << writer.status();
  EXPECT_FALSE((*writer)->store_writer().store().HasAnchor(0));
  TempDirectory other;
  init.l61_seed = (*writer)->store_writer().store().info().l61_seed;
  init.external_v0 = false;
  auto with_anchor =
      SnapshotWriter::Create(Options(other), init, model.Tensors());
  ASSERT_TRUE(with_anchor.ok());
  EXPECT_EQ((*writer)->store_writer().store().info().v0_digest,
            (*with_anchor)->store_writer().store().info().v0_digest);
}

TEST(InitStoreTest, RefusesADirectoryThatHoldsAnything) {
  TempDirectory temp;
  TestModel model(11);
  ASSERT_TRUE(PosixFileSystem()->MakeDirectory(temp.Join("store")).ok());
  ASSERT_TRUE(
      WriteNewFile(*PosixFileSystem(), temp.Join("store/notes"), {}).ok());
  const auto writer =
      SnapshotWriter::Create(Options(temp), Init(), model.Tensors());
  EXPECT_EQ(writer.status().code(), absl::StatusCode::kAlreadyExists);
  EXPECT_THAT(Text(writer.status()), HasSubstr("\"notes\""));
}

TEST(InitStoreTest, AStoreIsThereWholeOrNotAtAllAfterEveryOperation) {
  TestModel model(12);
  std::int64_t seen_stores = 0;
  TempDirectory temp;
  FaultFileSystem fs(PosixFileSystem(), temp.path());
  const WriterOptions options = Options(temp, &fs);
  auto table = MakeTable(model.Tensors());
  auto source = MemorySource::Bind(*table, model.Tensors());
  fs.set_after_each([&](const Operation& operation) {
    const auto seen = Look(options.store_path);
    if (absl::IsNotFound(seen.status())) return;
    ASSERT_TRUE(seen.ok()) << operation.ToString() << ": " << seen.status();
    EXPECT_EQ(seen->model, model.Bytes()) << operation.ToString();
    ++seen_stores;
  });
  ASSERT_TRUE(InitStore(options, Init(), *table, *source).ok());
  EXPECT_GT(seen_stores, 0);
}

// ------------------------------------------------------------ one fault each

// A store at v1 with an anchor, a writer on a faulty file system, and the next
// step in memory.
class PublishFaultTest : public ::testing::Test {
 protected:
  void Start(std::uint64_t seed) {
    fs_.Reset();
    writer_.reset();
    temp_ = std::make_unique<TempDirectory>();
    model_ = std::make_unique<TestModel>(seed);
    WriterOptions options = Options(*temp_, &fs_);
    options.io_threads = 1;
    options.encode_threads = 1;
    path_ = options.store_path;
    auto writer = SnapshotWriter::Create(options, Init(), model_->Tensors());
    ASSERT_TRUE(writer.ok()) << writer.status();
    writer_ = *std::move(writer);
    model_->Step(0.01);
    ASSERT_TRUE(writer_->Publish(1).ok());
    old_ = model_->Bytes();
    model_->Step(0.01);
    new_ = model_->Bytes();
    fs_.Reset();
  }
  absl::StatusOr<PublishResult> Publish() {
    PublishOptions options;
    options.anchor = true;
    return writer_->Publish(2, options);
  }
  // Old or new, whole; which one?
  std::uint64_t LookBoth(const std::string& what) {
    const auto seen = Look(path_);
    EXPECT_TRUE(seen.ok()) << what << ": " << seen.status();
    if (!seen.ok()) return 0;
    EXPECT_TRUE(seen->step == 1 || seen->step == 2) << what;
    EXPECT_TRUE(seen->model == (seen->step == 1 ? old_ : new_))
        << what << ": v" << seen->step << " has other bytes";
    return seen->step;
  }
  std::int64_t OperationCount() {
    Start(100);
    EXPECT_TRUE(Publish().ok());
    return fs_.operation_count();
  }

  FaultFileSystem fs_;
  std::unique_ptr<TempDirectory> temp_;
  std::unique_ptr<TestModel> model_;
  std::unique_ptr<SnapshotWriter> writer_;
  std::string path_;
  ModelBytes old_;
  ModelBytes new_;
};

TEST_F(PublishFaultTest, AfterEveryOperationAReaderSeesOldOrNew) {
  Start(100);
  std::uint64_t newest = 1;
  std::int64_t changes = 0;
  bool anchor = false;
  fs_.set_after_each([&](const Operation& operation) {
    const std::uint64_t step = LookBoth(operation.ToString());
    EXPECT_GE(step, newest) << operation.ToString();
    changes += step != newest;
    newest = step;
    // The anchor is there whole or not at all, too.
    auto store = Store::Open(PosixFileSystem(), path_);
    ASSERT_TRUE(store.ok());
    const auto published = (*store)->ReadStep(step);
    ASSERT_TRUE(published.ok());
    const auto read = (*store)->ReadAnchor((*published)->id);
    if (step == 2) {
      EXPECT_TRUE(read.ok() || absl::IsNotFound(read.status()))
          << operation.ToString() << ": " << read.status();
      EXPECT_TRUE(read.ok() || !anchor);
      anchor = read.ok();
    }
  });
  ASSERT_TRUE(Publish().ok());
  EXPECT_EQ(newest, 2u);
  EXPECT_EQ(changes, 1);
  EXPECT_TRUE(anchor);
}

TEST_F(PublishFaultTest, EveryFaultLeavesOldOrNewAndOneRetryConverges) {
  const std::int64_t count = OperationCount();
  ASSERT_GT(count, 20);
  const std::pair<const char*, Fault> faults[] = {
      {"EIO", Fault::Fail(EIO)},
      {"ENOSPC", Fault::Fail(ENOSPC)},
      {"ESTALE after", Fault::PerformThenFail(ESTALE)},
      {"short", Fault::Shorten()},
      {"torn", Fault::Tear(EIO)},
  };
  for (const auto& [name, fault] : faults) {
    for (std::int64_t k = 1; k <= count; k += kFaultStride) {
      Start(100);
      fs_.set_script(FaultAt(k, fault));
      const auto result = Publish();
      const std::string what =
          absl::StrCat(name, " at ", fs_.log()[k - 1].ToString());
      SCOPED_TRACE(what);
      fs_.Reset();
      const std::uint64_t seen = LookBoth(what);
      // What is told is what is so.
      if (result.ok()) {
        EXPECT_EQ(seen, 2u);
        EXPECT_EQ(writer_->held().step, 2u);
      } else {
        EXPECT_EQ(writer_->held().step, 1u);
        EXPECT_THAT(Text(result.status()), HasSubstr("/"));  // names a path
      }
      // Once more, or on to the next step: both work.
      auto again = result.ok() ? writer_->Publish(3) : writer_->Publish(2);
      if (absl::IsUnavailable(again.status()) ||
          absl::IsAlreadyExists(again.status())) {
        // Outcome unknown: open anew and look.
        WriterOptions options = Options(*temp_, &fs_);
        auto reopened = seen == 2
                            ? SnapshotWriter::Open(options, model_->Tensors())
                            : absl::StatusOr<std::unique_ptr<SnapshotWriter>>(
                                  absl::InternalError("v1 is not in memory"));
        ASSERT_TRUE(reopened.ok()) << reopened.status();
        again = (*reopened)->Publish(3);
      }
      ASSERT_TRUE(again.ok()) << again.status();
      const auto after = Look(path_);
      ASSERT_TRUE(after.ok()) << after.status();
      EXPECT_EQ(after->model, new_);
    }
  }
}

TEST_F(PublishFaultTest, AWriterThatDiesAnywhereLeavesAStoreThatOpens) {
  const std::int64_t count = OperationCount();
  for (std::int64_t k = 0; k <= count; k += kFaultStride) {
    Start(100);
    fs_.set_script(StopAfter(k));
    (void)Publish();
    writer_.reset();
    fs_.Reset();
    SCOPED_TRACE(k);
    const std::uint64_t seen = LookBoth(absl::StrCat("died after ", k));
    TestModel restored(100);
    restored.Step(0.01);
    if (seen == 2) restored.Step(0.01);
    ASSERT_EQ(restored.Bytes(), seen == 2 ? new_ : old_);
    auto writer =
        SnapshotWriter::Open(Options(*temp_, &fs_), restored.Tensors());
    ASSERT_TRUE(writer.ok()) << writer.status();
    restored.Step(0.01);
    ASSERT_TRUE((*writer)->Publish(seen + 1).ok());
    EXPECT_EQ(Look(path_)->model, restored.Bytes());
    // Nothing of the dead writer stays in the way.
    const auto staged =
        PosixFileSystem()->List(JoinPath(path_, kStagingDirectoryName));
    ASSERT_TRUE(staged.ok());
    for (const std::string& name : *staged) {
      EXPECT_FALSE(ParseStagingName(name).has_value()) << name;
    }
  }
}

// ------------------------------------------------------- epochs and retention

TEST(StoreWriterTest, TheLaterWriterFencesTheEarlier) {
  TempDirectory temp;
  TestModel model(20);
  auto first = Create(Options(temp), model);
  auto second = SnapshotWriter::Open(Options(temp), model.Tensors());
  ASSERT_TRUE(second.ok()) << second.status();
  model.Step(0.01);
  const auto late = first->Publish(1);
  EXPECT_EQ(late.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(Text(late.status()), HasSubstr("fenced by epoch 2"));
  EXPECT_TRUE((*second)->Publish(1).ok());
}

// An open that names no step must not give up what another writer publishes
// while it is on its way, at whatever moment.
TEST(StoreWriterTest, OpeningAtTheNewestNeverGivesUpAPublishedStep) {
  int taken_over = 0;
  int given_way = 0;
  bool reached = true;
  for (std::int64_t k = 1; reached; k += kFaultStride) {
    SCOPED_TRACE(absl::StrCat("operation ", k));
    TempDirectory temp;
    TestModel model(24);
    auto first = Create(Options(temp), model);
    const TestModel at_v0(24);
    FaultFileSystem fs(PosixFileSystem(), temp.path());
    WriterOptions options = Options(temp);
    options.fs = &fs;
    reached = false;
    absl::StatusOr<PublishResult> published = absl::UnknownError("not yet");
    fs.set_after_each([&](const Operation& operation) {
      if (operation.number != k) return;
      reached = true;
      model.Step(0.01);
      published = first->Publish(1);
    });
    auto second = SnapshotWriter::Open(options, at_v0.Tensors());
    fs.Reset();
    if (!reached) break;
    if (published.ok()) {
      ++given_way;
      ASSERT_FALSE(second.ok());
      ASSERT_EQ(Look(options.store_path)->step, 1u);
      ASSERT_TRUE(first->Publish(2).ok());  // goes on as if nothing had been
    } else {
      ++taken_over;
      ASSERT_EQ(published.status().code(),
                absl::StatusCode::kFailedPrecondition)
          << published.status();
      ASSERT_TRUE(second.ok()) << second.status();
      ASSERT_TRUE((*second)->Publish(1).ok());
    }
  }
  EXPECT_GT(given_way, 1);
  EXPECT_GT(taken_over, 1);
}

// A writer that is fenced in the middle of a publish says so, and what it may
// have renamed is in nobody's way.
TEST(StoreWriterTest, AWriterFencedInMidPublishFails) {
  int fenced = 0;
  bool reached = true;
  for (std::int64_t k = 1; reached; k += kFaultStride) {
    SCOPED_TRACE(absl::StrCat("operation ", k));
    TempDirectory temp;
    TestModel model(25);
    FaultFileSystem fs(PosixFileSystem(), temp.path());
    WriterOptions options = Options(temp);
    options.fs = &fs;
    auto first = Create(options, model);
    TestModel at_v0(25);
    model.Step(0.01);
    fs.Reset();
    reached = false;
    bool renamed = false;
    std::unique_ptr<SnapshotWriter> second;
    fs.set_after_each([&](const Operation& operation) {
      if (operation.kind == FileOperation::kRename &&
          absl::EndsWith(operation.to, StepDirectoryName(1))) {
        renamed = true;
      }
      if (operation.number != k) return;
      reached = true;
      auto opened = SnapshotWriter::Open(Options(temp), at_v0.Tensors(), 0);
      ASSERT_TRUE(opened.ok()) << opened.status();
      second = *std::move(opened);
    });
    const auto published = first->Publish(1);
    fs.Reset();
    if (!reached) break;
    if (!published.ok()) {
      ++fenced;
      // Unknown: what was to be renamed is gone, and so may be its target.
      ASSERT_THAT(
          Text(published.status()),
          testing::AnyOf(HasSubstr("fenced"), HasSubstr("outcome unknown")))
          << published.status();
      ASSERT_EQ(first->held().step, 0u);
    } else {
      // The new writer gave up a version that stood.
      ASSERT_TRUE(renamed);
    }
    at_v0.Step(0.2);
    const auto again = second->Publish(1);
    ASSERT_TRUE(again.ok()) << again.status();
    ASSERT_EQ(Look(options.store_path)->model, at_v0.Bytes());
  }
  EXPECT_GT(fenced, 3);
}

// Report: after a resume the versions of the lost run were still joined.
TEST(StoreWriterTest, ResumeMovesLaterStepsAway) {
  TempDirectory temp;
  TestModel model(21);
  auto writer = Create(Options(temp), model);
  TestModel resumed(21);
  for (std::uint64_t step = 1; step <= 4; ++step) {
    model.Step(0.01);
    if (step <= 2) resumed.Step(0.01);
    ASSERT_TRUE(writer->Publish(step).ok());
  }
  const VersionId lost = writer->held();
  auto again = SnapshotWriter::Open(Options(temp), resumed.Tensors(), 2);
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_EQ(Look(Options(temp).store_path)->step, 2u);
  resumed.Step(0.2);
  ASSERT_TRUE((*again)->Publish(3).ok());
  ASSERT_TRUE((*again)->Publish(4).ok());
  // The same number is another version.
  EXPECT_NE((*again)->held(), lost);
  EXPECT_EQ(Look(Options(temp).store_path)->model, resumed.Bytes());
  auto store = Store::Open(PosixFileSystem(), Options(temp).store_path);
  const auto newest = (*store)->Newest();
  EXPECT_EQ((*store)->FindChain(*newest, &lost)->anchor != nullptr, true);
}

TEST(StoreWriterTest, AStepOfAFencedEpochIsNoVersion) {
  TempDirectory temp;
  TestModel model(22);
  auto writer = Create(Options(temp), model);
  model.Step(0.01);
  ASSERT_TRUE(writer->Publish(1).ok());
  // A writer that was slow renames after it was fenced.
  const std::string step = temp.Join("store/step_00000001");
  ASSERT_TRUE(PosixFileSystem()->Rename(step, temp.Join("slow")).ok());
  TestModel v0(22);
  auto second = SnapshotWriter::Open(Options(temp), v0.Tensors());
  ASSERT_TRUE(second.ok()) << second.status();
  ASSERT_TRUE(PosixFileSystem()->Rename(temp.Join("slow"), step).ok());
  auto store = Store::Open(PosixFileSystem(), Options(temp).store_path);
  const auto read = (*store)->ReadStep(1);
  EXPECT_EQ(read.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(Text(read.status()), HasSubstr("epoch: expected 2, found 1"));
  EXPECT_EQ((*(*store)->Newest())->id.step, 0u);
}

// Report: retention cut chains, or never ran and filled the disk.
TEST(RetentionTest, KeepsWhatTheNewestAnchorsNeed) {
  TempDirectory temp;
  TestModel model(23);
  auto writer = Create(Options(temp), model);
  std::map<std::uint64_t, ModelBytes> versions;
  for (std::uint64_t step = 1; step <= 10; ++step) {
    model.Step(0.01);
    versions[step] = model.Bytes();
    PublishOptions publish;
    publish.anchor = step % 3 == 0;
    ASSERT_TRUE(writer->Publish(step, publish).ok());
  }
  GcOptions gc;
  gc.store_path = Options(temp).store_path;
  gc.grace = std::chrono::seconds(0);
  gc.keep_anchors = 2;
  gc.dry_run = true;
  auto report = CollectGarbage(gc);
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_EQ(report->oldest_kept_step, 6u);
  EXPECT_EQ(report->moved_steps,
            (std::vector<std::uint64_t>{0, 1, 2, 3, 4, 5}));
  auto store = Store::Open(PosixFileSystem(), gc.store_path);
  EXPECT_EQ((*store)->ListSteps()->size(), 11u);
  gc.dry_run = false;
  ASSERT_TRUE(CollectGarbage(gc).ok());
  EXPECT_EQ(*(*store)->ListSteps(),
            (std::vector<std::uint64_t>{6, 7, 8, 9, 10}));
  for (std::uint64_t step = 6; step <= 10; ++step) {
    const auto published = (*store)->ReadStep(step);
    ASSERT_TRUE(published.ok()) << published.status();
    const auto read = ReadModel(**store, *published);
    ASSERT_TRUE(read.ok()) << read.status();
    EXPECT_EQ(*read, versions[step]);
  }
  // The bytes go in a later gc.
  EXPECT_EQ(PosixFileSystem()->List(temp.Join("store/.trash"))->size(), 6u);
  ASSERT_TRUE(CollectGarbage(gc).ok());
  EXPECT_THAT(*PosixFileSystem()->List(temp.Join("store/.trash")),
              ::testing::IsEmpty());
  // The writer goes on.
  model.Step(0.01);
  EXPECT_TRUE(writer->Publish(11).ok());
}

TEST(RetentionTest, KeepsEverythingWithoutEnoughAnchors) {
  TempDirectory temp;
  TestModel model(24);
  auto writer = Create(Options(temp), model);
  ASSERT_TRUE(writer->Publish(1).ok());
  GcOptions gc;
  gc.store_path = Options(temp).store_path;
  gc.keep_anchors = 2;
  const auto report = CollectGarbage(gc);
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_THAT(report->moved_steps, ::testing::IsEmpty());
  gc.keep_anchors = 0;
  EXPECT_EQ(CollectGarbage(gc).status().code(),
            absl::StatusCode::kInvalidArgument);
}

// Report: pruning worked on the wrong root.
TEST(RetentionTest, RefusesADirectoryThatIsNoStore) {
  TempDirectory temp;
  GcOptions gc;
  gc.store_path = temp.path();
  EXPECT_EQ(CollectGarbage(gc).status().code(), absl::StatusCode::kNotFound);
}

TEST(RetentionTest, ThousandStepsStayBounded) {
  TempDirectory temp;
  std::vector<std::uint16_t> weights(1000);
  TrainerTensor tensor;
  tensor.name = "w";
  tensor.shape = {1000};
  tensor.data = weights.data();
  auto writer = SnapshotWriter::Create(Options(temp), {}, {tensor});
  ASSERT_TRUE(writer.ok());
  GcOptions gc;
  gc.store_path = Options(temp).store_path;
  gc.grace = std::chrono::seconds(0);
  std::size_t most = 0;
  for (std::uint64_t step = 1; step <= 300; ++step) {
    ++weights[step % 1000];
    PublishOptions publish;
    publish.anchor = step % 5 == 0;
    ASSERT_TRUE((*writer)->Publish(step, publish).ok());
    if (step % 5 == 0) {
      ASSERT_TRUE(CollectGarbage(gc).ok());
    }
    most =
        std::max(most, (*writer)->store_writer().store().ListSteps()->size());
  }
  EXPECT_LE(most, 12u);
}

TEST(RetentionTest, AWriterKeepsItsOwnStoreSmall) {
  TempDirectory temp;
  TestModel model(31);
  WriterOptions options = Options(temp);
  options.retention.emplace();
  options.retention->keep_anchors = 2;
  options.retention->grace = std::chrono::seconds(0);
  auto writer = Create(options, model);
  std::size_t most = 0;
  for (std::uint64_t step = 1; step <= 60; ++step) {
    model.Step(0.01);
    const auto result = writer->Publish(step, {.anchor = step % 3 == 0});
    ASSERT_TRUE(result.ok()) << result.status();
    ASSERT_TRUE(result->warnings.empty()) << result->warnings.front();
    most = std::max(most, writer->store_writer().store().ListSteps()->size());
  }
  EXPECT_LE(most, 7u);
  EXPECT_EQ(Look(options.store_path)->model, model.Bytes());
}

// Report: gc dropped the only anchor that could be loaded, because a newer one
// had a manifest.
TEST(RetentionTest, AnAnchorWhoseFilesAreNotAllThereKeepsTheOneBefore) {
  for (const bool missing : {false, true}) {
    TempDirectory temp;
    TestModel model(32);
    auto writer = Create(Options(temp), model);
    for (std::uint64_t step = 1; step <= 7; ++step) {
      model.Step(0.01);
      ASSERT_TRUE(writer->Publish(step, {.anchor = step % 3 == 0}).ok());
    }
    const std::string anchor = writer->store_writer().store().AnchorPath(6) +
                               "/" + DataFileName({FileKind::kAnchor, 0, 0});
    if (missing) {
      std::filesystem::remove(anchor);
    } else {
      std::filesystem::resize_file(anchor, 5000);
    }
    GcOptions gc;
    gc.store_path = Options(temp).store_path;
    gc.keep_anchors = 1;
    const auto report = CollectGarbage(gc);
    ASSERT_TRUE(report.ok()) << report.status();
    EXPECT_EQ(report->oldest_kept_step, 3u);
  }
}

// ----------------------------------------------------------------- proportion

TEST(PublishCostTest, SmallTensorsCostFewLargeWrites) {
  TempDirectory temp;
  FaultFileSystem fs(PosixFileSystem(), temp.path());
  std::vector<std::uint16_t> weights(20000 * 16);
  std::vector<TrainerTensor> tensors(20000);
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    tensors[i].name = absl::StrCat("t", i);
    tensors[i].shape = {16};
    tensors[i].data = &weights[16 * i];
  }
  WriterOptions options = Options(temp, &fs);
  auto writer = SnapshotWriter::Create(options, {}, tensors);
  ASSERT_TRUE(writer.ok()) << writer.status();
  // 20,000 slices of 4 KiB: 80 MB.
  EXPECT_LT(fs.count(FileOperation::kWrite), 30);
  for (std::size_t i = 0; i < weights.size(); i += 16) ++weights[i];
  fs.Reset();
  ASSERT_TRUE((*writer)->Publish(1).ok());
  EXPECT_LT(fs.operation_count(), 60) << fs.LogText();
  EXPECT_LT(fs.count(FileOperation::kWrite), 10);
}

TEST(PublishCostTest, OneChangeInALargeTensorCostsConstantBytes) {
  TempDirectory temp;
  FaultFileSystem fs(PosixFileSystem(), temp.path());
  for (const std::uint64_t rows : {1024, 8192}) {
    std::vector<std::uint16_t> weights(rows * 1024);
    TrainerTensor tensor;
    tensor.name = "w";
    tensor.shape = {rows, 1024};
    tensor.data = weights.data();
    WriterOptions options = Options(temp, &fs);
    options.store_path = temp.Join(absl::StrCat("store", rows));
    options.slice_units = std::uint64_t{1} << 24;
    InitOptions init;
    init.external_v0 = true;
    auto writer = SnapshotWriter::Create(options, init, {tensor});
    ASSERT_TRUE(writer.ok()) << writer.status();
    weights[weights.size() / 2] = 1;
    fs.Reset();
    ASSERT_TRUE((*writer)->Publish(1).ok());
    EXPECT_LT(fs.bytes_written(), 1500u) << rows;
  }
}

}  // namespace
}  // namespace kedge
