// Writes tests/corpus/bad/NAME/ anew: a damaged store, `name` (one line: what
// is broken) and `expect` (the text and exit status of fsck --deep). Run it
// after bytes or messages change, and read the difference:
//
//   make_bad PATH_OF_tests/corpus/bad
//
// Everything is deterministic: fixed run ids, seeds and times.

#include <filesystem>
#include <fstream>
#include <functional>
#include <iostream>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kedge/format/layout.h"
#include "kedge/reader/fsck.h"
#include "kedge/tests/corpus/store_forge.h"

namespace kedge {
namespace {

constexpr char kSegment3[] = "step_00000003/delta-r000-000.kds";
constexpr char kAnchor2[] = "step_00000002/anchor";
constexpr char kAnchorFile2[] = "step_00000002/anchor/anchor-r000-000.kda";

void Flip(std::vector<std::byte>& bytes, std::size_t at) {
  bytes.at(at) ^= std::byte{1};
}

struct BadStore {
  const char* directory;
  const char* name;  // what is broken
  std::function<void(MemoryFileSystem&, StoreForge&)> damage;
};

// v0 without anchor; v1, v2 with one, v3.
SmallStoreOptions Smallest(std::uint8_t run) {
  SmallStoreOptions options;
  options.run = run;
  options.two_tensors = false;
  options.steps = 3;
  options.anchors = {2};
  options.external_v0 = true;
  return options;
}

const BadStore kBadStores[] = {
    {"flipped_record", "one bit of a record is flipped",
     [](auto& fs, auto&) { Flip(fs.bytes(kSegment3), 90); }},
    {"flipped_anchor_byte", "one bit of an anchor's slice is flipped",
     [](auto& fs, auto&) { Flip(fs.bytes(kAnchorFile2), 4100); }},
    {"truncated_segment", "a segment lost its last 64 bytes",
     [](auto& fs, auto&) {
       auto& bytes = fs.bytes(kSegment3);
       bytes.resize(bytes.size() - 64);
     }},
    {"commit_without_manifest", "COMMIT stands without its MANIFEST",
     [](auto& fs, auto&) { fs.Remove("step_00000003/MANIFEST"); }},
    {"manifest_without_files", "a segment that the manifest names is missing",
     [](auto& fs, auto&) { fs.Remove(kSegment3); }},
    {"hole_in_chain", "step 1 is missing between v0 and v2",
     [](auto& fs, auto&) { fs.Remove("step_00000001"); }},
    {"other_run", "step 3 is that of another run",
     [](auto& fs, auto&) {
       const MemoryFileSystem other = [] {
         MemoryFileSystem store;
         const std::string path =
             (std::filesystem::temp_directory_path() /
              absl::StrCat("kedge_make_bad_", RandomSeed()))
                 .string();
         MakeSmallStore(Smallest(9), path);
         store = MemoryFileSystem::Load(path);
         std::filesystem::remove_all(path);
         return store;
       }();
       fs.Remove("step_00000003");
       fs.CopyFrom(other, "step_00000003", "step_00000003");
     }},
    {"replayed_step", "step 3 is step 1 under another name",
     [](auto& fs, auto&) {
       const MemoryFileSystem before = fs;
       fs.Remove("step_00000003");
       fs.CopyFrom(before, "step_00000001", "step_00000003");
     }},
    {"fork", "step 3 starts from another version 2 than the one there",
     [](auto&, auto& forge) {
       StepManifest step = forge.Step(3);
       step.base.manifest_hash.bytes.fill(0xab);
       forge.SetStep(step);
     }},
    {"fenced_step", "step 3 was published by a writer that epoch 2 fenced",
     [](auto&, auto& forge) {
       const Hash128 v2 = forge.ManifestHash("step_00000002");
       forge.SetEpoch(2, 2, v2);
       Head head = forge.GetHead();
       head.epoch = 2;
       head.step = 2;
       head.manifest_hash = v2;
       forge.SetHead(head);
     }},
    {"anchor_off_the_chain",
     "an anchor agrees with itself and not with the deltas before it",
     [](auto&, auto& forge) {
       forge.EditAnchor(2, true, [](auto& bytes) { Flip(bytes, 4100); });
     }},
    {"wrong_record_sum", "a record decodes to other changes than it claims",
     [](auto&, auto& forge) {
       StepManifest step = forge.Step(3);
       ++step.records[0].nnz;
       forge.SetStep(step);
     }},
    {"dirty_padding", "padding of a segment is not zero, with its hash",
     [](auto&, auto& forge) {
       forge.EditSegment(3, [](auto& bytes) { Flip(bytes, bytes.size() - 1); });
     }},
    {"head_ahead", "HEAD names a step that is lost",
     [](auto& fs, auto&) { fs.Remove("step_00000003"); }},
    {"wrong_digest", "the state digest after step 3 is another one",
     [](auto&, auto& forge) {
       StepManifest step = forge.Step(3);
       step.digest_after.bytes.fill(0xab);
       forge.SetStep(step);
     }},
    {"anchor_of_another_version", "an anchor names another version 2",
     [](auto&, auto& forge) {
       AnchorManifest anchor = forge.Anchor(2);
       anchor.version.manifest_hash.bytes.fill(0xab);
       forge.SetAnchor(anchor);
     }},
    {"stray_files", "names that no manifest has, and one that lost its zeros",
     [](auto& fs, auto&) {
       const std::vector<std::byte> bytes(5, std::byte{'x'});
       fs.Put(std::string(kAnchor2) + "/anchor-r000-001.kda", bytes);
       fs.Put("notes.txt", bytes);
       fs.Put("step_7/COMMIT", bytes);
     }},
};

int Main(const std::string& path) {
  const std::string scratch = path + "/scratch";
  std::filesystem::remove_all(path);
  std::filesystem::create_directories(path);
  MakeSmallStore(Smallest(7), scratch);
  MemoryFileSystem right = MemoryFileSystem::Load(scratch);
  std::filesystem::remove_all(scratch);
  // git keeps no empty directories, and a store does not need them.
  for (const char* name : {".staging", ".trash", "leases", "ranks"}) {
    right.Remove(name);
  }
  for (const BadStore& bad : kBadStores) {
    MemoryFileSystem fs = right;
    StoreForge forge(&fs);
    bad.damage(fs, forge);
    const std::string directory = absl::StrCat(path, "/", bad.directory);
    std::filesystem::create_directories(directory);
    fs.Save(directory + "/store");
    std::ofstream(directory + "/name") << bad.name << "\n";
    FsckOptions options;
    options.store_path = directory + "/store";
    options.deep = true;
    options.settle_seconds = 0;
    const auto report = Fsck(options);
    if (!report.ok()) {
      std::cerr << bad.directory << ": " << report.status() << "\n";
      return 1;
    }
    std::ofstream(directory + "/expect")
        << FormatFsckReport(*report) << "exit " << FsckExitCode(report) << "\n";
  }
  return 0;
}

}  // namespace
}  // namespace kedge

int main(int argc, char** argv) {
  if (argc != 2) {
    std::cerr << "usage: make_bad DIRECTORY (removed and written anew)\n";
    return 2;
  }
  return kedge::Main(argv[1]);
}
