// Goal: no damage to a store makes what walks it crash or hang, and what fsck
// calls clean can be read. Input: edits of a sound store, see store_edits.h.

#include <algorithm>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "kedge/engine/io/store.h"
#include "kedge/format/fixed_files.h"
#include "kedge/format/layout.h"
#include "kedge/format/limits.h"
#include "kedge/reader/fsck.h"
#include "kedge/tests/corpus/store_forge.h"
#include "kedge/tests/fuzz/fuzz_input.h"
#include "kedge/tests/fuzz/store_edits.h"
#include "kedge/tests/support/test_model.h"

namespace kedge::fuzz {
namespace {

const std::vector<MemoryFileSystem>& SoundStores() {
  static const auto* const stores = [] {
    SmallStoreOptions resumed;
    resumed.two_tensors = false;
    resumed.resume_at = 4;
    resumed.external_v0 = true;
    return new std::vector<MemoryFileSystem>{
        SmallStore(), SmallStore(resumed),
        MemoryFileSystem::Load(KEDGE_SOURCE_DIR "/tests/golden/v1/store")};
  }();
  return *stores;
}

absl::string_view BaseName(absl::string_view path) {
  return path.substr(path.rfind('/') + 1);  // npos + 1 is 0
}
std::string DirectoryName(const std::string& path) {
  const std::size_t slash = path.rfind('/');
  return slash == std::string::npos ? "" : path.substr(0, slash);
}

void ApplyEdit(Input& input, std::vector<std::string>& names,
               MemoryFileSystem& store, std::vector<std::string>& changed) {
  if (names.empty()) return;
  const std::size_t file = input.Take<std::uint8_t>() % names.size();
  const auto kind = static_cast<Edit>(input.Take<std::uint8_t>() % 8);
  const std::string name = names[file];
  std::vector<std::byte>& bytes = store.nodes[name].bytes;
  const std::size_t at = input.Take<std::uint16_t>() % (bytes.size() + 1);
  const auto count = input.Take<std::uint8_t>();
  changed.push_back(name);
  switch (kind) {
    case Edit::kOverwrite: {
      const auto with = input.TakeBytes(count);
      std::copy_n(with.begin(), std::min(with.size(), bytes.size() - at),
                  bytes.begin() + at);
      break;
    }
    case Edit::kFlip:
      if (at < bytes.size()) bytes[at] ^= std::byte{count};
      break;
    case Edit::kTruncate:
      bytes.resize(at);
      break;
    case Edit::kInsert: {
      const auto with = input.TakeBytes(count);
      bytes.insert(bytes.begin() + at, with.begin(), with.end());
      break;
    }
    case Edit::kRemove:
      store.nodes.erase(name);
      names.erase(names.begin() + file);
      break;
    case Edit::kReplace:
      bytes = std::vector(store.nodes[names[count % names.size()]].bytes);
      break;
    case Edit::kZero:
      std::fill_n(bytes.begin() + at,
                  std::min<std::size_t>(16u * count, bytes.size() - at),
                  std::byte{0});
      break;
    case Edit::kAddNumber: {
      if (bytes.size() - at < 4) break;
      std::uint32_t number;
      std::memcpy(&number, bytes.data() + at, 4);
      number += static_cast<std::uint32_t>(static_cast<std::int8_t>(count));
      std::memcpy(bytes.data() + at, &number, 4);
      break;
    }
  }
}

// Sets the last 8 of the first `size` bytes to the hash of those before.
void SealFirst(std::vector<std::byte>& bytes, std::size_t size) {
  if (bytes.size() < size || size < 8) return;
  const std::uint64_t hash =
      HashBytes64(std::span<const std::byte>(bytes).first(size - 8));
  std::memcpy(bytes.data() + size - 8, &hash, 8);
}

// Makes a damaged store agree with itself as far as it can still be parsed.
class Resealer {
 public:
  Resealer(MemoryFileSystem& store, Seal seal) : store_(store), seal_(seal) {}

  void Run(const std::vector<std::string>& changed) {
    if (seal_ == Seal::kNothing) return;
    for (const std::string& name : changed) {
      const auto node = store_.nodes.find(name);
      if (node == store_.nodes.end()) continue;
      std::vector<std::byte>& bytes = node->second.bytes;
      if (ParseDataFileName(BaseName(name)).has_value()) {
        SealFirst(bytes, kDataFileHeaderBytes);
      } else if (BaseName(name) != kManifestFileName &&
                 !absl::EndsWith(name, ".kdt")) {
        SealFirst(bytes, bytes.size());
      }
    }
    if (seal_ == Seal::kOwnHash) return;
    std::vector<std::string> manifests;
    for (const auto& [name, node] : store_.nodes) {
      if (BaseName(name) == kManifestFileName) manifests.push_back(name);
    }
    // A step comes before its anchor and before later steps.
    std::stable_sort(manifests.begin(), manifests.end(),
                     [](const std::string& a, const std::string& b) {
                       return std::pair(a.substr(0, a.find('/')), a.size()) <
                              std::pair(b.substr(0, b.find('/')), b.size());
                     });
    for (const std::string& name : manifests) SealManifest(name);
    if (seal_ == Seal::kChain) SealPointers();
  }

 private:
  std::vector<std::byte>* Find(const std::string& name) {
    const auto node = store_.nodes.find(name);
    return node == store_.nodes.end() ? nullptr : &node->second.bytes;
  }

  std::unique_ptr<TensorTable> FindTable(const Hash128& hash) {
    const auto* const bytes = Find(TensorTableFileName(hash));
    if (bytes == nullptr) return nullptr;
    auto table = TensorTable::Parse("table", *bytes);
    if (!table.ok()) return nullptr;
    return std::make_unique<TensorTable>(*std::move(table));
  }

  void Relink(Hash128& hash) {
    if (seal_ != Seal::kChain) return;
    if (const auto found = renamed_.find(hash); found != renamed_.end()) {
      hash = found->second;
    }
  }

  void SealManifest(const std::string& name) {
    std::vector<std::byte>& bytes = *Find(name);
    const std::string directory = DirectoryName(name);
    auto* const commit_bytes = Find(JoinPath(directory, kCommitFileName));
    if (commit_bytes == nullptr) return;
    auto commit = ParseCommit("COMMIT", *commit_bytes);
    if (!commit.ok()) return;
    if (BaseName(directory) == kAnchorDirectoryName) {
      if (auto anchor = ParseAnchorManifest(name, bytes); anchor.ok()) {
        Relink(anchor->version.manifest_hash);
        for (std::size_t f = 0; f < anchor->files.size(); ++f) {
          SealAnchorFile(directory, *anchor, f);
        }
        Write(anchor->table_hash, bytes, [&](const TensorTable& table) {
          return SerializeAnchorManifest(*anchor, table);
        });
      }
    } else if (auto step = ParseStepManifest(name, bytes); step.ok()) {
      Relink(step->base.manifest_hash);
      for (DataFile& file : step->files) SealSegment(directory, *step, file);
      Write(step->table_hash, bytes, [&](const TensorTable& table) {
        return SerializeStepManifest(*step, table);
      });
    }
    const Hash128 hash = HashBytes128(bytes);
    if (BaseName(directory) != kAnchorDirectoryName) {
      renamed_[commit->manifest_hash] = hash;
    }
    commit->manifest_hash = hash;
    commit->manifest_bytes = static_cast<std::uint32_t>(bytes.size());
    const auto sealed = SerializeCommit(*commit);
    commit_bytes->assign(sealed.begin(), sealed.end());
  }

  template <class Serialize>
  void Write(const Hash128& table_hash, std::vector<std::byte>& bytes,
             const Serialize& serialize) {
    const auto table = FindTable(table_hash);
    if (table == nullptr) return;
    // What breaks a rule stays as it is.
    if (auto written = serialize(*table); written.ok()) {
      bytes = *std::move(written);
    }
  }

  void SealSegment(const std::string& directory, const StepManifest& step,
                   DataFile& file) {
    const auto* const bytes = Find(JoinPath(directory, DataFileName(file.id)));
    if (bytes == nullptr) return;
    for (std::uint32_t i = 0; i < file.piece_hashes.size(); ++i) {
      const std::uint64_t at = i * kPieceBytes;
      if (at > bytes->size()) break;
      const std::uint64_t count =
          std::min({kPieceBytes, bytes->size() - at, file.bytes - at});
      file.piece_hashes[i] =
          HashPiece(step.run, step.step, file.id, i,
                    std::span<const std::byte>(*bytes).subspan(at, count));
    }
    file.hash = HashOfPieces(file.piece_hashes);
  }

  void SealAnchorFile(const std::string& directory, AnchorManifest& anchor,
                      std::size_t f) {
    DataFile& file = anchor.files[f];
    const auto* const bytes = Find(JoinPath(directory, DataFileName(file.id)));
    const auto table = FindTable(anchor.table_hash);
    if (bytes == nullptr || table == nullptr ||
        !CheckAnchorManifest("anchor", anchor, *table).ok()) {
      return;
    }
    std::vector<const AnchorSlice*> slices;
    for (const AnchorSlice& slice : anchor.slices) {
      if (slice.file == f) slices.push_back(&slice);
    }
    std::sort(slices.begin(), slices.end(), [](const auto* a, const auto* b) {
      return a->offset < b->offset;
    });
    std::uint32_t piece = 0;
    for (const AnchorSlice* slice : slices) {
      const std::uint64_t size =
          slice->slice.count() * UnitBytes((*table)[slice->tensor].dtype);
      for (std::uint64_t at = 0; at < size; at += kPieceBytes, ++piece) {
        const std::uint64_t count = std::min(kPieceBytes, size - at);
        if (slice->offset + at > bytes->size() ||
            count > bytes->size() - slice->offset - at) {
          return;
        }
        file.piece_hashes[piece] =
            HashPiece(anchor.run, anchor.version.step, file.id, piece,
                      std::span<const std::byte>(*bytes).subspan(
                          slice->offset + at, count));
      }
    }
    file.hash = HashOfPieces(file.piece_hashes);
  }

  // HEAD and the epochs name manifests.
  void SealPointers() {
    if (auto* const bytes = Find(kHeadFileName)) {
      if (auto head = ParseHead("HEAD", *bytes); head.ok()) {
        Relink(head->manifest_hash);
        const auto sealed = SerializeHead(*head);
        bytes->assign(sealed.begin(), sealed.end());
      }
    }
    for (auto& [name, node] : store_.nodes) {
      if (DirectoryName(name) != kEpochsDirectoryName) continue;
      auto epoch = ParseEpoch(name, node.bytes);
      if (!epoch.ok()) continue;
      Relink(epoch->resume_manifest_hash);
      const auto sealed = SerializeEpoch(*epoch);
      node.bytes.assign(sealed.begin(), sealed.end());
    }
  }

  MemoryFileSystem& store_;
  Seal seal_;
  std::map<Hash128, Hash128> renamed_;  // manifests, before and after
};

// Everything that readers ask of a store. Returns the newest version, if any.
std::shared_ptr<const PublishedStep> Walk(const Store& store) {
  Sink sink;
  (void)store.ReadHead();
  (void)store.ReadEpochs();
  const auto steps = store.ListSteps();
  if (steps.ok()) {
    for (const std::uint64_t number : *steps) {
      const auto step = store.ReadStep(number);
      if (!step.ok()) continue;
      KEDGE_CHECK((*step)->id.step == number);
      Require(CheckStepManifest("MANIFEST", (*step)->manifest, *(*step)->table),
              "a step that was served");
      if (const auto state = store.StateAt(*step); state.ok()) {
        KEDGE_CHECK(state->l61.size() == state->table->size());
        sink.AddBytes(state->l61);
      }
      if (store.HasAnchor(number)) {
        const auto anchor = store.ReadAnchor((*step)->id);
        if (anchor.ok()) {
          Require(CheckAnchorManifest("MANIFEST", (*anchor)->manifest,
                                      *(*anchor)->table),
                  "an anchor that was served");
        }
      }
      if (const auto chain = store.FindChain(*step, nullptr); chain.ok()) {
        for (const auto& delta : chain->deltas) sink.Add(delta->id.step);
      }
    }
  }
  const auto newest = store.Newest();
  return newest.ok() ? *newest : nullptr;
}

void CheckStore(MemoryFileSystem& fs) {
  FsckOptions options;
  options.store_path = MemoryFileSystem::kRoot;
  options.fs = &fs;
  options.deep = true;
  options.io_threads = 1;
  options.settle_seconds = 0;
  const auto report = Fsck(options);
  const auto store = Store::Open(&fs, MemoryFileSystem::kRoot);
  if (!report.ok()) {
    KEDGE_CHECK(absl::IsNotFound(report.status()) ||
                absl::IsUnimplemented(report.status()));
    KEDGE_CHECK(!store.ok());
    return;
  }
  Sink sink;
  sink.AddBytes(FormatFsckReport(*report));
  sink.AddBytes(FsckReportFields(*report).name);
  const auto newest = store.ok() ? Walk(**store) : nullptr;
  if (!report->clean()) return;
  Require(store.status(), "open a clean store");
  KEDGE_CHECK(newest != nullptr && report->newest.has_value());
  KEDGE_CHECK(newest->id == *report->newest);
  Require((*store)->StateAt(newest).status(), "the state of a clean store");
  // Whatever fsck says can be joined from an anchor is rebuilt.
  for (const FsckChain& chain : report->chains) {
    if (chain.anchors.empty()) continue;
    for (const std::uint64_t version : chain.versions) {
      if (version < chain.anchors.front()) continue;
      const auto step = (*store)->ReadStep(version);
      Require(step.status(), "read a version of a clean store");
      Require(ReadModel(**store, *step).status(), "rebuild a clean version");
    }
  }
}

}  // namespace
}  // namespace kedge::fuzz

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data,
                                      std::size_t size) {
  using namespace kedge;        // NOLINT: the whole file is one function
  using namespace kedge::fuzz;  // NOLINT
  Input input(data, size);
  const std::vector<MemoryFileSystem>& stores = SoundStores();
  MemoryFileSystem store = stores[input.Take<std::uint8_t>() % stores.size()];
  const auto seal = static_cast<Seal>(input.Take<std::uint8_t>() % 4);
  std::vector<std::string> names = store.FileNames();
  std::vector<std::string> changed;
  for (int i = 0; i < 8 && input.size() > 0; ++i) {
    ApplyEdit(input, names, store, changed);
  }
  Resealer(store, seal).Run(changed);
  CheckStore(store);
  return 0;
}
