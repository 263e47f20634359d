#ifndef KEDGE_TESTS_CORPUS_STORE_FORGE_H_
#define KEDGE_TESTS_CORPUS_STORE_FORGE_H_

// Stores in memory that tests damage: byte by byte, or so that hashes and
// commit records agree with the damage and only what they vouch for is wrong.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "kedge/engine/io/file_system.h"
#include "kedge/format/fixed_files.h"
#include "kedge/format/manifest.h"
#include "kedge/format/tensor_table.h"

namespace kedge {

// A FileSystem whose files are bytes in a map. Made for reading: what changes
// files is here for the test alone. Copies are independent.
class MemoryFileSystem final : public FileSystem {
 public:
  struct Node {
    FileType type = FileType::kRegular;
    std::vector<std::byte> bytes;
    std::int64_t modified_ns = 0;
  };
  // Paths relative to the root, which is "/s" to its users.
  std::map<std::string, Node> nodes;
  std::set<std::string> unreadable;  // EIO

  static constexpr char kRoot[] = "/s";

  // Copies a directory tree; with `Save` the other way. Both stop the test
  // program when storage fails.
  static MemoryFileSystem Load(const std::string& path);
  void Save(const std::string& path) const;

  std::vector<std::byte>& bytes(const std::string& name);
  std::vector<std::string> FileNames() const;  // regular ones
  void Put(const std::string& name, std::span<const std::byte> bytes);
  void MakeDirectories(const std::string& name);
  void Remove(const std::string& name);  // and all beneath
  void Move(const std::string& from, const std::string& to);
  // The tree of `other` at `from` comes to stand at `to`.
  void CopyFrom(const MemoryFileSystem& other, const std::string& from,
                const std::string& to);

  absl::StatusOr<std::unique_ptr<File>> OpenForRead(
      absl::string_view path) override;
  absl::StatusOr<std::vector<std::string>> List(
      absl::string_view path) override;
  absl::StatusOr<FileInfo> Stat(absl::string_view path) override;
  absl::StatusOr<StorageKind> KindOf(absl::string_view path) override;

  absl::StatusOr<std::unique_ptr<File>> CreateExclusive(
      absl::string_view path) override;
  absl::Status MakeDirectory(absl::string_view path) override;
  absl::Status Rename(absl::string_view from, absl::string_view to) override;
  absl::Status Link(absl::string_view from, absl::string_view to) override;
  absl::Status RemoveFile(absl::string_view path) override;
  absl::Status RemoveDirectory(absl::string_view path) override;
  absl::Status SyncDirectory(absl::string_view path) override;

 private:
  // Nothing if there is none.
  const Node* Find(absl::string_view path, std::string* name) const;
};

// What a forged store is made of.
struct SmallStoreOptions {
  std::uint8_t run = 1;  // every byte of the run id
  std::uint64_t seed = 1;
  bool two_tensors = true;  // else one of 192 bytes, for the smallest stores
  std::uint64_t steps = 5;
  std::set<std::uint64_t> anchors = {3};  // beside v0
  // A second writer takes over here; 0: none does.
  std::uint64_t resume_at = 0;
  bool external_v0 = false;
  // Called after every publish with the store's path.
  std::function<void(std::uint64_t step, const std::string& path)> after_step;
};
// Publishes a small store with the real writer at `path`, which is missing or
// empty. The same bytes for the same options.
void MakeSmallStore(const SmallStoreOptions& options, const std::string& path);
MemoryFileSystem SmallStore(const SmallStoreOptions& options = {});

// Reads and rewrites the parts of a store so that they agree with themselves.
// All stop the test program if the store is not sound enough for them.
class StoreForge {
 public:
  explicit StoreForge(MemoryFileSystem* fs) : fs_(*fs) {}

  StoreInfo Info() const;
  void SetInfo(const StoreInfo& info);
  Head GetHead() const;
  void SetHead(const Head& head);
  void SetEpoch(std::uint32_t epoch, std::uint64_t resume_step,
                const Hash128& hash);

  static std::string StepName(std::uint64_t step);
  static std::string AnchorName(std::uint64_t step);
  Hash128 ManifestHash(const std::string& directory) const;
  const TensorTable& Table(const Hash128& hash);

  // Replaces a manifest, its COMMIT and, if it was what HEAD names, HEAD.
  StepManifest Step(std::uint64_t step) const;
  void SetStep(const StepManifest& manifest);
  AnchorManifest Anchor(std::uint64_t step) const;
  void SetAnchor(const AnchorManifest& manifest);
  // Any bytes as MANIFEST, with a COMMIT that vouches for them.
  void SetManifestBytes(const std::string& directory,
                        const std::vector<std::byte>& bytes);

  // Change the bytes of the first segment or anchor file, then hash and commit
  // them. `sum_again` also sets the anchor's S and digest to what its bytes sum
  // to; else they stay.
  void EditSegment(std::uint64_t step,
                   const std::function<void(std::vector<std::byte>&)>& edit);
  void EditAnchor(std::uint64_t step, bool sum_again,
                  const std::function<void(std::vector<std::byte>&)>& edit);

 private:
  void Commit(const std::string& directory, std::uint64_t step,
              std::uint32_t epoch, const std::vector<std::byte>& manifest);

  MemoryFileSystem& fs_;
  std::map<Hash128, std::unique_ptr<TensorTable>> tables_;
};

}  // namespace kedge

#endif  // KEDGE_TESTS_CORPUS_STORE_FORGE_H_
