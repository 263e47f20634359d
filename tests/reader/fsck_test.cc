// Goal: fsck finds every kind of damage, names the file, and says nothing about
// a store that is well, also while it is published to, resumed and pruned.
//
// Method: small stores made by the real writer, held in memory, and damaged:
// every byte flipped, files cut, swapped, replayed, removed, taken from another
// run; and forged, so that hashes and COMMIT agree with the damage and only the
// rule under test is broken. Each id of the catalogue has a canary here.
// KEDGE_FSCK_ALL_BITS=1 flips all bits of each byte instead of one.

#include "kedge/reader/fsck.h"

#include <sys/stat.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <random>
#include <set>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kedge/engine/cpu/l61_sum.h"
#include "kedge/engine/io/lease.h"
#include "kedge/engine/io/store.h"
#include "kedge/format/codec.h"
#include "kedge/format/l61.h"
#include "kedge/format/layout.h"
#include "kedge/format/limits.h"
#include "kedge/reader/fsck_findings.h"
#include "kedge/reader/version_reader.h"
#include "kedge/tests/corpus/store_forge.h"
#include "kedge/tests/support/fault_file_system.h"
#include "kedge/tests/support/sanitized.h"
#include "kedge/tests/support/temp_directory.h"
#include "kedge/writer/retention.h"
#include "kedge/writer/snapshot_writer.h"

namespace kedge {
namespace {

using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::UnorderedElementsAre;

std::set<std::string> Ids(const FsckReport& report) {
  std::set<std::string> ids;
  for (const Finding& finding : report.findings) {
    ids.insert(std::string(finding.id));
  }
  return ids;
}

absl::StatusOr<FsckReport> Check(MemoryFileSystem& fs, bool deep = true) {
  FsckOptions options;
  options.store_path = MemoryFileSystem::kRoot;
  options.fs = &fs;
  options.deep = deep;
  options.io_threads = 1;
  options.settle_seconds = 0;  // nothing moves here
  return Fsck(options);
}

FsckReport MustCheck(MemoryFileSystem& fs, bool deep = true) {
  auto report = Check(fs, deep);
  EXPECT_TRUE(report.ok()) << report.status();
  return report.ok() ? *report : FsckReport();
}

FsckReport CheckPath(const std::string& path, bool deep = true,
                     double settle_seconds = 0) {
  FsckOptions options;
  options.store_path = path;
  options.deep = deep;
  options.io_threads = 2;
  options.settle_seconds = settle_seconds;
  auto report = Fsck(options);
  EXPECT_TRUE(report.ok()) << report.status();
  return report.ok() ? *report : FsckReport();
}

void Flip(std::vector<std::byte>& bytes, std::size_t at, int bit = 0) {
  bytes.at(at) ^= std::byte{static_cast<unsigned char>(1 << bit)};
}

// v0 and v3 have anchors, v5 is the newest.
const MemoryFileSystem& Pristine() {
  static const MemoryFileSystem* const store =
      new MemoryFileSystem(SmallStore());
  return *store;
}

// ---------------------------------------------------------------------- clean

TEST(FsckTest, StoreThatIsWellHasNoFinding) {
  for (const bool deep : {false, true}) {
    MemoryFileSystem fs = Pristine();
    const auto report = Check(fs, deep);
    ASSERT_TRUE(report.ok()) << report.status();
    EXPECT_THAT(report->findings, IsEmpty()) << FormatFsckReport(*report);
    EXPECT_TRUE(report->clean());
    EXPECT_EQ(FsckExitCode(report), 0);
    EXPECT_EQ(report->steps_checked, 6u);
    EXPECT_EQ(report->anchors_checked, 2u);
    EXPECT_EQ(report->records_checked, deep ? 9u : 0u);
    ASSERT_EQ(report->chains.size(), 1u);
    EXPECT_THAT(report->chains[0].versions, ElementsAre(0, 1, 2, 3, 4, 5));
    EXPECT_THAT(report->chains[0].anchors, ElementsAre(0, 3));
    EXPECT_FALSE(report->chains[0].external_v0);
    EXPECT_TRUE(report->chains[0].Joins(4));
    EXPECT_FALSE(report->chains[0].Joins(6));
    StoreForge forge(&fs);
    const VersionId v5{5, forge.ManifestHash("step_00000005")};
    EXPECT_EQ(report->newest, v5);
    EXPECT_EQ(report->newest_joinable, v5);
  }
}

TEST(FsckTest, DeepReadsEveryByteAndShallowNoDataByte) {
  const TempDirectory directory;
  MakeSmallStore({}, directory.Join("store"));
  for (const bool deep : {false, true}) {
    FaultFileSystem fs(PosixFileSystem(), directory.Join("store"));
    FsckOptions options;
    options.store_path = directory.Join("store");
    options.fs = &fs;
    options.deep = deep;
    ASSERT_TRUE(Fsck(options).ok());
    std::uint64_t data_bytes = 0;
    std::uint64_t most_read = 0;
    for (const auto& entry : std::filesystem::recursive_directory_iterator(
             directory.Join("store"))) {
      const std::string extension = entry.path().extension();
      if (extension == ".kds" || extension == ".kda") {
        data_bytes += entry.file_size();
      }
    }
    for (const Operation& operation : fs.log()) {
      if (operation.kind == FileOperation::kRead &&
          ParseDataFileName(
              std::filesystem::path(operation.path).filename().string())) {
        most_read += operation.bytes;
      }
    }
    const std::uint64_t headers = 7 * 64;  // five segments, two anchor files
    EXPECT_EQ(most_read, headers + (deep ? data_bytes : 0));
  }
}

TEST(FsckTest, ExternalV0IsJoinedByEnginesThatBootWithIt) {
  MemoryFileSystem fs = SmallStore({.anchors = {}, .external_v0 = true});
  const FsckReport report = MustCheck(fs);
  EXPECT_THAT(report.findings, IsEmpty()) << FormatFsckReport(report);
  ASSERT_EQ(report.chains.size(), 1u);
  EXPECT_TRUE(report.chains[0].external_v0);
  EXPECT_TRUE(report.chains[0].Joins(5));
  EXPECT_EQ(report.newest, report.newest_joinable);
}

// Report: a store that had lost its only anchor was taken for one whose engines
// boot with v0.
TEST(FsckTest, StoreThatLostTheAnchorOfV0IsNotJoinable) {
  const TempDirectory directory;
  const std::string path = directory.Join("store");
  MakeSmallStore({.anchors = {}}, path);
  std::filesystem::remove_all(path + "/" + StepDirectoryName(0) + "/anchor");
  const FsckReport report = CheckPath(path, true, 0);
  EXPECT_THAT(Ids(report), testing::Contains("not-joinable"));
}

TEST(FsckTest, ResumedStoreIsWell) {
  MemoryFileSystem fs = SmallStore({.resume_at = 4});
  const FsckReport report = MustCheck(fs);
  EXPECT_THAT(report.findings, IsEmpty()) << FormatFsckReport(report);
}

TEST(FsckTest, PrunedStoreIsWellAndStepsKeptForReadersAreInfo) {
  MemoryFileSystem fs = Pristine();
  for (const std::uint64_t step : {0, 1, 2}) {
    fs.Remove(StepDirectoryName(step));
  }
  EXPECT_THAT(MustCheck(fs).findings, IsEmpty());
  // v1 and v2 are kept for a reader that holds v0 or v1.
  fs = Pristine();
  fs.Remove("step_00000000");
  const FsckReport report = MustCheck(fs);
  EXPECT_TRUE(report.clean()) << FormatFsckReport(report);
  ASSERT_EQ(report.findings.size(), 1u);
  EXPECT_EQ(report.findings[0].id, "not-joinable");
  EXPECT_EQ(report.findings[0].severity, FindingSeverity::kInfo);
  EXPECT_EQ(report.newest_joinable->step, 5u);
}

TEST(FsckTest, ProgressReachesItsTotalAndNeverFallsBack) {
  const TempDirectory directory;
  MakeSmallStore({}, directory.Join("store"));
  for (const bool deep : {false, true}) {
    FsckOptions options;
    options.store_path = directory.Join("store");
    options.deep = deep;
    std::uint64_t last = 0;
    std::uint64_t last_total = 0;
    int calls = 0;
    options.progress = [&](std::uint64_t done, std::uint64_t total) {
      EXPECT_GE(done, last);
      EXPECT_LE(done, total);
      last = done;
      last_total = total;
      ++calls;
    };
    ASSERT_TRUE(Fsck(options).ok());
    EXPECT_GT(calls, 6);
    EXPECT_GT(last_total, 0u);
    EXPECT_EQ(last, last_total);
  }
}

TEST(FsckTest, RootStepStartsAChainOfItsOwn) {
  const TempDirectory directory;
  WriterOptions options;
  options.store_path = directory.Join("store");
  std::vector<std::uint16_t> weights(600, 7);
  TrainerTensor tensor{"a", DType::kBf16, {600}, weights.data()};
  auto writer = SnapshotWriter::Create(options, {}, {tensor});
  ASSERT_TRUE(writer.ok()) << writer.status();
  weights[3] = 8;
  ASSERT_TRUE((*writer)->Publish(1).ok());
  tensor.name = "b";
  weights[4] = 9;
  ASSERT_TRUE((*writer)->ReplaceTensors(2, {tensor}, {}).ok());
  weights[5] = 10;
  ASSERT_TRUE((*writer)->Publish(3).ok());
  const FsckReport report = CheckPath(options.store_path);
  EXPECT_THAT(report.findings, IsEmpty()) << FormatFsckReport(report);
  ASSERT_EQ(report.chains.size(), 2u);
  EXPECT_THAT(report.chains[1].versions, ElementsAre(2, 3));
  EXPECT_THAT(report.chains[1].anchors, ElementsAre(2));
}

// ------------------------------------------------------------------- canaries

struct Canary {
  const char* id;
  const char* what;
  std::function<void(MemoryFileSystem&, StoreForge&)> damage;
  // Other ids that this damage cannot but give.
  std::set<std::string> also = {};
  bool deep = false;  // found by deep checks alone
};

const char kSegment5[] = "step_00000005/delta-r000-000.kds";
const char kAnchorFile3[] = "step_00000003/anchor/anchor-r000-000.kda";
const char kAnchor3[] = "step_00000003/anchor";

std::vector<std::byte> WithMinReader2(std::vector<std::byte> fixed) {
  fixed[4] = std::byte{2};
  const std::uint64_t hash =
      HashBytes64(std::span(fixed).first(fixed.size() - 8));
  std::memcpy(fixed.data() + fixed.size() - 8, &hash, 8);
  return fixed;
}

Hash128 OtherHash() {
  Hash128 hash;
  hash.bytes.fill(0xab);
  return hash;
}

std::vector<std::byte> Garbage() {
  return std::vector<std::byte>(300, std::byte{0x5a});
}

// A lease as a reader of the small store has it.
void PutLease(MemoryFileSystem& fs, const std::string& name,
              std::chrono::seconds age,
              const std::function<void(LeaseRecord&)>& edit = nullptr) {
  LeaseRecord lease;
  lease.run.bytes.fill(1);
  lease.oldest_step = 4;
  lease.counter = 1;
  lease.reader = name;
  if (edit) edit(lease);
  fs.Put("leases/" + name, SerializeLease(lease));
  fs.nodes["leases/" + name].modified_ns =
      std::chrono::duration_cast<std::chrono::nanoseconds>(
          std::chrono::system_clock::now().time_since_epoch() - age)
          .count();
}

const std::vector<Canary>& Canaries() {
  using F = MemoryFileSystem;
  using G = StoreForge;
  static const auto* const canaries = new std::vector<Canary>{
      {"store-file-missing", "STORE removed",
       [](F& fs, G&) { fs.Remove("STORE"); }},
      {"store-file-bad", "a bit of STORE flipped",
       [](F& fs, G&) { Flip(fs.bytes("STORE"), 30); }},
      {"head-missing", "HEAD removed", [](F& fs, G&) { fs.Remove("HEAD"); }},
      {"head-bad", "a bit of HEAD flipped",
       [](F& fs, G&) { Flip(fs.bytes("HEAD"), 30); }},
      {"head-bad", "HEAD of another run",
       [](F&, G& forge) {
         Head head = forge.GetHead();
         head.run = OtherHash();
         forge.SetHead(head);
       }},
      {"head-behind", "HEAD of the step before",
       [](F&, G& forge) {
         Head head = forge.GetHead();
         head.step = 4;
         head.manifest_hash = forge.ManifestHash("step_00000004");
         forge.SetHead(head);
       }},
      {"head-behind", "a writer died after it made its epoch",
       [](F&, G& forge) {
         forge.SetEpoch(2, 5, forge.ManifestHash("step_00000005"));
       }},
      {"head-ahead", "newest step lost",
       [](F& fs, G&) { fs.Remove("step_00000005"); }},
      {"head-other-version", "HEAD with another hash",
       [](F&, G& forge) {
         Head head = forge.GetHead();
         head.manifest_hash = OtherHash();
         forge.SetHead(head);
       }},
      {"epoch-bad", "a bit of an epoch file flipped",
       [](F& fs, G&) { Flip(fs.bytes("epochs/00000001"), 30); }},
      {"epoch-bad", "an epoch file under another number",
       [](F& fs, G&) { fs.Move("epochs/00000001", "epochs/00000002"); }},
      {"epoch-gap", "epoch 2 between 1 and 3 missing",
       [](F&, G& forge) {
         forge.SetEpoch(3, 5, forge.ManifestHash("step_00000005"));
         Head head = forge.GetHead();
         head.epoch = 3;
         forge.SetHead(head);
       }},
      {"epoch-missing",
       "the only epoch file removed",
       [](F& fs, G&) { fs.Remove("epochs/00000001"); },
       {"head-ahead"}},
      {"epoch-resume", "epoch resumed from another version 0",
       [](F&, G& forge) { forge.SetEpoch(1, 0, OtherHash()); }},
      {"table-missing",
       "tensor table removed",
       [](F& fs, G& forge) {
         fs.Remove(TensorTableFileName(forge.Info().v0_table_hash));
       },
       {"not-joinable"}},
      {"table-bad",
       "a bit of the tensor table flipped",
       [](F& fs, G& forge) {
         Flip(fs.bytes(TensorTableFileName(forge.Info().v0_table_hash)), 60);
       },
       {"not-joinable"}},
      {"table-unused", "a table that no step names",
       [](F& fs, G&) {
         const auto table =
             TensorTable::Create({{"other", DType::kU8, {3}, kNotTied}});
         ASSERT_TRUE(table.ok());
         fs.Put(TensorTableFileName(table->hash()), table->bytes());
       }},
      {"v0-digest", "STORE with another v0 digest",
       [](F&, G& forge) {
         StoreInfo info = forge.Info();
         info.v0_digest = OtherHash();
         forge.SetInfo(info);
       }},
      {"commit-missing",
       "COMMIT of an older step removed",
       [](F& fs, G&) { fs.Remove("step_00000001/COMMIT"); },
       {"base-missing", "not-joinable"}},
      {"commit-missing", "COMMIT of an anchor removed",
       [](F& fs, G&) { fs.Remove(std::string(kAnchor3) + "/COMMIT"); }},
      {"commit-bad", "a bit of COMMIT flipped",
       [](F& fs, G&) { Flip(fs.bytes("step_00000005/COMMIT"), 30); }},
      {"commit-bad", "a directory in place of COMMIT",
       [](F& fs, G&) {
         fs.nodes["step_00000005/COMMIT"] = {FileType::kDirectory, {}};
       }},
      {"commit-other-run",
       "another run's step copied in",
       [](F& fs, G&) {
         MemoryFileSystem other = SmallStore({.run = 2});
         fs.Remove("step_00000005");
         fs.CopyFrom(other, "step_00000005", "step_00000005");
       },
       {"head-other-version"}},
      {"commit-other-step",
       "a step renamed",
       [](F& fs, G&) { fs.Move("step_00000005", "step_00000006"); },
       {"head-ahead"}},
      {"manifest-missing", "MANIFEST removed",
       [](F& fs, G&) { fs.Remove("step_00000005/MANIFEST"); }},
      {"manifest-size", "a byte more in MANIFEST",
       [](F& fs, G&) {
         fs.bytes("step_00000005/MANIFEST").push_back(std::byte{});
       }},
      {"manifest-hash", "a bit of MANIFEST flipped",
       [](F& fs, G&) { Flip(fs.bytes("step_00000005/MANIFEST"), 100); }},
      {"manifest-bad",
       "garbage with its hash in COMMIT",
       [](F&, G& forge) { forge.SetManifestBytes("step_00000005", Garbage()); },
       {"head-other-version"}},
      {"newer-format", "COMMIT needs reader 2",
       [](F& fs, G&) {
         auto& commit = fs.bytes("step_00000005/COMMIT");
         commit = WithMinReader2(commit);
       }},
      {"step-fenced", "steps above a resume point left in place",
       [](F&, G& forge) {
         forge.SetEpoch(2, 4, forge.ManifestHash("step_00000004"));
         Head head = forge.GetHead();
         head.epoch = 2;
         head.step = 4;
         head.manifest_hash = forge.ManifestHash("step_00000004");
         forge.SetHead(head);
       }},
      {"base-missing", "a hole in the chain before an anchor",
       [](F& fs, G&) { fs.Remove("step_00000002"); }},
      {"base-missing",
       "a hole in the chain after the last anchor",
       [](F& fs, G&) { fs.Remove("step_00000004"); },
       {"not-joinable"}},
      {"base-fork",
       "a step on the version before its base",
       [](F&, G& forge) {
         StepManifest step = forge.Step(5);
         step.base = {3, forge.ManifestHash("step_00000003")};
         forge.SetStep(step);
       },
       {"not-joinable"}},
      {"base-fork",
       "a base that was replaced: same step, other content",
       [](F&, G& forge) {
         StepManifest step = forge.Step(4);
         step.metadata_changed = true;
         step.metadata = {{"forged", "yes"}};
         forge.SetStep(step);
       },
       {"not-joinable"}},
      {"base-table",
       "a delta under another table",
       [](F& fs, G& forge) {
         StepManifest step = forge.Step(5);
         std::vector<TensorSpec> tensors(
             forge.Table(step.table_hash).tensors().begin(),
             forge.Table(step.table_hash).tensors().end());
         for (TensorSpec& tensor : tensors) {
           if (tensor.tied_to != kNotTied) tensor.name += "2";
           tensor.tied_to = kNotTied;
         }
         const std::pair<std::string, std::string> tie{"tied2", "layer.bias"};
         const auto table = TensorTable::Create(tensors, std::span(&tie, 1));
         ASSERT_TRUE(table.ok()) << table.status();
         fs.Put(TensorTableFileName(table->hash()), table->bytes());
         step.table_hash = table->hash();
         forge.SetStep(step);
       },
       {"digest-wrong", "not-joinable"}},
      {"digest-chain",
       "digest_before of another state",
       [](F&, G& forge) {
         StepManifest step = forge.Step(5);
         step.digest_before = OtherHash();
         forge.SetStep(step);
       },
       {"not-joinable"}},
      {"digest-wrong",
       "digest_after of another state",
       [](F&, G& forge) {
         StepManifest step = forge.Step(5);
         step.digest_after = OtherHash();
         forge.SetStep(step);
       },
       {"not-joinable"}},
      {"state-sum",
       "S before and after a step off by one",
       [](F&, G& forge) {
         StepManifest step = forge.Step(5);
         for (TensorState& state : step.states) {
           state.l61_before = L61Add(state.l61_before, 1);
           state.l61_after = L61Add(state.l61_after, 1);
         }
         forge.SetStep(step);
       },
       {"digest-wrong", "not-joinable"}},
      {"not-joinable", "no anchor left and v0 gone",
       [](F& fs, G&) {
         fs.Remove("step_00000000");
         fs.Remove(kAnchor3);
       }},
      {"not-joinable",
       "no step left",
       [](F& fs, G&) {
         for (int step = 0; step < 6; ++step) {
           fs.Remove(StepDirectoryName(step));
         }
       },
       {"head-ahead"}},
      {"data-file-missing",
       "a segment removed",
       [](F& fs, G&) { fs.Remove(kSegment5); },
       {"not-joinable"}},
      {"data-file-size",
       "a byte cut off a segment",
       [](F& fs, G&) { fs.bytes(kSegment5).pop_back(); },
       {"not-joinable"}},
      {"data-file-size", "a byte more in an anchor file",
       [](F& fs, G&) { fs.bytes(kAnchorFile3).push_back(std::byte{}); }},
      {"data-file-extra", "a file that the manifest does not name",
       [](F& fs, G&) {
         fs.Put("step_00000005/delta-r000-001.kds", Garbage());
       }},
      {"data-file-not-regular",
       "a link in place of a segment",
       [](F& fs, G&) {
         fs.nodes[kSegment5] = {FileType::kOther, {}};
       },
       {"not-joinable"}},
      {"data-file-header",
       "the segment of the step before",
       [](F& fs, G&) {
         auto& bytes = fs.bytes(kSegment5);
         DataFileHeader header = *ParseDataFileHeader(
             "", FileKind::kSegment, std::span(bytes).first(64));
         header.step = 4;
         const auto forged = SerializeDataFileHeader(header);
         std::copy(forged.begin(), forged.end(), bytes.begin());
       },
       {"not-joinable"}},
      {"piece-hash",
       "a bit of a record flipped",
       [](F& fs, G&) { Flip(fs.bytes(kSegment5), 100); },
       {"not-joinable"},
       true},
      {"piece-hash",
       "a bit of an anchor's slice flipped",
       [](F& fs, G&) { Flip(fs.bytes(kAnchorFile3), 4100); },
       {},
       true},
      {"padding-not-zero",
       "a segment's tail with its hash",
       [](F&, G& forge) {
         forge.EditSegment(5,
                           [](auto& bytes) { Flip(bytes, bytes.size() - 1); });
       },
       {"not-joinable"},
       true},
      {"padding-not-zero",
       "a bit of an anchor's header block",
       [](F& fs, G&) { Flip(fs.bytes(kAnchorFile3), 4000); },
       {},
       true},
      {"padding-not-zero",
       "a bit between two slices",
       [](F& fs, G&) { Flip(fs.bytes(kAnchorFile3), 4096 + 4000); },
       {},
       true},
      {"record-bad",
       "a record's tile count",
       [](F&, G& forge) {
         forge.EditSegment(5, [](auto& bytes) { Flip(bytes, 64, 1); });
       },
       {"not-joinable"},
       true},
      {"record-nnz",
       "one changed unit more in the manifest",
       [](F&, G& forge) {
         StepManifest step = forge.Step(5);
         ++step.records[0].nnz;
         forge.SetStep(step);
       },
       {"not-joinable"},
       true},
      {"record-l61",
       "L of a record off by one, and S with it",
       [](F& fs, G& forge) {
         StepManifest step = forge.Step(5);
         auto store = Store::Open(&fs, MemoryFileSystem::kRoot);
         ASSERT_TRUE(store.ok()) << store.status();
         auto state = (*store)->StateAt(*(*store)->ReadStep(5));
         ASSERT_TRUE(state.ok()) << state.status();
         const std::uint32_t tensor = step.records.back().tensor;
         step.records.back().l61 = L61Add(step.records.back().l61, 1);
         for (TensorState& s : step.states) {
           const TensorTable& table = *state->table;
           if (s.tensor != tensor && table[s.tensor].tied_to != tensor)
             continue;
           s.l61_after = L61Add(s.l61_after, 1);
           state->l61[s.tensor] = s.l61_after;
         }
         step.digest_after = state->table->StateDigest(state->l61);
         forge.SetStep(step);
       },
       {"not-joinable"},
       true},
      {"anchor-manifest-bad", "garbage with its hash in COMMIT",
       [](F&, G& forge) { forge.SetManifestBytes(kAnchor3, Garbage()); }},
      {"anchor-version", "an anchor of another version 3",
       [](F&, G& forge) {
         AnchorManifest anchor = forge.Anchor(3);
         anchor.version.manifest_hash = OtherHash();
         forge.SetAnchor(anchor);
       }},
      {"anchor-l61",
       "a bit of an anchor's slice, with its hash",
       [](F&, G& forge) {
         forge.EditAnchor(3, false, [](auto& bytes) { Flip(bytes, 4100); });
       },
       {},
       true},
      {"anchor-chain", "an anchor that agrees with itself alone",
       [](F&, G& forge) {
         forge.EditAnchor(3, true, [](auto& bytes) { Flip(bytes, 4100); });
       }},
      {"anchor-metadata", "an anchor with other metadata",
       [](F&, G& forge) {
         AnchorManifest anchor = forge.Anchor(3);
         anchor.metadata["format"] = "other";
         forge.SetAnchor(anchor);
       }},
      {"not-a-directory",
       "a link in place of a step",
       [](F& fs, G&) {
         fs.Remove("step_00000005");
         fs.nodes["step_00000005"] = {FileType::kOther, {}};
       },
       {"head-ahead"}},
      {"not-a-directory", "a file in place of an anchor",
       [](F& fs, G&) {
         fs.Remove(kAnchor3);
         fs.Put(kAnchor3, Garbage());
       }},
      {"unreadable", "storage fails for a manifest",
       [](F& fs, G&) { fs.unreadable.insert("step_00000005/MANIFEST"); }},
      {"unreadable",
       "storage fails for a segment",
       [](F& fs, G&) { fs.unreadable.insert(kSegment5); },
       {"not-joinable"}},
      {"unknown-name", "a file that somebody left",
       [](F& fs, G&) { fs.Put("README.txt", Garbage()); }},
      {"name-case",
       "a step whose name lost its zeros",
       [](F& fs, G&) { fs.Move("step_00000005", "step_5"); },
       {"head-ahead"}},
      {"name-case",
       "a segment in capitals",
       [](F& fs, G&) {
         fs.Move(kSegment5, "step_00000005/DELTA-R000-000.KDS");
       },
       {"data-file-missing", "not-joinable"}},
      {"unknown-name", "a file among the leases and one among the ranks",
       [](F& fs, G&) {
         fs.Put("leases/r.lock~", Garbage());
         fs.Put("ranks/rank_1", Garbage());
       }},
      {"lease-bad", "a bit of a lease flipped",
       [](F& fs, G&) {
         PutLease(fs, "r", {});
         Flip(fs.bytes("leases/r"), 24);
       }},
      {"lease-bad", "a lease under another reader's name",
       [](F& fs, G&) {
         PutLease(fs, "r", {}, [](LeaseRecord& lease) { lease.reader = "q"; });
       }},
      {"lease-bad", "half a lease",
       [](F& fs, G&) {
         PutLease(fs, "r", {});
         fs.bytes("leases/r").resize(70);
       }},
      {"newer-format", "a lease of a newer kedge",
       [](F& fs, G&) {
         PutLease(fs, "r", {});
         fs.bytes("leases/r") = WithMinReader2(fs.bytes("leases/r"));
       }},
      {"lease-other-run", "a lease of another run",
       [](F& fs, G&) {
         PutLease(fs, "r", {},
                  [](LeaseRecord& lease) { lease.run = OtherHash(); });
       }},
      {"lease-future", "a lease of tomorrow",
       [](F& fs, G&) { PutLease(fs, "r", -std::chrono::hours(24)); }},
      {"lease-expired", "a lease of yesterday",
       [](F& fs, G&) { PutLease(fs, "r", std::chrono::hours(24)); }},
      {"lease-leftover", "a lease that never came to its place",
       [](F& fs, G&) { fs.Put("leases/r~0123456789abcdef", Garbage()); }},
      {"staging-leftover", "a staging directory of epoch 0",
       [](F& fs, G&) { fs.MakeDirectories(".staging/step_00000000.0.0"); }},
      {"trash",
       "a step that resume took away",
       [](F& fs, G&) { fs.Move("step_00000000", ".trash/step_00000000.1"); },
       {"not-joinable"}},
  };
  return *canaries;
}

TEST(FsckCanaryTest, EachDamageGivesItsFindingAndNoOther) {
  for (const Canary& canary : Canaries()) {
    SCOPED_TRACE(absl::StrCat(canary.id, ": ", canary.what));
    MemoryFileSystem fs = Pristine();
    StoreForge forge(&fs);
    canary.damage(fs, forge);
    std::set<std::string> expected = canary.also;
    expected.insert(canary.id);
    const FsckReport report = MustCheck(fs, /*deep=*/true);
    std::set<std::string> found = Ids(report);
    if (!canary.deep) {
      EXPECT_EQ(Ids(MustCheck(fs, /*deep=*/false)), expected)
          << FormatFsckReport(MustCheck(fs, false));
      // Every byte may show more of the same damage.
      for (const std::string& id : expected) {
        EXPECT_THAT(found, Contains(id)) << FormatFsckReport(report);
      }
    } else {
      EXPECT_EQ(found, expected) << FormatFsckReport(report);
      const FsckReport shallow = MustCheck(fs, /*deep=*/false);
      EXPECT_THAT(shallow.findings, IsEmpty()) << FormatFsckReport(shallow);
    }
    for (const Finding& finding : report.findings) {
      EXPECT_FALSE(finding.message.empty());
      EXPECT_FALSE(finding.advice.empty());
      EXPECT_THAT(finding.message, Not(HasSubstr("kedge fsck")));
      EXPECT_THAT(finding.message, Not(HasSubstr("/s/")));
      EXPECT_THAT(finding.file, Not(HasSubstr("/s/")));
    }
  }
}

TEST(FsckTest, LiveLeasesControlFilesAndTemporariesAreNoFinding) {
  MemoryFileSystem fs = Pristine();
  PutLease(fs, "engine-1.tp-0", {});
  PutLease(fs, "engine-2", std::chrono::seconds(500));
  PutLease(fs, "engine-3", -std::chrono::seconds(500));  // clocks differ
  PutLease(fs, "engine-1.tp-0~0123456789abcdef", {},
           [](LeaseRecord& lease) { lease.reader = "engine-1.tp-0"; });
  fs.Put("ranks/rank_00000", Garbage());
  fs.Put("ranks/rank_00007", {});
  fs.Put("ranks/rank_00007.0123456789abcdef", {});
  const FsckReport report = MustCheck(fs);
  EXPECT_THAT(report.findings, IsEmpty()) << FormatFsckReport(report);
}

TEST(FsckTest, OldDamagedLeaseIsAnInfoForGcDoesNotHeedIt) {
  MemoryFileSystem fs = Pristine();
  PutLease(fs, "r", std::chrono::hours(1));
  Flip(fs.bytes("leases/r"), 24);
  const FsckReport report = MustCheck(fs);
  EXPECT_TRUE(report.clean());
  ASSERT_EQ(report.findings.size(), 1u);
  EXPECT_EQ(report.findings[0].id, "lease-bad");
  EXPECT_EQ(report.findings[0].file, "leases/r");
  EXPECT_EQ(report.findings[0].offset, 136u);
}

TEST(FsckTest, LeaseThatIsRenewedWhileItIsReadIsNoFinding) {
  MemoryFileSystem fs = Pristine();
  PutLease(fs, "r", {});
  Flip(fs.bytes("leases/r"), 24);
  FaultFileSystem watched(&fs);
  int reads = 0;
  watched.set_after_each([&](const Operation& operation) {
    if (operation.kind == FileOperation::kStat &&
        absl::EndsWith(operation.path, "leases/r") && ++reads == 1) {
      PutLease(fs, "r", -std::chrono::seconds(1));
    }
  });
  FsckOptions options;
  options.store_path = MemoryFileSystem::kRoot;
  options.fs = &watched;
  options.io_threads = 1;
  options.settle_seconds = 0;
  const auto report = Fsck(options);
  ASSERT_TRUE(report.ok());
  EXPECT_EQ(reads, 2);
  EXPECT_THAT(report->findings, IsEmpty()) << FormatFsckReport(*report);
}

TEST(FsckCanaryTest, EveryIdOfTheCatalogueHasACanary) {
  std::set<std::string> tested;
  for (const Canary& canary : Canaries()) tested.insert(canary.id);
  std::set<std::string> catalogue;
  for (const FindingType& type : FsckCatalogue()) {
    EXPECT_TRUE(catalogue.insert(std::string(type.id)).second) << type.id;
  }
  EXPECT_EQ(tested, catalogue);
}

TEST(FsckCanaryTest, PageHasTheCatalogueOfTheCode) {
  std::ifstream page(absl::StrCat(KEDGE_SOURCE_DIR, "/docs/fsck.md"));
  ASSERT_TRUE(page.good());
  std::vector<std::string> rows;
  for (std::string line; std::getline(page, line);) {
    if (absl::StartsWith(line, "| `")) rows.push_back(line);
  }
  std::vector<std::string> expected;
  for (const FindingType& type : FsckCatalogue()) {
    expected.push_back(absl::StrCat("| `", type.id, "` | ",
                                    SeverityName(type.severity), " | ",
                                    type.meaning, " | ", type.advice, " |"));
  }
  EXPECT_EQ(rows, expected);
}

TEST(FsckTest, HoleIsPrintedWithItsEnds) {
  MemoryFileSystem fs = Pristine();
  fs.Remove("step_00000001");
  fs.Remove("step_00000002");
  const FsckReport report = MustCheck(fs);
  ASSERT_THAT(Ids(report), UnorderedElementsAre("base-missing"));
  EXPECT_THAT(report.findings[0].message, HasSubstr("steps 1 to 2"));
  // An anchor follows: readers go around it.
  EXPECT_EQ(report.findings[0].severity, FindingSeverity::kWarning);
  EXPECT_EQ(report.newest_joinable->step, 5u);
}

// ------------------------------------------------- wrong weights that look
// well

// Replaces the anchor of v3 by bytes that `edit` makes of the slice of
// "layer.weight", with hashes, S and digest that agree, and returns fsck's
// text.
std::string TextOfForgedAnchor(
    const std::function<void(MemoryFileSystem&, StoreForge&,
                             std::span<std::uint16_t>)>& edit) {
  MemoryFileSystem fs = Pristine();
  StoreForge forge(&fs);
  forge.EditAnchor(3, true, [&](std::vector<std::byte>& bytes) {
    const AnchorManifest anchor = forge.Anchor(3);
    const TensorTable& table = forge.Table(anchor.table_hash);
    for (const AnchorSlice& slice : anchor.slices) {
      if (table[slice.tensor].name != "layer.weight") continue;
      edit(fs, forge,
           {reinterpret_cast<std::uint16_t*>(bytes.data() + slice.offset),
            slice.slice.count()});
    }
  });
  const FsckReport report = MustCheck(fs, /*deep=*/false);
  EXPECT_THAT(Ids(report), UnorderedElementsAre("anchor-chain"));
  return FormatFsckReport(report);
}

// Adds the record of `step` for "layer.weight" into its units.
void ApplyAgain(MemoryFileSystem& fs, StoreForge& forge, std::uint64_t step,
                std::uint64_t shift, std::span<std::uint16_t> units) {
  const StepManifest manifest = forge.Step(step);
  const TensorTable& table = forge.Table(manifest.table_hash);
  for (const DeltaRecord& record : manifest.records) {
    if (table[record.tensor].name != "layer.weight") continue;
    const auto bytes = std::span<const std::byte>(
        fs.bytes(absl::StrCat(StepDirectoryName(step), "/",
                              DataFileName(manifest.files[record.file].id))));
    const absl::Status status = VisitRecord(
        bytes.subspan(record.offset, record.bytes), table[record.tensor].grid(),
        record.slice, 2, [&](std::uint64_t unit, std::int64_t difference) {
          auto& u = units[(unit + shift) % units.size()];
          u = static_cast<std::uint16_t>(u + difference);
        });
    ASSERT_TRUE(status.ok()) << status;
  }
}

TEST(FsckTest, AnchorOfADeltaAppliedTwiceIsFoundWithTheTensorsName) {
  const std::string text =
      TextOfForgedAnchor([](auto& fs, auto& forge, auto units) {
        ApplyAgain(fs, forge, 3, 0, units);
      });
  EXPECT_THAT(text, HasSubstr("tensor \"layer.weight\": L61: expected"));
}

TEST(FsckTest, AnchorOfADeltaOnTheWrongBaseIsFoundWithTheTensorsName) {
  const std::string text =
      TextOfForgedAnchor([](auto& fs, auto& forge, auto units) {
        ApplyAgain(fs, forge, 4, 0, units);
      });
  EXPECT_THAT(text, HasSubstr("tensor \"layer.weight\": L61: expected"));
}

TEST(FsckTest, AnchorOfADeltaShiftedByOneIsFoundWithTheTensorsName) {
  const std::string text =
      TextOfForgedAnchor([](auto& fs, auto& forge, auto units) {
        const std::vector<std::uint16_t> right(units.begin(), units.end());
        std::vector<std::uint16_t> change(units.size());
        ApplyAgain(fs, forge, 3, 0, change);
        for (std::size_t i = 0; i < units.size(); ++i) {
          units[i] = static_cast<std::uint16_t>(right[i] - change[i] +
                                                change[(i + 1) % units.size()]);
        }
      });
  EXPECT_THAT(text, HasSubstr("tensor \"layer.weight\": L61: expected"));
}

TEST(FsckTest, AnchorWithTwoElementsSwappedIsFoundWithTheTensorsName) {
  const std::string text = TextOfForgedAnchor(
      [](auto&, auto&, auto units) { std::swap(units[3], units[301]); });
  EXPECT_THAT(text, HasSubstr("tensor \"layer.weight\": L61: expected"));
}

// ----------------------------------------------------------------- exhaustive

// Whether some finding is about `name` itself.
bool Names(const FsckReport& report, const std::string& name) {
  return std::any_of(report.findings.begin(), report.findings.end(),
                     [&](const Finding& finding) {
                       return finding.file == name &&
                              finding.severity != FindingSeverity::kInfo;
                     });
}

TEST(FsckDamageTest, EveryFlippedBitIsFoundInItsFile) {
  const bool all_bits = std::getenv("KEDGE_FSCK_ALL_BITS") != nullptr;
  MemoryFileSystem fs =
      SmallStore({.steps = 3, .anchors = {2}, .resume_at = 2});
  ASSERT_TRUE(MustCheck(fs).clean());
  std::uint64_t flips = 0;
  std::uint64_t missed = 0;
  for (const std::string& name : fs.FileNames()) {
    std::vector<std::byte>& bytes = fs.bytes(name);
    for (std::size_t at = 0; at < bytes.size(); ++at) {
      if (!all_bits && kSanitized && at % 9 != 0) continue;
      for (int bit = 0; bit < 8; ++bit) {
        if (!all_bits && bit != static_cast<int>((at * 5 + at / 8) % 8)) {
          continue;
        }
        Flip(bytes, at, bit);
        const auto report = Check(fs);
        ++flips;
        if (!report.ok() || !Names(*report, name)) {
          ++missed;
          ADD_FAILURE() << name << ": byte " << at << ", bit " << bit << ": "
                        << (report.ok() ? FormatFsckReport(*report)
                                        : report.status().ToString());
        }
        Flip(bytes, at, bit);
        ASSERT_LT(missed, 10u);
      }
    }
  }
  EXPECT_TRUE(MustCheck(fs).clean());
  RecordProperty("flips", static_cast<int>(flips));
}

TEST(FsckDamageTest, EveryCutOrLongerFileIsFound) {
  MemoryFileSystem fs = SmallStore({.steps = 3, .anchors = {2}});
  constexpr std::uint64_t kSeed = 11;
  std::mt19937_64 random(kSeed);
  for (const std::string& name : fs.FileNames()) {
    const std::vector<std::byte> right = fs.bytes(name);
    std::set<std::size_t> sizes = {0,
                                   1,
                                   right.size() / 2,
                                   right.size() - 1,
                                   right.size() + 1,
                                   2 * right.size()};
    for (int i = 0; i < 20; ++i) sizes.insert(random() % right.size());
    for (const std::size_t size : sizes) {
      fs.bytes(name).resize(size);
      for (const bool deep : {false, true}) {
        EXPECT_TRUE(Names(MustCheck(fs, deep), name))
            << name << " cut to " << size << " of " << right.size();
      }
      fs.bytes(name) = right;
    }
  }
}

TEST(FsckDamageTest, EveryMissingFileIsFound) {
  const MemoryFileSystem right =
      SmallStore({.steps = 3, .anchors = {2}, .resume_at = 2});
  for (const std::string& name : right.FileNames()) {
    MemoryFileSystem fs = right;
    fs.Remove(name);
    const FsckReport report = MustCheck(fs, /*deep=*/false);
    EXPECT_FALSE(report.clean()) << name;
  }
}

TEST(FsckDamageTest, EveryTwoFilesSwappedAndEveryReplayedFileIsFound) {
  MemoryFileSystem fs =
      SmallStore({.steps = 3, .anchors = {2}, .resume_at = 2});
  const std::vector<std::string> names = fs.FileNames();
  int pairs = 0;
  for (std::size_t a = 0; a < names.size(); ++a) {
    for (std::size_t b = 0; b < names.size(); ++b) {
      if (a == b || fs.bytes(names[a]) == fs.bytes(names[b])) continue;
      ++pairs;
      if (a < b) {
        std::swap(fs.bytes(names[a]), fs.bytes(names[b]));
        EXPECT_FALSE(MustCheck(fs).clean()) << names[a] << " <-> " << names[b];
        std::swap(fs.bytes(names[a]), fs.bytes(names[b]));
      }
      const std::vector<std::byte> right = fs.bytes(names[b]);
      fs.bytes(names[b]) = fs.bytes(names[a]);
      EXPECT_FALSE(MustCheck(fs).clean()) << names[a] << " over " << names[b];
      fs.bytes(names[b]) = right;
    }
  }
  EXPECT_GT(pairs, 200);
  EXPECT_TRUE(MustCheck(fs).clean());
}

TEST(FsckDamageTest, EveryOlderHeadThatIsPutBackIsFound) {
  std::vector<std::vector<std::byte>> heads;
  MemoryFileSystem fs = SmallStore(
      {.steps = 4, .resume_at = 2, .after_step = [&](std::uint64_t, auto path) {
         const auto head = ReadFile(*PosixFileSystem(), path + "/HEAD", 100);
         ASSERT_TRUE(head.ok());
         heads.push_back(*head);
       }});
  ASSERT_EQ(heads.size(), 4u);
  for (std::size_t i = 0; i + 1 < heads.size(); ++i) {
    fs.Put("HEAD", heads[i]);
    EXPECT_THAT(Ids(MustCheck(fs)), UnorderedElementsAre("head-behind")) << i;
  }
}

TEST(FsckDamageTest, EveryFileOfAnotherRunIsFound) {
  const MemoryFileSystem right = SmallStore({.run = 1});
  MemoryFileSystem other = SmallStore({.run = 2});
  for (const std::string& name : right.FileNames()) {
    MemoryFileSystem fs = right;
    // The table is the same in both: its name is its hash.
    if (fs.bytes(name) == other.bytes(name)) continue;
    fs.bytes(name) = other.bytes(name);
    EXPECT_FALSE(MustCheck(fs, /*deep=*/false).clean()) << name;
  }
  for (std::uint64_t step = 0; step <= 5; ++step) {
    MemoryFileSystem fs = right;
    const std::string name = StepDirectoryName(step);
    fs.Remove(name);
    fs.CopyFrom(other, name, name);
    EXPECT_THAT(Ids(MustCheck(fs, false)), Contains("commit-other-run"));
  }
}

TEST(FsckDamageTest, EveryStepCopiedOverAnotherIsFound) {
  const MemoryFileSystem right = Pristine();
  for (std::uint64_t from = 0; from <= 5; ++from) {
    for (std::uint64_t to = 0; to <= 7; ++to) {
      if (from == to) continue;
      MemoryFileSystem fs = right;
      if (to <= 5) fs.Remove(StepDirectoryName(to));
      fs.CopyFrom(right, StepDirectoryName(from), StepDirectoryName(to));
      EXPECT_THAT(Ids(MustCheck(fs, false)), Contains("commit-other-step"));
    }
  }
}

// ------------------------------------------------------------ untrusted stores

TEST(FsckUntrustedTest, LinksFifosAndDirectoriesInPlaceOfFilesAreFound) {
  const TempDirectory directory;
  const std::string path = directory.Join("store");
  MakeSmallStore({.steps = 2, .anchors = {}}, path);
  for (const auto& entry :
       std::filesystem::recursive_directory_iterator(path)) {
    if (!entry.is_regular_file()) continue;
    const std::string file = entry.path();
    const std::string aside = directory.Join("aside");
    std::filesystem::rename(file, aside);
    const auto expect = [&](const char* what) {
      const FsckReport report = CheckPath(path);
      EXPECT_TRUE(
          Names(report, std::filesystem::path(file).lexically_relative(path)))
          << what << " at " << file << "\n"
          << FormatFsckReport(report);
      std::filesystem::remove_all(file);
    };
    std::filesystem::create_symlink(aside, file);
    expect("a link to the very file");
    std::filesystem::create_symlink(file, file);
    expect("a link to itself");
    ASSERT_EQ(mkfifo(file.c_str(), 0600), 0);
    expect("a FIFO");
    std::filesystem::create_directory(file);
    expect("a directory");
    std::ofstream(file).close();
    std::filesystem::resize_file(file, std::uint64_t{1} << 40);
    expect("a sparse file of 1 TiB");
    std::filesystem::rename(aside, file);
  }
  EXPECT_TRUE(CheckPath(path).clean());
}

TEST(FsckUntrustedTest, LinkInPlaceOfADirectoryIsFound) {
  const TempDirectory directory;
  const std::string path = directory.Join("store");
  MakeSmallStore({.steps = 2, .anchors = {}}, path);
  for (const char* name : {"step_00000001", "step_00000000/anchor", "epochs"}) {
    const std::string at = path + "/" + name;
    std::filesystem::rename(at, directory.Join("aside"));
    std::filesystem::create_symlink(directory.Join("aside"), at);
    EXPECT_THAT(Ids(CheckPath(path)), Contains("not-a-directory")) << name;
    std::filesystem::remove(at);
    std::filesystem::rename(directory.Join("aside"), at);
  }
}

TEST(FsckUntrustedTest, ManyStrayNamesGiveFewFindings) {
  MemoryFileSystem fs = Pristine();
  constexpr int kNames = 30'000;
  for (int i = 0; i < kNames; ++i) {
    const std::string number = absl::StrCat(i);
    fs.nodes["stray" + number];
    fs.nodes["step_00000004/stray" + number];
    fs.nodes["epochs/stray" + number];
    fs.nodes[StepDirectoryName(1000 + i)].type = FileType::kDirectory;
  }
  FsckOptions options;
  options.store_path = MemoryFileSystem::kRoot;
  options.fs = &fs;
  options.settle_seconds = 0;
  options.max_findings = 2000;
  const auto report = Fsck(options);
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_EQ(report->findings.size(), 2000u);
  EXPECT_EQ(report->error_count, 0u);
  EXPECT_EQ(FsckExitCode(report), 4);  // strays among data files are warnings
  EXPECT_THAT(FormatFsckReport(*report), HasSubstr("more findings"));
}

TEST(FsckUntrustedTest, NamesFromTheStoreAreEscapedInMessages) {
  MemoryFileSystem fs = Pristine();
  fs.nodes["evil\n\x1b[2Jname"];
  fs.nodes["step_00000005/evil\nname"];
  for (const Finding& finding : MustCheck(fs).findings) {
    const std::string text = FormatFinding(finding);
    EXPECT_TRUE(std::all_of(text.begin(), text.end(),
                            [](unsigned char c) { return c >= 32; }));
  }
}

// ----------------------------------------------------------------- large files

TEST(FsckTest, RecordsAndSlicesAcrossPiecesAreCheckedInFull) {
  const TempDirectory directory;
  constexpr std::uint64_t kSeed = 5;
  std::mt19937_64 random(kSeed);
  std::vector<std::uint32_t> weights(5'300'000);
  for (auto& w : weights) w = static_cast<std::uint32_t>(random());
  std::vector<std::uint16_t> small(1000, 1);
  WriterOptions options;
  options.store_path = directory.Join("store");
  options.segment_files = 1;
  options.slice_units = std::uint64_t{1} << 24;
  std::vector<TrainerTensor> tensors = {
      {"big", DType::kF32, {2650, 2000}, weights.data()},
      {"small", DType::kBf16, {1000}, small.data()}};
  auto writer = SnapshotWriter::Create(options, {.external_v0 = true}, tensors);
  ASSERT_TRUE(writer.ok()) << writer.status();
  for (auto& w : weights) w = static_cast<std::uint32_t>(random());
  small[7] = 2;
  ASSERT_TRUE((*writer)->Publish(1, {.anchor = true}).ok());
  const std::string segment =
      options.store_path + "/step_00000001/delta-r000-000.kds";
  ASSERT_GT(std::filesystem::file_size(segment), 2 * kPieceBytes + 1000);
  FsckReport report = CheckPath(options.store_path);
  EXPECT_THAT(report.findings, IsEmpty()) << FormatFsckReport(report);
  EXPECT_EQ(report.records_checked, 2u);

  const auto flip = [&](const std::string& path, std::uint64_t at) {
    std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
    file.seekg(static_cast<std::streamoff>(at));
    const int byte = file.get();
    file.seekp(static_cast<std::streamoff>(at));
    file.put(static_cast<char>(byte ^ 1));
  };
  const std::string anchor =
      options.store_path + "/step_00000001/anchor/anchor-r000-000.kda";
  for (const auto& [path, at, piece] :
       std::vector<std::tuple<std::string, std::uint64_t, const char*>>{
           {segment, kPieceBytes + 17, "piece 1 "},
           {segment, 2 * kPieceBytes + 100, "piece 2 "},
           {anchor, 4096 + 2 * kPieceBytes + 3, "piece 2 "}}) {
    flip(path, at);
    report = CheckPath(options.store_path);
    bool found = false;
    for (const Finding& finding : report.findings) {
      found = found || (finding.id == "piece-hash" &&
                        absl::StrContains(finding.message, piece));
    }
    EXPECT_TRUE(found) << path << " at " << at << "\n"
                       << FormatFsckReport(report);
    flip(path, at);
  }
}

// ----------------------------------------------------------- could not check

TEST(FsckTest, PlaceWithoutAStoreCouldNotBeChecked) {
  const TempDirectory directory;
  FsckOptions options;
  options.store_path = directory.path();
  auto report = Fsck(options);
  EXPECT_TRUE(absl::IsNotFound(report.status())) << report.status();
  EXPECT_EQ(FsckExitCode(report), 8);
  options.store_path = directory.Join("nothing");
  report = Fsck(options);
  EXPECT_TRUE(absl::IsNotFound(report.status())) << report.status();
  EXPECT_EQ(FsckExitCode(report), 8);
}

TEST(FsckTest, StoreOfANewerFormatCouldNotBeChecked) {
  MemoryFileSystem fs = Pristine();
  fs.bytes("STORE") = WithMinReader2(fs.bytes("STORE"));
  const auto report = Check(fs);
  EXPECT_TRUE(absl::IsUnimplemented(report.status())) << report.status();
  EXPECT_EQ(FsckExitCode(report), 8);
}

// Report: a step directory that this user may not list was called clean.
TEST(FsckTest, DirectoryThatCannotBeListedIsNeverClean) {
  const TempDirectory directory;
  const std::string path = directory.Join("store");
  MakeSmallStore({.steps = 2, .anchors = {1}}, path);
  for (const std::string& which :
       {StepDirectoryName(2), StepDirectoryName(1),
        StepDirectoryName(1) + "/" + kAnchorDirectoryName}) {
    FaultFileSystem fs(PosixFileSystem(), path);
    fs.set_script(FaultOn(FileOperation::kList, which, Fault::Fail(EACCES)));
    FsckOptions options;
    options.store_path = path;
    options.fs = &fs;
    options.settle_seconds = 0;
    const auto report = Fsck(options);
    ASSERT_TRUE(report.ok()) << report.status();
    EXPECT_THAT(Ids(*report), testing::Contains("unreadable")) << which;
    EXPECT_NE(FsckExitCode(report), 0);
  }
}

TEST(FsckTest, AnyOneFailedOperationIsSurvivedReportedOrCouldNotCheck) {
  const TempDirectory directory;
  const std::string path = directory.Join("store");
  MakeSmallStore({.steps = 2, .anchors = {}}, path);
  FaultFileSystem fs(PosixFileSystem(), path);
  FsckOptions options;
  options.store_path = path;
  options.fs = &fs;
  options.deep = true;
  options.io_threads = 1;
  options.settle_seconds = 0;
  ASSERT_TRUE(Fsck(options).ok());
  const std::int64_t count = fs.operation_count();
  ASSERT_GT(count, 50);
  for (const int error : {EIO, EMFILE, ENOENT}) {
    for (std::int64_t k = 1; k <= count; ++k) {
      fs.Reset();
      fs.set_script(FaultAt(k, Fault::Fail(error)));
      const auto report = Fsck(options);
      // Once is looked at again; nothing but a storage error may be said.
      if (!report.ok() || error == ENOENT) continue;
      for (const std::string& id : Ids(*report)) {
        EXPECT_THAT(id, testing::AnyOf("unreadable", "head-bad", "epoch-bad",
                                       "head-missing", "not-joinable"))
            << "operation " << k << ": " << std::strerror(error) << "\n"
            << FormatFsckReport(*report);
      }
      // From then on: never clean.
      fs.Reset();
      fs.set_script(FaultFrom(k, Fault::Fail(error)));
      EXPECT_NE(FsckExitCode(Fsck(options)), 0) << "operation " << k;
    }
  }
}

// ------------------------------------------------------------------ live store

// A trainer that publishes, a gc that prunes, readers with leases, and a new
// trainer now and then, while fsck looks on.
TEST(FsckLiveTest, StoreInMotionGivesNoFalseFinding) {
  const TempDirectory directory;
  const std::string path = directory.Join("store");
  constexpr std::uint64_t kSeed = 3;
  std::vector<std::uint16_t> weights(400, 1);
  std::vector<TrainerTensor> tensors = {
      {"w", DType::kBf16, {20, 20}, weights.data()}};
  WriterOptions options;
  options.store_path = path;
  options.io_threads = 1;
  options.encode_threads = 1;
  auto created = SnapshotWriter::Create(options, {}, tensors);
  ASSERT_TRUE(created.ok()) << created.status();
  std::atomic<bool> stop{false};
  std::atomic<int> published{0};
  std::atomic<int> resumed{0};
  std::atomic<int> pruned{0};
  std::atomic<int> leased{0};
  std::thread trainer([&] {
    std::mt19937_64 random(kSeed);
    std::unique_ptr<SnapshotWriter> writer = *std::move(created);
    std::map<std::uint64_t, std::vector<std::uint16_t>> weights_at = {
        {0, weights}};
    std::uint64_t newest_anchor = 0;
    std::uint64_t step = 0;
    while (!stop) {
      ++step;
      for (int i = 0; i < 5; ++i) weights[random() % weights.size()] += 1;
      const bool anchor = step % 3 == 0;
      const auto result = writer->Publish(step, {.anchor = anchor});
      if (!result.ok() || !result->anchor_status.ok()) {
        ADD_FAILURE() << result.status();
        break;
      }
      weights_at[step] = weights;
      if (anchor) newest_anchor = step;
      ++published;
      if (step % 7 == 0) {  // back by up to two steps, under a new epoch
        const std::uint64_t back = std::max(newest_anchor, step - random() % 3);
        writer.reset();
        weights = weights_at[back];
        auto again = SnapshotWriter::Open(options, tensors, back);
        if (!again.ok()) {
          ADD_FAILURE() << again.status();
          break;
        }
        writer = *std::move(again);
        step = back;
        ++resumed;
        // Not the same bytes as the first time.
        weights[0] += 17;
      }
      weights_at.erase(weights_at.begin(),
                       weights_at.lower_bound(newest_anchor));
    }
  });
  std::thread collector([&] {
    GcOptions gc;
    gc.store_path = path;
    gc.grace = std::chrono::seconds(0);
    while (!stop) {
      const auto report = CollectGarbage(gc);
      EXPECT_TRUE(report.ok()) << report.status();
      if (!report.ok()) break;
      EXPECT_THAT(report->warnings, IsEmpty());
      pruned += static_cast<int>(report->moved_steps.size());
    }
  });
  // Readers that say what they hold, now the newest version and now one that is
  // about to go, and that come and go themselves.
  std::thread readers([&] {
    std::mt19937_64 random(kSeed + 1);
    auto store = Store::Open(PosixFileSystem(), path);
    ASSERT_TRUE(store.ok());
    while (!stop) {
      auto lease = Lease::Create(PosixFileSystem(), path,
                                 absl::StrCat("reader-", random() % 3),
                                 (*store)->info().run);
      ASSERT_TRUE(lease.ok()) << lease.status();
      for (int i = 0; i < 5 && !stop; ++i) {
        const auto steps = (*store)->ListSteps();
        if (!steps.ok() || steps->empty()) continue;
        const auto step =
            (*store)->ReadStep((*steps)[random() % steps->size()]);
        if (!step.ok()) continue;
        const bool holds = random() % 2 == 0;
        ASSERT_TRUE((*lease)
                        ->Set((*step)->id.step,
                              holds ? std::optional((*step)->id) : std::nullopt)
                        .ok());
        ++leased;
        std::this_thread::sleep_for(std::chrono::milliseconds(random() % 5));
      }
      ASSERT_TRUE((*lease)->Remove().ok());
    }
  });
  const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(3);
  int looks = 0;
  while (std::chrono::steady_clock::now() < until &&
         !testing::Test::HasFailure()) {
    const FsckReport report =
        CheckPath(path, /*deep=*/looks % 2 == 0, /*settle_seconds=*/2);
    EXPECT_TRUE(report.clean()) << FormatFsckReport(report);
    ++looks;
  }
  stop = true;
  trainer.join();
  collector.join();
  readers.join();
  EXPECT_GT(leased, 20);
  EXPECT_GT(looks, 10);
  EXPECT_GT(published, 20);
  EXPECT_GT(resumed, 2);
  EXPECT_GT(pruned, 5);
  const FsckReport report = CheckPath(path, true, 2);
  EXPECT_TRUE(report.clean()) << FormatFsckReport(report);
}

// The store as it was after each operation of a writer that publishes, adds
// anchors and is resumed, of a reader's lease, and of gc.
std::vector<MemoryFileSystem> History() {
  const TempDirectory directory;
  const std::string path = directory.Join("store");
  std::vector<MemoryFileSystem> history;
  FaultFileSystem fs(PosixFileSystem(), path);
  std::vector<std::uint16_t> weights(96, 1);
  const std::vector<TrainerTensor> tensors = {
      {"w", DType::kBf16, {6, 16}, weights.data()}};
  WriterOptions options;
  options.store_path = path;
  options.fs = &fs;
  options.io_threads = 1;
  options.encode_threads = 1;
  auto writer = SnapshotWriter::Create(options, {}, tensors);
  EXPECT_TRUE(writer.ok()) << writer.status();
  fs.set_after_each([&](const Operation& operation) {
    switch (operation.kind) {
      case FileOperation::kCreateExclusive:
      case FileOperation::kMakeDirectory:
      case FileOperation::kRename:
      case FileOperation::kLink:
      case FileOperation::kRemoveFile:
      case FileOperation::kRemoveDirectory:
        history.push_back(MemoryFileSystem::Load(path));
        break;
      default:
        break;
    }
  });
  const auto publish = [&](std::uint64_t step, bool anchor) {
    weights[step] += 3;
    const auto result = (*writer)->Publish(step, {.anchor = anchor});
    EXPECT_TRUE(result.ok() && result->anchor_status.ok()) << result.status();
  };
  publish(1, false);
  publish(2, true);
  const std::vector<std::uint16_t> at_2 = weights;
  publish(3, false);
  publish(4, false);
  weights = at_2;
  writer = SnapshotWriter::Open(options, tensors, 2);
  EXPECT_TRUE(writer.ok()) << writer.status();
  weights[50] += 1;
  publish(3, false);
  publish(4, true);
  const auto& store = (*writer)->store_writer().store();
  auto lease = Lease::Create(&fs, path, "reader", store.info().run);
  EXPECT_TRUE(lease.ok()) << lease.status();
  EXPECT_TRUE((*lease)->Set(1, (*store.ReadStep(1))->id).ok());
  GcOptions gc;
  gc.store_path = path;
  gc.fs = &fs;
  gc.keep_anchors = 1;
  gc.grace = std::chrono::seconds(0);
  EXPECT_THAT(CollectGarbage(gc)->moved_steps, ElementsAre(0));
  EXPECT_TRUE((*lease)->Remove().ok());
  EXPECT_THAT(CollectGarbage(gc)->moved_steps, ElementsAre(1, 2, 3));
  publish(5, false);
  return history;
}

TEST(FsckLiveTest, WriterThatDiesAfterAnyOperationLeavesNoError) {
  const std::vector<MemoryFileSystem> history = History();
  ASSERT_GT(history.size(), 50u);
  for (std::size_t i = 0; i < history.size(); ++i) {
    MemoryFileSystem fs = history[i];
    const FsckReport report = MustCheck(fs);
    EXPECT_EQ(report.error_count, 0u) << "state " << i << "\n"
                                      << FormatFsckReport(report);
    EXPECT_TRUE(report.newest.has_value());
    EXPECT_EQ(report.newest, report.newest_joinable);
    for (const Finding& finding : report.findings) {
      if (finding.severity == FindingSeverity::kWarning) {
        EXPECT_EQ(finding.id, "head-behind");
      }
    }
  }
}

// Passes everything on to one of several states of a store.
class ChangingFileSystem final : public FileSystem {
 public:
  explicit ChangingFileSystem(std::vector<MemoryFileSystem>* states)
      : states_(*states) {}
  void set_state(std::size_t state) {
    state_ = std::min(state, states_.size() - 1);
  }
  absl::StatusOr<std::unique_ptr<File>> OpenForRead(
      absl::string_view path) override {
    return now().OpenForRead(path);
  }
  absl::StatusOr<std::vector<std::string>> List(
      absl::string_view path) override {
    return now().List(path);
  }
  absl::StatusOr<FileInfo> Stat(absl::string_view path) override {
    return now().Stat(path);
  }
  absl::StatusOr<StorageKind> KindOf(absl::string_view path) override {
    return now().KindOf(path);
  }
  absl::StatusOr<std::unique_ptr<File>> CreateExclusive(
      absl::string_view path) override {
    return now().CreateExclusive(path);
  }
  absl::Status MakeDirectory(absl::string_view path) override {
    return now().MakeDirectory(path);
  }
  absl::Status Rename(absl::string_view from, absl::string_view to) override {
    return now().Rename(from, to);
  }
  absl::Status Link(absl::string_view from, absl::string_view to) override {
    return now().Link(from, to);
  }
  absl::Status RemoveFile(absl::string_view path) override {
    return now().RemoveFile(path);
  }
  absl::Status RemoveDirectory(absl::string_view path) override {
    return now().RemoveDirectory(path);
  }
  absl::Status SyncDirectory(absl::string_view path) override {
    return now().SyncDirectory(path);
  }

 private:
  MemoryFileSystem& now() { return states_[state_]; }

  std::vector<MemoryFileSystem>& states_;
  std::atomic<std::size_t> state_{0};
};

TEST(FsckLiveTest, WriterThatGoesOnWithEachOperationGivesNoFinding) {
  std::vector<MemoryFileSystem> history = History();
  ChangingFileSystem changing(&history);
  int runs = 0;
  // From each state on, a step of the writer for every `gap` of fsck: from a
  // writer that outruns fsck to one that moves a little while fsck looks.
  for (const int gap : {1, 2, 3, 5, 8, 13, 21, 34, 55, 89}) {
    for (std::size_t start = 0; start < history.size(); ++start) {
      changing.set_state(start);
      FaultFileSystem fs(&changing);
      fs.set_after_each([&](const Operation& operation) {
        changing.set_state(start +
                           static_cast<std::size_t>(operation.number / gap));
      });
      FsckOptions options;
      options.store_path = MemoryFileSystem::kRoot;
      options.fs = &fs;
      options.deep = true;
      options.io_threads = 1;
      options.settle_seconds = 2;
      const auto report = Fsck(options);
      ASSERT_TRUE(report.ok()) << report.status();
      ASSERT_TRUE(report->clean())
          << "from state " << start << ", gap " << gap << "\n"
          << FormatFsckReport(*report) << fs.LogText();
      ++runs;
    }
  }
  EXPECT_GT(runs, 500);
}

// ----------------------------------------------------------------- copied live

TEST(FsckCopyTest, CopyWithALaterHeadSaysWhichVersionIsMissing) {
  MemoryFileSystem fs = Pristine();
  SmallStoreOptions more;
  more.steps = 6;
  fs.CopyFrom(SmallStore(more), "HEAD", "HEAD");
  const FsckReport report = MustCheck(fs);
  EXPECT_THAT(Ids(report), ElementsAre("head-ahead"));
  EXPECT_THAT(report.findings.at(0).message,
              HasSubstr("newest valid, found v6"));
  EXPECT_EQ(report.newest_joinable->step, 5u);
}

TEST(FsckCopyTest, CopyWithAHoleAtItsEndSaysWhereItIs) {
  SmallStoreOptions more;
  more.steps = 7;
  MemoryFileSystem fs = SmallStore(more);
  fs.Remove("step_00000006");
  const FsckReport report = MustCheck(fs);
  EXPECT_THAT(Ids(report),
              UnorderedElementsAre("base-missing", "not-joinable"));
  EXPECT_EQ(report.newest->step, 7u);
  EXPECT_EQ(report.newest_joinable->step, 5u);
  EXPECT_THAT(FormatFsckReport(report),
              HasSubstr("a hole: step 6 is not there, v5 is the newest"));
}

TEST(FsckCopyTest, CopyWithHalfAStagingDirectoryIsClean) {
  MemoryFileSystem fs = Pristine();
  fs.Put(".staging/step_00000006.1.0/delta-r000-000.kds", Garbage());
  fs.Put(".staging/HEAD.1", {});
  const FsckReport report = MustCheck(fs);
  EXPECT_THAT(report.findings, IsEmpty()) << FormatFsckReport(report);
  // Once another writer has opened the copy it is a leftover.
  StoreForge forge(&fs);
  forge.SetEpoch(2, 5, forge.ManifestHash("step_00000005"));
  Head head = forge.GetHead();
  head.epoch = 2;
  forge.SetHead(head);
  EXPECT_THAT(Ids(MustCheck(fs)), ElementsAre("staging-leftover"));
}

TEST(FsckCopyTest, CopyWithHalfAStepNamesWhatIsMissing) {
  MemoryFileSystem fs = Pristine();
  fs.bytes(kSegment5).resize(100);
  EXPECT_THAT(Ids(MustCheck(fs)),
              UnorderedElementsAre("data-file-size", "not-joinable"));
  fs.Remove(kSegment5);
  EXPECT_THAT(Ids(MustCheck(fs)),
              UnorderedElementsAre("data-file-missing", "not-joinable"));
  fs.Remove("step_00000005/COMMIT");
  EXPECT_THAT(Ids(MustCheck(fs)),
              UnorderedElementsAre("commit-missing", "head-ahead"));
}

// A copier that walks the store file by file while a writer, a reader and gc go
// on: whatever comes out, what fsck calls joinable can be read.
TEST(FsckCopyTest, JoinableVersionsOfAnyCopyOfALiveStoreCanBeRead) {
  const std::vector<MemoryFileSystem> history = History();
  constexpr std::uint64_t kSeed = 5;
  std::mt19937_64 random(kSeed);
  int clean = 0;
  int joinable = 0;
  for (int copy = 0; copy < 300; ++copy) {
    SCOPED_TRACE(absl::StrCat("seed ", kSeed, ", copy ", copy));
    std::size_t now = random() % history.size();
    const std::size_t stride = 1 + random() % 6;  // of the writer, per file
    MemoryFileSystem fs;
    const std::vector<std::string> names = history[now].FileNames();
    for (const auto& [name, node] : history[now].nodes) {
      if (node.type == FileType::kDirectory) fs.MakeDirectories(name);
    }
    for (const std::string& name : names) {
      now = std::min(now + random() % stride, history.size() - 1);
      const auto node = history[now].nodes.find(name);
      if (node == history[now].nodes.end()) continue;  // gone meanwhile
      fs.Put(name, node->second.bytes);
      fs.nodes[name].modified_ns = node->second.modified_ns;
    }
    const auto report = Check(fs);
    if (!report.ok()) continue;  // STORE came later
    clean += report->clean() ? 1 : 0;
    // As it advises: what is not sound goes out of the way.
    std::set<std::uint64_t> anchors;
    for (const FsckChain& chain : report->chains) {
      anchors.insert(chain.anchors.begin(), chain.anchors.end());
    }
    for (std::uint64_t step = 0; step < 6; ++step) {
      const std::string name = StoreForge::AnchorName(step);
      if (!anchors.contains(step) && fs.nodes.contains(name)) fs.Remove(name);
    }
    for (const FsckChain& chain : report->chains) {
      for (const std::uint64_t version : chain.versions) {
        if (!chain.Joins(version)) continue;
        ++joinable;
        auto store = Store::Open(&fs, MemoryFileSystem::kRoot);
        ASSERT_TRUE(store.ok()) << store.status();
        const auto step = (*store)->ReadStep(version);
        ASSERT_TRUE(step.ok()) << step.status();
        const auto reader = VersionReader::Open(store->get(), *step);
        ASSERT_TRUE(reader.ok()) << reader.status() << "\n"
                                 << FormatFsckReport(*report);
        std::vector<std::byte> bytes(6 * 16 * 2);
        const absl::Status read = (*reader)->Read(0, 0, bytes);
        ASSERT_TRUE(read.ok()) << read << "\n" << FormatFsckReport(*report);
        const L61Summer summer(L61Key::FromSeed((*store)->info().l61_seed));
        EXPECT_EQ(summer.Sum(0, bytes), (*reader)->state().l61.at(0));
      }
    }
  }
  EXPECT_GT(clean, 10);
  EXPECT_GT(joinable, 300);
}

// --------------------------------------------------------------- text, corpus

TEST(FsckTextTest, FindingIsOneLineWithFileAndOffset) {
  Finding finding = fsck::MakeFinding(
      fsck::Id::kPieceHash, "step_00000019/delta-r000-000.kds",
      "hash of piece 1: expected 0x1, found 0x2", 8388608);
  finding.advice = "do this";
  EXPECT_EQ(FormatFinding(finding),
            "error piece-hash step_00000019/delta-r000-000.kds:8388608: hash "
            "of piece 1: expected 0x1, found 0x2; do this");
  finding.offset.reset();
  finding.severity = FindingSeverity::kInfo;
  EXPECT_EQ(FormatFinding(finding),
            "info piece-hash step_00000019/delta-r000-000.kds: hash of piece "
            "1: expected 0x1, found 0x2; do this");
}

TEST(FsckTextTest, StatusLosesPathOffsetAndTheAdviceToRunFsck) {
  const Finding finding = fsck::FromStatus(
      fsck::Id::kHeadBad, "HEAD", "/store/HEAD",
      absl::DataLossError("HEAD: offset 56: hash: expected 1, found 2; run "
                          "`kedge fsck`"));
  EXPECT_EQ(finding.id, "head-bad");
  EXPECT_EQ(finding.offset, 56u);
  EXPECT_EQ(finding.message, "hash: expected 1, found 2");
  const Finding unreadable = fsck::FromStatus(
      fsck::Id::kHeadBad, "HEAD", "/store/HEAD",
      absl::UnavailableError("/store/HEAD: read at offset 0: EIO"));
  EXPECT_EQ(unreadable.id, "unreadable");
  EXPECT_EQ(unreadable.message, "read at offset 0: EIO");
}

TEST(FsckTextTest, FieldsHaveEverythingTheReportHas) {
  MemoryFileSystem fs = Pristine();
  Flip(fs.bytes(kSegment5), 100);
  const FsckField fields = FsckReportFields(MustCheck(fs));
  ASSERT_EQ(fields.kind, FsckField::Kind::kObject);
  std::map<std::string, FsckField> by_name;
  for (const FsckField& field : fields.members) by_name[field.name] = field;
  EXPECT_EQ(by_name["clean"].number, 0u);
  EXPECT_EQ(by_name["errors"].number, 2u);
  EXPECT_EQ(by_name["newest"].members[0].number, 5u);
  EXPECT_EQ(by_name["newest_joinable"].members[0].number, 4u);
  ASSERT_EQ(by_name["findings"].members.size(), 2u);
  const FsckField& finding = by_name["findings"].members[1];
  EXPECT_EQ(finding.members[0].text, "piece-hash");
  EXPECT_EQ(finding.members[2].text, kSegment5);
  EXPECT_EQ(finding.members[3].number, 0u);
}

TEST(FsckCorpusTest, EachBadStoreGivesTheTextItExpects) {
  const std::filesystem::path corpus =
      absl::StrCat(KEDGE_SOURCE_DIR, "/tests/corpus/bad");
  int count = 0;
  for (const auto& entry : std::filesystem::directory_iterator(corpus)) {
    SCOPED_TRACE(entry.path());
    std::ifstream file(entry.path() / "expect");
    ASSERT_TRUE(file.good());
    std::stringstream expected;
    expected << file.rdbuf();
    ASSERT_TRUE(std::filesystem::exists(entry.path() / "name"));
    FsckOptions options;
    options.store_path = (entry.path() / "store").string();
    options.deep = true;
    options.settle_seconds = 0;
    const auto report = Fsck(options);
    ASSERT_TRUE(report.ok()) << report.status();
    EXPECT_EQ(absl::StrCat(FormatFsckReport(*report), "exit ",
                           FsckExitCode(report), "\n"),
              expected.str());
    std::uint64_t bytes = 0;
    for (const auto& inner :
         std::filesystem::recursive_directory_iterator(entry.path())) {
      if (inner.is_regular_file()) bytes += inner.file_size();
    }
    EXPECT_LT(bytes, 16'000u);
    ++count;
  }
  EXPECT_GE(count, 12);
}

}  // namespace
}  // namespace kedge
