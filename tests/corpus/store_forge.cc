#include "kedge/tests/corpus/store_forge.h"

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <random>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "kedge/engine/io/errno_status.h"
#include "kedge/format/layout.h"
#include "kedge/format/limits.h"
#include "kedge/format/status.h"
#include "kedge/tests/support/fault_file_system.h"
#include "kedge/tests/support/temp_directory.h"
#include "kedge/writer/snapshot_writer.h"

namespace kedge {
namespace {

void Require(const absl::Status& status) {
  if (status.ok()) return;
  std::cerr << "store forge: " << status << "\n";
  std::abort();
}

template <class T>
T Require(absl::StatusOr<T> value) {
  Require(value.status());
  return *std::move(value);
}

absl::Status ReadOnly() {
  return absl::PermissionDeniedError("a memory file system is read-only");
}

class MemoryFile final : public File {
 public:
  MemoryFile(std::string path, const std::vector<std::byte>* bytes)
      : path_(std::move(path)), bytes_(*bytes) {}

  absl::string_view path() const override { return path_; }
  absl::StatusOr<std::size_t> ReadSome(std::uint64_t offset,
                                       std::span<std::byte> out) override {
    if (offset >= bytes_.size()) return 0;
    const std::size_t count =
        std::min<std::size_t>(out.size(), bytes_.size() - offset);
    std::memcpy(out.data(), bytes_.data() + offset, count);
    return count;
  }
  absl::StatusOr<std::size_t> WriteSome(std::uint64_t,
                                        std::span<const std::byte>) override {
    return ReadOnly();
  }
  absl::StatusOr<std::uint64_t> Size() override { return bytes_.size(); }
  absl::Status Resize(std::uint64_t) override { return ReadOnly(); }
  absl::Status Sync() override { return ReadOnly(); }
  absl::Status Close() override { return absl::OkStatus(); }
  absl::StatusOr<std::unique_ptr<MappedRegion>> Map(std::uint64_t) override {
    return absl::UnimplementedError("memory files are not mapped");
  }
  void WillRead(std::uint64_t, std::uint64_t) override {}
  void StartWriteback(std::uint64_t, std::uint64_t) override {}

 private:
  std::string path_;
  const std::vector<std::byte>& bytes_;
};

void LoadTree(FileSystem& fs, const std::string& path, const std::string& name,
              MemoryFileSystem* into) {
  for (const std::string& base : Require(fs.List(path))) {
    const std::string inner = JoinPath(path, base);
    const std::string inner_name =
        name.empty() ? base : absl::StrCat(name, "/", base);
    const FileInfo info = Require(fs.Stat(inner));
    MemoryFileSystem::Node& node = into->nodes[inner_name];
    node.type = info.type;
    node.modified_ns = info.modified_ns;
    if (info.type == FileType::kDirectory) {
      LoadTree(fs, inner, inner_name, into);
    } else if (info.type == FileType::kRegular) {
      node.bytes = Require(ReadFile(fs, inner, std::uint64_t{1} << 32));
    }
  }
}

}  // namespace

// ----------------------------------------------------------- MemoryFileSystem

MemoryFileSystem MemoryFileSystem::Load(const std::string& path) {
  MemoryFileSystem fs;
  LoadTree(*PosixFileSystem(), path, "", &fs);
  return fs;
}

void MemoryFileSystem::Save(const std::string& path) const {
  FaultFileSystem fs;  // no fsync: these are thousands of files
  Require(EnsureDirectory(fs, path));
  for (const auto& [name, node] : nodes) {
    const std::string to = JoinPath(path, name);
    if (node.type == FileType::kDirectory) {
      Require(EnsureDirectory(fs, to));
    } else {
      Require(WriteNewFile(fs, to, node.bytes));
    }
  }
}

std::vector<std::byte>& MemoryFileSystem::bytes(const std::string& name) {
  const auto node = nodes.find(name);
  if (node == nodes.end() || node->second.type != FileType::kRegular) {
    Require(absl::NotFoundError(name));
  }
  return node->second.bytes;
}

std::vector<std::string> MemoryFileSystem::FileNames() const {
  std::vector<std::string> names;
  for (const auto& [name, node] : nodes) {
    if (node.type == FileType::kRegular) names.push_back(name);
  }
  return names;
}

void MemoryFileSystem::MakeDirectories(const std::string& name) {
  for (std::size_t slash = name.find('/'); slash != std::string::npos;
       slash = name.find('/', slash + 1)) {
    nodes[name.substr(0, slash)].type = FileType::kDirectory;
  }
  nodes[name].type = FileType::kDirectory;
}

void MemoryFileSystem::Put(const std::string& name,
                           std::span<const std::byte> bytes) {
  const std::size_t slash = name.rfind('/');
  if (slash != std::string::npos) MakeDirectories(name.substr(0, slash));
  nodes[name] = {FileType::kRegular, {bytes.begin(), bytes.end()}};
}

void MemoryFileSystem::Remove(const std::string& name) {
  if (nodes.erase(name) == 0) Require(absl::NotFoundError(name));
  const std::string prefix = name + "/";
  for (auto node = nodes.lower_bound(prefix);
       node != nodes.end() && absl::StartsWith(node->first, prefix);) {
    node = nodes.erase(node);
  }
}

void MemoryFileSystem::CopyFrom(const MemoryFileSystem& other,
                                const std::string& from,
                                const std::string& to) {
  if (!other.nodes.contains(from)) Require(absl::NotFoundError(from));
  for (const auto& [name, node] : other.nodes) {
    if (name == from || absl::StartsWith(name, from + "/")) {
      nodes[to + name.substr(from.size())] = node;
    }
  }
}

void MemoryFileSystem::Move(const std::string& from, const std::string& to) {
  const MemoryFileSystem before = *this;
  Remove(from);
  CopyFrom(before, from, to);
}

const MemoryFileSystem::Node* MemoryFileSystem::Find(absl::string_view path,
                                                     std::string* name) const {
  static const Node* const root = new Node{FileType::kDirectory, {}};
  name->clear();
  if (path == kRoot) return root;
  if (!absl::ConsumePrefix(&path, absl::StrCat(kRoot, "/"))) return nullptr;
  *name = std::string(path);
  const auto node = nodes.find(*name);
  return node == nodes.end() ? nullptr : &node->second;
}

absl::StatusOr<std::unique_ptr<File>> MemoryFileSystem::OpenForRead(
    absl::string_view path) {
  std::string name;
  const Node* node = Find(path, &name);
  if (node == nullptr) return ErrnoStatus(ENOENT, "open", path);
  if (unreadable.contains(name)) return ErrnoStatus(EIO, "open", path);
  if (node->type != FileType::kRegular) {
    return absl::DataLossError(absl::StrCat(
        path, ": file type: expected a regular file, found another"));
  }
  return std::make_unique<MemoryFile>(std::string(path), &node->bytes);
}

absl::StatusOr<std::vector<std::string>> MemoryFileSystem::List(
    absl::string_view path) {
  std::string name;
  const Node* node = Find(path, &name);
  if (node == nullptr || node->type != FileType::kDirectory) {
    return ErrnoStatus(ENOENT, "opendir", path);
  }
  if (unreadable.contains(name)) return ErrnoStatus(EIO, "opendir", path);
  std::vector<std::string> names;
  const std::string prefix = name.empty() ? name : name + "/";
  for (auto at = nodes.lower_bound(prefix);
       at != nodes.end() && absl::StartsWith(at->first, prefix); ++at) {
    const std::string base = at->first.substr(prefix.size());
    if (base.find('/') == std::string::npos) names.push_back(base);
  }
  return names;
}

absl::StatusOr<FileInfo> MemoryFileSystem::Stat(absl::string_view path) {
  std::string name;
  const Node* node = Find(path, &name);
  if (node == nullptr) return ErrnoStatus(ENOENT, "lstat", path);
  FileInfo info;
  info.type = node->type;
  info.bytes = node->bytes.size();
  info.modified_ns = node->modified_ns;
  return info;
}

absl::StatusOr<StorageKind> MemoryFileSystem::KindOf(absl::string_view) {
  return StorageKind::kLocal;
}
absl::StatusOr<std::unique_ptr<File>> MemoryFileSystem::CreateExclusive(
    absl::string_view) {
  return ReadOnly();
}
absl::Status MemoryFileSystem::MakeDirectory(absl::string_view) {
  return ReadOnly();
}
absl::Status MemoryFileSystem::Rename(absl::string_view, absl::string_view) {
  return ReadOnly();
}
absl::Status MemoryFileSystem::Link(absl::string_view, absl::string_view) {
  return ReadOnly();
}
absl::Status MemoryFileSystem::RemoveFile(absl::string_view) {
  return ReadOnly();
}
absl::Status MemoryFileSystem::RemoveDirectory(absl::string_view) {
  return ReadOnly();
}
absl::Status MemoryFileSystem::SyncDirectory(absl::string_view) {
  return ReadOnly();
}

// ----------------------------------------------------------------- SmallStore

void MakeSmallStore(const SmallStoreOptions& options, const std::string& path) {
  std::mt19937_64 random(options.seed);
  std::vector<std::uint16_t> weights(options.two_tensors ? 24 * 16 : 96);
  for (auto& w : weights) w = static_cast<std::uint16_t>(random());
  std::vector<float> bias(21);
  for (auto& b : bias) b = static_cast<float>(random() % 1000) / 8;
  std::vector<TrainerTensor> tensors;
  const auto add = [&](const char* name, DType dtype,
                       std::vector<std::uint64_t> shape, const void* data,
                       const char* tied_to = "") {
    TrainerTensor tensor;
    tensor.name = name;
    tensor.dtype = dtype;
    tensor.shape = std::move(shape);
    tensor.data = data;
    tensor.tied_to = tied_to;
    tensors.push_back(std::move(tensor));
  };
  add("layer.weight", DType::kBf16, {weights.size() / 16, 16}, weights.data());
  if (options.two_tensors) {
    add("layer.bias", DType::kF32, {21}, bias.data());
    add("tied", DType::kF32, {21}, bias.data(), "layer.bias");
  }
  FaultFileSystem no_sync;  // nobody cuts the power here
  WriterOptions writer_options;
  writer_options.store_path = path;
  writer_options.fs = &no_sync;
  writer_options.io_threads = 1;
  writer_options.encode_threads = 1;
  InitOptions init;
  init.run.emplace();
  init.run->bytes.fill(options.run);
  init.l61_seed = 0x1234'5678 + options.run;
  init.created_unix_seconds = 1'700'000'000;
  init.metadata = {{"format", "pt"}};
  init.external_v0 = options.external_v0;
  std::unique_ptr<SnapshotWriter> writer =
      Require(SnapshotWriter::Create(writer_options, init, tensors));
  for (std::uint64_t step = 1; step <= options.steps; ++step) {
    for (int i = 0; i < 9; ++i) weights[random() % weights.size()] += 1 + i % 3;
    if (step != 2) bias[random() % bias.size()] *= 1.5f;
    PublishOptions publish;
    publish.anchor = options.anchors.contains(step);
    const PublishResult result = Require(writer->Publish(step, publish));
    Require(result.anchor_status);
    if (options.after_step) options.after_step(step, path);
    if (options.resume_at == step) {
      writer.reset();
      writer = Require(SnapshotWriter::Open(writer_options, tensors));
    }
  }
}

MemoryFileSystem SmallStore(const SmallStoreOptions& options) {
  const TempDirectory directory;
  const std::string path = directory.Join("store");
  MakeSmallStore(options, path);
  return MemoryFileSystem::Load(path);
}

// ----------------------------------------------------------------- StoreForge

StoreInfo StoreForge::Info() const {
  return Require(ParseStore("STORE", fs_.bytes(kStoreFileName)));
}
void StoreForge::SetInfo(const StoreInfo& info) {
  fs_.Put(kStoreFileName, SerializeStore(info));
}
Head StoreForge::GetHead() const {
  return Require(ParseHead("HEAD", fs_.bytes(kHeadFileName)));
}
void StoreForge::SetHead(const Head& head) {
  fs_.Put(kHeadFileName, SerializeHead(head));
}
void StoreForge::SetEpoch(std::uint32_t epoch, std::uint64_t resume_step,
                          const Hash128& hash) {
  EpochInfo info;
  info.run = Info().run;
  info.epoch = epoch;
  info.resume_step = resume_step;
  info.resume_manifest_hash = hash;
  fs_.Put(absl::StrCat("epochs/", EpochFileName(epoch)), SerializeEpoch(info));
}

std::string StoreForge::StepName(std::uint64_t step) {
  return StepDirectoryName(step);
}
std::string StoreForge::AnchorName(std::uint64_t step) {
  return absl::StrCat(StepDirectoryName(step), "/", kAnchorDirectoryName);
}

Hash128 StoreForge::ManifestHash(const std::string& directory) const {
  return HashBytes128(fs_.bytes(directory + "/MANIFEST"));
}

const TensorTable& StoreForge::Table(const Hash128& hash) {
  std::unique_ptr<TensorTable>& table = tables_[hash];
  if (table == nullptr) {
    const std::string name = TensorTableFileName(hash);
    table = std::make_unique<TensorTable>(
        Require(TensorTable::Parse(name, fs_.bytes(name))));
  }
  return *table;
}

void StoreForge::Commit(const std::string& directory, std::uint64_t step,
                        std::uint32_t epoch,
                        const std::vector<std::byte>& manifest) {
  CommitRecord commit;
  commit.run = Info().run;
  commit.step = step;
  commit.epoch = epoch;
  commit.manifest_bytes = static_cast<std::uint32_t>(manifest.size());
  commit.manifest_hash = HashBytes128(manifest);
  fs_.Put(directory + "/MANIFEST", manifest);
  fs_.Put(directory + "/COMMIT", SerializeCommit(commit));
}

StepManifest StoreForge::Step(std::uint64_t step) const {
  return Require(
      ParseStepManifest("MANIFEST", fs_.bytes(StepName(step) + "/MANIFEST")));
}

void StoreForge::SetStep(const StepManifest& manifest) {
  const std::string directory = StepName(manifest.step);
  const Hash128 before = ManifestHash(directory);
  Commit(directory, manifest.step, manifest.epoch,
         Require(SerializeStepManifest(manifest, Table(manifest.table_hash))));
  if (!fs_.nodes.contains(kHeadFileName)) return;
  Head head = GetHead();
  if (head.step == manifest.step && head.manifest_hash == before) {
    head.manifest_hash = ManifestHash(directory);
    SetHead(head);
  }
}

AnchorManifest StoreForge::Anchor(std::uint64_t step) const {
  return Require(ParseAnchorManifest(
      "MANIFEST", fs_.bytes(AnchorName(step) + "/MANIFEST")));
}

void StoreForge::SetAnchor(const AnchorManifest& manifest) {
  Commit(
      AnchorName(manifest.version.step), manifest.version.step, manifest.epoch,
      Require(SerializeAnchorManifest(manifest, Table(manifest.table_hash))));
}

void StoreForge::SetManifestBytes(const std::string& directory,
                                  const std::vector<std::byte>& bytes) {
  const CommitRecord before =
      Require(ParseCommit("COMMIT", fs_.bytes(directory + "/COMMIT")));
  Commit(directory, before.step, before.epoch, bytes);
}

void StoreForge::EditSegment(
    std::uint64_t step,
    const std::function<void(std::vector<std::byte>&)>& edit) {
  StepManifest manifest = Step(step);
  DataFile& file = manifest.files.front();
  std::vector<std::byte>& bytes =
      fs_.bytes(absl::StrCat(StepName(step), "/", DataFileName(file.id)));
  edit(bytes);
  for (std::uint32_t i = 0; i < file.piece_hashes.size(); ++i) {
    const std::uint64_t begin = i * kPieceBytes;
    file.piece_hashes[i] = HashPiece(
        manifest.run, step, file.id, i,
        std::span(bytes).subspan(
            begin, std::min<std::uint64_t>(kPieceBytes, bytes.size() - begin)));
  }
  file.hash = HashOfPieces(file.piece_hashes);
  SetStep(manifest);
}

void StoreForge::EditAnchor(
    std::uint64_t step, bool sum_again,
    const std::function<void(std::vector<std::byte>&)>& edit) {
  AnchorManifest manifest = Anchor(step);
  const TensorTable& table = Table(manifest.table_hash);
  DataFile& file = manifest.files.front();
  std::vector<std::byte>& bytes =
      fs_.bytes(absl::StrCat(AnchorName(step), "/", DataFileName(file.id)));
  edit(bytes);
  const L61Key key = L61Key::FromSeed(Info().l61_seed);
  std::vector<std::uint64_t> sums(table.size());
  std::uint32_t piece = 0;
  for (const AnchorSlice& slice : manifest.slices) {
    const std::uint32_t unit_bytes = UnitBytes(table[slice.tensor].dtype);
    const auto data = std::span(bytes).subspan(
        slice.offset, slice.slice.count() * unit_bytes);
    for (std::uint64_t at = 0; at < data.size(); at += kPieceBytes) {
      file.piece_hashes[piece] = HashPiece(
          manifest.run, step, file.id, piece,
          data.subspan(at,
                       std::min<std::uint64_t>(kPieceBytes, data.size() - at)));
      ++piece;
    }
    sums[slice.tensor] =
        L61Add(sums[slice.tensor],
               L61SumScalar(key, slice.slice.begin * unit_bytes, data));
  }
  file.hash = HashOfPieces(file.piece_hashes);
  if (sum_again) {
    for (std::size_t i = 0; i < table.size(); ++i) {
      if (table[i].tied_to != kNotTied) sums[i] = sums[table[i].tied_to];
    }
    manifest.l61 = sums;
    manifest.digest = table.StateDigest(sums);
  }
  SetAnchor(manifest);
}

}  // namespace kedge
